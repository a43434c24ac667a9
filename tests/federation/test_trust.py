"""FLTrust: the server's own training, and the trust in uploads, against plain loops and against wrong uploads."""

import copy
import math
import random
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from failing import run_on_ranks
from fedsim.core.errors import ConfigError, TrainingError
from fedsim.data import SyntheticReID
from fedsim.federation.aggregation.gathered import gathered_bytes
from fedsim.federation.components.attacks import SignFlip
from fedsim.federation.components.collusion import ALIE, Collusion, InnerProduct, MinMax, MinSum, Numbers
from fedsim.federation.components.robust import (
    Bucketing,
    Bulyan,
    CentredClipping,
    FLTrust,
    GeometricMedian,
    Krum,
    Median,
    NearestNeighbourMixing,
    NormClipping,
    TrimmedMean,
)
from fedsim.federation.components.selection import RandomFraction
from fedsim.federation.memory import device_memory, most_of_a_rank, placement_of, training_pixels
from fedsim.methods import IFCA, FedAvg, FedPav, Local
from fedsim.methods.fedpav import Distillation
from fedsim.models import SmallCNN
from fedsim.training.labels import Clustering
from fedsim.training.settings import ClientOverride, LocalTraining
from fedsim.training.uploads import Uploads
from plain_loops import Federation, Participant, play, sgd
from small import fit, make_data, make_model, named, refuse, state_of, vector

ROOT = "town4"


def five(**options):
    """Four clients; the images of the fifth town are the server's."""
    return make_data(SyntheticReID(clients=5, unseen=0, scale=0.2), public=ROOT, **options)


def run(rounds=2, data=None, method=None, **options):
    options = {"aggregation": FLTrust(), **options}
    trainer = {name: options.pop(name) for name in ("devices", "ckpt_path") if name in options}
    return fit(make_model(method or FedPav(), **options), data or five(), rounds=rounds, **trainer)


def norm(values):
    return math.hypot(*values)


def trusted(rows, own, start, num_parameters):
    """The equations of FLTrust over lists of numbers; statistics are behind the parameters."""
    updates = [[w - x for w, x in zip(row, start, strict=True)] for row in [*rows, own]]
    parts = [(update[:num_parameters], update[num_parameters:]) for update in updates]
    *others, (g0, s0) = parts
    scores, change = [], [0.0] * len(start)
    for g, _ in others:
        lengths = norm(g) * norm(g0)
        scores.append(max(0.0, sum(a * b for a, b in zip(g, g0, strict=True)) / lengths) if lengths else 0.0)
    for score, (g, s) in zip(scores, others, strict=True):
        if score == 0:
            continue
        factor = norm(g0) / norm(g)
        of_statistics = min(1.0, norm(s0) / norm(s)) if norm(s) else 1.0
        scaled = [*(factor * value for value in g), *(of_statistics * value for value in s)]
        change = [c + score * value for c, value in zip(change, scaled, strict=True)]
    total = sum(scores)
    return [x + c / total for x, c in zip(start, change, strict=True)] if total else [*start]


# -- the equations -----------------------------------------------------------------------------------------------------


def judged(rows, own, start, num_parameters):
    """FLTrust's vector for uploads that are lists of numbers."""
    vectors, start = torch.tensor(rows), torch.tensor(start)
    flat = SimpleNamespace(num_shared_parameters=num_parameters)
    server = SimpleNamespace(
        vector=lambda _: start, trained={"a": torch.tensor(own)}, models={"a": SimpleNamespace(flat=flat)}
    )
    names = [str(i) for i in range(len(rows))]
    return FLTrust().aggregate(server, "a", Uploads(names, len(start), lambda span: vectors[:, span]), {})


def drawn(seed):
    """A server's model, a start, and uploads of which some are wrong: opposite, huge, unchanged, or at random."""
    draw = random.Random(seed)
    size, num_statistics = draw.randint(2, 9), draw.randint(0, 4)
    gauss = lambda scale=1.0: [draw.gauss(0, scale) for _ in range(size + num_statistics)]  # noqa: E731 - many times
    start, step = gauss(), gauss(0.1)
    moved = lambda factor, noise: [x + factor * g + n for x, g, n in zip(start, step, gauss(noise), strict=True)]  # noqa: E731
    honest = [moved(draw.uniform(0.5, 2), 0.05) for _ in range(draw.randint(1, 4))]
    wrong = [moved(-draw.uniform(1, 1000), 0.01), moved(0, 1e4), [*start], moved(1e6, 0), gauss()]
    rows = honest + draw.sample(wrong, draw.randint(0, 5))
    draw.shuffle(rows)
    as_stored = torch.tensor([*rows, moved(1, 0.01), start]).tolist()  # float32, as uploads are
    return as_stored[:-2], as_stored[-2], as_stored[-1], size


