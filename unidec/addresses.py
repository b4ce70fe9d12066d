"""Addresses of servers and databases: their parts, and texts without their credentials.

A part of an address is shown only if it is known to be harmless: a host, a port, a path, a
parameter of `_HARMLESS`.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import traceback
from collections.abc import Collection
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from urllib.parse import quote, quote_plus, unquote

MASK = "***"
_WEB = ("http", "https", "ws", "wss")
_NO_USER = ("file", "sqlite", "s3", "gs")  # an @ belongs to their paths
_SCHEME = r"[A-Za-z][A-Za-z0-9+.-]*://"
_ADDRESS = re.compile(rf"({_SCHEME})((?:(?!{_SCHEME})[^\n])*)")
_PORT = r":\d{1,5}(?![^/?#\s'\",;)\]}])"
_HOST = re.compile(
    rf"(?:\[[0-9A-Fa-f:.]+\]|localhost|[\w-]+(?:\.[\w-]+)+)(?:{_PORT})?(?=[/?#])|[\w-]+(?:{_PORT})?/#/"
)
_USER_AND_PASSWORD = re.compile(rf"[^\s:/?#@'\"<>\[{{]+(?!{_PORT}):(?=[^\s/])")
# as SQLAlchemy reads it: a password may hold anything but @; for web addresses, the last @ counts
_DATABASE_USER = re.compile(r"(?P<user>[^:/]*)(?::(?P<password>[^@]*))?@(?P<rest>.*)", re.DOTALL)
_WEB_USER = re.compile(r"(?P<user>[^:/?#]*)(?::(?P<password>.*))?@(?P<rest>.*)", re.DOTALL)
_WEB_HOST = re.compile(r"[\w.-]+(?::\d{1,5})?(?:[/?#]|$)")
_HOST_AND_PORT = re.compile(r"(?P<host>\[[^\]]*\]|[^/?#:]*)(?::(?P<port>\d+))?")

_PARAMETER = re.compile(r"([?&;#])([^\s=&?#;]*)=([^\s&#]*?)(?=['\")\]}>.,:;]*(?:[\s&#]|$))")
_BARE_QUERY = re.compile(r"\?(?=[^\s=&]{9,}(?:[\s#]|$))[^\s#]*")
_HARMLESS = re.compile(
    r"(?i)user|driver|charset|sslmode|ssl_?mode|connect_timeout|format|version|versionid|region|page|k|viewstatesharekey"
)
_HARMLESS_VALUE = re.compile(r"(?i)\d{1,3}|true|false|")
_SECRET_NAME = (
    r"(?:[\w-]*(?:password|passwd|secret|signature|api_?key|access_?key|account_?key|credentials?)[\w-]*"
    r"|pwd|pass|sig|token|(?:access|auth|id|refresh|security)[_-]?token|x-amz-[\w-]+)"
)
_VALUE = r"'[^'\n]*'|\"[^\"\n]*\"|[^\s&;,'\"<>]+"
_SECRET_VALUE = re.compile(
    rf"(?i)(?<![\w.-])({_SECRET_NAME}=|['\"]{_SECRET_NAME}['\"]\s*[:=]\s*)(?:{_VALUE})"
)
_HEADER = re.compile(r"(?i)(authorization['\"]?\s*[:=]\s*['\"]?(?:basic|bearer)?\s*)[^\s'\"]+")

_SECRET_VARIABLE = re.compile(
    r"(?i)(?!.*_(FILE|PATH|DIR)$)"
    r".*(PASSWORD|PASSWD|SECRET|TOKEN|API_?KEY|ACCESS_KEY|AUTH_STRING|CREDENTIALS)"
)
_SHORTEST_SECRET = 8  # shorter ones may be ordinary words of a message


@dataclass(frozen=True)
class Address:
    """`scheme://user:password@host:port...` in parts; user and password are decoded, and empty if
    there are none.

    Attributes:
        location: everything behind the user: host, port, path and query, as given.
    """

    scheme: str
    user: str
    password: str
    host: str
    port: int | None
    location: str

    def without_user(self) -> str:
        """The address itself, usable, without user and password."""
        return f"{self.scheme}://{self.location}"


def parse(uri: str) -> Address:
    """The parts of an address, also if its password holds characters that should be
    percent-encoded.
    """
    scheme, _, rest = uri.partition("://")
    user = password = ""
    location = rest
    if found := _user_part(scheme, rest):
        user = found["user"]
        password = found["password"] or ""
        location = found["rest"]
    parts = _HOST_AND_PORT.match(location)
    assert parts is not None  # it matches any text
    return Address(
        scheme=scheme,
        user=unquote(user),
        password=unquote(password),
        host=parts["host"].strip("[]"),
        port=int(parts["port"]) if parts["port"] else None,
        location=location,
    )


def _user_part(scheme: str, rest: str) -> re.Match[str] | None:
    if scheme in _WEB:
        return None if _HOST.match(rest) or _WEB_HOST.match(rest) else _WEB_USER.fullmatch(rest)
    return None if scheme in _NO_USER else _DATABASE_USER.fullmatch(rest)


def without_credentials(text: str, secrets: Collection[str] | None = None) -> str:
    """The text without users, passwords and signatures in addresses, without values of parameters
    that have a secret's name, and without the secrets of environment variables, so that it can be
    shown and stored.

    Args:
        secrets: `secrets_of_environment()`, for many texts at once; None: find them again.
    """
    for secret in secrets_of_environment() if secrets is None else secrets:
        if secret in text:
            text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", MASK, text)
    if "://" in text:
        text = _ADDRESS.sub(_masked, text)
    return _HEADER.sub(rf"\1{MASK}", _SECRET_VALUE.sub(rf"\1{MASK}", text))


def mask_logs() -> None:
    """Take credentials out of every record of every logger in this process, other libraries'
    included.
    """
    before = logging.getLogRecordFactory()
    if getattr(before, "masks", False):
        return

    def masking(*given: Any, **named: Any) -> logging.LogRecord:
        record = before(*given, **named)
        try:
            message = record.getMessage()
        except Exception:  # wrong arguments: the handler reports them
            return record
        shown = without_credentials(message)
        if shown != message:
            record.msg = shown
            record.args = None
        if record.exc_info and record.exc_info[1] is not None:
            trace = logging.Formatter().formatException(record.exc_info)
            # what handlers print instead of formatting it
            record.exc_text = without_credentials(trace)
        return record

    masking.masks = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(masking)


def masked_excepthook(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Python's own hook, with the credentials removed."""
    text = "".join(traceback.format_exception(kind, error, trace))
    print(without_credentials(text), end="", file=sys.stderr, flush=True)


