"""Texts as token ids: a ragged cache on disk, and the same in memory for serving.

All ids are in one flat array, text i from `offsets[i]` to `offsets[i + 1]`, special tokens included; nothing is padded
until a batch is asked for.

Shape legend: N texts, B rows of one batch, T tokens of the batch's longest text, F tokens of the batch in all.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unidec.data.array_file import growing_array
from unidec.data.storage import REBUILD, file_sha256, load_array, read_manifest, verify_once, write_folder
from unidec.errors import ArtifactError, DataError
from unidec.progress import progress

KIND = "tokens"
VERSION = 1
CHUNK_TEXTS = 256
"""Texts padded together in training."""

_ENCODE_AT_ONCE = 4096  # texts: bounds the memory of `encode_texts`, and of its Python lists, for any input


class Tokens:
    """Token ids of N texts; `batch` and `ragged` take any rows in any order.

    Attributes:
        ids: uint16 or uint32 [all tokens], flat.
        offsets: int64 [N + 1]. This and `ids` are all that is held: 2 (or 4) bytes a token and 8 bytes a text.
        vocab_size: every id is below it.
        pad_id: id in the padding of `batch`, under a False mask.
        max_length: no text has more tokens than this.
    """

    def __init__(self, ids: NDArray[Any], offsets: NDArray[np.int64], vocab_size: int, pad_id: int, max_length: int):
        self.ids, self.offsets = np.asarray(ids), np.asarray(offsets)  # asarray: indexing plain arrays is faster
        self.vocab_size, self.pad_id, self.max_length = vocab_size, pad_id, max_length

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def lengths(self, rows: Sequence[int] | NDArray[Any] | None = None) -> NDArray[np.int64]:
        """Tokens of some texts or of all, int64 [B]; not kept."""
        if rows is None:
            return np.diff(self.offsets)
        rows_B = np.asarray(rows, dtype=np.int64)
        return self.offsets[rows_B + 1] - self.offsets[rows_B]

    def places(self, rows: Sequence[int] | NDArray[Any]) -> NDArray[np.int64]:
        """Places in `ids` of the tokens of some texts, int64 [F]."""
        rows_B = np.asarray(rows, dtype=np.int64)
        length_B = self.lengths(rows_B)
        shift_B = self.offsets[rows_B] - (np.cumsum(length_B) - length_B)
        return np.arange(length_B.sum()) + np.repeat(shift_B, length_B)

    def ragged(self, rows: Sequence[int] | NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Flat ids int64 [F] and offsets int64 [B + 1] of some texts, as `torch.nn.EmbeddingBag` takes them.

        Raises IndexError: a row that is negative or beyond the last text.
        """
        rows_B = np.asarray(rows, dtype=np.int64)
        if rows_B.size and (rows_B.min() < 0 or rows_B.max() >= len(self)):
            raise IndexError(f"rows from {rows_B.min()} to {rows_B.max()} of {len(self)} texts")
        offsets = _offsets([self.lengths(rows_B)])
        return self.ids[self.places(rows_B)].astype(np.int64), offsets

    def batch(self, rows: Sequence[int] | NDArray[Any], most: int = 0) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Ids int64 [B, T], padded on the right to the longest text, and the mask bool [B, T] of real tokens; of each
        text the first `most` tokens, or all with 0."""
        flat_F, offsets = self.ragged(rows)
        length_B = np.diff(offsets)
        if most:
            flat_F = flat_F[np.arange(len(flat_F)) - np.repeat(offsets[:-1], length_B) < most]
            length_B = np.minimum(length_B, most)
        mask_BT = np.arange(length_B.max(initial=0)) < length_B[:, None]
        ids_BT = np.full(mask_BT.shape, self.pad_id, dtype=np.int64)
        ids_BT[mask_BT] = flat_F
        return ids_BT, mask_BT


def length_chunks(lengths_B: NDArray[np.int64], size: int = CHUNK_TEXTS) -> Iterator[NDArray[np.int64]]:
    """Places of the texts, shortest first, at most `size` at a time: together they waste few padding tokens."""
    order_B = np.argsort(lengths_B, kind="stable")
    yield from (order_B[start : start + size] for start in range(0, len(order_B), size))


def same_texts(tokens: Tokens, others: Tokens, most: int = 0) -> NDArray[np.int64]:
    """For each text one of `others` with the same tokens, -1 where there is none: int64 [N].

    Args:
        most: only so many tokens at a text's start count; 0: all.
    """
    out_N = np.full(len(tokens), -1, dtype=np.int64)
    if not len(others):
        return out_N
    hash_N, hash_M = _hashes(tokens, most), _hashes(others, most)
    order_M = np.argsort(hash_M, kind="stable")
    other_N = order_M[np.minimum(np.searchsorted(hash_M[order_M], hash_N), len(others) - 1)]
    length_N, length_M = (np.minimum(each.lengths(), most or each.max_length) for each in (tokens, others))
    alike = np.flatnonzero((hash_M[other_N] == hash_N) & (length_M[other_N] == length_N))
    for start in range(0, len(alike), _ENCODE_AT_ONCE):
        some = alike[start : start + _ENCODE_AT_ONCE]
        (ids_BT, mask_BT), (other_BT, _) = tokens.batch(some, most), others.batch(other_N[some], most)
        same = ((ids_BT == other_BT) | ~mask_BT).all(axis=1)
        out_N[some[same]] = other_N[some[same]]
    return out_N


def _hashes(tokens: Tokens, most: int) -> NDArray[np.uint64]:
    """A number of each text's tokens, as a rule another one for other tokens: uint64 [N]."""
    factor_T = np.random.default_rng(0).integers(2**64, size=tokens.max_length, dtype=np.uint64) | np.uint64(1)
    factor_T[most or len(factor_T) :] = 0
    out_N = np.empty(len(tokens), dtype=np.uint64)
    for start in range(0, len(tokens), _ENCODE_AT_ONCE):
        rows = np.arange(start, min(start + _ENCODE_AT_ONCE, len(tokens)))
        ids, mask = tokens.batch(rows)
        out_N[rows] = (np.where(mask, ids + 1, 0).astype(np.uint64) * factor_T[: ids.shape[1]]).sum(axis=1)
    return out_N


