"""The parts of torch, Lightning and FAISS by which a program sees a device: as they are beside GPUs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from mmap import PAGESIZE
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import _disable_current_modes

from fedsim.core import devices
from simulated.kernels import Called, Kernels, refuse
from simulated.places import CPU, Places
from simulated.queues import queues

NAME = "Simulated H100"
_SILENT = ("_lazy_init", "init", "empty_cache")
"""Functions of torch.cuda without an effect that could be seen here."""


@contextmanager
def shown(kernels: Kernels) -> Iterator[None]:
    """Show the simulated GPUs to the program until the end of the block."""
    parts = (
        _tensors,
        _storages,
        _makers,
        _autograd,
        _generators,
        _cuda,
        _default_streams,
        queues,
        _autocast,
        _optimizers,
        _groups,
        _files,
        _faiss,
    )
    with ExitStack() as stack:
        for part in parts:
            for owner, name, new in part(kernels):
                stack.enter_context(mock.patch.object(owner, name, new, create=True))
        yield


Patches = Iterator[tuple[Any, str, Any]]


def _tensors(kernels: Kernels) -> Patches:
    """Tensors know their device, and CUDA's do not let the host look into them."""
    places, real, real_to, real_tolist = kernels.places, Tensor, Tensor.to, Tensor.tolist
    real_data_ptr = Tensor.data_ptr

    def to(self: Tensor, *args: Any, **options: Any) -> Tensor:
        device, dtype, asynchronous, layout = _parsed(places, args, options)
        forced = bool(options.get("copy")) or (len(args) > 3 and args[3] is True)
        source = places.of(self)
        goal, dtype = (source if device is None else device), dtype or self.dtype
        if goal != source and self.requires_grad and torch.is_grad_enabled():
            return _Moved.apply(self, source, goal, dtype)
        if goal != source:  # the mode must see the device
            return torch.ops.aten._to_copy(self, dtype=dtype, device=goal, non_blocking=asynchronous)
        if dtype == self.dtype and not forced and layout is None:
            return self
        more = {} if layout is None else {"memory_format": layout}
        return real_to(self, dtype, non_blocking=asynchronous, copy=True, **more)

    def cuda(self: Tensor, device: Any = None, non_blocking: bool = False, memory_format: Any = None) -> Tensor:
        return to(self, places.named("cuda" if device is None else device), non_blocking=non_blocking)

    def tolist(self: Tensor) -> Any:
        host = to(self, CPU) if places.of(self).type == "cuda" else self
        kernels.check_readable(host, "tolist")
        with torch._C.DisableTorchFunction():
            return real_tolist(host)

    def data_ptr(self: Tensor) -> int:  # by which files are written, for example
        kernels.check_readable(self, "data_ptr")
        return real_data_ptr(self)

    def pin_memory(self: Tensor, device: Any = None) -> Tensor:
        if places.of(self).type == "cuda":
            refuse("cannot pin a cuda tensor: only dense CPU tensors can be pinned")
        kernels.check_recording("page-locked memory")
        pinned = self.clone()
        places.pin(pinned)
        return pinned

    yield real, "device", property(places.of)
    yield real, "is_cuda", property(lambda self: places.of(self).type == "cuda")
    yield real, "is_cpu", property(lambda self: places.of(self).type == "cpu")
    yield real, "get_device", lambda self: places.of(self).index if places.of(self).type == "cuda" else -1
    yield real, "to", to
    yield real, "cpu", lambda self, memory_format=None: to(self, CPU)
    yield real, "cuda", cuda
    yield real, "numpy", _on_host(kernels, "numpy")
    yield real, "__array__", _on_host(kernels, "__array__")
    yield real, "tolist", tolist
    yield real, "data_ptr", data_ptr
    yield real, "pin_memory", pin_memory
    yield real, "is_pinned", lambda self, device=None: places.is_pinned(self)


