"""Settings of papers' rows, resolved in advance: they are those of the parser, and of the row as it is now."""

import json
from dataclasses import replace

import pytest

import others
from fedsim.core.errors import DataError
from fedsim.papers.files import list_papers, read_paper
from fedsim.papers.resolved_rows import digest_of, find_run, resolved_row
from write_rows import FOLDER, flat, packed, parsed_row

ROWS = [f"{key}/{name}" for key in list_papers() for name in read_paper(key).rows]


@pytest.mark.parametrize("row", others.first_of_each_table(ROWS))
def test_every_row_is_resolved_as_by_the_parser(row):
    key, _, name = row.partition("/")
    assert resolved_row(read_paper(key), name) == parsed_row(row), "run make rows"


@pytest.mark.parametrize("key", list_papers())
def test_the_files_have_all_rows_as_they_are_now(key):
    rows = json.loads((FOLDER / f"{key}.json").read_text())["rows"]
    paper = read_paper(key)
    assert {name: row["of"] for name, row in rows.items()} == {n: digest_of(paper, n) for n in paper.rows}, (
        "run make rows"
    )


def test_a_row_that_has_changed_since_is_refused():
    paper = read_paper("003")
    for changed in ({"model": {"client": {"batch_size": 65}}}, {}):
        rows = {**paper.rows, "table5_batch_64": {**paper.rows["table5_batch_64"], "overrides": changed}}
        other = replace(paper, content={**paper.content, "rows": rows})
        with pytest.raises(DataError, match=r"003.yaml: table5_batch_64 has changed since .*; run make rows"):
            resolved_row(other, "table5_batch_64")
        assert resolved_row(other, "table4_batch_32")
    rows = {**paper.rows, "new": paper.rows["table4_batch_32"]}
    with pytest.raises(DataError, match="new has changed"):
        resolved_row(replace(paper, content={**paper.content, "rows": rows}), "new")


def test_settings_are_kept_as_changes_of_the_first_row():
    rows = {"a": flat({"x": {"y": 1, "z": [1]}, "c": {}}), "b": flat({"x": {"y": None}, "c": {"d": 2}})}
    base, changes = packed(rows)
    assert base == {"x.y": 1, "x.z": [1], "c": {}}
    assert changes == {
        "a": {"changes": {}, "gone": []},
        "b": {"changes": {"x.y": None, "c.d": 2}, "gone": ["x.z", "c"]},
    }


def test_a_run_is_a_row_of_its_paper_or_of_another():
    paper = read_paper("000")
    assert find_run(paper, "table4_ska") == (paper, "table4_ska")
    assert find_run(paper, "001/table2_fedreid") == (read_paper("001"), "table2_fedreid")
