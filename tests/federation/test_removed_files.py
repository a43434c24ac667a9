"""What is removed or replaced beneath a running fit of two ranks: all ranks end, and one line names the file."""

import shutil
from contextlib import suppress

import pytest

from failing import PATIENCE, Run, await_true, options

SLOW = ["--trainer.max_epochs=8", "--trainer.callbacks+=failing.Slow", "--trainer.callbacks.delay=0.05"]
MADE_AGAIN = ("checkpoints", "checkpoints/last.ckpt", "config.yaml")
"""unless the fit writes into it at that moment"""


def remove(path):
    """Remove a file or folder that a fit may be writing into."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def replace(path):
    """Put a file in the place of a folder, and a folder in that of a file."""
    was_folder = path.is_dir()
    remove(path)
    if was_folder:
        path.write_text("mine")
        return
    while not path.is_dir():  # the run may write the file again meanwhile
        path.unlink(missing_ok=True)
        with suppress(FileExistsError):
            path.mkdir()


def rounds_in(folder):
    path = folder / "metrics.csv"
    return len(path.read_text().splitlines()) - 1 if path.is_file() else 0


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "change"),
    [("", remove), ("checkpoints", remove), ("checkpoints/last.ckpt", remove), ("fit.lock", remove),
     ("config.yaml", remove), ("checkpoints", replace), ("metrics.csv", replace), ("summary.json", replace)],
)  # fmt: skip
def test_all_ranks_end_with_one_line_that_names_the_file(tmp_path, name, change):
    folder = tmp_path / "run"
    run = Run(tmp_path / "logs", "fit", *options(folder), *SLOW, ranks=2)
    try:
        await_true(lambda: rounds_in(folder) > 1, PATIENCE, lambda: run.output)
        change(folder / name)
        codes = run.wait()
    finally:
        run.kill()
    lines = [[line for line in run.log(rank).splitlines() if line.startswith("fedsim: error: ")] for rank in (0, 1)]
    assert "Traceback" not in run.output
    assert codes == [2, 2] or (codes == [0, 0] and name in MADE_AGAIN), run.output
    assert len(lines[0]) == (codes[0] == 2), run.output
    assert len(lines[1]) <= len(lines[0]), run.output  # the first rank's message, if rank 1 has read it
    for line in lines[0] + lines[1]:
        assert str(folder) in line
        assert "all machines share" not in line
