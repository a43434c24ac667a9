"""CO-EVO's styles of cameras that clients share (arXiv:2604.26363, "GSD"), without its prompts.

Its text was not at hand; this has the equations that its public description states, (G1) to (G4).

| hook     |                                                                                                        |
|----------|--------------------------------------------------------------------------------------------------------|
| upload   | (G1) once: (mu_s, var_s) of each channel, for each camera s of the client, with backbone and neck      |
| payload  | (G2) the server joins them to one bank, which all clients receive                                      |
| train    | (G3) x' = (x - mu(x)) / sqrt(var(x) + eps) sqrt(var_s) + mu_s, with s drawn from the bank of all       |
| train    | (G4) L = L_loc(x) + L_loc(x'), one step of both                                                        |
| weights  | n_k / n                                                                                                |

``styles: random`` is the control: the same steps and bytes, but each number of a style is drawn by itself, with mean
and variance of this number over the bank. Means are normal, variances are log-normal. So no style is that of a camera,
and channels lose their relation: what remains of the federation are 4 C moments.

Deviations and silences:

- The paper sends styles once, before the training. Here a client sends them **with its first update that counts**, so a
  run never reads the images of clients that do not take part. A bank holds what arrived before the round. Where all
  take part, the first round is plain and the bank is complete from the second on; with a part, it grows.
- The bank goes down with each model, as it is then; a client cannot know what has changed. Bytes count it so.
- (mu_s, var_s) are over all pixels of a camera's images, normalised and not augmented, so var_s also has the
  differences between images. mu(x) and var(x) are those of the augmented image. Variances divide by the pixels; eps
  is 1e-5.
- Each image of a batch draws a row, each camera with the same probability, its own included. So a client with more
  cameras gives more styles. Draws have a stream for each client and round, on the host.
- x and x' have a forward pass each, x first: running statistics move by x, then by x'. Batch statistics do not mix.
- The objective is the configured one. Where it compares views of an image, all of them get the style that the image has
  drawn. Left out: prompts of CLIP's text tower, and a loss of them.
- Loss and accuracy in the log are those of x. A batch costs two passes.
- The bank discloses mean and variance of each channel by camera, light and colours of a place, to all clients. No noise
  covers it: differential privacy refuses the method.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedsim.core.transfer import send
from fedsim.functional.style import (
    camera_styles,
    image_moments,
    random_styles,
    restyle,
    spread_of_styles,
    style_of,
)
from fedsim.methods.base import BodySharing, Method, Need, Payload, WeightingChoice
from fedsim.training.client import Client
from fedsim.training.messages import Upload
from fedsim.training.server import Server

_BANK = "styles"
"""the server's table: a row (mu_s, var_s) for each camera"""
_SENT = "styles_sent"
"""kept by a client whose styles are in the bank"""
_CHANNELS = 3
_EPS = 1e-5  # Paper silent; that of normalisation layers


@dataclass(frozen=True, kw_only=True)
class StyleBank(BodySharing, WeightingChoice, Method):
    """Averaging of clients that also train on their images in styles of all clients' cameras."""

    requires: ClassVar[frozenset[Need]] = frozenset({"identities", "plain_steps", "whole_batches", "built_in_model"})
    # restyled images have their people's labels; a loop of its own, whose draws are in the order of whole batches
    passes = 2  # of x and x'

    styles: Literal["clients", "random"] = "clients"
    """whose styles images get: those of all clients' cameras, or, as a control, random ones with their moments"""

    def payload(self, server: Server, arch: str, round_: int) -> Payload:
        """Return the bank."""
        return Payload(tables={_BANK: 2 * _CHANNELS})  # (G2)

    def train(self, client: Client) -> None:
        """Step on each batch and on its restyled images together."""
        bank, stream = client.received.extras[_BANK], client.generator("styles")
        moments = spread_of_styles(bank) if self.styles == "random" and len(bank) else None
        for epoch in range(client.local_epochs):
            for batch in client.batches(epoch):
                loss = client.training_step(batch)
                if len(bank):
                    style = _draw(bank, moments, len(batch.images), stream)
                    images, *views = (_in_style(view, style) for view in (batch.images, *batch.views))
                    styled = client.output(batch._replace(images=images, views=tuple(views)))
                    loss = loss + client.supervised_loss(styled, batch, counts=False)  # (G4)
                client.step(loss)

    def upload(self, client: Client) -> Upload:
        """Return the model, and the first time the styles of the client's cameras (G1)."""
        if _SENT in client.kept:
            return Upload(client.model.shared)
        client.keep(_SENT, torch.ones(1, device=client.device))
        return Upload(client.model.shared, rows={_BANK: _styles_of(client)})


def _draw(bank: Tensor, moments: tuple[Tensor, Tensor] | None, count: int, stream: torch.Generator) -> Tensor:
    """Return a style for each of ``count`` images, [B, 2 C]: rows of the bank, or random ones with ``moments``."""
    if moments is not None:
        return random_styles(send(torch.randn((count, bank.shape[1]), generator=stream), bank.device), *moments)
    return bank[send(torch.randint(len(bank), (count,), generator=stream), bank.device)]


def _in_style(images: Tensor, style: Tensor) -> Tensor:
    """Return x' of images [B, C, H, W] and a style for each, [B, 2 C] (G3)."""
    mean, variance = style[:, :, None, None].chunk(2, dim=1)
    return restyle(images, style_of(images, _EPS, unbiased=False), (mean, variance.sqrt()), eps=0.0)


def _styles_of(client: Client) -> Tensor:
    """Return mean and variance of the images of each camera of a client, in ascending order: [K, 2 C]."""
    names, cameras = client.images.cameras.unique(return_inverse=True)
    batches = client.images.plain_batches(torch.arange(len(cameras)), client.batch_size)
    moments = torch.cat([image_moments(batch.images) for batch in batches])
    return camera_styles(moments, send(cameras, client.device), len(names))
