"""``fedsim init FOLDER``: writes a commented config for a folder of data sets."""

from __future__ import annotations

import logging
import math
import shlex
from pathlib import Path

from fedsim.cli.commands import call, with_option
from fedsim.core.checked import checked
from fedsim.core.errors import DataError
from fedsim.core.files import replacing
from fedsim.core.names import check_text, printable
from fedsim.core.nvidia import visible_gpus
from fedsim.core.paths import InputFolder, Settings, given_path
from fedsim.data.federated import RetrievalSet
from fedsim.data.federations import build_federation, check_names, has_matches, obstacle_of
from fedsim.data.images import Domain, Split
from fedsim.data.listing import listed
from fedsim.data.market import MarketFolders
from fedsim.parsing.documents import as_yaml

log = logging.getLogger(__name__)

_LARGE = 2000  # images from which on the config has a pretrained network, and images of the papers' size
_SIZE = (256, 128)
_ANY_CAMERA = "  evaluation: {camera_aware: false}  # matches of a query's own camera count\n"
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
{evaluation}  client:
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
    # graph: true                # needs torch 2.14; PFedMe, SKA and FedReID refuse it
"""


def run(args: list[str]) -> str:
    """Run ``fedsim init FOLDER [--output FILE]``."""
    return call(init, with_option(args, "--folder"), "init")


@checked("--")
def init(folder: InputFolder, output: Settings = "fedsim.yaml") -> str:
    """Write a config with comments for a folder of data sets in Market-1501 layout.

    Args:
        folder: a folder of one data set, or of several.
        output: the config to write; it must not exist.
    """
    root, path = given_path(folder, "--folder"), Path(output)
    check_text(str(root), "--folder")
    check_text(output, "--output")
    domains = listed(MarketFolders(str(root)))
    check_names(domains)
    if not any(domain.train for domain in domains):
        raise DataError(f"{root}: no data set has a folder bounding_box_train, so there is no client to train")
    yaml_text = _config(root, path, domains)
    with replacing(path) as partial:
        partial.write_text(yaml_text, encoding="utf-8")
    clients = "\n".join(f"{printable(d.name)}: {_size(d.train)}" for d in domains if d.train is not None)
    config = shlex.quote(str(path))
    return f"{clients}\nwrote {path}; try fedsim describe --config {config}, then fedsim fit --config {config}"


def _config(root: Path, output: Path, domains: list[Domain]) -> str:
    trained = {domain.name: domain.train for domain in domains if domain.train is not None}
    unseen = [printable(domain.name) for domain in domains if domain.train is None]
    images = {name: len(train) for name, train in trained.items()}
    identities = {name: len(train.identities) for name, train in trained.items()}
    of_one_camera = _without_matches(domains)
    obstacle = _obstacle_to_validation(domains, identities, camera_aware=not of_one_camera)
    large = sum(images.values()) >= _LARGE
    names = ", ".join(f"{printable(name)} ({_size(train)})" for name, train in trained.items())
    batches = {name: _batch_of(count) for name, count in images.items()}
    batch = max(batches.values())
    client_batches = {name: size for name, size in batches.items() if size < batch}
    _warn_of_few(images, identities, client_batches)
    smallest = f"{min(images.values()):,} training images"
    return _CONFIG.format(
        clients=f"{len(images)} client{'s' * (len(images) > 1)}, {names},",
        root=printable(str(root)),
        quoted=as_yaml(str(root)),
        unseen=f"only tested on: {', '.join(unseen)}" if unseen else "no data set is only tested on",
        output=printable(str(output)),
        evaluation=_ANY_CAMERA * bool(of_one_camera),
        rounds=100 if large else 20,
        every=10 if large else 5,
        backbone="{class_path: ResNet, init_args: {depth: 50, weights: IMAGENET1K_V2}}" if large else "SmallCNN",
        batch=batch,
        batch_why="smaller clients have their own" if client_batches else f"the smallest client has {smallest}",
        gpu_trainer=_GPU_TRAINER if visible_gpus() else "",
        gpu_client=_GPU_CLIENT if visible_gpus() else "",
        client_batches=_client_section(client_batches, images),
        val="none" if obstacle else "identities",
        why=f"no choice of a checkpoint: {obstacle}"
        if obstacle
        else "a fifth of each client's identities chooses the checkpoint",
        height=_SIZE[0] if large else 64,
        width=_SIZE[1] if large else 32,
    )


def _without_matches(domains: list[Domain]) -> list[str]:
    """Return the data sets whose matches are all from a query's own camera, with a warning of each.

    Raises:
        DataError: if a data set has no matches at all.
    """
    names = []
    for domain in domains:
        test = RetrievalSet(domain.query, domain.gallery, splits=domain.splits)
        if has_matches(test):
            continue
        if not has_matches(test, camera_aware=False):
            raise DataError(f"{domain.name}: {obstacle_of(domain)}")
        names.append(domain.name)
        log.warning(
            "%s: no query has a match from another camera, so the config counts those of its own camera "
            "(model.evaluation.camera_aware: false), for all data sets; such scores are higher than those of papers",
            printable(domain.name),
        )
    return names


def _obstacle_to_validation(domains: list[Domain], identities: dict[str, int], camera_aware: bool) -> str:
    """Return why identities cannot be held out to choose a checkpoint; empty if they can."""
    fewest = min(identities, key=identities.__getitem__)
    if identities[fewest] < 10:  # a fifth of them is too small for a score
        return f"{printable(fewest)} has only {_people(identities[fewest])}"
    for client in build_federation(domains).clients:
        if client.val is not None and not has_matches(client.val, camera_aware):
            return f"of {printable(client.name)}, no held-out image has a match from another camera"
    return ""


def _size(train: Split) -> str:
    return f"{len(train):,} image{'s' * (len(train) > 1)}, {_people(len(train.identities))}"


def _people(count: int) -> str:
    return "1 identity" if count == 1 else f"{count:,} identities"


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
            log.warning("%s: only one training image, and a fit needs two; %s", printable(name), remedy)
        elif identities[name] == 1:
            log.warning(
                "%s: only one identity to train on, so there is nothing to distinguish; %s", printable(name), remedy
            )
