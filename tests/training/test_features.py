"""From images to retrieval features: which layer, mirror images, and independence of the list's other images."""

import pytest
import torch

from fedsim.data.pixels import HeldPixels
from fedsim.evaluation.settings import Evaluation
from fedsim.models.backbones import SmallCNN
from fedsim.models.reid import Neck, ReIDModel
from fedsim.training import features as extraction

CPU = torch.device("cpu")
MEAN = torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1)
STD = torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1)


def extract_features(model, images, settings, device):
    return extraction.extract_features(model, HeldPixels(images, device), settings, device)


@pytest.fixture(scope="module")
def trained():
    """A small model whose batch normalisations have statistics of their own; in training mode, with dropout."""
    torch.manual_seed(0)
    model = ReIDModel(SmallCNN(width=8), Neck(dim=16, dropout=0.5), num_classes=5)
    model.train()
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(8, 3, 32, 16) * 2 + 1)
    return model


@pytest.fixture
def model(trained):
    return trained.train()


@pytest.fixture(scope="module")
def images():
    return torch.randint(0, 256, (22, 3, 32, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("layer", "dim"), [("neck", 16), ("pool", 32)])
def test_the_layer_is_chosen(model, images, layer, dim):
    features = extract_features(model, images, Evaluation(layer=layer, batch_size=64), CPU)
    assert features.shape == (22, dim)
    assert features.dtype == torch.float32
    with torch.no_grad():
        direct = model.eval()((images / 255.0 - MEAN) / STD)
    assert torch.allclose(features, getattr(direct, layer), atol=1e-5)
    assert features.std(dim=0).min() > 1e-4  # images do not all look the same


def test_a_list_without_images_has_no_features_and_asks_no_network(model, images, monkeypatch):
    monkeypatch.setattr(model, "forward", None)
    assert extract_features(model, images[:0], Evaluation(layer="neck"), CPU).shape == (0, 16)


def test_pool_is_the_mean_of_the_last_map(model, images):
    features = extract_features(model, images, Evaluation(layer="pool"), CPU)
    with torch.no_grad():
        maps = model.eval().backbone((images / 255.0 - MEAN) / STD)
    assert torch.allclose(features, maps.flatten(2).sum(2) / maps[0, 0].numel(), atol=1e-5)


@pytest.mark.parametrize("layer", ["neck", "pool"])
def test_flip_adds_the_feature_of_the_mirror_image(model, images, layer):
    plain = Evaluation(layer=layer)
    flipped = extract_features(model, images, Evaluation(layer=layer, flip=True), CPU)
    expected = extract_features(model, images, plain, CPU) + extract_features(model, images.flip(-1), plain, CPU)
    assert torch.equal(flipped, expected)
    assert not torch.allclose(flipped, 2 * extract_features(model, images, plain, CPU))
    mirrored = extract_features(model, images.flip(-1), Evaluation(layer=layer, flip=True), CPU)
    assert torch.allclose(mirrored, flipped)  # a person and the mirror image look the same


def test_flip_doubles_the_features_of_symmetric_images(model, images):
    half = images[..., :8]
    symmetric = torch.cat([half, half.flip(-1)], dim=-1)
    once = extract_features(model, symmetric, Evaluation(), CPU)
    assert torch.equal(extract_features(model, symmetric, Evaluation(flip=True), CPU), 2 * once)


def test_images_of_other_batches_do_not_matter(model, images):
    settings = Evaluation(batch_size=4)
    everything = extract_features(model, images, settings, CPU)
    for stop in (4, 8, 20):
        assert torch.equal(extract_features(model, images[:stop], settings, CPU), everything[:stop])
    assert torch.equal(extract_features(model, images[4:8], settings, CPU), everything[4:8])


def test_images_of_the_same_batch_matter_to_the_last_bits_at_most(model, images):
    settings = Evaluation(batch_size=4)
    everything = extract_features(model, images, settings, CPU)
    reverse = extract_features(model, images.flip(0), settings, CPU).flip(0)
    assert torch.allclose(reverse, everything, atol=1e-5)
    for size in (1, 7, 64):
        assert torch.allclose(extract_features(model, images, Evaluation(batch_size=size), CPU), everything, atol=1e-5)


def test_extraction_is_repeatable(model, images):
    first = extract_features(model, images, Evaluation(), CPU)
    model.train()
    assert torch.equal(extract_features(model, images, Evaluation(), CPU), first)  # no dropout, no new statistics


def test_the_model_is_left_in_evaluation_mode_and_unchanged(model, images):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    features = extract_features(model, images, Evaluation(flip=True), CPU)
    assert not any(module.training for module in model.modules())
    assert not features.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_features_are_float32_under_autocast(model, images):
    expected = extract_features(model, images, Evaluation(), CPU)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        features = extract_features(model, images, Evaluation(), CPU)
    assert torch.equal(features, expected)


def test_the_images_are_not_changed(model, images):
    before = images.clone()
    extract_features(model, images, Evaluation(flip=True), CPU)
    assert torch.equal(images, before)


def test_features_are_not_normalised(model, images):
    lengths = extract_features(model, images, Evaluation(), CPU).norm(dim=1)
    assert lengths.std() > 1e-3
