"""Generated images: their folders, their places in batches, and what does not change with them."""

import logging
import os
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from failing import run_on_ranks
from fedsim.core.errors import ConfigError, DataError
from fedsim.core.seeding import torch_generator
from fedsim.data import Generated, MarketFolders, write_generated
from fedsim.data.augmentation import Augmentation
from fedsim.data.batches import shuffled_batches
from fedsim.data.federated import GeneratedImages
from fedsim.data.generated import Mixture
from fedsim.data.images import ImageArray
from fedsim.data.pixels import HeldPixels
from fedsim.functional.normalise import normalise_images
from fedsim.methods import (
    APFL,
    MOON,
    SKA,
    Ditto,
    FedBABU,
    FedCAPR,
    FedKLPR,
    FedPav,
    FedReID,
    FedReIDFineTune,
    FedRep,
    FedSAM,
    Local,
    PFedMe,
)
from fedsim.models import Neck, ReIDModel
from fedsim.training.labels import Clustering
from fedsim.training.objective import Objective
from fedsim.training.settings import LocalTraining
from small import LR, Some, fit, make_data, make_model, sgd, vector

SIZE = (32, 16)
CPU = torch.device("cpu")
HEADER = "file,pid,weight"


def draw(count, seed=0):
    """Images of noise, uint8 [count, 3, 32, 16]."""
    return torch.randint(0, 256, (count, 3, *SIZE), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def write_for(root, client, per_identity=2, weight=0.5):
    """Write generated images of a client's identities."""
    pids = np.repeat(client.train.identities, per_identity).tolist()
    write_generated(root / client.name, draw(len(pids)), [{pid: weight} for pid in pids])


@pytest.fixture
def root(tmp_path):
    """A folder with generated images of all clients of ``make_data()``."""
    for client in make_data().federated.clients:
        write_for(tmp_path / "generated", client)
    return tmp_path / "generated"


def add_to(root, share=0.5, **options):
    return make_data(generated=Generated(root=str(root), share=share), **options)


def client_of(data, name="town0"):
    (client,) = [c for c in data.federated.clients if c.name == name]
    return client


# -- folders -----------------------------------------------------------------------------------------------------------


def test_what_is_written_is_read(tmp_path):
    client = client_of(make_data())
    a, b, c, d = client.train.identities[:4]  # numpy's integers are fine, too
    images = draw(4)
    labels = [{d: 0.1}, {a: 1.0}, {d: 1 / 3, b: 1 / 7, a: 0.25}, {b: 0.75, c: 0.2}]
    write_generated(tmp_path / "town0", images, labels)
    found = client_of(add_to(tmp_path)).generated
    assert len(found) == 4
    assert found.labels.tolist() == [0, 1, 3, 3]
    assert found.classes.tolist() == [[0, 0, 0], [1, 2, 0], [3, 0, 0], [3, 1, 0]]
    expected = [[1.0, 0.0, 0.0], [0.75, 0.2, 0.0], [0.1, 0.0, 0.0], [1 / 3, 1 / 7, 0.25]]
    assert found.weights.dtype == np.float32
    assert np.array_equal(found.weights, np.array(expected, dtype=np.float32))
    assert torch.equal(found.images.decode(SIZE), images[[1, 3, 0, 2]])
    assert not list(tmp_path.rglob("*.tmp"))
    rows = [line.split(",") for line in (tmp_path / "town0" / "labels.csv").read_text().splitlines()[1:]]
    written = [(int(pid), float(weight)) for _, pid, weight in rows]
    assert written == [pair for label in labels for pair in label.items()], "bit for bit"
    files = [f"{next(iter(label)):04d}_{i:06d}.png" for i, label in enumerate(labels) for _ in label]
    assert [name for name, *_ in rows] == files


def test_the_first_line_says_the_place_wherever_the_others_stand(tmp_path):
    client = client_of(make_data())
    a, b, c, *_ = client.train.identities.tolist()
    write_generated(tmp_path / "town0", draw(2), [{a: 1.0}, {a: 1.0}])
    one, two = sorted(path.name for path in tmp_path.rglob("*.png"))
    lines = [HEADER, f"{one},{c},0.2", f"{two},{b},0.3", f"{one},{a},0.5", f"{two},{a},0.7", f"{one},{b},0.3000005"]
    (tmp_path / "town0" / "labels.csv").write_text("\n".join(lines))
    found = client_of(add_to(tmp_path)).generated
    assert found.labels.tolist() == [1, 2]
    soft = [dict(zip(of, of_weights, strict=True)) for of, of_weights in zip(found.classes, found.weights, strict=True)]
    assert soft[1] == {2: np.float32(0.2), 0: np.float32(0.5), 1: np.float32(0.3000005)}
    assert (found.classes[0, :2].tolist(), found.weights[0].tolist()) == ([1, 0], np.float32([0.3, 0.7, 0]).tolist())


def test_labels_are_those_of_the_training_images_when_some_identities_are_held_out(tmp_path):
    data = make_data(val="identities")
    client = client_of(data)
    write_for(tmp_path, client, per_identity=1)
    found = client_of(add_to(tmp_path, val="identities")).generated
    assert found.labels.tolist() == list(range(client.num_classes))
    assert client.train.identities.tolist() != list(range(client.num_classes)), "or the test would see no difference"


def test_an_interrupted_call_leaves_nothing_that_is_read_and_can_be_repeated(tmp_path, monkeypatch):
    client, target = client_of(make_data()), tmp_path / "town0"
    labels = [{pid: 1.0} for pid in client.train.identities[:3].tolist()]

    def stop(*args, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("fedsim.data.generated.csv.writer", stop)
        with pytest.raises(KeyboardInterrupt):
            write_generated(target, draw(3), labels)
    assert list(tmp_path.iterdir()) == []
    write_generated(target, draw(3), labels)
    assert len(client_of(add_to(tmp_path)).generated) == 3
    with pytest.raises(DataError, match="holds generated images; remove it"):
        write_generated(target, draw(3), labels)
    (target / "labels.csv").unlink()
    with pytest.raises(DataError, match=r"town0/labels\.csv: cannot be read"):
        _ = add_to(tmp_path).federated
    with pytest.raises(DataError, match="is not an empty folder; remove it"):
        write_generated(target, draw(3), labels)


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (draw(2).float(), [{1: 1.0}, {1: 1.0}], "give uint8"),
        (draw(2)[:, :1], [{1: 1.0}, {1: 1.0}], "give uint8"),
        (draw(2), [{1: 1.0}], "2 images and 1 labels"),
        (draw(0), [], "0 images and 0 labels"),
        (draw(2), [{1: 1.0}, {}], r"a label \{\}; give identities"),
        (draw(2), [{1: 1.0}, {1: 0.5, 2: 0.0}], "a label {1: 0.5, 2: 0.0}; give identities"),
        (draw(2), [{1: 1.0}, {1: 1.5}], "a label {1: 1.5}"),
        (draw(2), [{1: 1.0}, {1: float("nan")}], "a label {1: nan}"),
        (draw(2), [{1: 1.0}, {1: 0.5, 2: -0.25}], "a label"),
        (draw(2), [{1: 1.0}, {1: 0.5, 2: 0.50001}], "a sum of at most 1"),
    ],
)
def test_nothing_is_written_of_what_does_not_fit_together(images, labels, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        write_generated(tmp_path / "town0", images, labels)
    assert not (tmp_path / "town0").exists()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["name,pid,weight", "a.png,1,1"], "does not begin with the columns file,pid,weight"),
        (["file,pid,weight", "a.png,1,1,1"], "line 2: has more than 3 columns"),
        ([HEADER], "lists no images"),
        ([HEADER, "b.png,1,1"], "line 2: there is no image 'b.png'"),
        ([HEADER, "../town0/a.png,1,1"], "line 2: there is no image '../town0/a.png'"),
        ([HEADER, ",1,1"], "line 2: there is no image ''"),
        ([HEADER, "a.png,1,0.5", "a.png,1,0.5"], "line 3: a.png is listed twice with identity 1; remove a line"),
        ([HEADER, "a.png,1,0.5", "a.png,01,0.25"], "line 3: a.png is listed twice with identity 1; remove a line"),
        (
            [HEADER, "a.png,1,0.5", "a.png,2,0.6", "a.png,3,0.1"],
            "line 3: the weights of a.png sum to 1.1; the sum must be at",
        ),
        (
            [HEADER, "a.png,1,0.5", "a.png,2,0.500002"],
            "line 3: the weights of a.png sum to 1; the sum must be at most 1",
        ),
        ([HEADER, "a.png,1,0.5", "a.png,2,0"], "line 3: the weight '0' of a.png is not a number in"),
        ([HEADER, "a.png,1,0.5", "a.png,999,0.5"], "line 3: client town0 does not train on identity '999'"),
        ([HEADER, "a.png,999,1"], "line 2: client town0 does not train on identity '999' of a.png"),
        ([HEADER, f"a.png,{'9' * 5_000},1"], "line 2: client town0 does not train on identity '9999"),
        ([HEADER, "a.png,one,1"], "client town0 does not train on identity 'one'"),
        ([HEADER, "a.png"], "line 2: the weight '' of a.png"),
        ([HEADER, "a.png,1,0"], "the weight '0' of a.png is not a number in"),
        ([HEADER, "a.png,1,1.01"], "the weight '1.01' of a.png"),
        ([HEADER, "a.png,1,nan"], "the weight 'nan' of a.png"),
    ],
)
def test_labels_that_are_wrong_are_refused_in_one_line(lines, message, tmp_path):
    write_generated(tmp_path / "town0", draw(1), [{1: 1.0}])
    (tmp_path / "town0" / "0001_000000.png").rename(tmp_path / "town0" / "a.png")
    (tmp_path / "town0" / "labels.csv").write_text("\n".join(lines))
    with pytest.raises(DataError) as caught:
        _ = add_to(tmp_path).federated
    assert message in str(caught.value)
    assert "town0/labels.csv" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_folders_that_are_not_there(tmp_path, caplog):
    with pytest.raises(DataError, match=r"data\.generated\.root: .*nowhere is not there: no such folder"):
        _ = add_to(tmp_path / "nowhere").federated
    with pytest.raises(DataError, match="holds no folder of a client; expected town0, town1, town2"):
        _ = add_to(tmp_path).federated
    write_for(tmp_path, client_of(make_data(), "town1"))
    with caplog.at_level(logging.WARNING, logger="fedsim"):
        data = add_to(tmp_path)
        assert [c.generated is not None for c in data.federated.clients] == [False, True, False]
    assert caplog.messages == [f"{tmp_path}: without generated images: town0, town2"]


