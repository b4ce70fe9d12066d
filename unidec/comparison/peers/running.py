"""Runs one peer on one data set: features and texts on disk, ranking of labels, predictions.

Shape legend: n test queries, L labels, F words, K labels of a prediction.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray
from packaging.requirements import Requirement

from unidec.comparison.peers import PEERS
from unidec.data.dataset import Text, XMCDataset
from unidec.data.raw import SPLITS
from unidec.data.storage import read_json, write_json
from unidec.errors import ArtifactError, DataError, TrainingError
from unidec.evaluation.baselines import fit_words, rank, top_rows, width_of

Floats = NDArray[np.float32]
TASK = Path("peer-task")
OUT = Path("peer-output")
LOG = Path("peer.log")
_HEAD = re.compile(r"(?m)^# /// script$\s(?P<text>(^#(| .*)$\s)+)^# ///$")  # as PEP 723 gives it


def run_peer(
    name: str,
    dataset: XMCDataset,
    settings: Mapping[str, Any],
    vectors: Mapping[str, Floats] | None = None,
) -> tuple[NDArray[np.int64], dict[str, Any]]:
    """Train one peer on the train split and predict the test split, in the working folder.

    A script is started with TASK OUT SETTINGS: the folder that `write_task` wrote, a folder for
    test.npz (CSR of scores, a row for each query) and facts.json, and a JSON object. Its output
    goes to `peer.log`.

    Args:
        settings: those that it shares with the recipes: "text", "max_length" (tokens), "encoder"
            (its folder), "pooling", "epochs", "batch_size", "threads", "seed".
        vectors: unit vectors of all "queries" and "labels", float32 [., D], concatenated with the
            TF-IDF features.

    Returns:
        labels [n, width] for the test split, best first, padded with -1, filtered pairs included;
        and facts: train_seconds, search_ms (per query), parameters, version (of its package) and,
        for a script, peak_memory_bytes.

    Raises:
        DataError: an empty split. ArtifactError: its packages cannot be installed. TrainingError:
        the script fails.
    """
    start = time.perf_counter()
    texts, matrices, width = features(dataset, settings["text"], vectors)
    feature_seconds = time.perf_counter() - start  # the features are part of training
    if PEERS[name].script:
        write_task(texts, matrices, TASK)
        labels, facts = _scripted(name, settings, width)
        shutil.rmtree(TASK)
    else:
        labels, facts = _tfidf(name, matrices, width)
    facts["train_seconds"] += feature_seconds
    return labels, facts


def features(
    dataset: XMCDataset, text: Text, vectors: Mapping[str, Floats] | None = None
) -> tuple[dict[str, list[str]], dict[str, sp.csr_matrix], int]:
    """Inputs of a peer: texts of "train", "labels", "test" and, if there are any, "validation";
    their float32 TF-IDF (`fit_words` of the training texts), concatenated with `vectors`, as
    "X.train", ...; relevance as "Y.train" and "Y.validation"; and the number of labels to predict,
    so that K remain after filters.

    Raises:
        DataError: no queries to train on or to predict, or texts without a single word.
    """
    rows: dict[str, NDArray[np.int64]] = {split: dataset.rows(split) for split in SPLITS}
    sizes = {split: len(own) for split, own in rows.items()}
    if not sizes["train"] or not sizes["test"]:
        raise DataError(
            "an empty split",
            where=dataset.path,
            got=sizes,
            expected="training and test queries",
        )
    if not sizes["validation"]:
        del rows["validation"]
    texts = {name: dataset.query_texts(own, text) for name, own in rows.items()}
    texts["labels"] = dataset.label_texts(None, text)
    vectorizer, _ = fit_words(texts["train"], dataset.path)
    matrices = {}
    for name, lines in texts.items():
        words = sp.csr_matrix(vectorizer.transform(lines))
        if vectors is not None:
            beside = vectors["queries"][rows[name]] if name in rows else vectors["labels"]
            words = sp.hstack([words, beside], format="csr")
        matrices[f"X.{name}"] = words
    for name, own in rows.items():
        if name != "test":
            matrices[f"Y.{name}"] = (dataset.relevance[own] > 0).astype(np.float32)
    return texts, matrices, width_of(dataset.filter_pairs[rows["test"]])


def write_task(
    texts: Mapping[str, list[str]], matrices: Mapping[str, sp.csr_matrix], folder: Path
) -> None:
    """Write texts as JSON lists, matrices as .npz."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, lines in texts.items():
        write_json(folder / f"{name}.json", lines)
    for name, matrix in matrices.items():
        sp.save_npz(folder / f"{name}.npz", matrix)


