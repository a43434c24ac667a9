"""A user's LightningModule as the client: the bits of fedsim's own parts, foreign styles, and what is refused."""

import ast
import itertools
import random
import re
import runpy
import signal
from functools import partial
from pathlib import Path
from typing import ClassVar
from unittest import mock

import pytest
import torch
from lightning import LightningModule
from lightning.fabric.utilities import registry
from torch import nn
from torch.nn.functional import cross_entropy

import fedsim.training.own_module.module_client as clients
from alone import recording, train_alone
from fedsim.core.errors import ConfigError, TrainingError
from fedsim.data import Augmentation, SyntheticReID
from fedsim.evaluation.settings import Evaluation
from fedsim.federation.components.attacks import Backdoor
from fedsim.federation.components.privacy import WhiteNoise
from fedsim.federation.components.robust import Median
from fedsim.federation.federation import Federation
from fedsim.methods import FedAvg, FedBN, FedPav, FedProx, FedSAM, Local, Scaffold
from fedsim.models import Neck, SmallCNN
from fedsim.models.reid import ReIDModel
from fedsim.training.server_optimizers import FedAdam
from fedsim.training.settings import LocalTraining, RateSchedule
from lightning_modules import (
    FOREIGN,
    ClipsInside,
    DictLosses,
    Frozen,
    MetricsInside,
    OwnScheduler,
    Small,
    assert_same,
    federation,
    module_state,
)
from small import LR, fit, make_data, make_model

NECK = Neck(kind="bnneck", dropout=0.0)


class Parts(LightningModule):
    """fedsim's own network and loss, written as a module."""

    def __init__(self, num_classes: int = 8):
        super().__init__()
        self.save_hyperparameters()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.net = ReIDModel(SmallCNN(width=8), NECK)
            self.classifier = nn.Linear(self.net.num_features, num_classes)
        nn.init.zeros_(self.classifier.weight)
        nn.init.zeros_(self.classifier.bias)

    def embed(self, images):
        return self.net(images).neck

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return cross_entropy(self.classifier(self.embed(images)), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=LR, momentum=0.9)


# -- the same bits as fedsim's own parts -------------------------------------------------------------------------------


def tensors(model, client):
    """The tensors of a client after a run, by their names in fedsim's own model."""
    own = model.parts.clients[client]
    own.load()
    own.model.shared.copy_(model.server.vector(own.model.arch))
    named = {entry.name: own.model.flat.buffer[entry.span].clone() for entry in own.model.flat.entries}
    named = {name.removeprefix("module.net."): tensor for name, tensor in named.items()}
    head = own.module.classifier if hasattr(own, "module") else own.model.head
    return named | {"head.weight": head.weight.detach().clone(), "head.bias": head.bias.detach().clone()}


@pytest.mark.parametrize(
    "method",
    [FedAvg(share_head=False), FedPav(), FedProx(mu=0.1), FedBN(), Local(), Scaffold()],
    ids=lambda method: type(method).__name__,
)
@pytest.mark.parametrize("training", [{}, {"grad_clip": 0.5}], ids=str)
def test_a_module_has_the_bits_of_the_same_network_and_loss_in_built_in_parts(method, training):
    client = LocalTraining(
        batch_size=8, local_epochs=2, optimizer=partial(torch.optim.SGD, lr=LR, momentum=0.9), optimizer_state="reset",
        **training,
    )  # fmt: skip
    data = partial(make_data, augmentation=Augmentation(pad=2, flip=0.5))
    built_in = make_model(method, backbone=Parts().net.backbone, neck=NECK, client=client)
    built_in.assemble(data(), 0, 1, torch.device("cpu"))
    flat = built_in.parts.models["smallcnn"].flat
    start = {f"module.net.{entry.name}": entry.span for entry in flat.entries}
    own = federation(method, Parts(), client=client)
    own.assemble(data(), 0, 1, torch.device("cpu"))
    for entry in own.parts.models["parts"].flat.entries:  # the neck's first weights are not the module's
        own.parts.models["parts"].flat.buffer[entry.span] = flat.buffer[start[entry.name]]
    own.parts.models["parts"].initial_private.copy_(own.parts.models["parts"].flat.private)
    own.server.vector("parts").copy_(own.parts.models["parts"].shared)
    for one in built_in.parts.clients.values():  # heads that start at 0, as the module's classifier
        state = one.private_state()["state"].clone()
        state[one.model.initial_private.numel() :] = 0
        one.load_private_state({**one.private_state(), "state": state})
    fit(built_in, data())
    fit(own, data())
    for name in built_in.parts.names:
        assert_same(tensors(own, name), tensors(built_in, name))
        assert own.reports[name].loss == built_in.reports[name].loss
    assert own.reports.keys() == built_in.reports.keys()


