"""The resolved configuration, beside every result of a run."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback

from fedsim.core.files import replacing
from fedsim.strategy.checkpoint_files import CONFIG_KEY


class KeepConfig(SaveConfigCallback):
    """Writes the resolved configuration into the run directory, and into every checkpoint."""

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write config.yaml; Lightning's own writer could be killed half-way."""
        with replacing(Path(trainer.default_root_dir) / self.config_filename) as partial:
            partial.write_text(self._text)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Hand the text to the strategy, which makes a file of it."""
        checkpoint[CONFIG_KEY] = self._text

    @cached_property
    def _text(self) -> str:
        """The configuration as text: made once, as it takes time and does not change; valid, as it was parsed."""
        config = self.config.clone()
        config["ckpt_path"], config["overwrite"] = None, False  # of this start, not of the run
        text: str = self.parser.dump(config, skip_none=False, skip_validation=True)
        return text
