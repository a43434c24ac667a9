"""One data set, several clients."""

import numpy as np
import pytest
import torch

from fedsim.core.errors import ConfigError
from fedsim.data.datamodule import FederatedDataModule
from fedsim.data.federations import build_federation
from fedsim.data.images import Domain, ImageArray, Split
from fedsim.data.partitions import divide
from fedsim.data.synthetic import SyntheticReID
from fedsim.methods import FedPav
from small import fit, make_model

HOWS = ("by_camera", "by_identity", "iid", "stratified", "dirichlet", "shards")


def split_of(people=20, cameras=3, shots=4):
    grid = np.array([(p + 1, c) for p in range(people) for c in range(cameras) for _ in range(shots)], dtype=np.int64)
    return Split(None, grid[:, 0], grid[:, 1])  # nobody looks at the pictures


@pytest.mark.parametrize("partition", HOWS)
def test_every_image_goes_to_one_client_always_the_same(partition):
    train = split_of()
    parts = divide("town", train, partition, parts=5)
    assert sorted(np.concatenate([part.images for part in parts])) == list(range(len(train)))
    assert len(parts) == (3 if partition == "by_camera" else 5)
    assert len({part.name for part in parts}) == len(parts)
    again = divide("town", train, partition, parts=5)
    assert all(np.array_equal(a.images, b.images) for a, b in zip(parts, again, strict=True))
    if partition != "by_camera":
        other = divide("village", train, partition, parts=5)
        assert any(not np.array_equal(a.images, b.images) for a, b in zip(parts, other, strict=True))


def test_a_camera_is_a_client():
    for part, camera in zip(divide("town", split_of(), "by_camera"), range(3), strict=True):
        assert part.name == f"cam{camera + 1}"
        assert set(split_of().camids[part.images]) == {camera}


def test_identities_are_dealt_out_in_equal_numbers():
    train = split_of(people=22)
    groups = [set(train.pids[part.images].tolist()) for part in divide("town", train, "by_identity", parts=5)]
    assert sorted(len(group) for group in groups) == [4, 4, 4, 5, 5]
    assert len(set.union(*groups)) == 22  # nobody is in two


def test_iid_parts_have_equal_sizes_and_all_identities():
    train = split_of(people=10, shots=20)
    for part in divide("town", train, "iid", parts=4):
        assert len(part.images) == len(train) // 4
        assert len(set(train.pids[part.images])) == 10


def test_stratified_clients_have_equally_many_samples_of_every_identity_of_all_data_sets():
    """Paper 002, Table 10: "evenly distributed across the three clients", of two sets with 93 and 59 identities."""
    shots = {"large": [3 + pid % 4 for pid in range(93)], "small": [4] * 59}
    domains = []
    for number, (name, counts) in enumerate(shots.items()):
        told = [(number, pid, shot) for pid, count in enumerate(counts, start=1) for shot in range(count)]
        images = ImageArray(np.array(told, dtype=np.uint8).reshape(-1, 1, 1, 3))  # the colour says which image it is
        split = Split(images, np.array([pid for _, pid, _ in told]), np.zeros(len(told), dtype=np.int64))
        domains.append(Domain(name, split, split.take(np.arange(2)), split.take(np.arange(2, 4))))
    federated = build_federation(domains, partition="stratified", parts=3, val="none")
    assert [client.name for client in federated.clients] == ["part1", "part2", "part3"]
    assert all(client.tests == ("large", "small") for client in federated.clients)
    held = [[tuple(c) for c in c.train.images.decode((1, 1)).flatten(1).tolist()] for c in federated.clients]
    assert sorted(image for images in held for image in images) == sorted(
        (number, pid, shot) for number, counts in enumerate(shots.values())
        for pid, count in enumerate(counts, start=1) for shot in range(count)
    )  # fmt: skip
    for number, counts in enumerate(shots.values()):
        for pid, count in enumerate(counts, start=1):
            own = sorted(sum(image[:2] == (number, pid) for image in images) for images in held)
            assert own[-1] - own[0] <= 1, (number, pid)
            assert sum(own) == count
    assert max(map(len, held)) - min(map(len, held)) <= len(domains)
    for client, images in zip(federated.clients, held, strict=True):  # a label is a person of one data set
        assert client.num_classes == 93 + 59
        assert len(set(zip(client.labels.tolist(), (image[:2] for image in images), strict=True))) == 93 + 59


def concentration(alpha):
    """Mean share of an identity's images at the client that has most of them."""
    train = split_of(people=50, shots=10)
    parts = divide("town", train, "dirichlet", parts=4, alpha=alpha)
    counts = np.array([[np.sum(train.pids[part.images] == pid) for part in parts] for pid in range(1, 51)])
    return (counts.max(axis=1) / counts.sum(axis=1)).mean()


def test_dirichlet_is_more_uneven_the_smaller_alpha_is():
    few, some, many = (concentration(alpha) for alpha in (0.05, 1.0, 100.0))
    assert few > 0.85 > some > 0.4 > many > 0.25


def test_a_client_has_few_identities_of_two_shards():
    train = split_of(people=40)
    for part in divide("town", train, "shards", parts=5):
        assert len(part.images) == len(train) // 5
        assert len(set(train.pids[part.images])) <= 10  # two shards of four, each begun by somebody's last images


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"partition": "iid", "parts": 0}, r"data\.parts: 0 is not in \[1, "),
        ({"partition": "dirichlet", "alpha": 0.0}, r"data\.alpha: 0\.0 is not positive"),
        (
            {"partition": "by_identity", "parts": 30},
            r"data\.parts: by_identity leaves town-part\d+ without images; use fewer",
        ),
        ({"partition": "dirichlet", "parts": 200, "alpha": 0.01}, r"use fewer parts or a larger data\.alpha"),
        ({"partition": "union"}, r"data\.partition: union does not divide"),
    ],
)
def test_what_cannot_be_divided_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        divide("town", split_of(), **options)


def test_a_federation_of_parts_is_tested_on_the_data_sets():
    domains = SyntheticReID(clients=2, unseen=1, scale=0.3).domains()
    federated = build_federation(domains, partition="by_identity", parts=2, val="none")
    assert [c.name for c in federated.clients] == ["town0-part1", "town0-part2", "town1-part1", "town1-part2"]
    assert [c.tests for c in federated.clients] == [("town0",), ("town0",), ("town1",), ("town1",)]
    assert list(federated.tests) == ["town0", "town1", "new0"]
    assert federated.unseen == ("new0",)
    for client in federated.clients:  # labels start at 0 for each
        assert sorted(set(client.labels.tolist())) == list(range(client.num_classes))


def test_parts_train_and_are_scored():
    source = SyntheticReID(clients=1, unseen=1, scale=0.3)
    data = FederatedDataModule(source, partition="by_camera", val="none", size=(32, 16))
    model = fit(make_model(FedPav()), data, rounds=1)
    scores = model.evaluator.score("test")
    assert len(model.parts.clients) == len(data.federated.clients) > 1
    assert torch.isfinite(torch.tensor(scores["test/global/town0/mAP"]))
    # everything is shared, so everybody's personal model is the global one
    assert scores["test/personalised/town0/mAP"] == scores["test/global/town0/mAP"]
