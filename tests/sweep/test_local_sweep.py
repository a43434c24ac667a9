"""Running sweeps: here, one run after another, and by W&B's own agent."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from environment import is_of_a_launcher
from failing import PATIENCE, await_true
from fedsim.__main__ import main
from fedsim.core.errors import ConfigError
from fedsim.strategy.stopped import is_stopped
from fedsim.sweep.local import runs_of_sweep
from fedsim.sweep.made import sweep_of_method
from fedsim.sweep.running import execute_runs, shares_of_machine
from fedsim.sweep.sampling import samples
from run_dirs import scores_of, write_run
from sweep_files import read_sweep
from tiny_run import TINY

ROOT = Path(__file__).parents[2]


# -- running them here -------------------------------------------------------------------------------------------------

PROGRAM = """
import json, os, pathlib, signal, sys, time
options = dict(arg.removeprefix("--").split("=", 1) for arg in sys.argv[1:])
folder = pathlib.Path(options["run_dir"])
folder.mkdir(parents=True, exist_ok=True)
print("mode", os.environ["WANDB_MODE"], "ckpt_path" in options)
if options["a"] == "wait":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended in order"))
    (folder / "started").touch()
    time.sleep(60)
if options["a"] == "bad":
    sys.exit("fedsim: error: a: is bad")
if options["a"] == "damaged":
    (folder / "summary.json").write_text('{"final": 3}')
    (folder / "config.yaml").write_text("{}")
    sys.exit()
score = float(options["a"])
scores = {"metrics": {"val/mAP": score}}
(folder / "summary.json").write_text(json.dumps({"finished": True, "final": scores, "best": scores}))
"""


@pytest.fixture
def quick(write_sweep, tmp_path):
    """Write a sweep of a program that takes no time."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    return lambda *values, **fields: write_sweep(
        program=str(program), command=["${interpreter}", "${program}", "${args}"],
        parameters={"a": {"values": list(values)}, "b": {"value": 1}}, **fields,
    )  # fmt: skip


def first_cells(table):
    return [line.split()[0] for line in table.splitlines()[2:] if line[:1] == " "]


def test_local_runs_every_draw_and_reports_failures_at_the_end(quick, capsys, caplog, tmp_path):
    caplog.set_level("INFO", logger="fedsim")
    args = ["sweep", "--local", "--run_dir", str(tmp_path / "runs")]
    assert main([*args, str(quick(0.25, "bad", 0.5))]) == 1
    captured = capsys.readouterr()
    assert first_cells(captured.out) == ["0.5000", "0.2500", "failed"]
    assert "a=bad b=1: a: is bad" in captured.out
    assert captured.err.strip().splitlines()[-1].startswith("fedsim: error: 1 of 3 runs failed")
    assert "run 2/3: failed with exit code 1: a: is bad" in caplog.text
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").glob("*/summary.json")}
    # called again, with one more value and without the bad one
    caplog.clear()
    assert main([*args, str(quick(0.25, 0.5, 0.75, metric={"name": "val/mAP"}))]) == 0
    assert first_cells(capsys.readouterr().out) == ["0.2500", "0.5000", "0.7500"]  # W&B minimises by default
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in stamps.items())
    assert caplog.text.count("finished before") == 2


def test_an_interrupted_draw_is_continued(quick, tmp_path):
    path = quick(0.5)
    [run] = runs_of_sweep(read_sweep(path), tmp_path / "runs")
    assert not any("ckpt_path" in word for word in run.command)
    run.folder.mkdir(parents=True)
    [again] = runs_of_sweep(read_sweep(path), tmp_path / "runs")
    assert again.folder == run.folder
    assert again.command == (*run.command, "--ckpt_path=last")


def test_a_program_that_does_not_exist_is_one_line(write_sweep, capsys, tmp_path):
    path = write_sweep(command=["/nowhere/fedsim", "${args}"])
    assert main(["sweep", str(path), "--local", "--run_dir", str(tmp_path / "runs")]) == 2
    assert "command: cannot run /nowhere/fedsim" in capsys.readouterr().err


