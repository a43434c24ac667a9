"""Exits that are true: of clients that end the process, negative variances, runs that never trained, closed pipes."""

import io
import os
import subprocess
import sys
from dataclasses import dataclass, replace

import pytest
import torch

from failing import errors
from failing import fit as fit_on_ranks
from fedsim.__main__ import main
from fedsim.federation.components.attacks import Attack
from fedsim.methods import FedPav
from fedsim.methods.base import Payload
from fedsim.parsing.error_lines import failure_of
from small import refuse
from tiny_run import TINY


@dataclass(frozen=True, kw_only=True)
class Odd(FedPav):
    """Uploads a negative variance, or ends the process."""

    kind: str = "variance"

    def upload(self, client):
        upload = super().upload(client)
        if client.client_name != "town1":
            return upload
        if self.kind == "exit":
            sys.exit(0)
        entry = next(entry for entry in client.model.flat.shared_entries if "running_var" in entry.name)
        vector = upload.vector.clone()
        vector[entry.span][-1] = -1e-3
        return replace(upload, vector=vector)


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY.replace("max_epochs: 3, check_val_every_n_epoch: 3", "max_epochs: 1"))
    return path


def fit(config, *options):
    return ["fit", "--config", str(config), "--run_dir", str(config.parent / "run"), *map(str, options)]


def test_a_negative_variance_names_its_client(config, capsys):
    line = refuse(capsys, *fit(config, "--model.method", f"{__name__}.Odd"))
    assert "client town1, round 1: a running variance of its update is -0.001" in line


def test_it_is_left_out_on_request(config, capsys, caplog):
    assert main(fit(config, "--model.method", f"{__name__}.Odd", "--model.on_bad_update", "skip_client")) == 0
    assert "leaves out town1" in caplog.text


FORMS = {  # what is sent of a vector [n] -> what is said of it
    "n+1": (lambda v: torch.cat([v, v[:1]]), "float32 on cpu"),
    "n-1": (lambda v: v[1:], "float32 on cpu"),
    "1, n": (lambda v: v[None], "vector [1, "),
    "empty": (lambda v: v[:0], "vector [0] float32 on cpu"),
    "None": (lambda _: None, "a NoneType as its vector"),
    "list": (lambda v: v.tolist(), "a list as its vector"),
    "int64": (lambda v: v.long(), "] int64 on cpu"),
    "float16": (lambda v: v.half(), "] float16 on cpu"),
    "float64": (lambda v: v.double(), "] float64 on cpu"),
    "meta": (lambda v: v.to("meta"), "] float32 on meta"),
}


@dataclass(frozen=True, kw_only=True)
class Misshapen(FedPav):
    """Uploads a vector, further tensor or mask of a wrong form, or no upload at all."""

    form: str = "n+1"
    part: str = "vector"

    def payload(self, server, arch, round_):
        return Payload(up={"mean": (4,)} if self.part == "extras" else {})

    def upload(self, client):
        upload = super().upload(client)
        if self.part == "extras":
            upload = replace(upload, extras={"mean": torch.zeros(4)})
        if client.client_name != "town1" or client.round < 1:
            return upload
        return misshape(upload, self.part, self.form)


def misshape(upload, part, form):
    change = FORMS[form][0]
    if part == "upload":
        return None
    if part == "mask":
        return replace(upload, mask=change(torch.ones(7)))
    if part == "name":
        return replace(upload, extras={"other": torch.zeros(4)})
    if part == "extras":
        return replace(upload, extras={"mean": change(torch.zeros(4))})
    return replace(upload, vector=change(upload.vector))


class MisshapenAttack(Attack):
    """An attack that sends a vector of a wrong form."""

    def __init__(self, form: str = "n+1") -> None:
        super().__init__(["town1"], start=2)
        self.form = form

    def uploaded(self, client, upload):
        return misshape(upload, "vector", self.form)


TWO_ROUNDS = ["--trainer.max_epochs", "2"]


@pytest.mark.parametrize("rule", [None, "Median"])
@pytest.mark.parametrize("form", FORMS)
def test_a_vector_of_a_wrong_form_names_its_client(config, capsys, form, rule):
    rules = [] if rule is None else ["--model.aggregation", rule]
    for field in ("method Misshapen", "attack MisshapenAttack"):
        option, name = field.split()
        words = [f"--model.{option}", f"{__name__}.{name}", f"--model.{option}.form", form, *rules, *TWO_ROUNDS]
        # wrong code is no bad luck of a client, which may be left out
        line = refuse(capsys, *fit(config, *words, "--model.on_bad_update", "skip_client", "--overwrite", "true"))
        assert f"client town1, round 2: {name} sends " in line
        assert FORMS[form][1] in line


@pytest.mark.parametrize(
    ("part", "form", "says"),
    [
        ("extras", "int64", "mean [4] int64 on cpu, but mean [4] float32 on cpu is expected"),
        ("extras", "n+1", "mean [5] float32 on cpu, but mean [4] "),
        ("extras", "None", "a NoneType as its mean"),
        ("name", "n+1", "other, which payload does not declare"),
        ("mask", "n+1", "mask [8] float32 on cpu, but mask ["),
        ("upload", "n+1", "a NoneType, but an Upload is expected"),
    ],
)
def test_so_does_another_part_of_an_upload(config, capsys, part, form, says):
    words = ["--model.method", f"{__name__}.Misshapen", "--model.method.form", form, "--model.method.part", part]
    assert f"client town1, round 2: Misshapen sends {says}" in refuse(capsys, *fit(config, *words, *TWO_ROUNDS))


