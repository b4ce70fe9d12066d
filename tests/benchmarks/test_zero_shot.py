"""Labels held out of training: what the training does not see, and the figures against a count by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from scipy.sparse import csr_matrix


@pytest.fixture(scope="session")
def zero_shot(benchmark_module):
    return benchmark_module("zero_shot")


def test_held_out_labels_are_nowhere_in_the_training(zero_shot, helper):
    whole = zero_shot.with_validation(helper("conftest").make_raw(num_train=600, num_labels=400, seed=2))
    held = zero_shot.held_labels(whole, 0.1, seed=0)
    trained = np.diff(whole.relevance["train"].tocsc().indptr) > 0
    assert len(held) == round(0.1 * trained.sum()) and trained[held].all() and (np.diff(held) > 0).all()
    cut = zero_shot.without(whole, held)
    uids = whole.labels["uid"].to_pylist()
    kept = [uid for row, uid in enumerate(uids) if row not in set(held.tolist())]
    assert cut.labels["uid"].to_pylist() == kept
    for split in whole.queries:
        before, after = (
            {
                query: {names[label] for label in raw.relevance[split][row].indices}
                for row, query in enumerate(raw.queries[split]["uid"].to_pylist())
            }
            for raw, names in ((whole, uids), (cut, kept))
        )
        gone = {uids[label] for label in held}
        assert after == {query: labels - gone for query, labels in before.items() if labels - gone}


def by_hand(truth: np.ndarray, top: np.ndarray, held: set[int]) -> dict[str, float]:
    out: dict[str, float] = {}
    for who, some in (
        ("new", held),
        ("others", set(range(truth.shape[1])) - held),
        ("all", set(range(truth.shape[1]))),
    ):
        pairs = [(query, label) for query, label in zip(*np.nonzero(truth), strict=True) if label in some]
        for k in (10, 100):
            hits = sum(label in top[query][:k] for query, label in pairs)
            out[f"{who}/R@{k}"] = 100 * hits / max(1, len(pairs))
    gains = []
    for row, wanted in zip(top, truth, strict=True):
        if wanted.any():
            gain = sum(1 / np.log2(2 + i) for i, label in enumerate(row[:5]) if label >= 0 and wanted[label])
            gains.append(gain / sum(1 / np.log2(2 + i) for i in range(min(5, int(wanted.sum())))))
    out["nDCG@5"] = 100 * float(np.mean(gains))
    out["new/share of the first 10"] = 100 * float(np.mean([[label in held for label in row[:10]] for row in top]))
    return out | {"new/positives": float(truth[:, sorted(held)].sum())}


@pytest.mark.parametrize("seed", range(4))
def test_the_figures(zero_shot, seed):
    rng = np.random.default_rng(seed)
    truth = rng.random((30, 60)) < 0.06
    held = np.sort(rng.choice(60, 9, replace=False))
    nothing = csr_matrix((30, 60), dtype=bool)
    raw = SimpleNamespace(
        num_labels=60, filter_pairs={"test": nothing}, relevance={"test": csr_matrix(truth, dtype=np.float32)}
    )
    top = np.array([rng.permutation(60)[:40] for _ in range(30)])
    top[3, 25:] = -1
    found = zero_shot.Judge(raw, "test", held).of_answers(top)
    assert found == pytest.approx(by_hand(truth, top, set(held.tolist())))


@pytest.mark.parametrize("cosine", [False, True])
def test_every_estimate_is_a_row_for_each_label(zero_shot, cosine):
    rng = np.random.default_rng(1)
    held = np.array([2, 5, 11])
    made = {name: rng.normal(size=(40, 8)).astype(np.float32) for name in ("de", "text", "rows")}
    own = zero_shot.Encoded(zero_shot.unit_rows(made["de"]), made["text"], made["rows"], {})
    for name, make in zero_shot.estimates(own, held, cosine).items():
        rows = make()
        assert rows is None or (rows.shape == (3, 8) and rows.dtype == np.float32 and np.isfinite(rows).all()), name
    assert zero_shot.CHOSEN in zero_shot.estimates(own, held, cosine)
