"""Losses against double loops over (query, positive) in float64, values and gradients, and their
degenerate cases.
"""

import doctest
from typing import get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.sparse import csr_matrix

from unidec.config import Loss
from unidec.model.losses import (
    ENTRYWISE,
    LOSSES,
    UNSCALED,
    bce,
    decoupled_softmax,
    loss_options,
    supcon,
    symmetric_loss,
    triplet,
)
from unidec.model.pairs import Pairs, PoolTargets, to_device

REDUCTIONS = get_args(Loss.model_fields["reduction"].annotation)
# name of the case -> (loss, options)
VARIANTS = {
    "ds": ("ds", {}),
    "supcon": ("supcon", {}),
    "infonce": ("infonce", {}),
    "triplet-all": ("triplet", {"margin": 0.7}),
    "triplet-hardest": ("triplet", {"margin": 0.7, "negatives": "hardest"}),
    "triplet-three-hardest": ("triplet", {"margin": 0.7, "negatives": "hardest", "top": 3}),
    "triplet-softmax": ("triplet", {"margin": 0.7, "negatives": "softmax", "top": 4}),
    "triplet-pairs": ("triplet", {"margin": 0.7, "top": 4, "positives": 3}),
    "bce-rows": ("bce", {}),
    "bce-entries": ("bce", {"normalise": "entries"}),
    "bce-sum": ("bce", {"normalise": "sum"}),
    "hinge-rows": ("hinge", {"margin": 0.8}),
    "hinge-entries": ("hinge", {"margin": 1.5, "normalise": "entries"}),
    "softtopk": ("softtopk", {"topk": 2}),
}


class Case:
    """A dense problem (float64 logits, bool positives and ignored pairs, weights) and its sparse
    form.
    """

    def __init__(self, logit, positive, ignored, weight, rng):
        self.logit = torch.as_tensor(logit, dtype=torch.float64)
        self.positive = positive
        self.ignored = ignored & ~positive
        self.weight = weight * positive
        row, col = np.nonzero(self.positive)
        order = rng.permutation(len(row))  # the losses take pairs in any order
        self.row = torch.from_numpy(row[order])
        self.col = torch.from_numpy(col[order])
        self.weight_P = torch.from_numpy(self.weight[row[order], col[order]])
        self.ignored_row, self.ignored_col = map(torch.from_numpy, np.nonzero(self.ignored))

    def pairs(self):
        return Pairs(self.row, self.col, self.weight_P, self.ignored_row, self.ignored_col)

    def targets(self, rng, soft=False, extra=0, importance_L=None):
        sampled = torch.from_numpy(rng.random(len(self.row)) < 0.6)
        counts = torch.from_numpy(self.positive.sum(1)) + extra
        relevance = self.weight_P if soft else torch.ones(len(self.row))
        importance = None if importance_L is None else torch.from_numpy(importance_L)[self.col]
        return PoolTargets(
            self.row,
            self.col,
            sampled,
            relevance,
            counts,
            self.ignored_row,
            self.ignored_col,
            importance,
        )


def random_case(rng, num_rows=6, num_cols=11, scale=4.0):
    positive = rng.random((num_rows, num_cols)) < 0.3
    ignored = rng.random((num_rows, num_cols)) < 0.15
    weight = rng.random((num_rows, num_cols))
    return Case(rng.normal(size=(num_rows, num_cols)) * scale, positive, ignored, weight, rng)


