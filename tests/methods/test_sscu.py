"""SSCU: the authors' numbers, plain loops with three models and a memory, its gate, and its two readings."""

import copy
import json
import math
import random
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fedsim.core.errors import ConfigError
from fedsim.core.seeding import torch_generator
from fedsim.data import SyntheticReID
from fedsim.functional.memory import mean_memory, memory_logits, update_memory
from fedsim.functional.normalise import normalise_images
from fedsim.functional.style import restyle, style_of_places
from fedsim.methods import SSCU
from fedsim.methods import sscu as module
from fedsim.models import Neck
from fedsim.training.objective import Causality, Objective
from fedsim.training.settings import LocalTraining
from plain_loops import (
    NECK,
    Federation,
    Separating,
    Smooth,
    entropy_causality_loop,
    separated,
    shares,
    slow_retrieval,
    stage_heads_of,
)
from small import fit, make_data, make_model, vector

VECTORS = json.loads((Path(__file__).parent / "sscu_vectors.json").read_text())
COPY = {
    "gate": "tenth", "statistics": "image", "triplet_on_images": True, "judge": "training", "lam_au": 5.0,
}  # fmt: skip
"""settings of FedBPrompt's copy"""
SLIPS = {"memory_gradient": "after", "own_pass": True}
"""of both codes"""
LR, MOMENTUM, DECAY = 0.005, 0.9, 5e-4
exact = partial(torch.testing.assert_close, rtol=0, atol=3e-6)
near = partial(torch.testing.assert_close, rtol=0, atol=5e-5)
"""of running variances and experts, in which float32 rounds most"""
TAU = 0.5
"""of whole rounds: 0.05 makes the rounding of float32 grow twenty-fold faster"""
TRIPLET = 0.01
"""weight of the triplet loss there, which has kinks"""
SNR_WEIGHTS = (0.1, 0.5)


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


# -- (S1) to (S3) ------------------------------------------------------------------------------------------------------


def unit(vector_):
    length = math.sqrt(sum(value**2 for value in vector_))
    return [value / length for value in vector_]


def test_s2_s3_the_authors_memory():
    v = VECTORS["memory"]
    memory, features, labels = tensor(v["memory"]), tensor(v["features"]), torch.tensor(v["labels"])
    # their gradient is that of the loss by features that are scaled already
    leaf = features.clone().requires_grad_()
    loss = F.cross_entropy(leaf @ memory.T / v["temperature"], labels)
    assert loss.item() == pytest.approx(v["loss"], rel=1e-9)
    torch.testing.assert_close(torch.autograd.grad(loss, leaf)[0], tensor(v["grad_features"]), rtol=0, atol=1e-9)
    ours = F.cross_entropy(memory_logits(memory, 3 * features, v["temperature"]), labels)
    assert ours.item() == pytest.approx(v["loss"], rel=1e-9)
    after = update_memory(memory, F.normalize(3 * features), labels, v["momentum"])
    torch.testing.assert_close(after, tensor(v["after"]), rtol=0, atol=1e-9)
    assert torch.equal(memory, tensor(v["memory"]))
    backwards = update_memory(memory, F.normalize(features).flip(0), labels.flip(0), v["momentum"])
    assert not torch.allclose(after, backwards, atol=1e-3), "the order of a person's images matters"


def test_s1_s2_s3_are_loops():
    rng = random.Random(0)
    for _ in range(20):
        z, n, d = rng.randint(1, 4), rng.randint(1, 9), rng.randint(1, 3)
        features = [[rng.gauss(0, 1) for _ in range(d)] for _ in range(n)]
        labels = [rng.randrange(z) for _ in range(n)]
        first = [
            [sum(f[j] for f, y in zip(features, labels, strict=True) if y == k) for j in range(d)] for k in range(z)
        ]
        first = [unit(row) if any(row) else row for row in first]
        torch.testing.assert_close(mean_memory(tensor(features), torch.tensor(labels), z), tensor(first))
        memory = [unit([rng.gauss(0, 1) for _ in range(d)]) for _ in range(z)]
        logits = [[sum(a * b for a, b in zip(unit(f), m, strict=True)) / 0.05 for m in memory] for f in features]
        torch.testing.assert_close(memory_logits(tensor(memory), tensor(features), 0.05), tensor(logits))
        moved = [list(row) for row in memory]
        for f, y in zip(features, labels, strict=True):
            moved[y] = unit([0.9 * m + 0.1 * value for m, value in zip(moved[y], unit(f), strict=True)])
        most = max(map(labels.count, labels))
        found = update_memory(tensor(memory), F.normalize(tensor(features)), torch.tensor(labels), 0.9, most)
        torch.testing.assert_close(found, tensor(moved))


