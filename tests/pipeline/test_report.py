"""What the report of a run receives: the data set's card, names of what was measured."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from unidec.config import Params
from unidec.data.dataset import XMCDataset
from unidec.data.propensity import build_propensity
from unidec.evaluation.baselines import Baselines
from unidec.metric_names import GROUPS
from unidec.pipeline import evaluation as stage
from unidec.pipeline import paths


def test_the_card_against_loops(
    tiny_dataset: XMCDataset,
    tiny_params: Callable[..., Params],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
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
    assert card["sha256"] == tiny_dataset.sha256
    assert card["labels"] == len(counts)
    assert card["train queries"] == len(train)
    trained = set(tiny_dataset.relevance[tiny_dataset.rows("train")].indices.tolist())
    assert card["labels without training queries"] == len(counts) - len(trained)
    expected = [
        sum(c < 10 for c in counts),
        sum(10 <= c <= 100 for c in counts),
        sum(c > 100 for c in counts),
    ]
    assert [card[f"{group} labels"] for group in GROUPS] == expected
    json.dumps(card)


@pytest.mark.parametrize("with_baseline", [True, False])
def test_examples_are_the_largest_gains_and_losses_against_loops(with_baseline: bool) -> None:
    rng = np.random.default_rng(4)
    num = 40
    num_labels = 12
    k = 6
    truth = csr_matrix(rng.random((num, num_labels)) < 0.2)
    ours, theirs = (
        np.array([rng.permutation(num_labels)[:k] for _ in range(num)]) for _ in range(2)
    )
    places = np.arange(0, num, 2)  # the baseline ranked every second query

    def ndcg(labels: np.ndarray, query: int) -> float:
        right = set(truth[query].indices.tolist())
        best = sum(1 / math.log2(rank + 2) for rank in range(min(5, len(right))))
        return (
            100
            * sum(1 / math.log2(j + 2) for j, label in enumerate(labels[:5]) if label in right)
            / best
        )

    asked = [i for i in places if truth[i].nnz]
    gain = {f"query {i}": ndcg(ours[i], i) - with_baseline * ndcg(theirs[i], i) for i in asked}
    texts = SimpleNamespace(
        label_uids=lambda rows: [f"l{row}" for row in rows],
        label_texts=lambda rows: [f"label {row}" for row in rows],
        query_texts=lambda rows: [f"query {row}" for row in rows],
    )
    hits = np.take_along_axis(truth.toarray(), ours, axis=1)
    ranking = SimpleNamespace(
        dataset=texts,
        truth=truth,
        rows=np.arange(num),
        propensity=SimpleNamespace(inverse_L=np.ones(num_labels)),
    )
    tfidf = Baselines({"knn": ours, "mix": theirs[places]} if with_baseline else {}, {}, places, "")
    measured = SimpleNamespace(
        ranking=ranking,
        scores=np.zeros((num, k)),
        labels=ours,
        tfidf=tfidf,
    )
    found = stage._examples(measured)  # type: ignore[arg-type]
    assert found["gain_over"] == ("TF-IDF kNN + label match" if with_baseline else "")
    for name, sign in (("gains", 1), ("losses", -1)):
        wanted = sorted(
            (g for g in gain.values() if not with_baseline or sign * g > 0), key=lambda g: -sign * g
        )[:6]
        gains = [one["gain"] for one in found[name]]
        assert gains == pytest.approx(wanted)
        assert len(wanted) > 3
        for one in found[name]:
            assert gain[one["query"]] == pytest.approx(one["gain"])
            row = int(one["query"].split()[1])
            assert [p["label"] for p in one["predictions"]] == [
                f"l{label}" for label in ours[row, :5]
            ]
            correctness = [p["correct"] for p in one["predictions"]]
            assert correctness == hits[row, :5].tolist()