@pytest.mark.parametrize("share", [0.0, -0.1, 1.1])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(ConfigError, match=r"data\.generated\.share"):
        Generated(root="x", share=share)


def test_clients_that_cluster_are_refused(root):
    model = make_model(FedPav(), client=LocalTraining(batch_size=8, cluster=Clustering()))
    with pytest.raises(ConfigError, match=r"data\.generated: client town0 has no identities"):
        model.assemble(add_to(root), 0, 1, CPU)


# -- batches -----------------------------------------------------------------------------------------------------------


def choose_loop(labels, generated, share, generator):
    """Who takes which place, image by image: -1 or the number of a generated image."""
    chosen = []
    for label in labels.tolist():
        taken, which = torch.rand(2, generator=generator, dtype=torch.float64).tolist()
        own = [row for row, of in enumerate(generated.labels.tolist()) if of == label]
        chosen.append(own[int(which * len(own))] if own and taken < share else -1)
    return chosen


def mixture(labels, share, classes=None, weights=None, num_classes=4):
    labels = np.array(labels)
    classes = labels[:, None] if classes is None else np.array(classes)
    weights = np.ones_like(classes) if weights is None else np.array(weights)
    images = draw(len(labels), seed=1)
    generated = GeneratedImages(ImageArray(np.empty(0)), labels, classes, weights.astype(np.float32), share)
    return Mixture(generated, HeldPixels(images, CPU), num_classes), generated, images


