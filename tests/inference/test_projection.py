"""Features as points of the plane, against numpy's eigenvectors; samples, files and figures; what is refused."""

import csv
import os
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from sklearn.decomposition import PCA
from sklearn.manifold import TSNE
from threadpoolctl import threadpool_info, threadpool_limits

import fedsim
from fedsim.__main__ import main
from fedsim.core.errors import ConfigError, DataError
from fedsim.core.replaced_run import files_of_run
from fedsim.data.images import ImageArray
from fedsim.evaluation.ranking import RetrievalLabels
from fedsim.evaluation.settings import Evaluation
from fedsim.inference.projection import place_on_plane, project_features, sample_people
from fedsim.inference.run_features import ModelOnSet, RunFeatures
from runs_of_sites import SETS, runs_of_sites
from small import refuse


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return runs_of_sites(tmp_path_factory.mktemp("projection"), unmatched=["park"])


@pytest.fixture
def run(folder, tmp_path):
    return shutil.copytree(folder / "pav", tmp_path / "run")


@pytest.fixture
def results(folder):
    return fedsim.load_run(folder / "pav")


def change_features(run, name, change):
    """Replace the features of a test set by what ``change`` makes of them."""
    path = run / "features" / f"{name}.npz"
    arrays = dict(np.load(path))
    np.savez(path, **{key: change(value) if key in ("query", "gallery") else value for key, value in arrays.items()})


# -- the points --------------------------------------------------------------------------------------------------------


def by_eigenvectors(features):
    """Points and shares from all eigenvectors of the covariance, with the largest loading of each positive."""
    centred = features - features.mean(axis=0)
    values, vectors = np.linalg.eigh(centred.T @ centred)
    vectors = vectors[:, ::-1][:, :2]
    vectors = vectors * np.sign(vectors[np.abs(vectors).argmax(axis=0), [0, 1]])
    return centred @ vectors, values[::-1][:2] / values.sum()


@pytest.mark.parametrize(("images", "width"), [(50, 8), (6, 30), (3, 3), (9, 2)])
def test_components_are_numpys_eigenvectors(images, width):
    features = np.random.default_rng(images).normal(size=(images, width)) * np.linspace(1, 3, width) + 5
    points, shares = place_on_plane(features, "pca")
    expected, of_variance = by_eigenvectors(features)
    np.testing.assert_allclose(points, expected, atol=1e-9)
    np.testing.assert_allclose(shares, of_variance, atol=1e-12)
    assert 0 < shares[1] < shares[0]


@pytest.mark.parametrize("projector", ["pca", "tsne"])
def test_points_have_the_same_bits_twice_and_with_any_number_of_threads(projector):
    features = np.random.default_rng(1).normal(size=(80, 33))
    first = place_on_plane(features, projector)[0]
    with threadpool_limits(2):
        second = place_on_plane(features.copy(), projector)[0]
    np.random.seed(5)  # noqa: NPY002 # the global state must not matter
    assert first.tobytes() == second.tobytes() == place_on_plane(features, projector)[0].tobytes()
    assert np.isfinite(first).all()


@pytest.mark.parametrize("projector", ["pca", "tsne"])
@pytest.mark.parametrize("images", [1, 2, 7])
def test_equal_features_are_one_point(projector, images):
    features = np.full((images, 5), 0.1) * (1 + 1e-8 * np.arange(images)[:, None])
    points, shares = place_on_plane(features, projector)
    assert not points.any()
    assert shares.tolist() == [0, 0] or (projector == "tsne" and np.isnan(shares).all())
    assert not place_on_plane(np.zeros((images, 5)), projector)[0].any()


@pytest.mark.parametrize("images", [2, 3, 4])
@pytest.mark.parametrize("width", [1, 2, 6])
@pytest.mark.parametrize("projector", ["pca", "tsne"])
def test_few_images_and_narrow_features_have_points(images, width, projector):
    features = np.random.default_rng(0).normal(size=(images, width))
    points, shares = place_on_plane(features, projector)
    assert points.shape == (images, 2)
    assert np.isfinite(points).all()
    if projector == "pca":
        assert width != 1 or (not points[:, 1].any() and shares.tolist() == pytest.approx([1, 0]))


