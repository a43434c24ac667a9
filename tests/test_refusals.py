"""Mistakes that fedsim does not see itself, but Lightning, the parser or the disk: one line, exit code 2."""

import pytest

from small import refuse


@pytest.mark.parametrize("below", ["", "/sub", "/sub/sub"])
def test_a_run_directory_that_cannot_be_is_found_out_before_training(capsys, tiny, below):
    folder = f"{tiny}{below}"  # tiny is a file
    line = refuse(capsys, "fit", "--config", tiny, "--run_dir", folder)
    assert f"run_dir: {folder} cannot be a folder" in line
    assert "name another" in line


def test_so_is_one_that_the_system_refuses(capsys, tiny):
    line = refuse(capsys, "fit", "--config", tiny, "--run_dir", "/proc/fedsim")
    assert "run_dir: /proc/fedsim cannot be a folder (No such file or directory)" in line


def test_so_is_that_of_a_sweep(capsys, tiny, write_sweep):
    line = refuse(capsys, "sweep", write_sweep(), "--local", "--run_dir", tiny)
    assert f"--run_dir: {tiny} cannot be a folder" in line
