"""The command ``fedsim``. Help, version and wrong commands are handled here, without an import of torch."""

from __future__ import annotations

import os
import signal
import sys

from fedsim._version import __version__
from fedsim.core.errors import FedSimError, StopSignal
from fedsim.core.names import did_you_mean
from fedsim.core.quick_end import end_quickly, prepare_quick_end
from fedsim.core.stop_signals import listening
from fedsim.parsing.early import is_alone
from fedsim.parsing.output import end_output, prepare_output, print_error, print_text, rank_of_this_process

COMMANDS = {
    "fit": "train a federation and score it as it learns",
    "validate": "score a checkpoint on the clients' validation data",
    "test": "score a checkpoint on the test sets",
    "predict": "write a checkpoint's features of all test sets (npz files)",
    "init": "write a commented config for a folder of data sets",
    "describe": "show the shared tensors, the clients' data and the cost of a run",
    "doctor": "check this machine: its hardware, the part that a fit would use, and problems",
    "data": "data check: list data sets; preview: draw them; prepare: decode them; manifest, splits, ...: see --help",
    "augment": "augment fit: train a generator of people per client; preview: draw its images; write: write them",
    "rank": "score features from any program: CMC, mAP, mINP, re-ranking",
    "export": "write a checkpoint's global model as safetensors",
    "report": "print a table of finished runs, and plot it",
    "slurm": "write the scripts for Slurm into a folder",
    "sweep": "run the sweep of a W&B file, a method or a paper on this machine, or print its command lines",
    "list": "list the methods, backbones, data sets, ... that a config can name, with a line each",
    "completion": "print a script that completes commands and options in bash, zsh or tcsh",
    "papers": "list the papers whose rows fit --paper can run, or show one with its printed numbers",
}

_CHOICES = f"choose from {', '.join(COMMANDS)}"
_WITH_SHORT_HELP = ("fit", "validate", "test", "predict", "describe")

_HELP = """\
usage: fedsim COMMAND [options]

Federated person re-identification on PyTorch Lightning.

commands:
{commands}

  fedsim COMMAND --help      options of a command
  fedsim --version

first steps:
  fedsim fit --config quickstart
  fedsim list
  fedsim papers
  fedsim fit --config data/synthetic --config methods/fedpav --model.backbone SmallCNN
"""


def command() -> int:
    """Run the command of a process that does nothing else; return as :func:`main`."""
    prepare_quick_end()
    code = main()
    end_quickly(code)
    return code


def main(args: list[str] | None = None) -> int:
    """Run one command.

    Args:
        args: the command line without the program's name; None takes ``sys.argv``.

    Returns:
        exit code: 0, or 2 after a wrong command, option, config, folder or file; 1 if runs of a sweep failed, or
        doctor found a problem that prevents a fit.
    """
    with listening(to_the_end=args is None):
        prepare_output()
        try:
            return _run(sys.argv[1:] if args is None else args)
        except FedSimError as error:  # of a command that needs no torch; the others have their own handling
            print_error(str(error))
            return 2
        except (StopSignal, KeyboardInterrupt) as stop:  # before the command has its own handling of errors
            if rank_of_this_process() == 0 or is_alone():  # a launcher stops the others when the first one ends
                print_error(str(stop) or "interrupted")
            return 128 + getattr(stop, "signum", signal.SIGINT)
        finally:
            end_output()


def _run(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        width = max(map(len, COMMANDS))
        print_text(_HELP.format(commands="\n".join(f"  {n:<{width}}  {text}" for n, text in COMMANDS.items())).rstrip())
        return 0
    if args[0] in ("-V", "--version"):
        print_text(f"fedsim {__version__}")
        return 0
    if args[0] not in COMMANDS:
        does = [name for name, text in COMMANDS.items() if text.startswith(f"{args[0]} ")]
        remedy = f"did you mean {' or '.join(does)}?" if does else did_you_mean(args[0], COMMANDS, _CHOICES)
        print_error(f"there is no command {args[0]}; {remedy}")
        return 2
    if os.getcwd() not in map(os.path.abspath, sys.path):  # so that the console script finds the user's classes
        sys.path.insert(0, os.getcwd())
    if args[0] == "papers":
        from fedsim.cli.papers import run_papers_command

        print_text(run_papers_command(args[1:]))
        return 0
    helps = any(word in ("-h", "--help") for word in args[1:]) and args[-1] != "all"
    if args[0] in ("list", "completion") or (helps and args[0] in _WITH_SHORT_HELP):
        from fedsim.cli.light import run_light

        print_text(run_light(args, COMMANDS))
        return 0
    # fedsim reports a lost connection in one line; torch would add pages of C++ frames
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from fedsim.cli.app import run_command

    return run_command(args)


if __name__ == "__main__":
    sys.exit(command())
