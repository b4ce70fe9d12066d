"""Tiny tokenizers of each kind, trained in a moment, and texts of many scripts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from helpers.tiny_transformer import HIDDEN, LAYERS, MAX_TOKENS

KINDS = ("byte-bpe", "unigram", "sentencepiece-bpe", "cased-wordpiece")
# of topics in six languages, a row a topic: (words of its labels, words of its queries)
TOPICS = (
    ("river fleuve río نهر 河流 🌊", "water bridge café pont puente جسر 桥 水流"),
    ("music musique música موسيقى 音乐 🎵", "song piano mélodie canción أغنية 歌曲 钢琴"),
    ("garden jardin jardín حديقة 花园 🌻", "Tree flower arbre forêt árbol شجرة 树木 花"),
    ("bread pain pan خبز 面包 🍞", "oven Farine blé harina فرن 烤箱 小麦"),
)


def multilingual_raw():
    """24 labels and 72 queries, of one topic each, in mixed languages; some queries shout."""
    import numpy as np
    from scipy.sparse import csr_matrix

    from unidec.data.raw import RawData, text_table

    rng = np.random.default_rng(0)
    labels, queries = ([words[part].split() for words in TOPICS] for part in (0, 1))
    label_texts = [f"{word}, {words[0].title()}" for words in labels for word in words]
    topic_L = np.repeat(np.arange(len(TOPICS)), [len(words) for words in labels])

    def split(name: str, number: int):
        topic_N = np.arange(number) % len(TOPICS)
        texts = []
        for row, topic in enumerate(topic_N):
            words = list(rng.choice(queries[topic] + labels[topic], 3, replace=False))
            text = " ".join(words)
            texts.append(f"«{text.upper()}»!" if row % 4 == 3 else text)
        table = text_table([f"{name}-{row}" for row in range(number)], texts, texts)
        return table, csr_matrix((topic_N[:, None] == topic_L).astype(np.float32))

    parts = {name: split(name, number) for name, number in (("train", 60), ("test", 12))}
    uids = [f"label-{row}" for row in range(len(label_texts))]
    return RawData(
        "multilingual",
        {name: table for name, (table, _) in parts.items()},
        text_table(uids, label_texts, label_texts),
        {name: relevance for name, (_, relevance) in parts.items()},
        {name: csr_matrix(relevance.shape, dtype=bool) for name, (_, relevance) in parts.items()},
    )


def train_tokenizer(kind: str, texts: Iterable[str], folder: Path) -> int:
    """Write tokenizer.json and tokenizer_config.json; returns the size of the vocabulary."""
    from tokenizers import (
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )

    begin, pad, end, unknown = specials = ["<s>", "<pad>", "</s>", "<unk>"]
    common = {"vocab_size": 400, "special_tokens": specials, "show_progress": False}
    trainer: trainers.Trainer = trainers.BpeTrainer(**common)
    if kind == "byte-bpe":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(**common, initial_alphabet=alphabet)
    elif kind == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.normalizer = normalizers.NFKC()
        metaspace = pre_tokenizers.Metaspace()
        signs = pre_tokenizers.Punctuation()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([metaspace, signs])
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(**common, unk_token=unknown)
    elif kind == "sentencepiece-bpe":  # as Gemma: blanks are replaced, and nothing splits
        tokenizer = Tokenizer(models.BPE(unk_token=unknown, fuse_unk=True, byte_fallback=True))
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        blanks = pre_tokenizers.Split("▁", "merged_with_next")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([blanks, pre_tokenizers.Punctuation()])
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
        bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
        common |= {"vocab_size": 700, "special_tokens": [*specials, *bytes_]}
        trainer = trainers.BpeTrainer(**common)
    else:
        tokenizer = Tokenizer(models.WordPiece(unk_token=unknown))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(**common)
    tokenizer.train_from_iterator(texts, trainer)
    places = [(token, tokenizer.token_to_id(token)) for token in (begin, end)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A {end}", special_tokens=places
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"pad_token": pad, "cls_token": begin, "sep_token": end}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer.get_vocab_size()


def write_static(folder: Path, width: int = HIDDEN, **more: Any) -> dict[str, Any]:
    """The files of model2vec beside a tokenizer: random vectors of its tokens; returns what
    model.safetensors holds. `more`: further tensors.
    """
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer

    size = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    rng = torch.Generator().manual_seed(0)
    tensors = {"embeddings": torch.randn(size, width, generator=rng)} | more
    save_file(tensors, folder / "model.safetensors")
    config = {"model_type": "model2vec", "architectures": ["StaticModel"], "normalize": True}
    (folder / "config.json").write_text(json.dumps(config | {"hidden_dim": width}))
    return tensors


def write_multilingual(kind: str, texts: Iterable[str], folder: Path) -> Path:
    """A folder that `resolve_encoder` takes: a RoBERTa of random weights with this tokenizer."""
    import torch
    from transformers import XLMRobertaConfig, XLMRobertaModel

    size = train_tokenizer(kind, texts, folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = XLMRobertaConfig(
            vocab_size=size,
            hidden_size=HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=MAX_TOKENS + 2,
            type_vocab_size=1,
            pad_token_id=1,
            initializer_range=0.2,
        )
        XLMRobertaModel(config, add_pooling_layer=False).save_pretrained(folder)
    return folder
