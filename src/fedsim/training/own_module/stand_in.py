"""Stand-ins for ``self.trainer`` and ``self.log`` of a user's module, in a client's session."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from lightning import LightningModule
from torch import Tensor
from torchmetrics import Metric

from fedsim.core.errors import ConfigError
from fedsim.strategy.rank_group import RankGroup
from fedsim.training.own_module.rules import named


class NoLoopError(ConfigError, AttributeError):
    """A module asked for a part of a Trainer that a client's session does not have."""


class StandInTrainer:
    """The trainer of a module in one session of a client: where it is, and no loop.

    ``max_epochs`` and ``estimated_stepping_batches`` are None and infinite in a run without a last round.

    Args:
        module: its name, for messages.
        first_epoch: the local epochs of all earlier rounds.
        epochs: local epochs of this session.
        rounds: of the run; None: it has no last one.
        batches: of a local epoch.
        accumulate: batches per step.
    """

    barebones: ClassVar[bool] = False
    is_global_zero: ClassVar[bool] = True
    training: ClassVar[bool] = True
    sanity_checking: ClassVar[bool] = False
    testing: ClassVar[bool] = False
    validating: ClassVar[bool] = False
    predicting: ClassVar[bool] = False
    world_size: ClassVar[int] = 1
    global_rank: ClassVar[int] = 0
    local_rank: ClassVar[int] = 0
    logger: ClassVar[None] = None
    loggers: ClassVar[Sequence[Any]] = ()
    progress_bar_callback: ClassVar[None] = None

    def __init__(
        self, module: str, *, first_epoch: int, epochs: int, rounds: int | None, batches: int, accumulate: int
    ) -> None:
        self.module_name, self.first_epoch = module, first_epoch
        self.current_epoch = first_epoch
        """counted from the run's start, as though this client had trained in every round"""
        self.num_training_batches, self.accumulate_grad_batches = batches, accumulate
        self.first_step = first_epoch * -(-batches // accumulate)
        self.global_step = self.first_step
        """optimizer steps, counted like :attr:`current_epoch`"""
        self.max_epochs = None if rounds is None else rounds * epochs
        self.optimizers: list[torch.optim.Optimizer] = []
        self.lr_scheduler_configs: list[Any] = []

    @property
    def estimated_stepping_batches(self) -> float:
        """Optimizer steps of this client in the whole run, if it trains in every round."""
        if self.max_epochs is None:
            return float("inf")
        return self.max_epochs * -(-self.num_training_batches // self.accumulate_grad_batches)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python's own questions, such as those of copies
            raise AttributeError(name)
        raise NoLoopError(
            f"model.module: {self.module_name} reads self.trainer.{name}, which needs a Trainer's loop; a client has "
            "current_epoch, global_step, max_epochs and estimated_stepping_batches"
        )


class Logged:
    """The numbers that a module logs in a session: means over its images.

    Args:
        names: those that can be logged; None: collect them.
        in_parts: whether batches are cut, of which other ranks may have some: then only ``training_step`` may log.
    """

    def __init__(self, names: Sequence[str] | None, in_parts: bool = False) -> None:
        self.names = names
        self.unknown: set[str] = set()
        """names that were logged but cannot be"""
        self.counts = True
        """whether what is logged counts now"""
        self.number: int | None = None
        """of the micro-batch that is trained; None: outside of batches, or they are not cut"""
        self.size = 0
        """images of the current batch, or of the local epoch after it"""
        self._in_parts = in_parts
        self._entries: list[tuple[str, Tensor | float, float, int | None]] = []
        self._metrics: dict[str, Metric] = {}

    def of(self, module: LightningModule) -> Callable[..., None]:
        """Return the function that stands for ``module.log``, with its arguments."""

        def log(name: str, value: Any, *_: Any, **options: Any) -> None:
            if self.counts and options.get("logger") is not False:
                self._enter(module, name, value, options)

        return log

    def _enter(self, module: LightningModule, name: str, value: Any, options: dict[str, Any]) -> None:
        if options.get("reduce_fx", "mean") not in ("mean", torch.mean):
            raise ConfigError(
                f"{named(module)}: self.log({name!r}) has a reduce_fx, but the log of a client has means; leave it out"
            )
        if self.names is not None and name not in self.names:
            self.unknown.add(name)
        elif isinstance(value, Metric):
            self._metrics[name] = value
        elif self._in_parts and self.number is None:
            raise ConfigError(
                f"{named(module)}: self.log({name!r}) outside of training_step needs whole batches; set "
                "model.client.micro_batch to null"
            )
        elif not isinstance(value, Tensor | int | float) or (isinstance(value, Tensor) and value.numel() != 1):
            raise ConfigError(f"{named(module)}: self.log({name!r}) got {type(value).__name__}; log one number")
        else:
            value = value.detach() if isinstance(value, Tensor) else value
            number = value.reshape(()) if isinstance(value, Tensor) and not value.is_cpu else float(value)
            self._entries.append((name, number, float(options.get("batch_size") or self.size), self.number))

    def end_epoch(self) -> None:
        """Compute the metrics that were logged in a local epoch, and reset them, as a Trainer does."""
        for name, metric in self._metrics.items():
            self._entries.append((name, metric.compute().detach().to(metric.device), float(self.size), None))
            metric.reset()
        self._metrics.clear()

    @property
    def all_names(self) -> tuple[str, ...]:
        """The names that were logged, in order."""
        return tuple(dict.fromkeys([*(entry[0] for entry in self._entries), *self._metrics]))

    def means(self, rank_group: RankGroup | None, num_parts: int) -> dict[str, float]:
        """Return the mean of each name; waits for the device. ``num_parts``: the number of micro-batches of all ranks.

        The ranks of a group get the sum of a single rank, in its order.
        """
        values = [value for _, value, _, _ in self._entries]
        measured = [value.double() for value in values if isinstance(value, Tensor)]
        numbers = iter(torch.stack(measured).tolist() if measured else ())
        entries = [
            (name, next(numbers) if isinstance(value, Tensor) else value, size, part)
            for name, value, size, part in self._entries
        ]
        if rank_group is not None and self.names:
            entries = self._of_all_ranks(entries, rank_group, num_parts)
        sums: dict[str, list[float]] = {}
        for name, number, size, _ in entries:
            total = sums.setdefault(name, [0.0, 0.0])
            total[0] += number * size
            total[1] += size
        return {name: total / size for name, (total, size) in sums.items() if size}

    def _of_all_ranks(
        self, entries: list[tuple[str, float, float, int | None]], rank_group: RankGroup, num_parts: int
    ) -> list[tuple[str, float, float, int | None]]:
        assert self.names is not None, "they are collected on one rank"
        table = torch.zeros(len(self.names), num_parts, 2, dtype=torch.float64)
        for name, number, size, part in entries:
            assert part is not None, "others are refused"
            table[list(self.names).index(name), part] = torch.tensor([number, size], dtype=torch.float64)
        table = rank_group.sum_(table.flatten()).view_as(table)
        return [
            (name, *row, part)
            for name, rows in zip(self.names, table.tolist(), strict=True)
            for part, row in enumerate(rows)
            if row[1]
        ]
