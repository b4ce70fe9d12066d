"""A project as a team has it, in a folder of its own: this repository's files in git, a slice of
the default data as a source that changes, a DVC remote beside. Small parameters: a training takes
seconds."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from helpers.raw_files import write_raw
from scipy.sparse import csr_matrix

from unidec.data.formats import read_raw
from unidec.data.raw import RawData, make_slice

ROOT = Path(__file__).resolve().parents[2]
NOT_NEEDED = (
    "tests/",
    "docs/",
    "benchmarks/",
    "comparison/",
    "data/raw/",
    "outputs/",
    "dvc.lock",
    "mlflow/",
)

PARAMS: dict[str, Any] = {
    "recipe": "unidec",
    "seed": 0,
    "device": "cpu",
    # git-ignored: what is fetched is DVC's and the source's business, not git's
    "data": {
        "path": "data/fetched",
        "format": "tables",
        "validation_share": 0.1,
        "test_share": 0.2,
        "split_seed": 0,
        "propensity_a": 0.55,
        "propensity_b": 1.5,
    },
    "raw": {},
    "validation": {},
    "tokens": {"max_length": 16},
    "label_graph": {},
    "encoder": {"kind": "bag", "dropout": 0.0, "bag_dropout": 0.1},
    "model": {"dim": 64, "dropout": 0.0},
    "pool": {"batch_size": 64, "refresh": 1, "size": 500},
    "loss": {},
    "optim": {"epochs": 1},
    "index": {},
    "run": {},
    "source": {"kind": "folder", "path": "../source"},
    "warm": {"epochs": 4, "lr_scale": 1.0, "warmup_epochs": 0.25},
    "retrain": {"push": True, "commit": "tag"},
    # a machine that does other things as well: what a fresh process takes says nothing here; and
    # 200 test queries cannot show a lead with the default confidence
    "gate": {"max_latency": "off", "max_load": "off", "confidence": 0.6},
    "drift": {},
    "serve": {},
    "tracking": {"experiment": "unidec", "model_name": "unidec"},
}


class TeamProject:
    """The folder, and what a person does in it."""

    def __init__(self, root: Path, environment: dict[str, str] | None = None) -> None:
        self.root = root / "project"
        self.source = root / "source"
        drop = ("GIT_", "DVC_", "PREFECT_", "MLFLOW_", "UNIDEC_")
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith(drop)
        }
        self.environment |= {
            "UNIDEC_PYTHON": sys.executable,
            "DVC_NO_ANALYTICS": "1",
            "DO_NOT_TRACK": "true",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "GIT_CONFIG_GLOBAL": os.devnull,
            **(environment or {}),
        }
        self._copy()
        self.params()
        self.git("init", "-q", "-b", "main")
        self.git("config", "user.name", "tests")
        self.git("config", "user.email", "tests@example.invalid")
        self.commit("first")

    def _copy(self) -> None:
        named = subprocess.run(
            [
                "git",
                "-C",
                str(ROOT),
                "ls-files",
                "-z",
                "--cached",
                "--others",
                "--exclude-standard",
            ],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for name in named.split("\0"):
            if name and not name.startswith(NOT_NEEDED) and (ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, self.root / name)
        (self.root / "mlflow").mkdir()

    def params(self, **sections: dict[str, Any]) -> None:
        """Writes params.yaml: the small parameters, with keys of sections replaced."""
        given = {
            name: {**value, **sections[name]} if name in sections else value
            for name, value in PARAMS.items()
        }
        assert set(sections) <= set(PARAMS)
        text = yaml.safe_dump(given, sort_keys=False)
        if (
            not (self.root / "params.yaml").exists()
            or (self.root / "params.yaml").read_text() != text
        ):
            (self.root / "params.yaml").write_text(text)

    def export(self, raw: RawData) -> None:
        """What the source holds from now on."""
        beside = self.source.with_name("source.new")
        write_raw(raw, beside, "tables")
        if self.source.exists():
            shutil.rmtree(self.source)
        beside.rename(self.source)

    # -- commands
    # ----------------------------------------------------------------------------------------------

    def run(
        self,
        *words: str,
        seconds: float = 300,
        check: bool = True,
        environment: dict[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """A command in the project's folder; it must go well unless `check` is False."""
        done = subprocess.run(
            words,
            cwd=self.root,
            env=environment or self.environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        assert not check or done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
        return done

    def git(self, *words: str) -> str:
        return self.run("git", *words).stdout.strip()

    def commit(self, message: str) -> None:
        self.git("add", "-A", ".")
        self.git("commit", "-q", "--allow-empty", "-m", message)

    def dvc(self, *words: str) -> str:
        return self.run(sys.executable, "-m", "dvc", *words).stdout

    def unidec(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """`unidec <words>` with the project's own code."""
        return self.run(sys.executable, "-m", "unidec.cli", *words, check=check)

    def stale(self) -> dict[str, Any]:
        """What DVC says is not as dvc.lock has it."""
        return json.loads(self.dvc("status", "--json").splitlines()[-1])

    # -- what came out
    # --------------------------------------------------------------------------------------------

    def registry(self) -> Any:
        """An `MlflowClient` of the project's store."""
        from mlflow import MlflowClient

        uri = f"sqlite:///{self.root / 'mlflow' / 'mlflow.db'}"
        return MlflowClient(uri, uri)

    def aliases(self) -> dict[str, str]:
        """alias -> version; {} before the first version."""
        models = self.registry().search_registered_models("name = 'unidec'")
        found = models[0].aliases if models else {}
        return {alias: str(version) for alias, version in found.items()}

    def version(self, number: str) -> Any:
        return self.registry().get_model_version("unidec", number)

    def metrics(self) -> dict[str, Any]:
        return json.loads((self.root / "outputs" / "metrics.json").read_text())

    def start(self) -> dict[str, Any]:
        return json.loads((self.root / "data" / "start.json").read_text())


# -- data
# --------------------------------------------------------------------------------------------------


def small_data(
    num_train: int = 800, num_test: int = 200, *, without: Sequence[int] = ()
) -> RawData:
    """The first queries of lf-debian's splits with their labels; rows of labels in `without` are
    taken away.
    """
    raw = make_slice(read_raw(ROOT / "data" / "raw" / "lf-debian"), num_train, num_test)
    return without_labels(raw, without) if len(without) else raw


def without_labels(raw: RawData, rows: Sequence[int]) -> RawData:
    """The same data before these labels existed."""
    kept = np.setdiff1d(np.arange(raw.num_labels), rows)
    return RawData(
        raw.name,
        raw.queries,
        raw.labels.take(kept),
        {split: csr_matrix(matrix[:, kept]) for split, matrix in raw.relevance.items()},
        {split: csr_matrix(matrix[:, kept]) for split, matrix in raw.filter_pairs.items()},
    )


def fewer_queries(raw: RawData, num_train: int) -> RawData:
    """The same data with the first training queries only; labels and test split stay."""
    return RawData(
        raw.name,
        {**raw.queries, "train": raw.queries["train"].slice(0, num_train)},
        raw.labels,
        {**raw.relevance, "train": csr_matrix(raw.relevance["train"][:num_train])},
        {**raw.filter_pairs, "train": csr_matrix(raw.filter_pairs["train"][:num_train])},
    )


def shuffled_labels(raw: RawData, seed: int = 0) -> RawData:
    """The same texts and the same sets of positives, of the training queries in another order:
    nothing to learn.
    """
    order = np.random.default_rng(seed).permutation(raw.queries["train"].num_rows)
    return RawData(
        raw.name,
        raw.queries,
        raw.labels,
        {**raw.relevance, "train": csr_matrix(raw.relevance["train"][order])},
        {**raw.filter_pairs, "train": csr_matrix(raw.filter_pairs["train"][order])},
    )
