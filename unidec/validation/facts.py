"""The facts that are checked: a row per query, label and pair of a data set, in a database, about
the texts as the model reads them.

Shape suffixes: B rows of a block, P pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from scipy.sparse import csr_matrix

from unidec.data.array_file import row_blocks
from unidec.data.chunks import blocks
from unidec.data.database import Database, fill, one_row
from unidec.data.dataset import BATCH_ROWS, Text, XMCDataset, texts_read
from unidec.data.profile import trimmed
from unidec.data.raw import are_blank
from unidec.data.temporary import remove
from unidec.data.token_shards import tokenise
from unidec.data.tokens import TokenCache, Tokens, as_bytes, encode_texts, load_tokenizer

TOKENISED_QUERIES = 20_000  # number of evenly spaced queries whose tokens are checked
# bytes on disk of a text with its uid, and of a pair, while facts about them are computed
TEXT_BYTES = 160
PAIR_BYTES = 64

# One join a statement: each needs memory for itself
TOKENS = """
CREATE OR REPLACE TABLE tokens (row BIGINT, unknown_tokens DOUBLE, token_hash UBIGINT, is_cut BOOL)
"""
PAIRS = """
CREATE TABLE pairs AS
SELECT given.*, filters.query IS NOT NULL AS filtered
FROM given LEFT JOIN filters USING (query, label)
"""
TEXTS = """
CREATE OR REPLACE TABLE read AS SELECT * EXCLUDE text, hash(text) AS text_hash FROM given;
CREATE OR REPLACE TABLE twice AS
  SELECT text_hash, count(*) AS with_text FROM read GROUP BY text_hash HAVING count(*) > 1;
CREATE OR REPLACE TABLE counted AS
  SELECT * EXCLUDE with_text,
    CASE WHEN text_length > 0 THEN coalesce(with_text, 1) ELSE 1 END AS with_this_text
  FROM read LEFT JOIN twice USING (text_hash);
CREATE OR REPLACE TABLE read AS
  SELECT counted.*, unknown_tokens, token_hash, is_cut FROM counted LEFT JOIN tokens USING (row);
"""
QUERIES = """
CREATE TABLE trained AS
  SELECT DISTINCT text_hash, true AS is_trained FROM read
  WHERE split = 0 AND text_hash IN (SELECT text_hash FROM read WHERE split = 2);
CREATE TABLE queries AS
  SELECT * EXCLUDE (text_hash, token_hash, is_cut, is_trained, with_this_text),
    with_this_text AS queries_with_this_text,
    CASE WHEN split = 2 AND text_length > 0 THEN (is_trained IS NOT NULL)::INT END AS text_in_train
  FROM read LEFT JOIN trained USING (text_hash);
"""
LABELS = """
CREATE TABLE alike AS
  SELECT token_hash, count(*) AS with_tokens FROM tokens GROUP BY token_hash HAVING count(*) > 1;
CREATE OR REPLACE TABLE counted AS
  SELECT * EXCLUDE (with_tokens, text_hash, token_hash),
    CASE WHEN text_length > 0 AND with_tokens > with_this_text
      THEN with_tokens - with_this_text ELSE 0 END AS labels_with_these_tokens
  FROM read LEFT JOIN alike USING (token_hash);
CREATE OR REPLACE TABLE trained AS
  SELECT label FROM pairs JOIN queries ON query = queries.row WHERE split = 0 AND relevance > 0;
CREATE OR REPLACE TABLE trained AS
  SELECT label AS row, count(*) AS num_queries FROM trained GROUP BY label;
CREATE TABLE labels AS
  SELECT * EXCLUDE (num_queries, with_this_text), with_this_text AS labels_with_this_text,
    coalesce(num_queries, 0) AS num_train_queries
  FROM counted LEFT JOIN trained USING (row);
DROP TABLE counted; DROP TABLE read; DROP TABLE tokens; DROP TABLE trained;
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


