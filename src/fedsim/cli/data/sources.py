"""``fedsim data check`` and ``preview`` with ``--data.source``: of data sets that a reader of your own lists."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fedsim.cli.data.configs import data_of
from fedsim.core.checked import checked
from fedsim.core.errors import NotReadyError
from fedsim.core.paths import Config, NewPicture, Picture
from fedsim.data.check import findings_of, refuse_unusable, table_of
from fedsim.data.preview import write_contact_sheet
from fedsim.parsing.output import print_text
from fedsim.testing import PartRefusedError, check_source

_SMALL = (128, 64)
"""height and width of the pictures, unless data.size is given"""


def check_source_of(settings: list[str]) -> Callable[..., str]:
    """Return the command for ``settings``, words of the section data."""

    @checked("--")
    def check(config: Config | None = None, picture: Picture | None = None) -> str:
        """List the data sets that data.source reads, and check their numbers, labels and some of their images.

        The exit code is 1 if one of them cannot be used.

        Args:
            config: config files whose data section is read first.
            picture: an image file for a contact sheet of what was read; null draws none.
        """
        data = data_of(config or [], settings)
        domains = data.list_domains()
        findings = [finding for source in data.sources for finding in findings_of(source)]
        print_text(table_of(findings))
        refuse_unusable(Path(), findings)
        for source in data.sources:
            try:
                check_source(source)
            except PartRefusedError as error:
                print_text(f"\n{error}")
                raise NotReadyError(f"data.source: {error.findings[0]}") from error
        if picture is not None:
            write_contact_sheet(domains, _SMALL, Path(picture))
        drawn = f"; wrote {picture}" if picture else ""
        return f"\nno finding{drawn}"

    return check


def preview_source_of(settings: list[str]) -> Callable[..., str]:
    """Return the command for ``settings``, words of the section data."""

    @checked("--")
    def preview(config: Config | None = None, output: NewPicture = "preview.png") -> str:
        """Draw a contact sheet of the data sets that data.source reads: a few people, seen by several cameras.

        Args:
            config: config files whose data section is read first.
            output: the image file to write; it must not exist.
        """
        data = data_of(config or [], settings)
        is_sized = config or any(word.startswith("--data.size") for word in settings)
        domains = data.list_domains()
        write_contact_sheet(domains, data.size if is_sized else _SMALL, Path(output))
        return f"wrote {output}: {len(domains)} data sets"

    return preview