def degenerate_cases(rng):
    def case(logit, positive, ignored=None):
        positive = np.asarray(positive, dtype=bool)
        ignored = np.zeros_like(positive) if ignored is None else np.asarray(ignored, dtype=bool)
        return Case(logit, positive, ignored, rng.random(positive.shape) + 0.1, rng)

    some = rng.random((4, 7)) < 0.4
    no_row = some.copy()
    all_row = some.copy()
    no_row[2] = False
    all_row[1] = True
    return {
        "a row without positives": case(rng.normal(size=(4, 7)), no_row),
        "a row of positives only": case(rng.normal(size=(4, 7)), all_row),
        "all positive": case(rng.normal(size=(3, 5)), np.ones((3, 5))),
        "no positives": case(rng.normal(size=(3, 5)), np.zeros((3, 5))),
        "one label, positive": case(rng.normal(size=(3, 1)), [[1], [0], [1]]),
        "one query": case(rng.normal(size=(1, 6)), [[0, 1, 0, 0, 1, 0]]),
        "one entry": case([[2.0]], [[1]]),
        "positives and ignored only": case(
            rng.normal(size=(2, 4)), [[1, 0, 1, 0], [0, 1, 0, 0]], [[0, 1, 0, 1]] * 2
        ),
        "all ignored but positives": case(rng.normal(size=(2, 3)), np.eye(2, 3), np.ones((2, 3))),
        "duplicated logits": case(np.full((3, 6), 1.5), np.eye(3, 6)),
        "huge logits": case(
            rng.choice([-1e4, 1e4, 0.0, 9999.0], size=(5, 8)), rng.random((5, 8)) < 0.4
        ),
        "row weight zero": case(rng.normal(size=(3, 4)), np.eye(3, 4)),
    }


DEGENERATE = list(degenerate_cases(np.random.default_rng(0)))


def slow_threshold(x, k):
    """t with sum of sigmoid(x + t) = k by bisection, then one Newton step that autograd follows; x:
    the row's entries.

    The step does not move t, and its derivative is that of the implicit function.
    """
    low = -x.max().item() - 50.0
    high = -x.min().item() + 50.0
    for _ in range(80):
        middle = (low + high) / 2
        if torch.sigmoid(x.detach() + middle).sum() < k:
            low = middle
        else:
            high = middle
    p = torch.sigmoid(x + low)
    slope = (p * (1 - p)).sum().detach()
    return low - (p.sum() - k) / slope


def loop_pair_loss(name, options, x_i, p, negatives, everything):
    s_p = x_i[p]
    zero = x_i.sum() * 0
    if name == "softtopk":
        if len(everything) <= options["topk"]:
            return zero
        return -F.logsigmoid(s_p + slow_threshold(x_i[everything], options["topk"]))
    if name == "ds":
        return torch.logsumexp(x_i[[p, *negatives]], 0) - s_p
    if name in ("supcon", "infonce"):
        return torch.logsumexp(x_i[everything], 0) - s_p
    margin = options["margin"]
    if options.get("negatives", "all") == "all":
        return sum((torch.clamp(s - s_p + margin, min=0) for s in x_i[negatives]), zero)
    top = options.get("top", 1)
    hardest = sorted(x_i[negatives], key=torch.Tensor.item, reverse=True)[:top]
    hinges = [torch.clamp(s - s_p + margin, min=0) for s in hardest]
    if options["negatives"] == "softmax":
        scores = [s / 0.1 if h > 0 else s * 0 for s, h in zip(hardest, hinges, strict=True)]
        # what is missing counts as one that keeps the margin
        num_missing = min(top, len(x_i)) - len(hardest)
        scores += [x_i.new_zeros(())] * num_missing
        shares = torch.stack(scores).softmax(0)
        hinges = [h * share for h, share in zip(hinges, shares, strict=False)]
    return sum(hinges, zero) / top


def loop_hardest_pairs(options, x_i, positives, negatives):
    """Mean over least similar positives and hardest negatives; what is missing counts as 0."""
    zero = x_i.sum() * 0
    hinges = []
    for p in sorted(positives, key=lambda p: x_i[p].item())[: options["positives"]]:
        hardest = sorted(x_i[negatives], key=torch.Tensor.item, reverse=True)[: options["top"]]
        of_p = [torch.clamp(s - x_i[p] + options["margin"], min=0) for s in hardest]
        lost = [h for h in of_p if h > 0]
        shares = torch.stack(lost).softmax(0) if lost else []
        hinges += [h * share for h, share in zip(lost, shares, strict=True)]
    return sum(hinges, zero) / (options["positives"] * options["top"])


