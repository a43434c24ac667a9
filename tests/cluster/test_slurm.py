"""Real Slurm with virtual nodes on this machine: the scripts of slurm/, as users submit them."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from environment import is_of_a_launcher
from failing import (
    CONFIG,
    PATIENCE,
    assert_equal,
    await_gate,
    await_true,
    finish,
    fit,
    last,
    open_gate,
    processes_of,
    read_result,
    variable,
)
from fedsim.strategy.checkpoint_files import read_checkpoint
from local_slurm import LocalSlurm, UnavailableError, fetch_packages, local_slurm, processes_that_know

pytestmark = [pytest.mark.dist, pytest.mark.slow]
TESTS = Path(__file__).parents[1]
# round 2 does not end by itself
HELD = ["--trainer.callbacks+=failing.Gate"]


def preemption(grace=3600):
    """Return the options of a run that may end its round after a signal, however long it has been held."""
    return ["--trainer.callbacks+=fedsim.federation.callbacks.Preemption", f"--trainer.callbacks.grace={grace}"]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """A cluster of four nodes."""
    try:
        fetch_packages()
    except UnavailableError as error:
        pytest.skip(f"no Slurm: {error}")
    with local_slurm(tmp_path_factory.mktemp("slurm"), nodes=4) as cluster:
        yield cluster
    assert not processes_that_know(cluster.folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The result of the run in one process, that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    finish(fit(folder))
    return read_result(last(folder))


class Job:
    """A job that runs a fit of the federation that fails where it is told to."""

    def __init__(self, slurm, folder, *args, options=(), environment=None):
        config = folder.with_suffix(".yaml")
        config.write_text(CONFIG.replace("  devices: 1\n", ""))
        self.slurm, self.folder, self.path = slurm, folder, folder.with_suffix(".log")
        self.id = submit(slurm, [*options, f"--output={self.path}", "slurm/fit.sbatch", "--config", config,
                                 "--run_dir", folder, *args], environment)  # fmt: skip

    @property
    def log(self):
        """What all ranks and Slurm have written so far."""
        return self.path.read_text() if self.path.exists() else ""

    def fact(self, name):
        """Return an entry of what Slurm knows of the job."""
        return self.slurm.jobs(self.id)[0][name]

    def finish(self):
        """Wait for the end of a job that must succeed."""
        assert self.slurm.wait(self.id) == ["COMPLETED"], self.log
        return self

    def fail(self):
        """Wait for the end of a job that must fail."""
        assert self.slurm.wait(self.id) == ["FAILED"], self.log
        await_true(lambda: not processes_of(self.folder), PATIENCE, lambda: self.log)
        assert "Traceback" not in self.log
        return self

    def errors(self):
        """Return what the ranks call errors."""
        return [line for line in self.log.splitlines() if line.startswith("fedsim: error: ")]

    def await_gate(self):
        """Wait until both ranks are in the round that does not end by itself."""
        await_gate(self.folder, lambda: self.log)

    def ranks(self):
        """Return the process ids of the ranks; srun has our command line, too."""
        found = {variable(pid, "SLURM_PROCID"): pid for pid in processes_of(self.folder) if is_python(pid)}
        return {int(rank): pid for rank, pid in found.items() if rank is not None}

    def start_again(self):
        """Let the job start at once, and pass its gate."""
        await_end_of_part(self.slurm, self.id, lambda: self.log)
        open_gate(self.folder)
        start_again(self.slurm, self.id)


def await_end_of_part(slurm, job, describe):
    """Wait until a job waits to start again."""
    await_true(lambda: slurm.jobs(job)[0]["JobState"] == "PENDING", PATIENCE, describe)


def start_again(slurm, job):
    """Start a job that waits to start again; Slurm lets it wait for two minutes."""
    time.sleep(2)  # within the second of its end a node takes the new start for the revoked one
    slurm.run("scontrol", "update", f"jobid={job}", "starttime=now")


def is_python(pid):
    with suppress(OSError):  # it has just ended
        return "python" in os.readlink(f"/proc/{pid}/exe")
    return False


def environment_of(slurm, environment=None):
    """Variables of a user's shell; the names of virtual nodes do not resolve, so ranks meet at an address."""
    own = {name: value for name, value in slurm.environment.items() if not is_of_a_launcher(name)}
    own["PATH"] = f"{slurm.folder / 'bin'}:{Path(sys.executable).parent}:{own['PATH']}"
    own |= {"VIRTUAL_ENV": sys.prefix, "PYTHONPATH": str(TESTS), "MASTER_ADDR": "127.0.0.1"}
    return {name: value for name, value in (own | (environment or {})).items() if value is not None}


