"""The query encoder as a folder that sentence-transformers loads: `SentenceTransformer(folder).encode(texts)`.

A transformer, or a bag of tokens alone, is said by stock modules: nothing of ours is needed to load it. Stock modules
run one after the other, so what stands side by side is beyond them: a transformer beside a bag, a bag's head of the
text, words of several pieces, both heads. Such an encoder gets one module of ours more (`sentence_code.py`, copied into
the folder), which loads with `trust_remote_code=True` only; it is written where the caller allows it.

Legend: V tokens, W width of the encoder, D width of a head, D' width of what comes out.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unidec.data.storage import write_folder, write_json
from unidec.data.tensor_file import write_tensors
from unidec.errors import ConfigError
from unidec.retrieval.bundle import Bundle
from unidec.retrieval.export import readme
from unidec.retrieval.export.heads import Scored

KIND = "sentence-transformers"
VERSION = 1
STOCK = "sentence_transformers.sentence_transformer.modules."
BASE = "sentence_transformers.base.modules."
OURS = "sentence_code"
POOLING_HEADS = ("bert", "roberta", "xlm-roberta", "mpnet")
OUR_WEIGHTS = "model.safetensors"


class _Modules:
    """The modules of a folder, in order.

    Args:
        root: the folder.
    """

    def __init__(self, root: Path):
        self.root, self.listed = root, list[dict[str, Any]]()

    def add(self, kind: str, config: Mapping[str, Any] | None = None, first: bool = False) -> Path:
        """A module's folder, with its config.json; the first module lies in the root, where it may."""
        number, name = len(self.listed), kind.rpartition(".")[2]
        path = "" if first else f"{number}_{name}"
        self.listed.append({"idx": number, "name": str(number), "path": path, "type": kind})
        (self.root / path).mkdir(exist_ok=True)
        if config is not None:
            write_json(self.root / path / "config.json", dict(config))
        return self.root / path

    def dense(self, weight: Tensor, bias: Tensor, activation: str) -> None:
        """A linear layer and its activation (a class of torch.nn)."""
        path = self.add(
            f"{BASE}dense.Dense",
            {
                "in_features": weight.shape[1], "out_features": weight.shape[0], "bias": True,
                "activation_function": f"torch.nn.modules.{activation}",
                "module_input_name": "sentence_embedding", "module_output_name": "sentence_embedding",
            },
        )  # fmt: skip
        tensors = {"linear.weight": weight, "linear.bias": bias}
        write_tensors(path / OUR_WEIGHTS, {name: t.detach().float().contiguous() for name, t in tensors.items()})

    def normalize(self) -> None:
        """To unit length."""
        self.add(f"{BASE}normalize.Normalize", {"module_input_name": "sentence_embedding"})

    def pool(self, width: int, mode: str) -> None:
        """One vector of a text's tokens."""
        self.add(f"{STOCK}pooling.Pooling", {"embedding_dimension": width, "pooling_mode": mode})


def beyond_stock(model: Any, score: Scored) -> list[str]:
    """What of an encoder and a score stock modules cannot say; empty: nothing.

    Args:
        model: a `UniDEC`.
    """
    bag, reasons = model.encoder.bag, []
    if bag is not None and model.encoder.transformer is not None:
        reasons.append("a transformer and a bag of tokens side by side (encoder.kind: both)")
    if bag is not None and bag.head:
        reasons.append("a second bag of each text's first tokens (encoder.bag_head)")
    if bag is not None and bag.num_words:
        reasons.append("words of several pieces as further tokens (encoder.bag_words)")
    if score.head == "both":
        reasons.append("both heads side by side")
    return reasons


