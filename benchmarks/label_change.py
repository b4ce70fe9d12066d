"""What it takes to change a bundle's labels: seconds, bytes written, and the index changed against built anew.

    python benchmarks/label_change.py                                   # outputs/bundle
    python benchmarks/label_change.py --bundle models:/unidec@champion --many 5000 --threads 2

Each change is made from the same bundle into a folder that is removed again: one label and many added, removed and
given another text. Seconds by the clock and of the processor (both with the checks of all hashes, without loading the
bundle, which `load` says). Writes JSON.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import machine

from unidec.bundle.bundle import Bundle
from unidec.bundle.label_change import LabelChange, LabelText, with_labels
from unidec.data.storage import write_json
from unidec.ranking.index import LabelIndex
from unidec.tracking.fetch import fetch_bundle

ROOT = Path(__file__).resolve().parents[1]


def timed(work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """What it returns, and its seconds."""
    begin, cpu = time.perf_counter(), time.process_time()
    made = work()
    return made, {"seconds": round(time.perf_counter() - begin, 2), "cpu_seconds": round(time.process_time() - cpu, 2)}


def changes(bundle: Bundle, many: int) -> dict[str, Callable[[], LabelChange]]:
    """Changes of one label and of many, by name."""
    rng = np.random.default_rng(0)
    uids, titles = bundle.uids.to_pylist(), bundle.titles.to_pylist()
    many = min(many, len(uids) // 2)
    some = [uids[row] for row in rng.choice(len(uids), many, replace=False)]
    words = [word for title in titles[:5000] for word in title.split()] or ["label"]
    texts = [" ".join(rng.choice(words, 6)) for _ in range(many)]

    def named(names: list[str]) -> list[LabelText]:
        return [LabelText(name, text) for name, text in zip(names, texts, strict=True)]

    new = [f"new label {row}" for row in range(many)]
    return {
        "add 1": lambda: LabelChange.edit(bundle, named(new)[:1]),
        f"add {many:,}": lambda: LabelChange.edit(bundle, named(new)),
        "remove 1": lambda: LabelChange.edit(bundle, remove=some[:1]),
        f"remove {many:,}": lambda: LabelChange.edit(bundle, remove=some),
        "update 1": lambda: LabelChange.edit(bundle, update=named(some)[:1]),
        f"update {many:,}": lambda: LabelChange.edit(bundle, update=named(some)),
    }


def measure(bundle: Bundle, make: Callable[[], LabelChange], folder: Path) -> dict[str, float]:
    def work() -> LabelChange:
        change = make()
        with_labels(bundle, folder, change)
        return change

    change, took = timed(work)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    after = Bundle.load(folder, verify=False)
    rows, kind = after.ranker.heads, after.index.kind
    _, only = timed(lambda: LabelIndex.build(rows, kind, **after.index.options.model_dump()))
    shutil.rmtree(folder)
    return took | {"index_seconds": only["seconds"], "written_mb": round(size / 1e6, 1), "labels": len(change.uids)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", default=str(ROOT / "outputs" / "bundle"), help="folder or models:/name@alias")
    parser.add_argument("--many", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "label-change.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    bundle, load = timed(lambda: Bundle.load(fetch_bundle(options.bundle, ROOT / "runs" / "bundles"), verify=False))
    bundle.predict(["a first text, so that what is loaded once is loaded"])
    with tempfile.TemporaryDirectory(dir=ROOT / "runs", prefix=".label-change-") as scratch:
        # a bundle of an older format is brought to this one first
        base = Bundle.load(with_labels(bundle, Path(scratch, "base"), LabelChange.edit(bundle, [LabelText("+", "+")])))
        rows: dict[str, dict[str, float]] = {}
        for name, make in changes(base, options.many).items():
            rows[name] = measure(base, make, Path(scratch, "changed"))
            print(f"{name:14s}" + "".join(f"  {key} {value:g}" for key, value in rows[name].items()), flush=True)
    facts = {"labels": bundle.num_labels, "index": bundle.info.index_kind, "width": bundle.info.width, "load": load}
    write_json(options.out, {"machine": machine(), **facts, "changes": rows})


if __name__ == "__main__":
    main()
