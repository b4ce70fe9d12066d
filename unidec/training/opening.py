"""Opens a training: a new model or the newest checkpoint's, the methods that the recipe names,
batches and optimisers.

Legend: L labels, D width of a head.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch

from unidec.config import TrainingSettings
from unidec.data.dataset import XMCDataset
from unidec.data.json_file import read_json_lines, write_json_lines
from unidec.data.tokens import TokenCache
from unidec.errors import ArtifactError, ConfigError
from unidec.machine import keep_freed_memory
from unidec.methods.assembly import additions, changed_pairs, chosen_methods, rows_of
from unidec.methods.teacher import TeacherVectors
from unidec.methods.word_teacher import WordTargets
from unidec.model.additions import Rows
from unidec.model.first_rows import start_table
from unidec.model.frozen import cached_inputs
from unidec.model.lora import add_adapters
from unidec.model.row_table import Placement
from unidec.model.sources import resolve_encoder
from unidec.model.unidec import UniDEC
from unidec.training.batches import Batches, TrainingTexts, inverse_propensities, query_pairs
from unidec.training.checkpoint import Checkpoint, load_checkpoint
from unidec.training.distributed import Ranks
from unidec.training.encoding import Encoding
from unidec.training.gradients import Gradients
from unidec.training.identity import check_same, run_identity
from unidec.training.initial_weights import Start, cluster_labels, start_bag, take_model, take_rows
from unidec.training.objective import Objective
from unidec.training.optim import Optimisers
from unidec.training.precision import autocast_type, choose_device, restore_random_state
from unidec.training.sampler import steps_an_epoch
from unidec.training.stopping import ROUNDS

# an H100 took 85 s to compile and then 15 ms less a step (benchmarks/results/gpu.md)
COMPILED_STEPS = 10_000


@dataclass(frozen=True)
class TrainingData:
    """Input of a training: a data set, its token caches, and if needed the label graph, csr [L, L]:
    soft targets of label texts for `pool.gandalf`, relations between labels for `model.clf_graph`;
    and the teacher of section `teacher`.
    """

    dataset: XMCDataset
    query_tokens: TokenCache
    label_tokens: TokenCache
    label_graph: sp.csr_matrix | None = None
    teacher: TeacherVectors | WordTargets | None = None

    @property
    def tokens(self) -> dict[str, TokenCache]:
        """The token caches by source."""
        return {"queries": self.query_tokens, "labels": self.label_tokens}


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a training runs: its folder, the folder of the caches of frozen results, and its
    processes.
    """

    run_dir: Path
    cache_dir: Path
    ranks: Ranks


@dataclass(frozen=True, kw_only=True)
class Opened:
    """The parts of a training.

    Attributes:
        identity: of the run (`unidec.training.identity`).
        state: of the checkpoint from which it resumes; {} for a new run.
    """

    encoding: Encoding
    batches: Batches
    objective: Objective
    gradients: Gradients
    identity: dict[str, str]
    state: dict[str, Any]


def open_training(
    settings: TrainingSettings,
    data: TrainingData,
    place: Place,
    accept: Collection[str],
    start: Start | None,
) -> Opened:
    """Open a training; arguments and errors as of `Trainer`."""
    keep_freed_memory()
    ranks = place.ranks
    model = _new_model(settings, data, place)
    texts = TrainingTexts(data.tokens)
    pairs = changed_pairs(query_pairs(data.dataset), settings.pool, data.label_graph, settings.seed)
    if start is not None:  # changes weights on which the caches of frozen results depend
        take_model(model, start)
    else:
        start_bag(model, texts.parts(pairs.rows))
    add_adapters(model.encoder.transformer, settings.encoder.lora)
    encoding = _encoding(settings, model, texts, place)
    rows = rows_of(model, data.dataset, data.label_graph, encoding.outputs)
    steps = steps_an_epoch(settings.pool, len(pairs.rows))
    compile_if_worthwhile(settings, model, steps)
    optimisers = Optimisers(model, settings.optim, steps, seed=settings.seed)
    identity = run_identity(
        settings.everything,
        data.dataset,
        data.query_tokens,
        data.label_tokens,
        start=start.sha256 if start is not None else None,
        label_graph=data.label_graph,
    )
    checkpoint = _newest(model, place, identity, accept)
    state: dict[str, Any] = {}
    if checkpoint is not None:
        state = checkpoint.state
        _restore(checkpoint, model, optimisers, place.run_dir)
    else:
        _start_rows(settings, encoding, data, rows, start)
        if size := settings.model.labels_a_cluster:
            label_LD = encoding.vectors_of(texts.of_labels(np.arange(model.num_labels)))
            cluster_labels(model, label_LD, size, settings.seed, ranks)
    if ranks.is_first:
        _drop_later_lines(place.run_dir, state)
    methods, pairs = chosen_methods(
        settings,
        model,
        rows,
        pairs,
        encoding.autocast,
        tokens=data.tokens,
        teacher=data.teacher,
    )
    batches = Batches(
        settings,
        texts,
        pairs,
        methods,
        build=encoding.build,
        device=encoding.device,
        ranks=ranks,
        inverse_L=inverse_propensities(settings, data.dataset),
    )
    objective = Objective(
        settings.loss, model, methods, seed=settings.seed, ranks=ranks, autocast=encoding.autocast
    )
    return Opened(
        encoding=encoding,
        batches=batches,
        objective=objective,
        gradients=Gradients(model, optimisers, ranks, _parallel(model, batches, ranks)),
        identity=identity,
        state=state,
    )


