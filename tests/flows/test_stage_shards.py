"""Stages of a training whose raw files are read, whose texts are checked, tokenised and encoded,
and whose labels are indexed, in shards by processes of this machine or a real Dask cluster: the
bytes of one piece, also when workers are killed.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from helpers.raw_files import write_raw
from helpers.shard_workers import dask_cluster, once_a_shard_is_whole, workers_of

from unidec import pipeline
from unidec.config import Params, load_params
from unidec.data.raw import RawData
from unidec.data.shards import dividing
from unidec.errors import ArtifactError, ConfigError, TrainingError

TEXTS_A_SHARD = 4  # of 60 queries and 40 labels
PARTS = 6  # files of the table of queries
FOLDERS = ("data/dataset", "data/validation", "data/tokens", "data/cache")
# of the stages that are run
SHARDS = {
    "ingest": "data/queries-*.shards",
    "validate": "data/validation-tokens-labels.shards",
    "tokens": "data/tokens-queries.shards",
    "propensity": "data/cache/vectors-*.shards",
    "label_graph": "data/cache/index.parts.shards",
}


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unidec.data.formats.table_reader.DIVIDED_ABOVE", 1)
    monkeypatch.setattr("unidec.data.token_shards.TEXTS_A_SHARD", TEXTS_A_SHARD)
    monkeypatch.setattr("unidec.model.frozen.TEXTS_AT_ONCE", TEXTS_A_SHARD)
    monkeypatch.setattr("unidec.ranking.index.ROWS_AT_ONCE", TEXTS_A_SHARD)


@pytest.fixture
def project(tiny_raw: RawData, tiny_bert: Path, tmp_path: Path, monkeypatch) -> Path:
    """A project with raw files, the queries in parts; it is the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("UNIDEC_RUNNER", raising=False)
    write_raw(tiny_raw, "raw", "tables")
    header, *rows = Path("raw/queries.csv").read_text().splitlines()
    for part in range(PARTS):
        text = "\n".join([header, *rows[part::PARTS]])
        Path(f"raw/queries-{part}-of-{PARTS}.csv").write_text(text)
    Path("raw/queries.csv").unlink()
    encoder = f"{{name: {tiny_bert}, query_prompt: 'query: '}}"
    off = "{empty_texts: off, unknown_tokens: off, label_texts_given_twice: off}"
    Path("params.yaml").write_text(
        f"data: {{path: raw, validation_share: 0.1}}\nencoder: {encoder}\n"
        f"tokens: {{max_length: 16}}\nvalidation: {off}\n"
    )
    return tmp_path


@pytest.fixture
def run(project: Path, small_shards, prefect_server, monkeypatch) -> Callable[..., dict]:
    """`run(runner)`: the flow's first three stages, and in place of two others the encoder of a
    training and the label index; returns the bytes that they wrote.
    """
    import torch

    from flows import train as module
    from unidec.config.index_spec import IndexSpec
    from unidec.model.encoder import TextEncoder, load_transformer
    from unidec.model.frozen import cached_inputs
    from unidec.pipeline import paths
    from unidec.ranking.index import LabelIndex

    def index(params: Params) -> dict:
        vectors = np.random.default_rng(0).normal(size=(40, 8)).astype(np.float32)
        parts = paths.CACHE / "index.parts"
        LabelIndex.build(vectors, IndexSpec(kind="pq"), parts=parts).save(paths.CACHE / "i.faiss")
        return {}

    def encode(params: Params) -> dict:
        transformer = load_transformer(Path(params.encoder.name))
        settings = params.encoder.model_copy(update={"pooling": "mean", "kind": "transformer"})
        tokens = {which: paths.open_tokens(which) for which in ("queries", "labels")}
        encoder = TextEncoder(settings, transformer, 0, 32)
        cached_inputs(encoder, tokens, paths.CACHE, torch.device("cpu"), None)
        return {}

    monkeypatch.setattr(module.pipeline, "propensity", encode, raising=False)
    monkeypatch.setattr(module.pipeline, "label_graph", index, raising=False)

    def run(runner: str | None = None, *stages: str) -> dict:
        module.train(steps=",".join(stages or SHARDS), runner=runner)
        assert not list(project.rglob("*.shards"))
        return files(project)

    return run


def files(project: Path) -> dict[str, bytes]:
    found = [path for folder in FOLDERS for path in (project / folder).glob("**/*.*")]
    found = [path for path in found if "docs" not in path.parts]  # with times
    return {str(path.relative_to(project)): path.read_bytes() for path in found}


@pytest.fixture
def whole(run, project: Path) -> dict[str, bytes]:
    """The bytes without a runner."""
    made = run()
    assert len(made) == 9 + 2 + 2 * 4 + 2 * 2 + 1, sorted(made)
    for folder in FOLDERS:
        shutil.rmtree(project / folder)
    return made


def kill_one() -> None:
    os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)


