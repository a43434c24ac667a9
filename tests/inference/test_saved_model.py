"""A finished run from Python: its model embeds images as ``fedsim predict`` does, and its lists are the plain ones."""

import ast
import random
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import fedsim.inference.model as model_module
from fedsim import load_model, rank
from fedsim.__main__ import main
from fedsim.core.errors import ConfigError, DataError
from fedsim.data import SyntheticReID
from fedsim.evaluation.feature_file import Files, read_features, write_features
from fedsim.evaluation.ranking import RetrievalLabels
from fedsim.inference.tensors import chosen_tensors
from fedsim.methods import FedPav
from fedsim.sweep.seeds import seeds_and_parallel
from small import fit, make_model
from tiny_run import TINY

SIZE = (32, 16)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of FedPav in which one client has a network of its own; with features of a prediction."""
    folder = tmp_path_factory.mktemp("saved")
    (folder / "tiny.yaml").write_text(TINY)
    args = ["--config", folder / "tiny.yaml", "--run_dir", folder / "run", "--trainer.max_epochs=1"]
    assert main(["fit", *map(str, args), "--trainer.check_val_every_n_epoch=1", "--model.bn_stats=mean"]) == 0
    assert main(["predict", "--ckpt_path", str(folder / "run")]) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def pictures():
    """The test pictures of an unseen town: queries and gallery."""
    source = SyntheticReID(clients=4, unseen=2, scale=0.25)
    [town] = [domain for domain in source.domains() if domain.name == "new0"]
    return town.query, town.gallery


def test_it_embeds_what_a_prediction_writes(run, pictures):
    features = np.load(run / "features" / "new0.npz")
    model = load_model(run)
    assert (model.about["method"], model.about["model"], model.about["round"]) == ("FedPav", "global", 1)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    for split, name in zip(pictures, ("query", "gallery"), strict=True):
        embedded = model.embed(split.images.decode(SIZE), batch_size=5)
        torch.testing.assert_close(embedded, torch.from_numpy(features[name]), rtol=1e-5, atol=1e-6)


def test_it_embeds_in_the_size_in_which_the_run_scores(tmp_path, pictures):
    """Papers 000 and 001 test on larger images than they train on."""
    (tmp_path / "tiny.yaml").write_text(TINY)
    args = ["--config", tmp_path / "tiny.yaml", "--run_dir", tmp_path / "run", "--trainer.max_epochs=1"]
    assert main(["fit", *map(str, args), "--data.test_size=[40, 24]"]) == 0
    assert main(["predict", "--ckpt_path", str(tmp_path / "run")]) == 0
    features, model = np.load(tmp_path / "run" / "features" / "new0.npz"), load_model(tmp_path / "run")
    assert model.size == (40, 24)
    embedded = model.embed(pictures[0].images.decode((40, 24)))
    torch.testing.assert_close(embedded, torch.from_numpy(features["query"]), rtol=1e-5, atol=1e-6)


def test_files_pictures_and_pixels_have_the_same_features_in_any_size(run, pictures, tmp_path):
    model = load_model(run)
    for size in (SIZE, (64, 40)):
        pixels = pictures[0].images.decode(size)[:5]
        images = [Image.fromarray(p.permute(1, 2, 0).numpy()) for p in pixels]
        paths = [tmp_path / f"{size[0]}-{i}.png" for i in range(5)]
        for image, path in zip(images, paths, strict=True):
            image.save(path)
        resized = [np.asarray(image.resize(SIZE[::-1], Image.Resampling.BICUBIC)) for image in images]
        expected = model(torch.from_numpy(np.stack(resized)).permute(0, 3, 1, 2))
        for given in (pixels, images, paths, [str(path) for path in paths], [images[0], *paths[1:]]):
            torch.testing.assert_close(model.embed(given), expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(model.embed(images[1]), expected[1:2], rtol=1e-5, atol=1e-6)
    assert model.embed([]).shape == (0, expected.shape[1])


def test_a_clients_model_is_its_personalised_one(run):
    grey = torch.full((1, 3, *SIZE), 90, dtype=torch.uint8)
    for client in ("town0", "town1"):  # of FedPav everything but the head is shared
        assert torch.equal(load_model(run, client=client).embed(grey), load_model(run).embed(grey))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"client": "town9"}, ConfigError, "client: there is no client town9; choose from town0, town1"),
        ({"arch": "resnet"}, ConfigError, "arch: there is no architecture resnet; choose from smallcnn"),
        ({"checkpoint": "v1"}, ConfigError, "checkpoint: there is no v1; choose best or last, or give the path"),
        ({"device": "cuda:7"}, ConfigError, "cuda:7"),
    ],
)
def test_what_a_run_does_not_have_is_one_line(run, options, error, message):
    with pytest.raises(error, match=message) as raised:
        load_model(run, **options)
    assert "\n" not in str(raised.value)


def test_a_folder_without_a_run_and_a_run_without_a_config_are_one_line(tmp_path):
    with pytest.raises(DataError, match="no such checkpoint"):
        load_model(tmp_path / "nothing")
    model = fit(make_model(FedPav()), rounds=1)
    model.trainer.save_checkpoint(tmp_path / "last.ckpt")
    with pytest.raises(
        ConfigError, match=r"config.yaml: is missing, so the network is unknown; give a run of fedsim fit"
    ):
        load_model(tmp_path / "last.ckpt")


@pytest.mark.parametrize(
    "images",
    [torch.zeros(2, 3, 8, 8), torch.zeros(3, 8, 8, dtype=torch.uint8), torch.zeros(2, 3, 0, 8, dtype=torch.uint8)],
)
def test_tensors_that_are_no_pixels_are_one_line(run, images):
    with pytest.raises(ConfigError, match="a tensor must be RGB pixels, uint8"):
        load_model(run).embed(images)


def test_a_file_that_is_no_image_is_named(run, tmp_path):
    (tmp_path / "a.jpg").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"a\.jpg: cannot read this image"):
        load_model(run).embed([tmp_path / "a.jpg"])


@pytest.mark.parametrize("mode", ["I;16", "I", "F"])
def test_an_opened_deep_picture_has_the_features_of_its_file(mode, run, tmp_path):
    ramp = np.linspace(0, 1 if mode == "F" else 65535, 64).reshape(8, 8)
    values = ramp.astype({"I;16": np.uint16, "I": np.int32, "F": np.float32}[mode])
    Image.fromarray(values).save(tmp_path / "deep.tif")
    model = load_model(run)
    with Image.open(tmp_path / "deep.tif") as picture:
        assert picture.mode == mode
        assert torch.equal(model.embed(picture), model.embed(tmp_path / "deep.tif"))
    grey = Image.fromarray(np.floor(ramp / ramp.max() * 255 + 0.5).astype(np.uint8))
    assert torch.equal(model.embed(tmp_path / "deep.tif"), model.embed(grey)), "scaled by its range"


def test_floats_in_place_of_pixels_and_wrong_counts_are_refused(run, tmp_path):
    model = load_model(run)
    with pytest.raises(ConfigError, match=r"^images: a tensor must be RGB pixels"):
        model(torch.rand(1, 3, *model.size))
    for images, words in {3: "images: int is no picture", None: "images: NoneType is no picture"}.items():
        with pytest.raises(ConfigError, match=words):
            model.embed(images)
    with pytest.raises(DataError, match=r"^images: cannot read this picture \(it has no pixels\)"):
        model.embed(Image.new("RGB", (0, 5)))
    for pixels in ([np.zeros((9, 9, 3))], np.zeros((1, 3, 9, 9), np.uint8)):
        with pytest.raises(ConfigError, match=r"^images: .*; give all images as one tensor") as caught:
            model.embed(pixels)
        assert "\n" not in str(caught.value)
    other = torch.zeros(1, 3, model.size[0] + 1, model.size[1], dtype=torch.uint8)
    for pixels, words in [(other, r"the model's height and width; call embed"), (None, "NoneType is no tensor")]:
        with pytest.raises(ConfigError, match=rf"^images: .*{words}"):
            model(pixels)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1e30)
    with pytest.raises(DataError, match=r"^images: the features of image 0 are not finite"):
        model.embed(torch.full((2, 3, 9, 9), 200, dtype=torch.uint8))
    for count in (0, -3, True, 1.5, None):
        with pytest.raises(ConfigError, match=r"^batch_size: "):
            model.embed([], batch_size=count)
    with pytest.raises(DataError, match=r"^images: cannot read this picture \(its floats reach 9e\+09"):
        model.embed(Image.fromarray(np.full((2, 2), 9e9, dtype=np.float32)))
    with pytest.raises(ConfigError, match=r"^--seeds: 4294967296 is not in"):
        seeds_and_parallel(["--seeds", "4294967296"])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(value, run, monkeypatch):
    def with_one(*args, **options):
        tensors, masks = chosen_tensors(*args, **options)
        name = next(name for name, tensor in tensors.items() if tensor.is_floating_point())
        return {**tensors, name: torch.full_like(tensors[name], value)}, masks

    monkeypatch.setattr(model_module, "chosen_tensors", with_one)
    with pytest.raises(DataError, match=r"holds numbers that are not finite"):
        load_model(run)


def test_the_page_runs_as_it_stands(run, pictures, tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[2] / "docs" / "inference.md").read_text()
    blocks = re.findall(r"<!-- a test runs this block -->\n```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 3
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").symlink_to(run)
    for number, name in enumerate(["query/a", "query/b", "gallery/c", "gallery/d", "gallery/e"]):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        pixels = pictures[1].images.decode(SIZE)[number].permute(1, 2, 0).numpy()
        Image.fromarray(pixels).save(tmp_path / f"{name}.jpg")
    exec(compile("".join(blocks), "docs/inference.md", "exec"), {})
    assert (tmp_path / "rank1.png").is_file()
    assert (tmp_path / "town0.png").is_file()
    lists = ast.literal_eval(capsys.readouterr().out)
    assert [len(of_query) for of_query in lists] == [2, 2]
    assert {name for of_query in lists for name in of_query} <= {f"gallery/{name}.jpg" for name in "cde"}


def test_features_and_lists_name_their_files(tmp_path):
    """Of a folder in Market-1501's layout; drawn pictures have no files."""
    from_files, drawn = tmp_path / "files.npz", tmp_path / "drawn.npz"
    labels = RetrievalLabels(np.array([1, 2]), np.zeros(2, int), np.array([2, 1, 1]), np.ones(3, int))
    names = Files(np.array(["a.jpg", "b.jpg"]), np.array(["c.jpg", "d.jpg", "ü.jpg"]))
    write_features(from_files, torch.eye(2), torch.ones(3, 2), labels, names)
    write_features(drawn, torch.eye(2), torch.ones(3, 2), labels, Files(np.array(["", ""]), np.array([""] * 3)))
    assert np.load(from_files)["gallery_files"].tolist() == ["c.jpg", "d.jpg", "ü.jpg"]
    assert np.load(from_files)["query_files"].tolist() == ["a.jpg", "b.jpg"]
    assert "query_files" not in np.load(drawn)
    assert read_features(from_files).labels.num_valid == read_features(drawn).labels.num_valid == 2


