"""The findings of a check: one sentence each, and one error with all of them."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fedsim

_OWN = str(Path(fedsim.__file__).parent)


class PartRefusedError(AssertionError):
    """A part does not keep what fedsim needs. ``findings`` are the sentences; the message has one on each line."""

    def __init__(self, name: str, findings: tuple[str, ...]) -> None:
        self.findings = findings
        super().__init__("\n".join([f"{name}: {len(findings)} finding(s)", *(f"- {f}" for f in findings)]))


class Findings:
    """Collects sentences about the part called ``name``; each is kept once."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._sentences: dict[str, None] = {}

    def add(self, sentence: str) -> None:
        """Note a finding."""
        self._sentences[sentence] = None

    def add_all(self, sentences: Iterable[str]) -> None:
        """Note several findings."""
        self._sentences |= dict.fromkeys(sentences)

    def __iter__(self) -> Iterator[str]:
        return iter(self._sentences)

    def __bool__(self) -> bool:
        return bool(self._sentences)

    @contextmanager
    def trying(self, deed: str) -> Iterator[None]:
        """Turn an error of the block into a finding; ``deed`` is what raises, such as ``decode``."""
        try:
            yield
        except Exception as error:  # of code that is tried, any type
            self.add(f"{deed} raises {described(error)}")

    def try_elsewhere(self, deed: Callable[[], Any]) -> None:
        """Note if code on tensors of the device ``meta`` makes tensors on the CPU, which a GPU would refuse.

        Other errors there say nothing: without data, some operations cannot be done.
        """
        try:
            deed()
        except Exception as error:  # of code that is tried, any type
            if "is not on the expected device" in str(error):
                self.add(
                    f"it makes tensors on the CPU, which fail beside those of a GPU: give them the device of its "
                    f"arguments; {described(error)}"
                )

    def settle(self) -> None:
        """Raise PartRefusedError if there are findings."""
        if self._sentences:
            raise PartRefusedError(self.name, tuple(self._sentences))


def described(error: BaseException) -> str:
    """Return type, message and place of an error in one line; the place is the last one outside of fedsim and torch."""
    message = " ".join(str(error).split())
    summary = f"{type(error).__name__}: {message}" if message else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    outside = [f for f in frames if not f.filename.startswith(_OWN) and "site-packages" not in f.filename]
    last_frames = [*outside[-1:], *frames[-1:]]
    return f"{summary} ({Path(last_frames[0].filename).name}, line {last_frames[0].lineno})" if last_frames else summary
