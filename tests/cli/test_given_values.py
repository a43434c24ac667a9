"""Each path and number that a command or a public function takes is checked by its kind, and by no other code."""

import inspect
import os
import re
import shutil
import tempfile
from importlib import import_module
from pathlib import Path
from typing import get_type_hints

import pytest

import fedsim
from fedsim.__main__ import main
from fedsim.cli.commands import GROUPS
from fedsim.cli.data.configs import check_source_of, preview_source_of
from fedsim.cli.export import export
from fedsim.cli.init.command import init
from fedsim.cli.init.slurm import write_scripts
from fedsim.cli.rank import rank_file
from fedsim.core.checked import kinds_of
from fedsim.core.checks import NumberKind, SizeKind
from fedsim.core.devices import DeviceKind
from fedsim.core.errors import ConfigError, DataError
from fedsim.core.files import make_folder
from fedsim.core.paths import PathKind, given_path
from fedsim.data.check import find_data
from fedsim.data.market import market_folders
from fedsim.inference.model import predict_images
from fedsim.models.backbones import SmallCNN
from fedsim.report.table import report

COMMANDS = {
    **{f"{group} {name}": getattr(import_module(module), name)
       for group, names in GROUPS.items() for name, module in names.items()},
    "data check --data.source": check_source_of([]), "data preview --data.source": preview_source_of([]),
    "export": export, "init": init, "slurm": write_scripts, "rank": rank_file, "predict --images": predict_images,
    "report": report, "load_model": fedsim.load_model, "load_run": fedsim.load_run,
}  # fmt: skip
NO_PATHS = {  # texts that are names, not paths
    "arch", "backend", "by", "checkpoint", "client", "clients", "compare", "distance", "format", "labels", "licence",
    "metric", "pretrain", "rule", "sets", "style", "target", "variant",
    "runs",  # NAME=FOLDER: fedsim.report.groups.named_folder
}  # fmt: skip


def unchecked(function):
    """The arguments of texts or numbers without a kind, none of which is known to be something else."""
    hints, kinds = get_type_hints(function), kinds_of(function)
    kinds_of_values = {name: str(hint) for name, hint in hints.items() if name not in {*kinds, "return"}}
    for name in inspect.signature(function).parameters:
        is_text = any(word in kinds_of_values.get(name, "") for word in ("str", "PathLike"))
        is_number = name not in kinds and hints.get(name) in (int, float, tuple[int, int], tuple[int, int] | None)
        if (is_text and name not in NO_PATHS | {"options"}) or is_number:
            yield name


@pytest.mark.parametrize("command", COMMANDS)
def test_each_path_and_number_of_a_command_has_a_kind(command):
    assert [*unchecked(COMMANDS[command])] == []


def test_an_argument_without_a_kind_is_found():
    def command(picture: str | None = None, workers: int = 2, client: str = "", force: bool = False) -> str: ...

    assert [*unchecked(command)] == ["picture", "workers"]


def bad_paths(kind, folder):
    """Values that a kind of path refuses, with words of the refusal."""
    yield "", "is empty"
    yield "  ", "is empty"
    yield "~nobody9/x", "home of a user who is not known"
    yield "$NOT_SET_9/x", "NOT_SET_9"
    if not kind.is_written:
        yield folder / "nowhere", "is not there"
        yield folder / "pipe", "a pipe or a device"
        yield "/dev/zero", "a pipe or a device"
    if kind.holds == "file":
        yield folder / f"folder{kind.suffixes[0] if kind.suffixes else ''}", "is a folder"
    if kind.is_written:
        yield folder / f"a\nb{kind.suffixes[0] if kind.suffixes else ''}", "holds a control character"
    if kind.suffixes:
        yield folder / "x.xyz", "ends with .xyz"
        yield folder / f"file/x{kind.suffixes[0]}", "cannot be written"
        yield folder / f"run/queries/x{kind.suffixes[0]}", "exists already" if kind.is_new else "is a file of"
    if kind.holds == "folder" and kind.is_written:
        yield folder / "file", "cannot be a folder"


