"""A bundle's model: encoder, heads, and ONNX graphs of the transformer, but no classifier rows.

Those rows are in vectors/clf.npy and bias.npy, so that the model's large files do not change with
the labels, and a server holds the rows only once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from unidec.data.profile import spaced
from unidec.data.storage import file_sha256, read_json, read_manifest, write_manifest
from unidec.errors import ArtifactError
from unidec.model.arrays import BY_LABEL, CONFIG, GRAPH, KIND, VERSION, WEIGHTS

CALIBRATION_TEXTS = 128
# contain wall-clock times, which differ between equal trainings
_TRAINING_RECORDS = (".jsonl", "train.json")


def write_model(
    source: Path, target: Path, *, num_labels: int, dim: int, texts: Sequence[str] = ()
) -> dict[str, str]:
    """Copy a model's folder without classifier rows and training records, and write a manifest.

    ONNX graphs are exported (`onnx_export.write_graphs`) if the model has a transformer but no
    graphs.

    Args:
        source: the folder of an exported model, or of a bundle's model.
        target: the new folder; must not exist.
        num_labels: number of labels to write into the configuration.
        dim: width of the heads; only their first `dim` dimensions are kept.
        texts: typical texts, to calibrate the 8-bit graph.

    Returns:
        sha256 of each file that was copied unchanged, by name.

    Raises:
        ArtifactError: the model is missing or damaged, or changes while it is copied.
    """
    manifest = read_manifest(source, KIND, VERSION, verify=True)
    target.mkdir()
    hashes = {}
    for name, entry in manifest["files"].items():
        if name.endswith(_TRAINING_RECORDS):
            continue
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        if not _write_changed(source, target, name, num_labels, dim):
            shutil.copyfile(source / name, target / name)
            if file_sha256(target / name) != entry["sha256"]:
                raise ArtifactError(
                    "the file changed while it was copied",
                    where=source / name,
                    fix="run it again",
                )
            hashes[name] = entry["sha256"]
    encoder = read_json(source / CONFIG).get("encoder", {}).get("kind")
    if encoder in ("transformer", "both") and not (target / GRAPH).exists():
        from unidec.model.onnx_export import write_graphs
        from unidec.model.unidec import UniDEC

        write_graphs(UniDEC.load(source, verify=False, rows=False), target, texts)
    write_manifest(target, KIND, VERSION, manifest["meta"], hashes)
    return hashes


def typical_texts(*columns: Any) -> list[str]:
    """Evenly spaced non-empty titles of these columns, to calibrate the 8-bit graph."""
    num = CALIBRATION_TEXTS // len(columns)
    texts = chain.from_iterable(evenly_spaced(column, num) for column in columns)
    return [text for text in texts if text]


def evenly_spaced(texts: Any, num: int) -> list[str]:
    """At most `num` texts of an Arrow column, from the first to the last."""
    chosen: list[str] = texts.take(spaced(np.arange(len(texts)), num)).to_pylist()
    return chosen


def _write_changed(source: Path, target: Path, name: str, num_labels: int, dim: int) -> bool:
    """Write a file whose content differs in a bundle; returns False, and writes nothing, if its
    content is the same.
    """
    if name == CONFIG:
        config = read_json(source / name)
        changed = config | {"num_labels": num_labels}
        if "model" in config:
            changed["model"] = config["model"] | {"dim": dim}
        if changed == config:
            return False
        text = json.dumps(changed, indent=2, sort_keys=True)
        (target / name).write_text(text + "\n", encoding="utf-8")
        return True
    if name != WEIGHTS:
        return False
    from unidec.data.tensor_file import open_tensors, write_tensors

    with open_tensors(source / name) as file:
        names = [tensor for tensor in file.names if tensor not in BY_LABEL]
        heads = [tensor for tensor in names if tensor.startswith("head_")]
        is_cut = any(file.shape(head)[0] > dim for head in heads)
        if len(names) == len(file.names) and not is_cut:
            return False
        tensors = {tensor: file.read(tensor) for tensor in names}
        for head in heads:
            tensors[head] = tensors[head][:dim]
        write_tensors(target / name, tensors)
        return True
