"""Data in time on a real registry: a champion trained on a slice, later data, windows of queries;
pages and events.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers.raw_files import write_raw
from helpers.tiny_training import tiny_params
from helpers.tiny_transformer import write_transformer
from typer.testing import CliRunner

from unidec import pipeline
from unidec.bundle.bundle import Bundle
from unidec.bundle.bundle_folder import read_info
from unidec.config import Params
from unidec.data.profile import PROFILE_KEY
from unidec.data.raw import RawData, make_slice
from unidec.errors import ArtifactError, ConfigError, DataError
from unidec.pipeline import paths, training
from unidec.pipeline.drift_check import _answers, read_profile
from unidec.tracking.registry import register
from unidec.tracking.store import open_client, prepare_store, tracking_uri

pytestmark = pytest.mark.timeout(300)
CHAMPION = "models:/unidec@champion"


def params_of(**overrides: Any) -> Params:
    values = {
        "data.path": "raw",
        "data.validation_share": 0.2,
        "optim.epochs": 2,
        "pool.refresh": 2,
        "pool.batch_size": 128,
        "optim.lr_bag": 5e-3,
        "model.dim": 32,
        "run.check_memory": False,
        "run.checkpoint_minutes": 0.0,
    }
    return tiny_params(Path("bert"), **(values | overrides))


@pytest.fixture(scope="module")
def made(lf_debian: RawData, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A project with a champion."""
    folder = tmp_path_factory.mktemp("change")
    (folder / "raw").mkdir()
    some = make_slice(lf_debian, 1200, 300)
    write_raw(some, folder / "raw", "xmc-json")
    texts = [
        text
        for table in (*some.queries.values(), some.labels)
        for text in table["title"].to_pylist()
    ]
    write_transformer(folder / "bert", texts)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("MLFLOW_TRACKING_URI", prepare_store(f"sqlite:///{folder}/mlflow.db"))
        params = params_of()
        for name in ("ingest", "tokens", "propensity"):
            getattr(pipeline, name)(params)
        assert pipeline.data_change(params).accepted is None
        training.train(params)
        pipeline.index(params)
        version = register(paths.BUNDLE, None, "unidec")
        open_client(tracking_uri()).set_registered_model_alias("unidec", "champion", str(version))
        yield folder


