"""Pictures for papers: what matplotlib is given, against the runs' logs, and how it can be read."""

import itertools
import math
import random

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from PIL import Image

from fedsim.report import group_runs, report
from fedsim.report.layout import style_of
from fedsim.report.runs import Rule
from fedsim.report.series import bars, cmc, curves, tradeoffs
from run_dirs import scores_of, training, with_mean, write_log, write_run
from small import refuse

SETS = ("market1501", "viper", "ilids")


def draw_run(folder, rounds, seed=0, kinds=("global",), logged=20, **summary):
    draw = random.Random(f"{folder.name}{seed}")
    evaluations = {r: {} for r in rounds}
    for r in rounds:
        for kind in kinds:
            evaluations[r] |= scores_of(with_mean({name: draw.random() for name in SETS}), kind)
    return write_run(folder, evaluations, logged, **{"fingerprint": folder.name, "seed": seed, **summary})


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are saved, as they are at that moment."""
    figures, save = [], Figure.savefig

    def keep(figure, path, **how):
        save(figure, path, **how)  # lays it out
        figures.append(figure)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


def pictures_of(figure):
    return {axes.get_title(): axes for axes in figure.axes}


def boxes_overlap(one, other):
    return one.x0 < other.x1 and other.x0 < one.x1 and one.y0 < other.y1 and other.y0 < one.y1


def test_no_two_of_fourteen_series_look_alike():
    styles = [style_of(i) for i in range(14)]
    assert len({(s.colour, s.line) for s in styles}) == len({(s.colour, s.hatch) for s in styles}) == 14
    assert len({(s.plotly_marker, s.colour) for s in styles}) == 14
    for one, other in itertools.pairwise(styles):
        assert one.colour != other.colour
        assert one.marker != other.marker


def seen_without_green_cones(colour):
    """Machado et al., 2009: deuteranopia, severity 1, in linear RGB."""
    matrix = np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]])
    linear = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]) ** 2.2
    return np.clip(matrix @ linear, 0, 1) ** (1 / 2.2)


def test_colours_differ_for_the_colour_blind():
    colours = {style_of(i).colour for i in range(7)}
    assert len(colours) == 7
    seen = [seen_without_green_cones(colour) for colour in colours]
    apart = [np.linalg.norm(a - b) for i, a in enumerate(seen) for b in seen[:i]]
    assert min(apart) > 0.12
    red, green = (seen_without_green_cones(colour) for colour in ("#ff0000", "#8f8a00"))
    assert np.linalg.norm(red - green) < 0.12, "the measure finds a pair that is seen as one"


def test_curves_and_bars_are_the_logs_numbers(tmp_path, drawn):
    folders = [draw_run(tmp_path / f"s{s}", (10, 20), s, ("global", "local"), fingerprint="one") for s in (0, 1, 2)]
    other = draw_run(tmp_path / "other", (20,), method="Ditto")
    report([*map(str, folders), str(other)], figure=str(tmp_path / "f.pdf"))
    assert (tmp_path / "f.pdf").read_bytes().startswith(b"%PDF")
    groups = group_runs([*folders, other])
    pictures = pictures_of(drawn[0])
    assert list(pictures) == ["mean over clients' data sets", "per data set"]
    several, single = pictures["mean over clients' data sets"].lines
    expected = [[run.log[r]["test/global/seen/mAP"] for run in groups[0].runs] for r in (10, 20)]
    assert several.get_ydata().tolist() == pytest.approx([100 * np.mean(v) for v in expected])
    assert several.get_xdata().tolist() == [10, 20]
    [band] = pictures["mean over clients' data sets"].collections
    reach = band.get_paths()[0].vertices
    deviation = 100 * np.std(expected[1], ddof=1)
    at_20 = reach[reach[:, 0] == 20][:, 1]
    assert (at_20.max() - at_20.min()) == pytest.approx(2 * deviation)
    assert (single.get_xdata().tolist(), single.get_marker() not in ("", "None")) == ([20], True)
    heights = {}
    for bar in pictures["per data set"].patches:
        heights.setdefault(to_hex(bar.get_facecolor()).upper(), []).append(bar.get_height())
    for series in bars(groups, [*SETS, "seen"], "mAP", Rule()):
        assert heights[style_of(series.number).colour] == pytest.approx(series.mean[np.isfinite(series.mean)].tolist())
    errors = [line for line in pictures["per data set"].collections if len(line.get_paths()) == 4]
    assert len(errors) == 2, "three seeds have error bars, one seed has none"


def test_a_legend_hides_nothing_and_axes_count_whole_rounds(tmp_path, drawn):
    runs = [
        draw_run(tmp_path / f"m{i}", (1, 2), method=f"Method{i}", logged=2, kinds=("global", "local"))
        for i in range(14)
    ]
    report([*map(str, runs)], figure=str(tmp_path / "f.png"), curves=str(tmp_path / "c.png"))
    for figure in drawn:
        [legend] = figure.legends
        box = legend.get_window_extent()
        for axes in figure.axes:
            assert not boxes_overlap(box, axes.get_tightbbox()), axes.get_title()
            assert axes.get_legend() is None
            if axes.get_xlabel() == "round":
                low, high = axes.get_xlim()
                ticks = [tick for tick in axes.get_xticks() if low <= tick <= high]
                assert ticks
                assert all(tick == int(tick) for tick in ticks)
    looks = {(line.get_color(), line.get_linestyle()) for line in drawn[1].axes[0].lines}
    assert len(looks) == 14
    assert Image.open(tmp_path / "f.png").size[0] > 1400


def test_one_evaluation_is_a_point_that_can_be_seen(tmp_path, drawn):
    report([str(draw_run(tmp_path / "run", (5,), logged=5))], curves=str(tmp_path / "c.png"))
    for axes in drawn[0].axes:
        if axes.lines:
            [line] = axes.lines
            assert (list(line.get_xdata()), line.get_marker(), line.get_markersize() > 2) == ([5], "o", True)
            low, high = axes.get_xlim()
            assert high - low == 2


def test_a_missing_bar_is_no_zero(tmp_path, drawn):
    scores = {1: scores_of({"a": 0.0, "b": 0.5}) | scores_of({"a": 0.2}, "local")}
    report([str(write_run(tmp_path / "run", scores))], metric="rank1", figure=str(tmp_path / "f.png"))
    axes = pictures_of(drawn[0])["per data set"]
    assert sorted(bar.get_height() for bar in axes.patches) == pytest.approx([0, 20, 50])
    [mark] = [text for text in axes.texts if text.get_text() == "n/a"]
    [zero] = [bar for bar in axes.patches if bar.get_height() == 0]
    assert abs(mark.xy[0] - zero.get_x()) > 0.5


def test_a_personalised_model_that_is_the_global_one_stands_once(tmp_path):
    both = scores_of({"a": 0.5, "new": 0.2}) | scores_of({"a": 0.5}, "personalised")
    [same] = group_runs([write_run(tmp_path / "same", {1: both})])
    assert [series.label for series in bars([same], ["a"], "mAP", Rule())] == ["FedPav"]
    other = scores_of({"a": 0.5, "new": 0.2}) | scores_of({"a": 0.6}, "personalised")
    [differs] = group_runs([write_run(tmp_path / "differs", {1: other})])
    labels = [series.label for series in bars([differs], ["a"], "mAP", Rule())]
    assert labels == ["FedPav, global", "FedPav, personalised"]


@pytest.fixture
def personal(tmp_path):
    """A run that delivers clients' own models, which have no score on unseen data, beside one of a global model."""
    other = write_run(tmp_path / "other", {1: scores_of({"a": 0.3, "new": 0.4, "unseen": 0.4})}, unseen=["new"])
    own = {r: scores_of({"a": r / 10}, "personalised") | scores_of({"new": r / 5, "unseen": r / 5}) for r in (1, 2)}
    run = write_run(tmp_path / "run", own, method="SKA", primary="personalised", unseen=["new"])
    return [other, run]


