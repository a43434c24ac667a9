"""Runs of ``fedsim fit``: as a kill at any moment, or a resume, leaves them; and with one file edited by hand."""

from __future__ import annotations

import csv
import json
import random
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedsim.__main__ import main
from fedsim.core.errors import ConfigError, DataError
from fedsim.federation.callbacks import RunSummary
from fedsim.report import report
from forged.runs import leaves, other_value, set_at, value_at

_CONFIG = """
seed_everything: 0
trainer: {max_epochs: 3, check_val_every_n_epoch: 1, accelerator: cpu, devices: 1, enable_progress_bar: false}
model:
  method: FedPav
  backbone: {class_path: SmallCNN, init_args: {width: 4}}
  client: {batch_size: 8}
data:
  source: {class_path: SyntheticReID, init_args: {clients: 2, unseen: 1, scale: 0.2}}
  cache: none
  size: [32, 16]
"""
HISTORIES: dict[str, tuple[tuple[str, ...], ...]] = {
    "one fit": ((),),
    "few evaluations": (("--trainer.check_val_every_n_epoch=2",),),
    "attacked": (("--model.attack=Backdoor", "--model.attack.attackers=0.5"),),
    "personalised": (("--model.method=Ditto", "--model.privacy=WhiteNoise", "--model.privacy.beta=0.1"),),
    "ended by a limit": (("--trainer.max_steps=2",),),
    "resumed": (("--trainer.max_epochs=2",), ("--ckpt_path=RUN",)),
    "resumed from an earlier round": ((), ("--ckpt_path=RUN/checkpoints/kept.ckpt", "--trainer.max_epochs=4")),
    "gone on in another folder": ((), ("--ckpt_path=RUN", "--run_dir=OTHER", "--trainer.max_epochs=5")),
}
"""name -> the options of each fit; RUN is the run directory, OTHER another one"""


def true_run(folder: Path) -> Path:
    """Return a run of three rounds, whose best checkpoint ``fedsim test`` has scored."""
    _fit(folder, folder / "run", ())
    main(["test", "--ckpt_path", str(folder / "run" / "checkpoints" / "best.ckpt")])
    return folder / "run"


def states(folder: Path, names: Iterable[str] = HISTORIES) -> Iterator[tuple[str, Path]]:
    """Yield the states of run directories that a kill may leave, each with its history; ``folder`` is empty."""
    for name, fits in ((name, HISTORIES[name]) for name in names):
        place, run = folder / name.replace(" ", "-"), folder / name.replace(" ", "-") / "run"
        for number, options in enumerate(fits):
            with _kept(place / f"fit{number}"):
                _fit(place, run, options)
        yield from ((name, state) for state in sorted(place.glob("fit*/*")))
        yield f"{name}, moved", Path(shutil.copytree(run, place / "elsewhere" / "run", symlinks=True))


def _fit(place: Path, run: Path, options: tuple[str, ...]) -> None:
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.yaml").write_text(_CONFIG)
    of_fit = [option.replace("RUN", str(run)).replace("OTHER", str(place / "other")) for option in options]
    begin = [] if of_fit and "ckpt_path" in of_fit[0] else [f"--config={place / 'config.yaml'}", f"--run_dir={run}"]
    main(["fit", *begin, *of_fit])


@contextmanager
def _kept(states_folder: Path) -> Iterator[None]:
    """Copy the run directory after each evaluation, and before and after each summary that a fit writes.

    Not before the first one of a resume: between the rows of its first round and this summary are milliseconds.
    """
    write, end, before = RunSummary._write, RunSummary.on_validation_end, list[int]()

    def ending(self: RunSummary, *args: Any) -> None:
        """Copy, and store the scores."""
        if self.path.exists():
            _copy(self.path.parent, states_folder)
        end(self, *args)

    def writing(self: RunSummary, *args: Any) -> None:
        """Write, with copies."""
        run = self.path.parent
        if before and self.path.exists():
            _copy(run, states_folder)
        write(self, *args)
        _copy(run, states_folder)
        before.append(1)
        kept = run / "checkpoints" / "kept.ckpt"
        if not kept.exists() and (run / "checkpoints" / "last.ckpt").exists():
            shutil.copytree(run / "checkpoints" / "last.ckpt", kept, symlinks=True)

    # every state of the files is wanted
    RunSummary._write, RunSummary.on_validation_end = writing, ending  # type: ignore[method-assign]
    try:
        yield
    finally:
        RunSummary._write, RunSummary.on_validation_end = write, end  # type: ignore[method-assign] # as before


def _copy(run: Path, states_folder: Path) -> None:
    number = len([*states_folder.glob("*")])
    shutil.copytree(run, states_folder / f"{number:03}", symlinks=True, ignore=shutil.ignore_patterns("checkpoints"))


def edited(rng: random.Random, run: Path, target: Path) -> str:
    """Copy a run, and edit a field or a cell of one of its files; return what was done."""
    shutil.copytree(run, target, symlinks=True, ignore=shutil.ignore_patterns("checkpoints"))
    name = rng.choice(["summary.json", "metrics.csv", "tests/best.json"])
    path = target / name
    if path.suffix == ".csv":
        return f"{name}: {_edit_rows(rng, path)}"
    content = json.loads(path.read_text())
    section = rng.choice([*content])  # or else nearly all draws were scores
    place = rng.choice([(section, *place) for place in leaves(content[section])])
    set_at(content, place, other_value(value_at(content, place), rng))
    path.write_text(json.dumps(content, indent=2) + "\n")
    return f"{name}: {'.'.join(map(str, place))}"


def _edit_rows(rng: random.Random, path: Path) -> str:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    kind, number = rng.choice(["a cell", "a cell", "a cell", "gone", "twice", "moved"]), rng.randrange(len(rows))
    name = rng.choice([name for name, value in rows[number].items() if value])
    if kind == "a cell":
        rows[number][name] = str(float(rows[number][name]) + rng.choice([-1, 0.01, 1]))
    elif kind == "twice":
        rows.insert(rng.randint(0, len(rows)), dict(rows[number]))
    else:
        row = rows.pop(number)
        if kind == "moved":
            rows.insert(rng.choice([place for place in range(len(rows) + 1) if place != number]), row)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0]])
        writer.writeheader()
        writer.writerows(rows)
    return f"row {number} {kind}, {name}"


def doubts_of(run: Path, is_tested: bool = False) -> str:
    """Return the lines of a report that doubt a run, or refuse it as damaged; empty if it is shown as it is."""
    try:
        text = report([str(run)], unfinished=True, rule="tested" if is_tested else "last")
    except (ConfigError, DataError) as error:
        return "" if "has no scores yet" in str(error) else f"refused: {error}"
    return "\n".join(line for line in text.splitlines() if line.startswith(("IN DOUBT", "left out")))
