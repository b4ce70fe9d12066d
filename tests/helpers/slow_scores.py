"""Scores of one query and one label by a bundle's two heads, product by product in float64."""

from __future__ import annotations

from typing import Any

import numpy as np


def head_scores(
    parts: dict[str, Any],
    de_D: np.ndarray | None,
    clf_D: np.ndarray | None,
    label: int,
    normalize: bool,
) -> tuple[float, float]:
    """Of the dual encoder and of the classifier; 0.0 of a head that is not there.

    Args:
        parts: what `write_tiny_bundle` returned. label: its row.
    """
    of_encoder = 0.0
    if de_D is not None:
        of_encoder = float(de_D.astype(float) @ parts["de_LD"][label].astype(float))
    of_classifier = 0.0
    if clf_D is not None:
        query = clf_D.astype(float)
        row = parts["clf_LD"][label].astype(float)
        of_classifier = float(query @ row)
        if normalize:
            lengths = float(np.linalg.norm(query) * np.linalg.norm(row))
            of_classifier /= max(lengths, 1e-30)
        elif parts["bias_L"] is not None:
            of_classifier += float(parts["bias_L"][label])
    return of_encoder, of_classifier
