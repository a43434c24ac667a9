"""CMC, mAP and mINP against worked examples and against the definitions written as plain loops."""

import math

import numpy as np
import pytest
import torch

from fedsim.evaluation.ranking import JUNK, num_valid_queries, positive_ranks, rank_features, score_ranks

# -- worked examples ---------------------------------------------------------------------------------------------------
# name: distances (one row per query), query identities, query cameras, gallery identities, gallery cameras,
# ranks of the matches, Rank-1, Rank-5, Rank-10, mAP (rectangular), mAP (trapezoidal), mINP.
# Agreed upon by torchreid's and fast-reid's evaluators, layumi's compute_mAP and scikit-learn, where their rules agree.

EXAMPLES = {
    "basic": (
        [[0.1, 0.2, 0.3, 0.4, 0.5, 0.6]], [1], [0], [2, 1, 3, 1, 4, 1], [1, 1, 1, 2, 2, 3],
        [[2, 4, 6]], 0, 1, 1, 0.5, 0.372222, 0.5,
    ),
    "junk in the same camera": (
        [[0.05, 0.1, 0.2, 0.3, 0.4, 0.5]], [1], [0], [1, 2, 1, 1, 3, 1], [0, 1, 0, 1, 1, 2],
        [[2, 4]], 0, 1, 1, 0.5, 0.333333, 0.5,
    ),
    "distractor 0 and junk -1": (
        [[0.1, 0.2, 0.3, 0.4, 0.5]], [1], [0], [-1, 0, 1, -1, 1], [1, 1, 1, 2, 2],
        [[2, 3]], 0, 1, 1, 0.583333, 0.416667, 0.666667,
    ),
    "one invalid query": (
        [[0.1, 0.2, 0.3], [0.3, 0.1, 0.2], [0.1, 0.2, 0.3]], [1, 2, 3], [0, 0, 0], [1, 2, 1], [1, 1, 1],
        [[1, 3], [1], []], 1, 1, 1, 0.916667, 0.895833, 0.833333,
    ),
    "tie, match after the other": (
        [[0.2, 0.2, 0.5]], [1], [0], [2, 1, 1], [1, 1, 1],
        [[2, 3]], 0, 1, 1, 0.583333, 0.416667, 0.666667,
    ),
    "tie, match before the other": (
        [[0.2, 0.2, 0.5]], [1], [0], [1, 2, 1], [1, 1, 1],
        [[1, 3]], 1, 1, 1, 0.833333, 0.791667, 0.666667,
    ),
    "all equal": (
        [[0.3, 0.3, 0.3, 0.3]], [1], [0], [2, 1, 3, 1], [1, 1, 1, 1],
        [[2, 4]], 0, 1, 1, 0.5, 0.333333, 0.5,
    ),
    "fewer than ten gallery images, junk for one query": (
        [[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]], [1, 2], [0, 0], [1, 1, 2, 2], [0, 1, 1, 1],
        [[1], [1, 2]], 1, 1, 1, 1.0, 1.0, 1.0,
    ),
    "perfect": (
        [[0.1, 0.2, 0.9], [0.9, 0.8, 0.1]], [1, 2], [0, 1], [1, 1, 2], [1, 2, 0],
        [[1, 2], [1]], 1, 1, 1, 1.0, 1.0, 1.0,
    ),
    "two queries": (
        [[0.9, 0.1, 0.8, 0.2, 0.7, 0.3], [0.6, 0.5, 0.4, 0.3, 0.2, 0.1]], [7, 8], [0, 1],
        [7, 8, 7, 9, 8, 7], [1, 0, 2, 1, 2, 0],
        [[4, 5], [2, 5]], 0, 1, 1, 0.3875, 0.25625, 0.4,
    ),
}  # fmt: skip


def similarity_of(distances):
    return -np.array(distances, dtype=np.float32)


@pytest.mark.parametrize("name", EXAMPLES)
def test_worked_example(name):
    distances, *labels, ranks, rank1, rank5, rank10, rectangular, trapezoid, penalty = EXAMPLES[name]
    found = positive_ranks(similarity_of(distances), *(np.array(column) for column in labels))
    assert [row.tolist() for row in found] == ranks
    scores = score_ranks(found)
    assert (scores.rank1, scores.rank5, scores.rank10) == (rank1, rank5, rank10)
    assert scores.mAP == pytest.approx(rectangular, abs=1e-6)
    assert scores.mAP_trapezoid == pytest.approx(trapezoid, abs=1e-6)
    assert scores.mINP == pytest.approx(penalty, abs=1e-6)
    assert scores.num_valid == sum(len(row) > 0 for row in ranks)
    assert scores.num_queries == len(ranks)


# -- the definitions as plain loops ------------------------------------------------------------------------------------


