"""What the documents say exists and runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedsim.__main__ import COMMANDS
from fedsim.cli.papers.files import list_papers, read_paper

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_and_config_files_exist(path):
    text = path.read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if not link.startswith("http")]
    missing = [link for link in links if not (path.parent / link).exists()]
    missing += [name for name in re.findall(r"\bconfigs/[a-z\d_/.-]+\.yaml", text) if not (ROOT / name).exists()]
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


def test_generated_pages_are_up_to_date():
    command = [sys.executable, "-W", "ignore", "docs/generate.py", "--check"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


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
