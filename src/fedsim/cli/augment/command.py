"""``fedsim augment fit | preview | write``: a generator of people per client (paper 002, Figures 5 and 6)."""

from __future__ import annotations

import copy
import logging
from argparse import SUPPRESS
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import yaml
from jsonargparse import ArgumentParser, Namespace
from torch import Tensor, nn
from tqdm import tqdm

from fedsim.cli.augment.checks import check_fit, check_pretrain, choose_clients, open_data
from fedsim.cli.augment.processes import ending_on_signals, fit_in_processes
from fedsim.cli.augment.settings import check_settings_files, keep_settings, read_settings
from fedsim.cli.config_files import join_configs
from fedsim.cli.data import call
from fedsim.cli.papers.files import with_paper
from fedsim.core.errors import ConfigError
from fedsim.core.files import make_folder
from fedsim.core.seeding import derive_seed
from fedsim.data.federated import ClientData
from fedsim.data.generated import check_is_free, write_generated
from fedsim.data.images import Index, Size
from fedsim.generation.fitting import device_of, fit_generator, needing_memory, new_training
from fedsim.generation.losses import LossWeights
from fedsim.generation.networks import AppearanceEncoder, Generator, Networks
from fedsim.generation.quality import quality_table
from fedsim.generation.saved import (
    check_trained,
    has_quality,
    hash_images,
    is_finished,
    read_backbone,
    read_quality,
    restore,
    write_quality,
)
from fedsim.generation.sheet import check_sheet_file, join_sheets, swap_sheet, write_sheet
from fedsim.generation.swaps import Swaps, draw_pairs, make_swaps, measure_swaps, soft_labels, swap_grid
from fedsim.generation.training import GeneratorSteps, GeneratorTraining
from fedsim.models.backbones import Backbone
from fedsim.strategy.launch import find_launch, leave_launcher

log = logging.getLogger(__name__)

Labels = Literal["teacher", "appearance"]
"""What a swapped image is labelled with."""


def run_augment_command(args: list[str]) -> str:
    """Run ``fedsim augment COMMAND``.

    Args:
        args: the command and its options.

    Returns:
        what is to be printed.
    """
    commands: dict[str, Callable[[list[str]], str]] = {
        "fit": _fit,
        "preview": lambda options: call(preview, options, "augment preview"),
        "write": lambda options: call(write, options, "augment write"),
    }
    if args and args[0] in ("-h", "--help"):
        return f"usage: fedsim augment {{{','.join(commands)}}} [options]; fedsim augment COMMAND --help says more"
    if not args or args[0] not in commands:
        raise ConfigError(
            f"fedsim augment: there is no command {args[0] if args else '(none)'}; choose from {', '.join(commands)}"
        )
    return commands[args[0]](join_configs(with_paper(args[1:])))


# -- fit ---------------------------------------------------------------------------------------------------------------


