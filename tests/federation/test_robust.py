"""Robust aggregation in a federation: against plain loops, on any number of ranks, and with clients that lie."""

import copy
import math
import operator
import random
import re
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from failing import run_on_ranks
from fedsim.__main__ import main
from fedsim.core.errors import BadUpdateError, ConfigError
from fedsim.core.seeding import numpy_generator
from fedsim.data import SyntheticReID
from fedsim.federation.components.privacy import DifferentialPrivacy
from fedsim.federation.components.robust import (
    Aggregation,
    Bucketing,
    Bulyan,
    CentredClipping,
    GeometricMedian,
    Krum,
    Median,
    NearestNeighbourMixing,
    NormClipping,
    TrimmedMean,
)
from fedsim.methods import IFCA, SKA, FedAtt, FedAvg, FedNova, FedPav, LotteryFL, Scaffold
from fedsim.methods.base import Method
from fedsim.models import BODY, SmallCNN
from fedsim.training.messages import Upload
from fedsim.training.settings import ClientOverride
from fedsim.training.uploads import Uploads
from plain_loops import Federation, play, sgd
from small import fit, make_data, make_model, named, refuse, vector

RULES = {
    "median": Median(), "trimmed": TrimmedMean(0.25), "krum": Krum(bad=0), "multi-krum": Krum(bad=1, keep=2),
    "clipped": NormClipping(0.5), "hardly clipped": NormClipping(1e6), "geometric": GeometricMedian(iterations=7),
    "bulyan": Bulyan(bad=0), "centre": CentredClipping(0.4, iterations=4), "wide centre": CentredClipping(1e6),
    "buckets": Bucketing(Median()), "buckets of 3": Bucketing(CentredClipping(0.3), size=3),
    "neighbours": NearestNeighbourMixing(TrimmedMean(0.2)), "two": NearestNeighbourMixing(Krum(bad=1), bad=2),
    "mixed buckets": Bucketing(NearestNeighbourMixing(GeometricMedian(iterations=3))),
}  # fmt: skip


def mean_of_rows(rows, group):
    """The mean of some lists of numbers."""
    return [sum(rows[i][c] for i in group) / len(group) for c in range(len(rows[0]))]


def groups_of(rule, rows):
    """The numbers of the rows in each mean of a rule that averages uploads first."""
    count = len(rows)
    if isinstance(rule, Bucketing):
        order = numpy_generator(0, 0, "smooth", "buckets").permutation(count).tolist()
        return [order[i : i + rule.size] for i in range(0, count, rule.size)]
    return [sorted(range(count), key=lambda j: math.dist(row, rows[j]))[: count - rule.bad] for row in rows]


def clipped(rule, rows, centre):
    """The centre after some steps, each of which adds the mean of the clipped differences."""
    for _ in range(getattr(rule, "iterations", 1)):
        factors = [min(1.0, rule.bound / (math.dist(row, centre) or 1e-300)) for row in rows]
        centre = [
            v + sum(f * (w - v) for f, w in zip(factors, column, strict=True)) / len(rows)
            for v, *column in zip(centre, *rows, strict=True)
        ]
    return centre


