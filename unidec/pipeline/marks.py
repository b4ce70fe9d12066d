"""Turns marks from the server's page into data for the next training: writes new tables with the
ingested data set and the marks.

A mark *relevant* becomes a pair, a mark *not relevant* a filter pair. Splits do not change: marks
on held-out queries are not used, and new queries become training queries.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from unidec.config import Params
from unidec.data.dataset import XMCDataset
from unidec.data.line_file import readable_rows
from unidec.data.raw import SPLITS
from unidec.data.storage import swap_folder, text_sha256
from unidec.errors import ConfigError, DataError
from unidec.pipeline import paths

FILES = ("queries.jsonl", "labels.jsonl", "pairs.jsonl", "filters.jsonl")
NEW = "feedback-"  # prefix of the ids of queries that come from marks
_COLUMNS = ("query", "label", "relevant", "at")
_NAMED = 20  # maximum number of unknown labels that are listed


@dataclass(frozen=True)
class Mark:
    """A person's judgement of whether a label is relevant for a query; `at`: its time, or ""."""

    query: str
    label: str
    relevant: bool
    at: str


@dataclass
class FromFeedback:
    """How the marks were used.

    Attributes:
        marks: latest judgements, one for each query and label; `repeated`: earlier judgements that
        a later one replaced.
        pairs, filter_pairs: added ones. removed: pairs and filter pairs that the marks contradict.
        queries: new training queries.
        unchanged: marks that agree with the data.
        test, validation: marks on queries of that split; not used.
        only_negative: marks on new queries without a relevant label; not used, since nothing can be
        learnt from them.
        unknown: marks on labels that the data set does not have; not used. unknown_labels: the
        first of these labels.
        output: folder of the tables.
    """

    marks: int = 0
    repeated: int = 0
    pairs: int = 0
    filter_pairs: int = 0
    removed: int = 0
    queries: int = 0
    unchanged: int = 0
    test: int = 0
    validation: int = 0
    only_negative: int = 0
    unknown: int = 0
    unknown_labels: list[str] = field(default_factory=list)
    output: str = ""


def from_feedback(params: Params, files: Sequence[Path], output: Path) -> FromFeedback:
    """Write data/dataset, changed by the marks in these files, as tables to a new folder or to one
    from an earlier call.

    Applying the same marks again changes nothing, even if the tables were ingested meanwhile.
    Truncated lines are skipped with a warning.

    Raises:
        DataError: a file is not a file of marks. ConfigError: the folder holds something else.
            ArtifactError: there is no data set, or the folder cannot be written.
    """
    _check_output(output)
    dataset = paths.open_dataset()
    read = [mark for file in files for mark in read_marks(file)]
    by_query: dict[str, dict[str, Mark]] = {}  # the latest mark of each query and label
    for mark in sorted(read, key=lambda mark: mark.at):
        by_query.setdefault(same_text(mark.query), {})[mark.label] = mark
    num_last = sum(map(len, by_query.values()))
    result = FromFeedback(marks=num_last, repeated=len(read) - num_last, output=str(output))
    tables = _Tables(dataset, params.tokens.text, result)
    for query, marks in by_query.items():
        tables.take(query, list(marks.values()))
    with swap_folder(output) as folder:
        tables.write(folder)
    return result


def read_marks(path: Path) -> list[Mark]:
    """The marks in a file written for `serve.feedback`, in file order.

    Raises:
        DataError: a row is not a mark.
    """
    marks = []
    for line, row in readable_rows(path, _COLUMNS):
        match row:
            case {"query": str(query), "label": str(label), "relevant": bool(relevant)} if (
                query.strip()
            ):
                marks.append(Mark(query, label, relevant, str(row.get("at") or "")))
            case _:
                raise DataError(
                    "not a mark",
                    where=f"{path}:{line}",
                    got=str(row)[:200],
                    expected='{"query": "a text", "label": "a uid", "relevant": true}',
                    fix="name a file that `unidec serve --feedback` wrote",
                )
    return marks


def same_text(text: str) -> str:
    """Normalise case and white space; texts that differ only in these become equal."""
    return " ".join(text.lower().split())


