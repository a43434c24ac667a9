"""``fedsim rank``: its numbers are those of plain loops over the definitions, and a mistake is one line."""

import json

import numpy as np
import pytest
import torch

from fedsim.__main__ import main
from fedsim.core.metrics import METRICS, RANKS
from fedsim.evaluation.reranking import rerank_blocks
from fedsim.functional.neighbours import nearest

Q, G, D = 12, 60, 5


def arrays(queries=Q, gallery=G, seed=0):
    """Lists with junk (-1), distractors (0), matches of the own camera, and a query without a match (9)."""
    rng = np.random.default_rng(seed)
    query_pids = rng.integers(1, 6, queries)
    query_pids[3] = 9
    return {
        "query": rng.standard_normal((queries, D)).astype(np.float32),
        "query_pids": query_pids,
        "query_camids": rng.integers(0, 3, queries),
        "gallery": rng.standard_normal((gallery, D)).astype(np.float32) * rng.uniform(0.5, 2, (gallery, 1)),
        "gallery_pids": rng.integers(-1, 6, gallery),
        "gallery_camids": rng.integers(0, 3, gallery),
    }


def save(path, content=None, **changes):
    content = (content or arrays()) | changes
    np.savez(path, **{name: array for name, array in content.items() if array is not None})
    return path


@pytest.fixture
def features(tmp_path):
    return save(tmp_path / "features.npz")


def run(capsys, *args):
    """What ``fedsim rank`` prints."""
    assert main(["rank", *map(str, args)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def scores_of(capsys, *args):
    return json.loads(run(capsys, *args, "--json"))


def refuse(capsys, *args):
    """Run a command that must fail; return its one line."""
    code = main(["rank", *map(str, args)])
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert code == 2, captured
    assert captured.out == ""
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("fedsim: error: ")
    return lines[0]


# -- the definitions as plain loops ------------------------------------------------------------------------------------


def distances_of(content, kind="cosine"):
    query, gallery = (content[name].astype(np.float64) for name in ("query", "gallery"))
    if kind == "euclidean":
        return np.linalg.norm(query[:, None] - gallery[None], axis=2)
    query, gallery = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (query, gallery))
    return 1 - query @ gallery.T


def lists_of(content, distances, camera_aware=True, junk_pids=(-1,)):
    """Per query the gallery positions that count, best first."""
    lists = []
    for q, row in enumerate(distances):
        found = []
        for g in np.argsort(row, kind="stable"):
            is_same = content["gallery_pids"][g] == content["query_pids"][q]
            is_near = content["gallery_camids"][g] == content["query_camids"][q]
            if content["gallery_pids"][g] not in junk_pids and not (camera_aware and is_same and is_near):
                found.append(int(g))
        lists.append(found)
    return lists


def expected_scores(content, distances=None, invalid_as_zero=False, **rules):
    distances = distances_of(content) if distances is None else distances
    rows = []
    for q, found in enumerate(lists_of(content, distances, **rules)):
        ranks = [r for r, g in enumerate(found, 1) if content["gallery_pids"][g] == content["query_pids"][q]]
        if not ranks:
            rows.append(None)
            continue
        before = [1.0 if r == 1 else j / (r - 1) for j, r in enumerate(ranks)]
        after = [j / r for j, r in enumerate(ranks, 1)]
        hits = [float(ranks[0] <= k) for k in RANKS]
        trapezoid = np.mean([(a + b) / 2 for a, b in zip(before, after, strict=True)])
        rows.append([*hits, np.mean(after), trapezoid, len(ranks) / ranks[-1]])
    valid = [row for row in rows if row is not None]
    means = np.sum(valid, axis=0) / (len(rows) if invalid_as_zero else len(valid))
    return dict(zip(METRICS, means.tolist(), strict=True)) | {"n_valid": len(valid), "n_queries": len(rows)}


def compare(found, expected):
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=1e-12), name


# -- scores ------------------------------------------------------------------------------------------------------------


def test_json_holds_fractions_of_1(capsys, features):
    found = scores_of(capsys, features)
    assert list(found) == [*METRICS, "n_valid", "n_queries", "cmc"]
    compare(found, expected_scores(arrays()))
    assert (found["n_valid"], found["n_queries"]) == (Q - 1, Q)
    assert len(found["cmc"]) == 50
    assert [found["cmc"][k - 1] for k in RANKS] == [found[f"rank{k}"] for k in RANKS]


def test_the_table_holds_percent(capsys, features):
    lines = run(capsys, features).splitlines()
    expected = expected_scores(arrays())
    assert lines[0].split() == list(METRICS)
    assert lines[2].split() == [f"{100 * expected[name]:.2f}" for name in METRICS]
    assert "11 of 12 queries" in lines[-1]


