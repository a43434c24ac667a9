"""check_backbone, check_source and check_loss refuse what is wrong, name it, and accept what is sound."""

import pytest
import torch
from faulty_parts import (
    BACKBONES,
    LOSSES,
    SOURCES,
    BeginsWithAHash,
    Reader,
    Sound,
    SoundLoss,
    SoundModule,
    SoundViews,
    WithDropout,
)
from PIL import Image

from fedsim.data import SyntheticReID
from fedsim.models import OSNet, ResNet, SmallCNN
from fedsim.testing import PartRefusedError, check_backbone, check_loss, check_source
from fedsim.testing.fingerprint import hashed
from fedsim.training.metric_loss import MetricLoss

pytestmark = [pytest.mark.slow, pytest.mark.dist]  # each check has fits in processes of their own


def test_the_hash_of_equal_state_is_equal():
    """Objects that are made for the hash alone must not lend each other their ids."""
    parts = [SmallCNN(width=2), [torch.nn.Linear(1, 1) for _ in range(5)], {"a": (1, [2], {3: (4,)})}]
    assert len({hashed(parts) for _ in range(300)}) == 1


def by_name(kind):
    return kind.__name__


def assert_names(word, check):
    with pytest.raises(PartRefusedError) as caught:
        check()
    assert any(word in finding for finding in caught.value.findings), str(caught.value)
    assert all(len(finding.splitlines()) == 1 for finding in caught.value.findings)


@pytest.mark.parametrize("kind", [Sound, WithDropout], ids=by_name)
def test_a_sound_backbone_is_accepted(kind):
    check_backbone(kind())


@pytest.mark.parametrize(
    "make", [lambda: SmallCNN(width=8), lambda: ResNet(18), OSNet], ids=["SmallCNN", "ResNet", "OSNet"]
)
def test_backbones_of_the_house_are_accepted(make):
    check_backbone(make(), fits=False)


@pytest.mark.parametrize("kind", BACKBONES, ids=by_name)
def test_a_faulty_backbone_is_refused(kind):
    assert_names(BACKBONES[kind], lambda: check_backbone(kind()))


def test_a_backbone_that_begins_otherwise_in_each_process_is_refused():
    """A class of a script, which other processes build again."""
    assert_names("scale begins with other values", lambda: check_backbone(BeginsWithAHash()))


def test_what_is_no_module_is_refused():
    assert_names("no torch.nn.Module", lambda: check_backbone(Sound))
    assert_names("no torch.nn.Module", lambda: check_loss(SoundModule))
    assert_names("no ReIDSource", lambda: check_source([]))


@pytest.mark.parametrize("source", [Reader(), SyntheticReID(clients=2, scale=0.1)], ids=["Reader", "SyntheticReID"])
def test_a_sound_source_is_accepted_and_drawn(source, tmp_path):
    picture = tmp_path / "people.png"
    check_source(source, picture=picture)
    with Image.open(picture) as sheet:
        assert sheet.height > 3 * 64


@pytest.mark.parametrize("kind", SOURCES, ids=by_name)
def test_a_faulty_source_is_refused(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert_names(SOURCES[kind], lambda: check_source(kind(), picture=tmp_path / "people.png"))
    assert not (tmp_path / "people.png").exists() or kind.__name__ == "OpensAtOnce"


@pytest.mark.parametrize("kind", [SoundLoss, SoundViews, SoundModule], ids=by_name)
def test_a_sound_loss_is_accepted(kind):
    check_loss(kind())


@pytest.mark.parametrize("kind", LOSSES, ids=by_name)
def test_a_faulty_loss_is_refused(kind):
    assert_names(LOSSES[kind], lambda: check_loss(kind()))


@pytest.mark.parametrize("name", ["CircleLoss", "SupConLoss"])
def test_losses_of_the_library_are_accepted(name):
    losses = pytest.importorskip("pytorch_metric_learning.losses", reason="needs fedsim-reid[models]")
    assert MetricLoss(name=name)
    check_loss(getattr(losses, name)(), fits=False)
