"""What the gate asks of a bundle: can it be served, in a fresh process, and what it answers to the test split as it is
now, ranked from texts with its own tokenizer, labels mapped by uid.

Legend: N test queries, K places, L labels of the data set, B labels of a bundle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from unidec.data.dataset import XMCDataset
from unidec.errors import ArtifactError
from unidec.evaluation.challenge import Check
from unidec.evaluation.metrics import moved_up
from unidec.pipeline.ranking import K
from unidec.progress import progress
from unidec.retrieval.bundle import Bundle
from unidec.retrieval.probe import Probe, answers, num_different, probe_bundle
from unidec.retrieval.query_encoder import Runtime
from unidec.sections import Gate

_AT_ONCE = 1024  # queries between two steps of the progress line
_MOST_REMOVED = 3 * K  # labels that the data set has no more: so many places are searched beyond K at most
PROBE_K = 10
RUNTIME: Runtime = "auto"  # as `unidec serve` encodes queries
_AGAIN = 3  # times both are measured, in turn, while a time speaks against the challenger
_PATIENCE = 600.0  # seconds until a fresh process counts as hung
_TIMES = ("load_seconds", "load_cpu_seconds", "p50_ms", "p95_ms", "p95_cpu_ms")


def probe_texts(dataset: XMCDataset, bundle: Bundle, num: int) -> list[str]:
    """Texts of at most `num` queries, evenly spaced over the test split, or over all queries where it is empty."""
    rows = dataset.rows("test")
    rows = rows if len(rows) else dataset.rows("train")
    return own_texts(bundle, dataset, rows[:: max(len(rows) // num, 1)][:num]) or ["a query"]


def servability(folders: Mapping[str, Path], texts: Sequence[str], rules: Gate) -> tuple[list[Check], dict[str, Probe]]:
    """The checks, and what fresh processes report of the bundles, where they answered.

    Args:
        folders: of the bundles "challenger" and, where there is one, "champion".
        texts: probe queries.
    """
    probes: dict[str, Probe] = {}
    timeout = max(_PATIENCE, 2 * rules.max_load_seconds) + len(texts)
    for _ in range(_AGAIN):
        for name, folder in folders.items():
            try:
                probe = probe_bundle(folder, texts, PROBE_K, timeout, runtime=RUNTIME, threads=1)
            except ArtifactError as error:
                if "challenger" not in probes:
                    return [Check("loads", False, None, None, str(error).replace("\n", " "))], {}
                continue  # a champion that cannot be served: nothing to be slower or larger than
            if name in probes:  # the better time of two: what else runs on a machine only adds
                better = {time: min(getattr(probe, time), getattr(probes[name], time)) for time in _TIMES}
                probe = replace(probe, **better)
            probes[name] = probe
        checks = figures(probes, rules)
        if all(check.passed or check.check.startswith("size") for check in checks):
            break
    probe, here = probes["challenger"], Bundle.load(folders["challenger"], lazy=True)
    different = num_different(probe, *answers(here, texts, PROBE_K, RUNTIME, 1))
    words = f"{len(texts) - different} of {len(texts)} probe queries get the same answer there as here"
    return [
        Check("loads", True, None, None, "a fresh process loads it, every hash agrees"),
        Check("answers", different == 0 and probe.sha256 == here.sha256, float(different), 0.0, words),
        *checks,
    ], probes


def figures(probes: Mapping[str, Probe], rules: Gate) -> list[Check]:
    """Processor time and size as multiples of the champion's; wall clock and size against limits where some are set."""
    probe, champion, checks = probes["challenger"], probes.get("champion"), []
    for name, key, limit, unit in (
        ("load time", "load_seconds", rules.max_load_seconds, "s from start to the first answer"),
        ("latency", "p95_ms", rules.max_latency_ms, "ms for 95 % of single queries"),
        ("size", "megabytes", rules.max_megabytes, "MB on disk"),
        ("load ratio", "load_cpu_seconds", rules.max_load_ratio, "s of processor time to the first answer"),
        ("latency ratio", "p95_cpu_ms", rules.max_latency_ratio, "ms of processor time for 95 % of queries"),
        ("size ratio", "megabytes", rules.max_size_ratio, "MB"),
    ):
        got, words = getattr(probe, key), f"{getattr(probe, key):.3g} {unit}, at most {limit:g}"
        if name.endswith("ratio"):
            its = getattr(champion, key) if champion else 0.0
            if not its:
                continue
            words = f"{got:.3g} against {its:.3g} {unit}: {got / its:.2f} times the champion's, at most {limit:g}"
            got /= its
        if limit:
            checks.append(Check(name, got <= limit, got, limit, words))
    return checks


def rank_test_split(bundle: Bundle, dataset: XMCDataset) -> tuple[np.ndarray, dict[str, int]]:
    """The bundle's first `K` labels for each test query without filtered pairs: int32 [N, K], rows of the data set's
    labels, best first, -1 = none; and {"unknown": labels of the data set that the bundle does not know, "removed":
    labels of the bundle that the data set lacks}."""
    row_of, rows = {uid: row for row, uid in enumerate(dataset.label_uids())}, dataset.rows("test")
    row_of_B = np.array([row_of.get(uid, -1) for uid in bundle.uids.to_pylist()], dtype=np.int64)
    removed = int((row_of_B < 0).sum())
    texts, filtered, uids = own_texts(bundle, dataset, rows), dataset.filter_pairs[rows], dataset.labels["uid"]
    parts = [np.zeros((0, K), dtype=np.int32)]
    with progress(total=len(texts), desc=f"queries by {bundle.sha256[:8]}", unit="query") as bar:
        for start in range(0, len(texts), _AT_ONCE):
            some = texts[start : start + _AT_ONCE]
            exclude = [uids.take(filtered[i].indices).to_pylist() for i in range(start, start + len(some))]
            found = bundle.predict_arrays(some, K + min(removed, _MOST_REMOVED), exclude).rows
            mapped_NK = np.where(found >= 0, row_of_B[np.maximum(found, 0)], -1)
            parts.append(moved_up(mapped_NK, K).astype(np.int32))
            bar.update(len(some))
    unknown = dataset.num_labels - (len(row_of_B) - removed)
    return np.concatenate(parts), {"unknown": unknown, "removed": removed}


def own_texts(bundle: Bundle, dataset: XMCDataset, rows: np.ndarray) -> list[str]:
    """Queries as the bundle's model was trained to read them."""
    return dataset.query_texts(rows, "title+content" if bundle.info.text == "title+content" else "title")
