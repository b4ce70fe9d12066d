"""List the licences of the installed packages: `python bin/licences.py >THIRD-PARTY.txt`.

For an image or an installation that is redistributed; see NOTICE.md.
"""

from __future__ import annotations

import re
from importlib import metadata

# licences that require more than their text and the authors' names
COPYLEFT = re.compile(r"GPL|GNU|MPL|Mozilla|EPL|Eclipse|CDDL")


def licence(package: metadata.PackageMetadata) -> str:
    """Licence in the package's metadata: an expression, classifiers, or the first line
    of a text.
    """
    given = package.get("License-Expression")
    classifiers = [
        name for name in package.get_all("Classifier") or [] if name.startswith("License ::")
    ]
    named = [name.split(" :: ")[-1] for name in classifiers if name.count(" :: ") > 1]
    text = (package.get("License") or "").strip().split("\n")[0][:60]
    return given or ", ".join(named) or text or "not stated"


def installed() -> list[tuple[str, str, str]]:
    """(name, version, licence) of each installed package, sorted by name."""
    by_name = {item.metadata["Name"]: item for item in metadata.distributions()}
    return [
        (name, by_name[name].version, licence(by_name[name].metadata))
        for name in sorted(by_name, key=str.lower)
    ]


if __name__ == "__main__":
    for row in installed():
        print(*row, sep="\t")
