"""sentence-transformers as a peer: batches without a text twice, the same start as our bag, and that it learns."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from unidec.comparison import peers
from unidec.comparison.peers import sentence
from unidec.data.tokens import TokenCache
from unidec.errors import DataError, TrainingError
from unidec.evaluation.metrics import evaluate, filtered_truth, remove_filtered
from unidec.model.encoder import BagEncoder, EncoderInput, load_transformer

pytest.importorskip("sentence_transformers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture
def cell(cell):
    """Twice as many epochs as the others need."""
    settings = json.loads((cell / "peer.json").read_text())
    (cell / "peer.json").write_text(json.dumps(settings | {"epochs": 6}))
    return cell


@pytest.mark.parametrize("size", [1, 3, 8, 40])
def test_no_query_and_no_label_is_twice_in_a_batch_and_no_pair_twice_in_an_epoch(size):
    rng = np.random.default_rng(size)
    query, label = rng.integers(0, 60, 300), rng.integers(0, 50, 300)
    batches = list(sentence.pair_batches(query, label, size, np.random.default_rng(1)))
    assert batches
    for batch in batches:
        assert len(batch) == size == len(set(query[batch])) == len(set(label[batch]))
    used = np.concatenate(batches)
    assert len(used) == len(set(used.tolist()))
    # the epoch ends for a reason: what is left fills no batch
    left = sorted(set(range(300)) - set(used.tolist()))
    rest = [(int(query[i]), int(label[i])) for i in left]
    assert min(len({q for q, _ in rest}), len({k for _, k in rest})) < size or size > 1
    again = list(sentence.pair_batches(query, label, size, np.random.default_rng(1)))
    assert all((a == b).all() for a, b in zip(batches, again, strict=True))


def test_an_epoch_of_single_pairs_has_each_pair_once():
    found = np.concatenate(list(sentence.pair_batches(np.zeros(9), np.zeros(9), 1, np.random.default_rng(0))))
    assert sorted(found) == list(range(9))
    assert list(sentence.pair_batches(np.zeros(9), np.arange(9), 2, np.random.default_rng(0))) == []


def test_the_learning_rate_rises_and_falls_to_nothing():
    values = [sentence.rate(step, 100, 0.1) for step in range(101)]
    assert np.argmax(values) in (9, 10, 11) and max(values) == 1 and values[100] == 0
    assert all(0 < value <= 1 for value in values[:100])
    assert sentence.rate(0, 100, 0.0) == 1


def test_the_bag_starts_where_ours_does(tiny_dataset, tiny_tokens, tiny_bert):
    """Cosines of all labels are those of `BagEncoder` with its start weights (special tokens left out of both)."""
    rows = tiny_dataset.rows("train")
    texts = tiny_dataset.query_texts(rows)
    labels = tiny_dataset.label_texts()
    ours = BagEncoder(tiny_tokens["queries"].vocab_size, 32, 0.0).eval()
    embedding = load_transformer(tiny_bert).get_input_embeddings().weight.detach()
    with torch.no_grad():
        ours.embedding.weight.copy_(embedding)
    cache: TokenCache = tiny_tokens["queries"]
    frequency = np.zeros(cache.vocab_size, dtype=np.int64)
    for row in rows:
        frequency[np.unique(cache.ragged([row])[0])] += 1
    ours.start_weights(frequency, len(rows))
    with torch.no_grad():
        for special in (2, 3):  # [CLS] and [SEP]: in every text, next to no weight, and not in theirs
            ours.log_weight.weight[special] = -40.0
        want = ours(bag_input(tiny_tokens["labels"])).numpy()
    model = sentence._static(tiny_bert, texts, 16)
    got = model.encode(labels, normalize_embeddings=True, show_progress_bar=False)
    np.testing.assert_allclose(got @ got.T, want @ want.T, atol=1e-5)


def bag_input(tokens):
    """All texts of a cache as the bag takes them."""
    ids, offsets = tokens.ragged(np.arange(len(tokens)))
    unique, local = np.unique(ids, return_inverse=True)
    return EncoderInput(
        len(tokens), unique_U=torch.from_numpy(unique), local_F=torch.from_numpy(local),
        offsets_B=torch.from_numpy(np.asarray(offsets)[: len(tokens)]),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "rate", "more"), [("st-static", 3e-2, {}), ("st-transformer", 2e-3, {"epochs": 2, "chunk": 16})]
)
def test_it_learns_and_leaves_predictions(name, rate, more, tiny_dataset, cell):
    rows = tiny_dataset.rows("test")
    filters = tiny_dataset.filter_pairs[rows]
    truth = filtered_truth(tiny_dataset.relevance[rows], filters)

    def figures(options):
        facts = peers.run(name, cell, 1, options | more)
        labels, scores = (np.load(cell / "outputs" / f"{part}.npy") for part in ("labels", "scores"))
        assert labels.shape == (12, 40) and (np.diff(scores, axis=1) <= 0).all()
        kept, _ = remove_filtered(labels, scores, filters, 100)
        return facts, evaluate(kept, truth, np.ones(40), np.zeros(40, dtype=int))["nDCG@5"], labels

    facts, trained, labels = figures({"learning_rate": rate})
    _, untrained, _ = figures({"learning_rate": 0.0})
    assert trained > untrained + 5
    assert facts["options"]["epochs"] == more.get("epochs", 6)
    assert facts["options"]["batch_size"] == 8, "as in the comparison"
    assert facts["parameters"] > 1000 and facts["version"].startswith("sentence-transformers ")
    assert 0.5 < facts["pairs_an_epoch"] <= 1
    json.dumps(facts, allow_nan=False)
    assert (cell / "outputs" / "labels_validation.npy").is_file()
    if name == "st-static":
        np.testing.assert_array_equal(figures({"learning_rate": rate})[2], labels, err_msg="a seed decides everything")


def test_cached_gradients_are_those_of_the_whole_batch(tiny_bert, tiny_dataset):
    """Their loss in chunks of 3 texts against plain cross entropy of cosines, without dropout."""
    from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss

    model = sentence._transformer(tiny_bert, 16, "mean").eval()
    queries, labels = tiny_dataset.query_texts(range(7)), tiny_dataset.label_texts(range(7))
    loss = CachedMultipleNegativesRankingLoss(model, scale=20.0, mini_batch_size=3)
    value = loss([model.preprocess(queries), model.preprocess(labels)], torch.empty(0))
    value.backward()
    weight = model[0].model.get_input_embeddings().weight
    cached = weight.grad.clone()
    model.zero_grad()
    q, k = (
        torch.nn.functional.normalize(model(model.preprocess(side))["sentence_embedding"]) for side in (queries, labels)
    )
    plain = torch.nn.functional.cross_entropy(20 * q @ k.T, torch.arange(7))
    plain.backward()
    assert value.item() == pytest.approx(plain.item(), abs=1e-5)
    torch.testing.assert_close(cached, weight.grad, atol=1e-5, rtol=1e-4)


def test_too_few_pairs_and_a_loss_that_is_not_finite_are_told(cell, monkeypatch):
    settings = json.loads((cell / "peer.json").read_text())
    (cell / "peer.json").write_text(json.dumps(settings | {"batch_size": 44}))
    with pytest.raises(DataError, match="too few different queries"):
        peers.run("st-static", cell, 0, {"epochs": 1})
    with pytest.raises(TrainingError, match="not finite"):
        peers.run("st-static", cell, 0, {"epochs": 2, "batch_size": 4, "scale": 1e39})
