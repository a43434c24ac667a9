"""CUHK02 shows the people of CUHK01, and can be the public set."""

import logging

import numpy as np
import pytest

from fedsim.data.datamodule import FederatedDataModule
from fedsim.data.datasets import CUHK01, CUHK02, VIPeR
from fedsim.data.standins import write_standin

PEOPLE = 8


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("standins")
    for name in ("cuhk01", "cuhk02", "viper"):
        write_standin(name, folder, PEOPLE, size=(16, 8))
    return str(folder)


def warnings_of(caplog, sources, **options):
    caplog.clear()
    data = FederatedDataModule(sources, val="none", **options)
    with caplog.at_level(logging.WARNING, logger="fedsim"):
        _, _ = data.federated, data.federated
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    "options",
    [{}, {"unseen": ["cuhk01"]}, {"unseen": ["cuhk02"]}, {"public": "cuhk01"}, {"partition": "union"}],
    ids=str,
)
@pytest.mark.parametrize("protocol", ["half", "splits"])
def test_the_first_pair_of_cuhk02_is_one_warning_in_any_role(root, caplog, options, protocol):
    sources = [CUHK01(root, protocol), VIPeR(root), CUHK02(root)]
    (warning,) = warnings_of(caplog, sources, **options)
    assert "the pair P1 of cuhk02 shows the people of cuhk01" in warning
    assert "exclude_p1: true" in warning


def test_as_public_set_the_warning_says_what_is_distilled(root, caplog):
    (warning,) = warnings_of(caplog, [CUHK01(root), CUHK02(root)], public="cuhk02")
    assert "the distillation set cuhk02 contains the people of cuhk01, also the test identities" in warning
    assert "exclude_p1: true" in warning


def test_without_the_pair_or_without_cuhk01_there_is_nothing_to_say(root, caplog):
    assert warnings_of(caplog, [CUHK01(root), CUHK02(root, exclude_p1=True)]) == []
    assert warnings_of(caplog, [CUHK01(root), CUHK02(root, exclude_p1=True)], public="cuhk02") == []
    assert warnings_of(caplog, [VIPeR(root), CUHK02(root)]) == []
    assert warnings_of(caplog, [VIPeR(root), CUHK01(root)]) == []


# -- public images -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("partition", ["by_dataset", "union", "by_camera", "by_identity", "iid", "dirichlet", "shards"])
@pytest.mark.parametrize("protocol", ["half", "splits"])
def test_cuhk02_as_public_set_is_neither_client_nor_test_set(root, partition, protocol):
    sources = [VIPeR(root), CUHK02(root, protocol, exclude_p1=True), CUHK01(root)]
    options = {"val": "none", "partition": partition, "parts": 2, "alpha": 5.0}
    federated = FederatedDataModule(sources, public="cuhk02", **options).federated
    without = FederatedDataModule([sources[0], sources[2]], **options).federated
    assert len(federated.public) == 4 * PEOPLE * 4  # pairs P2 to P5, two views, two images
    paths = [path for part in federated.public.images.parts for path in files(part)]
    assert len(set(paths)) == len(paths)
    assert all("CUHK02" in path.parts for path in paths)
    assert federated.unseen == ()
    assert list(federated.tests) == ["viper", "cuhk01"]
    assert [client.name for client in federated.clients] == [client.name for client in without.clients]
    for client, alone in zip(federated.clients, without.clients, strict=True):
        assert "cuhk02" not in client.tests
        assert files(client.train.images) == files(alone.train.images)
        assert np.array_equal(client.labels, alone.labels)
        assert not set(files(client.train.images)) & set(paths)


def files(images):
    parts = getattr(images, "parts", None)
    return list(images.paths) if parts is None else [path for part in parts for path in files(part)]
