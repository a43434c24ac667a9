"""Runs in processes of their own, and parts of fedsim that fail on purpose.

Every process of a :class:`Run` is forked from a fork server, which has imported fedsim: it starts in a second, not in
five. ``FAIL`` in its environment says where it fails: ``POINT@ROUND/RANK`` or ``POINT@ROUND/*``, rounds from 1;
``FAIL_WITH`` says how: by a signal to itself (SIGKILL unless another is named).
"""

import atexit
import multiprocessing
import multiprocessing.forkserver
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from itertools import count
from multiprocessing.util import Finalize
from pathlib import Path
from types import SimpleNamespace
from typing import Literal
from unittest import mock

import torch
import torch.distributed as dist
from lightning import Callback
from lightning.pytorch.utilities import rank_zero_only
from safetensors.torch import save_file

from environment import is_of_a_launcher
from fedsim.__main__ import main
from fedsim.core.progress import note_progress
from fedsim.core.versions import current_version
from fedsim.federation.components.selection import Selection
from fedsim.federation.events import RoundCallback
from fedsim.methods import FedPav
from fedsim.strategy import channel
from fedsim.strategy import checkpoint_files as checkpoints
from fedsim.strategy.checkpoint_files import read_checkpoint, read_states
from fedsim.strategy.strategy import FederatedStrategy
from seen_by import measure_for

TESTS = Path(__file__).parent
PATIENCE = 300.0  # seconds, also on a busy machine: how a run ended is claimed of its exit code, log and checkpoint
START_LINE = re.compile(r"on \d+ x cpu.*, \d+ ranks?, .*, torch \S+|changed since round \d+: trainer\.devices .*")
POINTS = ("before training", "mid-client", "after training", "mid-collective", "mid-checkpoint", "after rename")
CONFIG = """
seed_everything: 0
trainer:
  max_epochs: 3
  limit_val_batches: 0
  accelerator: cpu
  devices: 1
  enable_progress_bar: false
  strategy: {class_path: failing.FailingStrategy}
  callbacks: [failing.Failing]
model:
  method: FedPav
  backbone: {class_path: SmallCNN, init_args: {width: 4}}
  neck: {kind: linear, dim: 8, dropout: 0.2}
  server_optimizer: FedAdam
  client:
    batch_size: 8
    optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.05, momentum: 0.9}}
data:
  source: {class_path: SyntheticReID, init_args: {clients: 3, unseen: 1, scale: 0.2}}
  val: none
  size: [16, 8]
  augmentation: {pad: 1, flip: 0.5}
"""

# -- runs --------------------------------------------------------------------------------------------------------------

_server = multiprocessing.get_context("forkserver")
# also what each process would have to import before it can begin
_server.set_forkserver_preload(["fedsim.cli.fit", "pytest", "failing", "frozen"])


@cache
def room():
    """Where forked processes have their temporary files: they end without removing them."""
    return tempfile.TemporaryDirectory(prefix="fedsim-tests-")


class Forked(_server.Process):
    """A process that is forked from the server."""

    def __init__(self, target, args):
        super().__init__(target=target, args=args, daemon=True)
        self._test, self._room = os.environ.get("PYTEST_CURRENT_TEST"), room().name

    def start(self):
        """Start; the server finds the tests' own modules, too, and has no OpenMP threads: forks would wait for them."""
        path = os.pathsep.join([str(TESTS), *sys.path])
        with mock.patch.dict(os.environ, PYTHONPATH=path, OMP_NUM_THREADS="1"):
            multiprocessing.forkserver.ensure_running()
        super().start()

    def run(self):
        """Do the work."""
        measure_for(self._test)
        tempfile.tempdir = self._room
        super().run()


