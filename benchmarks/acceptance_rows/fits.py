"""Rows about whole commands: the machine, equal bits, and a run that is killed."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor

from acceptance_rows.terms import Bench, Outcome
from fedsim.strategy.checkpoint_files import read_checkpoint, read_states
from fedsim.strategy.trial import try_sum

ROUNDS, ROUNDS_BEFORE_THE_KILL = 3, 1
CONFIG = """
seed_everything: 0
trainer:
  max_epochs: {rounds}
  limit_val_batches: 0
  accelerator: {accelerator}
  deterministic: true
  enable_progress_bar: false
  precision: {precision}
model:
  method: FedPav
  backbone: {backbone}
  neck: {{kind: linear, dim: 64, dropout: 0.2}}
  server_optimizer: FedAdam
  client:
    batch_size: 16
    local_epochs: 2
    optimizer: {{class_path: torch.optim.SGD, init_args: {{lr: 0.01, momentum: 0.9}}}}
data:
  source: {{class_path: SyntheticReID, init_args: {{clients: 4, unseen: 1, scale: {scale}}}}}
  val: none
  size: {size}
"""


def doctor(bench: Bench) -> Outcome:
    """Let ``fedsim doctor`` look at the machine."""
    accelerator = "gpu" if bench.is_gpu else "cpu"
    command = ["doctor", "--json", "--run_dir", str(bench.folder), "--trainer.accelerator", accelerator]
    done = subprocess.run([sys.executable, "-m", "fedsim", *command], capture_output=True, text=True, check=False)
    if not done.stdout:
        return Outcome(f"ends with code {done.returncode}: {done.stderr.strip()[-200:]}", "0", holds=False)
    problems = [finding["problem"] for finding in json.loads(done.stdout)["findings"] if finding["blocks"]]
    return Outcome(f"{len(problems)} in the way" + (f": {problems[0]}" if problems else ""), "0", not problems)


def repeated(bench: Bench) -> Outcome:
    """Run a deterministic fit twice."""
    return compare("the same again", finished(bench, "first"), finished(bench, "again"))


def equal_bits(bench: Bench) -> Outcome:
    """Run the same fit on one rank and on two."""
    return compare("1 and 2 ranks", finished(bench, "first"), finished(bench, "two-ranks", ranks=2))


def nccl_alone(bench: Bench) -> Outcome:
    """Sum by NCCL on a single rank, and run the same fit with it: a rank that is alone has gloo by default."""
    bench.need_gpu("NCCL sums between GPUs")
    by_nccl = finished(bench, "nccl-alone", 1, "--trainer.strategy.process_group_backend=nccl")
    outcome = compare("1 rank with gloo and with NCCL", finished(bench, "first"), by_nccl)
    store = bench.folder / "nccl-alone.store"
    store.unlink(missing_ok=True)
    try_sum(0, [bench.device], store, seconds=60)  # last: a GPU in exclusive mode takes no fit beside this process
    return outcome


def shared(bench: Bench) -> Outcome:
    """Run the same fit on two ranks of one GPU; the figure says how long rounds take beside those of one rank."""
    bench.need_gpu("ranks share GPUs, not CPUs")
    on_one, on_two = finished(bench, "first"), finished(bench, "shared", 2, "--trainer.strategy.ranks_per_device=2")
    outcome = compare("1 rank and 2 of one GPU", on_one, on_two)
    ratio = seconds_of(on_two) / seconds_of(on_one)
    return Outcome(f"{outcome.figure}; rounds take {ratio:.2f} of the time", outcome.bar, outcome.holds)


def host_store(bench: Bench) -> Outcome:
    """Run the same fit with private states in page-locked memory of the host."""
    bench.need_gpu("states are copied to it")
    on_host = finished(bench, "host-store", 1, "--model.client_store=host")
    return compare("private states on the GPU and on the host", finished(bench, "first"), on_host)


def resumed(bench: Bench) -> Outcome:
    """Kill a fit after its first checkpoint, and go on by the same command; on two ranks, if there are two GPUs."""
    ranks = 2 if bench.gpus > 1 else 1
    options = options_of(bench, "killed")
    process = start(options)
    pointer = await_checkpoint(bench.folder / "killed", process)
    was_running = process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = rounds_of(bench.folder / "killed") if pointer.exists() else 0
    run([*options, "--ckpt_path", "last", f"--trainer.devices={ranks}"])
    outcome = compare("with and without", finished(bench, "first"), bench.folder / "killed")
    if not was_running or done >= ROUNDS:
        return Outcome(f"the fit had ended before it was killed; {outcome.figure}", outcome.bar, holds=False)
    return Outcome(f"killed after round {done}, on with {ranks}; {outcome.figure}", outcome.bar, outcome.holds)


def await_checkpoint(folder: Path, process: subprocess.Popen[str]) -> Path:
    """Wait for the first checkpoint of a run, or the end of its process; return the file that names it."""
    pointer = folder / "checkpoints" / "last.ckpt" / "current"
    while process.poll() is None and not (pointer.exists() and pointer.stat().st_size):
        time.sleep(0.01)
    return pointer


# -- fits --------------------------------------------------------------------------------------------------------------


def options_of(bench: Bench, name: str) -> list[str]:
    """Write a run's config; return the options of its fit."""
    config = bench.folder / f"{name}.yaml"
    backbone = "{class_path: SmallCNN, init_args: {width: 4}}"
    config.write_text(
        CONFIG.format(
            rounds=ROUNDS,
            accelerator="gpu" if bench.is_gpu else "cpu",
            precision="bf16-mixed" if bench.is_gpu else "32-true",
            backbone=backbone if bench.reduced else "{class_path: ResNet, init_args: {depth: 18}}",
            scale=0.2 if bench.reduced else 2.0,
            size="[16, 8]" if bench.reduced else "[64, 32]",
        )
    )
    return ["fit", "--config", str(config), "--run_dir", str(bench.folder / name)]