@pytest.fixture
def work(made: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.chdir(made)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{made}/mlflow.db")
    shutil.rmtree(paths.CHANGE, ignore_errors=True)
    return SimpleNamespace(folder=made, params=lambda **overrides: params_of(**overrides))


def ingested(
    work: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, raw: RawData, name: str
) -> Params:
    """Other data in data/dataset (a folder of its own)."""
    folder = Path("raw-" + name)
    if not folder.exists():
        folder.mkdir()
        write_raw(raw, folder, "xmc-json")
    params = work.params(**{"data.path": str(folder)})
    monkeypatch.setitem(paths.RELATIVE, "DATASET", f"data/dataset-{name}")
    pipeline.ingest(params)
    return params


def window(path: Path, texts: list[str], labels: list[list[str]] | None = None) -> str:
    columns: dict[str, Any] = {"query": texts} | ({} if labels is None else {"labels": labels})
    pd.DataFrame(columns).to_parquet(path)
    return str(path)


def states(result: dict) -> dict[str, str]:
    return {finding["check"]: finding["state"] for finding in result.findings}


def test_the_bundle_carries_the_profile_of_what_it_serves(work: SimpleNamespace) -> None:
    profile = read_profile(paths.BUNDLE)
    assert profile is not None
    assert profile["sha256"] == paths.open_dataset().sha256
    assert (paths.BUNDLE / "bundle.json").stat().st_size < 300_000
    assert not {"drift", "gate", "retrain", "serve", "source", "tracking"} & set(
        read_info(paths.BUNDLE).params
    )
    bundle = Bundle.load(paths.BUNDLE)
    dataset = paths.open_dataset()
    texts = dataset.query_texts(dataset.rows("validation"))
    vectors, scores = _answers(bundle, texts)
    mean = profile["served"]["mean"]
    assert mean == pytest.approx(vectors.mean(axis=0), abs=1e-4)
    assert profile["served"]["score_quantiles"][50] == pytest.approx(np.median(scores), abs=1e-4)
    expected = bundle.predict_arrays(texts, 1).scores[:, 0]
    assert scores == pytest.approx(expected, abs=1e-5)
    before = (paths.BUNDLE / "bundle.json").read_bytes()
    pipeline.index(work.params())
    assert (paths.BUNDLE / "bundle.json").read_bytes() == before


def test_a_profile_of_another_version_is_none(work: SimpleNamespace, tmp_path: Path) -> None:
    shutil.copytree(paths.BUNDLE, tmp_path / "bundle")
    about = json.loads((tmp_path / "bundle" / "bundle.json").read_text())
    for value in ({"version": 2}, "no", None):
        about["card"][PROFILE_KEY] = value
        (tmp_path / "bundle" / "bundle.json").write_text(json.dumps(about))
        assert read_profile(tmp_path / "bundle") is None
    with pytest.raises(ArtifactError, match="has no profile"):
        pipeline.monitor(
            work.params(), window(tmp_path / "w.parquet", ["x"]), bundle=str(tmp_path / "bundle")
        )


def test_the_very_same_data_and_a_model_without_champion(work: SimpleNamespace) -> None:
    same = pipeline.data_change(work.params())
    assert same.accepted["version"] == "1"
    assert "very data" in same.reason
    assert not same.stops
    other = pipeline.data_change(work.params(**{"tracking.model_name": "other"}))
    assert other.accepted is None
    assert "no champion" in other.reason
    assert Path(other.page).is_file()


def test_data_that_changed_a_little_goes_on(
    work: SimpleNamespace, lf_debian: RawData, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = ingested(work, monkeypatch, make_slice(lf_debian, 1230, 310), "little")
    result = pipeline.data_change(params)
    assert result.reason == ""
    assert result.stops == []
    assert result.warnings == []
    stored = json.loads((paths.CHANGE / "drift.json").read_text())
    assert len(stored["findings"]) >= 24
    again = (paths.CHANGE / "drift.json").read_bytes()
    pipeline.data_change(params)
    assert (paths.CHANGE / "drift.json").read_bytes() == again
    page = Path(result.page).read_text()
    assert "nothing changed beyond the limits" in page
    assert "<script" not in page


def test_data_that_grew_warns_and_data_that_shrank_stops(
    work: SimpleNamespace, lf_debian: RawData, monkeypatch: pytest.MonkeyPatch
) -> None:
    grown = make_slice(lf_debian, 1500, 300)
    result = pipeline.data_change(ingested(work, monkeypatch, grown, "grown"))
    assert result.stops == [] and any(
        line.startswith("training queries:") for line in result.warnings
    )
    params = ingested(work, monkeypatch, make_slice(lf_debian, 400, 300), "shrunk")
    with pytest.raises(DataError, match=r"training queries: 9.. before, 3.. now") as caught:
        pipeline.data_change(params)
    assert "data/change/index.html" in str(caught.value) and "drift.stop" in str(caught.value)
    stored = json.loads((paths.CHANGE / "drift.json").read_text())
    assert "stop" in {finding["state"] for finding in stored["findings"]}
    assert "stops" in (paths.CHANGE / "index.html").read_text()
    allowed = pipeline.data_change(
        params.model_copy(update={"drift": params.drift.model_copy(update={"stop": 5.0})})
    )
    assert allowed.stops == []


def test_a_version_of_the_same_data_is_not_fetched(
    work: SimpleNamespace, lf_debian: RawData, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = ingested(work, monkeypatch, make_slice(lf_debian, 1500, 300), "grown")
    damaged = ArtifactError("a file is damaged", where="model.safetensors")
    monkeypatch.setattr("unidec.pipeline.drift_check.fetch_bundle", lambda *_: throw(damaged))
    with pytest.raises(ArtifactError, match="a file is damaged"):
        pipeline.data_change(params)
    client = open_client(tracking_uri())
    client.set_model_version_tag("unidec", "1", "dataset.sha256", paths.open_dataset().sha256)
    assert "very data" in pipeline.data_change(params).reason
    # its labels are the data's, not its training
    client.set_model_version_tag("unidec", "1", "start.kind", "refresh")
    with pytest.raises(ArtifactError, match="a file is damaged"):
        pipeline.data_change(params)
    for key in ("dataset.sha256", "start.kind"):
        client.delete_model_version_tag("unidec", "1", key)


def throw(error: Exception) -> None:
    raise error


def test_labels_under_other_names_stop(
    work: SimpleNamespace, lf_debian: RawData, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow as pa

    some = make_slice(lf_debian, 1200, 300)
    uids = pa.chunked_array(
        [[f"new-{row}" for row in range(some.num_labels)]], some.labels.schema.field("uid").type
    )
    labels = some.labels.set_column(0, some.labels.schema.field("uid"), uids)
    renamed = RawData(some.name, some.queries, labels, some.relevance, some.filter_pairs)
    with pytest.raises(DataError, match=r"labels that are gone: 100\.0%"):
        pipeline.data_change(ingested(work, monkeypatch, renamed, "renamed"))


def test_windows_like_the_training_data_are_quiet_and_others_are_found(
    work: SimpleNamespace, lf_debian: RawData, tmp_path: Path
) -> None:
    titles = lf_debian.queries["train"]["title"].to_pylist()
    rng = np.random.default_rng(0)
    for number in range(5):
        texts = [
            titles[row] for row in rng.choice(np.arange(2000, len(titles)), 400, replace=False)
        ]
        result = pipeline.monitor(work.params(), window(tmp_path / f"same{number}.parquet", texts))
        assert not result.drifted and result.judged, states(result)
    assert len(result.findings) == 6 and result.metrics is None
    python = [title for title in titles[2000:] if title.startswith("python3-")][:300]
    result = pipeline.monitor(work.params(), window(tmp_path / "python.parquet", python))
    found = states(result)
    assert result.drifted and found["tokens_distance"] == found["shift"] == "warning"
    assert result.findings[0]["drifted"]
    assert result.page.startswith("runs/monitor/python-")
    stored = json.loads(Path(result.result).read_text())
    assert stored["findings"] == result.findings
    assert re.search(r"<t[hd][^>]*>(<\w+>)?python3<", Path(result.page).read_text())
    few = pipeline.monitor(work.params(), window(tmp_path / "few.parquet", python[:50]))
    assert not few.drifted
    assert not few.judged
    assert not any(f["drifted"] for f in few.findings)
    page = Path(few.page).read_text()
    assert "not judged: 50 queries" in page and ">ok<" not in page and "as expected" not in page
    assert set(states(few).values()) == {"not judged"}
    file = window(tmp_path / "two.parquet", python[:2])
    against = pipeline.drift(work.params(), CHAMPION, file)
    assert (
        not against.drifted
        and not against.judged
        and set(states(against).values()) == {"not judged"}
    )


def test_a_labelled_window_is_measured(work: SimpleNamespace, tmp_path: Path) -> None:
    dataset = paths.open_dataset()
    bundle = Bundle.load(paths.BUNDLE)
    rows = dataset.rows("validation")
    uids = np.asarray(dataset.label_uids())
    texts = dataset.query_texts(rows)
    right = [[str(uid) for uid in uids[dataset.relevance[row].indices]] for row in rows]
    result = pipeline.monitor(work.params(), window(tmp_path / "w.parquet", texts, right))
    best = [prediction.labels[0] for prediction in bundle.predict(texts, 1)]
    hits = [100 * (top in known) for top, known in zip(best, right, strict=True)]
    assert result.metrics["P@1"] == pytest.approx(np.mean(hits))
    assert states(result)["unknown_labels"] == "ok"
    two_marks = [known if number < 2 else [] for number, known in enumerate(right)]
    result = pipeline.monitor(work.params(), window(tmp_path / "w3.parquet", texts, two_marks))
    found = states(result)
    assert {found[name] for name in ("P_at_1", "nDCG_at_5", "unknown_labels")} == {"not judged"}
    assert result.judged and found["length_distance"] == "ok"
    strange = [["nobody"] if number % 2 else known for number, known in enumerate(right)]
    result = pipeline.monitor(work.params(), window(tmp_path / "w2.parquet", texts, strange))
    assert states(result)["unknown_labels"] == "warning"
    expected = np.mean([0 if n % 2 else hit for n, hit in enumerate(hits)])
    assert result.metrics["P@1"] == pytest.approx(expected)


def test_the_run_of_a_window(
    work: SimpleNamespace, lf_debian: RawData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNIDEC_MLFLOW_UI", "http://mlflow.test")
    texts = lf_debian.queries["train"]["title"].to_pylist()[2000:2300]
    result = pipeline.monitor(
        work.params(), window(tmp_path / "week.parquet", texts), bundle=CHAMPION
    )
    client = open_client(f"sqlite:///{work.folder}/mlflow.db")
    experiment = client.get_experiment_by_name("unidec-monitor")
    run = client.search_runs([experiment.experiment_id], "attributes.run_name LIKE 'week-%'")[0]
    assert result.run_url.endswith(run.info.run_id)
    shift = next(finding["value"] for finding in result.findings if finding["check"] == "shift")
    assert run.data.metrics["drift/shift"] == pytest.approx(shift)
    drifted = run.data.tags["drifted"]
    assert drifted == str(result.drifted).lower()
    assert {file.path for file in client.list_artifacts(run.info.run_id)} == {
        "index.html",
        "drift.json",
    }


def test_what_cannot_be_monitored(work: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "empty.csv").write_text("query\n")
    with pytest.raises(DataError, match="has no queries"):
        pipeline.monitor(work.params(), str(tmp_path / "empty.csv"))
    with pytest.raises(ConfigError, match="not in the registry"):
        pipeline.monitor(
            work.params(**{"tracking.model_name": "nobody"}), str(tmp_path / "empty.csv")
        )


def test_drift_of_two_versions_and_of_a_file(
    work: SimpleNamespace, lf_debian: RawData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = str(paths.DATASET)
    ingested(work, monkeypatch, make_slice(lf_debian, 400, 300), "shrunk")
    params = work.params()
    assert not pipeline.drift(params, first, first).drifted
    result = pipeline.drift(params, first, str(paths.DATASET))
    assert states(result)["train"] == "stop"
    assert Path(result.page).is_file()
    through = pipeline.drift(params, CHAMPION, str(paths.DATASET))
    assert states(through)["train"] == "stop"
    odd = window(tmp_path / "odd.parquet", [f"hello how are you {number}" for number in range(300)])
    length_distance = states(pipeline.drift(params, first, odd))["length_distance"]
    assert length_distance == "warning"
    with pytest.raises(DataError):
        pipeline.drift(params, first, str(tmp_path))


def test_the_commands(work: SimpleNamespace, tmp_path: Path) -> None:
    from unidec.cli import app

    Path("own.yaml").write_text(
        "drift: {min_window: 20}\ntracking: {experiment: unidec, model_name: unidec}\n"
    )
    odd = window(tmp_path / "odd.parquet", [f"hello how are you {number}" for number in range(40)])
    result = CliRunner().invoke(app, ["models", "monitor", odd, "--params", "own.yaml", "--json"])
    assert result.exit_code == 1, result.output
    assert json.loads(result.output[result.output.index("{") :])["drifted"]
    result = CliRunner().invoke(
        app, ["data", "drift", "data/dataset", "data/dataset", "--params", "own.yaml"]
    )
    assert result.exit_code == 0 and "report: runs/drift/" in result.output
    result = CliRunner().invoke(app, ["data", "change", "--params", "own.yaml"])
    assert result.exit_code == 0 and "very data" in result.output
