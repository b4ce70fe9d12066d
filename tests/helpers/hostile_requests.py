"""Requests that mean harm (fault 21), and what is wrong with an answer to one.

    python -m helpers.hostile_requests PORT COUNT RATE    # prints faults as JSON

Each request says which statuses are right for it; the odd ones that are fair must be answered.
"""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from http_load import CLOSED, Answer, Connection, get

QUERIES = ["redcar oldboat", "newhouse"]
VALID = {"queries": QUERIES, "k": 3}
BODY = json.dumps(VALID).encode()
WRONG = {400, 422}
ERROR_KEYS = ["expected", "fix", "got", "what", "where"]
INSIDE = (b"Traceback", b"site-packages", b"/unidec/", b'File \\"')
MAX_ERROR_BYTES = 4096
SOON_SECONDS = 1.0
TRIALS = 3
WAIT_SECONDS = 15.0


@dataclass(frozen=True)
class Hostile:
    """One request.

    Attributes:
        data: all bytes that are sent.
        allowed: right statuses; `CLOSED`: the connection may end without an answer.
        num_queries: of how many a 200 must answer; 0: any body.
        plain: the HTTP parser refuses it, in plain text, before the application sees it.
    """

    data: bytes
    allowed: set[int]
    num_queries: int = 0
    plain: bool = False


def posted(body: bytes, *, kind: str = "application/json", more: str = "") -> bytes:
    """A POST of any bytes to /predict."""
    lines = ["POST /predict HTTP/1.1", "host: localhost", f"content-type: {kind}"]
    head = "\r\n".join([*lines, f"content-length: {len(body)}"])
    return f"{head}\r\n{more}\r\n".encode() + body


# -- bodies
# --------------------------------------------------------------------------------------------------

NO_JSON = [
    *(BODY[:end] for end in range(len(BODY))),
    *(BODY + junk for junk in (b"}", b",", b"x", b"{}", b"\0", BODY)),
    *(b" ", b"\r\n", b"queries=x", b"<xml/>", b"{", b"[", b'"', b"nul", b"//\n" + BODY),
    b"{'queries': ['x']}",
    b'{"queries": ["x"],}',
    b'{"queries": [01]}',
    b'{"queries": ["\\x41"]}',
    b'{"queries": ["a\nb"]}',
    b"\xff" + bytes(range(256)),
    *(BODY.decode().encode(coding) for coding in ("utf-16", "utf-32", "utf-16-le", "cp037")),
]
NO_OBJECT = [b"[]", b"null", b"3", b'"x"', b"true", b"{}", b"[{}]", b"1e5"]
WRONG_VALUES: dict[str, list[Any]] = {
    "queries": [None, 3, "text", {}, [1], [None], [["x"]], [True], ["x", 2], {"0": "x"}, []],
    "k": ["5", 5.5, True, -1, 0, 101, 10**9, 2**63, 10**30, [], {}, "x", [5], -(2**70)],
    "allow": ["L1", [1], {}, [None], 3, [["L1"]], True, {"L1": 1}],
    "deny": ["L1", [1], {}, [None], 3, [["L1"]], True, [1.5]],
    "min_score": ["0.1", [], {}, "x", [0.1], "NaN"],
    "head": ["none", 1, "", "BOTH", [], {}, "de\0", True],
}
UNKNOWN_KEYS = ["", "K", "query", "__proto__", "model", "\0", "queries ", "k" * 5000, "größe"]
# that JSON has not, or that fit nowhere
NUMBERS = ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1" * 5000, "0x10", "1_000", "+1"]
BLANK = ["", " ", "\t\r\n", "\u00a0", "\u3000\u2003", "\x00", "\x7f\x80\x9f", "\u200b\u202e"]
# half characters, and bytes that are no UTF-8
NO_TEXT = [b"\\ud800", b"x\\ud83dx", b"\\ude00\\ud83d", b"\xff", b"\xed\xa0\x80", b"\xc0\x80"]
TEXT_PLACES = [
    b'{"queries": ["%s"]}',
    b'{"queries": ["x"], "deny": ["%s"]}',
    b'{"queries": ["x"], "%s": 1}',
    b'{"queries": ["x"], "head": "%s"}',
]
BEYOND: list[dict[str, Any]] = [
    {"queries": ["x"] * 257},
    {"queries": ["x" * 8001]},
    {"queries": ["x"], "k": 101},
    {"queries": ["x"], "allow": ["L1"] * 10_001},
    {"queries": ["x"] * 100_000},
    {"queries": ["x " * 400_000]},
    {"queries": ["x"]} | {f"k{i}": i for i in range(60_000)},
]
WITHIN: list[dict[str, Any]] = [
    {"queries": ["x" * 8000]},
    {"queries": ["x"], "k": 100},
    {"queries": ["x"], "allow": [f"L{i}" for i in range(10_000)]},
    {"queries": ["redcar"], "k": 1},
]
ODD_TEXTS = [
    "nul \0 within",
    "🚗" * 100,
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 family",
    "e" + "\u0301" * 500,
    "\u202eright to left",
    "\ufeffmark",
    "\x1b[31mred",
    "'; DROP TABLE labels; --",
    "%s%n%x",
    "../../etc",
    "<script>alert(1)</script>",
    "${jndi:ldap://x}",
    "{{7*7}}",
    "\U0010ffff",
    "\ufffe\uffff",
    "漢字" * 200,
    "\r\nx: y",
    "[PAD] [UNK] [CLS]",
    "\\",
    '"',
]


