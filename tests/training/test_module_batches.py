"""Forms of the batches of a user's module: those of public projects, against Lightning alone on the same batches."""

from functools import partial

import pytest
import torch
from torch.nn.functional import cross_entropy, mse_loss

from alone import differences, recording, train_alone
from fedsim.core.errors import ConfigError
from fedsim.data import Augmentation, SyntheticReID
from fedsim.methods import IFCA, FedALA, FedAvg, FedSAM
from fedsim.training.batch import Batch
from fedsim.training.own_module.module_batch import BatchForm, DictBatch, PairBatch, TripleBatch, ViewsBatch
from lightning_modules import Small, federation
from small import fit, make_data


class Triple(Small):
    """The (image, person, camera) of many re-ID projects."""

    def training_step(self, batch, batch_idx):
        images, people, cameras = batch
        assert cameras.dtype is people.dtype is torch.int64
        assert cameras.shape == people.shape == (len(images),)
        return cross_entropy(self.classifier(self.embed(images)), people) + cameras.float().mean() * 0


class Extractor(Small):
    """OML's ExtractorModule: a dict, and names of its parts as arguments."""

    def __init__(self, num_classes: int, input_tensors_key: str = "input_tensors", labels_key: str = "labels"):
        super().__init__(num_classes)
        self.input_tensors_key, self.labels_key = input_tensors_key, labels_key

    def training_step(self, batch, batch_idx):
        batch = {**batch, "embeddings": self.embed(batch[self.input_tensors_key])}
        bs = len(batch[self.labels_key])
        loss = cross_entropy(self.classifier(batch["embeddings"]), batch[self.labels_key])
        self.log("loss", loss.item(), prog_bar=True, batch_size=bs, on_step=True, on_epoch=True)
        return {**batch, "loss": loss}


class Contrast(Small):
    """lightly's SimSiam and its kin: two views, and no use for labels."""

    def training_step(self, batch, batch_idx):
        (x0, x1), _, _ = batch
        assert not torch.equal(x0, x1), "both views have one augmentation"
        z0, z1 = self.embed(x0), self.embed(x1)
        loss = mse_loss(z0, z1.detach()) + mse_loss(z1, z0.detach())
        self.log("train_loss_ssl", loss)
        return loss


class ManyCrops(Small):
    """lightly's DINO reads the views as ``batch[0]``."""

    def training_step(self, batch, batch_idx):
        views, labels = batch[0], batch[1]
        assert len(views) == 3
        return sum(cross_entropy(self.classifier(self.embed(view)), labels) for view in views)


class Turned(BatchForm):
    """A form of a user: (labels, images)."""

    def __call__(self, batch):
        return batch.labels, batch.images


class TurnedModule(Small):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch[::-1], batch_idx)


FORMS = {
    "triple": (Triple, TripleBatch()),
    "dict": (Extractor, DictBatch("input_tensors", "labels")),
    "views": (Contrast, ViewsBatch()),
    "three views": (ManyCrops, ViewsBatch(3)),
    "own": (TurnedModule, Turned()),
}
augmented = partial(make_data, augmentation=Augmentation(pad=2, flip=0.5))


@pytest.mark.parametrize("name", FORMS)
def test_a_form_of_batches_has_the_bits_of_lightning_alone(name):
    kind, form = FORMS[name]
    trainings = []
    model = federation(FedAvg(), kind, module_batch=form)
    with recording(trainings):
        fit(model, augmented(SyntheticReID(clients=1, unseen=1, scale=0.1)), 1)
    [recorded] = trainings
    alone = train_alone(kind(num_classes=model.parts.num_classes["town0"]), recorded)
    assert differences(alone, recorded.end) == []
    assert differences(recorded.start, recorded.end), "nothing has moved"


@pytest.mark.parametrize("form", [PairBatch(), TripleBatch(), DictBatch(cameras="camids"), ViewsBatch()])
def test_a_form_changes_neither_images_nor_their_first_augmentation(form):
    seen = []

    class Looks(Small):
        def training_step(self, batch, batch_idx):
            images, labels, *_ = batch.values() if isinstance(batch, dict) else batch
            images = images[0] if isinstance(images, list) else images
            seen.append((images.clone(), labels.clone()))
            return super().training_step((images, labels), batch_idx)

    expected = fit(federation(FedAvg(), Looks), augmented(), 1)
    first = [*seen]
    seen.clear()
    model = fit(federation(FedAvg(), Looks, module_batch=form), augmented(), 1)
    # but for the random images of the trial
    for (images, labels), (images_of_pair, labels_of_pair) in zip(seen[1:], first[1:], strict=True):
        assert torch.equal(images, images_of_pair)
        assert torch.equal(labels, labels_of_pair)
    assert model.round_metrics["train/images"] == expected.round_metrics["train/images"]


@pytest.mark.parametrize("method", [FedALA(), IFCA(), FedSAM()], ids=lambda method: type(method).__name__)
@pytest.mark.parametrize("name", ["dict", "three views"])
def test_methods_that_ask_for_further_losses_use_the_form(method, name):
    kind, form = FORMS[name]
    model = fit(federation(method, kind, module_batch=form), augmented(), 2)
    assert model.trainer.current_epoch == 2


def test_images_without_augmentation_have_one_view_repeated():
    images = torch.rand(2, 3, 4, 2)
    views, labels, cameras = ViewsBatch(3)(Batch(images, torch.arange(2), (images + 1,), cameras=torch.zeros(2)))
    assert [view.sum() for view in views] == [images.sum(), (images + 1).sum(), images.sum()]
    assert [len(labels), len(cameras)] == [2, 2]


def test_forms_refuse_what_they_cannot_make():
    with pytest.raises(ConfigError, match=r"model\.module_batch\.num_views"):
        ViewsBatch(1)
    with pytest.raises(ConfigError, match=r"model\.module_batch: two of images, labels and cameras have one name"):
        DictBatch("x", "x")
    with pytest.raises(ConfigError, match=r"model\.module: Triple failed in .* \(ValueError: not enough values"):
        fit(federation(FedAvg(), Triple))
