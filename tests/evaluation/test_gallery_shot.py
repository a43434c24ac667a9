"""CMC of galleries with one random image per identity: the expectation equals the mean over all such galleries."""

import collections
import itertools

import numpy as np
import pytest
import torch
from test_ranking import counts, labels_of

from fedsim.evaluation.ranker import Ranker
from fedsim.evaluation.ranking import MAX_RANK, QueryScores, average_scores, expected_hits, positive_ranks, score_ranks
from fedsim.functional.similarity import query_blocks


def hits_of_all_galleries(row, labels, q):
    """Each gallery has one image per identity; all galleries are equally likely."""
    images = collections.defaultdict(list)
    for g, pid in enumerate(labels.gallery_pids.tolist()):
        if counts(labels, q, g):
            images[pid].append(g)
    pid = int(labels.query_pids[q])
    if pid not in images:
        return [0.0] * MAX_RANK, 0
    hits, galleries = np.zeros(MAX_RANK), 0
    for gallery in itertools.product(*images.values()):
        in_order = sorted(gallery, key=lambda g: (-row[g], g))
        rank = [labels.gallery_pids[g] for g in in_order].index(pid) + 1
        hits[rank - 1 :] += 1
        galleries += 1
    return hits / galleries, galleries


def drawn_case(rng):
    size, queries = rng.integers(1, 12), 4
    people, cameras = rng.integers(1, 5), rng.integers(1, 4)
    similarity = rng.integers(0, rng.integers(1, 8), (queries, size)) / 8
    pids, camids = rng.integers(-1, people + 1, size), rng.integers(0, cameras, size)
    rules = {"camera_aware": bool(rng.integers(2)), "junk_pids": [(-1,), (), (-1, 2)][rng.integers(3)]}
    if rng.integers(3) == 0:
        rules["own"] = rng.integers(0, size, queries)
    query_pids, query_camids = rng.integers(-1, people + 1, queries), rng.integers(0, cameras, queries)
    return similarity.astype(np.float32), labels_of(query_pids, query_camids, pids, camids, **rules)


def test_expectation_is_the_mean_over_all_galleries():
    rng = np.random.default_rng(0)
    seen = collections.Counter()
    for case in range(500):
        similarity, labels = drawn_case(rng)
        found = expected_hits(similarity, labels)
        assert found.shape == (4, MAX_RANK)
        assert found.dtype == np.float64
        for q, row in enumerate(similarity.tolist()):
            expected, galleries = hits_of_all_galleries(row, labels, q)
            np.testing.assert_allclose(found[q], expected, rtol=0, atol=1e-12, err_msg=f"{case}, {q}")
            good, junk = labels.positives_and_junk(q)
            seen["no match"] += galleries == 0
            seen["one gallery"] += galleries == 1
            seen["many galleries"] += galleries > 10
            seen["several matches"] += len(good) > 1
            seen["junk"] += len(good) > 0 and len(junk) + len(labels.junk_columns) > 0
            seen["own"] += len(good) > 0 and labels.own is not None
            seen["distractors"] += len(good) > 0 and (labels.gallery_pids == 0).sum() > 1
            others = np.setdiff1d(np.arange(len(row)), [*good, *junk, *labels.junk_columns])
            seen["ties with others"] += bool(np.isin(similarity[q, good], similarity[q, others]).any())
            seen["between 0 and 1"] += any(0.01 < hit < 0.99 for hit in expected)
    assert min(seen.values()) >= 100, seen  # the cases are what they are meant to be
    assert len(seen) == 9


def test_two_worked_examples():
    # two images of identity 2: the match at position 1 is before the second of them and behind the first
    hits = expected_hits(np.array([[0.9, 0.5, 0.1]], np.float32), labels_of([1], [0], [2, 1, 2], [1, 1, 1]))
    assert hits[0].tolist() == [0.5] + [1.0] * (MAX_RANK - 1)
    # matches at positions 0 and 3, identities 0 (distractor) and 2 between them: rank 1 or 3 by the draw of the match
    row, labels = np.array([[0.9, 0.8, 0.7, 0.6]], np.float32), labels_of([1], [0], [1, 0, 2, 1], [1, 1, 1, 1])
    assert expected_hits(row, labels)[0].tolist() == [0.5, 0.5] + [1.0] * (MAX_RANK - 2)


