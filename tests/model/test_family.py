"""Each system's loss as its paper writes it, in dense float64 loops, against what a step of its
recipe computes (in float32, as always): value and gradient to the encoder's outputs and to the
classifier's rows.

What is compared is the whole path of a recipe: its parameters, the pool drawn for it, `Objective`
with heads, both directions and weights. The formulas here know of a pool only its labels, whatever
the code does to be fast.

Legend: B queries, S labels of the pool, L all labels, W width of the encoder.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import golden

from unidec.config import recipe_names
from unidec.training.trainer import Trainer, TrainingData

TAU = 1 / 18
CPU_TAU = 0.03
DEXML_TAU = 0.05


# -- the papers' formulas: s scores, y true pairs, skip filter pairs, picked the sampled positives,
# all [B, S] ---------


def average(terms):
    """[their mean]; [] without any."""
    return [sum(terms) / len(terms)] if terms else []


def mean(rows, zero):
    """Over the queries that have a positive."""
    (found,) = average(rows) or [zero.sum() * 0]
    return found


def log_sum(terms):
    """log of the sum of e^term."""
    return torch.logsumexp(torch.stack(terms), 0)


def supcon(s, y, skip):
    """Mean over i of 1/|P_i| sum over p of -log e^s_ip / sum over all l of e^s_il (v1)."""
    rows = []
    for i in range(len(s)):
        seen = list(s[i, ~skip[i]])
        rows += average([log_sum(seen) - s[i, p] for p in np.flatnonzero(y[i])])
    return mean(rows, s)


def decoupled(s, y, skip, carries=None):
    """Mean over i of 1/|P_i| sum over p of -log e^s_ip / (e^s_ip + sum over negatives n of e^s_in)
    (v2, DEXML).

    carries: the positives that have a loss; all of them are left out of the denominators.
    """
    carries = y if carries is None else carries
    rows = []
    for i in range(len(s)):
        negatives = list(s[i, ~(skip[i] | y[i])])
        positives = list(s[i, carries[i]])
        rows += average([log_sum([s_p, *negatives]) - s_p for s_p in positives])
    return mean(rows, s)


def both_ways(loss, s, y, skip):
    """Half query to label, half label to query."""
    return (loss(s, y, skip) + loss(s.T, y.T, skip.T)) / 2


def infonce(s, picked, skip):
    """Cross entropy with the sampled positive as the class (DPR, ANCE)."""
    rows = []
    for i in range(len(s)):
        seen = list(s[i, ~skip[i]])
        rows += [log_sum(seen) - s[i, p] for p in np.flatnonzero(picked[i])]
    return mean(rows, s)


def triplet_hardest(cosine, y, skip, picked, margin):
    """[highest cosine of a negative - cosine of the picked positive + margin]_+ (NGAME), mean over
    those picked.
    """
    rows = []
    for i in range(len(cosine)):
        negatives = cosine[i][~(skip[i] | y[i])]
        hardest = negatives.max() if len(negatives) else cosine[i].detach().min() - 9
        hinges = [
            torch.clamp(hardest - positive + margin, min=0) for positive in cosine[i, picked[i]]
        ]
        rows += average(hinges)
    return mean(rows, cosine)


def triplet_softmax(cosine, y, skip, picked, margin, top):
    """Mean over the `top` hardest negatives of their hinges times a softmax of cosine / 0.1, 0
    where the hinge is 0 (NGAME's published code); a negative that the pool lacks has hinge 0.
    """
    rows = []
    for i in range(len(cosine)):
        negatives = cosine[i][~(skip[i] | y[i])]
        hardest = sorted(negatives, key=lambda s: -s.item())[:top]
        num_missing = min(top, cosine.shape[1]) - len(hardest)
        terms = []
        for positive in cosine[i, picked[i]]:
            hinges = [torch.clamp(s - positive + margin, min=0) for s in hardest]
            scores = [s / 0.1 if h > 0 else s * 0 for s, h in zip(hardest, hinges, strict=True)]
            scores += [cosine.new_zeros(())] * num_missing
            shares = torch.softmax(torch.stack(scores), 0)
            weighted = [h * w for h, w in zip(hinges, shares, strict=False)]
            terms.append(sum(weighted, cosine.sum() * 0) / top)
        rows += average(terms)
    return mean(rows, cosine)


def soft_topk(s, y, skip, k):
    """Mean over i of 1/|P_i| sum over p of -log sigmoid(s_ip + t_i), sum over l of sigmoid(s_il +
    t_i) = k (DEXML).
    """
    rows = []
    for i in range(len(s)):
        seen = s[i][~skip[i]]
        low = -seen.max().item() - 40.0
        high = -seen.min().item() + 40.0
        for _ in range(100):
            t = (low + high) / 2
            if torch.sigmoid(seen.detach() + t).sum() < k:
                low = t
            else:
                high = t
        p = torch.sigmoid(seen + low)
        slope = (p * (1 - p)).sum().detach()
        t = low - (p.sum() - k) / slope  # no step, but the root's derivative
        rows += average([-F.logsigmoid(s[i, j] + t) for j in np.flatnonzero(y[i])])
    return mean(rows, s)


def ova(s, target, skip):
    """Mean over i of the sum over l of the binary cross entropy (Renee, NGAME's and SiameseXML's
    classifiers).
    """
    rows = []
    for i in np.flatnonzero((target > 0).any(1)):
        seen = np.flatnonzero(~skip[i])
        yes = F.logsigmoid(s[i, seen])
        no = F.logsigmoid(-s[i, seen])
        share = torch.from_numpy(target[i, seen])
        rows.append(-(share * yes + (1 - share) * no).sum())
    return mean(rows, s)


# -- the systems
# --------------------------------------------------------------------------------------------------


def of_both_heads(loss, c):
    """Half by the bi-encoder's scores, half by the classifier's, both ways."""
    de = both_ways(loss, c.de / TAU, *c.pool)
    clf = both_ways(loss, c.clf / TAU, *c.pool)
    return (de + clf) / 2


def of_classifier(c):
    """DEXML's loss by the classifier's scores, both ways."""
    return both_ways(decoupled, c.clf / TAU, *c.pool)


def unidec_v2(c):
    return of_both_heads(decoupled, c)


def ova_entries(s, y, skip):
    """The mean over entries instead of the sum over a query's."""
    active = y.any(1)
    entries = (~skip[active]).sum()
    return ova(s, y.astype(float), skip) * active.sum() / entries


def unidec_v2_bce(c):
    return unidec_v2(c) + ova_entries(c.clf / TAU, *c.pool) / 2


def unidec_v1(c):
    return of_both_heads(supcon, c)


def unidec_cpu(c, tau=TAU):
    """Both heads; the classifier over all labels, query to label only."""
    de = both_ways(decoupled, c.de / tau, *c.pool)
    clf = decoupled(c.clf / tau, *c.every)
    return (de + clf) / 2


def taught(c):
    """UniDEC's loss, and for each head the mean over queries of sum_l p_l log(p_l / q_l): p of the
    teacher, q of the head, over the labels of its pool but ignored ones.
    """
    teacher = c.trainer.batches.methods.score_losses[0].vectors
    pools = [(c.de, c.batch.pool.pool_S, c.pool[1])]
    pools += [(c.clf, np.arange(c.trainer.dataset.num_labels), c.every[1])]
    divergences = []
    for score, labels, skip in pools:
        for i, row in enumerate(c.batch.pool.rows_B):
            seen = np.flatnonzero(~skip[i])
            query = torch.from_numpy(teacher.query_nE[row].astype(np.float64))
            theirs = torch.stack(
                [query @ torch.from_numpy(teacher.of_labels(label)).double() for label in labels]
            )
            p = torch.softmax(theirs[seen] / TAU, 0)
            q = torch.softmax(score[i, seen] / CPU_TAU, 0)
            divergences.append((p * (p.log() - q.log())).sum())
    return unidec_cpu(c, CPU_TAU) + torch.stack(divergences).sum() / len(c.batch.pool.rows_B) / 2


def matryoshka(c):
    """The sum over widths m of UniDEC's loss on the first m entries of the heads' vectors, those of
    the bi-encoder of unit length (Matryoshka, equation 1).
    """
    losses = [unidec_cpu(c)]
    for m in (4, 8):
        query, label = (F.normalize(x[:, :m], dim=1) for x in c.de_heads)
        x, psi = c.clf_heads
        c.de = query @ label.T
        c.clf = x[:, :m] @ psi[:, :m].T
        losses.append(unidec_cpu(c))
    return sum(losses)


def siamesexml(c):
    """Triplet with the hardest negative, every positive, both ways, on both heads."""
    triplets = [
        both_ways(lambda s, y, skip: triplet_hardest(s, y, skip, y, margin=0.3), s, *c.pool)
        for s in (c.de, c.clf)
    ]
    return sum(triplets) / 2


def mixed(c):
    """Each head's loss of the query's own labels times the share, and of its partner's times the
    rest (mixup).
    """
    own = unidec_v2(c)
    y, skip = c.pool
    c.pool = (y[c.partner], skip[c.partner])
    other = unidec_v2(c)
    c.pool = (y, skip)
    return c.share * own + (1 - c.share) * other


def depsl_words(c):
    """DePSL's loss, and half the mean over queries of -sum_l p_l log q_l: p by words, with the sum
    1 over the pool but ignored labels, q of the dual encoder.
    """
    targets = c.trainer.batches.methods.score_losses[0].targets
    labels = c.batch.pool.pool_S
    score = c.de / 0.02
    cross_entropies = []
    for i, row in enumerate(c.batch.pool.rows_B):
        place = targets.rows_n.tolist().index(row)
        p = targets.probability_nL[place].toarray()[0, labels].astype(np.float64)
        seen = np.flatnonzero(~c.pool[1][i])
        total = log_sum(list(score[i, seen]))
        sum_p = max(p[seen].sum(), 1e-12)
        cross_entropies.append(sum(p[j] / sum_p * (total - score[i, j]) for j in seen))
    mean = sum(cross_entropies) / len(cross_entropies)
    return both_ways(decoupled, score, *c.pool) + 0.5 * mean


FORMULAS = {
    "mixup": mixed,
    "label-mixup": unidec_v2,
    "decaf": of_classifier,
    "unidec": lambda c: unidec_cpu(c, CPU_TAU),
    "unidec-long": unidec_cpu,
    "unidec-taught": taught,
    "unidec-matryoshka": matryoshka,
    "unidec-v2": unidec_v2,
    "unidec-v2-bce": unidec_v2_bce,
    "unidec-gpu": lambda c: unidec_cpu(c, 0.02),
    "unidec-gpu-paper": unidec_v2_bce,
    "unidec-gpu-long": unidec_v2_bce,
    "unidec-v1": unidec_v1,
    "astec-surrogate": lambda c: decoupled(c.clf / TAU, *c.every),
    "astec": of_classifier,
    "eclare": of_classifier,
    "cascadexml": lambda c: (
        both_ways(decoupled, c.clf / TAU, *c.pool)
        + sum(decoupled(s / TAU, *rest) for s, *rest in c.levels)
    ),
    "graphsage": of_classifier,
    "inceptionxml": lambda c: decoupled(c.clf / TAU, *c.every),
    "inceptionxml-lf": of_classifier,
    "depsl": lambda c: both_ways(decoupled, c.de / 0.02, *c.pool),
    "depsl-words": depsl_words,
    "depsl-gpu-query2bid": lambda c: decoupled(c.de / TAU, *c.pool),
    "supconde": lambda c: both_ways(supcon, c.de / TAU, *c.pool),
    "dpr": lambda c: infonce(c.de / TAU, c.picked, c.pool[1]),
    "simcse": lambda c: infonce(c.de / DEXML_TAU, *c.pool),
    "ance": lambda c: infonce(c.de / TAU, c.picked, c.pool[1]),
    "ngame": lambda c: triplet_softmax(c.de, *c.pool, c.picked, margin=0.3, top=10),
    "dexa": lambda c: triplet_softmax(c.de, *c.pool, c.picked, margin=0.3, top=10),
    "ngame-classifier": lambda c: triplet_softmax(c.clf, *c.pool, c.pool[0], margin=0.2, top=3),
    "siamesexml": siamesexml,
    "dexml": lambda c: decoupled(c.de / DEXML_TAU, *c.pool, carries=c.picked),
    "dexml-all": lambda c: decoupled(c.de / DEXML_TAU, *c.every),
    "dexml-topk": lambda c: soft_topk(c.de / DEXML_TAU, *c.every, k=5),
    "renee": lambda c: ova(c.clf / TAU, c.soft, c.every[1]),
}
ALL_LABELS = {"dexml-all", "dexml-topk"}  # of the dual encoder


def linear(layer, x):
    return x @ layer.weight.detach().double().T + layer.bias.detach().double()


class Case:
    """One batch of a recipe on the tiny set, its encoder's outputs drawn at random."""

    def __init__(self, recipe, dataset, tokens, transformer, folder, rng):
        folder.mkdir(exist_ok=True)
        still = {"model.dropout": 0.0, "model.clf_dropout": 0.0}
        params = golden.small(recipe, transformer, folder, **still)
        graph = golden.label_graph(params, dataset) if params.reads_label_graph else None
        torch.manual_seed(int(rng.integers(2**31)))
        trainer = Trainer(
            params.training,
            TrainingData(dataset, *tokens.values(), graph, golden.teacher(params, dataset)),
            folder / "run",
            folder / "cache",
        )
        model = self.model = trainer.model.train()
        self.trainer = trainer
        self.params = params
        self.tree_of = getattr(model, "tree", None)
        names = ("gates", "related_gate", "auxiliary")
        gates = [getattr(model, name) for name in names if hasattr(model, name)]
        gates += [] if self.tree_of is None else list(self.tree_of.parameters())
        if model.head_query is not None:  # no copy of the labels' any more
            gates.append(model.head_query[0].weight)
        for weight in [table.weight for table in model.tables().values()] + gates:
            torch.nn.init.normal_(weight, std=0.3)
        relevance = dataset.relevance.toarray() > 0
        filtered = dataset.filter_pairs.toarray()
        mined = np.flatnonzero((filtered & ~relevance).any(1) & (dataset.split_N == 0))
        rows = np.concatenate([mined[:4], np.setdiff1d(trainer.rows[:9], mined)])
        target = relevance.astype(np.float32)
        self.graph = None if graph is None else graph.toarray()
        if params.pool.gandalf:  # some label texts too
            rows = np.concatenate([rows, dataset.num_queries + np.array([0, 5, 11])])
            target = np.concatenate([target, graph.toarray()])
            filtered = np.concatenate([filtered, np.zeros((dataset.num_labels,) * 2, bool)])
        if params.pool.simcse:  # texts of queries and labels, among them such as are filtered pairs
            num_queries, num_labels = filtered.shape
            rows = np.concatenate([rows, num_queries + filtered[rows[:4]].argmax(1)])
            target = np.eye(num_queries + num_labels, dtype=np.float32)
            filtered = np.block(
                [
                    [np.zeros((num_queries,) * 2, bool), filtered],
                    [filtered.T, np.zeros((num_labels,) * 2, bool)],
                ]
            )
        if params.model.surrogate:  # labels are clusters
            member = np.eye(model.table.num_rows)[model.label_cluster.numpy()]
            target = (target @ member > 0).astype(np.float32)
            filtered = filtered @ member > 0
        self.of_level = []  # true and filter pairs of the clusters
        for count in [] if self.tree_of is None else self.tree_of.counts:
            member = np.eye(count, dtype=bool)[
                model.label_cluster.numpy() * count // self.tree_of.counts[-1]
            ]
            self.of_level.append(((target > 0) @ member, (filtered > 0) @ member))
        hard = rng.integers(0, dataset.num_labels, (len(target), 6)).astype(np.int32)
        self.batch = trainer.batches.prepare(rows, 0, 0, hard)
        own = self.batch.counts.own_queries
        pool = self.batch.pool.pool_S
        self.soft = target[self.batch.pool.rows_B]
        y = self.soft > 0
        skip = filtered[self.batch.pool.rows_B] & (self.soft == 0)
        self.every = (y, skip)
        self.pool = (y[:, pool], skip[:, pool])
        self.picked = np.zeros_like(self.pool[0])
        pairs = np.zeros_like(self.picked)
        t = self.batch.targets
        pairs[t.row_P, t.col_P] = True
        assert (pairs == self.pool[0]).all()
        self.picked[t.row_P, t.col_P] = t.sampled_P.numpy()
        texts = self.batch.texts.num_texts  # queries, labels, queries of the labels
        assert texts > own if model.heads != "clf" or params.model.clf_residual else texts == own
        self.x = torch.from_numpy(rng.normal(size=(texts, model.encoder.width)))
        self.own = own

    def computed(self):
        """The recipe's loss, gradients to the encoder's outputs and to the classifier's rows."""
        x = self.x.float().requires_grad_()
        loss = sum(self.trainer.objective.losses(x, self.batch, 0).values())
        leaves = [x] + ([self.model.table.used[1]] if self.model.table is not None else [])
        leaves += [self.model.auxiliary] if hasattr(self.model, "auxiliary") else []
        leaves += [] if self.tree_of is None else list(self.tree_of.parameters())
        grads = torch.autograd.grad(loss, leaves)
        for table in self.model.tables().values():
            table.forget()
        return loss.detach().double(), [grad.double() for grad in grads]

    def written(self, formula):
        """The same by a formula on scores that are made here."""
        model = self.model
        leaf = self.x.clone().requires_grad_()
        rows = None
        labels = self.batch.clf.ids
        x = self.mixed(leaf)
        if model.head_de is not None:
            vectors = torch.tanh(linear(model.head_de[0], x))
            if model.head_query is not None:
                query = torch.tanh(linear(model.head_query[0], x[: self.own]))
                vectors = torch.cat([query, vectors[self.own :]])
            if hasattr(model, "auxiliary"):
                rows = model.auxiliary.detach().double().requires_grad_()
                pool = self.batch.pool.pool_S
                added = [rows[int(model.label_cluster[label])] for label in pool]
                vectors = vectors + torch.stack([torch.zeros_like(rows[0])] * self.own + added)
            self.de_heads = (vectors[: self.own], vectors[self.own :])
            vectors = F.normalize(vectors, dim=1)
            self.de = vectors[: self.own] @ vectors[self.own :].T
        if model.table is not None:
            weight = model.table.weight.detach().double()
            rows = (weight if labels is None else weight[labels]).clone().requires_grad_()
            psi = rows
            if self.params.model.clf_residual:
                texts = F.normalize(linear(model.head_clf[0], x[self.own :]), dim=1)
                free = rows
                text = texts[: len(rows)]
                related = self.related(texts)
                if hasattr(model, "gates"):
                    gates = 2 / (1 + torch.exp(-model.gates.detach().double()))
                    half = len(gates) // 2
                    text = text * gates[:half]
                    free = rows * gates[half:]
                psi = text + free + related
            self.clf_heads = (linear(model.head_clf[0], x[: self.own]), psi)
            self.clf = self.clf_heads[0] @ psi.T
            if model.bias is not None:
                self.clf = (
                    self.clf
                    + model.bias.weight.detach()
                    .double()[slice(None) if labels is None else labels]
                    .T
                )
        tree = [] if self.tree_of is None else self.tree(leaf)
        loss = formula(self)
        return loss.detach(), torch.autograd.grad(
            loss, [leaf, *([] if rows is None else [rows]), *tree]
        )

    def tree(self, x):
        """Each level's scores, true pairs, and pairs that take no part: filter pairs, and clusters
        whose parents are neither among the two of highest score nor have a positive; gives the
        tree's weights.
        """
        weights = {
            name: p.detach().double().requires_grad_()
            for name, p in self.tree_of.named_parameters()
        }
        self.levels = []
        kept = None
        for level, pairs in enumerate(self.of_level):
            y, skip = (each[self.batch.pool.rows_B] for each in pairs)
            a, b, w, c = (
                weights[f"{part}.{level}.{name}"]
                for part in ("layers", "classifiers")
                for name in ("weight", "bias")
            )
            s = (x[: self.own] + F.gelu(x[: self.own] @ a.T + b)) @ w.T + c
            hidden = (
                np.zeros_like(y)
                if kept is None
                else ~np.repeat(kept, y.shape[1] // kept.shape[1], axis=1)
            )
            kept = y.copy()
            for i in range(len(y)):
                order = np.argsort(np.where(hidden[i], -np.inf, s.detach().numpy()[i]))
                kept[i, order[-self.params.pool.shortlist :]] = True
            self.levels.append((s, y, (skip & ~y) | hidden))
        return list(weights.values())

    def related(self, text):
        """Texts of the labels of the pool that are related to each, times how much, or of the
        queries that were drawn for it, at unit length; times the gate.
        """
        pool = self.batch.pool.pool_S
        rows = []
        if not hasattr(self.model, "related_gate"):
            return torch.zeros_like(text)
        if self.params.model.clf_queries:
            pairs = self.batch.added["rows"].related
            drawn = list(zip(pairs.label_E.tolist(), pairs.text_E.tolist(), strict=True))
            for i in range(len(pool)):
                queries = [text[len(pool) + place] for label, place in drawn if label == i]
                rows.append(
                    F.normalize(sum(queries), dim=0) if queries else torch.zeros_like(text[0])
                )
            assert 0 < sum(row.norm() > 0 for row in rows) < len(rows) or len(drawn) > len(rows)
            return torch.stack(rows) * self.model.related_gate.detach().double()
        for i, label in enumerate(pool):
            others = [self.graph[label, other] * text[j] for j, other in enumerate(pool) if j != i]
            rows.append(F.normalize(sum(others), dim=0))
        return torch.stack(rows) * self.model.related_gate.detach().double()

    def mixed(self, x):
        """The encoder's outputs with the step's queries mixed, one by one, as the share and
        partners were drawn.
        """
        loss = self.params.loss
        t = self.batch.targets
        if loss.mixup == "none":
            return x
        draw = np.random.default_rng((self.params.seed, 0, 0, 0x6D6978))
        self.share = draw.beta(loss.mixup_alpha, loss.mixup_alpha)
        if loss.mixup == "queries":
            self.partner = draw.permutation(self.own)
            others = [x[self.partner[i]] for i in range(self.own)]
        else:
            order = draw.permutation(np.flatnonzero(t.sampled_P.numpy()))
            picked = {int(t.row_P[pair]): int(t.col_P[pair]) for pair in order}
            assert 0 < len(picked) <= self.own
            others = [x[self.own + picked[i]] if i in picked else x[i] for i in range(self.own)]
        own = x[: self.own]
        queries = [self.share * q + (1 - self.share) * r for q, r in zip(own, others, strict=True)]
        return torch.cat([torch.stack(queries), x[self.own :]])


def test_every_recipe_has_a_formula():
    assert sorted(FORMULAS) == recipe_names()


@pytest.mark.parametrize("recipe", FORMULAS)
def test_a_recipes_loss_and_gradients_equal_the_papers_formula(
    recipe, tiny_dataset, tiny_tokens, tiny_bert, tmp_path, rng
):
    case = Case(recipe, tiny_dataset, tiny_tokens, tiny_bert, tmp_path / "case", rng)
    loss, grads = case.computed()
    expected, expected_grads = case.written(FORMULAS[recipe])
    assert expected.dtype == torch.float64 and expected > 0.01
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    for grad, other in zip(grads, expected_grads, strict=True):
        largest = other.abs().max().item()
        assert largest > 1e-6
        torch.testing.assert_close(grad, other, rtol=1e-4, atol=1e-5 * largest)
    # a recipe's batch is what its formula is about
    assert (len(case.batch.pool.pool_S) == tiny_dataset.num_labels) == (recipe in ALL_LABELS)
    # a filter pair lies in the pool
    assert case.pool[1].any() or recipe in ("dpr", "ngame", "dexa")
    if case.params.loss.reduction == "pol":
        assert (case.picked.sum(1) == 1).all()


@pytest.mark.parametrize(
    ("recipe", "other"),
    [
        ("unidec-v2", "unidec-v1"),
        ("unidec-v2-bce", "unidec-v2"),
        ("depsl", "supconde"),
        ("dexml", "ance"),
        ("dexml", "depsl"),
        ("dexml-topk", "dexml-all"),
        ("siamesexml", "unidec-v2"),
    ],
)
def test_the_formulas_tell_systems_apart(
    recipe, other, tiny_dataset, tiny_tokens, tiny_bert, tmp_path, rng
):
    case = Case(recipe, tiny_dataset, tiny_tokens, tiny_bert, tmp_path / "case", rng)
    own, foreign = (case.written(FORMULAS[name])[0].item() for name in (recipe, other))
    assert abs(own - foreign) > 1e-3 * own
