"""Data sets that show the same people."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from fedsim.data.datasets.small import CUHK01, CUHK02
from fedsim.data.images import ReIDSource

__all__ = ["warn_of_common_people"]

log = logging.getLogger(__name__)


def warn_of_common_people(sources: Sequence[ReIDSource], public: str | None) -> None:
    """Warn if a federation has CUHK01 and the pair P1 of CUHK02, which shows the people of CUHK01."""
    has_p1 = any(isinstance(source, CUHK02) and 1 in source.pairs for source in sources)
    if not has_p1 or not any(isinstance(source, CUHK01) for source in sources):
        return
    if public == CUHK02.name:
        what = "data.public: the distillation set cuhk02 contains the people of cuhk01, also those that are tested on"
    else:
        what = "data.source: the pair P1 of cuhk02 shows the people of cuhk01, who may be both trained and tested on"
    log.warning("%s; exclude_p1: true of CUHK02 leaves them out", what)
