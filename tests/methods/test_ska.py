"""SKA against Algorithm 1 in loops; what LSN, Dual and the variants of Table 6 do and do not change."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from failing import run_on_ranks
from fedsim.core.errors import ConfigError
from fedsim.data import Augmentation, SyntheticReID
from fedsim.evaluation.settings import Evaluation
from fedsim.federation.components.selection import RandomFraction
from fedsim.methods import SKA, FedAvg, FedBN
from fedsim.models import Neck, SmallCNN
from fedsim.models.groups import BACKBONE, Group
from fedsim.training.settings import LocalTraining, RateSchedule
from plain_loops import Federation, mean_of, play, sgd
from small import Some, fit, make_data, make_model, receive, vector

BASELINE = FedAvg(share_head=False, share_neck=False, weighting="uniform")
LSN = SKA(dual=False, unseen="concat")
POOL = Evaluation(layer="pool", distance="euclidean")


def is_norm(name):
    return name.startswith("backbone.norm.")


def load(client, method, server):
    """Put a client's personalised model into the rank's flat model; return that by name, with the head."""
    client.load()
    receive(client, method, server)
    method.personalise(client)
    model = client.model
    found = {e.name: model.flat.buffer[e.span].view(e.shape).clone() for e in model.flat.entries}
    found |= {"head.weight": model.head.weight.detach().clone(), "head.bias": model.head.bias.detach().clone()}
    client.unload()
    return found


def personalised(model):
    return {name: load(client, model.settings.method, model.server) for name, client in model.parts.clients.items()}


def of_groups(model, *groups, buffer=None, arch="smallcnn"):
    """Tensors of some groups, by name: of the server, or of a buffer."""
    flat_model, source = model.parts.models[arch], vector(model, arch) if buffer is None else buffer
    return {e.name: source[e.span] for e in flat_model.flat.entries if flat_model.groups[e.name] in groups}


def assert_equal(a, b):
    assert a.keys() == b.keys()
    assert a
    for name in a:
        assert torch.equal(a[name], b[name]), name


def differ(a, b):
    assert a.keys() == b.keys()
    return any(not torch.equal(a[name], b[name]) for name in a)


# -- Algorithm 1 -------------------------------------------------------------------------------------------------------


class Loops:
    """Lines 1-31, with a dictionary for each model."""

    def __init__(self, momentum):
        self.federation, self.momentum = Federation(), momentum
        start = self.federation.model
        self.w = copy.deepcopy(start.state_dict())
        self.ls = {c.name: (copy.deepcopy(start), copy.deepcopy(c.head)) for c in self.federation.clients}  # line 1
        self.lg = copy.deepcopy(self.ls)

    def select_update(self):
        for k in self.ls:  # lines 26-30
            (ls, _), (lg, _) = self.ls[k], self.lg[k]
            for p, value in self.w.items():
                if p.startswith("backbone."):
                    lg.state_dict()[p].copy_(value)
                    if not is_norm(p):
                        ls.state_dict()[p].copy_(value)

    def round(self, t):
        aggregated = []
        for client in self.federation.clients:  # lines 3-5
            for model in (self.ls, self.lg):
                sgd(*model[client.name], client.batches(t), momentum=self.momentum)
            ls, lg = self.ls[client.name][0].state_dict(), self.lg[client.name][0].state_dict()
            aggregated.append({p: (lg if is_norm(p) else ls)[p].clone() for p in ls})
        self.w = mean_of(aggregated, [1 / len(aggregated)] * len(aggregated))  # line 6
        self.select_update()  # line 7


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_algorithm_1(momentum):
    loops = Loops(momentum)
    for t in range(3):
        loops.round(t)
    found = play(SKA(), 3, momentum=momentum)
    flat_model = found.parts.models["smooth"]
    shared = flat_model.flat.shared_entries
    assert {e.name for e in shared} == {n for n in loops.w if n.startswith("backbone.") and "num_batches" not in n}
    close = partial(torch.testing.assert_close, rtol=0, atol=2e-6)
    for entry in shared:
        close(vector(found, "smooth")[entry.span].view(entry.shape).double(), loops.w[entry.name])
    for name, client in found.parts.clients.items():
        model, head = loops.ls[name]
        own = load(client, found.settings.method, found.server)
        expected = model.state_dict() | {f"head.{n}": p for n, p in head.state_dict().items()}
        for key, value in own.items():
            close(value.double(), expected[key])
        client.load()  # lg's private part
        lg = flat_model.replica("generalised")
        lg.private.copy_(client.kept["generalised"])
        model, head = loops.lg[name]
        close(lg.head.weight.double(), head.weight)
        for entry in lg.flat.entries:
            if not entry.shared:
                close(lg.flat.buffer[entry.span].view(entry.shape).double(), model.state_dict()[entry.name])
        client.unload()


@pytest.mark.parametrize("bn_stats", ["mean", "local"])
def test_the_models_begin_alike_and_step_alike(bn_stats):
    """Without dropout all three are one model in the first round, whatever the steps look like."""
    how = LocalTraining(
        batch_size=8, accumulate=2, grad_clip=0.5, head_lr=0.2, schedule=RateSchedule(warmup=3, warmup_start=0.3),
        optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4),
    )  # fmt: skip
    rounds = [fit(make_model(m, client=how, bn_stats=bn_stats), rounds=1) for m in (SKA(), BASELINE)]
    assert torch.equal(vector(rounds[0]), vector(rounds[1]))
    for name, client in rounds[0].parts.clients.items():
        state = client.private_state()
        assert torch.equal(state["kept.generalised"], state["state"])
        assert torch.equal(state["state"], rounds[1].parts.clients[name].private_state()["state"])


def test_one_client_is_the_server():
    """Its norms are lg's, its convolutions ls's."""
    seen = []

    class Watched(SKA):
        def upload(self, client):
            lg = client.model.replica("generalised")
            seen.append((client.model.flat.buffer.clone(), lg.flat.buffer.clone()))
            return super().upload(client)

    model = fit(make_model(Watched(), neck=Neck(dim=8)), make_data(Some("town0", "new0")), rounds=2)
    ls, lg = seen[-1]
    for groups, buffer in (((Group.NORM, Group.STAT), lg), ((Group.CONV,), ls)):
        expected = of_groups(model, *groups, buffer=buffer)
        assert expected
        for name, tensor in of_groups(model, *groups).items():  # exact sums have a grid of 2**-40
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=2**-39)
    for group in (Group.CONV, Group.NORM, Group.STAT):
        assert differ(of_groups(model, group, buffer=ls), of_groups(model, group, buffer=lg))


# -- LSN and Dual ------------------------------------------------------------------------------------------------------


class Noisy(nn.Module):
    """A backbone that draws from torch's global stream."""

    out_channels = 6

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.noise = nn.Conv2d(3, 6, 3, stride=2), nn.BatchNorm2d(6), nn.Dropout2d(0.2)
        self.last = nn.Conv2d(6, 6, 3)

    def forward(self, images):
        return torch.relu(self.last(self.noise(torch.relu(self.norm(self.conv(images))))))


