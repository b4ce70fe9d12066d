"""One function a pipeline stage: parameters in, folders written, a small JSON-able summary out.

The command line and the flow call these; neither they nor DVC see a tensor. Paths are relative to the working folder.
"""

from unidec.stages.change import data_change, drift
from unidec.stages.data import ingest, label_graph, propensity, tokens, validate
from unidec.stages.evaluation import evaluate
from unidec.stages.fetch import fetch
from unidec.stages.gate import gate, needs_gate
from unidec.stages.index import index
from unidec.stages.monitor import monitor
from unidec.stages.promotion import promote, rollback
from unidec.stages.refresh_labels import refresh_labels
from unidec.stages.registration import register
from unidec.stages.session import train
from unidec.stages.start import choose_start
from unidec.stages.start_file import effective
from unidec.stages.training import export, refresh, start_run, train_round

__all__ = [
    "choose_start",
    "data_change",
    "drift",
    "effective",
    "evaluate",
    "export",
    "fetch",
    "gate",
    "index",
    "ingest",
    "label_graph",
    "monitor",
    "needs_gate",
    "promote",
    "propensity",
    "refresh",
    "refresh_labels",
    "register",
    "rollback",
    "start_run",
    "tokens",
    "train",
    "train_round",
    "validate",
]
