"""A bundle: one folder with everything needed to answer queries, without the training data or
params.yaml.

    bundle.json     description: space, blend, sizes, data set, metrics, parameters (`BundleInfo`)
    model/          encoder and heads as written by the training, with their own manifest
    vectors/*.npy   float32, each if the model has it: de [L, D] label embeddings, clf [L, D]
                    classifier rows, bias [L]
    index.faiss     label index over the searched space
    labels.arrow    uid and title of each label
    neighbours/     if training queries vote: their vectors float16 [M, D] or words (CSR), labels
                    (CSR), uids and titles; with words, also the words of label texts (CSR)
    manifest.json   size and sha256 of each file

Legend: B queries, L labels, K results, M training queries, D width of a head.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from unidec.bundle.bundle_folder import (
    KIND,
    VERSION,
    BundleInfo,
    check_names,
    read_heads,
    read_index,
    read_info,
    read_labels,
)
from unidec.bundle.neighbour_files import read_neighbours
from unidec.data.chunks import blocks
from unidec.data.storage import folder_sha256, read_manifest
from unidec.data.tokens import TextTokenizer, load_tokenizer
from unidec.errors import ArtifactError, DataError
from unidec.model.arrays import ModelConfig, heads_of
from unidec.ranking.heads import Heads, Ranked
from unidec.ranking.index import LabelIndex
from unidec.ranking.neighbours import Neighbours
from unidec.ranking.query_encoder import Encoded, ModelEncoder, QueryEncoder
from unidec.ranking.ranker import Prediction, Ranker, Voting, named_predictions
from unidec.ranking.sparse import Floats, Rows

if TYPE_CHECKING:
    from unidec.model.words import WordSpace


class Bundle:
    """A loaded bundle. Predicting is thread-safe.

    Attributes:
        path, sha256: the folder, and its hash, which identifies the bundle in the registry.
        info: content of `bundle.json`.
        uids, titles: Arrow string arrays [L].
        about: the model, or its `ModelConfig` if the model is not loaded.
        index: the label index.
        vectors: memory-mapped label arrays by name, if the model has them: de, clf [L, D], bias
        [L].
        neighbours: training queries that vote; None if none do.
        ranker: ranks labels for encoded queries.
    """

    def __init__(
        self,
        path: Path,
        info: BundleInfo,
        about: Any,
        index: LabelIndex,
        heads: Heads,
        labels: pa.Table,
        neighbours: Neighbours | None = None,
    ) -> None:
        self.path = path
        self.info = info
        self.about = about
        self.index = index
        self.sha256 = folder_sha256(path)
        self.vectors = heads.vectors
        self.neighbours = neighbours
        voting = None
        knn = info.knn
        if knn is not None and neighbours is not None:
            voting = Voting(
                neighbours=neighbours, num=knn.neighbours, weight=knn.weight, head=knn.space
            )
        self.ranker = Ranker(heads, index, voting, info.fusion)
        self.uids = labels["uid"].combine_chunks()
        self.titles = labels["title"].combine_chunks()

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        verify: bool = True,
        device: str = "cpu",
        lazy: bool = False,
    ) -> Bundle:
        """Load a bundle's folder. Names, sizes and (with `verify`) hashes of all files are checked
        before any file is parsed; sizes, dtypes and dimensions before any content is used.

        Args:
            verify: check the sha256 of each file, and that all vectors are finite.
            device: device of the model.
            lazy: load the model (on the CPU, with torch) when it is first needed.

        Raises:
            ArtifactError: a file is missing, damaged, inconsistent or of a newer version; the error
            names the file.
        """
        root = Path(path)
        check_names(root, read_manifest(root, KIND, VERSION, verify=verify)["files"])
        info = read_info(root)
        labels = read_labels(root, info.num_labels)
        heads = read_heads(root, info, verify=verify)
        index = read_index(root, info, heads)
        model = root / "model"
        about: Any = ModelConfig.read(model) if lazy else _load_model(model, device)
        _check_model(model, about, info)
        neighbours = None
        if info.knn is not None:
            neighbours = read_neighbours(root, info, about.tokenizer_folder)
        return cls(
            root,
            info,
            about,
            index=index,
            heads=heads,
            labels=labels,
            neighbours=neighbours,
        )

    @functools.cached_property
    def model(self) -> Any:
        """The encoder with its heads, in torch."""
        if not isinstance(self.about, ModelConfig):
            return self.about
        return _load_model(self.path / "model", "cpu")

    @functools.cached_property
    def encoder(self) -> QueryEncoder:
        """The query encoder: the model itself, unless another encoder was assigned
        (`query_encoder.open_encoder`).
        """
        return ModelEncoder(self.model, self.words)

    @property
    def tokenizer(self) -> TextTokenizer:
        """The model's tokenizer."""
        return load_tokenizer(self.about.tokenizer_folder, self.about.max_length)

    @property
    def num_labels(self) -> int:
        """Number of labels L."""
        return self.info.num_labels

    @property
    def words(self) -> WordSpace | None:
        """The word space in which training queries are compared; None if they do not vote or are
        compared by vectors.
        """
        return None if self.neighbours is None else self.neighbours.words

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Encode queries for `ranker`, in one batch; raises DataError for a text that is not valid
        Unicode.
        """
        return self.encoder.encode(texts)

    def predict(
        self,
        texts: Sequence[str],
        k: int = 5,
        exclude: Sequence[Sequence[str]] | None = None,
        batch_size: int = 256,
    ) -> list[Prediction]:
        """The k best labels of each text, best first.

        Args:
            texts: queries; for a model of long texts, title and content joined by a space.
            k: at least 1; fewer labels are returned if fewer remain.
            exclude: for each text, uids of labels that must not be returned; unknown uids are
            ignored.
            batch_size: texts encoded at once.

        Raises:
            DataError: a text is not a string, k is below 1, or `exclude` differs in length from
            `texts`.
        """
        ranked = self.predict_arrays(texts, k, exclude, batch_size)
        count_B = (ranked.rows >= 0).sum(axis=1).tolist()
        return named_predictions(ranked, count_B, self.uids, self.titles, self.info.calibration)

    def probabilities(self, scores: Floats) -> npt.NDArray[np.float64] | None:
        """Probability that a label with each score is relevant; None if the bundle has no
        calibration.
        """
        calibration = self.info.calibration
        return None if calibration is None else calibration.of(scores)

    def predict_arrays(
        self,
        texts: Sequence[str],
        k: int = 5,
        exclude: Sequence[Sequence[str]] | None = None,
        batch_size: int = 256,
    ) -> Ranked:
        """As `predict`, but returns arrays of label rows (named by `uids` and `titles`)."""
        if isinstance(texts, str):
            raise DataError("texts must be a list", got="one string", fix="pass [text]")
        if k < 1:
            raise DataError("k is out of range", got=k, expected="at least 1")
        if exclude is not None and len(exclude) != len(texts):
            raise DataError(
                "exclude must have one entry for each text", got=len(exclude), expected=len(texts)
            )
        parts = []
        for block in blocks(max(1, len(texts)), batch_size):
            excluded = None if exclude is None else self._excluded_pairs(exclude[block])
            encoded = self.encode(texts[block])
            ranked = self.ranker.rank(encoded, k, excluded)
            parts.append(self.ranker.with_parts(encoded, ranked))

        def joined(name: str) -> Any:
            arrays = [getattr(part, name) for part in parts]
            return None if arrays[0] is None else np.concatenate(arrays)

        return Ranked(**{name: joined(name) for name in vars(parts[0])})

    def predict_table(
        self, texts: Sequence[str], k: int = 5, *, first_row: int = 0, batch_size: int = 256
    ) -> pa.Table:
        """Arrow table `query_row` (int64, counted from `first_row`), `query`, `rank` (int64, from
        1), `label`, `title`, `score` (float32), `probability` (float64; null if the bundle has no
        calibration).
        """
        ranked = self.predict_arrays(texts, k, batch_size=batch_size)
        query, rank = np.nonzero(ranked.rows >= 0)
        scores = ranked.scores[query, rank]
        rows = pa.array(ranked.rows[query, rank])
        probabilities = self.probabilities(scores)
        if probabilities is None:
            probabilities = pa.nulls(len(rows), pa.float64())
        columns = {
            "query_row": query + first_row,
            "query": [texts[row] for row in query.tolist()],
            "rank": rank + 1,
            "label": self.uids.take(rows),
            "title": self.titles.take(rows),
            "score": scores,
            "probability": probabilities,
        }
        return pa.table(columns, schema=PREDICTION_SCHEMA)

    def named(self, rows: Rows) -> tuple[list[str], list[str]]:
        """Uids and titles of the given label rows."""
        indices = pa.array(rows)
        return self.uids.take(indices).to_pylist(), self.titles.take(indices).to_pylist()

    @functools.cached_property
    def row_of(self) -> dict[str, int]:
        """Label row by uid; built on first use."""
        return dict(zip(self.uids.to_pylist(), range(self.num_labels), strict=True))

    def _excluded_pairs(self, exclude: Sequence[Sequence[str]]) -> Rows:
        """Keys query * L + label of the excluded pairs, unique."""
        row_of = self.row_of
        pairs = set[int]()
        for query, uids in enumerate(exclude):
            rows = (row_of[uid] for uid in uids if uid in row_of)
            pairs.update(query * self.num_labels + row for row in rows)
        return np.array(sorted(pairs), dtype=np.int64)


PREDICTION_SCHEMA = pa.schema(
    {
        "query_row": pa.int64(),
        "query": pa.string(),
        "rank": pa.int64(),
        "label": pa.string(),
        "title": pa.string(),
        "score": pa.float32(),
        "probability": pa.float64(),
    }
)


def _load_model(path: Path, device: str) -> Any:
    from unidec.methods.assembly import load_model

    # verify: the bundle's manifest has these hashes; rows: classifier rows are in the bundle's
    # arrays
    return load_model(path, device, verify=False, rows=False)


def _check_model(path: Path, model: Any, info: BundleInfo) -> None:
    """Raise an ArtifactError if the model's number of labels, width or heads differ from the
    bundle's vectors.
    """
    got = (model.num_labels, model.settings.dim, sorted(heads_of(model.heads)))
    expected = (info.num_labels, info.dim, sorted(set(info.vectors) - {"bias"}))
    if got != expected:
        raise ArtifactError(
            "the model does not fit the bundle's vectors",
            where=path,
            got=got,
            expected=expected,
        )
