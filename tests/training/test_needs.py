"""What a step needs, for every choice of labels."""

import itertools

import pytest

from unidec.training.needs import draws_pools, encoded_labels, head_labels, weighs_by_propensity

HEADS, LABELS = ("both", "de", "clf"), ("pool", "all")


@pytest.mark.parametrize(("heads", "de", "clf"), [*itertools.product(HEADS, LABELS, LABELS)])
def test_labels_of_the_heads(tiny_params, heads, de, clf):
    params = tiny_params(**{"model.heads": heads, "pool.de_labels": de, "pool.clf_labels": clf})
    seen = head_labels(params.model, params.pool)
    assert seen == (de if heads != "clf" else "none", clf if heads != "de" else "none")
    assert draws_pools(params.model, params.pool) == any(labels == "pool" for labels in seen)
    assert encoded_labels(params.model, params.pool) == seen[0]
    if clf == "pool":
        params = tiny_params(**{"model.heads": heads, "pool.de_labels": de, "model.clf_residual": True})
        assert encoded_labels(params.model, params.pool) == ("pool" if heads == "clf" else de)


def test_what_is_weighted(tiny_params):
    for overrides, weighted in (
        ({}, False),
        ({"loss.weights": "propensity"}, True),
        ({"pool.positives": "tail"}, True),
    ):
        params = tiny_params(**overrides)
        assert weighs_by_propensity(params.loss, params.pool) == weighted