def arguments_of(function, folder):
    """Valid values of all arguments without a default, and of paths with one."""
    kinds = kinds_of(function)
    for name, parameter in inspect.signature(function).parameters.items():
        kind = kinds.get(name)
        if isinstance(kind, PathKind):
            suffix = kind.suffixes[0] if kind.suffixes else ""
            yield name, str(folder / f"new-{name}{suffix}" if kind.is_written else
                            folder / ("file" if kind.holds == "file" else "folder"))  # fmt: skip
        elif parameter.default is parameter.empty:
            yield name, {"appearance": SmallCNN(width=4), "options": {}, "row": None}.get(name, [])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "folder").mkdir()
    for kind in (k for function in COMMANDS.values() for k in kinds_of(function).values()):
        for suffix in getattr(kind, "suffixes", ()):
            (tmp_path / f"folder{suffix}").mkdir(exist_ok=True)
            (tmp_path / "run/queries").mkdir(parents=True, exist_ok=True)
            (tmp_path / f"run/queries/x{suffix}").touch()
            (tmp_path / "run/summary.json").touch()
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_what_a_kind_refuses_is_refused_by_each_command_before_anything_is_written(command, folder):
    function, before = COMMANDS[command], sorted(folder.rglob("*"))
    valid = dict(arguments_of(function, folder))
    for name, kind in kinds_of(function).items():
        if isinstance(kind, NumberKind):
            wrong = [(value, name) for value in (-1, float("nan"), float("inf"), 2**40 if "4294967295" in kind.interval
                                                 else -(2**70), True)]  # fmt: skip
        elif isinstance(kind, DeviceKind):
            wrong = [(value, "there is no device") for value in ("gpu", "cuda:-1", "meta", "cpu:3", 3, ["cpu"])]
        elif isinstance(kind, SizeKind):
            wrong = [(value, "is not a height and a width") for value in
                     ((0, 8), (8,), (8, 8, 8), (8.5, 8), (True, 8), 8, "8x8", (2**40, 8))]  # fmt: skip
        elif kind.is_read_later:
            continue
        else:
            wrong = list(bad_paths(kind, folder))
        for value, words in wrong:
            with pytest.raises((ConfigError, DataError)) as caught:
                function(**{**valid, name: value})
            assert str(caught.value).lstrip("-").startswith(f"{name}: "), (name, value, caught.value)
            assert words in str(caught.value), (name, value, caught.value)
    assert sorted(folder.rglob("*")) == before


def test_an_output_never_replaces_an_input_or_another_output(folder):
    (folder / "f.npz").touch()
    (folder / "link.npz").symlink_to("f.npz")
    for output in ("f.npz", "./f.npz", "link.npz"):
        with pytest.raises(ConfigError, match=r"^--save_ranking: .* is the file of features, too"):
            rank_file("f.npz", save_ranking=output)
    with pytest.raises(ConfigError, match=r"^--curves: a.png is the file of --figure, too"):
        report(["folder"], figure="a.png", curves="a.png")
    (folder / "c.csv").touch()
    with pytest.raises(ConfigError, match=r"^--output: c.csv is the file of --config, too"):
        COMMANDS["data manifest"]("c.csv", output="c.csv")


def test_a_number_with_a_colon_is_none(folder, capsys):
    (folder / "f.npz").touch()
    for words in (["rank", "f.npz", "--alpha=1:30"], ["rank", "f.npz", "--k1", "1:30"],
                  ["fit", "--config=quickstart", "--data.limit_client_batches=1:30"]):  # fmt: skip
        assert main(words) == 2
        assert "1:30 is not a number; write it without colons" in capsys.readouterr().err


OF_TEXTS = [
    ("report", "folder", "--queries"), ("report", "folder", "--projection"), ("report", "folder", "--metric"),
    ("report", "folder", "--compare"), ("report", "folder", "--target"), ("report", "folder", "--sets"),
    ("report", "folder", "--rule"), ("rank", "f.npz", "--distance"), ("rank", "f.npz", "--device"),
    ("export", "--ckpt_path=folder", "--client"), ("export", "--ckpt_path=folder", "--arch"),
    ("sweep", "--left_out"), ("sweep", "--compare"), ("predict", "--images=folder", "--client"),
]  # fmt: skip


@pytest.mark.parametrize("words", OF_TEXTS)
def test_an_empty_text_is_refused_before_anything_is_read(words, folder, capsys):
    for end in ([f"{words[-1]}="], [words[-1], ""], [words[-1], "  "]):
        assert main([*words[:-1], *end]) == 2
        line = capsys.readouterr().err
        assert f"error: {words[-1]}: is empty; is a variable of your command not set?" in line, line
    assert main(["report", "folder", "--sets=['']"]) == main(["report", "folder", ""]) == 2
    lines = capsys.readouterr().err
    assert "error: --sets: is empty" in lines
    assert "error: runs: is empty" in lines
    with pytest.raises(ConfigError, match=r"^client: is empty"):
        fedsim.load_model("folder", client="")


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_number_that_is_not_finite_is_called_so(value, folder, capsys):
    (folder / "f.npz").touch()
    for words in (["rank", "f.npz", f"--alpha={value}"], ["rank", "f.npz", "--rerank", f"--lambda_={value}"]):
        assert main(words) == 2
        assert f"{value} is no finite number" in capsys.readouterr().err


