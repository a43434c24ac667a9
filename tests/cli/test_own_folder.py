"""A run directory belongs to one run: second fits, names that mean one folder, and hands that remove things."""

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fedsim.__main__ import main
from fedsim.core.errors import ConfigError
from fedsim.core.paths import expanded
from fedsim.core.replaced_run import bring_back
from fedsim.core.run_lock import LOCK_FILE, RunLock
from fedsim.federation.callbacks import FolderStart
from fedsim.methods import FedPav
from fedsim.report.runs import read_run
from small import refuse
from tiny_run import TINY

HOLD = "import sys; from pathlib import Path; from fedsim.core.run_lock import RunLock\n"
HOLD += "RunLock(Path(sys.argv[1])).acquire(); print('held', flush=True); sys.stdin.read()"
FEW = ["--trainer.max_epochs=3", "--trainer.check_val_every_n_epoch=3", "--data.limit_client_batches=1"]


class Acting(FedPav):
    """A method that acts on the run directory as its third round trains."""

    act = staticmethod(lambda: None)

    def train(self, client):
        """Act once."""
        if client.round == 2 and client.client_name == "town0":
            Acting.act()
        super().train(client)


def content(folder):
    return {path.relative_to(folder): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def fit(*args):
    return main(["fit", *map(str, args)])


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    (folder / "tiny.yaml").write_text(TINY)
    assert fit("--config", folder / "tiny.yaml", "--run_dir", folder / "run", *FEW) == 0
    return folder


@pytest.fixture
def run(kept, tmp_path):
    return shutil.copytree(kept / "run", tmp_path / "run")


def acting(monkeypatch, act):
    monkeypatch.setattr(Acting, "act", staticmethod(act))
    return f"--model.method={__name__}.Acting"


# -- one fit at a time -------------------------------------------------------------------------------------------------


def test_a_second_fit_is_refused_in_one_line_and_changes_nothing(run, tiny, capsys):
    before = content(run)
    with subprocess.Popen([sys.executable, "-c", HOLD, run], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        with_lock = content(run)
        for words in (
            ["--config", tiny, "--run_dir", run],
            ["--config", tiny, "--run_dir", run, "--overwrite=true"],
            ["--config", tiny, "--run_dir", run, "--ckpt_path=last", "--trainer.max_epochs=9"],
            ["--ckpt_path", run, "--trainer.max_epochs=9"],
            ["--ckpt_path", run / "checkpoints" / "last.ckpt", "--trainer.max_epochs=9"],
        ):
            line = refuse(capsys, "fit", *words)
            assert f"run_dir: {run} is in use: process {other.pid} on " in line
            assert content(run) == with_lock
        assert main(["test", "--ckpt_path", str(run)]) == 0  # reading is nothing that a fit would mind
        other.kill()
    shutil.rmtree(run / "tests")
    assert set(content(run)) == {*before, Path(LOCK_FILE)}  # of a killed fit
    assert fit("--ckpt_path", run, "--trainer.max_epochs=4") == 0
    assert LOCK_FILE not in [path.name for path in run.iterdir()]
    assert [*read_run(run).log] == [1, 2, 3, 4]


def test_a_fit_holds_its_folder_until_it_ends(kept, tmp_path, monkeypatch):
    seen = []

    def look():
        with pytest.raises(ConfigError, match="in use") as error:
            RunLock(tmp_path / "run").look()
        seen.append(str(error.value))

    assert fit("--config", kept / "tiny.yaml", "--run_dir", tmp_path / "run", *FEW, acting(monkeypatch, look)) == 0
    assert len(seen) == 1
    assert not (tmp_path / "run" / LOCK_FILE).exists()


def test_a_fit_that_is_refused_makes_no_folder(kept, tmp_path, capsys):
    for fault in (["--model.method=Scaffold", "--model.client.optimizer=Adam"], ["--model.client.optimizer.lr=1e38"]):
        line = refuse(capsys, "fit", "--config", kept / "tiny.yaml", "--run_dir", tmp_path / "a" / "run", *fault)
        assert "model.client.optimizer" in line or "not finite" in line
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [["predict", "--model.backbone.width=9"], ["predict", "--model.neck.dim=7"],
     ["predict", "--data.source.init_args.clients=2"], ["test", "--save_ranking", "--model.neck.dim=7"],
     ["predict", "--save_maps", "--model.neck.dim=7"], ["test", "--model.neck.dim=7"], ["predict", "--data.val=x"]],
    ids=" ".join,
)  # fmt: skip
def test_a_command_that_is_refused_leaves_no_folder_and_removes_none(run, tmp_path, capsys, words):
    command, *options = words
    (tmp_path / "empty").mkdir()
    before = content(tmp_path)
    for folder in (tmp_path / "a" / "new", tmp_path / "empty", run):
        refuse(capsys, command, "--ckpt_path", run, "--run_dir", folder, *options)
        assert content(tmp_path) == before


# -- room for a run ----------------------------------------------------------------------------------------------------


def test_a_run_that_cannot_begin_puts_everything_back(run):
    (run / "checkpoints" / "best.ckpt.tmp").mkdir()  # of a killed removal
    before = content(run)

    def begin():
        assert not (run / "metrics.csv").exists()
        (run / "metrics.csv").write_text("of the new run")
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="disk is full"):
        FolderStart(run, overwrite=True).prepare(begin)
    assert content(run) == before


