"""Warm against cold: validation nDCG@5 and training time on data of which a part changed.

    python benchmarks/warm_start.py --queries 8000                   # a slice: minutes
    python benchmarks/warm_start.py --warm 4:1:0.25 --warm 3:1:0     # all of lf-debian; epochs:lr_scale:keep

Two versions of a data set have the same validation split; a tenth of the training queries and a twentieth of the
labels of each are not in the other. A champion is trained cold on the old version; the new one is trained cold, and
warm from the champion. After each epoch the validation split is measured as it would be served, and once more counting
new labels alone; with the champion's weight of the classifier, at a run's end with one tuned on that split, as stage
`index` does. Time is this process's processor time (one thread, so that other programs do not count), from the opened
run to its last step: encoding, clustering and mining included, measuring not. Writes JSON; a run that is done is not
trained again (`--folder` keeps them).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix

from unidec import pipeline
from unidec.config import Params, load_params, parse_overrides
from unidec.data.dataset import write_dataset
from unidec.data.formats import make_slice, read_raw
from unidec.data.raw import RawData, hold_out
from unidec.data.storage import write_folder, write_json
from unidec.model.unidec import KIND, VERSION
from unidec.pipeline import paths
from unidec.pipeline.ranking import K, Ranking, headline, tuned_blend
from unidec.pipeline.start import warm_params
from unidec.ranking.heads import Heads
from unidec.training.start import Start
from unidec.training.trainer import Trainer, TrainingData

ROOT = Path(__file__).resolve().parents[1]
QUERIES, LABELS = 0.1, 0.05  # share of each version that the other does not have
GRID = ("4:1:0", "4:1:0.25", "4:1:1", "4:0.5:0.25", "3:1:0.25", "2:1:0.25")


# -- two versions of the data -----------------------------------------------------------------------------------------


def two_versions(raw: RawData, seed: int) -> tuple[RawData, RawData]:
    """Old and new: same validation split; each has training queries and labels of its own."""
    rng = np.random.default_rng(seed)
    held = hold_out(raw.queries["train"]["uid"], raw.filter_pairs["train"], 0.05, 0)
    rows = {"train": np.flatnonzero(~held), "validation": np.flatnonzero(held)}
    own = {"queries": _own(len(rows["train"]), QUERIES, rng), "labels": _own(raw.num_labels, LABELS, rng)}
    versions = []
    for number in (1, 2):
        labels = np.flatnonzero((own["labels"] == 0) | (own["labels"] == number))
        kept = {"train": rows["train"][(own["queries"] == 0) | (own["queries"] == number)]}
        versions.append(_cut(raw, kept | {"validation": rows["validation"]}, labels))
    return versions[0], versions[1]


def _own(count: int, share: float, rng: np.random.Generator) -> np.ndarray:
    """0: in both versions, 1 or 2: in that one alone; `share` of each version's are its own."""
    each = round(count * share / (1 + share))
    owner = np.zeros(count, dtype=np.int8)
    owner[:each], owner[each : 2 * each] = 1, 2
    return rng.permutation(owner)


def _cut(raw: RawData, rows: dict[str, np.ndarray], labels: np.ndarray) -> RawData:
    """These rows of the training queries as splits, with these labels; queries that are left without one go."""
    relevance, filters = (pairs["train"].tocsc()[:, labels].tocsr() for pairs in (raw.relevance, raw.filter_pairs))
    rows = {split: own[np.diff(relevance.indptr)[own] > 0] for split, own in rows.items()}
    return replace(
        raw,
        queries={split: raw.queries["train"].take(own) for split, own in rows.items()},
        labels=raw.labels.take(labels),
        relevance={split: csr_matrix(relevance[own]) for split, own in rows.items()},
        filter_pairs={split: csr_matrix(filters[own]) for split, own in rows.items()},
    )


# -- a training, measured after each epoch ----------------------------------------------------------------------------