@pytest.mark.parametrize("seed", range(1, 6))
def test_random_files_equal_the_loops(capsys, tmp_path, seed):
    content = arrays(queries=7 + seed, gallery=10 * seed, seed=seed)  # also fewer than 50 gallery images
    compare(scores_of(capsys, save(tmp_path / "f.npz", content)), expected_scores(content))


OPTIONS = {
    "--camera_aware=false": {"camera_aware": False},
    "--junk_pids=[]": {"junk_pids": ()},
    "--junk_pids=[-1,0,2]": {"junk_pids": (-1, 0, 2)},
    "--invalid_as_zero": {"invalid_as_zero": True},
    "--distance=euclidean": {"distances": distances_of(arrays(), "euclidean")},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_options_change_what_they_say(capsys, features, option):
    expected = expected_scores(arrays(), **OPTIONS[option])
    assert expected != expected_scores(arrays())
    compare(scores_of(capsys, features, option), expected)


def test_options_go_together(capsys, features):
    found = scores_of(capsys, features, *OPTIONS)
    rules = {name: value for rule in OPTIONS.values() for name, value in rule.items()}
    compare(found, expected_scores(arrays(), **rules))


def test_without_cameras(capsys, tmp_path):
    path = save(tmp_path / "f.npz", query_camids=None, gallery_camids=None)
    compare(scores_of(capsys, path, "--camera_aware=false"), expected_scores(arrays(), camera_aware=False))
    assert "query_camids" in refuse(capsys, path)


def test_galleries_with_one_image_per_identity(capsys, features):
    content = arrays()
    chances = []
    for q, found in enumerate(lists_of(content, distances_of(content))):
        pids = content["gallery_pids"][found]
        matches = np.flatnonzero(pids == content["query_pids"][q])
        if len(matches):  # the match that is drawn comes first if of no other identity a better image is drawn
            others = [np.flatnonzero(pids == pid) for pid in np.unique(pids) if pid != content["query_pids"][q]]
            chances.append(np.mean([np.prod([(others_ > m).mean() for others_ in others]) for m in matches]))
    found = scores_of(capsys, features, "--single_gallery_shot")
    assert found["rank1"] == pytest.approx(np.mean(chances), abs=1e-12)
    assert 0 < found["rank1"] < 1
    expected = expected_scores(content)
    compare({**found, "rank1": 0}, {name: expected[name] for name in ("mAP", "mAP_trapezoid", "mINP", "n_valid")})


def test_half_precision_is_ranked_in_float32(capsys, tmp_path):
    content = arrays()
    content |= {name: content[name].astype(np.float16) for name in ("query", "gallery")}
    compare(scores_of(capsys, save(tmp_path / "f.npz", content)), expected_scores(content))


@pytest.mark.parametrize("options", [[], ["--distance=euclidean"], ["--rerank"], ["--expand=3"]], ids=" ".join)
def test_faiss_finds_the_same(capsys, features, options):
    pytest.importorskip("faiss")
    torchs, faisss = (scores_of(capsys, features, *options, f"--backend={name}") for name in ("torch", "faiss"))
    assert torchs == faisss == scores_of(capsys, features, *options)


# -- expansion and re-ranking ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.0, 3.0])
def test_queries_are_expanded_by_their_nearest_images(capsys, features, alpha):
    content = arrays()
    query, gallery = (content[name].astype(np.float64) for name in ("query", "gallery"))
    query, gallery = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (query, gallery))
    expanded = []
    for row in query:
        near = np.argsort(-gallery @ row)[:4]
        expanded.append(row + sum(max(gallery[g] @ row, 0) ** alpha * gallery[g] for g in near))
    expected = expected_scores(content, distances_of(content | {"query": np.array(expanded)}))
    assert expected != expected_scores(content)
    compare(scores_of(capsys, features, "--expand=4", f"--alpha={alpha}"), expected)


def test_expansion_does_not_mix_short_queries_with_long_images(capsys, tmp_path):
    # each person's images lie close together, far from all others; persons differ in how far from the origin
    rng = np.random.default_rng(0)
    people = 5 * rng.standard_normal((20, 16))
    query, gallery = (x + 0.3 * rng.standard_normal(x.shape) for x in (people, np.tile(people, (4, 1))))
    path = tmp_path / "f.npz"
    np.savez(path, query=query, gallery=gallery, query_pids=np.arange(20), gallery_pids=np.tile(np.arange(20), 4))
    options = [str(path), "--camera_aware=false", "--json"]
    for distance in ("cosine", "euclidean"):
        assert scores_of(capsys, *options, f"--distance={distance}")["mAP"] == 1
    assert scores_of(capsys, *options, "--expand=2")["mAP"] == 1
    code = main(["rank", *options, "--expand=2", "--distance=euclidean"])
    captured = capsys.readouterr()
    assert (code == 2 and "expand" in captured.err) or json.loads(captured.out)["mAP"] == 1


