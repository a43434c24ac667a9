"""How long the server waits: deadlines, FedBuff and FedAsync against their formulas, ledger, checkpoints, refusals."""

import math
import re
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from lightning import Callback
from lightning.pytorch.loggers import CSVLogger

import fedsim.methods
from fedsim.cli.describe import describe_federation
from fedsim.core.errors import ConfigError, DataError
from fedsim.core.placement import place
from fedsim.data import SyntheticReID
from fedsim.evaluation.settings import Evaluation
from fedsim.federation import checkpoint
from fedsim.federation.components.buffered_clock import BufferedClock, check_buffered
from fedsim.federation.components.hardware import ClientHardware, Hardware
from fedsim.federation.components.privacy import DifferentialPrivacy, WhiteNoise
from fedsim.federation.components.robust import Median
from fedsim.federation.components.selection import (
    UCB,
    Availability,
    PoissonSampling,
    PowerOfChoice,
    RandomFraction,
)
from fedsim.federation.components.timing import Buffered, Deadline, Synchronous
from fedsim.federation.components.window import ClockState
from fedsim.federation.federation import clock_of
from fedsim.federation.round import Round
from fedsim.federation.scheduling.replay import replay
from fedsim.methods import (
    IFCA,
    MOON,
    SKA,
    FedAtt,
    FedDIP,
    FedDyn,
    FedNova,
    FedPav,
    LotteryFL,
    Scaffold,
    StyleBank,
    SubFedAvg,
    WeightedPav,
)
from fedsim.methods.base import Method, Payload
from fedsim.models import SmallCNN
from fedsim.strategy.checkpoint_files import read_checkpoint
from fedsim.training.old_models import OldModels
from fedsim.training.settings import LocalTraining
from fedsim.training.timetable import Timetable
from small import fit, make_data, make_model, sgd, state_of, vector

INF = float("inf")


def hardware_of(*speeds, **options):
    """Clients town0, town1, ... that train on so many images per second; messages take no time."""
    clients = {f"town{i}": ClientHardware(images_per_second=speed) for i, speed in enumerate(speeds)}
    return Hardware(**{"down_mbit": INF, "up_mbit": INF} | options, images_per_second=100.0, clients=clients)


UNEQUAL = hardware_of(100.0, 17.0, 230.0)
TWO_EPOCHS = LocalTraining(batch_size=8, local_epochs=2, optimizer=sgd)  # Sub-FedAvg needs two


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=1.0, momentum=0.9)


def train(method=None, timing=None, rounds=3, clients=3, data=None, ckpt_path=None, **options):
    """A federation of unequal clients, trained."""
    model = make_model(method or FedPav(), **{"timing": timing, "hardware": UNEQUAL} | options)
    data = data or make_data(SyntheticReID(clients=clients, unseen=1, scale=0.2))
    return fit(model, data, rounds, ckpt_path=ckpt_path)


def assert_equal(a, b):
    assert a.keys() == b.keys()
    assert not [name for name in a if not torch.equal(a[name], b[name])]


# -- a buffer of all clients is the synchronous round ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "options"),
    [
        (FedPav(), {}),
        (FedPav(), {"bn_stats": "local", "server_optimizer": momentum}),
        (FedNova(), {}),
        (MOON(), {}),
        (FedAtt(), {}),
        (WeightedPav(), {}),
    ],
    ids=["FedPav", "local statistics, momentum", "FedNova", "MOON", "FedAtt", "WeightedPav"],
)
def test_a_buffer_of_all_clients_is_the_synchronous_round(method, options):
    whole, buffered = train(method, **options), train(method, Buffered(buffer=3), **options)
    assert_equal(state_of(whole), state_of(buffered))
    for name in ("comm/total_bytes", "train/loss", "train/clients"):
        assert whole.round_metrics[name] == buffered.round_metrics[name]
    seconds = whole.round_metrics["time/simulated_seconds"]
    assert buffered.round_metrics["time/simulated_seconds"] == pytest.approx(seconds, abs=1e-8)


@pytest.mark.parametrize("timing", [Synchronous(), Deadline(seconds=60.0, first=3)], ids=["Synchronous", "Deadline"])
def test_to_wait_for_all_is_the_round_without_a_timing(timing):
    assert_equal(state_of(train()), state_of(train(timing=timing)))


# -- the sums of old and new answers -----------------------------------------------------------------------------------


class Recorder:
    """What clients have received and sent in each round, and the global model before and after it."""

    def __init__(self, monkeypatch, method_class):
        self.rounds = []
        upload = method_class.upload

        def noted(method, client):
            sent = upload(method, client)
            self.sent[client.client_name] = (client.round, client.received.vector.clone(), sent.vector.clone())
            return sent

        monkeypatch.setattr(method_class, "upload", noted)
        run = Round.run

        def noted_run(round_of_run, round_, *args, **options):
            self.sent = {}
            before = round_of_run.parts.server.vector("smallcnn").clone()
            result = run(round_of_run, round_, *args, **options)
            after = round_of_run.parts.server.vector("smallcnn").clone()
            images = {name: report.num_images for name, report in result.reports.items()}
            self.rounds.append((before, dict(self.sent), images, after))
            return result

        monkeypatch.setattr(Round, "run", noted_run)


