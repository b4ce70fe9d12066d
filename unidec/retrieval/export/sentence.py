"""The query encoder as a folder that sentence-transformers loads: `SentenceTransformer(folder).encode(texts)`.

Only modules of sentence-transformers are used, which run one after the other. A transformer, or a bag of tokens alone,
with one head is expressed by them exactly; what is side by side is refused: a transformer beside a bag, a bag of the
text's first tokens, words of several pieces, both heads.

Legend: V tokens, W width of the encoder, D width of a head, D' width of what comes out.
"""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unidec.data.storage import write_folder
from unidec.data.tokens import load_tokenizer
from unidec.errors import ConfigError
from unidec.model.encoder import BagEncoder
from unidec.model.unidec import UniDEC
from unidec.retrieval.bundle import Bundle
from unidec.retrieval.export.heads import Scored, refuse_foreign, write_readme

KIND = "sentence-transformers"
VERSION = 1


def export_sentence_transformers(
    bundle: Bundle, folder: str | os.PathLike[str], *, head: str | None = None
) -> dict[str, Any]:
    """Write the query side of a score as a sentence-transformers folder.

    The inner product of its vectors with those of `export_vectors` of the same head is the score that the bundle gives
    (without votes of training queries).

    Args:
        bundle: a loaded bundle, on the CPU.
        folder: replaced where it is there already, and only if it is an earlier export.
        head: "both", "de" or "clf"; None: what the bundle ranks by.

    Returns:
        {"head", "width", "modules", "output"}.

    Raises:
        DataError: no such head.
        ConfigError: an encoder that these modules cannot express, sentence-transformers is not installed, a folder that
            is something else.
    """
    model, score = bundle.model, Scored.of(bundle.info, head)
    beyond = _beyond_modules(model)
    if beyond or score.head == "both":
        raise ConfigError(
            "modules of sentence-transformers cannot express this encoder", where=str(bundle.path),
            got="; ".join(beyond + ["both heads side by side"] * (score.head == "both")),
            fix="unidec export onnx" if beyond else "--head de or clf exports one head",
        )  # fmt: skip
    refuse_foreign(Path(folder))
    if importlib.util.find_spec("sentence_transformers") is None:
        where, fix = "unidec export sentence-transformers", "pip install 'unidec-xmc[bench]'"
        raise ConfigError("sentence-transformers is not installed", where=where, fix=fix)
    from sentence_transformers import SentenceTransformer

    modules = _modules(model, score)
    with write_folder(folder, KIND, VERSION, {"bundle_sha256": bundle.sha256, **score.facts()}) as out:
        whole = SentenceTransformer(modules=modules, device="cpu", similarity_fn_name="dot")
        whole.save(str(out.path), create_model_card=False)
        write_readme(out.path, bundle, score)
    names = [type(module).__name__ for module in modules]
    return {"head": score.head, "width": score.width, "modules": names, "output": str(folder)}


def _beyond_modules(model: UniDEC) -> list[str]:
    """What of an encoder modules in a row cannot express; empty: nothing."""
    bag, reasons = model.encoder.bag, []
    if bag is not None and model.encoder.transformer is not None:
        reasons.append("a transformer and a bag of tokens side by side (encoder.kind: both)")
    if bag is not None and bag.head:
        reasons.append("a second bag of each text's first tokens (encoder.bag_head)")
    if bag is not None and bag.num_words:
        reasons.append("words of several pieces as further tokens (encoder.bag_words)")
    return reasons


