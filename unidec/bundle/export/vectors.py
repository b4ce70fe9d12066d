"""Scores that can be exported, parts shared by all exported folders, and export of label vectors.

Each export of vectors has a head: "de", "clf", or "both" if the bundle ranks by both. The inner
product of the exported query and label vectors of a head is that head's score
(`ranking/heads.py`), without the votes of training queries."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from unidec.bundle.bundle import Bundle
from unidec.bundle.bundle_folder import LABEL_SCHEMA
from unidec.data.chunks import blocks
from unidec.data.json_file import read_json_object
from unidec.data.storage import MANIFEST, write_file
from unidec.errors import ConfigError, DataError
from unidec.progress import Progress, progress
from unidec.ranking.heads import Heads
from unidec.text_page import render_text

ExportFacts = dict[str, str | int | list[str]]  # facts about the written files, by name
BLOCK_BYTES = 32 << 20  # size of the rows held in memory at once, and of a Parquet row group


def scored_by(bundle: Bundle, head: str | None = None) -> Heads:
    """How a bundle scores by one head alone, or by its searched space (None). Its inner products
    are the scores; with a bias, labels and queries have an additional dimension.

    Raises:
        DataError: the head is unknown, or the bundle does not have it.
    """
    heads = bundle.ranker.heads
    chosen: Any = head or heads.space
    available: list[str] = sorted(bundle.vectors.keys() - {"bias"})
    if heads.space == "both":
        available.append("both")
    if chosen not in available:
        raise DataError(
            "the bundle has no such head", where="--head", got=head, expected=" or ".join(available)
        )
    return heads if chosen == "both" else heads.alone(chosen)


def facts(bundle: Bundle, score: Heads) -> dict[str, str | float]:
    """Facts about a score, for the metadata of a file."""
    return {
        "bundle_sha256": bundle.sha256,
        "head": score.space,
        "clf_weight": score.clf_weight,
        "clf_normalize": bundle.info.clf_normalize,
        "width": score.shape[1],
        "similarity": "inner product",
    }


def write_readme(
    folder: Path, bundle: Bundle, score: Heads, outputs: Sequence[str] = (), opset: int = 0
) -> None:
    """Write README.md, which describes an exported folder and how to load it; `outputs` names the
    outputs of its ONNX graph.
    """
    text = render_text("export.md", bundle=bundle, score=score, outputs=outputs, opset=opset)
    (folder / "README.md").write_text(f"{text}\n", encoding="utf-8")


def check_replaceable(folder: Path) -> None:
    """Protect folders that are not exports from being replaced.

    Raises:
        ConfigError: the folder is not empty and not an earlier export.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    kind = read_json_object(folder / MANIFEST).get("kind")
    if kind not in ("sentence-transformers", "onnx-export"):
        raise ConfigError(
            "the folder exists and is not an earlier export",
            where=folder,
            fix="name a new folder, or remove this one",
        )


def export_vectors(
    bundle: Bundle, target: str | os.PathLike[str], *, head: str | None = None
) -> ExportFacts:
    """Write the label vectors of a score; `query_side` exports the query encoder for the same head.

    Only uids, titles and a block of vectors are held in memory. The output is deterministic.

    Args:
        bundle: a loaded bundle; its model is not needed.
        target: a .parquet file with columns `uid`, `title` and `vector` (float32, fixed-size list)
            in the bundle's order, and facts in the schema's metadata under `unidec`.
        head: "both", "de" or "clf"; None: the bundle's searched space.

    Returns:
        {"labels", "width", "head", "bytes", "output"}.

    Raises:
        DataError: unknown file ending or head.
        ArtifactError: the file cannot be written.
    """
    import pyarrow.parquet as pq

    path = Path(target)
    if path.suffix.lower() != ".parquet":
        raise DataError("the output has an unknown format", where=path, expected=".parquet")
    score = scored_by(bundle, head)
    num_labels, width = score.shape
    kind = pa.list_(pa.field("element", pa.float32(), nullable=False), width)
    metadata = {"dtype": "float32", **facts(bundle, score)}
    schema = LABEL_SCHEMA.append(pa.field("vector", kind, nullable=False))
    schema = schema.with_metadata({"unidec": json.dumps(metadata, sort_keys=True)})
    # vectors are hardly compressible, and dictionary encoding of them would only take time
    options: dict[str, Any] = {
        "compression": {"uid": "zstd", "title": "zstd", "vector.list.element": "none"}
    }
    step = max(1, BLOCK_BYTES // (4 * width))
    bar: Progress[None] = progress(total=num_labels, desc="vectors", unit="label")
    with (
        bar,
        write_file(path) as file,
        pq.ParquetWriter(file, schema, use_dictionary=False, **options) as writer,
    ):
        for some in blocks(num_labels, step):
            block = score.take(some)
            vectors = pa.FixedSizeListArray.from_arrays(pa.array(block.ravel()), type=kind)
            names = [column[some] for column in (bundle.uids, bundle.titles)]
            table = pa.table([*names, vectors], schema=schema)
            writer.write_table(table, row_group_size=len(block))
            bar.update(len(block))
    return {
        "labels": num_labels,
        "width": width,
        "head": score.space,
        "bytes": path.stat().st_size,
        "output": str(path),
    }
