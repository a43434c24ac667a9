"""Versions of a directory: whenever the writer is killed, a reader finds a whole version."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from fedsim.core import versions
from fedsim.core.versions import begin_version, current_version, end_removals, holding, publish_version


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

    for name in ("flush_file", "replacing"):
        kill_before(versions, name)
    kill_before(type(partial), "rename")
    with pytest.raises(Killed):
        publish_version(partial)
    monkeypatch.undo()
    assert read(folder) == ("one" if at < 4 else "two")  # flush, rename, flush, pointer, removal
    publish_version(write(folder, "three"))
    assert read(folder) == "three"


def newest_elsewhere(folder):
    """What another process finds."""
    code = (
        f"from pathlib import Path; from fedsim.core.versions import *; print(current_version(Path({str(folder)!r})))"
    )
    return Path(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip())


def test_a_version_that_is_read_stays_until_the_reader_has_ended(tmp_path):
    folder = tmp_path / "last.ckpt"
    publish_version(write(folder, "one"))
    with holding():
        assert read(folder) == "one"
        publish_version(write(folder, "two"))
        publish_version(write(folder, "three"))
        with holding():
            assert read(folder / ".." / "last.ckpt") == "one"
        assert read(folder) == "one"
        assert newest_elsewhere(folder) == folder / "v3"
    assert read(folder) == "three"
    publish_version(write(folder, "four"))
    end_removals()
    assert sorted(path.name for path in folder.iterdir()) == ["current", "v4"]


def test_a_version_that_goes_while_it_is_found_is_found_again(tmp_path, monkeypatch):
    folder = tmp_path / "last.ckpt"
    publish_version(write(folder, "one"))
    found = versions._newest

    def newest(place):
        version = found(place)
        monkeypatch.setattr(versions, "_newest", found)
        publish_version(write(folder, "two"))
        end_removals()
        return version

    monkeypatch.setattr(versions, "_newest", newest)
    with holding():
        assert read(folder) == "two"


def test_an_empty_directory_is_not_held(tmp_path):
    with holding():
        assert current_version(tmp_path / "none") is None


def test_without_locks_of_the_file_system_a_version_is_found(tmp_path, monkeypatch):
    folder = tmp_path / "last.ckpt"
    publish_version(write(folder, "one"))

    def flock(*args):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(versions.fcntl, "flock", flock)
    with holding():
        assert read(folder) == "one"
    publish_version(write(folder, "two"))
    assert read(folder) == "two"
