"""Damaged, truncated and swapped files of what a training reads: refused by name before the first
step (fault 24).
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers import tiny_data
from helpers.raw_files import write_raw
from helpers.tiny_training import tiny_params

from unidec import pipeline
from unidec.config import Params
from unidec.data.storage import MANIFEST, read_manifest, write_manifest
from unidec.errors import ArtifactError
from unidec.pipeline import doctor, start, training
from unidec.tracking.store import prepare_store
from unidec.training.trainer import Trainer

pytestmark = pytest.mark.timeout(240)
DATA = ("data/dataset", "data/tokens", "data/propensity", "data/label_graph")


def _params(folder: Path) -> Params:
    return tiny_params(
        Path("bert"),
        **{
            "data.path": "raw",
            "data.validation_share": 0.2,
            "optim.epochs": 1,
            "pool.gandalf": True,
            "encoder.kind": "both",
            "run.check_memory": False,
            "tracking.experiment": "damage",
        },
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, SimpleNamespace]]:
    """Two projects whose data has the same sizes and other contents: one trained and indexed, one
    only prepared.
    """
    projects = {}
    with pytest.MonkeyPatch.context() as patch:
        for seed, name in enumerate(("mine", "other")):
            folder = tmp_path_factory.mktemp(name)
            raw = tiny_data.make_raw(seed=seed)
            (folder / "raw").mkdir()
            write_raw(raw, folder / "raw", "xmc-json")
            if name == "mine":
                tiny_data.tiny_transformer("bert", raw, folder / "bert")
            else:
                shutil.copytree(projects["mine"].folder / "bert", folder / "bert")
            patch.chdir(folder)
            patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/mlflow.db")
            prepare_store(f"sqlite:///{folder}/mlflow.db")
            params = _params(folder)
            for stage in ("ingest", "tokens", "propensity", "label_graph"):
                getattr(pipeline, stage)(params)
            if name == "mine":
                training.train(params, say=lambda line: None)
                pipeline.index(params)
            else:
                training.open_trainer(params, "runs/none")
            projects[name] = SimpleNamespace(folder=folder, params=params)
    return projects


@pytest.fixture
def mine(trained: dict[str, SimpleNamespace], monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The trained project, as the current folder; nothing may be trained in it."""
    folder = trained["mine"].folder
    monkeypatch.chdir(folder)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/mlflow.db")

    def trains(*_: Any, **__: Any) -> None:
        raise AssertionError("a step was trained on damaged data")

    monkeypatch.setattr(Trainer, "train_round", trains)
    return SimpleNamespace(
        folder=folder, params=trained["mine"].params, other=trained["other"].folder
    )


def _files(*roots: str) -> list[Path]:
    found = [path for root in roots for path in sorted(Path(root).rglob("*")) if path.is_file()]
    assert len(found) > 5
    return found


def _flip(path: Path, other: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) * 2 // 3] ^= 1 << (len(data) % 8)
    path.write_bytes(data)


