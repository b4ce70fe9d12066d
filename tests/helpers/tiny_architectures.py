"""Folders of tiny random encoders of many architectures, as sentence-transformers writes them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HIDDEN = 32
LENGTH = 48  # tokens of a text, at most
TEXTS = [
    "river",
    "music engine w3 w44",
    "",
    "Gardenmusic planetriver, breadwindowletter!",
    "é river w1",
    "w1 " * 60,
    "letter planet window bread garden river engine music w1 w2 w3 w4 w5 w6 w7",
]
QUERY = "query: "
LABEL = "title: none | text:"  # a tokenizer may join its end with a text
BERT = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
DECODER = BERT | {"num_key_value_heads": 2, "head_dim": 8}


@dataclass(frozen=True)
class Tiny:
    """An encoder: its tokenizer ("wordpiece", "bytes", "unigram"), what the tokenizer puts around a
    text, and its configuration.
    """

    model_type: str
    tokenizer: str
    around: str
    config: dict[str, Any]
    pooling: str = "mean"
    dense: Sequence[tuple[int, str]] = ()
    specials: Sequence[str] = ("<pad>", "<unk>", "<s>", "</s>", "<mask>")
    prompts: dict[str, str] = field(default_factory=lambda: {"query": QUERY, "document": LABEL})


ARCHITECTURES = {
    "bert": Tiny("bert", "wordpiece", "<s> $A </s>", BERT, "cls"),
    "roberta": Tiny("roberta", "bytes", "<s> $A </s>", BERT),
    "xlm-roberta": Tiny("xlm-roberta", "unigram", "<s> $A </s>", BERT),
    "mpnet": Tiny("mpnet", "wordpiece", "<s> $A </s>", BERT),
    "distilbert": Tiny(
        "distilbert",
        "wordpiece",
        "<s> $A </s>",
        {"dim": HIDDEN, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
        "max",
    ),
    "deberta-v2": Tiny(
        "deberta-v2",
        "unigram",
        "<s> $A </s>",
        BERT
        | {
            "relative_attention": True,
            "position_buckets": 8,
            "max_relative_positions": 64,
            "pos_att_type": ["p2c", "c2p"],
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
        },
    ),
    "modernbert": Tiny(
        "modernbert",
        "bytes",
        "<s> $A </s>",
        BERT | {"global_attn_every_n_layers": 2, "local_attention": 8},
        "cls",
    ),
    "nomic-bert": Tiny("nomic_bert", "wordpiece", "<s> $A </s>", BERT | {"head_dim": 8}),
    "qwen3": Tiny("qwen3", "bytes", "$A </s>", DECODER, "lasttoken"),
    "gemma3": Tiny(
        "gemma3_text",
        "unigram",
        "<s> $A </s>",
        DECODER | {"sliding_window": 8, "use_bidirectional_attention": True},
        dense=((64, "Identity"), (HIDDEN, "Identity")),
    ),
    "gemma3, causal": Tiny(
        "gemma3_text", "unigram", "<s> $A </s>", DECODER | {"sliding_window": 8}, "weightedmean"
    ),
    "t5": Tiny(
        "t5",
        "unigram",
        "$A </s>",
        {
            "d_model": HIDDEN,
            "d_ff": 48,
            "d_kv": 8,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
        dense=((24, "Tanh"),),
    ),
}


def write_encoder(folder: Path, name: str, texts: Iterable[str], *, seed: int = 0) -> Path:
    """Write the folder of an architecture; its tokenizer knows pieces of these texts."""
    import torch
    from transformers import AutoConfig, AutoModel

    tiny = ARCHITECTURES[name]
    folder.mkdir(parents=True)
    size = write_tokenizer(folder, tiny, [QUERY, LABEL, *TEXTS, *texts])
    options = {"vocab_size": size, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    config = AutoConfig.for_model(tiny.model_type, **options, **tiny.config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModel.from_config(config)
        with torch.no_grad():  # so that attention attends, and places matter
            for weight in model.parameters():
                if weight.ndim == 2:
                    weight.normal_(0, 0.3)
        model.save_pretrained(folder)
        write_modules(folder, tiny)
    return folder


def write_modules(folder: Path, tiny: Tiny) -> None:
    """Write what sentence-transformers writes beside a transformer."""
    import torch
    from safetensors.torch import save_file

    kinds = ["Transformer", "Pooling", *["Dense"] * len(tiny.dense), "Normalize"]
    modules = []
    for place, kind in enumerate(kinds):
        path = f"{place}_{kind}" if place else ""
        type_ = f"sentence_transformers.models.{kind}"
        modules.append({"idx": place, "name": str(place), "path": path, "type": type_})
    _write(folder / "modules.json", modules)
    pooling = {"embedding_dimension": HIDDEN, "pooling_mode": tiny.pooling}
    _write(folder / "1_Pooling" / "config.json", pooling)
    width = HIDDEN
    for place, (out, activation) in enumerate(tiny.dense, 2):
        own = folder / f"{place}_Dense"
        facts = {
            "in_features": width,
            "out_features": out,
            "bias": activation == "Tanh",
            "activation_function": f"torch.nn.modules.activation.{activation}",
        }
        if activation == "Identity":
            facts["activation_function"] = "torch.nn.modules.linear.Identity"
        _write(own / "config.json", facts)
        tensors = {"linear.weight": torch.randn(out, width) * 0.3}
        if facts["bias"]:
            tensors["linear.bias"] = torch.randn(out)
        save_file(tensors, own / "model.safetensors")
        width = out
    _write(folder / "config_sentence_transformers.json", {"prompts": tiny.prompts})
    _write(folder / "sentence_bert_config.json", {"max_seq_length": 48, "do_lower_case": False})


def write_tokenizer(folder: Path, tiny: Tiny, texts: Iterable[str]) -> int:
    """Train a tokenizer and write it as transformers does; returns the size of its vocabulary."""
    from tokenizers import (
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )
    from transformers import PreTrainedTokenizerFast

    specials = list(tiny.specials)
    options: dict[str, Any] = {"vocab_size": 300, "special_tokens": specials}
    options["show_progress"] = False
    if tiny.tokenizer == "wordpiece":
        tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer: Any = trainers.WordPieceTrainer(**options)
    elif tiny.tokenizer == "bytes":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(initial_alphabet=alphabet, **options | {"vocab_size": 450})
    else:
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(unk_token="<unk>", **options)
    tokenizer.train_from_iterator(texts, trainer)
    pairs = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=tiny.around, special_tokens=pairs
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", model_max_length=48
    )
    fast.save_pretrained(folder)
    return tokenizer.get_vocab_size()


def _write(file: Path, content: object) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(content), encoding="utf-8")
