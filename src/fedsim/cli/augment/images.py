"""``fedsim augment preview | write``: images that trained generators make."""

from __future__ import annotations

import copy
import shlex
from argparse import ArgumentError
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from fedsim.cli.augment.fit import built, fit_parser, settings_of_generators
from fedsim.cli.augment.settings import SETTINGS, choose_clients, open_data, read_settings
from fedsim.core.checked import checked
from fedsim.core.checks import Count, NumberKind, Seed, Share, Threads
from fedsim.core.devices import AnyDevice
from fedsim.core.errors import ConfigError, DataError
from fedsim.core.files import make_folder
from fedsim.core.paths import Config, InputFolder, OutputFolder, Picture
from fedsim.data.federated import ClientData
from fedsim.data.generated import check_is_free, folders_of_clients, write_generated
from fedsim.data.images import Size
from fedsim.data.preview import join_sheets, write_sheet
from fedsim.generation.fitting import device_of, needing_memory
from fedsim.generation.networks import AppearanceEncoder, Generator, Networks
from fedsim.generation.saved import check_trained, hash_images, restore
from fedsim.generation.sheet import swap_sheet
from fedsim.generation.swaps import make_swaps, sample_pairs, soft_labels, swap_grid
from fedsim.parsing.error_lines import explain

SwapLabels = Literal["teacher", "appearance"]
"""Source of the label of a swapped image."""


@checked("--")
def preview(
    config: Config,
    generators: InputFolder = "generators",
    output: Picture = "swaps.png",
    clients: list[str] | None = None,
    people: Count = 6,
    device: AnyDevice = "auto",
) -> str:
    """Draw contact sheets: appearances of some people on the structures of others.

    Args:
        config: the config file, or files, that the generators were trained with.
        generators: the folder that fedsim augment fit has written.
        output: the image file to write.
        clients: the clients to draw; null: all.
        people: rows and columns of each client's sheet, at most as many as it has identities.
        device: auto, cpu, cuda or cuda:N.
    """
    data, root, sheets = open_data(config), Path(generators), []
    torch_device = device_of(device)
    backbone, networks, size = _networks_of(root)
    of_generators = folders_of_clients(root, data.federated)
    for client in choose_clients(data, clients):
        check_trained(of_generators[client.name], client, size)
        images = client.train.images
        shown = [np.flatnonzero(client.train.pids == pid) for pid in client.train.identities[:people]]
        appearance, structure = (
            images.take(np.array([positions[i] for positions in shown])).decode(size) for i in (0, -1)
        )
        with needing_memory(client.name, torch_device, "choose another --device"):
            generator, _ = _load(of_generators[client.name], client, backbone, networks, torch_device)
            swapped = swap_grid(generator, structure, appearance)
        sheets.append(swap_sheet(structure, appearance, swapped, client.name))
    write_sheet(join_sheets(sheets), Path(output), "--output")
    return f"wrote {output}: a column per appearance, a row per structure; clients: {len(sheets)}"


@checked("--")
def write(
    config: Config,
    generators: InputFolder = "generators",
    output: OutputFolder = "generated",
    ratio: Annotated[float, NumberKind("(0, 100]", float)] = 1.0,
    labels: SwapLabels = "teacher",
    least: Share = 0.01,
    clients: list[str] | None = None,
    device: AnyDevice = "auto",
    threads: Threads = 1,
    seed: Seed = 0,
) -> str:
    """Write swapped images of each client, for data.generated.root.

    A client's folder appears only when it is complete. Existing folders are never overwritten.

    Args:
        config: the config file, or files, that the generators were trained with.
        generators: the folder that fedsim augment fit has written.
        output: the folder to write, with a folder per client; it is as private as the clients' images.
        ratio: swapped images per real one, at most 100: those of a client are in memory at the same time.
        labels: teacher: soft labels, the probabilities of a classifier that has learned from the client's real images;
            appearance: the identity whose appearance an image has, with weight 1.
        least: smallest probability of the teacher that is kept in a label.
        clients: the clients to write images for; null: all.
        device: auto, cpu, cuda or cuda:N.
        threads: CPU threads. Images depend on it in the last bits, which rounding mostly hides.
        seed: seed of the pairs that are swapped.
    """
    data, root, folder, counts = open_data(config), Path(generators), Path(output), []
    chosen = choose_clients(data, clients)
    backbone, networks, size = _networks_of(root)
    of_generators, of_images = (folders_of_clients(parent, data.federated) for parent in (root, folder))
    for client in chosen:  # before the first image is generated
        check_trained(of_generators[client.name], client, size)
        check_is_free(of_images[client.name])
    make_folder(folder, "--output")
    torch_device = device_of(device)
    torch.set_num_threads(threads)
    for client in chosen:
        pixels = data.decode(client.train.images, client.name, size)
        check_trained(of_generators[client.name], client, size, hash_images(pixels, client.labels))
        pairs = sample_pairs(client.name, client.labels, max(1, round(ratio * len(pixels))), seed)
        with needing_memory(client.name, torch_device, "choose another --device, or a smaller --ratio"):
            generator, teacher = _load(of_generators[client.name], client, backbone, networks, torch_device)
            swaps = make_swaps(generator, teacher, pixels, pairs)
            bar = tqdm(swaps, f"swaps of {client.name}", unit=" batches", delay=2.0, disable=None, leave=False)
            images, beliefs = map(torch.cat, zip(*((batch.images, batch.beliefs) for batch in bar), strict=True))
        wearers = client.labels[pairs.appearance]
        if labels == "appearance":
            beliefs, least = nn.functional.one_hot(torch.from_numpy(wearers), client.num_classes).float(), 1.0
        pids = np.full(client.num_classes, -1, dtype=np.int64)  # -1 for labels without images
        pids[client.labels] = client.train.pids
        write_generated(of_images[client.name], images, soft_labels(beliefs, wearers, pids, least))
        counts.append(f"{client.name} {len(images):,}")
    return (
        f"wrote {output}: {', '.join(counts)} images\nto train with them: --data.generated.root {shlex.quote(output)}"
    )


def _networks_of(root: Path) -> tuple[nn.Module, Networks, Size]:
    """Return the backbone, the network sizes and the image size of a folder of generators."""
    parser, settings = fit_parser(), read_settings(root, settings_of_generators())
    backbone_options = settings["appearance"].get("init_args", {})
    if "weights" in backbone_options:  # only the initial ones: their source need not exist any more
        backbone_options["weights"] = None
    try:
        values = built(parser, parser.parse_object({**settings, "config": ""}))
    except (ArgumentError, ConfigError) as error:
        raise DataError(f"{root / SETTINGS}: {explain(str(error))}; restore it, or give another folder") from error
    return values["appearance"], values["networks"], values["size"]


def _load(
    folder: Path, client: ClientData, backbone: nn.Module, networks: Networks, device: torch.device
) -> tuple[Generator, AppearanceEncoder]:
    generator = Generator(copy.deepcopy(backbone), networks, client.num_classes)
    teacher = AppearanceEncoder(copy.deepcopy(backbone), networks.parts, client.num_classes)
    restore(folder, {"generator": generator, "teacher": teacher})
    return generator.eval().to(device), teacher.eval().to(device)
