"""What stands before the routes: the key, the body's size and time, bytes in flight."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from helpers import asgi
from helpers.asgi import run


def test_the_key_is_asked_for_on_all_but_the_page_and_the_health_routes() -> None:
    async def main() -> None:
        async with asgi.running(asgi.StubEngine(), "sécret") as server:
            for path in ("/", "/page/page.css", "/healthz", "/readyz"):
                reply = await server.ask(path)
                assert reply.status == 200, path
                assert reply.headers["x-content-type-options"] == "nosniff", path
            for path in (
                "/version",
                "/card",
                "/labels",
                "/labels/L1",
                "/metrics",
                "/openapi.json",
                "/nope",
                "/page/x",
            ):
                reply = await server.ask(path)
                assert reply.status == 401, path
                assert reply.headers["www-authenticate"] == "Bearer", path
                assert reply.headers["x-content-type-options"] == "nosniff", path
                assert (
                    reply.json["error"]["what"] == "an API key is required"
                    and reply.json["error"]["fix"]
                )
            assert (await server.predict("a")).status == 401
            for wrong in (
                "Bearer",
                "Bearer ",
                "Bearer secret",
                "Basic sécret",
                "sécret",
                "Bearer sécret2",
            ):
                assert (
                    await server.ask("/version", headers={"authorization": wrong})
                ).status == 401, wrong
            for name, right in (
                ("authorization", "Bearer sécret"),
                ("Authorization", "bearer  sécret"),
                ("x-api-key", "sécret"),
            ):
                status = (await server.ask("/version", headers={name: right})).status
                assert status == 200, name
            assert "sécret" not in (await server.ask("/version")).body.decode()
            assert server.figure("unidec_errors_total", kind="unauthorized") == 16

    run(main)


OURS = (
    "",
    "localhost",
    "localhost:8080",
    "LocalHost",
    "127.0.0.1:8080",
    "127.9.9.9",
    "[::1]:80",
    "[::1]",
    "10.0.0.7",
)
FOREIGN = (
    "evil.example",
    "evil.example:8080",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "[::1",
    ":80x",
)


@pytest.mark.parametrize(
    ("key", "settings", "refused"),
    [
        (None, {}, FOREIGN),
        (None, {"host": "::1"}, FOREIGN),
        (None, {"host": "0.0.0.0"}, ()),  # others reach it: by what names is not known
        ("key", {}, ()),  # no page has the key
        ("key", {"hosts": ["A.example"]}, FOREIGN),
        (None, {"host": "0.0.0.0", "hosts": ["A.example"]}, FOREIGN),
        (None, {"hosts": ["evil.example", "evil.example:8080"]}, FOREIGN[2:]),
    ],
)
def test_a_foreign_name_is_refused_where_a_page_could_use_it(
    key: str | None, settings: dict[str, Any], refused: tuple[str, ...]
) -> None:
    async def main() -> None:
        async with asgi.running(asgi.StubEngine(), key, **settings) as server:
            names = {
                *OURS,
                *FOREIGN,
                *(["a.example", "A.EXAMPLE:1"] if "A.example" in settings.get("hosts", ()) else ()),
            }
            for name in names:
                for path in ("/", "/healthz", "/version"):
                    headers = {"host": name, "x-api-key": key or ""}
                    reply = await server.ask(path, headers=headers)
                    expected = 421 if name in refused else 200
                    assert reply.status == (expected), (name, path)
                reply = await server.ask("/predict", {"queries": ["a"]}, headers=headers)
                assert reply.status == (421 if name in refused else 200), name
                if reply.status == 421:
                    error = reply.json["error"]
                    assert error["got"] == name and "serve.hosts" in error["fix"]
            assert server.figure("unidec_errors_total", kind="wrong_host") == 4 * len(refused)

    run(main)


def test_a_declared_body_that_is_too_large_is_refused_unread() -> None:
    async def main() -> None:
        async with asgi.running(asgi.StubEngine(), max_body_bytes=100) as server:
            reply = await server.ask("/predict", b"x" * 101)
            assert (reply.status, reply.headers["connection"]) == (413, "close")
            assert (
                reply.json["error"]["got"] == "101 bytes"
                and reply.json["error"]["expected"] == "at most 100 bytes"
            )
            assert (await server.ask("/predict", b"x" * 100)).status == 400

    run(main)


def test_a_chunked_body_is_read_no_further_than_the_limit() -> None:
    async def main() -> None:
        async with asgi.running(asgi.StubEngine(), max_body_bytes=100) as server:
            reply = await server.ask("/predict", chunks=[b"x" * 60, b"x" * 60, b"x"])
            assert (reply.status, reply.headers["connection"]) == (413, "close")
            whole = b'{"queries": ["a"]}'
            reply = await server.ask("/predict", chunks=[whole[:5], whole[5:9], whole[9:], b""])
            assert reply.status == 200
            assert reply.json["predictions"][0]["labels"][0]["uid"] == "a-0"

    run(main)


def test_a_body_that_does_not_end_is_408_in_time() -> None:
    async def main() -> None:
        async with asgi.running(asgi.StubEngine(), timeout_seconds=0.1) as server:
            loop = asyncio.get_running_loop()
            began = loop.time()
            reply = await server.ask("/predict", chunks=[b'{"queries":'], ends=False)
            assert (reply.status, reply.headers["connection"]) == (408, "close")
            assert loop.time() - began < 5
            assert server.figure("unidec_errors_total", kind="slow_body") == 1

    run(main)


def test_a_client_that_goes_while_it_sends_is_forgotten() -> None:
    async def main() -> None:
        leaves = asyncio.Event()
        leaves.set()
        async with asgi.running(asgi.StubEngine()) as server:
            assert (
                await server.ask("/predict", chunks=[b"{"], ends=False, leaves=leaves)
            ).status == 0
            assert server.figure("unidec_in_flight_requests") == 0

    run(main)


@pytest.mark.parametrize(
    "kind",
    [
        "text/plain",
        "",
        "application/jsonx",
        "multipart/form-data",
        "application/x-www-form-urlencoded",
    ],
)
def test_a_body_that_is_not_declared_as_json_is_415(kind: str) -> None:
    async def main() -> None:
        async with asgi.running(asgi.StubEngine()) as server:
            reply = await server.ask(
                "/predict", b'{"queries": ["a"]}', headers={"content-type": kind}
            )
            assert reply.status == 415
            assert reply.json["error"]["got"] == kind
            good = await server.ask(
                "/predict",
                b'{"queries": ["a"]}',
                headers={"content-type": "Application/JSON; charset=utf-8"},
            )
            assert good.status == 200

    run(main)


def test_a_body_where_none_is_expected_is_read_and_bounded() -> None:
    async def main() -> None:
        async with asgi.running(asgi.StubEngine(), max_body_bytes=100) as server:
            status = (await server.ask("/healthz", b"x" * 50, method="GET")).status
            assert status == 200
            assert (await server.ask("/healthz", b"x" * 101, method="GET")).status == 413
            assert (await server.ask("/nope", b"x" * 50, method="POST")).status == 404

    run(main)


def test_a_head_that_is_too_large_is_refused() -> None:
    async def main() -> None:
        async with asgi.running(asgi.StubEngine()) as server:
            reply = await server.ask("/healthz", headers={"x": "y" * 70_000})
            assert (reply.status, reply.headers["connection"]) == (431, "close")
            assert reply.json["error"]["fix"]

    run(main)