class Measured(Trainer):
    """A trainer that measures the validation split after each epoch."""

    def begin(self, new_L: np.ndarray, clf_weight: float) -> None:
        """Args: new_L: labels that are counted alone too. clf_weight: of the classifier, but for the run's end."""
        self.new_L, self.clf_weight = new_L, clf_weight
        self.curve, self.paused, self.begun = [], 0.0, time.process_time()
        self.measure(0)

    def train_step(self, batch: Any) -> dict[str, float] | None:
        figures = super().train_step(batch)
        if (self.at.step + 1) % self.steps_per_epoch == 0:
            self.measure(self.at.step + 1)
        return figures

    def measure(self, step: int) -> None:
        begin = time.process_time()
        seconds = begin - self.begun - self.paused
        precision, vectors = self.params.optim.precision, self.label_vectors()
        ranking = Ranking.of_model(self.model, self.dataset, "validation", precision, vectors)
        ended = step == self.steps_per_epoch * self.params.optim.epochs
        index = self.params.index.model_copy(update={} if ended else {"clf_weight": self.clf_weight})
        blend = tuned_blend(ranking, self.params.model_copy(update={"index": index}), None)
        heads = Heads(ranking.vectors, index.space, index.clf_normalize, blend.clf_weight)
        top = ranking.ranker(heads).search(ranking.encoded, K, ranking.excluded).rows
        found = headline(blend.metrics) | recall_of(top, ranking.truth, self.new_L)
        self.model.train()
        self.paused += time.process_time() - begin
        self.curve.append({"epoch": step / self.steps_per_epoch, "step": step, "cpu_seconds": round(seconds, 1),
                           "clf_weight": blend.clf_weight, **found})  # fmt: skip
        figures = ", ".join(f"{name} {found[name]:.2f}" for name in ("nDCG@5", "P@1", "PSP@5", "new/R@10", "new/R@100"))
        print(f"    epoch {step / self.steps_per_epoch:4.1f}  {seconds:7.1f} s  {figures}", flush=True)


def recall_of(top: np.ndarray, truth: csr_matrix, some_L: np.ndarray) -> dict[str, float]:
    """Percent of a query's positives among some labels that are in its top 10 and 100; mean over the queries with one.

    Args:
        top: int64 [n, 100], best first. truth: csr [n, L]. some_L: bool [L].
    """
    wanted = csr_matrix(truth.multiply(some_L[None, :]))
    wanted.eliminate_zeros()
    rows = np.flatnonzero(np.diff(wanted.indptr))
    found = {}
    for k in (10, 100):
        hits = [
            np.isin(wanted.indices[wanted.indptr[row] : wanted.indptr[row + 1]], top[row, :k]).mean() for row in rows
        ]
        found[f"new/R@{k}"] = float(100 * np.mean(hits)) if hits else 0.0
    return found | {"new/queries": len(rows)}


def prepare(folder: Path, raw: RawData, params: Params) -> None:
    """Data set, tokens and propensities of a version, if they are not there."""
    with _inside(folder):
        if not paths.PROPENSITY.is_dir():
            write_dataset(paths.DATASET, raw)
            pipeline.tokens(params)
            pipeline.propensity(params)


def train(
    folder: Path, name: str, params: Params, new: set[str], start: Start | None = None, clf_weight: float = 1.0
) -> dict[str, Any]:
    """Train a version, or take what an earlier call measured: {"curve", "steps", "cpu_seconds", ...}."""
    print(f"  {name}", flush=True)
    with _inside(folder):
        result = Path("results") / f"{name}.json"
        if result.is_file() and Path("models", name).is_dir():
            return json.loads(result.read_text(encoding="utf-8"))
        dataset = paths.open_dataset()
        tokens, run = (paths.open_tokens("queries"), paths.open_tokens("labels")), f"{name}-{time.time():.0f}"
        trainer = Measured(
            params.training, TrainingData(dataset, *tokens), Path("runs") / run, paths.CACHE, start=start
        )  # fmt: skip
        trainer.params = params
        trainer.begin(np.array([uid in new for uid in dataset.label_uids()]), clf_weight)
        while not trainer.finished:
            if trainer.refresh_due:
                trainer.refresh()
            trainer.train_round()
        norms = trainer.model.table.weight.norm(dim=1) if trainer.model.table is not None else None
        with write_folder(Path("models") / name, KIND, VERSION) as out:
            trainer.export(out)
        found = {"curve": trainer.curve, "epochs": trainer.at.epoch, "steps": trainer.at.step,
                 "cpu_seconds": trainer.curve[-1]["cpu_seconds"],
                 "row_length": float(norms.mean()) if norms is not None else None}  # fmt: skip
        write_json(result, found)
        return found


