"""Which runs a report shows, under which names, in which formats."""

import csv
import io
import json
import sys

import pytest

from fedsim.__main__ import main
from fedsim.core.errors import DataError
from fedsim.report.groups import differences
from fedsim.report.runs import read_run
from fedsim.report.table import open_runs
from run_dirs import scores_of, with_mean, write_run
from small import refuse


def write(folder, seed=0, rank1=0.5, config=None, **summary):
    scores = {1: scores_of(with_mean({"a": rank1, "b": rank1 / 2}))}
    return write_run(folder, scores, config=config, **{"seed": seed, "fingerprint": "same", **summary})


def shown(capsys, *args):
    capsys.readouterr()
    assert main(["report", *map(str, args)]) == 0
    return capsys.readouterr()


def test_the_same_seed_twice_is_one_run(tmp_path, capsys):
    first, copy, other = (write(tmp_path / name, seed) for name, seed in (("first", 0), ("copy", 0), ("other", 1)))
    text = shown(capsys, first, copy).out
    assert "+-" not in text
    assert f"left out: {copy} has the settings and the seed 0 of {first}; both count as one run" in text.splitlines()
    text = shown(capsys, first, first / ".").out
    assert "+-" not in text
    assert f"left out: {first} is given twice; it counts once" in text
    text = shown(capsys, first, copy, other).out
    assert text.count("left out") == 1
    assert "2 seeds" in text


def test_the_finished_one_of_two_equal_runs_is_shown(tmp_path):
    died, done = write(tmp_path / "died", finished=False), write(tmp_path / "done")
    assert [run.folder for run in open_runs([died, done], unfinished=True)[0]] == [done]


def test_a_run_that_is_not_finished_is_left_out_beside_others(tmp_path, capsys):
    done, going = write(tmp_path / "done"), write(tmp_path / "going", seed=1, rank1=0.9, finished=False)
    text = shown(capsys, done, going).out
    assert f"left out: {going} is not finished, it has 1 rounds so far; --unfinished includes it" in text
    assert "+-" not in text
    text = shown(capsys, done, going, "--unfinished").out
    assert "+-" in text
    assert "1 not finished" in text
    assert "1 not finished" in shown(capsys, going).out, "alone it is what there is"


def test_a_run_without_results_does_not_refuse_the_others(tmp_path, capsys):
    done, begun, empty = write(tmp_path / "done"), tmp_path / "begun", write(tmp_path / "empty", seed=3)
    begun.mkdir()
    (begun / "config.yaml").write_text("model: {}\n")
    summary = json.loads((empty / "summary.json").read_text())
    (empty / "summary.json").write_text(json.dumps(summary | {"final": None}))
    text = shown(capsys, begun, done, empty).out
    assert f"left out: {begun} has not finished its first round" in text
    assert f"left out: {empty} has no scores yet" in text
    assert "wait for its first evaluation" in refuse(capsys, "report", begun, empty)
    assert "nowhere is not there" in refuse(capsys, "report", done, tmp_path / "nowhere")
    (done / "summary.json").write_text("[]")
    assert "summary.json: is not a JSON object" in refuse(capsys, "report", done)


def config(method="FedPav", **settings):
    weighting, rest = settings.pop("weighting", "size"), settings
    return {
        "model": {"method": {"class_path": f"fedsim.methods.{method}", "init_args": {"weighting": weighting}}, **rest},
        "trainer": {"max_epochs": 3, "default_root_dir": str(settings)},
    }


def test_differences_are_of_settings_that_numbers_depend_on(tmp_path):
    configs = [config(weighting="size", seed=1), config(weighting="cdw", seed=2), config("Ditto", weighting="size")]
    runs = [read_run(write(tmp_path / str(i), config=of)) for i, of in enumerate(configs)]
    found = differences(runs)
    assert found == {
        "model.method": ["FedPav", "FedPav", "Ditto"],
        "model.method.weighting": ["size", "cdw", "size"],
    }
    assert differences([runs[0], runs[2]]) == {"model.method": ["FedPav", "Ditto"]}


