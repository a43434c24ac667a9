"""What ``bn_stats`` does to running statistics over a round."""

import torch

from fedsim.functional.normalise import normalise_images
from fedsim.methods import FedPav
from fedsim.models import Group, Neck, ReIDModel, SmallCNN
from small import Some, fit, make_data, make_model, named

# -- running statistics ------------------------------------------------------------------------------------------------


def statistics(tensors):
    return {name: tensor for name, tensor in tensors.items() if "running" in name}


def test_first_takes_the_statistics_of_one_participant_and_averages_the_rest():
    first, mean = fit(make_model(FedPav(), bn_stats="first"), rounds=1), fit(make_model(FedPav()), rounds=1)
    single = {name: fit(make_model(FedPav()), make_data(Some(name)), rounds=1) for name in ("town0", "town1", "town2")}
    matches = [
        name
        for name, alone in single.items()
        if all(torch.equal(named(alone)[key], value) for key, value in statistics(named(first)).items())
    ]
    assert len(matches) == 1
    for name, tensor in named(first).items():
        assert ("running" in name) != torch.equal(tensor, named(mean)[name])


def test_pooled_variances_include_the_spread_of_the_means():
    pooled, mean = fit(make_model(FedPav(), bn_stats="pooled"), rounds=1), fit(make_model(FedPav()), rounds=1)
    single = [fit(make_model(FedPav()), make_data(Some(name)), rounds=1) for name in ("town0", "town1", "town2")]
    sizes = torch.tensor([c.num_images for c in mean.parts.federated.clients], dtype=torch.float64)
    p = sizes / sizes.sum()
    for key in ("backbone.bn1.running_var", "backbone.bn4.running_var"):
        mu = torch.stack([named(s)[key.replace("var", "mean")].double() for s in single])
        var = torch.stack([named(s)[key].double() for s in single])
        expected = sum(p[k] * (var[k] + mu[k] ** 2) for k in range(3)) - sum(p[k] * mu[k] for k in range(3)) ** 2
        torch.testing.assert_close(named(pooled)[key].double(), expected, rtol=1e-5, atol=1e-6)
        assert (named(pooled)[key] >= named(mean)[key] - 1e-6).all()


def test_local_statistics_never_leave_the_client():
    model = fit(make_model(FedPav(), bn_stats="local"))
    assert statistics(named(model)) == {}
    groups = model.parts.models["smallcnn"].groups
    kept = {e.name for e in model.parts.models["smallcnn"].flat.entries if not e.shared}
    assert kept == {name for name, group in groups.items() if group in (Group.STAT, Group.NECKSTAT)}
    states = [client.private for client in model.parts.clients.values()]
    assert not torch.equal(states[0], states[1])
    assert not model.evaluator.plan.has_global


def test_recalibrated_statistics_are_those_of_the_public_images():
    model = fit(make_model(FedPav(), bn_stats="recalibrate"), make_data(public="new0"), rounds=1)
    plain = fit(make_model(FedPav()), make_data(unseen=[]), rounds=1)
    network = ReIDModel(SmallCNN(width=8), Neck(kind="bnneck", dropout=0.0))
    network.load_state_dict(named(plain), strict=False)
    assert "new0" not in model.parts.federated.tests
    images = normalise_images(model.server.public.images)
    first_layer = network.backbone.conv1(images)  # before any normalisation, so its statistics are simple
    batches = first_layer.split(64)
    expected = torch.stack([b.mean((0, 2, 3)) for b in batches]).mean(0)
    torch.testing.assert_close(named(model)["backbone.bn1.running_mean"], expected, rtol=1e-4, atol=1e-5)
    norms = [m for m in network.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a plain average
    with torch.no_grad():
        for batch in images.split(64):
            network.train()(batch)
    for name, tensor in statistics(network.state_dict()).items():
        torch.testing.assert_close(named(model)[name], tensor, rtol=1e-4, atol=1e-5)
    assert not torch.equal(named(model)["backbone.bn1.running_mean"], named(plain)["backbone.bn1.running_mean"])
