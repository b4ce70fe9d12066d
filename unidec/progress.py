"""One way to show that long work goes on: a bar on a terminal, plain lines with rate and time left otherwise."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Generic, Self, TextIO, TypeVar, overload

T = TypeVar("T")

QUIET_SECONDS = 1.0  # work shorter than this leaves no line in a log
_silent = False


def _duration(seconds: float) -> str:
    """12 -> '12s', 75 -> '1:15', 3700 -> '1:01:40'."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d}"
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def _rate(per_second: float, unit: str) -> str:
    """Units a second, or seconds a unit when slower than one a second."""
    if per_second <= 0:
        return f"? {unit}/s"
    if per_second < 1:
        return f"{1 / per_second:.1f} s/{unit}"
    return f"{per_second:,.0f} {unit}/s" if per_second >= 10 else f"{per_second:.1f} {unit}/s"


class _Lines:
    """Plain progress lines: the first after `every` seconds, a last one at the end."""

    def __init__(
        self, total: int | None, desc: str, unit: str, every: float, stream: TextIO, clock: Callable[[], float]
    ):
        self.total, self.desc, self.unit, self.every, self.stream, self.clock = total, desc, unit, every, stream, clock
        self.done, self.note = 0, ""
        self.start = self.last = clock()

    def update(self, n: int) -> None:
        self.done += n
        now = self.clock()
        if now - self.last >= self.every:
            self.last = now
            self._write(now)

    def close(self, failed: bool) -> None:
        now = self.clock()
        if failed or now - self.start >= QUIET_SECONDS:
            self._write(now, ending="stopped" if failed else "done")

    def _write(self, now: float, ending: str | None = None) -> None:
        elapsed = now - self.start
        per_second = self.done / elapsed if elapsed > 0 else 0.0
        share = f"/{self.total:,} ({100 * self.done / self.total:.0f}%)" if self.total else ""
        parts = [f"{self.done:,}{share} {self.unit}", _rate(per_second, self.unit), f"{_duration(elapsed)} elapsed"]
        if ending:
            parts.append(ending)
        elif self.total and per_second > 0:
            parts.append(f"{_duration(max(self.total - self.done, 0) / per_second)} left")
        if self.note:
            parts.append(self.note)
        print(f"{self.desc}: {', '.join(parts)}", file=self.stream, flush=True)


class _Nothing:
    """Shows nothing."""

    note = ""

    def update(self, n: int) -> None:
        pass

    def close(self, failed: bool) -> None:
        pass


class _Bar:
    """A tqdm bar."""

    def __init__(self, total: int | None, desc: str, unit: str, stream: TextIO):
        from tqdm import tqdm

        self.bar: Any = tqdm(total=total, desc=desc, unit=unit, file=stream, dynamic_ncols=True, leave=True)

    def update(self, n: int) -> None:
        self.bar.update(n)

    def close(self, failed: bool) -> None:
        self.bar.close()

    @property
    def note(self) -> str:
        return self.bar.postfix or ""

    @note.setter
    def note(self, text: str) -> None:
        self.bar.set_postfix_str(text, refresh=False)


class Progress(Generic[T]):
    """What `progress` returns: iterate over it, or use it as a context manager and call `update`."""

    def __init__(self, iterable: Iterable[T] | None, display: _Lines | _Bar | _Nothing):
        self._iterable, self._display, self._open = iterable, display, True

    def update(self, n: int = 1) -> None:
        """Count `n` more units as done."""
        self._display.update(n)

    def note(self, text: str) -> None:
        """Show a few words (a loss, a file name) behind the counts from the next line on."""
        self._display.note = text

    def close(self, failed: bool = False) -> None:
        """End the display; again is harmless."""
        if self._open:
            self._open = False
            self._display.close(failed)

    def __iter__(self) -> Iterator[T]:
        if self._iterable is None:
            raise TypeError("progress() was given nothing to iterate over: use it as a context manager with .update(n)")
        try:
            for item in self._iterable:
                yield item
                self.update(1)
        except GeneratorExit:  # the consumer stopped early: not a failure
            self.close()
            raise
        except BaseException:
            self.close(failed=True)
            raise
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=error is not None)


@overload
def progress(
    iterable: None = None,
    *,
    total: int | None = None,
    desc: str,
    unit: str = "it",
    every: float = 10.0,
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Progress[Any]: ...


@overload
def progress(
    iterable: Iterable[T],
    *,
    total: int | None = None,
    desc: str,
    unit: str = "it",
    every: float = 10.0,
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Progress[T]: ...


def progress(
    iterable: Iterable[Any] | None = None,
    *,
    total: int | None = None,
    desc: str,
    unit: str = "it",
    every: float = 10.0,
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Progress[Any]:
    """Show the progress of long work on stderr.

    Args:
        iterable: what to iterate over, each item one unit; None: use as a context manager and call `.update(n)`.
        total: number of units; taken from `len(iterable)` where it has one; None: unknown, no time left is shown.
        desc: what is being done.
        unit: name of a unit.
        every: seconds between plain lines when the stream is not a terminal.
        stream: where to write; None: stderr as it is now.
        clock: seconds, monotonic; for tests.

    Example:
        >>> for block in progress(blocks, desc="tokenise", unit="block"): ...
        >>> with progress(total=num_texts, desc="encode", unit="text") as bar:
        ...     bar.update(len(batch))
    """
    out = sys.stderr if stream is None else stream
    size = getattr(iterable, "__len__", None)
    if total is None and size is not None:
        total = size()
    if _silent:
        return Progress(iterable, _Nothing())
    display = _Bar(total, desc, unit, out) if out.isatty() else _Lines(total, desc, unit, every, out, clock)
    return Progress(iterable, display)


def silence() -> None:
    """Show no progress any more: another process of the same training shows it."""
    global _silent
    _silent = True
