"""Votes of similar training queries: a third score beside the scores of the two heads.

Legend: M training queries, B queries, N nearest training queries of a query, L labels, D width of a
head (or number of
words), P candidate pairs of a query and a label, K results.

    votes(x, l) = sum over the N nearest m of w_m(x) y_ml                    y_ml is 1 for a label
    of m, else 0 score(x, l) = heads(x, l) + weight * votes(x, l)

- ridge: w(x) = (K + I)^-1 k(x), where k holds the positive cosines between x and its neighbours,
  and K the cosines between those neighbours: kernel ridge regression of the labels on the
  neighbours alone. Near-duplicate neighbours share one vote.
- ridge-labels: as ridge, but each label's text is an additional voter. It votes for its label with
  weight 1, and for co-occurring labels with `COMPANION` times the share of its training queries
  that also have that label.
- square and softmax: w_m = cos^2, or exp((cos - largest cos) / 0.05), for positive cosines. These
  votes are divided by the query's largest vote before labels are excluded, so that a label's score
  does not depend on the exclusions.

Sources: local learning (Bottou and Vapnik 1992) with the dual form of ridge regression (Saunders et
al. 1998); the
distance-weighted vote of nearest neighbours (Dudani 1976); interpolation of a model with its
nearest training examples, softmax over their similarities (Khandelwal et al. 2020, kNN-LM, section
2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from scipy.sparse import csr_matrix, diags, identity, vstack

from unidec.data.dataset import write_texts_table
from unidec.data.raw import text_array
from unidec.data.storage import load_array
from unidec.errors import ArtifactError
from unidec.model.words import WordSpace
from unidec.ranking.arrow_file import read_texts_table
from unidec.ranking.candidates import PairScores, SparseRows, keep_largest
from unidec.ranking.heads import unit_rows
from unidec.ranking.index import LabelIndex

Vote = Literal["square", "softmax", "ridge", "ridge-labels"]
Floats = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]

RIDGE = 1.0  # measured: benchmarks/results/votes.md
# votes of a label's text for co-occurring labels: weight, and smallest share
COMPANION = 0.5
LEAST_SHARE = 0.1
TEMPERATURE = 0.05  # of the softmax vote; close to the temperature of the heads' own softmax
_LABELS = ("indptr.npy", "labels.npy", "queries.arrow")
_WORDS = ("words_indptr.npy", "words.npy", "words_values.npy", "word_keys.npy", "word_weights.npy")
_LABEL_WORDS = ("label_words_indptr.npy", "label_words.npy", "label_words_values.npy")
FILES = frozenset(
    f"neighbours/{name}" for name in ("vectors.npy", *_LABELS, *_WORDS, *_LABEL_WORDS)
)
"""All files that the folder may hold: either vectors.npy or the word files, optionally with those
of the labels.
"""
# upper bound on the cosines computed at once when queries are compared by words
_BLOCK_SCORES = 1 << 24
# large_string: the titles of many queries exceed the 2 GB limit of a string column
QUERY_SCHEMA = pa.schema(
    [
        pa.field("uid", pa.large_string(), nullable=False),
        pa.field("title", pa.large_string(), nullable=False),
    ]
)
_FIX = "write the bundle again: unidec index build"


def _softmax(cosine_BN: Floats) -> Floats:
    """exp((cosine - largest cosine) / `TEMPERATURE`), 0 where the cosine is not positive; float32
    [B, N].
    """
    nearest_B1 = cosine_BN.max(axis=1, keepdims=True, initial=-1.0)
    return np.where(
        cosine_BN > 0, np.exp((cosine_BN - nearest_B1) / np.float32(TEMPERATURE)), np.float32(0)
    )


OF_COSINE: dict[Vote, Callable[[Floats], Floats]] = {
    "square": lambda cosine_BN: np.square(np.maximum(cosine_BN, np.float32(0))),
    "softmax": _softmax,
}
VOTES: tuple[Vote, ...] = ("square", "softmax", "ridge", "ridge-labels")
MOST_CO_OCCURRING = 128  # co-occurring labels stored for each label: the most frequent ones


class Neighbours:
    """Training queries that vote for their labels. Voting is thread-safe.

    Args:
        vectors_MD: vectors by which queries are compared: either in a head's space (stored as
            float16, unit length), or CSR word vectors if `words` is given.
        labels_ML: CSR [M, L], labels of the queries (relevance above 0); each label counts once.
        uids, titles: of the M queries.
        vote: weight of a neighbour's vote as a function of its cosine; one of `VOTES`.
        words: the word space of `vectors_MD`; None if the vectors are in a head's space.
        part: the part of the word vectors that is compared; see `WordSpace.part`.
        label_words_LF: CSR word vectors of the label texts; None if they are not stored.
        "ridge-labels" needs them.

    Raises:
        ValueError: the number of queries differs between the arguments or is 0, numbers are not
            finite, the vote is unknown, or labels vote without word vectors.
    """

    def __init__(
        self,
        vectors_MD: npt.NDArray[Any] | csr_matrix,
        labels_ML: csr_matrix,
        uids: Any,
        titles: Any,
        vote: Vote = "softmax",
        words: WordSpace | None = None,
        label_words_LF: csr_matrix | None = None,
        part: int = 0,
    ) -> None:
        if vote not in VOTES:
            raise ValueError(f"unknown vote {vote!r}, expected one of {', '.join(VOTES)}")
        self.uids, self.titles = (text_array(texts, pa.large_string()) for texts in (uids, titles))
        self.vote = vote
        self.words = words
        self.vectors_MD: Any
        if words is None:
            dense_MD = np.asarray(vectors_MD)
            if not np.isfinite(dense_MD).all():
                raise ValueError("vectors_MD must be finite")
            self.vectors_MD = (
                dense_MD if dense_MD.dtype == np.float16 else unit_rows(dense_MD).astype(np.float16)
            )
        else:
            # rounded as in the stored file, so that neighbours do not change when the bundle is
            # loaded
            self.vectors_MD = _rounded_to_float16(vectors_MD)
            if (
                self.vectors_MD.shape[1] != words.num_columns
                or not np.isfinite(self.vectors_MD.data).all()
            ):
                raise ValueError("vectors_MD must be finite and have a column for each word")
        counts = (self.vectors_MD.shape[0], labels_ML.shape[0], len(self.uids), len(self.titles))
        if len(set(counts)) != 1 or not counts[0]:
            raise ValueError(
                f"vectors, labels, uids and titles must be of the same queries, got {counts}"
            )
        self.label_words_LF = (
            None if label_words_LF is None else _rounded_to_float16(label_words_LF)
        )
        self.labels_ML = csr_matrix(labels_ML > 0, dtype=np.float32)
        self.labels_ML.sum_duplicates()
        self.labels_ML.data[:] = 1.0  # duplicates were summed
        self.part, self.compared_MD = (
            part,
            self.vectors_MD if words is None else words.part(self.vectors_MD, part),
        )
        voting = self.compared_MD
        voted = self.labels_ML
        if vote == "ridge-labels":
            if words is None or self.label_words_LF is None:
                raise ValueError(
                    "labels vote by their words, but label_words_LF or words is missing"
                )
            voting = vstack([voting, self.compared_labels], format="csr")
            voted = vstack([voted, self._voted_by_labels()], format="csr")
        self.num_voters = voted.shape[0]
        self._labels = SparseRows(voted)
        self._words = None if words is None else SparseRows(voting)
        self._index: Any = LabelIndex.build(voting.astype(np.float32)) if words is None else None
        self._by_word = None if words is None else SparseRows(csr_matrix(voting.T))

    @property
    def num_queries(self) -> int:
        """Number of training queries M."""
        return int(self.vectors_MD.shape[0])

    @property
    def num_labels(self) -> int:
        """Number of labels L."""
        return int(self.labels_ML.shape[1])

    @cached_property
    def compared_labels(self) -> csr_matrix:
        """The compared part of the label texts' word vectors, CSR [L, C]."""
        assert self.words is not None and self.label_words_LF is not None
        return self.words.part(self.label_words_LF, self.part)

    @cached_property
    def by_first_words(self) -> Neighbours | None:
        """The same training queries, compared by their first words; None if those are
        not stored.
        """
        if self.words is None or not self.words.head or self.part:
            return None
        data = (
            self.vectors_MD,
            self.labels_ML,
            self.uids,
            self.titles,
            self.vote,
            self.words,
            self.label_words_LF,
        )
        return Neighbours(*data, part=1)

    @cached_property
    def _pairs(self) -> PairScores:
        return PairScores.of(self.labels_ML)

    @cached_property
    def label_counts(self) -> Floats:
        """Number of training queries of each label, float32 [L]."""
        return np.asarray(self.labels_ML.sum(axis=0)).ravel()

    @cached_property
    def co_occurrence(self) -> csr_matrix:
        """Label co-occurrence, float32 CSR [L, L]: the share of the row label's training queries
        that also have the column label; the diagonal is 0, and each row keeps its
        `MOST_CO_OCCURRING` largest entries.
        """
        count_LL = csr_matrix(self.labels_ML.T @ self.labels_ML)
        num_queries_L = np.maximum(count_LL.diagonal(), 1)
        count_LL.setdiag(0)
        return csr_matrix(
            diags(1 / num_queries_L) @ keep_largest(count_LL, MOST_CO_OCCURRING), dtype=np.float32
        )

    def _voted_by_labels(self) -> csr_matrix:
        """Labels for which each label's text votes, with weights, float32 CSR [L, L]."""
        others_LL = self.co_occurrence.copy()
        others_LL.data = np.where(
            others_LL.data >= LEAST_SHARE, np.float32(COMPANION) * others_LL.data, np.float32(0)
        )
        others_LL.eliminate_zeros()
        return csr_matrix(identity(self.num_labels, dtype=np.float32, format="csr") + others_LL)

    def nearest(self, query_BD: Floats | csr_matrix, num: int) -> tuple[Floats, Labels]:
        """The voters with the largest cosine, best first; ties are ordered by row.

        Args:
            query_BD: float [B, D] of any length, in the space of `vectors_MD`; with words, CSR from
            `words.vectors`.
            num: N, at least 1; capped at the number of voters.

        Returns:
            cosines float32 [B, N] to the float16 vectors, and rows int64 [B, N]; rows from M on are
            labels. When compared by words, only texts that share a word are neighbours; missing
            ones have cosine 0 and row -1.
        """
        num = min(num, self.num_voters)
        if self._by_word is None:
            return self._index.search(unit_rows(query_BD), num)
        step = max(1, _BLOCK_SCORES // self.num_voters)
        words_BF = cast(csr_matrix, query_BD)
        starts = range(0, max(1, words_BF.shape[0]), step)
        parts = (
            [words_BF] if len(starts) == 1 else [words_BF[start : start + step] for start in starts]
        )
        results = [self._by_word.product(part).best(num) for part in parts]
        cosine_BN, row_BN = (np.concatenate(blocks) for blocks in zip(*results, strict=True))
        return cosine_BN, row_BN

    def weights(self, cosine_BN: Floats, row_BN: Labels) -> Floats:
        """Weight of each neighbour's vote, float32 [B, N]; the arguments are the result of
        `nearest`.
        """
        if self.vote in OF_COSINE:
            return OF_COSINE[self.vote](cosine_BN)
        out = np.zeros_like(cosine_BN)
        for query, (cosine_N, row_N) in enumerate(zip(cosine_BN, row_BN, strict=True)):
            near = np.flatnonzero(cosine_N > 0)
            vectors_ND = self._vectors(row_N[near])
            kernel_NN = vectors_ND @ vectors_ND.T
            kernel_NN.ravel()[:: len(near) + 1] += RIDGE
            out[query, near] = np.linalg.solve(kernel_NN, cosine_N[near])
        return out

    def _vectors(self, row_N: Labels) -> Floats:
        """Dense vectors of the given voters; word columns that are 0 for all of them
        are dropped.
        """
        if self._words is None:
            return self.vectors_MD[row_N].astype(np.float32)
        place_E, word_E, value_E = self._words.entries(row_N)
        used, column_E = np.unique(word_E, return_inverse=True)
        out = np.zeros((len(row_N), len(used)), dtype=np.float32)
        out[place_E, column_E] = value_E
        return out

    def votes(
        self, query_BD: Floats | csr_matrix, num: int, left_out: Labels | None = None
    ) -> PairScores:
        """Positive votes of the `num` nearest voters for labels. A query has no votes if no cosine
        is positive or no neighbour has a label.

        Args:
            left_out: int64 [B], rows of the queries if they are training queries compared by words.
                Each query is treated as absent from the training data: `num` others vote, and label
                co-occurrence excludes it.
        """
        cosine_BN, row_BN = self.nearest(query_BD, num if left_out is None else num + 1)
        if left_out is not None:
            cosine_BN = np.where(row_BN == left_out[:, None], np.float32(0), cosine_BN)
        weight_BN = self.weights(cosine_BN, row_BN)
        num_labels = self.num_labels
        num_queries = len(row_BN)
        query_T, rank_T = np.nonzero(weight_BN)
        voter_T = row_BN[query_T, rank_T]
        place_E, label_E, share_E = self._labels.entries(voter_T)
        if left_out is not None and self.num_voters > self.num_queries:
            row_E = left_out[query_T[place_E]]
            voted_by_E = voter_T[place_E] - self.num_queries
            share_E = self._share_without(row_E, voted_by_E, label_E, share_E)
        key_N, which_E = np.unique(query_T[place_E] * num_labels + label_E, return_inverse=True)
        sum_N = np.bincount(
            which_E, weight_BN[query_T, rank_T][place_E] * share_E, minlength=len(key_N)
        )
        key_N = key_N[sum_N > 0]
        sum_N = sum_N[sum_N > 0]
        if self.vote in OF_COSINE:
            largest_B = np.zeros(num_queries)
            np.maximum.at(largest_B, key_N // num_labels, sum_N)
            sum_N = sum_N / largest_B[key_N // num_labels]
        return PairScores(key_N, sum_N.astype(np.float32), (num_queries, num_labels))

    def _share_without(
        self, row_E: Labels, voter_E: Labels, label_E: npt.NDArray[Any], share_E: Floats
    ) -> Floats:
        """Vote weights as if a training query were absent; they change only where it has the voting
        label.

        Args:
            row_E: the training query. voter_E: the voting label, negative if the voter is a
            training query.
            label_E: the label voted for. share_E: weight of the vote with the training query
            present.
        """
        some = np.flatnonzero((voter_E >= 0) & (voter_E != label_E))
        some = some[self._has(row_E[some], voter_E[some])]
        count = self.label_counts[voter_E[some]]
        both = share_E[some] / np.float32(COMPANION) * count - self._has(row_E[some], label_E[some])
        share = both / np.maximum(count - 1, 1)
        out = share_E.copy()
        out[some] = np.where(share >= LEAST_SHARE, np.float32(COMPANION) * share, np.float32(0))
        return out

    def _has(self, row_E: Labels, label_E: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Whether training query `row_E[e]` has label `label_E[e]`, bool [E]."""
        return self._pairs.at(row_E * self.num_labels + label_E) > 0

    def write(self, folder: Path, label_words: bool = False) -> None:
        """Write `FILES` below a bundle's folder, deterministically; `label_words`: also the label
        texts' vectors.
        """
        target = folder / "neighbours"
        labels_ML = self.labels_ML
        target.mkdir()
        arrays: dict[str, npt.NDArray[Any]] = {"vectors.npy": self.vectors_MD}
        if self.words is not None:
            parts = (*_storage_arrays(self.vectors_MD), self.words.keys_F, self.words.idf_F)
            arrays = dict(zip(_WORDS, parts, strict=True))
        if label_words:
            assert self.label_words_LF is not None
            arrays |= zip(_LABEL_WORDS, _storage_arrays(self.label_words_LF), strict=True)
        arrays |= {
            "indptr.npy": labels_ML.indptr.astype(np.int64),
            "labels.npy": labels_ML.indices.astype(np.int32),
        }
        for name, array in arrays.items():
            np.save(target / name, np.ascontiguousarray(array), allow_pickle=False)
        write_texts_table(
            target / "queries.arrow", pa.table([self.uids, self.titles], schema=QUERY_SCHEMA)
        )

    @property
    def num_bytes(self) -> int:
        """Approximate size of the files of `write`."""
        vector_bytes = self.vectors_MD.nbytes if self.words is None else 6 * self.vectors_MD.nnz
        return vector_bytes + 4 * self.labels_ML.nnz + self.titles.nbytes


def read_titles(folder: Path, num_queries: int) -> pa.ChunkedArray:
    """The texts of the training queries that vote in a bundle; an ArtifactError if they are
    damaged.
    """
    return read_texts_table(folder / "neighbours" / "queries.arrow", QUERY_SCHEMA, num_queries)[
        "title"
    ]


def read_neighbours(
    folder: Path,
    sizes: tuple[int, int, int, int],
    vote: Vote,
    tokenizer_folder: Path | None = None,
    with_label_words: bool = False,
    word_head: int = 0,
) -> Neighbours:
    """Read the files of `Neighbours.write` and check them against the sizes in bundle.json.

    Args:
        folder: the bundle's folder.
        sizes: number of queries, number of (query, label) pairs, number of labels, and width of the
            vectors (with `tokenizer_folder`: number of words).
        tokenizer_folder: the model's tokenizer if queries are compared by words, else None.
        with_label_words: the word vectors of the label texts are stored too. word_head: see
        `WordSpace`.

    Raises:
        ArtifactError: a file is missing, or has a wrong type, a wrong size, non-finite numbers or
        invalid label rows.
    """
    source = folder / "neighbours"
    words = None
    num_queries, num_pairs, num_labels, dim = sizes
    labels_ML = _read_csr(source, _LABELS[:2], (num_queries, num_labels), num_pairs)
    label_words = None
    if tokenizer_folder is None:
        vectors: Any = _read_array(source / "vectors.npy", np.float16, (num_queries, dim))
    else:
        num_columns = 2 * dim if word_head else dim
        vectors = _read_csr(source, _WORDS[:3], (num_queries, num_columns))
        if with_label_words:
            label_words = _read_csr(source, _LABEL_WORDS, (num_labels, num_columns))
        keys = _read_array(source / "word_keys.npy", np.uint64, (dim,))
        weights = _read_array(source / "word_weights.npy", np.float32)
        try:
            words = WordSpace(tokenizer_folder, keys, weights, word_head)
        except ValueError as error:
            where = str(source / "word_keys.npy")
            raise ArtifactError(
                "the words are damaged", where=where, got=str(error), fix=_FIX
            ) from error
    table = read_texts_table(source / "queries.arrow", QUERY_SCHEMA, num_queries)
    return Neighbours(vectors, labels_ML, table["uid"], table["title"], vote, words, label_words)


def _rounded_to_float16(matrix: csr_matrix) -> csr_matrix:
    """A float32 copy with values rounded to float16."""
    out = csr_matrix(matrix, dtype=np.float32, copy=True)
    out.data = out.data.astype(np.float16).astype(np.float32)
    return out


def _storage_arrays(matrix: csr_matrix) -> tuple[npt.NDArray[Any], ...]:
    """Row offsets, columns and values of a matrix in the dtypes of the files."""
    return (
        matrix.indptr.astype(np.int64),
        matrix.indices.astype(np.int32),
        matrix.data.astype(np.float16),
    )


def _read_csr(
    folder: Path, names: Sequence[str], shape: tuple[int, int], num_pairs: int = 0
) -> csr_matrix:
    """A float32 matrix from the files of its row offsets, its columns and, if there is a third
    name, its values.

    Without values all entries are 1, and `num_pairs` is the expected number of entries.
    """
    where = folder / names[0]
    columns = folder / names[1]
    values = _read_array(folder / names[2], np.float16) if len(names) > 2 else None
    num_pairs = num_pairs if values is None else len(values)
    indptr = _read_array(where, np.int64, (shape[0] + 1,))
    indices = _read_array(columns, np.int32, (num_pairs,))
    if indptr[-1] != num_pairs:
        raise ArtifactError(f"row offsets do not fit {columns.name}", where=str(where), fix=_FIX)
    data = np.ones(num_pairs, dtype=np.float32) if values is None else values.astype(np.float32)
    try:
        matrix = csr_matrix((data, indices, indptr), shape=shape)
        matrix.check_format(full_check=True)
    except ValueError as error:
        what = f"{columns.name} or {where.name} is damaged"
        raise ArtifactError(what, where=str(columns), got=error, fix=_FIX) from error
    return matrix


def _read_array(where: Path, dtype: Any, shape: tuple[int, ...] | None = None) -> npt.NDArray[Any]:
    """An array of finite numbers; without a shape, one-dimensional of any length."""
    array = load_array(where, dtype, ndim=len(shape or (0,)))
    if shape is not None and array.shape != shape:
        raise ArtifactError(
            "the array has another shape",
            where=str(where),
            got=array.shape,
            expected=shape,
            fix=_FIX,
        )
    if not np.isfinite(array).all():
        raise ArtifactError(
            "the array holds numbers that are not finite", where=str(where), fix=_FIX
        )
    return array
