"""Whether methods differ: intervals and tests against plain loops, and against draws whose law is known."""

import itertools
import json

import numpy as np
import pytest
from scipy import stats

from fedsim.__main__ import main
from fedsim.report import group_runs
from fedsim.report.scores import differences_table, intervals_table
from fedsim.report.significance import over_people, over_seeds
from run_dirs import scores_of, write_run


def bootstrap_by_loops(values, pids, draws=4000):
    """Draw people, not queries, and look at the middle 95 % of the means."""
    rng = np.random.default_rng(1)
    people = sorted(set(pids.tolist()))
    means = []
    for _ in range(draws):
        taken = []
        for person in rng.choice(people, size=len(people)):
            taken += [v for v, pid in zip(values, pids, strict=True) if pid == person and not np.isnan(v)]
        means.append(sum(taken) / len(taken))
    return np.percentile(means, [2.5, 97.5])


def test_intervals_are_those_of_plain_loops():
    rng = np.random.default_rng(0)
    pids = np.repeat(np.arange(30), 4)
    values = np.clip(np.repeat(rng.random(30), 4) + 0.1 * rng.standard_normal(120), 0, 1)
    values[7] = np.nan
    found = over_people(values, pids)
    assert found.value == pytest.approx(np.nanmean(values))
    assert (found.low, found.high) == pytest.approx(tuple(bootstrap_by_loops(values, pids)), abs=0.01)
    narrow = over_people(values, np.arange(120))  # as if no query had to do with another one
    assert narrow.high - narrow.low < 0.7 * (found.high - found.low)
    assert found.over == "30 people, 119 queries"


def signs_by_loops(differences, pids):
    """All changes of sign of all people."""
    sums = [differences[pids == person].sum() for person in sorted(set(pids.tolist()))]
    observed = abs(sum(sums))
    all_signs = list(itertools.product((-1, 1), repeat=len(sums)))
    return np.mean([abs(np.dot(signs, sums)) >= observed - 1e-12 for signs in all_signs])


def test_a_test_over_people_is_the_plain_loop():
    rng = np.random.default_rng(0)
    pids = np.repeat(np.arange(9), 3)
    for shift in (0.0, 0.2, 1.0):
        differences = np.repeat(rng.standard_normal(9), 3) + shift
        assert over_people(differences, pids, test=True).p == pytest.approx(signs_by_loops(differences, pids))


def test_equal_models_do_not_differ():
    found = over_people(np.zeros(12), np.repeat(np.arange(6), 2), test=True)
    assert (found.value, found.low, found.high, found.p) == (0, 0, 0, 1)
    seeds = over_seeds(np.array([0.5, 0.6]), np.array([0.5, 0.6]))
    assert (seeds.value, seeds.p) == (0, 1)
    without_spread = over_seeds(np.array([0.5, 0.5]), np.array([0.25, 0.25]))
    assert np.isnan(without_spread.p), "no spread: no test"
    assert np.isnan([seeds.low, seeds.high, without_spread.low, without_spread.high]).all(), "nor an interval"


def test_seeds_are_compared_in_pairs():
    first, second = np.array([0.50, 0.40, 0.61]), np.array([0.48, 0.37, 0.60])
    found = over_seeds(first, second)
    difference = first - second
    error = difference.std(ddof=1) / np.sqrt(3)
    reach = stats.t.ppf(0.975, 2) * error
    assert found.value == pytest.approx(difference.mean())
    assert (found.low, found.high) == pytest.approx((difference.mean() - reach, difference.mean() + reach))
    assert found.p == pytest.approx(2 * stats.t.sf(difference.mean() / error, 2))
    assert found.p < stats.ttest_ind(first, second).pvalue / 4, "unpaired, the spread over seeds hides it"


def write(folder, seed, scores, pids, **summary):
    """A run whose last evaluation has these scores of single queries."""
    mean = float(np.mean(scores))
    run = write_run(folder, {1: scores_of({"a": mean, "seen": mean})}, seed=seed, **summary)
    arrays = {"global/a/mAP": scores, "global/a/rank1": scores, "global/a/cmc": np.ones(3)}
    np.savez(run / "queries.npz", round=1, **arrays, **{"a/pids": pids, "a/splits": np.array([len(pids)])})
    return run


def write_two_methods(folder, seeds=(0, 1, 2)):
    rng, pids = np.random.default_rng(0), np.repeat(np.arange(8), 2)
    people = np.repeat(rng.random(8), 2) / 2
    runs = []
    for method, gain in (("FedPav", 0.1), ("Local", 0.0)):
        for seed in seeds:
            scores = people + gain + 0.01 * seed * (1 + gain)
            runs.append(write(folder / f"{method}{seed}", seed, scores, pids, method=method, fingerprint=method))
    return runs


