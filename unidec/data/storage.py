"""Folders and files on disk that are either complete or absent.

Each output of the pipeline is a folder with a `manifest.json` (kind, version, meta, size and sha256
of every file). It is written under a temporary name, flushed and renamed, and checked before any
file in it is parsed. A rebuilt folder is byte-identical. A manifest ends with the sha256 of its
preceding bytes; older manifests without it can be read, too."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import psutil
from pydantic import BaseModel, ConfigDict, StrictInt
from pydantic_core import to_jsonable_python

from unidec.errors import ArtifactError
from unidec.version import __version__

MANIFEST = "manifest.json"
# enough for about 7,000 files; parsing JSON needs ten times its size in memory
MAX_MANIFEST_BYTES = 1 << 20
_DISK_ERRORS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.EIO,
}
# the end of a manifest: the sha256 of the bytes before it
_SEAL = re.compile(rb',\n "sha256": "([^"]{64})"\n}\n\Z')
_HASHED_AT_ONCE = 4  # files
_STALE_S = 24 * 3600.0
_SETTLED_S = 1.0  # a file that changed more recently may change again without a new time stamp
# folders that this process has verified, with the state of their files
_verified: set[tuple[Any, ...]] = set()
_written_names: set[str] = set()  # temporary names used by this process
_WRITERS = {  # commands, by the kind of what they write
    "dataset": "unidec data ingest",
    "tokens": "unidec data tokens",
    "propensity": "unidec data propensity",
    "label_graph": "unidec data label-graph",
    "model": "unidec train",
    "bundle": "unidec index build",
}
REBUILD = "delete the folder and run the stage that writes it again"


class _File(BaseModel):
    size: StrictInt
    sha256: str


class _Manifest(BaseModel):
    # keys of a newer version, or a sha256 that is not at the end
    model_config = ConfigDict(extra="allow")
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
    """A folder that is being written; it appears under its final name when the context ends.

    Attributes:
        path: the temporary folder, in which the files are written.
        meta: facts for the manifest.
        hashes: sha256 of files that were hashed while they were written, so that they need not be
        read again.
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
        meta: JSON-serialisable facts for the manifest, the same in every run (no times, no absolute
        paths).
        num_bytes: size of the files, if known; it is compared with the free space before anything
        is written.
        beside: name of the temporary folder, if several processes write into it.

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
    """Like `write_folder` without a manifest, for folders that other programs read; yields the
    temporary folder.
    """
    final = Path(os.path.abspath(path))
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        remove_stale(final.parent, glob.escape(final.name))
        if num_bytes > shutil.disk_usage(final.parent).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        temporary = _temporary(final) if beside is None else final.parent / beside
        _remove(temporary)
        temporary.mkdir()
    except OSError as error:
        raise _storage_error(final, error, num_bytes) from error
    try:
        yield temporary
        for name in (*_files(temporary), *(folder for folder, _, _ in os.walk(temporary))):
            _fsync(temporary / name)
        _replace(temporary, final)
        _fsync(final.parent)
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        size = sum(path.stat().st_size for path in temporary.rglob("*") if path.is_file())
        raise _storage_error(final, error, max(num_bytes, size)) from error
    finally:
        _remove(temporary)


