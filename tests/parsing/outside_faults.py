"""Faults from outside a config, drawn at random: in variables, command lines, run folders and checkpoints."""

import copy
import csv
import io
import itertools
import json
import random

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

TEXTS = ("x", "-1", "1.5", "1e9", "0x1", "99999999999999999999", "٣", "None", "\udcff", "a" * 300)
VARIABLES = {
    "RANK": TEXTS, "LOCAL_RANK": TEXTS, "NODE_RANK": TEXTS, "GROUP_RANK": TEXTS, "WORLD_SIZE": (*TEXTS, "0"),
    "LOCAL_WORLD_SIZE": (*TEXTS, "0"), "GROUP_WORLD_SIZE": (*TEXTS, "0"),
    "MASTER_PORT": (*TEXTS, "0", "65536", "99999"),
    "SLURM_PROCID": TEXTS, "SLURM_NTASKS": (*TEXTS, "0"), "TORCHELASTIC_MAX_RESTARTS": TEXTS,
}  # fmt: skip
"""variable -> values that none can have"""
_TENFOLD = "\n".join(f"{y}: &{y} [{','.join([f'*{x}'] * 9)}]" for x, y in itertools.pairwise("abcdefghi"))
YAML = (
    "a: &a [*a]", "a: &a {b: {c: *a}}", "[" * 60 + "]" * 60, "- " * 100 + "1", "[" * 5000,
    "a: " + "7" * 400, "[-" + "1_" * 2500 + "0]",
    '{"a": ' * 70 + "1" + "}" * 70, f"a: &a [1,2,3,4,5,6,7,8,9]\n{_TENFOLD}",
)  # fmt: skip
"""texts that expand without end, are too deep, or have a number beyond all others"""
WRONG = (None, True, -1, 0.5, float("nan"), float("inf"), "x", [], {}, [[1]], {"x": 1}, 10**400)
"""plain values, of which each field has at most some kinds"""
COMMANDS = (
    "fit", "validate", "test", "predict", "describe", "doctor", "export", "report", "init", "slurm", "sweep", "rank",
    "list", "completion", "papers", "data check", "data preview", "data prepare", "data manifest", "data splits",
    "data cut", "data convert", "augment fit", "augment preview", "augment write",
)  # fmt: skip
CONTRADICTIONS = (
    ("--model.client.optimizer", "torch.optim.LBFGS"), ("--model.client.optimizer", "torch.optim.SparseAdam"),
    ("--model.server_optimizer", "torch.optim.LBFGS"), ("--save_ranking", "true"), ("--save_maps", "true"),
    ("--ckpt_path", ""), ("--data.unseen", "[nowhere]"), ("--model.clients", "{nowhere: {batch_size: 4}}"),
    ("--trainer.barebones", "true"), ("--trainer.precision", "16-mixed"), ("--trainer.limit_train_batches", "1"),
    ("--data.public", "nowhere"), ("--model.bn_stats", "recalibrate"), ("--model.aggregation", "Krumm"),
)  # fmt: skip
"""options that contradict every config of the tests, alone or in pairs"""

COLUMNS = ("path", "pid", "cam", "dataset", "client", "part")
ROWS = (
    *((f"a{i}.png", f"{i // 2 + 1}", f"{i % 2}", "town", "anna", "train") for i in range(8)),
    *((f"b{i}.png", f"{i // 2 + 1}", f"{i % 2}", "port", "ben", "train") for i in range(8)),
    *((f"q{i}.png", f"{i + 8}", "0", name, "", "query") for name in ("town", "port", "new") for i in range(3)),
    *((f"g{i}.png", f"{i + 8}", "1", name, "", "gallery") for name in ("town", "port", "new") for i in range(3)),
)
"""a manifest of two clients and an unseen data set, whose images are those of :func:`write_people`"""
NO_NUMBERS = (
    "", " ", "x", "1.5", "1e3", "0x1", "--1", "+1", "\u0663", "\u00b2", "nan", "None", "1 2", "9" * 19, "-2", "-9999",
    "9" * 5000, "1\0", "true",
)  # fmt: skip
NO_IMAGES = (
    "", "missing.png", ".", "..", "../../../../../../../../etc/passwd", "/etc/passwd", "/dev/zero", "/dev/null",
    "~/a0.png", "$HOME/a0.png", "file:a0.png", "https://a.b/a0.png", "a0.png\0", "\0", "a" * 300 + ".png", "a/" * 3000,
    "m.csv", "\udcff.png", "a0.png\n", " a0.png",
)  # fmt: skip
ODD_NAMES = (
    "..", ".", "../../x", "/tmp/x", "a/b", "a\\b", "a\nb", "a\rb", "\x1b[2Jx", "a\0b", "\udcff", "\u202etac",
    "a" * 300, "a" * 140_000, "-", "--run_dir", "{a: 1}", "*", "%s%n", "<script>", " ", "null", "1", "town ",
    "\ud55c\uad6d", "CON", "a.b", "a,b;c", "a:b",
)  # fmt: skip
"""names of clients and data sets: each either stays a name, or is refused"""
NO_PARTS = (
    "", "Train", "test", "query -1", "query 0 0", "gallery 99999", "query \u0663", "val", "val_query ", "train\0",
    "x" * 9999,
)  # fmt: skip


