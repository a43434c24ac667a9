"""DACS: the authors' numbers, plain loops with three models, which loss moves what, and its switches."""

import copy
import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedsim.core.errors import ConfigError
from fedsim.core.placement import place
from fedsim.core.seeding import torch_generator
from fedsim.data import Augmentation, SyntheticReID
from fedsim.federation.memory import device_memory
from fedsim.functional.losses import authenticity, mean_entropy
from fedsim.functional.style import restyle, style_gap, style_of
from fedsim.methods import DACS, FedPav
from fedsim.models import Neck, ReIDModel
from fedsim.models.groups import BODY, group_names
from fedsim.training.batch import Batch
from fedsim.training.flat_model import FlatModel
from fedsim.training.labels import Clustering
from fedsim.training.objective import Objective, supervised_loss
from fedsim.training.optimizer import loose_optimizer
from fedsim.training.settings import LocalTraining, RateSchedule
from fedsim.training.statistics import shared_names
from plain_loops import NECK, Federation, Smooth, shares
from small import fit, make_data, make_model, refuse, state_of, vector

VECTORS = json.loads((Path(__file__).parent / "dacs_vectors.json").read_text())
CODE = {
    "statistics": "unbiased", "diversity": "variance", "expert_head": "shared", "authenticity_moves_head": True,
}  # fmt: skip
"""settings of the authors' code, but for lam_au, which differs between its scripts"""
close = partial(torch.testing.assert_close, rtol=0, atol=1e-6)


def tensor(values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


# -- Eqs. (1) to (6) ---------------------------------------------------------------------------------------------------


def stylised_loop(x, s, m, spare):
    """Eqs. (1) and (2), pixel by pixel; the variance divides by the pixels less ``spare``."""
    result = [[[list(row) for row in channel] for channel in image] for image in x]
    for b, image in enumerate(x):
        for c, channel in enumerate(image):
            pixels = [p for row in channel for p in row]
            mu = sum(pixels) / len(pixels)
            sigma = math.sqrt(sum((p - mu) ** 2 for p in pixels) / (len(pixels) - spare))
            for h, row in enumerate(channel):
                for w, p in enumerate(row):
                    result[b][c][h][w] = s[c][h][w] * (p - mu) / (sigma + 1e-8) + m[c][h][w]
    return tensor(result)


def test_eq1_the_style_of_images():
    numbers = VECTORS["stm"]
    mean, std = style_of(tensor(numbers["x"]), 0.0)
    close(mean[..., 0, 0], tensor(numbers["mu"]), atol=1e-12)
    close(std[..., 0, 0].square(), tensor(numbers["var_unbiased"]), atol=1e-12)
    pixels = len(numbers["x"][0][0]) * len(numbers["x"][0][0][0])
    population = style_of(tensor(numbers["x"]), 0.0, unbiased=False)[1]
    close(population.square() * pixels / (pixels - 1), std.square(), atol=1e-12)


@pytest.mark.parametrize("unbiased", [False, True])
def test_eq2_the_restyled_images(unbiased):
    numbers = VECTORS["stm"]
    x, s, m = (tensor(numbers[name]) for name in ("x", "std_hat", "mean_hat"))
    styled = restyle(x, style_of(x, 0.0, unbiased=unbiased), (m, s))
    close(styled, tensor(numbers["stylised_code" if unbiased else "stylised_population_std"]), atol=1e-12)
    rng = torch.Generator().manual_seed(0)
    for shape in [(1, 1, 1, 2), (3, 2, 4, 5), (2, 3, 7, 2)]:
        x, s, m = (torch.randn(*size, generator=rng).double() for size in (shape, shape[1:], shape[1:]))
        styled = restyle(x, style_of(x, 0.0, unbiased=unbiased), (m, s))
        close(styled, stylised_loop(x.tolist(), s.tolist(), m.tolist(), int(unbiased)), atol=1e-10)


@pytest.mark.parametrize("unbiased", [False, True])
def test_restyled_images_have_one_style_in_any_light(unbiased):
    """What the style model does: contrast and light of an image are gone, and its own come in their place."""
    rng = torch.Generator().manual_seed(0)
    x, normal = torch.randn(6, 3, 16, 8, generator=rng).double(), torch.randn(2, 3, 16, 8, generator=rng).double()
    gain, shift = torch.rand(6, 3, 1, 1, generator=rng) + 0.5, 3 * torch.randn(6, 3, 1, 1, generator=rng)
    s, m = 1 + 0.1 * normal[0], 0.1 * normal[1]
    plain, lit = (restyle(y, style_of(y, 0.0, unbiased=unbiased), (m, s)) for y in (x, gain * x + shift))
    close(lit, plain, atol=1e-6)
    mean, std = style_of(plain, 0.0)
    assert mean.abs().max() < 0.05, "near 0, with the noise of s and m"
    assert (std - 1).abs().max() < 0.1


def test_a_box_counts_as_its_pixels():
    x, box = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0)), torch.zeros(4, 5, dtype=torch.bool)
    box[1:3, 2:] = True
    for unbiased in (False, True):
        cut = style_of(x[:, :, 1:3, 2:], 0.0, unbiased=unbiased)
        torch.testing.assert_close(style_of(x, 0.0, box, unbiased=unbiased), cut)


