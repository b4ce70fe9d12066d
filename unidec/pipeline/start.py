"""The start of a training, cold or from the champion: chosen before the training (`choose_start`),
opened when it begins.

The choice is written to data/start.json, a dependency of DVC's stage `train`. This small file is in
git, the model in the registry. Reproducing the stage, even years later, starts from the same model,
which is identified by its hash.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from unidec.bundle.bundle_folder import read_info, read_labels
from unidec.config import Params, keys_deciding, leaves, value_at
from unidec.config.section import Stored
from unidec.data.storage import read_json, write_bytes_atomic
from unidec.errors import ArtifactError, ConfigError
from unidec.pipeline import paths, seen
from unidec.pipeline.lock import replaces_inputs
from unidec.tracking.fetch import fetch_bundle, fetch_by_hash, find_alias
from unidec.training import identity

if TYPE_CHECKING:
    from unidec.training.initial_weights import Start

Kind = Literal["auto", "warm", "cold"]
FIX = "retrain.start: cold"
COLD = {"kind": "cold"}  # the content of data/start.json for a training from scratch


class WarmStart(Stored):
    """The content of data/start.json for a training that starts from a registered model.

    Attributes:
        model, version: name and version of the model when chosen. bundle_sha256: identifies it.
        generation: number of warm starts in a row, including this one.
    """

    kind: Literal["warm"] = "warm"
    model: Annotated[str, Field(min_length=1)]
    version: Annotated[str, Field(pattern=r"^\d+$")]
    bundle_sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    generation: Annotated[int, Field(ge=1)]


@dataclass(frozen=True, kw_only=True)
class ChosenStart:
    """The start of the next training, with the reason for the choice; other fields as in
    `WarmStart`.
    """

    kind: Literal["warm", "cold"]
    model: str | None = None
    version: str | None = None
    bundle_sha256: str | None = None
    generation: int | None = None
    reason: str


def read_start() -> WarmStart | None:
    """The warm start in data/start.json; None for a cold start, or if there is no such file.

    Raises:
        ArtifactError: the file is damaged.
    """
    if not paths.START.is_file():
        return None
    try:
        content = read_json(paths.START)
        return None if content == COLD else WarmStart.model_validate(content)
    except ValueError as error:  # raised for invalid JSON or UTF-8, or by pydantic
        raise ArtifactError(
            "the file that names the model to start from cannot be read",
            where=paths.START,
            got=str(error).partition("\n")[0],
            fix='restore it from git, or write {"kind": "cold"}',
        ) from error


def effective(params: Params) -> Params:
    """The parameters that a training runs with: those of params.yaml, with section `warm` applied
    in a warm start.

    Idempotent: applying it twice gives the same parameters.

    Raises:
        ConfigError: both data/start.json and `encoder.start` name a model to start from.
        ArtifactError: data/start.json is damaged.
    """
    if read_start() is None:
        return params
    if params.encoder.start:
        raise ConfigError(
            "two models to start from",
            where="encoder.start",
            got=f"{params.encoder.start} and a warm start",
            expected="one of them",
            fix=f'{FIX}, or encoder.start: ""',
        )
    return warm_params(params)


def warm_params(params: Params) -> Params:
    """The parameters of a warm start: section `warm` replaces the schedule and scales every
    learning rate.
    """
    warm = params.warm
    changed = {"epochs": warm.epochs, "warmup_epochs": warm.warmup_epochs}
    for key, value in params.optim:
        if key.startswith("lr_"):
            changed[key] = value * warm.lr_scale
    optim = params.optim.model_copy(update=changed)
    # so that a second application changes nothing
    warm = warm.model_copy(update={"lr_scale": 1.0})
    return params.model_copy(update={"optim": optim, "warm": warm})


def start_tags() -> dict[str, str]:
    """The start as tags for a run or a model version."""
    content = _content(read_start())
    return {f"start.{key.replace('_', '.')}": str(value) for key, value in content.items()}


def _content(start: WarmStart | None) -> dict[str, Any]:
    """The content of data/start.json."""
    return COLD if start is None else start.model_dump()


def run_identity(params: Params) -> dict[str, str]:
    """The identity of a training run: everything in parameters, data, code and start that
    determines its result.

    Parameters that do not affect the trained model (`device`, `run`, `tracking`, `index`) are not
    part of it.
    """
    start = read_start()
    return identity.run_identity(
        effective(params).model_dump(),
        paths.open_dataset(),
        paths.open_tokens("queries"),
        paths.open_tokens("labels"),
        start.bundle_sha256 if start else None,
        paths.open_label_graph(params),
    )


@replaces_inputs()
def choose_start(params: Params, kind: Kind | None = None) -> ChosenStart:
    """Choose whether the next training starts from the champion or from scratch, and write
    data/start.json.

    Args:
        params: as in params.yaml.
        kind: "auto": from the champion if it fits and no cold start is due; None: `retrain.start`
        decides.

    Raises:
        ConfigError: a warm start was requested, and there is no champion, or it does not fit the
        parameters.
        ArtifactError: the champion's bundle is damaged.
        MlflowException: the registry does not answer: an outage must not lead to a cold start.
    """
    kind = kind or params.retrain.start
    start = None
    reason = "as requested"
    if kind != "cold":
        start, reason = _from_champion(params, kind == "auto")
    if kind == "warm" and start is None:
        raise ConfigError(
            "no warm start is possible",
            where="retrain.start",
            got=reason,
            fix=f'{FIX}, or auto; encoder.start: ""; or if it knows test queries, accept it: '
            f"{seen.ACCEPT}",
        )
    write_bytes_atomic(paths.START, json.dumps(_content(start), indent=2).encode() + b"\n")
    return ChosenStart(**_content(start), reason=reason)


def _from_champion(params: Params, auto: bool) -> tuple[WarmStart | None, str]:
    """A warm start from the champion, or None, and the reason. `auto`: none if the parameters
    differ, or if a cold start is due by `retrain.cold_every`.
    """
    from unidec.model.encoder_folder import resolved
    from unidec.model.sources import resolve_encoder
    from unidec.model.weights import start_differences  # imports torch

    name = params.tracking.model_name
    if params.encoder.start:
        return None, "encoder.start names a model to start from"
    champion = find_alias(name, "champion")
    if champion is None:
        return None, f"{name} has no champion yet"
    version = f"version {champion.version}"
    bundle = fetch_bundle(f"models:/{name}/{champion.version}")
    model = bundle / "model"
    config = read_json(model / "config.json")
    encoder = resolve_encoder(params.encoder.name)
    unfit = start_differences(resolved(params.encoder, encoder), encoder, encoder, model)
    if config["model"]["dim"] != params.model.dim:
        unfit = [*unfit, "model.dim or index.width"]
    if unfit:
        return None, f"the champion, {version}, has another {_listed(unfit)}"
    generation = int(config.get("start", {}).get("generation", 0))
    words, is_refused = _leak(params, model)
    if is_refused:
        return None, f"the champion, {version}, {words}"
    if auto and (changed := _changed_parameters(params, bundle)):
        return None, f"other parameters than the champion's, {version}: {_listed(changed)}"
    if auto and 0 < params.retrain.cold_every <= generation:
        return None, f"{generation} warm starts in a row (retrain.cold_every)"
    start = WarmStart(
        model=name,
        version=str(champion.version),
        bundle_sha256=champion.tags["bundle.sha256"],
        generation=generation + 1,
    )
    return start, f"the champion, {version}" + (f", which {words}" if words else "")


def _leak(params: Params, model: Path) -> tuple[str, bool]:
    """Test queries that the model in a folder has seen, in words ("": none beyond the allowed
    ones), and whether training must not start from this model.
    """
    if not paths.DATASET.is_dir():
        return "", False
    dataset = paths.open_dataset()
    counted, num = seen.leak_in_words(seen.of_model(model), dataset)
    limit = params.validation.limit("test_texts_in_train")
    if num <= limit.share * len(dataset.rows("test")):
        return "", False
    return f"was trained on {counted}", limit.severity == "error"


def earlier_models(params: Params) -> dict[str, Path]:
    """Folders of the models that training uses, the start and the teacher, by the file or parameter
    that names them.
    """
    models = {}
    if params.encoder.start:
        models["encoder.start"] = Path(params.encoder.start)
    elif start := open_start():
        models[str(paths.START)] = start.model
    if params.teacher.bundle:
        models["teacher.bundle"] = Path(params.teacher.bundle) / "model"
    return models


def check_start(params: Params) -> list[str]:
    """Check that the models that training starts from or learns from were not trained on the test
    queries of the current data, which may have changed since the start was chosen.

    Returns:
        a sentence for each model that was but is accepted (`validation.test_texts_in_train`).

    Raises:
        ConfigError: a model was trained on test queries, so the new model's metrics would be
        worthless.
        ArtifactError: a model is missing or damaged.
    """
    accepted = []
    for place, model in earlier_models(params).items():
        words, is_refused = _leak(params, model)
        if is_refused:
            raise ConfigError(
                "a training cannot start or learn from a model that knows the test queries",
                where=place,
                got=f"the model {words}",
                expected=f"at most {params.validation.limit('test_texts_in_train').share:.1%}",
                fix=(
                    'start from scratch (make train ARGS="--force --start cold") and without a '
                    f"teacher, or accept it: {seen.ACCEPT}"
                ),
            )
        if words:
            accepted.append(f"the model that training starts or learns from {words}")
    return accepted


def _listed(keys: list[str]) -> str:
    """ "a, b, c, d and 3 more"."""
    shown = ", ".join(keys[:4])
    return f"{shown} and {len(keys) - 4} more" if len(keys) > 4 else shown


def _changed_parameters(params: Params, bundle: Path) -> list[str]:
    """Keys, apart from the seed, that determine what is learnt and whose values differ from those
    in the champion's training.
    """
    champion = read_info(bundle).params
    values = dict(leaves(params))
    return [
        key
        for key in keys_deciding("tokens", "label_graph", "training")
        if key != "seed" and json.dumps(value_at(champion, key)) != json.dumps(values[key])
    ]


def open_start() -> Start | None:
    """The model that data/start.json names, fetched if necessary; None for a cold start.

    Raises:
        ArtifactError: the registry does not have it, or the stored bundle is damaged.
        MlflowException: the registry does not answer.
    """
    from unidec.training.initial_weights import Start  # imports torch

    start = read_start()
    if start is None:
        return None
    bundle = fetch_by_hash(start.model, start.bundle_sha256)
    uids = read_labels(bundle, read_info(bundle).num_labels)["uid"].combine_chunks()
    return Start(bundle / "model", uids, start.bundle_sha256, bundle / "vectors")
