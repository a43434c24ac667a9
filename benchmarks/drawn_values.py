"""Give drawn values to options and functions, with and without root's rights, and count what slips through.

    python benchmarks/drawn_values.py --number 2000          # two or three seconds for each draw, two at once
    python benchmarks/drawn_values.py --number 200 --seed 3

Each draw is a command, or a function of Python, that is valid but for one value: a path, a number, a device, a
picture; first, each command runs without a drawn value, and must end with code 0. A draw runs in a folder and a home of
its own; if root draws, half of the draws give up root's rights. A wrong value must end with code 2 in one line; any
value must end without a traceback, in time, and without a folder called ``~``.
Exits with 1 if anything slips through.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import os
import random
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", "MPLBACKEND": "agg"}  # before torch

import numpy as np
import torch
from PIL import Image
from scipy.io import savemat
from tabulate import tabulate

import fedsim
from fedsim.__main__ import main as run_command
from fedsim.core.errors import FedSimError
from fedsim.settings.table import class_at, section, sections

LIMIT = 120.0
"""seconds; a command that takes longer hangs"""
OTHER_USER = 54321
"""owner of a folder that only root may open"""
FIT = """
seed_everything: 0
trainer: {accelerator: cpu, devices: 1, max_epochs: 1, max_time: "00:00:00:20", enable_progress_bar: false}
model:
  method: FedPav
  backbone: {class_path: SmallCNN, init_args: {width: 4}}
  neck: {kind: linear, dim: 8}
  client: {batch_size: 8}
data:
  source: {class_path: SyntheticReID, init_args: {clients: 2, unseen: 1, scale: 0.1}}
  val: none
  size: [16, 8]
