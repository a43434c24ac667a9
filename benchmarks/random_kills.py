"""Kill a run again and again, anywhere, and see whether it still ends in the same bits.

A small run is started by ``fedsim fit --ckpt_path last`` until a random process of it has been killed (SIGKILL) at a
random time so many times; then it may finish. The result is compared with that of a run that nothing interrupts:

    python benchmarks/random_kills.py --kills 30 --ranks 2
    python benchmarks/random_kills.py --kills 20 --ranks 2 --rank-groups  # ranks share a client; compared with one rank
    python benchmarks/random_kills.py --kills 20 --ranks 2 --buffered     # clients are under way; compared alike
    python benchmarks/random_kills.py --kills 20 --ranks 2 1 2 --buffered  # each start draws one of these numbers
    PYTHONPATH=tests python benchmarks/random_kills.py --ranks 2 1 --module lightning_modules.Restarted

Exits with 1 if a tensor differs, or if a process outlived the one that was killed.
"""

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import torch
from tabulate import tabulate
from torch import Tensor

from fedsim.core.errors import DataError
from fedsim.strategy.checkpoint_files import read_checkpoint, read_states

CONFIG = """
seed_everything: 0
trainer: {limit_val_batches: 0, accelerator: cpu, enable_progress_bar: true}
model:
  method: FedPav
  backbone: {class_path: SmallCNN, init_args: {width: 8}}
  neck: {kind: linear, dim: 16, dropout: 0.2}
  server_optimizer: FedAdam
  client: {batch_size: 8, local_epochs: 2}
data:
  source: {class_path: SyntheticReID, init_args: {clients: 4, unseen: 1, scale: 0.3}}
  val: none
  size: [32, 16]
"""
_RANK_GROUP = ["--model.client.micro_batch=4", "--model.clients.town0={local_epochs: 16}"]
"""town0 has more to do than all others, so both ranks train it."""
_SLOW = "{down_mbit: 8, up_mbit: 4, images_per_second: 100, clients: {town1: {latency_ms: 9000}}}"
_BUFFERED = ["--model.timing=Buffered", "--model.timing.buffer=2", f"--model.hardware={_SLOW}"]
"""town1 is slow: it answers after many steps of the server, with a model of an earlier round."""
_PATIENCE = 30.0
"""Seconds that the other processes have to end by themselves."""


class Kill(NamedTuple):
    """What one kill did."""

    ranks: int
    """of the start that it ended"""
    second: float
    victim: str
    before: int
    """rounds in the checkpoint when the run was started"""
    seen: int
    """rounds that were done when the process was killed"""
    after: int
    """rounds in the checkpoint afterwards"""
    orphans: int


def main() -> int:
    """Run the experiment, print a table, and return the exit code."""
    args = parse()
    draw = random.Random(args.seed)
    folder = Path(args.folder or tempfile.mkdtemp(prefix="random-kills-"))
    folder.mkdir(parents=True, exist_ok=True)
    kills: list[Kill] = []
    while len(kills) < args.kills:
        kill = run_and_kill(folder / "killed", args, draw)
        if kill is None:
            print(f"the run ended after {len(kills)} kills; give more --rounds")
            break
        kills.append(kill)
        print(f"kill {len(kills)}: {kill}", file=sys.stderr, flush=True)
    finish(folder / "killed", args, draw.choice(args.ranks))
    on_one_rank = args.rank_groups or args.buffered or len({*args.ranks}) > 1
    finish(folder / "whole", args, 1 if on_one_rank else args.ranks[0])
    different = compare(read_result(folder / "killed"), read_result(folder / "whole"))
    print(summary(kills, different, args))
    return int(bool(different) or any(kill.orphans for kill in kills))


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="each start draws one of these numbers")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--earliest", type=float, default=5.0, help="seconds from a start to a kill, at least")
    parser.add_argument("--latest", type=float, default=15.0, help="and at most; more, where processes start slowly")
    parser.add_argument("--seed", type=int, default=0, help="of times and victims")
    parser.add_argument("--rank-groups", action="store_true", help="let ranks share a client")
    parser.add_argument("--buffered", action="store_true", help="let rounds not wait for slow clients")
    parser.add_argument("--module", help="class path of a LightningModule that trains as the clients")
    parser.add_argument("--folder", help="for the two runs; default: a new temporary one")
    return parser.parse_args()


# -- one run -----------------------------------------------------------------------------------------------------------


