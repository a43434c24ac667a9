"""The re-ID model: necks, dropout with a stream of its own, identity heads."""

import pytest
import torch
from torch import nn

from fedsim.core.errors import ConfigError
from fedsim.methods import FedPav
from fedsim.models import BACKBONE, Features, GeM, KeyedDropout, Neck, ReIDModel, SmallCNN, group_names, make_head
from small import fit, make_model, named


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def images():
    return torch.randn(4, 3, 16, 8, generator=generator())


def layers(neck, channels=8):
    return [type(layer) for layer in neck.build(channels)]


# -- necks -------------------------------------------------------------------------------------------------------------


def test_linear_neck():
    torch.manual_seed(0)
    neck = Neck(dim=256).build(1024)
    assert [type(layer) for layer in neck] == [nn.Linear, nn.BatchNorm1d, KeyedDropout]
    linear, norm, dropout = neck
    assert linear.weight.shape == (256, 1024)
    assert linear.weight.std().item() == pytest.approx((2 / 256) ** 0.5, rel=0.02)  # Kaiming, fan-out
    assert not linear.bias.any()
    assert norm.weight.mean().item() == pytest.approx(1.0, abs=0.01)
    assert norm.weight.std().item() == pytest.approx(0.02, rel=0.2)
    assert not norm.bias.any()
    assert dropout.p == 0.5


def test_bnneck():
    neck = Neck(kind="bnneck", dropout=0.0)
    assert layers(neck) == [nn.BatchNorm1d]  # without dropout, there is no layer for it
    assert neck.build(8)[0].num_features == 8


def test_a_bnneck_without_bias():
    (norm,) = Neck(kind="bnneck", dropout=0.0, bias=False).build(8)
    assert [name for name, _ in norm.named_parameters()] == ["weight"]
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    expected = (x - x.mean(0)) / (x.var(0, unbiased=False) + norm.eps).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), expected)


def test_a_neck_without_affine_weights_standardises():
    torch.manual_seed(0)
    for neck in (
        Neck(kind="bnneck", dropout=0.0, affine=False),
        Neck(kind="bnneck", dropout=0, affine=False, bias=False),
    ):
        (norm,) = neck.build(8)
        assert [*norm.parameters()] == []
        x = torch.randn(6, 8, generator=generator())
        torch.testing.assert_close(norm(x), (x - x.mean(0)) / (x.var(0, unbiased=False) + norm.eps).sqrt())
    names = {name: group for name, group in group_names(ReIDModel(SmallCNN(4), neck)).items() if "neck" in name}
    assert [group for name, group in names.items() if "running" in name] == ["neckstat", "neckstat"]
    assert layers(Neck(affine=False)) == [nn.Linear, nn.BatchNorm1d, KeyedDropout]


def test_a_federation_without_affine_weights_in_the_neck_sends_their_statistics():
    model = fit(make_model(FedPav(), neck=Neck(kind="bnneck", dropout=0.0, affine=False)))
    sent = {name for name in named(model) if name.startswith("neck.")}
    assert sent == {"neck.0.running_mean", "neck.0.running_var"}
    assert all(tensor.isfinite().all() for tensor in named(model).values())


def test_no_neck():
    assert layers(Neck(kind="none")) == [KeyedDropout]


def test_activations():
    assert layers(Neck(activation="relu")) == [nn.Linear, nn.BatchNorm1d, nn.ReLU, KeyedDropout]
    leaky = Neck(activation="leaky_relu").build(8)[2]
    assert isinstance(leaky, nn.LeakyReLU)
    assert leaky.negative_slope == 0.1
    assert layers(Neck(kind="bnneck", activation="relu")) == [nn.BatchNorm1d, KeyedDropout]  # linear necks only


@pytest.mark.parametrize(("kind", "width"), [("linear", 5), ("bnneck", 32), ("none", 32)])
def test_feature_widths(kind, width, images):
    neck = Neck(kind=kind, dim=5)
    model = ReIDModel(SmallCNN(width=8), neck, num_classes=7)
    features = model(images)
    assert isinstance(features, Features)
    assert features.pool.shape == (4, 32)
    assert features.neck.shape == (4, width)
    assert neck.out_features(32) == model.num_features == width
    assert model.head(features.neck).shape == (4, 7)


