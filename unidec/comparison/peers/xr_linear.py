# /// script
# requires-python = ">=3.10,<3.13"
# dependencies = ["libpecos==1.2.8", "numpy==1.26.4", "scipy==1.11.4", "scikit-learn==1.5.2"]
#
# [[tool.uv.dependency-metadata]]
# name = "libpecos"
# version = "1.2.8"
# requires-dist = []
# ///
"""PECOS XR-Linear on a peer task: `xr_linear.py TASK OUT SETTINGS` (unidec/comparison/peers/running.py).

One tree over the labels (hierarchical k-means on PIFA beside the label's TF-IDF), teacher-forced negatives, default
costs, beam 50. Source: Yu, Zhong, Zhang, Chang and Dhillon 2022, "PECOS".
"""

from __future__ import annotations

import json
import resource
import sys
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
from pecos.xmc import Indexer, LabelEmbeddingFactory
from pecos.xmc.xlinear.model import XLinearModel
from scipy.sparse import csc_matrix, csr_matrix, load_npz, save_npz


def main() -> None:
    task, out, given = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    x_train, y_train, label_text, x_test = (
        load_npz(task / f"{name}.npz").astype(np.float32) for name in ("X.train", "Y.train", "X.labels", "X.test")
    )
    threads = given["threads"]
    start = time.perf_counter()
    features = LabelEmbeddingFactory.create(y_train, x_train, Z=label_text, method="pifa_lf_concat")
    tree = Indexer.gen(features, indexer_type="hierarchicalkmeans", threads=threads, seed=given["seed"])
    model = XLinearModel.train(x_train, csc_matrix(y_train), C=tree, negative_sampling_scheme="tfn", threads=threads)
    trained = time.perf_counter()
    predicted = model.predict(x_test, beam_size=50, only_topk=given["width"], threads=threads)
    facts = {
        "train_seconds": trained - start,
        "search_ms": 1000 * (time.perf_counter() - trained) / x_test.shape[0],
        "parameters": int(sum(layer.W.nnz for layer in model.model.model_chain)),
        "peak_memory_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "version": f"libpecos {version('libpecos')}",
    }
    save_npz(out / "test.npz", csr_matrix(predicted))
    (out / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
