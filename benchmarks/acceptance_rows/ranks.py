"""Rows about several ranks: groups that share a client, two on each of two GPUs, and one that is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

from acceptance_rows.fits import await_checkpoint, compare, finished, options_of, start
from acceptance_rows.terms import Bench, Outcome
from fedsim.federation.scheduling.plan import Task, make_plan

ONE_CLIENT = ("--data.source.init_args.clients=1", "--model.client.micro_batch=4")
MICRO_BATCHES = 4  # of a batch of 16
MOST_RANKS = 4
IN_GROUP = (
    *ONE_CLIENT, "--model.client.local_epochs=1000000",
    "--trainer.callbacks=[{class_path: fedsim.federation.callbacks.RoundProgress, init_args: {line_interval: 0.5}}]",
)  # fmt: skip
"""a round without an end, in which ranks train its only client together; rank 0 writes a line about its batches"""
ENDLESS = ("--trainer.max_epochs=1000000",)
SILENCE = 10
"""seconds without a sign of life, after which a frozen rank is lost"""
LIMIT = 60
"""seconds for all ranks to end after one is lost; the silence counts"""


def several(bench: Bench, most: int) -> int:
    """Return a number of ranks, each with a GPU of its own where there are any."""
    return min(bench.gpus, most) if bench.is_gpu else 3


def groups(bench: Bench) -> Outcome:
    """Run a fit of one client on one rank, and on several that share its batches."""
    ranks = several(bench, MOST_RANKS)
    if not make_plan([Task("town0", 1.0, MICRO_BATCHES)], ranks).rank_groups:
        raise RuntimeError(f"{ranks} ranks would not share the client: the row tries nothing")
    on_one, in_groups = finished(bench, "alone", 1, *ONE_CLIENT), finished(bench, "together", ranks, *ONE_CLIENT)
    return compare(f"1 rank and a group among {ranks}", on_one, in_groups)


def two_on_each_of_two(bench: Bench) -> Outcome:
    """Run the same fit on four ranks of two GPUs."""
    bench.need_gpu("ranks share GPUs, not CPUs")
    four = finished(bench, "two-on-two", 4, "--trainer.strategy.ranks_per_device=2")
    return compare("1 rank, and 2 on each of 2 GPUs", finished(bench, "first"), four)


def killed(bench: Bench) -> Outcome:
    """Kill a rank in the midst of a fit."""
    return lost(bench, signal.SIGKILL)


def frozen(bench: Bench) -> Outcome:
    """Freeze a rank in the midst of a fit."""
    return lost(bench, signal.SIGSTOP)


def killed_in_group(bench: Bench) -> Outcome:
    """Kill a rank that trains a client together with another."""
    return lost(bench, signal.SIGKILL, in_group=True)


def frozen_in_group(bench: Bench) -> Outcome:
    """Freeze a rank that trains a client together with another."""
    return lost(bench, signal.SIGSTOP, in_group=True)


def lost(bench: Bench, signal_: signal.Signals, in_group: bool = False) -> Outcome:
    """Send a signal to rank 1: the others must name it in a line, and no process may stay.

    ``in_group``: within the sums of a rank group; the line then says that rank 1 trained the only client, of which rank
    0 has written that it trains it, too.
    """
    ranks = min(several(bench, 2), 2)
    name = f"lost-{signal_.name}" + "-in-group" * in_group
    log = bench.folder / f"{name}.log"
    more = [*(IN_GROUP if in_group else ENDLESS), f"--trainer.strategy.silence_timeout=0:00:{SILENCE}"]
    process = start([*options_of(bench, name), f"--trainer.devices={ranks}", *more], own_session=True, log=log)
    try:
        if in_group:
            await_batch(log, process)
        else:
            await_checkpoint(bench.folder / name, process)
        victims = [pid for pid in members(process.pid) if pid != process.pid and is_rank(pid)]
        if process.poll() is not None or len(victims) != 1:
            raise RuntimeError(f"the fit has ended, or has {len(victims)} other ranks than rank 0 in place of one")
        os.kill(victims[0], signal_)
        begin = time.monotonic()
        process.wait(timeout=LIMIT)
        while (left := members(process.pid)) and time.monotonic() < begin + LIMIT:
            time.sleep(0.1)
        seconds = time.monotonic() - begin
    finally:
        for pid in members(process.pid):
            os.kill(pid, signal.SIGKILL)
    return judge_end(log.read_text(), process.returncode, left, seconds, in_group)


def judge_end(output: str, code: int, left: list[int], seconds: float, in_group: bool) -> Outcome:
    """Judge how a fit has ended whose rank 1 was lost; ``left``: its processes that have stayed."""
    named = [line for line in output.splitlines() if line.startswith("fedsim: error: rank 1 ")]
    figure = f"code {code}, {len(left)} processes left, {seconds:.0f} s" + f": {named[0]}" * bool(named)
    if in_group and not any("client town0" in line for line in named):
        return Outcome(f"{figure}; it was not training the client", "a loss within a group", holds=False)
    holds = code == 2 and not left and bool(named) and "Traceback" not in output
    return Outcome(figure, f"code 2, 0 left, a line that names rank 1, {LIMIT} s", holds)


def await_batch(log: Path, process: subprocess.Popen[str]) -> None:
    """Wait until rank 0 has trained batches of the only client, or the end of its process."""
    deadline = time.monotonic() + 2 * LIMIT
    while process.poll() is None and "town0 (1/1), batch " not in log.read_text():
        if time.monotonic() > deadline:
            raise RuntimeError(f"rank 0 has trained no batch within {2 * LIMIT} s")
        time.sleep(0.05)


def members(session: int) -> list[int]:
    """Return the processes of a session that live, the oldest first."""
    alive = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, its_session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
        except OSError:  # it has just ended
            continue
        if int(its_session) == session and state not in "ZX":
            alive.append(int(entry.name))
    return sorted(alive)


def is_rank(pid: int) -> bool:
    """Whether a process is a rank: one that waited to become it, or one of Lightning's launcher."""
    line = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    return "become_rank" in line or "\0fit\0" in line
