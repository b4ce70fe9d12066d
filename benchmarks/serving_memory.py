"""Memory of a server by its number of labels: bundles of random vectors, each served in a process of its own."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from measure import MIB
from served import Served

BLOCK = 20_000


def make_bundle(folder: Path, num_labels: int, dim: int) -> Path:
    """A bundle with a bag of tokens and random unit vectors; memory does not depend on what they say."""
    import torch

    from unidec.config import Encoder, Model
    from unidec.data.storage import write_folder
    from unidec.model.sources import resolve_encoder
    from unidec.model.unidec import UniDEC
    from unidec.retrieval.bundle_folder import BundleLabels, Scoring, write_bundle
    from unidec.retrieval.index import LabelIndex
    from unidec.retrieval.scoring_space import LabelRows

    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    kept = {"tokens": {"max_length": 32}}
    model = UniDEC.create(
        Encoder(kind="bag"), Model(dim=dim), num_labels, resolve_encoder("all-MiniLM-L6-v2"), 30522, kept
    ).eval()
    with write_folder(folder / "model", "model", 1) as out:
        model.save_into(out)
    de = np.empty((num_labels, dim), dtype=np.float32)
    for begin in range(0, num_labels, BLOCK):
        some = rng.standard_normal((min(BLOCK, num_labels - begin), dim), dtype=np.float32)
        de[begin : begin + len(some)] = some / np.linalg.norm(some, axis=1, keepdims=True)
    clf, bias = model.classifier_table()
    vectors = {"de": de, "clf": clf, "bias": bias}
    return write_bundle(
        folder / "bundle", folder / "model", LabelIndex.build(LabelRows(vectors, "both", True)),
        BundleLabels(
            [f"label-{i}" for i in range(num_labels)],
            [f"the title of label {i}, of some length" for i in range(num_labels)],
            vectors,
        ),
        Scoring("both", 0.7, True),
    )  # fmt: skip


def measure_memory(options: argparse.Namespace, queries: Any) -> dict[str, Any]:
    """Bytes of bundles of several sizes when ready and after a thousand queries; the slope is what a million labels
    take. `RssAnon` is what the process holds, `RssFile` files that are mapped and which the kernel may drop."""
    rows = []
    for num_labels in sorted(int(float(text)) for text in options.labels.split(",")):
        with tempfile.TemporaryDirectory(prefix="unidec-memory-") as place:
            bundle = make_bundle(Path(place), num_labels, 512)
            size = sum(file.stat().st_size for file in bundle.rglob("*") if file.is_file())
            with Served(bundle, *options.set) as served:
                ready, seconds = served.memory(), served.ready_seconds
                queries.warm(served, 4, 1000)
                rows.append({
                    "labels": num_labels, "bundle_mib": size / MIB, "ready_s": seconds,
                    "ready_mib": {name: value / MIB for name, value in ready.items()},
                    "used_mib": {name: value / MIB for name, value in served.memory().items()},
                })  # fmt: skip
        row = rows[-1]
        used = "  ".join(f"{name} {value:7.0f}" for name, value in row["used_mib"].items())
        print(f"memory {num_labels:>9,} labels x 2 x 512: bundle {row['bundle_mib']:6.0f} MiB, {used} MiB", flush=True)
    first, last = rows[0], rows[-1]
    slope = {
        name: (last["used_mib"][name] - first["used_mib"][name]) / (last["labels"] - first["labels"]) * 1e6
        for name in last["used_mib"]
    }
    if len(rows) > 1:
        print("a million labels: " + "  ".join(f"{name} {value / 1024:.2f} GiB" for name, value in slope.items()))
    return {"rows": rows, "mib_a_million_labels": slope if len(rows) > 1 else None}
