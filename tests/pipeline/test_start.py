"""What a training starts from: chosen, written down, fetched by hash; a real registry, tiny
trainings.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from helpers.raw_files import write_raw
from helpers.tiny_data import tiny_transformer
from helpers.tiny_training import tiny_params
from mlflow.exceptions import MlflowException
from scipy.sparse import csr_matrix, vstack

from unidec import pipeline
from unidec.bundle.bundle import Bundle
from unidec.bundle.label_change import LabelChange, with_labels
from unidec.config import Params
from unidec.data.dataset import XMCDataset, write_dataset
from unidec.data.json_file import read_json_lines
from unidec.data.raw import RawData
from unidec.data.storage import read_manifest
from unidec.errors import ArtifactError, ConfigError
from unidec.pipeline import launch, paths, seen, start, training
from unidec.pipeline.start import (
    ChosenStart,
    WarmStart,
    effective,
    open_start,
    read_start,
    start_tags,
)
from unidec.tracking.fetch import fetch_bundle, fetch_by_hash, find_alias
from unidec.tracking.registry import checked_sha256, register
from unidec.tracking.run import Tracker
from unidec.tracking.store import open_client, prepare_store, tracking_uri
from unidec.training.fit import fit

pytestmark = pytest.mark.timeout(240)
COLD = b'{\n  "kind": "cold"\n}\n'
SHA = "a" * 64


def later(raw: RawData) -> RawData:
    """The next version of some data: a label gone, one new, the others in another order."""
    order = [*range(raw.num_labels - 1, 0, -1), 5]
    uids = [f"label-{row}" for row in order[:-1]] + ["new"]
    labels = raw.labels.take(order).set_column(
        0, "uid", pa.array(uids, raw.labels.schema.field("uid").type)
    )
    relevance = {
        split: csr_matrix(pairs.tocsc()[:, order]) for split, pairs in raw.relevance.items()
    }
    filters = {
        split: csr_matrix(pairs.tocsc()[:, order]) for split, pairs in raw.filter_pairs.items()
    }
    return RawData(raw.name, raw.queries, labels, relevance, filters)


def params_of(**overrides: Any) -> Params:
    values = {
        "data.path": "raw",
        "data.validation_share": 0.2,
        "optim.epochs": 2,
        "pool.refresh": 2,
        "warm.epochs": 1,
        "run.check_memory": False,
        "run.checkpoint_minutes": 0.0,
    }
    return tiny_params(Path("bert"), **(values | overrides))


def make_data(params: Params) -> None:
    for name in ("ingest", "tokens", "propensity"):
        getattr(pipeline, name)(params)


def register_champion() -> int:
    version = register(paths.BUNDLE, None, "unidec")
    open_client(tracking_uri()).set_registered_model_alias("unidec", "champion", str(version))
    return version


@pytest.fixture(scope="module")
def made(tiny_raw: RawData, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A project with two versions of its data and a champion, trained cold on the first."""
    folder = tmp_path_factory.mktemp("start")
    for name, raw in (
        ("raw", tiny_raw),
        ("raw2", later(tiny_raw)),
    ):
        (folder / name).mkdir()
        write_raw(raw, folder / name, "xmc-json")
    tiny_transformer("bert", tiny_raw, folder / "bert")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("MLFLOW_TRACKING_URI", prepare_store(f"sqlite:///{folder}/mlflow.db"))
        params = params_of()
        make_data(params)
        training.train(params)
        pipeline.index(params)
        register_champion()
        shutil.copytree(paths.DATASET, "first_dataset")
        make_data(params_of(**{"data.path": "raw2"}))
        yield folder