def fit(
    config: str | list[str],
    appearance: Backbone,
    output: str = "generators",
    networks: Networks = Networks(),  # noqa: B008 - here and below: frozen dataclasses, shown as defaults in --help
    losses: LossWeights = LossWeights(),  # noqa: B008
    training: GeneratorSteps = GeneratorSteps(),  # noqa: B008
    size: tuple[int, int] | None = None,
    pretrain: str | None = None,
    clients: list[str] | None = None,
    processes: int = 1,
    device: str = "auto",
    threads: int = 1,
    seed: int = 0,
    *,
    row: int | None,
    options: Mapping[str, Any],
) -> str:
    """Train a generator for each client, on its own images alone.

    An interrupted call is continued by the same call. A generator does not depend on which others are trained, nor on
    how many processes train them.

    Args:
        config: a config file whose data section says who holds what; may be given several times, as for fedsim fit.
        appearance: the appearance encoder's backbone: SmallCNN, ResNet, ConvNeXt, MobileNetV2, or your own Backbone.
        output: the folder to write, with one for each client: as private as the client's images.
        networks: sizes of the other networks.
        losses: factors of the losses.
        training: steps and rates.
        size: height and width of the images; null: data.size.
        pretrain: a client whose appearance encoder the others start from, as in paper 002: what it has learned of its
            images goes to all others; null: nothing leaves a client.
        clients: whose generators to train; null: all.
        processes: that train at the same time, each some of the clients.
        device: auto, cpu, cuda or cuda:N; auto and cuda give the processes the GPUs in turn.
        threads: of the CPU, of each process. Results depend on it in the last bits.
        seed: of all that is random.
        row: number of this process among several, which chooses its GPU and the line of its progress bar; None: it is
            the first, or alone.
        options: all of these as plain values.

    Returns:
        a table: how good the images are.
    """
    if processes < 1 or threads < 1:
        raise ConfigError("--processes, --threads: give numbers from 1")
    data, root, number = open_data(config), Path(output).expanduser(), row or 0
    chosen, pixels = choose_clients(data, clients), size or data.size
    check_fit(chosen, pixels, appearance, networks)
    if pretrain is not None:
        check_pretrain(pretrain, data, chosen, root, pixels)
    where = device_of(device, number)
    make_folder(root, "--output")
    if pretrain is not None and row is None:
        log.warning(
            "pretrain: all clients start from the appearance encoder of %s. What it has learned of that client's "
            "images leaves the client, before any round and without noise", pretrain,
        )  # fmt: skip
    settings = keep_settings(root, {**options, "size": list(pixels)})
    if processes > 1:
        waiting = [client.name for client in chosen if not is_finished(root / client.name)]
        fit_in_processes(waiting, processes, pretrain, {**options, "settings": settings})
    torch.set_num_threads(threads)
    if pretrain is not None:
        chosen.sort(key=lambda client: client.name != pretrain)  # stable: the others keep their order
    for client in chosen:
        if _is_done(root / client.name, client, pixels):
            continue
        images = data.decode(client.train.images, client.name, pixels)
        encoder = read_backbone(root / pretrain) if pretrain not in (None, client.name) else None
        with needing_memory(client.name, where, "lower --networks.width or --training.batch_size, in another --output"):
            module = new_training(
                client, images, backbone=appearance, networks=networks, losses=losses, training=training, seed=seed
            )
            fit_generator(module, client, root / client.name, where, encoder, number)
            _measure(module, client, root / client.name, where)
    return (
        f"{quality_table({client.name: read_quality(root / client.name) for client in chosen})}\n"
        "before: the same of the two real images; recognised: as who wears it, by a classifier of real images\n"
        f"wrote {root}; to see what they make: fedsim augment preview --generators {root}, and the same --config"
    )


def _is_done(folder: Path, client: ClientData, size: Size) -> bool:
    """Whether a generator is trained and measured; raise DataError if it is one of other people."""
    if not is_finished(folder):
        return False
    check_trained(folder, client, size)
    return has_quality(folder)


def _measure(module: GeneratorTraining, client: ClientData, folder: Path, device: torch.device) -> None:
    """Write how good a client's generator is, by the tensors in its file."""
    images = module.pixels.cpu()
    check_trained(folder, client, (images.shape[2], images.shape[3]), module.images_hash)
    restore(folder, {"generator": module.generator, "teacher": module.teacher})
    module.eval().to(device)
    pairs = draw_pairs(client.name, client.labels, len(images), seed=0)
    write_quality(folder, measure_swaps(module.generator, module.teacher, images, pairs, client.labels))


