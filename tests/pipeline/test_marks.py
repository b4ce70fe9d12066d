"""`unidec data from-feedback`: the page's marks become training data, and nothing of the test split
does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unidec import cli, pipeline
from unidec.data.dataset import XMCDataset
from unidec.errors import ConfigError, DataError
from unidec.pipeline import paths
from unidec.pipeline.marks import from_feedback


class MarkedProject:
    """An ingested data set in the working folder, and a file of marks."""

    def __init__(self, work: Any, folder: Path) -> None:
        self.work = work
        self.folder = folder
        self.file = folder / "marks.jsonl"
        self.params = work.params(**{"data.path": str(work.folder / "raw")})
        pipeline.ingest(self.params)
        self.data = paths.open_dataset()
        self.labels = self.data.label_uids()
        self.at = 0

    def query(self, split: Any, place: int = 0) -> tuple[str, str, set[str]]:
        """uid, title and labels of a query of a split, whose title no other query has."""
        titles = self.data.query_texts()
        rows = [row for row in self.data.rows(split) if titles.count(titles[row]) == 1]
        row = rows[place]
        columns = self.data.relevance[row].indices
        return (
            self.data.query_uids([row])[0],
            titles[row],
            {self.labels[column] for column in columns},
        )

    def other(self, labels: set[str]) -> str:
        return next(uid for uid in self.labels if uid not in labels)

    def mark(self, query: str, label: str, relevant: bool, at: str | None = None) -> None:
        self.at += 1
        row = {
            "query": query,
            "label": label,
            "relevant": relevant,
            "at": at or f"2026-11-27T00:00:{self.at:02d}+00:00",
        }
        with self.file.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def run(self, name: str = "out") -> Any:
        return from_feedback(self.params, [self.file], self.folder / name)

    def rows(self, name: str, folder: str = "out") -> list[dict[str, Any]]:
        return [
            json.loads(line)
            for line in (self.folder / folder / f"{name}.jsonl").read_text().splitlines()
        ]

    def pairs(self, folder: str = "out", name: str = "pairs") -> set[tuple[str, str]]:
        return {(row["query_id"], row["label_id"]) for row in self.rows(name, folder)}


@pytest.fixture
def project(work: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MarkedProject:
    monkeypatch.chdir(tmp_path)
    return MarkedProject(work, tmp_path)


def test_marks_become_pairs_and_filter_pairs(project: MarkedProject) -> None:
    uid, title, labels = project.query("train")
    more = project.other(labels)
    known = sorted(labels)[0]
    project.mark(f"  {title.upper()} ", more, True)
    project.mark(title, known, False)
    project.mark("a query that is new", more, True)
    project.mark("A  query that is NEW", known, False)
    project.mark("only wrong", known, False)
    found = project.run()
    assert found.marks == 5
    assert found.pairs == 2
    assert found.filter_pairs == 2
    assert found.queries == 1
    assert found.removed == 1
    assert found.only_negative == 1
    assert found.unknown == 0
    new = next(row for row in project.rows("queries") if row["id"].startswith("feedback-"))
    assert (new["text"], new["split"]) == ("A query that is NEW", "train")
    assert {(uid, more), (new["id"], more)} <= project.pairs()
    assert (
        uid,
        known,
    ) not in project.pairs()
    assert project.pairs(name="filters") >= {(uid, known), (new["id"], known)}
    assert len(project.rows("labels")) == len(project.labels)


def test_the_last_mark_decides_and_unknown_labels_are_named(
    project: MarkedProject, caplog: pytest.LogCaptureFixture
) -> None:
    uid, title, labels = project.query("train")
    label = project.other(labels)
    project.mark(title, label, True)
    project.mark(title, label, False)
    project.mark(title, label, True, at="2020-01-01T00:00:00+00:00")  # of an older file
    project.mark(title, "no such label", True)
    with project.file.open("a") as file:
        file.write('{"query": "cut o')
    found = project.run()
    assert found.marks == 2
    assert found.repeated == 2
    assert found.unknown_labels == ["no such label"]
    assert (uid, label) in project.pairs(name="filters")
    assert (uid, label) not in project.pairs()
    assert f"{project.file}:5 is skipped" in caplog.text


@pytest.mark.parametrize("split", ["test", "validation"])
def test_marks_on_held_out_queries_are_not_used(project: MarkedProject, split: str) -> None:
    _, title, labels = project.query(split)
    project.mark(title, project.other(labels), True)
    project.mark(title.upper(), sorted(labels)[0], False)
    found = project.run()
    assert getattr(found, split) == 2 and not (
        found.pairs or found.filter_pairs or found.queries or found.removed
    )
    assert len(project.rows("pairs")) == project.data.relevance.nnz


def test_the_same_marks_again_change_nothing_and_training_goes_on_with_the_same_splits(
    project: MarkedProject,
) -> None:
    _, title, labels = project.query("train")
    label = project.other(labels)
    for row in range(3):
        project.mark(f"{title} again {row}", label, True)
    project.mark(title, label, True)
    project.run()
    before = {path.name: path.read_bytes() for path in (project.folder / "out").iterdir()}
    project.run()
    assert before == {path.name: path.read_bytes() for path in (project.folder / "out").iterdir()}
    project.params = project.work.params(**{"data.path": str(project.folder / "out")})
    ingested = pipeline.ingest(project.params)
    data = paths.open_dataset()
    for split in ("test", "validation"):
        assert data.query_uids(data.rows(split)) == project.data.query_uids(
            project.data.rows(split)
        )
    train = ingested["train"]
    assert train == project.data.rows("train").size + 3
    again = project.run("next")
    assert again.unchanged == 4
    assert not (again.pairs or again.queries or again.removed)
    assert project.pairs("next") == project.pairs()
    assert len(project.rows("queries", "next")) == len(project.rows("queries"))


def test_a_model_is_trained_on_the_marks(project: MarkedProject) -> None:
    """Through the stages of the pipeline; the query of the marks is among the training queries of
    the bundle.
    """
    _, _, labels = project.query("train")
    for row in range(4):
        project.mark(f"zzzz marked {row}", sorted(labels)[0], True)
    project.mark("zzzz marked 0", project.other(labels), False)
    project.run()
    bert = project.work.folder / "bert"
    params = project.work.params(
        **{"data.path": "out", "encoder.name": str(bert), "optim.epochs": 1}
    )
    for stage in (pipeline.ingest, pipeline.tokens, pipeline.propensity, pipeline.label_graph):
        stage(params)
    trained = pipeline.train(params)
    assert trained is not None and (paths.MODEL / "manifest.json").is_file()
    data: XMCDataset = paths.open_dataset()
    rows = [row for row, title in enumerate(data.query_texts()) if title.startswith("zzzz marked")]
    assert (
        len(rows) == 4
        and np.isin(rows, data.rows("train")).all()
        and data.filter_pairs[rows].nnz == 1
    )


def test_what_is_refused(project: MarkedProject) -> None:
    project.file.write_text('{"query": "x", "label": 3, "relevant": true}\n')
    with pytest.raises(DataError, match=r"marks\.jsonl:1: not a mark"):
        project.run()
    (project.folder / "mine").mkdir()
    (project.folder / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="something else"):
        project.run("mine")
    assert (project.folder / "mine" / "notes.txt").read_text() == "mine"


def test_the_command_says_counts_and_what_is_next(
    project: MarkedProject, capsys: pytest.CaptureFixture[str]
) -> None:
    _, title, labels = project.query("train")
    project.mark(title, project.other(labels), True)
    Path("params.yaml").write_text("recipe: unidec\n")
    with pytest.raises(SystemExit) as ended:
        cli.app(args=["data", "from-feedback", str(project.file), "--output", "out"])
    assert not ended.value.code
    said = capsys.readouterr().out
    assert "from-feedback: pairs = 1" in said and "unidec init --data-path out" in said
