"""``fedsim slurm FOLDER``: writes the scripts for Slurm, which come with the package."""

from __future__ import annotations

import re
from pathlib import Path

from fedsim.cli.commands import call, with_option
from fedsim.core.checked import checked
from fedsim.core.errors import ConfigError
from fedsim.core.files import replacing
from fedsim.core.names import printable
from fedsim.core.paths import OutputFolder

_SCRIPTS = Path(__file__).parents[2] / "slurm"
_PATH = re.compile(r"\bslurm/(?=\w+\.(?:sbatch|sh)\b)")


def run(args: list[str]) -> str:
    """Run ``fedsim slurm FOLDER``."""
    return call(write_scripts, with_option(args, "--folder"), "slurm")


@checked("--")
def write_scripts(folder: OutputFolder = "slurm") -> str:
    """Write the scripts for Slurm into a folder; submit them from the folder in which this command ran.

    Args:
        folder: a path below this folder, of letters, digits, ``_``, ``.``, ``-`` and ``/``, as the scripts name it.

    Raises:
        ConfigError: if ``folder`` is another path, or one of the scripts is there already.
    """
    path = Path(folder)
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)*", folder, re.ASCII) or ".." in path.parts or path == Path():
        raise ConfigError(f"--folder: {printable(folder)} cannot be named in the scripts; give a path such as slurm")
    scripts = sorted(script for script in _SCRIPTS.iterdir() if script.suffix in (".sh", ".sbatch"))
    if present := [script.name for script in scripts if (path / script.name).exists()]:
        raise ConfigError(f"--folder: {path / present[0]} exists already; remove it, or give another folder")
    for script in scripts:
        with replacing(path / script.name, new=True) as partial:
            partial.write_text(_PATH.sub(f"{path.as_posix()}/", script.read_text()))
            partial.chmod(0o755)
    names = ", ".join(script.name for script in scripts)
    first = f"sbatch {path / 'fit.sbatch'} --config FILE --run_dir runs/mine"
    return f"wrote {path}: {names}\nwrite the settings of your cluster into {path / 'site.sh'}, then: {first}"
