"""dvc.yaml as DVC reads it: what a change makes stale. The real file, the real DVC; the stages' work is replaced.

`bin/python` runs what $UNIDEC_PYTHON names: here a stand-in that writes a stage's outputs as a hash of what
dvc.yaml says it depends on, and notes that it ran.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
DESCRIBED = yaml.safe_load((ROOT / "dvc.yaml").read_text())
STAGES = list(DESCRIBED["stages"])
AFTER_TRAIN = ["train", "index", "evaluate"]

STAND_IN = """#!{python}
import hashlib, os, pathlib, sys, yaml
words = sys.argv[1:]
stage = (words[words.index("--steps") + 1] if "--steps" in words else words[2]).replace("-", "_")
described = yaml.safe_load(open("dvc.yaml"))["stages"][stage]
params = yaml.safe_load(open("params.yaml"))
digest = hashlib.sha256()
for entry in described.get("deps", []):
    entry = entry.replace("${{data.path}}", params["data"]["path"]).replace("${{preset}}", params["preset"])
    path = pathlib.Path(entry)
    assert path.exists(), path
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        digest.update(file.read_bytes() if file.is_file() else b"")
for key in described.get("params", []):
    value = params
    for name in key.split("."):
        value = value[name]
    digest.update(repr(value).encode())
for kind in ("outs", "metrics", "plots"):
    for entry in described.get(kind, []):
        path = pathlib.Path(next(iter(entry)) if isinstance(entry, dict) else entry)
        text = digest.hexdigest() + kind
        if path.suffix:
            path.parent.mkdir(parents=True, exist_ok=True)
            number = int(digest.hexdigest()[:6], 16)
            path.write_text('{{"P_at_1": %d}}' % number if path.suffix == ".json" else text)
        else:
            path.mkdir(parents=True, exist_ok=True)
            (path / "result.json").write_text(text)
if stage == "evaluate":
    pathlib.Path("outputs/plots/result.json").unlink()
    pathlib.Path("outputs/plots/training.csv").write_text("step,loss,loss_de,loss_clf\\n1,%d,2,3\\n2,1,2,2\\n" % number)
with open(".ran", "a") as log:
    log.write(stage + "\\n")
