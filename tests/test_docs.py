"""What the documents say exists and runs."""

import importlib
import json
import os
import re
import runpy
import shlex
import subprocess
import tomllib
import warnings
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from pathlib import Path
from threading import Thread

import pytest
import yaml
from packaging.version import Version
from PIL import Image
from torch.torch_version import TorchVersion

import fedsim.methods
from failing import PATIENCE
from fedsim.__main__ import COMMANDS, main
from fedsim.data.standins import write_standin
from fedsim.federation.checks.requirements import TORCH_FOR_GRAPHS
from fedsim.methods.base import Method
from fedsim.papers.files import list_papers, read_paper
from fedsim.sweep import seeds
from quick_start import QuickPython

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CODE_OF_CONDUCT.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "benchmarks" / "peers" / "README.md",
    *sorted((ROOT / "benchmarks" / "results").glob("*.md")),
]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_and_config_files_exist(path):
    text = path.read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if not link.startswith("http")]
    missing = [link for link in links if not (path.parent / link).exists()]
    missing += [name for name in re.findall(r"\bconfigs/[a-z\d_/.-]+\.yaml", text) if not (ROOT / name).exists()]
    assert missing == []


def test_the_readme_s_script_is_the_file_and_runs_without_a_warning(capsys):
    path = ROOT / "docs" / "examples" / "two_rounds.py"
    shown = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert shown == [path.read_text().partition('"""\n\n')[2]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runpy.run_path(str(path))
    assert re.search(r"^test +global +seen +0\.\d+", capsys.readouterr().out, re.MULTILINE)


def anchors(path):
    """Names by which a page's headings can be linked."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_to_headings_that_exist(path):
    links = re.findall(r"\]\((?!http)([^)#]*\.md)?#([^)]+)\)", path.read_text())
    missing = [(page, name) for page, name in links if name not in anchors(path.parent / page if page else path)]
    assert missing == []


def faults_of(text):
    """The rows of the tables of a text: cells."""
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows]


def missing_tests_of(rows):
    """Faults without a test, and the named tests that do not exist."""
    missing = []
    for fault, *_, tests in rows:
        names = re.findall(r"`([\w/]+\.py)::(test_\w+)`", tests)
        missing += [] if names and len(names) == tests.count("`") / 2 else [fault]
        for file, name in names:
            path = ROOT / "tests" / file
            if not path.is_file() or not re.search(rf"^def {name}\(", path.read_text(), re.MULTILINE):
                missing.append(f"{file}::{name}")
    return missing


def test_every_fault_is_in_one_table_and_has_tests_that_exist():
    head, line, *rows = faults_of((ROOT / "docs" / "failures.md").read_text())
    assert head == ["fault", "what happens", "what is lost", "test"]
    assert {*line} == {"---"}
    assert len(rows) > 50
    assert [row for row in rows if len(row) != 4 or "" in row or row[0] == "fault"] == []
    assert missing_tests_of(rows) == []
    faults = [row[0] for row in rows]
    assert len({*faults}) == len(faults)


def test_tests_of_faults_that_do_not_exist_are_found():
    name = "test_every_fault_is_in_one_table_and_has_tests_that_exist"
    row = ["a", "b", "c", f"`test_docs.py::{name}`"]
    assert missing_tests_of([row]) == []
    for wrong in ("", "test_docs.py", "`test_docs.py`", f"`tests_docs.py::{name}`", f"`test_docs.py::{name}s`",
                  f"`test_docs.py::{name}`, `test_docs.py`"):  # fmt: skip
        assert missing_tests_of([[*row[:3], wrong]]) != []


def test_commands_of_the_readme_exist():
    text = (ROOT / "README.md").read_text()
    commands = {match[1] for match in re.finditer(r"^fedsim (\w+)", text, re.MULTILINE)}
    assert commands
    assert commands <= set(COMMANDS)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make ([a-z-]+)", text)) <= targets


def test_the_readme_says_where_its_numbers_are_the_same_bits():
    """Vector instructions differ, so only on one type of CPU, with one version of torch."""
    text = (ROOT / "README.md").read_text()
    below_the_table = text.partition("<!-- quickstart table")[2].partition("\n```\n\n")[2].partition("\n\n")[0]
    [promise] = re.findall(r"^- \*\*The same bits.*?(?=^- )", text, re.MULTILINE | re.DOTALL)
    for part in (below_the_table, promise):
        assert " type of CPU " in part
        assert " torch" in part
    assert re.search(r"AMD EPYC .*torch \d", below_the_table)


@pytest.mark.parametrize("name", ["Dockerfile", "fedsim.def"])
def test_images_install_extras_that_exist(name):
    """The files are not built here; this much of them can be read."""
    text = (ROOT / "docs" / "examples" / name).read_text()
    [default] = re.findall(r"^ *(?:ARG )?EXTRAS=(\S+)$", text, re.MULTILINE)
    assert re.search(r"pip install .*\[(\$EXTRAS|\{\{ EXTRAS \}\})\]", text)
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"faiss", "wandb", "models", "report", "onnx"} <= set(default.split(",")) <= set(known)
    assert "fedsim's tests read this file, and do not build it." in text


@pytest.mark.parametrize("name", ["Dockerfile", "fedsim.def"])
def test_images_have_a_torch_that_records_steps_as_the_recipe_wants(name):
    text = (ROOT / "docs" / "examples" / name).read_text()
    [version] = re.findall(r"^F(?:ROM|rom:) pytorch/pytorch:([\d.]+)-cuda\S+-runtime$", text, re.MULTILINE)
    recipe = (ROOT / "configs" / "recipes" / "h100.yaml").read_text()
    assert yaml.safe_load(recipe)["model"]["client"]["graph"]
    assert TorchVersion(version) >= TORCH_FOR_GRAPHS
    assert f"need torch {TORCH_FOR_GRAPHS}" in recipe
    assert f"torch {TORCH_FOR_GRAPHS} is the oldest for model.client.graph" in text


@pytest.mark.parametrize("name", ["Dockerfile", "fedsim.def"])
def test_images_leave_the_python_of_their_distribution_alone(name):
    """From torch 2.10 on it is externally managed (PEP 668): pip refuses to install into it."""
    lines = re.sub(r"^#.*\n", "", (ROOT / "docs" / "examples" / name).read_text(), flags=re.MULTILINE).splitlines()
    made = next(i for i, line in enumerate(lines) if "python3 -m venv --system-site-packages /opt/venv" in line)
    used = [i for i, line in enumerate(lines) if "pip install" in line]
    assert used
    assert min(used) >= made
    assert any(re.search(r"PATH=/opt/venv/bin:\$PATH", line) for line in lines)


def commands_in_images():
    """The words after ``fedsim`` in the comments of the files for images, and their command lines."""
    for name in ("Dockerfile", "fedsim.def"):
        for line in (ROOT / "docs" / "examples" / name).read_text().splitlines():
            if line.startswith("#") and (found := re.search(r"^#\s+(\w+ .*\bfedsim fit (.*))$", line)):
                yield pytest.param(*found.groups(), id=name)


@pytest.mark.parametrize(("line", "words"), list(commands_in_images()))
def test_commands_of_images_are_accepted_and_use_the_gpu(tmp_path, monkeypatch, line, words):
    monkeypatch.chdir(tmp_path)
    assert re.search(r"--gpus all|--nv", line)
    assert "--user" in line or line.startswith("srun")
    assert "--trainer.accelerator auto --trainer.devices auto" in words  # the quickstart is for CPUs
    assert main(["describe", *shlex.split(words)]) == 0


@pytest.mark.parametrize("name", ["pytorchjob", "ray_job"])
def test_pods_that_train_have_shared_memory(name):
    """Ranks of a machine exchange states in /dev/shm, of which a pod has 64 MB by default."""
    [job] = yaml.safe_load_all((ROOT / "docs" / "examples" / f"{name}.yaml").read_text())

    def pods(value):
        for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from pods(inner)
        if isinstance(value, dict) and "containers" in value:
            yield value

    training = [pod for pod in pods(job) if "nvidia.com/gpu" in str(pod)]
    assert training
    for pod in training:
        [mount] = [m for m in pod["containers"][0]["volumeMounts"] if m["mountPath"] == "/dev/shm"]
        assert {"name": mount["name"], "emptyDir": {"medium": "Memory"}} in pod["volumes"]


def test_the_glossary_has_all_three_ranks():
    words = re.findall(r"^\| ([^|]+) \|", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
    assert {"rank", "rank-1, rank-5, rank-10", "`fedsim rank`"} <= set(words)


def test_the_readme_is_short_and_its_numbers_are_counted():
    assert len(README.split()) <= 1000
    kinds = (getattr(fedsim.methods, name) for name in fedsim.methods.__all__)
    methods = sum(issubclass(kind, Method) for kind in kinds if isinstance(kind, type))
    units = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    written = dict(enumerate(units, 1)) | {30 + n: f"thirty-{unit}" for n, unit in enumerate(units, 1)}
    assert f"[{written[methods]} methods](docs/methods.md), {written[len(list_papers())]} papers [row by row]" in README


def test_the_page_on_installation_names_every_extra_for_users():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    table = (ROOT / "docs" / "installation.md").read_text().partition("| extra | for |")[2].partition("\n\n")[0]
    listed = {
        name for row in re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    }
    assert listed == {*extras} - {"dev", "test", "docs", "browser"}


def test_a_release_is_the_same_in_all_files():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    changelog = (ROOT / "CHANGELOG.md").read_text()
    version, day = re.findall(r"^## \[(\d\S*)\] - (\S+)$", changelog, re.MULTILINE)[0]
    assert (cited["version"], str(cited["date-released"])) == (version, day)
    if "## [Unreleased]" in changelog:  # runs of a development version cannot be taken for those of the release
        assert Version(fedsim.__version__).is_devrelease
        assert Version(fedsim.__version__) > Version(version)
    else:
        assert fedsim.__version__ == version


def test_the_unreleased_section_of_the_changelog_is_short_and_begins_with_highlights():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    section = changelog.partition("## [Unreleased]\n")[2].partition("\n## [")[0].strip()
    if section:  # there is none, or an empty one, right after a release
        assert len(section.splitlines()) <= 60
        assert re.findall(r"^### (.*)$", section, re.MULTILINE)[:2] == ["Highlights", "Numbers change"]
        assert section.startswith("### Highlights\n")
        assert 1 <= len(re.findall(r"^- ", section.partition("\n### ")[0], re.MULTILINE)) <= 8


def slow_dry_runs(text):
    """Commands that train on drawn people at a size or for rounds that take hours."""
    commands = re.sub(r"\\\n#?", "", text)  # one line each, also in the comments of a config
    dry = [line for line in commands.splitlines() if re.search(r"fedsim fit .*data\.dry_run[ =]true", line)]
    return [line for line in dry if not ("--data.size" in line and "--trainer.max_epochs" in line)]


def test_commands_that_try_a_config_without_its_data_take_minutes():
    small = "fedsim fit --data.dry_run true \\\n  --data.size '[64, 32]' --trainer.max_epochs 2"
    assert [len(slow_dry_runs(text)) for text in (small, small.replace("size", "val"), "fedsim papers")] == [0, 1, 0]
    shown = [*DOCUMENTS, *(ROOT / "configs").rglob("*.yaml")]
    assert {path: found for path in shown if (found := slow_dry_runs(path.read_text()))} == {}


def test_the_steps_of_a_round_have_the_numbers_of_the_code():
    code = re.findall(r"# (\d)\. (\w+ \w+ \w+)", (ROOT / "src" / "fedsim" / "federation" / "round.py").read_text())
    text = (ROOT / "docs" / "architecture.md").read_text().partition("## One round")[2].partition("\n## ")[0]
    assert re.findall(r"^(\d)\. (\w+ \w+ \w+)", text, re.MULTILINE) == code
    assert [number for number, _ in code] == [str(number) for number in range(1, 9)]


def test_the_glossary_is_short():
    words = (ROOT / "docs" / "architecture.md").read_text().partition("## Words")[2]
    assert len(re.findall(r"^\| ", words, re.MULTILINE)) - 1 <= 30


def test_all_published_tables_are_listed():
    text = (ROOT / "docs" / "comparing.md").read_text().partition("| paper | tables |")[2]
    listed = {}
    for paper, tables in re.findall(r"^\| (\d{3})[^|]*\|([^|;]*)", text, re.MULTILINE):
        spans = [part.split(" to ") for part in re.split(r", | and ", tables.strip())]
        listed[paper] = {number for span in spans for number in range(int(span[0]), int(span[-1]) + 1)}
    assert listed == {
        key: {int(name.removeprefix("table")) for name in read_paper(key).content["tables"] if name.startswith("table")}
        for key in list_papers()
    }


def test_ci_calls_the_readme_s_test_command():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    assert ".ci/run" in [step.get("run") for step in jobs["test"]["steps"]]
    assert re.search(r"^make test$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert re.search(r"^make test$", (ROOT / "README.md").read_text(), re.MULTILINE)


# -- the site ----------------------------------------------------------------------------------------------------------


def test_links_of_the_repository_become_links_between_pages():
    rewrite = runpy.run_path(str(ROOT / "docs" / "site" / "links.py"))["rewrite"]
    assert rewrite("[a](../README.md#methods)", "docs/data.md") == "[a](index.md#methods)"
    assert rewrite("[`FedBN`](src/fedsim/methods/fedbn.py)", "README.md") == "[`FedBN`](methods/fedbn.md)"
    assert rewrite("[a](../../docs/gpus.md)", "benchmarks/results/x.md") == "[a](../gpus.md)"
    assert rewrite("[a](../configs/methods)", "docs/data.md") == "[a](files/configs/methods/index.md)"
    for same in ("[a](https://b.org/README.md)", "`[a](README.md)`", "```\n[a](README.md)\n```", "[a](nothing.md)"):
        assert rewrite(same, "README.md") == same


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, as ``make docs`` builds it: a warning is an error."""
    for library in ("mkdocs", "material", "mkdocstrings", "nbconvert", "latex2mathml"):
        pytest.importorskip(library, reason="the extra 'docs' is not installed")
    folder, server = tmp_path_factory.mktemp("site"), QuickPython(tmp_path_factory.mktemp("quick"))
    command = [server.python, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    server.close()
    said = [line for line in (done.stdout + done.stderr).splitlines() if not line.startswith("INFO")]
    assert (done.returncode, said) == (0, [])
    return folder


class Reader(HTMLParser):
    """The text of a page without its code, and the addresses that a browser fetches with the page."""

    def __init__(self, path):
        super().__init__()
        self.texts, self.fetched, self.titles, self.hidden, self.inside = [], [], [], 0, []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        self.inside.append(tag)
        found = dict(attributes)
        self.hidden += tag in {"pre", "code", "script", "style"}
        if tag in {"script", "img", "iframe", "source"} or (tag == "link" and "canonical" not in found.get("rel", "")):
            self.fetched += [found[name] for name in ("src", "href") if found.get(name)]

    def handle_endtag(self, tag):
        self.hidden -= tag in {"pre", "code", "script", "style"}
        if tag in self.inside:
            while self.inside.pop() != tag:
                pass

    def handle_data(self, data):
        if "h1" in self.inside:
            self.titles.append(data.strip())
        if not self.hidden:
            self.texts.append(data)


ROLES, LISTS = r":(?:attr|class|func|meth|mod):", r"(?:\A|\n *)(?:- |>>> )"
RAW = re.compile(rf"{ROLES}|{LISTS}|\]\(|\]\[|(?<!\w)\*\*\w|```|^ *\|.*\| *$|\$\\", re.MULTILINE)


def raw_markup(path):
    """Markup that stands on a page as it was written."""
    return [text for text in Reader(path).texts if RAW.search(text)]


def test_markup_that_stands_on_a_page_is_found(tmp_path):
    page = tmp_path / "page.html"
    page.write_text(
        "<h1>x</h1><p>[a](b.md)</p><p>:class:<code>A</code></p><p>- one\n- two</p><pre>[a](b)</pre><p>a - b</p>"
    )
    assert raw_markup(page) == ["[a](b.md)", ":class:", "- one\n- two"]


@pytest.mark.others
def test_the_site_has_every_document_and_no_markup_is_left(site):
    for path in (ROOT / "docs").rglob("*.md"):
        name = path.relative_to(ROOT / "docs").with_suffix(".html")
        assert (site / name.parent / name.name.replace("README", "index")).exists(), path
    records = {path.stem for path in (ROOT / "benchmarks" / "results").glob("*.md")}
    assert {path.stem for path in (site / "records").glob("20*.html")} == records
    assert "Quickstart" in "".join(Reader(site / "index.html").texts)
    assert {path: found for path in site.rglob("*.html") if (found := raw_markup(path))} == {}


@pytest.mark.others
def test_the_site_fetches_nothing_from_a_network(site):
    fetched = {address for path in site.rglob("*.html") for address in Reader(path).fetched}
    fetched |= {address for path in site.rglob("*.css") for address in re.findall(r"url\(([^)]+)\)", path.read_text())}
    assert any("search" in path.name for path in (site / "search").iterdir())
    assert fetched
    assert {address for address in fetched if address.startswith(("http:", "https:", "//"))} == set()


@pytest.mark.others
def test_the_site_has_a_page_for_every_method_and_public_name(site):
    pages = {path.stem: Reader(path) for path in (site / "methods").glob("*.html") if path.stem != "index"}
    titles = {name for page in pages.values() for name in re.findall(r"\w+", " ".join(page.titles))}
    assert titles == set(fedsim.methods.__all__)
    without_table = {name for name in pages if "<th>hook</th>" not in (site / "methods" / f"{name}.html").read_text()}
    assert without_table == {"local"}, "Local changes nothing in the round: it has no table of hooks"
    index = (site / "api" / "index.html").read_text()
    assert [name for name in fedsim.__all__ if name != "__version__" and f'.{name}"' not in index] == []
    assert "town0" in (site / "describe.html").read_text()


@pytest.fixture
def site_in_browser(site, browser):
    """The first page in a window of a telephone's width, and its complaints and requests of other servers."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SilentHandler, directory=site))
    thread = Thread(target=server.serve_forever)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}/"
    shown, complaints = browser.new_page(viewport={"width": 390, "height": 844}), []
    shown.on("console", lambda message: complaints.append(message.text))
    shown.on("pageerror", lambda error: complaints.append(str(error)))
    shown.on(
        "request", lambda sent: complaints.append(sent.url) if not sent.url.startswith((address, "blob:")) else None
    )
    shown.goto(address + "index.html")
    yield shown, complaints
    shown.close()
    server.shutdown()
    server.server_close()
    thread.join()


class SilentHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.mark.others
def test_the_site_fits_a_telephone(site_in_browser):
    shown, complaints = site_in_browser
    assert shown.evaluate("document.documentElement.scrollWidth") <= 390
    assert shown.title() == "fedsim"
    assert complaints == []


@pytest.mark.others
@pytest.mark.parametrize("words", ["resume", "mAP", "own method", "onnx", "FedPav", "install", "seed", "wandb"])
def test_the_search_lists_pages_for_users_first(site_in_browser, words):
    shown, _ = site_in_browser
    shown.click("label.md-header__button[for=__search]")
    shown.fill("input.md-search__input", words)
    shown.wait_for_selector(".md-search-result__item a")
    pages = [link.get_attribute("href") for link in shown.query_selector_all("a.md-search-result__link")]
    internal = [re.search(r"/(api|decisions|files|records)/|/(architecture|changelog|testing)", page) for page in pages]
    assert len(pages) >= 3
    assert internal[:3] == [None] * 3, pages[:5]


# -- commands of recipes and claims ------------------------------------------------------------------------------------

SHELL = """
call() { printf '%s\\0' "$@" >> "$CALLS"; printf '\\n' >> "$CALLS"; }
fedsim() { call "$@"; }
sbatch() { while [[ "$1" != *.sbatch ]]; do shift; done; shift; call fit "$@"; }
pip() { :; }; wandb() { :; }; python3() { :; }; tail() { :; }
"""
CLAIMS = ROOT / "docs" / "claims"
PAGES = [ROOT / "docs" / "recipes.md", *sorted(CLAIMS.glob("0*.md")), CLAIMS / "fedbuff.md"]


def calls_of(path, folder):
    """The commands of a page, as a shell calls them: loops are run, variables replaced, but not fedsim itself."""
    blocks = re.findall(r"^```(?:bash)?\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)
    script = SHELL + "".join(block for block in blocks if re.search(r"^ *(fedsim|sbatch|common=)", block, re.MULTILINE))
    (folder / "slurm").mkdir(exist_ok=True)
    (folder / "slurm" / "site.sh").write_text("")
    calls = folder / path.stem
    subprocess.run(
        ["bash", "-eu", "-c", script],
        cwd=folder,
        env=os.environ | {"CALLS": str(calls)},
        check=True,
        stdin=subprocess.DEVNULL,
    )
    return [line.split("\0")[:-1] for line in calls.read_text().splitlines()]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_commands_of_recipes_and_claims_exist(path, tmp_path, monkeypatch, capsys):
    """Each command is one of fedsim's; each fit has options that exist, in a combination that a config can have."""
    calls = calls_of(path, tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["init", str(write_standin("market1501", tmp_path))]) == 0  # makes fedsim.yaml
    assert {command for command, *_ in calls} <= set(COMMANDS)
    fits = {tuple(words) for command, *words in calls if command == "fit" and words[-1][-1:] not in "12"}  # one seed
    assert fits
    planned = []
    monkeypatch.setattr(seeds, "execute_runs", lambda jobs, *_, **__: planned.extend(jobs) or [])
    monkeypatch.setattr(seeds, "refuse_elsewhere", lambda *_: None)
    monkeypatch.setattr(seeds, "report", lambda _: "")
    for options in fits:
        if "--seeds" in options:  # one of its runs
            assert main(["fit", *options]) == 0
            options = planned[-1].command[4:]
        if "--ckpt_path" not in options:
            with pytest.raises(SystemExit) as ended:  # the parser's way to end after it has printed
                main(["fit", *options, "--print_config"])
            assert ended.value.code == 0


SMALL = [
    "--data.size=[32, 16]", "--data.limit_client_batches=1", "--model.backbone.width=4",
    "--model.client.local_epochs=1", "--trainer.max_epochs=2", "--trainer.check_val_every_n_epoch=2",
    "--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.enable_progress_bar=false",
]  # fmt: skip
OF_A_PAPER = ["--data.dry_run=true", "--model.backbone=SmallCNN", "--data.augmentation.crop=null",
              "--model.clients=null", "--model.client.batch_size=8"]  # fmt: skip


def in_small(words):
    """A command of a page at a size that a test can wait for."""
    if words[0] != "fit":
        return words
    return [*words, *(OF_A_PAPER if "--paper" in words else []), *SMALL]


def write_authors_folder(folder):
    """The authors' layout of paper 003 with three data sets; their pictures are of one colour."""
    for name in ("MSMT17", "Market", "viper"):
        for part, people in (("train_all", range(4)), ("query", range(4, 7)), ("gallery", range(4, 7))):
            for person, camera in product(people, range(2)):
                file = (
                    f"cam_{camera}_{person:05d}_00001.png" if name == "viper" else f"{person:04d}_c{camera + 1}_1.jpg"
                )
                path = folder / name / "pytorch" / part / str(person) / file
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (16, 32), (20 * person, 90 * camera, 0)).save(path)


@pytest.mark.others
@pytest.mark.slow
@pytest.mark.parametrize("path", PAGES[1:], ids=lambda path: path.stem)
def test_commands_of_claims_run_to_their_end(path, tmp_path, monkeypatch, capsys):
    """With one seed, small networks, two rounds, and stand-ins of the papers' data; reports as they are."""
    calls = calls_of(path, tmp_path)
    monkeypatch.chdir(tmp_path)
    write_authors_folder(tmp_path / "FOLDER")
    done = []
    for words in calls:
        if words[0] == "fit" and words[-1][-1:] in "12":  # other seeds
            continue
        names = [sorted(map(str, tmp_path.glob(word))) if "*" in word else [word] for word in words]
        code = main(in_small([word for group in names for word in group]))
        output = capsys.readouterr()
        assert code == 0, f"fedsim {' '.join(words)}: {output.err}"
        done.append(words[0])
        if "--compare" in words:
            assert "; settings that differ: " in output.out
    of_a_paper_here = {"papers"} if path.stem.startswith("0") else set()
    assert {"fit", "report"} | of_a_paper_here <= set(done)


OF_A_FOLDER = ["--model.backbone=SmallCNN", "--model.client.batch_size=8", "--model.client.micro_batch=null",
               "--trainer.precision=32-true", "--overwrite=true"]  # fmt: skip


@pytest.mark.others
@pytest.mark.slow
def test_commands_of_recipes_run_to_their_end(tmp_path, monkeypatch, capsys):
    """On a folder with one data set; of many seeds the first, without the loops that a cluster's jobs are."""
    calls = calls_of(PAGES[0], tmp_path)
    monkeypatch.chdir(tmp_path)
    # under its own name it would not be complete
    write_standin("market1501", tmp_path / "FOLDER").rename(tmp_path / "FOLDER" / "site")
    done = []
    for words in calls:
        if words[0] == "fit" and "--seeds" in words:
            words = [*words[: words.index("--seeds")], "--run_dir", "runs/table/first"]
        if words[0] in ("fit", "describe"):
            small = [*OF_A_FOLDER, *SMALL] if "fedsim.yaml" in words else SMALL if "--paper" in words else []
            words = [*words, *small]
        names = [sorted(map(str, tmp_path.glob(word))) if "*" in word else [word] for word in words]
        code = main([word for group in names for word in group])
        output = capsys.readouterr()
        assert code == 0, f"fedsim {' '.join(words)}: {output.err}"
        done.append(words[0])
    assert {"data", "init", "doctor", "fit", "describe", "report"} <= set(done)


# -- tutorials ---------------------------------------------------------------------------------------------------------

TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))