def loop_loss(name, options, logit, positive, ignored, weight, importance_L=None):
    """The formulas of the docstrings, one pair at a time."""
    num_rows, num_cols = logit.shape
    total = logit.sum() * 0
    active = 0
    entries = 0
    for i in range(num_rows):
        if weight[i].sum() <= 0:
            continue
        active += 1
        everything = [n for n in range(num_cols) if not ignored[i, n]]
        negatives = [n for n in everything if not positive[i, n]]
        entries += len(everything)
        if name in ("bce", "hinge"):
            for n in everything:
                target = min(weight[i, n], 1.0)
                up = (
                    1.0
                    if importance_L is None
                    else np.broadcast_to(importance_L, logit.shape)[i, n]
                )
                if name == "bce":
                    yes = -F.logsigmoid(logit[i, n])
                    no = -F.logsigmoid(-logit[i, n])
                else:
                    yes = torch.clamp(options["margin"] - logit[i, n], min=0) ** 2
                    no = torch.clamp(options["margin"] + logit[i, n], min=0) ** 2
                total = total + up * target * yes + (1 - target) * no
        elif options.get("positives"):
            total = total + loop_hardest_pairs(
                options, logit[i], np.flatnonzero(positive[i]), negatives
            )
        else:
            for p in np.flatnonzero(positive[i]):
                total = total + weight[i, p] * loop_pair_loss(
                    name, options, logit[i], p, negatives, everything
                )
    divisor = {"entries": entries, "sum": 1}.get(options.get("normalise"), active)
    return total / max(divisor, 1)


def value_and_gradient(function, logit):
    leaf = logit.clone().requires_grad_()
    value = function(leaf)
    (gradient,) = torch.autograd.grad(value, leaf)
    return value.detach(), gradient


