"""Ranks by counting are the ranks of a stable sort: worked examples, 5,000 drawn lists, both ways to count."""

import collections
import math

import numpy as np
import pytest
import torch
from test_ranking import (
    EXAMPLES,
    as_lists,
    columns,
    labels_of,
    loop_cmc,
    loop_precisions,
    loop_ranks,
    loop_scores,
    similarity_of,
)

from fedsim.evaluation import backends
from fedsim.evaluation.backends import count_on_device, count_ranks
from fedsim.evaluation.ranking import average_scores, positive_ranks, score_ranks


class Elsewhere(torch.Tensor):
    """A tensor that behaves as on an accelerator, so that a CPU goes that way."""

    is_cpu = False

    def cpu(self):
        return self.as_subclass(torch.Tensor)

    def numpy(self):
        raise TypeError("not on the CPU")


def sorted_ranks(similarity, labels):
    return as_lists(positive_ranks(similarity, labels))


def ranks_on_cpu(similarity, labels):
    return as_lists(count_ranks(torch.tensor(similarity), labels))


def ranks_elsewhere(similarity, labels):
    return as_lists(count_ranks(torch.tensor(similarity).as_subclass(Elsewhere), labels))


def ranks_of_matches(similarity, labels):
    """Junk is taken out by the caller."""
    similarity = torch.tensor(similarity)
    similarity[:, labels.junk_columns] = -torch.inf
    found = [labels.positives_and_junk(q) for q in range(len(labels.query_pids))]
    for row, (_, junk) in zip(similarity, found, strict=True):
        row[junk] = -torch.inf
    return as_lists(count_on_device(similarity, [good for good, _ in found]))


WAYS = [sorted_ranks, ranks_on_cpu, ranks_elsewhere, ranks_of_matches]


@pytest.fixture
def calls(monkeypatch):
    """How often each function of NumPy is called while counting."""
    seen = collections.Counter()

    class Watched:
        def __getattr__(self, name):
            seen[name] += 1
            return getattr(np, name)

    monkeypatch.setattr(backends, "np", Watched())
    return seen


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("way", WAYS)
def test_worked_example(name, way):
    distances, *labels, ranks, rank1, rank5, rank10, rectangular, trapezoid, penalty = EXAMPLES[name]
    found = way(similarity_of(distances), labels_of(*labels))
    assert found == ranks
    scores = average_scores(score_ranks([np.array(row, dtype=np.int64) for row in found]))
    expected = (rank1, rank5, rank10, rectangular, trapezoid, penalty)
    np.testing.assert_allclose(columns(scores), expected, rtol=0, atol=1e-6)


# -- drawn lists -------------------------------------------------------------------------------------------------------

JUNK_PIDS = [(-1,), (-1,), (), (-1, 0), (2,), (3, -1, 0, 17)]


def drawn_similarities(rng, shape):
    """All equal, a few values, of both signs, or (nearly) all different."""
    kind = rng.integers(4)
    if kind == 0:
        return rng.choice([-0.5, 0.0, -0.0, 1.0], 1) + np.zeros(shape)
    if kind == 1:
        return rng.integers(-2, rng.integers(-1, 4), shape) / 4
    if kind == 2:
        return np.round(rng.normal(size=shape), 1)
    return rng.normal(size=shape)


def drawn_gallery(rng, size, people):
    kind = rng.integers(6)
    if kind == 0:  # one match at most
        pids = rng.choice([-1, 0], size)
        pids[rng.integers(size)] = 1
        return pids
    if kind == 1:  # nothing but matches
        return np.full(size, rng.integers(1, people + 1))
    return rng.integers(-1, people + 1, size)