def test_pool_is_the_mean_over_the_map(images):
    model = ReIDModel(SmallCNN(width=8), Neck(kind="none")).eval()
    maps = model.backbone(images)
    assert maps.shape == (4, 32, 2, 1)
    pool, neck = model(images)
    assert torch.allclose(pool, (maps[:, :, 0, 0] + maps[:, :, 1, 0]) / 2)
    assert torch.equal(neck, pool)


def test_backbone_that_returns_vectors():
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(12, 6))
    backbone.out_channels = 6
    images = torch.randn(4, 3, 2, 2)
    assert torch.equal(ReIDModel(backbone, Neck(kind="none")).eval()(images).pool, backbone(images))


class StaysInEvaluation(SmallCNN):
    """A backbone that counts how often its mode is set, and keeps its first layer in evaluation mode."""

    times_set, is_still = 0, False

    def train(self, mode=True):
        self.times_set += 1
        super().train(mode)
        if self.is_still:
            next(self.children()).eval()
        return self


@pytest.mark.parametrize("is_still", [False, True])
def test_training_begins_with_the_modes_that_the_backbone_gives_its_layers(is_still):
    model = ReIDModel(StaysInEvaluation(width=8), Neck())
    model.backbone.is_still = is_still
    modes = {name: is_still is False for name, _ in next(model.backbone.children()).named_modules()}
    for evaluated in (model, model.neck, next(model.backbone.children())):
        evaluated.eval()
        model.begin_training()
        assert {name: module.training for name, module in next(model.backbone.children()).named_modules()} == modes
        assert all(module.training for module in [model, *model.neck.modules(), model.backbone])
    before = model.backbone.times_set
    model.begin_training()
    assert model.backbone.times_set - before == is_still  # the mode is not set where all parts have it


def test_model_without_a_head():
    assert ReIDModel(SmallCNN(width=8), Neck()).head is None


@pytest.mark.parametrize("dim", [0, -3, 10**9])
def test_neck_needs_a_width(dim):
    with pytest.raises(ConfigError, match=rf"^model\.neck\.dim: {dim} is not in \[1, 65536\]$"):
        Neck(dim=dim).build(8)


# -- dropout -----------------------------------------------------------------------------------------------------------


def test_dropout_is_reproducible_from_its_generator():
    dropout, x = KeyedDropout(0.5), torch.ones(100)
    dropout.generator = generator(3)
    first, second = dropout(x), dropout(x)
    assert not torch.equal(first, second)  # a stream, not a fixed mask
    dropout.generator = generator(3)
    assert torch.equal(dropout(x), first)
    assert torch.equal(dropout(x), second)
    dropout.generator = generator(4)
    assert not torch.equal(dropout(x), first)


def test_dropout_and_the_global_stream_are_independent():
    dropout, x = KeyedDropout(0.5), torch.ones(100)
    dropout.generator = generator()
    first = dropout(x)
    torch.manual_seed(99)
    expected = torch.rand(3)
    torch.manual_seed(99)
    dropout.generator = generator()
    assert torch.equal(dropout(x), first)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_preserves_the_mean(p):
    dropout, n = KeyedDropout(p), 100_000
    dropout.generator = generator()
    y = dropout(torch.ones(n))
    kept = y[y > 0]
    assert torch.allclose(kept, torch.tensor(1 / (1 - p)))
    assert 1 - len(kept) / n == pytest.approx(p, abs=0.01)
    assert y.mean().item() == pytest.approx(1.0, abs=0.05)


def test_dropout_gradient_is_the_mask():
    dropout, x = KeyedDropout(0.5), torch.ones(50, requires_grad=True)
    dropout.generator = generator()
    y = dropout(x)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


