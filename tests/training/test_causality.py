"""SNR's dual causality loss: plain loops, the authors' entropies, and its place among the terms of the objective."""

import copy
import json
import math
import random
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.nn.functional import linear

from fedsim.core.errors import ConfigError
from fedsim.functional.losses import causality_loss, entropy_causality, mean_entropy
from fedsim.methods import DACS, SKA, FedPav, FedReID
from fedsim.models import Neck, ReIDModel, SmallCNN, StyleLayers
from fedsim.models.groups import Group, group_names
from fedsim.models.style import SNR, Separated
from fedsim.training.objective import Causality, Objective
from fedsim.training.settings import LocalTraining
from plain_loops import NECK, Federation, Separating, entropy_causality_loop, separated, shares, stage_heads_of
from small import fit, make_model, named, state_of

VECTORS = json.loads((Path(__file__).parent / "causality_vectors.json").read_text())["snr"]


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def softplus(value):
    return math.log(1 + math.exp(value))


def distance(a, b):
    cosine = sum(x * y for x, y in zip(a, b, strict=True)) / math.hypot(*a) / math.hypot(*b)
    return (1 - cosine) / 2


def loss_loop(normalised, relevant, other, labels):
    """Anchor by anchor."""
    terms = []
    for a, label in enumerate(labels):
        same = [i for i, y in enumerate(labels) if y == label and i != a]
        others = [i for i, y in enumerate(labels) if y != label]
        if not same or not others:
            continue

        def mean(features, images, a=a):
            return sum(distance(features[a], features[i]) for i in images) / len(images)

        terms.append(
            softplus(mean(relevant, same) - mean(normalised, same))
            + softplus(mean(normalised, others) - mean(relevant, others))
            + softplus(mean(normalised, same) - mean(other, same))
            + softplus(mean(other, others) - mean(normalised, others))
        )
    return sum(terms) / len(terms) if terms else 0.0


def test_the_loss_is_a_loop_over_anchors():
    rng = random.Random(0)
    for _ in range(30):
        batch, width = rng.randint(2, 7), rng.randint(2, 5)
        labels = [rng.randrange(3) for _ in range(batch)]
        parts = [[[rng.gauss(0, 1) for _ in range(width)] for _ in range(batch)] for _ in range(3)]
        found = causality_loss(*map(tensor, parts), torch.tensor(labels))
        assert found.item() == pytest.approx(loss_loop(*parts, labels), rel=1e-9, abs=1e-12)


def test_parts_that_tell_people_apart_have_a_small_loss():
    """F+ groups people, F- mixes them up, F~ is between: each term is below ln 2; swapped, above."""
    good, bad = tensor([[1, 0], [1, 0], [0, 1], [0, 1]]), tensor([[1, 0], [0, 1], [1, 0], [0, 1]])
    between, labels = tensor([[1, 1], [1, 1], [1, 1], [1, 1]]), torch.tensor([0, 0, 1, 1])
    right, wrong = (causality_loss(between, *parts, labels).item() for parts in ((good, bad), (bad, good)))
    assert right < 4 * math.log(2) < wrong


def test_the_authors_entropies():
    parts = [tensor(VECTORS[name]).mean(dim=(2, 3)) for name in ("normalised", "plus", "minus")]
    head = tensor(VECTORS["head_w"]), tensor(VECTORS["head_b"])
    logits = [linear(part, *head) for part in parts]
    found = [mean_entropy(z).item() for z in logits]
    assert found == pytest.approx(VECTORS["entropies_normalised_plus_minus"], rel=1e-9)
    assert entropy_causality(*logits).item() == pytest.approx(VECTORS["causality"], rel=1e-9)
    loss = Causality(form="entropy", weights=(0.5, 0.0))([Separated(*logits)] * 2, torch.tensor([0, 1]))
    assert loss.item() == pytest.approx(VECTORS["causality"] / 2, rel=1e-9)


def entropy(logits):
    """Of one image."""
    total = sum(map(math.exp, logits))
    return -sum(math.exp(z) / total * math.log(math.exp(z) / total) for z in logits)


