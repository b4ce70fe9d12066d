"""Labels that nobody trained, known by their text alone: their recall, and what they cost the others.

    python benchmarks/zero_shot.py                       # lf-debian: two trainings of some minutes, then a few minutes
    python benchmarks/zero_shot.py --queries 3000        # a slice: a minute or two, figures of little worth
    python benchmarks/zero_shot.py --full outputs/model --set encoder.kind=both   # what was trained on all the labels

A twentieth of the labels that have training points are held out: they, their pairs, and queries that have no others are
not in the training. Then they are added by their texts, their classifier rows estimated in several ways, and the same
queries are answered: of the validation split to choose by, of the test split to report. `retrained` is a model trained
on all labels. Percent: R@10 and R@100 of the held-out labels and of all others, each over their own positives (pairs),
of both together, nDCG@5 over all labels, and the share of the first ten answers that are held-out labels. Each bundle's
weight of the classifier is tuned on validation, for the held-out one before the labels are added. Writes JSON; a model
that is there is not trained again (`--folder` keeps them).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix

from unidec import pipeline
from unidec.bundle.label_change import estimated_rows
from unidec.config import Params, load_params, parse_overrides
from unidec.data.dataset import write_dataset
from unidec.data.formats import make_slice, read_raw
from unidec.data.raw import RawData, hold_out
from unidec.data.storage import write_folder, write_json
from unidec.data.tokens import encode_texts
from unidec.evaluation.metrics import filtered_truth
from unidec.model.search import exact_search
from unidec.model.unidec import KIND, VERSION, UniDEC
from unidec.pipeline import paths
from unidec.pipeline.ranking import CLF_WEIGHTS
from unidec.ranking.heads import Heads, Space, unit_rows
from unidec.training.trainer import Trainer, TrainingData

ROOT = Path(__file__).resolve().parents[1]
SHARE, K = 0.05, 100
CHOSEN = "0.6 text + 0.4 nearest 3 *"  # what the library does (label_change.py): with cosines + 3 mean row

# -- data -------------------------------------------------------------------------------------------------------------


def with_validation(raw: RawData) -> RawData:
    """The raw data with the validation split that `unidec ingest` cuts."""
    held = hold_out(raw.queries["train"]["uid"], raw.filter_pairs["train"], 0.05, 0)
    rows = {"train": np.flatnonzero(~held), "validation": np.flatnonzero(held)}
    return replace(
        raw,
        queries={s: raw.queries["train"].take(own) for s, own in rows.items()} | {"test": raw.queries["test"]},
        relevance={s: raw.relevance["train"][own] for s, own in rows.items()} | {"test": raw.relevance["test"]},
        filter_pairs={s: raw.filter_pairs["train"][own] for s, own in rows.items()}
        | {"test": raw.filter_pairs["test"]},
    )


def held_labels(raw: RawData, share: float, seed: int) -> np.ndarray:
    """Rows of `share` of the labels with training points, drawn at random."""
    some = np.flatnonzero(np.diff(raw.relevance["train"].tocsc().indptr))
    return np.sort(np.random.default_rng(seed).choice(some, max(1, round(share * len(some))), replace=False))


def without(raw: RawData, held: np.ndarray) -> RawData:
    """The data as if these labels were not there yet."""
    kept = np.setdiff1d(np.arange(raw.num_labels), held)
    pairs = {s: csr_matrix(matrix.tocsc()[:, kept]) for s, matrix in raw.relevance.items()}
    filters = {s: csr_matrix(matrix.tocsc()[:, kept]) for s, matrix in raw.filter_pairs.items()}
    rows = {s: np.flatnonzero(np.diff(matrix.indptr)) for s, matrix in pairs.items()}
    return replace(
        raw, labels=raw.labels.take(kept), queries={s: raw.queries[s].take(own) for s, own in rows.items()},
        relevance={s: csr_matrix(pairs[s][own]) for s, own in rows.items()},
        filter_pairs={s: csr_matrix(filters[s][own]) for s, own in rows.items()},
    )  # fmt: skip


def train(folder: Path, version: RawData, params: Params) -> Path:
    """Train on a version of the data, if that was not done; returns the model's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.chdir(folder):
        if not Path("model/manifest.json").is_file():
            if not paths.PROPENSITY.is_dir():
                write_dataset(paths.DATASET, version)
                pipeline.tokens(params)
                pipeline.propensity(params)
            tokens, run = [paths.open_tokens(which) for which in ("queries", "labels")], f"run-{time.time():.0f}"
            trainer = Trainer(
                params.training, TrainingData(paths.open_dataset(), *tokens), Path("runs") / run, paths.CACHE
            )
            while not trainer.finished:
                if trainer.refresh_due:
                    trainer.refresh()
                trainer.train_round()
            with write_folder("model", KIND, VERSION) as out:
                trainer.export(out)
    return folder / "model"