def play_specific(method, bn_stats="mean"):
    torch.manual_seed(0)
    model = make_model(
        method, backbone=Noisy(), neck=Neck(dim=8, dropout=0.5), selection=RandomFraction(0.7), bn_stats=bn_stats,
        client=LocalTraining(
            batch_size=8, accumulate=2, grad_clip=1.0, optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9)
        ),
    )  # fmt: skip
    return fit(model, make_data(SyntheticReID(clients=4, scale=0.2), augmentation=Augmentation(pad=2)), rounds=2)


@pytest.mark.parametrize("bn_stats", ["mean", "local"])
@pytest.mark.parametrize("personal", ["after", "before_aggregation"])
def test_a_generalised_model_changes_no_specific_one(personal, bn_stats):
    """The same personalised models with lg and without, also of clients that never took part: Table 4."""
    alone = play_specific(SKA(dual=False, unseen="concat", personal=personal), bn_stats)
    dual = play_specific(SKA(personal=personal), bn_stats)
    a, b = personalised(alone), personalised(dual)
    assert a.keys() == b.keys()
    for name in a:
        assert_equal(a[name], b[name])
    assert_equal(of_groups(alone, Group.CONV, arch="noisy"), of_groups(dual, Group.CONV, arch="noisy"))


def test_the_server_does_not_get_the_specific_norms():
    model = play_specific(SKA())
    assert list(model.reports) != list(model.parts.clients)
    mine = next(iter(personalised(model).values()))
    for name, tensor in of_groups(model, Group.NORM, Group.STAT, arch="noisy").items():
        assert not torch.equal(tensor.view_as(mine[name]), mine[name])


def test_dropout_of_the_two_models_is_not_the_same():
    model = play_specific(SKA())
    for name in list(model.reports):
        state = model.parts.clients[name].private_state()
        assert not torch.equal(state["state"], state["kept.generalised"])


