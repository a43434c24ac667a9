"""Joining the assembled parts: the listeners, the round that a trainer runs, and the evaluator."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from lightning import Trainer

from fedsim.data.datamodule import FederatedDataModule
from fedsim.evaluation.evaluator import Evaluator, make_evaluator
from fedsim.federation.adaptive_backbones import BackboneLadder
from fedsim.federation.aggregation.gathered import GatheringAggregator
from fedsim.federation.aggregation.masked import MaskedAggregator, clients_prune
from fedsim.federation.aggregation.sums import Aggregator
from fedsim.federation.components.listener import RoundListener
from fedsim.federation.events import round_callbacks, strategy_of
from fedsim.federation.parts import Parts
from fedsim.federation.rank_worker import RankWorker
from fedsim.federation.round import Round
from fedsim.federation.settings import Settings
from fedsim.strategy.strategy import FederatedStrategy


def listeners_of(how: Settings, parts: Parts) -> list[RoundListener]:
    """Return what acts around the rounds: choices that any method can be combined with.

    Raises:
        ConfigError: if they do not go together with the federation.
    """
    ladder = how.adaptive_backbones and BackboneLadder(how.adaptive_backbones, parts, how.selection)
    how.privacy.prepare(how.method, parts.server, how.selection)
    how.selection.prepare({name: data.num_images for name, data in parts.data_of.items()})
    if how.aggregation is not None:
        how.aggregation.check(how.method, parts.server, how.bn_stats, how.privacy)
    return [*([ladder] if ladder else []), how.selection, parts.ledger, how.privacy, parts.rank_share.scheduler]


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
    common = (strategy, parts.statistics, parts.archs, how.reduction, strategy.root_device, how.seed)
    if how.aggregation is not None:
        return GatheringAggregator(how.aggregation.aggregate, *common)
    if "uploads" in how.method.requires:
        return GatheringAggregator(partial(how.method.aggregate, parts.server), *common)
    return MaskedAggregator(*common) if clients_prune(how.method) else Aggregator(*common)
