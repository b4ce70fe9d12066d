"""Token ids of texts: in a cache on disk, or in memory for serving.

All ids are in one flat array; text i has the ids from `offsets[i]` to `offsets[i + 1]`, special
tokens included. Padding is added only when a batch is built.

Shape legend: N texts, B rows of one batch, T tokens of the batch's longest text, F total tokens of
the batch.
"""

from __future__ import annotations

import contextlib
import functools
import os
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import BaseModel, NonNegativeInt

from unidec.data.array_file import growing_array
from unidec.data.storage import (
    REBUILD,
    file_sha256,
    load_array,
    read_json,
    read_manifest,
    verify_once,
    write_folder,
)
from unidec.errors import ArtifactError, DataError
from unidec.progress import progress

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
KIND = "tokens"
VERSION = 1
# Unicode categories: separators, control and format characters
_INVISIBLE = {"Zs", "Zl", "Zp", "Cc", "Cf"}
_PROMPTED = "prompted-"  # prefix of the files for texts with a prompt
_ENCODE_AT_ONCE = 4096  # texts; limits the memory of Python lists
_SAVE = "save it in its fast form: AutoTokenizer.from_pretrained(...).save_pretrained(folder)"


def places(sizes: Ints) -> Ints:
    """Place of each member within its group, from 0, for groups of these sizes, in order."""
    firsts = np.cumsum(sizes) - sizes
    return np.arange(sizes.sum()) - np.repeat(firsts, sizes)


def word_bounds(begins_F: Bools, lengths_B: Ints) -> tuple[Ints, Ints]:
    """Position of each word's first piece, and its number of pieces, int64 [W].

    Args:
        begins_F: pieces that begin a word, besides the first ones of texts.
    """
    start_W = np.flatnonzero(begins_F | (places(lengths_B) == 0))
    return start_W, np.diff(start_W, append=len(begins_F))


def words_of_texts(start_W: Ints, lengths_B: Ints) -> Ints:
    """How many words begin in each text, int64 [B], given the positions of their first pieces."""
    text_F = np.repeat(np.arange(len(lengths_B)), lengths_B)
    return np.bincount(text_F[start_W], minlength=len(lengths_B))


def is_blank(text: str) -> bool:
    """Whether a text has nothing to read: it is empty, or has only white space and invisible
    characters.
    """
    return all(unicodedata.category(character) in _INVISIBLE for character in text)


