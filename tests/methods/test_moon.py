"""MOON against loops that keep three whole models; the contrastive loss against its fraction, in scalars."""

import copy
import math

import pytest
import torch

from fedsim.core.errors import ConfigError
from fedsim.functional.losses import model_contrastive
from fedsim.methods import MOON
from plain_loops import Federation, assert_close, play, sgd, shares


def cosine(a, b):
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    return dot / math.sqrt(sum(x * x for x in a)) / math.sqrt(sum(y * y for y in b))


def fraction(z, z_glob, z_prev, tau):
    """The loss of a batch, image by image."""
    losses = []
    for a, b, c in zip(z.tolist(), z_glob.tolist(), z_prev.tolist(), strict=True):
        near, far = math.exp(cosine(a, b) / tau), math.exp(cosine(a, c) / tau)
        losses.append(-math.log(near / (near + far)))
    return sum(losses) / len(losses)


@pytest.mark.parametrize("tau", [0.1, 0.5, 2.0])
def test_the_contrastive_loss(tau):
    torch.manual_seed(0)
    z, z_glob, z_prev = torch.randn(3, 5, 7, dtype=torch.float64)
    assert float(model_contrastive(z, z_glob, z_prev, tau)) == pytest.approx(
        fraction(z, z_glob, z_prev, tau), rel=1e-12
    )


@pytest.mark.parametrize("layer", ["pool", "neck"])
def test_local_training_with_a_global_and_a_previous_model(layer):
    mu, tau = 2.0, 0.5
    federation = Federation()
    previous = {}
    for t in range(3):
        states = []
        for client in federation.clients:
            model, glob = copy.deepcopy(federation.model), copy.deepcopy(federation.model).eval()
            last = previous.get(client.name)

            def contrast(x, features, glob=glob, prev=last):
                if prev is None:
                    return 0.0
                near, far = (
                    torch.nn.functional.cosine_similarity(getattr(features, layer), getattr(m(x), layer).detach()) / tau
                    for m in (glob, prev)
                )
                return -mu * (near.exp() / (near.exp() + far.exp())).log().mean()

            sgd(model, client.head, client.batches(t), contrast)
            previous[client.name] = copy.deepcopy(model).eval()
            states.append(model.state_dict())
        federation.move_to(states, shares(federation.clients))
    found = play(MOON(mu=mu, tau=tau, layer=layer), 3)
    assert_close(found, federation)
    other = play(MOON(mu=mu, tau=tau, layer="neck" if layer == "pool" else "pool"), 3)
    assert not torch.allclose(found.server.vector("smooth"), other.server.vector("smooth"), atol=1e-4)
    without = play(MOON(mu=0.0), 3)
    assert not torch.allclose(found.server.vector("smooth"), without.server.vector("smooth"), atol=1e-4)


@pytest.mark.parametrize(("field", "value"), [("mu", -1.0), ("tau", 0.0)])
def test_wrong_settings_are_refused(field, value):
    with pytest.raises(ConfigError, match=rf"model\.method\.{field}"):
        MOON(**{field: value})
