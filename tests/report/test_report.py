"""Rules of reporting, convergence and fairness, against plain loops over the logged rounds."""

import json
import math
import random
import re

import numpy as np
import pytest
import yaml

from fedsim.__main__ import main
from fedsim.report import group_runs, report
from fedsim.report.costs import first_reaching
from fedsim.report.layout import Block
from fedsim.report.leave_one_out import choice_of
from fedsim.report.runs import Rule, read_run
from run_dirs import METRICS, scores_of, training, with_mean, write_log, write_run
from small import refuse

SETS = ("market1501", "cuhk03np", "viper")


def draw_evaluations(seed, rounds):
    draw = random.Random(seed)
    # few distinct values, so that rounds tie
    return {r: scores_of(with_mean({name: draw.randint(1, 4) / 8 for name in SETS})) for r in rounds}


def best3_by_loops(evaluations, sets, horizon):
    """Three times: look for the round with the highest mean rank-1 that has not been taken; then average."""
    taken = []
    for _ in range(3):
        best, best_score = None, -1.0
        for round_ in sorted(evaluations):
            if round_ > horizon or round_ in taken:
                continue
            score = 0.0
            for name in sets:
                score += evaluations[round_][f"test/global/{name}/rank1"]
            score /= len(sets)
            if score > best_score:
                best, best_score = round_, score
        taken.append(best)
    means = {}
    for name in SETS:
        for metric in METRICS:
            key = f"test/global/{name}/{metric}"
            means[key] = (evaluations[taken[0]][key] + evaluations[taken[1]][key] + evaluations[taken[2]][key]) / 3
    return taken, means


@pytest.mark.parametrize("seed", range(8))
def test_best3_is_the_plain_loop(seed, tmp_path):
    evaluations = draw_evaluations(seed, range(10, 130, 10))
    run = read_run(write_run(tmp_path / "run", evaluations, rounds=125))
    for given, sets in (((), ("market1501", "cuhk03np")), (("viper",), ("viper",)), (SETS, SETS)):
        for horizon in (30, 75, 300):
            rule = Rule(name="best3", sets=given, horizon=horizon)
            rounds, means = best3_by_loops(evaluations, sets, horizon)
            assert rule.chosen(run) == rounds
            found = rule.scores(run)
            assert {key: found[key] for key in means} == pytest.approx(means, abs=1e-15)


def test_variants_of_a_method_have_names_of_their_own(tmp_path):
    evaluations = draw_evaluations(0, (10, 20))
    folders = []
    for name, weighting, lr in (("a/x", "size", 1), ("b/x", "cdw", 1), ("c", "cdw", 2)):
        folder = write_run(tmp_path / name, evaluations, rounds=20)
        summary = json.loads((folder / "summary.json").read_text())
        (folder / "summary.json").write_text(json.dumps(summary | {"method": "FedPav", "fingerprint": name}))
        method = {"class_path": "FedPav", "init_args": {"weighting": weighting}}
        config = {"model": {"method": method, "client": {"lr": lr}}}
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        folders.append(folder)
    assert [group.label for group in group_runs(folders[:1])] == ["FedPav"]
    assert [group.label for group in group_runs(folders[:2])] == ["FedPav weighting size", "FedPav weighting cdw"]
    assert [group.label for group in group_runs(folders)] == [
        "FedPav weighting size, lr 1",
        "FedPav weighting cdw, lr 1",
        "FedPav weighting cdw, lr 2",
    ]


def test_curves_have_a_picture_per_test_set(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run", draw_evaluations(0, (10, 20, 30)), rounds=30)
    drawn = []
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda figure, path, **how: path.touch() or drawn.append(figure)
    )
    assert "wrote" in report([str(folder)], curves=str(tmp_path / "curves.png"))
    [figure] = drawn
    assert (tmp_path / "curves.png").exists()
    run = read_run(folder)
    pictures = {axes.get_title(): axes.lines for axes in figure.axes if axes.lines}
    assert list(pictures) == [*SETS, "mean seen", *(["mean unseen"] if "unseen" in run.test_sets else [])]
    for name in SETS:
        [line] = pictures[name]
        expected = [100 * run.log[r][f"test/{run.primary}/{name}/mAP"] for r in (10, 20, 30)]
        assert (list(line.get_xdata()), list(line.get_ydata())) == ([10, 20, 30], pytest.approx(expected))


