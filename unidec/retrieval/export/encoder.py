"""Encoder and heads for other programs: as one ONNX file, or as a folder that sentence-transformers loads.

Only modules of sentence-transformers are used, which run one after the other: a transformer with one head is expressed
by them exactly. A bag of tokens, a residual layer, or both heads side by side are refused.

Legend: B texts, T tokens of the longest, V tokens of the vocabulary, D width of a head, D' width of what is searched.
"""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from unidec.data.storage import write_folder, write_json
from unidec.data.tokens import load_tokenizer
from unidec.errors import ConfigError
from unidec.model.encoder import BagEncoder
from unidec.model.onnx_export import MAX_BYTES, OPSET, TransformerGraph, export_graph
from unidec.model.unidec import UniDEC
from unidec.model.words import MIX, ODD, PLACES
from unidec.retrieval.bundle import Bundle
from unidec.retrieval.bundle_folder import BundleInfo
from unidec.retrieval.export.heads import ExportFacts, facts, refuse_foreign, scored_by, write_readme

ONNX, SENTENCE_TRANSFORMERS = "onnx-export", "sentence-transformers"  # kinds of folder
VERSION = 1


def export_onnx(bundle: Bundle, folder: str | os.PathLike[str], *, head: str | None = None) -> ExportFacts:
    """Write model.onnx, tokenizer.json and README.md into a folder.

    Inputs: `input_ids`, `attention_mask` int64 [B, T], padded on the right. Outputs float32: `de` and `clf` [B, D],
    those that the model has; `vector` [B, D'], whose inner product with the vectors of `export_vectors` of the same
    head is the score that the bundle gives (without votes of training queries). Standard operators only.

    Args:
        bundle: a loaded bundle, on the CPU.
        folder: replaced where it is there already, and only if it is an earlier export.
        head: of `vector`: "both", "de" or "clf"; None: what the bundle ranks by.

    Returns:
        {"head", "width", "outputs", "opset", "bytes", "output"}.

    Raises:
        DataError: no such head.
        ConfigError: onnx is missing, an encoder too large for one file, a folder that is something else.
    """
    if importlib.util.find_spec("onnx") is None:
        raise ConfigError("onnx is not installed", where="export onnx", fix="pip install 'unidec-xmc[serve]'")
    score, model = scored_by(bundle.info, head), bundle.model
    refuse_foreign(Path(folder))
    size = sum(4 * parameter.numel() for parameter in model.encoder.parameters())
    if size > MAX_BYTES:
        raise ConfigError("one ONNX file cannot hold this", where=str(bundle.path), got=size, expected=MAX_BYTES)
    graph = QueryGraph(model, score)
    meta = {"bundle_sha256": bundle.sha256, "outputs": graph.outputs, **facts(score)}
    with write_folder(folder, ONNX, VERSION, meta, num_bytes=size) as out:
        file = out.path / "model.onnx"
        export_graph(graph, file, graph.outputs)
        size = file.stat().st_size
        # with our truncation and padding in it, so that `encode_batch` gives what the model takes
        ours = load_tokenizer(model.tokenizer_folder, model.max_length)
        tokenizer = Tokenizer.from_file(str(ours.file))
        tokenizer.enable_truncation(model.max_length, stride=0, strategy="longest_first", direction="right")
        tokenizer.enable_padding(direction="right", pad_id=ours.pad_id, pad_token=tokenizer.id_to_token(ours.pad_id))
        tokenizer.save(str(out.path / "tokenizer.json"))
        write_json(out.path / "config.json", meta | {"max_length": model.max_length, "opset": OPSET})
        write_readme(out.path, bundle, score, graph.outputs, OPSET)
    told: ExportFacts = {"head": score.space, "width": score.width, "outputs": graph.outputs, "opset": OPSET}
    return told | {"bytes": size, "output": str(folder)}


class QueryGraph(nn.Module):
    """The query side of a score, of padded texts.

    Attributes:
        outputs: names of what it returns: the heads' vectors, and last `vector`.
    """

    def __init__(self, model: UniDEC, score: BundleInfo) -> None:
        super().__init__()
        self.model, self.score = model, score
        self.transformer = None if model.encoder.transformer is None else TransformerGraph(model.encoder)
        self.outputs = [head for head in ("de", "clf") if model.heads in ("both", head)] + ["vector"]

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        encoder = self.model.encoder
        parts = [] if self.transformer is None else [self.transformer(input_ids, attention_mask)]
        if encoder.bag is not None:
            parts += _padded_bag(encoder.bag, input_ids, attention_mask.float())
        x_BW = torch.cat(parts, dim=-1)
        x_BW = x_BW if encoder.residual is None else x_BW + encoder.residual(x_BW)
        found = {name: getattr(self.model, name)(x_BW) for name in self.outputs[:-1]}
        return *found.values(), self._vector(**found)

    def _vector(self, de: Tensor | None = None, clf: Tensor | None = None) -> Tensor:
        """`scoring_space.query_vectors`."""
        score, parts = self.score, []
        if de is not None and score.space != "clf":
            parts.append(de)
        if clf is not None and score.space != "de":
            parts.append((F.normalize(clf, dim=-1) if score.clf_normalize else clf) * score.clf_weight)
            if "bias" in score.vectors:  # one more dimension, in which labels have their bias
                parts.append(torch.full_like(clf[:, :1], score.clf_weight))
        return torch.cat(parts, dim=-1)


