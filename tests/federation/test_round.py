"""The round and the methods, against plain loops and against each other."""

import copy
import time
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fedsim.core.errors import TrainingError
from fedsim.core.seeding import torch_generator
from fedsim.data import SyntheticReID
from fedsim.data.augmentation import Augmentation
from fedsim.data.batches import shuffled_batches
from fedsim.evaluation.settings import Evaluation
from fedsim.federation.components.selection import UCB, Availability, RandomFraction
from fedsim.functional.normalise import normalise_images
from fedsim.methods import FedAvg, FedPav, FedSGD, Local
from fedsim.methods.base import Weights
from fedsim.models import Neck, ReIDModel, SmallCNN
from fedsim.training.server_optimizers import FedAdam
from fedsim.training.settings import ClientOverride, LocalTraining
from small import LR, Some, fit, make_data, make_model, named, sgd, vector

# -- against plain loops -----------------------------------------------------------------------------------------------


class Smooth(torch.nn.Sequential):
    """A backbone without kinks: where a maximum or a ReLU decides, a last bit soon makes another model."""

    out_channels = 8

    def __init__(self):
        super().__init__(
            torch.nn.Conv2d(3, 8, 3, stride=2), torch.nn.BatchNorm2d(8), torch.nn.Tanh(),
            torch.nn.Conv2d(8, 8, 3, stride=2), torch.nn.BatchNorm2d(8), torch.nn.Tanh(),
        )  # fmt: skip


def smooth():
    torch.manual_seed(0)
    return Smooth()


def reference_fedpav(data, rounds, weighting):
    """FedPav with nothing but torch modules, state dicts and loops (paper 003, Algorithm 1)."""
    clients = data.federated.clients
    backbone = smooth()
    torch.manual_seed(0)
    w = ReIDModel(copy.deepcopy(backbone), Neck(kind="bnneck", dropout=0.0))
    heads = {}
    for c in clients:
        heads[c.name] = torch.nn.Linear(w.num_features, c.num_classes)
        torch.nn.init.normal_(heads[c.name].weight, std=0.001, generator=torch_generator(0, c.name, "head"))
        torch.nn.init.zeros_(heads[c.name].bias)
    for t in range(rounds):
        uploads = {}
        for c in clients:
            model, head = copy.deepcopy(w).train(), heads[c.name]
            images, labels = c.train.images.decode(data.size), torch.from_numpy(c.labels)
            optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=LR, momentum=0.9)
            for index in shuffled_batches(c.num_images, 8, torch_generator(0, t, c.name, "batches")):
                optimizer.zero_grad()
                F.cross_entropy(head(model(normalise_images(images[index])).neck), labels[index]).backward()
                optimizer.step()
            uploads[c.name] = model.state_dict()
        n = sum(c.num_images for c in clients)
        state = w.state_dict()
        for key in state:
            if state[key].is_floating_point():
                total = torch.zeros(state[key].shape, dtype=torch.float64)
                for c in clients:
                    p_k = c.num_images / n if weighting == "size" else 1 / len(clients)
                    total += p_k * uploads[c.name][key].double()
                state[key] = total.float()
        w.load_state_dict(state)
    return w


@pytest.mark.parametrize("weighting", ["size", "uniform"])
@pytest.mark.parametrize(("rounds", "tolerance"), [(1, 1e-6), (2, 1e-4)])
def test_fedpav_equals_plain_loops(weighting, rounds, tolerance):
    model = fit(make_model(FedPav(weighting=weighting), backbone=smooth()), rounds=rounds)
    expected = reference_fedpav(make_data(), rounds, weighting).state_dict()
    for name, tensor in named(model, "smooth").items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=tolerance)


# -- against each other ------------------------------------------------------------------------------------------------


def test_fedavg_with_private_heads_is_fedpav():
    a, b = fit(make_model(FedAvg(share_head=False))), fit(make_model(FedPav()))
    assert torch.equal(vector(a), vector(b))
    for name, client in a.parts.clients.items():
        assert torch.equal(client.head.weight, b.parts.clients[name].head.weight)