def shown(notebook):
    """Which cells show something, other than messages to stderr."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [any(output.get("name") != "stderr" for output in cell.outputs) for cell in cells]


@pytest.mark.others
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_runs(path, tmp_path, monkeypatch, quick_python):
    """All cells, in a kernel of their own; a cell that fails, also in an assertion, fails here."""
    client = pytest.importorskip("nbclient", reason="the extra 'test' is not installed")
    nbformat = pytest.importorskip("nbformat", reason="the extra 'test' is not installed")
    pytest.importorskip("ipykernel", reason="the extra 'test' is not installed")
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "TMPDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    notebook = nbformat.read(path, 4)
    saved = shown(notebook)
    client.NotebookClient(notebook, timeout=PATIENCE, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert shown(notebook) == saved, f"jupyter nbconvert --to notebook --execute --inplace {path.relative_to(ROOT)}"


# -- equations ---------------------------------------------------------------------------------------------------------


def untested_equations(source, tests):
    """Numbers of the equations that a method's source cites and no test names."""
    cited = set(re.findall(r"# Eq\. \((\d+)\)", source))
    return cited - set(re.findall(r"def test_eq(\d+)_", tests))


def test_the_search_for_untested_equations_finds_them():
    source = "x = 1  # Eq. (1)\ny = 2  # Eq. (13)\n"
    assert untested_equations(source, "def test_eq13_mean():") == {"1"}
    assert untested_equations(source, "def test_eq1_a(): ...\ndef test_eq13_b(): ...") == set()


