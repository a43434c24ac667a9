"""Properties of torch's operations on CUDA: which allocate only, which wait, which have no deterministic form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


VIEWS = _words(
    "_local_scalar_dense _reshape_alias _unsafe_view "
    "alias as_strided chunk detach detach_ diagonal expand is_same_size lift lift_fresh "
    "narrow permute record_stream requires_grad_ reshape result_type select set_ slice split split_with_sizes squeeze "
    "squeeze_ sym_numel sym_size t transpose transpose_ unbind unfold unsqueeze unsqueeze_ view view_as_real"
)
"""They launch nothing, but for a copy of a number."""
ALLOCATIONS = _words("empty empty_like empty_strided new_empty new_empty_strided resize_")
"""They launch nothing, either."""
FACTORIES = _words(
    "_efficientzerotensor arange bartlett_window empty empty_strided eye full linspace normal ones rand randint randn "
    "randperm scalar_tensor tensor zeros"
)
"""They make a tensor of no other."""
LIKE_ANOTHER = ("new_", "zeros_like", "empty_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like")
"""Beginnings of the names of operations that make a tensor like another."""
WAITING = _words(
    "_linalg_check_errors _local_scalar_dense _unique2 bincount equal histc is_nonzero item masked_select nonzero "
    "repeat_interleave unique_consecutive unique_dim unique_dim_consecutive"
)
"""The host waits: it needs a number, or the size of the result."""
RANDOM = _words(
    "bernoulli bernoulli_ cauchy_ exponential_ geometric_ log_normal_ multinomial normal normal_ poisson rand randint "
    "randn random_ randperm uniform_"
)
INDEXING = _words("index index_put index_put_ _index_put_impl_ _unsafe_index _unsafe_index_put")

NOT_DETERMINISTIC = _words(
    "_adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward _ctc_loss_backward _embedding_bag "
    "_embedding_bag_dense_backward _scatter_reduce _upsample_bilinear2d_aa_backward adaptive_max_pool2d_backward "
    "avg_pool3d_backward embedding_bag fractional_max_pool2d_backward fractional_max_pool3d_backward "
    "grid_sampler_2d_backward grid_sampler_3d_backward histc kthvalue max_pool3d_with_indices_backward max_unpool "
    "max_unpool2d max_unpool3d median nanmedian nll_loss2d_forward put_ quantile reflection_pad1d_backward "
    "reflection_pad2d_backward reflection_pad3d_backward replication_pad1d_backward replication_pad2d_backward "
    "replication_pad3d_backward resize_as_ scatter_reduce scatter_reduce_ segment_reduce_ "
    "upsample_bicubic2d_backward upsample_bilinear2d_backward upsample_linear1d_backward "
    "upsample_trilinear3d_backward"
)
"""torch.use_deterministic_algorithms refuses them on CUDA (its documentation lists them)."""

SCALARS_FROM_THE_HOST = _words(
    "_foreach_add _foreach_add_ _foreach_addcdiv_ _foreach_div_ _foreach_lerp_ _foreach_mul _foreach_mul_ _fused_adam_ "
    "_fused_adamw_ _fused_sgd_ addcdiv_ addcmul_ clamp fill_ lerp lerp_ masked_fill masked_fill_ where"
)
"""They take numbers from the host beside tensors on the device, though they are not tagged as working by element."""
ANY_DEVICES = _words("_foreach_copy_ resize_ set_ set_data")

NCCL_TYPES = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8,
     torch.bool}
)  # fmt: skip
NCCL_REDUCTIONS = _words("SUM AVG PRODUCT MIN MAX PREMUL_SUM")

_TENSORS_PER_LAUNCH = (110, 64, 48, 36, 30)
"""Most tensors in a launch of a kernel on lists, by the number of lists (ATen/native/cuda/MultiTensorApply.cuh)."""
_CHUNKS_PER_LAUNCH, _CHUNK = 320, 65_536


def tensors_in(values: object, named: Mapping[str, object] | None = None) -> list[Tensor]:
    """Return all tensors in nested lists, then those of arguments with names."""
    found: list[Tensor] = []
    _collect(values, found)
    if named:
        _collect(tuple(named.values()), found)
    return found


def _collect(values: object, found: list[Tensor]) -> None:
    if isinstance(values, Tensor):
        found.append(values)
    elif isinstance(values, (list, tuple)):
        for value in values:
            if type(value) not in _PLAIN:
                _collect(value, found)


_PLAIN = frozenset({bool, float, int, str, type(None), torch.device, torch.dtype})
"""Types of most values that are no tensors, and hold none."""


class Operation(NamedTuple):
    """What there is to know of an operation, without its arguments."""

    space: str
    """such as ``aten``"""
    name: str
    launches: bool
    """neither a view nor an allocation"""
    numbers_from_host: bool
    """may take numbers from the host beside tensors on the device"""
    writes: tuple[int, ...]
    """places of the arguments that it changes"""


@cache
def operation(func: Any) -> Operation:
    """Return what there is to know of an operation of torch."""
    space, _, name = func._schema.name.partition("::")
    infos = (argument.alias_info for argument in func._schema.arguments)
    writes = tuple(place for place, info in enumerate(infos) if info is not None and info.is_write)
    numbers = torch.Tag.pointwise in func.tags or name in SCALARS_FROM_THE_HOST
    return Operation(space, name, name not in VIEWS and name not in ALLOCATIONS, numbers, writes)


def lacks_determinism(name: str, args: Sequence[object]) -> bool:
    """Whether torch refuses this call on CUDA if deterministic algorithms are asked for."""
    if name in ("cumsum", "cumsum_"):
        return isinstance(args[0], Tensor) and args[0].is_floating_point()
    if name == "bincount":
        return len(args) > 1 and args[1] is not None
    return name in NOT_DETERMINISTIC


def indexes_by_mask(name: str, args: Sequence[object]) -> bool:
    """Whether an indexing operation must count the ones of a mask. One number put at a mask's places is a fill."""
    if name not in INDEXING or not any(t.dtype in (torch.bool, torch.uint8) for t in tensors_in(args[1])):
        return False
    values = args[2] if "put" in name else None
    return not (isinstance(values, Tensor) and values.numel() == 1)


def launches(name: str, args: Sequence[object]) -> int:
    """Return how many kernels an operation launches: one, or more for long lists of tensors."""
    if not name.startswith(("_foreach", "_fused")):
        return 1
    lists = [value for value in args if isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor)]
    if not lists:
        return 1
    depth = len(lists) + (not name.endswith("_"))  # results are a list of their own
    if name.startswith("_fused"):
        depth = min(depth, 4)  # the steps are passed beside the lists
    return _launches_of_lists([t.numel() for t in lists[0]], min(depth, 5)) + (name == "_foreach_norm")


def _launches_of_lists(sizes: Iterable[int], depth: int) -> int:
    """Count as ATen does: a launch is full after so many tensors, or so many chunks of elements."""
    count, tensors, chunks = 0, 0, 0
    for size in sizes:
        if not size:
            continue
        tensors += 1
        left = -(-size // _CHUNK)
        while left:
            taken = min(left, _CHUNKS_PER_LAUNCH - chunks)
            chunks, left = chunks + taken, left - taken
            if chunks == _CHUNKS_PER_LAUNCH or (tensors == _TENSORS_PER_LAUNCH[depth - 1] and not left):
                count, chunks = count + 1, 0
                tensors = 1 if left else 0
    return count + (tensors > 0 and chunks > 0)
