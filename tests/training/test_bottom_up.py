"""Bottom-up clustering against loops over all pairs of clusters."""

import itertools

import pytest
import torch

from fedsim.training.labels.bottom_up import merge_clusters


def people(num, per, noise, seed):
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(num, 16, generator=generator).repeat(per, 1)  # images of a person lie apart
    return centres + noise * torch.randn(num * per, 16, generator=generator)


def slow_merge(features, labels, num_merges, size_penalty):
    """All pairs of clusters by their distance; the nearest that are not yet one merge."""
    x = torch.nn.functional.normalize(features.double())
    clusters = [[i for i, label in enumerate(labels) if label == c] for c in range(max(labels) + 1)]
    pairs = []
    for a, b in itertools.combinations(range(len(clusters)), 2):
        nearest = min(float((x[i] - x[j]).square().sum()) for i in clusters[a] for j in clusters[b])
        pairs.append((nearest + size_penalty * (len(clusters[a]) + len(clusters[b])), a, b))
    groups = [{c} for c in range(len(clusters))]
    for _, a, b in sorted(pairs):
        if num_merges == 0:
            break
        one, two = (next(g for g in groups if c in g) for c in (a, b))
        if one is not two:
            groups.remove(two)
            one |= two
            num_merges -= 1
    groups.sort(key=min)
    return [next(g for g, group in enumerate(groups) if label in group) for label in labels]


@pytest.mark.parametrize("penalty", [0.0, 0.003, 0.3])
@pytest.mark.parametrize("seed", [0, 1])
def test_merges_equal_loops(penalty, seed):
    features, labels = people(15, 4, 0.5, seed), torch.arange(60)
    for num_merges in (3, 10, 12, 9):  # step after step, each on what the last one left
        expected = slow_merge(features, labels.tolist(), num_merges, penalty)
        labels = merge_clusters(features, labels, num_merges, penalty)
        assert labels.tolist() == expected
    assert int(labels.max()) + 1 == 60 - 34


def test_blocks_hold_whole_clusters(monkeypatch):
    features = people(15, 4, 0.5, 2)
    labels = merge_clusters(features, torch.arange(60), 25)
    whole = merge_clusters(features, labels, 10)
    for rows in (1, 7):
        monkeypatch.setattr("fedsim.training.labels.bottom_up._ROWS", rows)
        assert torch.equal(merge_clusters(features, labels, 10), whole)


def test_a_few_candidates_are_enough_while_few_clusters_become_one():
    features, labels = people(40, 5, 0.5, 3), torch.arange(200)
    exact = merge_clusters(features, labels, 30, candidates=199)
    largest = int(exact.bincount().max())
    assert largest < 20
    assert torch.equal(merge_clusters(features, labels, 30, candidates=largest), exact)


def test_people_come_together_and_large_clusters_wait():
    features = people(10, 6, 0.1, 4)
    labels = merge_clusters(features, torch.arange(60), 50)
    assert labels.tolist() == list(range(10)) * 6
    # two groups of three are nearer than two lone images, but larger
    points = torch.tensor([[1.0, 0.0]] * 3 + [[0.999, 0.04]] * 3 + [[0.0, 1.0], [0.1, 0.995]])
    begin = torch.tensor([0, 0, 0, 1, 1, 1, 2, 3])
    assert merge_clusters(points, begin, 1, size_penalty=0.0).tolist() == [0] * 6 + [1, 2]
    assert merge_clusters(points, begin, 1, size_penalty=0.1).tolist() == [0, 0, 0, 1, 1, 1, 2, 2]


def test_no_more_merges_than_there_are_clusters():
    assert merge_clusters(torch.randn(4, 3), torch.arange(4), 9).tolist() == [0] * 4
    assert merge_clusters(torch.randn(4, 3), torch.arange(4), 0).tolist() == [0, 1, 2, 3]
    assert merge_clusters(torch.randn(1, 3), torch.arange(1), 1).tolist() == [0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_that_must_be_deterministic_merges_the_same():
    features, labels = people(15, 4, 0.5, 0), torch.arange(60)
    torch.use_deterministic_algorithms(True)
    try:
        for num_merges in (10, 20):
            expected = merge_clusters(features, labels, num_merges)
            assert torch.equal(merge_clusters(features.cuda(), labels, num_merges), expected)
            labels = expected
    finally:
        torch.use_deterministic_algorithms(False)
