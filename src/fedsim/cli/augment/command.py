"""``fedsim augment fit | preview | write``: a generator of people per client (paper 002, Figures 5 and 6)."""

from __future__ import annotations

import yaml

from fedsim.cli.augment.fit import built, fit, fit_parser
from fedsim.cli.augment.processes import ending_on_signals
from fedsim.cli.augment.settings import check_settings_files
from fedsim.cli.commands import run_subcommand
from fedsim.core.errors import ConfigError
from fedsim.papers.files import with_paper
from fedsim.parsing.config_files import join_configs, with_shipped
from fedsim.parsing.error_lines import parsed
from fedsim.strategy.launch import find_launch, leave_launcher


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
    with ending_on_signals(is_first=arguments.row is None):
        return fit(**built(parser, arguments), options=options)
