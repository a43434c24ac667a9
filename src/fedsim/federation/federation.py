"""The federation as Lightning sees it: one communication round is one training step; ``round.py`` has the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from torch.optim import SGD, Optimizer

from fedsim.core.allocator import prepare_memory
from fedsim.core.arguments import takes_fields
from fedsim.data.datamodule import FederatedDataModule
from fedsim.evaluation.evaluator import Evaluator, make_evaluator
from fedsim.federation.adaptive_backbones import BackboneLadder
from fedsim.federation.aggregation.gathered import UploadRule
from fedsim.federation.aggregation.masked import MaskedSum, clients_prune
from fedsim.federation.aggregation.sums import Aggregator, PlainSum
from fedsim.federation.assembly import assemble
from fedsim.federation.checkpoint import restore, save
from fedsim.federation.checks.compatibility import check_trainer, data_of
from fedsim.federation.checks.requirements import check_equal_start
from fedsim.federation.components.listener import RoundListener
from fedsim.federation.events import as_oracle, evaluates_after, log_scores, publish, round_callbacks, strategy_of
from fedsim.federation.parts import Parts
from fedsim.federation.rank_worker import RankWorker
from fedsim.federation.round import Round
from fedsim.federation.settings import Settings
from fedsim.strategy.machine import Machine, machine_of
from fedsim.strategy.strategy import FederatedStrategy
from fedsim.training.messages import Report


class Federation(LightningModule):
    """Server, clients of this rank, and the round that joins them.

    Its arguments are the fields of :class:`~fedsim.federation.settings.Settings`.
    """

    @takes_fields(Settings)
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.settings = settings
        self.reports: Mapping[str, Report] = {}
        """of the clients whose updates counted in the last round"""
        self.round_metrics: Mapping[str, float] = {}
        """the numbers that were logged about the last round's training"""
        self.scores: dict[str, float] = {}
        """of the last evaluation"""
        self.rankings: Path | None = None
        """where a test writes ranked lists; None: nowhere"""
        self.maps: Path | None = None
        """where a prediction draws maps; None: nowhere"""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # noqa: ARG002 - Lightning's signature
        """Run one communication round."""
        optimizer, round_ = self.optimizers(), self.current_epoch
        assert not isinstance(optimizer, list)
        with torch.autocast(self.device.type, enabled=False):  # clients switch it on for their forward passes
            # through LightningOptimizer.step(): it counts global_step, without which ModelCheckpoint saves nothing
            result = self.round.run(round_, optimizer.step, keep_snapshots=evaluates_after(self.trainer, round_))
        self.reports, self.round_metrics = result.reports, result.metrics
        publish(self.trainer, round_, self.round_metrics)
        if result.stop_signal is not None:  # agreed by all ranks: the run ends with this round's checkpoint
            self.strategy.request_stop(result.stop_signal, self.strategy.stop_deadline)
            self.trainer.should_stop = True

    def configure_optimizers(self) -> Optimizer:
        """Return the server optimizer; SGD(lr=1) is plain averaging up to rounding, which the server then removes."""
        make, parameters = self.settings.server_optimizer, list(self.server.parameters())
        return make(parameters) if make else SGD(parameters, lr=1.0)

    def validation_step(self, batch: Any, batch_idx: int) -> None:  # noqa: ARG002 - Lightning's
        """Score the validation sets, and during a fit the test sets, too."""
        if self.trainer.sanity_checking:
            return  # to score untrained models shows nothing, and takes as long as any scoring
        trained = list(self.reports) if (fitting := self.trainer.state.fn == "fit") else ()
        metrics = self.evaluator.score("val", trained)
        if fitting and self.settings.evaluation.test_during_fit:
            metrics |= as_oracle(self.evaluator.score("test", trained))
        self.scores = log_scores(self, metrics)

    def test_step(self, batch: Any, batch_idx: int) -> None:  # noqa: ARG002 - Lightning's
        """Score the test sets."""
        self.scores = log_scores(self, self.evaluator.score("test", rankings=self.rankings))

    def predict_step(self, batch: Any, batch_idx: int) -> list[str]:  # noqa: ARG002 - Lightning's
        """Write feature files of all test sets into the run directory; return their paths."""
        files = self.evaluator.write_features(Path(self.trainer.default_root_dir) / "features", self.maps)
        return [str(path) for path in files]

    def setup(self, stage: str) -> None:
        """Assemble server and clients, and read this rank's images; if a rank cannot, all stop."""
        check_trainer(self.trainer)
        torch.set_num_threads(self.settings.threads)
        strategy, is_new = self.strategy, not hasattr(self, "parts")
        prepare_memory(strategy.root_device)
        with strategy.together():
            data = data_of(self.trainer)
            if is_new:
                machine = machine_of(strategy) if self.settings.reduction == "exact" else None
                self.assemble(data, strategy.global_rank, strategy.world_size, strategy.root_device, machine)
                for callback in round_callbacks(self.trainer):
                    callback.on_placed(self.parts.rank_share.placement)
            limit = self.trainer.limit_train_batches  # of a client's batches; fast_dev_run sets it
            self.parts.limit_batches(limit if isinstance(limit, int) else data.limit_client_batches)
            self.round = round_of(self.settings, self.parts, self.listeners, self.trainer)
            self.evaluator = evaluator_of(self.settings, self.parts, data, self.trainer)
            self.parts.read_images(data, self.evaluator, stage, self.settings.evaluation.test_during_fit)
        if is_new:
            check_equal_start(strategy, self.parts.models)

    def assemble(
        self, data: FederatedDataModule, rank: int, num_ranks: int, device: torch.device, machine: Machine | None = None
    ) -> None:
        """Build the server and the clients of ``rank``, see :func:`~fedsim.federation.assembly.assemble`."""
        self.parts = assemble(self.settings, data, rank, num_ranks, device, machine)
        self.server = self.parts.server  # Lightning saves and moves it
        self.listeners = listeners_of(self.settings, self.parts)

    @property
    def strategy(self) -> FederatedStrategy:
        """The trainer's strategy, which owns all collectives."""
        return strategy_of(self.trainer)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what fedsim must know; private states go to the strategy, which writes each rank's own."""
        checkpoint |= save(self.parts, self.listeners, self.settings.threads)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the listeners, and the private states of the clients that this rank hosts."""
        with self.strategy.together():
            restore(checkpoint, self.parts, self.listeners, self.settings.threads)


def listeners_of(how: Settings, parts: Parts) -> list[RoundListener]:
    """Return what acts around the rounds: choices that any method can be combined with.

    Raises:
        ConfigError: if they do not go together with the federation.
    """
    ladder = how.adaptive_backbones and BackboneLadder(how.adaptive_backbones, parts, how.selection)
    how.noise.prepare(how.method, parts.server, how.selection)
    how.selection.prepare({name: data.num_images for name, data in parts.data_of.items()})
    if how.aggregation is not None:
        how.aggregation.check(how.method, parts.server, how.bn_stats, how.noise)
    return [*([ladder] if ladder else []), how.selection, parts.ledger, how.noise, parts.rank_share.scheduler]


def round_of(how: Settings, parts: Parts, listeners: Sequence[RoundListener], trainer: Trainer) -> Round:
    """Return the round that a trainer runs."""
    strategy = strategy_of(trainer)
    aggregator = _make_aggregator(how, parts, strategy)
    worker = RankWorker(how, parts, aggregator, strategy, str(trainer.precision), round_callbacks(trainer))
    return Round(how, parts, listeners, worker, aggregator, strategy)


def evaluator_of(how: Settings, parts: Parts, data: FederatedDataModule, trainer: Trainer) -> Evaluator:
    """Return what scores the federation's models."""
    strategy = strategy_of(trainer)

    def tell(what: str) -> None:
        strategy.poll()
        strategy.describe_activity(f"scoring the {what}")
        for callback in round_callbacks(trainer):
            callback.on_scoring(what)

    rank_share = parts.rank_share
    return make_evaluator(
        settings=how.evaluation, method=how.method, server=parts.server, clients=parts.clients, models=parts.models,
        archs=parts.archs, federated=parts.federated, placement=rank_share.placement, machine=rank_share.machine,
        snapshots=rank_share.snapshots, strategy=strategy, open_images=data.open_test, progress=tell,
    )  # fmt: skip


def _make_aggregator(how: Settings, parts: Parts, strategy: FederatedStrategy) -> Aggregator:
    """Return the sums that the method's uploads need."""
    rule: UploadRule | None = None
    if how.aggregation is not None:
        rule = how.aggregation.aggregate
    elif "uploads" in how.method.requires:
        rule = partial(how.method.aggregate, parts.server)
    form = MaskedSum() if clients_prune(how.method) else PlainSum()
    return Aggregator(
        strategy, parts.statistics, parts.archs, how.reduction, strategy.root_device, how.seed, form, rule
    )