def _fit(args: list[str]) -> str:
    """Parse the options of :func:`fit`, and call it as a process that schedulers can end."""
    parser = _fit_parser()
    check_settings_files(args)
    given = parser.parse_args(args)
    launch = find_launch()
    if launch is not None and launch.nodes * launch.per_node > 1:
        raise ConfigError(
            f"{launch.launcher}: all its processes would train the same; start fedsim augment fit once, with "
            "--processes, or an array job with some of the --clients in each task (slurm/augment.sbatch)"
        )
    leave_launcher()  # Lightning would take a scheduler's single task for a rank of its own run
    options = yaml.safe_load(parser.dump(given, skip_none=False))
    with ending_on_signals(is_first=given.row is None):
        return fit(**_built(parser, given), options=options)


def _fit_parser() -> ArgumentParser:
    description = (fit.__doc__ or "").partition("\n\n    Args:")[0]
    parser = ArgumentParser(exit_on_error=False, prog="fedsim augment fit", description=description)
    parser.add_argument("--settings", action="config", help="a file of the options below; see configs/generators")
    parser.add_argument(  # by itself: a default that is set for an argument of the function leaves it "required"
        "--appearance",
        type=Backbone,
        default={"class_path": "fedsim.models.backbones.SmallCNN", "init_args": {"width": 16}},
        help="the appearance encoder's backbone: SmallCNN, ResNet, ConvNeXt, MobileNetV2, or your own Backbone.",
    )
    parser.add_function_arguments(fit, as_group=False, skip={"appearance", "row", "options"})
    parser.add_argument("--row", type=int | None, help=SUPPRESS)  # for the processes that fit starts itself
    return parser