def test_eq3_eq4_the_diversity_loss():
    numbers = VECTORS["stm"]
    x, s, m = (tensor(numbers[name]) for name in ("x", "std_hat", "mean_hat"))
    s.requires_grad_()
    m.requires_grad_()
    code = -style_gap(style_of(x, 0.0), (m, s), variances=True)
    assert code.item() == pytest.approx(numbers["l_div_code"], rel=1e-12)
    for gradient, name in zip(torch.autograd.grad(code, (s, m)), ("std", "mean"), strict=True):
        close(gradient, tensor(numbers[f"grad_{name}_hat_code"]), atol=1e-12)
    paper = -style_gap(style_of(x, 0.0, unbiased=False), (m, s))
    assert paper.item() == pytest.approx(numbers["l_div_std_mean"], rel=1e-12)


def entropy_loop(logits):
    """The mean entropy, image by image."""
    entropies = []
    for row in logits:
        total = sum(math.exp(z) for z in row)
        entropies.append(-sum(math.exp(z) / total * math.log(math.exp(z) / total) for z in row))
    return sum(entropies) / len(entropies)


def test_eq5_eq6_the_authenticity_loss():
    numbers = VECTORS["authenticity"]
    logits = [numbers[f"logits_{name}"] for name in ("global_of_x", "global_of_styled", "local_of_styled")]
    entropies = [mean_entropy(tensor(z)) for z in logits]
    assert [h.item() for h in entropies] == pytest.approx(numbers["entropies"], rel=1e-12)
    assert [entropy_loop(z) for z in logits] == pytest.approx(numbers["entropies"], rel=1e-12)
    assert authenticity(*entropies).item() == pytest.approx(numbers["l_au"], rel=1e-12)


@pytest.mark.parametrize("num_classes", [2, 7, 3000])
def test_uniform_logits_have_the_largest_entropy(num_classes):
    h = mean_entropy(torch.full((5, num_classes), 3.7, dtype=torch.float64))
    assert h.item() == pytest.approx(math.log(num_classes), rel=1e-12)
    assert authenticity(h, h, h).item() == pytest.approx(2 * math.log(2), rel=1e-12)


def test_a_certain_model_has_entropy_0_without_nan():
    logits = torch.tensor([[1e4, 0.0], [0.0, -1e4]], requires_grad=True)
    h = mean_entropy(logits)
    h.backward()
    assert h.item() == 0
    assert logits.grad.isfinite().all()


# -- one client of the authors' numbers --------------------------------------------------------------------------------


class Linear(nn.Module):
    """``V tanh(x)`` at each pixel; the mean over pixels follows."""

    out_channels = 2

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 1, bias=False)

    def forward(self, images):
        return self.conv(torch.tanh(images))


