"""How long commands take to start: CPU-seconds of a whole process, with a warm file cache, beside ``import torch``.

Each row is a process of its own. Rounds of all rows alternate, so all see the same machine; medians are printed.
CPU-seconds are user and system time of the process and its children, which a busy machine changes less than seconds on
the clock. ``fit, until its data`` ends when its data set is not there: the start of a run, without the work.

    python benchmarks/start_up.py               # five rounds
    python benchmarks/start_up.py --base TREE   # also the source tree of another version, in the same rounds
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[1]
CONFIG = "init.yaml"  # which init writes only where there is none
SWEEP = """\
program: fedsim
method: grid
metric: {name: val/mAP, goal: maximize}
parameters: {model.method.mu: {values: [1, 2]}}
command: ["${program}", fit, "${args}"]
"""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--base", type=Path, help="a source tree of fedsim to compare with")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        commands = _commands(Path(folder))
        trees = {"now": ROOT} | ({"base": args.base.resolve()} if args.base else {})
        rows = {
            (code, "now"): (0, [sys.executable, "-c", code]) for code in ("import torch", "import lightning.pytorch")
        }
        rows |= {(name, tree): (code, [sys.executable, "-m", "fedsim", *words])
                 for name, (code, words) in commands.items() for tree in trees}  # fmt: skip
        seconds: dict[tuple[str, str], list[tuple[float, float]]] = {key: [] for key in rows}
        for turn in range(args.rounds + 1):
            for key, (code, command) in rows.items():
                (Path(folder) / CONFIG).unlink(missing_ok=True)
                spent = _spent(code, command, trees[key[1]])
                if turn:  # the first round warms the file cache
                    seconds[key].append(spent)
    median = {
        key: [statistics.median(column) for column in zip(*values, strict=True)] for key, values in seconds.items()
    }
    torch_cpu = median["import torch", "now"][0]
    table = []
    for (name, tree), (cpu, wall) in median.items():
        over_base = f"{cpu / median[name, 'base'][0]:.2f}" if (name, "base") in median else ""
        table.append([name, tree, f"{cpu:.2f}", f"{cpu / torch_cpu:.2f}", over_base, f"{wall:.2f}"])
    header = ["process", "version", "CPU s", "over import torch", "over base", "wall s"]
    sys.stdout.write(
        f"{tabulate(table, header)}\nload of the machine: {os.getloadavg()[0]:.2f}, cores: {os.cpu_count()}\n"
    )


def _commands(folder: Path) -> dict[str, tuple[int, list[str]]]:
    """Return the commands with their exit codes, after writing the small files that they read."""
    run = folder / "run"
    run.mkdir()
    scores = {f"test/global/{name}/{metric}": 0.5 for name in ("a", "seen") for metric in ("mAP", "rank1")}
    (run / "metrics.csv").write_text(
        f"epoch,train/loss,{','.join(scores)}\n0,1.0,{','.join(map(str, scores.values()))}\n"
    )
    summary = {"finished": True, "method": "FedPav", "fingerprint": "run", "seed": 0, "rounds": 1, "clients": ["a"],
               "unseen": [], "primary": "global", "best": None, "final": {"round": 1, "metrics": scores}}  # fmt: skip
    (run / "summary.json").write_text(json.dumps(summary))
    (folder / "sweep.yaml").write_text(SWEEP)
    arrays = {"": np.eye(8, dtype=np.float32), "_pids": np.arange(8)}
    features = {f"{kind}{name}": array for kind in ("query", "gallery") for name, array in arrays.items()}
    features |= {"query_camids": np.zeros(8, dtype=int), "gallery_camids": np.ones(8, dtype=int)}
    np.savez(folder / "features.npz", **features)
    people = folder / "people"
    for part, pids in {"bounding_box_train": (1, 2), "query": (3, 4), "bounding_box_test": (3, 4)}.items():
        (people / part).mkdir(parents=True)
        for name in (f"{pid:04d}_c{camera}.jpg" for pid in pids for camera in (1, 2)):
            (people / part / name).touch()  # its pixels are not read
    data = "--data.source={class_path: MarketFolders, init_args: {root: nowhere}}"
    return {
        "report RUN": (0, ["report", str(run)]),
        "report --wrong": (2, ["report", str(run), "--wrong"]),
        "sweep --dry-run": (0, ["sweep", str(folder / "sweep.yaml"), "--dry-run"]),
        "fit --wrong": (2, ["fit", "--config", "configs/quickstart.yaml", "--trainer.epochs=3"]),
        "rank FILE": (0, ["rank", str(folder / "features.npz")]),
        "data check FOLDER": (0, ["data", "check", str(folder)]),
        "data splits FOLDER": (0, ["data", "splits", str(people)]),
        "init FOLDER": (0, ["init", str(folder), "--output", str(folder / CONFIG)]),
        "describe": (0, ["describe", "--config", "configs/quickstart.yaml"]),
        "fit, until its data": (2, ["fit", "--config", "configs/quickstart.yaml", data]),
    }


def _spent(code: int, command: list[str], tree: Path) -> tuple[float, float]:
    """Return CPU-seconds and seconds of one process."""
    env = {**os.environ, "PYTHONPATH": str(tree / "src")}
    start = time.perf_counter()
    process = subprocess.Popen(command, cwd=tree, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status) != code:
        raise SystemExit(f"{' '.join(command)}: exit code {os.waitstatus_to_exitcode(status)}, {code} was expected")
    return usage.ru_utime + usage.ru_stime, time.perf_counter() - start


if __name__ == "__main__":
    main()
