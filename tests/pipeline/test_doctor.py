"""Each disorder is made for real, found, mended where that is safe, and gone afterwards."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from unidec import cli
from unidec.data.storage import file_sha256, write_folder
from unidec.pipeline import doctor
from unidec.pipeline.lock import one_at_a_time
from unidec.tracking.doctor import Finding
from unidec.training.checkpoint import Checkpoint, CheckpointWriter


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project, with no store; what the environment lacks is not this file's matter."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(doctor, "environment_findings", lambda root: [])
    return tmp_path


@pytest.fixture(scope="module")
def dead_pid() -> int:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    return child.pid


def only(findings: list[Finding]) -> Finding:
    assert len(findings) == 1, findings
    return findings[0]


def mended(code: int) -> None:
    """The one finding has this weight, is left alone, is mended when asked, and is not found again."""
    finding = only(doctor.examine())
    assert doctor.exit_code([finding]) == code and finding.mend is not None and finding.done is None
    assert only(doctor.examine()).where == finding.where  # looking changed nothing
    fixed = only(doctor.examine(fix=True))
    assert fixed.done and doctor.exit_code([fixed]) == 0
    assert doctor.examine() == []


def reported(code: int, words: str, where: str, **options: bool) -> Finding:
    """The one finding says this, and is left as it is."""
    finding = only(doctor.examine(fix=True, **options))
    assert doctor.exit_code([finding]) == code and finding.done is None and finding.mend is None
    assert words in finding.what and finding.where.endswith(where) and finding.fix
    return finding


def test_nothing_is_wrong_with_nothing() -> None:
    assert doctor.examine(deep=True, fix=True) == [] and doctor.exit_code([]) == 0


# -- half-written --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["data/tokens", "outputs", "runs/abc/checkpoints", "runs/own/x/data"])
def test_what_a_killed_writer_left(place: Path, dead_pid: int, folder: str) -> None:
    root = place / folder
    root.mkdir(parents=True)
    host = socket.gethostname()
    left = root / f".queries.{host}.{dead_pid}.0123abcd.tmp"
    left.mkdir()
    (left / "ids.npy").write_bytes(b"12345")
    mine = root / f".labels.{host}.{os.getppid()}.0123abcd.tmp"  # at work
    mine.write_bytes(b"")
    assert "5 bytes" in only(doctor.examine()).what
    mended(1)
    assert mine.exists() and not left.exists()


def test_a_kill_inside_write_folder_is_found(place: Path) -> None:
    code = (
        "import os, signal\nfrom unidec.data.storage import write_folder\n"
        "with write_folder('data/dataset', 'dataset', 1) as out:\n"
        "    (out.path / 'x').write_bytes(b'1')\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == -9
    mended(1)


def test_what_ranks_left_is_removed_unless_a_training_is_at_work(place: Path) -> None:
    left = place / "runs" / "abc" / "checkpoints" / ".step-0000000010.ranks.tmp"
    left.mkdir(parents=True)
    with one_at_a_time(place / "runs"):
        assert doctor.examine(fix=True) == [] and left.exists()
    mended(1)


# -- artifacts -----------------------------------------------------------------------------------------------------


def artifact(path: str, kind: str) -> Path:
    with write_folder(path, kind, 1) as out:
        np.save(out.path / "ids.npy", np.arange(100))
    return Path(path)


def test_a_damaged_artifact() -> None:
    path = artifact("outputs/model", "model")
    assert doctor.examine(deep=True) == []
    with open(path / "ids.npy", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\7")
    assert doctor.examine() == []  # the size is right: only --deep reads it
    reported(4, "damaged", "outputs/model/ids.npy", deep=True)
    os.truncate(path / "ids.npy", 10)
    assert "dvc checkout outputs/model" in reported(4, "got: 10 bytes", "outputs/model/ids.npy").fix


@pytest.mark.parametrize("content", [None, b"{", b"[]", b'{"kind": 3}'])
def test_a_folder_without_its_manifest(content: bytes | None) -> None:
    path = artifact("data/cache/vectors-1", "encoder-cache")
    (path / "manifest.json").unlink()
    if content is not None:
        (path / "manifest.json").write_bytes(content)
    assert "computed again" in reported(4, "manifest", "vectors-1/manifest.json").fix


# -- runs ----------------------------------------------------------------------------------------------------------


def checkpoints(run: str, *steps: int, epoch: int = 0, refresh: str | None = None) -> list[Path]:
    found = []
    for step in steps:
        writer = CheckpointWriter(Path("runs") / run)
        state = {"epoch": epoch, "epoch_step": step, "step": step, "seconds": 0.0, "refresh": refresh,
                 "identity": {}, "notes": {}}  # fmt: skip
        writer.save(Checkpoint(state, {"model.x": torch.ones(4)}, {}))
        path = writer.wait()
        assert path is not None
        found.append(path)
    return found


def test_a_damaged_checkpoint_beside_a_whole_one_and_alone() -> None:
    first, second = checkpoints("abc", 10, 20)
    assert doctor.examine(deep=True) == []
    os.truncate(second / "dense.safetensors", 5)
    assert "newest whole one is used" in reported(1, "a damaged checkpoint", second.name).fix
    os.truncate(first / "dense.safetensors", 5)
    both = doctor.examine(fix=True)
    assert [(f.severity, f.mend) for f in both] == [("broken", None)] * 2 and doctor.exit_code(both) == 4


def test_checkpoints_and_refreshes_that_nothing_needs() -> None:
    for epoch in (0, 2, 4, 6):
        with write_folder(f"runs/abc/refresh/epoch-{epoch:05d}", "refresh", 1, {"epoch": epoch}) as out:
            np.save(out.path / "order.npy", np.arange(3))
    manifest = Path("runs/abc/refresh/epoch-00004/manifest.json")
    checkpoints("abc", 10, 20, epoch=5, refresh=file_sha256(manifest))
    found = doctor.examine()
    assert [Path(f.where).name for f in found] == ["epoch-00000", "epoch-00002"] and doctor.exit_code(found) == 0
    assert all(f.done for f in doctor.examine(fix=True))
    assert doctor.examine(deep=True) == []  # the checkpoints still find theirs
    assert sorted(p.name for p in Path("runs/abc/refresh").iterdir()) == ["epoch-00004", "epoch-00006"]


def test_a_third_checkpoint_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CheckpointWriter, "_purge", lambda self, newest: None)
    first, *_ = checkpoints("abc", 10, 20, 30)
    reported(0, "nothing needs", first.name)


@pytest.mark.parametrize(("times", "code"), [(3.0, None), (1.5, 1), (0.5, 4)])
def test_no_room_for_the_next_checkpoints(monkeypatch: pytest.MonkeyPatch, times: float, code: int | None) -> None:
    (path,) = checkpoints("abc", 10)
    size = sum(file.stat().st_size for file in path.iterdir())
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=int(times * size)))
    if code is None:
        assert doctor.examine() == []
    else:
        reported(code, "bytes are free", "runs")


# -- DVC -----------------------------------------------------------------------------------------------------------


def test_a_damaged_list_of_locks(place: Path) -> None:
    (place / ".dvc" / "tmp").mkdir(parents=True)
    (place / ".dvc" / "tmp" / "rwlock").write_text('{"write": {"a": {"pid": 3')
    mended(4)


def test_locks_of_the_dead_are_taken_out_and_those_of_the_living_stay(place: Path, dead_pid: int) -> None:
    tmp = place / ".dvc" / "tmp"
    tmp.mkdir(parents=True)
    mine = {"pid": os.getpid(), "cmd": "dvc repro"}
    gone = {"pid": dead_pid, "cmd": "dvc repro"}
    (tmp / "rwlock").write_text(json.dumps({"write": {"a": mine, "b": gone}, "read": {"c": [mine, gone], "d": [gone]}}))
    (tmp / "lock").write_text(f" {dead_pid}\n")  # the kind that the system takes back
    mended(1)
    assert json.loads((tmp / "rwlock").read_text()) == {"write": {"a": mine}, "read": {"c": [mine]}}


def test_a_hard_link_lock_of_the_dead(place: Path, dead_pid: int) -> None:
    lock = place / ".dvc" / "tmp" / "lock"
    lock.parent.mkdir(parents=True)
    lock.write_text(f"{lock}|{socket.gethostname()}|{os.getpid()}|1")
    assert doctor.examine() == []
    lock.write_text(f"{lock}|{socket.gethostname()}|{dead_pid}|1")
    mended(4)


def test_locks_are_left_alone_while_dvc_is_at_work(place: Path, dead_pid: int) -> None:
    import fcntl

    tmp = place / ".dvc" / "tmp"
    tmp.mkdir(parents=True)
    (tmp / "rwlock").write_text(json.dumps({"write": {"b": {"pid": dead_pid, "cmd": "x"}}}))
    with open(tmp / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert only(doctor.examine()).mend is None
    mended(1)


@pytest.fixture
def dvc(place: Path) -> Iterator[Callable[..., None]]:
    """A project of DVC with one output, in cache and remote."""

    def run(*words: str) -> None:
        done = subprocess.run([sys.executable, "-m", "dvc", *words], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr

    run("init", "--no-scm", "-q")
    run("remote", "add", "-d", "there", str(place / "remote"))
    copy = "import pathlib; pathlib.Path('outputs').mkdir(exist_ok=True); pathlib.Path('outputs/model').write_text('1')"
    Path("dvc.yaml").write_text(json.dumps({"stages": {"train": {
        "cmd": f'{sys.executable} -c "{copy}"', "outs": ["outputs/model"],
    }}}))  # fmt: skip
    run("repro", "-q")
    run("push", "-q")
    return run


@pytest.mark.slow
def test_outputs_cache_and_remote(dvc: Callable[..., None], place: Path) -> None:
    assert doctor.examine() == []
    Path("outputs/model").write_text("2")
    reported(1, "1 file changed since dvc.lock was written", "outputs/model")
    Path("outputs/model").unlink()
    reported(0, "not in the workspace", "outputs/model")
    dvc("checkout")
    for file in (place / "remote").rglob("*"):
        if file.is_file():
            file.chmod(0o644)
            file.unlink()
    reported(0, "not in its remote", "outputs/model")
    for file in (place / ".dvc" / "cache").rglob("*"):
        if file.is_file():
            file.unlink()
    reported(1, "not in DVC's cache", "outputs/model")
    Path("outputs/model").unlink()
    reported(1, "in neither workspace nor cache", "outputs/model")
    Path("dvc.lock").write_text("<<<<<<< HEAD\n")
    reported(1, "dvc data status fails", "dvc.lock")


def test_a_clone_in_which_nothing_is_built_is_healthy(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What DVC says of a fresh clone: every output is deleted, and in no cache."""
    (place / ".dvc").mkdir()
    (place / "dvc.lock").touch()
    outputs = ["data/dataset", "outputs/model"]
    status = {"uncommitted": {"deleted": outputs}, "not_in_cache": outputs}
    monkeypatch.setattr(doctor, "_ask", lambda root, *words: (status if "data" in words else {}, ""))
    monkeypatch.setattr("sys.argv", ["unidec", "runs", "doctor"])

    def run(code: int) -> str:
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == code
        return capsys.readouterr().out

    assert run(0) == "healthy (1 note: unidec runs doctor --json)\n"
    finding = only(doctor.examine())
    assert (finding.severity, finding.what) == ("note", "nothing is built here yet")
    (place / "outputs" / "model").mkdir(parents=True)  # something was built: what is missing matters then
    assert "in neither workspace nor cache" in run(4)
    (place / "outputs" / "model").rmdir()
    monkeypatch.setattr(doctor, "_ask", lambda root, *words: ({}, ""))
    assert run(0) == "healthy\n"
