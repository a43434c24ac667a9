"""The flat buffer: views that alias the module, their order and alignment, and the check that they still do."""

import copy

import pytest
import torch
from torch import nn

from fedsim.core.flat import ALIGNMENT, FlatParameters


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def small_net():
    """Two layers with odd sizes, a norm with float and int buffers, and a second norm whose tensors stay private."""
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2), nn.BatchNorm1d(2))


def not_last(name):
    """All of ``small_net`` but its last norm is shared."""
    return not name.startswith("4.")


def everything(name):
    return True


def nothing(name):
    return False


def test_module_computes_the_same_after_binding():
    net, x = small_net().eval(), torch.randn(4, 3)
    before = net(x)
    FlatParameters(net, not_last)
    assert torch.equal(net(x), before)


def test_writing_the_buffer_changes_the_module():
    net, x = small_net().eval(), torch.randn(4, 3)
    flat = FlatParameters(net, not_last)
    before = net(x)
    flat.buffer.zero_()
    assert not torch.equal(net(x), before)
    assert all(not t.any() for t in [*net.parameters(), net[1].running_var, net[4].running_mean])
    flat.shared.fill_(2.0)
    flat.private.fill_(3.0)
    assert torch.equal(net[0].weight, torch.full((5, 3), 2.0))
    assert torch.equal(net[1].running_mean, torch.full((5,), 2.0))
    assert torch.equal(net[4].bias, torch.full((2,), 3.0))


