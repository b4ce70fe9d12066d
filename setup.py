"""What pyproject.toml cannot say: a wheel has the flows in the template of `unidec init --project`.

As a top-level package `flows` they would take that name in everybody's environment. A checkout,
installed editable, keeps its folder."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

TEMPLATE = (
    "dvc.yaml",
    "prefect.yaml",
    "prefect.toml",
    ".gitignore",
    ".dvcignore",
    "bin/python",
    "flows/*.*",
)


class BuildPackages(build_py):
    def run(self) -> None:
        if self.editable_mode:
            return super().run()
        self.packages = [name for name in self.packages if name != "flows"]
        super().run()
        for file in (file for pattern in TEMPLATE for file in sorted(Path().glob(pattern))):
            target = Path(self.build_lib, "unidec", "project_template", file)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
        return None


setup(cmdclass={"build_py": BuildPackages})