# -- rankings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("distance", ["cosine", "euclidean"])
def test_lists_and_scores_are_those_of_plain_loops(seed, distance):
    generator = np.random.default_rng(seed)
    query, gallery = generator.integers(-3, 4, (5, 4)) + 0.5, generator.integers(-3, 4, (12, 4)) + 0.5
    pids = generator.integers(0, 3, 5), generator.integers(-1, 3, 12)
    cameras = generator.integers(0, 2, 5), generator.integers(0, 2, 12)

    def similarity(q, g):
        return q @ g / np.linalg.norm(q) / np.linalg.norm(g) if distance == "cosine" else -np.linalg.norm(q - g)

    precisions, firsts = [], []
    plain = np.array([[similarity(q, g) for g in gallery] for q in query])
    for row, pid, camera in zip(plain, pids[0], cameras[0], strict=True):
        order = sorted(range(12), key=lambda i: (-np.float32(row[i]), i))
        kept = [i for i in order if pids[1][i] != -1 and not (pids[1][i] == pid and cameras[1][i] == camera)]
        hits = [rank for rank, i in enumerate(kept, start=1) if pids[1][i] == pid]
        if hits:
            precisions.append(np.mean([(n + 1) / rank for n, rank in enumerate(hits)]))
            firsts.append(hits[0] == 1)
    as_float = [torch.tensor(f, dtype=torch.float32) for f in (query, gallery)]
    ranked = rank(
        *as_float, names=[f"{i}.jpg" for i in range(12)], pids=pids, cameras=cameras, distance=distance, top=4
    )
    np.testing.assert_allclose(ranked.similarity, -np.sort(-plain)[:, :4], atol=1e-4)
    assert ranked.names == [[f"{i}.jpg" for i in row] for row in ranked.order.tolist()]
    for row, order in zip(plain, ranked.order.tolist(), strict=True):
        assert all(row[a] >= row[b] - 1e-5 for a, b in pairwise(order))
    if len({*np.round(plain, 5).ravel().tolist()}) == plain.size:  # without ties
        assert ranked.scores.mAP == pytest.approx(np.mean(precisions), abs=1e-6)
        assert ranked.scores.rank1 == pytest.approx(np.mean(firsts), abs=1e-6)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"pids": ([1.9, 2.0, 3.0], [1.1, 2.0, 3.0])}, "pids: expected integers, .* got "),
        ({"pids": (["a", "b", "c"], ["a", "b", "c"])}, "pids: expected integers"),
        ({"pids": ([True] * 3, [True] * 3)}, "pids: expected integers"),
        ({"pids": ([2**70] * 3, [1] * 3)}, "pids: expected integers"),
        ({"pids": ([[1]] * 3, [1] * 3)}, "pids: expected integers"),
        ({"pids": 3}, "pids: expected a pair"),
        ({"pids": ([1] * 3, [1] * 3), "cameras": ([0.5] * 3, [0.1] * 3)}, "cameras: expected integers"),
        ({"top": -1}, "top: -1 is less than 1"),
        ({"top": 0}, "top: 0 is less than 1"),
        ({"top": "3"}, "top: 3 is no integer"),
        ({"distance": "Cosine"}, "distance: Cosine is not one of 'cosine', 'euclidean'"),
        ({"query": None}, "query: expected a tensor or an array of floats"),
        ({"query": [[1.0, 2.0]]}, "query: expected a tensor or an array of floats"),
        ({"gallery": torch.eye(3).long()}, r"gallery: expected .* got int64 \[3, 3\]"),
        ({"gallery": torch.eye(3).to_sparse()}, "gallery: expected a tensor"),
        ({"names": "abc"}, "names: expected "),
        ({"names": [1, 2, 3]}, "names: expected "),
    ],
)  # fmt: skip
def test_arguments_of_a_ranking_that_are_none_are_named(changes, line):
    with pytest.raises(ConfigError, match=f"^{line}"):
        rank(**{"query": torch.eye(3), "gallery": torch.eye(3)} | changes)


