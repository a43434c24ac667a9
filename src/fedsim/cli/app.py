"""One command from its arguments to its exit code."""

from __future__ import annotations

import logging
import sys
import warnings
from importlib import import_module

from jsonargparse import set_parsing_settings

from fedsim.cli.commands import run_plain_command
from fedsim.cli.config_files import normalise
from fedsim.cli.fit import LIGHTNING_COMMANDS, FedSimCLI, rank_of_this_process, say
from fedsim.cli.papers.files import with_paper
from fedsim.cli.run_directory import with_own_config
from fedsim.cli.verdicts import one_line, verdict_on
from fedsim.core.errors import PeerError, RunStoppedError
from fedsim.federation.callbacks.tracking import end_run
from fedsim.strategy.launch import await_rank_0

_MOVED = {  # since version 0.2
    "fedsim.selection": "fedsim.federation.selection",
    "fedsim.privacy": "fedsim.federation.privacy",
    "fedsim.server": "fedsim.training.server_optimizers",
    "fedsim.callbacks": "fedsim.federation.callbacks",
    "fedsim.method": "fedsim.methods.base",
}


def run_command(args: list[str]) -> int:
    """Run a command of which ``fedsim.__main__`` knows that it exists.

    Returns:
        0; 1 if draws of a sweep failed; 2 for wrong settings, folders or files, and for lost ranks; 128 + its number if
        a signal ended the command.
    """
    _set_up_messages()
    # configs of older runs name classes where they were; and the parser knows short names of loaded classes
    for old, new in _MOVED.items():
        sys.modules.setdefault(old, import_module(new))
    # help says what is written below settings' fields; to read it takes a second, also of a later command
    set_parsing_settings(docstring_parse_attribute_docstrings=bool({"-h", "--help"} & set(args)))
    code = 1  # of a defect
    try:
        code = _verdict(args)
    finally:
        end_run(code)
    return code


def _verdict(args: list[str]) -> int:
    """Run a command, say in one line what is wrong, and return the exit code."""
    try:
        command, rest = args[0], args[1:]
        if command in LIGHTNING_COMMANDS:
            FedSimCLI([command, *with_own_config(command, normalise(with_paper(rest)))])
        else:
            say(run_plain_command(command, rest))
    except BaseException as error:
        verdict = verdict_on(error, " ".join(args[:2] if args[0] in ("augment", "data") else args[:1]))
        if verdict is None:  # a defect, or the parser's own exit: let it be seen
            raise
        # when rank 0 is gone, somebody else must speak
        if rank_of_this_process() == 0 or (isinstance(error, PeerError) and error.rank == 0):
            sys.stderr.write(f"fedsim: error: {one_line(verdict.message)}\n")
        elif not isinstance(error, PeerError | RunStoppedError) and await_rank_0(verdict.code):
            sys.stderr.write(f"fedsim: error: rank {rank_of_this_process()}: {one_line(verdict.message)}\n")
        # of a run that ends in order, one rank says so
        stopped = isinstance(error, RunStoppedError) and rank_of_this_process() > 0
        return 0 if stopped else verdict.code
    return 0


def _set_up_messages() -> None:
    """Messages to stderr, on the first rank only; silence what Lightning says that does not hold here."""
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    logging.getLogger("fedsim").setLevel(logging.INFO if rank_of_this_process() == 0 else logging.ERROR)
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for message in (
        ".*LightningCLI's args parameter is intended.*",  # they are the command line, with None normalised
        ".*`srun` command is available.*",  # where it is needed, fedsim.strategy.launch says so
        ".*does not have many workers.*",  # loaders yield one empty batch per round
        ".*sync_dist=True.*",  # scores are equal on all ranks before they are logged
        ".*Experiment logs directory.*exists and is not empty.*",  # --overwrite asked for it
        ".*Checkpoint directory.*exists and is not empty.*",
        ".*barrier\\(\\): using the device under current context.*",
        ".*is supported for historical reasons but its usage is discouraged.*",
        ".*isinstance\\(treespec, LeafSpec\\).*",  # Lightning's own use of torch
        ".*GPU available but not used.*",
        ".*callbacks used to create the checkpoint need to be provided.*",  # those of a fit, when only scoring
    ):
        warnings.filterwarnings("ignore", message)