def draw_variable(number):
    """A variable and a value that it cannot have."""
    rng = random.Random(f"variable {number}")
    name = rng.choice(sorted(VARIABLES))
    return name, rng.choice(VARIABLES[name])


def draw_words(number):
    """The words of a command that cannot be run."""
    rng = random.Random(f"words {number}")
    command = rng.choice(COMMANDS).split()
    value = rng.choice(
        [*"", " ", *TEXTS[:4], *YAML, "/nowhere/at/all", "a" * 300, "{", "~/nowhere", "\udcff", "\udcff" * 60]
    )
    option = rng.choice(["--fault", "--config", "--run_dir.x", "--model.fault", "-q", "--trainer", "--help.x"])
    return [*command, *rng.choice([[option, value], [f"{option}={value}"], [option]])]


def draw_pair(number):
    """Two contradicting options."""
    rng = random.Random(f"pair {number}")
    return [word for option in rng.sample(CONTRADICTIONS, 2) for word in option]


def damage_summary(content, number):
    """Return a summary with one wrong value, or without one of its fields."""
    rng = random.Random(f"summary {number}")
    content = copy.deepcopy(content)
    name = rng.choice(["finished", "method", "fingerprint", "seed", "rounds", "clients", "unseen", "primary", "final"])
    if rng.random() < 0.3:
        del content[name]
        return json.dumps(content)
    if name == "final" and rng.random() < 0.5:
        content["final"][rng.choice(["metrics", "round"])] = rng.choice(["x", [1], True, -1, None])
        return json.dumps(content)
    kept = type(content[name])
    values = [value for value in WRONG if type(value) is not kept and not (name == "final" and value is None)]
    content[name] = rng.choice(values)
    return json.dumps(content).replace("NaN", rng.choice(["NaN", "1e999"]))


def places(value, path=()):
    """Every place in nested dictionaries and lists."""
    if path:
        yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*path, key))


def damage_checkpoint(version, number):
    """Change one value of a checkpoint, its shape or type, or remove it; return the place."""
    rng = random.Random(f"checkpoint {number}")
    if rng.random() < 0.3:
        return damage_states(version / "clients-0-0.safetensors", rng)
    file = version / "global.ckpt"
    checkpoint = torch.load(file, weights_only=True)
    # equal parts of Lightning's and fedsim's values: of their lists of numbers there are many
    top = rng.choice(["fedsim", "loops", "callbacks", "state_dict", "optimizer_states", "epoch", "global_step"])
    path = rng.choice(list(places({top: checkpoint[top]})))
    holder = checkpoint
    for key in path[:-1]:
        holder = holder[key]
    value = holder[path[-1]]
    if isinstance(holder, dict) and rng.random() < 0.4:
        del holder[path[-1]]
    elif isinstance(value, torch.Tensor):
        holder[path[-1]] = rng.choice([value.flatten()[:0], value.to(torch.float64), value.to(torch.int32), "x"])
    else:
        holder[path[-1]] = rng.choice([wrong for wrong in WRONG[:-1] if wrong != value])
    torch.save(checkpoint, file)
    return path


def damage_states(file, rng):
    """Change the shape or dtype of one private tensor, or remove or rename it."""
    tensors = load_file(file)
    name = rng.choice(sorted(tensors))
    tensor = tensors.pop(name)
    kind = rng.choice(["shape", "longer", "dtype", "removed", "renamed"])
    if kind == "shape":
        tensors[name] = tensor.flatten()[:1].clone()
    elif kind == "longer":
        tensors[name] = torch.cat([tensor.flatten(), torch.zeros(1)])
    elif kind == "dtype":
        tensors[name] = tensor.to(rng.choice([torch.int32, torch.float64, torch.float16]))
    elif kind == "renamed":
        tensors[f"{name}x"] = tensor
    save_file(tensors, file)
    return kind, name


def write_people(folder):
    """Write the images of a manifest's rows."""
    rng = np.random.default_rng(0)
    for name in {row[0] for row in ROWS}:
        Image.fromarray(rng.integers(0, 256, (16, 8, 3), dtype=np.uint8)).save(folder / name)


def draw_manifest(number):
    """Return the kind of a manifest's fault, its bytes, and whether a fit may do without a refusal."""
    rng = random.Random(f"manifest {number}")
    kind = rng.choice(sorted(_MANIFESTS))
    content, may_fit = _MANIFESTS[kind](rng, [list(COLUMNS), *map(list, ROWS)])
    return kind, content if isinstance(content, bytes) else as_csv(content), may_fit


