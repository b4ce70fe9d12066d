"""PECOS XR-Linear on features that `baselines.py --export` wrote; runs in PECOS's own environment (see README.md).

    python benchmarks/xr_linear.py EXPORT PREDICTIONS [--threads 2]

Imports nothing of unidec: libpecos 1.2.8 needs numpy < 2 and scipy < 1.12, unidec needs numpy 2. What it writes
(labels.npy, scores.npy) is measured by `baselines.py --predictions XR-Linear=PREDICTIONS`.

One tree over the labels (hierarchical k-means on PIFA + label text), teacher-forced negatives, default costs, beam 50.
Source: Yu, Zhong, Zhang, Chang and Dhillon 2022, "PECOS".
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
from pecos.xmc import Indexer, LabelEmbeddingFactory
from pecos.xmc.xlinear.model import XLinearModel
from scipy.sparse import csc_matrix, csr_matrix, load_npz


def as_rows(predicted: csr_matrix, width: int) -> tuple[np.ndarray, np.ndarray]:
    """A sparse prediction as labels int64 [N, width] and scores float32 [N, width], best first, padded with -1."""
    length = np.diff(predicted.indptr)
    row = np.repeat(np.arange(predicted.shape[0]), length)
    order = np.lexsort((predicted.indices, -predicted.data, row))
    column = np.arange(len(row)) - np.repeat(predicted.indptr[:-1], length)
    labels = np.full((predicted.shape[0], width), -1, dtype=np.int64)
    scores = np.full(labels.shape, -np.inf, dtype=np.float32)
    keep = column < width
    labels[row[keep], column[keep]] = predicted.indices[order][keep]
    scores[row[keep], column[keep]] = predicted.data[order][keep]
    return labels, scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("export", type=Path)
    parser.add_argument("predictions", type=Path)
    parser.add_argument("--beam", type=int, default=50)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    width = json.loads((arguments.export / "manifest.json").read_text())["meta"]["search_width"]
    x_train, y_train, x_test, label_text = (
        load_npz(arguments.export / f"{name}.npz").astype(np.float32) for name in ("X.trn", "Y.trn", "X.tst", "labels")
    )
    start = time.perf_counter()
    features = LabelEmbeddingFactory.create(y_train, x_train, Z=label_text, method="pifa_lf_concat")
    tree = Indexer.gen(features, indexer_type="hierarchicalkmeans", threads=arguments.threads)
    model = XLinearModel.train(
        x_train, csc_matrix(y_train), C=tree, negative_sampling_scheme="tfn", threads=arguments.threads
    )
    trained = time.perf_counter()
    predicted = model.predict(x_test, beam_size=arguments.beam, only_topk=width, threads=arguments.threads)
    labels, scores = as_rows(csr_matrix(predicted), width)
    arguments.predictions.mkdir(parents=True, exist_ok=True)
    np.save(arguments.predictions / "labels.npy", labels)
    np.save(arguments.predictions / "scores.npy", scores)
    print(f"trained in {trained - start:.0f} s, predicted in {time.perf_counter() - trained:.0f} s")


if __name__ == "__main__":
    main()
