"""Requests that mean harm (fault 21), made from a seed so that a failure can be had again;
`hostile.py` sends them.

Each case says which statuses are right for it; the odd ones that are fair must be answered.
"""

from __future__ import annotations

import functools
import gzip
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from http_load import CLOSED, get

VALID = {"queries": ["redcar oldboat", "newhouse"], "k": 3}
WRONG = frozenset({400, 422})


@dataclass(frozen=True)
class Case:
    """One exchange.

    Attributes:
        kind: what it tries. data: all bytes that are sent.
        allowed: right statuses; 0: the connection may be ended without an answer.
        answers: how many are awaited on the connection. head: the answers have no body.
        alone: on a connection of its own. slow: the request is never finished, so no answer need be
        soon.
        plain: the HTTP parser refuses it, in plain text, before the application sees it.
        labels: of how many queries a 200 must answer; 0: any body.
    """

    kind: str
    data: bytes
    allowed: frozenset[int]
    answers: int = 1
    head: bool = False
    alone: bool = False
    slow: bool = False
    plain: bool = False
    labels: int = 0


def raw_post(
    body: bytes, path: str = "/predict", kind: str = "application/json", *more: str
) -> bytes:
    """A POST of any bytes."""
    lines = [
        f"POST {path} HTTP/1.1",
        "host: localhost",
        *([f"content-type: {kind}"] if kind else []),
        *more,
    ]
    return "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode() + body


def _json(what: Any) -> bytes:
    return json.dumps(what).encode()


VALID_BODY = _json(VALID)


def _pick(rng: np.random.Generator, of: list[Any]) -> Any:
    return of[int(rng.integers(len(of)))]


def _wrong(
    kind: str, body: bytes, rng: np.random.Generator, allowed: Iterable[int] = WRONG
) -> Case:
    """A body for either of the two that take one."""
    if rng.random() < 0.2:
        return Case(
            kind,
            raw_post(body.replace(b'"queries": [', b'"query": [', 1), "/explain"),
            WRONG | set(allowed),
        )
    return Case(kind, raw_post(body), frozenset(allowed))


def broken_json(rng: np.random.Generator) -> Case:
    """Cut off, with a byte too many or too few, or none at all."""
    at = int(rng.integers(1, len(VALID_BODY)))
    body = _pick(
        rng,
        [
            VALID_BODY[:at],
            VALID_BODY + _pick(rng, [b"}", b",", b"x", b"{}", b"\0", VALID_BODY]),
            VALID_BODY[at:],
            b"",
            b" ",
            b"\r\n",
            b"queries=x",
            b"<xml/>",
            b"{'queries': ['x']}",
            b'{"queries": ["x"],}',
            b"{",
            b"[",
            b'"',
            b"nul",
            b'{"queries": [01]}',
            b'{"queries": ["\\x41"]}',
            b'{"queries": ["a\nb"]}',
            b"//\n" + VALID_BODY,
        ],
    )
    return _wrong("broken JSON", body, rng)


def flipped(rng: np.random.Generator) -> Case:
    """One bit of a valid body: it may stay valid."""
    data = bytearray(VALID_BODY)
    data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
    return Case("flipped bit", raw_post(bytes(data)), WRONG | {200})


def random_bytes(rng: np.random.Generator) -> Case:
    return _wrong("random body", b"\xff" + rng.bytes(int(rng.integers(0, 2000))), rng)


WRONG_VALUES: dict[str, list[Any]] = {
    "queries": [
        None,
        3,
        "text",
        {},
        [1],
        [None],
        [["x"]],
        [True],
        ["x", 2],
        {"0": "x"},
        [],
        True,
        [{}],
        [1.5],
    ],
    "k": ["5", 5.5, True, -1, 0, 101, 10**9, 2**63, 10**30, [], {}, "x", [5], -(2**70)],
    "allow": ["L1", [1], {}, [None], 3, [["L1"]], True, {"L1": 1}],
    "deny": ["L1", [1], {}, [None], 3, [["L1"]], True, [1.5]],
    "min_score": ["0.1", [], {}, "x", [0.1], "NaN"],
    "head": ["none", 1, "", "BOTH", [], {}, "de\0", True],
}


