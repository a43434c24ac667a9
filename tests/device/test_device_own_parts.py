"""Values of users may be on the CPU, and the host waits for none within a batch; the checks for authors try a GPU."""

import pytest

import simulated
from budgets import counted_waits
from fedsim.methods import FedAvg, FedPav
from fedsim.models import SmallCNN
from fedsim.testing import PartRefusedError, check_backbone, check_loss, check_method, check_module, pythons, trials
from lightning_modules import DropsOut, assert_same
from own_parts import (
    PARTS,
    ComparesOnTheHost,
    LogsOnTheCPU,
    MadeOnTheHost,
    OnTheHost,
    ScalesOnTheHost,
    WithAMetric,
    trained,
)
from runs import fit_module
from small import state_of


@pytest.mark.parametrize("name", PARTS)
def test_numbers_may_be_computed_on_the_host(name):
    on_cpu = state_of(trained(name))
    with simulated.cuda(1):
        on_gpu = state_of(trained(name, accelerator="gpu"))
    assert_same({key: tensor.cpu() for key, tensor in on_gpu.items()}, on_cpu)


def test_a_number_on_the_cpu_may_be_logged():
    with simulated.cuda(1):
        model = fit_module(1, module=LogsOnTheCPU)
    logged = [value for name, value in model.round_metrics.items() if name.endswith("/temperature")]
    assert logged == [0.25, 0.25]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("module", [LogsOnTheCPU, WithAMetric])
def test_no_number_of_a_module_is_waited_for_within_a_batch(module, deterministic):
    with simulated.cuda(1) as gpu, counted_waits(gpu) as waits:
        model = fit_module(1, module=module, deterministic=deterministic)
    assert waits.between_batches == 0, waits.sites
    on_cpu = fit_module(1, "cpu", module=module)
    logged = {name for name in on_cpu.round_metrics if name.startswith("train/town0/")}
    assert len(logged) >= 3
    assert all(model.round_metrics[name] == on_cpu.round_metrics[name] for name in logged)


# -- the checks --------------------------------------------------------------------------------------------------------


def on_a_simulated_gpu(target, content, *args):
    """What the process of a fit on a GPU does."""
    if pythons.received(content).accelerator == "cpu":
        return target(content, *args)
    with simulated.cuda(1):
        return target(content, *args)


@pytest.fixture
def has_a_gpu(monkeypatch):
    """A machine with a GPU, whose fits on the CPU are not run."""
    run, clean_process = trials.Fit.run, pythons.clean_process

    def start(target, args, hashes=0):
        return clean_process(on_a_simulated_gpu, (target, *args), hashes)

    def run_some(fit):  # check_method goes on after a first fit that has ended
        return run(fit) if fit.accelerator == "gpu" or fit.folder.name == "one rank" else []

    monkeypatch.setattr(trials, "clean_process", start)
    monkeypatch.setattr(trials, "has_gpu", lambda: True)
    monkeypatch.setattr(trials.Fit, "run", run_some)


CHECKS = {
    "backbone": (lambda: check_backbone(SmallCNN(width=8)), None),
    "loss": (lambda: check_loss(OnTheHost()), None),
    "method": (lambda: check_method(FedPav()), lambda: check_method(ScalesOnTheHost())),
    "module": (lambda: check_module(DropsOut), lambda: check_module(ComparesOnTheHost)),
    "module with a method": (lambda: check_module(LogsOnTheCPU, method=FedAvg()), None),
}


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.usefixtures("has_a_gpu")
@pytest.mark.parametrize("name", CHECKS)
def test_checks_fit_on_a_gpu(name):
    sound, faulty = CHECKS[name]
    sound()
    if faulty is not None:
        with pytest.raises(PartRefusedError) as caught:
            faulty()
        assert any(found.startswith("on a GPU: ") and "device" in found for found in caught.value.findings), caught


def test_a_loss_that_makes_tensors_on_the_cpu_is_found_without_a_gpu():
    with pytest.raises(PartRefusedError, match="it makes tensors on the CPU"):
        check_loss(MadeOnTheHost(), fits=False)
