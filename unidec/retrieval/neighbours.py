"""Votes of similar training queries: a third score beside the two heads'.

Legend: M training queries that vote, B queries, N nearest of them, L labels, D width of a head (or number of words), P
pairs of a query and a label that may be among the best, K results.

    votes(x, l) = sum over the N nearest m of w_m(x) y_ml                    y_ml 1 for a label of m, 0 for others
    score(x, l) = heads(x, l) + weight * votes(x, l)

ridge: w(x) = (K + I)^-1 k(x), with k the cosines of x to its neighbours (those above 0) and K those of the neighbours
to each other: kernel ridge regression of the labels on the neighbours alone. Neighbours that say the same share one
vote. ridge-labels: the same, and each label's text is one more query that may vote: for the label (1), and for those
that come with it (`COMPANION` times the share of its training queries that have them). square and softmax: w_m = cos^2,
or exp((cos - the largest) / 0.05), for cosines above 0; these votes are divided by the largest over all labels, before
anything is excluded: a label's score does not depend on what else may be returned.

Sources: local learning (Bottou and Vapnik 1992) with the dual form of ridge regression (Saunders et al. 1998); the
distance-weighted vote of nearest neighbours (Dudani 1976); a model's score beside that of its nearest training
examples, softmax over their similarities (Khandelwal et al. 2020, kNN-LM, section 2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from unidec.retrieval.arrow_file import read_texts_table
from unidec.retrieval.index import LabelIndex
from unidec.retrieval.scoring_space import unit_rows
from unidec.retrieval.sparse import PairScores, SparseRows, heaviest
from unidec.retrieval.words import WordSpace

Vote = Literal["square", "softmax", "ridge", "ridge-labels"]
Floats = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]

RIDGE = 1.0  # measured: benchmarks/results/votes.md
COMPANION, LEAST_SHARE = 0.5, 0.1  # of a label's text for labels that come with it: weight, and the least share
TEMPERATURE = 0.05  # of the softmax vote: that of the heads' own softmax, about
_LABELS = ("indptr.npy", "labels.npy", "queries.arrow")
_WORDS = ("words_indptr.npy", "words.npy", "words_values.npy", "word_keys.npy", "word_weights.npy")
_LABEL_WORDS = ("label_words_indptr.npy", "label_words.npy", "label_words_values.npy")
FILES = frozenset(f"neighbours/{name}" for name in ("vectors.npy", *_LABELS, *_WORDS, *_LABEL_WORDS))
"""All that may lie there: either vectors.npy, or those of words, with or without those of the labels' words."""
_BLOCK_SCORES = 1 << 24  # cosines of one block of queries compared by words, at most
# large: the titles of many queries are more than the 2 GB that a plain string column holds
QUERY_SCHEMA = pa.schema(
    [pa.field("uid", pa.large_string(), nullable=False), pa.field("title", pa.large_string(), nullable=False)]
)
_FIX = "write the bundle again: unidec index build"


def _softmax(cosine_BN: Floats) -> Floats:
    """exp of the cosine over `TEMPERATURE`, the nearest's vote being 1, 0 where it is not positive; float32 [B, N]."""
    nearest_B1 = cosine_BN.max(axis=1, keepdims=True, initial=-1.0)
    return np.where(cosine_BN > 0, np.exp((cosine_BN - nearest_B1) / np.float32(TEMPERATURE)), np.float32(0))


OF_COSINE: dict[Vote, Callable[[Floats], Floats]] = {
    "square": lambda cosine_BN: np.square(np.maximum(cosine_BN, np.float32(0))), "softmax": _softmax,
}  # fmt: skip
VOTES: tuple[Vote, ...] = ("square", "softmax", "ridge", "ridge-labels")
MOST_TOGETHER = 128  # labels that a label comes with, the most frequent


