"""Names with signs of tables, pages and formulas in reports; names with slashes in runs of older versions."""

import csv
import io
import json
import random

import pytest

from fedsim.__main__ import main
from fedsim.core.names import metric_name
from fedsim.report import group_runs
from fedsim.report.run_files import spelled
from fedsim.report.runs import Rule, read_run
from hostile_names import draws
from run_dirs import scores_of, training, with_mean, write_log, write_run
from small import refuse

NAMES = ["site/a", "site", "a|b", "<b>x</b>", "=1+2", "-rf", 'q,"', "$x_{", "2021", "1e3", "a+-b", "%2F", "*x*", "no"]


def run_of(folder, names, **summary):
    """A run with scores of these test sets, as its log and summary have them."""
    scores = {metric_name(*key.rsplit("\0", 3)): value for key, value in raw_scores(names).items()}
    run = write_run(folder, {1: scores | {"test/global/seen/rank1": 0.5, "test/global/seen/mAP": 0.5}}, 1, **summary)
    write_log(run / "metrics.csv", [(1, training() | {metric_name("train", n, "loss"): 1.0 for n in names} | scores)])
    return run


def raw_scores(names):
    return {f"test\0global\0{n}\0{metric}": 0.01 * i for i, n in enumerate(names) for metric in ("mAP", "rank1")}


def csv_rows(run, capsys):
    capsys.readouterr()
    assert main(["report", str(run), "--format", "csv"]) == 0
    return {row["data set"] for row in csv.DictReader(io.StringIO(capsys.readouterr().out))}


def test_each_format_has_the_row(tmp_path, capsys):
    run = run_of(tmp_path / "run", NAMES, clients=NAMES)
    assert csv_rows(run, capsys) == {*NAMES, "seen"}
    assert main(["report", str(run)]) == 0
    table = capsys.readouterr().out
    assert all(any(line.split("  ")[0] == name for line in table.splitlines()) for name in NAMES)
    assert main(["report", str(run), "--format", "markdown"]) == 0
    cells = [line.replace("\\|", "\0").split("|")[1].strip() for line in capsys.readouterr().out.splitlines()]
    assert {"site/a", "a\0b", "\\<b>x\\</b>", "a+-b", "\\*x\\*"} <= {*cells}
    assert main(["report", str(run), "--format", "latex"]) == 0
    assert " a+-b " in capsys.readouterr().out
    assert main(["report", str(run), "--target", "site/a/rank1=10"]) == 0
    assert "rank1 of at least 10 %, site/a" in capsys.readouterr().out
    assert "has no test set x/y; choose from site/a, site," in refuse(
        capsys, "report", run, "--rule=best3", "--sets=[x/y]"
    )


def test_pictures_show_names_as_they_are(tmp_path):
    pytest.importorskip("plotly", reason="the extra 'report' is not installed")
    from fedsim.report.html.plots import plots_of

    [group] = groups = group_runs([run_of(tmp_path / "run", NAMES, clients=NAMES)])
    plots = {plot.name: plot for plot in plots_of(groups, {name: name for name in NAMES}, "rank1", Rule())}
    bars = json.loads(plots["bars"].json)[""]
    assert bars["data"][0]["x"][3] == "&lt;b&gt;x&lt;/b&gt;"
    assert bars["layout"]["xaxis"]["type"] == "category"  # 2021 is no date
    shares = json.loads(plots["participation"].json)[f"{group.label}, seed 0"]
    assert shares["data"][0]["y"][0] == "site/a"
    assert shares["layout"]["yaxis"]["type"] == "category"


def test_slashes_in_names_of_older_runs_are_understood(tmp_path, capsys):
    scores = scores_of(with_mean({"site/a": 0.3, "town": 0.4, "new/x": 0.2}))
    scores |= {"test/global/new/x/site/a/rank1": 0.1, "test/global/new/x/town/rank1": 0.2, "val/global/site/a/mAP": 0.9}
    run = write_run(tmp_path / "old", {1: scores}, 1, clients=["site/a", "town"], unseen=["new/x"])
    write_log(run / "metrics.csv", [(1, training() | {"train/site/a/loss": 1.0, "comm/site/a/up_bytes": 3.0} | scores)])
    assert csv_rows(run, capsys) == {"site/a", "town", "new/x", "seen"}
    log = read_run(run).log[1]
    for parts in (
        ("val", "global", "site/a", "mAP"), ("train", "site/a", "loss"), ("comm", "site/a", "up_bytes"),
        ("test", "global", "new/x", "site/a", "rank1"), ("test", "global", "new/x", "town", "rank1"),
    ):  # fmt: skip
        assert metric_name(*parts) in log


def test_numbers_of_this_version_keep_their_names():
    for seed in range(30):
        names = draws(seed, 12)
        clients, unseen, draw = names[:8], names[8:], random.Random(seed)
        scores = {metric_name("test", "local", name, "mAP"): 0.1 for name in names}
        scores |= {metric_name("test", "local", u, c, "mAP"): 0.1 for u in unseen for c in clients}
        scores |= {metric_name("train", c, "loss"): 0.1 for c in clients} | {"train/loss": 0.1, "val/mAP": 0.2}
        names = draw.sample([*scores], len(scores))
        assert [*spelled(dict.fromkeys(names, 0.1), clients, unseen)] == names
