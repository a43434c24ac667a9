"""Synthetic people: a re-ID data set of drawn pedestrians that needs no download.

Each domain has its own identities (body, clothes, bag, hair), cameras, backgrounds, colour casts, blur and resolution.
The drawing of one :data:`GENERATOR_VERSION` never changes: a test compares its pixels with a stored hash. It is not
tuned in favour of any method.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.core.arguments import arguments_of
from fedsim.core.checks import Seed, within
from fedsim.core.errors import ConfigError
from fedsim.core.seeding import numpy_generator
from fedsim.data.images import Domain, Images, Index, ReIDSource, Size, Split
from fedsim.data.people import CAMERA, IDENTITY, SHOT, Floats, draw_people

GENERATOR_VERSION = 1

_BATCH = 16  # images drawn at a time: small enough for the intermediate arrays to stay in the cache

# (training identities, cameras, pictures per identity and camera), unbalanced like FedReIDBench's nine data sets
_SIZES = ((40, 4, 3), (32, 4, 3), (30, 3, 3), (24, 2, 3), (16, 2, 2), (12, 2, 2), (12, 2, 2), (8, 2, 2), (6, 2, 2))
_TEST_IDENTITIES = 24
_TEST_SHOTS = 2
_MOST = 100_000  # test-only domains, or factor on the size of domains: listing more pictures would take too long
_MOST_CLIENTS = 10_000_000
_OF_A_CLIENT = (2, 2)  # cameras, and pictures per identity and camera, where all domains are alike


@dataclass(frozen=True)
class SyntheticImages(Images):
    """Pictures that are drawn on decoding. A picture depends on seed, domain, identity, camera and shot alone."""

    seed: int
    domain: str
    identities: Index
    cameras: Index
    shots: Index

    def __len__(self) -> int:
        return len(self.identities)

    def take(self, index: Index) -> SyntheticImages:
        """Return the pictures at the positions ``index``."""
        return replace(self, identities=self.identities[index], cameras=self.cameras[index], shots=self.shots[index])

    def content(self) -> bytes:
        """Return a hash of the numbers that a picture depends on."""
        numbers = self.identities.tobytes() + self.cameras.tobytes() + self.shots.tobytes()
        return hashlib.sha256(f"{self.seed}\0{self.domain}\0".encode() + numbers).digest()

    def decode(self, size: Size) -> Tensor:
        """Draw all pictures; see :meth:`Images.decode`. Height and width must be even."""
        if size[0] % 2 or size[1] % 2:
            raise ConfigError(f"data.size: synthetic people need an even height and width, got {list(size)}")
        out = torch.empty((len(self), 3, *size), dtype=torch.uint8)
        for start in range(0, len(self), _BATCH):
            part = self.take(np.arange(start, min(start + _BATCH, len(self)), dtype=np.int64))
            out[start : start + _BATCH] = torch.from_numpy(part._draw(size))
        return out

    def _draw(self, size: Size) -> NDArray[np.uint8]:
        keys = zip(self.identities.tolist(), self.cameras.tolist(), self.shots.tolist(), strict=True)
        generators = [self._stream("shot", *key) for key in keys]
        numbers: dict[tuple[str, ...], Sequence[Floats]] = {
            IDENTITY: [_uniforms(self._stream("identity", i), len(IDENTITY)) for i in self.identities.tolist()],
            CAMERA: self._numbers_of_cameras(),
            SHOT: [_uniforms(generator, len(SHOT)) for generator in generators],
        }
        factor = 1 + int(_uniforms(self._stream(), 1)[0] < 0.35)
        noise = np.stack([_uniforms(generator, size[0] // factor, size[1] // factor) for generator in generators])
        identity, camera, shot = (dict(zip(n, np.array(rows).T, strict=True)) for n, rows in numbers.items())
        return draw_people(identity, camera, shot, noise, factor)

    def _numbers_of_cameras(self) -> Sequence[Floats]:
        """Return the numbers of each picture's camera, in the order of :data:`CAMERA`."""
        style = _uniforms(self._stream("style"), len(CAMERA))  # half of a camera's numbers: cameras resemble each other
        return [(_uniforms(self._stream("camera", c), len(CAMERA)) + style) / 2 for c in self.cameras.tolist()]

    def _stream(self, *key: int | str) -> np.random.Generator:
        return numpy_generator(self.seed, self.domain, *key)