@pytest.fixture
def work(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The project with its second data; what a test registers is its own."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(made / "mlflow.db", tmp_path)
    shutil.copytree(made / "artifacts", tmp_path / "artifacts")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    for name in ("raw", "raw2", "bert"):
        (tmp_path / name).symlink_to(made / name)
    shutil.copytree(made / "data", tmp_path / "data", ignore=shutil.ignore_patterns("cache"))
    paths.START.write_bytes(COLD)
    return SimpleNamespace(
        folder=tmp_path,
        params=lambda **overrides: params_of(**{"data.path": "raw2"} | overrides),
        bundle=made / "outputs" / "bundle",
    )


def move(alias: str, version: int | None) -> None:
    import os

    client = open_client(os.environ["MLFLOW_TRACKING_URI"])
    if version is None:
        client.delete_registered_model_alias("unidec", alias)
    else:
        client.set_registered_model_alias("unidec", alias, str(version))


# -- the choice
# --------------------------------------------------------------------------------------------------


def test_from_the_champion(work):
    found = pipeline.choose_start(work.params())
    sha256 = checked_sha256(work.bundle)
    note = {
        "kind": "warm",
        "model": "unidec",
        "version": "1",
        "bundle_sha256": sha256,
        "generation": 1,
    }
    assert found == ChosenStart(**note, reason="the champion, version 1")
    assert json.loads(paths.START.read_bytes()) == note
    assert checked_sha256(paths.BUNDLES / sha256[:16]) == sha256
    before = paths.START.read_bytes()
    assert pipeline.choose_start(work.params()) == found
    assert paths.START.read_bytes() == before
    assert start_tags() == {
        "start.kind": "warm",
        "start.model": "unidec",
        "start.version": "1",
        "start.bundle.sha256": sha256,
        "start.generation": "1",
    }


def test_without_a_champion(work):
    move("champion", None)
    assert pipeline.choose_start(work.params()) == ChosenStart(
        kind="cold", reason="unidec has no champion yet"
    )
    assert paths.START.read_bytes() == COLD
    assert start_tags() == {"start.kind": "cold"}
    named = work.params(**{"tracking.model_name": "another"})
    assert pipeline.choose_start(named).reason == "another has no champion yet"
    with pytest.raises(
        ConfigError, match=r"another has no champion yet(.|\n)*fix: retrain.start: cold"
    ):
        pipeline.choose_start(named, "warm")


def test_as_asked_for(work):
    assert pipeline.choose_start(work.params(), "cold").reason == "as requested"
    kind = pipeline.choose_start(work.params(**{"retrain.start": "cold"})).kind
    assert kind == "cold"
    assert pipeline.choose_start(work.params(**{"retrain.start": "cold"}), "auto").kind == "warm"
    assert (
        pipeline.choose_start(work.params(), "cold").kind == "cold"
        and paths.START.read_bytes() == COLD
    )


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"encoder.bag_words": 8}, "encoder.bag_words"),
        ({"model.dim": 8}, "model.dim or index.width"),
    ],
)
def test_a_champion_that_does_not_fit(work, change, key):
    params = work.params(**change)
    found = pipeline.choose_start(params)
    assert found.kind == "cold"
    assert found.reason == f"the champion, version 1, has another {key}"
    with pytest.raises(ConfigError, match=rf"another {key}(.|\n)*retrain.start: cold"):
        pipeline.choose_start(params, "warm")


def test_another_tokenizer(work, raw_factory):
    raw = raw_factory(seed=5)
    tiny_transformer("bert", raw, work.folder / "other")
    file = work.folder / "other" / "tokenizer.json"
    changed = json.loads(file.read_text())
    changed["model"]["unk_token"] = "[MASK]"
    file.write_text(json.dumps(changed))
    found = pipeline.choose_start(work.params(**{"encoder.name": str(work.folder / "other")}))
    assert found.kind == "cold" and "another tokenizer" in found.reason


@pytest.mark.parametrize(
    "change",
    [
        {"pool.beta": 1},
        {"optim.epochs": 3},
        {"encoder.residual": True},
    ],
    ids=str,
)
def test_other_parameters_than_the_champions(work, change):
    found = pipeline.choose_start(work.params(**change))
    assert found.kind == "cold"
    assert found.reason == f"other parameters than the champion's, version 1: {next(iter(change))}"
    assert pipeline.choose_start(work.params(**change), "warm").kind == "warm"


def test_what_is_not_learnt_may_differ(work):
    change = {
        "seed": 9,
        "index.clf_weight": 0.5,
        "run.checkpoint_minutes": 1.0,
        "warm.epochs": 2,
        "gate.margin": 1.0,
    }
    assert pipeline.choose_start(work.params(**change)).kind == "warm"


def test_two_starts(work):
    given = work.params(**{"encoder.start": str(work.folder)})
    assert pipeline.choose_start(given).reason.startswith("encoder.start names")
    pipeline.choose_start(work.params())
    with pytest.raises(
        ConfigError, match=r"two models to start from(.|\n)*retrain.start: cold, or encoder.start"
    ):
        effective(given)
    with pytest.raises(ConfigError, match="two models to start from"):
        pipeline.start_run(given)


# -- splits that changed
# ----------------------------------------------------------------------------------------------


def split_changed(raw: RawData, num_leaked: int) -> XMCDataset:
    """data/dataset with a test split of which the first queries are training queries of the
    champion.
    """
    champions = XMCDataset.open("data/dataset").rows("train")[:num_leaked]
    leaked = raw.queries["train"].take(champions)
    kept = np.setdiff1d(np.arange(raw.queries["train"].num_rows), champions)
    test = raw.queries["test"]
    rest = raw.take({"train": kept})
    relevance = vstack([raw.relevance["train"][champions], raw.relevance["test"]], format="csr")
    filters = vstack([raw.filter_pairs["train"][champions], raw.filter_pairs["test"]], format="csr")
    changed = RawData(
        raw.name,
        {"train": rest.queries["train"], "test": pa.concat_tables([leaked, test])},
        raw.labels,
        {"train": rest.relevance["train"], "test": relevance},
        {"train": rest.filter_pairs["train"], "test": filters},
    )
    return write_dataset("data/dataset", changed, validation_share=0.2)


