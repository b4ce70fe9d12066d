"""Label changes: an edit against a dictionary edited by hand, files of labels, and estimated rows
against a loop.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import tiny_bundle as tiny

from unidec.bundle.bundle import Bundle
from unidec.bundle.label_change import LabelChange, estimated_rows
from unidec.bundle.label_file import MOST_SHOWN, LabelText, read_labels
from unidec.config import RawBounds
from unidec.errors import DataError
from unidec.ranking.heads import unit_rows


@pytest.fixture
def bundle(tmp_path: Path, rng: np.random.Generator, stub_model: None) -> Bundle:
    tiny.write_tiny_bundle(tmp_path / "bundle", rng)
    return Bundle.load(tmp_path / "bundle")


def labels_of(change: LabelChange) -> dict[str, str]:
    return dict(zip(change.uids, change.titles, strict=True))


@pytest.mark.parametrize("long_texts", [False, True])
def test_an_edit_is_that_of_a_dictionary(
    bundle: Bundle, rng: np.random.Generator, long_texts: bool
) -> None:
    if long_texts:
        bundle.info = bundle.info.model_copy(update={"text": "title+content"})
    before = dict(zip(tiny.UIDS, tiny.TITLES, strict=True))
    for _ in range(30):
        picked = rng.permutation(tiny.UIDS).tolist()
        gone = picked[: rng.integers(0, 8)]
        changed = picked[8 : 8 + rng.integers(0, 4)]
        new = [f"N{i}" for i in range(rng.integers(0, 4))]
        update = [LabelText(uid, f"{uid} text", f"{uid} shown") for uid in changed]
        add = [LabelText(uid, f"{uid} text") for uid in new]
        change = LabelChange.edit(bundle, add, gone, update)
        wanted = {uid: title for uid, title in before.items() if uid not in gone}
        wanted |= {uid: f"{uid} shown" for uid in changed} | {uid: f"{uid} text" for uid in new}
        # new ones last
        assert labels_of(change) == wanted
        assert list(labels_of(change)) == list(wanted)
        rows = [tiny.UIDS.index(uid) if uid in before else -1 for uid in wanted]
        assert change.source_L.tolist() == rows
        encoded = {
            change.uids[row]: text
            for row, text in zip(change.encoded_S, change.texts_S, strict=True)
        }
        assert encoded == {item.uid: item.text for item in (*update, *add)}
        assert (np.diff(change.encoded_S) > 0).all()
        assert change.added == new
        assert set(change.removed) == set(gone)
        assert set(change.renamed) == set(changed)
        assert bool(change) == bool(new or gone or changed)
        kept = len(wanted) - len(new)
        assert change.counts == {
            "added": len(new),
            "removed": len(gone),
            "renamed": len(changed),
            "kept": kept,
        }


def test_example_queries_are_of_added_labels(bundle: Bundle) -> None:
    add = [LabelText("N", "a new one"), LabelText("O", "another")]
    examples = [LabelText("O", "first"), LabelText("N", "second"), LabelText("O", "third")]
    change = LabelChange.edit(bundle, add, ["L1"], examples=examples)
    assert [change.uids[row] for row in change.example_rows_E] == ["O", "N", "O"]
    assert change.examples == ["first", "second", "third"]
    wrong = [
        LabelText("L0", "a query", where="examples.csv:2"),
        LabelText("N", "  ", where="examples.csv:3"),
    ]
    with pytest.raises(DataError) as caught:
        LabelChange.edit(bundle, add, examples=wrong)
    assert "examples.csv:2: a query of 'L0', which is not added here" in str(caught.value)
    assert "examples.csv:3: an empty query of 'N'" in str(caught.value)


def test_the_same_text_again_is_no_change(bundle: Bundle) -> None:
    same = [LabelText("L0", "red car"), LabelText("L3", "red boat", "red boat")]
    assert not LabelChange.edit(bundle, update=same)
    change = LabelChange.edit(bundle, update=[*same, LabelText("L1", "green car", "a car")])
    assert change.renamed == ["L1"] and change.texts_S == ["green car"]
    # shown as before
    another_text = LabelChange.edit(bundle, update=[LabelText("L0", "scarlet car", "red car")])
    assert another_text.renamed == ["L0"] and another_text.texts_S == ["scarlet car"]


def test_all_mistakes_at_once(bundle: Bundle) -> None:
    with pytest.raises(DataError) as caught:
        LabelChange.edit(
            bundle,
            add=[
                LabelText("L1", "x", where="new.csv:2"),
                LabelText("N", "  "),
                LabelText("N", "y"),
                LabelText(" ", "z"),
            ],
            remove=["L22", "L2", "L2"],
            update=[LabelText("L2", "q"), LabelText("nothing alike", "q")],
        )
    message = str(caught.value)
    for words in (
        "8 problems in a change of labels; nothing was written",
        "new.csv:2: 'L1' is in the bundle already",
        "'N' has no text",
        "'N': add and add",
        "a label without a uid",
        "no label 'L22'",
        "'L2': remove and remove",
        "'L2': remove and update",
        "no label 'nothing alike'\n",
    ):
        assert words in message, words


def test_many_mistakes_are_cut_and_counted(bundle: Bundle) -> None:
    with pytest.raises(DataError, match=f"and {40 - MOST_SHOWN} more") as caught:
        LabelChange.edit(bundle, remove=[f"gone-{i}" for i in range(40)])
    assert (
        "40 problems" in str(caught.value)
        and "gone-9'" in str(caught.value)
        and "gone-10'" not in str(caught.value)
    )


def test_one_label_must_stay(bundle: Bundle) -> None:
    with pytest.raises(DataError, match="needs a label"):
        LabelChange.edit(bundle, remove=tiny.UIDS)
    assert labels_of(LabelChange.edit(bundle, add=[LabelText("N", "x")], remove=tiny.UIDS)) == {
        "N": "x"
    }


# -- files of labels
# --------------------------------------------------------------------------------------------------

ROWS = [
    {"uid": "a", "text": 'one, "two"\nthree', "title": ""},
    {"uid": "7", "text": "größer 🚗", "title": "shown"},
    {"uid": "c d", "text": "", "title": "only a title"},
]


def write(path: Path, rows: list[dict[str, str]]) -> Path:
    kind = path.name.removesuffix(".gz").rpartition(".")[2]
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
        return path
    if kind == "jsonl":
        text = "".join(json.dumps(row) + "\n" for row in rows)
    else:
        mark = "\t" if kind == "tsv" else ","
        quoted = [
            [
                json.dumps(v, ensure_ascii=False).replace('\\"', '""').replace("\\n", "\n")
                for v in row.values()
            ]
            for row in rows
        ]
        text = "\n".join([mark.join(rows[0]), *(mark.join(row) for row in quoted)]) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize(
    "name", ["a.csv", "a.tsv", "a.jsonl", "a.parquet", "a.csv.gz", "a.jsonl.gz"]
)
def test_every_format_gives_the_same(name: str, tmp_path: Path) -> None:
    quoted = RawBounds(quotes="yes")  # quoted text of a .tsv file spans lines
    found = read_labels(write(tmp_path / name, ROWS), quoted)
    expected = [tuple(row.values()) for row in ROWS]
    assert [(item.uid, item.text, item.title) for item in found] == expected
    lines = {"csv": [2, 4, 5], "tsv": [2, 4, 5], "jsonl": [1, 2, 3], "parquet": [1, 2, 3]}[
        name.split(".")[1]
    ]
    places = [item.where for item in found]
    assert places == [f"{name}:{line}" for line in lines]
    uids = [item.uid for item in read_labels(tmp_path / name, quoted)]
    assert uids == ["a", "7", "c d"]


def test_uids_alone_and_other_names(tmp_path: Path) -> None:
    (tmp_path / "gone.csv").write_text("\ufeffuid,why\nx,old\n\ny,\n", encoding="utf-8")
    uids = [item.uid for item in read_labels(tmp_path / "gone.csv")]
    assert uids == ["x", "y"]
    for name in ("id", "label_id"):
        (tmp_path / "gone.csv").write_text(f"{name},text\nx,old\ny,\n", encoding="utf-8")
        assert [item.uid for item in read_labels(tmp_path / "gone.csv")] == ["x", "y"]
    (tmp_path / "gone.jsonl").write_text('{"uid": 5, "title": "five"}\n\n')
    assert read_labels(tmp_path / "gone.jsonl") == [LabelText("5", "five", "five", "gone.jsonl:1")]


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.txt", b"x", "unknown file type of a table"),
        ("a.csv", None, "no such file"),
        ("a.csv", b"", "an empty file"),
        ("a.csv", b"name,text\nx,y\n", "columns missing: id(.|\n)*got: name, text"),
        ("a.csv", b"uid,text\n", "no rows"),
        ("a.csv", b"uid,text\n\xff,y\n", r"a\.csv:2: text that is not UTF-8"),
        ("a.csv.gz", b"uid,text\nx,y\n", "damaged gzip file"),
        ("a.parquet", b"PAR1", "not a readable Parquet file"),
        ("a.jsonl", b'{"uid": "x"', r"a\.jsonl:1: not a JSON object"),
        ("a.jsonl", b'{"uid": "x", "text": 3}\n[1]\n', ":2: not a JSON object"),
        ("a.jsonl", b'{"uid": true, "text": "t"}\n', ":1: an id that is not a text: True"),
        ("a.jsonl", b'{"id": 1.0, "text": "t"}\n', "an id that is not a text: 1.0"),
        ("a.csv", b"id,uid,text\n1,2,t\n", "more than one column of ids"),
        (
            "a.csv",
            b" id,text\n1,t\n",
            "rename the column ' id' to 'id': they differ in blanks at the beginning or end",
        ),
        ("a.jsonl", b'{"uid": "x", "text": "\\ud800"}\n', r":1: text that is not UTF-8"),
    ],
)
def test_files_that_are_none(name: str, data: bytes | None, words: str, tmp_path: Path) -> None:
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=words):
        read_labels(tmp_path / name)


# -- estimated classifier rows
# ----------------------------------------------------------------------------------------


def by_hand(
    vectors: dict[str, np.ndarray],
    trained: list[int],
    clf: np.ndarray,
    de: np.ndarray | None,
    cosine: bool = False,
) -> np.ndarray:
    """Row by row, in Python."""
    length = min(1.0, float(np.mean([np.linalg.norm(vectors["clf"][label]) for label in trained])))
    rows = []
    for s in range(len(clf)):
        text = clf[s] / np.linalg.norm(clf[s]) if clf[s].any() else clf[s]

        def score(label: int, s: int = s, text: np.ndarray = text) -> float:
            return float(
                vectors["clf"][label] @ text if de is None else vectors["de"][label] @ de[s]
            )

        near = sorted(trained, key=lambda label: (-score(label), label))[:3]
        row = 0.6 * length * text + 0.4 * np.mean([vectors["clf"][label] for label in near], axis=0)
        rows.append(
            row + 3 * np.mean([vectors["clf"][label] for label in trained], axis=0) * cosine
        )
    return np.array(rows)


def arrays(rng: np.random.Generator, num: int, scale: float = 1.0) -> dict[str, np.ndarray]:
    made = {
        "de": unit_rows(rng.normal(size=(num, 6))),
        "clf": scale * rng.normal(size=(num, 6)),
        "bias": rng.normal(size=num),
    }
    return {name: array.astype(np.float32) for name, array in made.items()}


@pytest.mark.parametrize("cosine", [False, True])
@pytest.mark.parametrize("with_de", [True, False])
@pytest.mark.parametrize(
    ("num", "scale"),
    [
        (40, 1.0),
        (40, 0.1),
        (2, 1.0),
        (1, 1.0),
    ],
)
def test_the_text_and_what_is_near(
    num: int, scale: float, with_de: bool, cosine: bool, rng: np.random.Generator
) -> None:
    vectors = arrays(rng, num, scale)
    trained = np.flatnonzero(rng.random(num) < 0.7) if num > 2 else np.arange(num)
    clf = rng.normal(size=(9, 6)).astype(np.float32)
    de = unit_rows(rng.normal(size=(9, 6)))
    clf[3] = 0  # a text without a known word
    de = de if with_de else None
    found, bias = estimated_rows(vectors, trained, clf, de, cosine)
    np.testing.assert_allclose(
        found, by_hand(vectors, trained.tolist(), clf, de, cosine), atol=1e-5
    )
    assert found.dtype == np.float32 and bias == pytest.approx(
        vectors["bias"][trained].mean(), abs=1e-6
    )


def test_a_row_does_not_depend_on_what_else_is_new(rng: np.random.Generator) -> None:
    vectors = arrays(rng, 30)
    trained = np.arange(30)
    clf = rng.normal(size=(5, 6)).astype(np.float32)
    de = unit_rows(rng.normal(size=(5, 6)))
    together = estimated_rows(vectors, trained, clf, de)[0]
    alone = [estimated_rows(vectors, trained, clf[s : s + 1], de[s : s + 1])[0] for s in range(5)]
    np.testing.assert_allclose(together, np.concatenate(alone), atol=1e-6)


def test_of_equally_near_labels_the_first_count(rng: np.random.Generator) -> None:
    vectors = arrays(rng, 12)
    vectors["de"][:] = np.eye(6, dtype=np.float32)[0]  # products without rounding
    clf = rng.normal(size=(1, 6)).astype(np.float32)
    de = vectors["de"][:1]
    found = estimated_rows(vectors, np.arange(12), clf, de)[0]
    expected = by_hand(vectors, list(range(3)), clf, de)[0]
    np.testing.assert_allclose(found[0], expected, atol=1e-5)


def test_without_a_trained_label_a_row_is_its_text(rng: np.random.Generator) -> None:
    clf = rng.normal(size=(2, 6)).astype(np.float32)
    found, bias = estimated_rows(arrays(rng, 4), np.zeros(0, dtype=np.int64), clf, None)
    assert np.array_equal(found, unit_rows(clf)) and bias == 0.0
    assert estimated_rows(arrays(rng, 4), np.arange(4), clf[:0], None)[0].shape == (0, 6)