def loop(rule, rows, start):
    """A rule over lists of numbers, coordinate by coordinate; ``start`` is the global model before the round."""
    count = len(rows)
    if isinstance(rule, Bucketing | NearestNeighbourMixing):
        return loop(rule.rule, [mean_of_rows(rows, group) for group in groups_of(rule, rows)], start)
    if isinstance(rule, CentredClipping | NormClipping):
        return clipped(rule, rows, start)
    if isinstance(rule, GeometricMedian):
        point = [sum(column) / count for column in zip(*rows, strict=True)]
        for _ in range(rule.iterations):
            weights = [1 / max(rule.smoothing, math.dist(row, point)) for row in rows]
            columns = zip(*rows, strict=True)
            point = [sum(map(operator.mul, weights, column)) / sum(weights) for column in columns]
        return point
    if isinstance(rule, Bulyan):
        assert rule.bad == 0, "all uploads are chosen, and all of their values"
        return [sum(column) / count for column in zip(*rows, strict=True)]
    if isinstance(rule, Krum):
        scores = []
        for i in range(count):
            distances = [
                sum((a - b) ** 2 for a, b in zip(rows[i], rows[j], strict=True)) for j in range(count) if j != i
            ]
            scores.append(sum(sorted(distances)[: count - rule.bad - 2]))
        best = sorted(range(count), key=lambda i: scores[i])[: rule.keep]
        return [sum(rows[i][c] for i in best) / len(best) for c in range(len(rows[0]))]
    found = []
    for column in zip(*rows, strict=True):
        ordered = sorted(column)
        if isinstance(rule, Median):
            found.append((ordered[(count - 1) // 2] + ordered[count // 2]) / 2)
        else:
            cut = -int(-rule.trim * count // 1)
            found.append(sum(ordered[cut : count - cut]) / (count - 2 * cut))
    return found


@pytest.mark.parametrize("name", RULES)
def test_the_new_global_model_is_that_of_a_loop(name):
    data = make_data(SyntheticReID(clients=5, unseen=0, scale=0.2))
    reference, rule = Federation(data), RULES[name]
    states, before = [], reference.model.state_dict()
    for client in reference.clients:
        model = copy.deepcopy(reference.model)
        sgd(model, client.head, client.batches(0))
        states.append(model.state_dict())
    keys = [key for key in states[0] if "num_batches" not in key]
    rows = [torch.cat([state[key].flatten() for key in keys]).tolist() for state in states]
    start = torch.cat([before[key].flatten() for key in keys]).tolist()
    expected = torch.tensor(loop(rule, rows, start), dtype=torch.float64)
    found = named(
        play(FedPav(), 1, data=make_data(SyntheticReID(clients=5, unseen=0, scale=0.2)), aggregation=rule), "smooth"
    )
    torch.testing.assert_close(torch.cat([found[key].flatten() for key in keys]).double(), expected, rtol=0, atol=2e-6)


def test_one_chunk_and_many_give_the_same_bits(monkeypatch):
    whole = [vector(fit(make_model(FedPav(), aggregation=rule), five(), rounds=1)) for rule in RULES.values()]
    monkeypatch.setattr("fedsim.training.uploads.CHUNK", 4 * 100)
    for rule, expected in zip(RULES.values(), whole, strict=True):
        assert torch.equal(vector(fit(make_model(FedPav(), aggregation=rule), five(), rounds=1)), expected)


def test_chunks_cover_the_vectors_once(monkeypatch):
    monkeypatch.setattr("fedsim.training.uploads.CHUNK", 7)
    vectors = torch.arange(30.0).view(3, 10)
    chunks = list(Uploads("abc", 10, lambda span: vectors[:, span]).chunks())
    assert [span.stop - span.start for span, _ in chunks] == [2, 2, 2, 2, 2]
    assert torch.equal(torch.cat([chunk for _, chunk in chunks], dim=1), vectors)


@pytest.mark.parametrize("num_ranks", [2, 3, 20])
def test_ranks_share_the_chunks(num_ranks, monkeypatch):
    monkeypatch.setattr("fedsim.training.uploads.CHUNK", 3 * 5)
    vectors = torch.randn(3, 200, generator=torch.Generator().manual_seed(0))
    computed = Counter()

    def results(rank, ranks, sums):
        """What a rank computes, before and after the sum over ranks, which ``sums`` are."""
        seen = []

        def sum_(tensor):
            seen.append(tensor.clone())
            return tensor if sums is None else tensor.copy_(sums[len(seen) - 1])

        def rule(chunk):
            computed[ranks] += 1
            return chunk.mean(0)

        uploads = Uploads("abc", 200, lambda span: vectors[:, span], rank=rank, num_ranks=ranks, sum_=sum_)
        return seen, [uploads.combine(rule), uploads.total(lambda chunk: chunk.double().sum(1), [3])]

    _, expected = results(0, 1, None)
    of_ranks = [results(rank, num_ranks, None)[0] for rank in range(num_ranks)]
    sums = [sum(tensors) for tensors in zip(*of_ranks, strict=True)]
    assert computed[num_ranks] == computed[1] == 40, "each chunk once"
    for rank in range(num_ranks):
        assert all(map(torch.equal, results(rank, num_ranks, sums)[1], expected))


@pytest.mark.parametrize("seed", range(8))
def test_clipped_centres_and_mixed_uploads_are_those_of_a_loop(seed):
    draw = random.Random(seed)
    count, size = draw.randint(5, 9), draw.randint(1, 12)
    values = [[draw.gauss(0, 1) for _ in range(size)] for _ in range(count + 1)]
    values[0] = [1e4 * value for value in values[0]]
    *rows, start = torch.tensor(values)
    uploads = Uploads([str(i) for i in range(count)], size, lambda span: torch.stack(rows)[:, span])
    server = SimpleNamespace(vector=lambda _: start, seed=0, round=0)
    for rule in (
        CentredClipping(draw.uniform(0.1, 5), iterations=draw.randint(1, 9)),
        Bucketing(Median(), size=draw.randint(1, 4)),
        NearestNeighbourMixing(Median(), bad=draw.randint(0, 2)),
    ):
        found = rule.aggregate(server, "smooth", uploads, {})
        expected = loop(rule, torch.stack(rows).tolist(), start.tolist())
        torch.testing.assert_close(found.double(), torch.tensor(expected).double(), rtol=1e-5, atol=1e-5)


def test_one_step_of_the_centre_clips_norms():
    found, expected = (
        vector(fit(make_model(FedPav(), aggregation=rule), five()))
        for rule in (CentredClipping(0.3, iterations=1), NormClipping(0.3))
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_buckets_are_drawn_anew_in_each_round():
    drawn = set()

    class Looks(Aggregation):
        def aggregate(self, server, arch, uploads, reports):
            drawn.add(uploads.clients)
            assert [name.count("+") for name in uploads.clients] == [1, 1, 0]
            assert sorted("+".join(uploads.clients).split("+")) == sorted(reports)
            return uploads.combine(lambda chunk: chunk.mean(0))

    fit(make_model(FedPav(), aggregation=Bucketing(Looks())), five(), rounds=4)
    assert len(drawn) == 4


def test_means_of_uploads_are_exchanged_in_chunks_as_short_as_uploads(monkeypatch):
    monkeypatch.setattr("fedsim.training.uploads.CHUNK", 6)
    uploads = Uploads("abc", 10, lambda span: torch.arange(30.0).view(3, 10)[:, span])
    mixed = [*uploads.averaged([[0, 2]]).chunks()]
    assert [span.stop - span.start for span, _ in mixed] == [2] * 5
    assert torch.equal(torch.cat([chunk for _, chunk in mixed], 1), torch.arange(10.0, 20.0)[None])


def test_a_run_with_buckets_goes_on_from_its_checkpoint_with_the_same_bits(tmp_path):
    make = lambda: make_model(FedPav(), aggregation=Bucketing(Krum(bad=0)))  # noqa: E731 - three times
    first = fit(make(), five(), rounds=2)
    first.trainer.save_checkpoint(tmp_path / "two.ckpt")
    resumed = fit(make(), five(), rounds=3, ckpt_path=tmp_path / "two.ckpt")
    assert torch.equal(vector(resumed), vector(fit(make(), five(), rounds=3)))


def five():
    return make_data(SyntheticReID(clients=5, unseen=0, scale=0.2))


def four():
    return make_data(SyntheticReID(clients=4, unseen=0, scale=0.2))


def play_on_two(folder):
    """What each of two ranks does."""
    vectors = {
        name: vector(fit(make_model(FedPav(), aggregation=rule), five(), devices=2)) for name, rule in RULES.items()
    }
    model = fit(make_model(IFCA()), four(), devices=2)
    vectors |= {"IFCA": vector(model), "IFCA 1": model.server.kept["smallcnn"]["cluster1"]}
    torch.save(vectors, folder / f"{model.strategy.global_rank}.pt")


@pytest.mark.dist
@pytest.mark.slow
def test_two_ranks_give_the_bits_of_one(tmp_path):
    run_on_ranks(play_on_two, tmp_path)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    one = {name: vector(fit(make_model(FedPav(), aggregation=rule), five())) for name, rule in RULES.items()}
    model = fit(make_model(IFCA()), four())
    one |= {"IFCA": vector(model), "IFCA 1": model.server.kept["smallcnn"]["cluster1"]}
    for found in ranks:
        assert found.keys() == one.keys()
        for name, expected in one.items():
            assert torch.equal(found[name], expected), name


# -- clients that lie --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Lying(Method):
    """FedPav with some clients that send their update the other way round and a hundred times as long."""

    liars: tuple[str, ...] = field(default=("town0",))
    shared_groups = BODY

    def upload(self, client):
        if client.client_name not in self.liars:
            return super().upload(client)
        received = client.received.vector
        change = client.model.shared - received
        change[client.model.flat.num_shared_parameters :] = 0  # variances stay positive
        return Upload(received - 100 * change)


def shift(rule):
    """How far a round of five clients, one of which lies, ends from the same round without lies."""
    data = lambda: make_data(SyntheticReID(clients=5, unseen=0, scale=0.2))  # noqa: E731 - twice
    honest, lied = (
        vector(fit(make_model(Lying(liars=liars), aggregation=rule), data(), rounds=1)) for liars in ((), ("town0",))
    )
    start = make_model(FedPav())
    start.assemble(data(), 0, 1, torch.device("cpu"))
    return float((lied - honest).norm() / (honest - vector(start)).norm())


def test_a_lie_moves_the_mean_and_no_robust_rule():
    mean = shift(None)
    assert mean > 10  # a fifth of a hundred times an update
    for rule in (
        Median(), TrimmedMean(0.2), Krum(bad=1), Krum(bad=1, keep=3), NormClipping(1.0), GeometricMedian(),
        CentredClipping(1.0), Bucketing(Median()), NearestNeighbourMixing(TrimmedMean(0.2)),
    ):  # fmt: skip
        assert shift(rule) < 0.1 * mean


@dataclass(frozen=True, kw_only=True)
class Huge(Lying):
    """The liars send the same number in all parameters, in the first round."""

    value: float = 3e38

    def upload(self, client):
        upload = super().upload(client)
        if client.client_name not in self.liars or client.round:
            return upload
        vector = upload.vector.clone()
        vector[: client.model.flat.num_shared_parameters] = self.value
        return Upload(vector)


def seven(method, rounds=2, **options):
    return fit(make_model(method, **options), make_data(SyntheticReID(clients=7, unseen=0, scale=0.2)), rounds=rounds)


@pytest.mark.parametrize("rule", [Median(), TrimmedMean(0.2), Krum(), NormClipping(1.0), GeometricMedian(), Bulyan()])
def test_a_robust_rule_meets_a_lie_beyond_exact_sums(rule):
    value = 1e9 if isinstance(rule, GeometricMedian) else 3e38  # whose distances are float64: see its docstring
    lies = (Huge(liars=liars, value=value) for liars in ((), ("town0",)))
    honest, lied = (vector(seven(method, aggregation=rule)) for method in lies)
    assert float(lied.abs().max()) < 2 * float(honest.abs().max())


def test_a_mean_does_not_meet_it():
    with pytest.raises(BadUpdateError, match=r"client town0, round 1: .* holds values beyond 4096"):
        seven(Huge(liars=("town0",)))


def test_an_honest_client_is_not_blamed_for_a_poisoned_global_model():
    with pytest.raises(BadUpdateError) as error:
        seven(Huge(liars=("town0",), value=4000.0))
    [largest] = re.findall(r"round 2: it received a global model with values up to (\S+), ", str(error.value))
    assert float(largest) > 400  # a seventh of the lie


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "says"),
    [
        (FedPav(weighting="cdw"), "weighs clients"),
        (FedAtt(), "weighs clients"),
        (FedNova(), "weighs clients"),
        (LotteryFL(), "its own aggregation"),
        (Scaffold(), "also uploads tensors"),
        (SKA(dual=False, unseen="avg", avg_every=3), "also uploads tensors"),  # in the third round
        (IFCA(), "weighs clients|its own aggregation"),
    ],
)
def test_methods_that_need_more_than_a_mean_are_refused(method, says):
    with pytest.raises(ConfigError, match=rf"model\.aggregation: .*({says})"):
        make_model(method, aggregation=Median()).assemble(make_data(), 0, 1, torch.device("cpu"))


def test_differential_privacy_is_refused():
    privacy = DifferentialPrivacy(clip=1.0, noise_multiplier=1.0)
    model = make_model(FedPav(weighting="uniform"), bn_stats="local", privacy=privacy, aggregation=Median())
    with pytest.raises(ConfigError, match=r"model\.aggregation: differential privacy"):
        model.assemble(make_data(), 0, 1, torch.device("cpu"))


@pytest.mark.parametrize("bn_stats", ["pooled", "first"])
@pytest.mark.parametrize("options", [{"aggregation": Median()}, {}])
def test_statistics_that_need_sums_are_refused(bn_stats, options):
    method = FedPav() if options else IFCA()
    with pytest.raises(ConfigError, match=rf"model\.bn_stats: {bn_stats} .* set it to mean"):
        make_model(method, bn_stats=bn_stats, **options).assemble(make_data(), 0, 1, torch.device("cpu"))


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: TrimmedMean(0.5), "trim"),
        (lambda: TrimmedMean(-0.1), "trim"),
        (lambda: Krum(bad=-1), "bad"),
        (lambda: Krum(keep=0), "keep"),
        (lambda: Bulyan(bad=-1), "bad"),
        (lambda: NormClipping(0), "bound"),
        (lambda: NormClipping(-1.0), "bound"),
        (lambda: NormClipping(math.nan), "bound"),
        (lambda: NormClipping(math.inf), "bound"),
        (lambda: GeometricMedian(smoothing=0), "smoothing"),
        (lambda: GeometricMedian(iterations=0), "iterations"),
        (lambda: CentredClipping(0), "bound"),
        (lambda: CentredClipping(math.inf), "bound"),
        (lambda: CentredClipping(1.0, iterations=0), "iterations"),
        (lambda: Bucketing(Median(), size=0), "size"),
        (lambda: NearestNeighbourMixing(Median(), bad=-1), "bad"),
    ],
)
def test_wrong_numbers(make, field):
    with pytest.raises(ConfigError, match=rf"model\.aggregation\.{field}"):
        make()


