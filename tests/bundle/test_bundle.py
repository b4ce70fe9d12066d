"""Bundles: what they answer against loops over all labels, filters, files in and out, and the
folder itself.
"""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.slow_scores import head_scores
from helpers.tiny_bundle import DIM, TITLES, UIDS, predict_file, write_model, write_tiny_bundle

from unidec.bundle.bundle import Bundle
from unidec.bundle.bundle_folder import BundleLabels, Scoring, write_bundle
from unidec.data.storage import folder_sha256
from unidec.data.tokens import encode_texts
from unidec.errors import ArtifactError, DataError
from unidec.ranking.index import LabelIndex
from unidec.ranking.ranker import Calibration

pytestmark = pytest.mark.usefixtures("stub_model")
QUERIES = ["red car", "an old house", "", "boat boat blue", "🚗 unknown \x00 words"]


def _slow(
    parts: dict, texts: list[str], k: int, exclude: list[list[str]], space, weight, normalize
):
    """Scores of all labels one by one, sorted."""
    model = parts["model"]
    de, clf = model.encode_queries(
        encode_texts(texts, model.tokenizer_folder, 8), np.arange(len(texts))
    )
    out = []
    for i in range(len(texts)):
        de_D = None if de is None else de[i]
        clf_D = None if clf is None else clf[i]
        rows = []
        for j, uid in enumerate(UIDS):
            if uid in exclude[i]:
                continue
            s_de, s_clf = head_scores(parts, de_D, clf_D, j, normalize)
            total = {"both": s_de + weight * s_clf, "de": s_de, "clf": s_clf}[space]
            rows.append((total, uid, TITLES[j], s_de, s_clf))
        out.append(sorted(rows, key=lambda row: -row[0])[:k])
    return out


@pytest.mark.parametrize(
    ("heads", "space", "normalize", "bias", "kind"),
    [
        ("both", "both", True, False, "flat"),
        ("both", "both", False, True, "flat"),
        ("both", "both", False, False, "hnsw"),
        ("both", "de", True, False, "flat"),
        ("both", "clf", False, True, "hnsw"),
        ("de", "de", True, False, "flat"),
        ("clf", "clf", True, False, "flat"),
    ],
)
def test_predicts_as_a_loop_over_all_labels(rng, tmp_path, heads, space, normalize, bias, kind):
    parts = write_tiny_bundle(
        tmp_path / "b", rng, heads=heads, space=space, kind=kind, clf_normalize=normalize, bias=bias
    )
    bundle = Bundle.load(tmp_path / "b")
    exclude = [["L0", "L3"], [], ["nobody"], UIDS[:11], ["L5", "L5"]]
    for k in (1, 3, 12, 40):
        found = bundle.predict(QUERIES, k=k, exclude=exclude, batch_size=2)
        expected = _slow(parts, QUERIES, k, exclude, space, 0.5, normalize)
        for got, rows in zip(found, expected, strict=True):
            assert len(got.labels) == len(got.titles) == len(got.scores) == len(rows)
            np.testing.assert_allclose(got.scores, [row[0] for row in rows], rtol=1e-4, atol=1e-5)
            at = {row[1]: row for row in rows}
            for i, uid in enumerate(got.labels):
                if uid not in at:  # a tie at the end of the list
                    assert got.scores[i] == pytest.approx(rows[-1][0], abs=1e-5)
                    continue
                assert got.titles[i] == at[uid][2]
                assert got.scores[i] == pytest.approx(at[uid][0], abs=1e-5)
                if heads != "clf":
                    assert got.de_scores[i] == pytest.approx(at[uid][3], abs=1e-5)
                if heads != "de":
                    assert got.clf_scores[i] == pytest.approx(at[uid][4], rel=1e-4, abs=1e-5)
            assert not got.de_scores if heads == "clf" else len(got.de_scores) == len(rows)
            assert not got.clf_scores if heads == "de" else len(got.clf_scores) == len(rows)


def test_exclusion_only_touches_its_own_query(rng, tmp_path):
    write_tiny_bundle(tmp_path / "b", rng)
    bundle = Bundle.load(tmp_path / "b")
    free = bundle.predict(["red car", "red car"], k=4)
    assert free[0] == free[1]
    first = free[0].labels[0]
    one, two = bundle.predict(["red car", "red car"], k=3, exclude=[[first], []])
    assert one.labels == free[0].labels[1:4]
    assert two.labels == free[0].labels[:3]
    assert bundle.predict(["red"], exclude=[UIDS])[0].labels == []
    assert bundle.predict([]) == []
    assert bundle.predict_arrays([], k=3).rows.shape == (0, 3)