def _new_model(settings: TrainingSettings, data: TrainingData, place: Place) -> UniDEC:
    if settings.run.deterministic:  # before the first product on a GPU
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    device = choose_device(settings.device)
    torch.manual_seed(settings.seed)
    num_labels = data.dataset.num_labels
    begin, end = place.ranks.part(num_labels)
    model = UniDEC.create(
        settings.encoder,
        settings.model,
        num_labels,
        resolve_encoder(settings.encoder.name),
        data.query_tokens.vocab_size,
        params=dict(settings.everything),
        placement=Placement(
            place=settings.run.table_place,
            folder=place.run_dir / "table" / f"rank-{place.ranks.rank}",
            first_row=begin,
            num_rows=end - begin,
            device=device,
        ),
        add=additions,
    ).to(device)
    encoder = model.encoder_settings
    for tokens, prompt in (
        (data.query_tokens, encoder.query_prompt),
        (data.label_tokens, encoder.label_prompt),
    ):
        if prompt != (made := tokens.meta.get("prompt", "")):
            raise ConfigError(
                "the texts were tokenised behind another prompt",
                where=tokens.path,
                got=made,
                expected=prompt,
                fix="unidec data tokens",
            )
    model.encoder.recompute = settings.run.recompute
    return model


def compile_if_worthwhile(settings: TrainingSettings, model: UniDEC, steps_per_epoch: int) -> None:
    """Compile the transformer as `run.compile` says; if it is "auto", code that fails to compile
    runs uncompiled.
    """
    chosen = settings.run.compile
    if chosen == "auto":
        is_long = settings.optim.epochs * steps_per_epoch >= COMPILED_STEPS
        if model.device.type != "cuda" or not is_long:
            return
        torch._dynamo.config.suppress_errors = True
    if chosen:
        model.encoder.compile_transformer()


def _encoding(
    settings: TrainingSettings, model: UniDEC, texts: TrainingTexts, place: Place
) -> Encoding:
    device = model.device
    ranks = place.ranks
    amp = autocast_type(settings.optim.precision, device)
    if not ranks.is_first:  # until the first rank has computed the caches
        ranks.barrier()
    build = cached_inputs(model.encoder, texts.tokens, place.cache_dir, device, amp)
    if ranks.is_first:
        ranks.barrier()
    return Encoding(model, texts.tokens, build, device, amp)


def _newest(
    model: UniDEC, place: Place, identity: dict[str, str], accept: Collection[str]
) -> Checkpoint | None:
    """The newest checkpoint of the run."""
    row_ranges = {}
    for name, table in model.tables().items():
        end = table.first_row + table.own_rows
        row_ranges[name] = (table.first_row, end)

    def check(state: dict[str, Any]) -> None:
        check_same(state["identity"], identity, accept, str(place.run_dir))

    checkpoint, rejected = load_checkpoint(place.run_dir, row_ranges, check)
    for reason in rejected if place.ranks.is_first else ():
        print(f"checkpoint skipped: {reason}")
    return checkpoint


def _restore(checkpoint: Checkpoint, model: UniDEC, optimisers: Optimisers, run_dir: Path) -> None:
    prefix = "model."
    dense = checkpoint.dense.items()
    weights = {key.removeprefix(prefix): value for key, value in dense if key.startswith(prefix)}
    rows = {name: part.tensors for name, part in checkpoint.rows.items()}
    try:
        model.load_dense_state(weights)
        optimisers.load_row_states(rows)
    except (KeyError, RuntimeError) as error:
        raise ArtifactError(
            "the checkpoint does not fit the model",
            where=run_dir,
            got=str(error),
            fix="delete it, or the run's folder to start over",
        ) from error
    optimisers.load_dense_state(checkpoint.dense)
    restore_random_state(checkpoint.dense, model.device)


def _start_rows(
    settings: TrainingSettings,
    encoding: Encoding,
    data: TrainingData,
    rows: Rows,
    start: Start | None,
) -> None:
    """Initialise the classifier's rows."""
    encode_labels = partial(encoding.outputs, "labels")
    if start is not None:
        uids = data.dataset.labels["uid"]
        take_rows(
            encoding.model,
            start,
            uids,
            encode_labels,
            keep=settings.keep,
            holds_text=rows.holds_text,
        )
    elif not rows.holds_text:  # otherwise the table starts at 0
        start_table(encoding.model, encode_labels)


def _parallel(model: UniDEC, batches: Batches, ranks: Ranks) -> torch.nn.Module | None:
    """With several ranks: the wrapped encoder if a transformer trains."""
    encoder = model.encoder
    if ranks.alone or encoder.transformer is None or encoder.takes_vectors:
        return None
    nothing = batches.texts.parts(batches.rows[:0])
    no_texts = batches.build(nothing)
    return ranks.data_parallel(encoder, no_texts)


def _drop_later_lines(run_dir: Path, state: dict[str, Any]) -> None:
    """Remove lines of the run's records that are written again after a resume from this state."""
    last_step = state.get("step", 0) - 1  # steps are numbered from 0
    _keep_lines(run_dir / "history.jsonl", "step", last_step)
    _keep_lines(run_dir / ROUNDS, "epoch", state.get("epoch", 0))


def _keep_lines(path: Path, key: str, last: int) -> None:
    """Keep the lines whose `key` is at most `last`."""
    if path.is_file():
        lines = read_json_lines(path)
        write_json_lines(path, [line for line in lines if line[key] <= last])