def test_neighbours_of_tsne_are_of_one_group():
    draw = np.random.default_rng(0)
    groups = np.repeat(np.arange(3), 20)
    points, _ = place_on_plane(20 * np.eye(3, 10)[groups] + draw.normal(size=(60, 10)), "tsne")
    apart = np.linalg.norm(points[:, None] - points, axis=2) + np.diag(np.full(60, np.inf))
    assert (groups[apart.argmin(axis=1)] == groups).all()


# -- the sample --------------------------------------------------------------------------------------------------------


def labels_of(query, gallery, own=None):
    cameras = (np.zeros(len(values), np.int64) for values in (query, gallery))
    return RetrievalLabels(np.array(query), next(cameras), np.array(gallery), next(cameras), own=own)


def test_a_sample_has_whole_people_with_a_query_and_no_junk():
    draw = np.random.default_rng(3)
    labels = labels_of(draw.integers(1, 30, 60).tolist(), [*draw.integers(1, 40, 200).tolist(), *[0] * 50, *[-1] * 9])
    sizes = []
    for num in (20, 100, 10_000):
        query, gallery = sample_people(labels, num)
        people = set(labels.query_pids[query].tolist())
        assert len(query) + len(gallery) <= num
        assert query.tolist() == [q for q, pid in enumerate(labels.query_pids) if pid in people]
        assert gallery.tolist() == [g for g, pid in enumerate(labels.gallery_pids) if pid in people]
        sizes.append(len(query) + len(gallery))
    assert people == set(labels.query_pids.tolist()), "all people, without the distractors"
    assert sizes[0] > 10, "who does not fit is passed over"
    assert sizes[1] > 80


def test_a_query_that_lies_in_the_gallery_is_drawn_once():
    query, gallery = sample_people(labels_of([1, 2], [1, 1, 2], own=np.array([1, -1])), 100)
    assert (query.tolist(), gallery.tolist()) == ([0, 1], [0, 2])


def test_all_models_have_the_same_images(folder):
    rows = fedsim.load_run(folder / "local").projection(num=11)
    assert {row["owner"] for row in rows} == {"park", "station"}
    shown = {
        owner: [row["image"] for row in rows if (row["owner"], row["data set"]) == (owner, "harbour")]
        for owner in ("park", "station")
    }
    assert shown["park"] == shown["station"]
    assert len(shown["park"]) == len(set(shown["park"])) <= 11
    pairs = {(owner, name) for owner in ("park", "station") for name in (owner, "harbour")}
    assert {(row["owner"], row["data set"]) for row in rows} == pairs


def test_a_set_whose_models_have_no_single_owner_is_placed_apart(tmp_path):
    labels, images = labels_of([1, 2], [1, 2, 2]), [ImageArray(np.zeros((n, 4, 4, 3), np.uint8)) for n in (2, 3)]
    models = [
        ModelOnSet(name, name, kind, "", torch.eye(2, width), torch.rand(3, width), labels, *images)
        for name, kind, width in (("a", "personalised", 4), ("b", "personalised", 5), ("c", "global", 6))
    ]
    projections = project_features(
        RunFeatures(models, Evaluation(), SimpleNamespace(federated=SimpleNamespace(clients=[]))), "pca", 300
    )
    assert [(p.sets, p.title, p.file_owner) for p in projections] == [
        (["a"], "personalised", "a"), (["b"], "personalised", "b"), (["c"], "global", "")
    ]  # fmt: skip
    assert projections[0].images == ["query 0", "query 1", "image 0", "image 1", "image 2"]


# -- a run -------------------------------------------------------------------------------------------------------------