def fedbuff(round_, before, sent, images, num_parameters, power, weigh=None):
    """FedBuff's step in float64, answer by answer: parameters, running statistics."""
    total = sum(images.values())
    share = {name: images[name] / total for name in sent} if weigh is None else weigh
    discount = {name: (1 + round_ - began) ** -power for name, (began, _, _) in sent.items()}
    theta = before.double()
    result, mixed, step = theta.clone(), torch.zeros_like(theta), 0.0
    for name, (_, received, uploaded) in sent.items():
        result += share[name] * discount[name] * (uploaded.double() - received.double())
        mixed += share[name] * discount[name] * uploaded.double()
        step += share[name] * discount[name]
    return result[:num_parameters], (theta + step * (mixed / step - theta))[num_parameters:]


@pytest.mark.parametrize("power", [0.5, 0.0, 2.0])
@pytest.mark.parametrize("weighting", ["uniform", "size"])
def test_fedbuff_s_formula(monkeypatch, power, weighting):
    recorder = Recorder(monkeypatch, FedPav)
    model = train(FedPav(weighting=weighting), Buffered(buffer=2, power=power), rounds=8)
    num_parameters = model.parts.models["smallcnn"].flat.num_shared_parameters
    check_fedbuff(recorder.rounds, num_parameters, power, weighting)
    starts = [round_ - began for round_, (_, sent, *_) in enumerate(recorder.rounds) for began, *_ in sent.values()]
    assert max(starts) > 1, "nobody's answer was old"


def check_fedbuff(rounds, num_parameters, power, weighting):
    models = [before for before, *_ in rounds]
    for round_, (before, sent, images, after) in enumerate(rounds):
        for began, received, _ in sent.values():
            assert torch.equal(received, models[began]), "it trained on the model of its call"
        weigh = dict.fromkeys(sent, 1 / len(sent)) if weighting == "uniform" else None
        parameters, statistics = fedbuff(round_, before, sent, images, num_parameters, power, weigh)
        assert torch.allclose(after[:num_parameters].double(), parameters, rtol=0, atol=1e-6)
        assert torch.allclose(after[num_parameters:].double(), statistics, rtol=1e-6, atol=1e-6)


def test_a_version_without_its_term_is_noticed(monkeypatch):
    """The test above sees one missing term of many."""
    recorder, of = Recorder(monkeypatch, FedPav), OldModels.of
    dropped = []

    def of_the_current(old_models, round_, arch):
        import sys

        caller = sys._getframe(1).f_code
        if caller is BufferedClock._forward.__code__ and not dropped:
            dropped.append(round_)
            return recorder.rounds[-1][3]  # theta - theta: no term
        return of(old_models, round_, arch)

    monkeypatch.setattr(OldModels, "of", of_the_current)
    model = train(timing=Buffered(buffer=2), rounds=8)
    num_parameters = model.parts.models["smallcnn"].flat.num_shared_parameters
    assert dropped
    with pytest.raises(AssertionError):
        check_fedbuff(recorder.rounds, num_parameters, 0.5, "size")


def test_fedasync_s_formula(monkeypatch):
    recorder, alpha = Recorder(monkeypatch, FedPav), 0.6
    train(timing=Buffered(buffer=1, mix=alpha), rounds=9)
    old = 0
    for round_, (before, sent, _, after) in enumerate(recorder.rounds):
        [(began, _, uploaded)] = sent.values()
        step = alpha * (1 + round_ - began) ** -0.5
        expected = (1 - step) * before.double() + step * uploaded.double()
        assert torch.allclose(after.double(), expected, rtol=1e-6, atol=1e-6)
        old += began < round_
    assert old > 1


def test_fedasync_s_hinge(monkeypatch):
    """Xie et al., 2019: 1 up to b steps, 1 / (a (s - b) + 1) beyond."""
    recorder, alpha, a, b = Recorder(monkeypatch, FedPav), 0.6, 3.0, 1
    train(timing=Buffered(buffer=1, mix=alpha, discount="hinge", slope=a, until=b), rounds=9)
    ages = set()
    for round_, (before, sent, _, after) in enumerate(recorder.rounds):
        [(began, _, uploaded)] = sent.values()
        age = round_ - began
        step = alpha if age <= b else alpha / (a * (age - b) + 1)
        expected = (1 - step) * before.double() + step * uploaded.double()
        assert torch.allclose(after.double(), expected, rtol=1e-6, atol=1e-6)
        ages.add(age)
    assert min(ages) <= b < max(ages)


@pytest.mark.parametrize("options", [{"slope": 0.0}, {"until": 100}], ids=["no slope", "far hinge"])
def test_a_hinge_that_nobody_reaches_is_no_discount(options):
    plain, hinged = (
        train(timing=Buffered(buffer=2, **options), rounds=5)
        for options in ({"power": 0.0}, {"discount": "hinge"} | options)
    )
    assert torch.equal(vector(plain), vector(hinged))


def test_another_discount_cannot_continue_with_clients_under_way(paused, tmp_path):
    hinge = Buffered(buffer=2, discount="hinge")
    line = r"model\.timing\.discount was another when they were called; use that of the run that wrote it, or begin"
    with pytest.raises(ConfigError, match=line):
        train(rounds=8, ckpt_path=paused[0], timing=hinge)
    path = tmp_path / "hinge.ckpt"
    save(train(rounds=4, timing=hinge), path)
    with pytest.raises(
        ConfigError, match=r"model\.timing\.until was 4 when they were called, it is 2 here; set it to 4"
    ):
        train(rounds=8, ckpt_path=path, timing=Buffered(buffer=2, discount="hinge", until=2))
    whole, continued = train(rounds=6, timing=hinge), train(rounds=6, ckpt_path=path, timing=hinge)
    assert torch.equal(vector(whole), vector(continued))