class TokenCache(Tokens):
    """`Tokens` memory-mapped from a folder of `build_token_cache`.

    Attributes:
        path: the folder.
        meta: vocab_size, pad_id, max_length, tokenizer_sha256, num_texts, num_tokens, and what the builder was given.
    """

    path: Path
    meta: dict[str, Any]

    @classmethod
    def open(cls, path: str | os.PathLike[str], verify: bool = True) -> TokenCache:
        """Open a cache; with `verify` hashes and all ids are checked too, once in a process (`verify_once`).

        Raises ArtifactError: missing, damaged, of another version, or arrays that do not fit together.
        """
        root = Path(path)
        with verify_once(root, verify) as needed:
            meta = read_manifest(root, KIND, VERSION, needed)["meta"]
            facts = [meta.get(key) for key in ("vocab_size", "pad_id", "max_length", "num_texts")]
            if any(type(number) is not int or number < 0 for number in facts):
                what = "a manifest without the facts of a token cache"
                raise ArtifactError(what, where=str(root), got=str(meta)[:200])
            vocab_size, pad_id, max_length, num_texts = facts
            offsets = load_array(root / "offsets.npy", np.int64)
            ids = load_array(root / "ids.npy", _id_dtype(vocab_size))
            fit = len(offsets) == num_texts + 1 and offsets[0] == 0 and offsets[-1] == len(ids)
            if fit and needed and len(ids):
                lengths = np.diff(offsets)
                fit = lengths.min() >= 0 and lengths.max() <= max_length and ids.max() < vocab_size
            if not fit:
                what = "offsets and ids do not fit together, or ids the vocabulary"
                expected = f"{num_texts} texts of at most {max_length} tokens, ids below {vocab_size}"
                raise ArtifactError(what, where=str(root), got=f"{len(ids)} ids", expected=expected, fix=REBUILD)
        cache = cls(ids, offsets, vocab_size, pad_id, max_length)
        cache.path, cache.meta = root, meta
        return cache


