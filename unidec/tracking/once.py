"""Creates objects on a server whose replies may get lost: a request is sent once, and the object is
looked up before the request is repeated.

MLflow itself repeats every request whose reply is lost. A server that has already acted would then
create duplicates."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from unidec.surroundings import environment

T = TypeVar("T")

_ATTEMPTS = 5
_PAUSE_S = 0.2  # doubled after each attempt: the server may still be at work
# MLflow's codes for a server that does not answer, or not now; all others are about the request
UNCLEAR = (
    "INTERNAL_ERROR",
    "DEADLINE_EXCEEDED",
    "TEMPORARILY_UNAVAILABLE",
    "REQUEST_LIMIT_EXCEEDED",
)


def create_once(find: Callable[[], T | None], create: Callable[[], T]) -> T:
    """Return the object that `find` finds; if it finds none, create it with `create`.

    Raises:
        MlflowException: the server refuses, or repeatedly does not answer.
    """
    from mlflow.exceptions import MlflowException

    for attempt in range(_ATTEMPTS):
        found = find()
        if found is not None:
            return found
        try:
            with environment("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0"):
                return create()
        except (MlflowException, OSError) as error:
            is_unclear = getattr(error, "error_code", UNCLEAR[0]) in UNCLEAR
            if not is_unclear or attempt == _ATTEMPTS - 1:
                raise
        time.sleep(_PAUSE_S * 2**attempt)
    raise AssertionError("the last attempt returns or raises")