def test_on_unseen_data_the_line_is_the_global_models_where_only_that_has_scores(personal, tmp_path, drawn):
    groups = group_runs(personal)
    seen, unseen = (curves(groups, name, "rank1") for name in ("a", "new"))
    assert {line.label: line.mean.tolist() for line in seen} == {"FedPav": [30], "SKA": [10, 20]}
    assert {line.label: line.mean.tolist() for line in unseen} == {"FedPav": [40], "SKA, global": [20, 40]}
    ranks = {line.label: line.mean.tolist() for line in cmc(groups, "new")}
    assert ranks["SKA, global"] == pytest.approx([40, 20, 24])
    assert [line.label for line in tradeoffs(groups, "unseen", "rank1")["bytes sent by server and clients"]] == [
        "FedPav", "SKA, global",
    ]  # fmt: skip
    styles = {series.label: series.number for series in bars(groups, ["a", "new"], "rank1", Rule())}
    assert unseen[1].number == styles["SKA, global"] != seen[1].number == styles["SKA, personalised"]
    report([*map(str, personal)], curves=str(tmp_path / "c.png"), figure=str(tmp_path / "f.png"), metric="rank1")
    figure, each = drawn
    assert [len(pictures_of(each)[title].lines) for title in ("a", "new", "mean unseen")] == [2, 2, 2]
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["FedPav", "SKA, global", "SKA, personalised"]
    assert [text.get_text() for text in each.legends[0].get_texts()] == ["FedPav", "SKA", "SKA, global"]


