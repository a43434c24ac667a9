"""The report on a search: its table, its figure and its page."""

import json
import math
import os
import random
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("optuna", reason="the extra 'search' is not installed")

import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from PIL import Image

from fedsim.__main__ import main
from fedsim.core.errors import DataError
from fedsim.report.trials import _height, _state, _ticks, draw_trials, importances, read_trials, trial_block
from fedsim.sweep.search import FileLock, open_study
from run_dirs import scores_of, write_run
from small import refuse

SPACE = {
    "client.lr": FloatDistribution(1e-4, 1e-1, log=True), "client.epochs": IntDistribution(1, 5),
    "method": CategoricalDistribution(["FedPav", "FedProx"]),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A search of twelve complete trials, a pruned, a failed, a repeated and a running one, with known scores."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    made = open_study(tmp_path, True, FileLock(tmp_path / "trials.lock"))
    made.sampler = optuna.samplers.RandomSampler(seed=0)
    made.set_user_attr("metric", "val/mAP")
    scores = [0.3, 0.2, 0.5, 0.4, float("-inf"), 0.45, 0.1, 0.6, 0.55, 0.35, 0.25, 0.15]
    for number in range(16):
        trial = made.ask(SPACE)
        trial.set_user_attr("folder", f"run{number}")
        if number < 12:
            made.tell(trial, scores[number])
        elif number == 12:
            trial.report(0.7, 1)
            trial.report(0.05, 3)
            made.tell(trial, state=optuna.trial.TrialState.PRUNED)
        elif number < 15:
            trial.set_user_attr("error", "lr: is bad")
            if number == 14:
                trial.set_user_attr("repeats", 13)
            made.tell(trial, state=optuna.trial.TrialState.FAIL)
    return tmp_path


def test_scores_that_are_nearly_equal_have_no_importance(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)
    made = open_study(tmp_path, True, FileLock(tmp_path / "trials.lock"))
    made.set_user_attr("metric", "val/mAP")
    for number in range(12):
        made.tell(made.ask(SPACE), 0.5 + 1e-9 * number)
    assert importances(read_trials(tmp_path)) == {}
    assert main(["report", str(tmp_path)]) == 0


def test_the_figure_and_the_page_of_a_search_have_the_names_of_others(folder, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    assert main(["report", str(folder), "--figure", "~/a.png"]) == 0
    assert (tmp_path / "home" / "a.png").stat().st_size
    assert "ends with .txt, not with one of .html, .htm" in refuse(
        capsys, "report", folder, "--html", tmp_path / "a.txt"
    )


def test_the_table_has_the_best_first_and_no_score_of_a_pruned_trial(folder):
    block = trial_block(read_trials(folder))
    assert block.headers == ["trial", "state", "lr", "epochs", "method", "run directory", "val/mAP"]
    by_score = ["7", "8", "2", "5", "3", "9", "0", "10", "1", "11", "6", "4"]
    assert [line[0] for line in block.lines] == [*by_score, "12", "14", "15"]
    scores = [line[-1] for line in block.lines]
    assert scores == ["0.6000", "0.5500", "0.5000", "0.4500", "0.4000", "0.3500", "0.3000", "0.2500", "0.2000",
                      "0.1500", "0.1000", "diverged", "-", "-", "-"]  # fmt: skip
    states = [line[1] for line in block.lines]
    assert states == ["complete"] * 12 + ["pruned after 3: 0.0500", "failed", "running"]
    assert _state(replace(read_trials(folder).rows[12], seen={2: math.nan})) == "pruned after 2: diverged"
    counts, best, records, shares, failed = block.notes
    assert counts.startswith("trials: 12 complete, 1 pruned, 1 failed, 1 running; a pruned trial ended before")
    assert best.startswith("best: trial 7, val/mAP 0.6000: client.lr=")
    assert records == "best so far: 0.3000 (trial 0), 0.5000 (trial 2), 0.6000 (trial 7)"
    assert shares.startswith("share of the score's variance (fANOVA, 11 complete trials): ")
    assert failed == f"failed: trial 14: lr: is bad ({folder / 'run14'}.log)"


def test_importance_is_that_of_the_option_that_matters(tmp_path, monkeypatch):
    """Of a score that only a changes; below ten complete trials, or for equal scores, there is none."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    made = open_study(tmp_path, False, FileLock(tmp_path / "trials.lock"))
    made.set_user_attr("metric", "loss")
    made.sampler = optuna.samplers.RandomSampler(seed=1)
    for number in range(20):
        if number == 9:
            assert importances(read_trials(tmp_path)) == {}
        trial = made.ask({"a": FloatDistribution(0, 1), "b": FloatDistribution(0, 1)})
        made.tell(trial, (trial.params["a"] - 0.5) ** 2)
    shares = importances(read_trials(tmp_path))
    assert [*shares] == ["a", "b"]
    assert sum(shares.values()) == pytest.approx(1)
    trials = read_trials(tmp_path)
    running = np.minimum.accumulate([row.score for row in trials.rows])
    assert [row.score for row in trials.records] == list(dict.fromkeys(running))


@pytest.mark.parametrize(("distribution", "heights"), [
    (FloatDistribution(1e-4, 1e-1, log=True), {1e-4: 0, 1e-2: 2 / 3, 1e-1: 1}),
    (FloatDistribution(2, 4), {2: 0, 3: 0.5, 4: 1}),
    (IntDistribution(1, 5), {1: 0, 2: 0.25, 5: 1}),
    (IntDistribution(3, 3), {3: 0.5}),
    (CategoricalDistribution(["x", None]), {"x": 0.25, None: 0.75}),
])  # fmt: skip
def test_heights_of_parallel_coordinates(distribution, heights):
    assert {value: _height(distribution, value) for value in heights} == pytest.approx(heights)
    assert all(0 <= _height(distribution, value) <= 1 for value in _ticks(distribution))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_a_narrow_window(browser, folder, tmp_path, scheme):
    pytest.importorskip("jinja2", reason="the extra 'report' is not installed")
    pytest.importorskip("plotly", reason="the extra 'report' is not installed")
    named, page = tmp_path / ("long" * 20), tmp_path / "trials.html"
    shutil.copytree(folder, named)
    assert main(["report", str(named), "--html", str(page)]) == 0
    shown = browser.new_page(viewport={"width": 390, "height": 900}, color_scheme=scheme)
    shown.goto(page.as_uri())
    assert shown.evaluate("document.documentElement.scrollWidth") <= 390
    back = shown.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (back == "rgb(255, 255, 255)") == (scheme == "light")
    shown.close()


def test_figure_and_page_are_small_and_have_all_trials(folder, tmp_path, capsys):
    pytest.importorskip("jinja2", reason="the extra 'report' is not installed")
    pytest.importorskip("plotly", reason="the extra 'report' is not installed")
    figure, page = tmp_path / "trials.png", tmp_path / "trials.html"
    assert main(["report", str(folder), "--figure", str(figure), "--html", str(page)]) == 0
    shown = capsys.readouterr().out
    assert f"wrote {figure}" in shown
    assert f"wrote {page}" in shown
    with Image.open(figure) as image:
        assert image.size == (1440, 960)
    content = page.read_text()
    assert figure.stat().st_size < 400_000
    assert len(content) < 200_000
    assert content.count("<tr>") == 1 + 15
    assert "data:image/webp;base64," in content
    assert "best so far: 0.3000 (trial 0)" in content
    assert not re.search(r"(src|href)=\"https?:", content)


def test_formats_and_options(folder, capsys, tmp_path):
    assert main(["report", str(folder), "--format", "csv"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "trial,state,lr,epochs,method,run directory,val/mAP"
    assert len(lines) == 16
    for words, text in (
        (["--curves", "x.png"], "--curves: is not for the folder of a search"),
        (["--best"], "--best: is not for the folder of a search"),
        ([str(folder / "run1")], f"runs: {folder} is the folder of a search; give it alone, or run directories"),
        (["--figure", tmp_path / "x.txt"], "ends with .txt, not with one of .eps"),
    ):
        assert text in refuse(capsys, "report", folder, *words)
    assert f"{folder}: is the folder of a search; give it alone, without a name" in refuse(
        capsys, "report", f"ours={folder}"
    )


def test_without_a_complete_trial_there_is_nothing_to_draw(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)
    made = open_study(tmp_path, True, FileLock(tmp_path / "trials.lock"))
    made.set_user_attr("metric", "val/mAP")
    assert trial_block(read_trials(tmp_path)).notes == ["trials: none"]
    made.ask(SPACE)
    made.enqueue_trial({})
    trials = read_trials(tmp_path)
    assert trial_block(trials).notes == ["trials: 1 running, 1 waiting"]
    with pytest.raises(DataError, match="none is complete; wait for the first one"):
        draw_trials(trials, tmp_path / "x.png")


def test_no_drawn_damage_of_a_study_slips_through_as_another_error(folder):
    """Optuna meets damage by assertions and indices, too."""
    path, draw = folder / "trials.log", random.Random(0)
    lines = path.read_bytes().splitlines(keepends=True)
    refused = 0
    for _ in range(60):
        number, damaged = draw.randrange(len(lines)), [*lines]
        record = json.loads(lines[number])
        key = draw.choice([*record])
        record[key] = draw.choice([None, -1, 10**6, "x", [], {}, 0.5])
        damaged[number] = json.dumps(record).encode() + b"\n"
        path.write_bytes(b"".join(damaged))
        try:
            trial_block(read_trials(folder))
        except DataError as error:
            refused += str(error).startswith(f"{path}: is not a study of fedsim sweep")
    assert refused > 10


def test_a_trial_that_ended_early_is_marked(folder):
    config = {"model": {"method": "fedsim.methods.FedPav"}, "trainer": {"max_epochs": 4, "max_steps": 1}}
    write_run(folder / "run7", {1: scores_of({"a": 0.5})}, config=config)
    states = {line[0]: line[1] for line in trial_block(read_trials(folder)).lines}
    assert states["7"] == "complete, ended after round 1 of 4"
    assert states["8"] == "complete"
