"""``fedsim augment fit | preview | write``: a generator of people per client (paper 002, Figures 5 and 6).

And ``fedsim augment fit``: its options, and the training of the generators.
"""

from __future__ import annotations

import logging
import shlex
from argparse import SUPPRESS
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import torch
import yaml
from jsonargparse import ArgumentParser, Namespace

from fedsim.cli.augment.processes import fit_in_processes
from fedsim.cli.augment.settings import (
    check_fit,
    check_pretrain,
    check_settings_files,
    choose_clients,
    keep_settings,
    open_data,
)
from fedsim.cli.commands import run_subcommand
from fedsim.core.checked import checked
from fedsim.core.checks import Count, Pixels, Seed, Threads
from fedsim.core.devices import AnyDevice
from fedsim.core.errors import ConfigError, StopSignal
from fedsim.core.files import make_folder
from fedsim.core.paths import Config, OutputFolder
from fedsim.core.seeding import derive_seed, seeded_host
from fedsim.data.federated import ClientData
from fedsim.data.generated import folders_of_clients
from fedsim.generation import saved
from fedsim.generation.fitting import device_of, fit_generator, needing_memory
from fedsim.generation.losses import LossWeights
from fedsim.generation.networks import Networks
from fedsim.generation.quality import quality_table
from fedsim.generation.swaps import measure_swaps, sample_pairs
from fedsim.generation.training import GeneratorSteps, GeneratorTraining
from fedsim.models.backbones import Backbone
from fedsim.papers.files import with_paper
from fedsim.parsing.config_files import join_configs, with_shipped
from fedsim.parsing.documents import as_yaml
from fedsim.parsing.error_lines import parsed
from fedsim.settings.facts import NOTHING, ROUNDING, facts_of
from fedsim.strategy.launch import find_launch, leave_launcher

log = logging.getLogger(__name__)


@checked("--")
def fit(
    config: Annotated[Config, NOTHING],
    appearance: Backbone,
    output: Annotated[OutputFolder, NOTHING] = "generators",
    networks: Networks = Networks(),  # noqa: B008 - here and below: frozen dataclasses, shown as defaults in --help
    losses: LossWeights = LossWeights(),  # noqa: B008 - frozen
    training: GeneratorSteps = GeneratorSteps(),  # noqa: B008 - frozen
    size: Pixels | None = None,
    pretrain: str | None = None,
    clients: Annotated[list[str] | None, NOTHING] = None,
    processes: Annotated[Count, NOTHING] = 1,
    device: Annotated[AnyDevice, NOTHING] = "auto",
    threads: Annotated[Threads, ROUNDING] = 1,
    seed: Seed = 0,
    *,
    row: Annotated[int | None, NOTHING],
    options: Annotated[Mapping[str, Any], NOTHING],
) -> str:
    """Train a generator for each client, on its own images alone.

    The same call continues an interrupted one. A generator does not depend on the other clients, nor on the number of
    processes.

    Args:
        config: a config file whose data section describes the clients; may be given several times, as for fedsim fit.
        appearance: the appearance encoder's backbone: SmallCNN, ResNet, ConvNeXt, MobileNetV2, or your own Backbone.
        output: the folder to write, with a folder per client; it is as private as the clients' images.
        networks: sizes of the other networks.
        losses: factors of the losses.
        training: steps and rates.
        size: height and width of the images; null: data.size.
        pretrain: the client from whose trained appearance encoder the others start, as in paper 002: the others thereby
            receive information about its images; null: nothing leaves a client.
        clients: the clients to train generators for; null: all.
        processes: number of processes that train at the same time, each for some of the clients.
        device: auto, cpu, cuda or cuda:N; auto and cuda distribute the processes over the GPUs.
        threads: CPU threads of each process. Results depend on it in the last bits.
        seed: seed of all random numbers.
        row: number of this process among several: it selects the GPU and the line of the progress bar; None: the first
            or only process.
        options: all these options as plain values.

    Returns:
        a table of the quality of the images.
    """
    data, root, number = open_data(config), Path(output), row or 0
    chosen, pixels = choose_clients(data, clients), size or data.size
    folders = folders_of_clients(root, data.federated)
    check_fit(chosen, pixels, appearance, networks)
    if pretrain is not None:
        check_pretrain(pretrain, data, chosen, folders, pixels)
        chosen.sort(key=lambda client: client.name != pretrain)  # stable: the others keep their order
    torch_device = device_of(device, number)
    make_folder(root, "--output")
    if pretrain is not None and row is None:
        log.warning(
            "pretrain: all clients start from the appearance encoder of %s. Its information about that client's images "
            "leaves the client before any round and without noise", pretrain,
        )  # fmt: skip
    settings = keep_settings(root, {name: options[name] for name in settings_of_generators()} | {"size": list(pixels)})
    if processes > 1:
        waiting = [client.name for client in chosen if not saved.is_finished(folders[client.name])]
        fit_in_processes(waiting, processes, pretrain, {**options, "settings": settings})
    torch.set_num_threads(threads)
    for client in chosen:
        folder = folders[client.name]
        if _is_done(folder, client, pixels):
            continue
        images = data.decode(client.train.images, client.name, pixels)
        encoder = saved.read_backbone(folders[pretrain]) if pretrain not in (None, client.name) else None
        with needing_memory(
            client.name, torch_device, "lower --networks.width or --training.batch_size, in another --output"
        ):
            module = GeneratorTraining(
                client=client.name, pixels=images, labels=client.labels, num_classes=client.num_classes,
                backbone=appearance, networks=networks, losses=losses, training=training, seed=seed,
            )  # fmt: skip
            fit_generator(module, client, folder, torch_device, encoder, number)
            _measure(module, client, folder, torch_device)
    return _quality_of(root, {client.name: folders[client.name] for client in chosen}, clients)


