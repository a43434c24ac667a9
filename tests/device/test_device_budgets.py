"""Budgets on simulated GPUs: launches of a step, copies of an evaluation. Waits: test_device_methods.py.

Who needs fewer lowers the number; who needs more has a reason, and writes it down.
"""

from functools import partial
from unittest import mock

import pytest
import torch

import simulated
from budgets import MOST, kernels_of_a_session, kernels_of_a_step
from fedsim.__main__ import main
from fedsim.federation.federation import Federation
from fedsim.functional.losses import mean_of_chosen
from fedsim.functional.memory import update_memory
from fedsim.methods import FedPav, FedProx
from fedsim.models import AssembledNorm2d, DiversifiedNorm2d, Neck, ResNet, SmallCNN, StyleLayers
from fedsim.training.messages import Upload
from fedsim.training.settings import LocalTraining
from runs import fit, options

SGD = partial(torch.optim.SGD, lr=1e-3, momentum=0.9, weight_decay=5e-4)
ADAMW = partial(torch.optim.AdamW, lr=1e-3)


@pytest.fixture
def gpu():
    with simulated.cuda(1) as record:
        yield record


def resnet(gpu, method, optimizer, *, precision="32-true", **client):
    training = LocalTraining(batch_size=4, optimizer=optimizer, **client)
    neck = Neck(kind="linear", dim=512, dropout=0.5)
    return kernels_of_a_step(
        gpu, method, precision=precision, backbone=ResNet(50, last_stride=1), neck=neck, client=training
    )


@pytest.mark.slow
def test_a_step_of_resnet_50_takes_few_launches(gpu):
    assert resnet(gpu, FedPav(), SGD) <= 395
    assert resnet(gpu, FedPav(), SGD, precision="bf16-mixed") <= 505
    assert resnet(gpu, FedPav(), ADAMW, precision="bf16-mixed", grad_clip=1.0) <= 520


@pytest.mark.others
@pytest.mark.slow
def test_a_micro_batch_takes_few_launches_more_than_a_batch(gpu):
    """Batches of 4 in two micro-batches: two steps, but one update, and the sums on whole vectors."""
    plain = resnet(gpu, FedPav(), SGD, precision="bf16-mixed")
    assert resnet(gpu, FedPav(), SGD, precision="bf16-mixed", micro_batch=2) <= 2 * (plain + 20) + 30


@pytest.mark.others
@pytest.mark.slow
def test_a_session_of_one_batch_takes_few_launches_more_than_its_batch(gpu):
    step = resnet(gpu, FedPav(), SGD, precision="bf16-mixed")
    training = LocalTraining(batch_size=4, optimizer=SGD)
    backbone, neck = ResNet(50, last_stride=1), Neck(kind="linear", dim=512, dropout=0.5)
    used = kernels_of_a_session(gpu, FedPav(), precision="bf16-mixed", backbone=backbone, neck=neck, client=training)
    assert used - step <= 200


@pytest.mark.slow
def test_a_pull_to_the_received_model_takes_few_launches_more(gpu):
    assert resnet(gpu, FedProx(mu=0.1), SGD) <= 480


@pytest.mark.parametrize("method", MOST)
def test_a_batch_takes_few_launches(gpu, method):
    training = LocalTraining(batch_size=32, optimizer=SGD)
    assert kernels_of_a_step(gpu, method(), backbone=SmallCNN(width=8), client=training) <= MOST[method]


def test_proxies_move_in_as_many_passes_as_one_has_images(gpu):
    memory, features = torch.rand(9, 4, device="cuda"), torch.rand(32, 4, device="cuda")
    labels = torch.arange(32, device="cuda") % 8
    before = gpu.reading()
    update_memory(memory, features, labels, 0.2, most=4)
    used = gpu.reading().since(before)
    assert used.kernels <= 50
    assert used.waits == 0


def test_a_mean_of_chosen_values_needs_no_wait(gpu):
    values, chosen = torch.rand(32), torch.arange(32) % 3 == 0
    on_device = values.to("cuda"), chosen.to("cuda")
    before = gpu.reading()
    found = mean_of_chosen(*on_device)
    assert gpu.reading().since(before).waits == 0
    torch.testing.assert_close(found.cpu(), mean_of_chosen(values, chosen))


@pytest.mark.parametrize("kind", ["mix", "cross", "snr", "standardise"])
def test_style_layers_need_no_wait(gpu, kind):
    layer = StyleLayers(kind=kind, crop="both").build("input", 3).to("cuda")
    x = torch.rand(4, 3, 8, 8, device="cuda", requires_grad=True)
    before = gpu.reading()
    layer(x).square().sum().backward()
    assert gpu.reading().since(before).waits == 0


@pytest.mark.parametrize("layer", [AssembledNorm2d, DiversifiedNorm2d])
def test_norms_need_no_wait(gpu, layer):
    norm, x = layer(3).to("cuda"), torch.rand(4, 3, 8, 8, device="cuda", requires_grad=True)
    before = gpu.reading()
    norm(x).square().sum().backward()
    assert gpu.reading().since(before).waits == 0


def test_an_upload_that_waits_for_weights_costs_one_wait(gpu):
    mask = torch.rand(40_000, device="cuda") < 0.5
    upload = Upload(torch.rand(50_000, device="cuda"), {"features": torch.rand(20_000, device="cuda")}, mask=mask)
    before = gpu.reading()
    found = upload.on_host()
    assert gpu.reading().since(before).waits == 1
    assert torch.equal(found.vector, upload.vector.cpu())
    assert torch.equal(found.extras["features"], upload.extras["features"].cpu())
    assert torch.equal(found.mask, mask.cpu())


@pytest.mark.slow
def test_an_evaluation_leaves_its_scores_on_the_host(gpu, tmp_path):
    fit(tmp_path / "run", "fedpav", gpus=1, rounds=1, scored=False)
    found = {}
    step = Federation.test_step

    def counted(self, *args):
        found["before"] = gpu.reading()
        step(self, *args)

    words = options(tmp_path / "run", "fedpav", gpus=1)[1:]
    with mock.patch.object(Federation, "test_step", counted):
        assert main(["test", *words, "--ckpt_path=last"]) == 0
    domains = 3
    assert gpu.reading().since(found["before"]).to_host <= 20 * domains


@pytest.mark.slow
def test_deterministic_mode_fills_no_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    launched = []
    for deterministic in (False, True):
        with simulated.cuda(1) as gpu:
            fit(tmp_path / str(deterministic), "fedpav", deterministic=deterministic, gpus=1)
        launched.append(gpu.kernels["fill_"])
    assert launched[0] == launched[1]
    assert not torch.utils.deterministic.fill_uninitialized_memory