def _uniforms(stream: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    return stream.random(shape, dtype=np.float32)


class SyntheticReID(ReIDSource):
    """Drawn pedestrians in ``clients`` training domains (``town0``, ...) and ``unseen`` test-only domains (``new0``).

    Training sizes are unbalanced as in FedReIDBench: at scale 1 the six default clients have 40, 32, 30, 24, 16 and 12
    training identities (480 to 48 images). Every domain has 24 test identities of its own, with one query and one
    gallery picture per identity and camera.

    With ``identities``, all training domains are alike and have no test sets: a federation of any size, up to millions
    of clients, takes about a kilobyte for each.

    Args:
        clients: number of domains with training images.
        unseen: number of test-only domains.
        scale: factor on the number of identities, for training and test.
        seed: of the drawing; independent of the seed of training.
        identities: training identities of every client, each with four images of two cameras; None: as above.
    """

    def __init__(
        self, clients: int = 6, unseen: int = 2, scale: float = 1.0, seed: Seed = 0, identities: int | None = None
    ) -> None:
        within("data.source", f"[1, {_MOST if identities is None else _MOST_CLIENTS}]", clients=clients)
        within("data.source", f"[0, {_MOST}]", unseen=unseen)
        within("data.source", f"(0, {_MOST}]", scale=scale)
        if identities is not None:
            within("data.source", f"[2, {_MOST}]", identities=identities)
        self.clients, self.unseen, self.scale, self.seed, self.identities = clients, unseen, scale, seed, identities

    def domains(self) -> list[Domain]:
        """Return the training domains, the largest first, then the unseen ones."""
        if self.identities is None:
            seen = [self._domain(f"town{i}", _SIZES[min(i, len(_SIZES) - 1)], True) for i in range(self.clients)]
        else:
            seen = list(self._alike(self.identities))
        return seen + [self._domain(f"new{i}", _SIZES[i % 3], False) for i in range(self.unseen)]

    def digest(self) -> str | None:
        """Return the version of the drawing, and the arguments; see :meth:`ReIDSource.digest`."""
        return f"{GENERATOR_VERSION} {arguments_of(self)}" if type(self) is SyntheticReID else None

    def _alike(self, identities: int) -> Iterator[Domain]:
        """Yield training domains of one size, without test sets; they share the arrays of their labels."""
        cameras, shots = _OF_A_CLIENT
        first = self._split("", range(identities), cameras, range(shots))
        images = first.images
        assert isinstance(images, SyntheticImages)
        empty = first.take(np.zeros(0, dtype=np.int64))
        for number in range(self.clients):
            name = f"town{number}"
            pictures = SyntheticImages(self.seed, _domain_of(name), images.identities, images.cameras, images.shots)
            yield Domain(name, Split(pictures, first.pids, first.camids), empty, empty)

    def _domain(self, name: str, size: tuple[int, int, int], trains: bool) -> Domain:
        identities, cameras, shots = size
        num_train = max(2, round(identities * self.scale)) if trains else 0
        num_test = max(2, round(_TEST_IDENTITIES * self.scale))
        test = range(num_train, num_train + num_test)
        train = self._split(name, range(num_train), cameras, range(shots)) if trains else None
        query, gallery = (self._split(name, test, cameras, taken) for taken in (range(1), range(1, _TEST_SHOTS)))
        return Domain(name, train, query, gallery)

    def _split(self, name: str, identities: range, cameras: int, shots: range) -> Split:
        grid = np.array([(i, c, s) for i in identities for c in range(cameras) for s in shots], dtype=np.int64)
        pids, camids, shot = grid.T
        return Split(SyntheticImages(self.seed, _domain_of(name), pids, camids, shot), pids + 1, camids)


def _domain_of(name: str) -> str:
    """Return the part of a picture's key that names its domain."""
    return f"v{GENERATOR_VERSION}/{name}"


def content_hash(source: ReIDSource, size: Size = (64, 32)) -> str:
    """Return a SHA-256 over names, labels and pixels of a source: equal hashes mean equal data."""
    digest = hashlib.sha256()
    for domain in source.domains():
        digest.update(domain.name.encode())
        for split in domain.parts:
            digest.update(split.pids.tobytes() + split.camids.tobytes())
            digest.update(split.images.decode(size).numpy().tobytes())
    return digest.hexdigest()
