"""FedKLPR (paper 004) against loops over images, elements and clients in float64; its switches; what it reduces to."""

import copy
import math
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from fedsim.core.errors import ConfigError
from fedsim.functional.losses import feature_divergence, mean_cosine_distance
from fedsim.functional.normalise import normalise_images
from fedsim.functional.pruning import pruned_fraction, zero_pruned_
from fedsim.methods import FedAvg, FedCAPR, FedKLPR, FedPav, fedklpr
from fedsim.methods.pruned import own_accuracy, prunable_layers, upload_masked
from fedsim.methods.reference import remember_received
from fedsim.models import Neck
from fedsim.training.labels import Clustering
from fedsim.training.messages import Report
from fedsim.training.settings import LocalTraining
from plain_loops import Federation, Layers, assert_close, play, sgd, slow_retrieval
from plain_pruning import accuracy, apply, flags_of, fraction, full, halve, masked_mean
from small import fit, make_data, make_model, receive, signals_of, vector

SIZE = (16, 8)
CLUSTERING = Clustering(k1=6, k2=2, min_samples=2, replicate=2)
SGD = partial(torch.optim.SGD, lr=0.05)


def make(method, epochs=1, clustering=None, optimizer=SGD):
    training = LocalTraining(batch_size=8, local_epochs=epochs, cluster=clustering, optimizer=optimizer)
    return make_model(method, backbone=Layers(), neck=Neck(kind="bnneck", dropout=0.0), client=training)


def begin(method, round_=0, **options):
    """A client that has downloaded the model."""
    model, data = make(method, **options), make_data(size=SIZE)
    model.assemble(data, 0, 1, torch.device("cpu"))
    client = model.parts.clients["town0"]
    client.images.open(data.open_train)
    model.server.round = round_
    client.begin_round(round_, 1.0, "32-true", lambda report: None)
    receive(client, method, model.server)
    method.download(client)
    return client


def shared(client):
    """Its parameters, as far as its mask goes."""
    return client.model.shared[: client.model.flat.num_shared_parameters]


def divergence(p, q, temperature=1.0):
    """D_KL of softmaxes, mean over images; lists of lists."""
    total = 0.0
    for a, b in zip(p.double().tolist(), q.double().tolist(), strict=True):
        x, y = ([math.exp(value / temperature) for value in row] for row in (a, b))
        x, y = [v / sum(x) for v in x], [v / sum(y) for v in y]
        total += sum(v * math.log(v / w) for v, w in zip(x, y, strict=True))
    return total / len(p)


# -- the divergence ----------------------------------------------------------------------------------------------------


def test_eq8_is_the_mean_divergence_of_softmaxes():
    p, q = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for temperature in (1.0, 0.3):
        assert float(feature_divergence(p, q, temperature)) == pytest.approx(divergence(p, q, temperature))
    assert divergence(p, q) != pytest.approx(divergence(q, p), rel=1e-2)


@pytest.mark.parametrize("drift", [0.1, 0.3, 0.6])
def test_on_features_of_unit_length_the_divergence_is_dead(drift):
    generator = torch.Generator().manual_seed(0)
    received = torch.randn(32, 2048, generator=generator, dtype=torch.float64)
    local = received + drift * torch.randn(32, 2048, generator=generator, dtype=torch.float64)
    distance = float(mean_cosine_distance(received, local))
    assert 0.95 < float(feature_divergence(received, local)) / distance < 1.3
    unit = [F.normalize(x) for x in (received, local)]
    assert 2048 * float(feature_divergence(*unit)) / distance == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize(
    "options",
    [{}, {"reverse": True}, {"temperature": 0.5}, {"regulariser": "cosine"}, {"lam": 0.0}],
    ids=str,
)
def test_eq9_adds_the_divergence_from_the_received_model(options):
    method = FedKLPR(**{"lam": 2.0} | options)
    added = []
    for round_ in (0, 1):
        client = begin(method, round_)
        received = copy.deepcopy(client.model.network).eval()
        remember_received(client)
        for batch in client.batches(0):
            trained = copy.deepcopy(client.model.network)
            loss = method.loss(client, batch)
            with torch.no_grad():
                reference, local = received(batch.images).neck, trained(batch.images).neck
                plain = F.cross_entropy(client.model.head(local), batch.labels)
            if options.get("regulariser") == "cosine":
                term = sum(1 - float(F.cosine_similarity(*pair, dim=0)) for pair in zip(reference, local, strict=True))
                term = term / len(local)
            else:
                pair = (local, reference) if "reverse" in options else (reference, local)
                term = divergence(*pair, options.get("temperature", 1.0))
            expected = float(plain) + (method.lam * term if round_ else 0.0)  # from the second round
            assert float(loss.detach()) == pytest.approx(expected, abs=2e-5)
            added.append(method.lam * term)
            client.step(loss)
    assert max(added) > 1e-3 or "lam" in options


