"""data/start.json: what a training starts from. git has this small file, the registry the model, found by its hash."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from unidec.config import Params
from unidec.data.storage import write_bytes_atomic
from unidec.errors import ArtifactError, ConfigError

START = Path("data/start.json")
FIX = "retrain.start: cold"


class StartFile(BaseModel):
    """The content of data/start.json: from nothing, or from a registered model (where it was when it was chosen, and
    its hash, which finds it wherever it is now) and the number of warm starts in a row, this one counted."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    kind: Literal["cold", "warm"] = "cold"
    model: str = ""
    version: Annotated[str, Field(pattern=r"^\d*$")] = ""
    bundle_sha256: Annotated[str, Field(pattern="^([0-9a-f]{64})?$")] = ""
    generation: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _whole(self) -> Self:
        given = [bool(self.model), bool(self.version), bool(self.bundle_sha256), self.generation > 0]
        if any(given) if self.kind == "cold" else not all(given):
            raise ValueError("a warm start has model, version, bundle_sha256 and generation, a cold one none of them")
        return self

    @property
    def warm(self) -> bool:
        return self.kind == "warm"

    def as_dict(self) -> dict[str, str | int]:
        """As the file has it."""
        return self.model_dump(exclude_defaults=True) | {"kind": self.kind}


def read_start() -> StartFile:
    """data/start.json; a cold start where there is none.

    Raises:
        ArtifactError: it is damaged.
    """
    if not START.is_file():
        return StartFile()
    try:
        return StartFile.model_validate_json(START.read_bytes())
    except ValidationError as error:
        got, fix = error.errors()[0]["msg"], 'bring it back from git, or write {"kind": "cold"}'
        raise ArtifactError("what training starts from cannot be read", where=str(START), got=got, fix=fix) from error


def write_start(start: StartFile) -> bool:
    """Write data/start.json, unless it has these bytes; returns whether it was written. Equal starts, equal bytes."""
    data = json.dumps(start.as_dict(), indent=2).encode() + b"\n"
    if START.is_file() and START.read_bytes() == data:
        return False
    write_bytes_atomic(START, data)
    return True


def effective(params: Params) -> Params:
    """The parameters that a training runs with: those of params.yaml, with section `warm` applied in a warm start.

    Applied to its own result it changes nothing.

    Raises:
        ConfigError: two starts at once: data/start.json and `encoder.start`.
        ArtifactError: data/start.json is damaged.
    """
    if not read_start().warm:
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
    return {f"start.{key.replace('_', '.')}": str(value) for key, value in read_start().as_dict().items()}
