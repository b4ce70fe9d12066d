"""Exports encoder and heads for other programs: as one ONNX file, or as a folder for
sentence-transformers.

The sentence-transformers folder is a sequence of that library's standard modules, which express a
transformer with one head exactly. A bag of tokens, a residual layer, or both heads side by side
cannot be expressed and are refused.

Legend: B texts, T tokens of the longest, F rows of the bag, V tokens of the vocabulary, W width of
the encoder's output, D width of a head, D' width of the searched space.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from unidec.bundle.bundle import Bundle
from unidec.bundle.export.vectors import (
    ExportFacts,
    check_replaceable,
    facts,
    scored_by,
    write_readme,
)
from unidec.data.storage import read_json, write_folder, write_json
from unidec.data.tokens import load_tokenizer
from unidec.errors import ConfigError
from unidec.model.arrays import MAX_BYTES, heads_of
from unidec.model.encoder import BagEncoder
from unidec.model.encoder_folder import FROM_HERE
from unidec.model.onnx_export import OPSET, TransformerGraph, export_graph
from unidec.model.unidec import UniDEC
from unidec.model.words import MIX, ODD, PLACES
from unidec.ranking.heads import Heads

# kinds of folder
ONNX = "onnx-export"
SENTENCE_TRANSFORMERS = "sentence-transformers"
VERSION = 1


def export_onnx(
    bundle: Bundle, folder: str | os.PathLike[str], *, head: str | None = None
) -> ExportFacts:
    """Write model.onnx, tokenizer.json and README.md into a folder.

    Inputs: `input_ids`, `attention_mask` int64 [B, T], padded on the right. Outputs, float32: `de`
    and `clf` [B, D], if the model has the head; `vector` [B, D'], whose inner product with the
    label vectors of `export_vectors` for the same head is the bundle's score (without votes of
    training queries). The graph uses only standard operators.

    Args:
        bundle: a loaded bundle, on the CPU.
        folder: an existing folder is replaced, but only if it is an earlier export.
        head: head of `vector`: "both", "de" or "clf"; None: the bundle's searched space.

    Returns:
        {"head", "width", "outputs", "opset", "bytes", "output"}.

    Raises:
        DataError: the bundle does not have the head.
        ConfigError: onnx is not installed, the encoder is too large for one file, or the folder is
        not an export.
    """
    if importlib.util.find_spec("onnx") is None:
        raise ConfigError(
            "onnx is not installed", where="export onnx", fix="pip install 'unidec-xmc[serve]'"
        )
    score = scored_by(bundle, head)
    model = bundle.model
    prompt = model.encoder_settings.query_prompt
    if prompt and model.encoder.bag is not None:
        raise ConfigError(
            "one graph has one text: the transformer reads a prompt, the bag of tokens does not",
            where=bundle.path,
            got=prompt[:60],
            fix="serve the bundle with unidec, or train without a prompt or without a bag",
        )
    check_replaceable(Path(folder))
    size = 4 * sum(parameter.numel() for parameter in model.encoder.parameters())
    if size > MAX_BYTES:
        raise ConfigError(
            "the encoder is too large for one ONNX file",
            where=bundle.path,
            got=size,
            expected=MAX_BYTES,
        )
    graph = QueryGraph(bundle, score)
    outputs = graph.outputs
    length = model.max_length
    meta = {"outputs": outputs, **facts(bundle, score)}
    with write_folder(folder, ONNX, VERSION, meta, num_bytes=size) as out:
        file = out.path / "model.onnx"
        export_graph(graph, file, outputs)
        size = file.stat().st_size
        # includes truncation and padding, so that `encode_batch` returns valid inputs of the model
        source = load_tokenizer(model.tokenizer_folder, length)
        tokenizer = Tokenizer.from_file(str(source.file))
        tokenizer.enable_truncation(length, direction=source.truncation_side)
        pad_token = tokenizer.id_to_token(source.pad_id)
        tokenizer.enable_padding(pad_id=source.pad_id, pad_token=pad_token)
        tokenizer.save(str(out.path / "tokenizer.json"))
        write_json(out.path / "config.json", meta | {"max_length": length, "opset": OPSET})
        write_readme(out.path, bundle, score, outputs, OPSET)
    return {
        "head": score.space,
        "width": score.shape[1],
        "outputs": outputs,
        "opset": OPSET,
        "bytes": size,
        "output": str(folder),
    }


class QueryGraph(nn.Module):
    """The query side of a score as a graph, for padded texts.

    Attributes:
        outputs: names of the outputs: the heads, followed by `vector`.
    """

    def __init__(self, bundle: Bundle, score: Heads) -> None:
        super().__init__()
        model = bundle.model
        self.model = model
        self.score = score
        self.clf_normalize = bundle.info.clf_normalize
        self.transformer = model.encoder.transformer and TransformerGraph(model.encoder)
        self.heads = heads_of(model.heads)
        self.outputs = [*self.heads, "vector"]

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        encoder = self.model.encoder
        parts = []
        if self.transformer is not None:
            parts.append(self.transformer(input_ids, attention_mask))
        if encoder.bag is not None:
            parts += _padded_bag(encoder.bag, input_ids, attention_mask.float())
        x_BW = torch.cat(parts, dim=-1)
        if encoder.residual is not None:
            x_BW = x_BW + encoder.residual(x_BW)
        outputs = {head: getattr(self.model, head)(x_BW) for head in self.heads}
        return *outputs.values(), self._vector(outputs)

    def _vector(self, outputs: dict[str, Tensor]) -> Tensor:
        """As `Heads.queries`."""
        score = self.score
        dim = self.model.settings.dim
        parts = []
        if score.space != "clf":
            parts.append(outputs["de"])
        if score.space != "de":
            clf = outputs["clf"]
            unit_clf = F.normalize(clf, dim=-1) if self.clf_normalize else clf
            parts.append(unit_clf * score.clf_weight)
        # up to one more dimension, in which labels have their bias
        more = score.shape[1] - dim * len(parts)
        return F.pad(torch.cat(parts, dim=-1), (0, more), value=score.clf_weight)


def _padded_bag(bag: BagEncoder, ids_BT: Tensor, mask_BT: Tensor) -> list[Tensor]:
    """`BagEncoder` for padded texts: the output of its layers if it has any; otherwise the bag of
    all tokens and, if used, of the first ones.
    """
    if bag.token_layers is not None:
        log_weight_BT = F.embedding(ids_BT, bag.log_weight.weight)[..., 0]
        weight_BT = log_weight_BT.exp() * mask_BT
        x_BTD = F.embedding(ids_BT, bag.embedding.weight) * weight_BT.unsqueeze(-1)
        padded_BTD = F.pad(x_BTD, (0, 0, 0, bag.num_read))
        return [bag.token_layers(padded_BTD[:, : bag.num_read])]
    rows = ids_BT
    counts = mask_BT
    places = mask_BT.cumsum(1) - 1
    if bag.num_words:  # a word's row is put at its last piece; elsewhere the count is 0
        word_BT, ends_BT, place_BT = padded_words(ids_BT, mask_BT, bag.continues, bag.num_words)
        rows = torch.cat([ids_BT, word_BT], 1)
        counts = torch.cat([mask_BT, ends_BT.float()], 1)
        places = torch.cat([place_BT, place_BT + 1], 1)
    rows_BFD = F.embedding(rows, bag.embedding.weight)
    log_weights = F.embedding(rows, bag.log_weight.weight)[..., 0]
    weights = [log_weights.exp() * counts]
    if bag.head:  # padding has weight 0 in any position
        weights.append(weights[0] * (places < bag.head))
    bags = [(weight_BF[:, None] @ rows_BFD)[:, 0] for weight_BF in weights]
    return [F.normalize(bag_BD, dim=-1) for bag_BD in bags]


def padded_words(
    ids_BT: Tensor, mask_BT: Tensor, continues_V: Tensor, num_buckets: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`unidec.model.words.with_words` with standard operators only; a word of several pieces is
    found at its last piece.

    Args:
        ids_BT, mask_BT: int64, padded on the right. continues_V: bool, tokens that continue a word.

    Returns:
        int64 [B, T]: row of the word that ends at each token, V or larger; bool [B, T]: whether a
        word ends there; int64 [B, T]: position of each token in its text, counting the preceding
        words.
    """
    place_T = torch.arange(ids_BT.shape[1])
    real_BT = mask_BT > 0
    begins_BT = ~continues_V[ids_BT] | (place_T == 0) | ~real_BT
    word_BT = begins_BT.long().cumsum(1)
    same_word_BTT = word_BT[:, :, None] == word_BT[:, None]
    is_earlier_TT = place_T < place_T[:, None]
    inside_BT = (same_word_BTT & is_earlier_TT).long().sum(-1)
    key_BT = _mixed(ids_BT * PLACES + inside_BT)
    # sums may overflow; their differences are correct nevertheless. (onnxruntime's ReduceSum does
    # not wrap around, so it cannot add up the keys of a word.)
    before_BT = key_BT.cumsum(1) - key_BT
    sum_BT = before_BT + key_BT - before_BT.gather(1, place_T - inside_BT)
    row_BT = len(continues_V) + _remainder(_mixed(sum_BT), num_buckets)
    end_B1 = torch.ones_like(begins_BT[:, :1])
    next_begins_BT = torch.cat([begins_BT[:, 1:], end_B1], 1)
    ends_BT = (inside_BT > 0) & next_begins_BT
    words_before_BT = ends_BT.long().cumsum(1) - ends_BT.long()
    return row_BT, ends_BT, place_T + words_before_BT


