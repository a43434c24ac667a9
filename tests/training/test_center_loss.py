"""Center loss against plain loops, and the centers that clients keep."""

import copy

import pytest
import torch

from fedsim.core.errors import ConfigError
from fedsim.core.placement import place
from fedsim.federation.memory import device_memory
from fedsim.functional.losses import center_loss, moved_centers
from fedsim.methods import FedPav, Local
from fedsim.methods.ditto import Ditto
from fedsim.models.reid import Features
from fedsim.training.batch import Batch
from fedsim.training.centers import CENTERS, score_with_centers
from fedsim.training.flat_model import Output
from fedsim.training.objective import CenterLoss, Objective, supervised_loss
from fedsim.training.settings import LocalTraining
from small import fit, make_data, make_model, sgd


def drawn(num_images, width, num_classes, seed=0):
    """Features [B, D], labels [B] and centers [Z, D]; several images of an identity, and identities without any."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(num_images, width, generator=generator, dtype=torch.float64)
    labels = torch.randint(num_classes // 2, (num_images,), generator=generator)
    return features, labels, torch.randn(num_classes, width, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(("num_images", "width", "num_classes"), [(6, 3, 5), (64, 256, 751)])
def test_loss_and_centers(num_images, width, num_classes):
    """Wen et al., ECCV 2016: Eq. (2), over the number of images, and Eq. (4)."""
    features, labels, centers = drawn(num_images, width, num_classes)
    x, c, total = features.tolist(), centers.tolist(), 0.0
    for i, y in enumerate(labels.tolist()):
        total += sum((x[i][d] - c[y][d]) ** 2 for d in range(width)) / 2
    assert center_loss(features, labels, centers).item() == pytest.approx(total / num_images, rel=1e-12)

    after = copy.deepcopy(c)
    for j in range(num_classes):
        for d in range(width):
            same = [i for i, y in enumerate(labels.tolist()) if y == j]
            delta = sum(c[j][d] - x[i][d] for i in same) / (1 + len(same))
            after[j][d] = c[j][d] - 0.3 * delta
    moved = moved_centers(centers, features, labels, 0.3)
    assert torch.allclose(moved, torch.tensor(after, dtype=torch.float64), rtol=1e-12, atol=1e-14)
    assert len(set(labels.tolist())) < num_images  # identities with several images
    unseen = [j for j in range(num_classes) if j not in labels]
    assert torch.equal(moved[unseen], centers[unseen])


def test_the_gradient_is_the_way_from_the_center():
    """Wen et al., Eq. (3), over the number of images; none reaches the centers."""
    features, labels, centers = drawn(6, 3, 5)
    features.requires_grad_()
    centers.requires_grad_()
    center_loss(features, labels, centers).backward()
    assert torch.allclose(features.grad, (features - centers[labels]).detach() / 6)
    assert centers.grad is None


def trained(objective, method=None, **options):
    client = LocalTraining(batch_size=8, sampler="identity", num_instances=4, optimizer=sgd, **options)
    return make_model(method or FedPav(), client=client, objective=objective)


WITH = Objective(center=CenterLoss(weight=0.05))


def centers_of(model):
    return {name: client.private_state().get(f"kept.{CENTERS}") for name, client in model.parts.clients.items()}


def test_clients_log_it_and_keep_a_center_for_each_identity():
    model = fit(trained(WITH))
    for name, client in model.parts.clients.items():
        parts = [model.round_metrics[f"train/{name}/{part}"] for part in ("cross_entropy", "center")]
        assert parts[0] + 0.05 * parts[1] == pytest.approx(model.round_metrics[f"train/{name}/loss"], rel=1e-5)
        centers = centers_of(model)[name]
        assert centers.shape == (client.num_classes, client.model.network.num_pooled)
        assert centers.any(1).all()


def test_described_memory_has_the_centers():
    memory, data = [], make_data()
    for objective in (WITH, Objective()):
        model = trained(objective)
        model.assemble(data, 0, 1, torch.device("cpu"))
        memory.append(device_memory(model.settings, model.parts, data, place(model.parts.costs, 1, 1), "32-true"))
    centers = [4 * c.num_classes * c.model.network.num_pooled for c in model.parts.clients.values()]
    assert memory[0].states - memory[1].states == sum(centers)
    assert memory[0].kept - memory[1].kept == max(centers)


def test_centers_outlive_the_round(tmp_path):
    """They go on from where they were, also after a stop."""
    whole = fit(trained(WITH), rounds=2)
    half, path = fit(trained(WITH), rounds=1), tmp_path / "first.ckpt"
    half.trainer.save_checkpoint(path)
    resumed = fit(trained(WITH), rounds=2, ckpt_path=path)
    for name, centers in centers_of(half).items():
        assert not torch.equal(centers, centers_of(whole)[name])
    for name, centers in centers_of(whole).items():
        assert torch.equal(centers, centers_of(resumed)[name])


def test_images_gather_around_their_centers():
    """A weight of 0.5 leaves 0.07 +- 0.02 of the distances that a weight of nothing leaves (five seeds)."""

    def distances(weight):
        objective = Objective(center=CenterLoss(weight=weight))
        model = fit(trained(objective, Local(), local_epochs=2), rounds=3)
        return {name: model.round_metrics[f"train/{name}/center"] for name in model.parts.clients}

    free, drawn = distances(1e-6), distances(0.5)
    assert all(drawn[name] < 0.5 * free[name] for name in free)


def test_a_second_model_of_a_client_moves_no_center():
    """Ditto's own model is drawn to the centers of the one that is averaged, so the latter's numbers do not change."""
    ditto, plain = (centers_of(fit(trained(WITH, method))) for method in (Ditto(), FedPav()))
    assert ditto.keys() == plain.keys()
    for name, centers in ditto.items():
        assert torch.equal(centers, plain[name])


@pytest.mark.parametrize("counts", [True, False])
def test_centers_move_in_place_where_the_loss_counts(counts):
    """Captured steps hold their address. The loss is that of the centers before the batch."""
    pool, labels, centers = (tensor.float() if tensor.is_floating_point() else tensor for tensor in drawn(6, 3, 5))
    kept = {CENTERS: centers.clone()}
    output, batch = Output(Features(pool, pool), torch.zeros(6, 5), torch.zeros(5, 3)), Batch(None, labels)
    address = kept[CENTERS].data_ptr()
    scored = score_with_centers(WITH, kept, 5, output, batch, counts=counts)
    assert torch.equal(scored.loss, supervised_loss(WITH, output, batch, centers).loss)
    assert kept[CENTERS].data_ptr() == address
    expected = moved_centers(centers, pool, labels, WITH.center.rate) if counts else centers
    assert torch.equal(kept[CENTERS], expected)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"weight": 0.0}, r"weight: 0.0 is not positive"),
        ({"weight": float("nan")}, r"weight: nan is no finite number"),
        ({"rate": 1.5}, r"rate: 1.5 is not in \[0, 1\]"),
    ],
)
def test_mistakes_are_named(options, line):
    with pytest.raises(ConfigError, match=rf"^model.objective.center\.{line}$"):
        CenterLoss(**options)


def test_alone_it_teaches_nothing():
    with pytest.raises(ConfigError, match="center loss alone pulls all features to one point"):
        Objective(cross_entropy=0.0, center=CenterLoss())


def test_micro_batches_are_refused():
    with pytest.raises(
        ConfigError, match=r"^model.client.micro_batch: center loss updates its centers from whole batches"
    ):
        fit(trained(WITH, micro_batch=4), rounds=1)
