"""What a command imports before it does its work: start-up time, asserted without a clock."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_the_command_line_imports_nothing_heavy():
    assert imported("import unidec.cli") == set()


def test_the_list_of_a_comparison_requires_no_prefect():
    code = """
from unidec.cli import app
app(["compare", "comparison/small.yaml", "--list"], standalone_mode=False)"""
    assert imported(code) == set()


def test_stages_around_training_require_no_torch():
    names = ("ingest", "validate", "tokens", "propensity", "label_graph", "register", "needs_gate")
    assert imported(f"from unidec import pipeline\nfor name in {names}: getattr(pipeline, name)") == set()


def test_a_flow_that_trains_nothing_requires_no_torch():
    assert imported("import flows.train") == {"prefect"}


def test_every_stage_is_found():
    code = (
        "from unidec import pipeline\nfor name in pipeline._MODULE_OF: assert callable(getattr(pipeline, name)), name"
    )
    assert "torch" in imported(code)


@pytest.mark.parametrize("kind", ["bag", "both"])
def test_predict_for_texts_requires_no_torch(kind, tmp_path, helper):
    bundle = helper("served_bundle").make_served_bundle(tmp_path, num_labels=30, kind=kind)
    code = f"""
from unidec.cli import app
app(["predict", "redcar bluecar", "-k", "2", "--bundle", {str(bundle)!r}], standalone_mode=False)"""
    assert not imported(code) & {"torch", "transformers", "mlflow", "prefect"}
