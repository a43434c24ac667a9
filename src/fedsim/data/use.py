"""Whether a fit with the usual settings can use a data set, from its labels alone."""

from __future__ import annotations

import stat
from pathlib import Path

import numpy as np

from fedsim.data.federated import ONE_IDENTITY, RetrievalSet
from fedsim.data.images import Domain, Split


def is_readable_file(path: Path) -> bool:
    """Whether a file is there, is a plain one, and is not empty; it is not opened."""
    try:
        status = path.stat()
    except (OSError, ValueError):
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size > 0


def obstacle_of(domain: Domain) -> str:
    """Return why a fit refuses a data set, with the remedy; empty if it does not."""
    if domain.train is not None and len(domain.train.identities) == 1:
        unknown = "; if number 0 means that people are unknown, set unlabelled: true of data.source"
        advice = unknown if domain.train.identities[0] == 0 else ""
        return f"{ONE_IDENTITY}{advice}"
    if has_matches(RetrievalSet(domain.query, domain.gallery, splits=domain.splits)):
        return ""
    cameras = np.unique(np.concatenate([part.camids for part in (domain.query, domain.gallery)]))
    of_cameras = f"all test images are of camera {cameras[0] + 1}" if len(cameras) == 1 else "all matches are junk"
    return (
        f"no query has a match from another camera ({of_cameras}); add images of other cameras, or set "
        "model.evaluation.camera_aware to false"
    )


def has_matches(sets: RetrievalSet, camera_aware: bool = True) -> bool:
    """Whether evaluation finds a query with a match, in each split; ``camera_aware``: one from another camera."""
    pool = sets.gallery
    trials = [(pool.take(query), pool.take(gallery)) for query, gallery in sets.splits] or [(sets.query, pool)]
    if camera_aware:
        return all(_num_valid(query, gallery) for query, gallery in trials)
    least = 1 if sets.own is None else 2  # the query itself is no match
    return all(any((gallery.pids == pid).sum() >= least for pid in query.pids if pid >= 0) for query, gallery in trials)


def notes_of(domain: Domain) -> str:
    """Return remarks for the owner of a data set that a fit accepts; empty if there are none."""
    notes = []
    if domain.train is not None and len(np.unique(domain.train.camids)) == 1:
        notes.append(
            "training images are of one camera, so data.val needs to be none, or model.evaluation.camera_aware false"
        )
    tested = domain.query.pids if len(domain.query) else domain.gallery.pids
    if domain.train is not None and 1 < len(domain.train.identities) < 4:
        notes.append("training identities are fewer than 4, so data.val needs to be first_image or none")
    if not tested.any():
        notes.append("all tested people are identity 0, the number of distractors")
    return "; ".join(notes)


def _num_valid(query: Split, gallery: Split) -> int:
    """Return the number of queries with a match in another camera."""
    shown = np.unique(np.stack([gallery.pids, gallery.camids], axis=1), axis=0)
    pids, counts = np.unique(shown[:, 0], return_counts=True)
    cameras = dict(zip(pids.tolist(), counts.tolist(), strict=True))
    pairs = set(map(tuple, shown.tolist()))
    labels = zip(query.pids.tolist(), query.camids.tolist(), strict=True)
    return sum(pid >= 0 and cameras.get(pid, 0) > ((pid, cam) in pairs) for pid, cam in labels)
