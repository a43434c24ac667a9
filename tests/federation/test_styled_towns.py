"""Layers of style where they must help: towns with styles of their own, and test towns with yet others."""

from functools import partial

import pytest
import torch

import others
from fedsim.data import Augmentation, FederatedDataModule
from fedsim.evaluation.settings import Evaluation
from fedsim.federation.federation import Federation
from fedsim.methods import FedPav
from fedsim.models import Neck, SmallCNN, StyleLayers
from fedsim.training.objective import Objective
from fedsim.training.settings import LocalTraining
from small import fit
from styled_towns import StyledTowns

ROUNDS = 15


def unseen_map(seed, style):
    """mAP of FedPav on the two unseen towns, in percent."""
    data = FederatedDataModule(
        StyledTowns(seed=seed), size=(64, 32), val="none", augmentation=Augmentation(pad=4, flip=0.5, erase=0.5)
    )
    torch.manual_seed(seed)
    model = Federation(
        FedPav(), SmallCNN(16, style=style), neck=Neck(kind="bnneck", dropout=0.0), seed=seed,
        client=LocalTraining(
            batch_size=32, sampler="identity", optimizer=partial(torch.optim.Adam, lr=1e-3, weight_decay=5e-4)
        ),
        objective=Objective(triplet=1.0), evaluation=Evaluation(),
    )  # fmt: skip
    fit(model, data, ROUNDS, limit_val_batches=1.0)
    return 100 * model.trainer.callback_metrics["test/global/unseen/mAP"].item()


@pytest.mark.slow
@pytest.mark.parametrize("seed", others.some([0, 1, 2], [0]))
def test_snr_is_ahead_on_unseen_towns(seed):
    """Each seed four times, with initial weights that differ by 1e-6: ahead by 11.6 to 21.9 points, mean 15.6.

    The standard deviation within a seed is 3.2, so 2.5 points are four of them below the mean.
    """
    assert unseen_map(seed, StyleLayers(kind="snr")) > unseen_map(seed, None) + 2.5
