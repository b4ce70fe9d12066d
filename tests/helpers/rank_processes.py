"""Checks that several ranks run together: `run(python, 2, "collectives", folder)` starts real
processes on gloo.

Each process runs one function of this file, `function(ranks, folder, **options)`, and writes what
it returns (arrays) to a file. Starting a process costs seconds of imports, so a function holds many
checks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from helpers.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
TIMEOUT_S = 280.0


def run(
    python: list[str],
    world: int,
    function: str,
    folder: Path,
    timeout: float = TIMEOUT_S,
    one_card: bool = False,
    **options: Any,
) -> list[dict[str, np.ndarray]]:
    """What each rank returned, rank by rank; `one_card`: all use the first GPU. `python`:
    the words that start one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    processes = []
    for rank in range(world):
        env = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": "0" if one_card else str(rank),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(TESTS),
        }
        command = [
            *python,
            "-m",
            "helpers.rank_processes",
            function,
            str(folder),
            json.dumps(options),
        ]
        processes.append(
            subprocess.Popen(command, env=env, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        )
    try:
        errors = [process.communicate(timeout=timeout)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    returncodes = [process.returncode for process in processes]
    assert returncodes == [0] * world, "\n".join(errors)
    return [
        dict(np.load(folder / f"{function}-{world}-{rank}.npz", allow_pickle=False))
        for rank in range(world)
    ]


# -- what the ranks run
# -----------------------------------------------------------------------------------------------


def part_of(ranks: Any, array: Any) -> Any:
    begin, end = ranks.part(len(array))
    return array[begin:end]


def collectives(ranks: Any, folder: Path) -> dict[str, Any]:
    """Every method once, on even, uneven and empty parts."""
    import torch

    from unidec.model.row_table import RowTable

    found: dict[str, Any] = {}
    rng = torch.Generator().manual_seed(5)
    for name, sizes in (
        ("even", [3, 3]),
        ("uneven", [1, 4]),
        ("skewed", [0, 9]),
        ("nothing", [0, 0]),
    ):
        whole = torch.randn(sum(sizes), 4, generator=rng)
        weight = torch.randn(sum(sizes), 4, generator=rng)
        begin = sum(sizes[: ranks.rank])
        own = whole[begin : begin + sizes[ranks.rank]].clone().requires_grad_()
        gathered = ranks.gather(own * 2, sizes)
        (gathered.sin() * weight).sum().backward()
        found[f"gather {name}"] = torch.equal(gathered, whole * 2)
        expected = (2 * (whole * 2).cos() * weight)[begin : begin + sizes[ranks.rank]]
        found[f"gradient {name}"] = torch.allclose(own.grad, expected, atol=1e-6)

    a, b, c, d = (torch.nn.Parameter(torch.zeros(shape)) for shape in ((2, 3), (4,), (1,), (2,)))
    half = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    a.grad = torch.full((2, 3), float(ranks.rank + 1))
    d.grad = torch.full((2,), float(ranks.rank + 5))
    half.grad = torch.ones(3, dtype=torch.bfloat16)
    if ranks.rank == 1:
        b.grad = torch.arange(4.0)
    ranks.sum_gradients([a, b, c, d, half], complete=[d])
    found["sums"] = np.concatenate([p.grad.float().flatten().numpy() for p in (a, b, d, half)])
    found["none stays none"] = c.grad is None

    tables = [RowTable(10, 3).train(), RowTable(10, 1).train()]
    with torch.no_grad():
        for table in tables:
            table.weight.copy_(torch.arange(10.0).unsqueeze(1).expand_as(table.weight))
    rows = torch.tensor([[1, 4, 7], [0, 4, 4]][ranks.rank][: 3 - ranks.rank])
    for table in tables:
        (
            table.gather(rows) * (ranks.rank + 1) * torch.arange(1.0, len(rows) + 1).unsqueeze(1)
        ).sum().backward()
    ranks.sum_rows(tables)
    for table in tables:
        used, leaf = table.used
        found[f"rows of {table.weight.shape[1]}"] = used.numpy()
        found[f"values of {table.weight.shape[1]}"] = leaf.detach().numpy()
        found[f"gradients of {table.weight.shape[1]}"] = leaf.grad.numpy()
    dense = RowTable(4, 2).train()
    (dense.gather(None) * (ranks.rank + 1)).sum().backward()
    ranks.sum_rows([dense])
    found["all rows"] = dense.used[0] is None and torch.equal(
        dense.used[1].grad, torch.full((4, 2), 3.0)
    )
    empty = RowTable(4, 2).train()
    empty.gather(torch.tensor([2, 3][: ranks.rank], dtype=torch.int64)).sum().backward()
    ranks.sum_rows([empty, RowTable(3, 1)])
    found["one has no rows"] = (empty.used[0].tolist(), empty.used[1].grad.tolist()) == (
        [2],
        [[1.0, 1.0]],
    )

    for name, value in (("norm", 1.0), ("norm of a nan", np.nan)):
        sharded = [torch.full((9,), value)][: ranks.rank]
        found[name] = ranks.norm([torch.full((4,), 2.0), *sharded], sharded).numpy()
    found["any"] = ranks.any(ranks.rank == 1, False, True)

    found["share"] = ranks.share({"name": ["é", 1, None]} if ranks.is_first else "mine") == {
        "name": ["é", 1, None]
    }
    for dtype in (np.float32, np.int64, np.bool_, np.float16):
        array = (np.arange(14).reshape(7, 2) % 3).astype(dtype)
        found[f"arrays {np.dtype(dtype)}"] = np.array_equal(
            ranks.gather_array(part_of(ranks, array)), array
        )
        found[f"share {np.dtype(dtype)}"] = np.array_equal(
            ranks.gather_array(array if ranks.is_first else array[:0]), array
        )
    found["no rows"] = ranks.gather_array(np.empty((0, 3), np.float32)).shape == (0, 3)
    found["one has rows"] = ranks.gather_array(np.ones((ranks.rank, 3))).tolist() == [[1.0] * 3]
    ranks.barrier()
    return found


# -- losses over all labels
# -------------------------------------------------------------------------------------------

# loss, its options, reduction, share of query -> label
LOSSES_BY_COLUMNS = [
    ("ds", {}, "psl", 0.5),
    ("ds", {}, "pol", 1.0),
    ("supcon", {}, "pal-n", 0.3),
    ("supcon", {}, "psl", 0.0),
    ("infonce", {}, "pol", 0.5),
    ("bce", {}, "psl", 1.0),
    ("bce", {"normalise": "entries"}, "psl", 1.0),
    ("hinge", {"margin": 0.7}, "psl", 1.0),
    ("hinge", {"margin": 0.2, "normalise": "entries"}, "psl", 1.0),
    ("softtopk", {"topk": 2}, "psl", 1.0),
    ("softtopk", {"topk": 5}, "pol", 1.0),
    ("full bce", {}, "", 1.0),
    ("full bce", {"normalise": "entries"}, "", 1.0),
]
# queries, labels, share of positives and of ignored pairs, labels (from the first on) that may be
# positive
SIZES = {
    "many": (11, 37, 0.15, 0.1, 37),
    "a rank without labels": (5, 3, 0.4, 0.1, 3),
    "one label": (4, 1, 0.6, 0.2, 1),
    "a rank without positives": (6, 24, 0.3, 0.1, 5),
    "one query": (1, 9, 0.4, 0.2, 9),
    "no positives": (4, 9, 0.0, 0.3, 9),
    "all positives": (3, 8, 1.0, 0.0, 8),
}


def loss_inputs(
    rng: Any, shape: tuple[int, int, float, float, int], weighted: bool
) -> tuple[Any, list[Any]]:
    """Random targets, and query, row, bias and scale in float64."""
    import torch

    from unidec.model.pairs import PoolTargets

    num_queries, num_labels, positive_share, ignored_share, until = shape
    positive = rng.random((num_queries, num_labels)) < positive_share
    positive[:, until:] = False
    ignored = (rng.random(positive.shape) < ignored_share) & ~positive
    row, col = map(torch.from_numpy, np.nonzero(positive))
    targets = PoolTargets(
        row,
        col,
        torch.from_numpy(rng.random(len(row)) < 0.7),
        torch.from_numpy(rng.random(len(row)) + 0.1)
        if weighted
        else torch.ones(len(row), dtype=torch.float64),
        torch.from_numpy(positive.sum(1) + 2),
        *map(torch.from_numpy, np.nonzero(ignored)),
        torch.from_numpy(1 + 9 * rng.random(len(row))) if weighted else None,
    )
    shapes = [(num_queries, 4), (num_labels, 4), (num_labels, 1), ()]
    return targets, [torch.from_numpy(np.asarray(rng.normal(size=size))) for size in shapes]


def loss_and_gradients(case: Any, targets: Any, inputs: list[Any], ranks: Any) -> list[Any]:
    """Of one loss as `Objective` makes it: the loss, and the gradients of this rank's query, row
    and bias, and of the scale, whole.
    """
    import torch

    from unidec.model.full_bce import full_bce
    from unidec.model.losses import symmetric_loss

    (kind, options, reduction, forward), num_queries = case, len(inputs[0])
    own = [part_of(ranks, x) if x.ndim else x for x in inputs]
    leaves = [x.clone().requires_grad_() for x in own]
    query_BD, row, bias, scale = leaves
    query_BD = ranks.gather(query_BD, ranks.sizes(num_queries))
    scale = scale.exp()
    query_BD, scale = (targets.columns.sum_gradient(x) for x in (query_BD, scale))
    if kind == "full bce":
        loss = full_bce(query_BD, row, bias, scale, targets, chunk=3, **options)
    else:
        logit = (query_BD @ row.T + bias.T) * scale
        if reduction == "pol":
            options = options | {"generator": torch.Generator().manual_seed(3)}
        loss = symmetric_loss(kind, logit, targets, reduction=reduction, forward=forward, **options)
    (loss * 1.7).backward()
    return [loss.detach(), *(leaf.grad for leaf in leaves)]


def losses_by_columns(ranks: Any, folder: Path, seed: int) -> dict[str, Any]:
    """Each loss with the labels spread over the ranks against the loss of one rank: largest
    relative difference.
    """
    import torch
    import torch.distributed as dist

    from unidec.training.distributed import ALONE
    from unidec.training.own_columns import OwnColumns

    found: dict[str, Any] = {}
    rng = np.random.default_rng(seed)
    for name, shape in SIZES.items():
        for number, case in enumerate(LOSSES_BY_COLUMNS):
            targets, inputs = loss_inputs(rng, shape, weighted=number % 2 == 1)
            (begin, end), columns = ranks.part(shape[1]), (targets.col_P, targets.ignored_col_F)
            own = [
                torch.nonzero((column >= begin) & (column < end)).squeeze(1) for column in columns
            ]
            own_columns = OwnColumns(ranks, begin, shape[1], *own, len(targets.col_P))
            with (
                mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as summed,
                mock.patch.object(dist, "all_gather", wraps=dist.all_gather) as gathered,
            ):
                ours = loss_and_gradients(
                    case, replace(targets, columns=own_columns), inputs, ranks
                )
            sent = [call.args[0] for call in summed.call_args_list] + [
                call.args[1] for call in gathered.call_args_list
            ]
            # no rows and no logits of all labels: 37 x 4 and 11 x 37
            assert name != "many" or 0 < max(x.numel() for x in sent) < 37 * 4
            loss, *grads = loss_and_gradients(case, targets, inputs, ALONE)
            theirs = [loss, *(part_of(ranks, grad) if grad.ndim else grad for grad in grads)]
            assert all(
                x.shape == y.shape and torch.isfinite(x).all()
                for x, y in zip(ours, theirs, strict=True)
            )
            found[f"loss {name}: {number} {case[0]}"] = max(
                float(((x - y).abs() / y.abs().max().clamp_min(1)).max()) if y.numel() else 0.0
                for x, y in zip(ours, theirs, strict=True)
            )
    return found


# -- gradients
# --------------------------------------------------------------------------------------------------


def encoder_gradients(ranks: Any, folder: Path) -> dict[str, Any]:
    """`data_parallel` on a small network with a parameter that the loss does not use."""
    import torch

    found: dict[str, Any] = {}
    for unused in (False, True):
        torch.manual_seed(1)
        network = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        network[2].bias.requires_grad_(False)
        if unused:
            network.register_parameter("idle", torch.nn.Parameter(torch.ones(2)))
        parallel = ranks.data_parallel(network, torch.zeros(0, 3))
        assert all(p.grad is None for p in network.parameters())
        assert network.training
        x = torch.randn(13, 3)
        network(x).pow(2).sum().backward()
        expected = [2 * p.grad for p in network.parameters() if p.grad is not None]
        network.zero_grad()
        for _ in range(3):
            network(part_of(ranks, x)).pow(2).sum().backward()  # not seen by the others
            parallel(part_of(ranks, x)).pow(2).sum().backward()
            grads = [p.grad for p in network.parameters() if p.grad is not None]
            found.setdefault(f"sum, unused {unused}", []).extend(
                torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)
                for ours, theirs in zip(grads, expected, strict=True)
            )
            network.zero_grad()
        found[f"names, unused {unused}"] = list(network.state_dict()) == [
            *(["idle"] if unused else []),
            "0.weight",
            "0.bias",
            "2.weight",
            "2.bias",
        ]
    return found


def all_gradients(case: str, trainer: Any, ranks: Any) -> dict[str, Any]:
    """Of all parameters and of the rows of tables, which are then dropped."""
    found: dict[str, Any] = {}
    names = {parameter: name for name, parameter in trainer.model.named_parameters()}
    for parameter in trainer.optimisers.dense:
        if parameter.grad is not None:
            found[f"{case}: {names[parameter]}"] = parameter.grad.numpy().copy()
    for name, row in trainer.optimisers.row.items():
        rows, leaf = row.table.used
        own = slice(row.table.first_row, row.table.first_row + row.table.own_rows)
        whole = np.zeros((row.table.num_rows, leaf.shape[1]), np.float32)
        whole[own if rows is None else rows.numpy()] = leaf.grad.numpy()
        found[f"{case}: rows of {name}"] = whole
        if not name.startswith("encoder."):
            found[f"{case}: rows of {name}"] = ranks.gather_array(whole[None]).sum(0)
    trainer.optimisers.zero_grad()
    return found


def step_gradients(ranks: Any, folder: Path, cases: dict[str, Any]) -> dict[str, Any]:
    """Gradients of a step on the first queries, {case: parameters, "queries": how many}; the folder
    is that of `train`.
    """
    from unidec.data.dataset import XMCDataset
    from unidec.data.tokens import TokenCache
    from unidec.training.trainer import Trainer, TrainingData

    found: dict[str, Any] = {}
    dataset = XMCDataset.open(folder / "dataset", verify=False)
    tokens = [TokenCache.open(folder / name, verify=False) for name in ("queries", "labels")]
    for case, overrides in cases.items():
        overrides = dict(overrides)
        queries = overrides.pop("queries")
        params = tiny_params(
            folder / "bert", **{"pool.batches": "random", "pool.eta": 0} | overrides
        )
        run_dir = folder / f"gradients {case} {ranks.world}"
        cache = folder / f"gradients-cache-{ranks.world}"
        trainer = Trainer(
            params.training, TrainingData(dataset, *tokens), run_dir, cache, ranks=ranks
        )
        trainer.model.train()
        if (
            trainer.model.encoder.bag is not None
            and trainer.model.encoder.bag.token_layers is not None
        ):
            # no key sets it, and each rank draws its own
            trainer.model.encoder.bag.inception.dropout.p = 0.0
        trains = params.encoder.kind != "bag" and params.encoder.trainable_layers != 0
        assert (trainer.gradients.parallel is not None) == (trains and not ranks.alone)
        trainer.optimisers.step = lambda *_, each=(case, trainer): found.update(
            all_gradients(*each, ranks)
        )
        for trainer.at.step in (1, 2):  # the second with the buckets that the first has left
            trainer.train_step(trainer.prepare(np.sort(trainer.rows)[:queries], 0))
    return found


def several(ranks: Any, folder: Path, calls: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What several functions return, in one start of processes."""
    return {
        k: v
        for name, options in calls.items()
        for k, v in globals()[name](ranks, folder, **options).items()
    }


def refresh_parts(ranks: Any, folder: Path, num_points: int, num_labels: int) -> dict[str, Any]:
    """Clusters and hard negatives of the arrays in a folder."""
    import scipy.sparse as sp

    from unidec.training import mining
    from unidec.training.clustering import balanced_clusters

    found: dict[str, Any] = {}
    data = np.load(folder / "vectors.npz")
    for size in (num_points, 100, 7, 1):
        made = balanced_clusters(data["points"], size, seed=4, ranks=ranks)
        found |= {
            f"order {size}": made.order_N,
            f"offsets {size}": made.offsets,
            f"figures {size}": made.objective,
        }
    shape = (num_points + 5, num_labels)
    positive, filtered = (
        sp.csr_matrix((np.ones(len(data[name][0]), np.float32), tuple(data[name])), shape)
        for name in ("positive", "filtered")
    )
    for name in ("label", "tied"):
        for block in (512, 16):
            labels = part_of(ranks, data[name])
            points = np.round(data["points"] * 4) if name == "tied" else data["points"]
            mining.BLOCK = block
            shortlist, report = mining.mine_hard_negatives(
                points, data["rows"], labels, (positive, filtered), 6, ranks=ranks
            )
            found[f"{name} {block}"] = shortlist
            found[f"{name} {block} report"] = np.array(
                [v for k, v in report.items() if k != "seconds"]
            )
    return found


def all_refresh_parts(ranks: Any, folder: Path, sizes: list[tuple[int, int]]) -> dict[str, Any]:
    """`refresh_parts` of the folders <points>-<labels>."""
    return {
        f"{points}-{labels}: {key}": value
        for points, labels in sizes
        for key, value in refresh_parts(
            ranks, folder / f"{points}-{labels}", points, labels
        ).items()
    }


@mock.patch("unidec.training.trainer.LOG_EVERY", 1)  # some tests call it in their own process
def train(ranks: Any, folder: Path, cases: dict[str, Any], steps: int) -> dict[str, Any]:
    """Losses and final weights of trainings: {case: parameters other than those of
    `tiny_training`}.

    The folder holds dataset/, queries/, labels/, graph/ and bert/ without dropout.
    """
    from unidec.data.dataset import XMCDataset
    from unidec.data.json_file import read_json_lines
    from unidec.data.label_graph import load_label_graph
    from unidec.data.tokens import TokenCache
    from unidec.training import trainer as module

    found: dict[str, Any] = {}
    dataset = XMCDataset.open(folder / "dataset", verify=False)
    tokens = [TokenCache.open(folder / name, verify=False) for name in ("queries", "labels")]
    for case, overrides in cases.items():
        until = overrides.pop("until", steps)
        run_dir = folder / overrides.pop("run", f"{case} {ranks.world}")
        params = tiny_params(folder / "bert", **overrides)
        graph = load_label_graph(folder / "graph") if params.pool.gandalf else None
        trainer = module.Trainer(
            params.training,
            module.TrainingData(dataset, *tokens, graph),
            run_dir,
            folder / f"cache-{ranks.world}",
            ranks=ranks,
        )
        found[f"{case}: begins at"] = trainer.at.step
        ended = cut_off_at(trainer, until)
        while not trainer.finished and not ended:
            if trainer.refresh_due:
                trainer.mine()
            try:
                trainer.train_round()
            except CutOff:
                break
        ranks.barrier()
        lines = read_json_lines(run_dir / "history.jsonl")
        for key in ("loss", "grad_norm", "pool_size", "step"):
            found[f"{case}: {key}"] = np.array([line[key] for line in lines])
        for name, weight in trainer.model.state_dict().items():
            values = weight.float().numpy()
            sharded = name.removesuffix(".weight") in ("table", "bias")
            found[f"{case}: weight {name}"] = ranks.gather_array(values) if sharded else values
        del trainer
    return found


class CutOff(BaseException):
    """Stands for whatever ends a run."""


def cut_off_at(trainer: Any, step: int) -> bool:
    """The trainer saves after this step and raises `CutOff` at the next one; True: it is there
    already.
    """
    if trainer.at.step >= step:
        return True
    do = trainer.train_step

    def train_step(batch: Any) -> Any:
        if trainer.at.step == step:
            raise CutOff
        trainer.settings.run.__dict__["checkpoint_steps"] = 1 if trainer.at.step == step - 1 else 0
        return do(batch)

    trainer.train_step = train_step
    return False


def tiny_params(bert: Path, **overrides: Any) -> Any:
    """Of `tiny_training`, without any dropout."""
    from helpers import tiny_training

    return tiny_training.tiny_params(
        bert, **{"model.dropout": 0.0, "run.checkpoint_minutes": 0.0} | overrides
    )


def main() -> None:
    """One rank."""
    from unidec.training.distributed import Ranks

    function = sys.argv[1]
    folder = Path(sys.argv[2])
    options = json.loads(sys.argv[3])
    ranks = Ranks.from_environment("cpu")
    found = globals()[function](ranks, folder, **options)
    np.savez(folder / f"{function}-{ranks.world}-{ranks.rank}.npz", **found)
    ranks.barrier()
    ranks.close()


if __name__ == "__main__":
    main()
