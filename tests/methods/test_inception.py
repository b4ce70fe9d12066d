"""InceptionXML's layers against loops in float64, one text and one feature after the other."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from unidec.config import Encoder
from unidec.data.tokens import Tokens
from unidec.methods.inception import token_layers
from unidec.model.encoder import TextEncoder
from unidec.model.encoder_inputs import InputBuilder

CPU = torch.device("cpu")
NUM_TOKENS = 40
WIDTH = 36
READ = 5


def new_encoder(**options):
    settings = Encoder(kind="inception", inception_tokens=READ, **options)
    return TextEncoder(settings, None, NUM_TOKENS, WIDTH, token_layers(settings, WIDTH))


def make(rng, lengths, **settings):
    """An encoder with random weights everywhere, and texts of some lengths."""
    torch.manual_seed(3)
    encoder = new_encoder(**settings)
    for parameter in encoder.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    torch.nn.init.constant_(encoder.bag.inception.gamma, 0.05)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return encoder, Tokens(
        rng.integers(0, NUM_TOKENS, offsets[-1]).astype(np.uint16), offsets, NUM_TOKENS, 0, 16
    )


def gelu(x):
    return x * 0.5 * (1 + math.erf(x / math.sqrt(2)))


def normed(rows, norm):
    """Group norm with one group: over all channels and features of a text."""
    flat = np.array(rows)
    flat = (flat - flat.mean()) / np.sqrt(flat.var() + 1e-5)
    return (
        flat * norm.weight.detach().double().numpy()[:, None]
        + norm.bias.detach().double().numpy()[:, None]
    )


def attended(x, matrix, gamma):
    """x + gamma x x^T W x of the rows of x."""
    gram = np.array(
        [[sum(a * b for a, b in zip(one, other, strict=True)) for other in x] for one in x]
    )
    return x + gamma * gram @ matrix @ x


def written(layers, x):
    """One text's vector, float64 [D], from its token embeddings [T, D]."""
    total = x.sum(0)
    x = x / np.sqrt(max((x**2).mean(), 1e-12))
    weights = {name: value.detach().double().numpy() for name, value in layers.named_parameters()}
    x = attended(x, weights["tokens.weight"], weights["gamma"][0])
    x = attended(x.T, weights["features.weight"], weights["gamma"][1]).T
    mixed = weights["channels.weight"][:, :, 0] @ x + weights["channels.bias"][:, None]
    h = normed([[gelu(value) for value in row] for row in mixed], layers.norms[0])
    rows = []
    for number, window in enumerate((4, 8, 16)):
        kernel = weights[f"convolutions.{number}.weight"]
        bias = weights[f"convolutions.{number}.bias"]
        for out in range(READ):
            values = []
            # beyond an end: the other's
            for start in range(-(window - 4) // 2, WIDTH - 4 + 1 - (window - 4) // 2, 4):
                seen = [
                    h[c, (start + k) % WIDTH] * kernel[out, c, k]
                    for c in range(READ)
                    for k in range(window)
                ]
                values.append(gelu(sum(seen) + bias[out]))
            rows.append(values)
    h = normed(rows, layers.norms[1])
    assert h.shape == (3 * READ, 9)
    # the ninth feature is left out
    pooled = np.array([max(row[at : at + 4]) for row in h for at in (0, 4)])
    first = weights["bottleneck.0.weight"] @ pooled + weights["bottleneck.0.bias"]
    y = (
        weights["bottleneck.2.weight"] @ [gelu(value) for value in first]
        + weights["bottleneck.2.bias"]
    )
    return total / max(np.linalg.norm(total), 1e-12) + y


def test_a_text_equals_loops_over_tokens_channels_and_features(rng):
    encoder, tokens = make(rng, [3, 0, 9, READ, 1])  # shorter and longer than what is read
    rows = np.array([2, 0, 1, 3, 4])
    got = encoder.eval()(InputBuilder(encoder, CPU)([("queries", tokens, rows)]))
    assert got.shape == (5, WIDTH) and encoder.width == WIDTH
    embedding, weight = (
        table.weight.detach().double().numpy()
        for table in (encoder.bag.embedding, encoder.bag.log_weight)
    )
    for place, row in enumerate(rows):
        ids = tokens.ids[tokens.offsets[row] : tokens.offsets[row + 1]][:READ]
        x = np.zeros((READ, WIDTH))
        for at, token in enumerate(ids):
            x[at] = np.exp(weight[token, 0]) * embedding[token]
        np.testing.assert_allclose(
            got[place].detach().double().numpy(),
            written(encoder.bag.inception, x),
            rtol=1e-4,
            atol=1e-4,
        )


def test_it_begins_as_the_bag_of_what_it_reads(rng):
    encoder = new_encoder()
    bag = TextEncoder(Encoder(kind="bag"), None, NUM_TOKENS, WIDTH)
    for own, other in zip(encoder.bag.parameters(), bag.bag.parameters(), strict=False):
        torch.nn.init.normal_(own, std=0.3)
        other.data.copy_(own.data)
    _, tokens = make(rng, [3, READ, 1])
    vectors = [
        one.eval()(InputBuilder(one, CPU)([("queries", tokens, np.arange(3))]))
        for one in (encoder, bag)
    ]
    torch.testing.assert_close(*vectors, rtol=1e-5, atol=1e-6)


def test_gradients_reach_every_layer_and_the_rows_that_are_read(rng):
    encoder, tokens = make(rng, [2, 9, 4])
    x_BD = encoder.train()(InputBuilder(encoder, CPU)([("queries", tokens, np.arange(3))]))
    (x_BD * torch.randn_like(x_BD)).sum().backward()
    assert all(
        p.grad is not None and p.grad.abs().sum() > 0 for p in encoder.bag.inception.parameters()
    )
    rows_U, leaf = encoder.bag.embedding.used
    read = np.concatenate(
        [
            tokens.ids[a : min(a + READ, b)]
            for a, b in zip(tokens.offsets[:-1], tokens.offsets[1:], strict=True)
        ]
    )
    assert set(rows_U[leaf.grad.abs().sum(1) > 0].tolist()) == set(read.tolist())


@pytest.mark.parametrize("rows", [[0, 1, 2], [1]])
def test_a_texts_vector_does_not_depend_on_the_others(rng, rows):
    encoder, tokens = make(rng, [2, 9, 4])
    build = InputBuilder(encoder.eval(), CPU)
    whole, some = (
        encoder(build([("queries", tokens, np.array(which))])) for which in ([0, 1, 2], rows)
    )
    torch.testing.assert_close(some, whole[rows], rtol=1e-5, atol=1e-6)
    assert encoder(build([("queries", tokens, np.arange(0))])).shape == (0, WIDTH)
    assert F.cosine_similarity(whole[0], whole[1], dim=0) < 0.999
