"""The first update of each published method, with the settings that `published.py params` writes,
against its official training rule, written here in dense float64: norm and direction of the change
of the classifier's rows (Psi) and of the encoder.

The rules are those of the sources in benchmarks/published/methods.yaml: numbers stand here once
more, so that a wrong value in a file is found. A rule is given the batch that was drawn and nothing
else of the project. Published schedules give the first step a rate of 0; what is compared is their
second, the first one that changes something.

Dropout masks depend on the shape of what is dropped alone, so that a rule drops the same entries if
it drops the same thing by the same share.

Legend: B queries, S labels of the pool, L all labels, W width of the encoder, D width of a head.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.label_targets import soft_targets

from unidec.data.dataset import write_dataset
from unidec.data.tokens import TokenCache, build_token_cache
from unidec.training.sampler import steps_an_epoch
from unidec.training.trainer import Trainer, TrainingData

WIDTH = 32  # of the tiny transformer
SMALL = {
    "device": "cpu",
    "seed": 0,
    "tokens.text": "title",
    "tokens.max_length": 16,
    "optim.precision": "fp32",
    "run.recompute": False,
}


def kept(shape: torch.Size, p: float) -> torch.Tensor:
    """Which entries of a tensor dropout keeps."""
    generator = torch.Generator().manual_seed(shape[0])
    return torch.rand(shape, generator=generator) >= p


def dropped(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False):
    """Dropout in place of torch's."""
    if not training or p == 0:
        return x
    return x * kept(x.shape, p) / (1 - p)


# -- published losses: s scores [B, S] or [B, L], y true pairs, bool
# --------------------------------------------------------------------------------------------------


def softmax_loss(s, y, *, decoupled):
    """Mean over rows with a positive of the mean over these of -log of their softmax share."""
    rows = []
    for i in torch.nonzero(y.any(1)).flatten():
        terms = []
        for p in s[i, y[i]]:
            seen = torch.cat([p[None], s[i, ~y[i]]]) if decoupled else s[i]
            terms.append(seen.logsumexp(0) - p)
        rows.append(torch.stack(terms).mean())
    return torch.stack(rows).mean()


def both_ways(s, y, *, decoupled):
    """Half query to label, half label to query."""
    forth = softmax_loss(s, y, decoupled=decoupled)
    return (forth + softmax_loss(s.T, y.T, decoupled=decoupled)) / 2


def binary(s, y):
    """Binary cross entropies [B, S]."""
    return F.binary_cross_entropy_with_logits(s, y.double(), reduction="none")


def hardest_triplets(s, y, picked, *, margin, num_negatives, tau):
    """NGAME's encoder: mean over queries and their hardest negatives of the hinges, weighted by a
    softmax of similarities / tau in which negatives without a loss have 0; without tau unweighted.
    """
    rows = []
    for i in range(len(s)):
        negatives = s[i, ~y[i]]
        hardest = negatives.topk(num_negatives).values
        positive = s[i, picked[i]]
        hinge = F.relu(hardest - positive + margin)
        if tau:
            score = hardest / tau * (hinge != 0)
            hinge = hinge * score.softmax(0)
        rows.append(hinge.mean())
    return torch.stack(rows).mean()


def hardest_pairs(s, y, margin, num_positives, num_negatives):
    """NGAME's classifier: mean over queries, least similar positives and hardest negatives of the
    hinges, weighted by a softmax of the hinges that are not 0; missing positives have similarity
    100.
    """
    of_positives = torch.where(y, s, 100.0)
    of_negatives = torch.where(y, -100.0, s)
    positive = of_positives.topk(num_positives, largest=False).values
    negative = of_negatives.topk(num_negatives).values
    difference = negative.unsqueeze(1) - positive.unsqueeze(2)
    hinge = F.relu(difference + margin)
    lost = torch.where(hinge == 0, -100.0, hinge)
    return (lost.softmax(dim=2) * hinge).mean()


# -- published rules
# --------------------------------------------------------------------------------------------------


