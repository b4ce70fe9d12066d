"""Synthetic data of any number of queries N and labels L, as raw text files or in the pipeline's
own folders.

    python benchmarks/synthetic.py raw   runs/synthetic --train 100000 --labels 100000
    python benchmarks/synthetic.py store runs/synthetic --train 100000 --labels 10000000 \\
        --encoder all-MiniLM-L6-v2

`raw` writes the layout xmc-text (read by `unidec data ingest`); `store` writes `dataset/` and
`tokens/` as ingest and the tokeniser would, for sizes at which text files make no sense.

Labels are drawn from a Zipf-Mandelbrot law; a query's further positives come from the first one's
topic half of the time; its words are mostly words of its labels. Words are those of a real data
set, with their frequencies. Every draw is a hash of (seed, row, place): a row is the same in blocks
of any size, only a block is ever held, and a label's text is known without a table of texts.

Legend: B rows of a block, F words or tokens of a block in all, V words of the vocabulary.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from unidec.data import dataset as dataset_module
from unidec.data import tokens as tokens_module
from unidec.data.array_file import growing_array
from unidec.data.dataset import BATCH_ROWS
from unidec.data.raw import TEXT_SCHEMA, text_table
from unidec.data.storage import file_sha256, files_sha256, swap_folder, write_folder
from unidec.data.tokens import TextTokenizer, TokenCache
from unidec.progress import progress

REAL = Path(__file__).resolve().parents[1] / "data" / "raw" / "lf-debian"
TOPIC = 16  # labels that share two words
MOST_POSITIVES = 64
_SLOTS = 1 << 20  # of the table that words are drawn from
# streams of random numbers
_COUNT, _ZIPF, _SAME, _MEMBER, _LENGTH, _TOPIC_WORD, _WORD, _SOURCE, _PICK, _LONGER = range(10)
Ragged = tuple[np.ndarray, np.ndarray]


class Words:
    """The words of a raw data set's titles and how often each occurs; plain lower-case words only.

    Attributes:
        text_V: large_string [V], most frequent first. slot: int32, word of each of 2^20 equal
        shares.
    """

    def __init__(self, folder: Path = REAL) -> None:
        counts: Counter[str] = Counter()
        for name in ("trn.json.gz", "lbl.json.gz"):
            with gzip.open(folder / name, "rt", encoding="utf-8") as file:
                for line in file:
                    counts.update(re.findall(r"[a-z]{2,20}", json.loads(line)["title"].lower()))
        ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        self.text_V = pa.array([word for word, _ in ordered], pa.large_string())
        share_V = np.cumsum([count for _, count in ordered], dtype=np.float64)
        self.slot = np.searchsorted(
            share_V / share_V[-1], (np.arange(_SLOTS) + 0.5) / _SLOTS
        ).astype(np.int32)


class Synthetic:
    """What is in the data, as functions of row numbers.

    Args:
        words: vocabulary.
        num_train, num_test: queries; rows of test queries follow those of training queries.
        num_labels: L.
        mean_positives: about so many positives a query, at least 1 (pairs drawn twice count once).
        query_mean, label_mean: words of a text on average, at least 3; lengths lie within 2 of it.
        exponent: of the Zipf law, below 1. shift: labels of nearly equal frequency at its head.
        seed: of everything.
    """

    def __init__(
        self,
        words: Words,
        num_train: int,
        num_test: int,
        num_labels: int,
        *,
        mean_positives: float = 4.0,
        query_mean: float = 6.0,
        label_mean: float = 3.5,
        exponent: float = 0.75,
        shift: float = 10.0,
        seed: int = 0,
    ) -> None:
        self.words = words
        self.num_train = num_train
        self.num_test = num_test
        self.num_labels = num_labels
        self.mean_positives = mean_positives
        self.exponent = exponent
        self.shift = shift
        self.seed = seed
        self.query_mean = query_mean
        self.label_mean = label_mean
        mean = mean_positives - 1.0
        poisson = [
            math.exp(k * math.log(mean) - mean - math.lgamma(k + 1))
            if mean > 0
            else 1.0 - min(k, 1)
            for k in range(MOST_POSITIVES)
        ]
        self._poisson = np.cumsum(poisson)
        # popular labels lie anywhere in the table, not side by side: ids are ranks times a factor
        # without a common one
        self._factor = max(1, int(num_labels * 0.6180339887))
        while math.gcd(self._factor, num_labels) > 1:
            self._factor += 1

    @property
    def num_queries(self) -> int:
        return self.num_train + self.num_test

    def positives(self, rows_B: np.ndarray) -> Ragged:
        """Labels of each query, ascending, each once: (int32 [F], offsets int64 [B + 1])."""
        count_B = self._num_draws(rows_B)
        row_F = np.repeat(np.arange(len(rows_B)), count_B)
        place_F = np.arange(len(row_F)) - np.repeat(np.cumsum(count_B) - count_B, count_B)
        key = np.unique(row_F * self.num_labels + self._draw(rows_B[row_F], place_F))
        per_row = np.bincount(key // self.num_labels, minlength=len(rows_B))
        return (key % self.num_labels).astype(np.int32), _offsets(per_row)

    def query_words(self, rows_B: np.ndarray) -> Ragged:
        """Words of each query's text: (int32 [F], offsets [B + 1])."""
        length_B = self._length(rows_B, self.query_mean, 5)
        row_F, place_F = _places(length_B)
        query_F = rows_B[row_F]
        pick_F = self._bits(_PICK, query_F, place_F)
        label_F = self._draw(
            query_F, (pick_F % self._num_draws(rows_B)[row_F].astype(np.uint64)).astype(np.int64)
        )
        of_label_F = self._label_word(
            label_F, (pick_F >> np.uint64(32)).astype(np.int64) % self._label_length(label_F)
        )
        other_F = self._word(_WORD, query_F + self.num_labels, place_F)
        return np.where(
            self._uniform(_SOURCE, query_F, place_F) < 0.75, of_label_F, other_F
        ), _offsets(length_B)

    def label_words(self, rows_B: np.ndarray) -> Ragged:
        """Words of each label's text: (int32 [F], offsets [B + 1])."""
        length_B = self._label_length(rows_B)
        row_F, place_F = _places(length_B)
        return self._label_word(rows_B[row_F], place_F), _offsets(length_B)

    def _num_draws(self, rows_B: np.ndarray) -> np.ndarray:
        return 1 + np.minimum(
            np.searchsorted(self._poisson, self._uniform(_COUNT, rows_B)), MOST_POSITIVES - 1
        )

    def _draw(self, query_F: np.ndarray, place_F: np.ndarray) -> np.ndarray:
        """The label of a query's draw number `place`."""
        own_F = self._zipf(query_F, place_F)
        related_F = self._zipf(query_F, np.zeros_like(place_F)) // TOPIC * TOPIC
        related_F += (self._bits(_MEMBER, query_F, place_F) % np.uint64(TOPIC)).astype(np.int64)
        same_F = (
            (place_F > 0)
            & (self._uniform(_SAME, query_F, place_F) < 0.5)
            & (related_F < self.num_labels)
        )
        return np.where(same_F, related_F, own_F)

    def _zipf(self, query_F: np.ndarray, place_F: np.ndarray) -> np.ndarray:
        power = 1.0 - self.exponent
        low = self.shift**power
        high = (self.num_labels + self.shift) ** power
        rank_F = (self._uniform(_ZIPF, query_F, place_F) * (high - low) + low) ** (
            1 / power
        ) - self.shift
        return (
            np.minimum(rank_F.astype(np.int64), self.num_labels - 1)
            * self._factor
            % self.num_labels
        )

    def _label_length(self, label_F: np.ndarray) -> np.ndarray:
        return self._length(label_F + self.num_queries, self.label_mean, 4)

    def _length(self, text_F: np.ndarray, mean: float, lengths: int) -> np.ndarray:
        """Words of texts: one of so many lengths around the mean, drawn alike."""
        shortest = mean - (lengths - 1) / 2
        drawn_F = (self._bits(_LENGTH, text_F) % np.uint64(lengths)).astype(np.int64)
        return int(shortest) + drawn_F + (self._uniform(_LONGER, text_F) < shortest % 1)

    def _label_word(self, label_F: np.ndarray, place_F: np.ndarray) -> np.ndarray:
        """The first two words are the topic's, the others the label's own."""
        topic_F = self._word(_TOPIC_WORD, label_F // TOPIC, place_F)
        return np.where(place_F < 2, topic_F, self._word(_WORD, label_F, place_F))

    def _word(self, stream: int, row_F: np.ndarray, place_F: np.ndarray) -> np.ndarray:
        return self.words.slot[self._bits(stream, row_F, place_F) >> np.uint64(44)]

    def _uniform(self, stream: int, row_F: np.ndarray, place_F: np.ndarray | int = 0) -> np.ndarray:
        return (self._bits(stream, row_F, place_F) >> np.uint64(11)) * 2.0**-53

    def _bits(self, stream: int, row_F: np.ndarray, place_F: np.ndarray | int = 0) -> np.ndarray:
        """64 random bits of each (seed, stream, row, place): splitmix64 (Steele, Lea and Flood
        2014), twice.
        """
        key = np.uint64((self.seed * 16 + stream) * 0x9E3779B97F4A7C15 & (1 << 64) - 1)
        return _mixed(
            _mixed(np.asarray(row_F).astype(np.uint64) + key)
            + np.asarray(place_F).astype(np.uint64)
        )


def _mixed(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _places(length_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Row and place within the row of each entry, both int64 [F]."""
    row_F = np.repeat(np.arange(len(length_B)), length_B)
    return row_F, np.arange(len(row_F)) - np.repeat(np.cumsum(length_B) - length_B, length_B)


def _offsets(length_B: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(length_B, dtype=np.int64)])


def _blocks(desc: str, begin: int, end: int, block: int = BATCH_ROWS) -> Iterator[np.ndarray]:
    with progress(total=end - begin, desc=desc, unit="row") as bar:
        for start in range(begin, end, block):
            yield np.arange(start, min(start + block, end))
            bar.update(min(start + block, end) - start)


# -- texts
# --------------------------------------------------------------------------------------------------


def texts(words: Words, ragged: Ragged) -> pa.Array:
    """Word numbers to texts, large_string [B]."""
    flat, offsets = ragged
    lists = pa.LargeListArray.from_arrays(pa.array(offsets), words.text_V.take(pa.array(flat)))
    return pc.binary_join(lists, pa.scalar(" ", pa.large_string()))


def _write_lines(file: BinaryIO, lines: pa.Array) -> None:
    whole = pc.binary_join_element_wise(
        lines, pa.scalar("", pa.large_string()), pa.scalar("\n", pa.large_string())
    )
    file.write(whole.buffers()[2])  # the characters of all lines, one after the other


def write_raw(data: Synthetic, folder: Path, block: int = BATCH_ROWS) -> Path:
    """Raw files of the layout xmc-text, written block by block."""
    with swap_folder(folder) as out:
        with open(out / "Y.txt", "wb") as file:
            for rows_B in _blocks("write label texts", 0, data.num_labels, block):
                _write_lines(file, texts(data.words, data.label_words(rows_B)))
        for short, begin, end in (
            ("trn", 0, data.num_train),
            ("tst", data.num_train, data.num_queries),
        ):
            with (
                open(out / f"{short}_X.txt", "wb") as queries,
                open(out / f"{short}_X_Y.txt", "wb") as pairs,
            ):
                pairs.write(f"{end - begin} {data.num_labels}\n".encode())
                for rows_B in _blocks(f"write {short} queries", begin, end, block):
                    _write_lines(queries, texts(data.words, data.query_words(rows_B)))
                    labels, offsets = data.positives(rows_B)
                    entry = pc.binary_join_element_wise(
                        pc.cast(pa.array(labels), pa.large_string()),
                        pa.scalar("1", pa.large_string()),
                        pa.scalar(":", pa.large_string()),
                    )
                    lists = pa.LargeListArray.from_arrays(pa.array(offsets), entry)
                    _write_lines(pairs, pc.binary_join(lists, pa.scalar(" ", pa.large_string())))
    return folder


# -- the pipeline's own folders
# ---------------------------------------------------------------------------------------


def write_dataset(data: Synthetic, folder: Path) -> Path:
    """The folder that ingest would write of `write_raw`'s files, without validation queries."""
    num_train = data.num_train
    num_test = data.num_test
    meta: dict[str, Any] = {
        "name": folder.name,
        "format": "synthetic",
        "num_queries": data.num_queries,
        "num_labels": data.num_labels,
        "num_pairs": 0,
        "num_filter_pairs": 0,
        "splits": {"train": num_train, "validation": 0, "test": num_test},
        "raw_sha256": files_sha256({}),
        "raw_files": {},
    }
    with write_folder(folder, dataset_module.KIND, dataset_module.VERSION, meta) as out:
        _write_table(out.path / "labels.arrow", data, data.label_words, data.num_labels)
        _write_table(out.path / "queries.arrow", data, data.query_words, data.num_queries)
        with (
            growing_array(out.path / "relevance_indptr.npy", np.int64) as add_offsets,
            growing_array(out.path / "relevance_indices.npy", np.int32) as add_labels,
            growing_array(out.path / "relevance_data.npy", np.float32) as add_values,
        ):
            add_offsets(np.zeros(1))
            for rows_B in _blocks("write pairs", 0, data.num_queries):
                labels, offsets = data.positives(rows_B)
                add_offsets(offsets[1:] + out.meta["num_pairs"])
                add_labels(labels)
                add_values(np.ones(len(labels)))
                out.meta["num_pairs"] += len(labels)
        split_N = np.repeat(np.array([0, 2], np.uint8), [num_train, num_test])
        empty = {
            "filter_indptr": np.zeros(data.num_queries + 1, np.int64),
            "filter_indices": np.zeros(0, np.int32),
        }
        for name, array in {"split": split_N, **empty}.items():
            np.save(out.path / f"{name}.npy", array, allow_pickle=False)
    return folder


def _write_table(
    path: Path, data: Synthetic, words: Callable[[np.ndarray], Ragged], num_rows: int
) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, TEXT_SCHEMA) as writer:
        for rows_B in _blocks(f"write {path.stem}", 0, num_rows):
            uids = pc.cast(pa.array(rows_B), pa.large_string())
            writer.write_table(text_table(uids, texts(data.words, words(rows_B))).combine_chunks())


class WordTokens:
    """The token ids of each word, from the tokenizer itself: BERT's splits at spaces before
    anything else.
    """

    def __init__(self, words: Words, tokenizer: TextTokenizer) -> None:
        flat, length_V = tokenizer.encode(words.text_V.to_pylist())
        self.tokenizer = tokenizer
        whole = _offsets(length_V)
        self.begin = int(flat[0])
        self.end = int(flat[whole[1] - 1])
        inner = np.ones(len(flat), dtype=bool)
        inner[whole[:-1]] = inner[whole[1:] - 1] = False
        self.flat = flat[inner]
        self.count_V = length_V - 2
        self.first_V = np.cumsum(self.count_V) - self.count_V

    def encode(self, ragged: Ragged) -> Ragged:
        """Word numbers to token ids, cut and with special tokens as the tokenizer does: (ids [F],
        offsets [B + 1]).
        """
        word_F, offsets = ragged
        word_row, _ = _places(np.diff(offsets))
        row_T, place_T = _places(self.count_V[word_F])  # here "rows" are words
        id_T = self.flat[self.first_V[word_F][row_T] + place_T]
        text_T = word_row[row_T]
        full_B = np.bincount(text_T, minlength=len(offsets) - 1)
        place_T = np.arange(len(text_T)) - (np.cumsum(full_B) - full_B)[text_T]
        kept_B = np.minimum(full_B, self.tokenizer.max_length - 2)
        out = _offsets(kept_B + 2)
        ids = np.empty(out[-1], dtype=self.flat.dtype)
        ids[out[:-1]], ids[out[1:] - 1] = self.begin, self.end
        kept_T = place_T < kept_B[text_T]
        ids[(out[:-1][text_T] + 1 + place_T)[kept_T]] = id_T[kept_T]
        return ids, out


def write_tokens(
    data: Synthetic, folder: Path, which: str, tokenizer_folder: Path, max_length: int = 32
) -> Path:
    """The token cache that the tokeniser would write of "queries" or "labels"."""
    tokenizer = TextTokenizer(tokenizer_folder, max_length)
    encoder = WordTokens(data.words, tokenizer)
    words, num_texts = _texts_of(data, which)
    meta = {
        "text": "title",
        "vocab_size": tokenizer.vocab_size,
        "pad_id": tokenizer.pad_id,
        "max_length": max_length,
        "tokenizer_sha256": file_sha256(tokenizer.file),
        "num_texts": num_texts,
        "num_tokens": 0,
    }
    with (
        write_folder(folder, tokens_module.KIND, tokens_module.VERSION, meta) as out,
        growing_array(out.path / "ids.npy", encoder.flat.dtype) as add_ids,
        growing_array(out.path / "offsets.npy", np.int64) as add_offsets,
    ):
        add_offsets(np.zeros(1))
        for rows_B in _blocks(f"write tokens of {which}", 0, num_texts):
            id_F, offset_B = encoder.encode(words(rows_B))
            add_offsets(offset_B[1:] + out.meta["num_tokens"])
            add_ids(id_F)
            out.meta["num_tokens"] += len(id_F)
    return folder


def _texts_of(data: Synthetic, which: str) -> tuple[Callable[[np.ndarray], Ragged], int]:
    if which == "queries":
        return data.query_words, data.num_queries
    return data.label_words, data.num_labels


class HashedTokens(TokenCache):
    """Token ids computed when they are asked for: texts of 10^8 labels and more that no disk needs
    to hold.

    `folder`, if given, becomes a token cache without arrays: what names the texts in a run's
    identity.
    """

    def __init__(
        self,
        data: Synthetic,
        which: str,
        tokenizer_folder: Path,
        max_length: int = 32,
        folder: Path | None = None,
    ) -> None:
        tokenizer = TextTokenizer(tokenizer_folder, max_length)
        nothing = np.zeros(0, np.uint16), np.zeros(1, np.int64)
        super().__init__(*nothing, tokenizer.vocab_size, tokenizer.pad_id, max_length)
        self.meta = {
            "text": "title",
            "tokenizer_sha256": file_sha256(tokenizer.file),
            "seed": data.seed,
            "num_train": data.num_train,
            "num_labels": data.num_labels,
        }
        if folder is not None:
            self.path = folder
            with write_folder(folder, tokens_module.KIND, tokens_module.VERSION, self.meta):
                pass
        self._words, self._num_texts = _texts_of(data, which)
        self._encoder = WordTokens(data.words, tokenizer)

    def __len__(self) -> int:
        return self._num_texts

    def lengths(self, rows: Any = None) -> np.ndarray:
        return np.diff(self.ragged(np.arange(len(self)) if rows is None else rows)[1])

    def ragged(self, rows: Any, most: int = 0) -> Ragged:
        assert not most
        ids, offsets = self._encoder.encode(self._words(np.asarray(rows, dtype=np.int64)))
        return ids.astype(np.int64), offsets


def write_encoder(
    folder: Path, *, hidden: int, layers: int, tokenizer_from: Path, kind: str = "bert"
) -> Path:
    """A transformer of random weights with another's tokenizer: bert, or distilbert (768 and 6:
    DistilBERT's size).
    """
    import torch
    from transformers import AutoConfig, AutoModel

    vocab_size = TextTokenizer(tokenizer_from, 32).vocab_size
    names = {
        "bert": ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
        "distilbert": ("dim", "n_layers", "n_heads", "hidden_dim"),
    }[kind]
    sizes = dict(zip(names, (hidden, layers, max(1, hidden // 64), 4 * hidden), strict=True))
    torch.manual_seed(0)
    model = AutoModel.from_config(AutoConfig.for_model(kind, vocab_size=vocab_size, **sizes))
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        if (tokenizer_from / name).is_file():
            shutil.copyfile(tokenizer_from / name, folder / name)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("form", choices=["raw", "store"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train", type=int, required=True, help="training queries")
    parser.add_argument(
        "--test", type=int, help="test queries (a twentieth of the training queries)"
    )
    parser.add_argument("--labels", type=int, required=True)
    parser.add_argument(
        "--positives", type=float, default=4.0, help="about so many positives a query"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--encoder", default="all-MiniLM-L6-v2", help="store: whose tokenizer")
    parser.add_argument("--max-length", type=int, default=32, help="store: tokens a text at most")
    options = parser.parse_args()
    num_test = max(1, options.train // 20) if options.test is None else options.test
    data = Synthetic(
        Words(),
        options.train,
        num_test,
        options.labels,
        mean_positives=options.positives,
        seed=options.seed,
    )
    if options.form == "raw":
        write_raw(data, options.folder)
        return
    from unidec.model.sources import resolve_encoder

    tokenizer_folder = resolve_encoder(options.encoder)
    write_dataset(data, options.folder / "dataset")
    for which in ("queries", "labels"):
        write_tokens(
            data, options.folder / "tokens" / which, which, tokenizer_folder, options.max_length
        )


if __name__ == "__main__":
    main()
