"""torch.cuda's streams, events and graphs, as programs see them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from simulated.graphs import Recording
from simulated.kernels import FAILED, Kernels, refuse


def queues(kernels: Kernels) -> Iterator[tuple[Any, str, Any]]:
    """Yield owner, name and new value of what is put in torch's place."""
    streams, cuda, stream = kernels.streams, torch.cuda, _stream(kernels)
    graph, graph_context = _graph(kernels), _graph_context(kernels)
    yield cuda, "Stream", stream
    yield cuda, "Event", _event(kernels)
    yield cuda, "current_stream", lambda device=None: stream(device, streams.current)
    yield cuda, "stream", lambda stream: streams.on(stream.cuda_stream)
    yield cuda, "CUDAGraph", graph
    yield cuda, "graph", graph_context
    yield cuda, "is_current_stream_capturing", lambda: kernels.recording is not None
    yield Tensor, "record_stream", lambda self, stream: streams.keep(self, stream.cuda_stream)


def _event(kernels: Kernels) -> type:
    streams = kernels.streams

    class Event:
        def __init__(self, *_: Any, **__: Any) -> None:
            self._clock: dict[int, int] = {}

        def record(self, stream: Any = None) -> None:
            self._clock = streams.now(streams.current if stream is None else stream.cuda_stream)

        def wait(self, stream: Any = None) -> None:
            streams.wait(streams.current if stream is None else stream.cuda_stream, self._clock)

    return Event


def _stream(kernels: Kernels) -> Callable[..., Any]:
    places, streams = kernels.places, kernels.streams

    class Stream:
        def __init__(self, device: Any = None, number: int | None = None) -> None:
            self.device = places.named("cuda" if device is None else device)
            self.cuda_stream = streams.open() if number is None else number

        def synchronize(self) -> None:
            kernels.check_recording("synchronize")
            kernels.record.wait("synchronize")
            places.end_copies()
            streams.host_waits(self.cuda_stream)

        def wait_stream(self, stream: Any) -> None:
            kernels.check_recording("a wait for another stream")
            streams.wait(self.cuda_stream, streams.now(stream.cuda_stream))

        def wait_event(self, event: Any) -> None:
            event.wait(self)

        def record_event(self, event: Any = None) -> Any:
            event = torch.cuda.Event() if event is None else event
            event.record(self)
            return event

    return Stream


def _graph(kernels: Kernels) -> type:
    class CUDAGraph:
        def __init__(self) -> None:
            self.generators: list[torch.Generator] = []
            self.recording: Recording | None = None
            self.number = 0

        def register_generator_state(self, generator: torch.Generator) -> None:
            self.generators.append(generator)

        def pool(self) -> int:
            return self.number

        def replay(self) -> None:
            assert self.recording is not None, "nothing was recorded"
            kernels.replay(self.recording)

    return CUDAGraph


def _graph_context(kernels: Kernels) -> Callable[..., AbstractContextManager[None]]:
    streams = kernels.streams

    @contextmanager
    def graph(cuda_graph: Any, pool: int | None = None, stream: Any = None, **_: Any) -> Iterator[None]:
        torch.cuda.synchronize()
        number = streams.open() if stream is None else stream.cuda_stream
        cuda_graph.number = kernels.pools.join(cuda_graph, pool)
        with streams.on(number):
            kernels.recording = recording = Recording(cuda_graph.generators, number, kernels.draws)
            try:
                yield
            finally:
                kernels.recording = None
                recording.end()
                kernels.record.captures.append(not recording.has_failed)
                if recording.has_failed:  # also if the program has caught the error of the first refusal
                    refuse(FAILED)
            cuda_graph.recording = recording

    return graph