def test_on_unseen_data_the_global_model_is_compared_and_named(tmp_path):
    """SKA delivers each client's own model, which no unseen data set has scores of."""
    rng, pids, groups = np.random.default_rng(0), np.repeat(np.arange(8), 2), []
    for method, primary in (("SKA", "personalised"), ("FedPav", "global")):
        for seed in (0, 1):
            queries = rng.random(16)
            final = scores_of({"a": 0.5 + 0.01 * seed}, primary) | scores_of({"new0": float(queries.mean())})
            run = write_run(
                tmp_path / f"{method}{seed}", {1: final}, seed=seed, method=method, fingerprint=method,
                primary=primary, unseen=["new0"],
            )  # fmt: skip
            arrays = {"new0/pids": pids, "new0/splits": np.array([16]), "global/new0/rank1": queries}
            np.savez(run / "queries.npz", round=1, **arrays, **{"global/new0/cmc": np.ones(3)})
            groups.append(run)
    groups = group_runs(groups)
    lines = {(line[1], line[-1]): line[0] for line in differences_table(groups, ["a", "new0"], ["rank1"]).lines}
    assert lines == {
        ("a", "2 seeds"): "SKA - FedPav",
        ("new0", "2 seeds"): "SKA, global - FedPav",
        ("new0", "8 people, 16 queries"): "SKA, global - FedPav",
    }
    intervals = intervals_table(groups, ["new0"], ["rank1"])
    assert [line[:3] for line in intervals.lines] == [["SKA", "global", "new0"], ["FedPav", "global", "new0"]]


def test_tables_name_both_ways_of_testing(tmp_path, capsys):
    runs = write_two_methods(tmp_path)
    groups = group_runs(runs)
    block = differences_table(groups, ["a", "seen"], ["rank1"])
    lines = {(line[1], line[-1]): line for line in block.lines}
    assert set(lines) == {("a", "3 seeds"), ("a", "8 people, 16 queries"), ("seen", "3 seeds")}
    over = lines["a", "8 people, 16 queries"]
    assert over[:4] == ["FedPav - Local", "a", "rank1", "+10.1"]
    assert float(over[5]) == pytest.approx(2 / 2**8, abs=1e-3)
    chances, adjusted = ([float(line[i].removeprefix("< ")) for line in block.lines] for i in (5, 6))
    assert all(more >= less for less, more in zip(chances, adjusted, strict=True))
    intervals = intervals_table(groups, ["a", "seen"], ["rank1"])
    assert [line[:4] for line in intervals.lines] == [[name, "global", "a", "rank1"] for name in ("FedPav", "Local")]
    assert main(["report", *map(str, runs), "--significance", "--metric", "rank1"]) == 0
    text = capsys.readouterr().out
    assert "Benjamini and Hochberg" in text
    assert "8 people, 16 queries" in text


def test_a_report_twice_has_the_same_numbers(tmp_path):
    values, pids = np.random.default_rng(3).standard_normal(90), np.repeat(np.arange(30), 3)
    assert over_people(values, pids, test=True) == over_people(values, pids, test=True)
    groups = group_runs(write_two_methods(tmp_path, seeds=(0,)))
    first, second = (differences_table(groups, ["a"], ["mAP"]).lines for _ in range(2))
    assert first == second
    assert [line[-1] for line in first] == ["8 people, 16 queries"]


def test_what_cannot_be_tested_is_said(tmp_path):
    alone = group_runs(write_two_methods(tmp_path, seeds=(0,))[:1])
    assert differences_table(alone, ["a"], ["mAP"]).notes == ("a test needs two methods",)
    without = [write_run(tmp_path / name, {1: scores_of({"a": 0.5})}, method=name) for name in ("A", "B")]
    groups = group_runs(without)
    assert "a test needs two seeds" in differences_table(groups, ["a"], ["mAP"]).notes[0]
    assert any("has no scores of single queries" in note for note in intervals_table(groups, ["a"], ["mAP"]).notes)


def test_other_images_are_no_pairs(tmp_path):
    one = write(tmp_path / "one", 0, np.full(4, 0.5), np.array([1, 1, 2, 2]), method="A")
    other = write(tmp_path / "other", 0, np.full(4, 0.4), np.array([1, 1, 3, 3]), method="B")
    assert differences_table(group_runs([one, other]), ["a"], ["mAP"]).lines == []


def test_random_splits_have_no_interval_over_people(tmp_path):
    run = write(tmp_path / "run", 0, np.full(4, 0.5), np.array([1, 2, 1, 3]))
    arrays = dict(np.load(run / "queries.npz"))
    np.savez(run / "queries.npz", **(arrays | {"a/splits": np.array([2, 2])}))
    block = intervals_table(group_runs([run]), ["a"], ["mAP"])
    assert not block.lines
    assert any("2 random splits of the same images" in note for note in block.notes)


def test_the_last_evaluation_is_tested(tmp_path):
    run = write(tmp_path / "run", 0, np.full(4, 0.5), np.array([1, 1, 2, 2]))
    summary = json.loads((run / "summary.json").read_text())
    summary["final"]["round"] = 2
    (run / "summary.json").write_text(json.dumps(summary))
    assert not intervals_table(group_runs([run]), ["a"], ["mAP"]).lines
