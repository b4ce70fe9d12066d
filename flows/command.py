"""`python -m flows.<name>`: options from the flow's parameters, one line per known error, exit
codes.

Besides its flow, a module may define `in_words(result)`, the text printed without --json, and
`prepare(options)`, which is called while Prefect's temporary server starts; if it returns a result,
no flow run is needed."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import ValidationError

from flows import server
from flows.ending import Ending, leave
from unidec import interrupt
from unidec.addresses import mask_logs, masked_excepthook
from unidec.config import parse_overrides
from unidec.errors import ConfigError, in_one_message
from unidec.progress import say
from unidec.surroundings import output_failure

_NAMES = {"overrides": "set", "params_file": "params", "register_trial": "register"}


def main(name: str, words: Sequence[str] | None = None) -> int:
    """Run the flow `name` of flows/<name>.py with these arguments, by default the program's;
    returns the exit code.
    """
    is_program = words is None
    words = list(sys.argv[1:] if words is None else words)
    is_debug = "--debug" in words
    mask_logs()
    sys.excepthook = masked_excepthook
    try:
        code = _run(name, [word for word in words if word != "--debug"], is_program)
    except Exception as error:  # Prefect's log has the traceback of a flow
        told = in_one_message(error, f"python -m flows.{name} --debug ...")
        if is_debug or told is None:
            raise
        say(told[0])
        return told[1]
    if failure := output_failure():
        say(f"the result could not be printed: {failure.strerror}")
    return code


def _run(name: str, words: Sequence[str], is_program: bool) -> int:
    # a training without options may have nothing to do: flows.train.prepare starts the server if it
    # is needed
    if not {"-h", "--help"} & set(words) and (words or name != "train"):
        server.start()  # takes seconds, as do the imports that follow
    try:
        # not as __main__: workers import it under this name
        module = importlib.import_module(f"flows.{name}")
    except ValidationError as error:  # Prefect reads its settings when it is imported
        raise _invalid_setting(error) from error
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
            return getattr(module, name)(**options)

    code = guarded(run, ending)
    if is_program and (server.lost.is_set() or code in interrupt.EXIT_CODES.values()):
        leave(code)
    return code


def _invalid_setting(error: ValidationError) -> ConfigError:
    """A setting that Prefect refuses, with the variables of the environment that hold its value."""
    first = error.errors()[0]
    value = str(first["input"])
    variables = [
        name for name in os.environ if name.startswith("PREFECT_") and os.environ[name] == value
    ]
    return ConfigError(
        "Prefect refuses one of its settings",
        where=", ".join(variables) or ".".join(str(part) for part in first["loc"]),
        got=value,
        expected=first["msg"],
        fix="correct it, or unset it: Prefect reads PREFECT_* variables, prefect.toml and profiles",
    )


def guarded(run: Callable[[], Any], ending: Ending) -> int:
    """Run a flow, print its result and return the exit code; our own errors are printed without a
    traceback.

    If the gate refuses the version and there is no champion, the exit code is 6, and the last line
    is the command to run."""
    from prefect.exceptions import TerminationSignal

    from flows.lifecycle import one_line_for_known_errors

    def terminate(number: int, _frame: Any) -> None:
        raise TerminationSignal(signal=number)

    # Prefect restores the previous handler of SIGTERM; the default would end us before a checkpoint
    # is written
    before = signal.signal(signal.SIGTERM, terminate)
    one_line_for_known_errors()
    try:
        ending.report(run(), None)
    except (Exception, KeyboardInterrupt, TerminationSignal) as error:
        if not ending.report(None, error):
            raise
    finally:
        signal.signal(signal.SIGTERM, before)
    return ending.code


def _parser(module: Any, name: str) -> argparse.ArgumentParser:
    """A parser with an option for each of the flow's parameters, with type, default and description
    as in Prefect.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m flows.{name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    schema = getattr(module, name).parameters
    for key, described in schema.properties.items():
        about = described["description"].replace("\n", " ").replace("%", "%%")
        is_required = key in schema.required
        if is_required and key not in ("input", "output"):
            parser.add_argument(key, metavar=key.upper(), help=about)
            continue
        word = _NAMES.get(key, key.replace("_", "-"))
        default = described.get("default")
        option: dict[str, Any] = {"dest": key, "default": default, "required": is_required}
        option["help"] = f"{about} Default: {default}." if default else about
        kind = described.get("anyOf", [described])[0]  # the other: null
        match kind["type"]:
            case "boolean" if default is None:  # params.yaml decides
                word = f"no-{word}"
                option |= {"action": "store_false", "help": f"do not {about}"}
            case "boolean":
                option["action"] = "store_true"
            case "object":
                option |= {"action": "append", "default": [], "metavar": "KEY=VALUE"}
            case "array":
                option |= {"action": "append", "metavar": "NAME"}
            case "integer":
                option["type"] = int
            case _:
                option["choices"] = kind.get("enum")
        parser.add_argument(f"-{word}" if len(word) == 1 else f"--{word}", **option)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def _as_json(done: Any) -> str:
    return json.dumps(done, indent=2)
