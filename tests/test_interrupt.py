"""Signals wait for the step in progress, and are passed on to whoever had them; real signals."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from unidec.interrupt import stop_signals

BOTH = [signal.SIGINT, signal.SIGTERM]


def send(number):
    os.kill(os.getpid(), number)


@pytest.fixture(autouse=True)
def handlers():
    """What came to the handlers that were there before; they are put back after the test."""
    before = {number: signal.getsignal(number) for number in BOTH}
    came = []
    for number in BOTH:
        signal.signal(number, lambda number, _: came.append(number))
    yield came
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", BOTH)
def test_the_first_only_asks_and_is_passed_on(handlers, number):
    mine = signal.getsignal(number)
    with stop_signals() as stop:
        assert stop.asked is None
        send(number)
        assert stop.asked is number and handlers == []
    assert handlers == [number] and signal.getsignal(number) is mine


def test_one_that_nobody_looked_at_is_passed_on_at_the_end(handlers):
    with stop_signals():
        send(signal.SIGTERM)
    assert handlers == [signal.SIGTERM]


def test_nothing_came(handlers):
    mine = [signal.getsignal(number) for number in BOTH]
    with stop_signals() as stop:
        assert [signal.getsignal(number) for number in BOTH] != mine
    assert (
        stop.asked is None
        and handlers == []
        and [signal.getsignal(number) for number in BOTH] == mine
    )


def test_the_second_acts_at_once():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    reached = []

    def train():
        with stop_signals() as stop:
            send(signal.SIGTERM)
            reached.append(stop.asked)
            send(signal.SIGINT)
            reached.append("after the second")

    with pytest.raises(KeyboardInterrupt):
        train()
    assert (
        reached == [signal.SIGTERM]
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )


def test_an_error_goes_on_instead(handlers):
    mine = signal.getsignal(signal.SIGTERM)

    def train():
        with stop_signals():
            send(signal.SIGTERM)
            raise ValueError("disk")

    with pytest.raises(ValueError, match="disk"):
        train()
    assert handlers == [] and signal.getsignal(signal.SIGTERM) is mine


def test_what_was_ignored_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with stop_signals() as stop:
        send(signal.SIGINT)
        assert stop.asked is None
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_another_thread_changes_nothing(handlers):
    mine = signal.getsignal(signal.SIGTERM)
    seen = []

    def work():
        with stop_signals() as stop:
            seen.append((signal.getsignal(signal.SIGTERM), stop.asked))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(mine, None)]


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, -signal.SIGTERM),
        (signal.SIGINT, -signal.SIGINT),
    ],
)
def test_a_process_ends_as_it_always_did(number, code):
    """SIGTERM's default ends it; SIGINT becomes KeyboardInterrupt, which Python ends by
    the signal.
    """
    program = (
        "import os, signal\nfrom unidec.interrupt import stop_signals\n"
        f"with stop_signals() as stop:\n    os.kill(os.getpid(), {int(number)})\n    "
        "print('saved', flush=True)\n"
        "print('never')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (code, "saved\n")
