"""Pictures of maps: how strong they are, against loops, and what stands where."""

import math

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from fedsim.core.errors import ConfigError
from fedsim.evaluation.pictures import draw_maps, map_strength
from fedsim.functional.normalise import normalise_images
from fedsim.methods import FedPav, Local
from small import fit, make_data, make_model, receive


def strength_loop(of_image):
    """Of one image [C, h, w]."""
    channels, height, width = of_image.shape
    lengths = [
        [math.sqrt(sum(float(of_image[c, y, x]) ** 2 for c in range(channels))) for x in range(width)]
        for y in range(height)
    ]
    largest = max(max(row) for row in lengths)
    return [[value / largest if largest else 0.0 for value in row] for row in lengths]


def test_strength_is_that_of_plain_loops():
    maps = torch.randn(3, 5, 4, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    maps[1] = 0
    maps[2] *= 1000
    found = map_strength(maps)
    for image, strength in zip(maps, found, strict=True):
        assert np.allclose(strength.numpy(), strength_loop(image), rtol=1e-12)
    assert found[0].max() == found[2].max() == 1
    assert not found[1].any()


class Red(nn.Module):
    """One channel: the red of every eighth pixel, of normalised images that it undoes."""

    def forward(self, x):
        return (x[:, :1, ::8, ::8] * 0.229 + 0.485) * 255


def test_a_picture_shows_images_above_their_maps():
    images = torch.randint(1, 256, (3, 3, 16, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    sheet = np.array(draw_maps(Red(), images))
    assert sheet.shape == (32, 24, 3)
    for k, image in enumerate(images):
        columns = slice(8 * k, 8 * (k + 1))
        assert np.array_equal(sheet[:16, columns], image.permute(1, 2, 0).numpy())
        reds = [int(image[0, 0, 0]), int(image[0, 8, 0])]
        for half, red in enumerate(reds):
            shown = sheet[16 + 8 * half : 24 + 8 * half, columns]
            assert len(np.unique(shown)) == 1
            assert int(shown[0, 0, 0]) == pytest.approx(255 * red / max(reds), abs=0.51)


def test_a_network_without_maps_is_refused():
    network = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(ConfigError, match="save_maps: Sequential returns features without a map"):
        draw_maps(network, torch.zeros(2, 3, 16, 8, dtype=torch.uint8))


@pytest.mark.parametrize("method", [FedPav(), Local()], ids=["global", "personal"])
def test_each_test_set_gets_a_picture_by_the_model_that_is_scored(method, tmp_path):
    options = {"limit_val_batches": 1, "check_val_every_n_epoch": 1}
    model = make_model(method)
    fit(model, make_data(val="first_image"), rounds=1, **options)
    files = model.evaluator.write_features(tmp_path / "features", tmp_path / "maps")
    pictures = sorted((tmp_path / "maps").iterdir())
    assert [path.stem for path in pictures] == sorted(path.stem for path in files)
    client, sets = model.parts.clients["town0"], model.parts.federated.tests["town0"]
    client.load()
    receive(client, model.settings.method, model.server)
    model.settings.method.personalise(client)
    client.model.network.eval()
    first = sets.query.images.take(np.arange(8)).decode((32, 16))
    expected = draw_maps(client.model.network.backbone, first)
    client.unload()
    assert np.array_equal(np.array(Image.open(tmp_path / "maps" / "town0.png")), np.array(expected))
    with torch.no_grad():
        assert client.model.network.backbone(normalise_images(first)).std() > 0
