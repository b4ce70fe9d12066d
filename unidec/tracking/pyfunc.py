"""A bundle as an MLflow model, from code: MLflow copies and runs this file; nothing is pickled.

Input: a table with a text column `query`. Parameters: `registry.signature`. Output: rows query,
rank (from 1), label, title, score. Nothing else in the library imports this module.
"""

from __future__ import annotations

from typing import Any

from mlflow.exceptions import MlflowException
from mlflow.models import set_model
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE
from mlflow.pyfunc import PythonModel


class _Calls:
    """MLflow's calls, passed on to `unidec.bundle.answer.Answerer`."""

    def load_context(self, context: Any) -> None:
        """Opens the bundle; its hashes are checked before anything in it is parsed.

        `load_model(..., model_config={"runtime": "torch", "threads": 2})` chooses the runtime of
        the query encoder; default: the fastest that keeps quality."""
        from unidec.bundle.answer import Answerer

        options = context.model_config or {}
        runtime = options.get("runtime", "auto")
        threads = int(options.get("threads", 0))
        self._answerer = Answerer.open(context.artifacts["bundle"], runtime, threads)

    # without type hints, and inherited below: MLflow would derive a schema from them, besides the
    # given signature
    def predict(self, context, model_input, params=None):
        """The `k` best labels of each query, best first.

        Args:
            model_input: DataFrame with a column `query`; MLflow converts dicts and lists to one.

        Raises:
            MlflowException: a parameter is out of range, or a query is not a string; a server
            answers 400.
        """
        from unidec.errors import ConfigError, DataError

        options = {name: value for name, value in (params or {}).items() if value is not None}
        for name in options.keys() & {"allow", "deny"}:
            options[name] = [str(uid) for uid in options[name]]
        try:
            # MLflow turns {"query": ["a", "b"]} into one row that holds the list
            return self._answerer.table(model_input.explode("query", ignore_index=True), **options)
        except (ConfigError, DataError) as error:
            raise MlflowException(str(error), error_code=INVALID_PARAMETER_VALUE) from error


class BundleModel(_Calls, PythonModel):
    """The model that MLflow loads and calls."""


set_model(BundleModel())
