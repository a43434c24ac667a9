"""Files of papers: what a row adds to the configuration of a run, and how people name rows and sweeps."""

from __future__ import annotations

import json
from argparse import SUPPRESS, Action, ArgumentParser
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, cached_property
from importlib import resources
from typing import Any, cast

import yaml

from fedsim.core.errors import ConfigError
from fedsim.papers.published import Table, TestSet, table_of
from fedsim.parsing.config_files import SafeLoader

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Paper:
    """One file: what it trains on, its protocol, its rows, and its numbers as printed."""

    key: str
    """three digits"""
    content: Mapping[str, Any]
    """docs/comparing.md has the fields"""

    @property
    def rows(self) -> Mapping[str, Config]:
        """Name -> data, protocol, after, notes, overrides; all but the notes may be left out."""
        return cast("Mapping[str, Config]", self.content["rows"])

    @property
    def sweeps(self) -> Mapping[str, Config]:
        """Name -> notes, rows, parameters in W&B's format."""
        return cast("Mapping[str, Config]", self.content["sweeps"])

    @property
    def test_sets(self) -> dict[str, TestSet]:
        """Fedsim's name -> what the paper says of it."""
        return {name: TestSet(**fields) for name, fields in self.content["test_sets"].items()}

    @cached_property
    def tables(self) -> list[Table]:
        """As printed."""
        return [table_of(name, self.content) for name in self.content["tables"]]

    def configs(self, name: str | None = None) -> list[Config]:
        """Return the configurations, a later one of which wins, of a row, or of the paper's own data and protocol.

        They are not merged here: what a new class keeps of the options of another one is for the parser to say.
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
    """Return the papers that there are."""
    folder = resources.files("fedsim") / "papers"
    return sorted(path.name.removesuffix(".yaml") for path in folder.iterdir() if path.name.endswith(".yaml"))


@cache
def read_paper(key: str, option: str = "--paper") -> Paper:
    """Read the file of a paper, which people named by ``option``; raise ConfigError if there is none."""
    if key not in list_papers():
        raise ConfigError(f"{option}: there is no paper {key}; choose from {', '.join(list_papers())}")
    text = (resources.files("fedsim") / "papers" / f"{key}.yaml").read_text()
    return Paper(key, yaml.load(text, SafeLoader))


def find_in_paper(which: str, kind: str = "rows") -> tuple[Paper, str | None]:
    """Return the paper and the name that PAPER/NAME means: of one of its ``rows`` or ``sweeps``, or a beginning of it.

    Raises:
        ConfigError: if there is no such paper or name, or there are several.
    """
    key, _, name = which.partition("/")
    paper = read_paper(key)
    if not name:
        return paper, None
    names = paper.content[kind]
    found = [name] if name in names else [known for known in names if known.startswith(name)]
    if not found:
        raise no_such_name("--paper", which, names)
    if len(found) > 1:
        raise ConfigError(f"--paper: {which} may be {', '.join(found)}; write one of them")
    return paper, found[0]


def no_such_name(option: str, which: str, names: Collection[str]) -> ConfigError:
    """Return what to say of PAPER/NAME if the paper has no such name."""
    key, _, name = which.partition("/")
    close = get_close_matches(name, names, n=3)
    meant = f"did you mean {' or '.join(close)}?" if close else f"choose from {', '.join(names)}"
    return ConfigError(f"{option}: paper {key} has no {name}; {meant}")


class OfAPaper(Action):
    """The option ``--paper``, for ``--help``: :func:`with_paper` has replaced it before a parser sees it."""

    def __init__(self, **given: Any) -> None:
        text = "a row of a paper, such as 003/table5: the base, over which other options win; fedsim papers lists them"
        super().__init__(**given | {"dest": SUPPRESS, "default": SUPPRESS, "help": text})


def with_paper(args: Sequence[str]) -> list[str]:
    """Put the configurations of ``--paper`` first, as text: whatever else a command line says comes after them.

    Raises:
        ConfigError: if it is given twice, or names no row.
    """
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--paper", action="append", default=[])
    found, rest = parser.parse_known_args(args)
    if not found.paper:
        return list(args)
    if len(found.paper) > 1:
        raise ConfigError(f"--paper: a run is one row of one paper; leave out one of {', '.join(found.paper)}")
    paper, row = find_in_paper(found.paper[0])
    return [*(f"--config={json.dumps(config)}" for config in paper.configs(row)), *rest]
