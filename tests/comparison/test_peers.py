"""The peers against loops written from their definitions; how a script is started, and what comes
back from it.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest
import scipy.sparse as sp

from unidec.comparison.peers import PEERS, linear, running
from unidec.comparison.peers.running import (
    features,
    requirements,
    run_peer,
    start_command,
    write_task,
)
from unidec.errors import ArtifactError, DataError, TrainingError
from unidec.evaluation.baselines import top_rows
from unidec.evaluation.metrics import evaluate

SETTINGS = {
    "text": "title",
    "max_length": 16,
    "encoder": "",
    "pooling": "mean",
    "epochs": 3,
    "batch_size": 8,
    "threads": 1,
    "seed": 4,
}
SCRIPTS = Path(running.__file__).parent


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# -- TF-IDF
# --------------------------------------------------------------------------------------------------


def dense_reference(dataset, match_weight=0.5):
    """kNN votes of all training queries, label match and mix by loops over queries, words and
    labels, in float64.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer

    words = TfidfVectorizer(stop_words="english").build_analyzer()
    rows = dataset.rows("train")
    test = dataset.rows("test")
    train_texts, test_texts, label_texts = (
        [words(text) for text in texts]
        for texts in (dataset.query_texts(rows), dataset.query_texts(test), dataset.label_texts())
    )
    frequency = Counter(word for text in train_texts for word in set(text))
    idf = {word: math.log((1 + len(rows)) / (1 + n)) + 1 for word, n in frequency.items()}

    def vector(text):
        counts = Counter(word for word in text if word in frequency)
        found = {word: (1 + math.log(c)) * idf[word] for word, c in counts.items()}
        length = math.sqrt(sum(v * v for v in found.values()))
        return {w: v / length for w, v in found.items()} if length else {}

    def cosine(a, b):
        return sum(value * b.get(word, 0.0) for word, value in a.items())

    train = [vector(text) for text in train_texts]
    labels = [vector(text) for text in label_texts]
    relevance = dataset.relevance[rows].toarray() > 0
    votes = np.zeros((len(test), len(labels)))
    match = np.zeros((len(test), len(labels)))
    for i, text in enumerate(test_texts):
        own = vector(text)
        for j, other in enumerate(train):
            votes[i, relevance[j]] += cosine(own, other) ** 2
        match[i] = [cosine(own, other) for other in labels]
    scaled = [part / np.maximum(part.max(axis=1, keepdims=True), 1e-12) for part in (votes, match)]
    return {
        "knn": votes,
        "label-match": match,
        "mix": scaled[0] + match_weight * scaled[1],
    }


@pytest.mark.parametrize("name", ["knn", "label-match", "mix"])
def test_tf_idf_scores_equal_loops(tiny_dataset, folder, name):
    want = dense_reference(tiny_dataset)[name]  # fewer training queries than neighbours
    labels, facts = run_peer(name, tiny_dataset, SETTINGS)
    assert labels.shape == (12, 40), "100 and the filters are more than there are labels"
    for i in range(12):
        found = labels[i] >= 0
        assert (np.diff(want[i][labels[i][found]]) <= 1e-5).all(), "best first"
        assert set(labels[i][found]) == set(np.flatnonzero(want[i] > 0)), (
            "each label with a score, none without"
        )
    assert all(facts[cost] > 0 for cost in ("parameters", "train_seconds", "search_ms"))
    assert not list(folder.iterdir())


def test_what_a_peer_is_given(tiny_dataset, folder):
    texts, matrices, width = features(tiny_dataset, "title")
    write_task(texts, matrices, folder / "task")
    assert width == 40
    train = json.loads((folder / "task" / "train.json").read_text())
    rows = tiny_dataset.rows("train")
    assert train == list(tiny_dataset.query_texts(rows))
    assert sp.load_npz(folder / "task" / "X.train.npz").shape[0] == 43
    assert len(train) == 43
    expected = tiny_dataset.relevance[rows].toarray() > 0
    np.testing.assert_array_equal(
        sp.load_npz(folder / "task" / "Y.train.npz").toarray() > 0,
        expected,
    )
    assert sp.load_npz(folder / "task" / "X.labels.npz").shape[0] == 40


