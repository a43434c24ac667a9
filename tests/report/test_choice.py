"""By what a round is chosen: people of the sources, or, as an oracle, the target itself; and the gap between both."""

import json
import random
import re

import numpy as np
import pytest

from fedsim.__main__ import main
from fedsim.report import Rule, group_runs, report
from fedsim.report.layout import mean_and_spread
from fedsim.report.leave_one_out import choice_of, honest_rule, mean_of
from run_dirs import scores_of, write_run
from small import refuse


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def evaluation(val, target, seen=0.5, name="market1501"):
    """Scores of a round: mAP of held-out people, and mAP and rank-1 of the target."""
    scores = scores_of({"cuhk02": seen}) | {"val/mAP": val}
    return scores | {f"test/global/{name}/mAP": target[0], f"test/global/{name}/rank1": target[1]}


def write_rotation(folder, evaluations, name="market1501", held_out=True, seed=0):
    """A run that leaves ``name`` out. Evaluations: round -> (val/mAP, (mAP, rank-1) of the target)."""
    rows = {round_: evaluation(val, target, name=name) for round_, (val, target) in evaluations.items()}
    config = {"data": {"unseen": [name], "val": "identities" if held_out else "none"},
              "model": {"method": {"class_path": "FedPav"}}}  # fmt: skip
    chosen = max(rows, key=lambda round_: (rows[round_]["val/mAP"], -round_))
    best = {"round": chosen, "metrics": rows[chosen]} if held_out else None
    return write_run(
        folder, rows, config=config, unseen=[name], best=best, clients=["cuhk02"], seed=seed, fingerprint=name
    )


THREE = {10: (0.30, (0.21, 0.40)), 20: (0.50, (0.10, 0.35)), 30: (0.40, (0.15, 0.45))}
"""val/mAP orders the rounds 20, 30, 10; the target's mAP 10, 30, 20, and its rank-1 30, 10, 20"""


def test_where_people_of_the_sources_and_the_target_choose_differently_both_are_shown(tmp_path):
    run = write_rotation(tmp_path / "run", THREE)
    first, notes, second, *_ = report([str(run)], left_out=True).split("\n\n")
    assert first.splitlines()[-1].split() == ["FedPav", "global", *["10.0", "/", "35.0"], *["10.0", "/", "35.0"]]
    assert "the round is chosen by best: the round with the best val/mAP" in notes
    cells = re.split(r" {2,}", second.splitlines()[2])
    assert cells == ["FedPav", "global", "market1501", "10.0 / 35.0", "20", "21.0 / 40.0", "10", "+11.0 / +5.0", "3"]
    assert re.split(r" {2,}", second.splitlines()[3])[2:] == ["mean", "10.0 / 35.0", "21.0 / 40.0", "+11.0 / +5.0"]


def test_seeds_without_scores_are_counted_and_give_no_mean(tmp_path):
    runs = [write_rotation(tmp_path / f"{seed}", THREE, seed=seed) for seed in range(3)]
    summary = json.loads((runs[1] / "summary.json").read_text())
    for part in ("best", "final"):
        metrics = summary[part]["metrics"]
        summary[part]["metrics"] = {name: value for name, value in metrics.items() if "market1501" not in name}
    (runs[1] / "summary.json").write_text(json.dumps(summary))
    text = report([*map(str, runs)], left_out=True)
    (row,) = [line for line in text.splitlines() if line.startswith("FedPav")][:1]
    assert "10.0+-0.0 / 35.0+-0.0 (2 of 3)" in row
    assert row.split()[-1] == "-"


def test_no_mean_is_minus_zero(tmp_path):
    assert mean_and_spread(np.array([-0.02, -0.04])) == "0.0+-0.0"
    assert mean_and_spread(np.array([-0.04])) == "0.0"
    assert mean_and_spread(np.array([-0.06])) == "-0.1"


def test_the_oracle_is_by_the_first_number_of_a_cell(tmp_path):
    text = report([str(write_rotation(tmp_path / "run", THREE))], metric="rank1", left_out=True)
    (line,) = [line for line in text.splitlines() if "market1501 " in line and line.startswith("FedPav")]
    assert re.split(r" {2,}", line)[3:] == ["35.0", "20", "45.0", "30", "+10.0", "3"]


def test_without_held_out_people_the_last_round_counts_and_the_table_says_so(tmp_path):
    text = report([str(write_rotation(tmp_path / "run", THREE, held_out=False))], left_out=True)
    assert "the round is chosen by last: the last evaluation; nothing is chosen" in text
    (line,) = [line for line in text.splitlines() if line.startswith("FedPav") and "market1501" in line]
    assert re.split(r" {2,}", line)[3:] == ["15.0 / 45.0", "30", "21.0 / 40.0", "10", "+6.0 / -5.0", "3"]
    assert "gap: oracle - last" in text


