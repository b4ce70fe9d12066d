"""The checks read what the model reads: the fields of `tokens.text`, and the tokens of the
encoder's tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from helpers.html_page import Page
from scipy.sparse import csr_matrix

from unidec.config import Validation
from unidec.data.database import database
from unidec.data.dataset import Text, XMCDataset, write_dataset
from unidec.data.profile import profile_dataset
from unidec.data.raw import RawData, are_blank, text_array, text_table
from unidec.data.tokens import is_blank
from unidec.validation.facts import Reading, collect_facts
from unidec.validation.suite import advice, validate_dataset

WORDS = [f"word{number}" for number in range(60)]


def tokenizer_folder(folder: Path, words: Sequence[str], lower: bool = False) -> Path:
    """A tokenizer that knows these words and no others."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if lower:
        tokenizer.normalizer = normalizers.Lowercase()
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def stored(
    folder: Path, queries: dict[str, list[tuple[str, str]]], labels: list[tuple[str, str]]
) -> XMCDataset:
    """A data set of (title, content) by split; query i has label i modulo the number of labels."""

    def table(name: str, texts: list[tuple[str, str]]) -> pa.Table:
        uids = [f"{name}-{number}" for number in range(len(texts))]
        return text_table(uids, [title for title, _ in texts], [content for _, content in texts])

    relevance = {}
    nothing = {}
    for split, texts in queries.items():
        rows = np.arange(len(texts))
        shape = (len(texts), len(labels))
        relevance[split] = csr_matrix(
            (np.ones(len(texts), np.float32), (rows, rows % len(labels))), shape
        )
        nothing[split] = csr_matrix(shape, dtype=bool)
    tables = {split: table(split, texts) for split, texts in queries.items()}
    raw = RawData("d", tables, table("label", labels), relevance, nothing)
    return write_dataset(folder, raw, validation_share=0.0)


def verdict_of(
    dataset: XMCDataset, tmp_path: Path, reading: Reading, **limits: Any
) -> dict[str, Any]:
    verdict = validate_dataset(
        dataset.path, tmp_path / "v", docs=False, limits=Validation(**limits), reading=reading
    )
    assert json.loads((tmp_path / "v" / "result.json").read_bytes())["text"] == reading.text
    return verdict


def columns(
    dataset: XMCDataset, reading: Reading, table: str
) -> tuple[dict[str, list[Any]], dict[str, str]]:
    """The facts of a table by column, in the order of its rows, and the advice."""
    with database(dataset.path.parent) as tables:
        collect_facts(tables, dataset, reading)
        rows = tables.sql(f"SELECT * FROM {table} ORDER BY row")
        return rows.to_arrow_table().to_pydict(), advice(tables, reading)


def words(first: int, count: int) -> list[tuple[str, str]]:
    return [(f"word{number}", "") for number in range(first, first + count)]


def sentences(verdict: dict[str, Any], part: str) -> list[str]:
    return [line for line in (*verdict["failed"], *verdict["warnings"]) if part in line]


@pytest.mark.parametrize(
    "text", ["", " ", "\t\n", "\u00a0", "\u200b", "\ufeff\u2060", "\x00", "\u3000\u2028"]
)
def test_what_is_blank(text: str) -> None:
    assert is_blank(text)
    assert are_blank(pa.array([text, f"a{text}"])).to_pylist() == [True, False]


@pytest.mark.parametrize("text", ["a", " \u200b.", "日本", "😀", "\u0301"])
def test_what_is_not_blank(text: str) -> None:
    assert not is_blank(text)
    assert are_blank(text_array([text], pa.large_string())).to_pylist() == [False]


def test_a_title_that_is_blank_is_read_as_its_content_and_counted(tmp_path: Path) -> None:
    labels = [("", "content of a label"), ("\u200b", "another"), ("third", "more"), ("", " ")]
    dataset = stored(tmp_path / "d", {"train": [("", "all in the content"), *words(0, 3)]}, labels)
    assert dataset.label_texts() == ["content of a label", "another", "third", " "]
    assert dataset.query_texts([0]) == ["all in the content"]
    assert next(dataset.text_batches("labels"))[0] == "content of a label"
    verdict = verdict_of(dataset, tmp_path, Reading("title"))
    line = sentences(verdict, "labels: empty texts")[0]
    assert "found 1 of 4" in line
    page = Page((tmp_path / "v" / "index.html").read_text())
    assert page.row("labels without a title, whose content is read instead")[1] == "2"
    assert page.row("queries without a title, whose content is read instead")[1] == "1"
    kept = stored(tmp_path / "kept", {"train": words(0, 3)}, [("a", "x"), ("b", "y")])
    assert kept.label_texts() == ["a", "b"]