class Tokens:
    """Token ids of N texts; `batch` and `ragged` take any rows in any order.

    Attributes:
        ids: uint16 or uint32 [all tokens], the ids of all texts.
        offsets: int64 [N + 1]. With `ids` this takes 2 (or 4) bytes per token and 8 bytes per text.
        vocab_size: every id is below it.
        pad_id: padding id in `batch`, where the mask is False.
        max_length: maximum number of tokens of a text.
        prompted: the same texts with a prompt in front; None: there is no prompt.
    """

    prompted: Tokens | None = None

    def __init__(
        self,
        ids: NDArray[Any],
        offsets: Ints,
        vocab_size: int,
        pad_id: int,
        max_length: int,
    ):
        # asarray: indexing plain arrays is faster
        self.ids = np.asarray(ids)
        self.offsets = np.asarray(offsets)
        self.vocab_size = vocab_size
        self.pad_id = pad_id
        self.max_length = max_length

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def for_transformer(self) -> Tokens:
        """The texts as a transformer reads them: with their prompt, if there is one."""
        return self if self.prompted is None else self.prompted

    def lengths(self, rows: Sequence[int] | NDArray[Any] | None = None) -> Ints:
        """Number of tokens of each of these texts (None: all texts), int64 [B]; not cached."""
        if rows is None:
            return np.diff(self.offsets)
        rows_B = np.asarray(rows, dtype=np.int64)
        return self.offsets[rows_B + 1] - self.offsets[rows_B]

    def starts(self, rows_B: Ints) -> Ints:
        """Positions in `ids` of the first token of these texts, int64 [B]."""
        return self.offsets[rows_B]

    def part(self, rows: Sequence[int] | NDArray[Any]) -> Tokens:
        """These texts, without their prompt."""
        return Tokens(*self.ragged(rows), self.vocab_size, self.pad_id, self.max_length)

    def ragged(self, rows: Sequence[int] | NDArray[Any], most: int = 0) -> tuple[Ints, Ints]:
        """Flat ids int64 [F] and offsets int64 [B + 1] of these texts, in the format of
        `torch.nn.EmbeddingBag`.

        Args:
            most: use only the first `most` tokens of each text; 0: all.

        Raises:
            IndexError: a row is negative or beyond the last text.
        """
        rows_B = np.asarray(rows, dtype=np.int64)
        if rows_B.size and (rows_B.min() < 0 or rows_B.max() >= len(self)):
            raise IndexError(f"rows from {rows_B.min()} to {rows_B.max()} of {len(self)} texts")
        length_B = self.lengths(rows_B)
        if most:
            length_B = np.minimum(length_B, most)
        offsets = _offsets([length_B])
        shift_B = self.starts(rows_B) - offsets[:-1]
        place_F = np.arange(offsets[-1]) + np.repeat(shift_B, length_B)
        return self.ids[place_F].astype(np.int64), offsets

    def batch(self, rows: Sequence[int] | NDArray[Any], most: int = 0) -> tuple[Ints, Bools]:
        """Ids int64 [B, T], padded on the right to the longest text, and mask bool [B, T] (True for
        tokens); `most` as in `ragged`.
        """
        flat_F, offsets = self.ragged(rows, most)
        length_B = np.diff(offsets)
        mask_BT = np.arange(length_B.max(initial=0)) < length_B[:, None]
        ids_BT = np.full(mask_BT.shape, self.pad_id, dtype=np.int64)
        ids_BT[mask_BT] = flat_F
        return ids_BT, mask_BT


def same_texts(tokens: Tokens, others: Tokens, most: int = 0) -> Ints:
    """For each text, the row of a text in `others` with the same tokens, int64 [N]; -1 if there is
    none.

    Args:
        most: compare only the first `most` tokens; 0: all.
    """
    dtype = np.promote_types(tokens.ids.dtype, others.ids.dtype)
    known = as_bytes(others, dtype, most)
    row_N = pc.index_in(as_bytes(tokens, dtype, most), value_set=known)
    return pc.fill_null(row_N, -1).to_numpy().astype(np.int64)


def as_bytes(tokens: Tokens, dtype: np.dtype[Any], most: int) -> pa.Array:
    """The first `most` ids of each text (0: all) as a byte string, for comparisons."""
    starts = pa.py_buffer(tokens.offsets * dtype.itemsize)
    ids = pa.py_buffer(tokens.ids.astype(dtype, copy=False))
    texts = pa.Array.from_buffers(pa.large_binary(), len(tokens), [None, starts, ids])
    return pc.binary_slice(texts, 0, most * dtype.itemsize) if most else texts


