"""Opens the teacher of a training (section `teacher`). Its vectors of the training texts, or its
label probabilities by words, are cached in data/cache.

Legend: N queries of the data set, n training texts, E width of the teacher's space, L labels, P
pairs of a query and a label.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import scipy.sparse as sp

from unidec.bundle.bundle import Bundle
from unidec.bundle.bundle_folder import read_heads, read_info
from unidec.code import code_sha256
from unidec.config import Params, Teacher
from unidec.data.array_file import load_csr, write_csr
from unidec.data.chunks import blocks
from unidec.data.dataset import XMCDataset
from unidec.data.storage import (
    files_sha256,
    folder_sha256,
    load_array,
    read_manifest,
    verify_once,
    write_folder,
)
from unidec.errors import ConfigError
from unidec.evaluation.metrics import pair_keys
from unidec.methods.teacher import TeacherVectors
from unidec.methods.word_teacher import WordTargets, unread_targets
from unidec.model.sources import resolve_encoder
from unidec.pipeline import paths
from unidec.pipeline.ranking import word_neighbours
from unidec.progress import progress
from unidec.ranking.fusion import QUERIES_AT_ONCE
from unidec.ranking.fusion_fit import (
    LEAST_WORD_QUERIES,
    fit_word_network,
    words_of_training_queries,
)
from unidec.ranking.word_scores import WordScorer
from unidec.training.precision import choose_device

KIND = "teacher-cache"
VERSION = 1
WORDS_KIND = "word-teacher-cache"
TEXTS_AT_ONCE = 4096
VOTERS = 100  # training queries that vote, as by default in `index.knn_neighbours`
LEAST_PROBABILITY = 1e-4


def open_teacher(params: Params) -> TeacherVectors | WordTargets | None:
    """The teacher, memory-mapped; None if there is none.

    Raises:
        ArtifactError: the teacher's bundle is missing or damaged.
        ConfigError: the bundle's labels differ from those of the data set, or there are too few
            training queries to train the word network.
    """
    if params.teacher.words:
        return _word_targets(params)
    if not params.teacher.bundle:
        return None
    bundle = Bundle.load(params.teacher.bundle, device=str(choose_device(params.device)))
    dataset = paths.open_dataset(verify=False)
    if bundle.uids.to_pylist() != dataset.label_uids():
        raise ConfigError(
            "the teacher has other labels than the data set",
            where="teacher.bundle",
            got=bundle.path,
            expected=f"the labels of {dataset.path}, in their order",
            fix='a teacher trained on this data set, or teacher.bundle: ""',
        )
    rows_n = dataset.rows("train")
    if params.pool.gandalf:  # label texts are queries too
        labels = np.arange(dataset.num_labels)
        rows_n = np.concatenate([rows_n, dataset.num_queries + labels])
    decide = {"bundle": bundle.sha256, "data": dataset.sha256, "texts": str(len(rows_n))}

    def write(out: Path) -> None:
        np.save(out / "queries.npy", _encode(bundle, dataset, rows_n))

    folder = _cached("teacher", KIND, decide, write)
    query_nE = load_array(folder / "queries.npy", np.float16, ndim=2)
    return TeacherVectors(rows_n, query_nE, bundle.ranker.heads.take)


def teacher_width(bundle: str) -> int:
    """E, the width of the space of a teacher's bundle; 0 for no teacher."""
    if not bundle:
        return 0
    folder = Path(bundle)
    return read_heads(folder, read_info(folder), verify=False).shape[1]


def unread_teacher(
    settings: Teacher, num_queries: int, num_labels: int
) -> TeacherVectors | WordTargets | None:
    """A teacher without values, for measuring the memory of a step; None for no teacher."""
    if settings.words:
        return unread_targets(num_queries, num_labels)
    width = teacher_width(settings.bundle)
    if not width:
        return None
    return TeacherVectors(
        np.arange(num_queries),
        np.zeros((num_queries, width), dtype=np.float16),
        lambda labels_S: np.zeros((len(labels_S), width), dtype=np.float32),
    )