def soft_loop(generated, row):
    """The soft label of a generated image: identity -> weight."""
    pairs = zip(generated.classes[row].tolist(), generated.weights[row].tolist(), strict=True)
    return {k: weight for k, weight in pairs if weight > 0}


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_places_are_those_of_plain_loops(share):
    mixed, generated, _ = mixture([0, 0, 0, 1, 3, 3], share)
    labels = torch.randint(0, 4, (50,), generator=torch.Generator().manual_seed(2))
    found = mixed.choose(labels, torch_generator("a"))
    assert found.tolist() == choose_loop(labels, generated, share, torch_generator("a"))
    assert (found[labels == 2] == -1).all()  # nobody has generated images of it
    assert (found[labels != 2] >= 0).any()


def test_the_share_is_what_is_expected_and_all_images_are_equally_probable():
    mixed, _, _ = mixture([0, 0, 0, 1, 2, 2, 3], share=0.25)
    labels = torch.arange(4).repeat(20_000)
    found = mixed.choose(labels, torch_generator("b"))
    assert float((found >= 0).double().mean()) == pytest.approx(0.25, abs=0.01)
    for label, rows in enumerate(([0, 1, 2], [3], [4, 5], [6])):
        of_label = found[(labels == label) & (found >= 0)]
        assert sorted(set(of_label.tolist())) == rows
        for row in rows:
            assert float((of_label == row).double().mean()) == pytest.approx(1 / len(rows), abs=0.03)


