"""An old version's project in a folder of its own: what is written there; and, slow, its data and figures again."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from unidec.errors import ArtifactError, ConfigError
from unidec.tracking.provenance import RECORDS, RECORDS_FOLDER
from unidec.tracking.restore import restore
from unidec.tracking.store import open_client

OLD = {"dvc.lock": "schema: '2.0'\nold: 1\n", "params.yaml": "seed: 7\n", "data/start.json": '{"kind": "cold"}\n'}


class Project:
    """A git repository in which a version was made before its lock file was committed."""

    def __init__(self, root: Path) -> None:
        self.root, self.uri = root / "project", f"sqlite:///{root}/mlflow.db"
        self.root.mkdir()
        self.git("init", "-q", "-b", "main")
        self.write(
            {"code.py": "x = 1\n", ".dvc/config": CONFIG, "dvc.lock": "schema: '2.0'\n", "params.yaml": "seed: 7\n"}
        )
        self.made_at = self.commit()
        self.write(OLD)
        self.run_id = self.tracked()
        self.recorded_at = self.commit()
        self.write({"code.py": "x = 2\n", "dvc.lock": "schema: '2.0'\nnew: 1\n"})
        self.commit()

    def git(self, *words: str) -> str:
        own = ["-c", "user.name=t", "-c", "user.email=t@example.invalid"]
        done = subprocess.run(["git", *own, *words], cwd=self.root, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def commit(self) -> str:
        self.git("add", "-A")
        self.git("commit", "-q", "-m", "x")
        return self.git("rev-parse", "HEAD")

    def write(self, files: dict[str, str]) -> None:
        for name, text in files.items():
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / name).write_text(text)

    def tracked(self) -> str:
        """A run that keeps the records as they are now."""
        client = open_client(self.uri)
        run_id = client.create_run(client.create_experiment("x", (self.root.parent / "kept").as_uri())).info.run_id
        for name in RECORDS:
            client.log_artifact(run_id, str(self.root / name), RECORDS_FOLDER)
        return run_id

    def found(self, **changed: Any) -> dict[str, Any]:
        """As `lineage` has the version."""
        code = {"commit": self.made_at, "dirty": False, "lock_commit": None} | changed.pop("code", {})
        lock = hashlib.sha256(OLD["dvc.lock"].encode()).hexdigest()
        about = {
            "model": "tiny", "version": "3", "code": code, "lock_sha256": lock, "run": {"id": self.run_id},
            "differs": [], "start": {"kind": "cold"},
        }  # fmt: skip
        return about | changed

    def restore(self, folder: Path, **changed: Any) -> dict[str, Any]:
        return restore(self.found(**changed), folder, uri=self.uri, root=self.root)


CONFIG = """[core]
    remote = near
['remote "near"']
    url = ../../store
['remote "far"']
    url = s3://bucket/path
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
        yield Project(tmp_path_factory.mktemp("restore"))


def read(folder: Path, names: Any = OLD) -> dict[str, str]:
    return {name: (folder / name).read_text() for name in names}


def test_the_code_of_the_commit_and_the_records_of_the_run(project: Project, tmp_path: Path) -> None:
    before = project.git("status", "--porcelain", "--branch")
    made = project.restore(tmp_path / "old")
    assert read(tmp_path / "old") == OLD and (tmp_path / "old/code.py").read_text() == "x = 1\n"
    assert made["commit"] == project.made_at and made["warnings"] == [] and made["folder"] == str(tmp_path / "old")
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=tmp_path / "old", capture_output=True, text=True, check=True
    )
    assert head.stdout.strip() == project.made_at
    assert project.git("status", "--porcelain", "--branch") == before and not project.git("worktree", "prune", "-n")
    assert made["commands"][0] == f"cd {tmp_path / 'old'}" and project.uri in made["commands"][-1]


