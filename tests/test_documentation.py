"""README and the pages: each command, option, file and name in them exists; the site is built and
loads nothing from elsewhere."""

from __future__ import annotations

import ast
import functools
import itertools
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
from helpers import shown_commands
from helpers.html_page import Loaded
from helpers.shown_commands import NOT_RUN, PAGES, ROOT, Shown

from unidec import cli

# programs that are part of a system, whose words no test checks
SHELL = {
    ".",
    "cd",
    "chmod",
    "cp",
    "curl",
    "export",
    "git",
    "head",
    "mkdir",
    "python3",
    "set",
    "source",
    "unset",
    "xdg-open",
}
SHELL |= {"sqlite3"}  # tests/tracking/test_registry.py runs what it is given
PARSED = {"unidec", "python", "make", "dvc"}
RUN = {"prefect", "mlflow"}  # by tests, which have the same words
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def identity(shown: Shown) -> str:
    return f"{shown.place} {' '.join(shown.words[:4])}"


@functools.cache
def program() -> typer.core.TyperGroup:
    return typer.main.get_command(cli.app)


def resolve(
    words: list[str],
) -> tuple[typer.core.TyperGroup | typer.core.TyperCommand, str, list[str]]:
    """The command of `unidec` that these words name, or its group, and the words after its name."""
    command = program()
    name = "unidec"
    rest = [word for word in words if word != "--debug"]
    while isinstance(command, typer.core.TyperGroup) and rest and not rest[0].startswith("-"):
        assert rest[0] in command.commands, f"no command {rest[0]} in `{name}`"
        name, *rest = rest
        command = command.commands[name]
    return command, name, rest


@pytest.mark.parametrize("shown", shown_commands.shown_commands("unidec"), ids=identity)
def test_unidec_takes_the_words_that_are_shown(shown: Shown) -> None:
    command, name, rest = resolve(shown.words[1:])
    assert not isinstance(command, typer.core.TyperGroup), (
        f"{name} needs one of {list(command.commands)}"
    )
    command.make_context(name, rest)  # refuses options and arguments that it has not


def test_unidec_in_a_sentence_has_the_commands_and_options_that_are_named() -> None:
    for page in PAGES:
        for quoted in re.findall(r"`unidec ([^`]+)`", page.read_text(encoding="utf-8")):
            words = re.split(r"\s+", quoted)
            if "..." in words[-1]:
                continue
            command, name, rest = resolve(words)
            options = {option for parameter in command.params for option in parameter.opts}
            for word in rest:
                assert not word.startswith("-") or word.split("=")[0] in options, (
                    f"{page.name}: {name} {word}"
                )


def test_make_has_the_targets_and_variables_that_are_shown() -> None:
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
    variables = set(re.findall(r"^(?:export )?([A-Z_]+) *[?:]?=", MAKEFILE, re.MULTILINE)) | {
        "ARGS"
    }
    for shown in shown_commands.shown_commands("make"):
        for word in shown.words[1:]:
            known = word.split("=")[0] in variables if "=" in word else word in targets
            assert known, f"{shown.place}: make {word}"
    for page in PAGES:
        for target in re.findall(r"`make ([a-z-]+)", page.read_text(encoding="utf-8")):
            assert target in targets, f"{page.name}: make {target}"


def test_programs_of_this_repository_have_the_options_that_are_shown() -> None:
    for shown in shown_commands.shown_commands("python"):
        if shown.words[1] in ("-c", "-m"):  # python -m flows...: tests/flows/test_deployments.py
            continue
        program = ROOT / shown.words[1]
        assert program.is_file(), f"{shown.place}: {shown.words[1]}"
        source = program.read_text(encoding="utf-8") + (
            ROOT / "benchmarks" / "measure.py"
        ).read_text(encoding="utf-8")
        for word in shown.words[2:]:
            if word.startswith("--"):
                assert f'"{word.split("=")[0]}"' in source, (
                    f"{shown.place}: {shown.words[1]} {word}"
                )


def test_dvc_takes_the_words_that_are_shown() -> None:
    from dvc.cli.parser import get_main_parser

    parser = get_main_parser()
    for shown in shown_commands.shown_commands("dvc"):
        try:
            parser.parse_args(shown.words[1:])
        except BaseException as error:
            raise AssertionError(f"{shown.place}: {' '.join(shown.words)}") from error