def test_text_vectors_stand_beside_the_words(tiny_dataset):
    words = features(tiny_dataset, "title")[1]
    rng = np.random.default_rng(0)
    numbers = {"queries": tiny_dataset.num_queries, "labels": tiny_dataset.num_labels}
    vectors = {
        name: rng.standard_normal((number, 3)).astype(np.float32)
        for name, number in numbers.items()
    }
    texts, both, _ = features(tiny_dataset, "title", vectors)
    splits = [name for name in ("train", "validation", "test") if len(tiny_dataset.rows(name))]
    assert sorted(both) == sorted(words)
    assert {f"X.{name}" for name in (*splits, "labels")} < set(both)
    for name in (*splits, "labels"):
        own = vectors["labels"] if name == "labels" else vectors["queries"][tiny_dataset.rows(name)]
        assert both[f"X.{name}"].shape[0] == len(texts[name])
        expected = np.hstack([words[f"X.{name}"].toarray(), own])
        np.testing.assert_allclose(both[f"X.{name}"].toarray(), expected)


def test_nothing_to_train_on_is_refused(raw_factory, folder):
    from unidec.data.dataset import write_dataset

    empty = write_dataset(folder / "none", raw_factory(num_train=0), validation_share=0)
    with pytest.raises(DataError, match="empty split"):
        run_peer("knn", empty, SETTINGS)


# -- heads of scripts, and how they are started
# -----------------------------------------------------------------------


def test_every_script_names_its_packages_with_their_versions():
    for name in {peer.script for peer in PEERS.values() if peer.script}:
        packages = requirements(SCRIPTS / name)
        assert packages, name
        assert all(str(one.specifier).startswith("==") for one in packages), name
        text = (SCRIPTS / name).read_text()
        assert "unidec" not in "".join(line for line in text.splitlines() if "import" in line), name
    text = (SCRIPTS / "linear.py").read_text()
    assert not [
        line for line in text.splitlines() if line.startswith(("import unidec", "from unidec"))
    ]
    assert {"libpecos", "numpy"} <= {one.name for one in requirements(SCRIPTS / "xr_linear.py")}


def test_how_a_script_is_started(folder, monkeypatch):
    script = folder / "script.py"
    script.write_text("print()\n")
    assert requirements(script) == []
    script.write_text(
        f'# /// script\n# dependencies = [\n#   "numpy=={np.__version__}",\n# ]\n# ///\n'
    )
    assert start_command(script) == [sys.executable, str(script)]
    for missing in ("numpy==0.1", "nowhere==1.0"):
        script.write_text(f'# /// script\n# dependencies = ["{missing}"]\n# ///\n')
        with monkeypatch.context() as patch:
            patch.setattr(running.shutil, "which", lambda name, path: f"there/{name}")
            assert start_command(script) == [
                "there/uv",
                "run",
                "--no-progress",
                "--script",
                str(script),
            ]


def test_without_uv_the_fix_is_named(folder, monkeypatch):
    (folder / "script.py").write_text('# /// script\n# dependencies = ["nowhere==1.0"]\n# ///\n')
    monkeypatch.setattr(running.shutil, "which", lambda name, path: None)
    with pytest.raises(ArtifactError, match="pip install uv"):
        start_command(folder / "script.py")


# -- scripts
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def own(monkeypatch, folder):
    """Replaces a peer's script by one without requirements."""

    def write(text):
        (folder / "script.py").write_text("import json, os, sys\nfrom pathlib import Path\n" + text)

    monkeypatch.setitem(PEERS, "own", type(PEERS["xr-linear"])("about", str(folder / "script.py")))
    return write


def test_a_script_gets_task_and_settings_and_its_predictions_come_back(own, tiny_dataset, folder):
    own(
        "import numpy as np, scipy.sparse as sp\n"
        "task, out, given = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])\n"
        "assert (given['seed'], given['epochs'], given['peer']) == (4, 3, 'own') and "
        "given['width'] == 40\n"
        "assert os.environ['OMP_NUM_THREADS'] == '1' and 'PYTHONPATH' not in os.environ\n"
        "n = len(json.loads((task / 'test.json').read_text()))\n"
        "sp.save_npz(out / 'test.npz', sp.csr_matrix(np.tile(np.arange(40.0), (n, 1))))\n"
        "facts = {'train_seconds': 1.5, 'search_ms': 2.0, 'peak_memory_bytes': 77, "
        "'version': 'own 9.9'}\n"
        "(out / 'facts.json').write_text(json.dumps(facts))\n"
    )
    labels, facts = run_peer("own", tiny_dataset, SETTINGS)
    expected = [*range(39, 0, -1), -1]
    assert labels[0].tolist() == expected
    assert facts["version"] == "own 9.9"
    assert facts["peak_memory_bytes"] == 77
    assert facts["search_ms"] == 2.0
    assert facts["train_seconds"] > 1.5, "the features are part of it"
    assert not (folder / "peer-output").exists()
    assert not (folder / "peer-task").exists()


