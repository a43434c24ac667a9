"""A run that is replaced is kept until the new one can stand alone, wherever the process that replaces it is killed."""

import os
import random
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from fedsim.core import replaced_run
from fedsim.core.errors import DataError
from fedsim.core.paths import RUN
from fedsim.core.replaced_run import bring_back, bring_back_at, drop_replaced, move_aside, put_back
from fedsim.core.run_lock import RunLock

FILES = ("metrics.csv", "metrics-1.csv", "summary.json", "config.yaml", "queries.npz", "wandb_id", "tests/best.json",
         "checkpoints/best.ckpt/v1/global.ckpt", "checkpoints/last.ckpt/v3/global.ckpt", "features/a.npz")  # fmt: skip


class KilledError(BaseException):
    """Stands for a process that is killed."""


def content(folder):
    return {str(p.relative_to(folder)): p.read_text() for p in sorted(folder.rglob("*")) if p.is_file()}


def write(folder, names, text):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.fixture
def run(tmp_path):
    write(tmp_path, FILES, "old")
    write(tmp_path, ("notes", "checkpoints/mine.txt"), "mine")
    return tmp_path


def new_run(folder, has_checkpoint):
    write(folder, ("metrics.csv", "config.yaml", "wandb_id", "checkpoints/last.ckpt/v1.tmp/global.ckpt"), "new")
    if has_checkpoint:
        write(folder, ["checkpoints/last.ckpt/v1/global.ckpt"], "new")


@pytest.mark.parametrize("has_checkpoint", [False, True])
@pytest.mark.parametrize("door", [bring_back, bring_back_at, lambda run: RUN.check(run, "run"),
                                  lambda run: bring_back_at(run / "checkpoints" / "last.ckpt")])  # fmt: skip
def test_the_old_run_is_back_unless_the_new_one_has_a_checkpoint(run, has_checkpoint, door, caplog):
    before = content(run)
    move_aside(run, with_ids=True)
    assert sorted(path.name for path in run.iterdir()) == ["checkpoints", "notes", "replaced-run"]
    new_run(run, has_checkpoint)
    new = {name: text for name, text in content(run).items() if not name.startswith("replaced-run")}
    door(run)
    assert content(run) == (new if has_checkpoint else before)
    assert len(caplog.messages) == (not has_checkpoint)
    door(run)
    assert content(run) == (new if has_checkpoint else before)
    assert not [*run.glob("replaced-run*")]


@pytest.mark.parametrize("seed", range(60))
def test_a_kill_at_any_rename_leaves_one_whole_run(run, seed, monkeypatch):
    before, draw = content(run), random.Random(seed)
    left = draw.randrange(30)

    def killed_at(function):
        def call(*args, **kwargs):
            nonlocal left
            left -= 1
            if left < 0:
                raise KilledError
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patch, suppress(KilledError):
        for owner, name in ((type(run), "rename"), (type(run), "unlink"), (shutil, "rmtree")):
            patch.setattr(owner, name, killed_at(getattr(owner, name)))
        patch.setattr(replaced_run, "put_back", lambda folder: None)  # a killed process puts nothing back
        move_aside(run, with_ids=True)
        new_run(run, has_checkpoint=False)
        put_back(run)
    bring_back(run)
    assert content(run) == before


def test_a_run_that_a_fit_writes_is_left_alone(run):
    move_aside(run, with_ids=True)
    new_run(run, has_checkpoint=False)
    lock = RunLock(run)
    lock.acquire()
    before = content(run)
    bring_back(run)
    assert content(run) == before
    lock.release()
    bring_back(run)
    assert content(run)["metrics.csv"] == "old"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("mode", [0o755, 0o700])
def test_a_reader_without_the_right_to_write_changes_nothing(mode):
    with tempfile.TemporaryDirectory() as text:
        run = Path(text)
        write(run, FILES, "old")
        move_aside(run, with_ids=True)
        before = content(run)
        run.chmod(mode)
        os.seteuid(12345)
        try:
            bring_back(run)
        finally:
            os.seteuid(0)
        assert content(run) == before


def test_a_replaced_run_goes_when_the_new_one_is_whole(run):
    move_aside(run, with_ids=False)
    assert (run / "wandb_id").read_text() == "old"
    drop_replaced(run)
    assert sorted(content(run)) == ["checkpoints/mine.txt", "notes", "wandb_id"]


def test_a_damaged_summary_is_named(run):
    (run / "summary.json").write_text("{")
    with pytest.raises(DataError, match=r"summary\.json: cannot be read"):
        replaced_run.is_finished(run)
    assert replaced_run.stands_alone(run)
    put_back(run)
    assert content(run)["metrics.csv"] == "old"


def test_what_the_new_run_wrote_goes_with_it(run):
    """Also files that the old run had not, of a new run that has neither summary nor checkpoint yet."""
    (run / "queries.npz").unlink()
    before = content(run)
    move_aside(run, with_ids=True)
    write(run, ("config.yaml", "queries.npz", "mlflow_id", "features/b.npz", "metrics.csv"), "new")
    bring_back(run)
    assert content(run) == before


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_run_that_begins_again_keeps_its_ids_and_folders_of_the_user(tmp_path, is_killed):
    write(tmp_path, ("metrics.csv", "wandb_id", "features/mine"), "old")
    move_aside(tmp_path, with_ids=False)
    write(tmp_path, ["metrics.csv"], "new")
    bring_back(tmp_path) if is_killed else put_back(tmp_path)
    assert content(tmp_path) == dict.fromkeys(("features/mine", "metrics.csv", "wandb_id"), "old")


def test_a_removal_that_is_killed_brings_nothing_back(run, monkeypatch):
    move_aside(run, with_ids=True)
    write(run, ("metrics.csv", "config.yaml"), "new")  # of a run that writes no checkpoints
    with monkeypatch.context() as patch, suppress(KilledError):
        patch.setattr(shutil, "rmtree", lambda path, **_: kill() if path.exists() else None)
        drop_replaced(run)
    new = {name: text for name, text in content(run).items() if text != "old"}
    bring_back(run)
    assert content(run) == new
    assert not [*run.glob("replaced-run*")]


def kill():
    raise KilledError
