"""How a label set differs from a bundle's: a whole new one, or some labels added, removed and changed.

Legend: L labels of the new set, K labels of the bundle, S those of the new set whose text is encoded.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from unidec.errors import DataError
from unidec.retrieval.bundle import Bundle

Rows = npt.NDArray[np.int64]

MOST_SHOWN = 10  # problems in one message
_MOST_COMPARED = 50_000  # uids that an unknown one is compared with


@dataclass(frozen=True)
class LabelText:
    """A label to add, or what an existing one shall say.

    Attributes:
        uid: its name.
        text: what is encoded; for a model of long texts title and content joined by a space.
        title: what is shown; "": the text.
        where: `file:line`, for messages.
    """

    uid: str
    text: str
    title: str = ""
    where: str = ""


@dataclass(frozen=True)
class LabelChange:
    """How a label set differs from a bundle's.

    Attributes:
        uids, titles: Arrow strings [L], of the labels in their new order; the title is what is shown.
        source_L: int64 [L], each label's row in the bundle; -1: it is new.
        encoded_S: int64 [S] ascending, rows whose text is encoded: new ones, and those whose text is or may be another.
        texts_S: what is encoded of them.
        added, removed, renamed: uids of new labels, of those that leave, and of those that show another title.
    """

    uids: pa.Array
    titles: pa.Array
    source_L: Rows
    encoded_S: Rows
    texts_S: list[str]
    added: list[str]
    removed: list[str]
    renamed: list[str]

    @classmethod
    def of(
        cls, bundle: Bundle, uids: Sequence[str], texts: Sequence[str], titles: Sequence[str] | None = None
    ) -> LabelChange:
        """Compare a bundle's labels with these.

        Args:
            bundle: what answers now.
            uids: of all labels of the new set, each once.
            texts: what is encoded; for a model of long texts title and content joined by a space. A bundle knows its
                labels' titles only: for such a model every text is encoded again, else those of another title.
            titles: what is shown; None: the texts.

        Raises:
            DataError: no label, a uid twice, or lists of different lengths.
        """
        titles = texts if titles is None else titles
        if not len(uids) or not len(uids) == len(texts) == len(titles):
            got = f"{len(uids)} uids, {len(texts)} texts, {len(titles)} titles"
            raise DataError("labels need a uid, a text and a title each, and there must be one", got=got)
        own, shown = pa.array(uids, pa.string()), pa.array(titles, pa.string())
        if len(own.unique()) != len(own):
            twice = Counter(uids).most_common(1)[0][0]
            raise DataError("a label uid stands twice", got=twice, fix="give each label a uid of its own")
        source_L = _rows_of(own, bundle.uids)
        is_new_L = source_L < 0
        before = bundle.titles.take(pa.array(np.maximum(source_L, 0)))
        renamed_L = np.asarray(pc.not_equal(before, shown)) & ~is_new_L
        every = bundle.info.text != "title"
        encoded_S = np.flatnonzero(np.ones(len(own), dtype=bool) if every else is_new_L | renamed_L)
        left_K = np.ones(bundle.num_labels, dtype=bool)
        left_K[source_L[~is_new_L]] = False
        return cls(
            own, shown, source_L, encoded_S, [texts[row] for row in encoded_S.tolist()],
            added=_taken(own, np.flatnonzero(is_new_L)), removed=_taken(bundle.uids, np.flatnonzero(left_K)),
            renamed=_taken(own, np.flatnonzero(renamed_L)),
        )  # fmt: skip

    @classmethod
    def edit(
        cls,
        bundle: Bundle,
        add: Sequence[LabelText] = (),
        remove: Sequence[str] = (),
        update: Sequence[LabelText] = (),
    ) -> LabelChange:
        """Some labels come, go, or say something else; all others stay, in their order, and new ones come last.

        Args:
            bundle: what answers now.
            add: labels that it does not have.
            remove: uids of labels that it has.
            update: labels that it has, with another text or title.

        Raises:
            DataError: all that is wrong at once: a uid that stands twice, is unknown (with the nearest one there is) or
                is there already, a text without a word, or no label left.
        """
        shown = [
            replace(item, title=item.title if item.title.strip() else item.text)
            for items in (add, update)
            for item in items
        ]
        come, changed = shown[: len(add)], shown[len(add) :]
        _check(bundle, come, remove, changed)
        kept_K = np.ones(bundle.num_labels, dtype=bool)
        kept_K[_rows_of(pa.array(list(remove), pa.string()), bundle.uids)] = False
        if not kept_K.any() and not come:
            raise DataError("a bundle needs a label", got="all are removed", fix="keep one, or add one")
        kept = np.flatnonzero(kept_K)
        source_L = np.concatenate([kept, np.full(len(come), -1)]).astype(np.int64)
        at = _rows_of(pa.array([item.uid for item in changed], pa.string()), bundle.uids)
        titles = bundle.titles
        said = pa.array([item.title for item in changed], pa.string())
        differs = np.asarray(pc.not_equal(titles.take(pa.array(at)), said), dtype=bool)
        if bundle.info.text == "title":  # the title is the text: what is the same already is no change
            texts = [item.text != item.title for item in changed]
            moved = differs | np.asarray(texts, dtype=bool)
        else:
            moved = np.ones(len(changed), dtype=bool)
        changed, at, said, differs = (
            [changed[i] for i in np.flatnonzero(moved)], at[moved], said.filter(pa.array(moved)), differs[moved],
        )  # fmt: skip
        if len(at):
            mask = np.zeros(bundle.num_labels, dtype=bool)
            mask[at] = True
            order = np.argsort(at)
            titles = pc.replace_with_mask(titles, pa.array(mask), said.take(pa.array(order)))
            changed, at = [changed[i] for i in order], at[order]
        place = np.searchsorted(kept, at)
        new = np.arange(len(kept), len(source_L))
        uids = _joined(bundle.uids, kept, [item.uid for item in come])
        return cls(
            uids, _joined(titles, kept, [item.title for item in come]), source_L, np.concatenate([place, new]),
            [item.text for item in (*changed, *come)], added=[item.uid for item in come], removed=list(remove),
            renamed=[item.uid for item in changed],
        )  # fmt: skip

    def __bool__(self) -> bool:
        """Whether anything differs, the order included."""
        return bool(self.added or self.removed or self.renamed or (np.diff(self.source_L) < 0).any())

    @property
    def kept(self) -> int:
        """Labels that were there before."""
        return len(self.uids) - len(self.added)

    @property
    def counts(self) -> dict[str, int]:
        """How many labels were "added", "removed", "renamed" and "kept"."""
        return {name: len(getattr(self, name)) for name in ("added", "removed", "renamed")} | {"kept": self.kept}


def _check(bundle: Bundle, add: Sequence[LabelText], remove: Sequence[str], update: Sequence[LabelText]) -> None:
    """Everything that is wrong with an edit, in one error."""
    items = [*add, *(LabelText(uid, "") for uid in remove), *update]
    known = _rows_of(pa.array([item.uid for item in items], pa.string()), bundle.uids) >= 0
    problems: list[str] = []
    seen: dict[str, str] = {}
    kinds = ["add"] * len(add) + ["remove"] * len(remove) + ["update"] * len(update)
    for item, kind, there in zip(items, kinds, known.tolist(), strict=True):
        where = f"{item.where}: " if item.where else ""
        if item.uid in seen:
            other = f"{seen[item.uid]} and {kind}" if seen[item.uid] != kind else f"{kind} twice"
            problems.append(f"{where}{item.uid!r}: {other}; each label once")
            continue
        seen[item.uid] = kind
        if not item.uid.strip():
            problems.append(f"{where}a label without a uid")
        elif kind == "add" and there:
            problems.append(f"{where}{item.uid!r} is in the bundle already: `unidec labels update` changes it")
        elif kind != "add" and not there:
            problems.append(f"{where}no label {item.uid!r}{_nearest(item.uid, bundle.uids)}")
        elif kind != "remove" and not item.text.strip():
            problems.append(f"{where}{item.uid!r} has no text: nothing could find it")
    if problems:
        more = f"\n  and {len(problems) - MOST_SHOWN:,} more" if len(problems) > MOST_SHOWN else ""
        count = f"{len(problems):,} labels are" if len(problems) > 1 else "a label is"
        raise DataError(
            f"{count} not fit; nothing was written", where=str(bundle.path),
            got="\n    ".join(["", *problems[:MOST_SHOWN]]).rstrip() + more,
            fix="mend them and run it again; `unidec export vectors` writes a table of all uids and titles",
        )  # fmt: skip


def _nearest(uid: str, uids: pa.Array) -> str:
    """In words, the uid that is spelt most like this one."""
    lengths = np.asarray(pc.utf8_length(uids))
    near = np.flatnonzero(np.abs(lengths - len(uid)) <= max(2, len(uid) // 3))
    if len(near) > _MOST_COMPARED:  # those that begin alike
        begins = np.asarray(pc.starts_with(uids, uid[:2], ignore_case=True))[near]
        near = near[begins][:_MOST_COMPARED]
    found = difflib.get_close_matches(uid, uids.take(pa.array(near)).to_pylist(), n=1)
    return f"; did you mean {found[0]!r}?" if found else ""


def _rows_of(uids: pa.Array, among: pa.Array) -> Rows:
    """The row of each uid, int64; -1 where there is none."""
    found = pc.fill_null(pc.index_in(uids, value_set=among), -1)
    return np.asarray(found, dtype=np.int64)


def _joined(column: pa.Array, rows: Rows, more: Iterable[str]) -> pa.Array:
    return pa.concat_arrays([column.take(pa.array(rows)), pa.array(list(more), pa.string())])


def _taken(column: pa.Array, rows: Rows) -> list[str]:
    return column.take(pa.array(rows, pa.int64())).to_pylist()
