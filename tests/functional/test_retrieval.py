"""Retrieval among the images of one list against loops over pairs of images in float64."""

import pytest
import torch

from fedsim.functional import similarity
from fedsim.functional.retrieval import leave_one_out
from plain_loops import slow_retrieval


@pytest.mark.parametrize("num_cameras", [1, 2, 5])
@pytest.mark.parametrize("seed", range(4))
def test_retrieval_is_that_of_loops(seed, num_cameras, monkeypatch):
    monkeypatch.setattr(similarity, "_ROWS", 16)  # several blocks
    generator = torch.Generator().manual_seed(seed)
    groups = torch.randint(-1, 12, (60,), generator=generator)
    centres = torch.randn(13, 6, generator=generator)
    features = centres[groups] + 0.8 * torch.randn(60, 6, generator=generator)
    cameras = torch.randint(0, num_cameras, (60,), generator=generator)
    expected = slow_retrieval(features.double().tolist(), groups.tolist(), cameras.tolist())
    assert all(0.1 < value < 0.9 for value in expected)
    assert leave_one_out(features, groups, cameras) == pytest.approx(expected)


def test_a_groups_other_images_in_the_same_camera_do_not_help_it():
    """Twins in one camera, and a third image far away in another one: as test sets are ranked, all three miss."""
    features = torch.tensor([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.1], [0.9, 0.1], [-1.0, 0.0]])
    groups = torch.tensor([0, 0, 0, 1, 2])
    assert leave_one_out(features, groups, torch.tensor([0, 0, 1, 0, 0])).rank1 == 0.0
    assert leave_one_out(features, groups, torch.zeros(5, dtype=torch.int64)).rank1 == pytest.approx(2 / 3)


def test_nobody_to_find_is_nothing_right():
    for groups in ([-1, -1, -1], [0, 1, 2], [-1, 0, 1]):
        assert leave_one_out(torch.eye(3), torch.tensor(groups), torch.zeros(3, dtype=torch.int64)) == (0.0, 0.0)
