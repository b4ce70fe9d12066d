"""Progress of long work: tqdm's bar on a terminal, plain lines with rate and time left elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from typing import Any, Generic, TextIO, TypeVar

from tqdm import tqdm

T = TypeVar("T")

QUIET_SECONDS = 1.0  # shorter work prints no line
_silent = False


class Progress(tqdm, Generic[T]):
    """A tqdm bar; prints a line every `every` seconds and one at the end if the stream is not a terminal."""

    def __init__(self, iterable: Iterable[T] | None, every: float, stream: TextIO, **options: Any):
        self.lines = not stream.isatty()
        if self.lines:
            options |= {"mininterval": every, "miniters": 1, "delay": every}
        super().__init__(iterable, file=stream, dynamic_ncols=True, disable=_silent, **options)

    def note(self, text: str) -> None:
        """Show a few words (a loss, a file name) after the counts from the next refresh on."""
        self.set_postfix_str(text, refresh=False)

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Refresh the bar, or print a line."""
        if self.lines:
            self._print()
        else:
            super().display(msg, pos)

    def close(self) -> None:
        """End the display; a second call does nothing."""
        if not self.lines:
            super().close()
        elif not self.disable:
            self.disable = True
            type(self)._decr_instances(self)  # type: ignore[attr-defined]  # forget the bar's line
            failed = sys.exc_info()[0] not in (None, GeneratorExit)  # an early end of a loop is not a failure
            if failed or self.format_dict["elapsed"] >= QUIET_SECONDS:
                self._print("stopped" if failed else "done")

    def _print(self, ending: str = "") -> None:
        elapsed = max(self.format_dict["elapsed"], 1e-9)
        rate, unit = self.n / elapsed, self.unit
        share = f"/{self.total:,} ({100 * self.n / self.total:.0f}%)" if self.total else ""
        speed = f"{rate:,.1f} {unit}/s" if rate >= 1 or not self.n else f"{1 / rate:.1f} s/{unit}"
        if not ending and self.total and self.n:
            ending = f"{self.format_interval(max(self.total - self.n, 0) / rate)} left"
        parts = [f"{self.n:,}{share} {unit}", speed, f"{self.format_interval(elapsed)} elapsed", ending, self.postfix]
        with contextlib.suppress(BrokenPipeError):  # nobody reads any more: the work is not ended by that
            print(f"{self.desc}: {', '.join(str(part) for part in parts if part)}", file=self.fp, flush=True)


def progress(
    iterable: Iterable[Any] | None = None, *, total: int | None = None, desc: str, unit: str = "it",
    every: float = 10.0, stream: TextIO | None = None,
) -> Progress[Any]:  # fmt: skip
    """Show the progress of long work on stderr (or `stream`): of an iterable, an item a unit, or, as a context manager
    without one, of what is given to `.update(n)`. Without a terminal a line every `every` seconds is printed."""
    return Progress(iterable, every, sys.stderr if stream is None else stream, total=total, desc=desc, unit=unit)


def silence() -> None:
    """Show no more progress: another process of the same training shows it."""
    global _silent
    _silent = True