@pytest.mark.parametrize("personal", ["after", "before_aggregation"])
def test_personal_models_have_the_servers_convolutions_or_their_own(personal):
    model = fit(make_model(SKA(personal=personal)), rounds=1, limit_val_batches=1, check_val_every_n_epoch=1)
    for name, client in model.parts.clients.items():
        own = load(client, model.settings.method, model.server)
        server = {n: t.view_as(own[n]) for n, t in of_groups(model, Group.CONV).items()}
        is_servers = not differ(server, {n: own[n] for n in server})
        assert is_servers == (personal == "after"), name
        trained = of_groups(
            model, Group.CONV, Group.NORM, Group.STAT, buffer=model.parts.rank_share.snapshots.of(client.client_name)
        )
        same = not differ({n: t.view_as(own[n]) for n, t in trained.items()}, {n: own[n] for n in trained})
        assert same == (personal == "before_aggregation"), name


def test_lsn_is_fedbn():
    data = partial(make_data, augmentation=Augmentation(pad=2))
    lsn, fedbn = (fit(make_model(m, neck=Neck(dim=8)), data()) for m in (LSN, FedBN()))
    assert torch.equal(vector(lsn), vector(fedbn))
    for name, client in lsn.parts.clients.items():
        assert_equal(client.private_state(), fedbn.parts.clients[name].private_state())


# -- groups and traffic ------------------------------------------------------------------------------------------------


def test_shared_groups():
    """SE's and CBAM's modules are averaged unless told otherwise: the authors' code goes by "bn" in names."""
    assert SKA().shared_groups == SKA(attn_local=True).shared_groups == BACKBONE
    assert SKA(dual=False, unseen="avg").shared_groups == {Group.CONV, Group.ATTN}
    assert SKA(dual=False, unseen="avg", attn_local=True).shared_groups == {Group.CONV}


@pytest.mark.parametrize("attn_local", [True, False])
@pytest.mark.parametrize("norm", ["attentive", "se", "cbam"])
def test_attention_is_the_generalised_models_if_it_is_local(norm, attn_local):
    def run(method):
        torch.manual_seed(0)
        return fit(make_model(method, backbone=SmallCNN(width=8, norm=norm), neck=Neck(dim=8, dropout=0.5)))

    alone = run(SKA(dual=False, unseen="concat", attn_local=attn_local))
    dual = run(SKA(attn_local=attn_local))
    a, b = personalised(alone), personalised(dual)
    for name in a:
        assert_equal(a[name], b[name])
    attention = of_groups(dual, Group.NORM if norm == "attentive" else Group.ATTN)
    own = b["town0"]
    is_own = differ({n: t.view_as(own[n]) for n, t in attention.items()}, {n: own[n] for n in attention})
    assert is_own == (attn_local or norm == "attentive")
    if not is_own:
        assert_equal(attention, of_groups(alone, Group.ATTN))


def bytes_of(method, rounds=2):
    model = make_model(method, neck=Neck(dim=8))
    model.assemble(make_data(), 0, 1, torch.device("cpu"))
    return [model.parts.ledger.expected(t, ["town0"])["town0"] for t in range(rounds)], model


def test_traffic():
    """Dual costs none; a mean of norms is paid for in the rounds in which it is made, upwards only."""
    baseline, model = bytes_of(BASELINE)
    assert bytes_of(SKA())[0] == baseline
    assert baseline[0].extra == 0
    norms = 4 * sum(t.numel() for t in of_groups(model, Group.NORM, Group.STAT).values())
    lsn, _ = bytes_of(LSN)
    assert lsn == bytes_of(FedBN())[0]
    assert {(t.down, t.up, t.extra) for t in lsn} == {(baseline[0].down - norms, baseline[0].up - norms, 0)}
    averaged, _ = bytes_of(SKA(dual=False, unseen="avg", avg_every=2))
    assert averaged == [lsn[0], lsn[0]._replace(extra_up=norms)]


# -- unseen domains: Table 6 -------------------------------------------------------------------------------------------


def scored(method, rounds=2, devices=1):
    """A run whose last round is scored."""
    return fit(make_model(method, evaluation=POOL), rounds=rounds, devices=devices, limit_val_batches=1)


def generalised(model):
    flat_model = model.parts.models["smallcnn"]
    flat_model.load_global(vector(model), model.settings.method.server_tensors(model.server, flat_model.arch))
    return of_groups(model, *BACKBONE, buffer=flat_model.flat.buffer)


def unseen_kinds(model):
    return {name.split("/")[1] for name in model.scores if name.split("/")[2:3] == ["new0"]}