def test_fedavg_shares_a_head_of_the_largest_label_space():
    model = fit(make_model(FedAvg()))
    largest = max(c.num_classes for c in model.parts.federated.clients)
    assert named(model)["head.weight"].shape == (largest, 32)
    assert all(client.head is None for client in model.parts.clients.values())
    assert all(entry.shared for entry in model.parts.models["smallcnn"].flat.entries)


def test_one_client_makes_fedpav_local_training():
    data = {"source": SyntheticReID(clients=1, unseen=0, scale=0.2)}
    federated, alone = (fit(make_model(kind(), backbone=smooth()), make_data(**data)) for kind in (FedPav, Local))
    # the grid of exact sums has steps of 2**-40
    torch.testing.assert_close(vector(federated, "smooth"), alone.parts.clients["town0"].private, rtol=0, atol=1e-5)
    head, other = federated.parts.clients["town0"].head, alone.parts.clients["town0"].head
    torch.testing.assert_close(head.weight, other.weight, rtol=0, atol=1e-5)


def test_local_training_depends_on_no_other_client():
    together, alone = fit(make_model(Local())), fit(make_model(Local()), make_data(Some("town1")))
    assert torch.equal(together.parts.clients["town1"].private, alone.parts.clients["town1"].private)
    assert torch.equal(together.parts.clients["town1"].head.weight, alone.parts.clients["town1"].head.weight)
    assert not together.evaluator.plan.has_global


def test_the_order_of_the_clients_changes_no_bit():
    a = fit(make_model(FedPav()), make_data(Some("town0", "town1", "town2")))
    b = fit(make_model(FedPav()), make_data(Some("town2", "town0", "town1")))
    assert torch.equal(vector(a), vector(b))


def test_sgd_with_rate_one_is_averaging():
    """Of five seeds on two kinds of CPU, the largest difference is 1.0e-6 +- 0.7e-6 after two rounds."""

    def server(params):
        return torch.optim.SGD(params, lr=1.0)

    a, b = (fit(make_model(FedPav(), backbone=smooth(), server_optimizer=each)) for each in (None, server))
    # theta - (theta - mean) rounds
    torch.testing.assert_close(vector(a, "smooth"), vector(b, "smooth"), rtol=0, atol=1e-5)


def test_exact_and_fp32_reduction_agree_up_to_rounding():
    """As above: 1.2e-6 +- 0.8e-6."""
    a, b = (fit(make_model(FedPav(), backbone=smooth(), reduction=each)) for each in ("exact", "fp32"))
    torch.testing.assert_close(vector(a, "smooth"), vector(b, "smooth"), rtol=0, atol=1e-5)


# -- who takes part ----------------------------------------------------------------------------------------------------


def test_clients_that_are_not_selected_stay_as_they_were():
    model = make_model(FedPav(), selection=RandomFraction(0.34))
    fit(model, rounds=1)
    selected = model.settings.selection.select(0, ["town0", "town1", "town2"], 0)
    untouched = make_model(FedPav())
    untouched.assemble(make_data(), 0, 1, torch.device("cpu"))
    assert len(selected) == 2
    for name, client in model.parts.clients.items():
        same = torch.equal(client.head.weight, untouched.parts.clients[name].head.weight)
        assert same == (name not in selected)


def test_a_round_without_any_answer_changes_nothing():
    model = make_model(FedPav(), availability=Availability(drop=1.0), server_optimizer=FedAdam)
    model.assemble(make_data(), 0, 1, torch.device("cpu"))
    before = vector(model).clone()
    model = fit(make_model(FedPav(), availability=Availability(drop=1.0), server_optimizer=FedAdam))
    assert torch.equal(vector(model), before)


def steps_of_stragglers(work, epochs):
    """Steps that clients take in a round, and the batches of an epoch, by client."""
    seen = {}

    class Counting(FedPav):
        def take_step(self, client, loss):
            seen[client.client_name] = seen.get(client.client_name, 0) + client.step(loss)

    slow = Availability(straggle=1.0, straggler_work=work)
    settings = LocalTraining(batch_size=8, local_epochs=epochs, optimizer=sgd)
    model = fit(make_model(Counting(), availability=slow, client=settings), rounds=1)
    clients = model.parts.federated.clients
    return seen, {c.name: len(shuffled_batches(c.num_images, 8, torch.Generator())) for c in clients}