def _mixed(key: Tensor) -> Tensor:
    """`unidec.model.words.mixed` in signed integers."""
    first, second = (int(factor.astype("int64")) for factor in MIX)
    key = key + int(ODD.astype("int64"))
    key = _xor(key, _shifted(key, 30)) * first
    key = _xor(key, _shifted(key, 27)) * second
    return _xor(key, _shifted(key, 31))


def _xor(one: Tensor, other: Tensor) -> Tensor:
    """Bitwise xor, which torch's exporter supports for booleans only."""
    return one + other - 2 * (one & other)


def _shifted(key: Tensor, bits: int) -> Tensor:
    """Logical (unsigned) right shift."""
    kept_bits = (1 << (64 - bits)) - 1
    return torch.div(key, 1 << bits, rounding_mode="floor") & kept_bits


def _remainder(key: Tensor, divisor: int) -> Tensor:
    """Remainder of `key` as an unsigned integer."""
    half = _shifted(key, 1) % divisor
    return (half * 2 + (key & 1)) % divisor


def export_sentence_transformers(
    bundle: Bundle, folder: str | os.PathLike[str], *, head: str | None
) -> ExportFacts:
    """Write the query side of a score as a sentence-transformers folder.

    The inner product of its vectors with the label vectors of `export_vectors` for the same head is
    the bundle's score (without votes of training queries).

    Args:
        bundle: a loaded bundle, on the CPU.
        folder: an existing folder is replaced, but only if it is an earlier export.
        head: "both", "de" or "clf"; None: the bundle's searched space.

    Returns:
        {"head", "width", "modules", "output"}.

    Raises:
        DataError: the bundle does not have the head.
        ConfigError: the modules cannot express the encoder, sentence-transformers is not installed,
            or the folder is not an export.
    """
    model = bundle.model
    score = scored_by(bundle, head)
    encoder = model.encoder
    got = fix = ""
    if encoder.transformer is None or encoder.bag is not None or encoder.residual is not None:
        got = "a bag of tokens or a residual layer"
        fix = "unidec export onnx"
    elif score.space == "both":
        got = "both heads side by side"
        fix = "--head de or clf exports one head"
    if got:
        raise ConfigError(
            "modules of sentence-transformers cannot express this encoder",
            where=bundle.path,
            got=got,
            fix=fix,
        )
    check_replaceable(Path(folder))
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise ConfigError(
            f"sentence-transformers cannot be imported: {error}",
            fix="pip install 'unidec-xmc[bench]'",
        ) from error

    settings = model.encoder_settings
    modules = _modules(bundle, score)
    with write_folder(folder, SENTENCE_TRANSFORMERS, VERSION, facts(bundle, score)) as out:
        prompts = {"query": settings.query_prompt, "document": settings.label_prompt}
        pipeline = SentenceTransformer(
            modules=modules,
            device="cpu",
            similarity_fn_name="dot",
            prompts=prompts,
            default_prompt_name="query" if settings.query_prompt else None,
        )
        pipeline.save(str(out.path), create_model_card=False)
        _keep_load_options(out.path, _load_options(encoder.transformer))
        write_readme(out.path, bundle, score)
    return {
        "head": score.space,
        "width": score.shape[1],
        "modules": [type(module).__name__ for module in modules],
        "output": str(folder),
    }


