"""What was measured before: the champion's and the last run's figures of the test split, for the
report.
"""

from __future__ import annotations

import json

import pytest
from helpers.ports import free_port

from unidec.tracking.fetch import measured_before
from unidec.tracking.run import Tracker
from unidec.tracking.store import VIEW, open_client, prepare_store

SHA = "a" * 64


def test_the_champion_and_the_last_run_are_found_and_other_data_is_told(tmp_path, monkeypatch):
    uri = prepare_store(f"sqlite:///{tmp_path}/mlflow/mlflow.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)

    def measured(name: str, figure: float | None, digest: str = SHA) -> Tracker:
        tracker = Tracker("tests")
        tracker.start(
            tmp_path / name, {}, dataset={"name": "tiny", "digest": digest}, run_name=name
        )
        tracker.log_final(
            {} if figure is None else {"test/nDCG@5": figure, "test/tail/R@10": 7.0, "de/P@1": 1.0}
        )
        return tracker

    first = measured("first", 40.0)
    other = measured("other", 41.0, "b" * 64)
    measured("not measured", None)
    mine = measured("mine", 42.0)
    assert measured_before(mine, "m", SHA) == {"the last run (other)": {}}
    client = open_client(uri)
    client.create_registered_model("m")
    client.create_model_version("m", "file:///nowhere", run_id=first.run_id)
    client.set_registered_model_alias("m", "champion", "1")
    known = {"nDCG@5": 40.0, "tail/R@10": 7.0}
    assert measured_before(mine, "m", SHA) == {
        "the champion (version 1)": known,
        "the last run (other)": {},
    }
    assert measured_before(other, "m", "b" * 64) == {
        "the champion (version 1)": {},
        "the last run (mine)": {},
    }
    # itself the champion
    assert measured_before(first, "m", SHA)["the last run (mine)"]["nDCG@5"] == 42.0
    assert mine.run_name == "mine"
    view = client.get_experiment_by_name("tests").tags[f"mlflow.sharedViewState.{VIEW}"]
    assert "metrics.`test/PSP_at_5`" in json.loads(view)["selectedColumns"]
    assert measured_before(Tracker.resume(tmp_path / "nothing"), "m", SHA) == {}

    # a mistake in the code is seen
    monkeypatch.setattr("unidec.tracking.fetch.version_of", lambda *_: {}["no such key"])
    with pytest.raises(KeyError):
        measured_before(mine, "m", SHA)


@pytest.mark.parametrize(
    "away", ["no answer", "a folder", "another database", "a store without this run"]
)
def test_a_store_that_cannot_be_read_fails_no_report(tmp_path, monkeypatch, away):
    uri = prepare_store(f"sqlite:///{tmp_path}/mlflow/mlflow.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setattr("mlflow.store.db.utils.MAX_RETRY_COUNT", 1)  # else it tries for a minute
    tracker = Tracker("tests")
    assert tracker.start(tmp_path / "run", {})
    if away == "no answer":
        tracker.uri = f"http://127.0.0.1:{free_port()}"
        # it did a moment ago
        monkeypatch.setattr("unidec.tracking.store.answers", lambda _uri: True)
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    else:
        place = tmp_path / "other" / "mlflow.db"
        place.parent.mkdir()
        tracker.uri = f"sqlite:///{place}"
        if away == "a folder":
            place.mkdir()
        elif away == "another database":
            place.write_bytes(b"not a database" * 100)
    assert measured_before(tracker, "m", SHA) == {}