def reranked(content, **options):
    query, gallery = (torch.from_numpy(content[name]) for name in ("query", "gallery"))
    return np.concatenate([block for _, block in rerank_blocks(query, gallery, nearest, **options)])


@pytest.mark.parametrize(
    ("options", "values"),
    [([], {}), (["--k1=5", "--k2=2"], {"k1": 5, "k2": 2}), (["--lambda_=0.7"], {"lambda_": 0.7})],
    ids=["defaults", "k1 and k2", "lambda"],
)
def test_reranking(capsys, features, options, values):
    content = arrays()
    expected = expected_scores(content, reranked(content, **values))
    assert expected != expected_scores(content)
    compare(scores_of(capsys, features, "--rerank", *options), expected)


def test_reranking_with_other_rules(capsys, features):
    content = arrays()
    rules = {"camera_aware": False, "junk_pids": (-1, 2), "invalid_as_zero": True}
    found = scores_of(capsys, features, "--rerank", "--camera_aware=false", "--junk_pids=[-1,2]", "--invalid_as_zero")
    compare(found, expected_scores(content, reranked(content), **rules))


def test_lambda_1_is_the_original_order(capsys, features, tmp_path):
    plain = scores_of(capsys, features, "--save_ranking", tmp_path / "plain.npz")
    same = scores_of(capsys, features, "--rerank", "--lambda_=1", "--save_ranking", tmp_path / "same.npz")
    assert plain == same
    lists = [np.load(tmp_path / f"{name}.npz")["index"] for name in ("plain", "same")]
    np.testing.assert_array_equal(*lists)
    assert plain != scores_of(capsys, features, "--rerank")


def test_reranking_shots(capsys, features):
    found = scores_of(capsys, features, "--rerank", "--single_gallery_shot")
    assert found["mAP"] == scores_of(capsys, features, "--rerank")["mAP"]
    assert 0 < found["rank1"] < 1


# -- verification ------------------------------------------------------------------------------------------------------


def expected_rates(content, distances):
    """The rates of docs/evaluation.md, by loops over thresholds."""
    positive, negative = [], []
    for q, found in enumerate(lists_of(content, distances)):
        for g in found:
            is_match = content["gallery_pids"][g] == content["query_pids"][q]
            (positive if is_match else negative).append(distances[q, g])
    rates = {}
    for name, most in (("1e-2", 0.01), ("1e-3", 0.001), ("1e-4", 0.0001)):
        allowed = [d for d in positive if np.mean(np.array(negative) <= d) <= most]
        rates[f"TPR@FPR={name}"] = np.mean(np.array(positive) <= max(allowed)) if allowed else 0.0
    return rates | {"n_positive_pairs": len(positive), "n_negative_pairs": len(negative)}


@pytest.mark.parametrize("distance", ["cosine", "euclidean"])
def test_verification_is_given_beside_ranks(capsys, tmp_path, distance):
    content = arrays(60, 300)
    content["gallery"][:200] /= 4  # so that a query's own length matters
    same = content["query_pids"][:, None] == content["gallery_pids"]
    for q in range(0, 60, 7):
        content["gallery"][np.flatnonzero(same[q])[:2]] = content["query"][q]
    path = save(tmp_path / "f.npz", content)
    options = [path, f"--distance={distance}"]
    found, expected = (
        scores_of(capsys, *options, "--verification"),
        expected_rates(content, distances_of(content, distance)),
    )
    assert found["TPR@FPR=1e-2"] > 0
    compare(found, expected)
    assert {name: value for name, value in found.items() if name not in expected} == scores_of(capsys, *options)
    lines = run(capsys, *options, "--verification").splitlines()
    assert lines[: len(lines) - 6] == run(capsys, *options).splitlines()
    rates = [name for name in expected if "@" in name]
    assert lines[-5].split() == rates
    assert lines[-3].split() == [f"{100 * expected[name]:.2f}" for name in rates]
    counts = [f"{expected[f'n_{kind}_pairs']:,}" for kind in ("positive", "negative")]
    assert lines[-1] == f"in percent, over all queries together; {counts[0]} pairs of one identity, {counts[1]} of two"


