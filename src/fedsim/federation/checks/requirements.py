"""Checks that settings and data fit together: each refuses with one line."""

from __future__ import annotations

import itertools
import logging
import math
import os
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.util import find_spec

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from fedsim.core.checks import known
from fedsim.core.errors import ConfigError
from fedsim.data.datamodule import FederatedDataModule
from fedsim.data.federated import ClientData, FederatedData
from fedsim.evaluation.summary import MAX_NAMES
from fedsim.federation.aggregation.gathered import check_statistics_of_uploads
from fedsim.federation.components.hardware import Hardware
from fedsim.methods.base import Method
from fedsim.models.diversify import DiversifiedNorm2d
from fedsim.models.groups import Group
from fedsim.strategy.strategy import FederatedStrategy
from fedsim.training.flat_model import FlatModel
from fedsim.training.graphs import why_plain
from fedsim.training.metric_loss import MetricLoss
from fedsim.training.objective import Objective
from fedsim.training.settings import ClientOverride, LocalTraining
from fedsim.training.statistics import StatisticsPolicy

log = logging.getLogger(__name__)

TORCH_FOR_GRAPHS = "2.14"
"""the oldest torch that goes on after a capture that fails. Before, the allocator stays in it, and up to 2.11 random
streams do, too, so that the next dropout raises an error"""


def check_settings(
    federated: FederatedData,
    overrides: Mapping[str, ClientOverride],
    bn_stats: StatisticsPolicy,
    method: Method,
    hardware: Hardware | None,
) -> None:
    """Raise ConfigError if settings need data that are missing."""
    names, configured = [c.name for c in federated.clients], f"{type(method).__name__}, as it is configured"
    known("model.clients", overrides, names)
    known("model.hardware.clients", hardware.clients if hardware else (), names)
    _check_identities(federated, method)
    if "common_classes" in method.requires:
        _check_common_classes(federated, configured)
    if "held_out" in method.requires and (without := [c.name for c in federated.clients if c.val is None]):
        raise ConfigError(
            f"model.method: {configured}, needs held-out images, and client {without[0]} has none; set data.val to "
            "identities"
        )
    if bn_stats == "recalibrate" and federated.public is None:
        raise ConfigError("model.bn_stats: recalibrate needs public images; set data.public to an unseen data set")
    if "public_images" in method.requires and federated.public is None:
        raise ConfigError(f"model.method: {configured}, needs public images; set data.public to an unseen data set")
    if "uploads" in method.requires:
        check_statistics_of_uploads(bn_stats, f"model.method: {type(method).__name__}")
    if "speeds" in method.requires:
        if hardware is None:
            raise ConfigError(f"model.hardware: {configured}, weighs by images_per_second; set it")
        if endless := [client for client in names if hardware.speed(client) == math.inf]:
            raise ConfigError(
                f"model.hardware.images_per_second: client {endless[0]}'s is infinite, and {configured}, weighs by it; "
                "give a number"
            )


def warn_of_unused_images(federated: FederatedData, bn_stats: StatisticsPolicy, method: Method) -> None:
    """Warn of public images that nothing uses, on a server that does not train; a user's method may."""
    is_used = bn_stats == "recalibrate" or "public_images" in method.requires
    if federated.public is not None and not is_used and type(method).__module__.startswith("fedsim."):
        log.warning(
            "data.public: no setting uses the images of %s, and it is neither a client nor a test set; leave it out",
            federated.public_name,
        )


def check_own_module(method: Method, task: str, has_ladder: bool) -> None:
    """Raise ConfigError if a part of the federation needs fedsim's own model, where clients have a user's module."""
    name = type(method).__name__
    if "built_in_model" in method.requires:
        raise ConfigError(
            f"model.method: {name}, as it is configured, needs features, logits or layers of fedsim's own model, or "
            "steps two models in turn, which model.module does not allow; choose another method, or a backbone"
        )
    if getattr(method, "share_neck", True) is False:
        raise ConfigError(
            f"model.method.share_neck: {name} keeps the neck private, and model.module has none that fedsim knows; set "
            "it to true, and name tensors in model.private"
        )
    if task == "classification":
        raise ConfigError(
            "model.evaluation.task: classification needs fedsim's own head, and model.module has its own; set it to "
            "retrieval"
        )
    if has_ladder:
        raise ConfigError("model.adaptive_backbones: model.module has no other sizes; set it to null")


def _check_identities(federated: FederatedData, method: Method) -> None:
    """Refuse methods and generated images that need identities if clients have none."""
    unlabelled = [client.name for client in federated.clients if not client.knows_identities]
    if not unlabelled:
        return
    if labelled := [c.name for c in federated.clients if not c.knows_identities and c.generated is not None]:
        raise ConfigError(
            f"data.generated: client {labelled[0]} has no identities, but generated images are labelled with them; "
            "remove its folder or leave model.client.cluster out"
        )
    if "identities" in method.requires:
        raise ConfigError(
            f"model.method: {type(method).__name__}, as it is configured, needs identities, and client {unlabelled[0]} "
            "clusters its images instead; leave model.client.cluster out or choose another method"
        )
    if Group.HEAD in method.shared_groups and len(unlabelled) < len(federated.clients):
        raise ConfigError(
            f"model.method.share_head: client {unlabelled[0]} has no identity head, but other clients have one; "
            "set it to false"
        )