def test_images_and_soft_labels_are_those_of_who_takes_the_place():
    classes = [[0, 3, 1], [1, 0, 2], [1, 0, 0], [2, 0, 0]]  # the last two are padded, one with a label that it has
    weights = [[0.1, 0.2, 0.3], [0.2, 0.5, 0.3], [0.3, 0.25, 0.0], [0.4, 0.0, 0.0]]
    mixed, generated, new = mixture([0, 1, 1, 2], 0.6, classes, weights)
    batches = [torch.tensor([0, 1, 2, 3, 1, 2, 1, 1]), torch.tensor([3, 3]), torch.tensor([1, 0, 1])]
    real = [draw(len(labels), seed=5 + i) for i, labels in enumerate(batches)]
    before = [images.clone() for images in real]
    stream = torch_generator("c")
    taken = set()
    for i, (images, targets) in enumerate(mixed.mix(iter(real), batches, torch_generator("c"))):
        assert targets.shape == (len(batches[i]), 4)
        assert targets.dtype == torch.float32
        for place, row in enumerate(choose_loop(batches[i], generated, 0.6, stream)):
            assert torch.equal(images[place], before[i][place] if row < 0 else new[row])
            soft = {int(batches[i][place]): 1.0} if row < 0 else soft_loop(generated, row)
            assert targets[place].tolist() == [soft.get(k, 0.0) for k in range(4)]
            taken.add(row)
    assert i == 2
    assert taken == {-1, 0, 1, 2, 3}
    assert all(torch.equal(a, b) for a, b in zip(real, before, strict=True))  # they may be parts of mapped files


# -- local training ----------------------------------------------------------------------------------------------------


class Smooth(nn.Sequential):
    """A backbone without kinks: where a maximum or a ReLU decides, a last bit soon makes another model."""

    out_channels = 8

    def __init__(self):
        super().__init__(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.Tanh(), nn.Conv2d(8, 8, 3, stride=2))


def smooth():
    torch.manual_seed(0)
    return Smooth()