@contextmanager
def started(folder: Path, args: argparse.Namespace, ranks: int) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Start or continue the run in ``folder``; yield its first process and its log."""
    folder.mkdir(parents=True, exist_ok=True)
    config, log = folder.with_suffix(".yaml"), folder.with_suffix(".log")
    config.write_text(CONFIG)
    options = ["--config", config, "--run_dir", folder, "--ckpt_path", "last"]
    options += [f"--trainer.devices={ranks}", f"--trainer.max_epochs={args.rounds}"]
    options += (_RANK_GROUP if args.rank_groups else []) + (_BUFFERED if args.buffered else [])
    options += [f"--model.module={args.module}"] if args.module else []
    command = [sys.executable, "-m", "fedsim", "fit", *map(str, options)]
    with log.open("wb") as file, subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True) as process:
        yield process, log


def run_and_kill(folder: Path, args: argparse.Namespace, draw: random.Random) -> Kill | None:
    """Kill one process of a run; return None if the run ended before."""
    before, second = rounds_in_checkpoint(folder), draw.uniform(args.earliest, args.latest)
    ranks = draw.choice(args.ranks) if len(args.ranks) > 1 else args.ranks[0]  # the draws of earlier records stay
    with started(folder, args, ranks) as (process, log):
        time.sleep(second)
        alive = processes_of(process)
        if process.poll() is not None or not alive:
            if process.returncode:
                raise SystemExit(f"the run failed by itself:\n{log.read_text()}")
            return None
        victim = draw.choice(alive)
        os.kill(victim, signal.SIGKILL)
        orphans = await_end(process)
        name = "rank 0" if victim == process.pid else "another rank"
    rounds = [int(number) for number in re.findall(r"^round (\d+)/", log.read_text(), re.MULTILINE)]
    seen = max(rounds, default=before)
    return Kill(ranks, round(second, 1), name, before, seen, rounds_in_checkpoint(folder), orphans)


def await_end(process: subprocess.Popen[bytes]) -> int:
    """Wait until no process of a run is left; return how many had to be killed."""
    deadline = time.monotonic() + _PATIENCE
    while processes_of(process) and time.monotonic() < deadline:
        time.sleep(0.1)
    orphans = processes_of(process)
    for pid in orphans:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(orphans)


def finish(folder: Path, args: argparse.Namespace, ranks: int) -> None:
    """Let a run end."""
    with started(folder, args, ranks) as (process, log):
        if process.wait():
            raise SystemExit(f"the run failed by itself:\n{log.read_text()}")


def processes_of(first: subprocess.Popen[bytes]) -> list[int]:
    """Return the ids of the live processes of a run, in ascending order: those of the session of its first process."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(session) == first.pid and state not in "ZX":
                pids.append(int(entry.name))
    return sorted(pids)


# -- results -----------------------------------------------------------------------------------------------------------


def rounds_in_checkpoint(folder: Path) -> int:
    """Return how many rounds the last checkpoint holds; 0 if there is none."""
    try:
        return int(read_checkpoint(folder / "checkpoints" / "last.ckpt")["epoch"]) + 1
    except DataError:
        return 0


def read_result(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a run's last checkpoint: global vectors and private states."""
    path = folder / "checkpoints" / "last.ckpt"
    checkpoint = read_checkpoint(path)
    states = read_states(path, checkpoint["fedsim"], list(checkpoint["fedsim"]["clients"]))
    private = {f"{client}/{name}": tensor for client, state in states.items() for name, tensor in state.items()}
    return {**checkpoint["state_dict"], **private}


def compare(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Return the names of the tensors that differ in a bit, or exist on one side only."""
    return sorted(name for name in {*a, *b} if name not in a or name not in b or not torch.equal(a[name], b[name]))


def summary(kills: list[Kill], different: list[str], args: argparse.Namespace) -> str:
    """Return a Markdown table."""
    in_start = sum(kill.seen == kill.before for kill in kills)
    ranks = ", ".join(f"{number} in {n} starts" for number, n in sorted(Counter(k.ranks for k in kills).items()))
    rows = [
        ("ranks", f"{ranks}, which share a client" if args.rank_groups else ranks),
        ("rounds", args.rounds),
        ("kills", len(kills)),
        ("of these of rank 0", sum(kill.victim == "rank 0" for kill in kills)),
        ("of these before the first round of a start", in_start),
        ("finished rounds that were lost, all kills together", sum(kill.seen - kill.after for kill in kills)),
        ("processes that outlived the killed one", sum(kill.orphans for kill in kills)),
        ("result equal to the uninterrupted run's", f"no: {', '.join(different)}" if different else "yes, bit for bit"),
    ]
    return tabulate(rows, headers=["", ""], tablefmt="github")


if __name__ == "__main__":
    sys.exit(main())
