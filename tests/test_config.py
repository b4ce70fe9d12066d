"""params.yaml: recipes, overrides, errors with key paths, flattening, fingerprint."""

from __future__ import annotations

import random
from pathlib import Path
from typing import get_args

import pytest
import yaml

from unidec import config
from unidec.config import ParamsError, parse_overrides, read_yaml
from unidec.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]


def load(tmp_path: Path, text: str, **overrides: object) -> config.Params:
    path = tmp_path / "params.yaml"
    path.write_text(text, encoding="utf-8")
    return config.load_params(
        path, {key.replace("__", "."): value for key, value in overrides.items()}
    )


def problems(tmp_path: Path, text: str, **overrides: object) -> list[str]:
    with pytest.raises(ParamsError) as caught:
        load(tmp_path, text, **overrides)
    return caught.value.problems


def test_every_shipped_recipe_loads_with_the_shipped_file() -> None:
    assert {"unidec", "depsl", "unidec-gpu", "unidec-gpu-long", "unidec-gpu-paper"} <= set(
        config.recipe_names()
    )
    for name in config.recipe_names():
        params = config.load_params(ROOT / "params.yaml", {"recipe": name})
        assert params.recipe == name
        assert params.data.path == "data/raw/lf-debian"
        # YAML 1.1 and 1.2 read it alike
        path = ROOT / f"unidec/recipes/{name}.yaml"
        assert config.packaged(f"recipes/{name}.yaml") == read_yaml(path)[0]
    assert config.load_params(ROOT / "params.yaml", {"recipe": "depsl"}).model.heads == "de"
    assert (
        config.load_params(ROOT / "params.yaml", {"recipe": "unidec-gpu"}).encoder.trainable_layers
        == -1
    )
    assert (
        config.load_params(ROOT / "params.yaml", {"recipe": "unidec-gpu-long"}).tokens.text
        == "title+content"
    )


def test_an_override_beats_the_file_and_the_file_beats_the_recipe(tmp_path: Path) -> None:
    recipe = load(tmp_path, "recipe: unidec-gpu-paper")
    params = load(tmp_path, "recipe: unidec-gpu-paper\npool: {beta: 7, eta: 1}\n", pool__eta=9)
    assert (params.pool.beta, params.pool.eta) == (7, 9)
    assert params.pool.batch_size == recipe.pool.batch_size != config.Pool().batch_size
    assert params.encoder == recipe.encoder


def test_a_key_without_a_value_has_the_recipes(tmp_path: Path) -> None:
    recipe = load(tmp_path, "recipe: unidec-gpu-paper")
    assert (
        load(
            tmp_path,
            "recipe: unidec-gpu-paper\noptim: {epochs, lr_clf: }\nencoder: {name: null}\nloss:\n",
        )
        == recipe
    )
    assert load(
        tmp_path, "recipe: unidec-gpu-paper\noptim: {epochs: 7, lr_clf}"
    ).optim == recipe.optim.model_copy(update={"epochs": 7})
    (wrong,) = problems(tmp_path, "optim: {epochs, lr_clff}")
    assert "optim.lr_clff" in wrong and "lr_clf" in wrong


def test_the_shipped_file_lists_every_key() -> None:
    raw, _ = read_yaml(ROOT / "params.yaml")
    listed = [
        f"{name}.{key}" for name, value in raw.items() if isinstance(value, dict) for key in value
    ]
    assert sorted(listed) == sorted(key for key in config.known_keys() if "." in key)


def test_defaults_where_nothing_is_said(tmp_path: Path) -> None:
    assert load(tmp_path, "") == config.Params()
    assert load(tmp_path, "pool:\nloss:\n  # balance: 0.3\n") == config.Params()


def test_parameters_are_frozen() -> None:
    with pytest.raises(Exception, match="frozen"):
        config.Params().pool.beta = 5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("2.5", 2.5),
        ("010", 10),
        ("no", "no"),
        ("true", True),
        ("~", None),
        ("auto", "auto"),
        ("1:30", "1:30"),
    ],
)
def test_scalars_read_as_dvc_reads_them(text: str, value: object) -> None:
    from ruamel.yaml import YAML

    read = parse_overrides([f"key={text}"])["key"]
    assert read == value and type(read) is type(value)
    by_dvc = YAML(typ="safe").load(f"key: {text}")["key"]
    assert by_dvc == value


