"""Pages of TensorBoard beside its scalars: settings with final scores (HPARAMS), a few cards, and the data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from lightning import LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from PIL import Image

from fedsim.core.metrics import LABELS
from fedsim.core.names import metric_name
from fedsim.federation.callbacks.summary import federation_of
from fedsim.federation.callbacks.tracking import Describes
from fedsim.federation.federation import Federation
from fedsim.settings.configuration import flat, text_of
from fedsim.settings.effects import COUNTED, Flat, SettingValue

Layout = dict[str, dict[str, list[Any]]]
"""group -> title of a card -> the kind of its chart, and patterns of the scalars in it"""


class TensorBoardPages(Describes):
    """Fills the pages of every TensorBoardLogger, on the first rank.

    Args:
        config: the resolved configuration.
    """

    logger_class = TensorBoardLogger

    def _describe(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for writer in self._experiments(trainer):
            writer.add_custom_scalars(layout_of(federation_of(pl_module)))

    def _show(self, trainer: Trainer, sheet: Image.Image) -> None:
        for writer in self._experiments(trainer):
            writer.add_image("data", np.asarray(sheet), 0, dataformats="HWC")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write settings and final scores for the page HPARAMS, into the run's own file: a line of its table."""
        if not (writers := self._experiments(trainer)):
            return
        from torch.utils.tensorboard.summary import hparams  # of an extra

        scores = final_scores(federation_of(pl_module))
        for writer in writers:
            for part in hparams(changed_settings(self.config), scores):
                writer.file_writer.add_summary(part)
            writer.flush()


def changed_settings(config: Mapping[str, Any]) -> dict[str, bool | float | str]:
    """Return the settings of model and data on which numbers depend and that are not the defaults.

    Method, seed and number of rounds are always there.

    >>> changed_settings({"seed_everything": 3, "model": {"method": "fedsim.methods.Ditto", "threads": 2}})
    {'seed_everything': 3, 'trainer.max_epochs': 100, 'model.method': 'Ditto'}
    """
    defaults, of_each_run = flat({}), ("model.method", "seed_everything", "trainer.max_epochs")
    return {
        name: entry.value if isinstance(entry.value, bool | int | float) else text_of(entry.value)
        for name, entry in flat(config).items()
        if name in of_each_run
        or (name.startswith(("model.", "data.")) and entry.effect in COUNTED and _is_changed(name, entry, defaults))
    }


def _is_changed(name: str, entry: SettingValue, defaults: Flat) -> bool:
    default = defaults[name].value if name in defaults else entry.setting.default
    return text_of(entry.value) not in (text_of(default), "[]", "{}")


def final_scores(federation: Federation) -> dict[str, float]:
    """Return the means over seen and unseen test sets of the delivered model, and the validation score."""
    names = {federation.settings.evaluation.monitor}
    for metric in _charted(federation):
        names |= {metric_name("test", federation.evaluator.primary, mean, metric) for mean in ("seen", "unseen")}
        names.add(metric_name("test", "global", "unseen", metric))
    return {name: value for name, value in federation.scores.items() if name in names}


def layout_of(federation: Federation) -> Layout:
    """Return the cards of the page CUSTOM SCALARS: a dozen, where the page SCALARS has hundreds."""
    primary = re.escape(federation.evaluator.primary)
    scores = {}
    for metric in _charted(federation):
        label = LABELS.get(metric, metric)
        scores[f"{label}, means over test sets"] = [rf"(val|test/[^/]+/(seen|unseen))/{metric}$"]
        scores[f"{label}, each test set, {primary} model"] = [rf"test/{primary}/[^/]+/{metric}$"]
    training = {name: [rf"train/([^/]+/)?{name}$"] for name in ("loss", "accuracy", "images", "steps")}
    costs = {
        "bytes in each round": [r"comm/(down|up)_bytes$"],
        "seconds of each round": [r"time/round_seconds$"],
        "images per second": [r"time/images_per_second$"],
        "share of time in which a rank is busy": [r"time/busy_share_rank\d+$"],
    }
    groups = {"Scores": scores, "Training": training, "Costs": costs}
    return {group: {title: ["Multiline", tags] for title, tags in cards.items()} for group, cards in groups.items()}


def _charted(federation: Federation) -> tuple[str, ...]:
    return ("top1",) if federation.settings.evaluation.task == "classification" else ("mAP", "rank1")
