"""Private normalisation (FedBN; SKA's LSN) wins where clients differ by contrast and brightness, by construction."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedsim.data import SyntheticReID
from fedsim.data.images import Domain, Images, Index, ReIDSource, Size
from fedsim.evaluation.settings import Evaluation
from fedsim.methods import SKA, FedAvg
from small import fit, make_data, make_model

LIGHTS = ((0.2, 0), (0.2, 200), (0.6, 0), (0.6, 100))
"""contrast and brightness of each town"""


@dataclass(frozen=True)
class Lit(Images):
    """Pictures of one client, all with one contrast and one brightness."""

    images: Images
    contrast: float
    brightness: int

    def __len__(self) -> int:
        return len(self.images)

    def take(self, index: Index) -> Lit:
        return replace(self, images=self.images.take(index))

    def decode(self, size: Size) -> Tensor:
        return (self.images.decode(size) * self.contrast + self.brightness).clamp(0, 255).to(torch.uint8)


class Lights(ReIDSource):
    """Towns of drawn people, each in a light of its own."""

    def domains(self) -> list[Domain]:
        towns = SyntheticReID(clients=len(LIGHTS), unseen=0, scale=0.5).domains()
        return [
            replace(town, **{part: replace(split, images=Lit(split.images, *light))
                             for part in ("train", "query", "gallery") if (split := getattr(town, part))})
            for town, light in zip(towns, LIGHTS, strict=True)
        ]  # fmt: skip


def own_domains(method):
    """MAP on the clients' own domains, percent, of the models that they would use."""
    pooled = Evaluation(layer="pool", distance="euclidean", test_during_fit=False)
    model = fit(make_model(method, evaluation=pooled), make_data(Lights()), rounds=6)
    return 100 * model.evaluator.score("test")["test/personalised/seen/mAP"]


def test_private_normalisation_wins_where_clients_differ_in_light():
    """Over 5 seeds of first weights it is ahead by 10.2 points of mAP on average, by 7.5 at least, deviation 2.5.

    Two threads gave the bits of one. So 0 is asked for, which is less than half of the gap and 4 deviations below it.
    """
    baseline = own_domains(FedAvg(share_head=False, share_neck=False, weighting="uniform"))
    assert own_domains(SKA(dual=False, unseen="avg")) > baseline  # which is FedBN: tests/methods/test_ska.py
