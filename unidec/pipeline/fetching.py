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

_ENDINGS = [f".{kind}{packed}" for kind in ("csv", "tsv", "parquet", "jsonl") for packed in ("", ".gz")]


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
    files = _listed(Path(source.path)) if source.kind == "folder" else _tables(source)
    words = source.path if source.kind == "folder" else ", ".join(str(path) for path in files.values())
    if not files:
        raise DataError("no files there", where=words, fix="mount it, wait for the export, or correct source.path")
    hashes = _hashes(files)
    done = {"changed": False, "source": words, "sha256": files_sha256(hashes)}
    if _hashes(_listed(target)) == hashes:
        return done | {"reason": f"{target} has these {len(files)} files already"}
    if git(".", "ls-files", "--", str(target)):
        raise ConfigError(
            "git tracks this folder, and a fetch would replace it", where="data.path", got=str(target),
            expected="a folder that git ignores", fix="data.path: data/incoming (all of data/ but data/raw is ignored)",
        )  # fmt: skip
    with swap_folder(target, num_bytes=sum(path.stat().st_size for path in files.values())) as folder:
        for name, path in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / name)
            if file_sha256(folder / name) != hashes[name]:
                raise DataError(
                    "the source changed while it was copied", where=str(path),
                    fix=f"run again when the export is complete; {target} is as it was",
                )  # fmt: skip
    return done | {"changed": True, "reason": f"{len(files)} files are new in {target}"}


def _listed(root: Path) -> dict[str, Path]:
    """Name -> file; hidden files are no data."""
    found = {path.relative_to(root): path for path in sorted(root.rglob("*")) if path.is_file()}
    return {name.as_posix(): path for name, path in found.items() if not any(p.startswith(".") for p in name.parts)}


def _tables(source: Source) -> dict[str, Path]:
    """The names that format `tables` knows -> the files."""
    files = {}
    for stem in ("queries", "labels", "pairs"):
        path = Path(getattr(source, stem))
        ending = next((ending for ending in _ENDINGS if path.name.lower().endswith(ending)), None)
        if ending is None:
            expected = " ".join(_ENDINGS)
            raise ConfigError("not a table that can be read", where=f"source.{stem}", got=str(path), expected=expected)
        files[f"{stem}{ending}"] = path
    return files


def _hashes(files: Mapping[str, Path]) -> dict[str, str]:
    hashes = {}
    for name, path in files.items():
        try:
            hashes[name] = file_sha256(path)
        except OSError as error:
            fix = "mount or export it, or correct section source; nothing was trained"
            raise DataError("cannot be read", where=str(path), got=str(error), fix=fix) from error
    return hashes
