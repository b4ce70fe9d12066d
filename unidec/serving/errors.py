"""Errors as clients see them: an HTTP status, and JSON that holds what, where, got, expected and
fix.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

MAX_SHOWN = 100  # characters of a value: an answer never echoes a large request


class ClientGone(Exception):
    """The client disconnected."""


class RequestError(Exception):
    """A request that is answered with an error.

    Args:
        status: HTTP status. kind: label of `unidec_errors_total`.
        what, where, got, expected, fix: as in `UnidecError`; empty where not known.
        retry_after: seconds. close: the body was not read to its end, so the connection must end.
    """

    def __init__(
        self,
        status: int,
        kind: str,
        what: str,
        *,
        retry_after: int | None = None,
        close: bool = False,
        headers: Iterable[tuple[bytes, bytes]] = (),
        **parts: object,
    ) -> None:
        super().__init__(what)
        self.status = status
        self.kind = kind
        self.close = close
        self.parts = dict.fromkeys(("what", "where", "got", "expected", "fix"), "")
        got = shown(parts.pop("got", ""))  # which may be anything: nested too deep for str, too
        self.parts |= {"what": what, "got": got} | {
            name: str(value) for name, value in parts.items()
        }
        self.headers = list(headers)
        if retry_after is not None:
            self.headers.append((b"retry-after", b"%d" % retry_after))
        if close:
            self.headers.append((b"connection", b"close"))

    def body(self) -> bytes:
        """The JSON body."""
        return json.dumps({"error": self.parts}).encode()


def shown(value: object) -> str:
    """A value as an error shows it: short, printable, on one line; text as it is, anything else as
    JSON.
    """
    if isinstance(value, (list, dict)) and len(value) > 8:
        value = f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)} entries"
    if not isinstance(value, str):
        try:
            value = json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            value = f"a {type(value).__name__}"
    cut = value if len(value) <= MAX_SHOWN else f"{value[:MAX_SHOWN]}... ({len(value)} characters)"
    return "".join(
        c if c.isprintable() else f"\\x{ord(c):02x}" if ord(c) < 256 else f"\\u{ord(c):04x}"
        for c in cut
    )


def wrong_values(errors: Sequence[Any]) -> RequestError:
    """The first of pydantic's errors, and how many more there are."""
    first = errors[0]
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
    is_unknown = first["type"] == "extra_forbidden"
    got = (
        "nothing"
        if first["type"] == "missing"
        else first.get("ctx", {}).get("actual_length", first["input"])
    )
    return RequestError(
        422,
        "wrong_value",
        ("an unknown key" if is_unknown else "a wrong value") + more,
        where=shown(place.lstrip(".") or "body"),
        got=got,
        expected="a key of this route" if is_unknown else first["msg"],
        fix="send a body as described in GET /openapi.json",
    )
