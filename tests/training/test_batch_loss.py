"""Losses of a user's own: what they see, and the three ways in which they are given."""

from collections import Counter

import pytest
import torch
import yaml
from jsonargparse import ArgumentParser
from own_losses import Contrast, Seen, Squares

from fedsim.core.errors import ConfigError
from fedsim.data import Augmentation
from fedsim.methods import MOON, FedPav
from fedsim.training.metric_loss import MetricLoss
from fedsim.training.objective import Objective
from fedsim.training.settings import LocalTraining
from small import fit, make_data, make_model, refuse, sgd, state_of


def trained(loss, method=None, data=None, rounds=2, **client):
    training = LocalTraining(batch_size=8, optimizer=sgd, **client)
    model = make_model(method or FedPav(), client=training, objective=Objective(metric=loss))
    return fit(model, data or make_data(augmentation=Augmentation(pad=1, flip=0.5)), rounds)


def assert_same(a, b):
    assert a.keys() == b.keys()
    assert all(torch.equal(tensor, b[name]) for name, tensor in a.items())


def test_a_loss_sees_identities_cameras_and_the_round():
    loss = Seen()
    model = trained(loss)
    clients = model.parts.clients
    assert {seen.round for seen in loss.seen} == {0, 1}
    expected = Counter(
        pair
        for c in clients.values()
        for pair in zip(c.data.labels.tolist(), c.data.train.camids.tolist(), strict=True)
    )
    first = [seen for seen in loss.seen if seen.round == 0]
    found = Counter(pair for seen in first for pair in zip(seen.labels.tolist(), seen.cameras.tolist(), strict=True))
    assert found == expected
    assert max(expected.values()) < expected.total() / 4, "nothing could be mixed up"
    for seen in loss.seen:
        (images, width), (classes, inputs) = seen.features.neck.shape, seen.head.shape
        assert seen.logits.shape == (images, classes)
        assert len(seen.labels) == len(seen.cameras) == images
        assert inputs == width
        assert len(seen.views) == 1


class Looks(FedPav):
    """Compares the cameras of each batch with those of its images, which are not augmented."""

    def loss(self, client, batch):
        images = client.images
        for whole in images.plain_batches(torch.arange(len(images.labels)), len(images.labels)):
            same = (batch.images[:, None] == whole.images[None]).flatten(2).all(2)
            assert same.any(1).all()
            for row, camera in zip(same, batch.cameras, strict=True):
                assert camera in images.cameras[row]
        assert batch.round == client.round
        return super().loss(client, batch)


@pytest.mark.parametrize("micro_batch", [None, 4])
def test_cameras_belong_to_their_images(micro_batch):
    loss = Seen()
    trained(loss, Looks(), data=make_data(), micro_batch=micro_batch)
    assert max(len(seen.labels) for seen in loss.seen) == (micro_batch or 8)
    assert all(len(seen.cameras) == len(seen.labels) for seen in loss.seen)


def test_two_views_of_each_image_are_compared():
    model, plain = trained(Contrast(weight=0.5)), trained(None)
    values = {name: value for name, value in model.round_metrics.items() if name.endswith("/metric")}
    assert values
    assert min(values.values()) > 0, "views differ"
    assert any(not torch.equal(t, state_of(plain)[name]) for name, t in state_of(model).items())
    same = trained(Contrast(weight=0.5), data=make_data())
    assert all(value == 0 for name, value in same.round_metrics.items() if name.endswith("/metric"))
    assert model.settings.objective.num_views == 2


def test_a_method_with_a_forward_pass_of_its_own_is_refused():
    with pytest.raises(ConfigError, match="Contrast compares 2 views, and the method computes one") as caught:
        trained(Contrast(), MOON())
    assert len(str(caught.value).splitlines()) == 1


def test_a_module_its_class_and_a_wrapped_module_give_the_same_bits():
    """The class_path as a name, a module in place of it, and a module as the loss."""
    by_name = trained(MetricLoss(name="own_losses.Squares", options={"scale": 0.5}))
    assert_same(state_of(by_name), state_of(trained(Squares(0.5))))
    assert_same(state_of(by_name), state_of(trained(MetricLoss(name=Squares(0.5)))))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Objective(metric={"name": "CircleLoss"}), r"metric: expected MetricLoss, "),
        (lambda: Objective(metric="CircleLoss"), r"metric: expected MetricLoss, "),
        (lambda: Objective(metric=Squares), r"metric: expected MetricLoss, "),
        (lambda: MetricLoss(name={"a": 1}), r"metric\.name: dict is no name and no module"),
        (lambda: MetricLoss(name=Squares(), options={"scale": 2.0}), r"metric\.options: Squares is made already"),
        (lambda: Objective(metric=torch.nn.PReLU()), r"metric\.name: PReLU learns weight, which no client would keep"),
        (lambda: Contrast(weight=0.0), r"metric\.weight: 0.0 is not positive"),
    ],
)
def test_what_is_no_loss_is_one_line(make, message):
    with pytest.raises(ConfigError, match=rf"^model\.objective\.{message}") as caught:
        make()
    assert len(str(caught.value).splitlines()) == 1


def parsed(content):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Objective, "objective")
    return parser.instantiate(parser.parse_object({"objective": yaml.safe_load(content)})).objective


def test_configs_name_a_loss_in_both_ways():
    own = parsed("metric: {class_path: own_losses.Contrast, init_args: {weight: 0.5, margin: 0.1}}").metric
    assert isinstance(own, Contrast)
    assert (own.weight, own.margin) == (0.5, 0.1)
    module = parsed("metric: {class_path: own_losses.Squares, init_args: {scale: 3.0}}").metric
    assert (module.name, module.weight) == ("Squares", 1.0)
    named = parsed("metric: {name: own_losses.Squares, weight: 2.0, features: pool}").metric
    assert (named.weight, named.features) == (2.0, "pool")
    assert parsed("cross_entropy: 2.0").metric is None


def test_a_wrong_class_is_one_line_on_the_command_line(capsys, monkeypatch):
    for value in (
        "{class_path: own_losses.Nothing}",
        "{kind: CircleLoss}",
        "{class_path: own_losses.Squares, scale: 1}",
    ):
        line = refuse(capsys, "fit", "--config", "quickstart", f"--model.objective.metric={value}")
        assert "model.objective.metric" in line