# -- what is measured -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Encoded:
    """A model's vectors: labels de, clf (their texts), rows (trained; 0 where there are none); queries by split."""

    de_LD: np.ndarray
    text_LD: np.ndarray
    rows_LD: np.ndarray
    queries: dict[str, tuple[np.ndarray, np.ndarray]]


def encoded(path: Path, raw: RawData, held: np.ndarray) -> Encoded:
    """Vectors of a model that was trained on all labels, or on all but `held`."""
    model = UniDEC.load(path, verify=False)
    if model.heads != "both":
        raise SystemExit("a model with both heads is needed")

    def encode(titles: Any) -> tuple[np.ndarray, np.ndarray]:
        de, clf = model.vectors("labels", encode_texts(titles.to_pylist(), model.tokenizer_folder, model.max_length))
        assert de is not None and clf is not None
        return de, clf

    de, text = encode(raw.labels["title"])
    table, rows = model.classifier_table()[0], np.zeros_like(text)
    assert table is not None
    trained = np.arange(raw.num_labels) if len(table) == raw.num_labels else np.setdiff1d(np.arange(len(rows)), held)
    rows[trained] = table
    return Encoded(de, text, rows, {s: encode(raw.queries[s]["title"]) for s in ("validation", "test")})


def estimates(own: Encoded, held: np.ndarray, cosine: bool) -> dict[str, Callable[[], np.ndarray | None]]:
    """Classifier rows of the held-out labels, float32 [S, D], by the name of how they are estimated."""
    known = np.setdiff1d(np.arange(len(own.rows_LD)), held)
    text, rows = unit_rows(own.text_LD), own.rows_LD[known]
    near = np.argsort(-(own.de_LD[held] @ own.de_LD[known].T), axis=1, kind="stable")[:, :20]
    centred = text[held] - text[known].mean(axis=0)
    length = float(np.linalg.norm(rows, axis=1).mean())
    arrays = {"de": own.de_LD, "clf": own.rows_LD}

    def nearest(num: int) -> np.ndarray:
        return rows[near[:, :num]].mean(axis=1)

    def discriminant() -> np.ndarray:
        """Ridge: a row's own text against those of all others (a closed-form classifier with one positive a label)."""
        gram = text[known].T @ text[known] / len(known)
        ridge = 3 * np.trace(gram) / len(gram)
        return unit_rows(np.linalg.solve(gram + ridge * np.eye(len(gram)), text[held].T).T.astype(np.float32))

    def mapped() -> np.ndarray:
        """Ridge from texts to trained rows."""
        gram = text[known].T @ text[known]
        ridge = 10 * np.trace(gram) / len(gram)
        return (text[held] @ np.linalg.solve(gram + ridge * np.eye(len(gram)), text[known].T @ rows)).astype(np.float32)

    def mixed(share: float, num: int = 3, mean: float = 0.0) -> np.ndarray:
        return share * text[held] + (1 - share) * nearest(num) + mean * rows.mean(axis=0)

    def library() -> np.ndarray:
        return estimated_rows(arrays, known, own.text_LD[held], own.de_LD[held], cosine)[0]

    every: dict[str, Callable[[], np.ndarray | None]] = {
        "none (0)": lambda: np.zeros_like(centred),
        "text, unit length": lambda: text[held],
        "text - mean text": lambda: centred,
        "nearest 1": lambda: nearest(1),
        "nearest 3": lambda: nearest(3),
        "nearest 10": lambda: nearest(10),
        "0.4 text + 0.6 nearest 3": lambda: mixed(0.4),
        "0.5 text + 0.5 nearest 3": lambda: mixed(0.5),
        CHOSEN: library,
        "0.7 text + 0.3 nearest 3": lambda: mixed(0.7),
    }
    if cosine:  # length counts for nothing
        return every | {
            "0.6 text + 0.4 nearest 3, no mean": lambda: mixed(0.6),
            "... + 2 mean row": lambda: mixed(0.6, mean=2.0),
            "... + 4 mean row": lambda: mixed(0.6, mean=4.0),
            "nearest 3 + mean row": lambda: mixed(0.0, mean=1.0),
        }
    return every | {
        "dual encoder alone, all labels": lambda: None,
        "text, mean trained length": lambda: length * text[held],
        "discriminant of the text": discriminant,
        "map from texts to rows": mapped,
        "0.6 text + 0.4 nearest 1": lambda: mixed(0.6, 1),
        "0.6 text + 0.4 nearest 10": lambda: mixed(0.6, 10),
        "0.6 text + 0.4 nearest 3 + 0.5 mean": lambda: mixed(0.6, mean=0.5),
    }


