"""Every command that uses a device, on simulated GPUs: nothing is refused, and the results are those of the CPU."""

import json

import numpy as np
import pytest
from safetensors.torch import load_file

import simulated
from fedsim.__main__ import main
from runs import differences, judged_in_two_steps, left_by, options
from small_generators import STEPS, WIDTHS

GPU, CPU = (f"--trainer.accelerator={name}" for name in ("gpu", "cpu"))


def call(*words):
    assert main([str(word) for word in words]) == 0


def on(device, *words):
    """Call a command on the CPU, or on simulated GPUs."""
    if device == "cpu":
        call(*words)
    else:
        with simulated.cuda(2):
            call(*words)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A fit of two rounds on the CPU."""
    folder = tmp_path_factory.mktemp("fit") / "run"
    call(*options(folder, "ditto", "--model.client_store=host"))
    return folder


@pytest.mark.slow
def test_a_fit_goes_on_where_it_was(run, tmp_path):
    call(*options(tmp_path / "whole", "ditto", rounds=3))
    with simulated.cuda(1):
        call(*options(tmp_path / "parts", "ditto", gpus=1, rounds=1))
        more = ["--trainer.max_epochs=3", "--trainer.check_val_every_n_epoch=3"]
        call("fit", "--ckpt_path", tmp_path / "parts", *more)
    tensors = [left_by(tmp_path / name)[0] for name in ("whole", "parts")]
    assert differences((tensors[0], []), (tensors[1], [])) == []


@pytest.mark.slow
@pytest.mark.parametrize("command", ["validate", "test"])
def test_scores(command, run, capsys):
    said = []
    for device, where in (("cpu", CPU), ("gpu", GPU)):
        capsys.readouterr()
        on(device, command, "--config", run / "config.yaml", "--ckpt_path=last", f"--run_dir={run}", where)
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    assert "town0" in said[0]


@pytest.mark.others
@pytest.mark.slow
def test_features_rankings_and_maps(run, tmp_path):
    found = {}
    for device, where in (("cpu", CPU), ("gpu", GPU)):
        folder = tmp_path / device
        common = ["--config", run / "config.yaml", f"--ckpt_path={run}", f"--run_dir={folder}", where]
        on(device, "predict", *common, "--save_maps")
        on(device, "test", *common, "--save_ranking")
        files = sorted(path for path in folder.rglob("*") if path.suffix in (".npz", ".png"))
        found[device] = {str(path.relative_to(folder)): path for path in files}
    assert found["cpu"].keys() == found["gpu"].keys()
    assert {name.partition("/")[0] for name in found["cpu"]} == {"features", "maps", "rankings", "tests"}
    for name, path in found["cpu"].items():
        if path.suffix == ".npz":
            ours, theirs = (np.load(place) for place in (path, found["gpu"][name]))
            assert all(np.array_equal(ours[key], theirs[key]) for key in ours), name
        else:
            assert path.read_bytes() == found["gpu"][name].read_bytes(), name


@pytest.fixture(scope="module")
def features(tmp_path_factory):
    """Drawn features of 30 queries and 200 gallery images."""
    rng, arrays = np.random.default_rng(0), {}
    for part, size in (("query", 30), ("gallery", 200)):
        arrays[part] = rng.normal(size=(size, 16)).astype(np.float32)
        arrays |= {f"{part}_pids": rng.integers(0, 12, size), f"{part}_camids": rng.integers(0, 3, size)}
    path = tmp_path_factory.mktemp("features") / "features.npz"
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize(
    "how",
    [
        [],
        ["--distance=euclidean", "--single_gallery_shot"],
        ["--backend=faiss"],
        ["--backend=torch", "--rerank"],
        ["--rerank", "--expand=3", "--alpha=1.0"],
    ],
    ids=" ".join,
)
def test_rank(how, features, capsys):
    scores = []
    for device in ("cpu", "cuda", "cuda:1"):  # the last one is not current
        capsys.readouterr()
        on(device, "rank", features, f"--device={device}", "--json", *how)
        scores.append(json.loads(capsys.readouterr().out))
    assert scores[0] == scores[1] == scores[2]
    assert 0 < scores[0]["mAP"] < 1


@pytest.mark.slow
def test_export(run, tmp_path):
    for device in ("cpu", "gpu"):
        on(device, "export", f"--ckpt_path={run}", f"--output={tmp_path / device}.safetensors")
    ours, theirs = (load_file(tmp_path / f"{device}.safetensors") for device in ("cpu", "gpu"))
    assert ours
    assert all(theirs[name].equal(tensor) for name, tensor in ours.items())


@pytest.mark.others
@pytest.mark.slow
def test_augment(tmp_path):
    config = tmp_path / "data.yaml"
    config.write_text(
        "data: {source: {class_path: SyntheticReID, init_args: {clients: 1, unseen: 1, scale: 0.2}}, size: [32, 16], "
        "val: none}\n"
    )
    written = []
    for device in ("cpu", "cuda"):
        folder = tmp_path / device
        with judged_in_two_steps():
            on(device, "augment", "fit", "--config", config, "--output", folder, *STEPS, *WIDTHS, f"--device={device}")
        for command, output in (("preview", "swaps.png"), ("write", "images")):
            more = ["--generators", folder, "--output", folder / output]
            on(device, "augment", command, "--config", config, *more)
        written.append(load_file(folder / "town0" / "generator.safetensors"))
    assert written[0].keys() == written[1].keys()
    assert all(written[1][name].equal(tensor) for name, tensor in written[0].items())
