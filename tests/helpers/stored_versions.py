"""Versions of a registered model in a moment: their "bundles" are folders with a manifest and one
file.
"""

from __future__ import annotations

import json
from pathlib import Path

from unidec.data.storage import folder_sha256, write_folder


def store_version(client, name: str, folder: Path, what: str, **tags: str) -> str:
    """A version whose stored bundle lies in `folder`, as a logged model's does. Returns
    its number.
    """
    with write_folder(folder / "artifacts" / "bundle", "bundle", 1) as out:
        (out.path / "labels.json").write_text(json.dumps([what]))
    if not client.search_registered_models(f"name = '{name}'"):
        client.create_registered_model(name)
    all_tags = {"bundle.sha256": folder_sha256(folder / "artifacts" / "bundle")} | tags
    return str(client.create_model_version(name, source=folder.as_uri(), tags=all_tags).version)


def upload_version(client, name: str, folder: Path, what: str, **tags: str) -> str:
    """The same on a server, which takes artifacts by HTTP: they belong to a run of their own."""
    with write_folder(folder / "artifacts" / "bundle", "bundle", 1) as out:
        (out.path / "labels.json").write_text(json.dumps([what]))
    if not client.search_registered_models(f"name = '{name}'"):
        client.create_registered_model(name)
    held = client.get_experiment_by_name(name)
    run = client.create_run(held.experiment_id if held else client.create_experiment(name))
    client.log_artifacts(run.info.run_id, str(folder), "stored")
    all_tags = {"bundle.sha256": folder_sha256(folder / "artifacts" / "bundle")} | tags
    source = f"{run.info.artifact_uri}/stored"
    return str(
        client.create_model_version(
            name, source=source, run_id=run.info.run_id, tags=all_tags
        ).version
    )


def passed(champion: str | None = None, **tags: str) -> dict[str, str]:
    """Tags of a version that the gate let through."""
    return {
        "gate.passed": "true",
        "gate.failed": "",
        "gate.champion": champion or "",
        "git.dirty": "false",
        **tags,
    }