def collect_facts(
    tables: Database, dataset: XMCDataset, reading: Reading, scratch: Path | None = None
) -> None:
    """Write the facts into three tables of a database; what is not known is NULL. `scratch`: a
    folder that holds the labels' tokens meanwhile; None: beside the data set.

    queries: row, uid, split (0 train, 1 validation, 2 test), text_length, num_positives,
    is_untitled (the content is read in place of a blank title), queries_with_this_text,
    text_in_train (of test queries with a text), and unknown_tokens (share of the text's tokens, of
    at most `TOKENISED_QUERIES` queries, with a tokenizer).

    labels: row, uid, text_length, is_untitled, labels_with_this_text, num_train_queries, and with a
    tokenizer unknown_tokens, labels_with_these_tokens (other labels with another text but the same
    tokens) and is_cut (the text has more tokens than are read).

    pairs: query, label, relevance, filtered (the pair is also a filter pair).
    """
    filters = "CREATE TABLE filters AS SELECT DISTINCT query, label FROM given"
    fill(tables, filters, _pairs(dataset.filter_pairs))
    fill(tables, PAIRS, _pairs(dataset.relevance))
    for which, statement in (("queries", QUERIES), ("labels", LABELS)):
        tables.execute(TOKENS)
        if reading.tokenizer is not None:
            known = "INSERT INTO tokens SELECT row, unknown, hash(tokens), is_cut FROM given"
            fill(tables, known, _tokens(dataset, which, reading, scratch))
        fill(tables, TEXTS, _texts(dataset, which, reading.text))
        tables.execute(statement)


def space_needed(dataset: XMCDataset) -> int:
    """About how many bytes of disk the facts need."""
    num_texts = dataset.num_queries + dataset.num_labels
    return TEXT_BYTES * num_texts + PAIR_BYTES * dataset.relevance.nnz


def _texts(dataset: XMCDataset, which: str, text: Text) -> Iterator[pa.Table]:
    """Facts about single texts, in blocks of rows."""
    table = getattr(dataset, which)
    for start in range(0, max(table.num_rows, 1), BATCH_ROWS):
        block = table.slice(start, BATCH_ROWS)
        end = start + block.num_rows
        text_B, length_B = trimmed(texts_read(block, text))
        columns = {
            "row": np.arange(start, end),
            "uid": block["uid"],
            "text": text_B,
            "text_length": length_B,
            "is_untitled": are_blank(block["title"]).to_numpy() & (length_B > 0),
        }
        if which == "queries":
            columns["split"] = np.asarray(dataset.split_N[start:end])
            columns["num_positives"] = np.diff(dataset.relevance.indptr[start : end + 1])
        yield pa.table(columns)


def _tokens(
    dataset: XMCDataset, which: str, reading: Reading, scratch: Path | None
) -> Iterator[pa.Table]:
    """Facts about the tokens of texts, in blocks: of all labels, and of evenly spaced queries."""
    assert reading.tokenizer is not None
    folder = scratch or dataset.path.with_name("label-tokens")
    num_rows = most = dataset.num_labels
    if which == "labels":
        options = {"max_length": reading.max_length, "meta": {"text": reading.text}}
        tokenise(dataset, which, folder / which, reading.tokenizer, options)
        cache = TokenCache.open(folder / which, verify=False)
    else:
        num_rows = dataset.num_queries
        most = min(num_rows, TOKENISED_QUERIES)
    for some in blocks(max(most, 1), BATCH_ROWS):
        place_B = np.arange(some.start, min(some.stop, most))
        rows_B = place_B * (num_rows - 1) // max(most - 1, 1)
        if which == "labels":
            tokens = cache.part(rows_B)
        else:
            texts = dataset.query_texts(rows_B, reading.text)
            tokens = encode_texts(texts, reading.tokenizer, reading.max_length)
        columns = {
            "row": rows_B,
            "unknown": unknown_shares(tokens, reading),
            "tokens": as_bytes(tokens, tokens.ids.dtype, 0),
            "is_cut": tokens.lengths() >= reading.max_length,
        }
        yield pa.table(columns)
    remove(folder)


def _pairs(matrix: csr_matrix) -> Iterator[pa.Table]:
    for start, end in row_blocks(matrix.indptr):
        pairs = matrix[start:end].tocoo()
        query_P = pairs.row.astype(np.int64) + start
        columns = {"query": query_P, "label": pairs.col, "relevance": pairs.data}
        yield pa.table(columns)


COUNTED = (
    ("queries", "queries with the text of another query", "queries_with_this_text > 1"),
    ("queries", "test queries with the text of a training query", "text_in_train = 1"),
    ("labels", "labels with the text of another label", "labels_with_this_text > 1"),
    ("queries", "queries without a title, whose content is read instead", "is_untitled"),
    ("labels", "labels without a title, whose content is read instead", "is_untitled"),
)


def text_counts(tables: Database, reading: Reading) -> dict[str, int]:
    """Numbers of duplicate texts, and of rows whose content is read because they have no title."""
    counted = COUNTED if reading.text == "title" else COUNTED[:3]
    select = "SELECT count(*) FROM {} WHERE {}"
    return {
        what: one_row(tables, select.format(table, condition))[0]
        for table, what, condition in counted
    }


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