def test_images_are_restyled_by_the_statistics_of_places():
    v = VECTORS["stm"]
    x = tensor(v["x"])
    styled = restyle(x, style_of_places(x), (tensor(v["mean_hat"]), tensor(v["std_hat"])))
    torch.testing.assert_close(styled, tensor(v["stylised_batchwise"]), rtol=0, atol=1e-9)
    assert style_of_places(x[:1])[1].abs().max() == 0  # one image: no NaN


# -- whole rounds ------------------------------------------------------------------------------------------------------


class Loops:
    """The algorithm with three models and a memory for each client, in float64."""

    def __init__(self, data, bprompt=False, gate="always", first_styled=1, stages=None, judge="copy", released=False):
        self.federation, self.released = Federation(data, Smooth if stages is None else Separating), released
        self.bprompt, self.gate, self.first, self.judge = bprompt, "never" if bprompt else gate, first_styled, judge
        self.heads = {
            client.name: [[t[: client.head.out_features].clone().requires_grad_() for t in head] for head in stages]
            for client in (self.federation.clients if stages else ())
        }
        """the classifiers of SNR's layers"""
        self.lam_au = 5.0 if bprompt else 1.0
        self.experts, self.styles, self.memories, self.copies = {}, {}, {}, {}
        for client in self.federation.clients:
            normal = torch.randn((2, *client.x.shape[1:]), generator=torch_generator(0, client.name, "style")).double()
            self.styles[client.name] = [(1 + 0.1 * normal[0]).requires_grad_(), (0.1 * normal[1]).requires_grad_()]

    def round(self, t):
        states = []
        for client in self.federation.clients:
            f_g = copy.deepcopy(self.federation.model)
            self.open_memory(client, f_g)
            if client.name not in self.experts:
                self.experts[client.name] = copy.deepcopy(f_g)
            self.train(client, f_g.train(), t)
            states.append(f_g.state_dict())
        self.federation.move_to(states, shares(self.federation.clients))

    def open_memory(self, client, f_g):
        if client.name not in self.memories:
            z = f_g.eval()(client.x).neck.detach()
            if self.heads:  # the code's network with SNR returns features of length 1
                z = z / z.norm(dim=1, keepdim=True)
            sums = [z[client.y == y].mean(0) for y in range(int(client.y.max()) + 1)]
            self.memories[client.name] = torch.stack([row / row.norm() for row in sums])
        elif self.gate == "always":
            self.memories[client.name] = self.copies[client.name]

    def memory_loss(self, memory, z, y):
        loss = F.cross_entropy(z / z.norm(dim=1, keepdim=True) @ memory.T / TAU, y)
        return loss + TRIPLET * self.triplet(z, y) if self.bprompt else loss

    @staticmethod
    def slip(memory, moved, z, y):
        """Return a term of value 0: its gradient turns that of L_mem by ``memory`` into that by ``moved``."""
        unit_z = z / z.norm(dim=1, keepdim=True)
        p = (unit_z.detach() @ memory.T / TAU).softmax(1)
        of_logits = (p - F.one_hot(y, len(memory)).double()) / TAU / len(y)  # of their mean cross-entropy
        term = (unit_z * (of_logits @ (moved - memory))).sum()
        return term - term.detach()

    def causality(self, net, x, y, client, moves=True):
        if not self.heads:
            return 0.0
        heads = [[t if moves else t.detach() for t in head] for head in self.heads[client.name]]
        return entropy_causality_loop(separated(net.backbone, x), heads, y, SNR_WEIGHTS)

    @staticmethod
    def triplet(z, y):
        terms = []
        for i in range(len(z)):
            d = [(z[i] - z[j]).square().sum().clamp_min(1e-12).sqrt() for j in range(len(z))]
            same = [d[j] for j in range(len(z)) if y[j] == y[i] and j != i]
            other = [d[j] for j in range(len(z)) if y[j] != y[i]]
            if same and other:
                terms.append((0.3 + max(same) - min(other)).clamp_min(0))
        return torch.stack(terms).mean() if terms else z.sum() * 0

    @staticmethod
    def entropy(logits):
        p = logits.softmax(1)
        return -(p * p.log()).sum(1).mean()

    def train(self, client, f_g, t):
        f_l, head = self.experts[client.name].train(), client.head
        s, m = self.styles[client.name]
        memory, velocity = self.memories[client.name].clone(), {}
        of_g = [*f_g.parameters(), *head.parameters(), *(t for pair in self.heads.get(client.name, ()) for t in pair)]
        for x, y in client.batches(t):
            loss = self.memory_loss(memory, f_l(x).neck, y) + self.causality(f_l, x, y, client, moves=False)
            self.step([*f_l.parameters()], loss, velocity)
            plain = f_g(x).neck
            loss = self.memory_loss(memory, plain, y)
            dims = (2, 3) if self.bprompt else (0,)
            mu, var = x.mean(dims, keepdim=True), x.var(dims, unbiased=True, keepdim=True)
            styled = s * (x - mu) / (var.sqrt() + 1e-8) + m
            z, start = f_g(styled).neck, memory
            memory = start.clone()
            for z_i, y_i in zip(z.detach(), y.tolist(), strict=True):
                moved = 0.9 * memory[y_i] + 0.1 * z_i / z_i.norm()
                memory[y_i] = moved / moved.norm()
            if self.released:  # the gradient that a backward has which multiplies by the memory as it is by then
                loss = loss + self.slip(start, memory, plain, y)
            loss = loss + self.causality(f_g, x, y, client)
            if t < self.first:
                self.step(of_g, loss, velocity)
                continue
            judge = copy.deepcopy(f_g).train(self.bprompt)
            if self.released:
                z = f_g(styled).neck
            loss = loss + F.cross_entropy(head(z), y) + (TRIPLET * self.triplet(z, y) if self.bprompt else 0)
            loss = loss + self.causality(f_g, styled, y, client)
            loss = loss - ((mu - m) ** 2).mean() - ((var - s**2) ** 2).mean()
            by_f_g = (plain, z) if self.judge == "itself" else (judge(x).neck, judge(styled).neck)
            h = [self.entropy(head(features)) for features in (*by_f_g, f_l(styled).neck)]
            loss = loss + self.lam_au * ((1 + (h[0] - h[1]).exp()).log() + (1 + (h[1] - h[2]).exp()).log())
            self.step([*of_g, s, m], loss, velocity)
        self.copies[client.name] = memory

    @staticmethod
    def step(parameters, loss, velocity):
        """SGD with momentum and decay on what has a gradient; the momentum ends with the round."""
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        with torch.no_grad():
            for p, g in zip(parameters, gradients, strict=True):
                if g is not None:
                    g = g + DECAY * p
                    velocity[p] = MOMENTUM * velocity[p] + g if p in velocity else g.clone()
                    p -= LR * velocity[p]


