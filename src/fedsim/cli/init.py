"""``fedsim init FOLDER``: a commented config for a folder of data sets that it has looked at."""

from __future__ import annotations

import json
import math
from pathlib import Path

from fedsim.cli.commands import call
from fedsim.core.errors import ConfigError, DataError
from fedsim.core.files import replacing
from fedsim.data.images import Domain
from fedsim.data.market import MarketFolders

_LARGE, _SIZE = 2000, (256, 128)  # images from which a pretrained network is of use, at the papers' size
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
model:
  method: FedPav               # fedsim list methods: all of them
  backbone: {backbone}
  neck: {{kind: linear, dim: 512}}
  client:
    batch_size: {batch}             # the smallest client has {smallest} training images
    local_epochs: 1
    optimizer:
      class_path: torch.optim.SGD
      init_args: {{lr: 0.005, momentum: 0.9, nesterov: true, weight_decay: 5.0e-4}}
data:
  source:
    class_path: MarketFolders  # every folder with bounding_box_train is a client, the others are only tested on
    init_args: {{root: {quoted}}}
  # unseen: [NAME]             # keep a data set out of training
  # partition: union           # one client with all data: the centralised bound
  val: {val}                    # {why}
  size: [{height}, {width}]
  augmentation: {{pad: 10, flip: 0.5}}
"""


def run(args: list[str]) -> str:
    """Run ``fedsim init FOLDER [--output FILE]``."""
    if args and not args[0].startswith("-"):
        args = ["--folder", *args]
    return call(init, args, "init")


def init(folder: str, output: str = "fedsim.yaml") -> str:
    """Look at a folder of data sets in Market-1501 layout, and write a config for it, with comments.

    Args:
        folder: of one data set, or of several.
        output: the config to write; it must not exist.
    """
    root, path = Path(folder).expanduser(), Path(output)
    if path.exists():
        raise ConfigError(f"--output: {path} is there already; give another name, or remove it")
    domains = MarketFolders(str(root)).domains()
    trained = [domain for domain in domains if domain.train is not None]
    if not trained:
        raise DataError(f"{root}: no data set has bounding_box_train, so nobody can train")
    text = _config(root, path, trained, [domain.name for domain in domains if domain.train is None])
    with replacing(path) as partial:
        partial.write_text(text)
    return f"wrote {path}; try fedsim describe --config {path}, then fedsim fit --config {path}"


def _config(root: Path, output: Path, trained: list[Domain], unseen: list[str]) -> str:
    """Return the config for these data sets; ``unseen`` are names."""
    images = {domain.name: len(domain.train or ()) for domain in trained}
    identities = min(len(domain.train.identities) for domain in trained if domain.train is not None)
    holds_out = identities >= 10  # else a fifth of them is hardly a measure
    large = sum(images.values()) >= _LARGE
    names = ", ".join(f"{name} ({count:,} images)" for name, count in images.items())
    return _CONFIG.format(
        clients=f"{len(images)} client{'s' * (len(images) > 1)}, {names},",
        root=root,
        quoted=json.dumps(str(root.absolute())),
        unseen=f"only tested on: {', '.join(unseen)}" if unseen else "no data set is only tested on",
        output=output,
        rounds=100 if large else 20,
        every=10 if large else 5,
        backbone="{class_path: ResNet, init_args: {depth: 50, weights: IMAGENET1K_V2}}" if large else "SmallCNN",
        batch=max(2, min(32, 2 ** int(math.log2(max(min(images.values()), 2))))),
        smallest=f"{min(images.values()):,}",
        val="identities" if holds_out else "none",
        why="a fifth of each client's identities chooses the checkpoint" if holds_out else "few identities: no choice",
        height=_SIZE[0] if large else 64,
        width=_SIZE[1] if large else 32,
    )
