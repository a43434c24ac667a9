"""Drawn faults from outside a config: each is one line, none slips through, and a run's files stay as they are."""

import json
import os
import random
import shutil

import pytest
from outside_faults import (
    COMMANDS,
    YAML,
    damage_checkpoint,
    damage_summary,
    draw_manifest,
    draw_pair,
    draw_variable,
    draw_words,
    write_people,
)

import others
from fedsim.__main__ import main
from fedsim.core.errors import ConfigError, FedSimError
from fedsim.data.datamodule import FederatedDataModule
from fedsim.data.preview import contact_sheet
from fedsim.parsing.command_line import checked
from fedsim.parsing.documents import parse_json, parse_yaml
from fedsim.parsing.early import check_environment
from fedsim.report.run_files import check_summary
from fedsim.strategy.checkpoint_files import read_checkpoint, read_states
from small import refuse

SOME, ALL, ALL_CHECKPOINTS = 150, 2000, 1000


def draws(some, every):
    return [
        pytest.param(range(some), id="some"),
        pytest.param(range(some, every), id="others", marks=pytest.mark.others),
    ]


@pytest.mark.parametrize("numbers", draws(SOME, ALL))
def test_no_drawn_variable_slips_through(numbers):
    slipped = []
    for name, value in map(draw_variable, numbers):
        try:
            check_environment({"SLURM_NTASKS": "1", name: value})
            slipped.append((name, value))
        except ConfigError as error:
            slipped += [] if str(error).startswith(f"{name}: ") else [(name, error)]
    assert slipped == []


def test_variables_of_a_launcher_pass():
    check_environment({})
    check_environment(
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500"}
    )
    check_environment({"SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_JOB_ID": "123456"})
    with pytest.raises(ConfigError, match=r"^RANK: is 2, but WORLD_SIZE is 2"):
        check_environment({"RANK": "2", "WORLD_SIZE": "2"})


@pytest.mark.parametrize("text", YAML, ids=range(len(YAML)))
def test_yaml_that_expands_without_end_is_refused(text):
    with pytest.raises(FedSimError, match=r"^file: "):
        parse_yaml(text, "file")
    if "\n" not in text and not text.endswith("[["):
        with pytest.raises(ConfigError, match=r"^--model\.clients: "):
            checked(["--model.clients", text])
        with pytest.raises(ConfigError, match=r"^--model\.clients: "):
            checked([f"--model.clients={text}"])


@pytest.mark.parametrize(
    "text", ["a: 2021-13-45", f"a: {'9' * 5000}", "a: !!bool x", "a: 0b_", "[1]: {2}: 3", "a: *b", "{[1]: 2}", "a: \0"]
)
def test_values_that_python_cannot_hold_are_one_line(text):
    with pytest.raises(FedSimError, match=r"^file: "):
        parse_yaml(text, "file")


def test_aliases_and_depth_of_ordinary_files_pass():
    assert parse_yaml("a: &a {b: 1}\nc: [*a, *a]", "file") == {"a": {"b": 1}, "c": [{"b": 1}, {"b": 1}]}
    assert parse_yaml("{a: " * 40 + "1" + "}" * 40, "file")
    checked(["--config", "a" * 100, "--model.clients", "{a: {batch_size: 8}, b: {batch_size: 16, local_epochs: 3}}"])


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 60 + "1" + "}" * 60, "9" * 5000, b"\xff", "", "{'a': 1}"])
def test_json_that_cannot_be_read_is_one_line(text):
    with pytest.raises(FedSimError, match=r"^file: "):
        parse_json(text, "file")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    from tiny_run import TINY

    folder = tmp_path_factory.mktemp("finished")
    config = folder / "tiny.yaml"
    config.write_text(TINY.replace("max_epochs: 3, check_val_every_n_epoch: 3", "max_epochs: 1"))
    assert main(["fit", "--config", str(config), "--run_dir", str(folder / "run")]) == 0
    return folder / "run"


