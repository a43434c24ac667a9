"""Small fits in processes of their own: what one leaves in memory cannot help the next."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import secrets
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import Callback
from lightning.fabric.plugins.environments.lightning import find_free_network_port
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from fedsim.core.errors import FedSimError
from fedsim.data import Augmentation, FederatedDataModule, ReIDSource, SyntheticReID
from fedsim.data.federations import LabelScope
from fedsim.data.images import Domain
from fedsim.evaluation.settings import Evaluation
from fedsim.federation.components.selection import RandomFraction
from fedsim.federation.federation import Federation
from fedsim.federation.trainer import Trainer
from fedsim.methods.base import Method
from fedsim.methods.declared import message_to
from fedsim.models import Neck, SmallCNN
from fedsim.models.groups import BODY
from fedsim.testing.findings import described
from fedsim.testing.fingerprint import unsettle
from fedsim.testing.pythons import clean_process, ready, received, sent
from fedsim.testing.watch import Watch
from fedsim.training.own_module.inner_trainer import package_of
from fedsim.training.settings import LocalTraining

ROUNDS = 6
PATIENCE = 420.0
"""seconds after which a fit of seconds is ended; more than silence_timeout, so that ranks say first where they wait"""
_AFTER_A_FAILURE = 20.0
"""seconds that other ranks have to end by themselves"""
_STILL = 2**-39
"""exact sums have a grid of 2**-40"""
_CLIENTS = 5


def small_training() -> LocalTraining:
    """Return one local epoch of batches of 8 images, by plain SGD."""
    return LocalTraining(batch_size=8, optimizer=partial(torch.optim.SGD, lr=0.05))


class TrialPeople(SyntheticReID):
    """Drawn people of five clients of unequal size: the fourth has one camera, and the last one three images."""

    def __init__(self) -> None:
        super().__init__(clients=_CLIENTS, unseen=1, scale=0.1)

    def domains(self) -> list[Domain]:
        """List the data sets."""
        domains = super().domains()
        for number in (3, 4):
            train = domains[number].train
            assert train is not None, "clients train"
            kept = np.flatnonzero(train.camids == 0) if number == 3 else np.array([0, 1, len(train) - 1])
            domains[number] = replace(domains[number], train=train.take(kept))
        return domains


class BodyAverage(Method):
    """Averages backbone and neck, to try a backbone or a loss with."""

    shared_groups = BODY


class MapsOnly(nn.Module):
    """A backbone of one convolution, without running statistics: at a rate of 0, nothing of it moves."""

    out_channels = 4

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, images: Tensor) -> Tensor:
        """Map images [B, 3, H, W] to [B, 4, H - 2, W - 2]."""
        maps: Tensor = self.conv(images)
        return maps


@dataclass(frozen=True)
class Fit:
    """A small fit: five clients of unequal size, of which four take part in a round, with dropout and augmentation."""

    method: Method
    folder: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    """further arguments of Federation"""
    source: ReIDSource | None = None
    """None: synthetic people"""
    size: tuple[int, int] = (16, 8)
    """height and width of the images"""
    ranks: int = 1
    rounds: int = ROUNDS
    is_still: bool = False
    """whether the rate is 0 and nothing is random, so that uploads are equal"""
    must_be_still: bool = False
    """whether this also holds for a server that prunes"""
    resumed_from: Path | None = None
    """a checkpoint"""
    has_other_hashes: bool = False
    """whether its last rank has other hashes of texts than the ranks of other fits, as ranks of a run have"""
    accelerator: str = "cpu"
    is_drawn: bool = False
    """whether the network may draw from torch's global stream, so that draws of the method do not show"""

    def checkpoint(self, round_: int) -> Path:
        """Return the checkpoint after a round, from 1."""
        return self.folder / "checkpoints" / f"{round_ - 1}.ckpt"

    @property
    def free_streams(self) -> frozenset[str]:
        """The libraries whose global streams clients' hooks may draw from: those that are seeded for each session."""
        is_whole = _is_whole(self.settings.get("backbone"))
        return frozenset({"torch", "numpy", "random"} if is_whole else {"torch"} if self.is_drawn else ())

    @property
    def has_ended(self) -> bool:
        """Whether it has come to its end."""
        return (self.folder / "scores.json").exists()

    @property
    def is_late(self) -> bool:
        """Whether it did not end in time: then a second try would cost as much again."""
        return (self.folder / "late").exists()

    def build(self, method: Method) -> tuple[Federation, FederatedDataModule]:
        """Return federation and data."""
        torch.manual_seed(0)  # ranks start from equal weights
        training = self.settings.get("client", small_training())
        arguments = dict(self.settings)
        backbone = arguments.pop("backbone", SmallCNN(width=8))
        is_whole = _is_whole(backbone)  # with a classifier and an optimizer of its own
        parts = {} if is_whole else {"neck": Neck(dim=8, dropout=0.2)}
        options: dict[str, Any] = {**parts, "selection": RandomFraction(0.8)} | arguments
        if self.is_still:
            backbone = MapsOnly()
            training = replace(training, optimizer=partial(torch.optim.SGD, lr=0.0), head_lr=None)
            options |= {"neck": Neck(kind="none", dropout=0.0)}
        options |= {"client": training, "evaluation": Evaluation(test_during_fit=True)}
        model = Federation(method, backbone, **options)
        flips = Augmentation(pad=0, flip=0.0) if self.is_still else Augmentation(pad=1, flip=0.5)
        source = self.source or TrialPeople()
        public = None if self.source else "new0"
        labels: LabelScope = "common" if "common_classes" in method.requires else "own"
        return model, FederatedDataModule(
            source, size=self.size, augmentation=flips, val="none", public=public, labels=labels
        )

    def run(self) -> list[str]:
        """Run it in a process of its own; return the findings."""
        self.folder.mkdir(parents=True)
        port = find_free_network_port()
        processes = [self._started(rank, port, sent(self)) for rank in range(self.ranks)]
        codes = _codes(processes)
        if None in codes and not any(codes):
            (self.folder / "late").touch()
        for process in processes:
            process.kill()
            process.join()
        return self._found(codes)

    def _started(self, rank: int, port: int, content: bytes | None) -> Any:
        """Start the process of a rank.

        It is the fork of a clean process, and gets what a script or a notebook defines by value. What cannot be sent is
        in a fork of this process. One that has trained holds locks and threads, which its forks would wait for without
        end.
        """
        if content is None:
            process = multiprocessing.get_context("fork").Process(target=_fit, args=(self, self.folder, rank, port))
            process.start()
            return process
        ready(1)  # it starts while this fit runs
        is_other = self.has_other_hashes and rank == self.ranks - 1
        return clean_process(_fit, (content, self.folder, rank, port), hashes=int(is_other))

    def _found(self, codes: Sequence[int | None]) -> list[str]:
        """Return the findings that the processes have written, or how the first ended that failed, else did not end."""
        files = sorted(self.folder.glob("noted-*"))
        sentences = [json.loads(line) for path in files for line in path.read_text().splitlines()]
        if sentences or {*codes} == {0}:
            return [*dict.fromkeys(sentences)]
        code = next(filter(None, codes), None)
        ending = f"did not end in {PATIENCE:.0f} seconds" if code is None else f"ended without a message, code {code}"
        rank = codes.index(code)
        return [f"a fit on {self.ranks} rank(s) {ending}; its output: {_end_of(self.folder / f'output-{rank}')}"]


