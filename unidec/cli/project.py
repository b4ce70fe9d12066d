"""`unidec init --project`: the files with which DVC and Prefect train in a folder that is no checkout of unidec."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from unidec.version import PACKAGE

_DVC_CONFIG = """[core]
    remote = local
    analytics = false
    check_update = false
    autostage = false
['remote "local"']
    url = ../.dvcstore
"""
_FILES = ("dvc.yaml", "prefect.yaml", "prefect.toml", ".gitignore", ".dvcignore", "bin/python", "flows/*.*")


def write_project(folder: Path) -> list[str]:
    """Write what is missing of a project's files; those that exist are left as they are.

    Returns:
        names of the files that were written.
    """
    from unidec.tracking.provenance import git

    packaged = PACKAGE / "project_template"
    template = packaged if packaged.is_dir() else packaged.parents[1]  # a checkout is a project itself
    files = {
        str(file.relative_to(template)): _adapted(file, template)
        for pattern in _FILES
        for file in sorted(template.glob(pattern))
    }
    files |= {".dvc/config": _DVC_CONFIG, ".dvc/.gitignore": "/config.local\n/tmp\n/cache\n"}
    files["data/start.json"] = '{"kind": "cold"}\n'
    if git(folder, "rev-parse", "--git-dir") is None:
        files[".dvc/config.local"] = "[core]\n    no_scm = true\n"  # DVC looks for git otherwise
    missing = {name: text for name, text in files.items() if not (folder / name).exists()}
    for name, text in missing.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "bin" / "python").chmod(0o755)
    (folder / ".dvcstore").mkdir(exist_ok=True)
    return sorted(missing)


def _adapted(file: Path, template: Path) -> str:
    """A file's text: dependencies on the code of a checkout are left out, the last resort is the Python of now."""
    text, name = file.read_text(encoding="utf-8"), str(file.relative_to(template))
    if name == "bin/python":
        return text.replace("exec python3 ", f'exec "{sys.executable}" ')
    if name == "dvc.yaml":
        text = re.sub(r'^ +- "?unidec/.*\n', "", text, flags=re.MULTILINE)
        text = re.sub(r', "?unidec/[^,\]]+', "", text)
        return f"# After an upgrade of unidec-xmc: `dvc repro --force`, its code is no dependency here.\n{text}"
    return text
