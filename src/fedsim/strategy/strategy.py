"""The Lightning strategy of federated training. It owns every collective; nothing else calls ``torch.distributed``."""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.torch_version import TorchVersion

from fedsim.core.arguments import ChecksArguments
from fedsim.core.errors import ConfigError, DataError, FedSimError
from fedsim.core.owned_folders import remove_abandoned_folders
from fedsim.core.quiet_gloo import without_gloo_lines
from fedsim.core.shared import memory_folder, slow_folder
from fedsim.core.versions import publish_version
from fedsim.settings.facts import NOTHING
from fedsim.strategy import checkpoint_files
from fedsim.strategy.channel import ControlChannel
from fedsim.strategy.launch import awaiting_ranks, check_address
from fedsim.strategy.ready_ranks import ReadyRanks, check_variables, follow_starter, new_launcher
from fedsim.strategy.sharing import (
    FIELD,
    SharedGpus,
    address_of,
    check_number,
    check_shared_gpus,
    is_refused_by_nccl,
    naming_the_mode,
    neighbours_by,
    spread,
    unbind_group_of_all,
)
from fedsim.strategy.watched import WatchedStrategy

T = TypeVar("T")
_SPEAKS = torch.__version__ < TorchVersion("2.15")
"""whether gloo writes lines on its connections to the terminal, as that of torch 2.10 does and that of 2.15 does not"""