class TokenCache(Tokens):
    """`Tokens` that are memory-mapped from a folder written by `build_token_cache`.

    Attributes:
        path: the folder.
        meta: vocab_size, pad_id, max_length, tokenizer_sha256, num_texts, num_tokens, the `meta`
            argument of `build_token_cache`, and its prompt if there is one.
    """

    path: Path
    meta: dict[str, Any]

    @classmethod
    def open(cls, path: str | os.PathLike[str], verify: bool = True) -> TokenCache:
        """Open a cache.

        Args:
            verify: also check the sha256 of the files and all ids, once per process
            (`verify_once`).

        Raises:
            ArtifactError: the cache is missing, damaged or of a newer version, or its arrays do not
            match.
        """
        root = Path(path)
        with verify_once(root, verify) as needed:
            meta = read_manifest(root, KIND, VERSION, needed)["meta"]
            try:
                facts = _Facts.model_validate(meta)
                tokens = cls._load(root, "", facts, needed)
                if meta.get("prompt"):
                    tokens.prompted = cls._load(root, _PROMPTED, facts, needed)
            except ValueError as error:
                raise ArtifactError(
                    "the arrays or the manifest are not those of a token cache",
                    where=root,
                    got=error,
                    expected=f"as the manifest says: {meta}"[:200],
                    fix=REBUILD,
                ) from error
        tokens.path = root
        tokens.meta = meta
        return tokens

    @classmethod
    def _load(cls, root: Path, begin: str, facts: _Facts, check: bool) -> TokenCache:
        """The texts in the files whose names begin with `begin`. Raises ValueError: they are
        damaged.
        """
        offsets = load_array(root / f"{begin}offsets.npy", np.int64)
        ids = load_array(root / f"{begin}ids.npy", _id_dtype(facts.vocab_size))
        valid = len(offsets) == facts.num_texts + 1
        valid = valid and offsets[0] == 0 and offsets[-1] == len(ids)
        if valid and check and len(ids):
            lengths = np.diff(offsets)
            valid = lengths.min() >= 0 and lengths.max() <= facts.max_length
            valid = valid and ids.max() < facts.vocab_size
        if not valid:
            raise ValueError("offsets and ids do not match, or an id is not in the vocabulary")
        return cls(ids, offsets, facts.vocab_size, facts.pad_id, facts.max_length)


class _Facts(BaseModel, strict=True):
    """The facts in the manifest of a token cache on which its arrays depend."""

    vocab_size: NonNegativeInt
    pad_id: NonNegativeInt
    max_length: NonNegativeInt
    num_texts: NonNegativeInt


@dataclass(frozen=True)
class Piece:
    """One token of a text.

    Attributes:
        text: the token as written in the vocabulary.
        unknown: whether it replaces an unknown word.
        special: whether the tokenizer added it.
    """

    text: str
    unknown: bool
    special: bool


