"""Lines are appended whole or not at all, and a reader skips and names what is torn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from unidec.data.line_file import append_line, readable_rows
from unidec.errors import DataError

MUCH = 10**9
LIMITED = """
import resource, sys
from unidec.data.line_file import append_line
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
for number in range(8):
    try:
        print(append_line(sys.argv[1], b'{"row": %d, "x": "yyyyyyyyy"}\\n' % number, 10**9))
    except OSError as error:
        print(error.strerror)
"""


def rows(path: Path) -> list[dict[str, object]]:
    return [row for _, row in readable_rows(path, ["row"])]


def test_a_file_that_cannot_grow_keeps_whole_lines(tmp_path: Path) -> None:
    """The fourth line does not fit: the system writes a part of it, which is taken back."""
    path = tmp_path / "log.jsonl"
    found = subprocess.run(
        [sys.executable, "-c", LIMITED, str(path)], capture_output=True, text=True, check=True
    )
    assert found.stdout.splitlines()[:3] == ["True"] * 3
    assert len(set(found.stdout.splitlines()[3:])) == 1
    assert "True" not in found.stdout.splitlines()[3:]
    assert [json.loads(line)["row"] for line in path.read_text().splitlines()] == [0, 1, 2]


def test_a_disk_that_is_full_keeps_whole_lines(tmp_path: Path) -> None:
    """A file system of 64 kB, mounted in a name space of its own."""
    code = (
        "import subprocess, sys; from unidec.data.line_file import append_line\n"
        "subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=64k', 'tmpfs', sys.argv[1]], "
        "check=True)\n"
        "path, kept = sys.argv[1] + '/log.jsonl', 0\n"
        "try:\n"
        '    for row in range(5000): append_line(path, b\'{"row": %d, "x": "yyyyyyy"}\\n\' % '
        "row, 10**9); kept += 1\n"
        "except OSError as error: print(error.strerror)\n"
        "lines = open(path).read().splitlines()\n"
        "print(kept == len(lines), all(line.endswith('}') for line in lines), kept > 100)\n"
    )
    words = ["unshare", "--map-root-user", "--mount", sys.executable, "-c", code, str(tmp_path)]
    found = subprocess.run(words, capture_output=True, text=True, check=False)
    if "unshare" in found.stderr or "mount" in found.stderr:
        pytest.skip(f"no file systems may be mounted here: {found.stderr[-200:]}")
    assert found.stdout.split("\n")[:2] == ["No space left on device", "True True True"], (
        found.stderr
    )


def test_a_line_after_a_torn_one_is_on_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"row": 1}\n{"row": 2, "que')
    assert append_line(path, b'{"row": 3}\n', MUCH)
    assert rows(path) == [{"row": 1}, {"row": 3}]
    assert f"{path}:2 is skipped: not a JSON object" in caplog.text


@pytest.mark.parametrize(
    "torn", [b'{"ro', b'{"row": "\xff\n', b"\0\0\0\0\n", b'{"row": 2{"row": 9}\n', b"[1]\n"]
)
def test_torn_lines_anywhere_are_skipped_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, torn: bytes
) -> None:
    path = tmp_path / "log.jsonl"
    for before, after in (
        ([b'{"row": 1}\n'], []),
        ([], [b'{"row": 1}\n']),
        ([b'{"row": 1}\n'], [b'{"row": 3}\n']),
    ):
        caplog.clear()
        path.write_bytes(b"".join([*before, torn.removesuffix(b"\n") + b"\n", *after]))
        expected = len(before) + len(after)
        assert len(rows(path)) == expected
        assert f"{path}:{len(before) + 1} is skipped" in caplog.text


def test_a_file_without_any_whole_line_is_refused_and_so_is_a_torn_csv(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text("hello\nworld\n")
    with pytest.raises(DataError, match=r"log\.jsonl:1"):
        rows(tmp_path / "log.jsonl")
    (tmp_path / "log.csv").write_text("row,x\n1,2\n3\n")
    with pytest.raises(DataError, match=r"log\.csv:3"):
        rows(tmp_path / "log.csv")


def test_the_bound_and_the_mode(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    assert append_line(path, b"{}\n", 5)
    assert not append_line(path, b"{}\n", 5)
    assert path.read_bytes() == b"{}\n"
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(OSError):
        append_line(tmp_path, b"{}\n", 5)


def _append_many(path: str, writer: int) -> None:
    for row in range(200):
        append_line(path, b'{"row": "%d-%d %b"}\n' % (writer, row, b"x" * 300), MUCH)


def test_several_processes_append(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with ProcessPoolExecutor(3) as pool:
        list(pool.map(_append_many, [os.fspath(path)] * 3, range(3)))
    assert len(rows(path)) == 600