def _check_output(folder: Path) -> None:
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    other = sorted(names - set(FILES))
    if folder.is_file() or other:
        raise ConfigError(
            "the folder holds something else",
            where=folder,
            got=", ".join(other[:5]) or "a file",
            expected="a new folder, or one that this command wrote",
            fix="name another one: --output FOLDER",
        )


class _Tables:
    """The rows of the tables: a data set's rows, changed by marks."""

    def __init__(self, dataset: XMCDataset, text: Any, result: FromFeedback) -> None:
        self.dataset = dataset
        self.result = result
        self.uids = dataset.query_uids()
        self.label_uids = dataset.label_uids()
        self.labels = frozenset(self.label_uids)
        numbers = zip(self.uids, dataset.split_N, strict=True)
        self.split_of = {uid: SPLITS[number] for uid, number in numbers}
        self.new: dict[str, str] = {}  # uid -> text
        self.pairs = self._pairs_of(dataset.relevance)
        self.filters = self._pairs_of(dataset.filter_pairs)
        self.uids_of: dict[str, dict[str, None]] = {}  # text -> uids, in their order
        for shown in ("title", text):
            for uid, one in zip(self.uids, dataset.query_texts(text=shown), strict=True):
                self.uids_of.setdefault(same_text(one), {})[uid] = None

    def _pairs_of(self, matrix: Any) -> dict[tuple[str, str], float]:
        found = matrix.tocoo()
        pairs = zip(found.row, found.col, found.data, strict=True)
        return {(self.uids[row], self.label_uids[label]): float(data) for row, label, data in pairs}

    def take(self, query: str, marks: Sequence[Mark]) -> None:
        """Apply the marks of one query."""
        result = self.result
        known = [mark for mark in marks if mark.label in self.labels]
        unknown = [mark.label for mark in marks if mark.label not in self.labels]
        num_known = len(known)
        result.unknown += len(unknown)
        named = dict.fromkeys([*result.unknown_labels, *unknown])
        result.unknown_labels = list(named)[:_NAMED]
        uids = list(self.uids_of.get(query, {}))
        splits = {self.split_of[uid] for uid in uids}
        if "test" in splits:
            result.test += num_known
        elif "validation" in splits:
            result.validation += num_known
        elif uids:
            self._change(uids, known)
        elif not any(mark.relevant for mark in known):
            result.only_negative += num_known
        else:
            uid = NEW + text_sha256(query)[:16]
            self.new[uid] = " ".join(marks[-1].query.split())
            result.queries += 1
            self._change([uid], known)

    def _change(self, uids: Sequence[str], marks: Iterable[Mark]) -> None:
        result = self.result
        for mark in marks:
            here, there = self.filters, self.pairs
            if mark.relevant:
                here, there = there, here
            keys = [(uid, mark.label) for uid in uids]
            missing = [key for key in keys if key not in here]
            wrong = [key for key in keys if there.pop(key, None) is not None]
            here |= dict.fromkeys(missing, 1.0)
            result.removed += len(wrong)
            result.unchanged += not missing and not wrong
            if mark.relevant:
                result.pairs += len(missing)
            else:
                result.filter_pairs += len(missing)

    def write(self, folder: Path) -> None:
        """Write the four tables."""
        queries = _text_rows(self.dataset.queries)
        for row in queries:
            row["split"] = self.split_of[row["id"]]
        queries += [
            {"id": uid, "text": text, "content": "", "split": "train"}
            for uid, text in sorted(self.new.items())
        ]
        labels = _text_rows(self.dataset.labels)
        pairs: list[dict[str, Any]] = [
            {"query_id": query, "label_id": label, "relevance": value}
            for (query, label), value in sorted(self.pairs.items())
        ]
        filters: list[dict[str, Any]] = [
            {"query_id": query, "label_id": label} for query, label in sorted(self.filters)
        ]
        for name, rows in zip(FILES, (queries, labels, pairs, filters), strict=True):
            with (folder / name).open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _text_rows(texts: pa.Table) -> list[dict[str, Any]]:
    table = texts.select(["uid", "title", "content"])
    return table.rename_columns(["id", "text", "content"]).to_pylist()
