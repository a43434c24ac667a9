"""``check_backbone``: whether a network can be the backbone of a federation's models."""

from __future__ import annotations

import copy
import inspect
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedsim.core.errors import ConfigError
from fedsim.testing.comparisons import compare, findings_on_a_gpu
from fedsim.testing.findings import Findings
from fedsim.testing.fingerprint import (
    changed,
    global_settings,
    global_streams,
    hashed,
    modes_of,
    moved,
    shape_of,
    state_of,
    unsettle,
)
from fedsim.testing.pythons import REMEDY_OF_HASHES, Question
from fedsim.testing.trials import ROUNDS, BodyAverage, Fit

_IMAGES = 5
_MANY = 72
"""images of a large batch"""
_LARGE = (256, 128)
_STEPS = 3
"""of a training, after which all parameters have moved"""
_TOLERANCE = 1e-4
"""of the largest value: sums of another order round differently"""


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
        ConfigError: if ``sizes`` are no pairs of numbers.
    """
    _check_sizes(sizes)
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
            _check_copies(backbone, _images(*sizes[0]), findings)
            for height, width in sizes:
                _check_output(network, _images(height, width), int(channels or 0), findings)
            check_evaluation(network, network, sizes[0], findings)
            _check_loading(backbone, _images(*sizes[0]), findings)
            _check_training(network, _images(*sizes[0]), findings)
            check_modes(network, network, sizes[0], findings)
            findings.try_elsewhere(lambda: copy.deepcopy(network).to("meta")(_images(*sizes[0]).to("meta")))
    findings.settle()
    if fits:
        check_building(backbone, findings)
        with tempfile.TemporaryDirectory(prefix="fedsim-check-") as folder:
            settings = {"backbone": backbone}
            whole = Fit(BodyAverage(), Path(folder) / "one", settings, size=sizes[0], is_drawn=True)
            compare_fits(whole, findings)
    findings.settle()


def _check_sizes(sizes: Sequence[tuple[int, int]]) -> None:
    pairs = [size for size in sizes if isinstance(size, tuple | list) and len(size) == 2]
    if not pairs or len(pairs) < len(sizes) or not all(isinstance(n, int) and n > 0 for pair in pairs for n in pair):
        raise ConfigError(f"sizes: give a list of (height, width), such as [(32, 16)], not {sizes!r}")


def _images(height: int, width: int, count: int = _IMAGES) -> Tensor:
    return torch.randn(count, 3, height, width, generator=torch.Generator().manual_seed(0))


def _check_tensors(network: nn.Module, findings: Findings) -> None:
    tensors = [*network.named_parameters(), *network.named_buffers()]
    for name, tensor in tensors:
        if tensor.is_floating_point() and tensor.dtype is not torch.float32:
            findings.add(f"{name} is {tensor.dtype}: models keep float32 weights")
        if not tensor.isfinite().all():
            findings.add(f"{name} holds values that are not finite")
    if not any(parameter.requires_grad for parameter in network.parameters()):
        findings.add("it has no parameter that can be trained")
    _check_attributes(network, findings)
    check_layers(network, findings)


def check_layers(network: nn.Module, findings: Findings) -> None:
    """Note layers that are in plain lists or dicts, and so no part of the network."""
    layers = {*network.modules()}
    for _, name, inner in _attributes(network):
        if isinstance(inner, nn.Module) and inner not in layers and inner.state_dict():
            findings.add(
                f"{name} has layers in a plain list or dict: they are neither trained, sent nor saved; use "
                "nn.ModuleList or nn.ModuleDict"
            )


def _check_attributes(network: nn.Module, findings: Findings) -> None:
    """Note tensors that are plain attributes; in lists and dicts those with gradients, as constants may lie there."""
    registered = {id(tensor) for tensor in (*network.parameters(), *network.buffers())}
    for layer, name, inner in _attributes(network):
        is_hidden = isinstance(inner, Tensor) and id(inner) not in registered
        if is_hidden and (inner.requires_grad or vars(layer)[name] is inner):
            findings.add(
                f"the tensor {name} is a plain attribute: it is neither sent nor saved; make it a parameter or a buffer"
            )


def _attributes(network: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """Yield layers, attributes, and the objects that they hold beside a layer's parts, also in lists and dicts."""
    for layer in network.modules():
        for name, held in vars(layer).items():
            if name not in _OF_MODULES:
                yield from ((layer, name, inner) for inner in _inner(held))