def test_a_script_that_fails_shows_the_end_of_its_log(own, tiny_dataset, folder):
    own("print('reading')\nraise SystemExit('out of trees')")
    with pytest.raises(TrainingError, match="out of trees") as error:
        run_peer("own", tiny_dataset, SETTINGS)
    assert "peer.log" in str(error.value)
    own("print('nothing is written')")
    with pytest.raises(TrainingError, match="ended without readable predictions"):
        run_peer("own", tiny_dataset, SETTINGS)


# -- what the scripts of linear peers share
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_their_ndcg_equals_ours(seed):
    rng = np.random.default_rng(seed)
    scores = sp.csr_matrix(rng.random((30, 20)) * (rng.random((30, 20)) < 0.3))
    truth = sp.csr_matrix(rng.random((30, 20)) < 0.15)
    ranked = top_rows(scores, 5)
    ones = np.ones(20)
    groups = np.zeros(20, dtype=np.int64)
    kept = np.diff(truth.indptr) > 0
    want = evaluate(ranked[kept], truth[kept].astype(np.float32), ones, groups)["nDCG@5"]
    assert 100 * linear.ndcg(scores, truth) == pytest.approx(want, abs=1e-4)
    assert (
        linear.ndcg(scores, sp.csr_matrix((30, 20)))
        == 0
        == linear.ndcg(sp.csr_matrix((30, 20)), truth)
    )


class Guess:
    """Ranks labels by a number that is given for each."""

    num_parameters = 7

    def __init__(self, task, settings):
        self.order_L = np.asarray(settings.get("order", [3.0, 2.0, 1.0, 4.0]))

    def predict(self, x_nF):
        return sp.csr_matrix(np.tile(self.order_L, (x_nF.shape[0], 1)))


@pytest.mark.parametrize(
    ("has_validation", "want"),
    [
        (True, [1.0, 2.0, 9.0, 4.0]),
        (False, [3.0, 2.0, 1.0, 4.0]),
    ],
)
def test_of_several_trials_the_best_on_the_validation_split_predicts(
    folder, monkeypatch, has_validation, want
):
    one = sp.csr_matrix(np.eye(3, 5, dtype=np.float32))
    relevant = sp.csr_matrix(np.tile([0.0, 0, 1, 0], (3, 1)))
    matrices = {
        "X.train": one,
        "Y.train": relevant,
        "X.labels": one,
        "X.test": one[:2],
    }
    if has_validation:
        matrices |= {"X.validation": one, "Y.validation": relevant}
    write_task({}, matrices, folder / "task")
    given = {"width": 4, "threads": 1, "seed": 0}
    monkeypatch.setattr(
        sys, "argv", ["script", str(folder / "task"), str(folder), json.dumps(given)]
    )
    trials = [{}, {"order": [1.0, 2.0, 9.0, 4.0]}, {"order": [1.0, 2.0, 3.0, 9.0]}]
    linear.main(Guess, trials, "own 1.0")
    assert sp.load_npz(folder / "test.npz").toarray().tolist() == [want, want]
    facts = json.loads((folder / "facts.json").read_text())
    assert facts["parameters"] == 7
    assert facts["version"].startswith("own 1.0")
    assert ("order" in facts["version"]) == has_validation


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")
def test_ending_the_group_ends_the_script_too(folder):
    """The comparison ends a cell by a signal to its group."""
    sleeper = folder / "sleeper.py"
    sleeper.write_text(
        "import os, pathlib, time\npathlib.Path('pid').write_text(str(os.getpid()))\n"
        "time.sleep(60)\n"
    )
    code = (
        "import sys\nfrom unidec.comparison.peers.running import run_script\n"
        f"run_script([sys.executable, {str(sleeper)!r}], 1)"
    )
    cell = subprocess.Popen([sys.executable, "-c", code], cwd=folder, start_new_session=True)
    end = time.monotonic() + 30
    while not (folder / "pid").exists() or not (folder / "pid").read_text():
        assert time.monotonic() < end and cell.poll() is None
        time.sleep(0.05)
    pid = int((folder / "pid").read_text())
    os.killpg(cell.pid, signal.SIGTERM)
    assert cell.wait(timeout=10) == -signal.SIGTERM
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end, "the script outlived its cell"
        time.sleep(0.05)