class _Moved(torch.autograd.Function):
    """A copy between devices, whose gradient goes back to the first: torch's own would stay, as all are on the CPU."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, source: torch.device, goal: torch.device, dtype: torch.dtype) -> Tensor:
        ctx.source, ctx.dtype = source, tensor.dtype
        return torch.ops.aten._to_copy(tensor, dtype=dtype, device=goal)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        with Called.within("to", gradient):
            return torch.ops.aten._to_copy(gradient, dtype=ctx.dtype, device=ctx.source), None, None, None


def _on_host(kernels: Kernels, name: str) -> Callable[..., Any]:
    """Return a method of tensors that gives the host their memory."""
    read = getattr(Tensor, name)

    def checked(self: Tensor, *args: Any, **options: Any) -> Any:
        device = kernels.places.of(self)
        if device.type == "cuda":
            refuse(f"can't convert {device} device type tensor to numpy ({name}). Use Tensor.cpu() to copy it first")
        kernels.check_readable(self, name)
        with torch._C.DisableTorchFunction():
            return read(self, *args, **options)

    return checked


def _parsed(places: Places, args: Any, options: dict[str, Any]) -> tuple[torch.device | None, Any, bool, Any]:
    """Return device, dtype, non_blocking and memory format of a call of Tensor.to."""
    if any(isinstance(value, Tensor) for value in args):
        return places.of(args[0]), args[0].dtype, False, None
    known = {name: value for name, value in options.items() if name != "copy"}
    device, dtype, asynchronous, layout = torch._C._nn._parse_to(*args, **known)
    return (None if device is None else places.named(device)), dtype, asynchronous, layout


def _storages(kernels: Kernels) -> Patches:
    """A copy of a storage is where the storage is."""

    def copying(real: Callable[..., Any]) -> Callable[..., Any]:
        def copied(self: torch.UntypedStorage, *args: Any) -> Any:
            new = real(self, *args)
            kernels.places.inherit(self, new)
            return new

        return copied

    for name in ("__deepcopy__", "clone"):
        yield torch.UntypedStorage, name, copying(getattr(torch.UntypedStorage, name))


def _makers(kernels: Kernels) -> Patches:
    """Functions that make tensors of numbers do so on the CPU, then copy."""

    def making(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(data: Any, *args: Any, device: Any = None, **options: Any) -> Tensor:
            found = real(data, *args, **options)
            if device is None:
                return found
            goal = kernels.places.named(device)
            return found if kernels.places.of(found) == goal else found.to(goal)

        return made

    for name in ("tensor", "as_tensor", "asarray"):
        yield torch, name, making(getattr(torch, name))


def _autograd(kernels: Kernels) -> Patches:
    """Gradients are where their tensors are, and functions that a backward pass calls are seen, too."""
    real = torch.autograd._engine_run_backward  # type: ignore[attr-defined] # imported there, not exported

    def run(tensors: Sequence[Tensor], *args: Any, **options: Any) -> Any:
        kernels.places.live_bytes()  # the most of a step
        with Called.within("backward", tensors), Called(kernels.places):
            return real(tensors, *args, **options)

    yield torch.autograd, "_engine_run_backward", run


def _generators(kernels: Kernels) -> Patches:
    """Generators have a device, and draw the CPU's numbers on every one."""

    class Generator(torch._C.Generator):
        def __new__(cls, device: Any = "cpu") -> Generator:
            made = super().__new__(cls, device="cpu")
            found = kernels.places.named(device)
            if found.type == "cuda":
                kernels.generators[made._cdata] = found  # type: ignore[attr-defined] # torch's stubs lack it
                weakref.finalize(made, kernels.generators.pop, made._cdata, None)  # type: ignore[attr-defined]
            return made

        @property
        def device(self) -> torch.device:
            return kernels.generators.get(self._cdata, CPU)  # type: ignore[attr-defined] # as above

    yield torch, "Generator", Generator


