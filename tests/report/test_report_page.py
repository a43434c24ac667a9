"""The page of ``fedsim report --html``: its numbers against the runs' files, and how it looks in a browser."""

import itertools
import json
import random
import re
import shlex
import shutil
import subprocess
from html import unescape
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from fedsim.__main__ import main
from fedsim.evaluation.pictures import write_picture
from fedsim.report import group_runs
from fedsim.report.runs import Rule, read_run
from run_dirs import scores_of, training, with_mean, write_log, write_run
from small import refuse

pytest.importorskip("plotly", reason="the extra 'report' is not installed")
pytest.importorskip("jinja2", reason="the extra 'report' is not installed")

from fedsim.report.html.plots import plots_of

SETS = ("market1501", "viper")
METHODS = ("FedPav", "Local", "FedProx")
ODD = "</script><b>odd & 'name'"


def write_one(folder, method, seed):
    draw = random.Random(f"{method}{seed}")
    rows, evaluations = [], {}
    for round_ in range(1, 7):
        rows.append(
            (round_, training(up=2e6, down=3e6) | {f"train/{name}/loss": 1.0 for name in SETS[: round_ % 2 + 1]})
        )
        rows[-1][1]["time/simulated_seconds"] = 5.0
        if round_ % 2 == 0 and (method != "FedProx" or round_ == 6):
            evaluations[round_] = scores_of(with_mean({name: draw.random() for name in SETS}))
            if method == "FedPav":
                evaluations[round_] |= scores_of({SETS[0]: draw.random()}, "local")
            rows.append((round_, evaluations[round_]))
    settings = {"model": {"method": {"class_path": method}, "note": ODD}, "data": {"root": "/secret/place/reid"}}
    summary = {"seed": seed, "fingerprint": method, "method": method, "clients": list(SETS), "seconds": 12.0}
    versions = {"versions": {"fedsim": "9.8.7", "torch": "2.99"}, "device": "cpu"}
    run = write_run(folder / f"{method}{seed}", evaluations, 6, settings, **summary, **versions)
    write_log(run / "metrics.csv", rows)
    arrays = {}
    for name in SETS:
        values = np.array([draw.random() for _ in range(12)])
        arrays |= {f"global/{name}/{metric}": values for metric in ("mAP", "rank1")}
        arrays |= {f"global/{name}/cmc": np.sort([draw.random() for _ in range(20)])}
        arrays |= {f"{name}/pids": np.repeat(np.arange(4), 3), f"{name}/splits": np.array([12])}
    np.savez(run / "queries.npz", round=6, **arrays)
    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    found = [
        write_one(folder, method, seed) for method in METHODS for seed in ((0, 1, 2) if method != "FedProx" else (0,))
    ]
    for kind in ("rankings", "maps"):
        (found[0] / kind).mkdir()
        Image.new("RGB", (800, 200), "red").save(found[0] / kind / "viper.png")
    Image.new("RGB", (64, 64), "blue").save(folder / "people.png")
    return found


