"""Fault 19: a bundle that was made to do harm, or was damaged: one error that names the file,
nothing executed.

The manifests here fit the files (`seal`), as an attacker's would, so that each check behind the
manifest has to hold."""

from __future__ import annotations

import json
import pickle
import shutil
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from helpers.hostile_files import MakesFolder, edit, seal, write_sealed
from helpers.tiny_bundle import write_tiny_bundle

from unidec.bundle.bundle import Bundle
from unidec.bundle.bundle_folder import VERSION
from unidec.errors import ArtifactError


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("good") / "bundle"
    write_tiny_bundle(path, np.random.default_rng(3), kind="hnsw")
    return path


@pytest.fixture
def bundle(good: Path, tmp_path: Path, stub_model: None) -> Path:
    return Path(shutil.copytree(good, tmp_path / "bundle"))


def test_the_untouched_one_loads(bundle):
    assert len(Bundle.load(bundle).predict(["red car"])[0].labels) == 5


@pytest.mark.parametrize(
    "name",
    [
        "bundle.json",
        "labels.arrow",
        "index.faiss",
        "vectors/de.npy",
        "model/words.npy",
        "model/manifest.json",
    ],
)
@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "grow", "empty"])
def test_damage_is_found_by_the_manifest(bundle, name, damage):
    file = bundle / name
    data = bytearray(file.read_bytes())
    if damage == "remove":
        file.unlink()
    else:
        data[len(data) // 2] ^= 1
        changed = {"flip": data, "cut": data[:-7], "grow": data + b"\n", "empty": b""}[damage]
        file.write_bytes(changed)
    with pytest.raises(ArtifactError, match=name.replace(".", r"\.")):
        Bundle.load(bundle)


def test_no_file_is_parsed_before_all_are_checked(bundle, monkeypatch):
    def parsed(*args, **kwargs):
        raise AssertionError("parsed")

    for name in ("read_info", "read_labels", "read_heads", "LabelIndex"):
        monkeypatch.setattr(f"unidec.bundle.bundle.{name}", parsed)
    file = bundle / "model" / "words.npy"  # the last one in the order of names
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(ArtifactError, match=r"words\.npy"):
        Bundle.load(bundle)


def test_a_pickle_is_never_run(bundle, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("bundle.json", "labels.arrow", "index.faiss", "vectors/de.npy"):
        broken = Path(shutil.copytree(bundle, tmp_path / name.replace("/", "-")))
        (broken / name).write_bytes(pickle.dumps(MakesFolder()))
        seal(broken)
        with pytest.raises(ArtifactError):
            Bundle.load(broken)
    np.save(
        bundle / "vectors" / "de.npy", np.array([MakesFolder()], dtype=object), allow_pickle=True
    )
    seal(bundle)
    with pytest.raises(ArtifactError, match=r"de\.npy"):
        Bundle.load(bundle)
    assert not Path("executed").exists()


@pytest.mark.parametrize(
    "name", ["payload.pkl", "model/pytorch_model.bin", "model/code.py", "vectors/other.npy"]
)
def test_files_without_a_place_are_refused(bundle, name):
    (bundle / name).write_bytes(pickle.dumps(MakesFolder()))
    seal(bundle)
    with pytest.raises(ArtifactError, match="does not belong"):
        Bundle.load(bundle)


def test_names_outside_and_links_are_refused(bundle, tmp_path):
    (tmp_path / "secret").write_text("x")
    manifest = json.loads((bundle / "manifest.json").read_text())
    for name in ("../secret", "/etc/hostname", "model/../../secret", "a\\..\\b", "c:x", "a\0b"):
        entry = {name: {"size": 1, "sha256": "0" * 64}}
        write_sealed(bundle, files=manifest["files"] | entry)
        with pytest.raises(ArtifactError, match="missing"):
            Bundle.load(bundle)
    write_sealed(bundle, files=manifest["files"])
    (bundle / "labels.arrow").rename(tmp_path / "labels.arrow")
    (bundle / "labels.arrow").symlink_to(tmp_path / "labels.arrow")
    with pytest.raises(ArtifactError, match="link"):
        Bundle.load(bundle)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_labels": 11},
        {"num_labels": 13},
        {"num_labels": -1},
        {"num_labels": 10**15},
        {"num_labels": True},
        {"dim": 5},
        {"width": 11},
        {"width": 10**9},
        {"space": "de"},
        {"space": "sum"},
        {"clf_weight": "1"},
        {"clf_weight": None},
        {"index_kind": "flat"},
        {"index_kind": "ivf"},
        {"index_bytes": 1},
        {"vectors": {}},
        {"vectors": {"de": [12, 6]}},
        {"vectors": {"de": [12, 6], "clf": [12, 6], "bias": [12]}},
        {"vectors": {"de": [6, 12], "clf": [12, 6]}},
        {"vectors": {"../de": [12, 6]}},
        {"text": 3},
        {"unknown": 1},
        {"calibration": {}},
        {"calibration": {"scores": [], "probabilities": []}},
        {"calibration": {"scores": [0.0, float("nan")], "probabilities": [0.1, 0.2]}},
        {"calibration": {"scores": [1.0, 0.0], "probabilities": [0.1, 0.2]}},
        {"calibration": {"scores": [0.0, 1.0], "probabilities": [0.2, 0.1]}},
        {"calibration": {"scores": [0.0, 1.0], "probabilities": [0.2, 1.1]}},
        {"calibration": {"scores": [0.0, 1.0], "probabilities": [0.5]}},
        {"calibration": {"scores": list(range(99)), "probabilities": [0.5] * 99}},
    ],
    ids=str,
)
def test_a_bundle_json_that_contradicts_the_files(bundle, changes):
    edit(bundle, **changes)
    seal(bundle)
    with pytest.raises(ArtifactError):
        Bundle.load(bundle)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "[" * 100_000, '{"clf_weight": NaN}', '{"clf_weight": 1e999}']
)
def test_a_bundle_json_that_is_none(bundle, text):
    (bundle / "bundle.json").write_text(text)
    seal(bundle)
    with pytest.raises(ArtifactError, match=r"bundle\.json"):
        Bundle.load(bundle)


