r"""Training a generator of people on one client's images (paper 002, Figures 5 and 6).

The generator splits an image into appearance (colours, prints) and structure (body, pose, background), and gives images
of one person the appearance of another. A discriminator, both encoders and an identity head score the result.

Paper 002 names DG-Net, without equations, sizes or rates. Here:

- The equations are those of Zheng et al. (CVPR 2019), see :mod:`fedsim.generation.losses`. Networks, rates and steps
  are small ones of fedsim, see configs/generators.
- There is no second, "fine-grained" head for the identity of the structure source, since re-ID models here have one.
- The target codes of the code losses are constants: with gradients, both codes could shrink to zero.
- The gradient of soft labels reaches the appearance encoder only, not the decoder.
- The discriminator is trained by least squares, as the authors' code is reported to do; the paper has logarithms.
- Rates and factors are constant, without weight decay; soft labels begin later. The authors' code lowers rates, decays
  weights, and raises the factors of codes and soft labels slowly.
- The teacher is a second appearance encoder, trained together with the generator, on the client's real images only.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from lightning import LightningModule
from torch import Tensor, nn
from torch.optim import Adam

from fedsim.core.checks import at_least, within
from fedsim.core.errors import TrainingError
from fedsim.core.seeding import derive_seed, seed_global_stream, seeded_host, torch_generator
from fedsim.data.images import Index
from fedsim.functional.losses import soft_label_divergence
from fedsim.generation.losses import LossWeights, realness_loss
from fedsim.generation.networks import AppearanceEncoder, Discriminator, Generator, Networks
from fedsim.generation.sampling import Sampler
from fedsim.generation.saved import hash_images

Losses = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class GeneratorSteps:
    """Steps and learning rates of a generator's training."""

    steps: int = 3000
    """number of batches"""
    batch_size: int = 8
    """persons per batch, with two images each"""
    rate: float = 5e-4
    """Adam's learning rate for the structure encoder and the decoder"""
    appearance_rate: float = 5e-4
    """Adam's learning rate for the appearance encoder and the teacher"""
    discriminator_rate: float = 1e-3
    """Adam's learning rate for the discriminator"""
    momentum: float = 0.5
    """Adam's first beta; its second is 0.999"""
    flip: float = 0.5
    """probability of a horizontal mirror image"""
    save_every: int = 200
    """steps between two checkpoints, and per line of losses.csv"""

    def __post_init__(self) -> None:
        at_least("training", 1, steps=self.steps, save_every=self.save_every)
        at_least("training", 2, batch_size=self.batch_size)
        within("training", "(0, 1e30]", rate=self.rate, appearance_rate=self.appearance_rate)
        within("training", "(0, 1e30]", discriminator_rate=self.discriminator_rate)
        within("training", "[0, 1)", momentum=self.momentum)
        within("training", "[0, 1]", flip=self.flip)


