"""A bundle with another index: everything else stays as it is, on the disk too."""

from __future__ import annotations

import os
from pathlib import Path

from unidec.data.storage import read_manifest, write_folder, write_json
from unidec.retrieval.bundle import Bundle
from unidec.retrieval.bundle_folder import KIND, VERSION
from unidec.retrieval.bundle_index import INDEX, NODES, write_index
from unidec.retrieval.bundle_model import place
from unidec.retrieval.index import LabelIndex


def with_index(bundle: Bundle, path: str | os.PathLike[str], index: LabelIndex) -> Path:
    """Write a bundle whose labels are searched by another index. The same input gives the same bytes.

    Args:
        bundle: what answers now; it is not touched. Files that stay are linked where the file system can.
        path: the new bundle's folder, of another name.
        index: over the same vectors.

    Returns:
        The folder's path.

    Raises:
        ValueError: an index of other labels or another width.
        ArtifactError: the bundle's folder is damaged by now, or the new one cannot be written.
    """
    if (index.num_labels, index.dim) != (bundle.index.num_labels, bundle.index.dim):
        raise ValueError(
            f"an index of {index.num_labels} labels and width {index.dim}, the bundle has {bundle.index.num_labels} "
            f"and {bundle.index.dim}"
        )
    manifest = read_manifest(bundle.path, KIND, VERSION, verify=True)
    with write_folder(path, KIND, VERSION, manifest["meta"] | {"index": index.kind}) as out:
        for name, entry in manifest["files"].items():
            if name in (INDEX, NODES, "bundle.json"):
                continue
            (out.path / name).parent.mkdir(parents=True, exist_ok=True)
            out.hashes[name] = place(bundle.path / name, out.path / name, entry["sha256"], link=True)
        write_index(out.path, index)
        changes = {
            "index_kind": index.kind, "index_search": index.options.search, "index_options": index.options,
            "index_bytes": (out.path / INDEX).stat().st_size,
            "index_nodes": None if index.nodes is None else len(index.nodes),
        }  # fmt: skip
        write_json(out.path / "bundle.json", bundle.info.model_copy(update=changes).model_dump())
    return Path(path)
