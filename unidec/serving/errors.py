"""What a client is told where a request cannot be answered: a status, and JSON that says what, where, and the fix."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

MAX_SHOWN = 100  # characters of what was got: an answer never echoes a large request

Headers = list[tuple[bytes, bytes]]


class RequestError(Exception):
    """A request that is answered with an error.

    Args:
        status: HTTP status. kind: for `unidec_errors_total`, one of `KINDS`.
        what, where, got, expected, fix: as in `UnidecError`; what is not known stays empty.
        retry_after: seconds after which trying again is worth it; None: it is not.
        close: the body was not read to its end, so that the connection cannot go on.
        headers: further headers of the answer.
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
        headers: Iterable[tuple[bytes, bytes]] = (),
    ) -> None:
        super().__init__(what)
        self.status, self.kind, self.close = status, kind, close
        self.parts = {"what": what, "where": where, "got": shown(got), "expected": str(expected), "fix": fix}
        self.headers: Headers = list(headers)
        if retry_after is not None:
            self.headers.append((b"retry-after", b"%d" % retry_after))
        if close:
            self.headers.append((b"connection", b"close"))

    def body(self) -> bytes:
        """The JSON."""
        return json.dumps({"error": self.parts}).encode()


KINDS = (
    "broken_json", "wrong_value", "unauthorized", "not_found", "method", "content_type", "slow_body", "too_large",
    "overload", "timeout", "not_ready", "client_gone", "internal", "wrong_host",
    "edited_file",
)  # fmt: skip


def shown(value: object) -> str:
    """A value as an error shows it: short, printable, on one line; text as it is, anything else as JSON."""
    if not isinstance(value, str):
        try:
            value = json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):  # nothing that JSON can hold comes here
            value = f"a {type(value).__name__}"
    cut = value if len(value) <= MAX_SHOWN else f"{value[:MAX_SHOWN]}... ({len(value)} characters)"
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" if ord(c) < 256 else f"\\u{ord(c):04x}" for c in cut)


def wrong_values(errors: list[ErrorDetails]) -> RequestError:
    """The first of pydantic's errors in our words; how many more there are is said."""
    first = errors[0]
    what, expected, fix = _words(first["type"], first.get("ctx", {}))
    if len(errors) > 1:
        what += f" (and {len(errors) - 1} more)"
    got: Any = "nothing" if first["type"] == "missing" else first["input"]
    if first["type"] in ("too_long", "too_short") and "actual_length" in first.get("ctx", {}):
        got = f"{first['ctx']['actual_length']} entries"
    elif first["type"] == "string_too_long":
        got = f"{len(first['input'])} characters"
    where = _where(first["loc"])
    return RequestError(422, "wrong_value", what, where=where, got=_typed(got), expected=expected or first["msg"],
                        fix=fix)  # fmt: skip


def _typed(value: Any) -> object:
    """A large list or object is named, not printed in full only to be cut."""
    if isinstance(value, (list, dict)) and len(value) > 8:
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)} entries"
    return value


def _where(place: tuple[int | str, ...]) -> str:
    """("queries", 3) -> queries[3]."""
    words = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return shown(words.lstrip(".") or "body")


def _words(kind: str, facts: dict[str, Any]) -> tuple[str, str, str]:
    """What is wrong, what was expected, and the fix."""
    known = {
        "missing": ("a value is missing", "", "send it"),
        "extra_forbidden": (
            "an unknown key",
            "a key of this route: see /openapi.json",
            "leave it out, or mend its name",
        ),
        "string_type": ("not a string", "a string", "put it into quotes"),
        "string_unicode": ("not valid Unicode", "no lone surrogates (\\ud800 to \\udfff)", "send the text as UTF-8"),
        "string_pattern_mismatch": (
            "a text without anything in it",
            "at least one character that is no space",
            "leave it out",
        ),
        "string_too_long": ("too long a text", f"at most {facts.get('max_length')} characters", "shorten it"),
        "string_too_short": ("an empty text", "at least one character", "leave it out"),
        "too_long": ("too many entries", f"at most {facts.get('max_length')}", "send them in several requests"),
        "too_short": ("too few entries", f"at least {facts.get('min_length')}", "send at least one query"),
        "int_type": ("not an integer", "an integer", "send digits without quotes"),
        "int_from_float": ("not an integer", "an integer", "send it without decimals"),
        "int_parsing": ("not an integer", "an integer", "send digits"),
        "greater_than_equal": ("out of range", f"at least {facts.get('ge')}", "send a larger one"),
        "less_than_equal": ("out of range", f"at most {facts.get('le')}", "send a smaller one"),
        "float_type": ("not a number", "a number", "send digits without quotes"),
        "finite_number": ("not a finite number", "a finite number", "leave it out, or send a smaller one"),
        "list_type": ("not a list", "a list", "put it into [ ]"),
        "literal_error": ("not one of the choices", str(facts.get("expected", "")), "send one of them"),
        "model_type": ("not an object", "a JSON object", "/openapi.json has an example"),
    }
    return known.get(kind, ("a wrong value", "", "/openapi.json says what this route takes"))
