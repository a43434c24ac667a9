"""Local training, and what of Lightning keeps working."""

import math
from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping

from fedsim.core.errors import ConfigError, TrainingError
from fedsim.data.batches import shuffled_batches
from fedsim.evaluation.settings import Evaluation
from fedsim.methods import FedPav, Local
from fedsim.models import Neck
from fedsim.training.settings import ClientOverride, LocalTraining, RateSchedule
from small import LR, fit, make_data, make_model, named, sgd, vector

# -- local training ----------------------------------------------------------------------------------------------------


def test_head_rate_and_schedule():
    schedule = RateSchedule(kind="step", step=1, gamma=0.1)
    model = fit(make_model(FedPav(), client=LocalTraining(batch_size=8, optimizer=sgd, head_lr=0.5, schedule=schedule)))
    assert model.parts.clients["town0"].optimizer.rates == pytest.approx(
        [0.1 * LR, 0.1 * 0.5]
    )  # its last round had index 1
    assert model.settings.client.lr_in(0) == pytest.approx(LR)


def test_schedules_in_closed_form():
    """Warm-up and the falling part are multiplied, as in torch's chained schedulers."""
    milestones = RateSchedule(kind="milestones", milestones=(4, 7), gamma=0.1, warmup=2, warmup_start=0.5)
    falling = [0.5, 0.75, 1, 1, 0.1, 0.1, 0.1, 0.01, 0.01]
    assert [milestones.factor(t) for t in range(9)] == pytest.approx(falling)
    cosine = RateSchedule(kind="cosine", rounds=8, warmup=2, warmup_start=0.5)
    half = [math.cos(math.pi * t / 16) ** 2 for t in range(9)]
    assert [cosine.factor(t) for t in range(9)] == pytest.approx([0.5 * half[0], 0.75 * half[1], *half[2:]])


def test_a_milestone_before_the_start_is_refused():
    training = LocalTraining(optimizer=sgd, schedule=RateSchedule(kind="milestones", milestones=(0, 5)))
    with pytest.raises(ConfigError, match=r"^model.client.schedule.milestones: 0 is less than 1$"):
        make_model(FedPav(), client=training)


def test_pooling_trains_with_the_backbone_and_is_shared():
    neck = Neck(kind="bnneck", dropout=0.0, pooling="gem")
    model = fit(make_model(FedPav(), neck=neck, client=LocalTraining(batch_size=8, optimizer=sgd)))
    assert named(model)["pooling.p"].item() != 3.0
    client = model.parts.clients["town0"]
    assert any(parameter is client.model.network.pooling.p for parameter in client.optimizer.groups[0])


def test_nothing_is_pooled_of_vectors():
    backbone = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 16, 4))
    backbone.out_channels = 4
    with pytest.raises(ConfigError, match=r"^model.neck.pooling: sequential returns vectors, with nothing to pool"):
        fit(make_model(FedPav(), backbone=backbone, neck=Neck(pooling="gem", dim=4)))


