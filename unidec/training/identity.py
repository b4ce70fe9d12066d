"""What makes a training the one it is: parameters, data, tokenizer and code, as flat texts that can be compared.

A run's folder is named by it, every checkpoint carries it, and a run is gone on with only under the same one.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Collection, Mapping

import numpy as np
from scipy.sparse import csr_matrix

from unidec.config import Params, leaves
from unidec.data import tokens
from unidec.data.dataset import XMCDataset
from unidec.data.storage import files_sha256, read_manifest
from unidec.data.tokens import TokenCache
from unidec.errors import ConfigError
from unidec.model.weights import start_sha256
from unidec.training.needs import weighs_by_propensity
from unidec.version import PACKAGE

# the sections that decide what is learnt; the others say where it runs, how it is shown or served
SECTIONS = ("seed", "tokens", "encoder", "model", "pool", "loss", "optim")


def run_identity(
    params: Params,
    dataset: XMCDataset,
    query_tokens: TokenCache,
    label_tokens: TokenCache,
    start: str | None = None,
    label_graph: csr_matrix | None = None,
) -> dict[str, str]:
    """All that decides what a training becomes.

    Args:
        start: hash of the bundle that a warm start continues from.
        label_graph: soft targets, which count where `pool.gandalf` uses them.

    Returns:
        `{"optim.lr_clf": "0.003", ...}` (values as JSON), and sha256 as "data", "tokens.queries", "tokens.labels",
        "tokenizer" and "code", and as "encoder.start", "start" and "label_graph" where there is one.

    Raises:
        ArtifactError: there is no model where `encoder.start` says.
    """
    sections = (*SECTIONS, "label_graph") if params.pool.gandalf else SECTIONS
    keys = ("data.propensity_a", "data.propensity_b") if weighs_by_propensity(params) else ()
    identity = {k: json.dumps(v) for k, v in leaves(params) if k.partition(".")[0] in sections or k in keys}
    if params.encoder.start:  # by content, wherever it lies
        identity["encoder.start"] = start_sha256(params.encoder.start)
    if start is not None:
        identity |= {"start": start, "warm.keep": json.dumps(params.warm.keep)}
    identity["data"] = dataset.sha256
    for name, cache in (("queries", query_tokens), ("labels", label_tokens)):
        files = read_manifest(cache.path, tokens.KIND, tokens.VERSION, verify=False)["files"]
        identity[f"tokens.{name}"] = files_sha256({name: entry["sha256"] for name, entry in files.items()})
    identity["tokenizer"] = str(query_tokens.meta.get("tokenizer_sha256"))
    identity["code"] = code_sha256()
    if params.pool.gandalf and label_graph is not None:
        identity["label_graph"] = _matrix_sha256(label_graph)
    return identity


def _matrix_sha256(matrix: csr_matrix) -> str:
    digest = hashlib.sha256()
    for array in (matrix.indptr, matrix.indices, matrix.data):
        digest.update(f"{array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def identity_sha256(identity: Mapping[str, str]) -> str:
    """One hash of an identity, whatever the order of its keys."""
    return files_sha256(identity)


@functools.cache  # what this process runs, also when a file is edited meanwhile
def code_sha256() -> str:
    """Of the modules that decide what a training becomes."""
    root = PACKAGE
    digest = hashlib.sha256()
    for file in sorted([*(root / "model").rglob("*.py"), *(root / "training").rglob("*.py")]):
        digest.update(file.relative_to(root).as_posix().encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def differences(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """One line a key that differs: "optim.lr_clf: 0.003 when the run began, 0.001 now"."""
    return [
        f"{key}: {_short(old.get(key))} when the run began, {_short(new.get(key))} now"
        for key in _differing(old, new)
    ]  # fmt: skip


def check_same(old: Mapping[str, str], new: Mapping[str, str], accepted: Collection[str], where: str) -> None:
    """Refuse to go on with a run under another identity.

    Args:
        old: as the checkpoint has it; empty for one of version 1, which has none (its folder's name says it).
        new: as it is now.
        accepted: keys that may differ.
        where: the run's folder.

    Raises:
        ConfigError: lists every key that differs.
    """
    changed = [key for key in _differing(old, new) if key not in accepted] if old else []
    if not changed:
        return
    lines = differences({key: old[key] for key in changed if key in old}, {k: new[k] for k in changed if k in new})
    accept = " ".join(f"--accept {key}" for key in changed)
    raise ConfigError(
        "the run was begun with other " + _kinds(changed), where=where, got="\n       ".join(lines),
        fix=f"put it back as it was, or go on all the same ({accept}), or train anew in another folder",
    )  # fmt: skip


def _differing(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    return [key for key in dict.fromkeys([*new, *old]) if old.get(key) != new.get(key)]


def _kinds(changed: list[str]) -> str:
    """What the keys are, in words: "parameters, data"."""
    words = {"data": "data", "tokens.queries": "texts' tokens", "tokens.labels": "texts' tokens",
             "label_graph": "label graph", "tokenizer": "tokenizer", "code": "code",
             "start": "model to start from"}  # fmt: skip
    return ", ".join(dict.fromkeys(words.get(key, "parameters") for key in changed))


def _short(value: str | None) -> str:
    if value is None:
        return "nothing"
    return f"{value[:12]}..." if re.fullmatch("[0-9a-f]{64}", value) else value