def test_stragglers_do_part_of_their_batches():
    seen, batches = steps_of_stragglers(0.5, epochs=3)
    assert seen == {name: count + int(0.5 * count) for name, count in batches.items()}


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_straggler_takes_one_step_at_least(epochs):
    seen, batches = steps_of_stragglers(0.01, epochs)
    assert seen == dict.fromkeys(batches, 1)


def test_clients_of_different_architectures_are_averaged_apart():
    own = {"town1": ClientOverride(backbone=SmallCNN(width=6))}
    model = fit(make_model(FedPav(), clients=own), rounds=1)
    assert sorted(model.server.vectors) == ["smallcnn", "smallcnn2"]
    others = fit(make_model(FedPav()), make_data(Some("town0", "town2")), rounds=1)
    assert torch.equal(vector(model, "smallcnn"), vector(others))
    assert named(model, "smallcnn2")["backbone.conv1.weight"].shape[0] == 6


def test_overrides_change_their_client_only():
    more = fit(make_model(Local(), clients={"town1": ClientOverride(local_epochs=2)}), rounds=1)
    plain = fit(make_model(Local()), rounds=1)
    assert torch.equal(more.parts.clients["town0"].private, plain.parts.clients["town0"].private)
    assert not torch.equal(more.parts.clients["town1"].private, plain.parts.clients["town1"].private)


class Cumulative(SmallCNN):
    """Batch normalisation as a plain average: the number of batches so far decides each update."""

    def __init__(self):
        super().__init__(width=8)
        for module in self.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.momentum = None


def test_counters_start_anew_with_every_client():
    backbone = Cumulative()
    together = fit(make_model(Local(), backbone=backbone), rounds=1)
    alone = fit(make_model(Local(), backbone=backbone), make_data(Some("town1")), rounds=1)
    assert torch.equal(together.parts.clients["town1"].private, alone.parts.clients["town1"].private)


def test_a_client_with_another_stride_is_another_architecture():
    from fedsim.models import ResNet

    own = {"town1": ClientOverride(backbone=ResNet(18, last_stride=2))}
    model = make_model(FedPav(), backbone=ResNet(18, last_stride=1), clients=own)
    model.assemble(make_data(), 0, 1, torch.device("cpu"))
    assert sorted(model.parts.models) == ["resnet", "resnet2"]
    assert model.parts.archs["town1"] == "resnet2"


def test_a_method_that_downloads_less_has_personalised_models_of_its_own():
    class Half(FedPav):
        has_own_models = True

        def download(self, client):
            super().download(client)
            client.model.shared.mul_(torch.linspace(0.5, 1.5, client.model.flat.num_shared))

    model = make_model(Half(), evaluation=Evaluation(test_during_fit=True))
    fit(
        model, make_data(val="identities", val_fraction=0.3), rounds=1, limit_val_batches=1.0, check_val_every_n_epoch=1
    )
    kinds = {k: model.scores[f"test/{k}/seen/mAP"] for k in ("global", "personalised")}
    assert kinds["global"] != kinds["personalised"]


def test_weights_that_do_not_sum_to_one_are_a_defect_of_the_method():
    class Shrinking(FedPav):
        def weights(self, reports):
            return Weights(dict.fromkeys(reports, 0.1))

    with pytest.raises(AssertionError, match=r"Shrinking\.weights do not sum to 1"):
        fit(make_model(Shrinking()))


@pytest.mark.parametrize("store", ["device", "host", "disk"])
def test_what_a_client_keeps_is_a_copy_and_part_of_its_state(store):
    seen = []

    class Remembering(FedPav):
        def upload(self, client):
            seen.append(client.kept.get("previous", torch.zeros(1)).sum())
            client.keep("previous", client.model.shared)
            client.model.shared.add_(0.0)
            return super().upload(client)

    model = fit(make_model(Remembering(), client_store=store), rounds=2)
    client = model.parts.clients["town0"]
    state = client.private_state()
    assert state["kept.previous"].abs().sum() > 0
    assert seen[0] == 0
    assert seen[3] != 0  # the second session of the first client
    client.load_private_state({"state": state["state"], "kept.previous": torch.ones(3)})
    client.load()
    assert torch.equal(client.kept["previous"], torch.ones(3))