def test_none_is_refused_where_it_has_no_meaning(folder):
    with pytest.raises(ConfigError, match=r"^run: None is no path"):
        fedsim.load_run(None)
    with pytest.raises(ConfigError, match=r"^device: there is no device None"):
        fedsim.load_model("folder", device=None)


def test_a_home_folder_is_meant_by_inputs_and_outputs(folder):
    kind = PathKind("file", is_written=True, suffixes=(".png",))
    assert kind.check("~/p.png", "--output") == str(folder / "home/p.png")
    assert kind.check(Path("~/p.png"), "--output") == str(folder / "home/p.png")
    assert given_path("~/x", "data.source.root") == folder / "home/x"
    with pytest.raises(ConfigError, match=r"^run: 3 is no path"):
        fedsim.load_run(3)
    with pytest.raises(ConfigError, match=r"^run: 'a.x00' is no path"):
        fedsim.load_run("a\0")
    with pytest.raises(ConfigError, match=r"^x: .*/file/a cannot be a folder"):
        make_folder(folder / "file/a", "x")


FIT = ("fit", "--config=quickstart")
OF_TRAINERS = [
    ("fit", "--config"), (*FIT, "--run_dir"), (*FIT, "--seeds=1", "--run_dir"), (*FIT, "--data.cache_dir"),
    (*FIT, "--data.source=MarketFolders", "--data.source.root"), (*FIT, "--data.source=null", "--data.manifest"),
    ("test", "--ckpt_path"), ("doctor", "--config"), ("doctor", "--run_dir"), ("sweep", "--dry-run", "FILE"),
    ("report",),
]  # fmt: skip


@pytest.mark.parametrize("words", OF_TRAINERS)
@pytest.mark.parametrize("path", ["", "~nobody9/x"])
def test_options_of_a_trainer_take_the_same_paths(words, path, folder, capsys):
    *options, last = words
    arguments = (
        [*words, path] if len(words) == 1 else [*options, path] if last == "FILE" else [*options, f"{last}={path}"]
    )
    assert main(arguments) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1, line
    assert any(words in line for words in ("is empty", "~nobody9", "empty text")), line
    assert not [file for file in folder.rglob("*") if "~" in file.name]


OF_LINKS = [
    ("predict", "--ckpt_path=loop"), ("test", "--ckpt_path=loop"), ("report", "loop"), ("data", "check", "loop"),
    ("export", "--ckpt_path=loop", "--output=m.onnx"), (*FIT, "--run_dir=loop"), (*FIT, "--ckpt_path=loop"),
]  # fmt: skip


@pytest.mark.parametrize("words", OF_LINKS)
def test_a_link_that_leads_to_itself_is_one_line(words, folder, capsys):
    (folder / "loop").symlink_to("loop")
    assert main([*words]) == 2
    assert capsys.readouterr().err.count("fedsim: error: ") == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("mode", [0o700, 0o744, 0o711])
def test_a_neighbour_folder_of_another_user_is_passed_over(mode, market_tree):
    with tempfile.TemporaryDirectory() as text:
        root = Path(text)
        shutil.copytree(market_tree, root / "towns")
        (root / "towns").chmod(0o755)
        (root / "link").symlink_to(root / "private/query")
        (root / "private/query").mkdir(parents=True)
        (root / "secret.png").touch(0o600)
        (root / "private").chmod(mode)
        root.chmod(0o755)
        os.setresuid(12345, 12345, 0)
        try:
            assert "private" not in [folder.name for folder in market_folders(root)] or mode == 0o711
            assert find_data(root)
            assert market_folders(root / "towns")
            with pytest.raises(DataError, match=r"^--x: .*secret.png cannot be read \(Permission denied\); give"):
                PathKind("file").check(root / "secret.png", "--x")
            for path in (root / "new.png", root / "new/new.png"):
                with pytest.raises(DataError, match=r"^--x: .*new.png cannot be written .*Permission denied"):
                    PathKind("file", is_written=True).check(path, "--x")
        finally:
            os.setresuid(0, 0, 0)


PARSED = [command for command in (*COMMANDS, "sweep", "doctor", "augment fit") if not command.startswith("load_")]


@pytest.mark.parametrize("command", PARSED)
def test_an_unknown_option_is_said_with_the_command_that_lists_all(command, folder, capsys):
    words = command.replace("--data.source", "--data.source=MarketFolders").replace("--images", "--images=folder")
    assert main([*words.split(), "--no_such_option=1"]) == 2
    line = capsys.readouterr().err.strip()
    assert re.search(r"fedsim [a-z ]+ --help all lists all options$", line), line
    assert "fedsim fedsim" not in line
