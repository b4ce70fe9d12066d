"""Errors as clients see them: an HTTP status, and JSON with what, where, got, expected and fix."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

MAX_SHOWN = 100  # characters of a value, so that an answer never echoes a large request


class ClientGone(Exception):
    """The client disconnected."""


class RequestError(Exception):
    """A request that is answered with an error.

    Args:
        status: HTTP status. kind: label of `unidec_errors_total`.
        what, where, got, expected, fix: as in `UnidecError`; empty if unknown.
        retry_after: seconds. close: the body was not fully read, so the connection must be closed.
    """

    def __init__(
        self,
        status: int,
        kind: str,
        what: str,
        *,
        where: str = "",
        got: object = "",
        expected: object = "",
        fix: str = "",
        retry_after: int | None = None,
        close: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(what)
        self.status = status
        self.kind = kind
        self.close = close
        self.parts = {
            "what": what,
            "where": where,
            "got": shown(got),
            "expected": str(expected),
            "fix": fix,
        }
        self.headers = dict(headers or {})
        if retry_after is not None:
            self.headers["retry-after"] = str(retry_after)
        if close:
            self.headers["connection"] = "close"

    def body(self) -> bytes:
        """The JSON body."""
        return json.dumps({"error": self.parts}).encode()


def shown(value: object) -> str:
    """A value as one short, printable line: text unchanged, anything else as JSON."""
    if isinstance(value, (list, dict)) and len(value) > 8:
        kind = "a list" if isinstance(value, list) else "an object"
        value = f"{kind} of {len(value)} entries"
    if not isinstance(value, str):
        try:
            value = json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            value = f"a {type(value).__name__}"
    if len(value) > MAX_SHOWN:
        value = f"{value[:MAX_SHOWN]}... ({len(value)} characters)"
    return "".join(map(_printable, value))


def _printable(character: str) -> str:
    return character if character.isprintable() else ascii(character)[1:-1]


def wrong_values(errors: Sequence[Any]) -> RequestError:
    """A RequestError for the first of pydantic's errors, with the number of further ones."""
    first = errors[0]
    what = "a wrong value"
    expected = first["msg"]
    got = first.get("ctx", {}).get("actual_length", first["input"])
    if first["type"] == "missing":
        got = "nothing"
    elif first["type"] == "extra_forbidden":
        what = "an unknown key"
        expected = "a key of this route"
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    place = [f"[{key}]" if isinstance(key, int) else f".{key}" for key in first["loc"]]
    return RequestError(
        422,
        "wrong_value",
        what + more,
        where=shown("".join(place).lstrip(".") or "body"),
        got=got,
        expected=expected,
        fix="send a body as described in GET /openapi.json",
    )