_OF_MODULES = {"_parameters", "_buffers", "_modules", "_hparams", "_hparams_initial"}  # the last two are of Lightning


def _inner(held: Any) -> Iterator[Any]:
    """Yield an object, or those that a list, tuple or dict has, at any depth."""
    if isinstance(held, list | tuple | dict):
        for inner in held.values() if isinstance(held, dict) else held:
            yield from _inner(inner)
    else:
        yield held


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


def check_evaluation(
    network: nn.Module, features_of: Callable[[Tensor], Tensor], size: tuple[int, int], findings: Findings
) -> None:
    """Check that evaluation is a function of the weights and each image alone, and leaves nothing behind."""
    images = _images(*size)
    with findings.trying("forward in evaluation mode"), torch.no_grad(), _leaving(network, images, findings):
        network.eval()
        before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
        first = features_of(images)
        torch.rand(1)  # another state of the global stream
        if not torch.equal(first, features_of(images)):
            findings.add("in evaluation mode, two passes of the same images differ: it draws random numbers, or counts")
        single = torch.cat([features_of(image[None]) for image in images])
        many = features_of(torch.cat([images, _images(*size, count=_MANY)]))[: len(images)]
        if not _is_close(first, single) or not _is_close(first, many):
            findings.add("in evaluation mode, the features of an image depend on the other images of the batch")
        for name, colour in (("black", 0.0), ("bright", 20.0)):
            if not features_of(torch.full_like(images, colour)).isfinite().all():
                findings.add(f"in evaluation mode, the features of {name} images are not finite")
        after = network.state_dict()
        for name in (name for name, tensor in before.items() if not torch.equal(tensor, after[name])):
            findings.add(f"in evaluation mode, forward changes {name}")


def _check_copies(backbone: nn.Module, images: Tensor, findings: Findings) -> None:
    """Check that copies of a network are equal: nothing is made, or drawn, in the first pass."""
    outputs = []
    for seed in (1, 2):
        network = copy.deepcopy(backbone)
        with findings.trying("a first forward"), torch.no_grad():
            shape = shape_of(network)
            torch.manual_seed(seed)
            outputs.append(network.eval()(images))
            for place in changed(shape, shape_of(network)):
                findings.add(f"forward changes {place}: build the network in __init__")
    if len(outputs) == 2 and isinstance(outputs[0], Tensor) and not torch.equal(*outputs):
        findings.add("first passes of two copies differ in evaluation mode: it draws random numbers, and keeps them")


def _check_loading(backbone: nn.Module, images: Tensor, findings: Findings) -> None:
    """Check that a network which has been evaluated takes other weights, as each round gives it."""
    used, fresh = copy.deepcopy(backbone).eval(), copy.deepcopy(backbone).eval()
    with findings.trying("forward with other weights"), torch.no_grad():
        used(images)
        values = {name: t * 1.1 if t.is_floating_point() else t for name, t in fresh.state_dict().items()}
        features = []
        for network in (used, fresh):
            for name, tensor in network.state_dict().items():
                tensor.copy_(values[name])
            torch.manual_seed(0)  # another check is about random numbers
            features.append(network(images))
        if not torch.equal(*features):
            findings.add(
                "in evaluation mode, it keeps what it computed from earlier weights: each round brings others; compute "
                "it anew"
            )


def _is_close(features: Tensor, expected: Tensor) -> bool:
    return bool((features - expected).abs().max() <= _TOLERANCE * features.abs().max())


