"""Federations as plain loops over torch modules in float64: what the equations of methods are compared with."""

import copy
import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from fedsim.core.seeding import torch_generator
from fedsim.data.batches import shuffled_batches
from fedsim.functional.normalise import normalise_images
from fedsim.models import Neck, ReIDModel
from fedsim.models.style import SNR
from fedsim.training.settings import LocalTraining
from small import fit, make_data, make_model, named, receive

LR = 0.02
NECK = Neck(kind="bnneck", dropout=0.0)


class Smooth(nn.Module):
    """A backbone without kinks: rounding does not grow."""

    out_channels = 6

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 6, 3, stride=2)
        self.norm = nn.BatchNorm2d(6)

    def forward(self, images):
        return torch.tanh(self.norm(self.conv(images)))


class Layers(nn.Module):
    """Another one, of two convolutions."""

    out_channels = 6

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 4, 3, stride=2)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 6, 3, stride=2)

    def forward(self, images):
        return torch.tanh(self.second(torch.tanh(self.norm(self.first(images)))))


class Separating(nn.Module):
    """Two convolutions, and an SNR layer behind each."""

    out_channels = 6

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.first_snr = nn.Conv2d(3, 4, 3, stride=2), SNR(4, reduction=2)
        self.second, self.second_snr = nn.Conv2d(4, 6, 3, stride=2), SNR(6, reduction=2)

    def forward(self, images):
        maps = self.first_snr(torch.tanh(self.first(images)))
        return self.second_snr(torch.tanh(self.second(maps)))


def separated(backbone, x):
    """F~, F+ and F- of both layers of ``Separating``, pooled, by their equations."""
    parts = []
    for conv, snr in ((backbone.first, backbone.first_snr), (backbone.second, backbone.second_snr)):
        f = torch.tanh(conv(x))
        mu, var = f.mean((2, 3), keepdim=True), f.var((2, 3), unbiased=False, keepdim=True)
        plain = (f - mu) / (var + 1e-5).sqrt() * snr.norm.weight[:, None, None] + snr.norm.bias[:, None, None]
        hidden = ((f - plain).mean((2, 3)) @ snr.reduce.weight.T + snr.reduce.bias).clamp_min(0)
        a = 1 / (1 + (-(hidden @ snr.expand.weight.T + snr.expand.bias)).exp())[:, :, None, None]
        plus, minus = plain + a * (f - plain), plain + (1 - a) * (f - plain)
        parts.append([part.mean((2, 3)) for part in (plain, plus, minus)])
        x = plus
    return parts


def entropy_causality_loop(parts, heads, labels, weights, cross_entropy=(0.0, 0.0)):
    """SNR's loss with entropies, layer by layer; ``heads``: weight and bias of each."""
    total = 0.0
    for layer, (weight, bias), w, c in zip(parts, heads, weights, cross_entropy, strict=True):
        h = []
        for part in layer:
            p = (part @ weight.T + bias).softmax(1)
            h.append(-(p * p.log()).sum(1).mean())
        plain, plus, minus = h
        total = total + w * ((1 + (plus - plain).exp()).log() + (1 + (plain - minus).exp()).log())
        total = total + c * F.cross_entropy(layer[1] @ weight.T + bias, labels)
    return total


def stage_heads_of(model, arch="separating"):
    """The classifiers of SNR layers with which every client starts, weight and bias of each, in float64."""
    flat_model = model.parts.models[arch]
    entries = {e.name: e for e in flat_model.flat.entries if e.name.startswith("stage_heads.")}
    values = {}
    for name, entry in entries.items():
        begin = entry.span.start - flat_model.flat.num_shared
        values[name] = flat_model.initial_private[begin : begin + entry.numel].view(entry.shape).double()
    return [[values[f"stage_heads.{i}.{part}"] for part in ("weight", "bias")] for i in range(2)]


class Participant:
    """A client: its images, and its head."""

    def __init__(self, data, size):
        self.name, self.num_images = data.name, data.num_images
        self.x = normalise_images(data.train.images.decode(size)).double()
        self.y = torch.from_numpy(data.labels)
        self.head = nn.Linear(6, data.num_classes)
        nn.init.normal_(self.head.weight, std=0.001, generator=torch_generator(0, data.name, "head"))
        nn.init.zeros_(self.head.bias)
        self.head.double()

    def batches(self, round_, passes=1):
        """The batches of a round, of one or several passes over the images."""
        generator = torch_generator(0, round_, self.name, "batches")
        order = [index for _ in range(passes) for index in shuffled_batches(self.num_images, 8, generator)]
        return [(self.x[index], self.y[index]) for index in order]


class Federation:
    """The server's model and the participants; whoever wants less than everybody says so."""

    def __init__(self, data=None, backbone=Smooth):
        self.data = data or make_data()
        if self.data.federated is None:
            self.data.setup("fit")
        self.clients = [Participant(c, self.data.size) for c in self.data.federated.clients]
        backbone = backbone()
        torch.manual_seed(0)
        self.model = ReIDModel(backbone, NECK).double()

    def move_to(self, states, weights):
        """Make the model the weighted mean of state dicts, statistics included."""
        self.model.load_state_dict(mean_of(states, weights))