def test_the_batch_does_not_matter(rng, tmp_path):
    write_tiny_bundle(tmp_path / "b", rng)
    bundle = Bundle.load(tmp_path / "b")
    texts = [" ".join(rng.choice(["red", "blue", "car", "house", "xyz"], 3)) for _ in range(57)]
    whole = bundle.predict_arrays(texts, k=6, batch_size=1000)
    pieces = bundle.predict_arrays(texts, k=6, batch_size=7)
    np.testing.assert_allclose(whole.scores, pieces.scores, rtol=1e-5, atol=1e-6)
    table = bundle.predict_table(texts, k=6)
    assert table["query_row"].to_pylist() == np.repeat(np.arange(57), 6).tolist()
    assert table["rank"].to_pylist() == [1, 2, 3, 4, 5, 6] * 57


def test_wrong_input_is_refused(rng, tmp_path):
    write_tiny_bundle(tmp_path / "b", rng)
    bundle = Bundle.load(tmp_path / "b")
    for wrong in (
        lambda: bundle.predict("red"),
        lambda: bundle.predict(["red"], k=0),
        lambda: bundle.predict(["red", 3]),  # type: ignore[list-item]
        lambda: bundle.predict(["red", None]),  # type: ignore[list-item]
        lambda: bundle.predict(["a", "b"], exclude=[["L0"]]),
        lambda: bundle.predict(["\ud800"]),
    ):
        with pytest.raises(DataError):
            wrong()


def test_probabilities_are_those_of_the_scores(rng, tmp_path):
    calibration = Calibration(scores=[-0.5, 0.0, 1.0], probabilities=[0.125, 0.25, 0.75])
    write_tiny_bundle(tmp_path / "b", rng, votes=True, calibration=calibration)
    bundle = Bundle.load(tmp_path / "b")
    assert bundle.info.calibration == calibration
    found = bundle.predict(QUERIES, k=12)
    scores = [score for one in found for score in one.scores]
    expected = [
        0.125 if s < -0.5 else 0.25 + s / 4 if s < 0 else 0.25 + s / 2 if s < 1 else 0.75
        for s in scores
    ]
    assert min(expected) < 0.25 and max(expected) == 0.75
    assert [value for one in found for value in one.probabilities] == pytest.approx(
        expected, abs=1e-6
    )
    column = bundle.predict_table(QUERIES, k=12)["probability"]
    assert column.to_pylist() == pytest.approx(expected, abs=1e-6)
    (tmp_path / "in.csv").write_text("query\nred car\n")
    predict_file(bundle, tmp_path / "in.csv", tmp_path / "out.jsonl", k=2)
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    probabilities = [row["probability"] for row in rows]
    assert probabilities == bundle.predict(["red car"], k=2)[0].probabilities
    bundle.info = bundle.info.model_copy(update={"calibration": None})
    assert bundle.predict(["red"])[0].probabilities == []
    assert bundle.predict_table(["red"])["probability"].to_pylist() == [None] * 5


def _write_queries(path, ending: str, texts: list[str], column: str) -> None:
    frame = pd.DataFrame({"id": range(len(texts)), column: texts})
    plain = ending.removesuffix(".gz")
    if plain == ".parquet":
        frame.to_parquet(path)
        return
    text = (
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in frame.to_dict("records"))
        if plain == ".jsonl"
        else frame.to_csv(index=False, sep="\t" if plain == ".tsv" else ",")
    )
    path.write_bytes(gzip.compress(text.encode()) if ending.endswith(".gz") else text.encode())


@pytest.mark.parametrize(
    ("ending", "column", "output"),
    [
        (".csv", "query", "out.parquet"),
        (".csv", "my text", "out.csv"),
        (".tsv", "text", "out.tsv"),
        (".jsonl", "query", "out.jsonl"),
        (".jsonl", "my text", "out.csv"),
        (".parquet", "text", "out.jsonl"),
        (".parquet", "my text", "out.parquet"),
        (".csv.gz", "text", "out.parquet"),
        (".jsonl.gz", "query", "out.parquet"),
    ],
)
def test_files_in_and_out(rng, tmp_path, ending, column, output):
    write_tiny_bundle(tmp_path / "b", rng)
    bundle = Bundle.load(tmp_path / "b")
    texts = ["red car", 'a "quoted", old\nhouse', "größer 🚗", "007", "NA", "1.50"]
    if ending == ".tsv":  # a field of several lines would be refused, see raw.quotes
        texts = [text.replace("\n", " ") for text in texts]
    source = tmp_path / f"queries{ending}"
    _write_queries(source, ending, texts, column)
    target = tmp_path / "new" / output
    number = predict_file(
        bundle, source, target, k=2, column=column if column == "my text" else None, batch_size=4
    )
    assert number == len(texts)
    assert [p.name for p in target.parent.iterdir()] == [output]
    if output.endswith(".parquet"):
        rows = pq.read_table(target).to_pylist()
    elif output.endswith(".jsonl"):
        lines = target.read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
    else:
        frame = pd.read_csv(
            target, sep="\t" if output.endswith(".tsv") else ",", dtype=str, keep_default_na=False
        )
        kinds = {"query_row": int, "rank": int, "score": float}
        frame["probability"] = frame["probability"].map(lambda text: text or None)
        rows = frame.astype(kinds).to_dict("records")
    expected = bundle.predict_table(texts, k=2).to_pylist()
    assert [list(row) for row in rows[:1]] == [
        ["query_row", "query", "rank", "label", "title", "score", "probability"]
    ]
    assert [{**row, "score": 0} for row in rows] == [{**row, "score": 0} for row in expected]
    np.testing.assert_allclose(
        [row["score"] for row in rows], [row["score"] for row in expected], rtol=1e-5
    )