@contextlib.contextmanager
def lock_file(path: Path, timeout: float = -1) -> Iterator[None]:
    """Hold a lock file, in a folder that is created. The system releases it if its process dies, so
    it never becomes stale.

    Args:
        timeout: seconds to wait for another process; below 0: without limit.

    Raises:
        ArtifactError: the file cannot be written, or its file system has no locks.
        filelock.Timeout: another process holds it.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(path, timeout=timeout)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise
    except OSError as error:
        raise _storage_error(path, error, 0) from error
    except NotImplementedError as error:  # of filelock
        fix = "use a folder on another file system"
        raise ArtifactError(
            "the file system has no locks", where=path, got=error, fix=fix
        ) from error
    try:
        yield
    finally:
        lock.release()


def write_manifest(
    path: str | os.PathLike[str],
    kind: str,
    version: int,
    meta: Mapping[str, Any],
    hashes: Mapping[str, str] | None = None,
) -> None:
    """Write `manifest.json` with all files in the folder, flushed to disk; `hashes` are known
    sha256 by name.
    """
    root = Path(path)
    files = {}
    for name in _files(root):
        if name != MANIFEST:
            digest = (hashes or {}).get(name) or file_sha256(root / name)
            files[name] = {"size": (root / name).stat().st_size, "sha256": digest}
    manifest = {
        "kind": kind,
        "version": version,
        "unidec": __version__,
        "meta": dict(meta),
        "files": files,
    }
    body = _json(manifest).removesuffix(b"\n}\n")
    write_bytes_atomic(
        root / MANIFEST, _json(manifest | {"sha256": hashlib.sha256(body).hexdigest()})
    )


def read_manifest(
    path: str | os.PathLike[str], kind: str, max_version: int | None = None, verify: bool = True
) -> dict[str, Any]:
    """Check a folder against its manifest and return the manifest; no other file is parsed.

    File names, file types and sizes are always checked, the sha256 of every file only with
    `verify`.

    Args:
        max_version: the newest version of the layout that the caller can read; None: any.

    Raises:
        ArtifactError: the folder or a file is missing or damaged, the folder is of another kind, or
            it has a link or a file that the manifest does not list.
        NewerFormatError: the version is newer than `max_version`.
    """
    root = Path(path)
    where = str(root / MANIFEST)
    if not root.is_dir():
        fix = f"check the path, or write it: {_WRITERS.get(kind, 'make train')}"
        raise ArtifactError(f"no {kind} here", where=root, fix=fix)
    manifest = _parse_manifest(root)
    if manifest["kind"] != kind:
        raise ArtifactError(
            "folder of another kind", where=where, got=str(manifest["kind"])[:80], expected=kind
        )
    version = manifest["version"]
    highest = max_version or manifest["version"]
    if not 1 <= version <= highest:
        raise (NewerFormatError if version > highest else ArtifactError)(
            f"version {version} of {kind} cannot be read by unidec {__version__}",
            where=where,
            got=f"version {version}, written by unidec {manifest['unidec']}",
            expected=f"a version from 1 to {highest}",
            fix=f"install unidec {manifest['unidec']} or newer, or {REBUILD}",
        )
    found = set(_files(root)) - {MANIFEST}
    for name, entry in manifest["files"].items():
        if name not in found:
            raise _damaged("a file is missing", root / name)
        size = (root / name).stat().st_size
        if size != entry["size"]:
            raise _damaged(
                "a file is damaged", root / name, f"{size} bytes", f"{entry['size']} bytes"
            )
    if extra := sorted(found - set(manifest["files"])):
        raise ArtifactError(
            "a file that the manifest does not list", where=root / extra[0], fix="remove it"
        )
    if manifest.keys() - _Manifest.model_fields.keys():
        raise _damaged("a damaged manifest", root / MANIFEST, "changed after it was written")
    if verify:
        with ThreadPoolExecutor(_HASHED_AT_ONCE) as pool:
            digests = pool.map(file_sha256, [root / name for name in manifest["files"]])
            for (name, entry), digest in zip(manifest["files"].items(), digests, strict=True):
                if digest != entry["sha256"]:
                    raise _damaged(
                        "a file is damaged", root / name, f"sha256 {digest}", entry["sha256"]
                    )
    return manifest


@contextlib.contextmanager
def verify_once(path: str | os.PathLike[str], verify: bool = True) -> Iterator[bool]:
    """Yields whether hashes and contents must be checked: `with verify_once(folder) as needed:
    open(folder, needed)`.

    They need no check if `verify` is False, or if this process has already checked the same files
    (by inode, size and times of change). So a folder that is opened in every round of a training is
    verified once."""
    root = Path(os.path.abspath(path))
    now = time.time()
    files = [(name, (root / name).stat()) for name in _files(root)] if verify else []
    seen = (root, *((name, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in files))
    needed = verify and seen not in _verified
    yield needed
    if needed and all(s.st_ctime < now - _SETTLED_S for _, s in files):
        _verified.add(seen)


def write_json(path: str | os.PathLike[str], obj: Any, mode: int = 0o666) -> None:
    """Write a JSON file atomically (UTF-8, keys in the given order); NaN and infinite numbers
    become null.

    Args:
        mode: permissions of the file, as in `write_file`.
    """
    write_bytes_atomic(path, _json(obj), mode)


def _json(obj: Any) -> bytes:
    # numpy
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
    """Write a file under a temporary name, which is flushed and renamed at the end; after an error
    an existing file is unchanged.

    Args:
        mode: permissions of the new file, before the process's umask is applied.
        num_bytes: size of the file, if known, for the error message if there is no space.

    Raises:
        ArtifactError: the file cannot be written.
    """
    final = Path(os.path.abspath(path))
    temporary = _temporary(final)
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
        raise _storage_error(final, error, num_bytes) from error
    finally:
        temporary.unlink(missing_ok=True)


def read_json_lines(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read a file with one JSON object per line; [] if there is no such file.

    A damaged last line is skipped: its writer was killed.

    Raises:
        ArtifactError: another line is damaged.
    """
    lines = Path(path).read_bytes().splitlines() if Path(path).is_file() else []
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(json.loads(line.decode("utf-8")))
        except ValueError as error:
            if number < len(lines):
                where = f"{path}:{number}"
                fix = "remove this line: it is a record of a past event, not an input"
                raise ArtifactError(
                    "a damaged line", where=where, got=repr(line[:200]), fix=fix
                ) from error
    return records