def _deep_bodies() -> Iterator[bytes]:
    for depth in (20, 1000, 150_000):
        for opening, closing in ((b"[", b"]"), (b'{"a":', b"}")):
            inner = opening * depth + b"1" + closing * depth
            yield inner[:990_000]
            yield (b'{"queries": ["x"], "allow": ' + inner + b"}")[:990_000]


def _wrong_bodies() -> Iterator[bytes]:
    yield from NO_JSON
    yield from NO_OBJECT
    yield from _deep_bodies()
    for key, values in WRONG_VALUES.items():
        for value in values:
            yield json.dumps(VALID | {key: value}).encode()
    for key in UNKNOWN_KEYS:
        yield json.dumps(VALID | {key: 1}).encode()
    for key, number in itertools.product(("min_score", "k"), NUMBERS):
        yield f'{{"queries": ["x"], "{key}": {number}}}'.encode()
    for text in BLANK:
        yield json.dumps({"queries": ["redcar", text]}).encode()
    for place, text in itertools.product(TEXT_PLACES, NO_TEXT):
        yield place.replace(b"%s", text)
    for body in BEYOND:
        yield json.dumps(body).encode()


def _bodies() -> Iterator[Hostile]:
    for body in _wrong_bodies():
        yield Hostile(posted(body), WRONG)
    for bit in range(8 * len(BODY)):
        flipped = bytearray(BODY)
        flipped[bit // 8] ^= 1 << bit % 8
        yield Hostile(posted(bytes(flipped)), {200, *WRONG})
    for more in (b'"k": 4', b'"queries": ["y"]', b'"\\u006b": 4', b'"queries": []'):
        yield Hostile(posted(BODY[:-1] + b", " + more + b"}"), {200, *WRONG})  # the last one counts
    for coding in ("utf-8-sig", "utf-7"):
        yield Hostile(posted(BODY.decode().encode(coding)), {200, *WRONG})
    compressed = gzip.compress(BODY, mtime=0)
    yield Hostile(posted(compressed, more="content-encoding: gzip\r\n"), {415, *WRONG})
    for kind in ("", "text/plain", "application/xml", "application/jsonx", "*/*", ";"):
        yield Hostile(posted(BODY, kind=kind), {415, *WRONG})
    for body in (b"[" * 10_000_000, json.dumps({"queries": ["x" * 10_000_000]}).encode()):
        yield Hostile(posted(body), {413})
    for text, ascii_only in itertools.product(ODD_TEXTS, (True, False)):
        body = json.dumps({"queries": [text, "redcar"]}, ensure_ascii=ascii_only).encode()
        yield Hostile(posted(body), {200}, num_queries=2)
    for fair in WITHIN:
        yield Hostile(posted(json.dumps(fair).encode()), {200}, len(fair["queries"]))


# -- paths, methods, and what is no HTTP
# --------------------------------------------------------------------------------------------------

PATHS = [
    "/../../etc/passwd",
    "/%2e%2e/%2e%2e/etc/passwd",
    "//predict",
    "/predict",
    "/predict/",
    "/predict%00",
    "/explain",
    "/labels/%ff%fe",
    "/labels/../../../x",
    "/labels/none",
    "/labels/" + "x" * 5000,
    "/labels/%00",
    "/.git/config",
    "/docs/x",
    "/labels?prefix=" + "x" * 9000,
    "/labels?limit=-1",
    "/labels?limit=abc",
    "/labels?limit=1e9",
    "/labels?limit=999999999999",
    "/labels?limit=%C0%80",
    "/page.js/..%2f..%2fapp.py",
    "/..%5c..%5cwindows",
    "/Predict",
    "/%",
    "/%zz",
    "/static/../app.py",
    "/admin/reload/x",
]
METHODS = ["PUT", "DELETE", "PATCH", "TRACE", "PROPFIND", "LOCK"]
HEAD = b"POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
SIZED = HEAD + b"content-length: %d\r\n" % len(BODY)
BEGIN = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n"
NO_HTTP = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(200)),
    b"\x80" + bytes(range(256)) * 9 + b"\r\n\r\n",
    b"EHLO x\r\n\r\n",
    b"FOO /predict HTTP/1.1\r\n\r\n",
    b"GET\r\n\r\n",
    HEAD + b"content-length: -1\r\n\r\n",
    HEAD + b"content-length: x\r\n\r\n",
    HEAD + b"content-length: 99999999999999999999999\r\n\r\n",
    HEAD + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}}",
    HEAD + b"transfer-encoding: x\r\n\r\n",
    HEAD + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    CHUNKED + b"zz\r\n{}\r\n",
    CHUNKED + b"-2\r\n{}\r\n0\r\n\r\n",
    CHUNKED + b"f" * 99 + b"\r\n",
    b"GET /healthz HTTP/1.1\r\nno colon\r\n\r\n",
    b"GET /healthz HTTP/1.1\r\na b: c\r\n\r\n",
    b"GET /healthz HTTP/1.1\r\na: b\0c\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"CONNECT localhost:22 HTTP/1.1\r\n\r\n",
    b"GET http://[/ HTTP/1.1\r\n\r\n",
    b"GET /healthz HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
    b"GET /hea\xffthz HTTP/1.1\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\n\r\n",
    BEGIN + b"x: " + b"y" * 100_000 + b"\r\n\r\n",
    BEGIN + b"x: y\r\n" * 50_000 + b"\r\n",
    BEGIN + b"y" * 200_000 + b": x\r\n\r\n",
    BEGIN + b"cookie: " + b"a=b; " * 200_000 + b"\r\n\r\n",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
]
FAIR = [
    SIZED.replace(b"1.1", b"1.0") + b"\r\n" + BODY,
    CHUNKED + b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n",
    SIZED + b"expect: 100-continue\r\n\r\n" + BODY,
    SIZED + b"connection: close\r\n\r\n" + BODY,
]
UPGRADES = [
    SIZED + b"connection: upgrade\r\nupgrade: websocket\r\n\r\n" + BODY,
    SIZED + b"connection: upgrade\r\nupgrade: h2c\r\nhttp2-settings: x\r\n\r\n" + BODY,
]