@pytest.mark.parametrize("dtype", [">f4", "f2", "f8"])
def test_arrays_are_ranked_as_tensors_are(dtype):
    features, names = np.random.default_rng(0).normal(size=(4, 3)).astype(dtype), np.array(list("abcd"))
    features.flags.writeable = False
    ranked = rank(features, features, names=names, pids=(np.arange(4), torch.arange(4)), top=np.int64(2))
    plain = rank(*[torch.tensor(features.astype("f4"))] * 2, names=list("abcd"), top=2)
    assert (ranked.names, type(ranked.names[0][0])) == (plain.names, str)
    assert torch.equal(ranked.order, plain.order)


def test_scores_need_identities_and_lists_do_not():
    ranked = rank(torch.eye(3), torch.eye(3), top=50)
    assert (ranked.scores, ranked.names) == (None, None)
    assert ranked.order.tolist() == [[0, 1, 2], [1, 0, 2], [2, 0, 1]]


def test_none_of_the_drawn_mistakes_slips_through():
    """Of each kind many are drawn: other sizes, identities without a match, features that are not finite."""
    draw, slipped = random.Random(0), 0
    for _ in range(200):
        num_query, num_gallery, width = (draw.randint(1, 5) for _ in range(3))
        query, gallery = torch.rand(num_query, width), torch.rand(num_gallery, width)
        options = {"pids": ([1] * num_query, [1] * num_gallery), "names": ["a"] * num_gallery}
        kind = draw.randrange(6)
        if kind == 0:
            gallery = torch.rand(num_gallery, width + draw.randint(1, 3))
        elif kind == 1:
            options["names"] = ["a"] * (num_gallery + draw.randint(1, 3))
        elif kind == 2:
            options["pids"] = ([1] * (num_query + draw.choice([-1, 1])), [1] * num_gallery)
        elif kind == 3:
            options["pids"] = ([1] * num_query, [2] * num_gallery)
        elif kind == 4:
            options |= {"pids": None, "cameras": ([1] * num_query, [2] * num_gallery)}
        else:
            gallery[draw.randrange(num_gallery), draw.randrange(width)] = draw.choice([float("nan"), float("inf")])
        try:
            rank(query, gallery, **options)
        except (ConfigError, DataError) as error:
            slipped += "\n" in str(error)
        else:
            slipped += 1
    assert slipped == 0
