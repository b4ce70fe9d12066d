"""The gate: real data passes, every fault that can be stored fails it, and the verdict
says where.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.html_page import Loaded, Page
from scipy.sparse import csr_matrix

from unidec.config import Validation
from unidec.data.database import database
from unidec.data.dataset import XMCDataset, write_dataset
from unidec.data.raw import RawData, text_table
from unidec.data.storage import read_manifest, write_manifest
from unidec.errors import ArtifactError
from unidec.validation.distributions import distributions
from unidec.validation.facts import Reading, collect_facts, text_counts
from unidec.validation.suite import CHECKS, validate_dataset


def tampered(
    dataset: XMCDataset, path: Path, name: str, change: Callable[[np.ndarray], np.ndarray]
) -> Path:
    """A copy of a stored data set with one array changed and hashes that fit, as other software
    could write it.
    """
    shutil.copytree(dataset.path, path)
    np.save(path / name, change(np.load(path / name)))
    meta = read_manifest(path, "dataset", 1, verify=False)["meta"]
    (path / "manifest.json").unlink()
    write_manifest(path, "dataset", 1, meta)
    return path


def first(value: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(array: np.ndarray) -> np.ndarray:
        array[0] = value
        return array

    return change


def failed(verdict: dict, severity: str = "critical") -> list[tuple]:
    return [
        (r["table"], r["column"], r["unexpected_count"])
        for r in verdict["expectations"]
        if not r["success"] and r["severity"] == severity
    ]


def test_real_data_passes_and_the_verdict_is_the_same_each_time(
    slice_dataset: XMCDataset, drawn: None, tmp_path: Path
) -> None:
    verdict = validate_dataset(slice_dataset.path, tmp_path / "a")
    assert verdict["success"] and verdict["failed"] == []
    assert verdict["dataset_sha256"] == slice_dataset.sha256
    assert len(verdict["expectations"]) == 25
    written = (tmp_path / "a" / "result.json").read_bytes()
    assert json.loads(written) == json.loads(json.dumps(verdict))
    assert (tmp_path / "a" / "docs" / "index.html").is_file()
    page = (tmp_path / "a" / "index.html").read_text()
    page = re.sub(r' xmlns(:\w+)?="[^"]*"', "", page)  # names, not addresses
    assert (
        "http" not in page.replace("http-equiv", "")
        and "docs/index.html" in page
        and "<script" not in page
    )
    assert page.count("<figure>") == 3 and "queries with the text of another query" in page
    docs = {
        path.relative_to(tmp_path / "a"): path.read_text()
        for path in (tmp_path / "a").rglob("*.html")
    }
    assert len(docs) == 2 + 3 + 3
    assert not (tmp_path / "a" / "docs" / "static").exists()
    for place, html in docs.items():
        assert not Loaded(html).addresses, place
        assert "<script" not in html, place
        assert "default-src 'none'" in html, place
        links = re.findall(r'href="([^"#]+)"', html)
        assert links, (place, links)
        assert all((tmp_path / "a" / place.parent / link).is_file() for link in links), (
            place,
            links,
        )
        if "validations" in place.parts:  # what Great Expectations states is still there
            table = place.parts[2]
            stated = [one for one in verdict["expectations"] if one["table"] == table]
            assert stated, place
            assert all(one["description"] in html for one in stated), place
            passed = [one["success"] for one in stated]
            # and that of all
            assert html.count("fa-check-circle text-success") == sum(passed) + all(passed), place
    index = Page(docs[Path("docs/index.html")])
    assert len(index.rows) == 6
    assert index.row("validations of pairs")[1] == "passed"
    validate_dataset(slice_dataset.path, tmp_path / "b", docs=False)
    assert (tmp_path / "b" / "result.json").read_bytes() == written
    assert not (tmp_path / "b" / "docs").exists()


def test_distributions_and_duplicates_against_loops(
    raw_factory: Callable[..., RawData], tmp_path: Path
) -> None:
    raw = raw_factory(60, 20, 20, filters=False)
    train = raw.queries["train"].to_pydict()
    for column in ("title", "content"):
        train[column][3] = train[column][7]
    train["title"][5] = "Привет 42"
    train["content"][5] = ""
    raw = replace(
        raw,
        queries=raw.queries | {"train": text_table(train["uid"], train["title"], train["content"])},
    )
    dataset = write_dataset(tmp_path / "d", raw, validation_share=0.1, split_seed=0)
    long_texts = Reading("title+content")
    with database(tmp_path) as tables:
        collect_facts(tables, dataset, long_texts)
        lengths, positives, frequency = distributions(tables)
        counts = text_counts(tables, long_texts)
    texts = dataset.query_texts(np.arange(dataset.num_queries), "title+content")

    def share(values: list[int]) -> dict[str, float]:
        found = {}
        for value in values:
            low = 0 if value == 0 else 2 ** math.floor(math.log2(value))
            name = f"{low:,}"
            found[name] = found.get(name, 0) + 100 / len(values)
        return found

    def shown(chart: Any, column: int) -> dict[str, float]:
        return {row[0]: float(row[column]) for row in chart.table.rows if row[column] != "0"}

    points = [
        sum(label in dataset.relevance[row].indices for row in dataset.rows("train"))
        for label in range(20)
    ]
    for chart, column, values in (
        (lengths, 1, [len(text.strip()) for text in texts]),
        (frequency, 1, points),
        (positives, 1, [dataset.relevance[row].nnz for row in range(dataset.num_queries)]),
    ):
        assert shown(chart, column) == pytest.approx(share(values), rel=1e-3)
    repeated = sum(texts.count(text) > 1 for text in texts)
    assert counts["queries with the text of another query"] == repeated >= 2


def test_soft_faults_are_judged_by_thresholds(
    raw_factory: Callable[..., RawData], tmp_path: Path
) -> None:
    raw = raw_factory(2000, 300, 50, filters=False)
    train = raw.queries["train"].to_pydict()
    test = raw.queries["test"].to_pydict()
    train["title"][7] = " "
    train["content"][7] = ""
    train["title"][9] = "<b>&"
    train["content"][9] = ""
    test["title"][5] = train["title"][3]
    test["content"][5] = train["content"][3]
    labels = raw.labels.to_pydict()
    for column in ("title", "content"):
        labels[column][4] = labels[column][2]
    relevance = raw.relevance["train"].tolil()
    relevance[11] = 0
    raw = replace(
        raw,
        queries={"train": text_table(*train.values()), "test": text_table(*test.values())},
        labels=text_table(*labels.values()),
        relevance={**raw.relevance, "train": csr_matrix(relevance)},
        filter_pairs={**raw.filter_pairs, "train": csr_matrix(raw.relevance["train"].astype(bool))},
    )
    dataset = write_dataset(tmp_path / "d", raw)
    long_texts = Reading("title+content")
    verdict = validate_dataset(dataset.path, tmp_path / "v", docs=False, reading=long_texts)
    assert verdict["success"]
    found = {(table, column): count for table, column, count in failed(verdict, "warning")}
    assert found[("queries", "text_length")] == 1
    assert found[("queries", "num_positives")] == 2  # row 11, and the first test query
    assert found[("queries", "text_in_train")] >= 1
    assert found[("labels", "labels_with_this_text")] == 2
    assert found[("pairs", "filtered")] == raw.relevance["train"].nnz
    samples = {
        (r["table"], r["column"]): r["samples"] for r in verdict["expectations"] if not r["success"]
    }
    expected = [{"row": 7, "uid": "train-7", "value": 0}]
    assert samples[("queries", "text_length")] == expected
    assert {"row": 2005, "uid": "test-5", "value": 1.0} in samples[("queries", "text_in_train")]
    rows = [s["row"] for s in samples[("queries", "num_positives")]]
    assert rows == [11, 2000]
    assert len(samples[("pairs", "filtered")]) == 20
    assert any("row 7 (train-7)" in line for line in verdict["warnings"])
    strict = Validation(
        empty_texts="0 error",
        test_texts_in_train="0 error",
        queries_without_positives="0 error",
        label_texts_given_twice="0 error",
    )
    verdict = validate_dataset(
        dataset.path, tmp_path / "v", docs=False, limits=strict, reading=long_texts
    )
    assert not verdict["success"]
    columns = {column for _, column, _ in failed(verdict)}
    assert columns == {"text_length", "text_in_train", "num_positives", "labels_with_this_text"}


def test_a_severity_decides_what_a_share_beyond_its_bound_means(
    raw_factory: Callable[..., RawData], tmp_path: Path
) -> None:
    raw = raw_factory(60, 20, 10)
    train = raw.queries["train"].to_pydict()
    train["title"][7] = ""
    train["content"][7] = ""
    write_dataset(
        tmp_path / "d", replace(raw, queries={**raw.queries, "train": text_table(*train.values())})
    )
    found = {}
    for severity in ("error", "warn", "off"):
        limits = Validation(empty_texts=f"0 {severity}", test_texts_in_train="off")
        verdict = validate_dataset(tmp_path / "d", tmp_path / "v", docs=False, limits=limits)
        found[severity] = [
            [line for line in verdict[kind] if "empty texts" in line]
            for kind in ("failed", "warnings")
        ]
        assert "text_in_train" not in {r["column"] for r in verdict["expectations"]}
    [line] = found["error"][0]
    assert line.startswith("queries: empty texts: none allowed; found 1 of 80") and line.endswith(
        "validation.empty_texts"
    )
    assert found == {
        "error": [[line], []],
        "warn": [[], [line]],
        "off": [[], []],
    }


def test_every_check_has_a_limit_in_the_parameters() -> None:
    assert set(Validation.model_fields) == {check.key for check in CHECKS if check.key}


def test_empty_texts_and_leaks_fail_by_default(
    raw_factory: Callable[..., RawData], tmp_path: Path
) -> None:
    raw = raw_factory(60, 20, 10)
    train = raw.queries["train"].to_pydict()
    test = raw.queries["test"].to_pydict()
    train["title"][7] = ""
    train["content"][7] = "\u00a0"
    test["title"][5] = train["title"][3]
    test["content"][5] = train["content"][3]
    raw = replace(
        raw, queries={"train": text_table(*train.values()), "test": text_table(*test.values())}
    )
    write_dataset(tmp_path / "d", raw)
    verdict = validate_dataset(tmp_path / "d", tmp_path / "v", docs=False)
    assert not verdict["success"]
    assert ("queries", "text_length", 1) in failed(verdict)
    assert any("row 7 (train-7)" in line for line in verdict["failed"])
    assert any("row 65 (test-5)" in line for line in verdict["failed"])
    assert "failed: 2 critical" in (tmp_path / "v" / "index.html").read_text()


def test_what_other_software_may_have_stored(tiny_dataset: XMCDataset, tmp_path: Path) -> None:
    for name, value in (
        ("nan", np.nan),
        ("minus", -1.0),
        ("zero", 0.0),
        ("infinite", np.inf),
    ):
        path = tampered(tiny_dataset, tmp_path / name, "relevance_data.npy", first(value))
        verdict = validate_dataset(path, tmp_path / "v", docs=False)
        assert [(table, column) for table, column, _ in failed(verdict)] == [
            ("pairs", "relevance")
        ], name
        sample = next(
            r["samples"]
            for r in verdict["expectations"]
            if r["table"] == "pairs" and not r["success"]
        )[0]
        assert (sample["query"], sample["uid"]) == (0, "train-0")
    path = tampered(
        tiny_dataset,
        tmp_path / "split",
        "split.npy",
        lambda split: np.where(split == 0, 1, split).astype(np.uint8),
    )
    verdict = validate_dataset(path, tmp_path / "v", docs=False)
    assert any("the train split has queries" in line for line in verdict["failed"])

    def twice(indices: np.ndarray) -> np.ndarray:
        row = np.flatnonzero(np.diff(tiny_dataset.relevance.indptr) > 1)[0]
        start = tiny_dataset.relevance.indptr[row]
        indices[start + 1] = indices[start]
        return indices

    path = tampered(tiny_dataset, tmp_path / "twice", "relevance_indices.npy", twice)
    verdict = validate_dataset(path, tmp_path / "v", docs=False)
    assert any(
        "pairs that occur twice: none allowed; found 2" in line for line in verdict["failed"]
    )


def test_degenerate_data_has_a_verdict(raw_factory: Callable[..., RawData], tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", raw_factory(2, 1, 1))
    verdict = validate_dataset(tmp_path / "d", tmp_path / "v", docs=False)
    assert len(verdict["expectations"]) == 25
    raw = raw_factory(2, 0, 3)
    none = {
        split: csr_matrix(matrix.shape, dtype=np.float32) for split, matrix in raw.relevance.items()
    }
    write_dataset(tmp_path / "e", replace(raw, relevance=none))
    verdict = validate_dataset(tmp_path / "e", tmp_path / "v", docs=False)
    assert not verdict["success"] and any(
        "the table of pairs is not empty" in line for line in verdict["failed"]
    )


def test_a_damaged_data_set_is_not_judged(tiny_dataset: XMCDataset, tmp_path: Path) -> None:
    shutil.copytree(tiny_dataset.path, tmp_path / "d")
    (tmp_path / "d" / "labels.arrow").write_bytes(b"ARROW1")
    with pytest.raises(ArtifactError, match=r"labels\.arrow"):
        validate_dataset(tmp_path / "d", tmp_path / "v")
    assert not (tmp_path / "v").exists()