@pytest.mark.slow
def test_a_signal_ends_the_running_draw_in_order_and_starts_no_other(quick, tmp_path):
    runs = tmp_path / "runs"
    command = [sys.executable, "-m", "fedsim", "sweep", str(quick("wait", 0.5)), "--local", "--run_dir", str(runs)]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + PATIENCE
    while not list(runs.glob("*/started")) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGTERM
    assert errors.splitlines()[-1] == "fedsim: error: stopped by SIGTERM"
    [log] = runs.glob("*.log")
    assert "ended in order" in log.read_text()


MEETING = """
import json, os, pathlib, sys, time
options = dict(arg.removeprefix("--").split("=", 1) for arg in sys.argv[1:])
folder = pathlib.Path(options["run_dir"])
folder.mkdir(parents=True, exist_ok=True)
(folder / "here").write_text(json.dumps({name: os.environ.get(name) for name in NAMES}))
print("round 3/20: loss 1.0", flush=True)
deadline = time.monotonic() + 300
while len(list(folder.parent.glob("*/here"))) < 2 and time.monotonic() < deadline:
    time.sleep(0.02)
time.sleep(0.5)
scores = {"metrics": {"val/mAP": float(options["a"])}}
(folder / "summary.json").write_text(json.dumps({"finished": True, "final": scores, "best": scores}))
"""
"""Ends when another one has begun, too."""
SHARE = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")


@pytest.fixture
def meeting(write_sweep, tmp_path):
    """Write a sweep of a program that needs company."""
    program = tmp_path / "meeting.py"
    program.write_text(f"NAMES = {SHARE}\n{MEETING}")
    return lambda *values: write_sweep(
        program=str(program), command=["${interpreter}", "${program}", "${args}"], metric={"name": "val/mAP"},
        parameters={"a": {"values": list(values)}},
    )  # fmt: skip


def shares_seen(runs):
    found = [json.loads(path.read_text()) for path in runs.glob("*/here")]
    return sorted(tuple(share[name] for name in SHARE) for share in found)