def test_a_champion_that_knows_the_test_queries_is_no_start(work, tiny_raw):
    pipeline.choose_start(work.params())  # chosen before the splits changed
    dataset = split_changed(tiny_raw, 30)
    words = f"was trained on 30 of {len(dataset.rows('test'))} test queries"
    with pytest.raises(
        ConfigError, match=rf"knows the test queries(.|\n)*{words}(.|\n)*--start cold"
    ):
        pipeline.start_run(work.params())
    found = pipeline.choose_start(work.params())
    assert found.kind == "cold" and words in found.reason
    with pytest.raises(
        ConfigError,
        match=rf"{words}(.|\n)*accept it: validation.test_texts_in_train: warn",
    ):
        pipeline.choose_start(work.params(), "warm")
    for accepted in (
        {"validation.test_texts_in_train": "warn"},
        {"validation.test_texts_in_train": "1.0 error"},
    ):
        assert pipeline.choose_start(work.params(**accepted), "warm").kind == "warm"
    severity = {"validation.test_texts_in_train": "warn"}
    assert words in pipeline.choose_start(work.params(**severity), "warm").reason
    assert start.check_start(work.params(**severity)) == [
        f"the model that training starts or learns from {found.reason[25:]}"
    ]
    paths.START.write_bytes(COLD)
    named = work.params(**{"encoder.start": str(work.bundle / "model")})
    with pytest.raises(ConfigError, match=rf"{words}(.|\n)*start from scratch"):
        pipeline.start_run(named)


def test_a_few_test_queries_within_the_limit_are_no_reason(work, tiny_raw):
    dataset = split_changed(tiny_raw, 1)
    share = 1 / len(dataset.rows("test"))
    limit = {"validation.test_texts_in_train": f"{share} error"}
    found = pipeline.choose_start(work.params(**limit))
    assert found.kind == "warm" and found.reason == "the champion, version 1"


def test_what_a_model_has_seen_is_recorded(work, tiny_raw):
    first = write_dataset("first", tiny_raw, validation_share=0.2)
    own = np.flatnonzero(first.split_N != 2)
    found = seen.of_model(work.bundle / "model")
    assert found is not None
    assert found.complete
    assert found.among(first, own).all()


def test_a_warm_start_inherits_what_the_model_before_has_seen(work):
    pipeline.choose_start(work.params())
    training.train(work.params())
    before = seen.of_model(work.bundle / "model")
    after = seen.of_model(paths.MODEL)
    assert before is not None and after is not None and after.complete
    assert np.isin(before.hash_Q, after.hash_Q).all()
    pipeline.index(work.params())
    change = LabelChange.edit(Bundle.load(paths.BUNDLE), remove=["new"])
    with_labels(Bundle.load(paths.BUNDLE), "changed", change)
    kept = seen.of_model(Path("changed/model"))
    assert kept is not None and (kept.hash_Q == after.hash_Q).all()


# -- the file
# --------------------------------------------------------------------------------------------------


def test_the_effective_parameters(work):
    params = work.params()
    assert effective(params) is params
    pipeline.choose_start(params)
    assert effective(params).optim.epochs == 1 != params.optim.epochs
    assert effective(effective(params)) == effective(params)
    paths.START.unlink()
    assert effective(params) is params and read_start() is None


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"kind": "hot"}',
        '{"kind": "warm"}',
        '{"kind": "cold", "version": "1"}',
        '{"kind": "cold", "x": 1}',
        json.dumps(
            {"kind": "warm", "model": "m", "version": "1", "bundle_sha256": "xy", "generation": 1}
        ),
    ],
)
def test_a_damaged_file_is_named(work, text):
    paths.START.write_text(text)
    with pytest.raises(ArtifactError, match=r"data/start.json(.|\n)*restore it from git"):
        read_start()
    paths.START.write_bytes(COLD)
    assert read_start() is None


# -- the training
# --------------------------------------------------------------------------------------------------


