"""SNR's dual causality loss: plain loops, the authors' entropies, and its place among the terms of the objective."""

import json
import math
import random
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear

from fedsim.core.errors import ConfigError
from fedsim.functional.losses import authenticity, causality_loss, mean_entropy
from fedsim.methods import DACS, SKA, FedPav, FedReID
from fedsim.models import Neck, ReIDModel, SmallCNN, StyleLayers
from fedsim.models.style import SNR
from fedsim.training.objective import Causality, Objective
from fedsim.training.settings import LocalTraining
from small import fit, make_model, state_of

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
    """The other form, of which only the equation is here: entropies of a head on pooled F+, F~ and F-."""
    parts = [tensor(VECTORS[name]).mean(dim=(2, 3)) for name in ("plus", "normalised", "minus")]
    head = tensor(VECTORS["head_w"]), tensor(VECTORS["head_b"])
    plus, normalised, minus = (mean_entropy(linear(part, *head)) for part in parts)
    assert [normalised.item(), plus.item(), minus.item()] == pytest.approx(
        VECTORS["entropies_normalised_plus_minus"], rel=1e-9
    )
    assert authenticity(plus, normalised, minus).item() == pytest.approx(VECTORS["causality"], rel=1e-9)


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
    separated = network.take_separated()
    assert len(separated) == 2
    for layer, parts in zip(layers, separated, strict=True):
        for part, whole in zip(parts, layer.separate(maps[layer]), strict=True):
            torch.testing.assert_close(part, whole.mean(dim=(2, 3)))
    network.eval()(images)
    assert network.take_separated() == ()
    assert all(layer.take_separated() is None for layer in layers)


@pytest.mark.parametrize(
    "method", [FedPav(), DACS(first_styled_round=0), FedReID(), SKA()], ids=lambda m: type(m).__name__
)
def test_it_trains_the_gates_with_any_method(method):
    training = LocalTraining(batch_size=8, optimizer=partial(torch.optim.SGD, lr=0.005))
    plain, with_loss, without = (
        fit(make_model(method, backbone=backbone(), objective=Objective(causality=loss), client=training))
        for loss in (None, Causality(weights=(0.5, 0.5)), Causality(weights=(0.0, 0.0)))
    )
    a, b, c = (state_of(model) for model in (plain, with_loss, without))
    assert all(torch.equal(a[name], c[name]) for name in a)
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
