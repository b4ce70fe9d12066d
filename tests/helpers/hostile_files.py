"""What an attacker does to a stored bundle."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from unidec.data.storage import MANIFEST, write_manifest


class MakesFolder:
    """Its pickle makes a folder `executed` where it is loaded."""

    def __reduce__(self) -> tuple:
        return os.mkdir, ("executed",)


def seal(bundle: Path) -> None:
    """A manifest that fits the files, as an attacker's would."""
    about = json.loads((bundle / "manifest.json").read_text())
    write_manifest(bundle, about["kind"], about["version"], about["meta"])


def write_sealed(folder: Path, **changes: object) -> None:
    """The folder's manifest with other values, and a sha256 that fits them."""
    manifest = json.loads((folder / MANIFEST).read_text()) | changes
    del manifest["sha256"]
    body = json.dumps(manifest, indent=1, ensure_ascii=False).removesuffix("\n}")
    digest = hashlib.sha256(body.encode()).hexdigest()
    (folder / MANIFEST).write_text(f'{body},\n "sha256": "{digest}"\n}}\n')


def edit(bundle: Path, **changes: object) -> None:
    """Other values in bundle.json."""
    info = json.loads((bundle / "bundle.json").read_text())
    (bundle / "bundle.json").write_text(json.dumps(info | changes))