def load_array(
    path: str | os.PathLike[str], dtype: Any = None, ndim: int = 1, mmap: bool = True
) -> np.ndarray:
    """Load a `.npy` file without pickle, by default memory-mapped.

    Raises:
        ArtifactError: not a readable array, or of another dtype or number of dimensions.
    """
    try:
        array = np.load(path, mmap_mode="r" if mmap else None, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise _damaged("not a readable array", Path(path), str(error)[:200]) from error
    wanted = array.dtype if dtype is None else np.dtype(dtype)
    if not isinstance(array, np.ndarray) or array.dtype != wanted or array.ndim != ndim:
        got = f"{getattr(array, 'dtype', type(array))} {getattr(array, 'shape', '')}"
        raise _damaged(
            "array of another type", Path(path), got, f"{wanted} with {ndim} dimension(s)"
        )
    return array


def file_sha256(path: str | os.PathLike[str]) -> str:
    """sha256 of a file, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_sha256(hashes: Mapping[str, str]) -> str:
    """One sha256 for a set of files given as {relative path: sha256}, independent of
    their order.
    """
    digest = hashlib.sha256()
    for name in sorted(hashes):
        digest.update(f"{name}\0{hashes[name]}\n".encode())
    return digest.hexdigest()


def manifest_sha256(manifest: Mapping[str, Any]) -> str:
    """One sha256 for the files that a manifest lists."""
    return files_sha256({name: entry["sha256"] for name, entry in manifest["files"].items()})


def folder_sha256(path: str | os.PathLike[str]) -> str:
    """One sha256 for a folder: over the file hashes in its manifest, or else over all files that
    are not hidden.
    """
    root = Path(path)
    if not root.is_dir():
        raise ArtifactError("no such folder", where=root, fix="check the path")
    with contextlib.suppress(ArtifactError):
        return manifest_sha256(_parse_manifest(root))
    return files_sha256(
        {name: file_sha256(root / name) for name in _files(root) if "/." not in f"/{name}"}
    )


def _parse_manifest(root: Path) -> dict[str, Any]:
    where = root / MANIFEST
    if where.is_symlink() or not where.is_file():
        raise _damaged("no manifest: the folder was not written by unidec, or is incomplete", where)
    if where.stat().st_size > MAX_MANIFEST_BYTES:
        got = f"{where.stat().st_size:,} bytes"
        expected = f"at most {MAX_MANIFEST_BYTES:,} bytes"
        raise _damaged("a manifest of impossible size", where, got, expected)
    data = where.read_bytes()
    seal = _SEAL.search(data)
    try:
        if seal and hashlib.sha256(data[: seal.start()]).hexdigest().encode() != seal[1]:
            raise ValueError("its sha256 does not match its content")
        return _Manifest.model_validate_json(
            data[: seal.start()] + b"}" if seal else data
        ).model_dump()
    except ValueError as error:
        raise _damaged("a damaged manifest", where, repr(error)[:200]) from error


def _files(root: Path) -> list[str]:
    """Sorted relative paths of all regular files. Raises ArtifactError for a link or a special
    file.
    """
    names = []
    for path in root.rglob("*"):
        mode = path.lstat().st_mode
        if stat.S_ISREG(mode):
            names.append(path.relative_to(root).as_posix())
        elif not stat.S_ISDIR(mode):
            fix = "keep plain files only (DVC: cache.type copy)"
            raise ArtifactError("a link or special file", where=path, fix=fix)
    return sorted(names)


def _replace(temporary: Path, final: Path) -> None:
    """Move `temporary` to `final`; an existing folder at `final` is moved to `temporary`."""
    if not os.path.lexists(final):
        os.rename(temporary, final)
    elif not _exchange(temporary, final):
        old = _temporary(final)
        os.rename(final, old)
        os.rename(temporary, final)
        os.rename(old, temporary)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two folders atomically (Linux renameat2), so that both names always exist; False if that
    is not possible.
    """
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError, TypeError):
        return False
    at_cwd = -100
    exchange = 2
    return renameat2(at_cwd, os.fsencode(first), at_cwd, os.fsencode(second), exchange) == 0