def test_lines_of_keys(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("a: 1\n\npool:\n  beta: 2\n  eta: 3\n")
    values, lines = read_yaml(path)
    assert values == {"a": 1, "pool": {"beta": 2, "eta": 3}}
    assert lines == {("a",): 1, ("pool",): 3, ("pool", "beta"): 4, ("pool", "eta"): 5}
    values["pool"]["beta"] = 7
    lines.clear()
    values, lines = read_yaml(path)
    assert values["pool"]["beta"] == 2 and lines[("a",)] == 1
    path.write_text("a: 2\n")
    assert read_yaml(path) == ({"a": 2}, {("a",): 1})


@pytest.mark.parametrize(
    ("text", "line", "word"),
    [
        (b"a: 1\nb: [1, 2\nc: 3\n", 3, "invalid YAML"),
        (b"a: 1\n  b: 2\n", 2, "invalid YAML"),
        (b"a: 1\npool:\n  beta: 1\n  eta: 2\n  beta: 3\n", 5, "duplicate"),
        (b"a: 1\nb: \xff\xfe\n", 2, "UTF-8"),
        (b"a: !!python/object/apply:os.system [ls]\n", 1, "tag"),
        (b"a: !thing 3\n", 1, "tag"),
        (b"a: *x\n", 1, "alias"),
    ],
)
def test_a_file_that_cannot_be_read_names_its_line(
    tmp_path: Path, text: bytes, line: int, word: str
) -> None:
    path = tmp_path / "p.yaml"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=word) as caught:
        config.load_params(path)
    assert f"{path}:{line}" in str(caught.value)


@pytest.mark.parametrize("text", ["- 1\n- 2\n", "just words\n", "3\n"])
def test_no_mapping_at_the_top(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="not a mapping"):
        load(tmp_path, text)


def test_no_such_file_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--params"):
        config.load_params(tmp_path / "none.yaml")
    with pytest.raises(ConfigError):
        config.load_params(tmp_path)


def test_strict_types(tmp_path: Path) -> None:
    wrong = {
        "seed": [-1, 2**32, 1.5, True, "0", None],
        "pool.beta": [0, "3", True, 1.0, None, [3]],
        "loss.balance": [-0.1, 1.1, "half", True, float("nan")],
        "model.temperature": [0, float("inf"), "x"],
        "model.clf_bias": [1, "true", None],
        "index.clf_weight": [0, -1, "Auto", None, True],
        "data.path": [3, None],
    }
    for key, values in wrong.items():
        for value in values:
            found = problems(tmp_path, "recipe: unidec", **{key.replace(".", "__"): value})
            assert len(found) == 1, (key, value, found)
            assert key in found[0]
            assert "expected:" in found[0]
    assert load(tmp_path, "index: {clf_weight: 2}").index.clf_weight == 2


