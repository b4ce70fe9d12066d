"""Where new raw data comes from: a folder or tables (stage `fetch`), or what DVC imports or pulls.

Secrets are Prefect blocks named in `source.secrets`; their values reach DVC's processes as environment variables and
nothing else: they are no parameters, and `reproduce.run` masks them in the output of DVC.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from prefect.blocks.system import Secret

from flows import reproduce
from unidec import pipeline
from unidec.config import Params
from unidec.errors import ConfigError, DataError
from unidec.sections import Source


def fetch(params: Params, say: Callable[[str], None] = print) -> dict[str, Any]:
    """The newest raw data into `data.path`.

    Returns:
        {"changed", "source", "sha256", "reason"}, as `pipeline.fetch`.

    Raises:
        UnidecError: the source is missing, damaged or not described rightly; nothing is trained then.
        CommandError: DVC failed in a way that may pass.
    """
    if params.source.kind != "dvc":
        return pipeline.fetch(params)
    target = dvc_file(params.source)
    before = _described(target)
    imported = any("repo" in dep or "path" in dep for dep in before.get("deps", []))
    words = ["update", str(target)] if imported else ["pull", "--force", str(target)]
    if imported and params.source.revision:
        words += ["--rev", params.source.revision]
    secrets = secret_values(params.source.secrets)
    code, output = reproduce.run(words, say, secrets)
    if code:
        raise _error(target, output, code)
    after = _described(target)
    check(target, after)
    hashes = [[out.get(kind) for kind in ("md5", "etag", "checksum")] for out in after["outs"]]
    sha256 = hashlib.sha256(json.dumps(hashes).encode()).hexdigest()
    changed = after.get("outs") != before.get("outs")
    reason = f"{target} {'is new' if changed else 'is as it was'}: dvc {words[0]}"
    return {"changed": changed, "source": str(target), "sha256": sha256, "reason": reason}


def dvc_file(source: Source) -> Path:
    """The .dvc file of `source.path`.

    Raises:
        ConfigError: there is none.
    """
    path = Path(source.path)
    path = path if path.suffix == ".dvc" else path.with_name(f"{path.name}.dvc")
    if not path.is_file():
        raise ConfigError(
            "no such file of DVC", where="source.path", got=str(path), expected="data that DVC tracks",
            fix="dvc import (from a repository), dvc import-url, or dvc add, and commit the .dvc file",
        )  # fmt: skip
    return path


def check(target: Path, described: Mapping[str, Any]) -> None:
    """Reads what DVC brought and compares it with the hashes in its .dvc file: DVC trusts its remote, we do not.

    Raises:
        DataError: a file is missing, or another than the one that was pushed; it is named.
    """
    for out in described.get("outs", []):
        if out.get("hash") != "md5" or "md5" not in out:
            continue  # DVC 2's hash, which ignores line ends, or a store's own: DVC's checks have to do
        path = target.parent / out["path"]
        for file, md5 in _files(path, out["md5"]):
            got = _md5(file) if file.is_file() else "no such file"
            if got != md5:
                _forget(file, md5)
                raise DataError(
                    "not the data that DVC recorded: its remote is damaged", where=str(file), got=got,
                    expected=f"md5 {md5}",
                    fix="dvc push it again from where it is whole, and run again; nothing was trained",
                )  # fmt: skip


def secret_values(names: Mapping[str, str]) -> dict[str, str]:
    """Environment variable -> value, from Prefect's Secret blocks.

    Raises:
        ConfigError: a block is missing or of another kind; no value is ever part of a message.
    """
    values = {}
    for variable, block in names.items():
        try:
            secret = Secret.load(block.removeprefix("secret/"))
            values[variable] = str(secret.get())  # type: ignore[union-attr]
        except Exception as error:  # Prefect's client has no common error
            raise ConfigError(
                "no such secret", where=f"source.secrets.{variable}", got=f"{block} ({type(error).__name__})",
                expected="the name of a Prefect block of type Secret",
                fix="make it on Prefect's page (Blocks), or by prefect.blocks.system.Secret(value=...).save(name)",
            ) from None  # fmt: skip
    return values


def _error(target: Path, output: str, code: int) -> Exception:
    """What DVC's failure means: data that is not there names its path; anything else may pass."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    output = " ".join(lines[-12:])[-2000:]
    lost = ("does not exist", "missing", "not found", "No such file", "failed to pull", "Unable to find", "corrupted")
    if any(word in output for word in lost):
        return DataError(
            "DVC cannot bring this data", where=str(target), got=output,
            fix="dvc push it from where it is whole, or mend the remote (dvc remote list); nothing was trained",
        )  # fmt: skip
    return reproduce.CommandError(f"dvc ended with {code} for {target}: {output}")


def _described(target: Path) -> dict[str, Any]:
    found = yaml.safe_load(target.read_text(encoding="utf-8"))
    return found if isinstance(found, dict) else {}


def _files(path: Path, md5: str) -> Iterator[tuple[Path, str]]:
    """Each file that DVC recorded, with its hash; of a folder, from its listing in DVC's cache."""
    if not md5.endswith(".dir"):
        yield path, md5
        return
    listing = _cache() / md5[:2] / md5[2:]
    if not listing.is_file() or _md5(listing) != md5.removesuffix(".dir"):
        listing.unlink(missing_ok=True)
        raise DataError(
            "DVC's listing of this folder is missing or damaged", where=str(path), got=str(listing),
            expected=f"md5 {md5}", fix="dvc push it again from where it is whole; nothing was trained",
        )  # fmt: skip
    for entry in json.loads(listing.read_text(encoding="utf-8")):
        yield path / entry["relpath"], entry["md5"]


def _forget(file: Path, md5: str) -> None:
    """Removes a damaged copy here and in DVC's cache, so that the next run fetches it again."""
    file.unlink(missing_ok=True)
    cached = _cache() / md5[:2] / md5[2:]
    if cached.is_file() and _md5(cached) != md5:
        cached.unlink()


def _cache() -> Path:
    """DVC's cache of objects by md5."""
    code, output = reproduce.run(["cache", "dir"])
    if code:
        raise reproduce.CommandError(f"dvc cache dir ended with {code}: {output[-500:]}")
    return Path(output.strip().splitlines()[-1]) / "files" / "md5"


def _md5(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