@pytest.mark.parametrize(
    "stage",
    [
        pytest.param(stage, marks=[] if stage in ("ingest", "tokens") else pytest.mark.slow)
        for stage in SHARDS
    ],
)
def test_a_killed_process_ends_a_stage_and_the_next_run_resumes(
    run, whole, project: Path, stage: str
) -> None:
    pattern = SHARDS[stage]
    for earlier in itertools.takewhile(lambda other: other != stage, SHARDS):
        run("threads:2", earlier)
    thread = once_a_shard_is_whole(project, kill_one, f"{pattern}/0*-of-*")
    with pytest.raises(TrainingError, match="re-run the command"):
        run("processes:2", stage)
    thread.join()
    assert multiprocessing.active_children() == []
    assert list(project.glob(f"{pattern}/0*-of-*"))
    assert run("threads:2") == whole


@pytest.mark.slow
def test_a_dask_cluster_that_loses_a_worker_in_each_stage(run, whole, project: Path) -> None:
    with dask_cluster(6) as cluster:
        killed = list(cluster.workers.values())[:5]
        pids = [worker.pid for worker in killed]
        threads = []
        for worker, pattern in zip(killed, SHARDS.values(), strict=True):
            worker.auto_restart = False
            kill = partial(os.kill, worker.pid, signal.SIGKILL)
            threads.append(once_a_shard_is_whole(project, kill, f"{pattern}/0*-of-*"))
        assert run(cluster.scheduler_address.replace("tcp://", "dask://")) == whole
        for thread in threads:
            thread.join()
        assert [worker.pid for worker in killed] != pids


STEPS = "ingest,tokens"


@pytest.mark.slow
def test_a_killed_flow_resumes(project: Path, small_shards, whole, run, tmp_path: Path) -> None:
    """SIGKILL of the process that drives the workers: they end, and the next run resumes."""
    start = (
        "import sys; from unidec.data import token_shards; "
        f"token_shards.TEXTS_A_SHARD = {TEXTS_A_SHARD}; "
        "from flows.command import main; sys.exit(main('train'))"
    )
    home = tmp_path / "home"
    inherited = {name: os.environ[name] for name in os.environ if "PREFECT" not in name}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", start, "--steps", STEPS, "--runner", "processes:2"],
            env=inherited | {"PREFECT_HOME": str(home)},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        kill = partial(os.kill, process.pid, signal.SIGKILL)
        once_a_shard_is_whole(project, kill, f"{SHARDS['tokens']}/0*-of-*").join()
        assert process.wait(60) == -signal.SIGKILL, (tmp_path / "log").read_text()
        end = time.monotonic() + 20
        while workers_of(home) and time.monotonic() < end:
            time.sleep(0.2)
        assert workers_of(home) == []
    finally:
        process.kill()
        process.wait()
        for pid in workers_of(home, servers=True):
            os.kill(pid, signal.SIGKILL)
    (folder,) = project.glob(SHARDS["tokens"])
    kept = {path: path.stat().st_ino for path in folder.glob("0*-of-*")}
    assert kept
    written: list[Path] = []
    note = dividing(lambda work: written.extend(map(work.path, work.missing())))
    with note, pytest.raises(ArtifactError, match="shards are missing"):
        pipeline.tokens(load_params())
    assert len(written) == 15 - len(kept) and not kept.keys() & set(written)
    assert run("threads:2") == whole


@pytest.mark.parametrize("way", ["option", "variable"])
def test_an_unknown_runner_is_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch, capsys, way: str
) -> None:
    from flows.command import main

    monkeypatch.chdir(tmp_path)  # there is not even a params.yaml
    words = ["--runner", "spark://x:1"]
    if way == "variable":
        monkeypatch.setenv("UNIDEC_RUNNER", words.pop())
        words = ["--force"]
    assert main("train", words) == ConfigError.exit_code
    told = capsys.readouterr().err
    assert "no such runner" in told and "spark://x:1" in told and "dask://host:8786" in told
    assert list(tmp_path.iterdir()) == []


def test_dvc_finds_texts_tokenised_that_a_runner_divided(monkeypatch) -> None:
    """A process that DVC starts has no runner: the flow tokenises, and records what it made."""
    from flows import reproduce, train

    calls: list[str] = []
    params = Params()

    def note(name: str) -> Callable[..., dict]:
        return lambda *given: calls.append(" ".join([name, *given[0]])) or {}

    stale = {"ingest", "tokens"}

    def changed(names: tuple[str, ...] = ()) -> tuple[bool, list[str]]:
        return not stale.isdisjoint(names), ["train"]

    monkeypatch.setattr(reproduce.pipeline, "inputs", lambda _params: None, raising=False)
    for stage in reproduce.DIVIDED:
        begin = partial(calls.append, stage)
        monkeypatch.setattr(
            reproduce.pipeline, stage, lambda _, begin=begin: begin(), raising=False
        )
    monkeypatch.setattr(reproduce, "make_data", note("dvc"))
    monkeypatch.setattr(reproduce, "commit", note("commit"))
    monkeypatch.setattr(reproduce, "stale", changed)
    every = "dvc ingest validate tokens propensity label_graph"
    own = ["ingest", "commit ingest", "tokens", "commit tokens"]
    assert reproduce.prepare_data(params, train.DATA_STEPS) == ["train"]
    assert calls == [every]
    calls.clear()
    with dividing(pytest.fail):
        reproduce.prepare_data(params, train.DATA_STEPS)
        assert calls == [*own, every]
        calls.clear()
        stale.remove("tokens")
        reproduce.prepare_data(params, train.DATA_STEPS)
        assert calls == [*own[:2], every]