TAUGHT = {"teacher.bundle": "teacher"}
BY_WORDS = {"teacher.words": True}
CLASSIFIER = {"model.heads": "clf", "index.space": "clf"}
SIMCSE = {"pool.simcse": True, "pool.eta": 0, "model.heads": "de", "index.space": "de"}
SURROGATE = {
    "model.surrogate": 2,
    "model.heads": "clf",
    "index.space": "clf",
    "model.clf_init": "xavier",
    "pool.eta": 0,
}
LEVELS = {"model.levels": [8, 2], "model.heads": "clf", "index.space": "clf"}
CONFLICTING = [
    ("index.space", {"model.heads": "de", "index.space": "clf"}),
    ("model.heads", {"model.heads": "de"}),
    ("index.space", {"model.heads": "clf", "index.space": "de"}),
    ("encoder.trainable_layers", {"encoder.kind": "bag", "encoder.trainable_layers": 2}),
    ("encoder.pooling", {"encoder.kind": "bag", "encoder.pooling": "cls"}),
    (
        "encoder.kind",
        {"encoder.kind": "transformer", "encoder.transformer_tokens": 8},
    ),
    ("encoder.bag_words", {"encoder.kind": "inception", "encoder.bag_words": 64}),
    ("encoder.bag_head", {"encoder.kind": "inception", "encoder.bag_head": 4}),
    ("pool.size", {"pool.size": 100, "pool.batch_size": 101}),
    ("loss.de", {"loss.de": "infonce"}),
    ("loss.clf", {"loss.clf": "infonce"}),
    ("loss.clf_bce", {"loss.clf": "bce", "loss.clf_bce": 0.5}),
    ("run.table_place", {"run.table_place": "host", "pool.clf_labels": "all"}),
    ("run.table_place", {"run.table_place": "disk", "pool.clf_labels": "all"}),
    ("loss.balance", {"loss.balance": 1.0}),
    ("index.space", {"loss.balance": 0.0, "index.space": "de"}),
    ("optim.warmup_epochs", {"optim.epochs": 2, "optim.warmup_epochs": 2.5}),
    ("optim.clf_decay", {"optim.clf_decay": 0.01}),
    ("optim.budget_minutes", {"optim.budget_minutes": 8.0}),
    ("optim.patience", {"optim.patience": 2, "data.validation_share": 0.0}),
    ("run.table_place", {"run.table_place": "host", "optim.clf_state": "adamw"}),
    ("data.validation_share", {"index.clf_weight": "auto", "data.validation_share": 0.0}),
    ("data.validation_share", {"index.knn_weight": "auto", "data.validation_share": 0.0}),
    ("loss.de", {"loss.de": "softtopk"}),
    ("loss.clf", {"loss.clf": "softtopk"}),
    (
        "loss.topk",
        {"loss.clf": "softtopk", "loss.clf_forward": 1.0, "loss.topk": 512, "pool.size": 512},
    ),
    ("loss.margin", {"loss.de": "hinge", "loss.margin": 0.0}),
    ("loss.margin", {"loss.clf": "hinge", "loss.margin": 0.0}),
    ("encoder.trainable_layers", {"encoder.frozen": True, "encoder.trainable_layers": 1}),
    ("encoder.lora", {"encoder.lora": {"rank": 8}, "encoder.trainable_layers": 0}),
    ("model.clf_init", {"model.clf_residual": True, "model.clf_init": "normal"}),
    ("pool.clf_labels", {"model.clf_residual": True, "pool.clf_labels": "all"}),
    ("pool.clf_beta", {"model.clf_residual": True, "pool.clf_beta": 1}),
    ("run.devices", {"model.clf_residual": True, "run.devices": 2}),
    ("model.heads", {"model.auxiliary": 2, "model.heads": "clf", "index.space": "clf"}),
    ("model.heads", {"model.query_head": True, "model.heads": "clf", "index.space": "clf"}),
    ("model.projection", {"model.query_head": True, "model.projection": False}),
    ("model.heads", {"index.clf_prior": 1.0, "model.heads": "de", "index.space": "de"}),
    ("model.clf_gates", {"model.clf_gates": True}),
    ("model.clf_graph", {"model.clf_graph": True}),
    ("model.clf_queries", {"model.clf_queries": 3}),
    ("model.clf_queries", {"model.clf_queries": 3, "model.clf_residual": True}),
    (
        "model.clf_graph",
        CLASSIFIER | {"model.clf_queries": 3, "model.clf_residual": True, "model.clf_graph": True},
    ),
    ("run.devices", {"loss.mixup": "queries", "run.devices": 2}),
    ("model.heads", CLASSIFIER | {"loss.mixup": "labels"}),
    (
        "pool.clf_labels",
        {"loss.mixup": "queries", "loss.clf": "bce", "loss.clf_bce": 0.0, "pool.clf_labels": "all"},
    ),
    ("run.devices", TAUGHT | {"run.devices": 2}),
    (
        "pool.clf_labels",
        TAUGHT | {"loss.clf": "bce", "loss.clf_bce": 0.0, "pool.clf_labels": "all"},
    ),
    (
        "pool.clf_labels",
        BY_WORDS | {"loss.clf": "bce", "loss.clf_bce": 0.0, "pool.clf_labels": "all"},
    ),
    ("teacher.bundle", BY_WORDS | TAUGHT),
    ("pool.gandalf", BY_WORDS | {"pool.gandalf": True}),
    ("run.devices", BY_WORDS | {"run.devices": 2}),
    ("pool.simcse", BY_WORDS | SIMCSE),
    ("model.surrogate", BY_WORDS | SURROGATE),
    ("loss.mixup", BY_WORDS | {"loss.mixup": "labels"}),
    ("loss.mixup", TAUGHT | {"loss.mixup": "queries"}),
    ("pool.simcse", TAUGHT | SIMCSE),
    ("model.surrogate", TAUGHT | SURROGATE),
    ("pool.simcse", {"pool.simcse": True, "pool.eta": 0}),
    ("pool.eta", SIMCSE | {"pool.eta": 1}),
    ("pool.de_labels", SIMCSE | {"pool.de_labels": "all"}),
    ("pool.positives", SIMCSE | {"pool.positives": "tail"}),
    ("pool.gandalf", SIMCSE | {"pool.gandalf": True}),
    ("loss.weights", SIMCSE | {"loss.weights": "propensity"}),
    ("loss.mixup", SIMCSE | {"loss.mixup": "queries"}),
    ("model.clf_init", SURROGATE | {"model.clf_init": "normal"}),
    ("model.heads", SURROGATE | {"model.heads": "both", "index.space": "both"}),
    ("pool.positives", SURROGATE | {"pool.positives": "tail"}),
    ("loss.weights", SURROGATE | {"loss.weights": "propensity"}),
    ("run.devices", SURROGATE | {"run.devices": 2}),
    ("pool.eta", SURROGATE | {"pool.eta": 1}),
    ("model.levels", LEVELS | {"model.levels": [2, 8]}),
    ("model.levels", {"model.levels": [8, 2]}),
    ("model.surrogate", SURROGATE | LEVELS),
    ("run.devices", LEVELS | {"run.devices": 2}),
    ("loss.mixup", LEVELS | {"loss.mixup": "queries"}),
    ("pool.shortlist", {"pool.shortlist": 4}),
    ("pool.start_epoch", {"pool.start_epoch": 4}),
    ("pool.gandalf_rows", {"pool.gandalf_rows": "labels"}),
    ("gate.metric", {"gate.metric": "tail/coverage@5"}),
    ("source.kind", {"source.kind": "folder"}),
    ("source.kind", {"source.kind": "dvc"}),
    ("source.kind", {"source.kind": "folder", "source.path": "data/raw/lf-debian/"}),
    ("index.factory", {"index.factory": "HNSW32", "index.search": "nprobe=8"}),
    ("index.space", CLASSIFIER | {"index.fusion": True, "index.knn_head": 16}),
    ("index.knn_by", {"index.fusion": True, "index.knn_by": "model"}),
    ("index.fusion", {"index.fusion": False, "index.knn_head": 16}),
    ("source.kind", {"source.kind": "folder", "source.path": "data"}),
    (
        "source.kind",
        {"source.kind": "files", "source.labels": "l.csv", "source.pairs": "p.csv"},
    ),
    (
        "source.kind",
        {"source.kind": "files", "source.queries": "q.csv", "source.pairs": "p.csv"},
    ),
    (
        "source.kind",
        {"source.kind": "files", "source.queries": "q.csv", "source.labels": "l.csv"},
    ),
    (
        "source.kind",
        {
            "source.kind": "files",
            "source.queries": "data/raw/lf-debian/q.csv",
            "source.labels": "l.csv",
            "source.pairs": "p.csv",
        },
    ),
    ("encoder.width", {"encoder.kind": "bag", "encoder.width": 64}),
    ("encoder.query_prompt", {"encoder.kind": "bag", "encoder.query_prompt": "query: "}),
    ("encoder.label_prompt", {"encoder.kind": "inception", "encoder.label_prompt": "x: "}),
    ("loss.widths", {"loss.widths": [64, 32]}),
    ("loss.widths", {"loss.widths": [32, 32]}),
    ("loss.widths", {"loss.widths": [512]}),
    ("loss.widths", {"loss.widths": [64, 384], "model.dim": 384}),
    ("index.width", {"index.width": 64}),
    ("index.width", {"index.width": 96, "loss.widths": [64, 128]}),
    ("index.width", {"index.width": 512, "model.dim": 384}),
    ("index.width", {"index.width": 64, "loss.widths": [64], "model.projection": False}),
    ("warm.warmup_epochs", {"warm.warmup_epochs": 3.0, "warm.epochs": 2}),
    ("encoder.start", {"retrain.start": "warm", "encoder.start": "outputs/model"}),
]


