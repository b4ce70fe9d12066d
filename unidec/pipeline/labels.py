"""Labels added to a bundle, removed and changed, by hand or from files: a new bundle, and nothing is trained."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unidec.config import Params
from unidec.errors import ConfigError
from unidec.pipeline import paths
from unidec.pipeline.registration import parent_version
from unidec.pipeline.registration import register as register_bundle
from unidec.retrieval.bundle import Bundle
from unidec.retrieval.bundle_folder import read_info
from unidec.retrieval.label_change import LabelChange, LabelText
from unidec.retrieval.relabel import with_labels
from unidec.tracking.fetch import fetch_bundle
from unidec.training.precision import choose_device


def change_labels(
    params: Params,
    source: str | os.PathLike[str],
    *,
    add: Sequence[LabelText] = (),
    remove: Sequence[str] = (),
    update: Sequence[LabelText] = (),
    out: str | os.PathLike[str] | None = None,
    register: bool = False,
    dry_run: bool = False,
) -> dict[str, Any]:
    """A bundle with some labels more, fewer or with another text; everything else answers as it did.

    Args:
        params: all parameters; used are the device, and where models are registered.
        source: a bundle's folder, models:/name@alias or models:/name/version; it is not touched.
        add, remove, update: as `LabelChange.edit` takes them.
        out: folder of the new bundle; None: outputs/refreshed.
        register: register it as challenger; the bundle that it comes from must be registered.
        dry_run: only say what would change; nothing is written.

    Returns:
        {"changed", "bundle": folder or None, "labels", "added", "removed", "renamed", "kept", "estimated": labels whose
        classifier rows are estimates, "seconds"}, and with `register` {"model", "version", "alias", "run"} too.

    Raises:
        DataError: labels that do not fit the bundle's; nothing was written.
        ConfigError: no such bundle or version, `out` is the bundle itself, or its origin is not registered.
        ArtifactError: the bundle is damaged, or the new one cannot be written.
    """
    begin = time.perf_counter()
    out = paths.REFRESHED if out is None else Path(out)
    folder = fetch_bundle(source, paths.BUNDLES)
    if folder.resolve() == out.resolve():
        raise ConfigError(
            "a bundle is not changed in place: it may be answering", where="--out", got=str(out),
            fix=f"name another folder: --out {out}-new",
        )  # fmt: skip
    # its hashes are checked once, when the new one is written
    bundle = Bundle.load(folder, verify=dry_run, device=str(choose_device(params.device)))
    if register and not dry_run:
        parent_version(params, bundle.sha256, str(bundle.path))  # before the work, not after it
    change = LabelChange.edit(bundle, add, remove, update)
    said: dict[str, Any] = {"changed": bool(change), "bundle": None, "labels": len(change.uids), **change.counts}
    if not change or dry_run:
        return said | {"seconds": _since(begin)}
    card = bundle.info.card | {"refreshed": {"parent": bundle.sha256, **change.counts}}
    info = read_info(with_labels(bundle, out, change, card=card))
    said |= {"bundle": str(out), "estimated": sum(end - start for start, end in info.estimated)}
    said["seconds"] = _since(begin)
    if register:
        said |= register_bundle(params, out)
    return said


def _since(begin: float) -> float:
    return round(time.perf_counter() - begin, 2)
