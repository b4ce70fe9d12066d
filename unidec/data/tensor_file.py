"""safetensors files, written with a hash and read in part."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from unidec.data.storage import file_sha256
from unidec.errors import ArtifactError


def num_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of the values of some tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def write_tensors(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> str:
    """Write a safetensors file; contiguous tensors on the CPU are not copied.

    Unlike `safetensors.torch.save_file` it takes views and tensors that share memory: each is written out.

    Args:
        tensors: by name, of any shape and on any device.
        metadata: texts for the file's header.

    Returns:
        sha256 (hex) of the file.

    Raises:
        OSError: no space, no permission.
        TypeError: a tensor of a type that safetensors does not have.
    """
    from safetensors import SafetensorError, TensorSpec, serialize_file

    held, specs = [], {}
    try:
        for name, tensor in tensors.items():
            held.append(tensor.detach().cpu().contiguous())  # kept until its memory is written
            specs[name] = TensorSpec(
                dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape),
                data_ptr=held[-1].data_ptr(), data_len=tensor.numel() * tensor.element_size(),
            )  # fmt: skip
        serialize_file(specs, os.fspath(path), metadata=dict(metadata or {}) or None)
        like = Path(f"{os.fspath(path)}.mode")  # safetensors leaves its file readable by the owner alone
        like.touch()
        os.chmod(path, like.stat().st_mode)
        like.unlink()
    except SafetensorError as error:
        if number := re.search(r"os error (\d+)", str(error)):
            raise OSError(int(number[1]), os.strerror(int(number[1])), os.fspath(path)) from error
        raise TypeError(str(error)) from error
    return file_sha256(path)


class TensorFile:
    """An open safetensors file: names, shapes, metadata, and tensors or their first dimension in part."""

    def __init__(self, path: str, handle: Any):
        self._path, self._handle = path, handle
        self.names: list[str] = sorted(handle.keys())
        self.metadata: dict[str, str] = handle.metadata() or {}

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._handle.get_slice(name).get_shape())

    def read(self, name: str, begin: int | None = None, end: int | None = None) -> Tensor:
        """A tensor on the CPU; with `begin` and `end` only those rows, and only their bytes are read."""
        try:
            return self._handle.get_tensor(name) if begin is None else self._handle.get_slice(name)[begin:end]
        except Exception as error:  # the library's own class, and RuntimeError of torch
            raise _damaged(self._path, error) from error


@contextlib.contextmanager
def open_tensors(path: str | os.PathLike[str]) -> Iterator[TensorFile]:
    """Open a safetensors file for reading. Raises ArtifactError: not such a file, or damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        handle = safe_open(os.fspath(path), framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise _damaged(path, error) from error
    with handle as opened:
        yield TensorFile(os.fspath(path), opened)


def read_tensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """All tensors of a safetensors file, on the CPU; raises as `open_tensors`."""
    with open_tensors(path) as file:
        return {name: file.read(name) for name in file.names}


def _damaged(path: str | os.PathLike[str], error: Exception) -> ArtifactError:
    return ArtifactError("not a readable safetensors file", where=os.fspath(path), got=str(error)[:200])
