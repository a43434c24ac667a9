"""Damaged files of any format, and names that are no files: one line with the name, no other exception, no wait."""

import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, features
from stored_images import GREY, bmp, exif, netpbm, pfm, png, tiff, with_app1

from fedsim.__main__ import main
from fedsim.core.errors import DataError
from fedsim.data import FederatedDataModule, decoded
from fedsim.data.decoded import Wanted
from fedsim.data.images import ImageFiles
from fedsim.data.market import MarketFolders
from fedsim.data.preview import write_contact_sheet
from sites import put

RNG = np.random.default_rng(0)
PICTURE = RNG.integers(0, 256, (24, 12, 3), dtype=np.uint8)
DRAWS = 60  # damages of each kind and format


def encoded(form, **options):
    file = io.BytesIO()
    Image.fromarray(PICTURE).save(file, form, **options)
    return file.getvalue()


def whole_files():
    """Format -> the bytes of a whole image."""
    files = {
        "png": encoded("PNG"), "jpg": encoded("JPEG"), "progressive": encoded("JPEG", progressive=True),
        "turned": with_app1(encoded("JPEG"), exif(6)), "webp": encoded("WEBP"), "gif": encoded("GIF"),
        "tga": encoded("TGA"), "ico": encoded("ICO"), "dds": encoded("DDS"), "pcx": encoded("PCX"),
        "sgi": encoded("SGI"), "bmp": bmp(PICTURE), "ppm": netpbm(PICTURE, 255),
        "pgm": netpbm(PICTURE[..., 0] * np.uint16(200), 65_535), "pfm": pfm(PICTURE[..., 0] / np.float32(255)),
        "png16": png(PICTURE[..., 0] * np.uint16(257), GREY, 16), "tif": tiff(PICTURE, photometric=2),
        "tif16": tiff(PICTURE[..., 0] * np.uint16(257)), "lzw": encoded("TIFF", compression="tiff_lzw"),
        "deflate": encoded("TIFF", compression="tiff_deflate"), "float": tiff(PICTURE[..., 0] / np.float32(255),
                                                                             sample_format=3),
    }  # fmt: skip
    if features.check("avif"):
        files["avif"] = encoded("AVIF")
    if features.check("jpg_2000"):
        files["jp2"] = encoded("JPEG2000")
    return files


FILES = whole_files()


def damage(data, rng):
    """Cut a file off, change some of its bytes, or both."""
    kind = rng.integers(3)
    damaged = bytearray(data[: rng.integers(len(data))] if kind != 1 else data)
    if kind and damaged:
        # most formats keep what matters in front
        places = rng.integers(0, len(damaged) if rng.random() < 0.5 else min(64, len(damaged)), rng.integers(1, 9))
        for place in places:
            damaged[place] = rng.integers(256)
    return bytes(damaged)


@pytest.mark.parametrize("form", FILES)
@pytest.mark.filterwarnings("error")  # Pillow's, on notes that it cannot read, would be more than one line
def test_damage_drawn_at_random_never_slips_through_as_another_error(tmp_path, form):
    rng = np.random.default_rng([1, *form.encode()])
    slipped, refused = [], 0
    for number in range(DRAWS):
        path = tmp_path / f"{number}.jpg"
        path.write_bytes(damage(FILES[form], rng))
        for read in (lambda path: ImageFiles([path]).decode((8, 4)), lambda path: ImageFiles([path]).sizes()):
            try:
                read(path)
            except DataError as error:
                message = str(error)
                is_plain = message.startswith(f"{path}: cannot read this image (") and message.endswith("remove it")
                refused += is_plain
                slipped += [] if is_plain else [(number, message)]
            except Exception as error:
                slipped.append((number, repr(error)))
    assert slipped == []
    assert refused


@pytest.mark.parametrize("form", sorted({*FILES} - {"png16", "pgm", "pfm", "tif16", "float", "turned"}))
def test_other_files_have_the_pixels_that_they_had(tmp_path, form):
    path = tmp_path / "a"
    path.write_bytes(FILES[form])
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB"))
    assert np.array_equal(ImageFiles([path]).decode(pixels.shape[:2])[0].permute(1, 2, 0).numpy(), pixels)


