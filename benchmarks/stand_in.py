"""A synthetic stand-in for a published data set: raw files of its size through every stage
(`published.py stand-in`).

N, L, positives a query and words a text are those of benchmarks/published/<data set>.yaml, N and L
times a share. Texts with contents are as long as the tokens allow, which real ones are at most.
Training has the set's own settings but for the encoder (a small one of random weights), the queries
a batch, and with them the pool: a CPU has to do it."""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import math
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import published
from measure import Memory
from synthetic import Synthetic, Words, texts, write_encoder

from unidec.config import Params
from unidec.errors import ConfigError, TrainingError, UnidecError
from unidec.model.sources import resolve_encoder

# what is not published of the one is taken from the other
LIKE = {"LF-Wikipedia-500K": "LF-WikiTitles-500K", "Query2Bid-450M": "LF-WikiTitles-500K"}
STAGES = (
    "raw",
    "ingest",
    "validate",
    "tokens",
    "propensity",
    "label graph",
    "refresh",
    "steps",
    "index",
    "evaluate",
)
SIZES = (
    "N",
    "L",
    "positives a query",
    "words a query",
    "tokens a query",
    "queries a batch",
    "labels a pool",
    "loss",
)
COLUMNS = (
    "data set",
    "method",
    *SIZES,
    *(f"{stage}, s" for stage in STAGES),
    "memory, GiB",
    "result",
)
# test queries: a slice, and their number is not published
MOST_TEST = 2000
FEWEST_TEST = 50
BLOCK = 4096  # texts made at once
FILTERED = 20  # of so many queries one has a filter pair
Row = dict[str, Any]


class Enough(Exception):
    """So many steps are trained."""


def over(*_: Any) -> None:
    """The time is over; what has run is shown."""
    raise TrainingError("the minutes are over")


def run(given: argparse.Namespace) -> int:
    """`published.py stand-in`: one data set or all; prints a table, and gives the exit code: 1 if a
    stage failed.
    """
    if given.minutes:
        signal.signal(signal.SIGALRM, over)
        signal.alarm(math.ceil(60 * given.minutes))
    chosen = published.names() if given.data_set == "all" else [given.data_set]
    rows = []
    options = {
        key: getattr(given, key)
        for key in ("method", "share", "steps", "batch", "encoder", "until")
    }
    for name in chosen:
        row = stand_in(name, **options, folder=given.folder / name if given.folder else None)
        rows.append(row)
        print(f"{name}: {row['result']}", flush=True)
    lines = table(rows)
    print("\n".join(lines))
    if given.output:
        given.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return int(any(row["result"] != "ok" for row in rows))


def stand_in(
    name: str,
    method: str | None = None,
    share: float = 0.01,
    steps: int = 20,
    batch: int = 64,
    encoder: str | None = None,
    folder: Path | None = None,
    until: str = STAGES[-1],
) -> Row:
    """Run every stage once, each timed.

    Args:
        share: of the data set's queries and labels, above 0 to 1.
        batch: queries a batch at most; the pool shrinks alike.
        encoder: as `encoder.name`; None: a small one of random weights.
        folder: where raw files, data and outputs are kept; None: a temporary one.
        until: the last stage to run.

    Returns:
        a row of `table`: a stage's seconds, or nothing where it did not run; the most memory on top
        of what the process held before; `result` is "ok" or the first error.

    Raises:
        ConfigError: no such data set, method, share or stage.
    """
    facts = published.data_set(name)["facts"]
    method = method or _usual(name)
    published.resolve(name, method)
    if not 0 < share <= 1:
        raise ConfigError("not a share", where="--share", got=share, expected="above 0, at most 1")
    if until not in STAGES:
        raise ConfigError("no such stage", where="--until", got=until, expected=", ".join(STAGES))
    num_train, num_labels = (
        max(256, round(share * facts[key])) for key in ("train_queries", "labels")
    )
    row: Row = {"data set": name, "method": method, "N": num_train, "L": num_labels, "result": "ok"}
    with contextlib.ExitStack() as stack:
        at = folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        at.mkdir(parents=True, exist_ok=True)
        stack.enter_context(contextlib.chdir(at))
        changed = {"data.path": "raw", "encoder.name": encoder or _small_encoder(Path("encoder"))}
        changed["validation.unknown_tokens"] = "warn"  # the words are made up
        whole = published.resolve(name, method)
        if not whole.model.projection:
            changed["model.dim"] = _width(changed["encoder.name"])
        params = published.resolve(name, method, changed | _smaller(whole, num_train, batch))
        row |= {
            "queries a batch": params.pool.batch_size,
            "labels a pool": params.pool.size or "no limit",
        }
        memory = stack.enter_context(Memory())
        for stage, work in _stages(params, name, num_train, num_labels, steps):
            begin = time.perf_counter()
            try:
                row |= work() or {}
            except UnidecError as error:
                row["result"] = f"{stage} failed: {error}"
                break
            row[f"{stage}, s"] = time.perf_counter() - begin
            if stage == until:
                break
    return row | {"memory, GiB": memory.facts()["peak_mib"] / 1024}


