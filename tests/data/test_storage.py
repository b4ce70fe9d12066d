"""Folders are whole or absent, and damage is found before anything is parsed."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from helpers.hostile_files import write_sealed

from unidec.data import storage
from unidec.data.json_file import read_json_lines
from unidec.data.storage import (
    file_sha256,
    folder_sha256,
    load_array,
    read_manifest,
    swap_folder,
    write_bytes_atomic,
    write_folder,
    write_json,
)
from unidec.errors import ArtifactError


def make(path: Path, value: int = 3) -> Path:
    with write_folder(path, "thing", 2, {"a": 1}) as out:
        np.save(out.path / "x.npy", np.arange(value))
        (out.path / "sub").mkdir()
        (out.path / "sub" / "y.txt").write_text("text")
        out.meta["rows"] = value
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make(tmp_path / "deep" / "thing")


def test_round_trip(folder: Path) -> None:
    manifest = read_manifest(folder, "thing", 2)
    assert manifest["meta"] == {"a": 1, "rows": 3}
    assert set(manifest["files"]) == {"x.npy", "sub/y.txt"}
    expected = file_sha256(folder / "x.npy")
    assert manifest["files"]["x.npy"]["sha256"] == expected
    assert os.listdir(folder.parent) == ["thing"]


def test_rebuild_is_byte_identical(folder: Path, tmp_path: Path) -> None:
    again = make(tmp_path / "again")
    for name in ("manifest.json", "x.npy", "sub/y.txt"):
        assert (again / name).read_bytes() == (folder / name).read_bytes()
    assert folder_sha256(again) == folder_sha256(folder)
    assert folder_sha256(make(tmp_path / "other", 4)) != folder_sha256(folder)


def write_and_fail(folder: Path, error: Exception, num_bytes: int = 0) -> None:
    with write_folder(folder, "thing", 2, num_bytes=num_bytes) as out:
        (out.path / "z").write_bytes(b"0" * 2000)
        raise error


def test_replaced_only_when_all_is_written(folder: Path) -> None:
    with pytest.raises(RuntimeError, match="midway"):
        write_and_fail(folder, RuntimeError("midway"))
    assert read_manifest(folder, "thing", 2)["meta"]["rows"] == 3
    assert os.listdir(folder.parent) == ["thing"]
    make(folder, 5)
    assert read_manifest(folder, "thing", 2)["meta"]["rows"] == 5
    assert os.listdir(folder.parent) == ["thing"]


def test_replaces_without_an_exchange_in_one_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "_exchange", lambda first, second: False)
    make(folder, 5)
    assert read_manifest(folder, "thing", 2)["meta"]["rows"] == 5
    assert os.listdir(folder.parent) == ["thing"]


def test_what_a_killed_process_left_is_removed(folder: Path) -> None:
    code = (
        "import os, signal, sys; from unidec.data.storage import write_folder\n"
        "with write_folder(sys.argv[1], 'thing', 2, {}) as out:\n"
        "    (out.path / 'x').write_text('x'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(os.listdir(folder.parent)) == 2
    assert read_manifest(folder, "thing", 2)["meta"]["rows"] == 3
    make(folder)
    assert os.listdir(folder.parent) == ["thing"]


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(
    "damage", ["truncate", "remove", "add", "symlink", "folder_symlink", "no_manifest"]
)
def test_damage_is_refused_with_the_files_name(folder: Path, damage: str, verify: bool) -> None:
    name = "x.npy"
    if damage == "truncate":
        (folder / name).write_bytes((folder / name).read_bytes()[:-1])
    elif damage == "remove":
        (folder / name).unlink()
    elif damage == "add":
        name = "extra.bin"
        (folder / name).write_bytes(b"")
    elif damage == "symlink":
        shutil.move(folder / name, folder.parent / "elsewhere")
        (folder / name).symlink_to(folder.parent / "elsewhere")
    elif damage == "folder_symlink":
        name = "sub"
        shutil.move(folder / "sub", folder.parent / "elsewhere")
        (folder / "sub").symlink_to(folder.parent / "elsewhere")
    else:
        name = "manifest.json"
        (folder / name).unlink()
    with pytest.raises(ArtifactError, match=name):
        read_manifest(folder, "thing", 2, verify=verify)


def test_a_flipped_byte_is_found_by_verify(folder: Path) -> None:
    data = bytearray((folder / "x.npy").read_bytes())
    data[-1] ^= 1
    (folder / "x.npy").write_bytes(data)
    read_manifest(folder, "thing", 2, verify=False)
    with pytest.raises(ArtifactError, match=r"x\.npy.*damaged"):
        read_manifest(folder, "thing", 2)


@pytest.mark.parametrize(
    "name", ["../outside", "/etc/passwd", "sub/../../outside", "a\\b", "", "C:x"]
)
def test_names_outside_the_folder_are_refused(folder: Path, name: str) -> None:
    (folder.parent / "outside").write_text("secret")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = {"size": 6, "sha256": file_sha256(folder.parent / "outside")}
    write_sealed(folder, files=manifest["files"])
    with pytest.raises(ArtifactError, match="file is missing"):
        read_manifest(folder, "thing", 2)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        "[" * 100_000,
        '{"kind": "thing"}',
        '{"kind":"thing","version":true,"unidec":"0","meta":{},"files":{}}',
    ],
)
def test_damaged_manifests_are_refused(folder: Path, text: str) -> None:
    (folder / "manifest.json").write_text(text)
    with pytest.raises(ArtifactError, match=r"manifest\.json"):
        read_manifest(folder, "thing", 2)


@pytest.mark.parametrize("changes", [{"version": True}, {"meta": 3}, {"files": []}, {"kind": None}])
def test_manifests_with_values_of_other_types_are_refused(folder: Path, changes: dict) -> None:
    write_sealed(folder, **changes)
    with pytest.raises(ArtifactError, match=r"manifest\.json: a damaged manifest"):
        read_manifest(folder, "thing", 2)


def test_a_flipped_bit_anywhere_in_a_manifest_is_found(folder: Path) -> None:
    path = folder / "manifest.json"
    whole = path.read_bytes()
    for place, byte in enumerate(whole):
        path.write_bytes(whole[:place] + bytes([byte ^ 1 << place % 8]) + whole[place + 1 :])
        with pytest.raises(ArtifactError, match=r"manifest\.json"):
            read_manifest(folder, "thing", 2, verify=False)


def test_a_manifest_without_its_hash_or_with_another_is_refused(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    unsealed = {key: value for key, value in manifest.items() if key != "sha256"}
    for changed in (unsealed, manifest | {"meta": {"a": 2}}):
        (folder / "manifest.json").write_text(json.dumps(changed, indent=1))
        with pytest.raises(ArtifactError, match=r"manifest\.json: a damaged manifest"):
            read_manifest(folder, "thing", 2)


def test_a_manifest_of_60_megabytes_is_refused_unread(folder: Path) -> None:
    files = {f"f{number}": {"size": 1, "sha256": "0" * 64} for number in range(1000)}
    text = json.dumps(
        {"kind": "thing", "version": 2, "unidec": "0.1.0", "meta": {}, "files": files}
    )
    with open(folder / "manifest.json", "w") as file:
        for _ in range((60 << 20) // len(text)):
            file.write(text)
    tracemalloc.start()
    with pytest.raises(ArtifactError, match=r"manifest\.json: a manifest of impossible size"):
        read_manifest(folder, "thing", 2)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_a_folder_is_verified_once_while_its_files_stay_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def needed() -> bool:
        with storage.verify_once(folder) as verify:
            return verify

    assert needed() and needed()  # just written: another write could leave the same time stamp
    monkeypatch.setattr(storage, "_SETTLED_S", -60.0)
    assert needed() and not needed()
    (folder / "x.npy").write_bytes((folder / "x.npy").read_bytes())
    assert needed() and not needed()
    make(folder, 4)
    with pytest.raises(ArtifactError), storage.verify_once(folder):
        read_manifest(folder, "other", 2)
    assert needed() and not needed()
    with storage.verify_once(folder, verify=False) as verify:
        assert not verify


def test_other_kinds_and_versions_are_refused(folder: Path) -> None:
    with pytest.raises(ArtifactError, match="another kind"):
        read_manifest(folder, "other", 2)
    with pytest.raises(ArtifactError, match=r"version 2(.|\n)*install unidec"):
        read_manifest(folder, "thing", 1)
    with pytest.raises(ArtifactError, match="version 2 of thing") as caught:
        read_manifest(folder, "thing", 3)
    assert "fix: write it again: make train" in str(caught.value)
    with pytest.raises(ArtifactError, match="no thing here"):
        read_manifest(folder / "none", "thing", 1)


def test_no_space_is_told_before_the_first_byte(folder: Path) -> None:
    with pytest.raises(ArtifactError, match=r"no space(.|\n)*1,000,000,000,000,000,000 bytes"):
        write_and_fail(folder, AssertionError("nothing may be written"), num_bytes=10**18)
    assert read_manifest(folder, "thing", 2)["meta"]["rows"] == 3


def test_a_disk_that_fills_up_keeps_the_last_good_folder(folder: Path) -> None:
    with pytest.raises(ArtifactError, match=r"no space(.|\n)*at least 2,000 bytes"):
        write_and_fail(folder, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert read_manifest(folder, "thing", 2)["meta"]["rows"] == 3
    assert os.listdir(folder.parent) == ["thing"]


def test_errors_of_the_caller_are_not_renamed(folder: Path) -> None:
    with pytest.raises(FileNotFoundError), swap_folder(folder):
        (folder / "none").read_bytes()


def test_write_json_is_valid_json_whatever_numpy_gives(tmp_path: Path) -> None:
    write_json(
        tmp_path / "a.json",
        {"x": np.float32("nan"), "y": [np.int64(2), (1.5,)], "z": np.arange(2), "p": tmp_path},
    )
    assert json.loads((tmp_path / "a.json").read_text()) == {
        "x": None,
        "y": [2, [1.5]],
        "z": [0, 1],
        "p": str(tmp_path),
    }
    write_bytes_atomic(tmp_path / "a.json", b"{}")
    assert os.listdir(tmp_path) == ["a.json"]


def test_load_array_refuses_pickle_and_other_types(tmp_path: Path) -> None:
    np.save(tmp_path / "o.npy", np.array([{}], dtype=object), allow_pickle=True)
    np.save(tmp_path / "x.npy", np.arange(3))
    np.save(tmp_path / "empty.npy", np.zeros(0, dtype=np.int32))
    (tmp_path / "bad.npy").write_bytes(
        b"\x93NUMPY\x01\x00v\x00{'descr': '<f4', 'fortran_order': False, 'shape': (9999999999,)}"
    )
    assert load_array(tmp_path / "x.npy", np.int64).tolist() == [0, 1, 2]
    assert load_array(tmp_path / "empty.npy", np.int32).shape == (0,)
    for name, dtype, ndim in (
        ("o.npy", None, 1),
        ("x.npy", np.int32, 1),
        ("x.npy", np.int64, 2),
        ("bad.npy", None, 1),
    ):
        with pytest.raises(ArtifactError, match=name):
            load_array(tmp_path / name, dtype, ndim)
    with pytest.raises(ArtifactError, match=r"none\.npy"):
        load_array(tmp_path / "none.npy")


@pytest.mark.parametrize("damage", [b'{"loss": "\xff"}', b"{", b"\xff\xfe"])
def test_a_damaged_line_of_records_is_named(tmp_path, damage):
    path = tmp_path / "history.jsonl"
    path.write_bytes(b'{"step": 1}\n' + damage + b'\n{"step": 2}\n')
    with pytest.raises(ArtifactError, match="a damaged line") as caught:
        read_json_lines(path)
    assert caught.value.where == f"{path}:2"
    assert "remove this line" in caught.value.fix
    path.write_bytes(b'{"step": 1}\n' + damage)  # cut off by a kill
    assert read_json_lines(path) == [{"step": 1}]