@pytest.mark.parametrize(
    ("rule", "field"),
    [
        (TrimmedMean(0.4), "trim"),
        (Krum(bad=1), "bad"),
        (Bulyan(bad=0), "bad"),
        (Bucketing(Krum(bad=0)), "bad"),
        (NearestNeighbourMixing(Median(), bad=1), "bad"),
        (NearestNeighbourMixing(Krum(bad=0), bad=0), "bad"),
    ],
)
def test_too_few_clients_are_refused(rule, field):
    with pytest.raises(ConfigError, match=rf"model\.aggregation\.{field}: .* clients of smallcnn"):
        fit(make_model(FedPav(), aggregation=rule), make_data(SyntheticReID(clients=2, unseen=0, scale=0.2)), rounds=1)


@pytest.mark.parametrize("clients", range(1, 30))
def test_krum_takes_as_many_liars_as_its_proof(clients):
    for bad in range(clients + 1):
        rule = Krum(bad=bad, keep=clients - bad or 1)
        if 2 * bad + 2 < clients:  # Blanchard et al., Proposition 4.2
            rule.check_number(clients, "a")
            with pytest.raises(ConfigError, match=r"model\.aggregation\.keep: "):
                Krum(bad=bad, keep=clients - bad + 1).check_number(clients, "a")
        else:
            with pytest.raises(ConfigError, match=r"model\.aggregation\.bad: "):
                rule.check_number(clients, "a")