def _remove(path: Path) -> None:
    """Remove a folder (as much of it as possible), a file or a link, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def remove_folder(path: str | os.PathLike[str]) -> None:
    """Remove a folder; it is renamed first, so that it never exists in part. Raises OSError: no
    permission.
    """
    temporary = _temporary(Path(os.path.abspath(path)))
    os.rename(path, temporary)
    _remove(temporary)


def _temporary(final: Path) -> Path:
    """Temporary path for writing a folder or file, with host name, process id and a
    random number.
    """
    path = (
        final.parent
        / f".{final.name}.{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
    )
    _written_names.add(path.name)
    return path


def remove_stale(folder: str | os.PathLike[str], name: str = "*") -> None:
    """Remove incomplete temporary files and folders of killed processes from a folder.

    Args:
        name: glob pattern of the final names.
    """
    for temporary in Path(folder).glob(f".{name}.*.tmp"):
        with contextlib.suppress(OSError):  # another process may remove it at the same time
            if is_stale(temporary):
                _remove(temporary)


def is_stale(temporary: Path) -> bool:
    """Whether the process that writes a temporary folder or file has ended; on another machine:
    whether it has not changed for a day.
    """
    suffix = re.search(r"\.(\d+)\.[0-9a-f]{8}\.tmp$", temporary.name)
    if suffix is None:
        return False
    if not temporary.name[: suffix.start()].endswith(f".{socket.gethostname()}"):
        return time.time() - temporary.lstat().st_mtime > _STALE_S
    # in a container a killed process often had the same id as the running one
    if int(suffix[1]) == os.getpid():
        return temporary.name not in _written_names
    return not psutil.pid_exists(int(suffix[1]))


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _storage_error(path: Path, error: OSError, num_bytes: int) -> ArtifactError:
    got = str(error.strerror or error)
    with contextlib.suppress(OSError):
        got += (
            f", {shutil.disk_usage(path.parent if path.parent.is_dir() else '/').free:,} bytes free"
        )
    what = "cannot be written"
    fix = "check the folder's permissions"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        what = "no space left on the disk"
        fix = "free some space, or choose another folder"
    expected = f"at least {num_bytes:,} bytes" if num_bytes else None
    return ArtifactError(what, where=path, got=got, expected=expected, fix=fix)
