"""A step of a flow as a Prefect task: paths, hashes and small dictionaries in and out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from prefect import task
from prefect.cache_policies import NO_CACHE

from unidec.errors import UnidecError

RETRY_SECONDS = [2, 10, 30]

T = TypeVar("T")


def worth_retrying(_task: Any, _task_run: Any, state: Any) -> bool:
    """An error that names its fix stays one however often it is tried; a lock, a network or a server may recover."""
    return not isinstance(state.result(raise_on_failure=False), UnidecError)


def run(name: str, work: Callable[..., T], *arguments: Any, retry: bool = False, **named: Any) -> T:
    """Calls `work(*arguments, **named)` as a task of this name; with `retry` again where that may help."""
    # DVC and our checkpoints decide what is done already: a result cache on top of them could only disagree
    options: dict[str, Any] = {"name": name, "task_run_name": name, "cache_policy": NO_CACHE, "persist_result": False}
    if retry:
        options |= {"retries": len(RETRY_SECONDS), "retry_delay_seconds": RETRY_SECONDS}
        options |= {"retry_condition_fn": worth_retrying}
    return task(work, **options)(*arguments, **named)
