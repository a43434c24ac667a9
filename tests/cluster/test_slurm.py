"""Real Slurm with virtual nodes on this machine: the scripts of slurm/, as users submit them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from environment import is_of_a_launcher
from failing import (
    CONFIG,
    assert_equal,
    await_round,
    await_true,
    finish,
    fit,
    last,
    processes_of,
    read_result,
)
from fedsim.strategy.checkpoint_files import read_checkpoint
from local_slurm import LocalSlurm, UnavailableError, fetch_packages, local_slurm, processes_that_know

pytestmark = [pytest.mark.dist, pytest.mark.slow]
TESTS = Path(__file__).parents[1]
# rounds of a second, and a line after each
LONG = ["--trainer.callbacks+=failing.Slow", "--trainer.callbacks.delay=0.1", "--trainer.enable_progress_bar=true"]


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

    def finish(self, timeout=120):
        """Wait for the end of a job that must succeed."""
        assert self.slurm.wait(self.id, timeout) == ["COMPLETED"], self.log
        return self

    def fail(self, timeout=30):
        """Wait for the end of a job that must fail, in time."""
        assert self.slurm.wait(self.id, timeout) == ["FAILED"], self.log
        await_true(lambda: not processes_of(self.folder), 10, lambda: self.log)
        assert "Traceback" not in self.log
        return self

    def errors(self):
        """Return what the ranks call errors."""
        return [line for line in self.log.splitlines() if line.startswith("fedsim: error: ")]

    def await_round(self, number):
        """Wait until a round is on its way."""
        await_round(self.folder, number, lambda: self.log)

    def ranks(self):
        """Return the process ids of the ranks; srun has our command line, too."""
        found = [pid for pid in processes_of(self.folder) if "python" in os.path.realpath(f"/proc/{pid}/exe")]
        return {int(variable(pid, "SLURM_PROCID")): pid for pid in found}

    def start_again(self):
        """Let the job start at once."""
        start_again(self.slurm, self.id, lambda: self.log)


def start_again(slurm, job, describe):
    """Start a job that waits to start again; Slurm lets it wait for two minutes."""
    await_true(lambda: slurm.jobs(job)[0]["JobState"] == "PENDING", 30, describe)
    time.sleep(2)  # within the second of its end a node takes the new start for the revoked one
    slurm.run("scontrol", "update", f"jobid={job}", "starttime=now")


def variable(pid, name):
    variables = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    return dict(entry.split("=", 1) for entry in variables if "=" in entry).get(name)


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
        env=environment_of(slurm, environment), capture_output=True, text=True, timeout=60,
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
            await_true(lambda: other.jobs(job)[0]["JobState"] == "RUNNING", 30, lambda: other.jobs(job))
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
    states = slurm.wait(job, 180)
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
    assert slurm.wait(job, 120) == ["COMPLETED"] * 2, [path.read_text() for path in tmp_path.glob("*.log")]
    configs = [yaml.safe_load((tmp_path / "runs" / f"run{i}" / "config.yaml").read_text()) for i in (0, 1)]
    assert [config["seed_everything"] for config in configs] == [5, 0]
    assert configs[1]["model"]["clients"]["town0"]["batch_size"] == 4


def chain(slurm, tmp_path, *args):
    """Submit a chain; return the jobs' numbers in their order."""
    result = subprocess.run(
        ["slurm/chain.sh", *map(str, args)], cwd=TESTS.parent, capture_output=True, text=True, timeout=60,
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
        assert slurm.wait(job, 180) == ["COMPLETED"], (tmp_path / f"{job}.log").read_text()
        logs[job] = (tmp_path / f"{job}.log").read_text()
    _, _, test, report = jobs
    assert "town0" in logs[test]
    assert "mAP / rank-1 in percent" in logs[report]


@pytest.mark.cluster
def test_a_chain_that_breaks_is_cancelled(slurm, tmp_path, tiny):
    first, *others = chain(slurm, tmp_path, tmp_path / "run", "--config", tiny, "--model.threads=0")
    assert slurm.wait(first, 60) == ["FAILED"]
    assert [slurm.wait(job, 30) for job in others] == [["CANCELLED"]] * 3
    assert "fedsim: error: model.threads" in (tmp_path / f"{first}.log").read_text()


# -- started again -----------------------------------------------------------------------------------------------------


@pytest.mark.cluster
@pytest.mark.parametrize(("grace", "rounds", "ranks"), [(120, 2, 2), (0, 1, 1)], ids=["saved", "abandoned"])
def test_a_job_whose_time_runs_out_starts_again_and_ends_in_the_same_bits(slurm, whole, tmp_path, grace, rounds, ranks):
    preemption = ["--trainer.callbacks+=fedsim.federation.callbacks.Preemption", f"--trainer.callbacks.grace={grace}"]
    job = Job(slurm, tmp_path / "run", *LONG, *preemption, options=["--nodes=2"])
    job.await_round(2)
    slurm.run("scancel", "--signal=USR1", job.id)  # what --signal=USR1@300 does
    await_true(lambda: f"Slurm starts job {job.id} again" in job.log, 30, lambda: job.log)
    await_true(lambda: job.fact("JobState") == "PENDING", 30, lambda: job.log)
    assert read_checkpoint(last(job.folder))["epoch"] == rounds - 1
    if ranks == 2:
        job.start_again()
        assert job.finish().fact("Restarts") == "1"
    else:  # the same command with other options of sbatch
        slurm.run("scancel", job.id)
        job = Job(slurm, job.folder, *LONG, *preemption, options=["--nodes=1"]).finish()
    assert len(read_checkpoint(last(job.folder))["fedsim"]["files"]) == ranks
    assert "Traceback" not in job.log
    assert_equal(read_result(last(job.folder)), whole)


@pytest.mark.cluster
def test_a_task_of_an_array_starts_again_alone(slurm, whole, tmp_path):
    config = tmp_path / "base.yaml"
    config.write_text(CONFIG)
    job = submit(
        slurm,
        ["--array=0-1", f"--output={tmp_path}/%a.log", "slurm/array.sbatch", "--config", config, *LONG],
        {"METHODS": "fedpav", "SEEDS": "0 1", "OUT": str(tmp_path / "runs")},
    )
    folder = tmp_path / "runs" / "fedpav-seed0"
    await_round(folder, 2, (tmp_path / "0.log").read_text)
    slurm.run("scancel", "--signal=USR1", f"{job}_0")
    start_again(slurm, f"{job}_0", (tmp_path / "0.log").read_text)
    assert slurm.wait(job, 120) == ["COMPLETED"] * 2, (tmp_path / "0.log").read_text()
    assert [slurm.jobs(f"{job}_{index}")[0]["Restarts"] for index in (0, 1)] == ["1", "0"]
    assert read_checkpoint(last(folder))["epoch"] == 2


@pytest.mark.cluster
def test_sigterm_does_not_start_a_job_again(slurm, tmp_path):
    job = Job(slurm, tmp_path / "run", *LONG, options=["--nodes=2"])
    job.await_round(2)
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
    assert slurm.wait(first, 120) == ["COMPLETED"], (tmp_path / "0.log").read_text()
    job = submit_generators(slurm, tmp_path, "0-2", "town0 town2", "--pretrain=town1")
    states = slurm.wait(job, 120)
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
    await_true((folder / "training.ckpt").is_file, 60, lambda: (tmp_path / "0.log").read_text())
    slurm.run("scancel", "--signal=USR1", f"{job}_0")  # what --signal=USR1@60 does
    await_true(lambda: not processes_of(tmp_path / "generators"), 30, (tmp_path / "0.log").read_text)
    start_again(slurm, f"{job}_0", (tmp_path / "0.log").read_text)
    begun = (folder / "losses.csv").read_text()
    assert not (folder / "generator.safetensors").exists()
    assert slurm.wait(job, 120) == ["COMPLETED"], (tmp_path / "0.log").read_text()
    assert slurm.jobs(job)[0]["Restarts"] == "1"
    assert (folder / "losses.csv").read_text().startswith(begun)
    assert "Traceback" not in (tmp_path / "0.log").read_text()


# -- what goes wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.cluster
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_job(slurm, whole, tmp_path, victim):
    job = Job(slurm, tmp_path / "run", *LONG, options=["--nodes=2"])
    job.await_round(2)
    os.kill(job.ranks()[victim], signal.SIGKILL)
    job.fail(timeout=30)
    again = Job(slurm, job.folder, options=["--nodes=2"]).finish()  # the same command
    assert_equal(read_result(last(again.folder)), whole)


@pytest.mark.cluster
def test_a_rank_ends_with_the_process_of_slurm_that_started_it(slurm, tmp_path):
    job = Job(slurm, tmp_path / "run", *LONG, "--trainer.callbacks.delay=2", options=["--nodes=2"])
    await_true(lambda: "predicted speed-up" in job.log, 60, lambda: job.log)
    time.sleep(2)
    rank = job.ranks()[1]
    os.kill(int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
    await_true(lambda: 1 not in job.ranks(), 10, lambda: job.log)
    await_true(lambda: not job.ranks(), 30, lambda: job.log)
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
    start = time.monotonic()
    job = Job(slurm, tmp_path / "run", options=["--nodes=2"], environment={"MASTER_ADDR": None}).fail(timeout=60)
    assert time.monotonic() - start < 20 + 30  # 20 s are the default of connect_timeout; the rest is import
    (line,) = job.errors()
    assert "MASTER_ADDR: n1 (the name of Slurm's first node) does not resolve" in line


def test_the_program_starts_and_stops_a_cluster(slurm, tmp_path):
    program = [sys.executable, str(Path(__file__).with_name("local_slurm.py"))]
    folder = tmp_path / "cluster"
    try:
        subprocess.run([*program, "start", str(folder), "--nodes", "1"], check=True, timeout=60, capture_output=True)
        assert "n1" in LocalSlurm(folder, 1).run("sinfo")
    finally:
        subprocess.run([*program, "stop", str(folder)], check=True, timeout=60)
    assert not processes_that_know(folder)
