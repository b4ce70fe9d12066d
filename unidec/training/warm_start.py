"""What a warm start begins from, and the parameters it trains with; taking the weights is `training.warm`.

Legend: L labels, K labels of the start.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from unidec.config import Params

FIX = "retrain.start: cold"


@dataclass(frozen=True)
class Start:
    """What a training goes on from.

    Attributes:
        model: folder of an exported model.
        uids: Arrow strings [K], the uid of each row of its classifier.
        sha256: of the bundle that holds both: part of a run's identity.
        vectors: folder of a bundle's arrays: its model has no classifier of its own, clf.npy and bias.npy are it.
    """

    model: Path
    uids: pa.Array
    sha256: str
    vectors: Path | None = None

    def rows_of(self, uids: pa.Array | pa.ChunkedArray) -> np.ndarray:
        """The start's row of each label: int64 [L], -1 for one that it does not have."""
        found = pc.fill_null(pc.index_in(uids, value_set=self.uids.cast(uids.type)), -1)
        return np.asarray(found, dtype=np.int64)

    def compared(self, uids: pa.Array | pa.ChunkedArray) -> dict[str, int]:
        """How many labels are {"kept", "new", "removed"}."""
        kept = int((self.rows_of(uids) >= 0).sum())
        return {"kept": kept, "new": len(uids) - kept, "removed": len(self.uids) - kept}


def warm_params(params: Params) -> Params:
    """What a warm start trains with: section `warm` takes the place of the schedule and scales every learning rate.

    Applied to its own result it changes nothing: that one's `warm.lr_scale` is 1.
    """
    warm, optim = params.warm, params.optim
    rates = {key: value * warm.lr_scale for key, value in optim.model_dump().items() if key.startswith("lr_")}
    schedule = {"epochs": warm.epochs, "warmup_epochs": warm.warmup_epochs}
    return params.model_copy(
        update={
            "optim": optim.model_copy(update=schedule | rates),
            "warm": warm.model_copy(update={"lr_scale": 1.0}),
        }
    )
