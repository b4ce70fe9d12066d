"""Which version answers: aliases `champion` and `previous`, moved as one step, and the way back.

The step is written down first, as a tag of the registered model: its aim and what was there before. Then `previous`
moves, then `champion`: that one write decides. A promotion that a kill cut short is undone by the next call where
`champion` had not moved, and completed where it had; at no moment does `champion` name a version that was not verified.

Promotions of one machine wait for each other. Between machines they are checked, not locked (MLflow has no lock): one
that finds another's step of the last minutes is refused.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import json
import os
import secrets
import socket
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from unidec.errors import ConfigError, Refused
from unidec.problems import nearest
from unidec.tracking.registry import HASH_TAG, tracking_to, verify_version
from unidec.tracking.store import open_client, sqlite_path, tracking_uri

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

CHAMPION, PREVIOUS, CHALLENGER = "champion", "previous", "challenger"
STEP_TAG = "promotion.step"
ROLLED_BACK = ("rolled_back.at", "rolled_back.by", "rolled_back.reason")
OTHERS_STEP_SECONDS = 120.0  # so long another machine's step counts as being taken
LOCK_SECONDS = 60.0
_A_PAGE = 100
_LISTED = 10  # versions or models in an error


def aliases(client: MlflowClient, model_name: str) -> dict[str, str]:
    """Alias -> version; {} where there is no such model."""
    from mlflow.exceptions import MlflowException

    try:
        found = client.get_registered_model(model_name).aliases
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return {}
    return {alias: str(version) for alias, version in found.items()}


def all_versions(client: MlflowClient, model_name: str) -> list[ModelVersion]:
    """Every version, page by page; [] where there is no such model."""
    versions: list[ModelVersion] = []
    token = None
    while True:
        page = client.search_model_versions(f"name = '{model_name}'", max_results=_A_PAGE, page_token=token)
        versions += page
        token = page.token
        if not token:
            return versions


def version_of(client: MlflowClient, model_name: str, which: str | int) -> ModelVersion | None:
    """The version of this number or alias; None where there is none."""
    from mlflow.exceptions import MlflowException

    number = str(which) if str(which).isdecimal() else aliases(client, model_name).get(str(which))
    if number is None:
        return None
    try:
        return client.get_model_version(model_name, number)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None


def known_version(client: MlflowClient, model_name: str, which: str | int) -> ModelVersion:
    """As `version_of`; ConfigError where there is none: it lists the aliases and versions, or models, that exist."""
    found = version_of(client, model_name, which)
    return found or _unknown(client, model_name, str(which))


def _unknown(client: MlflowClient, model_name: str, which: str) -> NoReturn:
    named, numbers = aliases(client, model_name), [str(version.version) for version in all_versions(client, model_name)]
    if named or numbers:
        kind, near = ("version", None) if which.isdecimal() else ("alias", nearest(which, list(named)))
        known = [f"alias {alias} (version {number})" for alias, number in sorted(named.items())]
        newest = sorted(numbers, key=int)[-_LISTED:]
        older = f" and {len(numbers) - _LISTED} older" if len(numbers) > _LISTED else ""
        known += [f"version{'s' if len(numbers) > 1 else ''} {', '.join(newest)}{older}"]
        address = f"models:/{model_name}@{near}"
    else:
        names = [model.name for model in client.search_registered_models(max_results=100)]
        kind, near = "model", nearest(model_name, [name for name in names if name != model_name])
        known = [f"models {', '.join(names[:_LISTED])}"] if names else ["no model is registered"]
        address = f"models:/{near}{'/' if which.isdecimal() else '@'}{which}"
    raise ConfigError(
        f"not in the registry: no such {kind}", where=f"models:/{model_name}", got=which, expected="; ".join(known),
        fix=f"did you mean {address}?" if near else
        "`unidec models list` lists versions and aliases; `unidec models register` registers outputs/bundle",
    )  # fmt: skip


def tag_version(
    model_name: str, version: str | int, tags: Mapping[str, str], *, uri: str | None = None, root: Path | str = "."
) -> None:
    """Sets tags of a version."""
    client = open_client(uri or tracking_uri(root))
    for key, value in tags.items():
        client.set_model_version_tag(model_name, str(version), key, str(value))


def hindrances(version: ModelVersion, champion: str | None, allow_dirty: bool = False) -> list[str]:
    """Why a version must not become champion, in words; [] where nothing speaks against it."""
    tags, found = version.tags, []
    if version.status != "READY":
        found.append(f"it is not ready: {version.status}")
    failed = [name for name in tags.get("gate.failed", "").split(", ") if name]
    if allow_dirty:
        failed = [name for name in failed if name != "code"]
    if "gate.passed" not in tags:
        found.append("no gate has judged it: `unidec models gate` does")
    elif tags["gate.passed"] != "true" and (failed or not tags.get("gate.failed")):
        found.append(f"it did not pass the gate: {', '.join(failed) or 'no reasons are kept'}")
    if "gate.passed" in tags and tags.get("gate.champion", "") != (champion or ""):
        judged = f"version {tags['gate.champion']}" if tags.get("gate.champion") else "no champion"
        now = f"version {champion} is champion" if champion else "there is no champion"
        found.append(f"the gate compared it with {judged}, and now {now}: `unidec models gate` compares again")
    if ROLLED_BACK[0] in tags:
        found.append(rolled_back_words(tags))
    return found


def rolled_back_words(tags: Mapping[str, str]) -> str:
    """When, by whom and why a version was rolled back."""
    at, by, reason = (tags.get(key, "") for key in ROLLED_BACK)
    return f"it was rolled back at {at} by {by or 'nobody known'}: {reason or 'no reason given'}"


def promote(
    model_name: str,
    which: str | int = CHALLENGER,
    *,
    allow_dirty: bool = False,
    force: bool = False,
    reason: str = "",
    uri: str | None = None,
    root: Path | str = ".",
) -> dict[str, Any]:
    """Makes a version champion and the champion previous; a version that is champion already stays it.

    Args:
        which: version number or alias.
        allow_dirty: accept a refusal of the gate that names uncommitted changes only; sets the tag `promoted.dirty`.
        force: accept any refusal, a version that was not judged or was rolled back; sets the tag `promoted.forced`. A
            bundle with a wrong hash is never promoted.
        reason: kept in the tag `promoted.reason`.
        uri, root: registry; default: see `tracking_store.tracking_uri`.

    Returns:
        {"model", "version", "previous", "changed", "dirty", "forced"}.

    Raises:
        ConfigError: no such version. Refused: something speaks against it, or another promotion is under way.
        ArtifactError: the stored bundle is damaged or another.
    """
    with _one_at_a_time(model_name, uri, root) as client:
        version = known_version(client, model_name, which)
        now = aliases(client, model_name)
        number, champion = str(version.version), now.get(CHAMPION)
        dirty = version.tags.get("git.dirty") == "true"
        done = {"model": model_name, "version": number, "dirty": dirty, "forced": False, "changed": False}
        if number == champion:
            return {**done, "previous": now.get(PREVIOUS)}
        against = hindrances(version, champion, allow_dirty or force)
        if against and not force:
            only_code = not hindrances(version, champion, allow_dirty=True)
            fix = f"unidec models promote {number} --force --reason TEXT"
            if only_code:
                fix = f"commit the changes and run `make train`, or: unidec models promote {number} --allow-dirty"
            raise Refused(f"version {number} is not promoted", where=model_name, got="; ".join(against), fix=fix)
        verify_version(model_name, number, version.tags.get(HASH_TAG, ""))
        tags = {**_said("promoted", reason), "promoted.dirty": _word(dirty), "promoted.forced": _word(bool(against))}
        _step(client, model_name, now, number, champion, {number: tags}, {number: ROLLED_BACK})
        return {**done, "previous": champion, "forced": bool(against), "changed": True}


def rollback(model_name: str, *, reason: str = "", uri: str | None = None, root: Path | str = ".") -> dict[str, Any]:
    """Swaps champion and previous. The version that is left is refused by gate and promotion from now on.

    Returns:
        {"model", "version" (champion now), "previous" (the one that was rolled back)}.

    Raises:
        Refused: there is no previous version, or another promotion is under way.
        ArtifactError: the stored bundle of the previous version is damaged: the champion stays.
    """
    with _one_at_a_time(model_name, uri, root) as client:
        now = aliases(client, model_name)
        champion, previous = now.get(CHAMPION), now.get(PREVIOUS)
        if champion is None or previous is None or champion == previous:
            raise Refused(
                "there is no earlier champion to go back to", where=model_name,
                got=f"champion {champion or 'none'}, previous {previous or 'none'}",
                fix="`unidec models list` lists the versions; unidec models promote VERSION --force takes any of them",
            )  # fmt: skip
        version = known_version(client, model_name, previous)
        verify_version(model_name, previous, version.tags.get(HASH_TAG, ""))
        back = _said("promoted", f"rollback from version {champion}" + (f": {reason}" if reason else ""))
        tags = {previous: back, champion: _said("rolled_back", reason)}
        _step(client, model_name, now, previous, champion, tags, {previous: ROLLED_BACK})
        return {"model": model_name, "version": previous, "previous": champion}


def recover(client: MlflowClient, model_name: str) -> str:
    """Undoes or completes the step that a kill cut short; returns what was done, "" where there was none.

    Raises:
        Refused: another machine is taking a step.
    """
    if not (text := _step_tag(client, model_name)):
        return ""
    try:
        step = json.loads(text)
        aim, before = step["to"], step["from"]
        age = (datetime.now(UTC) - datetime.fromisoformat(step["at"])).total_seconds()
    except (ValueError, KeyError, TypeError):
        client.delete_registered_model_tag(model_name, STEP_TAG)
        return "a note that nobody can read is removed"
    if step.get("host") != socket.gethostname() and age < OTHERS_STEP_SECONDS:
        raise Refused(
            "another promotion is under way", where=model_name, got=f"by {step.get('by')} on {step.get('host')}",
            fix="run this again in two minutes: what it leaves half-done is mended then",
        )  # fmt: skip
    now = aliases(client, model_name)
    if now.get(CHAMPION) == aim[CHAMPION]:
        _complete(client, model_name, step)
        return f"the promotion of version {aim[CHAMPION]} is completed"
    if now.get(CHAMPION) == before[CHAMPION] and now.get(PREVIOUS) != before[PREVIOUS]:
        _set_alias(client, model_name, PREVIOUS, before[PREVIOUS])
    client.delete_registered_model_tag(model_name, STEP_TAG)
    return f"the promotion of version {aim[CHAMPION]} is undone: it had not become champion"


def _step(
    client: MlflowClient,
    model_name: str,
    now: Mapping[str, str],
    champion: str,
    previous: str | None,
    tags: Mapping[str, Mapping[str, str]],
    removed: Mapping[str, tuple[str, ...]],
) -> None:
    """Both aliases move, then the tags of the versions; written down before and crossed out at the end."""
    aim = {CHAMPION: champion, PREVIOUS: previous if previous is not None else now.get(PREVIOUS)}
    step = {
        "to": aim, "from": {name: now.get(name) for name in (CHAMPION, PREVIOUS)}, "tags": tags, "removed": removed,
        "host": socket.gethostname(), "by": _user(), "at": _now(), "token": secrets.token_hex(8),
    }  # fmt: skip
    client.set_registered_model_tag(model_name, STEP_TAG, json.dumps(step))
    if json.loads(_step_tag(client, model_name) or "{}").get("token") != step["token"]:
        raise Refused(
            "another promotion is under way", where=model_name, fix="look at `unidec models list`, then run again"
        )
    if aim[PREVIOUS] != now.get(PREVIOUS):
        _set_alias(client, model_name, PREVIOUS, aim[PREVIOUS])
    _set_alias(client, model_name, CHAMPION, champion)
    _complete(client, model_name, step)


def _complete(client: MlflowClient, model_name: str, step: Mapping[str, Any]) -> None:
    """All that comes after `champion` moved."""
    if aliases(client, model_name).get(PREVIOUS) != step["to"][PREVIOUS]:
        _set_alias(client, model_name, PREVIOUS, step["to"][PREVIOUS])
    for number, keys in step["removed"].items():
        held = client.get_model_version(model_name, number).tags
        for key in (key for key in keys if key in held):
            client.delete_model_version_tag(model_name, number, key)
    for number, values in step["tags"].items():
        for key, value in values.items():
            client.set_model_version_tag(model_name, number, key, value)
    client.delete_registered_model_tag(model_name, STEP_TAG)


def _set_alias(client: MlflowClient, model_name: str, alias: str, version: str | None) -> None:
    if version is None:
        client.delete_registered_model_alias(model_name, alias)
    else:
        client.set_registered_model_alias(model_name, alias, version)


def _step_tag(client: MlflowClient, model_name: str) -> str:
    from mlflow.exceptions import MlflowException

    try:
        return client.get_registered_model(model_name).tags.get(STEP_TAG, "")
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return ""


@contextlib.contextmanager
def _one_at_a_time(model_name: str, uri: str | None, root: Path | str) -> Iterator[MlflowClient]:
    """A client while no other process of this machine promotes this model; a step cut short is mended first."""
    from filelock import FileLock, Timeout

    uri = uri or tracking_uri(root)
    client = open_client(uri)
    database = sqlite_path(uri, root)
    folder = database.parent if database else Path(root) / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(f"{uri} {model_name}".encode()).hexdigest()[:12]
    try:  # released by the system when its holder dies: nothing to remove by hand
        with FileLock(folder / f".promotion-{name}.lock", timeout=LOCK_SECONDS), tracking_to(uri):
            recover(client, model_name)
            yield client
    except Timeout as error:
        raise Refused("another promotion is under way", where=str(error.lock_file), fix="run this again") from error


def _said(what: str, reason: str) -> dict[str, str]:
    return {f"{what}.at": _now(), f"{what}.by": _user(), f"{what}.reason": reason}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user may have no name
        return str(os.getuid()) if hasattr(os, "getuid") else "unknown"


def _word(value: bool) -> str:
    return "true" if value else "false"
