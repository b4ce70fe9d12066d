"""One project with Prefect server and worker that the end-to-end tests share: starting them costs
more than most tests.

A test that needs a champion asks for `ready()`: then it runs alone too, after a training more.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from helpers.prefect_server import PrefectServer
from helpers.team_project import TeamProject, fewer_queries, small_data, without_labels

TRAIN = "unidec/train"
REFRESH = "unidec-refresh/refresh"
MONITOR = "unidec-monitor/monitor"

# a serving process: the model that an alias names, loaded again, and its answers to the last digit
ANSWERS = """
import json, sys, mlflow, pandas as pd
mlflow.set_tracking_uri("sqlite:///mlflow/mlflow.db")
model = mlflow.pyfunc.load_model(f"models:/unidec@{sys.argv[1]}")
found = model.predict(pd.DataFrame({"query": json.load(open(sys.argv[2]))}), params={"k": 10})
found.to_csv(sys.argv[3], index=False, float_format="%.17g")
"""


class OperatedProject:
    """A project (`.project`), its Prefect (`.server`), and the versions of data that its source may
    hold.

    Attributes:
        first: 600 training queries, without the labels that come later.
        second: 800 training queries, and `LATER` labels more.
        third: second with `FRESH` more labels, which no training query has.
    """

    LATER = 100
    FRESH = 30

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.project = TeamProject(folder)
        self.server = PrefectServer(self.project.root, folder / "prefect")
        raw = small_data()
        trained = np.flatnonzero(np.diff(raw.relevance["train"].tocsc().indptr) > 0)
        chosen = np.random.default_rng(0).choice(trained, self.LATER, replace=False)
        rare = np.setdiff1d(
            np.flatnonzero(np.diff(raw.relevance["test"].tocsc().indptr) == 1), trained
        )
        fresh = rare[: self.FRESH]
        self.third = raw
        self.second = without_labels(raw, fresh)
        self.first = fewer_queries(without_labels(raw, np.union1d(chosen, fresh)), 600)
        self.fresh = [str(uid) for uid in raw.labels["uid"].take(fresh).to_pylist()]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.server.stop()

    # -- states
    # --------------------------------------------------------------------------------------

    def up(self) -> Self:
        """Server, deployments and a worker, as docs/retraining.md starts them; what is there
        already stays.
        """
        if self.server.server is None:
            begun = (self.server.home / "server.log").exists()
            self.server.start()
            if not begun:
                self.server.deploy()
                self.server.command("automation", "create", "--from-file", "flows/automations.yaml")
        if not self.server.workers:
            self.server.start_worker()
        if not self.project.source.exists():
            self.project.export(self.first)
        return self

    def ready(self) -> Self:
        """The same, with a champion that was trained on the data that the source holds now, and
        nothing to do.
        """
        self.up()
        if "champion" not in self.project.aliases():
            self.server.completed(self.server.run(TRAIN), 600)
        assert "champion" in self.project.aliases()
        return self

    def change(self, **sections: dict[str, Any]) -> None:
        """Other parameters, committed as a person does."""
        self.project.params(**sections)
        self.project.commit("Other parameters")

    # -- requests to it
    # --------------------------------------------------------------------------------------

    def schedule_once(self, seconds: float = 5, count: int = 1, every: int = 3) -> None:
        """Has the scheduler make `count` runs of the training, from some seconds on,
        and no more.
        """
        start = (datetime.now(UTC) + timedelta(seconds=seconds)).strftime("%Y%m%dT%H%M%SZ")
        rule = f"DTSTART:{start}\nRRULE:FREQ=SECONDLY;INTERVAL={every};COUNT={count}"
        body = [{"schedule": {"rrule": rule, "timezone": "UTC"}, "active": True}]
        self.server.ask(f"deployments/{self.server.deployment(TRAIN)['id']}/schedules", body)

    def answers(self, alias: str, num_queries: int = 100) -> bytes:
        """The top 10 of test queries by the model that an alias names, asked in a fresh process."""
        texts = self.third.queries["test"]["title"].to_pylist()[:num_queries]
        asked = self.folder / "asked.json"
        answered = self.folder / "answered.csv"
        asked.write_text(json.dumps(texts))
        self.project.run(sys.executable, "-c", ANSWERS, alias, str(asked), str(answered))
        return answered.read_bytes()

    def named_state(self, run: str) -> str:
        return self.server.flow_run(run)["state"]["name"]

    def until_task(self, run: str, name: str, seconds: float = 300) -> None:
        """Waits until a run has completed a task; fails when the run ends before."""

        def done() -> bool:
            state = self.server.flow_run(run)["state"]
            assert state["type"] in ("SCHEDULED", "PENDING", "RUNNING"), (
                f"{state}\n{self.server.log_of(run)}"
            )
            return self.server.tasks(run).get(name) == "COMPLETED"

        self.server.wait(done, f"task {name!r}", seconds, every=0.2)

    def nothing_runs(self, seconds: float = 30) -> None:
        """Waits until no flow run and no child of one is left."""
        end = time.monotonic() + seconds
        while self.server.flow_processes():
            assert time.monotonic() < end, self.server.flow_processes()
            time.sleep(0.3)
