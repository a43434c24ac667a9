"""Drawn towns whose new people are seen several times: in the town of a client, and there with one thing changed.

The test sets of new people: "people0-seen" shows them in the town of a client, by its cameras. "people0-town" has the
same people, poses and moments, in a town without a client. "people0-blur-2" is "people0-seen" with one shift, at dose
2. So the difference between the scores of two of them has one cause.

| shift        | a picture with dose t; each set of people draws its signs +- once                                  |
|--------------|----------------------------------------------------------------------------------------------------|
| `light`      | (x - 127.5) exp(t (+-0.35 +- 0.15)) + 127.5 + t (+-30 +- 20); the second signs are of each colour  |
| `hue`        | the hue of each pixel turns by +-t / 12 of the circle                                              |
| `blur`       | convolved with a Gaussian whose deviation is t / 2 pixels                                          |
| `resolution` | means over 2^t x 2^t pixels, enlarged again                                                        |
| `background` | each number of the scene goes a share t / 2 of the way to one that is drawn for the picture alone, |
|              | which no camera and no town has in common: so scenes differ more, and lose the town's range        |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, interpolate
from torchvision.transforms.functional import adjust_hue, gaussian_blur

from fedsim.core.seeding import numpy_generator
from fedsim.data.images import Domain, Images, Index, ReIDSource, Size, Split
from fedsim.data.people import CAMERA, Floats
from fedsim.data.synthetic import SyntheticImages, SyntheticReID
from fedsim.models.backbones import SmallCNN
from fedsim.models.ibn import IBN

DOSES = (1, 2)
SETS = 3
"""of new people; as many towns train"""
SCENE = (
    "wall_hue", "wall_sat", "wall_val", "floor_hue", "floor_val", "horizon", "post_x", "post_w", "post_val",
    "box_x", "box_y", "box_w", "box_h", "box_hue", "box_val", "tiles",
)  # fmt: skip
"""the numbers of a camera that are of its background"""
_IN_SCENE = np.isin(CAMERA, SCENE)
_OF_PEOPLE = ("identity", "shot")


@dataclass(frozen=True)
class Visitors(SyntheticImages):
    """People of one town before the cameras of another, ``town``."""

    town: str
    redrawn: float = 0.0
    """how far each number of the scene goes to one that is drawn for the picture alone, from 0 to 1"""

    def content(self) -> bytes:
        """Return a hash of the numbers that a picture depends on."""
        return super().content() + f"{self.town} {self.redrawn}".encode()

    def _stream(self, *key: int | str) -> np.random.Generator:
        return numpy_generator(self.seed, self.domain if key[:1] and key[0] in _OF_PEOPLE else self.town, *key)

    def _numbers_of_cameras(self) -> list[Floats]:
        share = np.float32(self.redrawn) * _IN_SCENE
        keys = zip(self.identities.tolist(), self.cameras.tolist(), self.shots.tolist(), strict=True)
        cameras = zip(super()._numbers_of_cameras(), keys, strict=True)
        return [(1 - share) * numbers + share * self._scene(*key) for numbers, key in cameras]

    def _scene(self, *key: int) -> NDArray[np.float32]:
        stream = numpy_generator(self.seed, self.domain, "scene", *key)
        return stream.random(len(CAMERA), dtype=np.float32)


class Shifted(Images):
    """Pictures that are drawn once, however many shifts of them there are, and then changed."""

    def __init__(
        self, drawn: Visitors, change: Callable[[Tensor], Tensor], name: str, index: Index | None = None
    ) -> None:
        self.drawn, self.change, self.name = drawn, change, name
        self.index = np.arange(len(drawn)) if index is None else index

    def __len__(self) -> int:
        return len(self.index)

    def take(self, index: Index) -> Shifted:
        """Return the pictures at the positions ``index``."""
        return Shifted(self.drawn, self.change, self.name, self.index[index])

    def content(self) -> bytes:
        """Return a hash of the drawn pictures, with the name of the change."""
        return self.drawn.content() + self.name.encode() + self.index.tobytes()

    def decode(self, size: Size) -> Tensor:
        """Draw, and change; see :meth:`Images.decode`."""
        key = self.drawn.content(), size
        if key not in _DRAWN:
            _DRAWN[key] = self.drawn.decode(size)
        return self.change(_DRAWN[key][self.index])


_DRAWN: dict[tuple[bytes, Size], Tensor] = {}


def light(pixels: Tensor, dose: float, signs: NDArray[np.float64]) -> Tensor:
    """Change contrast and light of images [B, 3, H, W] uint8; ``signs`` [8]: of all colours and of each, for both."""
    log_gain, shift = 0.35 * signs[0] + 0.15 * signs[2:5], 30 * signs[1] + 20 * signs[5:8]
    gain = torch.from_numpy(np.exp(dose * log_gain)).view(3, 1, 1)
    changed = (pixels.double() - 127.5) * gain + 127.5 + torch.from_numpy(dose * shift).view(3, 1, 1)
    return changed.round().clamp(0, 255).to(torch.uint8)


def hue(pixels: Tensor, dose: float, signs: NDArray[np.float64]) -> Tensor:
    """Turn the hue of images [B, 3, H, W] uint8."""
    turned: Tensor = adjust_hue(pixels, dose * float(signs[0]) / 12)
    return turned


def blur(pixels: Tensor, dose: float, _: NDArray[np.float64]) -> Tensor:
    """Blur images [B, 3, H, W] uint8."""
    blurred: Tensor = gaussian_blur(pixels, [9, 9], [dose / 2, dose / 2])
    return blurred


def resolution(pixels: Tensor, dose: int, _: NDArray[np.float64]) -> Tensor:
    """Give images [B, 3, H, W] uint8 larger pixels."""
    means = avg_pool2d(pixels.double(), 2**dose)
    return interpolate(means, scale_factor=2**dose).round().to(torch.uint8)


OF_PIXELS = {"light": light, "hue": hue, "blur": blur, "resolution": resolution}
SHIFTS = (*OF_PIXELS, "background")


class IBNCNN(SmallCNN):
    """SmallCNN with IBN-a's norms behind its first three convolutions."""

    def __init__(self, width: int = 32) -> None:
        super().__init__(width)
        for i in (1, 2, 3):
            norm = self.get_submodule(f"bn{i}")
            assert isinstance(norm, nn.BatchNorm2d)
            self.add_module(f"bn{i}", IBN(norm.num_features))


