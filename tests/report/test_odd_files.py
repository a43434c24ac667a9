"""Files and folders of a run or a search that are of another kind, lead to nothing, or may not be read: one line."""

import errno
import os
import tempfile
from pathlib import Path

import pytest

from fedsim.__main__ import main
from fedsim.core.errors import DataError
from fedsim.core.files import check_folder, replacing
from fedsim.generation.saved import has_quality, is_finished
from fedsim.inference.feature_pictures import write_queries
from fedsim.inference.run_features import ModelOnSet, RunFeatures
from fedsim.parsing.error_lines import failure_of
from fedsim.report.runs import read_run
from fedsim.report.trials import read_trials
from fedsim.strategy.run_checkpoints import checkpoint_at, checkpoint_named
from fedsim.sweep.local import SweepRun
from fedsim.sweep.running import execute_runs
from fedsim.sweep.search import FileLock, open_study
from run_dirs import scores_of, with_mean, write_run
from small import refuse

FORMS = {
    "pipe": (os.mkfifo, "is a pipe or a device, no file; move it away"),
    "folder": (Path.mkdir, "is a folder, not a file; move it away"),
    "link": (lambda path: path.symlink_to("nowhere"), "is a link to nothing; move it away"),
}
READ = ("metrics.csv", "metrics-1.csv", "config.yaml", "queries.npz", "tests/best.json")
SHOWN = ("queries/a.csv", "projections/pca-a.png", "rankings/a.png", "maps/a.png", "pictures/round-1/a.png")


def put(path, form):
    """Put something else in the place of a file; return the end of the line about it."""
    path.unlink() if path.exists() else path.parent.mkdir(parents=True, exist_ok=True)
    make, line = FORMS[form]
    make(path)
    return f"{path}: {line}"


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", {1: scores_of(with_mean({"a": 0.5, "b": 0.25}))})


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [*READ, *SHOWN])
def test_a_report_names_what_is_in_the_place_of_a_file(name, form, run, tmp_path, capsys):
    line = put(run / name, form)
    page = ["--html", tmp_path / "page.html"] if name in SHOWN else []
    assert line in refuse(capsys, "report", run, *page)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["summary.json", *READ])
def test_a_run_with_such_a_file_is_left_out_beside_others(name, form, run, tmp_path, capsys):
    other = write_run(tmp_path / "other", {1: scores_of(with_mean({"a": 0.25, "b": 0.25}))})
    line = put(other / name, form)
    assert main(["report", str(run), str(other)]) == 0
    assert f"left out: {other} is damaged ({line})" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["tests", "queries", "projections", "pictures"])
def test_a_report_names_what_is_in_the_place_of_a_folder(name, run, tmp_path, capsys):
    (run / name).touch()
    line = refuse(capsys, "report", run, "--html", tmp_path / "page.html")
    assert f"{run / name}: is no folder; move it away" in line


@pytest.mark.parametrize("form", FORMS)
def test_a_search_names_what_is_in_the_place_of_its_files(form, tmp_path, capsys):
    runs = [SweepRun({}, ("no-such-program",), tmp_path / "abc")]
    for path, read in (
        (tmp_path / "trials.log", lambda: read_trials(tmp_path)),
        (tmp_path / "trials.log", lambda: open_study(tmp_path, True, FileLock(tmp_path / "trials.lock"))),
        (tmp_path / "abc.log", lambda: execute_runs(runs, "val/mAP")),
    ):
        if not os.path.lexists(path):
            put(path, form)
        with pytest.raises(DataError, match=f"{path}: {FORMS[form][1]}"):
            read()
    assert f"{tmp_path / 'trials.log'}: {FORMS[form][1]}" in refuse(capsys, "report", tmp_path)


@pytest.mark.parametrize("form", FORMS)
def test_a_generator_is_not_trained_where_its_file_cannot_be(form, tmp_path):
    for name, read in (("generator.safetensors", is_finished), ("quality.json", has_quality)):
        put(tmp_path / name, form)
        with pytest.raises(DataError, match=FORMS[form][1]):
            read(tmp_path)


def test_a_pipe_in_the_place_of_the_name_of_a_version_is_not_waited_for(run, capsys):
    put(run / "checkpoints/best.ckpt/current", "pipe")
    assert "there is no checkpoint" in refuse(capsys, "export", "--ckpt_path", run, "--output", "a.safetensors")