def test_verification_of_expanded_queries(capsys, features):
    plain, expanded = (scores_of(capsys, features, "--verification", *more) for more in ([], ["--expand=5"]))
    assert plain["n_positive_pairs"] == expanded["n_positive_pairs"]
    assert plain["mAP"] != expanded["mAP"]


def test_the_roc_curve_has_the_rates_of_the_table(capsys, tmp_path, features, monkeypatch):
    drawn = []
    monkeypatch.setattr("fedsim.cli.rank.save_figure", lambda figure, path, option: drawn.append(figure))
    rates = scores_of(capsys, features, "--roc", tmp_path / "roc.png")
    assert rates == scores_of(capsys, features, "--verification")
    [axes] = drawn.pop().axes
    x, y = (np.asarray(values) for values in axes.lines[0].get_data())
    assert (np.diff(x) >= 0).all()
    assert (np.diff(y) >= 0).all()
    assert (y[0], y[-1]) == (0, 1)
    for name in ("1e-2", "1e-3", "1e-4"):
        share = y[x <= max(float(name), x[0])].max()
        assert share == pytest.approx(rates[f"TPR@FPR={name}"])
        assert f"{name}: {100 * share:.1f} %" in [text.get_text() for text in axes.texts]
    axes.figure.draw_without_rendering()
    assert {"0.01", "0.1", "1"} <= {text.get_text() for text in axes.get_xticklabels()}


def test_verification_without_negative_pairs(capsys, tmp_path):
    path = save(tmp_path / "f.npz", query_pids=np.ones(Q, int), gallery_pids=np.ones(G, int))
    found = scores_of(capsys, path, "--verification")
    assert found["n_negative_pairs"] == 0
    assert np.isnan([found[f"TPR@FPR={name}"] for name in ("1e-2", "1e-3", "1e-4")]).all()
    assert run(capsys, path, "--verification").splitlines()[-3].split() == ["-", "-", "-"]
    assert "--roc: there is no pair of two identities" in refuse(capsys, path, "--roc", tmp_path / "roc.png")


# -- ranked lists ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gallery", [G, 20])
@pytest.mark.parametrize("options", [[], ["--distance=euclidean"], ["--rerank"], ["--junk_pids=[-1,0]"]], ids=" ".join)
def test_saved_lists(capsys, tmp_path, gallery, options):
    content = arrays(gallery=gallery)
    path = tmp_path / "new folder" / "lists.npz"
    run(capsys, save(tmp_path / "f.npz", content), "--save_ranking", path, *options)
    distances = distances_of(content, "euclidean" if "--distance=euclidean" in options else "cosine")
    distances = reranked(content) if "--rerank" in options else distances
    junk_pids = (-1, 0) if options and "junk" in options[0] else (-1,)
    lists = dict(np.load(path))
    assert set(lists) == {"index", "similarity", "is_match"}
    assert lists["index"].shape == lists["is_match"].shape == lists["similarity"].shape == (Q, min(50, gallery))
    for q, found in enumerate(lists_of(content, distances, junk_pids=junk_pids)):
        row = lists["index"][q]
        assert row[row >= 0].tolist() == found[:50]
        assert (row[len(found) :] == -1).all()
        assert lists["is_match"][q].tolist() == [g >= 0 and content["gallery_pids"][g] == content["query_pids"][q]
                                                 for g in row]  # fmt: skip
        assert (np.isfinite(lists["similarity"][q]) == (row >= 0)).all()
        assert (np.diff(lists["similarity"][q][row >= 0]) <= 0).all()
    assert lists["is_match"].any()
    if gallery == 20:
        assert (lists["index"] == -1).any()


def test_similarities_of_lists_are_cosines(capsys, features, tmp_path):
    run(capsys, features, "--save_ranking", tmp_path / "lists.npz")
    lists = np.load(tmp_path / "lists.npz")
    cosines = np.take_along_axis(1 - distances_of(arrays()), lists["index"], 1)
    np.testing.assert_allclose(lists["similarity"], np.where(lists["index"] < 0, -np.inf, cosines), atol=1e-6)


def test_lists_do_not_change_scores(capsys, features, tmp_path):
    assert scores_of(capsys, features) == scores_of(capsys, features, "--save_ranking", tmp_path / "lists.npz")


# -- help and mistakes -------------------------------------------------------------------------------------------------