def test_a_warm_training_from_choice_to_bundle(work):
    params = work.params()
    cold = start.run_identity(params)
    pipeline.choose_start(params)
    assert start.run_identity(params) != cold
    begun = pipeline.start_run(params)
    assert (begun.epochs, begun.num_rounds, begun.epochs_a_round) == (
        1,
        1,
        2,
    ) and read_start().version == "1"
    assert begun.lines[0] == "starts from unidec version 1, warm start number 1"
    done = training.train(params)
    said = []
    assert done.epoch == 1
    assert training.train(params, say=said.append).epoch == 1, "the same run"
    assert "is trained" in said[1], "the same run"
    champion = Bundle.load(work.bundle)
    assert (
        json.loads((paths.MODEL / "config.json").read_text())["start"] == read_start().model_dump()
    )
    pipeline.index(params)
    ours = Bundle.load(paths.BUNDLE)
    assert set(ours.uids.to_pylist()) - set(champion.uids.to_pylist()) == {"new"}
    assert Tracker.resume(done.run_dir).run_id
    # a model that was started has gone on: its first losses are below those of the cold one
    losses = [
        json.loads(line)["loss"]
        for line in (paths.MODEL / "history.jsonl").read_text().splitlines()
    ]
    first = read_json_lines(work.bundle.parent / "model" / "history.jsonl")[0]["loss"]
    assert losses[0] < first


def test_the_mlflow_run_says_what_it_started_from(work):
    import os

    pipeline.choose_start(work.params())
    begun = pipeline.start_run(work.params())
    run = open_client(os.environ["MLFLOW_TRACKING_URI"]).get_run(
        Tracker.resume(begun.folder).run_id
    )
    assert (
        run.data.tags["start.kind"] == "warm"
        and run.data.tags["start.bundle.sha256"] == read_start().bundle_sha256
    )
    assert run.data.params["optim.epochs"] == "1", "what it is trained with"


def test_generations_are_counted_by_the_bundles_themselves(work):
    params = work.params()
    pipeline.choose_start(params)
    training.train(params)
    pipeline.index(params)
    version = register_champion()
    found = pipeline.choose_start(params)
    assert (found.version, found.generation) == (str(version), 2)
    every = {"retrain.cold_every": 1}
    found = pipeline.choose_start(work.params(**every))
    assert found.kind == "cold" and found.reason == "1 warm starts in a row (retrain.cold_every)"
    assert pipeline.choose_start(work.params(**every), "warm").generation == 2
    assert pipeline.choose_start(work.params(**{"retrain.cold_every": 0})).generation == 2


def test_a_start_is_fetched_again_and_the_same_model_comes_out(work):
    params = work.params()
    pipeline.choose_start(params)
    training.train(params)
    files = read_manifest(paths.MODEL, "model", 1)["files"]
    for folder in (paths.BUNDLES, paths.RUNS):
        shutil.rmtree(folder)
    move("champion", None)  # who reproduces it needs the bundle, wherever the alias is now
    training.train(params)
    again = read_manifest(paths.MODEL, "model", 1)["files"]
    assert again.keys() == files.keys()
    for name in files:
        assert name.endswith(".jsonl") or again[name]["sha256"] == files[name]["sha256"], name


def test_a_start_that_is_gone_is_named(work):
    paths.START.write_text(
        WarmStart(model="unidec", version="1", bundle_sha256=SHA, generation=1).model_dump_json()
    )
    with pytest.raises(
        ArtifactError, match=r"no version of unidec holds this bundle(.|\n)*MLFLOW_TRACKING_URI"
    ):
        pipeline.start_run(work.params())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_processes_start_warm_too(work, monkeypatch):
    params = work.params(**{"run.devices": 2})
    pipeline.choose_start(params)
    run = pipeline.start_run(params)
    assert run.launcher is launch.torchrun
    fit(run)
    assert run.epoch == 1
    assert "memory" in read_json_lines(run.folder / "rounds.jsonl")[0]


# -- fetching
# --------------------------------------------------------------------------------------------------


def test_a_damaged_copy_is_fetched_again(work):
    pipeline.choose_start(work.params())
    begun = open_start()
    assert begun is not None
    (begun.model / "config.json").write_text("{}")
    again = open_start()
    assert again is not None
    num_labels = json.loads((again.model / "config.json").read_text())["num_labels"]
    assert num_labels == 40


def test_found_by_hash_where_the_version_is_another(work):
    sha256 = checked_sha256(work.bundle)
    assert (
        fetch_by_hash("unidec", sha256)
        == fetch_by_hash("unidec", sha256)
        == paths.BUNDLES / sha256[:16]
    )
    assert fetch_bundle("models:/unidec@champion") == paths.BUNDLES / sha256[:16]
    with pytest.raises(ConfigError, match="not in the registry"):
        fetch_bundle("models:/unidec@nobody")


def test_a_copy_that_is_whole_needs_no_registry(work, monkeypatch):
    pipeline.choose_start(work.params())
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{work.folder}/nothing.db")
    begun = open_start()
    assert begun is not None and len(begun.uids) == 40
    assert not (work.folder / "nothing.db").exists()


def test_a_registry_that_is_away_is_no_cold_start(work, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # nobody listens
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(MlflowException):
        pipeline.choose_start(work.params())
    with pytest.raises(MlflowException):
        find_alias("unidec", "champion")
    with pytest.raises(MlflowException):
        fetch_bundle("models:/unidec@champion")
    assert paths.START.read_bytes() == COLD