def test_files_that_cannot_be_read_leave_nothing_behind(rng, tmp_path):
    write_tiny_bundle(tmp_path / "b", rng)
    bundle = Bundle.load(tmp_path / "b")
    folder = tmp_path / "files"
    folder.mkdir()
    pq.write_table(pa.table({"query": ["a", None]}), folder / "null.parquet")
    pq.write_table(pa.table({"query": [1, 2]}), folder / "numbers.parquet")
    (folder / "damaged.parquet").write_bytes(b"PAR1 no PAR1")
    (folder / "latin.csv").write_bytes(b"query\nred\ngr\xf6n\n")
    (folder / "columns.csv").write_bytes(b"a,b\n1,2\n")
    (folder / "ragged.csv").write_bytes(b"query,b\nred,1\nblue,2,3\n")
    (folder / "empty.csv").write_bytes(b"")
    (folder / "broken.jsonl").write_bytes(b'{"query": "a"}\n{"query": \n')
    (folder / "list.jsonl").write_bytes(b"[1]\n")
    (folder / "number.jsonl").write_bytes(b'{"query": 1}\n')
    (folder / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"query": "a"}\n' * 9999)[:-20])
    (folder / "sheet.xlsx").write_bytes(b"x")
    (tmp_path / "out.csv").write_text("before")
    for source in [*sorted(folder.iterdir()), folder / "nothing.csv"]:
        with pytest.raises(DataError) as caught:
            predict_file(bundle, source, tmp_path / "out.csv")
        assert source.name in str(caught.value), caught.value
        assert (tmp_path / "out.csv").read_text() == "before"
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["b", "files", "model", "out.csv"]
    with pytest.raises(DataError, match=r"broken\.jsonl:2"):
        predict_file(bundle, folder / "broken.jsonl", tmp_path / "out.csv")
    (folder / "good.csv").write_text("query\nred\n")
    with pytest.raises(DataError, match="unknown format"):
        predict_file(bundle, folder / "good.csv", tmp_path / "out.xlsx")
    with pytest.raises(DataError, match="same file"):
        predict_file(bundle, folder / "good.csv", folder / "good.csv")


def test_a_file_of_a_header_only_gives_no_predictions(rng, tmp_path):
    write_tiny_bundle(tmp_path / "b", rng)
    (tmp_path / "in.csv").write_text("id,query\n")
    assert (
        predict_file(Bundle.load(tmp_path / "b"), tmp_path / "in.csv", tmp_path / "out.parquet")
        == 0
    )
    assert pq.read_table(tmp_path / "out.parquet").num_rows == 0


def test_two_writings_give_the_same_bytes(tmp_path, rng):
    state = rng.bit_generator.state
    write_tiny_bundle(tmp_path / "one" / "b", rng)
    rng.bit_generator.state = state
    write_tiny_bundle(tmp_path / "two" / "b", rng)
    assert folder_sha256(tmp_path / "one" / "b") == folder_sha256(tmp_path / "two" / "b")
    history = tmp_path / "two" / "model" / "history.jsonl"
    assert history.exists()
    assert not (tmp_path / "two" / "b" / "model" / "history.jsonl").exists()


def test_a_moved_bundle_answers_the_same_without_what_it_was_made_from(rng, tmp_path):
    write_tiny_bundle(tmp_path / "b", rng)
    bundle = Bundle.load(tmp_path / "b")
    before = bundle.predict(QUERIES)
    sha256 = bundle.sha256
    (tmp_path / "elsewhere").mkdir()
    shutil.move(tmp_path / "b", tmp_path / "elsewhere" / "c")
    shutil.rmtree(tmp_path / "model")
    moved = Bundle.load(tmp_path / "elsewhere" / "c")
    assert moved.predict(QUERIES) == before
    assert moved.sha256 == sha256 == folder_sha256(moved.path)
    assert moved.info.dataset["name"] == "tiny"
    assert moved.info.params == {"seed": 0}


