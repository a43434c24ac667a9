"""k-reciprocal re-ranking against the equations written as loops over sets, and query expansion against loops."""

import math
import tracemalloc

import numpy as np
import pytest
import torch
from scipy import sparse
from sklearn.cluster import DBSCAN

from fedsim.core.errors import ConfigError
from fedsim.evaluation.reranking import expand_queries, rerank_blocks
from fedsim.functional.neighbours import Neighbours
from fedsim.functional.reciprocal import encode, jaccard_blocks, sparse_jaccard


def exact_search(query, gallery, k):
    """Rounded before the sort, so that duplicates tie whatever the matrix product's order of additions."""
    similarity = (query.double() @ gallery.double().T).numpy()
    order = np.argsort(-similarity.round(6), axis=1, kind="stable")[:, :k]
    return Neighbours(order, np.take_along_axis(similarity, order, axis=1).astype(np.float32))


def clustered(num, seed, noise=0.9, dim=8, per=6):
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(-(-num // per), dim))
    features = np.repeat(centres, per, axis=0)[:num] + noise * rng.normal(size=(num, dim))
    return torch.tensor(features * rng.uniform(0.5, 2, size=(num, 1)), dtype=torch.float32)


def with_duplicates(num, seed):
    features = clustered(num, seed)
    features[num // 2 :] = features[: num - num // 2]
    features[::5] = features[0]
    return features


# -- the reference: nothing but sets, dictionaries and loops -----------------------------------------------------------


class Reference:
    def __init__(self, features, k1, k2, scale, rules="code"):
        self.is_strict = rules == "code"
        x = features.double().numpy()
        x = x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
        self.num = len(x)
        cos = [[float(np.dot(a, b)) for b in x] for a in x]
        self.cos = cos
        self.order = []
        for p in range(self.num):
            others = sorted((q for q in range(self.num) if q != p), key=lambda q, p=p: (-round(cos[p][q], 6), q))
            self.order.append([p, *others])
        self.d = [[max(2 - 2 * cos[p][q], 0) for q in range(self.num)] for p in range(self.num)]
        if scale == "farthest":
            self.d = [[value / max(*row, 1e-6) for value in row] for row in self.d]
        v = [self.weights(p, k1) for p in range(self.num)]
        self.v = [self.mean([v[q] for q in self.order[p][:k2]]) for p in range(self.num)]

    def reciprocal(self, p, k):
        """Eqs. 2 and 3."""
        return {q for q in self.order[p][: k + 1] if p in self.order[q][: k + 1]}

    def robust(self, p, k):
        """Eq. 4; the authors' code asks for more than two thirds."""
        grown = set(self.reciprocal(p, k))
        for q in self.reciprocal(p, k):
            candidates = self.reciprocal(q, round(k / 2))
            threefold = 3 * len(self.reciprocal(p, k) & candidates)
            if threefold > 2 * len(candidates) or (threefold == 2 * len(candidates) and not self.is_strict):
                grown |= candidates
        return grown

    def weights(self, p, k):
        """Eq. 7, and a sum of 1."""
        weights = {q: math.exp(-self.d[p][q]) for q in self.robust(p, k)}
        return {q: weight / sum(weights.values()) for q, weight in weights.items()}

    def mean(self, codes):
        """Eq. 11."""
        total = {}
        for code in codes:
            for q, weight in code.items():
                total[q] = total.get(q, 0) + weight / len(codes)
        return total

    def jaccard(self, p, g):
        """Eq. 10."""
        low = sum(min(self.v[p].get(q, 0), self.v[g].get(q, 0)) for q in range(self.num))
        high = sum(max(self.v[p].get(q, 0), self.v[g].get(q, 0)) for q in range(self.num))
        return 1 - low / high

    def encodings(self):
        return np.array([[self.v[p].get(q, 0) for q in range(self.num)] for p in range(self.num)])

    def distances(self):
        return np.array([[self.jaccard(p, g) for g in range(self.num)] for p in range(self.num)])


CASES = {
    "usual": (clustered(60, 0), 8, 3),
    "another seed": (clustered(55, 1, noise=1.5), 10, 4),
    "the paper's sizes": (clustered(60, 2, per=20), 20, 6),
    "no expansion": (clustered(50, 3), 6, 1),
    "odd k1, half of it rounded to even": (clustered(50, 4), 5, 2),
    "k1 = 1": (clustered(40, 5), 1, 1),
    "k2 = k1": (clustered(40, 6), 4, 4),
    "fewer images than neighbours": (clustered(7, 7), 20, 6),
    "fewer images than k2": (clustered(4, 8), 20, 6),
    "one image": (clustered(1, 9), 20, 6),
    "duplicates": (with_duplicates(48, 10), 8, 3),
    "more duplicates than neighbours": (with_duplicates(60, 11), 3, 2),
    "unclustered": (clustered(60, 12, per=1), 12, 5),
}


@pytest.fixture(params=CASES, scope="module")
def case(request):
    features, k1, k2 = CASES[request.param]
    number = list(CASES).index(request.param)  # every second case has the other scale, and the next two other rules
    scale, rules = ("farthest", "none")[number % 2], ("code", "paper")[number // 2 % 2]
    encodings = encode(features, exact_search, k1, k2, scale=scale, rules=rules)
    return Reference(features, k1, k2, scale, rules), encodings


def dense(encodings, rows, columns, block=256):
    return np.concatenate([d for _, d in jaccard_blocks(encodings, rows, columns, block)])


def test_encodings_equal_loops_over_sets(case):
    reference, encodings = case
    assert isinstance(encodings, sparse.csr_array)
    assert encodings.dtype == np.float32
    assert encodings.has_canonical_format
    assert (encodings.data > 0).all()
    np.testing.assert_allclose(encodings.toarray(), reference.encodings(), atol=1e-6)


def test_jaccard_distances_equal_loops(case):
    reference, encodings = case
    every = np.arange(reference.num)
    distances = dense(encodings, every, every, block=16)
    assert distances.dtype == np.float32
    np.testing.assert_allclose(distances, reference.distances(), atol=2e-6)
    assert (np.diag(distances) < 1e-6).all()


def test_sparse_distances_equal_dense_ones_up_to_eps(case):
    reference, encodings = case
    every = np.arange(reference.num)
    distances = dense(encodings, every, every)
    for eps in (0.3, 0.6, float(distances.flat[len(distances) // 2]) or 0.5):  # the last one occurs
        if eps == 1:
            continue
        near = sparse_jaccard(encodings, eps)
        assert near.nnz == (distances <= eps).sum()
        stored = near.tocoo()
        np.testing.assert_array_equal(stored.data, distances[stored.row, stored.col])
        assert (near.diagonal() < 1e-6).all()
        assert near.has_canonical_format
        np.testing.assert_array_equal(near.toarray(), near.T.toarray())
        assert near.indices.dtype == np.int32
        assert set(zip(every, every, strict=True)) <= set(zip(stored.row, stored.col, strict=True))


def test_expansion_case_is_not_empty():
    # the cases above would not test Eq. 4 if no set ever grew
    reference = Reference(CASES["usual"][0], 8, 3, "none")
    assert any(reference.robust(p, 8) > reference.reciprocal(p, 8) for p in range(reference.num))
    assert any(
        3 * len(reference.reciprocal(p, 8) & reference.reciprocal(q, 4)) == 2 * len(reference.reciprocal(q, 4))
        for p in range(reference.num)
        for q in reference.reciprocal(p, 8)
    )


# -- consumers ---------------------------------------------------------------------------------------------------------


def rerank(query, gallery, **options):
    blocks = list(rerank_blocks(query, gallery, exact_search, **options))
    places = np.concatenate([np.arange(len(query))[part] for part, _ in blocks])
    assert places.tolist() == list(range(len(query)))
    return np.concatenate([distance for _, distance in blocks])


@pytest.mark.parametrize("rules", ["code", "paper"])
@pytest.mark.parametrize("scale", ["farthest", "none"])
@pytest.mark.parametrize("seed", [0, 1])
def test_final_distances_equal_loops(scale, seed, rules):
    features = clustered(50, seed)[torch.randperm(50, generator=torch.Generator().manual_seed(seed))]
    found = rerank(features[:15], features[15:], k1=7, k2=3, lambda_=0.3, scale=scale, rules=rules, block=4)
    reference = Reference(features, 7, 3, scale, rules)
    expected = [[0.7 * reference.jaccard(q, g) + 0.3 * reference.d[q][g] for g in range(15, 50)] for q in range(15)]
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=2e-6)


def test_published_numbers_are_scaled_and_strict_by_default():
    features = clustered(30, 0)
    default = rerank(features[:10], features[10:])
    np.testing.assert_array_equal(default, rerank(features[:10], features[10:], scale="farthest"))
    assert (default != rerank(features[:10], features[10:], scale="none")).any()
    np.testing.assert_array_equal(default, rerank(features[:10], features[10:], rules="code"))
    assert (default != rerank(features[:10], features[10:], rules="paper")).any()


def test_lambda_1_keeps_the_original_order_and_lambda_0_is_jaccard_alone():
    features = clustered(40, 3)
    query, gallery = features[:12], features[12:]
    cosine = torch.nn.functional.normalize(query) @ torch.nn.functional.normalize(gallery).T
    original = torch.argsort(-cosine, dim=1, stable=True).numpy()
    np.testing.assert_array_equal(np.argsort(rerank(query, gallery, k1=6, k2=2, lambda_=1), kind="stable"), original)
    encodings = encode(features, exact_search, 6, 2)
    jaccard = dense(encodings, np.arange(12), np.arange(12, 40))
    np.testing.assert_array_equal(rerank(query, gallery, k1=6, k2=2, lambda_=0), jaccard)


def test_blocks_do_not_change_a_bit():
    features = clustered(40, 4)
    encodings = encode(features, exact_search, 6, 2)
    rows, columns = np.array([5, 3, 39, 3]), np.array([7, 0, 39])
    whole = dense(encodings, rows, columns)
    np.testing.assert_array_equal(dense(encodings, rows, columns, block=3), whole)
    np.testing.assert_array_equal(dense(encodings, np.arange(40), np.arange(40))[np.ix_(rows, columns)], whole)


def test_reranking_helps_where_a_neighbourhood_is_clear():
    # a query on the edge of its identity: others are as near to it, but do not share its neighbours
    features = clustered(60, 5, noise=0.55, dim=16, per=10)
    pids = np.repeat(np.arange(6), 10)

    def precision_at_9(distance):
        order = np.argsort(distance, axis=1, kind="stable")[:, 1:10]
        return (pids[order] == pids[:, None]).mean()

    unit = torch.nn.functional.normalize(features)
    encodings = encode(features, exact_search, 9, 4)
    every = np.arange(60)
    assert precision_at_9(dense(encodings, every, every)) > precision_at_9(-(unit @ unit.T).numpy())


@pytest.mark.parametrize("eps", [0.3, 0.5, 0.7])
@pytest.mark.filterwarnings("error::scipy.sparse.SparseEfficiencyWarning")
def test_dbscan_labels_equal_those_of_the_dense_matrix(eps):
    # three loose groups, lone images and a few duplicates; scipy would warn if the diagonal were missing
    loose, lone = clustered(45, 6, noise=0.5, per=15), clustered(15, 7, per=1)
    features = torch.cat([loose, lone, loose[:3]])
    encodings = encode(features, exact_search, 10, 3, scale="none")
    every = np.arange(len(features))
    expected = DBSCAN(eps=eps, min_samples=4, metric="precomputed").fit_predict(dense(encodings, every, every))
    found = DBSCAN(eps=eps, min_samples=4, metric="precomputed").fit_predict(sparse_jaccard(encodings, eps))
    np.testing.assert_array_equal(found, expected)
    assert 2 <= len(set(expected)) < len(features)


def test_dbscan_counts_a_distance_of_eps_as_near():
    code = np.array([[0.5, 0.5, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]], dtype=np.float32)
    encodings = sparse.csr_array(code)
    eps = float(dense(encodings, np.array([0]), np.array([1]))[0, 0])
    labels = DBSCAN(eps=eps, min_samples=2, metric="precomputed").fit_predict(sparse_jaccard(encodings, eps))
    assert labels.tolist() == [0, 0, -1, -1]


# -- memory, wrong options, odd inputs ---------------------------------------------------------------------------------


def test_memory_stays_far_below_a_dense_matrix():
    num = 3000
    features = clustered(num, 0, dim=16, per=10)

    def in_parts(query, gallery, k):
        found = [(part @ gallery.T).topk(k) for part in query.split(100)]
        return Neighbours(torch.cat([f.indices for f in found]).numpy(), torch.cat([f.values for f in found]).numpy())

    tracemalloc.start()
    try:
        encodings = encode(features, in_parts)
        for _ in jaccard_blocks(encodings, np.arange(num), np.arange(num), block=32):
            pass
        near = sparse_jaccard(encodings, 0.6)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert encodings.nnz < 300 * num
    assert near.nnz < 300 * num
    assert peak < num * num * 4 / 2


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"k1": 0, "k2": 0}, "k1"),
        ({"k2": 0}, "k2"),
        ({"k1": 5, "k2": 6}, "k2"),
        ({"lambda_": -0.1}, "lambda_"),
        ({"lambda_": 1.1}, "lambda_"),
        ({"lambda_": math.nan}, "lambda_"),
        ({"scale": "largest"}, "scale"),
    ],
)
def test_wrong_options_are_named_before_any_search(options, name):
    def search(query, gallery, k):
        raise AssertionError("searched")

    with pytest.raises(ConfigError, match=f"^{name}: "):
        rerank_blocks(clustered(3, 0), clustered(3, 1), search, **options)
    if name != "lambda_":
        with pytest.raises(ConfigError, match=f"^{name}: "):
            encode(clustered(3, 0), search, **options)


@pytest.mark.parametrize("eps", [0, 1, -0.5, math.nan])
def test_wrong_eps_is_named(eps):
    with pytest.raises(ConfigError, match=r"^eps: "):
        sparse_jaccard(encode(clustered(5, 0), exact_search), eps)


@pytest.mark.parametrize("answer", ["padded", "outside", "short"])
def test_a_search_that_answers_wrongly_is_refused(answer):
    def search(query, gallery, k):
        found = exact_search(query, gallery, k)
        if answer == "short":
            return Neighbours(found.index[:, 1:], found.similarity[:, 1:])
        found.index[0, -1] = -1 if answer == "padded" else len(gallery)
        return found

    with pytest.raises(ValueError, match=r"^the search returned"):
        encode(clustered(9, 0), search, 4, 2)


def test_equal_and_zero_features_give_finite_distances():
    query, gallery = torch.ones(2, 4), torch.cat([torch.ones(30, 4), torch.zeros(2, 4)])
    for features in (gallery, gallery[:30]):
        distance = rerank(query, features)
        assert np.isfinite(distance).all()
        assert (distance >= 0).all()


def test_rounding_makes_no_distance_negative():
    features = clustered(300, 0)
    assert rerank(features, features, lambda_=1).min() >= 0  # float32 cosines of some of these with themselves exceed 1


def test_features_of_any_float_type():
    features = clustered(30, 0).to(torch.bfloat16)
    np.testing.assert_array_equal(
        encode(features, exact_search).toarray(), encode(features.float(), exact_search).toarray()
    )


# -- query expansion ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.0, 1.0, 3.0, 0.5])
@pytest.mark.parametrize("k", [1, 4, 100])
def test_expanded_queries_equal_loops(alpha, k):
    query, gallery = clustered(9, 0), clustered(20, 1)
    q, g = (x.double().numpy() / np.linalg.norm(x.double().numpy(), axis=1, keepdims=True) for x in (query, gallery))
    expected = []
    for x in q:
        total = x.copy()
        for y in sorted(g, key=lambda y, x=x: -x @ y)[:k]:
            total += y if alpha == 0 else max(x @ y, 0) ** alpha * y
        expected.append(total / np.linalg.norm(total))
    found = expand_queries(query, gallery, exact_search, k, alpha)
    assert found.dtype is torch.float32
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-5)


def test_wrong_options_of_query_expansion_are_named():
    with pytest.raises(ConfigError, match=r"^k: "):
        expand_queries(clustered(3, 0), clustered(3, 1), exact_search, 0)
    for alpha in (-1.0, math.nan):
        with pytest.raises(ConfigError, match=r"^alpha: "):
            expand_queries(clustered(3, 0), clustered(3, 1), exact_search, 2, alpha)
