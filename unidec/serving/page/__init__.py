"""The page at `/`: static files of this folder, read once, served with a policy that lets nothing in from outside."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_FILES = ("index.html", "page.css", "page.js", "api.js", "picker.js", "view.js", "icon.svg")
PAGE_PATHS = frozenset({"/", *(f"/page/{name}" for name in _FILES[1:])})

# scripts, styles, images and requests of this server only; no inline script, no form elsewhere, in nobody's frame
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # kept, but asked for anew: a newer unidec shows its own page at once
}


@dataclass(frozen=True)
class Asset:
    """A file of the page: its bytes, media type, and the tag that its bytes decide."""

    body: bytes
    media_type: str
    etag: str


def read_assets() -> dict[str, Asset]:
    """The page's files by path: `/`, `/page/page.css`, ... (`PAGE_PATHS`)."""
    folder, found = resources.files(__name__), {}
    for name in _FILES:
        body = (folder / name).read_bytes()
        path = "/" if name == "index.html" else f"/page/{name}"
        tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        found[path] = Asset(body, _TYPES[name.rpartition(".")[2]], tag)
    return found


def page_routes() -> list[Route]:
    """Routes that serve the page (GET and HEAD), for the application's router; none of them is in its OpenAPI."""
    from starlette.routing import Route

    return [Route(path, _answer(asset), methods=["GET"]) for path, asset in read_assets().items()]


def _answer(asset: Asset) -> Callable[[Request], Awaitable[Response]]:
    from starlette.responses import Response

    headers = {**_HEADERS, "ETag": asset.etag}

    async def answer(request: Request) -> Response:
        known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
        if asset.etag in known:
            return Response(status_code=304, headers=headers)
        return Response(asset.body, media_type=asset.media_type, headers=headers)

    return answer
