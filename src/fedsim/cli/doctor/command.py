"""``fedsim doctor``: what this machine has, what a fit would use of it, and what stands in the way."""

from __future__ import annotations

import json as json_format
import socket
from dataclasses import asdict
from typing import Any, Literal

from jsonargparse import ArgumentParser
from tabulate import tabulate

from fedsim.cli.doctor.checkup import Checkup, examine
from fedsim.cli.doctor.facts import Facts, Wish
from fedsim.cli.doctor.trials import gather
from fedsim.core.errors import NotReadyError
from fedsim.papers.files import with_paper
from fedsim.parsing.config_files import join_configs, read_config
from fedsim.parsing.error_lines import parsed
from fedsim.parsing.output import print_text

_SECTIONS = ("trainer", "model")
_DESCRIPTION = """\
What this machine has, what a fit with these options would use of it, and what stands in the way. It changes nothing and
trains nothing. It takes as long as torch and faiss take to load, in processes of their own that are ended after two
minutes. Exit code 0: such a fit can run; 1: something stands in the way; 2: an option or a config is wrong.
"""


def run(args: list[str]) -> str:
    """Run ``fedsim doctor [options]`` and return the page.

    Raises:
        NotReadyError: if something stands in the way; the page is written before.
    """
    given = parsed(_parser(), join_configs(with_paper(args)))
    wish = _wish(given.as_dict())
    facts = gather(wish)
    checkup = examine(facts, wish)
    page = as_json(facts, checkup) if given.json else as_page(checkup)
    if not checkup.blocks:
        return page
    print_text(page)
    first, count = checkup.blocks[0], len(checkup.blocks)
    things = "1 thing stands" if count == 1 else f"{count} things stand"
    raise NotReadyError(f"{things} in the way of this fit; first: {first.what}; {first.remedy}")


def _parser() -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False, allow_abbrev=False, prog="fedsim doctor", description=_DESCRIPTION)
    options = {
        "trainer.accelerator": (str | None, "auto, cpu or gpu"),
        "trainer.devices": (
            list[int] | str | int | None,
            "a number of ranks, a list of GPUs such as '[0, 2]', or auto",
        ),
        "trainer.num_nodes": (int | None, "number of machines"),
        "trainer.strategy.ranks_per_device": (int | None, "ranks that share a GPU"),
        "model.evaluation.backend": (Literal["auto", "torch", "faiss"] | None, "library that ranks"),
        "run_dir": (str | None, "folder to write to"),
    }
    parser.add_argument("--config", type=str | list[str] | None, help="a config of the fit; several, one by one")
    for name, (kind, text) in options.items():
        parser.add_argument(f"--{name}", type=kind, help=f"of the fit: {text}; it rules over configs")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a page")
    return parser


def _wish(given: dict[str, Any]) -> Wish:
    """Read the fit, as far as the machine matters, from its configs, then from options."""
    found = given.pop("config") or []
    sections = [_sections(path) for path in ([found] if isinstance(found, str) else found)]
    fields: dict[str, Any] = {}
    for content in (*sections, given):
        trainer = content.get("trainer") or {}
        evaluation = (content.get("model") or {}).get("evaluation") or {}
        stated = {name: trainer.get(name) for name in ("accelerator", "devices", "num_nodes")}
        stated |= {"backend": evaluation.get("backend"), "run_dir": content.get("run_dir")}
        if isinstance(strategy := trainer.get("strategy"), dict):
            stated["ranks_per_device"] = (strategy | (strategy.get("init_args") or {})).get("ranks_per_device")
        stated["tracked"] = "Wandb" in str(trainer["logger"]) if "logger" in trainer else None
        fields |= {name: value for name, value in stated.items() if value is not None}
    return Wish(**fields)


def _sections(path: str) -> dict[str, Any]:
    """Return a config's content; a section may be a file of its own."""
    content = read_config(path, ("trainer", "model", "model.evaluation"))
    return {name: read_config(part) if name in _SECTIONS and isinstance(part, str) else part
            for name, part in content.items()}  # fmt: skip


def as_json(facts: Facts, checkup: Checkup) -> str:
    """Return facts and verdict, for programs."""
    findings = [finding._asdict() for finding in checkup.findings]
    content = {"machine": socket.gethostname(), "ready": not checkup.blocks, "findings": findings}
    content |= {part: [line._asdict() for line in getattr(checkup, part)] for part in ("here", "uses")}
    return json_format.dumps(content | {"facts": asdict(facts)}, indent=2)


def as_page(checkup: Checkup) -> str:
    """Return one screen."""
    titles = {f"{socket.gethostname()} has": checkup.here, "A fit would use": checkup.uses}
    parts = [
        tabulate(lines, headers=[title, "", "how sure"], disable_numparse=True, maxcolwidths=[None, 80, None])
        for title, lines in titles.items()
    ]
    for title, blocks in (("In the way", True), ("Look at", False)):
        found = [finding for finding in checkup.findings if finding.blocks == blocks]
        texts = [f"- {finding.what}\n  remedy: {finding.remedy}" for finding in found]
        if texts or blocks:
            parts.append("\n".join([f"{title}:", *(texts or ["- nothing: a fit can run as asked"])]))
    return "\n\n".join(parts)
