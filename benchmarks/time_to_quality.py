"""How good after how many minutes: our recipes beside sentence-transformers, one after the other on the same machine.

    python benchmarks/time_to_quality.py                 # lf-debian's titles; 20 minutes of the rival, an hour in all
    python benchmarks/time_to_quality.py --minutes 6 --out runs/rehearsal
    python benchmarks/time_to_quality.py --quick --out runs/quick                      # does it run? some minutes
    python benchmarks/time_to_quality.py --set data.path=data/raw/mine --out runs/mine

All train on the same pairs and are measured on the same validation and test queries by the same code, by exact search
over all labels, filtered pairs removed. Ours are the recipes `unidec` and `depsl`, as `make train` runs them. The rival
is what a practitioner writes with sentence-transformers: every layer of the same transformer trained by
MultipleNegativesRankingLoss. Its learning rate is the best on the validation split of short trainings (--rates), which
do not count; what they reached counts for it. Every training runs in a process of its own with the same number of
threads. A curve's seconds are those of training with all it needs (tokens, vectors of frozen layers, refreshes,
checkpoints), without measuring.

Writes <out>.json, <out>.md and <out>.svg. Interrupted, the same command keeps the trainings that are complete (--again:
none).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from measure import machine
from time_to_quality_page import RIVAL, TARGET, times, write

from unidec.comparison.peers.running import start_command, write_task
from unidec.config import Params, load_params, parse_overrides
from unidec.data.dataset import Split
from unidec.data.storage import write_json
from unidec.errors import DataError, TrainingError, UnidecError
from unidec.model.sources import resolve_encoder
from unidec.pipeline import paths
from unidec.pipeline.ranking import Ranking, headline
from unidec.ranking.heads import Heads
from unidec.ranking.query_encoder import Encoded
from unidec.training.precision import autocast_type, choose_device

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RECIPES = ("unidec", "depsl")
QUICK = {"minutes": 0.5, "every": 2.0, "queries": 600, "set": {"optim.epochs": 2}}
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
RATES = (2e-5, 5e-5, 1e-4, 2e-4)
TRIAL_SHARE = 0.1  # of the rival's minutes, for each learning rate that is tried


# -- the trainings ----------------------------------------------------------------------------------------------------


def run(folder: Path, asked: Mapping[str, Any], command: Sequence[str], threads: int) -> dict[str, Any]:
    """Run a program with a folder: it reads asked.json there and leaves found.json. Gives the latter.

    Raises:
        TrainingError: it ended with an error.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_json(folder / "asked.json", dict(asked))
    variables = os.environ | {"OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    variables.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    variables["TOKENIZERS_PARALLELISM"] = "false"
    code = subprocess.run([*command, str(folder)], env=variables, check=False).returncode
    if code:
        what = f"{Path(command[-1]).name} ended with exit code {code}"
        raise TrainingError(what, where=str(folder), fix="see its last lines above")
    return dict(json.loads((folder / "found.json").read_text(encoding="utf-8")))


def kept(folder: Path, asked: Mapping[str, Any]) -> dict[str, Any] | None:
    """result.json of a folder, where that is complete and of the same settings."""
    with contextlib.suppress(OSError, ValueError):
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        if result["asked"] == json.loads(json.dumps(asked)):
            return dict(result)
    return None


def train_ours(folder: Path, params: Params, options: argparse.Namespace) -> dict[str, Any]:
    """Train one of our recipes in a process of its own; what `time_to_quality_ours.train` gives."""
    asked = {
        "params": params.model_dump(mode="json"), "queries": options.queries, "every": options.every,
        "threads": options.threads,
    }  # fmt: skip
    print(f"{params.recipe}: {params.optim.epochs} epochs", flush=True)
    if (result := None if options.again else kept(folder, asked)) is None:
        command = [sys.executable, str(HERE / "time_to_quality_ours.py")]
        result = {"asked": asked, **run(folder, asked, command, options.threads)}
        write_json(folder / "result.json", result)
    return result


def train_rival(data: Path, settings: Mapping[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Train sentence-transformers in a process of its own, then measure the vectors that it left.

    Args:
        data: the working folder of a recipe, whose data set it trains on. settings: what `time_to_quality_peer.py`
            reads, but for "task".

    Returns:
        {"curve", "test": metrics at the end or None, "trained", "pairs", "version"}.
    """
    asked = {**settings, "task": str(data / "task"), "threads": options.threads}
    rate, minutes = settings["learning_rate"], settings["seconds"] / 60
    folder = data.parent / f"rival-{rate:g}-{minutes:g}-minutes"
    print(f"{RIVAL}, learning rate {rate:g}: {minutes:g} minutes", flush=True)
    if (result := None if options.again else kept(folder, asked)) is None:
        found = run(folder, asked, start_command(HERE / "time_to_quality_peer.py"), options.threads)
        with contextlib.chdir(data):
            curve = [point | measured(folder, n, "validation") for n, point in enumerate(found["curve"])]
            test = measured(folder, len(curve) - 1, "test") if settings["with_test"] else None
        result = {"asked": asked, **found, "curve": curve, "test": test}
        write_json(folder / "result.json", result)
        for vectors in folder.glob("*.npy"):
            vectors.unlink()
    print(f"    {TARGET} {result['curve'][0][TARGET]:.2f} untrained, {result['curve'][-1][TARGET]:.2f} at the end")
    return result


def measured(folder: Path, number: int, split: Split) -> dict[str, float]:
    """Metrics of a split for the rival's vectors at a point, in the working folder that has the data set."""
    dataset = paths.open_dataset()
    queries, labels = (np.load(folder / f"{name}-{number}.npy") for name in (split, "labels"))
    ranking = Ranking(dataset, dataset.rows(split), Encoded(queries, None), {"de": labels})
    return headline(ranking.metrics(Heads(ranking.vectors, "de", True)))


def write_texts(data: Path, params: Params) -> None:
    """The rival's task, in the working folder of a recipe: texts of the splits and labels, and the training pairs."""
    with contextlib.chdir(data):
        dataset, text = paths.open_dataset(), params.tokens.text
        splits = {name: dataset.rows(name) for name in SPLITS}
        if not all(map(len, splits.values())):
            raise DataError("an empty split", where=str(dataset.path), got={n: len(r) for n, r in splits.items()})
        texts = {name: dataset.query_texts(rows, text) for name, rows in splits.items()}
        pairs = (dataset.relevance[splits["train"]] > 0).astype(np.float32)
        write_task(texts | {"labels": dataset.label_texts(None, text)}, {"Y.train": pairs}, Path("task"))


def train_all(params: Mapping[str, Params], options: argparse.Namespace) -> dict[str, Any]:
    """{"recipes": by name, "trials": of the rival, "rival"}, one training after the other."""
    folder = options.folder.resolve()
    recipes = {name: train_ours(folder / name, own, options) for name, own in params.items()}
    if len({result["dataset"] for result in recipes.values()}) > 1:
        raise DataError("the recipes did not train on the same data", where=str(folder), fix="--again")
    ours, data = params[RECIPES[0]], folder / RECIPES[0]
    write_texts(data, ours)
    precision = "fp32" if autocast_type(ours.optim.precision, choose_device("cpu")) is None else "bf16"
    settings = {
        "encoder": str(resolve_encoder(ours.encoder.name).resolve()), "max_length": ours.tokens.max_length,
        "pooling": ours.encoder.pooling, "batch_size": options.batch_size, "seed": ours.seed, "precision": precision,
        "dataset": recipes[RECIPES[0]]["dataset"],
    }  # fmt: skip
    rate, trials = options.rates[0], []
    if len(options.rates) > 1:
        seconds = 60 * options.minutes * TRIAL_SHARE
        short = settings | {"seconds": seconds, "every": seconds, "with_test": False}  # measured at their ends alone
        trials = [train_rival(data, short | {"learning_rate": tried}, options) for tried in options.rates]
        best = max(trials, key=lambda trial: trial["curve"][-1][TARGET])
        rate = best["asked"]["learning_rate"]
    whole = settings | {"seconds": 60 * options.minutes, "every": options.every, "with_test": True}
    rival = train_rival(data, whole | {"learning_rate": rate}, options)
    return {"recipes": recipes, "trials": trials, "rival": rival}


# -- the command ------------------------------------------------------------------------------------------------------


def recipe_params(recipe: str, overrides: Mapping[str, Any]) -> Params:
    """params.yaml with another recipe, on the processor; local folders by their whole paths."""
    params = load_params(ROOT / "params.yaml", {"recipe": recipe, "device": "cpu", **overrides})
    places = {"data": ("path", params.data.path), "encoder": ("name", params.encoder.name)}
    for section, (key, value) in places.items():
        if (ROOT / value).is_dir():
            moved = getattr(params, section).model_copy(update={key: str((ROOT / value).resolve())})
            params = params.model_copy(update={section: moved})
    return params


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shown = " ".join(f"{rate:g}" for rate in RATES)
    parser.add_argument("--minutes", type=float, help="of the rival's training (20)")
    parser.add_argument(
        "--rates",
        type=float,
        nargs="+",
        default=RATES,
        metavar="RATE",
        help=f"learning rates of the rival's short trainings ({shown}); one: without short trainings",
    )
    parser.add_argument("--batch-size", type=int, default=128, help="of the rival (128)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of every training (all cores)")
    parser.add_argument("--queries", type=int, help="training and test queries of a slice; 0: all")
    parser.add_argument("--every", type=float, help="seconds of training between two points of a curve, at first (15)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="parameters of our recipes")
    parser.add_argument("--quick", action="store_true", help="a slice, two epochs, half a minute: does it run?")
    parser.add_argument("--again", action="store_true", help="train everything again")
    parser.add_argument("--folder", type=Path, help="for the trainings (runs/time-to-quality; with --quick another)")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "time-to-quality",
                        help="of the three files, without their ending")  # fmt: skip
    options = parser.parse_args(words)
    usual = QUICK if options.quick else {"minutes": 20.0, "every": 15.0, "queries": 0, "set": {}}
    for name in ("minutes", "every", "queries"):
        if getattr(options, name) is None:
            setattr(options, name, usual[name])
    options.folder = options.folder or ROOT / "runs" / ("time-to-quality" + options.quick * "-quick")
    options.overrides = usual["set"] | parse_overrides(options.set)
    return options


def main(words: Sequence[str] | None = None) -> int:
    """Run the program; its exit code."""
    options, begun_at_load = parse(words), os.getloadavg()
    params = {recipe: recipe_params(recipe, options.overrides) for recipe in RECIPES}
    found = train_all(params, options)
    with contextlib.chdir(options.folder / RECIPES[0]):
        dataset = paths.open_dataset()
        sizes = [f"{len(dataset.rows(split)):,} {split}" for split in SPLITS]
    settings = {
        "command": " ".join(["python benchmarks/time_to_quality.py", *(sys.argv[1:] if words is None else words)]),
        "data": f"{dataset.name}, {params[RECIPES[0]].tokens.text}; {', '.join(sizes)} queries, "
        f"{dataset.num_labels:,} labels",
    }
    facts = machine() | {"threads": options.threads, "load before": " ".join(f"{load:.1f}" for load in begun_at_load)}
    print(write(options.out, {"machine": facts, "settings": settings, "times": times(found), "found": found}))
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except UnidecError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
