"""Scoring a federation: random splits, settings, ranked lists, and the same bits on any number of ranks."""

import json
import logging
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from failing import Run, finish
from fedsim.__main__ import main
from fedsim.core.errors import ConfigError
from fedsim.core.metrics import METRICS
from fedsim.data.images import ImageArray, ImagesInParts
from fedsim.data.market import MarketFolders
from fedsim.data.pixels import HeldPixels
from fedsim.evaluation.backends import FaissBackend
from fedsim.evaluation.pictures import RankedLists, draw_ranked_lists
from fedsim.evaluation.ranker import Ranker
from fedsim.evaluation.ranking import RetrievalLabels, average_scores, positive_ranks, score_ranks
from fedsim.evaluation.settings import Evaluation
from fedsim.evaluation.summary import QueryResults, ScoreRow, mean_results, summarise, write_queries
from fedsim.inference.tensors import global_tensors
from fedsim.methods import SKA, Ditto, FedAvg, FedPav, Local
from fedsim.models import Neck, ReIDModel, SmallCNN
from fedsim.report import read_run
from fedsim.strategy.checkpoint_files import read_checkpoint
from fedsim.training.features import extract_features, shard_of
from small import fit, make_data, make_model, new_evaluator, receive, refuse

CPU = torch.device("cpu")
SIZE = (32, 16)
SPLITS = 3

# -- shares ------------------------------------------------------------------------------------------------------------