def test_weights_of_single_tensors_are_discounted_one_by_one(monkeypatch):
    """FedAtt weighs each tensor by itself: each has its own mean discount; then it goes a share of the way."""
    recorder, method = Recorder(monkeypatch, FedAtt), FedAtt()
    given = []
    weights = FedAtt.weights

    def noted(self, reports):
        given.append(weights(self, reports))
        return given[-1]

    monkeypatch.setattr(FedAtt, "weights", noted)
    model = train(method, Buffered(buffer=2), rounds=8, bn_stats="local")
    entries = model.parts.statistics["smallcnn"].parameters
    assert len(given) == len(recorder.rounds) == 8
    for round_, ((before, sent, _, after), of_round) in enumerate(zip(recorder.rounds, given, strict=True)):
        theta, expected = before.double(), before.double().clone()
        for column, entry in enumerate(entries):
            for name, (began, received, uploaded) in sent.items():
                factor = of_round.parameters[name][column] * (1 + round_ - began) ** -0.5 * of_round.step_size
                expected[entry.span] += factor * (uploaded.double() - received.double())[entry.span]
        for entry in entries:
            assert torch.allclose(after.double()[entry.span], expected[entry.span], rtol=0, atol=1e-6), entry.name
        assert not torch.equal(theta, expected)


def test_running_variances_stay_positive():
    """Ten clients, one ten times slower, a buffer of nine: as changes, variances were not finite within 32 steps."""
    hardware = hardware_of(10.0, *[100.0] * 9)
    data = make_data(SyntheticReID(clients=10, unseen=1, scale=0.05), size=(16, 8))
    model = make_model(
        FedPav(), timing=Buffered(buffer=9), hardware=hardware, backbone=SmallCNN(width=4),
        client=LocalTraining(batch_size=8, optimizer=sgd),
    )  # fmt: skip
    fit(model, data, rounds=40)
    places = model.parts.statistics["smallcnn"].variances
    assert vector(model).isfinite().all()
    assert vector(model)[places].min() > 0
    assert model.round_metrics["time/clock"] > 2 * max(sessions(model).values()), "the slow client has answered twice"


# -- deadlines ---------------------------------------------------------------------------------------------------------


def sessions(model):
    """Client -> seconds of its session, computed by hand."""
    return {
        name: model.parts.costs[name] / model.settings.hardware.speed(name) for name in model.parts.names
    }  # fmt: skip


def test_a_deadline_drops_late_clients():
    model = train(timing=Deadline(seconds=2.0), rounds=2)
    seconds = sessions(model)
    in_time = [name for name, needs in seconds.items() if needs <= 2.0]
    assert 0 < len(in_time) < 3
    metrics = model.round_metrics
    assert [*model.reports] == in_time
    assert metrics["time/simulated_seconds"] == 2.0
    assert metrics["timing/late"] == 3 - len(in_time)
    size = model.parts.models["smallcnn"].shared_bytes
    assert metrics["comm/down_bytes"] == 3 * size
    assert metrics["comm/up_bytes"] == len(in_time) * size
    assert metrics["time/clock"] == 4.0


def test_a_round_ends_with_its_first_answers():
    model = train(timing=Deadline(first=2))
    fastest = sorted(sessions(model).items(), key=lambda item: item[1])[:2]
    assert {*model.reports} == {name for name, _ in fastest}
    assert model.round_metrics["time/simulated_seconds"] == pytest.approx(fastest[1][1], abs=1e-8)


def test_late_clients_train_on_what_fits():
    model = train(timing=Deadline(seconds=2.0, late="partial"), rounds=1)
    seconds, images = sessions(model), model.parts.costs
    assert [*model.reports] == model.parts.names
    for name, report in model.reports.items():
        share = min(1.0, 2.0 / seconds[name])
        batches = math.ceil(images[name] / 8)
        assert report.images <= 8 * max(1, int(share * batches + 1e-9))
        assert (report.images == images[name]) == (share == 1.0)
    assert model.round_metrics["time/simulated_seconds"] == 2.0


def test_a_deadline_goes_with_every_method_and_with_drop_outs():
    for method in (Scaffold(), SubFedAvg(), LotteryFL(), FedDyn(), IFCA()):
        model = train(method, Deadline(seconds=5.0), rounds=2, availability=Availability(drop=0.2), client=TWO_EPOCHS)
        assert 0 < model.round_metrics["time/simulated_seconds"] <= 5.0


# -- the ledger --------------------------------------------------------------------------------------------------------


