"""The forms of a second reader beside today's rows: the verdicts that their record counts."""

import re
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from second_reader import compare, read_form

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
FORMS = sorted((RESULTS / "second_reader").glob("*.yaml"))


def recorded(title):
    """The table of the record with this corner: paper -> verdict -> number of entries, without remarks in brackets."""
    text = re.sub(r" \(before [^|]*\)", "", (RESULTS / "2026-11-27-second-reader.md").read_text())
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    header = next(index for index, row in enumerate(rows) if row[0] == title)
    papers = rows[header + 2 : header + 2 + len(FORMS)]
    return {key: dict(zip(rows[header][1:], map(int, counts), strict=True)) for key, *counts in papers}


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_has_the_verdicts_of_its_record(path, capsys):
    numbers, settings = compare(read_form(path))
    capsys.readouterr()
    assert settings == Counter(recorded("entries of settings")[path.stem])  # of what is not there, 0
    expected = recorded("numbers")[path.stem]
    assert {name: numbers[name] for name in expected} == expected