@pytest.mark.parametrize("method", [FedPav(), Local()], ids=["FedPav", "Local"])
def test_where_private_states_wait_changes_no_bit(method):
    states = []
    for store in ("device", "host", "disk"):
        model = fit(make_model(method, client_store=store))
        states.append([vector(model), *(c.private_state()["state"] for c in model.parts.clients.values())])
    for other in states[1:]:
        assert all(torch.equal(a, b) for a, b in zip(states[0], other, strict=True))


def test_a_server_step_changes_the_global_model():
    class Doubling(FedAvg):
        server_every = 1

        def server_step(self, server):
            server.vector("smallcnn").mul_(2)

    doubled, plain = fit(make_model(Doubling()), rounds=1), fit(make_model(FedAvg()), rounds=1)
    assert torch.equal(vector(doubled), 2 * vector(plain))


def test_what_one_clients_method_freezes_is_not_frozen_for_the_next():
    modes = {}

    class Freezing(FedPav):
        def train(self, client):
            modes[client.client_name] = client.model.network.backbone.training
            client.model.network.backbone.eval()
            super().train(client)

    fit(make_model(Freezing()), rounds=1)
    assert modes == {"town0": True, "town1": True, "town2": True}


@pytest.mark.parametrize("store", ["device", "host", "disk"])
def test_work_in_place_on_what_is_kept_does_not_survive_a_session_that_does_not_count(store):
    class Counting(FedPav):
        def download(self, client):
            super().download(client)
            if "sessions" not in client.kept:
                client.keep("sessions", torch.zeros(1))
            client.kept["sessions"] += 1
            if client.round == 1:
                client.model.shared.fill_(float("nan"))

    model = fit(make_model(Counting(), client_store=store, on_bad_update="skip_client"), rounds=2)
    assert all(float(c.private_state()["kept.sessions"]) == 1 for c in model.parts.clients.values())
    assert all(not client.kept for client in model.parts.clients.values())


@pytest.mark.parametrize(("name", "dtype"), [("a/b", torch.float32), ("spectrum", torch.complex64)])
def test_what_no_checkpoint_could_hold_is_refused_when_it_is_kept(name, dtype):
    model = fit(make_model(FedPav()), rounds=1)
    with pytest.raises(ValueError, match="give a name without a slash"):
        model.parts.clients["town0"].keep(name, torch.zeros(1, dtype=dtype))


def test_signals_that_are_no_numbers_are_bad_updates():
    class Measuring(FedPav):
        measures = {"distance": "client"}  # noqa: RUF012 - a property of methods

        def upload(self, client):
            distance = float("nan") if client.client_name == "town1" else 1.0
            return replace(super().upload(client), signals={"distance": distance})

    with pytest.raises(TrainingError, match="client town1, round 1: its distance is nan"):
        fit(make_model(Measuring()), rounds=1)
    model = fit(make_model(Measuring(), on_bad_update="skip_client"), rounds=1)
    assert list(model.reports) == ["town0", "town2"]


@pytest.mark.parametrize("weighting", ["size", "uniform"])
def test_uploads_that_wait_give_the_same_bits_as_those_that_are_summed_at_once(weighting):
    method = FedPav(weighting=weighting)
    at_once, waiting = (fit(make_model(method, on_bad_update=how)) for how in ("stop", "skip_client"))
    assert torch.equal(vector(at_once), vector(waiting))


def test_a_quick_check_leaves_no_trace_on_the_data():
    data = make_data()
    fit(make_model(FedPav()), data, limit_train_batches=1)
    assert torch.equal(vector(fit(make_model(FedPav()), data)), vector(fit(make_model(FedPav()))))


# -- views -------------------------------------------------------------------------------------------------------------


class SecondView(FedAvg):
    """FedAvg that asks for two views and trains on one of them."""

    chosen: list[torch.Tensor] = []  # noqa: RUF012 - what the test looks at

    def train(self, client):
        for batch in client.batches(0, views=2):
            [other] = batch.views
            self.chosen.append((batch.images, other))
            client.step(self.loss(client, batch))


