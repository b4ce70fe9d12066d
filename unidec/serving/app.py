"""The application of `unidec serve`: its routes, their OpenAPI, and the checks before them."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response, Security
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.routing import Route

from unidec.config import Serve
from unidec.serving import schemas
from unidec.serving.engine import Service
from unidec.serving.middleware import Guard
from unidec.serving.page import PAGE_PATHS, page_routes
from unidec.serving.request_error import RequestError, wrong_values
from unidec.serving.routes import JsonBytes, Routes
from unidec.version import __version__

_ABOUT = (
    "Labels for texts. Every error is JSON with what, where, got, expected and fix. 503 has a "
    "header Retry-After."
)

# FastAPI's OpenTelemetry could be switched on by an environment variable meant for another program
_NO_TELEMETRY: Any = {"tracing": False, "metrics": False, "logs": False}

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": schemas.ErrorAnswer, "description": about}
    for status, about in {
        400: "broken JSON",
        401: "the API key is missing or wrong",
        404: "not found",
        408: "the body arrived too slowly",
        413: "the body is too large",
        415: "the Content-Type is not JSON",
        422: "wrong values",
        503: "overloaded, not ready, or timed out: retry after Retry-After seconds",
    }.items()
}
_NOT_READY: Any = {
    503: {"model": schemas.Facts, "description": "no model is loaded, or its files were edited"}
}
_FULL: Any = {
    507: {"model": schemas.ErrorAnswer, "description": "the file is full, or cannot be written"}
}


def create_app(
    service: Service,
    settings: Serve,
    api_key: str | None = None,
    hosts: frozenset[str] | None = None,
) -> FastAPI:
    """The server's application; its batcher lives as long as the lifespan.

    Args:
        service: its current engine answers requests; there may be none yet.
        api_key: required on all routes except the page and the health routes; None: on none.
        hosts: names that the Host header may hold, besides IP addresses and localhost; None: any.
    """
    routes = Routes(service, settings, api_key)
    app = FastAPI(
        title="unidec",
        version=__version__,
        description=_ABOUT,
        docs_url=None,
        redoc_url=None,
        lifespan=routes.lifespan,
        redirect_slashes=False,
        telemetry=_NO_TELEMETRY,
        generate_unique_id_function=lambda route: route.name,
        responses=_ERRORS,
    )
    _add_routes(app, routes)
    # the hot path without FastAPI's dependencies (80 of 200 us per request); FastAPI's own route
    # documents it
    every_route = app.router.routes
    every_route.insert(0, Route("/predict", routes.predict, methods=["POST"]))
    every_route.extend(page_routes())
    paths = {getattr(route, "path", "") for route in every_route}
    free = frozenset({"/healthz", "/readyz"}) | PAGE_PATHS
    app.add_middleware(
        Guard,
        settings=settings,
        metrics=service.metrics,
        api_key=api_key,
        free=free,
        routes=frozenset(paths),
        hosts=hosts,
    )
    app.add_exception_handler(HTTPException, _not_routed)
    app.add_exception_handler(RequestValidationError, _wrong_parameters)
    return app


def _add_routes(app: FastAPI, routes: Routes) -> None:
    # in the OpenAPI only: the middleware checks the key
    bearer = HTTPBearer(scheme_name="key", auto_error=False)
    key = [Security(bearer)] if routes.has_key else []

    add = partial(
        app.add_api_route,
        response_class=JsonBytes,
        response_model=schemas.Facts,
        dependencies=key,
    )
    models = routes.models
    add(
        "/predict",
        routes.predict,
        summary="The best labels of each query",
        response_model=schemas.PredictAnswer,
        **_post(models.predict, schemas.PREDICT_EXAMPLE),
    )
    add(
        "/explain",
        routes.explain,
        summary="The labels of one query, and where their scores come from",
        **_post(models.explain, schemas.EXPLAIN_EXAMPLE),
    )
    if routes.settings.feedback:
        add(
            "/feedback",
            routes.feedback,
            summary="Mark a label as relevant or not for a query",
            responses=_FULL,
            **_post(models.feedback, schemas.FEEDBACK_EXAMPLE),
        )
    add("/labels", routes.labels, summary="Search labels by prefix")
    add("/labels/{uid:path}", routes.label, summary="A label")
    add(
        "/healthz",
        routes.healthz,
        summary="Liveness: whether the process answers",
        dependencies=[],
    )
    add(
        "/readyz",
        routes.readyz,
        summary="Readiness: whether a model is loaded, and which",
        dependencies=[],
        responses=_NOT_READY,
    )
    add("/version", routes.version, summary="Hashes, versions and runtime of the model")
    add("/card", routes.card, summary="The model's card")
    add(
        "/metrics",
        routes.metrics,
        summary="Metrics for Prometheus",
        response_class=PlainTextResponse,
        response_model=None,
    )


def _post(model: Any, example: dict[str, Any]) -> dict[str, Any]:
    """Options of a route that parses the body itself, so that FastAPI only documents it."""
    schema = model.model_json_schema() | {"examples": [example]}
    content = {"application/json": {"schema": schema, "example": example}}
    body = {"required": True, "content": content}
    return {"methods": ["POST"], "openapi_extra": {"requestBody": body}}


async def _not_routed(request: Request, error: Exception) -> Response:
    """Convert Starlette's errors: unknown path, or wrong method."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allowed = (error.headers or {})["Allow"]
        raise RequestError(
            405,
            "method",
            "method not allowed",
            where="method",
            got=request.method,
            expected=allowed,
            fix="use a method of the header Allow",
            headers={"allow": allowed},
        )
    raise RequestError(
        error.status_code,
        "not_found",
        "no such path",
        where="path",
        got=request.scope["path"],
        fix="GET /openapi.json lists the paths",
    )


async def _wrong_parameters(request: Request, error: Exception) -> Response:
    """Convert FastAPI's errors: invalid query parameters."""
    assert isinstance(error, RequestValidationError)
    raise wrong_values(error.errors())
