"""Figures of the pages of results stand in the records that they link to, and verdicts follow from the figures."""

import random
import re
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from verdicts import read_figures, verdicts

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "benchmarks" / "results"
CLAIMS = ROOT / "docs" / "claims"
README, RESULTS, OVERVIEW = ROOT / "README.md", ROOT / "docs" / "results.md", CLAIMS / "README.md"
CLAIM_PAGES = sorted({*CLAIMS.glob("*.md")} - {OVERVIEW})
OF_CLAIMS = [page for page in CLAIM_PAGES if re.search(r"results/[\d-]+claims", page.read_text())]
"""pages whose commands have a record; the others are checked as soon as they link to one"""
GUIDES = [README, *(ROOT / "docs" / f"{name}.md" for name in ("methods", "robust", "style", "unseen"))]
"""pages of which only those paragraphs, points and rows are checked that link to a source"""
PAGES = [*GUIDES, RESULTS, OVERVIEW, *OF_CLAIMS]

NUMBER, COUNT = r"\d+\.\d+", r"\d{1,3}(?:,\d{3})+"
FIGURE = re.compile(
    rf"(?<![\d.,])(?:[+-]?{NUMBER}(?:(?:, [+-]?{NUMBER}){{2,}}| ± {NUMBER})?|{COUNT}|\d+(?:(?:, \d+){{2,}}| / \d+))"
    r"(?!\d|[.,]\d)"
)
"""A number with decimals or thousands, a mean with its deviation, a count over another, or three and more values or
counts in a list: they must stand together in a record."""
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def sources_of(text, path):
    """The records that a text links to, or their sections; results may cite a page of claims, guides the results."""
    links = [link.partition("#") for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    files = {((path.parent / name).resolve(), anchor) for name, _, anchor in links}
    cited = {RESULTS} if path in GUIDES else set() if path in CLAIM_PAGES else {*CLAIM_PAGES}
    return {(file, anchor) for file, anchor in files if file.parent == RECORDS or file in cited}


def units_of(path):
    """Each paragraph, point and row of a page, with its sources: the links of its section; of a page of claims, all.

    A row has its own links; without any, or with "the same", those of the row above. What is in a guide has its own.
    """
    text = BLOCK.sub("", path.read_text())
    of_page = sources_of(text, path) if path in OF_CLAIMS else set()
    for section in re.split(r"^#+ ", text, flags=re.MULTILINE):
        of_section, above = of_page or sources_of(section, path), set()
        for unit in re.split(r"\n\n|\n(?=\||- )|(?<=\|)\n", section):
            own, is_row = sources_of(unit, path), unit.startswith("|")
            above = set() if not is_row else own | above if not own or "the same" in unit.split("|")[-2] else own
            yield unit, of_page or above or (own if path in GUIDES else of_section)


def figures_of(unit):
    return FIGURE.findall(re.sub(r"`[^`]*`|\]\([^)]*\)", "", unit))


def told(path):
    """Each figure of a page, with its sources."""
    for unit, sources in units_of(path):
        if path not in GUIDES or sources:
            yield from ((figure, sources) for figure in figures_of(unit))


@cache
def read(source):
    """The text of a record or of its section, in one line; lists in prose are as in tables."""
    path, anchor = source
    text = path.read_text()
    if section := re.search(rf"^#+ {anchor}$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL):
        text = section[1]
    return re.sub(r"(\d) and (?=[+-]?\d)", r"\1, ", re.sub(r"\s+", " ", text.replace("+-", " ± ")))


def stands(figure, sources):
    """Whether a record has a figure; there a number may have a sign more or less than on the page, not the other."""
    before = {"+": r"(?<![-\d.])\+?", "-": r"(?<![+\d.])-?", "": r"(?<![\d.])[+-]?"}
    numbers = re.sub(rf"([+-]?)({NUMBER})", lambda number: before[number[1]] + re.escape(number[2]), figure)
    return any(re.search(rf"(?<![\d.,]){numbers}(?!\d|[.,]\d)", read(source)) for source in sources)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_each_figure_stands_in_a_record(path):
    assert [figure for figure, sources in told(path) if not stands(figure, sources)] == []


@pytest.mark.parametrize("path", [README, *OF_CLAIMS], ids=lambda path: str(path.relative_to(ROOT)))
def test_printed_tables_stand_in_a_record_line_by_line(path):
    assert lines_without_record(path.read_text(), path) == set()


def lines_without_record(text, path):
    printed = [block for language, block in BLOCK.findall(text) if not language and re.search(NUMBER, block)]
    records = [file.read_text().splitlines() for file, _ in sources_of(text, path) if file.parent == RECORDS]
    return {line for block in printed for line in block.splitlines()}.difference(*records)


def test_a_printed_line_with_a_wrong_digit_has_no_record():
    page = CLAIMS / "000-ska.md"
    assert lines_without_record(page.read_text().replace("town0       52.9", "town0       52.8"), page)


def with_a_wrong_digit(figure, rng):
    place = rng.choice([index for index, character in enumerate(figure) if character.isdigit()])
    digit = rng.choice([digit for digit in "0123456789" if digit != figure[place]])
    return figure[:place] + digit + figure[place + 1 :]


def noticed(seed, draws=30):
    rng = random.Random(seed)
    drawn = rng.sample([figure for path in PAGES for figure in told(path)], draws)
    return sum(not stands(with_a_wrong_digit(figure, rng), sources) for figure, sources in drawn)


def test_wrong_digits_are_noticed():
    """In 30 drawn figures a drawn digit is wrong; with twenty seeds, 28.8 +- 1.1 of them stood in no record."""
    assert noticed(seed=0) >= 24


def test_figures_are_numbers_with_their_deviations_and_lists():
    text = "Here 1.5 ± 0.2, `beta 0.1`, by seed -1.0, +2.0, -3.5; 4 of 12 [in 2.15](../a-1.2.md), 0.5 of 16,680"
    assert figures_of(text) == ["1.5 ± 0.2", "-1.0, +2.0, -3.5", "2.15", "0.5", "16,680"]
    assert figures_of("13, 12, 12 rounds, 576 / 288 images; 3, 4 or 1,234,567 of 10 and 2026-11-28") == [
        "13, 12, 12", "576 / 288", "1,234,567",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("figure", "stands_there"),
    [
        *(("1.5", True), ("1.5 ± 0.2", True), ("1.5 ± 0.3", False), ("1.50", False), ("0.2", True), ("11.5", False)),
        *(("2.0", True), ("+2.0", True), ("-2.0", False), ("+1.5", True), ("1.1", False)),
        *(("+2.0, -1.0, +3.5", True), ("-2.0, -1.0, +3.5", False), ("+2.0, -1.0, +3.6", False)),
        *(("5.0, 4.0, 1.0", True), ("-5.0, -4.0, -1.0", True)),
        *(
            ("13, 12, 12", True),
            ("3, 12, 12", False),
            ("4,181", True),
            ("181", False),
            ("7 / 5", True),
            ("7 / 57", False),
        ),
    ],
)
def test_a_figure_stands_in_a_record_with_its_sign_and_all_its_parts(tmp_path, figure, stands_there):
    record = tmp_path / "record.md"
    record.write_text(
        "# Record\n\nIt has 1.5+-0.2,\nby seed +2.0, -1.0,\n+3.5; behind by 5.0, 4.0 and 1.0; 111.5; 13, 12 and 12.\n"
        "4,181 images, 7 / 5.\n\n## Other\n9.9\n"
    )
    assert stands(figure, {(record, "")}) == stands_there
    assert not stands(figure, {(record, "Other")})


class Row(NamedTuple):
    study: frozenset
    """the sources: claims with the same ones are corrected for their number together"""
    claim: str
    figure: str
    verdict: str


def rows_with_verdicts(path):
    """Each verdict on scores, with the figure in the cell before it."""
    header, claim = [], ""
    for unit, sources in units_of(path):
        if unit.startswith("What does the engine cost?"):  # times and bytes have no spread over seeds
            return
        cells = [cell.strip() for cell in unit.strip("|").split("|")] if unit.startswith("|") else []
        if "verdict" in cells or not cells:
            header = cells
        elif header and not unit.startswith("|-"):
            claim = cells[0] or claim
            for column in (index for index, name in enumerate(header) if name == "verdict"):
                yield Row(frozenset(sources), claim, cells[column - 1], cells[column])


def claims_of(row):
    margin = re.search(r"within (\d+) points", row.claim)
    return [*read_figures(row.figure, float(margin[1]) if margin else 0.0)]


def wrong_verdicts(rows):
    """The figures whose verdict is another by the rule of ``benchmarks/verdicts.py``, with the right ones."""
    of_study = defaultdict(dict)
    for row in rows:  # a claim that stands on two pages is one
        of_study[row.study].update(dict.fromkeys(claims_of(row)))
    for claims in of_study.values():
        claims.update(zip(claims, verdicts([*claims]), strict=True))
    for row in rows:
        words = [of_study[row.study][claim] for claim in claims_of(row)]
        is_counted = row.verdict == "counted" and re.search(r"\d of \d", row.figure)
        if (
            row.verdict != "; ".join(words)
            if words
            else not (is_counted or row.verdict in {"one seed", "not shown", ""})
        ):
            yield row.figure, row.verdict, words


@cache
def all_rows():
    return [row for path in (RESULTS, OVERVIEW) for row in rows_with_verdicts(path)]


def test_verdicts_follow_from_the_figures():
    assert [*wrong_verdicts(all_rows())] == []


def test_wrong_verdicts_are_found():
    for row in all_rows():
        others = [other for other in all_rows() if other.study == row.study and other != row]
        wrong = {"yes", "no, behind"} | ({"not shown", "one seed", "counted"} if claims_of(row) else set())
        word = random.Random(row.figure).choice(sorted(wrong - {*row.verdict.split("; ")}))
        changed = row._replace(verdict="; ".join([word, *row.verdict.split("; ")[1:]]))
        assert [*wrong_verdicts([*others, changed])], changed


def test_values_by_seed_have_the_difference_of_the_means():
    for part in [part for row in all_rows() for part in row.figure.split(";") if "±" in part and "by seed" in part]:
        means, by_seed = (next(read_figures(text)).mean for text in (part.partition(", by seed")[0], part))
        assert by_seed == pytest.approx(means, abs=0.15), part
