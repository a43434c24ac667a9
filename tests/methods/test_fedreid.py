"""FedReID against Eqs. (1) to (13) in loops; what its switches turn it into; fine-tuning of Table 6."""

import copy
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from fedsim.__main__ import main
from fedsim.core.errors import ConfigError
from fedsim.data import Augmentation, SyntheticReID
from fedsim.federation.components.privacy import WhiteNoise
from fedsim.federation.components.selection import AllClients, RandomFraction
from fedsim.functional.losses import soft_label_divergence
from fedsim.methods import FedAvg, FedReID, FedReIDFineTune
from fedsim.models import Neck
from fedsim.strategy.checkpoint_files import read_checkpoint, read_states
from fedsim.training.settings import LocalTraining
from plain_loops import LR, Federation, mean_of, play, sgd
from small import fit, make_data, make_model, receive, vector

BASELINE = FedAvg(share_head=False, share_neck=False, weighting="uniform")
close = partial(torch.testing.assert_close, rtol=0, atol=1e-5)


# -- Eqs. (12) and (13) ------------------------------------------------------------------------------------------------


def divergence_loop(logits, targets, t):
    """The regularisation of a batch, image by image, class by class."""
    losses = []
    for d, d_expert in zip(logits.tolist(), targets.tolist(), strict=True):
        p_sum, q_sum = sum(math.exp(x / t) for x in d), sum(math.exp(x / t) for x in d_expert)
        p, q = [math.exp(x / t) / p_sum for x in d], [math.exp(x / t) / q_sum for x in d_expert]
        losses.append(t**2 * sum(b * math.log(b / a) for a, b in zip(p, q, strict=True)))
    return sum(losses) / len(losses)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_eq13_the_divergence(temperature):
    torch.manual_seed(0)
    student, teacher = 2 * torch.randn(2, 5, 7, dtype=torch.float64)
    found = float(soft_label_divergence(student, teacher, temperature))
    assert found == pytest.approx(divergence_loop(student, teacher, temperature), rel=1e-10)
    assert found != pytest.approx(divergence_loop(teacher, student, temperature), rel=1e-2)
    assert float(soft_label_divergence(teacher, teacher, temperature)) == pytest.approx(0.0, abs=1e-12)


