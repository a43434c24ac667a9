"""The simulated GPU itself: each of its refusals is provoked, and its counts are counted by hand."""

import copy
import os
import re
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import simulated
from failing import run_on_ranks
from simulated import SimulatedGPUError, rules
from simulated.collectives import DUPLICATE


@pytest.fixture
def gpu():
    """Two simulated GPUs, and what is counted."""
    with simulated.cuda(2) as record:
        yield record


@pytest.fixture
def nccl(gpu):
    """A process group of one rank that is said to be NCCL's."""
    if not dist.is_initialized():  # a fit in this process leaves its own
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    return dist.new_group(backend="nccl")


@pytest.fixture
def deterministic(gpu):
    """Deterministic algorithms are asked for."""
    torch.use_deterministic_algorithms(True)
    yield gpu
    torch.use_deterministic_algorithms(False)


def on_gpu(*shape):
    return torch.ones(*shape, device="cuda")


# -- where tensors are -------------------------------------------------------------------------------------------------


def test_nothing_is_left_behind():
    with simulated.cuda(3):
        assert torch.cuda.device_count() == 3
        assert on_gpu(1).is_cuda
    assert torch.ones(1).add(1).device == torch.device("cpu")
    assert "device" not in vars(torch.Tensor)
    assert not torch.cuda.is_available()
    assert torch.Generator.__module__ == "torch._C"


def test_results_are_where_their_tensors_are(gpu):
    x = torch.rand(4, 3).to("cuda")
    layer = nn.Linear(3, 2).to("cuda")
    found = F.cross_entropy(layer(x).relu(), torch.tensor([0, 1, 1, 0], device="cuda"))
    found.backward()
    made = [x[1:], x.new_zeros(3), torch.empty_like(x), x.flip(0), x.sort().values, x.double(), layer.weight.grad]
    made += [copy.deepcopy(layer).weight, x.clone(), torch.cat([x, x]), x.unique(), torch.where(x > 0, x, 0.0)]
    assert {tensor.device for tensor in (*made, found)} == {torch.device("cuda", 0)}
    assert {tensor.device.type for tensor in (x.cpu(), x.new_zeros(3, device="cpu"), torch.zeros(2))} == {"cpu"}


def test_numbers_are_those_of_the_cpu(gpu):
    x = torch.rand(5, 6)
    assert torch.equal((x.to("cuda") @ x.T.to("cuda")).exp().cpu(), (x @ x.T).exp())
    draws = [torch.rand(3, generator=torch.Generator(device=d).manual_seed(1), device=d) for d in ("cpu", "cuda")]
    assert draws[0].tolist() == draws[1].tolist()


def test_a_file_says_where_its_tensors_were(gpu, tmp_path):
    torch.save({"x": on_gpu(3)}, tmp_path / "x.pt")
    assert torch.load(tmp_path / "x.pt")["x"].is_cuda
    assert not torch.load(tmp_path / "x.pt", map_location="cpu")["x"].is_cuda


def refuses(call):
    try:
        call()
    except SimulatedGPUError as error:
        return bool(re.search(r"same device|tensors on|indices should be", str(error)))
    return False


def test_mixed_devices_are_refused(gpu):
    host = torch.ones(3)
    calls = {
        "arithmetic": lambda: on_gpu(3) + host,
        "in place": lambda: host.add_(on_gpu(3)),
        "product": lambda: on_gpu(2, 3) @ host,
        "index": lambda: host[torch.zeros(1, dtype=torch.int64, device="cuda")],
        "gather": lambda: on_gpu(3).index_select(0, torch.zeros(1, dtype=torch.int64)),
        "model": lambda: nn.Linear(3, 2).to("cuda")(host),
        "loss": lambda: F.cross_entropy(on_gpu(2, 3), torch.tensor([0, 1])),
        "list": lambda: torch.cat([on_gpu(3), host]),
        "GPUs": lambda: on_gpu(3) + torch.ones(3, device="cuda:1"),
    }
    assert [name for name, call in calls.items() if not refuses(call)] == []
    assert (on_gpu(3) * torch.tensor(2.0)).tolist() == [2.0, 2.0, 2.0], "a number may come from the host"