def test_single_queries_of_the_global_model_are_its_cmc_curve(personal):
    arrays = {"global/new/mAP": np.array([0.5]), "global/new/cmc": np.array([0.4, 0.7]), "new/pids": np.array([1])}
    np.savez(personal[1] / "queries.npz", round=2, **arrays, **{"new/splits": np.array([1])})
    [line] = cmc(group_runs(personal[1:]), "new")
    assert (line.label, line.mean.tolist()) == ("SKA, global", [40, 70])


def write_queries(folder, hits, round_=1):
    """``hits``: shares of queries at ranks 1, 2, ..."""
    arrays = {"global/a/mAP": np.array([0.5, 0.25]), "global/a/cmc": np.array(hits), "a/pids": np.array([1, 2])}
    np.savez(folder / "queries.npz", round=round_, **arrays, **{"a/splits": np.array([2])})


def test_cmc_curves_are_those_of_the_last_evaluation(tmp_path, drawn, capsys):
    folder = write_run(tmp_path / "run", {1: scores_of({"a": 0.5})})
    [line] = cmc(group_runs([folder]), "a")
    assert line.x.tolist() == [1, 5, 10], "what older runs have"
    write_queries(folder, [0.25, 0.5, 1.0])
    [line] = cmc(group_runs([folder]), "a")
    assert (line.x.tolist(), line.mean.tolist()) == ([1, 2, 3], [25, 50, 100])
    report([str(folder)], cmc=str(tmp_path / "cmc.svg"))
    picture = pictures_of(drawn[0])["a"]
    [shown] = picture.lines
    assert shown.get_ydata().tolist() == [25, 50, 100]
    points = 72 / picture.figure.dpi
    (_, low), (_, high) = points * picture.transData.transform([(1, 0), (3, 100)])
    half = shown.get_markersize() / 2 + shown.get_markeredgewidth() / 2
    assert points * picture.bbox.ymin + half <= low, "a marker at 0 % is whole"
    assert high + half <= points * picture.bbox.ymax, "a marker at 100 % is whole"
    write_queries(folder, [0.25, 0.5, 1.0], round_=7)
    assert cmc(group_runs([folder]), "a")[0].x.tolist() == [1, 5, 10], "of another round"
    (folder / "queries.npz").write_bytes(b"PK")
    assert "queries.npz: cannot be read" in refuse(capsys, "report", folder, "--cmc", tmp_path / "cmc.png")