def test_leaks_and_duplicates_are_those_of_the_text_that_is_read(tmp_path: Path) -> None:
    train = [(title, f"content {number}") for number, (title, _) in enumerate(words(0, 40))]
    test = [(title, f"other {number}") for number, (title, _) in enumerate(words(0, 10))]
    labels = [(f"label {number // 2}", f"about {number}") for number in range(20)]
    dataset = stored(tmp_path / "d", {"train": train, "test": test}, labels)
    verdict = verdict_of(dataset, tmp_path, Reading("title"))
    leak = sentences(verdict, "(leak)")[0]
    assert "found 10 of 10" in leak and leak in verdict["failed"]
    [twice] = [
        line for line in verdict["failed"] if "labels with the text of another label" in line
    ]
    assert "found 20 of 20" in twice
    long_texts = Reading("title+content")
    assert not any(columns(dataset, long_texts, "queries")[0]["text_in_train"])
    assert columns(dataset, long_texts, "labels")[0]["labels_with_this_text"] == [1] * 20


@pytest.mark.parametrize("text", ["title", "title+content"])
def test_texts_that_are_empty_only_for_the_model_are_found(tmp_path: Path, text: Text) -> None:
    """An invisible title and content: nothing to read, although neither is the empty string."""
    dataset = stored(tmp_path / "d", {"train": [("\u200b", "\u00a0"), *words(0, 9)]}, words(0, 10))
    lengths = columns(dataset, Reading(text), "queries")[0]["text_length"]
    assert lengths[0] == 0
    assert all(lengths[1:])


def test_a_tokenizer_that_does_not_know_the_language_fails_with_the_fix(tmp_path: Path) -> None:
    known = tokenizer_folder(tmp_path / "known", WORDS)
    labels = [(f"word{number} 日本{number}", "") for number in range(20)]
    dataset = stored(
        tmp_path / "d", {"train": [(f"word{number} 東京", "") for number in range(40)]}, labels
    )
    verdict = verdict_of(dataset, tmp_path, Reading("title", known, 32, "some-encoder"))
    for which in ("query", "label"):
        [line] = [
            line
            for line in verdict["failed"]
            if f"tokens of a {which} that the tokenizer does not know" in line
        ]
        assert "at most 10.0% on average; found 50.0%" in line and "row " in line
        assert (
            "encoder.name: some-encoder" in line
            and "multilingual" in line
            and "encoder.kind: bag" in line
        )
        assert line.endswith("validation.unknown_tokens")
    page = (tmp_path / "v" / "index.html").read_text()
    assert page.count('<td colspan="2">mean 50.00 %</td>') == 4  # two limits of each
    suits = tokenizer_folder(
        tmp_path / "suits", [*WORDS, "東京", *(f"日本{number}" for number in range(20))]
    )
    assert not sentences(verdict_of(dataset, tmp_path, Reading("title", suits)), "tokenizer")


@pytest.mark.parametrize(
    ("labels", "max_length", "lower", "fix"),
    [
        ([f"日本{number}" for number in range(20)], 32, False, "use an encoder of their language"),
        (
            [f"word0 word1 word2 word{number}" for number in range(3, 23)],
            3,
            False,
            "raise tokens.max_length above 3",
        ),
        (
            [word for number in range(10) for word in (f"word{number}", f"WORD{number}")],
            32,
            True,
            "such as case",
        ),
    ],
)
def test_labels_that_become_equal_name_the_cause(
    tmp_path: Path, labels: list[str], max_length: int, lower: bool, fix: str
) -> None:
    folder = tokenizer_folder(tmp_path / "t", WORDS, lower)
    dataset = stored(tmp_path / "d", {"train": words(0, 40)}, [(label, "") for label in labels])
    reading = Reading("title", folder, max_length, "e")
    facts, fixes = columns(dataset, reading, "labels")
    assert all(facts["labels_with_these_tokens"]) and set(facts["labels_with_this_text"]) == {1}
    assert fix in fixes["labels_with_these_tokens"]
    if max_length == 3:
        verdict = verdict_of(dataset, tmp_path, reading)
        [line] = [
            line for line in verdict["failed"] if "but the same tokens, as another label" in line
        ]
        assert (
            "found 20 of 20" in line
            and fix in line
            and line.endswith("validation.label_texts_given_twice")
        )


def test_labels_of_one_text_are_counted_once_and_empty_ones_not_at_all(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "t", WORDS)
    labels = [("word1", ""), ("word1", ""), ("", ""), ("日", ""), *words(2, 9)]
    dataset = stored(tmp_path / "d", {"train": words(0, 40)}, labels)
    facts, _ = columns(dataset, Reading("title", folder), "labels")
    expected = [2, 2] + [1] * 11
    assert facts["labels_with_this_text"] == expected
    assert not any(facts["labels_with_these_tokens"])


def test_validation_and_profile_count_labels_without_training_queries_alike(
    tmp_path: Path, raw_factory: Any
) -> None:
    dataset = write_dataset(
        tmp_path / "d", raw_factory(30, 10, 40), validation_share=0.3, split_seed=0
    )
    without_L = np.asarray(columns(dataset, Reading(), "labels")[0]["num_train_queries"]) == 0
    in_validation_L = dataset.relevance[dataset.rows("validation")].sum(axis=0).A1 > 0
    # only held-out queries have them: no training query does
    assert (without_L & in_validation_L).any()
    shares = profile_dataset(dataset, tokenizer_folder(tmp_path / "t", ["a"]), 32)["shares"]
    share = shares["labels_without_training_points"]
    assert round(share["share"] * share["of"]) == without_L.sum()