@dataclass
class Step:
    """A batch as a rule sees it.

    Attributes:
        vectors: the transformer's outputs, the texts' tokens pooled [queries and labels, W];
            num_queries: how many of them are queries'.
        y: true pairs of the queries and the pool's labels, in float for soft targets.
        picked: the place of each query's sampled positive in the pool.
        weights: the heads' weights and Psi's rows by name, leaves.
    """

    vectors: torch.Tensor
    num_queries: int
    y: torch.Tensor
    picked: torch.Tensor
    weights: dict[str, torch.Tensor]

    def head(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight = self.weights[f"{name}.0.weight"]
        return F.linear(x, weight, self.weights[f"{name}.0.bias"])

    @property
    def queries(self) -> torch.Tensor:
        return self.vectors[: self.num_queries]

    def cosines(self, vectors: torch.Tensor) -> torch.Tensor:
        """Of queries and labels."""
        unit = F.normalize(vectors, dim=1)
        queries, labels = unit.tensor_split([self.num_queries])
        return queries @ labels.T

    def unidec_de(self) -> torch.Tensor:
        vectors = self.head("head_de", self.vectors).tanh()
        return self.cosines(dropped(vectors, 0.1))

    def unidec_clf(self) -> torch.Tensor:
        queries = self.head("head_clf", self.queries)
        return dropped(queries, 0.1) @ dropped(self.weights["table"], 0.1).T


def unidec(decoupled, bce, balance):
    def loss(c: Step) -> torch.Tensor:
        de = both_ways(18 * c.unidec_de(), c.y, decoupled=decoupled)
        scores = 18 * c.unidec_clf()
        clf = both_ways(scores, c.y, decoupled=decoupled)
        if bce:
            clf = clf + binary(scores, c.y).mean()
        return balance * de + (1 - balance) * clf

    return loss


def depsl(c: Step) -> torch.Tensor:
    return both_ways(18 * c.unidec_de(), c.y, decoupled=True)


def dexml(c: Step) -> torch.Tensor:
    """The other positives get -100."""
    s = c.cosines(c.vectors) / 0.05
    carries = F.one_hot(c.picked, s.shape[1]).bool()
    seen = torch.where(c.y & ~carries, -100.0, s)
    return F.cross_entropy(seen, c.picked)


def ngame(tau):
    def loss(c: Step) -> torch.Tensor:
        cosines = c.cosines(c.vectors)
        return hardest_triplets(cosines, c.y, c.picked, margin=0.3, num_negatives=10, tau=tau)

    return loss


def ngame_classifier(c: Step) -> torch.Tensor:
    queries = dropped(c.vectors, 0.5)[: c.num_queries]
    rows = F.normalize(c.weights["table"], dim=1)
    s = F.normalize(queries, dim=1) @ rows.T
    return hardest_pairs(s, c.y, 0.2, 3, 5)


def renee(dropout):
    def loss(c: Step) -> torch.Tensor:
        s = dropped(c.queries, dropout) @ c.weights["table"].T
        return binary(s, c.y).sum()

    return loss


@dataclass
class Rule:
    """A method's training rule on a data set.

    Attributes:
        rates: of the encoder, the heads and Psi; 0: frozen.
        warm_up: its steps in a training with `rows` rows.
        decay, eps: of AdamW.
        psi: Psi's optimiser; psi_decay: its weight decay.
        projected: whether there are heads.
    """

    method: str
    loss: Any
    rates: tuple[float, float, float]
    warm_up: float
    data_set: str = "LF-AmazonTitles-131K"
    rows: int = 294_805
    decay: float = 0.0
    eps: float = 1e-8
    psi: str = "adam"
    psi_decay: float = 0.0
    pooling: str = "mean"
    projected: bool = False


def of_unidec(method, loss, **other):
    rates = (1e-4, 2e-4, 1e-3)
    return Rule(method, loss, rates, **{"warm_up": 768, "decay": 0.05} | other, projected=True)


def of_ngame(method, loss, rates, warm_up=100, **other):
    return Rule(method, loss, rates, warm_up, eps=1e-6, **other)


def of_renee(loss, rates, decay, **other):
    """AdamW in apex's FusedAdam for the encoder, descent with momentum for Psi."""
    of_psi = {"psi": "momentum", "psi_decay": 1e-4}
    return Rule("renee", loss, rates, 5000, eps=1e-6, decay=decay, **of_psi, **other)


RULES = [
    of_unidec("unidec-v1", unidec(False, False, 0.5)),
    of_unidec("unidec-v1", unidec(False, False, 0.3), data_set="LF-Amazon-131K", warm_up=1536),
    of_unidec("unidec-v2", unidec(True, False, 0.5)),
    of_unidec("unidec-v2-bce", unidec(True, True, 0.5)),
    of_unidec("depsl", depsl),
    Rule("dexml", dexml, (3e-4, 0, 0), 982.7, decay=0.01, pooling="cls"),
    of_ngame("ngame", ngame(0.1), (2e-4, 0, 0)),
    of_ngame("ngame", ngame(None), (2e-4, 0, 0), data_set="LF-Amazon-131K"),
    of_ngame("ngame-classifier", ngame_classifier, (0, 0, 1e-3), 500),
    # rows: queries and label texts
    of_renee(renee(0.85), (1e-5, 0, 0.05), 0.01, rows=425_878),
    of_renee(renee(0.75), (2e-4, 0, 0.1), 1e-3, data_set="LF-WikiSeeAlso-320K", rows=1_005_412),
]
PARTS = ("encoder", "head", "table")


def name_of(rule: Rule) -> str:
    return f"{rule.method} on {rule.data_set}"


# -- both updates
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def transformer(tiny_distilbert, tmp_path_factory):
    """Without dropout of its own, whose masks no rule could know."""
    folder = tmp_path_factory.mktemp("still") / "distilbert"
    shutil.copytree(tiny_distilbert, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"dropout": 0.0, "attention_dropout": 0.0}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def data(transformer, tmp_path_factory):
    """Without filter pairs, which published code does not know in training."""
    from helpers.tiny_data import make_raw

    folder = tmp_path_factory.mktemp("first-update")
    dataset = write_dataset(folder / "dataset", make_raw(filters=False), validation_share=0.0)
    sizes = {"queries": dataset.num_queries, "labels": dataset.num_labels}
    tokens = []
    for name, size in sizes.items():
        texts = dataset.text_batches(name)
        built = build_token_cache(texts, transformer, 16, folder / name, size)
        tokens.append(TokenCache.open(built))
    return dataset, *tokens


class FirstUpdate:
    """The first step of a method's generated settings, and the rule's step from the same weights
    on the same batch.
    """

    def __init__(self, rule, published, data, transformer, folder, **changed):
        self.rule = rule
        self.transformer = transformer
        dataset, self.query_tokens, self.label_tokens = data
        width = {} if rule.projected else {"model.dim": WIDTH}
        small = SMALL | {"encoder.name": str(transformer)}
        values = small | width | changed
        self.params = published.resolve(rule.data_set, rule.method, values)
        graph = None
        if self.params.reads_label_graph:
            relevance = dataset.relevance[dataset.rows("train")]
            graph = soft_targets(relevance, 0.1, kind=self.params.label_graph.kind)
        inputs = TrainingData(dataset, self.query_tokens, self.label_tokens, graph)
        self.dataset = dataset
        self.trainer = trainer = Trainer(
            self.params.training, inputs, folder / "run", folder / "cache"
        )
        trainer.mine()
        trainer.made = trainer.refresher.load(0)
        trainer.model.train()
        rows = trainer.made.batches(trainer.rows, trainer.batch_size, 0, 0)
        assert len(rows) == 1, "the batch is all of the data"
        self.batch = trainer.prepare(rows[0], 0)
        self.before = self.weights()
        trainer.train_step(self.batch)
        self.after = self.weights()

    def weights(self):
        """All weights in float64 by name; Psi's rows as "table"."""
        weights = {}
        for name, weight in self.trainer.model.state_dict().items():
            if weight.is_floating_point():
                weights[name.replace("table.weight", "table")] = weight.to(torch.float64, copy=True)
        return weights

    @property
    def pool(self):
        """Labels of the loss: those of the classifier where there is one."""
        clf = self.batch.clf
        if self.trainer.model.heads == "de":
            return self.batch.pool.pool_S
        if clf.ids is None:
            return np.arange(self.trainer.model.num_labels)
        return clf.ids.numpy()

    def texts(self):
        """Rows of tokens, queries of the batch and then labels that a dual encoder encodes."""
        rows = self.batch.pool.rows_B
        num_queries = self.dataset.num_queries
        parts = [
            (self.query_tokens, rows[rows < num_queries]),
            (self.label_tokens, rows[rows >= num_queries] - num_queries),
        ]
        if self.trainer.model.heads != "clf":
            parts.append((self.label_tokens, self.batch.pool.pool_S))
        texts = []
        for tokens, some in parts:
            flat, offsets = tokens.ragged(some)
            for begin, end in pairwise(offsets):
                texts.append(flat[begin:end].astype(np.int64))
        return texts

    def expected(self):
        """The rule's weights after its step, by name."""
        from transformers import AutoModel

        rule = self.rule
        model = AutoModel.from_pretrained(self.transformer).double().train()
        names = {}
        for name, parameter in model.named_parameters():
            names[f"encoder.transformer.transformer.{name}"] = parameter
        for name, parameter in names.items():
            parameter.data.copy_(self.before[name])
        heads = {n: self.before[n].clone() for n in self.before if n.startswith("head_")}
        pool = torch.from_numpy(self.pool)
        if "table" in self.before:
            heads["table"] = self.before["table"][pool].clone()
        for weight in heads.values():
            weight.requires_grad_()
        vectors = []
        for ids in self.texts():
            text = torch.from_numpy(ids)[None]
            token_vectors = model(input_ids=text).last_hidden_state[0]
            is_cls = rule.pooling == "cls"
            vectors.append(token_vectors[0] if is_cls else token_vectors.mean(0))
        loss = rule.loss(
            Step(
                vectors=torch.stack(vectors),
                num_queries=len(self.batch.pool.rows_B),
                y=self.true_pairs(),
                picked=self.picked(),
                weights=heads,
            )
        )
        leaves = names | heads
        loss.backward()
        factor = self.trainer.optimisers.factor(0)
        rates = dict(zip(PARTS, rule.rates, strict=True))
        after = {}
        for name, weight in leaves.items():
            part = next(part for part in PARTS if name.startswith(part))
            old = weight.detach()
            grad = torch.zeros_like(old) if weight.grad is None else weight.grad
            after[name] = self.updated(part, old, grad, rates[part] * factor)
        if "table" in after:
            rows = after["table"]
            after["table"] = self.before["table"].clone()
            after["table"][pool] = rows
        return after

    def updated(self, part, weight, grad, rate):
        rule = self.rule
        if part == "table" and rule.psi == "momentum":  # the velocity starts as the gradient
            return weight - rate * (grad + rule.psi_decay * weight)
        decays = part != "table" and weight.ndim > 1
        decayed = weight * (1 - rate * rule.decay) if decays else weight
        eps = 1e-8 if part == "table" else rule.eps
        return decayed - rate * grad / (grad.abs() + eps)

    def true_pairs(self):
        """Of the batch's queries and the pool's labels, bool; a label's text has itself."""
        rows = self.batch.pool.rows_B
        of_queries = self.dataset.relevance.toarray() > 0
        of_labels = np.eye(self.dataset.num_labels, dtype=bool)
        truth = np.concatenate([of_queries, of_labels])
        return torch.from_numpy(truth[rows][:, self.pool])

    def picked(self):
        """The place of each query's first sampled positive in the pool."""
        pool = self.batch.pool
        places = np.full(len(pool.rows_B), -1)
        sampled = pool.sampled_P
        places[pool.positive_row_P[sampled]] = pool.positive_col_P[sampled]
        return torch.from_numpy(places)

    def change(self, prefix):
        """(computed, expected) changes of the weights whose names have a prefix."""
        expected = self.expected()
        changes = ([], [])
        for name in expected:
            if name.startswith(prefix):
                old = self.before[name]
                changes[0].append((self.after[name] - old).flatten())
                changes[1].append((expected[name] - old).flatten())
        return [torch.cat(each) for each in changes]


def ratio_and_cosine(changes):
    """Of the norms of two changes, and of their directions."""
    computed, expected = changes
    assert expected.norm() > 0
    ratio = computed.norm() / expected.norm()
    cosine = F.cosine_similarity(computed, expected, dim=0)
    return float(ratio), float(cosine)


@pytest.fixture(scope="module")
def published(benchmark_module):
    return benchmark_module("published")


@pytest.fixture
def first_update(published, data, transformer, tmp_path, monkeypatch):
    for place in ("torch.nn.functional", "unidec.model.dropout", "unidec.training.objective"):
        monkeypatch.setattr(f"{place}.dropout", dropped)
    return lambda rule, **changed: FirstUpdate(
        rule, published, data, transformer, tmp_path, **changed
    )


@pytest.mark.parametrize("rule", RULES, ids=name_of)
def test_the_first_update_is_that_of_the_official_rule(rule, first_update):
    step = first_update(rule)
    for part, rate in zip(PARTS, rule.rates, strict=True):
        names = [name for name in step.before if name.startswith(part)]
        if rate > 0 and names:
            ratio, cosine = ratio_and_cosine(step.change(part))
            assert ratio == pytest.approx(1, rel=0.01), part
            assert cosine > 0.995, part
        else:
            assert all(torch.equal(step.before[n], step.after[n]) for n in names), part


@pytest.mark.parametrize("rule", RULES, ids=name_of)
def test_the_warm_up_has_the_published_number_of_steps(rule, published):
    params = published.resolve(rule.data_set, rule.method)
    batch = params.pool.batch_size
    # published code has N / batch steps in an epoch, and N / 2^depth queries in UniDEC's batches
    steps = rule.rows / batch
    if rule.method.startswith(("unidec", "depsl")):
        steps = steps_an_epoch(params.pool, rule.rows)
    found = params.optim.warmup_epochs * steps
    assert found == pytest.approx(rule.warm_up, rel=0.03)


def rule_of(method, data_set="LF-AmazonTitles-131K"):
    return next(rule for rule in RULES if name_of(rule) == f"{method} on {data_set}")


def test_it_finds_a_mean_a_temperature_and_clipping(first_update):
    """What Renee's settings were."""
    step = first_update(
        rule_of("renee"),
        **{"loss.bce_normalise": "rows", "optim.clip_norm": 1.0, "model.temperature": 1 / 18},
    )
    ratio, _ = ratio_and_cosine(step.change("table"))
    assert ratio < 0.01


@pytest.mark.parametrize("method", ["unidec-v1", "unidec-v2", "unidec-v2-bce"])
def test_it_finds_rows_without_dropout(first_update, method):
    """What UniDEC's settings were."""
    step = first_update(rule_of(method), **{"model.clf_dropout": 0.0})
    _, cosine = ratio_and_cosine(step.change("table"))
    assert cosine < 0.98


@pytest.mark.parametrize("method", ["unidec-v1", "unidec-v2", "unidec-v2-bce", "depsl"])
def test_it_starts_with_positives_alone_in_random_batches(published, first_update, method):
    step = first_update(rule_of(method))
    assert step.params.pool.start_epoch == 5
    assert step.trainer.made.negatives is None
    sizes = np.diff(step.trainer.made.offsets)
    assert sizes.max() == 1
    assert bool(step.true_pairs().any(0).all()), "every label of the pool is a query's"
    early = first_update(rule_of(method), **{"pool.start_epoch": 0})
    assert early.trainer.made.negatives is not None
