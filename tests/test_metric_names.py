"""Names that parameters may ask for are those of the figures that there are."""

from __future__ import annotations

import numpy as np
from scipy.sparse import csr_matrix

from unidec.evaluation.metrics import evaluate
from unidec.metric_names import metric_names, parse


def test_they_are_the_figures_of_the_evaluator() -> None:
    figures = evaluate(
        np.zeros((1, 1), dtype=int), csr_matrix(np.ones((1, 1))), np.ones(1), np.zeros(1, dtype=int)
    )
    assert sorted(metric_names()) == sorted(
        name for name in figures if not name.endswith("num_queries")
    )
    assert len(set(metric_names())) == len(metric_names())


def test_a_name_has_parts() -> None:
    assert parse("nDCG@5") == ("", "nDCG", 5)
    assert parse("tail/R@100") == ("tail", "R", 100)
    assert parse("head/MRR") == ("head", "MRR", 0)