def reference_local(client, rounds, epochs, share, smoothing, generated, new):
    """Local training with generated images, in nothing but loops."""
    backbone = smooth()
    torch.manual_seed(0)
    model = ReIDModel(backbone, Neck(kind="bnneck", dropout=0.0)).train()
    head = nn.Linear(model.num_features, client.num_classes)
    nn.init.normal_(head.weight, std=0.001, generator=torch_generator(0, client.name, "head"))
    nn.init.zeros_(head.bias)
    images, labels = client.train.images.decode(SIZE), torch.from_numpy(client.labels)
    for t in range(rounds):
        optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=LR, momentum=0.9)
        order = torch_generator(0, t, client.name, "batches")
        places = torch_generator(0, t, client.name, "generated images")
        for _ in range(epochs):
            for index in shuffled_batches(client.num_images, 8, order):
                batch, soft = images[index].clone(), [{y: 1.0} for y in labels[index].tolist()]
                for place, row in enumerate(choose_loop(labels[index], generated, share, places)):
                    if row >= 0:
                        batch[place], soft[place] = new[row], soft_loop(generated, row)
                logits = head(model(normalise_images(batch)).neck)
                # the loss is linear in the target: that of each identity, times its weight
                terms = [
                    weight * F.cross_entropy(z[None], torch.tensor([k]), label_smoothing=smoothing)
                    for z, weights in zip(logits, soft, strict=True)
                    for k, weight in weights.items()
                ]
                optimizer.zero_grad()
                (sum(terms) / len(index)).backward()
                optimizer.step()
    return model


def test_local_training_equals_plain_loops(tmp_path):
    source = Some("town0")
    plain = client_of(make_data(source))
    ids = plain.train.identities.tolist()
    labels = []
    for a, b in pairwise(ids[:-1]):
        labels += [{a: 0.25}, {a: 0.2, b: 0.5}, {a: 0.7, ids[-1]: 0.3}]
    write_generated(tmp_path / "town0", draw(len(labels)), labels)
    data = add_to(tmp_path, share=0.4, source=source)
    generated = client_of(data).generated
    training = LocalTraining(batch_size=8, local_epochs=2, optimizer=sgd)
    model = make_model(FedPav(), backbone=smooth(), client=training, objective=Objective(label_smoothing=0.1))
    fit(model, data, rounds=1)
    expected = reference_local(plain, 1, 2, 0.4, 0.1, generated, generated.images.decode(SIZE)).state_dict()
    flat_model = model.parts.models["smooth"]
    for entry in flat_model.flat.shared_entries:
        found = vector(model, "smooth")[entry.span].view(entry.shape)
        assert torch.allclose(found, expected[entry.name], rtol=0, atol=1e-4), entry.name


def test_clients_without_a_folder_and_runs_without_generated_images_have_the_same_bits(tmp_path):
    for name in ("town0", "town2"):
        write_for(tmp_path, client_of(make_data(), name))
    moving = {"augmentation": Augmentation(pad=2, flip=0.5)}
    off, some = fit(make_model(Local()), make_data(**moving)), fit(make_model(Local()), add_to(tmp_path, **moving))
    same = {
        name: torch.equal(off.parts.clients[name].private, some.parts.clients[name].private)
        for name in off.parts.clients
    }
    assert same == {"town0": False, "town1": True, "town2": False}


@pytest.mark.parametrize("waiting", ["files", "mapped"])
def test_where_images_wait_changes_no_bit(waiting, market_tree, tmp_path):
    source = MarketFolders(str(market_tree), names=["north", "south"])
    for client in make_data(source).federated.clients:
        write_for(tmp_path / "generated", client)
    how = {"cache": "none"} if waiting == "files" else {"cache": "host", "cache_dir": str(tmp_path / "decoded")}
    found = [
        fit(make_model(Local()), add_to(tmp_path / "generated", source=source, workers=1, **options), rounds=1)
        for options in ({}, how)
    ]
    for name, client in found[0].parts.clients.items():
        assert torch.equal(client.private, found[1].parts.clients[name].private)


@dataclass(frozen=True, kw_only=True)
class Watched(FedPav):
    """Remembers the weights."""

    seen: list = field(default_factory=list)

    def weights(self, reports):
        self.seen.append(super().weights(reports))
        return self.seen[-1]