@pytest.mark.parametrize("form", FILES)
def test_the_first_half_of_a_file_is_refused(tmp_path, form):
    path = tmp_path / "half.png"
    path.write_bytes(FILES[form][: len(FILES[form]) // 2])
    with pytest.raises(DataError, match=r"half\.png: cannot read this image \("):
        ImageFiles([path]).decode((8, 4))


WITH_MARK = {"PNG": {}, "JPEG": {}, "JPEG progressive": {"progressive": True}}


@pytest.mark.parametrize("form", WITH_MARK)
@pytest.mark.parametrize("side", [24, 400])  # below and above the size of a plain JPEG that is read fast
def test_zeros_in_the_tail_of_a_file_are_refused_where_the_format_has_an_end(tmp_path, form, side):
    path, pixels = tmp_path / "a.jpg", np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, form.split()[0], **WITH_MARK[form])
    whole, decoded = path.read_bytes(), ImageFiles([path]).decode((8, 4))
    path.write_bytes(whole + bytes(20))  # some programs fill up blocks
    assert torch.equal(ImageFiles([path]).decode((8, 4)), decoded)
    half = len(whole) // 2
    path.write_bytes(whole[:half].rstrip(b"\0") + bytes(half))
    for read in (lambda files: files.decode((8, 4)), lambda files: files.sizes()):
        with pytest.raises(DataError, match=rf"a\.jpg: .*its last {half:,} bytes are zeros; it was not copied whole"):
            read(ImageFiles([path]))


@pytest.mark.parametrize(("content", "says"), [(b"", "the file is empty"), (b"\xff\xd8", "it has only 2 bytes")])
def test_a_file_without_content_says_so(tmp_path, content, says):
    path = tmp_path / "a.jpg"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"a\.jpg: cannot read this image \({says}\); replace or remove it"):
        ImageFiles([path]).decode((8, 4))


def test_a_file_that_may_not_be_read_is_not_to_be_removed(tmp_path, monkeypatch):
    path = put(tmp_path / "a.jpg")
    monkeypatch.setattr(Path, "stat", lambda *_, **__: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    with pytest.raises(DataError, match=r"\(Permission denied\); give yourself the right to read it$"):
        ImageFiles([path]).decode((8, 4))


@pytest.mark.parametrize(
    "content", [b"", b"<html>not found</html>", b"\0" * 100, b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"]
)
def test_what_is_no_image_is_refused(tmp_path, content):
    path = tmp_path / "0001_c1.jpg"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"0001_c1\.jpg: cannot read this image \(.+\); replace or remove it"):
        ImageFiles([path]).decode((8, 4))


@pytest.mark.parametrize("error", [RuntimeError, NotImplementedError, IndexError, KeyError, MemoryError, EOFError,
                                   AssertionError, RecursionError, ZeroDivisionError, UnicodeError])  # fmt: skip
def test_any_error_of_a_decoder_names_the_file(tmp_path, monkeypatch, error):
    path = tmp_path / "a.png"
    path.write_bytes(FILES["png"])

    def fail(*_):
        raise error

    monkeypatch.setattr(Image.Image, "convert", fail)
    with pytest.raises(DataError, match=rf"a\.png: cannot read this image \({error.__name__}\); replace or remove it"):
        ImageFiles([path]).decode((8, 4))


# -- ranges that are not known -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "sample_format", "problem"),
    [(np.float32([[0, 1.02]]), 3, "floats reach 1.02"), (np.float32([[0, 1e9]]), 3, "floats reach 1e"),
     (np.float32([[0, np.nan]]), 3, "floats reach nan"), (np.float32([[0, np.inf]]), 3, "floats reach inf"),
     (np.float32([[-0.5, 1]]), 3, "values begin at -0.5"), (np.int32([[-1, 7]]), 2, "values begin at -1"),
     (np.int16([[-300, 7]]), 2, "values begin at -300")],
)  # fmt: skip
def test_a_grey_image_of_an_unknown_range_is_refused_with_the_remedy(tmp_path, samples, sample_format, problem):
    path = tmp_path / "a.tif"
    path.write_bytes(tiff(samples, sample_format=sample_format))
    with pytest.raises(DataError, match=rf"a\.tif: cannot read this image \(its {problem}.*save it with 8 or 16 bits"):
        ImageFiles([path]).decode((8, 4))


@pytest.mark.parametrize(
    "data",
    [tiff(PICTURE[..., 0] / 255.0, sample_format=3), tiff((PICTURE[..., 0] / 255).astype(np.float16), sample_format=3),
     tiff(PICTURE[..., 0].astype(np.uint32), ">"), tiff(PICTURE.astype(np.float32), photometric=2, sample_format=3),
     tiff(PICTURE[..., 0] * np.uint16(257), ">", photometric=0)],
)  # fmt: skip
def test_a_depth_that_pillow_does_not_know_is_refused(tmp_path, data):
    path = tmp_path / "a.tif"
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"a\.tif: cannot read this image \(Pillow lacks its format or depth\)"):
        ImageFiles([path]).decode((8, 4))


# -- names that are no files -------------------------------------------------------------------------------------------


