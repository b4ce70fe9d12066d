"""The comparison's flow with a stand-in for the cells: what runs in which order, what is skipped or
fails.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml
from prefect.cache_policies import NO_CACHE

from unidec.comparison import cell
from unidec.comparison.tune import Subject
from unidec.comparison.workspace import Comparison, load_comparison, select
from unidec.errors import TrainingError, UnidecError

pytestmark = pytest.mark.timeout(300)

# does what a cell does to its folder, in milliseconds; told.json holds who shall do something else
STAND_IN = """
import json, os, pathlib, signal, sys, time
root = pathlib.Path(os.environ["STAND_IN"])
folder = pathlib.Path(sys.argv[1])
spec = json.loads((folder / "cell.json").read_text())
def log(word):
    with open(root / "log", "a") as file:
        file.write(f"{word} {spec['name']}\\n")
log("begin")
told = json.loads((root / "told.json").read_text()) if (root / "told.json").exists() else {}
what = told.get(spec["name"], "")
print("and the last line", flush=True)
if what == "fail":
    (folder / "failure.json").write_text(json.dumps({"what": "x: no such thing"}))
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
    (folder / "result.json").write_text(json.dumps({"code": spec["code"]}))
else:
    if spec["keep"]:
        (folder / "outputs/model").mkdir(parents=True, exist_ok=True)
        (folder / "outputs/model/manifest.json").write_text("{}")
    tags = json.loads(os.environ["UNIDEC_RUN_TAGS"])
    result = {"code": spec["code"], "threads": os.environ["OMP_NUM_THREADS"], "tags": tags}
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
  third: {recipe: depsl}
  fourth: {peer: knn}
"""


class Stage:
    """A comparison whose cells are stand-ins."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def comparison(self, text: str = FILE) -> Comparison:
        (self.root / "c.yaml").write_text(text)
        return load_comparison(self.root / "c.yaml", folder=self.root / "ws")

    def tell(self, **what: str) -> None:
        (self.root / "told.json").write_text(
            json.dumps({f"d/{cell}/0": word for cell, word in what.items()})
        )

    def run(self, *only: str, text: str = FILE, jobs: int = 1) -> dict[str, tuple[str, str]]:
        """(state, reason) of each step."""
        from prefect import flow

        from flows.compare import run_steps

        steps = select(self.comparison(text), only)
        outcomes = flow(run_steps, name="test", validate_parameters=False)(
            steps, jobs, {"comparison": "t"}
        )
        parts = {
            name.partition(" (")[0]: (reason or "done").partition(": ")
            for name, reason in outcomes.items()
        }
        return {name: (state, reason) for name, (state, _, reason) in parts.items()}

    def result(self, name: str) -> dict[str, object]:
        return self.comparison().steps[name].result() or {}

    def log(self, word: str = "") -> list[str]:
        """The lines of the stand-ins since the last call; those with this word."""
        path = self.root / "log"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return [line.partition(" (")[0] for line in lines if line.startswith(word)]


@pytest.fixture
def stage(prefect_server: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "texts").write_text("a text")
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STAND_IN", str(tmp_path))
    monkeypatch.setattr(cell, "COMMAND", (sys.executable, str(tmp_path / "stand_in.py")))
    return Stage(tmp_path)


