"""One function a pipeline stage: parameters in, folders written, a small JSON-able summary out.

The command line and the flow call these; neither they nor DVC see a tensor. Paths are relative to the working folder.
A function's module is imported when the function is first used: ingesting data requires no torch. So no module here may
have the name of a function: importing it would replace the function.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unidec.stages.change import data_change, drift
    from unidec.stages.data import ingest, label_graph, propensity, tokens, validate
    from unidec.stages.evaluation import evaluate
    from unidec.stages.fetching import fetch
    from unidec.stages.gating import gate, needs_gate
    from unidec.stages.indexing import index
    from unidec.stages.label_refresh import refresh_labels
    from unidec.stages.monitoring import monitor
    from unidec.stages.promotion import promote, rollback
    from unidec.stages.registration import register
    from unidec.stages.session import train
    from unidec.stages.start import choose_start
    from unidec.stages.start_file import effective
    from unidec.stages.training import cluster, export, refresh, start_run, train_round

_MODULES = {
    "change": "data_change drift",
    "data": "ingest label_graph propensity tokens validate",
    "evaluation": "evaluate",
    "fetching": "fetch",
    "gating": "gate needs_gate",
    "indexing": "index",
    "label_refresh": "refresh_labels",
    "monitoring": "monitor",
    "promotion": "promote rollback",
    "registration": "register",
    "session": "train",
    "start": "choose_start",
    "start_file": "effective",
    "training": "cluster export refresh start_run train_round",
}
_MODULE_OF = {function: module for module, functions in _MODULES.items() for function in functions.split()}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