def export_sentence_transformers(
    bundle: Bundle, folder: str | os.PathLike[str], *, head: str | None = None, code: bool = False
) -> dict[str, Any]:
    """Write the query side of a score as a sentence-transformers folder.

    The inner product of its vectors with those of `export_vectors` of the same head is the score that the bundle gives
    (without votes of training queries).

    Args:
        bundle: a loaded bundle, on the CPU.
        folder: replaced where it is there already, and only if it is an earlier export.
        head: "both", "de" or "clf"; None: what the bundle ranks by.
        code: a Python file may be written into the folder where stock modules do not suffice.

    Returns:
        {"head", "width", "needs_code", "modules", "output"}.

    Raises:
        DataError: no such head.
        ConfigError: stock modules do not suffice and `code` is false; a folder that is something else.
    """
    model, score = bundle.model, Scored.of(bundle.info, head)
    reasons = beyond_stock(model, score)
    if reasons and not code:
        alone = [
            name
            for name in ("de", "clf")
            if name in bundle.info.vectors and not beyond_stock(model, Scored.of(bundle.info, name))
        ]
        fewer = f"; --head {' or '.join(alone)} exports one head without it" if alone else ""
        raise ConfigError(
            "stock modules of sentence-transformers cannot say this encoder", where=str(bundle.path),
            got="; ".join(reasons),
            fix="--with-code writes one Python file more, loaded with trust_remote_code=True"
            f"{fewer}; `unidec export onnx` needs neither",
        )  # fmt: skip
    refuse_foreign(Path(folder))
    with write_folder(folder, KIND, VERSION, {"bundle_sha256": bundle.sha256, **score.facts()}) as out:
        modules = _Modules(out.path)
        if reasons:
            _with_code(modules, model, score)
        else:
            _stock(modules, model, score)
        write_json(out.path / "modules.json", modules.listed)
        settings = {"model_type": "SentenceTransformer", "similarity_fn_name": "dot", "prompts": {}}
        write_json(out.path / "config_sentence_transformers.json", settings)
        text = readme.sentence_transformers(bundle, score, reasons)
        (out.path / "README.md").write_text(text, encoding="utf-8")
    names = [entry["type"].rpartition(".")[2] for entry in modules.listed]
    facts = {"head": score.head, "width": score.width, "needs_code": bool(reasons), "modules": names}
    return facts | {"output": str(folder)}


def refuse_foreign(folder: Path) -> None:
    """Only an earlier export is replaced.

    Raises:
        ConfigError: the folder holds something else.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    try:
        kind = json.loads((folder / "manifest.json").read_text(encoding="utf-8")).get("kind")
    except (OSError, ValueError, AttributeError):
        kind = None
    if kind not in (KIND, "onnx-export"):
        raise ConfigError(
            "the folder is there and no earlier export", where=str(folder), fix="name a new folder, or remove this one"
        )


# -- stock modules ----------------------------------------------------------------------------------------------------


def _stock(modules: _Modules, model: Any, score: Scored) -> None:
    if model.encoder.transformer is not None:
        _transformer(modules, model)
    else:
        _token_table(modules, model)
    if model.encoder.residual is not None:
        _residual(modules, model.encoder.residual)
    if score.head == "de":
        modules.dense(model.head_de[0].weight, model.head_de[0].bias, "activation.Tanh")
        modules.normalize()
        return
    weight, bias = _clf_linear(model, score.has_bias)
    modules.dense(weight, bias, "linear.Identity")
    if score.clf_normalize:
        modules.normalize()


def _transformer(modules: _Modules, model: Any) -> None:
    """Transformer, pooling and, where the model has it, unit length."""
    root = modules.add(f"{BASE}transformer.Transformer", first=True)
    encoder = model.encoder
    shutil.copyfile(model.config_folder / "config.json", root / "config.json")
    state = {name: value.contiguous() for name, value in encoder.transformer.transformer.state_dict().items()}
    write_tensors(root / OUR_WEIGHTS, state, {"format": "pt"})
    _sentence_config(root, encoder.transformer.transformer.config.model_type in POOLING_HEADS)
    _tokenizer(root, model)
    modules.pool(encoder.transformer.width, encoder.settings.pooling)
    if encoder.unit_vectors:
        modules.normalize()


def _token_table(modules: _Modules, model: Any) -> None:
    """A bag: `exp(w_t) e_t` looked up, averaged, to unit length; a mean has the direction of the sum.

    The table is a GPT of no layers whose positions are zeros: the one stock module that looks tokens up and cuts long
    texts as we do, special tokens kept (`StaticEmbedding` and `WordEmbeddings` drop them).
    """
    bag = model.encoder.bag
    weighted_VD = torch.from_numpy(bag.embedding.numpy() * np.exp(bag.log_weight.numpy())).float()
    num_tokens, width = weighted_VD.shape
    root = modules.add(f"{BASE}transformer.Transformer", first=True)
    config = {
        "architectures": ["OpenAIGPTModel"], "model_type": "openai-gpt", "n_layer": 0, "n_head": 1, "n_embd": width,
        "vocab_size": num_tokens, "n_positions": model.max_length, "embd_pdrop": 0.0, "dtype": "float32",
    }  # fmt: skip
    write_json(root / "config.json", config)
    tensors = {"tokens_embed.weight": weighted_VD, "positions_embed.weight": torch.zeros(model.max_length, width)}
    write_tensors(root / OUR_WEIGHTS, tensors, {"format": "pt"})
    _sentence_config(root)
    _tokenizer(root, model)
    modules.pool(width, "mean")
    modules.normalize()


def _residual(modules: _Modules, residual: nn.Sequential) -> None:
    """`x + B gelu(A x)` as two layers: x itself goes through the first one as gelu(x) - gelu(-x), which is x."""
    first, last = residual[0], residual[3]
    weight_A, weight_B = first.get_parameter("weight"), last.get_parameter("weight")
    eye = torch.eye(weight_A.shape[1])
    bias = torch.cat([first.get_parameter("bias"), torch.zeros(2 * len(eye))])
    modules.dense(torch.cat([weight_A, eye, -eye]), bias, "activation.GELU")
    modules.dense(torch.cat([weight_B, eye, -eye], dim=1), last.get_parameter("bias"), "linear.Identity")


def _clf_linear(model: Any, has_bias: bool) -> tuple[Tensor, Tensor]:
    """The classifier's head; where labels have a bias one more output that is always 1."""
    weight, bias = model.head_clf[0].weight, model.head_clf[0].bias
    if has_bias:
        weight = torch.cat([weight, torch.zeros(1, weight.shape[1])])
        bias = torch.cat([bias, torch.ones(1)])
    return weight, bias