@pytest.mark.parametrize("numbers", draws(SOME, ALL))
def test_no_drawn_damage_of_a_summary_slips_through(finished, numbers):
    content = json.loads((finished / "summary.json").read_text())
    check_summary(content, "summary.json")
    slipped = []
    for number in numbers:
        text = damage_summary(content, number)
        try:
            check_summary(parse_json(text, "summary.json"), "summary.json")
            slipped.append(number)
        except FedSimError:
            pass
    assert slipped == []


@pytest.mark.parametrize("numbers", draws(SOME, ALL_CHECKPOINTS))
def test_no_drawn_change_of_a_checkpoint_slips_through(finished, tmp_path, numbers):
    slipped = []
    for number in numbers:
        copied = tmp_path / f"{number}.ckpt"
        shutil.copytree(finished / "checkpoints" / "last.ckpt", copied)
        place = damage_checkpoint(copied / "v1", number)
        try:
            content = read_checkpoint(copied)["fedsim"]
            read_states(copied, content, list(content["clients"]))
            slipped.append((number, place))
        except FedSimError:
            pass
        shutil.rmtree(copied)
    assert slipped == []


@pytest.mark.parametrize("name", [b"\xff\xfe", b"v1" * 5000, b"", b"../..", b"v\xd9\xa3", b"v" + b"9" * 300])
def test_a_pointer_that_names_no_version_is_not_followed(finished, tmp_path, name):
    copied = tmp_path / "a.ckpt"
    shutil.copytree(finished / "checkpoints" / "last.ckpt", copied)
    (copied / "current").write_bytes(name)
    assert read_checkpoint(copied)["fedsim"]["method"] == "FedPav"


def files_of(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_changed_checkpoint_is_refused_by_the_commands(finished, tmp_path, capsys):
    for number in range(6):
        run = tmp_path / str(number)
        shutil.copytree(finished, run)
        damage_checkpoint(run / "checkpoints" / "last.ckpt" / "v1", number)
        before = files_of(run)
        refuse(capsys, random.Random(number).choice(["fit", "test"]), "--ckpt_path", run / "checkpoints" / "last.ckpt")
        assert files_of(run) == before


@pytest.mark.parametrize("numbers", draws(40, 200))
def test_drawn_words_are_one_line_for_every_command(tmp_path, monkeypatch, capsys, numbers):
    monkeypatch.chdir(tmp_path)
    for number in numbers:
        words = draw_words(number)
        line = refuse(capsys, *words)
        assert len(line) < 1000, words
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words", [["a\nb"], ["list", "a\nb"], ["papers", "a\nb"], ["papers", "003", "a\nb"], ["data", "a\nb"]]
)
def test_words_with_line_ends_are_one_line(capsys, words):
    refuse(capsys, *words)


def test_the_commands_are_all_commands():
    from fedsim.__main__ import COMMANDS as NAMES
    from fedsim.cli.commands import GROUPS

    groups = {f"{group} {name}" for group, names in GROUPS.items() for name in names}
    assert {*COMMANDS} == {*NAMES} - {*GROUPS} | groups


@pytest.mark.parametrize("number", [pytest.param(n, marks=others.unless(n < 15)) for n in range(60)])
def test_a_drawn_pair_of_contradictions_is_one_line(tiny, tmp_path, capsys, number):
    line = refuse(capsys, "fit", "--config", tiny, "--run_dir", tmp_path / "run", *draw_pair(number))
    assert line.count("fedsim: error:") == 1
    assert not (tmp_path / "run").exists()


def test_a_report_leaves_damaged_runs_out_by_name(finished, tmp_path, capsys):
    damaged = {
        "summary": ("summary.json", b"{}"), "deep": ("summary.json", b"[" * 100_000),
        "log": ("metrics.csv", b"epoch,a\n0," + b"x" * 200_000), "queries": ("queries.npz", b"PK\x03\x04"),
        "config": ("config.yaml", b"a: &a [*a]"), "text": ("summary.json", b"\xff"),
    }  # fmt: skip
    for name, (file, content) in damaged.items():
        shutil.copytree(finished, tmp_path / name)
        (tmp_path / name / file).write_bytes(content)
    capsys.readouterr()
    (tmp_path / "report.png").touch()
    assert main(["report", str(finished), *(str(tmp_path / name) for name in (*damaged, "report.png"))]) == 0
    text = capsys.readouterr().out
    assert f"left out: {tmp_path / 'report.png'} is a file, not a run directory" in text
    assert "is a file; give the run directories of fedsim fit" in refuse(capsys, "report", tmp_path / "report.png")
    for name, (file, _) in damaged.items():
        assert f"left out: {tmp_path / name} is damaged ({tmp_path / name / file}: " in text
        assert str(tmp_path / name / file) in refuse(capsys, "report", tmp_path / name)