def test_draws_run_side_by_side_and_share_the_machine(meeting, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,7")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    runs = tmp_path / "runs"
    assert main(["sweep", "--local", "--parallel", "2", "--run_dir", str(runs), str(meeting(0.25, 0.5))]) == 0
    assert first_cells(capsys.readouterr().out) == ["0.2500", "0.5000"]
    assert shares_seen(runs) == [("4", "3,7"), ("4", "5")]


@pytest.mark.parametrize(("gpus", "threads", "expected"), [
    ("0", None, [{"CUDA_VISIBLE_DEVICES": "0"}] * 3),
    ("", None, [{}] * 3),
    (None, None, [{"CUDA_VISIBLE_DEVICES": "GPU-a"}, {"CUDA_VISIBLE_DEVICES": "GPU-b"},
                  {"CUDA_VISIBLE_DEVICES": "GPU-a"}]),
    ("", "5", [{}] * 3),
])  # fmt: skip
def test_gpus_and_cores_are_dealt(monkeypatch, tmp_path, gpus, threads, expected):
    """Two GPUs, as nvidia-smi lists them, where nobody has chosen any; threads that somebody has chosen stay."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho GPU-a\necho GPU-b\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for name, value in {"CUDA_VISIBLE_DEVICES": gpus, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(7)))
    parts = {} if threads else {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}
    assert shares_of_machine(3) == [{**parts, **share} for share in expected]
    assert shares_of_machine(1) == [{}]


def test_a_line_says_how_far_each_draw_is(meeting, caplog, tmp_path):
    caplog.set_level("INFO", logger="fedsim")
    runs = runs_of_sweep(read_sweep(meeting(0.25, 0.5)), tmp_path / "runs")
    execute_runs(runs, "val/mAP", parallel=2, line_interval=0.0)
    for number in (1, 2):
        assert f"run {number}/2: round 3/20: loss 1.0" in caplog.text


def test_a_damaged_summary_is_a_failure_of_its_run_alone(quick, capsys, tmp_path):
    assert main(["sweep", str(quick("damaged", 0.5)), "--local", "--run_dir", str(tmp_path / "runs")]) == 1
    output = capsys.readouterr()
    assert "summary.json: final is not a round with its metrics" in output.out
    assert "0.5000" in output.out
    assert "1 of 2 runs failed" in output.err


def test_a_run_of_another_call_is_left_alone(quick, capsys, tmp_path):
    path = quick(0.25, 0.5)
    run = runs_of_sweep(read_sweep(path), tmp_path / "runs")[0]
    log_file = run.claim()
    os.write(log_file, b"round 1/20\n")
    assert main(["sweep", str(path), "--local", "--run_dir", str(tmp_path / "runs")]) == 1
    assert "1 of 2 runs run in another call" in capsys.readouterr().err
    assert run.log.read_text() == "round 1/20\n"
    os.close(log_file)
    assert main(["sweep", str(path), "--local", "--run_dir", str(tmp_path / "runs")]) == 0


def test_an_error_ends_the_draws_that_run(quick, tmp_path):
    runs = runs_of_sweep(read_sweep(quick("wait", 0.5)), tmp_path / "runs")
    bad = [runs[0], replace(runs[1], command=("/nowhere/fedsim",))]
    with pytest.raises(ConfigError, match="command: cannot run /nowhere/fedsim"):
        execute_runs(bad, "val/mAP", parallel=2)
    code = subprocess.run(["pgrep", "-f", str(runs[0].folder)], check=False, capture_output=True).returncode
    assert code == 1  # nobody


@pytest.mark.parametrize(("options", "line"), [
    (["--parallel", "0", "--local"], "--parallel: must be at least 1"),
    (["--parallel", "2", "--dry-run"], "--parallel: must be at least 1, and more than 1 needs --local"),
])  # fmt: skip
def test_parallel_draws_that_cannot_be_are_refused(quick, capsys, options, line):
    assert main(["sweep", str(quick(0.5)), *options]) == 2
    assert line in capsys.readouterr().err


@pytest.fixture
def finished_methods(write_sweep, tmp_path):
    """A sweep over overlays and seeds, of which all runs but one are there: its file, and market1501's rank-1."""
    overlays = [str(tmp_path / f"{name}.yaml") for name in ("plain", "better", "broken")]
    path = write_sweep(
        program="/nowhere/fedsim", command=["false", "${args}"],
        parameters={"config": {"values": overlays}, "seed_everything": {"values": [1, 2]}},
    )  # fmt: skip
    scores = {}
    for run in runs_of_sweep(read_sweep(path), tmp_path / "runs"):
        overlay, seed = run.sample["config"], run.sample["seed_everything"]
        name = Path(overlay).stem
        if name != "broken":
            score = 0.1 * (1 + overlays.index(overlay)) + 0.02 * seed
            metrics = scores_of({"market1501": score}, "personalised")
            scores[name, seed] = metrics["test/personalised/market1501/mAP_trapezoid"], score
            client = {"batch_size": 8 + overlays.index(overlay)}
            config = {"model": {"method": {"class_path": "Local"}, "client": client}}
            write_run(run.folder, {100: metrics}, 100, config, primary="personalised", seed=seed, fingerprint=name)
    return path, scores


def test_draws_stand_beside_published_numbers(finished_methods, capsys, tmp_path):
    path, scores = finished_methods
    command = [
        "sweep",
        str(path),
        "--local",
        "--run_dir",
        str(tmp_path / "runs"),
        "--compare",
        "000/table2",
        "000/table4",
    ]
    assert main(command) == 1  # the broken ones
    captured = capsys.readouterr()
    assert "2 of 6 runs failed" in captured.err
    assert [captured.out.count(f"\n{table}: ") for table in ("table2", "table3", "table4")] == [1, 0, 1]
    assert "68.2 / 87.4" in captured.out  # local supervised, Market-1501
    for name in ("plain", "better"):
        values = np.array([scores[name, seed] for seed in (1, 2)])
        means, spreads = 100 * values.mean(0), 100 * values.std(0, ddof=1)
        cell = " / ".join(f"{mean:.1f} ± {spread:.1f}" for mean, spread in zip(means, spreads, strict=True))
        assert cell in captured.out.replace("+-", " ± ")
        assert f"- {name}: no row of this table is of this method" in captured.out
    assert "- broken" not in captured.out


def test_without_a_finished_draw_there_is_nothing_to_compare(write_sweep, capsys, tmp_path):
    path = write_sweep(command=["false", "${args}"])
    assert main(["sweep", str(path), "--local", "--run_dir", str(tmp_path / "runs"), "--compare", "000"]) == 1
    captured = capsys.readouterr()
    assert "2 of 2 runs failed" in captured.err
    assert "Paper 000" not in captured.out


@pytest.mark.slow
def test_a_shipped_sweep_runs_here(tmp_path, monkeypatch, capsys, quick_python):
    monkeypatch.chdir(ROOT)
    for name in filter(is_of_a_launcher, list(os.environ)):  # left by fits in this process; runs are processes
        monkeypatch.delenv(name)
    path = make_tiny("local", tmp_path, keep={"model.client.batch_size": {"values": [8, 1]}})
    code = main(["sweep", str(path), "--local", "--run_dir", str(tmp_path / "runs")])
    result = capsys.readouterr()
    assert code == 1, result.err
    done, failed = result.out.splitlines()[2:4]
    assert 0 <= float(done.split()[0]) <= 1
    assert failed.split()[0] == "failed"
    assert "batch_size: 1 is less than 2" in result.out
    [summary] = (tmp_path / "runs").glob("*/summary.json")
    assert json.loads(summary.read_text())["final"]["metrics"]["val/mAP"] == pytest.approx(
        float(done.split()[0]), abs=1e-4
    )


def make_tiny(name, folder, keep=None):
    """Write a shipped sweep with a small federation in the place of its own."""
    content = sweep_of_method(str(ROOT / "configs" / "methods" / f"{name}.yaml"), ["configs/quickstart.yaml"])
    (folder / "tiny.yaml").write_text(TINY.replace("  method: FedPav\n", ""))
    command = content["command"]
    command[command.index("--config=configs/quickstart.yaml")] = f"--config={folder / 'tiny.yaml'}"
    command[command.index("${args}") : command.index("${args}")] = [
        "--trainer.max_epochs=2", "--trainer.check_val_every_n_epoch=1", "--data.limit_client_batches=2",
        "--data.source.init_args.scale=0.5",
    ]  # fmt: skip
    content["parameters"] = keep or content["parameters"]
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


# -- by W&B's own agent ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_wandbs_own_agent_runs_a_shipped_sweep(tmp_path, quick_python):
    pytest.importorskip("wandb", reason="W&B is not installed")
    from wandb_tools import KEY, PROGRAM, Server, logs

    path = make_tiny("fedpav", tmp_path)
    sweep = read_sweep(path)

    def draw_as_a_server_would(sent):
        assert sent["parameters"].keys() == sweep.parameters.keys()
        yield from samples(sweep, 2)
        [log] = logs(tmp_path / "runs" / "sweep-sweep1" / "draw2")
        # of a preempted run: all that it has logged, and W&B's own key
        yield "draw2", log.config | {"_wandb": {"cli_version": "0.31.0", "t": {"1": [1, 2]}}}

    (tmp_path / "configs").symlink_to(ROOT / "configs")
    with Server(draw_as_a_server_would) as server:
        inherited = {name: value for name, value in os.environ.items() if not is_of_a_launcher(name)}
        environment = inherited | {
            "WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY, "WANDB_AGENT_DISABLE_FLAPPING": "true",
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        }  # fmt: skip
        how = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "timeout": PATIENCE}
        made = subprocess.run([*PROGRAM, "sweep", "--entity=tester", "--project=fedsim", str(path)], **how)
        assert made.returncode == 0, made.stdout + made.stderr
        ran = subprocess.run([*PROGRAM, "agent", "tester/fedsim/sweep1"], **how)
    said = made.stderr + ran.stdout + ran.stderr
    assert {"UpsertSweep", "SweepWithRuns", "CreateAgent", "Heartbeat"} <= set(server.seen), said
    for number, sample in enumerate(samples(sweep, 2), 1):
        folder = tmp_path / "runs" / "sweep-sweep1" / f"draw{number}"
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["finished"], said
        log = logs(folder)[0]
        assert log.id == f"draw{number}"  # the server knows the run by this name
        assert log.of("run")[0]["sweep_id"] == "sweep1"
        assert {name: log.config[name] for name in sample} == sample
        assert log.config["model"]["client"]["batch_size"] == sample["model.client.batch_size"]
        assert math.isclose(log.last("val/mAP"), summary["final"]["metrics"]["val/mAP"], rel_tol=1e-6)
        assert log.of("exit")[0].get("exit_code", 0) == 0
    assert said.count("nothing to train") == 1, said
    assert "fedsim: error" not in said


