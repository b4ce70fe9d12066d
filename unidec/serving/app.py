"""The application of `unidec serve`: its routes, their OpenAPI, and what stands before them."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Route

from unidec import __version__
from unidec.sections import Serve
from unidec.serving import schemas
from unidec.serving.errors import RequestError, wrong_values
from unidec.serving.limits import Guard
from unidec.serving.page import PAGE_PATHS, page_routes
from unidec.serving.routes import JsonBytes, Routes
from unidec.serving.service import Service

_ABOUT = (
    "Labels for texts. Every error is JSON that says what is wrong, where, what was got and expected, and the fix. "
    "503 comes with Retry-After."
)

# of OpenTelemetry, which an environment variable of another program could switch on; looked at at every request
_NO_TELEMETRY: Any = {"tracing": False, "metrics": False, "logs": False}


def create_app(
    service: Service, settings: Serve, api_key: str | None = None, hosts: frozenset[str] | None = None
) -> FastAPI:
    """The server's application; the batcher lives as long as its lifespan.

    Args:
        service: whose current engine answers; it may have none yet.
        api_key: asked for on all routes but the page and the health routes; None: on none.
        hosts: names by which it may be asked, beside addresses and localhost; None: any.
    """
    routes = Routes(service, settings, api_key)
    app = FastAPI(
        title="unidec", version=__version__, description=_ABOUT, docs_url=None, redoc_url=None,
        lifespan=routes.lifespan, redirect_slashes=False, telemetry=_NO_TELEMETRY,
    )  # fmt: skip
    _add_predictions(app, routes)
    _add_labels(app, routes)
    _add_facts(app, routes)
    # the hot path past FastAPI's dependencies (80 of 200 us a request); FastAPI's own route tells the OpenAPI of it
    app.router.routes.insert(0, Route("/predict", routes.predict, methods=["POST"]))
    app.router.routes.extend(page_routes())
    paths = frozenset(getattr(route, "path", "") for route in app.router.routes)
    free = frozenset({"/", "/healthz", "/readyz"}) | PAGE_PATHS
    app.add_middleware(
        Guard, settings=settings, metrics=service.metrics, api_key=api_key, free=free, routes=paths, hosts=hosts
    )
    if api_key is not None:
        _ask_for_key(app, free)
    app.add_exception_handler(HTTPException, _not_routed)
    app.add_exception_handler(RequestValidationError, _wrong_parameters)
    return app


def _ask_for_key(app: FastAPI, free: frozenset[str]) -> None:
    """Into the OpenAPI: which routes want the key, and how it is sent."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        schema = plain()
        schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path, methods in schema["paths"].items():
            for operation in methods.values():
                operation["security"] = [] if path in free else [{"key": []}]
        return schema

    app.openapi = openapi  # type: ignore[method-assign]


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    words = {
        400: "broken JSON", 401: "the API key is missing or wrong", 404: "there is none",
        408: "the body came too slowly", 413: "the body is too large", 415: "the body is not declared as JSON",
        422: "wrong values", 503: "overloaded, not ready, or too late: try again after Retry-After seconds",
    }  # fmt: skip
    return {status: {"model": schemas.ErrorAnswer, "description": words[status]} for status in statuses}


_OF_POST = (400, 401, 408, 413, 415, 422, 503)


def _add_predictions(app: FastAPI, routes: Routes) -> None:
    app.add_api_route(
        "/predict", routes.predict, methods=["POST"], summary="The best labels of each query", operation_id="predict",
        response_class=JsonBytes, responses=_errors(*_OF_POST) | {200: {"model": schemas.PredictAnswer}},
        openapi_extra={"requestBody": schemas.body_schema(routes.models.predict, schemas.PREDICT_EXAMPLE)},
    )  # fmt: skip
    app.add_api_route(
        "/explain", routes.explain, methods=["POST"], summary="The labels of one query, and where they come from",
        operation_id="explain", response_class=JsonBytes,
        responses=_errors(*_OF_POST) | {200: {"model": schemas.ExplainAnswer}},
        openapi_extra={"requestBody": schemas.body_schema(routes.models.explain, schemas.EXPLAIN_EXAMPLE)},
    )  # fmt: skip


def _add_labels(app: FastAPI, routes: Routes) -> None:
    app.add_api_route(
        "/labels", routes.find_labels, methods=["GET"], summary="Labels by how they begin", operation_id="labels",
        response_class=JsonBytes, responses=_errors(401, 422, 503) | {200: {"model": schemas.LabelsAnswer}},
    )  # fmt: skip
    app.add_api_route(
        "/labels/{uid:path}", routes.label, methods=["GET"], summary="A label", operation_id="label",
        response_class=JsonBytes, responses=_errors(401, 404, 503) | {200: {"model": schemas.LabelAnswer}},
    )  # fmt: skip


def _add_facts(app: FastAPI, routes: Routes) -> None:
    def add(path: str, endpoint: Any, about: str, model: Any, *statuses: int, more: Any = None) -> None:
        app.add_api_route(
            path, endpoint, methods=["GET"], summary=about, operation_id=path.strip("/"), response_class=JsonBytes,
            responses=_errors(*statuses) | {200: {"model": model}} | (more or {}),
        )  # fmt: skip

    add("/healthz", routes.alive, "Whether the process answers", schemas.AliveAnswer, 503)
    not_ready = {
        503: {"model": schemas.NotReadyAnswer, "description": "no model is loaded yet, or a file of it was edited"}
    }
    add("/readyz", routes.ready, "Whether a model answers, and which", schemas.ReadyAnswer, more=not_ready)
    add("/version", routes.version, "What answers: hashes, versions, runtime", schemas.VersionAnswer, 401, 503)
    add("/card", routes.card, "The model's card", schemas.CardAnswer, 401, 503)
    text = {"description": "Prometheus' text format", "content": {"text/plain": {"schema": {"type": "string"}}}}
    app.add_api_route(
        "/metrics", routes.metrics, methods=["GET"], summary="Figures for Prometheus", operation_id="metrics",
        response_class=Response, responses=_errors(401) | {200: text},
    )  # fmt: skip
    app.add_api_route(
        "/admin/reload", routes.reload, methods=["POST"], status_code=202, operation_id="reload",
        summary="Look at the registry now; only where an API key is set", response_class=JsonBytes,
        responses=_errors(401, 404) | {202: {"model": schemas.ReloadAnswer}},
    )  # fmt: skip


async def _not_routed(request: Request, error: Exception) -> Response:
    """Starlette's own: no such path, or another method."""
    assert isinstance(error, HTTPException)
    headers = [(name.lower().encode(), value.encode()) for name, value in (error.headers or {}).items()]
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        raise RequestError(
            405, "method", "not a method of this path", where="method", got=request.method, expected=allowed,
            fix="use one of these: header Allow", headers=headers,
        )  # fmt: skip
    raise RequestError(
        error.status_code, "not_found", "no such path", where="path", got=request.scope["path"],
        fix="/openapi.json lists the paths", headers=headers,
    )  # fmt: skip


async def _wrong_parameters(request: Request, error: Exception) -> Response:
    """FastAPI's own: query parameters."""
    assert isinstance(error, RequestValidationError)
    raise wrong_values(error.errors())  # type: ignore[arg-type]
