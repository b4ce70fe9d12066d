"""What is checked before any work: `unidec config check`, and the beginning of a flow."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from unidec import cli, pipeline
from unidec.config import Params
from unidec.errors import UnidecError


@pytest.fixture
def params(
    tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Params]:
    """Parameters without a fault, with sections replaced; the project is the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    Path("raw").mkdir()
    Path("params.yaml").touch()

    def params(**sections: Any) -> Params:
        right = {
            "data": {"path": "raw"},
            "encoder": {"name": str(tiny_bert)},
            "tokens": {"max_length": 16},
        }
        return Params.model_validate(right | sections)

    return params


def refused(params: Params, **options: Any) -> UnidecError:
    with pytest.raises(UnidecError) as caught:
        pipeline.check_before_work(params, **options)
    return caught.value


def test_right_settings_pass(params: Callable[..., Params]) -> None:
    pipeline.check_before_work(params())
    names = {path.name for path in Path().iterdir()}
    assert names == {"raw", "params.yaml"}, "nothing is written"


@pytest.mark.parametrize(
    ("sections", "words", "code"),
    [
        ({"data": {"path": "rwa"}}, ["rwa: no such folder", "data.path", "nearest: raw"], 3),
        ({"data": {"path": "params.yaml"}}, ["not a folder"], 3),
        ({"data": {"path": "tracked"}}, ["dvc pull tracked.dvc"], 3),
        (
            {"source": {"kind": "folder", "path": "exports"}},
            ["exports: no files found", "source.path"],
            3,
        ),
        (
            {"source": {"kind": "files", "queries": "q.csv", "labels": "l.csv", "pairs": "p.csv"}},
            ["q.csv"],
            3,
        ),
        (
            {"encoder": {"name": "nobody/at-all"}},
            ["encoder.name", "nobody/at-all", "HF_HUB_OFFLINE"],
            4,
        ),
        ({"encoder": {"name": "./folder/of/none"}}, ["encoder.name", "./folder/of/none"], 4),
        (
            {"encoder": {"name": "raw"}},
            ["config.json, tokenizer.json, model.safetensors missing"],
            4,
        ),
        ({"encoder": {"start": "outputs/modle"}}, ["encoder.start", "outputs/modle"], 4),
        ({"tokens": {"max_length": 512}}, ["tokens.max_length"], 2),
        ({"device": "cuda"}, ["no usable GPU"], 2),
    ],
)
def test_what_a_training_would_fail_on(
    params: Callable[..., Params], sections: dict[str, Any], words: list[str], code: int
) -> None:
    import torch

    if "device" in sections and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    Path("tracked.dvc").touch()
    error = refused(params(**sections))
    assert error.exit_code == code, error
    assert all(part in str(error) for part in words), error


def test_all_problems_are_listed(params: Callable[..., Params]) -> None:
    error = refused(
        params(data={"path": "rwa"}, encoder={"name": "nobody/at-all", "start": "outputs/modle"})
    )
    assert str(error).startswith("3 problems\n") and error.exit_code == 3
    assert all(part in str(error) for part in ("rwa", "nobody/at-all", "outputs/modle"))


def test_a_damaged_start_is_found_before_training(params: Callable[..., Params]) -> None:
    Path("data").mkdir()
    Path("data/start.json").write_text("{")
    assert "data/start.json" in str(refused(params()))


def test_only_what_the_steps_need_is_checked(params: Callable[..., Params]) -> None:
    wrong = params(data={"path": "rwa"}, encoder={"name": "nobody/at-all"})
    pipeline.check_before_work(wrong, steps=("index", "evaluate"))
    assert "rwa" in str(refused(wrong, steps=("ingest",)))


def test_a_missing_package_names_its_extra(
    params: Callable[..., Params], monkeypatch: pytest.MonkeyPatch
) -> None:
    from unidec.pipeline import preflight

    find = preflight.importlib.util.find_spec
    absent = ("faiss", "great_expectations")
    monkeypatch.setattr(
        preflight.importlib.util, "find_spec", lambda name: None if name in absent else find(name)
    )
    assert "unidec-xmc[cpu]" in str(refused(params(), steps=("index",)))
    assert "unidec-xmc[pipeline]" in str(refused(params(), steps=("validate",)))
    pipeline.check_before_work(params(), steps=("evaluate",))


def test_config_check_says_it_at_once(params: Callable[..., Params]) -> None:
    params()
    Path("params.yaml").write_text("data: {path: rwa}\n")
    begun = time.monotonic()
    done = CliRunner().invoke(cli.app, ["config", "check"])
    assert isinstance(done.exception, UnidecError)
    assert "rwa: no such folder" in str(done.exception)
    assert time.monotonic() - begun < 10
