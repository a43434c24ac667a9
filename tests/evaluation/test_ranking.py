"""CMC, mAP and mINP against worked examples and against the definitions written as plain loops; who matches whom."""

import math

import numpy as np
import pytest

from fedsim.evaluation.ranking import (
    JUNK,
    MAX_RANK,
    QueryScores,
    RetrievalLabels,
    average_scores,
    positive_ranks,
    score_ranks,
)

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


def labels_of(query_pids, query_camids, gallery_pids, gallery_camids, **rules):
    columns = (query_pids, query_camids, gallery_pids, gallery_camids)
    return RetrievalLabels(*(np.array(column, dtype=np.int64) for column in columns), **rules)


def as_lists(ranks):
    return [row.tolist() for row in ranks]


def columns(ranking):
    return [ranking.metrics[name] for name in ("rank1", "rank5", "rank10", "mAP", "mAP_trapezoid", "mINP")]


@pytest.mark.parametrize("name", EXAMPLES)
def test_worked_example(name):
    distances, *labels, ranks, rank1, rank5, rank10, rectangular, trapezoid, penalty = EXAMPLES[name]
    labels = labels_of(*labels)
    found = positive_ranks(similarity_of(distances), labels)
    assert as_lists(found) == ranks
    scores = average_scores(score_ranks(found))
    assert (scores.rank1, scores.rank5, scores.rank10) == (rank1, rank5, rank10)
    assert scores.mAP == pytest.approx(rectangular, abs=1e-6)
    assert scores.mAP_trapezoid == pytest.approx(trapezoid, abs=1e-6)
    assert scores.mINP == pytest.approx(penalty, abs=1e-6)
    assert scores.num_valid == labels.num_valid == sum(len(row) > 0 for row in ranks)
    assert scores.num_queries == len(ranks)


# -- the definitions as plain loops ------------------------------------------------------------------------------------


def counts(labels, q, g):
    """Whether a gallery image is in a query's ranked list at all."""
    if labels.gallery_pids[g] in labels.junk_pids:
        return False
    if labels.own is not None and labels.own[q] == g:
        return False
    same_person = labels.gallery_pids[g] == labels.query_pids[q]
    return not (labels.camera_aware and same_person and labels.gallery_camids[g] == labels.query_camids[q])


def loop_ranks(similarity, labels):
    """Per query: the ranks of its matches in the list sorted by (similarity, index) without junk."""
    result = []
    for q, row in enumerate(similarity.tolist()):
        rank, ranks = 0, []
        for g in sorted(range(len(row)), key=lambda g, row=row: (-row[g], g)):
            if counts(labels, q, g):
                rank += 1
                if labels.gallery_pids[g] == labels.query_pids[q]:
                    ranks.append(rank)
        result.append(ranks)
    return result


def loop_precisions(ranks):
    """Average precision of one list, rectangular and trapezoidal, on a walk down the list."""
    found, rectangular, trapezoid, last_precision = 0, 0.0, 0.0, 1.0
    matches = set(ranks)
    for position in range(1, ranks[-1] + 1):
        if position in matches:
            found += 1
            rectangular += found / position
            trapezoid += (last_precision + found / position) / 2
        last_precision = found / position
    return rectangular / len(ranks), trapezoid / len(ranks)


def loop_scores(ranks):
    """Rank-1, 5, 10, mAP, trapezoidal mAP, mINP: means over the queries that have a match."""
    valid = [row for row in ranks if row]
    sums = [0.0] * 6
    for row in valid:
        for column, k in enumerate((1, 5, 10)):
            sums[column] += row[0] <= k
        rectangular, trapezoid = loop_precisions(row)
        sums[3] += rectangular
        sums[4] += trapezoid
        sums[5] += len(row) / row[-1]
    return [total / len(valid) for total in sums]