def test_vectors_of_another_kind(bundle):
    de = np.load(bundle / "vectors" / "de.npy")
    wrong = [
        de[:5],
        de[:, :3],
        de.astype(np.float64),
        de.astype(np.int32),
        de.ravel(),
        np.full_like(de, np.nan),
    ]
    for array in wrong:
        np.save(bundle / "vectors" / "de.npy", array)
        seal(bundle)
        with pytest.raises(ArtifactError, match=r"de\.npy"):
            Bundle.load(bundle)


def test_an_npy_header_that_promises_too_much(bundle):
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776, 6), }"
    header += b" " * (117 - len(header)) + b"\n"
    (bundle / "vectors" / "de.npy").write_bytes(
        b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + b"\0" * 64
    )
    seal(bundle)
    with pytest.raises(ArtifactError, match=r"de\.npy"):
        Bundle.load(bundle)


def test_labels_of_another_kind(bundle):
    good = pa.ipc.open_file(bundle / "labels.arrow").read_all()
    wrong = [
        good.slice(0, 5),
        good.rename_columns(["title", "uid"]),
        good.select(["uid"]),
        pa.table({"uid": good["uid"].cast(pa.binary()), "title": good["title"].cast(pa.binary())}),
        pa.table({"uid": pa.array([None] * 12, pa.string()), "title": good["title"]}),
    ]
    for table in wrong:
        with (
            pa.OSFile(str(bundle / "labels.arrow"), "wb") as file,
            pa.ipc.new_file(file, table.schema) as writer,
        ):
            writer.write_table(table)
        seal(bundle)
        with pytest.raises(ArtifactError, match=r"labels\.arrow"):
            Bundle.load(bundle)


def test_labels_that_are_not_utf8_or_point_outside(bundle):
    whole = (bundle / "labels.arrow").read_bytes()
    at = whole.index(b"red car")
    (bundle / "labels.arrow").write_bytes(whole[:at] + b"r\xffd" + whole[at + 3 :])
    seal(bundle)
    with pytest.raises(ArtifactError, match=r"labels\.arrow"):
        Bundle.load(bundle)
    offsets = struct.pack("<4i", 0, 2, 4, 6)  # uids L0, L1, L2
    at = whole.index(offsets)
    (bundle / "labels.arrow").write_bytes(
        whole[:at] + struct.pack("<4i", 0, 2, 1 << 30, 6) + whole[at + 16 :]
    )
    seal(bundle)
    with pytest.raises(ArtifactError, match=r"labels\.arrow"):
        Bundle.load(bundle)


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_compressed_labels_cannot_fill_the_memory(bundle, codec, monkeypatch):
    """A few kilobytes that unpack to fifty megabytes are refused before they are unpacked."""
    good = pa.ipc.open_file(bundle / "labels.arrow").read_all()
    long = pa.array(["x" * (1 << 22)] * 12, pa.string())
    options = pa.ipc.IpcWriteOptions(compression=codec)
    table = pa.table({"uid": good["uid"], "title": long}, schema=good.schema)
    with (
        pa.OSFile(str(bundle / "labels.arrow"), "wb") as file,
        pa.ipc.new_file(file, good.schema, options=options) as writer,
    ):
        writer.write_table(table)
    del table, long
    seal(bundle)
    unpacked: list[pa.RecordBatch] = []
    real = pa.ipc.read_record_batch
    monkeypatch.setattr(
        pa.ipc, "read_record_batch", lambda *a: unpacked.append(real(*a)) or unpacked[-1]
    )
    with pytest.raises(ArtifactError, match=r"labels\.arrow"):
        Bundle.load(bundle)
    assert not unpacked


def test_an_index_header_that_promises_too_much(bundle):
    file = bundle / "index.faiss"
    whole = bytearray(file.read_bytes())
    for at, value in (
        (4, 1 << 30),
        (8, 1 << 30),
        (37, 1 << 30),
        (37, (1 << 32) - 1),
    ):
        data = bytearray(whole)
        data[at : at + 4] = struct.pack("<I", value)
        file.write_bytes(data)
        seal(bundle)
        tracemalloc.start()
        with pytest.raises(ArtifactError, match=r"index\.faiss"):
            Bundle.load(bundle)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 16 << 20


def test_a_newer_format_is_refused_by_its_version(bundle):
    write_sealed(bundle, version=VERSION + 1, unidec="9.1.0")
    with pytest.raises(ArtifactError, match=r"9\.1\.0"):
        Bundle.load(bundle)
    write_sealed(bundle, version=VERSION, kind="model")
    with pytest.raises(ArtifactError, match="another kind"):
        Bundle.load(bundle)


def test_a_model_of_other_labels_or_heads_is_refused(bundle):
    for config in ({"heads": "both", "num_labels": 11}, {"heads": "de", "num_labels": 12}):
        (bundle / "model" / "config.json").write_text(json.dumps(config))
        seal(bundle / "model")
        seal(bundle)
        with pytest.raises(ArtifactError, match="model"):
            Bundle.load(bundle)
