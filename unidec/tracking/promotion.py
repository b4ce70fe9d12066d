"""Promotion and rollback: the aliases `champion` and `previous`, moved as one step.

A promotion is first recorded as a tag on the version that becomes champion; then the alias
`champion` moves, which is the decisive write. `previous` and the versions' tags follow; if the
process is killed in between, the next call completes them. `champion` never names a version that
was not verified.

Promotions on one machine wait for each other. Between machines there is no lock: MLflow has none.
"""

from __future__ import annotations

import contextlib
import getpass
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unidec.addresses import without_credentials
from unidec.config import nearest
from unidec.data.file_lock import lock_file
from unidec.data.json_file import time_now
from unidec.errors import ConfigError, Refused
from unidec.metric_names import shown
from unidec.tracking.provenance import is_clean
from unidec.tracking.registry import bundle_hash, tracking_to, verify_version
from unidec.tracking.store import UnlessMissing, open_client, sqlite_path, tracking_uri

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

CHAMPION = "champion"
PREVIOUS = "previous"
CHALLENGER = "challenger"
PENDING_TAG = "promotion.pending"
ROLLED_BACK = ("rolled_back.at", "rolled_back.by", "rolled_back.reason")
LOCK_SECONDS = 60.0
_LISTED = 10  # versions or models in an error


@dataclass(frozen=True, kw_only=True)
class Promotion:
    """The new champion (`version`) and the `previous` one.

    Attributes:
        dirty: the version was made with uncommitted changes, or git did not answer; None after a
        rollback.
        forced: it was promoted despite `hindrances`; None after a rollback.
        changed: it was not already the champion; None after a rollback.
    """

    model: str
    version: str
    dirty: bool | None = None
    previous: str | None
    forced: bool | None = None
    changed: bool | None = None


def aliases(client: MlflowClient, model_name: str) -> dict[str, str]:
    """Alias -> version; {} if there is no such model."""
    with UnlessMissing():
        found = client.get_registered_model(model_name).aliases
        return {alias: str(version) for alias, version in found.items()}
    return {}


def all_versions(client: MlflowClient, model_name: str) -> list[ModelVersion]:
    """Every version (MLflow returns up to 10,000), newest first; [] if there is no such model."""
    newest_first = ["version_number DESC"]
    return list(client.search_model_versions(f"name = '{model_name}'", order_by=newest_first))


def version_of(client: MlflowClient, model_name: str, which: str | int) -> ModelVersion | None:
    """The version with this number or alias; None if there is none."""
    which = str(which)
    number = which if which.isdecimal() else aliases(client, model_name).get(which, "")
    with UnlessMissing():
        return client.get_model_version(model_name, number) if number else None
    return None


def known_version(client: MlflowClient, model_name: str, which: str | int) -> ModelVersion:
    """Like `version_of`, but raises an error if there is no such version.

    Raises:
        ConfigError: no such model, version or alias; lists those that exist.
    """
    if found := version_of(client, model_name, which):
        return found
    asked = str(which)
    what = "no such version" if asked.isdecimal() else "no such alias"
    known = sorted(aliases(client, model_name))
    numbers = [str(version.version) for version in all_versions(client, model_name)]
    if not numbers:
        asked = model_name
        what = "no such model, or it has no version yet"
        models = client.search_registered_models(max_results=_LISTED)
        known = [model.name for model in models if model.name != model_name]
    near = nearest(asked, known)
    known += numbers[:_LISTED]
    fix = "`unidec models list` lists them; `unidec models register` registers outputs/bundle"
    raise ConfigError(
        f"not in the registry: {what}",
        where=f"models:/{model_name}",
        got=which,
        expected=f"one of {', '.join(known)}" if known else None,
        fix=f"nearest: {near}" if near else fix,
    )


def record_verdict(
    client: MlflowClient, version: ModelVersion, verdict: Mapping[str, Any], settings: str
) -> None:
    """Write the verdict to the version's tags. `gate.passed` is written last: if it is set, all
    others are.
    """
    reasons = verdict["reasons"]
    lines = [f"{'pass' if r.passed else 'FAIL'} {r.check}: {r.words}" for r in reasons]
    own = verdict.get("metrics", {}).get("challenger", {})
    metrics = {name: round(own[name], 4) for name in shown("tag") if name in own}
    champion = verdict["champion"]
    tags = {
        "gate.failed": ", ".join(r.check for r in reasons if not r.passed),
        "gate.champion": champion["version"] if champion else "",
        "gate.reasons": "\n".join(lines),
        "gate.at": verdict["at"],
        "gate.dataset.sha256": verdict["data"]["sha256"],
        "gate.settings": settings,
        "gate.metrics": json.dumps(metrics),
        "gate.passed": "true" if verdict["passed"] else "false",
    }
    number = str(version.version)
    if "gate.passed" in version.tags:  # of an earlier verdict
        client.delete_model_version_tag(version.name, number, "gate.passed")
    _set_tags(client, version.name, number, tags)


def _set_tags(client: MlflowClient, name: str, number: str, tags: Mapping[str, str]) -> None:
    for key, value in tags.items():
        client.set_model_version_tag(name, number, key, value)


def hindrances(version: ModelVersion, champion: str | None) -> list[str]:
    """The reasons why a version must not become champion; [] if there are none."""
    tags = version.tags
    found = []
    passed = tags.get("gate.passed")
    if passed is None:
        found.append("the gate has not checked it: run `unidec models gate`")
    elif passed != "true":
        failed = tags.get("gate.failed") or "no reasons are stored"
        found.append(f"it did not pass the gate: {failed}")
    then = tags.get("gate.champion", "")
    if passed and then != (champion or ""):
        found.append(
            f"the gate compared it with {_words(then)}, but there is now {_words(champion)}: "
            "run `unidec models gate` again"
        )
    if ROLLED_BACK[0] in tags:
        found.append(rolled_back_words(tags))
    return found


