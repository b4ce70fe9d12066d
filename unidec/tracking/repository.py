"""Questions to git. A repository that does not answer is not the same as no repository: its state
is unknown.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from unidec.errors import UnidecError

_TIMEOUT_S = 60
_LONGEST_REASON = 600
_MOST_COMMITS = 20_000


class GitError(UnidecError):
    """A git command failed, or git is not installed; `what` is git's own message, which often names
    the fix.
    """


def is_inside(folder: Path | str) -> bool:
    """Whether a folder is in a git repository, also if git is not installed or refuses
    to open it.
    """
    if os.environ.get("GIT_DIR"):
        return True
    folder = Path(folder).resolve()
    return any(os.path.lexists(parent / ".git") for parent in (folder, *folder.parents))


def ask(root: Path | str, *words: str) -> str:
    """A git command's output.

    Raises:
        GitError: the command failed.
    """
    command = ["git", "-C", str(root), *words]
    environment = os.environ | {"LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
            env=environment,
        )
    except FileNotFoundError as error:
        raise GitError(
            "git is not installed, but the folder is in a git repository: install git"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise GitError(f"git {words[0]} did not answer within {_TIMEOUT_S} s") from error
    except OSError as error:
        raise GitError(f"git cannot be run: {error}") from error
    if done.returncode:
        reason = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        raise GitError(f"git {words[0]}: {reason}"[:_LONGEST_REASON])
    return done.stdout.strip()


def git(root: Path | str, *words: str) -> str | None:
    """Like `ask`; None if the command failed: no git, no repository, an unknown commit."""
    try:
        return ask(root, *words)
    except GitError:
        return None


def contents(root: Path | str, name: str) -> list[tuple[str, bytes]]:
    """Each commit of any branch that has a file, the oldest first, with the file's content there.

    Raises:
        GitError: git does not answer.
    """
    commits = ask(root, "rev-list", "--all", "--reverse", f"--max-count={_MOST_COMMITS}").split()
    path = ask(root, "rev-parse", "--show-prefix") + name
    asked = "".join(f"{commit}:{path}\n" for commit in commits).encode()
    listed = _batch(root, "--batch-check=%(objectname)", asked).decode().splitlines()
    blobs = {commit: blob for commit, blob in zip(commits, listed, strict=False) if " " not in blob}
    unique = list(dict.fromkeys(blobs.values()))
    texts = dict(
        zip(
            unique,
            _objects(_batch(root, "--batch", "\n".join([*unique, ""]).encode())),
            strict=True,
        )
    )
    return [(commit, texts[blob]) for commit, blob in blobs.items()]


def _batch(root: Path | str, option: str, asked: bytes) -> bytes:
    command = ["git", "-C", str(root), "cat-file", option]
    try:
        return subprocess.run(
            command, input=asked, capture_output=True, timeout=_TIMEOUT_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise GitError(f"git cat-file: {error}") from error


def _objects(answer: bytes) -> list[bytes]:
    """The contents in an answer of `git cat-file --batch`: a line "name type size", the content, a
    line break.
    """
    found = []
    place = 0
    while place < len(answer):
        start = answer.index(b"\n", place) + 1
        size = int(answer[place:start].split()[-1])
        found.append(answer[start : start + size])
        place = start + size + 1
    return found


def head(root: Path | str) -> str | None:
    """The commit that is checked out; None if the repository has no commit yet.

    Raises:
        GitError: git does not answer.
    """
    ask(root, "rev-parse", "--git-dir")
    found = git(root, "rev-parse", "--verify", "--quiet", "HEAD")
    if found is None and ask(root, "for-each-ref", "--count=1"):
        raise GitError(
            "git rev-parse: HEAD names no commit, though the repository has some: git fsck"
        )
    return found