def drawn_case(rng, size, queries):
    people, cameras = rng.integers(1, 6), rng.integers(1, 5)
    gallery_pids, gallery_camids = drawn_gallery(rng, size, people), rng.integers(0, cameras, size)
    query_pids, query_camids = rng.integers(-1, people + 1, queries), rng.integers(0, cameras, queries)
    rules = {"camera_aware": bool(rng.integers(2)), "junk_pids": JUNK_PIDS[rng.integers(len(JUNK_PIDS))]}
    if rng.integers(3) == 0:
        rules["own"] = rng.integers(0, size, queries)
        if rng.integers(4):  # as it is: the same picture has the same labels
            query_pids, query_camids = gallery_pids[rules["own"]], gallery_camids[rules["own"]]
    similarity = drawn_similarities(rng, (queries, size)).astype(np.float32)
    return similarity, labels_of(query_pids, query_camids, gallery_pids, gallery_camids, **rules)


def what_is_in(similarity, labels, expected):
    """Which of the things that the lists are drawn for are in this case, list by list."""
    for q, (row, ranks) in enumerate(zip(similarity, expected, strict=True)):
        matches = labels.gallery_pids == labels.query_pids[q]
        num_matches, different = matches.sum(), len(np.unique(row))
        yield "large" if len(row) > 1000 else "small"
        yield "camera rule" if labels.camera_aware else "no camera rule"
        yield f"{min(len(ranks), 2)} valid"
        yield "one image" if len(row) == 1 else "many images"
        if len(ranks) == len(row):
            yield "nothing but matches"
        if num_matches > len(ranks) > 0:
            yield "some matches are junk"
        if labels.own is not None and matches[labels.own[q]]:
            yield "own"
        if len(labels.junk_pids) > 1 and np.isin(labels.gallery_pids, labels.junk_pids).any():
            yield "several junk identities"
        if labels.query_pids[q] in labels.junk_pids and num_matches:
            yield "the query is junk"
        if ranks and labels.query_pids[q] < 1:
            yield "identity 0 or -1 that counts"
        if different < len(row):
            yield "ties"
        if ranks and len(np.unique(row[matches])) + len(np.unique(row[~matches])) > different:
            yield "ties of matches and others"


def check_scores(ranks, expected):
    scores = score_ranks([np.array(row, dtype=np.int64) for row in ranks])
    for q, row in enumerate(expected):
        found = (scores.precision[q], scores.precision_trapezoid[q], scores.inverse_penalty[q])
        wanted = (*loop_precisions(row), len(row) / row[-1]) if row else (0, 0, 0)
        assert max(abs(a - b) for a, b in zip(found, wanted, strict=True)) <= 1e-12
    ranking = average_scores(scores)
    assert (ranking.num_valid, ranking.num_queries) == (sum(map(bool, expected)), len(expected))
    if ranking.num_valid:
        np.testing.assert_allclose(columns(ranking), loop_scores(expected), rtol=0, atol=1e-12)
        np.testing.assert_allclose(ranking.cmc, loop_cmc(expected), rtol=0, atol=1e-12)
    else:
        assert all(math.isnan(score) for score in columns(ranking))


def test_5000_drawn_lists_equal_the_loops(calls):
    rng = np.random.default_rng(0)
    seen = collections.Counter()
    pool = []
    for case in range(860):
        size = rng.integers(1800, 2200) if case % 40 == 0 else rng.integers(1, 41)
        similarity, labels = drawn_case(rng, size, queries=3 if size > 40 else 6)
        expected = loop_ranks(similarity, labels)
        for way in WAYS:
            assert way(similarity, labels) == expected, (case, way)
        check_scores(expected, expected)
        assert labels.num_valid == sum(map(bool, expected))
        seen.update(what_is_in(similarity, labels, expected))
        pool += expected
    check_scores(pool, pool)  # of all lists at once
    assert len(pool) >= 5000
    assert min(seen.values()) >= 50, seen  # the cases are what they are meant to be
    assert len(seen) == 17, seen
    assert min(calls["argsort"], calls["count_nonzero"]) >= 20, calls  # few candidates are sorted, many are counted


