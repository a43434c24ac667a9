"""The ranks of a machine: folders that all of them see, and deals of which each item goes to one rank."""

import time

import pytest
import torch

from failing import run_on_ranks
from fedsim.core.errors import ConfigError, PeerError
from fedsim.federation.events import RoundCallback
from fedsim.methods import FedPav
from fedsim.strategy import machine as machines
from small import fit, make_model

pytestmark = [pytest.mark.dist, pytest.mark.slow]


class Dealing(RoundCallback):
    """Lets ranks deal before a round, while they are connected."""

    def on_train_start(self, trainer, pl_module):
        """Deal twice; one rank is slow."""
        machine = pl_module.parts.rank_share.machine
        self.got = []
        for _ in range(2):
            mine = []
            for item in machine.queue("abcdefghij" * 20):
                mine.append(item)
                time.sleep(0.002 * trainer.global_rank)
            self.got.append(mine)
            machine.meet()
        with machine.folder() as folder:
            (folder / str(trainer.global_rank)).touch()
            machine.meet()
            self.seen = sorted(path.name for path in folder.iterdir())
        machine.meet()
        self.is_gone = not folder.exists()


def deal_on_two(folder):
    """What each of two ranks does."""
    dealing = Dealing()
    model = fit(make_model(FedPav()), rounds=1, devices=2, callbacks=[dealing])
    assert dealing.seen == ["0", "1", "owner"]
    assert dealing.is_gone
    torch.save(dealing.got, folder / f"{model.strategy.global_rank}.pt")


def test_each_item_of_a_deal_goes_to_one_rank(tmp_path):
    run_on_ranks(deal_on_two, tmp_path)
    a, b = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    for mine, others in zip(a, b, strict=True):
        assert sorted(mine + others) == sorted("abcdefghij" * 20)


def hide_on_two(folder):
    """What each of two ranks does, if one does not see the other's memory."""
    real = machines.memory_folder
    model = make_model(FedPav())

    def mine():
        return real() if model.trainer.global_rank == 0 else folder

    machines.memory_folder = mine
    try:
        fit(model, rounds=1, devices=2)
    except (ConfigError, PeerError) as error:
        (folder / f"{model.trainer.global_rank}.txt").write_text(str(error))


def test_ranks_that_do_not_share_memory_are_told_so(tmp_path):
    run_on_ranks(hide_on_two, tmp_path)
    for rank in range(2):
        text = (tmp_path / f"{rank}.txt").read_text()
        assert "rank 1 cannot access " in text or "rank 1 stopped" in text
        assert "--ipc=host" in text
