"""Searches on this machine: Optuna's draws, early ends, kills, several processes, and what is refused."""

import json
import math
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytest.importorskip("optuna", reason="the extra 'search' is not installed")

import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from failing import PATIENCE, await_true
from fedsim.__main__ import main
from fedsim.core.errors import ConfigError, DataError
from fedsim.core.seeding import derive_seed
from fedsim.report.trials import read_trials
from fedsim.sweep.early_stop import EarlyStop
from fedsim.sweep.local import Result
from fedsim.sweep.sampling import Parameter, num_runs, samples
from fedsim.sweep.search import FileLock, first_samples, open_study, scores_in
from fedsim.sweep.space import distribution_of, params_of, sample_of
from searches import COMMAND, SPACE, finish, quality, run_all, search_of, write_scores
from small import refuse
from sweep_files import read_sweep
from tiny_run import TINY

ROOT = Path(__file__).parents[2]
HALVING = {"type": "hyperband", "min_iter": 2, "eta": 2}


@pytest.fixture
def write_search(write_sweep):
    """Write a sweep that is a search: bayes over ``SPACE``, with some fields replaced."""
    defaults = {"method": "bayes", "parameters": SPACE, "command": COMMAND, "program": "program.py", "run_cap": 14}
    return lambda **fields: write_sweep(**defaults | fields)


@pytest.fixture(autouse=True)
def _no_waiting_for_disks(monkeypatch):
    """Optuna waits for the disk after each line; no test cuts the power."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def states_of(root):
    return {row.number: row.state for row in read_trials(root).rows}


# -- draws -------------------------------------------------------------------------------------------------------------


def test_a_search_draws_as_optuna_does(write_search, tmp_path):
    """A study of Optuna's own in memory, with distributions written by hand, and a sampler for each trial."""
    drawn = run_all(search_of(write_search(), tmp_path / "runs", 14))
    space = {
        "a": FloatDistribution(0, 1), "lr": FloatDistribution(1e-4, 1e-1, log=True),
        "b": CategoricalDistribution([1, 2, 5]), "epochs": IntDistribution(1, 4),
        "q": FloatDistribution(0, 1, step=0.25), "kind": CategoricalDistribution(["True", "None", "['x', 1]"]),
    }  # fmt: skip
    study = optuna.create_study(direction="maximize")
    for number in range(14):
        seed = derive_seed(0, number, "search") % 2**32
        study.sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        trial = study.ask(space)
        study.tell(trial, quality(trial.params))
        kind = {"True": True, "None": None, "['x', 1]": ["x", 1]}[trial.params["kind"]]
        assert drawn[number] == {**trial.params, "kind": kind, "fixed": "y"}
    assert len(drawn) == 14
    assert read_trials(tmp_path / "runs").records[-1].score == study.best_value


@pytest.mark.parametrize(("fields", "values"), [
    ({"distribution": "categorical", "values": (1, True, 1.0, "1", [2])}, [1, True, 1.0, "1", [2]]),
    ({"distribution": "categorical", "values": ("a", None, 2)}, ["a", None, 2]),
    ({"distribution": "q_uniform", "min": 0.1, "max": 0.7, "q": 0.2}, [0.0, 0.2, 0.4, 0.6]),
    ({"distribution": "q_uniform", "min": 2, "max": 6, "q": 2}, [2, 4, 6]),
    ({"distribution": "q_uniform", "min": 0.0, "max": 4e-13, "q": 1e-13}, [0.0, 1e-13, 2e-13, 3e-13, 4e-13]),
    ({"distribution": "int_uniform", "min": 1, "max": 3}, [1, 2, 3]),
    ({"distribution": "constant", "values": ([1, 2],)}, [[1, 2]]),
])  # fmt: skip
def test_every_value_comes_back_from_optuna_as_it_was(fields, values):
    parameters = {"x": Parameter(**fields)}
    assert [*map(repr, parameters["x"].grid)] == [*map(repr, values)]
    for value in values:
        params = params_of({"x": value}, parameters)
        back = sample_of(json.loads(json.dumps(params)), parameters)["x"]
        assert repr(back) == repr(value)
        for stored in params.values():
            scale = distribution_of(parameters["x"])
            assert scale._contains(scale.to_internal_repr(stored))


