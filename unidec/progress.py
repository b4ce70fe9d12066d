"""Progress of long work: a tqdm bar on a terminal, otherwise plain lines with rate and remaining
time.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

from tqdm import tqdm

T = TypeVar("T")

QUIET_SECONDS = 1.0  # shorter work prints no line
LINE_SECONDS = 10.0  # between two lines
LINE = (
    "{desc}: {n_fmt}/{total_fmt} ({percentage:.0f}%), {rate_fmt}, {elapsed} elapsed, {remaining} "
    "left{postfix}"
)
LINE_WITHOUT_TOTAL = "{desc}: {n_fmt}, {rate_fmt}, {elapsed} elapsed{postfix}"
_silent = False


class Progress(tqdm, Generic[T]):
    """A tqdm bar on stderr; if that is not a terminal, prints a line every `LINE_SECONDS` and one
    at the end.
    """

    def __init__(self, iterable: Iterable[T] | None, **options: Any):
        self.lines = not sys.stderr.isatty()
        if self.lines:
            options |= {"mininterval": LINE_SECONDS, "delay": LINE_SECONDS}
            options |= {"miniters": 1, "smoothing": 0}
        super().__init__(iterable, dynamic_ncols=True, **options)

    def note(self, text: str) -> None:
        """Show a short text (a loss, a file name) after the counts, from the next refresh on."""
        self.set_postfix_str(text, refresh=False)

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Refresh the bar, or print a line."""
        if not self.lines:
            super().display(msg, pos)
            return
        facts = {
            **self.format_dict,
            "ncols": None,
            "bar_format": LINE if self.total else LINE_WITHOUT_TOTAL,
        }
        with contextlib.suppress(BrokenPipeError):  # the work continues if its output was closed
            print(self.format_meter(**facts), file=self.fp, flush=True)

    def close(self) -> None:
        """End the display; a second call does nothing."""
        if not self.lines:
            super().close()
        elif not self.disable:
            if self.format_dict["elapsed"] >= QUIET_SECONDS:
                self.display()
            self.disable = True
            type(self)._decr_instances(self)  # type: ignore[attr-defined]  # free the line of the bar


def progress(
    iterable: Iterable[Any] | None = None,
    *,
    total: int | None = None,
    desc: str | None,
    unit: str = "it",
) -> Progress[Any]:
    """Show the progress of long work on stderr.

    With an iterable, each item counts as one unit; without one, use the result as a context manager
    and call `.update(n)`. If stderr is not a terminal, a line is printed every `LINE_SECONDS`.
    Without `desc` nothing is shown.
    """
    is_silent = _silent or desc is None
    return Progress(iterable, total=total, desc=desc, unit=unit, disable=is_silent)


def silence() -> None:
    """Turn off the display of progress, because another process of the same training shows it."""
    global _silent
    _silent = True


def say(line: str) -> None:
    """Print one line on stderr, because stdout is for results."""
    if not _silent:
        with contextlib.suppress(OSError):  # the work continues if its output was closed
            print(line, file=sys.stderr, flush=True)
