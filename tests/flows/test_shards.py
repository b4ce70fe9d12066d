"""Shards over processes and over a real Dask cluster: the bytes of one piece, also when workers are
killed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from helpers.shard_workers import dask_cluster, once_a_shard_is_whole, workers_of
from helpers.tiny_transformer import write_transformer

from unidec.bundle.predict_file import FileRequest, begin_predictions, merge, predict_file
from unidec.errors import ArtifactError, ConfigError, DataError, TrainingError
from unidec.pipeline.shard_jobs import run_shard

REPOSITORY = Path(__file__).resolve().parents[2]
ROWS = 6000
SHARDS = 6
WORDS = [
    "red",
    "green",
    "blue",
    "car",
    "boat",
    "house",
    "old",
    "new",
    "river",
    "music",
    "engine",
    "letter",
]
NUM_LABELS = 50


@pytest.fixture(scope="module")
def runners():
    from flows import runners

    return runners


@pytest.fixture(scope="module")
def predict():
    from flows.predict import predict

    return predict


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a bundle (UniDEC itself, a bag of tokens), queries and their predictions in one
    piece.
    """
    import torch
    from helpers.label_vectors import label_vectors

    from unidec.bundle.bundle_folder import BundleLabels, Scoring, write_bundle
    from unidec.config import Encoder, Model
    from unidec.data.storage import write_folder
    from unidec.data.tokens import encode_texts
    from unidec.model.unidec import UniDEC
    from unidec.ranking.index import LabelIndex

    root = tmp_path_factory.mktemp("shards")
    rng = np.random.default_rng(0)
    labels = [f"{' '.join(rng.choice(WORDS, 2))} {number}" for number in range(NUM_LABELS)]
    bert = write_transformer(root / "bert", [*labels, *WORDS])
    torch.manual_seed(1)
    settings = Model(dim=8)
    kept = {"tokens": {"max_length": 12}}
    model = UniDEC.create(Encoder(kind="bag"), settings, NUM_LABELS, bert, 100, kept).eval()
    with write_folder(root / "model", "model", 1) as out:
        model.save_into(out)
    de, (clf, bias) = (
        model.encode_labels(encode_texts(labels, model.tokenizer_folder, 12)),
        model.classifier_table(),
    )
    write_bundle(
        root / "bundle",
        root / "model",
        LabelIndex.build(label_vectors(de, clf, bias, "both", True)),
        BundleLabels(
            [f"L{i}" for i in range(NUM_LABELS)], labels, {"de": de, "clf": clf, "bias": bias}
        ),
        Scoring("both", 0.7, True),
    )
    texts = [" ".join(rng.choice(WORDS, rng.integers(1, 9))) for _ in range(ROWS)]
    pq.write_table(pa.table({"query": texts}), root / "in.parquet", row_group_size=999)
    names = (str(root / name) for name in ("bundle", "in.parquet", "whole.parquet"))
    predict_file(FileRequest(*names, k=3))
    return root


@pytest.fixture
def ask(place, tmp_path, predict, prefect_server):
    """`ask(runner)`: the flow's result; the output's bytes are those of one piece."""

    def ask(runner: str, **more) -> dict:
        given = {
            "input": str(place / "in.parquet"),
            "output": str(tmp_path / "out.parquet"),
            "k": 3,
            "shards": SHARDS,
        }
        done = predict(
            bundle=str(place / "bundle"),
            runner=runner,
            **(given | more),
        )
        assert done == {
            "rows": ROWS,
            "shards": SHARDS,
            "output": str(tmp_path / "out.parquet"),
        }
        assert (tmp_path / "out.parquet").read_bytes() == (place / "whole.parquet").read_bytes()
        assert [path.name for path in tmp_path.iterdir()] == ["out.parquet"]
        return done

    return ask


@pytest.fixture
def cluster():
    with dask_cluster(2) as cluster:
        yield cluster


def test_processes_of_this_machine(ask, tmp_path):
    killed = []

    def kill_one() -> None:
        child = multiprocessing.active_children()[0]
        os.kill(child.pid, signal.SIGKILL)
        killed.append(child.pid)

    thread = once_a_shard_is_whole(tmp_path / "out.parquet.shards", kill_one)
    with pytest.raises(TrainingError, match="re-run the command"):
        ask("processes:2")  # the pool breaks with its worker
    thread.join()
    assert len(killed) == 1 and multiprocessing.active_children() == []
    # the same command, in whatever way; with processes to the end: test_what_the_flow_starts_itself
    ask("threads:1")


@pytest.mark.slow
def test_a_dask_cluster_that_loses_a_worker(ask, tmp_path, cluster):
    killed, left = cluster.workers.values()
    killed.auto_restart = False
    pid = killed.pid
    thread = once_a_shard_is_whole(
        tmp_path / "out.parquet.shards", lambda: os.kill(pid, signal.SIGKILL)
    )
    ask(cluster.scheduler_address.replace("tcp://", "dask://"))
    thread.join()
    assert killed.pid != pid and left.pid is not None


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["threads:2", "processes:2"])
def test_what_the_flow_starts_itself(ask, runner):
    ask(runner)
    assert multiprocessing.active_children() == []


def begin(place: Path, output: Path, shards: int, done=()):
    request = FileRequest(str(place / "bundle"), str(place / "in.parquet"), str(output), 3)
    work = begin_predictions(request, shards)
    for number in done:
        run_shard(work.folder, number)
    return work