@pytest.mark.parametrize("seed", range(12))
def test_random_and_wrong_uploads_are_judged_as_by_a_loop(seed):
    rows, own, start, size = drawn(seed)
    expected = torch.tensor(trusted(rows, own, start, size), dtype=torch.float64)
    torch.testing.assert_close(judged(rows, own, start, size).double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("seed", range(12))
def test_no_uploads_move_the_model_further_than_the_servers_own(seed):
    rows, own, start, size = drawn(seed)
    change = judged(rows, own, start, size).double() - torch.tensor(start).double()
    server = torch.tensor(own).double() - torch.tensor(start).double()
    for part in (slice(size), slice(size, None)):
        assert float(change[part].norm()) <= float(server[part].norm()) * (1 + 1e-5) + 1e-6


@pytest.mark.parametrize("length", [1e-3, 1.0, 1e4, 1e30])
def test_updates_against_the_servers_have_no_weight(length):
    start, own = [0.5, -1.0, 2.0, 3.0], [1.5, -1.0, 3.0, 4.0]
    honest = [[1.6, -0.9, 3.1, 3.5], [1.0, -1.2, 2.9, 3.2]]
    at_a_right_angle = [0.5, -1.0 + length, 2.0, 1e5]
    against = [[0.5 - length, -1.0 + length, 2.0 - length, 9.0], at_a_right_angle]
    expected = judged(honest, own, start, 3)
    torch.testing.assert_close(judged([against[0], *honest, against[1]], own, start, 3), expected, rtol=1e-6, atol=0)


def test_the_model_stays_if_no_update_is_trusted():
    start, own = [0.5, -1.0, 2.0], [1.5, -1.0, 2.0]
    assert judged([[-3.0, 8.0, 4.0], start], own, start, 2).tolist() == start
    assert judged([[1.5, -1.0, 4.0]], start, start, 2).tolist() == start, "the server has not moved"


def test_statistics_decide_nothing_and_no_variance_is_negative():
    start, own = [0.0, 0.0, 1.0], [1.0, 0.0, 0.5]
    same = [[0.01, 0.0, 0.01], [-0.01, 0.0, 0.5]]  # a short update is made longer, its statistics are not
    assert judged(same, own, start, 2).tolist() == pytest.approx([1.0, 0.0, 0.5])


def test_the_global_model_of_three_rounds_is_that_of_a_loop():
    reference = Federation(five())
    root = Participant(replace(reference.data.federated.root, name=f"{ROOT} on the server"), reference.data.size)
    is_statistic = lambda key: "running" in key  # noqa: E731 - twice
    state = reference.model.state_dict()  # the model's own tensors
    keys = sorted((key for key in state if "num_batches" not in key), key=is_statistic)
    size = sum(state[key].numel() for key in keys if not is_statistic(key))
    flat = lambda state: torch.cat([state[key].flatten() for key in keys])  # noqa: E731 - three times
    for round_ in range(3):
        states = []
        for participant in [*reference.clients, root]:
            model = copy.deepcopy(reference.model)
            sgd(model, participant.head, participant.batches(round_))
            states.append(model.state_dict())
        *rows, own, start = (flat(one).tolist() for one in [*states, state])
        new = torch.tensor(trusted(rows, own, start, size), dtype=torch.float64)
        for key, part in zip(keys, new.split([state[key].numel() for key in keys]), strict=True):
            state[key].copy_(part.view_as(state[key]))
    found = named(play(FedPav(), 3, data=five(), aggregation=FLTrust()), "smooth")
    torch.testing.assert_close(flat(found).double(), flat(state), rtol=0, atol=2e-6)


# -- in a federation ---------------------------------------------------------------------------------------------------


def test_lies_of_all_clients_move_the_model_no_further_than_the_servers_own_step():
    def moved(rule):
        model = run(1, aggregation=rule, attack=SignFlip(1.0, scale=200.0))
        start = make_model(FedPav(), aggregation=rule)
        start.assemble(five(), 0, 1, torch.device("cpu"))
        size = model.parts.models["smallcnn"].flat.num_shared_parameters
        own = model.server.trained.get("smallcnn", vector(start))
        return [float((x - vector(start))[:size].norm()) for x in (vector(model), own)]

    change, own = moved(FLTrust())
    assert 0 < change <= own * (1 + 1e-5)
    assert moved(None)[0] > 5 * own


def test_one_chunk_and_many_give_the_same_bits(monkeypatch):
    whole = vector(run(1))
    monkeypatch.setattr("fedsim.training.uploads.CHUNK", 4 * 100)
    assert torch.equal(vector(run(1)), whole)


def test_the_server_is_no_client():
    model, plain = run(), run(aggregation=Median())
    images = five().federated.root.num_images
    assert model.parts.names == plain.parts.names == [f"town{i}" for i in range(4)]
    assert model.round_metrics["train/images_server"] == images
    assert model.round_metrics["train/steps_server"] == math.ceil(images / 8)
    assert model.round_metrics["train/images"] == plain.round_metrics["train/images"] + images
    traffic = {name: value for name, value in plain.round_metrics.items() if name.startswith("comm/")}
    assert {name: model.round_metrics[name] for name in traffic} == traffic
    assert not any(ROOT in name for name in model.round_metrics)


def test_the_server_trains_on_as_few_batches_as_clients():
    assert run(1, five(limit_client_batches=1)).round_metrics["train/steps_server"] == 1


def test_the_server_trains_whoever_is_selected():
    model = run(selection=RandomFraction(0.5))
    assert len(model.reports) == 2
    assert model.round_metrics["train/images_server"] == five().federated.root.num_images


def states(model):
    """All that a run has learnt, the head of the server's images included."""
    root = model.parts.root.private_state() if model.strategy.is_global_zero else {}
    return state_of(model) | {f"root {name}": tensor.clone() for name, tensor in root.items()}


KINDS = {
    "private head": run,
    "momentum kept": lambda rounds=2, **options: run(rounds, client=kept(), **options),
    "common head": lambda rounds=2, **options: run(rounds, five(labels="common"), FedAvg(), **options),
    "buckets": lambda rounds=2, **options: run(rounds, aggregation=Bucketing(FLTrust()), **options),
}


def kept():
    optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9)  # noqa: E731 - short
    return LocalTraining(batch_size=8, optimizer=optimizer, optimizer_state="keep")


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_from_its_checkpoint_with_the_same_bits(kind, tmp_path):
    first = KINDS[kind](2)
    first.trainer.save_checkpoint(tmp_path / "two.ckpt")
    found, expected = states(KINDS[kind](3, ckpt_path=tmp_path / "two.ckpt")), states(KINDS[kind](3))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def on_two(folder):
    """What each of two ranks does."""
    with mock.patch("fedsim.training.uploads.CHUNK", 400):  # both ranks compute with the server's model
        found = {kind: make(devices=2) for kind, make in KINDS.items()}
    rank = found["buckets"].strategy.global_rank
    work = {f"{kind} work": torch.tensor(model.server.work) for kind, model in found.items()}
    roots = {
        f"{kind} {name}": x for kind, model in found.items() for name, x in states(model).items() if "root" in name
    }
    torch.save({**{kind: vector(model) for kind, model in found.items()}, **work, **roots}, folder / f"{rank}.pt")


