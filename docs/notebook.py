"""Executes docs/tutorial.ipynb, keeps its outputs, and writes them as the page docs/tutorial.md.

    python docs/notebook.py            # some minutes; needs no Jupyter
    python docs/notebook.py --page     # only the page, from the outputs that are there

Jupyter executes the same notebook; here a cell's output is what it prints, its last expression and
its figures. What goes to stderr (progress) is not kept."""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
NOTEBOOK = HERE / "tutorial.ipynb"
Notebook = dict[str, Any]


def read(path: Path = NOTEBOOK) -> Notebook:
    return json.loads(path.read_text(encoding="utf-8"))


def source(cell: Notebook) -> str:
    return "".join(cell["source"])


def lines(text: str) -> list[str]:
    """As notebooks keep text: a list of lines with their ends."""
    return text.splitlines(keepends=True)


def execute(notebook: Notebook) -> dict[str, Any]:
    """Run all code cells in order and set their outputs; returns the names that they defined."""
    os.environ.setdefault("MPLBACKEND", "agg")
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, 1):
        cell["execution_count"], cell["outputs"] = number, outputs(source(cell), names, number)
    return names


def outputs(code: str, names: dict[str, Any], number: int) -> list[Notebook]:
    """Run one cell; its outputs in the notebook's format."""
    tree = ast.parse(code)
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        target = ast.Name("_", ast.Store())
        tree.body[-1] = ast.copy_location(ast.Assign([target], tree.body[-1].value), tree.body[-1])
    names["_"] = None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(ast.fix_missing_locations(tree), f"cell {number}", "exec"), names)
    value = names["_"]
    found: list[Notebook] = []
    if printed.getvalue():
        found.append({"name": "stdout", "output_type": "stream", "text": lines(printed.getvalue())})
    if value is not None and not figure_numbers():
        data = {"text/plain": lines(repr(value))}
        if hasattr(value, "_repr_html_"):
            data = {"text/html": lines(value._repr_html_()), **data}
        found.append(
            {
                "data": data,
                "execution_count": number,
                "metadata": {},
                "output_type": "execute_result",
            }
        )
    return found + [
        {
            "data": {"image/png": figure, "text/plain": ["<Figure>"]},
            "metadata": {},
            "output_type": "display_data",
        }
        for figure in figures()
    ]


def figure_numbers() -> list[int]:
    return (
        sys.modules["matplotlib.pyplot"].get_fignums() if "matplotlib.pyplot" in sys.modules else []
    )


def figures() -> list[str]:
    """The open figures as PNG in base64; they are closed."""
    found = []
    for figure in figure_numbers():
        plots = sys.modules["matplotlib.pyplot"]
        png = io.BytesIO()
        plots.figure(figure).savefig(png, format="png", dpi=80, metadata={"Software": None})
        plots.close(figure)
        found.append(base64.b64encode(png.getvalue()).decode() + "\n")
    return found


def page(notebook: Notebook) -> tuple[str, dict[str, bytes]]:
    """The page in Markdown, and its pictures by name."""
    parts = []
    pictures = {}
    for cell in notebook["cells"]:
        text = source(cell).strip()
        if cell["cell_type"] == "markdown":
            parts.append(text)
            continue
        parts.append(f"```python\n{text}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                name = f"tutorial-{len(pictures) + 1}.png"
                pictures[name] = base64.b64decode(data["image/png"])
                parts.append(f"![the figure that this cell draws](images/{name})")
            else:
                parts.append(
                    "```text\n"
                    + "".join(output.get("text") or data["text/plain"]).rstrip()
                    + "\n```"
                )
    return "\n\n".join(parts) + "\n", pictures


def main() -> None:
    notebook = read()
    if "--page" not in sys.argv[1:]:
        os.chdir(HERE)
        execute(notebook)
        NOTEBOOK.write_text(
            json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
    text, pictures = page(notebook)
    NOTEBOOK.with_suffix(".md").write_text(text, encoding="utf-8")
    for name, png in pictures.items():
        (HERE / "images" / name).write_bytes(png)


if __name__ == "__main__":
    main()