def test_generated_images_count_in_no_weight_and_in_no_validation_or_test_set(root):
    off = fit(make_model(Watched()), rounds=1)
    on = fit(make_model(Watched()), add_to(root, share=1.0), rounds=1)
    assert not torch.equal(vector(off), vector(on))
    assert on.settings.method.seen == off.settings.method.seen
    assert [c.num_images for c in on.parts.federated.clients] == [c.num_images for c in off.parts.federated.clients]
    assert sorted(on.parts.federated.tests) == sorted(off.parts.federated.tests)
    for name, found in on.parts.federated.tests.items():
        assert len(found.query) == len(off.parts.federated.tests[name].query)
        assert len(found.gallery) == len(off.parts.federated.tests[name].gallery)


def test_all_views_of_a_batch_show_the_same_images(root):
    model = make_model(FedPav())
    fit(model, add_to(root), rounds=1)
    client = model.parts.clients["town0"]
    client.begin_round(1, 1.0, "32-true", lambda report: None)
    real = torch.cat([client.data.train.images.decode(SIZE), client.data.generated.images.decode(SIZE)])
    known = {tuple(image.flatten().tolist()): row for row, image in enumerate(normalise_images(real))}
    generated = 0
    for batch in client.batches(0, views=2):
        rows = [known[tuple(image.flatten().tolist())] for image in batch.images]
        assert torch.equal(batch.images, batch.views[0])
        is_new = torch.tensor(rows) >= client.data.num_images
        one_hot = F.one_hot(batch.labels, client.num_classes)
        assert torch.equal(batch.targets, one_hot * torch.where(is_new, 0.5, 1.0)[:, None])
        labels = np.concatenate([client.data.labels, client.data.generated.labels])
        assert labels[rows].tolist() == batch.labels.tolist()
        generated += int(is_new.sum())
    assert generated > 0
    client.leave()


METHODS = [
    SKA(), FedReID(), FedReIDFineTune(), FedCAPR(), FedKLPR(prune=False, weighting="size"), Ditto(), MOON(), PFedMe(),
    APFL(), FedBABU(fine_tune_epochs=1), FedRep(head_epochs=1), FedSAM(),
]  # fmt: skip


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_soft_labels_reach_the_losses_of_every_method(method, tmp_path, monkeypatch):
    seen = []
    own = F.cross_entropy

    def listen(logits, labels, **options):
        seen.append(labels.is_floating_point() and bool((labels.sum(1) < 0.75).any()))
        return own(logits, labels, **options)

    source = Some("town0")
    write_for(tmp_path, client_of(make_data(source)))
    monkeypatch.setattr("fedsim.functional.losses.F.cross_entropy", listen)
    fit(make_model(method), add_to(tmp_path, share=1.0, source=source), rounds=1)
    assert set(seen) == {True}


# -- any number of ranks -----------------------------------------------------------------------------------------------


def train_mixed(root, devices=1):
    """Weights of the server and of all clients."""
    model = make_model(FedReID(), client=LocalTraining(batch_size=8, local_epochs=2, optimizer=sgd))
    fit(model, add_to(root, augmentation=Augmentation(pad=2, flip=0.5)), devices=devices)
    return {"server": vector(model).clone()} | {name: c.private.clone() for name, c in model.parts.clients.items()}


def write_weights(folder):
    """What each of two ranks does."""
    found = train_mixed(folder / "generated", devices=2)
    torch.save(found, folder / f"{os.getpid()}.pt")


@pytest.mark.dist
def test_two_ranks_have_the_bits_of_one(root, tmp_path):
    run_on_ranks(write_weights, tmp_path)
    alone = train_mixed(root)
    parts = [torch.load(path, weights_only=True) for path in tmp_path.glob("*.pt")]
    assert len(parts) == 2
    for part in parts:
        assert part.keys() == alone.keys() == {"server", "town0", "town1", "town2"}
        for name, weights in part.items():
            assert torch.equal(weights, alone[name]), name
