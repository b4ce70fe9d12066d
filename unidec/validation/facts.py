"""The facts that are checked: a row per query, label and pair of a data set, in a database, about
the texts as the model reads them.

Shape suffixes: B rows of a block, P pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from scipy.sparse import csr_matrix

from unidec.data.array_file import row_blocks
from unidec.data.database import Database, fill
from unidec.data.dataset import BATCH_ROWS, Text, XMCDataset, texts_read
from unidec.data.profile import trimmed
from unidec.data.raw import are_blank
from unidec.data.tokens import Tokens, as_bytes, encode_texts, load_tokenizer

TOKENISED_QUERIES = 20_000  # number of evenly spaced queries whose tokens are checked
# bytes on disk of a text with its uid, and of a pair, while facts about them are computed
TEXT_BYTES = 160
PAIR_BYTES = 64

QUERIES = """
CREATE TABLE queries AS
WITH read AS (SELECT * EXCLUDE text, hash(text) AS text_hash FROM given),
trained AS (SELECT DISTINCT text_hash, true AS is_trained FROM read WHERE split = 0)
SELECT row, uid, split, text_length, num_positives, is_untitled, unknown_tokens,
  CASE WHEN text_length > 0 THEN count(*) OVER (PARTITION BY text_hash) ELSE 1 END
    AS queries_with_this_text,
  CASE WHEN split = 2 AND text_length > 0 THEN (is_trained IS NOT NULL)::INT END AS text_in_train
FROM read LEFT JOIN trained USING (text_hash)
"""
LABELS = """
CREATE TABLE labels AS
WITH read AS (
  SELECT * EXCLUDE (text, tokens), hash(text) AS text_hash, hash(tokens) AS token_hash FROM given
),
trained AS (
  SELECT label AS row, count(*) AS num_train_queries FROM pairs
  WHERE in_train AND relevance > 0 GROUP BY label
),
counted AS (
  SELECT *, CASE WHEN text_length > 0 THEN count(*) OVER (PARTITION BY text_hash) ELSE 1 END
    AS labels_with_this_text,
  CASE WHEN text_length > 0 THEN count(*) OVER (PARTITION BY token_hash) ELSE 1 END AS with_tokens
  FROM read
)
SELECT row, uid, text_length, is_untitled, labels_with_this_text, unknown_tokens, is_cut,
  coalesce(num_train_queries, 0) AS num_train_queries,
  greatest(with_tokens - labels_with_this_text, 0) AS labels_with_these_tokens
FROM counted LEFT JOIN trained USING (row)
"""


@dataclass(frozen=True)
class Reading:
    """How the model reads texts.

    Attributes:
        text: `tokens.text`.
        tokenizer: folder with tokenizer.json; None: tokens are not checked.
        max_length: maximum number of tokens per text, special tokens included.
        encoder: name of the encoder, for messages.
    """

    text: Text = "title"
    tokenizer: Path | None = None
    max_length: int = 32
    encoder: str = ""


TITLES = Reading()


def collect_facts(tables: Database, dataset: XMCDataset, reading: Reading) -> None:
    """Write the facts into three tables of a database; what is not known is NULL.

    queries: row, uid, split (0 train, 1 validation, 2 test), text_length, num_positives,
    is_untitled (the content is read in place of a blank title), queries_with_this_text,
    text_in_train (of test queries with a text), and unknown_tokens (share of the text's tokens, of
    at most `TOKENISED_QUERIES` queries, with a tokenizer).

    labels: row, uid, text_length, is_untitled, labels_with_this_text, num_train_queries, and with a
    tokenizer unknown_tokens, labels_with_these_tokens (other labels with another text but the same
    tokens) and is_cut (the text has more tokens than are read).

    pairs: query, label, relevance, in_train (the query is a training query), filtered (the pair is
    also a filter pair).
    """
    fill(tables, "CREATE TABLE pairs AS SELECT * FROM given", _pairs(dataset))
    fill(tables, QUERIES, _texts(dataset, "queries", reading))
    fill(tables, LABELS, _texts(dataset, "labels", reading))


def space_needed(dataset: XMCDataset) -> int:
    """About how many bytes of disk the facts need."""
    num_texts = dataset.num_queries + dataset.num_labels
    return TEXT_BYTES * num_texts + PAIR_BYTES * dataset.relevance.nnz


def one_row(tables: Database, select: str) -> tuple[Any, ...]:
    """The only row of a statement's result."""
    (row,) = tables.execute(select).fetchall()
    return tuple(row)


