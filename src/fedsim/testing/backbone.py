"""``check_backbone``: whether a network can be the backbone of a federation's models."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from fedsim.methods.base import Method
from fedsim.models.groups import BODY
from fedsim.testing.findings import Findings
from fedsim.testing.fingerprint import changed, global_streams, state_of
from fedsim.testing.trials import ROUNDS, Fit, difference

_IMAGES = 5
_TOLERANCE = 1e-4
"""of the largest value: sums of another order round differently"""


class _BodyAverage(Method):
    """Averages backbone and neck, to try a backbone or a loss with."""

    shared_groups = BODY


def plain_method() -> Method:
    """Return a method that averages backbone and neck; ``fedsim list`` does not have it."""
    return _BodyAverage()


def check_backbone(
    backbone: nn.Module, sizes: Sequence[tuple[int, int]] = ((32, 16), (48, 24)), *, fits: bool = True
) -> None:
    """Refuse a network that is not fit for a backbone, with a sentence for each finding.

    It must map images [B, 3, H, W] of all ``sizes`` (height, width) to float32 [B, C, h, w] or [B, C], with the int
    attribute ``out_channels`` = C; have float32 weights that all get a gradient; be a plain function of weights and
    images in evaluation mode; keep nothing but its tensors; and give the same bits in small fits on one rank, on two,
    and after a pause, which ``fits`` = False leaves out. The network itself stays as it is.

    Raises:
        PartRefusedError: an AssertionError with all findings.
    """
    findings = Findings(type(backbone).__name__)
    channels = getattr(backbone, "out_channels", None)
    if not isinstance(backbone, nn.Module):
        findings.add(f"{type(backbone).__name__} is no torch.nn.Module; give an instance of one")
    elif not isinstance(channels, int):
        findings.add("it has no int attribute out_channels; set it to the number of channels of its output")
    findings.settle()
    with findings.trying("copy.deepcopy, by which each architecture gets its own network,"):
        network = copy.deepcopy(backbone)
        _check_tensors(network, findings)
        with torch.random.fork_rng(devices=[]):
            for height, width in sizes:
                _check_output(network, _images(height, width), int(channels or 0), findings)
            _check_evaluation(network, _images(*sizes[0]), findings)
            _check_training(network, _images(*sizes[0]), findings)
    findings.settle()
    if fits:
        with tempfile.TemporaryDirectory(prefix="fedsim-check-") as folder:
            settings = {"backbone": backbone}
            whole = Fit(plain_method(), Path(folder) / "one", settings, size=sizes[0], own_streams=False)
            compare_fits(whole, findings)
    findings.settle()


def _images(height: int, width: int) -> Tensor:
    return torch.randn(_IMAGES, 3, height, width, generator=torch.Generator().manual_seed(0))


def _check_tensors(network: nn.Module, findings: Findings) -> None:
    tensors = [*network.named_parameters(), *network.named_buffers()]
    for name, tensor in tensors:
        if tensor.is_floating_point() and tensor.dtype is not torch.float32:
            findings.add(f"{name} is {tensor.dtype}: models keep float32 weights")
        if not tensor.isfinite().all():
            findings.add(f"{name} holds values that are not finite")
    if not any(parameter.requires_grad for parameter in network.parameters()):
        findings.add("it has no parameter that can be trained")
    hidden = {name for module in network.modules() for name, held in vars(module).items() if isinstance(held, Tensor)}
    for name in sorted(hidden):
        findings.add(
            f"the tensor {name} is a plain attribute: it is neither sent nor saved; make it a parameter or a buffer"
        )


def _check_output(network: nn.Module, images: Tensor, channels: int, findings: Findings) -> None:
    with findings.trying(f"forward of images {list(images.shape)}"), torch.no_grad():
        maps = network.eval()(images)
        if not isinstance(maps, Tensor):
            findings.add(f"forward returns a {type(maps).__name__}, not one tensor")
            return
        if maps.dim() not in (2, 4) or maps.shape[:2] != (len(images), channels):
            findings.add(
                f"forward returns {list(maps.shape)} for images {list(images.shape)}; it must be [B, C, h, w] or "
                f"[B, C] with C = out_channels = {channels}"
            )
        if maps.dtype is not torch.float32:
            findings.add(f"forward returns {maps.dtype}, not torch.float32")
        if not maps.isfinite().all():
            findings.add("forward returns values that are not finite")


def _check_evaluation(network: nn.Module, images: Tensor, findings: Findings) -> None:
    """Check that evaluation is a function of the weights and each image alone, and leaves nothing behind."""
    with findings.trying("forward in evaluation mode"), torch.no_grad():
        network.eval()
        before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
        kept = state_of(network)
        first = network(images)
        torch.rand(1)  # another state of the global stream
        if not torch.equal(first, network(images)):
            findings.add("in evaluation mode, two passes of the same images differ: it draws random numbers, or counts")
        single = torch.cat([network(image[None]) for image in images])
        if (first - single).abs().max() > _TOLERANCE * first.abs().max():
            findings.add("in evaluation mode, the features of an image depend on the other images of the batch")
        after = network.state_dict()
        for name in (name for name, tensor in before.items() if not torch.equal(tensor, after[name])):
            findings.add(f"in evaluation mode, forward changes {name}")
        _note_state(kept, network, findings)


def _check_training(network: nn.Module, images: Tensor, findings: Findings) -> None:
    with findings.trying("forward in training mode"):
        network.train()
        start, kept, streams = copy.deepcopy(network.state_dict()), state_of(network), global_streams()
        outputs = []
        for _ in range(2):
            network.load_state_dict(start)
            torch.manual_seed(1)
            outputs.append(network(images))
        after = global_streams()
        for library in ("numpy", "random"):
            if after[library] != streams[library]:
                findings.add(
                    f"forward draws from the global random stream of {library}, which no run seeds; use torch's"
                )
        if not torch.equal(*outputs):
            findings.add("two passes from the same weights, with the same seed, differ: it keeps something else")
        _note_state(kept, network, findings)
        outputs[-1].square().sum().backward()
        for name, parameter in network.named_parameters():
            if parameter.requires_grad and parameter.grad is None:
                findings.add(f"{name} gets no gradient; remove it, or set requires_grad to False")
        network.zero_grad()


def _note_state(kept: dict[str, str], network: nn.Module, findings: Findings) -> None:
    places = changed(kept, state_of(network))
    tensors = {"self._buffers", "self._parameters", "self._modules"}
    for state_name in (state_name for state_name in places if state_name not in tensors):
        findings.add(f"forward changes {state_name}, which is neither sent nor saved; use a buffer")


def compare_fits(whole: Fit, findings: Findings) -> None:
    """Run small fits on one rank, on two and after a pause, and note whether their bits differ."""
    trials = {"two ranks": replace(whole, folder=whole.folder.parent / "two", ranks=2)}
    findings.add_all(whole.run())
    if findings:
        return
    pause = whole.checkpoint(ROUNDS - 1)
    trials["a pause"] = replace(whole, folder=whole.folder.parent / "resumed", resumed_from=pause)
    for name, fit in trials.items():
        findings.add_all(sentences := fit.run())
        if not sentences and (problem := difference(whole.checkpoint(ROUNDS), fit.checkpoint(ROUNDS))):
            findings.add(f"a fit with {name} comes to other bits than on one rank: {problem}")