@pytest.mark.parametrize(("key", "values"), CONFLICTING)
def test_conflicts(tmp_path: Path, key: str, values: dict[str, object]) -> None:
    """Each is reported once, at the first of its keys that is set."""
    found = problems(
        tmp_path, "", **{name.replace(".", "__"): value for name, value in values.items()}
    )
    assert len(found) == 1, found
    assert found[0].startswith(f"- {key}")
    assert "fix:" in found[0]


def test_every_conflict_is_tested_and_names_real_keys() -> None:
    found = set()
    for _, values in CONFLICTING:
        groups: dict[str, dict[str, object]] = {}
        for key, value in values.items():
            groups.setdefault(key.partition(".")[0], {})[key.partition(".")[2]] = value
        made = {
            name: getattr(config.Params(), name).model_copy(update=group)
            for name, group in groups.items()
        }
        found |= set(config.Params.model_construct(**made).conflicts())
    assert all(set(conflict.keys.split()) <= set(config.known_keys()) for conflict in found)
    files = Path(config.__file__).parent.glob("*.py")
    written = sum(file.read_text().count("yield Conflict(") for file in files)
    rules = yaml.safe_load((Path(config.__file__).parent / "requirements.yaml").read_text())
    required = {
        (" ".join(dict.fromkeys([key, *rule["with"]])), rule["because"])
        for rule in rules
        for key in rule["needs"]
    }
    described = {(conflict.keys, conflict.what) for conflict in found}
    assert required <= described
    # one of those that are written is that of the rules
    assert len(described - required) == written - 1


