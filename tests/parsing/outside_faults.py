"""Faults from outside a config, drawn at random: in variables, command lines, run folders and checkpoints."""

import copy
import itertools
import json
import random

import torch
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
    '{"a": ' * 70 + "1" + "}" * 70, f"a: &a [1,2,3,4,5,6,7,8,9]\n{_TENFOLD}",
)  # fmt: skip
"""texts that expand without end, or are too deep"""
WRONG = (None, True, -1, 0.5, float("nan"), float("inf"), "x", [], {}, [[1]], {"x": 1}, 10**400)
"""plain values, of which each field has at most some kinds"""
COMMANDS = (
    "fit", "validate", "test", "predict", "describe", "doctor", "export", "report", "init", "sweep", "rank", "list",
    "completion", "papers", "data check", "data preview", "data prepare", "data manifest", "data splits", "data cut",
    "data convert", "augment fit", "augment preview", "augment write",
)  # fmt: skip
CONTRADICTIONS = (
    ("--model.client.optimizer", "torch.optim.LBFGS"), ("--model.client.optimizer", "torch.optim.SparseAdam"),
    ("--model.server_optimizer", "torch.optim.LBFGS"), ("--save_ranking", "true"), ("--save_maps", "true"),
    ("--ckpt_path", ""), ("--data.unseen", "[nowhere]"), ("--model.clients", "{nowhere: {batch_size: 4}}"),
    ("--trainer.barebones", "true"), ("--trainer.precision", "16-mixed"), ("--trainer.limit_train_batches", "1"),
    ("--data.public", "nowhere"), ("--model.bn_stats", "recalibrate"), ("--model.aggregation", "Krumm"),
)  # fmt: skip
"""options that contradict every config of the tests, alone or in pairs"""


def draw_variable(number):
    """A variable and a value that it cannot have."""
    rng = random.Random(f"variable {number}")
    name = rng.choice(sorted(VARIABLES))
    return name, rng.choice(VARIABLES[name])


def draw_words(number):
    """The words of a command that cannot be run."""
    rng = random.Random(f"words {number}")
    command = rng.choice(COMMANDS).split()
    value = rng.choice([*"", " ", *TEXTS[:4], *YAML, "/nowhere/at/all", "a" * 300, "{", "~/nowhere", "\udcff"])
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
