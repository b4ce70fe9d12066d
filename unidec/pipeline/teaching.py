"""Opens the teacher of a training (`teacher.bundle`). Its vectors of the training texts are kept in
data/cache.

Legend: N queries of the data set, n training texts, E width of the teacher's space.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np

from unidec.bundle.bundle import Bundle
from unidec.bundle.bundle_folder import read_heads, read_info
from unidec.config import Params
from unidec.data.dataset import Text, XMCDataset
from unidec.data.storage import files_sha256, load_array, read_manifest, verify_once, write_folder
from unidec.errors import ConfigError
from unidec.methods.teacher import TeacherVectors
from unidec.pipeline import paths
from unidec.progress import progress
from unidec.training.precision import choose_device

KIND = "teacher-cache"
VERSION = 1
TEXTS_AT_ONCE = 4096


def open_teacher(params: Params) -> TeacherVectors | None:
    """The teacher, memory-mapped; None if `teacher.bundle` is empty.

    Raises:
        ArtifactError: there is no bundle, or a damaged one.
        ConfigError: its labels are not those of the data set.
    """
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
    folder = paths.CACHE / f"teacher-{files_sha256(decide)[:16]}"
    if not folder.is_dir():
        with write_folder(folder, KIND, VERSION) as out:
            np.save(out.path / "queries.npy", _encode(bundle, dataset, rows_n))
    with verify_once(folder) as needed:
        read_manifest(folder, KIND, VERSION, verify=needed)
    query_nE = load_array(folder / "queries.npy", np.float16, ndim=2)
    return TeacherVectors(rows_n, query_nE, bundle.ranker.heads.take)


def teacher_width(bundle: str) -> int:
    """E, the width of the space of a teacher's bundle; 0 for no teacher."""
    if not bundle:
        return 0
    heads = read_heads(Path(bundle), read_info(Path(bundle)), verify=False)
    return heads.take(slice(0, 1)).shape[1]


def unread_teacher(bundle: str, num_queries: int) -> TeacherVectors | None:
    """A teacher without values, for a step whose memory is measured; None for no teacher."""
    width = teacher_width(bundle)
    if not width:
        return None
    return TeacherVectors(
        np.arange(num_queries),
        np.zeros((num_queries, width), dtype=np.float16),
        lambda labels_S: np.zeros((len(labels_S), width), dtype=np.float32),
    )


def _encode(bundle: Bundle, dataset: XMCDataset, rows_n: np.ndarray) -> np.ndarray:
    """The teacher's vectors of training texts, float16 [n, E]."""
    text = cast(Text, bundle.info.text)
    num_queries = dataset.num_queries
    blocks = []
    for start in progress(range(0, len(rows_n), TEXTS_AT_ONCE), desc="teacher", unit="block"):
        rows = rows_n[start : start + TEXTS_AT_ONCE]
        texts = dataset.query_texts(rows[rows < num_queries], text)
        texts += dataset.label_texts(rows[rows >= num_queries] - num_queries, text)
        encoded = bundle.encode(texts)
        query_BE = bundle.ranker.heads.queries(encoded.de_BD, encoded.clf_BD)
        blocks.append(query_BE.astype(np.float16))
    return np.concatenate(blocks)