def wrong_type(rng: np.random.Generator) -> Case:
    name = _pick(rng, list(WRONG_VALUES))
    return _wrong("wrong type", _json(VALID | {name: _pick(rng, WRONG_VALUES[name])}), rng)


def not_an_object(rng: np.random.Generator) -> Case:
    return _wrong(
        "not an object",
        _pick(rng, [b"[]", b"null", b"3", b'"x"', b"true", b"{}", b"[{}]", b"1e5"]),
        rng,
    )


def unknown_key(rng: np.random.Generator) -> Case:
    key = _pick(
        rng,
        ["", "K", "query", "__proto__", "model", "\0", "queries ", "k" * 5000, "größe", "$where"],
    )
    return _wrong("unknown key", _json(VALID | {key: 1}), rng)


def duplicate_key(rng: np.random.Generator) -> Case:
    more = _pick(
        rng, [b'"k": 4', b'"queries": ["y"]', b'"k": 3', b'"\\u006b": 4', b'"queries": []']
    )
    # the last one counts
    return Case("duplicate key", raw_post(VALID_BODY[:-1] + b", " + more + b"}"), WRONG | {200})


def number(rng: np.random.Generator) -> Case:
    """Numbers that JSON has not, or that do not fit anywhere."""
    text = _pick(
        rng,
        [
            "NaN",
            "Infinity",
            "-Infinity",
            "1e999",
            "-1e999",
            "1" * 5000,
            "0x10",
            "1_000",
            "+1",
            ".5",
            "1.",
        ],
    )
    name = _pick(rng, ["min_score", "k"])
    return _wrong("number", f'{{"queries": ["x"], "{name}": {text}}}'.encode(), rng)


@functools.cache
def _large(what: str) -> bytes:
    """Bodies that are made once: they are large."""
    bodies = {
        "million rows": lambda: _json({"queries": ["x"] * 1_000_000}),
        "10 MB string": lambda: _json({"queries": ["x" * 10_000_000]}),
        "10 MB of brackets": lambda: b"[" * 10_000_000,
        "many rows": lambda: _json({"queries": ["x"] * 100_000}),
        "long query": lambda: _json({"queries": ["x " * 400_000]}),
        "many labels": lambda: _json({"queries": ["x"], "deny": ["L1"] * 100_000}),
        "many objects": lambda: b'{"queries": [' + b",".join([b'{"a":1}'] * 120_000) + b"]}",
        "many lists": lambda: b'{"queries": [' + b",".join([b"[]"] * 320_000) + b"]}",
        "many keys": lambda: _json({"queries": ["x"]} | {f"k{i}": i for i in range(60_000)}),
        "long spaces": lambda: b" " * 900_000 + VALID_BODY[:-1],
    }
    return bodies[what]()


def too_large(rng: np.random.Generator) -> Case:
    """More than a body may have."""
    what = _pick(rng, ["million rows", "10 MB string", "10 MB of brackets"])
    return Case(what, raw_post(_large(what)), frozenset({413}))


def nearly_too_large(rng: np.random.Generator) -> Case:
    """Within the body's bound, beyond the others."""
    names = [
        "many rows",
        "long query",
        "many labels",
        "many keys",
        "many objects",
        "many lists",
        "long spaces",
    ]
    return _wrong("beyond a bound", _large(_pick(rng, names)), rng)


def bounds(rng: np.random.Generator) -> Case:
    """Just beyond each bound, and just within."""
    beyond = [
        {"queries": ["x"] * 257},
        {"queries": ["x" * 8001]},
        {"queries": ["x"], "k": 101},
        {"queries": ["x"], "allow": ["L1"] * 10_001},
        {"queries": ["x", "y" * 8001]},
    ]
    within = [
        {"queries": ["redcar"] * 256},
        {"queries": ["x" * 8000]},
        {"queries": ["x"], "k": 100},
        {"queries": ["x"], "allow": [f"L{i}" for i in range(10_000)]},
        {"queries": ["redcar"], "k": 1},
    ]
    at = int(rng.integers(5))
    if rng.random() < 0.6:
        return _wrong("just beyond", _json(beyond[at]), rng)
    return Case(
        "just within",
        raw_post(_json(within[at])),
        frozenset({200}),
        labels=len(within[at]["queries"]),
    )


