"""Stage `fetch`: the newest raw data, from a folder or three table files, becomes `data.path` in one step."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unidec.config import Params
from unidec.data.storage import file_sha256, files_sha256, swap_folder
from unidec.errors import ConfigError, DataError
from unidec.sections import Source
from unidec.tracking.provenance import git

_TABLES = ("csv", "tsv", "parquet", "jsonl")


def fetch(params: Params) -> dict[str, Any]:
    """Copy `source.path`, or the three files, to `data.path` if their content differs from what is there.

    The new folder is written beside, checked against the source's hashes and swapped in: whoever reads `data.path` sees
    the old content or the new, also when this is killed. Kind `dvc` is the flow's (flows/source.py): nothing is done.

    Returns:
        {"changed", "source" (in words), "sha256" (of all files), "reason"}.

    Raises:
        DataError: the source is missing, empty, unreadable, or changed while it was copied.
        ConfigError: `data.path` is in git: a fetch would edit the repository.
    """
    source, target = params.source, Path(params.data.path)
    if source.kind in ("none", "dvc"):
        return {"changed": False, "source": source.kind, "sha256": "", "reason": "nothing is fetched by this stage"}
    files = _of_folder(Path(source.path)) if source.kind == "folder" else _of_tables(source)
    words = source.path if source.kind == "folder" else ", ".join(str(path) for path in files.values())
    hashes = _hashes(files)
    sha256 = files_sha256(hashes)
    if target.is_dir() and files_sha256(_hashes(_listed(target))) == sha256:
        reason = f"{target} has these {len(files)} files already"
        return {"changed": False, "source": words, "sha256": sha256, "reason": reason}
    _refuse_tracked(target)
    with swap_folder(target, num_bytes=sum(path.stat().st_size for path in files.values())) as folder:
        for name, path in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / name)
        copied = _hashes({name: folder / name for name in files})
        differing = next((name for name in files if copied[name] != hashes[name]), None)
        if differing is not None:
            raise DataError(
                "the source changed while it was copied", where=str(files[differing]), got=copied[differing],
                expected=hashes[differing], fix=f"run again when the export is complete; {target} is as it was",
            )  # fmt: skip
    return {"changed": True, "source": words, "sha256": sha256, "reason": f"{len(files)} files are new in {target}"}


def _of_folder(root: Path) -> dict[str, Path]:
    """Name -> file; hidden files are no data."""
    if not root.is_dir():
        raise DataError("no such folder", where=str(root), fix="mount it, or correct source.path; nothing was trained")
    files = _listed(root)
    if not files:
        raise DataError("an empty folder", where=str(root), fix="wait for the export, or correct source.path")
    return files


def _listed(root: Path) -> dict[str, Path]:
    files = {path.relative_to(root): path for path in sorted(root.rglob("*")) if path.is_file()}
    return {
        name.as_posix(): path for name, path in files.items() if not any(part.startswith(".") for part in name.parts)
    }


def _of_tables(source: Source) -> dict[str, Path]:
    """The names that format `tables` knows -> the files."""
    files = {}
    for stem in ("queries", "labels", "pairs"):
        path = Path(getattr(source, stem))
        endings = [ending for kind in _TABLES for ending in (f".{kind}", f".{kind}.gz")]
        ending = next((ending for ending in endings if path.name.lower().endswith(ending)), None)
        if ending is None:
            raise ConfigError(
                "not a table that can be read", where=f"source.{stem}", got=str(path), expected=" ".join(endings)
            )
        if not path.is_file():
            raise DataError("no such file", where=str(path), fix=f"export it, or correct source.{stem}")
        files[f"{stem}{ending}"] = path
    return files


def _hashes(files: Mapping[str, Path]) -> dict[str, str]:
    hashes = {}
    for name, path in files.items():
        try:
            hashes[name] = file_sha256(path)
        except OSError as error:
            raise DataError("cannot be read", where=str(path), got=str(error), fix="nothing was trained") from error
    return hashes


def _refuse_tracked(target: Path) -> None:
    if git(".", "ls-files", "--", str(target)):
        raise ConfigError(
            "git tracks this folder, and a fetch would replace it", where="data.path", got=str(target),
            expected="a folder that git ignores", fix="data.path: data/incoming (all of data/ but data/raw is ignored)",
        )  # fmt: skip