"""
NUMBER, COUNT, SHARE = "number", "count", "share"
PATHS_IN, PATHS_OUT = (
    ("file", "folder", "run"),
    (".png", ".html", ".npz", ".csv", ".yaml", ".safetensors", "new folder"),
)
SMALL_GENERATOR = (
    "--size [16,16] --training.steps 2 --training.save_every 1 --training.batch_size 2 --networks.width 2"
    " --networks.structure_blocks 1 --networks.decoder_blocks 1 --networks.hidden 4 --appearance.width 4"
)
OPTIONS = {
    "data check {tree}": {"--root": "folder"},
    "data check --data.source MarketFolders --data.source.root {tree}": {
        "--data.source.root": "folder", "--picture": ".png",
    },
    "data preview --root {tree}": {"--root": "folder", "--output": ".png"},
    "data preview --config {config}": {"--config": "file", "--output": ".png"},
    "data manifest --config {files}": {"--config": "file", "--output": ".csv"},
    "data prepare --config {files} --workers 0 --cache_dir {new}": {
        "--config": "file", "--workers": "natural", "--cache_dir": "new folder",
    },
    "data cut --root {scenes} --output {new}": {"--root": "folder", "--output": "new folder"},
    "data splits --folder {split} --num 1": {"--folder": "folder", "--num": COUNT, "--fraction": "fraction"},
    "init {tree}": {"--folder": "folder", "--output": ".yaml"},
    "slurm": {"--folder": "new folder"},
    "export --ckpt_path {run} --output {new}.safetensors": {"--ckpt_path": "run", "--output": ".safetensors"},
    "rank {features}": {
        "--features": "file", "--save_ranking": ".npz", "--expand": "natural", "--device": "device",
    },
    "rank {features} --rerank": {"--k1": COUNT, "--k2": COUNT, "--lambda_": SHARE},
    "rank {features} --expand 2": {"--alpha": NUMBER},
    "predict --ckpt_path {run} --images {tree}/town0/query": {
        "--ckpt_path": "run", "--images": "folder", "--output": ".npz", "--batch_size": COUNT, "--device": "device",
    },
    "predict --ckpt_path {run}": {"--run_dir": "new folder", "--ckpt_path": "run"},
    "report {run} --unfinished": {
        "--figure": ".png", "--curves": ".png", "--cmc": ".png", "--participation": ".png", "--html": ".html",
        "--horizon": COUNT, "--runs": "run",
    },
    "test --ckpt_path {run}": {"--ckpt_path": "run"},
    "fit --config {config} --run_dir {new}": {
        "--config": "file", "--run_dir": "new folder", "--seed_everything": "natural",
        "--model.client.batch_size": COUNT,
        "--model.client.local_epochs": COUNT, "--model.client.optimizer.lr": NUMBER, "--data.size": "size",
        "--data.source.clients": COUNT, "--data.source.scale": NUMBER, "--trainer.max_epochs": "natural",
        "--data.workers": "natural", "--model.neck.dropout": SHARE,
    },
    "fit --config {config} --data.source MarketFolders --data.source.root {tree} --run_dir {new}": {
        "--data.source.root": "folder", "--data.cache_dir": "new folder",
    },
    "augment preview --config {config} --generators {generators}": {
        "--people": COUNT, "--output": ".png", "--generators": "folder",
    },
    "augment write --config {config} --generators {generators} --output {new}": {
        "--generators": "folder", "--output": "new folder", "--ratio": "positive", "--threads": COUNT,
        "--device": "device",
    },
    "augment fit --config {config} --output {new} --device cpu " + SMALL_GENERATOR: {
        "--config": "file", "--output": "new folder", "--size": "size", "--training.steps": COUNT,
        "--training.rate": "positive", "--training.batch_size": COUNT, "--networks.width": COUNT,
    },
}  # fmt: skip
"""command -> option -> kind of its values; a path without an option is the command's last word"""
WRONG_NUMBERS = ["nan", "inf", "-inf", "x", "", "1:30", "[1]", "{}", "1e400", "1,5", "--", "0x1F g"]
WRONG = {
    NUMBER: [*WRONG_NUMBERS, "true"],
    "positive": [*WRONG_NUMBERS, "0", "-1", "-1e300", "true"],
    COUNT: [*WRONG_NUMBERS, "0", "-1", "-99999999999999999999", "1.5", "1e-300", "true"],
    "natural": [*WRONG_NUMBERS, "-1", "2.5", "1e-300", "true"],
    SHARE: [*WRONG_NUMBERS, "-0.1", "1.0001", "1e300", "-1e-300", "2"],
    "fraction": [*WRONG_NUMBERS, "-0.1", "1.0001", "0", "1e300"],
    "size": ["0", "[0, 8]", "[16, -8]", "[16]", "[16, 8, 3]", "[1e300, 8]", "nan", "", "[a, b]", "[16.5, 8]", "16x8"],
    "device": ["", "gpu0", "cuda:99", "cuda:-1", "cpu:x", "tpu", "meta", "1e3", "CUDA"],
}
ODD = {
    NUMBER: ["1e-300", "1e300", "-1", "0", "5e-324", "1_000"],
    "positive": ["1e-300", "1e300", "0.5", "1e12"],
    COUNT: ["1", "3", "99999999999999999999", "1e3", "7_0"],
    "natural": ["0", "1", "4294967295", "99999999999999999999"],
    SHARE: ["0", "1", "0.5", "5e-324"],
    "fraction": ["0.5", "1e-300", "0.999", "1"],
    "size": ["[16, 8]", "[17, 9]", "[1, 1]", "[64, 8]"],
    "device": ["cpu", "auto", "cuda", "mps", "cpu:0"],
}
"""values that a command may take or refuse"""
CLASSES = {
    "model.client.": "fedsim.training.settings.LocalTraining",
    "data.augmentation.": "fedsim.data.augmentation.Augmentation",
    "model.evaluation.": "fedsim.evaluation.settings.Evaluation",
    "model.objective.": "fedsim.training.objective.Objective",
}  # fmt: skip
SETTINGS = [
    *(f"{name}.{argument}" for name in sections() for argument in section(name).arguments),
    *(f"{place}{name}" for place, path in CLASSES.items() if (cls := class_at(path)) for name in cls.arguments),
]
"""settings of a fit, which get any value"""
ENDLESS = ("trainer.max_epochs", "trainer.max_time", "trainer.max_steps", "trainer.min_epochs", "trainer.min_steps")
STRANGE = ["nan", "inf", "-1", "0", "1e-300", "1e300", "99999999999999999999", "x", "", "[]", "{}", "[1, 2]", "~/x",
           "~nobody9", "null", "true", "a.b.C", "1:30", "$HOME", "$NOT_SET_9", "- x", "é",
           "{class_path: os.system}"]  # fmt: skip