def _cuda(kernels: Kernels) -> Patches:
    """torch.cuda."""
    places, cuda = kernels.places, torch.cuda

    def set_device(device: Any) -> None:
        places.current = places.named(device).index or 0

    def wait(*_: Any) -> None:
        kernels.check_recording("synchronize")
        kernels.record.wait("synchronize")
        places.end_copies()
        kernels.streams.host_waits()

    def properties(device: Any = None) -> SimpleNamespace:
        bus = places.buses[places.named("cuda" if device is None else device).index or 0]
        return SimpleNamespace(
            name=NAME, major=9, minor=0, total_memory=places.memory, multi_processor_count=132, pci_domain_id=0,
            pci_bus_id=bus, pci_device_id=0,
        )  # fmt: skip

    numbers = {
        "is_available": True, "is_initialized": True, "_is_in_bad_fork": False, "is_bf16_supported": True,
        "device_count": places.num_gpus, "get_device_name": NAME, "get_device_capability": (9, 0),
        "mem_get_info": (places.memory * 7 // 8, places.memory), "memory_reserved": 0, "max_memory_reserved": 0,
    } | dict.fromkeys(_SILENT)  # fmt: skip
    for name, value in numbers.items():
        yield cuda, name, lambda *_, value=value, **__: value

    def lock(address: int, size: int, flags: int) -> int:
        if size <= 0 or address % PAGESIZE or address in places.locked:
            return 1  # cudaErrorInvalidValue
        places.locked[address] = size
        return 0

    def unlock(address: int) -> int:
        return 0 if places.locked.pop(address, 0) else 713  # cudaErrorHostMemoryNotRegistered

    def peak(device: Any = None) -> int:
        places.live_bytes()
        return places.peak

    def reset_peak(device: Any = None) -> None:
        places.peak = 0

    runtime = SimpleNamespace(cudaHostRegister=lock, cudaHostUnregister=unlock)
    yield cuda, "cudart", lambda: runtime
    yield cuda, "memory_allocated", lambda device=None: places.live_bytes()
    yield cuda, "max_memory_allocated", peak
    yield cuda, "reset_peak_memory_stats", reset_peak
    yield cuda, "get_device_properties", properties
    yield cuda, "current_device", lambda: places.current
    yield cuda, "set_device", set_device
    yield cuda, "device", _device_context(places)
    yield cuda, "synchronize", wait
    yield torch._C, "_cuda_clearCublasWorkspaces", lambda: None
    yield devices, "why_cuda_fails", lambda cuda: None


def _default_streams(kernels: Kernels) -> Patches:
    """The default generators of the GPUs."""
    generators = kernels.draws.generators

    def of(device: Any = "cuda") -> torch.Generator:
        kernels.check_recording("the state of a generator")
        return generators[kernels.places.named(device).index or 0]

    def seed_all(seed: int) -> None:
        for number in range(len(generators)):
            of(number).manual_seed(seed)

    def set_all(states: Sequence[Tensor]) -> None:
        for number, state in enumerate(states):
            of(number).set_state(state)

    yield torch.cuda, "manual_seed", lambda seed: of().manual_seed(seed)
    yield torch.cuda, "manual_seed_all", seed_all
    yield torch.cuda, "get_rng_state", lambda device="cuda": of(device).get_state()
    yield torch.cuda, "set_rng_state", lambda state, device="cuda": of(device).set_state(state)
    yield torch.cuda, "get_rng_state_all", lambda: [of(number).get_state() for number in range(len(generators))]
    yield torch.cuda, "set_rng_state_all", set_all


def _device_context(places: Places) -> type:
    """Return torch.cuda.device: a context in which another GPU is the current one."""

    class Device:
        def __init__(self, device: Any) -> None:
            self._number = places.named(device).index

        def __enter__(self) -> None:
            self._before = places.current
            places.current = places.current if self._number is None else self._number

        def __exit__(self, *_: object) -> None:
            places.current = self._before

    return Device


def _autocast(kernels: Kernels) -> Patches:
    """Autocast of CUDA's operations is that of the CPU's."""
    real = torch.autocast

    class Autocast(real):  # type: ignore[misc, valid-type] # a class, though held in a variable
        def __init__(self, device_type: str, *args: Any, **options: Any) -> None:
            super().__init__("cpu" if device_type == "cuda" else device_type, *args, **options)

    yield torch, "autocast", Autocast
    yield torch.amp, "autocast", Autocast
    yield torch.amp.autocast_mode, "autocast", Autocast


def _optimizers(kernels: Kernels) -> Patches:
    """Optimizers see the devices of their lists of tensors."""
    real = torch._C._group_tensors_by_device_and_dtype

    def group(lists: Any, with_indices: bool = False) -> Any:
        kernels.places.live_bytes()  # all gradients are there
        first = next((t for tensors in lists for t in tensors if t is not None), None)
        device = CPU if first is None else kernels.places.of(first)
        return {(device, dtype): found for (_, dtype), found in real(lists, with_indices).items()}

    def checking(real_check: Callable[..., None]) -> Callable[..., None]:
        def check(self: torch.optim.Optimizer) -> None:
            tensors = [tensor for group in self.param_groups for tensor in group["params"]]
            if all(kernels.places.of(tensor).type == "cpu" for tensor in tensors):
                real_check(self)
            elif kernels.recording is not None and not all(group["capturable"] for group in self.param_groups):
                refuse("Attempting CUDA graph capture of step() for an instance of an optimizer that is not capturable")

        return check

    yield torch._C, "_group_tensors_by_device_and_dtype", group
    for name in ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"):  # before torch 2.12
        if hasattr(torch.optim.Optimizer, name):
            yield torch.optim.Optimizer, name, checking(getattr(torch.optim.Optimizer, name))


def _groups(kernels: Kernels) -> Patches:
    """Process groups of NCCL are gloo's, with NCCL's rules."""
    collectives, real_init, real_new = kernels.collectives, dist.init_process_group, dist.new_group
    real_place = distributed_c10d._get_object_coll_device

    def init_process_group(backend: str | None = None, *args: Any, **options: Any) -> None:
        bound = options.pop("device_id", None)
        real_init("gloo", *args, **options)
        collectives.opened(dist.group.WORLD, "nccl" if backend is None else backend)
        if bound is not None:  # NCCL connects at once, and smaller groups inherit the device, or fail to
            dist.group.WORLD.bound_device_id = torch.device("cpu", 0)  # type: ignore[union-attr] # it was just made
            for problem in collectives.duplicates(dist.group.WORLD, bound.index):
                refuse(problem)

    def new_group(*args: Any, backend: str | None = None, **options: Any) -> Any:
        made = real_new(*args, backend="gloo", **options)
        inherited = "nccl" if collectives.is_nccl(None) else "gloo"
        collectives.opened(made, inherited if backend is None else backend)
        return made

    def place_of_objects(group: Any = None) -> str:
        return "cuda" if collectives.is_nccl(group) else real_place(group)

    collective_functions = {name: _launching(kernels, getattr(dist, name)) for name in ("all_reduce", "broadcast")}
    for owner in (dist, distributed_c10d):
        yield owner, "init_process_group", init_process_group
        yield owner, "new_group", new_group
        for name, function in collective_functions.items():
            yield owner, name, function
    yield distributed_c10d, "_get_object_coll_device", place_of_objects


def _launching(kernels: Kernels, real: Callable[..., Any]) -> Callable[..., Any]:
    """Return a collective that runs on the GPU if its group is NCCL's."""

    def collective(*args: Any, group: Any = None, async_op: bool = False, **options: Any) -> Any:
        if not kernels.collectives.is_nccl(group):
            return real(*args, group=group, async_op=async_op, **options)
        work = real(*args, group=group, async_op=True, **options)
        if not isinstance(work, NCCLWork):  # torch calls this again by way of torch functions
            work = NCCLWork(kernels, work)
        return work if async_op else work.wait()

    return collective


class NCCLWork:
    """A collective on the GPU: its stream waits for it, and the host only if it asks whether all is done."""

    def __init__(self, kernels: Kernels, work: Any) -> None:
        self._kernels, self._work = kernels, work

    def is_completed(self) -> bool:
        """Whether the GPU has come to its end: a host that asks until then has waited for all before, too."""
        if not self._work.is_completed():
            return False
        self._kernels.host_waits("a collective")
        return True

    def wait(self) -> None:
        """Let the current stream wait."""
        self._work.wait()


def _files(kernels: Kernels) -> Patches:
    """Files of torch.save say where tensors were; torch.load puts them there again, unless it is told otherwise."""

    def tag(storage: Any) -> str | None:
        place = kernels.places.of_storage(getattr(storage, "_untyped_storage", storage))
        return str(place) if place.type == "cuda" else None

    def restore(storage: Any, location: str) -> Any:
        if not location.startswith("cuda"):
            return None
        untyped = getattr(storage, "_untyped_storage", storage)
        kernels.places.put(torch.empty(0, dtype=torch.uint8).set_(untyped), torch.device(location))
        return storage

    yield torch.serialization, "_package_registry", [(0, tag, restore), *torch.serialization._package_registry]


def _faiss(kernels: Kernels) -> Patches:
    """FAISS for GPUs: it works on a stream of the current device, which must be that of the tensors."""
    import faiss
    import faiss.contrib.torch_utils  # puts another knn_gpu in its place

    def knn_gpu(resources: Any, query: Tensor, gallery: Tensor, k: int, metric: int, device: int) -> Any:
        if kernels.places.current != device:
            refuse(f"FAISS on GPU {device} uses a stream of the current one, {kernels.places.current}: a race")
        for tensor in (query, gallery):
            if kernels.places.of(tensor) != torch.device("cuda", device):
                refuse(f"FAISS on GPU {device} got a tensor on {kernels.places.of(tensor)}")
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            arrays = [torch._C.TensorBase.numpy(tensor.detach()) for tensor in (query, gallery)]
            values, index = faiss.knn(*arrays, k, metric=metric)
        found = tuple(torch.from_numpy(part) for part in (values, index))
        for tensor in found:
            kernels.places.put(tensor, torch.device("cuda", device))
        kernels.record.kernel("knn_gpu")
        return found

    yield faiss, "get_num_gpus", lambda: kernels.places.num_gpus
    yield faiss, "StandardGpuResources", lambda: SimpleNamespace(setTempMemory=lambda size: None)
    yield faiss, "knn_gpu", knn_gpu