def test_a_users_own_files_beside_those_of_a_run_are_left_alone(finished, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    own = [
        run / name for name in ("metrics-old.csv", "metrics-.csv", "metrics-007.csv", "metrics-1.csv.bak", "notes.txt")
    ]
    for path in own:
        path.write_text("mine")
    (run / "metrics-3.csv").write_bytes((run / "metrics.csv").read_bytes())
    assert main(["report", str(run)]) == 0
    assert main(["fit", "--ckpt_path", str(run), "--trainer.max_epochs", "2"]) == 0
    assert all(path.read_text() == "mine" for path in own)
    assert {path.name for path in run.glob("metrics*")} == {"metrics.csv"} | {p.name for p in own if p.stem != "notes"}


def test_an_empty_file_name_is_refused(finished, capsys):
    for option in ("--html", "--figure", "--curves", "--cmc", "--tradeoff", "--participation"):
        assert f"{option}: is empty" in refuse(capsys, "report", finished, option, "")


@pytest.fixture
def people(tmp_path):
    """The folder of a manifest, with its images."""
    write_people(tmp_path)
    return tmp_path


@pytest.mark.parametrize("numbers", draws(250, 1500))
def test_no_drawn_manifest_slips_through(people, numbers):
    """Read as a fit and ``data preview`` read it: every image is decoded, every data set drawn."""
    slipped, path = [], people / "m.csv"
    for number in numbers:
        kind, content, may_fit = draw_manifest(number)
        path.write_bytes(content)
        try:
            data = FederatedDataModule(manifest=str(path), val="none", size=(16, 8))
            tests = [split for test in data.federated.tests.values() for split in (test.query, test.gallery)]
            for split in [*(client.train for client in data.federated.clients), *tests]:
                split.images.decode((16, 8))
            contact_sheet(data.list_domains(), (16, 8))
            slipped += [] if may_fit else [(number, kind, "accepted")]
        except FedSimError as error:
            slipped += [] if str(error).startswith("/") else [(number, kind, str(error))]  # the manifest, or an image
        except Exception as error:
            slipped.append((number, kind, repr(error)))
    assert slipped == []


@pytest.mark.parametrize("numbers", draws(25, 150))
def test_commands_refuse_drawn_manifests_in_one_line(people, capfd, numbers):
    slipped, path = [], people / "m.csv"
    model = [
        "--model.backbone=SmallCNN",
        "--model.method=FedPav",
        "--model.client.batch_size=4",
        "--trainer.max_epochs=1",
    ]
    trainer = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.check_val_every_n_epoch=1"]
    for number in numbers:
        kind, content, may_fit = draw_manifest(number)
        path.write_bytes(content)
        data = [f"--data.manifest={path}", "--data.val=none", "--data.size=[16,8]", f"--run_dir={people / str(number)}"]
        code = main(["fit", *data, *model, *trainer])
        text = capfd.readouterr().err
        lines = text.splitlines()
        if code == 0:
            slipped += [] if may_fit else [(number, kind, "accepted")]
        elif code != 2 or len(lines) != 1 or not lines[0].isprintable() or not lines[0].startswith("fedsim: error: "):
            slipped.append((number, kind, code, text))
        assert code == 0 or not (people / str(number)).exists()
    assert slipped == []


@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_a_manifest_that_is_no_file_is_refused_at_once(tmp_path, capsys, kind):
    path = tmp_path / "m.csv"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    line = refuse(capsys, "describe", "--data.manifest", path, "--model.method=FedPav", "--model.backbone=SmallCNN")
    assert "m.csv: cannot read this manifest (it is a folder, a pipe or a device, not a file)" in line
