"""Proxies, their memory and the batches of them, against plain loops."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from fedsim.functional.memory import update_memory
from fedsim.training.proxies import make_proxies, proxy_batches


def unit(vector):
    return vector / vector.norm()


def test_proxies_are_means_of_a_cluster_in_a_camera():
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(60, 5, generator=generator)
    clusters = torch.randint(-1, 4, (60,), generator=generator)
    cameras = torch.randint(0, 3, (60,), generator=generator) * 2  # cameras without images in between
    proxies, of_image = make_proxies(features, clusters, cameras)
    expected = []
    for cluster in range(4):
        for camera in (0, 2, 4):
            members = [i for i in range(60) if clusters[i] == cluster and cameras[i] == camera]
            if members:
                mean = sum(unit(features[i].double()) for i in members) / len(members)
                expected.append((cluster, camera, unit(mean), members))
    assert len(proxies) == len(expected)
    for p, (cluster, camera, mean, members) in enumerate(expected):
        assert (proxies.clusters[p], proxies.cameras[p]) == (cluster, camera)
        assert_close(proxies.memory[p].double(), mean, rtol=0, atol=1e-6)
        assert (of_image == p).nonzero().flatten().tolist() == members
    assert ((of_image < 0) == (clusters < 0)).all()
    assert (clusters < 0).any()


def test_no_clusters_make_no_proxies():
    proxies, of_image = make_proxies(torch.ones(3, 4), torch.full((3,), -1), torch.zeros(3, dtype=torch.long))
    assert (len(proxies), proxies.memory.shape, of_image.tolist()) == (0, (0, 4), [-1] * 3)
    assert proxy_batches(of_image, 8, 4, torch.Generator()) == []


def test_two_images_of_a_proxy_move_it_one_after_the_other():
    generator = torch.Generator().manual_seed(1)
    memory = torch.nn.functional.normalize(torch.randn(3, 4, generator=generator, dtype=torch.float64)).float()
    f = torch.nn.functional.normalize(torch.randn(3, 4, generator=generator, dtype=torch.float64)).float()
    before = memory.clone()
    moved = update_memory(memory, f, torch.tensor([1, 0, 1]), momentum=0.2)
    k1 = unit(0.2 * memory[1].double() + 0.8 * f[0].double())
    k2 = unit(0.2 * k1 + 0.8 * f[2].double())
    assert_close(moved[1].double(), k2, rtol=0, atol=1e-6)
    assert_close(moved[0].double(), unit(0.2 * memory[0].double() + 0.8 * f[1].double()), rtol=0, atol=1e-6)
    assert torch.equal(moved[2], before[2])
    assert torch.equal(memory, before)
    other_order = update_memory(memory, f.flip(0), torch.tensor([1, 0, 1]), momentum=0.2)
    assert (other_order[1] - moved[1]).abs().max() > 0.01


def test_the_memory_takes_no_gradient():
    memory, f = torch.eye(2), torch.ones(1, 2, requires_grad=True)
    assert not update_memory(memory, f, torch.tensor([0]), momentum=0.2).requires_grad


# -- batches -----------------------------------------------------------------------------------------------------------


def labels_of(counts, outliers=5):
    return torch.cat([torch.full((count,), p) for p, count in enumerate(counts)] + [torch.full((outliers,), -1)])


@pytest.mark.parametrize("counts", [[1, 2, 3, 4, 9, 30, 6, 7, 8, 5, 11], [40] * 8, [3, 200]])
def test_batches_hold_different_proxies_with_as_many_images_each(counts):
    labels = labels_of(counts)
    batches = proxy_batches(labels, 8, 4, torch.Generator().manual_seed(0))
    assert len(batches) == max(1, sum(counts) // 32)
    for batch in batches:
        own = labels[batch]
        assert (own >= 0).all()
        groups = own.view(-1, 4)
        assert (groups == groups[:, :1]).all()
        assert len(groups[:, 0].unique()) == min(8, len(counts)) == len(groups)
        for group, proxy in zip(batch.view(-1, 4), groups[:, 0], strict=True):
            assert len(group.unique()) == min(4, counts[proxy])  # images repeat only where they must


def test_each_pass_takes_every_proxy_once():
    labels = labels_of([32] * 16)
    batches = proxy_batches(labels, 8, 4, torch.Generator().manual_seed(0))
    assert len(batches) == 16
    for first, second in zip(batches[::2], batches[1::2], strict=True):
        assert sorted(labels[torch.cat([first, second])][::4].tolist()) == list(range(16))


def test_batches_depend_on_the_generator_alone():
    labels = labels_of([20] * 9)

    def draw(seed):
        return torch.cat(proxy_batches(labels, 4, 4, torch.Generator().manual_seed(seed))).tolist()

    assert draw(0) == draw(0) != draw(1)


@pytest.mark.parametrize("width", [1, 7, 33, 512])
def test_passes_move_proxies_image_after_image_to_the_bit(width):
    generator = torch.Generator().manual_seed(2)
    memory, f = (F.normalize(torch.randn(count, width, generator=generator)) for count in (6, 20))
    labels = torch.randint(0, 6, (20,), generator=generator)
    expected = memory.clone()
    for image, label in zip(f, labels.tolist(), strict=True):
        expected[label] = F.normalize((0.2 * expected[label] + (1 - 0.2) * image)[None])[0]
    most = int(labels.bincount().max())
    assert torch.equal(update_memory(memory, f, labels, momentum=0.2), expected)
    assert torch.equal(update_memory(memory, f, labels, momentum=0.2, most=most), expected)
    if width > 1:  # of one feature only signs are left
        assert not torch.equal(update_memory(memory, f, labels, momentum=0.2, most=most - 1), expected)
