"""The mode that sees every operation, autograd's too: it says where results are, and refuses what CUDA refuses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from simulated import rules
from simulated.collectives import Collectives
from simulated.draws import Draws
from simulated.graphs import Pools, Recording
from simulated.places import CPU, Places, site
from simulated.record import Record
from simulated.streams import Streams

_BACKWARD = "backward"
_FIRST = torch.device("cuda", 0)
FAILED = "operation failed due to a previous error during capture"


class SimulatedGPUError(RuntimeError):
    """The simulated GPU refuses something: real ones would raise, or compute with wrong bytes."""


def refuse(text: str) -> None:
    """Raise SimulatedGPUError, with the lines of fedsim that are to blame."""
    raise SimulatedGPUError(f"{text}\n  at {site(4)}")


class Called(TorchFunctionMode):
    """Remembers which function of torch the program has called, and the GPU of its arguments.

    Inside of an operation torch makes tensors "on the device of its arguments", which really is the CPU.
    """

    _of_thread = threading.local()

    def __init__(self, places: Places) -> None:
        super().__init__()
        self._places = places

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call ``func``, and remember it meanwhile."""
        stack = self.stack()
        stack.append((getattr(func, "__name__", ""), args, kwargs))
        try:
            return func(*args, **(kwargs or {}))
        finally:
            stack.pop()

    @classmethod
    @contextmanager
    def within(cls, name: str, arguments: object) -> Iterator[None]:
        """Remember that the program calls a function."""
        cls.stack().append((name, arguments, None))
        try:
            yield
        finally:
            cls.stack().pop()

    @classmethod
    def stack(cls) -> list[tuple[str, object, Mapping[str, object] | None]]:
        """Return the functions that are being called, with their arguments, the innermost last."""
        try:
            return cls._of_thread.stack  # type: ignore[no-any-return] # threads' variables have no types
        except AttributeError:
            cls._of_thread.stack = []
            return cls._of_thread.stack  # type: ignore[no-any-return] # as above

    @classmethod
    def innermost(cls) -> str:
        """Return the name of the innermost function."""
        stack = cls.stack()
        return stack[-1][0] if stack else ""

    def gpu(self) -> torch.device | None:
        """Return the GPU of the innermost function's arguments, or None."""
        stack = self.stack()
        devices = map(self._places.of, rules.tensors_in(*stack[-1][1:])) if stack else ()
        return next((device for device in devices if device.type == "cuda"), None)


