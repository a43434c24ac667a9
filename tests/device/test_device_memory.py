"""The memory that ``fedsim describe`` prints is that of the tensors which live on a simulated GPU, within 10 %."""

import csv
import gc
from unittest import mock

import pytest
import torch

import simulated
from fedsim.federation.events import RoundCallback
from fedsim.federation.memory import device_memory, placement_of
from fedsim.training.optimizer import LocalOptimizer
from runs import fit

ADAM = "--model.client.optimizer=torch.optim.Adam"
LARGE = "--model.backbone.init_args.width=96"  # beside which labels and indices are nothing
THREE = "--data.source.init_args.clients=3"
FITS = {
    "totals, momentum": ["fedavg"],
    "no moments": ["fedavg", "--model.client.optimizer=torch.optim.SGD", "--model.client.optimizer.init_args.lr=0.01"],
    "server's moments, two moments": ["fedadam", ADAM],
    "kept moments": ["local", ADAM],
    "extras, controls": ["scaffold"],
    "frozen models": ["moon"],
    "a second model that trains": ["ska"],
    "personal models": ["ditto"],
    "a mixture of two models": ["apfl"],
    "weights beside perturbed ones": ["fedsam"],
    "tensors beside models": ["dacs", "--model.method.init_args.first_styled_round=0"],
    "masks": ["subfedavg"],
    "a table of styles, and restyled images": ["stylebank"],
    "texts and their tower": ["text_anchors"],
    "a guide beside norms that stay": ["gperxan", "--model.backbone.init_args.norm=xan"],
    "a model that the server trains": ["fedavg", "--model.aggregation=FLTrust", "--data.public=town2", THREE],
    "uploads for a rule": ["fedavg", "--model.aggregation=Median"],
    "a memory of people": ["sscu"],
    "states on the host": ["moon", "--model.client_store=host", "--data.cache=host"],
    "micro-batches": ["fedavg", "--model.client.micro_batch=4"],
}


class Counted(RoundCallback):
    """The bytes of tensors on the GPU: between batches, when a backward pass begins, before an optimizer steps."""

    def __init__(self):
        gc.collect()
        self.start = torch.cuda.memory_allocated()
        self.between = self.step = self.backward = 0

    def bytes(self):
        return torch.cuda.memory_allocated() - self.start

    def on_client_batch(self, report):
        self.between = max(self.between, self.bytes())

    def on_round_trained(self, trainer, pl_module):
        settings, parts = pl_module.settings, pl_module.parts
        placement = placement_of(settings, parts, trainer.world_size, 1)
        with torch.autocast("cuda", enabled=False):
            self.described = device_memory(settings, parts, trainer.datamodule, placement, str(trainer.precision))


def counted(folder, *options, **trainer):
    """Fit two rounds, and count."""
    step = LocalOptimizer.step
    with simulated.cuda(1):
        seen, backward = Counted(), torch.autograd._engine_run_backward

        def stepping(self):
            seen.step = max(seen.step, seen.bytes())
            step(self)

        def going_back(*args, **more):
            seen.backward = max(seen.backward, seen.bytes())
            return backward(*args, **more)

        watched = mock.patch.object(LocalOptimizer, "step", stepping)
        with watched, mock.patch.object(torch.autograd, "_engine_run_backward", going_back):
            fit(folder, *options, LARGE, gpus=1, scored=False, callbacks=[seen], **trainer)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("name", FITS)
def test_what_lives_beside_a_batch(name, tmp_path):
    seen = counted(tmp_path / "run", *FITS[name])
    described = seen.described.tensors - seen.described.activations
    assert described == pytest.approx(seen.step, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_what_a_batch_keeps_for_its_backward_pass(precision, tmp_path):
    seen = counted(tmp_path / "run", "fedavg", precision=precision)
    assert seen.described.activations == pytest.approx(seen.backward - seen.between, rel=0.1)


@pytest.mark.slow
def test_each_round_logs_the_peak_of_its_gpu(tmp_path):
    seen = counted(tmp_path / "run", "fedavg")
    with (tmp_path / "run" / "metrics.csv").open() as file:
        peaks = [float(row["memory/peak_gib"]) * 2**30 for row in csv.DictReader(file) if row["memory/peak_gib"]]
    assert len(peaks) == 2
    assert max(peaks) == pytest.approx(seen.start + max(seen.step, seen.backward), rel=0.1)