def test_a_backward_pass_with_mixed_devices_is_refused(gpu):
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * torch.ones(3)

    x = on_gpu(3).requires_grad_()
    with pytest.raises(SimulatedGPUError, match="same device"):
        Wrong.apply(x).sum().backward()


def test_the_host_cannot_look_into_a_gpu(gpu):
    for look in (torch.Tensor.numpy, lambda x: x.__array__(), torch.Tensor.pin_memory):
        with pytest.raises(SimulatedGPUError, match="cuda"):
            look(on_gpu(2))


def test_there_are_only_so_many_gpus(gpu):
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(1, device="cuda:2")


# -- randomness, determinism -------------------------------------------------------------------------------------------


def test_generators_of_another_device_are_refused(gpu):
    with pytest.raises(SimulatedGPUError, match="Expected a 'cuda:0' device type for generator but found 'cpu'"):
        torch.rand(3, generator=torch.Generator(), device="cuda")
    with pytest.raises(SimulatedGPUError, match="Expected a 'cpu' device type for generator"):
        torch.rand(3, generator=torch.Generator(device="cuda"))
    with pytest.raises(SimulatedGPUError, match="generator"):
        on_gpu(3).bernoulli_(0.5, generator=torch.Generator())


def test_what_has_no_deterministic_form_is_refused(deterministic):
    x = on_gpu(1, 1, 4, 4).requires_grad_()
    with pytest.raises(SimulatedGPUError, match="deterministic"):
        F.adaptive_avg_pool2d(x, 3).sum().backward()
    with pytest.raises(SimulatedGPUError, match="deterministic"):
        on_gpu(4).cumsum(0)
    assert on_gpu(4).long().cumsum(0).tolist() == [1, 2, 3, 4]
    assert torch.ones(4).cumsum(0).tolist() == [1, 2, 3, 4]


def test_without_determinism_it_may_run(gpu):
    assert on_gpu(4).cumsum(0).is_cuda


# -- asynchronous copies -----------------------------------------------------------------------------------------------


def test_host_memory_is_not_overwritten_while_a_copy_reads_it(gpu):
    host = torch.ones(3).pin_memory()
    host.to("cuda", non_blocking=True)
    with pytest.raises(SimulatedGPUError, match="still reads"):
        host.zero_()
    torch.cuda.synchronize()
    host.zero_()


def test_host_memory_is_not_read_while_a_copy_writes_it(gpu):
    host = torch.empty(3, pin_memory=True)
    host.copy_(on_gpu(3), non_blocking=True)
    for read in (host.sum, host.numpy, host.tolist, host.data_ptr):
        with pytest.raises(SimulatedGPUError, match="still writes"):
            read()
    torch.cuda.current_stream().synchronize()
    assert host.tolist() == [1.0, 1.0, 1.0]


def test_an_asynchronous_copy_to_new_host_memory_is_not_there_yet(gpu):
    host = on_gpu(3).to("cpu", non_blocking=True)
    with pytest.raises(SimulatedGPUError, match="still writes"):
        host.numpy()
    torch.cuda.synchronize()
    assert host.tolist() == [1.0, 1.0, 1.0]


def test_a_wait_of_any_kind_ends_copies(gpu):
    host = torch.ones(3).pin_memory()
    assert float(host.to("cuda", non_blocking=True).sum()) == 3
    host.zero_()


# -- collectives -------------------------------------------------------------------------------------------------------


def test_nccl_takes_tensors_of_this_rank_s_gpu(nccl):
    dist.all_reduce(on_gpu(3), group=nccl)
    with pytest.raises(SimulatedGPUError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(3), group=nccl)
    with pytest.raises(SimulatedGPUError, match="but the current device is 0"):
        dist.all_reduce(torch.ones(3, device="cuda:1"), group=nccl)
    objects = ["x"]
    dist.broadcast_object_list(objects, src=0, group=nccl)
    assert objects == ["x"]