def _modules(bundle: Bundle, score: Heads) -> list[nn.Module]:
    from sentence_transformers.base.modules import Normalize
    from sentence_transformers.sentence_transformer.modules import Pooling

    model = bundle.model
    encoder = model.encoder
    normalize = Normalize()
    pooled = encoder.transformer
    assert pooled is not None
    transformer: Any = pooled.transformer
    modules = [
        _transformer(model, transformer),
        Pooling(transformer.config.hidden_size, FROM_HERE[encoder.settings.pooling]),
    ]
    modules += [
        _dense(layer.linear.weight.detach(), layer.linear.bias, layer.activation)
        for layer in pooled.behind
    ]
    width = pooled.width
    full_width = pooled.full_width
    if width < full_width:  # the library's truncate_dim would cut the head's output instead
        modules.append(_dense(torch.eye(full_width)[:width], None, nn.Identity()))
    if encoder.unit_vectors:
        modules.append(normalize)
    projects = model.settings.projection
    if score.space == "de":
        head = model.head_query or model.head_de
        assert head is not None
        if projects:
            modules.append(_dense(*_weights(head[0]), nn.Tanh()))
        return [*modules, normalize] if model.settings.normalize else modules
    assert model.head_clf is not None
    weight = torch.eye(encoder.width)
    bias = torch.zeros(encoder.width)
    if projects:
        weight, bias = _weights(model.head_clf[0])
    # up to one more output, always 1: the dimension in which labels have their bias
    more = score.shape[1] - len(bias)
    weight = F.pad(weight, (0, 0, 0, more))
    bias = F.pad(bias, (0, more), value=1.0)
    modules.append(_dense(weight, bias, nn.Identity()))
    return [*modules, normalize] if bundle.info.clf_normalize else modules