def mean_of(states, weights):
    """Weighted mean of state dicts, entry by entry."""
    mean = copy.deepcopy(states[0])
    for key, value in mean.items():
        if value.is_floating_point():
            mean[key] = sum(weight * state[key] for weight, state in zip(weights, states, strict=True))
    return mean


def shares(clients):
    """n_k / n."""
    return [c.num_images / sum(c.num_images for c in clients) for c in clients]


def sgd(model, head, batches, loss_of=None, correct=None, momentum=0.0, moves=lambda name: True):
    """Plain SGD on a model and its head, in place. ``correct(name, p)``: what is added to the gradient of ``p``.

    ``moves(name)``: whether the parameter is stepped; all others stay.
    """
    parameters = {**dict(model.named_parameters()), **{f"head.{n}": p for n, p in head.named_parameters()}}
    parameters = {name: p for name, p in parameters.items() if moves(name)}
    velocity = {name: torch.zeros_like(p) for name, p in parameters.items()}
    model.train()
    for x, y in batches:
        features = model(x)
        loss = F.cross_entropy(head(features.neck), y)
        loss = loss + (loss_of(x, features) if loss_of else 0.0)
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        for (name, p), g in zip(parameters.items(), gradients, strict=True):
            with torch.no_grad():
                if correct and not name.startswith("head."):
                    g = g + correct(name, p)
                velocity[name] = momentum * velocity[name] + g
                p -= LR * velocity[name]


def play(method, rounds, momentum=0.0, data=None, backbone=Smooth, epochs=1, **options):
    """The same by fedsim."""
    optimizer = partial(torch.optim.SGD, lr=LR, momentum=momentum)
    training = LocalTraining(batch_size=8, local_epochs=epochs, optimizer=optimizer)
    model = make_model(method, backbone=backbone(), neck=NECK, client=training, **options)
    return fit(model, data, rounds=rounds)


def assert_close(model, reference, tolerance=2e-6, arch="smooth"):
    """Compare fedsim's global model with the reference's."""
    expected = reference.model.state_dict()
    found = named(model, arch)
    assert found.keys() == {name for name in expected if "num_batches" not in name}
    for name, tensor in found.items():
        torch.testing.assert_close(
            tensor.double(), expected[name], rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def assert_personalised(model, expected, tolerance=2e-6):
    """Compare the clients' personalised models with the reference's: client -> its model and head."""
    method = model.settings.method
    for name, client in model.parts.clients.items():
        client.load()
        receive(client, method, model.server)
        method.personalise(client)
        plain, head = expected[name]
        state = plain.state_dict() | {f"head.{n}": p.detach() for n, p in head.named_parameters()}
        flat_model = client.model
        personal = {e.name: flat_model.flat.buffer[e.span].view(e.shape) for e in flat_model.flat.entries}
        personal |= {f"head.{n}": p.detach() for n, p in flat_model.head.named_parameters()}
        assert personal.keys() == {n for n in state if "num_batches" not in n}
        for n, tensor in personal.items():
            torch.testing.assert_close(
                tensor.double(),
                state[n].double(),
                rtol=0,
                atol=tolerance,
                msg=lambda m, n=n, name=name: f"{name} {n}: {m}",
            )
        client.unload()


def vector_of(model, flat_model):
    """A plain model's state in the order of a flat buffer's shared entries, name -> tensor."""
    state = model.state_dict()
    return {entry.name: state[entry.name] for entry in flat_model.flat.shared_entries}


def slow_retrieval(features, groups, cameras):
    """Every image searches for its group, and who counts is decided pair by pair; mAP and rank-1."""
    n, right, precisions = len(groups), [], []
    cameras_of = {g: {cameras[i] for i in range(n) if groups[i] == g} for g in groups}
    for i in range(n):
        if groups[i] < 0 or groups.count(groups[i]) < 2:
            continue
        ranked = []
        for j in range(n):
            alike = groups[j] == groups[i] and cameras[j] == cameras[i] and len(cameras_of[groups[i]]) > 1
            if groups[j] < 0 or j == i or alike:
                continue
            a, b = features[i], features[j]
            cosine = sum(x * y for x, y in zip(a, b, strict=True)) / math.hypot(*a) / math.hypot(*b)
            ranked.append((-cosine, j, groups[j] == groups[i]))
        hits = [hit for _, _, hit in sorted(ranked)]
        right.append(hits[0])
        found = [sum(hits[: rank + 1]) / (rank + 1) for rank, hit in enumerate(hits) if hit]
        precisions.append(sum(found) / len(found))
    return (sum(precisions) / len(right), sum(right) / len(right)) if right else (0.0, 0.0)