@pytest.mark.dist
@pytest.mark.slow
def test_two_ranks_give_the_bits_of_one(tmp_path):
    run_on_ranks(on_two, tmp_path)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    for kind, make in KINDS.items():
        one = make()
        assert all(torch.equal(found[kind], vector(one)) for found in ranks), kind
        assert all(tuple(found[f"{kind} work"].tolist()) == one.server.work for found in ranks), kind
        for name, tensor in states(one).items():
            assert "root" not in name or torch.equal(ranks[0][f"{kind} {name}"], tensor), name


# -- the images --------------------------------------------------------------------------------------------------------


def test_a_root_with_the_name_of_a_client_is_no_client():
    """Clients of a partition have generated names, such as part1."""

    class Renamed(SyntheticReID):
        def domains(self):
            return [replace(d, name="part1") if d.name == ROOT else d for d in super().domains()]

    data = make_data(Renamed(clients=5, unseen=0, scale=0.2), public="part1", partition="stratified", parts=2)
    model = fit(make_model(FedAvg(share_head=False), aggregation=FLTrust()), data, rounds=1)
    assert {"part1", "part2"} == {*model.reports}


def test_a_server_whose_training_diverges_is_named_with_its_images():
    training = LocalTraining(batch_size=8, optimizer=lambda params: torch.optim.SGD(params, lr=1e30))
    sane = {
        c.name: ClientOverride(optimizer=lambda params: torch.optim.SGD(params, lr=0.01))
        for c in five().federated.clients
    }
    model = make_model(FedAvg(share_head=False), aggregation=FLTrust(), client=training, clients=sane)
    with pytest.raises(TrainingError, match=rf"round 1: {ROOT} on the server: loss or weights are not finite"):
        fit(model, five(), rounds=3)


