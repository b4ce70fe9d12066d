"""Queries to git. A repository in which a query fails is distinct from a missing repository: its
state is unknown.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

from unidec.errors import UnidecError

_TIMEOUT_S = 60
_LONGEST_REASON = 600


class GitError(UnidecError):
    """A git command failed, or git is not installed; `what` is git's own message, which often names
    the fix.
    """


def is_inside(folder: Path | str) -> bool:
    """Whether a folder is in a git repository, even if git is missing or refuses to open it."""
    if os.environ.get("GIT_DIR"):
        return True
    folder = Path(folder).resolve()
    return any(os.path.lexists(level / ".git") for level in (folder, *folder.parents))


def ask(root: Path | str, *words: str) -> str:
    """A git command's output.

    Raises:
        GitError: the command failed.
    """
    return _bytes(root, *words).decode(errors="replace").strip()


def _bytes(root: Path | str, *words: str, given: bytes | None = None) -> bytes:
    """The output of a git command that reads `given` from its standard input."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *words],
            input=given,
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
            env=os.environ | {"LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0"},
        )
    except FileNotFoundError as error:
        raise GitError(
            "git is not installed, but the folder is in a git repository: install git"
        ) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GitError(f"git {words[0]}: {error}") from error
    if done.returncode:
        said = (done.stderr or done.stdout).decode(errors="replace")
        reason = " ".join(said.split()) or f"exit code {done.returncode}"
        raise GitError(f"git {words[0]}: {reason}"[:_LONGEST_REASON])
    return done.stdout


def git(root: Path | str, *words: str) -> str | None:
    """Like `ask`; None if the command failed: no git, no repository, an unknown commit."""
    try:
        return ask(root, *words)
    except GitError:
        return None


def holders(name: str, sha256: str) -> list[str]:
    """The commits of all branches in which a file of the working folder has a content with this
    hash, oldest first.

    Raises:
        GitError: git does not answer.
    """
    commits = ask(".", "rev-list", "--all", "--reverse").split()
    asked = "".join(f"{commit}:./{name}\n" for commit in commits)
    answer = _bytes(".", "cat-file", "--batch-check=%(objectname)", given=asked.encode())
    blobs = answer.decode().splitlines()
    found = {
        blob
        for blob in set(blobs)
        if " " not in blob  # " missing"
        and hashlib.sha256(_bytes(".", "cat-file", "blob", blob)).hexdigest() == sha256
    }
    return [commit for commit, blob in zip(commits, blobs, strict=True) if blob in found]


def head(root: Path | str) -> str | None:
    """The commit that is checked out; None if the repository has no commit yet.

    Raises:
        GitError: git does not answer.
    """
    ask(root, "rev-parse", "--git-dir")
    return git(root, "rev-parse", "--verify", "--quiet", "HEAD")
