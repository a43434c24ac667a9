"""Training steps as CUDA graphs on the simulated GPU: the bits of plain steps, few launches, a line where none is made.

What a recording refuses is in test_simulated_graphs.py, mistakes in our own code in mutants.py, and every method's
config with captured steps in test_device_methods.py.
"""

import inspect
from contextlib import suppress
from functools import partial

import pytest
import torch
from pytorch_metric_learning import losses
from torch.torch_version import TorchVersion

import simulated
from budgets import kernels_until
from fedsim.core.errors import ConfigError
from fedsim.methods import FedAvg, FedPav, FedProx
from fedsim.models import Neck, ResNet
from fedsim.training.graphs import WARM_UP
from fedsim.training.labels import ClusterOverride
from fedsim.training.metric_loss import MetricLoss
from fedsim.training.objective import Objective
from fedsim.training.settings import ClientOverride, LocalTraining
from runs import HAS_GRAPHS, differences, fit, options
from small import make_data, make_model, refuse

pytestmark = pytest.mark.skipif(not HAS_GRAPHS, reason="graphs are refused")
GRAPH = "--model.client.graph=true"
LONG = ["--model.client.batch_size=4", "--data.limit_client_batches=5"]
ADAMW = partial(torch.optim.AdamW, lr=1e-3)


def warned(caplog):
    """Return the warnings about graphs."""
    found = [record for record in caplog.records if record.levelname == "WARNING"]
    return [record.message for record in found if record.message.startswith("model.client.graph")]