def test_labels_of_lists_and_of_chunked_columns_are_the_same_bundle(rng, tmp_path):
    model = write_model(tmp_path / "model", rng)
    de = rng.normal(size=(12, DIM)).astype(np.float32)
    columns = [
        pa.chunked_array([texts[:5], texts[5:]], pa.large_string()) for texts in (UIDS, TITLES)
    ]
    for name, (uids, titles) in {"lists": (UIDS, TITLES), "columns": columns}.items():
        labels = BundleLabels(uids, titles, {"de": de})
        write_bundle(tmp_path / name, model, LabelIndex.build(de), labels, Scoring("de", 1.0, True))
    assert folder_sha256(tmp_path / "lists") == folder_sha256(tmp_path / "columns")


def test_parts_that_do_not_fit_are_not_written(rng, tmp_path):
    model = write_model(tmp_path / "model", rng)
    de = rng.normal(size=(12, DIM)).astype(np.float32)
    labels = BundleLabels(UIDS, TITLES, {"de": de, "clf": None})
    scoring = Scoring("de", 1.0, True)
    index = LabelIndex.build(de)
    for change, message in (
        ({"uids": UIDS[:-1], "titles": TITLES[:-1]}, "number of labels"),
        ({"uids": ["L0"] * 12}, "not unique"),
        ({"vectors": {"de": de[:, :3]}}, "the space has width 6, expected 3"),
        ({"vectors": {"de": de[:5]}}, "expected de of shape"),
        ({"vectors": {"de": de, "clf": de[:, :2]}}, "expected de of shape"),
    ):
        with pytest.raises(ValueError, match=message):
            write_bundle(tmp_path / "b", model, index, replace(labels, **change), scoring)
    with pytest.raises(ValueError, match="expected clf, de of shape"):
        write_bundle(tmp_path / "b", model, index, labels, replace(scoring, space="both"))
    with pytest.raises(ArtifactError, match="no model"):
        write_bundle(tmp_path / "b", tmp_path / "none", index, labels, scoring)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_the_real_model_in_a_bundle(rng, tmp_path, monkeypatch):
    """UniDEC itself (a bag of tokens, random start): search over the bundle equals the model's own
    scores.
    """
    import torch
    from helpers.label_vectors import label_vectors
    from transformers import BertConfig, BertModel

    from unidec.config import Encoder, Model
    from unidec.data.storage import write_folder
    from unidec.model.unidec import UniDEC
    from unidec.ranking.heads import Heads

    monkeypatch.undo()  # the stub
    source = tmp_path / "source"
    size = {"vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    BertModel(BertConfig(**size, intermediate_size=8)).save_pretrained(source)
    words = write_model(tmp_path / "words", rng)
    shutil.copyfile(words / "tokenizer" / "tokenizer.json", source / "tokenizer.json")
    torch.manual_seed(1)
    settings = Model(dim=DIM)
    model = UniDEC.create(
        Encoder(kind="bag"), settings, len(TITLES), source, 11, {"tokens": {"max_length": 8}}
    ).eval()
    with write_folder(tmp_path / "model", "model", 1) as out:
        model.save_into(out)
    tokens = encode_texts(TITLES, model.tokenizer_folder, 8)
    de, (clf, bias) = model.encode_labels(tokens), model.classifier_table()
    vectors = label_vectors(de, clf, bias, "both", True)
    write_bundle(
        tmp_path / "b",
        tmp_path / "model",
        LabelIndex.build(vectors),
        BundleLabels(UIDS, TITLES, {"de": de, "clf": clf, "bias": bias}),
        Scoring("both", 0.7, True),
    )
    shutil.rmtree(source)
    found = Bundle.load(tmp_path / "b").predict(QUERIES, k=12)
    heads = Heads({"de": de, "clf": clf}, "both", True, 0.7)
    queries = heads.queries(*model.encode_queries(encode_texts(QUERIES, words / "tokenizer", 8)))
    expected = queries.astype(np.float64) @ vectors.T
    for i, prediction in enumerate(found):
        rows = [UIDS.index(uid) for uid in prediction.labels]
        np.testing.assert_allclose(prediction.scores, expected[i, rows], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(
            prediction.scores, np.sort(expected[i])[::-1], rtol=1e-4, atol=1e-5
        )


def test_the_bundle_needs_neither_mlflow_nor_prefect():
    code = (
        "import sys, unidec.bundle.bundle; print([m for m in ('mlflow', 'prefect', "
        "'great_expectations') if m in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
    )
    assert out.stdout.strip() == "[]"