@pytest.mark.parametrize(
    "values",
    [
        # the classifier's options do not matter
        {"model.heads": "de", "index.space": "de", "loss.clf": "bce"},
        {"encoder.kind": "bag"},
        {"run.table_place": "disk", "model.clf_dtype": "bf16", "optim.clf_state": "sgd"},
        {
            "run.table_place": "host",
            "model.heads": "de",
            "index.space": "de",
            "pool.clf_labels": "all",
        },
        {"pool.size": 0},
        {
            "loss.de": "infonce",
            "loss.clf": "infonce",
            "loss.reduction": "pol",
            "pool.eta": 0,
            "pool.batches": "random",
        },
        {"loss.clf": "bce", "loss.clf_bce": 0.0},
        {"loss.balance": 1.0, "index.space": "de"},
        {
            "loss.balance": 0.0,
            "model.projection": False,
        },  # the dual encoder is the encoder, which may be trained already
        {"optim.epochs": 1},
        {"optim.patience": 2, "optim.budget_minutes": 8.0},
        {"optim.patience": 2, "data.validation_share": 0.0, "data.validation_sample": 500},
        {"optim.clf_decay": 0.01, "optim.clf_state": "momentum", "run.table_place": "host"},
        {
            "run.devices": 8,
            "optim.encode_chunk": 256,
            "pool.de_labels": "all",
            "pool.clf_labels": "all",
        },
    ],
)
def test_sensible_combinations_pass(tmp_path: Path, values: dict[str, object]) -> None:
    load(tmp_path, "", **{name.replace(".", "__"): value for name, value in values.items()})


def test_a_wrong_key_hides_no_conflict_elsewhere_but_its_own(tmp_path: Path) -> None:
    text = (
        "model: {heads: de}\nindex: {space: clf}\npool: {size: 10, batch_size: many}\nnonsense: 1\n"
    )
    found = problems(tmp_path, text)
    assert [line.split()[1] for line in found] == ["nonsense", "pool.batch_size", "index.space"]


def test_nearest_names(tmp_path: Path) -> None:
    for text, near in [
        ("pool: {betta: 1}", "pool.beta"),
        ("pool: {batchsize: 1}", "pool.batch_size"),
        ("beta: 1", "pool.beta"),
        ("optimiser: {epochs: 3}", "optim"),
        ("model: {lr_heads: 0.1}", "optim.lr_heads"),
        ("sead: 1", "seed"),
        ("data: {format: parquet}", "tables"),
        ("data: {format: jsonl}", "tables"),
        ("data: {format: xmc-jsn}", "xmc-json"),
    ]:
        found = problems(tmp_path, text)
        assert f"nearest: {near}\n" in found[0] + "\n", found