class Session:
    """A client's session with the numbers of ``dacs_step``: a flat model, and torch's optimizers."""

    client_name, seed, local_epochs, device = "client", 0, 1, torch.device("cpu")
    session = SimpleNamespace(precision="32-true")

    def __init__(self, round_, batches=2):
        numbers = VECTORS["dacs_step"]["inputs"]
        network = ReIDModel(Linear(), Neck(kind="none", dropout=0.0))
        groups = group_names(network)
        self.model = FlatModel("tiny", network, shared_names(groups, BODY, "mean"), groups, max_classes=2)
        self.objective = Objective(triplet=1.0, margin=numbers["margin"])
        options = {name: numbers[name] for name in ("lr", "momentum", "weight_decay")}
        self.training_settings = LocalTraining(optimizer=partial(torch.optim.SGD, **options))
        self.round, self.log = round_, []
        labels = torch.tensor(numbers["labels"])
        self._batches = [Batch(tensor(x, torch.float32), labels) for x in numbers["images"][:batches]]
        models = {"V_global": self.model, "V_expert": self.model.replica("expert")}
        for name, model in models.items():
            model.head.bias.requires_grad_(False)  # the numbers are of heads without one
            with torch.no_grad():
                model.network.backbone.conv.weight.copy_(tensor(numbers[name])[:, :, None, None])
                model.head.weight.copy_(tensor(numbers["head"]))
                model.head.bias.zero_()
        names = {"expert": models["V_expert"].whole, "style_mean": None, "style_std": None}
        self.kept = {name: whole.clone() for name, whole in names.items() if whole is not None}
        self.kept |= {f"style_{name}": tensor(numbers[f"{name}_hat"], torch.float32) for name in ("mean", "std")}

    def batches(self, epoch):
        return self._batches

    def trainable_replica(self, role):
        replica = self.model.replica(role)
        replica.network.train()
        replica.optimizer(self.training_settings).reset(self.round)
        return replica

    def loose_optimizer(self, role, module, lr):
        optimizer = loose_optimizer(self.training_settings, module, lr)
        optimizer.reset(self.round)
        self.style = module
        return optimizer

    def forward(self, images):
        return self.model.forward(images, "32-true")

    def supervised_loss(self, output, batch, counts=True):
        loss = supervised_loss(self.objective, output, batch).loss
        self.log.append(loss.item())
        return loss

    def training_step(self, batch):
        return self.supervised_loss(self.forward(batch.images), batch)

    def step(self, loss, optimizer=None, loose=()):
        loss.backward()
        for each in (optimizer or self.model.optimizer(self.training_settings), *loose):
            each.step()

    def keep(self, name, tensor):
        self.kept[name] = tensor.detach().clone()


@pytest.mark.parametrize(
    ("name", "round_", "options"),
    [("round_0_code", 0, CODE), ("round_1_code", 1, CODE), ("round_1_paper_reading", 1, {})],
)
def test_eq7_two_local_steps_of_the_authors(name, round_, options):
    client, expected = Session(round_), VECTORS["dacs_step"][name]
    DACS(**options).train(client)
    after, expert = expected["after"], client.model.replica("expert")
    expert.whole.copy_(client.kept["expert"])
    close(client.model.network.backbone.conv.weight[..., 0, 0].detach().double(), tensor(after["V_global"]))
    close(client.model.head.weight.detach().double(), tensor(after["head"]))
    close(expert.network.backbone.conv.weight[..., 0, 0].detach().double(), tensor(after["V_expert"]))
    if "head_expert" in after:
        close(expert.head.weight.detach().double(), tensor(after["head_expert"]))
    for part in ("std", "mean"):
        close(client.kept[f"style_{part}"].double(), tensor(after[f"{part}_hat"]))
    parts = [name for name in ("l_expert", "l_loc_x", "l_loc_styled") if name in expected["losses"][0]]
    losses = [losses[part] for losses in expected["losses"] for part in parts]
    assert client.log == pytest.approx(losses, abs=1e-6)


# -- which loss moves what ---------------------------------------------------------------------------------------------