def _check_common_classes(federated: FederatedData, configured: str) -> None:
    """Refuse a method of shared classes where clients number their own, or no class has two clients."""
    if federated.classes is None:
        raise ConfigError(f"data.labels: {configured}, needs classes of several clients; set it to common")
    num_clients = Counter(label for client in federated.clients for label in {*client.labels.tolist()})
    if max(num_clients.values()) < 2:
        raise ConfigError(
            f"data.partition: {configured}, needs classes of several clients, and each of the {len(num_clients)} has "
            "one; choose by_camera, iid, dirichlet or shards, or another method"
        )


def settings_by_client(
    federated: FederatedData, common: LocalTraining, overrides: Mapping[str, ClientOverride]
) -> dict[str, LocalTraining]:
    """Return client -> its settings; see :func:`settings_of`."""
    if common.clusters or not federated.has_unlabelled:  # most clients of a large federation have the common ones
        usual = dict.fromkeys((client.name for client in federated.clients), common)
        with_overrides = (client for client in federated.clients if client.name in overrides) if overrides else ()
        return usual | {client.name: settings_of(client, common, overrides) for client in with_overrides}
    return {client.name: settings_of(client, common, overrides) for client in federated.clients}


def settings_of(data: ClientData, common: LocalTraining, overrides: Mapping[str, ClientOverride]) -> LocalTraining:
    """Return a client's settings: the common ones, overridden by its own.

    Raises:
        ConfigError: if they are wrong.
    """
    settings, name = common, data.name
    if name in overrides:
        settings = overrides[name].apply(common)
        settings.check(f"model.clients.{name}")
    if not settings.clusters and not data.knows_identities:
        raise ConfigError(
            f"model.client.cluster: the training images of client {name} have no identities; set it, such as to {{}}"
        )
    return settings


def check_batches(clients: Sequence[ClientData], settings: Mapping[str, LocalTraining], logs: bool) -> None:
    """Log, if this rank ``logs``, the clients with fewer images than the batch size, in one line.

    Raises:
        ConfigError: if a client has fewer than two images, which batch normalisation needs.
    """
    small = [(c.name, c.num_images) for c in clients if c.num_images < (settings[c.name].batch_size or 2)]
    for name, num_images in small:
        if num_images < 2:
            raise ConfigError(f"data: client {name} has fewer than the two training images of a batch; leave it out")
    if logs and (single := [c.name for c in clients if c.num_classes == 1 and not settings[c.name].clusters]):
        log.warning("%s: only one identity to train on, so nothing can be distinguished", ", ".join(single[:MAX_NAMES]))
    if small and logs:
        names = ", ".join(f"{name} ({num_images})" for name, num_images in small[:MAX_NAMES])
        more = f" and {len(small) - MAX_NAMES} more" if len(small) > MAX_NAMES else ""
        log.info("fewer images than model.client.batch_size, so all in one batch: %s%s", names, more)


def check_micro_batches(
    settings: Mapping[str, LocalTraining],
    models: Mapping[str, FlatModel],
    method: Method,
    objective: Objective,
    reduction: str,
) -> None:
    """Raise ConfigError if the batches of a client cannot be split into micro-batches as configured."""
    sizes = {(s.micro_batch, s.batch_size) for s in settings.values() if s.micro_batch not in (None, s.batch_size)}
    if not sizes:
        return
    field = "model.client.micro_batch"
    if "whole_batches" in method.requires:
        raise ConfigError(f"{field}: {type(method).__name__} needs whole batches; set it to null")
    if objective.center is not None:
        raise ConfigError(
            f"{field}: center loss updates its centers from whole batches; set it or model.objective.center to null"
        )
    if reduction == "fp32":
        raise ConfigError(
            f"{field}: sums over micro-batches are exact; set model.reduction to exact, or micro_batch to null"
        )
    normalised = [m for model in models.values() for m in model.network.modules() if isinstance(m, _BatchNorm)]
    if any(layer.momentum is None for layer in normalised):
        raise ConfigError(f"{field}: batch normalisation without a momentum needs whole batches; set it to null")
    for size, batch in sizes:
        assert size is not None  # see above
        if normalised and (size == 1 or (batch is not None and batch % size == 1)):
            raise ConfigError(
                f"{field}: micro-batches of {size} leave one image of a batch{'' if batch is None else f' of {batch}'} "
                "alone, which batch normalisation cannot train on; choose another size"
            )