class TextTokenizer:
    """A tokenizer read from `tokenizer.json`, which truncates texts on the right (on the left if
    `truncation_side` in tokenizer_config.json is "left"), keeps special tokens and does not pad.

    The truncation and padding settings in the file are ignored.

    Args:
        folder: folder with `tokenizer.json`.
        max_length: maximum tokens per text, special tokens included.

    Attributes:
        num_specials: number of special tokens added to every text.
        unknown_id: id of the token for unknown words; -1 if there is none.
        truncation_side: where a text that is too long is cut, "right" or "left".

    Raises:
        ArtifactError: there is no tokenizer, it cannot be read, or max_length leaves no room beside
        the special tokens.
    """

    def __init__(self, folder: str | os.PathLike[str], max_length: int):
        from tokenizers import Tokenizer

        self.file = Path(folder) / "tokenizer.json"
        if not self.file.is_file():
            raise ArtifactError("no tokenizer", where=self.file, fix=_SAVE)
        try:
            self._tokenizer = Tokenizer.from_file(str(self.file))
        except Exception as error:  # the Rust library raises plain Exception
            raise ArtifactError(
                "not a readable tokenizer", where=self.file, got=error, fix=_SAVE
            ) from error
        self.num_specials = self._tokenizer.num_special_tokens_to_add(False)
        if max_length <= self.num_specials:
            raise ArtifactError(
                "no room for text beside the special tokens",
                where=self.file,
                got=f"max_length {max_length}",
                expected=f"> {self.num_specials}",
            )
        self.max_length = max_length
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self.vocab_size = 1 + max(ids, default=0)
        self.pad_id = self._padding_id()
        model = read_json(self.file)["model"]
        unknown = model.get("unk_id")  # Unigram
        if unknown is None and model.get("unk_token"):
            unknown = self._tokenizer.token_to_id(model["unk_token"])
        self.unknown_id = -1 if unknown is None else int(unknown)
        self._tokenizer.no_padding()
        settings = self.file.with_name("tokenizer_config.json")
        side = read_json(settings).get("truncation_side") if settings.is_file() else None
        self.truncation_side = "left" if side == "left" else "right"
        self._tokenizer.enable_truncation(max_length, direction=self.truncation_side)

    def _padding_id(self) -> int:
        """The id of the padding token, from tokenizer.json, from the files beside it, or by one of
        its usual names; 0 if there is none. Padding is always masked.
        """
        if padding := self._tokenizer.padding:
            return int(padding["pad_id"])
        names: list[Any] = ["[PAD]", "<pad>"]
        for file in ("special_tokens_map.json", "tokenizer_config.json"):
            path = self.file.parent / file
            if path.is_file():
                named = read_json(path).get("pad_token")
                names.insert(0, named["content"] if isinstance(named, dict) else named)
        found = [self._tokenizer.token_to_id(name) for name in names if name]
        return next((number for number in found if number), 0)

    def pieces(self, text: str) -> tuple[list[Piece], bool]:
        """The tokens of a text, and whether it was cut. Raises the same errors as `encode`."""
        try:
            encoding = self._tokenizer.encode(text)
        except (TypeError, ValueError) as error:
            raise _not_text([text], error) from error
        is_unknown = [number == self.unknown_id for number in encoding.ids]
        is_special = map(bool, encoding.special_tokens_mask)
        pieces = map(Piece, encoding.tokens, is_unknown, is_special)
        return list(pieces), bool(encoding.overflowing)

    def encode(self, texts: Sequence[str]) -> tuple[NDArray[Any], Ints]:
        """Flat ids (uint16 or uint32) and the number of tokens of each text (int64).

        An empty text has only special tokens.

        Raises:
            DataError: an item is not a string, or not valid Unicode (a lone surrogate).
        """
        try:
            encoded = [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts))]
        except (TypeError, ValueError) as error:
            raise _not_text(texts, error) from error
        length_B = np.fromiter(map(len, encoded), dtype=np.int64)
        flat = np.fromiter(chain.from_iterable(encoded), dtype=_id_dtype(self.vocab_size))
        return flat, length_B


def _not_text(texts: Sequence[Any], error: Exception) -> DataError:
    """An error that names the first item that is not a string of valid Unicode."""
    faulty = [i for i, text in enumerate(texts) if not is_unicode(text)]
    return DataError(
        "the text cannot be tokenised",
        where=f"text {faulty[0] if faulty else -1} of {len(texts)}",
        got=error,
        expected="valid Unicode strings",
    )


def is_unicode(text: object) -> bool:
    """Whether an object is a string without lone surrogates."""
    return isinstance(text, str) and text == text.encode(errors="replace").decode()


def _id_dtype(vocab_size: int) -> np.dtype[Any]:
    return np.dtype("<u2" if vocab_size < 65536 else "<u4")


@functools.lru_cache(maxsize=8)
def _cached_tokenizer(folder: str, max_length: int, _changed: tuple[int, int]) -> TextTokenizer:
    return TextTokenizer(folder, max_length)


def load_tokenizer(folder: str | os.PathLike[str], max_length: int) -> TextTokenizer:
    """A `TextTokenizer` that is cached until its file changes, because reading it takes longer than
    a small batch.
    """
    file = Path(os.path.abspath(folder)) / "tokenizer.json"
    changed = (0, 0)
    if file.is_file():
        state = file.stat()
        changed = (state.st_mtime_ns, state.st_size)
    return _cached_tokenizer(str(file.parent), max_length, changed)


