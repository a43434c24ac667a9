"""``fedsim report SWEEP``: the trials of a search as a table, a figure and a page."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from fedsim._version import __version__
from fedsim.core.checked import checked
from fedsim.core.paths import Figure, Page
from fedsim.report.layout import Block, Format
from fedsim.report.study import SearchTrials, read_trials
from fedsim.report.trials import trial_block
from fedsim.report.trials_figure import draw_trials

log = logging.getLogger(__name__)


@checked("--")
def trials_report(
    folder: Path, format_: Format = "table", figure: Figure | None = None, html: Page | None = None
) -> str:
    """Return the table of the trials in a sweep's folder; draw them into ``figure``, write a page into ``html``.

    Raises:
        DataError: if the trials cannot be read or drawn, or a file cannot be written, or its name has another suffix.
        ConfigError: if a library that the page needs is missing.
    """
    trials = read_trials(folder)
    block, written = trial_block(trials), list[str]()
    if figure is not None:
        draw_trials(trials, Path(figure))
        written.append(f"wrote {figure}")
    if html is not None:
        _write_page(trials, block, folder, Path(html))
        written.append(f"wrote {html}")
    if format_ == "table":
        return "\n\n".join([block.text(format_), *written])
    for message in (*block.notes, *written):
        log.info(message)
    return block.text(format_)


def _write_page(trials: SearchTrials, block: Block, folder: Path, path: Path) -> None:
    """Write the table, sortable, and the figure into one file that needs no network."""
    from fedsim.report.html.page import embedded, write_template  # needs optional libraries

    picture = ""
    with TemporaryDirectory() as temporary:
        if trials.complete:
            drawn = Path(temporary, "trials.png")
            draw_trials(trials, drawn)
            picture = embedded(drawn)
    content = {"folder": str(folder), "made": time.strftime("%Y-%m-%d %H:%M"), "version": __version__,
               "trials": block, "picture": picture}  # fmt: skip
    write_template("trials.html", content, path)
