"""UniDEC: extreme multi-label classification with a dual encoder and a classifier trained together.

Nothing heavy is imported here, so that `unidec --help` and a parameter error take a moment, not seconds:

    from unidec.config import load_params
    from unidec.data.dataset import XMCDataset
    from unidec.retrieval.bundle import Bundle
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
