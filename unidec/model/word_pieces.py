"""How a tokenizer's tokens form words, read from its tokenizer.json.

WordPiece marks the pieces that continue a word ("##ssl"). SentencePiece and byte-level BPE mark a
blank before a word ("▁lib", "Ġlib"), but not at the beginning of a text or after punctuation, and
keep the case: their words are compared by their spelling, regardless of the pieces and the case.

A word ends at a blank, at punctuation and other signs, which are words of their own, as in BERT. In
scripts without blanks between words (Chinese, Japanese, Thai, Lao, Burmese, Khmer) each piece is a
word: pairs of adjacent ones then find longer words.

Legend: F tokens of all texts, B texts, V tokens of the vocabulary, W words.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unidec.data.storage import read_json
from unidec.data.tokens import Bools, Ints, word_bounds, words_of_texts

# first and last characters of scripts without blanks; the last planes hold rare Chinese characters
_NO_BLANKS = (
    (0x0E00, 0x0EFF),
    (0x1000, 0x109F),
    (0x1780, 0x17FF),
    (0x2E80, 0x312F),
    (0x3190, 0xA4CF),
    (0xF900, 0xFAFF),
    (0x20000, 0x3FFFF),
)
_BYTE = re.compile("<0x([0-9A-F]{2})>")  # a byte of a character that SentencePiece does not know
# first bytes of signs, of characters from U+3000 to U+9FFF, mostly without blanks, and of emoji
_FIRST_BYTES = (0xC2, *range(0xE2, 0xEA), *range(0xF0, 0xF5))

# odd multiplier of the hash
_BASE = 0x9E3779B97F4A7C15

Keys = NDArray[np.uint64]


@dataclass(frozen=True, kw_only=True)
class WrittenPieces:
    """The text that each token of a vocabulary spells.

    Attributes:
        begins_V: bool [V], the token begins a word, whatever precedes it.
        ends_V: bool [V], its word ends with it.
        hash_V: uint64 [V], the hash of its UTF-8 in lower case, without blanks around it.
        size_V: int64 [V], number of these bytes; special tokens have none.
    """

    begins_V: Bools
    ends_V: Bools
    hash_V: Keys
    size_V: Ints


def vocabulary(file: Path) -> tuple[dict[str, int], dict[str, Any]]:
    """All tokens of a tokenizer.json with their ids, and the file's content."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True), read_json(file)


def written_pieces(tokenizer_folder: Path) -> WrittenPieces | None:
    """The spelling of the tokens; None: the tokenizer does not mark blanks before words."""
    file = tokenizer_folder / "tokenizer.json"
    state = file.stat()
    return _written_pieces(file, state.st_mtime_ns)


@functools.lru_cache(maxsize=4)
def _written_pieces(file: Path, _changed: int) -> WrittenPieces | None:
    vocab, description = vocabulary(file)
    blank = _blank(description)
    if blank is None:
        return None
    added_tokens = description.get("added_tokens", [])
    added = {token["content"]: token.get("special") for token in added_tokens}
    num_tokens = 1 + max(vocab.values(), default=-1)
    pieces = WrittenPieces(
        begins_V=np.ones(num_tokens, dtype=bool),
        ends_V=np.ones(num_tokens, dtype=bool),
        hash_V=np.zeros(num_tokens, dtype=np.uint64),
        size_V=np.zeros(num_tokens, dtype=np.int64),
    )
    for token, number in vocab.items():
        written = token.encode()
        if token not in added:
            written = _bytes_of(token, blank)
            pieces.begins_V[number], pieces.ends_V[number] = _bounds(written)
        if not added.get(token):
            text = _folded(written)
            pieces.hash_V[number] = _hash(text)
            pieces.size_V[number] = len(text)
    return pieces


def _hash(text: bytes) -> int:
    """The polynomial whose coefficients are the bytes, modulo 2^64."""
    value = 0
    for byte in text:
        value = (value * _BASE + byte + 1) % 2**64
    return value


def spelt_words(flat_F: Ints, lengths_B: Ints, pieces: WrittenPieces) -> tuple[Keys, Ints]:
    """Hashes of the spelling of all words of some texts, regardless of the pieces.

    Args:
        flat_F, lengths_B: int64, ids of all texts in order, and the number of tokens of each text.

    Returns:
        (hashes uint64 [W] of all texts in order, number of words of each text int64 [B]).
    """
    begins_F = pieces.begins_V[flat_F]
    begins_F[1:] |= pieces.ends_V[flat_F[:-1]]
    start_W, num_pieces_W = word_bounds(begins_F, lengths_B)
    if not len(start_W):
        return np.zeros(0, dtype=np.uint64), np.zeros_like(lengths_B)
    size_F = pieces.size_V[flat_F]
    size_W = np.add.reduceat(size_F, start_W)
    behind_F = np.repeat(np.cumsum(size_W), num_pieces_W) - np.cumsum(size_F)
    factor = np.full(size_W.max() + 1, _BASE, dtype=np.uint64)
    factor[0] = 1
    power = np.multiply.accumulate(factor)
    hash_W = np.add.reduceat(pieces.hash_V[flat_F] * power[behind_F], start_W)
    is_written_W = size_W > 0
    return hash_W[is_written_W], words_of_texts(start_W[is_written_W], lengths_B)


def _blank(description: dict[str, Any]) -> str | None:
    """The character for a space in the pieces; "": byte-level pieces; None: spaces are unmarked."""
    parts = [description.get(part) for part in ("normalizer", "pre_tokenizer", "decoder")]
    for step in _steps(parts):
        if step.get("type") == "ByteLevel":
            return ""
        if step.get("type") == "Metaspace":
            return str(step["replacement"])
        if step.get("type") == "Replace" and step["pattern"] == {"String": " "}:
            return str(step["content"])
    return None


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """The steps of a part of tokenizer.json, including the steps of sequences."""
    if isinstance(part, list):
        for each in part:
            yield from _steps(each)
    elif isinstance(part, dict):
        yield part
        for inner in ("normalizers", "pretokenizers", "decoders"):
            yield from _steps(part.get(inner))


@functools.cache
def _byte_of() -> dict[str, int]:
    """The byte for each character of byte-level BPE (GPT-2); printable bytes map to themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    of_others = {chr(256 + place): byte for place, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | of_others


def _bytes_of(token: str, blank: str) -> bytes:
    """The text that a token spells, in UTF-8."""
    if not blank:
        byte_of = _byte_of()
        return bytes(byte_of[character] for character in token if character in byte_of)
    if byte := _BYTE.fullmatch(token):
        return bytes([int(byte[1], 16)])
    return token.replace(blank, " ").encode()


def _bounds(written: bytes) -> tuple[bool, bool]:
    """Whether a token begins a word, and whether its word ends with it."""
    try:
        text = written.decode()
    except UnicodeDecodeError:  # a part of a character
        return written[0] in _FIRST_BYTES or written[:1].isspace(), False
    if not text:
        return True, True
    return not _joins(text[0]), not _joins(text[-1])


@functools.cache
def _joins(character: str) -> bool:
    """Whether a character and its neighbour may belong to one word: a letter, number or accent of a
    script with blanks.
    """
    if unicodedata.category(character)[0] not in "LMN":
        return False
    return not any(first <= ord(character) <= last for first, last in _NO_BLANKS)


def _folded(written: bytes) -> bytes:
    """In lower case, without surrounding blanks; with parts of characters, ASCII letters only."""
    try:
        return written.decode().strip().casefold().encode()
    except UnicodeDecodeError:
        return written.strip().lower()
