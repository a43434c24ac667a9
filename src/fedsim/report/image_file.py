"""Image files of figures, written by matplotlib."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsim.core.errors import DataError
from fedsim.core.files import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@contextmanager
def new_figure(width: float, height: float) -> Iterator[Figure]:
    """Yield an empty figure; sizes in inches. Within the block, text is small, and the text of PDFs can be searched."""
    import matplotlib as mpl  # slow to import
    from matplotlib.figure import Figure

    small: dict[Any, Any] = {"font.size": 8, "axes.titlesize": 8, "legend.fontsize": 7.5, "hatch.linewidth": 0.6}
    plain: dict[Any, Any] = {"text.parse_math": False, "text.usetex": False}  # a $ in a name begins no formula
    with mpl.rc_context({**small, **plain, "pdf.fonttype": 42, "ps.fonttype": 42, "svg.fonttype": "none"}):
        yield Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, path: Path, option: str) -> None:
    """Write an image file in the format of its suffix; errors name ``option``, the option that gave the path."""
    image_format = path.suffix.removeprefix(".").lower()
    formats = figure.canvas.get_supported_filetypes()
    if image_format not in formats:
        reason = f"{path.suffix or 'no suffix'} is none of {', '.join(sorted(formats))}"
        raise DataError(f"{path}: cannot write the figure ({reason}); choose another {option}")
    try:
        with replacing(path) as partial, warnings.catch_warnings():
            # a name in letters that the font lacks is drawn in boxes; a line per letter would hide other messages
            warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from", UserWarning)
            warnings.filterwarnings("ignore", "constrained_layout not applied", UserWarning)  # of very long names
            figure.savefig(partial, format=image_format, dpi=200)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot write the figure ({error}); choose another {option}") from error
