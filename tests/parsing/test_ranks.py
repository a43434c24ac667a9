"""Ranks that import at once: their number is read off the command line, and they train what ranks always did."""

import subprocess
import sys

import pytest

from fedsim.parsing import early
from fedsim.parsing.command_line import given, merged
from fedsim.parsing.config_files import with_shipped
from fedsim.parsing.early import ranks_asked_for


@pytest.mark.parametrize(
    ("words", "number"),
    [
        (["--trainer.devices=4"], 4),
        (["--trainer.devices", "2", "--trainer.devices", "8"], 8),
        (["--config", "quickstart"], 2),
        (["--config", "quickstart", "--trainer.devices=1"], 1),
        (["--trainer.devices=1", "--config=quickstart"], 2),
        (["--config", '{"trainer": {"devices": 4}}'], 4),
        (["--config", '{"trainer": {"max_epochs": 4}}'], 3),
        (["--config", '{"trainer": 4}'], 3),
        (["--trainer.devices=auto"], 3),
        (["--trainer.devices=-1", "--trainer.accelerator=gpu"], 3),
        (["--trainer.accelerator", "cpu"], 1),
        (["--trainer.devices=[0, 1]"], 1),
        (["--trainer.devices"], 1),
        ([], 3),
    ],
)
def test_the_number_is_read_off_the_words(tmp_path, words, number):
    """Folders of GPUs are named as NVIDIA's driver README says: domain:bus:device.function."""
    for gpu in ("0000:07:00.0", "0000:0a:00.0", "0000:87:00.0"):
        (tmp_path / gpu).mkdir()
    assert ranks_asked_for(merged(given(with_shipped(words))), {}, tmp_path) == number


def test_gpus_are_those_that_the_process_may_see(tmp_path):
    assert ranks_asked_for({}, {"CUDA_VISIBLE_DEVICES": "2,5"}, tmp_path) == 2
    assert ranks_asked_for({}, {"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == 1
    for hidden in ("0,2,-1,1", "0,2,,1"):  # CUDA C++ Programming Guide: what follows an invalid index is not visible
        assert ranks_asked_for({}, {"CUDA_VISIBLE_DEVICES": hidden}, tmp_path) == 2
    assert ranks_asked_for({}, {}, tmp_path) == 1


@pytest.mark.dist
def test_the_other_rank_imports_from_the_first_moment(quick_python, tiny, tmp_path):
    command = ["fit", "--config", str(tiny), "--run_dir", str(tmp_path / "run"), "--trainer.enable_progress_bar=true"]
    ended = subprocess.run(
        [sys.executable, "-m", "fedsim", *command, "--trainer.devices=2"], capture_output=True, text=True, check=True
    )
    assert ended.stderr.splitlines()[0] == "starting 2 ranks"
    assert "ranks 0 to 1 train" in ended.stderr
    assert [words[0] for words in quick_python.asked] == ["-m", "-c"]  # and nobody else was started later


@pytest.mark.parametrize(("devices", "started"), [(1, []), (2, [1]), (8, [7]), (9, []), (10**15, [])])
def test_no_number_of_ranks_fills_the_memory_with_processes(monkeypatch, devices, started):
    """A slip in the number is the parser's to refuse; until then it costs nothing."""
    asked = []
    monkeypatch.setattr(early.spares, "may_start", lambda: True)
    monkeypatch.setattr(early.spares, "start", lambda number, program: asked.append(number))
    monkeypatch.setattr(early.os, "cpu_count", lambda: 2)
    early.start_ranks({"trainer.devices": devices})
    assert asked == started
