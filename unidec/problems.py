"""Errors in the parameters as text."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic_core import ErrorDetails

from unidec.errors import ConfigError, without_credentials


class ParamsError(ConfigError):
    """All that is wrong with the parameters, found in one go; `problems` holds one text for each."""

    def __init__(self, problems: list[str], where: str) -> None:
        self.problems = problems
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n".join([f"{count} in the parameters", *problems]), where=where)


def valid_values(detail: ErrorDetails) -> str:
    """What a valid value looks like, in words."""
    ctx = detail.get("ctx", {})
    bounds = {"greater_than": ("above", "gt"), "greater_than_equal": ("at least", "ge")}
    bounds |= {"less_than": ("below", "lt"), "less_than_equal": ("at most", "le")}
    if detail["type"] in bounds:
        words, limit = bounds[detail["type"]]
        return f"{words} {ctx[limit]}"
    names = {
        "int_type": "a whole number",
        "float_type": "a number",
        "bool_type": "true or false",
        "string_type": "a text",
        "finite_number": "a finite number",
        "literal_error": str(ctx.get("expected", "")),
    }
    return names.get(detail["type"], detail["msg"])


def problem(
    key: str, what: str, got: str, expected: str | None, origin: dict[str, str], near: str | None = None,
    fix: str | None = None,
) -> str:  # fmt: skip
    """One problem as text: where, what, got, expected, the nearest name, the fix."""
    where = f" ({origin[key]})" if key in origin else ""
    facts = {"got": got, "expected": expected, "nearest": near, "fix": fix}
    lines = [f"    {name}: {fact}" for name, fact in facts.items() if fact or name == "got"]
    return "\n".join([f"- {key}{where}: {what}", *lines])


def short(value: Any) -> str:
    """A value as Python writes it, without credentials, cut to 80 characters."""
    text = without_credentials(repr(value))
    return text if len(text) <= 80 else f"{text[:77]}..."


def nearest(name: str, names: list[str]) -> str | None:
    """The one of `names` most like `name`, if any is."""
    by_lower = {known.lower(): known for known in names}
    found = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    return by_lower[found[0]] if found else None