class Neighbours:
    """Training queries that vote. Voting is safe from several threads at once.

    Args:
        vectors_MD: what queries are compared by: their vectors in a head's space, kept as float16 of unit length; or
            with `words` CSR, their words.
        labels_ML: CSR [M, L], their labels (relevance above 0); each is one vote.
        uids, titles: of the M queries.
        vote: how much a neighbour's vote counts by its cosine; one of `VOTES`.
        words: the space of the CSR `vectors_MD`; None for a head's.
        part: by which part of the words queries vote; see `WordSpace.part`.
        label_words_LF: the labels' texts in that space, CSR; None: not kept, and they cannot vote.

    Raises:
        ValueError: parts that differ in their number of queries, no query, numbers that are not finite, another vote,
            labels that shall vote without their words.
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
        self.vote, self.words = vote, words
        self.vectors_MD: Any
        if words is None:
            own = np.asarray(vectors_MD)
            if not np.isfinite(own).all():
                raise ValueError("vectors_MD must be finite")
            self.vectors_MD = own if own.dtype == np.float16 else unit_rows(own).astype(np.float16)
        else:
            # as they are stored: a query must find the same neighbours before and after
            self.vectors_MD = _halved(vectors_MD)
            if self.vectors_MD.shape[1] != words.num_columns or not np.isfinite(self.vectors_MD.data).all():
                raise ValueError("vectors_MD must be finite, and have a column for each word")
        counts = (self.vectors_MD.shape[0], labels_ML.shape[0], len(self.uids), len(self.titles))
        if len(set(counts)) != 1 or not counts[0]:
            raise ValueError(f"vectors, labels, uids and titles must be of the same queries, got {counts}")
        self.label_words_LF = None if label_words_LF is None else _halved(label_words_LF)
        self.labels_ML = csr_matrix(labels_ML > 0, dtype=np.float32)
        self.labels_ML.sum_duplicates()
        self.labels_ML.data[:] = 1.0  # each label of a row once
        self.part, self.compared_MD = part, self.vectors_MD if words is None else words.part(self.vectors_MD, part)
        voting, voted = self.compared_MD, self.labels_ML
        if vote == "ridge-labels":
            if words is None or self.label_words_LF is None:
                raise ValueError("labels vote by their words, and there are none")
            voting = vstack([voting, self.compared_labels], format="csr")
            voted = vstack([voted, self._voted_by_labels()], format="csr")
        self.num_voters = voted.shape[0]
        self._labels = SparseRows(voted)
        self._words = None if words is None else SparseRows(voting)
        self._index: Any = LabelIndex.build(voting.astype(np.float32)) if words is None else None
        self._by_word = None if words is None else SparseRows(csr_matrix(voting.T))

    @property
    def num_queries(self) -> int:
        """M."""
        return int(self.vectors_MD.shape[0])

    @property
    def num_labels(self) -> int:
        """L."""
        return int(self.labels_ML.shape[1])

    @cached_property
    def compared_labels(self) -> csr_matrix:
        """The part of the labels' words that votes, CSR [L, C]."""
        assert self.words is not None and self.label_words_LF is not None
        return self.words.part(self.label_words_LF, self.part)

    @cached_property
    def by_head(self) -> Neighbours | None:
        """The same queries, which vote by their first words; None where those are not kept."""
        if self.words is None or not self.words.head or self.part:
            return None
        own = (self.vectors_MD, self.labels_ML, self.uids, self.titles, self.vote, self.words, self.label_words_LF)
        return Neighbours(*own, part=1)

    @cached_property
    def _pairs(self) -> PairScores:
        return PairScores.of(self.labels_ML)

    @cached_property
    def label_counts(self) -> Floats:
        """Training queries of each label, float32 [L]."""
        return np.asarray(self.labels_ML.sum(axis=0)).ravel()

    @cached_property
    def together(self) -> csr_matrix:
        """Share of each label's training queries that have the other label too, without itself, float32 CSR [L, L]."""
        count_LL = csr_matrix(self.labels_ML.T @ self.labels_ML)
        own_L = np.maximum(count_LL.diagonal(), 1)
        count_LL.setdiag(0)
        return csr_matrix(diags(1 / own_L) @ heaviest(count_LL, MOST_TOGETHER), dtype=np.float32)

    def _voted_by_labels(self) -> csr_matrix:
        """What each label's text votes for, float32 CSR [L, L]."""
        others_LL = self.together.copy()
        others_LL.data = np.where(others_LL.data >= LEAST_SHARE, np.float32(COMPANION) * others_LL.data, np.float32(0))
        others_LL.eliminate_zeros()
        return csr_matrix(identity(self.num_labels, dtype=np.float32, format="csr") + others_LL)

    def nearest(self, query_BD: Floats | csr_matrix, num: int) -> tuple[Floats, Labels]:
        """The voters of the largest cosine, best first; among equals the earlier comes first.

        Args:
            query_BD: float [B, D] in the space of `vectors_MD`, of any length; CSR of `words.vectors` with words.
            num: N, at least 1; all where it exceeds their number.

        Returns:
            cosines float32 [B, N] (those of the float16 vectors), rows int64 [B, N], those from M on being labels. By
            words only texts that share one are near: 0 and -1 where there are fewer.
        """
        num = min(num, self.num_voters)
        if self._by_word is None:
            return self._index.search(unit_rows(query_BD), num)
        step, words_BF = max(1, _BLOCK_SCORES // self.num_voters), cast(csr_matrix, query_BD)
        starts = range(0, max(1, words_BF.shape[0]), step)
        parts = [words_BF] if len(starts) == 1 else [words_BF[start : start + step] for start in starts]
        found = [_largest(self._by_word.product(part), num) for part in parts]
        cosine_BN, row_BN = (np.concatenate(part) for part in zip(*found, strict=True))
        return cosine_BN, row_BN

    def weights(self, cosine_BN: Floats, row_BN: Labels) -> Floats:
        """How much each neighbour's vote counts, float32 [B, N]: of `nearest`, with all that vote."""
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
        """Vectors of some voters; by words without the words that none of them has."""
        if self._words is None:
            return self.vectors_MD[row_N].astype(np.float32)
        place_E, word_E, value_E = self._words.entries(row_N)
        used, column_E = np.unique(word_E, return_inverse=True)
        out = np.zeros((len(row_N), len(used)), dtype=np.float32)
        out[place_E, column_E] = value_E
        return out

    def votes(self, query_BD: Floats | csr_matrix, num: int, left_out: Labels | None = None) -> PairScores:
        """Votes above 0 of the `num` nearest for labels; a query has none where no neighbour has a
        label or no cosine is positive.

        Args:
            left_out: int64 [B], where the queries are training queries, by words: their own rows. Each is read as if
                it were not there: `num` others vote, and which labels come together is counted without it.
        """
        cosine_BN, row_BN = self.nearest(query_BD, num if left_out is None else num + 1)
        if left_out is not None:
            cosine_BN = np.where(row_BN == left_out[:, None], np.float32(0), cosine_BN)
        weight_BN, num_labels, num_queries = self.weights(cosine_BN, row_BN), self.num_labels, len(row_BN)
        query_T, rank_T = np.nonzero(weight_BN)
        voter_T = row_BN[query_T, rank_T]
        place_E, label_E, share_E = self._labels.entries(voter_T)
        if left_out is not None and self.num_voters > self.num_queries:
            row_E, voted_by_E = left_out[query_T[place_E]], voter_T[place_E] - self.num_queries
            share_E = self._share_without(row_E, voted_by_E, label_E, share_E)
        key_N, which_E = np.unique(query_T[place_E] * num_labels + label_E, return_inverse=True)
        sum_N = np.bincount(which_E, weight_BN[query_T, rank_T][place_E] * share_E, minlength=len(key_N))
        key_N, sum_N = key_N[sum_N > 0], sum_N[sum_N > 0]
        if len(key_N) and self.vote in OF_COSINE:
            count_B = np.bincount(key_N // num_labels, minlength=num_queries)
            some_B = count_B > 0
            most_B = np.maximum.reduceat(sum_N, (np.cumsum(count_B) - count_B)[some_B])
            sum_N = sum_N / np.repeat(most_B, count_B[some_B])
        return PairScores(key_N, sum_N.astype(np.float32), (num_queries, num_labels))

    def _share_without(self, row_E: Labels, voter_E: Labels, label_E: npt.NDArray[Any], share_E: Floats) -> Floats:
        """What labels vote for, as if a training query were not there, which matters where it has the label that votes.

        Args:
            row_E: the training query. voter_E: the label that votes, below 0 where a query does. label_E: what it votes
                for. share_E: how much.
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
        """Whether these training queries have these labels, bool [E]."""
        return self._pairs.at(row_E * self.num_labels + label_E) > 0

    def write(self, folder: Path, label_words: bool = False) -> None:
        """Write the files of `FILES` below a bundle's folder, the labels' words on demand; the same queries give the
        same bytes."""
        place, own, labels_ML = folder / "neighbours", self.vectors_MD, self.labels_ML
        place.mkdir()
        arrays: dict[str, npt.NDArray[Any]] = {"vectors.npy": own}
        if self.words is not None:
            arrays = dict(zip(_WORDS, (*_stored(own), self.words.keys_F, self.words.idf_F), strict=True))
        if label_words:
            assert self.label_words_LF is not None
            arrays |= zip(_LABEL_WORDS, _stored(self.label_words_LF), strict=True)
        arrays |= {"indptr.npy": labels_ML.indptr.astype(np.int64), "labels.npy": labels_ML.indices.astype(np.int32)}
        for name, array in arrays.items():
            np.save(place / name, np.ascontiguousarray(array), allow_pickle=False)
        write_texts_table(place / "queries.arrow", pa.table([self.uids, self.titles], schema=QUERY_SCHEMA))

    @property
    def num_bytes(self) -> int:
        """Size of what `write` writes, about."""
        own = self.vectors_MD.nbytes if self.words is None else 6 * self.vectors_MD.nnz
        return own + 4 * self.labels_ML.nnz + self.titles.nbytes


def read_neighbours(
    folder: Path,
    sizes: tuple[int, int, int, int],
    vote: Vote,
    tokenizer_folder: Path | None = None,
    with_label_words: bool = False,
    word_head: int = 0,
) -> Neighbours:
    """What `Neighbours.write` wrote below a bundle's folder, everything checked against these numbers.

    Args:
        sizes: numbers of queries, of their labels in all, and of labels; width of the vectors, with `tokenizer_folder`
            the number of words.
        tokenizer_folder: of the model, where queries are compared by words.
        with_label_words: the labels' words were written too. word_head: see `WordSpace`.

    Raises:
        ArtifactError: missing, of another type or size, not finite, or labels that do not exist.
    """
    place, words = folder / "neighbours", None
    num_queries, num_pairs, num_labels, dim = sizes
    labels_ML = _read_csr(place, "indptr.npy", "labels.npy", (num_queries, num_labels), num_pairs)
    label_words = None
    if tokenizer_folder is None:
        vectors: Any = _read(place / "vectors.npy", np.float16, (num_queries, dim))
    else:
        num_columns = 2 * dim if word_head else dim
        vectors = _read_words(place, _WORDS[:3], (num_queries, num_columns))
        if with_label_words:
            label_words = _read_words(place, _LABEL_WORDS, (num_labels, num_columns))
        keys, weights = _read(place / "word_keys.npy", np.uint64, (dim,)), _read(place / "word_weights.npy", np.float32)
        try:
            words = WordSpace(tokenizer_folder, keys, weights, word_head)
        except ValueError as error:
            where = str(place / "word_keys.npy")
            raise ArtifactError("damaged words", where=where, got=str(error), fix=_FIX) from error
    table = read_texts_table(place / "queries.arrow", QUERY_SCHEMA, num_queries)
    return Neighbours(vectors, labels_ML, table["uid"], table["title"], vote, words, label_words)


def _halved(matrix: csr_matrix) -> csr_matrix:
    """A copy with the values that float16 keeps, float32."""
    out = csr_matrix(matrix, dtype=np.float32, copy=True)
    out.data = out.data.astype(np.float16).astype(np.float32)
    return out


def _stored(matrix: csr_matrix) -> tuple[npt.NDArray[Any], ...]:
    return matrix.indptr.astype(np.int64), matrix.indices.astype(np.int32), matrix.data.astype(np.float16)


def _read_words(place: Path, names: Sequence[str], shape: tuple[int, int]) -> csr_matrix:
    values = _read(place / names[2], np.float16)
    return _read_csr(place, names[0], names[1], shape, len(values), values)


def _read_csr(
    place: Path, name: str, columns: str, shape: tuple[int, int], num_pairs: int, values: npt.NDArray[Any] | None = None
) -> csr_matrix:
    """A matrix of two files, `name` with where rows begin and `columns`; float32, 1 everywhere without values."""
    indptr, indices = _read(place / name, np.int64, (shape[0] + 1,)), _read(place / columns, np.int32, (num_pairs,))
    if indptr[-1] != num_pairs:
        raise ArtifactError(f"rows that do not fit {columns}", where=str(place / name), fix=_FIX)
    data = np.ones(num_pairs, dtype=np.float32) if values is None else values.astype(np.float32)
    try:
        matrix = csr_matrix((data, indices, indptr), shape=shape)
        matrix.check_format(full_check=True)
    except ValueError as error:
        raise ArtifactError(f"damaged {columns} or {name}", where=str(place / columns), got=error, fix=_FIX) from error
    return matrix


def _read(where: Path, dtype: Any, shape: tuple[int, ...] | None = None) -> npt.NDArray[Any]:
    """An array of finite numbers; of any length without a shape."""
    array = load_array(where, dtype, ndim=len(shape or (0,)))
    if shape is not None and array.shape != shape:
        raise ArtifactError("another shape", where=str(where), got=array.shape, expected=shape, fix=_FIX)
    if not np.isfinite(array).all():
        raise ArtifactError("numbers that are not finite", where=str(where), fix=_FIX)
    return array


def _largest(score_BM: Floats, num: int) -> tuple[Floats, Labels]:
    """The `num` largest above 0 of each row, best first, among equals the smaller column: float32 and int64 [B, num];
    0 and -1 where there are fewer."""
    cosine_BN = np.zeros((len(score_BM), num), dtype=np.float32)
    row_BN = np.full(cosine_BN.shape, -1, dtype=np.int64)
    for query, score_M in enumerate(score_BM):  # most scores are 0: a query at a time is faster than all at once
        row_C = np.flatnonzero(score_M > 0)
        score_C = score_M[row_C]
        if len(row_C) > num:
            row_C = row_C[score_C >= -np.partition(-score_C, num - 1)[num - 1]]
        best = row_C[np.argsort(-score_M[row_C], kind="stable")][:num]
        cosine_BN[query, : len(best)], row_BN[query, : len(best)] = score_M[best], best
    return cosine_BN, row_BN


@dataclass(frozen=True)
class Ranked:
    """The best labels of B queries.

    Attributes:
        rows: int64 [B, K], best first; -1 where there are fewer than K.
        scores: float32 [B, K]; -inf there.
        knn_scores: float32 [B, K], votes of similar training queries, before their weight; NaN there; None where none
            vote.
        de_scores, clf_scores: float32 [B, K], each head's own score; NaN there; None where the model has no such head,
            and before `Bundle.with_parts`.
    """

    rows: Labels
    scores: Floats
    knn_scores: Floats | None = None
    de_scores: Floats | None = None
    clf_scores: Floats | None = None


@dataclass(frozen=True)
class Candidates:
    """Pairs of a query and a label, each once, by query and label: the only ones that can be among the best.

    Attributes:
        query_P, label_P: int64 [P]; heads_P, votes_P: float32 [P], each pair's two scores.
        num_queries: B.
    """

    query_P: Labels
    label_P: Labels
    heads_P: Floats
    votes_P: Floats
    num_queries: int

    @classmethod
    def of(cls, key_P: Labels, votes: PairScores, heads: Callable[[Labels, Labels], Floats]) -> Candidates:
        """Pairs with their scores.

        Args:
            key_P: int64, query * L + label, ascending, each once: of `candidate_keys` or `allowed_keys`.
            heads: (query_P, label_P) -> the heads' scores float32 [P].
        """
        query_P, label_P = np.divmod(key_P, votes.shape[1])
        return cls(query_P, label_P, heads(query_P, label_P), votes.at(key_P), votes.shape[0])

    def top(self, weight: float, k: int) -> Ranked:
        """The k best of heads + weight x votes; among equals the smaller label row comes first."""
        total_P = self.heads_P + np.float32(weight) * self.votes_P
        return best_of(self.query_P, self.label_P, total_P, self.votes_P, self.num_queries, k)


def candidate_keys(found_BC: Labels, voted: Labels, num_labels: int, excluded: Labels | None = None) -> Labels:
    """Keys query * L + label of the labels that were found and those with votes, without excluded pairs, ascending.

    With the heads' k best that are not excluded, and all that got a vote, the k best of both parts' sum are among them,
    whatever the votes' weight (>= 0).

    Args:
        found_BC: label rows, -1 where there is none. voted, excluded: int64 keys.
    """
    place_BC = np.arange(len(found_BC), dtype=np.int64)[:, None] * num_labels + found_BC
    return without(np.union1d(place_BC[found_BC >= 0], voted), excluded)


def allowed_keys(allowed: Labels, num_queries: int, num_labels: int, excluded: Labels | None = None) -> Labels:
    """Keys of some labels, ascending, for each query, without excluded pairs."""
    return without((np.arange(num_queries, dtype=np.int64)[:, None] * num_labels + allowed).ravel(), excluded)


def without(key_P: Labels, excluded: Labels | None) -> Labels:
    """The keys that are not excluded."""
    return key_P if excluded is None or not excluded.size else key_P[~np.isin(key_P, excluded)]


def best_of(query_P: Labels, label_P: Labels, score_P: Floats, votes_P: Floats, num_queries: int, k: int) -> Ranked:
    """The k pairs of each query with the largest scores; among equals the smaller label row comes first.

    Args:
        query_P, label_P: int64 [P], each pair once, ascending by query and label. score_P, votes_P: float32 [P].
    """
    count_B = np.bincount(query_P, minlength=num_queries)
    begin_B = np.cumsum(count_B) - count_B
    score_BC = np.full((num_queries, count_B.max(initial=0)), -np.inf, dtype=np.float32)
    score_BC[query_P, np.arange(len(query_P)) - begin_B[query_P]] = score_P
    order = np.argsort(-score_BC, axis=1, kind="stable")[:, :k]  # one long sort of all pairs takes three times as long
    query, rank = np.nonzero(np.arange(order.shape[1]) < count_B[:, None])
    best = begin_B[query] + order[query, rank]
    rows = np.full((num_queries, k), -1, dtype=np.int64)
    scores = np.full((num_queries, k), -np.inf, dtype=np.float32)
    votes = np.full((num_queries, k), np.nan, dtype=np.float32)
    rows[query, rank], scores[query, rank], votes[query, rank] = label_P[best], score_P[best], votes_P[best]
    return Ranked(rows, scores, votes)


def votes_alone(votes: PairScores, k: int, excluded: Labels | None = None) -> Ranked:
    """The k labels with most votes; labels without any are not returned."""
    key_P = without(votes.key_N, excluded)
    return Candidates.of(key_P, votes, lambda query_P, _: np.zeros(len(query_P), dtype=np.float32)).top(1.0, k)