def _tfidf(
    name: str, matrices: Mapping[str, sp.csr_matrix], width: int
) -> tuple[NDArray[np.int64], dict[str, Any]]:
    import sklearn

    start = time.perf_counter()
    labels = rank(
        train_MF=matrices["X.train"],
        relevance_ML=matrices["Y.train"],
        label_LF=matrices["X.labels"],
        query_nF=matrices["X.test"],
        methods=[name],
        width=width,
        desc=name,
    )[name]
    seconds = time.perf_counter() - start
    votes = matrices["X.train"].nnz + matrices["Y.train"].nnz
    match = matrices["X.labels"].nnz
    stored = {"knn": votes, "label-match": match, "mix": votes + match}
    return labels, {
        "train_seconds": 0.0,
        "search_ms": 1000 * seconds / len(labels),
        "parameters": stored[name],
        "version": f"scikit-learn {sklearn.__version__}",
    }


def _scripted(
    name: str, settings: Mapping[str, Any], width: int
) -> tuple[NDArray[np.int64], dict[str, Any]]:
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    script = Path(__file__).parent / PEERS[name].script
    given = json.dumps({**settings, "peer": name, "width": width})
    arguments = [str(TASK.absolute()), str(OUT.absolute()), given]
    run_script([*start_command(script), *arguments], settings["threads"])
    try:
        facts = read_json(OUT / "facts.json")
        scores = sp.csr_matrix(sp.load_npz(OUT / "test.npz"))
    except (OSError, ValueError) as error:
        raise TrainingError(
            f"the peer {name} ended without readable predictions",
            where=LOG.absolute(),
            got=error,
            fix="read this log, then run it again",
        ) from error
    shutil.rmtree(OUT)
    return top_rows(scores, width), facts


def requirements(script: Path) -> list[Requirement]:
    """The packages declared in a script's header (PEP 723)."""
    found = _HEAD.search(script.read_text(encoding="utf-8"))
    if found is None:
        return []
    head = tomllib.loads(re.sub(r"(?m)^# ?", "", found["text"]))
    return [Requirement(package) for package in head.get("dependencies", [])]


def start_command(script: Path) -> list[str]:
    """The command that starts a script: this interpreter if it has all packages, else `uv run`.

    Raises:
        ArtifactError: packages are missing, and there is no uv.
    """
    if all(map(_is_installed, requirements(script))):
        return [sys.executable, str(script)]
    beside = str(Path(sys.executable).parent)
    uv = shutil.which("uv", path=os.pathsep.join([beside, os.environ.get("PATH", "")]))
    if uv is None:
        raise ArtifactError(
            "no uv, which installs a peer's packages",
            where=script.name,
            fix="pip install uv; or leave this peer out",
        )
    return [uv, "run", "--no-progress", "--script", str(script)]


def _is_installed(package: Requirement) -> bool:
    try:
        version = metadata.version(package.name)
    except metadata.PackageNotFoundError:
        return False
    return package.specifier.contains(version, prereleases=True)


def run_script(command: Sequence[str], threads: int) -> None:
    """Run a peer's script in this process's group, so that it ends with the group.

    Raises:
        TrainingError: the script fails; the message has the end of its log.
    """
    threaded = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("PYTHON", "VIRTUAL_ENV"))
    }
    kept |= dict.fromkeys(threaded, str(threads))
    with open(LOG, "wb") as log:
        ended = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=kept, check=False)
    if ended.returncode:
        raise TrainingError(
            "the peer's script failed",
            where=LOG.absolute(),
            got=f"exit code {ended.returncode}: {last_lines(LOG)}",
            fix="read this log, then run it again",
        )


def last_lines(log: Path) -> str:
    """The end of a log, in one line."""
    if not log.is_file():
        return ""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    last = filter(None, map(str.strip, lines[-8:]))
    return " | ".join(last)[-800:]
