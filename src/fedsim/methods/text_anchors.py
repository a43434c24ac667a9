"""CO-EVO's camera-invariant anchors (arXiv:2604.26363, "CSA"): a text of each person, by CLIP's text tower.

Its text was not at hand; this has the equations that its public description states, (A1) and (A2). L_i2t and L_t2i are
those of CLIP-ReID (Li, Sun, Li, AAAI 2023, arXiv:2211.13977).

| hook  |                                                                                                            |
|-------|------------------------------------------------------------------------------------------------------------|
| train | (A1) once: learn T tokens of each person by L_i2t + L_t2i + w sum_(i,j) (s(v_i, t_y) - s(v_j, t_y))^2      |
| train | (A2) L = L_loc + lambda CE(s(v, t) / tau, y), with the texts t that (A1) has left                          |

The tower is frozen, in a file that the user has. Tokens and texts describe people: they never leave their client.

Deviations and silences:

- The paper does (A1) before the training. Here a client does it **in its first session**, with the features of the
  model that it receives, in evaluation mode, without augmentation. A client that takes part later has better features.
- The features of images and texts have different lengths. A random matrix, normal, the same for all clients and
  rounds, maps those of images to the texts' space. It nearly keeps angles, is neither trained nor sent, and is a
  function of the seed.
- v_i in (A1) is the mean of the person's features at camera i, each of length 1, made of length 1. Each pair counts
  once; the sum is averaged over the people of a batch, whose texts are those of the softmax, too.
- Temperature of (A1) is that of (A2). Batches of 64, 120 epochs and the rate 3.5e-4 of Adam are those of CLIP-ReID,
  without its schedule and weight decay. Tokens begin at a normal draw with deviation 0.02.
- Both terms of (A1) are means over people: the sums of CLIP-ReID's code run over images, and its softmax has a text for
  each image of a batch.
- (A2) compares the neck's feature with the texts of all people of the client.
- (A1) counts neither in loss and accuracy of the log nor in simulated seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedsim.core.checks import at_least, not_negative, positive
from fedsim.core.errors import ConfigError
from fedsim.core.progress import note_progress
from fedsim.core.seeding import torch_generator
from fedsim.core.transfer import send
from fedsim.functional.anchors import camera_gap, image_to_text, text_to_image
from fedsim.methods.base import BodySharing, KeptModels, Method, Need, Stage, WeightingChoice
from fedsim.models.text_tower import TextTower, load_tower
from fedsim.settings.facts import Facts
from fedsim.training.client import Client

if TYPE_CHECKING:
    from fedsim.training.settings import LocalTraining

_TEXTS, _SPACE = "texts", "texts_space"
"""kept by a client: texts [Z, D], a row for each of its people, and the mark of their space [D]"""
_FIELD = "model.method.tower"
_BATCH = 64
_DEVIATION = 0.02


@dataclass(frozen=True, kw_only=True)
class TextAnchors(BodySharing, WeightingChoice, Method):
    """Averaging of clients whose features are also near texts of their people, which they learn once."""

    requires: ClassVar[frozenset[Need]] = frozenset({"identities", "plain_steps", "built_in_model"})
    # a text for each person; a loop of its own

    tower: Annotated[str | None, Facts(is_file=True)] = None
    """file of CLIP's text tower by OpenAI's or Hugging Face's names (``.pt``, ``.pth`` or ``.safetensors``); it must be
    given"""
    lam: float = 1.0  # Paper silent
    """$\\lambda$, weight of the cross entropy over texts"""
    temperature: float = 0.07
    """$\\tau$ of all cosines"""
    camera_weight: float = 0.1
    """weight of the differences between cameras, while texts are learned"""
    tokens: int = 4
    """number of learned tokens of a person"""
    prompt_epochs: int = 120  # Paper silent; CLIP-ReID's, as all below
    """epochs in which a client learns its texts"""
    prompt_lr: float = 3.5e-4
    """learning rate of Adam for the tokens"""

    def __post_init__(self) -> None:
        not_negative("model.method", lam=self.lam, camera_weight=self.camera_weight)
        positive("model.method", temperature=self.temperature, prompt_lr=self.prompt_lr)
        at_least("model.method", 1, tokens=self.tokens)
        at_least("model.method", 0, prompt_epochs=self.prompt_epochs)

    @property
    def keeps(self) -> KeptModels:
        """The texts."""
        return {_TEXTS: self._load(torch.device("cpu")).num_features}

    @property
    def fixed_bytes(self) -> int:
        """The tower's."""
        return sum(tensor.nbytes for tensor in self._load(torch.device("cpu")).buffers())

    def first_stage(self, images: int, people: int, features: int) -> Stage:
        """(A1): sentences in the tower; tokens with gradient and moments, texts, features and their projection."""
        tower = self._load(torch.device("cpu"))
        of_people = 4 * self.tokens * tower.width + tower.num_features
        of_images = (images + tower.num_features) * features + images * tower.num_features
        sentences = (min(_BATCH, images, people), self.tokens, tower.width)
        return tower, sentences, 4 * (people * of_people + of_images)

    def check(self, training: LocalTraining, client: str) -> None:
        """Refuse a file that is no tower's, before anything is written."""
        self._load(torch.device("cpu"))

    def train(self, client: Client) -> None:
        """Learn the texts, if it is the first time; then step on each batch."""
        tower = self._load(client.device)
        projection = _projection(client, tower.num_features)
        people = send(client.images.labels.unique(), client.device)  # with common labels some are elsewhere
        if _TEXTS not in client.kept:
            client.keep(_TEXTS, self._learn(client, tower, normalize(client.plain_features() @ projection)))
            client.keep(_SPACE, _space(tower, projection))
        texts = _texts_of(client, _space(tower, projection))
        for epoch in range(client.local_epochs):
            for batch in client.batches(epoch):
                output = client.output(batch)
                images = normalize(output.features.neck.float() @ projection)
                anchored = image_to_text(images, texts, torch.searchsorted(people, batch.labels), self.temperature)
                client.step(client.supervised_loss(output, batch) + self.lam * anchored)  # (A2)

    def _learn(self, client: Client, tower: TextTower, images: Tensor) -> Tensor:
        """Return texts [Z, D] of length 1 for features of images [n, D] of length 1, of people with images (A1)."""
        names, rows_of_images = client.images.labels.unique(return_inverse=True)
        labels, stream = send(rows_of_images, client.device), client.generator("prompts")
        means, owners = _camera_means(rows_of_images, client.images.cameras, images)
        draw = torch.randn((len(names), self.tokens, tower.width), generator=stream)
        prompts = send(_DEVIATION * draw, client.device).requires_grad_()
        optimizer = torch.optim.Adam([prompts], lr=self.prompt_lr)
        for index in _batches(len(images), self.prompt_epochs, stream):
            index = send(index, client.device)
            people, rows = labels[index].unique(return_inverse=True)
            of_people = (owners[:, None] == people).nonzero()
            texts = normalize(tower(prompts[people]))
            loss = image_to_text(images[index], texts, rows, self.temperature)
            loss = loss + text_to_image(images[index], texts, rows, self.temperature)
            loss = loss + self.camera_weight * camera_gap(means[of_people[:, 0]], texts, of_people[:, 1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            client.model.work["second"].add((0, 1))  # no image passes through a network
            note_progress()
        with torch.no_grad():
            return normalize(torch.cat([tower(part) for part in prompts.split(_BATCH)]))

    def _load(self, device: torch.device) -> TextTower:
        if not self.tower:
            raise ConfigError(
                f"{_FIELD}: TextAnchors needs CLIP's text tower, and no file is given; give --{_FIELD} FILE"
            )
        tower = load_tower(self.tower, _FIELD, device)
        if self.tokens > tower.most_tokens:
            raise ConfigError(
                f"model.method.tokens: {self.tokens} and the sentence are longer than the tower's texts; give at most "
                f"{tower.most_tokens}"
            )
        return tower


def _projection(client: Client, width: int) -> Tensor:
    """Return the matrix [D of images, D of texts] float32 from images' features to the texts' space."""
    stream = torch_generator(client.seed, "text projection")
    draw = torch.randn((client.model.network.num_features, width), generator=stream)
    return send(draw / width**0.5, client.device)


def _space(tower: TextTower, projection: Tensor) -> Tensor:
    """Return a mark [D] of the texts' space, which another tower or projection has not."""
    return projection[0] + tower.get_buffer("text_projection")[0]


def _texts_of(client: Client, space: Tensor) -> Tensor:
    """Return the texts [Z, D] that a client keeps, or refuse those of another space."""
    kept = client.kept[_SPACE]
    if kept.shape != space.shape or not torch.equal(kept, space):
        raise ConfigError(
            f"{_FIELD}: client {client.name} has learned its texts with another tower or seed; give those of its first "
            "rounds, or begin a new run"
        )
    return client.kept[_TEXTS]


def _camera_means(people: Tensor, cameras: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean feature of each person at each camera, [M, D] of length 1, and the people [M] int64.

    ``people`` [n] int64 and ``cameras`` [n] are those of the images [n, D].
    """
    pairs = torch.stack([people, cameras], dim=1)
    names, rows = pairs.unique(dim=0, return_inverse=True)
    sums = torch.zeros(len(names), images.shape[1]).index_add_(0, rows, images.cpu())  # in the order of images
    return send(normalize(sums), images.device), send(names[:, 0].contiguous(), images.device)


def _batches(count: int, epochs: int, stream: torch.Generator) -> Iterator[Tensor]:
    """Yield the images of each batch [B] int64, of all epochs."""
    for _ in range(epochs):
        yield from torch.randperm(count, generator=stream).split(_BATCH)
