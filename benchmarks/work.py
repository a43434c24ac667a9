"""The work of methods beside that of FedPav, counted in a round of three drawn clients: images and steps.

    python benchmarks/work.py

Networks are tiny: the counts do not depend on them. Rounds that are alike stand in one row.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from tabulate import tabulate

from fedsim.__main__ import main as fedsim
from fedsim.report import read_run

ROUNDS = 3
COMMON = (
    "--data.source", "SyntheticReID", "--data.source.clients", "3", "--data.source.unseen", "1", "--data.source.scale",
    "0.25", "--data.val", "none", "--data.size", "[32,16]",
    "--model.backbone", "SmallCNN", "--model.backbone.width", "4",
    "--model.neck", "{kind: bnneck, dropout: 0.0}", "--model.client.batch_size", "16", "--trainer.devices", "1",
    "--trainer.max_epochs", str(ROUNDS), "--trainer.limit_val_batches", "0", "--trainer.accelerator", "cpu",
    "--trainer.enable_progress_bar", "false",
)  # fmt: skip
METHODS: Mapping[str, tuple[str, ...]] = {
    "FedPav": ("FedPav",),
    "FedReID": ("FedReID",),
    "SKA with its second model": ("SKA",),
    "DACS": ("DACS",),
    "SSCU": ("SSCU",),
    "FedReIDFineTune": ("FedReIDFineTune",),
    "FedPav with KD in every round": (
        "FedPav", "--model.method.distillation", "{every: 1}", "--data.public", "new0",
    ),
}  # fmt: skip


def work(options: tuple[str, ...]) -> list[tuple[int, int]]:
    """Return the images and steps of each round."""
    with tempfile.TemporaryDirectory() as folder:
        if fedsim(["fit", "--model.method", *options, *COMMON, "--run_dir", f"{folder}/run"]) != 0:
            raise SystemExit(f"{options[0]}: the fit has failed")
        log = read_run(Path(folder) / "run").log
        return [(int(log[n]["train/images"]), int(log[n]["train/steps"])) for n in range(1, ROUNDS + 1)]


def rows() -> list[list[str]]:
    """Return method, rounds, and images and steps over those of FedPav."""
    table = []
    for name, options in METHODS.items():
        by_round = work(options)
        if name == "FedPav":
            plain = by_round[0]
        for counts in dict.fromkeys(by_round):
            rounds = ", ".join(str(number) for number, in_round in enumerate(by_round, 1) if in_round == counts)
            table.append([name, rounds, *(f"{a} / {b}" for a, b in zip(counts, plain, strict=True))])
    return table


if __name__ == "__main__":
    print(tabulate(rows(), headers=["method", "rounds", "images", "steps"], tablefmt="github", disable_numparse=True))
