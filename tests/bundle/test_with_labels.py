"""Bundles with another label set: each row against the label it belongs to, and what is
answered.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.label_vectors import label_vectors

from unidec.bundle.bundle import Bundle
from unidec.bundle.bundle_folder import (
    KIND,
    VERSION,
    BundleLabels,
    Facts,
    KnnInfo,
    Scoring,
    write_bundle,
)
from unidec.bundle.label_change import LabelChange, estimated_rows, with_labels
from unidec.bundle.label_file import LabelText
from unidec.config import Params
from unidec.config.index_spec import IndexSpec
from unidec.data.dataset import XMCDataset
from unidec.data.storage import read_manifest, write_folder
from unidec.data.tokens import encode_texts
from unidec.errors import ArtifactError, DataError
from unidec.model.unidec import UniDEC
from unidec.ranking.index import LabelIndex
from unidec.ranking.neighbours import Neighbours
from unidec.ranking.ranker import Calibration
from unidec.training.trainer import Trainer

Labels = dict[str, str]  # uid -> title


@pytest.fixture
def bundle(
    tmp_path: Path,
    open_trainer: Callable[..., Trainer],
    tiny_params: Callable[..., Params],
    tiny_dataset: XMCDataset,
    rng: np.random.Generator,
) -> Callable[..., Bundle]:
    """`bundle(votes=True, kind="hnsw", **parameters)`: of a real, small model whose classifier has
    random rows.
    """

    def make(
        votes: bool = False, kind: Any = "flat", text: str = "title", **overrides: Any
    ) -> Bundle:
        model = open_trainer("run", **overrides).model
        normalize = tiny_params(**overrides).index.clf_normalize
        # rows as training leaves them: of their own length, not what their text says
        with torch.no_grad():
            for table in model.tables().values():
                if table is model.table or table is model.bias:
                    table.weight.copy_(
                        torch.from_numpy(rng.normal(size=table.weight.shape)).to(table.weight.dtype)
                    )
        with write_folder(tmp_path / "model", "model", 1, {"run": "abc"}) as out:
            model.save_into(out)
        return full(
            tmp_path / "bundle", tmp_path / "model", tiny_dataset, votes, kind, text, normalize
        )

    return make


def full(
    path: Path,
    model_path: Path,
    dataset: XMCDataset,
    votes: bool,
    kind: Any,
    text: str,
    normalize: bool,
) -> Bundle:
    """A bundle as stage `index` builds it."""
    model = UniDEC.load(model_path)
    tokens = encode_texts(dataset.label_texts(), model.tokenizer_folder, model.max_length)
    de_LD, (clf_LD, bias_L) = model.encode_labels(tokens), model.classifier_table()
    space: Any = model.heads
    neighbours = None
    if votes:
        rows = dataset.rows("train")
        queries = encode_texts(dataset.query_texts(rows), model.tokenizer_folder, model.max_length)
        de, clf = model.encode_queries(queries)
        vectors = de if de is not None else clf
        assert vectors is not None
        labels = dataset.relevance[rows]
        neighbours = Neighbours(
            vectors, labels, dataset.query_uids(rows), dataset.query_texts(rows)
        )
    head: Any = "clf" if model.heads == "clf" else "de"
    write_bundle(
        path,
        model_path,
        LabelIndex.build(
            label_vectors(de_LD, clf_LD, bias_L, space, normalize), IndexSpec(kind=kind)
        ),
        BundleLabels(
            dataset.label_uids(),
            dataset.label_texts(),
            {"de": de_LD, "clf": clf_LD, "bias": bias_L},
        ),
        Scoring(
            space,
            0.7,
            normalize,
            None if neighbours is None else KnnInfo.of(neighbours, 0.5, 5, head),
        ),
        Facts(
            text,
            {"name": "tiny", "sha256": "0" * 64},
            {"validation": {"P@1": 5.0}},
            model.params,
            {"profile": {"queries": 3}},
        ),
        neighbours,
    )
    return Bundle.load(path)


def labels_of(bundle: Bundle) -> Labels:
    return dict(zip(bundle.uids.to_pylist(), bundle.titles.to_pylist(), strict=True))


def relabelled(
    bundle: Bundle, path: Path, labels: Labels, **options: Any
) -> tuple[LabelChange, Bundle]:
    change = LabelChange.of(bundle, list(labels), list(labels.values()))
    return change, Bundle.load(with_labels(bundle, path, change, **options))


def a_change(labels: Labels, rng: np.random.Generator) -> Labels:
    """About a quarter gone, a few with another title, some new, all in another order."""
    kept = {uid: title for uid, title in labels.items() if rng.random() < 0.75}
    for uid in list(kept)[:3]:
        kept[uid] = f"garden {kept[uid]}"
    kept |= {f"new-{i}": f"river label w{i}" for i in range(6)}
    return {uid: kept[uid] for uid in rng.permutation(list(kept)).tolist()}


VARIANTS = [
    {},
    {"model.clf_bias": True, "index.clf_normalize": False, "kind": "hnsw"},
    {"model.clf_dtype": "bf16", "index.clf_normalize": False, "votes": True},
    {"model.heads": "de", "votes": True},
    {"model.heads": "clf", "votes": True, "model.clf_init": "normal"},
    {"model.clf_residual": True},
    {"encoder.kind": "transformer", "text": "title+content"},
]


@pytest.mark.parametrize(
    "variant", VARIANTS, ids=[",".join(variant) or "default" for variant in VARIANTS]
)
def test_every_row_is_its_labels(
    variant: dict[str, Any], bundle: Callable[..., Bundle], rng: np.random.Generator, tmp_path: Path
) -> None:
    before = bundle(**variant)
    old = labels_of(before)
    new = a_change(old, rng)
    change, after = relabelled(before, tmp_path / "new", new)
    assert labels_of(after) == new
    assert list(labels_of(after)) == list(new)
    assert (set(change.added), set(change.removed)) == (
        new.keys() - old.keys(),
        old.keys() - new.keys(),
    )
    assert set(change.renamed) == {uid for uid in new.keys() & old.keys() if new[uid] != old[uid]}
    assert change
    assert change.counts["kept"] == len(new.keys() & old.keys())
    for uid, title in new.items():
        row = after.row_of[uid]
        tokens = encode_texts([title], before.model.tokenizer_folder, before.model.max_length)
        de, clf = before.model.encode_queries(tokens)  # both sides share encoder and heads
        if (
            "de" in after.vectors
            and uid in old
            and title == old[uid]
            and before.info.text == "title"
        ):
            expected = before.vectors["de"][before.row_of[uid]]
            assert np.array_equal(after.vectors["de"][row], expected)
        elif "de" in after.vectors:
            np.testing.assert_allclose(after.vectors["de"][row], de[0], atol=1e-5)
        for name in {"clf", "bias"} & after.vectors.keys():
            own = after.vectors[name][row]
            if uid in old:
                assert np.array_equal(own, before.vectors[name][before.row_of[uid]])
            elif name == "bias":
                assert own == pytest.approx(before.vectors["bias"].mean(), abs=1e-6)
            else:
                wanted = estimated_rows(
                    before.vectors, np.arange(before.num_labels), clf, de, before.info.clf_normalize
                )[0]
                np.testing.assert_allclose(own, wanted[0], atol=1e-5)
    # the model is the old one's; it has no classifier rows of its own
    assert (
        after.model.table is None
        and after.model.bias is None
        and after.model.num_labels == len(new)
    )
    weights = [b.path / "model" / "model.safetensors" for b in (before, after)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    estimated = {
        after.uids[row].as_py() for begin, end in after.info.estimated for row in range(begin, end)
    }
    assert estimated == (set(change.added) if "clf" in after.vectors else set())
    assert after.info.card == before.info.card
    assert after.info.params == before.info.params
    assert after.info.metrics == {}  # those of the other label set would be a lie
    if before.neighbours is not None:
        assert after.neighbours is not None
        assert voters(after) == {
            query: kept
            for query, labels in voters(before).items()
            if (kept := labels & new.keys()) or not labels
        }


def voters(bundle: Bundle) -> dict[str, set[str]]:
    """uid of each training query that votes -> uids of its labels."""
    assert bundle.neighbours is not None
    matrix = bundle.neighbours.labels_ML
    uids = bundle.uids.to_pylist()
    return {
        query: {uids[i] for i in matrix[row].indices}
        for row, query in enumerate(bundle.neighbours.uids.to_pylist())
    }


@pytest.mark.parametrize("variant", VARIANTS[:2] + VARIANTS[4:], ids=str)
def test_equals_a_bundle_built_in_full(
    variant: dict[str, Any],
    bundle: Callable[..., Bundle],
    tiny_dataset: XMCDataset,
    rng: np.random.Generator,
    tmp_path: Path,
) -> None:
    """Labels that are taken out and put back, by two changes: every file but bundle.json has the
    bytes it had.
    """
    before = bundle(**variant)
    labels = labels_of(before)
    more = {"new": "river"} | {uid: labels[uid] for uid in rng.permutation(list(labels)).tolist()}
    change, between = relabelled(before, tmp_path / "more", more)
    assert change.added == ["new"]
    assert change.removed == []
    assert change.counts["kept"] == len(labels)
    change, after = relabelled(between, tmp_path / "back", labels)
    assert (change.added, change.removed) == ([], ["new"])
    # where every text is encoded again the batches differ, and with them the last bits; a graph
    # keeps what was in it
    if "text" not in variant and "kind" not in variant:
        one, other = (read_manifest(side.path, KIND, VERSION)["files"] for side in (before, after))
        assert {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)} == {
            "bundle.json"
        }
    texts = tiny_dataset.query_texts()[:20]
    for one, other in zip(before.predict(texts, 7), after.predict(texts, 7), strict=True):
        assert one.labels == other.labels
        np.testing.assert_allclose(one.scores, other.scores, atol=1e-5)


def test_labels_that_leave_are_answered_no_more_and_all_else_stays(
    bundle: Callable[..., Bundle],
    tiny_dataset: XMCDataset,
    rng: np.random.Generator,
    tmp_path: Path,
) -> None:
    before = bundle()
    labels = labels_of(before)
    gone = rng.choice(list(labels), 9, replace=False).tolist()
    change, after = relabelled(
        before, tmp_path / "new", {uid: t for uid, t in labels.items() if uid not in gone}
    )
    assert sorted(change.removed) == sorted(gone)
    assert not len(change.encoded_S)
    texts = tiny_dataset.query_texts()
    wanted = before.predict(texts, 5, exclude=[gone] * len(texts))
    for one, other in zip(wanted, after.predict(texts, 5), strict=True):
        assert (one.labels, one.titles, one.de_scores, one.clf_scores) == (
            other.labels,
            other.titles,
            other.de_scores,
            other.clf_scores,
        )


def test_a_new_label_is_found_by_its_text(bundle: Callable[..., Bundle], tmp_path: Path) -> None:
    before = bundle(**{"model.heads": "de"})
    change, after = relabelled(
        before, tmp_path / "new", labels_of(before) | {"x": "planet bread engine"}
    )
    assert change.added == ["x"]
    assert change.source_L[-1] == -1
    assert after.predict(["planet bread engine"], 1)[0].labels == ["x"]


@pytest.mark.parametrize("variant", [{"votes": True}, {"model.heads": "de"}, {}], ids=str)
def test_example_queries_bring_a_new_label_forward(
    variant: dict[str, Any], bundle: Callable[..., Bundle], tmp_path: Path
) -> None:
    before = bundle(**variant)
    add = [LabelText("x", "planet"), LabelText("y", "engine")]
    query = "bread river garden"
    ranks = []
    for name, examples in (("without", []), ("with", [LabelText("x", query)])):
        change = LabelChange.edit(before, add, examples=examples)
        after = Bundle.load(with_labels(before, tmp_path / name, change))
        ranks.append(after.predict([query], after.num_labels)[0].labels.index("x"))
    assert ranks[1] < ranks[0]
    assert after.info.estimated == (
        [] if before.info.space == "de" else [(before.num_labels, before.num_labels + 2)]
    )
    if before.neighbours is not None:
        assert voters(after) == voters(before) | {"example 1": {"x"}}


def test_examples_of_a_whole_label_set_are_for_estimated_rows(
    bundle: Callable[..., Bundle], tmp_path: Path
) -> None:
    """A label that was added before is estimated again; the given training queries vote once."""
    before = bundle(votes=True)
    added = LabelChange.edit(before, [LabelText("x", "planet")])
    by_text = Bundle.load(with_labels(before, tmp_path / "by-text", added))
    labels = labels_of(by_text) | {"y": "engine"}
    examples = [LabelText("x", "bread river garden"), LabelText("y", "hill road")]
    change = LabelChange.of(
        by_text, list(labels), list(labels.values()), list(labels.values()), examples
    )
    edited = LabelChange.edit(
        before, [LabelText("x", "planet"), LabelText("y", "engine")], examples=examples
    )
    at_once = Bundle.load(with_labels(before, tmp_path / "at-once", edited))
    neighbours = at_once.neighbours
    after = Bundle.load(
        with_labels(by_text, tmp_path / "later", change, neighbours=at_once.neighbours)
    )
    assert after.info.estimated == at_once.info.estimated
    for name, vectors in after.vectors.items():
        np.testing.assert_array_equal(vectors, at_once.vectors[name])
    assert neighbours is not None and after.neighbours is not None
    assert (after.neighbours.labels_ML != neighbours.labels_ML).nnz == 0
    assert after.neighbours.titles.to_pylist() == neighbours.titles.to_pylist()


def test_queries_whose_labels_all_leave_do_not_vote(
    bundle: Callable[..., Bundle], tmp_path: Path
) -> None:
    before = bundle(votes=True)
    before.info = before.info.model_copy(
        update={"calibration": Calibration(scores=[0.5], probabilities=[0.5])}
    )
    _, same_votes = relabelled(before, tmp_path / "more", labels_of(before) | {"x": "river"})
    assert same_votes.info.calibration == before.info.calibration
    _, after = relabelled(before, tmp_path / "new", {"x": "river", "y": "bread"})
    assert after.info.calibration is None, "scores without votes are others"
    assert after.neighbours is None
    assert after.info.knn is None
    assert after.num_labels == 2
    assert len(after.predict(["river"], 5)[0].labels) == 2


def test_the_votes_of_the_present_data(bundle: Callable[..., Bundle], tmp_path: Path) -> None:
    before = bundle(votes=True)
    labels = labels_of(before) | {"x": "river"}
    old = before.neighbours
    assert old is not None
    votes = np.zeros((old.num_queries, len(labels)), dtype=np.float32)
    votes[:, -1] = 1
    from scipy.sparse import csr_matrix

    given = Neighbours(old.vectors_MD, csr_matrix(votes), old.uids, old.titles)
    _, after = relabelled(before, tmp_path / "new", labels, neighbours=given)
    answer = after.predict(["garden"], len(labels))[0]
    assert {uid for uid, votes in zip(answer.labels, answer.knn_scores, strict=True) if votes} == {
        "x"
    }
    silent = Bundle.load(before.path)
    silent.info = silent.info.model_copy(update={"knn": None})
    with pytest.raises(ValueError, match="no training queries vote"):
        relabelled(silent, tmp_path / "other", labels, neighbours=given)


def test_nothing_changed_is_no_change(bundle: Callable[..., Bundle]) -> None:
    before = bundle()
    labels = labels_of(before)
    assert not LabelChange.of(before, list(labels), list(labels.values()))
    # an answer names rows
    assert LabelChange.of(before, list(labels)[::-1], list(labels.values())[::-1])


def test_one_label_and_a_text_without_words(bundle: Callable[..., Bundle], tmp_path: Path) -> None:
    change, after = relabelled(bundle(), tmp_path / "new", {"only": ""})
    assert len(change.removed) == 40
    assert change.counts["kept"] == 0
    assert after.predict(["river", ""], 3)[0].labels == ["only"]


@pytest.mark.parametrize(
    ("uids", "texts", "words"),
    [
        ([], [], "at least one"),
        (["a"], ["x", "y"], "2 texts"),
        (["a", "b", "a"], ["x", "y", "z"], r"more than once(.|\n)*    a\n"),
    ],
)
def test_label_sets_that_are_none(
    uids: list[str], texts: list[str], words: str, bundle: Callable[..., Bundle]
) -> None:
    with pytest.raises(DataError, match=words):
        LabelChange.of(bundle(), uids, texts)


def test_a_bundle_damaged_since_it_was_opened_is_noticed(
    bundle: Callable[..., Bundle], tmp_path: Path
) -> None:
    before = bundle()
    where = before.path / "model" / "config.json"
    where.write_text(json.dumps({"encoder": {}}))
    with pytest.raises(ArtifactError, match=r"config\.json"):
        relabelled(before, tmp_path / "new", labels_of(before) | {"x": "river"})
    assert not (tmp_path / "new").exists()