"""values for any setting of a fit"""
ONE_IMAGE = torch.zeros(1, 3, 16, 8, dtype=torch.uint8)


@dataclass(frozen=True)
class Draw:
    """A command or function with one drawn value."""

    title: str
    run: Callable[[], int]
    is_wrong: bool
    may_last: bool = False
    """a number of rounds, say"""


def paths_in(kind: str) -> list[str]:
    """Return paths that cannot be read as a file, a folder or a run."""
    misplaced = {"file": ["folder"], "folder": ["file", "binary"], "run": ["file", "binary", "folder"]}[kind]
    return [
        "", "  ", "~nobody9/x", "$NOT_SET_9/x", "${}", "nowhere", "pipe", "/dev/zero", "/dev/null", "broken", "loop",
        "file/x", "a" * 5000, "/proc/1/mem", "locked", "terminal", "nowhere/../nowhere", *misplaced,
    ]  # fmt: skip


def paths_out(kind: str) -> list[str]:
    """Return paths that cannot be written as a file with this suffix, or as a folder."""
    common = ["", " ", "~nobody9/x", "$NOT_SET_9/x"]
    if kind == "new folder":
        return [*common, "file", "file/x", "pipe", "/dev/null/x", "/proc/x", "loop/x", "a" * 300]
    names = ["file/x", "/proc/x", "a" * 300, "pipe/x", "/dev/null/x", "pipe", "folder", "loop/x"]
    return [*common, "new.xyz", "new", *(f"{name}{kind}" for name in names)]


def furnish(folder: Path) -> None:
    """Put the odd things into a folder that paths name."""
    for suffix in ("", ".png", ".html", ".npz", ".csv", ".yaml", ".safetensors"):
        (folder / f"folder{suffix}").mkdir()
        os.mkfifo(folder / f"pipe{suffix}")
    (folder / "home").mkdir()
    (folder / "file").touch()
    (folder / "binary").write_bytes(bytes(range(256)) * 9)
    (folder / "broken").symlink_to("gone")
    (folder / "loop").symlink_to("loop")
    (folder / "terminal").symlink_to("/dev/tty")
    (folder / "locked").mkdir(mode=0)


def draw_of_option(stream: random.Random, fixtures: dict[str, str]) -> Draw:
    """Draw a command, one of its options, and a value."""
    command = stream.choice(list(OPTIONS))
    option, kind = stream.choice(list(OPTIONS[command].items()))
    if kind in PATHS_IN:
        value, is_wrong = stream.choice(paths_in(kind)), True
    elif kind in PATHS_OUT:
        value, is_wrong = stream.choice(paths_out(kind)), True
        if stream.random() < 0.2:
            suffix = "" if kind == "new folder" else kind
            value, is_wrong = stream.choice([f"~/out{suffix}", f"deep/er/out{suffix}", f"é ü/o ut{suffix}"]), False
    else:
        is_wrong = stream.random() < 0.75
        value = stream.choice((WRONG if is_wrong else ODD)[kind])
    words = [word.format(**fixtures) for word in command.split()]
    return Draw(f"{command} {option}={value[:40]}", command_of(with_option(words, option, value)), is_wrong,
                may_last=option[2:] in ENDLESS)  # fmt: skip


def with_option(words: list[str], option: str, value: str) -> list[str]:
    """Return a command line with another value of an option, or of a word without one."""
    if option in words:
        place = words.index(option) + 1
        return [*words[:place], value, *words[place + 1 :]]
    if option in ("--features", "--runs") or (option, words[0]) == ("--folder", "init"):
        return [words[0], value, *words[2:]]
    if option == "--root" and words[1] == "check":
        return [*words[:2], value]
    return [*words, f"{option}={value}"]


