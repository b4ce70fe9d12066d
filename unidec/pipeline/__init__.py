"""The pipeline's stages, one function each: they take the parameters, write folders and return a
small dataclass or dictionary, which `plain` converts for JSON.

The command line and the flows call these functions; neither they nor DVC handle tensors. Paths are
relative to the working folder. A function's module is imported on first use, so that ingesting data
does not import torch. No module of this package may have the same name as one of the functions,
because importing it would replace the function.
"""

import contextlib
import importlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unidec.pipeline.data_stages import fetch, ingest, label_graph, propensity, tokens, validate
    from unidec.pipeline.dependencies import inputs
    from unidec.pipeline.drift_check import data_change, drift, monitor
    from unidec.pipeline.evaluation import evaluate
    from unidec.pipeline.gating import gate, needs_gate, promote
    from unidec.pipeline.indexing import index
    from unidec.pipeline.label_stages import refresh_labels
    from unidec.pipeline.marks import from_feedback
    from unidec.pipeline.preflight import check_before_work
    from unidec.pipeline.registration import register
    from unidec.pipeline.start import choose_start
    from unidec.pipeline.training import start_run, train

_MODULES = {
    "drift_check": "data_change drift monitor",
    "data_stages": "fetch ingest label_graph propensity tokens validate",
    "evaluation": "evaluate",
    "gating": "gate needs_gate promote",
    "indexing": "index",
    "dependencies": "inputs",
    "label_stages": "refresh_labels",
    "marks": "from_feedback",
    "preflight": "check_before_work",
    "registration": "register",
    "start": "choose_start",
    "training": "start_run train",
}
_MODULE_OF = {
    function: module for module, functions in _MODULES.items() for function in functions.split()
}
_SLOW = (
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "sklearn.feature_extraction.text",
    "matplotlib.figure",
    "onnxruntime.quantization",
    "opentelemetry.sdk.metrics.export",
)


def import_training() -> None:
    """Import the modules of training and of the stages after it; takes seconds, so call it in a
    background thread.
    """
    for name in [f"{__name__}.{module}" for module in _MODULES] + list(_SLOW):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def plain(result: Any) -> Any:
    """A stage's result as dictionaries and lists; fields whose default is None are omitted if they
    are None.
    """
    if is_dataclass(result):
        values = vars(result)
        required = [field.name for field in fields(result) if field.default is not None]
        result = {
            name: value for name, value in values.items() if value is not None or name in required
        }
    if isinstance(result, Mapping):
        return {key: plain(value) for key, value in result.items()}
    return [plain(value) for value in result] if isinstance(result, list | tuple) else result


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