class Run:
    """A command whose ranks are processes of this machine, each with a log of its own.

    Args:
        folder: for the logs.
        args: the command line.
        ranks: number of processes.
        environment: variables of all of them.
        machines: that they believe to be on.
    """

    def __init__(self, folder, *args, ranks=1, environment=None, machines=1):
        folder.mkdir(parents=True, exist_ok=True)
        stamp = time.monotonic_ns()
        self.logs = [folder / f"log-{stamp}-{rank}.txt" for rank in range(ranks)]
        arguments = [*map(str, args), f"--trainer.devices={ranks // machines}", f"--trainer.num_nodes={machines}"]
        port = _free_port()
        variables = [_variables(rank, ranks, port, machines) | (environment or {}) for rank in range(ranks)]
        self.processes = [
            Forked(_command, (arguments, rank, variables[rank], self.logs[rank])) for rank in range(ranks)
        ]
        for process in self.processes:
            process.start()

    def wait(self, timeout=PATIENCE):
        """Return the exit codes; whoever still lives after ``timeout`` seconds is killed, and its code is None."""
        deadline = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(deadline - time.monotonic(), 0))
        codes = [process.exitcode for process in self.processes]
        self.kill()
        return codes

    def kill(self):
        """Kill what is left."""
        for process in self.processes:
            process.kill()
            process.join()

    def signal(self, number, *ranks):
        """Send a signal to some ranks."""
        for rank in ranks:
            os.kill(self.processes[rank].pid, number)

    def await_text(self, text, rank=0, timeout=PATIENCE):
        """Wait until a rank has written ``text``."""
        await_true(lambda: text in self.log(rank), timeout, lambda: self.log(rank))

    def log(self, rank=0):
        """Return what a rank has written so far."""
        return _written(self.logs[rank])

    @property
    def output(self):
        """What all ranks have written."""
        return "\n".join(f"rank {rank}:\n{self.log(rank)}" for rank in range(len(self.logs)))


def _written(log):
    """Return a log, without the lines that gloo writes in torch 2.10 when ranks have found each other."""
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    return "".join(line for line in lines if not line.startswith("[Gloo] Rank "))


def run_on_ranks(function, folder, ranks=2, timeout=PATIENCE, machines=1):
    """Call ``function(folder)`` in processes that are ranks of one run; it may train as often as it likes."""
    port = _free_port()
    logs = [folder / f"log-{rank}.txt" for rank in range(ranks)]
    processes = [
        Forked(_call, (function, folder, rank, _variables(rank, ranks, port, machines), log))
        for rank, log in enumerate(logs)
    ]
    codes = end_of(processes, timeout)
    assert codes == [0] * ranks, "\n".join(log.read_text() for log in logs if log.exists())


class Launched:
    """A command as people type it: rank 0 starts the others. All are in a session of their own.

    Args:
        folder: the run directory.
        args: the command line.
        environment: further variables.
    """

    def __init__(self, folder, *args, environment=None):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.path = folder, folder / f"log-{time.monotonic_ns()}.txt"
        self.process = Forked(_launcher, (list(map(str, args)), environment or {}, self.path))
        self.process.start()

    @property
    def log(self):
        """What the ranks have written so far."""
        return _written(self.path)

    @property
    def pids(self):
        """The ids of the ranks that live."""
        return [pid for pid, _, session in _processes() if session == self.process.pid]

    def await_end(self, timeout=PATIENCE):
        """Wait until no process of the run is left; return the exit code of rank 0."""
        self.process.join(timeout)
        await_true(lambda: not self.pids, timeout, lambda: self.log)
        return self.process.exitcode

    def kill(self):
        """Kill what is left."""
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.join()


def _launcher(args, variables, log):
    os.setsid()
    _become(0, variables, log)
    sys.argv = ["tests", *args]  # fedsim itself would start ranks that import everything
    script = "lightning.pytorch.strategies.launchers.subprocess_script.subprocess"
    with mock.patch(script, SimpleNamespace(Popen=ForkedChild)):
        sys.exit(main(args))


class ForkedChild:
    """Stands for ``subprocess.Popen`` where rank 0 starts the others: they are its forks, and need no imports."""

    def __init__(self, command, env, cwd):
        self.returncode = None
        self.pid = os.fork()
        if self.pid == 0:
            self._run(env)

    def _run(self, env):
        code = 1
        try:
            os.environ.clear()
            os.environ.update(env)
            rank_zero_only.rank = int(env["LOCAL_RANK"])
            code = main(sys.argv[1:])
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)

    def poll(self):
        """Return the exit code, None while the process lives."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def send_signal(self, number):
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


def await_true(condition, timeout, describe):
    """Wait until ``condition()``; otherwise fail with ``describe()``."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, describe()
        time.sleep(0.02)


