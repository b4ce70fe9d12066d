"""Work in shards, as a runner maps it over processes or machines: `run_shard` writes one in any process that sees the
folder, `merge` writes the result. And vectors of millions of queries, in shards.

Legend: N queries, D width of a head.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from unidec.data.shards import Work
from unidec.data.storage import load_array, write_folder
from unidec.errors import DataError
from unidec.retrieval.predict_file import (
    FileRequest,
    begin_work,
    merge_predictions,
    opened_bundle,
    write_prediction_shard,
)
from unidec.retrieval.sources import read_rows
from unidec.retrieval.text_file import in_batches

KIND, VERSION = "vectors", 1


def run_shard(folder: str | os.PathLike[str], number: int, threads: int = 0) -> None:
    """Write one shard of a plan, unless it is there.

    Args:
        number: from 0.
        threads: cores that this process may use; 0: as it is.

    Raises:
        DataError: the input changed, or has a row that is not text.
        ArtifactError: no plan, the bundle changed, or the shard cannot be written.
    """
    work = Work.open(folder)
    write = {"predictions": write_prediction_shard, "vectors": write_vector_shard}[work.kind]
    if work.is_whole(number):
        return
    if threads:
        import faiss
        import torch

        torch.set_num_threads(threads)
        faiss.omp_set_num_threads(threads)
    write(work, number)


def merge(folder: str | os.PathLike[str]) -> Path:
    """Write the result of a plan whose shards are all there, and remove them; returns its path.

    Raises:
        ArtifactError: a shard is missing or damaged, or the result cannot be written.
    """
    work = Work.open(folder)
    return {"predictions": merge_predictions, "vectors": merge_vectors}[work.kind](work)


def begin_vectors(request: FileRequest, shards: int | None = None) -> Work:
    """The plan of the folder `request.output`: `de.npy` and `clf.npy` [N, D] float32, those that the bundle's model
    has, as `Bundle.encode` gives them batch by batch. Finished shards of the same plan are kept.

    Raises:
        DataError: a file that cannot be read, or without queries.
        ArtifactError: the bundle is damaged.
    """
    work = begin_work("vectors", request, shards)
    if not work.num_rows:
        raise DataError("a file without queries", where=request.input)
    return work


def write_vector_shard(work: Work, number: int) -> None:
    """Encode one shard's queries; raises as `run_shard`."""
    given = work.settings
    bundle = opened_bundle(given)
    de, clf = [], []
    for texts in in_batches(read_rows(given, work.rows(number)), given["batch_size"]):
        encoded = bundle.encode(texts)
        de.append(encoded.de_BD)
        clf.append(encoded.clf_BD)
    with work.write(number) as out:
        for head, parts in (("de", de), ("clf", clf)):
            if parts[0] is not None:
                np.save(out.path / f"{head}.npy", np.concatenate(parts))


def merge_vectors(work: Work) -> Path:
    """Join the shards' arrays, streamed, to the bytes that `numpy.save` writes of the whole; raises as `merge`."""
    shards, target = work.whole_shards(), Path(work.settings["output"])
    names = sorted(path.name for path in shards[0].glob("*.npy"))
    meta = {"bundle_sha256": work.settings["bundle_sha256"], "num_rows": work.num_rows}
    size = sum((shard / name).stat().st_size for shard in shards for name in names)
    with write_folder(target, KIND, VERSION, meta, num_bytes=size) as out:
        for name in names:
            arrays = [load_array(shard / name, np.float32, ndim=2) for shard in shards]
            header = {"descr": "<f4", "fortran_order": False, "shape": (work.num_rows, arrays[0].shape[1])}
            with open(out.path / name, "wb") as file:
                np.lib.format.write_array_header_1_0(file, header)
                for array in arrays:
                    file.write(memoryview(array).cast("B"))
    work.remove()
    return target
