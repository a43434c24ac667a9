"""The settings of built objects, against the configs from which the command line has built them."""

import pytest

import others
from fedsim.cli.checks import give_old_addresses
from fedsim.cli.fit import FedSimCLI
from fedsim.federation.callbacks.script_config import describe_script
from fedsim.parsing.config_files import shipped_configs, with_shipped
from fedsim.settings.changes import changes_between

NAMES = sorted(name for name in shipped_configs() if name.startswith(("methods/", "recipes/")) or name == "quickstart")
SOME = {"methods/fedpav", "methods/dacs", "methods/feddip", "recipes/attacks", "recipes/mixstyle", "quickstart"}


class Built(FedSimCLI):
    """Builds the objects, and runs no command."""

    def _run_subcommand(self, subcommand):
        """Do nothing."""


def built_from(*configs):
    give_old_addresses()  # as each command does: the parser finds short names of loaded classes alone
    words = [word for config in configs for word in ("--config", config)]
    cli = Built(["describe", *with_shipped(words), "--data.dry_run=true", "--trainer.accelerator=cpu"])
    described = describe_script(cli.model, cli.datamodule, {})
    return described, cli._resolved()


@pytest.mark.parametrize("name", [pytest.param(name, marks=others.unless(name in SOME)) for name in NAMES])
def test_a_config_is_written_back_from_its_objects(name):
    described, resolved = built_from(*dict.fromkeys(["quickstart", name]))
    assert described.unwritable == ""
    assert changes_between({**resolved, "trainer": {}}, {**described.config, "trainer": {}}, 0) == []
    both = [set(flat(config["model"])) | set(flat(config["data"])) for config in (resolved, described.config)]
    assert both[0] - {"seed"} == both[1], "no field is missing, and none is new"


def flat(value, name=""):
    if not isinstance(value, dict):
        return [name]
    return [leaf for key, inner in value.items() for leaf in flat(inner, f"{name}.{key}".removeprefix("."))] or [name]