def test_a_client_is_a_lightning_module_whose_parameters_are_the_models_during_its_session():
    class Looks(FedAvg):
        def loss(self, client, batch):
            seen.append([client, len([*client.parameters()]), sum(p.numel() for p in client.parameters())])
            return super().loss(client, batch)

    for model in (make_model(Looks(share_head=False)), federation(Looks(), Parts())):
        seen = []
        fit(model, rounds=1)
        client, number, size = seen[0]
        assert isinstance(client, LightningModule)
        expected = [*client.model.network.parameters()]
        expected += [*client.model.head.parameters()] if not hasattr(client, "module") else []
        assert (number, len([*client.parameters()])) == (len(expected), 0)
        assert size > sum(p.numel() for p in client.model.network.parameters()) * 0.5


# -- what is shared ----------------------------------------------------------------------------------------------------


def shared(model):
    [flat_model] = model.parts.models.values()
    return {entry.name.removeprefix("module.") for entry in flat_model.flat.shared_entries}


def assembled(*args, **options):
    model = federation(*args, **options)
    model.assemble(make_data(), 0, 1, torch.device("cpu"))
    return model


def test_all_but_a_classifier_of_the_clients_size_is_shared():
    model = assembled(FedAvg(), Small)
    assert shared(model) == {
        "backbone.0.weight", "backbone.0.bias", "backbone.1.weight", "backbone.1.bias", "backbone.1.running_mean",
        "backbone.1.running_var", "neck.weight", "neck.bias",
    }  # fmt: skip
    sizes = {name: client.private_state()["state"].numel() for name, client in model.parts.clients.items()}
    for name, classes in model.parts.num_classes.items():
        assert sizes[name] == sum(-(-n // 64) * 64 for n in (8 * classes, classes))


def test_patterns_keep_tensors_private():
    assert shared(assembled(FedAvg(), Small, private=("backbone.1.*", "nec?.bias"))) == {
        "backbone.0.weight", "backbone.0.bias", "neck.weight"
    }  # fmt: skip
    assert shared(assembled(FedBN(), Small)) == {"backbone.0.weight", "backbone.0.bias", "neck.weight", "neck.bias"}
    assert shared(assembled(Local(), Small)) == set()
    with pytest.raises(ConfigError, match=r"model\.private: no tensor of Small is named like head\.\*; it has back"):
        assembled(FedAvg(), Small, private=("head.*",))
    with pytest.raises(ConfigError, match=r"model\.private: patterns are for model\.module"):
        Federation(FedAvg(), SmallCNN(width=8), private=("head.*",))


def test_a_classifier_of_one_size_is_a_head():
    """With which methods do as with fedsim's own: FedAvg shares it, FedPav does not."""

    class Fixed(Small):
        def __init__(self):
            super().__init__(64)

    assert shared(assembled(FedAvg(), Fixed())) - shared(assembled(FedPav(), Fixed())) == {
        "classifier.weight", "classifier.bias"
    }  # fmt: skip


def test_each_client_trains_a_module_of_its_number_of_classes():
    model = fit(federation(FedAvg(), partial(MetricsInside)))  # which asserts it in each step
    assert len(set(model.parts.num_classes.values())) > 1, "the clients are alike"
    for name, client in model.parts.clients.items():
        client.load()
        assert client.module.classifier.out_features == model.parts.num_classes[name]


# -- five modules of foreign style -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_styles_train_score_and_continue_with_the_same_bits(kind, tmp_path):
    data = partial(make_data, SyntheticReID(clients=3, unseen=1, scale=0.1))
    whole = fit(federation(FedAvg(), kind), data(), rounds=3)
    start = federation(FedAvg(), kind)
    start.assemble(data(), 0, 1, torch.device("cpu"))
    assert not torch.equal(module_state(whole)["global"], module_state(start)["global"])
    assert all(tensor.isfinite().all() for tensor in module_state(whole).values())
    fit(federation(FedAvg(), kind), data(), rounds=2).trainer.save_checkpoint(tmp_path / "two.ckpt")
    continued = fit(federation(FedAvg(), kind), data(), rounds=3, ckpt_path=tmp_path / "two.ckpt")
    assert_same(module_state(continued), module_state(whole))
    logged = {name for name in whole.round_metrics if name.startswith("train/town0/")}
    assert logged == {f"train/town0/{name}" for name in ("loss", *whole.parts.logged)}
    assert {name: n for name, n in whole.round_metrics.items() if name in logged} == {
        name: n for name, n in continued.round_metrics.items() if name in logged
    }
    scores = whole.trainer.test(whole, datamodule=data(), verbose=False)[0]
    assert scores["test/mAP"] > 0


def test_schedulers_count_from_the_runs_start():
    model = fit(federation(FedAvg(), OwnScheduler), rounds=3)
    # two local epochs a round: the last round has the epochs 4 and 5, whose mean is weighted by images
    assert model.round_metrics["train/town0/own_epoch"] == pytest.approx(4.5)
    assert model.round_metrics["train/town0/lr"] == pytest.approx(0.01 * (0.5**4 + 0.5**5) / 2)
    assert model.round_metrics["client/lr"] == 0.01


def test_estimates_see_the_first_rate_and_all_moments_of_an_optimizer_with_a_scheduler():
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    optimizer = assembled(FedAvg(), OwnScheduler).parts.training.optimizer([parameter])
    assert optimizer.param_groups[0]["lr"] == 0.01
    optimizer.step()
    assert {"exp_avg", "exp_avg_sq"} < optimizer.state[parameter].keys()
    assert parameter.detach().tolist() == pytest.approx([-0.01, -0.01])


def test_gradients_are_clipped_inside_and_steps_count_from_the_runs_start():
    model = fit(federation(FedAvg(), ClipsInside), rounds=1)
    before, norms = model.round_metrics["train/town0/norm"], []
    assert before > 0.01

    class Looks(ClipsInside):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
            norms.append(torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in self.parameters()])).item())

    same = fit(federation(FedAvg(), Looks), rounds=1)
    assert max(norms) <= 0.01 + 1e-6
    assert torch.equal(module_state(same)["global"], module_state(model)["global"])