def _weights(layer: nn.Module) -> tuple[Tensor, Tensor]:
    return layer.get_parameter("weight").detach(), layer.get_parameter("bias").detach()


def _dense(weight: Tensor, bias: Tensor | None, activation: nn.Module) -> nn.Module:
    from sentence_transformers.base.modules import Dense

    width_out, width_in = weight.shape
    state = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    layer = Dense(width_in, width_out, bias="bias" in state, activation_function=activation)
    layer.linear.load_state_dict(state)
    return layer


def _transformer(model: UniDEC, transformer: Any) -> nn.Module:
    """A transformer and the model's tokenizer, loaded from a temporary folder in the layout of the
    library.
    """
    from sentence_transformers.base.modules import Transformer
    from transformers import PreTrainedTokenizerFast

    length = model.max_length
    source = load_tokenizer(model.tokenizer_folder, length)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(
        source.file.parent,
        model_max_length=length,
        padding_side="right",
        truncation_side=source.truncation_side,
        model_input_names=["input_ids", "attention_mask"],
    )
    if tokenizer.pad_token is None:  # padding is always masked
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(source.pad_id)
    with tempfile.TemporaryDirectory() as folder:
        transformer.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        options = _load_options(model.encoder.transformer)
        return Transformer(folder, max_seq_length=length, model_kwargs=options)


def _load_options(encoder: Any) -> dict[str, bool]:
    """Options with which `transformers` loads exactly these weights: no pooler, since encoders here
    have none.
    """
    return {"add_pooling_layer": False} if hasattr(encoder.transformer, "pooler") else {}


def _keep_load_options(folder: Path, options: dict[str, bool]) -> None:
    """Store the load options in the file from which the library reads them, since it does not write
    them.
    """
    file = folder / "sentence_bert_config.json"
    write_json(file, read_json(file) | {"model_args": options})