@contextlib.contextmanager
def _inside(folder: Path):
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.chdir(folder):
        yield


# -- what is said -----------------------------------------------------------------------------------------------------


def row(name: str, run: dict[str, Any], cold: dict[str, Any]) -> dict[str, Any]:
    """A run beside the cold one: when it first was as good as that one's end, and what it ended with."""
    target, end = cold["curve"][-1]["nDCG@5"], run["curve"][-1]
    reached = next((point for point in run["curve"] if point["nDCG@5"] >= target), None)
    return {
        "run": name, "epochs": run["epochs"], "steps": run["steps"], "cpu_seconds": run["cpu_seconds"],
        "share_of_cold": round(run["cpu_seconds"] / max(cold["cpu_seconds"], 1e-9), 3),
        "share_of_steps": round(run["steps"] / cold["steps"], 3),
        "nDCG@5": round(end["nDCG@5"], 2), "ahead_of_cold": round(end["nDCG@5"] - target, 2),
        "P@1": round(end["P@1"], 2), "PSP@5": round(end["PSP@5"], 2), "R@100": round(end["R@100"], 2),
        "new/R@10": round(end["new/R@10"], 2), "new/R@100": round(end["new/R@100"], 2),
        "start": round(run["curve"][0]["nDCG@5"], 2),
        "reached_at_step": reached["step"] if reached else None,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, default=0, help="training queries before the split; 0: all")
    parser.add_argument("--warm", action="append", metavar="EPOCHS:LR_SCALE:KEEP", help=f"default: {' '.join(GRID)}")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "warm-start", help="where runs are kept")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "warm-start.json")
    options = parser.parse_args()
    bag = {"encoder.kind": "bag", "device": "cpu", "run.check_memory": False, "run.checkpoint_minutes": 0.0}
    params = load_params(ROOT / "params.yaml", bag | parse_overrides(options.set))
    raw = read_raw(ROOT / params.data.path)
    old, new = two_versions(make_slice(raw, options.queries, 1) if options.queries else raw, seed=0)
    folders = {name: options.folder.resolve() / str(options.queries or "all") / name for name in ("old", "new")}
    for name, version in (("old", old), ("new", new)):
        prepare(folders[name], version, params)
    new_uids = set(new.labels["uid"].to_pylist()) - set(old.labels["uid"].to_pylist())
    champion = train(folders["old"], "champion", params, set())
    weight = champion["curve"][-1]["clf_weight"]
    cold = train(folders["new"], "cold", params, new_uids, None, weight)
    start = Start(folders["old"] / "models" / "champion", old.labels["uid"].combine_chunks(), "0" * 64)
    rows, runs = [row("cold", cold, cold)], {"champion": champion, "cold": cold}
    for text in options.warm or GRID:
        epochs, scale, keep = text.split(":")
        section = {"epochs": int(epochs), "lr_scale": float(scale), "keep": float(keep)}
        warm = params.model_copy(update={"warm": params.warm.model_copy(update=section)})
        name = f"warm {text}"
        runs[name] = train(
            folders["new"], name.replace(":", "-").replace(" ", "-"), warm_params(warm), new_uids, start, weight
        )
        rows.append(row(name, runs[name], cold))
    names = list(rows[0])
    print("\n" + "  ".join(f"{name:>13}" for name in names))
    for line in rows:
        print("  ".join(f"{line[name] if line[name] is not None else '-':>13}" for name in names))
    sizes = {"queries": new.queries["train"].num_rows, "validation": new.queries["validation"].num_rows,
             "labels": new.num_labels, "new_labels": len(new_uids)}  # fmt: skip
    write_json(options.out, {"data": raw.name, "changed": {"queries": QUERIES, "labels": LABELS}, **sizes,
                             "encoder": params.encoder.kind, "rows": rows, "runs": runs})  # fmt: skip


if __name__ == "__main__":
    main()
