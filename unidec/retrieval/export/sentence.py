"""The query encoder as a folder that sentence-transformers loads: `SentenceTransformer(folder).encode(texts)`.

Only modules of sentence-transformers are used, which run one after the other: a transformer with one head is expressed
by them exactly. A bag of tokens, a residual layer, or both heads side by side are refused.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unidec.data.storage import write_folder
from unidec.data.tokens import load_tokenizer
from unidec.errors import ConfigError
from unidec.model.unidec import UniDEC
from unidec.retrieval.bundle import Bundle
from unidec.retrieval.bundle_folder import BundleInfo
from unidec.retrieval.export.heads import facts, refuse_foreign, scored_by, write_readme

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
    model, score = bundle.model, scored_by(bundle.info, head)
    plain = model.encoder.transformer is not None and model.encoder.bag is None and model.encoder.residual is None
    if not plain or score.space == "both":
        raise ConfigError(
            "modules of sentence-transformers cannot express this encoder", where=str(bundle.path),
            got="both heads side by side" if plain else "a bag of tokens or a residual layer",
            fix="--head de or clf exports one head" if plain else "unidec export onnx",
        )  # fmt: skip
    refuse_foreign(Path(folder))
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise ConfigError(f"no sentence-transformers: {error}", fix="pip install 'unidec-xmc[bench]'") from error

    modules = _modules(model, score)
    with write_folder(folder, KIND, VERSION, {"bundle_sha256": bundle.sha256, **facts(score)}) as out:
        whole = SentenceTransformer(modules=modules, device="cpu", similarity_fn_name="dot")
        whole.save(str(out.path), create_model_card=False)
        write_readme(out.path, bundle, score)
    names = [type(module).__name__ for module in modules]
    return {"head": score.space, "width": score.width, "modules": names, "output": str(folder)}


def _modules(model: UniDEC, score: BundleInfo) -> list[nn.Module]:
    from sentence_transformers.base.modules import Normalize
    from sentence_transformers.sentence_transformer.modules import Pooling

    encoder, normalize = model.encoder, Normalize()
    assert encoder.transformer is not None
    modules = [_transformer(model, encoder.transformer.transformer)]
    modules.append(Pooling(encoder.transformer.width, encoder.settings.pooling))
    modules += [normalize] if encoder.unit_vectors else []
    if score.space == "de":
        assert model.head_de is not None
        return [*modules, _dense(*_weights(model.head_de[0]), nn.Tanh()), normalize]
    assert model.head_clf is not None
    weight, bias = _weights(model.head_clf[0])
    if "bias" in score.vectors:  # one more output, always 1: labels have their bias there
        weight, bias = torch.cat([weight, torch.zeros(1, weight.shape[1])]), torch.cat([bias, torch.ones(1)])
    return [*modules, _dense(weight, bias, nn.Identity()), *([normalize] if score.clf_normalize else [])]


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
