"""Conflicts: parameters that are right one by one and wrong together."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from unidec.sections import Params


class Conflict(NamedTuple):
    """Values that are right one by one and wrong together."""

    keys: tuple[str, ...]  # the first is the one to blame
    holds: Callable[[Params], bool]
    what: str
    fix: str


def _untrained_head(p: Params) -> bool:
    """Both heads, all of the loss on one of them, and a search that needs the other."""
    idle = {0.0: "de", 1.0: "clf"}.get(p.loss.balance)
    return p.model.heads == "both" and idle is not None and p.index.space in ("both", idle)


def _uses(p: Params, loss: str) -> bool:
    """Whether a head that is trained has this loss."""
    return (p.model.heads != "clf" and p.loss.de == loss) or (p.model.heads != "de" and p.loss.clf == loss)


def _within_each_other(first: str, second: str) -> bool:
    """Whether two paths are one, or one lies inside the other."""
    one, other = Path(os.path.abspath(first)), Path(os.path.abspath(second))
    return one == other or one in other.parents or other in one.parents


def _copied(p: Params) -> list[str]:
    """What a fetch copies from."""
    source = p.source
    paths = {"folder": [source.path], "files": [source.queries, source.labels, source.pairs]}.get(source.kind, [])
    return [path for path in paths if path]


CONFLICTS = (
    Conflict(
        ("index.space", "model.heads"),
        lambda p: p.model.heads != "both" and p.index.space != p.model.heads,
        "the index searches a head that the model does not have",
        "set index.space to the same value as model.heads",
    ),
    Conflict(
        ("index.ivf_probes", "index.ivf_lists"),
        lambda p: 0 < p.index.ivf_lists < p.index.ivf_probes,
        "a search cannot look into more lists than there are",
        "set index.ivf_probes to at most index.ivf_lists",
    ),
    Conflict(
        ("encoder.trainable_layers", "encoder.kind"),
        lambda p: p.encoder.kind == "bag" and p.encoder.trainable_layers != 0,
        "a bag of tokens has no transformer layers to train",
        "encoder.trainable_layers: 0, or encoder.kind: transformer or both",
    ),
    Conflict(
        ("encoder.pooling", "encoder.kind"),
        lambda p: p.encoder.kind == "bag" and p.encoder.pooling == "cls",
        "a bag of tokens is always a mean",
        "encoder.pooling: mean, or encoder.kind: transformer or both",
    ),
    Conflict(
        ("encoder.bag_dropout", "encoder.kind"),
        lambda p: p.encoder.kind == "transformer" and p.encoder.bag_dropout > 0,
        "there is no bag of tokens to drop tokens from",
        "encoder.bag_dropout: 0, or encoder.kind: bag or both",
    ),
    Conflict(
        ("encoder.bag_words", "encoder.kind"),
        lambda p: p.encoder.kind == "transformer" and p.encoder.bag_words > 0,
        "there is no bag of tokens to add words to",
        "encoder.bag_words: 0, or encoder.kind: bag or both",
    ),
    Conflict(
        ("encoder.bag_head", "encoder.kind"),
        lambda p: p.encoder.kind == "transformer" and p.encoder.bag_head > 0,
        "there is no bag of tokens whose start could have one of its own",
        "encoder.bag_head: 0, or encoder.kind: bag or both",
    ),
    Conflict(
        ("encoder.bag_head", "tokens.max_length"),
        lambda p: p.encoder.bag_head >= p.tokens.max_length,
        "no text is longer than its start: both bags would hold the same",
        "encoder.bag_head well below tokens.max_length, or 0",
    ),
    Conflict(
        ("pool.size", "pool.batch_size"),
        lambda p: 0 < p.pool.size < p.pool.batch_size,
        "the pool is smaller than the batch: queries would be left without a positive and drop out of the loss",
        "pool.size at least pool.batch_size (the papers: 2 to 5 times), or 0 for no limit",
    ),
    Conflict(
        ("loss.reduction", "loss.de", "loss.clf", "model.heads"),
        lambda p: _uses(p, "infonce") and p.loss.reduction != "pol",
        "InfoNCE is defined for one positive a query",
        "loss.reduction: pol, or supcon as the loss",
    ),
    Conflict(
        ("loss.clf_bce", "loss.clf", "model.heads"),
        lambda p: p.model.heads != "de" and p.loss.clf == "bce" and p.loss.clf_bce > 0,
        "the classifier's loss is BCE already: the auxiliary BCE would count it twice",
        "loss.clf_bce: 0",
    ),
    Conflict(
        ("run.table_place", "pool.clf_labels", "model.heads"),
        lambda p: p.model.heads != "de" and p.pool.clf_labels == "all" and p.run.table_place != "device",
        "a classifier that sees all labels uses all rows in each step: they cannot be fetched for a step",
        "run.table_place: device, or pool.clf_labels: pool",
    ),
    Conflict(
        ("loss.balance", "model.heads", "index.space"),
        _untrained_head,
        "one head gets no loss but is searched",
        "loss.balance strictly between 0 and 1, or model.heads and index.space: de (for 1) or clf (for 0)",
    ),
    Conflict(
        ("optim.warmup_epochs", "optim.epochs"),
        lambda p: p.optim.warmup_epochs > p.optim.epochs,
        "the warm-up is longer than the training",
        "optim.warmup_epochs well below optim.epochs",
    ),
    Conflict(
        ("index.clf_weight", "index.space"),
        lambda p: p.index.space != "both" and p.index.clf_weight != 1.0,
        "the classifier's weight counts only where both heads are searched",
        "index.space: both, or index.clf_weight: 1",
    ),
    Conflict(
        ("index.clf_weight", "data.validation_share"),
        lambda p: p.index.clf_weight == "auto" and p.data.validation_share == 0,
        "there is no validation split to tune the classifier's weight on",
        "data.validation_share above 0, or a number as index.clf_weight",
    ),
    Conflict(
        ("index.knn_weight", "data.validation_share"),
        lambda p: p.index.knn_weight == "auto" and p.data.validation_share == 0,
        "there is no validation split to tune the weight of the votes on",
        "data.validation_share above 0, or a number as index.knn_weight",
    ),
    Conflict(
        ("pool.cluster_start", "pool.batches"),
        lambda p: p.pool.cluster_start > 0 and p.pool.batches == "random",
        "random batches have no clusters that could grow",
        "pool.batches: clustered, or pool.cluster_start: 0",
    ),
    Conflict(
        ("pool.cluster_start", "pool.batch_size"),
        lambda p: p.pool.cluster_start > p.pool.batch_size,
        "the first clusters are larger than a batch",
        "pool.cluster_start well below pool.batch_size (1: random at first), or 0 for clusters of a batch's size",
    ),
    Conflict(
        ("label_graph.tail_first", "label_graph.share"),
        lambda p: p.label_graph.tail_first and p.label_graph.share == 1,
        "all labels take part: there is none to come first",
        "label_graph.share below 1, or label_graph.tail_first: false",
    ),
    Conflict(
        ("encoder.frozen", "encoder.trainable_layers"),
        lambda p: p.encoder.frozen and p.encoder.trainable_layers != 0,
        "a frozen encoder has no layers that train",
        "encoder.trainable_layers: 0, or encoder.frozen: false",
    ),
    Conflict(
        ("encoder.frozen", "encoder.bag_dropout"),
        lambda p: p.encoder.frozen and p.encoder.bag_dropout > 0,
        "a frozen encoder's vectors are computed once: no tokens can be dropped from them",
        "encoder.bag_dropout: 0 (encoder.dropout works), or encoder.frozen: false",
    ),
    Conflict(
        ("encoder.residual", "encoder.frozen", "encoder.start"),
        lambda p: p.encoder.residual and p.encoder.frozen and not p.encoder.start,
        "a frozen residual network without a start does nothing",
        "encoder.residual: false, or encoder.start: a model that has trained one",
    ),
    Conflict(
        ("model.clf_residual", "model.clf_init", "model.heads"),
        lambda p: p.model.heads != "de" and p.model.clf_residual and p.model.clf_init != "label_embedding",
        "a residual classifier starts from its labels' embeddings",
        "model.clf_init: label_embedding, or model.clf_residual: false",
    ),
    Conflict(
        ("model.clf_residual", "pool.clf_labels", "model.heads"),
        lambda p: p.model.heads != "de" and p.model.clf_residual and p.pool.clf_labels == "all",
        "a residual classifier over all labels would encode every label's text in each step",
        "pool.clf_labels: pool, or model.clf_residual: false",
    ),
    Conflict(
        ("optim.encode_chunk", "run.devices"),
        lambda p: p.optim.encode_chunk > 0 and p.run.devices > 1,
        "gradients are cached on one device: with several each encodes its part of a step's texts at once",
        "optim.encode_chunk: 0 (run.recompute saves memory too), or run.devices: 1",
    ),
    Conflict(
        ("model.clf_residual", "run.devices", "model.heads"),
        lambda p: p.model.heads != "de" and p.model.clf_residual and p.run.devices > 1,
        "a residual classifier trains on one device: texts and rows of a label are held by different ones otherwise",
        "run.devices: 1, or model.clf_residual: false",
    ),
    Conflict(
        ("loss.de_forward", "loss.de", "model.heads"),
        lambda p: p.model.heads != "clf" and p.loss.de == "softtopk" and p.loss.de_forward < 1,
        "soft top-k counts the labels of a query: there is no label to query",
        "loss.de_forward: 1, or another loss.de",
    ),
    Conflict(
        ("loss.clf_forward", "loss.clf", "model.heads"),
        lambda p: p.model.heads != "de" and p.loss.clf == "softtopk" and p.loss.clf_forward < 1,
        "soft top-k counts the labels of a query: there is no label to query",
        "loss.clf_forward: 1, or another loss.clf",
    ),
    Conflict(
        ("loss.topk", "pool.size"),
        lambda p: _uses(p, "softtopk") and 0 < p.pool.size <= p.loss.topk,
        "all labels of a pool are among the first k: nothing is learnt",
        "loss.topk far below pool.size",
    ),
    Conflict(
        ("loss.margin", "loss.de", "loss.clf", "model.heads"),
        lambda p: _uses(p, "hinge") and p.loss.margin == 0,
        "a squared hinge without a margin is 0 where all scores are",
        "loss.margin: 1 for the classifier's scores, below 1 for cosines",
    ),
    Conflict(
        ("gate.confidence", "gate.metric"),
        lambda p: p.gate.confidence > 0 and "coverage@" in p.gate.metric,
        "coverage belongs to all queries together: there is no bootstrap over them",
        "gate.confidence: 0, or another gate.metric with coverage among gate.guarded",
    ),
    Conflict(
        ("source.path", "source.kind"),
        lambda p: p.source.kind in ("folder", "dvc") and not p.source.path,
        "there is nowhere to fetch from",
        "source.path: the folder, or DVC's target; or source.kind: none",
    ),
    Conflict(
        ("source.kind", "source.path", "data.path"),
        lambda p: any(_within_each_other(path, p.data.path) for path in _copied(p)),
        "what is fetched would replace its own source",
        "data.path: a folder of its own, such as data/incoming",
    ),
    Conflict(
        ("source.queries", "source.labels", "source.pairs", "source.kind"),
        lambda p: p.source.kind == "files" and not (p.source.queries and p.source.labels and p.source.pairs),
        "three tables make a data set",
        "source.queries, source.labels and source.pairs, or source.kind: none",
    ),
    Conflict(
        ("source.secrets", "source.kind"),
        lambda p: bool(p.source.secrets) and p.source.kind != "dvc" and not p.retrain.push,
        "nothing that runs needs secrets: they are given to DVC's commands alone",
        "source.kind: dvc, or retrain.push: true, or no source.secrets",
    ),
    Conflict(
        ("warm.warmup_epochs", "warm.epochs"),
        lambda p: p.warm.warmup_epochs > p.warm.epochs,
        "the warm-up is longer than the training",
        "warm.warmup_epochs well below warm.epochs",
    ),
    Conflict(
        ("retrain.start", "encoder.start"),
        lambda p: p.retrain.start == "warm" and bool(p.encoder.start),
        "two models to start from: the champion and that of encoder.start",
        'retrain.start: auto or cold, or encoder.start: ""',
    ),
    Conflict(
        ("drift.stop_change", "drift.warn_change"),
        lambda p: p.drift.stop_change < p.drift.warn_change,
        "what stops a retraining would never have warned",
        "drift.warn_change at most drift.stop_change",
    ),
    Conflict(
        ("drift.stop_distance", "drift.warn_distance"),
        lambda p: p.drift.stop_distance < p.drift.warn_distance,
        "what stops a retraining would never have warned",
        "drift.warn_distance at most drift.stop_distance",
    ),
)


def find_conflicts(params: Params) -> list[Conflict]:
    """Every conflict between values that are valid one by one."""
    return [conflict for conflict in CONFLICTS if conflict.holds(params)]
