"""What makes a run the one it is; every key that differs is named."""

import pytest

from unidec.code import code_sha256
from unidec.config import keys_deciding, what_decides
from unidec.data.tokens import TokenCache, build_token_cache
from unidec.errors import ConfigError
from unidec.training.identity import check_same, differences, run_identity

HASH = "a" * 64
OTHER = "b" * 64


@pytest.fixture
def identify(tiny_dataset, tiny_tokens, tiny_params):
    def identify(tokens=tiny_tokens, dataset=tiny_dataset, **overrides):
        return run_identity(
            tiny_params(**overrides).model_dump(), dataset, tokens["queries"], tokens["labels"]
        )

    return identify


def test_every_parameter_has_a_place(identify):
    """The identity has each key that decides tokens or training, but those that apply to some runs
    only.
    """
    identity = identify()
    expected = set(keys_deciding("tokens", "training"))
    assert {key for key in identity if key in what_decides()} == expected
    sections = {key.partition(".")[0] for key in expected}
    training = {"encoder", "model", "pool", "loss", "teacher", "optim"}
    assert sections == training | {"seed", "tokens"}
    assert {"data", "tokens.queries", "tokens.labels", "tokenizer", "code"} < identity.keys()
    assert (
        identity["seed"] == "3"
        and identity["encoder.kind"] == '"bag"'
        and len(identity["code"]) == 64
    )
    assert all(isinstance(value, str) for value in identity.values())


def test_the_code_that_ranks_decides_with_a_teacher_of_words_alone(identify):
    taught = identify(**{"teacher.words": True})
    assert taught["code"] == code_sha256("training", "index")
    assert identify()["code"] == code_sha256("training")


def test_the_label_graph_decides_with_gandalf_alone(identify):
    assert "label_graph.threshold" in identify(**{"pool.gandalf": True})


@pytest.mark.parametrize(
    "overrides", [{"loss.weights": "propensity"}, {"pool.positives": "tail"}], ids=str
)
def test_propensities_decide_where_something_is_weighted_by_them(identify, overrides):
    keys = {"data.propensity_a", "data.propensity_b"}
    assert not keys & identify().keys()
    assert keys < identify(**overrides).keys()
    assert identify(**overrides) != identify(**overrides, **{"data.propensity_a": 0.9})
    assert identify() == identify(**{"data.propensity_a": 0.9})


def test_a_start_is_part_of_it_where_there_is_one(tiny_params, tiny_dataset, tiny_tokens):
    def identify(start):
        return run_identity(
            tiny_params().model_dump(),
            tiny_dataset,
            tiny_tokens["queries"],
            tiny_tokens["labels"],
            start,
        )

    assert differences(identify(HASH), identify(OTHER)) == [
        "start: aaaaaaaaaaaa... when the run began, bbbbbbbbbbbb... now"
    ]
    assert identify(HASH).keys() - identify(None).keys() == {"start", "warm.keep"}
    with pytest.raises(ConfigError, match=r"other start, parameters(.|\n)*--accept start"):
        check_same(identify(HASH), identify(None), (), "run")


def test_changes_are_named_one_a_line(identify):
    old = identify()
    new = identify(**{"optim.lr_clf": 0.5, "pool.beta": 1})
    assert differences(old, new) == [
        "pool.beta: 2 when the run began, 1 now",
        "optim.lr_clf: 0.01 when the run began, 0.5 now",
    ]
    assert differences(old, dict(reversed(old.items()))) == []


def test_keys_of_one_side_and_hashes():
    lines = differences({"data": HASH, "gone": "1"}, {"data": OTHER, "new": "2"})
    assert lines == [
        "data: aaaaaaaaaaaa... when the run began, bbbbbbbbbbbb... now",
        "new: nothing when the run began, 2 now",
        "gone: 1 when the run began, nothing now",
    ]


def test_other_texts_and_another_tokenizer(identify, tiny_tokens, tiny_bert, tmp_path):
    rows = len(tiny_tokens["labels"])
    made = build_token_cache(iter([["other"] * rows]), tiny_bert, 16, tmp_path / "labels", rows)
    changed = identify(tiny_tokens | {"labels": TokenCache.open(made)})
    assert [line.partition(":")[0] for line in differences(identify(), changed)] == [
        "tokens.labels"
    ]
    moved = TokenCache.open(tiny_tokens["queries"].path)
    moved.meta = moved.meta | {"tokenizer_sha256": OTHER}
    changed = identify(tiny_tokens | {"queries": moved})
    assert [line.partition(":")[0] for line in differences(identify(), changed)] == ["tokenizer"]


def test_the_same_goes_on(identify):
    check_same(identify(), identify(**{"run.checkpoint_steps": 3}), (), "run")
    check_same({}, identify(), (), "a run without a checkpoint")


def test_a_change_is_refused_naming_every_key():
    old = {"optim.lr_clf": "0.003", "data": HASH, "code": HASH, "seed": "0"}
    new = {"optim.lr_clf": "0.001", "data": OTHER, "code": OTHER, "seed": "0"}
    with pytest.raises(ConfigError) as caught:
        check_same(old, new, ("code",), "runs/x")
    text = str(caught.value)
    assert "runs/x: the run was started with other parameters, data" in text and "seed" not in text
    assert (
        "optim.lr_clf: 0.003 when the run began, 0.001 now" in text
        and "\n       data: aaaaaaaaaaaa..." in text
    )
    assert "--accept optim.lr_clf --accept data)" in text and "code" not in text


def test_what_is_accepted_may_differ():
    check_same(
        {"code": HASH, "optim.epochs": "3"},
        {"code": OTHER, "optim.epochs": "4"},
        {"code", "optim.epochs"},
        "",
    )
    with pytest.raises(ConfigError, match=r"optim\.epochs: 3"):
        check_same(
            {"code": HASH, "optim.epochs": "3"}, {"code": OTHER, "optim.epochs": "4"}, {"code"}, ""
        )
