"""A copy of the received model, kept during training: the reference of regularisers and weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fedsim.training.client import Client

RECEIVED = "received"
"""role of the second model"""
_BATCH = 32
"""Images by which a change is measured (FedCAPR's code)."""


def remember_received(client: Client) -> None:
    """Copy the client's model, before its first step, into a second one in evaluation mode."""
    client.model.frozen_replica(RECEIVED, client.model.whole)


@torch.no_grad()
def received_features(client: Client, images: Tensor) -> Tensor:
    """Return the received model's neck features [B, D] of normalised images [B, 3, H, W]."""
    return client.model.replica(RECEIVED).forward(images, client.session.precision).features.neck


@torch.no_grad()
def first_features(client: Client) -> tuple[Tensor, Tensor]:
    """Return the received and the present model's features [B, D] of the first images in file order, not augmented."""
    first = torch.arange(min(_BATCH, client.data.num_images))
    [(images, *_)] = client.images.plain_batches(first, _BATCH)
    network, was_training = client.model.network, client.model.network.training
    network.eval()
    present = client.forward(images).features.neck
    network.train(was_training)
    return received_features(client, images), present