def _is_whole(backbone: Any) -> bool:
    """Return whether it is a LightningModule, or makes one."""
    return package_of(backbone) is not None or not isinstance(backbone, nn.Module | None)


def _codes(processes: Sequence[Any]) -> list[int | None]:
    """Wait until all have ended, or, if one has failed, not for long; return exit codes, None of those that have not.

    These are from before the processes are killed: else ranks that wait for a failed one would look slow.
    """
    deadline = time.monotonic() + PATIENCE
    while running := [process for process in processes if process.exitcode is None]:
        if any(process.exitcode for process in processes):
            deadline = min(deadline, time.monotonic() + _AFTER_A_FAILURE)
        if (left := deadline - time.monotonic()) <= 0:
            break
        connection.wait([process.sentinel for process in running], left)
    return [process.exitcode for process in processes]


def _end_of(path: Path) -> str:
    lines = path.read_text().split("\n") if path.exists() else []
    return " ".join(" ".join(lines[-12:]).split())[-600:] or "none"


def _fit(content: Fit | bytes, folder: Path, rank: int, port: int) -> None:
    """Do what the process of a rank does: it begins as ranks do that a launcher starts."""
    with (folder / f"output-{rank}").open("w") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    notes = _Notes(folder)
    try:
        fit: Fit = received(content) if isinstance(content, bytes) else content
    except Exception as error:  # of code that is tried
        notes(f"another process cannot read the part: {described(error)}")
        sys.exit(1)
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "FEDSIM_LAUNCHER"):
        os.environ.pop(name, None)
    if fit.ranks > 1:
        variables = {"RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": fit.ranks, "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in variables.items()} | {"MASTER_ADDR": "127.0.0.1"}
    torch.set_num_threads(1)  # a forked process has lost the threads of OpenMP
    logging.getLogger("lightning").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    try:
        _train(fit, notes)
    except FedSimError as error:
        notes(f"a fit on {fit.ranks} rank(s) is refused: {' '.join(str(error).split())}")
        sys.exit(1)
    except Exception as error:  # of code that is tried
        if not notes.are_there:
            notes(f"a fit on {fit.ranks} rank(s) raises {described(error)}")
        sys.exit(1)


class _Notes:
    """Writes findings into a file of this process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, sentence: str) -> None:
        with (self._folder / f"noted-{os.getpid()}").open("a") as file:
            file.write(json.dumps(sentence) + "\n")

    @property
    def are_there(self) -> bool:
        """Whether any process of the fit has noted something."""
        return any(self._folder.glob("noted-*"))


def _train(fit: Fit, note: Callable[[str], None]) -> None:
    watcher = Watch(fit.method, note, fit.free_streams)
    model, data = fit.build(watcher.watched_copy)
    saving = ModelCheckpoint(
        fit.folder / "checkpoints", filename="{epoch}", auto_insert_metric_name=False, save_top_k=-1,
        save_on_train_epoch_end=True,
    )  # fmt: skip
    trainer = Trainer(
        max_epochs=fit.rounds, devices=fit.ranks, check_val_every_n_epoch=fit.rounds, accelerator=fit.accelerator,
        enable_checkpointing=True, enable_progress_bar=False, default_root_dir=str(fit.folder),
        callbacks=[saving, _Observer(fit, note, watcher)],
    )  # fmt: skip
    resumed = None if fit.resumed_from is None else str(fit.resumed_from)
    trainer.fit(model, datamodule=data, ckpt_path=resumed)


class _Observer(Callback):
    """Unsettles the random streams of each rank, and compares the start with the end of a still fit."""

    def __init__(self, fit: Fit, note: Callable[[str], None], watcher: Watch) -> None:
        self._fit, self._note, self._watcher = fit, note, watcher
        self._start: dict[str, Tensor] = {}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002 - Lightning's signature
        """Begin with other numbers in each process."""
        unsettle(secrets.randbits(31))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002 - as above
        """Remember the global models."""
        self._start = {arch: pl_module.server.vector(arch).clone() for arch in pl_module.server.vectors}

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Write the scores; of a still fit, compare the global models."""
        if self._fit.ranks == 1 and self._fit.resumed_from is None:
            _personalise(pl_module)
            self._watcher.end()
        if trainer.is_global_zero:
            (self._fit.folder / "scores.json").write_text(json.dumps(pl_module.scores))
        if not self._fit.is_still or (self._watcher.prunes and not self._fit.must_be_still):
            return
        for arch, start in self._start.items():
            moved = (pl_module.server.vector(arch) - start).abs().max().item() if len(start) else 0.0
            if not moved <= _STILL:
                self._note(
                    "equal uploads are no fixed point: with a learning rate of 0 every client uploads the model that "
                    f"it got, and after {self._fit.rounds} rounds the global model has moved by {moved:.3g}; if that "
                    "is the method's purpose, give fixed_point=False"
                )


def _personalise(model: Federation) -> None:
    """Load each client's own model, also if no evaluation does."""
    method, parts = model.settings.method, model.parts
    for client in parts.clients.values():
        client.load()
        client.received = message_to(method, parts.server, client.model.arch)
        method.personalise(client)
        client.unload()
