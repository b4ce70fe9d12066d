"""A bundle as the teacher of a training: what it scores, its cache, the run's identity, and what is
refused.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers.raw_files import write_raw
from helpers.tiny_training import tiny_params

from unidec import pipeline
from unidec.bundle.bundle import Bundle
from unidec.data.dataset import XMCDataset, write_dataset
from unidec.data.json_file import read_json_lines
from unidec.data.storage import read_json
from unidec.errors import ArtifactError, ConfigError
from unidec.pipeline import (
    data_sizes,
    memory_plan,
    memory_probe,
    paths,
    ranking,
    seen,
    start,
    teaching,
)
from unidec.ranking import fusion_fit
from unidec.ranking.word_scores import WordScorer
from unidec.training.fit import fit

pytestmark = pytest.mark.timeout(120)
TAUGHT = {"teacher.bundle": "teacher"}


@pytest.fixture(scope="module")
def made(tmp_path_factory, tiny_raw, tiny_bert):
    """A working folder with the data, and `teacher/`, the bundle of a wider bag."""
    folder = tmp_path_factory.mktemp("taught")
    (folder / "raw").mkdir()
    write_raw(tiny_raw, folder / "raw", "xmc-json")
    shutil.copytree(tiny_bert, folder / "bert")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/mlflow.db")
        first = params(**{"model.dim": 24, "model.clf_bias": True})
        for name in ("ingest", "tokens", "propensity"):
            getattr(pipeline, name)(first)
        pipeline.label_graph(params(**{"pool.gandalf": True}))
        trained(first)
        pipeline.index(first)
        shutil.copytree(paths.BUNDLE, "teacher")
    return folder


@pytest.fixture
def work(made, tmp_path, monkeypatch):
    """A copy of the folder, as the working folder."""
    shutil.copytree(made, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/copy/mlflow.db")
    return tmp_path / "copy"


def params(**values):
    common = {"data.path": "raw", "data.validation_share": 0.1, "optim.epochs": 2}
    return tiny_params(Path("bert"), **common | values)


def trained(of):
    run = pipeline.start_run(of)
    fit(run)
    run.export()
    return run


@pytest.mark.parametrize("gandalf", [False, True])
def test_the_plan_counts_it(work, gandalf):
    of = params(**TAUGHT | {"pool.gandalf": gandalf, "pool.batch_size": 16})
    without = params(**{"pool.gandalf": gandalf, "pool.batch_size": 16})
    sizes = data_sizes.stored_sizes(of)
    step = memory_probe.measure(of, sizes, gpu=False, half=False)
    alone = memory_probe.measure(without, sizes, gpu=False, half=False)
    more = step.step["heads and losses"] - alone.step["heads and losses"]
    width = 48  # of both heads, without the bias, which the search does not need
    of_queries = 2 * 16 * width
    of_labels = 4 * step.num_labels * width
    vectors = of_queries + of_labels
    assert more >= vectors + 4 * 16 * step.num_labels  # at least a softmax for the backward pass
    plan = memory_plan.plan_memory(of, sizes)
    (cached,) = [one for one in plan.amounts if "teacher" in one.name]
    rows_n = teaching.open_teacher(of).rows_n
    stored_width = teaching.teacher_width("teacher")
    assert cached.num_bytes >= 2 * len(rows_n) * stored_width


@pytest.mark.parametrize("gandalf", [False, True])
def test_its_vectors_give_the_bundles_scores(work, gandalf):
    vectors = teaching.open_teacher(params(**TAUGHT | {"pool.gandalf": gandalf}))
    dataset = XMCDataset.open(paths.DATASET)
    bundle = Bundle.load("teacher")
    rows = dataset.rows("train")
    texts = dataset.query_texts(rows)
    if gandalf:
        labels = np.arange(dataset.num_labels)
        rows = np.concatenate([rows, dataset.num_queries + labels])
        texts += dataset.label_texts()
    assert vectors.rows_n.tolist() == rows.tolist()
    assert vectors.query_nE.dtype == np.float16
    assert isinstance(vectors.query_nE, np.memmap)
    labels = np.array([3, 0, 17])
    scores = vectors.query_nE.astype(np.float32) @ vectors.of_labels(labels).T
    encoded = bundle.encode(texts)
    queries = bundle.ranker.heads.queries(encoded.de_BD, encoded.clf_BD)
    expected = bundle.ranker.heads.scores(queries, np.tile(labels, (len(rows), 1)))
    np.testing.assert_allclose(scores, expected, atol=2e-3)


def test_the_texts_are_encoded_once(work, monkeypatch):
    teaching.open_teacher(params(**TAUGHT))
    caches = sorted(paths.CACHE.glob("teacher-*"))
    with monkeypatch.context() as patch:
        patch.setattr(Bundle, "encode", lambda self, texts: pytest.fail("encoded again"))
        teaching.open_teacher(params(**TAUGHT))
    teaching.open_teacher(params(**TAUGHT | {"pool.gandalf": True}))
    assert len(caches) == 1
    assert len(list(paths.CACHE.glob("teacher-*"))) == 2
    (caches[0] / "queries.npy").write_bytes(b"damaged")
    with pytest.raises(ArtifactError, match=r"queries\.npy"):
        teaching.open_teacher(params(**TAUGHT))


def test_it_decides_the_training_by_content(work):
    taught = trained(params(**TAUGHT))
    assert not trained(params()).folder.samefile(taught.folder)
    shutil.copytree("teacher", "moved")
    moved = params(**{"teacher.bundle": "moved"})
    assert start.run_identity(moved) == start.run_identity(params(**TAUGHT))
    again = pipeline.start_run(moved)
    assert again.folder.samefile(taught.folder) and again.finished
    pipeline.inputs(params(**TAUGHT))
    decides = read_json(paths.INPUTS / "training.json")
    assert pipeline.inputs(moved)["changed"] == "nothing"
    trained(params(**{"seed": 9}))
    pipeline.index(params())
    other = params(**{"teacher.bundle": str(paths.BUNDLE)})
    assert start.run_identity(other) != start.run_identity(moved)
    assert pipeline.inputs(other)["changed"] == "training"
    assert decides["teacher.bundle"] == Bundle.load("teacher").sha256


def test_a_student_is_an_ordinary_model(work):
    for name, values in (("alone", {}), ("taught", TAUGHT)):
        run = trained(params(**values))
        pipeline.index(params(**values))
        shutil.copytree(paths.BUNDLE, name)
        history = read_json_lines(run.folder / "history.jsonl")
        losses = [line["loss"] for line in history]
        assert np.isfinite(losses).all()
    alone, taught = (Bundle.load(name) for name in ("alone", "taught"))
    assert {path.relative_to("taught") for path in Path("taught").rglob("*")} == {
        path.relative_to("alone") for path in Path("alone").rglob("*")
    }
    assert {name: array.shape for name, array in taught.vectors.items()} == {
        name: array.shape for name, array in alone.vectors.items()
    }
    assert not np.array_equal(taught.vectors["de"], alone.vectors["de"])


def test_a_teacher_with_other_labels_is_refused(work, tiny_raw):
    labels = tiny_raw.labels.take(np.r_[1, 0, np.arange(2, tiny_raw.num_labels)])
    dataset = write_dataset(paths.DATASET, type(tiny_raw)(**vars(tiny_raw) | {"labels": labels}))
    with pytest.raises(
        ConfigError,
        match=r"teacher\.bundle: the teacher has other labels(.|\n)*their order(.|\n)*fix: a ",
    ):
        teaching.open_teacher(params(**TAUGHT))
    assert dataset.num_labels == 40
    assert not list(paths.CACHE.glob("teacher-*"))


def test_a_folder_that_is_no_bundle_is_refused(work):
    for folder in ("nowhere", "teacher/model"):
        with pytest.raises(ArtifactError):
            teaching.open_teacher(params(**{"teacher.bundle": folder}))
    with pytest.raises(ArtifactError, match="nowhere"):
        pipeline.start_run(params(**{"teacher.bundle": "nowhere"}))


def test_what_the_teacher_has_seen_counts_as_seen(work, tiny_raw):
    """After the splits changed, a teacher that was trained on test queries is refused; a student
    has seen what its teacher has.
    """
    before = seen.of_model(Path("teacher/model"))
    queries = tiny_raw.queries
    swapped = dict(zip(queries, reversed(queries.values()), strict=True))
    changed = {
        "queries": swapped,
        "relevance": dict(zip(queries, reversed(list(tiny_raw.relevance.values())), strict=True)),
        "filter_pairs": dict(
            zip(queries, reversed(list(tiny_raw.filter_pairs.values())), strict=True)
        ),
    }
    write_dataset(paths.DATASET, type(tiny_raw)(**vars(tiny_raw) | changed), validation_share=0.1)
    for name in ("tokens", "propensity"):
        getattr(pipeline, name)(params())
    with pytest.raises(
        ConfigError, match=r"teacher\.bundle: .* knows the test queries(.|\n)*without a teacher"
    ):
        pipeline.start_run(params(**TAUGHT))
    accepted = params(**TAUGHT | {"validation.test_texts_in_train": "warn"})
    (said,) = start.check_start(accepted)
    assert said.startswith("the model that training starts or learns from was trained on")
    trained(accepted)
    after = seen.of_model(paths.MODEL)
    assert np.isin(before.hash_Q, after.hash_Q).all() and after.complete
    assert len(after.hash_Q) > len(before.hash_Q)


BY_WORDS = {"teacher.words": True, "seed": 3}


@pytest.fixture
def few_queries_are_enough(monkeypatch):
    monkeypatch.setattr(fusion_fit, "LEAST_WORD_QUERIES", 1)
    monkeypatch.setattr(fusion_fit, "WORD_STEPS", 30)


def test_probabilities_by_words_are_those_of_the_word_network(work, few_queries_are_enough):
    of = params(**BY_WORDS)
    targets = teaching.open_teacher(of)
    dataset = XMCDataset.open(paths.DATASET)
    rows = dataset.rows("train")
    assert targets.rows_n.tolist() == rows.tolist()
    scorer = WordScorer(ranking.word_neighbours(dataset, Path("bert")), 100)
    filtered = dataset.filter_pairs[rows].toarray() > 0
    excluded = np.flatnonzero(filtered)
    network = fusion_fit.fit_word_network(scorer, excluded, 3)
    assert not (targets.probability_nL.toarray() * filtered).any()
    for place in range(len(rows)):
        one = np.array([place])
        scores = scorer.score(scorer.neighbours.vectors_MD[one], one)
        label_P = scores.candidates()
        label_P = label_P[~filtered[place][label_P]]
        by_words = network.scores(scores.features(np.zeros_like(label_P), label_P))
        expected = np.zeros(dataset.num_labels)
        expected[label_P] = np.exp(by_words) / np.exp(by_words).sum()
        expected[expected < 1e-4] = 0
        found = targets.probability_nL[place].toarray()[0]
        np.testing.assert_allclose(found, expected, atol=1e-4)


def test_the_word_network_runs_once_for_a_seed_and_the_code_that_ranks(
    work, few_queries_are_enough, monkeypatch
):
    teaching.open_teacher(params(**BY_WORDS))
    (cache,) = paths.CACHE.glob("words-*")
    with monkeypatch.context() as patch:
        patch.setattr(teaching, "word_neighbours", lambda *_: pytest.fail("read again"))
        teaching.open_teacher(params(**BY_WORDS))
    teaching.open_teacher(params(**BY_WORDS | {"seed": 4}))
    assert len(list(paths.CACHE.glob("words-*"))) == 2
    with monkeypatch.context() as patch:
        patch.setattr(teaching, "code_sha256", lambda *_: "0" * 64)
        teaching.open_teacher(params(**BY_WORDS))
    assert len(list(paths.CACHE.glob("words-*"))) == 3
    (cache / "data.npy").write_bytes(b"damaged")
    with pytest.raises(ArtifactError, match=r"data\.npy"):
        teaching.open_teacher(params(**BY_WORDS))


def test_a_training_that_words_teach(work, few_queries_are_enough):
    run = trained(params(**BY_WORDS | {"teacher.weight": 0.5}))
    losses = [
        line["loss"] for line in read_json_lines(run.folder / "history.jsonl") if "loss" in line
    ]
    assert losses and np.isfinite(losses).all()


def test_too_few_training_queries_for_words_are_refused(work):
    with pytest.raises(ConfigError) as refused:
        teaching.open_teacher(params(**BY_WORDS))
    assert refused.value.where == "teacher.words"
    assert not list(paths.CACHE.glob("words-*"))
