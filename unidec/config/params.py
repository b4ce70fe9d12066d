"""`Params`, all parameters of params.yaml: conflicts between its sections, and which key decides
which result.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from unidec.config.data_sections import Data, LabelGraph, RawBounds, Source, Tokens, Validation
from unidec.config.optim_sections import Optim, Run, Warm
from unidec.config.section import Conflict, Decides, Result, Section, Seed
from unidec.config.serving_sections import Drift, Gate, Index, Retrain, Serve, Tracking
from unidec.config.training_sections import (
    Encoder,
    Loss,
    Model,
    Pool,
    Teacher,
)

# no hard negatives, no propensities
_NO_DRAWS = {"pool.eta": 0, "pool.positives": "uniform", "loss.weights": "none"}


@dataclass(frozen=True)
class TrainingSettings:
    """The parameters that training reads.

    Attributes:
        propensity: constants A and B of the inverse propensities.
        keep: `warm.keep`.
        everything: all parameters that decide a result, as `recorded` for the model's file and the
        run's identity.
    """

    seed: int
    device: str
    encoder: Encoder
    model: Model
    pool: Pool
    loss: Loss
    teacher: Teacher
    optim: Optim
    run: Run
    propensity: tuple[float, float]
    keep: float
    everything: Mapping[str, Any]


class Params(Section):
    """All of params.yaml."""

    recipe: str | None = None
    """name of a shipped recipe (unidec/recipes); keys set here override it"""
    seed: Annotated[Seed, Decides("training", "index")] = 0
    """random seed of training"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where to train; auto: a GPU if there is one"""
    data: Data = Data()
    raw: RawBounds = RawBounds()
    validation: Validation = Validation()
    tokens: Tokens = Tokens()
    label_graph: LabelGraph = LabelGraph()
    encoder: Encoder = Encoder()
    model: Model = Model()
    pool: Pool = Pool()
    loss: Loss = Loss()
    teacher: Teacher = Teacher()
    optim: Optim = Optim()
    index: Index = Index()
    run: Run = Run()
    source: Source = Source()
    warm: Warm = Warm()
    retrain: Retrain = Retrain()
    gate: Gate = Gate()
    drift: Drift = Drift()
    serve: Serve = Serve()
    tracking: Tracking = Tracking()

    @property
    def training(self) -> TrainingSettings:
        """The parameters that training reads."""
        names = ("seed", "device", "encoder", "model", "pool", "loss", "teacher", "optim", "run")
        return TrainingSettings(
            **{name: getattr(self, name) for name in names},
            propensity=(self.data.propensity_a, self.data.propensity_b),
            keep=self.warm.keep,
            everything=recorded(self.model_dump()),
        )

    @property
    def reads_label_graph(self) -> bool:
        """Whether training reads the label graph: as targets of label texts, or for the texts of
        related labels.
        """
        return self.pool.gandalf or (self.model.clf_graph and self.model.heads != "de")

    def conflicts(self) -> Iterator[Conflict]:
        """Every conflict within a section and between sections."""
        for _, section in self:
            if isinstance(section, Section):
                yield from section.conflicts()
        yield from self._heads()
        yield from self._widths()
        if self.model.heads != "de":
            yield from self._classifier()
        yield from self._losses()
        if self.pool.simcse:
            what = (
                "SimCSE ignores relevance: it trains a dual encoder alone, against the batch's "
                "other texts"
            )
            needed = {
                "model.heads": "de",
                "pool.de_labels": "pool",
                "pool.gandalf": False,
                "loss.mixup": "none",
            }
            yield from self._needed("pool.simcse: false", what, needed | _NO_DRAWS)
        if self.model.surrogate:
            what = "surrogate clusters require a classifier without a dual encoder, on one device"
            needed = {"model.heads": "clf", "model.clf_init": "xavier", "run.devices": 1}
            yield from self._needed("model.surrogate: 0", what, needed | _NO_DRAWS)
        if self.model.levels:
            what = "a label tree requires a classifier without a dual encoder, on one device"
            needed = {
                "model.heads": "clf",
                "model.surrogate": 0,
                "run.devices": 1,
                "loss.mixup": "none",
            }
            yield from self._needed("model.levels: []", what, needed)
        elif self.pool.shortlist:
            yield Conflict(
                "pool.shortlist model.levels",
                "a shortlist requires a label tree",
                "model.levels: [32, 4], or pool.shortlist: 0",
            )
        if self.teacher.bundle or self.teacher.words:
            yield from self._teacher()
        if self.optim.patience and not (self.data.validation_share or self.data.validation_sample):
            yield Conflict(
                "optim.patience data.validation_share data.validation_sample",
                "patience requires queries to validate on",
                "data.validation_share or data.validation_sample above 0, or optim.patience: 0",
            )
        yield from self._operations()

    def _heads(self) -> Iterator[Conflict]:
        heads = self.model.heads
        space = self.index.space
        if heads == "clf" and self.model.auxiliary:
            yield Conflict(
                "model.auxiliary model.heads",
                "auxiliary vectors require a dual encoder",
                "model.auxiliary: 0, or model.heads: de",
            )
        if heads not in ("both", space):
            yield Conflict(
                "index.space model.heads",
                "the index searches a head that the model does not have",
                "set index.space to the same value as model.heads",
            )
        idle = {0.0: "de", 1.0: "clf"}.get(self.loss.balance)
        if idle == "de" and not self.model.projection:
            idle = None  # this head is the encoder itself, loaded from `encoder.start`
        if heads == "both" and idle is not None and space in ("both", idle):
            yield Conflict(
                "loss.balance model.heads index.space",
                "one head gets no loss but is searched",
                "loss.balance strictly between 0 and 1, or model.heads and index.space: de (for "
                "1) or clf (for 0)",
            )
        if (
            "auto" in (self.index.clf_weight, self.index.knn_weight)
            and self.data.validation_share == 0
        ):
            yield Conflict(
                "data.validation_share index.clf_weight index.knn_weight",
                "there is no validation split to tune a weight on",
                "data.validation_share above 0, or a number as the weight",
            )

    def _widths(self) -> Iterator[Conflict]:
        """Conflicts of the widths at which the heads train, and of the one that is served."""
        widths = [*self.loss.widths, self.model.dim]
        served = self.index.width
        if sorted(set(widths)) != widths:
            yield Conflict(
                "loss.widths model.dim",
                "widths of the heads must ascend; the last one, all dimensions, is not listed",
                f"ascending widths below model.dim, which is {self.model.dim}",
            )
        if served not in (0, *widths[0 if self.model.projection else -1 :]):
            yield Conflict(
                "index.width loss.widths model.dim model.projection",
                "the heads do not train at the width that is served, or are the encoder's vector "
                "itself, which encoder.width cuts",
                f"index.width: 0 (all); or, with model.projection: true, one of {widths}, or add "
                "it to loss.widths",
            )

    def _classifier(self) -> Iterator[Conflict]:
        if self.loss.clf == "bce":
            what = "the classifier's loss is already BCE: the auxiliary BCE would count it twice"
            yield from self._needed("loss.clf: ds", what, {"loss.clf_bce": 0})
        on_device = {"run.table_place": "device"}
        if self.pool.clf_labels == "all":
            what = "a classifier over all labels requires all rows on the device in each step"
            yield from self._needed("pool.clf_labels: pool", what, on_device)
        if self.optim.clf_state == "adamw":
            off = "optim.clf_state: adam, which updates the rows of a step only"
            yield from self._needed(off, "AdamW updates all rows in each step", on_device)
        if not self.model.clf_residual:
            for name in ("clf_gates", "clf_graph", "clf_queries"):
                if getattr(self.model, name):
                    off = "0" if name == "clf_queries" else "false"
                    fix = f"or model.{name}: {off}"
                    yield Conflict(
                        f"model.{name} model.clf_residual model.heads",
                        "requires residual classifier rows",
                        f"model.clf_residual: true, {fix}",
                    )
            return
        or_none = "or model.clf_residual: false"
        if self.model.clf_queries and (self.model.clf_graph or self.model.heads == "both"):
            yield Conflict(
                "model.clf_queries model.clf_graph model.heads",
                "queries in classifier rows require a classifier without a dual encoder and "
                "without a label graph",
                "model.heads: clf, or model.clf_queries: 0",
            )
        if self.model.clf_init != "label_embedding":
            yield Conflict(
                "model.clf_residual model.clf_init model.heads",
                "a residual classifier starts from its labels' embeddings",
                f"model.clf_init: label_embedding, {or_none}",
            )
        if self.pool.clf_labels != "pool" or self.pool.clf_beta:
            yield Conflict(
                "model.clf_residual pool.clf_labels pool.clf_beta model.heads",
                "a residual classifier would encode the texts of all labels outside the pool in "
                "each step",
                f"pool.clf_labels: pool and pool.clf_beta: 0, {or_none}",
            )
        if self.run.devices > 1:
            yield Conflict(
                "model.clf_residual run.devices model.heads",
                "a residual classifier trains on one device",
                f"run.devices: 1, {or_none}",
            )

    def _losses(self) -> Iterator[Conflict]:
        loss = self.loss
        used = {
            head: getattr(loss, head)
            for head in ("de", "clf")
            if self.model.heads in ("both", head)
        }
        keys = "loss.de loss.clf model.heads"
        if "infonce" in used.values() and loss.reduction != "pol":
            yield Conflict(
                f"loss.reduction {keys}",
                "InfoNCE is defined for one positive per query",
                "loss.reduction: pol, or supcon as the loss",
            )
        if "hinge" in used.values() and loss.margin == 0:
            yield Conflict(
                f"loss.margin {keys}",
                "the squared hinge without a margin is 0 if all scores are 0",
                "loss.margin: 1 for the classifier's scores, below 1 for cosines",
            )
        for head, name in used.items():
            if name == "softtopk":
                what = "soft top-k ranks the labels of a query: it has no label-to-query loss"
                needed = {f"loss.{head}_forward": 1}
                yield from self._needed(f"loss.{head}: ds", what, needed)
        if loss.mixup != "none":
            yield from self._mixup()
        if "softtopk" in used.values() and 0 < self.pool.size <= loss.topk:
            yield Conflict(
                "loss.topk pool.size",
                "the pool has at most k labels, so the soft top-k loss learns nothing",
                "loss.topk far below pool.size",
            )

    def _needed(self, off: str, what: str, needed: dict[str, Any]) -> Iterator[Conflict]:
        """Conflicts of an option with the values that it requires of other keys."""
        for path, value in needed.items():
            section, name = path.split(".")
            if getattr(getattr(self, section), name) != value:
                yield Conflict(
                    f"{path} {off.partition(':')[0]}",
                    what,
                    f"{path}: {json.dumps(value)}, or {off}",
                )

    def _teacher(self) -> Iterator[Conflict]:
        off = 'teacher.bundle: ""' if self.teacher.bundle else "teacher.words: false"
        what = "a teacher requires one device and a loss on unmixed queries and the pool's labels"
        needed: dict[str, Any] = {
            "pool.simcse": False,
            "model.surrogate": 0,
            "loss.mixup": "none",
            "run.devices": 1,
        }
        if self.loss.clf == "bce" and self.model.heads != "de":
            needed["pool.clf_labels"] = "pool"
        yield from self._needed(off, what, needed)
        if self.teacher.words:
            what = "words as teacher exclude a second teacher and label texts as queries"
            yield from self._needed(off, what, {"teacher.bundle": "", "pool.gandalf": False})

    def _mixup(self) -> Iterator[Conflict]:
        off = 'loss.mixup: "none"'
        if self.run.devices > 1:
            yield Conflict(
                "loss.mixup run.devices",
                "MixUp requires a single device",
                f"run.devices: 1, or {off}",
            )
        if self.loss.mixup == "labels" and self.model.heads == "clf":
            yield Conflict(
                "loss.mixup model.heads",
                "a classifier alone encodes no label texts to mix with",
                f"model.heads: both, or {off}",
            )
        if self.model.heads != "de" and self.loss.clf == "bce" and self.pool.clf_labels != "pool":
            yield Conflict(
                "loss.mixup loss.clf pool.clf_labels",
                "the chunked loss over all labels does not support MixUp",
                f"pool.clf_labels: pool, or {off}",
            )

    def _operations(self) -> Iterator[Conflict]:
        source = self.source
        copied = {
            "folder": [source.path],
            "files": [source.queries, source.labels, source.pairs],
        }.get(source.kind, [])
        places = [Path(os.path.abspath(path)) for path in copied if path]
        own = Path(os.path.abspath(self.data.path))
        if any(place.is_relative_to(own) or own.is_relative_to(place) for place in places):
            yield Conflict(
                "source.kind source.path data.path",
                "the fetched data would overwrite its own source",
                "data.path: a different folder",
            )
        if self.retrain.start == "warm" and self.encoder.start:
            yield Conflict(
                "retrain.start encoder.start",
                "training cannot start from two models, the champion and encoder.start",
                'retrain.start: auto or cold, or encoder.start: ""',
            )


