"""docs/new-loss.md: its blocks, applied to a copy of the library as the page says, give a loss that
trains.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny_training import tiny_params

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "new-loss.md").read_text(encoding="utf-8")
BLOCK = re.compile(
    r"(Append to|Replace in|Write) `([\w./-]+)`:\n\n```\w+\n(.*?)^```", re.MULTILINE | re.DOTALL
)
# with the copy in place of the installed library: the page's test, the same with a wrong loss, a
# training
PROGRAM = """
import json, sys, torch, unidec
from unidec.model import losses
sys.path.insert(0, "tests/model")
import test_poly
test_poly.test_poly_is_its_formula()
test_poly.poly = lambda *given: losses.poly(*given, epsilon=0.9)
try:
    test_poly.test_poly_is_its_formula()
except AssertionError:
    print("notices")
given = json.load(open("given.json"))
tables = given["queries"], given["labels"], given["pairs"]
model = unidec.fit(*tables, recipe="poly", params=given["params"])
print(unidec.__file__, model.evaluate(given["queries"], given["pairs"])["P@1"])
"""


def apply_page(folder: Path) -> None:
    """A copy of `unidec/` with what the page writes."""
    shutil.copytree(
        ROOT / "unidec", folder / "unidec", ignore=shutil.ignore_patterns("__pycache__")
    )
    for how, name, block in BLOCK.findall(PAGE):
        file = folder / name
        if how == "Append to":
            text = file.read_text(encoding="utf-8") + "\n\n" + block
        elif how == "Replace in":  # an assignment: the line with the same name
            target = block.split(" = ")[0]
            text, count = re.subn(
                rf"^{target} = .*\n", block, file.read_text(encoding="utf-8"), flags=re.MULTILINE
            )
            assert count == 1, f"{name} has {count} lines `{target} = ...`"
        else:
            assert not (ROOT / name).exists(), (
                f"{name} is in the repository: the page's example has to be another one"
            )
            file.parent.mkdir(parents=True, exist_ok=True)
            text = block
        file.write_text(text, encoding="utf-8")


def test_the_code_is_forty_lines() -> None:
    blocks = [block for _, _, block in BLOCK.findall(PAGE)]
    assert len(blocks) == PAGE.count("```") // 2 - 1  # all but the commands
    assert sum(bool(line.strip()) for block in blocks for line in block.splitlines()) <= 40


@pytest.mark.timeout(900)
def test_the_page_applied_to_a_copy_trains(tiny_raw: Any, tiny_bert: Path, tmp_path: Path) -> None:
    from unidec.config import leaves

    apply_page(tmp_path)
    params = dict(leaves(tiny_params(tiny_bert, **{"optim.epochs": 6})))
    params = {
        key: value
        for key, value in params.items()
        if not key.startswith("loss.") and key != "recipe"
    }
    queries, labels = (
        table["title"].to_pylist() for table in (tiny_raw.queries["train"], tiny_raw.labels)
    )
    pairs = [
        [int(place) for place in pair]
        for pair in zip(*tiny_raw.relevance["train"].nonzero(), strict=True)
    ]
    given = {"queries": queries, "labels": labels, "pairs": pairs, "params": params}
    (tmp_path / "given.json").write_text(json.dumps(given), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    notices, where, precision = done.stdout.split()
    assert notices == "notices" and Path(where).is_relative_to(tmp_path)
    assert float(precision) > 25  # 40 labels: chance is under 10
