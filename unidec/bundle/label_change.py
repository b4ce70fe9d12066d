"""Changes a bundle's label set without training: new labels are represented by their text.

Legend: L labels of the new set, K labels of the bundle, S labels of the new set whose text is
encoded, E example queries of new labels, N nearest trained labels, T trained labels, M training
queries, D width of a head.

The dual-encoder vector of a new label encodes its text, and its classifier row is an estimate
(`estimated_rows`). Example queries of a new label shift both towards them and vote for it
(`example_queries.py`). Existing labels keep their vectors; if a label's text changed, its
dual-encoder vector is recomputed, and so is its classifier row if that row is an estimate. The
index is rebuilt with the same options: a second for 10,000 labels, minutes for a million (hours for
an HNSW graph).
The arrays of the new label set must fit in memory."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp
from scipy.sparse import csr_matrix

from unidec.bundle.bundle import Bundle
from unidec.bundle.bundle_folder import (
    KIND,
    VERSION,
    BundleLabels,
    Facts,
    KnnInfo,
    Scoring,
    write_bundle,
)
from unidec.bundle.bundle_info import BundleInfo
from unidec.bundle.example_queries import with_example_voters, with_examples
from unidec.bundle.label_file import LabelText, listing
from unidec.data.csr import ones_at
from unidec.data.lookalike import Known, difference, visible
from unidec.data.storage import read_manifest
from unidec.data.tokens import encode_texts
from unidec.errors import ConfigError, DataError
from unidec.ranking.heads import Heads, unit_rows
from unidec.ranking.index import LabelIndex
from unidec.ranking.neighbours import Neighbours
from unidec.ranking.query_encoder import Encoded
from unidec.ranking.sparse import Floats, Rows

NEAREST = 3
TEXT_SHARE = 0.6
MEAN_WEIGHT = 3.0  # of the mean row, if scores are cosines
_MANY = 1024  # texts, from which on encoding shows its progress


@dataclass(frozen=True)
class LabelChange:
    """Difference between a new label set and a bundle's; falsy if there is none.

    Attributes:
        uids, titles: uid and shown title of the L labels, in their new order.
        source_L: int64 [L], row of each label in the bundle; -1 for a new label.
        encoded_S: int64 [S] ascending, rows whose text is encoded. texts_S: these texts.
        added, removed, renamed: uids of labels that are new, removed, or have a changed text or
        title.
        example_rows_E: int64 [E], row of each example query's new label. examples: texts of the
        example queries.
    """

    uids: list[str]
    titles: list[str]
    source_L: Rows
    encoded_S: Rows
    texts_S: list[str]
    added: list[str]
    removed: list[str]
    renamed: list[str]
    example_rows_E: Rows
    examples: list[str]

    @classmethod
    def of(
        cls,
        bundle: Bundle,
        uids: Sequence[str],
        texts: Sequence[str],
        titles: Sequence[str] | None = None,
        examples: Sequence[LabelText] = (),
    ) -> LabelChange:
        """Compare a bundle's label set with a complete new one, in the new order.

        A bundle stores only the titles of its labels, so for a model of long texts all texts are
        encoded again.

        Args:
            examples: queries for which a label of the new set is correct: the label's uid and the
                query's text. Only for new labels and labels whose classifier row is an estimate,
                which is estimated again.

        Raises:
            DataError: there are no labels, a uid occurs twice, or the lists differ in length.
        """
        titles = texts if titles is None else titles
        counts = tuple(map(len, (uids, texts, titles)))
        if 0 in counts or len(set(counts)) > 1:
            raise DataError(
                "parts of the labels are missing",
                got="{} uids, {} texts, {} titles".format(*counts),
                expected="a uid, a text and a title of each label; at least one label",
            )
        repeated = list(Counter(uids) - Counter(set(uids)))
        if repeated:
            raise DataError(
                "uids that occur more than once",
                got=listing(repeated),
                fix="give each label a uid of its own",
            )
        before = _titles(bundle)
        shown = dict(zip(uids, titles, strict=True))
        renamed = {uid for uid in before.keys() & shown if before[uid] != shown[uid]}
        encoded = dict(zip(uids, texts, strict=True))
        if bundle.info.text == "title":
            exemplified = {query.uid for query in examples}
            for uid in before.keys() - renamed - exemplified:
                encoded.pop(uid, None)
        return cls._between(bundle, shown, encoded, renamed, examples)

    @classmethod
    def edit(
        cls,
        bundle: Bundle,
        add: Sequence[LabelText] = (),
        remove: Sequence[str] = (),
        update: Sequence[LabelText] = (),
        examples: Sequence[LabelText] = (),
    ) -> LabelChange:
        """Add, remove and update labels. All others keep their order, and new ones come last.

        Args:
            examples: queries for which an added label is correct: the label's uid and the query's
                text; any number per label.

        Raises:
            DataError: a uid is given twice, unknown or (to add) already present, a text is empty,
                a query's label is not added, or no label remains; lists all problems.
        """
        _check_edit(bundle, add, remove, update, examples)
        shown = _titles(bundle)
        long_texts = bundle.info.text != "title"
        # if a model of titles already has this text and title, the update changes nothing
        changed = [
            label
            for label in update
            if long_texts or not label.text == label.shown == shown[label.uid]
        ]
        encoded = {}
        for label in (*changed, *add):
            shown[label.uid] = label.shown
            encoded[label.uid] = label.text
        for uid in remove:
            del shown[uid]
        if not shown:
            raise DataError(
                "a bundle needs a label", got="all are removed", fix="keep one, or add one"
            )
        return cls._between(bundle, shown, encoded, {label.uid for label in changed}, examples)

    @classmethod
    def _between(
        cls,
        bundle: Bundle,
        shown: Mapping[str, str],
        encoded: Mapping[str, str],
        renamed: Collection[str],
        examples: Sequence[LabelText],
    ) -> LabelChange:
        """The change to the labels `shown` (uid to title), given the texts to encode, the uids of
        changed labels, and example queries.
        """
        row_of = bundle.row_of
        uids = list(shown)
        new_row_of = dict(zip(uids, range(len(uids)), strict=True))
        rows = [row for row, uid in enumerate(uids) if uid in encoded]
        return cls(
            uids=uids,
            titles=list(shown.values()),
            source_L=np.array([row_of.get(uid, -1) for uid in uids], dtype=np.int64),
            encoded_S=np.array(rows, dtype=np.int64),
            texts_S=[encoded[uids[row]] for row in rows],
            added=[uid for uid in uids if uid not in row_of],
            removed=[uid for uid in row_of if uid not in shown],
            renamed=[uid for uid in uids if uid in renamed],
            example_rows_E=np.array([new_row_of[query.uid] for query in examples], dtype=np.int64),
            examples=[query.text for query in examples],
        )

    def __bool__(self) -> bool:
        """Whether anything differs, including the order."""
        is_reordered = (np.diff(self.source_L) < 0).any()
        return bool(self.added or self.removed or self.renamed or is_reordered)

    @property
    def counts(self) -> dict[str, int]:
        """Number of labels "added", "removed", "renamed" and "kept"."""
        added = len(self.added)
        return {
            "added": added,
            "removed": len(self.removed),
            "renamed": len(self.renamed),
            "kept": len(self.uids) - added,
        }


def _titles(bundle: Bundle) -> dict[str, str]:
    """Titles of the bundle's labels by uid, in row order."""
    return dict(zip(bundle.row_of, bundle.titles.to_pylist(), strict=True))