def test_rows_are_those_of_the_files_of_features(folder, results):
    rows = results.projection()
    images, values = [], []
    for name in sorted(SETS):
        file = np.load(folder / f"pav/features/{name}.npz")
        for part in ("query", "gallery"):
            for number, path in enumerate(file[f"{part}_files"].tolist()):
                pid, camera = int(file[f"{part}_pids"][number]), int(file[f"{part}_camids"][number])
                if pid > 0:
                    images.append((name, part, os.path.basename(path), pid, camera + 1))
                    values.append(file[part][number].astype(np.float64))
    assert [(r["data set"], r["part"], r["image"], r["identity"], r["camera"]) for r in rows] == images
    assert ("park", "query", "0099_c1s1_9.png", 99, 1) in images, "a query without a match is a person, too"
    expected, _ = by_eigenvectors(np.stack(values) / np.linalg.norm(values, axis=1, keepdims=True))
    np.testing.assert_allclose([(row["x"], row["y"]) for row in rows], expected, atol=1e-6)
    assert {(row["projector"], row["model"], row["owner"]) for row in rows} == {("pca", "global", "")}
    assert results.projection("tsne") == results.projection("tsne") != rows


def test_euclidean_features_keep_their_lengths(run):
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("distance: cosine", "distance: euclidean"))
    before = np.array([(row["x"], row["y"]) for row in fedsim.load_run(run).projection()])
    for name in SETS:
        change_features(run, name, lambda values: 3 * values)
    after = np.array([(row["x"], row["y"]) for row in fedsim.load_run(run).projection()])
    np.testing.assert_allclose(after, 3 * before, rtol=1e-4, atol=1e-5)


