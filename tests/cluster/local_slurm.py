"""A throw-away Slurm on this machine: real daemons, as many virtual nodes as wanted, everything below one folder.

python tests/cluster/local_slurm.py start DIR --nodes 4
export PATH=DIR/bin:$PATH MASTER_ADDR=127.0.0.1     # nodes are called n1, n2, ...: names that do not resolve
sbatch --nodes 2 slurm/fit.sbatch --config configs/quickstart.yaml --run_dir runs/mine
python tests/cluster/local_slurm.py stop DIR

It needs Debian or Ubuntu, whose packages it downloads once and unpacks, without root, into the user's cache. There is
no authentication: anyone who reaches its ports may submit jobs as anyone, so this is for test machines only.
"""

from __future__ import annotations

import argparse
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PACKAGES = ("libhwloc15", "liblua5.1-0", "libmunge2", "slurm-wlm-basic-plugins", "slurm-client", "slurmctld", "slurmd")
COMMANDS = ("sbatch", "srun", "salloc", "scancel", "scontrol", "sinfo", "squeue")
PATIENCE = 300.0
"""seconds for whatever a busy machine delays"""
FINAL = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")

# auth/none and cred/none: no munge; linuxproc: no cgroups; config_overrides: nodes claim more cores than there are
CONF = """\
ClusterName=local
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,batch_sched_delay=0
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
KillWait=30
PluginDir={plugins}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
{nodes}
PartitionName=all Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""


class UnavailableError(RuntimeError):
    """This machine cannot have the packages."""


# -- packages ----------------------------------------------------------------------------------------------------------


def fetch_packages() -> Path:
    """Return a folder with Slurm unpacked; downloads it the first time.

    Raises:
        UnavailableError: there are no Debian packages here.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedsim-local-slurm"
    if (cache / "complete").exists():
        return cache
    for tool in ("apt-get", "dpkg"):
        if shutil.which(tool) is None:
            raise UnavailableError(f"{tool} is not here: the packages come from Debian or Ubuntu")
    partial = cache.with_name(f"{cache.name}.{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        _download(partial)
        for package in partial.glob("*.deb"):
            subprocess.run(["dpkg", "-x", package.name, "."], cwd=partial, check=True)
            package.unlink()
        (partial / "complete").touch()
        with suppress(OSError):  # another process was quicker
            partial.rename(cache)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return cache


def _download(folder: Path) -> None:
    command = ["apt-get", "download", *PACKAGES]
    try:
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        raise UnavailableError("apt-get download does not end: is there a network?") from None
    if len(list(folder.glob("*.deb"))) < len(PACKAGES):
        raise UnavailableError(f"apt-get download: {(result.stderr.strip().splitlines() or ['failed'])[-1]}")


# -- the cluster -------------------------------------------------------------------------------------------------------


class LocalSlurm:
    """One cluster; use :func:`local_slurm` where it must end with a block.

    Args:
        folder: for configuration, logs, state and the commands (``bin``).
        nodes: number of virtual nodes n1, n2, ...
        cpus: of each node.
    """

    def __init__(self, folder: Path, nodes: int = 2, cpus: int = 4) -> None:
        self.folder = folder.absolute()
        self.nodes = [f"n{i + 1}" for i in range(nodes)]
        self.cpus = cpus
        self._children: list[subprocess.Popen[bytes]] = []

    @property
    def environment(self) -> dict[str, str]:
        """This process's variables, with the commands of the cluster first in PATH."""
        return {**os.environ, "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}

    def start(self) -> None:
        """Start the daemons and wait until all nodes are idle."""
        root = fetch_packages()
        for name in ("bin", "state", "spool"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        libraries, plugins = _libraries(root)
        (self.folder / "slurm.conf").write_text(self._conf(plugins))
        for name in COMMANDS:
            self._write_command(name, root / "usr" / "bin" / name, libraries)
        environment = self._variables(libraries)
        stepd = root / "usr" / "sbin" / "slurmstepd-wlm"
        if not stepd.exists():
            stepd = root / "usr" / "sbin" / "slurmstepd"
        self._spawn("slurmctld", [_daemon(root, "slurmctld"), "-D", "-i"], environment)
        for node in self.nodes:
            (self.folder / "spool" / node).mkdir(exist_ok=True)
            self._spawn(node, [_daemon(root, "slurmd"), "-D", "-N", node, "-d", str(stepd)], environment)
        self._await_nodes()

    def stop(self) -> None:
        """End all jobs and daemons, and whatever else of the cluster is left."""
        if (self.folder / "bin" / "scancel").exists() and _alive(self._daemons()):
            with suppress(subprocess.SubprocessError):
                self.run("scancel", "--signal=KILL", "--full", "--user", _user(), check=False, timeout=5)
        own = {*self._daemons(), *processes_that_know(self.folder)}
        for number, patience in ((signal.SIGTERM, 1.5), (signal.SIGKILL, 5.0)):
            for pid in own:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            deadline = time.monotonic() + patience
            while _alive(own) and time.monotonic() < deadline:
                for child in self._children:
                    child.poll()  # else they stay as zombies
                time.sleep(0.05)
            own |= processes_that_know(self.folder)
        (self.folder / "pids").unlink(missing_ok=True)

    def run(self, *command: str, check: bool = True, timeout: float = PATIENCE) -> str:
        """Run one of the cluster's commands, and return what it prints."""
        path = str(self.folder / "bin" / command[0])
        result = subprocess.run(
            [path, *command[1:]], capture_output=True, text=True, timeout=timeout, env=self.environment
        )
        if check and result.returncode:
            raise RuntimeError(f"{' '.join(command)}: {result.stderr.strip()}")
        return result.stdout

    def jobs(self, job: str | int) -> list[dict[str, str]]:
        """Return what Slurm knows of a job: one entry, or one for each task of an array."""
        lines = self.run("scontrol", "--oneliner", "show", "job", str(job)).splitlines()
        return [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in lines if line.strip()]

    def wait(self, job: str | int, timeout: float = PATIENCE) -> list[str]:
        """Wait until a job, or every task of an array, has ended; return the states.

        ``sbatch --wait`` looks up to half a minute late.
        """
        deadline = time.monotonic() + timeout
        while True:
            states = [entry["JobState"] for entry in self.jobs(job)]
            if all(state in FINAL for state in states):
                return states
            if time.monotonic() > deadline:
                raise TimeoutError(f"job {job} is {', '.join(states)} after {timeout:.0f} s")
            time.sleep(0.2)

    # -- details -------------------------------------------------------------------------------------------------------

    def _conf(self, plugins: Path) -> str:
        ports = _free_ports(1 + len(self.nodes))
        host = socket.gethostname().partition(".")[0]
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={self.cpus} State=UNKNOWN"
            for name, port in zip(self.nodes, ports[1:], strict=True)
        )
        return CONF.format(
            host=host, port=ports[0], user=_user(), plugins=plugins, folder=self.folder, nodes=nodes,
            names=",".join(self.nodes),
        )  # fmt: skip

    def _variables(self, libraries: str) -> dict[str, str]:
        return {
            **os.environ,
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [libraries, os.environ.get("LD_LIBRARY_PATH")])),
        }

    def _write_command(self, name: str, program: Path, libraries: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(
            "#!/bin/sh\n"
            f"SLURM_CONF='{self.folder / 'slurm.conf'}'\n"
            f"LD_LIBRARY_PATH='{libraries}'${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}\n"
            f"export SLURM_CONF LD_LIBRARY_PATH\nexec '{program}' \"$@\"\n"
        )
        path.chmod(0o755)

    def _spawn(self, name: str, command: list[str], environment: dict[str, str]) -> None:
        with (self.folder / f"{name}.out").open("wb") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        self._children.append(process)
        with (self.folder / "pids").open("a") as file:
            file.write(f"{process.pid}\n")

    def _daemons(self) -> set[int]:
        """Recorded processes, if they are still ours: numbers are used again."""
        path = self.folder / "pids"
        recorded = {int(pid) for pid in path.read_text().split()} if path.exists() else set()
        return recorded & processes_that_know(self.folder)

    def _await_nodes(self, timeout: float = PATIENCE) -> None:
        deadline = time.monotonic() + timeout
        while True:
            states = self.run("sinfo", "--noheader", "--Node", "--format=%T", check=False).split()
            if len(states) == len(self.nodes) and set(states) == {"idle"}:
                return
            if time.monotonic() > deadline:
                logs = "\n".join(path.read_text()[-2000:] for path in sorted(self.folder.glob("*.log")))
                raise RuntimeError(f"the nodes are {states or 'silent'} after {timeout:.0f} s\n{logs}")
            time.sleep(0.1)


@contextmanager
def local_slurm(folder: Path, nodes: int = 2, cpus: int = 4) -> Iterator[LocalSlurm]:
    """Run a block with a cluster, which ends with it."""
    cluster = LocalSlurm(folder, nodes, cpus)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def _daemon(root: Path, name: str) -> str:
    """Debian's alternatives system would make the plain name."""
    path = root / "usr" / "sbin" / name
    return str(path if path.exists() else path.with_name(f"{name}-wlm"))


def _libraries(root: Path) -> tuple[str, Path]:
    """Return the search path for libraries, and the folder of plugins."""
    plugins = next((root / "usr" / "lib").glob("*/slurm-wlm"))
    return os.pathsep.join([str(plugins.parent), str(plugins)]), plugins


def _user() -> str:
    """A name, or the number of a user without one."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def processes_that_know(folder: Path) -> set[int]:
    """Find the processes that were started with a cluster's configuration: daemons, steps and the jobs' own."""
    found, variable = set(), f"SLURM_CONF={folder.absolute() / 'slurm.conf'}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if variable in (entry / "environ").read_bytes().split(b"\0"):
                found.add(int(entry.name))
    return found - {os.getpid()}


def _alive(pids: Iterable[int]) -> bool:
    for pid in pids:
        with suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                return True
    return False


def main() -> None:
    """Start or stop a cluster from the shell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("start", "stop"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--cpus", type=int, default=4, help="of each node")
    args = parser.parse_args()
    cluster = LocalSlurm(args.folder, args.nodes, args.cpus)
    if args.action == "stop":
        cluster.stop()
        return
    try:
        cluster.start()
    except BaseException as error:
        cluster.stop()
        if isinstance(error, UnavailableError):
            sys.exit(f"error: {error}")
        raise
    sys.stdout.write(f"export PATH={cluster.folder / 'bin'}:$PATH MASTER_ADDR=127.0.0.1\n")


if __name__ == "__main__":
    main()
