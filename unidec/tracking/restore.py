"""Finds the commit from which a version can be restored: one with its dvc.lock and, if possible,
its code.

A version's own commit is the one that was checked out while it was made. The dvc.lock that its
training wrote, and changes not committed at that time, are in a later commit or in none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from unidec.tracking.provenance import (
    COMMIT_TAG,
    LOCK_COMMIT_TAG,
    LOCK_TAG,
    RECORDS_FOLDER,
    differing,
)
from unidec.tracking.repository import GitError, ask, holders, is_inside

LOCK = "dvc.lock"
_MOST_COMPARED = 50  # commits with the same dvc.lock whose code is compared


@dataclass(frozen=True)
class RestorePoint:
    """The best commit for a version, None if there is none, and what the commit lacks, in words."""

    commit: str | None
    missing: list[str]


def own_commit(tags: Mapping[str, str]) -> str | None:
    """The flow's commit of a version's dvc.lock; else the commit that was checked out."""
    return tags.get(LOCK_COMMIT_TAG) or tags.get(COMMIT_TAG)


def restore_point(tags: Mapping[str, str], run_id: str | None) -> RestorePoint:
    """The oldest commit of any branch with the version's dvc.lock and code; else with its dvc.lock;
    else the version's own commit.
    """
    own = own_commit(tags)
    lock = tags.get(LOCK_TAG)
    if own is None or not lock or not is_inside("."):
        return RestorePoint(own, [])
    try:
        ask(".", "cat-file", "-e", f"{own}^{{commit}}")  # else it is of another clone
        found = holders(LOCK, lock)
    except GitError:
        return RestorePoint(own, [])
    found.sort(key=lambda commit: commit != own)  # its own commit first
    whole = (commit for commit in found[:_MOST_COMPARED] if not differing(tags, commit))
    commit = next(whole, (found or [own])[0])
    missing = []
    if not found:
        kept = f"; MLflow run {run_id} keeps it as {RECORDS_FOLDER}/{LOCK}" if run_id else ""
        missing.append(f"its {LOCK} is in no commit here{kept}")
    if files := differing(tags, commit):
        missing.append(f"other code or parameters than it was made with: {', '.join(files[:5])}")
    return RestorePoint(commit, missing)