def _become(rank, variables, log):
    """Make this process a rank that writes to a log."""
    with open(log, "wb", buffering=0) as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    for name in [n for n in os.environ if is_of_a_launcher(n)]:
        del os.environ[name]
    os.environ |= variables
    rank_zero_only.rank = rank
    channel._PERIOD = 0.1  # ranks look at each other five times as often, so that tests wait less


def _call(function, folder, rank, variables, log):
    _become(rank, variables, log)
    function(folder)


def _command(args, rank, variables, log):
    _become(rank, variables, log)
    sys.argv = ["fedsim", *args]
    sys.exit(main(args))


def run_forked(args, cwd, variables, timeout, ranks=1):
    """Run a command whose ranks are forked; return it as :func:`subprocess.run` does: rank 0's code, all output."""
    port = _free_port()
    with tempfile.TemporaryDirectory() as folder:
        paths = [[Path(folder) / f"{name}-{rank}" for name in ("stdout", "stderr")] for rank in range(ranks)]
        processes = [
            Forked(_forked, (args, str(cwd), variables | _variables(rank, ranks, port), rank, paths[rank]))
            for rank in range(ranks)
        ]
        codes = end_of(processes, timeout)
        output = ["".join(path.read_text() for path in kind) for kind in zip(*paths, strict=True)]
    if None in codes:
        raise subprocess.TimeoutExpired(args, timeout, *output)
    assert not any(codes) or codes[0], f"rank 0 ended well, others with {codes[1:]}\n{output[1]}"
    return subprocess.CompletedProcess(args, codes[0], *output)


def end_of(processes, timeout):
    """Start processes and wait for them; return their exit codes, None for those that had to be killed."""
    for process in processes:
        process.start()
    deadline = time.monotonic() + timeout
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes


def _forked(args, cwd, variables, rank, paths):
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(variables)
    rank_zero_only.rank = rank
    for path, descriptor in zip(paths, (1, 2), strict=True):
        with path.open("wb", buffering=0) as file:
            os.dup2(file.fileno(), descriptor)
    sys.argv = ["fedsim", *args]
    sys.exit(main(args))


def _variables(rank, ranks, port, machines=1):
    if ranks == 1:
        return {}
    machine, local_rank = divmod(rank, ranks // machines)
    own = {"RANK": rank, "LOCAL_RANK": local_rank, "NODE_RANK": machine, "WORLD_SIZE": ranks}
    return {name: str(value) for name, value in (own | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}).items()}


_ports = count()


def _free_port():
    """A port of no other process of pytest, below those that the kernel gives to connections."""
    process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    while True:
        port = 10_000 + 500 * (process % 10) + next(_ports) % 500
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def fit(folder, *args, ranks=1, fail=None, how="SIGKILL", environment=None):
    """Start ``fedsim fit`` with :data:`CONFIG` in ``folder``."""
    own = _failure(fail, how) | (environment or {})
    return Run(folder, "fit", *options(folder), *args, ranks=ranks, environment=own)


def launch(folder, *args, ranks=2, environment=None):
    """Start ``fedsim fit`` with :data:`CONFIG` in ``folder`` as people do."""
    return Launched(folder, "fit", *options(folder), f"--trainer.devices={ranks}", *args, environment=environment)


def _failure(fail, how):
    return {"FAIL": fail, "FAIL_WITH": how} if fail else {}


def options(folder):
    """Return the options that every run of :data:`CONFIG` has."""
    folder.mkdir(parents=True, exist_ok=True)
    config = folder.with_suffix(".yaml")
    config.write_text(CONFIG)
    return ["--config", config, "--run_dir", folder]


def resume(folder, *args, ranks=1, fail=None, how="SIGKILL"):
    """Continue a run by nothing but its directory."""
    return Run(folder, "fit", "--ckpt_path", folder, *args, ranks=ranks, environment=_failure(fail, how))


def begin_again(folder, *args, ranks=1, fail=None, how="SIGKILL"):
    """Give the whole command line again, as a script that restarts a run does."""
    return fit(folder, "--ckpt_path", "last", *args, ranks=ranks, fail=fail, how=how)


