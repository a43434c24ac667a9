"""Element masks in the sums: against plain loops, early and late, on one rank and two, with server optimizers."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from failing import run_on_ranks
from fedsim.core.errors import ConfigError
from fedsim.federation.aggregation.masked import MaskedSum
from fedsim.federation.aggregation.sums import Aggregator
from fedsim.federation.components.privacy import DifferentialPrivacy, WhiteNoise
from fedsim.functional.normalise import normalise_images
from fedsim.functional.weighting import klpwa_weights
from fedsim.methods import FedAvg, FedDIP, LotteryFL, SubFedAvg
from fedsim.methods.base import InitialState, Method, Weights
from fedsim.methods.pruned import exceeds, full_mask, own_accuracy, prunable_entries
from fedsim.models import BODY, Neck, ResNet, SmallCNN
from fedsim.models.groups import Group, group_names
from fedsim.training.messages import Report, Upload
from fedsim.training.server_optimizers import FedAdam
from fedsim.training.settings import ClientOverride, LocalTraining
from small import fit, make_data, make_model, receive, vector

CLIENTS = {"a": 0.2, "b": 1 / 3, "c": 7 / 15}


def assembled(method=None, **options):
    model = make_model(method or FedAvg(share_head=False), **options)
    model.assemble(make_data(), 0, 1, torch.device("cpu"))
    return model


@pytest.fixture(scope="module")
def federation():
    return assembled()


def aggregator(federation, reduction="exact", has_masks=True):
    strategy = SimpleNamespace(sum_=lambda tensor: tensor)
    archs = dict.fromkeys(CLIENTS, "smallcnn")
    form = MaskedSum() if has_masks else None
    return Aggregator(strategy, federation.parts.statistics, archs, reduction, torch.device("cpu"), 0, form)


def uploads(federation, density, seed=0):
    """Random vectors and masks; the padding is 0, and True."""
    flat, generator = federation.parts.models["smallcnn"].flat, torch.Generator().manual_seed(seed)
    found = {}
    for name in CLIENTS:
        x, mask = torch.zeros(flat.num_shared), torch.ones(flat.num_shared_parameters, dtype=torch.bool)
        for entry in flat.shared_entries:
            x[entry.span] = torch.randn(entry.numel, generator=generator).abs() + 0.1
        for entry in flat.shared_parameters:
            mask[entry.span] = torch.rand(entry.numel, generator=generator) < density
        found[name] = Upload(x, mask=mask)
    return found


def mean_of(sums, contributions, weights, early=False):
    """What the aggregator makes of a round, and which elements are dead."""
    by_arch = {"smallcnn": weights}
    sums.begin(0, {}, by_arch if early else None)
    for name, upload in contributions.items():
        sums.add(name, sums.encode(name, upload))
    return sums.means(by_arch, {name: Report(1) for name in CLIENTS})["smallcnn"], sums.untouched.get("smallcnn")


def weights_of(parameters=None):
    return Weights(CLIENTS, parameters)


def loop(contributions, weights, own=None):
    """Element by element: the weighted mean over those that have it, or None."""
    length = len(next(iter(contributions.values())).mask)
    result = []
    for i in range(len(next(iter(contributions.values())).vector)):
        used = weights if i < length else (own or weights)
        having = [k for k, upload in contributions.items() if i >= length or upload.mask[i]]
        total = sum(used[k] for k in having)
        result.append(sum(used[k] * contributions[k].vector[i].item() for k in having) / total if having else None)
    return result


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("reduction", ["exact", "fp32"])
def test_each_element_is_the_mean_over_those_that_have_it(federation, reduction, early):
    contributions = uploads(federation, density=0.4)
    mean, dead = mean_of(aggregator(federation, reduction), contributions, weights_of(), early)
    expected = loop(contributions, CLIENTS)
    assert mean.dtype is torch.float32
    assert dead.tolist() == [value is None for value in expected[: len(dead)]]
    assert 0.1 < dead.float().mean() < 0.3  # 0.6^3 of the elements
    alive = torch.tensor([value if value is not None else 0.0 for value in expected], dtype=torch.float64)
    torch.testing.assert_close(mean.double(), alive, rtol=1e-6, atol=0)


def test_parameters_may_have_weights_of_their_own(federation):
    contributions, others = uploads(federation, density=0.5), {"a": 0.7, "b": 0.1, "c": 0.2}
    weights = weights_of({name: [weight] for name, weight in others.items()})
    mean, _ = mean_of(aggregator(federation), contributions, weights)
    expected = torch.tensor([v or 0.0 for v in loop(contributions, others, CLIENTS)], dtype=torch.float64)
    torch.testing.assert_close(mean.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("reduction", ["exact", "fp32"])
def test_masks_of_ones_change_no_bit(federation, reduction, early):
    masked = uploads(federation, density=2.0)
    assert all(upload.mask.all() for upload in masked.values())
    plain = {name: Upload(upload.vector) for name, upload in masked.items()}
    expected, none = mean_of(aggregator(federation, reduction, has_masks=False), plain, weights_of(), early)
    assert none is None
    for contributions in (masked, plain):  # a client without a mask has pruned nothing
        found, dead = mean_of(aggregator(federation, reduction), contributions, weights_of(), early)
        assert torch.equal(found, expected)
        assert not dead.any()


def test_elements_that_nobody_has_pruned_have_the_bits_of_the_plain_mean(federation):
    contributions = uploads(federation, density=0.8)
    found, _ = mean_of(aggregator(federation), contributions, weights_of())
    plain = {name: Upload(upload.vector) for name, upload in contributions.items()}
    expected, _ = mean_of(aggregator(federation, has_masks=False), plain, weights_of())
    everywhere = torch.stack([upload.mask for upload in contributions.values()]).all(0)
    assert 0.4 < everywhere.float().mean() < 0.65
    assert torch.equal(found[: len(everywhere)][everywhere], expected[: len(everywhere)][everywhere])
    assert torch.equal(found[len(everywhere) :], expected[len(everywhere) :])  # statistics


def test_equal_masks_keep_their_sparsity(federation):
    contributions = uploads(federation, density=0.3)
    one = contributions["a"].mask
    same = {name: Upload(upload.vector, mask=one) for name, upload in contributions.items()}
    mean, dead = mean_of(aggregator(federation), same, weights_of())
    assert torch.equal(dead, ~one)
    assert (mean[: len(one)][~one] == 0).all()


def test_the_order_of_clients_does_not_matter(federation):
    contributions = uploads(federation, density=0.5)
    turned = dict(reversed(contributions.items()))
    a, b = (mean_of(aggregator(federation), c, weights_of())[0] for c in (contributions, turned))
    assert torch.equal(a, b)


def test_methods_without_masks_pay_nothing(federation):
    plain, masked = (aggregator(federation, has_masks=has_masks)._totals["smallcnn"] for has_masks in (False, True))
    flat = federation.parts.models["smallcnn"].flat
    assert len(plain) == flat.num_shared
    assert len(masked) == flat.num_shared + flat.num_shared_parameters + 1
    with pytest.raises(AssertionError, match="declares no masks"):
        aggregator(federation, has_masks=False).facts("a", uploads(federation, 0.5)["a"])


# -- the server's step -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "optimizer", [FedAdam, lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9, weight_decay=0.1), None]
)
def test_dead_elements_stay_whatever_the_optimizer_remembers(optimizer):
    server = assembled().server
    theta = server.vector("smallcnn")
    step = optimizer(list(server.parameters())).step if optimizer else lambda: None
    span = slice(server.models["smallcnn"].flat.num_shared_parameters, None)
    exact = {"smallcnn": span if optimizer else slice(None)}
    server.step(step, {"smallcnn": theta + 1}, exact)  # a momentum upwards
    before, dead = theta.clone(), torch.zeros(span.start, dtype=torch.bool)
    dead[::3] = True
    for _ in range(2):
        server.step(step, {"smallcnn": torch.full_like(theta, 5.0)}, exact, {"smallcnn": 0.5}, {"smallcnn": dead})
    assert torch.equal(theta[: len(dead)][dead], before[: len(dead)][dead])
    assert (theta[: len(dead)][~dead] != before[: len(dead)][~dead]).all()
    assert (theta[span] == 5).all()


# -- federations -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Thinning(Method):
    """Each client sends another random half of its model; weights are those of paper 004, known late."""

    measures = {"kl": "client", "pr": "client"}  # noqa: RUF012 - a property of methods
    requires = frozenset({"masks"})

    @property
    def shared_groups(self):
        return BODY

    def initial_state(self, model):
        return InitialState({"mask": full_mask(model)})

    def upload(self, client):
        mask = full_mask(client.model)
        for entry in prunable_entries(client.model):
            mask[entry.span] = torch.rand(entry.numel, generator=client.generator(entry.name)) < 0.5
        client.keep("mask", mask)
        n = client.data.num_images
        return Upload(client.model.shared, signals={"kl": 1.0 / n, "pr": n / 1000}, mask=mask)

    def weights(self, reports):
        signals = {name: report.signals for name, report in reports.items()}
        kl, pr = ({client: s[name] for client, s in signals.items()} for name in ("kl", "pr"))
        return Weights(klpwa_weights(kl, pr))


def play(rounds, devices=1, ckpt_path=None, **options):
    return fit(make_model(Thinning(), server_optimizer=FedAdam, **options), None, rounds, devices, ckpt_path)


def play_on_two(folder):
    """What each of two ranks does."""
    play(2, devices=2).trainer.save_checkpoint(folder / "two.ckpt")


@pytest.mark.dist
@pytest.mark.slow
def test_other_masks_for_each_client_give_the_same_bits_on_any_ranks_and_after_a_pause(tmp_path):
    run_on_ranks(play_on_two, tmp_path)
    whole, continued = play(3), play(3, ckpt_path=tmp_path / "two.ckpt")
    assert whole.round.aggregator.untouched["smallcnn"].any()
    assert torch.equal(vector(whole), vector(continued))
    assert whole.parts.ledger.totals == continued.parts.ledger.totals
    assert whole.parts.ledger.pruned.unpruned == continued.parts.ledger.pruned.unpruned
    assert not torch.equal(vector(whole), vector(play(3, reduction="fp32")))  # the two are told apart


def test_differential_privacy_refuses_masks():
    pytest.importorskip("dp_accounting")
    for method in (LotteryFL(), SubFedAvg()):
        with pytest.raises(ConfigError, match=rf"model\.method: {type(method).__name__} uploads which elements"):
            assembled(
                method,
                bn_stats="local",
                privacy=DifferentialPrivacy(clip=1.0, noise_multiplier=1.0),
                client=LocalTraining(batch_size=8, local_epochs=2),
            )
    assembled(
        FedDIP(weighting="uniform"), bn_stats="local", privacy=DifferentialPrivacy(clip=1.0, noise_multiplier=1.0)
    )


def test_white_noise_does_not_bring_pruned_elements_back():
    model = fit(make_model(LotteryFL(start_accuracy=0.0), privacy=WhiteNoise(beta=0.01, in_download=True)))
    for client in model.parts.clients.values():
        client.load()
        receive(client, model.settings.method, model.server)
        model.settings.method.personalise(client)
        mask = client.kept["mask"]
        assert (client.model.shared[: len(mask)][~mask] == 0).all()
        client.unload()


def test_pruned_weights_are_zero_after_local_steps_of_adam_with_weight_decay():
    def adam(params):
        return torch.optim.Adam(params, lr=0.01, weight_decay=0.1)

    seen = []

    class Looking(LotteryFL):
        def upload(self, client):
            upload = super().upload(client)
            seen.append((client.optimizer.num_steps, upload.vector[: len(upload.mask)][~upload.mask]))
            return upload

    training = LocalTraining(batch_size=8, local_epochs=2, optimizer=adam)
    fit(make_model(Looking(start_accuracy=0.0, step=0.5), client=training))
    assert len(seen) == 6
    for steps, pruned in seen:
        assert steps >= 10
        assert len(pruned)
        assert (pruned == 0).all()


# -- what may be pruned, and what decides ------------------------------------------------------------------------------


class Odd(nn.Module):
    """Layers whose shapes and names say nothing."""

    out_channels = 4

    def __init__(self):
        super().__init__()
        self.bn = nn.Conv2d(3, 4, 3)
        self.weight = nn.Parameter(torch.ones(4, 1, 1))
        self.conv = nn.BatchNorm2d(4)
        self.norm = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))

    def forward(self, images):
        maps = self.conv(self.bn(images) * self.weight)
        return self.norm(maps.movedim(1, -1)).movedim(-1, 1)


def test_modules_types_tell_what_may_be_pruned():
    model = assembled(backbone=Odd(), neck=Neck(kind="linear", dim=6)).parts.models["odd"]
    names = [entry.name for entry in prunable_entries(model)]
    assert sorted(names) == ["backbone.bn.weight", "backbone.norm.0.weight", "neck.0.weight"]


class Transformer(nn.Module):
    """A small vision transformer: class token, position embeddings, and torch's encoder layers."""

    out_channels = 8

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 8, stride=8)
        self.class_token = nn.Parameter(torch.zeros(1, 1, 8))
        self.positions = nn.Parameter(torch.zeros(1, 9, 8))
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)

    def forward(self, images):
        x = self.patches(images).flatten(2).mT
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.layers(x)[:, 0, :, None, None]


