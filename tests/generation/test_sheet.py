"""Contact sheets of swapped images: which image is where, how large, and files that cannot be written."""

import numpy as np
import pytest
import torch
from PIL import Image

from fedsim.core.errors import DataError
from fedsim.data.preview import join_sheets, write_sheet
from fedsim.generation.sheet import swap_sheet

TITLE, MARGIN = 16, 4


def draw(*shape, seed=0):
    """Images of noise, uint8 [*shape, 3, 48, 24]."""
    return torch.randint(0, 256, (*shape, 3, 48, 24), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def crop(sheet, left, top, image, factor):
    """What is on a sheet in the place of an image [3, H, W], as uint8 [H * factor, W * factor, 3]."""
    _, height, width = image.shape
    return np.asarray(sheet)[top : top + factor * height, left : left + factor * width]


def enlarge(image, factor):
    """Pixel by pixel."""
    _, height, width = image.shape
    large = np.zeros((factor * height, factor * width, 3), dtype=np.uint8)
    for y in range(factor * height):
        for x in range(factor * width):
            large[y, x] = image[:, y // factor, x // factor]
    return large


def test_sources_and_results_are_where_they_belong():
    structure, appearance, swapped = draw(2, seed=1), draw(3, seed=2), draw(2, 3, seed=3)
    sheet = swap_sheet(structure, appearance, swapped, "market")
    height, width = 96, 48  # of an image, enlarged twice
    assert sheet.size == (4 * width + MARGIN, TITLE + 3 * height + MARGIN)
    for j in range(3):
        left = width + MARGIN + j * width
        assert np.array_equal(crop(sheet, left, TITLE, appearance[j], 2), enlarge(appearance[j], 2))
        for i in range(2):
            top = TITLE + height + MARGIN + i * height
            assert np.array_equal(crop(sheet, 0, top, structure[i], 2), enlarge(structure[i], 2))
            assert np.array_equal(crop(sheet, left, top, swapped[i, j], 2), enlarge(swapped[i, j], 2))
    pixels = np.asarray(sheet)
    assert (pixels[TITLE : TITLE + height + MARGIN, : width + MARGIN] == 255).all()  # the corner
    assert (pixels[TITLE + height : TITLE + height + MARGIN] == 255).all()
    assert (pixels[TITLE:, width : width + MARGIN] == 255).all()
    assert (pixels[:TITLE] < 128).any()  # the title


@pytest.mark.parametrize(("height", "factor"), [(32, 3), (48, 2), (50, 2), (95, 2), (96, 1), (256, 1)])
def test_low_images_are_enlarged_by_a_whole_factor(height, factor):
    images = torch.zeros(1, 3, height, 20, dtype=torch.uint8)
    sheet = swap_sheet(images, images, images[None], "")
    assert sheet.size == (2 * factor * 20 + MARGIN, TITLE + 2 * factor * height + MARGIN)


def test_a_long_title_is_not_cut():
    images = draw(1)
    narrow, wide = (swap_sheet(images, images, images[None], title) for title in ("a", "a long title " * 20))
    pixels = np.asarray(wide)
    assert wide.height == narrow.height
    assert wide.width > 500
    assert (pixels[:TITLE, -60:] < 128).any()
    assert (pixels[:TITLE, -1] == 255).all()
    assert np.array_equal(pixels[TITLE:, : narrow.width], np.asarray(narrow)[TITLE:])
    assert (pixels[TITLE:, narrow.width :] == 255).all()


@pytest.mark.parametrize(
    ("structure", "appearance", "swapped", "message"),
    [
        (draw(2), draw(3), draw(3, 2), r"structure \[2, 3, 48, 24\], appearance \[3, 3, 48, 24\], swapped \[3, 2, 3,"),
        (draw(2), draw(2)[..., :12], draw(2, 2), "do not fit"),
        (draw(2)[:, :1], draw(2)[:, :1], draw(2, 2)[:, :, :1], "do not fit"),
        (draw(2), draw(0), draw(2, 0), "do not fit"),
        (draw(2), draw(2) / 255, draw(2, 2), r"appearance is torch\.float32; give uint8"),
    ],
)
def test_what_does_not_fit_together_is_refused(structure, appearance, swapped, message):
    with pytest.raises(ValueError, match=message):
        swap_sheet(structure, appearance, swapped, "market")


def test_sheets_are_joined_below_each_other():
    sheets = [Image.fromarray(draw()[:, :h, :w].permute(1, 2, 0).numpy()) for h, w in ((10, 24), (48, 7), (3, 3))]
    joined = join_sheets(sheets)
    assert joined.size == (24, 61)
    top = 0
    for sheet in sheets:
        rows = np.asarray(joined)[top : top + sheet.height]
        assert np.array_equal(rows[:, : sheet.width], np.asarray(sheet))
        assert (rows[:, sheet.width :] == 255).all()
        top += sheet.height
    with pytest.raises(ValueError, match="no sheets"):
        join_sheets([])


def test_a_written_sheet_reads_the_same_and_leaves_nothing_else(tmp_path):
    sheet = swap_sheet(draw(1), draw(2), draw(1, 2), "market")
    write_sheet(sheet, tmp_path / "new" / "sheet.PNG", "--sheet")
    assert np.array_equal(np.asarray(Image.open(tmp_path / "new" / "sheet.PNG")), np.asarray(sheet))
    write_sheet(sheet, tmp_path / "new" / "sheet.jpg", "--sheet")
    assert Image.open(tmp_path / "new" / "sheet.jpg").format == "JPEG"
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["sheet.PNG", "sheet.jpg"]


@pytest.mark.parametrize("name", ["sheet", "sheet.xyz", "sheet.psd", "file/sheet.png", "folder.png"])
def test_a_file_that_cannot_be_written_is_named(tmp_path, name):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(DataError, match=rf"{name}: cannot write the contact sheet .*; choose another --sheet$"):
        write_sheet(Image.new("RGB", (2, 2)), tmp_path / name, "--sheet")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.png"]