# -- files that are written --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["file", "link"])
def test_folders_of_pictures_are_tried_before_the_features(form, run, capsys):
    for name, option in (
        ("queries", "--queries=worst"),
        ("queries", "--confusion"),
        ("projections", "--projection=pca"),
    ):
        if not os.path.lexists(run / name):
            (run / name).touch() if form == "file" else (run / name).symlink_to("nowhere")
        assert f"{run / name} cannot be a folder (File exists)" in refuse(capsys, "report", run, option)


def test_a_folder_in_the_place_of_a_file_to_write_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("fedsim.inference.feature_pictures.choose_queries", lambda *_: [])
    model = ModelOnSet("a", "a", "global", "", *[None] * 5)
    (tmp_path / "a.csv").mkdir()
    (tmp_path / "file").touch()
    for write, path in (
        (lambda: write_queries(tmp_path, RunFeatures([model], None, None), "worst", 1), tmp_path / "a.csv"),
        (lambda: replacing(tmp_path / "a.csv").__enter__(), tmp_path / "a.csv"),
        (lambda: replacing(tmp_path / "file/b.csv").__enter__(), tmp_path / "file"),
    ):
        with pytest.raises(OSError) as caught:  # noqa: PT011 - its kind is checked below
            write()
        failure = failure_of(caught.value, "report")
        assert failure.code == 2
        assert failure.message.startswith(f"{path}: ")
        assert failure.message.endswith("something of another kind is in the place of a file or folder; move it away")


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.ENOSPC])
def test_only_a_disk_without_room_asks_for_room(number):
    message = failure_of(OSError(number, os.strerror(number), "a.csv"), "report").message
    assert message.startswith("a.csv: ")
    assert ("make room" in message) == ("cannot be written" in message) == (number == errno.ENOSPC)
    assert ("right to read" in message) == (number == errno.EACCES)


def test_an_error_names_the_file_and_not_its_partial_one(tmp_path):
    with pytest.raises(PermissionError) as caught, replacing(tmp_path / "a.npz") as partial:
        raise PermissionError(errno.EACCES, "Permission denied", str(partial))
    assert caught.value.filename == str(tmp_path / "a.npz")


# -- files that may not be read ----------------------------------------------------------------------------------------

DENIED = "cannot be read (Permission denied); give yourself the right to read it"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(
    ("name", "mode", "read"),
    [
        ("", 0o000, lambda run: main(["report", str(run)])),
        ("", 0o744, lambda run: main(["report", str(run)])),
        ("metrics.csv", 0o000, lambda run: read_run(run).check()),
        ("queries.npz", 0o000, lambda run: read_run(run).check()),
        ("summary.json", 0o000, read_run),
        ("tests", 0o644, lambda run: read_run(run).check()),
        ("tests", 0o000, lambda run: read_run(run).check()),
        ("checkpoints", 0o644, checkpoint_at),
        ("checkpoints", 0o000, checkpoint_at),
        ("checkpoints/best.ckpt", 0o000, checkpoint_at),
        ("checkpoints", 0o644, lambda run: checkpoint_named(run, "last")),
    ],
)
def test_who_may_not_read_is_told_so(name, mode, read, capsys):
    with tempfile.TemporaryDirectory() as text:
        Path(text).chmod(0o755)
        run = write_run(Path(text, "run"), {1: scores_of(with_mean({"a": 0.5, "b": 0.25}))})
        if name == "queries.npz":
            (run / name).touch()
        for folder in ("tests", "checkpoints/best.ckpt"):
            (run / folder).mkdir(parents=True)
        (run / "tests/best.json").touch()
        (run / name).chmod(mode)
        os.setresuid(12345, 12345, 0)
        try:
            line = ""
            try:
                assert read(run) == 2
            except DataError as error:
                line = str(error)
            with pytest.raises(Exception, match="Permission denied"):
                check_folder(run / "features", "run_dir") if not name else (run / "new").touch()
        finally:
            os.setresuid(0, 0, 0)
        assert f"{run / name}: {DENIED}".replace("/: ", ": ") in line + capsys.readouterr().err
