"""One command from its arguments to its exit code. It imports what the command needs, and no more."""

from __future__ import annotations

import logging
import os
import sys

from jsonargparse import set_parsing_settings

from fedsim.cli.commands import plain_command
from fedsim.core.collector import imports_without_collection
from fedsim.core.errors import PeerError, RunStoppedError
from fedsim.core.false_alarms import ignore_false_alarms
from fedsim.parsing.error_lines import CommandFailure, failure_of, one_line
from fedsim.parsing.options import WITH_TRAINER, asks_for_help, asks_for_several, check_options
from fedsim.parsing.output import print_text, rank_of_this_process
from fedsim.parsing.ranks import start_ranks


def run_command(args: list[str]) -> int:
    """Run a command of which ``fedsim.__main__`` knows that it exists.

    Returns:
        0; 1 if draws of a sweep failed, or doctor found something in the way; 2 for wrong settings, folders or files,
        and for lost ranks; 128 + its number if a signal ended the command.
    """
    code = 1  # of a defect
    try:
        code = _code_of(args)
    finally:
        if "wandb" in sys.modules:  # who has a run has imported it
            from fedsim.federation.callbacks.tracking import end_run

            end_run(code)
    return code


def _code_of(args: list[str]) -> int:
    """Run a command, say in one line what is wrong, and return the exit code."""
    try:
        _run(args[0], args[1:])
    except BaseException as error:
        failure = failure_of(error, " ".join(args[:2] if args[0] in ("augment", "data") else args[:1]))
        if failure is None:  # a defect, or the parser's own exit: let it be seen
            raise
        _report(error, failure)
        # of a run that ends in order, one rank says so; under torchrun all, as an agent whose ranks did well waits
        # minutes for the agents of the others
        says_so = rank_of_this_process() == 0 or "TORCHELASTIC_RUN_ID" in os.environ
        return failure.code if says_so or not isinstance(error, RunStoppedError) else 0
    return 0


def _run(command: str, words: list[str]) -> None:
    """Import a command, then set up messages: Lightning sets up its own on import. Then run it."""
    # help says what is written below settings' fields; to read it takes a second, also of a later command
    if command in WITH_TRAINER:
        words = [word for i, word in enumerate(words) if word != "all" or words[i - 1 : i] not in (["-h"], ["--help"])]
    helps = asks_for_help(words)
    set_parsing_settings(docstring_parse_attribute_docstrings=helps)
    if asks_for_several(words, command) and not helps:
        from fedsim.sweep.seeds import run as run_seeds

        _set_up_messages()
        print_text(run_seeds(words))
    elif command in WITH_TRAINER:
        check_options(words, command)
        if command != "describe" and not helps:
            start_ranks(words)
        with imports_without_collection():
            from fedsim.cli.fit import run

        _set_up_messages()
        run(command, words)
    else:
        with imports_without_collection():
            plain = plain_command(command, words)
        _set_up_messages()
        print_text(plain(words))


def _report(error: BaseException, failure: CommandFailure) -> None:
    """Say on one rank what is wrong: on rank 0, or when that is gone, on another one."""
    rank, line = rank_of_this_process(), one_line(failure.message)
    if rank == 0 or (isinstance(error, PeerError) and error.rank == 0):
        sys.stderr.write(f"fedsim: error: {line}\n")
    elif not isinstance(error, PeerError | RunStoppedError):
        from fedsim.strategy.launch import await_rank_0

        if await_rank_0(failure.code):
            sys.stderr.write(f"fedsim: error: rank {rank}: {line}\n")


def _set_up_messages() -> None:
    """Messages to stderr, on the first rank only; silence what Lightning says that does not hold here."""
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    logging.getLogger("fedsim").setLevel(logging.INFO if rank_of_this_process() == 0 else logging.ERROR)
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    ignore_false_alarms()
