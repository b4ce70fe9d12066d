"""Batch work in shards, as whoever maps it over processes or machines sees it: paths and numbers in, small JSON out.

`begin_*` (of the library) writes a plan, `missing` says what is to be done, `run_shard` does one of them in any process
that sees the folder, `merge` writes the result. Neither a flow nor a cluster sees a tensor.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from unidec.config import Params
from unidec.data.shards import Work, alone
from unidec.data.token_shards import begin_tokens, merge_tokens, write_token_shard
from unidec.errors import ConfigError
from unidec.model.sources import resolve_encoder
from unidec.pipeline import paths
from unidec.retrieval.predict_shards import begin_predictions, merge_predictions, shards_folder, write_prediction_shard
from unidec.retrieval.vector_shards import begin_vectors, merge_vectors, write_vector_shard

__all__ = [
    "Work",
    "alone",
    "begin_predictions",
    "begin_vectors",
    "describe",
    "merge",
    "run_shard",
    "shards_folder",
    "token_shards_folder",
    "tokens_in_shards",
]

_WRITE: dict[str, Callable[..., None]] = {
    "tokens": write_token_shard,
    "vectors": write_vector_shard,
    "predictions": write_prediction_shard,
}
_MERGE: dict[str, Callable[[Work], Path]] = {
    "tokens": merge_tokens,
    "vectors": merge_vectors,
    "predictions": merge_predictions,
}


def tokens_in_shards(params: Params, which: Literal["queries", "labels"], shards: int | None = None) -> Work:
    """The plan of data/tokens/{queries,labels}."""
    return begin_tokens(
        paths.open_dataset(), which, params.tokens.text, resolve_encoder(params.encoder.name), params.tokens.max_length,
        paths.TOKENS / which, token_shards_folder(which), shards,
    )  # fmt: skip


def token_shards_folder(which: str) -> Path:
    """Where the shards of a token cache lie: outside of what DVC empties before it runs the stage."""
    return paths.CACHE / "shards" / f"tokens-{which}"


def describe(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """A plan in numbers: kind, rows, shards, their names, and which are missing (every hash is checked)."""
    work = Work.open(folder)
    return {
        "kind": work.kind,
        "rows": work.num_rows,
        "shards": work.num_shards,
        "sizes": [last - first for first, last in map(work.rows, range(work.num_shards))],
        "names": [work.name(number) for number in range(work.num_shards)],
        "missing": work.missing(),
    }


def run_shard(
    folder: str | os.PathLike[str], number: int, threads: int = 0, show: Callable[[int], object] | None = None
) -> dict[str, Any]:
    """Writes one shard, unless it is there already.

    Args:
        folder: of a plan.
        number: from 0.
        threads: cores that this process may use; 0: as it is.

    Returns:
        {"number", "rows", "seconds", "skipped"}.

    Raises:
        UnidecError: what the plan's kind raises.
    """
    work = Work.open(folder)
    if work.kind not in _WRITE:
        raise ConfigError("unknown work", where=str(folder), got=work.kind, expected=", ".join(_WRITE))
    first, last = work.rows(number)
    skipped, begun = work.is_whole(number), time.monotonic()
    if not skipped:
        if threads:
            _use_threads(threads)
        _WRITE[work.kind](work, number, show)
    return {"number": number, "rows": last - first, "seconds": time.monotonic() - begun, "skipped": skipped}


def merge(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Writes the result of a work whose shards are all there, and removes them.

    Raises:
        ArtifactError: a shard is missing or damaged, or the result cannot be written.
    """
    work = Work.open(folder)
    return {"rows": work.num_rows, "shards": work.num_shards, "output": str(_MERGE[work.kind](work))}


def _use_threads(threads: int) -> None:
    import faiss
    import torch

    torch.set_num_threads(threads)
    faiss.omp_set_num_threads(threads)