def _padded_bag(bag: BagEncoder, ids_BT: Tensor, mask_BT: Tensor) -> list[Tensor]:
    """`BagEncoder` of padded texts: of all tokens, of the first ones where it has a bag of them, or its layers'."""
    if bag.inception is not None:
        weight_BT = F.embedding(ids_BT, bag.log_weight.weight)[..., 0].exp() * mask_BT
        x_BTD = F.embedding(ids_BT, bag.embedding.weight) * weight_BT.unsqueeze(-1)
        return [bag.inception(F.pad(x_BTD, (0, 0, 0, bag.num_read))[:, : bag.num_read])]
    rows, counts, places = ids_BT, mask_BT, mask_BT.cumsum(1) - 1
    if bag.num_words:  # each behind its last piece; those that do not end there count 0 times
        word_BT, ends_BT, place_BT = padded_words(ids_BT, mask_BT, bag.continues, bag.num_words)
        rows, counts = torch.cat([ids_BT, word_BT], 1), torch.cat([mask_BT, ends_BT.float()], 1)
        places = torch.cat([place_BT, place_BT + 1], 1)
    rows_BFD = F.embedding(rows, bag.embedding.weight)
    weights = [F.embedding(rows, bag.log_weight.weight)[..., 0].exp() * counts]
    if bag.head:  # padding has no weight whatever its place
        weights.append(weights[0] * (places < bag.head))
    return [F.normalize((weight_BF[:, None] @ rows_BFD)[:, 0], dim=-1) for weight_BF in weights]


def padded_words(
    ids_BT: Tensor, mask_BT: Tensor, continues_V: Tensor, num_buckets: int
) -> tuple[Tensor, Tensor, Tensor]:
    """What `unidec.model.words.with_words` finds, by standard operators: each word of several pieces at its last one.

    Args:
        ids_BT, mask_BT: int64, padded on the right. continues_V: bool, which tokens continue a word.

    Returns:
        the row of the word that ends at a token, int64 [B, T], from V on; whether one does, bool [B, T]; the token's
        place in its text, words before it counted, int64 [B, T].
    """
    place_T, real_BT = torch.arange(ids_BT.shape[1]), mask_BT > 0
    begins_BT = ~continues_V[ids_BT] | (place_T == 0) | ~real_BT
    word_BT = begins_BT.long().cumsum(1)
    inside_BT = ((word_BT[:, :, None] == word_BT[:, None]) & (place_T < place_T[:, None])).long().sum(-1)
    key_BT = _mixed(ids_BT * PLACES + inside_BT)
    before_BT = key_BT.cumsum(1) - key_BT  # sums overflow, and their differences are right all the same
    sum_BT = before_BT + key_BT - before_BT.gather(1, place_T - inside_BT)
    row_BT = len(continues_V) + _remainder(_mixed(sum_BT), num_buckets)
    ends_BT = (inside_BT > 0) & torch.cat([begins_BT[:, 1:], torch.ones_like(begins_BT[:, :1])], 1)
    return row_BT, ends_BT, place_T + ends_BT.long().cumsum(1) - ends_BT.long()


def _mixed(key: Tensor) -> Tensor:
    """`unidec.model.words.mixed`, in signed integers."""
    first, second = (int(factor.astype("int64")) for factor in MIX)
    key = key + int(ODD.astype("int64"))
    key = _xor(key, _shifted(key, 30)) * first
    key = _xor(key, _shifted(key, 27)) * second
    return _xor(key, _shifted(key, 31))


def _xor(one: Tensor, other: Tensor) -> Tensor:
    """Torch's exporter knows it of booleans alone."""
    return one + other - 2 * (one & other)


def _shifted(key: Tensor, bits: int) -> Tensor:
    """To the right as if it had no sign."""
    return torch.div(key, 1 << bits, rounding_mode="floor") & ((1 << (64 - bits)) - 1)


def _remainder(key: Tensor, divisor: int) -> Tensor:
    """As if `key` had no sign."""
    return (_shifted(key, 1) % divisor * 2 + (key & 1)) % divisor


def export_sentence_transformers(
    bundle: Bundle, folder: str | os.PathLike[str], *, head: str | None = None
) -> ExportFacts:
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
    with write_folder(folder, SENTENCE_TRANSFORMERS, VERSION, {"bundle_sha256": bundle.sha256, **facts(score)}) as out:
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
        layers = [_dense(*_weights(model.head_de[0]), nn.Tanh())] if model.settings.projection else []
        return [*modules, *layers, *([normalize] if model.settings.normalize else [])]
    assert model.head_clf is not None
    weight, bias = torch.eye(encoder.width), torch.zeros(encoder.width)
    if model.settings.projection:
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