def test_grid_and_random_with_early_ends_have_the_samples_of_their_sweeps(write_search, tmp_path):
    parameters = {"a": {"values": [0.1, 0.3]}, "b": {"values": [1, 2]}}
    grid = write_search(method="grid", parameters=parameters, early_terminate=HALVING, run_cap=None)
    search = search_of(grid, tmp_path / "grid", num_runs(read_sweep(grid)))
    assert list(run_all(search).values()) == [{"a": a, "b": b} for a in (0.1, 0.3) for b in (1, 2)]
    path = write_search(method="random", early_terminate=HALVING)
    assert list(run_all(search_of(path, tmp_path / "random", 5)).values()) == list(samples(read_sweep(path), 5))


def test_settings_that_come_again_have_their_result_without_a_run(write_search, tmp_path):
    path = write_search(parameters={"a": {"values": [0.1, 0.3]}, "b": {"value": 1}}, run_cap=8)
    drawn = run_all(search_of(path, tmp_path / "runs", 8))
    assert sorted(sample["a"] for sample in drawn.values()) == [0.1, 0.3]
    rows = read_trials(tmp_path / "runs").rows
    assert len(rows) == 8
    first = {row.settings["a"]: row.number for row in reversed(rows)}
    assert all(row.same_as == (None if row.number in first.values() else first[row.settings["a"]]) for row in rows)
    assert all(row.score == quality({**row.settings, "b": 1}) for row in rows)


def test_the_first_samples_have_every_value_of_every_list(write_search):
    sweep = read_sweep(write_search())
    drawn = first_samples(sweep, 0)
    assert len(drawn) == 3
    for name in ("b", "kind"):
        assert [sample[name] for sample in drawn] == SPACE[name]["values"]


# -- early ends --------------------------------------------------------------------------------------------------------