@pytest.mark.parametrize("values", [4, 10**6])
def test_with_one_image_per_identity_it_is_the_usual_cmc(values):
    rng = np.random.default_rng(values)
    people = 90  # more than the curve is long
    similarity = (rng.integers(0, values, (60, people)) / values).astype(np.float32)
    query_pids, gallery_pids = rng.permutation(people)[:60], rng.permutation(people)
    labels = labels_of(query_pids, np.zeros(60), gallery_pids, rng.integers(0, 4, people))
    usual = score_ranks(positive_ranks(similarity, labels))
    assert 0 < (usual.first == 0).sum() < 60
    assert (usual.first > MAX_RANK).any()
    np.testing.assert_array_equal(expected_hits(similarity, labels), usual.hits)


def test_more_identities_before_the_match_than_the_curve_is_long():
    # 70 identities with two images each, of which exactly one is before the match: 70 throws of a fair coin
    pids = np.concatenate([np.arange(2, 72), [1], np.arange(2, 72)])
    similarity = -np.arange(141, dtype=np.float32)[None]
    hits = expected_hits(similarity, labels_of([1], [0], pids, np.ones(141)))[0]
    pascal = [1]
    for _ in range(70):
        pascal = [a + b for a, b in zip([0, *pascal], [*pascal, 0], strict=True)]
    expected = [sum(pascal[:k]) / 2**70 for k in range(1, MAX_RANK + 1)]
    np.testing.assert_allclose(hits, expected, rtol=0, atol=1e-12)
    assert hits[-1] < 1


# -- with features -----------------------------------------------------------------------------------------------------


def features_and_labels():
    rng = np.random.default_rng(3)
    query, gallery = (torch.tensor(rng.choice([-1.0, 1.0], (n, 16)), dtype=torch.float32) for n in (300, 60))
    columns = rng.integers(1, 12, 300), rng.integers(0, 3, 300), rng.integers(-1, 10, 60), rng.integers(0, 3, 60)
    return query, gallery, labels_of(*columns)


def test_ranker_takes_cmc_from_the_galleries_with_one_image_and_the_rest_from_the_whole():
    query, gallery, labels = features_and_labels()
    usual, shot = Ranker().score(query, gallery, labels), Ranker(single_gallery_shot=True).score(query, gallery, labels)
    for name in ("mAP", "mAP_trapezoid", "mINP", "num_valid", "num_queries"):
        assert getattr(shot, name) == getattr(usual, name)
    assert 0 < shot.num_valid < shot.num_queries
    similarity = (query @ gallery.T / 16).numpy()  # exact
    hits = expected_hits(similarity, labels)
    np.testing.assert_allclose(shot.cmc, hits.sum(0) / shot.num_valid, rtol=0, atol=1e-12)
    assert (shot.rank1, shot.rank5, shot.rank10) == (shot.cmc[0], shot.cmc[4], shot.cmc[9])
    assert shot.rank1 != usual.rank1
    assert list(shot.cmc) == pytest.approx(sorted(shot.cmc), abs=1e-12)
    with_zeros = Ranker(single_gallery_shot=True, invalid_as_zero=True).score(query, gallery, labels)
    np.testing.assert_allclose(with_zeros.cmc, hits.mean(0), rtol=0, atol=1e-12)


def test_ranker_draws_galleries_in_the_order_of_its_distance():
    query, gallery, labels = features_and_labels()
    gallery = gallery * torch.arange(1, 5).repeat(15)[:, None]  # powers of two and a 3: still exact
    hits = expected_hits((query @ gallery.T - 8 * torch.arange(1, 5).repeat(15).square()).numpy(), labels)
    shot = Ranker("euclidean", single_gallery_shot=True).score(query, gallery, labels)
    np.testing.assert_allclose(shot.cmc, hits.sum(0) / shot.num_valid, rtol=0, atol=1e-12)


def test_tables_of_parts_make_up_the_whole():
    query, gallery, labels = features_and_labels()
    ranker = Ranker(single_gallery_shot=True)
    whole = ranker.score_queries(query, gallery, labels)
    blocks = query_blocks(300, 60)
    assert len(blocks) == 2
    parts = [ranker.score_queries(query, gallery, labels, [block]).to_table() for block in blocks]
    table = np.concatenate(parts)
    np.testing.assert_array_equal(table, whole.to_table())
    assert table.shape == (300, ranker.num_columns)
    assert average_scores(QueryScores.from_table(table)) == average_scores(whole)


def test_blocks_may_come_one_by_one():
    query, gallery, labels = features_and_labels()
    ranker = Ranker(single_gallery_shot=True)
    scores = ranker.score_queries(query, gallery, labels, iter(query_blocks(300, 60)))
    np.testing.assert_array_equal(scores.to_table(), ranker.score_queries(query, gallery, labels).to_table())