class ShiftedTowns(ReIDSource):
    """Three towns that train, as :class:`SyntheticReID` draws them, and three sets of new people, seen in many ways.

    Args:
        scale: factor on the number of training people.
        seed: of the drawing: people, towns and signs.
    """

    def __init__(self, scale: float = 0.5, seed: int = 0) -> None:
        self.scale, self.seed = scale, seed

    def domains(self) -> list[Domain]:
        """Return the towns that train, without test sets, and the test sets."""
        towns = SyntheticReID(SETS, 0, self.scale, self.seed).domains()
        none = np.zeros(0, dtype=np.int64)
        trained = [replace(town, query=town.query.take(none), gallery=town.gallery.take(none)) for town in towns]
        people = SyntheticReID(1, SETS, 1.0, self.seed).domains()[1:]
        return trained + [view for i, of_set in enumerate(people) for view in self._views(f"people{i}", of_set, i)]

    def _views(self, name: str, people: Domain, number: int) -> Iterator[Domain]:
        """Yield the test sets of some people, who visit a client's town ``number``."""
        seen = people.map_splits(lambda split: _before(split, f"v1/town{number}"))
        yield replace(seen, name=f"{name}-seen")
        yield replace(people.map_splits(lambda split: _before(split, f"v1/new{number}")), name=f"{name}-town")
        for shift in SHIFTS:
            signs = numpy_generator(self.seed, name, shift).choice((-1.0, 1.0), 8)
            for dose in DOSES:
                change = _change_of(shift, dose, signs)
                yield replace(seen.map_splits(change), name=f"{name}-{shift}-{dose}")


def _before(split: Split, town: str) -> Split:
    """Return the people of a split before the cameras of another town."""
    assert isinstance(split.images, SyntheticImages)
    return replace(split, images=Visitors(**vars(split.images), town=town))


def _change_of(shift: str, dose: int, signs: NDArray[np.float64]) -> Callable[[Split], Split]:
    """Return the function that shifts a split of visitors."""

    def change(split: Split) -> Split:
        assert isinstance(split.images, Visitors)
        if shift == "background":
            return replace(split, images=replace(split.images, redrawn=dose / 2))
        name = f"{shift} {dose} {signs.tolist()}"
        return replace(split, images=Shifted(split.images, lambda pixels: OF_PIXELS[shift](pixels, dose, signs), name))

    return change
