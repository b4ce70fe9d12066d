"""Fault 19 for a server: a hostile or damaged version gets the alias while it serves. The process
lives, the old version answers, memory stays bounded, nothing is executed; the next good version
serves."""

from __future__ import annotations

import json
import pickle
import struct
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import followed_server, served_bundle
from helpers.hostile_files import MakesFolder, edit, seal

from unidec.data.storage import folder_sha256

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def pickle_inside(bundle: Path) -> None:
    (bundle / "model" / "pytorch_model.bin").write_bytes(pickle.dumps(MakesFolder()))


def pickled_vectors(bundle: Path) -> None:
    np.save(
        bundle / "vectors" / "de.npy", np.array([MakesFolder()], dtype=object), allow_pickle=True
    )


def too_many_labels(bundle: Path) -> None:
    edit(bundle, num_labels=10**12)


def npy_promises_too_much(bundle: Path) -> None:
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776, 16), }"
    header += b" " * (117 - len(header)) + b"\n"
    start = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header))
    (bundle / "vectors" / "de.npy").write_bytes(start + header + b"\0" * 64)


def index_promises_too_much(bundle: Path) -> None:
    whole = bytearray((bundle / "index.faiss").read_bytes())
    whole[8:12] = struct.pack("<I", 1 << 30)
    (bundle / "index.faiss").write_bytes(whole)


def tensors_promise_too_much(bundle: Path) -> None:
    header = json.dumps(
        {"x": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}
    ).encode()
    (bundle / "model" / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    seal(bundle / "model")


def larger_than_memory(bundle: Path) -> None:
    with (bundle / "vectors" / "de.npy").open("r+b") as file:
        file.truncate(1 << 43)  # sparse: 8 TiB that take no space


def another_hash(bundle: Path) -> None:
    """As it is, under a hash that is not its."""


def no_numbers(bundle: Path) -> None:
    from safetensors.numpy import load_file, save_file

    path = bundle / "model" / "model.safetensors"
    save_file({name: np.full_like(array, np.nan) for name, array in load_file(path).items()}, path)
    seal(bundle / "model")


# bytes that answering for minutes may take; what these bundles promise is thousands of times that
SERVING = 48e6
UNSEALED = (larger_than_memory, another_hash)
HARMS = [
    pickle_inside,
    pickled_vectors,
    too_many_labels,
    npy_promises_too_much,
    index_promises_too_much,
    tensors_promise_too_much,
    larger_than_memory,
    another_hash,
    no_numbers,
]


def test_hostile_versions_that_get_the_alias(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    texts = [served_bundle.text(row) for row in range(10)]
    registry = followed_server.FollowedRegistry(
        tmp_path, served_bundle.make_served_bundle, versions=2
    )
    expected = {registry.hashes["1"]: followed_server.expected_of(registry.bundle("1"), texts)}
    size = sum(file.stat().st_size for file in registry.bundle("1").rglob("*") if file.is_file())
    bad = {}
    for harm in HARMS:
        stored = registry.make(harm.__name__, 3)
        bundle = stored / "artifacts" / "bundle"
        harm(bundle)
        if harm not in UNSEALED:
            seal(bundle)
        sha256 = "0" * 64 if harm is another_hash else folder_sha256(bundle)
        bad[registry.add(stored, sha256)] = harm.__name__
    with registry.serving("serve.follow_seconds=0.2", "serve.cache_queries=0") as server:
        with followed_server.Clients(server.port, expected, texts, num=1) as clients:
            time.sleep(2)
            before = server.memory()[1]
            for number, name in bad.items():
                registry.point(number)
                server.until(
                    lambda number=number: (
                        (server.follow()["refused"] or {}).get("version") == number
                    )
                )
                assert server.version() == "1", name
            most = server.memory()[1]
            why = [
                line.partition("still serving version 1: ")[2]
                for line in server.log.splitlines()
                if "is refused" in line
            ]
        assert server.follow()["refusals"] == len(why)
        assert len(bad) == len(why)
        assert not clients.wrong, clients.wrong[:3]
        assert set(clients.answers) == set(expected)
        registry.point("2")
        # the state is shown a moment after the version that answers
        server.until(lambda: server.version() == "2" and server.follow()["refused"] is None)
        copies = [
            path for path in (tmp_path / "project" / "runs" / "bundles").iterdir() if path.is_dir()
        ]
    assert most - before < 2 * size + SERVING, "the server loads none of them"
    assert not list(tmp_path.rglob("executed"))
    assert not Path("executed").exists()
    assert len(copies) <= 2, "what was refused does not stay on the disk"
    with capsys.disabled():
        print(
            f"\n{len(bad)} hostile versions refused, {len(clients.seconds)} answers meanwhile, "
            f"none wrong; peak memory {before / 1e6:.0f} -> {most / 1e6:.0f} MB, bundles of "
            f"{size / 1e6:.1f} MB"
        )
        for name, words in zip(bad.values(), why, strict=True):
            print(f"  {name}: {words[:150]}")
