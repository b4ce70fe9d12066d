"""Folders and files on disk that are either complete or absent.

Each output of the pipeline is a folder with a `manifest.json` (kind, version, meta, size and sha256
of every file, and the sha256 of the manifest itself). It is written under a temporary name, flushed
and renamed, and checked before any file in it is parsed. A rebuilt folder is byte-identical."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from pydantic import BaseModel, StrictInt
from pydantic_core import to_jsonable_python

from unidec.data.temporary import remove, remove_stale, temporary_path
from unidec.errors import ArtifactError
from unidec.machine import available_disk
from unidec.version import __version__

MANIFEST = "manifest.json"
# enough for about 7,000 files; parsing JSON needs ten times its size in memory
MAX_MANIFEST_BYTES = 1 << 20
REBUILD = "delete the folder and run the stage that writes it again"
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_DISK_ERRORS = (*_NO_SPACE, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
# the end of a manifest: the sha256 of all bytes before it
_SEAL = re.compile(rb',\n "sha256": "([^"]{64})"\n}\n\Z')
_HASHED_AT_ONCE = 4  # files
_SETTLED_S = 1.0  # a file that changed more recently may change again without a new time stamp
# folders that this process has verified, with the state of their files
_verified: set[tuple[Any, ...]] = set()
_WRITERS = {  # kind of a folder -> the command that writes it
    "dataset": "unidec data ingest",
    "tokens": "unidec data tokens",
    "propensity": "unidec data propensity",
    "label_graph": "unidec data label-graph",
    "model": "unidec train",
    "bundle": "unidec index build",
}


class _File(BaseModel):
    size: StrictInt
    sha256: str


class _Manifest(BaseModel):
    kind: str
    version: StrictInt
    unidec: str
    meta: dict[str, Any]
    files: dict[str, _File]


class NewerFormatError(ArtifactError):
    """A folder is undamaged, but its format is newer than this version of unidec can read."""


def _damaged(what: str, where: Path, got: object = None, expected: object = None) -> ArtifactError:
    return ArtifactError(what, where=where, got=got, expected=expected, fix=REBUILD)


@dataclass
class Folder:
    """A folder that is being written; it gets its final name when the context ends.

    Attributes:
        path: the temporary folder, in which the files are written.
        meta: facts for the manifest.
        hashes: sha256 of files that were hashed while they were written.
    """

    path: Path
    meta: dict[str, Any] = field(default_factory=dict)
    hashes: dict[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def write_folder(
    path: str | os.PathLike[str],
    kind: str,
    version: int,
    meta: Mapping[str, Any] | None = None,
    *,
    num_bytes: int = 0,
    beside: str | None = None,
) -> Iterator[Folder]:
    """Write a folder atomically: `with write_folder(...) as out: np.save(out.path / "x.npy", x);
    out.meta["rows"] = 3`.

    Args:
        path: final path; an existing folder is replaced once everything is written.
        kind, version: type of the folder and version of its layout, which `read_manifest` checks.
        meta: JSON-serialisable facts, the same in every run (no times, no absolute paths).
        num_bytes: total size of the files, if known; compared with the free space first.
        beside: name of the temporary folder, if several processes write to it.

    Raises:
        ArtifactError: no space or no permission; an existing folder is then unchanged.
    """
    with swap_folder(path, num_bytes=num_bytes, beside=beside) as temporary:
        yield (out := Folder(temporary, dict(meta or {})))
        write_manifest(temporary, kind, version, out.meta, out.hashes)


@contextlib.contextmanager
def swap_folder(
    path: str | os.PathLike[str], *, num_bytes: int = 0, beside: str | None = None
) -> Iterator[Path]:
    """`write_folder` without a manifest, for folders of other programs; yields the folder."""
    final = Path(os.path.abspath(path))
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        remove_stale(final.parent, glob.escape(final.name))
        check_space(final, num_bytes)
        temporary = temporary_path(final) if beside is None else final.with_name(beside)
        remove(temporary)
        temporary.mkdir()
    except OSError as error:
        raise storage_error(final, error, num_bytes) from error
    try:
        yield temporary
        folders = [folder for folder, _, _ in os.walk(temporary)]
        for name in (*_files(temporary), *folders):
            _fsync(temporary / name)
        _replace(temporary, final)
        _fsync(final.parent)
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        written = folder_bytes(temporary)
        raise storage_error(final, error, max(num_bytes, written)) from error
    finally:
        remove(temporary)


def write_manifest(
    path: str | os.PathLike[str],
    kind: str,
    version: int,
    meta: Mapping[str, Any],
    hashes: Mapping[str, str] | None = None,
) -> None:
    """Write `manifest.json` with all files of a folder; `hashes` are known sha256 by name."""
    root = Path(path)
    known = hashes or {}
    files = {}
    for name in _files(root):
        if name != MANIFEST:
            file = root / name
            digest = known.get(name) or file_sha256(file)
            files[name] = {"size": file.stat().st_size, "sha256": digest}
    manifest = {
        "kind": kind,
        "version": version,
        "unidec": __version__,
        "meta": meta,
        "files": files,
    }
    body = _json(manifest).removesuffix(b"\n}\n")
    manifest["sha256"] = hashlib.sha256(body).hexdigest()
    write_bytes_atomic(root / MANIFEST, _json(manifest))


def read_manifest(
    path: str | os.PathLike[str], kind: str, version: int | None = None, verify: bool = True
) -> dict[str, Any]:
    """Check a folder against its manifest and return the manifest; no other file is parsed.

    File names, file types and sizes are always checked, the sha256 of every file only with
    `verify`.

    Args:
        version: the version of the layout that the caller reads; None: any.

    Raises:
        ArtifactError: the folder or a file is missing or damaged, the folder is of another kind, or
            it has a link or a file that the manifest does not list.
        NewerFormatError: the version is newer.
    """
    root = Path(path)
    where = root / MANIFEST
    if not root.is_dir():
        fix = f"check the path, or write it: {_writer(kind)}"
        raise ArtifactError(f"no {kind} here", where=root, fix=fix)
    manifest = _parse_manifest(root)
    if manifest["kind"] != kind:
        raise ArtifactError(
            "folder of another kind", where=where, got=str(manifest["kind"])[:80], expected=kind
        )
    _check_version(where, manifest, version or manifest["version"])
    _check_files(root, manifest["files"])
    if verify:
        _check_hashes(root, manifest["files"])
    return manifest


def folder_bytes(folder: Path) -> int:
    """Bytes of all files in a folder and below it."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _writer(kind: str) -> str:
    return _WRITERS.get(kind, "make train")


