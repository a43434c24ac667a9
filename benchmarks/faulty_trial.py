"""How many faulty parts the checks for authors find.

    python benchmarks/faulty_trial.py              # the parts of benchmarks/faulty/first.py
    python benchmarks/faulty_trial.py second       # those of second.py
    python benchmarks/faulty_trial.py third        # those of third.py
    python benchmarks/faulty_trial.py first --only OrderOfASet SoundSource

Each part has one fault, which an author could make, or none. It is found if the public check of its kind refuses it
with a finding that is about this fault: it matches a regular expression, which stands beside the part and was written
before the check was run. It slips if the check accepts it, or speaks of something else. Parts that fedsim carries
rightly, though they look wrong, are harmless: nothing is asked of the check. Sound parts must be accepted.
"""

from __future__ import annotations

import argparse
import re
import time
from collections import Counter
from importlib import import_module

from tabulate import tabulate

from faulty.part import CHECKS, Part
from fedsim.testing import PartRefusedError


def verdict(part: Part) -> tuple[str, str]:
    """Return what becomes of a part, and the finding about its fault, or else the first one."""
    findings: tuple[str, ...] = ()
    try:
        CHECKS[part.kind](part.make())
    except PartRefusedError as error:
        findings = error.findings
    except Exception as error:  # of a part, whose author would see a traceback
        findings = (f"traceback: {error!r}",)
    first = findings[0] if findings else ""
    if not part.about:
        return ("refused, and sound" if findings else "sound"), first
    about = [finding for finding in findings if re.search(part.about, finding, re.IGNORECASE)]
    if about and not about[0].startswith("traceback"):
        return "found", about[0]
    return ("harmless" if part.harmless and not findings else "slipped"), part.harmless or first


def main() -> None:
    """Run the checks, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="?", default="first", help="a file of benchmarks/faulty")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="names of parts")
    options = parser.parse_args()
    parts: tuple[Part, ...] = import_module(f"faulty.{options.parts}").PARTS
    counts, rows = Counter[str](), []
    for part in parts:
        if not options.only or part.name in options.only:
            start = time.perf_counter()
            result, finding = verdict(part)
            counts[result] += 1
            rows.append([part.kind, part.name, result, round(time.perf_counter() - start, 1), part.fault, finding])
            print(*rows[-1], sep=" | ", flush=True)
    head = ["kind", "part", "result", "seconds", "fault", "finding"]
    print(tabulate(rows, head, tablefmt="github", maxcolwidths=[None, None, None, None, 60, 100]))
    print(*(f"{count} {result}" for result, count in counts.items()), sep=", ")


if __name__ == "__main__":
    main()
