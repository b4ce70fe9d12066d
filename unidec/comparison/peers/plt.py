# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = ["napkinxc==0.7.2", "numpy==2.2.6", "scipy==1.15.3"]
#
# [[tool.uv.dependency-metadata]]
# name = "napkinxc"
# version = "0.7.2"
# requires-dist = []
# ///
"""napkinXC's probabilistic label tree on a peer task: `plt.py TASK OUT SETTINGS` (unidec/comparison/peers/running.py).

Logistic regressions (cost 10) in the nodes of a binary hierarchical k-means tree with at most 100 labels a leaf, exact
(best-first) search. Source: Jasinska-Kobus, Wydmuch, Dembczynski, Kuznetsov and Busa-Fekete 2020.
"""

from __future__ import annotations

import json
import resource
import shutil
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from napkinxc.models import PLT
from scipy.sparse import csr_matrix, load_npz, save_npz


def main() -> None:
    task, out, given = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    x_train, y_train = load_npz(task / "X.train.npz"), load_npz(task / "Y.train.npz")
    settings = {"liblinear_c": 10.0, "arity": 2, "max_leaves": 100, "tree_search_type": "exact"}
    model = PLT(str(out / "model"), **settings, seed=given["seed"], threads=given["threads"])
    start = time.perf_counter()
    model.fit(x_train, [row.indices.tolist() for row in y_train])
    facts: dict[str, Any] = {"train_seconds": time.perf_counter() - start, "search_ms": {}}
    for split in given["splits"]:
        x = load_npz(task / f"X.{split}.npz")
        start = time.perf_counter()
        predicted = model.predict_proba(x, top_k=given["width"])
        facts["search_ms"][split] = 1000 * (time.perf_counter() - start) / x.shape[0]
        indptr = np.concatenate([[0], np.cumsum([len(row) for row in predicted])])
        pairs = np.array([pair for row in predicted for pair in row]).reshape(-1, 2)
        shape = (x.shape[0], y_train.shape[1])
        save_npz(out / f"{split}.npz", csr_matrix((pairs[:, 1], pairs[:, 0].astype(np.int64), indptr), shape=shape))
    facts["peak_rss_bytes"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    facts["version"] = f"napkinxc {version('napkinxc')}"
    (out / "facts.json").write_text(json.dumps(facts))
    shutil.rmtree(out / "model")


if __name__ == "__main__":
    main()
