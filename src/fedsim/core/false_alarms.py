"""Warnings of Lightning that do not hold for a federation."""

from __future__ import annotations

import warnings

_MESSAGES = (
    ".*`srun` command is available.*",  # where it is needed, fedsim.strategy.launch says so
    ".*does not have many workers.*",  # loaders yield one empty batch per round
    ".*Experiment logs directory.*exists and is not empty.*",  # a run directory is made before the run
    ".*Checkpoint directory.*exists and is not empty.*",
    ".*barrier\\(\\): using the device under current context.*",
    ".*is supported for historical reasons but its usage is discouraged.*",
    ".*isinstance\\(treespec, LeafSpec\\).*",  # Lightning's own use of torch
    ".*GPU available but not used.*",
    ".*callbacks used to create the checkpoint need to be provided.*",  # those of a fit, when only scoring
    ".*LightningCLI's args parameter is intended.*",  # they are the command line, with None normalised
    # of a user's module, which a Trainer trains in each session:
    "(?s).*before `optimizer.step.*",  # its schedulers go on from earlier rounds
    ".*in eval mode at the start of training.*",  # as the user has built them
    ".*You defined a `validation_step` but have no `val_dataloader`.*",  # fedsim scores by ranking
    ".*`self.trainer` reference is not registered on the model yet.*",  # a method compares losses before the training
)
_OF_SCORING = (".*The dirpath has changed from.*",)
"""A command that scores begins no checkpoints, so those of the run need not be known."""


def ignore_missing_widgets() -> None:
    """Silence tqdm's line in notebooks without ipywidgets: Lightning's import causes it, and fedsim's bar is plain."""
    warnings.filterwarnings("ignore", "IProgress not found")


def ignore_false_alarms(scores: bool = False) -> None:
    """Silence these warnings in this process, or in the block of ``warnings.catch_warnings()`` around the call.

    ``scores``: whether the command only scores.
    """
    for message in (*_MESSAGES, *(_OF_SCORING if scores else ())):
        warnings.filterwarnings("ignore", message)