class Centred(nn.Module):
    """Subtracts a moving mean, which changes in place in each step, as in losses with centres."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        x = self.norm(x)
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - self.mean


def test_a_buffer_may_change_in_place_after_a_batch_norm():
    net, x = Centred(), torch.randn(4, 3)
    plain = copy.deepcopy(net)
    flat = FlatParameters(net, everything)
    for module in (net, plain):
        for _ in range(2):
            module(x).square().sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), plain.state_dict().values(), strict=True))
    assert torch.equal(net.norm.weight.grad, plain.norm.weight.grad)
    flat.check()


@pytest.mark.parametrize("built_before", [False, True])
def test_optimizer_steps_change_the_buffer(built_before):
    net = small_net()
    if built_before:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    flat = FlatParameters(net, not_last)
    if not built_before:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    before = flat.buffer.clone()
    (net(torch.randn(6, 3)) * torch.randn(6, 2)).sum().backward()
    optimizer.step()
    flat.check()
    moved = {e.name for e in flat.entries if not torch.equal(flat.buffer[e.span], before[e.span])}
    # running statistics move in the forward pass, all others in the step; biases in front of norms have no gradient
    assert moved >= {e.name for e in flat.entries} - {"0.bias", "3.bias"}
    for entry in flat.entries:
        assert torch.equal(flat.buffer[entry.span].view(entry.shape), net.state_dict()[entry.name])


def test_load_state_dict_writes_through():
    net, other = small_net(), small_net()
    flat = FlatParameters(net, everything)
    net.load_state_dict(other.state_dict())
    flat.check()
    weight = next(e for e in flat.entries if e.name == "3.weight")
    assert torch.equal(flat.buffer[weight.span].view(2, 5), other[3].weight)


def test_order_is_shared_parameters_shared_buffers_private_parameters_private_buffers():
    flat = FlatParameters(small_net(), not_last)
    assert [(e.name, e.kind, e.shared) for e in flat.entries] == [
        ("0.weight", "parameter", True),
        ("0.bias", "parameter", True),
        ("1.weight", "parameter", True),
        ("1.bias", "parameter", True),
        ("3.weight", "parameter", True),
        ("3.bias", "parameter", True),
        ("1.running_mean", "buffer", True),
        ("1.running_var", "buffer", True),
        ("4.weight", "parameter", False),
        ("4.bias", "parameter", False),
        ("4.running_mean", "buffer", False),
        ("4.running_var", "buffer", False),
    ]
    assert [e.name for e in flat.shared_entries] == [e.name for e in flat.entries[:8]]


def test_entries_are_aligned_and_do_not_overlap():
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(9, 9), nn.Linear(1, 1))  # exactly 64 elements, more, and one
    flat = FlatParameters(net, everything)
    assert ALIGNMENT == 64
    assert [e.offset for e in flat.entries] == [0, 64, 128, 256, 320, 384]
    assert [e.numel for e in flat.entries] == [64, 8, 81, 9, 1, 1]
    assert len(flat.buffer) == 448
    assert flat.buffer.dtype is torch.float32


def test_padding_is_zero():
    net = small_net()
    flat = FlatParameters(net, not_last)
    flat.buffer[torch.cat([torch.arange(e.offset, e.offset + e.numel) for e in flat.entries])] = 0.0
    assert not flat.buffer.any()


def test_num_shared_and_num_shared_parameters():
    flat = FlatParameters(small_net(), not_last)
    assert flat.num_shared_parameters == 6 * 64
    assert flat.num_shared == 8 * 64
    assert len(flat.buffer) == 12 * 64
    assert flat.shared.shape == (8 * 64,)
    assert flat.private.shape == (4 * 64,)
    assert flat.private.data_ptr() == flat.buffer[8 * 64 :].data_ptr()


def test_nothing_shared():
    flat = FlatParameters(small_net(), nothing)
    assert flat.num_shared == flat.num_shared_parameters == 0
    assert flat.shared.shape == (0,)
    assert flat.shared_entries == []
    assert len(flat.private) == len(flat.buffer) == 12 * 64


def test_everything_shared():
    flat = FlatParameters(small_net(), everything)
    assert flat.num_shared == len(flat.buffer) == 12 * 64
    assert flat.num_shared_parameters == 8 * 64
    assert flat.private.shape == (0,)


def test_only_buffers_shared():
    flat = FlatParameters(small_net(), lambda name: "running" in name)
    assert flat.num_shared_parameters == 0
    assert flat.num_shared == 4 * 64


def test_module_without_tensors():
    flat = FlatParameters(nn.ReLU(), everything)
    flat.check()
    assert len(flat.buffer) == flat.num_shared == 0


def test_int_buffers_stay_where_they_are():
    net = small_net()
    counter = net[1].num_batches_tracked
    flat = FlatParameters(net, everything)
    assert not any("num_batches_tracked" in e.name for e in flat.entries)
    assert net[1].num_batches_tracked is counter
    net(torch.randn(4, 3))
    flat.buffer.zero_()
    assert net[1].num_batches_tracked == 1
    assert net[1].num_batches_tracked.dtype is torch.int64


def test_non_persistent_buffers_stay_out_of_the_state_dict():
    net = nn.Linear(2, 2)
    net.register_buffer("table", torch.ones(3), persistent=False)
    flat = FlatParameters(net, everything)
    assert set(net.state_dict()) == {"weight", "bias"}
    flat.buffer.zero_()
    assert not net.table.any()


def test_tied_parameters_stay_tied():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    flat = FlatParameters(net, everything)
    flat.buffer.fill_(7.0)
    assert net[1].weight is net[0].weight
    assert torch.equal(net[1].weight, torch.full((3, 3), 7.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(TypeError, match=r"0\.weight is torch\."):
        FlatParameters(small_net().to(dtype), everything)


def test_float64_buffer_is_refused():
    net = nn.Linear(2, 2)
    net.register_buffer("precise", torch.zeros(2, dtype=torch.float64))
    with pytest.raises(TypeError, match="precise"):
        FlatParameters(net, everything)


def test_check_passes_while_the_module_trains():
    net = small_net()
    flat = FlatParameters(net, not_last)
    net(torch.randn(4, 3)).sum().backward()
    net.to("cpu").train().zero_grad()
    flat.check()


def test_check_sees_a_cast():
    net = small_net()
    flat = FlatParameters(net, not_last)
    net.to(torch.float64).to(torch.float32)
    with pytest.raises(AssertionError, match="left the flat buffer"):
        flat.check()


def replace_parameter(net):
    net[0].weight = nn.Parameter(net[0].weight.detach().clone())


def replace_data(net):
    net[3].bias.data = net[3].bias.detach().clone()


def replace_buffer(net):
    net[4].running_var = net[4].running_var.clone()


@pytest.mark.parametrize(
    ("replace", "name"),
    [(replace_parameter, "0.weight"), (replace_data, "3.bias"), (replace_buffer, "4.running_var")],
)
def test_check_names_a_reallocated_tensor(replace, name):
    net = small_net()
    flat = FlatParameters(net, not_last)
    replace(net)
    with pytest.raises(AssertionError, match=name):
        flat.check()


def test_bind_repairs_a_reallocated_tensor():
    net = small_net()
    flat = FlatParameters(net, not_last)
    net.to(torch.float64).to(torch.float32)
    flat.bind()
    flat.check()
    flat.buffer.zero_()
    assert not net[0].weight.any()


def test_check_accepts_tensors_without_elements():
    net = nn.Linear(2, 2)
    net.empty = nn.Parameter(torch.zeros(0, 3))
    FlatParameters(net, everything).check()


def test_deep_copies_are_independent():
    net, x = small_net().eval(), torch.randn(4, 3)
    flat = FlatParameters(net, not_last)
    other = copy.deepcopy(net)
    before = other(x)
    flat.buffer.zero_()
    assert torch.equal(other(x), before)
    assert other[1].running_var.all()

    other_flat = FlatParameters(other, not_last)
    other_flat.buffer.fill_(1.0)
    assert not flat.buffer.any()
    flat.check()
    other_flat.check()
