"""Which code decides which result, and its hash without comments, docstrings and layout.

A result is out of date if the code that decides it does something else, not if it is explained
better."""

from __future__ import annotations

import ast
import functools
import hashlib
from pathlib import Path
from typing import Any

from unidec.version import PACKAGE

DECIDED_BY: dict[str, tuple[str, ...]] = {
    # results of the pipeline, by the names that parameters use (`unidec.config.Result`)
    "data": ("data",),
    "checks": ("validation",),
    "tokens": ("data/tokens.py", "data/token_shards.py"),
    "propensity": ("data/propensity.py",),
    "label_graph": ("data/label_graph.py",),
    "training": ("model", "methods", "training", "data/chunks.py", "pipeline/seen.py"),
    "index": (
        "config/index_spec.py",
        "ranking",
        "bundle",
        "model/onnx_export.py",
        "data/profile.py",
        "evaluation/drift.py",
        "pipeline/indexing.py",
        "pipeline/ranking.py",
    ),
    "evaluation": ("evaluation", "metric_names.py", "pipeline/evaluation.py"),
    # results of comparisons
    "metrics": ("evaluation/metrics.py", "pipeline/evaluation.py"),
    "peers": ("comparison/peers", "evaluation/baselines.py"),
}
"""Files and folders of the package. What only calls them (`cli`, `flows`, most of `pipeline`)
decides nothing.
"""


@functools.cache  # the code that this process runs, even if a file is edited meanwhile
def code_sha256(*results: str) -> str:
    """sha256 (hex) of the code that decides these results: modules by their syntax trees, other
    files by content.
    """
    digest = hashlib.sha256()
    for file in code_files(*results):
        digest.update(f"{file.relative_to(PACKAGE).as_posix()}\0".encode())
        content = file.read_bytes()
        digest.update(tree_text(content).encode() if file.suffix == ".py" else content)
    return digest.hexdigest()


def code_files(*results: str) -> list[Path]:
    """The files that decide these results, sorted."""
    found: set[Path] = set()
    for result in results:
        for name in DECIDED_BY[result]:
            found |= {PACKAGE / name, *(PACKAGE / name).rglob("*")}
    return sorted(file for file in found if file.is_file() and "__pycache__" not in file.parts)


@functools.cache  # a file may decide several results
def tree_text(source: bytes) -> str:
    """A module's syntax tree as text, without docstrings and empty fields.

    It is the same for all versions of Python, unlike `ast.dump`, which writes fields that older
    versions lack."""
    parts: list[str] = []
    _write(ast.parse(source), parts)
    return "".join(parts)


def _write(node: Any, parts: list[str]) -> None:
    if isinstance(node, ast.AST):
        parts.append(f"{type(node).__name__}(")
        for name in node._fields:
            value = getattr(node, name, None)
            if value is not None and value != [] and name != "kind":
                parts.append(f"{name}=")
                _write(value, parts)
        parts.append(")")
    elif isinstance(node, list):
        for entry in node:
            if isinstance(entry, ast.Expr) and isinstance(entry.value, ast.Constant):
                continue  # a docstring: a constant alone does nothing
            _write(entry, parts)
            parts.append(",")
    else:
        parts.append(repr(node))
