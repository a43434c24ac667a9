"""Whether a report certifies what is not a paper's row, or calls a repetition another experiment.

    python benchmarks/forgeries.py                                # 200 forged runs, 100 honest ones
    python benchmarks/forgeries.py --draws 0 --honest 0 --edits 200   # of one file of a true run, and its honest states
    python benchmarks/forgeries.py --draws 2000 --honest 1000 --seed 7

A forged run is one whose numbers are not those of the row: other settings, of any option that Lightning's Trainer, the
data or the model take; other data; a run that ended early or went on with other settings; files that were edited after
the run. It stands alone, or as a further seed beside an honest one. It slips through if the report says of its column
"has all settings of". An honest run differs in what cannot change results. It is wrong to say that its settings differ,
or to show a second column beside an honest seed. Reports read nothing but run directories, which are written here.

An edit changes a field or a cell in one file of a run of ``fedsim fit``, and slips through if no line of a report
doubts the run. It is wrong to doubt a state in which a kill or a resume leaves a run.
"""

from __future__ import annotations

import argparse
import random
import re
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

from tabulate import tabulate

from fedsim.core.errors import ConfigError, DataError
from fedsim.report import report
from fedsim.report.runs import RuleName
from forged import true_runs
from forged.files import OF_FILES
from forged.honest import HONEST
from forged.runs import Made, honest, printed_rows, write
from forged.settings import OF_SETTINGS

_VERDICT = re.compile(r"^- .* (has all settings of|is closest to|cannot be certified as|no row)", re.MULTILINE)
_CERTIFIED = re.compile(r"^- .* has all settings of '.*' \((\S+)\)", re.MULTILINE)
KINDS: dict[str, Callable[[random.Random, Made], str]] = {**OF_SETTINGS, **OF_FILES}
"""kind -> changes a run, and returns what it has done; empty: it cannot be done to this row"""


def text_of(*folders: Path, made: Made) -> str:
    """Return the report on runs beside the table of a row; the reason if it is refused."""
    rule: RuleName | None = "tested" if made.tested is not None else None
    try:
        return report([str(f) for f in folders], compare=f"{made.printed_in}/{made.table}", unfinished=True, rule=rule)
    except (ConfigError, DataError) as error:
        return f"refused: {error}"
    except Exception:  # a crash is a finding, whatever it is
        return f"crashed: {traceback.format_exc()}"


@cache
def certified_rows() -> list[tuple[str, str, str, str]]:
    """Return the rows whose own honest run is certified: the numbers of the data of others are not known."""
    with tempfile.TemporaryDirectory() as folder:
        runs = {row: honest(row) for row in printed_rows()}
        texts = {row: text_of(write(run, Path(folder, str(n))), made=run) for n, (row, run) in enumerate(runs.items())}
    return [row for row, text in texts.items() if _CERTIFIED.search(text)]


def forge(rng: random.Random, kind: str) -> tuple[Made, str]:
    """Return a forged run of a drawn row, and what was done to it."""
    done = ""
    while not done:
        made = honest(rng.choice(certified_rows()), rng.randint(2, 9))
        done = KINDS[kind](rng, made)
    return made, done


def slips(rng: random.Random, made: Made, folder: Path) -> str:
    """Return the lines by which a report certifies a forged run, alone or beside honest seeds; empty if it does not."""
    forged = write(made, folder / "forged")
    row = (made.key, made.name, made.printed_in, made.table)
    seeds = [seed for seed in (0, 1) if rng.random() < 0.5]
    honest_runs = [honest(row, seed) for seed in seeds]
    for run in honest_runs:
        run.tested = None if made.tested is None else tested_of(run)
    folders = [write(run, folder / f"seed{run.summary['seed']}") for run in honest_runs]
    for runs in ([forged], [*folders, forged]):
        text = text_of(*runs, made=made)
        verdicts, certified = _VERDICT.findall(text), _CERTIFIED.findall(text)
        if text.startswith("crashed"):
            return text
        is_shown = not re.search(rf"left out: {re.escape(str(forged))} ", text)
        if certified and len(certified) == len(verdicts) and is_shown:
            return f"certified as {', '.join(certified)}" + " beside honest seeds" * (len(runs) > 1)
    return ""


