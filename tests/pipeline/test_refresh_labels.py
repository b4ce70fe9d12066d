"""The label set of a registered bundle follows the data: refreshed, registered again, traced back
to what it was.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from helpers.raw_files import write_raw
from mlflow import MlflowClient

from unidec import pipeline
from unidec.bundle.bundle import Bundle
from unidec.bundle.bundle_folder import read_info
from unidec.bundle.label_change import LabelChange, with_labels
from unidec.config import Params
from unidec.data.dataset import XMCDataset
from unidec.data.formats import read_raw
from unidec.data.raw import RawData
from unidec.data.storage import folder_sha256
from unidec.errors import ConfigError
from unidec.evaluation.metrics import truth_of
from unidec.pipeline import paths
from unidec.pipeline.label_stages import ChangedLabels
from unidec.tracking.lineage import lineage
from unidec.tracking.store import tracking_uri

pytestmark = pytest.mark.timeout(240)
# labels
GONE = 100
NEW = 50
RENAMED = 5


def other_labels(raw: RawData) -> RawData:
    """Raw data whose first labels are gone, whose last have new uids (so they are new), a few of
    others renamed.
    """
    uids = raw.labels["uid"].to_pylist()
    titles = raw.labels["title"].to_pylist()
    uids[-NEW:] = [f"again-{uid}" for uid in uids[-NEW:]]
    titles[200 : 200 + RENAMED] = [f"{title} suite" for title in titles[200 : 200 + RENAMED]]
    texts = {"uid": pa.array(uids, pa.large_string()), "title": pa.array(titles, pa.large_string())}
    table = pa.table(texts | {"content": raw.labels["content"]}).slice(GONE)
    return dataclasses.replace(
        raw,
        labels=table,
        relevance={split: pairs[:, GONE:] for split, pairs in raw.relevance.items()},
        filter_pairs={split: pairs[:, GONE:] for split, pairs in raw.filter_pairs.items()},
    )


@pytest.fixture(scope="module")
def project(work: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A champion of the slice, in a folder of its own; `params`, `champion` (as registered)."""
    folder = tmp_path_factory.mktemp("refresh")
    for name in ("raw", "bert"):
        shutil.copytree(work.folder / name, folder / name)
    params = work.params(
        **{"index.knn_weight": 0.3, "index.knn_neighbours": 20, "tracking.model_name": "labels"}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/mlflow.db")
        for name in ("ingest", "tokens", "propensity", "label_graph", "train", "index", "evaluate"):
            getattr(pipeline, name)(params)
        champion = pipeline.register(params)
        MlflowClient(tracking_uri()).set_registered_model_alias(
            "labels", "champion", str(champion.version)
        )
    return SimpleNamespace(folder=folder, params=params, champion=champion)


@pytest.fixture
def params(project: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Params:
    monkeypatch.chdir(project.folder)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{project.folder}/mlflow.db")
    return project.params


def test_unchanged_data_changes_nothing(params: Params) -> None:
    result = pipeline.refresh_labels(params)
    assert result == ChangedLabels(
        changed=False, bundle=None, parent="1", reason="version 1 already has this data set"
    )
    assert not paths.REFRESHED.exists()
    with pytest.raises(ConfigError, match="not in the registry: no such alias"):
        pipeline.refresh_labels(params, "nobody")


def test_the_labels_of_today(params: Params, project: SimpleNamespace) -> None:
    before = Bundle.load(paths.BUNDLE)
    raw = other_labels(read_raw(Path("raw")))
    shutil.rmtree("raw")
    write_raw(raw, Path("raw"), "xmc-json")
    # of the data that was, as the tokens are: nothing here may read them
    shutil.rmtree(paths.PROPENSITY)
    shutil.rmtree(paths.TOKENS)
    pipeline.ingest(params)
    bundle_sha256 = folder_sha256(paths.BUNDLE)

    result = project.result = pipeline.refresh_labels(params)
    dataset = XMCDataset.open(paths.DATASET)
    after = Bundle.load(paths.REFRESHED)
    uids = dataset.label_uids()
    assert result.changed
    assert result.bundle == str(paths.REFRESHED)
    assert result.parent == "1"
    counts = {name: getattr(result, name) for name in ("added", "removed", "renamed", "kept")}
    assert counts == {
        "added": NEW,
        "removed": GONE + NEW,
        "renamed": RENAMED,
        "kept": len(uids) - NEW,
    }
    assert after.uids.to_pylist() == uids
    assert after.info.dataset == {
        "name": dataset.name,
        "sha256": dataset.sha256,
    }
    assert folder_sha256(paths.BUNDLE) == bundle_sha256  # DVC's output stays

    # the training queries of today vote, with today's labels
    rows = dataset.rows("train")
    assert after.neighbours is not None
    assert after.neighbours.uids.to_pylist() == dataset.query_uids(rows)
    expected = (dataset.relevance[rows] > 0).sum()
    assert after.neighbours.labels_ML.nnz == expected
    assert (after.info.knn.weight, after.info.clf_weight) == (
        before.info.knn.weight,
        before.info.clf_weight,
    )


def test_registered_again(params: Params, project: SimpleNamespace) -> None:
    sha256 = folder_sha256(paths.REFRESHED)
    registered = pipeline.register(params, paths.REFRESHED)
    assert registered.version == 2
    client = MlflowClient(tracking_uri())
    version = client.get_model_version("labels", "2")
    assert version.run_id != client.get_model_version("labels", "1").run_id
    dataset = XMCDataset.open(paths.DATASET)
    wanted = {
        "bundle.sha256": sha256,
        "dataset.sha256": dataset.sha256,
        "dataset.name": dataset.name,
        "start.kind": "refresh",
        "start.version": "1",
        "start.bundle.sha256": folder_sha256(paths.BUNDLE),
    }
    assert {key: version.tags.get(key) for key in wanted} == wanted
    run = client.get_run(version.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.metrics["labels/added"] == NEW
    # once more is no second version
    assert pipeline.register(params, paths.REFRESHED) == registered
    found = lineage("models:/labels@challenger", model_name="labels")
    assert [version.version for version in found] == ["2", "1"]


def test_refreshed_again_it_is_the_same_and_then_no_change(params: Params) -> None:
    sha256 = folder_sha256(paths.REFRESHED)
    assert pipeline.refresh_labels(params).changed
    assert folder_sha256(paths.REFRESHED) == sha256
    result = pipeline.refresh_labels(params, 2)
    assert not result.changed
    assert read_info(paths.REFRESHED).card["refreshed"]["version"] == "1"


def test_without_votes_another_data_set_with_the_same_labels_is_no_change(
    params: Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Bundle.load.__func__

    def silent(cls: type[Bundle], *words: object, **options: object) -> Bundle:
        bundle = load(cls, *words, **options)
        bundle.neighbours, bundle.info = (
            None,
            bundle.info.model_copy(update={"knn": None, "dataset": {}}),
        )
        return bundle

    monkeypatch.setattr(Bundle, "load", classmethod(silent))
    assert pipeline.refresh_labels(params, 2).reason == "version 2 already has these labels"


def test_new_labels_rank_by_their_text_and_training_queries(params: Params, tmp_path: Path) -> None:
    """More relevant pairs of unseen queries are found than by the labels' texts alone."""
    before = Bundle.load(paths.BUNDLE)
    dataset = XMCDataset.open(paths.DATASET)
    uids = dataset.label_uids()
    new = [row for row, uid in enumerate(uids) if uid not in before.row_of]
    change = LabelChange.of(before, uids, dataset.label_texts())
    after = Bundle.load(paths.REFRESHED)
    by_text = Bundle.load(
        with_labels(before, tmp_path / "by-text", change, neighbours=after.neighbours)
    )
    rows = dataset.rows("test")
    relevant = truth_of(dataset, rows)[:, new].toarray()
    texts = dataset.query_texts(rows)

    def num_found(bundle: Bundle) -> int:
        found = bundle.predict_arrays(texts, 20).rows
        pairs = zip(*relevant.nonzero(), strict=True)
        return sum(new[place] in found[query] for query, place in pairs)

    assert num_found(after) > num_found(by_text)


def test_a_bundle_of_somewhere_else_is_not_registered_with_figures_of_this_project(
    params: Params, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(paths.BUNDLE, tmp_path / "bundle"))
    with pytest.raises(ConfigError, match="how this bundle was trained"):
        pipeline.register(params, other)
