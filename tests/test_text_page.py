"""Texts from templates."""

from __future__ import annotations

import pytest
from jinja2 import UndefinedError

from unidec.text_page import markdown_table, render_text


def test_a_table_in_markdown() -> None:
    assert markdown_table(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"
    assert markdown_table(["a"], []) == "| a |\n| --- |"


def test_a_name_that_a_template_lacks_is_an_error() -> None:
    text = render_text("model_card.md", card={"data": "x", "sizes": [1]}, sha256="ab")
    assert "- data: x" in text and "sizes" not in text
    with pytest.raises(UndefinedError):
        render_text("model_card.md", card={})
