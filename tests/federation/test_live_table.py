"""The table of clients on a terminal: its rows and lines, two ranks in one table, a run that it does not change."""

import io
import math
import os
import pty
import re
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

import fedsim
from fedsim.core.errors import ConfigError
from fedsim.federation.callbacks import LiveTable, RoundCallback
from fedsim.federation.callbacks.live_table import table_of
from fedsim.methods import FedAvg
from small import Some, make_data, make_model, vector

OPTIONS = {"max_epochs": 2, "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False,
           "limit_val_batches": 0}  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self):
        return True


def lines_on(text):
    """The lines of a terminal's output, without its control sequences."""
    return [line.rstrip() for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "\n").splitlines()]


def cells_of(table):
    """The cells of each client, without the bars."""
    return [line.replace("━", "").split() for line in table.splitlines()[3:] if line and " of " not in line]


def test_rows_are_those_of_the_present_round():
    numbers = np.array([[3, 1, 0.5, 2.25, 400], [2, 0, 1.0, 1.5, 300], [0, 0, 0, 0, 0]], dtype=np.float64)
    table = table_of({"a": "0-1", "b": "0-1", "c": "0-1"}, numbers, 3, 20, "round 3", {})
    assert cells_of(table) == [
        ["a", "1", "50", "%", "2.250", "400"],
        ["b", "0", "-", "1.500", "300"],  # it takes no part in round 3
        ["c", "0-1", "-", "-", "-"],
    ]


def test_a_table_of_too_many_clients_shows_those_in_training_first():
    shares = [1.0, math.nan, 0.25, 1.0, 0.5]
    numbers = np.array([[1, 0, share, 1.0, 9.0] for share in shares])
    ranks = {f"c{n}": "0" for n in range(5)}
    lines = table_of(ranks, numbers, 1, 3, "round 1/2", {"val/mAP": 0.25}).splitlines()
    assert [line.split()[0] for line in lines[3:6]] == ["c2", "c4", "c0"]
    assert lines[0] == "round 1/2"
    assert lines[-2:] == ["2 of 5 clients are done, 2 are not shown", "mAP: val 25.0 %"]
    whole = table_of(ranks, numbers, 1, 5, "", {}).splitlines()
    assert [line.split()[0] for line in whole[3:8]] == ["c0", "c1", "c2", "c3", "c4"]
    assert lines[3].count("━") * 2 == lines[4].count("━")


def test_losses_and_speeds_are_those_of_the_session_however_rare_the_tables(monkeypatch):
    """Sessions that end between two tables, and the time between rounds, which is no training."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    table, batches = LiveTable(interval=1e9), []

    class Batches(RoundCallback):
        def on_client_batch(self, report):
            batches.append((report.client, float(report.loss)))

        def on_round_trained(self, trainer, pl_module):
            assert dict(zip(table._ranks, table._numbers[:, 3], strict=True)) == pytest.approx(dict(batches))
            time.sleep(0.3)

    fit = {**OPTIONS, "callbacks": [table, Batches()]}
    fedsim.Trainer(**fit).fit(make_model(FedAvg(share_head=False)), datamodule=make_data(Some("town0")))
    assert len({round(loss, 6) for _, loss in batches}) > 2


def test_one_table_serves_another_fit_without_a_terminal(monkeypatch, caplog):
    table = LiveTable(interval=0.0, line_interval=0.0)
    monkeypatch.setattr(sys, "stderr", Terminal())
    one = make_data(Some("town0"))
    fedsim.Trainer(**OPTIONS, callbacks=[table]).fit(make_model(FedAvg(share_head=False)), datamodule=one)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    caplog.set_level("INFO", "fedsim")
    fedsim.Trainer(**OPTIONS, callbacks=[table]).fit(make_model(FedAvg(share_head=False)), datamodule=make_data())
    assert any("batch" in line for line in caplog.messages)


@pytest.mark.parametrize("field", ["max_rows", "interval", "line_interval"])
def test_wrong_numbers_are_refused(field):
    with pytest.raises(ConfigError, match=field):
        LiveTable(**{field: -1})


def test_a_table_changes_no_bit_and_leaves_the_lines_of_the_rounds(monkeypatch):
    plain = make_model(FedAvg(share_head=False))
    fedsim.Trainer(**OPTIONS, enable_progress_bar=False).fit(plain, datamodule=make_data())
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    watched = make_model(FedAvg(share_head=False))
    fedsim.Trainer(**OPTIONS, callbacks=[LiveTable(interval=0.0)]).fit(watched, datamodule=make_data())
    assert sys.stderr is terminal
    assert torch.equal(vector(plain), vector(watched))
    lines = lines_on(terminal.getvalue())
    shown = {line.split()[0]: line for line in lines if "━" in line}
    assert sorted(shown) == sorted(watched.parts.rank_share.placement.ranks)
    assert all(re.search(r"100 %  +\d+\.\d{3}", line) for line in shown.values())
    of_rounds = [line for line in lines if line.startswith("round") and ": loss" in line]
    assert [line.partition(":")[0] for line in of_rounds] == ["round 1/2", "round 2/2"]
    assert terminal.getvalue().index("\x1b[?25h") < terminal.getvalue().index("━"), "the cursor stays"


def test_without_a_terminal_there_are_lines(capsys, caplog):
    caplog.set_level("INFO", "fedsim")
    model = make_model(FedAvg(share_head=False))
    fedsim.Trainer(**OPTIONS, callbacks=[LiveTable(line_interval=0.0)]).fit(model, datamodule=make_data())
    assert any("batch" in line for line in caplog.messages)
    assert "━" not in capsys.readouterr().err


def test_without_rich_the_remedy_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.live", None)
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(
        ConfigError, match=r"trainer.callbacks: LiveTable needs rich; pip install 'fedsim-reid\[live\]'"
    ):
        LiveTable()


@pytest.mark.dist
@pytest.mark.slow
def test_ranks_of_a_machine_share_one_table(tmp_path):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "fedsim", "fit", "--config", "quickstart", "--trainer.max_epochs=2",
               "--trainer.callbacks+=LiveTable", "--trainer.callbacks.interval=0.0", "--trainer.devices=2",
               f"--run_dir={tmp_path / 'run'}", "--data.limit_client_batches=4"]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs) as process:
        os.close(theirs)
        parts = []
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            parts.append(part)
    os.close(ours)
    assert process.returncode == 0
    lines = lines_on(b"".join(parts).decode(errors="replace"))
    assert {line.split()[1] for line in lines if line.startswith("town") and "100 %" in line} == {"0", "1"}