@contextmanager
def _leaving(network: nn.Module, images: Tensor, findings: Findings) -> Iterator[None]:
    """Note if the block changes the images, the network beside its tensors, or settings of the process."""
    before, kept, settings = images.clone(), state_of(network), global_settings()
    shape = shape_of(network)
    yield
    if not torch.equal(before, images):
        findings.add("forward changes the images that it gets in place: copy them first")
    for place in moved(settings, global_settings()):
        findings.add(f"forward changes {place}, which all parts of a run share")
    for place in changed(shape, shape_of(network)):
        findings.add(f"forward changes {place}: build the network in __init__")
    checked_elsewhere = {"self._buffers", "self._parameters", "self._modules", "self.training"}
    for name in (name for name in changed(kept, state_of(network)) if name not in checked_elsewhere):
        findings.add(f"forward changes {name}, which is neither sent nor saved; use a buffer")


def _check_training(network: nn.Module, images: Tensor, findings: Findings) -> None:
    with findings.trying("forward in training mode"), _leaving(network, images, findings):
        network.train()
        start, streams, modes = copy.deepcopy(network.state_dict()), global_streams(), modes_of(network)
        outputs, ends = [], []
        for seed in (1, 1, 2):
            network.load_state_dict(start)
            torch.manual_seed(seed)
            outputs.append(network(images))
            ends.append(global_streams())
        for library in (name for name in ("numpy", "random") if ends[-1][name] != streams[name]):
            findings.add(f"forward draws from the global random stream of {library}, which no run seeds; use torch's")
        if ends[1]["torch"] == ends[2]["torch"]:
            findings.add("forward seeds torch's global random stream, from which others draw, too")
        if not torch.equal(*outputs[:2]):
            findings.add("two passes from the same weights, with the same seed, differ: it keeps something else")
        for place in changed(modes, modes_of(network)):
            findings.add(f"forward changes {place}: sessions and evaluations set it")
        _check_counters(network, start, findings)
        _check_gradients(network, outputs[-1], findings)
        black = network(torch.zeros_like(images))
        _check_gradients(network, black, findings, " for black images")
        _check_training_of_all(network, images, findings)
        network.load_state_dict(start)


def _check_counters(network: nn.Module, start: Mapping[str, Tensor], findings: Findings) -> None:
    """Note buffers that count: only float32 ones last."""
    norms = [(name, layer) for name, layer in network.named_modules() if isinstance(layer, _BATCH_NORMS)]
    idle = {f"{name}.num_batches_tracked".strip(".") for name, layer in norms if layer.momentum is not None}
    for name, tensor in network.state_dict().items():
        if not tensor.is_floating_point() and name not in idle and not torch.equal(tensor, start[name]):
            findings.add(f"forward changes the buffer {name}, {tensor.dtype}: only float32 is sent and saved")


def _check_gradients(network: nn.Module, output: Tensor, findings: Findings, images: str = "") -> None:
    network.zero_grad()
    output.square().sum().backward()
    for name, parameter in network.named_parameters():
        if parameter.requires_grad and parameter.grad is None:
            findings.add(f"{name} gets no gradient; remove it, or set requires_grad to False")
        elif parameter.grad is not None and not parameter.grad.isfinite().all():
            findings.add(f"the gradient of {name} is not finite{images}")
    network.zero_grad()


def _check_training_of_all(network: nn.Module, images: Tensor, findings: Findings) -> None:
    """Note parameters whose gradient is 0 in each of some steps; that of a branch which begins at 0 is so in one.

    A softmax over the single place of a small map has no gradient, so larger images are tried as well.
    """
    still = _still(network, images)
    with suppress(Exception):  # it may take images of one size only
        still = still and still & _still(network, _images(*_LARGE, count=2))
    for name in sorted(still):
        findings.add(f"the gradient of {name} is 0 in each of {_STEPS} steps: it never trains")