def test_a_second_view_is_another_augmentation_of_the_same_images_and_changes_nothing():
    data = {"augmentation": Augmentation(pad=4, flip=0.5, erase=0.5)}
    method = SecondView()
    both, plain = fit(make_model(method), make_data(**data)), fit(make_model(FedAvg()), make_data(**data))
    assert torch.equal(vector(both), vector(plain))
    same = [torch.equal(first, second) for first, second in method.chosen]
    assert not any(same)
    still = SecondView()
    still.chosen.clear()
    fit(make_model(still), make_data(augmentation=Augmentation(pad=0, flip=0.0)))
    assert all(torch.equal(first, second) for first, second in still.chosen)
    mirrored = SecondView()
    mirrored.chosen.clear()
    fit(make_model(mirrored), make_data(augmentation=Augmentation(pad=0, flip=0.5)), rounds=1)
    for first, second in mirrored.chosen:
        for a, b in zip(first, second, strict=True):  # the same image, one way round or the other
            assert torch.equal(a, b) or torch.equal(a, b.flip(-1))


class Counted(FedPav):
    """Counts town0's optimizer steps."""

    def take_step(self, client, loss):
        if client.step(loss):
            counted[client.round] = counted.get(client.round, 0) + (client.client_name == "town0")


counted = {}


def steps_of(rounds=1, work=1.0, **options):
    """Optimizer steps of town0 in the last round, and how many batches it has."""
    counted.clear()
    slow = Availability() if work == 1.0 else Availability(straggle=1.0, straggler_work=work)
    how = LocalTraining(batch_size=8, optimizer=sgd, **options)
    model = fit(make_model(Counted(), availability=slow, client=how), rounds=rounds)
    images = model.parts.clients["town0"].data.num_images
    return counted[rounds - 1], len(shuffled_batches(images, 8, torch.Generator()))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_local_steps_end_the_round_in_whatever_epoch_they_are_reached(accumulate):
    _, num_batches = steps_of()
    per_epoch = -(-num_batches // accumulate)
    for steps in (1, per_epoch - 1, per_epoch, per_epoch + 1, 2 * per_epoch + 1):
        found, _ = steps_of(local_epochs=3, local_steps=steps, accumulate=accumulate)
        assert found == steps
    assert steps_of(local_epochs=2, local_steps=1000, accumulate=accumulate)[0] == 2 * per_epoch
    assert steps_of(rounds=2, local_steps=2)[0] == 2


def test_stragglers_take_part_of_the_local_steps():
    assert steps_of(work=0.5, local_epochs=3, local_steps=5)[0] == 2
    assert steps_of(work=0.1, local_steps=5)[0] == 1


def test_one_local_step_is_fedsgd():
    one = LocalTraining(batch_size=8, optimizer=sgd, local_steps=1)
    a, b = fit(make_model(FedAvg(), client=one)), fit(make_model(FedSGD(steps=1)))
    assert torch.equal(vector(a), vector(b))


@pytest.mark.parametrize(("most", "shown"), [(3, True), (2, False)])
def test_single_clients_are_logged_while_they_are_few(monkeypatch, most, shown):
    """Three clients; as many names are shown as the limit says, and none if they are more."""
    for module in ("round", "components.ledger"):
        monkeypatch.setattr(f"fedsim.federation.{module}.MAX_NAMES", most)
    logged = fit(make_model(FedPav(), selection=UCB(count=3)), rounds=1).round_metrics
    for group in ("train", "comm", "selection"):
        assert any(name.startswith(f"{group}/town0/") for name in logged) is shown, group
        assert any(name.startswith(f"{group}/") for name in logged) is (shown or group != "selection"), group


def test_a_round_has_its_number_from_1_and_takes_less_than_the_fit():
    started = time.perf_counter()
    logged = fit(make_model(FedPav()), rounds=2).round_metrics
    assert logged["round"] == 2
    assert logged["time/images_per_second"] > 0
    assert "memory/peak_gib" not in logged, "torch does not count the memory of a CPU"
    assert 0 < logged["time/round_seconds"] < time.perf_counter() - started
