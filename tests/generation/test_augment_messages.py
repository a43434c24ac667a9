"""What ``fedsim augment fit`` says while it trains, and at its end."""

import json
import re
import shlex

import pytest

from fedsim.__main__ import main
from fedsim.generation import fitting
from small_generators import STEPS, fit


def test_progress_is_told_without_a_terminal(config, tmp_path, caplog, monkeypatch):
    """In a job's log: the start, then a line from time to time; here, one for each step."""
    monkeypatch.setattr(fitting, "LINE_EVERY", 0.0)
    caplog.set_level("INFO")
    fit(config, tmp_path / "g", "--clients", "[town2]")
    steps = int(STEPS[1])
    lines = [line for line in caplog.messages if line.startswith("generator of town2: ")]
    assert lines[0] == f"generator of town2: 0 of {steps} steps"
    assert sorted({int(line.split()[3]) for line in lines}) == list(range(steps + 1))
    assert all(line.endswith("minutes left") for line in lines[1:])


@pytest.mark.parametrize("only", [["town0", "town2"], None])
def test_the_closing_hint_can_be_followed(only, config, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    fit(config, tmp_path / "a folder", *(["--clients", json.dumps(only)] if only else []))
    (hint,) = re.findall(r"fedsim (augment preview .*)$", capsys.readouterr().out, re.MULTILINE)
    assert main([*shlex.split(hint), "--config", str(config)]) == 0, capsys.readouterr().err
    assert f"clients: {len(only or ['town0', 'town1', 'town2'])}" in capsys.readouterr().out