def test_dvc_finds_cache_and_remotes_where_they_are(project: Project, tmp_path: Path) -> None:
    project.write({".dvc/config.local": "['remote \"far\"']\n    password = secret\n"})
    project.restore(tmp_path / "old")
    local = tmp_path / "old/.dvc/config.local"
    said = subprocess.run(
        [sys.executable, "-m", "dvc", "config", "--list"],
        cwd=tmp_path / "old",
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert f"cache.dir={project.root / '.dvc/cache'}" in said
    assert f"remote.near.url={project.root.parent / 'store'}" in said and "remote.far.url=s3://bucket/path" in said
    assert "password = secret" in local.read_text() and local.stat().st_mode & 0o077 == 0


def test_a_run_that_is_gone_leaves_what_git_has(project: Project, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="neither the MLflow run nor git"):
        project.restore(tmp_path / "none", run={"id": "0" * 32})
    assert not (tmp_path / "none").exists()
    project.restore(tmp_path / "old", run={"id": "0" * 32}, code={"lock_commit": project.recorded_at})
    assert read(tmp_path / "old") == OLD and (tmp_path / "old/code.py").read_text() == "x = 1\n"


def test_a_run_whose_lock_file_is_another_is_not_taken_at_its_word(project: Project, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="neither"):
        project.restore(tmp_path / "none", lock_sha256="0" * 64)
    with pytest.raises(ArtifactError, match="a trial"):
        project.restore(tmp_path / "none", lock_sha256=None, run=None)


def test_what_may_differ_is_said(project: Project, tmp_path: Path) -> None:
    made = project.restore(tmp_path / "old", code={"dirty": True}, differs=["outputs/bundle"])
    assert [words in line for words, line in zip(("uncommitted", "outputs/bundle"), made["warnings"], strict=True)]


def test_what_cannot_be_restored(project: Project, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    with pytest.raises(ConfigError, match="exists already"):
        project.restore(tmp_path / "full")
    assert [file.name for file in (tmp_path / "full").iterdir()] == ["mine"]
    for commit in ("0" * 40, None):
        with pytest.raises(ConfigError, match="does not have the version's commit"):
            project.restore(tmp_path / "old", code={"commit": commit})
    with pytest.raises(ConfigError, match="models:/tiny/2"):
        project.restore(tmp_path / "old", start={"kind": "refresh", "version": "2"})
    assert not (tmp_path / "old").exists()


STAGES = """
import json, sys
from unidec import pipeline
from unidec.config import load_params
params = load_params("params.yaml")
for name in sys.argv[1].split(","):
    said = getattr(pipeline, name)(params)
print(json.dumps(said, default=str))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_old_data_and_figures_again(helper: Callable[[str], Any], tmp_path: Path) -> None:
    """Version 1 of some data, version 2 of other data; then version 1's data by its lock file, and its figures."""
    made = helper("operations/project")
    project = made.Project(tmp_path)
    project.params(source={"kind": "none"}, optim={"epochs": 1})

    def version(raw: Any) -> dict[str, Any]:
        project.export(raw)
        fetched = project.root / "data" / "fetched"
        shutil.rmtree(fetched, ignore_errors=True)
        project.source.rename(fetched)
        steps = "ingest,validate,tokens,propensity,label_graph,train,index,evaluate"
        project.run(sys.executable, "-c", STAGES, steps)
        project.dvc("commit", "--force")
        said = json.loads(project.run(sys.executable, "-c", STAGES, "register").stdout.splitlines()[-1])
        assert project.version(said["version"]).tags["git.dirty"] == "false"
        project.commit(f"version {said['version']}")
        return project.metrics()

    project.commit("parameters")
    raw = made.small_data(500, 100)
    first = version(raw)
    second = version(made.fewer_queries(raw, 420))
    assert first["test"] != second["test"]
    tags = project.version("1").tags
    assert tags["dvc.outputs/bundle"] and tags["dvc.data/fetched"] != project.version("2").tags["dvc.data/fetched"]
    found = json.loads(project.unidec("models", "lineage", "--data", tags["dvc.data/dataset"][:12], "--json").stdout)
    assert [item["version"] for item in found] == ["1"]
    assert "version 2" in project.unidec("models", "lineage", "models:/unidec/2").stdout

    folder = tmp_path / "restored"
    words = ("lineage", "models:/unidec/1", "--restore", str(folder), "--json")
    said = json.loads(project.unidec(*words).stdout)
    assert said["warnings"] == []
    script = "set -e\n" + "\n".join(said["commands"])
    environment = project.environment | {"PREFECT_HOME": str(tmp_path / "prefect")}
    checkout, again = script.rsplit("\n", 1)
    project.run("bash", "-c", checkout, environment=environment)
    (folder / "outputs/metrics.json").unlink(missing_ok=True)
    project.run("bash", "-c", f"cd {folder}\n{again}", environment=environment)
    assert json.loads((folder / "outputs/metrics.json").read_text()) == first
    assert project.metrics() == second  # nothing of the project itself has changed
    assert len(project.registry().search_model_versions("name = 'unidec'")) == 2