def _check_version(where: Path, manifest: Mapping[str, Any], expected: int) -> None:
    version = manifest["version"]
    if version == expected:
        return
    kind = manifest["kind"]
    by = f"unidec {manifest['unidec']}"
    error = ArtifactError
    fix = f"write it again: {_writer(kind)}"
    if version > expected:
        error = NewerFormatError
        fix = f"install {by} or newer, or {fix}"
    raise error(
        f"version {version} of {kind} cannot be read by unidec {__version__}",
        where=where,
        got=f"version {version}, written by {by}",
        expected=f"version {expected}",
        fix=fix,
    )


def _check_files(root: Path, files: Mapping[str, Any]) -> None:
    """Raise an ArtifactError unless a folder has these files, with their sizes, and no others."""
    found = set(_files(root)) - {MANIFEST}
    for name, entry in files.items():
        if name not in found:
            raise _damaged("a file is missing", root / name)
        size = (root / name).stat().st_size
        expected = entry["size"]
        if size != expected:
            raise _damaged("a file is damaged", root / name, f"{size} bytes", f"{expected} bytes")
    if extra := sorted(found - files.keys()):
        raise ArtifactError(
            "a file that the manifest does not list", where=root / extra[0], fix="remove it"
        )


def _check_hashes(root: Path, files: Mapping[str, Any]) -> None:
    with ThreadPoolExecutor(_HASHED_AT_ONCE) as pool:
        digests = pool.map(file_sha256, [root / name for name in files])
        for (name, entry), digest in zip(files.items(), digests, strict=True):
            expected = entry["sha256"]
            if digest != expected:
                raise _damaged("a file is damaged", root / name, f"sha256 {digest}", expected)