def test_report_writes_a_figure_and_rows_per_model(folder, run, results, capsys):
    assert main(["report", str(run), "--projection", "pca"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert {path.name for path in (run / "projections").iterdir()} == {"pca-global.csv", "pca-global.png"}
    assert not (run / "queries").exists()
    rows = results.projection()
    with (run / "projections" / "pca-global.csv").open() as file:
        assert list(csv.DictReader(file)) == [{"round": "1"} | {k: str(value) for k, value in r.items()} for r in rows]
    for name in SETS:
        of_set = [row for row in rows if row["data set"] == name]
        people = len({row["identity"] for row in of_set})
        assert [name, str(people), "3", str(len(of_set))] in lines
    figure = (run / "projections" / "pca-global.png").read_bytes()
    assert main(["report", str(run), "--projection", "pca"]) == 0
    assert (run / "projections" / "pca-global.png").read_bytes() == figure
    assert main(["report", str(run), "--projection", "tsne", "--confusion"]) == 0
    assert {path.stem for path in (run / "projections").iterdir()} == {"pca-global", "tsne-global"}
    assert (run / "queries" / "confusion.csv").exists()
    assert run / "projections" in [*files_of_run(run)], "they go when another fit replaces the run"
    local = shutil.copytree(folder / "local", run.with_name("local"))
    assert main(["report", str(local), "--projection", "pca"]) == 0
    names = {path.stem for path in (local / "projections").iterdir()}
    assert names == {"pca-personalised@park", "pca-personalised@station"}


def test_features_are_written_first_if_there_are_none(run, caplog):
    shutil.rmtree(run / "features")
    assert main(["report", str(run), "--projection", "pca"]) == 0
    assert "writing features of the test sets first" in caplog.text
    assert {path.stem for path in (run / "features").glob("*.npz")} == set(SETS)


def test_the_page_has_the_figure(run, tmp_path):
    pytest.importorskip("plotly", reason="the extra 'report' is not installed")
    pytest.importorskip("jinja2", reason="the extra 'report' is not installed")
    page = tmp_path / "page.html"
    assert main(["report", str(run), "--html", str(page)]) == 0
    assert "Features as points" not in page.read_text()
    assert main(["report", str(run), "--projection", "pca", "--html", str(page)]) == 0
    text = page.read_text()
    assert text.count('<h2 id="projections">') == text.count('<a href="#projections">') == 1
    assert text.count('<figure class="wide"><img src="data:image/webp') == 1
    assert "Single queries" not in text


def test_axes_of_python_are_those_of_the_caller(results):
    axes = Figure().subplots()
    assert results.plot_projection(axes) is axes
    shown = np.concatenate([points.get_offsets() for points in axes.collections])
    np.testing.assert_array_equal(shown, [(row["x"], row["y"]) for row in results.projection()])
    assert results.plot_projection(projector="tsne").get_xlabel() == "t-SNE, axis 1"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == sorted(SETS)


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_one_test_set_has_points(run):
    for name in SETS[1:]:
        (run / "features" / f"{name}.npz").unlink()
    results = fedsim.load_run(run)
    assert {row["data set"] for row in results.projection()} == {"park"}
    assert results.plot_projection().get_title() == "cameras of park"


def test_features_without_variance_are_drawn(run, capsys):
    for name in SETS:
        change_features(run, name, np.ones_like)
    assert main(["report", str(run), "--projection", "pca"]) == 0
    assert "have 0.0 and 0.0 % of the variance" in capsys.readouterr().out
    assert not any(row["x"] or row["y"] for row in fedsim.load_run(run).projection("tsne"))


def with_nan(values):
    return np.where(np.arange(len(values))[:, None] == 0, np.nan, values)


def test_a_set_whose_features_are_not_finite_is_left_out_with_a_line(run, caplog):
    change_features(run, "park", with_nan)
    assert {row["data set"] for row in fedsim.load_run(run).projection()} == {"station", "harbour"}
    assert "left out: park: features of global are not finite; did the training diverge?" in caplog.text


@pytest.mark.parametrize("case", ["unknown", "no checkpoint", "not finite", "classifies", "a search"])
def test_a_problem_is_one_line(run, tmp_path, capsys, case):
    words, line = ["--projection", "pca"], ""
    if case == "unknown":
        words, line = ["--projection", "umap"], "projection"
    elif case == "no checkpoint":
        shutil.rmtree(run / "checkpoints")
        shutil.rmtree(run / "features")
        line = f"{run}: has no features, and no checkpoint to compute them; fit it with checkpoints"
    elif case == "not finite":
        for name in SETS:
            change_features(run, name, with_nan)
        line = "harbour: features of global are not finite; did the training diverge?"
    elif case == "classifies":
        config = (run / "config.yaml").read_text()
        (run / "config.yaml").write_text(config.replace("task: retrieval", "task: classification"))
        line = f"{run}: the run classifies"
    else:
        run, line = tmp_path / "search", "--projection: is not for the folder of a search"
        run.mkdir()
        (run / "trials.log").touch()
    assert line in refuse(capsys, "report", run, *words)
    assert not (run / "projections").exists()


def test_python_refuses_what_is_none(results, run):
    with pytest.raises(ConfigError, match="num: 0 is less than 1"):
        results.projection(num=0)
    with pytest.raises(DataError, match="num: 1 is less than the images of each person of harbour; give a"):
        results.projection(num=1)
    with pytest.raises(ConfigError, match="projector: umap is not one of"):
        results.projection("umap")
    shutil.rmtree(run / "features")
    with pytest.raises(DataError, match="holds no features of test sets; write them by fedsim predict"):
        fedsim.load_run(run).plot_projection()


@pytest.mark.parametrize("projector", ["pca", "tsne"])
def test_sums_take_one_thread_and_threads_are_then_as_before(projector, monkeypatch):
    def threads():
        return [pool["num_threads"] for pool in threadpool_info()]

    def noting(fit):
        return lambda *args, **options: (within.append(threads()), fit(*args, **options))[1]

    within, before = [], (threads(), torch.get_num_threads())
    for estimator in (PCA, TSNE):
        monkeypatch.setattr(estimator, "fit_transform", noting(estimator.fit_transform))
    with threadpool_limits(2):
        place_on_plane(np.random.default_rng(0).normal(size=(9, 4)), projector)
    assert len(within) >= 1
    assert {number for numbers in within for number in numbers} == {1}
    assert (threads(), torch.get_num_threads()) == before