def test_formats_hold_the_same_numbers(tmp_path, capsys, caplog):
    runs = [write(tmp_path / str(seed), seed, rank1=0.4 + 0.1 * seed) for seed in (0, 1)]
    plain = shown(capsys, *runs, "--metric", "rank1")
    assert "45.0+-7.1" in plain.out
    markdown = shown(capsys, *runs, "--metric", "rank1", "--format", "markdown")
    assert "| a           |       45.0 ± 7.1 |".replace(" ", "") in markdown.out.replace(" ", "")
    assert "mean +- standard deviation over seeds" in caplog.text
    assert "standard deviation" not in markdown.out
    latex = shown(capsys, *runs, "--metric", "rank1", "--format", "latex").out
    assert latex.startswith(r"\begin{tabular}{lr}")
    assert r"45.0 $\pm$ 7.1" in latex
    rows = list(csv.DictReader(io.StringIO(shown(capsys, *runs, "--metric", "rank1", "--format", "csv").out)))
    [row] = [row for row in rows if row["data set"] == "a"]
    assert (float(row["mean"]), row["seeds"]) == (pytest.approx(45), "2")
    assert float(row["standard deviation"]) == pytest.approx(7.0711, abs=1e-3)
    assert "leave --compare out" in refuse(capsys, "report", *runs, "--format", "csv", "--compare", "003")


def test_scores_of_fedsim_test_are_a_rule(tmp_path, capsys):
    run = write(tmp_path / "run")
    assert "--rule tested needs the scores of fedsim test" in refuse(capsys, "report", run, "--rule", "tested")
    (run / "tests").mkdir()
    content = {"checkpoint": "checkpoint best.ckpt: round 7", "metrics": scores_of({"a": 0.77})}
    (run / "tests" / "best.json").write_text(json.dumps(content))
    text = shown(capsys, run, "--rule", "tested", "--metric", "rank1").out
    assert next(line.split() for line in text.splitlines() if line.startswith("a ")) == ["a", "77.0"]
    assert "checkpoint best.ckpt: round 7" in text
    (run / "tests" / "best.json").write_text("{")
    assert "is not JSON" in refuse(capsys, "report", run, "--rule", "tested")


def test_a_page_without_its_library_is_one_line(tmp_path, capsys, monkeypatch):
    run = write(tmp_path / "run")
    monkeypatch.delitem(sys.modules, "fedsim.report.html.page", raising=False)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    line = refuse(capsys, "report", run, "--html", tmp_path / "out.html", "--figure", tmp_path / "f.png")
    assert "--html needs plotly; pip install 'fedsim-reid[report]'" in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"], "it is said before anything is drawn"


NO_DATA = [5, [], {}, {"digest": 1}, {"digest": "a", "sets": []}, {"digest": "a", "sets": {"town": 3}},
           {"digest": "a", "sets": {"town": {"train": {"images": 4}}}},
           {"digest": "a", "sets": {"town": {"query": {"people": 1, "images": -1}}}}]  # fmt: skip


@pytest.mark.parametrize("data", NO_DATA)
def test_a_damaged_identity_of_data_is_named(tmp_path, data):
    run = write_run(tmp_path / "run", {1: scores_of({"town": 0.5})}, data=data)
    with pytest.raises(DataError, match=r"summary\.json: data is not the counts of data sets; was it edited\?"):
        read_run(run)
    parts = {"train": None, "query": {"people": None, "images": 4}, "gallery": {"people": 2, "images": 4}}
    for right in (None, {"digest": "a", "sets": {"town": parts}}, {"digest": "a", "num_sets": 2000}):
        assert read_run(write_run(run, {1: scores_of({"town": 0.5})}, data=right)).summary["data"] == right