def _built(parser: ArgumentParser, given: Namespace) -> dict[str, Any]:
    """Return the options with objects built; a backbone's first weights depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(given.seed, "appearance"))
        values: dict[str, Any] = parser.instantiate(given).as_dict()
    return {name: value for name, value in values.items() if name != "settings"}


# -- preview and write -------------------------------------------------------------------------------------------------


def preview(
    config: str | list[str],
    generators: str = "generators",
    output: str = "swaps.png",
    clients: list[str] | None = None,
    people: int = 6,
    device: str = "auto",
) -> str:
    """Draw contact sheets: appearances of some people on the structures of others.

    Args:
        config: the config file, or files, that the generators were trained with.
        generators: the folder that fedsim augment fit has written.
        output: the image file to write.
        clients: whose; null: of all.
        people: rows and columns of each client's sheet, at most as many as it has identities.
        device: auto, cpu, cuda or cuda:N.

    Returns:
        what was written.
    """
    if people < 1:
        raise ConfigError(f"--people: {people} is less than 1")
    check_sheet_file(Path(output), "--output")
    data, root, where, sheets = open_data(config), Path(generators).expanduser(), device_of(device), []
    backbone, networks, size = _networks_of(root)
    for client in choose_clients(data, clients):
        check_trained(root / client.name, client, size)
        split = client.train
        first = np.array([np.flatnonzero(split.pids == pid)[0] for pid in split.identities[:people]])
        last = np.array([np.flatnonzero(split.pids == pid)[-1] for pid in split.identities[:people]])
        appearance, structure = (split.images.take(index).decode(size) for index in (first, last))
        with needing_memory(client.name, where, "choose another --device"):
            generator, _ = _load(root / client.name, client, backbone, networks, where)
            swapped = swap_grid(generator, structure, appearance)
        sheets.append(swap_sheet(structure, appearance, swapped, client.name))
    write_sheet(join_sheets(sheets), Path(output), "--output")
    return f"wrote {output}: a column per appearance, a row per structure; clients: {len(sheets)}"


def write(
    config: str | list[str],
    generators: str = "generators",
    output: str = "generated",
    ratio: float = 1.0,
    labels: Labels = "teacher",
    least: float = 0.01,
    clients: list[str] | None = None,
    device: str = "auto",
    threads: int = 1,
    seed: int = 0,
) -> str:
    """Write swapped images of each client, for data.generated.root.

    A client's folder is there when all of it is; what is there is never written over.

    Args:
        config: the config file, or files, that the generators were trained with.
        generators: the folder that fedsim augment fit has written.
        output: the folder to write, with one for each client: as private as the client's images.
        ratio: swapped images per real one.
        labels: teacher: soft labels, the probabilities of a classifier that has learned from the client's real images;
            appearance: the identity whose appearance an image has, with weight 1.
        least: probability below which the teacher's guesses are left out.
        clients: whose; null: of all.
        device: auto, cpu, cuda or cuda:N.
        threads: of the CPU. Images depend on it in the last bits, which rounding mostly hides.
        seed: of who is swapped with whom.

    Returns:
        what was written.
    """
    if threads < 1:
        raise ConfigError("--threads: give a number from 1")
    if not 0 < ratio < np.inf:
        raise ConfigError(f"--ratio: {ratio} is not a positive number")
    if not 0 <= least <= 1:
        raise ConfigError(f"--least: {least} is not in [0, 1]")
    data, root, folder, said = open_data(config), Path(generators).expanduser(), Path(output).expanduser(), []
    chosen = choose_clients(data, clients)
    backbone, networks, size = _networks_of(root)
    for client in chosen:  # before the first image is made
        check_trained(root / client.name, client, size)
        check_is_free(folder / client.name)
    make_folder(folder, "--output")
    where = device_of(device)
    torch.set_num_threads(threads)
    for client in chosen:
        pixels = data.decode(client.train.images, client.name, size)
        check_trained(root / client.name, client, size, hash_images(pixels, client.labels))
        pairs = draw_pairs(client.name, client.labels, max(1, round(ratio * len(pixels))), seed)
        with needing_memory(client.name, where, "choose another --device, or a smaller --ratio"):
            generator, teacher = _load(root / client.name, client, backbone, networks, where)
            images, beliefs = _collected(make_swaps(generator, teacher, pixels, pairs), client.name)
        wearers = client.labels[pairs.appearance]
        if labels == "appearance":
            beliefs, least = nn.functional.one_hot(torch.from_numpy(wearers), client.num_classes).float(), 1.0
        write_generated(folder / client.name, images, soft_labels(beliefs, wearers, _pids(client), least))
        said.append(f"{client.name} {len(images):,}")
    return f"wrote {output}: {', '.join(said)} images\nto train with them: --data.generated.root {output}"


def _collected(batches: Iterable[Swaps], client: str) -> tuple[Tensor, Tensor]:
    """Return all images and the teacher's beliefs; a progress bar shows when it takes long."""
    bar = tqdm(batches, desc=f"swaps of {client}", unit=" batches", delay=2.0, disable=None, leave=False)
    images, beliefs = zip(*((batch.images, batch.beliefs) for batch in bar), strict=True)
    return torch.cat(images), torch.cat(beliefs)


def _pids(client: ClientData) -> Index:
    """Return the number in the data set of each label [Z]; -1 of those without images here."""
    found = np.full(client.num_classes, -1, dtype=np.int64)
    found[client.labels] = client.train.pids
    return found


def _networks_of(root: Path) -> tuple[nn.Module, Networks, Size]:
    """Return the backbone, the sizes of the networks and of the images of a folder of generators."""
    parser, settings = _fit_parser(), read_settings(root)
    of_backbone = settings["appearance"].get("init_args", {})
    if "weights" in of_backbone:  # its first ones: where they came from need not be there any more
        of_backbone["weights"] = None
    values = _built(parser, parser.parse_object({**settings, "config": ""}))
    return values["appearance"], values["networks"], values["size"]


def _load(
    folder: Path, client: ClientData, backbone: nn.Module, networks: Networks, device: torch.device
) -> tuple[Generator, AppearanceEncoder]:
    """Load generator and teacher from a client's folder."""
    generator = Generator(copy.deepcopy(backbone), networks, client.num_classes)
    teacher = AppearanceEncoder(copy.deepcopy(backbone), networks.parts, client.num_classes)
    restore(folder, {"generator": generator, "teacher": teacher})
    return generator.eval().to(device), teacher.eval().to(device)
