"""Progress: plain lines without a terminal, a bar on one."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from unidec.progress import Progress, progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def lines(monkeypatch) -> Callable[..., tuple[Progress[Any], Callable[[float], None], io.StringIO]]:
    """`lines(iterable, ...)` -> a progress display without a terminal, a function that moves its
    clock, its output.
    """

    def make(iterable: Iterable[Any] | None = None, **options: Any):
        stream = io.StringIO()
        monkeypatch.setattr(sys, "stderr", stream)
        bar = progress(iterable, **{"desc": "x", **options})
        now = [0.0]
        bar._time = lambda: now[0]
        bar.start_t = 0.0
        bar.last_print_t = 0.0
        return bar, lambda seconds: now.__setitem__(0, now[0] + seconds), stream

    return make


def test_lines_every_ten_seconds_with_rate_and_time_left(lines):
    bar, wait, stream = lines(list(range(100)), desc="encode", unit="text")
    seen = []
    for item in bar:
        seen.append(item)
        wait(0.5)
    assert seen == list(range(100))
    printed = stream.getvalue().splitlines()
    assert printed[0] == "encode: 20/100 (20%),  2.00text/s, 00:10 elapsed, 00:40 left"
    assert printed[-1] == "encode: 100/100 (100%),  2.00text/s, 00:50 elapsed, 00:00 left"
    assert len(printed) == 6


def test_context_manager_with_update_and_note(lines):
    bar, wait, stream = lines(total=1000, desc="search", unit="query")
    with bar:
        for _ in range(10):
            wait(300)
            bar.note("loss 1.5")
            bar.update(100)
    printed = stream.getvalue().splitlines()
    assert printed[0] == "search: 100/1000 (10%),  3.00s/query, 05:00 elapsed, 45:00 left, loss 1.5"
    assert "50:00 elapsed, 00:00 left" in printed[-1]


def test_short_work_is_silent_and_unknown_totals_show_no_time_left(lines):
    bar, _, stream = lines(iter("ab"))
    assert list(bar) == ["a", "b"]
    assert stream.getvalue() == ""
    bar, wait, stream = lines()
    with bar:
        wait(3700)
        bar.update(5)
    assert stream.getvalue().splitlines()[0] == "x: 5, 740.00s/it, 1:01:40 elapsed"


def test_a_terminal_shows_a_bar(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress(total=4, desc="train", unit="step") as bar:
        bar.update(4)
        bar.note("loss 2")
    assert "train: 100%" in stream.getvalue()
    assert "4/4" in stream.getvalue()


def test_a_closed_output_does_not_end_the_work(monkeypatch):
    class Closed(io.StringIO):
        def write(self, _text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Closed())
    with progress(total=2, desc="x") as bar:
        bar.update(2)
        bar.display()
    assert bar.n == 2
