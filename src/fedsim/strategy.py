"""The Lightning strategy of federated training. It owns every collective; nothing else calls ``torch.distributed``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from fedsim.core.errors import PeerError
from fedsim.core.files import replacing

__all__ = ["FederatedStrategy"]

States = dict[str, dict[str, Tensor]]


class FederatedStrategy(DDPStrategy):
    """One process per device, without DistributedDataParallel: ranks train different clients and meet once a round.

    NCCL carries sums between GPUs and gloo between CPUs; status travels over gloo always, because a waiting NCCL
    collective occupies the GPU and trips its watchdog.

    Args:
        timeout: how long a rank waits for the others in a collective. A rank with small clients waits for one with a
            large client, so this is long.
        process_group_backend: nccl, gloo, or null for the device's own.
        start_method: how processes start on one machine: popen runs the command line again.
    """

    def __init__(
        self,
        timeout: timedelta = timedelta(days=1),
        process_group_backend: str | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        super().__init__(timeout=timeout, process_group_backend=process_group_backend, start_method=start_method)
        self._control: Any = None  # the default group

    def setup_environment(self) -> None:
        """Open the process groups."""
        super().setup_environment()
        if dist.get_backend() != "gloo":
            self._control = dist.new_group(backend="gloo", timeout=self._timeout)

    def configure_ddp(self) -> None:
        """Leave the module unwrapped: gradients stay with their client."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint so that a kill at any moment leaves the old file or the new one."""
        if self.is_global_zero:
            with replacing(Path(filepath)) as partial:
                super().save_checkpoint(checkpoint, partial, storage_options)

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over all ranks in place."""
        if tensor.numel():
            dist.all_reduce(tensor)
        return tensor

    def exchange(self, tables: Sequence[Tensor], error: Exception | None = None) -> None:
        """Sum float64 CPU tables over all ranks in place, unless a rank has failed.

        Every entry is filled by one rank and zero elsewhere, so the sum is exact.

        Args:
            tables: the same shapes on every rank.
            error: what went wrong on this rank, if anything did.

        Raises:
            Exception: ``error`` itself on the ranks that failed.
            PeerError: on the others.
        """
        failed = torch.tensor([float(error is not None)], dtype=torch.float64)
        payload = torch.cat([failed, *(table.flatten() for table in tables)])
        dist.all_reduce(payload, group=self._control)
        if payload[0] > 0:
            self._raise_everywhere(error)
        sizes = [table.numel() for table in tables]
        for table, part in zip(tables, payload[1:].split(sizes), strict=True):
            table.copy_(part.view_as(table))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run a block that may fail on some ranks; afterwards all go on, or all raise. See :meth:`exchange`."""
        error: Exception | None = None
        try:
            yield
        except Exception as e:  # whatever it is, the other ranks must hear of it
            error = e
        self.exchange([], error)

    def broadcast_(self, tensor: Tensor) -> Tensor:
        """Overwrite a tensor by rank 0's, in place."""
        if tensor.numel():
            dist.broadcast(tensor, src=0)
        return tensor

    def _raise_everywhere(self, error: Exception | None) -> None:
        message = None if error is None else f"{error}" or type(error).__name__
        messages: list[str | None] = [None] * self.world_size
        dist.all_gather_object(messages, message, group=self._control)
        if error is not None:
            raise error
        rank = next(r for r, m in enumerate(messages) if m is not None)
        raise PeerError(f"rank {rank} stopped: {messages[rank]}")

    def gather_states(self, states: Mapping[str, Mapping[str, Tensor]]) -> States:
        """Return the private states of all clients, from all ranks, on the CPU.

        Args:
            states: client -> state of the clients that this rank hosts.
        """
        mine: States = {
            client: {k: v.detach().to("cpu", copy=True) for k, v in state.items()} for client, state in states.items()
        }
        gathered: list[States] = [{} for _ in range(self.world_size)]
        dist.all_gather_object(gathered, mine, group=self._control)
        everybody = {client: state for part in gathered for client, state in part.items()}
        return {client: everybody[client] for client in sorted(everybody)}
