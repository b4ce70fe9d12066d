"""What a command imports before it does its work: start-up time, asserted without a clock."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.served_bundle import make_served_bundle

ROOT = Path(__file__).resolve().parents[2]
HEAVY = (
    "torch",
    "transformers",
    "mlflow",
    "prefect",
    "great_expectations",
    "pandas",
    "matplotlib",
    "scipy.stats",
    "faiss",
)


def imported(code: str) -> set[str]:
    """The heavy modules that a fresh process has imported after running some code."""
    code += f"\nimport sys\nprint(*(name for name in {HEAVY} if name in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(done.stdout.splitlines()[-1].split())


def test_the_command_line_imports_nothing_heavy():
    assert imported("import unidec.cli") == set()


def test_a_comparison_is_read_without_prefect():
    code = (
        "from unidec.comparison.workspace import load_comparison\n"
        "load_comparison('comparison/small.yaml')"
    )
    assert imported(code) == set()


def test_stages_around_training_require_no_torch():
    names = ("ingest", "validate", "tokens", "propensity", "label_graph", "register", "needs_gate")
    assert (
        imported(f"from unidec import pipeline\nfor name in {names}: getattr(pipeline, name)")
        == set()
    )


def test_a_flow_that_trains_nothing_requires_no_torch():
    assert imported("import flows.train") == {"prefect"}


def test_every_stage_is_found():
    code = (
        "from unidec import pipeline\nfor name in pipeline._MODULE_OF: assert "
        "callable(getattr(pipeline, name)), name"
    )
    assert "torch" in imported(code)


@pytest.mark.parametrize("kind", ["bag", "both"])
def test_predict_for_texts_requires_no_torch(kind, tmp_path):
    bundle = make_served_bundle(tmp_path, num_labels=30, kind=kind)
    code = f"""
from unidec.cli import app
app(["predict", "redcar bluecar", "-k", "2", "--bundle", {str(bundle)!r}], standalone_mode=False)"""
    assert not imported(code) & {"torch", "transformers", "mlflow", "prefect"}


def test_setup_compiles_what_commands_import():
    """Containers often forbid Python to write bytecode: without it each start takes three times as
    long.
    """
    done = subprocess.run(
        ["make", "-n", "setup", "VENV=none"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    left_out = re.search(
        r"python -m compileall .* -x '(\S+)' none/lib/\S+/site-packages unidec flows", done.stdout
    )
    assert left_out is not None
    code = """
import sys
import flows.train
from unidec import pipeline
for name in pipeline._MODULE_OF: getattr(pipeline, name)
files = {getattr(module, "__file__", None) for module in [*sys.modules.values()]}
print(*sorted(filter(None, files)), sep="\\n")"""
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    files = [file for file in found.stdout.splitlines() if file.endswith(".py")]
    assert len(files) > 500
    assert [file for file in files if re.search(left_out[1], file)] == []