def test_only_what_is_missing_is_written(place, tmp_path, runners, prefect_server):
    plan = begin(place, tmp_path / "out.parquet", SHARDS, done=(0, 1, 2, 4, 5))
    before = {path.name: path.stat().st_mtime_ns for path in plan.folder.glob("0*")}
    runners.write_shards(plan, "processes:2")  # one alone is written here, without a pool
    assert plan.missing() == []
    runners.write_shards(plan)
    assert (
        before.items()
        < {path.name: path.stat().st_mtime_ns for path in plan.folder.glob("0*")}.items()
    )


def test_a_shard_that_cannot_be_written_is_named(
    place, tmp_path, runners, monkeypatch, prefect_server
):
    def fail(folder, number, threads):
        if number == 4:  # which of two fails first is chance
            raise DataError("no text", where="row 5000")

    monkeypatch.setattr(runners, "run_shard", fail)
    with pytest.raises(DataError, match=r"shard 5 of 6 \(rows 4,096 to 5,119\) failed\n.*row 5000"):
        runners.write_shards(
            begin(place, tmp_path / "out.parquet", SHARDS, done=(0, 1, 2, 3)), "threads:2"
        )


def test_workers_that_see_other_folders_are_found_out(
    place, tmp_path, runners, monkeypatch, prefect_server
):
    plan = begin(place, tmp_path / "out.parquet", 2)
    monkeypatch.setattr(runners, "run_shard", lambda folder, number, threads: None)
    runners.write_shards(plan, "threads:1")
    with pytest.raises(
        ArtifactError, match=r"2 of 2 shards are missing[\s\S]*must share this folder"
    ):
        merge(plan)


def test_a_shard_that_keeps_failing_is_named(place, tmp_path, runners, monkeypatch, prefect_server):
    plan = begin(place, tmp_path / "out.parquet", 2)

    def fail(folder, number, threads):
        raise RuntimeError("no luck")

    monkeypatch.setattr(runners, "run_shard", fail)
    monkeypatch.setattr(runners, "shard", runners.shard.with_options(retries=0))
    with pytest.raises(TrainingError, match=r"2 of 2 shards failed, first shard 1 of 2 .*no luck"):
        runners.write_shards(plan, "threads:2")


@pytest.mark.parametrize(
    ("text", "kind", "address", "workers"),
    [
        ("processes:3", "processes", "", 3),
        ("threads:1", "threads", "", 1),
        ("dask://10.0.0.1:8786", "dask", "tcp://10.0.0.1:8786", 0),
        ("ray://head:10001", "ray", "ray://head:10001", 0),
    ],
)
def test_one_setting_chooses_the_runner(runners, monkeypatch, text, kind, address, workers):
    assert runners.parse_runner(text) == runners.Runner(kind, workers, address)
    monkeypatch.setenv("UNIDEC_RUNNER", text)
    assert runners.parse_runner(None) == runners.Runner(kind, workers, address)


@pytest.mark.parametrize(
    "text",
    ["spark", "processes:0", "dask:2", "dask://host", "processes://x:1", "tcp://x:1", "ray:x"],
)
def test_an_unknown_runner_is_refused(runners, text):
    with pytest.raises(ConfigError, match="no such runner"):
        runners.parse_runner(text)


def test_help_and_deployment(predict, capsys):
    import inspect

    from flows.command import main

    with pytest.raises(SystemExit) as left:
        main("predict", ["--help"])
    assert left.value.code == 0
    assert "examples:" in capsys.readouterr().out
    described = yaml.safe_load((REPOSITORY / "prefect.yaml").read_text(encoding="utf-8"))[
        "deployments"
    ]
    (deployment,) = [one for one in described if one["flow_name"] == predict.name]
    assert deployment["entrypoint"] == "flows/predict.py:predict"
    parameters = set(deployment["parameters"])
    assert parameters <= set(inspect.signature(predict.fn).parameters)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_stopped_on_the_way(place, tmp_path, number):
    """A quick end with no process left (SIGKILL: within seconds), and the same command finishes."""
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PREFECT_", "MLFLOW_"))
    }
    environment = own | {
        "PREFECT_HOME": str(tmp_path / "home"),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    output = tmp_path / "out.parquet"
    wanted = place / "whole.parquet"
    words = (
        f"--input {place / 'in.parquet'} --output {output} --bundle {place / 'bundle'} -k 3 "
        "--shards 12"
    ).split()
    start = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from flows.command import main; sys.exit(main('predict'))"
    )
    words = [sys.executable, "-c", start, *words, "--runner", "processes:2"]
    folder = tmp_path / "out.parquet.shards"

    def begin() -> subprocess.Popen:
        with (tmp_path / "log").open("ab") as log:
            return subprocess.Popen(
                words,
                cwd=tmp_path,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    process = begin()
    try:
        end = time.monotonic() + 240
        while not list(folder.glob("0*-of-*")):
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < end, (tmp_path / "log").read_text()
            time.sleep(0.002)
        os.kill(process.pid, number)
        code = process.wait(60)
        expected = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[number]
        assert code == expected, (tmp_path / "log").read_text()
        end = time.monotonic() + 20
        while left := workers_of(tmp_path / "home"):
            assert time.monotonic() < end, left
            time.sleep(0.2)
        assert not output.exists() and list(folder.glob("0*-of-*"))
        process = begin()
        assert process.wait(240) == 0, (tmp_path / "log").read_text()
        assert output.read_bytes() == wanted.read_bytes()
        assert not folder.exists()
        assert "6,000 rows in 12 shards -> " in (tmp_path / "log").read_text()
    finally:
        process.kill()
        process.wait()
        for pid in [*workers_of(tmp_path / "home", servers=True)]:
            os.kill(pid, signal.SIGKILL)
