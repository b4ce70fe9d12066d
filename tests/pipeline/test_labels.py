"""Labels changed by hand: a new bundle of a registered one, its origin kept, and removed labels
seen no more.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from mlflow import MlflowClient
from typer.testing import CliRunner

from unidec import pipeline
from unidec.bundle.answer import Answerer, LabelQuery
from unidec.bundle.bundle import Bundle
from unidec.bundle.label_file import LabelText, read_labels
from unidec.cli import app
from unidec.config import Params, to_yaml
from unidec.data.storage import folder_sha256
from unidec.errors import ConfigError, DataError
from unidec.pipeline import paths
from unidec.pipeline.label_stages import change_labels
from unidec.ranking.query_encoder import open_encoder
from unidec.tracking.lineage import lineage
from unidec.tracking.store import prepare_store, tracking_uri

pytestmark = pytest.mark.timeout(240)
NAME = "by-hand"


@pytest.fixture(scope="module")
def project(work: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A champion of the slice whose training queries vote, in a folder of its own with
    params.yaml.
    """
    folder = tmp_path_factory.mktemp("by-hand")
    for name in ("raw", "bert"):
        shutil.copytree(work.folder / name, folder / name)
    params = work.params(
        **{"index.knn_weight": 0.3, "index.knn_neighbours": 20, "tracking.model_name": NAME}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/mlflow.db")
        for name in ("ingest", "tokens", "propensity", "label_graph", "train", "index"):
            getattr(pipeline, name)(params)
        version = pipeline.register(params).version
        MlflowClient(tracking_uri()).set_registered_model_alias(NAME, "champion", str(version))
        Path("params.yaml").write_text(to_yaml(params), encoding="utf-8")
    return SimpleNamespace(folder=folder, params=params)


@pytest.fixture
def params(project: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Params:
    monkeypatch.chdir(project.folder)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{project.folder}/mlflow.db")
    return project.params


def run(*arguments: str) -> dict:
    done = CliRunner().invoke(app, ["labels", *arguments, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.output[done.output.index("{") :])


def test_added_removed_and_updated_then_registered(params: Params) -> None:
    before = Bundle.load(paths.BUNDLE)
    sha256 = before.sha256
    uids = before.uids.to_pylist()
    Path("new.csv").write_text(
        "uid,text,title\nn1,a reader of planets,planets\nn2,sorts bread by age,\n"
    )
    Path("gone.jsonl").write_text("".join(json.dumps({"uid": uid}) + "\n" for uid in uids[:30]))
    Path("changed.csv").write_text(f"uid,text\n{uids[40]},something else altogether\n")
    edit = {
        "add": read_labels(Path("new.csv")),
        "remove": [label.uid for label in read_labels(Path("gone.jsonl"))],
        "update": read_labels(Path("changed.csv")),
    }
    result = run(
        "remove", "--file", "gone.jsonl", "--bundle", f"models:/{NAME}@champion", "--dry-run"
    )
    assert result["changed"]
    assert result["bundle"] is None
    assert not paths.REFRESHED.exists()
    result = change_labels(params, f"models:/{NAME}@champion", **edit, register=True)
    counts = {
        "added": 2,
        "removed": 30,
        "renamed": 1,
        "kept": len(uids) - 30,
    }
    assert {key: getattr(result, key) for key in counts} == counts
    assert result.labels == len(uids) - 28
    assert result.estimated == 2
    assert result.registered.version == 2
    assert folder_sha256(paths.BUNDLE) == sha256

    after = Bundle.load(paths.REFRESHED)
    assert after.uids.to_pylist() == [*uids[30:], "n1", "n2"]
    titles = dict(zip(after.uids.to_pylist(), after.titles.to_pylist(), strict=True))
    assert (titles["n1"], titles["n2"]) == ("planets", "sorts bread by age")
    assert titles[uids[40]] == "something else altogether"
    assert "n1" in after.predict(["a reader of planets"], 3)[0].labels

    client = MlflowClient(tracking_uri())
    tags = client.get_model_version(NAME, "2").tags
    wanted = {
        "bundle.sha256": after.sha256,
        "start.kind": "refresh",
        "start.version": "1",
        "start.bundle.sha256": sha256,
        "labels": "by hand",
        "dataset.sha256": before.info.dataset["sha256"],
    }
    assert {key: tags.get(key) for key in wanted} == wanted
    assert not any(key.startswith("dvc.data/") for key in tags)
    assert lineage(f"models:/{NAME}@challenger", model_name=NAME)[1].version == "1"
    again = change_labels(params, "outputs/bundle", **edit, out="elsewhere", register=True)
    assert (again.registered.version, folder_sha256("elsewhere")) == (
        2,
        after.sha256,
    )  # no second version of the same bytes

    run("add", "--file", "new.csv", "--out", "one")
    run("update", uids[40], "something else altogether", "--bundle", "one", "--out", "two")
    run("remove", *uids[:30], "--bundle", "two", "--out", "three")
    in_turn = Bundle.load("three")
    assert (in_turn.uids.to_pylist(), in_turn.titles.to_pylist()) == (
        after.uids.to_pylist(),
        after.titles.to_pylist(),
    )


def test_removed_labels_are_seen_nowhere(params: Params) -> None:
    before = Bundle.load(paths.BUNDLE)
    texts = pipeline.paths.open_dataset().query_texts()[:60]
    answered = [uid for found in before.predict(texts, 3) for uid in found.labels]
    gone = list(dict.fromkeys(answered))[:25]  # what is answered most readily
    change_labels(params, paths.BUNDLE, remove=gone, out="without")
    after = Bundle.load("without")
    answerer = Answerer(after, open_encoder(after, "torch"))
    everything = after.num_labels + len(gone)
    for text in texts[:20]:
        assert not set(after.predict([text], everything)[0].labels) & set(gone)
        explained = answerer.explain(LabelQuery(text, k=5))
        assert explained.neighbours
        assert not {uid for query in explained.neighbours for uid, _ in query.labels} & set(gone)
    allowed = answerer.answer([LabelQuery(texts[0], k=50, allow=(*gone, after.uids[0].as_py()))])[0]
    assert allowed.labels == [after.uids[0].as_py()]
    assert allowed.unknown_labels == len(gone)
    held = (Path("without") / "labels.arrow").read_bytes() + (
        Path("without") / "bundle.json"
    ).read_bytes()
    assert not any(f"{uid}\0".encode() in held for uid in gone if len(uid) > 12)


def test_an_estimated_row_follows_its_text(params: Params) -> None:
    """Added with one text and changed to another is the same as added with the other; a trained row
    stays.
    """
    change_labels(params, paths.BUNDLE, add=[LabelText("n", "a reader of planets")], out="one")
    change_labels(params, "one", update=[LabelText("n", "sorts bread by age")], out="two")
    change_labels(params, paths.BUNDLE, add=[LabelText("n", "sorts bread by age")], out="three")
    one, two, three = (Bundle.load(name) for name in ("one", "two", "three"))
    for name in ("de", "clf"):
        assert two.vectors[name][-1] == pytest.approx(three.vectors[name][-1], abs=1e-5)
        assert abs(two.vectors[name][-1] - one.vectors[name][-1]).max() > 0.01
    expected = [(one.num_labels - 1, one.num_labels)]
    assert two.info.estimated == expected
    uid = one.uids[0].as_py()
    change_labels(params, "one", update=[LabelText(uid, "sorts bread by age")], out="four")
    four = Bundle.load("four")
    assert (four.vectors["clf"][0] == one.vectors["clf"][0]).all()
    assert abs(four.vectors["de"][0] - one.vectors["de"][0]).max() > 0.01


def test_mistakes_write_nothing(params: Params) -> None:
    uid = Bundle.load(paths.BUNDLE).uids[3].as_py()
    with pytest.raises(DataError, match="no label"):
        change_labels(params, paths.BUNDLE, remove=[f"{uid}x"], out="never")
    with pytest.raises(ConfigError, match="not changed in place"):
        change_labels(params, paths.BUNDLE, remove=[uid], out=paths.BUNDLE)
    assert not change_labels(params, paths.BUNDLE, out="never").changed
    change_labels(params, paths.BUNDLE, remove=[uid], out="mine")
    with pytest.raises(ConfigError, match="not registered"):
        change_labels(params, "mine", add=[LabelText("n", "x")], out="never", register=True)
    assert not Path("never").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["add"],
        ["add", "x"],
        ["add", "x", "y", "--file", "z.csv"],
        ["update", "--title", "t"],
        ["remove"],
        ["remove", "x", "--file", "z.csv"],
    ],
)
def test_commands_without_what_they_need(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match="unidec labels"):
        CliRunner().invoke(app, ["labels", *arguments], catch_exceptions=False)


def test_a_bundle_is_registered_in_another_store_than_its_runs(
    params: Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is sent there with its whole history, and is the version's run."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", prepare_store(f"sqlite:///{tmp_path}/mlflow.db"))
    done = CliRunner().invoke(app, ["models", "register", "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    client = MlflowClient(tracking_uri())
    version = client.get_model_version_by_alias(NAME, "challenger")
    run = client.get_run(version.run_id)
    assert str(version.version) == "1"
    assert run.data.params["model.heads"] == params.model.heads
    assert client.get_metric_history(run.info.run_id, "training/loss")
