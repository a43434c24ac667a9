"""Names that people, disks and programs give, drawn at random: their signs mean something to a path, table or page."""

import random
import unicodedata

import numpy as np
from PIL import Image

from fedsim.core.names import problem_of_name
from fedsim.data.federations import RESERVED

SIGNS = [
    *"/\\.,;:'\"<>|&$%#@*?!^~`-+=()[]{}_ ", "..", "../", "</td>", "<xyz>", "%2F", "%25", "%-", "+-", "&lt;", "$x_{",
    "a", "A", "b", "é", "e\u0301", "É", "数", "😀", "ß", "ss", "İ", "\u200d", "no", "null", "007", "1e3", "2021-01-01",
    "seen", "cam", "x" * 90, "数" * 40,
]  # fmt: skip
UNFIT = ["\n", "\r", "\t", "\0", "\x1b[2J", "\x7f", "\u2028", "\x85", "\u202e", "\ufeff", "\udcdf", "\ud800", "\uffff"]


def draws(seed, number):
    """Distinct names that are valid; half of them in pairs that some disks take for one."""
    draw, names = random.Random(seed), {}
    while len(names) < number:
        name = "".join(draw.choices(SIGNS, k=draw.randint(1, 5)))
        for one in (name, draw.choice([str.upper, str.lower, decomposed])(name)) if draw.random() < 0.5 else (name,):
            if problem_of_name(one) is None and one not in RESERVED and len(names) < number:
                names[one] = None
    return list(names)


def decomposed(name):
    return unicodedata.normalize("NFD", name)


def unfit_draws(seed, number):
    """Names with something in them that no name can have."""
    draw, names = random.Random(seed), []
    for _ in range(number):
        signs = draw.choices(SIGNS, k=draw.randint(0, 4))
        signs.insert(draw.randint(0, len(signs)), draw.choice(UNFIT))
        names.append("".join(signs))
    return names


def rows_of(folder, names, unseen=1):
    """Rows of a manifest: each name is a data set, and each but the last ones also the client that trains on it."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, rows = np.random.default_rng(0), []

    def row(picture, pid, cam, *others):
        path = folder / f"{picture}.png"
        if not path.exists():
            Image.fromarray(rng.integers(0, 256, (16, 8, 3), dtype=np.uint8)).save(path)
        return [str(path), pid, cam, *others]

    for place, name in enumerate(names):
        if place < len(names) - unseen:
            rows += [row(f"{pid}_{cam}", pid, cam, name, name, "train") for pid in (1, 2, 3) for cam in (0, 1)]
        rows += [row(f"{pid}_{cam}_{part}", pid, cam, name, "", part) for pid in (11, 12)
                 for cam, part in ((0, "query"), (1, "gallery"))]  # fmt: skip
    return rows