def test_entropies_are_a_loop_over_images():
    rng = random.Random(0)
    for _ in range(30):
        batch, classes, layers = rng.randint(1, 6), rng.randint(1, 5), rng.randint(1, 3)
        labels = [rng.randrange(classes) for _ in range(batch)]
        weights, ce = ([rng.choice([0.0, 0.3, 1.0]) for _ in range(layers)] for _ in range(2))
        stages = [
            [[[rng.gauss(0, 2) for _ in range(classes)] for _ in range(batch)] for _ in range(3)] for _ in range(layers)
        ]
        expected = 0.0
        for (plain, plus, minus), w, c in zip(stages, weights, ce, strict=True):
            h, h_plus, h_minus = (sum(map(entropy, part)) / batch for part in (plain, plus, minus))
            guesses = [math.exp(z[y]) / sum(map(math.exp, z)) for z, y in zip(plus, labels, strict=True)]
            expected += w * (softplus(h_plus - h) + softplus(h - h_minus)) - c * sum(map(math.log, guesses)) / batch
        loss = Causality(form="entropy", weights=tuple(weights), cross_entropy=tuple(ce))
        found = loss([Separated(*map(tensor, parts)) for parts in stages], torch.tensor(labels))
        assert found.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_features_near_zero_have_bounded_gradients():
    """Without a direction all images are equal: distance 0, as for any equal features."""
    parts = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0))
    labels, flat = torch.tensor([0, 0, 1, 1]), torch.full((4, 3), 1e-9, requires_grad=True)
    loss = causality_loss(flat, *parts, labels)
    loss.backward()
    assert flat.grad.abs().max() < 1
    same = causality_loss(torch.ones(4, 3), *parts, labels)
    torch.testing.assert_close(loss, same)


def backbone(*places):
    torch.manual_seed(0)
    return SmallCNN(8, style=StyleLayers(kind="snr", after=places or ("layer1", "layer2")))


def test_a_training_pass_gives_the_pooled_parts_once():
    network = ReIDModel(backbone(), Neck(kind="bnneck", dropout=0.0))
    network.keep_separated(2)
    maps, images = {}, torch.randn(4, 3, 32, 16)
    layers = [m for m in network.modules() if isinstance(m, SNR)]
    for layer in layers:
        layer.register_forward_pre_hook(lambda module, inputs: maps.update({module: inputs[0].detach().clone()}))
    network.train()(images)
    kept = network.take_separated(4)
    assert len(kept) == 2
    for layer, parts in zip(layers, kept, strict=True):
        for part, whole in zip(parts, layer.separate(maps[layer]), strict=True):
            torch.testing.assert_close(part, whole.mean(dim=(2, 3)))
    network.eval()(images)
    assert network.take_separated(4) == ()
    assert all(layer.take_separated() is None for layer in layers)


@pytest.mark.parametrize(
    "method", [FedPav(), DACS(first_styled_round=0), FedReID(), SKA()], ids=lambda m: type(m).__name__
)
@pytest.mark.parametrize("form", ["distance", "entropy"])
def test_it_trains_the_gates_with_any_method(method, form):
    training = LocalTraining(batch_size=8, optimizer=partial(torch.optim.SGD, lr=0.005))
    plain, with_loss, without = (
        fit(make_model(method, backbone=backbone(), objective=Objective(causality=loss), client=training))
        for loss in (None, Causality(weights=(0.5, 0.5), form=form), Causality(weights=(0.0, 0.0), form=form))
    )
    a, b, c = (state_of(model) for model in (plain, with_loss, without))
    comparable = a if form == "distance" else ["global"]  # private states have classifiers, too
    assert all(torch.equal(a[name], c[name]) for name in comparable)
    assert not torch.equal(a["global"], b["global"])
    assert 0 < with_loss.round_metrics["train/town0/causality"] < 10


def test_layers_and_weights_must_agree():
    for places, weights in [(("layer1",), (0.1, 0.1)), ((), (0.1, 0.1, 0.5))]:
        model = make_model(
            FedPav(), backbone=backbone(*places), objective=Objective(causality=Causality(weights=weights))
        )
        with pytest.raises(ConfigError, match=r"^model.objective.causality.weights: there are \d, but \d style layers"):
            fit(model)
    with pytest.raises(ConfigError, match=r"^model.objective.causality.weights: -1.0 is negative"):
        Causality(weights=(0.1, -1.0))


# -- whole rounds with classifiers of the layers -----------------------------------------------------------------------