def _modules(model: UniDEC, score: Scored) -> list[nn.Module]:
    from sentence_transformers.base.modules import Normalize
    from sentence_transformers.sentence_transformer.modules import Pooling

    encoder = model.encoder
    if encoder.transformer is not None:
        modules = [_transformer(model, encoder.transformer.transformer)]
        modules.append(Pooling(encoder.transformer.width, encoder.settings.pooling))
        modules += [Normalize()] if encoder.unit_vectors else []
    else:
        assert encoder.bag is not None
        modules = [_transformer(model, _token_table(encoder.bag, model.max_length))]
        modules += [Pooling(encoder.bag.width, "mean"), Normalize()]
    if encoder.residual is not None:
        modules += _residual(encoder.residual)
    if score.head == "de":
        assert model.head_de is not None
        return [*modules, _dense(*_weights(model.head_de[0]), nn.Tanh()), Normalize()]
    assert model.head_clf is not None
    weight, bias = _weights(model.head_clf[0])
    if score.has_bias:  # one more output, always 1: labels have their bias there
        weight, bias = torch.cat([weight, torch.zeros(1, weight.shape[1])]), torch.cat([bias, torch.ones(1)])
    return [*modules, _dense(weight, bias, nn.Identity()), *([Normalize()] if score.clf_normalize else [])]


def _weights(layer: nn.Module) -> tuple[Tensor, Tensor]:
    return layer.get_parameter("weight").detach(), layer.get_parameter("bias").detach()


def _dense(weight: Tensor, bias: Tensor, activation: nn.Module) -> nn.Module:
    from sentence_transformers.base.modules import Dense

    layer = Dense(weight.shape[1], weight.shape[0], activation_function=activation)
    layer.linear.load_state_dict({"weight": weight, "bias": bias})
    return layer


def _transformer(model: UniDEC, transformer: Any) -> nn.Module:
    """A transformer and our tokenizer, by way of a folder as sentence-transformers opens one."""
    from sentence_transformers.base.modules import Transformer
    from transformers import PreTrainedTokenizerFast

    ours, source = load_tokenizer(model.tokenizer_folder, model.max_length), model.tokenizer_folder
    given: dict[str, Any] = {}
    if (source / "tokenizer_config.json").is_file():
        given = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    tokens = {name: given[name] for name in given if name.endswith("_token") and isinstance(given[name], str)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(ours.file), model_max_length=model.max_length, padding_side="right", truncation_side="right",
        model_input_names=["input_ids", "attention_mask"], **tokens,
    )  # fmt: skip
    if tokenizer.pad_token is None:  # only ever seen under a mask of 0
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(ours.pad_id)
    with tempfile.TemporaryDirectory() as folder:
        transformer.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        pooler = {"add_pooling_layer": False} if hasattr(transformer, "pooler") else {}
        return Transformer(folder, max_seq_length=model.max_length, model_kwargs=pooler)


def _token_table(bag: BagEncoder, max_length: int) -> nn.Module:
    """A bag's `exp(w_t) e_t` as a GPT of no layers whose positions are zeros; their mean has the direction of the sum.

    It is the one module that looks tokens up and cuts long texts as we do, special tokens kept (`StaticEmbedding` and
    `WordEmbeddings` drop them).
    """
    from transformers import OpenAIGPTConfig, OpenAIGPTModel

    weighted_VD = torch.from_numpy(bag.embedding.numpy() * np.exp(bag.log_weight.numpy())).float()
    num_tokens, width = weighted_VD.shape
    config = OpenAIGPTConfig(
        vocab_size=num_tokens, n_positions=max_length, n_embd=width, n_layer=0, n_head=1, embd_pdrop=0.0
    )
    table = OpenAIGPTModel(config)
    with torch.no_grad():
        table.tokens_embed.weight.copy_(weighted_VD)
        table.positions_embed.weight.zero_()
    return table


def _residual(residual: nn.Sequential) -> list[nn.Module]:
    """`x + B gelu(A x)` as two layers: x itself goes through the first one as gelu(x) - gelu(-x), which is x."""
    (weight_A, bias_A), (weight_B, bias_B) = _weights(residual[0]), _weights(residual[3])
    eye = torch.eye(weight_A.shape[1])
    first = _dense(torch.cat([weight_A, eye, -eye]), torch.cat([bias_A, torch.zeros(2 * len(eye))]), nn.GELU())
    return [first, _dense(torch.cat([weight_B, eye, -eye], dim=1), bias_B, nn.Identity())]