@contextlib.contextmanager
def verify_once(path: str | os.PathLike[str], verify: bool = True) -> Iterator[bool]:
    """Yields whether hashes and contents must be checked: `with verify_once(folder) as needed:
    open(folder, needed)`.

    False if `verify` is False, or if this process has already checked the same files (by inode,
    size and time of change), for example in an earlier training round.
    """
    root = Path(os.path.abspath(path))
    now = time.time()
    names = _files(root) if verify else []
    files = [(root / name).stat() for name in names]
    states = [(s.st_ino, s.st_size, s.st_ctime_ns) for s in files]
    seen = (root, *names, *states)
    needed = verify and seen not in _verified
    yield needed
    if needed and all(s.st_ctime < now - _SETTLED_S for s in files):
        _verified.add(seen)


def write_json(path: str | os.PathLike[str], obj: Any, mode: int = 0o666) -> None:
    """Write a JSON file atomically (UTF-8, keys in the given order), as `write_file`; NaN and
    infinite numbers become null.
    """
    write_bytes_atomic(path, _json(obj), mode)


def _json(obj: Any) -> bytes:
    # fallback: numpy arrays and numbers
    plain = to_jsonable_python(obj, inf_nan_mode="null", fallback=lambda value: value.tolist())
    return json.dumps(plain, ensure_ascii=False, allow_nan=False, indent=1).encode() + b"\n"


def write_bytes_atomic(path: str | os.PathLike[str], data: bytes, mode: int = 0o666) -> None:
    """Write a file atomically; see `write_file`."""
    with write_file(path, mode, len(data)) as file:
        file.write(data)


@contextlib.contextmanager
def write_file(
    path: str | os.PathLike[str], mode: int = 0o666, num_bytes: int = 0
) -> Iterator[IO[bytes]]:
    """Write a file under a temporary name; it is flushed and renamed when the context ends.

    Args:
        mode: permissions of the new file, before the process's umask is applied.
        num_bytes: size of the file, if known, for the error message if there is no space.

    Raises:
        ArtifactError: the file cannot be written.
    """
    final = Path(os.path.abspath(path))
    temporary = temporary_path(final)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
            if not file.closed:  # Arrow's writers may close it
                file.flush()
        _fsync(temporary)
        os.replace(temporary, final)
        _fsync(final.parent)
    except OSError as error:
        raise storage_error(final, error, num_bytes) from error
    finally:
        temporary.unlink(missing_ok=True)


def read_json(path: str | os.PathLike[str]) -> Any:
    """The content of a JSON file; raises OSError, or ValueError if it is damaged."""
    return json.loads(Path(path).read_bytes())


def load_array(path: str | os.PathLike[str], dtype: Any = None, ndim: int = 1) -> np.ndarray:
    """Memory-map a `.npy` file, without pickle.

    Raises:
        ArtifactError: not a readable array, or of another dtype or number of dimensions.
    """
    try:
        array = np.lib.format.open_memmap(path, mode="r")
    except (ValueError, OSError, EOFError) as error:
        raise _damaged("not a readable array", Path(path), error) from error
    wanted = np.dtype(dtype or array.dtype)
    if array.dtype != wanted or array.ndim != ndim:
        raise _damaged(
            "array of another type",
            Path(path),
            f"{array.dtype} {array.shape}",
            f"{wanted} with {ndim} dimension(s)",
        )
    return array


