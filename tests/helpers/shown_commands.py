"""The commands that README and the pages show, as words, for tests that give them to the programs'
own parsers.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    page
    for pattern in (
        "*.md",
        "docs/*.md",
        "mlflow/*.md",
        "data/*.md",
        "benchmarks/*.md",
        "benchmarks/results/*.md",
    )
    for page in ROOT.glob(pattern)
    if page.name != "CHANGELOG.md"  # names what is gone
)
NOT_RUN = "# not run by tests: "
_BLOCK = re.compile(r"^```(?:sh|bash)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"^    ((?:python|unidec|make) .*)", re.MULTILINE)
_HEREDOC = re.compile(r"<<'(\w+)'\n.*?^\1$", re.MULTILINE | re.DOTALL)
_KEYWORDS = ("do", "then", "else")


class Shown(NamedTuple):
    """One command of a page; its block begins by saying that no test runs it, or does not."""

    place: str
    words: list[str]
    marked: bool

    @property
    def program(self) -> str:
        return Path(self.words[0]).name or self.words[0]  # the shell's `.`


def shown_commands(program: str | None = None) -> list[Shown]:
    """Commands of all shell blocks and of lines that are indented as code, all or of
    one program.
    """
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for block in [*_BLOCK.finditer(text), *_INDENTED.finditer(text)]:
            place = f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, block.start()) + 1}"
            marked = block[1].startswith(NOT_RUN)
            found += [Shown(place, words, marked) for words in commands_of(block[1])]
    return [command for command in found if program in (None, command.program)]


def commands_of(script: str) -> list[list[str]]:
    """The words of each simple command: without comments, variables that are set for it,
    redirections and keywords.
    """
    script = _HEREDOC.sub("", script).replace("\\\n", " ")
    # <schedule id>
    script = re.sub(r"<([\w ]+)>", lambda found: found[1].replace(" ", "-"), script)
    found: list[list[str]] = []
    for line in script.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if not set(word) <= set(";&|"):
                words.append(word)
                continue
            while words and (words[0] in _KEYWORDS or re.match(r"\w+=", words[0])):
                words.pop(0)
            if ">" in words:
                words = words[: words.index(">")]
            if words and words[0] not in ("for", "done"):
                found.append(words)
            words = []
    return found
