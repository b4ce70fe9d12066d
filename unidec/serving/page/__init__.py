"""The page at `/`: static files of this folder, read once, served with a policy that blocks all
foreign content.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_FILES = {"/": "index.html"} | {
    f"/page/{name}": name
    for name in ("page.css", "page.js", "api.js", "picker.js", "view.js", "icon.svg")
}
PAGE_PATHS = frozenset(_FILES)

# scripts, styles, images and requests of this server only; no inline script, no form elsewhere, in
# no frame
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src "
    "'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'"
)
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # a few kilobytes; after an upgrade the new page shows at once
}


def page_routes() -> list[Route]:
    """Routes that serve the page (GET and HEAD), for the application's router; they are not in its
    OpenAPI.
    """
    return [Route(path, _answer(name), methods=["GET"]) for path, name in _FILES.items()]


def _answer(name: str) -> Callable[[Request], Awaitable[Response]]:
    body = (resources.files(__name__) / name).read_bytes()
    kind = _TYPES[name.rpartition(".")[2]]

    async def answer(request: Request) -> Response:
        return Response(body, media_type=kind, headers=_HEADERS)

    return answer
