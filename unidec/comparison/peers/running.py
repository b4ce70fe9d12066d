"""One peer on one data set: its features and texts on disk, what ranks the labels, its predictions.

Shape legend: n queries of a split that is predicted, L labels, F words, K labels of a prediction.
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
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from filelock import FileLock
from numpy.typing import NDArray
from packaging.requirements import Requirement

from unidec.comparison.peers import PEERS
from unidec.data.dataset import Split, Text, XMCDataset
from unidec.data.storage import write_json
from unidec.errors import ArtifactError, DataError, TrainingError
from unidec.evaluation.tfidf import TfidfRanker, fit_words, top_rows

K = 100  # labels that are left after filters
TASK, OUT, LOG = Path("peer-task"), Path("peer-output"), Path("peer.log")
_HEAD = re.compile(r"(?m)^# /// script$\s(?P<text>(^#(| .*)$\s)+)^# ///$")  # as PEP 723 gives it

Predictions = dict[Split, tuple[NDArray[np.int64], NDArray[np.float32]]]


@dataclass(frozen=True)
class Settings:
    """What a peer has in common with the recipes beside it.

    Attributes:
        text, max_length: which texts, and their length in tokens. encoder: its folder. pooling: of a transformer.
        epochs, batch_size, threads: of training. seed: of what is random.
    """

    text: Text
    max_length: int
    encoder: str
    pooling: str
    epochs: int
    batch_size: int
    threads: int
    seed: int


@dataclass(frozen=True)
class PeerOutcome:
    """What a peer predicted, and at which cost.

    Attributes:
        predictions: split -> labels int64 [n, K], best first, -1 where there is none, filtered pairs still in; and
            scores float32. costs: train_seconds, search_ms (a test query), and where known parameters_classifier and
            peak_memory_bytes.
        version: of its package.
    """

    predictions: Predictions
    costs: Mapping[str, float]
    version: str


def run_peer(name: str, dataset: XMCDataset, settings: Settings) -> PeerOutcome:
    """Train one peer on the train split and predict the others, in the working folder.

    A script is started with TASK OUT SETTINGS: the folder that `write_task` wrote, a folder for `<split>.npz` (CSR of
    scores, a row for each query) and facts.json, and a JSON object. Its output goes to `peer.log`.

    Raises:
        DataError: an empty split. ArtifactError: its packages cannot be had. TrainingError: the script fails.
    """
    start = time.perf_counter()
    splits, width = write_task(dataset, settings.text, TASK)
    feature_seconds = time.perf_counter() - start  # the features are part of training
    if PEERS[name].script:
        predictions, facts = _scripted(name, settings, splits, width)
    else:
        predictions, facts = _tfidf(name, splits, width)
    shutil.rmtree(TASK)
    names = {"parameters": "parameters_classifier", "peak_rss_bytes": "peak_memory_bytes"}
    costs: dict[str, float] = {name: facts[key] for key, name in names.items() if key in facts}
    costs |= {"train_seconds": facts["train_seconds"] + feature_seconds, "search_ms": facts["search_ms"]["test"]}
    return PeerOutcome(predictions, costs, facts["version"])


def write_task(dataset: XMCDataset, text: Text, folder: Path) -> tuple[list[Split], int]:
    """Write what a peer is given: features and relevance as .npz (float32 CSR), texts as JSON lists.

    Files: `X.train`, `Y.train`, `X.labels`, `X.<split>`, and the texts of train, labels and each split as .json.
    TF-IDF (sublinear, without English stop words) is fitted on the training queries' texts.

    Returns:
        The splits to predict, and how many labels, so that K are left after filters.

    Raises:
        DataError: no queries to train on or to predict, or texts without a single word.
    """
    parts: tuple[Split, ...] = ("train", "test", "validation")
    rows = {split: dataset.rows(split) for split in parts}
    splits: list[Split] = ["test", "validation"] if rows["validation"].size else ["test"]
    if not rows["train"].size or not rows["test"].size:
        sizes = ", ".join(f"{split}: {len(own)}" for split, own in rows.items())
        raise DataError("an empty split", where=str(dataset.path), got=sizes)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    texts = {"labels": list(dataset.label_texts(None, text))}
    texts |= {split: list(dataset.query_texts(rows[split], text)) for split in parts if len(rows[split])}
    vectorizer, _ = fit_words(texts["train"], str(dataset.path))
    sp.save_npz(folder / "Y.train.npz", (dataset.relevance[rows["train"]] > 0).astype(np.float32))
    for name, lines in texts.items():
        write_json(folder / f"{name}.json", lines)
        sp.save_npz(folder / f"X.{name}.npz", sp.csr_matrix(vectorizer.transform(lines)))
    most = max(int(np.diff(dataset.filter_pairs[rows[split]].indptr).max(initial=0)) for split in splits)
    return splits, min(K + most, dataset.num_labels)


def _tfidf(name: str, splits: list[Split], width: int) -> tuple[Predictions, dict[str, Any]]:
    import sklearn

    start = time.perf_counter()
    train_MF, relevance_ML, label_LF = (
        sp.load_npz(TASK / f"{part}.npz") for part in ("X.train", "Y.train", "X.labels")
    )
    ranker = TfidfRanker(sp.csr_matrix(train_MF.T), relevance_ML, sp.csr_matrix(label_LF.T))
    stored = {"knn": train_MF.nnz + relevance_ML.nnz, "label-match": label_LF.nnz}
    facts: dict[str, Any] = {
        "train_seconds": time.perf_counter() - start, "parameters": stored.get(name, sum(stored.values())),
        "version": f"scikit-learn {sklearn.__version__}", "search_ms": {},
    }  # fmt: skip
    found: Predictions = {}
    for split in splits:
        x_nF = sp.load_npz(TASK / f"X.{split}.npz")
        start = time.perf_counter()
        found[split] = ranker.rank(x_nF, [name], width, f"{name}, {split}")[name]
        facts["search_ms"][split] = 1000 * (time.perf_counter() - start) / x_nF.shape[0]
    return found, facts


def _scripted(name: str, settings: Settings, splits: list[Split], width: int) -> tuple[Predictions, dict[str, Any]]:
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    given = {**asdict(settings), "peer": name, "width": width, "splits": splits}
    command = start_command(Path(__file__).parent / PEERS[name].script)
    run_script([*command, str(TASK.absolute()), str(OUT.absolute()), json.dumps(given)], settings.threads)
    try:
        facts = json.loads((OUT / "facts.json").read_text(encoding="utf-8"))
        found = {split: top_rows(sp.csr_matrix(sp.load_npz(OUT / f"{split}.npz")), width) for split in splits}
    except (OSError, ValueError) as error:
        raise TrainingError(f"{name} left no predictions", where=str(LOG.absolute()), got=str(error)[:200]) from error
    shutil.rmtree(OUT)
    return found, facts


def requirements(script: Path) -> list[Requirement]:
    """The packages that the head of a script names (PEP 723)."""
    found = _HEAD.search(script.read_text(encoding="utf-8"))
    head = tomllib.loads(re.sub(r"(?m)^# ?", "", found["text"])) if found else {}
    return [Requirement(package) for package in head.get("dependencies", [])]


def start_command(script: Path) -> list[str]:
    """How to start a script: by this interpreter where it has all packages, else by `uv run`.

    Raises:
        ArtifactError: packages are missing, and uv cannot be installed.
    """
    try:
        wanted = requirements(script)
        if all(one.specifier.contains(metadata.version(one.name), prereleases=True) for one in wanted):
            return [sys.executable, str(script)]
    except metadata.PackageNotFoundError:
        pass
    return [find_uv(), "run", "--no-progress", "--script", str(script)]


def find_uv() -> str:
    """uv beside this Python or on the path; else from an environment that is made for it, once, in the user's cache.

    Raises:
        ArtifactError: pip cannot install it.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    if uv := shutil.which("uv", path=path):
        return uv
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "unidec", "uv")
    root.parent.mkdir(parents=True, exist_ok=True)
    steps = ([sys.executable, "-m", "venv", "--clear", str(root)], [f"{root}/bin/python", "-m", "pip", "install", "uv"])
    with FileLock(f"{root}.lock"):
        for step in () if (root / "bin" / "uv").is_file() else steps:
            done = subprocess.run(step, capture_output=True, text=True, check=False)
            if done.returncode:
                raise ArtifactError(
                    "uv, which installs a peer's packages, cannot be installed", where=str(root),
                    got=done.stderr.strip()[-400:], fix="pip install uv; or leave this peer out",
                )  # fmt: skip
    return str(root / "bin" / "uv")


def run_script(command: Sequence[str], threads: int) -> None:
    """Run a peer's script in this process's group: whoever ends the group ends it too.

    Raises:
        TrainingError: it fails; with the end of its log.
    """
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    kept |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    with open(LOG, "wb") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=kept, check=False).returncode
    if code:
        raise TrainingError("the peer's script failed", where=str(LOG), got=f"exit code {code}: {last_lines(LOG)}")


def last_lines(log: Path) -> str:
    """The end of a log, in one line."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    return " | ".join(line.strip() for line in lines[-8:] if line.strip())[-800:]
