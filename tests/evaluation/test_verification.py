"""Rates over pairs are those of plain loops and of scikit-learn, also with ties, few pairs and in small memory."""

import math
import tracemalloc

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_curve

from fedsim.evaluation import verification
from fedsim.evaluation.ranking import RetrievalLabels
from fedsim.evaluation.verification import count_pairs, pair_blocks
from fedsim.functional.similarity import query_blocks

RATES = (0.0, 1e-4, 1e-3, 1e-2, 0.1, 0.5, 1.0)


def drawn(seed, num_queries=40, num_gallery=90, people=6, **rules):
    """Features of a few whole numbers, so that similarities are exact and many are equal."""
    rng = np.random.default_rng(seed)
    query, gallery = (torch.from_numpy(rng.integers(-1, 2, (n, 3)).astype(np.float32))
                      for n in (num_queries, num_gallery))  # fmt: skip
    pids = rng.integers(1, people + 1, num_queries), rng.integers(-1, people + 1, num_gallery)
    camids = rng.integers(0, 3, num_queries), rng.integers(0, 3, num_gallery)
    return query, gallery, RetrievalLabels(pids[0], camids[0], pids[1], camids[1], **rules)


def loop_pairs(similarity, labels):
    """Similarities of positive and of negative pairs, by the rules of docs/evaluation.md."""
    positive, negative = [], []
    for q, row in enumerate(similarity.tolist()):
        for g, value in enumerate(row):
            is_same = labels.query_pids[q] == labels.gallery_pids[g]
            is_near = labels.camera_aware and labels.query_camids[q] == labels.gallery_camids[g]
            is_itself = labels.own is not None and labels.own[q] == g
            if labels.gallery_pids[g] in labels.junk_pids or (is_same and is_near) or is_itself:
                continue
            (positive if is_same else negative).append(value)
    return positive, negative


def loop_rate(positive, negative, most):
    """The largest true positive rate of any threshold whose false positive rate is allowed."""
    best = 0.0
    for threshold in {*positive, *negative}:
        if sum(value >= threshold for value in negative) / len(negative) <= most:
            best = max(best, sum(value >= threshold for value in positive) / len(positive))
    return best


def plain_similarity(query, gallery, distance):
    query, gallery = query.double().numpy(), gallery.double().numpy()
    if distance == "euclidean":
        return -((query[:, None] - gallery[None]) ** 2).sum(2)
    return np.array([[q @ g / max(np.linalg.norm(q) * np.linalg.norm(g), 1e-12) for g in gallery] for q in query])


def compare_with_sklearn(counts, positive, negative):
    truth = np.repeat([1, 0], [len(positive), len(negative)])
    false_rates, true_rates, thresholds = roc_curve(truth, np.float32([*positive, *negative]), drop_intermediate=False)
    at = np.searchsorted(-thresholds, -counts.thresholds.astype(np.float64))
    np.testing.assert_array_equal(thresholds[at], counts.thresholds)
    np.testing.assert_array_equal(true_rates[at], counts.true_positives / counts.num_positives)
    np.testing.assert_array_equal(false_rates[at], counts.false_positives / counts.num_negatives)
    for most in RATES:
        assert counts.true_positive_rate(most) == true_rates[false_rates <= most].max()


@pytest.mark.parametrize(
    "rules",
    [{}, {"camera_aware": False}, {"junk_pids": (-1, 0, 2)}, {"junk_pids": ()}, {"own": np.arange(40) * 2 - 1}],
    ids=str,
)
@pytest.mark.parametrize("distance", ["cosine", "euclidean"])
def test_counts_are_those_of_loops_and_of_sklearn(distance, rules, monkeypatch):
    monkeypatch.setattr(verification, "_PAIRS", 1000)  # several parts, the last one shorter
    for seed in range(3):
        query, gallery, labels = drawn(seed, **rules)
        if distance == "cosine":  # axes only: cosines are exact, -1, 0 or 1
            query, gallery = ((torch.eye(3)[part[:, 0].long()] * (part[:, 1:2] + 0.5)) for part in (query, gallery))
        similarity = plain_similarity(query, gallery, distance) / (2 if distance == "euclidean" else 1)
        counts = count_pairs(lambda: pair_blocks(query, gallery, distance), labels)  # noqa: B023 - called at once
        positive, negative = loop_pairs(similarity, labels)
        assert (counts.num_positives, counts.num_negatives) == (len(positive), len(negative))
        assert len(counts.thresholds) < len(positive) / 3  # ties
        for most in RATES:
            assert counts.true_positive_rate(most) == loop_rate(positive, negative, most)
        compare_with_sklearn(counts, positive, negative)