def _check_edit(
    bundle: Bundle,
    add: Sequence[LabelText],
    remove: Sequence[str],
    update: Sequence[LabelText],
    examples: Sequence[LabelText],
) -> None:
    """Raise a DataError that lists every problem of an edit."""
    removed = [LabelText(uid, "") for uid in remove]
    groups = (("add", add), ("remove", removed), ("update", update))
    edits = [(kind, label) for kind, labels in groups for label in labels]
    found: list[tuple[LabelText, str]] = []
    known_labels = functools.cache(lambda: Known(bundle.row_of))
    first_edit: dict[str, str] = {}
    for kind, label in edits:
        uid = label.uid
        known = uid in bundle.row_of
        problem = ""
        if uid in first_edit:
            problem = f"{uid!r}: {first_edit[uid]} and {kind}; each label once"
        elif not uid.strip():
            problem = "a label without a uid"
        elif kind == "add" and known:
            problem = f"{uid!r} is in the bundle already: `unidec labels update` changes it"
        elif kind != "add" and not known:
            problem = _no_label(uid, known_labels())
        elif kind != "remove" and not label.text.strip():
            problem = f"{uid!r} has no text to be found by"
        first_edit.setdefault(uid, kind)
        found.append((label, problem))
    added = {label.uid for label in add}
    for query in examples:
        problem = ""
        if query.uid not in added:
            problem = f"a query of {query.uid!r}, which is not added here"
        elif not query.text.strip():
            problem = f"an empty query of {query.uid!r}"
        found.append((query, problem))
    problems = [": ".join(filter(None, (one.where, problem))) for one, problem in found if problem]
    if problems:
        raise DataError(
            f"{len(problems):,} problems in a change of labels; nothing was written",
            where=bundle.path,
            got=listing(problems),
            fix="correct them; `unidec export vectors` writes a table of all uids and titles",
        )


