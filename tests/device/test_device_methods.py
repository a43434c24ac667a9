"""Every method's config on pretended GPUs: nothing is refused, and the bits are those of the CPU."""

import functools

import pytest

import pretend
from budgets import counted_waits
from failing import run_on_ranks
from runs import METHODS, differences, fit, left_by

FAST = ("fedcapr",)
"""Clusters, a second model, a measured weight: the fast tests are content with these."""
SAME_BITS = "--trainer.deterministic=true"


@pytest.fixture(scope="module")
def on_the_cpu(tmp_path_factory):
    """Fit by a config on the CPU, once."""
    folder = tmp_path_factory.mktemp("cpu")
    return functools.cache(lambda name: fit(folder / name, name, SAME_BITS))


@pytest.fixture(scope="module")
def on_a_gpu(tmp_path_factory):
    """Fit by a config on a pretended GPU, once: what it leaves, what was counted, and its waits."""
    folder = tmp_path_factory.mktemp("gpu")

    @functools.cache
    def run(name):
        with pretend.cuda(1) as gpu, counted_waits(gpu) as waits:
            return fit(folder / name, name, SAME_BITS, gpus=1), gpu, waits

    return run


each_method = pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in METHODS]
)


@each_method
def test_a_gpu_gives_the_bits_of_the_cpu(name, on_a_gpu, on_the_cpu):
    found, gpu, _ = on_a_gpu(name)
    assert differences(found, on_the_cpu(name)) == []
    assert gpu.reading().kernels > 300, "hardly anything ran on the GPU"


USUAL_WAITS = 2
"""The results of a visit; and the upload that waits for weights, or an optimizer that goes on."""
LOCAL_MODEL = 1
"""More before an evaluation, as in these runs: the copy of the local model"""
MORE_WAITS = {
    "fedcapr": {"clustering, in each epoch": 10, "the cameras of its proxies": 1},
    "fedklpr": {"clustering, in each epoch": 10, "CRR: the accuracy before": 4, "CRR: a trial": 4, "its masks": 2},
    "feduca": {"clustering, in each epoch": 10},
    "feducc": {"clustering, in each epoch": 10},
    "fedureid": {"clusters merge": 11, "whether they are known, in each epoch": 1},
}
"""Config -> further waits of a visit, of clustering and of CRR; no more waits come with further batches"""


@each_method
def test_the_host_hardly_waits(name, on_a_gpu):
    _, _, waits = on_a_gpu(name)
    assert waits.between_batches == 0
    if waits.of_visits:  # the last one: replicas, made once, have waited before
        allowed = USUAL_WAITS + LOCAL_MODEL + sum(MORE_WAITS.get(name, {}).values())
        assert waits.of_visits[-1] <= allowed, waits.sites


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "fedcapr", "fedreid", "pfedme"])
def test_bf16_gives_the_bits_of_the_cpu(name, tmp_path):
    precision = "--trainer.precision=bf16-mixed"
    with pretend.cuda(1):
        found = fit(tmp_path / "gpu", name, precision, gpus=1)
    assert differences(found, fit(tmp_path / "cpu", name, precision)) == []


def on_two_gpus(folder):
    """What each of two ranks does."""
    with pretend.cuda(2, board=folder / "board") as gpu:
        for name in METHODS:
            if name != "centralised":  # a single client
                fit(folder / name, name, SAME_BITS, gpus=2)
        summed = [text for text in gpu.collectives if "allreduce" in text and "default group" in text]
        assert summed, "NCCL did nothing"


@pytest.fixture(scope="module")
def two_gpus(tmp_path_factory):
    """All configs, on two ranks with a pretended GPU each."""
    folder = tmp_path_factory.mktemp("two-gpus")
    run_on_ranks(on_two_gpus, folder, timeout=1200)
    return folder


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in METHODS if name != "centralised"])
def test_two_gpus_give_the_bits_of_the_cpu(name, two_gpus, on_the_cpu):
    assert differences(left_by(two_gpus / name), on_the_cpu(name)) == []