def _words(champion: str | None) -> str:
    return f"version {champion}" if champion else "no champion"


def rolled_back_words(tags: Mapping[str, str]) -> str:
    """When, by whom and why a version was rolled back."""
    at, by, reason = (tags.get(key, "") for key in ROLLED_BACK)
    return f"it was rolled back at {at} by {by or 'an unknown user'}: {reason or 'no reason given'}"


def promote(
    model_name: str, which: str | int = CHALLENGER, *, force: bool = False, reason: str = ""
) -> Promotion:
    """Make a version champion and the champion previous; if it is already the champion, nothing
    changes.

    Args:
        which: version number or alias.
        force: overrule `hindrances`, but not a wrong hash; sets the tag `promoted.forced`.
        reason: stored in the tag `promoted.reason`.

    Raises:
        ConfigError: no such version. Refused: `hindrances`, or another promotion is under way.
        ArtifactError: the stored bundle is damaged, or has another hash.
    """
    with _one_at_a_time(model_name) as (client, _):
        version = known_version(client, model_name, which)
        now = aliases(client, model_name)
        number = str(version.version)
        champion = now.get(CHAMPION)
        dirty = not is_clean(version.tags)
        done = Promotion(
            model=model_name,
            version=number,
            dirty=dirty,
            previous=now.get(PREVIOUS),
            forced=False,
            changed=False,
        )
        if number == champion:
            return done
        against = hindrances(version, champion)
        if against and not force:
            fix = f"unidec models promote {number} --force --reason TEXT"
            if version.tags.get("gate.failed") == "code":
                fix = f"commit the changes and run `make train`, or: {fix}"
            raise Refused(
                f"version {number} is not promoted",
                where=model_name,
                got="; ".join(against),
                fix=fix,
            )
        tags = _record("promoted", reason)
        tags["promoted.dirty"] = str(dirty).lower()
        tags["promoted.forced"] = str(bool(against)).lower()
        _move(client, version, champion, {number: tags})
        return replace(done, previous=champion, forced=bool(against), changed=True)


def rollback(model_name: str, *, reason: str = "") -> Promotion:
    """Swap champion and previous. Gate and promotion then refuse the former champion.

    Called again after a kill, it completes the interrupted rollback.

    Raises:
        Refused: there is no previous version, or another promotion is under way.
        ArtifactError: the stored bundle of the previous version is damaged; the champion does not
        change.
    """
    with _one_at_a_time(model_name) as (client, is_completed):
        now = aliases(client, model_name)
        champion = now.get(CHAMPION)
        previous = now.get(PREVIOUS)
        if champion is None or previous is None or champion == previous:
            raise Refused(
                "there is no earlier champion to go back to",
                where=model_name,
                got=f"champion {champion}, previous {previous}",
                fix="unidec models promote VERSION --force accepts any version",
            )
        before = known_version(client, model_name, previous)
        if is_completed and ROLLED_BACK[0] in before.tags:
            return Promotion(model=model_name, version=champion, previous=previous)
        why = f"rollback from version {champion}" + (f": {reason}" if reason else "")
        tags = {
            previous: _record("promoted", why),
            champion: _record("rolled_back", reason),
        }
        _move(client, before, champion, tags)
        return Promotion(model=model_name, version=previous, previous=champion)


def recover(client: MlflowClient, model_name: str) -> bool:
    """Complete a promotion that was killed after the alias `champion` had moved; returns whether
    there was one.
    """
    champion = version_of(client, model_name, CHAMPION)
    if champion is None or PENDING_TAG not in champion.tags:
        return False
    pending = json.loads(champion.tags[PENDING_TAG])
    if pending["previous"] is not None:
        client.set_registered_model_alias(model_name, PREVIOUS, pending["previous"])
    number = str(champion.version)
    for key in champion.tags.keys() & set(ROLLED_BACK):
        client.delete_model_version_tag(model_name, number, key)
    for other, tags in pending["tags"].items():
        _set_tags(client, model_name, other, tags)
    client.delete_model_version_tag(model_name, number, PENDING_TAG)
    return True


def _move(
    client: MlflowClient,
    version: ModelVersion,
    champion: str | None,
    tags: Mapping[str, Mapping[str, str]],
) -> None:
    """Verify a version and make it champion; `tags`: version number -> tags to set."""
    name = version.name
    number = str(version.version)
    verify_version(name, number, bundle_hash(version))
    previous = champion or aliases(client, name).get(PREVIOUS)
    pending = json.dumps({"previous": previous, "tags": tags})
    client.set_model_version_tag(name, number, PENDING_TAG, pending)
    client.set_registered_model_alias(name, CHAMPION, number)
    recover(client, name)


@contextlib.contextmanager
def _one_at_a_time(model_name: str) -> Iterator[tuple[MlflowClient, bool]]:
    """Lock out other promotions in this store on this machine; yields a client, and whether
    `recover` completed an interrupted promotion.
    """
    from filelock import Timeout

    uri = tracking_uri()
    client = open_client(uri)
    database = sqlite_path(uri)
    folder = database.parent if database else Path("runs")
    try:
        with lock_file(folder / ".promotion.lock", timeout=LOCK_SECONDS), tracking_to(uri):
            yield client, recover(client, model_name)
    except Timeout as error:
        raise Refused(
            "another promotion is under way", where=error.lock_file, fix="retry later"
        ) from error


def _record(what: str, reason: str) -> dict[str, str]:
    facts = {"at": time_now(), "by": getpass.getuser(), "reason": without_credentials(reason)}
    return {f"{what}.{name}": fact for name, fact in facts.items()}
