"""Kill fits that replace a run, and read a run that a fit writes: the old run or the new one is whole, always.

    python benchmarks/living_run.py kills --number 40   # SIGKILL from the moment at which the old run is moved aside
    python benchmarks/living_run.py signals --number 20 # SIGUSR1 at drawn times of a fit, from its first instant
    python benchmarks/living_run.py slurm --number 20   # SIGUSR1 to jobs of a real Slurm, from their start
    python benchmarks/living_run.py reads --number 50   # each reader beside a fit of short rounds

Exits with 1 if anything is lost, ends by a traceback, or takes another end than one line.
"""

import argparse
import hashlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tabulate import tabulate

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from cluster.local_slurm import FINAL, LocalSlurm, local_slurm  # noqa: E402  the tests' own cluster

CONFIG = """
seed_everything: 0
trainer: {accelerator: cpu, devices: 1, max_epochs: %d, enable_progress_bar: false}
model:
  method: FedPav
  backbone: {class_path: SmallCNN, init_args: {width: 8}}
  neck: {kind: linear, dim: 16}
  client: {batch_size: 8}
data:
  source: {class_path: SyntheticReID, init_args: {clients: 2, unseen: 1, scale: 0.3}}
  val: none
  size: [32, 16]
"""
FEDSIM = [sys.executable, "-m", "fedsim"]
READERS = {
    "test": [*FEDSIM, "test", "--ckpt_path", "RUN"],
    "predict": [*FEDSIM, "predict", "--ckpt_path", "RUN", "--run_dir", "OUT"],
    "export": [*FEDSIM, "export", "--ckpt_path", "RUN", "--output", "OUT.safetensors"],
    "fit": [*FEDSIM, "fit", "--ckpt_path", "RUN", "--run_dir", "OUT", "--trainer.max_time", "00:00:00:01"],
    "report": [*FEDSIM, "report", "RUN", "--unfinished"],
    "load_model": [sys.executable, "-c", "import fedsim, sys; fedsim.load_model(sys.argv[1])", "RUN"],
}


def main() -> int:
    """Run the experiment, print a table, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kind", choices=("kills", "signals", "slurm", "reads"))
    parser.add_argument("--number", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="living-run-"))
    experiment = {"kills": kills, "signals": signals, "slurm": slurm, "reads": reads}[args.kind]
    ends = experiment(folder, args.number, random.Random(args.seed))
    print(tabulate(sorted(ends.items()), ["end", "times"]))
    shutil.rmtree(folder, ignore_errors=True)
    return int(any(end.startswith("WRONG") for end in ends))


def fit(folder: Path, rounds: int, *options: str) -> list[str]:
    """Return the command line of a fit in ``folder``/run."""
    (folder / "config.yaml").write_text(CONFIG % rounds)
    return [*FEDSIM, "fit", "--config", str(folder / "config.yaml"), "--run_dir", str(folder / "run"), *options]


def digests(folder: Path) -> dict[str, str]:
    """Return the digest of each file of a run."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(files)}


def kills(folder: Path, number: int, draw: random.Random) -> Counter[str]:
    """Kill fits that replace a finished run, within and after the window in which the old run is aside."""
    subprocess.run(fit(folder, 2), check=True, capture_output=True)
    shutil.copytree(folder / "run", folder / "kept", symlinks=True)
    old, ends = digests(folder / "kept"), Counter[str]()
    while ends.total() < number:
        shutil.rmtree(folder / "run", ignore_errors=True)
        shutil.copytree(folder / "kept", folder / "run", symlinks=True)
        command = fit(folder, 2, "--overwrite=true", "--model.client.batch_size=16")
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            while not [*(folder / "run").glob("replaced-run*")] and process.poll() is None:
                time.sleep(0.0005)
            time.sleep(draw.uniform(0.0, 0.4))
            process.kill()
        line = subprocess.run([*FEDSIM, "report", folder / "run", "--unfinished"], capture_output=True, text=True)
        now = digests(folder / "run")
        if now == old:
            ends["the old run is back, " + ("with a line" if "is back" in line.stderr else "untouched")] += 1
        elif line.returncode == 0 and "replaced-run" not in str([*now]) and any("last.ckpt/v" in name for name in now):
            ends["the new run"] += 1
        else:
            ends[f"WRONG: {line.stderr.strip() or [*now]}"] += 1
    return ends


