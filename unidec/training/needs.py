"""What a step needs under its parameters: which labels the heads see, which texts are encoded, what is weighted."""

from __future__ import annotations

from typing import Literal

from unidec.config import Params

Labels = Literal["none", "pool", "all"]


def head_labels(params: Params) -> tuple[Labels, Labels]:
    """Labels in the dual encoder's loss, and in the classifier's; "none" for a head that the model does not have."""
    heads, pool = params.model.heads, params.pool
    return "none" if heads == "clf" else pool.de_labels, "none" if heads == "de" else pool.clf_labels


def draws_pools(params: Params) -> bool:
    """Whether a loss runs over a pool: hard negatives are mined for nothing else."""
    return "pool" in head_labels(params)


def encoded_labels(params: Params) -> Labels:
    """Labels whose texts a step encodes: the dual encoder's; without one those of a classifier whose rows hold their
    label's text."""
    de, clf = head_labels(params)
    return clf if de == "none" and params.model.clf_residual else de


def weighs_by_propensity(params: Params) -> bool:
    """Whether inverse propensities of labels weight losses or the draw of positives."""
    return params.loss.weights == "propensity" or params.pool.positives == "tail"
