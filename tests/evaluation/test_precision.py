"""``model.evaluation.precision``: features in float32, or in the precision and the order of memory of the run."""

import pytest
import torch

from fedsim.data.pixels import HeldPixels
from fedsim.evaluation.classification import Classification
from fedsim.evaluation.retrieval import Retrieval
from fedsim.evaluation.settings import Evaluation
from fedsim.functional.normalise import normalise_images
from fedsim.methods import FedAvg, FedPav
from fedsim.training.features import FLOAT32, Passes, extract_features
from fedsim.training.settings import LocalTraining
from small import fit, make_data, make_model, refuse, sgd

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def images():
    pixels = torch.randint(0, 256, (22, 3, 32, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    return HeldPixels(pixels, CPU)


@pytest.fixture(scope="module")
def flat_model():
    """The rank's model after a round."""
    [model] = fit(make_model(FedPav()), make_data(), rounds=1).parts.models.values()
    return model


@pytest.fixture
def convolutions(flat_model):
    """What the convolutions get and give: dtype of the outputs, and whether images are in channels_last."""
    seen = []

    def note(_, inputs, output):
        seen.append((output.dtype, inputs[0].is_contiguous(memory_format=torch.channels_last)))

    layers = [layer for layer in flat_model.network.modules() if isinstance(layer, torch.nn.Conv2d)]
    hooks = [layer.register_forward_hook(note) for layer in layers]
    yield seen
    for hook in hooks:
        hook.remove()


def outputs(flat_model, images, precision, run, **settings):
    return Retrieval(Evaluation(precision=precision, batch_size=8, **settings), run).outputs(flat_model, images)


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("layer", ["neck", "pool"])
def test_the_default_is_float32_in_every_run(flat_model, images, convolutions, layer, flip):
    """The expected features are computed by a plain loop, outside of any autocast."""
    default = Evaluation(layer=layer, flip=flip, batch_size=8)
    assert default.precision == "32-true"
    network = flat_model.network.eval()
    with torch.no_grad():
        parts = []
        for batch in images.pixels.split(8):
            x = normalise_images(batch)
            features = getattr(network(x), layer)
            parts.append(features + getattr(network(x.flip(-1)), layer) if flip else features)
    expected = torch.cat(parts)
    for run in ("32-true", "bf16-mixed"):
        assert torch.equal(Retrieval(default, run).outputs(flat_model, images), expected)
    assert torch.equal(outputs(flat_model, images, "run", "32-true", layer=layer, flip=flip), expected)
    assert {dtype for dtype, _ in convolutions} == {torch.float32}


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("layer", ["neck", "pool"])
def test_features_of_a_run_in_bfloat16_are_near_those_in_float32(flat_model, images, convolutions, layer, flip):
    near = outputs(flat_model, images, "run", "bf16-mixed", layer=layer, flip=flip)
    assert {dtype for dtype, _ in convolutions} == {torch.bfloat16}
    exact = outputs(flat_model, images, "32-true", "bf16-mixed", layer=layer, flip=flip)
    assert near.dtype == torch.float32
    assert not torch.equal(near, exact)
    assert torch.nn.functional.cosine_similarity(near, exact).min() > 0.99
    assert (near - exact).norm() < 0.05 * exact.norm()


def test_sums_with_mirror_images_are_not_rounded_again(flat_model, images):
    batches = [images.pixels, images.pixels.flip(-1)]
    settings, passes = Evaluation(batch_size=64), Passes("bf16-mixed")
    one, mirrored = (extract_features(flat_model.network, HeldPixels(p, CPU), settings, CPU, passes) for p in batches)
    both = outputs(flat_model, images, "run", "bf16-mixed", flip=True)
    assert torch.equal(both, one + mirrored)
    assert not torch.equal(both, both.bfloat16().float())


def test_channels_last_is_for_runs_that_train_in_it(flat_model, images, convolutions):
    for trained, precision in ((False, "32-true"), (False, "run"), (True, "32-true"), (True, "run")):
        convolutions.clear()
        flat_model.channels_last = trained
        try:
            features = outputs(flat_model, images, precision, "32-true")
        finally:
            flat_model.channels_last = False
        assert all(is_last for _, is_last in convolutions) == (trained and precision == "run")
        assert torch.allclose(features, outputs(flat_model, images, "32-true", "32-true"), atol=1e-4)


@pytest.mark.parametrize("precision", ["32-true", "run"])
def test_a_run_evaluates_in_its_precision(precision):
    """Through the trainer: the scorer gets the precision of the run, and the model the order of memory."""
    client = LocalTraining(batch_size=8, optimizer=sgd, channels_last=True)
    settings = Evaluation(test_during_fit=False, precision=precision)
    model = fit(make_model(FedPav(), client=client, evaluation=settings), rounds=1, precision="bf16-mixed")
    scorer, [flat_model] = model.evaluator.scorer, model.parts.models.values()
    images = HeldPixels(torch.randint(0, 256, (8, 3, 32, 16), dtype=torch.uint8), CPU)
    passes = Passes("bf16-mixed", channels_last=True) if precision == "run" else FLOAT32
    expected = extract_features(flat_model.network, images, settings, CPU, passes)
    assert torch.equal(scorer.outputs(flat_model, images), expected)


def test_logits_are_in_the_precision_of_the_run(images):
    data = make_data(labels="common")
    settings = {"task": "classification", "test_during_fit": False}
    model = fit(make_model(FedAvg(share_head=True), evaluation=Evaluation(**settings)), data, rounds=1)
    [classifier] = model.parts.models.values()
    found = {}
    for precision in ("32-true", "run"):
        chosen = Evaluation(**settings, precision=precision)
        found[precision] = Classification(chosen, data.federated, "bf16-mixed").outputs(classifier, images)
        assert found[precision].dtype == torch.float32
    assert not torch.equal(*found.values())
    assert torch.nn.functional.cosine_similarity(*found.values()).min() > 0.99


def test_other_precisions_are_refused_in_one_line(capsys):
    line = refuse(capsys, "fit", "--model.method=FedPav", "--model.evaluation.precision=bf16-mixed")
    assert "model.evaluation.precision" in line
    assert "32-true" in line
    assert "run" in line