def test_calls_count_down_and_answers_up():
    """Five windows by hand: town0 takes 1 s, town1 takes 1 s, town2 takes 2.5 s; the server steps with two answers."""
    data = make_data(SyntheticReID(clients=3, unseen=1, scale=0.2))
    images = {client.name: client.num_images for client in data.federated.clients}
    needs = {"town0": 1.0, "town1": 1.0, "town2": 2.5}
    hardware = hardware_of(*(images[name] / seconds for name, seconds in needs.items()))
    seen = []
    model = make_model(FedPav(), timing=Buffered(buffer=2), hardware=hardware)

    class Note(Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            ledger, size = pl_module.parts.ledger, pl_module.parts.models["smallcnn"].shared_bytes
            traffic = {name: (t.down // size, t.up // size) for name, t in ledger.round.items()}
            seen.append((pl_module.round_metrics["time/clock"], traffic))

    fit(model, data, rounds=5, callbacks=[Note()])
    assert seen == [
        (1.0, {"town0": (1, 1), "town1": (1, 1), "town2": (1, 0)}),
        (2.0, {"town0": (1, 1), "town1": (1, 1)}),
        # at 2.5 town2 answers, and rests; at 3 town0 and town1 do, and the first of them fills the buffer
        (3.0, {"town0": (1, 1), "town1": (1, 0), "town2": (0, 1)}),
        # town1's answer, of the same instant, begins the next window; town0 and town2 are called, town0 answers at 4
        (4.0, {"town0": (1, 1), "town1": (0, 1), "town2": (1, 0)}),
        # town0 and town1 are called at 4 and answer at 5
        (5.0, {"town0": (1, 1), "town1": (1, 1)}),
    ]
    assert model.parts.ledger.totals["down"] == 11 * model.parts.models["smallcnn"].shared_bytes
    assert model.parts.ledger.totals["up"] == 10 * model.parts.models["smallcnn"].shared_bytes


def test_answers_that_are_too_old_are_sent_but_not_trained():
    model = train(timing=Buffered(buffer=1, max_staleness=1), rounds=12)
    ledger, clock = model.parts.ledger, model.round.clock
    size = model.parts.models["smallcnn"].shared_bytes
    tables = list(clock.timetables(12))
    assert sum(len(table.too_old) for table in tables) > 0
    assert ledger.totals["up"] == size * sum(len(table.work) + len(table.too_old) for table in tables)
    assert ledger.totals["down"] == size * sum(len(table.called) for table in tables)
    assert all(round_ - began <= 1 for round_, t in enumerate(tables) for began in t.versions.values())
    assert model.round_metrics["timing/old_models"] <= 1


def test_the_largest_staleness_still_counts():
    """Of the windows of a long run, by the rounds of the calls; sessions take 1, 1.9, 2.7 and 4.2 seconds."""
    data = make_data(SyntheticReID(clients=4, unseen=1, scale=0.2))
    images = [client.num_images for client in data.federated.clients]
    hardware = hardware_of(*(n / needs for n, needs in zip(images, (1.0, 1.9, 2.7, 4.2), strict=True)))
    clock = train(timing=Buffered(buffer=1, max_staleness=2), rounds=1, data=data, hardware=hardware).round.clock
    called, staleness = {}, {"counts": set(), "too old": set()}
    for round_, table in enumerate(clock.timetables(60)):
        called |= dict.fromkeys(table.called, round_)  # who answers in a round is not called in it again
        staleness["counts"] |= {round_ - called[name] for name in table.work}
        staleness["too old"] |= {round_ - called[name] for name in table.too_old}
    assert staleness["counts"] == {0, 1, 2}
    assert min(staleness["too old"]) == 3


# -- beforehand, and after a pause -------------------------------------------------------------------------------------


def test_describe_knows_the_clock_of_the_run():
    options = {"timing": Buffered(buffer=2), "hardware": UNEQUAL, "availability": Availability(drop=0.2, straggle=0.3)}
    model = fit(make_model(FedPav(), **options), rounds=7)
    text = describe_federation(make_model(FedPav(), **options), make_data(), 2, 7)
    fresh = make_model(FedPav(), **options)
    fresh.assemble(make_data(), 0, 1, torch.device("cpu"))
    clock = clock_of(fresh.listeners)
    moment = clock.moment
    for round_ in range(7):
        _, moment = clock.timetable(round_, moment)
    assert moment == model.round.clock.moment
    seconds = re.search(r"^simulated seconds of 7 rounds +([\d.,]+)$", text, re.MULTILINE)
    assert float(seconds[1]) == pytest.approx(moment.clock / 1e9, abs=0.051)
    assert "of town1" in text


def save(model, path):
    model.trainer.save_checkpoint(path)
    return path


@pytest.fixture(scope="module")
def paused(tmp_path_factory):
    """A checkpoint with clients under way, after 4 of 8 steps; and the state after all."""
    folder = tmp_path_factory.mktemp("paused")
    model = train(timing=Buffered(buffer=2), rounds=4)
    assert model.round.clock.moment.under_way
    save(model, folder / "four.ckpt")
    return folder / "four.ckpt", state_of(train(timing=Buffered(buffer=2), rounds=8))


def test_a_run_continues_with_clients_under_way(paused):
    path, whole = paused
    assert_equal(whole, state_of(train(timing=Buffered(buffer=2), rounds=8, ckpt_path=path)))


@pytest.mark.parametrize("timing", [Synchronous(), Deadline(first=2)], ids=["Synchronous", "Deadline"])
def test_another_timing_cannot_continue_with_clients_under_way(paused, timing):
    with pytest.raises(ConfigError, match=r"clients are under way in the checkpoint.*use the timing of the run"):
        train(timing=timing, rounds=8, ckpt_path=paused[0])


def test_fewer_places_cannot_continue(tmp_path):
    options = {"timing": Buffered(buffer=1), "clients": 4}
    path = save(train(rounds=2, **options), tmp_path / "two.ckpt")
    assert len(read_checkpoint(path)["fedsim"]["timing"]["due"]) == 3
    line = "3 clients are under way in the checkpoint, and model.selection has 2 places here; use the selection of the"
    with pytest.raises(ConfigError, match=line):
        train(rounds=4, ckpt_path=path, selection=RandomFraction(0.5), **options)
    train(rounds=4, ckpt_path=path, selection=RandomFraction(0.75), **options)


OTHERS = [
    ("model.timing.buffer", "2", "1", {"timing": Buffered(buffer=1)}),
    ("model.timing.power", "0.5", "0.25", {"timing": Buffered(buffer=2, power=0.25)}),
    ("model.timing.mix", "null", "0.5", {"timing": Buffered(buffer=2, mix=0.5)}),
    ("model.timing.max_staleness", "null", "0", {"timing": Buffered(buffer=2, max_staleness=0)}),
    ("model.availability.drop", "0.0", "0.9", {"availability": Availability(drop=0.9)}),
    ("model.availability.straggle", "0.0", "0.5", {"availability": Availability(straggle=0.5)}),
    ("seed_everything", "0", "5", {"seed": 5}),
]


@pytest.mark.parametrize(("field", "was", "here", "changed"), OTHERS, ids=[field for field, *_ in OTHERS])
def test_other_settings_of_the_clock_cannot_continue_with_clients_under_way(paused, field, was, here, changed):
    number = len(read_checkpoint(paused[0])["fedsim"]["timing"]["due"])
    with pytest.raises(ConfigError) as error:
        train(rounds=8, ckpt_path=paused[0], **{"timing": Buffered(buffer=2)} | changed)
    assert str(error.value) == (
        f"ckpt_path: {number} clients are under way in the checkpoint, and {field} was {was} when they were called, it "
        f"is {here} here; set it to {was}, or begin a new run"
    )


@pytest.mark.parametrize(
    "hardware",
    [hardware_of(100.0, 17.0, 231.0), hardware_of(100.0, 17.0, 230.0, latency_ms=1)],
    ids=["speed", "latency"],
)
def test_other_hardware_cannot_continue_with_clients_under_way(paused, hardware):
    with pytest.raises(
        ConfigError, match=r"and model\.hardware was another when they were called; use that of the run"
    ):
        train(rounds=8, ckpt_path=paused[0], timing=Buffered(buffer=2), hardware=hardware)


def test_whole_numbers_are_the_same_hardware(paused):
    path, whole = paused
    same = Hardware(
        down_mbit=INF, up_mbit=INF, latency_ms=0, images_per_second=100,
        clients={f"town{i}": ClientHardware(images_per_second=speed) for i, speed in enumerate((100, 17, 230))},
    )  # fmt: skip
    assert_equal(whole, state_of(train(timing=Buffered(buffer=2), rounds=8, ckpt_path=path, hardware=same)))


def test_settings_that_no_clock_reads_may_change_with_clients_under_way(paused, tmp_path):
    path, _ = paused
    options = {"client": LocalTraining(batch_size=4, optimizer=sgd), "evaluation": Evaluation()}
    model = make_model(FedPav(), timing=Buffered(buffer=2), hardware=UNEQUAL, **options)
    logger, data = CSVLogger(tmp_path), make_data(SyntheticReID(clients=3, unseen=1, scale=0.2))
    fit(model, data, rounds=5, ckpt_path=path, logger=logger, check_val_every_n_epoch=1, log_every_n_steps=1)
    assert model.round_metrics["round"] == 5


@pytest.mark.parametrize(
    "changed",
    [
        {"timing": Buffered(buffer=1, mix=0.5)},
        {"timing": Buffered(buffer=3), "hardware": hardware_of(3.0)},
        {"timing": Buffered(buffer=3), "availability": Availability(drop=0.3)},
        {"timing": Buffered(buffer=2), "seed": 7},
        {"timing": Deadline(first=2)},
        {"timing": Synchronous()},
    ],
    ids=["timing", "hardware", "availability", "seed", "deadline", "synchronous"],
)
def test_every_setting_of_the_clock_may_change_where_no_client_is_under_way(tmp_path, changed):
    path = save(train(timing=Buffered(buffer=3), rounds=2), tmp_path / "two.ckpt")
    content = read_checkpoint(path)["fedsim"]["timing"]
    assert content["due"] == content["settings"] == {}
    assert train(rounds=3, ckpt_path=path, **changed).round_metrics["round"] == 3


def restored(paused, changed, **options):
    """A federation into which the paused checkpoint was loaded, with changes to the clock's state."""
    content = read_checkpoint(paused[0])
    content["fedsim"]["path"] = str(paused[0])
    changed(content["fedsim"]["timing"])
    model = make_model(FedPav(), **{"timing": Buffered(buffer=2), "hardware": UNEQUAL} | options)
    model.assemble(make_data(SyntheticReID(clients=3, unseen=1, scale=0.2)), 0, 1, torch.device("cpu"))
    checkpoint.restore(content, model.parts, model.listeners, 1)
    return model


def test_a_checkpoint_of_an_earlier_version_opens(paused):
    """It says nothing of the settings; those of this federation are taken."""
    model = restored(paused, lambda state: state.pop("settings"), timing=Buffered(buffer=2, power=1.0))
    clock = clock_of(model.listeners)
    assert clock.moment.under_way
    assert clock.state_dict()["settings"]["model.timing.power"] == 1.0


class Lengths(Callback):
    """Simulated seconds of each round."""

    def on_train_start(self, trainer, pl_module):
        self.seconds = []

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.seconds.append(pl_module.round_metrics["time/simulated_seconds"])


@pytest.mark.parametrize("timing", [Buffered(buffer=2), Deadline(first=2)], ids=["Buffered", "Deadline"])
def test_a_synchronous_run_may_go_on_with_another_timing(tmp_path, timing):
    """The simulated time is that since the run began."""
    data = make_data(SyntheticReID(clients=3, unseen=1, scale=0.2))
    begun = make_model(FedPav(), hardware=UNEQUAL, availability=Availability(drop=0.3, straggle=0.3))
    fit(begun, data, rounds=2, callbacks=[first := Lengths()])
    assert not [name for name in begun.round_metrics if name == "time/clock" or name.startswith("timing/")]
    assert begun.round.clock.moment == ClockState(sum(round(1e9 * seconds) for seconds in first.seconds))
    path, after = save(begun, tmp_path / "two.ckpt"), Lengths()
    model = fit(make_model(FedPav(), hardware=UNEQUAL, timing=timing), data, 4, ckpt_path=path, callbacks=[after])
    assert len(after.seconds) == 2
    total = math.fsum([*first.seconds, *after.seconds])
    assert model.round_metrics["time/clock"] == pytest.approx(total, abs=1e-8)
    # and back again, without a client under way
    if timing == Deadline(first=2):
        path = save(model, tmp_path / "four.ckpt")
        model = fit(make_model(FedPav(), hardware=UNEQUAL), data, 5, ckpt_path=path, callbacks=[last := Lengths()])
        assert model.round.clock.moment.clock == pytest.approx(1e9 * (total + last.seconds[0]), abs=10)


def test_a_synchronous_run_without_hardware_has_no_time(tmp_path):
    path = save(train(rounds=2, hardware=None), tmp_path / "two.ckpt")
    assert read_checkpoint(path)["fedsim"]["timing"]["clock"] == 0
    model = train(timing=Buffered(buffer=2), rounds=3, ckpt_path=path)
    assert model.round_metrics["time/clock"] == model.round_metrics["time/simulated_seconds"]


def test_synchronous_rounds_do_not_wait_for_clients_that_drop_out():
    """They count their download; a deadline and a buffer wait until they should have answered."""
    hardware, drops = hardware_of(1.0, 1.0, 1.0, latency_ms=250), Availability(drop=1.0)
    for timing, waits in ((None, False), (Deadline(first=1), True), (Buffered(buffer=1), True)):
        model = train(timing=timing, rounds=1, hardware=hardware, availability=drops)
        seconds = 0.25 + (max(sessions(model).values()) if waits else 0.0)
        assert model.round_metrics["time/simulated_seconds"] == pytest.approx(seconds, abs=1e-8)


@pytest.mark.parametrize(
    "timing",
    [
        Deadline(seconds=2.0), Deadline(seconds=2.0, late="partial"), Deadline(first=2),
        Deadline(seconds=2.0, first=2, late="partial"),
    ],
    ids=["drop", "partial", "first", "first, partial"],
)  # fmt: skip
def test_a_run_with_a_deadline_continues_in_the_middle(tmp_path, timing):
    options = {"timing": timing, "availability": Availability(drop=0.1, straggle=0.2)}
    path = save(train(rounds=1, **options), tmp_path / "one.ckpt")
    whole, continued = train(rounds=2, **options), train(rounds=2, ckpt_path=path, **options)
    assert_equal(state_of(whole), state_of(continued))
    names = ("time/clock", "time/simulated_seconds", "timing/late", "comm/total_bytes", "train/loss", "train/images")
    assert [whole.round_metrics[name] for name in names] == [continued.round_metrics[name] for name in names]


def test_a_checkpoint_without_a_model_under_way_is_refused(paused, tmp_path):
    content = read_checkpoint(paused[0])
    content[checkpoint.OLD_MODELS_KEY].clear()
    model = train(timing=Buffered(buffer=2), rounds=1)
    content["fedsim"]["path"] = str(paused[0])
    with pytest.raises(DataError, match="lacks the global model with which round"):
        checkpoint.restore(content, model.parts, model.listeners, 1)


# -- refusals ----------------------------------------------------------------------------------------------------------


def refusal(timing, method=None, clients=3, **options):
    """The one line with which a federation is refused."""
    model = make_model(method or FedPav(), **{"timing": timing, "hardware": UNEQUAL} | options)
    data = options.pop("data", None) or make_data(SyntheticReID(clients=clients, unseen=1, scale=0.1))
    with pytest.raises(ConfigError) as error:
        model.assemble(data, 0, 1, torch.device("cpu"))
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        (Scaffold(), "has a step of the server"),
        (FedDyn(), "has a step of the server"),
        (FedDIP(), "has a step of the server"),
        (SKA(dual=False, unseen="avg"), "has a step of the server"),
        (LotteryFL(), "uploads masks"),
        (SubFedAvg(), "uploads masks"),
        (IFCA(), "sends tensors|combines the single uploads"),
        (StyleBank(), "sends tensors beside the model"),
    ],
)
def test_methods_that_need_rounds_are_refused(method, reason):
    line = refusal(Buffered(buffer=2), method, client=TWO_EPOCHS)
    assert re.match(rf"model\.method: {type(method).__name__}, as it is configured, ({reason})", line), line
    assert line.endswith("choose another method, or Deadline")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"hardware": None}, "model.hardware: Buffered of model.timing needs the speeds"),
        ({"timing": Buffered(buffer=4)}, "model.timing.buffer: waits for 4 answers, but only 3 clients are under way"),
        ({"selection": PoissonSampling(0.5)}, "model.selection: PoissonSampling chooses for a round as a whole"),
        ({"selection": UCB(count=2)}, "model.selection: UCB learns from rounds"),
        ({"selection": PowerOfChoice(count=2, candidates=3)}, "model.selection: PowerOfChoice learns from rounds"),
        ({"aggregation": Median()}, "model.aggregation: compares the uploads of a round"),
        ({"bn_stats": "first"}, "model.bn_stats: first takes the statistics of a round"),
        ({"bn_stats": "pooled"}, "model.bn_stats: pooled takes the statistics of a round"),
        ({"hardware": None, "timing": Deadline(first=1)}, "model.hardware: Deadline of model.timing needs the speeds"),
        ({"timing": Deadline(first=4)}, "model.timing.first: waits for 4 answers, but model.selection picks 3"),
        ({"timing": Deadline(seconds=1e-9)}, "model.timing.seconds: a round of 1e-09 s ends before the"),
        (
            {"timing": Deadline(seconds=0.001)},
            "model.timing.seconds: a round of 0.001 s ends before the",
        ),
    ],
)
def test_settings_that_need_rounds_are_refused(options, line):
    assert refusal(**{"timing": Buffered(buffer=2)} | options).startswith(line)


