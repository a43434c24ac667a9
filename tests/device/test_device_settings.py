"""Stores, caches and axes on a simulated GPU: nothing is refused, and the bits are those of the CPU."""

from mmap import PAGESIZE

import pytest
import torch

import others
import simulated
from fedsim.core.errors import ConfigError
from fedsim.core.store import make_store
from fedsim.core.transfer import ahead, send
from runs import HAS_GRAPHS, differences, fit

MEMORY = {
    f"{store}, {cache}": [f"--model.client_store={store}", f"--data.cache={cache}", "--data.workers=1"]
    for store in ("device", "host", "disk")
    for cache in ("device", "host", "none")
}
WIDE, USUAL = (f"{{class_path: SmallCNN, init_args: {{width: {width}}}}}" for width in (16, 8))
AXES = {
    "adaptive backbones": [
        "fedpav", "--model.selection=UCB", "--model.selection.count=2", "--model.neck={kind: linear, dim: 16}",
        f"--model.adaptive_backbones={{ladder: [{WIDE}, {USUAL}], every: 1}}",
    ],
    "classification": [
        "fedavg", "--model.evaluation.task=classification", "--data.labels=common", "--data.val=images",
        "--model.evaluation.test_during_fit=false",
    ],
    "differential privacy": [
        "fedavg", "--model.privacy=DifferentialPrivacy", "--model.privacy.clip=1.0", "--model.bn_stats=local",
        "--model.privacy.noise_multiplier=0.5", "--model.method.weighting=uniform",
    ],
    "FAISS": ["fedpav", "--model.evaluation.backend=faiss"],
    "fp32 sums": ["fedpav", "--model.reduction=fp32"],
    "generator's colours": [
        "fedpav", "--data.augmentation={pad: 2, rotate: 10, scale: 0.1, brightness: 0.2, contrast: 0.2, hue: 0.1}",
    ],
    "kept optimizers": [  # fused, it rounds otherwise than a CPU's
        "local", "--model.client.optimizer=torch.optim.AdamW", "--model.client.optimizer.init_args.fused=false",
        "--model.client.grad_clip=1.0",
    ],
    "Krum": ["fedavg", "--model.aggregation=Krum", "--model.aggregation.bad=0", "--data.source.init_args.clients=3"],
    "median": ["fedavg", "--model.aggregation=Median"],
    "pooled statistics": ["fedpav", "--model.bn_stats=pooled"],
    "recalibrated statistics": ["fedavg", "--model.bn_stats=recalibrate", "--data.public=new0"],
    "several architectures": [
        "fedatt", f"--model.clients.town1.backbone={WIDE}", "--model.neck={kind: linear, dim: 16}",
        "--model.method.share_head=false",
    ],
    "skipped updates": ["scaffold", "--model.on_bad_update=skip_client", "--model.client.accumulate=2"],
    "captured steps, copies ahead, channels last": [
        "fedprox", f"--model.client.graph={HAS_GRAPHS}", "--model.client.prefetch=true",
        "--model.client.channels_last=true",
        "--data.cache=host", "--data.limit_client_batches=6", "--model.objective.center={}",
    ],
    "triplets, centers": [
        "fedpav", "--model.objective={triplet: 0.5, center: {weight: 0.1}}", "--model.client.sampler=identity",
    ],
    "white noise": ["fedpav", "--model.privacy=WhiteNoise", "--model.privacy.beta=0.001"],
}  # fmt: skip


def compare(folder, *options):
    """Fit with options on the CPU and on a simulated GPU; return what differs."""
    with simulated.cuda(1):
        found = fit(folder / "gpu", *options, gpus=1)
    return differences(found, fit(folder / "cpu", *options))


@pytest.fixture(scope="module")
def on_the_cpu(tmp_path_factory):
    """A fit on the CPU, whose stores and caches change no bit."""
    return fit(tmp_path_factory.mktemp("cpu") / "run", "scaffold")


@pytest.mark.slow
@pytest.mark.parametrize("memory", others.each_second(MEMORY))
def test_stores_and_caches(memory, on_the_cpu, tmp_path):
    with simulated.cuda(1):
        found = fit(tmp_path / "gpu", "scaffold", *MEMORY[memory], gpus=1)
    assert differences(found, on_the_cpu) == []


@pytest.mark.slow
@pytest.mark.parametrize("axis", others.each_second(AXES))
def test_axes(axis, tmp_path):
    assert compare(tmp_path, *AXES[axis]) == []


def test_states_on_the_host_lock_no_more_memory_than_they_need():
    sizes = {"state": 2**18 + 1, "number": 1, "none": 0}
    with simulated.cuda(1):
        store = make_store("host", torch.device("cuda", 0), ["a"])
        store.write("a", {name: torch.rand(size, device="cuda") for name, size in sizes.items()})
        assert all(tensor.is_pinned() for name, tensor in store.read("a").items() if sizes[name])
        assert simulated.locked_bytes() == 2**20 + 2 * PAGESIZE
        store.write("a", {"number": torch.rand(1, device="cuda")})
        assert simulated.locked_bytes() == PAGESIZE
        del store
        assert simulated.locked_bytes() == 0


def test_a_host_that_locks_no_more_memory_ends_in_a_line(monkeypatch):
    with simulated.cuda(1):
        monkeypatch.setattr(torch.cuda.cudart(), "cudaHostRegister", lambda *_: 2)
        store = make_store("host", torch.device("cuda", 0), ["a"])
        with pytest.raises(ConfigError, match=r"client_store: CUDA locks no more .* \(its error 2\); set it to disk"):
            store.write("a", {"state": torch.rand(3, device="cuda")})


def test_copies_run_ahead_of_the_work():
    host, fetched = torch.arange(12.0).view(4, 3), []

    def read():
        for row in host:
            fetched.append(len(fetched))
            yield send(row, torch.device("cuda", 0))

    with simulated.cuda(1) as gpu:
        found = []
        for number, row in enumerate(ahead(read(), torch.cuda.Stream())):
            assert fetched == list(range(min(number + 2, len(host))))
            found.append(row * 2)
        assert gpu.reading().waits == 0
        assert torch.equal(torch.stack(found).cpu(), host * 2)
