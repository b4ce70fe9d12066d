"""What CHANGELOG.md promises to keep until 2.0.0, written down in promised.yaml, is there; more may
be.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import typer.main
import yaml

import unidec
from unidec import cli, errors
from unidec.config import known_keys, recipe_names

PROMISED = yaml.safe_load(Path(__file__).with_name("promised.yaml").read_text(encoding="utf-8"))


def test_commands_and_their_options_and_arguments() -> None:
    program: Any = typer.main.get_command(cli.app)
    for words, options in PROMISED["commands"].items():
        command = program
        for word in words.split():
            command = command.commands[word]
        known = {name for parameter in command.params for name in (parameter.name, *parameter.opts)}
        assert set(options) <= known, words


def test_parameters_and_recipes() -> None:
    sections = PROMISED["parameters"].items()
    promised = {
        name if section == "top" else f"{section}.{name}"
        for section, names in sections
        for name in names
    }
    assert promised <= set(known_keys())
    assert set(PROMISED["recipes"]) <= set(recipe_names())


def test_exit_codes() -> None:
    for name, code in PROMISED["exit codes"].items():
        assert getattr(errors, name).exit_code == code


def test_python_names_and_their_arguments_in_order() -> None:
    for name, arguments in PROMISED["python"].items():
        known: Any = unidec
        for part in name.split("."):
            known = getattr(known, part)
        if not isinstance(known, property):
            signature = inspect.signature(known).parameters.values()
            required = [
                parameter.name for parameter in signature if parameter.default is parameter.empty
            ]
            assert set(required) - {"self"} <= set(arguments), f"{name} asks for more than it did"
            named = [parameter.name for parameter in signature if parameter.name in arguments]
            assert named == arguments, name