def _masked(found: re.Match[str]) -> str:
    scheme = found[1]
    rest = _without_user(scheme.removesuffix("://").lower(), found[2])
    address = re.split(r"\s", rest, maxsplit=1)[0]
    return scheme + _without_values(address) + rest[len(address) :]


def _without_user(scheme: str, rest: str) -> str:
    """What follows `scheme://` in a line of text, without user and password."""
    token = rest.split(maxsplit=1)[0] if rest[:1].strip() else ""
    named = _USER_AND_PASSWORD.match(rest)
    if "@" in token:
        is_path = scheme in _NO_USER and not named
        is_harmless = is_path or (scheme in _WEB and _HOST.match(token))
        return rest if is_harmless else rest[token.rindex("@") + 1 :]
    if named is None:
        return rest
    at = rest.find("@")  # a password with a blank
    if at < 0:  # a text that was cut
        return MASK + rest[len(token) :]
    behind = rest[at + 1 :].split(maxsplit=1)[:1]
    return rest[at + 1 + (behind[0].rfind("@") + 1 if behind else 0) :]


def _without_values(address: str) -> str:
    """An address without the values of its parameters, except for those that are harmless."""

    def shown(found: re.Match[str]) -> str:
        before, key, value = found.groups()
        is_harmless = _HARMLESS.fullmatch(key) or (
            _HARMLESS_VALUE.fullmatch(value) and not _is_secret(key)
        )
        return f"{before}{key}={value if is_harmless else MASK}"

    return _BARE_QUERY.sub(f"?{MASK}", _PARAMETER.sub(shown, address))


def _is_secret(name: str) -> bool:
    return re.fullmatch(rf"(?i){_SECRET_NAME}|pin|code|key", name) is not None


def secrets_of_environment() -> list[str]:
    """Passwords of addresses in environment variables, and values of variables with a secret's
    name; plain and percent-encoded.
    """
    secrets: list[str] = []
    for name, value in os.environ.items():
        found = ""
        if "://" in value:
            found = parse(value).password
        elif _SECRET_VARIABLE.match(name):
            found = value
        if len(found) >= _SHORTEST_SECRET or (len(found) >= 4 and not found.isalnum()):
            forms = (found, quote(found), quote(found, safe=""), quote_plus(found))
            secrets += dict.fromkeys(forms)
    return secrets
