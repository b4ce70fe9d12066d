"""Measures the memory of a training and of its largest step without allocating or computing: the
real code runs on tensors without values, whose bytes are counted, but a transformer encodes only
two chunks of texts.

Legend: B queries of a batch, L labels, W width of the encoder, C texts of a chunk, T tokens.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from unidec.config import Encoder, Params
from unidec.data.chunks import GPU_CHUNK_TOKENS, attention_work
from unidec.data.csr import ones_at
from unidec.methods.assembly import additions, chosen_methods, rows_of
from unidec.methods.inception import token_layers
from unidec.methods.label_clusters import LABEL_CLUSTER
from unidec.methods.simcse import texts_as_labels
from unidec.methods.teacher import TeacherLoss
from unidec.model.dense import new_dense
from unidec.model.encoder import (
    EncoderInput,
    TextEncoder,
    TransformerEncoder,
    transformer_class,
    transformer_config,
    transformer_options,
)
from unidec.model.encoder_inputs import InputBuilder
from unidec.model.lora import add_adapters
from unidec.model.packed import Packed, Padded, in_half, is_packable
from unidec.model.pool import TrainingPairs
from unidec.model.row_table import Placement
from unidec.model.sources import is_static, resolve_encoder
from unidec.model.static import StaticVectors, empty_static
from unidec.model.unidec import UniDEC
from unidec.pipeline.data_sizes import RepeatedTexts, Sizes
from unidec.pipeline.live_bytes import AsOnGPU, LiveBytes
from unidec.pipeline.teaching import unread_teacher
from unidec.training.batches import Batches, TrainingTexts
from unidec.training.distributed import Ranks
from unidec.training.gradient_cache import encode_texts
from unidec.training.gradients import Gradients
from unidec.training.objective import Objective
from unidec.training.optim import Optimisers
from unidec.training.sampler import (
    head_labels,
    queries_a_batch,
    weighs_by_propensity,
)

CPU = torch.device("cpu")
# encoders that can be planned for without their files
KNOWN = {
    "distilbert-base-uncased": "distilbert",
    "msmarco-distilbert-base-v4": "distilbert",
    "bert-base-uncased": "bert",
}
DENSE = "encoder and heads"
TOKENS = "token table"
ROWS = "classifier rows"
STATE = (DENSE, TOKENS, ROWS)
_OF_TRANSFORMER = {"name", "trainable_layers", "lora"}
# maximum number of labels in a probe of a step over all labels; its memory is linear in the labels
MOST_LABELS = 1 << 14


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Bytes of a training, by part.

    Attributes:
        state: bytes held between steps, exact: parts in `STATE`, with their optimiser states.
        step: bytes allocated and freed in the largest step.
        num_queries, num_labels: sizes of that step. width: W.
    """

    state: dict[str, int]
    step: dict[str, int]
    num_queries: int
    num_labels: int
    width: int


class _OneOf(Ranks):
    """One of several ranks, without the others: tensors that they would send have no values."""

    def sum_rows(self, tables: Any) -> None:
        pass

    def all_reduce(self, *_: Any, **__: Any) -> None:
        pass

    def norm(self, *_: Any) -> Tensor:
        """A scalar, also if all weights that train are the transformer's, which does no work."""
        return torch.zeros(())

    def _gather(self, x_RD: Tensor, sizes: Sequence[int]) -> Tensor:
        return x_RD.new_empty(sum(sizes), *x_RD.shape[1:])


class _Builder(InputBuilder):
    """Divides texts into chunks as on a GPU."""

    chunk_tokens = GPU_CHUNK_TOKENS


def encoder_config(name: str) -> Any:
    """The config of a transformer, without its weights: from a folder or name that
    `resolve_encoder` finds, or of a name in `KNOWN`; raises the errors of `resolve_encoder` and
    `transformer_config`.
    """
    from transformers import AutoConfig

    if known := _known(name):
        return AutoConfig.for_model(known)
    folder = resolve_encoder(name)
    return empty_static(folder).config if is_static(folder) else transformer_config(folder)


def _known(name: str) -> str | None:
    return None if Path(name).is_dir() else KNOWN.get(name.rpartition("/")[2])