EACH_EPOCH = "{round: 2, local_epochs: 3, schedule: {kind: step, step: 1}}"
OPTIMIZERS = {
    "AdamW in bf16, clipped": ["AdamW", "--model.client.grad_clip=1"],
    "RMSprop": ["RMSprop"],
    "momentum": ["SGD", "--model.client.optimizer.momentum=0.9"],
    "kept moments": ["SGD", "--model.client.optimizer.momentum=0.9", "--model.client.optimizer_state=keep"],
    "rates that change": ["SGD", f"--model.client.long_round={EACH_EPOCH}"],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", OPTIMIZERS)
def test_every_optimizer_can_be_replayed(case, tmp_path, caplog):
    kind, *more = OPTIMIZERS[case]
    more = [*LONG, f"--model.client.optimizer={kind}", "--model.client.optimizer.lr=0.01", *more]
    how = {"deterministic": True, "scored": False, "precision": "bf16-mixed" if "bf16" in case else "32-true"}
    with simulated.cuda(1) as gpu:
        found = fit(tmp_path / "graph", "fedavg", *more, GRAPH, gpus=1, **how)
    assert gpu.kernels["replay"] > 0, caplog.text
    if kind == "SGD":
        assert differences(found, fit(tmp_path / "cpu", "fedavg", *more, **how)) == []
        return
    with simulated.cuda(1):  # on GPUs these optimizers round otherwise
        plain = fit(tmp_path / "plain", "fedavg", *more, gpus=1, **how)
    assert differences(found, plain) == []


@pytest.fixture
def gpu():
    with simulated.cuda(1) as record:
        yield record


@pytest.mark.others
@pytest.mark.slow
def test_a_replayed_step_of_resnet_50_is_a_few_launches(gpu):
    training = LocalTraining(batch_size=4, optimizer=ADAMW, grad_clip=1.0, graph=True)
    how = {"backbone": ResNet(50), "neck": Neck(kind="linear", dim=512, dropout=0.5), "client": training}
    marks = kernels_until(gpu, FedProx(mu=0.1), WARM_UP + 2, "bf16-mixed", **how)
    assert marks[1] - marks[0] > 400
    assert marks[-1] - marks[-2] <= 10


def trained(method, *, graph, limit=9, batch_size=5, **client):
    """Let two clients train on a simulated GPU; return weights, steps and work, reports and running metrics of each."""
    sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    training = LocalTraining(batch_size=batch_size, optimizer=sgd, graph=graph, **client)
    model, data, device = make_model(method, client=training), make_data(size=(32, 16)), torch.device("cuda", 0)
    model.assemble(data, 0, 1, device)
    model.server.to(device)
    found = []
    for client in list(model.parts.clients.values())[:2]:
        client.images.open(data.open_train)
        reports = []
        client.begin_round(0, 1.0, "32-true", reports.append)
        client.limit_batches = limit
        client.received = model.server.send(client.model.arch, ())
        method.download(client)
        method.train(client)
        progress = [(report.done, report.share, float(report.loss)) for report in reports]
        weights = client.model.whole.cpu().tolist()
        metrics, steps = client.session.metrics.read([]), client.optimizer.num_steps
        client.leave()
        found.append((weights, (steps, client.work), progress, metrics))
    return found


def assert_alike(method, **how):
    plain, found = (trained(method, graph=graph, **how) for graph in (False, True))
    assert plain == found
    return plain


def test_reports_and_counts_are_those_of_plain_steps(gpu):
    assert_alike(FedAvg(), local_epochs=2)
    assert gpu.kernels["replay"] > 5


@pytest.mark.others
@pytest.mark.slow
def test_the_last_shorter_batch_stays_outside_and_costs_no_recording(gpu):
    epochs = 3
    found = assert_alike(FedAvg(), local_epochs=epochs, limit=None, batch_size=7)
    full, left = zip(*(divmod(images / epochs, 7) for *_, (_, _, images, _) in found), strict=True)
    assert all(left), "there are shorter batches"
    assert gpu.kernels["replay"] == epochs * sum(full) - WARM_UP - 1
    recordings = sum(count for (why, _), count in gpu.waits.items() if why == "synchronize")
    assert recordings == len(found)


class Twice(FedAvg):
    """Begins anew in the middle of a session."""

    def train(self, client):
        super().train(client)
        client.optimizer.reset(client.round)
        super().train(client)


def test_an_optimizer_that_begins_anew_is_recorded_anew(gpu):
    assert_alike(Twice())


class Waits(FedAvg):
    """Looks at the loss, without a declaration."""

    def take_step(self, client, loss):
        super().take_step(client, loss * 2 if loss > 0 else loss)


def test_a_step_that_waits_stays_plain_with_a_line(gpu, caplog):
    assert_alike(Waits())
    assert gpu.kernels["replay"] == 0
    [line] = warned(caplog)
    assert line.startswith(
        "model.client.graph: steps of client town0, round 1, and later ones stay plain: operation not"
    )


REASONS = {
    "accumulate": ({}, {"accumulate": 2}, "town1", "accumulate makes batches without a step"),
    "micro_batch": ({"micro_batch": 4}, {}, "all clients", "micro_batch cuts its batches"),
    "cluster": ({}, {"cluster": ClusterOverride()}, "town1", "clusters change with each local epoch"),
    "optimizer": ({"optimizer": torch.optim.Adagrad}, {}, "all clients", "Adagrad may keep state on the host"),
}  # fmt: skip


@pytest.mark.parametrize("reason", REASONS)
def test_clients_whose_steps_differ_stay_plain_with_a_line(reason, gpu, caplog):
    common, own, who, why = REASONS[reason]
    clients = {"town1": ClientOverride(**own)} if own else None
    model = make_model(FedPav(), client=LocalTraining(batch_size=8, graph=True, **common), clients=clients)
    model.assemble(make_data(), 0, 1, torch.device("cuda", 0))
    assert warned(caplog) == [f"model.client.graph: steps of {who} stay plain: {why}"]


@pytest.mark.parametrize(("name", "who"), [("pfedme", "PFedMe"), ("ska", "SKA"), ("fedreid", "FedReID")])
def test_a_method_that_waits_in_its_step_is_refused(name, who, tmp_path, capsys):
    line = refuse(capsys, *options(tmp_path / "run", name, GRAPH))
    assert line.endswith(
        f"model.client.graph: {who}, as it is configured, needs plain steps, in which the host "
        "waits for the device or decides; set it to false"
    )


METRIC = {"objective": Objective(metric=MetricLoss(name="TripletMarginLoss"))}
NORMALIZED = MetricLoss(name="NormalizedSoftmaxLoss")


def assembled(**options):
    """Assemble a federation with graphs for a simulated GPU."""
    model = make_model(FedPav(), client=LocalTraining(batch_size=8, graph=True), **options)
    model.assemble(make_data(), 0, 1, torch.device("cuda", 0))


@pytest.mark.parametrize("version", ["2.10.0", "2.13.1+cu126"])
def test_a_torch_that_cannot_give_up_a_capture_is_refused(version, gpu, monkeypatch, caplog):
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    with pytest.raises(ConfigError) as refused:
        assembled()
    assert str(refused.value) == (
        f"model.client.graph: needs torch 2.14, and this is {version}, which cannot go on after a capture that fails; "
        "set it to false, or update torch"
    )


@pytest.mark.parametrize("version", ["2.14.0", "2.15.0+cu132", "3.0"])
def test_a_newer_torch_is_not_refused(version, gpu, monkeypatch, caplog):
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    assembled()
    assert not warned(caplog)


def test_a_metric_loss_that_waits_is_refused(gpu):
    with pytest.raises(
        ConfigError, match=r"graph: TripletMarginLoss of model\.objective\.metric needs plain steps: the host"
    ):
        assembled(**METRIC)
    assembled(objective=Objective(cross_entropy=0.0, metric=NORMALIZED))


def losses_of_the_library():
    """Yield name, loss of features and labels, and whether it is said to wait, of those that need no more options."""
    for name in sorted(dir(losses)):
        kind = getattr(losses, name)
        if not name.endswith("Loss"):
            continue
        sized = "num_classes" in inspect.signature(kind.__init__).parameters
        try:
            made = kind(num_classes=4, embedding_size=8) if sized else kind()
            loss = MetricLoss(name=name)
        except (KeyError, TypeError, ConfigError):
            continue
        yield name, made, loss.waits


@pytest.mark.filterwarnings("ignore:__array_wrap__", "ignore:Using a non-tuple sequence")
def test_all_losses_of_the_library_wait_but_those_that_are_named(gpu):
    features = torch.randn(16, 8).to("cuda").requires_grad_()
    labels, counted, declared = (torch.arange(16) // 4).to("cuda"), {}, {}
    for name, loss, waits in losses_of_the_library():
        moved = loss.to("cuda")
        for _ in range(2):  # the first batch may be another
            before = gpu.reading().waits
            with suppress(ValueError):  # it takes no labels
                moved(features, labels)
                counted[name], declared[name] = gpu.reading().waits > before, waits
    assert declared == counted
    assert sum(not waits for waits in declared.values()) == 1
    assert len(declared) > 15


def test_on_cpus_steps_stay_plain_with_one_line(tmp_path, caplog):
    fit(tmp_path / "run", "fedavg", GRAPH, rounds=1, scored=False)
    lines = warned(caplog)
    assert lines == ["model.client.graph: steps of all clients stay plain: only GPUs have graphs"]
