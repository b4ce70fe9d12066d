"""The identity of a training run: parameters, data, tokenizer and code as a flat dictionary of
strings.

The run's folder is named by it, every checkpoint contains it, and a run resumes only if it is
unchanged."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix

from unidec.code import code_sha256
from unidec.config import keys_deciding, value_at, what_decides
from unidec.data import tokens
from unidec.data.dataset import XMCDataset
from unidec.data.storage import folder_sha256, manifest_sha256, read_manifest
from unidec.data.tokens import TokenCache
from unidec.errors import ConfigError
from unidec.model.weights import start_sha256


def run_identity(
    parameters: Mapping[str, Any],
    dataset: XMCDataset,
    query_tokens: TokenCache,
    label_tokens: TokenCache,
    start: str | None = None,
    label_graph: csr_matrix | None = None,
) -> dict[str, str]:
    """The identity of a run: everything that affects the trained model.

    Args:
        parameters: all, or those that decide a result, as plain values by section.
        start: hash of the bundle from which a warm start begins.

    Returns:
        `{"optim.lr_clf": "0.003", ...}` (values as JSON), and sha256 as "data", "tokens.queries",
        "tokens.labels", "tokenizer" and "code", and as "encoder.start", "teacher.bundle", "start"
        and "label_graph" if the run uses them.

    Raises:
        ArtifactError: there is no model at `encoder.start`, or no bundle at `teacher.bundle`.
    """
    pool = parameters["pool"]
    reads_graph = pool["gandalf"] or parameters["model"]["clf_graph"]
    keys = keys_deciding("tokens", "training")
    if reads_graph:
        keys += keys_deciding("label_graph")
    weights = parameters["loss"]["weights"]
    if weights == "propensity" or pool["positives"] == "tail":
        keys += keys_deciding("propensity")
    identity = {key: json.dumps(value_at(parameters, key)) for key in keys}
    if parameters["encoder"]["start"]:  # the hash of its content replaces the path
        identity["encoder.start"] = start_sha256(parameters["encoder"]["start"])
    if teacher := value_at(parameters, "teacher.bundle"):  # likewise
        identity["teacher.bundle"] = folder_sha256(teacher)
    if start is not None:  # the other keys of `warm` are in `optim` already
        identity["start"] = start
        identity["warm.keep"] = json.dumps(parameters["warm"]["keep"])
    identity["data"] = dataset.sha256
    for name, cache in (("queries", query_tokens), ("labels", label_tokens)):
        manifest = read_manifest(cache.path, tokens.KIND, tokens.VERSION, verify=False)
        identity[f"tokens.{name}"] = manifest_sha256(manifest)
    identity["tokenizer"] = str(query_tokens.meta.get("tokenizer_sha256"))
    deciding = ["training"]
    if value_at(parameters, "teacher.words"):  # the code that ranks computes the targets
        deciding.append("index")
    identity["code"] = code_sha256(*deciding)
    if reads_graph and label_graph is not None:
        digest = hashlib.sha256()
        for array in (label_graph.indptr, label_graph.indices, label_graph.data):
            digest.update(f"{array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
        identity["label_graph"] = digest.hexdigest()
    return identity


def differences(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """One line for each key that differs, such as "optim.lr_clf: 0.003 when the run began, 0.001
    now".
    """
    return list(_differences(old, new).values())


def _differences(old: Mapping[str, str], new: Mapping[str, str]) -> dict[str, str]:
    lines = {}
    for key in {**new, **old}:
        before = old.get(key)
        now = new.get(key)
        if before != now:
            lines[key] = f"{key}: {_short(before)} when the run began, {_short(now)} now"
    return lines


def check_same(
    old: Mapping[str, str], new: Mapping[str, str], accepted: Collection[str], where: str
) -> None:
    """Raise ConfigError if the run in the folder `where` must not be resumed: it lists all keys
    that differ and are not accepted. `old` is empty if the run has no checkpoint yet."""
    lines = _differences(old, new) if old else {}
    changed = [key for key in lines if key not in accepted]
    if changed:
        kinds = ["parameters" if key in what_decides() else key for key in changed]
        accept = " ".join(f"--accept {key}" for key in changed)
        raise ConfigError(
            f"the run was started with other {', '.join(dict.fromkeys(kinds))}",
            where=where,
            got="\n       ".join(lines[key] for key in changed),
            fix=f"undo the change, or resume with it ({accept}), or train in another folder",
        )


def _short(value: str | None) -> str:
    if value is None:
        return "nothing"
    is_hash = re.fullmatch("[0-9a-f]{64}", value)
    return f"{value[:12]}..." if is_hash else value
