"""Golden losses of every shipped recipe: a refactor leaves the first 20 steps as they were (see
golden.py).
"""

import json
import platform
from pathlib import Path

import pytest
from helpers import golden

from unidec.config import recipe_names

HERE = Path(__file__).parent
AGAIN = "was it meant? then: python tests/helpers/golden.py"


@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="dropout masks differ by architecture"
)
@pytest.mark.parametrize("recipe", recipe_names())
def test_first_steps_are_as_they_were(tiny_raw, tiny_bert, tmp_path, recipe):
    file = HERE / "golden" / f"{recipe}.json"
    assert file.is_file(), (
        f"the recipe {recipe} has no golden losses: python tests/helpers/golden.py {recipe}"
    )
    ours = golden.first_steps(recipe, tiny_raw, tiny_bert, tmp_path)
    differences = golden.differences(ours, json.loads(file.read_text()))
    assert not differences, "\n".join(
        [*differences[:5], f"{len(differences)} figures differ; {AGAIN}"]
    )


def test_no_golden_losses_of_recipes_that_are_gone():
    assert sorted(file.stem for file in (HERE / "golden").glob("*.json")) == recipe_names()


def test_a_difference_is_seen():
    line = {"loss": 2.5, "grad_norm": 1.0, "pool_size": 30}
    assert golden.differences([line], [line]) == []
    assert golden.differences([line], [{**line, "loss": 2.5 * (1 + 5e-6)}]) == []
    for key, value in (
        ("loss", 2.5001),
        ("grad_norm", 1.01),
        ("pool_size", 31),
    ):
        assert len(golden.differences([line], [{**line, key: value}])) == 1
    assert len(golden.differences([line], [{"loss": 2.5}])) == 1
