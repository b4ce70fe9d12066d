"""Writes safetensors files with their sha256, and reads them completely or in part."""

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
    """Total size of the tensors' values in bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def write_tensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
) -> str:
    """Write a safetensors file and return its sha256 (hex); contiguous tensors on the CPU are not
    copied.

    Unlike `safetensors.torch.save_file`, this accepts views and tensors that share memory, and
    writes each in full.

    Args:
        tensors: tensors by name, of any shape and on any device.
        metadata: strings for the file's header.

    Raises:
        OSError: no space, or no permission.
        TypeError: safetensors does not support the type of a tensor.
    """
    from safetensors import SafetensorError, TensorSpec, serialize_file

    on_cpu = []
    specs = {}
    try:
        for name, tensor in tensors.items():
            # keeps a reference until the memory is written
            on_cpu.append(tensor.detach().cpu().contiguous())
            specs[name] = TensorSpec(
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=tuple(tensor.shape),
                data_ptr=on_cpu[-1].data_ptr(),
                data_len=tensor.numel() * tensor.element_size(),
            )
        serialize_file(specs, os.fspath(path), metadata=dict(metadata or {}) or None)
        # safetensors makes its files readable only by their owner
        default = Path(f"{os.fspath(path)}.mode")
        default.touch()
        os.chmod(path, default.stat().st_mode)
        default.unlink()
    except SafetensorError as error:
        if number := re.search(r"os error (\d+)", str(error)):
            raise OSError(int(number[1]), os.strerror(int(number[1])), os.fspath(path)) from error
        raise TypeError(str(error)) from error
    return file_sha256(path)


class TensorFile:
    """An open safetensors file: names, shapes, metadata, and tensors or some of their rows."""

    def __init__(self, path: str, handle: Any):
        self._path = path
        self._handle = handle
        self.names: list[str] = sorted(handle.keys())
        self.metadata: dict[str, str] = handle.metadata() or {}

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._handle.get_slice(name).get_shape())

    def read(self, name: str, begin: int | None = None, end: int | None = None) -> Tensor:
        """A tensor on the CPU, or its rows from `begin` to `end` (exclusive); no other bytes are
        read.
        """
        try:
            return (
                self._handle.get_tensor(name)
                if begin is None
                else self._handle.get_slice(name)[begin:end]
            )
        except Exception as error:  # SafetensorError, or RuntimeError of torch
            raise _damaged(self._path, error) from error


@contextlib.contextmanager
def open_tensors(path: str | os.PathLike[str]) -> Iterator[TensorFile]:
    """Open a safetensors file for reading. Raises ArtifactError: not a safetensors file, or a
    damaged one.
    """
    from safetensors import SafetensorError, safe_open

    try:
        handle = safe_open(os.fspath(path), framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise _damaged(path, error) from error
    with handle as opened:
        yield TensorFile(os.fspath(path), opened)


def read_tensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """All tensors of a safetensors file, on the CPU. Raises the same errors as `open_tensors`."""
    with open_tensors(path) as file:
        return {name: file.read(name) for name in file.names}


def _damaged(path: str | os.PathLike[str], error: Exception) -> ArtifactError:
    return ArtifactError(
        "not a readable safetensors file",
        where=path,
        got=error,
        fix="restore the file, or run the stage that writes it again",
    )
