"""One peer in the folder of its cell: what it is given lies there, what it predicts is written there.

Shape legend: n queries that are predicted, L labels, K labels to predict (100 and the most filters of a query).
"""

from __future__ import annotations

import importlib.util
import json
import resource
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unidec.comparison.peers.registry import PEERS, check_options, full_options
from unidec.errors import ArtifactError, ConfigError, TrainingError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from unidec.data.dataset import XMCDataset

    Predictions = dict[str, tuple[NDArray[np.int64], NDArray[np.float32]]]

PROGRAMS = {"xr-linear": "xr_linear.py", "plt": "plt.py"}
FILES = {"test": ("labels.npy", "scores.npy"), "validation": ("labels_validation.npy", "scores_validation.npy")}


def run(name: str, folder: str | Path, seed: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Train and predict one peer.

    Args:
        name: one of `NAMES`.
        folder: of the cell. It holds `data/dataset` and `peer.json`: text, max_length, encoder (name, pooling), epochs,
            batch_size, threads, and shared (a folder for features and environments; peers at the same time may share
            it).
        seed: of what is random in it.
        options: of the peer, by name (`info(name).options`), and `train_on`: train, or train+validation.

    Returns:
        Facts: train_seconds, search_ms (a query of the test split), peak_rss_bytes and parameters (None where the
        program does not say), trained_on, version, title, about, options and the like.
        On disk: outputs/labels.npy, int64 [n, K], best first, -1 where there is none, filtered pairs still in; and
        outputs/scores.npy, float32; in the order of the test split's rows. Where the peer was not trained on the
        validation split, labels_validation.npy and scores_validation.npy too. peer.log: what a foreign program says.

    Raises:
        ConfigError: unknown peer or options. ArtifactError: no environment, or no such encoder. DataError: a data set
        that it cannot be trained on. TrainingError: the program fails.
    """
    import numpy as np

    from unidec.data.dataset import XMCDataset

    if name not in PEERS:
        raise ConfigError("no such peer", got=name, expected=f"one of {', '.join(PEERS)}")
    problems = check_options(name, options)
    if problems:
        raise ConfigError("; ".join(problems), where=f"options of {name}")
    if name.startswith("st-") and importlib.util.find_spec("sentence_transformers") is None:
        raise ArtifactError(
            f"{name} requires a package that is not installed",
            got="no sentence_transformers", fix="pip install 'unidec-xmc[bench]'",
        )  # fmt: skip
    folder, chosen = Path(folder), full_options(name, options)
    settings = _settings(folder / "peer.json")
    dataset = XMCDataset.open(folder / "data" / "dataset")
    if name.startswith("st-"):
        from unidec.comparison.peers import sentence

        predictions, facts = sentence.predict(name, dataset, settings["text"], settings, seed, chosen)
    else:
        predictions, facts = _on_features(name, dataset, settings, seed, chosen, folder)
    facts = {"parameters": None, "peak_rss_bytes": _peak_bytes()} | facts
    outputs = folder / "outputs"
    outputs.mkdir(parents=True, exist_ok=True)
    for split, (labels, scores) in predictions.items():
        np.save(outputs / FILES[split][0], labels.astype(np.int64), allow_pickle=False)
        np.save(outputs / FILES[split][1], scores.astype(np.float32), allow_pickle=False)
    by_split = facts.pop("search_ms")
    told = {"title": PEERS[name].title, "about": PEERS[name].about, "trained_on": chosen["train_on"], "seed": seed}
    return told | facts | {"search_ms": by_split["test"], "options": chosen | _of_comparison(facts, chosen)}


def _on_features(
    name: str, dataset: XMCDataset, settings: Mapping[str, Any], seed: int, options: Mapping[str, Any], folder: Path
) -> tuple[Predictions, dict[str, Any]]:
    """Peers that take TF-IDF: the features' seconds count as training."""
    from unidec.comparison.peers.task import peer_task

    shared = (folder / settings["shared"]).absolute()
    task = peer_task(dataset, settings["text"], options["train_on"], shared / "peer-tasks")
    if name in PROGRAMS:
        found, facts = _foreign(name, task, shared / "environments", folder, seed, settings["threads"], options)
    else:
        found, facts = _ours(name, task, options)
    facts["train_seconds"] = round(facts["train_seconds"] + task.seconds, 3)
    return found, facts | {"feature_seconds": task.seconds}


def _ours(name: str, task: Any, options: Mapping[str, Any]) -> tuple[Predictions, dict[str, Any]]:
    import scipy.sparse as sp
    import sklearn

    from unidec.evaluation.tfidf import TfidfRanker

    start = time.perf_counter()
    train_MF, relevance_ML, label_LF = (task.matrix(part) for part in ("X.train", "Y.train", "labels"))
    own = {key: options[key] for key in ("neighbours", "match_weight") if key in options}
    ranker = TfidfRanker(sp.csr_matrix(train_MF.T), relevance_ML, sp.csr_matrix(label_LF.T), **own)
    stored = {"knn": train_MF.nnz + relevance_ML.nnz, "label-match": label_LF.nnz}
    stored["mix"] = sum(stored.values())
    facts: dict[str, Any] = {"train_seconds": time.perf_counter() - start, "parameters": int(stored[name]),
             "search_ms": {}, "version": f"unidec, features of scikit-learn {sklearn.__version__}"}  # fmt: skip
    found = {}
    for split in task.splits:
        x_nF = task.matrix(f"X.{split}")
        start = time.perf_counter()
        found[split] = ranker.rank(x_nF, [name], task.width, f"{PEERS[name].title}, {split}")[name]
        facts["search_ms"][split] = 1000 * (time.perf_counter() - start) / x_nF.shape[0]
    return found, facts


def _foreign(
    name: str, task: Any, environments: Path, folder: Path, seed: int, threads: int, options: Mapping[str, Any]
) -> tuple[Predictions, dict[str, Any]]:
    import scipy.sparse as sp

    from unidec.comparison.peers.environments import install, run_program, versions
    from unidec.evaluation.tfidf import top_rows

    python = install(name, environments)
    made = folder / "peer-output"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    given = {**options, "seed": seed, "threads": threads, "width": task.width, "splits": list(task.splits)}
    program = Path(__file__).parent / "programs" / PROGRAMS[name]
    arguments = [str(task.path), str(made), json.dumps(given)]
    run_program(python, program, arguments, folder / "peer.log", threads, PEERS[name].title)
    try:
        facts = json.loads((made / "facts.json").read_text(encoding="utf-8"))
        predicted = {split: sp.csr_matrix(sp.load_npz(made / f"{split}.npz")) for split in task.splits}
        found = {split: top_rows(matrix, task.width) for split, matrix in predicted.items()}
    except (OSError, ValueError) as error:
        raise TrainingError(
            f"{PEERS[name].title} left no predictions", where=str(folder / "peer.log"), got=str(error)[:200]
        ) from error
    shutil.rmtree(made)
    packages = versions(name, environments)
    main = {"xr-linear": "libpecos", "plt": "napkinxc"}[name]
    return found, facts | {"version": f"{main} {packages[main]}", "environment": packages}


def _settings(path: Path) -> dict[str, Any]:
    """peer.json, whole. Errors: ArtifactError."""
    wanted = {"text", "max_length", "encoder", "epochs", "batch_size", "threads", "shared"}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        missing = wanted - settings.keys()
    except (OSError, ValueError, AttributeError) as error:
        raise ArtifactError("no settings for a peer", where=str(path), got=str(error)[:200]) from error
    if missing:
        raise ArtifactError("settings are missing", where=str(path), got=", ".join(sorted(missing)))
    return settings


def _of_comparison(facts: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Options left to the comparison, as they were."""
    return {key: facts[key] for key, value in chosen.items() if value is None and key in facts}


def _peak_bytes() -> int:
    """Largest memory of this process so far."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
