"""`unidec export` and `unidec predict` on a real, untrained bundle: what they write and print,
their exit codes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from helpers import real_model

from unidec import cli


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """`run("export", "vectors")` -> exit code, output, errors; in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["unidec", *words])
        try:
            cli.main()
        except SystemExit as end:
            code = end.code
        return int(code or 0), *capsys.readouterr()

    return run


@pytest.fixture
def bundle(tiny_bert, tmp_path) -> Path:
    return real_model.real_bundle(tmp_path, tiny_bert, kind="bag", trainable_layers=0).path


@pytest.mark.parametrize("command", ["vectors", "onnx", "sentence-transformers"])
def test_every_export_explains_itself_with_an_example(run, command) -> None:
    code, out, _ = run("export", command, "--help")
    assert code == 0
    assert f"unidec export {command}" in out
    assert "--head" in out


def test_vectors(run, bundle) -> None:
    code, out, _ = run(
        "export", "vectors", "--bundle", str(bundle), "--output", "v/labels.parquet", "--json"
    )
    told = json.loads(out)
    assert code == 0
    assert told["labels"] == 6
    assert told["width"] == 48
    assert told["head"] == "both"
    assert pq.read_table("v/labels.parquet").num_rows == 6
    assert run("export", "vectors", "--bundle", str(bundle), "--output", "labels.txt")[0] == 3
    assert run("export", "vectors", "--bundle", "nowhere")[0] == 4
    code, _, said = run("export", "vectors", "--bundle", "models:/unidec")
    assert code == 2 and "models:/name@alias" in said


def test_sentence_transformers(run, tiny_bert, tmp_path) -> None:
    bundle = real_model.real_bundle(
        tmp_path, tiny_bert, kind="transformer", trainable_layers=0
    ).path
    code, _, said = run("export", "sentence-transformers", "--bundle", str(bundle))
    assert code == 2 and "both heads" in said and "--head de or clf" in said
    assert not Path("sentence-transformers").exists()
    code, out, _ = run(
        "export",
        "sentence-transformers",
        "--bundle",
        str(bundle),
        "--head",
        "de",
        "--output",
        "stock",
    )
    assert code == 0
    assert "modules = " in out
    assert not list(Path("stock").rglob("*.py"))


def test_a_registered_bundle_is_fetched(run, bundle, monkeypatch) -> None:
    asked = []

    def fetch(address):
        asked.append(address)
        return bundle

    with monkeypatch.context() as patch:
        patch.setattr("unidec.tracking.fetch.bundle_folder", fetch)
        assert (
            run("predict", "river engine", "--bundle", "models:/unidec@champion", "-k", "2")[0] == 0
        )
        assert run("export", "vectors", "--bundle", "models:/unidec/7")[0] == 0
    assert asked == ["models:/unidec@champion", "models:/unidec/7"]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # nothing listens there
    code, _, said = run("predict", "river engine", "--bundle", "models:/away@champion")
    assert code == 4 and "the registry does not answer" in said and "MLFLOW_TRACKING_URI" in said


def test_predictions_do_not_depend_on_what_encodes(run, bundle, monkeypatch) -> None:
    Path("q.csv").write_text("text\nriver engine\nmusic window w3\n")
    for name, runtime in (("a.jsonl", "torch"), ("b.jsonl", "auto")):
        words = ["--input", "q.csv", "--output", name, "-k", "3", "--runtime", runtime]
        exit_code = run("predict", "--bundle", str(bundle), *words)[0]
        assert exit_code == 0
    labels = []
    scores = []
    for name in ("a.jsonl", "b.jsonl"):
        rows = [json.loads(line) for line in Path(name).read_text().splitlines()]
        assert len(rows) == 6
        labels.append([row["label"] for row in rows])
        scores.append([row["score"] for row in rows])
    assert labels[0] == labels[1]
    np.testing.assert_allclose(scores[0], scores[1], rtol=1e-4)
