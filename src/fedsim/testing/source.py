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
from fedsim.data.images import Domain, Images, ReIDSource, Size, Split
from fedsim.data.preview import write_contact_sheet
from fedsim.testing.findings import Findings

_SEEN = 12
"""images of a part that are decoded"""


def check_source(
    source: ReIDSource, *, size: Size = (64, 32), picture: str | Path | None = None, classes: bool = False
) -> None:
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

    Raises:
        PartRefusedError: an AssertionError with all findings.
    """
    findings = Findings(type(source).__name__)
    if not isinstance(source, ReIDSource):
        findings.add(f"{type(source).__name__} is no ReIDSource; derive the class from fedsim.data.ReIDSource")
    findings.settle()
    domains = _listed(source, findings)
    findings.settle()
    for domain in domains:
        _check_domain(domain, size, classes, findings)
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
        if _labels(domains) != _labels(source.domains()):
            findings.add(
                "domains() returns other data sets, labels or an other order when it is called again; sort them"
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


def _labels(domains: list[Domain]) -> list[Any]:
    return [
        (domain.name, [(list(part.pids), list(part.camids), part.images.locations()) for part in domain.parts])
        for domain in domains
    ]


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
    if len(part) and part.pids.min() < -1:
        findings.add(f"{name}: an identity is {part.pids.min()}; -1 is junk, 0 a distractor, people are above")
    return True


def _check_images(name: str, part: Split, size: Size, findings: Findings) -> None:
    """Decode some images in several ways; all must agree."""
    chosen = np.unique(np.linspace(0, len(part) - 1, min(_SEEN, len(part))).astype(np.int64))
    images = part.images.take(chosen)
    pixels = images.decode(size)
    form = (len(chosen), 3, *size)
    if not isinstance(pixels, torch.Tensor) or pixels.dtype is not torch.uint8 or tuple(pixels.shape) != form:
        description = (
            f"{pixels.dtype} {list(pixels.shape)}" if isinstance(pixels, torch.Tensor) else type(pixels).__name__
        )
        findings.add(f"{name}: decode returns {description}, not torch.uint8 {list(form)}")
        return
    order = np.arange(len(chosen))[::-1].copy()
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "decode again": lambda: images.decode(size),
        "take in another order": lambda: images.take(order).decode(size).flip(0),
        "one by one": lambda: torch.cat([part.images.take(chosen[n : n + 1]).decode(size) for n in order[::-1]]),
        "a copy in another process (pickle)": lambda: _sent(images).decode(size),
    }
    if images.in_threads:
        ways["in two threads"] = lambda: _in_threads(images, order[::-1], size)
    for way, decode in ways.items():
        with findings.trying(f"{name}: {way}"):
            if not torch.equal(decode(), pixels):
                findings.add(f"{name}: pixels are others by this way: {way}")
    if len(images.locations()) != len(chosen) or len(images.sizes()) != len(chosen):
        findings.add(f"{name}: locations() or sizes() has another length than the images")
    if len(chosen) > 1 and (pixels == pixels[0]).all():
        findings.add(f"{name}: all images that were decoded are equal")
    flat = pixels.flatten(1).float()
    if (flat.amax(1) - flat.amin(1) == 0).all():
        findings.add(f"{name}: every image is of one colour")


def _sent(images: Images) -> Images:
    sent: Images = pickle.loads(pickle.dumps(images))
    return sent


def _in_threads(images: Images, order: np.ndarray[Any, Any], size: Size) -> torch.Tensor:
    with ThreadPoolExecutor(2) as pool:
        return torch.cat(list(pool.map(lambda n: images.take(order[n : n + 1]).decode(size), range(len(order)))))