def test_the_optimizer_steps_once_per_accumulated_batches_and_at_the_end():
    steps = []

    class Counting(FedPav):
        def take_step(self, client, loss):
            if client.step(loss):
                steps.append(client.client_name)

    training = LocalTraining(batch_size=8, accumulate=3, optimizer=sgd)
    model = fit(make_model(Counting(), client=training), rounds=1)
    for c in model.parts.federated.clients:
        batches = len(shuffled_batches(c.num_images, 8, torch.Generator()))
        assert steps.count(c.name) == -(-batches // 3)


def test_clipping_bounds_the_gradient():
    tight = fit(make_model(Local(), client=LocalTraining(batch_size=8, optimizer=sgd, grad_clip=1e-9)), rounds=1)
    start = make_model(Local())
    start.assemble(make_data(), 0, 1, torch.device("cpu"))
    head, initial = tight.parts.clients["town0"].head.weight, start.parts.clients["town0"].head.weight
    assert 0 < (head - initial).norm() < 1e-6


def test_a_diverging_client_is_named():
    huge = {"town1": ClientOverride(optimizer=lambda p: torch.optim.SGD(p, lr=1e30))}
    with pytest.raises(TrainingError, match=r"client town1, round 1: .* not finite"):
        fit(make_model(FedPav(), clients=huge))


def test_values_beyond_the_exact_range_are_refused_by_client():
    model, data = make_model(FedPav()), make_data()
    model.assemble(data, 0, 1, torch.device("cpu"))
    with torch.no_grad():
        model.server.vectors["smallcnn"][:1] = 5000.0  # a convolution's weight: normalisation hides it from the loss
    with pytest.raises(TrainingError, match=r"client town\d, round 1: .*model.reduction to fp32"):
        fit(model, data, rounds=1)


def test_bf16_keeps_float32_weights():
    """One step of each client: later ones drift apart, on each CPU in its own way.

    The distance is 0.20 of the step, with a standard deviation of 0.02 over twelve seeds and of 0.0003 over the
    instructions that oneDNN can take (SSE 4.1, AVX2, AVX-512, AVX-512 with bf16, AMX).
    """
    still = LocalTraining(batch_size=8, optimizer=partial(torch.optim.SGD, lr=0.0))
    start, half, exact = make_model(FedPav(), client=still), make_model(FedPav()), make_model(FedPav())
    for model, precision in ((start, "32-true"), (half, "bf16-mixed"), (exact, "32-true")):
        fit(model, make_data(limit_client_batches=1), precision=precision, rounds=1)
    assert vector(half).dtype == torch.float32
    distance, step = (vector(half) - vector(exact)).norm(), (vector(exact) - vector(start)).norm()
    assert 0 < distance < 0.5 * step


# -- Lightning ---------------------------------------------------------------------------------------------------------


def test_fast_dev_run_trains_one_batch_per_client():
    steps = []

    class Counting(FedPav):
        def take_step(self, client, loss):
            if client.step(loss):
                steps.append(client.client_name)

    fit(make_model(Counting()), make_data(val="identities", val_fraction=0.3), fast_dev_run=True)
    assert sorted(steps) == ["town0", "town1", "town2"]


def test_early_stopping_watches_validation_scores():
    stop = EarlyStopping("val/mAP", mode="max", patience=0, min_delta=2.0)  # no score can improve by 2
    model = fit(
        make_model(FedPav()), make_data(val="identities", val_fraction=0.3), rounds=5, callbacks=[stop],
        limit_val_batches=1.0, check_val_every_n_epoch=1,
    )  # fmt: skip
    assert model.trainer.current_epoch == 2


def test_state_dict_is_exactly_the_global_model():
    model = fit(make_model(FedPav()), rounds=1)
    assert list(model.state_dict()) == ["server.vectors.smallcnn"]
    assert model.trainer.global_step == 1


def test_another_data_module_is_refused():
    from lightning import LightningDataModule

    class Other(LightningDataModule):
        def train_dataloader(self):
            return [0]

    with pytest.raises(ConfigError, match="is not a FederatedDataModule"):
        fit(make_model(FedPav()), Other())


def test_a_fit_can_be_followed_by_a_test_in_the_same_process():
    model = fit(make_model(FedPav(), evaluation=Evaluation(test_during_fit=True)), make_data(val="none"), rounds=1)
    first = model.evaluator.score("test")
    model.trainer.test(model, datamodule=model.trainer.datamodule, verbose=False)
    assert {k: float(v) for k, v in model.trainer.callback_metrics.items()} == pytest.approx(first)


@pytest.mark.parametrize(("limit", "expected"), [(1, 1), (2.0, 2), (0.5, None), (None, None)])
def test_limits_of_batches(limit, expected):
    steps = []

    class Counting(FedPav):
        def take_step(self, client, loss):
            if client.step(loss):
                steps.append(client.client_name)

    model = fit(make_model(Counting()), make_data(limit_client_batches=limit), rounds=1)
    for c in model.parts.federated.clients:
        batches = len(shuffled_batches(c.num_images, 8, torch.Generator()))
        share = max(1, batches // 2) if limit == 0.5 else batches
        assert steps.count(c.name) == (share if expected is None else min(expected, batches))


def test_what_a_session_sets_is_no_part_of_the_client_and_all_else_may_be():
    client = next(iter(fit(make_model(FedPav()), rounds=1).parts.clients.values()))
    client.round, client.kept, client.layer = 7, {"a": torch.ones(1)}, torch.nn.Linear(2, 2)
    assert (client.round, set(client.kept), dict(client.named_children())) == (7, {"a"}, {"layer": client.layer})
    assert vars(client)["round"] == 7
    assert "layer" not in vars(client)