def test_a_deadline_before_the_messages_is_refused_also_for_partial_work():
    line = refusal(Deadline(seconds=0.5, late="partial"), hardware=hardware_of(1.0, latency_ms=700))
    assert "needs 0.7 s for its messages alone; raise it" in line


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: Deadline(), "model.timing.seconds: Deadline has no end; set seconds or first"),
        (lambda: Deadline(seconds=-1.0), "model.timing.seconds: -1.0 is not in [1e-9, 1e12]"),
        (lambda: Deadline(seconds=INF), "model.timing.seconds: inf is no finite number"),
        (lambda: Deadline(first=0), "model.timing.first: 0 is less than 1"),
        (lambda: Deadline(first=2, late="partial"), "model.timing.late: partial work needs a time"),
        (lambda: Buffered(buffer=0), "model.timing.buffer: 0 is less than 1"),
        (lambda: Buffered(buffer=1, power=math.nan), "model.timing.power: nan is no finite number"),
        # factors of old answers would be 0, and so their sum
        (lambda: Buffered(buffer=1, power=2000.0), "model.timing.power: 2000.0 is not in [0, 10]"),
        (lambda: Buffered(buffer=1, slope=-1.0), "model.timing.slope: -1.0 is not in [0, 1e6]"),
        (lambda: Buffered(buffer=1, until=-1), "model.timing.until: -1 is less than 0"),
        (lambda: Buffered(buffer=1, mix=0.0), "model.timing.mix: 0.0 is not in (0, 1]"),
        (lambda: Buffered(buffer=1, max_staleness=-1), "model.timing.max_staleness: -1 is less than 0"),
    ],
)
def test_wrong_numbers_are_refused(make, line):
    with pytest.raises(ConfigError) as error:
        make()
    assert str(error.value).startswith(line)


