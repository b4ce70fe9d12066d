"""Sphinx: README, docs/ and the measured results as a site, read where they are in the repository
(`make docs`).
"""

from pathlib import Path

from sphinx.application import Sphinx

import unidec

ROOT = Path(__file__).resolve().parents[1]

project = "unidec"
author = "The unidec project"
version = release = unidec.__version__
language = "en_GB"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "benchmarks/README.md", "benchmarks/results/*.md"]
exclude_patterns = [
    item.name
    for item in ROOT.iterdir()
    if item.is_dir() and item.name not in ("docs", "benchmarks")
]
# README has no table of contents of its own: where the repository is shown its code would be
# printed
CONTENTS = {
    "Use": [
        "docs/install",
        "docs/tutorial",
        "docs/data",
        "docs/training",
        "docs/encoders",
        "docs/new-loss",
        "docs/bundles",
        "docs/serving",
        "docs/labels",
    ],
    "Compare and report": ["docs/comparing", "docs/reports"],
    "Operate": ["docs/retraining", "docs/resuming", "docs/lineage", "docs/servers", "docs/scale"],
    "Reference": ["docs/api", "CHANGELOG", "CONTRIBUTING", "SECURITY", "NOTICE"],
    "Measurements": ["benchmarks/README", "benchmarks/results/*"],
}

smartquotes_action = "D"  # dashes alone: quotes are part of values
highlight_language = "text"
suppress_warnings = ["misc.highlighting_failure"]  # JSON with `...` in it
myst_heading_anchors = 4
default_role = "code"  # docstrings have `name`, not ``name``
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True

html_theme = "furo"
# commands with their comments are long lines
html_theme_options = {"light_css_variables": {"code-font-size": "75%"}}
html_title = f"unidec {release}"
html_show_sourcelink = html_copy_source = html_show_copyright = False


def add_contents(app: Sphinx, page: str, text: list[str]) -> None:
    if page == root_doc:
        for caption, pages in CONTENTS.items():
            listed = "\n".join(pages)
            text[0] += (
                f"\n\n```{{toctree}}\n:hidden:\n:glob:\n:caption: {caption}\n\n{listed}\n```\n"
            )


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_contents)