def _truncate(path: Path, other: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _swap(path: Path, other: Path) -> None:
    counterpart = other / path
    assert counterpart.read_bytes() != path.read_bytes(), (
        f"{path}: both projects have the same bytes"
    )
    shutil.copyfile(counterpart, path)


def _where(error: ArtifactError) -> str:
    assert error.exit_code == 4 and error.where is not None
    return error.where


def _swapped(path: Path, named: str) -> bool:
    """A swapped manifest is whole: what it says of the files beside it is not what they are."""
    return path.name == MANIFEST and Path(named).parent == path.parent


@pytest.mark.parametrize("damage", [_flip, _truncate, _swap])
def test_any_damaged_file_is_named_before_the_first_step(
    mine: SimpleNamespace, damage: Callable[..., None]
) -> None:
    for path in _files(*DATA):
        if damage is _swap and (mine.other / path).read_bytes() == path.read_bytes():
            # sizes alone: the same in both
            assert path.name in ("split.npy", "offsets.npy", "group.npy"), path
            continue
        before = path.read_bytes()
        damage(path, mine.other)
        try:
            with pytest.raises(ArtifactError) as refused:
                training.train(mine.params, say=lambda line: None)
            named = _where(refused.value)
            assert named == str(path) or (damage is _swap and _swapped(path, named)), named
            assert str(path) in [
                str(found[2]) for found in doctor._artifacts(Path("."), False)
            ] or _swapped(path, named)
            if path.parent.name != "label_graph":
                with pytest.raises(ArtifactError):
                    pipeline.evaluate(mine.params)
        finally:
            path.write_bytes(before)
    assert not list(doctor._artifacts(Path("."), True))


@pytest.mark.parametrize("damage", [_flip, _truncate])
def test_a_damaged_cache_of_the_frozen_encoder_is_named(
    mine: SimpleNamespace, damage: Callable[..., None]
) -> None:
    def opens(path: Path) -> None:
        if path.is_relative_to("data/cache"):
            training.open_trainer(mine.params, "runs/new")
        else:
            pipeline.index(mine.params)

    for path in _files("data/cache", "outputs/model"):
        before = path.read_bytes()
        damage(path, mine.other)
        try:
            with pytest.raises(ArtifactError) as refused:
                opens(path)
            assert _where(refused.value) == str(path)
            assert str(path) in [str(found[2]) for found in doctor._artifacts(Path("."), True)]
        finally:
            path.write_bytes(before)


def test_a_cache_under_the_name_of_another_is_refused(mine: SimpleNamespace) -> None:
    first, second = sorted(path for path in Path("data/cache").iterdir() if "-" in path.name)[:2]
    first.rename("data/cache/aside")
    shutil.copytree(second, first)
    try:
        with pytest.raises(ArtifactError, match=r"another encoder or to other texts") as refused:
            training.open_trainer(mine.params, "runs/new")
        assert _where(refused.value) == str(first)
    finally:
        shutil.rmtree(first)
        Path("data/cache/aside").rename(first)


@pytest.mark.parametrize("name", ["dataset", "tokens/queries", "tokens/labels", "label_graph"])
def test_a_folder_swapped_with_its_manifest_is_another_run(
    mine: SimpleNamespace, name: str
) -> None:
    before = start.run_identity(mine.params)
    path = Path("data") / name
    path.rename("aside")
    shutil.copytree(mine.other / path, path)
    try:
        after = start.run_identity(mine.params)
    finally:
        shutil.rmtree(path)
        Path("aside").rename(path)
    key = {
        "dataset": "data",
        "tokens/queries": "tokens.queries",
        "tokens/labels": "tokens.labels",
    }.get(name, name)
    assert [other for other in before if before[other] != after[other]] == [key]
    assert start.run_identity(mine.params) == before


@pytest.mark.parametrize(
    ("name", "file", "index", "value"),
    [
        ("dataset", "relevance_indices.npy", 0, 10**6),
        ("dataset", "filter_indices.npy", -1, -1),
        ("dataset", "relevance_indptr.npy", 1, 10**9),
        ("dataset", "relevance_indptr.npy", -1, 0),
        ("dataset", "split.npy", 0, 9),
        ("tokens/queries", "ids.npy", 0, 65_000),
        ("tokens/labels", "offsets.npy", 1, 10**9),
        ("label_graph", "indices.npy", 0, 10**6),
        ("label_graph", "indptr.npy", 1, 10**9),
    ],
)
def test_values_out_of_bounds_are_refused_whatever_the_manifest_has(
    mine: SimpleNamespace, name: str, file: str, index: int, value: int
) -> None:
    path = Path("data") / name
    before = {entry.name: entry.read_bytes() for entry in path.iterdir()}
    array = np.load(path / file)
    array[index] = value
    np.save(path / file, array)
    about = read_manifest(path, _kind(path), 1, verify=False)
    write_manifest(path, about["kind"], about["version"], about["meta"])
    try:
        with pytest.raises(ArtifactError) as refused:
            training.train(mine.params, say=lambda line: None)
        assert _where(refused.value) in (str(path / file), str(path))
    finally:
        for entry, data in before.items():
            (path / entry).write_bytes(data)


def _kind(path: Path) -> str:
    return {"queries": "tokens", "labels": "tokens"}.get(path.name, path.name)


def test_folders_that_do_not_belong_together_are_refused(mine: SimpleNamespace) -> None:
    for path, source in (
        ("data/tokens/queries", "data/tokens/labels"),  # another number of texts
        ("data/dataset", "data/tokens/labels"),  # another kind
        ("data/propensity", "data/label_graph"),
    ):
        Path(path).rename("aside")
        shutil.copytree(source, path)
        try:
            with pytest.raises(ArtifactError) as refused:
                training.train(mine.params, say=lambda line: None)
            assert _where(refused.value).startswith(path)
        finally:
            shutil.rmtree(path)
            Path("aside").rename(path)


def test_the_command_ends_with_exit_code_4_and_the_files_name(
    mine: SimpleNamespace, warm_python: list[str]
) -> None:
    path = Path("data/tokens/queries/ids.npy")
    before = path.read_bytes()
    (mine.folder / "params.json").write_text(mine.params.model_dump_json())
    _flip(path, mine.other)
    try:
        done = subprocess.run(
            [*warm_python, "-m", "unidec.cli", "train", "--params", "params.json"],
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        path.write_bytes(before)
    assert done.returncode == 4, done.stderr
    assert str(path) in done.stderr
    assert "sha256" in done.stderr
    assert "Traceback" not in done.stderr


def test_files_are_hashed_once_in_a_process(
    mine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from unidec.data import storage

    hashed: list[str] = []
    real = storage.file_sha256
    monkeypatch.setattr(storage, "file_sha256", lambda path: hashed.append(str(path)) or real(path))
    monkeypatch.setattr(storage, "_SETTLED_S", -60.0)  # the files are as old as they need to be
    monkeypatch.setattr(storage, "_verified", set())
    for _ in range(3):
        training.open_trainer(mine.params, "runs/new")
    assert len(hashed) == len(set(hashed))
    assert str(Path("data/tokens/queries/ids.npy")) in hashed
    _flip(path := Path("data/tokens/queries/ids.npy"), mine.other)
    try:
        with pytest.raises(ArtifactError):
            training.open_trainer(mine.params, "runs/new")
    finally:
        _flip(path, mine.other)
