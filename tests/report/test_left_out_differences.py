"""Methods beside the first one, on left-out data sets and over seeds: all numbers against plain loops over the runs."""

import itertools
import json
import math
import random

import pytest
from scipy import stats

from fedsim.core.errors import ConfigError
from fedsim.report import group_runs, report
from fedsim.report.costs import left_out_work
from fedsim.report.leave_one_out import left_out_differences, named_methods
from fedsim.report.runs import Rule
from run_dirs import scores_of, write_log, write_run

SETS, SEEDS = ("a", "b"), (0, 1, 2)
METHODS = {"FedPav": "global", "Local": "personalised", "SSCU": "global"}
"""method -> the model that it delivers"""


def write_rotation(folder, method, name, seed, rank1, work=(100.0, 10.0), digest="1"):
    """A run without a data set: its first evaluation is the best by held-out people, its second one the last."""
    kind = METHODS[method]
    config = {"seed_everything": seed, "data": {"unseen": [name], "val": "identities"},
              "model": {"method": {"class_path": method}}}  # fmt: skip
    best = scores_of(rank1, kind, **{"val/mAP": 0.6})
    last = scores_of(dict.fromkeys(rank1, 0.01), kind, **{"val/mAP": 0.5})
    write_run(
        folder, {1: best, 2: last}, config=config, method=method, seed=seed, unseen=[name], primary=kind,
        best={"round": 1, "metrics": best}, data={"digest": digest, "sets": {}},
    )  # fmt: skip
    counts = {"train/clients": 1, "train/images": work[0], "train/steps": work[1]}
    write_log(folder / "metrics.csv", [(1, counts | best), (2, counts | last)])
    return folder


@pytest.fixture
def drawn(tmp_path):
    """Three methods, two data sets, three seeds: the runs' folders, and rank-1 at home and away by run."""
    draw, folders, scores = random.Random(0), {}, {}
    for method, name, seed in itertools.product(METHODS, SETS, SEEDS):
        home, away = draw.randint(1, 99) / 100, draw.randint(1, 99) / 100
        work = (300.0, 10.0) if method == "SSCU" else (100.0, 10.0)
        scores[method, name, seed] = home, away
        folders[method, name, seed] = write_rotation(
            tmp_path / f"{method}-{name}-{seed}", method, name, seed, {"seen": home, name: away}, work
        )
    return folders, scores


def methods_in(folders):
    return named_methods(group_runs(list(folders)), "--left_out")


def student(values):
    """Mean, and ends of Student's interval; p that the mean is 0."""
    mean = sum(values) / len(values)
    error = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))
    half = stats.t.ppf(0.975, len(values) - 1) * error
    return mean, mean - half, mean + half, 2 * stats.t.sf(abs(mean / error), len(values) - 1)


def means_over(scores, method, names, place):
    """The means over data sets, seed by seed."""
    return [sum(scores[method, name, seed][place] for name in names) / len(names) for seed in SEEDS]


def test_each_number_is_that_of_plain_loops(drawn):
    folders, scores = drawn
    block = left_out_differences(methods_in(folders.values()), "rank1", Rule(name="best"))
    assert block.headers[6] == "less FedPav"
    lines = {tuple(line[:3]): line[4:] for line in block.lines}
    assert len(lines) == len(block.lines) == 3 * (2 + 1)
    chances = {}
    for method, kind in METHODS.items():
        for title, names in {"a": ["a"], "b": ["b"], "mean": ["a", "b"]}.items():
            mean, interval, gain, of_gain, p, _, drop = lines[method, kind, title]
            away, home = (means_over(scores, method, names, place) for place in (1, 0))
            value, low, high, _ = student(away)
            assert mean == f"{100 * value:.1f}"
            assert interval == f"{100 * low:.1f} to {100 * high:.1f}"
            drops = [100 * (h - a) for h, a in zip(home, away, strict=True)]
            value, low, _, _ = student(drops)
            assert drop == f"{value:.1f}+-{math.sqrt(sum((d - value) ** 2 for d in drops) / 2):.1f}"
            if method == "FedPav":
                assert (gain, of_gain, p) == ("", "", "")
                continue
            gains = [a - b for a, b in zip(away, means_over(scores, "FedPav", names, 1), strict=True)]
            value, low, high, chance = student(gains)
            assert gain == f"{100 * value:+.1f}"
            assert of_gain == f"{100 * low:.1f} to {100 * high:.1f}"
            assert p == (f"{chance:.3f}" if title == "mean" else "")
            if title == "mean":
                chances[method] = chance
    smallest, largest = sorted(chances, key=chances.get)
    corrected = {smallest: min(1.0, 2 * chances[smallest])}
    corrected[largest] = max(corrected[smallest], chances[largest])
    for method, chance in corrected.items():
        assert lines[method, METHODS[method], "mean"][5] == f"{chance:.3f}"