def test_architectures_are_aggregated_apart():
    own = {f"town{i}": ClientOverride(backbone=SmallCNN(width=6)) for i in (1, 3)}
    method = FedAvg(share_head=False)
    model = fit(make_model(method, aggregation=Median(), clients=own), four(), rounds=1)
    mean = fit(make_model(FedAvg(share_head=False, weighting="uniform"), clients=own), four(), rounds=1)
    for arch in model.parts.models:  # the median of two is their mean
        torch.testing.assert_close(vector(model, arch), vector(mean, arch), rtol=0, atol=1e-6)


def test_rules_before_rules_are_named_on_the_command_line(capsys, tiny, tmp_path):
    words = ["--model.aggregation=Bucketing", "--model.aggregation.rule=NearestNeighbourMixing"]
    inner = ["--model.aggregation.rule.init_args.bad=0", "--model.aggregation.rule.init_args.rule=Median"]
    assert main(["describe", "--config", str(tiny), *words, *inner]) == 0
    line = refuse(capsys, "fit", "--config", tiny, *words)
    assert "model.aggregation.rule" in line
    line = refuse(capsys, "fit", "--config", tiny, words[0])
    assert "model.aggregation.rule" in line


def test_a_wrong_name_lists_the_rules(capsys, tiny):
    line = refuse(capsys, "fit", "--config", tiny, "--model.aggregation", "Krumm")
    assert "model.aggregation: there is no class Krumm; did you mean Krum?" in line