def finished(bench: Bench, name: str, ranks: int = 1, *more: str, environ: Mapping[str, str] | None = None) -> Path:
    """Return the directory of a run, which is made unless another row has made it; see :func:`log_of`."""
    folder = bench.folder / name
    summary = folder / "summary.json"
    if not (summary.exists() and json.loads(summary.read_text())["finished"]):
        words = [*options_of(bench, name), "--overwrite", "true", f"--trainer.devices={ranks}", *more]
        bench.folder.joinpath(f"{name}.log").write_text(run(words, environ))
    return folder


def log_of(folder: Path) -> list[str]:
    """Return the lines that a finished run has written."""
    return folder.with_name(f"{folder.name}.log").read_text().splitlines()


def run(words: list[str], environ: Mapping[str, str] | None = None) -> str:
    """Run a command that must succeed; return its output. For ``environ`` see :func:`start`."""
    return finish(start(words, environ=environ))


def start(
    words: list[str], own_session: bool = False, environ: Mapping[str, str] | None = None, log: Path | None = None
) -> subprocess.Popen[str]:
    """Start a command of fedsim.

    Args:
        words: the command.
        own_session: its processes are a group of their own.
        environ: what its environment has beside ours.
        log: a file for its output, which can be read while it runs; None: a pipe.
    """
    if "--trainer.devices" not in " ".join(words):
        words = [*words, "--trainer.devices=1"]
    with nullcontext(subprocess.PIPE) if log is None else log.open("w") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "fedsim", *words], stdout=output, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "WANDB_MODE": "disabled", **(environ or {})}, start_new_session=own_session,
        )  # fmt: skip


def importing(folder: Path) -> dict[str, str]:
    """Return the environment of a command that imports modules from a folder, where it does not run itself."""
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for a command that must succeed; return its output."""
    output, _ = process.communicate()
    if process.returncode:
        lines = [line for line in output.splitlines() if line.strip()]
        error = next((line for line in lines if line.startswith("fedsim: error")), "".join(lines[-1:]))
        raise RuntimeError(f"a fit ended with code {process.returncode}: {error}")
    return output


# -- bits --------------------------------------------------------------------------------------------------------------


def compare(title: str, first: Path, second: Path) -> Outcome:
    """Compare all tensors of two runs: global vectors, and private states of all clients."""
    tensors, expected = tensors_of(first), tensors_of(second)
    if tensors.keys() != expected.keys() or not tensors:
        return Outcome(f"{title}: checkpoints of {len(tensors)} and {len(expected)} tensors", "equal bits", holds=False)
    differ = [name for name, tensor in tensors.items() if not torch.equal(tensor, expected[name])]
    figure = f"{title}: {len(differ)} of {len(tensors)} tensors differ"
    if differ:
        gaps = [(tensors[name].double() - expected[name].double()).abs().max().item() for name in differ]
        figure += f", by {max(gaps):.0e} at most"
    return Outcome(figure, "0", not differ)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a run's last checkpoint by name."""
    path = folder / "checkpoints" / "last.ckpt"
    content = read_checkpoint(path)
    states = read_states(path, content["fedsim"], list(content["fedsim"]["clients"]))
    private = {f"{client}/{name}": tensor for client, state in states.items() for name, tensor in state.items()}
    return {name: tensor for name, tensor in (content["state_dict"] | private).items() if tensor.numel()}


def seconds_of(folder: Path) -> float:
    """Return the duration of a run's last round."""
    with (folder / "metrics.csv").open() as file:
        return [float(row["time/round_seconds"]) for row in csv.DictReader(file) if row["time/round_seconds"]][-1]


def rounds_of(folder: Path) -> int:
    """Return how many rounds a run's last checkpoint has."""
    content = read_checkpoint(folder / "checkpoints" / "last.ckpt")
    return int(content["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"])
