"""The commands on registered models: what they print, their exit codes; versions of one file in a
real registry.
"""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
from helpers import stored_versions

from unidec import cli, pipeline
from unidec.evaluation.significance import Check
from unidec.pipeline.gating import Verdict
from unidec.tracking.promotion import aliases
from unidec.tracking.store import open_client


@pytest.fixture
def models_cli(memory_registry, tmp_path, monkeypatch, request, capsys):
    """`models_cli.run("models", "list")` -> exit code, output, errors; `models_cli.store("a",
    **tags)`: a version.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", memory_registry)
    name = request.node.originalname
    client = open_client(memory_registry)
    Path("params.yaml").write_text(f"recipe: unidec\ntracking: {{model_name: {name}}}\n")

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["unidec", *words])
        monkeypatch.setattr(cli.os, "_exit", sys.exit)
        try:
            cli.main()
        except SystemExit as end:
            code = end.code
        return int(code or 0), *capsys.readouterr()

    def store(what: str, **tags: str) -> str:
        return stored_versions.store_version(client, name, tmp_path / what, what, **tags)

    return types.SimpleNamespace(
        run=run, store=store, passed=stored_versions.passed, client=client, name=name
    )


def test_the_table_of_models(models_cli):
    assert models_cli.run("models", "list") == (
        0,
        f"no versions of {models_cli.name} yet: unidec models register creates one\n",
        "",
    )
    made = {
        "dataset.name": "toy",
        "dataset.sha256": "abcdef0123" * 6,
        "mlflow.source.git.commit": "1234567890" * 4,
    }
    a = models_cli.store(
        "a", **models_cli.passed(), **made, **{"gate.metrics": '{"nDCG@5": 31.25, "P@1": 3.0}'}
    )
    run = models_cli.client.create_run(models_cli.client.create_experiment(models_cli.name))
    models_cli.client.log_metric(run.info.run_id, "test/PSP_at_5", 12.5)
    refused = {
        "gate.passed": "false",
        "gate.failed": "PSP@5, latency",
        "git.dirty": "true",
        "start.kind": "warm",
    }
    b = models_cli.store("b", **refused, **made, **{"start.version": a})
    models_cli.client.set_registered_model_alias(models_cli.name, "champion", a)
    models_cli.client.set_registered_model_alias(models_cli.name, "challenger", b)
    code, shown, _ = models_cli.run("models", "list")
    header, second, first = (line.split("\t") for line in shown.splitlines())
    assert code == 0 and header == [
        "version",
        "aliases",
        "nDCG@5",
        "PSP@5",
        "data",
        "start",
        "code",
        "gate",
        "registered",
    ]
    expected = [a, "champion", "31.25", "", "toy abcdef01", "cold", "12345678", "passed"]
    assert first[:-1] == expected
    assert second[:-1] == [
        b,
        "challenger",
        "",
        "",
        "toy abcdef01",
        f"warm {a}",
        "12345678 + changes",
        "refused: PSP@5, latency",
    ]
    found = json.loads(models_cli.run("models", "list", "--json")[1])
    assert [row["version"] for row in found] == [b, a]
    assert found[1]["metrics"] == {"nDCG@5": 31.25}
    assert found[0]["code"]["dirty"] is True
    c = str(
        models_cli.client.create_model_version(
            models_cli.name,
            source=(Path.cwd() / "a").as_uri(),
            run_id=run.info.run_id,
            tags={"rolled_back.at": "2026"},
        ).version
    )
    # the run's figures
    assert models_cli.run("models", "list")[1].splitlines()[1].split("\t")[:4] == [
        c,
        "",
        "",
        "12.50",
    ]
    rolled_back = json.loads(models_cli.run("models", "list", "--json")[1])[0]["rolled_back"]
    assert rolled_back == {"at": "2026"}


def test_promote_and_rollback(models_cli):
    a = models_cli.store("a", **models_cli.passed())
    code, shown, _ = models_cli.run("models", "promote", a, "--reason", "the first")
    assert code == 0 and f"promote: version = {a}\n" in shown
    refused = {"git.dirty": "true", "gate.passed": "false", "gate.failed": "code"}
    b = models_cli.store("b", **(models_cli.passed(a) | refused))
    code, _, error = models_cli.run("models", "promote", b)
    assert code == 6 and "did not pass the gate: code" in error and "--force" in error
    assert models_cli.run("models", "promote", b, "--force")[0] == 0
    expected = {"champion": b, "previous": a}
    assert aliases(models_cli.client, models_cli.name) == expected
    code, shown, _ = models_cli.run("models", "rollback", "--reason", "odd", "--json")
    assert code == 0 and json.loads(shown) == {
        "model": models_cli.name,
        "version": a,
        "previous": b,
    }
    assert models_cli.run("models", "promote", b)[0] == 6
    assert models_cli.run("models", "promote", b, "--force")[0] == 0
    assert models_cli.run("models", "promote", "99")[0] == 2
    assert models_cli.run("models", "promote", b, "--params", "nowhere.yaml")[0] == 2


@pytest.mark.parametrize(
    ("passed", "code"),
    [
        (True, 0),
        (False, 6),
    ],
)
def test_the_gates_exit_code_says_what_it_said(models_cli, monkeypatch, passed, code):
    asked = []

    def gate(params, version):
        asked.append(version)
        reason = Check("nDCG@5", passed, 1.0, 0.0, "31 against 30")
        return Verdict(passed, False, "unidec", [reason], "7", None, {}, "outputs/gate.html", None)

    monkeypatch.setattr(pipeline, "gate", gate)
    got, shown, _ = models_cli.run("models", "gate", "7")
    assert got == code and asked == ["7"]
    assert f"nDCG@5\t{'pass' if passed else 'FAIL'}\t31 against 30" in shown
    assert "version 7 (no champion to compare with): " in shown and "outputs/gate.html" in shown
    got, shown, _ = models_cli.run("models", "gate", "--json")
    assert got == code
    assert json.loads(shown)["passed"] is passed
    assert asked[-1] == "challenger"


def test_an_unknown_metric_is_an_error_of_the_parameters(models_cli):
    code, _, error = models_cli.run("models", "gate", "--set", "gate.metric=ndgc@5")
    assert code == 2 and "gate.metric" in error and "nearest: nDCG@5" in error


def test_models_promote_and_rollback_import_nothing_heavy():
    code = (
        "import sys, unidec.cli, unidec.tracking.lineage, unidec.tracking.promotion; "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "False"