def draw_of_setting(stream: random.Random, fixtures: dict[str, str]) -> Draw:
    """Draw a setting of a fit, and a strange value."""
    name, value = stream.choice(SETTINGS), stream.choice(STRANGE)
    words = [word.format(**fixtures) for word in ["fit", "--config", "{config}", "--run_dir", "{new}"]]
    return Draw(f"fit --{name}={value}", command_of([*words, f"--{name}={value}"]), False, may_last=name in ENDLESS)


def command_of(words: list[str]) -> Callable[[], int]:
    """Return the call of a command."""
    return lambda: run_command(words)


def pictures() -> dict[str, tuple[Any, bool]]:
    """Return pictures for ``embed`` by name, and whether they are wrong."""
    plain = np.random.default_rng(0).integers(0, 255, (20, 10, 3), dtype=np.uint8)
    image = Image.fromarray(plain)
    good = {mode: (image.convert(mode), False) for mode in ("RGB", "L", "1", "P", "LA", "RGBA", "CMYK", "HSV", "YCbCr")}
    deep = Image.fromarray(plain[..., 0].astype(np.uint16) * 257)
    wrong: dict[str, Any] = {
        "no picture": None, "a number": 3, "an array of floats": plain.astype(np.float64),
        "a NaN": torch.full((1, 3, 16, 8), torch.nan), "infinity": torch.full((1, 3, 16, 8), torch.inf),
        "bytes beyond": torch.full((1, 3, 16, 8), 1e30), "two dimensions": torch.zeros(16, 8),
        "one channel": torch.zeros(2, 1, 16, 8), "no images": torch.zeros(0, 3, 16, 8),
        "integers": torch.zeros(1, 3, 16, 8, dtype=torch.int64),
        "no width": Image.new("RGB", (0, 5)), "floats": Image.fromarray(np.full((9, 9), np.nan, dtype=np.float32)),
        "an empty path": "", "no file": "nowhere.png", "a folder": "folder", "a pipe": "pipe",
        "not a picture": "binary",
        "a home": "~nobody9/x.png", "a list with a hole": [image, None],
    }  # fmt: skip
    return (
        good
        | {"I;16": (deep, False), "an empty list": ([], False)}
        | {name: (value, True) for name, value in wrong.items()}
    )


def draw_of_function(stream: random.Random, fixtures: dict[str, str]) -> Draw:
    """Draw a call of Python: a run that is opened, or a picture that is embedded."""
    kind = stream.choice(["load_model", "load_run", "embed", "device", "size", "batch_size"])
    if kind in ("load_model", "load_run"):
        value = stream.choice([*paths_in("run"), 3, None, b"x", "a\0b"])
        return Draw(f"{kind}({value!r:.40})", call_of(lambda: getattr(fedsim, kind)(value)), True)
    if kind == "embed":
        name, (picture, is_wrong) = stream.choice(list(pictures().items()))
        return Draw(
            f"embed({name})", call_of(lambda: judged(fedsim.load_model(fixtures["run"]).embed(picture))), is_wrong
        )
    wrong: dict[str, list[Any]] = {"device": [*WRONG["device"], 3, None, -1],
             "batch_size": [0, -1, 1.5, "x", True, None, float("nan"), 2**70],
             "size": [(0, 8), (16,), (16, 8, 3), 5, "16x8", (16.5, 8), (-16, 8), (True, True), (float("nan"), 8),
                      (2**70, 8)]}  # fmt: skip
    value = stream.choice(wrong[kind])
    options = {} if kind == "batch_size" else {kind: value}
    batch_size = value if kind == "batch_size" else 64

    def call() -> None:
        judged(fedsim.load_model(fixtures["run"], **options).embed(ONE_IMAGE, batch_size))

    is_wrong = value != 2**70
    return Draw(f"load_model({kind}={value!r})", call_of(call), is_wrong)


def judged(features: torch.Tensor) -> None:
    """Fail on features that are no numbers."""
    assert bool(features.isfinite().all()), "features are not finite"


def call_of(function: Callable[[], object]) -> Callable[[], int]:
    """Return a call that ends as a command would."""

    def call() -> int:
        try:
            function()
        except FedSimError as error:
            sys.stderr.write(f"fedsim: error: {error}\n")
            return 2
        return 0

    return call