TEXTS = [
    "nul \0 within",
    "🚗" * 100,
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 family",
    "e" + "\u0301" * 500,
    "\u202eright to left",
    "\ufeffmark",
    "\u2028line",
    "\x1b[31mred",
    "'; DROP TABLE labels; --",
    "%s%n%x",
    "../../etc",
    "<script>alert(1)</script>",
    "${jndi:ldap://x}",
    "{{7*7}}",
    "\U0010ffff",
    "\ufffe\uffff",
    "ﷺ" * 50,
    "漢字" * 200,
    "\r\nx: y",
    "a" * 3000,
    "[PAD] [UNK] [CLS]",
    "\\",
    '"',
]


def odd_text(rng: np.random.Generator) -> Case:
    """Odd, but text: it is answered."""
    texts = [_pick(rng, TEXTS) for _ in range(int(rng.integers(1, 4)))]
    body = json.dumps({"queries": texts}, ensure_ascii=bool(rng.random() < 0.5)).encode()
    return Case("odd text", raw_post(body), frozenset({200}), labels=len(texts))


def blank(rng: np.random.Generator) -> Case:
    text = _pick(
        rng, ["", " ", "\t\r\n", "\u00a0", "\u3000\u2003", "\x00", "\x7f\x80\x9f", "\u200b\u202e"]
    )
    return _wrong("blank query", _json({"queries": _pick(rng, [[text], ["redcar", text]])}), rng)


def not_text(rng: np.random.Generator) -> Case:
    """Half characters and bytes that are no UTF-8."""
    half = _pick(
        rng,
        [
            b"\\ud800",
            b"\\udc00",
            b"x\\ud83dx",
            b"\\ude00\\ud83d",
            b"\xff",
            b"\xed\xa0\x80",
            b"\xc0\x80",
            b"\xf8\x88",
            b"ok \xc3",
        ],
    )
    where = _pick(
        rng,
        [
            b'{"queries": ["%s"]}',
            b'{"queries": ["x"], "deny": ["%s"]}',
            b'{"queries": ["x"], "%s": 1}',
            b'{"queries": ["x"], "head": "%s"}',
            b'{"queries": ["x"], "allow": ["%s"]}',
        ],
    )
    return _wrong("not text", where.replace(b"%s", half), rng)


def encoded(rng: np.random.Generator) -> Case:
    """Another encoding of characters or of the body."""
    coding = _pick(rng, ["utf-16", "utf-32", "utf-16-le", "utf-8-sig", "utf-7", "cp037"])
    if rng.random() < 0.3:
        return Case(
            "compressed",
            raw_post(
                gzip.compress(VALID_BODY, mtime=0),
                "/predict",
                "application/json",
                "content-encoding: gzip",
            ),
            WRONG | {415},
        )
    body = VALID_BODY.decode().encode(coding)
    return Case(
        "another encoding",
        raw_post(body),
        WRONG if coding not in ("utf-8-sig", "utf-7") else WRONG | {200},
    )


def deep(rng: np.random.Generator) -> Case:
    """Nested more deeply than any stack likes."""
    depth = int(_pick(rng, [20, 50, 200, 1000, 20_000, 150_000]))
    opening, closing = _pick(rng, [(b"[", b"]"), (b'{"a":', b"}"), (b'[{"a":', b"}]")])
    inner = opening * depth + b"1" + closing * depth * int(rng.integers(2))
    body = _pick(
        rng, [inner, b'{"queries": ' + inner + b"}", b'{"queries": ["x"], "allow": ' + inner + b"}"]
    )[:990_000]
    return _wrong("deep", body, rng)


def content_type(rng: np.random.Generator) -> Case:
    kind = _pick(
        rng,
        [
            "",
            "text/plain",
            "multipart/form-data; boundary=x",
            "application/x-www-form-urlencoded",
            "application/xml",
            "application/jsonx",
            "*/*",
            ";",
            "text/html",
            "image/png",
        ],
    )
    return Case("content type", raw_post(VALID_BODY, "/predict", kind), WRONG | {415})