def _no_label(uid: str, known: Known) -> str:
    """Message that there is no such label, with the most similar uid."""
    other = known.like(uid)
    if other is None:
        return f"no label {uid!r}"
    words, fix = difference(uid, other)
    return f"no label {visible(uid)}; there is {visible(other)}, which differs in {words}; {fix}"


def with_labels(
    bundle: Bundle,
    path: str | os.PathLike[str],
    change: LabelChange,
    *,
    neighbours: Neighbours | None = None,
    dataset: Mapping[str, Any] | None = None,
    card: Mapping[str, Any] | None = None,
) -> Path:
    """Write a bundle with a changed label set but the same model and blend, deterministically.

    Args:
        bundle: the bundle from which the change was computed; it is not modified and can be served
        meanwhile.
        path: folder of the new bundle, different from the old one.
        neighbours: training queries with labels of the new set, examples included; None: the
            bundle's queries, without removed labels and without queries that have no other labels,
            and the change's examples.
        dataset, card: for bundle.json; None: copied from the old bundle. Metrics are omitted.

    Raises:
        ConfigError: `path` is the bundle itself.
        ValueError: the neighbours have other labels, or training queries do not vote in the bundle.
        ArtifactError: the bundle's folder is damaged, or the new one cannot be written.
    """
    path = Path(path)
    info = bundle.info
    if path.resolve() == bundle.path.resolve():
        raise ConfigError(
            "a bundle is not changed in place: it may be serving",
            where=path,
            fix=f"name another folder: {path}-new",
        )
    if info.knn is None and neighbours is not None:
        raise ValueError("no training queries vote in this bundle: it has no weight for them")
    read_manifest(bundle.path, KIND, VERSION, verify=True)
    examples = bundle.encode(change.examples) if change.examples else None
    scoring = Scoring(**{part.name: getattr(info, part.name) for part in fields(Scoring)})
    voters = None
    if voting := bundle.ranker.voting:
        voters = neighbours or _remapped_neighbours(bundle, voting.neighbours, change)
        if voters is not None and examples is not None and neighbours is None:
            compared_E = voting.compared(examples)
            voters = with_example_voters(voters, change.examples, change.example_rows_E, compared_E)
        if voters is None:  # fusion and calibration were fitted to scores with votes
            scoring = replace(scoring, knn=None, fusion=None, calibration=None)
        else:
            votes = KnnInfo.of(voters, voting.weight, voting.num, voting.head)
            scoring = replace(scoring, knn=votes)
    vectors, estimated_L = _changed_vectors(bundle, change, examples)
    heads = Heads(vectors, info.space, info.clf_normalize)
    return write_bundle(
        path,
        bundle.path / "model",
        index=LabelIndex.build(heads, bundle.index.spec),
        labels=BundleLabels(change.uids, change.titles, vectors, _ranges(estimated_L)),
        scoring=scoring,
        facts=Facts(
            text=info.text,
            dataset=dataset or info.dataset,
            params=info.params,
            card=card or info.card,
        ),
        neighbours=voters,
    )


def is_estimated(info: BundleInfo) -> npt.NDArray[np.bool_]:
    """Which of a bundle's labels have an estimated classifier row, bool [K]."""
    mask_K = np.zeros(info.num_labels, dtype=bool)
    for begin, end in info.estimated:
        mask_K[begin:end] = True
    return mask_K


