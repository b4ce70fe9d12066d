"""napkinXC's probabilistic label tree on a peer task; runs in an environment of its own, imports nothing of unidec.

    python plt.py TASK OUT '{"cost": 10, "arity": 2, "max_leaves": 100, "trees": 1, "seed": 0, "threads": 1, ...}'

Logistic regressions in the nodes, hierarchical k-means over the labels, exact (best-first) search. Writes <split>.npz
(CSR of probabilities) and facts.json. Source: Jasinska-Kobus, Wydmuch, Dembczynski, Kuznetsov and Busa-Fekete 2020.
"""

from __future__ import annotations

import json
import resource
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from napkinxc.models import PLT
from scipy.sparse import csr_matrix, load_npz, save_npz


def main() -> None:
    task, out, options = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    x_train, y_train = load_npz(task / "X.train.npz"), load_npz(task / "Y.train.npz")
    model = PLT(
        str(out / "model"),
        liblinear_c=options["cost"],
        arity=options["arity"],
        max_leaves=options["max_leaves"],
        ensemble=options["trees"],
        seed=options["seed"],
        threads=options["threads"],
        tree_search_type="exact",
    )
    start = time.perf_counter()
    model.fit(x_train, [row.indices.tolist() for row in y_train])
    facts: dict[str, Any] = {"train_seconds": time.perf_counter() - start, "search_ms": {}}
    facts["model_bytes"] = sum(file.stat().st_size for file in (out / "model").rglob("*") if file.is_file())
    for split in options["splits"]:
        x = load_npz(task / f"X.{split}.npz")
        start = time.perf_counter()
        predicted = model.predict_proba(x, top_k=options["width"])
        facts["search_ms"][split] = 1000 * (time.perf_counter() - start) / x.shape[0]
        indptr = np.concatenate([[0], np.cumsum([len(row) for row in predicted])])
        pairs = np.array([pair for row in predicted for pair in row]).reshape(-1, 2)
        shape = (x.shape[0], y_train.shape[1])
        save_npz(out / f"{split}.npz", csr_matrix((pairs[:, 1], pairs[:, 0].astype(np.int64), indptr), shape=shape))
    facts["peak_rss_bytes"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (out / "facts.json").write_text(json.dumps(facts))
    shutil.rmtree(out / "model")


if __name__ == "__main__":
    main()