def tested_of(made: Made) -> dict[str, object]:
    """Return what an honest ``fedsim test`` of a run writes."""
    final = made.summary["final"]
    return {"checkpoint": "last", **final, "settings": made.config, "data": made.summary["data"]}


def alarms(rng: random.Random, kind: str, folder: Path) -> str:
    """Return the line by which a report calls an honest run another experiment; empty if it does not."""
    done = ""
    while not done:
        row = rng.choice(printed_rows())
        first, second = honest(row, 1), honest(row, 2)
        done = HONEST[kind](rng, second)
    folders = [write(first, folder / "first"), write(second, folder / "second")]
    text = text_of(*folders, made=first)
    wrong = [
        line for line in text.splitlines() if re.search(r"NOT ONE GROUP|is closest to|refused|crashed|left out:", line)
    ]
    if wrong or len(_VERDICT.findall(text)) != 1:
        return f"{made_name(first)}: {done}: {'; '.join(wrong) or text}"
    return ""


def made_name(made: Made) -> str:
    """Return paper and row of a run."""
    return f"{made.key}/{made.name}"


def main() -> None:
    """Draw, and print a table by kind and each slip."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=200, help="forged runs")
    parser.add_argument("--honest", type=int, default=100, help="honest runs")
    parser.add_argument("--edits", type=int, default=0, help="edited files of a true run; also judges honest states")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    wrong, counts = draw(options.draws, options.honest, options.seed)
    if options.edits:
        with tempfile.TemporaryDirectory() as folder:
            of_edits = [draw_edits(options.edits, options.seed, Path(folder)), judge_states(Path(folder))]
        wrong += [line for lines, _ in of_edits for line in lines]
        counts += sum((counted for _, counted in of_edits), Counter[str]())
    print(tabulate([[kind, counts[kind], sum(k == kind for k, _ in wrong)] for kind in counts], ["", "drawn", "wrong"]))
    print(f"{len(certified_rows())} of {len(printed_rows())} rows are certified as themselves")
    for kind, text in wrong:
        print(f"{kind}: {text}")


def draw(draws: int, honest_ones: int, seed: int) -> tuple[list[tuple[str, str]], Counter[str]]:
    """Return each wrong verdict with its kind, and how many of each kind were drawn."""
    wrong, counts = [], Counter[str]()
    kinds = [*KINDS] * (draws // len(KINDS) + 1)
    for number in range(draws):
        rng = random.Random(f"{seed} forged {number}")
        made, done = forge(rng, kinds[number])
        with tempfile.TemporaryDirectory() as folder:
            line = slips(rng, made, Path(folder))
        counts[kinds[number]] += 1
        wrong += [(kinds[number], f"{made_name(made)}: {done}: {line}")] if line else []
    kinds = [*HONEST] * (honest_ones // len(HONEST) + 1)
    for number in range(honest_ones):
        with tempfile.TemporaryDirectory() as folder:
            line = alarms(random.Random(f"{seed} honest {number}"), kinds[number], Path(folder))
        counts[f"honest: {kinds[number]}"] += 1
        wrong += [(f"honest: {kinds[number]}", line)] if line else []
    return wrong, counts


Judged = tuple[list[tuple[str, str]], Counter[str]]
"""wrong verdicts, each with its kind, and how many runs of each kind were judged"""


def draw_edits(edits: int, seed: int, folder: Path) -> Judged:
    """Return each edit of a true run that no report doubts, with its file, and how many of each file were drawn."""
    wrong, counts, run = list[tuple[str, str]](), Counter[str](), true_runs.true_run(folder / "true")
    for number in range(edits):
        done = true_runs.edited(random.Random(f"{seed} edit {number}"), run, folder / f"edit{number}")
        file = f"edited: {done.partition(':')[0]}"
        counts[file] += 1
        if not true_runs.doubts_of(folder / f"edit{number}", is_tested="tests/" in file):
            wrong.append((file, done))
    return wrong, counts


def judge_states(
    folder: Path, names: Iterable[str] = true_runs.HISTORIES
) -> tuple[list[tuple[str, str]], Counter[str]]:
    """Return the doubts about honest states of true runs, each with its history, and how many states each has."""
    judged = [(name, true_runs.doubts_of(state)) for name, state in true_runs.states(folder / "states", names)]
    return [(name, doubt) for name, doubt in judged if doubt], Counter(name for name, _ in judged)


if __name__ == "__main__":
    main()