def submit(slurm, command, environment=None):
    """Submit a script from the repository; return the number of the job."""
    result = subprocess.run(
        [str(slurm.folder / "bin" / "sbatch"), "--parsable", *map(str, command)], cwd=TESTS.parent,
        env=environment_of(slurm, environment), capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


# -- in every test run -------------------------------------------------------------------------------------------------


def test_a_fit_on_two_nodes_has_the_bits_of_one_process(slurm, whole, tmp_path):
    job = Job(slurm, tmp_path / "run", options=["--nodes=2"]).finish()
    assert_equal(read_result(last(job.folder)), whole)
    assert read_checkpoint(last(job.folder))["fedsim"]["files"] == [1, 1]  # of two ranks
    assert "Warning" not in job.log


def test_a_cluster_leaves_nothing_behind(slurm, tmp_path):
    def break_off():
        with local_slurm(tmp_path, nodes=1) as other:
            job = submit(other, ["--output", tmp_path / "log", "--wrap", "srun sleep 1000"])
            await_true(lambda: other.jobs(job)[0]["JobState"] == "RUNNING", PATIENCE, lambda: other.jobs(job))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        break_off()
    assert not processes_that_know(tmp_path)


# -- make test-cluster: fits -------------------------------------------------------------------------------------------


@pytest.mark.cluster
@pytest.mark.parametrize(
    "options",
    [
        ["--nodes=4"],
        ["--nodes=2", "--ntasks-per-node=2"],
        ["--nodes=2", "--job-name=bash"],  # for which Lightning alone starts two runs of one rank
    ],
    ids=" ".join,
)
def test_any_layout_has_the_bits_of_one_process(slurm, whole, tmp_path, options):
    job = Job(slurm, tmp_path / "run", options=options).finish()
    ranks = 2 if "--job-name=bash" in options else 4
    assert len(read_checkpoint(last(job.folder))["fedsim"]["files"]) == ranks
    assert_equal(read_result(last(job.folder)), whole)


@pytest.mark.cluster
def test_an_array_runs_methods_and_seeds(slurm, tmp_path):
    config = tmp_path / "base.yaml"
    config.write_text(CONFIG)
    job = submit(
        slurm,
        ["--array=0-4%2", f"--output={tmp_path}/%a.log", "slurm/array.sbatch", "--config", config,
         "--trainer.max_epochs=1"],
        {"METHODS": "fedpav local", "SEEDS": "0 3", "OUT": str(tmp_path / "runs")},
    )  # fmt: skip
    states = slurm.wait(job)
    logs = [(tmp_path / f"{index}.log").read_text() for index in range(5)]
    assert sorted(states) == [*["COMPLETED"] * 4, "FAILED"], logs
    assert "submit with --array=0-3" in logs[4]
    for method in ("fedpav", "local"):
        for seed in (0, 3):
            folder = tmp_path / "runs" / f"{method}-seed{seed}"
            config = yaml.safe_load((folder / "config.yaml").read_text())
            assert config["seed_everything"] == seed
            assert config["model"]["method"]["class_path"].lower().endswith(method)
            assert json.loads((folder / "summary.json").read_text())["finished"]


@pytest.mark.cluster
def test_an_array_runs_the_lines_of_a_file(slurm, tmp_path):
    config = tmp_path / "base.yaml"
    config.write_text(CONFIG)
    (tmp_path / "runs.txt").write_text(
        "# two runs\n\n--seed_everything 5\n--model.clients '{town0: {batch_size: 4}}'\n"
    )
    job = submit(
        slurm,
        ["--array=0-1", f"--output={tmp_path}/%a.log", "slurm/array.sbatch", "--config", config,
         "--trainer.max_epochs=1"],
        {"RUNS": str(tmp_path / "runs.txt"), "OUT": str(tmp_path / "runs")},
    )  # fmt: skip
    assert slurm.wait(job) == ["COMPLETED"] * 2, [path.read_text() for path in tmp_path.glob("*.log")]
    configs = [yaml.safe_load((tmp_path / "runs" / f"run{i}" / "config.yaml").read_text()) for i in (0, 1)]
    assert [config["seed_everything"] for config in configs] == [5, 0]
    assert configs[1]["model"]["clients"]["town0"]["batch_size"] == 4


def chain(slurm, tmp_path, *args):
    """Submit a chain; return the jobs' numbers in their order."""
    result = subprocess.run(
        ["slurm/chain.sh", *map(str, args)], cwd=TESTS.parent, capture_output=True, text=True, timeout=PATIENCE,
        env=environment_of(slurm, {"SBATCH_OUTPUT": f"{tmp_path}/%j.log"}),
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return [entry.split()[1] for entry in result.stdout.split(",")]


@pytest.mark.cluster
def test_a_chain_ends_with_a_report(slurm, tmp_path, tiny):
    jobs = chain(slurm, tmp_path, tmp_path / "run", "--config", tiny, "--trainer.max_epochs=1",
                 "--trainer.check_val_every_n_epoch=1")  # fmt: skip
    logs = {}
    for job in jobs:
        assert slurm.wait(job) == ["COMPLETED"], (tmp_path / f"{job}.log").read_text()
        logs[job] = (tmp_path / f"{job}.log").read_text()
    _, _, test, report = jobs
    assert "town0" in logs[test]
    assert "mAP / rank-1 in percent" in logs[report]


@pytest.mark.cluster
def test_a_chain_that_breaks_is_cancelled(slurm, tmp_path, tiny):
    first, *others = chain(slurm, tmp_path, tmp_path / "run", "--config", tiny, "--model.threads=0")
    assert slurm.wait(first) == ["FAILED"]
    assert [slurm.wait(job) for job in others] == [["CANCELLED"]] * 3
    assert "fedsim: error: model.threads" in (tmp_path / f"{first}.log").read_text()


# -- started again -----------------------------------------------------------------------------------------------------


@pytest.mark.cluster
@pytest.mark.parametrize(("grace", "rounds", "ranks"), [(3600, 2, 2), (0, 1, 1)], ids=["saved", "abandoned"])
def test_a_job_whose_time_runs_out_starts_again_and_ends_in_the_same_bits(slurm, whole, tmp_path, grace, rounds, ranks):
    job = Job(slurm, tmp_path / "run", *HELD, *preemption(grace), options=["--nodes=2"])
    job.await_gate()
    slurm.run("scancel", "--signal=USR1", job.id)  # what --signal=USR1@300 does
    await_true(lambda: f"Slurm starts job {job.id} again" in job.log, PATIENCE, lambda: job.log)
    await_end_of_part(slurm, job.id, lambda: job.log)
    assert read_checkpoint(last(job.folder))["epoch"] == rounds - 1
    if ranks == 2:
        job.start_again()
        assert job.finish().fact("Restarts") == "1"
    else:  # the same command with other options of sbatch
        slurm.run("scancel", job.id)
        open_gate(job.folder)
        job = Job(slurm, job.folder, *HELD, *preemption(grace), options=["--nodes=1"]).finish()
    assert len(read_checkpoint(last(job.folder))["fedsim"]["files"]) == ranks
    assert "Traceback" not in job.log
    assert_equal(read_result(last(job.folder)), whole)


@pytest.mark.cluster
def test_a_task_of_an_array_starts_again_alone(slurm, whole, tmp_path):
    config = tmp_path / "base.yaml"
    config.write_text(CONFIG)
    job = submit(
        slurm,
        ["--array=0-1", f"--output={tmp_path}/%a.log", "slurm/array.sbatch", "--config", config, *HELD],
        {"METHODS": "fedpav", "SEEDS": "0 1", "OUT": str(tmp_path / "runs")},
    )
    folder = tmp_path / "runs" / "fedpav-seed0"
    for seed in (0, 1):
        await_gate(tmp_path / "runs" / f"fedpav-seed{seed}", (tmp_path / f"{seed}.log").read_text, ranks=1)
    slurm.run("scancel", "--signal=USR1", f"{job}_0")
    await_end_of_part(slurm, f"{job}_0", (tmp_path / "0.log").read_text)
    for seed in (0, 1):
        open_gate(tmp_path / "runs" / f"fedpav-seed{seed}")
    start_again(slurm, f"{job}_0")
    assert slurm.wait(job) == ["COMPLETED"] * 2, (tmp_path / "0.log").read_text()
    assert [slurm.jobs(f"{job}_{index}")[0]["Restarts"] for index in (0, 1)] == ["1", "0"]
    assert read_checkpoint(last(folder))["epoch"] == 2


@pytest.mark.cluster
def test_sigterm_does_not_start_a_job_again(slurm, tmp_path):
    job = Job(slurm, tmp_path / "run", *HELD, *preemption(), options=["--nodes=2"])
    job.await_gate()
    slurm.run("scancel", "--signal=TERM", job.id)
    job.fail()
    assert job.fact("Restarts") == "0"
    assert job.errors() == ["fedsim: error: stopped by SIGTERM"]
    assert read_checkpoint(last(job.folder))["epoch"] == 1


# -- generators --------------------------------------------------------------------------------------------------------

SMALL = [
    "--size=[16, 8]", "--networks.width=4", "--networks.scales=1", "--appearance.width=4", "--training.batch_size=2",
    "--training.steps=4", "--training.save_every=2", "--losses.soft_after=0", "--device=cpu",
]  # fmt: skip


def submit_generators(slurm, tmp_path, array, clients, *options):
    """Submit an array of tasks that train generators."""
    config = tmp_path / "base.yaml"
    config.write_text(CONFIG)
    return submit(
        slurm,
        [f"--array={array}", f"--output={tmp_path}/%a.log", "slurm/augment.sbatch", "--config", config, *SMALL,
         *options],
        {"CLIENTS": clients, "OUT": str(tmp_path / "generators")},
    )  # fmt: skip


@pytest.mark.cluster
def test_an_array_trains_a_generator_for_each_client(slurm, tmp_path):
    first = submit_generators(slurm, tmp_path, "0", "town1", "--pretrain=town1")
    assert slurm.wait(first) == ["COMPLETED"], (tmp_path / "0.log").read_text()
    job = submit_generators(slurm, tmp_path, "0-2", "town0 town2", "--pretrain=town1")
    states = slurm.wait(job)
    logs = [(tmp_path / f"{index}.log").read_text() for index in range(3)]
    assert sorted(states) == ["COMPLETED", "COMPLETED", "FAILED"], logs
    assert "submit with --array=0-1" in logs[2]
    for client in ("town0", "town1", "town2"):
        assert (tmp_path / "generators" / client / "generator.safetensors").is_file()
        assert (tmp_path / "generators" / client / "quality.json").is_file()


@pytest.mark.cluster
def test_a_generator_whose_time_runs_out_goes_on(slurm, tmp_path):
    job = submit_generators(slurm, tmp_path, "0", "town0", "--training.steps=400")
    folder = tmp_path / "generators" / "town0"
    await_true((folder / "training.ckpt").is_file, PATIENCE, lambda: (tmp_path / "0.log").read_text())
    slurm.run("scancel", "--signal=USR1", f"{job}_0")  # what --signal=USR1@60 does
    await_true(lambda: not processes_of(tmp_path / "generators"), PATIENCE, (tmp_path / "0.log").read_text)
    await_end_of_part(slurm, f"{job}_0", (tmp_path / "0.log").read_text)
    start_again(slurm, f"{job}_0")
    begun = (folder / "losses.csv").read_text()
    assert not (folder / "generator.safetensors").exists()
    assert slurm.wait(job) == ["COMPLETED"], (tmp_path / "0.log").read_text()
    assert slurm.jobs(job)[0]["Restarts"] == "1"
    assert (folder / "losses.csv").read_text().startswith(begun)
    assert "Traceback" not in (tmp_path / "0.log").read_text()


# -- what goes wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.cluster
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_job(slurm, whole, tmp_path, victim):
    job = Job(slurm, tmp_path / "run", *HELD, options=["--nodes=2"])
    job.await_gate()
    os.kill(job.ranks()[victim], signal.SIGKILL)
    job.fail()
    again = Job(slurm, job.folder, options=["--nodes=2"]).finish()  # the same command
    assert_equal(read_result(last(again.folder)), whole)


@pytest.mark.cluster
def test_a_rank_ends_with_the_process_of_slurm_that_started_it(slurm, tmp_path):
    job = Job(slurm, tmp_path / "run", *HELD, "--trainer.callbacks.round=1", options=["--nodes=2"])
    job.await_gate()
    rank = job.ranks()[1]
    os.kill(int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
    await_true(lambda: 1 not in job.ranks(), PATIENCE, lambda: job.log)
    open_gate(job.folder)  # the other rank meets the lost one where the round ends
    await_true(lambda: not job.ranks(), PATIENCE, lambda: job.log)
    assert "rank 1 ended without a word, or did not answer in time, in round 1, client town" in job.log
    slurm.run("scancel", job.id)


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("args", "options", "words"),
    [
        (["--trainer.devices=3"], ["--nodes=2"], "trainer.devices: 3, but Slurm starts 1 per node"),
        (["--trainer.num_nodes=3"], ["--nodes=2"], "trainer.num_nodes: 3, but Slurm uses 2"),
        ([], ["--nodes=2", "--ntasks=3", "--ntasks-per-node=2"], "--ntasks-per-node"),
    ],
)
def test_a_mismatch_is_one_line(slurm, tmp_path, args, options, words):
    job = Job(slurm, tmp_path / "run", *args, options=options).fail()
    (line,) = job.errors()
    assert words in line


@pytest.mark.cluster
def test_a_node_whose_name_does_not_resolve_is_named_in_time(slurm, tmp_path):
    job = Job(slurm, tmp_path / "run", options=["--nodes=2"], environment={"MASTER_ADDR": None})
    job.fail()  # torch alone would try for ten minutes
    (line,) = job.errors()
    assert "MASTER_ADDR: n1 (the name of Slurm's first node) does not resolve" in line


def test_the_program_starts_and_stops_a_cluster(slurm, tmp_path):
    program = [sys.executable, str(Path(__file__).with_name("local_slurm.py"))]
    folder = tmp_path / "cluster"
    try:
        subprocess.run(
            [*program, "start", str(folder), "--nodes", "1"], check=True, timeout=PATIENCE, capture_output=True
        )
        assert "n1" in LocalSlurm(folder, 1).run("sinfo")
    finally:
        subprocess.run([*program, "stop", str(folder)], check=True, timeout=PATIENCE)
    assert not processes_that_know(folder)
