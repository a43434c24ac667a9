"""The part of the strategy that watches over a run while its ranks are apart: their reports, and signals."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn

from fedsim.core.errors import FedSimError, PeerError, RunStoppedError
from fedsim.core.names import printable
from fedsim.core.progress import note_progress
from fedsim.strategy.channel import ControlChannel, end_process, end_with_python
from fedsim.strategy.stop_watch import StopWatch, hear_sigterm

_ABORT = 5.0
"""seconds for NCCL to give up sums; it may wait for ranks that are lost, which this process then does not"""


def abort_groups(groups: Sequence[Any], seconds: float = _ABORT) -> None:
    """Let NCCL give up the sums of these groups, for which a lost rank never comes.

    Otherwise the GPU would wait for that rank, and the host for the GPU. Each group has its own thread, because NCCL
    may wait in one of them before it gives up another.
    """
    threads = [threading.Thread(target=_abort, args=(group,), daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))


def _abort(group: Any) -> None:
    with suppress(RuntimeError):  # the run ends by another error
        group.abort()


class WatchedStrategy(DDPStrategy):
    """Ranks that report to each other through a control channel, and end after a signal even if they are stuck."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.stop_signal: int | None = None
        """the signal that asked the run to end after this round; None: no signal came"""
        self.stop_deadline: float | None = None
        """time.monotonic() at which this rank stops waiting for the round's end"""
        self._is_saving = False
        self._channel: ControlChannel | None = None
        self._stop_watch: StopWatch | None = None
        self._last_act: Callable[[int], None] = lambda _: None

    def on_exception(self, exception: BaseException) -> None:
        """Report an error to the other ranks, unless a collective has already done so, and give up sums of NCCL.

        If the error ends the program, such as a script, its end does not wait for a lost rank.
        """
        super().on_exception(exception)
        if self.world_size > 1:
            end_with_python()
        self._report(exception)
        abort_groups(self._nccl_groups())

    def _nccl_groups(self) -> Sequence[Any]:
        """Return the process groups of NCCL that this rank belongs to."""
        return ()

    def teardown(self) -> None:
        """Release the device, then close the control channel: it ends a process that waits for a GPU for ever."""
        self.end_watch()
        try:
            super().teardown()
        finally:
            if self._channel is not None:
                self._channel.close()
                self._channel = None

    def describe_activity(self, activity: str) -> None:
        """Set this rank's activity, one line, for error messages of the other ranks."""
        note_progress()
        if self._channel is not None:
            self._channel.activity = printable(activity)  # the name of a client may have a line break

    def request_stop(self, signum: int, deadline: float | None = None) -> None:
        """Ask all ranks to end after this round, or at ``deadline`` (time.monotonic()). Safe in a signal handler."""
        self.stop_signal, self.stop_deadline = signum, deadline

    def watch_for_stop(self, act: Callable[[int], None]) -> None:
        """End this process soon after the deadline of a stop, also if the main thread does not hear of it.

        ``act`` is called with the signal's number before such a forced end. :meth:`end_watch` ends the watch.
        """
        self.end_watch()
        self._last_act = act
        if self._channel is not None:
            self._channel.last_act = act
        self._stop_watch = StopWatch(lambda: self.stop_deadline, lambda: self._is_saving, self._force_end)

    def end_watch(self) -> None:
        """Leave the end to the main thread again."""
        if self._stop_watch is not None:
            self._stop_watch.close()
            self._stop_watch = None

    def _force_end(self) -> None:
        """End this process from another thread, and let the other ranks abandon the round."""
        assert self.stop_signal is not None, "no stop was requested"
        stop = RunStoppedError(self.stop_signal)
        if self._channel is not None:
            self._channel.abandon(stop.signum)
        self._last_act(stop.signum)
        end_process(str(stop) if self.is_global_zero else "", 128 + stop.signum)

    def on_test_start(self) -> None:
        """Let SIGTERM end a test; Lightning calls this, and the next one, after it has set its own handlers."""
        hear_sigterm(lambda number: self.request_stop(number, time.monotonic()), is_alone=self.world_size == 1)
        self.watch_for_stop(lambda _: None)

    on_predict_start = on_test_start

    def on_validation_start(self) -> None:
        """Let SIGTERM end a validation of a checkpoint; within a fit, Preemption handles signals."""
        if self.lightning_module is not None and self.lightning_module.trainer.state.fn == TrainerFn.VALIDATING:
            self.on_test_start()

    def poll(self) -> None:
        """Check, at almost no cost, that this rank should continue.

        Raises:
            PeerError: if another rank failed or fell silent.
            RunStoppedError: if a rank was asked to end, and the round takes too long.
        """
        note_progress()
        if self._channel is not None:
            self._channel.check()
        late = self.stop_deadline is not None and time.monotonic() > self.stop_deadline
        if late and not self._is_saving:  # while a checkpoint is written, the round is complete
            self.abandon_round()

    def abandon_round(self) -> NoReturn:
        """Leave the round on all ranks: raise RunStoppedError."""
        assert self.stop_signal is not None, "no stop was requested"
        if self._channel is not None:
            self._channel.abandon(self.stop_signal)
        raise RunStoppedError(self.stop_signal)

    def _report(self, exception: BaseException) -> None:
        if self._channel is not None and not isinstance(exception, PeerError | RunStoppedError):
            # an OSError names its file in str alone
            message = str(exception) if isinstance(exception, FedSimError | OSError) else repr(exception)
            self._channel.fail(" ".join(message.split()))