# -- the end of the parent ---------------------------------------------------------------------------------------------

WAITING = """
import os, pathlib, signal, sys, time
options = dict(arg.removeprefix("--").split("=", 1) for arg in sys.argv[1:])
folder = pathlib.Path(options["run_dir"])
folder.mkdir(parents=True, exist_ok=True)
def end(*_):
    (folder / "ended").touch()
    sys.exit(1)
signal.signal(signal.SIGTERM, end)
(folder / "pid").write_text(str(os.getpid()))
if options["a"] == "stopped":
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("hangup_ends")
@pytest.mark.parametrize(("number", "values"), [
    (signal.SIGKILL, ["1", "2"]), (signal.SIGHUP, ["1", "2"]), (signal.SIGHUP, ["1", "stopped"]),
    (signal.SIGTERM, ["stopped"]),
])  # fmt: skip
def test_runs_end_with_the_process_that_started_them(write_sweep, tmp_path, number, values):
    program, runs = tmp_path / "waiting.py", tmp_path / "runs"
    program.write_text(WAITING)
    path = write_sweep(
        program=str(program), command=["${interpreter}", "${program}", "${args}"], parameters={"a": {"values": values}}
    )
    command = [sys.executable, "-m", "fedsim", "sweep", str(path), "--local", f"--run_dir={runs}"]
    process = subprocess.Popen([*command, f"--parallel={len(values)}"], stderr=subprocess.PIPE, text=True, cwd=ROOT)
    pids = []
    try:
        await_true(lambda: len(_texts(runs)) == len(values), PATIENCE, lambda: "the runs do not start")
        pids = [int(text) for text in _texts(runs)]
        if "stopped" in values:
            await_true(lambda: any(map(is_stopped, pids)), PATIENCE, lambda: "no run has stopped")
        process.send_signal(number)
        _, errors = process.communicate(timeout=PATIENCE)
        await_true(lambda: len(list(runs.glob("*/ended"))) == len(values), PATIENCE, lambda: "a run goes on")
        assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
        assert "Traceback" not in errors
    finally:
        process.kill()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _texts(runs):
    """What the runs have written as their ids."""
    return [text for path in runs.glob("*/pid") if (text := path.read_text())]


def test_a_closed_terminal_that_nohup_ignores_ends_nothing(quick, tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        [run] = runs_of_sweep(read_sweep(quick("wait")), tmp_path / "runs")
        hup = [sys.executable, "-c", "import os, signal; os.kill(os.getppid(), signal.SIGHUP)"]
        [result] = execute_runs([replace(run, command=tuple(hup))], "val/mAP")
        assert result.code == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
