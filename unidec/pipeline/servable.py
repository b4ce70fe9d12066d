"""Can a bundle be served? It is asked in a fresh process, by the runtime that serves; so is the champion."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
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
    if champion is not None:
        try:
            probes["champion"] = probed(champion)
        except ArtifactError:
            champion = None  # it cannot be served either: nothing to be slower or larger than
    checks = figures(probes["challenger"], probes.get("champion"), rules)
    folders = {"challenger": challenger, "champion": champion}
    for _ in range(_AGAIN - 1):
        if all(check.passed for check in checks if check.check in _TIMED):
            break
        with contextlib.suppress(ArtifactError):  # it answered before
            for name, before in probes.items():
                probes[name] = _faster(before, probed(Path(str(folders[name]))))
        checks = figures(probes["challenger"], probes.get("champion"), rules)
    probe, here = probes["challenger"], Bundle.load(challenger, lazy=True)
    different = num_different(probe, *answers(here, texts, PROBE_K, RUNTIME, 1))
    words = f"{len(texts) - different} of {len(texts)} probe queries get the same answer there as here"
    return [
        Check("loads", True, None, None, "a fresh process loads it, every hash agrees"),
        Check("answers", different == 0 and probe.sha256 == here.sha256, float(different), 0.0, words),
        *checks,
    ], probes


_TIMED = ("load time", "latency", "load ratio", "latency ratio")


def figures(probe: Probe, champion: Probe | None, rules: Gate) -> list[Check]:
    """Processor time and size as multiples of the champion's; wall clock and size against limits where some are set."""
    checks = [
        _limit("load time", probe.load_seconds, rules.max_load_seconds, "s", "from start to the first answer"),
        _limit("latency", probe.p95_ms, rules.max_latency_ms, "ms", "for 95 % of single queries"),
        _limit("size", probe.megabytes, rules.max_megabytes, "MB", "on disk"),
    ]
    if champion is not None:
        load, answer = "s of processor time to the first answer", "ms of processor time for 95 % of queries"
        checks += [
            _ratio("load ratio", probe.load_cpu_seconds, champion.load_cpu_seconds, rules.max_load_ratio, load),
            _ratio("latency ratio", probe.p95_cpu_ms, champion.p95_cpu_ms, rules.max_latency_ratio, answer),
            _ratio("size ratio", probe.megabytes, champion.megabytes, rules.max_size_ratio, "MB"),
        ]
    return [check for check in checks if check is not None]


def _limit(name: str, got: float, limit: float, unit: str, about: str) -> Check | None:
    if limit == 0:
        return None
    return Check(name, got <= limit, got, limit, f"{got:.3g} {unit} {about}, at most {limit:g} {unit}")


def _ratio(name: str, got: float, champion: float, limit: float, unit: str) -> Check | None:
    if limit == 0 or champion <= 0:
        return None
    words = f"{got:.3g} against {champion:.3g} {unit}: {got / champion:.2f} times the champion's, at most {limit:g}"
    return Check(name, got / champion <= limit, got / champion, limit, words)


def _faster(before: Probe, again: Probe) -> Probe:
    """The better time of two: what else runs on a machine only adds."""
    names = ("load_seconds", "load_cpu_seconds", "p50_ms", "p95_ms", "p95_cpu_ms")
    times = {name: min(getattr(before, name), getattr(again, name)) for name in names}
    return Probe(**(vars(again) | times))
