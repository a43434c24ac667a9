"""Parameter groups, decided by module type and never by name.

In torchvision's ResNet-50 the four ``downsample.1`` norms (14 % of the affine parameters) have no "bn" in their names:
every rule of the kind ``"bn" in name`` misses them.
"""

from __future__ import annotations

from enum import StrEnum

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fedsim.core.errors import ConfigError
from fedsim.models.assembled import AssembledNorm2d
from fedsim.models.attention import CBAM, AttentiveNorm2d, SqueezeExcitation
from fedsim.models.backbones import PartlyFixed
from fedsim.models.fusion import MSCAM
from fedsim.models.style import SNR


class Group(StrEnum):
    """The role of a tensor in the model. A method shares whole groups."""

    CONV = "conv"
    """backbone weights outside normalisation and attention modules: also a transformer's self-attention, class token
    and position embeddings, and the exponent of a generalised mean"""
    NORM = "norm"
    """affine parameters of the backbone's normalisation modules; of attentive normalisation all parameters"""
    STAT = "stat"
    """running means and variances of the backbone; the setting ``bn_stats`` decides about them"""
    ATTN = "attn"
    """parameters of the backbone's attention modules (squeeze-and-excitation, CBAM, MS-CAM) and of SNR's gates, outside
    normalisation; of assembled normalisation all but its batch normalisation"""
    NECK = "neck"
    """weights of the embedding layers between backbone and head, outside normalisation modules"""
    NECKNORM = "necknorm"
    """affine parameters of the neck's normalisation modules"""
    NECKSTAT = "neckstat"
    """running statistics of the neck"""
    HEAD = "head"
    """the identity classifier, and those of SNR layers"""
    FIXED = "fixed"
    """the backbone below low-rank adapters or prompts: the same on all clients, never trained, sent or stored"""
    COUNTER = "counter"
    """integer bookkeeping (num_batches_tracked): never shared, never averaged"""


BACKBONE = frozenset({Group.CONV, Group.NORM, Group.STAT, Group.ATTN})
"""The whole backbone."""

BODY = BACKBONE | {Group.NECK, Group.NECKNORM, Group.NECKSTAT}
"""Backbone and neck: everything that retrieval needs."""

STATISTICS = frozenset({Group.STAT, Group.NECKSTAT})
"""All running statistics; the setting ``bn_stats`` decides about them."""

_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm, AttentiveNorm2d)
_ATTENTION = (SqueezeExcitation, CBAM, MSCAM, SNR, AssembledNorm2d)


def body_groups(share_neck: bool, share_head: bool) -> frozenset[Group]:
    """Return the groups of backbone and, if shared, neck and head; raise ConfigError for a head without its neck."""
    if share_head and not share_neck:
        # each client's neck would give the head inputs of another meaning
        raise ConfigError("model.method.share_neck: a shared head needs a shared neck; set share_head to false, too")
    return (BODY if share_neck else BACKBONE) | (frozenset({Group.HEAD}) if share_head else frozenset())


def group_names(model: nn.Module) -> dict[str, Group]:
    """Return the group of each parameter and buffer by its name, in the order of the model.

    The model has children ``backbone``, ``neck`` and ``head``, and maybe ``pooling`` and ``stage_heads``, such as a
    :class:`~fedsim.models.ReIDModel`.
    """
    groups: dict[str, Group] = {}
    for part, child in model.named_children():
        kinds = dict.fromkeys(_inside(child, _ATTENTION), Group.ATTN)
        kinds |= dict.fromkeys(_inside(child, _NORMS), Group.NORM)  # MS-CAM, SNR and assembled ones have some
        fixed = _fixed_names(child, part)
        for path, module in child.named_modules(prefix=part):
            for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
                group = _group(part, kinds.get(module, Group.CONV), tensor)
                is_fixed = f"{path}.{name}" in fixed and group is not Group.COUNTER
                groups[f"{path}.{name}"] = Group.FIXED if is_fixed else group
    return groups


def _fixed_names(root: nn.Module, prefix: str) -> set[str]:
    """Return the names of the tensors below adapters and prompts."""
    partly = [(path, module) for path, module in root.named_modules(prefix=prefix) if isinstance(module, PartlyFixed)]
    return {f"{path}.{name}" for path, module in partly for name in module.state_dict() if module.fixed(name)}


def _inside(root: nn.Module, types: tuple[type[nn.Module], ...]) -> set[nn.Module]:
    """Return the modules of these types below ``root``, and the modules inside these."""
    return {part for module in root.modules() if isinstance(module, types) for part in module.modules()}


def _group(part: str, module_group: Group, tensor: Tensor) -> Group:
    """Return a tensor's group. ``module_group``: the group of its module's parameters, if that were in the backbone."""
    if not tensor.is_floating_point():
        return Group.COUNTER
    is_parameter = isinstance(tensor, nn.Parameter)
    if part in ("head", "stage_heads"):
        return Group.HEAD
    if part == "neck":
        norm = Group.NECKNORM if module_group is Group.NORM else Group.NECK
        return norm if is_parameter else Group.NECKSTAT
    return module_group if is_parameter else Group.STAT