# -- sentence-transformers
# --------------------------------------------------------------------------------------------


@pytest.fixture
def sentence():
    """The script as a module, only where its own packages are installed: accelerate and datasets
    are no packages of ours.
    """
    for package in ("sentence_transformers", "datasets", "accelerate"):
        pytest.importorskip(package)
    return importlib.import_module("unidec.comparison.peers.sentence")


def some_pairs(rng, *, mined):
    """Pairs of texts, some labels with the text of a query: columns, and each query's labels."""
    labels = [f"label {i}" for i in range(30)] + [f"query {i}" for i in range(5)]
    columns = {"anchor": [], "positive": []}
    relevant = {}
    for query in (f"query {i}" for i in range(60)):
        own = set(rng.choice(labels, rng.integers(1, 5), replace=False).tolist()) | {labels[0]}
        relevant[query] = own
        columns["anchor"] += [query] * len(own)
        columns["positive"] += sorted(own)
    if mined:
        columns["negative"] = [
            rng.choice([label for label in labels if label not in relevant[query]])
            for query in columns["anchor"]
        ]
    return columns, relevant


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mined", [False, True])
def test_no_label_of_a_query_is_in_another_row_of_its_batch(sentence, mined):
    columns, relevant = some_pairs(np.random.default_rng(1), mined=mined)
    sampler = sentence.LabelsApart(
        sentence.Dataset.from_dict(columns),
        batch_size=8,
        drop_last=False,
        generator=sentence.torch.Generator(),
    )
    epochs = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        batches = list(sampler)
        assert sorted(row for batch in batches for row in batch) == list(
            range(len(columns["anchor"]))
        )
        assert len(batches) >= len(sampler)
        assert max(map(len, batches)) == 8
        for batch in batches:
            texts = [{columns[name][row] for name in columns if name != "anchor"} for row in batch]
            for i, row in enumerate(batch):
                query = columns["anchor"][row]
                others = set().union(*texts[:i], *texts[i + 1 :])
                assert not others & (relevant[query] | {query} | texts[i])
        epochs.append(batches)
    assert epochs[0] != epochs[1]
    sampler.set_epoch(0)
    assert list(sampler) == epochs[0]


@pytest.mark.filterwarnings("ignore")
def test_a_mined_negative_is_the_hardest_label_below_the_margin(sentence, tiny_dataset, tiny_bert):
    rows = tiny_dataset.rows("train")
    texts = tiny_dataset.query_texts(rows)
    labels = tiny_dataset.label_texts()
    model = sentence.static_model(tiny_bert, texts, 16)
    pairs = {"anchor": [], "positive": []}
    relevant = {}
    for text, row in zip(texts, rows, strict=True):
        for label in tiny_dataset.relevance[[row]].indices:
            pairs["anchor"].append(text)
            pairs["positive"].append(labels[label])
            relevant.setdefault(text, set()).add(labels[label])
    mined = sentence.with_negatives(model, sentence.Dataset.from_dict(pairs), labels)
    assert mined.column_names == ["anchor", "positive", "negative"]
    assert 0 < len(mined) <= len(pairs["anchor"])
    vectors = dict(zip(labels, model.encode(labels).tolist(), strict=True))

    def cosine(text, label):
        (query,) = model.encode([text]).tolist()
        return (
            np.dot(query, vectors[label]) / np.linalg.norm(query) / np.linalg.norm(vectors[label])
        )

    for text in sorted(set(mined["anchor"]))[:10]:
        (negative,) = {row["negative"] for row in mined if row["anchor"] == text}
        lowest = min(cosine(text, label) for label in relevant[text])
        limit = lowest - 0.05 * abs(lowest)
        below = [
            score
            for label in set(labels) - relevant[text]
            if (score := cosine(text, label)) <= limit + 1e-6
        ]
        assert negative not in relevant[text]
        assert cosine(text, negative) == pytest.approx(max(below), abs=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["st-static", "st-transformer"])
def test_sentence_transformers_learns(sentence, name, tiny_dataset, tiny_bert, folder):
    settings = SETTINGS | {
        "encoder": str(tiny_bert),
        "epochs": 6,
        "seed": 0,
    }
    labels, _ = run_peer(name, tiny_dataset, settings)
    assert labels.shape == (12, 40)
    relevance = tiny_dataset.relevance[tiny_dataset.rows("test")].toarray() > 0
    hits = relevance[np.arange(12)[:, None], labels[:, :5]].mean()
    assert hits > 1.5 * relevance.mean(), "no better than chance"