def test_every_cell_runs_once_in_order_and_again_only_what_is_missing(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flows.compare.num_threads", lambda: 8)
    assert {state for state, _ in stage.run(jobs=2).values()} == {"done"}
    log = stage.log()
    assert log[:2] == ["begin data d", "end data d"]
    assert len(log) == 10
    assert log.index("end d/first/0") < log.index("begin d/second/0")
    result = stage.result("d/second/0")
    assert result["threads"] == "4"
    assert {"comparison": "t", "mlflow.runName": "d/second/0"}.items() <= result["tags"].items()
    assert {state for state, _ in stage.run().values()} == {"done"}
    assert stage.log() == []
    # a result that is gone is made again, and nothing else
    steps = stage.comparison().steps
    (steps["d/third/0"].folder / "result.json").unlink()
    # other inputs: the cell and what starts from it
    text = FILE.replace("{recipe: ngame}", "{recipe: ngame, set: {pool.beta: 2}}")
    stage.run(text=text)
    begun = stage.log("begin")
    assert sorted(begun) == ["begin d/first/0", "begin d/second/0", "begin d/third/0"]
    assert begun.index("begin d/first/0") < begun.index("begin d/second/0")
    stage.run()  # back to the first inputs: their results are still there
    assert stage.log() == []
    # a model that others need and that is gone
    (steps["d/first/0"].folder / "outputs/model/manifest.json").unlink()
    stage.run("second")
    assert stage.log("begin") == ["begin d/first/0"]


def test_one_cell_alone(stage: Stage) -> None:
    assert list(stage.run("fourth")) == ["data d", "d/fourth/0"]
    assert not (stage.root / "ws/cells/d/first").exists()


def test_a_failure_stops_only_what_needs_it(stage: Stage) -> None:
    stage.tell(first="fail", third="die")
    outcomes = stage.run()
    states = {name: state for name, (state, _) in outcomes.items()}
    assert states == {
        "data d": "done",
        "d/first/0": "failed",
        "d/second/0": "not run",
        "d/third/0": "failed",
        "d/fourth/0": "done",
    }
    assert "x: no such thing" in outcomes["d/first/0"][1]
    assert "log.txt" in outcomes["d/first/0"][1]
    assert "d/first/0" in outcomes["d/second/0"][1]
    assert "SIGKILL (not enough memory?)" in outcomes["d/third/0"][1]
    assert "and the last line" in outcomes["d/third/0"][1]
    steps = stage.comparison().steps
    assert "SIGKILL" in steps["d/third/0"].failure()
    # the next attempt does what is missing, and no more; what cannot be started is a failure too
    stage.log()
    stage.tell()
    folder = steps["d/second/0"].folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.write_text("no folder")
    assert stage.run()["d/second/0"][0] == "failed"
    assert set(stage.log("begin")) == {"begin d/first/0", "begin d/third/0"}


def test_so_many_at_once(stage: Stage) -> None:
    stage.tell(first="slow", third="slow", fourth="slow")
    stage.run(jobs=2)
    running = most = 0
    for line in stage.log():
        running += {"begin": 1, "end": -1}[line.split()[0]]
        most = max(most, running)
    assert most == 2


def test_a_signal_ends_the_cells_in_order(
    stage: Stage, prefect_api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own, as on the command line."""
    monkeypatch.setenv("PREFECT_API_URL", prefect_api)
    stage.tell(first="wait")
    stage.comparison()
    code = (
        "import sys\nfrom unidec.comparison import cell\ncell.COMMAND = (sys.executable, "
        "'stand_in.py')\n"
        "from flows.command import main\nsys.exit(main('compare', ['c.yaml', '--folder=ws', "
        "'--only=first']))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 120
    while (
        not (stage.root / "log").exists()
        or "waits d/first/0" not in (stage.root / "log").read_text()
    ):
        assert time.monotonic() < end, process.communicate()
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, printed = process.communicate(timeout=60)
    assert (
        process.returncode == 143
        and "run again to resume" in printed
        and "Traceback" not in printed
    )
    assert "stopped d/first/0" in stage.log()


TUNED = """
name: t
data:
  d: {path: raw}
tuning: {data: d, file: chosen.yaml, trials: 2, ranges: {lr: {low: 0.5, high: 4}}}
cells:
  first: {recipe: ngame}
  second: {recipe: depsl}
"""


def test_if_all_searches_fail_each_is_named_with_its_reason(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect import task

    from flows import compare

    def fails(subject: Subject, trials: int, stopping: threading.Event) -> None:
        raise TrainingError("all trials failed", where=subject.name, got=trials)

    search = task(fails, name="search", persist_result=False, cache_policy=NO_CACHE)
    monkeypatch.setattr(compare, "search", search)
    (stage.root / "c.yaml").write_text(TUNED)
    with pytest.raises(UnidecError) as caught:
        compare.compare("c.yaml", folder="ws", tune=True)
    lines = str(caught.value).splitlines()
    assert lines[0] == "2 of 2 searches have no result"
    assert lines[-1] == "chosen: chosen.yaml"
    for cell_name in ("first", "second"):
        assert f"d/{cell_name}/0: t {cell_name}: all trials failed" in lines
    assert caught.value.exit_code == 1
    assert not yaml.safe_load((stage.root / "chosen.yaml").read_text())
