"""Profiles: every figure against counting by hand, degenerate data, the same bytes each time."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from unidec.data import profile
from unidec.data.dataset import XMCDataset, write_dataset
from unidec.data.profile import (
    LENGTH_EDGES,
    is_known,
    measure_texts,
    profile_dataset,
    share,
    spaced,
    split_words,
    text_hashes,
    vocabulary_of,
)
from unidec.data.raw import RawData

TEXTS = [
    "river music",
    "  River   größer_2! ",
    "",
    "zz unheard-of 日本 words",
    "river music",
    "music " * 60,
]


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def hashed(words: list[str]) -> np.ndarray:
    return text_hashes(pa.array(words, pa.large_string()))


def test_every_figure_of_texts_by_hand(tiny_bert: Path) -> None:
    from tokenizers import Tokenizer

    known = {"river", "music"}
    summary = measure_texts(TEXTS, tiny_bert, 16, vocabulary_of(hashed(sorted(known))))
    plain = Tokenizer.from_file(str(tiny_bert / "tokenizer.json"))
    plain.no_padding()
    plain.enable_truncation(16)
    ids = [plain.encode(text).ids for text in TEXTS]
    special = {plain.token_to_id(token) for token in ("[CLS]", "[SEP]", "[PAD]", "[MASK]")}
    real = [[i for i in row if i not in special] for row in ids]
    unknown = [sum(i == plain.token_to_id("[UNK]") for i in row) for row in real]
    assert sum(unknown) > 0
    count = len(TEXTS)
    words = [word for text in TEXTS for word in words_of(text)]
    assert summary["count"] == count
    assert summary["length"]["mean"] == sum(len(text.strip()) for text in TEXTS) / count
    mean = summary["tokens"]["mean"]
    assert mean == sum(map(len, real)) / count
    assert sum(summary["tokens"]["buckets"]) == sum(map(len, real))
    assert summary["unknown_tokens"] == share(sum(unknown), sum(map(len, real)))
    assert summary["cut"] == share(sum(len(row) == 16 for row in ids), count)
    assert summary["words"]["count"] == len(words)
    assert summary["unseen_words"] == share(sum(word not in known for word in words), len(words))
    histogram = [0] * len(LENGTH_EDGES)
    for text in TEXTS:
        histogram[max(i for i, edge in enumerate(LENGTH_EDGES) if edge <= len(text.strip()))] += 1
    assert summary["length"]["histogram"] == histogram
    expected = dict(
        sorted(
            Counter(w for text in TEXTS for w in words_of(text)).items(),
            key=lambda item: (-item[1], item[0]),
        )
    )
    assert summary["words"]["top"] == expected
    assert json.loads(json.dumps(summary)) == summary


def test_figures_of_a_data_set_by_hand(tiny_dataset: XMCDataset, tiny_bert: Path) -> None:
    figures = profile_dataset(tiny_dataset, tiny_bert, 16)
    dense = tiny_dataset.relevance.toarray() > 0
    train = tiny_dataset.rows("train")
    test = tiny_dataset.rows("test")
    others = np.concatenate([tiny_dataset.rows("validation"), test])
    points = dense[train].sum(axis=0)
    asked = dense[others].any(axis=0)
    titles = tiny_dataset.query_texts()
    shares = figures["shares"]
    assert figures["rows"] == {
        "train": 43,
        "validation": 5,
        "test": 12,
        "labels": 40,
        "pairs": int(dense.sum()),
    }
    positives = figures["positives"]
    assert positives == pytest.approx(dense.sum() / 60)
    assert shares["labels_without_training_points"] == {"share": (points == 0).sum() / 40, "of": 40}
    assert shares["unseen_labels"]["of"] == asked.sum()
    assert shares["unseen_labels"]["share"] == pytest.approx(
        (asked & (points == 0)).sum() / asked.sum()
    )
    assert shares["queries_without_positives"]["share"] == pytest.approx(
        (dense.sum(axis=1) == 0).mean()
    )
    trained = [titles[row] for row in train]
    assert shares["repeated_queries"]["share"] == pytest.approx(
        1 - len(set(trained)) / len(trained)
    )
    assert shares["test_texts_in_train"]["share"] == np.mean(
        [titles[row] in trained for row in test]
    )
    labels = tiny_dataset.label_texts()
    assert shares["repeated_labels"]["share"] == pytest.approx(1 - len(set(labels)) / len(labels))
    seen = {word for text in trained + labels for word in words_of(text)}
    spoken = [word for row in others for word in words_of(titles[row])]
    missing = np.mean([word not in seen for word in spoken])
    assert shares["unseen_words"]["of"] == len(spoken)
    assert missing - 0.03 <= shares["unseen_words"]["share"] <= missing  # a few pass the filter
    assert figures["queries"]["count"] == 43
    assert figures["labels"]["count"] == 40


def test_the_same_data_gives_the_same_bytes_and_long_texts_are_read(
    tiny_dataset: XMCDataset, tiny_bert: Path
) -> None:
    first, second = (json.dumps(profile_dataset(tiny_dataset, tiny_bert, 16)) for _ in range(2))
    assert first == second
    both = profile_dataset(tiny_dataset, tiny_bert, 16, "title+content")
    assert both["queries"]["length"]["mean"] > json.loads(first)["queries"]["length"]["mean"]


@pytest.mark.parametrize(
    "sizes",
    [
        (1, 1, 1),
        (4, 0, 1),
        (3, 2, 5),
    ],
)
def test_degenerate_data(
    raw_factory: Callable[..., RawData], tiny_bert: Path, tmp_path: Path, sizes: tuple
) -> None:
    dataset = write_dataset(tmp_path / "dataset", raw_factory(*sizes), validation_share=0)
    made = profile_dataset(dataset, tiny_bert, 16)
    assert (made["held_out"] is None) == (sizes[1] == 0)
    assert all(0 <= entry["share"] <= 1 for entry in made["shares"].values())


def test_of_many_texts_some_are_looked_at(
    tiny_dataset: XMCDataset, tiny_bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [0, 3, 6, 9]
    assert spaced(np.arange(10), 4).tolist() == expected
    assert spaced(np.arange(3), 4).tolist() == [0, 1, 2]
    monkeypatch.setattr(profile.spaced, "__defaults__", (7,))
    figures = profile_dataset(tiny_dataset, tiny_bert, 16)
    assert figures["queries"]["count"] == 7
    assert figures["rows"]["train"] == 43


def test_a_vocabulary_forgets_nothing_and_takes_few_strangers_for_known() -> None:
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**63, 5000).astype(np.uint64)
    vocabulary = json.loads(json.dumps(vocabulary_of(np.repeat(words, 2))))
    assert is_known(words, vocabulary).all()
    assert vocabulary["words"] == 5000
    strangers = rng.integers(0, 2**63, 20_000).astype(np.uint64)
    assert is_known(strangers, vocabulary).mean() < 0.02
    assert not is_known(words, vocabulary_of(np.zeros(0, np.uint64))).any()


def test_of_too_many_words_the_commonest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "MAX_WORDS", 3)
    words = np.arange(10, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    kept = vocabulary_of(np.concatenate([words, words[4:7]]))
    assert kept["words"] == 3
    assert is_known(words[4:7], kept).all()


def test_texts_without_words() -> None:
    hashes, top = split_words(["", " !? ", "-"])
    assert len(hashes) == 0 and top == {}