class GeneratorTraining(LightningModule):
    """A generator in training. One Lightning epoch is ``save_every`` steps.

    The name of the ``client`` is the key of all random choices. ``pixels`` are its training images, uint8 [n, 3, H, W],
    ``labels`` [n] their identities, 0 .. ``num_classes`` - 1. ``backbone``, a template for the backbone of the
    appearance encoder, is copied. ``networks`` are sizes, ``losses`` factors, ``training`` steps and rates; ``seed`` is
    that of the run.
    """

    pixels: Tensor
    labels: Tensor

    def __init__(
        self,
        *,
        client: str,
        pixels: Tensor,
        labels: Index,
        num_classes: int,
        backbone: nn.Module,
        networks: Networks,
        losses: LossWeights,
        training: GeneratorSteps,
        seed: int,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.client = client
        self.losses, self.training_settings, self.seed = losses, training, seed
        with seeded_host(derive_seed(seed, client, "generator")):
            self.generator = Generator(copy.deepcopy(backbone), networks, num_classes)
            self.teacher = AppearanceEncoder(copy.deepcopy(backbone), networks.parts, num_classes)
            self.discriminator = Discriminator(networks.width, networks.scales)
        self.sampler = Sampler(client, labels, training.batch_size, seed)
        self.register_buffer("pixels", pixels, persistent=False)
        self.register_buffer("labels", torch.from_numpy(labels), persistent=False)
        self.images_hash = hash_images(pixels, labels)
        self.history: list[dict[str, float]] = []
        """means of the losses over each epoch so far"""
        self._sums: list[Losses] = []

    def configure_optimizers(self) -> list[Adam]:
        """Return the optimizers of generator, discriminator and teacher."""
        settings, parts = self.training_settings, self.generator
        of_generator = [
            {"params": [*parts.structure.parameters(), *parts.decoder.parameters()], "lr": settings.rate},
            {"params": list(parts.appearance.parameters()), "lr": settings.appearance_rate},
        ]
        betas = (settings.momentum, 0.999)
        return [
            Adam(of_generator, betas=betas),
            Adam(self.discriminator.parameters(), lr=settings.discriminator_rate, betas=betas),
            Adam(self.teacher.parameters(), lr=settings.appearance_rate, betas=betas),
        ]

    def training_step(self, _: Any, position: int) -> None:
        """Train for one step; ``position`` counts from the start of the epoch."""
        step = self.current_epoch * self.training_settings.save_every + position
        if step >= self.training_settings.steps:  # the last epoch is shorter
            return
        seed_global_stream(derive_seed(self.seed, self.client, step, "modules"))  # for noise within backbones
        # 1. Sample two images each of some persons, and the structure source for each.
        images, partners, labels, lenders = self._sample(step)
        # 2. The teacher learns the identities of real images.
        teaching = F.cross_entropy(self.teacher.logits(self.teacher(images)), labels)
        self._update(2, teaching)
        # 3. Encode, and make images with their own appearance, with that of the partner, and with another structure.
        appearance, structure = self.generator.appearance, self.generator.structure
        codes, partner_codes = appearance(torch.cat([images, partners])).chunk(2)
        maps = structure(images)
        lent = maps.index_select(0, lenders)
        made = self.generator.decoder(torch.cat([maps, maps, lent]), torch.cat([codes, partner_codes, codes]))
        rebuilt, rebuilt_by_partner, swapped = made.chunk(3)
        # 4. The generator's losses.
        losses = {
            "self": F.l1_loss(rebuilt, images),
            "same": F.l1_loss(rebuilt_by_partner, images),
            "identity": F.cross_entropy(appearance.logits(codes), labels),
        }
        losses |= self._losses_of_swapped(swapped, codes, lent, labels)
        if self.losses.soft and step >= self.losses.soft_after * self.training_settings.steps:
            losses["soft"] = self._soft_label_loss(swapped)
        # 5. The generator learns, then the discriminator.
        self._update(0, self._total(losses))
        losses["teacher"] = teaching
        losses["discriminator"] = self._realness(images, swapped)
        self._update(1, losses["discriminator"])
        self._sums.append({name: loss.detach() for name, loss in losses.items()})

    def _sample(self, step: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return images x_i and x_t in [-1, 1], randomly mirrored, their identities, and positions of x_j among x_i."""
        sampled = self.sampler.sample(step)
        rows = torch.cat([sampled.images, sampled.others])
        generator = torch_generator(self.seed, self.client, step, "mirror")
        mirrored = torch.rand(len(rows), generator=generator) < self.training_settings.flip
        rows, mirrored = rows.to(self.device), mirrored.to(self.device)
        pixels = self.pixels.index_select(0, rows)
        images = to_symmetric(torch.where(mirrored[:, None, None, None], pixels.flip(3), pixels))
        first, second = images.chunk(2)
        return first, second, self.labels.index_select(0, rows[: len(first)]), sampled.lenders.to(self.device)

    def _losses_of_swapped(self, swapped: Tensor, codes: Tensor, maps: Tensor, labels: Tensor) -> Losses:
        appearance = self.generator.appearance
        codes_again = appearance(swapped)
        self.discriminator.requires_grad_(False)
        realness = realness_loss(self.discriminator(swapped), 1.0)
        self.discriminator.requires_grad_(True)
        return {
            "appearance code": F.l1_loss(codes_again, codes.detach()),
            "structure code": F.l1_loss(self.generator.structure(swapped), maps.detach()),
            "swapped identity": F.cross_entropy(appearance.logits(codes_again), labels),
            "adversarial": realness,
        }

    def _soft_label_loss(self, swapped: Tensor) -> Tensor:
        """Return the divergence of the appearance encoder from the teacher on swapped images."""
        images = swapped.detach()
        self.teacher.eval()
        with torch.no_grad():
            wanted = self.teacher.logits(self.teacher(images))
        self.teacher.train()
        appearance = self.generator.appearance
        return soft_label_divergence(appearance.logits(appearance(images)), wanted, temperature=1.0)

    def _total(self, losses: Losses) -> Tensor:
        factors = self.losses
        total = factors.image * (losses["self"] + losses["same"]) + factors.identity * losses["identity"]
        total = total + factors.code * (losses["appearance code"] + losses["structure code"])
        total = total + factors.swapped_identity * losses["swapped identity"]
        total = total + factors.adversarial * losses["adversarial"]
        return total + factors.soft * losses["soft"] if "soft" in losses else total

    def _realness(self, real: Tensor, made: Tensor) -> Tensor:
        return realness_loss(self.discriminator(real), 1.0) + realness_loss(self.discriminator(made.detach()), 0.0)

    def _update(self, position: int, loss: Tensor) -> None:
        optimizers = self.optimizers()
        assert isinstance(optimizers, list)
        optimizer = optimizers[position]
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def on_train_epoch_end(self) -> None:
        """Keep the means of the losses; raise TrainingError if one is not finite."""
        first = self.current_epoch * self.training_settings.save_every
        row = {"step": float(first + len(self._sums))}
        for name in self._sums[-1]:  # soft labels may have begun in this epoch
            row[name] = float(torch.stack([losses[name] for losses in self._sums if name in losses]).mean())
        self._sums.clear()
        if bad := [name for name, value in row.items() if not math.isfinite(value)]:
            raise TrainingError(
                f"client {self.client}, step {row['step']:.0f}: the generator's loss {bad[0]} is {row[bad[0]]}; "
                "lower training.rate, in another --output, or check that all images are readable"
            )
        self.history.append(row)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the losses and the hash of the images."""
        checkpoint["history"] = self.history
        checkpoint["images_hash"] = self.images_hash

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the losses of earlier epochs."""
        self.history = checkpoint["history"]


def to_symmetric(pixels: Tensor) -> Tensor:
    """Map uint8 [B, 3, H, W] to float32 in [-1, 1]."""
    return pixels.float() / 127.5 - 1


def to_pixels(images: Tensor) -> Tensor:
    """Map [-1, 1] back to uint8."""
    return ((images + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