def _word_targets(params: Params) -> WordTargets:
    """Label probabilities by words for the training queries: the softmax of a word network's
    scores; values below `LEAST_PROBABILITY` are dropped.
    """
    dataset = paths.open_dataset(verify=False)
    tokens = [paths.open_tokens(which, False).path for which in ("queries", "labels")]
    decide = {
        "data": dataset.sha256,
        "seed": str(params.seed),
        "code": code_sha256("index"),
        **{str(path): folder_sha256(path) for path in tokens},
    }

    def write(out: Path) -> None:
        write_csr(out, "", _probabilities(params, dataset), np.float32)

    folder = _cached("words", WORDS_KIND, decide, write)
    rows_n = dataset.rows("train")
    shape = (len(rows_n), dataset.num_labels)
    return WordTargets(rows_n, load_csr(folder, "", shape, np.float32, check=False))


def _cached(name: str, kind: str, decide: Mapping[str, str], write: Callable[[Path], None]) -> Path:
    """The verified folder of a cache in data/cache, which `write` fills if it does not exist.

    Args:
        decide: hashes and values that determine the content; a part of the folder's name.
    """
    folder = paths.CACHE / f"{name}-{files_sha256(decide)[:16]}"
    if not folder.is_dir():
        with write_folder(folder, kind, VERSION) as out:
            write(out.path)
    with verify_once(folder) as needed:
        read_manifest(folder, kind, VERSION, verify=needed)
    return folder


def _probabilities(params: Params, dataset: XMCDataset) -> Iterator[sp.csr_matrix]:
    """The probabilities for blocks of training queries, CSR float32 [B, L]."""
    neighbours = word_neighbours(dataset, resolve_encoder(params.encoder.name))
    scorer = WordScorer(neighbours, VOTERS)
    num = neighbours.num_queries
    num_labels = dataset.num_labels
    excluded = pair_keys(dataset.filter_pairs[dataset.rows("train")])
    network = fit_word_network(scorer, excluded, params.seed)
    if network is None:
        raise ConfigError(
            "too few training queries to learn how words rank labels",
            where="teacher.words",
            got=num,
            expected=f"at least {LEAST_WORD_QUERIES}",
            fix="teacher.words: false",
        )
    blocks = words_of_training_queries(scorer, np.arange(num), excluded)
    for start, (key_P, feature_PX) in zip(range(0, num, QUERIES_AT_ONCE), blocks, strict=True):
        num_rows = min(QUERIES_AT_ONCE, num - start)
        row_P, label_P = np.divmod(key_P - start * num_labels, num_labels)
        exp_P = np.exp(network.scores(feature_PX))
        sum_B = np.bincount(row_P, exp_P, num_rows)
        probability_P = exp_P / sum_B[row_P]
        probability_P[probability_P < LEAST_PROBABILITY] = 0
        pairs = (row_P, label_P)
        block_BL = sp.csr_matrix((probability_P, pairs), (num_rows, num_labels))
        block_BL.eliminate_zeros()
        yield block_BL


def _encode(bundle: Bundle, dataset: XMCDataset, rows_n: np.ndarray) -> np.ndarray:
    """The teacher's vectors of training texts, float16 [n, E]."""
    text = bundle.info.text
    num_queries = dataset.num_queries
    parts = []
    every = list(blocks(len(rows_n), TEXTS_AT_ONCE))
    for some in progress(every, desc="teacher", unit="block"):
        rows = rows_n[some]
        texts = dataset.query_texts(rows[rows < num_queries], text)
        texts += dataset.label_texts(rows[rows >= num_queries] - num_queries, text)
        encoded = bundle.encode(texts)
        query_BE = bundle.ranker.heads.queries(encoded.de_BD, encoded.clf_BD)
        parts.append(query_BE.astype(np.float16))
    return np.concatenate(parts)
