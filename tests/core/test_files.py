import pytest

from fedsim.core.files import replacing


def test_a_finished_file_takes_the_place_of_the_old_one(tmp_path):
    path = tmp_path / "new" / "file"
    for text in ("old", "new"):
        with replacing(path) as partial:
            partial.write_text(text)
    assert path.read_text() == "new"
    assert list(path.parent.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def write():
        with replacing(path) as partial:
            partial.write_text("ne")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