def loop_ranks(distances, query_pids, query_camids, gallery_pids, gallery_camids, camera_aware=True):
    """Per query: the ranks of its matches in the list sorted by (distance, index) without junk."""
    result = []
    for q in range(len(query_pids)):
        in_order = sorted(range(len(gallery_pids)), key=lambda g: (distances[q][g], g))
        rank, ranks = 0, []
        for g in in_order:
            if gallery_pids[g] == -1:
                continue
            same_person = gallery_pids[g] == query_pids[q]
            if camera_aware and same_person and gallery_camids[g] == query_camids[q]:
                continue
            rank += 1
            if same_person:
                ranks.append(rank)
        result.append(ranks)
    return result


def loop_scores(ranks):
    """Rank-1, 5, 10, mAP, trapezoidal mAP, mINP: means over the queries that have a match."""
    valid = [row for row in ranks if row]
    sums = [0.0] * 6
    for row in valid:
        for column, k in enumerate((1, 5, 10)):
            sums[column] += row[0] <= k
        found, rectangular, trapezoid, last_precision = 0, 0.0, 0.0, 1.0
        for position in range(1, row[-1] + 1):  # walk down the list
            if position in row:
                found += 1
                rectangular += found / position
                trapezoid += (last_precision + found / position) / 2
            last_precision = found / position
        sums[3] += rectangular / len(row)
        sums[4] += trapezoid / len(row)
        sums[5] += len(row) / row[-1]
    return [total / len(valid) for total in sums]


def columns(scores):
    return [scores.rank1, scores.rank5, scores.rank10, scores.mAP, scores.mAP_trapezoid, scores.mINP]


def random_case(rng):
    """Few distinct distances, few people and cameras: ties, junk and queries without a match abound."""
    queries, gallery = rng.integers(1, 7), rng.integers(1, 31)
    distances = rng.integers(0, rng.integers(1, 6), (queries, gallery)) / 4
    people, cameras = rng.integers(1, 6), rng.integers(1, 4)
    return (
        distances.astype(np.float32),
        rng.integers(1, people + 1, queries),
        rng.integers(0, cameras, queries),
        rng.integers(-1, people + 1, gallery),
        rng.integers(0, cameras, gallery),
    )


def test_300_random_cases_with_ties_and_junk_equal_the_loops():
    rng = np.random.default_rng(0)
    seen = {"invalid": 0, "junk": 0, "ties": 0, "nothing valid": 0}
    for case in range(300):
        distances, *labels = random_case(rng)
        camera_aware = case % 3 > 0
        expected = loop_ranks(distances.tolist(), *(column.tolist() for column in labels), camera_aware)
        found = positive_ranks(-distances, *labels, camera_aware)
        assert [row.tolist() for row in found] == expected, case
        scores = score_ranks(found)
        assert scores.num_valid == sum(len(row) > 0 for row in expected)
        assert scores.num_queries == len(expected)
        if scores.num_valid:
            np.testing.assert_allclose(columns(scores), loop_scores(expected), rtol=0, atol=1e-12)
        else:
            assert all(math.isnan(score) for score in columns(scores))
        seen["invalid"] += 0 < scores.num_valid < scores.num_queries
        seen["nothing valid"] += scores.num_valid == 0
        seen["junk"] += bool((labels[2] == JUNK).any())
        seen["ties"] += len(np.unique(distances)) < distances.shape[1]
    assert min(seen.values()) >= 10, seen  # the cases are what they are meant to be


@pytest.mark.parametrize("camera_aware", [True, False])
def test_features_are_ranked_by_cosine_like_the_loops(camera_aware):
    rng = np.random.default_rng(1)
    # more queries than one matrix product takes; lengths differ, so that dot products would rank differently
    query, gallery = (rng.normal(size=(n, 16)) * rng.uniform(0.1, 10, (n, 1)) for n in (300, 40))
    labels = rng.integers(1, 8, 300), rng.integers(0, 3, 300), rng.integers(-1, 8, 40), rng.integers(0, 3, 40)
    distances = [
        [1 - float(q @ g) / math.sqrt(float(q @ q) * float(g @ g)) for g in gallery] for q in query
    ]  # in float64
    expected = loop_ranks(distances, *(column.tolist() for column in labels), camera_aware)
    scores = rank_features(
        torch.tensor(query, dtype=torch.float32), torch.tensor(gallery, dtype=torch.float32), *labels, camera_aware
    )
    assert scores.num_queries == 300
    assert scores.num_valid == sum(len(row) > 0 for row in expected)
    np.testing.assert_allclose(columns(scores), loop_scores(expected), rtol=0, atol=1e-9)


def test_features_of_low_precision_and_of_any_length():
    rng = np.random.default_rng(2)
    query, gallery = (torch.tensor(rng.normal(size=(n, 8)), dtype=torch.bfloat16) for n in (10, 30))
    labels = rng.integers(1, 4, 10), np.zeros(10, np.int64), rng.integers(1, 4, 30), np.ones(30, np.int64)
    scores = rank_features(query, gallery, *labels)
    assert rank_features(query.float(), gallery.float(), *labels) == scores
    assert rank_features(query * 4, gallery * 0.5, *labels) == scores  # powers of two: exact


