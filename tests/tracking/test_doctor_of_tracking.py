"""Runs that never ended, figures never sent, models that lost their files, environments that do not fit together."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from unidec.tracking import doctor
from unidec.tracking.doctor import Finding, environment_findings, tracking_findings
from unidec.tracking.lock_holder import this_process
from unidec.tracking.run import Tracker
from unidec.tracking.store import open_client, prepare_store


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> str:
    return prepare_store(f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db")


@pytest.fixture
def uri(made: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store of its own for each test."""
    (tmp_path / "mlflow.db").write_bytes(Path(made.removeprefix("sqlite:///")).read_bytes())
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    return f"sqlite:///{tmp_path}/mlflow.db"


def begin(uri: str, run_dir: Path) -> Tracker:
    tracker = Tracker("doctor", uri=uri)
    tracker.start(run_dir, {"seed": 0}, {"run.folder": run_dir.name})
    return tracker


def killed(uri: str, run_dir: Path) -> str:
    """A run whose process was killed without a word; its id."""
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom unidec.tracking.run import Tracker\n"
        "tracker = Tracker('doctor', uri=sys.argv[1])\n"
        "tracker.start(Path(sys.argv[2]), {'seed': 0}, {'run.folder': Path(sys.argv[2]).name})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, uri, str(run_dir)], timeout=120)
    assert done.returncode == -9
    return json.loads((run_dir / "tracking.json").read_text())["run_id"]


def found(*run_dirs: Path, at_work: bool = False) -> list[Finding]:
    return list(tracking_findings(run_dirs, at_work=at_work))


def test_no_store_and_no_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/none/mlflow.db")
    assert found() == [] and not (tmp_path / "none").exists()


def test_a_run_left_running_is_closed_as_killed(uri: str, tmp_path: Path) -> None:
    run_id, at_work = killed(uri, tmp_path / "a"), begin(uri, tmp_path / "b")
    (one,) = found(tmp_path / "a", tmp_path / "b")
    assert one.severity == "warning" and run_id in one.what and one.where == str(tmp_path / "a") and one.mend
    assert open_client(uri).get_run(run_id).info.status == "RUNNING"  # looking changed nothing
    assert one.mend() == "closed as KILLED"
    assert open_client(uri).get_run(run_id).info.status == "KILLED"
    assert found(tmp_path / "a", tmp_path / "b") == []
    assert open_client(uri).get_run(at_work.run_id).info.status == "RUNNING"


def test_a_run_of_an_older_version_names_no_process(uri: str, tmp_path: Path) -> None:
    begin(uri, tmp_path / "a")
    state = json.loads((tmp_path / "a" / "tracking.json").read_text())
    del state["holder"]
    (tmp_path / "a" / "tracking.json").write_text(json.dumps(state))
    assert found(tmp_path / "a", at_work=True) == []  # it may be the one that is at work
    (one,) = found(tmp_path / "a")
    assert one.mend is not None and one.mend()
    assert found(tmp_path / "a") == []


def test_figures_that_wait_are_sent(uri: str, tmp_path: Path) -> None:
    tracker = begin(uri, tmp_path / "a")
    tracker.finish()
    (tmp_path / "a" / "pending-metrics.jsonl").write_text('["loss", 0.5, 7, 1]\n["loss", 0.4, 8, 1]\n')
    (one,) = found(tmp_path / "a")
    assert one.what.startswith("2 figures") and one.mend is not None and one.mend() == "sent"
    assert [p.step for p in open_client(uri).get_metric_history(tracker.run_id, "loss")] == [7, 8]
    assert open_client(uri).get_run(tracker.run_id).info.status == "FINISHED" and found(tmp_path / "a") == []


def test_figures_of_a_training_at_work_are_its_own_matter(uri: str, tmp_path: Path) -> None:
    begin(uri, tmp_path / "a")
    (tmp_path / "a" / "pending-metrics.jsonl").write_text('["loss", 0.5, 7, 1]\n')
    (one,) = found(tmp_path / "a")
    assert one.mend is None


def test_a_running_run_whose_folder_is_gone(uri: str, tmp_path: Path) -> None:
    run_id = begin(uri, tmp_path / "gone").run_id
    (one,) = found()
    assert run_id is not None and run_id in one.what and one.where == "runs/gone" and one.mend is None
    assert found(tmp_path / "gone") == []


def test_a_damaged_note(uri: str, tmp_path: Path) -> None:
    begin(uri, tmp_path / "a").finish()
    (tmp_path / "a" / "tracking.json").write_text("{")
    (one,) = found(tmp_path / "a")
    assert "damaged" in one.what and one.mend is None


def test_a_store_that_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")

    def away(_uri: str) -> None:
        raise ConnectionError("refused")

    monkeypatch.setattr(doctor, "open_client", away)
    (one,) = found()
    assert one.severity == "warning" and "refused" in one.what


def test_a_version_without_its_files(uri: str, tmp_path: Path) -> None:
    client = open_client(uri)
    client.create_registered_model("m")
    files = tmp_path / "files"
    files.mkdir()
    (files / "MLmodel").write_text("x")
    version = client.create_model_version("m", files.as_uri())
    assert found() == []
    (files / "MLmodel").unlink()
    (one,) = found()
    assert (one.severity, one.where, one.mend) == ("warning", str(files), None)
    client.set_registered_model_alias("m", "champion", version.version)
    (one,) = found()
    assert one.severity == "broken" and "champion" in one.what


# -- environment ---------------------------------------------------------------------------------------------------


class Package:
    def __init__(self, name: str, version: str) -> None:
        self.metadata, self.version = {"Name": name}, version


@pytest.fixture
def fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Package]:
    """An environment without fault: `fit` is the list of its packages."""
    (tmp_path / "constraints.txt").write_text("# head\nfastapi==0.150.0\nnumpy==2.4.6\ntorch==2.13.0\nabsent==1\n")
    packages = [Package("FastAPI", "0.150.0"), Package("numpy", "2.4.6"), Package("torch", "2.13.0+cpu")]
    monkeypatch.setattr(doctor.metadata, "distributions", lambda: packages)
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    for name, value in doctor._QUIET.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("resource.getrlimit", lambda _: (4096, 4096))
    return packages


def test_an_environment_that_fits(fit: list[Package], tmp_path: Path) -> None:
    assert list(environment_findings(tmp_path)) == [] and list(environment_findings(tmp_path / "none")) == []


def test_what_does_not_fit(fit: list[Package], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit += [Package("faiss-cpu", "1"), Package("faiss-gpu", "1")]
    fit[0].version, fit[1].version = "0.165.0", "2.5.5"
    monkeypatch.setenv("DO_NOT_TRACK", "1")  # MLflow takes only "true"
    monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.setattr("resource.getrlimit", lambda _: (256, -1))
    found = {finding.where: finding for finding in environment_findings(tmp_path)}
    assert found["faiss"].severity == "broken"
    assert found["fastapi"].severity == "warning" and "fastapi==0.150.0" in found["fastapi"].fix
    assert found["constraints.txt"].severity == "note" and "numpy 2.5.5" in found["constraints.txt"].fix
    assert "DO_NOT_TRACK=true" in found["DO_NOT_TRACK"].fix and "OMP_WAIT_POLICY" in found
    assert found["ulimit -n"].fix == "ulimit -n 4096" and len(found) == 6


def test_this_process_holds_what_it_began(uri: str, tmp_path: Path) -> None:
    begin(uri, tmp_path / "a")
    assert json.loads((tmp_path / "a" / "tracking.json").read_text())["holder"] == this_process()
