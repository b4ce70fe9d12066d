"""The hash of the code that decides a result: what a module does, not how it is written or
explained.
"""

from __future__ import annotations

import fnmatch
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from unidec import code
from unidec.code import DECIDED_BY, code_files, code_sha256, tree_text
from unidec.config import Result, keys_deciding, known_keys

SOURCE = '''"""A module."""

import math  # for tau

#: a constant
LIMIT = 3
"""Its docstring."""


class Row:
    """A row."""

    def width(self, margin: float = 1.5) -> float:
        """Its width."""
        text = f"{margin!r:>{LIMIT}}"  # aligned
        return math.tau * margin if text else None
'''
REWRITTEN = '''"""Another explanation."""
import math
LIMIT = (3)
class Row:
    """A row
    with more words."""
    # and a comment
    def width(
        self,
        margin: float = 1.5,
    ) -> float:
        text = f'{margin!r:>{LIMIT}}'
        return (math.tau * margin) if text else None
'''


def test_words_and_layout_do_not_count() -> None:
    assert tree_text(SOURCE.encode()) == tree_text(REWRITTEN.encode())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("LIMIT = 3", "LIMIT = 4"),
        ("margin: float = 1.5", "margin: int = 1.5"),
        ("1.5", "1.50001"),
        ("!r", "!s"),
        ("math.tau * margin", "margin * math.tau"),
        ("else None", "else 0"),
        ("class Row:", "@object\nclass Row:"),
        ("text = f", "text = 1; text = f"),
    ],
)
def test_what_a_module_does_counts(old: str, new: str) -> None:
    changed = SOURCE.replace(old, new, 1)
    assert changed != SOURCE
    assert tree_text(changed.encode()) != tree_text(SOURCE.encode())


def test_texts_that_are_values_count() -> None:
    assert tree_text(b'x = "a"') != tree_text(b'x = "b"') != tree_text(b'x = b"b"')
    assert tree_text(b"x = None") != tree_text(b"x = 'None'")
    assert tree_text(b"def f():\n    'words'\n") != tree_text(b"def f():\n    return 'words'\n")


def test_every_place_exists_and_has_code() -> None:
    for result, places in DECIDED_BY.items():
        for place in places:
            assert (code.PACKAGE / place).exists(), f"{result}: {place}"
        assert code_files(result)


def test_the_page_says_what_decides_what() -> None:
    """docs/lineage.md has the parameters of each result, and its code but for the long list of the
    index.
    """
    page = (code.PACKAGE.parent / "docs" / "lineage.md").read_text()
    table = page.partition("## What makes a result out of date")[2].partition("\n- ")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| `")]
    shown = {
        row[0].strip(" `"): [re.findall(r"`([\w./*]+)`", cell) for cell in row[2:]] for row in rows
    }
    assert list(shown) == list(get_args(Result))
    for result, (patterns, places) in shown.items():
        keys = {
            key
            for key in known_keys()
            if any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)
        }
        assert keys == set(keys_deciding(result, warm=True)), result
        if result in ("index", "evaluation", "operation"):
            continue
        assert [place.rstrip("/") for place in places] == list(DECIDED_BY[result]), result


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the library's code, which may be edited."""
    copy = tmp_path / "unidec"
    shutil.copytree(code.PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(code, "PACKAGE", copy)
    yield copy
    code_sha256.cache_clear()


def hash_now(result: str) -> str:
    """As in a process that begins now."""
    code_sha256.cache_clear()
    return code_sha256(result)


def test_a_better_docstring_is_no_new_training(package: Path) -> None:
    before = {result: hash_now(result) for result in DECIDED_BY}
    loop = package / "training" / "fit.py"
    loop.write_text(loop.read_text().replace('"""', '"""In other words: ', 1) + "\n# the end\n")
    doctor = package / "pipeline" / "doctor.py"
    doctor.write_text(doctor.read_text() + "\nADDED = 1\n")
    assert {result: hash_now(result) for result in DECIDED_BY} == before
    loop.write_text(loop.read_text() + "\nADDED = 1\n")
    changed = {result for result in DECIDED_BY if hash_now(result) != before[result]}
    assert changed == {"training"}
    template = next((package / "evaluation" / "templates").iterdir())
    template.write_text(template.read_text() + "\n")  # files of other kinds count by content
    assert hash_now("evaluation") != before["evaluation"]
    assert hash_now("metrics") == before["metrics"]