class Alone(Session):
    """A client of whose losses one is not 0; it writes down what has a gradient when its models step."""

    def __init__(self, row):
        super().__init__(round_=1, batches=1)
        self.row, self.moved = row, set()
        self.names = iter(("L_loc(x; f_L)", "L_loc(x; f_G)", "L_loc(x'; f_G)"))

    def supervised_loss(self, output, batch, counts=True):
        return super().supervised_loss(output, batch, counts) * (next(self.names) == self.row)

    def step(self, loss, optimizer=None, loose=()):
        loss.backward()
        expert = self.model.replica("expert")
        models = {
            "f_L": expert.network.parameters(), "head of f_L": expert.head.parameters(),
            "f_G": self.model.network.parameters(), "head of f_G": self.model.head.parameters(),
            "s": [self.style.std] if loose else [], "m": [self.style.mean] if loose else [],
        }  # fmt: skip
        stepped = [p for o in (optimizer or self.model.optimizer(self.training_settings), *loose) for p in o.parameters]
        for name, parameters in models.items():
            grads = [p.grad for p in parameters if p.grad is not None and any(p is other for other in stepped)]
            if any(grad.any() for grad in grads):
                self.moved.add(name)


PAPER_ROUTES = {
    "L_loc(x; f_L)": {"f_L", "head of f_L"},
    "L_loc(x; f_G)": {"f_G", "head of f_G"},
    "L_loc(x'; f_G)": {"f_G", "head of f_G", "s", "m"},
    "L_div": {"s", "m"},
    "L_au": {"s", "m"},
}
CODE_ROUTES = PAPER_ROUTES | {"L_loc(x; f_L)": {"f_L"}, "L_au": {"s", "m", "head of f_G"}}
CELLS = ("f_L", "head of f_L", "f_G", "head of f_G", "s", "m")


@pytest.mark.parametrize("row", PAPER_ROUTES)
@pytest.mark.parametrize(("options", "routes"), [({}, PAPER_ROUTES), (CODE, CODE_ROUTES)], ids=["paper", "code"])
def test_which_loss_moves_what(options, routes, row):
    client = Alone(row)
    # the expert and the judge are there in each row: an authenticity of almost no weight, which counts as none
    method = DACS(lam_div=float(row == "L_div"), lam_au=1.0 if row == "L_au" else 1e-300, **options)
    method.train(client)
    for cell in CELLS:
        assert (cell in client.moved) == (cell in routes[row]), cell


# -- whole rounds ------------------------------------------------------------------------------------------------------

LR, MOMENTUM, DECAY = 0.005, 0.9, 5e-4


