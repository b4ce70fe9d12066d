"""dvc.yaml as DVC reads it: what a change makes stale. The real file, the real DVC; the stages'
work is replaced.

`bin/python` runs what $UNIDEC_PYTHON names: here a stand-in that writes a stage's outputs as a hash
of what dvc.yaml says it depends on, and notes that it ran. The stage `inputs` does its own work.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
DESCRIBED = yaml.safe_load((ROOT / "dvc.yaml").read_text())
STAGES = [name for name in DESCRIBED["stages"] if name != "inputs"]
AFTER_TRAIN = ["train", "index", "evaluate"]

STAND_IN = """#!/bin/sh
"exec" '{python}' "$0" "$@"
import hashlib, json, os, pathlib, sys, yaml
PLOTS = {{
    "validation.csv": "epoch,P_at_1,nDCG_at_5,PSP_at_5,R_at_100",
    "at_k.csv": "k,precision,recall,ndcg",
    "groups.csv": "group,R_at_10",
}}
words = sys.argv[1:]
stage = (words[words.index("--steps") + 1] if "--steps" in words else words[-1]).replace("-", "_")
if stage == "inputs":
    from unidec.config import load_params
    from unidec.pipeline import inputs
    inputs(load_params())
    sys.exit()
described = yaml.safe_load(open("dvc.yaml"))["stages"][stage]
params = yaml.safe_load(open("params.yaml"))
digest = hashlib.sha256()
for entry in described.get("deps", []):
    entry = entry.replace("${{data.path}}", params["data"]["path"])
    path = pathlib.Path(entry)
    assert path.exists(), path
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        digest.update(file.read_bytes() if file.is_file() else b"")
for kind in ("outs", "metrics", "plots"):
    for entry in described.get(kind, []):
        path = pathlib.Path(next(iter(entry)) if isinstance(entry, dict) else entry)
        text = digest.hexdigest() + kind
        if path.suffix:
            path.parent.mkdir(parents=True, exist_ok=True)
            number = int(digest.hexdigest()[:6], 16)
            found = {{"P_at_1": number, "test": {{"nDCG@5": number}}, "de": {{"nDCG@5": 1.0}}}}
            path.write_text(json.dumps(found) if path.suffix == ".json" else text)
        else:
            path.mkdir(parents=True, exist_ok=True)
            (path / "result.json").write_text(text)
if stage == "evaluate":
    pathlib.Path("outputs/plots/result.json").unlink()
    for name, head in PLOTS.items():
        row = ",".join(["1"] * len(head.split(",")))
        pathlib.Path("outputs/plots", name).write_text(head + "\\n" + row + "\\n")
    curves = "step,loss,loss_de,loss_clf\\n1,%d,2,3\\n2,1,2,2\\n" % number
    pathlib.Path("outputs/plots/training.csv").write_text(curves)
with open(os.environ["RAN"], "a") as log:
    log.write(stage + "\\n")
