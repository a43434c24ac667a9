"""StyleBank against loops over clients, cameras, images and pixels; and the tables that clients fill."""

import math
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from fedsim.core.errors import ConfigError, TrainingError
from fedsim.core.seeding import torch_generator
from fedsim.data import Augmentation
from fedsim.federation.adaptive_backbones import AdaptiveBackbones
from fedsim.federation.components.attacks import ModelReplacement
from fedsim.federation.components.privacy import WhiteNoise
from fedsim.federation.components.selection import UCB, RandomFraction
from fedsim.functional.style import random_styles, spread_of_styles
from fedsim.methods import FedPav, StyleBank
from fedsim.methods.base import Method, Payload
from fedsim.models import SmallCNN
from fedsim.models.groups import BACKBONE
from fedsim.training.batch_loss import BatchLoss
from fedsim.training.labels import Clustering
from fedsim.training.messages import Upload
from fedsim.training.objective import Objective
from fedsim.training.settings import ClientOverride, LocalTraining
from plain_loops import LR, Federation, assert_close, play, shares
from small import fit, make_data, make_model, state_of

HALF = RandomFraction(0.5)
"""Two of three clients in each round"""


def loop_styles(client):
    """Mean and variance of each channel, camera by camera, over all pixels (G1)."""
    cameras = client.cameras.tolist()
    rows = []
    for camera in sorted({*cameras}):
        images = [image for image, other in zip(client.x, cameras, strict=True) if other == camera]
        channels = [torch.cat([image[c].flatten() for image in images]) for c in range(3)]
        means = [sum(pixels.tolist()) / len(pixels) for pixels in channels]
        squares = [
            sum((v - m) ** 2 for v in pixels.tolist()) / len(pixels) for pixels, m in zip(channels, means, strict=True)
        ]
        rows.append([*means, *squares])
    return rows


def loop_random(bank, noise):
    """Styles whose numbers have mean and variance of the bank's: means normal, variances log-normal."""
    styles = []
    for z in noise.tolist():
        style = []
        for number in range(6):
            column = [row[number] for row in bank]
            mean = sum(column) / len(column)
            variance = sum((value - mean) ** 2 for value in column) / len(column)
            if number < 3:
                style.append(mean + math.sqrt(variance) * z[number])
            else:
                sigma = math.sqrt(math.log(1 + variance / mean**2))
                style.append(math.exp(math.log(mean) - sigma**2 / 2 + sigma * z[number]))
        styles.append(style)
    return styles


def loop_restyled(x, styles):
    """Every channel of every image (G3)."""
    result = torch.empty_like(x)
    for image in range(len(x)):
        for c in range(3):
            channel = x[image, c]
            mu = channel.sum() / channel.numel()
            var = ((channel - mu) ** 2).sum() / channel.numel()
            target_mean, target_var = styles[image][c], styles[image][3 + c]
            result[image, c] = (channel - mu) / (var + 1e-5).sqrt() * math.sqrt(target_var) + target_mean
    return result


def session(model, client, batches, bank, draws, momentum):
    """Local training with two passes of each batch, x first (G4)."""
    parameters = [*model.parameters(), *client.head.parameters()]
    velocity = [torch.zeros_like(p) for p in parameters]
    model.train()
    for x, y in batches:
        loss = F.cross_entropy(client.head(model(x).neck), y)
        if bank:
            loss = loss + F.cross_entropy(client.head(model(loop_restyled(x, draws(bank, len(x)))).neck), y)
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for p, v, g in zip(parameters, velocity, gradients, strict=True):
                v.mul_(momentum).add_(g)
                p -= LR * v


def draws_of(styles, name, round_):
    """Draw rows of the bank, or random styles, from the client's stream of the round."""
    stream = torch_generator(0, round_, name, "styles")
    if styles == "random":
        return lambda bank, count: loop_random(bank, torch.randn((count, 6), generator=stream))
    return lambda bank, count: [bank[i] for i in torch.randint(len(bank), (count,), generator=stream).tolist()]


@pytest.mark.parametrize(
    ("styles", "weighting", "momentum", "selection"),
    [("clients", "size", 0.0, HALF), ("random", "uniform", 0.5, HALF), ("clients", "size", 0.5, RandomFraction(1.0))],
    ids=["two of three", "random", "all"],
)
def test_whole_sessions(styles, weighting, momentum, selection):
    reference, bank, sent = Federation(), [], set()
    for client, data in zip(reference.clients, reference.data.federated.clients, strict=True):
        client.cameras = torch.from_numpy(data.train.camids)
    for t in range(4):
        start = {name: tensor.clone() for name, tensor in reference.model.state_dict().items()}
        chosen = selection.select(t, [client.name for client in reference.clients], 0)
        clients = [client for client in reference.clients if client.name in chosen]
        states, arrived = [], []
        for client in clients:
            reference.model.load_state_dict(start)
            draws = draws_of(styles, client.name, t)
            session(reference.model, client, client.batches(t), bank, draws, momentum)
            states.append({name: tensor.clone() for name, tensor in reference.model.state_dict().items()})
        for name in chosen:  # in the order of the round
            client = next(client for client in clients if client.name == name)
            arrived += [] if name in sent else loop_styles(client)
            sent.add(name)
        bank = bank + arrived
        weights = shares(clients) if weighting == "size" else [1 / len(clients)] * len(clients)
        reference.move_to(states, weights)
    model = play(StyleBank(styles=styles, weighting=weighting), 4, momentum, selection=selection)
    assert_close(model, reference, 1e-5)
    torch.testing.assert_close(model.server.tables["styles"].double(), torch.tensor(bank).double(), rtol=0, atol=1e-6)
    assert len(sent) == 3


