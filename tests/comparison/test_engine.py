"""The engine with a stand-in for the child: what runs, in which order, what is skipped, what a failure does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from unidec.comparison import engine
from unidec.comparison.plan import load_comparison, select
from unidec.comparison.workspace import Workspace, same_identity

pytestmark = pytest.mark.timeout(120)

# does what a child does to its folder, in milliseconds; told.json says who shall do what else
STAND_IN = """
import json, os, pathlib, signal, sys, time
root = pathlib.Path(os.environ["STAND_IN"])
folder = pathlib.Path(sys.argv[1])
spec = json.loads((folder / "job.json").read_text())
def log(word):
    with open(root / "log", "a") as file:
        file.write(f"{word} {spec['name']}\\n")
log("begin")
told = json.loads((root / "told.json").read_text()) if (root / "told.json").exists() else {}
what = told.get(spec["name"], "")
print("line one")
print("and the last one", flush=True)
if what == "fail":
    (folder / "failure.json").write_text(json.dumps({"what": "x: no such thing", "exit_code": 3}))
    sys.exit(3)
if what == "die":
    os.kill(os.getpid(), signal.SIGKILL)
if what == "wait":
    def stop(number, frame):
        log("stopped")
        sys.exit(143)
    signal.signal(signal.SIGTERM, stop)
    log("waits")
    time.sleep(60)
if what == "slow":
    time.sleep(0.5)
if spec["kind"] == "data":
    (folder / "data/propensity").mkdir(parents=True)
    (folder / "data/propensity/manifest.json").write_text("{}")
elif spec["kind"] == "graph":
    (folder / "data/label_graph").mkdir(parents=True)
    (folder / "data/label_graph/manifest.json").write_text("{}")
else:
    if spec["keep"]:
        (folder / "outputs/model").mkdir(parents=True, exist_ok=True)
        (folder / "outputs/model/manifest.json").write_text("{}")
    result = {"identity": spec["identity"], "threads": os.environ["OMP_NUM_THREADS"], "extra": os.environ.get("EXTRA")}
    (folder / "result.json").write_text(json.dumps(result))
log("end")
"""

FILE = """
name: t
data:
  d: {path: raw}
cells:
  first: {recipe: ngame}
  second: {recipe: ngame-classifier, after: first}
  third: {recipe: depsl, set: {pool.gandalf: true}}
  fourth: {peer: knn}
"""


class Stage:
    """A comparison whose children are stand-ins."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def workspace(self, *only: str, text: str = FILE) -> Workspace:
        (self.root / "c.yaml").write_text(text)
        comparison = load_comparison(self.root / "c.yaml")
        return Workspace.of(comparison, select(comparison, only), self.root / "ws")

    def tell(self, **what: str) -> None:
        (self.root / "told.json").write_text(json.dumps({f"d/{cell}/0": word for cell, word in what.items()}))

    def run(self, workspace: Workspace, **options: object) -> dict[str, engine.Outcome]:
        said: list[str] = []
        outcomes = engine.run_tasks(workspace, say=said.append, **options)  # type: ignore[arg-type]
        self.said = said
        return {outcome.task.key.partition(" (")[0]: outcome for outcome in outcomes}

    def log(self) -> list[str]:
        path = self.root / "log"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return [line.partition(" (")[0] for line in lines]


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "texts").write_text("a text")
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STAND_IN", str(tmp_path))
    monkeypatch.setattr(engine, "COMMAND", (sys.executable, str(tmp_path / "stand_in.py")))
    monkeypatch.setattr(engine, "POLL_S", 0.01)
    return Stage(tmp_path)


def test_everything_runs_once_in_order(stage: Stage) -> None:
    outcomes = stage.run(stage.workspace(), threads=3, environment=lambda task: {"EXTRA": task.key})
    assert {outcome.state for outcome in outcomes.values()} == {"done"}
    log = stage.log()
    assert log[:2] == ["begin data d", "end data d"] and len(log) == 12
    assert log.index("end d/first/0") < log.index("begin d/second/0")
    assert log.index("end label graph d") < log.index("begin d/third/0")
    result = json.loads((stage.root / "ws/cells/d/second/0/result.json").read_text())
    assert (result["threads"], result["extra"]) == ("3", "d/second/0")
    # again: nothing; made is what was made now
    again = stage.run(stage.workspace())
    assert stage.log() == [] and not any(outcome.made for outcome in again.values())
    # a result that is gone is made anew, and nothing else; data is not made for what is done
    (stage.root / "ws/cells/d/third/0/result.json").unlink()
    assert {key for key, outcome in stage.run(stage.workspace()).items() if outcome.made} == {"d/third/0"}


def test_what_changed_is_made_anew_with_all_that_needs_it(stage: Stage) -> None:
    stage.run(stage.workspace())
    stage.log()
    stage.run(stage.workspace(text=FILE.replace("{recipe: ngame}", "{recipe: ngame, set: {pool.beta: 2}}")))
    assert [line for line in stage.log() if line.startswith("begin")] == ["begin d/first/0", "begin d/second/0"]


def test_settings_that_decide_nothing_leave_results_as_they_are(stage: Stage) -> None:
    stage.run(stage.workspace())
    stage.log()
    stage.run(stage.workspace(text=FILE + "common: {run.checkpoint_minutes: 3.0, device: cpu}\n"))
    assert stage.log() == []


