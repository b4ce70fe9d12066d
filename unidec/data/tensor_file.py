"""safetensors files, written as a stream and read in part.

The writer is ours because `safetensors.torch.save_file` wants a contiguous copy on the CPU of every tensor and gives no
hash; a classifier table may fill the memory. Reading is left to the library.

Layout: 8 bytes little-endian length of the header, the header as JSON padded with spaces to a multiple of 8, then the
tensors' bytes without gaps.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from unidec.errors import ArtifactError

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
CHUNK_BYTES = 4 << 20


def num_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of the values of some tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def write_tensors(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> str:
    """Write a safetensors file; at most `CHUNK_BYTES` of it are held in memory beside the tensors.

    Args:
        path: a file that does not exist yet.
        tensors: by name, of any shape and on any device; views and tensors that share memory are written out.
        metadata: texts for the file's header.

    Returns:
        sha256 (hex) of the bytes as they were meant to be written.

    Raises:
        OSError: no space, no permission.
        TypeError: a tensor of a type that safetensors does not have.
    """
    # widest first, as the library does it: every tensor then starts at a multiple of its element's size
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    begin = 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in DTYPES or tensor.layout is not torch.strided:
            raise TypeError(f"{name}: safetensors has no {tensor.dtype} {tensor.layout}")
        end = begin + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    digest = hashlib.sha256(head)
    with open(path, "xb") as file:
        file.write(head)
        for name in order:
            for chunk in _chunks(tensors[name].detach()):
                data: Any = chunk.view(torch.uint8).numpy()
                digest.update(data)
                file.write(data)
    return digest.hexdigest()


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor's values in order, as contiguous flat pieces on the CPU of about `CHUNK_BYTES`."""
    if tensor.numel() == 0:
        return
    if tensor.is_contiguous() or tensor.dim() < 2:
        tensor = tensor.reshape(-1)
    row_bytes = tensor[0].numel() * tensor.element_size()
    if row_bytes > CHUNK_BYTES and tensor.dim() > 1:
        for row in tensor:
            yield from _chunks(row)
        return
    for rows in tensor.split(max(1, CHUNK_BYTES // row_bytes)):
        yield rows.cpu().contiguous().reshape(-1)


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