# -- running -----------------------------------------------------------------------------------------------------------


def begin(draw: Draw, folder: Path, as_other: bool) -> int:
    """Start a draw in a process of its own; return its number."""
    if pid := os.fork():
        return pid
    code = 70
    try:
        os.setsid()
        os.chdir(folder)
        for descriptor, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(folder.with_suffix(f".{name}"), os.O_CREAT | os.O_WRONLY, 0o666), descriptor)
        os.environ["HOME"] = str(folder / "home")
        if as_other:
            drop_rights()
        code = int(draw.run() or 0)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def drop_rights() -> None:
    """Take root's rights from this process: it stays the owner of its files, and cannot open those of others."""
    header, rights = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()  # Linux: capset(2), version 3
    if ctypes.CDLL(None, use_errno=True).capset(header, rights):
        raise OSError(ctypes.get_errno(), "capset")


def verdict(draw: Draw, code: int | None, folder: Path, was: set[str]) -> str:
    """Return how a draw ended; WRONG begins the ends that must not be."""
    err = folder.with_suffix(".err").read_text(errors="replace")
    if code is None:
        return "lasts, as asked" if draw.may_last else "WRONG: hangs"
    if "Traceback (most recent call last)" in err or code not in (0, 1, 2):
        return f"WRONG: traceback or code {code}"
    strangers = sorted(name for name in names_in(folder.parent) - was if re.match(r"[^/]*/?[~$]", name))
    if strangers:
        return "WRONG: a folder called ~ or $"
    if code == 0:
        return "WRONG: taken" if draw.is_wrong else "taken"
    lines = [line for line in err.splitlines() if line.startswith("fedsim: error: ")]
    if code == 2 and len(lines) != 1:
        return f"WRONG: {len(lines)} lines"
    return "refused in one line" if code == 2 else "ended with code 1 and a line"


def names_in(folder: Path) -> set[str]:
    """Return the names of what is in a folder and one level below."""
    return {str(path.relative_to(folder)) for pattern in ("*", "*/*") for path in folder.glob(pattern)}