def stopped_after(scores, first, eta, last):
    """Successive halving by plain loops: run -> the evaluation after which it ends; others go on to the end."""
    seen, ended = {}, {}
    for run, values in enumerate(scores):
        rung = first
        for evaluation, value in enumerate(values, 1):
            if evaluation == rung and (last is None or evaluation <= last):
                seen.setdefault(rung, []).append(value)
                best = sorted(seen[rung], reverse=True)[: max(1, len(seen[rung]) // eta)]
                if value < best[-1]:
                    ended[run] = evaluation
                    break
                rung *= eta
    return ended


@pytest.mark.parametrize("fields", [
    {"min_iter": 1}, {"min_iter": 2, "eta": 2}, {"min_iter": 3, "eta": 2.0}, {"max_iter": 9, "s": 1},
    {"max_iter": 9, "s": 5}, {"max_iter": 16, "s": 2, "eta": 2},
])  # fmt: skip
def test_runs_end_early_as_by_plain_loops(write_search, tmp_path, fields):
    rng = random.Random(str(fields))
    stop = {"type": "hyperband", **fields}
    scores = [[rng.random() for _ in range(12)] for _ in range(16)]
    path = write_search(parameters={"a": {"min": 0.0, "max": 1.0}}, early_terminate=stop, run_cap=16)
    search = search_of(path, tmp_path / "runs", 16)
    while (taken := search.take()) is not None:
        number, run = taken
        for evaluation in range(1, 13):
            write_scores(run.folder, scores[number][:evaluation])
            if search.stops(number):
                search.finish(number, Result(run, 143, {}, is_stopped=True))
                break
        else:
            finish(search, number, run, scores[number][-1])
    eta = int(fields.get("eta", 3))
    bands = [b for k in range(1, fields.get("s", 0) + 1) if (b := fields.get("max_iter", 0) // eta**k)]
    first, last = (min(bands), max(bands)) if bands else (fields["min_iter"], None)
    expected = stopped_after(scores, first, eta, last)
    assert expected, "no run ends early: the test shows nothing"
    rows = read_trials(tmp_path / "runs").rows
    assert {row.number: max(row.seen) for row in rows if row.state == "pruned"} == expected
    assert all((row.score is None) == (row.number in expected) for row in rows)


def test_a_run_that_ends_before_it_is_looked_at_is_complete_and_still_compared(write_search, tmp_path):
    path = write_search(parameters={"a": {"min": 0.0, "max": 1.0}}, early_terminate=HALVING)
    search = search_of(path, tmp_path / "runs", 2)
    number, run = search.take()
    write_scores(run.folder, [0.5, 0.6, 0.7, 0.8])
    finish(search, number, run, 0.8)
    number, run = search.take()
    write_scores(run.folder, [0.4, 0.5])
    assert search.stops(number)


def test_a_run_that_ends_before_it_is_stopped_has_all_its_evaluations_in_the_study(write_search, tmp_path):
    path, root = write_search(parameters={"a": {"min": 0.0, "max": 1.0}}, early_terminate=HALVING), tmp_path / "runs"
    search = search_of(path, root, 2)
    for scores in ([0.5, 0.6, 0.7, 0.8], [0.4, 0.5, 0.75, 0.9]):
        number, run = search.take()
        write_scores(run.folder, scores)
        finish(search, number, run, scores[-1])
    last = search._trials()[1]
    assert [*last.intermediate_values.values()] == scores
    assert last.value == 0.9
    assert "stopped" not in last.user_attrs
    assert {name for name in last.system_attrs if name.startswith("completed_rung")} == {
        "completed_rung_0", "completed_rung_1"
    }  # fmt: skip


def test_scores_are_whole_lines_and_a_repeated_round_counts_once(tmp_path):
    path = tmp_path / "metrics.csv"
    assert scores_in(path, "val/mAP") == []
    path.write_text("epoch,loss,val/mAP\n0,1.0,\n0,,0.25\n1,1.0,\n1,,0.5\n1,,0.625\n2,,nan\n3,,0.7")
    first, second, third = scores_in(path, "val/mAP")
    assert (first, second, math.isnan(third)) == (0.25, 0.625, True)
    assert scores_in(path, "val/rank1") == []


def test_a_reached_target_starts_no_other_run(write_search, tmp_path):
    metric = {"name": "val/mAP", "goal": "maximize", "target": 0.9}
    drawn = run_all(search_of(write_search(metric=metric), tmp_path / "runs", 14))
    reached = [quality(sample) >= 0.9 for sample in drawn.values()]
    assert reached == [False] * (len(reached) - 1) + [True]


def test_a_reached_target_starts_no_repetition_either(write_search, tmp_path):
    metric = {"name": "val/mAP", "goal": "maximize", "target": 0.9}
    path, root = write_search(metric=metric), tmp_path / "runs"
    search = search_of(path, root, 14)
    number, run = search.take()
    run.log.write_text("fedsim: error: a: is bad\n")
    finish(search, number, run, 0.0, code=2)
    number, run = search.take()
    finish(search, number, run, 0.95)
    assert search_of(path, root, 14).take() is None


def test_a_diverged_run_is_the_worst_and_never_the_best(write_search, tmp_path):
    for goal in ("maximize", "minimize"):
        path = write_search(metric={"name": "val/mAP", "goal": goal}, run_cap=3)
        root = tmp_path / goal
        run_all(search_of(path, root, 3), lambda sample: math.nan if sample["a"] > 0.58 else quality(sample))
        trials = read_trials(root)
        assert [math.isnan(row.score) for row in trials.rows] == [row.settings["a"] > 0.58 for row in trials.rows]
        assert trials.records[-1].score == (max if goal == "maximize" else min)(row.score for row in trials.complete)


# -- kills, and several processes --------------------------------------------------------------------------------------


def kill(search):
    """Leave a search as a killed process leaves it: the kernel closes its files."""
    for claim in search._claims.values():
        os.close(claim.lock)
    os.close(search._lock._file)


@pytest.mark.parametrize("seed", range(3))
def test_kills_neither_lose_nor_repeat_nor_change_a_trial(write_search, tmp_path, seed):
    path, rng = write_search(early_terminate=HALVING), random.Random(seed)
    whole = run_all(search_of(path, tmp_path / "whole", 14), rounds=8)
    search, drawn, kills, ended = search_of(path, tmp_path / "cut", 14), {}, 0, []
    while (taken := search.take()) is not None:
        number, run = taken
        drawn[number] = run.sample
        for round_ in range(1, 9):
            if rng.random() < 0.15:
                kills += 1
                kill(search)
                search = search_of(path, tmp_path / "cut", 14)
                break
            write_scores(run.folder, [quality(run.sample) * (1 - 0.5**k) for k in range(1, round_ + 1)])
            if search.stops(number):
                search.finish(number, Result(run, 143, {}, is_stopped=True))
                ended.append(number)
                break
        else:
            finish(search, number, run, quality(run.sample))
            ended.append(number)
    assert kills > 3
    assert ended == list(range(14))
    assert drawn == whole
    assert states_of(tmp_path / "cut") == states_of(tmp_path / "whole")


def test_a_trial_that_was_being_stopped_at_the_kill_is_not_continued(write_search, tmp_path):
    path = write_search(parameters={"a": {"min": 0.0, "max": 1.0}}, early_terminate=HALVING)
    search = search_of(path, tmp_path / "runs", 2)
    number, run = search.take()
    write_scores(run.folder, [0.9, 0.9])
    finish(search, number, run, 0.9)
    number, run = search.take()
    write_scores(run.folder, [0.1, 0.1])
    assert search.stops(number)
    kill(search)
    again = search_of(path, tmp_path / "runs", 2)
    assert again.take() is None
    assert states_of(tmp_path / "runs") == {0: "complete", 1: "pruned"}


def test_a_kill_amid_the_draw_or_the_writing_of_a_line_loses_nothing(write_search, tmp_path):
    path, root = write_search(), tmp_path / "runs"
    search = search_of(path, root, 3)
    trial = search._study.ask()
    trial.suggest_float("a", 0, 1)
    kill(search)
    with (root / "trials.log").open("a") as file:
        file.write('{"op_code":4,"worker_id":"c1')
    assert sorted(run_all(search_of(path, root, 3))) == [0, 1, 2]
    assert set(states_of(root).values()) == {"complete"}


@pytest.mark.parametrize("lines", range(1, 5))
def test_a_study_that_was_cut_after_any_of_its_first_lines_goes_on(write_search, tmp_path, lines):
    path, root = write_search(), tmp_path / "runs"
    kill(search_of(path, root, 2))
    whole = (root / "trials.log").read_text().splitlines(keepends=True)
    (root / "trials.log").write_text("".join(whole[:lines]))
    assert sorted(run_all(search_of(path, root, 2))) == [0, 1]
    assert read_trials(root).metric == "val/mAP"


def test_two_searches_share_the_trials(write_search, tmp_path):
    path, root = write_search(), tmp_path / "runs"
    one, two, taken = search_of(path, root, 7), search_of(path, root, 7), []
    rng = random.Random(1)
    while True:
        running = [(search, search.take()) for search in rng.sample([one, two], 2)]
        for search, claim in running:
            if claim is not None:
                taken.append(claim[0])
                finish(search, *claim, quality(claim[1].sample))
        if not any(claim for _, claim in running):
            break
    assert sorted(taken) == list(range(7))


def test_equal_settings_that_run_now_are_not_started_again(write_search, tmp_path):
    path = write_search(parameters={"a": {"value": 0.5}, "b": {"values": [1]}}, run_cap=2)
    one, two = search_of(path, tmp_path / "runs", 2), search_of(path, tmp_path / "runs", 2)
    number, run = one.take()
    assert two.take() is None
    finish(one, number, run, 0.5)
    assert two.take() is None  # it has the result by now
    assert [(row.state, row.same_as) for row in read_trials(tmp_path / "runs").rows] == [
        ("complete", None), ("complete", 0)
    ]  # fmt: skip


def test_failed_trials_are_repeated_by_the_next_call_and_count_once(write_search, tmp_path):
    path, root = write_search(run_cap=3), tmp_path / "runs"
    search = search_of(path, root, 3)
    while (taken := search.take()) is not None:
        number, run = taken
        run.log.write_text("fedsim: error: a: is bad\n")
        finish(search, number, run, quality(run.sample), code=2 if number == 1 else 0)
    assert (search.num_failed(), states_of(root)[1], read_trials(root).rows[1].error) == (1, "failed", "a: is bad")
    again = search_of(path, root, 3)
    drawn = run_all(again)
    assert list(drawn) == [3]
    assert states_of(root) == {0: "complete", 2: "complete", 3: "complete"}
    assert drawn[3]["a"] == search._trials()[1].params["a"]
    assert again.num_failed() == 0
    assert run_all(search_of(path, root, 3)) == {}
    assert list(run_all(search_of(path, root, 4))) == [4]  # a larger number goes on


PROGRAM = """
import json, os, pathlib, sys, time
options = dict(arg.removeprefix("--").split("=", 1) for arg in sys.argv[1:])
folder = pathlib.Path(options["run_dir"])
folder.mkdir(parents=True, exist_ok=True)
with (folder.parent / "starts").open("a") as file:
    file.write(folder.name + "\\n")
if options.get("bad") == options["b"]:
    sys.exit("fedsim: error: b: is bad")
score = 1 - (float(options["a"]) - 0.3) ** 2
lines = ["epoch,val/mAP"]
for round_ in range(6):
    lines.append(f"{round_},{score * (1 - 0.5 ** (round_ + 1))}")
    (folder / "metrics.csv").write_text("\\n".join(lines) + "\\n")
    time.sleep(float(options.get("nap", 0)))
scores = {"metrics": {"val/mAP": score}}
(folder / "summary.json").write_text(json.dumps({"finished": True, "final": scores, "best": scores}))
"""


@pytest.fixture
def quick(write_search, tmp_path):
    """Write a search of a program that takes no time, or a ``nap`` for each evaluation."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    def write(nap=0.0, bad=0, **fields):
        parameters = {"a": SPACE["a"], "b": SPACE["b"], "nap": {"value": nap}, "bad": {"value": bad}}
        return write_search(program=str(program), **{"parameters": parameters, **fields})

    return write


@pytest.mark.slow
def test_two_processes_of_which_one_is_killed_run_each_trial_once(quick, tmp_path):
    root, path = tmp_path / "runs", quick(nap=0.15, early_terminate=HALVING, run_cap=10)
    command = [sys.executable, "-m", "fedsim", "sweep", str(path), "--local", f"--run_dir={root}", "--parallel=2"]
    how = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    killed, other = subprocess.Popen(command, **how), subprocess.Popen(command, **how)
    try:
        started = root / "starts"
        await_true(lambda: started.is_file() and len(started.read_text().split()) >= 5, PATIENCE, lambda: "no runs")
        killed.kill()
        killed.communicate(timeout=PATIENCE)
        last = subprocess.Popen(command, **how)
        for process in (other, last):
            output, errors = process.communicate(timeout=PATIENCE)
            assert process.returncode == 0, errors
    finally:
        for process in (killed, other):
            process.kill()
    trials = read_trials(root)
    assert [row.number for row in trials.rows] == list(range(10))
    assert {row.state for row in trials.rows} == {"complete", "pruned"}
    assert len({row.folder for row in trials.rows}) == 10
    starts = started.read_text().split()
    assert len(starts) <= 12  # the two of the killed process may have begun again
    assert output.splitlines()[0].split()[:2] == ["trial", "state"]


@pytest.mark.slow
def test_a_signal_leaves_trials_that_the_next_call_continues(quick, tmp_path):
    root, path = tmp_path / "runs", quick(nap=0.2, run_cap=3)
    command = [sys.executable, "-m", "fedsim", "sweep", str(path), "--local", f"--run_dir={root}"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    await_true(lambda: list(root.glob("*/metrics.csv")), PATIENCE, lambda: "no run")
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert states_of(root) == {0: "running"}
    assert main(["sweep", str(path), "--local", f"--run_dir={root}"]) == 0
    assert states_of(root) == dict.fromkeys(range(3), "complete")


# -- commands ----------------------------------------------------------------------------------------------------------


def test_a_search_prints_its_trials_and_its_failures(quick, tmp_path, capsys, caplog):
    caplog.set_level("INFO", logger="fedsim")
    args = ["sweep", "--local", "--run_dir", str(tmp_path / "runs"), "--parallel=2"]
    assert main([*args, str(quick(bad=2, run_cap=8))]) == 1
    captured = capsys.readouterr()
    rows = read_trials(tmp_path / "runs").rows
    failed = [row for row in rows if row.state == "failed"]
    assert failed
    assert f"{len(failed)} trials failed; call the sweep again" in captured.err
    assert all(f"failed: trial {row.number}: b: is bad ({row.folder}.log)" in captured.out for row in failed)
    scores = [float(cells[-1]) for line in captured.out.splitlines() if (cells := line.split())[1:2] == ["complete"]]
    assert scores == sorted((round(row.score, 4) for row in rows if row.score is not None), reverse=True)
    assert "trial 0: " in caplog.text


@pytest.mark.slow
def test_a_search_over_fits_stops_some_and_scores_the_others(write_search, tmp_path, capsys, monkeypatch, quick_python):
    monkeypatch.chdir(ROOT)
    tiny = tmp_path / "tiny.yaml"
    tiny.write_text(TINY)
    options = ["--trainer.max_epochs=3", "--trainer.check_val_every_n_epoch=1", "--data.limit_client_batches=1",
               "--data.source.init_args.scale=0.5"]  # fmt: skip
    path = write_search(
        program="fedsim", command=["${env}", "${program}", "fit", f"--config={tiny}", *options, "${args}"], run_cap=5,
        parameters={"model.client.optimizer.init_args.lr": SPACE["lr"]},
        early_terminate={"type": "hyperband", "min_iter": 1, "eta": 2},
    )  # fmt: skip
    root = tmp_path / "runs"
    assert main(["sweep", str(path), "--local", f"--run_dir={root}"]) == 0
    capsys.readouterr()
    assert main(["report", str(root)]) == 0
    shown = capsys.readouterr().out
    rows = read_trials(root).rows
    assert {row.state for row in rows} <= {"complete", "pruned"}
    for row in rows:
        if row.score is not None:
            summary = json.loads((row.folder / "summary.json").read_text())
            assert row.score == summary["final"]["metrics"]["val/mAP"]
            assert [*row.seen] == [1, 2, 3]
            assert row.seen[3] == pytest.approx(row.score, abs=1e-6)  # logged as float32
            assert f"{row.score:.4f}" in shown


@pytest.mark.parametrize(("fields", "field", "remedy"), [
    ({"run_cap": None}, "--count", "is a bayes sweep without run_cap; give the number of runs"),
    ({"metric": {"name": "test/global/seen/mAP"}}, "metric.name", "is a test score"),
    ({"metric": {"name": "attack/test/global/seen/mAP"}}, "metric.name", "is a test score"),
    ({"metric": {"name": "spread/attack/test/seen/mAP"}}, "metric.name", "is a test score"),
    ({"metric": {"name": "val/mAP", "target": "high"}}, "metric.target", "high is not a number"),
    ({"parameters": {"a": {"mu": 1.0}}}, "parameters.a.distribution", "give min and max with uniform"),
    ({"early_terminate": "hyperband"}, "early_terminate", "expected names with values"),
    ({"early_terminate": {"type": "median", "min_iter": 1}}, "early_terminate.type", "it is hyperband"),
    ({"early_terminate": {"type": "hyperband"}}, "early_terminate", "give one of min_iter and max_iter"),
    ({"early_terminate": HALVING | {"max_iter": 9}}, "early_terminate", "give one of min_iter and max_iter"),
    ({"early_terminate": HALVING | {"eta": 2.5}}, "early_terminate.eta", "whole number from 2"),
    ({"early_terminate": HALVING | {"eta": True}}, "early_terminate.eta", "whole number from 2"),
    ({"early_terminate": HALVING | {"min_iter": 0}}, "early_terminate.min_iter", "whole number from 1"),
    ({"early_terminate": HALVING | {"patience": 1}}, "early_terminate.patience", "choose from type, min_iter"),
    ({"early_terminate": {"type": "hyperband", "max_iter": 9}}, "early_terminate.s", "the number of comparisons"),
    ({"early_terminate": {"type": "hyperband", "max_iter": 2, "s": 1}}, "early_terminate.max_iter", "less than eta"),
])  # fmt: skip
def test_a_wrong_search_is_one_line(write_search, capsys, tmp_path, fields, field, remedy):
    path = write_search(**fields)
    line = refuse(capsys, "sweep", path, "--local", "--run_dir", tmp_path / "runs")
    assert f"{field}: " in line
    assert remedy in line
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("number", [4, 10**9])
def test_more_comparisons_than_evaluations_begin_with_the_first(write_search, number):
    stop = {"type": "hyperband", "max_iter": 27, "s": number}
    assert read_sweep(write_search(early_terminate=stop)).early_stop == EarlyStop(first=1, eta=3, last=9)


def test_a_folder_in_place_of_the_lock_is_one_line(write_search, capsys, tmp_path):
    (tmp_path / "trials.lock").mkdir()
    line = refuse(capsys, "sweep", write_search(), "--local", "--run_dir", tmp_path)
    assert f"{tmp_path / 'trials.lock'}: cannot be locked (Is a directory); remove it" in line


def test_fields_without_a_meaning_here_are_said(write_search):
    parameters = {"a": SPACE["a"], "b": {"values": [1, 2], "probabilities": [0.5, 0.5]}}
    sweep = read_sweep(write_search(parameters=parameters, early_terminate=HALVING | {"strict": True}))
    lines = ["early_terminate.strict: has no effect here", "parameters.b.probabilities: has no effect with bayes"]
    assert sweep.ignored == [f"{sweep.name}: {line}" for line in lines]
    assert read_sweep(write_search(method="random", parameters=parameters)).ignored == []


def test_bayes_cannot_be_listed_beforehand(write_search, capsys):
    assert "--dry-run: bayes chooses each run" in refuse(capsys, "sweep", write_search(), "--dry-run")


@pytest.mark.parametrize(("change", "field"), [
    ({"parameters": SPACE | {"a": {"min": 0.0, "max": 2.0}}}, "parameters.a"),
    ({"parameters": SPACE | {"new": {"values": [1]}}}, "parameters.new"),
    ({"parameters": {name: SPACE[name] for name in SPACE if name != "q"}}, "parameters.q"),
    ({"metric": {"name": "val/rank1", "goal": "maximize"}}, "metric"),
    ({"metric": {"name": "val/mAP", "goal": "minimize"}}, "metric.goal"),
    ({"early_terminate": HALVING}, "early_terminate"),
    ({"command": [*COMMAND, "--more"]}, "command"),
    ({"method": "random", "early_terminate": HALVING}, "method"),
])  # fmt: skip
def test_the_trials_of_another_search_are_refused(write_search, tmp_path, change, field):
    search_of(write_search(), tmp_path / "runs", 1)
    with pytest.raises(ConfigError, match=f": {field}: is not that of the trials in .*; give another --run_dir"):
        search_of(write_search(**change), tmp_path / "runs", 1)


def test_a_metric_that_runs_lack_ends_the_search_with_those_that_they_have(write_search, tmp_path):
    path = write_search(metric={"name": "val/map", "goal": "maximize"})
    with pytest.raises(ConfigError, match=r"metric.name: .* has no val/map; it has val/mAP"):
        run_all(search_of(path, tmp_path / "runs", 2))


def test_without_optuna_the_remedy_is_one_line(write_search, capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    for name in [name for name in sys.modules if name in ("fedsim.sweep.search", "fedsim.report.trials")]:
        monkeypatch.delitem(sys.modules, name)
    line = refuse(capsys, "sweep", write_search(), "--local", "--run_dir", tmp_path / "runs")
    assert line.endswith("method: bayes needs optuna; pip install 'fedsim-reid[search]'")


def test_a_damaged_study_is_one_line(tmp_path):
    for content in (b"[]\n", b"\xff\n", b'{"op_code":0}\n'):
        (tmp_path / "trials.log").write_bytes(content)
        with pytest.raises(DataError, match=r"trials.log: is not a study of fedsim sweep"):
            open_study(tmp_path, True, FileLock(tmp_path / "trials.lock"))
        with pytest.raises(DataError, match=r"trials.log: is not a study of fedsim sweep"):
            read_trials(tmp_path)


def test_commands_start_without_optuna():
    modules = "fedsim.__main__, fedsim.cli.app, fedsim.cli.sweep, fedsim.cli.report"
    code = f"import sys, {modules}; sys.exit('optuna' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0


def test_the_sweep_of_a_method_may_be_bayes(tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text("# sweep: method: bayes\nmodel: {method: FedPav}\n")
    assert main(["sweep", "--method", str(tmp_path / "mine.yaml"), "--print"]) == 0
    content = yaml.safe_load(capsys.readouterr().out)
    assert (content["method"], content["run_cap"]) == ("bayes", 24)


def test_a_trial_that_another_limit_has_ended_is_refused(write_search, tmp_path, monkeypatch):
    """Its score is in the study, and has taught the search."""
    monkeypatch.setattr("fedsim.sweep.search.refuse_changed", lambda _: {tmp_path / "runs" / "a"})
    with pytest.raises(ConfigError, match="a: has ended by another limit than the command has now; give another"):
        search_of(write_search(), tmp_path / "runs", 2)