def _texts(
    dataset: XMCDataset, which: Literal["queries", "labels"], reading: Reading
) -> Iterator[pa.RecordBatch]:
    """Facts about single texts, in blocks of rows."""
    table = dataset.queries if which == "queries" else dataset.labels
    num_rows = table.num_rows
    num_tokenised = num_rows if which == "labels" else min(num_rows, TOKENISED_QUERIES)
    for start in range(0, max(num_rows, 1), BATCH_ROWS):
        block = table.slice(start, BATCH_ROWS)
        end = start + block.num_rows
        texts = texts_read(block, reading.text)
        text_B, length_B = trimmed(texts)
        is_untitled_B = are_blank(block["title"]).to_numpy() & (length_B > 0)
        columns = {
            "row": np.arange(start, end),
            "uid": block["uid"],
            "text": text_B,
            "text_length": length_B,
            "is_untitled": is_untitled_B & (reading.text == "title"),
        }
        tokenised_B = _spaced(start, end, num_rows, num_tokenised)
        unknown_B = np.full(block.num_rows, np.nan)
        if reading.tokenizer is not None:
            read = texts.take(pa.array(tokenised_B)).to_pylist()
            tokens = encode_texts(read, reading.tokenizer, reading.max_length)
            unknown_B[tokenised_B] = unknown_shares(tokens, reading)
        columns["unknown_tokens"] = pa.array(unknown_B, from_pandas=True)
        if which == "queries":
            columns["split"] = np.asarray(dataset.split_N[start:end])
            columns["num_positives"] = np.diff(dataset.relevance.indptr[start : end + 1])
        elif reading.tokenizer is None:
            columns["tokens"] = text_B  # equal tokens are those of equal texts
            columns["is_cut"] = np.zeros(block.num_rows, dtype=bool)
        else:
            columns["tokens"] = as_bytes(tokens, tokens.ids.dtype, 0)
            columns["is_cut"] = tokens.lengths() >= reading.max_length
        yield from pa.table(columns).combine_chunks().to_batches() or [_empty(columns)]


def _empty(columns: dict[str, Any]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([], pa.table(columns).schema)


def _spaced(start: int, end: int, num_rows: int, most: int) -> np.ndarray:
    """Which rows from `start` to `end` are among the `most` evenly spaced ones of all, counted from
    `start`: int64.
    """
    if most == num_rows:
        return np.arange(end - start)
    rows = np.linspace(0, num_rows - 1, most).astype(np.int64)
    return rows[(rows >= start) & (rows < end)] - start


def _pairs(dataset: XMCDataset) -> Iterator[pa.RecordBatch]:
    for start, end in row_blocks(dataset.relevance.indptr):
        pairs = dataset.relevance[start:end].tocoo()
        filtered_P = np.isin(
            _pair_numbers(dataset.relevance[start:end]),
            _pair_numbers(dataset.filter_pairs[start:end]),
        )
        in_train_P = np.asarray(dataset.split_N[start:end])[pairs.row] == 0
        columns = {
            "query": pairs.row.astype(np.int64) + start,
            "label": pairs.col.astype(np.int64),
            "relevance": pairs.data,
            "filtered": filtered_P,
            "in_train": in_train_P,
        }
        yield pa.RecordBatch.from_pydict(columns)


def _pair_numbers(matrix: csr_matrix) -> np.ndarray:
    """A number for each pair, int64 [P]."""
    pairs = matrix.tocoo()
    return pairs.row.astype(np.int64) * matrix.shape[1] + pairs.col


def text_counts(tables: Database, reading: Reading) -> dict[str, int]:
    """Numbers of duplicate texts, and of rows whose content is read because they have no title."""
    twice, leaked, untitled = one_row(
        tables,
        "SELECT count(*) FILTER (queries_with_this_text > 1), count(*) FILTER (text_in_train = 1), "
        "count(*) FILTER (is_untitled) FROM queries",
    )
    labels_twice, labels_untitled = one_row(
        tables,
        "SELECT count(*) FILTER (labels_with_this_text > 1), count(*) FILTER (is_untitled) "
        "FROM labels",
    )
    counts = {
        "queries with the text of another query": twice,
        "test queries with the text of a training query": leaked,
        "labels with the text of another label": labels_twice,
    }
    if reading.text == "title":
        counts |= {
            "queries without a title, whose content is read instead": untitled,
            "labels without a title, whose content is read instead": labels_untitled,
        }
    return counts


def unknown_shares(tokens: Tokens, reading: Reading) -> np.ndarray:
    """Share of each text's tokens that the tokenizer does not know, without special tokens: float64
    [N].
    """
    assert reading.tokenizer is not None
    tokenizer = load_tokenizer(reading.tokenizer, reading.max_length)
    text_of_token = np.repeat(np.arange(len(tokens)), tokens.lengths())
    of_unknown = text_of_token[tokens.ids == tokenizer.unknown_id]
    unknown_N = np.bincount(of_unknown, minlength=len(tokens))
    return unknown_N / np.maximum(tokens.lengths() - tokenizer.num_specials, 1)