RESULTS: tuple[Result, ...] = (
    "data",
    "tokens",
    "propensity",
    "label_graph",
    "training",
    "index",
    "evaluation",
)
"""Results that a model and its figures consist of; their parameters are stored with them."""


@functools.cache
def what_decides() -> dict[str, tuple[Result, ...]]:
    """The results that each parameter decides, by key path in the order of `Params`."""
    return Params.decided()


def keys_deciding(*results: Result, warm: bool = False) -> list[str]:
    """Key paths of the parameters that decide at least one of these results.

    Args:
        warm: include those of section `warm`, which apply only if training starts from an earlier
        model.
    """
    found = []
    for path, decided in what_decides().items():
        if not set(decided).isdisjoint(results) and (warm or not path.startswith("warm.")):
            found.append(path)
    return found


def leaves(params: Section) -> Iterator[tuple[str, Any]]:
    """All parameters as (`section.key`, value), in the order of `Params`."""
    for name, value in params:
        if isinstance(value, Section):
            yield from ((f"{name}.{inner}", leaf) for inner, leaf in value)
        else:
            yield name, value


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """`{"pool.beta": 2, "seed": 0}` -> `{"pool": {"beta": 2}, "seed": 0}`."""
    nested_values: dict[str, Any] = {}
    for path, value in values.items():
        section, _, name = path.rpartition(".")
        (nested_values.setdefault(section, {}) if section else nested_values)[name] = value
    return nested_values


@functools.cache
def _defaults() -> dict[str, Any]:
    return dict(leaves(Params()))


def value_at(values: Mapping[str, Any], path: str) -> Any:
    """The value at a key path in plain values by section; its default if an older version wrote no
    such key.
    """
    section, _, name = path.rpartition(".")
    place = values.get(section, {}) if section else values
    return place.get(name, _defaults()[path])


def recorded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Of all parameters, as plain values by section, the recipe's name and those that decide a
    result.
    """
    keys = ["recipe", *keys_deciding(*RESULTS, warm=True)]
    return nested({key: value_at(values, key) for key in keys})