def test_scores_over_bytes_and_seconds_are_plain_sums(tmp_path, drawn):
    folder = write_run(tmp_path / "run", {2: scores_of({"seen": 0.5})})
    seen = {"time/simulated_seconds": 10.0, "train/images": 100.0}
    rows = [(r, training(up=3e6 * r, down=1e6) | {k: r * v for k, v in seen.items()}) for r in (1, 2, 3)]
    at = {2: scores_of({"seen": 0.25}), 3: scores_of({"seen": 0.5})}
    write_log(folder / "metrics.csv", [*rows, *at.items()])
    found = tradeoffs(group_runs([folder]), "seen", "rank1")
    assert {unit: lines[0].x.tolist() for unit, lines in found.items()} == {
        "MB sent by server and clients": pytest.approx([3 + 1 + 6 + 1, 3 + 1 + 6 + 1 + 9 + 1]),
        "simulated seconds": [30.0, 60.0],
        "images trained on": [300.0, 600.0],
    }
    assert found["simulated seconds"][0].mean.tolist() == [25, 50]
    report([str(folder)], tradeoff=str(tmp_path / "t.png"), metric="rank1")
    assert [axes.get_xlabel() for axes in drawn[0].axes if axes.has_data()] == list(found)


def test_who_sends_nothing_is_one_point_over_bytes_and_a_line_over_images(tmp_path):
    quiet = write_run(tmp_path / "quiet", {1: scores_of({"seen": 0.1}), 2: scores_of({"seen": 0.2})}, fingerprint="q")
    log = [(r, training(0, 0) | {"train/images": 50.0} | scores_of({"seen": r / 10})) for r in (1, 2)]
    write_log(quiet / "metrics.csv", log)
    loud = write_run(tmp_path / "loud", {1: scores_of({"seen": 0.1}), 2: scores_of({"seen": 0.2})}, fingerprint="l")
    [first, second] = tradeoffs(group_runs([quiet, loud]), "seen", "rank1")["bytes sent by server and clients"]
    assert (first.x.tolist(), first.mean.tolist()) == ([0], [20])
    assert second.x.tolist() == [15, 30]
    [alone] = tradeoffs(group_runs([quiet]), "seen", "rank1").values()
    assert [(line.x.tolist(), line.mean.tolist()) for line in alone] == [([50, 100], [10, 20])]


def test_curves_over_seeds_say_how_many_there_are(tmp_path):
    folders = [draw_run(tmp_path / f"s{s}", rounds, s, fingerprint="one") for s, rounds in enumerate([(1, 2), (2,)])]
    [line] = curves(group_runs(folders), "viper", "mAP")
    assert line.seeds.tolist() == [1, 2]
    assert math.isnan(line.spread[0])
    assert line.spread[1] > 0
    assert line.low.tolist()[0] == line.mean.tolist()[0]


@pytest.mark.parametrize("option", ["--figure", "--curves", "--cmc", "--tradeoff"])
def test_a_wrong_file_is_one_line(option, tmp_path, capsys):
    run = draw_run(tmp_path / "run", (1,))
    for name in ("x.foo", "x", "run/summary.json/x.png"):
        line = refuse(capsys, "report", run, option, tmp_path / name)
        assert f"{option}: {tmp_path / name} " in line
        assert "name another" in line
    assert not list(tmp_path.glob("*.tmp"))


def test_drawing_leaves_the_users_settings_of_matplotlib_alone(tmp_path):
    before = dict(mpl.rcParams)
    report([str(draw_run(tmp_path / "run", (1,)))], figure=str(tmp_path / "f.png"))
    assert dict(mpl.rcParams) == before
