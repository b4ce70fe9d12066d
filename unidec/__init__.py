"""UniDEC: extreme multi-label classification with a dual encoder and a classifier trained together.

    import unidec

    model = unidec.load("models:/unidec@champion")         # or a bundle's folder
    model.predict(["brushes for painting"], k=5)           # [[Label(uid, text, score), ...]]
    model = unidec.fit(queries, labels, pairs)             # lists, mappings or DataFrames

Names are imported on first use, so `import unidec` takes milliseconds.
"""

import importlib
from typing import TYPE_CHECKING, Any

from unidec.cores import prepare
from unidec.errors import missing_package
from unidec.version import __version__

if TYPE_CHECKING:
    from unidec.api import Label, Model, fit, load
    from unidec.data.dataset import XMCDataset
    from unidec.estimator import UniDECClassifier

prepare()

__all__ = ["Label", "Model", "UniDECClassifier", "XMCDataset", "__version__", "fit", "load"]

_MODULES = {
    "Label": "unidec.api",
    "Model": "unidec.api",
    "fit": "unidec.api",
    "load": "unidec.api",
    "UniDECClassifier": "unidec.estimator",
    "XMCDataset": "unidec.data.dataset",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'unidec' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_MODULES[name]), name)
    except ModuleNotFoundError as error:
        raise missing_package(error) from None
