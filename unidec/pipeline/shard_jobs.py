"""Writes a shard of any work, in whatever process or machine a runner chose."""

from __future__ import annotations

import importlib
import os

from unidec.data.shards import Work

# job -> module, whose function `write_shard(work, number, threads=...)` writes a shard; imported on
# first use, as a job may need torch and another one may not
_MODULES = {
    "predictions": "unidec.bundle.predict_file",
    "rows": "unidec.data.formats.table_reader",
    "tokens": "unidec.data.token_shards",
    "frozen": "unidec.model.frozen",
    "codes": "unidec.ranking.index",
}


def run_shard(folder: str | os.PathLike[str], number: int, threads: int = 0) -> None:
    """Write one shard of a plan if it is missing, in any process with access to the folder.

    Args:
        threads: threads that compute it; 0: one for each core.

    Raises:
        ArtifactError: there is no plan, or the shard cannot be written.
    """
    work = Work.open(folder)
    if work.is_whole(number):
        return
    module = importlib.import_module(_MODULES[work.job.name])
    module.write_shard(work, number, threads=threads)