def _heads() -> Iterator[Hostile]:
    for path in PATHS:
        yield Hostile(get(path), {400, 404, 405, 422})
    for path, status in (("/labels?prefix=%00", 200), ("/labels?prefix=L1&limit=5", 200)):
        yield Hostile(get(path), {status})
    for verb, path in itertools.product(METHODS, ("/predict", "/explain", "/", "/labels")):
        head = f"{verb} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n"
        yield Hostile(head.encode(), {405})
    for data in NO_HTTP:
        yield Hostile(data, {400, 404, 405, 414, 431, CLOSED}, plain=True)
    for data in FAIR:
        yield Hostile(data, {200}, num_queries=len(QUERIES))
    for data in UPGRADES:
        yield Hostile(data, {200, 400, 426}, num_queries=len(QUERIES), plain=True)
    endless = b"10000\r\n" + b" " * 65536 + b"\r\n"
    yield Hostile(CHUNKED + endless * 25, {413})


def hostile_requests() -> list[Hostile]:
    """All of them, the same each time."""
    return [*_bodies(), *_heads()]


# -- what is wrong with an answer
# --------------------------------------------------------------------------------------------------


def faults(request: Hostile, answer: Answer) -> Iterator[str]:
    """What is wrong with an answer: its status; a 200 without predictions; an error that is no JSON
    in the project's shape, is long, or shows the inside.
    """
    if answer.status not in request.allowed:
        yield f"status {answer.status}, right were {request.allowed}; got {answer.body[:300]!r}"
    elif answer.status == 200 and request.num_queries:
        yield from _wrong_predictions(request, answer)
    elif answer.status >= 400 and not request.plain:
        yield from _wrong_error(answer)


