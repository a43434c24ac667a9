"""Clusters against an n x n rewrite of the public algorithm, and DBSCAN against its textbook form."""

import numpy as np
import pytest
import torch
from scipy import sparse

from fedsim.core.errors import ConfigError
from fedsim.functional.neighbours import nearest
from fedsim.functional.reciprocal import encode, jaccard_blocks
from fedsim.training.labels.pseudo_labels import cluster_graph, find_clusters


def people(num, per, noise, seed=0, dim=24):
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(num, dim, generator=generator).repeat_interleave(per, dim=0)
    return centres + noise * torch.randn(num * per, dim, generator=generator)


# -- the references ----------------------------------------------------------------------------------------------------


def dense_jaccard(features, k1, k2):
    """The public algorithm for clustering, with every matrix [n, n]."""
    x = torch.nn.functional.normalize(features.double()).numpy()
    distance = 2 - 2 * x @ x.T
    np.fill_diagonal(distance, -1)  # an image is its own first neighbour
    rank = np.argsort(distance, axis=1, kind="stable")[:, :k1]
    np.fill_diagonal(distance, 0)
    num = len(x)

    def mutual(i, k):
        return [j for j in rank[i, : k + 1] if i in rank[j, : k + 1]]

    v = np.zeros((num, num))
    for i in range(num):
        own = mutual(i, k1)
        grown = list(own)
        for j in own:
            candidates = mutual(j, round(k1 / 2))
            if len(set(candidates) & set(own)) > 2 / 3 * len(candidates):
                grown += candidates
        grown = sorted(set(grown))
        weights = np.exp(-distance[i, grown])
        v[i, grown] = weights / weights.sum()
    v = np.stack([v[rank[i, :k2]].mean(axis=0) for i in range(num)])
    common = np.array([[np.minimum(a, b).sum() for b in v] for a in v])
    return 1 - common / (2 - common)


def textbook_dbscan(distance, eps, min_samples):
    """Ester et al.: grow each cluster from its first core, breadth first; a border image stays where it came first."""
    num = len(distance)
    near = [[j for j in range(num) if distance[i, j] <= eps] for i in range(num)]
    labels, cluster = [-1] * num, 0
    for start in range(num):
        if labels[start] != -1 or len(near[start]) < min_samples:
            continue
        labels[start], queue = cluster, [start]
        while queue:
            i = queue.pop(0)
            if len(near[i]) < min_samples:
                continue  # a border does not grow the cluster
            for j in near[i]:
                if labels[j] == -1:
                    labels[j] = cluster
                    queue.append(j)
        cluster += 1
    return labels


# -- comparisons -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("noise", "k1", "k2"), [(0.6, 20, 6), (0.9, 20, 6), (0.7, 8, 2), (0.5, 3, 1)])
def test_jaccard_and_labels_equal_those_of_the_dense_algorithm(noise, k1, k2):
    features = people(50, 6, noise)
    assert len(features) == 300
    expected = dense_jaccard(features, k1, k2)
    encodings = encode(features, nearest, k1, k2, scale="none", rules="clustering")
    blocks = [block for _, block in jaccard_blocks(encodings, np.arange(300), np.arange(300))]
    np.testing.assert_allclose(np.concatenate(blocks), expected, atol=2e-6)
    for eps, min_samples in ((0.4, 4), (0.5, 4), (0.6, 2)):
        found = find_clusters(features, k1=k1, k2=k2, eps=eps, min_samples=min_samples)
        assert found.dtype == np.int64
        assert found.tolist() == textbook_dbscan(expected, eps, min_samples)
    assert found.max() > 10


def test_rules_of_clustering_differ_from_those_of_reranking():
    features = people(50, 6, 0.9)

    def encodings(k1, rules):
        return encode(features, nearest, k1, 6, scale="none", rules=rules)

    clustering = encodings(20, "clustering")
    assert abs(clustering - encodings(20, "paper")).max() > 1e-3
    assert abs(clustering - encodings(19, "paper")).max() > 1e-3  # as many neighbours: what is left is two thirds


@pytest.mark.filterwarnings("error")
def test_dbscan_equals_the_textbook_on_random_graphs():
    borders = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        num, eps, min_samples = int(rng.integers(1, 50)), 0.5, int(rng.integers(1, 6))
        # three images or so near each one; few values, eps among them: distances of exactly eps are near
        share = min(1.5 / num, 1) / 2
        distance = rng.choice([0.1, 0.5, 0.7], p=[share, share, 1 - 2 * share], size=(num, num)).astype(np.float32)
        distance = np.minimum(distance, distance.T)
        np.fill_diagonal(distance, 0)
        rows, columns = np.nonzero(distance <= eps)
        graph = sparse.csr_array(
            (distance[rows, columns], columns.astype(np.int32), np.r_[0, np.bincount(rows).cumsum()].astype(np.int32)),
            shape=(num, num),
        )
        labels = textbook_dbscan(distance, eps, min_samples)
        assert cluster_graph(graph, eps, min_samples).tolist() == labels, seed
        near = distance <= eps
        cores = near.sum(1) >= min_samples
        borders += sum(len({labels[j] for j in np.flatnonzero(near[i] & cores)}) > 1 for i in np.flatnonzero(~cores))
    assert borders > 50  # images between two clusters, where the order decides


def test_one_image_and_equal_images():
    assert find_clusters(torch.ones(1, 3)).tolist() == [-1]
    assert find_clusters(torch.ones(1, 3), min_samples=1).tolist() == [0]
    assert find_clusters(torch.ones(9, 3), k1=20).tolist() == [0] * 9
    assert find_clusters(torch.ones(60, 3), k1=5, k2=2).max() >= 0  # more copies than neighbours


@pytest.mark.parametrize(("options", "name"), [({"k1": 0}, "k1"), ({"k2": 21}, "k2"), ({"eps": 1.0}, "eps")])
def test_wrong_options_are_named(options, name):
    with pytest.raises(ConfigError, match=f"^{name}: "):
        find_clusters(people(3, 2, 0.1), **options)


# -- few images per person: docs/unsupervised.md -----------------------------------------------------------------------


def clusters_of_viper(replicate, **options):
    """As VIPeR's training half: 316 people, one image in each of two cameras."""
    return find_clusters(people(316, 2, noise=1.0, dim=256).repeat(replicate, 1), **options)


def pairs_joined(labels):
    pairs = labels.reshape(-1, 316, 2)
    return ((pairs[..., 0] == pairs[..., 1]) & (pairs[..., 0] >= 0)).mean()


def test_two_images_per_person_make_no_clusters_of_four():
    labels = clusters_of_viper(1)
    assert (labels >= 0).mean() < 0.01
    assert pairs_joined(labels) < 0.01


@pytest.mark.parametrize(
    ("replicate", "options", "count", "joined"),
    [
        (3, {}, 316, 1.0),  # the right clusters
        (4, {}, 316, 1.0),
        (1, {"k1": 8, "k2": 2, "min_samples": 2}, 316, 1.0),  # the same without copies
        (6, {}, 632, 0.0),  # every image is a cluster of its own copies
    ],
)
def test_some_copies_or_smaller_neighbourhoods_find_pairs(replicate, options, count, joined):
    labels = clusters_of_viper(replicate, **options)
    assert set(labels.tolist()) == set(range(count))
    assert pairs_joined(labels) == joined
