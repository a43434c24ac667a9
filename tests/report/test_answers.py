"""Rounds that do not wait have a price, which every report prints: the client with the fewest answers."""

import pytest

from fedsim.__main__ import main
from fedsim.report.answers import answers_of, fewest_answers
from fedsim.report.runs import read_run
from run_dirs import scores_of, training, with_mean, write_log, write_run


def write_timed(folder, of_b, is_timed, rounds=4):
    """A run of two clients: a answers in each round, b in the first ``of_b``."""
    scores = scores_of(with_mean({"a": 0.6, "b": 0.4}))
    run = write_run(folder, {rounds: scores}, rounds, clients=["a", "b"], fingerprint=folder.name)
    rows = []
    for r in range(1, rounds + 1):
        losses = {"train/a/loss": 1.0} | ({"train/b/loss": 1.0} if r <= of_b else {})
        clock = {"time/simulated_seconds": 2.0} | ({"time/clock": 2.0 * r} if is_timed else {})
        rows.append((r, training() | losses | clock))
    write_log(run / "metrics.csv", [*rows, (rounds, scores)])
    return run


@pytest.fixture
def runs(tmp_path):
    return write_timed(tmp_path / "waits", 4, False), write_timed(tmp_path / "goes-on", 1, True)


LINE = "answers of a client, fewest and most: FedPav waits 4 each, FedPav goes-on b 1 to a 4"


def shown(capsys, *words):
    capsys.readouterr()
    assert main(["report", *map(str, words)]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_answers_are_counted(runs):
    assert [answers_of(read_run(run)) for run in runs] == [{"a": 4, "b": 4}, {"a": 4, "b": 1}]
    assert [fewest_answers(read_run(run)) for run in runs] == ["4 of 8 (a)", "1 of 5 (b)"]


def test_the_plain_table_has_the_price_if_a_run_does_not_wait(runs, capsys):
    assert LINE in shown(capsys, *runs)
    assert "answers of a client" not in shown(capsys, runs[0])


def test_fairness_has_the_price_beside_the_worst_set(runs, capsys):
    text = shown(capsys, *runs, "--fairness")
    assert "worst set fewest answers" in text
    assert "b 4 of 8 (a)" in text
    assert "b 1 of 5 (b)" in text
    assert "fewest answers" not in shown(capsys, runs[0], "--fairness")


def test_the_factor_comes_with_the_price(runs, capsys):
    text = shown(capsys, *runs, "--target", "rank1=45")
    assert "simulated seconds fewest answers" in text
    assert "8.0 4 of 8 (a)" in text
    assert "8.0 1 of 5 (b)" in text


def test_the_page_has_the_price(runs, tmp_path):
    pytest.importorskip("plotly", reason="the extra 'report' is not installed")
    page = tmp_path / "page.html"
    assert main(["report", *map(str, runs), "--html", str(page)]) == 0
    assert LINE in " ".join(page.read_text().split())
