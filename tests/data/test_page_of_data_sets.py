"""docs/datasets.md beside the classes of data sets, and the rows of papers."""

import fnmatch
import re
from pathlib import Path

import yaml

from fedsim.data import datasets
from fedsim.data.images import ReIDSource
from fedsim.papers.files import list_papers, read_paper
from fedsim.papers.resolved_rows import resolved_row

ROOT = Path(__file__).parents[2]
DATA_SETS = (ROOT / "docs" / "datasets.md").read_text()
FIELDS = ["Class", "Owner", "Ask", "Terms", "Size", "Rows", "Check"]


def sections_of_data_sets():
    """Name of a class -> its section: the fields of its list, and the folders."""
    sections = {}
    for text in DATA_SETS.split("\n## ")[1:]:
        items = re.findall(r"^- \*\*(\w+)\*\*: (.*(?:\n  .*)*)", text, re.MULTILINE)
        assert [name for name, _ in items] == FIELDS, text.partition("\n")[0]
        fields = {name: re.sub(r"\s+", " ", value) for name, value in items}
        [tree] = re.findall(r"^```\n(FOLDER/\n.*?)^```$", text, re.MULTILINE | re.DOTALL)
        sections[re.match(r"`(\w+)`", fields["Class"])[1]] = (fields, tree)
    return sections


def kinds_of_data_sets():
    """The classes that read a data set from its owner's files."""
    kinds = (getattr(datasets, name) for name in datasets.__all__)
    return {kind.__name__: kind for kind in kinds if issubclass(kind, ReIDSource) and kind is not datasets.DataSet}


def test_the_page_of_data_sets_has_a_section_for_each_with_its_folders():
    sections, kinds = sections_of_data_sets(), kinds_of_data_sets()
    assert sections.keys() == kinds.keys()
    for name, kind in kinds.items():
        fields, tree = sections[name]
        if kind is datasets.FedReIDBench:
            parts = kind.folder_names
        else:
            own = {"i_know_duke_is_withdrawn": True} if kind is datasets.DukeMTMC else {}
            parts = [Path(part).name for part in kind("FOLDER", **own).holds]
            assert tree.splitlines()[1].startswith(f"  {kind.folders[0]}/")
            assert f"`{kind.name}`" in fields["Check"] or own
        assert [part for part in parts if not re.search(rf"(?<![\w-]){re.escape(part)}(?![\w-])", tree)] == [], name


def test_the_page_of_data_sets_has_the_official_numbers():
    shown = re.findall(r"^\|[^|]*\| `(\w+)`(?:, `(\w+): (.+)`)? \| (.*) \|$", DATA_SETS, re.MULTILINE)
    kinds = kinds_of_data_sets()
    assert {name for name, *_ in shown} == kinds.keys()
    for name, option, value, numbers in shown:
        source = kinds[name]("FOLDER", **({option: yaml.safe_load(value)} if option else {}))
        official = getattr(source, "official", None)
        expected = " / ".join("-" if n is None else f"{n:,}" for n in official) if official else "-"
        assert (name, option, numbers.strip("`")) == (name, option, expected)


def test_the_page_of_data_sets_has_the_numbers_of_paper_003():
    size = sections_of_data_sets()["FedReIDBench"][0]["Size"]
    shown = {name: numbers.split(" / ") for name, numbers in re.findall(r"`(\w+)` ([\d,]+(?: / [\d,]*\d){3})", size)}
    counts = read_paper("003").content["counts"]
    assert shown == {
        name: [f"{n:,}" for n in (*of["train"], of["query"][1], of["gallery"])]
        for name, of in counts.items()
        if name != "cuhk02"
    }


def rows_in(text):
    """The rows of papers that a field names: all, all but some patterns, or those of some patterns."""
    rows = set()
    for key, kind, but in re.findall(r"(\d{3}): (all but |all|)((?:`[\w*]+`(?:, )?)*)", text):
        patterns = re.findall(r"`([^`]+)`", but)
        names = list(read_paper(key).rows)
        unknown = [pattern for pattern in patterns if not fnmatch.filter(names, pattern)]
        assert unknown == [], key
        matched = {name for pattern in patterns for name in fnmatch.filter(names, pattern)}
        rows |= {(key, name) for name in names if (name in matched) == (kind == "")}
    return rows


def test_the_page_of_data_sets_names_the_rows_that_need_each():
    needed = {name: set() for name in kinds_of_data_sets()}
    for key in list_papers():
        paper = read_paper(key)
        for row in paper.rows:
            source = resolved_row(paper, row)["data"]["source"]
            for entry in source if isinstance(source, list) else [source]:
                needed[entry["class_path"].rpartition(".")[2]].add((key, row))
    assert {name: rows_in(fields["Rows"]) for name, (fields, _) in sections_of_data_sets().items()} == needed