class FederatedStrategy(ChecksArguments, WatchedStrategy, option="trainer.strategy"):
    """Processes without DistributedDataParallel: ranks train different clients and meet once a round.

    NCCL sums between GPUs, gloo between CPUs and between ranks of one GPU, which NCCL refuses; a single rank has gloo,
    too. The tables of :meth:`exchange` always use gloo: a waiting NCCL collective occupies the GPU and triggers its
    watchdog. Between collectives, ranks monitor each other through a control channel.

    Args:
        timeout: longest time for ranks to find each other at the start, and for a sum after all ranks have entered it.
        round_timeout: longest wait of a rank for the others to finish their clients. A rank with small clients waits
            for one with a large client, so this is long.
        silence_timeout: longest time without a sign of life from a rank, or without progress of a rank that sleeps or
            waits; after it, all end. A rank that computes without progress has five times as long; a method shows
            the progress of a long step by :func:`fedsim.core.progress.note_progress`.
        connect_timeout: longest time for the name MASTER_ADDR to resolve and its machine to answer. If the machine
            answers before rank 0 runs there, ``timeout`` applies.
        process_group_backend: nccl, gloo, or null for the default of the device, and gloo for a single rank; if ranks
            share GPUs, for sums among GPUs.
        ranks_per_device: ranks on each GPU; ``trainer.devices`` then counts ranks, so 4 of them with 2 on each need two
            GPUs. With a list of GPUs, each of them gets so many ranks.
        start_method: of processes on one machine: popen, which runs the command line again.
    """

    def __init__(
        self,
        timeout: Annotated[timedelta, NOTHING] = timedelta(minutes=10),
        round_timeout: Annotated[timedelta, NOTHING] = timedelta(days=1),
        silence_timeout: Annotated[timedelta, NOTHING] = timedelta(minutes=5),
        connect_timeout: Annotated[timedelta, NOTHING] = timedelta(seconds=20),
        process_group_backend: Annotated[str | None, NOTHING] = None,
        start_method: Annotated[Literal["popen"], NOTHING] = "popen",
        ranks_per_device: Annotated[int, NOTHING] = 1,
    ) -> None:
        self.ranks_per_device, self._among_gpus = ranks_per_device, process_group_backend or "nccl"
        super().__init__(timeout=timeout, process_group_backend=process_group_backend, start_method=start_method)
        self.timeout, self.round_timeout = timeout, round_timeout
        self.silence_timeout, self.connect_timeout = silence_timeout, connect_timeout
        self._patient: Any = None  # the group of all ranks, with the long timeout
        self._groups: dict[tuple[range, str], Any] = {}  # of ranks that train a client together
        self._shared: SharedGpus | None = None  # if ranks share GPUs

    def check(self) -> None:
        """Raise ConfigError if a timeout or the backend is wrong: the parser hides errors of the constructor."""
        for name in ("timeout", "round_timeout", "silence_timeout", "connect_timeout"):
            if (value := getattr(self, name)) <= timedelta():
                raise ConfigError(f"trainer.strategy.{name}: must be positive, got {value}")
        if (backend := self._process_group_backend) not in (None, "nccl", "gloo"):
            raise ConfigError(
                f"trainer.strategy.process_group_backend: {backend} is not a backend; choose nccl, gloo or null"
            )
        check_number(self.ranks_per_device)

    def check_device(self) -> None:
        """Raise ConfigError if ranks must share a GPU, but their devices are CPUs, or take one process each."""
        if self.ranks_per_device > 1 and self.root_device.type != "cuda":
            raise ConfigError(
                f"{FIELD}: {self.ranks_per_device} is for GPUs, and these ranks are on CPUs; leave it out: "
                "trainer.devices alone is their number"
            )
        if self.ranks_per_device > 1:
            check_shared_gpus(self.parallel_devices or [], self.ranks_per_device)

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The device of each rank of this machine."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        """Give each rank one of the devices that Lightning has found."""
        self._parallel_devices = spread(devices, self.ranks_per_device) if devices else devices

    # -- beginning and end ---------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Open the process groups and the control channel."""
        self.check_device()
        if self.local_rank == 0:  # killed runs may have left gigabytes
            remove_abandoned_folders([memory_folder(), slow_folder()])
        with naming_the_mode(self.root_device, self.ranks_per_device):
            super().setup_environment()
        self.stop_signal = self.stop_deadline = None
        if self.world_size > 1:
            if self._patient is None:
                with without_gloo_lines(_SPEAKS):
                    self._patient = dist.new_group(backend="gloo", timeout=self.round_timeout)
            silence = self.silence_timeout.total_seconds()
            self._channel = ControlChannel(self._open_store(), self.global_rank, self.world_size, silence)
            if isinstance(self._launcher, ReadyRanks):
                self._channel.dead_ranks = self._launcher.dead_ranks
            self._channel.start()
            self.barrier("control channel")
            self._channel.watch()
            if self.ranks_per_device > 1 and self._shared is None:
                addresses = torch.zeros(self.world_size, dtype=torch.float64)
                addresses[self.global_rank] = address_of(self.root_device)
                self.exchange([addresses])
                gpus = neighbours_by(addresses.tolist(), self.num_processes, self.ranks_per_device)
                self._shared = SharedGpus(gpus, self.global_rank, self._among_gpus, self.timeout, self._wait)

    def setup_distributed(self) -> None:
        """Join the other ranks; an error names an address that cannot be reached."""
        self.set_world_ranks()
        if self.world_size > 1 and not dist.is_initialized():
            assert self.cluster_environment is not None
            host, port = self.cluster_environment.main_address, self.cluster_environment.main_port
            # torchrun's agent may listen at this address instead of rank 0
            listens = self.global_rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
            check_address(host, port, listens, self.connect_timeout.total_seconds())
        try:
            with (
                awaiting_ranks(self.global_rank, self.world_size, self.timeout.total_seconds()),
                without_gloo_lines(_SPEAKS),
            ):
                super().setup_distributed()
            unbind_group_of_all()
        except RuntimeError as error:
            if not is_refused_by_nccl(str(error)):
                raise
            raise ConfigError(
                f"{FIELD}: 1, but several ranks have one GPU, which NCCL refuses; set it to the number of ranks per GPU"
            ) from error

    def _nccl_groups(self) -> list[Any]:
        """Return the process groups of NCCL that this rank belongs to."""
        groups = [group for (_, device), group in self._groups.items() if device == "cuda"]
        if self.world_size > 1 and self.process_group_backend == "nccl" and dist.is_initialized():
            groups.append(dist.group.WORLD)
        if self._shared is not None:
            groups.append(self._shared.among)
        return [group for group in groups if isinstance(group, dist.ProcessGroup)]

    def _get_process_group_backend(self) -> str:
        """Return the backend of the group of all ranks: gloo, in the host's memory, if ranks share GPUs.

        A single rank sums nothing. It has gloo, too, as NCCL would take seconds and memory of the GPU.
        """
        is_alone = self.world_size == 1 and self._process_group_backend is None
        return "gloo" if self.ranks_per_device > 1 or is_alone else str(super()._get_process_group_backend())

    def _open_store(self) -> Any:
        """Open our own part of the store where ranks found each other, so that no second port is needed."""
        name = [secrets.token_hex(8)]
        dist.broadcast_object_list(name, src=0, group=self._patient)
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # torch exports these classes, but not in its stubs
        store = dist.TCPStore(host, port, None, False, self.timeout, False)  # type: ignore[attr-defined] # see above
        return dist.PrefixStore(name[0], store)  # type: ignore[attr-defined] # as above

    def _configure_launcher(self) -> None:
        """Choose how processes start; each ends with the process that started it."""
        super()._configure_launcher()
        assert self.cluster_environment is not None
        check_variables(self.cluster_environment, self.num_processes, self.num_nodes)
        self._launcher = new_launcher(self.cluster_environment, self.num_processes, self.num_nodes)
        follow_starter(self.cluster_environment)

    def configure_ddp(self) -> None:
        """Leave the module unwrapped: gradients stay with their client."""

    # -- collectives ---------------------------------------------------------------------------------------------------

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over all ranks in place."""
        if tensor.numel() and self.world_size > 1:
            if self._shared is not None and tensor.device.type == "cuda":
                self._shared.sum_(tensor)
            else:
                self._wait(dist.all_reduce(tensor, async_op=True))
        return tensor

    def open_groups(self, groups: Sequence[range]) -> None:
        """Let the ranks of each group sum among themselves, see :meth:`sum_within_`, unless they can already.

        All ranks of the run, also those outside, call it with the same groups. A group of gloo's waits up to
        ``round_timeout``; on GPUs it has one of NCCL's beside it, which waits up to ``timeout``.
        """
        new = [ranks for ranks in groups if (ranks, "cpu") not in self._groups]
        if new:
            self.exchange([])  # to wait for the others here shows progress; the new groups' own wait does not
        for ranks in new:
            # ranks wait for each other by gloo, perhaps for a client of several hours; NCCL only sums after that
            with without_gloo_lines(_SPEAKS):
                self._groups[ranks, "cpu"] = dist.new_group(list(ranks), timeout=self.round_timeout, backend="gloo")
            if self._shared is None and self.root_device.type == "cuda":
                group = dist.new_group(list(ranks), timeout=self.timeout, backend=self.process_group_backend)
                self._groups[ranks, "cuda"] = group

    def meet_within(self, ranks: range) -> None:
        """Wait for the ranks of a group; all of them call it."""
        self._wait(dist.all_reduce(torch.zeros(1), group=self._groups[ranks, "cpu"], async_op=True))

    def sum_within_(self, tensor: Tensor, ranks: range) -> Tensor:
        """Sum a tensor over the ranks of a group in place; all ranks of the group call it.

        The host does not wait for a GPU.
        """
        if self._shared is not None and tensor.device.type == "cuda":
            self._shared.through_host(tensor, lambda host: self.sum_within_(host, ranks))
            return tensor
        work = dist.all_reduce(tensor, group=self._groups[ranks, tensor.device.type], async_op=True)
        if tensor.device.type == "cuda" and self.process_group_backend == "nccl":
            work.wait()  # the GPU waits; if a rank of the group is lost, the next batch has the error
        else:
            self._wait(work)
        return tensor

    def exchange(self, tables: Sequence[Tensor], error: Exception | None = None) -> None:
        """Sum float64 CPU tables over all ranks in place, unless a rank has failed.

        One rank fills an entry, the others hold zero, so the sum is exact. Shapes are the same on every rank.

        Raises:
            Exception: ``error``, of this rank, if it failed.
            PeerError: on the other ranks.
        """
        if error is not None:
            self._report(error)
            raise error
        if self.world_size == 1:
            return
        # never empty: without tables, ranks still wait for each other here
        payload = torch.cat([torch.zeros(1, dtype=torch.float64), *(table.flatten() for table in tables)])
        self._wait(dist.all_reduce(payload, group=self._patient, async_op=True))
        for table, part in zip(tables, payload[1:].split([table.numel() for table in tables]), strict=True):
            table.copy_(part.view_as(table))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run a block that may fail on some ranks; then all ranks continue, or all raise. See :meth:`exchange`."""
        error: Exception | None = None
        try:
            yield
        except Exception as e:  # of any type: the other ranks must stop, too
            error = e
        self.exchange([], error)

    def broadcast_(self, tensor: Tensor) -> Tensor:
        """Overwrite a tensor with rank 0's, in place."""
        if tensor.numel() and self.world_size > 1:
            if self._shared is not None and tensor.device.type == "cuda":
                self._shared.through_host(tensor, self.broadcast_)
            else:
                self._wait(dist.broadcast(tensor, src=0, async_op=True))
        return tensor

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return the object of rank ``src``, of plain types."""
        if self.world_size > 1:
            self.exchange([])  # wait here, where failures of other ranks are noticed
        return super().broadcast(obj, src)

    def barrier(self, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002 - Lightning's signature
        """Wait for all ranks."""
        if self._patient is not None:
            self.exchange([])

    def _wait(self, work: Any) -> None:
        """Wait for a collective, unless a rank fails before it comes."""
        start = time.monotonic()
        while not work.is_completed():
            self.poll()
            time.sleep(min((time.monotonic() - start) / 50, 2e-3))  # late by 2 % at most
        try:
            work.wait()
        except RuntimeError as error:  # a connection broke: the channel may have the reason
            assert self._channel is not None
            try:
                self._channel.await_news()
            except FedSimError as news:
                raise news from error

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:  # noqa: ARG002 - Lightning's signature
        """Write a checkpoint directory; every rank writes its clients' states. A kill leaves one complete version."""
        states = checkpoint.pop(checkpoint_files.STATES_KEY, ())
        written = torch.zeros(self.world_size, 2, dtype=torch.float64)
        self._is_saving = True
        try:
            partial = self._begin_version(Path(filepath))
            try:
                with self._writing(partial):
                    of_rank = checkpoint_files.write_shards(partial, self.global_rank, states)
                    written[self.global_rank] = torch.tensor(of_rank, dtype=torch.float64)
                self.exchange([written])
                with self._writing(partial):
                    if self.is_global_zero:
                        of_ranks = [checkpoint_files.Written(*map(int, row)) for row in written.tolist()]
                        checkpoint_files.write_global(partial, checkpoint, of_ranks)
                        publish_version(partial)
            except FedSimError:
                shutil.rmtree(partial, ignore_errors=True)  # else half a checkpoint would occupy the disk
                raise
        finally:
            self._is_saving = False

    def _begin_version(self, folder: Path) -> Path:
        """Create a partial version on rank 0, and check that all ranks can read it."""
        name_and_token = ["", ""]
        with self._writing(folder):
            if self.is_global_zero:
                name_and_token = checkpoint_files.begin_with_token(folder)
        name, token = self.broadcast(name_and_token)
        partial = folder / str(name)
        with self._writing(partial):
            if not checkpoint_files.has_token(partial, token):
                raise DataError(checkpoint_files.unreadable(partial, self.global_rank))
        return partial

    @contextmanager
    def _writing(self, path: Path) -> Iterator[None]:
        """Run a block that writes, on all ranks together; raise DataError if the disk is full."""
        with self.together():
            try:
                yield
            except OSError as error:
                raise DataError(checkpoint_files.unwritten(path, error)) from error

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:  # noqa: ARG002 - nothing else is ever loaded
        """Read a checkpoint without the clients' private states; each rank reads those of its own clients."""
        path = ""
        with self.together():
            if self.is_global_zero:  # one rank chooses the version: a fit may be writing the next one
                path = str(checkpoint_files.find_version(Path(checkpoint_path)))
        version = Path(self.broadcast(path))
        with self.together():
            checkpoint = checkpoint_files.read_checkpoint(version)
        checkpoint[checkpoint_files.CONTENT_KEY]["path"] = str(version)
        checkpoint_files.relocate_callbacks(checkpoint, version.absolute().parent.parent)
        return checkpoint

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint directory."""
        path = Path(filepath)
        if self.is_global_zero and path.exists():
            checkpoint_files.remove_checkpoint(path)