@pytest.mark.parametrize("timing", [Synchronous(), Deadline(first=1), Buffered(buffer=1)])
@pytest.mark.parametrize("rate", [1e-6, 1e12])
def test_the_slowest_and_the_fastest_clients_have_a_finite_time(timing, rate):
    hardware = Hardware(down_mbit=rate, up_mbit=rate, images_per_second=rate, latency_ms=1e9)
    seconds = train(timing=timing, rounds=1, hardware=hardware).round_metrics["time/simulated_seconds"]
    assert seconds == pytest.approx(1e6) if rate > 1 else 1e7 < seconds < 1e12


REFUSED = {
    "FedDIP",
    "FedDyn",
    "FedKLPR",
    "FedProto",
    "GPerXAN",
    "IFCA",
    "LotteryFL",
    "Scaffold",
    "StyleBank",
    "SubFedAvg",
}


def test_methods_are_allowed_by_what_they_declare():
    """With their defaults; the table of docs/timing.md has the others."""
    model = train(timing=Buffered(buffer=2), rounds=1)
    refused, methods = {}, [cls for cls in vars(fedsim.methods).values() if isinstance(cls, type)]
    classes = {cls for cls in methods if issubclass(cls, Method) and cls is not Method}
    for cls in classes:
        try:
            check_buffered(replace(model.round.clock.inputs, method=cls()))
        except ConfigError as error:
            refused[cls.__name__] = str(error)
    assert len(classes) == 38
    assert refused.keys() == REFUSED, refused