PATHS = [
    "/../../etc/passwd",
    "/%2e%2e/%2e%2e/etc/passwd",
    "//",
    "//predict",
    "/predict/",
    "/predict%00",
    "/labels/%ff%fe",
    "/labels/../../../x",
    "/labels/none",
    "/labels/" + "x" * 5000,
    "/labels/%F0%9F%9A%97",
    "/.git/config",
    "/docs/x",
    "/nothing",
    "/labels?prefix=" + "x" * 9000,
    "/labels?limit=-1",
    "/labels?limit=abc",
    "/labels?limit=1e9",
    "/labels?limit=999999999999",
    "/page.js/..%2f..%2fapp.py",
    "/..%5c..%5cwindows",
    "/labels/%00",
    "/Predict",
    "/%",
    "/%zz",
    "/static/../app.py",
    "/labels?limit=1&limit=x",
    "/admin/reload/x",
    "/labels?limit=%C0%80",
]


def path(rng: np.random.Generator) -> Case:
    """Paths that lead nowhere, or out."""
    return Case("path", get(_pick(rng, PATHS)), frozenset({400, 404, 405, 422}))


def labels_found(rng: np.random.Generator) -> Case:
    """Odd questions for labels that are fair."""
    what = _pick(
        rng,
        [
            "/labels?prefix=",
            "/labels?prefix=%00",
            "/labels?prefix=%F0%9F%9A%97",
            "/labels?prefix=L1&limit=5",
            "/labels/L0",
        ],
    )
    return Case("labels", get(what), frozenset({200, 404} if what.endswith("L0") else {200}))


def method(rng: np.random.Generator) -> Case:
    """Methods that a route has not."""
    verb = _pick(rng, ["PUT", "DELETE", "PATCH", "TRACE", "OPTIONS", "PROPFIND", "LOCK", "HEAD"])
    where = _pick(rng, ["/predict", "/explain", "/", "/healthz", "/labels", "/metrics", "/version"])
    request = f"{verb} {where} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n".encode()
    fine = {200} if verb in ("HEAD", "OPTIONS") and where not in ("/predict", "/explain") else set()
    return Case("method", request, frozenset({405} | fine), head=verb == "HEAD")


def wrong_verb(rng: np.random.Generator) -> Case:
    where = _pick(rng, ["/predict", "/explain"])
    return Case("method", get(where), frozenset({405}))


_HEAD = b"POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
_CHUNKED = _HEAD + b"transfer-encoding: chunked\r\n\r\n"
NO_HTTP = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(200)),
    b"EHLO x\r\n\r\n",
    b"FOO /predict HTTP/1.1\r\n\r\n",
    b"GET\r\n\r\n",
    _HEAD + b"content-length: -1\r\n\r\n",
    _HEAD + b"content-length: x\r\n\r\n",
    _HEAD + b"content-length: 99999999999999999999999\r\n\r\n",
    _HEAD + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}}",
    _HEAD + b"transfer-encoding: x\r\n\r\n",
    _HEAD + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    _CHUNKED + b"zz\r\n{}\r\n",
    _CHUNKED + b"-2\r\n{}\r\n0\r\n\r\n",
    _CHUNKED + b"f" * 99 + b"\r\n",
    b"GET /healthz HTTP/1.1\r\nno colon\r\n\r\n",
    b"GET /healthz HTTP/1.1\r\na b: c\r\n\r\n",
    b"GET /healthz HTTP/1.1\r\na: b\0c\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"CONNECT localhost:22 HTTP/1.1\r\n\r\n",
    b"GET http://[/ HTTP/1.1\r\n\r\n",
    b"GET /healthz HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
    b"GET /hea\xffthz HTTP/1.1\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\n\r\n",
]


def no_http(rng: np.random.Generator) -> Case:
    """What is not HTTP, or contradicts itself."""
    if rng.random() < 0.2:
        data = b"\x80" + rng.bytes(int(rng.integers(8, 4000))) + b"\r\n\r\n"
        return Case("random bytes", data, frozenset({400, CLOSED}), alone=True, plain=True)
    return Case(
        "not HTTP", _pick(rng, NO_HTTP), frozenset({400, 404, 405, CLOSED}), alone=True, plain=True
    )