def test_eq13_the_divergence_pulls_the_student_to_the_teacher():
    """The gradient is T (P - Q) / B: for large T it does not vanish, as it would without T^2."""
    student, teacher = torch.randn(2, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    student.requires_grad_()
    soft_label_divergence(student, teacher, 3.0).backward()
    close(student.grad, 3.0 * ((student.detach() / 3).softmax(1) - (teacher / 3).softmax(1)) / 4, atol=1e-12)


# -- whole rounds ------------------------------------------------------------------------------------------------------


def divergence(logits, targets, t=3.0):
    p, q = (logits / t).softmax(1), (targets / t).softmax(1)
    return t**2 * (q * (q / p).log()).sum(1).mean()


class Loops:
    """Algorithm of the paper, or of its code, with whole models and one optimizer for both of a client."""

    def __init__(self, momentum, selection, code=False):
        self.federation, self.momentum, self.selection, self.code = Federation(), momentum, selection, code
        start = self.federation.model
        self.theta = copy.deepcopy(start.backbone.state_dict())
        self.local = {c.name: (copy.deepcopy(start), copy.deepcopy(c.head)) for c in self.federation.clients}
        self.has_trained = set()

    def starts(self, name):
        """Embedding networks that main and expert start from: Eqs. (7) and (10), or the code's."""
        own = self.local[name][0].backbone.state_dict() if name in self.has_trained else self.theta
        return (mean_of([self.theta, own], [0.5, 0.5]), self.theta) if self.code else (self.theta, own)

    def round(self, t):
        names = [c.name for c in self.federation.clients]
        chosen = self.selection.select(t, names, 0)
        for client in self.federation.clients:
            if client.name in chosen:
                for_main, for_expert = (copy.deepcopy(state) for state in self.starts(client.name))
                pair, expert = self.local[client.name], copy.deepcopy(self.local[client.name])
                pair[0].backbone.load_state_dict(for_main)
                expert[0].backbone.load_state_dict(for_expert)
                self.train(pair, expert, client.batches(t))
        self.has_trained |= set(chosen)
        states = [self.local[name][0].backbone.state_dict() for name in chosen]
        self.theta = mean_of(states, [1 / len(chosen)] * len(chosen))  # Eq. (8)

    def train(self, pair, expert, batches):
        modules = [*pair, *expert]
        optimizer = torch.optim.SGD([p for m in modules for p in m.parameters()], lr=LR, momentum=self.momentum)
        for module in modules:
            module.train()
        for x, y in batches:
            d, d_expert = (head(model(x).neck) for model, head in (pair, expert))
            optimizer.zero_grad()
            loss = F.cross_entropy(d, y) + F.cross_entropy(d_expert, y) + divergence(d, d_expert.detach())
            loss.backward()
            optimizer.step()


def assert_like(found, loops):
    """Compare the server's model, and each client's mapping network and last embedding network."""
    flat_model = found.parts.models["smooth"]
    expected = {f"backbone.{n}": t for n, t in loops.theta.items() if "num_batches" not in n}
    assert {e.name for e in flat_model.flat.shared_entries} == expected.keys()
    for entry in flat_model.flat.shared_entries:
        close(vector(found, "smooth")[entry.span].view(entry.shape).double(), expected[entry.name])
    for name, client in found.parts.clients.items():
        model, head = loops.local[name]
        client.load()
        close(flat_model.head.weight.double(), head.weight)
        last = client.kept.get("embedding")
        for entry in flat_model.flat.entries:
            if not entry.shared:
                close(flat_model.flat.buffer[entry.span].view(entry.shape).double(), model.state_dict()[entry.name])
            elif last is not None:
                close(last[entry.span].view(entry.shape).double(), model.state_dict()[entry.name])
        assert (last is not None) == (name in loops.has_trained)
        client.unload()


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize(("fraction", "rounds"), [(1.0, 3), (0.5, 4)])
def test_eq3_rounds(momentum, fraction, rounds):
    """Some clients skip rounds, and then begin with an expert of their last one."""
    selection = RandomFraction(fraction)
    loops = Loops(momentum, selection)
    for t in range(rounds):
        loops.round(t)
    found = play(FedReID(), rounds, momentum=momentum, selection=selection)
    assert_like(found, loops)
    without = play(FedReID(expert=False), rounds, momentum=momentum, selection=selection)
    assert not torch.allclose(vector(found, "smooth"), vector(without, "smooth"), atol=1e-4)


def test_eq9_the_loss_of_the_client_model():
    """It is what is logged: of the first batch, by loops."""
    found = play(FedReID(), 1, data=make_data(limit_client_batches=1))
    federation = Federation()
    for client in federation.clients:
        x, y = client.batches(0)[0]
        logits = client.head(federation.model(x).neck).tolist()
        losses = [math.log(sum(math.exp(b) for b in d)) - d[z] for d, z in zip(logits, y.tolist(), strict=True)]
        assert found.round_metrics[f"train/{client.name}/loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-6)


def test_some_client_skips_a_round_and_comes_back():
    rounds = [set(RandomFraction(0.5).select(t, ["town0", "town1", "town2"], 0)) for t in range(4)]
    assert any(c in rounds[a] and c not in rounds[a + 1] and c in rounds[a + 2] for a in range(2) for c in rounds[a])


def test_rounds_of_the_code():
    code = FedReID(start_mix=0.5, expert_from="global", views="same")
    loops = Loops(0.5, AllClients(), code=True)
    for t in range(3):
        loops.round(t)
    found = play(code, 3, momentum=0.5)
    assert_like(found, loops)
    assert not torch.allclose(vector(found, "smooth"), vector(play(FedReID(), 3, momentum=0.5), "smooth"), atol=1e-4)


# -- the expert --------------------------------------------------------------------------------------------------------


class Watched(FedReID):
    """Writes down what main and expert are before and after training: client, round -> whole vectors."""

    def train(self, client):
        key = client.client_name, client.round
        started[key] = [client.model.whole.clone()]
        super().train(client)
        ended[key] = [client.model.whole.clone(), client.model.replica("expert").whole.clone()]

    def _step_expert(self, client, expert, batch):
        key = client.client_name, client.round
        seen.setdefault(key, []).append(batch)
        if len(started[key]) == 1:
            started[key].append(expert.whole.clone())
        return super()._step_expert(client, expert, batch)


started, ended, seen = {}, {}, {}


def watch(rounds, selection=None, privacy=None, **options):
    for record in (started, ended, seen):
        record.clear()
    settings = {"neck": Neck(dim=8, dropout=0.5), "selection": selection or AllClients(), "privacy": privacy}
    augmentation = options.pop("augmentation", Augmentation(pad=2))
    return fit(make_model(Watched(**options), **settings), make_data(augmentation=augmentation), rounds)


@pytest.mark.parametrize("shared", [False, True])
def test_eq10_the_next_expert_is_the_client_model_of_the_last_round(shared):
    """With its mapping network: for a shared head (CIFAR-10), too."""
    model = watch(5, RandomFraction(0.5), share_head=shared, share_neck=shared)
    num_shared = model.parts.models["smallcnn"].flat.num_shared
    skipped = 0
    for (name, t), (model_at_start, expert) in started.items():
        earlier = [s for n, s in started if n == name and s < t]
        if not earlier:
            assert torch.equal(model_at_start, expert)  # both are the server's
            continue
        skipped += t - earlier[-1] > 1
        assert torch.equal(expert, ended[name, earlier[-1]][0])
        assert not torch.equal(expert, ended[name, earlier[-1]][1])
        assert not torch.equal(expert[:num_shared], model_at_start[:num_shared])
        assert torch.equal(expert[num_shared:], model_at_start[num_shared:])
    assert skipped


def test_eq15_noise_in_the_download_reaches_the_client_model_only():
    """Eq. (15), not Eq. (10)."""
    model = watch(2, privacy=WhiteNoise(0.01, in_aggregation=False, in_download=True))
    num_shared = model.parts.models["smallcnn"].flat.num_shared
    received = [started[name, 1][0][:num_shared] for name in model.parts.clients]
    assert not torch.equal(received[0], received[1])
    for name in model.parts.clients:
        assert torch.equal(started[name, 1][1][:num_shared], ended[name, 0][0][:num_shared])


def test_eq11_the_expert_learns_as_if_it_were_alone():
    """In the first round it begins as FedAvg's client model, and the regularisation does not move it."""
    plain = fit(make_model(BASELINE), make_data(), rounds=1)
    for record in (started, ended, seen):
        record.clear()
    model = fit(make_model(Watched()), make_data(), rounds=1)
    num_shared = model.parts.models["smallcnn"].flat.num_shared
    for name in model.parts.clients:
        client_model, expert = ended[name, 0]
        alone = plain.parts.clients[name].private_state()["state"]
        assert torch.equal(expert[num_shared:], alone)
        assert not torch.equal(client_model[num_shared:], alone)
    mean = torch.stack([expert[:num_shared].double() for _, expert in ended.values()]).mean(0)
    torch.testing.assert_close(vector(plain).double(), mean, rtol=0, atol=1e-7)


@pytest.mark.parametrize("views", ["separate", "same"])
def test_views(views):
    """Two augmentations of the same images, or one."""
    watch(1, views=views)
    for batches in seen.values():
        for batch in batches:
            assert len(batch.views) == (views == "separate")
            assert all(not torch.equal(view, batch.images) for view in batch.views)
    watch(1, views=views, augmentation=Augmentation(pad=0, flip=0.0))
    assert all(torch.equal(v, batch.images) for batches in seen.values() for batch in batches for v in batch.views)


def test_the_expert_sees_the_other_view():
    inputs = []

    class Listening(FedReID):
        def _step_expert(self, client, expert, batch):
            handle = expert.network.register_forward_pre_hook(lambda _, args: inputs.append((args[0], batch)))
            logits = super()._step_expert(client, expert, batch)
            handle.remove()
            return logits

    fit(make_model(Listening()), make_data(augmentation=Augmentation(pad=2)), rounds=1)
    assert inputs
    assert all(torch.equal(images, batch.views[0]) for images, batch in inputs)


# -- what is sent, and by whom -----------------------------------------------------------------------------------------


def test_heads_and_necks_stay_at_home():
    sent = []
    for method in (FedReID(), BASELINE):
        model = make_model(method, neck=Neck(dim=8))
        model.assemble(make_data(), 0, 1, torch.device("cpu"))
        flat_model = model.parts.models["smallcnn"]
        names = {entry.name for entry in flat_model.flat.shared_entries}
        assert names
        assert all(name.startswith("backbone.") for name in names)
        assert flat_model.has_own_heads
        sent.append((names, model.parts.ledger.expected(0, ["town0"])["town0"]))
    assert sent[0] == sent[1]  # the expert costs no traffic


FOUR = partial(make_data, SyntheticReID(clients=4, scale=0.2))


@pytest.mark.parametrize(("fraction", "count"), [(0.25, 1), (0.5, 2), (1.0, 4)])
def test_fraction_of_clients(fraction, count):
    model = fit(make_model(FedReID(), selection=RandomFraction(fraction)), FOUR(), rounds=1)
    start = make_model(FedReID())
    start.assemble(FOUR(), 0, 1, torch.device("cpu"))
    assert len(list(model.reports)) == count
    for name, client in model.parts.clients.items():
        before, after = (c.private_state() for c in (start.parts.clients[name], client))
        assert torch.equal(before["state"], after["state"]) == (name not in list(model.reports))
        assert after.keys() == before.keys() | ({"kept.embedding"} if name in list(model.reports) else set())


@pytest.mark.parametrize(("fraction", "count"), [(0.25, 1), (0.5, 2), (0.51, 3)])
def test_all_train_and_a_fraction_is_aggregated(fraction, count):
    """The text's order. Who is aggregated changes from round to round."""
    drawn = []

    class Drawing(FedReID):
        def weights(self, reports):
            found = super().weights(reports)
            drawn.append(found.clients)
            return found

    model = fit(make_model(Drawing(aggregated=fraction)), FOUR(), rounds=4)
    assert len(list(model.reports)) == len(drawn) == 4
    assert all(sorted(weights.values()) == [0.0] * (4 - count) + [1 / count] * count for weights in drawn)
    assert len({frozenset(name for name, weight in weights.items() if weight) for weights in drawn}) > 1
    uploads = {name: c.private_state()["kept.embedding"].double() for name, c in model.parts.clients.items()}
    mean = sum(drawn[-1][name] * upload for name, upload in uploads.items())
    torch.testing.assert_close(vector(model).double(), mean, rtol=2e-7, atol=1e-7)


def test_without_an_expert_it_is_fedavg():
    data = partial(make_data, augmentation=Augmentation(pad=2))
    neck = Neck(dim=8, dropout=0.5)
    off, plain = (fit(make_model(m, neck=neck), data(), 3) for m in (FedReID(expert=False), BASELINE))
    assert torch.equal(vector(off), vector(plain))
    for name, client in off.parts.clients.items():
        a, b = client.private_state(), plain.parts.clients[name].private_state()
        assert a.keys() == b.keys() == {"state"}
        assert torch.equal(a["state"], b["state"])


def test_the_global_model_is_what_it_delivers():
    model = fit(make_model(FedReID()), rounds=1, limit_val_batches=1, check_val_every_n_epoch=1)
    assert type(model.settings.method).personalise is FedAvg.personalise
    flat_model = model.parts.models["smallcnn"]
    client = model.parts.clients["town0"]
    client.load()
    receive(client, model.settings.method, model.server)
    model.settings.method.personalise(client)
    assert torch.equal(flat_model.shared, vector(model))


# -- Table 6 -----------------------------------------------------------------------------------------------------------


def test_fine_tuning():
    """A mapping network on the frozen backbone; both are the expert from then on."""
    epochs, rounds = 2, 3
    found = play(FedReIDFineTune(mapping_epochs=epochs), rounds)
    federation = Federation()
    flat_model = found.parts.models["smooth"]
    assert flat_model.flat.num_shared == 0
    for client in federation.clients:
        model, head = copy.deepcopy(federation.model), client.head
        start = copy.deepcopy(model.backbone.state_dict())
        batches = client.batches(0, epochs + 1)
        per_epoch = len(batches) // (epochs + 1)
        model.train()
        model.backbone.eval()
        optimizer = torch.optim.SGD([*model.neck.parameters(), *head.parameters()], lr=LR)
        for x, y in batches[: epochs * per_epoch]:
            optimizer.zero_grad()
            F.cross_entropy(head(model(x).neck), y).backward()
            optimizer.step()
        expert = copy.deepcopy(model).eval(), copy.deepcopy(head)

        def pull(x, features, expert=expert, head=head):
            with torch.no_grad():
                targets = expert[1](expert[0](x).neck)
            return divergence(head(features.neck), targets)

        for t in range(rounds):
            sgd(model, head, client.batches(t) if t else batches[epochs * per_epoch :], pull)

        mine = found.parts.clients[client.name]
        mine.load()
        kept = flat_model.replica("expert")
        kept.whole.copy_(mine.kept["expert"])
        for trained, (its, its_head) in ((flat_model, (model, head)), (kept, expert)):
            expected = its.state_dict()
            close(trained.head.weight.double(), its_head.weight)
            for entry in flat_model.flat.entries:
                close(trained.flat.buffer[entry.span].view(entry.shape).double(), expected[entry.name])
        for name, tensor in start.items():
            if "num_batches" not in name:
                assert torch.equal(kept.network.state_dict()[f"backbone.{name}"], tensor.float()), name
        mine.unload()


def test_after_the_mapping_network_the_backbone_trains():
    model = fit(make_model(FedReIDFineTune(mapping_epochs=1)), rounds=1)
    flat_model = model.parts.models["smallcnn"]
    assert all(p.requires_grad for p in flat_model.network.backbone.parameters())
    assert flat_model.optimizer(model.parts.clients["town0"].training_settings).num_steps < 100
    start = make_model(FedReIDFineTune())
    start.assemble(make_data(), 0, 1, torch.device("cpu"))
    for name, client in model.parts.clients.items():
        before, after = (c.private_state()["state"] for c in (start.parts.clients[name], client))
        assert not torch.equal(before[: flat_model.flat.num_model], after[: flat_model.flat.num_model])


def test_a_new_client_adapts_from_an_exported_model(tiny, tmp_path):
    """Its expert is the exported backbone, on an architecture and clients of its own run."""
    network = ["--model.backbone=MobileNetV2", "--model.backbone.width=0.25", "--data.limit_client_batches=1",
               "--trainer.max_epochs=1", "--trainer.limit_val_batches=0", "--data.source.clients=1"]  # fmt: skip
    run, tuned, file = tmp_path / "run", tmp_path / "tuned", tmp_path / "global.safetensors"
    fit_tiny = ["fit", "--config", str(tiny), *network]
    assert main([*fit_tiny, "--model.method=FedReID", "--run_dir", str(run)]) == 0
    assert main(["export", "--ckpt_path", str(run / "checkpoints" / "last.ckpt"), "--output", str(file)]) == 0
    exported = load_file(file)
    assert not [name for name in exported if name.startswith(("neck.", "head."))]
    others = ["--data.source.clients=2", "--data.source.seed=7"]
    tuning = ["--model.method=FedReIDFineTune", f"--model.backbone.weights={file}", *others]
    assert main([*fit_tiny, *tuning, "--run_dir", str(tuned)]) == 0
    path = tuned / "checkpoints" / "last.ckpt"
    content = read_checkpoint(path)["fedsim"]
    states = read_states(path, content, list(content["clients"]))
    assert len(states) == 2
    private = [e for e in content["private_layouts"]["mobilenetv2"] if e["name"].startswith("backbone.")]
    assert len(private) == len(exported)
    for state in states.values():
        for entry in private:
            tensor = exported[entry["name"].removeprefix("backbone.")].flatten()
            span = slice(entry["offset"], entry["offset"] + len(tensor))
            assert torch.equal(state["kept.expert"][span], tensor)
        assert not torch.equal(state["kept.expert"], state["state"])


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("temperature", {"temperature": 0.0}),
        ("start_mix", {"start_mix": 0.0}),
        ("start_mix", {"start_mix": 1.5}),
        ("aggregated", {"aggregated": 0.0}),
        ("share_neck", {"share_head": True}),
    ],
)
def test_wrong_settings_are_refused(field, options):
    with pytest.raises(ConfigError, match=rf"model\.method\.{field}"):
        FedReID(**options)


@pytest.mark.parametrize(("field", "value"), [("temperature", -1.0), ("mapping_epochs", 0)])
def test_wrong_settings_of_fine_tuning_are_refused(field, value):
    with pytest.raises(ConfigError, match=rf"model\.method\.{field}"):
        FedReIDFineTune(**{field: value})


def test_accumulated_and_clipped_steps_are_those_of_each_model():
    """Without regularisation to tell them apart, both models of the first round step alike."""
    how = LocalTraining(
        batch_size=8, accumulate=2, grad_clip=0.5, head_lr=0.2,
        optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4),
    )  # fmt: skip
    for record in (started, ended, seen):
        record.clear()
    plain = fit(make_model(BASELINE, client=how), rounds=1)
    model = fit(make_model(Watched(), client=how), rounds=1)
    for name in model.parts.clients:
        expert = ended[name, 0][1]
        private = plain.parts.clients[name].private_state()["state"]
        assert torch.equal(expert[len(expert) - len(private) :], private)
