"""A process that lives on while its children, forked with everything imported, are killed on their
way.

    # a JSON object a line; prints `pid N`, then `gone CODE` (negative: the signal)
    python killed_child.py < jobs

A job: {"call": "promote" | "rollback" | "register", "uri", "name", "version" or "bundle", "writes":
n}: the child is killed before its n-th write to the registry; without "writes" by whoever started
it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from typing import Any

warnings.simplefilter("ignore")

import mlflow.pyfunc  # noqa: E402
import mlflow.store.model_registry.sqlalchemy_store  # noqa: E402
import mlflow.store.tracking.sqlalchemy_store  # noqa: E402
from mlflow import MlflowClient  # noqa: E402

from unidec.tracking import promotion, registry  # noqa: E402

WRITES = (
    "create_registered_model",
    "create_model_version",
    "set_registered_model_tag",
    "set_registered_model_alias",
    "set_model_version_tag",
    "delete_model_version_tag",
    "delete_registered_model_tag",
    "delete_registered_model_alias",
)


def kill_before(writes: int) -> None:
    left = [writes]

    def counted(method: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return method(*args, **options)

        return call

    for name in WRITES:
        setattr(MlflowClient, name, counted(getattr(MlflowClient, name)))


def live(job: dict[str, Any]) -> None:
    if "writes" in job:
        kill_before(job["writes"])
    os.environ["MLFLOW_TRACKING_URI"] = job["uri"]
    if job["call"] == "register":
        registry.register(job["bundle"], None, job["name"])
    elif job["call"] == "promote":
        promotion.promote(job["name"], job["version"])
    else:
        promotion.rollback(job["name"])


def main() -> None:
    assert mlflow.store is not None  # imported once, for all children
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            live(json.loads(line))
            os._exit(0)
        print("pid", child, flush=True)
        print("gone", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
