"""check_backbone, check_source and check_loss refuse what is wrong, name it, and accept what is sound."""

import logging
import multiprocessing
import os
import signal
import sys
from importlib.util import module_from_spec, spec_from_file_location

import pytest
import torch
from faulty_parts import (
    BACKBONES,
    LOSSES,
    SOURCES,
    SOURCES_OF_FILES,
    AttentionOfOnePlace,
    BeginsWithAHash,
    ConstantsInADict,
    Frames,
    OfFiles,
    Parametrized,
    Reader,
    Sound,
    SoundLoss,
    SoundModule,
    SoundViews,
    WithDropout,
    WithItsNorm,
)
from PIL import Image

from fedsim.core.errors import ConfigError
from fedsim.data import SyntheticReID
from fedsim.models import OSNet, ResNet, SmallCNN
from fedsim.testing import PartRefusedError, check_backbone, check_loss, check_source, trials
from fedsim.testing.backbone import check_building
from fedsim.testing.findings import Findings
from fedsim.testing.fingerprint import hashed
from fedsim.testing.pythons import sent
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


@pytest.mark.parametrize(
    "kind", [Sound, WithDropout, AttentionOfOnePlace, ConstantsInADict, WithItsNorm, Parametrized], ids=by_name
)
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


@pytest.mark.parametrize("sizes", [(32, 16), [], [32], [(32, 0)], [(3.5, 2)], [(1, 2, 3)]])
def test_sizes_are_pairs_of_numbers(sizes):
    with pytest.raises(ConfigError, match=r"sizes: give a list of \(height, width\)"):
        check_backbone(Sound(), sizes=sizes)


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


@pytest.mark.parametrize("kind", [OfFiles, Frames], ids=by_name)
def test_a_sound_source_of_files_is_accepted(kind, tmp_path):
    check_source(kind.drawn(tmp_path))


@pytest.mark.parametrize("kind", SOURCES_OF_FILES, ids=by_name)
def test_a_faulty_source_of_files_is_refused(kind, tmp_path):
    assert_names(SOURCES_OF_FILES[kind], lambda: check_source(kind.drawn(tmp_path)))


@pytest.mark.parametrize("kind", [SoundLoss, SoundViews, SoundModule], ids=by_name)
def test_a_sound_loss_is_accepted(kind):
    check_loss(kind())


OUT_OF_REACH = """
from dataclasses import replace
import numpy as np
from faulty_parts import Reader, Sound

class Net(Sound):
    pass

class ByHash(Reader):
    def domains(self):
        first, *others = super().domains()
        order = [*{str(number) for number in range(len(first.train))}]
        return [replace(first, train=first.train.take(np.array([*map(int, order)]))), *others]
"""


def test_parts_of_a_module_that_other_processes_do_not_find_are_checked_as_well(tmp_path, monkeypatch):
    """As pytest imports tests with ``--import-mode=importlib``, or a notebook that has changed its folder."""
    (tmp_path / "out_of_reach.py").write_text(OUT_OF_REACH)
    spec = spec_from_file_location("out_of_reach", tmp_path / "out_of_reach.py")
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "out_of_reach", module)
    spec.loader.exec_module(module)
    check_backbone(module.Net())
    assert_names("PYTHONHASHSEED", lambda: check_source(module.ByHash()))


class FromTheEnvironment(Reader):
    """It reads a variable, which was set after the other processes' server had started."""

    def domains(self):
        assert os.environ["ROOT_OF_DATA"] == self.expected
        return super().domains()


@pytest.mark.parametrize("root", ["one", "two"])
def test_other_processes_have_the_environment_of_the_check(root, monkeypatch):
    monkeypatch.setenv("ROOT_OF_DATA", root)
    source = FromTheEnvironment()
    source.expected = root
    check_source(source)


def test_a_part_that_cannot_be_sent_is_said(caplog, monkeypatch):
    logger = logging.getLogger("fedsim.testing.pythons")  # a command's own handlers may end the way to the root
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    monkeypatch.setattr(logger, "disabled", False)
    assert sent(Parametrized()) is None
    assert "cannot be sent to another Python (RuntimeError: Serialization of parametrized modules" in caplog.text


@pytest.mark.parametrize("kind", LOSSES, ids=by_name)
def test_a_faulty_loss_is_refused(kind):
    assert_names(LOSSES[kind], lambda: check_loss(kind()))


@pytest.mark.parametrize("name", ["CircleLoss", "SupConLoss"])
def test_losses_of_the_library_are_accepted(name):
    losses = pytest.importorskip("pytorch_metric_learning.losses", reason="needs fedsim-reid[models]")
    assert MetricLoss(name=name)
    check_loss(getattr(losses, name)(), fits=False)


def test_a_rank_that_waits_for_a_failed_one_is_not_late(monkeypatch, tmp_path):
    """Rank 0 waits without end for rank 1, which has ended by itself; that is the finding."""
    ends = {0: signal.pause, 1: lambda: os._exit(3)}

    def started(fit, rank, port, content):
        process = multiprocessing.get_context("fork").Process(target=ends[rank])
        process.start()
        return process

    monkeypatch.setattr(trials.Fit, "_started", started)
    monkeypatch.setattr(trials, "_AFTER_A_FAILURE", 0.0)
    fit = trials.Fit(trials.BodyAverage(), tmp_path / "two", ranks=2)
    [finding] = fit.run()
    assert finding.startswith("a fit on 2 rank(s) ended without a message, code 3; its output:")
    assert not fit.is_late
    monkeypatch.setattr(trials, "PATIENCE", 0.0)
    slow = trials.Fit(trials.BodyAverage(), tmp_path / "one")
    assert slow.run()[0].startswith("a fit on 1 rank(s) did not end in 0 seconds")
    assert slow.is_late


def test_a_network_that_cannot_be_built_again_leaves_no_process():
    class Grows(SmallCNN):
        def __init__(self, width=4):
            super().__init__(width=width)
            self.width = None

    before = {*multiprocessing.active_children()}
    check_building(Grows(), Findings("Grows"))
    assert {*multiprocessing.active_children()} == before