def test_parse_overrides() -> None:
    parsed = config.parse_overrides(
        ["pool.beta=2", "optim.lr_clf=1e-3", "data.path=a=b", "loss.de=ds", "recipe="]
    )
    assert parsed == {
        "pool.beta": 2,
        "optim.lr_clf": 1e-3,
        "data.path": "a=b",
        "loss.de": "ds",
        "recipe": None,
    }
    for wrong in (["beta"], ["=3"], ["a=1", "a=2"], ["a=[1"]):
        with pytest.raises(ConfigError):
            config.parse_overrides(wrong)


def test_an_override_under_a_plain_value_is_reported(tmp_path: Path) -> None:
    assert "seed" in problems(tmp_path, "seed: 3", seed__deep=1)[0]


def test_flatten_has_every_key_once_as_text_or_number() -> None:
    flat = config.flatten(config.Params())
    assert list(flat) == config.known_keys()
    assert all(type(value) in (str, int, float) for value in flat.values())
    assert flat["model.clf_bias"] == "false"
    assert flat["recipe"] == ""
    assert flat["pool.beta"] == 3


def test_fingerprint_changes_with_every_parameter_and_with_nothing_else() -> None:
    base = config.Params()
    other = {
        str: lambda v: v + "x",
        bool: lambda v: not v,
        int: lambda v: v + 1,
        float: lambda v: v * 0.5 + 0.01,
        list: lambda v: [*v, "x"],
        dict: lambda v: v | {"X": "x"},
    }
    everything = config.fingerprint(base)
    for key, value in config.leaves(base):
        if key == "recipe":
            continue
        section, _, name = key.rpartition(".")
        change = {name or key: other[type(value)](value)}
        if section:
            group = getattr(base, section)
            changed = base.model_copy(update={section: group.model_copy(update=change)})
        else:
            changed = base.model_copy(update=change)
        assert config.fingerprint(changed) != everything, key
        assert config.fingerprint(changed, key) != config.fingerprint(base, key)
        rest = [other for other in config.known_keys() if other not in (key, "recipe")]
        assert config.fingerprint(changed, *random.sample(rest, len(rest))) == config.fingerprint(
            base, *rest
        )
    assert config.fingerprint(base.model_copy(update={"recipe": "unidec"})) == everything
    assert config.fingerprint(base, "pool.beta") != config.fingerprint(base, "pool.eta")
    with pytest.raises(KeyError):
        config.fingerprint(base, "pol")


def test_each_parameter_says_once_what_it_decides() -> None:
    decides = config.what_decides()
    assert list(decides) == config.known_keys()
    for key, results in decides.items():
        assert results, key
        assert set(results) <= set(get_args(config.Result)), key
        # a key that decides is more than operation
        assert "operation" not in results or results == ("operation",), key
    assert decides["optim.epochs"] == ("training",)
    assert decides["index.factory"] == ("index",)
    # the tokenizer is the encoder's
    assert decides["encoder.name"] == ("checks", "tokens", "training")
    assert decides["raw.quotes"] == ("data",)
    assert decides["raw.max_row_bytes"] == ("operation",)
    operations = {key.partition(".")[0] for key in config.keys_deciding("operation")}
    deciding = {
        key.partition(".")[0] for key in config.keys_deciding(*config.RESULTS, "checks", warm=True)
    }
    assert operations - deciding == {
        "recipe",
        "device",
        "run",
        "source",
        "retrain",
        "gate",
        "drift",
        "serve",
        "tracking",
    }
    assert operations & deciding == {"data", "raw"}  # the place and the limits of raw files


def test_what_is_recorded_is_what_decides_and_older_files_have_the_defaults() -> None:
    values = config.Params(seed=3).model_dump()
    recorded = config.recorded(values)
    keys = {key for key, _ in config.leaves(config.Params.model_validate(recorded))}
    assert keys == set(config.known_keys())
    assert (
        recorded["seed"] == 3
        and recorded["raw"] == {"quotes": "auto"}
        and "path" not in recorded["data"]
    )
    assert not {"gate", "serve", "run", "validation", "device"} & recorded.keys()
    older = {name: section for name, section in values.items() if name not in ("raw", "warm")}
    older["pool"] = {key: value for key, value in values["pool"].items() if key != "fill"}
    assert config.recorded(older) == recorded


