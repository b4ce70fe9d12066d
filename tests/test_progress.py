"""Progress: plain lines where there is no terminal, a bar where there is one."""

from __future__ import annotations

import io

import pytest

from unidec.progress import progress


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_lines_come_every_ten_seconds_with_rate_and_time_left() -> None:
    clock, stream = Clock(), io.StringIO()
    seen = []
    for item in progress(list(range(100)), desc="encode", unit="text", stream=stream, clock=clock):
        seen.append(item)
        clock.now += 0.5
    assert seen == list(range(100))
    lines = stream.getvalue().splitlines()
    assert lines[0] == "encode: 20/100 (20%) text, 2.0 text/s, 10s elapsed, 40s left"
    assert lines[-1] == "encode: 100/100 (100%) text, 2.0 text/s, 50s elapsed, done"
    assert len(lines) == 6


def test_context_manager_with_update_and_note() -> None:
    clock, stream = Clock(), io.StringIO()
    with progress(total=1000, desc="search", unit="query", every=60, stream=stream, clock=clock) as bar:
        for _ in range(10):
            clock.now += 300
            bar.note("loss 1.5")
            bar.update(100)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "search: 100/1,000 (10%) query, 3.0 s/query, 5:00 elapsed, 45:00 left, loss 1.5"
    assert "50:00 elapsed, done" in lines[-1]


def test_short_work_is_silent_and_unknown_totals_show_no_time_left() -> None:
    clock, stream = Clock(), io.StringIO()
    assert list(progress(iter("ab"), desc="x", stream=stream, clock=clock)) == ["a", "b"]
    assert stream.getvalue() == ""
    with progress(desc="x", stream=stream, clock=clock) as bar:
        clock.now += 3700
        bar.update(5)
    assert stream.getvalue().splitlines()[0] == "x: 5 it, 740.0 s/it, 1:01:40 elapsed"


def test_failure_is_said_and_an_early_stop_is_none() -> None:
    clock, stream = Clock(), io.StringIO()
    with pytest.raises(RuntimeError), progress(total=3, desc="x", stream=stream, clock=clock):
        raise RuntimeError
    assert "stopped" in stream.getvalue()

    def broken():
        yield 1
        raise OSError

    stream = io.StringIO()
    with pytest.raises(OSError):
        list(progress(broken(), desc="x", stream=stream, clock=clock))
    assert "stopped" in stream.getvalue()
    stream = io.StringIO()
    loop = iter(progress(range(5), desc="x", stream=stream, clock=clock))
    next(loop)
    loop.close()
    assert stream.getvalue() == ""


def test_a_terminal_gets_a_bar() -> None:
    stream = Terminal()
    with progress(total=4, desc="train", unit="step", stream=stream) as bar:
        bar.update(4)
        bar.note("loss 2")
    assert "train: 100%" in stream.getvalue()
    assert "4/4" in stream.getvalue()


def test_nothing_to_iterate_over() -> None:
    with pytest.raises(TypeError, match="context manager"):
        list(progress(desc="x", stream=io.StringIO()))