def test_tensors_that_a_method_sends_from_the_second_round_on_are_refused():
    class Later(FedPav):
        def payload(self, server, arch, round_):
            shape = (server.models[arch].flat.num_shared_parameters,)
            return Payload(up={"drift": shape} if round_ else {})

    assert "sends tensors beside the model" in refusal(Buffered(buffer=2), Later())


# -- the effect --------------------------------------------------------------------------------------------------------


class Scores(Callback):
    """Simulated seconds and the mean mAP of the global model, after each round; who has answered."""

    def __init__(self):
        self.clock, self.rows, self.answers = 0.0, [], Counter()

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.clock += pl_module.round_metrics["time/simulated_seconds"]
        self.answers.update([*pl_module.reports])

    def on_validation_end(self, trainer, pl_module):
        self.rows.append((self.clock, pl_module.scores["test/global/seen/mAP"]))

    def reach(self, target):
        """Simulated seconds until a score."""
        return next(seconds for seconds, score in self.rows if score >= target)


def scores_of(seed, timing, rounds):
    """Ten clients: nine take a second, town0 takes four."""
    data = make_data(SyntheticReID(clients=10, unseen=1, scale=0.25))
    images = {client.name: client.num_images for client in data.federated.clients}
    hardware = hardware_of(*(number / (4 if name == "town0" else 1) for name, number in images.items()))
    optimizer = partial(torch.optim.SGD, lr=0.03, momentum=0.9)
    model = make_model(
        FedPav(), seed=seed, timing=timing, hardware=hardware, evaluation=Evaluation(), backbone=SmallCNN(width=16),
        client=LocalTraining(batch_size=16, optimizer=optimizer),
    )  # fmt: skip
    fit(model, data, rounds, callbacks=[scores := Scores()], check_val_every_n_epoch=1, limit_val_batches=1.0)
    return scores


