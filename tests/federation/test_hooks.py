"""What the round may know of a method: what it declares, never which hooks it overrides; and what a client may read."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import fedsim.methods
from fedsim.core.errors import TrainingError
from fedsim.data import SyntheticReID
from fedsim.evaluation.plan import EvaluationPlan
from fedsim.evaluation.scorer import ScoredSet
from fedsim.evaluation.settings import Evaluation
from fedsim.federation.components.hardware import Hardware
from fedsim.federation.events import RoundCallback
from fedsim.methods import FedAvg, FedPav, FedUReID, LotteryFL, Scaffold, TextAnchors
from fedsim.methods.base import InitialState, Method, Payload
from fedsim.methods.declared import has_server_step, message_to
from fedsim.training.messages import Measured
from fedsim.training.settings import LocalTraining
from small import fit, labels_of, make_data, make_model
from small_tower import small_tower

# -- hooks that only call their base -----------------------------------------------------------------------------------

HOOKS = [name for name in vars(Method) if not name.startswith("_")]
METHODS = [
    cls
    for cls in (getattr(fedsim.methods, name) for name in fedsim.methods.__all__)
    if isinstance(cls, type) and issubclass(cls, Method)
]
RUNS = {"FedPav": FedPav(), "LotteryFL": LotteryFL(start_accuracy=0.0), "FedUReID": FedUReID(update=0.5)}


def overriding(method, *hooks):
    """A method of a subclass that overrides hooks, and whose hooks do nothing but call their base."""
    cls, called = type(method), set()

    def identity(hook):
        def get(self):
            called.add(hook)
            return getattr(super(sub, self), hook)

        is_property = not callable(getattr(cls, hook))  # a property, or a class attribute in its place
        return property(get) if is_property else lambda self, *args, **kwargs: get(self)(*args, **kwargs)

    sub = type(f"Overriding{cls.__name__}", (cls,), {hook: identity(hook) for hook in hooks})
    new = sub(**vars(method))
    assert type(new) is not cls
    assert vars(new) == vars(method)
    return new, called


SOURCE = SyntheticReID(clients=2, unseen=1, scale=0.2)


def assembled(method):
    hardware = Hardware(down_mbit=1.0, up_mbit=1.0, images_per_second=1.0)
    two_epochs = LocalTraining(batch_size=8, local_epochs=2)  # which SubFedAvg needs
    model = make_model(method, hardware=hardware, client=two_epochs)
    model.assemble(make_data(SOURCE, public="new0", labels=labels_of(method)), 0, 1, torch.device("cpu"))
    return model


def plan_of(model, method):
    parts = model.parts
    common = (parts.server, parts.models, parts.archs, parts.federated, parts.rank_share.placement)
    return EvaluationPlan(method, *common, needs="neck", ensemble=False)


def choices(plan):
    """All that a plan says about models."""
    rows = plan.rows("test", tuple(plan.archs))
    of_rows = [(row, plan.weights_of(row), plan.is_delivered(row)) for row in rows]
    sets = {domain: ScoredSet("test", domain, images) for domain, images in plan.federated.tests.items()}
    jobs = plan.jobs(rows, sets.__getitem__, share_from=10**9)
    of_jobs = [(job.row, job.rows, job.data.domain, job.is_shared, job.is_ensemble) for job in jobs]
    return plan.primary, plan.has_global, of_rows, of_jobs


def test_hooks_are_those_of_the_round():
    assert {"download", "train", "loss", "take_step", "upload", "personalise", "delivers", "payload"} <= set(HOOKS)
    assert len(METHODS) > 20


@pytest.mark.parametrize("cls", METHODS, ids=lambda cls: cls.__name__)
def test_which_models_are_scored_does_not_depend_on_what_is_overridden(cls):
    method = cls(tower=small_tower()) if cls is TextAnchors else cls()
    model = assembled(method)
    expected = choices(plan_of(model, method))
    for hook in HOOKS:
        assert choices(plan_of(model, overriding(method, hook)[0])) == expected, hook
    everything, called = overriding(method, *HOOKS)
    other = assembled(everything)
    assert choices(plan_of(other, everything)) == expected
    assert called >= {"shared_groups", "delivers", "has_own_models", "requires", "payload", "initial_state"}
    for arch, its in model.parts.models.items():
        assert other.parts.models[arch].flat.entries == its.flat.entries
        for server in (model.server, other.server):
            assert server.kept[arch].keys() == model.server.kept[arch].keys()
            assert method.payload(server, arch, 0) == everything.payload(server, arch, 0)


def play(method):
    """Every number that a round comes to, but for times, and the global model."""
    model = make_model(method, evaluation=Evaluation(test_during_fit=True))
    data = make_data(SOURCE, val="identities", val_fraction=0.3)
    fit(model, data, rounds=1, limit_train_batches=2, limit_val_batches=1.0, check_val_every_n_epoch=1)
    numbers = {name: value for name, value in model.round_metrics.items() if not name.startswith("time/")}
    numbers |= model.scores
    bits = {name: np.float64(value).tobytes() for name, value in numbers.items()}
    return bits | {"global": model.server.vector("smallcnn").numpy().tobytes()}


@pytest.mark.parametrize("name", RUNS)
def test_overrides_that_do_nothing_change_neither_names_nor_bits_of_metrics(name):
    method = RUNS[name]
    expected = play(method)
    assert any(key.startswith("test/personalised") for key in expected)
    everything, called = overriding(method, *HOOKS)
    assert play(everything) == expected
    assert called >= {"measures", "download", "train", "loss", "take_step", "upload", "weights", "server_every"}
    assert ("personalise" in called) is method.has_own_models  # else the global model has been scored already
    # one by one: a comparison of a hook with its default would see these
    for hooks in (["download"], ["personalise"], ["take_step", "server_step"], ["aggregate", "server_tensors"]):
        assert play(overriding(method, *hooks)[0]) == expected, hooks


def test_the_server_works_when_that_is_declared_and_not_else():
    assert [has_server_step(FedPav(), t) for t in range(4)] == [False] * 4
    seen = []

    class Working(FedAvg):
        every = 0
        server_every = property(lambda self: self.every)

        def server_step(self, server):
            seen.append((self.every, server.round))

    class Often(Working):
        every = 1

    class Seldom(Working):
        every = 3

    for method in (Working(), Often(), Seldom()):
        fit(make_model(method), make_data(SOURCE), rounds=6, limit_train_batches=1)
    assert seen == [(1, t) for t in range(6)] + [(3, 2), (3, 5)]


# -- payloads ----------------------------------------------------------------------------------------------------------


def test_a_control_that_is_not_declared_cannot_be_read():
    class Silent(Scaffold):
        def payload(self, server, arch, round_):
            return Payload(up=super().payload(server, arch, round_).up)

    with pytest.raises(KeyError, match="control"):
        fit(make_model(Silent()), rounds=1)


@pytest.mark.parametrize("declares", [True, False])
def test_bytes_down_are_those_that_are_declared(declares):
    class Quiet(Scaffold):
        """Reads the control only where it may."""

        def payload(self, server, arch, round_):
            whole = super().payload(server, arch, round_)
            return whole if declares else Payload(up=whole.up)

        def take_step(self, client, loss):
            client.step(loss)

        def upload(self, client):
            assert ("control" in client.received.extras) is declares
            zeros = torch.zeros(client.model.flat.num_shared_parameters)
            return replace(FedAvg.upload(self, client), extras={"control": zeros})

    model = fit(make_model(Quiet()), rounds=1)
    size = 4 * sum(entry.numel for entry in model.parts.models["smallcnn"].flat.shared_parameters)
    for traffic in model.parts.ledger.round.values():
        assert (traffic.extra_down, traffic.extra_up) == (size if declares else 0, size)


class Giving(FedPav):
    """The server has four tensors: one travels, one is known, one masks, and one is its own."""

    def initial_state(self, model):
        mask = torch.ones(model.flat.num_shared_parameters, dtype=torch.bool)
        server = {"sent": torch.full((3, 4), 2.0), "known": torch.ones(5), "mask": mask, "secret": torch.ones(7)}
        return InitialState(server=server)

    def payload(self, server, arch, round_):
        return Payload(("sent",), known=("known",), mask="mask")


def test_clients_find_what_is_declared_and_nothing_else():
    seen = []

    class Reading(Giving):
        def train(self, client):
            super().train(client)
            seen.append(client.received)

        def personalise(self, client):
            super().personalise(client)
            seen.append(client.received)

        has_own_models = True

    evaluation = Evaluation(test_during_fit=True)
    options = {"limit_val_batches": 1.0, "check_val_every_n_epoch": 1}
    model = fit(make_model(Reading(), evaluation=evaluation), make_data(val="first_image"), rounds=1, **options)
    assert len(seen) > 6  # sessions, and evaluations
    for received in seen:
        assert received.extras.keys() == {"sent", "known", "mask"}
        assert torch.equal(received.extras["sent"], torch.full((3, 4), 2.0))
        assert received.public is None
    assert {traffic.extra_down for traffic in model.parts.ledger.round.values()} == {4 * 12}
    assert set(model.server.kept["smallcnn"]) == {"sent", "known", "mask", "secret"}


def test_what_the_server_does_not_keep_cannot_be_declared():
    class Lacking(Giving):
        def payload(self, server, arch, round_):
            return Payload(("nowhere",))

    with pytest.raises(KeyError, match="nowhere"):
        fit(make_model(Lacking()), rounds=1)


# -- messages live as long as the session ------------------------------------------------------------------------------


class Between(RoundCallback):
    """Looks at the clients before each round."""

    def __init__(self):
        self.found = []

    def setup(self, trainer, pl_module, stage):
        """Remember the federation."""
        self._model = pl_module

    def on_round_start(self, round_, clients):
        """See what they hold."""
        for client in self._model.parts.clients.values():
            self.found.append((round_, hasattr(client, "received"), dict(client.kept)))


def assert_nothing_is_held(model):
    for client in model.parts.clients.values():
        with pytest.raises(AttributeError, match="received"):
            _ = client.received
        assert client.kept == {}


def test_nothing_that_was_received_can_be_read_between_rounds():
    sessions = []

    class Watching(Scaffold):
        def train(self, client):
            super().train(client)
            others = [other for name, other in model.parts.clients.items() if name != client.client_name]
            sessions.append((hasattr(client, "received"), [hasattr(other, "received") for other in others]))

        def server_step(self, server):
            assert_nothing_is_held(model)
            super().server_step(server)

    model, between = make_model(Watching()), Between()
    fit(model, make_data(val="first_image"), rounds=2, callbacks=[between], limit_val_batches=1.0)
    assert sessions == [(True, [False, False])] * 6
    assert between.found == [(t, False, {}) for t in range(2) for _ in range(3)]
    assert_nothing_is_held(model)


def test_a_session_that_does_not_count_leaves_nothing_behind():
    class Failing(FedPav):
        def upload(self, client):
            client.model.shared.fill_(float("nan"))
            return super().upload(client)

    model = fit(make_model(Failing(), on_bad_update="skip_client"), rounds=1)
    assert model.reports == {}
    assert_nothing_is_held(model)


def test_what_a_client_receives_is_the_global_model_of_the_round():
    seen = []

    class Watching(FedPav):
        def upload(self, client):
            assert torch.equal(client.received.vector, model.server.vector("smallcnn"))
            assert torch.equal(client.received.vector, message_to(self, model.server, "smallcnn").vector)
            assert not torch.equal(client.received.vector, client.model.shared)
            seen.append(client.round)
            return super().upload(client)

    model = make_model(Watching())
    fit(model, rounds=2)
    assert seen == [0, 0, 0, 1, 1, 1]


# -- signals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signals", [{}, {"one": 1.0, "two": 2.0}, {"two": 2.0}])
def test_signals_are_those_that_are_declared(signals):
    class Wrong(FedPav):
        measures = {"one": "client"}  # noqa: RUF012 - a property of methods

        def upload(self, client):
            return replace(super().upload(client), signals=signals)

    with pytest.raises(AssertionError, match="signals that measures names"):
        fit(make_model(Wrong()), rounds=1)


def test_a_number_of_a_tensor_that_is_not_finite_is_named_by_the_tensor():
    class Wrong(FedPav):
        measures = {"norm": "tensor"}  # noqa: RUF012 - a property of methods

        def upload(self, client):
            numbers = [1.0] * len(client.model.flat.shared_parameters)
            if client.client_name == "town2":
                numbers[1] = float("inf")
            return replace(super().upload(client), signals={"norm": numbers})

    model = fit(make_model(Wrong(), on_bad_update="skip_client"), rounds=1)
    assert list(model.reports) == ["town0", "town1"]
    name = model.parts.models["smallcnn"].flat.shared_parameters[1].name
    with pytest.raises(TrainingError, match=rf"client town2, round 1: its {name} is inf"):
        fit(make_model(Wrong()), rounds=1)


@dataclass(frozen=True)
class OnDevice(FedPav):
    """Signals that are tensors until the session's results are read: of one, of many, of none of a number."""

    measures = {"count": "client", "third": "client", "norm": "tensor", "plain": "client"}  # noqa: RUF012 - a property
    bad: str = ""

    def upload(self, client):
        flat = client.model.flat
        norms = torch.stack([flat.shared[entry.span].norm() for entry in flat.shared_parameters])
        expected[client.client_name] = norms.tolist()
        if client.client_name == self.bad:
            norms[2] = float("nan")
        signals = {
            "count": Measured(torch.tensor(2**24 + 1)),
            "third": Measured(torch.tensor([1.0, 3.0], dtype=torch.float64), lambda pair: pair[0] / pair[1]),
            "norm": Measured(norms, list),
            "plain": 0.1,
        }
        client.keep("mark", torch.tensor(client.round))
        return replace(super().upload(client), signals=signals)


expected = {}


def test_signals_may_be_on_the_device_until_the_results_are_read():
    model = fit(make_model(OnDevice()), rounds=1)
    for name, report in model.reports.items():
        assert report.signals == {"count": 2**24 + 1, "third": 1 / 3, "plain": 0.1}
        assert list(report.tensor_signals["norm"]) == expected[name]


def test_a_number_of_the_device_that_is_not_finite_leaves_the_state_as_it_was():
    model = fit(make_model(OnDevice(bad="town1"), on_bad_update="skip_client"), rounds=1)
    assert list(model.reports) == ["town0", "town2"]
    assert [("kept.mark" in client.private_state()) for client in model.parts.clients.values()] == [True, False, True]
    name = model.parts.models["smallcnn"].flat.shared_parameters[2].name
    with pytest.raises(TrainingError, match=rf"client town1, round 1: its {name} is nan"):
        fit(make_model(OnDevice(bad="town1")), rounds=1)