class Loops:
    """The algorithm with three models for each client, in float64: f_G, f_L, and a frozen copy of f_G."""

    def __init__(self, data, code=False, lam_au=5.0, style_lr=LR):
        self.federation, self.code, self.lam_au, self.style_lr = Federation(data), code, lam_au, style_lr
        self.experts, self.styles = {}, {}
        for client in self.federation.clients:
            normal = torch.randn((2, *client.x.shape[1:]), generator=torch_generator(0, client.name, "style")).double()
            self.styles[client.name] = [(1 + 0.1 * normal[0]).requires_grad_(), (0.1 * normal[1]).requires_grad_()]

    def round(self, t):
        states = []
        for client in self.federation.clients:
            f_g = copy.deepcopy(self.federation.model).train()
            if client.name not in self.experts:
                self.experts[client.name] = copy.deepcopy(f_g), copy.deepcopy(client.head)
            self.train(client, f_g, t)
            states.append(f_g.state_dict())
        self.federation.move_to(states, shares(self.federation.clients))  # Eq. (9)

    def train(self, client, f_g, t):
        f_l, own_head = self.experts[client.name]
        f_l.train()
        s, m = self.styles[client.name]
        head = client.head
        expert_head = head if self.code else own_head
        of_expert = [*f_l.parameters(), *([] if self.code else own_head.parameters())]
        of_joint = [*f_g.parameters(), *head.parameters()]
        velocity = {}
        for x, y in client.batches(t):
            loss = F.cross_entropy(expert_head(f_l(x).neck), y)
            self.step(of_expert, torch.autograd.grad(loss, of_expert), velocity)
            if t == 0:
                loss = F.cross_entropy(head(f_g(x).neck), y)
                self.step(of_joint, torch.autograd.grad(loss, of_joint), velocity)
                continue
            mu, var = x.mean((2, 3), keepdim=True), x.var((2, 3), unbiased=self.code, keepdim=True)
            styled = s * (x - mu) / (var.sqrt() + 1e-8) + m
            l_loc = F.cross_entropy(head(f_g(x).neck), y)
            judge = copy.deepcopy(f_g).eval()  # in the code's order: its statistics have x, not x'
            l_loc = l_loc + F.cross_entropy(head(f_g(styled).neck), y)
            gap = (s**2 - var) if self.code else (s - var.sqrt())
            l_div = -((mu - m) ** 2).mean() - (gap**2).mean()
            h = [self.entropy(logits) for logits in (
                head(judge(x).neck), head(judge(styled).neck), expert_head(f_l(styled).neck)
            )]  # fmt: skip
            l_au = (1 + (h[0] - h[1]).exp()).log() + (1 + (h[1] - h[2]).exp()).log()
            gradients = list(torch.autograd.grad(l_loc, [*of_joint, s, m], retain_graph=True))
            for number, p in enumerate([*of_joint, s, m]):
                if p is s or p is m:
                    gradients[number] += torch.autograd.grad(l_div, p, retain_graph=True)[0]
                if p is s or p is m or (self.code and any(p is q for q in head.parameters())):
                    gradients[number] += self.lam_au * torch.autograd.grad(l_au, p, retain_graph=True)[0]
            self.step([*of_joint, s, m], gradients, velocity, slow=(s, m))

    @staticmethod
    def entropy(logits):
        p = logits.softmax(1)
        return -(p * p.log()).sum(1).mean()

    @torch.no_grad()
    def step(self, parameters, gradients, velocity, slow=()):
        """SGD with momentum and decay, whose memory ends with the round."""
        for p, g in zip(parameters, gradients, strict=True):
            g = g + DECAY * p
            velocity[p] = MOMENTUM * velocity[p] + g if p in velocity else g.clone()
            p -= (self.style_lr if any(p is q for q in slow) else LR) * velocity[p]


def two_clients():
    return make_data(SyntheticReID(clients=2, unseen=1, scale=0.2))


