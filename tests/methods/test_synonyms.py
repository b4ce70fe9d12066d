"""Synonym replacement: which tokens are similar, and what a step's texts become."""

from dataclasses import replace

import numpy as np
import torch

from unidec.methods.synonyms import NUM_SIMILAR, Synonyms, similar_tokens
from unidec.model.encoder import load_transformer
from unidec.training.distributed import Ranks

CLS, SEP = 2, 3  # of the tiny tokenizer


def test_similar_tokens_are_the_nearest_that_occur(tiny_bert, tiny_tokens):
    similar = similar_tokens(tiny_bert, tiny_tokens)
    used = set()
    for tokens in tiny_tokens.values():
        used |= set(tokens.ids.tolist())
    used -= {CLS, SEP}
    assert similar.shape == (tiny_tokens["queries"].vocab_size, NUM_SIMILAR)
    weight = load_transformer(tiny_bert).get_input_embeddings().weight.detach().double()
    unit = torch.nn.functional.normalize(weight, dim=1).numpy()
    for token, found in enumerate(similar.tolist()):
        if token not in used:
            assert set(found) == {token}
            continue
        others = sorted(used - {token}, key=lambda other: -unit[token] @ unit[other])
        assert found == others[:NUM_SIMILAR]


def swapped(batch, tokens):
    """(before, after): tokens of a batch's queries as they are, and as they are encoded."""
    name, changed, rows = batch.texts.parts[0]
    assert name == Synonyms.source
    before, _ = tokens["queries"].ragged(batch.pool.rows_B[: len(rows)])
    return before, changed.ragged(rows)[0]


def test_a_share_of_the_queries_tokens_is_replaced(make_batches, tiny_tokens, tiny_bert):
    similar = similar_tokens(tiny_bert, tiny_tokens)
    batches = make_batches(None)
    batches.methods = replace(batches.methods, texts=Synonyms(0.3, similar))
    found = []
    for step in range(40):
        batch = batches.prepare(batches.rows, 0, step, None)
        before, after = swapped(batch, tiny_tokens)
        changed = before != after
        assert not changed[np.isin(before, [CLS, SEP])].any()
        words = before[changed][:, None]
        assert (similar[words[:, 0]] == after[changed][:, None]).any(1).all()
        found.append(changed.sum() / (~np.isin(before, [CLS, SEP])).sum())
        labels = batch.texts.parts[1:]
        assert [name for name, _, _ in labels] == ["labels"], "texts of labels are as they are"
    assert abs(np.mean(found) - 0.3) < 0.02
    again = swapped(batches.prepare(batches.rows, 0, 39, None), tiny_tokens)
    assert again[1].tolist() == after.tolist()
    assert batch.counts == batches.prepare(batches.rows, 0, 39, None).counts


def test_ranks_replace_the_same_tokens(make_batches, tiny_tokens, tiny_bert):
    similar = similar_tokens(tiny_bert, tiny_tokens)

    class Half(Ranks):
        """The second of two."""

        def own(self, rows):
            return np.array_split(rows, 2)[1]

    texts = []
    for ranks in (None, Half()):
        batches = make_batches(ranks)
        batches.methods = replace(batches.methods, texts=Synonyms(0.5, similar))
        _, tokens, rows = batches.prepare(batches.rows, 0, 0, None).texts.parts[0]
        texts.append([tokens.ragged([row])[0].tolist() for row in rows])
    assert texts[1] == np.array_split(np.array(texts[0], dtype=object), 2)[1].tolist()


def test_a_training_with_synonyms_learns_from_other_texts(open_trainer):
    losses = []
    for share in (0.0, 0.4):
        trainer = open_trainer(f"run-{share}", **{"loss.synonyms": share})
        trainer.mine()
        logs = []
        trainer.train_round(lambda step, figures, logs=logs: logs.append(figures["loss"]))
        losses.append(logs[0])
    assert losses[0] != losses[1]
