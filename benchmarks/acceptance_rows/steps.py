"""Rows about steps that have equal bits: as graphs, after a recording that fails, with copies ahead."""

from __future__ import annotations

from pathlib import Path

import torch

from acceptance_rows.fits import compare, finished, importing, log_of
from acceptance_rows.terms import Bench, NotHereError, Outcome
from fedsim.federation.checks.requirements import TORCH_FOR_GRAPHS

GRAPH = "--model.client.graph=true"
WAITING = """
from fedsim.methods import FedPav


class Waiting(FedPav):
    def take_step(self, client, loss):
        loss.item()
        super().take_step(client, loss)
"""
"""A method whose step cannot be recorded, because the host waits in it."""


def graph_bits(bench: Bench) -> Outcome:
    """Run the same fit with steps as graphs; it fails, too, if fedsim gave up recording."""
    need_graphs(bench)
    outcome = compare("plain steps and graphs", finished(bench, "first"), finished(bench, "graph", 1, GRAPH))
    lines = remarks(bench.folder / "graph")
    figure = f"{outcome.figure}; " + (lines[0] if lines else "recorded")
    return Outcome(figure, "0, and recorded", outcome.holds and not lines)


def graph_fails(bench: Bench) -> Outcome:
    """Run a method that waits in its step, with graphs: one line says so, and the bits are those of plain steps."""
    need_graphs(bench)
    outcome = compare(
        "plain steps, and those after a recording that fails",
        with_waits(bench, "waiting"), with_waits(bench, "waiting-graph", GRAPH),
    )  # fmt: skip
    lines = remarks(bench.folder / "waiting-graph")
    return Outcome(f"{outcome.figure}; {len(lines)} line(s) about it", "0, 1 line", outcome.holds and len(lines) == 1)


def with_waits(bench: Bench, name: str, *more: str) -> Path:
    """Return the directory of a run whose steps wait, by a method that the command imports from the bench's folder."""
    (bench.folder / "waiting.py").write_text(WAITING)
    return finished(bench, name, 1, "--model.method=waiting.Waiting", *more, environ=importing(bench.folder))


def prefetch(bench: Bench) -> Outcome:
    """Run the same fit with images in the host's memory, with and without copies ahead."""
    bench.need_gpu("images are copied to it")
    host = "--data.cache=host"
    ahead = finished(bench, "prefetch", 1, host, "--model.client.prefetch=true")
    return compare("with and without copies ahead", finished(bench, "host", 1, host), ahead)


def need_graphs(bench: Bench) -> None:
    """Leave the row where graphs are refused."""
    bench.need_gpu("a CUDA graph")
    if torch.__version__ < TORCH_FOR_GRAPHS:
        raise NotHereError(f"needs torch {TORCH_FOR_GRAPHS}: before, graphs are refused")


def remarks(folder: Path) -> list[str]:
    """Return a run's lines about steps that stay plain."""
    return [line for line in log_of(folder) if "stay plain" in line]