def test_self_attention_is_pruned_and_embeddings_are_not():
    model = assembled(backbone=Transformer(), neck=Neck(kind="none")).parts.models["transformer"]
    names = {entry.name.removeprefix("backbone.layers.layers.0.") for entry in prunable_entries(model)}
    assert names == {
        "backbone.patches.weight", "self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight",
        "linear2.weight",
    }  # fmt: skip
    kinds = group_names(model.network)
    assert kinds["backbone.class_token"] == kinds["backbone.positions"] == Group.CONV
    assert kinds["backbone.layers.layers.0.self_attn.in_proj_weight"] == Group.CONV


def test_resnet_s_convolutions_are_what_paper_004_prunes():
    model = assembled(backbone=ResNet(depth=50), neck=Neck(kind="bnneck")).parts.models["resnet"]
    assert sum(entry.numel for entry in prunable_entries(model)) == 23_454_912


def test_a_shared_head_may_be_pruned_and_an_own_one_not():
    for share_head in (True, False):
        model = assembled(FedAvg(share_head=share_head)).parts.models["smallcnn"]
        assert ("head.weight" in [entry.name for entry in prunable_entries(model)]) is share_head


def test_own_accuracy_is_that_of_a_loop_and_disturbs_nothing():
    found = {}

    @dataclass(frozen=True, kw_only=True)
    class Measuring(FedAvg):
        def train(self, client):
            super().train(client)
            before = client.model.whole.clone()
            model, head = client.model.network, client.model.head
            model.eval()
            images = next(client.images.pixels.batches([torch.arange(client.data.num_images)]))
            with torch.no_grad():
                hits = [
                    int(head(model(normalise_images(image[None])).neck).argmax()) == int(label)
                    for image, label in zip(images, client.images.labels, strict=True)
                ]
            expected = sum(hits) / len(hits)
            model.train()
            found[client.client_name] = (own_accuracy(client), expected, own_accuracy(client, 7), model.training)
            assert [bool(exceeds(client, None, bar)) for bar in (expected - 1e-9, expected)] == [True, False]
            assert torch.equal(client.model.whole, before)

    model, plain = (fit(make_model(method(share_head=False))) for method in (Measuring, FedAvg))
    assert torch.equal(vector(model), vector(plain))
    for accuracy, expected, few, is_training in found.values():
        assert accuracy == expected > 0
        assert round(few * 7, 9) in range(8)
        assert is_training


def test_each_architecture_has_masks_of_its_own():
    torch.manual_seed(1)
    clients = {"town1": ClientOverride(backbone=SmallCNN(width=4))}
    model = fit(make_model(LotteryFL(start_accuracy=0.0), clients=clients))
    for name, client in model.parts.clients.items():
        mask = client.private_state()["kept.mask"]
        assert len(mask) == model.parts.models[model.parts.archs[name]].flat.num_shared_parameters
        assert not mask.all()
    assert len(set(model.parts.archs.values())) == len(model.round.aggregator.untouched) == 2
    alone = model.parts.archs["town1"]  # where one client is alone, the global model keeps what it has pruned
    assert torch.equal(
        model.round.aggregator.untouched[alone], ~model.parts.clients["town1"].private_state()["kept.mask"]
    )
