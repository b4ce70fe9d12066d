"""What a training starts from: chosen before it (`choose_start`), opened when it begins.

The choice is written to data/start.json, on which DVC's stage `train` depends: git has this small file, the registry
the model. Who runs that stage again, also years later, starts from the same model, found by its hash.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from unidec.config import Params, leaves
from unidec.data.storage import write_bytes_atomic
from unidec.errors import ArtifactError, ConfigError
from unidec.pipeline import paths
from unidec.pipeline.lock import replaces_inputs
from unidec.pipeline.runs import some_keys
from unidec.retrieval.bundle_folder import read_info, read_labels
from unidec.tracking.fetch import fetch_bundle, fetch_by_hash, find_alias
from unidec.training import identity
from unidec.training.identity import SECTIONS

if TYPE_CHECKING:
    from unidec.training.start import Start

Kind = Literal["auto", "warm", "cold"]
START = Path("data/start.json")
FIX = "retrain.start: cold"
COLD = {"kind": "cold"}


class WarmStart(BaseModel):
    """The content of data/start.json: from a registered model (where it was when it was chosen, and its hash, which
    finds it wherever it is now) and the number of warm starts in a row, this one counted; `COLD`: from nothing."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    kind: Literal["warm"] = "warm"
    model: Annotated[str, Field(min_length=1)]
    version: Annotated[str, Field(pattern=r"^\d+$")]
    bundle_sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    generation: Annotated[int, Field(ge=1)]


@dataclass(frozen=True, kw_only=True)
class ChosenStart:
    """What the next training starts from and why; for a warm start also the fields of `WarmStart`."""

    kind: Literal["warm", "cold"]
    model: str | None = None
    version: str | None = None
    bundle_sha256: str | None = None
    generation: int | None = None
    reason: str


def read_start() -> WarmStart | None:
    """data/start.json; None for a cold start, as where there is none.

    Raises:
        ArtifactError: it is damaged.
    """
    if not START.is_file():
        return None
    try:
        note = json.loads(START.read_bytes())
        return None if note == COLD else WarmStart.model_validate(note)
    except ValueError as error:  # of json, UTF-8 or pydantic
        got, fix = str(error).partition("\n")[0], f"bring it back from git, or write {json.dumps(COLD)}"
        raise ArtifactError("what training starts from cannot be read", where=str(START), got=got, fix=fix) from error


def effective(params: Params) -> Params:
    """The parameters that a training runs with: those of params.yaml, with section `warm` applied in a warm start.

    Applied to its own result it changes nothing.

    Raises:
        ConfigError: two starts at once: data/start.json and `encoder.start`.
        ArtifactError: data/start.json is damaged.
    """
    if read_start() is None:
        return params
    if params.encoder.start:
        raise ConfigError(
            "two models to start from", where="encoder.start", got=f"{params.encoder.start}, and a warm start",
            expected="one of them", fix=f'{FIX}, or encoder.start: ""',
        )  # fmt: skip
    return warm_params(params)


def warm_params(params: Params) -> Params:
    """What a warm start trains with: section `warm` takes the place of the schedule and scales every learning rate."""
    warm, optim = params.warm, params.optim
    rates = {key: value * warm.lr_scale for key, value in optim.model_dump().items() if key.startswith("lr_")}
    schedule = {"epochs": warm.epochs, "warmup_epochs": warm.warmup_epochs}
    scaled = {"optim": optim.model_copy(update=schedule | rates), "warm": warm.model_copy(update={"lr_scale": 1.0})}
    return params.model_copy(update=scaled)


def start_tags() -> dict[str, str]:
    """The start as tags of a run or of a model's version."""
    return {f"start.{key.replace('_', '.')}": str(value) for key, value in _note(read_start()).items()}


def _note(start: WarmStart | None) -> dict[str, Any]:
    return COLD if start is None else start.model_dump()


def run_identity(params: Params) -> dict[str, str]:
    """What decides the training that these parameters, this data, this code and this start make.

    What only decides where it runs or is shown (`device`, `run`, `tracking`, `index`) is no part of it."""
    start = read_start()
    return identity.run_identity(
        effective(params).model_dump(), paths.open_dataset(), paths.open_tokens("queries"),
        paths.open_tokens("labels"), start.bundle_sha256 if start else None, paths.open_label_graph(params),
    )  # fmt: skip


@replaces_inputs()
def choose_start(params: Params, kind: Kind | None = None) -> ChosenStart:
    """Choose what the next training starts from, and write it to data/start.json.

    Args:
        params: as params.yaml has them.
        kind: "auto": from the champion where that is sensible, else from nothing; None: `retrain.start` decides.

    Raises:
        ConfigError: a warm start was asked for, and there is no champion, or it does not fit.
        ArtifactError: the champion's bundle is damaged.
        MlflowException: the registry does not answer; nothing is trained from nothing for that reason.
    """
    kind = kind or params.retrain.start
    start, reason = (None, "asked for") if kind == "cold" else _from_champion(params, kind == "auto")
    if kind == "warm" and start is None:
        fix = f'{FIX}, or auto; or encoder.start: ""' if params.encoder.start else f"{FIX}, or auto"
        raise ConfigError("no warm start", where="retrain.start", got=reason, fix=fix)
    write_bytes_atomic(START, json.dumps(_note(start), indent=2).encode() + b"\n")
    return ChosenStart(**_note(start), reason=reason)


def _from_champion(params: Params, auto: bool) -> tuple[WarmStart | None, str]:
    """A warm start, or None, and the reason; `auto`: only where a warm start is sensible."""
    from unidec.model.sources import resolve_encoder
    from unidec.model.weights import start_differences  # imports torch

    name = params.tracking.model_name
    if params.encoder.start:
        return None, "encoder.start names a model to start from"
    champion = find_alias(name, "champion")
    if champion is None:
        return None, f"{name} has no champion yet"
    bundle, who = fetch_bundle(f"models:/{name}/{champion.version}", paths.BUNDLES), f"version {champion.version}"
    config = json.loads((bundle / "model" / "config.json").read_text(encoding="utf-8"))
    encoder = resolve_encoder(params.encoder.name)
    unfit = start_differences(params.encoder, encoder, encoder, bundle / "model")
    if unfit := unfit + ["model.dim"] * (config["model"]["dim"] != params.model.dim):
        return None, f"the champion, {who}, has another {some_keys(unfit, 4)}"
    before = int(config.get("start", {}).get("generation", 0))
    if auto and (other := _other_parameters(params, bundle)):
        return None, f"other parameters than the champion's, {who}: {some_keys(other, 4)}"
    if auto and 0 < params.retrain.cold_every <= before:
        return None, f"{before} warm starts in a row (retrain.cold_every)"
    sha256 = champion.tags["bundle.sha256"]
    start = WarmStart(model=name, version=str(champion.version), bundle_sha256=sha256, generation=before + 1)
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
    from unidec.training.start import Start  # imports torch

    start = read_start()
    if start is None:
        return None
    bundle = fetch_by_hash(start.model, start.bundle_sha256, paths.BUNDLES)
    uids = read_labels(bundle, read_info(bundle).num_labels)["uid"].combine_chunks()
    return Start(bundle / "model", uids, start.bundle_sha256, bundle / "vectors")
