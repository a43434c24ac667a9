"""A target among the sources is refused, however it is named; what only looks like one is not."""

import os
import random
import shutil

import numpy as np
import pytest

from fedsim.core.errors import ConfigError
from fedsim.data.datamodule import FederatedDataModule
from fedsim.data.datasets import CUHK03, CUHK03NP, MSMT17, VIPeR
from fedsim.data.federations import check_unseen
from fedsim.data.images import Domain, ImageFiles, Split
from fedsim.data.market import MarketFolders
from fedsim.data.standins import write_standin


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("standins")
    for name in ("market1501", "cuhk03", "cuhk03np", "msmt17", "viper"):
        write_standin(name, folder, 4, size=(16, 8))
    (folder / "link").symlink_to(folder / "Market-1501-v15.09.15")
    return folder


def federated(sources, *unseen):
    return FederatedDataModule(sources, unseen=list(unseen), val="none").federated


@pytest.mark.parametrize("target", ["cuhk03", "cuhk03np"])
def test_another_version_of_the_target_is_refused(root, target):
    sources = [CUHK03(str(root)), CUHK03NP(str(root), variant="labeled"), VIPeR(str(root))]
    (other,) = {"cuhk03", "cuhk03np"} - {target}
    line = rf"data.unseen: {target} is among the sources: {other} shows the same people; take {other} out"
    with pytest.raises(ConfigError, match=line):
        federated(sources, target)
    with pytest.raises(ConfigError, match="two data sets are called msmt17"):
        federated([MSMT17(str(root)), MSMT17(str(root), train="train+val"), VIPeR(str(root))], "msmt17")
    assert federated(sources, "cuhk03", "cuhk03np").unseen == ("cuhk03", "cuhk03np")  # none trains


def test_the_targets_images_under_another_name_are_refused(root, tmp_path):
    original = MarketFolders(str(root / "Market-1501-v15.09.15"))
    line = r"is among the sources: link trains on its image .*; take link out of data.source"
    with pytest.raises(ConfigError, match=line):
        federated([original, MarketFolders(str(root / "link")), VIPeR(str(root))], "Market-1501-v15.09.15")
    shutil.copytree(root / "Market-1501-v15.09.15", tmp_path / "copied")  # of other files nothing is known
    sources = [original, MarketFolders(str(tmp_path / "copied")), VIPeR(str(root))]
    assert federated(sources, "Market-1501-v15.09.15").unseen == ("Market-1501-v15.09.15",)


def files(folder, numbers):
    paths = [folder / f"{number:04d}_c1.jpg" for number in numbers]
    return Split(ImageFiles(paths), np.ones(len(paths), dtype=np.int64), np.zeros(len(paths), dtype=np.int64))


def test_no_drawn_leak_is_missed_and_no_drawn_federation_is_refused(tmp_path):
    """Domains of files; in half of the draws one training image of a source is also one of the target."""
    rng = random.Random(0)
    (tmp_path / "data").mkdir()
    (tmp_path / "same").symlink_to(tmp_path / "data")
    for draw in range(200):
        names = rng.sample(["a", "b", "c", "d", "e"], rng.randint(2, 5))
        numbers = iter(rng.sample(range(10_000), 40 * len(names)))
        parts = {name: [[next(numbers) for _ in range(rng.randint(1, 10))] for _ in range(3)] for name in names}
        target, *sources = names
        leaks = draw % 2 == 0
        if leaks:
            image = rng.choice(rng.choice(parts[target]))
            parts[rng.choice(sources)][0].insert(0, image)
        where = {name: tmp_path / rng.choice(["data", "same", f"data{os.sep}."]) for name in names}
        domains = [Domain(name, *(files(where[name], part) for part in parts[name])) for name in names]
        rng.shuffle(domains)
        if leaks:
            with pytest.raises(ConfigError, match=f"data.unseen: {target} is among the sources: "):
                check_unseen(domains, [target], sources)
        else:
            check_unseen(domains, [target], sources)
