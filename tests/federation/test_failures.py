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
    assert_equal,
    await_round,
    await_true,
    errors,
    finish,
    fit,
    go_on,
    last,
    launch,
    read_result,
    results,
    resume,
)
from fedsim.__main__ import main
from fedsim.core.errors import TrainingError
from fedsim.core.metrics_rows import metrics_files
from fedsim.core.owned_folders import remove_abandoned_folders
from fedsim.methods import FedPav
from fedsim.strategy.checkpoint_files import read_checkpoint
from small import fit as fit_here
from small import make_data, make_model, refuse, vector

pytestmark = [pytest.mark.dist, pytest.mark.slow]

KILLED = -signal.SIGKILL


ROUNDS = 7
LONG = [f"--trainer.max_epochs={ROUNDS}"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The result after each round of the run that nothing interrupts."""
    return results(tmp_path_factory.mktemp("whole") / "run", rounds=ROUNDS)


def assert_killed(run, victim):
    """The others must end by themselves, and say why in one line."""
    codes = run.wait(timeout=PATIENCE)
    for rank, code in enumerate(codes):
        assert code == (KILLED if victim in (rank, "*") else 2), f"{codes}\n{run.output}"
        assert "Traceback" not in run.log(rank)
        assert (code == 2) == ("another rank ended" in run.log(rank) or "ended without a word" in run.log(rank))


# -- killed ------------------------------------------------------------------------------------------------------------

# Each part of a run completes the round in which the part before it was killed, and is killed in the next one. So the
# bits after each round tell whether the part before left all that is needed. (round, point, ranks, victim)
PARTS = {
    "rank 0": [
        *((1, point, 2, 0) for point in ("mid-client", "mid-checkpoint")),  # there is no checkpoint yet
        *((round_, point, 2, 0) for round_, point in enumerate(POINTS, start=2)),
    ],
    "rank 1": [(round_, point, 2, 1) for round_, point in enumerate(POINTS[:-1], start=2)],  # rank 0 alone renames
    # where nobody is left to notice, points differ by the files that they leave behind
    "all": [
        (1, "after rename", 2, 0),
        (2, "mid-collective", 2, "*"),
        (3, "mid-checkpoint", 2, "*"),
        (4, "mid-client", 1, 0),
        (5, "mid-checkpoint", 1, 0),
        (6, "after rename", 1, 0),
    ],
}


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_a_run_that_is_killed_again_and_again_has_the_same_bits_in_each_round(whole, tmp_path, parts):
    folder = tmp_path / "run"
    for number, (round_, point, ranks, victim) in enumerate(parts):
        assert_killed(go_on(folder, number, *LONG, ranks=ranks, fail=f"{point}@{round_}/{victim}"), victim)
        if round_ > 1:
            assert_equal(read_result(last(folder)), whole[round_ - 2])
    finish(go_on(folder, len(parts), *LONG, ranks=3 - ranks))
    assert_equal(read_result(last(folder)), whole[-1])


def test_a_full_disk_is_one_line_and_leaves_the_last_checkpoint(whole, tmp_path):
    folder = tmp_path / "run"
    parts = [("states", 0, 1), ("states", 1, 2), ("globals", 0, 1), ("globals", 0, 2)]
    for number, (point, rank, ranks) in enumerate(parts):
        run = go_on(folder, number, *LONG, ranks=ranks, fail=f"no space for {point}@{number + 2}/{rank}")
        assert run.wait(timeout=PATIENCE) == [2] * ranks, run.output
        assert len(errors(run.log())) == 1
        assert "the checkpoint cannot be written" in run.log()
        assert read_checkpoint(last(folder))["epoch"] == number
        assert_equal(read_result(last(folder)), whole[number])
    finish(go_on(folder, len(parts), *LONG))
    assert_equal(read_result(last(folder)), whole[-1])


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
        assert len(run.pids) == 2
        run.process.kill()
        assert run.await_end() == KILLED
        assert "Traceback" not in run.log


def test_rank_0_does_not_outlive_a_rank_that_it_started(tmp_path):
    with launched(tmp_path / "run", "--trainer.max_epochs=10000") as run:
        await_round(run.folder, 2, lambda: run.log)
        [other] = set(run.pids) - {run.process.pid}
        os.kill(other, signal.SIGKILL)
        assert run.await_end() != 0
        assert "Traceback" not in run.log


def test_no_rank_outlives_a_launcher_that_is_killed_while_they_start(tmp_path):
    with launched(tmp_path / "run") as run:
        await_true(lambda: len(run.pids) == 2, PATIENCE, lambda: run.log)
        run.process.kill()
        assert run.await_end() == KILLED
        assert "Traceback" not in run.log


# -- failed ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("client", "delay"), [(0, 0.1), (1, 600.0)], ids=["polling", "stuck"])
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


WORDS = {
    "memory": ["batch 1 of ", "out of memory with 8 images per batch", "CUDA out of memory"],
    "nan": ["loss or weights are not finite", "model.on_bad_update"],
}


# a rank reports all errors alike, so not every kind is tried on every rank
@pytest.mark.parametrize(
    ("kind", "ranks", "client"), [("memory", 1, "town1"), ("memory", 2, "town0"), ("nan", 2, "town1")]
)
def test_an_explained_error_is_one_line_that_names_client_and_round(tmp_path, kind, ranks, client):
    options = ["--model.method=failing.Raising", f"--model.method.client={client}", f"--model.method.kind={kind}"]
    run = fit(tmp_path / "run", *options, ranks=ranks)
    assert run.wait(timeout=PATIENCE) == [2] * ranks, run.output
    assert len(errors(run.log())) == 1
    for part in [f"client {client}, round 2", *WORDS[kind]]:
        assert part in run.log()
    assert "Traceback" not in run.output


# -- frozen ------------------------------------------------------------------------------------------------------------


# town0 has twice as much to do as the others together, so both ranks train it first
RANK_GROUP = ["--model.client.micro_batch=4", "--model.clients.town0={local_epochs: 4}"]


def test_the_others_do_not_wait_for_a_frozen_rank(tmp_path):
    """All runs at once, because most of their time is silence."""
    silence = "--trainer.strategy.silence_timeout=0:00:04"
    cases = {"rank 0": (0, []), "rank 1": (1, []), "rank 1 of a rank group": (1, RANK_GROUP)}
    runs = {
        name: fit(tmp_path / name, silence, *options, ranks=2, fail=f"mid-client@2/{frozen}", how="SIGSTOP")
        for name, (frozen, options) in cases.items()
    }
    try:
        for name, run in runs.items():
            frozen, _ = cases[name]
            run.processes[1 - frozen].join(timeout=PATIENCE)
            assert run.processes[1 - frozen].exitcode == 2, f"{name}\n{run.output}"
            [line] = errors(run.log(1 - frozen))
            assert line.startswith(f"rank {frozen} gave no sign of life for 4 s")
        for name, run in runs.items():  # the others have continued it, so that it keeps no memory
            frozen, _ = cases[name]
            assert run.wait(timeout=PATIENCE)[frozen] == 2, f"{name}\n{run.output}"
    finally:
        for run in runs.values():
            run.kill()


def test_a_run_that_is_killed_in_rank_groups_has_the_same_bits_in_each_round(tmp_path):
    whole, folder = results(tmp_path / "whole", *RANK_GROUP), tmp_path / "run"
    for number, victim in enumerate((0, 1)):
        run = go_on(folder, number, *RANK_GROUP, ranks=2, fail=f"mid-client@{number + 2}/{victim}")
        assert_killed(run, victim)
        assert "ended without a word" in run.log(1 - victim)
        assert_equal(read_result(last(folder)), whole[number])
    finish(go_on(folder, 2, *RANK_GROUP))
    assert_equal(read_result(last(folder)), whole[-1])


def test_ranks_that_fail_end_though_the_end_of_python_would_wait(tmp_path):
    """NCCL's end may wait for a lost rank for ever; so does that of these ranks. All runs at once."""
    stuck = ["--trainer.strategy.silence_timeout=0:00:04", "--trainer.callbacks+=failing.StuckEnd"]
    defect = ["--model.method=failing.Raising", "--model.method.kind=defect"]
    runs = {
        how: fit(tmp_path / how, *stuck, ranks=2, fail="mid-client@2/1", how=how) for how in ("SIGKILL", "SIGSTOP")
    } | {"defect": fit(tmp_path / "defect", *stuck, *defect, ranks=2)}
    codes = {"SIGKILL": [-9, 2], "SIGSTOP": [2, 2], "defect": [1, 2]}
    try:
        for how, run in runs.items():
            assert sorted(run.wait(timeout=PATIENCE), key=str) == codes[how], f"{how}\n{run.output}"
            lines = [line for line in run.output.splitlines() if line.startswith("fedsim: error: ")]
            assert lines == [*dict.fromkeys(lines)], f"{how}\n{run.output}"
            assert lines, f"{how}\n{run.output}"
        assert runs["defect"].output.count("Traceback (most recent call last)") == 1
    finally:
        for run in runs.values():
            run.kill()


HANGS = [("sleep", "town0"), ("loop", "town1"), ("lock", "town2"), ("pipe", "town1")]


def test_a_client_that_hangs_ends_all_ranks_with_its_line(tmp_path):
    """All runs at once, because most of their time is silence."""
    silence = "--trainer.strategy.silence_timeout=0:00:02"
    runs = {}
    for how, client in HANGS:
        hanging = ["--model.method=failing.Hanging", f"--model.method.client={client}", f"--model.method.how={how}"]
        runs[how, client] = fit(tmp_path / how, silence, *hanging, ranks=2)
    try:
        for (how, client), run in runs.items():
            assert run.wait(timeout=PATIENCE) == [2, 2], f"{how}\n{run.output}"
            assert f"stopped in round 2, client {client}: no progress for 2 s at failing.py, line " in run.output
            assert "(upload); if this step" in run.output
            assert "Traceback" not in run.output
    finally:
        for run in runs.values():
            run.kill()


def test_long_work_with_progress_is_no_hang(tmp_path):
    working = ["--model.method=failing.Hanging", "--model.method.how=work", "--model.method.seconds=15"]
    finish(fit(tmp_path / "run", "--trainer.strategy.silence_timeout=0:00:02", *working, ranks=2))


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM", "SIGSEGV"])
def test_a_rank_that_dies_while_ranks_start_is_named(tmp_path, how):
    with launched(tmp_path / "run", "--trainer.callbacks+=failing.Dying", f"--trainer.callbacks.how={how}") as run:
        assert run.await_end() == 2
        assert f"fedsim: error: rank 1 was ended by {how}" in run.log
        assert "Traceback" not in run.log


@pytest.mark.parametrize(("signum", "rank"), [(signal.SIGKILL, 0), (signal.SIGTERM, 0), (signal.SIGKILL, 1)])
def test_memory_that_ranks_share_is_free_after_a_start_that_is_killed(tmp_path, signum, rank):
    memory = tmp_path / "memory"  # stands for /dev/shm
    memory.mkdir()
    where = {"MEMORY": str(memory)}
    reading = ["--trainer.callbacks+=failing.Reading", f"--trainer.callbacks.ready={tmp_path / 'ready'}"]
    run = launch(tmp_path / "run", *reading, environment=where)
    try:
        await_true((tmp_path / "ready-1").exists, PATIENCE, lambda: run.log)
        await_true((tmp_path / "ready-0").exists, PATIENCE, lambda: run.log)
        assert list(memory.glob("fedsim-*/images"))
        os.kill(int((tmp_path / f"ready-{rank}").read_text()), signum)
        run.await_end()
    finally:
        run.kill()
    remove_abandoned_folders([memory])  # as the next start does, if it is the first
    assert list(memory.iterdir()) == []


# -- bad updates -------------------------------------------------------------------------------------------------------

SKIP = ["--model.method=failing.Raising", "--model.method.kind=nan", "--model.on_bad_update=skip_client"]


@pytest.fixture(scope="module")
def skipped(tmp_path_factory):
    """A run that leaves out town1 in round 2: its directory, and the result after each round."""
    folder = tmp_path_factory.mktemp("skipped") / "run"
    return folder, results(folder, *SKIP)


def test_a_bad_update_is_left_out_as_if_the_client_had_not_answered(skipped, tmp_path):
    folder, after = skipped
    absent = ["--model.selection=failing.Absent", "--model.selection.client=town1"]
    finish(fit(tmp_path / "run", *absent))
    assert_equal(after[-1], read_result(last(tmp_path / "run")))
    rows = read_rows(folder / "metrics.csv")
    assert [(float(row["train/clients"]), float(row["train/skipped"])) for row in rows] == [(3, 0), (2, 1), (3, 0)]


def test_a_client_that_is_left_out_keeps_its_private_state(skipped):
    old, new, _ = skipped[1]
    unchanged = {name for name in old if torch.equal(old[name], new[name])}
    assert unchanged == {name for name in old if name.startswith("town1/")}


def test_two_ranks_leave_out_the_same_and_say_so(skipped, tmp_path):
    run = finish(fit(tmp_path / "two", *SKIP, ranks=2))
    assert_equal(skipped[1][-1], read_result(last(tmp_path / "two")))
    assert run.output.count("round 2 leaves out town1: not finite") == 1


def test_a_client_that_is_left_out_has_no_local_model_to_be_scored():
    model = make_model(Raising(kind="nan", round=1), on_bad_update="skip_client")
    fit_here(model, make_data(val="identities", val_fraction=0.3), rounds=1, limit_val_batches=1.0)
    scored = {name for name in model.scores if name.startswith("val/local/")}
    assert any("town0" in name for name in scored)
    assert not any("town1" in name for name in scored)


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


def test_every_name_of_a_checkpoint_is_enough_for_a_test(scored, tmp_path, capsys, caplog):
    moved = tmp_path / "moved"
    shutil.copytree(scored, moved)
    of_last = [("last", "--run_dir", scored), (last(scored) / "v2",), (last(moved),)]
    of_best = [("best", "--run_dir", scored), (scored / "checkpoints" / "best.ckpt",), (moved,)]
    for same, which in ((of_last, "round 2, last"), (of_best, "best by val/mAP")):
        tables = set()
        for names in same:
            caplog.clear()
            assert main(["test", "--ckpt_path", *map(str, names), "--trainer.devices=1"]) == 0
            tables.add(capsys.readouterr().out)
            [line] = [line for line in caplog.messages if line.startswith("checkpoint ")]  # it names the path
            assert line.endswith(which)
        assert len(tables) == 1
        assert "town0" in tables.pop()


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