def _wrong_predictions(request: Hostile, answer: Answer) -> Iterator[str]:
    try:
        found = len(answer.json()["predictions"])
    except (ValueError, KeyError, TypeError) as error:
        yield f"200 without predictions: {error!r}, {answer.body[:200]!r}"
        return
    if found != request.num_queries:
        yield f"{found} predictions for {request.num_queries} queries"


def _wrong_error(answer: Answer) -> Iterator[str]:
    if not (answer.header("content-type") or "").startswith("application/json"):
        yield f"{answer.status} that is no JSON: {answer.head[:200]!r} {answer.body[:200]!r}"
        return
    if len(answer.body) > MAX_ERROR_BYTES:
        yield f"an error of {len(answer.body)} bytes"
    for mark in INSIDE:
        if mark in answer.body:
            yield f"an error that shows the inside ({mark!r}): {answer.body[:400]!r}"
    try:
        error = answer.json()["error"]
        values = [error[key] for key in ERROR_KEYS]
        of_shape = len(error) == len(ERROR_KEYS) and all(isinstance(x, str) for x in values)
        if not (of_shape and error["what"] and error["fix"]):
            yield f"an error of another shape: {answer.body[:300]!r}"
    except (ValueError, KeyError, TypeError) as wrong:
        yield f"an error of another shape: {wrong!r} {answer.body[:300]!r}"


async def _ask(port: int, request: Hostile) -> tuple[Answer, float]:
    """The answer, and seconds until it came, on a connection of its own."""
    connection = await Connection.open(port)
    begin = time.perf_counter()
    answer = await asyncio.wait_for(connection.ask(request.data), WAIT_SECONDS)
    seconds = time.perf_counter() - begin
    connection.close()
    return answer, seconds


async def attack(port: int, requests: list[Hostile], rate: float | None = None) -> list[str]:
    """Send the requests one after the other, at most `rate` a second; their faults.

    A refusal that comes late again and again is one, too: once may be the machine's fault.
    """
    found = []
    begin = time.perf_counter()
    for number, request in enumerate(requests):
        if rate and (wait := begin + number / rate - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        answer, seconds = await _ask(port, request)
        wrong = list(faults(request, answer))
        for _ in range(TRIALS):
            if answer.status < 400 or seconds <= SOON_SECONDS:
                break
            _, seconds = await _ask(port, request)
        else:
            wrong.append(f"refused after {seconds:.2f} s, time and again")
        found += [f"{fault}; sent {request.data[:300]!r}" for fault in wrong]
    return found


def main() -> None:
    port, count, rate = map(int, sys.argv[1:])
    requests = list(itertools.islice(itertools.cycle(hostile_requests()), count))
    print(json.dumps(asyncio.run(attack(port, requests, rate))))


if __name__ == "__main__":
    main()
