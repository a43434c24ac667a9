"""Streams and CUDA graphs of the simulated GPU: each refusal is provoked, and replays compute what was recorded."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import simulated
from simulated import SimulatedGPUError
from simulated.kernels import FAILED


@pytest.fixture
def gpu():
    with simulated.cuda(1) as record:
        yield record


def on_gpu(*shape):
    return torch.ones(*shape, device="cuda")


def recorded(work, *generators):
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        work()
    return graph


# -- graphs ------------------------------------------------------------------------------------------------------------


def test_a_recording_computes_nothing_and_a_replay_does(gpu):
    x, y, made = on_gpu(3), on_gpu(3), []

    def work():
        y.add_(x)
        made.append(y * 2)

    graph = recorded(work)
    assert y.tolist() == [1.0, 1.0, 1.0]
    assert made[0].tolist() != [4.0, 4.0, 4.0], "nothing was computed yet"
    before = gpu.reading()
    for wanted in (2.0, 12.0):
        graph.replay()
        assert (y.tolist(), made[0].tolist()) == ([wanted] * 3, [wanted * 2] * 3)
        x.fill_(10.0)
    assert gpu.kernels["replay"] == 2
    assert gpu.reading().since(before).kernels == 4, "two replays, two fills"


def test_a_network_s_replayed_steps_have_the_bits_of_plain_ones(gpu):
    def network():
        torch.manual_seed(0)
        layers = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 2)
        ).cuda()
        return layers, torch.optim.SGD(layers.parameters(), lr=0.1, momentum=0.9)

    def step(layers, optimizer, images):
        F.cross_entropy(layers(images), torch.zeros(len(images), dtype=torch.int64, device="cuda")).backward()
        optimizer.step()
        optimizer.zero_grad()

    batches = [torch.rand(2, 3, 8, 8).cuda() for _ in range(5)]
    (plain, one), (other, two), images = network(), network(), torch.zeros(2, 3, 8, 8, device="cuda")
    for batch in batches:
        step(plain, one, batch)
    step(other, two, batches[0])
    graph = recorded(lambda: step(other, two, images))
    for batch in batches[1:]:
        images.copy_(batch)
        graph.replay()
    for a, b in zip(plain.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_random_numbers_go_on(gpu):
    generators = [torch.Generator("cuda").manual_seed(3) for _ in range(2)]
    x = on_gpu(4)
    graph = recorded(lambda: x.bernoulli_(0.5, generator=generators[0]), generators[0])
    for _ in range(3):
        graph.replay()
        assert x.tolist() == on_gpu(4).bernoulli_(0.5, generator=generators[1]).tolist()


def capturable(flag):
    weight = nn.Parameter(on_gpu(3))
    adam = torch.optim.Adam([weight], capturable=flag, foreach=True)
    weight.grad = on_gpu(3)
    adam.step()
    return adam.step


REFUSED = {
    "a wait": lambda x, host: float(x.sum()),
    "a comparison": lambda x, host: bool(x[0] > 0),
    "synchronize": lambda x, host: torch.cuda.synchronize(),
    "a copy to the host": lambda x, host: x.to("cpu", non_blocking=True),
    "a copy from the host": lambda x, host: x.copy_(host, non_blocking=True),
    "page-locked memory": lambda x, host: host.pin_memory(),
    "a number on the host": lambda x, host: x.mul_(host[0]),
    "host memory that changes": lambda x, host: host.add_(1),
    "the host's random stream": lambda x, host: torch.randperm(3),
    "a generator that was not registered": lambda x, host: x.bernoulli_(0.5, generator=torch.Generator("cuda")),
    "a generator's state": lambda x, host: torch.cuda.get_rng_state(),
    "an optimizer that counts on the host": lambda x, host: capturable(False)(),
    "another stream": lambda x, host: on_another_stream(x),
}  # fmt: skip


def on_another_stream(x):
    with torch.cuda.stream(torch.cuda.Stream()):
        x.add_(1)


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_graph_cannot_hold_is_refused(what, gpu):
    x, host = on_gpu(3), torch.ones(3)
    step = capturable(False) if "optimizer" in what else None
    with pytest.raises(SimulatedGPUError):
        recorded((lambda: step()) if step else (lambda: REFUSED[what](x, host)))
    assert (x.tolist(), host.tolist()) == ([1.0] * 3, [1.0] * 3)
    (x + 1).tolist()  # nothing is recorded any more


def test_a_recording_that_has_failed_stays_failed(gpu):
    """Whoever catches the error gets others: from the next work on the GPU, and at the end, where the first is kept."""
    x, said = on_gpu(3), []

    def work():
        for call in (lambda: float(x.sum()), lambda: x.add_(1)):
            try:
                call()
            except SimulatedGPUError as error:
                said.append(str(error).splitlines()[0])

    graph = torch.cuda.CUDAGraph()
    with pytest.raises(SimulatedGPUError, match=FAILED), torch.cuda.graph(graph):
        work()
    assert said == ["operation not permitted when stream is capturing: _local_scalar_dense", FAILED]
    with pytest.raises(AssertionError, match="nothing was recorded"):
        graph.replay()
    with pytest.raises(SimulatedGPUError, match=FAILED) as raised, torch.cuda.graph(graph):
        float(x.sum())
    assert "not permitted" in str(raised.value.__context__)
    assert gpu.captures == [False, False]
    assert x.tolist() == [1.0] * 3


def test_what_a_graph_can_hold_is_not_refused(gpu):
    x = on_gpu(3)
    for work in (lambda: x.mul_(2.0), lambda: x.add_(torch.rand(3, device="cuda")), capturable(True)):
        recorded(work).replay()


def test_memory_that_was_given_back_is_not_read(gpu):
    given, kept = {"x": on_gpu(3)}, on_gpu(3)
    graph = recorded(lambda: kept.add_(given["x"]))
    graph.replay()
    del given["x"]
    gc.collect()
    with pytest.raises(SimulatedGPUError, match="given back"):
        graph.replay()


def test_a_pool_is_gone_with_its_last_graph(gpu):
    x = on_gpu(3)
    first = recorded(lambda: x.add_(1))
    pool = first.pool()
    second = torch.cuda.CUDAGraph()
    with torch.cuda.graph(second, pool=pool):
        x.add_(1)
    del first, second
    gc.collect()
    with pytest.raises(SimulatedGPUError, match="use_count"), torch.cuda.graph(torch.cuda.CUDAGraph(), pool=pool):
        x.add_(1)


# -- streams -----------------------------------------------------------------------------------------------------------


def test_work_on_two_streams_must_be_ordered(gpu):
    side, main, x = torch.cuda.Stream(), torch.cuda.current_stream(), on_gpu(3)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        y = x + 1
    with pytest.raises(SimulatedGPUError, match="a race"):
        y.sum()
    main.wait_stream(side)
    y.sum()


@pytest.mark.parametrize("how", ["event", "wait_stream", "synchronize", "number"])
def test_there_are_several_ways_to_wait(how, gpu):
    side, main, x = torch.cuda.Stream(), torch.cuda.current_stream(), on_gpu(3)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        y = x + 1
        done = side.record_event()
        if how == "number":
            y.tolist()
    {"event": lambda: main.wait_event(done), "wait_stream": lambda: main.wait_stream(side), "number": lambda: None,
     "synchronize": torch.cuda.synchronize}[how]()  # fmt: skip
    assert y.sum().tolist() == 6


def test_an_event_is_as_old_as_its_record(gpu):
    side, main, x = torch.cuda.Stream(), torch.cuda.current_stream(), on_gpu(3)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        done = side.record_event()
        y = x + 1
    main.wait_event(done)
    with pytest.raises(SimulatedGPUError, match="a race"):
        y.sum()


def test_memory_is_not_written_while_another_stream_reads_it(gpu):
    side, main, x = torch.cuda.Stream(), torch.cuda.current_stream(), on_gpu(3)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        x.sum()
    with pytest.raises(SimulatedGPUError, match="a race"):
        x.add_(1)


@pytest.mark.parametrize("kept", [False, True])
def test_memory_is_not_given_back_while_another_stream_uses_it(kept, gpu):
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        x = on_gpu(3)
    main.wait_stream(side)
    x.sum()
    if kept:
        x.record_stream(main)
    del x
    gc.collect()

    def next_work():
        with torch.cuda.stream(side):
            on_gpu(3)

    if kept:
        next_work()
        return
    with pytest.raises(SimulatedGPUError, match="given back"):
        next_work()