def test_without_the_large_sets_all_seen_ones_choose(tmp_path):
    evaluations = {r: scores_of({"town0": 0.1 * r, "town1": 0.3, "new0": 0.9 - 0.1 * r}) for r in (1, 2, 3, 4)}
    run = read_run(write_run(tmp_path / "run", evaluations, unseen=["new0"]))
    assert Rule(name="best3").choosing_sets(run) == ["town0", "town1"]
    assert Rule(name="best3").chosen(run) == [4, 3, 2]


def test_a_score_that_is_no_number_is_never_the_best(tmp_path):
    nan = float("nan")
    for scores, three in (([nan, 0.2, 0.4, 0.3], [3, 4, 2]), ([0.2, 0.4, 0.3, nan], [2, 3, 1])):
        evaluations = {r: scores_of({"viper": score}) for r, score in enumerate(scores, 1)}
        run = read_run(write_run(tmp_path / f"run{three[0]}", evaluations))
        assert Rule(name="best3").chosen(run) == three
        assert Rule(name="oracle").scores(run)["test/global/viper/rank1"] == 0.4


@pytest.mark.parametrize("place", range(3))
def test_the_highest_score_is_never_one_that_is_no_number(place, tmp_path, capsys):
    scores = [0.25, 0.5]
    scores.insert(place, float("nan"))
    evaluations = {r: scores_of({"viper": score, "seen": score}) for r, score in enumerate(scores, 1)}
    run = write_run(tmp_path / "run", evaluations, unseen=[])
    assert main(["report", str(run), "--target", "rank1=90"]) == 0
    assert re.search(r"FedPav .* 50\.0\s*$", capsys.readouterr().out, re.MULTILINE)
    [group] = group_runs([run])
    assert choice_of(group, "test/global/viper", ["rank1"], Rule()).cell("oracle") == "50.0"


def test_a_mean_over_some_of_the_seeds_says_so(tmp_path):
    for seed in range(3):
        scores = {"viper": 0.5} | ({"ilids": 0.25} if seed else {})
        write_run(tmp_path / f"s{seed}", {1: scores_of(scores)}, seed=seed, unseen=[], fingerprint="same")
    [group] = group_runs([tmp_path / f"s{seed}" for seed in range(3)])
    assert group.cell("test/global/viper", ["rank1"], Rule()) == "50.0+-0.0"
    assert group.cell("test/global/ilids", ["rank1"], Rule()) == "25.0+-0.0 (2 of 3)"


def drawn_means(folder, seeds=3):
    """Runs with means over seen and unseen sets, by drawn numbers; their rank-1 and mAP."""
    draw, runs, numbers = random.Random(7), [], []
    for seed in range(seeds):
        rank1 = {name: draw.random() for name in ("town", "new", "seen", "unseen")}
        own = {name: draw.random() for name in ("town", "seen")}
        scores = scores_of(rank1) | scores_of(own, "local")
        runs.append(write_run(folder / f"s{seed}", {1: scores}, seed=seed, unseen=["new"], fingerprint="same"))
        numbers.append(scores)
    return runs, numbers


@pytest.mark.parametrize("seeds", [1, 3])
def test_the_drop_is_the_mean_over_seen_sets_minus_that_over_unseen_ones(seeds, tmp_path, capsys):
    runs, numbers = drawn_means(tmp_path, seeds)
    cells = []
    for metric in ("mAP", "rank1"):
        drops = [100 * (n[f"test/global/seen/{metric}"] - n[f"test/global/unseen/{metric}"]) for n in numbers]
        mean = sum(drops) / len(drops)
        deviation = math.sqrt(sum((drop - mean) ** 2 for drop in drops) / max(1, len(drops) - 1))
        cells.append(f"{mean:.1f}+-{deviation:.1f}" if seeds > 1 else f"{mean:.1f}")
    assert main(["report", *map(str, runs)]) == 0
    said = capsys.readouterr().out
    row = next(line for line in said.splitlines() if line.startswith("drop "))
    assert row.split() == ["drop", cells[0], "/", cells[1], "-"], "local models are not scored on unseen sets"
    assert "drop: mean seen - mean unseen, in points" in said
    assert main(["report", *map(str, runs), "--format", "csv"]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if ",drop,rank1," in line]
    assert line.split(",")[:5] == ["FedPav", "global", "last", "drop", "rank1"]
    assert float(line.split(",")[5]) == pytest.approx(mean, rel=1e-5)


