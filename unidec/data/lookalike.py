"""Finds ids and column names that look alike but differ; describes the difference and its fix."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from functools import partial

_NUMBER = re.compile(r"[+-]?\d{1,300}(\.\d{1,300})?(e[+-]?\d{1,2})?")
_AS_TEXT = (
    "read the ids as text: pandas.read_csv(..., dtype=str), or convert them: "
    "column.astype('Int64').astype(str)"
)
_TRIM = "remove them: column.str.strip()"
# control characters, and format characters such as a byte order mark or a zero-width space
_INVISIBLE = "Cc", "Cf"


def _without_invisible(text: str) -> str:
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        char for char in text if char.isspace() or unicodedata.category(char) not in _INVISIBLE
    )


def _whole(text: str) -> str:
    """`100` for `100.0` and for `1e+02`."""
    if not ("." in text or "e" in text) or not _NUMBER.fullmatch(text):
        return text
    number = float(text)
    return str(int(number)) if number.is_integer() else text


_STEPS: tuple[tuple[Callable[[str], str], str, str], ...] = (
    (lambda text: text.strip(" "), "blanks at the beginning or end", _TRIM),
    (
        lambda text: " ".join(text.split()),
        "other kinds or numbers of blanks",
        "replace them by single, normal blanks",
    ),
    (lambda text: _without_invisible(text).strip(), "invisible characters", "remove them"),
    (
        partial(unicodedata.normalize, "NFC"),
        "accents written as characters of their own",
        "column.str.normalize('NFC') in both files",
    ),
    (
        partial(unicodedata.normalize, "NFKC"),
        "other forms of the same characters",
        "column.str.normalize('NFKC') in both files",
    ),
    (str.casefold, "upper and lower case", "write both alike"),
    (_whole, "a decimal point: the ids became floating-point numbers", _AS_TEXT),
    (
        lambda text: text.lstrip("0") or "0" if text.isdecimal() else text,
        "zeros in front: the ids became numbers",
        _AS_TEXT,
    ),
)


def canonical(text: str) -> str:
    """A canonical form, equal for all texts that look alike."""
    for step, _, _ in _STEPS:
        text = step(text)
    return text


def difference(text: str, other: str) -> tuple[str, str]:
    """How two texts with the same canonical form differ, in words, and how to correct it."""
    for step, what, fix in _STEPS:
        text = step(text)
        other = step(other)
        if text == other:
            return what, fix
    raise ValueError("these texts do not look alike")


def visible(text: str, most: int = 40) -> str:
    """A text in quotes, with invisible characters escaped; cut to about `most` characters."""
    cut = text if len(text) <= most else f"{text[:most]}..."
    return f"'{''.join(map(_seen, cut))}'"


def _seen(char: str) -> str:
    return char if _can_be_seen(char) else f"\\u{ord(char):04x}"


def _can_be_seen(char: str) -> bool:
    return char.isprintable() and not unicodedata.combining(char)


def plain(text: str) -> str:
    """The text itself, or `visible(text)` if it has invisible characters or outer white space."""
    is_plain = text == text.strip() and all(map(_can_be_seen, text))
    return text if is_plain else visible(text, len(text))


class Known:
    """Known texts, to look up one that looks like a given text.

    Attributes:
        texts: canonical form -> one of the texts with this form.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = {canonical(text): text for text in texts}

    def like(self, text: str) -> str | None:
        """A known text that looks like this one; None if there is none."""
        return self.texts.get(canonical(text))


def names_like(names: Sequence[str], missing: Iterable[str]) -> str | None:
    """A sentence for each missing column name that one of `names` looks like; None if there is
    none.
    """
    known = Known(map(str, names))
    found = []
    for name in missing:
        other = known.like(name)
        if other is not None:
            found.append(
                f"rename the column {visible(other)} to {visible(name)}: they differ in "
                f"{difference(other, name)[0]}"
            )
    return "; ".join(found) or None
