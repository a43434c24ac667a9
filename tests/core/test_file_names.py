"""Names from users as names of files."""

import random
import re
import unicodedata
from pathlib import Path

import pytest

from fedsim.core import names
from fedsim.core.errors import ConfigError
from fedsim.core.names import check_name, file_name, file_names, problem_of_name
from hostile_names import UNFIT, draws, unfit_draws

PIECES = [
    "..",
    ".",
    "/",
    "\\",
    "\0",
    "\n",
    "%",
    "%2F",
    "%-",
    "@",
    "a",
    "B",
    "é",
    "数",
    "\udcdf",
    "\ud800",
    "x" * 240,
    "",
]


def test_hostile_names_stay_in_their_folder_and_never_collide(tmp_path: Path) -> None:
    draw = random.Random(7)
    names = {"".join(draw.choices(PIECES, k=draw.randint(1, 6))) for _ in range(3000)}
    files = {name: file_name(name) for name in names}
    assert len(set(files.values())) == len(names)
    for file in files.values():
        path = tmp_path / f"{file}@{file}.npz"
        assert path.resolve().parent == tmp_path.resolve()
        assert len(path.name.encode()) <= 240
        assert not file.startswith(".")
    for file in list(files.values())[:200]:
        (tmp_path / f"{file}.npz").touch()
    assert len(list(tmp_path.iterdir())) == 200


def test_usual_names_stay_as_they_are() -> None:
    for name in ("market1501", "Köln", "cuhk03-np", "camera 1", "v1.2_x", "数据", "2021"):
        assert file_name(name) == name


def test_no_disk_takes_two_names_of_a_folder_for_one() -> None:
    for seed in range(20):
        names = draws(seed, 200)
        files = file_names(names)
        assert [*files] == names
        for spelling in (str.casefold, str.lower, str.upper):
            for form in ("NFC", "NFD", "NFKC"):
                seen = {unicodedata.normalize(form, spelling(unicodedata.normalize(form, f))) for f in files.values()}
                assert len(seen) == len(names)
        assert files == file_names([*reversed(names)])
    assert file_names(["Köln", "köln", "town"])["town"] == "town"
    assert file_names(["Köln", "town"]) == {"Köln": "Köln", "town": "town"}


def test_what_cannot_be_a_name_is_refused() -> None:
    for name in unfit_draws(2, 2000):
        assert any(sign in name for sign in UNFIT)
        with pytest.raises(ConfigError, match=r"^data\.unseen: .*; rename it$") as error:
            check_name(name, "data.unseen")
        assert str(error.value).isprintable()
    assert all(problem_of_name(name) is None for name in draws(3, 2000))
    for nothing in ("", " ", ".", "..", "x" * 501, 7, None, False):
        assert problem_of_name(nothing)


def test_names_of_metrics_are_joined_by_one_function() -> None:
    """A name within an f-string splits the metric if it has a slash."""
    raw = re.compile(r'f"(?:train|val|test|comm|selection|backbone|oracle)/\{(?:client|name|domain)\W')
    assert raw.search('f"selection/{client}/loss"')
    files = Path(names.__file__).parents[1].rglob("*.py")
    assert [file.name for file in files if raw.search(file.read_text())] == []


def test_no_name_begins_as_other_files_of_the_folder() -> None:
    others = ("confusion", "pca-")
    names = [
        "confusion",
        "Confusion",
        "confusion2",
        "\N{FULLWIDTH LATIN SMALL LETTER P}\N{FULLWIDTH LATIN SMALL LETTER C}a-x",
        "PCA-global",
        "%63onfusion",
        "pca",
        "town",
        "c",
    ]
    files = file_names(names, others)
    for file in files.values():
        assert not unicodedata.normalize("NFKC", file).casefold().startswith(others)
    assert len({file.casefold() for file in files.values()}) == len(names)
    assert files["confusion"] == "%63onfusion"
    assert [files[name] for name in ("pca", "town", "c")] == ["pca", "town", "c"]