def make(path, kind):
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to({"device": "/dev/zero", "circle": path, "nothing": path.parent / "absent"}[kind])


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "circle", "nothing"])
def test_a_name_that_is_no_file_is_refused_at_once(tmp_path, kind):
    """In a process of its own, which is ended if it waits."""
    path = tmp_path / "0001_c1.jpg"
    make(path, kind)
    code = (
        "import sys\nfrom pathlib import Path\nfrom fedsim.core.errors import DataError\n"
        "from fedsim.data.reading import problem_of, read_rgb, upright_size\n"
        "path = Path(sys.argv[1])\nassert problem_of(path)\n"
        "for read in (read_rgb, upright_size):\n"
        "    try:\n        read(path)\n        sys.exit('read')\n    except DataError as error:\n        print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"{path}: cannot read this image (") == 2


@pytest.fixture
def broken(market_tree, tmp_path):
    """A data set with an image of a decoder that raises RuntimeError, where Pillow has it, and one that is empty."""
    folder = tmp_path / "broken"
    for part in ("bounding_box_train", "query", "bounding_box_test"):
        (folder / part).mkdir(parents=True)
        for path in (market_tree / "north" / part).iterdir():
            (folder / part / path.name).write_bytes(path.read_bytes())
    first, second = sorted((folder / "bounding_box_train").iterdir())[:2]
    first.write_bytes(FILES.get("avif", FILES["jpg"])[:200])
    second.write_bytes(b"")
    return folder, (first, second)


def test_damaged_images_are_left_out_if_they_are_to_be_skipped(broken, tmp_path, caplog):
    folder, bad = broken
    data = FederatedDataModule(
        MarketFolders(str(folder)),
        val="none",
        size=(32, 16),
        cache_dir=str(tmp_path / "c"),
        on_corrupt="skip",
        workers=0,
    )
    data.prepare_data()
    [client] = data.federated.clients
    assert not {*bad} & {*client.train.images.locations()}
    for path in bad:
        assert f"left out: {path}: cannot read this image" in caplog.text


def test_data_check_names_an_image_that_cannot_be_read(broken, capsys):
    folder, (first, second) = broken
    assert main(["data", "check", str(folder.parent)]) == 1
    out, line = capsys.readouterr()
    assert " of 42 images cannot be read" in " ".join(out.split())
    assert "can be used" not in out
    assert line.startswith(f"fedsim: error: a data set cannot be used: {folder.name}: ")
    assert str(first) in line or str(second) in line
    assert main(["data", "check", str(folder)]) == 1
    line = capsys.readouterr().err
    assert str(first) in line or str(second) in line


def test_a_contact_sheet_names_the_image_that_cannot_be_read_and_not_its_own_file(broken, tmp_path, capsys):
    folder, (first, _) = broken
    sheet = tmp_path / "sheet.png"
    assert main(["data", "preview", "--root", str(folder), "--output", str(sheet)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"fedsim: error: {first}: cannot read this image")
    assert "--output" not in error
    assert not sheet.exists()


@pytest.mark.parametrize("name", ["sheet.xyz", "sheet", "folder.png"])
def test_a_contact_sheet_that_cannot_be_written_leaves_nothing(market_tree, tmp_path, name):
    (tmp_path / "folder.png").mkdir()
    before = sorted(tmp_path.iterdir())
    domains = MarketFolders(str(market_tree)).domains()
    with pytest.raises(DataError, match=r"cannot write the contact sheet .*; choose another --output"):
        write_contact_sheet(domains, (16, 8), tmp_path / name)
    assert sorted(tmp_path.iterdir()) == before


def test_pixels_of_images_that_were_read_wrongly_are_not_taken_from_an_old_cache():
    """The number is part of the names of decoded files; 1 had grey images of 16 bits white, and turned ones lying."""
    assert decoded._DECODING > 1


def test_a_name_that_no_file_can_have_is_refused(tmp_path):
    path = Path("a\0b.png")
    assert decoded.find(tmp_path, Wanted("site", (path,), (8, 4))).parent == tmp_path
    with pytest.raises(DataError, match="cannot read this image"):
        ImageFiles([path]).decode((8, 4))


@pytest.mark.parametrize("reader", ["labels", "batches", "partitions"])
def test_no_reader_waits_for_a_pipe(tmp_path, reader):
    """In a process of its own, which is ended if it waits."""
    calls = {
        "labels": "from fedsim.data.generated import _rows\nnext(_rows(path))",
        "batches": "from fedsim.data.datasets.cifar10 import _read_batch\n_read_batch(path)",
        "partitions": "from fedsim.data.splits import official_grid_splits\nofficial_grid_splits(path, None, None)",
    }
    path = tmp_path / "pipe"
    os.mkfifo(path)
    code = f"import sys\nfrom pathlib import Path\npath = Path(sys.argv[1])\n{calls[reader]}"
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, timeout=300, check=False)
    assert f"DataError: {path}" in done.stderr.splitlines()[-1]