def test_dropout_is_the_identity_in_evaluation():
    dropout, x = KeyedDropout(0.9).eval(), torch.randn(10)
    dropout.generator = generator(1)
    assert dropout(x) is x
    assert torch.equal(dropout.generator.get_state(), generator(1).get_state())  # nothing was drawn


def test_dropout_of_nothing_is_the_identity():
    x = torch.randn(10)
    assert KeyedDropout(0.0)(x) is x


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5, float("nan")])
def test_dropout_probability_is_checked(p):
    with pytest.raises(ConfigError, match=r"^model\.neck\.dropout: "):
        KeyedDropout(p)


def test_set_generator_reaches_every_dropout(images):
    backbone = nn.Sequential(SmallCNN(width=8), KeyedDropout(0.5))
    backbone.out_channels = 32
    model = ReIDModel(backbone, Neck(kind="none", dropout=0.5))
    features = []
    for seed in (0, 0, 1):
        model.set_generator(generator(seed))
        torch.manual_seed(len(features))
        features.append(model(images))
    assert torch.equal(features[0].neck, features[1].neck)
    assert not torch.equal(features[0].neck, features[2].neck)
    assert not torch.equal(features[0].pool, features[2].pool)


# -- pooling -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [1.0, 3.0, 4.5])
def test_gem_is_the_root_of_the_mean_of_powers(p):
    maps = torch.randn(2, 3, 4, 2, generator=generator())
    found = GeM(p)(maps)
    for image in range(2):
        for channel in range(3):
            values = [max(value, 1e-6) for value in maps[image, channel].flatten().tolist()]
            mean = sum(value**p for value in values) / len(values)
            assert found[image, channel].item() == pytest.approx(mean ** (1 / p), rel=1e-4)


def test_the_exponent_of_gem_is_learnt_and_finite_of_empty_maps():
    gem, maps = GeM(), torch.zeros(2, 3, 4, 2)
    maps[0] = torch.rand(3, 4, 2, generator=generator())
    maps.requires_grad_()
    gem(maps).sum().backward()
    assert gem.p.grad.isfinite()
    assert gem.p.grad.abs() > 1e-3
    assert maps.grad.isfinite().all()


def test_pooling_is_part_of_the_backbone_and_the_mean_has_no_weights(images):
    backbone = SmallCNN(width=8).eval()
    plain, gem = (ReIDModel(backbone, Neck(kind="none", dropout=0.0, pooling=kind)) for kind in ("average", "gem"))
    assert set(group_names(gem)) - set(group_names(plain)) == {"pooling.p"}
    assert group_names(gem)["pooling.p"] in BACKBONE
    with torch.no_grad():
        assert torch.equal(plain(images).pool, backbone(images).mean((2, 3)))
        assert torch.equal(gem(images).pool, GeM()(backbone(images)))


def test_a_vector_is_pooled_already(images):
    backbone = nn.Sequential(SmallCNN(width=8), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    backbone.out_channels = 32
    assert ReIDModel(backbone, Neck(kind="none", dropout=0.0))(images).pool.shape == (4, 32)


# -- heads -------------------------------------------------------------------------------------------------------------


def test_head_initialisation():
    head = make_head(512, 200, generator())
    assert head.weight.shape == (200, 512)
    assert head.weight.std().item() == pytest.approx(0.001, rel=0.02)
    assert head.weight.mean().item() == pytest.approx(0.0, abs=1e-5)
    assert not head.bias.any()


def test_head_is_reproducible_from_its_generator():
    first = make_head(8, 5, generator(1))
    torch.manual_seed(7)
    assert torch.equal(make_head(8, 5, generator(1)).weight, first.weight)
    assert not torch.equal(make_head(8, 5, generator(2)).weight, first.weight)


def test_head_without_a_generator_uses_the_global_stream():
    torch.manual_seed(0)
    first = make_head(8, 5)
    torch.manual_seed(0)
    assert torch.equal(make_head(8, 5).weight, first.weight)
    assert not torch.equal(make_head(8, 5).weight, first.weight)
