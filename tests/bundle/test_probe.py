"""A bundle asked in a fresh process: what it says, and what it says of one that cannot
be served.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.gated_registry import label_text, make_bundle

from unidec.bundle.bundle import Bundle
from unidec.bundle.probe import probe_bundle
from unidec.errors import ArtifactError


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("probe")
    return make_bundle(folder, "one") / "artifacts" / "bundle"


def test_what_a_fresh_process_says(bundle):
    texts = [label_text(label) for label in range(12)]
    found = probe_bundle(bundle, texts, 5, timeout=120)
    assert found.sha256 == Bundle.load(bundle).sha256
    assert 0 < found.p50_ms <= found.p95_ms < 10_000
    assert 0 < found.load_seconds < 120
    expected = sum(f.stat().st_size for f in bundle.rglob("*") if f.is_file()) / 1e6
    assert found.megabytes == pytest.approx(expected)
    assert 50 < found.peak_megabytes < 4000  # Python and torch, not the parent's memory too
    assert 0 < found.p95_cpu_ms < 10_000 and 0.1 < found.load_cpu_seconds < 120


def test_one_that_cannot_be_served_says_why(bundle, tmp_path, monkeypatch):
    with pytest.raises(ArtifactError, match="a fresh process cannot serve it"):
        probe_bundle(tmp_path / "nowhere", ["x"], 5, timeout=120)
    sleeper = tmp_path / "python"
    sleeper.write_text("#!/bin/sh\nexec sleep 60\n")
    sleeper.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(sleeper))
    began = time.monotonic()
    with pytest.raises(ArtifactError, match="no answer from a fresh process"):
        probe_bundle(bundle, ["x"], 5, timeout=0.5)
    assert time.monotonic() - began < 30
    killed = tmp_path / "killed"
    killed.write_text("#!/bin/sh\nkill -9 $$\n")
    killed.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(killed))
    with pytest.raises(ArtifactError, match="exit code -9"):
        probe_bundle(bundle, ["x"], 5, timeout=30)


def test_its_threads_do_not_spin(tmp_path, monkeypatch):
    """Votes solve small systems, for which BLAS would wake threads: while they wait they use a
    processor, and the gate compares processor time.
    """
    shows = tmp_path / "python"
    shows.write_text('#!/bin/sh\necho "$OPENBLAS_NUM_THREADS $OMP_WAIT_POLICY" >&2\nexit 1\n')
    shows.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(shows))
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    with pytest.raises(ArtifactError, match="1 PASSIVE"):
        probe_bundle(tmp_path, ["x"], 5, timeout=30)


def test_nothing_heavy_is_imported_for_training(bundle):
    """The memory of a probe is that of serving: it must not import what only training or tracking
    needs.
    """
    job = {
        "bundle": str(bundle),
        "texts": ["red"],
        "k": 1,
        "began": time.time(),
        "runtime": "torch",
        "threads": 0,
    }
    job |= {"max_bytes": 0, "seconds": 120}
    code = (
        "import io, sys; sys.stdin = io.StringIO(sys.argv[1])\n"
        "from unidec.bundle.probe import main; main()\n"
        "unwanted = {'mlflow', 'great_expectations', 'matplotlib', 'sklearn', "
        "'unidec.training.trainer'}\n"
        "print(sorted(unwanted & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(job)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "[]"
