"""What a step needs under its parameters: which labels the heads see, which texts are encoded, what is weighted."""

from __future__ import annotations

from typing import Literal

from unidec.sections import Loss, Model, Pool

Labels = Literal["none", "pool", "all"]


def head_labels(model: Model, pool: Pool) -> tuple[Labels, Labels]:
    """Labels in the dual encoder's loss, and in the classifier's; "none" for a head that the model does not have."""
    return "none" if model.heads == "clf" else pool.de_labels, "none" if model.heads == "de" else pool.clf_labels


def draws_pools(model: Model, pool: Pool) -> bool:
    """Whether a loss runs over a pool: hard negatives are mined for nothing else."""
    return "pool" in head_labels(model, pool)


def encoded_labels(model: Model, pool: Pool) -> Labels:
    """Labels whose texts a step encodes: the dual encoder's; else those whose classifier rows hold their text."""
    de, clf = head_labels(model, pool)
    return clf if de == "none" and model.clf_residual else de


def weighs_by_propensity(loss: Loss, pool: Pool) -> bool:
    """Whether inverse propensities of labels weight losses or the draw of positives."""
    return loss.weights == "propensity" or pool.positives == "tail"