@pytest.mark.parametrize("distance", ["cosine", "euclidean"])
@pytest.mark.parametrize("people", [3, 200])  # 200: few positive pairs
def test_several_blocks_of_real_features_equal_sklearn(distance, people):
    generator = torch.Generator().manual_seed(people)
    _, _, labels = drawn(0, 600, 300, people)
    query, gallery = (torch.randn(n, 8, generator=generator) for n in (600, 300))
    assert len(query_blocks(600, 300)) == 3
    similarity = torch.cat([block.clone() for _, block in pair_blocks(query, gallery, distance)])
    truth = -torch.cdist(query.double(), gallery.double()).square() / 2
    if distance == "euclidean":
        torch.testing.assert_close(similarity.double(), truth, rtol=1e-5, atol=1e-5)
    counts = count_pairs(lambda: pair_blocks(query, gallery, distance), labels)
    compare_with_sklearn(counts, *loop_pairs(similarity, labels))


def test_euclidean_pairs_of_different_queries_are_compared():
    query, gallery = torch.tensor([[1.0], [100.0]]), torch.tensor([[1.0], [90.0]])
    zeros = np.zeros(2, dtype=np.int64)
    labels = RetrievalLabels(np.array([1, 2]), zeros, np.array([1, 2]), zeros + 1)
    counts = count_pairs(lambda: pair_blocks(query, gallery, "euclidean"), labels)
    assert counts.thresholds.tolist() == [0, -50]  # not 0.5 and 4950, which leave out the queries' own lengths
    assert counts.true_positive_rate(0) == 1


def test_a_tie_is_accepted_as_a_whole():
    labels = RetrievalLabels(np.array([1]), np.array([0]), np.array([1, 1, 2, 3]), np.array([1, 1, 1, 1]))
    counts = count_pairs(lambda: [(slice(0, 1), torch.tensor([[0.9, 0.5, 0.5, 0.1]]))], labels)
    assert [counts.true_positive_rate(most) for most in (0, 0.49, 0.5, 1)] == [0.5, 0.5, 1, 1]


def test_zeros_of_both_signs_are_equal():
    labels = RetrievalLabels(np.array([1]), np.array([0]), np.array([1, 1, 2]), np.array([1, 1, 1]))
    for row in ([0.0, -0.0, -0.0], [-0.0, -0.0, 0.0]):
        counts = count_pairs(lambda row=row: [(slice(0, 1), torch.tensor([row]))], labels)
        assert (counts.true_positives.tolist(), counts.false_positives.tolist()) == ([2], [1])


@pytest.mark.parametrize(
    ("gallery_pids", "num"), [([1, 1], (2, 0)), ([2, 3], (0, 2)), ([-1, -1], (0, 0)), ([], (0, 0))]
)
def test_without_positive_or_negative_pairs_the_rate_is_nan(gallery_pids, num):
    pids = np.array(gallery_pids, dtype=np.int64)
    labels = RetrievalLabels(np.array([1]), np.array([0]), pids, np.ones(len(pids), dtype=np.int64))
    counts = count_pairs(lambda: pair_blocks(torch.ones(1, 2), torch.ones(len(pids), 2)), labels)
    assert (counts.num_positives, counts.num_negatives) == num
    assert math.isnan(counts.true_positive_rate(0.5))


def test_counting_does_not_keep_the_pairs():
    num_queries, num_gallery = 2000, 20000
    rng = np.random.default_rng(0)
    labels = RetrievalLabels(rng.integers(0, 1000, num_queries), np.zeros(num_queries, dtype=np.int64),
                             rng.integers(0, 1000, num_gallery), np.ones(num_gallery, dtype=np.int64))  # fmt: skip
    block = np.zeros((256, num_gallery), dtype=np.float32)

    def blocks():
        for rows in query_blocks(num_queries, num_gallery):
            yield rows, torch.from_numpy(block[: rows.stop - rows.start]).normal_()

    tracemalloc.start()
    try:
        counts = count_pairs(blocks, labels)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert counts.num_positives + counts.num_negatives == num_queries * num_gallery
    assert peak < num_queries * num_gallery  # bytes: a quarter of the similarities, and 20 MB of them are the test's