def test_every_equation_cited_in_a_method_has_a_test():
    for path in (ROOT / "src" / "fedsim" / "methods").glob("*.py"):
        tests = ROOT / "tests" / "methods" / f"test_{path.stem}.py"
        assert untested_equations(path.read_text(), tests.read_text() if tests.exists() else "") == set(), path


# -- the reference -----------------------------------------------------------------------------------------------------


OF_VALUES = re.compile(r"optimizer\.init_args\.|\.\d+\b|\.caps\.|\.options\.|clients\.NAME\.backbone\.")
"""Keys below a setting whose value is torch's class, a list, a dictionary, or a class that stands elsewhere"""


@pytest.fixture
def reference(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "site"))
    return importlib.import_module("reference")


def test_every_setting_of_a_resolved_row_is_on_the_page_of_settings(reference):
    """Of classes, the arguments stand below their names."""
    place, text = reference.settings_page()
    assert place == "reference/settings.md"
    keys = set(re.findall(r"^\| `([\w.]+)` \|", text, re.MULTILINE))
    resolved = set()
    for path in (ROOT / "src" / "fedsim" / "papers" / "resolved").glob("*.json"):
        resolved |= json.loads(path.read_text())["base"].keys()
    settings = {key for key in resolved if key.startswith(("model.", "data.")) and "class_path" not in key}
    settings = {re.sub(r"^model\.clients\.[\w-]+\.", "model.clients.NAME.", key) for key in settings}
    assert {key for key in settings - keys if not OF_VALUES.search(key)} == set()
    assert len(keys) > 250
    for line in re.findall(r"^\| `(?:model|data).*$", text, re.MULTILINE):
        assert len(re.split(r"(?<!\\)\|", line)) == 6, line