def loop_cmc(ranks):
    valid = [row for row in ranks if row]
    return [sum(row[0] <= k for row in valid) / len(valid) for k in range(1, MAX_RANK + 1)]


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
        labels = labels_of(*labels, camera_aware=case % 3 > 0)
        expected = loop_ranks(-distances, labels)
        found = positive_ranks(-distances, labels)
        assert as_lists(found) == expected, case
        scores = average_scores(score_ranks(found))
        assert scores.num_valid == sum(len(row) > 0 for row in expected)
        assert scores.num_queries == len(expected)
        if scores.num_valid:
            np.testing.assert_allclose(columns(scores), loop_scores(expected), rtol=0, atol=1e-12)
            np.testing.assert_allclose(scores.cmc, loop_cmc(expected), rtol=0, atol=1e-12)
        else:
            assert all(math.isnan(score) for score in columns(scores))
        seen["invalid"] += 0 < scores.num_valid < scores.num_queries
        seen["nothing valid"] += scores.num_valid == 0
        seen["junk"] += bool((labels.gallery_pids == JUNK).any())
        seen["ties"] += len(np.unique(distances)) < distances.shape[1]
    assert min(seen.values()) >= 10, seen  # the cases are what they are meant to be


# -- scores ------------------------------------------------------------------------------------------------------------

NONE = np.array([], dtype=np.int64)


def random_ranks(rng, lists, longest, most=6):
    """Lists of matches, an empty one now and then."""
    sizes = rng.integers(0, most, lists)
    return [np.sort(rng.choice(np.arange(1, longest + 1), size, replace=False)) for size in sizes]


def test_nan_only_without_any_valid_query():
    nothing = average_scores(score_ranks([NONE] * 3))
    assert all(math.isnan(score) for score in [*columns(nothing), *nothing.cmc])
    assert len(nothing.cmc) == MAX_RANK
    assert (nothing.num_valid, nothing.num_queries) == (0, 3)
    one = average_scores(score_ranks([NONE, np.array([2]), NONE]))
    assert columns(one) == [0.0, 1.0, 1.0, 0.5, 0.25, 0.5]
    assert (one.num_valid, one.num_queries) == (1, 3)


def test_scores_of_no_queries_at_all():
    scores = score_ranks([])
    assert scores.to_table().shape == (0, 4)
    assert scores.hits.shape == (0, MAX_RANK)
    assert average_scores(scores).num_queries == 0


def test_each_query_has_its_own_scores_and_an_invalid_one_has_zeros():
    ranks = random_ranks(np.random.default_rng(1), lists=200, longest=80)
    scores = score_ranks(ranks)
    for q, row in enumerate(as_lists(ranks)):
        rectangular, trapezoid = loop_precisions(row) if row else (0, 0)
        assert scores.first[q] == (row[0] if row else 0)
        assert scores.precision[q] == pytest.approx(rectangular, abs=1e-12)
        assert scores.precision_trapezoid[q] == pytest.approx(trapezoid, abs=1e-12)
        assert scores.inverse_penalty[q] == (len(row) / row[-1] if row else 0)
        assert scores.hits[q].tolist() == [float(bool(row) and row[0] <= k) for k in range(1, MAX_RANK + 1)]


def test_invalid_queries_count_as_zeros_if_asked_for():
    distances, *labels, _, _, _, _, _, _, _ = EXAMPLES["one invalid query"]
    scores = score_ranks(positive_ranks(similarity_of(distances), labels_of(*labels)))
    usual, with_zeros = average_scores(scores), average_scores(scores, invalid_as_zero=True)
    assert with_zeros.rank1 == pytest.approx(0.666667, abs=1e-6)  # as the code of paper 003
    assert with_zeros.mAP_trapezoid == pytest.approx(0.597222, abs=1e-6)
    np.testing.assert_allclose(columns(with_zeros), np.array(columns(usual)) * 2 / 3, rtol=0, atol=1e-12)
    np.testing.assert_allclose(with_zeros.cmc, np.array(usual.cmc) * 2 / 3, rtol=0, atol=1e-12)
    assert (with_zeros.num_valid, with_zeros.num_queries) == (2, 3)