def test_other_people_on_the_server_are_refused_at_a_resume(tmp_path):
    def trained(public, unseen, rounds, **options):
        data = make_data(SyntheticReID(clients=6, unseen=0, scale=0.2), public=public, unseen=[unseen])
        model = make_model(FedAvg(share_head=False), aggregation=FLTrust())
        return fit(model, data, rounds=rounds, **options)

    trained("town5", "town4", 1).trainer.save_checkpoint(tmp_path / "last.ckpt")
    with pytest.raises(ConfigError, match=r"trained on town5 on the server .* use the data\.public of that run"):
        trained("town4", "town5", 2, ckpt_path=str(tmp_path / "last.ckpt"))


def test_public_images_that_nothing_uses_are_named(caplog):
    """A user's method may use them, as the server has them."""
    options = {"plain": {}, "statistics": {"bn_stats": "recalibrate"}, "trust": {"aggregation": FLTrust()}}
    for name, of_model in options.items():
        caplog.clear()
        make_model(FedAvg(share_head=False), **of_model).assemble(five(), 0, 1, torch.device("cpu"))
        line = f"data.public: no setting uses the images of {ROOT}, and it is neither a client nor a test set"
        assert (line in caplog.text) == (name == "plain")
    caplog.clear()
    make_model(Mine(share_head=False)).assemble(five(), 0, 1, torch.device("cpu"))
    assert "data.public" not in caplog.text


class Mine(FedAvg):
    """A user's method."""


def test_the_root_is_the_labelled_training_images_of_the_public_data_set():
    domains = {domain.name: domain for domain in SyntheticReID(clients=5, unseen=0, scale=0.2).domains()}
    root, train = five().federated.root, domains[ROOT].train
    assert (root.name, root.num_images, root.num_classes) == (ROOT, len(train), len(train.identities))
    assert [int(train.identities[label]) for label in root.labels] == train.pids.tolist()
    assert five(max_identities=2).federated.root.num_classes == 2
    common = five(labels="common").federated
    classes = common.classes[common.root.labels]
    assert classes.tolist() == common.root.train.pids.tolist()
    assert common.root.num_classes == len(common.classes)


class HeldOut(FedPav):
    requires = frozenset({"held_out"})


WIDER = {"town1": ClientOverride(backbone=SmallCNN(width=6))}


@pytest.mark.parametrize(
    ("data", "options", "line"),
    [
        ({}, {}, "data.public has none; name a data set"),
        ({"public": "new0"}, {}, "data.public new0 has none"),
        ({"public": "town2"}, {"method": Local()}, "clients of Local send no parameters"),
        ({"public": "town2"}, {"client": LocalTraining(cluster=Clustering())}, "leave model.client.cluster out"),
        ({"public": "town2"}, {"clients": WIDER}, "the server trains one model"),
        (
            {"public": "town2", "val": "first_image"},
            {"method": HeldOut()},
            "HeldOut needs held-out images, and the server has none",
        ),
    ],
)
def test_refusals(data, options, line):
    with pytest.raises(ConfigError, match=line) as error:
        run(data=make_data(**data), **options)
    assert str(error.value).startswith("model.aggregation: ")


def test_it_is_named_on_the_command_line(capsys, tiny):
    line = refuse(capsys, "fit", "--config", tiny, "--model.aggregation", "FLTrust")
    assert "model.aggregation: the server trains on labelled images, and data.public has none" in line


# -- memory that fedsim describe counts --------------------------------------------------------------------------------


def memory_of(ranks=1, method=None, **options):
    model, data = make_model(method or FedPav(), **options), five()
    model.assemble(data, 0, ranks, torch.device("cpu"))
    placement = placement_of(model.settings, model.parts, ranks, 1)
    return device_memory(model.settings, model.parts, data, placement, "32-true"), model.parts, placement


