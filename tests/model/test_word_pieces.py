"""Words of tokenizers of each kind, beside the same rules applied to the text itself."""

from __future__ import annotations

import re

import numpy as np
import pytest
from helpers.tiny_tokenizers import KINDS, TOPICS, train_tokenizer, write_multilingual

from unidec.data.tokens import encode_texts, load_tokenizer
from unidec.errors import ArtifactError
from unidec.model.sources import resolve_encoder
from unidec.model.word_pieces import spelt_words, written_pieces
from unidec.model.words import WordSpace, continuing_pieces

WRITTEN = [kind for kind in KINDS if kind != "cased-wordpiece"]
# letters with blanks between words, or another sign; Chinese words are what the pieces are
WORD = re.compile(r"[^\W_]+|[^\w\s]|_")
TEXTS = ["Café au lait", "LIBSSL-dev, libssl_dev!", "جسر على نهر", "", "oh, 🌊 🎵!", "naïve  FORÊT"]
# so that their letters are known
OTHERS = ["RIVER (river)", "xy", "forêt", "la"]


@pytest.fixture(scope="module", params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(kind, tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizers") / kind
    titles = [words for topic in TOPICS for words in topic]
    train_tokenizer(kind, titles + TEXTS + OTHERS, path)
    return path


def spelt(folder, texts) -> list[list[int]]:
    tokens = encode_texts(texts, folder, 64)
    key_W, num_words_B = spelt_words(
        tokens.ids.astype(np.int64), tokens.lengths(), written_pieces(folder)
    )
    *ends, _ = np.cumsum(num_words_B)
    return [part.tolist() for part in np.split(key_W, ends)]


@pytest.mark.parametrize("kind", WRITTEN, indirect=True, scope="module")
def test_words_are_those_of_the_text(folder):
    alone: dict[str, int] = {}
    for text, keys in zip(TEXTS, spelt(folder, TEXTS), strict=True):
        words = [word.casefold() for word in WORD.findall(text)]
        assert len(keys) == len(words), text
        for word, key in zip(words, keys, strict=True):
            assert alone.setdefault(word, key) == key
    assert len(set(alone.values())) == len(alone)


@pytest.mark.parametrize("kind", WRITTEN, indirect=True, scope="module")
def test_place_case_and_punctuation_do_not_matter(folder):
    first, middle, upper, quoted = spelt(folder, ["river", "la river", "RIVER", "(river)"])
    assert first == middle[1:] == upper == quoted[1:2]
    [accent], [_, again] = spelt(folder, ["forêt", "la forêt"])
    assert accent == again


@pytest.mark.parametrize("kind", WRITTEN, indirect=True, scope="module")
def test_in_scripts_without_blanks_each_piece_is_a_word(folder):
    # no piece is longer than a word of the training texts: 水流 alone is one, or two characters
    alone, mixed = spelt(folder, ["水流", "x水流 y"])
    assert 1 <= len(alone) <= 2
    _, *between, _ = mixed
    assert between == alone


@pytest.mark.parametrize("kind", WRITTEN, indirect=True, scope="module")
def test_a_bags_pieces_continue_where_no_word_begins(folder):
    num_tokens = load_tokenizer(folder, 64).vocab_size
    continues = continuing_pieces(folder, num_tokens + 5)
    assert not continues[num_tokens:].any()
    np.testing.assert_array_equal(continues[:num_tokens], ~written_pieces(folder).begins_V)
    ids = encode_texts(["la libssl"], folder, 64).ids
    assert not continues[ids[[0, -1]]].any(), "special tokens"
    assert continues[ids].any()


def test_pieces_of_a_marked_prefix_are_compared_by_their_ids(folder, kind):
    no_keys = np.zeros(0, np.uint64)
    no_weights = np.zeros(0, np.float32)
    space = WordSpace(folder, no_keys, no_weights)
    assert space.spelt == (kind != "cased-wordpiece")
    assert not WordSpace(folder, no_keys, no_weights, spelt=False).spelt


def test_words_that_are_compared_by_spelling_need_marks(tiny_bert):
    nothing = np.zeros(0, np.uint64)
    with pytest.raises(ValueError, match="does not show"):
        WordSpace(tiny_bert, nothing, nothing.astype(np.float32), spelt=True)


def test_roles_come_from_the_tokenizer(folder):
    tokenizer = load_tokenizer(folder, 64)
    assert tokenizer.pad_id == 1 and tokenizer.num_specials == 2
    pieces, _ = tokenizer.pieces("forêt")
    first, *between, last = [piece.special for piece in pieces]
    assert first and last and not any(between)


def test_a_slow_tokenizer_is_refused_with_the_command_that_converts_it(tmp_path):
    folder = write_multilingual("unigram", TEXTS, tmp_path / "slow")
    (folder / "tokenizer.json").rename(folder / "spiece.model")
    with pytest.raises(ArtifactError, match=r"slow form only(?s:.*)spiece\.model(?s:.*)convert"):
        resolve_encoder(str(folder))
