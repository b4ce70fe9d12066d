"""Transformers of 32 dimensions with a word-piece tokenizer, made in a moment and the same on every
machine.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

HIDDEN = 32
LAYERS = 3
MAX_TOKENS = 64
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def write_tokenizer(folder: Path, texts: Iterable[str], num_words: int = 600) -> int:
    """A word-piece tokenizer over the commonest words and all characters; returns the size of its
    vocabulary.

    The vocabulary is counted, not trained: a trainer breaks ties as its threads fall.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    counts = Counter(word for text in texts for word in re.findall(r"\w+|[^\w\s]", text.lower()))
    characters = sorted({character for word in counts for character in word})
    words = [
        word for word, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:num_words]
    ]
    pieces = [*SPECIALS, *characters, *(f"##{character}" for character in characters), *words]
    vocabulary = {piece: place for place, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return len(vocabulary)


def write_transformer(
    folder: Path, texts: Iterable[str], kind: str = "bert", *, seed: int = 0
) -> Path:
    """A folder that `resolve_encoder` takes: config.json, model.safetensors, tokenizer.json.

    Weights are ten times as wide as BERT's, so that attention attends and layers differ.
    """
    import torch
    from transformers import BertConfig, BertModel, DistilBertConfig, DistilBertModel

    size = write_tokenizer(folder, texts)
    common = {"vocab_size": size, "max_position_embeddings": MAX_TOKENS, "initializer_range": 0.2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if kind == "bert":
            bert = BertConfig(
                hidden_size=HIDDEN,
                num_hidden_layers=LAYERS,
                num_attention_heads=2,
                intermediate_size=64,
                **common,
            )
            model = BertModel(bert, add_pooling_layer=False)
        else:
            model = DistilBertModel(
                DistilBertConfig(dim=HIDDEN, n_layers=LAYERS, n_heads=2, hidden_dim=64, **common)
            )
    model.save_pretrained(folder)
    return folder


def write_word_transformer(
    folder: Path, words: list[str], *, hidden: int = HIDDEN, seed: int = 0
) -> Path:
    """A BERT of one layer whose tokenizer knows just these words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel

    vocabulary = {word: place for place, word in enumerate(["[PAD]", "[UNK]", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    torch.manual_seed(seed)
    bert = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=hidden,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=8,
    )
    BertModel(bert).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