def test_cmc_counts_the_first_match_only():
    ranks = [np.array([1, 50]), np.array([5, 6]), np.array([6]), np.array([10, 11, 12]), np.array([11])]
    scores = average_scores(score_ranks(ranks))
    assert (scores.rank1, scores.rank5, scores.rank10) == (1 / 5, 2 / 5, 4 / 5)


def test_cmc_has_50_entries_that_never_fall_and_ends_with_its_last_value():
    for longest in (3, 12, 50, 200):  # of galleries smaller and larger than the curve
        ranking = average_scores(score_ranks(random_ranks(np.random.default_rng(longest), 40, longest, most=4)))
        assert len(ranking.cmc) == MAX_RANK == 50
        assert list(ranking.cmc) == sorted(ranking.cmc)
        assert (ranking.rank1, ranking.rank5, ranking.rank10) == (ranking.cmc[0], ranking.cmc[4], ranking.cmc[9])
        assert set(ranking.cmc[longest - 1 :]) <= {1.0}
        assert (ranking.cmc[-1] == 1) == (longest <= MAX_RANK)


def test_a_match_at_rank_50_is_on_the_curve_and_one_at_51_is_not():
    assert average_scores(score_ranks([np.array([50])])).cmc == (*[0.0] * 49, 1.0)
    assert average_scores(score_ranks([np.array([51])])).cmc == (0.0,) * 50


@pytest.mark.parametrize("with_hits", [False, True])
def test_a_table_of_scores_can_be_read_back(with_hits):
    rng = np.random.default_rng(5)
    ranks = random_ranks(rng, lists=30, longest=3000)
    hits = rng.random((30, MAX_RANK)) if with_hits else None
    scores = score_ranks(ranks, hits)
    table = scores.to_table()
    assert table.shape == (30, 4 + MAX_RANK * with_hits)
    assert table.dtype == np.float64
    back = QueryScores.from_table(table)
    assert back.first.dtype == np.int64
    for name in ("first", "precision", "precision_trapezoid", "inverse_penalty", "hits"):
        np.testing.assert_array_equal(getattr(back, name), getattr(scores, name))
    assert (back.expected_hits is None) == (not with_hits)
    assert average_scores(back) == average_scores(scores)


def test_hits_in_expectation_replace_the_steps_of_cmc():
    hits = np.linspace(0, 1, 2 * MAX_RANK).reshape(2, MAX_RANK)
    ranking = average_scores(score_ranks([np.array([1]), np.array([2, 3])], hits))
    np.testing.assert_allclose(ranking.cmc, hits.mean(0), rtol=0, atol=1e-12)
    assert ranking.mAP == pytest.approx((1 + (1 / 2 + 2 / 3) / 2) / 2)  # on the whole gallery


# -- rules -------------------------------------------------------------------------------------------------------------


def test_without_the_camera_rule_the_same_camera_counts():
    similarity = similarity_of([[0.1, 0.2, 0.3, 0.4]])
    labels = [1], [0], [1, 2, 1, -1], [0, 0, 1, 0]
    assert as_lists(positive_ranks(similarity, labels_of(*labels))) == [[2]]
    assert as_lists(positive_ranks(similarity, labels_of(*labels, camera_aware=False))) == [[1, 3]]


def test_the_camera_rule_removes_only_the_querys_own_identity():
    similarity = similarity_of([[0.1, 0.2, 0.3]])
    assert as_lists(positive_ranks(similarity, labels_of([1], [0], [2, 3, 1], [0, 0, 1]))) == [[3]]


@pytest.mark.parametrize("camera_aware", [True, False])
def test_identity_minus_1_never_counts(camera_aware):
    similarity = similarity_of([[0.1, 0.2, 0.3], [0.1, 0.2, 0.3]])
    labels = labels_of([1, JUNK], [0, 0], [JUNK, 1, JUNK], [1, 1, 2], camera_aware=camera_aware)
    assert as_lists(positive_ranks(similarity, labels)) == [[1], []]