def ends(draws: Iterator[tuple[Draw, bool]], outer: Path, jobs: int) -> Iterator[tuple[Draw, str, str]]:
    """Run draws, some at a time; yield each with its end and its last line."""
    running: dict[int, tuple[Draw, Path, float, set[str]]] = {}
    number = 0
    while True:
        while len(running) < jobs and (drawn := next(draws, None)):
            draw, as_other = drawn
            folder = outer / f"{number}" / "work"
            folder.mkdir(parents=True)
            folder.parent.chmod(0o777)
            furnish(folder)
            if as_other:
                os.chown(folder / "locked", OTHER_USER, OTHER_USER)
            was = names_in(folder.parent)
            running[begin(draw, folder, as_other)] = draw, folder, time.monotonic(), was
            number += 1
        if not running:
            return
        time.sleep(0.01)
        for pid, (draw, folder, start, was) in list(running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            late = time.monotonic() - start > LIMIT
            if not ended and not late:
                continue
            if not ended:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            code = None if not ended else os.waitstatus_to_exitcode(status)
            end = verdict(draw, code, folder, was)
            err = folder.with_suffix(".err").read_text(errors="replace").strip().splitlines()
            yield draw, end, err[-1][:300] if err else ""
            shutil.rmtree(folder.parent, ignore_errors=True)
            del running[pid]


def make_fixtures(folder: Path) -> dict[str, str]:
    """Make data sets, configs, a finished run, its features, and generators; return their places."""
    for town in range(2):
        make_town(folder / "tree" / f"town{town}", town)
    make_town(folder / "split", 2)
    make_scenes(folder / "scenes")
    (folder / "fit.yaml").write_text(FIT)
    source = f"{{class_path: MarketFolders, init_args: {{root: {folder / 'tree'}}}}}"
    (folder / "files.yaml").write_text(re.sub(r"(?<=source: ).*", source, FIT))
    run, config = folder / "run", str(folder / "fit.yaml")
    must_end(["fit", "--config", config, "--run_dir", str(run)])
    must_end(["predict", "--ckpt_path", str(run), "--run_dir", str(folder / "predicted")])
    generators = str(folder / "generators")
    must_end(
        ["augment", "fit", "--config", config, "--device", "cpu", *SMALL_GENERATOR.split(), "--output", generators]
    )
    features = next(iter(sorted((folder / "predicted").rglob("*.npz"))))
    os.system(f"chmod -R a+rX {folder}")
    places = {name: str(folder / name) for name in ("tree", "split", "scenes", "run", "generators")}
    return {**places, "config": config, "files": str(folder / "files.yaml"), "features": str(features), "new": "new"}


def make_town(folder: Path, seed: int) -> None:
    """Write a data set in Market-1501's layout: eight people, two cameras."""
    stream, tests = np.random.default_rng(seed), range(5, 9)
    for part, people in (("bounding_box_train", range(1, 5)), ("query", tests), ("bounding_box_test", tests)):
        (folder / part).mkdir(parents=True)
        for person, camera in itertools.product(people, (1, 2)):
            pixels = stream.integers(0, 255, (16, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / part / f"{person:04d}_c{camera}s1_{camera:06d}_00.png")


def make_scenes(folder: Path) -> None:
    """Write a person in two pictures as CUHK-SYSU's owners do: annotation/test/train_test/TestG50.mat, Image/SSM."""
    fields = [(name, object) for name in ("imname", "idlocate", "ishard")]
    query, gallery = (np.array([[(name, np.array([[1, 2, 8, 16]]), 0)]], dtype=fields) for name in ("s1.jpg", "s2.jpg"))
    (folder / "annotation" / "test" / "train_test").mkdir(parents=True)
    (folder / "Image" / "SSM").mkdir(parents=True)
    rows = np.array([[(query, gallery)]], dtype=[("Query", object), ("Gallery", object)])
    savemat(folder / "annotation" / "test" / "train_test" / "TestG50.mat", {"TestG50": rows})
    for name in ("s1.jpg", "s2.jpg"):
        Image.new("RGB", (20, 40)).save(folder / "Image" / "SSM" / name)


def must_end(words: list[str]) -> None:
    """Run a command in a process of its own; raise SystemExit unless it ends with code 0."""
    if pid := os.fork():
        if os.waitpid(pid, 0)[1] != 0:
            raise SystemExit(f"fails without a drawn value: fedsim {shlex.join(words)}")
        return
    os._exit(run_command(words))


def check_commands(folder: Path, fixtures: dict[str, str]) -> None:
    """Run each command without a drawn value."""
    before = Path.cwd()
    for number, command in enumerate(OPTIONS):
        place = folder / f"plain{number}"
        place.mkdir()
        os.chdir(place)
        must_end([word.format(**fixtures) for word in command.split()])
    os.chdir(before)


def main() -> int:
    """Draw, print a table and what slipped through, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--number", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    outer = Path(tempfile.mkdtemp(prefix="drawn-values-"))
    outer.chmod(0o755)
    (outer / "fixtures").mkdir()
    fixtures = make_fixtures(outer / "fixtures")
    check_commands(outer, fixtures)
    stream, kinds = random.Random(args.seed), [draw_of_option, draw_of_option, draw_of_setting, draw_of_function]
    can_be_other = os.geteuid() == 0
    draws = (
        (stream.choice(kinds)(stream, fixtures), can_be_other and stream.random() < 0.5) for _ in range(args.number)
    )
    counts, wrong = Counter[str](), list[tuple[str, str, str]]()
    for done, (draw, end, line) in enumerate(ends(draws, outer, args.jobs), 1):
        counts[end] += 1
        if end.startswith("WRONG"):
            wrong.append((draw.title, end, line))
            print(f"{draw.title}\n    {end}: {line}", file=sys.stderr, flush=True)
        if done % 100 == 0:
            print(f"{done} of {args.number}", file=sys.stderr, flush=True)
    print(tabulate(sorted(counts.items()), ["end", "draws"], tablefmt="github"))
    shutil.rmtree(outer, ignore_errors=True)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
