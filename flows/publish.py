"""What a retraining announces: a commit in git, Prefect's events, notifications. None of it fails a run."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prefect.events import emit_event
from prefect.runtime import flow_run as current_flow_run

from flows.artifacts import harmless
from unidec.config import Params, load_params
from unidec.errors import UnidecError, without_credentials
from unidec.tracking.lineage import LOCK_COMMIT_TAG
from unidec.tracking.store import open_client, tracking_uri

RECORDED = ("dvc.lock", "data/start.json", "outputs/metrics.json", "outputs/plots")
_SECONDS = 60  # for a git command


class GitRefusal(UnidecError):
    """Git is in a state in which nothing can be committed safely; or git refused."""


# -- git --------------------------------------------------------------------------------------------------------------


def commit(params: Params, version: Any, verdict: str, extra: Sequence[str] = ()) -> dict[str, str]:
    """Commits, or commits and tags, what the retraining recorded: these files and no other.

    Author and committer are git's own settings. Where nothing changed there is no commit.

    Args:
        params: section `retrain` is used.
        version: of the registered model.
        verdict: in words, for the message.
        extra: further files, such as the .dvc file of the source.

    Returns:
        {"commit": sha} and, if asked for, {"tag": name}.

    Raises:
        GitRefusal: other changes are staged, a merge is under way, no branch is checked out; or git failed.
    """
    name, wants_tag = params.tracking.model_name, params.retrain.commit == "tag"
    _refuse_unsafe(wants_tag)
    paths = [path for path in (*RECORDED, *extra) if Path(path).exists()]
    others = _git("diff", "--cached", "--name-only", "--", ":/", *(f":(exclude){path}" for path in paths)).splitlines()
    if others:
        raise GitRefusal("other changes are staged", where="git", got=", ".join(others[:5]), fix="commit them")
    _git("add", "--", *paths)
    if _git("diff", "--cached", "--name-only"):
        message = f"Retrain: version {version} of {name}, {verdict}"
        _git("commit", "--quiet", "--no-verify", "--message", message, "--", *paths)  # hooks are for code
    done = {"commit": _git("rev-parse", "HEAD")}
    with harmless("the version could not be given its commit"):
        client = open_client(tracking_uri())
        client.set_model_version_tag(name, str(version), LOCK_COMMIT_TAG, done["commit"])
    if wants_tag:
        done["tag"] = f"{name}-v{version}"
        if not _git("tag", "--list", done["tag"]):
            _git("tag", "--annotate", done["tag"], "--message", f"version {version} of {name}: {verdict}")
    return done


def is_uncommitted(params: Params) -> bool:
    """Whether a commit is asked for, and the files that it is about differ from the last one."""
    try:
        return params.retrain.commit != "none" and bool(_git("status", "--porcelain", "--", *RECORDED))
    except GitRefusal:
        return False


def _refuse_unsafe(wants_tag: bool) -> None:
    folder = Path(_git("rev-parse", "--absolute-git-dir"))
    for name in ("MERGE_HEAD", "rebase-merge", "rebase-apply", "CHERRY_PICK_HEAD", "REVERT_HEAD"):
        if (folder / name).exists():
            raise GitRefusal("a merge or rebase is under way", where=str(folder / name), fix="finish it")
    if not wants_tag and not _git("branch", "--show-current"):
        raise GitRefusal("no branch is checked out: the commit would be lost", where="git", fix="git switch <branch>")


def _git(*words: str) -> str:
    command = ["git", "-c", "core.quotePath=false", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GitRefusal("git cannot be run", where=" ".join(words), got=str(error)) from error
    if done.returncode:
        raise GitRefusal("git refused", where=f"git {' '.join(words[:2])}", got=(done.stderr or done.stdout).strip())
    return done.stdout.strip()


# -- events and people ------------------------------------------------------------------------------------------------


@harmless("an event could not be sent to Prefect")
def emit(model_name: str, event: str, payload: Mapping[str, Any]) -> None:
    """An event that automations can wait for: `unidec.promoted`, about `unidec.model.<name>`.

    Args:
        model_name: of the registered model.
        event: skipped, refused, promoted, drift or failed.
        payload: JSON.
    """
    about = {"prefect.resource.id": f"unidec.model.{model_name}", "prefect.resource.name": model_name}
    related = []
    if current_flow_run.id:
        related = [{"prefect.resource.id": f"prefect.flow-run.{current_flow_run.id}", "prefect.resource.role": "cause"}]
    emit_event(event=f"unidec.{event}", resource=about, related=related, payload=dict(payload))


def tell(params: Params, event: str, subject: str, payload: Mapping[str, Any], lines: Sequence[str] = ()) -> None:
    """The event, and for people its words with a link to the run, to each block of `retrain.notify`."""
    from prefect.blocks.core import Block

    emit(params.tracking.model_name, event, payload)
    for name in params.retrain.notify:
        with harmless("a notification could not be sent"):
            where = without_credentials(str(current_flow_run.ui_url))
            body = "\n".join([*lines, *([where] if where.startswith("http") else [])])
            block: Any = Block.load(name)
            with block.raise_on_failure():
                block.notify(body, f"{params.tracking.model_name}: {subject}")


def failed(_flow: Any, flow_run: Any, state: Any) -> None:
    """A hook: tells of a run that failed or crashed."""
    asked = getattr(flow_run, "parameters", None) or {}
    try:
        params = load_params(asked.get("params_file", "params.yaml"), asked.get("overrides"))
    except (UnidecError, OSError):
        params = Params()
    words = (state.message or state.name or "failed")[:2000]
    subject = f"run {flow_run.name} {str(state.name).lower()}"
    tell(params, "failed", subject, {"error": words, "flow_run_id": str(flow_run.id)}, [words])