def settings_of_generators() -> list[str]:
    """Return the options of :func:`fit` on which the generators depend."""
    hints = get_type_hints(fit, include_extras=True).items()
    return [name for name, hint in hints if name != "return" and facts_of(hint).effect == "results"]


def _is_done(folder: Path, client: ClientData, size: tuple[int, int]) -> bool:
    """Return whether a generator is trained and measured; raise DataError if it was trained on other people."""
    if not saved.is_finished(folder):
        return False
    saved.check_trained(folder, client, size)
    return saved.has_quality(folder)


def _measure(module: GeneratorTraining, client: ClientData, folder: Path, device: torch.device) -> None:
    """Measure the quality of a client's generator with the tensors in its file, and write it."""
    images = module.pixels.cpu()
    saved.check_trained(folder, client, (images.shape[2], images.shape[3]), module.images_hash)
    saved.restore(folder, {"generator": module.generator, "teacher": module.teacher})
    module.eval().to(device)
    pairs = sample_pairs(client.name, client.labels, len(images), seed=0)
    saved.write_quality(folder, measure_swaps(module.generator, module.teacher, images, pairs, client.labels))


def _quality_of(root: Path, folders: Mapping[str, Path], names: list[str] | None) -> str:
    """Return a table of the quality of clients' generators in ``root``; ``names`` is the option ``--clients``."""
    only = "" if names is None else f" --clients {shlex.quote(as_yaml(names))}"
    return (
        f"{quality_table({client: saved.read_quality(folder) for client, folder in folders.items()})}\n"
        "before: the same measure for the two real images; recognised: as the wearer, by a classifier of real images\n"
        f"wrote {root}; to draw their images, with the same --config: "
        f"fedsim augment preview --generators {shlex.quote(str(root))}{only}"
    )


def fit_parser() -> ArgumentParser:
    """Return the parser of ``fedsim augment fit``."""
    description = (fit.__doc__ or "").partition("\n\n    Args:")[0]
    parser = ArgumentParser(exit_on_error=False, allow_abbrev=False, prog="fedsim augment fit", description=description)
    parser.add_argument("--settings", action="config", help="a file of the options below; see configs/generators")
    parser.add_argument(  # separately: a default set for an argument of the function would leave it "required"
        "--appearance",
        type=Backbone,
        default={"class_path": "fedsim.models.backbones.SmallCNN", "init_args": {"width": 16}},
        help="the appearance encoder's backbone: SmallCNN, ResNet, ConvNeXt, MobileNetV2, or your own Backbone.",
    )
    parser.add_function_arguments(fit, as_group=False, skip={"appearance", "row", "options"})
    parser.add_argument("--row", type=int | None, help=SUPPRESS)  # for the processes that fit starts itself
    return parser


def built(parser: ArgumentParser, arguments: Namespace) -> dict[str, Any]:
    """Return the options with objects built; a backbone's initial weights depend on the seed alone."""
    with seeded_host(derive_seed(arguments.seed, "appearance")):
        values: dict[str, Any] = parser.instantiate(arguments).as_dict()
    return {name: value for name, value in values.items() if name != "settings"}


def run(args: list[str]) -> str:
    """Run ``fedsim augment COMMAND [options]``, and return the text to print."""
    if args[:1] == ["fit"]:
        return _fit(join_configs(with_shipped(with_paper(args[1:]))))
    return run_subcommand("augment", args)


def _fit(args: list[str]) -> str:
    """Parse the options of :func:`fit`, and call it as a process that schedulers can end."""
    parser = fit_parser()
    check_settings_files(args)
    arguments = parsed(parser, args)
    launch = find_launch()
    if launch is not None and launch.nodes * launch.per_node > 1:
        raise ConfigError(
            f"{launch.launcher}: every process would train the same generators; start fedsim augment fit once with "
            "--processes, or as an array job with some of the --clients in each task (slurm/augment.sbatch)"
        )
    leave_launcher()  # otherwise Lightning would take a scheduler's single task for a rank
    options = yaml.safe_load(parser.dump(arguments, skip_none=False))
    try:
        return fit(**built(parser, arguments), options=options)
    except StopSignal:
        if arguments.row is None:  # the first process of the call
            log.info("the training so far is kept; the same command continues it")
        raise
