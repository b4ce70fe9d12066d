"""The peers by name, what they are, and their options: imports nothing heavy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from unidec.problems import nearest

TRAIN_ON = ("train", "train+validation")


@dataclass(frozen=True)
class PeerInfo:
    """One system.

    Attributes:
        title: name in tables. about: what it does, in one line with its source.
        seeded: results depend on the seed; False: one run is enough.
        environment: name of the environment of its own that it needs ("" = ours).
        options: its options beside `train_on`, with defaults; None = as the recipes of the same comparison.
    """

    title: str
    about: str
    seeded: bool = False
    environment: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


_ST = {"epochs": None, "batch_size": None, "warmup": 0.1, "scale": 20.0}
PEERS: dict[str, PeerInfo] = {
    "knn": PeerInfo(
        "kNN",
        "TF-IDF: the nearest training queries vote for their labels with the square of their cosine",
        options={"neighbours": 100},
    ),
    "label-match": PeerInfo("label match", "TF-IDF: cosine of the query's and the label's text"),
    "mix": PeerInfo(
        "mix",
        "kNN votes + 0.5 x label match, each scaled to a row maximum of 1",
        options={"neighbours": 100, "match_weight": 0.5},
    ),
    "xr-linear": PeerInfo(
        "XR-Linear",
        "PECOS: linear models in a tree over the labels (PIFA beside label text), teacher-forced negatives "
        "(Yu et al. 2022)",
        seeded=True,
        environment="xr-linear",
        options={"beam": 50},
    ),
    "plt": PeerInfo(
        "PLT",
        "napkinXC: probabilistic label tree of logistic regressions over hierarchical k-means (Jasinska-Kobus et al. "
        "2020)",
        seeded=True,
        environment="plt",
        options={"cost": 10.0, "arity": 2, "max_leaves": 100, "trees": 1},
    ),
    "st-static": PeerInfo(
        "ST static, MNR",
        "sentence-transformers: bag of the same start token embeddings (StaticEmbedding), multiple-negatives ranking "
        "(Henderson et al. 2017)",
        seeded=True,
        options=_ST | {"learning_rate": 0.06},
    ),
    "st-transformer": PeerInfo(
        "ST transformer, cached MNR",
        "sentence-transformers: the same transformer, all layers fine-tuned, multiple-negatives ranking with "
        "cached gradients (Gao et al. 2021)",
        seeded=True,
        options=_ST | {"learning_rate": 5e-5, "chunk": 64},
    ),
}
NAMES = tuple(PEERS)


def info(name: str) -> PeerInfo:
    """What is known of a peer. Errors: KeyError."""
    return PEERS[name]


def check_options(name: str, options: Mapping[str, Any]) -> list[str]:
    """What is wrong with a peer's options, a sentence each; nothing when they are right."""
    known = {"train_on": TRAIN_ON[0], **PEERS[name].options}
    problems = []
    for key, value in options.items():
        if key not in known:
            near = nearest(key, list(known))
            hint = f" (did you mean {near}?)" if near else ""
            problems.append(f"{name} has no option {key}{hint}; it has {', '.join(known)}")
        elif key == "train_on":
            if value not in TRAIN_ON:
                problems.append(f"{key} is {value!r}; expected {' or '.join(TRAIN_ON)}")
        else:
            problems += _check_number(key, value, whole=known[key] is None or isinstance(known[key], int))
    return problems


def full_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with their defaults."""
    return {"train_on": TRAIN_ON[0], **PEERS[name].options, **options}


def _check_number(key: str, value: Any, whole: bool) -> list[str]:
    kinds = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value):
        return [f"{key} is {value!r}; expected a {'whole ' if whole else ''}number"]
    if value < 0 or (whole and value < 1):
        return [f"{key} is {value!r}; expected {'at least 1' if whole else 'at least 0'}"]
    return []
