"""What a training starts from: chosen before it (`choose_start`), opened when it begins.

The choice is written to data/start.json, on which DVC's stage `train` depends: who runs that stage again, also years
later, starts from the same model, found in the registry by its hash.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from unidec.config import Params, leaves
from unidec.errors import ConfigError
from unidec.model.sources import resolve_encoder
from unidec.model.weights import start_differences
from unidec.pipeline import paths
from unidec.pipeline.lock import replaces_inputs
from unidec.pipeline.runs import some_keys
from unidec.pipeline.start_file import FIX, StartFile, read_start, write_start
from unidec.retrieval.bundle_folder import read_info, read_labels
from unidec.tracking.fetch import fetch_bundle, fetch_by_hash, find_alias
from unidec.training.identity import SECTIONS
from unidec.training.start import Start

Kind = Literal["auto", "warm", "cold"]


@replaces_inputs()
def choose_start(params: Params, kind: Kind | None = None) -> dict[str, Any]:
    """Choose what the next training starts from, and write it to data/start.json if that differs.

    Args:
        params: as params.yaml has them.
        kind: "auto": from the champion where that is sensible, else from nothing; None: `retrain.start` decides.

    Returns:
        {"kind", "reason", "changed"}, and for a warm start {"model", "version", "bundle_sha256", "generation"};
        changed: data/start.json was written.

    Raises:
        ConfigError: a warm start was asked for, and there is no champion, or it does not fit.
        ArtifactError: the champion's bundle is damaged.
        MlflowException: the registry does not answer; nothing is trained from nothing for that reason.
    """
    kind = kind or params.retrain.start
    start, reason = (StartFile(), "asked for") if kind == "cold" else _from_champion(params, kind == "auto")
    if kind == "warm" and not start.warm:
        fix = f'{FIX}, or auto; or encoder.start: ""' if params.encoder.start else f"{FIX}, or auto"
        raise ConfigError("no warm start", where="retrain.start", got=reason, fix=fix)
    return start.as_dict() | {"reason": reason, "changed": write_start(start)}


def _from_champion(params: Params, auto: bool) -> tuple[StartFile, str]:
    """A warm start, or a cold one, and the reason; `auto`: only where a warm start is sensible."""
    name, cold = params.tracking.model_name, StartFile()
    if params.encoder.start:
        return cold, "encoder.start names a model to start from"
    champion = find_alias(name, "champion")
    if champion is None:
        return cold, f"{name} has no champion yet"
    bundle, who = fetch_bundle(f"models:/{name}/{champion.version}", paths.BUNDLES), f"version {champion.version}"
    config = json.loads((bundle / "model" / "config.json").read_text(encoding="utf-8"))
    encoder = resolve_encoder(params.encoder.name)
    unfit = start_differences(params.encoder, encoder, encoder, bundle / "model")
    if unfit := unfit + ["model.dim"] * (config["model"]["dim"] != params.model.dim):
        return cold, f"the champion, {who}, has another {some_keys(unfit, 4)}"
    before = int(config.get("start", {}).get("generation", 0))
    if auto and (other := _other_parameters(params, bundle)):
        return cold, f"other parameters than the champion's, {who}: {some_keys(other, 4)}"
    if auto and 0 < params.retrain.cold_every <= before:
        return cold, f"{before} warm starts in a row (retrain.cold_every)"
    start = StartFile(
        kind="warm", model=name, version=str(champion.version), bundle_sha256=champion.tags["bundle.sha256"],
        generation=before + 1,
    )  # fmt: skip
    return start, f"the champion, {who}"


def _other_parameters(params: Params, bundle: Path) -> list[str]:
    """Keys that decide what is learnt, beside the seed, and had another value in the champion's training."""
    given, defaults, other = read_info(bundle).params, dict(leaves(Params())), []
    for key, value in leaves(params):
        section, _, name = key.partition(".")
        # a key that is newer than the champion had its default
        champions = given.get(section, {}).get(name, defaults[key]) if name else None
        if section in {*SECTIONS, "label_graph"} - {"seed"} and json.dumps(champions) != json.dumps(value):
            other.append(key)
    return other


def open_start() -> Start | None:
    """The model that data/start.json names, fetched if need be; None for a cold start.

    Raises:
        ArtifactError: the registry does not have it, or what it has is damaged.
        MlflowException: the registry does not answer.
    """
    start = read_start()
    if not start.warm:
        return None
    bundle = fetch_by_hash(start.model, start.bundle_sha256, paths.BUNDLES, start.version)
    uids = read_labels(bundle, read_info(bundle).num_labels)["uid"].combine_chunks()
    return Start(bundle / "model", uids, start.bundle_sha256, bundle / "vectors")


def start_lines(start: Start | None) -> list[str]:
    """Lines for people on a warm start."""
    if start is None:
        return []
    note, uids = read_start(), paths.open_dataset().labels["uid"]
    kept = int((start.rows_of(uids) >= 0).sum())
    return [
        f"starts from {note.model} version {note.version} (bundle {note.bundle_sha256[:12]}), warm starts in a row: "
        f"{note.generation}; {kept:,} labels are kept, {len(uids) - kept:,} are new, "
        f"{len(start.uids) - kept:,} are gone"
    ]
