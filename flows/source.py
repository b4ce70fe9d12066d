"""Where new raw data comes from: a folder or tables (stage `fetch`), or what DVC imports or pulls.

Secrets are Prefect blocks named in `source.secrets`; their values reach DVC's processes as environment variables and
nothing else: they are no parameters, and `reproduce.run` masks them in the output of DVC.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml
from prefect.blocks.system import Secret

from flows import lifecycle, reproduce, steps
from unidec import pipeline
from unidec.config import Params
from unidec.errors import ConfigError, DataError
from unidec.sections import Source
from unidec.tracking.provenance import md5_of

log = logging.getLogger("unidec.flows")

_LOST = ("does not exist", "missing", "not found", "No such file", "failed to pull", "Unable to find", "corrupted")


def prepare_data(params: Params, stages: tuple[str, ...]) -> list[str]:
    """Fetches the newest raw data and brings the data stages up to date.

    Returns:
        the model's stages that are out of date then.
    """
    if params.source.kind != "none":
        lifecycle.say(f"fetch: {steps.run('fetch', fetch, params, log.info, retry=True)['reason']}")
    changed, work = reproduce.stale(stages)
    if not changed:
        lifecycle.say("the data is up to date")
        return work
    with ThreadPoolExecutor(1) as imports:  # what training imports takes seconds, as DVC's processes do
        imports.submit(importlib.import_module, "unidec.pipeline.training")
        steps.run("prepare data", reproduce.reproduce, stages, log.info, retry=True)
    return reproduce.stale()[1]


def fetch(params: Params, say: Callable[[str], None]) -> dict[str, Any]:
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
    before = yaml.safe_load(target.read_text(encoding="utf-8"))
    imported = any("repo" in dep or "path" in dep for dep in before.get("deps", []))
    words = ["update", str(target)] if imported else ["pull", "--force", str(target)]
    if imported and params.source.revision:
        words += ["--rev", params.source.revision]
    code, output = reproduce.run(words, say, secret_values(params.source.secrets))
    if code:
        output = " ".join(line.strip() for line in output.splitlines()[-12:])[-2000:]
        if not any(word in output for word in _LOST):
            raise reproduce.CommandError(f"dvc ended with {code} for {target}: {output}")
        raise DataError(
            "DVC cannot bring this data", where=str(target), got=output,
            fix="run dvc push where the data is complete, or fix the remote (dvc remote list); nothing was trained",
        )  # fmt: skip
    after = yaml.safe_load(target.read_text(encoding="utf-8"))
    for out in after["outs"]:
        if out.get("hash") == "md5" and "md5" in out:  # others are a store's own hashes: DVC's checks have to do
            _check(target.parent / out["path"], out["md5"])
    hashes = [[out.get(kind) for kind in ("md5", "etag", "checksum")] for out in after["outs"]]
    sha256 = hashlib.sha256(json.dumps(hashes).encode()).hexdigest()
    changed = after["outs"] != before.get("outs")
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


def _check(path: Path, md5: str) -> None:
    """Compares what DVC brought with the hashes that it recorded: DVC trusts its remote, we do not.

    A damaged copy is removed here and in DVC's cache, so that the next run fetches it again.

    Raises:
        DataError: a file is missing, or another than the one that was pushed; it is named.
    """
    cache = Path(reproduce.dvc(["cache", "dir"]).strip().splitlines()[-1]) / "files" / "md5"
    for file, expected in _files(path, md5, cache):
        if (got := md5_of(file)) == expected:
            continue
        for copy in (file, cache / expected[:2] / expected[2:]):
            if copy.is_file() and md5_of(copy) != expected:
                copy.unlink()
        raise DataError(
            "not the data that DVC recorded: its remote is damaged", where=str(file), got=got or "no such file",
            expected=f"md5 {expected}",
            fix="dvc push it again from where it is whole, and run again; nothing was trained",
        )  # fmt: skip


def _files(path: Path, md5: str, cache: Path) -> Iterator[tuple[Path, str]]:
    """Each file that DVC recorded, with its hash; of a folder, from its listing in DVC's cache."""
    if not md5.endswith(".dir"):
        yield path, md5
        return
    listing = cache / md5[:2] / md5[2:]
    yield listing, md5.removesuffix(".dir")
    for entry in json.loads(listing.read_text(encoding="utf-8")):
        yield path / entry["relpath"], entry["md5"]
