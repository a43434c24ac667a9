"""What the documents say exists and runs."""

import re
import runpy
import warnings
from pathlib import Path

import pytest

import fedsim.methods
from fedsim.__main__ import COMMANDS
from fedsim.cli.papers.files import list_papers, read_paper

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts),
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


def test_commands_of_the_readme_exist():
    text = (ROOT / "README.md").read_text()
    commands = {match[1] for match in re.finditer(r"^fedsim (\w+)", text, re.MULTILINE)}
    assert commands
    assert commands <= set(COMMANDS)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make ([a-z-]+)", text)) <= targets


def test_all_published_tables_are_listed():
    text = (ROOT / "docs" / "comparing.md").read_text().partition("| paper | tables |")[2]
    listed = {}
    for paper, tables in re.findall(r"^\| (\d{3})[^|]*\|([^|;]*)", text, re.MULTILINE):
        spans = [part.split(" to ") for part in re.split(r", | and ", tables.strip())]
        listed[paper] = {number for span in spans for number in range(int(span[0]), int(span[-1]) + 1)}
    assert listed == {
        key: {int(name.removeprefix("table")) for name in read_paper(key).content["tables"] if name != "figures"}
        for key in list_papers()
    }


def test_ci_calls_the_readme_s_test_command():
    assert re.search(r"^make test$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert re.search(r"^make test$", (ROOT / "README.md").read_text(), re.MULTILINE)


def test_make_docs_writes_a_page_for_every_method(tmp_path):
    runpy.run_path(str(ROOT / "docs" / "generate.py"))["write_pages"](tmp_path)
    pages = {path.stem: path.read_text() for path in (tmp_path / "methods").glob("*.md")}
    titles = {name for text in pages.values() for name in re.findall(r"`(\w+)`", text.partition("\n")[0])}
    assert titles == set(fedsim.methods.__all__)
    without_table = {name for name, text in pages.items() if not re.search(r"^\|-+\|-+\|$", text, re.MULTILINE)}
    assert without_table == {"local"}, "Local changes nothing in the round: it has no table of hooks"
    assert "town0" in (tmp_path / "describe.md").read_text()


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