"""


class Project:
    """A copy of this repository's pipeline, without its data and work."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.errors = ""  # what the last `dvc` printed on stderr
        for name in (
            "dvc.yaml",
            "params.yaml",
            ".dvcignore",
            ".gitignore",
            ".dvc/config",
            ".dvc/.gitignore",
            "bin/python",
            "data/start.json",
        ):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, root / name)
        shutil.copytree(
            ROOT / "unidec", root / "unidec", ignore=shutil.ignore_patterns("__pycache__")
        )
        shutil.copytree(ROOT / "plots", root / "plots")
        (root / "comparison").mkdir()
        for file in (ROOT / "comparison").glob("*.yaml"):
            shutil.copy(file, root / "comparison")
        (root / "data" / "raw" / "lf-debian").mkdir(parents=True)
        (root / "data" / "raw" / "lf-debian" / "raw.txt").write_text("texts")
        stand_in = root / ".stand-in"
        stand_in.write_text(STAND_IN.format(python=sys.executable))
        stand_in.chmod(0o755)
        self.env = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("GIT_", "DVC_"))
        }
        self.env |= {
            "UNIDEC_PYTHON": str(stand_in),
            "RAN": str(root.parent / "ran"),
            "DVC_NO_ANALYTICS": "1",
            "GIT_CONFIG_GLOBAL": os.devnull,
        }
        self.git("init", "-q")
        self.commit("first")

    def git(self, *words: str) -> str:
        who = ("-c", "user.name=x", "-c", "user.email=x@example.invalid")
        return self._run("git", *who, *words)

    def commit(self, message: str) -> None:
        self.git("add", "-A", ".")
        self.git("commit", "-q", "-m", message)

    def dvc(self, *words: str) -> str:
        """DVC's command line within this process: to import it takes longer than most of its
        commands.
        """
        from dvc.cli import main

        out = io.StringIO()
        errors = io.StringIO()
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(errors):
            patch.chdir(self.root)
            for name in os.environ.keys() - self.env.keys():
                patch.delenv(name)
            # without it DVC prints JSON on the stdout that it began with
            patch.setenv("DVC_TEST", "1")
            for name, value in self.env.items():
                patch.setenv(name, value)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # DVC's own
                code = main(list(words))
        assert code == 0, f"{words}\n{out.getvalue()}\n{errors.getvalue()}"
        self.errors = errors.getvalue()
        return out.getvalue()

    def dvc_process(self, *words: str) -> str:
        return self._run(sys.executable, "-m", "dvc", *words)

    def _run(self, *words: str) -> str:
        done = subprocess.run(
            words,
            cwd=self.root,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def repro(self) -> list[str]:
        """The stages that `dvc repro` ran, in order, without `inputs`."""
        log = Path(self.env["RAN"])
        log.unlink(missing_ok=True)
        self.dvc("repro")
        return log.read_text().split() if log.exists() else []

    def stale(self) -> list[str]:
        """The stages of which a dependency changed, sorted, without `inputs`."""
        self.dvc("repro", "inputs")
        return sorted(json.loads(self.dvc("status", "--json")))

    def edit(self, name: str, old: str, new: str) -> None:
        path = self.root / name
        text = path.read_text()
        assert old in text, f"{old!r} is not in {name}"
        path.write_text(text.replace(old, new, 1))


def test_what_a_change_redoes(tmp_path: Path) -> None:
    """One scenario, each step from where the last one ended: DVC takes about a second for a
    command.
    """
    project = Project(tmp_path / "project")
    ran = project.repro()
    assert sorted(ran) == sorted(STAGES)
    assert ran[-3:] == AFTER_TRAIN
    project.commit("reproduced")

    # again: nothing; git holds the lock and the readable results, DVC the rest
    assert project.repro() == []
    assert project.git("status", "--porcelain") == ""
    tracked = project.git("ls-files").split()
    assert {"dvc.lock", "outputs/metrics.json", "outputs/plots/training.csv"} <= set(tracked)
    kept_by_dvc = ("data/dataset", "data/tokens", "outputs/model", "outputs/bundle", ".dvcstore")
    assert not [name for name in tracked if name.startswith(kept_by_dvc)]

    project.edit("params.yaml", "tokens: {text, max_length}", "tokens: {text, max_length: 64}")
    ran = project.repro()
    # the checks read the tokens, too
    assert sorted(ran[:2]) == ["tokens", "validate"]
    assert ran[2:] == AFTER_TRAIN
    project.edit("params.yaml", " beta,", " beta: 2,")
    assert project.repro() == []  # the recipe's own value
    project.edit("params.yaml", " beta: 2,", " beta: 3,")
    assert project.repro() == AFTER_TRAIN
    project.edit("params.yaml", "index: {factory,", "index: {factory: HNSW32,")
    assert project.repro() == ["index", "evaluate"]
    project.edit("params.yaml", "propensity_a: 0.55", "propensity_a: 0.6")
    assert sorted(project.repro()) == ["evaluate", "index", "propensity", "train"]

    # the difference between two commits, without a network
    changed = json.loads(project.dvc("metrics", "diff", "--json", "HEAD"))
    assert changed["outputs/metrics.json"]["P_at_1"]["diff"] != 0
    assert "pool.beta" in project.dvc("params", "diff", "HEAD")
    project.dvc("plots", "diff", "-q", "HEAD")
    page = (project.root / "dvc_plots" / "index.html").read_text()
    template = (project.root / "plots" / "offline.html").read_text()
    ours = page.partition("<body>")[2]
    assert "Training loss" in ours
    assert "vegaEmbed(" in ours
    assert not re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)\s*=", ours)
    assert page.partition("<body>")[0].count("<script>") == 3
    assert template.count("<script>") == 3

    # what is no dependency, and what is one for whom
    project.edit("params.yaml", "device: auto", "device: cpu")
    project.edit(
        "unidec/recipes/depsl.yaml", "optim: {epochs:", "optim: {warmup_epochs: 0.5, epochs:"
    )
    project.edit("unidec/recipes/unidec.yaml", "#", "# changed")
    project.edit("unidec/cli/__init__.py", "import os", "import os, sys as other")
    project.edit("unidec/training/fit.py", '"""', '"""In other words: ')
    project.edit("unidec/config/data_sections.py", '"""maximum', '"""in other words: maximum')
    project.edit(
        "unidec/evaluation/metrics.py", "import annotations", "import annotations  # changed"
    )
    cache = project.root / "unidec" / "model" / "__pycache__"
    cache.mkdir()
    (cache / "x.pyc").write_bytes(b"x")
    assert project.stale() == [] and project.repro() == []
    project.edit("unidec/evaluation/__init__.py", "", "ADDED = 1\n")
    assert project.stale() == ["evaluate"]
    project.edit("unidec/recipes/unidec.yaml", "optim: {", "optim: {clip_norm: 0.5, ")
    # a default
    project.edit("unidec/config/data_sections.py", '"] = "title"', '"] = "title+content"')
    project.edit("unidec/recipes/unidec.yaml", "text: title, ", "")
    assert project.stale() == ["evaluate", "tokens", "train", "validate"]
    project.edit("unidec/ranking/__init__.py", "", "ADDED = 1\n")
    assert project.stale() == ["evaluate", "index", "tokens", "train", "validate"]
    (project.root / "data" / "raw" / "lf-debian" / "raw.txt").write_text("other texts")
    assert "ingest" in project.stale()

    # a stage that is refused, because a training reads its output, leaves the output as it was
    before = (project.root / "data" / "dataset" / "result.json").read_text()
    Path(project.env["UNIDEC_PYTHON"]).write_text("#!/bin/sh\nexit 5\n")
    with pytest.raises(AssertionError, match="exited with 5"):
        project.dvc_process("repro", "ingest")
    assert (project.root / "data" / "dataset" / "result.json").read_text() == before


