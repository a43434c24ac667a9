"""Rounds that do not wait have a price, which every report prints: the client with the fewest answers."""

import pytest

from fedsim.__main__ import main
from fedsim.core.errors import DataError
from fedsim.report.costs import Price, answers_of, fewest_answers
from fedsim.report.runs import read_run
from run_dirs import scores_of, training, with_mean, write_log, write_run


def write_timed(folder, of_b, is_timed, rounds=4, **summary):
    """A run of two clients: a answers in each round, b in the first ``of_b``."""
    scores = scores_of(with_mean({"a": 0.6, "b": 0.4}))
    run = write_run(folder, {rounds: scores}, rounds, **{"clients": ["a", "b"], "fingerprint": folder.name} | summary)
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


LINE = "answers of a client, fewest, median and most: FedPav waits 4 each; FedPav goes-on 1 (b), 2.5, 4"


def shown(capsys, *words):
    capsys.readouterr()
    assert main(["report", *map(str, words)]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_answers_are_counted(runs):
    assert [answers_of(read_run(run)) for run in runs] == [
        Price("a", 4, median=4, most=4, total=8),
        Price("b", 1, median=2.5, most=4, total=5),
    ]
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


def counted(client, answers, work=1.0, since=1):
    """The entry of a summary: the client with the least work, among others with 20 answers each."""
    least = {"client": client, "answers": answers, "work": work}
    return {"answers": {"least": least, "median": 20.0, "most": 20, "total": 990, "since": since}}


@pytest.mark.parametrize(
    ("entry", "cell", "span"),
    [
        (counted("town0", 4), "4 of 990 (town0)", "4 (town0), 20, 20"),
        (counted("town0", 0, 0.0), "0 of 990 (town0)", "0 (town0), 20, 20"),
        (
            counted("town0", 20, 0.3125), "20 of 990, 0.31 of its work (town0)",
            "20 (town0, 0.31 of its work), 20, 20",
        ),
        (counted("town0", 4, since=9), "4 of 990 (town0) since round 9", "4 (town0), 20, 20 since round 9"),
    ],
    ids=["whole", "none", "partial", "continued"],
)  # fmt: skip
@pytest.mark.parametrize("number", [51, 1001])
def test_the_price_among_many_clients_is_in_the_summary(tmp_path, capsys, number, entry, cell, span):
    clients = (
        {"clients": [f"town{i}" for i in range(number)]} if number < 1000 else {"clients": [], "num_clients": number}
    )
    run = write_timed(tmp_path / "goes-on", 0, True, **entry | clients)
    assert fewest_answers(read_run(run)) == cell
    assert f"answers of a client, fewest, median and most: FedPav {span}" in shown(capsys, run)
    assert cell in shown(capsys, run, "--fairness")
    assert cell in shown(capsys, run, "--target", "rank1=45")


def test_many_clients_that_are_all_waited_for_answer_in_each_round(tmp_path, capsys):
    clients = {"clients": [], "num_clients": 1001}
    runs = [
        write_timed(tmp_path / "waits", 0, False, fingerprint="a", **clients),
        write_timed(tmp_path / "goes-on", 0, True, fingerprint="b", **clients | counted("town0", 1)),
        write_timed(tmp_path / "some", 0, False, fingerprint="c", **clients),
    ]
    for run, number in ((runs[0], 1001), (runs[2], 10)):
        write_log(run / "metrics.csv", [(r, training() | {"train/clients": float(number)}) for r in range(1, 5)])
    assert [fewest_answers(read_run(run)) for run in runs] == ["4 of 4004 (each)", "1 of 990 (town0)", "-"]
    assert "FedPav waits 4 each; FedPav goes-on 1 (town0), 20, 20; FedPav some unknown" in shown(capsys, *runs)


def test_a_damaged_count_is_refused(tmp_path):
    for damage in ({"answers": 3}, {"answers": {}}, counted(7, 4), counted("town0", "4"), counted("town0", 4, None)):
        run = write_timed(tmp_path / "run", 0, True, **damage)
        with pytest.raises(DataError, match="answers is not the numbers of the clients' answers"):
            read_run(run)


def test_scores_at_common_simulated_seconds(tmp_path, capsys):
    """By hand: rounds of 6 s and of 2 s, an evaluation after each; the shorter run ends at 12 s."""
    runs = []
    for name, seconds, rounds in (("waits", 6.0, 3), ("goes-on", 2.0, 6)):
        scores = {r: scores_of(with_mean({"a": r / 10, "b": r / 20})) for r in range(1, rounds + 1)}
        run = write_run(tmp_path / name, scores, rounds, clients=["a", "b"], fingerprint=name)
        clock = {"time/simulated_seconds": seconds} | ({"time/clock": 1.0} if name == "goes-on" else {})
        write_log(run / "metrics.csv", [(r, training() | clock | scores[r]) for r in scores])
        runs.append(run)
    text = shown(capsys, *runs, "--metric", "rank1")
    assert (
        "rank1 in percent, mean seen, until 4.0, 8.0, 12.0 simulated seconds: "
        "FedPav waits -, 7.5, 15.0; FedPav goes-on 15.0, 30.0, 45.0"
    ) in text
    assert "simulated seconds: " not in shown(capsys, runs[0], "--metric", "rank1")


def test_the_figure_has_the_price(runs, tmp_path):
    pytest.importorskip("matplotlib", reason="the extra 'report' is not installed")
    for given, has_price in ((runs, True), (runs[:1], False)):
        assert main(["report", *map(str, given), "--tradeoff", str(tmp_path / "t.svg")]) == 0
        assert ("fewest, median and most" in (tmp_path / "t.svg").read_text()) == has_price