def go_on(folder, part, *args, **settings):
    """Start a part of a run, from 0: those that follow the first give its directory, or all options again."""
    if part == 0:
        return fit(folder, *args, **settings)
    if part % 2 or current_version(last(folder)) is None:
        return begin_again(folder, *args, **settings)
    return resume(folder, **settings)


def results(folder, *args, rounds=3):
    """Run on one rank without interruption; return the result after each round."""
    keep = {"dirpath": folder.with_name(f"{folder.name}-kept"), "filename": "{epoch}", "save_top_k": -1}
    own = [f"--trainer.callbacks.{name}={value}" for name, value in keep.items()]
    finish(fit(folder, f"--trainer.max_epochs={rounds}", *args, "--trainer.callbacks+=ModelCheckpoint", *own))
    return [read_result(keep["dirpath"] / f"epoch={round_}.ckpt") for round_ in range(rounds)]


class Dying(Callback):
    """Kills a later rank before the ranks have found each other."""

    def __init__(self, how="SIGKILL"):
        if os.environ.get("LOCAL_RANK", "0") != "0":
            os.kill(os.getpid(), getattr(signal, how))


class Reading(Callback):
    """Fills a folder that ranks share, and does not come to an end."""

    def __init__(self, ready):
        self.ready = ready

    def on_fit_start(self, trainer, pl_module):
        """Fill a folder in ``MEMORY``, and read for ever."""
        machine = pl_module.parts.rank_share.machine
        memory = mock.patch("fedsim.strategy.machine.memory_folder", return_value=Path(os.environ["MEMORY"]))
        with memory, machine.folder(1.0) as folder:
            (folder / "images").write_bytes(bytes(1000))
            Path(f"{self.ready}-{trainer.global_rank}").write_text(str(os.getpid()))
            while True:
                pl_module.strategy.poll()
                time.sleep(0.05)


class StuckEnd(Callback):
    """Lets the process wait for ever when Python ends, as NCCL may if another rank is lost."""

    def on_fit_start(self, *_):
        """Register what never ends: for a process of its own, and for a fork of the fork server."""
        atexit.register(time.sleep, 3600)
        Finalize(None, time.sleep, (3600,), exitpriority=0)


class Scoring(Callback):
    """Reads from a pipe that never has anything, in a test."""

    def __init__(self, ready):
        self.ready = ready

    def on_test_batch_start(self, *_):
        """Wait for ever."""
        Path(self.ready).touch()
        os.read(os.pipe()[0], 1)


class Hanging(FedPav):
    """Hangs in round 2 of a client, before its upload: ``how`` is one of the names in :meth:`upload`.

    With ``seconds`` the work only takes long, in steps that fedsim counts.
    """

    def __init__(self, client="town0", how="sleep", seconds=0.0):
        super().__init__()
        self.client, self.how, self.seconds = client, how, seconds

    def upload(self, client):
        """Hang."""
        if client.client_name == self.client and client.round == 1:
            deadline = time.monotonic() + (self.seconds or 3600.0)
            while time.monotonic() < deadline:
                if self.how == "sleep":
                    time.sleep(deadline - time.monotonic())
                elif self.how == "lock":
                    threading.Semaphore(0).acquire(timeout=deadline - time.monotonic())
                elif self.how == "pipe":
                    os.read(os.pipe()[0], 1)
                elif self.how == "work":
                    note_progress()
                    time.sleep(0.1)
        return super().upload(client)


def finish(run, timeout=PATIENCE):
    """Wait for a run that must succeed."""
    codes = run.wait(timeout)
    assert not any(codes), f"{codes}\n{run.output}"
    return run


def read_result(checkpoint):
    """Return all tensors of a checkpoint by name: global vectors, and private states of the clients that have one."""
    content = read_checkpoint(checkpoint)
    states = read_states(checkpoint, content["fedsim"], list(content["fedsim"]["clients"]))
    private = {f"{client}/{name}": tensor for client, state in states.items() for name, tensor in state.items()}
    return content["state_dict"] | private


def last(folder):
    """Return the path of a run's last checkpoint."""
    return folder / "checkpoints" / "last.ckpt"


def await_round(folder, number, describe):
    """Wait until round ``number`` is on its way: the checkpoint of the one before is complete."""
    pointer = last(folder) / "current"
    await_true(lambda: pointer.exists() and int(pointer.read_text()[1:]) >= number - 1, PATIENCE, describe)
    time.sleep(0.3)