# -- what a client measures --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighting", ["klpwa", "klaw", "cdw"])
def test_eq10_looks_at_the_first_images_before_pruning(weighting):
    found = {}
    for prune in (False, True):
        weighting_ = weighting if prune else weighting.replace("klpwa", "klaw")
        method = FedKLPR(prune=prune, weighting=weighting_, crr=False, prune_from=1)
        client = begin(method, epochs=2)
        received = copy.deepcopy(client.model.network).eval()
        method.train(client)
        if not prune:
            trained = copy.deepcopy(client.model.network).eval()
        found[prune] = signals_of(method.upload(client))
        assert dict.fromkeys(found[prune], "client") == method.measures
        assert client.kept.keys() == ({"mask"} if prune else set())  # the change is of one round
    images = normalise_images(client.data.train.images.decode(SIZE))[:32]
    assert len(client.data.train) > 32
    with torch.no_grad():
        before, after = received(images).neck, trained(images).neck
    expected = float(mean_cosine_distance(before, after)) if weighting == "cdw" else divergence(before, after)
    name = "cdw" if weighting == "cdw" else "kl"
    assert expected > 1e-3
    assert found[False][name] == pytest.approx(expected, abs=1e-6)
    assert found[True].pop(name) == found[False][name]
    assert found[True].popitem()[1] == pytest.approx(0.09, abs=0.01)  # whole elements of few


def weights(kl, pruned, **options):
    reports = {k: Report(10, {"kl": kl[k], "cdw": kl[k], "pruned": pruned[k]}) for k in kl}
    return FedKLPR(**options).weights(reports).clients


KL, PRUNED = {"a": 0.1, "b": 0.3, "c": 0.0}, {"a": 0.6, "b": 0.0, "c": 0.3}
NOBODY, THIRDS = dict.fromkeys(KL, 0.0), dict.fromkeys(KL, 1 / 3)
KLAW, PRAW = {"a": 0.25, "b": 0.75, "c": 0.0}, {"a": 0.36 / 0.45, "b": 0.0, "c": 0.09 / 0.45}


@pytest.mark.parametrize("weighting", ["klaw", "cdw"])
def test_eq11_weights_are_shares_of_the_change(weighting):
    assert weights(KL, PRUNED, weighting=weighting) == pytest.approx(KLAW)
    assert weights(NOBODY, PRUNED, weighting=weighting) == pytest.approx(THIRDS)


def test_eq12_weights_are_shares_of_squares():
    assert weights(KL, PRUNED, weighting="praw") == pytest.approx(PRAW)
    assert weights(KL, NOBODY, weighting="praw") == pytest.approx(THIRDS)


def test_eq13_mixes_both_once_somebody_has_pruned():
    for alpha in (0.0, 0.3, 1.0):
        expected = {k: alpha * KLAW[k] + (1 - alpha) * PRAW[k] for k in KL}
        found = weights(KL, PRUNED, alpha=alpha)
        assert found == pytest.approx(expected)
        assert sum(found.values()) == pytest.approx(1)
        assert weights(KL, NOBODY, alpha=alpha) == pytest.approx(KLAW)
    assert weights(NOBODY, NOBODY) == pytest.approx(THIRDS)
    assert weights(KL, PRUNED, weighting="size") == pytest.approx(THIRDS)  # images are as many


# -- pruning and recovery ----------------------------------------------------------------------------------------------


def scripted(monkeypatch, values):
    """Let the accuracies be these, one after another."""
    left = list(values)
    monkeypatch.setattr(fedklpr, "own_accuracy", lambda client, num_images, measure: left.pop(0))
    return left


def pruned_of(client):
    return pruned_fraction(client.kept["mask"], prunable_layers(client.model))


PLATEAU = [0.62, 0.61]