def table(rows: list[Row]) -> list[str]:
    """Lines of a Markdown table; stages are seconds."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    for row in rows:
        cells = [_cell(row.get(column, "-")) for column in COLUMNS]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _width(encoder: str) -> int:
    """Of an encoder's vectors."""
    config = json.loads((resolve_encoder(encoder) / "config.json").read_text(encoding="utf-8"))
    return int(config.get("hidden_size") or config["dim"])  # DistilBERT's name of it


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1f}" if value >= 1 else f"{value:.2g}"  # a small figure must not read as 0
    return (
        f"{value:,}" if isinstance(value, int) else str(value).replace("\n", " ").replace("|", "/")
    )


def _usual(name: str) -> str:
    known: list[str] = published.data_set(name)["methods"]
    return "unidec-v2-bce" if "unidec-v2-bce" in known else known[0]


def _smaller(params: Params, num_train: int, batch: int) -> dict[str, Any]:
    """Queries a batch that leave 32 batches or more, and a pool, and texts encoded at once, of the
    same proportion.
    """
    size = max(4, min(batch, params.pool.batch_size, num_train // 32))
    share = size / params.pool.batch_size
    smaller = {"pool.size": params.pool.size, "optim.encode_chunk": params.optim.encode_chunk}
    return {
        "pool.start_epoch": 0,  # the first refresh clusters and mines
        "pool.batch_size": size,
        **{key: math.ceil(share * value) for key, value in smaller.items()},
    }


def _small_encoder(folder: Path) -> str:
    """A DistilBERT with two layers, 64 wide, random weights and the tokenizer of the
    installed one.
    """
    return str(
        write_encoder(
            folder,
            hidden=64,
            layers=2,
            tokenizer_from=resolve_encoder("all-MiniLM-L6-v2"),
            kind="distilbert",
        )
    )


# -- stages
# --------------------------------------------------------------------------------------------------


def _stages(
    params: Params, name: str, num_train: int, num_labels: int, steps: int
) -> Iterator[tuple[str, Callable[[], Row | None]]]:
    """Name and work of each stage, in their order, in the working folder; the work gives cells of
    the table.
    """
    from unidec import pipeline
    from unidec.pipeline.training import Run

    found: list[Run] = []

    def tokens() -> Row:
        made = pipeline.tokens(params)
        return {"tokens a query": made["queries_tokens"] / made["queries_texts"]}

    def refresh() -> None:
        found.append(pipeline.start_run(params, track=False))
        found[0].cluster()
        found[0].mine()

    yield "raw", lambda: write_raw(params, name, num_train, num_labels, Path("raw"))
    yield "ingest", lambda: _nothing(pipeline.ingest(params))
    yield "validate", lambda: _nothing(pipeline.validate(params))
    yield "tokens", tokens
    yield "propensity", lambda: _nothing(pipeline.propensity(params))
    if params.reads_label_graph:
        yield "label graph", lambda: _nothing(pipeline.label_graph(params))
    yield "refresh", refresh
    yield "steps", lambda: _train(found[0], steps)
    yield "index", lambda: _nothing(pipeline.index(params))
    yield "evaluate", lambda: _nothing(pipeline.evaluate(params))


def _nothing(_: Any) -> None:
    return None


def _train(run: Any, steps: int) -> Row:
    """Train until the first logging step that is not below `steps`; write the model."""
    losses: list[float] = []

    def stop(step: int, figures: dict[str, float]) -> None:
        losses.append(figures["loss"])
        if step >= steps:
            raise Enough

    try:
        run.trainer.train_round(stop)
    except Enough:
        run.export()
        return {"loss": f"{losses[0]:.2f} to {losses[-1]:.2f}"}
    raise ConfigError(
        "the first round has too few steps",
        where="--steps",
        got=steps,
        expected=f"{run.trainer.at.step}",
        fix="a larger --share, or a smaller --batch",
    )


# -- raw files
# --------------------------------------------------------------------------------------------------


def write_raw(params: Params, name: str, num_train: int, num_labels: int, folder: Path) -> Row:
    """Raw files as the XMC repository has them: {trn,tst,lbl}.json.gz,
    filter_labels_{train,test}.txt.
    """
    facts = published.data_set(name)["facts"]
    if published.NOT_PUBLISHED in facts.values():
        given = {key: value for key, value in facts.items() if value != published.NOT_PUBLISHED}
        facts = published.data_set(LIKE[name])["facts"] | given
    num_test = min(MOST_TEST, max(FEWEST_TEST, num_train // 20))
    sizes = (num_train, num_test, num_labels)
    words = Words()
    mean = max(3.0, facts["words_a_query"])
    drawn = _draws(words, sizes, facts["positives_a_query"])
    data = Synthetic(words, *sizes, mean_positives=drawn, query_mean=mean, label_mean=mean)
    contents = None
    if params.tokens.text == "title+content":
        contents = Synthetic(
            words, *sizes, mean_positives=drawn, query_mean=params.tokens.max_length
        )
    folder.mkdir(parents=True)
    with gzip.open(folder / "lbl.json.gz", "wt", compresslevel=1, encoding="utf-8") as file:
        for rows_B in _blocks(0, num_labels):
            for row, title in zip(rows_B, _texts(data, data.label_words(rows_B)), strict=True):
                file.write(json.dumps({"uid": f"l{row}", "title": title}) + "\n")
    _write_queries(data, contents, folder, "trn", "train", 0, num_train)
    _write_queries(data, contents, folder, "tst", "test", num_train, num_train + num_test)
    sample_B = np.arange(min(num_train, BLOCK))
    of_text = contents or data
    positives, written = (
        len(part(sample_B)[0]) / len(sample_B) for part in (data.positives, of_text.query_words)
    )
    return {"positives a query": positives, "words a query": written + (mean if contents else 0)}


def _draws(words: Words, sizes: tuple[int, int, int], positives: float) -> float:
    """How many labels to draw for a query on average, so that so many differ: some are
    drawn twice.
    """
    drawn = positives
    sample_B = np.arange(min(sizes[0], BLOCK))
    for _ in range(4):
        found = len(Synthetic(words, *sizes, mean_positives=drawn).positives(sample_B)[0]) / len(
            sample_B
        )
        drawn = max(1.0, drawn * positives / found)
    return drawn


def _write_queries(
    data: Synthetic,
    contents: Synthetic | None,
    folder: Path,
    short: str,
    split: str,
    begin: int,
    end: int,
) -> None:
    """A split's queries and filter pairs."""
    with (
        gzip.open(folder / f"{short}.json.gz", "wt", compresslevel=1, encoding="utf-8") as file,
        open(folder / f"filter_labels_{split}.txt", "w", encoding="utf-8") as filters,
    ):
        for rows_B in _blocks(begin, end):
            titles = _texts(data, data.query_words(rows_B))
            bodies = (
                _texts(contents, contents.query_words(rows_B)) if contents else [""] * len(rows_B)
            )
            flat, offsets = data.positives(rows_B)
            for i, row in enumerate(rows_B.tolist()):
                own = flat[offsets[i] : offsets[i + 1]].tolist()
                item = {
                    "uid": f"q{row}",
                    "title": titles[i],
                    "content": bodies[i],
                    "target_ind": own,
                    "target_rel": [1.0] * len(own),
                }
                file.write(json.dumps(item) + "\n")
                if row % FILTERED == 0 and (label := (own[0] + 1) % data.num_labels) not in own:
                    filters.write(f"{row - begin} {label}\n")


def _texts(data: Synthetic, ragged: tuple[np.ndarray, np.ndarray]) -> list[str]:
    found: list[str] = texts(data.words, ragged).to_pylist()
    return found


def _blocks(begin: int, end: int) -> Iterator[np.ndarray]:
    for start in range(begin, end, BLOCK):
        yield np.arange(start, min(start + BLOCK, end))