def test_random_styles_have_the_moments_of_the_bank():
    bank = torch.rand(12, 6, generator=torch.Generator().manual_seed(1)) + 0.1
    moments = spread_of_styles(bank)
    drawn = random_styles(torch.randn(200_000, 6, generator=torch.Generator().manual_seed(2)), *moments)
    torch.testing.assert_close(drawn.mean(0), moments[0], rtol=0.01, atol=0)
    torch.testing.assert_close(drawn.var(0), moments[1], rtol=0.05, atol=0)
    assert (drawn[:, 3:] > 0).all()
    assert drawn.T.corrcoef().fill_diagonal_(0).abs().max() < 0.02


def test_a_bank_of_equal_styles_gives_no_others():
    bank = torch.tensor([[0.5, -1.0, 0.0, 2.0, 0.25, 0.0]]).repeat(3, 1)
    noise = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    assert torch.equal(random_styles(noise, *spread_of_styles(bank)), bank[:1].repeat(5, 1))


def are_equal(a, b):
    """Whether two runs have learnt the same; a client also keeps whether its styles were sent."""
    a, b = state_of(a), state_of(b)
    return all(torch.equal(tensor, b[name]) for name, tensor in a.items() if name in b)


def test_the_first_round_is_that_of_fedpav_and_the_next_is_not():
    augmented = {"augmentation": Augmentation(pad=2)}
    runs = {
        rounds: [fit(make_model(method), make_data(**augmented), rounds) for method in (FedPav(), StyleBank())]
        for rounds in (1, 2)
    }
    assert are_equal(*runs[1])
    assert not are_equal(*runs[2])


def test_the_control_is_another_training_with_the_same_bank_and_bytes():
    runs = [fit(make_model(StyleBank(styles=styles))) for styles in ("clients", "random")]
    assert torch.equal(*(run.server.tables["styles"] for run in runs))
    assert len({run.round_metrics["comm/total_bytes"] for run in runs}) == 1
    assert not are_equal(*runs)


# -- the exchange ------------------------------------------------------------------------------------------------------


def cameras_of(model):
    return {c.name: len({*c.train.camids.tolist()}) for c in model.parts.federated.clients}


def test_styles_go_up_once_and_the_bank_goes_down_with_each_model():
    total, bank, sent = 0, 0, set()
    for rounds in (1, 2, 3, 4):
        model = fit(make_model(StyleBank(), selection=HALF), rounds=rounds)
        cameras = cameras_of(model)
        chosen = HALF.select(rounds - 1, [*cameras], 0)
        fresh = sum(cameras[name] for name in {*chosen} - sent)
        extra = 4 * 6 * (len(chosen) * bank + fresh)
        assert model.round_metrics.get("comm/extra_bytes", 0) == extra
        total, bank, sent = total + extra, bank + fresh, sent | {*chosen}
        assert model.parts.ledger.totals["extra"] == total
    assert len(sent) == 3


def test_a_client_with_one_camera_sends_one_style():
    model = fit(make_model(StyleBank()), make_data(partition="by_camera"), rounds=2)
    assert {*cameras_of(model).values()} == {1}
    assert model.server.tables["styles"].shape == (len(model.parts.clients), 6)


def test_clients_of_two_architectures_have_one_bank():
    other = ClientOverride(backbone=SmallCNN(width=4))
    whole, mixed = (fit(make_model(StyleBank(), clients=clients), rounds=2) for clients in ({}, {"town1": other}))
    assert torch.equal(whole.server.tables["styles"], mixed.server.tables["styles"])
    extra = [run.round_metrics["comm/extra_bytes"] for run in (whole, mixed)]
    assert extra[0] == extra[1]


class FirstRound(ModelReplacement):
    """An attack that ends after one round."""

    def acts(self, client, round_):
        return round_ == 0 and super().acts(client, round_)


def test_a_client_that_was_left_out_sends_its_styles_again():
    attack = FirstRound(["town1"], boost=1e9)
    model = fit(make_model(StyleBank(), attack=attack, on_bad_update="skip_client"), rounds=1)
    cameras = cameras_of(model)
    assert len(model.server.tables["styles"]) == cameras["town0"] + cameras["town2"]
    model = fit(make_model(StyleBank(), attack=attack, on_bad_update="skip_client"), rounds=2)
    assert len(model.server.tables["styles"]) == sum(cameras.values())
    assert model.round_metrics["comm/town1/extra_bytes"] == 24 * (len(model.server.tables["styles"]))