def assert_equal(a, b):
    """Compare two results bit for bit."""
    assert a.keys() == b.keys()
    for key in a:
        assert torch.equal(a[key], b[key]), f"{key}: {int((a[key] != b[key]).sum())} of {a[key].numel()} entries differ"


def errors(log):
    """Return what a log says after ``fedsim: error:``, if it holds nothing but such lines after the start line."""
    lines = [line for line in log.splitlines() if not START_LINE.fullmatch(line)]
    assert all(line.startswith("fedsim: error: ") for line in lines), log
    return [line.removeprefix("fedsim: error: ") for line in lines]


def processes_of(folder):
    """Return the ids of the processes whose command line names ``folder``."""
    return [pid for pid, line, _ in _processes() if str(folder) in line]


def variable(pid, name):
    """Return a variable of a process's environment; None: it has none of that name, or has just ended."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    return dict(entry.split("=", 1) for entry in variables if "=" in entry).get(name)


def _processes():
    """Yield id, command line and session of every process that lives."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes().decode(errors="replace")
            state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if state not in "ZX":
            yield int(entry.name), line, int(session)


# -- parts that fail ---------------------------------------------------------------------------------------------------


def _is_here(point, round_, rank):
    return os.environ.get("FAIL") in (f"{point}@{round_ + 1}/{rank}", f"{point}@{round_ + 1}/*")


def _fail():
    del os.environ["FAIL"]  # once
    os.kill(os.getpid(), getattr(signal, os.environ["FAIL_WITH"]))


class FailingStrategy(FederatedStrategy):
    """Fails where ranks meet, and where a checkpoint is written."""

    def _is_at(self, point):
        return _is_here(point, self.lightning_module.current_epoch, self.global_rank)

    def exchange(self, tables, error=None):
        """Fail before the ranks meet, or within the collective."""
        is_end_of_training = len(tables) > 1
        if is_end_of_training and self._is_at("after training"):
            _fail()
        if is_end_of_training and self._is_at("mid-collective"):
            if self.world_size > 1:
                sizes = (table.numel() for table in tables)
                payload = torch.zeros(1 + sum(sizes), dtype=torch.float64)
                dist.all_reduce(payload, group=self._patient, async_op=True)
            _fail()
        super().exchange(tables, error)

    def save_checkpoint(self, checkpoint, filepath, storage_options=None):
        """Fail or be asked to end while a shard is written, before a new version is known, or for want of space."""
        with ExitStack() as stack:
            for point, target, substitute in (
                ("mid-checkpoint", "fedsim.strategy.checkpoint_files._write_shard", _write_half),
                ("after rename", "fedsim.core.versions.replacing", lambda path: _fail()),
                (
                    "no space for states",
                    "fedsim.strategy.checkpoint_files._write_shard",
                    _in_little_space(checkpoints._write_shard),
                ),
                ("no space for globals", "torch.save", _in_little_space(torch.save)),
                ("while saving", "fedsim.strategy.checkpoint_files._write_shard", _asked(checkpoints._write_shard)),
            ):
                if self._is_at(point):
                    stack.enter_context(mock.patch(target, substitute))
            super().save_checkpoint(checkpoint, filepath, storage_options)


def _write_half(path, tensors):
    save_file(tensors, path)
    os.truncate(path, path.stat().st_size // 2)
    _fail()


def _asked(write):
    """Let a function that writes files begin with a signal."""

    def interrupted(*args):
        _fail()
        write(*args)

    return interrupted


def _in_little_space(write):
    """Let a function that writes files meet the system's own error after 512 bytes."""

    def limited(*args):
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (512, hard))
        try:
            write(*args)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))

    return limited


class Failing(RoundCallback):
    """Fails among a rank's clients."""

    def __init__(self):
        self._round = self._rank = 0

    def setup(self, trainer, pl_module, stage):
        """Remember which rank this is."""
        self._rank = trainer.global_rank

    def on_round_start(self, round_, clients):
        """Fail before the first client."""
        self._round = round_
        if _is_here("before training", round_, self._rank):
            _fail()

    def on_client_batch(self, report):
        """Fail within a client."""
        if report.done == 2 and _is_here("mid-client", self._round, self._rank):
            _fail()


