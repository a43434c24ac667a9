"""Runs that are killed, frozen, or fail: the others end by themselves, and the resumed run has the same bits."""

import csv
import os
import shutil
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from failing import (
    PATIENCE,
    POINTS,
    Raising,
    Run,
    assert_equal,
    await_round,
    await_true,
    errors,
    finish,
    fit,
    last,
    launch,
    processes_of,
    read_result,
    resume,
)
from fedsim.cli.report.runs import metrics_files
from fedsim.core.errors import TrainingError
from fedsim.methods import FedPav
from fedsim.strategy.checkpoint_files import read_checkpoint
from small import fit as fit_here
from small import make_data, make_model, refuse, vector

pytestmark = [pytest.mark.dist, pytest.mark.slow]

KILLED = -signal.SIGKILL


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The result of the run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    finish(fit(folder))
    return read_result(last(folder))


def begin_again(folder, *args, ranks):
    """Give the whole command line again, as a script that restarts a run does."""
    return fit(folder, "--ckpt_path", "last", *args, ranks=ranks)


def kill(folder, point, round_, ranks, victim):
    """Run until a rank kills itself; the others must end by themselves, and say why in one line."""
    run = fit(folder, ranks=ranks, fail=f"{point}@{round_}/{victim}")
    codes = run.wait(timeout=PATIENCE)
    for rank, code in enumerate(codes):
        assert code == (KILLED if victim in (rank, "*") else 2), f"{codes}\n{run.output}"
        assert "Traceback" not in run.log(rank)
        assert (code == 2) == ("another rank ended" in run.log(rank) or "ended without a word" in run.log(rank))


# -- killed ------------------------------------------------------------------------------------------------------------

LEAVING_FILES = ("mid-client", "mid-checkpoint", "after rename")
"""points that leave other files behind; where nobody is left to notice, the rest are like the first"""
CASES = [
    *((point, 2, victim) for point in POINTS for victim in (0, 1) if (point, victim) != ("after rename", 1)),
    *((point, 2, "*") for point in ("mid-collective", "mid-checkpoint")),  # rank 0 alone renames
    *((point, 1, 0) for point in LEAVING_FILES),
]


@pytest.mark.parametrize(("point", "ranks", "victim"), CASES)
def test_a_killed_run_continues_to_the_same_bits(whole, tmp_path, point, ranks, victim):
    number = CASES.index((point, ranks, victim))
    folder = tmp_path / "run"
    kill(folder, point, 2, ranks, victim)
    again = begin_again if number % 2 else resume
    finish(again(folder, ranks=ranks if number // 2 % 2 else 3 - ranks))
    assert_equal(read_result(last(folder)), whole)


@pytest.mark.parametrize("point", LEAVING_FILES)
def test_a_run_that_is_killed_before_its_first_checkpoint_begins_again(whole, tmp_path, point):
    folder = tmp_path / "run"
    kill(folder, point, 1, 2, 0)
    finish(begin_again(folder, ranks=1))
    assert_equal(read_result(last(folder)), whole)


@contextmanager
def launched(folder, *args):
    run = launch(folder, *args)
    try:
        yield run
    finally:
        run.kill()


def test_no_rank_outlives_the_process_that_started_it(tmp_path):
    stuck = ["--trainer.callbacks+=failing.Slow", "--trainer.callbacks.delay=600", "--trainer.callbacks.start=2"]
    with launched(tmp_path / "run", *stuck) as run:
        await_round(run.folder, 2, lambda: run.log)
        assert len(processes_of(run.folder)) == 2
        run.process.kill()
        assert run.await_end(timeout=PATIENCE) == KILLED
        assert "Traceback" not in run.log


def test_no_rank_outlives_a_launcher_that_is_killed_while_they_start(tmp_path):
    with launched(tmp_path / "run") as run:
        await_true(lambda: len(processes_of(run.folder)) == 2, PATIENCE, lambda: run.log)
        run.process.kill()
        assert run.await_end(timeout=PATIENCE) == KILLED
        assert "Traceback" not in run.log


# -- failed ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delay", [0.1, 600.0], ids=["polling", "stuck"])
@pytest.mark.parametrize("client", [0, 1])
def test_an_error_on_one_rank_ends_the_other_in_the_middle_of_a_long_client(tmp_path, client, delay):
    raising = ["--model.method=failing.Raising", f"--model.method.client=town{client}", "--model.method.round=1"]
    slow = ["--trainer.callbacks+=failing.Slow", f"--trainer.callbacks.client=town{1 - client}",
            f"--trainer.callbacks.delay={delay}", "--model.client.local_epochs=50"]  # fmt: skip
    run = fit(tmp_path / "run", *raising, *slow, ranks=2)
    codes = run.wait(timeout=PATIENCE)
    assert sorted(codes) == [1, 2], f"{codes}\n{run.output}"
    rank = codes.index(1)  # whichever took the client
    assert "ZeroDivisionError: something unforeseen" in run.log(rank)
    assert errors(run.log(1 - rank)) == [
        f"rank {rank} stopped in round 1, client town{client}: ZeroDivisionError('something unforeseen')"
    ]


@pytest.mark.parametrize(("ranks", "client"), [(1, "town1"), (2, "town0"), (2, "town1")])
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("memory", ["batch 1 of ", "out of memory with 8 images per batch", "CUDA out of memory"]),
        ("nan", ["loss or weights are not finite", "model.on_bad_update"]),
    ],
)
def test_an_explained_error_is_one_line_that_names_client_and_round(tmp_path, kind, words, ranks, client):
    options = ["--model.method=failing.Raising", f"--model.method.client={client}", f"--model.method.kind={kind}"]
    run = fit(tmp_path / "run", *options, ranks=ranks)
    assert run.wait(timeout=PATIENCE) == [2] * ranks, run.output
    assert run.log().count("\n") == 1
    for part in [f"client {client}, round 2", *words]:
        assert part in run.log()
    assert "Traceback" not in run.output


