"""``summary.json``: what a run came to, in one small file."""

from __future__ import annotations

import json
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer

from fedsim._version import __version__
from fedsim.core.files import replacing
from fedsim.evaluation.query_file import write_queries
from fedsim.federation.callbacks.watched import federation_of
from fedsim.federation.events import was_stopped

QUERIES_FILE = "queries.npz"
"""In the run directory: scores of single queries in the last evaluation, see evaluation/query_file.py."""


class RunSummary(Callback):
    """Writes the final and the best scores, bytes, seconds, versions and seed; anew after each evaluation.

    Beside it, scores of single queries in the last evaluation.

    "Best" is by ``val/mAP``, or ``val/top1``, never by a test score.

    Args:
        folder: the run directory.
        fingerprint: hash of the configuration without the seed; runs with the same one are repetitions.
    """

    def __init__(self, folder: str, fingerprint: str) -> None:
        self.path, self.fingerprint = Path(folder) / "summary.json", fingerprint
        self.final: dict[str, Any] | None = None
        self.best: dict[str, Any] | None = None
        self.totals = {"seconds": 0.0}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add up the round, before an evaluation or a checkpoint looks at the sums."""
        metrics = federation_of(pl_module).round_metrics
        self.totals["seconds"] += metrics["time/round_seconds"]
        if "time/simulated_seconds" in metrics:
            simulated = self.totals.get("simulated_seconds", 0.0)
            self.totals["simulated_seconds"] = simulated + metrics["time/simulated_seconds"]

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write what is known so far."""
        self._write(trainer, pl_module, trainer.current_epoch + 1, finished=False)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the scores of a round."""
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        federation = federation_of(pl_module)
        scores = dict(federation.scores)
        self.final = {"round": trainer.current_epoch + 1, "metrics": scores}
        if trainer.is_global_zero:
            write_queries(self.path.with_name(QUERIES_FILE), federation.evaluator.queries, trainer.current_epoch + 1)
        monitor = federation.settings.evaluation.monitor
        if monitor in scores and (self.best is None or scores[monitor] > self.best["metrics"][monitor]):
            self.best = self.final

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Mark the run as finished, unless a signal ended it."""
        self._write(trainer, pl_module, trainer.current_epoch, finished=not was_stopped(trainer))

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run continues from."""
        return {"final": self.final, "best": self.best, "totals": self.totals}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.final, self.best = state_dict["final"], state_dict["best"]
        sums = state_dict["totals"]
        self.totals = {name: sums[name] for name in ("seconds", "simulated_seconds") if name in sums}

    def _write(self, trainer: Trainer, pl_module: LightningModule, rounds: int, finished: bool) -> None:
        if not trainer.is_global_zero:
            return
        federation = federation_of(pl_module)
        settings, parts = federation.settings, federation.parts
        content = {
            "finished": finished,
            "method": type(settings.method).__name__,
            "fingerprint": self.fingerprint,
            "seed": settings.seed,
            "rounds": rounds,
            "clients": parts.names,
            "unseen": list(parts.federated.unseen),
            "primary": federation.evaluator.primary,
            "final": self.final,
            "best": self.best,
            **{f"bytes_{name}": total for name, total in parts.ledger.totals.items()},
            **self.totals,
            "ranks": trainer.world_size,
            "threads": settings.threads,
            "device": str(federation.device),
            "versions": versions(),
            "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        with replacing(self.path) as partial:
            partial.write_text(json.dumps(content, indent=2) + "\n")


def versions() -> dict[str, str]:
    """Return the versions of fedsim, of Python and of the libraries that numbers depend on."""
    found = {"fedsim": __version__, "python": platform.python_version()}
    for package in ("torch", "torchvision", "lightning", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "unknown"
    return found
