"""Files of papers: the configurations of rows and sweeps, and how they are named on the command line."""

from __future__ import annotations

from argparse import SUPPRESS, Action, ArgumentParser
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache, cached_property
from importlib import resources
from itertools import pairwise
from typing import Any, cast

import yaml

from fedsim.core.errors import ConfigError
from fedsim.papers.published import Table, TestSet, table_of
from fedsim.parsing.documents import SafeLoader, as_yaml

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Paper:
    """One file: the paper's data, protocol, rows, and numbers as printed."""

    key: str
    """three digits"""
    content: Mapping[str, Any]
    """docs/comparing.md describes the fields; ``rows`` are those of :func:`expanded`"""
    rotations: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """name of a row with ``left_out`` -> left-out data set -> the row that leaves it out"""

    @property
    def rows(self) -> Mapping[str, Config]:
        """Name -> data, protocol, after, notes, overrides; all fields except notes are optional."""
        return cast("Mapping[str, Config]", self.content["rows"])

    @property
    def sweeps(self) -> Mapping[str, Config]:
        """Name -> notes, rows, parameters in W&B's format, metric (default: oracle/rank1)."""
        return cast("Mapping[str, Config]", self.content["sweeps"])

    @property
    def test_sets(self) -> dict[str, TestSet]:
        """Fedsim's name -> the paper's description."""
        return {name: TestSet(**fields) for name, fields in self.content["test_sets"].items()}

    @cached_property
    def tables(self) -> list[Table]:
        """The tables as printed."""
        return [table_of(name, self.content, self.rotations) for name in self.content["tables"]]

    def runs_of(self, name: str) -> list[str]:
        """Return the rows that a row of the file stands for: itself, or one per left-out data set."""
        return list(self.rotations[name].values()) if name in self.rotations else [name]

    def configs(self, name: str | None = None) -> list[Config]:
        """Return the configurations of a row, or of the paper's data and protocol; later ones override earlier ones.

        They are not merged here, because the parser decides which options of a class remain valid for another class.
        """
        row = self.rows[name] if name else {}
        data, parts = self.content["data"], self.content.get("parts", {})
        blocks = [
            {"data": data[row.get("data", next(iter(data)))]},
            parts[row["protocol"]] if "protocol" in row else self.content["protocol"],
            *(parts[part] if part in parts else self.rows[part]["overrides"] for part in row.get("after", ())),
            row.get("overrides", {}),
        ]
        return [block for block in blocks if block]


def list_papers() -> list[str]:
    """Return the keys of all papers."""
    folder = resources.files("fedsim") / "papers"
    return sorted(path.name.removesuffix(".yaml") for path in folder.iterdir() if path.name.endswith(".yaml"))


@cache
def read_paper(key: str, option: str = "--paper") -> Paper:
    """Read the file of a paper that ``option`` names; raise ConfigError if there is none."""
    if key not in list_papers():
        raise ConfigError(f"{option}: there is no paper {key}; choose from {', '.join(list_papers())}")
    yaml_text = (resources.files("fedsim") / "papers" / f"{key}.yaml").read_text()
    return Paper(key, *expanded(yaml.load(yaml_text, SafeLoader)))


def expanded(content: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, dict[str, str]]]:
    """Return a paper's content with rows that are one run each, and its rotations, as :class:`Paper` holds both.

    A row ``NAME`` with ``left_out: [SET, ...]`` becomes the rows ``NAME_SET``, with the data of that name; with
    ``data: PREFIX`` those of the name ``PREFIX_SET``.
    """
    rows: dict[str, Config] = {}
    rotations: dict[str, dict[str, str]] = {}
    for name, row in content["rows"].items():
        if "left_out" not in row:
            rows[name] = row
            continue
        rotations[name] = {data_set: f"{name}_{data_set}" for data_set in row["left_out"]}
        shared = {field_name: value for field_name, value in row.items() if field_name != "left_out"}
        for data_set, full_name in rotations[name].items():
            data = f"{row['data']}_{data_set}" if "data" in row else data_set
            rows[full_name] = {**shared, "data": data, "notes": f"{row['notes'].strip()} Left out: {data_set}."}
    return {**content, "rows": rows}, rotations


def find_in_paper(paper_name: str, section: str = "rows") -> tuple[Paper, str | None]:
    """Return the paper and the full name of the row or sweep that PAPER/NAME means.

    Args:
        paper_name: PAPER, or PAPER/NAME; NAME may be abbreviated to an unambiguous prefix.
        section: ``rows`` or ``sweeps``.

    Raises:
        ConfigError: if there is no such paper or name, or NAME is ambiguous.
    """
    key, _, name = paper_name.partition("/")
    paper = read_paper(key)
    if not name:
        return paper, None
    names = paper.content[section]
    matches = [name] if name in names else [full_name for full_name in names if full_name.startswith(name)]
    if not matches:
        raise no_such_name("--paper", paper_name, names)
    if len(matches) > 1:
        raise ConfigError(f"--paper: {paper_name} may be {', '.join(matches)}; write one of them")
    return paper, matches[0]


def no_such_name(option: str, paper_name: str, names: Collection[str]) -> ConfigError:
    """Return the error for a PAPER/NAME that the paper does not have."""
    key, _, name = paper_name.partition("/")
    close = get_close_matches(name, names, n=3)
    remedy = f"did you mean {' or '.join(close)}?" if close else f"choose from {', '.join(names)}"
    return ConfigError(f"{option}: paper {key} has no {name}; {remedy}")


def rotation_in(words: Sequence[str]) -> tuple[Paper, str] | None:
    """Return the paper and the row if ``--paper`` names one that stands for a run per left-out data set; else None."""
    for word, value in pairwise([*words, ""]):
        option, is_joined, joined = word.partition("=")
        if option == "--paper":
            key, _, name = (joined if is_joined else value).partition("/")
            return (read_paper(key), name) if key in list_papers() and name in read_paper(key).rotations else None
    return None


class OfAPaper(Action):
    """The option ``--paper``, only for ``--help``: :func:`with_paper` replaces it before the command line is parsed."""

    def __init__(self, **options: Any) -> None:
        description = (
            "a row of a paper, such as 003/table5, as the base; other options override it; fedsim papers lists all rows"
        )
        super().__init__(**options | {"dest": SUPPRESS, "default": SUPPRESS, "help": description})


def with_paper(args: Sequence[str]) -> list[str]:
    """Replace ``--paper`` by its configurations, as JSON in front of all other options, which override them.

    Raises:
        ConfigError: if ``--paper`` is given twice, or names no row.
    """
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--paper", action="append", default=[])
    options, words = parser.parse_known_args(args)
    if not options.paper:
        return list(args)
    if len(options.paper) > 1:
        raise ConfigError(f"--paper: a run is one row of one paper; leave out one of {', '.join(options.paper)}")
    paper, row = find_in_paper(options.paper[0])
    return [*(f"--config={as_yaml(config)}" for config in paper.configs(row)), *words]