@dataclass(frozen=True)
class Piece:
    """One token of a text as the vocabulary writes it; whether it replaces an unknown word, or was added around."""

    text: str
    unknown: bool
    special: bool


class TextTokenizer:
    """`tokenizer.json`, its own truncation and padding replaced: cut on the right, specials kept, no padding.

    Args:
        folder: holds `tokenizer.json`.
        max_length: tokens a text at most, special tokens included.

    Attributes:
        num_specials: tokens added around every text.
        unknown_id: of the token for what the vocabulary lacks; -1 without one.

    Raises:
        ArtifactError: no tokenizer there, one that cannot be read, or special tokens alone exceed max_length.
    """

    def __init__(self, folder: str | os.PathLike[str], max_length: int):
        from tokenizers import Tokenizer

        self.file = Path(folder) / "tokenizer.json"
        if not self.file.is_file():
            raise ArtifactError(
                "no tokenizer here",
                where=str(self.file),
                fix="save the tokenizer in its fast form: AutoTokenizer.from_pretrained(...).save_pretrained(folder)",
            )
        try:
            self._tokenizer = Tokenizer.from_file(str(self.file))
        except Exception as error:  # the Rust side raises Exception itself
            raise ArtifactError("not a readable tokenizer", where=str(self.file), got=str(error)[:200]) from error
        specials = self._tokenizer.num_special_tokens_to_add(False)
        if max_length <= specials:
            got, expected = f"max_length {max_length}", f"> {specials}"
            raise ArtifactError("no room for text", where=str(self.file), got=got, expected=expected)
        self.max_length, self.num_specials = max_length, specials
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
        padding, named = self._tokenizer.padding, map(self._tokenizer.token_to_id, ("[PAD]", "<pad>"))
        # 0 without one: it is only ever seen under a False mask
        self.pad_id = int(padding["pad_id"]) if padding else next(filter(None, named), 0)
        model = json.loads(self.file.read_text(encoding="utf-8"))["model"]
        unknown = model.get("unk_id")  # Unigram
        if unknown is None and model.get("unk_token"):
            unknown = self._tokenizer.token_to_id(model["unk_token"])
        self.unknown_id = -1 if unknown is None else int(unknown)
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(max_length, stride=0, strategy="longest_first", direction="right")

    def pieces(self, text: str) -> tuple[list[Piece], bool]:
        """The tokens of a text, and whether it was cut; raises as `encode`."""
        try:
            encoding = self._tokenizer.encode(text)
        except (TypeError, ValueError) as error:
            raise _not_text([text], error) from error
        rows = zip(encoding.tokens, encoding.ids, encoding.special_tokens_mask, strict=True)
        found = [Piece(token, number == self.unknown_id, bool(special)) for token, number, special in rows]
        return found, bool(encoding.overflowing)

    def encode(self, texts: Sequence[str]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Flat ids, uint16 or uint32, and the number of tokens of each text, int64. An empty text is its specials only.

        Raises:
            DataError: an item that is not a string, or a string that is not valid Unicode (a lone surrogate).
        """
        try:
            encoded = [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts))]
        except (TypeError, ValueError) as error:
            raise _not_text(texts, error) from error
        length = np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded))
        flat = np.fromiter(chain.from_iterable(encoded), dtype=_id_dtype(self.vocab_size), count=int(length.sum()))
        return flat, length


def _not_text(texts: Sequence[Any], error: Exception) -> DataError:
    """Names the first item that is not a string of valid Unicode."""
    faulty = (i for i, t in enumerate(texts) if not isinstance(t, str) or any(0xD800 <= ord(c) < 0xE000 for c in t))
    where = f"text {next(faulty, -1)} of {len(texts)}"
    what, expected = "a text that cannot be tokenised", "valid Unicode strings"
    return DataError(what, where=where, got=str(error)[:200], expected=expected)


def _id_dtype(vocab_size: int) -> np.dtype[Any]:
    return np.dtype("<u2" if vocab_size < 65536 else "<u4")


@functools.lru_cache(maxsize=8)
def _cached_tokenizer(folder: str, max_length: int, _changed: tuple[int, int]) -> TextTokenizer:
    return TextTokenizer(folder, max_length)


def load_tokenizer(folder: str | os.PathLike[str], max_length: int) -> TextTokenizer:
    """`TextTokenizer`, kept in memory while its file stays the same: reading one takes longer than a small batch."""
    file = Path(os.path.abspath(folder)) / "tokenizer.json"
    changed = (file.stat().st_mtime_ns, file.stat().st_size) if file.is_file() else (0, 0)
    return _cached_tokenizer(str(file.parent), max_length, changed)


def encode_texts(texts: Sequence[str], tokenizer_folder: str | os.PathLike[str], max_length: int) -> Tokens:
    """Texts to `Tokens` in memory, for serving. Raises as `TextTokenizer` and its `encode`."""
    tokenizer = load_tokenizer(tokenizer_folder, max_length)
    if isinstance(texts, str):
        raise DataError("a list of texts is needed", got="one string", fix="pass [text]")
    starts = range(0, max(len(texts), 1), _ENCODE_AT_ONCE)
    flat, lengths = zip(*(tokenizer.encode(texts[start : start + _ENCODE_AT_ONCE]) for start in starts), strict=True)
    return Tokens(np.concatenate(flat), _offsets(lengths), tokenizer.vocab_size, tokenizer.pad_id, max_length)


def _offsets(lengths: Iterable[NDArray[Any]]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(np.concatenate([*lengths, np.zeros(0, np.int64)]))])


def build_token_cache(
    texts: Iterable[list[str]], tokenizer_folder: str | os.PathLike[str], max_length: int, out: str | os.PathLike[str],
    num_texts: int, meta: Mapping[str, Any] | None = None,
) -> Path:  # fmt: skip
    """Tokenise batches of texts into a folder; memory is bounded by a batch and 8 bytes a text.

    Args:
        texts: batches, in the order of rows (`XMCDataset.text_batches`).
        tokenizer_folder, max_length: see `TextTokenizer`.
        out: the folder: ids.npy (uint16 where the vocabulary is below 65,536, else uint32), offsets.npy (int64, N + 1).
        num_texts: how many texts there will be, for the display of progress.
        meta: more facts for the manifest, such as {"text": "title"}.

    Raises:
        DataError: a text that cannot be tokenised.
        ArtifactError: no tokenizer, or the folder cannot be written.
    """
    tokenizer = TextTokenizer(tokenizer_folder, max_length)
    lengths: list[NDArray[Any]] = []
    with write_folder(out, KIND, VERSION, meta or {}) as folder:
        with (
            growing_array(folder.path / "ids.npy", _id_dtype(tokenizer.vocab_size)) as add_ids,
            progress(total=num_texts, desc="tokenise", unit="text") as bar,
        ):
            for batch in texts:
                flat, length = tokenizer.encode(batch)
                add_ids(flat)
                lengths.append(length.astype(np.int32))
                bar.update(len(batch))
        offsets = _offsets(lengths)
        np.save(folder.path / "offsets.npy", offsets)
        folder.meta |= {
            "vocab_size": tokenizer.vocab_size,
            "pad_id": tokenizer.pad_id,
            "max_length": max_length,
            "tokenizer_sha256": file_sha256(tokenizer.file),
            "num_texts": len(offsets) - 1,
            "num_tokens": int(offsets[-1]),
        }
    return Path(out)
