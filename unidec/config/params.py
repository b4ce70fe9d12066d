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
from unidec.config.section import Conflict, Decides, Result, Section, Seed, packaged
from unidec.config.serving_sections import Drift, Gate, Index, Retrain, Serve, Tracking
from unidec.config.training_sections import (
    Encoder,
    Loss,
    Model,
    Pool,
    Teacher,
)


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
        yield from self._unmet()
        yield from self._widths()
        unused = {"de": "clf", "clf": "de", "both": ""}[self.model.heads]
        losses = {"de": self.loss.de, "clf": self.loss.clf} | {unused: ""}
        if "softtopk" in losses.values() and 0 < self.pool.size <= self.loss.topk:
            yield Conflict(
                "loss.topk pool.size",
                "the pool has at most k labels, so the soft top-k loss learns nothing",
                "loss.topk far below pool.size",
            )
        yield from self._source()

    def _unmet(self) -> Iterator[Conflict]:
        """Values that are not those that others require (requirements.yaml)."""
        values = dict(leaves(self))
        for rule in packaged("config/requirements.yaml"):
            given = rule["with"]
            if not all(_has(values[key], wanted) for key, wanted in given.items()):
                continue
            option = next(iter(given))
            off = f"{option}: {_in_words(_defaults()[option])}"
            for key, needed in rule["needs"].items():
                example = _in_words(needed)
                if isinstance(needed, dict):
                    example = needed["such as"]
                    needed = None
                if not _has(values[key], needed):
                    keys = " ".join(dict.fromkeys([key, *given]))
                    yield Conflict(keys, rule["because"], f"{key}: {example}, or {off}")

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

    def _source(self) -> Iterator[Conflict]:
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


def _has(value: Any, wanted: Any) -> bool:
    """Whether a value is as a rule says; None: anything but 0, false and nothing."""
    if wanted is None:
        return bool(value)
    return value in wanted if isinstance(wanted, list) else bool(value == wanted)


def _in_words(wanted: Any) -> str:
    """A value, or one of several, as params.yaml has it."""
    if isinstance(wanted, list) and wanted:
        return " or ".join(map(_in_words, wanted))
    return wanted if wanted and isinstance(wanted, str) else json.dumps(wanted)


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
    return [
        path
        for path, decided in what_decides().items()
        if not set(decided).isdisjoint(results) and (warm or not path.startswith("warm."))
    ]


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