def test_the_round_is_that_of_the_rule(drawn):
    folders, _ = drawn
    block = left_out_differences(methods_in(folders.values()), "rank1", Rule(name="last"))
    assert {line[4] for line in block.lines} == {"1.0"}
    assert {line[10] for line in block.lines} == {"0.0+-0.0"}


def test_a_missing_run_is_named(drawn):
    folders, _ = drawn
    for (method, name, seed), folder in folders.items():
        others = [other for other in folders.values() if other != folder]
        with pytest.raises(ConfigError, match=f"{method} has no run without {name} with seed {seed}, and"):
            left_out_differences(methods_in(others), "mAP", Rule(name="best"))


def test_a_method_with_other_seeds_is_named(drawn):
    folders, _ = drawn
    some = [folder for (method, _, seed), folder in folders.items() if method != "SSCU" or seed > 0]
    with pytest.raises(ConfigError, match="SSCU has no run without a with seed 0"):
        left_out_differences(methods_in(some), "mAP", Rule(name="best"))
    single = [folder for (_, _, seed), folder in folders.items() if seed == 1]
    with pytest.raises(ConfigError, match="all runs have seed 1, and an interval needs two seeds or more"):
        left_out_differences(methods_in(single), "mAP", Rule(name="best"))


def test_runs_on_other_data_are_no_pair(drawn):
    folders, _ = drawn
    for seed in SEEDS:
        path = folders["Local", "b", seed] / "summary.json"
        path.write_text(path.read_text().replace('"digest": "1"', '"digest": "2"'))
        if seed == 0:
            with pytest.raises(ConfigError, match=r"Local-b-0 and .*Local-b-1 differ in the data; omit one of them"):
                methods_in(folders.values())
    with pytest.raises(ConfigError, match="Local without b with seed 0 was trained or tested on other data"):
        left_out_differences(methods_in(folders.values()), "mAP", Rule(name="best"))


def test_a_run_without_the_score_is_named(drawn):
    folders, _ = drawn
    path = folders["Local", "b", 1] / "summary.json"
    summary = json.loads(path.read_text())
    summary["best"]["metrics"] = {"val/mAP": 0.6}
    path.write_text(json.dumps(summary))
    with pytest.raises(ConfigError, match="without b with seed 1 has no test/personalised/b/rank1 by --rule best"):
        left_out_differences(methods_in(folders.values()), "rank1", Rule(name="best"))


def test_unequal_work_is_said_for_each_data_set(drawn):
    folders, _ = drawn
    block = left_out_work(methods_in(folders.values()))
    assert block.lines == [
        ["FedPav", "200 / 20", "200 / 20"], ["Local", "200 / 20", "200 / 20"], ["SSCU", "600 / 20", "600 / 20"],
    ]  # fmt: skip
    assert block.notes[1:] == ["NOT EQUAL WORK: SSCU and FedPav, without a, b; this may change scores"]
    some = [folder for (method, name, _), folder in folders.items() if (method, name) != ("Local", "b")]
    assert left_out_work(methods_in(some)).lines[1] == ["Local", "200 / 20", "-"]


def test_names_of_the_user_are_those_of_methods(drawn, tmp_path):
    folders, _ = drawn
    runs = [f"the {method}={folder}" for (method, *_), folder in folders.items()]
    page = tmp_path / "page.html"
    text = report(runs, left_out=True, significance=True, html=str(page))
    rows = [line for line in text.partition("\n\n")[0].splitlines()[2:] if line.strip()]
    assert [row.split()[:2] for row in rows] == [["the", method] for method in METHODS]
    assert "less the FedPav" in text
    assert "NOT EQUAL WORK: the SSCU and the FedPav, without a, b" in text
    for title in ("Left-out data sets", "Differences to the first method", "less the FedPav", "Work"):
        assert title in page.read_text()
    assert "the FedPav, data.unseen [&#39;a&#39;]" in page.read_text()
    with pytest.raises(ConfigError, match=r"Mine names runs with different settings \(model.method"):
        report([f"Mine={folder}" for folder in folders.values()], left_out=True)
    with pytest.raises(ConfigError, match=r"Mine names runs with different settings \(data.unseen"):
        report([f"Mine={folders['FedPav', name, 0]}" for name in SETS])
