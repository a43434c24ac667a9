"""Pictures of maps: how strong they are, against loops, and what stands where."""

import math

import numpy as np
import pytest
import torch
from matplotlib import colormaps
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
    images[..., 1::2] = images[..., ::2]  # every pixel twice
    sheet = np.array(draw_maps(Red(), images)).astype(float)
    assert sheet.shape[1] == 3 * (64 + 4) - 4
    for k, image in enumerate(images.numpy()):
        columns = slice(68 * k, 68 * k + 64)
        large = image.transpose(1, 2, 0).repeat(8, axis=0).repeat(8, axis=1).astype(float)
        assert np.array_equal(sheet[:128, columns], large)
        reds = [int(image[0, 0, 0]), int(image[0, 8, 0])]
        grey = large @ [0.299, 0.587, 0.114]
        for half, red in enumerate(reds):
            colour = np.array(colormaps["viridis"](red / max(reds))[:3]) * 255
            rows = slice(132 + 64 * half, 132 + 64 * (half + 1))
            expected = 0.45 * grey[64 * half : 64 * (half + 1), :, None] + 0.55 * colour
            np.testing.assert_allclose(sheet[rows, columns], expected, atol=3)


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
    captions = [f"{pid} c{camera + 1}" for pid, camera in zip(sets.query.pids[:8], sets.query.camids[:8], strict=True)]
    expected = draw_maps(client.model.network.backbone, first, captions)
    assert not np.array_equal(np.array(expected), np.array(draw_maps(client.model.network.backbone, first, ["?"] * 8)))
    client.unload()
    assert np.array_equal(np.array(Image.open(tmp_path / "maps" / "town0.png")), np.array(expected))
    with torch.no_grad():
        assert client.model.network.backbone(normalise_images(first)).std() > 0