@pytest.mark.parametrize(
    ("before", "accuracies", "share"),
    [
        ([0.30, 0.40], [0.60], 0.0),  # stage 1: still rising
        ([0.30, 0.30], [0.30], 0.0),  # stage 1: too low
        ([0.61], [0.60], 0.0),  # stage 1: too early
        (PLATEAU, [0.60, 0.595], 0.4),  # the whole step passes
        (PLATEAU, [0.60, 0.58, 0.58, 0.58], 0.0),  # stage 2: a half and a quarter are reverted, too
        (PLATEAU, [0.60, 0.58, 0.592, 0.58], 0.2),  # a half passes, three quarters do not
        (PLATEAU, [0.60, 0.58, 0.592, 0.595], 0.3),
        (PLATEAU, [0.60, 0.58, 0.58, 0.592], 0.1),
        (PLATEAU, [0.60, 0.70], 0.4),
    ],
)
def test_the_two_stages_decide_and_leave_no_trace(before, accuracies, share, monkeypatch):
    method = FedKLPR(step=0.4, trials=4, floor=0.0, reg_from=9, prune_from=1)
    client = begin(method)
    client.keep("accuracies", torch.tensor(before))
    left = scripted(monkeypatch, accuracies)
    method.train(client)
    signals = signals_of(method.upload(client))
    assert left == []  # as many looks at the model as expected
    assert client.kept["accuracies"].tolist() == pytest.approx([*before, accuracies[0]])
    mask = client.kept["mask"]
    assert pruned_of(client) == pytest.approx(share, abs=0.01)
    stage = 1 if len(accuracies) == 1 else 3 if share else 2
    shown = {"crr_accuracy": accuracies[0], "crr_stage": stage, "crr_trials": len(accuracies) - 1}
    assert {name: signals[name] for name in shown} == pytest.approx(shown)
    unpruned = FedKLPR(prune=False, weighting="klaw", reg_from=9)
    plain = begin(unpruned)
    unpruned.train(plain)
    expected = torch.where(mask, shared(plain), torch.zeros(())) if share else shared(plain)
    assert torch.equal(shared(client).view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize(
    ("crr", "trials", "cap"), [(True, 3, True), (True, 1, True), (False, 3, True), (True, 3, False)]
)
def test_a_round_prunes_a_step_and_the_target_is_held(crr, trials, cap, monkeypatch):
    monkeypatch.setattr(fedklpr, "own_accuracy", lambda client, num_images, measure: 0.9)
    method = FedKLPR(step=0.3, trials=trials, target=0.5, floor=0.0, crr=crr, cap=cap, prune_from=1)
    client = begin(method)
    found, masks = [], []
    for _ in range(5):
        method.train(client)
        method.upload(client)
        found.append(pruned_of(client))
        masks.append(client.kept["mask"])
        assert (shared(client)[~masks[-1]] == 0).all()
    expected = [0.3, 0.5, 0.5, 0.5, 0.5] if cap else [0.3, 0.6, 0.6, 0.6, 0.6]  # Table VII: 8 steps of 9 are 72 %
    expected = [0.0, 0.0, *expected[:3]] if crr else expected  # three accuracies first
    assert found == pytest.approx(expected, abs=0.01)
    assert max(found) <= (0.5 if cap else 0.6)
    for earlier, later in pairwise(masks):
        assert not (later & ~earlier).any()  # nothing comes back
    assert torch.equal(masks[-1], masks[-2])


def test_each_layer_keeps_its_floor():
    method = FedKLPR(crr=False, step=0.9, target=0.9, floor=0.25, prune_from=1)
    client = begin(method)
    layers = prunable_layers(client.model)
    shared(client)[layers[0]] *= 1e-3  # else all of it would go
    method.train(client)
    method.upload(client)
    kept = [float(client.kept["mask"][layer].double().mean()) for layer in layers]
    assert kept[0] == 0.25
    assert min(kept) >= 0.25


def test_pruned_weights_stay_zero_under_adam_with_weight_decay():
    adam = partial(torch.optim.Adam, lr=0.01, weight_decay=0.1)
    for masks_hold in (True, False):
        method = FedKLPR() if masks_hold else FedAvg(share_head=False)  # no pruning in a first round
        client = begin(method, epochs=2, optimizer=adam)
        mask = torch.ones(client.model.flat.num_shared_parameters, dtype=torch.bool)
        for layer in prunable_layers(client.model):
            mask[layer] = torch.arange(layer.stop - layer.start) % 2 == 0
        client.keep("mask", mask)
        zero_pruned_(shared(client), mask)
        method.train(client)
        assert bool((shared(client)[~mask] == 0).all()) == masks_hold
        assert (shared(client)[mask] != 0).any()


# -- the accuracy that decides -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("measure", ["mAP", "rank1", "centroids", "classifier"])
def test_accuracy_of_clusters_is_that_of_loops_over_images(measure, trained):
    method = FedKLPR()
    client = begin(method, clustering=CLUSTERING)
    if trained:
        method.train(client)
    else:  # clusters are found for it
        client.session.labeller.find()
    pseudo = client.session.pseudo
    found = own_accuracy(client, None, measure)
    assert client.model.network.training
    model = copy.deepcopy(client.model.network).eval().double()
    with torch.no_grad():
        x = F.normalize(model(normalise_images(client.data.train.images.decode(SIZE)).double()).neck)
    own = [int(pseudo.proxies.clusters[p]) if p >= 0 else -1 for p in pseudo.labels.tolist()][: len(x)]
    cameras = client.data.train.camids.tolist()
    assert len(pseudo.labels) == 2 * len(x)
    if measure in ("mAP", "rank1"):
        expected = slow_retrieval(x.tolist(), own, cameras)[measure == "rank1"]
    else:
        kinds = sorted({(g, c) for g, c in zip(own, cameras, strict=True) if g >= 0})
        of_kind = [[i for i in range(len(x)) if (own[i], cameras[i]) == kind] for kind in kinds]
        memory = [x[rows].mean(0) / x[rows].mean(0).norm() for rows in of_kind]
        if measure == "classifier":  # as the last batch has left it
            memory = list(pseudo.proxies.memory.double())
        right = []
        for i, group in enumerate(own):
            if group >= 0:
                scores = [float(x[i] @ proxy) for proxy in memory]
                right.append(kinds[scores.index(max(scores))][0] == group)
        expected = sum(right) / len(right)
    assert found == pytest.approx(expected)
    assert 0 < found <= 1


# -- whole rounds ------------------------------------------------------------------------------------------------------

ROUNDS, EPOCHS = 4, 2
COMMON = {"floor": 0.0, "plateau": 1.0, "lam": 0.5, "alpha": 0.3}
HEAD = {"accuracy": "classifier", "prune_from": 3}


def reference(step, target, trials, threshold, tolerance, sas):
    """Section III in float64: the federation, every client's mask, and what became of each trial."""
    federation = Federation(backbone=Layers)
    masks = {client.name: full(federation.model) for client in federation.clients}
    sessions, verdicts = dict.fromkeys(masks, 0), set()
    for t in range(ROUNDS):
        states, kl = [], []
        for client in federation.clients:
            model, mask = copy.deepcopy(federation.model), masks[client.name]
            apply(model, mask)
            received = copy.deepcopy(model).eval()

            def regulariser(x, features, received=received, t=t):
                p, q = F.softmax(received(x).neck.detach(), 1), F.softmax(features.neck, 1)
                return COMMON["lam"] * (p * (p / q).log()).sum(1).mean() if t > 0 else 0.0

            for batch in client.batches(t, EPOCHS):
                sgd(model, client.head, [batch], regulariser)
                apply(model, mask)
            model.eval()
            with torch.no_grad():
                kl.append(divergence(received(client.x[:32]).neck, model(client.x[:32]).neck))
            before = accuracy(model, client.head, client.x, client.y)
            sessions[client.name] += 1
            if sessions[client.name] < 3 or before < threshold:
                verdicts.add("waits")
            else:

                def loss(trial, client=client, before=before):
                    return before - accuracy(trial, client.head, client.x, client.y)

                whole = min(step, max(target - fraction(mask), 0.0))
                model, mask = halve(
                    model, mask, whole, trials, lambda trial, loss=loss: loss(trial) < tolerance, verdicts
                )
                masks[client.name] = mask
            states.append(model.state_dict())
        pr = [fraction(mask) for mask in masks.values()]
        shares = [k / sum(kl) for k in kl]
        if any(pr):
            squares = [p**2 / sum(q**2 for q in pr) for p in pr]
            shares = [COMMON["alpha"] * a + (1 - COMMON["alpha"]) * b for a, b in zip(shares, squares, strict=True)]
        left_out = list(masks.values()) if sas else [{}] * len(states)
        federation.model.load_state_dict(masked_mean(federation.model.state_dict(), states, left_out, shares))
    return federation, masks, verdicts


@pytest.mark.parametrize("sas", [True, False])
@pytest.mark.parametrize(
    ("step", "target", "trials", "threshold", "tolerance", "expected"),
    [
        (0.4, 0.4, 4, 0.0, 1.0, {"waits", "pruned", "done"}),
        (0.6, 0.9, 3, 0.2, 0.05, {"waits", "pruned", "reverted"}),
    ],
)
def test_whole_rounds(step, target, trials, threshold, tolerance, expected, sas):
    federation, masks, verdicts = reference(step, target, trials, threshold, tolerance, sas)
    assert expected <= verdicts
    assert len({str(mask) for mask in masks.values()}) == len(masks)
    settings = {"step": step, "target": target, "trials": trials, "min_accuracy": threshold, "tolerance": tolerance}
    model = play(FedKLPR(**COMMON, **HEAD, **settings, sas=sas), ROUNDS, backbone=Layers, epochs=EPOCHS)
    for name, client in model.parts.clients.items():
        state = client.private_state()
        assert state.keys() == {"state", "kept.mask", "kept.accuracies"}
        assert flags_of(state["kept.mask"], model.parts.models["layers"]) == masks[name]
    assert_close(model, federation, tolerance=2e-5, arch="layers")


def test_without_sas_pruned_elements_count_as_zeros():
    for sas in (True, False):
        method = FedKLPR(sas=sas, crr=False, step=0.3, prune_from=1)
        client = begin(method)
        method.train(client)
        upload = method.upload(client)
        assert upload.zeros_count != sas
        assert torch.equal(upload.mask, client.kept["mask"])
        assert upload.is_new_mask
        assert torch.equal(upload_masked(client).mask, upload.mask)


# -- what it reduces to ------------------------------------------------------------------------------------------------

PLAIN = {"prune": False, "regulariser": "none"}
KNOWN = {"prune": False, "regulariser": "cosine", "weighting": "cdw"}


@pytest.mark.parametrize(
    ("method", "other", "clustering"),
    [
        (FedKLPR(**PLAIN, weighting="size"), FedAvg(share_head=False), None),
        (FedKLPR(**PLAIN, weighting="size"), FedPav(), CLUSTERING),
        (FedKLPR(**KNOWN), FedCAPR(), None),
        (FedKLPR(**KNOWN), FedCAPR(), CLUSTERING),
        (FedKLPR(lam=0.0, target=0.0), FedKLPR(**PLAIN, weighting="klaw"), None),
        (FedKLPR(target=0.0, weighting="praw"), FedKLPR(target=0.0, weighting="praw", sas=False), None),
    ],
)
def test_switched_off_it_is_another_method_to_the_bit(method, other, clustering):
    data = partial(make_data, size=SIZE)
    found, expected = (fit(make(one, clustering=clustering), data(), rounds=3) for one in (method, other))
    assert torch.equal(vector(found, "layers"), vector(expected, "layers"))
    for name, client in found.parts.clients.items():
        assert torch.equal(client.private_state()["state"], expected.parts.clients[name].private_state()["state"])


@pytest.mark.parametrize(
    "switch",
    [
        {"regulariser": "none"}, {"regulariser": "cosine"}, {"reverse": True}, {"temperature": 0.5},
        {"reg_from": 2}, {"weighting": "klaw"}, {"weighting": "praw"}, {"weighting": "cdw"},
        {"weighting": "size"}, {"alpha": 0.9}, {"prune": False, "weighting": "klaw"}, {"sas": False}, {"crr": True},
        {"target": 0.1}, {"step": 0.1}, {"floor": 0.9}, {"prune_from": 2},
    ],
    ids=str,
)  # fmt: skip
def test_every_switch_changes_the_model(switch):
    common = {"crr": False, "step": 0.3, "reg_from": 1, "lam": 1.0, "prune_from": 1}
    usual = _vector_of(tuple(common.items()))
    assert not torch.equal(_vector_of(tuple((common | switch).items())), usual)


def _vector_of(options, found={}):  # noqa: B006 - the usual model is trained once
    if options not in found:
        found[options] = vector(fit(make(FedKLPR(**dict(options))), make_data(size=SIZE), rounds=2), "layers")
    return found[options]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"lam": -1.0}, "lam"), ({"target": 1.0}, "target"), ({"step": 0.0}, "step"), ({"trials": 0}, "trials"),
        ({"alpha": 1.5}, "alpha"), ({"temperature": 0.0}, "temperature"), ({"reg_from": 0}, "reg_from"),
        ({"floor": 2.0}, "floor"), ({"prune": False}, "weighting: klpwa weighs by pruning"),
        ({"prune": False, "weighting": "praw"}, "weighting"), ({"accuracy_images": 5}, "accuracy_images: rank1"),
        ({"accuracy_images": 0, "accuracy": "classifier"}, "accuracy_images"), ({"prune_from": 0}, "prune_from"),
        ({"plateau": -0.1}, "plateau"), ({"tolerance": -0.1}, "tolerance"), ({"min_accuracy": 1.1}, "min_accuracy"),
    ],
    ids=str,
)  # fmt: skip
def test_impossible_settings_are_refused(options, field):
    with pytest.raises(ConfigError, match=f"model.method.{field}"):
        FedKLPR(**options)