def test_nccl_cannot_reduce_everything(nccl):
    with pytest.raises(SimulatedGPUError, match="data type is not supported"):
        dist.all_reduce(torch.ones(3, dtype=torch.int16, device="cuda"), group=nccl)
    with pytest.raises(SimulatedGPUError, match="must be contiguous"):
        dist.all_reduce(on_gpu(2, 3).T, group=nccl)
    with pytest.raises(SimulatedGPUError, match="cannot reduce by BOR"):
        dist.all_reduce(torch.ones(3, dtype=torch.int64, device="cuda"), op=dist.ReduceOp.BOR, group=nccl)


def test_gloo_takes_the_host_s_tensors(nccl):
    group = dist.new_group(backend="gloo")
    dist.all_reduce(torch.ones(3, dtype=torch.float64), group=group)
    with pytest.raises(SimulatedGPUError, match="No backend type"):
        dist.all_reduce(torch.ones(3), group=nccl)


def in_different_order(folder):
    """What each of two ranks does: the same two collectives, but not in one order."""
    with simulated.cuda(2, board=folder / "board"):
        dist.init_process_group("nccl")
        rank = dist.get_rank()
        torch.cuda.set_device(rank)
        small, large = torch.ones(2, device="cuda"), torch.ones(3, device="cuda")
        dist.all_reduce(small)
        assert small.tolist() == [2.0, 2.0]
        message = ""
        try:
            for tensor in (small, large) if rank else (large, small):
                dist.all_reduce(tensor, async_op=True)
        except SimulatedGPUError as error:
            message = str(error)
        (folder / f"message-{rank}").write_text(message)


@pytest.mark.dist
def test_ranks_whose_collectives_differ_are_found(tmp_path):
    run_on_ranks(in_different_order, tmp_path)
    messages = [(tmp_path / f"message-{rank}").read_text() for rank in range(2)]
    assert any("collective 1: rank" in message and "[3] float32" in message for message in messages), messages


def on_one_gpu(folder):
    """What each of two ranks does: both take the same GPU, then each its own."""
    messages = []
    for buses in ([7], [8 + int(os.environ["RANK"])]):
        with simulated.cuda(1, buses=buses):
            if not dist.is_initialized():
                dist.init_process_group("nccl")
            try:
                dist.all_reduce(torch.ones(2, device="cuda"), group=dist.new_group(backend="nccl"))
            except SimulatedGPUError as error:
                messages.append(str(error))
            dist.all_reduce(torch.ones(2), group=dist.new_group(backend="gloo"))
    (folder / f"messages-{dist.get_rank()}").write_text("\n".join(messages))


@pytest.mark.dist
def test_nccl_refuses_two_ranks_of_one_gpu(tmp_path):
    run_on_ranks(on_one_gpu, tmp_path)
    for rank in range(2):
        [message, _] = (tmp_path / f"messages-{rank}").read_text().splitlines()
        assert message == DUPLICATE


def bound(folder):
    """What each of three ranks does: it is bound to its GPU, and opens groups of two ranks."""
    with simulated.cuda(3):
        rank = int(os.environ["RANK"])
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
        error = ""
        try:
            dist.new_group([0, 1], backend="gloo")
        except AttributeError as refusal:
            error = str(refusal)
        (folder / f"error-{rank}").write_text(error)
        while not all((folder / f"error-{other}").exists() for other in range(3)):  # the store ends with rank 0
            time.sleep(0.01)


@pytest.mark.dist
def test_a_group_of_some_ranks_cannot_be_split_from_a_bound_one(tmp_path):
    """In the real world the others hang, too; here they have nothing to wait for."""
    run_on_ranks(bound, tmp_path, ranks=3)
    assert "perform_nocolor_split" in (tmp_path / "error-2").read_text()


