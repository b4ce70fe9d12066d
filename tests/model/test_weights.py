"""A model that starts from another one: what it takes, what it leaves, and what it refuses."""

import json

import pytest
import torch
import torch.nn.functional as F
from helpers.untrained_model import TEXTS, encode

from unidec.data.storage import write_folder, write_manifest
from unidec.errors import ArtifactError, ConfigError
from unidec.model.first_rows import start_table
from unidec.model.unidec import UniDEC
from unidec.model.weights import KIND, VERSION, start_sha256


def create(folder, params, seed):
    torch.manual_seed(seed)
    return UniDEC.create(params.encoder, params.model, 7, folder, 0, params.model_dump())


def trained(folder, params, path, seed=1):
    """An exported model, every weight of which is unlike that of a new one."""
    model = create(folder, params, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    with write_folder(path, KIND, VERSION) as out:
        model.save_into(out)
    return model.eval()


@pytest.fixture
def start(tiny_bert, tiny_params, tmp_path):
    """`start(begin, **now)`: (exported model with `begin`, new model that starts from it with
    `now`).
    """

    def start(begin, **now):
        old = trained(tiny_bert, tiny_params(**begin), tmp_path / "old")
        return old, create(
            tiny_bert, tiny_params(**begin | {"encoder.start": str(tmp_path / "old")} | now), 2
        ).eval()

    return start


KINDS = {
    "bag": {},
    "query head": {"model.query_head": True},
    "residual": {"encoder.residual": True},
    "transformer": {"encoder.kind": "transformer"},
    "both": {"encoder.kind": "both", "encoder.trainable_layers": 1},
}


@pytest.mark.parametrize("kind", KINDS)
def test_encoder_and_heads_are_the_starts_and_the_table_is_new(start, kind):
    old, new = start(KINDS[kind], **{"model.learn_temperature": True})
    assert torch.equal(encode(new), encode(old))
    x_BW = encode(old)
    for head in ("de", "clf"):
        expected = getattr(old, head)(x_BW)
        assert torch.equal(getattr(new, head)(x_BW), expected)
    assert not new.table.weight.any(), "rows belong to the start's labels"
    assert old.table.weight.any(), "rows belong to the start's labels"
    assert not torch.equal(new.log_scale, old.log_scale)


def test_weights_after_the_start_do_not_depend_on_the_seed(tiny_bert, tiny_params, tmp_path):
    trained(tiny_bert, tiny_params(), tmp_path / "old")
    params = tiny_params(**{"encoder.start": str(tmp_path / "old")})
    one, two = (create(tiny_bert, params, seed).dense_state() for seed in (2, 3))
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize(
    ("had", "missing"),
    [
        ("de", "clf"),
        ("clf", "de"),
        ("de", "query"),
        ("clf", "query"),
    ],
)
def test_a_head_that_the_start_lacks_begins_as_its_other_one(start, had, missing):
    now = {"model.heads": "both", "index.space": "both", "model.query_head": missing == "query"}
    old, new = start({"model.heads": had, "index.space": had}, **now)
    given = getattr(old, f"head_{had}")[0]
    taken = getattr(new, f"head_{missing}")[0]
    assert torch.equal(given.weight, taken.weight)
    assert torch.equal(given.bias, taken.bias)
    assert torch.equal(getattr(new, f"head_{had}")[0].weight, given.weight)


def test_a_second_stage_has_the_classifiers_head_alone(start):
    """NGAME: a dual encoder first, then a classifier on its frozen encoder; rows start at the
    labels' embeddings.
    """
    old, new = start(
        {"model.heads": "de", "index.space": "de"},
        **{"model.heads": "clf", "index.space": "clf", "encoder.frozen": True},
    )
    label_LW = encode(old, TEXTS + TEXTS + TEXTS[:1])
    start_table(new, lambda rows: label_LW[rows])
    expected = F.normalize(F.linear(label_LW, old.head_de[0].weight, old.head_de[0].bias), dim=1)
    torch.testing.assert_close(new.table.weight.data, expected.detach())
    assert not any(p.requires_grad for p in new.encoder.parameters())


def test_a_residual_network_that_the_start_lacks_begins_as_the_identity(start):
    old, new = start({}, **{"encoder.residual": True})
    assert torch.equal(encode(new), encode(old))
    assert new.encoder.residual is not None


@pytest.mark.parametrize(
    ("begin", "now", "message"),
    [
        ({}, {"model.dim": 24}, r"head_de.0.weight: shape \[16, 32\] instead of \[24, 32\]"),
        ({}, {"encoder.kind": "both"}, "differs in encoder.kind"),
        ({"encoder.kind": "both"}, {"encoder.kind": "bag"}, "differs in encoder.kind"),
        ({}, {"encoder.bag_words": 8}, "differs in encoder.bag_words"),
        ({"encoder.residual": True}, {"encoder.residual": False}, "unknown: encoder.residual"),
    ],
)
def test_another_encoder_or_width_is_refused(start, begin, now, message):
    with pytest.raises(ConfigError, match=message) as caught:
        start(begin, **now)
    assert "encoder.start" in str(caught.value)
    assert "fix" in str(caught.value)


def edit(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("file", "change", "kind", "message"),
    [
        (
            "config.json",
            lambda c: c["encoder"].update(pooling="cls"),
            "transformer",
            "encoder.pooling",
        ),
        ("config.json", lambda c: c["encoder"].update(pooling="cls"), "both", "encoder.pooling"),
        (
            "tokenizer/tokenizer.json",
            lambda c: c["model"]["vocab"].update(extra=9999),
            "bag",
            "differs in tokenizer",
        ),
        (
            "encoder_config/config.json",
            lambda c: c.update(num_attention_heads=1),
            "transformer",
            "num_attention_heads",
        ),
    ],
)
def test_another_transformer_is_refused_also_where_every_shape_fits(
    tiny_bert, tiny_params, tmp_path, file, change, kind, message
):
    folder = tmp_path / "old"
    trained(tiny_bert, tiny_params(**{"encoder.kind": kind}), folder)
    edit(folder / file, change)
    write_manifest(folder, KIND, VERSION, {})
    with pytest.raises(ConfigError, match=message):
        create(tiny_bert, tiny_params(**{"encoder.kind": kind, "encoder.start": str(folder)}), 2)


@pytest.mark.parametrize("layers", [0, 1, -1])
@pytest.mark.parametrize(
    ("kind", "frozen"),
    [
        ("both", True),
        ("transformer", True),
        ("transformer", False),
    ],
)
def test_how_the_start_was_trained_does_not_matter(start, tmp_path, kind, frozen, layers):
    """A transformer that trains alone has vectors of any length: frozen afterwards it
    keeps them.
    """
    dropouts = {"encoder.bag_dropout": 0.3} if kind == "both" else {}
    begin = {"encoder.kind": kind, "encoder.dropout": 0.2, "encoder.trainable_layers": layers}
    now = {"encoder.frozen": frozen, "encoder.dropout": 0.0, "encoder.trainable_layers": 0}
    old, new = start(begin | dropouts, **now | {"encoder.bag_dropout": 0.0})
    torch.testing.assert_close(encode(new), encode(old))
    with write_folder(tmp_path / "second", KIND, VERSION) as out:
        new.save_into(out)
    torch.testing.assert_close(encode(UniDEC.load(tmp_path / "second")), encode(old))


def test_who_wrote_a_config_does_not_matter(tiny_bert, tiny_params, tmp_path):
    folder = tmp_path / "old"
    old = trained(tiny_bert, tiny_params(**{"encoder.kind": "transformer"}), folder)
    edit(
        folder / "encoder_config/config.json",
        lambda c: c.update(transformers_version="0.1", _name_or_path="x"),
    )
    write_manifest(folder, KIND, VERSION, {})
    new = create(
        tiny_bert, tiny_params(**{"encoder.kind": "transformer", "encoder.start": str(folder)}), 2
    ).eval()
    assert torch.equal(encode(new), encode(old))


def test_no_model_and_a_damaged_one_are_refused(tiny_bert, tiny_params, tmp_path):
    folder = tmp_path / "old"
    params = tiny_params(**{"encoder.start": str(folder)})
    for call in (lambda: create(tiny_bert, params, 1), lambda: start_sha256(folder)):
        with pytest.raises(ArtifactError, match="old"):
            call()
    trained(tiny_bert, tiny_params(), folder)
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-3] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ArtifactError, match="damaged"):
        create(tiny_bert, params, 1)


def test_a_start_is_named_by_its_content(tiny_bert, tiny_params, tmp_path):
    hashes = []
    for name, seed in (
        ("one", 1),
        ("two", 1),
        ("three", 2),
    ):
        trained(tiny_bert, tiny_params(), tmp_path / name, seed)
        hashes.append(start_sha256(tmp_path / name))
    assert hashes[0] == hashes[1] != hashes[2]
    assert len(hashes[0]) == 64