LR, MOMENTUM = 0.05, 0.9
LOSS = Causality(form="entropy", weights=(0.5, 1.0), cross_entropy=(0.0, 0.3))


def play(**options):
    training = LocalTraining(batch_size=8, optimizer=partial(torch.optim.SGD, lr=LR, momentum=MOMENTUM))
    objective = Objective(causality=LOSS)
    return make_model(FedPav(), backbone=Separating(), neck=NECK, client=training, objective=objective, **options)


def rounds_by_loops(starts, num_rounds):
    """FedPav in float64; return the reference, and the classifiers of each client."""
    reference = Federation(backbone=Separating)
    classifiers = {
        c.name: [[t[: c.head.out_features].clone().requires_grad_() for t in head] for head in starts]
        for c in reference.clients
    }
    for t in range(num_rounds):
        states = []
        for client in reference.clients:
            model, heads, velocity = copy.deepcopy(reference.model).train(), classifiers[client.name], {}
            parameters = [*model.parameters(), *client.head.parameters(), *(p for head in heads for p in head)]
            for x, y in client.batches(t):
                loss = F.cross_entropy(client.head(model(x).neck), y)
                parts = separated(model.backbone, x)
                loss = loss + entropy_causality_loop(parts, heads, y, LOSS.weights, LOSS.cross_entropy)
                gradients = torch.autograd.grad(loss, parameters)
                with torch.no_grad():
                    for p, g in zip(parameters, gradients, strict=True):
                        velocity[p] = MOMENTUM * velocity[p] + g if p in velocity else g.clone()
                        p -= LR * velocity[p]
            states.append(model.state_dict())
        reference.move_to(states, shares(reference.clients))
    return reference, classifiers


def test_rounds_with_classifiers_of_the_layers():
    """The global model, and each client's classifiers: they stay with it, and have no rows for others' people."""
    model = fit(play(), rounds=2)
    starts = stage_heads_of(model)
    reference, classifiers = rounds_by_loops(starts, 2)
    # float32 against float64: convolutions of some processors are 1.2e-6 off after two rounds
    expected, near = reference.model.state_dict(), partial(torch.testing.assert_close, rtol=0, atol=1e-5)
    for name, found in named(model, "separating").items():
        near(found.double(), expected[name])
    flat_model, sizes = model.parts.models["separating"], set()
    for name, heads in classifiers.items():
        client = model.parts.clients[name]
        client.load()
        for head, plain, start in zip(flat_model.network.stage_heads, heads, starts, strict=True):
            for found, wanted, first in zip((head.weight, head.bias), plain, start, strict=True):
                near(found.detach()[: len(wanted)].double(), wanted.detach())
                assert torch.equal(found[len(wanted) :].double(), first[len(wanted) :])
                sizes.add(len(wanted))
        client.unload()
    assert len(sizes) > 1, "clients differ in their numbers of people"


def test_classifiers_of_layers_are_heads_and_private():
    with_heads, without = (fit(make_model(FedPav(), **options), rounds=1) for options in (
        {"backbone": Separating(), "objective": Objective(causality=LOSS)}, {"backbone": Separating()},
    ))  # fmt: skip
    flat_model, plain = (model.parts.models["separating"] for model in (with_heads, without))
    heads = [name for name, group in flat_model.groups.items() if group is Group.HEAD]
    assert heads == [f"stage_heads.{i}.{part}" for i in range(2) for part in ("weight", "bias")]
    assert flat_model.shared_bytes == plain.shared_bytes
    assert flat_model.serves("pool")
    groups = group_names(flat_model.network)
    assert {name for name in groups if groups[name] is Group.HEAD} == set(heads)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cross_entropy": (0.1, 0.1, 0.1)}, "cross_entropy: only form entropy has classifiers; leave it empty"),
        ({"form": "entropy", "cross_entropy": (0.1,)}, "cross_entropy: there are 1 numbers, and 3 weights; give one "),
        ({"form": "entropy", "cross_entropy": (0.0, 0.0, -0.1)}, "cross_entropy: -0.1 is negative"),
    ],
)
def test_mistakes_are_named(options, message):
    with pytest.raises(ConfigError, match=rf"^model\.objective\.causality\.{message}"):
        Causality(**options)
