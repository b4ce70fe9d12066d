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
from typing import Any

import numpy as np
from pecos.xmc import Indexer, LabelEmbeddingFactory
from pecos.xmc.xlinear.model import XLinearModel
from scipy.sparse import csc_matrix, csr_matrix, load_npz, save_npz


def main() -> None:
    task, out, given = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    x_train, y_train, label_text = (
        load_npz(task / f"{name}.npz").astype(np.float32) for name in ("X.train", "Y.train", "X.labels")
    )
    threads = given["threads"]
    start = time.perf_counter()
    features = LabelEmbeddingFactory.create(y_train, x_train, Z=label_text, method="pifa_lf_concat")
    tree = Indexer.gen(features, indexer_type="hierarchicalkmeans", threads=threads, seed=given["seed"])
    model = XLinearModel.train(x_train, csc_matrix(y_train), C=tree, negative_sampling_scheme="tfn", threads=threads)
    facts: dict[str, Any] = {"train_seconds": time.perf_counter() - start, "search_ms": {}}
    for split in given["splits"]:
        x = load_npz(task / f"X.{split}.npz").astype(np.float32)
        start = time.perf_counter()
        predicted = model.predict(x, beam_size=50, only_topk=given["width"], threads=threads)
        facts["search_ms"][split] = 1000 * (time.perf_counter() - start) / x.shape[0]
        save_npz(out / f"{split}.npz", csr_matrix(predicted))
    facts["parameters"] = int(sum(layer.W.nnz for layer in model.model.model_chain))
    facts["peak_rss_bytes"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    facts["version"] = f"libpecos {version('libpecos')}"
    (out / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
