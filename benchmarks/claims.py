"""Run the commands of the pages of docs/claims as they are printed there, and keep what they print as a record.

    python benchmarks/claims.py 000-ska fedbuff --record benchmarks/results/DAY-claims.md

The blocks of bash below "Run it" of a page are one script, run in an empty folder. The record has the output of the
commands that are no fits, such as the tables of ``fedsim report``, and the scores by seed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch
from tabulate import tabulate

PAGES = Path(__file__).parents[1] / "docs" / "claims"


def main() -> None:
    """Run the pages that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "pages", nargs="*", default=sorted(path.stem for path in PAGES.glob("*.md") if path.stem != "README")
    )
    parser.add_argument("--record", type=Path, required=True)
    args = parser.parse_args()
    texts = [head()]
    for page in args.pages:
        began = time.time()
        with tempfile.TemporaryDirectory() as folder:
            output = run(script_of(page), folder).strip() + "\n\n" + scores_by_seed(Path(folder))
        texts.append(f"## {page}\n\n{time.time() - began:.0f} seconds.\n\n```\n{output}\n```\n")
        args.record.write_text("\n".join(texts))
        print(texts[-1])


def head() -> str:
    """Return the first lines of the record."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
    processor = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    machine = f"{processor[1] if processor else platform.machine()}, {os.cpu_count()} cores"
    return (
        "# What the commands of the pages of claims print\n\n"
        f"- **Date:** {time.strftime('%Y-%m-%d')}. Not corrected since.\n"
        f"- **Machine:** {machine}, torch {torch.__version__}.\n"
        f"- **Version:** {commit.strip()}.\n"
        "- **Command:** `python benchmarks/claims.py --record FILE`: the commands of each page, as they are there.\n"
    )


def script_of(page: str) -> str:
    """Return the script of a page's section "Run it"."""
    section = (PAGES / f"{page}.md").read_text().partition("\n## Run it\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```bash\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    return "".join(blocks)


def run(script: str, folder: str) -> str:
    """Run a script in an empty folder, and return the output of its commands that are no fits."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    quiet = 'fedsim() { if [ "$1" = fit ]; then command fedsim "$@" > /dev/null; else command fedsim "$@"; fi; }\n'
    command = ["bash", "-eu", "-c", quiet + script]
    done = subprocess.run(command, cwd=folder, env={**os.environ, "PATH": path}, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(done.returncode)
    return done.stdout


def scores_by_seed(folder: Path) -> str:
    """Return the mAP of the delivered models after the last round, percent, of all seeds of each setting."""
    scores: dict[str, dict[str, list[str]]] = defaultdict(lambda: {"seen": [], "unseen": []})
    for path in sorted(folder.glob("runs/*/*/summary.json")):
        metrics = json.loads(path.read_text())["final"]["metrics"]
        for domain, of_setting in scores[path.parent.name.rstrip("0123456789")].items():
            keys = (f"test/{kind}/{domain}/mAP" for kind in ("personalised", "global"))
            of_setting += [f"{100 * metrics[key]:.1f}" for key in keys if key in metrics][:1]
    rows = [[name, *(", ".join(values) or "-" for values in columns.values())] for name, columns in scores.items()]
    return tabulate(rows, ["runs", "mean seen, mAP by seed", "mean unseen, mAP by seed"], disable_numparse=True)


if __name__ == "__main__":
    main()