def test_nothing_but_tensors_passes_from_one_client_to_another():
    model = fit(federation(FedAvg(), MetricsInside, client=LocalTraining(batch_size=8)), rounds=2)
    for name, report in model.reports.items():
        batches = -(-report.images // 8)
        assert model.round_metrics[f"train/{name}/calls"] == batches
        assert model.round_metrics[f"train/{name}/scratch"] == batches
    alone = fit(federation(FedAvg(), MetricsInside, client=LocalTraining(batch_size=8)), rounds=1)
    accuracy = {name: alone.round_metrics[f"train/{name}/accuracy"] for name in alone.reports}
    assert all(0 <= value <= 1 for value in accuracy.values())
    assert len(set(accuracy.values())) > 1


def test_sessions_look_for_no_callbacks_of_installed_packages_and_say_nothing(monkeypatch, caplog):
    """Such callbacks are the run's; looking takes longer than all else that a Trainer does before its first batch."""
    looks = []
    monkeypatch.setattr(registry, "entry_points", lambda **_: looks.append(1) or [])
    caplog.set_level("INFO")
    fit(federation(FedAvg(), Small), rounds=1)
    assert len(looks) == 1
    assert len([record for record in caplog.records if "GPU available" in record.message]) <= 1  # the run's own


class Counting(Small):
    """A buffer of the classifier's size that moves in each step."""

    def __init__(self, num_classes: int):
        super().__init__(num_classes)
        self.register_buffer("seen", torch.zeros(num_classes))

    def training_step(self, batch, batch_idx):
        self.seen += 1
        return super().training_step(batch, batch_idx)


def test_a_further_loss_of_a_batch_moves_no_buffer_of_the_classifiers_size():
    model = fit(federation(FedSAM(), Counting, client=LocalTraining(batch_size=8)), rounds=1)
    for name, client in model.parts.clients.items():
        client.load()
        assert client.module.seen.tolist() == [-(-model.reports[name].images // 8)] * client.num_classes


class Restless(Frozen):
    """A module that sets all its parts into training mode, after each of its steps."""

    were_still: ClassVar[list[bool]] = []

    def training_step(self, batch, batch_idx):
        self.were_still.append(not self.backbone.training)
        loss = super().training_step(batch, batch_idx)
        self.train()
        return loss


class Counted(Small):
    """Counts its steps in an integer buffer, and notes what it finds when a session begins."""

    seen: ClassVar[list[tuple]] = []

    def __init__(self, num_classes: int):
        super().__init__(num_classes)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def on_train_start(self):
        trainer = self.trainer
        facts = (int(self.steps), trainer.current_epoch, trainer.global_step, trainer.max_epochs)
        self.seen.append((*facts, trainer.estimated_stepping_batches, self.optimizers().param_groups[0]["lr"]))

    def training_step(self, batch, batch_idx):
        self.steps += 1
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step", "frequency": 2}}


def test_counters_and_horizons_follow_the_run(tmp_path):
    data = partial(make_data, SyntheticReID(clients=1, unseen=1, scale=0.1), limit_client_batches=3)
    client = LocalTraining(batch_size=8, local_epochs=2)

    def seen(rounds, counts_from="run", **options):
        model = federation(FedAvg(), Counted, client=client, module_counts_from=counts_from)
        model.assemble(data(), 0, 1, torch.device("cpu"))
        Counted.seen.clear()  # that of the trial
        fit(model, data(), rounds, **options).trainer.save_checkpoint(tmp_path / "two.ckpt")
        return [*Counted.seen]

    # 3 batches an epoch, of which the second steps the scheduler: once an epoch
    expected = [(6 * r, 2 * r, 6 * r, 6, 18, 1e-3 * 0.5 ** (2 * r)) for r in range(3)]
    assert seen(3) == expected
    assert seen(3, "round") == [(6 * r, 0, 0, 2, 6, 1e-3) for r in range(3)]
    seen(2)
    assert seen(3, ckpt_path=tmp_path / "two.ckpt") == expected[2:]


class Given(LightningModule):
    """Its network is an argument."""

    modes: ClassVar[list[bool]] = []

    def __init__(self, net, num_classes):
        super().__init__()
        self.save_hyperparameters()
        self.net, self.classifier = net, nn.Linear(8, num_classes)

    def embed(self, images):
        return self.net(images)

    def training_step(self, batch, batch_idx):
        self.modes.append(all(part.training for part in self.modules()))
        return cross_entropy(self.classifier(self.net(batch[0])), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


@pytest.mark.parametrize("way", ["instance", "partial"])
def test_a_given_network_trains_in_training_mode_and_stays_the_users(way):
    net = nn.Sequential(nn.Conv2d(3, 6, 3, stride=2), nn.BatchNorm2d(6), nn.Flatten(), nn.Linear(6 * 15 * 7, 8))
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    Given.modes.clear()
    model = fit(federation(FedAvg(), Given(net, 4) if way == "instance" else partial(Given, net=net)))
    assert all(Given.modes)
    assert net.training
    assert_same(net.state_dict(), before)
    assert not torch.equal(module_state(model)["global"][:10], net[0].weight.flatten()[:10])


def test_a_stop_in_a_session_ends_the_session_only():
    class Stops(Counted):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.trainer.should_stop = batch_idx == 1

    model = fit(federation(FedAvg(), Stops), rounds=2)
    assert model.trainer.current_epoch == 2
    assert model.round_metrics["train/steps"] == 2 * len(model.parts.names)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_what_ends_a_training_reaches_the_run_and_leaves_signals_and_ranks(error):
    handler = signal.getsignal(signal.SIGINT)

    class Ends(Counted):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if self.current_epoch > 0:
                raise error("the end")

    model = federation(FedAvg(), Ends)
    expected = {KeyboardInterrupt: SystemExit, SystemExit: TrainingError}.get(error, error)
    with pytest.raises(expected):
        fit(model)
    assert signal.getsignal(signal.SIGINT) in (handler, signal.SIG_IGN)  # Lightning's outer Trainer ends by Ctrl-C so
    signal.signal(signal.SIGINT, handler)
    assert torch.autocast_increment_nesting() == 1
    torch.autocast_decrement_nesting()


def test_each_session_begins_with_the_parts_in_evaluation_mode_that_were_built_so():
    data = make_data()
    Restless.were_still.clear()
    fit(federation(FedAvg(), Restless, client=LocalTraining(batch_size=1000)), data, rounds=3)
    _, *of_sessions = Restless.were_still  # the first step is the trial's
    assert of_sessions == [True] * 3 * len(data.federated.clients)


def test_a_frozen_backbone_stays_and_a_replaced_buffer_is_shared():
    model = fit(federation(FedAvg(), Frozen), rounds=2)
    start = assembled(FedAvg(), Frozen)
    [a], [b] = model.parts.models.values(), start.parts.models.values()
    for entry in a.flat.shared_entries:
        old, new = (one.server.vector("frozen")[entry.span] for one in (start, model))
        if entry.name.startswith("module.backbone"):
            torch.testing.assert_close(new, old, rtol=0, atol=2**-39)
        else:
            assert not torch.equal(new, old), entry.name
    assert b.flat.num_shared == a.flat.num_shared


HOOKS = (
    "setup", "configure_model", "on_fit_start", "on_train_start", "on_train_epoch_start", "on_before_batch_transfer",
    "on_after_batch_transfer", "on_train_batch_start", "optimizer_step", "on_before_backward", "on_after_backward",
    "on_before_optimizer_step", "configure_gradient_clipping", "on_before_zero_grad", "lr_scheduler_step",
    "on_train_batch_end", "on_train_epoch_end", "on_train_end", "on_fit_end", "teardown", "backward",
    "optimizer_zero_grad", "transfer_batch_to_device", "configure_callbacks", "configure_optimizers",
)  # fmt: skip


@pytest.mark.parametrize("training", [{}, {"accumulate": 2, "grad_clip": 0.5}], ids=str)
def test_hooks_are_called_as_by_lightning_alone(training):
    calls = []

    def note(name):
        def hook(self, *args, **kwargs):
            calls.append(name)
            return getattr(super(kind, self), name)(*args, **kwargs)

        return hook

    kind = type("Noted", (OwnScheduler,), {name: note(name) for name in HOOKS})
    trainings, calls_of = [], []

    def train(*arguments):
        calls.clear()
        logged = original(*arguments)
        calls_of.append([*calls])
        return logged

    with recording(trainings):
        original = clients.train
        with mock.patch.object(clients, "train", train):
            client = LocalTraining(batch_size=8, local_epochs=2, **training)
            fit(federation(FedAvg(), kind, client=client), make_data(limit_client_batches=3), rounds=1)
    assert len(trainings) == 3
    for recorded, expected in zip(trainings, calls_of, strict=True):
        calls.clear()
        train_alone(kind(len(recorded.start["classifier.bias"])), recorded)
        assert calls == expected
    assert {*calls} == {*HOOKS}


def test_rounds_scale_the_rates_of_a_module_without_a_scheduler():
    schedule = RateSchedule(kind="step", step=1, gamma=0.0)
    one, two = (
        fit(federation(Local(), Small, client=LocalTraining(batch_size=8, schedule=schedule)), rounds=n) for n in (1, 2)
    )
    names = [entry.name for entry in one.parts.models["small"].flat.entries if entry.kind == "parameter"]
    for a, b in zip(one.parts.clients.values(), two.parts.clients.values(), strict=True):
        for entry in a.model.flat.entries:
            if entry.name in names:  # running statistics move all the same
                assert torch.equal(a.private_state()["state"][entry.span], b.private_state()["state"][entry.span])


def test_a_module_of_the_user_is_left_as_it_was():
    module = Small(num_classes=5)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    first, second = (fit(federation(FedAvg(), module), rounds=1) for _ in range(2))
    assert_same(module.state_dict(), before)
    assert_same(module_state(first), module_state(second))
    [flat_model] = assembled(FedAvg(), module).parts.models.values()
    entry = next(e for e in flat_model.flat.entries if e.name == "module.neck.weight")
    assert torch.equal(flat_model.flat.buffer[entry.span].view(entry.shape), module.neck.weight), "given weights count"


@pytest.mark.parametrize(
    "options",
    [
        {"attack": Backdoor(["town1"], start=1, patch=2)},
        {"privacy": WhiteNoise(beta=1e-4)},
        {"aggregation": Median()},
        {"server_optimizer": FedAdam},
        {"client_store": "disk"},
        {"reduction": "fp32"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_components_go_with_a_module(options):
    plain, model = (fit(federation(FedAvg(), DictLosses, **changed)) for changed in ({}, options))
    same = torch.equal(module_state(plain)["global"], module_state(model)["global"])
    assert same == ("client_store" in options)
    assert module_state(model)["global"].isfinite().all()


def test_a_module_trains_in_bfloat16():
    plain, model = (fit(federation(FedAvg(), DictLosses), precision=p) for p in ("32-true", "bf16-mixed"))
    a, b = (module_state(one)["global"] for one in (plain, model))
    assert not torch.equal(a, b)
    torch.testing.assert_close(a, b, rtol=0.1, atol=0.1)


# -- refusals ----------------------------------------------------------------------------------------------------------


def changed(**members):
    return type("Wrong", (Small,), members)


def forgets(self, num_classes):
    LightningModule.__init__(self)
    self.net = nn.Linear(3, num_classes)


def grows(self, num_classes):
    Small.__init__(self, num_classes)
    self.more = nn.ModuleList(nn.Linear(2, 2) for _ in range(num_classes))


def halves(self, num_classes):
    Small.__init__(self, num_classes)
    self.classifier.half()


def freezes(self, num_classes):
    Small.__init__(self, num_classes)
    self.requires_grad_(False)


def logits(self, images):
    return self.classifier(self.neck(self.backbone(images)))


def learns(self, batch, batch_idx):
    return cross_entropy(logits(self, batch[0]), batch[1])


def sgd(self):
    return torch.optim.SGD(self.parameters(), lr=0.1)


def other(self):
    return [sgd(self)], [torch.optim.lr_scheduler.StepLR(sgd(self), 1)]


WRONG = {
    "no step": ({"training_step": LightningModule.training_step}, "has no training_step"),
    "no optimizer": ({"configure_optimizers": LightningModule.configure_optimizers}, "has no configure_optimizers"),
    "no features": ({"embed": None}, "gives no features; define embed"),
    "two optimizers": (
        {"configure_optimizers": lambda self: [sgd(self), sgd(self)]},
        "multiple optimizers is only supported with manual optimization",
    ),
    "none": ({"configure_optimizers": lambda self: None}, "configure_optimizers returned no optimizer"),
    "other's": ({"configure_optimizers": other}, "attached with an optimizer that wasn't returned"),
    "interval": (
        {"configure_optimizers": lambda self: {"optimizer": (o := sgd(self)), "lr_scheduler": {
            "scheduler": torch.optim.lr_scheduler.StepLR(o, 1), "interval": "week"}}},
        'but is "week"',
    ),
    "foreign tensors": (
        {"configure_optimizers": lambda self: torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)},
        "has tensors that are not parameters",
    ),
    "batches": ({"training_step": lambda self, dataloader_iter: None}, "takes dataloader_iter"),
    "third argument": ({"training_step": lambda self, b, i, optimizer_idx: 1}, "Remove the `optimizer_idx`"),
    "no loss in a dict": ({"training_step": lambda self, batch, batch_idx: {"x": 1}}, "the 'loss' key needs to be"),
    "a number": ({"training_step": lambda self, batch, batch_idx: 1.0}, "must return a Tensor, a dict"),
    "vector": ({"training_step": lambda self, b, i: self.embed(b[0]).mean(1)}, "only for scalar outputs"),
    "constant": ({"training_step": lambda self, batch, i: torch.zeros(())}, "does not require grad"),
    "fails": ({"training_step": lambda self, batch, i: batch["image"]}, "in batches of 8 (TypeError: tuple"),
    "maps": ({"embed": lambda self, images: images, "training_step": learns}, "embed returned shape [2, 3, 32, 16]"),
    "logits": ({"embed": None, "forward": logits, "training_step": learns}, "whose number depends on num_classes"),
    "text": ({"training_step": lambda self, b, i: self.log("x", "high")}, "`str` values cannot be logged"),
    "hparams": ({"__init__": lambda self, num_classes: forgets(self, num_classes)}, "hparams lack num_classes"),
    "other layers": ({"__init__": grows}, "has other layers for another num_classes"),
    "half": ({"__init__": halves}, "classifier.weight is torch.float16"),
    "frozen": ({"__init__": freezes}, "has no parameter to train"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_module_that_breaks_a_rule_is_refused_in_one_line(name):
    members, message = WRONG[name]
    kind = changed(**members)
    source = kind(5) if name == "hparams" else kind
    with pytest.raises(ConfigError) as caught:
        assembled(FedAvg(), source)
    line = str(caught.value)
    assert line.startswith("model.module: Wrong"), line
    assert message in line, line
    assert "\n" not in line
    assert len(line) < 360, line


def test_random_pairs_of_faults_are_refused_in_one_line():
    rng, names = random.Random(0), [name for name in WRONG if name not in ("hparams",)]
    for first, second in rng.sample([*itertools.combinations(names, 2)], 12):
        with pytest.raises(ConfigError, match=r"^model\.module: Wrong[^\n]*$"):
            assembled(FedAvg(), changed(**WRONG[first][0] | WRONG[second][0]))


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"compile": True}, "model.client.compile: Small"),
        ({"graph": True}, "model.client.graph: the steps of Small"),
        ({"head_lr": 0.1}, "model.client.head_lr: Small"),
        ({"optimizer_state": "keep"}, "model.client.optimizer_state: the optimizer of Small"),
        ({"micro_batch": 4}, "model.client.micro_batch: Lightning trains Small on whole batches"),
    ],
    ids=str,
)
def test_settings_that_a_module_decides_are_refused_in_one_line(training, message):
    with pytest.raises(ConfigError) as caught:
        assembled(FedAvg(), Small, client=LocalTraining(batch_size=8, **training))
    assert str(caught.value).startswith(message)


def test_other_contradictions_are_refused_in_one_line():
    with pytest.raises(ConfigError, match=r"^model\.client\.schedule: OwnScheduler has a schedule, too"):
        assembled(FedAvg(), OwnScheduler, client=LocalTraining(schedule=RateSchedule(kind="step")))
    with pytest.raises(ConfigError, match=r"^model\.method\.share_neck: FedAvg keeps the neck private"):
        assembled(FedAvg(share_neck=False, share_head=False), Small)
    with pytest.raises(ConfigError, match=r"^model\.backbone: name a backbone"):
        Federation(FedAvg())
    with pytest.raises(ConfigError, match=r"^model\.evaluation\.task: classification needs"):
        assembled(FedAvg(), Small, evaluation=Evaluation(task="classification"))


def test_what_is_logged_late_is_named_and_left_out(caplog):
    class Late(Small):
        def on_train_epoch_end(self):
            if self.current_epoch == 3:
                self.log("late", 1.0)

    model = fit(federation(FedAvg(), Late), rounds=2)
    lines = [record.message for record in caplog.records if "Late logged late only after its first" in record.message]
    assert len(lines) == len(model.parts.names)
    assert model.parts.logged == ()


def test_the_example_trains_alone_and_as_clients(capsys):
    path = Path(__file__).parents[2] / "docs" / "examples" / "own_module.py"
    [node] = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
    lines = path.read_text().splitlines()[node.lineno - 1 : node.end_lineno]
    assert len([line for line in lines if line.strip()]) <= 40
    runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr().out
    assert re.search(r"^alone: \{'loss': \d\.\d+, 'accuracy': [01]\.\d+\}$", printed, re.MULTILINE)
    assert re.search(
        r"^\{'train/town0/loss': \d\.\d+, 'train/town0/module_loss': \d\.\d+, 'train/town0/accuracy': [01]\.\d+\}$",
        printed,
        re.MULTILINE,
    )
    assert re.search(r"^test +global +unseen +\d\.\d+", printed, re.MULTILINE)


class Built(Small):
    """Notes the numbers of classes for which it is built."""

    classes: ClassVar[list[int]] = []

    def __init__(self, num_classes: int):
        super().__init__(num_classes)
        self.classes.append(num_classes)


def test_a_module_is_built_once_for_each_number_of_classes_and_once_with_one_more():
    Built.classes.clear()
    model = fit(federation(FedAvg(), Built), rounds=1)
    numbers = {client.num_classes for client in model.parts.clients.values()}
    assert sorted(Built.classes) == sorted({*numbers, max(numbers) + 1})