def test_which_identities_are_junk_can_be_chosen():
    similarity = similarity_of([[0.1, 0.2, 0.3, 0.4]])
    labels = [1], [0], [-1, 0, 7, 1], [1, 1, 1, 1]
    assert as_lists(positive_ranks(similarity, labels_of(*labels))) == [[3]]  # 0 is a wrong answer
    assert as_lists(positive_ranks(similarity, labels_of(*labels, junk_pids=(-1, 0)))) == [[2]]
    assert as_lists(positive_ranks(similarity, labels_of(*labels, junk_pids=(7, -1, 0)))) == [[1]]
    assert as_lists(positive_ranks(similarity, labels_of(*labels, junk_pids=()))) == [[4]]


def test_a_query_is_never_its_own_match():
    features = np.eye(4, dtype=np.float32)[[0, 0, 1, 1]]
    pids, camids = np.array([1, 1, 2, 2]), np.zeros(4, dtype=np.int64)
    own = np.array([0, 2])
    query = features[own] + np.float32(0.01) * np.arange(4, dtype=np.float32)
    similarity = query @ features.T  # its own picture is by far the closest
    labels = labels_of(pids[own], camids[own], pids, camids, camera_aware=False, own=own)
    assert as_lists(positive_ranks(similarity, labels)) == [[1], [1]]
    assert labels.num_valid == 2
    with_itself = labels_of(pids[own], camids[own], pids, camids, camera_aware=False)
    assert as_lists(positive_ranks(similarity, with_itself)) == [[1, 2], [1, 2]]
    assert labels_of(pids[own], camids[own], pids, camids, own=own).num_valid == 0


# -- labels ------------------------------------------------------------------------------------------------------------

RULES = [
    {},
    {"camera_aware": False},
    {"junk_pids": ()},
    {"junk_pids": (-1, 0, 3)},
    {"own": True},
    {"own": True, "camera_aware": False, "junk_pids": (2,)},
]


def random_labels(rng, queries=12, gallery=25, own=False, **rules):
    columns = (rng.integers(low, high, n) for low, high, n in ((-1, 6, queries), (0, 3, queries), (-1, 6, gallery)))
    if own:
        rules["own"] = rng.integers(0, gallery, queries)
    return labels_of(*columns, rng.integers(0, 3, gallery), **rules)


def matches_and_junk(labels, q):
    gallery = range(len(labels.gallery_pids))
    kept = [g for g in gallery if counts(labels, q, g)]
    same = [g for g in gallery if labels.gallery_pids[g] == labels.query_pids[q]]
    return [g for g in kept if g in same], [g for g in gallery if g not in kept]


@pytest.mark.parametrize("rules", RULES)
def test_matches_and_junk_of_each_query_are_those_of_the_loops(rules):
    for seed in range(10):
        labels = random_labels(np.random.default_rng(seed), **rules)
        num_valid = 0
        for q in range(len(labels.query_pids)):
            good, junk = labels.positives_and_junk(q)
            expected_good, expected_junk = matches_and_junk(labels, q)
            assert good.tolist() == expected_good
            assert sorted({*junk.tolist(), *labels.junk_columns.tolist()}) == expected_junk
            assert junk.tolist() == sorted(set(junk.tolist()))
            num_valid += len(expected_good) > 0
        assert labels.num_valid == num_valid


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize(
    "some", [slice(2, 7), [5, 0, 5], np.array([11, 3]), [], slice(0, 0)], ids=["slice", "list", "array", "[]", "none"]
)
def test_labels_of_some_queries_are_theirs(rules, some):
    labels = random_labels(np.random.default_rng(7), **rules)
    part = labels.take(some)
    numbers = np.arange(12)[some]
    assert len(part.query_pids) == len(part.query_camids) == len(numbers)
    for q, number in enumerate(numbers):
        for mine, whole in zip(part.positives_and_junk(q), labels.positives_and_junk(number), strict=True):
            assert mine.tolist() == whole.tolist()
    assert part.junk_columns.tolist() == labels.junk_columns.tolist()
    assert (part.camera_aware, part.junk_pids) == (labels.camera_aware, labels.junk_pids)