def _ranges(mask_L: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Ranges [begin, end) of rows that are set."""
    changes = np.diff(mask_L.astype(np.int8), prepend=0, append=0)
    edges = np.flatnonzero(changes).reshape(-1, 2)
    return [(begin, end) for begin, end in edges.tolist()]


def _changed_vectors(
    bundle: Bundle, change: LabelChange, examples: Encoded | None
) -> tuple[dict[str, Floats], npt.NDArray[np.bool_]]:
    """Label arrays of the new bundle by name, and a bool mask [L] of labels with estimated
    classifier rows.
    """
    source_L = change.source_L
    encoded_S = change.encoded_S
    before = bundle.vectors
    model = bundle.model
    tokens = model.tokens(change.texts_S, "labels")
    desc = "labels" if len(change.texts_S) > _MANY else None
    de_SD, clf_SD = model.vectors("labels", tokens, desc=desc)
    if examples is not None:
        place_E = np.searchsorted(encoded_S, change.example_rows_E)
        de_SD = with_examples(de_SD, examples.de_BD, place_E)
        clf_SD = with_examples(clf_SD, examples.clf_BD, place_E)
    rows_L = np.maximum(source_L, 0)
    vectors = {name: array[rows_L] for name, array in before.items()}
    estimated_L = np.zeros(len(source_L), dtype=bool)
    if de_SD is not None:
        vectors["de"][encoded_S] = de_SD
    if clf_SD is not None:
        estimated_K = is_estimated(bundle.info)
        estimated_L = (source_L < 0) | estimated_K[source_L]
        # other labels keep their trained rows, even if the text changed
        estimate_S = estimated_L[encoded_S]
        rows_SD, bias = estimated_rows(
            before,
            np.flatnonzero(~estimated_K),
            clf_SD[estimate_S],
            None if de_SD is None else de_SD[estimate_S],
            bundle.info.clf_normalize,
        )
        estimated_S = encoded_S[estimate_S]
        vectors["clf"][estimated_S] = rows_SD
        if "bias" in vectors:
            vectors["bias"][estimated_S] = bias
    return vectors, estimated_L


def _remapped_neighbours(
    bundle: Bundle, neighbours: Neighbours, change: LabelChange
) -> Neighbours | None:
    """The bundle's training queries with the labels of the new set, without queries that lost all
    their labels; None if no query remains.
    """
    source_L = change.source_L
    kept_labels = np.flatnonzero(source_L >= 0)
    places = (source_L[kept_labels], kept_labels)
    shape = (neighbours.num_labels, len(source_L))
    labels_ML = csr_matrix(neighbours.labels_ML @ ones_at(places, shape))
    num_before_M = np.diff(neighbours.labels_ML.indptr)
    num_after_M = np.diff(labels_ML.indptr)
    kept_queries = np.flatnonzero((num_after_M > 0) | (num_before_M == 0))
    if not len(kept_queries):
        return None
    words = neighbours.words
    label_words = neighbours.label_words_LF
    if words is not None and label_words is not None:
        about = bundle.about
        tokens = encode_texts(change.texts_S, about.tokenizer_folder, about.max_length)
        place_S = np.arange(len(tokens))
        changed_words = words.vectors(*tokens.ragged(place_S))
        row_L = source_L.copy()
        row_L[change.encoded_S] = bundle.num_labels + place_S
        label_words = sp.vstack([label_words, changed_words], format="csr")[row_L]
    return Neighbours(
        neighbours.vectors_MD[kept_queries],
        labels_ML[kept_queries],
        neighbours.uids.take(kept_queries),
        neighbours.titles.take(kept_queries),
        words=words,
        label_words_LF=label_words,
    )


def estimated_rows(
    vectors: Mapping[str, Floats],
    trained: Rows,
    clf_SD: Floats,
    de_SD: Floats | None,
    normalize: bool = False,
) -> tuple[Floats, float]:
    """Estimate classifier rows and a bias for untrained labels, from their texts and from similar
    trained labels.

        row(s) = 0.6 h unit(Phi_C(s)) + 0.4 mean of the rows of the 3 nearest trained labels [+ 3
        mean of all rows]

    where h is the mean length of the trained rows, at most 1. The nearest labels have the largest
    inner product of dual-encoder vectors; without a dual encoder, the largest classifier score for
    the text. The text alone finds new labels well, but ranks them too high for other queries, which
    the rows of trained labels have learnt to avoid. The last term is added only if scores are
    cosines, which ignore a row's length. Measurements: benchmarks/results/label-changes.md.

    Args:
        vectors: a bundle's arrays, which may be memory-mapped: "clf" [K, D] and, if the model has
            them, "de" [K, D] and "bias" [K].
        trained: int64 ascending, rows of the trained labels; if empty, an estimated row is
        unit(Phi_C(s)).
        clf_SD, de_SD: float32 [S, D], output of both heads for the texts; de_SD is None without a
        dual encoder.
        normalize: the classifier's score is a cosine.

    Returns:
        The rows float32 [S, D], and the mean bias of the trained labels (0 without biases).
    """
    text_SD = unit_rows(clf_SD)
    bias = 0.0
    if not len(trained):
        return text_SD, bias
    if "bias" in vectors:
        bias = float(vectors["bias"][trained].mean(dtype=np.float64))
    clf_TD = vectors["clf"][trained]
    nearest_TD = clf_TD
    query_SD = text_SD
    if de_SD is not None:
        nearest_TD = vectors["de"][trained]
        query_SD = de_SD
    _, near_SN = LabelIndex.build(nearest_TD).search(query_SD, min(NEAREST, len(trained)))
    length = np.linalg.norm(clf_TD, axis=1).mean(dtype=np.float64)
    share = np.float32(TEXT_SHARE)
    own_SD = share * np.float32(min(1.0, float(length))) * text_SD
    rows_SD = own_SD + (1 - share) * clf_TD[near_SN].mean(axis=1)
    if normalize:
        mean_D = clf_TD.mean(axis=0, dtype=np.float64).astype(np.float32)
        rows_SD += np.float32(MEAN_WEIGHT) * mean_D
    return rows_SD, bias