def test_every_other_command_is_run_by_a_test_or_is_marked() -> None:
    tests = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("*.py"))
    tests = re.sub(r",\s+", ", ", tests)  # a list of words may have a word a line
    for shown in shown_commands.shown_commands():
        if shown.marked or shown.program in SHELL | PARSED:
            continue
        named = itertools.dropwhile(lambda word: word.startswith("-"), shown.words[1:])
        names = list(itertools.takewhile(re.compile("[a-z][a-z-]+").fullmatch, named))
        run = shown.program in RUN and ", ".join(f'"{name}"' for name in names) in tests
        assert run, (
            f"{shown.place}: no test runs `{' '.join(shown.words)}`; begin its block with "
            f"`{NOT_RUN}` and why"
        )


def test_files_that_are_named_exist() -> None:
    """Of folders that are in git whole; what a command makes lies elsewhere."""
    named = re.compile(
        r"(?<![\w/.-])((?:benchmarks|comparison|docs|flows|plots|tests|bin)/[\w./-]*\w)"
    )
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for name in named.findall(text):
            if f"Write `{name}`:" in text:  # the reader does
                continue
            assert any(ROOT.glob(f"{name}*")), f"{page.relative_to(ROOT)}: {name}"


def test_every_page_is_listed_in_readme_and_on_the_site() -> None:
    readme, site = (
        (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/conf.py")
    )
    for page in (ROOT / "docs").glob("*.md"):
        assert f"](docs/{page.name})" in readme, f"README.md does not list {page.name}"
        assert f'"docs/{page.stem}"' in site, f"docs/conf.py does not list {page.name}"


def test_continued_lines_of_shown_docstrings_are_indented() -> None:
    """`docs/api.md` and `python -m flows.NAME --help` show them: at the same indentation a line
    would be a parameter of its own, or be cut off.
    """
    public = ("api", "estimator", "errors", "data/dataset")
    files = [*(ROOT / "flows").glob("*.py"), *(ROOT / f"unidec/{name}.py" for name in public)]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ClassDef | ast.FunctionDef):
                continue
            is_section = False
            for line in (ast.get_docstring(node) or "").splitlines():
                if line and not line.startswith(" "):
                    is_section = line in ("Args:", "Attributes:", "Raises:")
                elif is_section and re.match(r"    \S", line):
                    assert re.match(r"    [\w*, ]+:", line), f"{file.name}, {node.name}: {line}"


def test_imports_that_are_shown_exist() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for program in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            for node in ast.walk(ast.parse(program)):
                if (
                    isinstance(node, ast.ImportFrom)
                    and node.module
                    and node.module.startswith("unidec")
                ):
                    place = ROOT / Path(*node.module.split("."))
                    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
                    for name in (alias.name for alias in node.names):
                        known = (place / f"{name}.py").is_file() or re.search(
                            rf"\b{name}\b", file.read_text("utf-8")
                        )
                        known = known or f"def {name}(" in text  # the page writes it
                        assert known, f"{page.name}: from {node.module} import {name}"


@pytest.mark.slow
def test_the_site_is_built_without_warnings_and_loads_nothing_from_elsewhere(
    tmp_path: Path,
) -> None:
    pytest.importorskip("furo")
    recipe = subprocess.run(
        [shutil.which("make") or "make", "-n", "docs"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    (command,) = [line for line in recipe.splitlines() if " -m sphinx " in line]
    words = [*command.split()[1:-1], str(tmp_path / "site")]
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    pages = list((tmp_path / "site").rglob("*.html"))
    stems = {page.stem for page in PAGES if page.parent.name == "docs"}
    assert stems <= {page.stem for page in pages}
    for page in pages:
        loaded = Loaded(page.read_text(encoding="utf-8"))
        assert loaded.addresses and not [
            url for url in loaded.addresses if re.match(r"(\w+:)?//", url)
        ], page.name
    for style in (tmp_path / "site").rglob("*.css"):
        assert not re.search(
            r"(@import|url\()\s*['\"]?(https?:)?//", style.read_text(encoding="utf-8")
        ), style.name
    api = (tmp_path / "site" / "docs" / "api.html").read_text(encoding="utf-8")
    assert 'id="unidec.fit"' in api and 'id="unidec.Model.predict"' in api
