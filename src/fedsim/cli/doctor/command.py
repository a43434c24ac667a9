"""``fedsim doctor``: the hardware of this machine, the part that a fit would use, and problems that prevent it."""

from __future__ import annotations

import json as json_format
import socket
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any, Literal

from jsonargparse import ArgumentParser
from tabulate import tabulate

from fedsim.cli.doctor.checkup import Checkup, examine
from fedsim.cli.doctor.facts import MachineFacts, RequestedFit, gather
from fedsim.core.errors import NotReadyError
from fedsim.papers.files import with_paper
from fedsim.parsing.command_line import given, merged
from fedsim.parsing.config_files import join_configs, read_config, read_sections
from fedsim.parsing.error_lines import parsed
from fedsim.parsing.output import print_text

_SECTIONS = ("trainer", "model")
_DESCRIPTION = """\
Show the hardware and libraries of this machine, the part that a fit with these options would use, and the problems that
prevent it. Nothing is changed or trained. The command takes as long as torch and faiss take to load, in separate
processes, which are ended after two minutes. Exit code 0: such a fit can run; 1: a problem prevents it; 2: an option or
a config is wrong.
"""


def run(args: list[str]) -> str:
    """Run ``fedsim doctor [options]`` and return the page.

    Raises:
        NotReadyError: if a problem prevents the fit; the page is written before.
    """
    words = with_paper(args)
    arguments = parsed(_parser(), join_configs(words))
    requested = _requested_fit(words)
    facts = gather(requested)
    checkup = examine(facts, requested)
    page = as_json(facts, checkup) if arguments.json else as_page(checkup)
    if not checkup.blocks:
        return page
    print_text(page)
    first, count = checkup.blocks[0], len(checkup.blocks)
    problems = "1 problem prevents" if count == 1 else f"{count} problems prevent"
    raise NotReadyError(f"{problems} this fit; first: {first.problem}; {first.remedy}")


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
        "trainer.strategy.process_group_backend": (str | None, "nccl or gloo, for sums over ranks"),
        "model.evaluation.backend": (Literal["auto", "torch", "faiss"] | None, "library for ranking"),
        "run_dir": (str | None, "folder to write to"),
    }
    parser.add_argument("--config", type=str | list[str] | None, help="a config of the fit; may be given several times")
    for name, (value_type, meaning) in options.items():
        parser.add_argument(f"--{name}", type=value_type, help=f"of the fit: {meaning}; overrides configs")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a page")
    return parser


def _requested_fit(words: Sequence[str]) -> RequestedFit:
    """Read the machine's part of the fit from its configs and options."""
    settings = merged(given(words, _sections))
    names = ["model.evaluation.backend", "run_dir", *(name for name in settings if name.startswith("trainer."))]
    stated: dict[str, Any] = {name.rpartition(".")[2]: settings.get(name) for name in names}
    if "trainer.logger" in settings:
        stated["tracked"] = "Wandb" in str(settings["trainer.logger"])
    return RequestedFit(**{f.name: stated[f.name] for f in fields(RequestedFit) if stated.get(f.name) is not None})


def _sections(path: str) -> dict[str, Any]:
    """Return a config's content; a section may be a file of its own."""
    content = read_sections(path)
    return {name: read_config(part) if name in _SECTIONS and isinstance(part, str) else part
            for name, part in content.items()}  # fmt: skip


def as_json(facts: MachineFacts, checkup: Checkup) -> str:
    """Return facts and verdict as JSON, for programs."""
    findings = [finding._asdict() for finding in checkup.findings]
    content = {"machine": socket.gethostname(), "ready": not checkup.blocks, "findings": findings}
    content |= {part: [entry._asdict() for entry in getattr(checkup, part)] for part in ("resources", "uses")}
    return json_format.dumps(content | {"facts": asdict(facts)}, indent=2)


def as_page(checkup: Checkup) -> str:
    """Return the page, which fits on a screen."""
    titles = {f"{socket.gethostname()} has": checkup.resources, "A fit would use": checkup.uses}
    parts = [
        tabulate(lines, headers=[title, "", "how sure"], disable_numparse=True, maxcolwidths=[None, 80, None])
        for title, lines in titles.items()
    ]
    for title, blocks in (("Problems that prevent the fit", True), ("Warnings", False)):
        findings = [finding for finding in checkup.findings if finding.blocks == blocks]
        texts = [f"- {finding.problem}\n  remedy: {finding.remedy}" for finding in findings]
        if texts or blocks:
            parts.append("\n".join([f"{title}:", *(texts or ["- none: the fit can run"])]))
    return "\n\n".join(parts)
