"""From features to ranks, by torch and by FAISS: exact, in any block, whatever precision models ran in."""

import math
import sys
import types

import numpy as np
import pytest
import torch
from test_counting import Elsewhere
from test_ranking import as_lists, columns, labels_of, loop_ranks, loop_scores

from fedsim.core.errors import ConfigError
from fedsim.evaluation import backends
from fedsim.evaluation.backends import FaissBackend, TorchBackend, make_backend
from fedsim.evaluation.ranker import Ranker, rank_features
from fedsim.evaluation.ranking import QueryScores, average_scores, positive_ranks, score_ranks
from fedsim.functional import similarity
from fedsim.functional.neighbours import nearest, top_of_block
from fedsim.functional.similarity import NotFiniteError, Similarity, exact_products, query_blocks


def drawn_labels(rng, queries, gallery, **rules):
    people = max(gallery // 6, 2)
    return labels_of(
        rng.integers(1, people + 2, queries),
        rng.integers(0, 3, queries),
        rng.integers(-1, people + 1, gallery),
        rng.integers(0, 3, gallery),
        **rules,
    )


def signs(rng, num, dim):
    """Features of length sqrt(dim), a power of two: products and quotients are exact and there are many ties."""
    assert math.isqrt(dim) ** 2 == dim
    return torch.tensor(rng.choice([-1.0, 1.0], (num, dim)), dtype=torch.float32)


def integers(rng, num, dim):
    return torch.tensor(rng.integers(-2, 3, (num, dim)), dtype=torch.float32)


def exact_similarity(query, gallery, distance):
    """In integers."""
    query, gallery = query.numpy().astype(np.int64), gallery.numpy().astype(np.int64)
    if distance == "cosine":
        return (query @ gallery.T / query.shape[1]).astype(np.float32)
    return -np.square(query[:, None] - gallery[None]).sum(-1).astype(np.float32)


DRAWN = {"cosine": signs, "euclidean": integers}


def exact_case(distance, queries, gallery, seed, dim=16):
    """Features, labels, and the similarities that follow."""
    rng = np.random.default_rng(seed)
    query, gallery = (DRAWN[distance](rng, num, dim) for num in (queries, gallery))
    return query, gallery, drawn_labels(rng, len(query), len(gallery)), exact_similarity(query, gallery, distance)


def ranks_of(backend, query, gallery, labels, distance="cosine", blocks=None):
    blocks = query_blocks(len(query), len(gallery)) if blocks is None else blocks
    return as_lists(backend.ranks(query, gallery, labels, distance, blocks))


def scores_of(ranks):
    return average_scores(score_ranks([np.array(row, dtype=np.int64) for row in ranks]))


def random_features(seed, queries, gallery, dim=32):
    rng = np.random.default_rng(seed)
    query, gallery = (torch.tensor(rng.normal(size=(num, dim)), dtype=torch.float32) for num in (queries, gallery))
    return query, gallery, drawn_labels(rng, len(query), len(gallery))


@pytest.fixture(params=["torch", "faiss"])
def backend(request):
    if request.param == "faiss":
        pytest.importorskip("faiss")
    return request.param


# -- torch: exact ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("distance", DRAWN)
@pytest.mark.parametrize("dim", [1, 4, 16, 64])
def test_features_that_are_exact_are_ranked_as_by_loops(distance, dim):
    for seed in range(10):
        query, gallery, labels, exact = exact_case(distance, 12, 5 + 5 * seed, seed, dim)
        assert ranks_of(TorchBackend(), query, gallery, labels, distance) == loop_ranks(exact, labels)


@pytest.mark.parametrize("distance", DRAWN)
@pytest.mark.parametrize("rules", [{"camera_aware": False}, {"junk_pids": (-1, 0, 3)}, {"own": True}])
def test_rules_hold_in_every_block(distance, rules):
    rng = np.random.default_rng(1)
    gallery = DRAWN[distance](rng, 400, 16)
    if rules.get("own"):  # all pictures against each other
        pids, camids = rng.integers(-1, 60, 400), rng.integers(0, 3, 400)
        query, labels = gallery, labels_of(pids, camids, pids, camids, own=np.arange(400), camera_aware=False)
    else:
        query, labels = DRAWN[distance](rng, 700, 16), drawn_labels(rng, 700, 400, **rules)
    assert len(query_blocks(len(query), 400)) > 1
    found = ranks_of(TorchBackend(), query, gallery, labels, distance)
    assert found == as_lists(positive_ranks(exact_similarity(query, gallery, distance), labels))


@pytest.mark.parametrize("distance", DRAWN)
def test_small_blocks_give_the_same_ranks(distance, monkeypatch):
    query, gallery, labels, exact = exact_case(distance, 300, 700, seed=2)
    expected = as_lists(positive_ranks(exact, labels))
    for size, rows in ((2**30, 256), (4 * 700 * 7 + 5, 7), (100, 1)):
        monkeypatch.setattr(similarity, "_BLOCK_BYTES", size)
        blocks = query_blocks(300, 700)
        assert {block.stop - block.start for block in blocks[:-1]} == {rows}
        assert ranks_of(TorchBackend(), query, gallery, labels, distance) == expected
        assert rank_features(query, gallery, labels, distance) == scores_of(expected)


@pytest.mark.parametrize(("queries", "gallery"), [(0, 10), (1, 10), (256, 10), (257, 10), (1000, 0), (600, 10**6)])
def test_blocks_hold_each_query_once_and_are_bounded(queries, gallery):
    blocks = query_blocks(queries, gallery)
    assert [q for block in blocks for q in range(queries)[block]] == list(range(queries))
    for block in blocks:
        assert 1 <= block.stop - block.start <= 256
        assert 4 * gallery * (block.stop - block.start) <= 96 * 2**20


def test_a_block_needs_no_more_memory_than_the_first(monkeypatch):
    monkeypatch.setattr(similarity, "_BLOCK_BYTES", 4 * 50 * 8)
    query, gallery, _, exact = exact_case("cosine", 20, 50, seed=3)
    matrix = Similarity(query, gallery)
    assert [block.stop - block.start for block in matrix.blocks] == [8, 8, 4]
    places = set()
    for rows, block in matrix:
        np.testing.assert_array_equal(block.numpy(), exact[rows])
        places.add(block.data_ptr())
    assert len(places) == 1
    assert [rows for rows, _ in matrix] == matrix.blocks
    some = [7, 0, 7, 19]
    np.testing.assert_array_equal(matrix.block(some).numpy(), exact[some])


def test_features_are_left_as_they_were():
    for distance in DRAWN:
        query, gallery, labels = random_features(4, 20, 30)
        before = query.clone(), gallery.clone()
        rank_features(query, gallery, labels, distance)
        assert torch.equal(query, before[0])
        assert torch.equal(gallery, before[1])


# -- torch: random features --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("camera_aware", [True, False])
def test_features_are_ranked_by_cosine_like_the_loops(camera_aware):
    rng = np.random.default_rng(1)
    # more queries than one matrix product takes; lengths differ, so that dot products would rank differently
    query, gallery = (rng.normal(size=(n, 16)) * rng.uniform(0.1, 10, (n, 1)) for n in (300, 40))
    labels = rng.integers(1, 8, 300), rng.integers(0, 3, 300), rng.integers(-1, 8, 40), rng.integers(0, 3, 40)
    labels = labels_of(*labels, camera_aware=camera_aware)
    cosines = [[float(q @ g) / math.sqrt(float(q @ q) * float(g @ g)) for g in gallery] for q in query]  # in float64
    expected = loop_ranks(np.array(cosines), labels)
    query, gallery = (torch.tensor(features, dtype=torch.float32) for features in (query, gallery))
    assert ranks_of(TorchBackend(), query, gallery, labels) == expected
    scores = rank_features(query, gallery, labels)
    assert scores.num_queries == 300
    assert scores.num_valid == sum(len(row) > 0 for row in expected)
    np.testing.assert_allclose(columns(scores), loop_scores(expected), rtol=0, atol=1e-12)


def test_features_are_ranked_by_euclidean_distance_like_the_loops():
    rng = np.random.default_rng(2)
    query, gallery = (rng.normal(size=(n, 16)) * rng.uniform(0.1, 10, (n, 1)) for n in (300, 40))
    labels = drawn_labels(rng, 300, 40)
    distances = np.array([[math.dist(q, g) for g in gallery] for q in query])  # in float64
    query, gallery = (torch.tensor(features, dtype=torch.float32) for features in (query, gallery))
    found = ranks_of(TorchBackend(), query, gallery, labels, "euclidean")
    assert found == loop_ranks(-distances, labels)
    assert found != ranks_of(TorchBackend(), query, gallery, labels)  # of other lengths, other ranks


@pytest.mark.parametrize("distance", ["cosine", "euclidean"])
def test_ranks_are_those_of_a_sort_of_the_same_numbers(distance):
    query, gallery, labels = random_features(5, 600, 500, dim=8)
    matrix = Similarity(query, gallery, distance)
    whole = np.concatenate([matrix.block(rows).numpy().copy() for rows in matrix.blocks])
    expected = as_lists(positive_ranks(whole, labels))
    assert ranks_of(TorchBackend(), query, gallery, labels, distance) == expected
    assert rank_features(query, gallery, labels, distance) == scores_of(expected)


def test_on_unit_vectors_euclidean_and_cosine_are_one_order():
    query, gallery, labels, exact = exact_case("cosine", 300, 200, seed=6)
    expected = as_lists(positive_ranks(exact, labels))
    for distance in DRAWN:
        assert ranks_of(TorchBackend(), query / 4, gallery / 4, labels, distance) == expected  # ties included
    query, gallery, labels = random_features(6, 30, 40)
    query, gallery = (torch.nn.functional.normalize(features) for features in (query, gallery))
    cosine = ranks_of(TorchBackend(), query, gallery, labels)
    assert ranks_of(TorchBackend(), query, gallery, labels, "euclidean") == cosine


def test_the_length_of_features_matters_to_euclidean_only():
    query, gallery, labels = random_features(7, 50, 60)
    powers = 2.0 ** torch.arange(60).remainder(9).sub(4)[:, None]  # exact
    assert rank_features(query * 4, gallery * powers, labels) == rank_features(query, gallery, labels)
    changed = rank_features(query, gallery * powers, labels, "euclidean")
    assert changed != rank_features(query, gallery, labels, "euclidean")


def test_a_feature_of_zeros_is_not_nan(backend):
    labels = labels_of([1], [0], [2, 1], [1, 1])
    scores = rank_features(torch.zeros(1, 4), torch.ones(2, 4), labels, backend=backend)
    assert scores.mAP == 0.5  # all similarities are equal, so the order is that of the gallery
    gallery = torch.tensor([[-1.0] * 4, [0.0] * 4])
    assert rank_features(torch.ones(1, 4), gallery, labels, backend=backend).mAP == 1  # 0 is more than -1


def test_map_of_one_match_per_query_lies_between_the_bounds_of_cmc():
    # With one match, average precision is 1 / rank: 1 at rank 1; at most 1/2 in 2-5, 1/6 in 6-10, 1/11 beyond.
    rng = np.random.default_rng(3)
    for signal in (0.0, 0.3, 0.6, 1.0, 3.0):
        people = 40
        centres = rng.normal(size=(people, 16))
        query, gallery = (torch.tensor(signal * centres + rng.normal(size=(people, 16))) for _ in range(2))
        pids = np.arange(1, people + 1)
        scores = rank_features(query, gallery, labels_of(pids, np.zeros(people), pids, np.ones(people)))
        assert scores.num_valid == people
        r1, r5, r10, mean_ap = (100 * s for s in (scores.rank1, scores.rank5, scores.rank10, scores.mAP))
        assert r1 <= r5 <= r10
        assert r1 - 1e-9 <= mean_ap <= r1 + (r5 - r1) / 2 + (r10 - r5) / 6 + (100 - r10) / 11 + 1e-9
        assert scores.mINP == pytest.approx(scores.mAP)  # the same with one match


def test_better_features_score_better():
    rng = np.random.default_rng(4)
    pids = np.arange(1, 41)
    labels = labels_of(pids, np.zeros(40), pids, np.ones(40))
    centres = rng.normal(size=(40, 16))
    found = []
    for signal in (0.0, 1.0, 3.0):
        query, gallery = (torch.tensor(signal * centres + rng.normal(size=(40, 16))) for _ in range(2))
        found.append(rank_features(query, gallery, labels).mAP)
    assert found[0] < 0.3 < found[1] < found[2]
    assert found[2] > 0.9


# -- torch: precision --------------------------------------------------------------------------------------------------


def test_features_of_low_precision_and_of_any_length():
    rng = np.random.default_rng(2)
    query, gallery = (torch.tensor(rng.normal(size=(n, 8)), dtype=torch.bfloat16) for n in (10, 30))
    labels = labels_of(rng.integers(1, 4, 10), np.zeros(10), rng.integers(1, 4, 30), np.ones(30))
    scores = rank_features(query, gallery, labels)
    assert rank_features(query.float(), gallery.float(), labels) == scores
    assert rank_features(query * 4, gallery * 0.5, labels) == scores  # powers of two: exact


@pytest.mark.parametrize("distance", ["cosine", "euclidean"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_features_of_any_precision_are_compared_in_float32(dtype, distance):
    query, gallery, labels = random_features(8, 300, 200)
    query, gallery = query.to(dtype), gallery.to(dtype)
    matrix = Similarity(query, gallery, distance)
    assert matrix.block(slice(0, 5)).dtype == torch.float32
    expected = ranks_of(TorchBackend(), query.float(), gallery.float(), labels, distance)
    assert ranks_of(TorchBackend(), query, gallery, labels, distance) == expected
    assert nearest(query, gallery, 7, distance).similarity.dtype == np.float32


def blocks_of(query, gallery, distance):
    return torch.cat([block.clone() for _, block in Similarity(query, gallery, distance)])


PLACES = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)


def precisions():
    return [place.fp32_precision for place in (torch.backends, *PLACES)]


@pytest.fixture
def precision():
    """Put back what a test changes."""
    torch.set_float32_matmul_precision("highest")
    yield
    torch.backends.fp32_precision = "none"
    for place in PLACES:
        place.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")


# the two ways in which torch lets users ask for quick products
QUICK = {
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "allow_tf32": lambda: setattr(PLACES[0], "allow_tf32", True),
    "cuda": lambda: setattr(PLACES[0], "fp32_precision", "tf32"),
    "mkldnn": lambda: setattr(PLACES[1], "fp32_precision", "bf16"),
    "all": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
}


@pytest.mark.parametrize("outside", QUICK)
def test_quick_products_outside_change_nothing(outside, precision):
    query, gallery, _ = random_features(9, 300, 200, dim=64)
    expected = [blocks_of(query, gallery, distance) for distance in DRAWN]
    QUICK[outside]()
    before = precisions()
    for distance, blocks in zip(DRAWN, expected, strict=True):
        assert torch.equal(blocks_of(query, gallery, distance), blocks)
    assert precisions() == before


def test_products_are_exact_inside_and_as_before_outside(precision):
    a = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    expected = a @ a
    torch.set_float32_matmul_precision("medium")
    before = precisions()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with exact_products():
            assert precisions()[1:] == ["ieee", "ieee"]
            assert torch.equal(a @ a, expected)
        assert (a @ a).dtype == torch.bfloat16
    with pytest.raises(ZeroDivisionError), exact_products():
        _ = 1 / 0
    assert precisions() == before != ["none", "ieee", "ieee"]


@pytest.mark.parametrize("distance", ["cosine", "euclidean"])
def test_autocast_outside_changes_nothing(distance):
    query, gallery, labels = random_features(10, 300, 200, dim=64)
    expected = blocks_of(query, gallery, distance)
    scores = rank_features(query, gallery, labels, distance)
    lists = nearest(query, gallery, 9, distance)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(blocks_of(query, gallery, distance), expected)
        assert rank_features(query, gallery, labels, distance) == scores
        inside = nearest(query, gallery, 9, distance)
    np.testing.assert_array_equal(inside.index, lists.index)
    np.testing.assert_array_equal(inside.similarity, lists.similarity)


def test_features_with_a_history_are_ranked_without_it():
    query, gallery, labels = random_features(11, 20, 30)
    expected = rank_features(query, gallery, labels)
    assert rank_features(query.requires_grad_(), gallery.requires_grad_(), labels) == expected
    with torch.inference_mode():
        assert rank_features(query, gallery, labels) == expected


# -- features that cannot be ranked ------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("distance", ["cosine", "euclidean"])
def test_the_first_image_whose_features_are_not_finite_is_named(value, distance, backend):
    query, gallery, labels = random_features(12, 300, 40)
    gallery[[7, 31], 3] = value
    with pytest.raises(ValueError, match="gallery: the features of image 7 are not finite"):
        rank_features(query, gallery, labels, distance, backend)
    query[[290, 299], 0] = value
    with pytest.raises(ValueError, match="query: the features of image 290 are not finite"):
        rank_features(query, gallery, labels, distance, backend)
    with pytest.raises(ValueError, match="query: the features of image 290 are not finite"):
        nearest(query, gallery, 3, distance)


@pytest.mark.parametrize("value", [1e20, -2e19, 3e38])
@pytest.mark.parametrize("distance", ["cosine", "euclidean"])
def test_features_that_are_finite_and_too_large_are_called_so(value, distance, backend):
    query, gallery, labels = random_features(12, 300, 40)
    gallery[7, 3] = value
    with pytest.raises(
        NotFiniteError, match=r"gallery: the features of image 7 reach .*, and float32 cannot hold their"
    ):
        rank_features(query, gallery, labels, distance, backend)
    query = query.double()
    query[290] = 1e60
    with pytest.raises(NotFiniteError, match=r"query: the features of image 290 reach 1e\+60, and float32"):
        rank_features(query, gallery, labels, distance, backend)


@pytest.mark.parametrize(
    ("query", "gallery"),
    [((3, 4), (5, 6)), ((3, 4, 1), (5, 4)), ((3, 4), (4,)), ((4,), (5, 4)), ((3, 4), (5, 4, 1, 1))],
)
def test_shapes_that_do_not_fit_are_said(query, gallery, backend):
    labels = labels_of([1] * query[0], [0] * query[0], [1] * gallery[0], [1] * gallery[0])
    with pytest.raises(ValueError, match=r"query: \[.*4.*\] and gallery: \[.*\] are not \[Q, D\] and \[G, D\]"):
        rank_features(torch.ones(query), torch.ones(gallery), labels, backend=backend)


@pytest.mark.parametrize(("queries", "gallery"), [(2, 5), (4, 5), (3, 4), (3, 6)])
def test_labels_of_other_sets_are_refused(queries, gallery, backend):
    labels = labels_of([1] * queries, [0] * queries, [1] * gallery, [1] * gallery)
    with pytest.raises(ValueError, match="label"):
        rank_features(torch.eye(3, 4), torch.ones(5, 4), labels, backend=backend)


def test_an_empty_query_set_or_gallery_has_no_scores(backend):
    query, gallery, _ = random_features(13, 3, 4)
    for q, g in ((0, 4), (3, 0), (0, 0)):
        labels = labels_of(range(q), [0] * q, range(g), [1] * g)
        ranking = rank_features(query[:q], gallery[:g], labels, backend=backend)
        assert (ranking.num_valid, ranking.num_queries) == (0, q)
        assert math.isnan(ranking.mAP)


# -- parts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("distance", ["cosine", "euclidean"])
def test_scores_do_not_depend_on_who_computes_which_blocks(distance, backend):
    query, gallery, labels = random_features(14, 1100, 100, dim=8)  # any features: bit for bit all the same
    ranker = Ranker(distance, make_backend(backend))
    whole = ranker.score_queries(query, gallery, labels).to_table()
    blocks = query_blocks(1100, 100)
    assert len(blocks) == 5
    for ranks in (2, 3, 7):
        table = np.full_like(whole, np.nan)
        for rank in range(ranks):
            mine = blocks[rank::ranks]
            part = ranker.score_queries(query, gallery, labels, mine).to_table()
            numbers = [q for block in mine for q in range(1100)[block]]
            assert part.shape == (len(numbers), ranker.num_columns)
            table[numbers] = part
        np.testing.assert_array_equal(table, whole)
    assert average_scores(QueryScores.from_table(whole)) == ranker.score(query, gallery, labels)


def test_invalid_queries_count_as_zeros_if_asked_for():
    query, gallery, labels = random_features(15, 100, 20)
    usual = Ranker().score(query, gallery, labels)
    assert 0 < usual.num_valid < 100
    with_zeros = Ranker(invalid_as_zero=True).score(query, gallery, labels)
    np.testing.assert_allclose(columns(with_zeros), np.array(columns(usual)) * usual.num_valid / 100, atol=1e-12)


# -- neighbours --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("distance", DRAWN)
@pytest.mark.parametrize("k", [1, 2, 5, 39, 40, 41, 1000])
def test_lists_are_the_head_of_a_stable_sort(distance, k):
    query, gallery, _, exact = exact_case(distance, 300, 40, seed=16)
    found = nearest(query, gallery, k, distance)
    order = np.argsort(-exact, axis=1, kind="stable")[:, :k]
    assert found.index.dtype == np.int64
    np.testing.assert_array_equal(found.index, order)
    values = np.take_along_axis(exact, order, 1)
    if distance == "euclidean":  # the similarity is half of the negative square, up to the query's own length
        values = (values + query.square().sum(1, keepdim=True).numpy()) / 2
    np.testing.assert_array_equal(found.similarity, values)


def test_lists_of_a_large_gallery_in_many_blocks(monkeypatch):
    monkeypatch.setattr(similarity, "_BLOCK_BYTES", 4 * 3000 * 17)
    query, gallery, _, exact = exact_case("cosine", 40, 3000, seed=17)
    for k in (1, 100, 2999):
        order = np.argsort(-exact, axis=1, kind="stable")[:, :k]
        np.testing.assert_array_equal(nearest(query, gallery, k).index, order)


@pytest.mark.parametrize("k", [1, 2, 5, 20])
def test_of_images_as_similar_as_the_last_one_the_first_are_listed(k):
    rng = np.random.default_rng(18)
    for values in (1, 2, 3, 10, 10**6):
        block = (rng.integers(0, values, (30, 20)) / values).astype(np.float32)
        index, found = top_of_block(torch.tensor(block), k)
        order = np.argsort(-block, axis=1, kind="stable")[:, :k]
        np.testing.assert_array_equal(index, order)
        np.testing.assert_array_equal(found, np.take_along_axis(block, order, 1))


def test_lists_of_an_empty_gallery_are_empty():
    found = nearest(torch.ones(2, 4), torch.ones(0, 4), 3)
    assert found.index.shape == found.similarity.shape == (2, 0)
    assert nearest(torch.ones(0, 4), torch.ones(2, 4), 3).index.shape == (0, 2)


# -- FAISS -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def faiss():
    return pytest.importorskip("faiss")


@pytest.fixture
def counted(monkeypatch):
    """Numbers of queries that FAISS's lists leave to counting."""
    numbers = []
    count = backends.count_ranks

    def count_and_note(block, labels):
        numbers.append(len(block))
        return count(block, labels)

    monkeypatch.setattr(backends, "count_ranks", count_and_note)
    return numbers


@pytest.mark.parametrize("distance", DRAWN)
@pytest.mark.parametrize("k", [1, 2, 5, 20, 59, 60, 61])
def test_faiss_gives_the_same_ranks_for_any_length_of_lists(faiss, counted, distance, k):
    ties_at_the_end = 0
    for seed in range(5):
        query, gallery, labels, exact = exact_case(distance, 300, 60, seed)
        expected = as_lists(positive_ranks(exact, labels))
        counted.clear()
        found = ranks_of(FaissBackend(k), query, gallery, labels, distance)
        assert found == expected
        assert all(type(rank) is int for row in found for rank in row)
        if k < 60:
            in_order = -np.sort(-exact, axis=1)
            ties_at_the_end += (in_order[:, k - 1] == in_order[:, k]).sum()
            assert 0 < sum(counted) < 300  # some by lists, some by counting
        else:
            assert counted == []
    assert (ties_at_the_end >= 50) == (k < 60)


@pytest.mark.parametrize("rules", [{"camera_aware": False}, {"junk_pids": (-1, 0, 3)}, {"own": True}])
def test_faiss_keeps_the_rules(faiss, counted, rules):
    rng = np.random.default_rng(19)
    gallery = signs(rng, 80, 16)
    query, pids, camids = gallery[:50], rng.integers(-1, 12, 80), rng.integers(0, 3, 80)
    if rules.get("own"):
        rules = {"own": np.arange(50), "camera_aware": False}
    labels = labels_of(pids[:50], camids[:50], pids, camids, **rules)
    expected = as_lists(positive_ranks(exact_similarity(query, gallery, "cosine"), labels))
    for k in (3, 40, 80):
        assert ranks_of(FaissBackend(k), query, gallery, labels) == expected
    assert counted


@pytest.mark.parametrize("distance", ["cosine", "euclidean"])
def test_faiss_scores_random_features_alike(faiss, distance):
    for seed in (20, 21):
        query, gallery, labels = random_features(seed, 400, 1500)
        expected = rank_features(query, gallery, labels, distance)
        for k in (10, 200, 1500):
            found = Ranker(distance, FaissBackend(k)).score(query, gallery, labels)
            assert abs(found.mAP - expected.mAP) * 100 <= 1e-4  # points
            assert (found.num_valid, found.num_queries) == (expected.num_valid, expected.num_queries)
        by_name = rank_features(query, gallery, labels, distance, backend="faiss")
        assert abs(by_name.mAP - expected.mAP) * 100 <= 1e-4


def test_faiss_under_autocast_and_of_low_precision(faiss):
    query, gallery, labels = random_features(22, 40, 100)
    expected = rank_features(query, gallery, labels, backend="faiss")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert rank_features(query, gallery, labels, backend="faiss") == expected
    half = query.bfloat16(), gallery.bfloat16()
    expected = rank_features(half[0].float(), half[1].float(), labels, backend="faiss")
    assert rank_features(*half, labels, backend="faiss") == expected


@pytest.mark.parametrize("distance", DRAWN)
@pytest.mark.parametrize("k", [1, 7, 60, 100])
def test_lists_of_faiss_are_those_of_torch_up_to_ties_at_the_end(faiss, distance, k):
    query, gallery, _, exact = exact_case(distance, 300, 60, seed=23)
    prepared = [backends._prepared(features, distance) for features in (query, gallery)]
    found, expected = backends._search(*prepared, k, distance), nearest(query, gallery, k, distance)
    assert found.index.dtype == np.int64
    values = np.take_along_axis(exact, expected.index, 1)  # euclidean: the negative square of the distance
    np.testing.assert_array_equal(found.similarity, values)
    before_the_last = values > values[:, -1:]
    whole = k >= 60
    assert found.index.shape == (300, min(k, 60))
    np.testing.assert_array_equal(found.index[before_the_last | whole], expected.index[before_the_last | whole])
    np.testing.assert_array_equal(np.take_along_axis(exact, found.index, 1), values)


def test_lists_are_never_longer_than_a_gpu_can_make_them(faiss):
    assert FaissBackend(k=100).k == 100
    assert FaissBackend(k=5000).k == 2048


class OnAGpu(Elsewhere):
    is_cuda = True


def test_what_faiss_cannot_do_on_a_gpu_is_said(faiss, monkeypatch):
    without_gpu = FaissBackend()
    monkeypatch.setitem(sys.modules, "faiss", types.SimpleNamespace(METRIC_INNER_PRODUCT=0, METRIC_L2=1))
    features = torch.ones(3000, 4).as_subclass(OnAGpu)
    with pytest.raises(ConfigError, match="at most 2048 neighbours on a GPU, not 2049; use torch"):
        without_gpu.nearest_units(features, features, 2049)
    with pytest.raises(ConfigError, match="cannot use the GPU; install faiss-gpu or use torch"):
        without_gpu.nearest_units(features, features, 2048)


def test_without_faiss_only_who_wants_it_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    query, gallery, labels = random_features(25, 4, 9)
    with pytest.raises(ConfigError, match=r"backend needs faiss; pip install 'fedsim-reid\[faiss\]', or use torch"):
        rank_features(query, gallery, labels, backend="faiss")
    expected = rank_features(query, gallery, labels, backend="torch")
    assert rank_features(query, gallery, labels, backend="auto") == rank_features(query, gallery, labels) == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_ranks_on_a_gpu_equal_those_on_a_cpu(precision):
    torch.set_float32_matmul_precision("medium")
    for distance in DRAWN:
        query, gallery, labels, exact = exact_case(distance, 600, 500, seed=26)
        found = ranks_of(TorchBackend(), query.cuda(), gallery.cuda(), labels, distance)
        assert found == as_lists(positive_ranks(exact, labels))
    query, gallery, labels = random_features(27, 600, 500)
    expected = rank_features(query, gallery, labels).mAP
    assert abs(rank_features(query.cuda(), gallery.cuda(), labels).mAP - expected) * 100 <= 1e-4