def play(method, rounds=3, data=None, **options):
    optimizer = partial(torch.optim.SGD, lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    training = replace(LocalTraining(batch_size=8, optimizer=optimizer), **options)
    return fit(make_model(method, backbone=Smooth(), neck=NECK, client=training), data or two_clients(), rounds=rounds)


@pytest.mark.parametrize(
    ("options", "of_loops"),
    [
        ({}, {}),
        ({"style_lr": 0.3}, {"style_lr": 0.3}),
        ({**CODE, "lam_au": 1.0, "style_lr": 0.3}, {"code": True, "lam_au": 1.0, "style_lr": 0.3}),
    ],
    ids=["paper", "paper, other rate", "code"],
)
def test_eq9_rounds(options, of_loops):
    """Everything that is left after three rounds: f_G, heads, experts, style models."""
    loops = Loops(two_clients(), **of_loops)
    for t in range(3):
        loops.round(t)
    model = play(DACS(**options))
    near = partial(torch.testing.assert_close, rtol=0, atol=2e-6)
    expected = loops.federation.model.state_dict()
    flat_model = model.parts.models["smooth"]
    shared = flat_model.flat.shared_entries
    assert {entry.name for entry in shared} == {name for name in expected if "num_batches" not in name}
    for entry in shared:
        near(vector(model, "smooth")[entry.span].view(entry.shape).double(), expected[entry.name])
    for plain in loops.federation.clients:
        client = model.parts.clients[plain.name]
        client.load()
        near(flat_model.head.weight.detach().double(), plain.head.weight.detach())
        s, m = loops.styles[plain.name]
        near(client.kept["style_std"].double(), s.detach())
        near(client.kept["style_mean"].double(), m.detach())
        expert, head = loops.experts[plain.name]
        kept = client.kept["expert"]
        for entry in flat_model.flat.entries:
            near(kept[entry.span].view(entry.shape).double(), expert.state_dict()[entry.name])
        if "code" not in of_loops:
            near(kept[flat_model.flat.num_model :][: head.weight.numel()].double(), head.weight.detach().flatten())
        client.unload()


# -- what switches turn it into ----------------------------------------------------------------------------------------


def augmented():
    return make_data(SyntheticReID(clients=2, unseen=1, scale=0.2), augmentation=Augmentation(pad=2))


@pytest.mark.parametrize("options", [{}, CODE, {"lam_au": 0.0}], ids=["paper", "code", "no expert"])
def test_before_the_first_styled_round_it_is_fedpav(options):
    plain, method = (
        state_of(fit(make_model(method, neck=Neck(dim=8, dropout=0.5)), augmented(), rounds=2))
        for method in (FedPav(), DACS(first_styled_round=2, **options))
    )
    assert not any("style" in name for name in method)
    for name, values in plain.items():
        assert torch.equal(values, method[name]), name
    later = state_of(fit(make_model(DACS(first_styled_round=1, **options), neck=Neck(dim=8)), augmented(), rounds=2))
    assert not torch.equal(plain["global"], later["global"])


def test_a_style_model_that_does_not_move_is_noise_drawn_once():
    """Row RS of Table 2: then diversity and authenticity move nothing."""
    still = play(DACS(style_lr=0.0))
    bare = play(DACS(style_lr=0.0, lam_div=0.0, lam_au=0.0))
    assert torch.equal(vector(still, "smooth"), vector(bare, "smooth"))
    for name, client in bare.parts.clients.items():
        kept, height_width = client.private_state(), (32, 16)
        normal = torch.randn((2, 3, *height_width), generator=torch_generator(0, name, "style"))
        assert torch.equal(kept["kept.style_std"], 1 + 0.1 * normal[0])
        assert torch.equal(kept["kept.style_mean"], 0.1 * normal[1])
        assert "kept.expert" not in kept
    moving = play(DACS())
    assert not torch.equal(vector(still, "smooth"), vector(moving, "smooth"))


def test_each_loss_counts():
    vectors = [
        vector(play(DACS(**o), rounds=2), "smooth") for o in ({}, {"lam_au": 0.0}, {"authenticity_moves_head": True})
    ]
    assert not any(torch.equal(a, b) for i, a in enumerate(vectors) for b in vectors[:i])
    styles = [play(DACS(lam_div=w), rounds=2).parts.clients["town0"].private_state() for w in (0.0, 1.0)]
    change = (styles[0]["kept.style_std"] - styles[1]["kept.style_std"]).abs().max()
    assert 0 < change < 0.01, "it moves the style model, and hardly"


# -- tensors beside a model --------------------------------------------------------------------------------------------


class Watching(DACS):
    """Writes down rates and steps of the style model's optimizer, and its gradient's norm at each step."""

    def train(self, client):
        def make(role, module, lr=None):
            optimizer = type(client).loose_optimizer(client, role, module, lr)
            made.append((client, optimizer))
            step = optimizer.step

            def stepping():
                norms.append(torch.cat([p.grad.flatten() for p in module.parameters()]).norm().item())
                step()

            optimizer.step = stepping
            rates.append(optimizer.rates)
            return optimizer

        client.loose_optimizer = make
        super().train(client)
        steps.append((client.optimizer.num_steps, client.session.optimizers["optimizer style."].num_steps))
        del client.loose_optimizer


made, norms, rates, steps = [], [], [], []


def watch(**options):
    for record in (made, norms, rates, steps):
        record.clear()
    style_lr = options.pop("style_lr", None)
    return play(Watching(style_lr=style_lr, first_styled_round=0), **options)


@pytest.mark.parametrize(("style_lr", "rate"), [(None, LR), (0.5, 0.5), (0.0, 0.0)])
def test_rates_of_the_style_model_follow_the_schedule(style_lr, rate):
    schedule = RateSchedule(kind="milestones", milestones=(1,), gamma=0.5)
    watch(style_lr=style_lr, rounds=2, schedule=schedule, head_lr=0.007)
    used = [r[0] if style_lr is None else r[1] for r in rates]
    assert used == pytest.approx([rate, rate, rate / 2, rate / 2])


def test_the_style_model_steps_with_its_client_and_is_clipped_alone():
    watch(rounds=1, accumulate=2)
    assert all(a == b > 0 for a, b in steps)
    assert max(norms) > 1e-3
    watch(rounds=1, grad_clip=1e-3)
    assert max(norms) <= 1e-3 * (1 + 1e-5)
    assert all(a == b > 0 for a, b in steps)


def test_moments_of_the_style_model_are_kept_if_a_client_keeps_its_optimizer():
    kept = play(DACS(), rounds=2, optimizer_state="keep").parts.clients["town0"].private_state()
    moments = kept["kept.optimizer style.momentum_buffer"]
    assert moments.numel() == kept["kept.style_std"].numel() * 2
    assert moments.abs().min() > 0
    reset = play(DACS(), rounds=2).parts.clients["town0"].private_state()
    assert not any("optimizer" in name for name in reset)


def test_a_frozen_model_passes_gradients_to_its_images_alone():
    model = make_model(FedPav())
    model.assemble(make_data(), 0, 1, torch.device("cpu"))
    flat_model = model.parts.models["smallcnn"]
    parameters = [*flat_model.network.parameters(), *flat_model.head.parameters()]
    fixed = parameters[0].requires_grad_(False)
    images = torch.randn(4, 3, 32, 16, requires_grad=True)
    with flat_model.frozen():
        flat_model.forward(images, "32-true").features.pool.square().sum().backward()
    assert images.grad.abs().max() > 0
    assert all(p.grad is None for p in parameters)
    assert [p.requires_grad for p in parameters] == [p is not fixed for p in parameters]
    with pytest.raises(ValueError, match="in between"), flat_model.frozen():
        raise ValueError("in between")
    assert all(p.requires_grad for p in parameters[1:])


def memory_of(method):
    model = make_model(method)
    data = make_data()
    model.assemble(data, 0, 1, torch.device("cpu"))
    placement = place(model.parts.costs, 1, 1)
    return device_memory(model.settings, model.parts, data, placement, "32-true"), len(model.parts.clients)


def test_described_memory_counts_style_models_and_passes():
    (plain, _), (bare, clients), (full, _) = map(memory_of, (FedPav(), DACS(lam_au=0.0), DACS()))
    style = 2 * 3 * 32 * 16 * 4
    assert bare.gradients - plain.gradients == style
    assert bare.moments - plain.moments == style, "SGD has one"
    assert bare.states - plain.states == clients * style
    assert bare.kept - plain.kept == 2 * style
    assert (bare.activations, full.activations) == (2 * plain.activations, 4 * plain.activations)
    assert (full.trained, full.frozen) == (2, 1)


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lam_div": -1.0}, r"model\.method\.lam_div: -1.0 is negative"),
        ({"lam_au": math.nan}, r"model\.method\.lam_au: nan is no finite number"),
        ({"style_lr": -0.1}, r"model\.method\.style_lr: -0.1 is negative"),
        ({"first_styled_round": -1}, r"model\.method\.first_styled_round: -1 is less than 0"),
    ],
)
def test_bad_numbers(options, message):
    with pytest.raises(ConfigError, match=message):
        DACS(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"micro_batch": 4}, r"^model\.client\.micro_batch: DACS needs whole batches; set it to null$"),
        ({"graph": True}, r"^model\.client\.graph: DACS, as it is configured, needs plain steps"),
        ({"cluster": Clustering()}, r"^model\.method: DACS, as it is configured, needs identities"),
    ],
)
def test_what_it_cannot_work_with_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        play(DACS(), rounds=1, **options)


def test_an_unknown_reading_is_one_line(capsys, tmp_path):
    line = refuse(
        capsys, "fit", "--config=quickstart", "--config=methods/dacs", f"--run_dir={tmp_path / 'run'}",
        "--model.method.init_args.diversity=sum",
    )  # fmt: skip
    assert "diversity" in line
    assert "sum" in line
