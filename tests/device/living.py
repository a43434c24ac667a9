"""The bytes of tensors that live on a simulated GPU in a fit, and those that ``fedsim describe`` counts."""

import gc
from unittest import mock

import torch

import simulated
from fedsim.federation.events import RoundCallback
from fedsim.federation.memory import device_memory, placement_of
from fedsim.training.optimizer import LocalOptimizer
from runs import fit

LARGE = "--model.backbone.init_args.width=96"  # beside which labels and indices are nothing


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
