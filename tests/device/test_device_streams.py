"""Random streams of a device are seeded for each client and round, and nothing within a session resets them."""

import pytest
import torch

import simulated
from failing import run_on_ranks
from lightning_modules import assert_same
from runs import fit_module, learnt


def test_a_device_has_streams_of_its_own():
    with simulated.cuda(2):
        torch.manual_seed(3)
        first = [torch.rand(4, device=f"cuda:{number}").cpu() for number in range(2)]
        state = torch.cuda.get_rng_state(1)
        after = torch.rand(4, device="cuda:1").cpu()
        torch.rand(9)
        torch.cuda.set_rng_state(state, 1)
        assert torch.equal(torch.rand(4, device="cuda:1").cpu(), after)
        assert torch.equal(*first), "both are seeded"
        torch.cuda.manual_seed(4)
        assert not torch.equal(torch.rand(4, device="cuda").cpu(), first[0])
    assert torch.equal(torch.manual_seed(3) and torch.rand(4), first[0]), "the host's stream has not advanced"


@pytest.mark.slow
def test_a_module_draws_as_on_the_cpu():
    on_cpu = learnt(fit_module(2, "cpu"))
    with simulated.cuda(1):
        assert_same(learnt(fit_module(2)), on_cpu)


@pytest.mark.slow
def test_a_resume_draws_as_the_run_without_a_pause(tmp_path):
    with simulated.cuda(1):
        expected = learnt(fit_module(2))
    with simulated.cuda(1):
        first = fit_module(1)
        first.trainer.save_checkpoint(tmp_path / "first.ckpt")
    with simulated.cuda(1):
        assert_same(learnt(fit_module(2, ckpt_path=str(tmp_path / "first.ckpt"))), expected)


def play_on_ranks(folder):
    with simulated.cuda(2, board=folder / "board"):
        model = fit_module(2, devices=2)
        torch.save(learnt(model), folder / f"{model.strategy.global_rank}.pt")


@pytest.mark.dist
@pytest.mark.slow
def test_two_ranks_draw_as_one(tmp_path):
    with simulated.cuda(1):
        expected = learnt(fit_module(2))
    run_on_ranks(play_on_ranks, tmp_path, timeout=300)
    for rank in range(2):
        assert_same(torch.load(tmp_path / f"{rank}.pt"), expected)
