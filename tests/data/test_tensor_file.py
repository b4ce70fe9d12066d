"""safetensors: the library reads what is written here, and we read what the library writes."""

import hashlib
import json
import os
import stat
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from unidec.data.tensor_file import num_bytes, open_tensors, read_tensors, write_tensors
from unidec.errors import ArtifactError

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


def values(dtype, *shape):
    bits = torch.randint(
        0, 256, (*shape, torch.empty((), dtype=dtype).element_size()), dtype=torch.uint8
    )
    if dtype is torch.bool:
        return bits[..., 0] > 100
    return bits.view(dtype).reshape(shape)


def same(ours, theirs):
    """The same bits: NaNs too."""

    def raw(x):
        return x.contiguous().reshape(-1).view(torch.uint8)

    return ours.keys() == theirs.keys() and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw(a), raw(b))
        for a, b in ((ours[name], theirs[name]) for name in ours)
    )


@pytest.fixture
def every():
    """Every type, and shapes that are easily got wrong."""
    shapes = ((7, 3), (), (0,), (0, 5), (4, 0), (1,), (2, 3, 5))
    tensors = {f"{dtype} {shape}": values(dtype, *shape) for dtype in DTYPES for shape in shapes}
    whole = torch.arange(60.0).reshape(5, 12)
    views = {
        "transposed": whole.T,
        "column": whole[:, 3],
        "strided": whole[::2, 1::3],
        "rows": whole[1:3],
        "same": whole,
        "expanded": whole[:1].expand(9, 12),
        "again": whole,
        "needs grad": whole.clone().requires_grad_(),
        "wide": torch.arange(600.0).reshape(300, 2).T,
        "deep": torch.arange(240.0).reshape(2, 3, 40).permute(2, 0, 1),
    }
    return tensors | views


def test_the_library_reads_it(every, tmp_path):
    digest = write_tensors(tmp_path / "x", every, {"rows": "1 ü\n"})
    expected = hashlib.sha256((tmp_path / "x").read_bytes()).hexdigest()
    assert digest == expected
    assert same(load_file(tmp_path / "x"), {name: value.detach() for name, value in every.items()})
    assert same(
        read_tensors(tmp_path / "x"), {name: value.detach() for name, value in every.items()}
    )
    with open_tensors(tmp_path / "x") as file:
        assert file.metadata == {"rows": "1 ü\n"}
        assert file.names == sorted(every)


def test_it_reads_the_librarys(every, tmp_path):
    plain = {name: value.detach().clone().contiguous() for name, value in every.items()}
    save_file(plain, tmp_path / "x", {"a": "b"})
    assert same(read_tensors(tmp_path / "x"), plain)
    write_tensors(tmp_path / "y", plain, {"a": "b"})
    assert num_bytes(plain) == num_bytes(load_file(tmp_path / "y"))
    assert (tmp_path / "y").stat().st_size == (tmp_path / "x").stat().st_size


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_others_may_read_it_as_far_as_the_umask_allows(tmp_path, umask):
    before = os.umask(umask)
    try:
        write_tensors(tmp_path / "x.safetensors", {"x": torch.ones(3)})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x.safetensors").stat().st_mode) == 0o666 & ~umask


def test_no_tensors_at_all(tmp_path):
    write_tensors(tmp_path / "x", {})
    assert load_file(tmp_path / "x") == {}
    assert read_tensors(tmp_path / "x") == {}


def test_every_tensor_is_aligned(tmp_path):
    write_tensors(
        tmp_path / "x",
        {
            "a": values(torch.uint8, 3),
            "b": values(torch.float64, 2),
            "c": values(torch.bfloat16, 1),
        },
    )
    data = (tmp_path / "x").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    expected = {
        "b": 0,
        "c": 16,
        "a": 18,
    }
    assert {name: entry["data_offsets"][0] for name, entry in header.items()} == expected


def test_rows_in_part(tmp_path):
    table = {"t": values(torch.bfloat16, 40, 3), "none": values(torch.float32, 0, 3)}
    write_tensors(tmp_path / "x", table)
    with open_tensors(tmp_path / "x") as file:
        assert file.shape("t") == (40, 3)
        assert file.shape("none") == (0, 3)
        for begin, end in (
            (0, 40),
            (3, 17),
            (39, 40),
            (0, 0),
            (40, 40),
            (12, 12),
        ):
            assert same({"t": file.read("t", begin, end)}, {"t": table["t"][begin:end]})
        assert file.read("none", 0, 0).shape == (0, 3)


def test_what_safetensors_has_no_place_for(tmp_path):
    with pytest.raises(TypeError, match="complex128"):
        write_tensors(tmp_path / "x", {"odd": torch.zeros(2, dtype=torch.complex128)})
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("content", [b"", b"\0" * 8, b"\xff" * 100, b"{}"])
def test_what_is_no_such_file(tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(ArtifactError, match="x: not a readable safetensors file"):
        read_tensors(tmp_path / "x")
    with pytest.raises(ArtifactError):
        read_tensors(tmp_path / "absent")


def test_a_file_cut_off(tmp_path):
    write_tensors(tmp_path / "x", {"a": torch.ones(100)})
    (tmp_path / "x").write_bytes((tmp_path / "x").read_bytes()[:-1])
    with pytest.raises(ArtifactError, match="not a readable"):
        read_tensors(tmp_path / "x")


PEAK = """
import resource, sys, torch
from unidec.data.tensor_file import write_tensors
table = torch.ones(50_000, 512)  # 100 MB
write_tensors(sys.argv[1] + "/warm", {"t": table[:9]})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
write_tensors(sys.argv[1] + "/x", {"t": table, "rows": table[9:], "again": table})
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_no_second_copy_in_memory(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PEAK, tmp_path],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    # KiB; the file has 300 MB, torch itself takes some on first use
    assert int(done.stdout) < 80 << 10
    assert (tmp_path / "x").stat().st_size > 250e6