def _sentence_config(root: Path, without_pooler: bool = False) -> None:
    how = {"method": "forward", "method_output_name": "last_hidden_state"}
    config: dict[str, Any] = {
        "transformer_task": "feature-extraction",
        "modality_config": {"text": how},
        "module_output_name": "token_embeddings",
    }
    if without_pooler:  # else a pooling head is made up and its absence complained of
        config["model_kwargs"] = {"add_pooling_layer": False}
    write_json(root / "sentence_bert_config.json", config)


def _tokenizer(root: Path, model: Any) -> None:
    """Our tokenizer.json, to be loaded as it is: not made anew by a class that guesses from vocab.txt."""
    source = model.tokenizer_folder
    shutil.copyfile(source / "tokenizer.json", root / "tokenizer.json")
    told: dict[str, Any] = {}
    if (source / "tokenizer_config.json").is_file():
        told = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    kept = {name: told[name] for name in told if name.endswith("_token") and told[name] is not None}
    kept.setdefault("pad_token", _pad_token(source))
    config = kept | {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": model.max_length, "padding_side": "right",
        "truncation_side": "right", "model_input_names": ["input_ids", "attention_mask"],
    }  # fmt: skip
    write_json(root / "tokenizer_config.json", config)


def _pad_token(source: Path) -> str:
    """The token that pads, by the rule of `TextTokenizer`: it is only ever seen under a mask of 0."""
    from tokenizers import Tokenizer

    from unidec.data.tokens import TextTokenizer

    pad_id = TextTokenizer(source, 1 << 20).pad_id
    return str(Tokenizer.from_file(str(source / "tokenizer.json")).id_to_token(pad_id))


# -- with a module of ours --------------------------------------------------------------------------------------------


def _with_code(modules: _Modules, model: Any, score: Scored) -> None:
    encoder, bag = model.encoder, model.encoder.bag
    if encoder.transformer is not None:
        _transformer(modules, model)
    config = {
        "max_length": model.max_length,
        "transformer_width": encoder.transformer.width if encoder.transformer is not None else 0,
        "bag_width": bag.width // (2 if bag.head else 1) if bag is not None else 0,
        "bag_head": bag.head if bag is not None else 0,
        "num_tokens": bag.num_tokens if bag is not None else 0,
        "num_words": bag.num_words if bag is not None else 0,
        "residual": encoder.residual is not None,
        "dim": score.dim,
        **{name: value for name, value in score.facts().items() if name in ("head", "clf_weight", "clf_normalize")},
        "has_bias": score.has_bias,
        "pad_token": _pad_token(model.tokenizer_folder),
    }
    path = modules.add(f"{OURS}.UnidecQueries", config, first=False)
    shutil.copyfile(Path(__file__).with_name(f"{OURS}.py"), modules.root / f"{OURS}.py")
    shutil.copyfile(model.tokenizer_folder / "tokenizer.json", path / "tokenizer.json")
    tensors: dict[str, Tensor] = {}
    if bag is not None:
        tensors["bag.weight"] = torch.from_numpy(bag.embedding.numpy() * np.exp(bag.log_weight.numpy())).float()
        if bag.num_words:
            tensors["continues"] = bag.continues.to(torch.uint8)
    if encoder.residual is not None:
        for name, number in (("residual_in", 0), ("residual_out", 3)):
            layer = encoder.residual[number]
            tensors |= {f"{name}.{part}": layer.get_parameter(part) for part in ("weight", "bias")}
    for name, head in (("de", model.head_de), ("clf", model.head_clf)):
        if score.head in ("both", name):
            tensors |= {f"{name}.{part}": head[0].get_parameter(part) for part in ("weight", "bias")}
    write_tensors(path / OUR_WEIGHTS, {name: t.detach().contiguous() for name, t in tensors.items()})