# -- frozen ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frozen", [0, 1])
def test_the_others_do_not_wait_for_a_frozen_rank(tmp_path, frozen):
    silence = "--trainer.strategy.silence_timeout=0:00:04"
    run = fit(tmp_path / "run", silence, ranks=2, fail=f"mid-client@2/{frozen}", how="SIGSTOP")
    survivor = run.processes[1 - frozen]
    survivor.join(timeout=PATIENCE)
    try:
        assert survivor.exitcode == 2, run.output
        assert len(errors(run.log(1 - frozen))) == 1
        assert f"rank {frozen} gave no sign of life for 4 s" in run.log(1 - frozen)
        run.signal(signal.SIGCONT, frozen)
        assert run.wait(timeout=PATIENCE)[frozen] == 2, run.output
    finally:
        run.kill()


# -- in a span ---------------------------------------------------------------------------------------------------------

# town0 has four times as much to do as the others together, so both ranks train it first
SPAN = ["--model.client.micro_batch=4", "--model.clients.town0={local_epochs: 8}"]


@pytest.fixture(scope="module")
def whole_in_pieces(tmp_path_factory):
    """The result of a run on one rank that nothing interrupts."""
    folder = tmp_path_factory.mktemp("pieces") / "run"
    finish(fit(folder, *SPAN))
    return read_result(last(folder))


@pytest.mark.parametrize(("victim", "ranks"), [(0, 2), (1, 1)])
def test_a_run_that_is_killed_in_a_span_continues_to_the_same_bits(whole_in_pieces, tmp_path, victim, ranks):
    folder = tmp_path / "run"
    run = fit(folder, *SPAN, ranks=2, fail=f"mid-client@2/{victim}")
    codes = run.wait(timeout=PATIENCE)
    assert codes[victim] == KILLED
    assert codes[1 - victim] == 2, run.output
    assert "ended without a word" in run.log(1 - victim)
    finish(resume(folder, ranks=ranks))
    assert_equal(read_result(last(folder)), whole_in_pieces)


def test_the_other_ranks_of_a_span_do_not_wait_for_a_frozen_one(tmp_path):
    silence = "--trainer.strategy.silence_timeout=0:00:04"
    run = fit(tmp_path / "run", *SPAN, silence, ranks=2, fail="mid-client@2/1", how="SIGSTOP")
    run.processes[0].join(timeout=PATIENCE)
    try:
        assert run.processes[0].exitcode == 2, run.output
        [line] = errors(run.log(0))
        assert line.startswith("rank 1 gave no sign of life for 4 s in round ")
    finally:
        run.kill()


# -- bad updates -------------------------------------------------------------------------------------------------------

SKIP = ["--model.method=failing.Raising", "--model.method.kind=nan", "--model.on_bad_update=skip_client"]


@pytest.fixture(scope="module")
def skipped(tmp_path_factory):
    """The result of a run that leaves out town1 in round 2."""
    folder = tmp_path_factory.mktemp("skipped") / "run"
    finish(fit(folder, *SKIP))
    return folder


