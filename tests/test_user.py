"""A user id without a name, and a project of another user; as root, in child processes that give it
up.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from unidec import user
from unidec.errors import ArtifactError

NOBODY = 54321  # no entry in /etc/passwd
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


def as_nobody(code: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run code as a user without a name: what it imports is imported before, as the user may not
    read our packages.
    """
    head = "import os, unidec.user, getpass, pathlib, tempfile\n"
    head += f"os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"
    named = ("USER", "LOGNAME", "LNAME", "USERNAME", "HOME")
    kept = {name: value for name, value in os.environ.items() if name not in named}
    command = [sys.executable, "-c", head + code]
    return subprocess.run(
        command, cwd=folder, env=kept | variables, capture_output=True, text=True, timeout=60
    )


@pytest.fixture
def open_folder(tmp_path: Path) -> Path:
    """A folder that every user can reach."""
    for parent in (tmp_path, *tmp_path.parents[:3]):
        if parent.stat().st_uid == os.getuid() and parent != Path("/tmp"):
            parent.chmod(0o755)
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o777)
    return tmp_path


@as_root
def test_a_user_without_a_name_gets_name_and_home(open_folder: Path) -> None:
    code = """
unidec.user.name_user()
home = pathlib.Path.home()
print(getpass.getuser(), home, os.access(home, os.W_OK))
"""
    done = as_nobody(code, open_folder, TMPDIR=str(open_folder / "tmp"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        f"user-{NOBODY}",
        f"{open_folder}/tmp/unidec-home-{NOBODY}",
        "True",
    ]
    again = as_nobody(code, open_folder, TMPDIR=str(open_folder / "tmp"))
    assert again.stdout == done.stdout, "the same home"


@as_root
def test_a_home_that_another_user_made_is_not_used(open_folder: Path) -> None:
    (open_folder / "tmp" / f"unidec-home-{NOBODY}").mkdir()
    done = as_nobody(
        "unidec.user.name_user(); print(pathlib.Path.home().stat().st_uid)",
        open_folder,
        TMPDIR=str(open_folder / "tmp"),
    )
    assert done.stdout.strip() == str(NOBODY), done.stderr


def test_what_is_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "carol")
    monkeypatch.setenv("LOGNAME", "carol")
    monkeypatch.setenv("HOME", "/somewhere")
    user.name_user()
    assert os.environ["USER"] == "carol"
    assert os.environ["HOME"] == "/somewhere"


@as_root
def test_a_project_of_another_user_is_one_message(open_folder: Path) -> None:
    (open_folder / "outputs").mkdir()
    code = """
from unidec.errors import ArtifactError
try:
    unidec.user.check_writable([pathlib.Path("outputs"), pathlib.Path("runs")])
except ArtifactError as error:
    print(error)
"""
    said = as_nobody(code, open_folder).stdout
    assert (
        "outputs" in said
        and f"user id {NOBODY}" in said
        and "chown" in said
        and str(open_folder) in said
    )


def test_folders_that_do_not_exist_can_be_made(tmp_path: Path) -> None:
    user.check_writable([tmp_path / "a" / "b"])
    assert not (tmp_path / "a").exists()


@as_root
@pytest.mark.parametrize("name", ["home", "home/prefect.db"])
def test_prefects_folder_of_another_user(open_folder: Path, name: str) -> None:
    (open_folder / "home").mkdir(mode=0o777)
    (open_folder / "home").chmod(0o777)
    target = open_folder / name
    if not target.exists():
        target.touch()
    target.chmod(0o555)
    done = as_nobody('unidec.user.check_writable([pathlib.Path("home")])', open_folder)
    assert (
        done.returncode == 1
        and "cannot be written" in done.stderr
        and ArtifactError.__name__ in done.stderr
    )
