"""What a retraining tells the world: DVC's remote, git, Prefect's events, people. None of it fails a run."""

from __future__ import annotations

import functools
import logging
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from prefect.events import emit_event
from prefect.runtime import flow_run as current_flow_run

from unidec.config import Params, load_params
from unidec.errors import UnidecError, without_credentials
from unidec.tracking.promotion import tag_version

log = logging.getLogger("unidec.flows")

RECORDED = ("dvc.lock", "data/start.json", "outputs/metrics.json", "outputs/plots")
LOCK_COMMIT = "git.lock_commit"  # tag of a version: the commit whose dvc.lock made it
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
    name = params.tracking.model_name
    _refuse_unsafe(tag=params.retrain.commit == "tag")
    paths = [path for path in (*RECORDED, *extra) if Path(path).exists()]
    others = _git("diff", "--cached", "--name-only", "--", ":/", *(f":(exclude){path}" for path in paths)).splitlines()
    if others:
        raise GitRefusal("other changes are staged", where="git", got=", ".join(others[:5]), fix="commit them")
    _git("add", "--", *paths)
    if _git("diff", "--cached", "--name-only"):
        message = f"Retrain: version {version} of {name}, {verdict}"
        _git("commit", "--quiet", "--no-verify", "--message", message, "--", *paths)  # hooks are for code
    done = {"commit": _git("rev-parse", "HEAD")}
    _tag_version(name, version, done["commit"])
    if params.retrain.commit == "tag":
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


def _refuse_unsafe(tag: bool) -> None:
    folder = Path(_git("rev-parse", "--absolute-git-dir"))
    for name in ("MERGE_HEAD", "rebase-merge", "rebase-apply", "CHERRY_PICK_HEAD", "REVERT_HEAD"):
        if (folder / name).exists():
            raise GitRefusal("a merge or rebase is under way", where=str(folder / name), fix="finish it")
    if not tag and not _git("branch", "--show-current"):
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


def harmless(what: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A failure of this is a warning."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def wrapper(*args: Any, **options: Any) -> None:
            try:
                function(*args, **options)
            except Exception as error:
                log.warning("%s: %s", what, error)

        return wrapper

    return decorate


@harmless("the version could not be given its commit")
def _tag_version(name: str, version: Any, commit: str) -> None:
    tag_version(name, str(version), {LOCK_COMMIT: commit})


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


def notify(blocks: Sequence[str], subject: str, body: str) -> None:
    """Tells each of the notification blocks, e.g. "slack-webhook/team"."""
    for block in blocks:
        _notify_one(block, subject, body)


@harmless("a notification could not be sent")
def _notify_one(name: str, subject: str, body: str) -> None:
    from prefect.blocks.core import Block

    block: Any = Block.load(name)
    with block.raise_on_failure():
        block.notify(body, subject)


def tell(params: Params, event: str, subject: str, payload: Mapping[str, Any], lines: Sequence[str] = ()) -> None:
    """The event, and for people its words with a link to the run."""
    emit(params.tracking.model_name, event, payload)
    if params.retrain.notify:
        where = current_flow_run.ui_url
        link = [without_credentials(str(where))] if str(where).startswith("http") else []
        body = "\n".join([*lines, *link])
        notify(params.retrain.notify, f"{params.tracking.model_name}: {subject}", body)


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