def test_settings_of_the_page_have_a_sentence(reference):
    _, text = reference.settings_page()
    rows = [re.split(r"(?<!\\)\|", line) for line in text.splitlines() if line.startswith("| `")]
    silent = [row[1].strip(" `") for row in rows if not row[4].strip()]
    # those of a client have the common one's meaning, and those of server optimizers that of torch's
    assert [key for key in silent if ".NAME." not in key and not key.startswith("model.server_optimizer.")] == []


@pytest.mark.others
@pytest.mark.slow
def test_each_command_has_a_page(reference):
    pages = dict(reference.command_pages())
    assert {f"reference/{command}.md" for command in COMMANDS} | {"reference/index.md"} == set(pages)
    assert "--ckpt_path" in pages["reference/export.md"]
    assert "ONNX" in pages["reference/export.md"].upper()
    assert "fedsim data splits --help" in pages["reference/data.md"]
    assert all("usage" in text.lower() for place, text in pages.items() if place != "reference/index.md")


@pytest.mark.parametrize("words", ["onnx", "load checkpoint", "resume", "install"])
def test_a_page_answers_a_search(words):
    """The site's search looks for words in pages: each must be in one line of the page of commands."""
    lines = (ROOT / "docs" / "commands.md").read_text().lower().splitlines()
    assert any(all(word in line for word in words.split()) for line in lines)
