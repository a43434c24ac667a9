"""``make acceptance``: its rows in small sizes, and that a row that fails is seen and leaves the others alone."""

import importlib
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from fedsim.functional.neighbours import Neighbours
from fedsim.training.client import Client
from fedsim.training.flat_model import FlatModel

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def acceptance():
    """The script, as a module: scripts import what stands beside them."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module("acceptance")
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture
def bench(acceptance, tmp_path):
    return acceptance.Bench(torch.device("cpu"), 0, tmp_path, reduced=True)


def row(acceptance, name):
    return next(row for row in acceptance.ROWS if row.name == name)


QUICK = {
    "waits": "pass", "kernels": "not here", "train-32": "not here", "train-64": "not here", "graph-32": "not here",
    "channels-32": "not here", "many": "not here", "evaluation": "not here", "memory": "not here", "market": "not here",
    "reciprocal": "pass", "faiss": "pass", "formats": "pass", "robust": "not here", "methods": "pass",
    "memory-fedsam": "not here",
}  # fmt: skip
SLOW = {
    "doctor": "pass", "repeat": "pass", "ranks": "pass", "nccl-alone": "not here", "shared": "not here",
    "shared-2x2": "not here", "groups": "pass", "graph-bits": "not here", "graph-fails": "not here",
    "prefetch": "not here", "resume": "pass", "processes": "not here", "components": "pass", "own-module": "pass",
    "host-store": "not here",
}  # fmt: skip
LOST = ("killed-rank", "frozen-rank")
LOST_IN_GROUP = ("killed-in-group", "frozen-in-group")
COMPILES = {"compile-32"}  # half a minute, and it needs a compiler of C++


def test_all_rows_are_tried_here(acceptance):
    assert {*QUICK, *SLOW, *LOST, *LOST_IN_GROUP, *COMPILES} == {row.name for row in acceptance.ROWS}
    assert {row.name for row in acceptance.ROWS if row.quick} == set(QUICK)


@pytest.mark.parametrize("name", QUICK)
def test_quick_rows_run_in_small_sizes(acceptance, bench, name):
    result = acceptance.judge(row(acceptance, name), bench)
    assert result.verdict == QUICK[name], result
    assert result.figure
    assert "raised" not in result.figure


@pytest.mark.others
@pytest.mark.slow
@pytest.mark.dist
def test_rows_of_whole_commands_run_in_small_sizes(acceptance, bench, quick_python):
    results = {name: acceptance.judge(row(acceptance, name), bench) for name in SLOW}
    assert {name: result.verdict for name, result in results.items()} == SLOW, results
    assert "killed after round" in results["resume"].figure


@pytest.mark.slow
def test_a_method_beside_the_runs_is_imported_by_the_command_that_is_started(acceptance, bench, quick_python):
    run = acceptance.steps.with_waits(bench, "waiting", "--trainer.max_epochs=1", "--model.client.local_epochs=1")
    assert acceptance.fits.rounds_of(run) == 1


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("name", [*LOST, *LOST_IN_GROUP])
def test_a_lost_rank_is_named_and_nothing_stays(acceptance, bench, name):
    result = acceptance.judge(row(acceptance, name), bench)
    assert result.verdict == "pass", result
    assert "code 2, 0 processes left" in result.figure
    assert "rank 1 " in result.figure
    assert "round 1, client town0" in result.figure or name not in LOST_IN_GROUP


@pytest.mark.parametrize(("doing", "in_group", "code", "holds"), [
    ("round 1, client town0", True, 2, True), ("round 1, after its clients", True, 2, False),
    ("round 2, client town1", True, 2, False), ("round 2, client town1", False, 2, True),
    ("round 1, client town0", True, 1, False),
])  # fmt: skip
def test_a_rank_that_trains_no_client_with_others_is_not_lost_within_a_group(acceptance, doing, in_group, code, holds):
    output = f"round 1/3: town0 (1/1), batch 3/6\nfedsim: error: rank 1 ended without a word, in {doing}\n"
    assert acceptance.ranks.judge_end(output, code, [], 1.0, in_group).holds == holds


@pytest.mark.parametrize("name", ["ranks", "groups", "shared-2x2", *LOST, *LOST_IN_GROUP])
def test_one_gpu_is_too_few_for_some_rows(acceptance, bench, name):
    result = acceptance.judge(row(acceptance, name), replace(bench, device=torch.device("cuda"), gpus=1))
    assert result.verdict == "not here"
    assert "needs 2 GPUs" in result.figure


def test_all_rows_have_a_bar(acceptance, bench, monkeypatch):
    """Those of speed, with figures that no GPU reaches; the others are made to fail below."""
    monkeypatch.setattr(acceptance.training.Turns, "medians", lambda turns: (100.0, 1.0))
    of_a_gpu = replace(bench, device=torch.device("cuda"), gpus=1, reduced=False)
    for name in ("train-32", "train-64", "channels-32", "many"):
        outcome = row(acceptance, name).check(bench)
        assert acceptance.judge(acceptance.Row("x", "", "", 1, lambda bench, o=outcome: o), of_a_gpu).verdict == "fail"
        assert outcome.bar


# -- each verdict can be fail ------------------------------------------------------------------------------------------


def test_a_wait_per_batch_is_counted(acceptance, bench, monkeypatch):
    step = Client.step

    def reading(client, loss, *args, **kwargs):
        loss.item()
        return step(client, loss, *args, **kwargs)

    monkeypatch.setattr(Client, "step", reading)
    result = acceptance.judge(row(acceptance, "waits"), bench)
    assert result.verdict == "fail"
    assert result.figure.startswith("1 per step")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "said"), [
    ("channels-32", "images reached fedsim's convolutions in the usual order"),
    ("compile-32", "fedsim compiled nothing"),
])  # fmt: skip
def test_a_setting_that_does_nothing_fails_its_row(acceptance, bench, monkeypatch, name, said):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # without a compiler of C++
    monkeypatch.setenv("CXX", sys.executable)  # which is never called
    assert acceptance.judge(row(acceptance, name), bench).verdict == "not here"
    monkeypatch.setattr(FlatModel, "prepare", lambda model, settings: None)
    result = acceptance.judge(row(acceptance, name), bench)
    assert (result.verdict, result.figure) == ("fail", f"RuntimeError: {said}")


def test_wrong_neighbours_are_found(acceptance, bench, monkeypatch):
    def search(query, gallery, k):
        found = acceptance.ranking.nearest(query, gallery, k + 1)
        return Neighbours(found.index[:, 1:], found.similarity[:, 1:])

    monkeypatch.setattr(acceptance.ranking, "make_search", lambda name, device: search)
    assert acceptance.judge(row(acceptance, "faiss"), bench).verdict == "fail"


def test_wrong_distances_are_found(acceptance, bench, monkeypatch):
    rerank, calls = acceptance.ranking.rerank, []

    def off(query, gallery, search):
        calls.append(query)
        return rerank(query, gallery, search) + 0.01 * len(calls)

    monkeypatch.setattr(acceptance.ranking, "rerank", off)
    assert acceptance.judge(row(acceptance, "reciprocal"), bench).verdict == "fail"


def test_a_bit_that_differs_is_found(acceptance, monkeypatch):
    nothing = {"b": torch.zeros(1)}
    runs = {"one": nothing | {"a": torch.ones(3)}, "two": nothing | {"a": torch.tensor([1, 1, 1.5])}, "less": nothing}
    monkeypatch.setattr(acceptance.fits, "tensors_of", runs.__getitem__)
    assert acceptance.fits.compare("x", "one", "one").holds
    outcome = acceptance.fits.compare("x", "one", "two")
    assert (outcome.holds, outcome.figure) == (False, "x: 1 of 2 tensors differ, by 5e-01 at most")
    assert not acceptance.fits.compare("x", "one", "less").holds


@pytest.mark.parametrize(("ratio", "verdict"), [(1.05, "pass"), (1.2, "fail")])
def test_speed_is_judged_on_a_gpu_in_full_size(acceptance, bench, monkeypatch, ratio, verdict):
    monkeypatch.setattr(acceptance.training.Turns, "medians", lambda turns: (ratio, 1.0))
    outcome = row(acceptance, "train-32").check(bench)
    of_a_gpu = replace(bench, device=torch.device("cuda"), gpus=1, reduced=False)
    judged = acceptance.judge(acceptance.Row("x", "", "", 1, lambda bench: outcome), of_a_gpu)
    assert judged.verdict == verdict
    assert acceptance.judge(acceptance.Row("x", "", "", 1, lambda bench: outcome), bench).verdict == "not here"


def test_a_row_that_raises_is_a_fail_of_one_line(acceptance, bench):
    def check(bench):
        raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be\nreported later")

    result = acceptance.judge(acceptance.Row("x", "", "", 1, check), bench)
    assert (result.verdict, result.figure) == ("fail", "RuntimeError: CUDA error: out of memory")


# -- the script --------------------------------------------------------------------------------------------------------


def test_a_row_that_takes_too_long_is_ended(acceptance, tmp_path):
    result = acceptance.run_apart(row(acceptance, "faiss"), tmp_path, True, 0.2)
    assert (result.verdict, result.figure) == ("fail", "no end within 0 s")


@pytest.mark.slow
def test_a_process_that_ends_without_a_result_is_a_fail(acceptance, tmp_path, quick_python):
    stranger = replace(row(acceptance, "faiss"), name="nothing")
    result = acceptance.run_apart(stranger, tmp_path, True, 100)
    assert result.verdict == "fail"
    assert "its process ended with code 2" in result.figure


@pytest.mark.parametrize(("verdict", "code"), [("pass", 0), ("not here", 0), ("fail", 1)])
def test_the_exit_code_says_whether_a_row_failed(acceptance, capsys, monkeypatch, verdict, code):
    names = ["market", "faiss"]

    def run_apart(row, folder, reduced, limit):
        return acceptance.Result(verdict if row.name == "market" else "pass", "1 | 2", "3", 4.4)

    monkeypatch.setattr(acceptance, "run_apart", run_apart)
    monkeypatch.setattr(sys, "argv", ["acceptance.py", "--only", *names])
    assert acceptance.main() == code
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[-1].split(", ")[["pass", "fail", "not here"].index(verdict)].startswith("1" if verdict != "pass" else "2")
    )
    assert sum(line.startswith("|") for line in lines) == 2 + len(names)


@pytest.mark.parametrize(("gpus", "says"), [(0, True), (1, True), (2, False)])
def test_with_fewer_than_two_gpus_the_table_s_end_says_what_was_not_tried(acceptance, gpus, says):
    last = acceptance.table({"faiss": acceptance.Result("pass", "1", "")}, gpus).splitlines()[-1]
    assert (last == "Sums among GPUs were not tried: that needs two GPUs.") == says
    assert says or last.startswith("| FAISS")


def test_rows_without_time_left_have_failed(acceptance):
    results = acceptance.run_all([row(acceptance, "market")], True, 0.0)
    assert (results["market"].verdict, results["market"].figure) == ("fail", "no time was left")


@pytest.mark.slow
def test_the_script_prints_a_table(quick_python):
    words = [sys.executable, str(BENCHMARKS / "acceptance.py"), "--reduced", "--only", "faiss"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "| FAISS finds torch's neighbours (docs/evaluation.md) | pass" in done.stdout


def test_a_wrong_row_is_refused(acceptance, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["acceptance.py", "--only", "nonsense"])
    with pytest.raises(SystemExit) as ended:
        acceptance.main()
    assert ended.value.code == 2
    assert "invalid choice: 'nonsense'" in capsys.readouterr().err
