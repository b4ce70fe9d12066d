"""The tables that are checked: a row per query, label and pair of a data set, with facts about the
texts as the model reads them.

Shape suffixes: N queries of all splits, L labels, P pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.sparse import csr_matrix

from unidec.data.dataset import Text, XMCDataset
from unidec.data.profile import spaced, tested_in_training, text_facts
from unidec.data.propensity import training_counts
from unidec.data.raw import SPLITS, are_blank
from unidec.data.tokens import Tokens, encode_texts, load_tokenizer, same_texts

TOKENISED_QUERIES = 20_000  # number of evenly spaced queries whose tokens are checked


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


def query_frame(dataset: XMCDataset, reading: Reading) -> pd.DataFrame:
    """A row per query: uid, split, text_length, num_positives, queries_with_this_text,
    text_in_train (of non-empty test queries), and with a tokenizer unknown_tokens (share of the
    text's tokens).
    """
    text_N, length_N = text_facts(dataset, "queries", reading.text)
    split_N = np.asarray(dataset.split_N)
    tested_N, in_train_N = tested_in_training(dataset, text_N, length_N)
    columns = {
        "uid": dataset.queries["uid"].to_pandas(),
        "split": np.asarray(SPLITS, dtype=object)[split_N],
        "text_length": length_N,
        "num_positives": np.diff(dataset.relevance.indptr),
        "queries_with_this_text": _group_sizes(text_N, length_N),
        "text_in_train": np.where(tested_N, in_train_N.astype(np.float64), np.nan),
    }
    if reading.tokenizer is not None:
        rows = spaced(np.arange(dataset.num_queries), TOKENISED_QUERIES)
        texts = dataset.query_texts(rows, reading.text)
        unknown_N = np.full(dataset.num_queries, np.nan)
        tokens = encode_texts(texts, reading.tokenizer, reading.max_length)
        unknown_N[rows] = unknown_shares(tokens, reading)
        columns["unknown_tokens"] = unknown_N
    return pd.DataFrame(columns)


def label_frame(dataset: XMCDataset, reading: Reading) -> pd.DataFrame:
    """A row per label: uid, text_length, num_train_queries, labels_with_this_text, and with a
    tokenizer unknown_tokens (share of the text's tokens), labels_with_these_tokens (number of
    labels with other texts but the same tokens) and cut (the text has more tokens than are read).
    """
    text_L, length_L = text_facts(dataset, "labels", reading.text)
    with_this_text_L = _group_sizes(text_L, length_L)
    columns = {
        "uid": dataset.labels["uid"].to_pandas(),
        "text_length": length_L,
        "num_train_queries": training_counts(dataset),
        "labels_with_this_text": with_this_text_L,
    }
    if reading.tokenizer is not None:
        texts = dataset.label_texts(None, reading.text)
        tokens = encode_texts(texts, reading.tokenizer, reading.max_length)
        with_these_tokens_L = _group_sizes(same_texts(tokens, tokens), length_L)
        columns["unknown_tokens"] = unknown_shares(tokens, reading)
        columns["labels_with_these_tokens"] = np.maximum(with_these_tokens_L - with_this_text_L, 0)
        columns["cut"] = tokens.lengths() >= reading.max_length
    return pd.DataFrame(columns)


def pair_frame(dataset: XMCDataset) -> pd.DataFrame:
    """A row per (query, label) pair: query, label, relevance, filtered (1: it is also a filter
    pair).
    """
    pairs = dataset.relevance.tocoo()
    filtered_P = np.isin(_pair_numbers(dataset.relevance), _pair_numbers(dataset.filter_pairs))
    facts = {
        "query": pairs.row.astype(np.int64),
        "label": pairs.col.astype(np.int64),
        "relevance": pairs.data.astype(np.float64),
        "filtered": filtered_P.astype(np.int64),
    }
    return pd.DataFrame(facts)


def _pair_numbers(matrix: csr_matrix) -> np.ndarray:
    """A number for each pair, int64 [P]."""
    pairs = matrix.tocoo()
    return pairs.row.astype(np.int64) * matrix.shape[1] + pairs.col


def text_counts(
    dataset: XMCDataset, reading: Reading, queries: pd.DataFrame, labels: pd.DataFrame
) -> dict[str, int]:
    """Numbers of duplicate texts, and of rows whose content is read because they have no title."""
    of_another_query = queries["queries_with_this_text"] > 1
    of_another_label = labels["labels_with_this_text"] > 1
    counts = {
        "queries with the text of another query": int(of_another_query.sum()),
        "test queries with the text of a training query": int(
            (queries["text_in_train"] == 1).sum()
        ),
        "labels with the text of another label": int(of_another_label.sum()),
    }
    if reading.text == "title":
        for which, table, frame in (
            ("queries", dataset.queries, queries),
            ("labels", dataset.labels, labels),
        ):
            is_read_N = are_blank(table["title"]).to_numpy() & (frame["text_length"] > 0)
            counts[f"{which} without a title, whose content is read instead"] = int(is_read_N.sum())
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


def _group_sizes(key_N: np.ndarray, length_N: np.ndarray) -> np.ndarray:
    """Number of rows with the key of each row; 1 for empty texts, which are counted by
    themselves.
    """
    _, group_N, count_N = np.unique(key_N, return_inverse=True, return_counts=True)
    return np.where(length_N > 0, count_N[group_N], 1)
