"""Faults of configs, drawn at random: where they are, and which values would be no fault."""

import copy
import math
import random
from dataclasses import dataclass
from typing import Any

import yaml

BASES = {
    "identities": """
seed_everything: 0
trainer: {max_epochs: 3, accelerator: cpu, devices: 1, enable_progress_bar: false}
model:
  method: {class_path: FedPav, init_args: {weighting: cdw, distillation: {epochs: 1}}}
  backbone: {class_path: SmallCNN, init_args: {width: 8}}
  neck: {kind: linear, dim: 16}
  client:
    batch_size: 8
    sampler: identity
    grad_clip: 5.0
    head_lr: 0.1
    local_steps: 9
    schedule: {kind: step, step: 2, drops: 1}
    long_round: {round: 2, local_epochs: 2}
    optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.05, momentum: 0.9}}
  clients: {town0: {batch_size: 4, local_epochs: 2, head_lr: 0.1, backbone: {class_path: SmallCNN}}}
  objective: {triplet: 0.5}
  selection: {class_path: RandomFraction, init_args: {fraction: 0.5}}
  availability: {drop: 0.1, straggle: 0.1}
  privacy: {class_path: WhiteNoise, init_args: {beta: 0.01}}
  hardware: {down_mbit: 10.0, up_mbit: 1.0, images_per_second: 100.0, clients: {town1: {latency_ms: 3.0}}}
  server_optimizer: {class_path: FedAdam}
data:
  source: {class_path: SyntheticReID, init_args: {clients: 3, unseen: 1, scale: 0.2}}
  unseen: [town2]
  public: new0
  max_images: 1000
  max_identities: 100
  test_size: [32, 16]
  size: [32, 16]
  augmentation: {pad: 2, flip: 0.5, crop: [32, 16]}
  limit_client_batches: 0.5
""",
    "clusters": """
seed_everything: 0
trainer: {max_epochs: 3, accelerator: cpu, devices: 1, enable_progress_bar: false}
model:
  method: {class_path: FedKLPR}
  backbone: {class_path: CifarResNet}
  neck: {kind: bnneck}
  client: {batch_size: 8, cluster: {k1: 5, k2: 2}, optimizer: {class_path: torch.optim.Adam, init_args: {lr: 0.01}}}
  clients: {town0: {cluster: {k1: 4, eps: 0.4}}}
  selection: {class_path: UCB}
  evaluation: {layer: pool, flip: true}
data:
  source: [{class_path: SyntheticReID, init_args: {clients: 2, unseen: 1, scale: 0.2}}]
  val: first_image
  size: [32, 16]
""",
    "robust": """
seed_everything: 0
trainer:
  max_epochs: 3
  accelerator: cpu
  devices: 1
  strategy: {class_path: fedsim.strategy.FederatedStrategy, init_args: {timeout: "0:10:00"}}
model:
  method: {class_path: FedAvg}
  backbone: {class_path: ResNet, init_args: {depth: 18}}
  client: {batch_size: 8, bottom_up: {merge: 0.1}}
  adaptive_backbones: null
  aggregation: {class_path: TrimmedMean, init_args: {trim: 0.2}}
  attack: {class_path: GaussianNoise, init_args: {attackers: 0.5, start: 2, scale: 2.0}}
data:
  source: {class_path: SyntheticReID, init_args: {clients: 3, unseen: 1, scale: 0.2}}
  partition: dirichlet
  parts: 2
  val: none
  size: [64, 32]
""",
}
"""Configs with every section. The parser completes them by all fields with their defaults."""

HUGE = 10**15
MAY_BE_NULL = {
    "cluster", "crop", "default_root_dir", "drop_partial", "drops", "enable_progress_bar", "gradient_clip_algorithm",
    "hardware", "head_lr", "local_steps", "max_epochs", "max_identities", "min_steps", "process_group_backend",
    "profiler", "sampler", "privacy", "attack", "aggregation", "long_round", "bottom_up", "clients", "unseen", "public",
    "max_images", "test_size", "limit_client_batches", "grad_clip", "batch_size", "backbone", "local_epochs",
    "distillation", "server_optimizer", "town0", "callbacks", "logger", "images_per_second", "latency_ms", "k1", "eps",
    "limit_val_batches", "limit_train_batches", "limit_test_batches", "limit_predict_batches", "deterministic",
    "benchmark", "val_check_interval", "log_every_n_steps", "enable_model_summary",
    "enable_checkpointing", "num_sanity_val_steps", "precision", "weights_only", "ckpt_path", "run_dir",
}  # fmt: skip
"""Fields that the configs below set, and that null would leave out."""
MAY_BE_NEGATIVE = {
    "junk_pids",  # identities of data sets
    "seed",  # of drawn data: it is a name; that of training is seed_everything
    "dampening",  # of torch's SGD, which adds (1 - dampening) of the gradient to its momentum
}
"""Fields of which torch or fedsim makes something of any number."""


