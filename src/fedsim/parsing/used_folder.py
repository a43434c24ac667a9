"""Refuse a fit into the folder of another run at once: seconds before the imports that parse the command line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedsim.core.errors import ConfigError, FedSimError
from fedsim.core.paths import expanded
from fedsim.core.run_lock import WAYS, RunLock
from fedsim.parsing.output import rank_of_this_process


def refuse_used_folder(settings: Mapping[str, Any]) -> None:
    """Refuse a fit whose ``run_dir`` has the results of a run, if it neither continues nor replaces that.

    Only what is certain before the imports is refused here; the fit itself looks again, after its other checks.

    Args:
        settings: those of the command line and its config files.

    Raises:
        ConfigError: naming the folder and the ways on.
    """
    run_dir, may_go_on = settings.get("run_dir"), settings.get("overwrite") or settings.get("ckpt_path")
    if run_dir is None or may_go_on or "print_config" in settings or rank_of_this_process() > 0:
        return
    try:
        folder = Path(expanded(str(run_dir), "run_dir"))
        is_used = (folder / "summary.json").is_file()
    except (FedSimError, OSError, ValueError):  # the fit names the mistake
        return
    if is_used:
        RunLock(folder).look()
        raise ConfigError(f"run_dir: {folder} holds a run already; {WAYS}")