def test_avg_is_the_mean_of_the_clients_norms():
    model = scored(SKA(dual=False, unseen="avg", avg_every=2))
    own = list(personalised(model).values())
    for name, tensor in generalised(model).items():
        expected = torch.stack([p[name].double() for p in own]).mean(0).flatten()
        torch.testing.assert_close(tensor.double(), expected, rtol=1e-7, atol=1e-7)
    assert unseen_kinds(model) == {"global"}
    assert model.evaluator.primary == "personalised"
    assert not [name for name in model.scores if name.startswith("test/global/town")]
    without = scored(LSN)
    assert torch.equal(vector(model), vector(without))
    assert_equal(personalised(model)["town0"], personalised(without)["town0"])


def test_before_the_first_mean_the_clients_own_models_are_scored():
    assert unseen_kinds(scored(SKA(dual=False, unseen="avg", avg_every=2), rounds=1)) == {"personalised"}


def test_imagenet_has_the_initial_norms():
    model = scored(SKA(dual=False, unseen="imagenet"))
    start = make_model(SKA(dual=False, unseen="imagenet"))
    start.assemble(make_data(), 0, 1, torch.device("cpu"))
    buffer = start.parts.models["smallcnn"].flat.buffer
    found = generalised(model)
    initial = of_groups(start, Group.NORM, Group.STAT, buffer=buffer)
    assert_equal({name: found[name] for name in initial}, initial)
    convolutions = of_groups(model, Group.CONV)
    assert_equal({name: found[name] for name in convolutions}, convolutions)
    assert unseen_kinds(model) == {"global"}


def test_concat_ranks_by_all_clients_models():
    model = scored(LSN)
    together = fit(
        make_model(FedBN(), evaluation=Evaluation(layer="pool", distance="euclidean", ensemble=True)),
        rounds=2, limit_val_batches=1,
    )  # fmt: skip
    assert unseen_kinds(model) == {"ensemble"}
    assert unseen_kinds(together) == {"ensemble", "personalised"}
    for name, score in model.scores.items():
        assert score == together.scores[name], name


def test_scores_on_unseen_domains_are_of_the_model_that_is_generalised():
    """The same scores as those of a server that has all of it."""
    for unseen in ("avg", "imagenet"):
        model = scored(SKA(dual=False, unseen=unseen))
        baseline = scored(BASELINE, rounds=1)
        for name, tensor in generalised(model).items():
            of_groups(baseline, *BACKBONE)[name].copy_(tensor)
        scores = baseline.evaluator.score("test")
        names = [name for name in scores if name.startswith("test/global/new0")]
        assert names
        assert {name: scores[name] for name in names} == {name: model.scores[name] for name in names}


def test_dual_gives_the_server_a_model():
    model = scored(SKA())
    assert unseen_kinds(model) == {"global"}
    assert model.evaluator.plan.has_global
    assert model.evaluator.primary == "personalised"


def write_scores(folder):
    """What each of two ranks does."""
    for method in VARIANTS:
        torch.save(scored(method, devices=2).scores, folder / f"{method.unseen}.pt")


VARIANTS = [SKA(), *(SKA(dual=False, unseen=unseen) for unseen in ("avg", "concat", "imagenet"))]


@pytest.mark.dist
def test_unseen_domains_are_scored_alike_on_two_ranks(tmp_path):
    run_on_ranks(write_scores, tmp_path)
    for method in VARIANTS:
        assert torch.load(tmp_path / f"{method.unseen}.pt", weights_only=True) == scored(method).scores


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("unseen", {"dual": False}),
        ("unseen", {"unseen": "avg"}),
        ("avg_every", {"dual": False, "unseen": "avg", "avg_every": 0}),
    ],
)
def test_wrong_settings_are_refused(field, options):
    with pytest.raises(ConfigError, match=rf"model\.method\.{field}"):
        SKA(**options)


def test_the_log_counts_the_specific_model():
    model = fit(make_model(SKA()), rounds=1)
    assert model.reports["town0"].images <= model.parts.clients["town0"].data.num_images


def test_batches_are_decoded_and_augmented_once(monkeypatch):
    calls = []
    as_before = Augmentation.__call__

    def count(self, *args, **options):
        calls.append(1)
        return as_before(self, *args, **options)

    monkeypatch.setattr(Augmentation, "__call__", count)
    numbers = []
    for method in (BASELINE, SKA()):
        calls.clear()
        fit(make_model(method), make_data(augmentation=Augmentation(pad=2)), rounds=1)
        numbers.append(len(calls))
    assert numbers[0] == numbers[1] > 0


@pytest.mark.parametrize("method", [SKA(), SKA(dual=False, unseen="avg", avg_every=2)])
def test_the_server_recalibrates_also_in_rounds_in_which_the_method_has_no_work(method):
    model = fit(make_model(method, bn_stats="recalibrate"), make_data(public="new0"), rounds=1)
    assert vector(model).isfinite().all()
    assert "norms" not in model.server.kept["smallcnn"]
