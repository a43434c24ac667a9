"""``fedsim init FOLDER``: writes a commented config for a folder of data sets."""

from __future__ import annotations

import logging
import math
from pathlib import Path

from fedsim.cli.commands import call
from fedsim.core.errors import ConfigError, DataError
from fedsim.core.files import replacing
from fedsim.core.names import check_text, printable
from fedsim.core.nvidia import visible_gpus
from fedsim.data.images import Domain, Split
from fedsim.data.market import MarketFolders
from fedsim.parsing.documents import as_yaml

log = logging.getLogger(__name__)

_LARGE = 2000  # images from which on the config has a pretrained network, and images of the papers' size
_SIZE = (256, 128)
_CONFIG = """\
# {clients} of {root}; {unseen}.
#   fedsim describe --config {output}
#   fedsim fit --config {output}
seed_everything: 0
trainer:
  max_epochs: {rounds}               # communication rounds
  check_val_every_n_epoch: {every}    # rounds between two evaluations
  accelerator: auto
  devices: 1                   # ranks; any number gives the same bits
{gpu_trainer}model:
  method: FedPav               # fedsim list methods: all of them
  backbone: {backbone}
  neck: {{kind: linear, dim: 512}}
  client:
    batch_size: {batch}             # {batch_why}
    local_epochs: 1
    optimizer:
      class_path: torch.optim.SGD
      init_args: {{lr: 0.005, momentum: 0.9, nesterov: true, weight_decay: 5.0e-4}}
{gpu_client}{client_batches}data:
  source:
    class_path: MarketFolders  # every folder with bounding_box_train is a client, the others are only tested on
    init_args: {{root: {quoted}}}
  # unseen: [NAME]             # keep a data set out of training
  # partition: union           # one client with all data: the centralised bound
  val: {val}                    # {why}
  size: [{height}, {width}]
  augmentation: {{pad: 10, flip: 0.5}}
"""
# as in configs/recipes/h100.yaml, whose other lines are defaults; a user removes the first # of a line
_GPU_TRAINER = """\
  # for the GPU of this machine (what each line changes in bits: docs/gpus.md):
  # precision: bf16-mixed
  # benchmark: true
"""
_GPU_CLIENT = """\
    # for the GPU of this machine:
    # channels_last: true
    # graph: true                # PFedMe, SKA and FedReID refuse it
"""


def run(args: list[str]) -> str:
    """Run ``fedsim init FOLDER [--output FILE]``."""
    if args and not args[0].startswith("-"):
        args = ["--folder", *args]
    return call(init, args, "init")


def init(folder: str, output: str = "fedsim.yaml") -> str:
    """Write a config with comments for a folder of data sets in Market-1501 layout.

    Args:
        folder: a folder of one data set, or of several.
        output: the config to write; it must not exist.
    """
    root, path = Path(folder).expanduser(), Path(output)
    if path.exists():
        raise ConfigError(f"--output: {path} exists already; give another name, or remove it")
    check_text(str(root.absolute()), "--folder")
    check_text(output, "--output")
    domains = MarketFolders(str(root)).domains()
    trained = [domain for domain in domains if domain.train is not None]
    if not trained:
        raise DataError(f"{root}: no data set has a folder bounding_box_train, so there is no client to train")
    text = _config(root, path, trained, [domain.name for domain in domains if domain.train is None])
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")
    clients = "\n".join(f"{domain.name}: {_size(domain.train)}" for domain in trained if domain.train is not None)
    return f"{clients}\nwrote {path}; try fedsim describe --config {path}, then fedsim fit --config {path}"


def _config(root: Path, output: Path, trained: list[Domain], unseen: list[str]) -> str:
    """Return the config for these data sets; ``unseen`` are names."""
    images = {domain.name: len(domain.train or ()) for domain in trained}
    identities = {domain.name: len(domain.train.identities) for domain in trained if domain.train is not None}
    fewest = min(identities, key=identities.__getitem__)
    holds_out = identities[fewest] >= 10  # a fifth of fewer identities is too small for a score
    large = sum(images.values()) >= _LARGE
    names = ", ".join(f"{domain.name} ({_size(domain.train)})" for domain in trained if domain.train is not None)
    batches = {name: _batch_of(count) for name, count in images.items()}
    batch = max(batches.values())
    client_batches = {name: size for name, size in batches.items() if size < batch}
    _warn_of_few(images, identities, client_batches)
    return _CONFIG.format(
        clients=f"{len(images)} client{'s' * (len(images) > 1)}, {names},",
        root=printable(str(root)),
        quoted=as_yaml(str(root.absolute())),
        unseen=f"only tested on: {', '.join(unseen)}" if unseen else "no data set is only tested on",
        output=printable(str(output)),
        rounds=100 if large else 20,
        every=10 if large else 5,
        backbone="{class_path: ResNet, init_args: {depth: 50, weights: IMAGENET1K_V2}}" if large else "SmallCNN",
        batch=batch,
        batch_why="smaller clients have their own" if client_batches else _smallest(images),
        gpu_trainer=_GPU_TRAINER if visible_gpus() else "",
        gpu_client=_GPU_CLIENT if visible_gpus() else "",
        client_batches=_client_section(client_batches, images),
        val="identities" if holds_out else "none",
        why="a fifth of each client's identities chooses the checkpoint"
        if holds_out
        else f"no choice of a checkpoint: {fewest} has only {_people(identities[fewest])}",
        height=_SIZE[0] if large else 64,
        width=_SIZE[1] if large else 32,
    )


def _size(train: Split) -> str:
    return f"{len(train):,} image{'s' * (len(train) > 1)}, {_people(len(train.identities))}"


def _people(count: int) -> str:
    return "1 identity" if count == 1 else f"{count:,} identities"


def _smallest(images: dict[str, int]) -> str:
    return f"the smallest client has {min(images.values()):,} training images"


def _batch_of(images: int) -> int:
    """Return the batch size for a client: a power of two, so that it has a full batch.

    >>> [_batch_of(images) for images in (1, 2, 24, 5000)]
    [2, 2, 16, 32]
    """
    return max(2, min(32, 1 << int(math.log2(max(images, 2)))))


def _client_section(client_batches: dict[str, int], images: dict[str, int]) -> str:
    """Return the section of clients with smaller batches than the others; empty if there are none."""
    if not client_batches:
        return ""
    lines = [
        f"    {as_yaml(name)}: {{batch_size: {size}}}    # of {images[name]:,} images"
        for name, size in client_batches.items()
    ]
    return "\n".join(["  clients:", *lines, ""])


def _warn_of_few(images: dict[str, int], identities: dict[str, int], client_batches: dict[str, int]) -> None:
    """Warn of each client that cannot train or learn; those in ``client_batches`` have a batch size of their own."""
    for name, count in images.items():
        remedy = f"add more, or keep it out of training: data.unseen: {as_yaml([name])}"
        remedy += ", without its line in model.clients" if name in client_batches else ""
        if count < 2:
            log.warning("%s: only one training image, and a fit needs two; %s", name, remedy)
        elif identities[name] == 1:
            log.warning("%s: only one identity to train on, so there is nothing to distinguish; %s", name, remedy)
