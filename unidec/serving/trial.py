"""A bundle tried in a process of its own before it may answer: `python -m unidec.serving.trial < job.json`.

What a hostile or damaged bundle does (a crash in a C++ library, memory without end, a loop) it does there. The child
loads it as the server will, answers known texts, and says what it answered; the server compares its own answers.

A job is one line of JSON: {"folder", "serve": section, "max_bytes": how much more memory than the imports take}. The
answer is `Trial`.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from unidec.errors import ArtifactError
from unidec.serving.children import answer_pipe, end_child, end_with_parent, start_child
from unidec.serving.room import folder_bytes

if TYPE_CHECKING:
    from unidec.retrieval.bundle import Bundle
    from unidec.sections import Serve
    from unidec.serving.service import Engine

TIMES = 2  # memory for a bundle, in its size on disk, beside what the imports and working space take
SPACE_BYTES = 384 << 20  # working space: thread stacks, arenas, a runtime's own copies of a small model
SECONDS = 60.0  # for a trial; more for a large bundle
BYTES_A_SECOND = 20e6
NUM_TITLES = 16
K = 10
_LONGEST = 400  # characters of a title that is asked
_ODD = ("zzyzx ⸘ 42", "a " * 100)  # nothing known, and longer than a model reads
_LAST_WORDS = 600
_NICE = 5
_FEW = 10_000  # rows of an index that is searched by all threads
# Arrow's own pool reserves a gigabyte at once, which the bound would count as taken
_PLAIN_POOL = {"ARROW_DEFAULT_MEMORY_POOL": "system"}


@dataclass(frozen=True)
class Trial:
    """What a fresh process said of a bundle.

    Attributes:
        sha256: of the folder, after every file was checked.
        texts: what it was asked, one at a time. labels, scores: uids and scores of each answer, best first.
        seconds: to load it. megabytes: most resident memory.
    """

    sha256: str
    texts: list[str]
    labels: list[list[str]]
    scores: list[list[float]]
    seconds: float
    megabytes: float


class Trials:
    """Trials of bundles, one at a time. `close` from any thread ends the one that runs."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None

    def run(self, folder: Path, settings: Serve) -> Trial:
        """Tries a bundle; the process is killed after a minute, more where the bundle is large.

        Raises:
            ArtifactError: it does not load, takes too much memory, dies, gives no answer in time or none that can be.
        """
        size = folder_bytes(folder)
        job = {"folder": str(folder), "serve": settings.model_dump(), "max_bytes": TIMES * size + SPACE_BYTES}
        seconds = SECONDS + size / BYTES_A_SECOND
        child = self._child = start_child("unidec.serving.trial", **_PLAIN_POOL)
        out = _Said(child, json.dumps(job).encode())
        ended = out.wait(seconds)
        code = child.poll()
        end_child(child)
        self._child = None
        if not ended:
            raise ArtifactError("a fresh process does not get it to answer", where=str(folder), got=f"{seconds:.0f} s")
        answer = _parsed(out.text)
        if code or answer is None or "failed" in answer:
            got = f"exit code {code}" if answer is None else answer.get("failed")
            raise ArtifactError("a fresh process cannot serve it", where=str(folder), got=got)
        return Trial(**answer)

    def close(self) -> None:
        """Ends the trial that runs, if any."""
        if (child := self._child) is not None:
            with contextlib.suppress(OSError):
                child.kill()


class _Said:
    """A child's whole output, its job given."""

    def __init__(self, child: subprocess.Popen[bytes], job: bytes) -> None:
        self._child, self._job, self.text = child, job, b""
        self._thread = threading.Thread(target=self._talk, daemon=True, name="unidec-trial")
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Whether it ended in time."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _talk(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # it died, or was killed
            self.text, _ = self._child.communicate(self._job)


def _parsed(text: bytes) -> dict[str, Any] | None:
    try:
        return dict(json.loads(text.splitlines()[-1]))
    except (ValueError, IndexError, TypeError):
        return None


def known_texts(bundle: Bundle) -> list[str]:
    """What a bundle is asked: some of its labels' titles, and two odd texts."""
    rows = np.unique(np.linspace(0, bundle.num_labels - 1, NUM_TITLES).astype(np.int64))
    titles = bundle.titles.take(pa.array(rows)).to_pylist()
    return [text[:_LONGEST] for text in titles if text.strip()] + list(_ODD)


def ask(engine: Engine, texts: Sequence[str]) -> tuple[list[list[str]], list[list[float]]]:
    """uids and scores of each text's answer, one at a time, as `Trial` has them.

    Raises:
        ArtifactError: an answer without labels, with one twice, with a score that is no number, or out of order.
    """
    from unidec.retrieval.answer import Request

    labels, scores = [], []
    for text in texts:
        (found,) = engine.answer([Request(text, k=K)])
        if why := unfit(found.labels, found.scores):
            raise ArtifactError("an answer that cannot be", where=str(engine.bundle.path), got=f"{why}: {text[:80]!r}")
        labels.append(list(found.labels))
        scores.append([float(score) for score in found.scores])
    return labels, scores


def unfit(labels: Sequence[str], scores: Sequence[float]) -> str:
    """What is wrong with an answer, "" where nothing is."""
    if not labels:
        return "no labels"
    if len(set(labels)) != len(labels):
        return "a label twice"
    if not all(math.isfinite(score) for score in scores):
        return "a score that is no number"
    return "" if all(a >= b for a, b in itertools.pairwise(scores)) else "scores out of order"


def bound_memory(more: int) -> None:
    """From here on this process gets at most `more` bytes of its own beside what it has (Linux); files that are mapped
    do not count."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        lines = Path("/proc/self/status").read_text().splitlines()
        now = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))
        resource.setrlimit(resource.RLIMIT_DATA, (now + more, now + more))


def _try(job: dict[str, Any]) -> dict[str, Any]:
    from unidec.retrieval.probe import peak_megabytes
    from unidec.sections import Serve
    from unidec.serving.service import Engine

    settings = Serve.model_validate(job["serve"])
    _import_all()
    bound_memory(int(job["max_bytes"]))
    began = time.perf_counter()
    engine = Engine.load(Path(job["folder"]), settings)
    seconds = time.perf_counter() - began
    texts = known_texts(engine.bundle)
    labels, scores = ask(engine, texts)
    return asdict(Trial(engine.identity.sha256, texts, labels, scores, seconds, peak_megabytes()))


def _import_all() -> None:
    """What loading imports: before the bound, so that it counts for the bundle alone."""
    import faiss
    import torch

    import unidec.retrieval.bundle  # noqa: F401

    torch.zeros(8) @ torch.zeros(8)  # its threads and their stacks; then faiss's, of one search and of two at once
    rows, small = np.zeros((_FEW, 8), dtype=np.float32), faiss.IndexFlatIP(8)
    small.add(rows)
    small.search(rows[:1], 1)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: small.search(rows[:1], 1), range(2)))
    with contextlib.suppress(ImportError):
        importlib.import_module("onnxruntime")


def main() -> None:
    """The child."""
    end_with_parent()
    answers = answer_pipe()
    with contextlib.suppress(OSError, AttributeError):
        os.nice(_NICE)
    try:
        answer = _try(json.load(sys.stdin))
    except Exception as error:  # whatever it was, it is a reason to keep the old one
        answer = {"failed": f"{type(error).__name__}: {error}"[-_LAST_WORDS:]}
    with os.fdopen(answers, "wb") as file:
        file.write(json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main()