class Kernels(TorchDispatchMode):
    """Follows the devices of tensors through all operations."""

    def __init__(self, places: Places, record: Record, collectives: Collectives) -> None:
        super().__init__()
        self.places, self.record, self.collectives = places, record, collectives
        self.called = Called(places)
        self.generators: dict[int, torch.device] = {}
        """address of a generator -> its device, for those that are not the CPU's"""
        self.draws = Draws(places.num_gpus)
        self.streams, self.pools = Streams(refuse), Pools(refuse)
        self.recording: Recording | None = None
        """the CUDA graph that is being recorded"""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and its import takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Run an operation on the CPU as if it ran where its tensors are."""
        options = dict(kwargs or {})
        known = rules.operation(func)
        name, tensors = known.name, rules.tensors_in(args, options)
        if known.space == "c10d":
            self.check_recording("a collective")
            self._check_collective(func._schema.name, args, tensors)
            return func(*args, **options)
        asked = self._device_asked_for(name, tensors, options)
        pins = bool(options.get("pin_memory"))
        if pins:
            options["pin_memory"] = False
        if asked is not None:
            options["device"] = CPU
        if name == "_to_copy":
            return self._copied(func, args, options, asked)
        if name == "copy_":
            return self._copy(func, args, options)
        if name in rules.FACTORIES and not tensors:
            result = self._made(func, name, args, options, asked)
        else:
            result = self._computed(func, name, args, options, tensors, asked)
        if pins:
            for tensor in rules.tensors_in(result):
                self.places.pin(tensor)
        return result

    # -- where results are ---------------------------------------------------------------------------------------------

    def _device_asked_for(self, name: str, tensors: list[Tensor], options: dict[str, Any]) -> torch.device | None:
        """Return the device that the program has given, if any."""
        given = options.get("device")
        if given is None:
            return None
        if tensors and torch.device(given).type == "cpu" and name.startswith(rules.LIKE_ANOTHER):
            # torch itself passes on the options of a tensor that is really on the CPU
            caller = Called.innermost()
            if caller and name.split("_")[0] not in caller:
                del options["device"]
                return None
        return self.places.named(given)

    def _made(self, func: Any, name: str, args: Any, options: dict[str, Any], asked: torch.device | None) -> Any:
        """Make a tensor of no other, on the device that was asked for."""
        if asked in (None, CPU) and Called.innermost().strip("_") not in rules.FACTORIES:
            asked = self.called.gpu() or asked  # inside of an operation on that GPU
        device = asked or CPU
        self._check_generator(name, options.get("generator"), device)
        if device.type == "cpu":
            return self._on_host(func, args, options)
        result = self._run(func, args, options, device)
        self.places.put(result, device)
        if name not in rules.ALLOCATIONS:
            self._launched(name)
        return result

    def _computed(
        self,
        func: Any,
        name: str,
        args: Any,
        options: dict[str, Any],
        tensors: list[Tensor],
        asked: torch.device | None,
    ) -> Any:
        """Run an operation on tensors."""
        devices = [self.places.of(tensor) for tensor in tensors]
        on_gpu = [device for device in devices if device.type == "cuda"]
        if on_gpu:
            self._check_devices(func, name, args, tensors, devices, on_gpu)
            self._check_generator(name, options.get("generator"), on_gpu[0])
            self._check_determinism(name, args)
            if name in rules.WAITING or rules.indexes_by_mask(name, args):
                self.host_waits(name)
                if name in ("_local_scalar_dense", "item", "is_nonzero", "equal"):
                    self.record.copy("to host", "blocking")
        else:
            self._check_host_memory(func, args)
        device = asked or (on_gpu[0] if on_gpu else CPU)
        if on_gpu or device.type == "cuda":
            result = self._run(func, args, options, on_gpu[0] if on_gpu else device)
        else:
            result = self._on_host(func, args, options)
        if device.type == "cuda":
            for tensor in rules.tensors_in(result):
                if not any(tensor is known for known in tensors):
                    self.places.put(tensor, device)
            if rules.operation(func).launches:
                self._launched(name, rules.launches(name, args))
        return result

    # -- streams and graphs --------------------------------------------------------------------------------------------

    def _run(self, func: Any, args: Any, options: dict[str, Any], device: torch.device = _FIRST) -> Any:
        """Run an operation on a GPU: on the current stream, or as a part of a graph."""
        if self.recording is None:
            with self.draws.by(func, options, device):
                result = func(*args, **options)
            self._order(func, args, options, result)
            return result
        if self.recording.has_failed:
            refuse(FAILED)
        if self.streams.current != self.recording.stream:
            refuse("work on a stream that is not recorded, while another one is")
        for tensor in rules.tensors_in(args, options):
            if self.places.of(tensor).type == "cpu" and self.recording.is_from_before(tensor):
                refuse(f"{func} in a graph takes a number from the host, which replays would not read again")
        return self.recording.run(func, args, options, device)

    def _on_host(self, func: Any, args: Any, options: dict[str, Any]) -> Any:
        """Run an operation on the CPU, which a graph does not repeat."""
        if self.recording is None:
            return func(*args, **options)
        if rules.operation(func).name in rules.RANDOM:
            refuse(f"{func} draws from the host's stream in a graph: replays would not move it")
        for tensor in self._written(func, args):
            if self.recording.is_from_before(tensor):
                refuse(f"{func} changes host memory in a graph: replays would not do so")
        given = {tensor.untyped_storage()._cdata for tensor in rules.tensors_in(args, options)}
        result = func(*args, **options)
        for tensor in rules.tensors_in(result):
            if tensor.untyped_storage()._cdata not in given:
                self.recording.remember(tensor)
        return result

    def _order(self, func: Any, args: Any, options: dict[str, Any], result: Any) -> None:
        """Let the current stream use memory."""
        if not self.streams.are_several:
            return
        known = rules.operation(func)
        given = [t.untyped_storage() for t in rules.tensors_in(args, options) if self.places.of(t).type == "cuda"]
        old = {storage._cdata for storage in given}
        for tensor in rules.tensors_in(result):
            if (storage := tensor.untyped_storage())._cdata not in old:
                self.streams.made(storage)
                if known.name not in rules.ALLOCATIONS:
                    self.streams.work([], [storage], known.name)
        if known.launches:
            self.streams.work(given, [t.untyped_storage() for t in self._written(func, args)], known.name)

    def _written(self, func: Any, args: Any) -> Iterator[Tensor]:
        """Yield the tensors that an operation writes to."""
        for place in rules.operation(func).writes:
            if place < len(args):  # else it has a name
                yield from rules.tensors_in(args[place])

    def _launched(self, name: str, launches: int = 1) -> None:
        if self.recording is None:
            self.record.kernel(name, launches)

    def check_recording(self, what: str) -> None:
        """Refuse something that cannot be in a graph."""
        if self.recording is not None:
            self.recording.has_failed = True
            refuse(f"operation not permitted when stream is capturing: {what}")

    def replay(self, recording: Recording) -> None:
        """Run a graph on the current stream."""
        self.check_recording("a replay")
        if gone := recording.given_back():
            refuse(f"a replay reads memory that was given back: {len(gone)} tensors, one of {gone[0].nbytes} bytes")
        recording.replay()
        storages = [tensor.untyped_storage() for tensor in recording.memory]
        self.streams.work(storages, storages, "a replay")
        self.record.kernel("replay")

    # -- copies --------------------------------------------------------------------------------------------------------

    def _copied(self, func: Any, args: Any, options: dict[str, Any], asked: torch.device | None) -> Tensor:
        """Run ``_to_copy``: another device, another type, or both."""
        [old, *_] = args
        source = self.places.of(old)
        goal = source if asked is None else asked
        if goal == CPU and Called.innermost() == _BACKWARD:
            goal = source  # autograd casts a gradient back to the options of a tensor that is really on the CPU
        if source.type == goal.type == "cpu":
            self._check_host_memory(func, args)
        new: Tensor = (self._on_host if source.type == goal.type == "cpu" else self._run)(func, args, options)
        if new.untyped_storage()._cdata == old.untyped_storage()._cdata:
            new = new.clone()
        self.places.put(new, goal)
        asynchronous = bool(options.get("non_blocking"))
        if asynchronous and source.type == "cuda" and goal.type == "cpu":
            self.places.pin(new)  # as torch does, so that the copy runs along
        self._transfer(old, new, asynchronous)
        return new

    def _copy(self, func: Any, args: Any, options: dict[str, Any]) -> Any:
        """Run ``copy_``."""
        new, old = args[:2]
        asynchronous = bool(args[2] if len(args) > 2 else options.get("non_blocking"))
        self._check_host_memory(func, args)
        on_host = self.places.of(new).type == self.places.of(old).type == "cpu"
        result = (self._on_host if on_host else self._run)(func, args, options)
        self._transfer(old, new, asynchronous)
        return result

    def _transfer(self, old: Tensor, new: Tensor, asynchronous: bool) -> None:
        """Count a copy between devices; a wait, unless it is asynchronous and the host's memory is page-locked."""
        source, goal = self.places.of(old), self.places.of(new)
        if source.type == goal.type == "cpu":
            return
        if source.type == goal.type:
            if source != goal:
                refuse(f"a copy from {source} to {goal}: each rank has one GPU")
            self._launched("copy_")
            return
        self.check_recording("a copy between host and device")
        to_gpu = goal.type == "cuda"
        host = old if to_gpu else new
        pinned = self.places.is_pinned(host)
        self.record.copy("to device" if to_gpu else "to host", "asynchronous" if asynchronous else "blocking")
        if asynchronous and pinned:
            self.places.begin_copy(host, to_gpu)
        elif not asynchronous or not to_gpu:
            self.host_waits(f"blocking copy {'to the device' if to_gpu else 'to the host'}")
        elif host.nbytes > 65_536:  # up to that size the driver keeps a copy of its own
            self.host_waits("copy to the device of memory that is not page-locked")

    def host_waits(self, why: str) -> None:
        """The host waits for the current stream."""
        self.check_recording(why)
        self.record.wait(why)
        self.places.end_copies()
        self.streams.host_waits(self.streams.current)

    # -- refusals ------------------------------------------------------------------------------------------------------

    def _check_devices(
        self, func: Any, name: str, args: Any, tensors: list[Tensor], devices: list[torch.device],
        on_gpu: list[torch.device],
    ) -> None:  # fmt: skip
        """Refuse tensors on several devices, where CUDA does."""
        if len(set(on_gpu)) > 1:
            refuse(f"tensors on {sorted(set(map(str, on_gpu)))} in {func}")
        if len(on_gpu) == len(tensors) or name in rules.ANY_DEVICES:
            return
        on_cpu = [tensor for tensor, device in zip(tensors, devices, strict=True) if device.type == "cpu"]
        if name in rules.INDEXING:
            self._check_index(func, args, on_cpu)
            return
        if not (rules.operation(func).numbers_from_host and all(tensor.dim() == 0 for tensor in on_cpu)):
            listed = ", ".join(f"{list(t.shape)} {t.dtype} {d}" for t, d in zip(tensors, devices, strict=True))
            refuse(f"Expected all tensors to be on the same device in {func}: {listed}")

    def _check_index(self, func: Any, args: Any, on_cpu: list[Tensor]) -> None:
        """An index may be on the CPU: torch copies it, and waits."""
        indices = rules.tensors_in(args[1])
        if self.places.of(args[0]).type == "cpu":
            refuse(f"indices should be either on cpu or on the same device as the indexed tensor (cpu) in {func}")
        for tensor in on_cpu:
            if any(tensor is index for index in indices):
                self.record.copy("to device", "blocking")
                self.host_waits("index on the host")
            elif tensor.dim():
                refuse(f"Expected all tensors to be on the same device in {func}: {list(tensor.shape)} on the CPU")

    def _check_generator(self, name: str, generator: torch.Generator | None, device: torch.device) -> None:
        if generator is None:
            return
        own = self.generators.get(generator._cdata, CPU)  # type: ignore[attr-defined]
        if own != device:
            refuse(f"Expected a '{device}' device type for generator but found '{own}' in {name}")
        known = self.recording is None or generator._cdata in self.recording.generators  # type: ignore[attr-defined]
        if not known:
            refuse(f"{name} in a graph draws from a generator that was not registered: replays would not move it")

    def _check_determinism(self, name: str, args: Any) -> None:
        if torch.are_deterministic_algorithms_enabled() and rules.lacks_determinism(name, args):
            refuse(f"{name} does not have a deterministic implementation on CUDA")

    def _check_host_memory(self, func: Any, args: Any) -> None:
        """Refuse to touch host memory that a copy still needs."""
        if not self.places.copies_are_under_way:
            return
        written = rules.operation(func).writes
        for place, value in enumerate(args):
            writes = place in written
            for tensor in rules.tensors_in(value):
                if self.places.of(tensor).type != "cpu":
                    continue
                if writes and (where := self.places.reader(tensor)) is not None:
                    refuse(f"{func} overwrites host memory that a copy to the GPU still reads, begun at {where}")
                self.check_readable(tensor, str(func))

    def check_readable(self, tensor: Tensor, what: str) -> None:
        """Refuse to read host memory that a copy still writes."""
        if (where := self.places.writer(tensor)) is not None:
            refuse(f"{what} reads host memory that a copy from the GPU still writes, begun at {where}")

    def _check_collective(self, name: str, args: Any, tensors: list[Tensor]) -> None:
        for problem in self.collectives.problems(name, args, tensors):
            refuse(problem)
