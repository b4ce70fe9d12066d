"""Whole words in a bag of tokens: beside a loop over texts, on random and degenerate ones, to disk
and back.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from unidec.config import Encoder, Model
from unidec.errors import ConfigError
from unidec.model.encoder_inputs import InputBuilder
from unidec.model.unidec import UniDEC
from unidec.model.words import continuing_pieces, with_words


def words_by_loop(texts, continues, num_buckets, bucket_of):
    """The same, a text and a piece at a time; `bucket_of` maps the pieces of a word to its id."""
    out = []
    for text in texts:
        ids = []
        word = []
        for place, piece in enumerate(text):
            if continues[piece] and place > 0:
                word.append(piece)
            else:
                if len(word) > 1:
                    ids.append(bucket_of(tuple(word)))
                word = [piece]
            ids.append(piece)
        if len(word) > 1:
            ids.append(bucket_of(tuple(word)))
        out.append(ids)
    return out


@pytest.mark.parametrize("seed", range(5))
def test_as_a_loop_says(seed):
    rng = np.random.default_rng(seed)
    continues = rng.random(30) < [0.5, 0.0, 1.0, 0.9, 0.2][seed]
    texts = [list(rng.integers(0, 30, rng.integers(0, 12))) for _ in range(40)]
    flat = np.array([piece for text in texts for piece in text], dtype=np.int64)
    lengths = np.array([len(text) for text in texts])
    known: dict[tuple, int] = {}

    def bucket_of(word):
        # one word alone, by the function itself: the loop checks where and how often it appears
        if word not in known:
            row = np.array(word, dtype=np.int64)
            forced = np.ones(30, dtype=bool)
            known[word] = int(with_words(row, np.array([len(row)]), forced, 1 << 20)[0][-1])
        return known[word]

    ids, counts = with_words(flat, lengths, continues, 1 << 20)
    expected = words_by_loop(texts, continues, 1 << 20, bucket_of)
    assert counts.tolist() == [len(text) for text in expected]
    assert ids.tolist() == [piece for text in expected for piece in text]
    # 2^20 buckets: order and pieces both tell words apart
    assert len(set(known.values())) == len(known)
    assert all(30 <= bucket < 30 + (1 << 20) for bucket in known.values())


def test_order_and_neighbours_matter():
    continues = np.array([False, True, True])
    one = [
        with_words(np.array(word), np.array([len(word)]), continues, 1 << 16)[0][-1]
        for word in ([0, 1, 2], [0, 2, 1], [0, 1], [0, 1, 1])
    ]
    assert len(set(one)) == 4
    again, _ = with_words(np.array([0, 0, 1, 2]), np.array([1, 3]), continues, 1 << 16)
    assert again[-1] == one[0]  # the same word in another place of another text


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0], [2, 0, 1]])
def test_nothing_to_add(lengths):
    flat = np.zeros(sum(lengths), dtype=np.int64)
    ids, counts = with_words(flat, np.array(lengths, dtype=np.int64), np.zeros(4, dtype=bool), 8)
    assert ids.tolist() == flat.tolist()
    assert counts.tolist() == lengths


def test_a_text_that_begins_inside_a_word_begins_a_word():
    ids, counts = with_words(np.array([1, 1, 1]), np.array([1, 2]), np.array([False, True]), 8)
    assert counts.tolist() == [1, 3]
    assert ids[:3].tolist() == [1, 1, 1]


def test_marks_of_the_tokenizer(tiny_bert):
    from tokenizers import Tokenizer

    vocabulary = Tokenizer.from_file(str(tiny_bert / "tokenizer.json")).get_vocab(
        with_added_tokens=True
    )
    continues = continuing_pieces(tiny_bert, 1 + max(vocabulary.values()))
    assert continues.any() and not continues.all()
    assert {token for token, number in vocabulary.items() if continues[number]} == {
        token for token in vocabulary if token.startswith("##")
    }


def test_a_tokenizer_without_marks_is_refused(tmp_path):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    Tokenizer(WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")).save(
        str(tmp_path / "tokenizer.json")
    )
    with pytest.raises(ConfigError, match="bag_words"):
        continuing_pieces(tmp_path, 2)


def test_a_model_with_words_comes_back_from_disk(tiny_bert, tiny_tokens, tmp_path):
    from unidec.data.storage import write_folder
    from unidec.model.unidec import KIND, VERSION

    settings = Encoder(kind="bag", bag_words=64)
    params = {"tokens": {"max_length": tiny_tokens["queries"].max_length}}
    model = UniDEC.create(
        settings, Model(dim=8), 5, tiny_bert, tiny_tokens["queries"].vocab_size, params
    )
    bag = model.encoder.bag
    assert bag.num_words == 64
    assert not bag.embedding.weight[bag.num_tokens :].any()
    bag.continues[
        torch.unique(torch.from_numpy(tiny_tokens["queries"].ids.astype(np.int64)))[5:]
    ] = True
    rows = np.arange(len(tiny_tokens["queries"]))
    batch = InputBuilder(model.encoder, model.device)([("queries", tiny_tokens["queries"], rows)])
    assert (batch.unique_U >= bag.num_tokens).any()
    bag.embedding.weight[bag.num_tokens :].normal_()
    with write_folder(tmp_path / "model", KIND, VERSION, {}) as out:
        model.save_into(out)
    again = UniDEC.load(tmp_path / "model")
    before, after = (m.encode("queries", tiny_tokens["queries"]) for m in (model, again))
    np.testing.assert_array_equal(before, after)
    bag.embedding.weight[bag.num_tokens :].zero_()
    assert not np.array_equal(before, model.encode("queries", tiny_tokens["queries"]))