def test_there_is_no_drop_without_both_means_nor_of_the_oracle(tmp_path, capsys):
    runs, _ = drawn_means(tmp_path, 1)
    assert main(["report", str(runs[0]), "--rule", "oracle"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("drop "))
    assert [cell == "-" for cell in row.replace(" / ", "/").split()[1:]] == [False, True, True, True]
    for number, name in enumerate(("seen", "unseen")):
        run = write_run(tmp_path / f"one{number}", {1: scores_of({"town": 0.5, name: 0.5})}, unseen=[])
        assert main(["report", str(run)]) == 0
        assert "drop" not in capsys.readouterr().out


@pytest.mark.parametrize("compare", [None, "003"])
def test_further_tables_stand_below_the_others(compare, tmp_path):
    run = write_run(tmp_path / "run", {1: scores_of({"market1501": 0.5})})
    seen = []

    def further(groups):
        seen.extend(groups)
        return [Block(["header of it"], [["a cell"]])]

    text = report([str(run)], compare=compare, further=further)
    assert text.rindex("a cell") > text.index("market1501")
    assert [group.runs[0].folder for group in seen] == [run]


def test_a_score_that_one_of_the_three_rounds_lacks_is_left_out(tmp_path):
    evaluations = draw_evaluations(0, (1, 2, 3))
    evaluations[1]["test/local/viper/rank1"] = 0.5  # the client trained in round 1 only
    run = read_run(write_run(tmp_path / "run", evaluations))
    found = Rule(name="best3").scores(run)
    assert "test/global/viper/rank1" in found
    assert "test/local/viper/rank1" not in found


def test_the_table_shows_the_last_evaluation_beside_best3(tmp_path, capsys):
    values = {10: 0.5, 20: 0.9, 30: 0.8, 40: 0.4, 50: 0.1}
    run = write_run(tmp_path / "run", {r: scores_of({"market1501": v}) for r, v in values.items()})
    assert main(["report", str(run), "--rule", "best3", "--metric", "rank1"]) == 0
    table = capsys.readouterr().out
    row = next(line for line in table.splitlines() if line.startswith("market1501"))
    assert row.split() == ["market1501", "10.0", "73.3"]
    assert "chooses rounds by scores on test data" in table
    assert "mean over rounds 10, 20, 30: of the 5 rounds evaluated up to round 300" in table
    assert main(["report", str(run), "--rule", "best3", "--metric", "rank1", "--horizon", "40"]) == 0
    assert "of the 4 rounds evaluated up to round 40" in capsys.readouterr().out


@pytest.mark.parametrize("seed", range(4))
def test_oracle_is_the_plain_loop(seed, tmp_path):
    evaluations = draw_evaluations(seed, range(1, 6))
    del evaluations[2]["test/global/viper/rank1"]  # this set was not scored in that round
    run = read_run(write_run(tmp_path / "run", evaluations, unseen=["viper"]))
    best = {}
    for name in SETS:
        chosen = None
        for round_ in sorted(evaluations):
            score = evaluations[round_].get(f"test/global/{name}/rank1")
            if score is not None and (chosen is None or score > evaluations[chosen][f"test/global/{name}/rank1"]):
                chosen = round_
        best[name] = evaluations[chosen]
    found = Rule(name="oracle").scores(run)
    for metric in METRICS:
        for name in SETS:
            assert found[f"test/global/{name}/{metric}"] == best[name][f"test/global/{name}/{metric}"]
        market, cuhk03 = (best[name][f"test/global/{name}/{metric}"] for name in ("market1501", "cuhk03np"))
        assert found[f"test/global/seen/{metric}"] == pytest.approx((market + cuhk03) / 2)
        assert found[f"test/global/unseen/{metric}"] == best["viper"][f"test/global/viper/{metric}"]


def test_the_table_shows_the_last_evaluation_beside_the_oracle(tmp_path, capsys):
    values = {10: 0.5, 20: 0.9, 30: 0.4}
    run = write_run(tmp_path / "run", {r: scores_of({"market1501": v}) for r, v in values.items()})
    assert main(["report", str(run), "--rule", "oracle", "--metric", "rank1"]) == 0
    table = capsys.readouterr().out
    row = next(line for line in table.splitlines() if line.startswith("market1501"))
    assert row.split() == ["market1501", "40.0", "90.0"]
    assert "this choice needs the test labels" in table


def test_personalised_models_that_score_as_the_global_one_have_no_column(tmp_path):
    """As those of FedPav, which keeps heads private, and no part of what gives features."""
    both = scores_of({"a": 0.5, "b": 0.25}) | scores_of({"a": 0.5, "b": 0.25}, "personalised")
    other = scores_of({"a": 0.5, "b": 0.25}) | scores_of({"a": 0.5, "b": 0.3}, "personalised")
    same, differs = (write_run(tmp_path / name, {1: scores}) for name, scores in (("same", both), ("other", other)))
    line = "FedPav: personalised models score as the global one, and have no column"
    text = report([str(same)], fairness=True)
    assert line in text.splitlines()
    header, below = text.partition("---")[0], text.partition("mean, standard deviation")[0]
    assert ("global" in header, "personalised" in header) == (True, False)
    assert below.count("personalised") == line.count("personalised"), "nor a row of the table on fairness"
    text = report([str(differs)])
    assert "personalised" in text.partition("---")[0]
    assert line not in text
    numbers = report([str(same)], format="csv").splitlines()
    assert sum("personalised" in row for row in numbers) == 4, "as data, all numbers stay"


def test_wrong_options_are_one_line(tmp_path, capsys):
    run = write_run(tmp_path / "run", draw_evaluations(0, (10, 20)))
    assert "its logs hold 2; lower trainer.check_val_every_n_epoch" in refuse(capsys, "report", run, "--rule", "best3")
    run = write_run(tmp_path / "more", draw_evaluations(0, (10, 20, 30)))
    line = refuse(capsys, "report", run, "--rule", "best3", "--sets", "[msmt17]")
    assert "--sets" in line
    assert "choose from market1501, cuhk03np, viper" in line
    assert "has no test set msmt17" in refuse(capsys, "report", run, "--rule", "best3", "--sets", "msmt17")
    assert "--horizon" in refuse(capsys, "report", run, "--rule", "best3", "--horizon", "0")
    assert "its logs hold 1" in refuse(capsys, "report", run, "--rule", "best3", "--horizon", "15")
    assert "--best: contradicts" in refuse(capsys, "report", run, "--best", "--rule", "best3")
    assert "choose from mAP" in refuse(capsys, "report", run, "--metric", "map")
    assert "--rule best needs val/mAP" in refuse(capsys, "report", run, "--best")
    (run / "metrics.csv").write_text("epoch,a\nnone,1\n")
    assert "is not a log of fedsim fit" in refuse(capsys, "report", run, "--rule", "best3")
    (run / "metrics.csv").unlink()
    assert "holds no metrics.csv" in refuse(capsys, "report", run, "--rule", "best3")


def test_rounds_that_a_continued_run_did_again_count_once(tmp_path):
    run = write_run(tmp_path / "run", {3: scores_of({"viper": 0.5})})
    first = [(1, training(up=1, down=1)), (2, training(up=2, down=2)), (2, scores_of({"viper": 0.1}))]
    again = [(2, training(up=2, down=2)), (2, scores_of({"viper": 0.2})), (3, training(up=3, down=3))]
    write_log(run / "metrics-1.csv", first)
    write_log(run / "metrics.csv", again)
    log = read_run(run).log
    assert sum(row["comm/up_bytes"] for row in log.values()) == 6
    assert log[2]["test/global/viper/rank1"] == 0.2


# -- convergence -------------------------------------------------------------------------------------------------------


def reaching_by_loops(log, key, target):
    for round_ in sorted(log):
        if key in log[round_] and log[round_][key] >= target:
            total = seconds = 0.0
            for earlier in range(1, round_ + 1):
                total += log[earlier]["comm/down_bytes"]
                total += log[earlier]["comm/up_bytes"]
                seconds += log[earlier]["time/simulated_seconds"]
            return round_, total, seconds
    return None


def test_rounds_bytes_and_seconds_to_a_target_are_the_plain_loop():
    draw = random.Random(0)
    for _ in range(100):
        log = {r: training(up=draw.randint(1, 9), down=draw.randint(1, 9)) for r in range(1, 13)}
        for row in log.values():
            row["time/simulated_seconds"] = float(draw.randint(0, 5))
        for round_ in range(3, 13, 3):
            log[round_]["x"] = draw.random()
        for target in (0.1, 0.6, 0.9):
            assert first_reaching(log, "x", target) == reaching_by_loops(log, "x", target)


def test_who_does_not_wait_is_sooner_and_its_slow_client_answers_less(tmp_path, capsys):
    """Three rounds of 4 s with all; five of 1 s in which b answers once."""
    folders = []
    for name, seconds, rounds, of_b in (("all", 4.0, 3, 3), ("few", 1.0, 5, 1)):
        evaluations = {r: scores_of({"viper": 0.2 * r, "seen": 0.2 * r}) for r in range(1, rounds + 1)}
        run = write_run(tmp_path / name, evaluations, fingerprint=name, clients=["a", "b"], rounds=rounds)
        rows = []
        for r in range(1, rounds + 1):
            losses = {"train/a/loss": 1.0} | ({"train/b/loss": 1.0} if r <= of_b else {})
            clock = {"time/clock": seconds * r} if name == "few" else {}
            row = training(up=1, down=1) | losses | clock | {"time/simulated_seconds": seconds}
            rows += [(r, row), (r, evaluations[r])]
        write_log(run / "metrics.csv", rows)
        folders.append(str(run))
    assert main(["report", *folders, "--target", "rank1=55"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "12.0 3 of 6 (a)" in text
    assert "3.0 1 of 6 (b)" in text
    assert "(4.0 times sooner)" in text
    assert "3 each" in text
    assert "1 (b), 3, 5" in text


def test_the_report_says_when_a_target_was_reached_or_that_it_never_was(tmp_path, capsys):
    values = {10: 0.5, 20: 0.6, 30: 0.4}
    evaluations = {r: scores_of({"viper": v, "seen": v / 2}) for r, v in values.items()}
    run = write_run(tmp_path / "run", evaluations)
    for target, cells in (("viper/rank1=55", ["20", "3e-07", "60.0"]), ("rank1=28", ["20", "3e-07", "30.0"])):
        assert main(["report", str(run), "--target", target]) == 0
        assert f"FedPav 0 global {' '.join(cells)}" in " ".join(capsys.readouterr().out.split())
    assert main(["report", str(run), "--target", "viper/rank1=61"]) == 0
    assert "not in 30 - 60.0" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("target", "remedy"),
    [
        ("rank1", "METRIC=PERCENT"),
        ("rank1=0.6", "scores are percentages"),
        ("rank1=many", "not a number"),
        ("rank1=101", "at most 100"),
        ("map=50", "choose from mAP"),
        ("mars/rank1=50", "choose from viper/rank1"),
    ],
)
def test_a_wrong_target_is_one_line(target, remedy, tmp_path, capsys):
    run = write_run(tmp_path / "run", {3: scores_of({"viper": 0.5})})
    line = refuse(capsys, "report", run, "--target", target)
    assert "--target" in line
    assert remedy in line


def test_logs_without_the_first_rounds_give_no_bytes(tmp_path, capsys):
    run = write_run(tmp_path / "run", {3: scores_of({"viper": 0.5, "seen": 0.5})})
    write_log(run / "metrics.csv", [(2, training()), (3, training()), (3, scores_of({"viper": 0.5, "seen": 0.5}))])
    assert "lack round 1" in refuse(capsys, "report", run, "--target", "rank1=40")


# -- fairness ----------------------------------------------------------------------------------------------------------


def test_fairness_is_the_spread_over_clients_test_sets_averaged_over_seeds(tmp_path, capsys):
    scores = [{"a": 0.2, "b": 0.4, "c": 0.9}, {"a": 0.5, "b": 0.3, "c": 0.7}]
    runs = []
    for seed, own in enumerate(scores):
        evaluation = scores_of(own | {"seen": 0.5, "new": 0.01, "unseen": 0.01})
        options = {"unseen": ["new"], "seed": seed, "fingerprint": "same"}
        runs.append(str(write_run(tmp_path / str(seed), {1: evaluation}, **options)))
    assert main(["report", *runs, "--fairness", "--metric", "rank1"]) == 0
    deviations, means, worst = [], [], []
    for own in scores:
        mean = sum(own.values()) / 3
        means.append(100 * mean)
        deviations.append(100 * (sum((v - mean) ** 2 for v in own.values()) / 3) ** 0.5)
        worst.append(100 * min(own.values()))
    expected = [f"{np.mean(v):.1f}+-{np.std(v, ddof=1):.1f}" for v in (means, deviations, worst)]
    assert " ".join(["FedPav global", *expected, "a or b"]) in " ".join(capsys.readouterr().out.split())


def test_one_test_set_has_no_spread(tmp_path, capsys):
    run = write_run(tmp_path / "run", {1: scores_of({"viper": 0.5, "seen": 0.5})})
    assert main(["report", str(run), "--fairness"]) == 0
    assert "fairness: needs at least two test sets" in capsys.readouterr().out
