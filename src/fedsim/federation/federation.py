"""The federation as a Lightning module: one communication round is one training step; ``round.py`` has the steps."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from torch.optim import SGD, Optimizer

from fedsim.core.allocator import prepare_memory
from fedsim.core.arguments import takes_fields
from fedsim.core.devices import allow_tf32
from fedsim.core.errors import ConfigError
from fedsim.core.replaced_run import FEATURES, forget_round
from fedsim.core.seeding import seed_of_process
from fedsim.core.versions import end_removals, let_go
from fedsim.data.datamodule import FederatedDataModule
from fedsim.evaluation.classification import Classification
from fedsim.evaluation.evaluator import Evaluator
from fedsim.evaluation.extraction import Extractor
from fedsim.evaluation.plan import EvaluationPlan
from fedsim.evaluation.retrieval import Retrieval
from fedsim.federation.adaptive_backbones import BackboneLadder
from fedsim.federation.aggregation.gathered import UploadRule
from fedsim.federation.aggregation.masked import MaskedSum, clients_prune
from fedsim.federation.aggregation.sums import Aggregator, ModelSum
from fedsim.federation.assembly import assemble
from fedsim.federation.checkpoint import restore, save
from fedsim.federation.checks.compatibility import check_trainer, data_of, limit_of_batches
from fedsim.federation.checks.requirements import check_equal_start
from fedsim.federation.components.answers import AnswerCount
from fedsim.federation.components.clock import Clock, ClockInputs, SynchronousClock
from fedsim.federation.components.collusion import Collusion
from fedsim.federation.components.listener import RoundListener
from fedsim.federation.events import (
    as_oracle,
    evaluates_after,
    log_scores,
    num_rounds,
    publish,
    round_callbacks,
    strategy_of,
)
from fedsim.federation.parts import Parts
from fedsim.federation.rank_worker import RankWorker
from fedsim.federation.root import RootTraining
from fedsim.federation.round import Round
from fedsim.federation.settings import Settings
from fedsim.strategy.machine import Machine, machine_of, share_of_cores
from fedsim.strategy.start_line import start_line
from fedsim.strategy.strategy import FederatedStrategy
from fedsim.training.messages import Report

log = logging.getLogger(__name__)


class Federation(LightningModule):
    """Server, clients of this rank, and the round that they run.

    Its arguments are the fields of :class:`~fedsim.federation.settings.Settings`.
    """

    @takes_fields(Settings)
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.settings, self.seed_of_weights = settings, seed_of_process()
        self.reports: Mapping[str, Report] = {}
        """of the clients whose updates counted in the last round"""
        self.round_metrics: Mapping[str, float] = {}
        """the numbers that were logged about the last round's training"""
        self.scores: dict[str, float] = {}
        """of the last evaluation"""
        self.rankings: Path | None = None
        """folder in which a test writes ranked lists; None: it writes none"""
        self.maps: Path | None = None
        """folder in which a prediction draws maps; None: it draws none"""
        self.has_trained = False
        """whether a client ever returned an update that counted, in this start or before its checkpoint"""

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *_: Any, **__: Any) -> Any:
        """Refuse: a checkpoint holds the tensors of a server and of clients, and no objects.

        Raises:
            ConfigError: with the lines that load a model of it, or all of it.
        """
        raise ConfigError(
            f"load_from_checkpoint: a model of a run is model = fedsim.load_model({str(checkpoint_path)!r}), and then "
            "model.embed(images); a federation is built as before, and Trainer(...).fit or .test(federation, "
            f"datamodule=data, ckpt_path={str(checkpoint_path)!r}) loads its tensors"
        )

    def forward(self, *_: Any, **__: Any) -> Any:
        """Refuse: a federation has the models of a server and of clients, and features are those of one of them.

        Raises:
            ConfigError: with the two lines that embed images.
        """
        raise ConfigError(
            "federation(images): a federation has several models; of a run, model = fedsim.load_model(RUN) is the "
            "global one, or with client=NAME a client's, and then model.embed(images) gives features"
        )

    def training_step(self, batch: Any, batch_idx: int) -> None:  # noqa: ARG002 - Lightning's signature
        """Run one communication round."""
        optimizer, round_ = self.optimizers(), self.current_epoch
        assert not isinstance(optimizer, list)
        with torch.autocast(self.device.type, enabled=False):  # clients switch it on for their forward passes
            # LightningOptimizer.step() counts global_step, without which ModelCheckpoint saves nothing
            result = self.round.run(round_, optimizer.step, keep_snapshots=evaluates_after(self.trainer, round_))
        self.reports, self.round_metrics = result.reports, result.metrics
        self.has_trained |= bool(result.reports)
        for callback in round_callbacks(self.trainer):
            callback.on_round_trained(self.trainer, self)
        publish(self.trainer, round_, self.round_metrics)
        if result.stop_signal is not None:  # equal on all ranks: the run ends with this round's checkpoint
            self.strategy.request_stop(result.stop_signal, self.strategy.stop_deadline)
            self.trainer.should_stop = True

    def configure_optimizers(self) -> Optimizer:
        """Return the server optimizer; SGD(lr=1) is plain averaging up to rounding, which the server then removes."""
        make, parameters = self.settings.server_optimizer, list(self.server.parameters())
        return make(parameters) if make else SGD(parameters, lr=1.0)

    def validation_step(self, batch: Any, batch_idx: int) -> None:  # noqa: ARG002 - Lightning's
        """Score the validation sets; during a fit also the test sets, if they are configured."""
        if self.trainer.sanity_checking:
            return  # scores of untrained models are useless, and take as long as any others
        trained = list(self.reports) if (fitting := self.trainer.state.fn == "fit") else ()
        metrics = self.evaluator.score("val", trained)
        if fitting and self.settings.evaluation.test_during_fit:
            tested = self.evaluator.score("test", trained)
            metrics |= as_oracle(tested) | self._figures(tested)
        self.scores = log_scores(self, metrics)

    def test_step(self, batch: Any, batch_idx: int) -> None:  # noqa: ARG002 - Lightning's
        """Score the test sets."""
        self._forget_round(self.rankings)
        scores = self.evaluator.score("test", rankings=self.rankings)
        self.scores = log_scores(self, scores | self._figures(scores))

    def _figures(self, scores: Mapping[str, float]) -> dict[str, float]:
        """Return the figures of an attack, if there is one, after an evaluation on test sets."""
        attack = self.settings.attack
        return {} if attack is None else attack.figures(self.evaluator, scores, self.parts.data_of)

    def predict_step(self, batch: Any, batch_idx: int) -> list[str]:  # noqa: ARG002 - Lightning's
        """Write feature files of all test sets into the run directory; return their paths."""
        folder = Path(self.trainer.default_root_dir) / FEATURES
        self._forget_round(folder, self.maps)
        return [str(path) for path in self.evaluator.write_features(folder, self.maps)]

    def _forget_round(self, *folders: Path | None) -> None:
        """Remove the notes of folders to write: their files were of another model."""
        for folder in filter(None, folders if self.trainer.is_global_zero else ()):
            forget_round(folder)

    def setup(self, stage: str) -> None:
        """Assemble server and clients, and read this rank's images; if this fails on a rank, all ranks stop."""
        check_trainer(self.trainer)
        torch.set_num_threads(self.settings.threads)
        strategy, is_new = self.strategy, not hasattr(self, "parts")
        if stage == "fit" and self.trainer.is_global_zero:
            log.info(start_line(self.strategy, self.trainer))
        prepare_memory(strategy.root_device)
        if not self.settings.tf32:
            self._allowed_tf32 = allow_tf32(False)
        threads = share_of_cores(strategy)
        with strategy.together():
            data = data_of(self.trainer)
            if is_new:
                machine = machine_of(strategy) if self.settings.reduction == "exact" else None
                self.assemble(
                    data, strategy.global_rank, strategy.world_size, strategy.root_device, machine,
                    str(self.trainer.precision), num_rounds(self.trainer),
                )  # fmt: skip
                for callback in round_callbacks(self.trainer):
                    callback.on_placed(self.parts.rank_share.placement)
            self.parts.clients.limit_batches = limit_of_batches(self.trainer, data)
            for model in self.parts.models.values():
                model.num_rounds = num_rounds(self.trainer)
            self.round = round_of(self.settings, self.parts, self.listeners, self.trainer)
            self.evaluator = evaluator_of(self.settings, self.parts, data, self.trainer)
            data.threads = threads
            self.parts.read_images(data, self.evaluator, stage, self.settings.evaluation.test_during_fit)
            if stage == "fit" and strategy.is_global_zero:
                self.parts.open_root(data)
        if is_new:
            check_equal_start(strategy, self.parts.models, "backbone" if self.settings.module is None else "module")

    def teardown(self, stage: str) -> None:  # noqa: ARG002 - Lightning's signature
        """Leave the run's folder at rest, and give torch back its settings."""
        end_removals()
        if not self.settings.tf32:
            allow_tf32(self._allowed_tf32)

    def assemble(
        self, data: FederatedDataModule, rank: int, num_ranks: int, device: torch.device,
        machine: Machine | None = None, precision: str = "32-true", rounds: int | None = 1,
    ) -> None:  # fmt: skip
        """Build the server and the clients of ``rank``, see :func:`~fedsim.federation.assembly.assemble`."""
        self.parts = assemble(self.settings, data, rank, num_ranks, device, machine, precision, rounds)
        self.server = self.parts.server  # Lightning saves and moves it
        self.listeners = listeners_of(self.settings, self.parts)

    @property
    def strategy(self) -> FederatedStrategy:
        """The trainer's strategy, which owns all collectives."""
        return strategy_of(self.trainer)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add fedsim's content; the strategy writes private states, on each rank those of its clients."""
        checkpoint |= save(self.parts, self.listeners, self.settings.threads)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the listeners, and the private states of the clients that this rank owns."""
        with self.strategy.together():
            restore(checkpoint, self.parts, self.listeners, self.settings.threads)
        self.has_trained = checkpoint["global_step"] > 0

    def on_train_start(self) -> None:
        """Let go of the checkpoint with which the fit goes on: all ranks have read it."""
        let_go()


def listeners_of(settings: Settings, parts: Parts) -> list[RoundListener]:
    """Return the round listeners: components that any method can be combined with.

    Raises:
        ConfigError: if they contradict the federation's other settings.
    """
    ladder = settings.adaptive_backbones and BackboneLadder(settings.adaptive_backbones, parts, settings.selection)
    settings.noise.prepare(settings.method, parts.server, settings.selection)
    settings.selection.prepare({name: data.num_images for name, data in parts.data_of.items()})
    if settings.attack is not None:
        settings.attack.prepare(parts.server, parts.data_of, settings.evaluation.task)
    if isinstance(settings.attack, Collusion):
        settings.attack.check_settings(settings.method, settings.noise, settings.pace)
    if settings.aggregation is not None:
        settings.aggregation.check(settings.method, parts.server, settings.bn_stats, settings.noise)
    optional = [part for part in (ladder, settings.attack) if part]
    clock = settings.pace.start(
        ClockInputs(
            names=parts.names, costs=parts.costs, method=settings.method, selection=settings.selection,
            availability=settings.availability, hardware=settings.hardware, ledger=parts.ledger, server=parts.server,
            old_models=parts.rank_share.old_models, statistics=parts.statistics, aggregation=settings.aggregation,
            privacy=settings.privacy, has_ladder=ladder is not None, seed=settings.training_seed,
        )
    )  # fmt: skip
    counted = [] if isinstance(clock, SynchronousClock) else [AnswerCount(clock, parts.names)]
    return [*optional, settings.selection, parts.ledger, settings.noise, clock, *counted, parts.rank_share.scheduler]


def clock_of(listeners: Sequence[RoundListener]) -> Clock:
    """Return the clock among the round listeners."""
    return next(listener for listener in listeners if isinstance(listener, Clock))


def round_of(settings: Settings, parts: Parts, listeners: Sequence[RoundListener], trainer: Trainer) -> Round:
    """Return the round that a trainer runs."""
    strategy = strategy_of(trainer)
    aggregator = _make_aggregator(settings, parts, strategy)
    worker = RankWorker(settings, parts, aggregator, strategy, str(trainer.precision), round_callbacks(trainer))
    root = None if parts.root is None else RootTraining(parts.root, worker)
    return Round(settings, parts, listeners, clock_of(listeners), worker, aggregator, strategy, root)


def evaluator_of(settings: Settings, parts: Parts, data: FederatedDataModule, trainer: Trainer) -> Evaluator:
    """Return the evaluator of the federation's models."""
    strategy = strategy_of(trainer)

    def report(subject: str) -> None:
        strategy.poll()
        strategy.describe_activity(f"scoring the {subject}")
        for callback in round_callbacks(trainer):
            callback.on_scoring(subject)

    scoring, share, precision = settings.evaluation, parts.rank_share, str(trainer.precision)
    plan = EvaluationPlan(
        settings.method, parts.server, parts.models, parts.archs, parts.federated, share.placement, scoring.needs,
        scoring.ensemble,
    )  # fmt: skip
    is_classification = scoring.task == "classification"
    scorer = Classification(scoring, parts.federated, precision) if is_classification else Retrieval(scoring, precision)
    extractor = Extractor(
        plan,
        scorer,
        parts.clients,
        share.snapshots,
        share.machine,
        strategy,
        scoring.batch_size,
        data.open_test,
        report,
    )
    return Evaluator(plan, extractor, scorer, strategy=strategy, share_from=scoring.share_from)


def _make_aggregator(settings: Settings, parts: Parts, strategy: FederatedStrategy) -> Aggregator:
    rule: UploadRule | None = None
    if settings.aggregation is not None:
        rule = partial(settings.aggregation.aggregate, parts.server)
    elif "uploads" in settings.method.requires:
        rule = partial(settings.method.aggregate, parts.server)
    form = MaskedSum() if clients_prune(settings.method) else ModelSum()
    forgery = partial(settings.attack.forge, parts.server) if isinstance(settings.attack, Collusion) else None
    return Aggregator(
        strategy, parts.statistics, parts.archs, settings.reduction, strategy.root_device, settings.training_seed,
        form, rule, forgery,
    )  # fmt: skip