def test_every_image_is_on_one_rank_in_whole_batches():
    for num in (0, 1, 2, 7, 64, 65, 100, 257):
        for batch_size in (1, 2, 3, 8, 64, 300):
            for world_size in (1, 2, 3, 5, 16):
                shares = [shard_of(num, batch_size, rank, world_size) for rank in range(world_size)]
                covered = [i for share in shares for i in range(share.start, share.stop)]
                assert covered == list(range(num))  # once, and in order
                for share in shares:
                    # a batch that is cut would have other last bits; only the last one of all may be short
                    assert share.start % batch_size == 0 or share.start == num
                    assert share.stop % batch_size == 0 or share.stop == num
                batches = [-(-(share.stop - share.start) // batch_size) for share in shares]
                assert max(batches) - min(batches) <= 1  # nobody has twice the work


# -- a federation with a test set that is scored on random splits ------------------------------------------------------


def draw(folder, names):
    """Images of random pixels, the same for every run."""
    folder.mkdir(parents=True)
    for name in names:
        rng = np.random.default_rng(list(f"{folder.parent.name}/{folder.name}/{name}".encode()))
        Image.fromarray(rng.integers(0, 256, (16, 8, 3), dtype=np.uint8)).save(folder / f"{name}.png")


def names_of(pids, cameras=(1, 2), shots=1):
    return [f"{pid:04d}_c{cam}s1_{shot:06d}_00" for pid in pids for cam in cameras for shot in range(shots)]


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """Two clients, and viper, which is only tested on: a pool of images that the command splits."""
    root = tmp_path_factory.mktemp("sets")
    extra = ["-1_c1s1_000000_00", "0000_c2s1_000000_00"]
    for name in ("north", "south"):
        draw(root / name / "bounding_box_train", names_of(range(1, 7), shots=2))
        # 14 is found by its own camera only: two queries of twelve do not count
        draw(root / name / "query", [*names_of(range(10, 14)), *names_of([14], cameras=[1], shots=2), *names_of([15])])
        gallery = [*names_of(range(10, 14), (1, 2, 3), 3), *names_of([14], [1], 4), *names_of([15], [3])]
        draw(root / name / "bounding_box_test", [*gallery, *extra])
    draw(root / "viper" / "bounding_box_test", [*names_of(range(1, 13), shots=2), *names_of([13]), *extra])
    assert main(["data", "splits", "--folder", str(root / "viper"), "--num", str(SPLITS)]) == 0
    return root


CONFIG = """
seed_everything: 0
trainer: {{max_epochs: 1, check_val_every_n_epoch: 1, accelerator: cpu, devices: 1, enable_progress_bar: false}}
model:
  method: FedPav
  backbone: {{class_path: SmallCNN, init_args: {{width: 8}}}}
  neck: {{kind: linear, dim: 16, dropout: 0.2}}
  client: {{batch_size: 8, optimizer: {{class_path: torch.optim.SGD, init_args: {{lr: 0.05, momentum: 0.9}}}}}}
  evaluation: {{batch_size: 4}}
data:
  source: {{class_path: MarketFolders, init_args: {{root: {root}}}}}
  val: none
  size: [32, 16]
  augmentation: {{pad: 2, flip: 0.5}}
"""


@pytest.fixture(scope="module")
def config(tree, tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "config.yaml"
    path.write_text(CONFIG.format(root=tree))
    return path


@pytest.fixture(scope="module")
def finished(config, tmp_path_factory):
    """The directory of a finished run."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    assert main(["fit", "--config", str(config), "--run_dir", str(folder)]) == 0
    return folder


def metrics_of(folder):
    return json.loads((folder / "summary.json").read_text())["final"]["metrics"]


@pytest.fixture(scope="module")
def features(finished, tree):
    """Features of the run's global model by domain: (query set, gallery set, their features), read by hand."""
    checkpoint = read_checkpoint(finished / "checkpoints" / "last.ckpt")
    tensors = {
        name if name.startswith("neck.") else f"backbone.{name}": tensor
        for name, tensor in global_tensors(checkpoint, None).items()
    }
    model = ReIDModel(SmallCNN(width=8), Neck(kind="linear", dim=16, dropout=0.2), num_classes=6)
    missing = model.load_state_dict(tensors, strict=False)
    assert not missing.unexpected_keys
    assert all("head" in name or "num_batches" in name for name in missing.missing_keys)
    settings = Evaluation(batch_size=4)
    found = {}
    for domain in MarketFolders(str(tree)).domains():
        q, g = (
            extract_features(model, HeldPixels(split.images.decode(SIZE), CPU), settings, CPU)
            for split in (domain.query, domain.gallery)
        )
        found[domain.name] = (domain, q, g)
    return found


def trials_of(domain, query, gallery, **rules):
    """Query features, gallery features and labels of each ranking."""
    if not domain.splits:
        labels = (domain.query.pids, domain.query.camids, domain.gallery.pids, domain.gallery.camids)
        return [(query, gallery, RetrievalLabels(*labels, **rules))]
    pids, camids = domain.gallery.pids, domain.gallery.camids
    return [
        (gallery[q], gallery[g], RetrievalLabels(pids[q], camids[q], pids[g], camids[g], **rules))
        for q, g in domain.splits
    ]


def cosines_of(query, gallery):
    query, gallery = (x.double() / x.double().norm(dim=1, keepdim=True) for x in (query, gallery))
    return (query @ gallery.T).numpy()


def scores_by_sorting(*trial):
    query, gallery, labels = trial
    ranking = average_scores(score_ranks(positive_ranks(cosines_of(query, gallery), labels)))
    return [ranking.metrics[metric] for metric in METRICS]


def test_a_set_with_splits_is_scored_by_mean_and_spread(finished, features):
    metrics = metrics_of(finished)
    trials = [scores_by_sorting(*trial) for trial in trials_of(*features["viper"])]
    assert len(trials) == SPLITS
    assert len({str(scores) for scores in trials}) > 1
    for metric, mean, spread in zip(METRICS, np.mean(trials, 0), np.std(trials, 0, ddof=1), strict=True):
        assert metrics[f"test/global/viper/{metric}"] == pytest.approx(mean, abs=1e-12)
        assert metrics[f"test/global/viper/{metric}_std"] == pytest.approx(spread, abs=1e-12)
        assert metrics[f"test/global/unseen/{metric}"] == metrics[f"test/global/viper/{metric}"]
    assert metrics["test/global/viper/mAP_std"] > 0


def test_other_sets_are_scored_once(finished, features):
    metrics = metrics_of(finished)
    for name in ("north", "south"):
        (trial,) = trials_of(*features[name])
        for metric, value in zip(METRICS, scores_by_sorting(*trial), strict=True):
            assert metrics[f"test/global/{name}/{metric}"] == pytest.approx(value, abs=1e-12)
            assert metrics[f"test/personalised/{name}/{metric}"] == metrics[f"test/global/{name}/{metric}"]
    assert [name for name in metrics if name.endswith("_std") and "viper" not in name] == []
    for metric in METRICS:
        means = [metrics[f"test/global/{name}/{metric}"] for name in ("north", "south")]
        assert metrics[f"test/global/seen/{metric}"] == pytest.approx(np.mean(means), abs=1e-12)


def test_what_people_see_of_the_spread(finished, config, capsys):
    assert main(["test", "--config", str(config), "--run_dir", str(finished), "--ckpt_path", "last"]) == 0
    metrics = metrics_of(finished)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    cells = {(row[0], row[1]): row[2:] for row in rows if len(row) == 2 + len(METRICS)}
    mean, spread = (100 * metrics[f"test/global/viper/mAP{suffix}"] for suffix in ("", "_std"))
    assert cells["viper", "global"][METRICS.index("mAP")] == f"{mean:.1f}+-{spread:.1f}"
    assert cells["north", "global"][METRICS.index("mAP")] == f"{100 * metrics['test/global/north/mAP']:.1f}"


# whether ranks share the images and queries of a set, or one of them does it all
SHARING = ["--model.evaluation.share_from=1", "--model.evaluation.share_from=1000"]


@pytest.mark.dist
@pytest.mark.parametrize("sharing", SHARING)
def test_two_ranks_give_the_same_bits_and_keep_the_same_queries(finished, config, tmp_path, sharing):
    finish(Run(tmp_path, "fit", "--config", config, "--run_dir", tmp_path / "two", sharing, ranks=2))
    assert metrics_of(tmp_path / "two") == metrics_of(finished)
    one, two = (np.load(folder / "queries.npz") for folder in (finished, tmp_path / "two"))
    assert one.files == two.files
    for name in one.files:
        np.testing.assert_array_equal(one[name], two[name])


def test_predicted_features_are_ranked_alike_by_the_command(finished, config, features, capsys):
    assert main(["predict", "--config", str(config), "--run_dir", str(finished), "--ckpt_path", "last"]) == 0
    metrics = metrics_of(finished)
    for name in ("north", "viper"):
        capsys.readouterr()
        assert main(["rank", str(finished / "features" / f"{name}.npz"), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        trials = trials_of(*features[name])  # of several splits, the first is written
        for metric, value in zip(METRICS, scores_by_sorting(*trials[0]), strict=True):
            assert found[metric] == pytest.approx(value, abs=1e-12)
        if name == "north":
            assert found["mAP"] == metrics["test/global/north/mAP"]
            assert (found["n_valid"], found["n_queries"]) == (10, 12)


# -- single queries ----------------------------------------------------------------------------------------------------


def averages(queries, name, splits, metric):
    """Mean over the queries that count of each split, then over splits."""
    parts = np.split(queries[f"global/{name}/{metric}"].astype(float), np.cumsum(splits)[:-1])
    return np.mean([np.nanmean(part) for part in parts])


def test_a_fit_keeps_the_scores_of_single_queries(finished, features):
    queries, metrics = np.load(finished / "queries.npz"), metrics_of(finished)
    assert queries["round"] == 1
    for name, (domain, query, gallery) in features.items():
        trials = trials_of(domain, query, gallery)
        splits = queries[f"{name}/splits"]
        assert splits.tolist() == [len(labels.query_pids) for _, _, labels in trials]
        assert queries[f"{name}/pids"].tolist() == np.concatenate([t[2].query_pids for t in trials]).tolist()
        ranks = [rank for trial in trials for rank in positive_ranks(cosines_of(*trial[:2]), trial[2])]
        precision = [np.mean(np.arange(1, len(r) + 1) / r) if len(r) else np.nan for r in ranks]
        np.testing.assert_allclose(queries[f"global/{name}/mAP"], precision, rtol=1e-6)
        hits = [float(r[0] == 1) if len(r) else np.nan for r in ranks]
        np.testing.assert_array_equal(queries[f"global/{name}/rank1"], hits)
        for metric in ("mAP", "mAP_trapezoid", "rank1"):
            assert averages(queries, name, splits, metric) == pytest.approx(metrics[f"test/global/{name}/{metric}"])
        assert queries[f"global/{name}/cmc"][[0, 4, 9]].tolist() == pytest.approx(
            [metrics[f"test/global/{name}/rank{k}"] for k in (1, 5, 10)]
        )
    assert "personalised/north/mAP" in queries.files
    assert np.isnan(queries["global/north/mAP"]).sum() == 2, "queries without a match"


def test_a_report_reads_them(finished):
    run, written = read_run(finished), np.load(finished / "queries.npz")
    found = run.queries.results
    assert set(found) == {name.removesuffix("/cmc") for name in written.files if name.endswith("/cmc")}
    np.testing.assert_array_equal(found["global/viper"].scores["mAP"], written["global/viper/mAP"].astype(float))
    assert (found["global/viper"].num_splits, found["global/north"].num_splits) == (SPLITS, 1)


def test_a_test_keeps_its_scores(finished, config, tmp_path, caplog):
    shutil.copytree(finished, tmp_path / "run")
    options = ["--config", str(config), "--ckpt_path", str(tmp_path / "run" / "checkpoints" / "last.ckpt")]
    with caplog.at_level(logging.INFO):
        assert main(["test", *options, "--model.evaluation.flip=true"]) == 0
    path = tmp_path / "run" / "tests" / "last.json"
    assert f"wrote {path}" in caplog.text
    content, run = json.loads(path.read_text()), read_run(tmp_path / "run")
    assert (content["round"], content["settings"]["model"]["evaluation"]["flip"]) == (1, True)
    assert run.tested == content | {"kind": "last", "is_whole": True}
    assert content["metrics"]["test/global/north/mAP"] != metrics_of(finished)["test/global/north/mAP"]
    assert main(["test", *options]) == 0
    tested = {name: value for name, value in json.loads(path.read_text())["metrics"].items() if name.count("/") > 1}
    of_fit = {name: value for name, value in metrics_of(finished).items() if name.startswith("test/")}
    assert tested == {name: value for name, value in of_fit.items() if "/local/" not in name}
    first, second = np.load(path.with_suffix(".npz")), np.load(finished / "queries.npz")
    np.testing.assert_array_equal(first["global/viper/mAP"], second["global/viper/mAP"])
    assert main(["test", *options, "--run_dir", str(tmp_path / "other")]) == 0
    assert (tmp_path / "other" / "tests" / "last.json").is_file()


def test_scores_that_cannot_be_kept_are_shown_all_the_same(finished, config, tmp_path, caplog, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tests").touch()  # a file where the folder goes
    options = ["--config", str(config), "--run_dir", str(tmp_path / "run")]
    with caplog.at_level(logging.INFO):
        assert main(["test", *options, "--ckpt_path", str(finished / "checkpoints" / "last.ckpt")]) == 0
    assert "the scores are not kept" in caplog.text
    assert "north" in capsys.readouterr().out


def test_of_very_many_sets_no_file_is_kept(tmp_path):
    results = QueryResults({"mAP": np.ones(1)}, np.ones(1, dtype=np.int64), (1,), (1.0,))
    path = tmp_path / "queries.npz"
    write_queries(path, {("test", "global", f"s{i}"): results for i in range(50)}, 3)
    assert len(np.load(path).files) == 1 + 4 * 50
    write_queries(path, {("test", "global", f"s{i}"): results for i in range(51)}, 4)
    assert not path.exists(), "nor one of an earlier evaluation"


def test_several_clients_models_on_one_set_are_averaged():
    first, second = (
        QueryResults({"mAP": np.array([a, np.nan])}, np.array([1, 2]), (2,), (a, 1.0)) for a in (0.25, 0.75)
    )
    mean = mean_results([first, second])
    np.testing.assert_array_equal(mean.scores["mAP"], [0.5, np.nan])
    assert mean.cmc == (0.5, 1.0)


# -- ranked lists ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rankings(finished, config):
    options = ["--config", str(config), "--run_dir", str(finished), "--ckpt_path", "last"]
    assert main(["test", *options, "--save_ranking"]) == 0
    return finished / "rankings"


def test_lists_of_every_set_are_written(rankings):
    names = [f"{name}.{suffix}" for name in ("north", "south", "viper") for suffix in ("npz", "png")]
    assert sorted(path.name for path in rankings.glob("*.*[gz]")) == sorted(names)


@pytest.mark.parametrize("name", ["north", "south", "viper"])
def test_lists_hold_what_sorting_finds(rankings, features, name):
    query, gallery, labels = trials_of(*features[name])[0]
    lists = np.load(rankings / f"{name}.npz")
    cosines = cosines_of(query, gallery)
    assert lists["index"].shape == (len(query), min(50, len(gallery)))
    for q, row in enumerate(lists["index"]):
        own = (labels.gallery_pids == labels.query_pids[q]) & (labels.gallery_camids == labels.query_camids[q])
        junk = own | (labels.gallery_pids == -1)
        order = [g for g in np.argsort(-cosines[q], kind="stable") if not junk[g]]
        found = row[row >= 0]
        assert found.tolist() == order[: len(row)]
        assert not junk[found].any()
        assert (0 in labels.gallery_pids[found]) or len(found) == 50  # distractors are in the list
        is_match = lists["is_match"][q]
        assert is_match[row >= 0].tolist() == (labels.gallery_pids[found] == labels.query_pids[q]).tolist()
        assert not is_match[row < 0].any()
    assert (lists["index"] >= 0).all() == (len(gallery) > 60)


@pytest.mark.parametrize("name", ["north", "viper"])
def test_pictures_show_queries_and_what_they_found(rankings, features, name):
    domain = features[name][0]
    lists = np.load(rankings / f"{name}.npz")
    query, gallery = domain.query.images, domain.gallery.images
    if domain.splits:
        query, gallery = (domain.gallery.images.take(part) for part in domain.splits[0])
    sheet = np.asarray(Image.open(rankings / f"{name}.png"))
    places = []  # of all 128 x 64 pixels of a picture, row by row
    for row, q in enumerate(round(q) for q in np.linspace(0, len(query) - 1, min(8, len(query)))):
        places.append((row, 0, None, as_picture(query, q)))
        for column, g in enumerate(lists["index"][q, :10], start=1):
            places.append((row, column, bool(lists["is_match"][q, column - 1]), as_picture(gallery, g)))
    marks = {True: set(), False: set(), None: set()}
    for row, column, is_match, picture in places:
        left, top = column * WIDTH + 12 * (column > 0) + 4, 20 + row * HEIGHT + 4
        shown = sheet[top : top + 128, left : left + 64]
        assert (shown[24:] == picture[24:]).all()  # a mark is in a corner above
        frame = sheet[top - 4 : top + 132, left - 4 : left + 68].copy()
        frame[4:-4, 4:-4] = 255
        marks[is_match].add((frame.tobytes(), (shown[:16, -16:] == picture[:16, -16:]).all()))
        below = sheet[top + 132 : top + HEIGHT - 4, left : left + 64]
        assert below.min() < 128, "identity and camera stand below"
    assert [len(marks[kind]) for kind in (True, False, None)] == [1, 1, 1]
    [(match, _)], [(other, _)] = marks[True], marks[False]
    grey = [np.frombuffer(frame, np.uint8).reshape(136, 72, 3).mean(axis=2) for frame in (match, other)]
    assert np.abs(grey[0] - grey[1]).max() > 100, "without colours, too"


WIDTH, HEIGHT = 64 + 8 + 4, 128 + 8 + 18


def test_images_keep_their_shapes_in_pictures():
    labels = RetrievalLabels(np.array([7]), np.array([0]), np.array([7, 8]), np.array([1, 1]))
    lists = RankedLists(np.array([[1, 0]]), np.ones((1, 2), np.float32), np.array([[False, True]]))
    square, wide = (ImageArray(np.full((1, *size, 3), 90, np.uint8)) for size in ((50, 50), (16, 32)))
    sheet = np.asarray(draw_ranked_lists(lists, labels, square, ImagesInParts([wide, square])))
    for column, size in enumerate([(128, 128), (128, 128), (64, 128)]):
        left = column * (128 + 8 + 4) + 12 * (column > 0)
        found = np.argwhere((sheet[20:, left : left + 136] == 90).all(axis=2))
        assert (np.ptp(found, axis=0) + 1).tolist() == list(size)


def as_picture(images, position):
    return images.take(np.array([position])).decode((128, 64))[0].permute(1, 2, 0).numpy()


@pytest.mark.dist
@pytest.mark.parametrize("sharing", SHARING)
def test_two_ranks_write_the_same_lists(rankings, finished, config, tmp_path, sharing):
    last = finished / "checkpoints" / "last.ckpt"
    options = ["--config", config, "--run_dir", tmp_path / "two", "--ckpt_path", last]
    run = finish(Run(tmp_path, "test", *options, "--save_ranking", sharing, ranks=2))
    there = tmp_path / "two" / "rankings"
    assert sorted(p.name for p in there.iterdir()) == sorted(p.name for p in rankings.iterdir()), run.output
    for name in ("north", "south", "viper"):
        one, two = (dict(np.load(folder / f"{name}.npz")) for folder in (rankings, there))
        for key in one:
            np.testing.assert_array_equal(one[key], two[key])
        assert (there / f"{name}.png").read_bytes() == (rankings / f"{name}.png").read_bytes()


def test_without_a_global_model_every_client_has_its_lists_of_unseen_sets(config, tmp_path):
    run = tmp_path / "local"
    options = ["--config", str(config), "--run_dir", str(run), "--model.method=Local"]
    assert main(["fit", *options]) == 0
    assert main(["test", *options, "--ckpt_path", "last", "--save_ranking"]) == 0
    names = {path.stem for path in (run / "rankings").glob("*.npz")}
    assert names == {"north", "south", "viper@north", "viper@south"}
    lists = [np.load(run / "rankings" / f"viper@{client}.npz")["index"] for client in ("north", "south")]
    assert not np.array_equal(*lists)
    metrics = metrics_of(run)
    assert metrics["test/personalised/viper/mAP_std"] > 0


@pytest.mark.parametrize("command", ["fit", "validate", "predict"])
def test_only_a_test_writes_lists(capsys, config, finished, tmp_path, command):
    options = ["--config", config, "--run_dir", tmp_path / "new"]
    if command != "fit":
        options += ["--ckpt_path", finished / "checkpoints" / "last.ckpt"]
    line = refuse(capsys, command, *options, "--save_ranking")
    assert "save_ranking" in line
    assert "fedsim test" in line
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("command", ["fit", "validate", "test"])
def test_only_a_prediction_draws_maps(capsys, config, finished, tmp_path, command):
    options = ["--config", config, "--run_dir", tmp_path / "new"]
    if command != "fit":
        options += ["--ckpt_path", finished / "checkpoints" / "last.ckpt"]
    line = refuse(capsys, command, *options, "--save_maps")
    assert "save_maps: pictures of maps are written by fedsim predict only" in line
    assert not (tmp_path / "new").exists()


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def federation(tree):
    """A trained federation in this process."""
    return fit(make_model(FedPav()), make_data(MarketFolders(str(tree))), rounds=1)


def rescore(federation, open_images=None, **settings):
    """Scores of the global model under other settings."""
    changed = {"settings": Evaluation(**settings)} | ({"open_images": open_images} if open_images else {})
    return new_evaluator(federation, **changed).score("test")


def direct_trials(federation, size=SIZE, domain="north", rules=None, **settings):
    """What the global model makes of a domain: (query features, gallery features, labels) of each ranking."""
    model = federation.parts.models["smallcnn"]
    model.shared.copy_(federation.server.vector("smallcnn"))
    sets = federation.parts.federated.tests[domain]
    features = (
        extract_features(model.network, HeldPixels(split.images.decode(size), CPU), Evaluation(**settings), CPU)
        for split in (sets.query, sets.gallery)
    )
    return trials_of(sets, *features, **(rules or {}))


def compare(scores, domain, rankings):
    for metric in METRICS:
        values = [ranking.metrics[metric] for ranking in rankings]
        assert scores[f"test/global/{domain}/{metric}"] == pytest.approx(np.mean(values), abs=1e-12), metric
        if len(values) > 1:
            assert scores[f"test/global/{domain}/{metric}_std"] == pytest.approx(np.std(values, ddof=1), abs=1e-12)


RULES = {
    "plain": ({}, {}, {}),
    "euclidean": ({"distance": "euclidean"}, {}, {"distance": "euclidean"}),
    "junk": ({"junk_pids": (-1, 10, 3)}, {"junk_pids": (-1, 10, 3)}, {}),
    "no junk": ({"junk_pids": ()}, {"junk_pids": ()}, {}),
    "cameras": ({"camera_aware": False}, {"camera_aware": False}, {}),
    "zeros": ({"invalid_as_zero": True, "junk_pids": (-1, 3)}, {"junk_pids": (-1, 3)}, {"invalid_as_zero": True}),
    "single shots": ({"single_gallery_shot": True}, {}, {"single_gallery_shot": True}),
    "pooled features": ({"layer": "pool"}, {}, {}),
    "mirror images": ({"flip": True}, {}, {}),
}


@pytest.mark.parametrize("domain", ["north", "viper"])
@pytest.mark.parametrize("name", RULES)
def test_settings_are_those_of_a_direct_call(federation, domain, name):
    settings, rules, how = RULES[name]
    scores = rescore(federation, **settings)
    taken = {key: settings[key] for key in ("layer", "flip") if key in settings}
    trials = direct_trials(federation, domain=domain, rules=rules, **taken)
    compare(scores, domain, [Ranker(**how).score(*trial) for trial in trials])
    if name != "plain":
        plain = rescore(federation)
        assert any(plain[key] != scores[key] for key in plain if f"/{domain}/" in key), "nothing was changed"


def test_lists_follow_the_settings_too(federation, tmp_path):
    settings = Evaluation(distance="euclidean", camera_aware=False, junk_pids=(0,))
    new_evaluator(federation, settings=settings).score("test", rankings=tmp_path)
    query, gallery, labels = direct_trials(federation)[0]
    index = np.load(tmp_path / "north.npz")["index"]
    for q, distances in enumerate(torch.cdist(query.double(), gallery.double()).numpy()):
        order = [g for g in np.argsort(distances, kind="stable") if labels.gallery_pids[g] != 0]
        assert index[q][index[q] >= 0].tolist() == order[:50]


def test_the_backend_is_the_one_that_was_asked_for(federation, monkeypatch):
    pytest.importorskip("faiss")
    asked = []
    search = FaissBackend.ranks
    monkeypatch.setattr(FaissBackend, "ranks", lambda self, *args: asked.append(1) or search(self, *args))
    plain = rescore(federation)
    assert not asked
    assert rescore(federation, backend="faiss") == plain
    assert len(asked) == 2 + SPLITS


def test_test_images_have_their_own_size(tree):
    size = (48, 20)
    data = make_data(MarketFolders(str(tree)), test_size=size)
    model = fit(make_model(FedPav(), evaluation=Evaluation()), data, rounds=1)
    assert {client.images.pixels.pixels.shape[2:] for client in model.parts.clients.values()} == {
        SIZE
    }  # training images do not change
    scores = new_evaluator(model).score("test")
    for domain in ("north", "viper"):
        compare(scores, domain, [Ranker().score(*trial) for trial in direct_trials(model, size, domain)])
    other = new_evaluator(model, open_images=make_data(MarketFolders(str(tree))).open_test).score("test")
    compare(other, "north", [Ranker().score(*trial) for trial in direct_trials(model, SIZE)])
    assert other != scores


def test_validation_images_have_that_size_too(tree):
    data = make_data(MarketFolders(str(tree)), test_size=(48, 20), val="identities", val_fraction=0.4)
    model = fit(make_model(FedPav()), data, rounds=1, limit_val_batches=1)
    assert {pixels.pixels.shape[2:] for pixels in model.evaluator.extractor.opened.values()} == {(48, 20)}


@pytest.mark.parametrize("wrong", ["[0, 5]", "[-3, 4]", "[2, 2]", "[16]", "[16, 8, 3]", "48", "large", "[16.5, 8]"])
def test_a_wrong_test_size_is_named(capsys, config, tmp_path, wrong):
    line = refuse(capsys, "fit", "--config", config, "--run_dir", tmp_path / "run", f"--data.test_size={wrong}")
    assert "data.test_size" in line


def test_an_odd_test_size_of_synthetic_people_is_named(capsys, config, tmp_path):
    options = ["--data.source=SyntheticReID", "--data.source.scale=0.2", "--data.test_size=[33, 16]"]
    assert "data.test_size" in refuse(capsys, "fit", "--config", config, "--run_dir", tmp_path / "run", *options)


def test_test_size_is_that_of_training_images_by_default(tree):
    assert make_data().test_size == SIZE
    with pytest.raises(ConfigError, match=r"data\.size"):
        make_data(size=(0, 3))


# -- sets that cannot be scored ----------------------------------------------------------------------------------------


def test_queries_that_only_their_own_camera_could_find(capsys, config, tmp_path):
    root = tmp_path / "sets"
    draw(root / "client" / "bounding_box_train", names_of(range(1, 7)))
    for folder in ("query", "bounding_box_test"):
        draw(root / "client" / folder, names_of(range(10, 13)))
        draw(root / "corridor" / folder, names_of(range(1, 5), cameras=[1]))
    command = ["fit", "--config", config, "--run_dir", tmp_path / "run", f"--data.source.root={root}"]
    line = refuse(capsys, *command)
    assert "test set of corridor: no query has a match: all matches are from the query's own camera" in line
    assert "set camera_aware to false" in line
    assert "model.evaluation" in line
    assert "data.val" not in line
    assert main([*map(str, command), "--model.evaluation.camera_aware=false", "--overwrite=true"]) == 0


def test_splits_that_were_drawn_without_looking_at_cameras(capsys, config, tmp_path):
    root = tmp_path / "sets"
    draw(root / "client" / "bounding_box_train", names_of(range(1, 7)))
    for folder in ("query", "bounding_box_test"):
        draw(root / "client" / folder, names_of(range(10, 13)))
    draw(root / "corridor" / "bounding_box_test", names_of(range(1, 9), cameras=[1], shots=2))
    assert main(["data", "splits", f"--folder={root / 'corridor'}", "--cross_camera=false"]) == 0
    line = refuse(capsys, "fit", "--config", config, "--run_dir", tmp_path / "run", f"--data.source.root={root}")
    assert "test set of corridor: no query has a match: all matches are from the query's own camera" in line


def test_queries_of_junk_only(capsys, config, tmp_path):
    pids = "[-1,10,11,12,13,14,15]"
    line = refuse(capsys, "fit", "--config", config, "--run_dir", tmp_path / "run",
                  f"--model.evaluation.junk_pids={pids}")  # fmt: skip
    assert "test set of north: no query has a match" in line
    assert f"junk ({pids[1:-1].replace(',', ', ')})" in line


def test_validation_data_of_one_camera(capsys, config, tmp_path):
    root = tmp_path / "sets"
    draw(root / "client" / "bounding_box_train", names_of(range(1, 7), cameras=[1], shots=2))
    for folder in ("query", "bounding_box_test"):
        draw(root / "client" / folder, names_of(range(10, 13)))
    options = [f"--data.source.root={root}", "--data.val=identities"]
    line = refuse(capsys, "fit", "--config", config, "--run_dir", tmp_path / "run", *options)
    assert "val set of client: no query has a match" in line
    assert "data.val to none" in line


def test_queries_that_do_not_count_are_counted_aloud(federation, caplog):
    caplog.set_level(logging.INFO, logger="fedsim")
    new_evaluator(federation).prepare("test")
    assert "test set of north: 10 of 12 queries have a match, the others do not count" in caplog.text
    assert "viper" not in caplog.text  # splits are drawn so that all have one


# -- names of numbers --------------------------------------------------------------------------------------------------


def test_spread_is_over_splits_of_the_mean_over_clients():
    # where everybody's own model is scored on an unseen set, two spreads could be meant
    rng = np.random.default_rng(0)
    shapes = [(4, len(METRICS))] * 2 + [(1, len(METRICS))]
    one, two, seen = map(rng.random, shapes)
    rows = [
        ScoreRow("personalised", domain, client, "net", 0)
        for domain, client in (("a", "a"), ("new", "a"), ("new", "b"))
    ]
    metrics = summarise("test", rows, [seen, one, two], {"new"}, "personalised", 2)
    for i, metric in enumerate(METRICS):
        column = (one + two)[:, i] / 2
        assert metrics[f"test/personalised/new/{metric}"] == pytest.approx(column.mean())
        assert metrics[f"test/personalised/new/{metric}_std"] == pytest.approx(column.std(ddof=1))
        assert metrics[f"test/personalised/unseen/{metric}"] == pytest.approx(column.mean())
        assert metrics[f"test/{metric}"] == pytest.approx(seen[0, i])
        assert f"test/personalised/a/{metric}_std" not in metrics
        assert f"test/personalised/unseen/{metric}_std" not in metrics
        for client, own in (("a", one), ("b", two)):  # each alone, by name
            assert metrics[f"test/personalised/new/{client}/{metric}"] == pytest.approx(own[:, i].mean())
    many = [ScoreRow("personalised", "new", str(client), "net", 0) for client in range(51)]
    metrics = summarise("test", many, [one] * 51, {"new"}, "personalised", 51)
    assert not any(name.count("/") > 3 for name in metrics)


# -- ensembles ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("distance", ["cosine", "euclidean"])
def test_an_ensemble_is_ranked_by_all_clients_features_side_by_side(tree, distance):
    how = Evaluation(ensemble=True, distance=distance, layer="pool")
    model = fit(make_model(Local(), evaluation=how), make_data(MarketFolders(str(tree))), rounds=1)
    scores = model.evaluator.score("test")
    sets, flat_model = model.parts.federated.tests["viper"], model.parts.models["smallcnn"]
    features = {"query": [], "gallery": []}
    for client in model.parts.clients.values():
        flat_model.flat.private.copy_(client.private)
        for part, found in features.items():
            pixels = getattr(sets, part).images.decode(SIZE)
            found.append(extract_features(flat_model.network, HeldPixels(pixels, CPU), how, CPU))
    assert len(features["gallery"]) == 2
    trials = trials_of(sets, *(torch.cat(parts, dim=1) for parts in features.values()))
    rankings = [Ranker(distance=distance).score(*trial) for trial in trials]
    for metric in METRICS:
        values = [ranking.metrics[metric] for ranking in rankings]
        assert scores[f"test/ensemble/viper/{metric}"] == pytest.approx(np.mean(values), abs=1e-12), metric
        assert scores[f"test/ensemble/unseen/{metric}"] == scores[f"test/ensemble/viper/{metric}"]
    assert not [name for name in scores if name.startswith("test/ensemble/") and "north" in name]
    alone = [scores[f"test/personalised/viper/{metric}"] for metric in METRICS]
    assert alone != [scores[f"test/ensemble/viper/{metric}"] for metric in METRICS]


@pytest.mark.dist
def test_an_ensemble_of_models_on_two_ranks_has_the_same_bits(config, tmp_path, capsys):
    options = ["fit", "--config", str(config), "--model.method", "Local", "--model.evaluation.ensemble", "true"]
    assert main([*options, "--run_dir", str(tmp_path / "one")]) == 0
    finish(Run(tmp_path, *options, "--run_dir", tmp_path / "two", ranks=2))
    assert metrics_of(tmp_path / "one") == metrics_of(tmp_path / "two")
    assert "test/ensemble/viper/mAP" in metrics_of(tmp_path / "one")
    capsys.readouterr()
    assert main(["report", str(tmp_path / "one")]) == 0
    assert "ensemble: all personalised models" in capsys.readouterr().out


def side_by_side(model, part, how):
    """Features of a part of viper by all personalised models, one client after another."""
    images = HeldPixels(getattr(model.parts.federated.tests["viper"], part).images.decode(SIZE), CPU)
    found = []
    for client in model.parts.clients.values():
        client.load()
        receive(client, model.settings.method, model.server)
        model.settings.method.personalise(client)
        found.append(extract_features(client.model.network, images, how, CPU))
        client.unload()
    return torch.cat(found, dim=1)


def test_an_ensemble_that_the_method_delivers_has_features_and_lists(tree, tmp_path):
    how = Evaluation(layer="pool", distance="euclidean")
    model = fit(make_model(SKA(dual=False, unseen="concat"), evaluation=how), make_data(MarketFolders(str(tree))), 1)
    model.evaluator.score("test", rankings=tmp_path / "lists")
    files = model.evaluator.write_features(tmp_path / "features")
    assert [path.stem for path in files] == ["viper", "north", "south"]
    assert {path.stem for path in (tmp_path / "lists").glob("*.npz")} == {"north", "south", "viper"}
    sets = model.parts.federated.tests["viper"]
    query, gallery, labels = trials_of(sets, *(side_by_side(model, part, how) for part in ("query", "gallery")))[0]
    found = np.load(tmp_path / "features" / "viper.npz")
    assert found["gallery"].shape[1] == 2 * model.parts.models["smallcnn"].network.width_of("pool")
    assert np.array_equal(found["query"], query)
    assert np.array_equal(found["gallery"], gallery)
    assert np.array_equal(found["gallery_pids"], labels.gallery_pids)
    lists = np.load(tmp_path / "lists" / "viper.npz")
    distances = torch.cdist(query.double(), gallery.double()).numpy()
    for q, row in enumerate(lists["index"]):
        own = (labels.gallery_pids == labels.query_pids[q]) & (labels.gallery_camids == labels.query_camids[q])
        order = [g for g in np.argsort(distances[q], kind="stable") if not (own | (labels.gallery_pids == -1))[g]]
        assert row[row >= 0].tolist() == order


def test_an_ensemble_beside_other_models_is_only_scored(tree, tmp_path):
    data = make_data(MarketFolders(str(tree)))
    model = fit(make_model(Local(), evaluation=Evaluation(ensemble=True)), data, rounds=1)
    files = model.evaluator.write_features(tmp_path)
    assert {path.stem for path in files} == {"north", "south", "viper@north", "viper@south"}
    assert {path.stem for path in tmp_path.iterdir()} == {path.stem for path in files}


@pytest.mark.dist
def test_two_ranks_write_the_same_features_of_an_ensemble(config, tmp_path):
    options = [
        "--config",
        str(config),
        "--model.method=SKA",
        "--model.method.dual=false",
        "--model.method.unseen=concat",
    ]
    assert main(["fit", *options, "--run_dir", str(tmp_path / "one")]) == 0
    ready = [*options, "--ckpt_path", str(tmp_path / "one" / "checkpoints" / "last.ckpt")]
    assert main(["predict", *ready, "--run_dir", str(tmp_path / "one")]) == 0
    run = finish(Run(tmp_path, "predict", *ready, "--run_dir", tmp_path / "two", ranks=2))
    one, two = (tmp_path / name / "features" for name in ("one", "two"))
    assert {path.name for path in two.glob("*.npz")} == {"north.npz", "south.npz", "viper.npz"}, run.output
    for path in two.glob("*.npz"):
        for name, array in np.load(one / path.name).items():
            np.testing.assert_array_equal(array, np.load(path)[name])


def test_pooled_features_need_no_neck(tree):
    data = make_data(MarketFolders(str(tree)))
    scores = {}
    for layer in ("pool", "neck"):
        method = FedAvg(share_head=False, share_neck=False)
        model = fit(make_model(method, evaluation=Evaluation(layer=layer)), data, rounds=1)
        scores[layer] = model.evaluator.score("test")
        assert model.evaluator.plan.has_global == (layer == "pool")
        assert model.evaluator.primary == ("global" if layer == "pool" else "personalised")
    for kind in ("global", "personalised"):
        assert scores["pool"][f"test/{kind}/north/mAP"] == scores["pool"]["test/global/north/mAP"]
    whole = fit(make_model(FedAvg(share_head=False), evaluation=Evaluation(layer="pool")), data, rounds=1)
    rank = "test/global/viper/rank1"
    assert whole.evaluator.score("test")[rank] == scores["pool"][rank]  # the first round's backbones are the same


def test_methods_that_make_personal_models_deliver_those_and_a_global_one_for_unseen_sets(tree, tmp_path):
    model = fit(make_model(Ditto(lam=0.0)), make_data(MarketFolders(str(tree))), rounds=1)
    evaluator = model.evaluator
    assert evaluator.plan.has_global
    assert evaluator.primary == "personalised"
    scores = evaluator.score("test", rankings=tmp_path / "lists")
    assert scores["test/mAP"] == scores["test/personalised/seen/mAP"] != scores["test/global/seen/mAP"]
    assert {path.stem for path in (tmp_path / "lists").glob("*.npz")} == {"north", "south", "viper"}
    files = evaluator.write_features(tmp_path / "features")
    assert {path.stem for path in files if path.exists()} == {"north", "south", "viper"}
    flat_model = model.parts.models["smallcnn"]
    for name, source in (("north", model.parts.clients["north"].private_state()["kept.personal"]), ("viper", None)):
        vector = model.server.vector("smallcnn") if source is None else source[: flat_model.flat.num_shared]
        flat_model.shared.copy_(vector)
        sets = model.parts.federated.tests[name]
        pixels = (sets.gallery if source is None else sets.query).images.decode(SIZE)
        expected = extract_features(flat_model.network, HeldPixels(pixels, CPU), Evaluation(), CPU)
        found = np.load(tmp_path / "features" / f"{name}.npz")
        part = found["query"] if source is not None else np.concatenate([found["query"], found["gallery"]])
        rows = {tuple(np.round(row, 5)) for row in expected.numpy()}
        assert {tuple(np.round(row, 5)) for row in part} <= rows


@pytest.mark.parametrize("ensemble", [False, True])
def test_clients_forget_their_session_when_their_model_fails(tree, ensemble):
    how = Evaluation(ensemble=ensemble)
    model = fit(make_model(Ditto(lam=0.0), evaluation=how), make_data(MarketFolders(str(tree))), rounds=1)
    clients, sessions = model.parts.clients.values(), []

    def fail(*_):
        if loaded := [client for client in clients if "received" in vars(client)]:
            sessions.extend(set(client.kept) for client in loaded)
            raise RuntimeError("no features today")

    model.parts.models["smallcnn"].network.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="no features today"):
        model.evaluator.score("test")
    assert sessions == [{"personal"}]
    assert [client.kept for client in clients] == [{}, {}]
    assert not any("received" in vars(client) for client in clients)
