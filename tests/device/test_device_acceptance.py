"""Rows of ``make acceptance`` in small sizes on simulated GPUs: they pass, and each of them can fail."""

import functools
import importlib
import logging
import os
import sys
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import get_args, get_type_hints
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import simulated
from budgets import kernels_of_a_step
from failing import run_on_ranks
from fedsim.__main__ import main
from fedsim.core.allocator import GraphMemory
from fedsim.federation.components.attacks import Attack
from fedsim.federation.components.robust import Aggregation
from fedsim.federation.components.timing import Timing
from fedsim.functional.memory import update_memory
from fedsim.methods import FedAvg, FedSAM
from fedsim.models import SmallCNN, StyleLayers
from fedsim.training.features import extract_features
from fedsim.training.flat_model import FlatModel
from fedsim.training.settings import LocalTraining
from kinds import kinds_of
from runs import HAS_GRAPHS
from simulated.collectives import Collectives

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not HAS_GRAPHS, reason="graphs are refused")]
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def without_passes(memory, features, labels, momentum, most):
    """A memory that takes one image after another."""
    return update_memory(memory, features, labels, momentum)


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """A machine with a simulated GPU, whose rows run in this process."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    fits = importlib.import_module("acceptance_rows.fits")
    if dist.is_initialized():  # by an earlier test
        dist.destroy_process_group()
    monkeypatch.setattr(fits, "run", in_this_process)
    with simulated.cuda(1):
        yield importlib.import_module("acceptance").make_bench(tmp_path, reduced=True)
    sys.modules.pop("waiting", None)
    if dist.is_initialized():
        dist.destroy_process_group()


def in_this_process(words, environ=None):
    """Run a command; return its messages. It finds the modules that a process with this environment would find."""
    log, written = logging.getLogger("fedsim"), StringIO()
    handler = logging.StreamHandler(written)
    log.addHandler(handler)
    path = (environ or {}).get("PYTHONPATH", "").split(os.pathsep)
    try:
        with mock.patch.object(sys, "path", [*filter(None, path), *sys.path]):
            assert main([*words, "--trainer.precision=32-true"]) == 0
    finally:
        log.removeHandler(handler)
        if dist.is_initialized():  # a process of its own would end
            dist.destroy_process_group()
    return written.getvalue()


def judged(bench, name):
    acceptance = importlib.import_module("acceptance")
    return acceptance.judge(next(row for row in acceptance.ROWS if row.name == name), bench)


def test_graphs_are_compared_with_plain_steps(bench):
    result = judged(bench, "graph-bits")
    assert (result.verdict, result.figure.endswith("recorded")) == ("pass", True), result


def test_steps_that_stay_plain_fail_the_row_though_the_bits_are_equal(bench, monkeypatch):
    def refuse(memory, generators, work):
        raise RuntimeError("no graphs today")

    monkeypatch.setattr(GraphMemory, "capture", refuse)
    result = judged(bench, "graph-bits")
    assert result.verdict == "fail"
    assert ": 0 of " in result.figure
    assert result.figure.endswith("stay plain: no graphs today")


def test_a_recording_that_fails(bench):
    result = judged(bench, "graph-fails")
    assert result.verdict == "pass", result


def test_a_recording_that_fails_without_a_line_fails_the_row(bench, monkeypatch):
    monkeypatch.setattr("fedsim.training.graphs.log.warning", lambda *_: None)
    assert judged(bench, "graph-fails").verdict == "fail"


def test_copies_ahead(bench):
    assert judged(bench, "prefetch").verdict == "pass"


def test_nccl_on_a_single_rank(bench, monkeypatch):
    backends, by_nccl, opened, problems = [], [], Collectives.opened, Collectives.problems

    def note(collectives, group, backend):
        backends.append(backend)
        opened(collectives, group, backend)

    def note_call(collectives, name, args, tensors):
        by_nccl.extend([name] * (backends[-1] == "nccl"))
        return problems(collectives, name, args, tensors)

    monkeypatch.setattr(Collectives, "opened", note)
    monkeypatch.setattr(Collectives, "problems", note_call)
    result = judged(bench, "nccl-alone")
    assert result.verdict == "pass", result
    assert (backends[0], backends[-1], "gloo" in backends) == ("nccl", "nccl", True), "the fit, the other, the trial"
    assert {"allreduce", "broadcast"} <= {name.removeprefix("c10d::").strip("_") for name in by_nccl}


def test_nccl_that_sums_wrongly_fails_its_row(bench, monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, *args, **options: tensor.add_(1))
    result = judged(bench, "nccl-alone")
    assert result.verdict == "fail"
    assert "wrong sum" in result.figure


@pytest.mark.parametrize("name", ["components", "formats", "host-store", "own-module"])
def test_rows_of_components(bench, name):
    result = judged(bench, name)
    assert result.verdict == "pass", result


def test_the_components_are_all_that_there_are(bench):
    combined = importlib.import_module("acceptance_rows.components").COMBINED
    words = [word for options in combined.values() for word in options]
    names = kinds_of(Attack) | kinds_of(Aggregation) | kinds_of(Timing)
    chosen = {word.partition("=")[2] for word in words}
    assert names - chosen == {"UploadAttack", "Synchronous"}
    kinds = get_args(get_type_hints(StyleLayers)["kind"])
    assert {kind for kind in kinds if not any(f"kind: {kind}" in word for word in words)} == {"none"}


def test_states_that_the_host_s_memory_changes_fail_the_row(bench, monkeypatch):
    monkeypatch.setattr("fedsim.core.store.locked_like", lambda tensor, setting: _Deaf(torch.zeros_like(tensor)))
    assert judged(bench, "host-store").verdict == "fail"


class _Deaf(torch.Tensor):
    """Ignores what is copied to it."""

    def copy_(self, other, non_blocking=False):
        return self


@pytest.mark.parametrize(("memory", "verdict"), [(update_memory, "pass"), (without_passes, "fail")])
def test_launches_by_method(bench, monkeypatch, memory, verdict):
    training = importlib.import_module("acceptance_rows.training")

    def counted(bench, method=None):
        client = LocalTraining(batch_size=32, optimizer=partial(torch.optim.SGD, lr=1e-3, momentum=0.9))
        with simulated.cuda(1) as gpu:
            launched = kernels_of_a_step(gpu, method or FedAvg(), backbone=SmallCNN(width=8), client=client)
        return {training.LAUNCHES[0]: launched}

    monkeypatch.setattr(training, "per_step", counted)
    monkeypatch.setattr("fedsim.methods.sscu.update_memory", memory)
    result = judged(bench, "methods")
    assert result.verdict == verdict, result


@pytest.mark.parametrize("copies", [1, 0])
def test_copies_of_weights_are_in_the_memory_of_fedsam(bench, monkeypatch, copies):
    monkeypatch.setattr(FedSAM, "session_copies", copies)
    training = importlib.import_module("acceptance_rows.training")
    monkeypatch.setattr(training.Work, "backbone", lambda work: SmallCNN(width=96))
    outcome = training.copied_weights(bench)
    assert outcome.holds == bool(copies), outcome


def test_what_is_not_tried_is_said_first(bench):
    acceptance = importlib.import_module("acceptance")
    one, two = (acceptance.not_tried(acceptance.ROWS, gpus) for gpus in (1, 2))
    assert two.startswith("Not tried at all: ")
    assert one.startswith(two)
    assert "killed-in-group" in one
    assert judged(bench, "ranks").figure == "needs 2 GPUs"


def test_a_component_without_a_deterministic_form_fails_its_row(bench, monkeypatch):
    components = importlib.import_module("acceptance_rows.components")
    name = "Backdoor, GeometricMedian, SNR"
    monkeypatch.setattr(components, "COMBINED", {name: components.COMBINED[name]})

    def largest(values, groups, count):
        lowest = values.new_full((len(values), count), -torch.inf)
        return lowest.scatter_reduce(1, groups.expand(len(values), -1), values, "amax")

    monkeypatch.setattr("fedsim.evaluation.triggered._largest", largest)
    result = judged(bench, "components")
    assert result.verdict == "fail"
    assert "deterministic" in result.figure


def test_maps_that_lose_their_order_fail_the_row(bench, monkeypatch):
    monkeypatch.setattr("fedsim.models.style.in_order_of", lambda x, like: x)
    result = judged(bench, "formats")
    assert (result.verdict, result.figure.endswith("of 20 with snr")) == ("fail", True), result


def test_a_stream_that_nothing_seeds_fails_the_row_of_own_modules(bench, monkeypatch):
    for place in ("client", "own_module.inner_trainer"):
        monkeypatch.setattr(f"fedsim.training.{place}.seed_global_stream", lambda seed: None)
    result = judged(bench, "own-module")
    assert result.verdict == "fail", result


def test_a_process_on_two_gpus_fails_its_row(bench):
    judge = importlib.import_module("acceptance_rows.components").judge_processes
    assert judge("11, GPU-a\n12, GPU-b\n").holds
    outcome = judge("11, GPU-a\n12, GPU-b\n12, GPU-a\n")
    assert (outcome.holds, outcome.figure) == (False, "1 of 2 processes are on several GPUs")


def test_speed_with_graphs_is_not_that_of_plain_steps(bench, monkeypatch):
    assert judged(bench, "graph-32").verdict == "not here"
    take_step = FedAvg.take_step

    def waiting(method, client, loss):
        loss.item()
        take_step(method, client, loss)

    monkeypatch.setattr(FedAvg, "take_step", waiting)
    result = judged(bench, "graph-32")
    assert (result.verdict, result.figure) == ("fail", "RuntimeError: recording failed, and steps stayed plain")


@pytest.mark.parametrize(("name", "verdict"), [
    ("channels-32", "not here"), ("many", "not here"), ("memory", "not here"), ("memory-fedsam", "not here"),
    ("reciprocal", "pass"),
    ("faiss", "pass"), ("robust", "not here"),
])  # fmt: skip
def test_rows_in_small_sizes(bench, name, verdict):
    result = judged(bench, name)
    assert result.verdict == verdict, result
    assert verdict == "pass" or result.figure.endswith("(small sizes)"), "it was left before its end"


def test_images_in_the_usual_order_fail_the_row_of_the_other_one(bench, monkeypatch):
    monkeypatch.setattr(FlatModel, "prepare", lambda model, settings: None)
    result = judged(bench, "channels-32")
    assert (result.verdict, "in the usual order" in result.figure) == ("fail", True), result


def on_ranks(words, gpus, folder):
    """What each rank does: its part of a command."""
    with simulated.cuda(gpus, board=folder / "board"):
        assert main([*words, "--trainer.precision=32-true"]) == 0


@pytest.mark.dist
@pytest.mark.parametrize(("name", "gpus", "ranks"), [("shared", 1, 2), ("shared-2x2", 2, 4), ("groups", 2, 2)])
def test_rows_of_several_ranks(bench, monkeypatch, name, gpus, ranks):
    started = []

    def run(words, environ=None):
        [devices] = [word for word in words if word.startswith("--trainer.devices=")]
        if devices.endswith("=1"):
            return in_this_process(words, environ)
        folder = bench.folder / "ranks"
        folder.mkdir()
        started.append(int(devices.partition("=")[2]))
        run_on_ranks(functools.partial(on_ranks, words, gpus), folder, ranks=started[-1])
        return ""

    monkeypatch.setattr(importlib.import_module("acceptance_rows.fits"), "run", run)
    result = judged(replace(bench, gpus=gpus), name)
    assert (result.verdict, started) == ("pass", [ranks]), result


@pytest.mark.parametrize("off", [0.0, 1.0])
def test_an_evaluation_s_features_are_those_by_hand(bench, monkeypatch, off):
    training = importlib.import_module("acceptance_rows.training")
    monkeypatch.setattr(training, "extract_features", lambda *args: extract_features(*args) + off)
    monkeypatch.setattr(type(bench), "median_ms", lambda self, function, repeats: 1.0)
    assert training.evaluation(bench).holds == (off == 0.0)


def test_more_launches_than_by_hand_fail_the_row(bench, monkeypatch):
    training = importlib.import_module("acceptance_rows.training")
    monkeypatch.setattr(training, "per_step", lambda bench: {training.LAUNCHES[0]: 10.0})
    bench_on_cpu = training.Bench(torch.device("cpu"), 0, bench.folder, reduced=True)
    assert training.kernels(bench_on_cpu).holds, "none are counted by these names"
    monkeypatch.setattr(training, "per_step", lambda bench: {"aten::convolution": 1e6})
    assert not training.kernels(bench_on_cpu).holds
