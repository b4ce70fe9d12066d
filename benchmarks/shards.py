"""Batch prediction in one piece, resumably and in shards: rates and peak memory; writes
benchmarks/results/shards.json.

    python benchmarks/shards.py                        # 10^5 and 10^6 queries; some minutes on two cores, 1 GB of disk
    python benchmarks/shards.py --rows 1e4             # a quick look
    python benchmarks/shards.py --rows 1e5 --how resumable,processes:2     # adds to what was measured
    python benchmarks/shards.py --how resumable:auto                       # `unidec predict --runtime auto`

The bundle is UniDEC with a bag of tokens of all-MiniLM-L6-v2's vocabulary and the first 1,000 labels of data/dataset,
untrained (rates do not depend on that), heads 64 wide, an exact index: small, so that what is measured is the way of
the rows and not the search. Queries are those of data/dataset, repeated. Every measurement is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from measure import MIB, machine, status

from unidec.data.dataset import XMCDataset
from unidec.data.storage import write_folder, write_json

RESULT = Path(__file__).resolve().parent / "results" / "shards.json"
DATASET = Path("data/dataset")
K, LABELS, DIM = 5, 1000, 64


def make_bundle(folder: Path) -> None:
    """An untrained bundle of the data set's labels."""
    import torch

    from unidec.config import Encoder, Model
    from unidec.data.tokens import encode_texts
    from unidec.model.sources import resolve_encoder
    from unidec.model.unidec import UniDEC
    from unidec.retrieval.bundle_folder import BundleLabels, Scoring, write_bundle
    from unidec.retrieval.index import LabelIndex
    from unidec.retrieval.scoring_space import LabelRows

    dataset = XMCDataset.open(DATASET)
    torch.manual_seed(0)
    source = resolve_encoder("all-MiniLM-L6-v2")
    settings = Model(dim=DIM)
    kept = {"tokens": {"max_length": 32}}
    model = UniDEC.create(Encoder(kind="bag"), settings, LABELS, source, 30522, kept).eval()
    with write_folder(folder / "model", "model", 1) as out:
        model.save_into(out)
    titles = dataset.label_texts(range(LABELS))
    de, (clf, bias) = model.encode_labels(encode_texts(titles, model.tokenizer_folder, 32)), model.classifier_table()
    vectors = {"de": de, "clf": clf, "bias": bias}
    write_bundle(
        folder / "bundle", folder / "model", LabelIndex.build(LabelRows(vectors, "both", True)),
        BundleLabels(dataset.label_uids(range(LABELS)), titles, vectors),
        Scoring("both", 0.7, True),
    )  # fmt: skip


def make_queries(path: Path, num_rows: int) -> None:
    """The data set's queries, over and over."""
    texts = pa.chunked_array(XMCDataset.open(DATASET).queries["title"])
    schema = pa.schema([("query", texts.type)])
    with pq.ParquetWriter(path, schema) as writer:
        left = num_rows
        while left:
            some = texts.slice(0, min(left, len(texts)))
            writer.write_table(pa.table({"query": some}))
            left -= len(some)


# -- one measurement, in a process of its own -------------------------------------------------------------------------


def one_piece(place: Path, rows: str) -> None:
    """`predict_file` in one shard."""
    from unidec.retrieval.bundle import Bundle
    from unidec.retrieval.predict_file import FileRequest, predict_file

    names = (str(place / name) for name in ("bundle", f"{rows}.parquet", f"{rows}-whole.parquet"))
    predict_file(Bundle.load(place / "bundle"), FileRequest(*names, k=K, runtime="torch"), shards=1)


def resumable(place: Path, rows: str, runtime: str = "torch") -> None:
    """`predict_file`."""
    from unidec.retrieval.bundle import Bundle
    from unidec.retrieval.predict_file import FileRequest, predict_file

    names = (str(place / name) for name in ("bundle", f"{rows}.parquet", "out.parquet"))
    request = FileRequest(*names, k=K, runtime=runtime)  # type: ignore[arg-type]
    predict_file(Bundle.load(place / "bundle"), request)


def flow(place: Path, rows: str, runner: str) -> None:
    """`python -m flows.predict`."""
    from flows.predict import predict

    predict(str(place / f"{rows}.parquet"), str(place / "out.parquet"), str(place / "bundle"), K, runner=runner)


def measured(place: str, rows: str, what: str) -> None:
    """Prints seconds and peak memory (of the largest child too) as JSON on the last line."""
    import resource

    parts: dict[str, Callable[[Path, str], None]] = {"one piece": one_piece, "resumable": resumable}
    begun = time.monotonic()
    if what in parts:
        parts[what](Path(place), rows)
    elif what.startswith("resumable:"):
        resumable(Path(place), rows, what.partition(":")[2])
    else:
        flow(Path(place), rows, what)
    seconds = time.monotonic() - begun
    child = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    facts = {"seconds": seconds, "peak_mib": status()["VmHWM"] / MIB}
    facts["largest_child_mib"] = child / MIB
    print(json.dumps(facts))


def measure(place: Path, rows: int, what: str) -> dict[str, Any]:
    """One row of the table."""
    environment = os.environ | {"PREFECT_HOME": str(place / "prefect")}
    words = [sys.executable, __file__, "--measure", str(place), str(rows), what]
    done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    facts = json.loads(done.stdout.splitlines()[-1])
    out, whole = place / "out.parquet", place / f"{rows}-whole.parquet"
    if what != "one piece":
        facts["same_bytes"] = out.read_bytes() == whole.read_bytes() if whole.is_file() else None
        out.unlink()
    facts |= {"rows": rows, "what": what, "rows_a_second": rows / facts["seconds"]}
    facts["output_bytes"] = whole.stat().st_size if whole.is_file() else None
    child = "" if what.split(":")[0] in ("one piece", "resumable") else f"{facts['largest_child_mib']:9.0f}"
    print(f"{rows:>9,} {what:14} {facts['seconds']:8.1f} s {facts['rows_a_second']:9,.0f} queries/s "
          f"{facts['peak_mib']:7.0f} MiB {child}", flush=True)  # fmt: skip
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1e5,1e6", help="numbers of queries")
    parser.add_argument("--how", default="one piece,resumable,processes:2,dask:2", help="ways, runners among them")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measured(*options.measure)
        return
    print(f"{'queries':>9} {'how':14} {'time':>10} {'rate':>19} {'peak':>11} {'largest worker':>15}")
    Path("runs").mkdir(exist_ok=True)  # git does not look there
    with tempfile.TemporaryDirectory(dir="runs") as folder:
        place = Path(folder).resolve()
        make_bundle(place)
        results = []
        for rows in [int(float(text)) for text in options.rows.split(",")]:
            make_queries(place / f"{rows}.parquet", rows)
            for what in options.how.split(","):
                results.append(measure(place, rows, what))  # noqa: PERF401  one at a time, shown as it comes
    before = json.loads(RESULT.read_text()).get("runs", []) if RESULT.is_file() else []
    known = {(run["rows"], run["what"]): run for run in [*before, *results]}
    results = [known[key] for key in sorted(known)]
    write_json(RESULT, {"machine": machine(), "labels": LABELS, "dim": DIM, "k": K, "runs": results})


if __name__ == "__main__":
    main()