class Slow(RoundCallback):
    """Makes clients slow.

    Args:
        delay: seconds more for each batch.
        client: of this client, or of all.
        start: first slow round, from 1.
    """

    def __init__(self, delay=0.1, client=None, start=1):
        self.delay = delay
        self.client = client
        self.start = start
        self._round = 0

    def on_round_start(self, round_, clients):
        """Remember the round."""
        self._round = round_ + 1

    def on_client_batch(self, report):
        """Wait."""
        if self._round >= self.start and self.client in (None, report.client):
            time.sleep(self.delay)


def gate_of(folder):
    """Return the folder beside a run's in which :class:`Gate` meets the test."""
    return folder.with_name(f"{folder.name}-gate")


class Gate(RoundCallback):
    """Holds a run in a round until the test opens the gate, or until the run is asked to stop.

    :func:`gate_of` has a file ``open`` when the gate is open, and a file for each rank that waits and has read that all
    others have begun the round.
    """

    def __init__(self, round=2):
        self.round = round
        """from 1"""
        self._round = 0

    def setup(self, trainer, pl_module, stage):
        """Remember which rank of which run this is."""
        self._strategy, self._rank = trainer.strategy, trainer.global_rank
        self._folder = gate_of(Path(trainer.default_root_dir))
        self._folder.mkdir(exist_ok=True)

    def on_round_start(self, round_, clients):
        """Remember the round."""
        self._round = round_ + 1

    def on_client_batch(self, report):
        """Wait."""
        here = self._folder / str(self._rank)
        while self._round == self.round and not (self._folder / "open").exists():
            if self._strategy.stop_signal is not None:
                break
            self._strategy.poll()
            if self._all_have_begun():
                here.touch()
            time.sleep(0.02)
        here.unlink(missing_ok=True)

    def _all_have_begun(self):
        if self._strategy.world_size == 1:
            return True
        activities = self._strategy._channel._activities
        others = [activities.get(rank, "") for rank in range(self._strategy.world_size) if rank != self._rank]
        return all(f"round {self.round}, client " in activity for activity in others)


def await_gate(folder, describe, ranks=2):
    """Wait until all ranks of a run wait at its gate."""
    await_true(lambda: all((gate_of(folder) / str(rank)).exists() for rank in range(ranks)), PATIENCE, describe)


def open_gate(folder):
    """Let a run that waits at its gate go on, and later runs of the folder, too."""
    (gate_of(folder) / "open").touch()


class Jitter(RoundCallback):
    """Slows each batch by a random time, which differs from rank to rank and from run to run, and notes who trains.

    Args:
        seconds: at most, per batch.
        folder: for an empty file per round, client and process: ``round client process``.
    """

    def __init__(self, seconds=0.02, folder=None):
        self.seconds = seconds
        self.folder = folder

    def on_round_start(self, round_, clients):
        """Remember the round."""
        self._round = round_

    def on_client_batch(self, report):
        """Note the session, and wait."""
        if self.folder is not None:
            (Path(self.folder) / f"{self._round} {report.client} {os.environ['RANK']}").touch()
        time.sleep(self.seconds * float(torch.rand(1, generator=torch.Generator().manual_seed(time.perf_counter_ns()))))


@dataclass(frozen=True, kw_only=True)
class Raising(FedPav):
    """Fails in one client, in one round."""

    client: str = "town1"
    """empty: every client"""
    kind: Literal["defect", "memory", "nan"] = "defect"
    round: int = 2
    """from 1"""

    def loss(self, client, batch):
        """Return the supervised loss, unless it is time to fail."""
        loss = super().loss(client, batch)
        if client.round + 1 != self.round or self.client not in ("", client.client_name):
            return loss
        if self.kind == "defect":
            raise ZeroDivisionError("something unforeseen")
        if self.kind == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return loss * float("nan")


class Absent(Selection):
    """One client is not asked in one round, counted from 1."""

    def __init__(self, client="town1", round=2):
        self.client, self.round = client, round

    def select(self, round_, clients, seed):
        """Return all but that client."""
        return [client for client in clients if (client, round_ + 1) != (self.client, self.round)]