def test_a_feature_of_zeros_is_not_nan():
    labels = np.array([1]), np.array([0]), np.array([2, 1]), np.array([1, 1])
    scores = rank_features(torch.zeros(1, 4), torch.ones(2, 4), *labels)
    assert scores.mAP == 0.5  # all distances are equal, so the order is that of the gallery


# -- rules -------------------------------------------------------------------------------------------------------------


def test_nan_only_without_any_valid_query():
    nothing = score_ranks([np.array([], dtype=np.int64)] * 3)
    assert all(math.isnan(score) for score in columns(nothing))
    assert (nothing.num_valid, nothing.num_queries) == (0, 3)
    one = score_ranks([np.array([], dtype=np.int64), np.array([2]), np.array([], dtype=np.int64)])
    assert columns(one) == [0.0, 1.0, 1.0, 0.5, 0.25, 0.5]
    assert (one.num_valid, one.num_queries) == (1, 3)


def test_without_the_camera_rule_the_same_camera_counts():
    similarity = similarity_of([[0.1, 0.2, 0.3, 0.4]])
    labels = np.array([1]), np.array([0]), np.array([1, 2, 1, -1]), np.array([0, 0, 1, 0])
    assert positive_ranks(similarity, *labels)[0].tolist() == [2]
    assert positive_ranks(similarity, *labels, camera_aware=False)[0].tolist() == [1, 3]


def test_the_camera_rule_removes_only_the_querys_own_identity():
    similarity = similarity_of([[0.1, 0.2, 0.3]])
    labels = np.array([1]), np.array([0]), np.array([2, 3, 1]), np.array([0, 0, 1])
    assert positive_ranks(similarity, *labels)[0].tolist() == [3]


@pytest.mark.parametrize("camera_aware", [True, False])
def test_identity_minus_1_never_counts(camera_aware):
    similarity = similarity_of([[0.1, 0.2, 0.3], [0.1, 0.2, 0.3]])
    labels = np.array([1, JUNK]), np.array([0, 0]), np.array([JUNK, 1, JUNK]), np.array([1, 1, 2])
    assert [r.tolist() for r in positive_ranks(similarity, *labels, camera_aware)] == [[1], []]


def test_cmc_counts_the_first_match_only():
    ranks = [np.array([1, 50]), np.array([5, 6]), np.array([6]), np.array([10, 11, 12]), np.array([11])]
    scores = score_ranks(ranks)
    assert (scores.rank1, scores.rank5, scores.rank10) == (1 / 5, 2 / 5, 4 / 5)


def test_map_of_one_match_per_query_lies_between_the_bounds_of_cmc():
    # With one match, average precision is 1 / rank: 1 at rank 1; at most 1/2 in 2-5, 1/6 in 6-10, 1/11 beyond.
    rng = np.random.default_rng(3)
    for signal in (0.0, 0.3, 0.6, 1.0, 3.0):
        people = 40
        centres = rng.normal(size=(people, 16))
        query, gallery = (signal * centres + rng.normal(size=(people, 16)) for _ in range(2))
        pids = np.arange(1, people + 1)
        scores = rank_features(
            torch.tensor(query), torch.tensor(gallery), pids, np.zeros(people, int), pids, np.ones(people, int)
        )
        assert scores.num_valid == people
        r1, r5, r10, mean_ap = (100 * s for s in (scores.rank1, scores.rank5, scores.rank10, scores.mAP))
        assert r1 <= r5 <= r10
        assert r1 - 1e-9 <= mean_ap <= r1 + (r5 - r1) / 2 + (r10 - r5) / 6 + (100 - r10) / 11 + 1e-9
        assert scores.mINP == pytest.approx(scores.mAP)  # the same with one match


def test_better_features_score_better():
    rng = np.random.default_rng(4)
    pids = np.arange(1, 41)
    centres = rng.normal(size=(40, 16))
    found = []
    for signal in (0.0, 1.0, 3.0):
        query, gallery = (torch.tensor(signal * centres + rng.normal(size=(40, 16))) for _ in range(2))
        found.append(rank_features(query, gallery, pids, np.zeros(40, int), pids, np.ones(40, int)).mAP)
    assert found[0] < 0.3 < found[1] < found[2]
    assert found[2] > 0.9


def test_a_query_is_never_its_own_match():
    features = torch.eye(4)[[0, 0, 1, 1]]
    pids, camids = np.array([1, 1, 2, 2]), np.zeros(4, dtype=np.int64)
    own = np.array([0, 2])
    query = features[own] + 0.01 * torch.arange(4)  # its own picture is by far the closest
    ranks = positive_ranks(
        (query @ features.T).numpy(), pids[own], camids[own], pids, camids, camera_aware=False, own=own
    )
    assert [r.tolist() for r in ranks] == [[1], [1]]
    with_itself = positive_ranks((query @ features.T).numpy(), pids[own], camids[own], pids, camids, camera_aware=False)
    assert [r.tolist() for r in with_itself] == [[1, 2], [1, 2]]
    assert num_valid_queries(pids[own], camids[own], pids, camids, camera_aware=False, own=own) == 2
    assert num_valid_queries(pids[own], camids[own], pids, camids, camera_aware=True, own=own) == 0