@pytest.mark.dist
def test_two_ranks_name_client_and_round_of_a_wrong_form(tmp_path):
    run = fit_on_ranks(tmp_path / "run", f"--model.method={__name__}.Misshapen", ranks=2)
    assert run.wait(timeout=120) == [2, 2], run.output
    [line] = errors(run.log())
    assert "client town1, round 2: Misshapen sends vector [" in line


def test_an_exit_within_a_client_is_a_failure(config, capsys):
    line = refuse(capsys, *fit(config, "--model.method", f"{__name__}.Odd", "--model.method.kind", "exit"))
    assert "client town1, round 1: its code asked the process to exit (code 0)" in line


def test_so_is_one_of_a_module_that_a_config_names(config, capsys, tmp_path, monkeypatch):
    (tmp_path / "quits.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    line = refuse(capsys, *fit(config, "--model.method", "quits.Method"))
    assert "quits.py, line 2: asked the process to exit" in line


@pytest.mark.parametrize(
    "options", [["--model.availability.drop", "1.0"], ["--model.method", f"{__name__}.Absent"]], ids=["drop", "skipped"]
)
def test_a_run_in_which_no_client_trained_ends_with_1(config, capsys, options):
    rounds = ["--trainer.max_epochs", "2"]
    assert main(fit(config, *options, *rounds, "--model.on_bad_update", "skip_client")) == 1
    assert "no client returned an update that counts in 2 rounds" in capsys.readouterr().err


NOTHING = ["--trainer.max_steps=0", "--trainer.max_time=00:00:00:00", "--trainer.max_epochs=0"]


@pytest.mark.parametrize("option", NOTHING)
def test_a_run_of_no_round_ends_with_1_and_leaves_an_older_one(config, capsys, option):
    run, rounds = config.parent / "run", "--trainer.max_epochs=2"
    assert main(fit(config, option)) == 1
    assert not run.exists()
    assert main(fit(config)) == 0
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    words = [["--overwrite=true", option]]
    words += [["--ckpt_path", run, rounds, option]] if "epochs" not in option else []
    for more in words:
        capsys.readouterr()
        assert main(fit(config, *more)) == 1
        output = capsys.readouterr()
        assert output.err.endswith("no round was trained; see trainer.max_epochs, max_steps and max_time\n")
        assert "checkpoint" not in output.out + output.err.splitlines()[-1]
        assert "wrote" not in output.out
        assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_run_that_is_complete_has_nothing_to_train_and_ends_with_0(config, capsys):
    assert main(fit(config)) == 0
    assert main(fit(config, "--ckpt_path", config.parent / "run")) == 0
    assert "mean seen" in capsys.readouterr().out


def test_a_quick_check_names_no_results(config, capsys):
    assert main(fit(config)) == 0
    capsys.readouterr()
    assert main(fit(config, "--trainer.fast_dev_run=true", "--overwrite=true")) == 0
    assert capsys.readouterr().out.endswith("trainer.fast_dev_run: a round was trained, and nothing is written\n")


def test_the_baseline_without_any_training_is_a_result(config, caplog):
    assert main(fit(config, "--config", "methods/random_guess")) == 0
    assert "no client returned an update that counts in 1 rounds" in caplog.text


@dataclass(frozen=True, kw_only=True)
class Absent(Odd):
    """All updates are bad."""

    def upload(self, client):
        upload = super().upload(client)
        return replace(upload, vector=upload.vector * float("nan"))


def test_a_validation_without_data_ends_with_1(config, capsys):
    assert main(fit(config, "--data.val", "none")) == 0
    capsys.readouterr()
    assert main(["validate", "--ckpt_path", str(config.parent / "run")]) == 1
    assert "validate: there are no scores" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["LBFGS", "SparseAdam"])
@pytest.mark.parametrize("field", ["model.client.optimizer", "model.server_optimizer"])
def test_an_optimizer_that_needs_more_than_gradients_is_refused(config, capsys, name, field):
    assert f"{field}: {name} cannot train here" in refuse(capsys, *fit(config, f"--{field}", f"torch.optim.{name}"))
    assert not (config.parent / "run").exists()


def test_an_empty_checkpoint_is_refused(config, capsys):
    assert "ckpt_path: is empty" in refuse(capsys, *fit(config, "--ckpt_path", ""))


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_stream_without_the_characters_gets_their_numbers(monkeypatch, encoding):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["list", "methods"]) == 0
    from fedsim.parsing.output import print_text

    print_text("数据")
    assert rb"\u6570" in stream.buffer.getvalue()


def test_a_closed_pipe_is_no_fault():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "fedsim", "papers"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_output_that_cannot_be_written_is_one_line(capsys):
    command = [sys.executable, "-m", "fedsim", "report", "nowhere"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "words"),
    [(OSError(24, "Too many open files"), "ulimit -n"), (OSError(11, "Resource temporarily unavailable"), "ulimit -u"),
     (OSError(36, "File name too long"), "shorter"),
     (RuntimeError("Could not determine home directory."), "export HOME")],
)  # fmt: skip
def test_limits_of_the_machine_are_one_line(error, words):
    failure = failure_of(error, "fit")
    assert failure.code == 2
    assert words in failure.message


@pytest.mark.parametrize("writer", ["replacing", "new_folder"])
def test_a_full_disk_names_the_file(tmp_path, writer):
    from fedsim.core import files

    with pytest.raises(OSError, match="No space") as caught, getattr(files, writer)(tmp_path / "metrics.csv"):
        raise OSError(28, "No space left on device")
    assert str(tmp_path / "metrics.csv") in failure_of(caught.value, "fit").message
