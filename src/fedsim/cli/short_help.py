"""Help of the commands that train or score: the usual options on one screen, and where the others are explained."""

from __future__ import annotations

import textwrap

from fedsim.cli.options import arguments_of_section, texts_of_section

_USUAL = {
    "--config FILE": "settings; may be given several times, later ones win",
    "--paper 003/table5": "a row of a paper's table; fedsim papers lists them",
    "--run_dir FOLDER": "where the run writes; default: runs/METHOD-seedN",
    "--overwrite true": "replace the run that is there",
    "--ckpt_path RUN_DIR": "continue this run, or score it",
    "--seed_everything N": "seed of all randomness",
    "--seeds 0 1 2": "fit: a run per seed, then their means and spread; --parallel 2: two at once",
    "--trainer.max_epochs N": "communication rounds",
    "--trainer.devices N": "ranks: processes with a device each",
    "--trainer.accelerator cpu": "or cuda, auto",
    "--trainer.check_val_every_n_epoch N": "rounds between two evaluations",
    "--trainer.precision bf16-mixed": "or 32-true",
    "--print_config": "print all settings, and do nothing",
}
_OF_MODEL = (
    "method",
    "backbone",
    "neck",
    "client",
    "clients",
    "objective",
    "selection",
    "server_optimizer",
    "evaluation",
)
_OF_DATA = ("source", "partition", "unseen", "val", "size", "augmentation", "cache_dir", "dry_run")
_WIDTH = 118
_COLUMN = 38


def short_help(command: str, what: str) -> str:
    """Return the help of a command on one screen; ``what`` it does, in a line."""
    lines = [f"usage: fedsim {command} --config FILE [options]: {what}", ""]
    lines += [_line(option, text) for option, text in _USUAL.items()]
    for section, chosen in (("model", _OF_MODEL), ("data", _OF_DATA)):
        texts = texts_of_section(section)
        lines += ["", *(_line(f"--{section}.{name}", texts[name]) for name in chosen)]
        lines += _others(section, chosen)
    lines += ["", *_others("trainer", [option.split(".")[1].split()[0] for option in _USUAL if "trainer." in option])]
    lines += [
        "",
        f"fedsim {command} --help all           every option with its fields",
        f"fedsim {command} --model.method.help FedPav   options of a class; fedsim list: all classes",
    ]
    return "\n".join(lines)


def _line(option: str, text: str) -> str:
    return f"  {option:<{_COLUMN}}{textwrap.shorten(text, _WIDTH - _COLUMN - 2, placeholder=' ...')}"


def _others(section: str, chosen: tuple[str, ...] | list[str]) -> list[str]:
    names = [name for name in arguments_of_section(section) if name not in chosen]
    return textwrap.wrap(f"  --{section}. also has {', '.join(names)}", _WIDTH, subsequent_indent=" " * 4)