@pytest.mark.parametrize("few", [0, 3, 10**9])
def test_sorting_and_counting_candidates_agree_on_any_list(few, monkeypatch, calls):
    monkeypatch.setattr(backends, "_FEW", few)
    rng = np.random.default_rng(few)
    for _ in range(100):
        similarity, labels = drawn_case(rng, rng.integers(1, 41), queries=6)
        assert ranks_on_cpu(similarity, labels) == loop_ranks(similarity, labels)
    assert (calls["argsort"] > 0) == (few > 0)
    assert (calls["count_nonzero"] > 0) == (few < 100)


@pytest.mark.parametrize("candidates", [511, 512, 513, 1024])
@pytest.mark.parametrize("ties", [False, True])
def test_the_last_match_decides_how_many_images_are_looked_at(candidates, ties, calls):
    similarity = np.arange(3000, 0, -1)[None].astype(np.float32)
    if ties:
        similarity = np.ceil(similarity / 4)
        candidates -= candidates % 4
    gallery_pids = np.zeros(3000)
    gallery_pids[[3, 100, candidates - 1]] = 1
    order = np.random.default_rng(0).permutation(3000)
    if ties:  # equal ones stay in their order
        order = np.arange(3000)
    labels = labels_of([1], [0], gallery_pids[order], np.ones(3000))
    assert ranks_on_cpu(similarity[:, order], labels) == [[4, 101, candidates]]
    assert (calls["argsort"] > 0) == (candidates <= 512)
    assert (calls["count_nonzero"] > 0) == (candidates > 512)


# -- single cases ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_equal_images_are_in_the_order_of_the_gallery(way):
    similarity = np.full((2, 2000), 0.25, dtype=np.float32)
    gallery_pids = np.zeros(2000)
    gallery_pids[[0, 7, 1999]] = 1
    gallery_pids[[1, 8, 1500]] = -1  # junk is not in the list
    labels = labels_of([1, 1], [0, 0], gallery_pids, np.ones(2000))
    assert way(similarity, labels) == [[1, 7, 1997]] * 2


@pytest.mark.parametrize("way", WAYS)
def test_zeros_of_both_signs_are_equal(way):
    similarity = np.array([[0.0, -0.0, 0.0, -0.0]], dtype=np.float32)
    assert way(similarity, labels_of([1], [0], [2, 1, 2, 1], [1, 1, 1, 1])) == [[2, 4]]


@pytest.mark.parametrize("way", WAYS)
def test_values_that_differ_in_the_last_bit_are_not_equal(way):
    close = np.nextafter(np.float32(0.5), np.float32(1))
    similarity = np.array([[0.5, close, 0.5, close]], dtype=np.float32)
    assert way(similarity, labels_of([1], [0], [1, 2, 2, 1], [1, 1, 1, 1])) == [[2, 3]]


@pytest.mark.parametrize("way", WAYS)
def test_without_queries_or_without_gallery_there_are_no_ranks(way):
    assert way(np.zeros((0, 3), np.float32), labels_of([], [], [1, 2, -1], [0, 0, 0])) == []
    assert way(np.zeros((2, 0), np.float32), labels_of([1, 2], [0, 0], [], [])) == [[], []]


@pytest.mark.parametrize("way", WAYS)
def test_ranks_of_a_query_do_not_depend_on_the_others(way):
    similarity, labels = drawn_case(np.random.default_rng(11), 40, queries=20)
    together = way(similarity, labels)
    assert sum(map(bool, together)) > 5
    assert [way(similarity[q : q + 1], labels.take([q]))[0] for q in range(20)] == together


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_ranks_on_a_gpu_equal_the_sort():
    rng = np.random.default_rng(12)
    for _ in range(50):
        similarity, labels = drawn_case(rng, rng.integers(1, 3000), queries=6)
        assert as_lists(count_ranks(torch.tensor(similarity).cuda(), labels)) == sorted_ranks(similarity, labels)
