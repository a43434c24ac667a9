"""``fedsim doctor``: the facts of this machine, and the verdict on machines that are not here."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from fedsim.__main__ import main
from fedsim.cli.doctor import command, probe
from fedsim.cli.doctor import facts as facts_of_machine
from fedsim.cli.doctor.checkup import examine
from fedsim.cli.doctor.facts import (
    GIB,
    FaissFacts,
    FitDevices,
    Gpu,
    MachineFacts,
    RequestedFit,
    TorchFacts,
    Wandb,
    namesake_of,
    nvidia_on_bus,
    slurm_of,
    wandb_of,
)
from fedsim.cli.doctor.probe import disagreement
from fedsim.core.nvidia import nvidia_driver
from fedsim.core.room import Room, memory_room, room_of, usable_cores
from fedsim.functional.neighbours import Neighbours
from small import refuse

H100 = Gpu("NVIDIA H100", 80 * GIB, 79 * GIB)
WELL = MachineFacts(
    nvidia=2,
    driver="580.95.05",
    visible=None,
    cores=32.0,
    memory=Room("memory", 200 * GIB, 256 * GIB),
    disk=Room("/runs", 900 * GIB, 1000 * GIB),
    slurm="none",
    wandb=Wandb("online", "WANDB_API_KEY"),
    shared=Room("/dev/shm", 100 * GIB, 128 * GIB),
    torch=TorchFacts("2.15.0+cu132", "13.2", "2.30.7", (H100, H100)),
    plan=FitDevices(("cuda:0", "cuda:1"), 2),
    faiss=FaissFacts("faiss-gpu 1.15.1", "12", True, 2, {"cpu": "", "cuda:0": "", "cuda:1": ""}),
    sums="",
)
BLIND = replace(WELL, torch=TorchFacts("2.15.0+cu132", "13.2", "2.30.7"), plan=FitDevices(("cpu",)), sums=None)
FIT, FAISS = RequestedFit(), RequestedFit(backend="faiss")


def with_torch(**fields):
    return replace(BLIND, torch=replace(BLIND.torch, **fields))


def with_faiss(**fields):
    return replace(WELL, faiss=replace(WELL.faiss, **fields))


def test_a_machine_in_order_has_no_findings():
    checkup = examine(WELL, RequestedFit(backend="faiss", tracked=True))
    assert checkup.findings == []
    page = command.as_page(checkup)
    assert "2 x NVIDIA H100, 80 GiB; free: 79, 79 GiB" in page
    assert "NCCL, a sum was right" in page
    assert "- none: the fit can run" in page


def test_ranks_can_share_a_gpu_and_the_page_says_how():
    said = command.as_page(examine(WELL, FIT))
    assert "ranks can share" in said
    assert "--trainer.strategy.ranks_per_device 2" in said
    four = replace(WELL, plan=FitDevices(("cuda:0", "cuda:1", "cuda:0", "cuda:1"), 4))
    checkup = examine(four, RequestedFit(ranks_per_device=2))
    assert checkup.findings == []
    lines = {line.about: line.text for line in checkup.uses}
    assert lines["device"] == "cuda:0, cuda:1"
    assert lines["ranks that share"] == "cuda:0: ranks 0, 2; cuda:1: ranks 1, 3"
    assert lines["sums over ranks"] == "gloo within a GPU, NCCL among GPUs, a sum was right"
    assert "ranks can share" not in lines


@pytest.mark.parametrize(("error", "says"), [("", "works with NCCL_MULTI_RANK_GPU_ENABLE=1, which"), ("no", "no")])
def test_whether_nccl_takes_several_ranks_of_a_gpu_is_said_and_does_not_matter(error, says):
    shared = replace(WELL, plan=FitDevices(("cuda:0", "cuda:0"), 2), sums_on_one=error)
    checkup = examine(shared, RequestedFit(ranks_per_device=2))
    assert checkup.findings == []
    assert {line.about: line.text for line in checkup.uses}["NCCL within a GPU"].startswith(says)
    assert "NCCL within a GPU" not in command.as_page(examine(WELL, FIT))


def test_ranks_of_one_gpu_need_no_nccl():
    without = replace(WELL.torch, nccl="")
    one = replace(WELL, torch=without, plan=FitDevices(("cuda:0", "cuda:0"), 2), sums="no")
    assert [finding.problem for finding in examine(one, RequestedFit(ranks_per_device=2)).findings] == [
        "gloo cannot sum over the ranks of this machine: no"
    ]
    two = replace(WELL, torch=without)
    assert "torch has no NCCL" in examine(two, FIT).findings[0].problem


def test_gloo_by_choice_needs_no_nccl():
    plan = replace(WELL.plan, by="gloo")
    without = replace(WELL, torch=replace(WELL.torch, nccl=""), plan=plan)
    checkup = examine(without, RequestedFit(process_group_backend="gloo"))
    assert checkup.findings == []
    assert {line.about: line.text for line in checkup.uses}["sums over ranks"] == "gloo, a sum was right"
    [finding] = examine(replace(without, sums="no"), RequestedFit(process_group_backend="gloo")).findings
    assert finding == ("gloo cannot sum over the ranks of this machine: no", "see docs/cluster.md", True)
    four = replace(plan, devices=("cuda:0", "cuda:1") * 2, world=4)
    texts = {line.about: line.text for line in examine(replace(without, plan=four), FIT).uses}
    assert texts["sums over ranks"] == "gloo within a GPU, gloo among GPUs, a sum was right"


IN_THE_WAY = {
    "no driver": (replace(BLIND, driver=""), FIT, "an NVIDIA GPU, but no NVIDIA driver", "580 or later"),
    "driver too old": (replace(BLIND, driver="570.12"), FIT, "driver 570.12 is too old for CUDA 13.2", "580"),
    "a driver, and no GPU": (BLIND, FIT, "580.95.05 is loaded, but torch finds no GPU", "--gpus all"),
    "torch for CPUs": (with_torch(cuda=None), FIT, "is built for CPUs", "pytorch.org"),
    "no GPU at all": (
        replace(BLIND, nvidia=0, driver=""), RequestedFit("gpu"), "there is no NVIDIA GPU", "use a machine",
    ),
    "hidden GPUs": (replace(BLIND, visible=""), RequestedFit("gpu"), "CUDA_VISIBLE_DEVICES is ''", "unset it"),
    "torch": (with_torch(problem="libfoo.so is missing"), FIT, "torch: libfoo.so is missing", "pip install"),
    "lightning": (replace(WELL, plan=FitDevices(problem="no lightning")), FIT, "ranks: no lightning", "pip install"),
    "a refusal": (
        replace(WELL, plan=FitDevices(refusal="trainer.devices: 9 is much; take 2; here: cpu")), FIT,
        "trainer.devices: 9 is much", "take 2; here: cpu",
    ),
    "a broken GPU": (
        replace(WELL, torch=replace(WELL.torch, gpus=(H100, replace(H100, problem="no kernel image")))), FIT,
        "cuda:1 (NVIDIA H100) does not work: no kernel image", "trainer.devices",
    ),
    "no sum": (
        replace(WELL, sums="unhandled system error"), FIT, "NCCL cannot sum",
        "for more, --trainer.strategy.process_group_backend gloo, or --trainer.devices 1",
    ),
    "no sum on CPUs": (
        replace(WELL, plan=FitDevices(("cpu", "cpu"), 2), sums="no answer"), FIT, "gloo cannot sum",
        "docs/cluster.md",
    ),
    "no NCCL": (
        replace(WELL, torch=replace(WELL.torch, nccl="")), FIT, "torch has no NCCL",
        "set --trainer.strategy.process_group_backend gloo, or use one rank",
    ),
    "little shared memory": (
        replace(WELL, shared=Room("/dev/shm", 64 * 2**20, 64 * 2**20)), FIT,
        "/dev/shm has 64 MiB free, which 2 ranks", "--shm-size",
    ),
    "faiss for CPUs": (with_faiss(for_gpu=False), FAISS, "is built for CPUs, ranks are on GPUs", "backend at auto"),
    "faiss sees fewer": (with_faiss(sees=0), FAISS, "faiss finds 0 GPUs, torch 2", "docs/evaluation.md"),
    "faiss disagrees": (
        with_faiss(trials={"cpu": "", "cuda:1": "its neighbours are not those of torch"}), FAISS,
        "faiss on cuda:1: its neighbours are not", "backend at auto",
    ),
    "no faiss": (with_faiss(problem="No module named 'faiss'"), FAISS, "faiss: No module", "'fedsim-reid[faiss]'"),
    "a full disk": (replace(WELL, disk=Room("/runs", 1000, GIB)), FIT, "0.0 GiB are free at /runs", "make room"),
    "no folder": (replace(WELL, disk=Room("/a", 0, 1, "/a is a file")), FIT, "cannot be a folder: /a", "another"),
    "no login": (
        replace(WELL, wandb=Wandb("online", "")), RequestedFit(tracked=True), "a logger needs a login", "wandb login",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_THE_WAY)
def test_what_stands_in_the_way_is_said_with_a_remedy(name):
    facts, wish, what, remedy = IN_THE_WAY[name]
    [finding] = examine(facts, wish).blocks
    assert what in finding.problem
    assert remedy in finding.remedy


LOOK_AT = {
    "another fedsim": (
        replace(WELL, namesake="fedsim 0.9.0"), FIT, "the package fedsim 0.9.0 is imported as fedsim, too",
    ),
    "hidden on purpose": (replace(BLIND, visible="-1"), FIT, "it hides all GPUs"),
    "faiss, not asked for": (with_faiss(for_gpu=False), FIT, "built for CPUs"),
    "faiss disagrees, not asked for": (with_faiss(trials={"cuda:0": "differ"}), FIT, "faiss on cuda:0: differ"),
    "faiss disagrees elsewhere": (
        replace(with_faiss(trials={"cuda:1": "differ"}), plan=FitDevices(("cuda:0",)), sums=None), FAISS,
        "faiss on cuda:1",
    ),
    "an occupied GPU": (
        replace(WELL, torch=replace(WELL.torch, gpus=(H100, replace(H100, free=8 * GIB)))), FIT,
        "cuda:1: 8.0 of 80 GiB are free",
    ),
    "two models": (
        replace(WELL, torch=replace(WELL.torch, gpus=(H100, replace(H100, name="NVIDIA A100")))), FIT,
        "different models: 1 x NVIDIA H100, 1 x NVIDIA A100",
    ),
    "few cores": (replace(WELL, cores=1.5), FIT, "2 ranks have 1.5 cores"),
    "little memory": (replace(WELL, memory=Room("memory", GIB, GIB)), FIT, "1.0 GiB of memory are free"),
    "little disk": (replace(WELL, disk=Room("/runs", 2 * GIB, 9 * GIB)), FIT, "2.0 GiB are free"),
}  # fmt: skip


def test_a_package_of_another_name_is_found_by_its_metadata():
    assert namesake_of("pytest").startswith("pytest ")
    assert namesake_of("no-such-package") == ""


@pytest.mark.parametrize("name", LOOK_AT)
def test_what_may_be_in_the_way_is_said_and_stops_nothing(name):
    facts, wish, what = LOOK_AT[name]
    checkup = examine(facts, wish)
    [finding] = checkup.findings
    assert what in finding.problem
    assert checkup.blocks == []


def test_who_asks_for_cpus_hears_nothing_of_gpus():
    assert examine(replace(BLIND, driver="470.1"), RequestedFit("cpu")).findings == []


def test_little_shared_memory_is_enough_for_one_rank():
    alone = replace(WELL, plan=FitDevices(("cuda:0",)), sums=None, shared=Room("/dev/shm", 64 * 2**20, 64 * 2**20))
    assert examine(alone, FIT).findings == []


def test_what_was_not_tried_is_not_called_tried():
    [sums] = [line for line in examine(replace(WELL, sums=None), FIT).uses if line.about == "sums over ranks"]
    assert (sums.text, sums.sure) == ("NCCL, not tried", "guessed")


# -- facts that files and variables tell -------------------------------------------------------------------------------


def write(root, files):
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


def test_gpus_are_counted_on_the_bus(tmp_path):
    devices = {"a": ("0x10de", "0x030200"), "b": ("0x10de", "0x040300"), "c": ("0x8086", "0x030000"),
               "d": ("0x10de", "0x030000")}  # fmt: skip
    for name, (vendor, kind) in devices.items():
        write(tmp_path / "sys/bus/pci/devices" / name, {"vendor": f"{vendor}\n", "class": f"{kind}\n"})
    assert nvidia_on_bus(tmp_path) == 2
    assert nvidia_on_bus(tmp_path / "nowhere") == 0


def test_the_driver_is_read_off_the_kernel(tmp_path):
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder)\n"
    assert nvidia_driver(write(tmp_path / "a", {"proc/driver/nvidia/version": line})) == "580.95.05"
    assert nvidia_driver(write(tmp_path / "b", {"sys/module/nvidia/version": "535.104\n"})) == "535.104"
    assert nvidia_driver(tmp_path / "c") == ""


def test_a_container_has_its_own_cores_and_memory(tmp_path):
    info = "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 800 kB\n"
    host = write(tmp_path / "host", {"proc/meminfo": info, "sys/fs/cgroup/memory.max": "max\n"})
    assert memory_room(host) == Room("memory", 800 * 1024, 1000 * 1024)
    limits = {"sys/fs/cgroup/memory.max": "512000\n", "sys/fs/cgroup/memory.current": "500000\n"}
    inside = write(tmp_path / "inside", {"proc/meminfo": info, "sys/fs/cgroup/cpu.max": "50000 100000\n"} | limits)
    assert memory_room(inside) == Room("memory", 12000, 512000)
    assert usable_cores(inside) == 0.5
    assert usable_cores(host) == len(os.sched_getaffinity(0))


def test_the_room_of_a_folder_that_is_not_there_is_that_of_its_file_system(tmp_path):
    assert room_of(tmp_path / "a" / "b").where == str(tmp_path)
    (tmp_path / "file").write_text("")
    assert "is a file" in room_of(tmp_path / "file" / "b").problem
    assert not (tmp_path / "a").exists()


def test_a_folder_that_cannot_be_written_is_a_problem(tmp_path, monkeypatch):
    assert room_of(tmp_path).problem == ""
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    assert room_of(tmp_path / "a").problem == f"{tmp_path} cannot be written"


def test_slurm_and_wandb_are_read_off_variables_and_files(tmp_path, monkeypatch):
    assert slurm_of({"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_NTASKS": "8"}) == "in job 7: nodes 2, tasks 8"
    assert wandb_of({}, tmp_path, tmp_path) == Wandb("online", "")
    variables = {"WANDB_MODE": "disabled", "WANDB_API_KEY": "x"}
    assert wandb_of(variables, tmp_path, tmp_path) == Wandb("disabled", "WANDB_API_KEY")
    write(tmp_path, {".netrc": "machine api.wandb.ai login user password secret\n",
                     "wandb/settings": "[default]\nmode = offline\n"})  # fmt: skip
    assert wandb_of({}, tmp_path, tmp_path) == Wandb("offline", str(tmp_path / ".netrc"))
    assert wandb_of({"WANDB_BASE_URL": "https://wandb.example"}, tmp_path, tmp_path).login == ""


# -- trials ------------------------------------------------------------------------------------------------------------


def test_neighbours_that_are_as_similar_may_change_places():
    similarity = np.array([[0.9, 0.5, 0.5, 0.1]])
    ours = Neighbours(np.array([[0, 1]]), np.array([[0.9, 0.5]], dtype=np.float32))
    assert disagreement(ours, replace(ours, index=np.array([[0, 2]])), similarity) == ""
    farther = Neighbours(np.array([[0, 3]]), np.array([[0.9, 0.1]], dtype=np.float32))
    assert "differ by 4.0e-01" in disagreement(ours, farther, similarity)
    assert "differ by 1.0e-03" in disagreement(ours, replace(ours, similarity=ours.similarity + 1e-3), similarity)


def test_a_trial_that_hangs_or_crashes_is_a_fact_and_is_gone_afterwards():
    with facts_of_machine.ProbeProcess("faiss") as hanging, facts_of_machine.ProbeProcess("faiss") as crashing:
        crashing.process.send_signal(signal.SIGSEGV)
        assert "no answer in time" in hanging.answer(time.monotonic())["problem"]
        assert crashing.answer(time.monotonic() + 60) == {"problem": "its process was ended by SIGSEGV"}
    assert hanging.process.returncode == -signal.SIGKILL


def test_a_trial_whose_library_aborts_has_the_words_of_the_library(tmp_path, monkeypatch):
    said = "CUDA error 209 no kernel image is available for execution on the device"
    write(tmp_path, {"faiss.py": f"import os, sys\nsys.stderr.write({said!r})\nsys.stderr.flush()\nos.abort()\n"})
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with facts_of_machine.ProbeProcess("faiss") as trial:
        assert trial.answer(time.monotonic() + 60) == {"problem": f"its process was ended by SIGABRT: {said}"}


def test_a_trial_that_fails_says_its_last_line():
    with facts_of_machine.ProbeProcess("nonsense") as trial:
        assert trial.answer(time.monotonic() + 60) == {"problem": "KeyError: 'nonsense'"}


def test_the_backend_of_the_fit_reaches_its_plan_and_a_wrong_one_is_refused():
    wish = asdict(RequestedFit("cpu", 2, process_group_backend="gloo"))
    assert probe.plan(wish) == {
        "devices": ["cpu", "cpu"],
        "world": 2,
        "shared": "/dev/shm",
        "launcher": "",
        "by": "gloo",
    }
    refusal = probe.plan(wish | {"process_group_backend": "mpi"})["refusal"]
    assert refusal == "trainer.strategy.process_group_backend: mpi is not a backend; choose nccl, gloo or null"


@pytest.mark.dist
@pytest.mark.slow
def test_two_cpus_can_sum(quick_python):
    assert facts_of_machine.try_sums(("cpu",), 60.0) is None
    assert facts_of_machine.try_sums(("cpu", "cpu", "cpu"), 60.0) == ""
    assert facts_of_machine.try_sums(("cuda:0", "cuda:0"), 60.0) == ""  # ranks of one GPU sum as CPUs do
    assert facts_of_machine.try_sums(("cuda:0", "cuda:1"), 60.0, by_gloo=True) == ""
    assert facts_of_machine.try_sums_on_one(("cpu", "cpu", "cuda:0", "cuda:1"), 60.0) is None


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("facts", "code"), [(WELL, 0), (replace(WELL, sums="no"), 1)])
def test_the_exit_code_is_the_verdict(facts, code, capsys, monkeypatch):
    monkeypatch.setattr(command, "gather", lambda wish: facts)
    assert main(["doctor", "--json"]) == code
    captured = capsys.readouterr()
    seen = json.loads(captured.out)
    assert seen["ready"] == (code == 0)
    assert seen["facts"]["torch"]["gpus"][0]["name"] == "NVIDIA H100"
    assert ("1 problem prevents this fit" in captured.err) == (code == 1)
    assert main(["doctor"]) == code
    page = capsys.readouterr().out
    assert len(page.splitlines()) < 40
    assert max(map(len, page.splitlines())) <= 120


def test_the_fit_is_read_off_configs_and_options(tmp_path, monkeypatch):
    wishes = []
    monkeypatch.setattr(command, "gather", lambda wish: wishes.append(wish) or WELL)
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    one.write_text(
        "trainer: {devices: 2, accelerator: gpu, logger: {class_path: lightning.pytorch.loggers.WandbLogger}}"
    )
    two.write_text("run_dir: /runs\ntrainer: {devices: [0, 1]}\nmodel: {evaluation: {backend: faiss}, method: FedPav}")
    assert main(["doctor", "--config", str(one), "--config", str(two)]) == 0
    assert main(["doctor", "--config", str(two), "--trainer.devices=4", "--model.evaluation.backend", "torch"]) == 0
    assert main(["doctor"]) == 0
    assert wishes == [
        RequestedFit("gpu", [0, 1], 1, "faiss", "/runs", True),
        RequestedFit("auto", wishes[1].devices, 1, "torch", "/runs"),
        FIT,
    ]
    assert str(wishes[1].devices) == "4"
    strategy = "{class_path: fedsim.strategy.FederatedStrategy, init_args: {ranks_per_device: 2}}"
    one.write_text(f"trainer: {{devices: 4, strategy: {strategy}}}")
    assert main(["doctor", "--config", str(one)]) == 0
    assert main(["doctor", "--config", str(one), "--trainer.strategy.ranks_per_device=3"]) == 0
    assert [wish.ranks_per_device for wish in wishes[3:]] == [2, 3]
    one.write_text("trainer: {strategy: {class_path: FederatedStrategy, init_args: {process_group_backend: gloo}}}")
    assert main(["doctor", "--config", str(one)]) == 0
    assert main(["doctor", "--config", str(one), "--trainer.strategy.process_group_backend=nccl"]) == 0
    assert [wish.process_group_backend for wish in wishes[5:]] == ["gloo", "nccl"]


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--nonsense"], "--nonsense: there is no such option"),
     (["--model.evaluation.backend", "abacus"], "model.evaluation.backend"),
     (["--config", "nowhere.yaml"], "nowhere.yaml"),
     (["--trainer.num_nodes", "x"], "trainer.num_nodes")],
)  # fmt: skip
def test_wrong_options_are_one_line(words, said, capsys):
    assert said in refuse(capsys, "doctor", *words)


@pytest.fixture(scope="module")
def real(root):
    """This machine, looked at by the command in a process of its own, which must not load torch itself."""
    program = (
        "import sys; from fedsim.__main__ import main; code = main(sys.argv[1:]); "
        "sys.exit('imported torch' if 'torch' in sys.modules else code)"
    )
    words = ["doctor", "--json", "--config", "configs/quickstart.yaml", "--trainer.devices", "1"]
    return subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, cwd=root)


@pytest.mark.slow
def test_this_machine_is_seen_as_it_is(real):
    assert real.returncode == 0, real.stdout + real.stderr
    seen = json.loads(real.stdout)
    facts = seen["facts"]
    assert facts["torch"]["version"] == torch.__version__
    assert len(facts["torch"]["gpus"]) == torch.cuda.device_count()
    assert facts["plan"]["devices"] == ["cpu"]  # quickstart.yaml asks for it
    assert facts["faiss"]["trials"]["cpu"] == ""
    assert 0 < facts["cores"] <= os.cpu_count()
    assert 0 < facts["memory"]["free"] <= facts["memory"]["total"]
    assert {line["sure"] for line in seen["resources"] + seen["uses"]} <= {"tried", "read", "guessed"}


def test_reading_processes_that_cannot_run_are_a_warning():
    checkup = examine(replace(WELL, readers="No space left on device"), FIT)
    [finding] = checkup.findings
    assert not finding.blocks
    assert "data.workers: processes that read images cannot run: No space left on device" in finding.problem


def test_reading_processes_are_tried_in_a_long_temporary_folder(monkeypatch, tmp_path):
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    monkeypatch.setenv("TMPDIR", str(deep))
    with facts_of_machine.ProbeProcess("readers", 2) as process:
        assert process.answer(time.monotonic() + 600.0) == {"problem": ""}