@pytest.mark.parametrize(
    "words", ["metrics diff", "params diff", "plots diff -q", "exp show --only-changed", "diff"]
)
def test_what_dvc_says_at_the_root_is_about_the_pipeline(reproduced: Project, words: str) -> None:
    said = reproduced.dvc(*words.split()) + reproduced.errors
    assert "comparison" not in said and "failed to load" not in said and "WARNING" not in said, said
    assert len(said.splitlines()) < 8, said


def test_a_reproduced_project_is_up_to_date_in_one_line(reproduced: Project) -> None:
    assert reproduced.dvc("status") + reproduced.errors == "Data and pipelines are up to date.\n"


@pytest.fixture(scope="module")
def reproduced(tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = Project(tmp_path_factory.mktemp("quiet") / "project")
    project.repro()
    project.commit("reproduced")
    return project


# in place of flows.train in the stage `train`: what the library finds out about where it runs
LOOK = """
import json, os, pathlib
from unidec.tracking.store import tracking_uri
found = {"store": tracking_uri(), "folder": os.getcwd()}
found["experiment"] = os.environ.get("DVC_EXP_NAME")
with open(os.environ["LOOKED"], "a") as log:
    log.write(json.dumps(found) + "\\n")
"""


@pytest.fixture
def looking(tmp_path: Path) -> Project:
    """A checkout with an environment that notes where each training of an experiment runs."""
    project = Project(tmp_path / "project")
    # the checkout's environment is found from the temporary copies: they have no .venv, git ignores
    # it
    python = project.root / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    look = f"case \"$*\" in *train) {shlex.quote(sys.executable)} -c '{LOOK}' || exit 1;; esac"
    stand_in = shlex.quote(project.env.pop("UNIDEC_PYTHON"))
    python.write_text(f'#!/bin/sh\n{look}\nexec {stand_in} "$@"\n')
    python.chmod(0o755)
    project.env |= {
        "LOOKED": str(tmp_path / "looked"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    project.env = {
        name: value for name, value in project.env.items() if name != "MLFLOW_TRACKING_URI"
    }
    return project


def experiments(project: Project) -> dict[str, str]:
    """name -> learning rate of each; all ran in temporary copies, with the checkout's python and
    store.
    """
    lines = Path(project.env["LOOKED"]).read_text().splitlines()
    looked = [json.loads(line) for line in lines]
    stores = {found["store"] for found in looked}
    assert stores == {f"sqlite:///{project.root}/mlflow/mlflow.db"}
    assert all(found["folder"].startswith(f"{project.root}/.dvc/tmp/exps/") for found in looked)
    rows = list(csv.DictReader(project.dvc("exp", "show", "--csv", "--only-changed").splitlines()))
    shown = {row["Experiment"]: row["optim.lr_clf"] for row in rows if row["Experiment"]}
    assert set(shown) == {found["experiment"] for found in looked}
    return shown


def test_an_experiment_in_a_temporary_copy_runs_with_the_checkouts_python_and_store(
    looking: Project,
) -> None:
    looking.dvc_process("exp", "run", "--temp", "--set-param", "optim.lr_clf=0.002")
    [(name, value)] = experiments(looking).items()
    assert value == "0.002"
    (documented,) = re.findall(r"dvc (exp show .*)", (ROOT / "docs" / "lineage.md").read_text())
    assert name in looking.dvc(*documented.split())
    looking.dvc("exp", "apply", name)
    assert yaml.safe_load((looking.root / "params.yaml").read_text())["optim"]["lr_clf"] == 0.002


@pytest.mark.slow
def test_so_does_a_queue_of_two(looking: Project) -> None:
    looking.dvc_process("exp", "run", "--queue", "--set-param", "optim.lr_clf=0.001,0.002")
    # its output is inherited by the worker: read, it would end with the last task
    words = [sys.executable, "-m", "dvc", "queue", "start"]
    subprocess.run(words, cwd=looking.root, env=looking.env, stdout=subprocess.DEVNULL, check=True)
    end = time.monotonic() + 240
    while True:
        rows = looking.dvc_process("queue", "status").splitlines()[1:]
        if not any("Running" in row or "Queued" in row for row in rows):
            break
        assert time.monotonic() < end, rows
        time.sleep(0.5)
    assert sum("Success" in row for row in rows) == 2, rows
    assert sorted(experiments(looking).values()) == ["0.001", "0.002"]


def test_an_experiment_can_set_every_key(tmp_path: Path) -> None:
    from dvc.utils.hydra import apply_overrides

    from unidec.config import known_keys

    shutil.copy(ROOT / "params.yaml", tmp_path)
    apply_overrides(tmp_path / "params.yaml", [f"{key}=7" for key in known_keys()])
    raw = yaml.safe_load((tmp_path / "params.yaml").read_text())
    assert all(
        value == 7
        for section in raw.values()
        if isinstance(section, dict)
        for value in section.values()
    )


def test_each_result_is_a_dependency_of_the_stages_that_make_it() -> None:
    from unidec.config import RESULTS

    made = {
        "data": "ingest",
        "checks": "validate",
        "tokens": "tokens",
        "propensity": "propensity",
        "label_graph": "label_graph",
        "training": "train",
        "index": "index",
        "evaluation": "evaluate",
    }
    assert set(made) == {"checks", *RESULTS}
    assert set(made.values()) == set(STAGES)
    for result, stage in made.items():
        assert f"data/inputs/{result}.json" in DESCRIBED["stages"][stage]["deps"], stage
    for name, stage in DESCRIBED["stages"].items():
        assert "params" not in stage, name
        assert not (name != "inputs" and any("unidec" in dep for dep in stage["deps"])), name
