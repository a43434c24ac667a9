"""The words of a run that W&B's agent starts: a restart begins with those of the first start.

When W&B's server restarts a preempted run, it passes the whole config that was logged, with keys of its own, and
absolute paths are shortened there: https://github.com/wandb/wandb/issues/9143 and issue 4237.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from fedsim.core.errors import DataError
from fedsim.core.files import replacing
from fedsim.core.names import file_name
from fedsim.core.paths import expanded
from fedsim.core.readable import has_file
from fedsim.parsing.command_line import options_in

_FILE = "agent_words.json"


def folder_of_sweep_run() -> str | None:
    """Return the folder of a run of W&B's agent, the same one if the server repeats the run; None for other runs."""
    sweep, run = os.environ.get("WANDB_SWEEP_ID"), os.environ.get("WANDB_RUN_ID")
    return f"runs/sweep-{file_name(sweep)}/{file_name(run)}" if sweep and run else None


def words_of_first_start(words: Sequence[str]) -> list[str]:
    """Return the words after ``fit`` with which an agent's run began, to go on; or the given ones if it begins now.

    Raises:
        DataError: if the file with the words is damaged.
    """
    folder = folder_of_sweep_run()
    if folder is None:
        return [*words]
    kept = _kept_words(Path(expanded(dict(options_in(words)).get("run_dir", folder), "run_dir")))
    if kept is None:
        return [*words]
    options = dict(options_in(kept))
    # a fit that replaced a run goes on with itself
    goes_on = ["--overwrite=false"] * ("overwrite" in options) + ["--ckpt_path", "last"]
    return kept if "ckpt_path" in options else [*kept, *goes_on]


def keep_words(folder: Path, words: Sequence[str]) -> None:
    """Write the words of the run that an agent starts into its folder, when it first begins."""
    if _kept_words(folder) is None:
        with replacing(folder / _FILE) as partial:
            partial.write_text(json.dumps({"run": os.environ["WANDB_RUN_ID"], "words": [*words]}, indent=1) + "\n")


def _kept_words(folder: Path) -> list[str] | None:
    """Return the words in a folder; None if there are none of this run."""
    path = folder / _FILE
    if not has_file(path):
        return None
    try:
        kept = json.loads(path.read_bytes())
        return [str(word) for word in kept["words"]] if kept["run"] == os.environ["WANDB_RUN_ID"] else None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: cannot be read ({type(error).__name__}); was it edited?") from error