def waited(folder):
    """What each of two ranks does: it lets the GPU wait for a sum, then waits itself, then the same by gloo."""
    with simulated.cuda(2) as gpu:
        dist.init_process_group("nccl")
        torch.cuda.set_device(dist.get_rank())
        number, counts = torch.ones(2, device="cuda"), []
        for group, ends in ((None, False), (None, True), (dist.new_group(backend="gloo"), True)):
            work = dist.all_reduce(number if group is None else torch.ones(2), group=group, async_op=True)
            work.wait()
            while ends and not work.is_completed():
                time.sleep(1e-3)
            counts.append(gpu.reading().waits)
        torch.save(counts, folder / f"{dist.get_rank()}.pt")


@pytest.mark.dist
def test_a_host_that_asks_until_a_sum_is_done_has_waited(tmp_path):
    run_on_ranks(waited, tmp_path)
    for rank in range(2):
        assert torch.load(tmp_path / f"{rank}.pt", weights_only=True) == [0, 1, 1]


# -- FAISS -------------------------------------------------------------------------------------------------------------


def test_faiss_wants_the_current_device(gpu):
    import faiss

    query = torch.eye(3, device="cuda:1")
    with pytest.raises(SimulatedGPUError, match="a race"):
        faiss.knn_gpu(None, query, query, 1, metric=faiss.METRIC_L2, device=1)
    with torch.cuda.device(1):
        _, index = faiss.knn_gpu(None, query, query, 1, metric=faiss.METRIC_L2, device=1)
    assert index.flatten().tolist() == [0, 1, 2]
    assert torch.cuda.current_device() == 0


# -- counts ------------------------------------------------------------------------------------------------------------


def count(gpu, call):
    before = gpu.reading()
    call()
    return gpu.reading().since(before)


def test_waits_and_copies_are_counted(gpu):
    x, mask = on_gpu(4), torch.tensor([True, False, True, False], device="cuda")
    pinned, index = torch.ones(4).pin_memory(), torch.tensor([1])
    # kernels, waits, copies to the host, copies to the device
    for call, wanted in {
        lambda: x + x: (1, 0, 0, 0),
        lambda: x[1:].view(3, 1): (0, 0, 0, 0),
        lambda: torch.empty(3, device="cuda"): (0, 0, 0, 0),
        lambda: float(x.sum()): (1, 1, 1, 0),
        lambda: x.tolist(): (0, 1, 1, 0),
        lambda: x.cpu(): (0, 1, 1, 0),
        lambda: x[mask]: (1, 1, 0, 0),
        lambda: x.masked_fill_(mask, 0.0): (1, 0, 0, 0),
        lambda: pinned.to("cuda"): (0, 1, 0, 1),
        lambda: pinned.to("cuda", non_blocking=True): (0, 0, 0, 1),
        lambda: torch.ones(4).to("cuda", non_blocking=True): (0, 0, 0, 1),
        lambda: torch.ones(40_000).to("cuda", non_blocking=True): (0, 1, 0, 1),
        lambda: x[index]: (1, 1, 0, 1),
        lambda: torch.cuda.synchronize(): (0, 1, 0, 0),
    }.items():
        assert count(gpu, call) == wanted, f"line {call.__code__.co_firstlineno}"


def test_lists_of_tensors_take_few_launches():
    few, many, large = ([torch.empty(n)] * k for n, k in ((8, 3), (8, 200), (30_000_000, 1)))
    assert rules.launches("add", (few[0], few[0])) == 1
    assert rules.launches("_foreach_add_", (few, few)) == 1
    assert rules.launches("_foreach_add_", (many, many)) == 4  # of 64
    assert rules.launches("_foreach_mul_", (many,)) == 2  # of 110
    assert rules.launches("_foreach_mul_", (large,)) == 2  # of 320 chunks
    assert rules.launches("_fused_adamw_", (many, many, many, many, [], many)) == 6  # of 36


def test_lines_of_fedsim_are_named(gpu):
    from fedsim.core.store import MemoryStore

    MemoryStore(torch.device("cpu")).write("town0", {"state": on_gpu(3)})
    [((why, where), times)] = gpu.waits.items()
    assert (why, times) == ("blocking copy to the host", 1)
    assert where.startswith("core/store.py:")
