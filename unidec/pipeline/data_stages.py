"""The data stages: from raw files to the folders that training reads."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from unidec.config import Params, Source
from unidec.data.dataset import write_dataset
from unidec.data.formats import find_rows, read_section
from unidec.data.label_graph import build_label_graph, load_label_graph
from unidec.data.propensity import build_propensity, load_propensity
from unidec.data.spool import naming_space
from unidec.data.storage import file_sha256, files_sha256, read_json, swap_folder
from unidec.data.token_shards import tokenise
from unidec.data.tokens import TokenCache, encode_texts
from unidec.errors import ConfigError, DataError
from unidec.model.arrays import MAX_BYTES
from unidec.model.encoder_folder import read_encoder_folder, resolved
from unidec.model.sources import (
    check_positions,
    check_static,
    is_static,
    num_weights,
    resolve_encoder,
)
from unidec.pipeline import paths
from unidec.pipeline.encoders import ARCHITECTURES
from unidec.pipeline.lock import replaces_inputs
from unidec.tracking.repository import git

log = logging.getLogger(__name__)
_TABLE = re.compile(r"\.(csv|tsv|parquet|jsonl)(\.gz)?$")


@dataclass(frozen=True)
class Validated:
    """A data set that passed validation: the number of expectations, numbered warnings, and the
    report's path.
    """

    success: bool
    expectations: int
    warnings: dict[int, str]
    page: str


@dataclass(frozen=True)
class Fetched:
    """Result of `fetch`: whether files were copied and why, the paths of the source, and one sha256
    of all its files.
    """

    changed: bool
    source: str
    sha256: str
    reason: str


@replaces_inputs()
def ingest(params: Params) -> dict[str, str | int]:
    """Read raw files of any supported layout into data/dataset, and split off validation queries.

    Returns:
        the data set's name, format, sizes and hash.
    """
    data = params.data
    scratch = paths.DATASET.parent
    scratch.mkdir(parents=True, exist_ok=True)
    files = _listed(Path(data.path))
    with naming_space(paths.DATASET, sum(map(os.path.getsize, files.values()))):
        raw = read_section(params.data, params.raw, scratch)
        dataset = write_dataset(
            paths.DATASET, raw, validation_share=data.validation_share, split_seed=data.split_seed
        )
    meta = dataset.manifest["meta"]
    facts = {key: meta[key] for key in ("name", "format", "num_labels", "num_pairs")}
    return {**facts, **meta["splits"], "sha256": dataset.sha256}


def validate(params: Params) -> Validated:
    """Check the data set with Great Expectations before training; writes data/validation.

    Raises:
        DataError: an expectation of severity "critical" failed.
    """
    from unidec.validation.facts import Reading
    from unidec.validation.suite import validate_dataset

    def find(queries: list[str], labels: list[str]) -> tuple[dict[str, str], dict[str, str]]:
        files = paths.open_dataset().manifest["meta"]["raw_files"]
        return find_rows(params.data, params.raw, files, queries, labels)

    tokens = params.tokens
    name = params.encoder.name
    reading = Reading(tokens.text, resolve_encoder(name), tokens.max_length, name)
    result = validate_dataset(
        paths.DATASET,
        paths.VALIDATION,
        limits=params.validation,
        find=find,
        reading=reading,
    )
    page = str(paths.VALIDATION / "index.html")
    if not result["success"]:
        raise DataError(
            "data validation failed",
            where=page,
            got="\n    ".join(["", *result["failed"]]),
            fix="correct the rows; or raise the bound that is named, or set it to warn, in section "
            "validation of the parameters. Nothing was trained",
        )
    return Validated(
        True, len(result["expectations"]), dict(enumerate(result["warnings"], 1)), page
    )


@replaces_inputs()
def tokens(params: Params) -> dict[str, int]:
    """Tokenise the texts into data/tokens/{queries,labels}; returns the numbers of texts and tokens
    of both.
    """
    dataset = paths.open_dataset()
    section = params.tokens
    summary: dict[str, int] = {}
    folder = checked_encoder(params)
    encoder = resolved(params.encoder, folder)
    prompts = {"queries": encoder.query_prompt, "labels": encoder.label_prompt}
    made = {"max_length": section.max_length, "meta": {"text": section.text}}
    for which, prompt in prompts.items():
        path = paths.TOKENS / which
        tokenise(dataset, which, path, folder, made | {"prompt": prompt})
        meta = TokenCache.open(path, verify=False).meta
        summary |= {f"{which}_{what}": meta[f"num_{what}"] for what in ("texts", "tokens")}
    return summary


def checked_encoder(params: Params) -> Path:
    """The folder of the encoder in section `encoder`, after checks.

    Raises:
        ConfigError: the transformer has too few positions for `tokens.max_length`, a prompt leaves
            no room for texts, or the folder requires something unsupported, such as its own code.
    """
    folder = resolve_encoder(params.encoder.name)
    check_static(folder, params.encoder)
    if is_static(folder) or not params.encoder.has_transformer:
        return folder
    length = params.tokens.max_length
    most = min(length, params.encoder.transformer_tokens or length)
    check_positions(folder, most)
    config = read_json(folder / "config.json")
    if "auto_map" in config:
        from unidec.model.encoder import transformer_config  # imports torch

        transformer_config(folder)
    if config.get("model_type") not in ARCHITECTURES:
        log.warning("%s is not among the tested architectures (unidec encoders)", folder)
    if 4 * num_weights(folder) > MAX_BYTES:
        log.warning("%s is too large for an ONNX file: torch will encode queries", folder)
    made_for = read_encoder_folder(folder).max_length
    if 0 < made_for < most:
        log.warning("%s was made for texts of %d tokens, not %d", folder, made_for, most)
    settings = resolved(params.encoder, folder)
    for key in ("query_prompt", "label_prompt"):
        if prompt := getattr(settings, key):
            _check_prompt(params, prompt, f"encoder.{key}", folder, most)
    return folder


def _check_prompt(params: Params, prompt: str, key: str, folder: Path, most: int) -> None:
    """Raise ConfigError if a prompt does not leave room for a text, or cannot be used."""
    num_tokens = int(encode_texts([prompt], folder, len(prompt) + 64).lengths()[0])
    if num_tokens >= most:
        raise ConfigError(
            "the prompt leaves no room for a text",
            where=key,
            got=f"{prompt[:60]!r}: {num_tokens} tokens",
            expected=f"fewer than {most}",
            fix="a shorter prompt, or a larger tokens.max_length or encoder.transformer_tokens",
        )
    if params.loss.synonyms > 0:
        raise ConfigError(
            "synonyms replace tokens of texts without a prompt",
            where=key,
            got=prompt[:60],
            fix=f'loss.synonyms: 0, or {key}: ""',
        )


@replaces_inputs()
def propensity(params: Params) -> dict[str, float]:
    """Write inverse propensities and frequency groups to data/propensity; returns A, B and each
    group's label count.
    """
    build_propensity(
        paths.open_dataset(), params.data.propensity_a, params.data.propensity_b, paths.PROPENSITY
    )
    written = load_propensity(paths.PROPENSITY, verify=False)
    groups = {f"{group}_labels": num for group, num in written.group_sizes.items()}
    return {"a": written.a, "b": written.b, **groups}


@replaces_inputs()
def label_graph(params: Params) -> dict[str, int]:
    """Write the soft targets of label texts to data/label_graph.

    Returns:
        the numbers of labels, of label texts with targets, and of targets ("edges").
    """
    build_label_graph(paths.open_dataset(), params.label_graph, paths.LABEL_GRAPH)
    graph = load_label_graph(paths.LABEL_GRAPH)
    texts = np.count_nonzero(np.diff(graph.indptr))
    return {"labels": graph.shape[0], "texts": int(texts), "edges": int(graph.nnz)}


def fetch(params: Params) -> Fetched:
    """Copy `source.path`, or the three source files, to `data.path` if the contents differ.

    The copy is written to a temporary folder, checked against the source's hashes and swapped in:
    readers of `data.path` see either the old or the new content, even if this process is killed.
    For `source.kind: dvc` nothing is done here: flows/reproduce.py fetches it.

    Raises:
        DataError: the source is missing, empty or unreadable, or it changed while it was copied.
        ConfigError: git tracks `data.path`, so that a fetch would edit the repository.
    """
    source = params.source
    target = Path(params.data.path)
    files = source_files(source)
    if not files:
        return Fetched(False, source.kind, "", "nothing is fetched by this stage")
    shown = source.path if source.kind == "folder" else ", ".join(map(str, files.values()))
    hashes = _hashes(files)
    sha256 = files_sha256(hashes)
    if _hashes(_listed(target)) == hashes:
        return Fetched(False, shown, sha256, f"{target} already has these {len(files)} files")
    if git(".", "ls-files", "--", str(target)):
        raise ConfigError(
            "git tracks this folder, and a fetch would replace it",
            where="data.path",
            got=str(target),
            expected="a folder that git ignores",
            fix="data.path: data/incoming (all of data/ but data/raw is ignored)",
        )
    num_bytes = sum(map(os.path.getsize, files.values()))
    with swap_folder(target, num_bytes=num_bytes) as folder:
        for name, path in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / name)
            if file_sha256(folder / name) != hashes[name]:
                raise DataError(
                    "the source changed while it was copied",
                    where=path,
                    fix=f"run again when the export is complete; {target} was not changed",
                )
    return Fetched(True, shown, sha256, f"copied {len(files)} files to {target}")


def source_files(source: Source) -> dict[str, Path]:
    """The files that `fetch` copies, by their names in `data.path`; {} for kinds "none" and "dvc".

    Raises:
        DataError: the folder has no files. ConfigError: not a supported table file.
    """
    if source.kind in ("none", "dvc"):
        return {}
    files = _listed(Path(source.path)) if source.kind == "folder" else _tables(source)
    if not files:
        raise DataError(
            "no files found",
            where=source.path,
            fix="mount it, wait for the export, or correct source.path",
        )
    return files


def _listed(root: Path) -> dict[str, Path]:
    """The files of a folder by their relative names, without hidden ones."""
    files = {path.relative_to(root): path for path in sorted(root.rglob("*")) if path.is_file()}
    return {
        name.as_posix(): path
        for name, path in files.items()
        if not any(p.startswith(".") for p in name.parts)
    }


def _tables(source: Source) -> dict[str, Path]:
    """The three source files, by the names that the format `tables` expects."""
    files = {}
    for stem in ("queries", "labels", "pairs"):
        path = Path(getattr(source, stem))
        if (ending := _TABLE.search(path.name.lower())) is None:
            raise ConfigError(
                "not a supported table file",
                where=f"source.{stem}",
                got=str(path),
                expected=".csv .tsv .parquet .jsonl, also with .gz",
            )
        files[f"{stem}{ending[0]}"] = path
    return files


def _hashes(files: Mapping[str, Path]) -> dict[str, str]:
    hashes = {}
    for name, path in files.items():
        try:
            hashes[name] = file_sha256(path)
        except OSError as error:
            raise DataError(
                "cannot be read",
                where=path,
                got=str(error),
                fix="mount or export it, or correct section source; nothing was trained",
            ) from error
    return hashes
