"""What the report of a run receives: the data set's card, names of what was measured."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from unidec.config import Params
from unidec.data.dataset import XMCDataset
from unidec.data.propensity import build_propensity
from unidec.metric_names import GROUPS
from unidec.pipeline import evaluation as stage
from unidec.pipeline import paths


def test_the_card_against_loops(
    tiny_dataset: XMCDataset, tiny_params: Callable[..., Params], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    paths.PROPENSITY.parent.mkdir()
    shutil.copytree(tiny_dataset.path, paths.DATASET)
    build_propensity(tiny_dataset, 0.55, 1.5, paths.PROPENSITY)
    card = stage.data_card(tiny_params())
    counts = [0] * tiny_dataset.num_labels
    for row in (*tiny_dataset.rows("train"), *tiny_dataset.rows("validation")):
        for label in tiny_dataset.relevance[row].indices:
            counts[label] += 1
    train = [tiny_dataset.relevance[row].nnz for row in tiny_dataset.rows("train")]
    assert card["labels"] == len(counts) and card["train queries"] == len(train)
    assert card["labels without a training query"] == counts.count(0)
    expected = [sum(c < 10 for c in counts), sum(10 <= c <= 100 for c in counts), sum(c > 100 for c in counts)]
    assert [card[f"{group} labels"] for group in GROUPS] == expected
    json.dumps(card)


@pytest.mark.parametrize(
    ("heads", "parts", "names"),
    [
        ("both", ("de", "clf"), ["both", "de", "clf"]),
        ("both", ("de", "clf", "heads", "knn"), ["both heads and votes", "both", "de", "clf", "knn"]),
        ("de", (), ["de"]),
        ("clf", ("heads", "knn"), ["classifier and votes", "clf", "knn"]),
    ],
)
def test_what_is_served_is_first_and_named(heads: str, parts: tuple[str, ...], names: list[str]) -> None:
    result = {"test": {"P@1": 9.0}, **{name: {"P@1": float(i)} for i, name in enumerate(parts)}}
    shown = stage._metrics(result, heads)
    assert list(shown) == names and shown[names[0]]["P@1"] == 9.0
    if "heads" in parts:
        assert shown[heads] == result["heads"]