def _still(network: nn.Module, images: Tensor) -> set[str]:
    """Return the parameters whose gradient is 0 in each of some steps."""
    still = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    for _ in range(_STEPS):
        optimizer.zero_grad()
        output = network(images)
        (output * torch.randn_like(output)).mean().backward()
        still -= {name for name, p in network.named_parameters() if p.grad is not None and bool(p.grad.any())}
        optimizer.step()
    return still


def check_modes(
    network: nn.Module, features_of: Callable[[Tensor], Tensor], size: tuple[int, int], findings: Findings
) -> None:
    """Check that training computes the function of evaluation, but for random layers and statistics of batches.

    Layers of torch are in evaluation mode both times. If training then draws nothing, and does not look at the other
    images of the batch, it must give the features of evaluation. Some layers cannot train on one image: each is there
    twice.
    """
    images = _images(*size)
    with findings.trying("forward in training mode"), torch.no_grad():
        start = copy.deepcopy(network.state_dict())
        network.eval()
        expected = features_of(images)
        for layer in network.modules():
            layer.training = not type(layer).__module__.startswith("torch.") and not isinstance(layer, _OF_TORCH)
        torch.manual_seed(1)
        features = features_of(images)
        torch.manual_seed(2)
        is_plain = _is_close(features, features_of(images))
        is_plain = is_plain and _is_close(
            features, torch.cat([features_of(torch.stack([image, image]))[:1] for image in images])
        )
        if is_plain and (features.shape != expected.shape or not _is_close(expected, features)):
            findings.add("in evaluation mode, it computes another function than in training")
        network.load_state_dict(start)


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_OF_TORCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.Dropout, nn.Dropout2d)  # and what derives from them


def check_building(backbone: nn.Module, findings: Findings) -> None:
    """Build a network of this class in several Pythons, where its arguments are known, and compare the tensors."""
    if (arguments := _arguments(backbone)) is None:
        return
    try:
        with torch.random.fork_rng(devices=[]):
            expected = _built(type(backbone), arguments)
    except Exception:  # its attributes are not its arguments
        return
    for tensors in Question(_built, type(backbone), arguments, hashes=(0, 1)).answers("building it again", findings):
        if [*tensors] != [*expected]:
            findings.add(f"built again, its tensors come in another order: {REMEDY_OF_HASHES}")
        elif tensors != expected:
            name = next(name for name in expected if tensors[name] != expected[name])
            findings.add(
                f"built again with the same seed, {name} begins with other values, so ranks would not agree; draw from "
                f"torch's global stream alone, in a fixed order ({REMEDY_OF_HASHES})"
            )


def _arguments(backbone: nn.Module) -> dict[str, Any] | None:
    """Return arguments for another network of this class: attributes of these names, or defaults; None: not known."""
    parameters = inspect.signature(type(backbone)).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    arguments = {p.name: getattr(backbone, p.name, p.default) for p in named}
    are_known = all(p.kind is not p.POSITIONAL_ONLY and arguments[p.name] is not p.empty for p in named)
    return arguments if are_known else None


def _built(network_class: type[nn.Module], arguments: dict[str, Any]) -> dict[str, str]:
    """Build a network; return name -> hash of each tensor, in their order."""
    unsettle(0)
    return {name: hashed(tensor) for name, tensor in network_class(**arguments).state_dict().items()}


def compare_fits(whole: Fit, findings: Findings) -> None:
    """Run small fits on one rank, on two and after a pause, note whether their bits differ, and try a GPU."""
    findings.add_all(whole.run())
    if findings:
        return
    folder, rehashed = whole.folder.parent, replace(whole, has_other_hashes=True)
    trials = {
        "two ranks": replace(rehashed, folder=folder / "two", ranks=2),
        "a pause": replace(rehashed, folder=folder / "resumed", resumed_from=whole.checkpoint(ROUNDS - 1)),
    }
    for name, fit in trials.items():
        problem = f"a fit with {name} comes to other bits than on one rank: {{difference}}"
        findings.add_all(compare(whole, fit, problem))
    findings.add_all(findings_on_a_gpu(whole))
