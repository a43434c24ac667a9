"""Small federations for the tests of the round: built, trained and looked at in one process."""

from dataclasses import replace
from types import SimpleNamespace

import torch

from fedsim.__main__ import main
from fedsim.cli.describe import FederatedTrainer
from fedsim.data import Augmentation, FederatedDataModule, ReIDSource, SyntheticReID
from fedsim.evaluation.settings import Evaluation
from fedsim.federation.federation import Federation, evaluator_of
from fedsim.methods.declared import message_to
from fedsim.models import Neck, SmallCNN
from fedsim.strategy.strategy import FederatedStrategy
from fedsim.training.messages import Measured
from fedsim.training.settings import LocalTraining

LR = 0.05
ROUNDS = 2


def sgd(params):
    return torch.optim.SGD(params, lr=LR, momentum=0.9)


def make_data(source=None, **options):
    source = source or SyntheticReID(clients=3, unseen=1, scale=0.2)
    defaults = {"size": (32, 16), "val": "none", "augmentation": Augmentation(pad=0, flip=0.0)}
    return FederatedDataModule(source, **defaults | options)


def labels_of(method):
    """The numbering of identities with which a method can train: people of the drawn towns have common numbers."""
    return "common" if "common_classes" in method.requires else "own"


def make_model(method, **options):
    torch.manual_seed(0)  # the backbone's initial weights
    defaults = {
        "backbone": SmallCNN(width=8),
        "neck": Neck(kind="bnneck", dropout=0.0),
        "client": LocalTraining(batch_size=8, optimizer=sgd),
        "evaluation": Evaluation(test_during_fit=False),
    }
    return Federation(method, **defaults | options)


def fit(model, data=None, rounds=ROUNDS, devices=1, ckpt_path=None, **options):
    defaults = {
        "accelerator": "cpu", "check_val_every_n_epoch": rounds, "limit_val_batches": 0, "callbacks": [],
        "logger": False,
    }  # fmt: skip
    trainer = FederatedTrainer(
        devices=devices, strategy=FederatedStrategy(), max_epochs=rounds,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        use_distributed_sampler=False, **defaults | options,
    )  # fmt: skip
    trainer.fit(model, datamodule=data or make_data(), ckpt_path=ckpt_path)
    return model


def receive(client, method, server):
    """Give a client the server's message, as a session and an evaluation do before the method's hooks."""
    client.received = message_to(method, server, client.model.arch)


def new_evaluator(model, settings=None, open_images=None):
    """Make an evaluator of a trained federation that has read no images, perhaps with other settings or images."""
    data = SimpleNamespace(open_test=open_images or model.evaluator.extractor.open_images)
    settings = replace(model.settings, evaluation=settings or model.settings.evaluation)
    return evaluator_of(settings, model.parts, data, model.trainer)


def signals_of(upload):
    """The signals of an upload as the host reads them."""
    return {
        name: signal.read(signal.values.flatten().tolist()) if isinstance(signal, Measured) else signal
        for name, signal in upload.signals.items()
    }


def vector(model, arch="smallcnn"):
    return model.server.vector(arch)


def state_of(model):
    """All that a run has learnt: the global model, and each client's stored tensors."""
    private = {
        f"{name} {key}": tensor
        for name, client in model.parts.clients.items()
        for key, tensor in client.private_state().items()
    }
    return {"global": vector(model), **private}


def named(model, arch="smallcnn"):
    """The global model by tensor name."""
    entries = model.parts.models[arch].flat.shared_entries
    return {e.name: vector(model, arch)[e.span].view(e.shape) for e in entries}


class Some(ReIDSource):
    """Chosen domains of the synthetic source, in a chosen order."""

    def __init__(self, *names):
        self.names = names

    def domains(self):
        by_name = {d.name: d for d in SyntheticReID(clients=3, unseen=1, scale=0.2).domains()}
        return [by_name[name] for name in self.names]


def refuse(capsys, *args):
    """Run a command that must fail; return its one line."""
    capsys.readouterr()  # what came before
    code = main([str(arg) for arg in args])
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line.strip()]
    assert code == 2, captured
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("fedsim: error: ")
    assert "Traceback" not in captured.err
    return lines[0]
