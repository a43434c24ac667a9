"""Versions of a directory: whenever the writer is killed, a reader finds a whole version."""

import pytest

from fedsim.core import versions
from fedsim.core.versions import begin_version, current_version, publish_version


def write(folder, text):
    partial = begin_version(folder)
    for name in "ab":
        (partial / name).write_text(text)
    return partial


def read(folder):
    """What a reader finds: the content of the current version, which must be whole."""
    version = current_version(folder)
    assert {path.name for path in version.iterdir()} == {"a", "b"}
    [text] = {path.read_text() for path in version.iterdir()}
    return text


def test_a_version_that_is_being_written_is_not_read(tmp_path):
    folder = tmp_path / "last.ckpt"
    partial = begin_version(folder)
    (partial / "a").write_text("one")
    assert current_version(folder) is None
    (partial / "b").write_text("one")
    publish_version(partial)
    assert read(folder) == "one"
    partial = begin_version(folder)
    (partial / "a").write_text("two")
    assert read(folder) == "one"
    again = begin_version(folder)  # of the next start: what a killed writer left is gone
    assert list(again.iterdir()) == []
    (folder / "current").unlink()  # and nothing but the names tells whole versions from others
    assert read(folder) == "one"


class Killed(BaseException):
    pass


@pytest.mark.parametrize("at", range(5))
def test_a_writer_that_is_killed_anywhere_leaves_a_whole_version(tmp_path, monkeypatch, at):
    folder, left = tmp_path / "last.ckpt", [at]
    publish_version(write(folder, "one"))
    partial = write(folder, "two")

    def kill_before(owner, name):
        real = getattr(owner, name)

        def step(*args, **kwargs):
            if left[0] == 0:
                raise Killed
            left[0] -= 1
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, step)

    for name in ("flush_directory", "replacing"):
        kill_before(versions, name)
    kill_before(type(partial), "rename")
    with pytest.raises(Killed):
        publish_version(partial)
    monkeypatch.undo()
    assert read(folder) == ("one" if at < 4 else "two")  # flush, rename, flush, pointer, removal
    publish_version(write(folder, "three"))
    assert read(folder) == "three"