def test_help(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["rank", "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for option in ("features", "--distance", "--camera_aware", "--junk_pids", "--invalid_as_zero", "--backend",
                   "--single_gallery_shot", "--device", "--expand", "--alpha", "--rerank", "--k1", "--k2", "--lambda_",
                   "--verification", "--save_ranking", "--json"):  # fmt: skip
        assert option in text
    assert "fedsim rank" in text


@pytest.mark.parametrize("options", [[], ["--rerank"], ["--expand=2"], ["--backend=faiss"], ["--distance=euclidean"]],
                         ids=" ".join)  # fmt: skip
@pytest.mark.parametrize(("name", "image", "value"), [("query", 7, np.nan), ("gallery", 41, np.inf)])
def test_features_that_are_not_finite_are_named(capsys, tmp_path, options, name, image, value):
    if "--backend=faiss" in options:
        pytest.importorskip("faiss")
    content = arrays()
    content[name][image, 2] = value
    path = save(tmp_path / "f.npz", content)
    assert f"{path}: {name}: the features of image {image} are not finite" in refuse(capsys, path, *options)


@pytest.mark.parametrize("options", [[], ["--rerank"], ["--expand=2"], ["--distance=euclidean"]], ids=" ".join)
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_features_that_are_finite_and_too_large_are_called_so(capsys, tmp_path, options, kind):
    content = arrays()
    content["gallery"] = content["gallery"].astype(kind)
    content["gallery"][41] = 1e20
    line = refuse(capsys, save(tmp_path / "f.npz", content), *options)
    assert "gallery: the features of image 41 reach 1e+20, and float32 cannot hold their length; write " in line


def test_without_any_match_the_reason_is_given(capsys, tmp_path):
    content, path = arrays(), tmp_path / "f.npz"
    zeros = {"query_camids": np.zeros(Q, int), "gallery_camids": np.zeros(G, int)}
    for changes, reason in (
        ({"query_pids": content["query_pids"] + 100}, "no identity of the queries is in the gallery"),
        ({"query_pids": np.full(Q, -1)}, "are junk (-1)"),
        (zeros, "own camera; set camera_aware to false"),
    ):
        line = refuse(capsys, save(path, content, **changes))
        assert f"{path}: no query has a match: " in line
        assert reason in line
    compare(scores_of(capsys, save(path, content, **zeros), "--camera_aware=false"),
            expected_scores(content, camera_aware=False))  # fmt: skip


def test_wrong_files(capsys, tmp_path):
    garbage = tmp_path / "garbage.npz"
    garbage.write_bytes(b"no archive")
    assert f"{garbage}: cannot be read as an npz file" in refuse(capsys, garbage)
    assert "nowhere.npz" in refuse(capsys, tmp_path / "nowhere.npz")
    assert str(tmp_path) in refuse(capsys, tmp_path)
    assert "there is no array gallery_pids" in refuse(capsys, save(tmp_path / "f.npz", gallery_pids=None))


MISTAKES = [
    (["--rerank", "--k1=0"], "k1: 0"),
    (["--rerank", "--k2=30"], "--k2: 30"),
    (["--rerank", "--lambda_=2"], "lambda_: 2.0"),
    (["--rerank", "--distance=euclidean"], "--rerank"),
    (["--rerank", "--verification"], "--verification: not with --rerank"),
    (["--rerank", "--roc=roc.png"], "--roc: not with --rerank"),
    (["--device=tpu9"], "--device: there is no device tpu9; choose from cpu"),
    (["--device=cuda:77"], "--device: cuda:77 is not here; choose from cpu"),
    (["--nonsense=1"], "nonsense"),
    (["surplus"], "surplus"),
    (["--distance=manhattan"], "'cosine', 'euclidean'"),
    (["--backend=scann"], "'auto', 'torch', 'faiss'"),
    (["--camera_aware=perhaps"], "camera_aware"),
    (["--junk_pids=[a]"], "junk_pids"),
    (["--k1=many"], "k1: expected int"),
    (["--lambda_=0.7"], "--lambda_: has no effect without --rerank; add that, or leave --lambda_ out"),
    (["--alpha=3"], "--alpha: has no effect without --expand"),
    (["--expand=-1"], "expand"),
]


@pytest.mark.parametrize(("options", "text"), MISTAKES, ids=[" ".join(options) for options, _ in MISTAKES])
def test_a_mistake_is_one_line(capsys, features, options, text):
    assert text in refuse(capsys, features, *options)


def test_the_file_is_not_optional(capsys):
    line = refuse(capsys)
    assert "features" in line
    assert "fedsim rank --help" in line


def test_a_place_that_cannot_be_written_is_one_line(capsys, features, tmp_path):
    assert str(tmp_path) in refuse(capsys, features, "--save_ranking", tmp_path)  # is a folder
    below_a_file = features / "lists.npz"
    assert str(below_a_file.parent) in refuse(capsys, features, "--save_ranking", below_a_file)
