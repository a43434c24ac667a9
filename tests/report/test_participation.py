"""Pictures of who took part, and with which backbone."""

import numpy as np
import pytest

from fedsim.__main__ import main
from fedsim.report.runs import read_run
from fedsim.report.series import participation_of, rungs_of
from run_dirs import scores_of, training, write_log, write_run
from small import refuse

CLIENTS = ["a", "b", "c"]


def write(folder, trained, rungs=None):
    """``trained``: for each round the clients that did; ``rungs``: for each round those of all clients."""
    run = write_run(folder, {1: scores_of({"a": 0.5})}, clients=CLIENTS)
    rows = []
    for round_, names in enumerate(trained, start=1):
        row = training() | {f"train/{name}/loss": 1.0 for name in names}
        if rungs is not None:
            row |= {f"backbone/{c}": float(rung) for c, rung in zip(CLIENTS, rungs[round_ - 1], strict=True)}
        rows.append((round_, row))
    write_log(run / "metrics.csv", [*rows, (1, scores_of({"a": 0.5}))])
    return run


def test_few_rounds_are_shown_one_by_one(tmp_path):
    run = read_run(write(tmp_path / "run", ["a", "abc", "bc"]))
    assert participation_of(run).tolist() == [[1, 1, 0], [0, 1, 1], [0, 1, 1]]
    assert rungs_of(run) is None


def test_many_rounds_are_shown_in_blocks(tmp_path):
    draw = np.random.default_rng(0)
    trained = ["".join(c for c in CLIENTS if draw.random() < 0.5) for _ in range(120)]
    rungs = [[1 + t // 50, 1, 3 - t // 50] for t in range(120)]
    run = read_run(write(tmp_path / "run", trained, rungs))
    shares, found = participation_of(run), rungs_of(run)
    assert shares.shape == found.shape == (3, 50)
    start = 0
    for column in range(50):
        size = 3 if column < 20 else 2  # 20 * 3 + 30 * 2 = 120
        block = range(start, start + size)
        for row, name in enumerate(CLIENTS):
            assert shares[row, column] == pytest.approx(sum(name in trained[t] for t in block) / size)
            assert found[row, column] == rungs[block[-1]][row]
        start += size


def test_the_report_draws_them(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    plain = write(tmp_path / "plain", ["a", "b", "abc"])
    adaptive = write(tmp_path / "adaptive", ["abc", "bc"], [[1, 1, 1], [2, 1, 1]])
    picture = tmp_path / "pictures" / "who.png"
    assert main(["report", str(plain), str(adaptive), "--participation", str(picture)]) == 0
    assert f"wrote {picture}" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    line = refuse(capsys, "report", plain, "--participation", tmp_path / "who.foo")
    assert "--participation: " in line


def test_logs_that_do_not_say_who_trained(tmp_path, capsys):
    run = write(tmp_path / "run", ["", ""])
    assert "does not name the clients that trained" in refuse(
        capsys, "report", run, "--participation", tmp_path / "who.png"
    )
    many = [write(tmp_path / f"run{i}", ["a"]) for i in range(9)]
    assert "at most 8" in refuse(capsys, "report", *many, "--participation", tmp_path / "who.png")


def test_a_run_says_who_took_part(tiny, tmp_path):
    folder = tmp_path / "run"
    options = ["--model.selection=UCB", "--model.selection.count=2", "--trainer.limit_val_batches=0"]
    assert main(["fit", "--config", str(tiny), *options, "--run_dir", str(folder)]) == 0
    run = read_run(folder)
    shares = participation_of(run)
    assert shares.sum(axis=0).tolist() == [2, 2, 2]
    times = [run.log[3].get(f"selection/{name}/N", 0) for name in run.summary["clients"]]
    assert shares.sum(axis=1).tolist() == times