def test_described_memory_has_the_server_s_session_and_images():
    small = {f"town{i}": ClientOverride(batch_size=2) for i in range(4)}
    (plain, _, _), (trusting, parts, _) = (memory_of(aggregation=r, clients=small) for r in (Median(), FLTrust()))
    pixels = 3 * 32 * 16 * parts.root.data.num_images
    assert trusting.pixels - plain.pixels == pixels
    assert trusting.server - plain.server == sum(model.shared.nbytes for model in parts.models.values())
    assert (plain.images, trusting.images) == (2, 8)
    assert trusting.activations == pytest.approx(4 * plain.activations, rel=0.01)
    assert trusting.gradients >= plain.gradients


def test_the_server_s_images_are_on_rank_0():
    _, parts, placement = memory_of(2, aggregation=FLTrust())
    root = parts.root.data.name
    sizes = training_pixels(parts, five())
    of_ranks = [sum(sizes[name] for name in placement.shared_by(ranks)) for ranks in placement.groups]
    assert most_of_a_rank(sizes, parts, placement) == max(of_ranks[0] + sizes[root], of_ranks[1])
    assert most_of_a_rank(dict.fromkeys(parts.names, 1) | {root: 100}, parts, placement) > 100


def test_described_memory_has_the_batches_of_a_distillation():
    plain, distilling = (memory_of(method=FedPav(distillation=d))[0] for d in (None, Distillation(batch_size=24)))
    assert (plain.images, distilling.images) == (8, 24)


class Live(TorchDispatchMode):
    """The most bytes of the tensors that operations make and that live at once."""

    def __init__(self):
        super().__init__()
        self.living, self.most = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in (t for t in tree_leaves(made) if isinstance(t, torch.Tensor)):
            storage = tensor.untyped_storage()
            self.living[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.living = {key: held for key, held in self.living.items() if not held[0].expired()}
        self.most = max(self.most, sum(size for _, size in self.living.values()))
        return made


CLIENTS, LENGTH = 12, 40_000
RULES = [
    Median(), TrimmedMean(0.2), Krum(1, 3), NormClipping(1.0), GeometricMedian(), Bulyan(2), CentredClipping(1.0),
    FLTrust(), Bucketing(Krum(1)), NearestNeighbourMixing(Bulyan(1)), ALIE(attackers=["a"], z=1.0), InnerProduct(),
    MinMax(), MinSum(),
]  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_no_rule_needs_more_than_is_described(rule):
    vectors, start, own = torch.randn(CLIENTS, LENGTH), torch.randn(LENGTH), torch.randn(LENGTH)
    flat = SimpleNamespace(num_shared_parameters=LENGTH - 100)
    server = SimpleNamespace(
        vector=lambda arch: start, trained={"a": own}, models={"a": SimpleNamespace(flat=flat)}, seed=0, round=0
    )
    uploads = Uploads([f"c{i}" for i in range(CLIENTS)], LENGTH, lambda span: vectors[:, span].clone())
    with Live() as live:
        if isinstance(rule, Collusion):
            rule.lie(uploads, start, Numbers(CLIENTS, 2))
        else:
            rule.aggregate(server, "a", uploads, {})
    described = gathered_bytes(CLIENTS, LENGTH)
    assert described / 3 < live.most <= described


def test_described_memory_has_the_uploads_that_a_rule_or_an_attack_gathers():
    plain, *others = (
        memory_of(**options)[0]
        for options in ({}, {"aggregation": Median()}, {"attack": ALIE(attackers=["town0"], z=1.0)})
    )
    ifca, _, _ = memory_of(method=IFCA(clusters=2))
    length = sum(model.shared.numel() for model in memory_of()[1].models.values())
    assert plain.uploads == 0
    assert {memory.uploads for memory in (*others, ifca)} == {gathered_bytes(4, length)}
    for memory in others:
        assert memory.tensors - plain.tensors == max(memory.uploads - plain.activations, 0)


def test_long_vectors_are_gathered_in_chunks_of_one_size():
    sizes = [gathered_bytes(clients, 10**9) - 12 * 10**9 for clients in (10, 100, 1000)]
    assert max(sizes) < 1.11 * min(sizes)
    assert max(sizes) < 12 * 4 * 2**24