def test_the_users_rule_counts_but_never_the_oracle(tmp_path, capsys):
    run = write_rotation(tmp_path / "run", THREE)
    assert "15.0 / 45.0" in report([str(run)], left_out=True, rule="last").splitlines()[2]
    line = refuse(capsys, "report", run, "--left_out", "true", "--rule", "oracle")
    assert "--rule: oracle is the best round on the target itself" in line
    for option, rule in (("--by=mAP", "oracle"), ("--sets=[town0]", "best3"), ("--horizon=1", "best3")):
        for other in ([], ["--rule=last"], ["--compare=003", "--rule=last"]):
            line = refuse(capsys, "report", run, option, *other)
            assert f"{option.partition('=')[0]}: is for --rule {rule}; leave it out" in line
    for option in ("--target=mAP=1", "--fairness", "--significance"):
        line = refuse(capsys, "report", run, "--compare=003", option)
        assert f"{option.partition('=')[0]}: has no effect with --compare; leave one of them out" in line


def test_the_oracle_of_a_plain_report_is_by_rank_1_or_by_map(tmp_path, capsys):
    run = write_rotation(tmp_path / "run", THREE)
    for options, expected in (([], "15.0 / 45.0"), (["--by", "mAP"], "21.0 / 40.0")):
        assert main(["report", str(run), "--rule", "oracle", *options]) == 0
        text = capsys.readouterr().out
        (line,) = [line for line in text.splitlines() if line.startswith("market1501")]
        assert line.endswith(expected)
        assert "this choice needs the test labels" in text


@pytest.mark.parametrize(("rule", "said"), [("last", "last evaluation"), ("best", "round with the best val/mAP")])
def test_every_report_says_by_what_its_numbers_were_chosen(rule, said, tmp_path):
    assert said in report([str(write_rotation(tmp_path / "run", THREE))], rule=rule)


def test_no_draw_differs_from_plain_loops(tmp_path):
    """Runs of drawn scores, up to three seeds: rounds, numbers, gap, and the mean over two left-out sets."""
    rng = random.Random(0)
    for draw in range(60):
        names, seeds = ("market1501", "msmt17"), range(rng.randint(1, 3))
        held_out = rng.random() < 0.7
        choices, expected = [], []
        for name in names:
            folders, rows = [], []
            for seed in seeds:
                rounds = sorted(rng.sample(range(1, 20), rng.randint(1, 6)))
                scores = {r: (rng.randint(1, 5) / 10, (rng.randint(1, 5) / 10, rng.randint(1, 9) / 10)) for r in rounds}
                folders.append(write_rotation(tmp_path / f"{draw}-{name}-{seed}", scores, name, held_out, seed))
                chosen = rounds[-1]
                if held_out:
                    chosen = rounds[0]
                    for r in rounds:
                        if scores[r][0] > scores[chosen][0]:
                            chosen = r
                best = rounds[0]
                for r in rounds:
                    if scores[r][1][0] > scores[best][1][0]:
                        best = r
                rows.append((chosen, best, scores[chosen][1], scores[best][1], len(rounds)))
            (group,) = group_runs(folders)
            rule = honest_rule(group.runs)
            assert rule.name == ("best" if held_out else "last")
            choice = choice_of(group, f"test/global/{name}", ["mAP", "rank1"], rule)
            assert choice.rounds["chosen"] == [row[0] for row in rows]
            assert choice.rounds["oracle"] == [row[1] for row in rows]
            assert choice.num_evaluations == [row[4] for row in rows]
            for place in (0, 1):
                assert choice.scores["chosen"][place] == pytest.approx([100 * row[2][place] for row in rows])
                assert choice.scores["oracle"][place] == pytest.approx([100 * row[3][place] for row in rows])
                gaps = [100 * (row[3][place] - row[2][place]) for row in rows]
                assert choice.scores["gap"][place] == pytest.approx(gaps, abs=1e-9)
            assert (choice.scores["gap"][0] >= 0).all()
            choices.append(choice)
            expected.append(np.mean([row[2][0] for row in rows]))
        assert mean_of(choices, "chosen").split(" / ")[0] == f"{100 * np.mean(expected):.1f}"


def test_a_run_without_a_log_has_no_oracle(tmp_path):
    run = write_rotation(tmp_path / "run", THREE)
    (run / "metrics.csv").unlink()
    (group,) = group_runs([run])
    choice = choice_of(group, "test/global/market1501", ["mAP", "rank1"], Rule(name="best"))
    assert [choice.cell(column) for column in ("chosen", "oracle", "gap")] == ["10.0 / 35.0", "-", "-"]
    assert mean_of([choice], "oracle") == "-"
    assert choice_of(group, "test/local/market1501", ["mAP"], Rule(name="best")).cell("chosen") == "-"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["best"]["round"] == 20
