"""One command from its arguments to its exit code. It imports what the command needs, and no more."""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback

import yaml
from jsonargparse import get_loader, set_loader, set_parsing_settings

from fedsim.cli.commands import call, plain_command
from fedsim.cli.predict_forms import refuse_other_form
from fedsim.core.collector import imports_without_collection
from fedsim.core.errors import PeerError, RunStoppedError, StopSignal
from fedsim.core.false_alarms import ignore_false_alarms
from fedsim.core.slurm_job import requeue
from fedsim.papers.files import rotation_in, with_paper
from fedsim.parsing.agent_words import words_of_first_start
from fedsim.parsing.command_line import checked, given, merged, options_in, with_default_classes
from fedsim.parsing.config_files import normalise, with_shipped, without_gone
from fedsim.parsing.early import check_environment, is_alone, refuse_used_folder, start_ranks
from fedsim.parsing.error_lines import CommandFailure, failure_of
from fedsim.parsing.options import asks_for_help, check_arguments, check_configs, check_options, kept_arguments
from fedsim.parsing.output import end_output, print_error, print_text, rank_of_this_process
from fedsim.parsing.typed_names import with_quotes
from fedsim.settings.options import SCORING, WITH_TRAINER

_load_yaml = get_loader("yaml")  # the parser's own


def run_command(args: list[str]) -> int:
    """Run a command that ``fedsim.__main__`` has checked to exist.

    Returns:
        0; 1 if runs of a sweep failed, or doctor found a problem that prevents a fit; 2 for wrong settings, folders or
        files, and for lost ranks; 128 + its number if a signal ended the command.
    """
    code, has_failed = 1, True  # of a defect
    try:
        code, has_failed = _code_of(args)
    finally:
        if "wandb" in sys.modules:  # a command with a run of W&B has imported it
            from fedsim.federation.callbacks.tracking import end_run

            end_run(code)
        if has_failed and "fedsim.strategy.sharing" in sys.modules:  # else this process has joined no others
            _leave_other_ranks(code)
    return code


def _leave_other_ranks(code: int) -> None:
    """End this process now if it is one of several ranks: NCCL's end would wait for a rank that is lost."""
    from fedsim.strategy.channel import end_process
    from fedsim.strategy.sharing import has_other_ranks

    if has_other_ranks():
        if sys.exc_info()[0] is not None:  # a defect
            traceback.print_exc()
        end_output()
        end_process("", code)


def _code_of(args: list[str]) -> tuple[int, bool]:
    """Run a command, write an error as one line, and return the exit code, and whether there was an error."""
    try:
        _run(args[0], args[1:])
    except BaseException as error:
        failure = failure_of(error, " ".join(args[:2] if args[0] in ("augment", "data") else args[:1]))
        if failure is None:  # a defect, or the parser's own exit: not caught
            raise
        if (
            isinstance(error, StopSignal)
            and error.signum == signal.SIGUSR1
            and (args[0] == "fit" or (args[:2] == ["augment", "fit"] and "row" not in dict(options_in(args))))
            and rank_of_this_process() == 0
        ):
            failure = failure._replace(message="; ".join(filter(None, (failure.message, requeue()))))
        _report(error, failure)
        # if a signal has ended the run, only rank 0 returns the signal's code; under torchrun all ranks do, because an
        # agent whose ranks succeed waits minutes for the other agents
        returns_code = rank_of_this_process() == 0 or "TORCHELASTIC_RUN_ID" in os.environ
        return failure.code if returns_code or not isinstance(error, RunStoppedError | StopSignal) else 0, True
    return 0, False


def _run(command: str, words: list[str]) -> None:
    """Import a command, set up messages (after the import, in which Lightning sets up its own), and run it."""
    check_environment()  # Lightning would read these variables in its import
    words = checked(words_of_first_start(words) if command == "fit" else words, is_kept=command in WITH_TRAINER)
    set_loader("yaml", lambda yaml_text: without_gone(_load_yaml(with_quotes(yaml_text))), exceptions=(yaml.YAMLError,))
    # help contains the docstrings of settings' fields; to parse them takes a second, also in a later command
    if command in WITH_TRAINER:
        words = [word for i, word in enumerate(words) if word != "all" or words[i - 1 : i] not in (["-h"], ["--help"])]
    helps = asks_for_help(words)
    set_parsing_settings(docstring_parse_attribute_docstrings=helps)
    names = dict(options_in(words)).keys()
    if command == "predict":
        refuse_other_form(names)
    if command == "fit" and not helps and ("left_out" in names or rotation_in(words)):
        from fedsim.sweep.rotation import run as run_rotation

        set_up_messages()
        print_text(run_rotation(words))
    elif command == "fit" and not helps and {"seeds", "parallel"} & names:
        from fedsim.sweep.seeds import run as run_seeds

        set_up_messages()
        print_text(run_seeds(words))
    elif command == "predict" and "images" in names:
        from fedsim.inference.model import predict_images

        set_up_messages()
        print_text(call(predict_images, words, command))
    elif command in WITH_TRAINER:
        _run_with_trainer(command, words, helps)
    else:
        check_configs([] if helps else words)
        with imports_without_collection():
            plain = plain_command(command, words)
        set_up_messages()
        print_text(plain(words))


def _run_with_trainer(command: str, words: list[str], helps: bool) -> None:
    """Refuse what the table of settings lacks, start the other ranks, import the command, and run it."""
    check_options(words, command)
    words = with_shipped(normalise(with_paper(words)))
    settings = [] if helps else list(given(words))
    check_arguments(settings, command)
    words = with_default_classes(words, settings)
    if command == "fit" and not helps:
        refuse_used_folder(merged(settings))
    if command != "describe" and not helps:
        start_ranks(merged(settings))
    with imports_without_collection():
        from fedsim.cli.fit import run

    set_up_messages(scores=command in SCORING)
    for warning in kept_arguments(settings):
        logging.getLogger("fedsim").warning(warning)
    run(command, words)


def _report(error: BaseException, failure: CommandFailure) -> None:
    """Write the error on one rank: on rank 0, or on another one if rank 0 is lost."""
    rank = rank_of_this_process()
    if rank == 0 or is_alone() or (isinstance(error, PeerError) and error.rank == 0):
        print_error(failure.message)
    elif not isinstance(error, PeerError | RunStoppedError | StopSignal):
        from fedsim.strategy.launch import await_rank_0

        if await_rank_0(failure.code):
            print_error(f"rank {rank}: {failure.message}")


def set_up_messages(scores: bool = False) -> None:
    """Write messages to stderr, on the first rank only; hide Lightning's messages that do not apply to fedsim."""
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    logging.getLogger("fedsim").setLevel(logging.INFO if rank_of_this_process() == 0 else logging.ERROR)
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    ignore_false_alarms(scores)
