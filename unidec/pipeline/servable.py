"""Can a bundle be served? It is asked in a fresh process, by the runtime that serves; so is the champion."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from unidec.data.dataset import Split, XMCDataset
from unidec.errors import ArtifactError
from unidec.evaluation.challenge import Check
from unidec.pipeline.champion_evaluation import own_texts
from unidec.retrieval.bundle import Bundle
from unidec.retrieval.probe import Probe, answers, num_different, probe_bundle
from unidec.retrieval.query_encoder import Runtime
from unidec.sections import Gate

PROBE_K = 10
RUNTIME: Runtime = "auto"  # as `unidec serve` encodes queries
_SPLITS: tuple[Split, ...] = ("test", "validation", "train")
_AGAIN = 3  # times both are measured, in turn, while a time speaks against the challenger
_PATIENCE = 600.0  # seconds until a fresh process counts as hung


def probe_texts(dataset: XMCDataset, bundle: Bundle, num: int) -> list[str]:
    """Texts of at most `num` queries, evenly spaced over the test split, or over what there is where it is empty."""
    rows = next((rows for split in _SPLITS if len(rows := dataset.rows(split))), None)
    if rows is None:
        return ["a query"]
    return own_texts(bundle, dataset, rows[:: max(len(rows) // num, 1)][:num])


def servability(
    challenger: Path, champion: Path | None, texts: Sequence[str], rules: Gate
) -> tuple[list[Check], dict[str, Probe]]:
    """The checks, and what fresh processes report of "challenger" and "champion", where they answered.

    Args:
        challenger, champion: folders of the bundles; None: there is no champion yet.
        texts: probe queries.
    """
    timeout = max(_PATIENCE, 2 * rules.max_load_seconds) + len(texts)

    def probed(folder: Path) -> Probe:
        return probe_bundle(folder, texts, PROBE_K, timeout, runtime=RUNTIME, threads=1)

    probes: dict[str, Probe] = {}
    try:
        probes["challenger"] = probed(challenger)
    except ArtifactError as error:
        return [Check("loads", False, None, None, str(error).replace("\n", " "))], {}
    folders = {"challenger": challenger}
    if champion is not None:
        with contextlib.suppress(ArtifactError):  # it cannot be served either: nothing to be slower or larger than
            probes["champion"], folders["champion"] = probed(champion), champion
    for _ in range(_AGAIN - 1):
        if all(check.passed for check in figures(probes, rules) if check.check in _TIMED):
            break
        with contextlib.suppress(ArtifactError):  # it answered before
            for name, folder in folders.items():
                again, before = vars(probed(folder)), vars(probes[name])
                # the better time of two: what else runs on a machine only adds
                probes[name] = Probe(**before | {time: min(before[time], again[time]) for time in _TIMES})
    probe, here = probes["challenger"], Bundle.load(challenger, lazy=True)
    different = num_different(probe, *answers(here, texts, PROBE_K, RUNTIME, 1))
    words = f"{len(texts) - different} of {len(texts)} probe queries get the same answer there as here"
    return [
        Check("loads", True, None, None, "a fresh process loads it, every hash agrees"),
        Check("answers", different == 0 and probe.sha256 == here.sha256, float(different), 0.0, words),
        *figures(probes, rules),
    ], probes


_TIMED = ("load time", "latency", "load ratio", "latency ratio")
_TIMES = ("load_seconds", "load_cpu_seconds", "p50_ms", "p95_ms", "p95_cpu_ms")


def figures(probes: Mapping[str, Probe], rules: Gate) -> list[Check]:
    """Processor time and size as multiples of the champion's; wall clock and size against limits where some are set."""
    probe, champion = probes["challenger"], probes.get("champion")
    checks = []
    for name, got, limit, unit in (
        ("load time", probe.load_seconds, rules.max_load_seconds, "s from start to the first answer"),
        ("latency", probe.p95_ms, rules.max_latency_ms, "ms for 95 % of single queries"),
        ("size", probe.megabytes, rules.max_megabytes, "MB on disk"),
    ):
        if limit:
            checks.append(Check(name, got <= limit, got, limit, f"{got:.3g} {unit}, at most {limit:g}"))
    for name, key, limit, unit in (
        ("load ratio", "load_cpu_seconds", rules.max_load_ratio, "s of processor time to the first answer"),
        ("latency ratio", "p95_cpu_ms", rules.max_latency_ratio, "ms of processor time for 95 % of queries"),
        ("size ratio", "megabytes", rules.max_size_ratio, "MB"),
    ):
        mine, its = getattr(probe, key), 0.0 if champion is None else getattr(champion, key)
        if limit and its > 0:
            words = f"{mine:.3g} against {its:.3g} {unit}: {mine / its:.2f} times the champion's, at most {limit:g}"
            checks.append(Check(name, mine / its <= limit, mine / its, limit, words))
    return checks
