"""``check_source``: whether a reader of data sets can be ``data.source``."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from PIL import Image

from fedsim.data import FederatedDataModule
from fedsim.data.federations import obstacle_of
from fedsim.data.images import Domain, ImageFiles, Images, ReIDSource, Size, Split
from fedsim.data.preview import write_contact_sheet
from fedsim.data.reading import problem_of
from fedsim.testing.findings import Findings
from fedsim.testing.listing import chosen_of, folders_reversed, labels_of, listed_and_decoded
from fedsim.testing.pixels import check_twins
from fedsim.testing.pythons import REMEDY_OF_HASHES, Question

_MANY = 20
"""images of a part, from which each cannot be of a camera of its own"""
_ALL = 200
"""images of a part up to which all are decoded"""
_CLOSE = 12
"""mean difference of pixels, of 255, between two ways to resize one image"""


def check_source(
    source: ReIDSource, *, size: Size = (64, 32), picture: str | Path | None = None, classes: bool = False,
    corrects_files: bool = False,
) -> None:  # fmt: skip
    """Refuse a reader whose data sets are not fit for a federation, with a sentence for each finding.

    Data sets must be listed without decoding, in a fixed order; labels must be int64, as many as images, with new
    people in tests, and matches in other cameras; some images of each part are decoded in several ways, which must
    give the same uint8 pixels [n, 3, H, W]. Whether labels belong to the right images no program can see: ``picture``
    is the file of a contact sheet, with a row of people for each data set, for your own eyes.

    Args:
        source: the reader.
        size: height and width to which images are resized.
        picture: such as ``people.png``; None: no picture is drawn.
        classes: whether identities are classes, which training and test share, as in CIFAR-10.
        corrects_files: whether decode turns images, mirrors them or orders their colours anew on purpose; then they are
            not compared with the files.

    Raises:
        PartRefusedError: an AssertionError with all findings.
    """
    findings = Findings(type(source).__name__)
    if not isinstance(source, ReIDSource):
        findings.add(f"{type(source).__name__} is no ReIDSource; derive the class from fedsim.data.ReIDSource")
    findings.settle()
    question = Question(listed_and_decoded, source, size, hashes=(0, 1))  # they work while we do
    try:
        domains = _listed(source, findings)
        findings.settle()
        for domain in domains:
            _check_domain(domain, size, classes, findings)
            if not corrects_files:
                _compare_reading(domain, size, findings)
        findings.settle()
        with findings.trying("decode of all images"):
            check_twins(domains, size, findings)
        _compare_processes(listed_and_decoded(source, size), question.answers("domains()", findings), findings)
    finally:
        question.end()
    findings.settle()
    with findings.trying("a federation of these data sets"):
        assert FederatedDataModule(source, val="none").federated.clients, "no data set has training images"
    if picture is not None and not findings:
        with findings.trying("the contact sheet"):
            write_contact_sheet(domains, size, Path(picture))
    findings.settle()


def _listed(source: ReIDSource, findings: Findings) -> list[Domain]:
    domains: list[Domain] = []
    with findings.trying("domains()"), _counting_opens() as opened:
        domains = source.domains()
        if opened:
            findings.add(f"domains() opens {len(opened)} image(s); list them, and let Images.decode open them later")
    if not isinstance(domains, list) or not all(isinstance(domain, Domain) for domain in domains):
        findings.add("domains() does not return a list of Domain")
        return []
    if not domains:
        findings.add("domains() returns no data set; raise DataError with the folder and the remedy instead")
    for name, count in Counter(domain.name for domain in domains).items():
        if count > 1:
            findings.add(f"{count} data sets have the name {name}; metrics and files are named after it")
    with findings.trying("domains(), called again,"):
        expected = labels_of(domains)
        if expected != labels_of(source.domains()):
            findings.add(
                "domains() returns other data sets, labels or an other order when it is called again; sort them"
            )
        with folders_reversed():
            if expected != labels_of(source.domains()):
                findings.add(
                    "domains() returns other data sets, labels or an other order where folders list their files in "
                    "another order, as other disks do; sort them"
                )
    return domains


@contextmanager
def _counting_opens() -> Iterator[list[Any]]:
    """Count the images that are opened in the block."""
    opened: list[Any] = []
    plain = Image.open

    def open_and_count(*args: Any, **options: Any) -> Any:
        opened.append(args[0])
        return plain(*args, **options)

    with mock.patch.object(Image, "open", open_and_count):
        yield opened


def _compare_processes(expected: Any, answers: list[Any], findings: Findings) -> None:
    """Compare what this process reads with what others do."""
    for labels, pixels in answers:
        if labels != expected[0]:
            findings.add(
                f"domains() returns other data sets, labels or an other order in another process: {REMEDY_OF_HASHES}"
            )
        elif pixels != expected[1]:
            findings.add(f"decode returns other pixels in another process: {REMEDY_OF_HASHES}")


def _check_domain(domain: Domain, size: Size, classes: bool, findings: Findings) -> None:
    parts = {"train": domain.train, "query": domain.query, "gallery": domain.gallery}
    sound = [
        _check_labels(f"{domain.name}, {name}", part, findings) for name, part in parts.items() if part is not None
    ]
    if not all(sound):
        return
    if domain.train is not None:
        if not len(domain.train):
            findings.add(f"{domain.name}, train: holds no image; give None for a data set without training images")
        elif domain.train.pids.min() < 0:
            findings.add(f"{domain.name}, train: an identity is {domain.train.pids.min()}; leave junk images out")
        tested = np.concatenate([domain.query.pids, domain.gallery.pids])
        common = np.intersect1d(domain.train.pids, tested[tested > 0])
        if len(common) and not domain.unlabelled and not classes:
            findings.add(
                f"{domain.name}: identity {common[0]} is in train and in the test; test identities must be new"
            )
    if len(domain.gallery):
        with findings.trying(f"the test set of {domain.name}"):
            if obstacle := obstacle_of(domain):
                findings.add(f"{domain.name}: {obstacle}")
    for name, part in parts.items():
        if part is not None and len(part):
            with findings.trying(f"{domain.name}, {name}: decode"):
                _check_images(f"{domain.name}, {name}", part, size, findings)


def _check_labels(name: str, part: Split, findings: Findings) -> bool:
    """Return whether the labels of a part have the right form."""
    for label, values in (("pids", part.pids), ("camids", part.camids)):
        if not isinstance(values, np.ndarray) or values.dtype != np.int64 or values.ndim != 1:
            description = (
                f"{values.dtype} {list(values.shape)}" if isinstance(values, np.ndarray) else type(values).__name__
            )
            findings.add(f"{name}: {label} is {description}, not a NumPy array int64 [n]")
            return False
        if len(values) != len(part.images):
            findings.add(f"{name}: {len(values)} {label} for {len(part.images)} images")
            return False
    if len(part) and part.camids.min() < 0:
        findings.add(f"{name}: a camera is {part.camids.min()}; cameras are counted from 0")
    if len(part) >= _MANY and len(np.unique(part.camids)) == len(part):
        findings.add(f"{name}: each of {len(part)} images has a camera of its own; number the cameras")
    repeated = [path for path, times in Counter(part.images.whole_files()).items() if times > 1]
    if repeated:
        findings.add(f"{name}: {len(repeated)} file(s) are listed twice, first {repeated[0]}; list each once")
    if len(part) and part.pids.min() < -1:
        findings.add(f"{name}: an identity is {part.pids.min()}; -1 is junk, 0 a distractor, people are above")
    return True


def _check_images(name: str, part: Split, size: Size, findings: Findings) -> None:
    """Decode some images in several ways; all must agree."""
    chosen = chosen_of(part)
    images = part.images.take(chosen)
    pixels = images.decode(size)
    form = (len(chosen), 3, *size)
    if not isinstance(pixels, torch.Tensor) or pixels.dtype is not torch.uint8 or tuple(pixels.shape) != form:
        description = (
            f"{pixels.dtype} {list(pixels.shape)}" if isinstance(pixels, torch.Tensor) else type(pixels).__name__
        )
        findings.add(f"{name}: decode returns {description}, not torch.uint8 {list(form)}")
        return
    pixels, first = pixels.clone(), pixels
    for again in (images.take(np.arange(len(chosen))[::-1].copy()), images):
        again.decode(size).zero_()  # a run changes what it got
    if not torch.equal(first, pixels):
        findings.add(f"{name}: a second decode changes the pixels that the first one returned: return new memory")
        return
    _check_ways(name, part, pixels, size, findings)
    _check_content(name, part, pixels, findings)


def _check_ways(name: str, part: Split, pixels: torch.Tensor, size: Size, findings: Findings) -> None:
    """Decode the chosen images in other ways, which must give the same pixels; compare lists beside them."""
    chosen = chosen_of(part)
    images = part.images.take(chosen)
    order = np.arange(len(chosen))[::-1].copy()
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "decode again": lambda: images.decode(size),
        "take in another order": lambda: images.take(order).decode(size).flip(0),
        "take of an image twice": lambda: images.take(order[[0, 0, *range(len(order))]]).decode(size)[2:].flip(0),
        "one by one": lambda: torch.cat([part.images.take(chosen[n : n + 1]).decode(size) for n in order[::-1]]),
        "a copy in another process (pickle)": lambda: _sent(images).decode(size),
    }
    if images.in_threads:
        ways["in two threads"] = lambda: _in_threads(images, order[::-1], size)
    for way, decode in ways.items():
        with findings.trying(f"{name}: {way}"):
            if not torch.equal(decode(), pixels):
                findings.add(f"{name}: pixels are others by this way: {way}")
    with findings.trying(f"{name}: decode of another size"):
        larger = (size[0] + 8, size[1] + 4)
        if tuple(images.decode(larger).shape[1:]) != (3, *larger):
            findings.add(f"{name}: decode returns images of another size than the one that is asked for")
    if len(part) <= _ALL:
        with findings.trying(f"{name}: decode of the whole list"):
            if not torch.equal(part.images.decode(size)[chosen], pixels):
                findings.add(f"{name}: pixels are others by this way: decode without take")
    contents = {images.take(order[n : n + 1]).content() for n in range(len(order))}
    has_no_file = all(path is None for path in images.origins())
    if has_no_file and None not in contents and len(contents) < len(pixels.unique(dim=0)):
        findings.add(f"{name}: content() is the same for images of other pixels; hash all that decides them")
    if images.take(order).locations() != images.locations()[::-1]:
        findings.add(f"{name}: locations() does not follow take")
    if len(images.locations()) != len(chosen) or len(images.sizes()) != len(chosen):
        findings.add(f"{name}: locations() or sizes() has another length than the images")


def _compare_reading(domain: Domain, size: Size, findings: Findings) -> None:
    """Compare with the files as fedsim reads them, where they are images: mirrored ones, or BGR, are closer then."""
    for part in filter(len, domain.parts):
        images = part.images.take(chosen_of(part))
        files = [path for path in images.locations() if path is not None and problem_of(path) is None]
        if len(files) != len(images) or len(images.whole_files()) == len(images):
            continue
        read, decoded = ImageFiles(files).decode(size).float(), images.decode(size).float()
        readings = {
            "": read, "colours are in the order blue, green, red": read.flip(1), "images are mirrored": read.flip(3),
            "images are upside down": read.flip(2), "images are turned by 180 degrees": read.flip(2, 3),
        }  # fmt: skip
        distances = {fault: float((decoded - reading).abs().mean()) for fault, reading in readings.items()}
        closest = min(distances, key=lambda fault: distances[fault])
        if distances[closest] < min(_CLOSE, distances[""] / 2):
            findings.add(
                f"{domain.name}: {closest}, compared with the files; if this is meant, check with corrects_files=True"
            )


def _check_content(name: str, part: Split, pixels: torch.Tensor, findings: Findings) -> None:
    """Look at the pixels of the chosen images."""
    if len(pixels) > 1 and (pixels == pixels[0]).all():
        findings.add(f"{name}: all images that were decoded are equal")
    if len(pixels) > 1 and len(part.identities) > 1 and pixels.max() <= 1:
        findings.add(f"{name}: all pixels are 0 or 1; they are bytes, 0 to 255")
    flat = pixels.flatten(1).float()
    if (flat.amax(1) - flat.amin(1) == 0).all():
        findings.add(f"{name}: every image is of one colour")


def _sent(images: Images) -> Images:
    sent: Images = pickle.loads(pickle.dumps(images))
    return sent


def _in_threads(images: Images, order: np.ndarray[Any, Any], size: Size) -> torch.Tensor:
    with ThreadPoolExecutor(2) as pool:
        return torch.cat(list(pool.map(lambda n: images.take(order[n : n + 1]).decode(size), range(len(order)))))