@functools.cache
def _measure_chunk(
    settings: str, shape: tuple[int, ...], *, gpu: bool, half: bool
) -> tuple[float, int, int]:
    """Bytes of a chunk of texts in a transformer: held for the backward pass, per token; held once
    for all chunks (cast weights); allocated in the backward pass (gradients).
    """
    section = Encoder.model_validate_json(settings)
    if section.trainable_layers == 0:
        return 0.0, 0, 0
    transformer = _transformer(section, gpu)
    packs = len(shape) == 1
    as_there = AsOnGPU() if gpu and not packs else contextlib.nullcontext()
    with no_memory(), as_there, LiveBytes() as live:
        encoder = TransformerEncoder(transformer, "mean", section.trainable_layers).train()
        add_adapters(encoder, section.lora)
        run: Any = encoder
        ids = torch.zeros(shape, dtype=torch.int64)
        texts: Any = Padded(ids, ids == 0)
        if packs:
            run = in_half(encoder, torch.bfloat16, "cpu")
            texts = Packed(ids, ids, ids[:2].int(), len(ids))
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            first = run(texts)
            of_first = live.now
            second = run(texts)
        held = live.peak = live.now
        torch.autograd.backward(second.sum())
        backward = live.peak - held
        encoder.zero_grad()
        del first
    each = held - of_first
    return each / math.prod(shape), max(of_first - each, 0), backward