def test_new_raw_data_makes_all_anew(stage: Stage) -> None:
    from unidec.comparison import workspace

    stage.run(stage.workspace())
    stage.log()
    (stage.root / "raw" / "texts").write_text("another text")
    workspace.raw_sha256.cache_clear()
    stage.run(stage.workspace())
    assert len([line for line in stage.log() if line.startswith("begin")]) == 6


def test_a_model_that_is_needed_and_gone_is_made_anew(stage: Stage) -> None:
    stage.run(stage.workspace())
    stage.log()
    (stage.root / "ws/cells/d/first/0/outputs/model/manifest.json").unlink()
    stage.run(stage.workspace("second"))
    assert [line for line in stage.log() if line.startswith("begin")] == ["begin d/first/0", "begin d/second/0"]


def test_one_cell_alone(stage: Stage) -> None:
    outcomes = stage.run(stage.workspace("fourth"))
    assert list(outcomes) == ["data d", "d/fourth/0"]
    assert not (stage.root / "ws/cells/d/first").exists()


def test_a_failure_stops_only_what_needs_it(stage: Stage) -> None:
    stage.tell(first="fail", third="die")
    outcomes = stage.run(stage.workspace())
    states = {key: outcome.state for key, outcome in outcomes.items()}
    assert states == {"data d": "done", "label graph d": "done", "d/first/0": "failed", "d/second/0": "not run",
                      "d/third/0": "failed", "d/fourth/0": "done"}  # fmt: skip
    assert outcomes["d/first/0"].reason == "x: no such thing"
    assert "d/first/0" in outcomes["d/second/0"].reason
    assert "SIGKILL (not enough memory?)" in outcomes["d/third/0"].reason
    assert "and the last one" in outcomes["d/third/0"].reason
    assert len(stage.said) == 2 and "log.txt" in stage.said[0]
    assert outcomes["d/third/0"].task.failure() is not None
    # the next attempt does what is missing, and no more
    stage.log()
    stage.tell()
    stage.run(stage.workspace())
    begun = {line for line in stage.log() if line.startswith("begin")}
    assert begun == {"begin d/first/0", "begin d/second/0", "begin d/third/0"}


def test_what_cannot_be_started_is_a_failure_too(stage: Stage) -> None:
    workspace = stage.workspace()
    workspace.tasks["d/first/0"].folder.parent.mkdir(parents=True)
    workspace.tasks["d/first/0"].folder.write_text("no folder")
    states = {key: outcome.state for key, outcome in stage.run(workspace).items()}
    assert (states["d/first/0"], states["d/second/0"], states["d/fourth/0"]) == ("failed", "not run", "done")


def test_so_many_at_once(stage: Stage) -> None:
    stage.tell(first="slow", third="slow", fourth="slow")
    stage.run(stage.workspace(), at_once=2)
    running = most = 0
    for line in stage.log():
        running += {"begin": 1, "end": -1}[line.split()[0]]
        most = max(most, running)
    assert most == 2


def test_a_signal_ends_the_children_in_order(stage: Stage) -> None:
    """In a process of its own: signals are the whole program's."""
    stage.tell(first="wait")
    stage.workspace("first")
    code = (
        "import sys; from pathlib import Path\n"
        "from unidec.comparison import engine; from unidec.errors import Stopped\n"
        "from unidec.comparison.plan import load_comparison\n"
        "from unidec.comparison.workspace import Workspace\n"
        "engine.COMMAND = (sys.executable, 'stand_in.py')\n"
        "comparison = load_comparison('c.yaml')\n"
        "try:\n    engine.run_tasks(Workspace.of(comparison, comparison.jobs, Path('ws')))\n"
        "except Stopped as stopped:\n    print(stopped)\n    sys.exit(stopped.exit_code)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    while "waits d/first/0" not in (stage.root / "log").read_text() if (stage.root / "log").exists() else True:
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 143 and "goes on where it stopped" in said
    assert "stopped d/first/0" in stage.log()


def test_what_a_task_is_at(stage: Stage) -> None:
    task = stage.workspace("fourth").tasks["d/fourth/0"]
    assert engine.doing(task) == ""
    task.folder.mkdir(parents=True)
    (task.folder / "log.txt").write_text("x" * 900 + "\nepochs 1 to 2: 5/8\n\n")
    assert engine.doing(task) == " [epochs 1 to 2: 5/8]"
    (task.folder / "log.txt").write_bytes(b"\xc3" * 900)
    assert len(engine.doing(task)) == 83


def test_identities_are_compared_key_by_key() -> None:
    old = {"seed": "0", "code": '"a"', "needs": '"n"'}
    assert same_identity(old, dict(old))
    assert not same_identity(old, old | {"code": '"b"'}) and same_identity(old, old | {"code": '"b"'}, ("code",))
    assert same_identity(old, old | {"code": '"b"', "needs": '"m"'}, ("code",))  # what it needs has other code too
    assert not same_identity(old, old | {"seed": "1"}, ("code",))
    later = old | {"encoder.bag_words": "0"}  # a parameter that the code of then did not know, at its default
    assert not same_identity(old, later) and same_identity(old, later, ("code",))
    assert not same_identity(old, old | {"encoder.bag_words": "9"}, ("code",))
    assert not same_identity(old, old | {"pool.beta": "1"}) and not same_identity({}, old)


def test_the_environment_of_a_child(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    stage.run(stage.workspace("fourth"), at_once=2)
    assert json.loads((stage.root / "ws/cells/d/fourth/0/result.json").read_text())["threads"] == "4"
