"""A bundle as an MLflow model, from code: MLflow copies and runs this file; nothing is pickled.

Input: a table with a text column `query`. Parameter `k`: labels a query. Output: rows query, rank (from 1), label,
title, score. Nothing else in the library imports this module.
"""

from __future__ import annotations

from typing import Any

from mlflow.models import set_model
from mlflow.pyfunc import PythonModel

MAX_K = 100


class _Calls:
    """MLflow's calls, passed on to `unidec.retrieval.bundle.Bundle`."""

    def load_context(self, context: Any) -> None:
        """Opens the bundle; its hashes are checked before anything in it is parsed."""
        from unidec.retrieval.bundle import Bundle

        self._bundle = Bundle.load(context.artifacts["bundle"])

    # without type hints, and inherited below: MLflow would make a schema of them, beside the signature it is given
    def predict(self, context, model_input, params=None):
        """The `k` best labels of each query, best first.

        Raises:
            ConfigError: `k` is out of range.
        """
        from unidec.errors import ConfigError

        k = int((params or {}).get("k", 5))
        if not 1 <= k <= MAX_K:
            raise ConfigError("k is out of range", where="params.k", got=k, expected=f"1 to {MAX_K}")
        return self._bundle.predict_frame(model_input, k=k)


class BundleModel(_Calls, PythonModel):
    """What MLflow loads and asks."""


set_model(BundleModel())