def encode_texts(
    texts: Sequence[str],
    tokenizer_folder: str | os.PathLike[str],
    max_length: int,
    prompt: str = "",
) -> Tokens:
    """Tokenise texts in memory, for serving; with a prompt, also the prompted texts. Raises the
    errors of `TextTokenizer` and its `encode`.
    """
    tokenizer = load_tokenizer(tokenizer_folder, max_length)
    if isinstance(texts, str):
        raise DataError("texts must be a list", got="one string", fix="pass [text]")
    starts = range(0, max(len(texts), 1), _ENCODE_AT_ONCE)
    encoded = [tokenizer.encode(texts[start : start + _ENCODE_AT_ONCE]) for start in starts]
    ids, lengths = zip(*encoded, strict=True)
    tokens = Tokens(
        np.concatenate(ids), _offsets(lengths), tokenizer.vocab_size, tokenizer.pad_id, max_length
    )
    if prompt:
        tokens.prompted = encode_texts(behind(prompt, texts), tokenizer_folder, max_length)
    return tokens


def behind(prompt: str, texts: Iterable[str]) -> list[str]:
    """The prompt joined to each text as one string: a token may span the boundary."""
    return [prompt + text for text in texts] if prompt else list(texts)


def _offsets(lengths: Sequence[NDArray[Any]]) -> Ints:
    """Offset of each text in the flat array of ids, followed by the array's length."""
    return np.concatenate([[0], *lengths]).cumsum(dtype=np.int64)


def build_token_cache(
    texts: Iterable[list[str] | Tokens],
    tokenizer_folder: str | os.PathLike[str],
    max_length: int,
    out: str | os.PathLike[str],
    num_texts: int,
    meta: Mapping[str, Any] | None = None,
    *,
    prompt: str = "",
) -> Path:
    """Tokenise batches of texts into a folder, and return its path; needs memory for one batch and
    8 bytes per text. How texts are divided into batches does not change the bytes.

    Args:
        texts: batches of texts in the order of the rows (`XMCDataset.text_batches`), or what
            `encode_texts` returns for such batches.
        tokenizer_folder, max_length: see `TextTokenizer`.
        out: folder for ids.npy (uint16 if the vocabulary is below 65,536, otherwise uint32) and
            offsets.npy (int64 [N + 1]).
        num_texts: total number of texts, for the progress bar.
        meta: further facts for the manifest, such as {"text": "title"}.
        prompt: if not empty, the prompted texts are in two more files, prompted-ids.npy and
            prompted-offsets.npy.

    Raises:
        DataError: a text cannot be tokenised.
        ArtifactError: there is no tokenizer, or the folder cannot be written.
    """
    tokenizer = load_tokenizer(tokenizer_folder, max_length)
    prefixes = ("", _PROMPTED) if prompt else ("",)
    lengths: list[list[Ints]] = [[] for _ in prefixes]
    with write_folder(out, KIND, VERSION, meta) as folder:
        with contextlib.ExitStack() as stack:
            bar = stack.enter_context(progress(total=num_texts, desc="tokenise", unit="text"))
            dtype = _id_dtype(tokenizer.vocab_size)
            files = [growing_array(folder.path / f"{prefix}ids.npy", dtype) for prefix in prefixes]
            adds = [stack.enter_context(file) for file in files]
            for batch in texts:
                if not isinstance(batch, Tokens):
                    batch = encode_texts(batch, tokenizer_folder, max_length, prompt)
                kinds = (batch, batch.for_transformer)
                for kind, add_ids, known in zip(kinds, adds, lengths, strict=False):
                    add_ids(kind.ids)
                    known.append(kind.lengths().astype(np.int32))
                bar.update(len(batch))
        for prefix, known in zip(prefixes, lengths, strict=True):
            np.save(folder.path / f"{prefix}offsets.npy", _offsets(known))
        folder.meta |= {"prompt": prompt} if prompt else {}
        folder.meta |= {
            "vocab_size": tokenizer.vocab_size,
            "pad_id": tokenizer.pad_id,
            "max_length": max_length,
            "tokenizer_sha256": file_sha256(tokenizer.file),
            "num_texts": sum(map(len, lengths[0])),
            "num_tokens": sum(int(known.sum()) for known in lengths[0]),
        }
    return Path(out)