def two_clients(**options):
    return make_data(SyntheticReID(clients=2, unseen=1, scale=0.2), **options)


def play(method, rounds=3, data=None, triplet=0.0, causality=None):
    optimizer = partial(torch.optim.SGD, lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    training = LocalTraining(batch_size=8, optimizer=optimizer)
    objective = Objective(triplet=triplet, margin=0.3, causality=causality)
    backbone = Smooth() if causality is None else Separating()
    model = make_model(method, backbone=backbone, neck=NECK, client=training, objective=objective)
    return fit(model, data or two_clients(), rounds=rounds)


def clients_like(loops, model):
    """Compare f_G, and of each client its head, expert and style model; yield the loops' client and ours, loaded."""
    [(arch, flat_model)] = model.parts.models.items()
    expected = loops.federation.model.state_dict()
    for entry in flat_model.flat.shared_entries:
        near(vector(model, arch)[entry.span].view(entry.shape).double(), expected[entry.name])
    for plain in loops.federation.clients:
        client, expert = model.parts.clients[plain.name], loops.experts[plain.name].state_dict()
        client.load()
        exact(flat_model.head.weight.detach().double(), plain.head.weight.detach())
        exact(client.kept["style_std"].double(), loops.styles[plain.name][0].detach())
        for entry in flat_model.flat.entries:
            if entry.name.startswith("stage_heads."):  # of f_G alone
                continue
            near(client.kept["expert"][entry.span].view(entry.shape).double(), expert[entry.name])
        yield plain, client
        client.unload()


@pytest.mark.parametrize(
    ("options", "of_loops"),
    [
        ({}, {}),
        ({"gate": "never", "first_styled_round": 2}, {"gate": "never", "first_styled": 2}),
        (COPY, {"bprompt": True}),
        (SLIPS, {"released": True}),
        (COPY | SLIPS, {"bprompt": True, "released": True}),
    ],
    ids=["authors", "authors, gate never", "FedBPrompt's copy", "authors' code", "copy's code"],
)
def test_s4_rounds(options, of_loops):
    """Everything that is left after three rounds: f_G, heads, experts, style models, memories."""
    loops = Loops(two_clients(), **of_loops)
    for t in range(3):
        loops.round(t)
    model = play(SSCU(temperature=TAU, **options), triplet=TRIPLET * ("bprompt" in of_loops))
    for plain, client in clients_like(loops, model):
        exact(client.kept["style_mean"].double(), loops.styles[plain.name][1].detach())
        near(client.kept["memory"].double(), loops.memories[plain.name])
        near(client.kept["candidate"].double(), loops.copies[plain.name])


@pytest.mark.parametrize(("judge", "slips"), [("copy", {}), ("itself", {}), ("itself", SLIPS)])
def test_rounds_with_snr(judge, slips):
    """As the authors' script: losses of SNR's layers in both models and for both kinds of images."""
    model = play(SSCU(temperature=TAU, judge=judge, **slips), causality=Causality(form="entropy", weights=SNR_WEIGHTS))
    loops = Loops(two_clients(), stages=stage_heads_of(model), judge=judge, released=bool(slips))
    for t in range(3):
        loops.round(t)
    flat_model = model.parts.models["separating"]
    for plain, _ in clients_like(loops, model):
        for head, wanted in zip(flat_model.network.stage_heads, loops.heads[plain.name], strict=True):
            exact(head.weight[: len(wanted[0])].detach().double(), wanted[0].detach())
            exact(head.bias[: len(wanted[1])].detach().double(), wanted[1].detach())
    assert ("judge" in flat_model._replicas) == (judge == "copy")
    assert model.settings.method.replicas.keys() == flat_model._replicas.keys()


def test_without_styles_and_gate_it_is_cross_entropy_with_fixed_vectors():
    """gate never, no expert, no styled round: heads stay, memories stay, f_G trains by L_mem alone."""
    model = play(SSCU(gate="never", lam_au=0.0, first_styled_round=9))
    once = play(SSCU(gate="never", lam_au=0.0, first_styled_round=9), rounds=1)
    for name, client in model.parts.clients.items():
        state, first = client.private_state(), once.parts.clients[name].private_state()
        assert torch.equal(state["kept.memory"], first["kept.memory"])
        assert torch.equal(state["state"], first["state"]), "the head has no loss"
        assert "kept.expert" not in state
    assert not torch.equal(vector(model, "smooth"), vector(once, "smooth"))


# -- the gate ----------------------------------------------------------------------------------------------------------


def held_out_data():
    return two_clients(val="identities", val_fraction=0.4)


def kept(model, name):
    return {client: c.private_state()[f"kept.{name}"] for client, c in model.parts.clients.items()}


@pytest.mark.parametrize("scores", [(0.5, 0.5, 0.6), (0.5, 0.4, 0.4), (0.0, 0.1, 0.05)])
def test_a_memory_takes_the_copy_unless_the_score_falls(scores, monkeypatch):
    """Scores of the second, third and fourth session, as if measured; the first gate is open."""
    memories, candidates, last = [], [], 0.0
    for rounds in range(1, 5):
        sessions = {}

        def score(client, sessions=sessions):
            sessions[client.client_name] = sessions.get(client.client_name, -1) + 1
            return scores[sessions[client.client_name]]

        monkeypatch.setattr(module, "_held_out_rank1", score)
        model = play(SSCU(gate="own"), rounds=rounds, data=held_out_data())
        memories.append(kept(model, "memory"))
        candidates.append(kept(model, "candidate"))
    for session, value in enumerate(scores, start=1):
        for name in memories[0]:
            expected = candidates[session - 1][name] if value >= last else memories[session - 1][name]
            assert torch.equal(memories[session][name], expected), (session, name)
        last = value


def test_the_gate_scores_the_received_model_on_held_out_people(monkeypatch):
    measured = []
    plain = module._held_out_rank1

    def watched(client):
        rank1 = plain(client)
        val = client.data.val
        parts = [val.gallery] if val.own is not None else [val.query, val.gallery]
        client.model.network.eval()
        with torch.no_grad():
            pictures = [normalise_images(part.images.decode((32, 16))) for part in parts]
            features = torch.cat([client.model.network(x).neck for x in pictures])
        people = [int(pid) for part in parts for pid in part.pids]
        cameras = [int(camera) for part in parts for camera in part.camids]
        measured.append((rank1, slow_retrieval(features.tolist(), people, cameras)[1]))
        assert not {*people} & {int(pid) for pid in client.data.train.pids}
        client.model.network.train()
        return rank1

    monkeypatch.setattr(module, "_held_out_rank1", watched)
    play(SSCU(gate="own"), rounds=3, data=held_out_data())
    assert len(measured) == 4  # two clients, from their second session on
    assert all(found == pytest.approx(expected) for found, expected in measured)


def test_a_gate_by_held_out_people_needs_some():
    with pytest.raises(
        ConfigError, match=r"^model.method: SSCU, as it is configured, needs held-out images, and client "
    ):
        play(SSCU(gate="own"))


def test_always_open_takes_each_copy():
    one, two = play(SSCU(), rounds=1), play(SSCU(), rounds=2)
    for name, candidate in kept(one, "candidate").items():
        assert torch.equal(kept(two, "memory")[name], candidate)


def test_the_gate_of_every_tenth_round_takes_the_copy_of_round_10():
    one, eleven, twelve = (play(SSCU(gate="tenth"), rounds=rounds) for rounds in (1, 11, 12))
    for name, first in kept(one, "memory").items():
        assert torch.equal(kept(eleven, "memory")[name], first)
        assert torch.equal(kept(twelve, "memory")[name], kept(eleven, "candidate")[name])


@pytest.mark.parametrize("judge", ["copy", "training"])
def test_a_judge_in_training_mode_draws_anew_for_each_batch(judge, monkeypatch):
    asked_twice, once = [], SSCU._judge

    def twice(method, client, images):
        answers = [once(method, client, images)[0].detach().clone() for _ in range(2)]
        asked_twice.append(torch.equal(*answers))
        return once(method, client, images)

    monkeypatch.setattr(SSCU, "_judge", twice)
    fit(make_model(SSCU(judge=judge), neck=Neck(dim=8, dropout=0.5)), two_clients(), rounds=2)
    assert asked_twice
    assert set(asked_twice) == {judge == "copy"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, "temperature: 0.0 is not positive"),
        ({"momentum": 1.5}, r"momentum: 1.5 is not in \[0, 1\]"),
        ({"lam_au": -1.0}, "lam_au: -1.0 is negative"),
    ],
)
def test_mistakes_are_named(options, message):
    with pytest.raises(ConfigError, match=rf"^model\.method\.{message}"):
        SSCU(**options)
