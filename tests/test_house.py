"""The house itself: imports run one way, nothing shadows a real package, nothing of this machine is
in git.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from importlib import metadata, resources
from pathlib import Path

import pytest
import yaml

import unidec

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def in_git() -> list[str]:
    """Files that are, or would be, committed."""
    done = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip("not a git checkout")
    return [name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_mlflow_is_the_real_one() -> None:
    spec = sys.modules.get("mlflow") or __import__("mlflow")
    assert spec.__version__ == metadata.version("mlflow")
    assert "site-packages" in spec.__file__
    # what was logged lies deeper, in a folder that git ignores
    found = [file.relative_to(ROOT / "mlflow") for file in (ROOT / "mlflow").rglob("*.py")]
    assert not [file for file in found if file.parts[0] != "artifacts"]
    for name in ("mlflow", "prefect", "dvc"):  # flows/ itself is on the path of Prefect's worker
        assert not (ROOT / "flows" / f"{name}.py").exists()


def test_no_circle_of_imports() -> None:
    """Also none that only type checkers see."""
    import grimp
    import networkx

    graph = grimp.build_graph(
        "unidec", "flows", exclude_type_checking_imports=False, cache_dir=None
    )
    edges = [
        (name, other)
        for name in graph.modules
        for other in graph.find_modules_directly_imported_by(name)
    ]
    circles = [
        sorted(part)
        for part in networkx.strongly_connected_components(networkx.DiGraph(edges))
        if len(part) > 1
    ]
    assert not circles


def test_distribution_name_version_and_no_foreign_unidec() -> None:
    assert PYPROJECT["project"]["name"] == "unidec-xmc"
    assert metadata.version("unidec-xmc") == unidec.__version__
    extras = PYPROJECT["project"]["optional-dependencies"].values()
    wanted = [
        *PYPROJECT["project"]["dependencies"],
        *(entry for extra in extras for entry in extra),
    ]
    pinned = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and line[0] != "#"
    ]
    for requirement in wanted + pinned:
        assert re.split(r"[^A-Za-z0-9._-]", requirement)[0].lower() != "unidec", requirement


def test_constraints_are_exact_free_of_hosts_and_within_the_ranges() -> None:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!]+", line), line
            name, version = line.split("==")
            pins[canonicalize_name(name)] = version
    groups = PYPROJECT["project"]["optional-dependencies"]
    for text in [
        *PYPROJECT["project"]["dependencies"],
        *groups["cpu"],
        *groups["gpu"],
        *groups["minilm"],
        *groups["serve"],
        *groups["dev"],
        *groups["docs"],
    ]:
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        assert name in pins, f"{name} is not pinned"
        assert requirement.specifier.contains(pins[name]), f"{text} and {pins[name]}"


def test_recipes_and_typing_marker_are_package_data() -> None:
    package = resources.files("unidec")
    assert (package / "py.typed").is_file()
    patterns = PYPROJECT["tool"]["setuptools"]["package-data"]["unidec"]
    for path in (ROOT / "unidec").rglob("*"):
        is_cache = path.parent.name == "__pycache__"
        if path.is_file() and path.suffix != ".py" and not is_cache:
            relative = path.relative_to(ROOT / "unidec")
            assert any(relative.match(pattern) for pattern in patterns), (
                f"{relative} would be missing from a wheel"
            )


def test_nothing_of_this_machine_and_no_registry_host_is_committed() -> None:
    hosts = (
        "files.pythonhosted" + ".org",
        "pypi" + ".org/simple",
        "registry.npmjs" + ".org",
        "deb.debian" + ".org",
    )
    place = re.compile(r"(?:^|[\s\"'=(:`])/(?:work|home|root|farm|opt|tmp)/[\w.]")
    for name in in_git():
        path = ROOT / name
        if name.startswith(("data/raw/", "plots/offline.html")) or path.stat().st_size > 500_000:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for host in hosts:
            assert host not in text, f"{name} names {host}"
        found = place.search(text)
        assert found is None, (
            f"{name} names a path of this machine: {found.group() if found else ''}"
        )


def test_large_files_stay_out_of_git() -> None:
    for name in in_git():
        limit = 8e6 if name.startswith("data/raw/") else 1e6
        assert (ROOT / name).stat().st_size <= limit, name


def test_tests_mirror_the_library() -> None:
    modules = {
        path.relative_to(ROOT / "unidec").parts[0].removesuffix(".py")
        for path in (ROOT / "unidec").rglob("*.py")
    }
    special = {
        "benchmarks",
        "docs",
        "faults",
        "flows",
        "operations",
        "pipeline",
        "golden",
        "test_house",
        "test_dvc",
        "test_recipes",
        "test_documentation",
        "conftest",
        "test_pipeline",
    }
    for path in (ROOT / "tests").rglob("test_*.py"):
        top = path.relative_to(ROOT / "tests").parts[0].removesuffix(".py")
        assert top in special or top.removeprefix("test_") in modules, f"{path} mirrors nothing"


def expressions_by_line(tree: ast.AST) -> Counter[int]:
    """How many expression nodes each line has, without annotations and docstrings."""
    left_out: set[int] = set()
    for node in ast.walk(tree):
        parts = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            parts.append(node.value)
        for part in filter(None, parts):
            left_out.update(map(id, ast.walk(part)))
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.expr))
    return Counter(node.lineno for node in nodes if id(node) not in left_out)


def test_lines_are_plain() -> None:
    """A line is dense from 12 expression nodes on. The limits only ever fall."""
    files = [*(ROOT / "unidec").rglob("*.py"), *(ROOT / "flows").rglob("*.py")]
    nodes = 0
    lines = 0
    dense = 0
    skips = 0
    long_calls = 0
    for path in files:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        by_line = expressions_by_line(tree)
        nodes += by_line.total()
        lines += len(by_line)
        dense += sum(count >= 12 for count in by_line.values())
        skips += source.count("fmt: skip")
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        long_calls += sum(len(call.args) >= 6 for call in calls)
    assert 0 < nodes <= 126_700
    assert dense <= 0.08 * lines
    assert skips <= 10
    assert long_calls <= 15
    names = Counter(path.name for path in files if not path.name.startswith("__"))
    assert not [name for name, count in names.items() if count > 1]
    assert PYPROJECT["tool"]["ruff"]["line-length"] == 100


def test_lines_of_tests_are_plain() -> None:
    """At most 12 % of them are dense."""
    counts: list[int] = []
    for path in (ROOT / "tests").rglob("*.py"):
        by_line = expressions_by_line(ast.parse(path.read_text(encoding="utf-8")))
        counts += by_line.values()
    assert sum(count >= 12 for count in counts) <= 0.12 * len(counts)


def test_files_and_functions_keep_to_the_house_rules() -> None:
    for path in [*(ROOT / "unidec").rglob("*.py"), *(ROOT / "flows").rglob("*.py")]:
        assert "utils" not in path.name
        tree = ast.parse(path.read_text())
        assert ast.get_docstring(tree) or path.name == "__init__.py", (
            f"{path.name} says nothing of itself"
        )
        assert len(path.read_text().splitlines()) <= 500, f"{path.name} wants another room"
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = (node.end_lineno or 0) - node.body[0].lineno + 1
                assert body <= 80, f"{path.name}: {node.name} has {body} lines"
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                # torch's collectives of objects unpickle what other ranks send
                unpickles = called.startswith(("pickle.", "torch.load")) or re.fullmatch(
                    r"dist\..*_object.*", called
                )
                assert called not in ("eval", "exec"), f"{path.name}: {called}"
                assert not unpickles, f"{path.name}: {called}"
            if isinstance(node, ast.ExceptHandler):
                assert node.type is not None, f"{path.name}:{node.lineno}: bare except"


def test_errors_name_valid_values_or_the_fix() -> None:
    """Except for those that repeat the text of other errors."""
    source = (ROOT / "unidec" / "errors.py").read_text()
    names = {
        node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)
    } - {"Stopped"}
    assert {"ConfigError", "Refused"} <= names
    for path in [*(ROOT / "unidec").rglob("*.py"), *(ROOT / "flows").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or ast.unparse(node.func) not in names:
                continue
            given = {keyword.arg for keyword in node.keywords}
            repeats = not given and not isinstance(node.args[0], ast.Constant | ast.JoinedStr)
            assert repeats or given & {"fix", "expected"}, (
                f"{path.relative_to(ROOT)}:{node.lineno} has no fix"
            )


def test_parameters_stop_at_the_pipeline() -> None:
    """Below it functions take sections of the parameters, or plain values."""
    for folder in (
        "data",
        "model",
        "methods",
        "training",
        "ranking",
        "bundle",
        "evaluation",
        "tracking",
        "validation",
        "serving",
    ):
        for path in (ROOT / "unidec" / folder).rglob("*.py"):
            names = {
                node.id
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.Name)
            }
            assert "Params" not in names, path.name


def test_the_core_knows_interfaces_and_no_method() -> None:
    """Papers are additions: neither names, nor fields or attributes, for each of them."""
    from dataclasses import fields

    from unidec.model.batch import Prepared

    assert len(fields(Prepared)) <= 7
    tree = ast.parse((ROOT / "unidec/training/trainer.py").read_text(encoding="utf-8"))
    trainer = next(
        node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == "Trainer"
    )
    init = next(
        node
        for node in trainer.body
        if isinstance(node, ast.FunctionDef) and node.name == "__init__"
    )
    attributes = {
        node.attr
        for node in ast.walk(init)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    assert 0 < len(attributes) <= 15
    methods = {path.stem for path in (ROOT / "unidec/methods").glob("[!_]*.py")} - {"assembly"}
    for path in (ROOT / "unidec/model").glob("*.py"):
        names = {
            node.id if isinstance(node, ast.Name) else node.attr
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Name | ast.Attribute)
        }
        assert not names & methods, f"{path.name} names {names & methods}"


def test_config_and_command_line_import_nothing_heavy() -> None:
    code = (
        "import sys, unidec.cli, unidec.config, unidec.progress\n"
        "print({'torch', 'numpy', 'pandas', 'scipy', 'pyarrow', 'mlflow', 'prefect', "
        "'faiss'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "set()"


def test_every_make_target_is_in_its_help() -> None:
    make = shutil.which("make")
    if make is None:
        pytest.skip("no make")
    shown = subprocess.run(
        [make, "help"], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True
    ).stdout
    phony = re.search(r"^\.PHONY: (.*)", (ROOT / "Makefile").read_text(), re.M)
    assert phony is not None
    for target in phony[1].split():
        assert re.search(rf"^{target} ", shown, re.M), target


def test_ci_and_hooks_need_nothing_from_elsewhere() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert "exec make test" in script
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
    assert "make docs" in script
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert {repo["repo"] for repo in hooks["repos"]} == {"local"}


def test_workflows_call_make_alone_on_every_python_that_is_supported() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.M))
    called = set()
    pythons = set()
    for file in (ROOT / ".github" / "workflows").glob("*.yml"):
        for job in yaml.safe_load(file.read_text())["jobs"].values():
            matrix = job.get("strategy", {}).get("matrix", {})
            pythons |= set(matrix.get("python", []))
            commands = [step["run"] for step in job["steps"] if "run" in step]
            for target in matrix.get("target", [""]):
                called |= {command.replace("${{ matrix.target }}", target) for command in commands}
    for command in called - {".venv/bin/pip freeze --exclude-editable"}:
        program, target, *variables = command.split()
        assert program == "make" and target in targets, command
        assert all(
            re.search(rf"^{word.split('=')[0]} *\?=", makefile, re.M) for word in variables
        ), command
    assert {
        "make docs PYTHON=python",
        "make wheel PYTHON=python",
        "make test PYTHON=python",
    } <= called
    low, high = map(int, re.findall(r"3\.(\d+)", PYPROJECT["project"]["requires-python"]))
    expected = {f"3.{minor}" for minor in range(low, high)}
    assert pythons == expected
    listed = {
        name.split(" :: ")[-1]
        for name in PYPROJECT["project"]["classifiers"]
        if "Python :: 3." in name
    }
    assert listed == pythons


def test_changelog_begins_with_this_version_or_the_next() -> None:
    from packaging.version import Version

    first = re.findall(
        r"^## (\S+?)(, in preparation)?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )[0]
    assert (
        Version(first[0]) > Version(unidec.__version__)
        if first[1]
        else first[0] == unidec.__version__
    )


def test_notice_names_the_packages_whose_licence_asks_for_more() -> None:
    """Copyleft among the pinned packages that are installed, as their metadata has it."""
    sys.path.insert(0, str(ROOT / "bin"))
    try:
        licences = __import__("licences")
    finally:
        sys.path.remove(str(ROOT / "bin"))
    named = set(
        re.findall(
            r"^\| `([\w.-]+)` \|", (ROOT / "NOTICE.md").read_text(encoding="utf-8"), re.MULTILINE
        )
    )
    found = {
        name.lower()
        for name, _, licence in licences.installed()
        if licences.COPYLEFT.search(licence)
    }
    pinned = {
        line.split("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()
    }
    assert found, "certifi at least"
    assert found & pinned <= named, f"NOTICE.md does not name {found & pinned - named}"
    assert named <= pinned


def test_citation_names_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (
        citation["version"] == unidec.__version__
        and citation["license"] == PYPROJECT["project"]["license"]
    )
    assert citation["authors"] == PYPROJECT["project"]["authors"]


def test_links_in_the_documentation_lead_somewhere() -> None:
    for page in [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "benchmarks").rglob("*.md"),
    ]:
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"
