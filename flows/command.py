"""`python -m flows.<name>`: options from the flow's parameters, one line per known error, exit codes.

Besides its flow, a module may define `in_words(result)`, the text printed without --json, and `prepare(options)`, which
is called while Prefect's temporary server starts; if it returns a result, no flow run is needed.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from flows import server
from unidec import interrupt
from unidec.config import parse_overrides
from unidec.errors import Refused, TrainingError, UnidecError

PREFECT_S = 1.5  # time for Prefect to record a run's end after a signal, or if its server is gone
LEAVE_S = 24.0  # time to save a checkpoint when Prefect's server is gone
RESUME = "run again to resume from the last checkpoint or finished part"
_NAMES = {"overrides": "set", "params_file": "params", "register_trial": "register"}


class Ending:
    """The end of the program: one message and one exit code, whatever Prefect still does.

    A flow's result or error is known as soon as its body returns. Prefect then records it, which takes seconds after
    Ctrl-C and minutes if its server is gone: `leave_in_time` does not wait for that.
    """

    def __init__(self, show: Callable[[Any], str] = json.dumps) -> None:
        self.show = show
        self.code = 1
        self.result: Any = None
        self.error: BaseException | None = None
        self.body_is_over = threading.Event()
        self.reported = threading.Event()
        self._one_reports = threading.Lock()

    def call(self, flow: Any, options: dict[str, Any]) -> Any:
        """Call the flow, and note how its body ends."""
        if hasattr(flow, "fn"):
            flow.fn = self._noted(flow.fn)
        return flow(**options)

    def _noted(self, body: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(body)
        def noted(*given: Any, **options: Any) -> Any:
            try:
                self.result = body(*given, **options)
                return self.result
            except BaseException as error:
                self.error = error
                raise
            finally:
                self.body_is_over.set()

        return noted

    def leave_in_time(self) -> None:
        """Start a thread that ends the process soon after a signal, and in any case when Prefect's server is gone."""
        threading.Thread(target=self._leave_in_time, daemon=True, name="unidec-ending").start()

    def _leave_in_time(self) -> None:
        while not (server.lost.is_set() or self._was_stopped()):
            time.sleep(0.1)
        self.body_is_over.wait(LEAVE_S)
        self.reported.wait(PREFECT_S)
        self.report(self.error)
        self.reported.wait()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(self.code)

    def _was_stopped(self) -> bool:
        return self.body_is_over.is_set() and self.error is not None and not isinstance(self.error, Exception)

    def report(self, error: BaseException | None) -> bool:
        """Print the result, or the error, once, and set the exit code; False: the error is a bug."""
        if not self._one_reports.acquire(blocking=False):
            self.reported.wait()
            return True
        is_known = self._report(error)
        self.reported.set()
        return is_known

    def _report(self, error: BaseException | None) -> bool:
        from flows.lifecycle import known

        if server.lost.is_set() and not isinstance(error, UnidecError):
            error = self._when_lost()
        if error is None:
            self.code = _print_result(_content(self.result), self.show)
            return True
        if not isinstance(error, Exception):
            self.code = _print_stopped(error)
            return True
        found = known(error)
        if found is None:
            return False
        print(found, file=sys.stderr)
        self.code = found.exit_code
        return True

    def _when_lost(self) -> BaseException | None:
        """How the work ended without Prefect's server: finished work is no failure."""
        is_finished = self.body_is_over.is_set() and self.error is None
        if is_finished:
            print(f"warning: {server.LOST}: Prefect has no record of this run's end", file=sys.stderr)
            return None
        return self.error if isinstance(self.error, UnidecError) else TrainingError(server.LOST, fix=RESUME)