def test_a_bad_update_is_left_out_as_if_the_client_had_not_answered(skipped, tmp_path):
    absent = ["--model.selection=failing.Absent", "--model.selection.client=town1"]
    finish(fit(tmp_path / "run", *absent))
    assert_equal(read_result(last(skipped)), read_result(last(tmp_path / "run")))
    rows = read_rows(skipped / "metrics.csv")
    assert [(float(row["train/clients"]), float(row["train/skipped"])) for row in rows] == [(3, 0), (2, 1), (3, 0)]


def test_a_client_that_is_left_out_keeps_its_private_state(tmp_path):
    before, after = tmp_path / "before", tmp_path / "after"
    finish(fit(before, *SKIP, "--trainer.max_epochs=1"))
    finish(fit(after, *SKIP, "--trainer.max_epochs=2"))
    old, new = read_result(last(before)), read_result(last(after))
    unchanged = {name for name in old if torch.equal(old[name], new[name])}
    assert unchanged == {name for name in old if name.startswith("town1/")}


@pytest.mark.parametrize("client", ["town0", "town1"])
def test_any_number_of_ranks_leaves_out_the_same_and_says_so(skipped, tmp_path, client):
    one, two = skipped, tmp_path / "two"
    if client != "town1":
        one = tmp_path / "one"
        finish(fit(one, *SKIP, f"--model.method.client={client}"))
    run = finish(fit(two, *SKIP, f"--model.method.client={client}", ranks=2))
    assert_equal(read_result(last(one)), read_result(last(two)))
    assert run.output.count(f"round 2 leaves out {client}: not finite") == 1


def test_a_client_that_is_left_out_has_no_local_model_to_be_scored(tmp_path):
    finish(fit(tmp_path / "run", *SKIP, *SCORING, "--model.method.round=1"))


def test_a_round_in_which_every_update_is_left_out_changes_nothing(tmp_path):
    model = fit_here(make_model(Raising(client="", kind="nan", round=2), on_bad_update="skip_client"), rounds=2)
    expected = fit_here(make_model(Raising(client="", kind="nan", round=2), on_bad_update="skip_client"), rounds=1)
    assert torch.equal(vector(model), vector(expected))
    for name, client in model.parts.clients.items():
        assert torch.equal(client.private_state()["state"], expected.parts.clients[name].private_state()["state"])
    assert model.round_metrics["train/skipped"] == 3


class Blown(FedPav):
    """Personalised models of a client whose weights are finite, but too large to be used."""

    delivers = "personalised"

    def personalise(self, client):
        super().personalise(client)
        if client.client_name == "town1":
            client.model.whole.mul_(1e30)


def test_a_model_whose_features_are_not_finite_is_named():
    model = make_model(Blown())
    options = {"limit_val_batches": 1.0, "check_val_every_n_epoch": 1}
    with pytest.raises(TrainingError, match=r"personalised model of client town1 on val town1: .*not finite; .*lower"):
        fit_here(model, make_data(val="identities", val_fraction=0.3), rounds=1, **options)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def read_rows(path):
    with path.open() as file:
        return list(csv.DictReader(file))


SCORING = ["--trainer.limit_val_batches=1.0", "--trainer.check_val_every_n_epoch=1", "--data.val=identities",
           "--data.val_fraction=0.3"]  # fmt: skip


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    """A finished run on two ranks, with a best checkpoint."""
    folder = tmp_path_factory.mktemp("scored") / "run"
    finish(fit(folder, *SCORING, "--trainer.max_epochs=2", ranks=2))
    return folder