class Judge:
    """What answers are worth on one split."""

    def __init__(self, raw: RawData, split: str, held: np.ndarray) -> None:
        self.split, self.filters = split, raw.filter_pairs[split]
        self.truth = filtered_truth(raw.relevance[split], self.filters)
        self.held_L = np.zeros(raw.num_labels, dtype=bool)
        self.held_L[held] = True

    def figures(
        self, own: Encoded, rows_LD: np.ndarray, weight: float, space: Space, normalize: bool
    ) -> dict[str, float]:
        """Answers with these classifier rows, in percent."""
        heads = Heads({"de": own.de_LD, "clf": rows_LD}, space, normalize, weight)
        query = heads.queries(*own.queries[self.split])
        top = exact_search(query, heads.take(slice(None)), K, exclude=self.filters)[1]
        return self.of_answers(top)

    def of_answers(self, top_NK: np.ndarray) -> dict[str, float]:
        """Args: top_NK: int64 [n, K], -1 where there is none."""
        row_P, label_P = self.truth.nonzero()
        new_P = self.held_L[label_P]
        found_NK = np.zeros(top_NK.shape, dtype=bool)
        valid = top_NK >= 0
        found_NK[valid] = np.asarray(self.truth[np.nonzero(valid)[0], top_NK[valid]]).ravel() > 0
        new_NK = self.held_L[np.maximum(top_NK, 0)] & valid
        totals = {"new": int(new_P.sum()), "others": int((~new_P).sum()), "all": len(new_P)}
        hits = {"new": found_NK & new_NK, "others": found_NK & ~new_NK, "all": found_NK}
        out = {f"{who}/R@{k}": 100 * float(hits[who][:, :k].sum()) / max(1, totals[who])
               for who in totals for k in (10, K)}  # fmt: skip
        positives_N = np.bincount(row_P, minlength=len(top_NK))
        gain_5 = 1 / np.log2(np.arange(2, 7))
        ideal_N = np.concatenate([[0], np.cumsum(gain_5)])[np.minimum(positives_N, 5)]
        asked = positives_N > 0
        out["nDCG@5"] = 100 * float(((found_NK[:, :5] * gain_5).sum(axis=1)[asked] / ideal_N[asked]).mean())
        out["new/share of the first 10"] = 100 * float(new_NK[:, :10].mean())
        return out | {"new/positives": float(totals["new"])}