@dataclass(frozen=True)
class Fault:
    """One fault of one config."""

    base: str
    kind: str
    path: tuple[Any, ...]
    """keys and numbers of a list, from the outside"""
    text: str
    """the whole config with the fault, in YAML"""

    @property
    def may_be_meant(self) -> bool:
        """Whether the value may be right: of some fields null, 0, a large number or a text is."""
        field = next(key for key in reversed(self.path) if isinstance(key, str))
        if self.kind == "null":
            return field in MAY_BE_NULL
        if self.kind == "infinity":
            return "hardware" in self.path
        if self.kind == "negative":
            return field in MAY_BE_NEGATIVE
        return self.kind in ("zero", "huge", "scalar", "text")

    @property
    def fields(self) -> list[str]:
        """Names of which a refusal has at least one: of the field, or of the one that holds it."""
        names = [key for key in self.path if isinstance(key, str) and key not in ("class_path", "init_args")]
        if "clients" in names and len(names) == names.index("clients") + 2:  # an entry, whose name is a client's
            names.pop()
        return names[-1:]

    def __str__(self) -> str:
        return f"{self.base}:{'.'.join(map(str, self.path))}:{self.kind}"


class Twice(dict):
    """A mapping in which the first key stands twice."""


class Dumper(yaml.SafeDumper):
    """Writes each value in full, also where it occurs twice."""

    def ignore_aliases(self, data):
        return True


def _represent_twice(dumper, data):
    return dumper.represent_mapping("tag:yaml.org,2002:map", [*data.items(), next(iter(data.items()))])


Dumper.add_representer(Twice, _represent_twice)


def draw(number, bases):
    """Return fault ``number`` of ``bases``, name -> resolved config; the same number draws the same fault."""
    rng = random.Random(number)
    name = rng.choice(sorted(bases))
    config = copy.deepcopy(bases[name])
    path = rng.choice(list(paths_of(config)))
    holder = config
    for key in path[:-1]:
        holder = holder[key]
    kind, path = spoil(holder, path, rng)
    return Fault(name, kind, path, yaml.dump(config, Dumper=Dumper, sort_keys=False))


def paths_of(value, path=()):
    """Yield where something can be wrong: every field, section and class."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from paths_of(inner, (*path, key))


def spoil(holder, path, rng):
    """Put a fault at ``path``, whose last key is one of ``holder``; return its kind, and where it is now."""
    key, value = path[-1], holder[path[-1]]
    kind = rng.choice(kinds_for(key, value))
    wrong = {
        "null": None, "nan": math.nan, "infinity": math.inf, "negative": -3 if isinstance(value, int) else -0.5,
        "zero": 0 if isinstance(value, int) else 0.0, "huge": HUGE, "text": "fault", "empty": "", "list": [[1]],
        "mapping": {"fault": 1}, "scalar": 5, "class": "Faultless", "dotted": "nowhere.at.All",
    }  # fmt: skip
    if kind == "unknown key":
        value["fault"] = 1
        path = (*path, "fault")
    elif kind == "misspelt key":
        old = rng.choice([name for name in value if len(str(name)) > 3])
        new = misspell(old, rng)
        items = [(new if name == old else name, inner) for name, inner in value.items()]
        value.clear()
        value.update(items)
        path = (*path, new)
    elif kind == "twice":
        holder[key] = Twice(value)
        path = (*path, next(iter(value)))
    elif kind == "misspelt class":
        holder[key] = misspell(value, rng)
    else:
        holder[key] = wrong[kind]
    return kind, path


def kinds_for(key, value):
    """Kinds of faults that a value can have."""
    if key == "class_path":
        return ["class", "dotted", "misspelt class", "scalar", "null", "empty", "list"]
    if isinstance(value, dict):
        some = ["misspelt key"] if any(len(str(name)) > 3 for name in value) else []
        return [*some, "unknown key", "scalar", "text", "null", "list", "empty", *(["twice"] if value else [])]
    if isinstance(value, bool):
        return ["text", "list", "mapping", "nan", "null", "empty", "huge"]
    if isinstance(value, int | float):
        return ["text", "list", "mapping", "nan", "infinity", "negative", "zero", "huge", "null", "empty"]
    kinds = ["scalar", "list", "mapping", "nan", "empty", "text"]
    return kinds if value is None else [*kinds, "null"]


def misspell(name, rng):
    """Leave a letter out."""
    at = rng.randrange(1, len(name) - 1)
    return name[:at] + name[at + 1 :]
