"""The command line: arguments, summaries, exit codes; the stages themselves are replaced."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pyarrow as pa
import pytest
import yaml

import unidec
from unidec import cli
from unidec.bundle import predict_file as predict_files  # before a fake takes the bundle's place
from unidec.cli import commands, data_commands, label_commands, models
from unidec.config import Params, known_keys, load_params
from unidec.errors import ArtifactError, ConfigError, DataError, Stopped
from unidec.pipeline import plain

ROOT = Path(__file__).resolve().parents[1]
SIMPLE = {
    "data ingest": "ingest",
    "data validate": "validate",
    "data tokens": "tokens",
    "data propensity": "propensity",
    "data label-graph": "label_graph",
    "models start": "choose_start",
    "index build": "index",
    "evaluate": "evaluate",
    "models register": "register",
}


class Stages(types.ModuleType):
    """Stands for unidec.pipeline: notes the calls, trains in three rounds."""

    def __init__(self) -> None:
        super().__init__("unidec.pipeline")
        self.plain = plain
        self.calls: list[str] = []
        self.params: Params | None = None
        self.error: Exception | None = None
        for name in SIMPLE.values():
            setattr(self, name, self._stage(name))

    def _stage(self, name: str):
        def stage(params: Params) -> dict:
            self.calls.append(name)
            self.params = params
            if self.error:
                raise self.error
            return {
                "stage": name,
                "rows": 3,
                "metrics": {"P@1": 45.678901},
                "many": list(range(9)),
            }

        return stage

    def train(
        self, params: Params, resume: str | None = None, accept: tuple[str, ...] = ()
    ) -> dict:
        self.calls.append("train")
        self.asked = (resume, accept)
        if self.error:
            raise self.error
        return {
            "run_dir": "runs/x",
            "finished": True,
            "epoch": 15,
            "validation": {"P@1": 45.678901},
        }


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> Stages:
    fake = Stages()
    for module in (cli, commands, data_commands, label_commands, models):
        monkeypatch.setattr(module, "pipeline", fake)
    return fake


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    (tmp_path / "params.yaml").write_text("recipe: unidec\n")
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["unidec", *words])
        # threads that other tests left are no reason to end pytest
        monkeypatch.setattr(cli.os, "_exit", sys.exit)
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.mark.parametrize(("command", "stage"), SIMPLE.items())
def test_each_stage_is_called_once_with_the_parameters(
    run, stages: Stages, command: str, stage: str
) -> None:
    code, out, _ = run(*command.split(), "--set", "pool.beta=2")
    assert code == 0
    assert stages.calls == [stage]
    assert stages.params is not None
    assert stages.params.pool.beta == 2
    name = stage.replace("_", "-")
    assert f"{name}: rows = 3" in out
    assert f"{name}: metrics.P@1 = 45.68" in out
    assert f"{name}: many = 9 entries" in out


def test_json_prints_the_whole_result(run, stages: Stages) -> None:
    code, out, _ = run("data", "ingest", "--json")
    assert code == 0
    assert json.loads(out)["metrics"]["P@1"] == 45.678901


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ((), (None, ())),
        (("--resume",), ("", ())),
        (("--resume", "3f2a", "--accept", "code", "--accept", "seed"), ("3f2a", ("code", "seed"))),
    ],
)
def test_train_hands_on_which_run_goes_on(
    run, stages: Stages, words: tuple[str, ...], asked: tuple
) -> None:
    code, out, _ = run("train", *words)
    assert code == 0
    assert stages.calls == ["train"]
    assert stages.asked == asked
    assert "train: epoch = 15" in out and "train: validation.P@1 = 45.68" in out


def test_a_run_without_resume_is_a_mistake(run, stages: Stages) -> None:
    code, _, err = run("train", "3f2a")
    assert code == 2 and "unidec train --resume 3f2a" in err and stages.calls == []


def test_a_training_that_was_stopped_says_how_to_go_on(run, stages: Stages) -> None:
    stages.error = Stopped("terminated: the same command goes on", 143)
    assert run("train") == (143, "", "terminated: the same command goes on\n")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DataError("bad rows"), 3),
        (ArtifactError("damaged", fix="again"), 4),
    ],
)
def test_a_known_error_is_a_message_and_an_exit_code(
    run, stages: Stages, error: Exception, code: int
) -> None:
    stages.error = error
    got, out, err = run("data", "ingest")
    assert got == code
    assert err == f"error: {error}\n"
    assert out == ""


def test_debug_shows_the_traceback_wherever_it_stands(run, stages: Stages) -> None:
    stages.error = DataError("bad rows")
    for words in (("--debug", "data", "ingest"), ("data", "ingest", "--debug")):
        with pytest.raises(DataError):
            run(*words)


def test_an_unknown_error_keeps_its_traceback(run, stages: Stages) -> None:
    stages.error = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        run("data", "ingest")


def test_wrong_parameters_never_reach_a_stage(run, stages: Stages) -> None:
    code, _, err = run("train", "--set", "pool.betta=2", "--set", "seed=-1")
    assert code == 2
    assert "nearest: pool.beta" in err
    assert "seed (--set)" in err
    assert stages.calls == []
    assert run("data", "ingest", "--params", "none.yaml")[0] == 2
    assert run("nonsense")[0] == 2


@pytest.mark.parametrize(
    "command", [*SIMPLE, "train", "runs list", "runs doctor", "plan", "tune", "predict", "init"]
)
def test_every_command_explains_itself_with_an_example(run, command: str) -> None:
    code, out, _ = run(*command.split(), "--help")
    assert code == 0
    assert "Example" in out
    assert f"unidec {command}" in out


# -- prediction
# --------------------------------------------------------------------------------------------------


class FakeBundle:
    """Stands for a bundle: label number = rank, score = 1 / rank."""

    @classmethod
    def load(cls, path: Path, lazy: bool = False) -> FakeBundle:
        if not Path(path).is_dir():
            raise ArtifactError("no such bundle", where=str(path), fix="make train")
        return cls()

    def predict_table(self, texts: list[str], k: int) -> pa.Table:
        names = ["query_row", "query", "rank", "label", "title", "score", "probability"]
        rows = [
            (
                row,
                text,
                rank,
                f"uid{rank}",
                f"title [bold]{rank}",
                1 / rank,
                0.75 if rank == 1 else None,
            )
            for row, text in enumerate(texts)
            for rank in range(1, k + 1)
        ]
        return pa.Table.from_pylist([dict(zip(names, row, strict=True)) for row in rows])


@pytest.fixture
def bundle(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    module = types.ModuleType("unidec.bundle.bundle")
    module.Bundle = FakeBundle  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "unidec.bundle.bundle", module)
    monkeypatch.setattr(
        "unidec.ranking.query_encoder.open_encoder", lambda _bundle, runtime: runtime
    )
    (tmp_path / "outputs" / "bundle").mkdir(parents=True)
    return tmp_path / "outputs" / "bundle"


def test_predict_prints_labels_with_scores(run, bundle: Path) -> None:
    code, out, _ = run("predict", "a text", "another", "-k", "2")
    assert code == 0
    lines = [line.split("\t") for line in out.splitlines()]
    assert lines[0] == ["query", "rank", "label", "title", "score", "probability"]
    expected = [
        ["a text", "1", "uid1"],
        ["a text", "2", "uid2"],
        ["another", "1", "uid1"],
        ["another", "2", "uid2"],
    ]
    assert [line[:3] for line in lines[1:]] == expected


def test_predictions_on_a_terminal_are_tables(capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    commands.show_predictions(
        FakeBundle().predict_table(["q [red]"], 2).drop_columns(["query_row"]).to_pandas()
    )
    out = capsys.readouterr().out
    assert "q [red]" in out
    assert "title [bold]2" in out
    assert "0.5000" in out
    assert "75.0%" in out and "unknown" in out


def test_predict_hands_files_on(run, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    quotes = []

    def predict_file(request, bounds):
        calls.append(
            (
                request.input,
                request.output,
                request.k,
                request.column,
                request.runtime,
            )
        )
        quotes.append(bounds.quotes)
        return 7

    monkeypatch.setattr(predict_files, "predict_file", predict_file)
    words = ["predict", "--input", "in.csv", "--output", "out.parquet"]
    code, out, _ = run(*words, "-k", "3", "--column", "body")
    assert code == 0
    exit_code = run(*words, "--runtime", "onnx", "--set", "raw.quotes=no")[0]
    assert exit_code == 0
    assert quotes == ["auto", "no"]
    assert calls == [
        ("in.csv", "out.parquet", 3, "body", "auto"),
        ("in.csv", "out.parquet", 5, None, "onnx"),
    ]
    assert run(*words, "--runtime", "gpt")[0] == 2
    assert "queries = 7" in out


def test_predict_as_json_lines(run, bundle: Path) -> None:
    _, out, _ = run("predict", "naïve ☃", "-k", "2", "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    expected = [
        ("naïve ☃", "uid1"),
        ("naïve ☃", "uid2"),
    ]
    assert [(row["query"], row["label"]) for row in rows] == expected


def test_predict_says_what_it_needs(run, bundle: Path) -> None:
    for words in (
        (),
        ("text", "--input", "a.csv"),
        ("--input", "a.csv"),
        ("text", "--output", "b.csv"),
    ):
        code, _, err = run("predict", *words)
        assert code == 2, words
        assert "--input and --output" in err
    assert run("predict", "text", "--bundle", "nowhere")[0] == 4
    assert run("predict", "text", "-k", "0")[0] == 2
    for text in ("", " \t", "\u200b"):  # as the server does
        code, out, err = run("predict", "text", text)
        assert code == 3 and not out and "text 2: empty text" in err


# -- parameters
# --------------------------------------------------------------------------------------------------


def test_config_show_prints_a_file_that_loads_to_the_same_values(run, tmp_path: Path) -> None:
    code, out, _ = run("config", "show", "--set", "recipe=depsl", "--set", "optim.lr_clf=1e-5")
    assert code == 0
    (tmp_path / "shown.yaml").write_text(out)
    expected = load_params("params.yaml", {"recipe": "depsl", "optim.lr_clf": 1e-5})
    assert load_params("shown.yaml") == expected.model_copy(update={"recipe": None})
    _, out, _ = run("config", "show", "--json")
    assert Params.model_validate(json.loads(out)) == load_params("params.yaml")


def test_config_check_and_keys(run) -> None:
    Path(load_params("params.yaml").data.path).mkdir(parents=True)
    assert run("config", "check")[:2] == (0, "params.yaml: ok\n")
    _, out, _ = run("config", "keys")
    for key in known_keys():
        assert f"{key} = " in out
    assert "(integer >= 1); decides: training\n" in out and "decides: operation\n" in out


def test_init_writes_a_file_that_loads_and_has_what_dvc_needs(run, tmp_path: Path) -> None:
    code, _, err = run(
        "init", "mine", "--data-path", "some/where: x", "--format", "tables", "--recipe", "depsl"
    )
    assert code == 0, err
    params = load_params(tmp_path / "mine" / "params.yaml")
    assert (params.data.path, params.data.format, params.recipe) == (
        "some/where: x",
        "tables",
        "depsl",
    )
    written = yaml.safe_load((tmp_path / "mine" / "params.yaml").read_text())
    shipped = yaml.safe_load((ROOT / "params.yaml").read_text())
    assert set(written) == set(shipped)
    assert set(written["data"]) == set(shipped["data"])
    code, _, err = run("init", "mine")
    assert code == 2 and "exists already" in err
    assert run("init", "other", "--recipe", "nonsense")[0] == 2
    assert not (tmp_path / "other" / "params.yaml").exists()


def test_init_changes_a_parameter_file_and_keeps_its_other_lines(run, tmp_path: Path) -> None:
    before = (ROOT / "params.yaml").read_text()
    path = tmp_path / "params.yaml"
    path.write_text(before)
    (tmp_path / "data/raw/my shop: x").mkdir(parents=True)
    code, out, err = run("init", "--data-path", "data/raw/my shop: x", "--recipe", "depsl")
    assert (code, err) == (0, "") and "data.path: data/raw/my shop: x" in out
    params = load_params(path)
    assert (params.data.path, params.recipe) == ("data/raw/my shop: x", "depsl")
    lines = [
        (old, new)
        for old, new in zip(before.splitlines(), path.read_text().splitlines(), strict=True)
    ]
    changed = [new for old, new in lines if old != new]
    assert len(changed) == 2 and changed[0].startswith('recipe: "depsl"    # unidec: both heads')
    written = path.read_text()
    code, _, err = run("init", "--recipe", "nonsense")
    assert code == 2 and path.read_text() == written
    path.write_text("recipe: unidec\ndata: {}\n")
    code, _, err = run("init", "--data-path", "x")
    assert code == 2 and "no key data.path to change" in err and "add it by hand" in err


def test_version(run) -> None:
    code, out, _ = run("version")
    assert code == 0
    assert out.startswith(f"unidec-xmc {unidec.__version__}\n")
    assert "torch " in out
    assert run("--version")[:2] == (0, f"unidec-xmc {unidec.__version__}\n")


def test_conflicting_assignments(run) -> None:
    with pytest.raises(ConfigError, match="twice"):
        commands.load(Path("params.yaml"), ["seed=1", "seed=2"])
