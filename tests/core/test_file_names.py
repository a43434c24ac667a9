"""Names from users as names of files."""

import random
from pathlib import Path

from fedsim.core.names import file_name

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