def assert_equals_loop(name, options, case, tolerance=1e-9):
    def fast(x):
        return LOSSES[name](x, case.pairs(), **options)

    def slow(x):
        return loop_loss(name, options, x, case.positive, case.ignored, case.weight)

    value, gradient = value_and_gradient(fast, case.logit)
    expected, expected_gradient = value_and_gradient(slow, case.logit)
    assert torch.isfinite(value) and torch.isfinite(gradient).all()
    torch.testing.assert_close(value, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(gradient, expected_gradient, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_a_double_loop(variant, rng):
    for shape in (
        (6, 11),
        (1, 9),
        (9, 3),
        (5, 5),
    ):
        assert_equals_loop(*VARIANTS[variant], random_case(rng, *shape))


@pytest.mark.parametrize("degenerate", DEGENERATE)
@pytest.mark.parametrize("variant", VARIANTS)
def test_degenerate_cases_equal_a_double_loop(variant, degenerate, rng):
    name, options = VARIANTS[variant]
    case = degenerate_cases(rng)[degenerate]
    if degenerate == "row weight zero":
        case.weight[1] = 0
        case.weight_P[case.row == 1] = 0
    # t is free between far entries, in the loops too
    if name == "softtopk" and degenerate == "huge logits":
        value, gradient = value_and_gradient(
            lambda x: LOSSES[name](x, case.pairs(), **options), case.logit
        )
        assert 0 <= value < 1e5 and torch.isfinite(gradient).all()
        return
    if name == "triplet" and degenerate in ("duplicated logits", "huge logits"):
        # A hinge between equal scores has no unique gradient when it is the hardest of several:
        # values only.
        value = LOSSES[name](case.logit, case.pairs(), **options)
        expected = loop_loss(name, options, case.logit, case.positive, case.ignored, case.weight)
        torch.testing.assert_close(value, expected)
        return
    assert_equals_loop(name, options, case)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradcheck(variant, rng):
    name, options = VARIANTS[variant]
    case = random_case(rng, scale=2.0)
    assert torch.autograd.gradcheck(
        lambda x: LOSSES[name](x, case.pairs(), **options), (case.logit.clone().requires_grad_(),)
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_to_learn_from_is_exactly_zero_with_a_graph(variant):
    name, options = VARIANTS[variant]
    none = torch.empty(0, dtype=torch.int64)
    for shape in ((3, 4), (3, 0), (0, 4)):
        logit = torch.randn(shape, requires_grad=True)
        loss = LOSSES[name](logit, Pairs(none, none, torch.empty(0), none, none), **options)
        assert loss.item() == 0 and loss.requires_grad
        loss.backward()
        assert logit.grad is not None and (logit.grad == 0).all()


def test_all_positive_pool_costs_nothing_under_decoupled_softmax():
    row, col = torch.ones(3, 5).nonzero(as_tuple=True)
    none = torch.empty(0, dtype=torch.int64)
    for scale in (1.0, 1e4):
        logit = (torch.randn(3, 5) * scale).requires_grad_()
        loss = decoupled_softmax(logit, Pairs(row, col, torch.ones(15), none, none))
        loss.backward()
        assert loss.item() == 0
        assert (logit.grad == 0).all()


def test_hand_computed_values():
    logit = torch.tensor([[2.0, 1.0, 0.0]])
    none = torch.empty(0, dtype=torch.int64)
    pairs = Pairs(torch.tensor([0, 0]), torch.tensor([0, 1]), torch.tensor([0.5, 0.5]), none, none)
    e = np.exp
    log = np.log
    of_first = log((e(2) + 1) / e(2))
    of_second = log((e(1) + 1) / e(1))
    decoupled = (of_first + of_second) / 2
    assert decoupled_softmax(logit, pairs).item() == pytest.approx(decoupled, rel=1e-6)
    coupled = log(e(2) + e(1) + 1) - 1.5
    assert supcon(logit, pairs).item() == pytest.approx(coupled, rel=1e-6)
    assert triplet(logit, pairs, margin=1.5).item() == pytest.approx(0.25, rel=1e-6)
    binary = log(1 + e(-2)) + log(1 + e(-1)) + log(2)
    ones = pairs._replace(weight_P=torch.ones(2))
    assert bce(logit, ones).item() == pytest.approx(binary, rel=1e-6)
    assert bce(logit, ones, normalise="entries").item() == pytest.approx(binary / 3, rel=1e-6)
    # The last label as a filter pair: no negative is left.
    ignoring = pairs._replace(row_F=torch.tensor([0]), col_F=torch.tensor([2]))
    assert decoupled_softmax(logit, ignoring).item() == 0


@pytest.mark.parametrize("variant", VARIANTS)
def test_ignored_pairs_get_no_gradient_and_change_nothing(variant, rng):
    name, options = VARIANTS[variant]
    cases = iter(lambda: random_case(rng), None)
    case = next(case for case in cases if case.ignored.any())
    mask = torch.from_numpy(case.ignored)
    value, gradient = value_and_gradient(
        lambda x: LOSSES[name](x, case.pairs(), **options), case.logit
    )
    moved, _ = value_and_gradient(
        lambda x: LOSSES[name](x, case.pairs(), **options), case.logit.masked_fill(mask, 50.0)
    )
    assert (gradient[mask] == 0).all()
    torch.testing.assert_close(moved, value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_lower_precision_is_computed_in_float32(variant, dtype, rng):
    name, options = VARIANTS[variant]
    case = random_case(rng, 8, 40)
    logit = case.logit.to(dtype)  # the same numbers for both
    value, gradient = value_and_gradient(lambda x: LOSSES[name](x, case.pairs(), **options), logit)
    expected, expected_gradient = value_and_gradient(
        lambda x: LOSSES[name](x, case.pairs(), **options), logit.double()
    )
    assert value.dtype == torch.float32 and gradient.dtype == dtype
    torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-6)
    loose = 2e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(
        gradient.double(),
        expected_gradient,
        rtol=loose * 10,
        atol=loose,
    )


@pytest.mark.parametrize("kind", list(LOSSES))
def test_under_bf16_autocast(kind, rng):
    case = random_case(rng, 8, 30)
    query = torch.randn(8, 16, requires_grad=True)
    label = torch.randn(30, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logit = F.normalize(query) @ F.normalize(label).T * 18
        assert logit.dtype == torch.bfloat16
        loss = symmetric_loss(
            kind, logit, case.targets(rng), reduction="psl", forward=direction(kind, 0.5)
        )
    assert loss.dtype == torch.float32
    loss.backward()
    assert torch.isfinite(query.grad).all()
    assert (query.grad != 0).any()


def loop_symmetric(
    kind, options, case, targets, reduction, forward, logit, importance_L=None, soft=False
):
    """Both directions with weights from loops."""
    if kind in ("bce", "hinge"):
        weight = case.weight if soft else case.positive.astype(float)
        if reduction == "pol":  # the positive terms of the others are 0
            picked = np.zeros(case.positive.shape)
            for i, p, sampled in zip(
                targets.row_P.tolist(),
                targets.col_P.tolist(),
                targets.sampled_P.tolist(),
                strict=True,
            ):
                picked[i, p] = sampled and not picked[i].any()
            importance_L = picked * (1 if importance_L is None else importance_L)
        return loop_loss(kind, options, logit, case.positive, case.ignored, weight, importance_L)
    relevance = case.weight if soft else case.positive.astype(float)
    pairs = list(
        zip(targets.row_P.tolist(), targets.col_P.tolist(), targets.sampled_P.tolist(), strict=True)
    )

    def weights(axis):
        weight = np.zeros_like(relevance)
        taken = set()
        for i, p, sampled in pairs:
            here = relevance[i].sum() if axis == 0 else relevance[:, p].sum()
            all_positives = (
                targets.num_positives_B[i].item() if axis == 0 else relevance[:, p].sum()
            )
            if reduction == "psl":
                weight[i, p] = relevance[i, p] / here
            elif reduction == "psl-sum":
                weight[i, p] = relevance[i, p]
            elif reduction == "pal-n":
                weight[i, p] = relevance[i, p] / all_positives
            elif sampled and (i, p)[axis] not in taken:
                taken.add((i, p)[axis])
                weight[i, p] = 1
        return weight

    weight = weights(0)
    if importance_L is not None and weight.any():
        weight = weight * importance_L * weight.sum() / (weight * importance_L).sum()
    there = loop_loss(kind, options, logit, case.positive, case.ignored, weight)
    if forward == 1:
        return there
    back = loop_loss(kind, options, logit.T, case.positive.T, case.ignored.T, weights(1).T)
    return forward * there + (1 - forward) * back


def direction(kind, forward):
    """Soft top-k has query to label only."""
    return 1.0 if kind == "softtopk" else forward


@pytest.mark.parametrize("forward", [pytest.param(0.0, marks=pytest.mark.slow), 0.3, 1.0])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_symmetric_equals_both_directions_looped(variant, reduction, forward, rng):
    name, options = VARIANTS[variant]
    forward = direction(name, forward)
    for soft, weighted in (
        (False, False),
        (True, False),
        (False, True),
        (True, True),
    ):
        case = random_case(rng)
        importance = 1 + 20 * rng.random(11) if weighted else None
        targets = case.targets(rng, soft=soft, extra=2, importance_L=importance)

        def fast(x, targets=targets):
            return symmetric_loss(name, x, targets, reduction=reduction, forward=forward, **options)

        def slow(x, case=case, targets=targets, importance=importance, soft=soft):
            return loop_symmetric(
                name, options, case, targets, reduction, forward, x, importance, soft
            )

        value, gradient = value_and_gradient(fast, case.logit)
        expected, expected_gradient = value_and_gradient(slow, case.logit)
        # Unit weights are made in float32.
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", list(LOSSES))
def test_symmetric_on_degenerate_cases_is_finite(kind, rng):
    for name, case in degenerate_cases(rng).items():
        for forward in {direction(kind, share) for share in (0.0, 0.5, 1.0)}:
            logit = case.logit.float().requires_grad_()
            loss = symmetric_loss(kind, logit, case.targets(rng), reduction="psl", forward=forward)
            loss.backward()
            assert torch.isfinite(loss), name
            assert torch.isfinite(logit.grad).all(), name
            assert loss >= 0, name


@pytest.mark.parametrize("kind", list(LOSSES))
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_nothing_depends_on_values_on_the_host(kind, reduction, rng):
    """On the meta device there are no values: `.item()`, `nonzero` and boolean indexing raise."""
    case = random_case(rng)
    given = case.targets(rng, soft=True, importance_L=np.linspace(1, 5, 11))
    targets = PoolTargets(
        **{name: x.to("meta") for name, x in vars(given).items() if isinstance(x, torch.Tensor)}
    )
    logit = torch.empty(6, 11, device="meta", requires_grad=True)
    loss = symmetric_loss(kind, logit, targets, reduction=reduction, forward=direction(kind, 0.5))
    loss.backward()
    assert loss.shape == ()
    assert logit.grad.shape == (6, 11)


def test_what_goes_to_a_gpu_is_pinned(monkeypatch):
    pinned = []
    sent = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    monkeypatch.setattr(
        torch.Tensor,
        "to",
        lambda tensor, *given, **options: sent.append((given, options)) or tensor,
    )
    to_device(np.arange(3), torch.device("cuda", 1))
    assert len(pinned) == 1
    assert sent == [((torch.device("cuda", 1),), {"non_blocking": True})]
    to_device(np.arange(3), "cpu")
    assert len(pinned) == 1
    assert sent[1] == (("cpu",), {})


@pytest.mark.cuda
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gpu_equals_cpu_and_never_waits(variant, reduction, rng):
    name, options = VARIANTS[variant]
    forward = direction(name, 0.5)
    case = random_case(rng, 16, 60)
    given = case.targets(rng, importance_L=np.linspace(1, 5, 60))
    targets = PoolTargets(
        **{name: x.cuda() for name, x in vars(given).items() if isinstance(x, torch.Tensor)}
    )
    logit = case.logit.float().cuda().requires_grad_()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = symmetric_loss(name, logit, targets, reduction=reduction, forward=forward, **options)
        loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    value, gradient = value_and_gradient(
        lambda x: symmetric_loss(name, x, given, reduction=reduction, forward=forward, **options),
        case.logit.float(),
    )
    torch.testing.assert_close(
        loss.detach().cpu(),
        value,
        rtol=1e-5,
        atol=1e-6,
    )
    torch.testing.assert_close(logit.grad.cpu(), gradient, rtol=1e-4, atol=1e-6)


def test_pol_needs_one_positive_and_supcon_with_it_is_infonce(rng):
    """InfoNCE is cross entropy with the sampled positive as the class."""
    logit = torch.from_numpy(rng.normal(size=(5, 8)))
    own = torch.from_numpy(rng.permutation(8)[:5])
    targets = PoolTargets(
        torch.arange(5),
        own,
        torch.ones(5, dtype=torch.bool),
        torch.ones(5),
        torch.ones(5, dtype=torch.int64),
        torch.empty(0, dtype=torch.int64),
        torch.empty(0, dtype=torch.int64),
    )
    loss = symmetric_loss("infonce", logit, targets, reduction="pol", forward=1.0)
    torch.testing.assert_close(loss, F.cross_entropy(logit, own))


def test_triplet_in_several_blocks(rng, monkeypatch):
    from unidec.model import losses

    case = random_case(rng)
    whole = value_and_gradient(lambda x: triplet(x, case.pairs()), case.logit)
    monkeypatch.setattr(losses, "BLOCK", 23)  # two pairs a block
    blocks = value_and_gradient(lambda x: triplet(x, case.pairs()), case.logit)
    torch.testing.assert_close(blocks, whole)


def test_a_logit_that_is_not_finite_shows_in_the_loss(rng):
    case = random_case(rng)
    case.logit[case.row[0], case.col[0]] = float("nan")
    for name in LOSSES:
        assert not torch.isfinite(LOSSES[name](case.logit, case.pairs()))


@pytest.mark.parametrize("kind", ["ds", "triplet"])
def test_an_option_of_another_loss_is_refused(kind, rng):
    case = random_case(rng)
    with pytest.raises(TypeError, match="topk"):
        symmetric_loss(
            kind,
            case.logit,
            case.targets(rng),
            reduction="psl",
            forward=0.5,
            topk=3,
        )


# -- what a loss receives
# -----------------------------------------------------------------------------------------------


def test_section_loss_gives_each_loss_its_own_options(rng):
    settings = Loss(
        margin=0.7,
        triplet_negatives="hardest",
        triplet_top=2,
        triplet_positives=3,
        bce_normalise="rows",
        topk=3,
    )
    given = {kind: loss_options(kind, settings) for kind in LOSSES}
    assert given["triplet"] == {"margin": 0.7, "negatives": "hardest", "top": 2, "positives": 3}
    assert given["hinge"] == {"margin": 0.7, "normalise": "rows"}
    assert given["bce"] == {"normalise": "rows"}
    assert given["softtopk"] == {"topk": 3}
    case = random_case(rng)
    for kind, options in given.items():
        symmetric_loss(
            kind,
            case.logit,
            case.targets(rng),
            reduction="psl",
            forward=1.0,
            **options,
        )
    assert set(LOSSES) >= ENTRYWISE | UNSCALED


def test_propensities_reach_the_pairs_of_a_pool(rng):
    from unidec.model.pool import PoolSampler

    relevance = csr_matrix((rng.random((9, 12)) < 0.3).astype(np.float32))
    sampler = PoolSampler(
        relevance,
        csr_matrix((9, 12), dtype=bool),
        beta=2,
        eta=0,
        size=6,
        seed=1,
    )
    batch = sampler.batch(
        np.array([3, 1, 8]),
        epoch=0,
        step=0,
        shortlist_NH=None,
    )
    inverse_L = 1 + rng.random(12)
    targets = PoolTargets.from_batch(batch, importance_L=inverse_L)
    expected = [inverse_L[batch.pool_S[col]] for col in batch.positive_col_P]
    np.testing.assert_allclose(targets.importance_P.numpy(), expected, rtol=1e-6)
    assert PoolTargets.from_batch(batch).importance_P is None


@pytest.mark.parametrize("variant", VARIANTS)
def test_equal_propensities_change_a_softmax_not_at_all(variant, rng):
    """Only the ratio of propensities counts where weights are rescaled; entry by entry the positive
    side grows.
    """
    name, options = VARIANTS[variant]
    case = random_case(rng)
    plain, weighted = (
        symmetric_loss(
            name,
            case.logit,
            case.targets(rng, importance_L=given),
            reduction="psl",
            forward=1.0,
            **options,
        )
        for given in (None, np.full(11, 7.0))
    )
    if name in ENTRYWISE:
        assert weighted > plain
    else:
        torch.testing.assert_close(weighted, plain, rtol=1e-6, atol=1e-6)


def test_rare_labels_weigh_as_their_inverse_propensity(rng):
    """Two queries with a positive each, one of a label nine times as often missed: nine times the
    gradient.
    """
    logit = torch.zeros(2, 3, dtype=torch.float64)
    case = Case(logit, np.eye(2, 3, dtype=bool), np.zeros((2, 3), bool), np.ones((2, 3)), rng)
    targets = case.targets(rng, importance_L=np.array([9.0, 1.0, 1.0]))
    for kind in ("ds", "supcon", "softtopk", "bce", "hinge"):
        options = {"topk": 1} if kind == "softtopk" else {}
        _, gradient = value_and_gradient(
            lambda x, k=kind, o=options: symmetric_loss(
                k, x, targets, reduction="psl", forward=1.0, **o
            ),
            logit,
        )
        expected = 9 * gradient[1, 1].item()
        assert gradient[0, 0] == pytest.approx(expected)
        assert gradient[1, 1] < 0


def test_examples_in_docstrings():
    from unidec.model import losses

    assert doctest.testmod(losses) == (0, 3)
