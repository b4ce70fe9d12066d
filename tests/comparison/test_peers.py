"""The peers against loops written from their definitions, and what they leave in a cell's folder."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from unidec.comparison import peers
from unidec.comparison.peers import environments
from unidec.comparison.peers.environments import ENVIRONMENTS, READY, Environment, is_ready
from unidec.comparison.peers.task import K, peer_task, training_rows
from unidec.data.dataset import XMCDataset
from unidec.data.storage import read_manifest
from unidec.errors import ArtifactError, ConfigError, DataError, TrainingError
from unidec.evaluation.metrics import evaluate, filtered_truth, remove_filtered

QUICK = {"epochs": 2, "batch_size": 8}


def predictions(folder: Path, split="test"):
    names = {"test": ("labels", "scores"), "validation": ("labels_validation", "scores_validation")}[split]
    return tuple(np.load(folder / "outputs" / f"{name}.npy", allow_pickle=False) for name in names)


def precision(dataset: XMCDataset, labels, scores, split="test"):
    """P@1 in percent, filters removed."""
    rows = dataset.rows(split)
    filters = dataset.filter_pairs[rows]
    kept, _ = remove_filtered(labels, scores, filters, K)
    truth = filtered_truth(dataset.relevance[rows], filters)
    return evaluate(kept, truth, np.ones(dataset.num_labels), np.zeros(dataset.num_labels, dtype=int))["P@1"]


# -- the interface ----------------------------------------------------------------------------------------------------


def test_names_and_options_need_nothing_heavy():
    code = (
        "import sys\nfrom unidec.comparison import peers\n"
        "assert 'knn' in peers.NAMES and not peers.info('knn').seeded and peers.info('plt').environment == 'plt'\n"
        "print({'torch', 'numpy', 'scipy', 'sklearn', 'sentence_transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"


def test_wrong_options_are_told_one_by_one():
    problems = peers.check_options("knn", {"neighbors": 3, "train_on": "all", "neighbours": 0})
    assert len(problems) == 3
    assert "did you mean neighbours" in problems[0]
    assert "train or train+validation" in problems[1]
    assert "at least 1" in problems[2]
    assert peers.check_options("st-static", {"epochs": 2, "learning_rate": 1e-3, "train_on": "train"}) == []
    for value in (True, "3", math.nan, 1.5):
        assert peers.check_options("plt", {"trees": value}), value
    assert peers.check_options("plt", {"cost": -1}) and not peers.check_options("plt", {"cost": 3})


def test_run_refuses_what_it_does_not_know(cell):
    with pytest.raises(ConfigError, match="no such peer"):
        peers.run("bm25", cell, 0, {})
    with pytest.raises(ConfigError, match="no option"):
        peers.run("knn", cell, 0, {"k": 3})
    settings = json.loads((cell / "peer.json").read_text())
    (cell / "peer.json").write_text(json.dumps({k: v for k, v in settings.items() if k != "epochs"}))
    with pytest.raises(ArtifactError, match="epochs"):
        peers.run("knn", cell, 0, {})
    (cell / "peer.json").unlink()
    with pytest.raises(ArtifactError, match="no settings"):
        peers.run("knn", cell, 0, {})


def test_a_package_that_is_not_there_is_named(cell, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ArtifactError, match="no sentence_transformers") as error:
        peers.run("st-static", cell, 0, {})
    assert "bench" in str(error.value)


# -- features ---------------------------------------------------------------------------------------------------------


def test_a_task_is_made_once_and_says_nothing_of_places(tiny_dataset, tmp_path):
    task = peer_task(tiny_dataset, "title", "train", tmp_path)
    assert task.splits == ("test", "validation")
    manifest = (task.path / "manifest.json").read_text()
    assert str(tmp_path) not in manifest
    before = (task.path / "manifest.json").stat().st_mtime_ns
    again = peer_task(tiny_dataset, "title", "train", tmp_path)
    assert again == task and (task.path / "manifest.json").stat().st_mtime_ns == before
    (task.path / "labels.npz").write_bytes(b"damaged")
    assert (peer_task(tiny_dataset, "title", "train", tmp_path).path / "manifest.json").read_text() == manifest
    both = peer_task(tiny_dataset, "title", "train+validation", tmp_path)
    assert both.path != task.path and both.splits == ("test",)
    assert both.matrix("X.train").shape[0] == len(training_rows(tiny_dataset, "train+validation")) == 48
    assert task.matrix("Y.train").shape == (43, 40)
    assert peer_task(tiny_dataset, "title+content", "train", tmp_path).facts["num_words"] > task.facts["num_words"]
    read_manifest(task.path, "peer_task", 1)


def test_nothing_to_train_on_is_refused(raw_factory, tmp_path):
    from unidec.data.dataset import write_dataset

    empty = write_dataset(tmp_path / "none", raw_factory(num_train=0), validation_share=0)
    with pytest.raises(DataError, match="empty split"):
        peer_task(empty, "title", "train", tmp_path)


def dense_reference(dataset, neighbours, match_weight):
    """kNN votes, label match and mix by loops over queries, words and labels, in float64."""
    from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS, TfidfVectorizer

    words = TfidfVectorizer(stop_words="english").build_analyzer()
    assert "the" in ENGLISH_STOP_WORDS
    rows, test = dataset.rows("train"), dataset.rows("test")
    train_texts, test_texts, label_texts = (
        [words(text) for text in texts]
        for texts in (dataset.query_texts(rows), dataset.query_texts(test), dataset.label_texts())
    )
    frequency = Counter(word for text in train_texts for word in set(text))

    def vector(text):
        counts = Counter(word for word in text if word in frequency)
        found = {w: (1 + math.log(c)) * (math.log((1 + len(rows)) / (1 + frequency[w])) + 1) for w, c in counts.items()}
        length = math.sqrt(sum(v * v for v in found.values()))
        return {w: v / length for w, v in found.items()} if length else {}

    def cosine(a, b):
        return sum(value * b.get(word, 0.0) for word, value in a.items())

    train, labels = [vector(text) for text in train_texts], [vector(text) for text in label_texts]
    relevance = dataset.relevance[rows].toarray() > 0
    votes, match = np.zeros((len(test), len(labels))), np.zeros((len(test), len(labels)))
    for i, text in enumerate(test_texts):
        own = vector(text)
        near = np.array([cosine(own, other) for other in train])
        chosen = np.argsort(-near, kind="stable")[:neighbours]
        for j in chosen:
            votes[i, relevance[j]] += near[j] ** 2
        match[i] = [cosine(own, other) for other in labels]
    scaled = [part / np.maximum(part.max(axis=1, keepdims=True), 1e-12) for part in (votes, match)]
    return {"knn": votes, "label-match": match, "mix": scaled[0] + match_weight * scaled[1]}


@pytest.mark.parametrize("name", ["knn", "label-match", "mix"])
def test_tf_idf_scores_equal_loops(tiny_dataset, cell, name):
    options = {"knn": {"neighbours": 43}, "mix": {"neighbours": 43, "match_weight": 0.7}}.get(name, {})
    want = dense_reference(tiny_dataset, 43, 0.7)[name]
    facts = peers.run(name, cell, 0, options)
    labels, scores = predictions(cell)
    assert labels.dtype == np.int64 and scores.dtype == np.float32
    assert labels.shape[0] == 12 and labels.shape[1] == 40, "100 and the filters are more than there are labels"
    for i in range(12):
        found = labels[i] >= 0
        np.testing.assert_allclose(scores[i][found], want[i][labels[i][found]], rtol=1e-5)
        assert (np.diff(scores[i][found]) <= 0).all() and (scores[i][~found] == -np.inf).all()
        assert set(labels[i][found]) == set(np.flatnonzero(want[i] > 0)), "each label with a score, none without"
    assert facts["trained_on"] == "train" and facts["parameters"] > 0 and facts["peak_rss_bytes"] > 2**20
    assert facts["train_seconds"] > 0 and facts["search_ms"] > 0 and facts["title"] == peers.info(name).title
    json.dumps(facts, allow_nan=False)
    assert predictions(cell, "validation")[0].shape == (5, 40)


def test_trained_on_both_splits_predicts_test_alone(cell):
    facts = peers.run("knn", cell, 0, {"train_on": "train+validation"})
    assert facts["trained_on"] == "train+validation"
    assert not (cell / "outputs" / "labels_validation.npy").exists()


# -- foreign programs -------------------------------------------------------------------------------------------------


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """A foreign environment without a package of its own, and a program in it that the test writes."""
    monkeypatch.setattr("unidec.comparison.peers.running.PROGRAMS", {"plt": str(tmp_path / "program.py")})
    root = environments.place("plt", tmp_path / "shared" / "environments")
    (root / "bin").mkdir(parents=True)
    (root / "bin" / "python").symlink_to(sys.executable)
    (root / READY).write_text('{"napkinxc": "9.9"}')

    def write(text):
        (tmp_path / "program.py").write_text("import json, os, sys\nfrom pathlib import Path\n" + text)

    return write


def test_a_foreign_program_gets_its_options_and_its_predictions_come_back(fake, cell):
    fake(
        "sys.path.append(os.environ['X'])\nimport numpy as np, scipy.sparse as sp\n"
        "task, out, given = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])\n"
        "assert given['seed'] == 4 and given['trees'] == 2 and os.environ['OMP_NUM_THREADS'] == '1'\n"
        "for split in given['splits']:\n"
        "    n = sp.load_npz(task / f'X.{split}.npz').shape[0]\n"
        "    sp.save_npz(out / f'{split}.npz', sp.csr_matrix(np.tile(np.arange(40.0), (n, 1))))\n"
        "facts = {'train_seconds': 1.5, 'search_ms': {'test': 2.0, 'validation': 3.0}, 'peak_rss_bytes': 77}\n"
        "(out / 'facts.json').write_text(json.dumps(facts))\n"
    )
    os.environ["X"] = str(Path(np.__file__).parents[1])
    try:
        facts = peers.run("plt", cell, 4, {"trees": 2})
    finally:
        del os.environ["X"]
    labels, scores = predictions(cell)
    assert labels[0].tolist() == [*range(39, 0, -1), -1] and scores[0, 0] == 39
    assert facts["version"] == "napkinxc 9.9" and facts["peak_rss_bytes"] == 77 and facts["search_ms"] == 2.0
    assert facts["train_seconds"] > 1.5, "the features are part of it"
    assert facts["parameters"] is None and facts["options"]["cost"] == 10.0
    assert not (cell / "peer-output").exists()


def test_a_foreign_program_that_fails_shows_the_end_of_its_log(fake, cell):
    fake("print('reading')\nraise SystemExit('out of trees')")
    with pytest.raises(TrainingError, match="out of trees") as error:
        peers.run("plt", cell, 0, {})
    assert "peer.log" in str(error.value)
    fake("print('nothing is written')")
    with pytest.raises(TrainingError, match="left no predictions"):
        peers.run("plt", cell, 0, {})


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")
def test_ending_the_group_ends_the_program_too(tmp_path):
    """The comparison ends a cell by a signal to its group."""
    program = tmp_path / "sleeper.py"
    program.write_text("import os, pathlib, time\npathlib.Path('pid').write_text(str(os.getpid()))\ntime.sleep(60)\n")
    code = (
        "import sys; from pathlib import Path\nfrom unidec.comparison.peers.environments import run_program\n"
        f"run_program(Path(sys.executable), Path({str(program)!r}), [], Path('log'), 1, 'sleeper')"
    )
    cell = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, start_new_session=True)
    for _ in range(300):
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text():
            break
        with pytest.raises(subprocess.TimeoutExpired):
            cell.wait(timeout=0.1)
    pid = int((tmp_path / "pid").read_text())
    os.killpg(cell.pid, signal.SIGTERM)
    assert cell.wait(timeout=10) == -signal.SIGTERM
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().split()[2]
        except (FileNotFoundError, ProcessLookupError):
            return
        if state == "Z":
            return
        with pytest.raises(subprocess.TimeoutExpired):
            subprocess.run([sys.executable, "-c", "import time; time.sleep(1)"], timeout=0.05, check=False)
    pytest.fail("the program outlived its cell")


def test_an_environment_that_cannot_be_made_says_how(tmp_path, monkeypatch):
    monkeypatch.delenv(environments.VARIABLE, raising=False)
    monkeypatch.setattr(environments, "_base_python", lambda versions: "no-such-python-for-a-test")
    with pytest.raises(FileNotFoundError):
        environments.install("plt", tmp_path)
    failing = tmp_path / "python"
    failing.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('no network here')\n")
    failing.chmod(0o755)
    monkeypatch.setattr(environments, "_base_python", lambda versions: str(failing))
    with pytest.raises(ArtifactError, match="no network here") as error:
        environments.install("plt", tmp_path)
    assert "-m venv" in str(error.value)
    assert not is_ready("plt", tmp_path)


def test_an_environment_is_made_once_and_a_half_made_one_anew(tmp_path, monkeypatch):
    """A stand-in for Python that takes down what it is asked for."""
    monkeypatch.delenv(environments.VARIABLE, raising=False)
    stand_in = tmp_path / "python"
    stand_in.write_text(
        f"#!{sys.executable}\nimport pathlib, shutil, sys\n"
        f"with open({str(tmp_path / 'asked')!r}, 'a') as file: file.write(' '.join(sys.argv[1:]) + chr(10))\n"
        "if 'venv' in sys.argv:\n"
        "    root = pathlib.Path(sys.argv[-1])\n"
        "    (root / 'bin').mkdir(parents=True)\n"
        "    shutil.copy(sys.argv[0], root / 'bin' / 'python')\n"
        'if "list" in sys.argv: print(\'[{"name": "napkinxc", "version": "0.7.2"}]\')\n'
    )
    stand_in.chmod(0o755)
    monkeypatch.setattr(environments, "_base_python", lambda versions: str(stand_in))
    root = environments.place("plt", tmp_path)
    (root / "left").mkdir(parents=True)
    assert environments.install("plt", tmp_path) == root / "bin" / "python"
    assert not (root / "left").exists() and environments.versions("plt", tmp_path) == {"napkinxc": "0.7.2"}
    asked = (tmp_path / "asked").read_text().splitlines()
    assert [line.split()[1] for line in asked] == ["venv", "pip", "pip", "pip"]
    assert "--no-deps" not in asked[1] and asked[2].endswith("--no-deps napkinxc==0.7.2")
    environments.install("plt", tmp_path)
    assert (tmp_path / "asked").read_text().splitlines() == asked, "it is there"


def test_environments_may_be_shared_and_change_with_what_is_in_them(tmp_path, monkeypatch):
    monkeypatch.setenv(environments.VARIABLE, str(tmp_path / "common"))
    assert environments.place("plt", tmp_path).parent == tmp_path / "common"
    monkeypatch.delenv(environments.VARIABLE)
    here = environments.place("plt", tmp_path)
    assert here.parent == tmp_path
    monkeypatch.setitem(ENVIRONMENTS, "plt", Environment(("numpy<2",), ("napkinxc==0.7.2",), ("3.11",)))
    assert environments.place("plt", tmp_path) != here
    with pytest.raises(ArtifactError, match="no Python for this peer"):
        environments._base_python(["9.9"])


@pytest.mark.parametrize("name", ["xr-linear", "plt"])
def test_foreign_systems_learn(name, tiny_dataset, cell, tmp_path):
    """With UNIDEC_PEER_ENVIRONMENTS set to where `install` made them; skipped elsewhere."""
    if not is_ready(name, tmp_path):
        pytest.skip(f"no environment of {name}: set {environments.VARIABLE}")
    facts = peers.run(name, cell, 0, {})
    labels, scores = predictions(cell)
    assert labels.shape == (12, 40) and precision(tiny_dataset, labels, scores) > 25
    assert facts["train_seconds"] > 0 and facts["version"].split()[1][0].isdigit()
    assert predictions(cell, "validation")[0].shape[0] == 5
    first = labels
    peers.run(name, cell, 0, {})
    np.testing.assert_array_equal(predictions(cell)[0], first)


def test_the_program_keeps_what_it_is_not_asked_for(tiny_dataset, tmp_path, capsys):
    from unidec.comparison.peers.__main__ import main

    given = [str(tiny_dataset.path), "--work", str(tmp_path / "work"), "--output", str(tmp_path / "out.json")]
    main([*given, "--peers", "knn", "mix"])
    first = json.loads((tmp_path / "out.json").read_text())
    assert list(first["results"]) == ["kNN", "mix"]
    assert first["facts"]["train_on"] == "train+validation" and first["facts"]["num_train"] == 48
    main([*given, "--peers", "label-match"])
    second = json.loads((tmp_path / "out.json").read_text())
    assert list(second["results"]) == ["kNN", "mix", "label match"]
    assert second["results"]["kNN"] == first["results"]["kNN"]
    assert "| label match | " in capsys.readouterr().out
    main([*given, "--peers", "knn", "--propensity-a", "0.6"])
    assert list(json.loads((tmp_path / "out.json").read_text())["results"]) == ["kNN"], "other propensities, other PSP"