def test_styles_are_those_of_the_camera_and_not_those_of_the_model():
    """White noise acts on models alone."""
    plain, noisy = (fit(make_model(StyleBank(), privacy=noise), rounds=1) for noise in (None, WhiteNoise(0.01)))
    assert torch.equal(plain.server.tables["styles"], noisy.server.tables["styles"])


@dataclass(frozen=True, kw_only=True)
class Sends(Method):
    """Sends rows to a table of two columns."""

    table: str = "numbers"
    shape: tuple = (1, 2)
    shared_groups = BACKBONE

    def payload(self, server, arch, round_):
        return Payload(tables={"numbers": 2})

    def upload(self, client):
        rows = torch.full(self.shape, float(len(client.received.extras["numbers"])))
        return Upload(client.model.shared, rows={self.table: rows})


def test_rows_of_every_round_are_joined_in_the_order_of_clients():
    model = fit(make_model(Sends()), rounds=3)
    assert model.server.tables["numbers"].tolist() == [[n, n] for n in (0.0, 3.0, 6.0) for _ in range(3)]


def test_a_client_may_send_no_row():
    model = fit(make_model(Sends(shape=(0, 2))), rounds=2)
    assert model.server.tables == {}
    assert "comm/extra_bytes" not in model.round_metrics


@pytest.mark.parametrize(
    ("method", "line"),
    [
        (Sends(table="other"), "Sends sends rows of other, a table that payload does not declare; correct its code"),
        (Sends(shape=(1, 3)), r"rows of numbers \[1, 3\] float32 on cpu, but .* \[1, 2\] float32 on cpu is expected"),
        (Sends(shape=(2,)), r"rows of numbers \[2\] float32 on cpu, but .* \[1, 2\] float32 on cpu is expected"),
    ],
    ids=["undeclared", "columns", "a vector"],
)
def test_rows_of_another_form_are_refused(method, line):
    with pytest.raises(TrainingError, match=line):
        fit(make_model(method), rounds=1)


def test_clients_without_identities_are_refused():
    training = LocalTraining(batch_size=8, cluster=Clustering(k1=6, k2=2, min_samples=2))
    with pytest.raises(ConfigError, match=r"model\.method: StyleBank, as it is configured, needs identities"):
        fit(make_model(StyleBank(), client=training), rounds=1)


@pytest.mark.parametrize("styles", ["clients", "random"])
def test_a_step_draws_no_more_with_a_larger_bank(styles, monkeypatch):
    """A batch takes its rows of the bank, and reads no others."""
    sizes = []
    restyle = partial(_noted, sizes)
    monkeypatch.setattr("fedsim.methods.stylebank._in_style", restyle)
    fit(make_model(StyleBank(styles=styles)))
    assert sizes
    assert all(images == rows for images, rows in sizes)


def _noted(sizes, images, style):
    sizes.append((len(images), len(style)))
    return images


class Two(BatchLoss):
    """The difference of two views."""

    views = 2

    def forward(self, seen):
        one, other = (view.neck for view in seen.views)
        return (one - other).square().mean()


def test_a_loss_of_two_views_sees_both_in_the_same_style(monkeypatch):
    restyled, styles, losses = [], [], []

    def in_style(images, style):
        restyled.append(images)
        styles.append(style)
        return images * 0.5

    def of(loss, output, batch):
        losses.append((len(output.views), batch.images, *batch.views))
        return original(loss, output, batch)

    original = BatchLoss.of
    monkeypatch.setattr("fedsim.methods.stylebank._in_style", in_style)
    monkeypatch.setattr(BatchLoss, "of", of)
    data = make_data(augmentation=Augmentation(pad=2))
    model = fit(make_model(StyleBank(), objective=Objective(metric=Two())), data)
    values = [value for name, value in model.round_metrics.items() if name.endswith("/metric")]
    assert values
    assert min(values) > 0
    assert {views for views, *_ in losses} == {1}, "the further view, of x and of x'"
    assert all(one is other for one, other in zip(styles[::2], styles[1::2], strict=True))
    plain = [(images, view) for _, images, view in losses]
    pairs = [*zip(restyled[::2], restyled[1::2], strict=True)]
    assert pairs
    assert all(any(a is images and b is view for images, view in plain) for a, b in pairs)


def test_changing_backbones_are_refused_at_once():
    ladder = AdaptiveBackbones(ladder=[SmallCNN(width=4), SmallCNN(width=8)])
    with pytest.raises(ConfigError, match="adaptive_backbones: StyleBank keeps what a client has sent"):
        fit(make_model(StyleBank(), adaptive_backbones=ladder, selection=UCB(), backbone=SmallCNN(width=4)), rounds=1)