def main(name: str, words: Sequence[str] | None = None) -> int:
    """Run the flow `name` of flows/<name>.py with these arguments, by default the program's; returns the exit code."""
    is_program = words is None
    words = sys.argv[1:] if words is None else words
    # a training without options may have nothing to do: flows.train.prepare starts the server if it is needed
    if not {"-h", "--help"} & set(words) and (words or name != "train"):
        server.start()  # takes seconds, as do the imports that follow
    module = importlib.import_module(f"flows.{name}")  # not as __main__: workers import it under this name
    interrupt.end_guard()
    options = vars(_parser(module, name).parse_args(words))
    show = _as_json if options.pop("json") else getattr(module, "in_words", _as_json)
    ending = Ending(show)
    if is_program:
        ending.leave_in_time()

    def run() -> Any:
        if "overrides" in options:
            options["overrides"] = parse_overrides(options["overrides"]) or None
        if hasattr(module, "prepare") and (done := module.prepare(options)) is not None:
            return done
        with server.running():
            return ending.call(getattr(module, name), options)

    code = guarded(run, show, ending)
    if is_program and code in interrupt.EXIT_CODES.values():
        sys.stdout.flush()
        os._exit(code)  # threads that import modules may take seconds
    return code


def guarded(run: Callable[[], Any], show: Callable[[Any], str], ending: Ending | None = None) -> int:
    """Run a flow, print its result and return the exit code; known errors are printed without a traceback.

    If the gate refuses the version and there is no champion, the exit code is 6, and the last line is the command to
    run.
    """
    from prefect.exceptions import TerminationSignal

    from flows.lifecycle import one_line_for_known_errors

    def terminate(number: int, _frame: Any) -> None:
        raise TerminationSignal(signal=number)

    ending = ending or Ending(show)
    # Prefect restores the previous handler of SIGTERM; the default would end us before a checkpoint is written
    before = signal.signal(signal.SIGTERM, terminate)
    one_line_for_known_errors()
    try:
        ending.result = run()
        ending.report(None)
    except (Exception, KeyboardInterrupt, TerminationSignal) as error:
        if not ending.report(error):
            raise
    finally:
        signal.signal(signal.SIGTERM, before)
    return ending.code


def _print_stopped(error: BaseException) -> int:
    """Say that a signal stopped the work; returns the exit code."""
    is_interrupt = isinstance(error, KeyboardInterrupt)
    print(f"{'interrupted' if is_interrupt else 'terminated'}: {RESUME}", file=sys.stderr)
    return 130 if is_interrupt else 143


def _content(result: Any) -> Any:
    """A flow's result; bodies may return a state of Prefect that holds it."""
    return getattr(result, "data", result)


def _print_result(done: Any, show: Callable[[Any], str]) -> int:
    """Print a flow's result; returns the exit code."""
    print(show(done), flush=True)
    if missing := done.get("no_champion"):
        why = " ".join(missing["reason"].split())
        line = f"there is no champion: version {missing['version']} was refused ({why}); run: {missing['command']}"
        print(line, file=sys.stderr)
        return Refused.exit_code
    return 0


def _parser(module: Any, name: str) -> argparse.ArgumentParser:
    """A parser with an option for each of the flow's parameters, with type, default and description as in Prefect."""
    parser = argparse.ArgumentParser(
        prog=f"python -m flows.{name}", description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    schema = getattr(module, name).parameters
    for key, described in schema.properties.items():
        word, default = _NAMES.get(key, key.replace("_", "-")), described.get("default")
        kinds = {kind.get("type"): kind for kind in described.get("anyOf", [described])}
        about = described["description"].replace("\n", " ").replace("%", "%%")
        option: dict[str, Any] = {"help": f"{about} Default: {default}." if default and default is not True else about}
        if key in schema.required and "object" not in kinds and key not in ("input", "output"):
            parser.add_argument(key, metavar=key.upper(), **option)
            continue
        option |= {"dest": key, "default": default, "required": key in schema.required}
        if "boolean" in kinds:
            if default is not False:  # the default is True, or params.yaml decides
                word, option["help"] = f"no-{word}", f"do not {about}"
            option |= {"action": "store_const", "const": default is False}
        elif "object" in kinds or described.get("type") == "array":
            option |= {"action": "append", "default": [], "metavar": "KEY=VALUE" if "object" in kinds else "NAME"}
        else:
            text = kinds.get("string", {})
            choices = text.get("enum") or ([text["const"]] if "const" in text else None)
            option |= {"type": int if "integer" in kinds else str, "choices": choices}
        parser.add_argument(f"-{word}" if len(word) == 1 else f"--{word}", **option)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def _as_json(done: Any) -> str:
    return json.dumps(done, indent=2)