def test_every_parameter_is_described() -> None:
    described = {key: about for key, _, _, about in config.describe()}
    assert set(described) == set(config.known_keys())
    assert all(described.values())


def test_a_metric_that_does_not_exist_names_the_nearest(tmp_path: Path) -> None:
    found = problems(tmp_path, "gate: {metric: ndcg@5, guarded: [P@1, tail/r@10, PSP@10]}")
    assert len(found) == 2
    assert "gate.metric" in found[0] and "nearest: nDCG@5" in found[0]
    assert "gate.guarded" in found[1] and "nearest: tail/R@10" in found[1]
    assert (
        load(tmp_path, "gate: {metric: head/PSnDCG@5, guarded: []}").gate.metric == "head/PSnDCG@5"
    )


@pytest.mark.parametrize(
    "name",
    ["team/unidec", "a:b", "", "Anna's", "a@champion", "x ", "%", 'a"b', "a\nb", "..", None, 7],
)
def test_a_model_name_that_the_registry_refuses_is_refused_before_training(name):
    with pytest.raises(ConfigError, match=r"tracking\.model_name") as caught:
        config.load_params(None, {"tracking.model_name": name})
    assert "pattern" not in str(caught.value)


def test_model_names_that_the_registry_takes(tmp_path):
    """Each is registered, found by its filter and addressed."""
    from unidec.tracking.fetch import parse_address
    from unidec.tracking.promotion import all_versions
    from unidec.tracking.store import open_client

    client = open_client(f"sqlite:///{tmp_path}/mlflow.db")
    for name in ("unidec", "ünï-2.0", "my model", "7"):
        assert config.load_params(None, {"tracking.model_name": name}).tracking.model_name == name
        client.create_registered_model(name)
        client.create_model_version(name, source="file:///x")
        address = parse_address(f"models:/{name}@champion")
        assert len(all_versions(client, name)) == 1
        assert address is not None
        assert address.name == name
    with pytest.raises(ConfigError, match="one line"):
        config.load_params(None, {"tracking.experiment": ""})


@pytest.mark.parametrize(
    ("value", "limit"),
    [
        ("0.05 warn", (0.05, "warn")),
        ("0 error", (0.0, "error")),
        ("1 error", (1.0, "error")),
        ("warn", (0.01, "warn")),  # the default share
        ("off", (0.01, "off")),
    ],
)
def test_a_limit_of_a_check_has_a_share_and_a_severity(
    tmp_path: Path, value: str, limit: tuple[float, str]
) -> None:
    params = load(tmp_path, f"validation: {{empty_texts: {value}}}")
    assert params.validation.limit("empty_texts") == limit


@pytest.mark.parametrize("value", ["0.05", "2 error", "0.1 fatal", "warn 0.1", "-1 warn", "true"])
def test_a_limit_in_another_form_is_refused(tmp_path: Path, value: str) -> None:
    [found] = problems(tmp_path, f"validation: {{empty_texts: {value}}}")
    assert 'expected: a share and a severity, as in "0.01 error"' in found


@pytest.mark.parametrize(
    ("value", "bound"),
    [("2x", (2.0, 0.0)), ("30 ms", (0.0, 30.0)), ("1.5x, 4 ms", (1.5, 4.0)), ("off", (0.0, 0.0))],
)
def test_a_bound_is_a_multiple_a_limit_or_both(
    tmp_path: Path, value: str, bound: tuple[float, float]
) -> None:
    params = load(tmp_path, f'gate: {{max_latency: "{value}"}}')
    assert params.gate.bound("max_latency") == bound


@pytest.mark.parametrize("value", ["2", "30", "30 s", "30 ms, 2x", "2x 30 ms", "x", "-1x", "2x, "])
def test_a_bound_in_another_form_is_refused(tmp_path: Path, value: str) -> None:
    [found] = problems(tmp_path, f'gate: {{max_latency: "{value}"}}')
    assert "expected: a multiple of the champion's" in found and "30 ms" in found
