"""A bundle's model: encoder, heads, and the transformer as ONNX graphs. The classifier's rows are not in it:
vectors/clf.npy and bias.npy are they.

So a bundle that changes its labels keeps the model's large files as they are, and a server holds the rows once.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from unidec.data.storage import MANIFEST, file_sha256, read_manifest, write_manifest
from unidec.errors import ArtifactError
from unidec.model.arrays import BY_LABEL, CONFIG, GRAPH, WEIGHTS

CALIBRATION_TEXTS = 128
_TRAINING_RECORDS = (".jsonl", "train.json")  # hold wall times: no two trainings write the same


def write_model(source: Path, target: Path, num_labels: int, texts: Sequence[str] = ()) -> dict[str, str]:
    """Copy a model's folder without classifier rows and without the records of its training, under its own manifest.

    A transformer that has no ONNX graphs there yet gets them (`onnx_export.write_graphs`).

    Args:
        source: an exported model, or a bundle's.
        target: a folder that is not there yet.
        num_labels: written into the configuration.
        texts: typical ones, to calibrate a graph of 8 bits with.

    Returns:
        sha256 of each file that stays as it is, by its name.

    Raises:
        ArtifactError: no model, a damaged one, or one that changed meanwhile.
    """
    try:
        about = _json(source / MANIFEST)
        kind, version = str(about["kind"]), int(about["version"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError("no model here", where=str(source), fix="train first: unidec train") from error
    manifest = read_manifest(source, kind, version, verify=True)
    target.mkdir()
    hashes = {}
    for name, entry in manifest["files"].items():
        if not name.endswith(_TRAINING_RECORDS):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            if not _changed(source, target, name, num_labels):
                shutil.copyfile(source / name, target / name)
                if file_sha256(target / name) != entry["sha256"]:
                    what = "a file changed while it was copied"
                    raise ArtifactError(what, where=str(source / name), fix="run it again")
                hashes[name] = entry["sha256"]
    encoder = _json(source / CONFIG).get("encoder", {}).get("kind")
    if encoder in ("transformer", "both") and not (target / GRAPH).exists():
        from unidec.model.onnx_export import write_graphs
        from unidec.model.unidec import UniDEC

        write_graphs(UniDEC.load(source, verify=False, rows=False), target, texts)
    write_manifest(target, kind, version, manifest["meta"], hashes)
    return hashes


def typical_texts(*columns: Any) -> list[str]:
    """Some titles of each column that is given, evenly spread: what 8 bits are calibrated with."""
    given = [column for column in columns if column is not None and len(column)]
    num = CALIBRATION_TEXTS // max(len(given), 1)
    some = [column.take(np.linspace(0, len(column) - 1, num).astype(np.int64)) for column in given]
    return [title for column in some for title in column.to_pylist() if title]


def _changed(source: Path, target: Path, name: str, num_labels: int) -> bool:
    """Whether a file is another one in a bundle, and was written."""
    if name == CONFIG and (config := _json(source / name)).get("num_labels") != num_labels:
        text = json.dumps(config | {"num_labels": num_labels}, indent=2, sort_keys=True) + "\n"
        (target / name).write_text(text, encoding="utf-8")
        return True
    if name != WEIGHTS:
        return False
    from unidec.data.tensor_file import open_tensors, write_tensors

    with open_tensors(source / name) as file:
        kept = [tensor for tensor in file.names if tensor not in BY_LABEL]
        if len(kept) == len(file.names):
            return False
        write_tensors(target / name, {tensor: file.read(tensor) for tensor in kept})
        return True


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))