def test_labels_of_a_part_of_the_gallery_have_positions_of_their_own():
    labels = random_labels(np.random.default_rng(8), camera_aware=False, junk_pids=(0, -1))
    assert labels.num_valid  # what is known of the whole gallery must not be kept
    some, images = [1, 2, 9], np.array([20, 3, 4, 5, 17])
    part = labels.take(some, images)
    fresh = labels_of(
        labels.query_pids[some], labels.query_camids[some], labels.gallery_pids[images], labels.gallery_camids[images],
        camera_aware=False, junk_pids=(0, -1),
    )  # fmt: skip
    for q in range(3):
        for mine, expected in zip(part.positives_and_junk(q), fresh.positives_and_junk(q), strict=True):
            assert mine.tolist() == expected.tolist()
    assert part.junk_columns.tolist() == fresh.junk_columns.tolist()
    assert part.num_valid == fresh.num_valid


def test_a_part_of_the_gallery_does_not_know_where_queries_stand():
    labels = labels_of([1], [0], [1, 1], [0, 1], own=np.array([0]))
    with pytest.raises(AssertionError, match="own position is unknown"):
        labels.take([0], np.array([1]))


@pytest.mark.parametrize(
    ("columns", "own", "line"),
    [
        (([1, 2], [0], [1], [0]), None, "query_camids: 1 values for 2 images"),
        (([1], [0, 0], [1], [0]), None, "query_camids: 2 values for 1 images"),
        (([1], [0], [1, 2, 3], [0, 0]), None, "gallery_camids: 2 values for 3 images"),
        (([1], [0], [], [0]), None, "gallery_camids: 1 values for 0 images"),
        (([1, 2], [0, 0], [1], [0]), np.array([0]), "own: 1 values for 2 queries"),
    ],
)
def test_labels_that_do_not_fit_each_other_are_refused(columns, own, line):
    with pytest.raises(ValueError, match=line):
        labels_of(*columns, own=own)


@pytest.mark.parametrize(
    ("columns", "rules", "line"),
    [
        (([1, 2], [0, 0], [3, 0, -1], [1, 1, 1]), {}, "no identity of the queries is in the gallery"),
        (([1], [0], [], []), {}, "no identity of the queries is in the gallery"),
        (([-1, 1], [0, 0], [-1, 2], [1, 1]), {}, "share are junk (-1)"),
        (([0, 1, -1], [0, 0, 0], [0, 2, -1], [1, 1, 1]), {"junk_pids": (-1, 0)}, "share are junk (-1, 0)"),
        (([1, 2, 9], [0, 3, 0], [1, 2, 1], [0, 3, 0]), {}, "own camera; set camera_aware to false"),
        (([1, -1], [0, 0], [1, -1], [0, 1]), {}, "own camera; set camera_aware to false"),
        (([1, 2], [0, 0], [1, 2], [0, 0]), {"own": np.array([0, 1])}, "is the query image itself"),
        (
            ([1, 2], [0, 0], [1, 2], [0, 0]),
            {"own": np.array([0, 1]), "camera_aware": False},
            "is the query image itself",
        ),
        # the second query has another image, of its own camera
        (([1, 2], [0, 0], [1, 2, 2], [0, 0, 0]), {"own": np.array([0, 1])}, "own camera; set camera_aware to false"),
    ],
)
def test_which_rule_leaves_no_match_is_said(columns, rules, line):
    labels = labels_of(*columns, **rules)
    assert labels.num_valid == 0
    assert line in labels.why_no_match()