def file_sha256(path: str | os.PathLike[str]) -> str:
    """sha256 of a file, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def text_sha256(text: str) -> str:
    """sha256 of a text, in hex."""
    return hashlib.sha256(text.encode()).hexdigest()


def files_sha256(hashes: Mapping[str, str]) -> str:
    """One sha256 for files given as {relative path: sha256}, independent of their order."""
    lines = [f"{name}\0{hashes[name]}\n" for name in sorted(hashes)]
    return text_sha256("".join(lines))


def manifest_sha256(manifest: Mapping[str, Any]) -> str:
    """One sha256 for the files that a manifest lists."""
    return files_sha256({name: entry["sha256"] for name, entry in manifest["files"].items()})


def folder_sha256(path: str | os.PathLike[str]) -> str:
    """One sha256 of a folder: of the hashes in its manifest, or else of all visible files."""
    root = Path(path)
    if not root.is_dir():
        raise ArtifactError("no such folder", where=root, fix="check the path")
    with contextlib.suppress(ArtifactError):
        return manifest_sha256(_parse_manifest(root))
    visible = [name for name in _files(root) if "/." not in f"/{name}"]
    return files_sha256({name: file_sha256(root / name) for name in visible})


def _parse_manifest(root: Path) -> dict[str, Any]:
    path = root / MANIFEST
    if path.is_symlink() or not path.is_file():
        raise _damaged("no manifest: the folder was not written by unidec, or is incomplete", path)
    size = path.stat().st_size
    if size > MAX_MANIFEST_BYTES:
        raise _damaged(
            "a manifest of impossible size",
            path,
            f"{size:,} bytes",
            f"at most {MAX_MANIFEST_BYTES:,} bytes",
        )
    data = path.read_bytes()
    seal = _SEAL.search(data)
    body = data[: seal.start()] if seal else b""
    try:
        if seal is None or hashlib.sha256(body).hexdigest().encode() != seal[1]:
            raise ValueError("its sha256 is missing, or does not match its content")
        return _Manifest.model_validate_json(body + b"}").model_dump()
    except ValueError as error:
        raise _damaged("a damaged manifest", path, repr(error)[:200]) from error


def _files(root: Path) -> list[str]:
    """Sorted relative paths of all files. Raises ArtifactError for a link or a special file."""
    names = []
    for path in root.rglob("*"):
        mode = path.lstat().st_mode
        if stat.S_ISREG(mode):
            names.append(path.relative_to(root).as_posix())
        elif not stat.S_ISDIR(mode):
            raise ArtifactError(
                "a link or special file",
                where=path,
                fix="keep plain files only (DVC: cache.type copy)",
            )
    return sorted(names)


def _replace(temporary: Path, final: Path) -> None:
    """Move `temporary` to `final`; an existing folder at `final` is moved to `temporary`."""
    if not os.path.lexists(final):
        os.rename(temporary, final)
    elif not _exchange(temporary, final):
        old = temporary_path(final)
        os.rename(final, old)
        os.rename(temporary, final)
        os.rename(old, temporary)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two folders atomically (Linux renameat2); False if that is not possible."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError, TypeError):
        return False
    at_cwd = -100
    exchange = 2
    return renameat2(at_cwd, os.fsencode(first), at_cwd, os.fsencode(second), exchange) == 0


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_space(path: Path, num_bytes: int) -> None:
    """Raise ArtifactError if a file or folder of this size does not fit on its disk."""
    if num_bytes > available_disk(path):
        raise storage_error(path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), num_bytes)


def storage_error(path: Path, error: OSError, num_bytes: int = 0) -> ArtifactError:
    """The error for a file or folder that cannot be written; `num_bytes` is its size, if known."""
    got = str(error.strerror or error)
    with contextlib.suppress(OSError):
        got += f", {available_disk(path):,} bytes free"
    what = "cannot be written"
    fix = "check the folder's permissions"
    if error.errno in _NO_SPACE:
        what = "no space left on the disk"
        fix = "free some space, or choose another folder"
    expected = f"at least {num_bytes:,} bytes" if num_bytes else None
    return ArtifactError(what, where=path, got=got, expected=expected, fix=fix)