@pytest.mark.others
def test_a_slow_client_costs_less_time():
    """By half of what theory gives: answers per second grow by 4 * 9.25 / 10 = 3.7.

    Of nine seeds, the mean logarithm of the factor is 1.01, and its standard deviation 0.17: of three seeds together, a
    factor of 1.86 is four deviations below the mean.
    """
    logarithms = []
    for seed in range(3):
        synchronous, buffered = scores_of(seed, None, 16), scores_of(seed, Buffered(buffer=9), 40)
        for share in (0.7, 0.8, 0.9):
            target = share * synchronous.rows[-1][1]
            logarithms.append(math.log(synchronous.reach(target) / buffered.reach(target)))
        # the price: town0 answers at its rate
        assert buffered.answers["town0"] == int(buffered.clock / 4) == min(buffered.answers.values())
    assert math.exp(sum(logarithms) / len(logarithms)) >= 3.7 / 2, logarithms


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"privacy": DifferentialPrivacy(clip=1.0, noise_multiplier=1.0)}, "model.privacy: DifferentialPrivacy"),
        ({"has_ladder": True}, "model.adaptive_backbones: ranks clients by rounds"),
        ({"privacy": WhiteNoise(beta=0.1)}, None),
    ],
)
def test_noise_that_is_accounted_for_and_ladders_are_refused(changed, line):
    model = make_model(FedPav(), timing=Buffered(buffer=2), hardware=UNEQUAL)
    model.assemble(make_data(SyntheticReID(clients=3, unseen=1, scale=0.1)), 0, 1, torch.device("cpu"))
    inputs = replace(clock_of(model.listeners).inputs, **changed)
    with pytest.raises(ConfigError) if line else nullcontext() as error:
        check_buffered(inputs)
    assert line is None or str(error.value).startswith(line)


@pytest.mark.parametrize(("mode", "first"), [("central", 2), ("central", None), ("local", 2)])
def test_the_first_answers_have_no_central_privacy(mode, first):
    privacy = DifferentialPrivacy(clip=1.0, noise_multiplier=1.0, mode=mode)
    options = {"method": FedPav(weighting="uniform"), "privacy": privacy, "bn_stats": "local", "hardware": UNEQUAL}
    model = make_model(timing=Deadline(seconds=60.0, first=first), **options)
    data = make_data(SyntheticReID(clients=3, unseen=1, scale=0.1))
    is_refused = mode == "central" and first is not None
    refusal = pytest.raises(
        ConfigError, match=r"^model\.timing\.first: without a client another one is among the first"
    )
    with refusal if is_refused else nullcontext():
        model.assemble(data, 0, 1, torch.device("cpu"))


def test_free_places_go_to_clients_that_are_not_busy():
    """Of eight clients, half are under way; each is called at its turn, never twice with one model."""
    model = make_model(
        FedPav(), timing=Buffered(buffer=2), selection=RandomFraction(0.5), hardware=hardware_of(30.0, 200.0)
    )
    model.assemble(make_data(SyntheticReID(clients=8, unseen=1, scale=0.1)), 0, 1, torch.device("cpu"))
    under_way, calls = set(), Counter()
    for round_, table in enumerate(clock_of(model.listeners).timetables(300)):
        assert not under_way & {*table.called}
        under_way = (under_way | {*table.called}) - {*table.work}
        assert len(under_way) <= 4
        calls.update((name, round_) for name in table.called)
    assert set(calls.values()) == {1}
    number = Counter(name for name, _ in calls)
    assert len(number) == 8
    assert number["town0"] == min(number.values())


def test_a_forecast_is_counted_by_hand():
    """Three rounds: b begins in the first and answers in the third; c is late once; two ranks."""
    costs = {"a": 4.0, "b": 6.0, "c": 2.0}
    tables = [
        Timetable(["a", "b", "c"], {"a": 1.0, "c": 0.5}, {"a": 0, "c": 0}, kept={0}, seconds=2.0),
        Timetable(["a"], {"a": 1.0}, {"a": 1}, too_old=["c"], kept={0}, seconds=1.0),
        Timetable(["c"], {"b": 1.0, "c": 1.0}, {"b": 0, "c": 2}, late=1, seconds=3.5),
    ]
    forecast = replay(tables, costs, dict.fromkeys(costs, 1), place(costs, 2, 2))
    assert (forecast.seconds, forecast.answers, forecast.late, forecast.too_old) == (6.5, 5, 1, 1)
    assert dict(forecast.count) == {"a": 2, "b": 1, "c": 2}
    assert (forecast.fewest, forecast.most) == ("b", "a")
    assert forecast.staleness == [0, 0, 0, 2, 0]
    assert (forecast.mean_staleness, forecast.largest_staleness) == (0.4, 2)
    assert (forecast.old_models, forecast.slots) == (1, 1)  # that of the first round, during all three
    busy, spans = (4 + 1) + 4 + (6 + 2), 4 + 4 + 6  # of a round, the longer rank
    assert forecast.idle == pytest.approx(1 - busy / (2 * spans))


def test_old_models_of_which_one_follows_the_other_are_kept_one_at_a_time():
    """a begins in rounds 0 and 2, and answers in rounds 1 and 3."""
    versions = [{}, {"a": 0}, {}, {"a": 2}]
    kept = [{0}, (), {2}, ()]
    tables = [
        Timetable(["a"] if not v else [], dict.fromkeys(v, 1.0), v, kept=of_round, seconds=1.0)
        for v, of_round in zip(versions, kept, strict=True)
    ]
    costs = {"a": 1.0}
    forecast = replay(tables, costs, {"a": 1}, place(costs, 1, 1))
    assert (forecast.old_models, forecast.slots) == (1, 2)  # the slot of round 0 rests during round 2
