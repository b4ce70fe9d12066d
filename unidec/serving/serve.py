"""`unidec serve`: one process, uvicorn's event loop, and a thread for the model.

It listens at once (/healthz answers, /readyz returns 503) and loads meanwhile. On SIGTERM, Ctrl-C
or SIGHUP (its terminal was closed) new connections are refused, requests on open ones are answered
for `DRAIN_SECONDS` more, and the exit code is 0; a second Ctrl-C ends it at once."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import ipaddress
import logging
import os
import resource
import signal
import socket
import struct
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from unidec.config import Serve
from unidec.data.storage import MANIFEST
from unidec.errors import ArtifactError, ConfigError

if TYPE_CHECKING:
    import uvicorn

    from unidec.serving.engine import Identity, Service

KEEP_ALIVE_SECONDS = 30  # an idle connection is closed after this time
BACKLOG = 2048
ACCEPT_SECONDS = 0.2  # after SIGTERM: connections that were requested before are accepted
DRAIN_SECONDS = 2.0  # after SIGTERM: open connections may send requests for this time
_SO_ATTACH_FILTER = 26
# a socket filter of Linux, on processors with little-endian numbers
_NO_SYN = bytes.fromhex(
    "30000000 0d000000"  # load byte 13 of the TCP header, the flags
    "45000001 02000000"  # without SYN, the request for a connection, skip a line
    "06000000 00000000"  # drop the packet
    "06000000 ffff0000"  # keep it
)
# Python's switch interval: the event loop waits no longer than this for the model's thread
SWITCH_SECONDS = 0.001

log = logging.getLogger(__name__)


def serve(source: str, settings: Serve) -> None:
    """Serve a bundle until a signal ends it.

    Args:
        source: a folder, `models:/name@alias` (which is followed) or `models:/name/version`.
        settings: section `serve`.

    Raises:
        ConfigError: the address is not available, or there is no such version.
        ArtifactError: there is no bundle, or it is damaged.
    """
    begun = time.monotonic()
    from unidec.serving.engine import Service
    from unidec.serving.follow import Follower
    from unidec.serving.prometheus import follow_metrics

    _log_to_stderr()
    service = Service(settings)
    follower = service.follower = Follower(service, source, settings)
    if follower.address is None and not (Path(source) / MANIFEST).is_file():
        raise ArtifactError(
            "no bundle here",
            where=source,
            fix="run `unidec index build`, or name a registered model: models:/unidec@champion",
        )
    service.metrics.watch(lambda: follow_metrics(follower.state()))
    api_key = _api_key(settings)
    sys.setswitchinterval(SWITCH_SECONDS)
    allow_open_files()
    with _listen(settings) as listener:
        follower.start()  # it loads while this thread imports the server
        try:
            server = _server(service, settings, api_key)
            address = _address(listener)

            def listening(_: Future[None]) -> None:
                print(f"serve: listening at {address}", flush=True)

            def loaded(first: Future[Identity]) -> None:
                if first.exception() is None:
                    _print_ready(service, address, time.monotonic() - begun)
                else:
                    server.should_exit = True

            follower.found.add_done_callback(listening)
            follower.first.add_done_callback(loaded)
            _end_in_order(server)
            server.run(sockets=[listener])
        finally:
            follower.stop()
    if follower.first.done():
        follower.first.result()  # raises what kept it from loading


def _end_in_order(server: uvicorn.Server) -> None:
    # uvicorn handles these two itself; when it ends, it raises them again for these handlers
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup
        signal.signal(signal.SIGHUP, server.handle_exit)


def allow_open_files() -> None:
    """Raise the limit of open files to the system's maximum: each connection needs one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS allows fewer than its limit says
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _server(service: Service, settings: Serve, api_key: str | None) -> uvicorn.Server:
    import uvicorn

    from unidec.serving.app import create_app

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            """Accept connections for `ACCEPT_SECONDS`, then let all of them send requests for
            `DRAIN_SECONDS` more, each answered with `Connection: close`. uvicorn alone would reset
            waiting connections, and close idle ones while a request is on its way.
            """
            self.server_state.default_headers.append((b"connection", b"close"))
            for listener in sockets or []:
                _ignore_new_connections(listener)
            await asyncio.sleep(ACCEPT_SECONDS)
            for listening in self.servers:
                listening.close()
            end = time.monotonic() + DRAIN_SECONDS
            while self.server_state.connections and time.monotonic() < end and not self.force_exit:
                await asyncio.sleep(0.05)
            await super().shutdown(sockets)

    app = create_app(service, settings, api_key, hosts_of(settings, api_key))
    return Server(server_config(app, settings))


def server_config(app: object, settings: Serve) -> uvicorn.Config:
    """The server's options. The parser is httptools, in C: for a body of one-byte chunks, h11 takes
    forty times as long and blocks all other clients meanwhile.
    """
    import uvicorn

    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        http="httptools",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=int(settings.timeout_seconds) + 5,
    )


def _ignore_new_connections(listener: socket.socket) -> None:
    """Make the kernel drop requests for connections that arrive from now on; on Linux only.

    Connections that it has already opened, but the server has not accepted, would be reset if the
    socket were closed now. A client that is ignored tries again after a second and is refused.
    """
    lines = ctypes.create_string_buffer(_NO_SYN)
    program = struct.pack("HP", len(_NO_SYN) // 8, ctypes.addressof(lines))
    with contextlib.suppress(OSError):
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def _listen(settings: Serve) -> socket.socket:
    """Bind the socket before anything is loaded, so that an address in use is reported at once."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(
            "cannot listen",
            where="serve.host, serve.port",
            got=f"{settings.host}:{settings.port}: {error}",
            fix="another --port; --port 0 takes any free one",
        ) from error


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}"


def _print_ready(service: Service, address: str, seconds: float) -> None:
    engine = service.current
    assert engine is not None
    gc.collect()
    gc.freeze()  # objects loaded by now live on: garbage collection need not scan them
    identity = engine.identity
    version = f", version {identity.version}" if identity.version else ""
    bundle = f"bundle {identity.sha256[:16]}{version}"
    model = f"{engine.runtime}, {engine.bundle.num_labels} labels"
    print(f"serve: ready at {address} after {seconds:.2f} s: {bundle}, {model}", flush=True)


def _api_key(settings: Serve) -> str | None:
    """The API key from the environment; warns if others may send requests without one."""
    key = os.environ.get(settings.api_key_env, "").strip() or None
    if key is None and not _is_loopback(settings.host):
        log.warning(
            "anyone who can reach %s may send requests: set %s, or listen on 127.0.0.1; on a "
            "network also put a reverse proxy in front (docs/serving.md)",
            settings.host,
            settings.api_key_env,
        )
    return key


def hosts_of(settings: Serve, api_key: str | None) -> frozenset[str] | None:
    """Names that the Host header may hold; None: any. On loopback without a key no name is
    accepted: otherwise a web page whose name points at this machine (DNS rebinding) could use the
    server through the user's browser.
    """
    if settings.hosts:
        return frozenset(name.lower() for name in settings.hosts)
    return frozenset() if api_key is None and _is_loopback(settings.host) else None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _log_to_stderr() -> None:
    style = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format=style)
    logging.getLogger("unidec").setLevel(logging.INFO)
    # uvicorn warns of every broken request: a client could fill the disk
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