@pytest.fixture(scope="module")
def page(runs, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "sub" / "out.html"
    assert main(["report", *map(str, runs), "--html", str(path)]) == 0
    return path


class Reader(HTMLParser):
    """Tags with their attributes, the texts of scripts by id, and the cells of tables by id."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts, self.tables, self.open = [], {}, {}, None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append((tag, attrs))
        if tag == "table":
            self.table = self.tables.setdefault(attrs["id"], [])
        elif tag == "tr":
            self.table.append([])
        elif tag in ("td", "th"):
            self.table[-1].append("")
        self.open = (tag, attrs)

    def handle_endtag(self, tag):
        self.open = None if tag in ("td", "th", "script", "table") else self.open

    def handle_data(self, data):
        tag, attrs = self.open or ("", {})
        if tag == "script":
            self.scripts[attrs.get("id", "")] = self.scripts.get(attrs.get("id", ""), "") + data
        elif tag in ("td", "th", "button") and self.table[-1:] and self.table[-1]:
            self.table[-1][-1] += data.strip()


@pytest.fixture(scope="module")
def parsed(page):
    return Reader(page.read_text())


def data_of(parsed, name):
    return json.loads(parsed.scripts[f"data-{name}"])


def named(content):
    return {trace["name"]: trace for trace in content["data"] if trace.get("showlegend") is not False}


def test_it_asks_for_nothing_from_elsewhere(page, parsed):
    links = [
        attrs[key] for _, attrs in parsed.tags for key in ("src", "href", "srcset", "data", "action") if key in attrs
    ]
    assert links
    assert [link[:40] for link in links if not link.startswith(("#", "data:"))] == []
    style = re.search(r"<style>(.*?)</style>", page.read_text(), re.DOTALL)[1]
    assert "url(" not in style
    assert "@import" not in style


def test_curves_are_the_metrics_files(runs, parsed):
    contents = data_of(parsed, "curves")
    assert list(contents) == ["mean seen", *SETS]
    for title, name in {"mean seen": "seen", **dict(zip(SETS, SETS, strict=True))}.items():
        traces = named(contents[title])
        assert list(traces) == list(METHODS)
        for method in METHODS:
            logs = [read_run(run).log for run in runs if run.name.startswith(method)]
            key = f"test/global/{name}/mAP"
            rounds = [r for r in logs[0] if key in logs[0][r]]
            assert traces[method]["x"] == rounds
            means = [100 * np.mean([log[r][key] for log in logs]) for r in rounds]
            assert traces[method]["y"] == pytest.approx(means)
            assert "markers" in traces[method]["mode"]
        bands = [trace for trace in contents[title]["data"] if trace.get("fill") == "toself"]
        assert [band["legendgroup"] for band in bands] == ["FedPav", "Local"], "one seed has no band"


def test_bars_costs_cmc_and_participation_are_the_files_numbers(runs, parsed):
    bars = named(data_of(parsed, "bars")[""])
    assert list(bars) == ["FedPav, global", "FedPav, local", "Local", "FedProx"]
    finals = [read_run(run).summary["final"]["metrics"] for run in runs[:3]]
    expected = [100 * np.mean([of[f"test/global/{name}/mAP"] for of in finals]) for name in (*SETS, "seen")]
    assert bars["FedPav, global"]["y"] == pytest.approx(expected)
    assert bars["FedPav, local"]["y"][1:] == [None, None]
    assert bars["FedProx"].get("error_y") is None
    [missing] = [trace for trace in data_of(parsed, "bars")[""]["data"] if trace["name"] == "FedPav, local, missing"]
    assert (missing["x"], missing["text"]) == (["viper", "mean seen"], ["n/a", "n/a"])
    costs = data_of(parsed, "tradeoff")
    assert named(costs["mean seen, MB sent by server and clients"])["FedPav"]["x"] == pytest.approx([10, 20, 30])
    assert named(costs["mean seen, simulated seconds"])["FedPav"]["x"] == pytest.approx([10, 20, 30])
    curve = np.mean([np.load(run / "queries.npz")["global/viper/cmc"] for run in runs[3:6]], axis=0)
    assert named(data_of(parsed, "cmc")["viper"])["Local"]["y"] == pytest.approx((100 * curve).tolist())
    [heat] = data_of(parsed, "participation")["Local, seed 1"]["data"]
    assert heat["z"] == [[1, 1, 1, 1, 1, 1], [1, 0, 1, 0, 1, 0]]


def test_hatched_bars_have_their_colour(tmp_path):
    runs = [write_run(tmp_path / f"m{i}", {1: scores_of({"a": 0.5})}, method=f"M{i}") for i in range(9)]
    [bars] = [plot for plot in plots_of(group_runs(runs), {"a": "a"}, "mAP", Rule()) if plot.name == "bars"]
    markers = [trace["marker"] for trace in json.loads(bars.json)[""]["data"]]
    assert [marker["pattern"]["shape"] for marker in markers] == [*[""] * 7, "/", "/"]
    assert {marker["pattern"]["fillmode"] for marker in markers} == {"overlay"}, "or white stands on nothing"
    assert len({(marker["color"], marker["pattern"]["shape"]) for marker in markers}) == 9


def test_lines_on_unseen_data_say_that_they_are_the_global_models(tmp_path):
    own = scores_of({"a": 0.5}, "personalised") | scores_of({"new": 0.25})
    run = write_run(tmp_path / "run", {1: own}, method="SKA", primary="personalised", unseen=["new"])
    plots = {plot.name: plot for plot in plots_of(group_runs([run]), {"a": "a", "new": "new"}, "mAP", Rule())}
    for name in ("curves", "cmc"):
        traces = {title: named(content) for title, content in json.loads(plots[name].json).items()}
        assert {title: list(of) for title, of in traces.items()} == {"a": ["SKA"], "new": ["SKA, global"]}
        assert "the global model (named in the legend) if only that has scores" in plots[name].text


def test_tables_hold_scores_tests_settings_and_versions(runs, parsed):
    scores = {row[0]: row[1:] for row in parsed.tables["table-scores"][1:]}
    group = group_runs(runs)[0]
    cell = group.cell("test/global/viper", ["mAP", "rank1"], Rule())
    assert scores["viper"][0] == cell.replace("+-", " ± ")
    assert "12 queries" in str(parsed.tables["table-test-1"])
    assert [row[-1] for row in parsed.tables["table-test-2"][1:]].count("3 seeds") == 3 * 2
    assert ["model.method", *METHODS] in parsed.tables["table-differences"]
    assert parsed.tables["table-versions"][1][:4] == ["FedPav", "0", "9.8.7", "2.99"]
    assert [row[0] for row in parsed.tables["table-published-1"][1:]].count("FedPav") >= 1


def test_names_are_texts_and_folders_stay_here(page, parsed):
    text = page.read_text()
    assert ODD not in text
    assert "&lt;/script&gt;&lt;b&gt;odd" in text
    assert "/secret/place" not in text
    assert ("b", {"odd": None}) not in parsed.tags


def test_pictures_are_in_the_page(parsed):
    shown = [attrs for tag, attrs in parsed.tags if tag == "img"]
    assert [attrs["alt"] for attrs in shown] == [
        "ranked lists of FedPav on viper", "maps of FedPav on viper", "contact sheet of the data",
    ]  # fmt: skip
    assert all(attrs["src"].startswith("data:image/webp;base64,") for attrs in shown)


def test_a_page_of_many_pictures_is_below_five_megabytes_and_names_the_others(tmp_path):
    """The points are shown rather than the many queries of a client's own model on unseen data."""
    run, noise = write_run(tmp_path / "run", {1: scores_of({"a": 0.5})}), np.random.default_rng(0)
    shutil.copytree(write_run(tmp_path / "other", {1: scores_of({"a": 0.4})}, method="M"), tmp_path / "two")
    files = [run / "rankings" / f"a@c{i:02}.png" for i in range(20)] + [run / "projections" / "pca-global.png"]
    pixels = noise.integers(0, 256, (800, 800, 3), dtype=np.uint8)
    for file in files:
        file.parent.mkdir(exist_ok=True)
        Image.fromarray(pixels if "@" in file.name else pixels[:, :100]).save(file)
    out = tmp_path / "out.html"
    assert main(["report", str(run), str(tmp_path / "two"), "--html", str(out)]) == 0
    assert 4_000_000 < out.stat().st_size < 5_000_000
    shown = [attrs["alt"] for tag, attrs in Reader(out.read_text()).tags if tag == "img"]
    named = re.findall("which would be larger than 5 MB: (.*?)<", out.read_text())
    assert len(shown) + len(named) == 21
    assert "pca-global" in shown[-1]
    assert named == [str(file) for file in files[len(shown) - 1 : -1]]


@pytest.mark.parametrize("has_rows", [True, False])
def test_a_page_has_fewer_queries_before_it_leaves_out_sets_and_seen_ones_first(has_rows, tmp_path):
    """A picture of an earlier version does not say where its rows are."""
    seen, unseen = ([f"{name}{number}" for number in range(11)] for name in ("a", "z"))
    run = write_run(tmp_path / "run", {1: scores_of(dict.fromkeys([*seen, *unseen], 0.5))}, clients=seen, unseen=unseen)
    pixels, files = np.random.default_rng(0).integers(0, 256, (820, 800, 3), dtype=np.uint8), []
    for name in [*seen, *(f"{name}@{client}" for name in unseen for client in seen[:2])]:
        picture = Image.fromarray(pixels[: 820 if name in seen else 818])
        picture.info |= {"rows": "20 100"} if has_rows else {}
        files.append(run / "rankings" / f"{name}.png")
        files[-1].parent.mkdir(exist_ok=True)
        write_picture(files[-1], picture)
    out = tmp_path / "out.html"
    assert main(["report", str(run), "--html", str(out)]) == 0
    assert 3_000_000 < out.stat().st_size < 5_000_000
    shown = [attrs["alt"].split()[-1] for tag, attrs in Reader(out.read_text()).tags if tag == "img"]
    first = {f"{name}@a0" for name in unseen}
    assert {*shown} >= {*first, *seen} if has_rows else {*shown} < first
    assert ("a picture shows the first " in out.read_text()) == has_rows
    assert 5 < len(shown) < len(files)


def test_the_page_says_how_to_draw_the_contact_sheet_that_is_missing(page, tmp_path):
    assert "fedsim data preview" not in page.read_text()
    settings = {"model": {}, "data": {"source": "SyntheticReID", "size": [32, 16]}}
    run = write_run(tmp_path / "a run", {1: scores_of({"a": 0.5})}, config=settings)
    out = tmp_path / "out.html"
    report = ["report", str(run), "--html", str(out)]
    assert main(report) == 0
    command = unescape(re.search(r"<code>(fedsim data preview .*?)</code>", out.read_text())[1])
    assert main(shlex.split(command)[1:]) == 0
    assert main(report) == 0
    shown = [attrs["alt"] for tag, attrs in Reader(out.read_text()).tags if tag == "img"]
    assert shown == ["contact sheet of the data"]
    assert "fedsim data preview" not in out.read_text()


def test_what_is_wrong_is_one_line(runs, tmp_path, capsys):
    file = tmp_path / "file"
    file.touch()
    assert "--html: " in refuse(capsys, "report", runs[0], "--html", file / "out.html")
    assert "--compare: there is no paper 999" in refuse(
        capsys, "report", runs[0], "--compare", "999", "--html", tmp_path / "out.html"
    )
    bad = tmp_path / "bad"
    shutil.copytree(runs[0], bad)
    (bad / "maps" / "viper.png").write_bytes(b"no picture")
    assert "viper.png: cannot read this picture" in refuse(capsys, "report", bad, "--html", tmp_path / "out.html")


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node to run the page's function")
def test_names_are_broken_into_lines_and_lose_no_letter(page):
    """Drawn names: no line is too long, entities stay whole, and only spaces at the ends of lines are lost."""
    [function] = re.findall(r"^function broken\(.*?^}", page.read_text(), re.MULTILINE | re.DOTALL)
    draw, cases = random.Random(0), []
    for _ in range(200):
        words = ["".join(draw.choices(["a", "W", "&lt;", "&amp;", "é", "\N{SNAKE}"], k=draw.randint(1, 30)))
                 for _ in range(draw.randint(1, 8))]  # fmt: skip
        cases.append([" ".join(words), draw.randint(12, 40)])
    program = f"{function}\nconsole.log(JSON.stringify({json.dumps(cases)}.map(([name, most]) => broken(name, most))))"
    lines = json.loads(subprocess.run(["node", "-e", program], capture_output=True, text=True, check=True).stdout)
    for (name, most), text in zip(cases, lines, strict=True):
        assert text.replace("<br>", "").replace(" ", "") == name.replace(" ", "")
        assert all(len(re.findall(r"&\w+;|.", line)) <= most for line in text.split("<br>")), text
        assert not any(line.strip() != line for line in text.split("<br>"))


# -- in a browser ------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[1280, 390])
def opened(request, browser, page):
    """The page in a window of this width, and everything that it complained of or asked for."""
    shown, said = browser.new_page(viewport={"width": request.param, "height": 900}), []
    shown.on("console", lambda message: said.append(message.text))
    shown.on("pageerror", lambda error: said.append(str(error)))
    shown.on("request", lambda asked: said.append(asked.url) if not asked.url.startswith(("file:", "data:")) else None)
    shown.goto(page.as_uri())
    shown.wait_for_function("document.querySelectorAll('.plot .main-svg').length > 0")
    yield shown, said, request.param
    shown.close()


BOXES = """box => Object.fromEntries([...box.querySelectorAll('.plot, .legend, .xy, .g-xtitle, .xaxislayer-above')]
  .concat([box]).map(part => [part.classList[0], part.getBoundingClientRect().toJSON()]))"""


def check_boxes(shown, width):
    """Plots are large enough, in the window, and above their legends, near them."""
    for plot in shown.query_selector_all(".plot"):
        boxes = plot.evaluate(BOXES)
        assert plot.evaluate("box => box._fullLayout._size.w") > 0.45 * width
        assert plot.evaluate("box => box._fullLayout._size.h") > 80
        assert boxes["plot"]["right"] <= width
        if "legend" in boxes:
            above = max(boxes[name]["bottom"] for name in ("xy", "g-xtitle", "xaxislayer-above") if name in boxes)
            assert above - 1 <= boxes["legend"]["top"] <= above + 150, plot.get_attribute("id")
            assert boxes["legend"]["right"] <= width
            assert boxes["legend"]["bottom"] <= boxes["plot"]["bottom"] + 1
    assert shown.evaluate("document.documentElement.scrollWidth") <= width, "nothing is wider than the window"


def test_every_picture_can_be_seen_and_nothing_is_hidden(opened):
    shown, said, width = opened
    assert len(shown.query_selector_all(".plot")) == 5
    check_boxes(shown, width)
    parts = "[...document.querySelectorAll('.plot text, td, th, p')]"
    written = f"{parts}.filter(part => part.textContent.trim() && part.textContent !== 'n/a')"
    sizes = shown.evaluate(f"{written}.map(part => parseFloat(getComputedStyle(part).fontSize))")
    assert min(sizes) >= 11
    assert said == []


def test_many_names_fit_below(browser, tmp_path):
    scores = {r: scores_of({"a": 0.5, "b": 0.1 * r}) for r in (1, 2)}
    runs = [write_run(tmp_path / f"m{i}", scores, method=f"Method with a long name {i}") for i in range(14)]
    assert main(["report", *map(str, runs), "--html", str(tmp_path / "many.html")]) == 0
    for width in (1280, 390):
        shown = browser.new_page(viewport={"width": width, "height": 900})
        shown.goto((tmp_path / "many.html").as_uri())
        shown.wait_for_function("document.querySelectorAll('.plot .main-svg').length > 0")
        check_boxes(shown, width)
        shown.close()


@pytest.mark.parametrize("width", [1280, 390])
def test_long_names_of_many_data_sets_stand_apart(browser, tmp_path, width):
    """Of many data sets the bars lie; a name takes a quarter of the width at most, and is never read as a formula."""
    sets = {f"<b>& {'long ' * 20}$x$ {number}": 0.02 * number for number in range(20)}
    run = write_run(tmp_path / "run", {1: scores_of(sets)}, clients=list(sets))
    write_log(run / "metrics.csv", [(1, training(up=1e6) | {f"train/{name}/loss": 1.0 for name in sets})])
    assert main(["report", str(run), "--html", str(tmp_path / "long.html")]) == 0
    shown, said = browser.new_page(viewport={"width": width, "height": 900}), []
    shown.on("console", lambda message: said.append(message.text))
    shown.goto((tmp_path / "long.html").as_uri())
    shown.wait_for_function("document.querySelectorAll('.plot .main-svg').length > 0")
    check_boxes(shown, width)
    for plot in ("bars", "participation"):
        ticks = "part => { const box = part.getBoundingClientRect(); return [part.textContent, box.top, box.bottom]; }"
        names = [text.evaluate(ticks) for text in shown.query_selector_all(f"#plot-{plot} .ytick text")]
        assert len(names) == len(sets)
        assert all(text.startswith("<b>&") and "…" in text and "$ " in text for text, *_ in names)
        assert all(above[2] <= below[1] + 3 for above, below in itertools.pairwise(names))
    assert shown.evaluate("document.getElementById('plot-bars').data[0].y[3]").startswith(
        "&lt;b&gt;&amp; long long long"
    )
    assert said == []
    shown.close()


LETTERS = """() => [...document.querySelectorAll('.plot .legendtext')].map(text => {
  const box = text.getBoundingClientRect();
  return [text.textContent, box.left, box.right];
})"""


def test_long_names_are_whole_in_a_narrow_window(browser, tmp_path):
    """They are broken over lines: a legend is not cut off where its names would differ."""
    scores = {r: scores_of({"a": 0.5, "b": 0.1 * r}) for r in (1, 2)}
    names = [f"FedPav lr 0.005, size [64, 32], max_epochs {n}, personalised <b> & {'x' * 60}" for n in (8, 9)]
    runs = [write_run(tmp_path / f"m{n}", scores, method=name) for n, name in enumerate(names)]
    assert main(["report", *map(str, runs), "--html", str(tmp_path / "long.html")]) == 0
    for width in (1280, 390):
        shown = browser.new_page(viewport={"width": width, "height": 900})
        shown.goto((tmp_path / "long.html").as_uri())
        shown.wait_for_function("document.querySelectorAll('.plot .main-svg').length > 0")
        check_boxes(shown, width)
        for text, left, right in shown.evaluate(LETTERS):
            assert (left >= 0, right <= width) == (True, True), text
            assert text.replace(" ", "") in {name.replace(" ", "") for name in names}
        shown.close()


def test_choices_sorting_and_other_widths(opened):
    shown, said, _ = opened
    before = shown.evaluate("document.getElementById('plot-curves').data[0].y")
    shown.select_option("select[data-plot=curves]", "viper")
    after = shown.evaluate("document.getElementById('plot-curves').data[0].y")
    assert before != after
    header = "#table-all-scores th:nth-child(4) button"
    column = "[...document.querySelectorAll('#table-all-scores tbody tr')].map(r => parseFloat(r.cells[3].textContent))"
    shown.click("summary:has-text('All scores')")
    shown.click(header)
    rising = shown.evaluate(column)
    shown.click(header)
    falling = shown.evaluate(column)
    assert rising == sorted(rising)
    assert falling == sorted(rising, reverse=True)
    shown.click("#table-all-scores th:nth-child(1) button")
    words = shown.evaluate(
        "[...document.querySelectorAll('#table-all-scores tbody tr')].map(r => r.cells[0].textContent)"
    )
    assert words == sorted(words)
    shown.set_viewport_size({"width": 700, "height": 900})
    shown.wait_for_function("document.getElementById('plot-curves').layout.width < 700")
    shown.wait_for_function("document.getElementById('plot-curves').layout.width > 600")
    assert shown.evaluate("document.getElementById('plot-curves').data[0].y") == after, "the choice stays"
    assert said == []


def test_pictures_open(opened):
    shown, said, width = opened
    shown.click("summary:has-text('ranked lists')")
    image = shown.query_selector("img[alt^='ranked lists']")
    assert image.evaluate("image => image.decode().then(() => image.naturalWidth)") == 800
    box = image.bounding_box()
    assert box["width"] <= width
    assert box["width"] / box["height"] == pytest.approx(4, rel=0.01)
    assert said == []


# colour and, of what lies behind it, the first one that is not clear; of texts, and of what plots draw
COLOURS = """() => {
  const clear = colour => /^rgba\\(.*, 0\\)$|^none$|^transparent$/.test(colour);
  const behind = part => { while (part && clear(getComputedStyle(part).backgroundColor)) part = part.parentElement;
                           return getComputedStyle(part ?? document.body).backgroundColor; };
  const of = (parts, name) => [...document.querySelectorAll(parts)].filter(part => part.getClientRects().length)
    .map(part => [part.textContent.slice(0, 30), getComputedStyle(part)[name], behind(part)])
    .filter(([, colour]) => colour.startsWith("rgb") && !clear(colour));  // others are patterns
  return {texts: [...of("td, th, th button, p, li, h1, h2, h3, summary, nav a, label, select", "color"),
                  ...of(".plot text:not(.bartext)", "fill")],
          lines: [...of(".plot .lines path", "stroke"), ...of(".plot .points path", "fill")]};
}"""


def contrast(first, second):
    """The ratio of WCAG 2, from 1 to 21, of two colours as browsers write them."""

    def luminance(text):
        shares = [float(number) / 255 for number in re.findall(r"[\d.]+", text)[:3]]
        linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(first), luminance(second)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize(("scheme", "media", "back"), [
    ("light", "screen", "rgb(255, 255, 255)"), ("dark", "screen", "rgb(21, 25, 30)"),
    ("dark", "print", "rgb(255, 255, 255)"),
])  # fmt: skip
def test_it_can_be_read_in_the_light_in_the_dark_and_on_paper(browser, tmp_path, scheme, media, back):
    scores = {r: scores_of({"a": 0.5, "b": 0.1 * r}) for r in (1, 2)}
    runs = [write_run(tmp_path / f"m{i}", scores, method=f"M{i}") for i in range(8)]  # one more than colours
    assert main(["report", *map(str, runs), "--html", str(tmp_path / "out.html")]) == 0
    shown = browser.new_page(color_scheme=scheme)
    shown.goto((tmp_path / "out.html").as_uri())
    shown.wait_for_function("document.querySelectorAll('.plot .main-svg').length > 0")
    shown.emulate_media(media=media, color_scheme=scheme)
    shown.wait_for_function("new Promise(done => requestAnimationFrame(() => setTimeout(() => done(true))))")
    assert shown.evaluate("getComputedStyle(document.body).backgroundColor") == back
    found = shown.evaluate(COLOURS)
    assert len(found["texts"]) > 60
    assert [text for text in found["texts"] if contrast(*text[1:]) < 4.5] == []
    assert len({colour for _, colour, _ in found["lines"]}) == 7
    least = 2 if back == "rgb(255, 255, 255)" else 3  # Okabe and Ito's orange on white
    assert [line for line in found["lines"] if contrast(*line[1:]) < least] == []
    shown.close()


def test_the_page_follows_a_change_of_the_scheme(opened):
    shown, said, _ = opened
    colour = "getComputedStyle(document.querySelector('.plot .ytick text')).fill"
    before = shown.evaluate(colour)
    shown.emulate_media(color_scheme="dark")
    shown.wait_for_function(f"{colour} !== '{before}'")
    shown.emulate_media(color_scheme="light")
    shown.wait_for_function(f"{colour} === '{before}'")
    assert said == []
