"""What a user's module meets in a trial and in a session: the run's batches, and lines that name place and remedy."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from fedsim.core.errors import ConfigError
from fedsim.methods import IFCA, FedAvg
from fedsim.training.batch import Batch
from fedsim.training.own_module.module_batch import BatchForm, DictBatch, PairBatch, TripleBatch, ViewsBatch, described
from fedsim.training.settings import LocalTraining
from lightning_modules import Small, federation
from small import fit, make_data


def line_of(kind, **options):
    model = federation(FedAvg(), kind, **options)
    with pytest.raises(ConfigError) as caught:
        model.assemble(make_data(), 0, 1, torch.device("cpu"))
    return str(caught.value)


def test_a_module_may_need_the_runs_size_of_batches_as_a_queue_does():
    class Queue(Small):
        def training_step(self, batch, batch_idx):
            if len(batch[1]) != 12:
                raise ValueError("a batch must fill the queue")
            return super().training_step(batch, batch_idx)

    client = LocalTraining(batch_size=12, drop_partial=True)
    fit(federation(FedAvg(), Queue, client=client), rounds=1)
    line = line_of(Queue, client=LocalTraining(batch_size=10, drop_partial=True))
    assert "in batches of 10 (ValueError: a batch must fill the queue at test_module_lines.py:" in line


def test_a_line_names_the_place_of_an_error_without_words():
    class Fails(Small):
        def training_step(self, batch, batch_idx):
            raise ValueError

    assert "(ValueError at test_module_lines.py:" in line_of(Fails)


class Dict(Small):
    def training_step(self, batch, batch_idx):
        return cross_entropy(self.classifier(self.embed(batch["x"])), batch["labels"])


class Pair(Small):
    def training_step(self, batch, batch_idx):
        images, labels = batch
        return cross_entropy(self.classifier(self.embed(images)), labels)


class Fixed(Small):
    def __init__(self):
        super().__init__(3)


@pytest.mark.parametrize(
    ("kind", "form", "remedy"),
    [
        (Dict, PairBatch(), "; training_step gets (images, labels); see model.module_batch"),
        (Dict, DictBatch(), "; training_step gets {images: images, labels: labels}; see model.module_batch"),
        (Pair, TripleBatch(), "; training_step gets (images, labels, cameras); see model.module_batch"),
        (Pair, ViewsBatch(), "; training_step gets ([images, view], labels, cameras); see model.module_batch"),
    ],
)
def test_a_line_about_another_form_says_what_training_step_gets(kind, form, remedy):
    assert line_of(kind, module_batch=form).endswith(remedy)


def test_an_error_that_says_nothing_of_the_form_has_no_remedy():
    class Asks(Small):
        def training_step(self, batch, batch_idx):
            return {}["margin"]

    assert "module_batch" not in line_of(Asks)


def test_a_form_of_a_user_is_described_as_far_as_it_is_known():
    batch = Batch(torch.zeros(2, 3), torch.zeros(2), rows=torch.arange(2))
    assert described(((batch.rows, batch.images * 2), "x"), batch) == "((rows, Tensor), str)"


def test_a_module_with_too_few_classes_is_told_the_labels():
    end = "; labels are 0 to 7; give the module 8 classes, or an argument num_classes"
    assert line_of(Fixed).endswith(end)


# -- a session ---------------------------------------------------------------------------------------------------------


class Rows(BatchForm):
    """(images, labels, rows)."""

    def __call__(self, batch):
        return batch.images, batch.labels, batch.rows


class Reads(Small):
    """Looks at its loader, and at the positions of its images."""

    def training_step(self, batch, batch_idx):
        loader, (images, labels, rows) = self.trainer.train_dataloader, batch
        if rows is not None:
            assert rows.shape == labels.shape
            assert rows.dtype is torch.int64
        size = loader.batch_size
        SEEN.append((size, loader.drop_last, [*loader.sampler][batch_idx * size :][: len(labels)], rows, labels))
        return super().training_step((images, labels), batch_idx)


SEEN: list = []
"""what it has seen: sessions have copies of a module"""


@pytest.mark.parametrize("drop_partial", [False, True])
def test_a_loader_has_the_attributes_of_lightnings_own(drop_partial):
    SEEN.clear()
    client = LocalTraining(batch_size=8, drop_partial=drop_partial)
    model = fit(federation(FedAvg(), Reads, module_batch=Rows(), client=client), rounds=1)
    sessions = SEEN[1:]  # but for the trial
    assert sessions
    images = [part.images.labels for part in model.parts.clients.values()]
    for size, drops, sampled, rows, labels in sessions:
        assert (size, drops) == (8, drop_partial)
        assert sampled == rows.tolist()
        assert any(len(own) > max(sampled) and torch.equal(own[rows], labels) for own in images)


def test_images_without_augmentation_have_their_positions_too():
    places = []

    class Keeps(Small):
        def training_step(self, batch, batch_idx):
            places.append(batch[2])
            return super().training_step(batch[:2], batch_idx)

    fit(federation(IFCA(), Keeps, module_batch=Rows()), rounds=1)
    assert all(place is not None for place in places)


def test_a_loader_says_what_it_lacks():
    class Asks(Small):
        def on_train_start(self):
            assert getattr(self.trainer.train_dataloader, "sampling", None) is None
            self.workers = self.trainer.train_dataloader.num_workers

    line = line_of(Asks)
    assert "train_dataloader has no num_workers: fedsim makes the batches; it has batch_size, dataset" in line


def test_an_error_of_a_session_keeps_its_traceback_and_notes_client_round_and_batch():
    class Fails(Small):
        def training_step(self, batch, batch_idx):
            if self.current_epoch == 2:
                raise ValueError("the end")
            return super().training_step(batch, batch_idx)

    with pytest.raises(ValueError, match="the end") as caught:
        fit(federation(FedAvg(), Fails), rounds=2)
    assert caught.value.__notes__ == ["client town0, round 2, batch of 8 images"]


def test_a_module_that_saves_other_hyperparameters_is_told_how():
    class Config(Small):
        def __init__(self, cfg: dict, num_classes: int = 8):
            super().__init__(num_classes)
            self._hparams.clear()
            self.save_hyperparameters(cfg)

    line = line_of(Config({"lr": 0.05}))
    assert "hparams lack cfg; call self.save_hyperparameters() without arguments in __init__, or give" in line