"""


class Project:
    """A copy of this repository's pipeline, without its data and work."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in (
            "dvc.yaml",
            "params.yaml",
            ".dvcignore",
            ".gitignore",
            ".dvc/config",
            ".dvc/.gitignore",
            "bin/python",
        ):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, root / name)
        shutil.copytree(ROOT / "unidec", root / "unidec", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(ROOT / "plots", root / "plots")
        (root / "data" / "raw" / "lf-debian").mkdir(parents=True)
        (root / "data" / "raw" / "lf-debian" / "raw.txt").write_text("texts")
        stand_in = root / ".stand-in"
        stand_in.write_text(STAND_IN.format(python=sys.executable))
        stand_in.chmod(0o755)
        self.env = {name: value for name, value in os.environ.items() if not name.startswith(("GIT_", "DVC_"))}
        self.env |= {"UNIDEC_PYTHON": str(stand_in), "DVC_NO_ANALYTICS": "1", "GIT_CONFIG_GLOBAL": os.devnull}
        self.git("init", "-q")
        self.commit("first")

    def git(self, *words: str) -> str:
        who = ("-c", "user.name=x", "-c", "user.email=x@example.invalid")
        return self._run("git", *who, *words)

    def commit(self, message: str) -> None:
        self.git("add", "-A", ".")
        self.git("commit", "-q", "-m", message)

    def dvc(self, *words: str) -> str:
        return self._run(sys.executable, "-m", "dvc", *words)

    def _run(self, *words: str) -> str:
        done = subprocess.run(
            words, cwd=self.root, env=self.env, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def repro(self) -> list[str]:
        """The stages that `dvc repro` ran, in order."""
        log = self.root / ".ran"
        log.unlink(missing_ok=True)
        self.dvc("repro", "-q")
        return log.read_text().split() if log.exists() else []

    def edit(self, name: str, old: str, new: str) -> None:
        path = self.root / name
        text = path.read_text()
        assert old in text, f"{old!r} is not in {name}"
        path.write_text(text.replace(old, new, 1))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = Project(tmp_path_factory.mktemp("project"))
    ran = project.repro()
    assert sorted(ran) == sorted(STAGES)
    assert ran[-3:] == AFTER_TRAIN
    project.commit("reproduced")
    return project


@pytest.fixture
def restored(project: Project) -> Iterator[Project]:
    yield project
    project.git("checkout", "-q", ".")
    project.dvc("checkout", "-q", "--force")


def test_again_does_nothing_and_git_ignores_what_dvc_keeps(restored: Project) -> None:
    assert restored.repro() == []
    assert restored.git("status", "--porcelain") == ""
    tracked = restored.git("ls-files").split()
    assert "dvc.lock" in tracked
    assert "outputs/metrics.json" in tracked
    assert not [
        name for name in tracked if name.startswith(("data/dataset", "data/tokens", "outputs/model", ".dvcstore"))
    ]


def test_token_length_redoes_tokens_and_what_follows(restored: Project) -> None:
    restored.edit("params.yaml", "tokens: {}", "tokens: {max_length: 64}")
    assert restored.repro() == ["tokens", *AFTER_TRAIN]


def test_beta_redoes_training_and_what_follows(restored: Project) -> None:
    restored.edit("params.yaml", "pool: {}", "pool: {beta: 2}")
    assert restored.repro() == AFTER_TRAIN
    changed = json.loads(restored.dvc("metrics", "diff", "--json", "HEAD"))
    assert changed["outputs/metrics.json"]["P_at_1"]["diff"] != 0
    assert "pool.beta" in restored.dvc("params", "diff", "HEAD")
    restored.dvc("plots", "diff", "-q", "HEAD")
    page = (restored.root / "dvc_plots" / "index.html").read_text()
    assert "Training loss" in page
    assert "vegaEmbed" in page
    own = page.replace(
        (restored.root / "plots" / "offline.html").read_text().split("{plot_divs}")[0].split("</title>")[1], ""
    )
    assert len(own) < len(page) / 10
    assert not re.findall(r"<(?:script|link|img)[^>]*(?:src|href)", own)


def test_index_parameters_and_evaluation_code_redo_only_what_follows(restored: Project) -> None:
    restored.edit("params.yaml", "index: {}", "index: {kind: hnsw}")
    assert restored.repro() == ["index", "evaluate"]
    restored.edit("unidec/evaluation/__init__.py", "", "# changed\n")
    assert restored.repro() == ["evaluate"]


def test_propensity_data_and_preset(restored: Project) -> None:
    restored.edit("params.yaml", "propensity_a: 0.55", "propensity_a: 0.6")
    assert restored.repro() == ["propensity", "evaluate"]
    restored.edit("params.yaml", "device: auto", "device: cpu")
    assert restored.repro() == []
    restored.edit("unidec/presets/depsl.yaml", "optim: {epochs:", "optim: {warmup_epochs: 0.5, epochs:")
    assert restored.repro() == []
    restored.edit("unidec/presets/unidec.yaml", "#", "# changed")
    ran = restored.repro()
    assert "train" in ran
    assert not {"ingest", "validate", "propensity"} & set(ran)
    (restored.root / "data" / "raw" / "lf-debian" / "raw.txt").write_text("other texts")
    assert sorted(restored.repro()) == sorted(STAGES)


def test_code_caches_change_nothing(restored: Project) -> None:
    cache = restored.root / "unidec" / "model" / "__pycache__"
    cache.mkdir(exist_ok=True)
    (cache / "x.pyc").write_bytes(b"x")
    assert restored.repro() == []
    shutil.rmtree(cache)


def test_every_parameter_belongs_to_a_stage() -> None:
    from unidec.config import known_keys

    tracked = {key for stage in DESCRIBED["stages"].values() for key in stage.get("params", [])}
    tracked |= set(re.findall(r"\$\{([a-z._]+)\}", (ROOT / "dvc.yaml").read_text()))
    untracked = {key for key in known_keys() if not any(key == name or key.startswith(f"{name}.") for name in tracked)}
    assert untracked == {"device", "tracking.experiment", "tracking.model_name"}


def test_dependencies_on_code_exist() -> None:
    for name, stage in DESCRIBED["stages"].items():
        for path in stage["deps"]:
            if path.startswith("unidec/") and "$" not in path:
                assert (ROOT / path).exists(), f"{name}: {path}"
    for name in ("data", "tokens", "label_graph", "encoder", "model", "pool", "loss", "optim", "index"):
        assert name in yaml.safe_load((ROOT / "params.yaml").read_text()), "DVC refuses a section that is not there"
