"""Every method's config on simulated GPUs: nothing is refused, and the bits are those of the CPU.

On one GPU each step is captured as a CUDA graph where the method lets it; on two GPUs steps are plain.
"""

import functools

import pytest

import others
import simulated
from budgets import counted_waits
from failing import run_on_ranks
from runs import HAS_GRAPHS, METHODS, differences, fit, left_by, without_scores

FAST = ("fedcapr", "fedpav")
"""Clusters, a second model, a measured weight, captured steps: the fast tests are content with these."""
BATCHES = ["--model.client.batch_size=4", "--data.limit_client_batches=4"]
"""More than the plain steps before a recording"""
GRAPH = "--model.client.graph=true"
REFUSED = (
    "apfl", "dacs", "fedreid", "fedreid_fine_tune", "perfedavg", "pfedme", "ska", "sscu", "stylebank",
    "stylebank_random", "text_anchors",
)  # fmt: skip
"""configs of methods that declare plain steps"""
CLUSTERS = ("fedcapr", "fedklpr", "feduca", "feducc", "fedureid")
NEVER = (*CLUSTERS, *REFUSED, "fedsgd", "random_guess")
"""configs whose steps stay plain: the last but one takes one in each session, the last none"""
SCORED = ("ditto", "feature_concatenation", "fedpav", "fedreid", "ifca", "ska")
"""configs that are scored on two GPUs, too: one for each kind of model that is delivered"""
SEVERAL = [name for name in METHODS if name != "centralised"]
"""configs with more than a single client"""


@pytest.fixture(scope="module")
def on_the_cpu(tmp_path_factory):
    """Fit by a config on the CPU, once."""
    folder = tmp_path_factory.mktemp("cpu")
    return functools.cache(lambda name: fit(folder / name, name, *BATCHES, deterministic=True))


USUAL_WAITS = 2
"""The results of a session; and the upload that waits for weights, or an optimizer that goes on."""
LOCAL_MODEL = 1
"""More before an evaluation, as in these runs: the copy of the local model"""
MORE_WAITS = {
    "fedcapr": {"clustering, in each epoch": 10, "the cameras of its proxies": 1},
    "fedklpr": {"clustering, in each epoch": 10, "CRR: the accuracy before": 4, "CRR: a trial": 4, "its masks": 2},
    "feduca": {"clustering, in each epoch": 10},
    "feducc": {"clustering, in each epoch": 10},
    "fedproto": {"features of prototypes must be finite": 1},
    "fedureid": {"clusters merge": 11, "whether they are known, in each epoch": 1},
}
"""Config -> further waits of a session, of clustering and of CRR; no more waits come with further batches"""


LAUNCHES = 66
"""Most of a plain batch of four images by SmallCNN, augmentation included"""
MORE_LAUNCHES = {
    "apfl": (208, "two models, of which one is a mixture"), "dacs": (389, "f_G twice, an expert, and a judge of both"),
    "fedcapr": (237, "proxies and their hardest ones"), "feddip": (97, "masks"),
    "fedklpr": (223, "proxies and divergences"), "fedproto": (100, "prototypes"),
    "fedreid": (144, "an expert"), "fedreid_fine_tune": (100, "an expert"), "fedsam": (145, "two passes"),
    "feduca": (153, "proxies"), "feducc": (127, "proxies"), "fedureid": (113, "proxies"),
    "moon": (160, "two more models"), "ska": (126, "two models"),
    "sscu": (485, "f_G twice, an expert, a judge of both, and a pass of the memory for each image of a person"),
    "stylebank": (144, "two passes"), "stylebank_random": (160, "two passes"), "text_anchors": (95, "texts"),
}  # fmt: skip
"""Config -> launches of a batch, and what it has that others have not"""


def marks(name):
    return [*others.unless(name in others.METHODS), *([] if name in FAST else [pytest.mark.slow])]


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in METHODS])
def test_a_gpu_gives_the_bits_of_the_cpu(name, on_the_cpu, tmp_path, caplog):
    graph = [GRAPH] if HAS_GRAPHS and name not in REFUSED else []
    with simulated.cuda(1) as gpu, counted_waits(gpu) as waits:
        found = fit(tmp_path / "run", name, *BATCHES, *graph, gpus=1, deterministic=True)
    assert differences(found, on_the_cpu(name)) == []
    assert gpu.reading().kernels > 300, "hardly anything ran on the GPU"
    assert (gpu.kernels["replay"] > 0) == (HAS_GRAPHS and name not in NEVER), caplog.text
    said = [record.message for record in caplog.records if record.message.startswith("model.client.graph")]
    expected = ["model.client.graph: steps of all clients stay plain: clusters change with each local epoch"]
    assert said == (expected if HAS_GRAPHS and name in CLUSTERS else [])
    assert waits.between_batches == 0
    assert waits.launches <= MORE_LAUNCHES.get(name, (LAUNCHES, ""))[0]
    if waits.of_sessions:  # the last one: replicas, made once, have waited before
        allowed = USUAL_WAITS + LOCAL_MODEL + sum(MORE_WAITS.get(name, {}).values())
        assert waits.of_sessions[-1] <= allowed, waits.sites


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "fedcapr", "fedreid", "pfedme"])
def test_bf16_gives_the_bits_of_the_cpu(name, tmp_path):
    with simulated.cuda(1):
        found = fit(tmp_path / "gpu", name, gpus=1, precision="bf16-mixed")
    assert differences(found, fit(tmp_path / "cpu", name, precision="bf16-mixed")) == []


def on_two_gpus(folder):
    """What each of two ranks does."""
    with simulated.cuda(2, board=folder / "board") as gpu:
        for name in (folder / "names").read_text().split():
            with counted_waits(gpu) as waits:
                fit(folder / name, name, *BATCHES, gpus=2, scored=name in SCORED, deterministic=True)
            assert waits.between_batches == 0, name
        summed = [text for text in gpu.collectives if "allreduce" in text and "default group" in text]
        assert summed, "NCCL did nothing"


@pytest.fixture(scope="module")
def two_gpus(tmp_path_factory, request):
    """The configs whose tests are run, on two ranks with a simulated GPU each."""
    folder = tmp_path_factory.mktemp("two-gpus")
    (folder / "names").write_text(" ".join(others.names_in(request, "test_two_gpus_give_the_bits_of_the_cpu")))
    run_on_ranks(on_two_gpus, folder, timeout=1200)
    return folder


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("name", others.some(SEVERAL, others.METHODS))
def test_two_gpus_give_the_bits_of_the_cpu(name, two_gpus, on_the_cpu):
    found, wanted = left_by(two_gpus / name), on_the_cpu(name)
    if name not in SCORED:
        found, wanted = without_scores(found), without_scores(wanted)
    assert differences(found, wanted) == []