def signals(folder: Path, number: int, draw: random.Random) -> Counter[str]:
    """Send SIGUSR1 to fits at drawn times, under a Slurm that is a script."""
    scontrol = folder / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {folder}/asked\n')
    scontrol.chmod(0o755)
    environ = os.environ | {"SLURM_JOB_ID": "12", "PATH": f"{scontrol.parent}:{os.environ['PATH']}"}
    site = f'source {Path(__file__).parents[1] / "slurm" / "site.sh"}; "$@" || end_job $?'
    ends = Counter[str]()
    for n in range(number):
        (folder / "asked").unlink(missing_ok=True)
        command = ["bash", "-c", site, "site", *fit(folder, 3, f"--trainer.default_root_dir={folder}")]
        command[command.index("--run_dir") + 1] = str(folder / f"run{n}")
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ)
        time.sleep(draw.uniform(0.0, 8.0))
        subprocess.run(["pkill", "-USR1", "-P", str(process.pid)], check=False)
        _, error = process.communicate()
        is_requeued = (folder / "asked").exists()
        lines = [line for line in error.splitlines() if line.startswith(("fedsim: error", "job 12"))]
        if process.returncode == 0 and not is_requeued:
            ends["finished before the signal"] += 1
        elif process.returncode == 138 and is_requeued and lines and "Traceback" not in error:
            ends["asked to start again, with a line"] += 1
        else:
            ends[f"WRONG: code {process.returncode}, requeued {is_requeued}: {error[-300:]}"] += 1
    return ends


def slurm(folder: Path, number: int, draw: random.Random) -> Counter[str]:
    """Send SIGUSR1 to the steps of Slurm's jobs at drawn times; jobs that start again must end."""
    ends = Counter[str]()
    with local_slurm(folder / "cluster", nodes=1) as cluster:
        for n in range(number):
            log = folder / f"{n}.log"
            options = fit(folder, 3)[len(FEDSIM) + 1 :]
            options[options.index("--run_dir") + 1] = str(folder / f"run{n}")
            command = ["--parsable", f"--output={log}", "slurm/fit.sbatch", *options, "--trainer.num_nodes=1"]
            environment = cluster.environment | {"VIRTUAL_ENV": sys.prefix, "MASTER_ADDR": "127.0.0.1"}
            environment["PATH"] = f"{cluster.folder / 'bin'}:{Path(sys.executable).parent}:{environment['PATH']}"
            sbatch = [str(cluster.folder / "bin" / "sbatch"), *command]
            job = subprocess.check_output(sbatch, text=True, env=environment, cwd=ROOT).strip()
            await_state(cluster, job, "RUNNING")
            time.sleep(draw.uniform(0.0, 10.0))
            cluster.run("scancel", "--signal=USR1", job, check=False)
            state = await_state(cluster, job, "PENDING", *FINAL)
            words = ("starts job", "is asked to start")
            lines = [line for line in log.read_text().splitlines() if any(word in line for word in words)]
            if state == "PENDING":
                time.sleep(2)  # within the second of its end a node takes the new start for the revoked one
                cluster.run("scontrol", "update", f"jobid={job}", "starttime=now")
                state = f"started again, then {await_state(cluster, job, *FINAL)}"
            is_right = state in ("COMPLETED", "started again, then COMPLETED") and "Traceback" not in log.read_text()
            is_right = is_right and bool(lines) == state.startswith("started")
            ends[state if is_right else f"WRONG: {state}, {lines}: {log.read_text()[-300:]}"] += 1
    return ends


def await_state(cluster: LocalSlurm, job: str, *states: str) -> str:
    """Return the state of ``job`` when it is one of ``states``."""
    while (state := cluster.jobs(job)[0]["JobState"]) not in states:
        time.sleep(0.05)
    return state


def reads(folder: Path, number: int, draw: random.Random) -> Counter[str]:
    """Read a run with each reader while a fit writes its rounds."""
    ends = Counter[str]()
    command = fit(folder, 100_000, "--trainer.check_val_every_n_epoch=10")
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as writer:
        while rounds_in(folder) < 12:  # reports need an evaluation
            time.sleep(0.1)
        before, start = rounds_in(folder), time.monotonic()
        for n in range(number):
            for reader, words in READERS.items():
                time.sleep(draw.uniform(0.0, 0.3))
                place = str(folder / f"out{n}-{reader}")
                line = [word.replace("RUN", str(folder / "run")).replace("OUT", place) for word in words]
                done = subprocess.run(line, capture_output=True, text=True, cwd=folder)
                end = "right" if done.returncode == 0 else f"code {done.returncode}: {done.stderr[-200:]}"
                ends[f"{'' if done.returncode == 0 else 'WRONG '}{reader}: {end}"] += 1
        length = (time.monotonic() - start) / max(1, rounds_in(folder) - before)
        print(f"rounds of {length:.2f} s; the fit {'goes on' if writer.poll() is None else 'has ENDED'}")
        writer.kill()
    return ends


def rounds_in(folder: Path) -> int:
    """Return the number of rounds of the run in ``folder``."""
    path = folder / "run" / "metrics.csv"
    return len(path.read_text().splitlines()) - 1 if path.exists() else 0


if __name__ == "__main__":
    sys.exit(main())