def large_head(rng: np.random.Generator) -> Case:
    begin = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n"
    data = _pick(
        rng,
        [
            begin + b"x: " + b"y" * 100_000 + b"\r\n\r\n",
            begin + b"x: y\r\n" * 50_000 + b"\r\n",
            begin + b"y" * 200_000 + b": x\r\n\r\n",
            b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
            begin + b"cookie: " + b"a=b; " * 200_000 + b"\r\n\r\n",
        ],
    )
    return Case("large head", data, frozenset({400, 431, 414, CLOSED}), alone=True, plain=True)


def pipelined(rng: np.random.Generator) -> Case:
    """Several at once: as many answers, each right."""
    return Case(
        "pipelined", raw_post(VALID_BODY) * 5, frozenset({200}), answers=5, labels=2, alone=True
    )


def fair(rng: np.random.Generator) -> Case:
    """Unusual, but right: HTTP/1.0, "Expect", chunks of a byte, an upgrade that the server does not
    take.
    """
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in VALID_BODY) + b"0\r\n\r\n"
    sized = _HEAD + b"content-length: %d\r\n" % len(VALID_BODY)
    data = _pick(
        rng,
        [
            sized.replace(b"1.1", b"1.0") + b"\r\n" + VALID_BODY,
            _CHUNKED + chunks,
            sized + b"expect: 100-continue\r\n\r\n" + VALID_BODY,
            sized + b"connection: close\r\n\r\n" + VALID_BODY,
            sized + b"connection: upgrade\r\nupgrade: websocket\r\n\r\n" + VALID_BODY,
            sized
            + b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: x\r\n\r\n"
            + VALID_BODY,
        ],
    )
    allowed = {200} if b"upgrade" not in data else {200, 400, 426}
    return Case("fair", data, frozenset(allowed), labels=2, alone=True)


def unfinished(rng: np.random.Generator) -> Case:
    """A request whose body never ends (heads that never end are a reverse proxy's to refuse)."""
    data = _pick(
        rng,
        [
            _HEAD + b"content-length: 900000\r\n\r\n" + VALID_BODY,
            _CHUNKED,
            _HEAD + b"content-length: 99\r\n\r\n",
            _CHUNKED + b'5\r\n{"que\r\n',
        ],
    )
    return Case("unfinished", data, frozenset({408, 400, CLOSED}), alone=True, slow=True)


def endless_chunks(rng: np.random.Generator) -> Case:
    """A chunked body beyond the bound, without an end."""
    piece = b"10000\r\n" + b" " * 65536 + b"\r\n"
    return Case("endless chunks", _CHUNKED + piece * 25, frozenset({413}), alone=True)


def leaves(rng: np.random.Generator) -> Case:
    """A client that is gone before the answer."""
    data = raw_post(VALID_BODY)
    return Case(
        "leaves", data[: int(rng.integers(1, len(data) + 1))], frozenset(), answers=0, alone=True
    )


# what makes it -> how many of a thousand
MIX: dict[Callable[[np.random.Generator], Case], int] = {
    broken_json: 110,
    flipped: 90,
    random_bytes: 50,
    wrong_type: 150,
    not_an_object: 20,
    unknown_key: 40,
    duplicate_key: 40,
    number: 40,
    too_large: 10,
    nearly_too_large: 15,
    bounds: 35,
    odd_text: 100,
    blank: 25,
    not_text: 60,
    encoded: 30,
    deep: 30,
    content_type: 25,
    path: 35,
    labels_found: 10,
    method: 20,
    wrong_verb: 5,
    no_http: 25,
    large_head: 10,
    pipelined: 5,
    fair: 10,
    unfinished: 2,
    endless_chunks: 3,
    leaves: 5,
}


def make_cases(count: int, seed: int = 0, *, large: bool = True) -> list[Case]:
    """So many cases in the shares of `MIX`, each kind once at least, in an order drawn from the
    seed.

    Args:
        large: with requests of as many queries as are allowed, which is fair use: each keeps the
            model busy for long. Without them others' latency shows what refusing costs.
    """
    rng = np.random.default_rng(seed)
    makers = list(MIX)
    shares = np.array([MIX[maker] for maker in makers], dtype=np.float64)
    more = rng.choice(len(makers), max(0, count - len(makers)), p=shares / shares.sum())
    drawn = [*makers, *(makers[i] for i in more)]
    cases = [drawn[i](rng) for i in rng.permutation(len(drawn))[:count]]
    return cases if large else [odd_text(rng) if case.labels > 100 else case for case in cases]
