"""Loads a bundle in a fresh process, as a server does: whether it loads, its answers, its speed and its size.

    python -m unidec.retrieval.probe < job.json        {"bundle": folder, "texts": [...], "k": 10, "began": time.time()}

The last line printed is the answer, JSON: see `Probe`. Nothing but what serving needs is imported here.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from unidec.errors import ArtifactError

if TYPE_CHECKING:
    from unidec.retrieval.bundle import Bundle

WARM_UP = 8  # queries answered before the clock counts
TURNS = 2  # of all queries; each one's better time counts: what else runs on the machine only adds
CLOSE = 1e-5  # scores that differ by less, relative to 1 or their size, are the same


@dataclass(frozen=True)
class Probe:
    """What a fresh process said of a bundle.

    Attributes:
        sha256: of the folder, after every file was checked.
        load_seconds: from the start of the process to its first answer.
        load_cpu_seconds: processor time of the same, all threads: what else runs on the machine is not in it.
        p50_ms, p95_ms: percentiles over the queries, one query at a time, after a warm-up.
        p95_cpu_ms: as p95_ms, in processor time.
        peak_megabytes: most resident memory. megabytes: size of the folder.
        labels, scores: uids and scores of each query's answer, best first.
    """

    sha256: str
    load_seconds: float
    load_cpu_seconds: float
    p50_ms: float
    p95_ms: float
    p95_cpu_ms: float
    peak_megabytes: float
    megabytes: float
    labels: list[list[str]]
    scores: list[list[float]]

    def figures(self) -> dict[str, float]:
        """The numbers without the answers."""
        return {name: float(value) for name, value in vars(self).items() if isinstance(value, int | float)}


class Answers(Protocol):
    """uids and scores of each query's answer, best first."""

    @property
    def labels(self) -> list[list[str]]: ...

    @property
    def scores(self) -> list[list[float]]: ...


def probe_bundle(bundle: Path, texts: Sequence[str], k: int, timeout: float) -> Probe:
    """Asks a bundle in a fresh process, which is killed after `timeout` seconds.

    Raises:
        ArtifactError: it does not load, dies on the way or gives no answer in time; with its last words.
    """
    job = {"bundle": str(bundle), "texts": list(texts), "k": k, "began": time.time()}
    fix = f"look at it with: unidec predict --bundle {bundle} TEXT"
    try:
        done = subprocess.run(
            [sys.executable, "-m", "unidec.retrieval.probe"], input=json.dumps(job), capture_output=True, text=True,
            timeout=timeout, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise ArtifactError(
            "no answer from a fresh process", where=str(bundle), got=f"nothing in {timeout:.0f} s", fix=fix
        ) from error
    if done.returncode:
        last = done.stderr.strip()[-500:] or f"exit code {done.returncode}"
        raise ArtifactError("a fresh process cannot serve it", where=str(bundle), got=last, fix=fix)
    return Probe(**json.loads(done.stdout.splitlines()[-1]))


def answers(bundle: Bundle, texts: Sequence[str], k: int) -> tuple[list[list[str]], list[list[float]]]:
    """uids and scores of each text's answer, one text at a time, as a server is asked."""
    found = [bundle.predict([text], k=k)[0] for text in texts]
    return [list(one.labels) for one in found], [list(one.scores) for one in found]


def num_different(probe: Answers, labels: Sequence[Sequence[str]], scores: Sequence[Sequence[float]]) -> int:
    """Queries answered otherwise here than there: another score, or another label where the scores do not tie."""

    def same(query: int) -> bool:
        mine, its = (labels[query], scores[query]), (probe.labels[query], probe.scores[query])
        if len(mine[0]) != len(its[0]):
            return False
        close = [abs(a - b) <= CLOSE * max(1.0, abs(a)) for a, b in zip(mine[1], its[1], strict=True)]
        if not all(close):
            return False
        # equal scores may come in any order: at each place the label must be one that has this score there too
        score_of = dict(zip(its[0], its[1], strict=True))
        last = mine[1][-1] if mine[1] else 0.0
        for label, score in zip(*mine, strict=True):
            there = score_of.get(label, last)  # one that fell out at the end ties with the last
            if abs(there - score) > CLOSE * max(1.0, abs(score)):
                return False
        return True

    return sum(not same(query) for query in range(len(labels)))


def main() -> None:
    """The fresh process."""
    job = json.load(sys.stdin)
    from unidec.retrieval.bundle import Bundle

    folder, texts, k = Path(job["bundle"]), job["texts"], job["k"]
    bundle = Bundle.load(folder)
    bundle.predict(texts[:1], k=k)
    load_seconds, load_cpu_seconds = time.time() - job["began"], time.process_time()
    for text in texts[:WARM_UP]:
        bundle.predict([text], k=k)
    answered = [[_timed(bundle, text, k) for _ in range(TURNS)] for text in texts]
    labels, scores = ([list(getattr(turns[0][0], name)) for turns in answered] for name in ("labels", "scores"))
    wall, cpu = (sorted(min(turn[clock] for turn in turns) for turns in answered) for clock in (1, 2))
    p95 = int(0.95 * (len(texts) - 1))
    probe = Probe(
        sha256=bundle.sha256, load_seconds=load_seconds, load_cpu_seconds=load_cpu_seconds,
        p50_ms=1000 * wall[len(texts) // 2], p95_ms=1000 * wall[p95], p95_cpu_ms=1000 * cpu[p95],
        peak_megabytes=peak_megabytes(), labels=labels, scores=scores,
        megabytes=sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6,
    )  # fmt: skip
    print(json.dumps(asdict(probe)))


def _timed(bundle: Any, text: str, k: int) -> tuple[Any, float, float]:
    """A text's prediction, and the seconds that it took by the wall clock and of the processor."""
    began, used = time.perf_counter(), time.process_time()
    (found,) = bundle.predict([text], k=k)
    return found, time.perf_counter() - began, time.process_time() - used


def peak_megabytes() -> float:
    """Most resident memory of this process, in MB."""
    # not getrusage's where /proc has it: that counts the parent's as well
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / 1e6
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6


if __name__ == "__main__":
    main()