def as_csv(rows, delimiter=",", end="\n", encoding="utf-8"):
    """Return rows as the bytes of a CSV file."""
    text = io.StringIO()
    csv.writer(text, delimiter=delimiter, lineterminator=end).writerows(rows)
    return text.getvalue().encode(encoding, "surrogateescape")


def _set(rng, rows, column, values, may_fit=False):
    """Give one row another value in a column."""
    rng.choice(rows[1:])[column] = rng.choice(values)
    return rows, may_fit


def _column(rng, rows):
    """Remove, repeat, exchange or rename a column, in the first line alone or in all lines."""
    column, other = rng.sample(range(len(COLUMNS)), 2)
    change = rng.choice([
        lambda row: row[:column] + row[column + 1 :], lambda row: [*row, row[column]],
        lambda row: [row[other] if i == column else value for i, value in enumerate(row)],
        lambda row: [*row[:column], row[column].upper() + " ", *row[column + 1 :]], lambda row: [*row, ""],
    ])  # fmt: skip
    return [change(row) if i == 0 or rng.random() < 0.5 else row for i, row in enumerate(rows)], False


def _lines(rng, rows):
    """Cut, extend or empty one line, or write two manifests one after the other."""
    place = rng.randrange(1, len(rows))
    rows[place] = rng.choice([[], rows[place][:3], [*rows[place], "x"], rows[0], [*rows[place]] * 2, [""] * 6])
    return rows, False


def _twice(rng, rows):
    """Repeat lines, as they are, with another identity, or in a test."""
    for row in rng.sample(rows[1:], rng.randint(1, 3)):
        change = {1: "77"} if rng.random() < 0.3 else {4: "", 5: "gallery"} if row[4] and rng.random() < 0.3 else {}
        rows.insert(rng.randrange(1, len(rows)), [change.get(i, value) for i, value in enumerate(row)])
    return rows, False


def _bytes(rng, rows):
    """Change single bytes of the file, or cut it off."""
    content = bytearray(as_csv(rows))
    for _ in range(rng.randint(1, 4)):
        content[rng.randrange(len(content))] = rng.choice([0, 10, 13, 34, 44, 59, 255, rng.randrange(256)])
    return bytes(content[: rng.randrange(len(content)) if rng.random() < 0.3 else None]), True


def _saved_by(rng, rows):
    """Save it as spreadsheets and other systems do: with a mark, other ends of lines, other encodings or delimiters."""
    mark, end = rng.choice([b"", b"\xef\xbb\xbf"]), rng.choice(["\n", "\r\n", "\r", "\n\n"])
    encoding = rng.choice(["utf-8", "utf-8", "latin-1", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-7", "cp037"])
    delimiter = rng.choice([",", ",", ";", "\t", "|"])
    return mark + as_csv(rows, delimiter, end, encoding), delimiter == "," and encoding in ("utf-8", "latin-1", "utf-7")


def _without(rng, rows):
    """Leave out all rows of a part, a client or a data set."""
    column = rng.choice([3, 4, 5])
    value = rng.choice(rows[1:])[column]
    return [rows[0], *(row for row in rows[1:] if row[column] != value)], True


def _renamed(rng, rows):
    """Give a client or data set an odd name, in all of its rows or in one."""
    column, name = rng.choice([3, 4]), rng.choice(ODD_NAMES)
    value = rng.choice([row[column] for row in rows[1:] if row[column]])
    named = [row for row in rows[1:] if row[column] == value]
    for row in named if rng.random() < 0.8 else rng.sample(named, 1):
        row[column] = name
    return rows, True


_MANIFESTS = {
    "column": _column,
    "line": _lines,
    "twice": _twice,
    "bytes": _bytes,
    "saved by": _saved_by,
    "without": _without,
    "renamed": _renamed,
    "empty": lambda rng, _: (rng.choice([b"", b"\n", b"\0", b"\xef\xbb\xbf", as_csv([COLUMNS])]), False),
    "another file": lambda rng, _: (rng.randbytes(rng.choice([1, 100, 5000])), False),
    "pid": lambda rng, rows: _set(rng, rows, 1, NO_NUMBERS),
    "cam": lambda rng, rows: _set(rng, rows, 2, (*NO_NUMBERS, "-1")),
    "path": lambda rng, rows: _set(rng, rows, 0, NO_IMAGES),
    "part": lambda rng, rows: _set(rng, rows, 5, NO_PARTS),
    "reserved": lambda rng, rows: _set(rng, rows, 3, ("", "seen", "unseen")),
    "huge": lambda rng, rows: _set(rng, rows, rng.randrange(6), ("a" * 200_000, "1" * 200_000, '"' * 200_001)),
}
"""kind -> a function of a random generator and the rows; it returns rows or bytes, and whether a fit may go on"""