def check_graphs(
    clients: Sequence[ClientData],
    settings: Mapping[str, LocalTraining],
    method: Method,
    objective: Objective,
    device: torch.device,
    logs: bool,
) -> None:
    """Log, if this rank ``logs``, the clients whose steps are not replayed as CUDA graphs, in one line per reason.

    Raises:
        ConfigError: if graphs are configured, and the steps of the method or its loss cannot be captured, or this torch
            does not recover from a capture that fails.
    """
    graph_clients = [client for client in clients if settings[client.name].graph]
    if graph_clients and "plain_steps" in method.requires:
        raise ConfigError(
            f"model.client.graph: {type(method).__name__}, as it is configured, needs plain steps, in which the host "
            "waits for the device or decides; set it to false"
        )
    if graph_clients and isinstance(objective.metric, MetricLoss) and objective.metric.waits:
        raise ConfigError(
            f"model.client.graph: {objective.metric.name} of model.objective.metric needs plain steps: the host waits "
            "for the device in it; set it to false"
        )
    if graph_clients and device.type == "cuda" and torch.__version__ < TORCH_FOR_GRAPHS:
        raise ConfigError(
            f"model.client.graph: needs torch {TORCH_FOR_GRAPHS}, and this is {torch.__version__}, which cannot go on "
            "after a capture that fails; set it to false, or update torch"
        )
    reasons: dict[str, list[str]] = {}
    for client in graph_clients:
        if (reason := why_plain(settings[client.name], client.num_images, device)) is not None:
            reasons.setdefault(reason, []).append(client.name)
    for reason, names in reasons.items():
        if logs:
            listed = "all clients" if len(names) == len(clients) else ", ".join(names[:MAX_NAMES])
            log.warning("model.client.graph: steps of %s stay plain: %s", listed, reason)


def check_compiler(settings: Mapping[str, LocalTraining], device: torch.device) -> None:
    """Raise ConfigError if a client's network must be compiled, but this machine lacks a compiler."""
    if not any(training.compile for training in settings.values()):
        return
    if device.type == "cuda" and find_spec("triton") is None:
        raise ConfigError("model.client.compile: needs the package triton, which is not installed; set it to false")
    # on GPUs triton needs a C compiler, for the code that starts its kernels
    variable, *names = ("CXX", "g++", "clang++") if device.type == "cpu" else ("CC", "gcc", "clang")
    if not any(shutil.which(name) for name in (os.environ.get(variable, ""), *names)):
        raise ConfigError(f"model.client.compile: no compiler is found ({', '.join(names)}); set it to false")


def check_image_sizes(models: Mapping[str, FlatModel], data: FederatedDataModule) -> None:
    """Raise ConfigError if a model cannot process images in the sizes of training and of tests."""
    crop = data.augmentation.crop
    sizes = {"augmentation.crop" if crop else "size": crop or data.size, "test_size": data.test_size}
    for (name, size), (arch, model) in itertools.product(sizes.items(), models.items()):
        backbone = model.network.eval().backbone
        try:
            with torch.no_grad():
                maps = backbone(torch.zeros(2, 3, *size, device=model.flat.buffer.device))
        except (RuntimeError, ValueError, AssertionError) as error:
            raise ConfigError(f"data.{name}: {arch} cannot process images of {list(size)} pixels ({error})") from error
        if maps.dim() not in (2, 4) or maps.shape[1] != backbone.out_channels:
            raise ConfigError(
                f"model.backbone: {arch} returns {list(maps.shape)} for 2 images; it must be [2, C, h, w] or [2, C] "
                f"with C = out_channels = {backbone.out_channels}"
            )
        if maps.dim() == 2 and model.network.pooling is not None:
            raise ConfigError(f"model.neck.pooling: {arch} returns vectors, with nothing to pool; set it to average")


def check_received_statistics(models: Mapping[str, FlatModel], method: Method, bn_stats: StatisticsPolicy) -> None:
    """Raise ConfigError if a model mixes with the server's running statistics, and does not receive them."""
    for model in models.values():
        shared = {entry.name for entry in model.flat.shared_entries}
        layers = {f"{name}.running_mean": layer for name, layer in model.network.named_modules()}
        mixing = {name for name, layer in layers.items() if isinstance(layer, DiversifiedNorm2d)}
        if mixing - shared:
            raise ConfigError(
                "model.backbone.style.kind: diversify needs running statistics from the server, and clients keep them "
                f"with {type(method).__name__} and bn_stats {bn_stats}; choose another kind, or another method"
            )


def check_equal_start(strategy: FederatedStrategy, models: Mapping[str, FlatModel], network: str = "backbone") -> None:
    """Raise ConfigError unless all ranks built the same initial weights: those of the ``network`` are the caller's."""
    checksums = torch.zeros(strategy.world_size, len(models), dtype=torch.float64)
    own_checksums = [model.checksum for model in models.values()]
    checksums[strategy.global_rank] = torch.tensor(own_checksums, dtype=torch.float64)
    strategy.exchange([checksums])
    if len(checksums.unique(dim=0)) > 1:
        raise ConfigError(
            f"model.{network}: ranks start from different weights; call seed_everything() before the {network} is built"
        )
