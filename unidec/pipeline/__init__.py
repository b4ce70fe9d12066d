"""One function a pipeline stage: parameters in, folders written, a small result out, which `plain` makes JSON-able.

The command line and the flow call these; neither they nor DVC see a tensor. Paths are relative to the working folder.
A function's module is imported when the function is first used: ingesting data requires no torch. So no module here may
have the name of a function: importing it would replace the function.
"""

import contextlib
import importlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unidec.pipeline.data import fetch, ingest, label_graph, propensity, tokens, validate
    from unidec.pipeline.drift_check import data_change, drift, monitor
    from unidec.pipeline.evaluation import evaluate
    from unidec.pipeline.gating import gate, needs_gate, promote
    from unidec.pipeline.indexing import index
    from unidec.pipeline.labels import refresh_labels
    from unidec.pipeline.registration import register
    from unidec.pipeline.start import choose_start
    from unidec.pipeline.training import start_run, train

_MODULES = {
    "drift_check": "data_change drift monitor",
    "data": "fetch ingest label_graph propensity tokens validate",
    "evaluation": "evaluate",
    "gating": "gate needs_gate promote",
    "indexing": "index",
    "labels": "refresh_labels",
    "registration": "register",
    "start": "choose_start",
    "training": "start_run train",
}
_MODULE_OF = {function: module for module, functions in _MODULES.items() for function in functions.split()}


_SLOW = ("transformers.modeling_utils", "transformers.models.auto.modeling_auto", "sklearn.feature_extraction.text",
         "matplotlib.figure", "onnxruntime.quantization", "opentelemetry.sdk.metrics.export")  # fmt: skip


def import_training() -> None:
    """Imports what a training and the stages after it need: seconds that may pass beside other work."""
    for name in [f"{__name__}.{module}" for module in _MODULES] + list(_SLOW):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def plain(result: Any) -> Any:
    """A result as dictionaries and lists. A field of a dataclass whose default is None is left out where it is None."""
    if is_dataclass(result):
        values = [(field, getattr(result, field.name)) for field in fields(result)]
        result = {field.name: value for field, value in values if value is not None or field.default is not None}
    if isinstance(result, Mapping):
        return {key: plain(value) for key, value in result.items()}
    return [plain(value) for value in result] if isinstance(result, list | tuple) else result


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