@functools.cache
def no_memory() -> FakeTensorMode:
    """The mode in which tensors have no values; created on first use, as its imports are slow."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def _transformer(encoder: Encoder, gpu: bool) -> torch.nn.Module:
    """A transformer without values, with adapters if it is trained with them."""
    return _cached_transformer(encoder.model_dump_json(include=_OF_TRANSFORMER), gpu)


@functools.cache
def _cached_transformer(settings: str, gpu: bool) -> torch.nn.Module:
    section = Encoder.model_validate_json(settings)
    config = encoder_config(section.name)
    if isinstance(config, SimpleNamespace):  # static vectors
        return StaticVectors(torch.empty(config.vocab_size, config.hidden_size, device="meta"))
    options = transformer_options(config, gpu)
    with torch.device("meta"):
        transformer = transformer_class(config).from_config(config, dtype=torch.float32, **options)
    add_adapters(TransformerEncoder(transformer, "mean", section.trainable_layers), section.lora)
    with no_memory():
        return transformer.to_empty(device="cpu")


def num_rows(params: Params, sizes: Sizes) -> int:
    """Maximum number of training rows: queries, and label texts used as queries."""
    share = params.label_graph.share * params.pool.gandalf + params.pool.simcse
    queries = sizes.num_train * (params.pool.gandalf_rows != "labels")
    return queries + math.ceil(share * sizes.num_labels)


def measure(params: Params, sizes: Sizes, *, gpu: bool, half: bool) -> Measured:
    """Measure the memory of one rank of a training, and of its largest step.

    Args:
        gpu: the device is a GPU. half: transformers compute in bfloat16.

    Raises:
        ConfigError: more layers to train than the encoder has.
    """
    num_labels = sizes.num_labels
    probe = functools.partial(_Probe, params, sizes, gpu=gpu, half=half)
    whole = probe(num_labels)
    state = whole.state()
    few = MOST_LABELS
    if "all" in head_labels(params.model, params.pool) and num_labels > few:
        step = probe(few).step()
        half_step = probe(few // 2).step()
        times = (num_labels - few) / (few // 2)  # extrapolates from half of the labels
        step.heads += math.ceil(times * max(step.heads - half_step.heads, 0))
        step.tokens += math.ceil(times * max(step.tokens - half_step.tokens, 0))
        step.num_labels = num_labels
    else:
        step = whole.step()
    tokens = step.tokens
    shape = step.chunk
    if params.run.recompute:
        shape = (min(shape[0], GPU_CHUNK_TOKENS), *shape[1:])  # packs are then small
        tokens = math.prod(shape)
    transformer = 0
    if tokens:
        settings = params.encoder.model_dump_json(include=_OF_TRANSFORMER)
        each, once, backward = _measure_chunk(settings, shape, gpu=gpu, half=half)
        transformer = math.ceil(tokens * each) + once + backward
    return Measured(
        state=state,
        step={"transformer": transformer, "heads and losses": step.heads},
        num_queries=whole.num_batch,
        num_labels=step.num_labels,
        width=whole.model.encoder.width,
    )


@dataclass(kw_only=True)
class _Step:
    """Measurements of a largest step.

    Attributes:
        heads: bytes of everything but the transformer. num_labels: number of labels in a pool.
        tokens: most tokens, with padding, whose activations the transformer keeps at a time.
        chunk: shape of the most expensive chunk: [C, T], or [F] for packed texts.
    """

    heads: int
    num_labels: int
    tokens: int
    chunk: tuple[int, ...]


class _Probe:
    """A training on tensors without values, and its largest step."""

    def __init__(
        self, params: Params, sizes: Sizes, num_labels: int, *, gpu: bool, half: bool
    ) -> None:
        self.params = params
        self.sizes = sizes
        self.num_labels = num_labels
        rows = num_rows(params, sizes)
        self.num_batch = min(queries_a_batch(params.pool, rows), rows)
        # labels of the batch's queries, and hard negatives
        num_used = min(self.num_batch * (sizes.labels_a_query + params.pool.eta), num_labels)
        self.num_used = num_used
        self.spacing = num_labels // num_used  # so that each rank has some of these labels
        self.builder = _Builder if gpu else InputBuilder
        self.packs = gpu and half and is_packable(encoder_config(params.encoder.name))
        # the last rank has the largest part of the labels
        world = params.run.devices
        self.ranks = _OneOf(rank=world - 1, world=world)
        self.autocast = functools.partial(torch.autocast, "cpu", torch.bfloat16, enabled=half)
        self.live = LiveBytes()
        self.passes: list[list[tuple[int, ...]]] = []  # shapes of the chunks encoded together
        transformer = None
        if params.encoder.has_transformer:
            transformer = _transformer(params.encoder, gpu)
        with no_memory(), self.live:
            self.model = self._new_model(transformer)
            self.optimisers = Optimisers(self.model, params.optim, 1000)
        if size := params.model.labels_a_cluster:  # needs values: the host reads the clusters
            self.model.register_buffer(LABEL_CLUSTER, torch.arange(num_labels) // size)

    def _new_model(self, transformer: torch.nn.Module | None) -> UniDEC:
        settings = self.params.encoder
        begin, end = self.ranks.part(self.num_labels)
        placement = Placement(first_row=begin, num_rows=end - begin)
        config = encoder_config(settings.name)
        num_tokens = max(self.sizes.vocab_size, config.vocab_size)
        width = config.hidden_size
        layers = token_layers(settings, width)
        has_folder = settings.has_transformer and not _known(settings.name)
        dense = new_dense(resolve_encoder(settings.name)) if has_folder else []
        encoder = TextEncoder(settings, transformer, num_tokens, width, layers, dense=dense)
        add_adapters(encoder.transformer, settings.lora)
        encoder.transformer_vectors = self._outputs  # type: ignore[method-assign]
        if encoder.bag is not None:  # needs values: the host reads the flags
            encoder.bag._host_continues = np.arange(num_tokens) % 2 == 1
        return UniDEC(
            settings, self.params.model, self.num_labels, encoder, placement, add=additions
        ).train()

    def _outputs(self, batch: EncoderInput) -> Tensor:
        """Vectors in the shape that the transformer returns, without computing them."""
        self.passes.append([chunk[0].shape for chunk in batch.chunks])
        encoder = self.model.encoder
        is_trained = not encoder.takes_vectors
        assert encoder.transformer is not None
        return torch.zeros(batch.num_texts, encoder.transformer.width, requires_grad=is_trained)

    def state(self) -> dict[str, int]:
        """Bytes of weights, tables and their optimiser states, by part."""
        state = dict.fromkeys(STATE, 0)
        tables = self.optimisers.row_states()
        for name, rows in tables.items():
            part = TOKENS if name.startswith("encoder.") else ROWS
            state[part] += sum(tensor.nbytes for tensor in rows.values())
        for name, weight in self.model.named_parameters():
            if name.removesuffix(".weight") not in tables:
                moments = 2 * weight.requires_grad  # of AdamW
                state[DENSE] += weight.nbytes * (1 + moments)
        return state

    def step(self) -> _Step:
        """Run the step: forward and backward pass without the transformer's work, and the updates
        of rows. AdamW updates dense weights in place.
        """
        batches, objective = self._parts()
        batch = batches.prepare(np.arange(self.num_batch), 0, 0, self._negatives())
        self.passes.clear()  # of a frozen encoder, whose outputs are cached
        given = {id(vectors): vectors for vectors in batch.added.get(TeacherLoss.name, {}).values()}
        begin = self.live.now - sum(vectors.nbytes for vectors in given.values())
        with no_memory(), self.live as live, warnings.catch_warnings():
            # a table whose rows are all used compares data pointers, equal for fake tensors
            warnings.filterwarnings("ignore", "Accessing the data pointer", UserWarning)
            x_BW, backward = encode_texts(self.model.encoder, batch.texts, self.autocast)
            losses = objective.losses(x_BW, batch, 0)
            backward(torch.stack(list(losses.values())).sum())
            norm = Gradients(self.model, self.optimisers, self.ranks, None).complete()
            for rows in self.optimisers.row.values():
                rows.step(1, 1.0, norm, torch.zeros(()))
        of_all = self.model.heads != "de" and batch.clf.ids is None
        return _Step(
            heads=live.peak - begin,
            num_labels=self.num_labels if of_all else len(batch.pool.pool_S),
            tokens=max((sum(map(math.prod, shapes)) for shapes in self.passes), default=0),
            chunk=max(itertools.chain(*self.passes), key=attention_work, default=(0, 0)),
        )

    def _parts(self) -> tuple[Batches, Objective]:
        """Batches and losses of the training, on few queries."""
        settings = self.params.training
        pairs = self._pairs()
        texts = self._texts(pairs)
        related = cast(Any, SimpleNamespace(rows=lambda _: pairs.rows, relevance=pairs.relevance))
        graph = None
        if settings.model.clf_graph:  # each label is related to the next one of the batch
            graph = sp.eye_array(self.num_labels, k=self.spacing, format="csr", dtype=np.float32)
        rows = rows_of(self.model, related, graph, cast(Any, None))
        if settings.pool.simcse:
            pairs = texts_as_labels(pairs)
        teacher = unread_teacher(self.params.teacher, self.num_batch, self.num_labels)
        methods, pairs = chosen_methods(
            settings, self.model, rows, pairs, self.autocast, teacher=teacher
        )
        weights = np.broadcast_to(1.0, (self.num_labels,))
        batches = Batches(
            settings,
            texts,
            pairs,
            methods,
            build=self.builder(self.model.encoder, CPU, packs=self.packs),
            device=CPU,
            ranks=self.ranks,
            inverse_L=weights if weighs_by_propensity(settings.loss, settings.pool) else None,
        )
        objective = Objective(
            settings.loss, self.model, methods, seed=0, ranks=self.ranks, autocast=self.autocast
        )
        return batches, objective

    def _pairs(self) -> TrainingPairs:
        """Queries that each have the mean number of labels: the batch's queries, followed by others
        with the same labels.
        """
        num_queries = self.num_batch * (1 + self.params.model.clf_queries)
        each = self.sizes.labels_a_query
        places = np.arange(num_queries * each)
        shape = (num_queries, self.num_labels)
        labels = places % self.num_used * self.spacing
        return TrainingPairs(
            rows=np.arange(num_queries),
            relevance=ones_at((places // each, labels), shape),
            filter_pairs=sp.csr_matrix(shape, dtype=bool),
            soft=self.params.pool.gandalf,
        )

    def _negatives(self) -> np.ndarray:
        """Hard negatives of the batch, int32 [B, H]; positives only if other labels run out."""
        shape = (self.num_batch, self.params.pool.eta)
        number = np.arange(math.prod(shape), dtype=np.int32)
        place = self.num_used - 1 - number % self.num_used
        return (place * self.spacing).reshape(shape)

    def _texts(self, pairs: TrainingPairs) -> TrainingTexts:
        sizes = self.sizes
        read = (self.params.tokens.max_length, sizes.vocab_size)
        queries = RepeatedTexts(len(pairs.rows), sizes.query_tokens, *read)
        labels = RepeatedTexts(self.num_labels, sizes.label_tokens, *read)
        return TrainingTexts({"queries": queries, "labels": labels})