def test_every_name_of_a_checkpoint_is_enough_for_a_test(scored, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(scored, moved)
    checkpoint = last(scored)
    of_last = [("last", "--run_dir", scored), (checkpoint,), (checkpoint / "v2",), (last(moved),)]
    of_best = [("best", "--run_dir", scored), (scored,), (scored / "checkpoints" / "best.ckpt",), (moved,)]
    for same, which in ((of_last, "round 2, last"), (of_best, "best by val/mAP")):
        logs = [finish(Run(tmp_path, "test", "--ckpt_path", *names)).log().splitlines() for names in same]
        tables = {"\n".join(line for line in log if not line.startswith(("checkpoint ", "wrote "))) for log in logs}
        assert len(tables) == 1
        assert "town0" in tables.pop()
        for log in logs:  # the line names the path
            assert [line.endswith(which) for line in log if line.startswith("checkpoint ")] == [True]


def cut(file):
    os.truncate(file, file.stat().st_size // 2)


def replace_by(content):
    return lambda file: torch.save(content, file)


DAMAGES = {
    "cut": ("global.ckpt", cut, "global.ckpt: cannot be read as a checkpoint"),
    "removed": ("global.ckpt", Path.unlink, "last.ckpt: holds no complete checkpoint"),
    "foreign": ("global.ckpt", replace_by({"state_dict": {}}), "global.ckpt: not a checkpoint of fedsim"),
    "old": ("global.ckpt", replace_by({"fedsim": {"format": 1}}), "global.ckpt: is of format 1"),
    "objects": ("global.ckpt", replace_by({"fedsim": Path("x")}), "global.ckpt: cannot be read as a checkpoint"),
    "text": ("global.ckpt", lambda file: file.write_text("text"), "global.ckpt: cannot be read as a checkpoint"),
    "states-cut": ("clients-0-0.safetensors", cut, "clients-0-0.safetensors: cannot be read"),
    "states-removed": ("clients-1-0.safetensors", Path.unlink, "clients-1-0.safetensors is missing"),
}


def test_a_moved_run_continues_where_it_is_and_remembers_its_best(scored, tmp_path):
    folder = tmp_path / "moved"
    shutil.copytree(scored, folder)
    worse = "--model.client.optimizer.init_args.lr=0.5"
    run = finish(resume(folder, "--trainer.max_epochs=3", worse))
    assert "Warning" not in run.log()
    assert "dirpath" not in run.log()
    assert read_checkpoint(last(folder))["epoch"] == 2
    scores = [float(row["val/mAP"]) for file in metrics_files(folder) for row in read_rows(file) if row["val/mAP"]]
    assert read_checkpoint(folder / "checkpoints" / "best.ckpt")["epoch"] == scores.index(max(scores))
    assert read_checkpoint(last(scored))["epoch"] == 1


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_one_line_that_names_the_file(scored, tmp_path, capsys, kind):
    name, damage, message = DAMAGES[kind]
    folder = tmp_path / "run"
    shutil.copytree(scored, folder)
    damage(last(folder) / "v2" / name)
    config = last(scored) / "v2" / "config.yaml"
    for command, options in (("fit", ["--trainer.max_epochs=3"]), ("test", [])):
        own = ("--config", config, "--run_dir", folder, "--ckpt_path", last(folder), "--trainer.devices=1")
        assert message in refuse(capsys, command, *own, *options)


def test_a_file_is_no_checkpoint(tmp_path, capsys):
    torch.save({"state_dict": {}}, tmp_path / "old.ckpt")
    line = refuse(capsys, "test", "--ckpt_path", tmp_path / "old.ckpt")
    assert f"{tmp_path / 'old.ckpt'}: is a file; checkpoints of fedsim are directories" in line


def test_only_the_best_of_a_users_checkpoints_are_kept(tmp_path):
    folder = tmp_path / "run"
    options = {
        "monitor": "train/loss",
        "mode": "min",
        "save_top_k": 2,
        "filename": "{epoch}",
        "dirpath": tmp_path / "mine",
    }
    own = [f"--trainer.callbacks.{name}={value}" for name, value in options.items()]
    finish(fit(folder, "--trainer.callbacks+=ModelCheckpoint", *own, ranks=2))
    losses = [float(row["train/loss"]) for row in read_rows(folder / "metrics.csv")]
    best = sorted(range(3), key=losses.__getitem__)[:2]
    assert {path.name for path in (tmp_path / "mine").iterdir()} == {f"epoch={round_}.ckpt" for round_ in best}
    assert all(read_result(path) for path in (tmp_path / "mine").iterdir())


@pytest.mark.parametrize(
    ("point", "rank", "ranks"), [("states", 0, 1), ("states", 1, 2), ("globals", 0, 1), ("globals", 0, 2)]
)
def test_a_full_disk_is_one_line_and_leaves_the_last_checkpoint(whole, tmp_path, point, rank, ranks):
    folder = tmp_path / "run"
    run = fit(folder, ranks=ranks, fail=f"no space for {point}@2/{rank}")
    assert run.wait(timeout=PATIENCE) == [2] * ranks, run.output
    assert len(errors(run.log())) == 1
    assert "the checkpoint cannot be written" in run.log()
    assert read_checkpoint(last(folder))["epoch"] == 0
    finish(resume(folder))
    assert_equal(read_result(last(folder)), whole)
