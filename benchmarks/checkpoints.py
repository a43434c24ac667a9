"""Writing a checkpoint of nine clients with private ResNet-50s from two ranks, against writing the same bytes plainly.

"Plainly" is one file per rank, written from memory and flushed, both ranks at once. The two alternate.

    python benchmarks/checkpoints.py --folder FOLDER      # where checkpoints would lie
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from lightning import Callback, LightningModule, Trainer
from tabulate import tabulate

from fedsim.data.datamodule import FederatedDataModule
from fedsim.evaluation.settings import Evaluation
from fedsim.federation.federation import Federation
from fedsim.methods import Local
from fedsim.models import Neck, ResNet
from fedsim.training.settings import LocalTraining
from overhead import Case, RandomClients, run_federation

CLIENTS = 9


class Compare(Callback):
    """Writes both kinds in turn, after a round: a client that has not trained has no state.

    Args:
        folder: where.
        repeats: how often.
    """

    def __init__(self, folder: Path, repeats: int) -> None:
        self.folder = folder
        self.repeats = repeats

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write, and print on the first rank."""
        times: dict[str, list[float]] = {"plain": [], "checkpoint": []}
        for _ in range(self.repeats):
            times["plain"].append(self.timed(trainer, lambda: self.write_plainly(pl_module, trainer.global_rank)))
            (self.folder / f"plain-{trainer.global_rank}.bin").unlink()  # both kinds write new files
            path = self.folder / "bench.ckpt"
            times["checkpoint"].append(self.timed(trainer, lambda path=path: trainer.save_checkpoint(path)))
            while list(path.glob("*.tmp")):
                time.sleep(0.05)
            size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        if trainer.is_global_zero:
            plain, ours = (statistics.median(times[name]) for name in ("plain", "checkpoint"))
            row = [trainer.world_size, f"{size / 2**20:.0f}", f"{plain:.2f}", f"{ours:.2f}", f"{ours / plain:.2f}"]
            print(tabulate([row], ["ranks", "MB", "plain s", "checkpoint s", "ratio"], tablefmt="github"))
        trainer.should_stop = True

    def timed(self, trainer: Trainer, write: Callable[[], object]) -> float:
        """Return seconds, from the moment when all ranks begin until all have ended."""
        while list(self.folder.rglob("*.tmp")):  # the last version is still being removed
            time.sleep(0.05)
        trainer.strategy.barrier()
        os.sync()
        trainer.strategy.barrier()
        start = time.perf_counter()
        write()
        trainer.strategy.barrier()
        return time.perf_counter() - start

    def write_plainly(self, federation: LightningModule, rank: int) -> None:
        """Write this rank's states as they lie in memory."""
        states = [client.private_state()["state"] for client in federation.parts.clients.values()]  # type: ignore[operator,union-attr] # LightningModule has none
        with (self.folder / f"plain-{rank}.bin").open("wb", buffering=0) as file:
            for state in states:
                file.write(state.numpy().data)
            os.fsync(file.fileno())


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/bench-checkpoints"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    args.folder.mkdir(parents=True, exist_ok=True)
    case = Case("", (), (32, 16), 2, clients=CLIENTS, batches=10)
    model = Federation(
        Local(), ResNet(50), Neck(kind="bnneck", dropout=0.0),
        client=LocalTraining(batch_size=10, optimizer_state="reset"), client_store="host",
        evaluation=Evaluation(test_during_fit=False),
    )  # fmt: skip
    data = FederatedDataModule(RandomClients(case), val="none", size=case.size, limit_client_batches=1)
    run_federation(model, data, 1, [Compare(args.folder, args.repeats)], devices=args.ranks)
    shutil.rmtree(args.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