def tuned(own: Encoded, judge: Judge, rows_LD: np.ndarray, normalize: bool) -> float:
    """The classifier's weight with the best nDCG@5; labels with rows of zeros are not there yet."""
    there = np.abs(rows_LD).any(axis=1, keepdims=True)
    own = replace(own, de_LD=own.de_LD * there)
    return max(CLF_WEIGHTS, key=lambda weight: judge.figures(own, rows_LD, weight, "both", normalize)["nDCG@5"])


def measure(raw: RawData, held: np.ndarray, models: dict[str, Path], normalize: bool) -> dict[str, Any]:
    """Every estimate, and the retrained model: {"weights", split: {name: figures}}."""
    judges = {split: Judge(raw, split, held) for split in ("validation", "test")}
    found: dict[str, Any] = {"clf_normalize": normalize, "weights": {}, "validation": {}, "test": {}}
    full = encoded(models["full"], raw, held)
    found["weights"]["retrained"] = weight = tuned(full, judges["validation"], full.rows_LD, normalize)
    for split, judge in judges.items():
        found[split]["retrained"] = judge.figures(full, full.rows_LD, weight, "both", normalize)
        found[split]["retrained, dual encoder alone"] = judge.figures(full, full.rows_LD, weight, "de", normalize)
    own = encoded(models["held"], raw, held)
    found["weights"]["held"] = weight = tuned(own, judges["validation"], own.rows_LD, normalize)
    for name, make in estimates(own, held, normalize).items():
        estimate, rows_LD = make(), own.rows_LD.copy()
        if estimate is not None:
            rows_LD[held] = estimate
        for split, judge in judges.items():
            found[split][name] = judge.figures(own, rows_LD, weight, "de" if estimate is None else "both", normalize)
        print(f"  {name}", flush=True)
    return found


def table(found: dict[str, dict[str, float]]) -> str:
    names = [name.replace("share of the first 10", "share") for name in next(iter(found.values()))]
    lines = [f"{row:36s}" + "".join(f"{value:14.2f}" for value in values.values()) for row, values in found.items()]
    return "\n".join([f"{'classifier row':36s}" + "".join(f"{name:>14s}" for name in names), *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, default=0, help="training queries; 0: all")
    parser.add_argument("--full", type=Path, help="a model trained on all labels, instead of training one")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "zero-shot", help="where models are kept")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "zero-shot.json")
    options = parser.parse_args()
    bag = {"encoder.kind": "bag", "device": "cpu", "run.check_memory": False, "run.checkpoint_minutes": 0.0}
    params = load_params(ROOT / "params.yaml", bag | parse_overrides(options.set))
    raw = with_validation(read_raw(ROOT / params.data.path))
    if options.queries:
        raw = make_slice(raw, options.queries, options.queries // 8)
    held = held_labels(raw, SHARE, seed=0)
    folder = options.folder.resolve() / str(options.queries or "all")
    models = {"held": train(folder / "held", without(raw, held), params)}
    models["full"] = options.full or train(folder / "full", raw, params)
    measured = {name: measure(raw, held, models, name == "cosine") for name in ("raw score", "cosine")}
    for name, found in measured.items():
        for split in ("validation", "test"):
            print(f"\nclassifier by {name}, {split} split, weights {found['weights']}\n{table(found[split])}")
    sizes = {"labels": raw.num_labels, "held_out": len(held), **{s: t.num_rows for s, t in raw.queries.items()}}
    write_json(options.out, {"data": raw.name, "encoder": params.encoder.kind, **sizes, "measured": measured})
    print(json.dumps({"written": str(options.out)}))


if __name__ == "__main__":
    main()