def test_a_replaced_run_is_kept_until_the_new_one_stands_alone(run):
    before, start = content(run), FolderStart(run, True)
    start.prepare()
    start.settle()
    assert sorted(path.name for path in run.iterdir()) == ["checkpoints", "replaced-run"]
    bring_back(run)
    assert content(run) == before
    start.prepare()
    shutil.copytree(
        run / "replaced-run" / "checkpoints" / "last.ckpt", run / "checkpoints" / "last.ckpt", symlinks=True
    )
    start.settle()
    assert sorted(path.name for path in run.iterdir()) == ["checkpoints"]


def test_without_checkpoints_a_replaced_run_goes_with_the_end(run):
    start = FolderStart(run, True)
    start.prepare()
    start.settle(ends=True)
    assert sorted(path.name for path in run.iterdir()) == ["checkpoints"]


def test_checkpoints_without_a_summary_are_a_run(run):
    (run / "summary.json").unlink()
    before = content(run)
    with pytest.raises(ConfigError, match="holds a run already"):
        FolderStart(run).check_free()
    with pytest.raises(ConfigError, match="holds a run already"):
        FolderStart(run).prepare()
    assert content(run) == before
    FolderStart(run, True).check_free()


def test_folders_beside_no_run_are_the_user_s(tmp_path):
    for name in ("features", "tests", "maps", "rankings", "queries", "data"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").touch()
    before = content(tmp_path)
    for overwrite in (False, True):
        FolderStart(tmp_path, overwrite).prepare()
        assert content(tmp_path) == before


def test_a_quick_check_changes_no_file(run, kept):
    before = content(run)
    quick = ["--overwrite=true", "--trainer.fast_dev_run=true"]
    assert fit("--config", kept / "tiny.yaml", "--run_dir", run, *quick) == 0
    assert content(run) == before


def test_overwrite_replaces_all_of_the_old_run(run, kept):
    (run / "queries").mkdir()  # by fedsim report --queries
    (run / "queries" / "global.png").touch()
    assert fit("--config", kept / "tiny.yaml", "--run_dir", run, *FEW, "--seed_everything=5", "--overwrite=true") == 0
    assert json.loads((run / "summary.json").read_text())["seed"] == 5
    assert {path.name for path in run.iterdir()} == {path.name for path in (kept / "run").iterdir()}
    with (run / "metrics.csv").open() as file:
        assert {row["epoch"] for row in csv.DictReader(file)} == {"0", "1", "2"}


# -- one name, one folder ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["~/runs/x", "$PLACE/x", "${PLACE}/$PART", "~/$PART", "runs/../x", "./x"])
def test_all_writers_mean_the_same_folder(kept, tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    for variable, value in {"HOME": tmp_path / "home", "PLACE": tmp_path / "place", "PART": "x"}.items():
        monkeypatch.setenv(variable, str(value))
    assert fit("--config", kept / "tiny.yaml", f"--run_dir={name}", *FEW) == 0
    [folder] = {path.parent.resolve() for path in tmp_path.rglob("summary.json")}
    assert {path.name for path in folder.iterdir()} == {path.name for path in (kept / "run").iterdir()}
    assert not list(tmp_path.glob("[~$]*"))
    assert "is less than the 3 rounds" in refuse(capsys, "fit", f"--ckpt_path={name}", "--trainer.max_epochs=1")
    assert main(["test", "--ckpt_path", name]) == 0
    assert (folder / "tests").is_dir()
    assert fit("--config", folder / "config.yaml", "--run_dir", name, "--ckpt_path=last", "--trainer.max_epochs=4") == 0
    assert [*read_run(folder).log] == [1, 2, 3, 4]


@pytest.mark.parametrize("name", ["", " ", "\t", "$NOT_SET_HERE", "${NOT_SET_HERE}/x", "runs/$NOT_SET_HERE", "$EMPTY"])
@pytest.mark.parametrize("option", ["run_dir", "ckpt_path"])
def test_a_name_of_no_folder_is_refused(kept, tmp_path, monkeypatch, capsys, name, option):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EMPTY", "")
    other = {"run_dir": ["--ckpt_path=last"], "ckpt_path": ["--run_dir=run"]}[option]
    for words in (["fit", *other], ["fit", *other, "--overwrite=true"], ["test", "--ckpt_path=last"]):
        line = refuse(capsys, *words, "--config", kept / "tiny.yaml", f"--{option}={name}")
        assert f"{option}: " in line
        assert "is empty" in line or "NOT_SET_HERE, which is not set" in line
    assert list(tmp_path.iterdir()) == []


def test_names_with_signs_stay_as_they_are():
    for name in ("a b", "a%b", "a{b}", "x~", "./~/x", "a$", "$", "a\nb", "äß/数据"):
        assert expanded(name, "run_dir") == name


# -- what is removed beneath a running fit -----------------------------------------------------------------------------

REMOVALS = [
    ".", "checkpoints", "checkpoints/last.ckpt", "checkpoints/last.ckpt/v2", "checkpoints/last.ckpt/current",
    "checkpoints/best.ckpt", "metrics.csv", "summary.json", "config.yaml", LOCK_FILE,
]  # fmt: skip


@pytest.mark.parametrize("action", ["remove", "rename", "file", "folder"])
@pytest.mark.parametrize("name", REMOVALS)
def test_a_removal_beneath_a_fit_is_one_line_or_does_no_harm(kept, tmp_path, monkeypatch, capsys, name, action):
    run = tmp_path / "run"

    def act():
        path = run / name
        if path.exists():  # there is no best.ckpt before an evaluation
            path.rename(tmp_path / "moved")
        if action == "remove":
            shutil.rmtree(tmp_path / "moved", ignore_errors=True)
        elif action == "file":
            path.touch()
        elif action == "folder":
            path.mkdir()

    capsys.readouterr()
    code = fit("--config", kept / "tiny.yaml", "--run_dir", run, *FEW, acting(monkeypatch, act))
    error = capsys.readouterr().err
    assert "Traceback" not in error
    if code == 0:
        assert read_run(run).summary["finished"]
        assert main(["test", "--ckpt_path", str(run)]) == 0
        return
    [line] = [line for line in error.splitlines() if line.startswith("fedsim: error: ")]
    assert code == 2
    assert str(run) in line, line
    assert "all machines share" not in line
