"""UniDEC: heads, the classifier's start, and the model's folder: written and read back bit for bit,
or refused.
"""

import json
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from unidec.data.storage import write_folder, write_manifest
from unidec.data.tokens import encode_texts
from unidec.errors import ArtifactError, ConfigError
from unidec.model import unidec as module
from unidec.model.encoder import load_transformer
from unidec.model.encoder_inputs import InputBuilder
from unidec.model.first_rows import start_table
from unidec.model.row_table import Placement
from unidec.model.unidec import KIND, VERSION, UniDEC

CUDA = pytest.mark.cuda
NUM_LABELS = 11
TEXTS = ["river query w3", "", "bread bread", "an unknown wörd 🍞", "music label w10 w11 planet"]


def make_model(folder, params, seed=5, **options):
    torch.manual_seed(seed)
    model = UniDEC.create(
        params.encoder, params.model, NUM_LABELS, folder, 0, params.model_dump(), **options
    )
    if model.encoder.bag is not None:
        torch.nn.init.normal_(model.encoder.bag.log_weight.weight, std=0.3)
    if model.table is not None:
        torch.nn.init.normal_(model.table.weight)
    if model.bias is not None:
        torch.nn.init.normal_(model.bias.weight)
    return model


def save(model, path):
    with write_folder(path, KIND, VERSION) as out:
        model.save_into(out)
    return path


def change(path, **values):
    """Another configuration, under a manifest that is right."""
    config = json.loads((path / "config.json").read_text())
    for key, value in values.items():
        section, _, name = key.rpartition("__")
        (config[section] if section else config)[name] = value
    write_config(path, config)


def write_config(path, config):
    (path / "config.json").write_text(json.dumps(config))
    write_manifest(path, KIND, VERSION, {})


def outputs(model):
    tokens = encode_texts(TEXTS, model.tokenizer_folder, model.max_length)
    return [*model.encode_queries(tokens), model.encode_labels(tokens), *model.classifier_table()]


def same(ours, theirs):
    assert len(ours) == len(theirs)
    return all(
        (a is None and b is None) or np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True)
    )


VARIANTS = {
    "bag": {"encoder.residual": True},
    "bag, bias": {"model.clf_bias": True, "model.learn_temperature": True},
    "de": {"model.heads": "de"},
    "head for queries": {"model.query_head": True},
    "clf": {"model.heads": "clf", "model.clf_bias": True},
    "frozen": {"encoder.kind": "transformer"},
    "one layer": {
        "encoder.kind": "transformer",
        "encoder.trainable_layers": 1,
        "encoder.pooling": "cls",
    },
    "all layers": {"encoder.kind": "transformer", "encoder.trainable_layers": -1},
    "both": {"encoder.kind": "both", "encoder.residual": True},
    "nothing trains": {"encoder.kind": "both", "encoder.frozen": True},
    "no projection": {"encoder.kind": "both", "model.projection": False, "model.dim": 64},
    "no projection, any length": {
        "model.heads": "de",
        "encoder.kind": "transformer",
        "model.projection": False,
        "model.dim": 32,
        "model.normalize": False,
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("transformer", ["tiny_bert", "tiny_distilbert"])
def test_written_and_read_back_it_answers_bit_for_bit(
    request, tiny_params, tmp_path, variant, transformer
):
    params = tiny_params(**VARIANTS[variant])
    model = make_model(request.getfixturevalue(transformer), params)
    path = save(model, tmp_path / "model")
    loaded = UniDEC.load(path)
    assert not loaded.training
    assert (loaded.heads, loaded.max_length, loaded.num_labels) == (
        params.model.heads,
        16,
        NUM_LABELS,
    )
    assert loaded.params == params.model_dump(mode="json")
    assert loaded.tokenizer_folder.parent == path
    ours = outputs(model)
    assert same(ours, outputs(loaded))
    assert all(value is None or np.isfinite(value).all() for value in ours)
    de, clf, label_de, table, bias = ours
    heads = params.model.heads
    expected = (heads == "clf",) * 2
    assert (de is None, label_de is None) == expected
    assert (clf is None, table is None) == (heads == "de",) * 2
    assert (bias is None) == (not params.model.clf_bias)
    if de is not None:
        np.testing.assert_allclose(np.linalg.norm(de, axis=1), 1, rtol=1e-5)
    # written again from what was read, it is the same folder: a checkpoint's model and an exported
    # one are one
    again = save(loaded, tmp_path / "again")
    for file in (
        "model.safetensors",
        "config.json",
        "tokenizer/tokenizer.json",
        "encoder_config/config.json",
    ):
        assert (again / file).read_bytes() == (path / file).read_bytes()


def test_heads_equal_their_formulas(tiny_bert, tiny_params):
    model = make_model(tiny_bert, tiny_params(**{"model.clf_bias": True})).eval()
    tokens = encode_texts(TEXTS, tiny_bert, 16)
    x_NW = torch.from_numpy(model.encode("queries", tokens))
    de, clf = model.vectors("queries", tokens)
    w1 = model.head_de[0].weight
    b1 = model.head_de[0].bias
    w2 = model.head_clf[0].weight
    b2 = model.head_clf[0].bias
    expected = (
        [F.normalize(torch.tanh(w1 @ x + b1), dim=0) for x in x_NW],
        [w2 @ x + b2 for x in x_NW],
    )
    np.testing.assert_allclose(de, torch.stack(expected[0]).detach().numpy(), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(clf, torch.stack(expected[1]).detach().numpy(), rtol=1e-4, atol=1e-6)


def test_queries_have_their_own_layer_which_starts_like_that_of_the_labels(tiny_bert, tiny_params):
    tokens = encode_texts(TEXTS, tiny_bert, 16)
    shared = make_model(tiny_bert, tiny_params()).eval()
    model = make_model(tiny_bert, tiny_params(**{"model.query_head": True})).eval()
    assert same(outputs(shared), outputs(model))
    torch.nn.init.normal_(model.head_query[0].weight)
    torch.nn.init.normal_(model.head_query[0].bias)
    x_NW = torch.from_numpy(model.encode("queries", tokens))
    head = model.head_query[0]
    own = F.normalize(torch.tanh(x_NW @ head.weight.T + head.bias), dim=1).detach()
    theirs = torch.from_numpy(shared.encode_labels(tokens))
    torch.testing.assert_close(torch.from_numpy(model.encode_queries(tokens)[0]), own)
    assert np.array_equal(model.encode_labels(tokens), theirs)
    for num_queries in range(len(TEXTS) + 1):
        expected = torch.cat([own[:num_queries], theirs[num_queries:]])
        torch.testing.assert_close(model.de(x_NW, num_queries).detach(), expected)
    torch.testing.assert_close(model.de(x_NW).detach(), own)


@pytest.mark.parametrize("normalize", [True, False])
def test_without_projection_a_head_is_the_encoders_vector(tiny_bert, tiny_params, normalize):
    values = {
        "encoder.kind": "transformer",
        "encoder.trainable_layers": -1,
        "model.projection": False,
        "model.normalize": normalize,
        "model.dim": 32,
    }
    model = make_model(tiny_bert, tiny_params(**values)).eval()
    tokens = encode_texts(TEXTS, tiny_bert, 16)
    x_NW = model.encode("queries", tokens)
    de, clf = model.vectors("queries", tokens)
    assert np.array_equal(clf, x_NW)
    length = np.linalg.norm(x_NW, axis=1, keepdims=True)
    assert (np.abs(length - 1) > 0.1).all()
    expected = x_NW / length if normalize else x_NW
    np.testing.assert_allclose(de, expected, rtol=1e-5)
    start_table(model, lambda rows: torch.from_numpy(x_NW[rows % len(x_NW)]))
    rows = model.classifier_table()[0]
    # scores begin as cosines
    np.testing.assert_allclose(rows[:5], x_NW / length / length, rtol=1e-5)


@pytest.mark.parametrize("kind", ["transformer", "both"])
def test_without_projection_another_width_is_refused(tiny_bert, tiny_params, kind):
    with pytest.raises(ConfigError, match=r"encoder's width.*(?s:.)*model\.dim"):
        make_model(
            tiny_bert,
            tiny_params(**{"encoder.kind": kind, "model.projection": False, "model.dim": 16}),
        )


def test_encoding_is_without_dropout_and_leaves_the_mode(tiny_bert, tiny_params):
    params = tiny_params(
        **{"model.dropout": 0.5, "encoder.bag_dropout": 0.5, "encoder.dropout": 0.5}
    )
    model = make_model(tiny_bert, params).train()
    first = outputs(model)
    assert model.training and model.encoder.training and model.head_de.training
    assert model.encoder.bag.embedding.used is None  # nothing gathered for training
    assert same(first, outputs(model))
    assert same(first, outputs(model.eval()))


def test_rows_and_batch_size_do_not_show(tiny_bert, tiny_params, rng):
    model = make_model(tiny_bert, tiny_params(**{"encoder.kind": "both"})).eval()
    tokens = encode_texts(TEXTS * 4, tiny_bert, 16)
    whole = model.encode("queries", tokens)
    rows = rng.permutation(20)[:13]
    np.testing.assert_allclose(
        model.encode("queries", tokens, rows, batch_size=4), whole[rows], rtol=1e-4, atol=1e-5
    )
    shape = model.encode("queries", tokens, rows[:0]).shape
    assert shape == (0, 64)
    de, clf = model.encode_queries(tokens, rows[:0])
    assert de.shape == clf.shape == (0, 16)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=CUDA)])
def test_outputs_that_are_copied_later_are_those_of_a_plain_loop(
    tiny_bert, tiny_params, rng, monkeypatch, device
):
    """Bit for bit, where a batch, or a block of two, is on its way to the host while the next is
    computed.
    """
    monkeypatch.setattr(module, "BLOCK_TEXTS", 8)
    model = make_model(
        tiny_bert, tiny_params(**{"encoder.kind": "both", "encoder.trainable_layers": -1})
    ).to(device)
    model.eval()
    tokens = encode_texts(TEXTS * 5, tiny_bert, 16)
    rows = rng.permutation(25)
    build = InputBuilder(model.encoder, model.device)
    heads = []
    with torch.no_grad():
        inputs = [
            build([("queries", tokens, rows[start : start + 4])]) for start in range(0, 25, 4)
        ]
        batches = [model.encoder(given).cpu().numpy() for given in inputs]
        for start in range(0, 7, 2):
            x_BW = torch.from_numpy(np.concatenate(batches[start : start + 2])).to(device)
            heads.append((model.de(x_BW).cpu().numpy(), model.clf(x_BW).cpu().numpy()))
    assert np.array_equal(
        model.encode("queries", tokens, rows, batch_size=4), np.concatenate(batches)
    )
    expected = [np.concatenate(part) for part in zip(*heads, strict=True)]
    assert same(expected, model.vectors("queries", tokens, rows, batch_size=4))


def test_vectors_in_blocks_are_those_of_all_at_once(tiny_bert, tiny_params, rng, monkeypatch):
    """Bit for bit, and without the encoder's outputs of more than a block."""
    model = make_model(tiny_bert, tiny_params()).eval()
    tokens = encode_texts(TEXTS * 5, tiny_bert, 16)
    rows = rng.permutation(25)
    blocks = [rows[start : start + 8] for start in range(0, 25, 8)]
    parts = [model.vectors("queries", tokens, block, batch_size=2) for block in blocks]
    expected = [np.concatenate(part) for part in zip(*parts, strict=True)]
    monkeypatch.setattr(module, "BLOCK_TEXTS", 9)
    seen = []
    clf = model.clf
    monkeypatch.setattr(model, "clf", lambda x_BW: seen.append(len(x_BW)) or clf(x_BW))
    assert same(expected, model.vectors("queries", tokens, rows, batch_size=2, desc="encode"))
    assert seen == [8, 8, 8, 1]
    de, none = model.vectors("queries", tokens, rows, batch_size=2, only="de")
    assert none is None and np.array_equal(de, expected[0])
    none, clf = model.vectors("queries", tokens, rows, batch_size=2, only="clf")
    assert none is None and np.array_equal(clf, expected[1])


@pytest.mark.parametrize("clf_init", ["label_embedding", "xavier", "normal"])
def test_the_classifiers_start(tiny_bert, tiny_params, clf_init):
    model = make_model(tiny_bert, tiny_params(**{"model.clf_init": clf_init}))
    labels = encode_texts([f"label w{i}" for i in range(NUM_LABELS)], tiny_bert, 16)
    x_LW = torch.from_numpy(model.encode("labels", labels))
    start_table(model, lambda rows: x_LW[rows])
    table = model.table.weight.detach()
    if clf_init == "label_embedding":
        weight = model.head_clf[0].weight
        bias = model.head_clf[0].bias
        expected = torch.stack([F.normalize(weight @ x + bias, dim=0) for x in x_LW])
        torch.testing.assert_close(table, expected.detach(), rtol=1e-4, atol=1e-6)
    elif clf_init == "xavier":
        limit = (6 / (NUM_LABELS + 16)) ** 0.5
        assert 0.9 * limit < table.abs().max() <= limit
    else:
        assert 0.015 < table.std() < 0.025


def test_rows_begin_as_cosines_where_the_encoders_vectors_have_no_unit_length(
    tiny_bert, tiny_params
):
    params = tiny_params(**{"encoder.kind": "transformer", "encoder.trainable_layers": -1})
    model = make_model(tiny_bert, params)
    x_LW = 5 * torch.randn(NUM_LABELS, 32, generator=torch.Generator().manual_seed(1))
    start_table(model, lambda rows: x_LW[rows])
    own_L = (model.eval().clf(x_LW) * model.table.weight).sum(1)
    torch.testing.assert_close(own_L, torch.ones(NUM_LABELS))


def test_the_classifiers_head_keeps_angles_at_the_start(tiny_bert, tiny_params):
    model = make_model(tiny_bert, tiny_params(**{"model.dim": 32}))
    weight = model.head_clf[0].weight.detach()
    torch.testing.assert_close(
        weight @ weight.T,
        torch.eye(32),
        rtol=1e-5,
        atol=1e-5,
    )


def test_the_bag_starts_at_the_transformers_embeddings(tiny_bert, tiny_params):
    model = UniDEC.create(
        *(getattr(tiny_params(), s) for s in ("encoder", "model")),
        NUM_LABELS,
        tiny_bert,
        5000,
        tiny_params().model_dump(),
    )
    start = load_file(tiny_bert / "model.safetensors")["embeddings.word_embeddings.weight"]
    # a tokenizer with more pieces than the transformer has rows
    assert model.encoder.bag.embedding.num_rows == 5000
    assert torch.equal(model.encoder.bag.embedding.weight[: len(start)], start)


# -- the classifier's table: type and place
# ----------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["device", "disk"])
def test_a_table_in_bfloat16_is_written_and_read_back(
    tiny_bert, tiny_params, tmp_path, monkeypatch, place
):
    monkeypatch.setattr("unidec.model.weights.COPY_BLOCK", 4)  # rows are read block by block
    params = tiny_params(**{"model.clf_dtype": "bf16", "model.clf_bias": True})
    model = make_model(tiny_bert, params, placement=Placement(place, tmp_path / "rows"))
    weights = load_file(save(model, tmp_path / "model") / "model.safetensors")
    assert {
        name: tensor.dtype for name, tensor in weights.items() if tensor.dtype != torch.float32
    } == {"table.weight": torch.bfloat16}
    read = UniDEC.load(tmp_path / "model")
    assert read.table.weight.dtype == torch.bfloat16
    assert torch.equal(read.table.weight, model.table.weight)
    same(outputs(read), outputs(model.eval()))
    dtypes = {array.dtype for array in outputs(read)}
    assert dtypes == {np.dtype("float32")}


@pytest.mark.parametrize("clf_init", ["label_embedding", "xavier", "normal"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_part_in_every_place_starts_as_the_whole(
    tiny_bert, tiny_params, tmp_path, monkeypatch, clf_init, dtype
):
    monkeypatch.setattr("unidec.model.first_rows.START_BLOCK", 4)
    params = tiny_params(**{"model.clf_init": clf_init, "model.clf_dtype": dtype})
    x_LW = torch.randn(NUM_LABELS, 32, generator=torch.Generator().manual_seed(1))
    asked = []

    def encode(rows):
        asked.append((rows[0], rows[-1] + 1))
        return x_LW[rows]

    def started(placement):
        model = make_model(tiny_bert, params, placement=placement)
        torch.manual_seed(8)
        start_table(model, encode)
        return model.table.weight.detach(), torch.get_rng_state()

    whole, after = started(Placement())
    assert asked == ([(0, 4), (4, 8), (8, 11)] if clf_init == "label_embedding" else [])
    assert bool(whole.any(1).all())
    if clf_init == "label_embedding":
        torch.testing.assert_close(
            whole.float().norm(dim=1), torch.ones(NUM_LABELS), rtol=1e-2, atol=0
        )
    for place in ("host", "disk"):
        assert torch.equal(started(Placement(place, tmp_path))[0], whole)
    for first, count in (
        (0, 5),
        (5, 6),
        (3, 0),
    ):
        part, generator = started(Placement(first_row=first, num_rows=count))
        # a product of other blocks may differ in its last bit
        tolerance = 1e-2 if dtype == "bf16" else 1e-6
        torch.testing.assert_close(
            part, whole[first : first + count], rtol=tolerance, atol=tolerance
        )
        assert torch.equal(generator, after)  # all processes go on with the same random numbers


def test_the_state_without_tables_comes_back(tiny_bert, tiny_params):
    params = tiny_params(**{"encoder.kind": "both", "model.clf_bias": True})
    one = make_model(tiny_bert, params)
    other = make_model(tiny_bert, params, seed=6)
    state = one.dense_state()
    assert set(one.state_dict()) - set(state) == {f"{name}.weight" for name in one.tables()}
    tables = {name: table.weight.clone() for name, table in other.tables().items()}
    other.load_dense_state(state)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in state.items())
    assert all(torch.equal(tables[name], table.weight) for name, table in other.tables().items())
    name = next(iter(state))
    for wrong in (
        {**state, "more": torch.zeros(1)},
        {n: x for n, x in state.items() if n != name},
        {**state, name: torch.zeros(2, 2)},
    ):
        with pytest.raises(RuntimeError):
            other.load_dense_state(wrong)


# -- refused
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def stored(tiny_bert, tiny_params, tmp_path):
    """A stored model of both encoders and both heads."""
    params = tiny_params(**{"encoder.kind": "both", "model.clf_bias": True})
    return save(make_model(tiny_bert, params), tmp_path / "stored")


@pytest.mark.parametrize(
    "file",
    ["model.safetensors", "config.json", "tokenizer/tokenizer.json", "encoder_config/config.json"],
)
def test_a_damaged_file_is_refused(stored, file, rng):
    content = bytearray((stored / file).read_bytes())
    content[int(rng.integers(len(content)))] ^= 1
    (stored / file).write_bytes(content)
    with pytest.raises(ArtifactError, match="damaged"):
        UniDEC.load(stored)
    (stored / file).write_bytes(content[:-3])
    with pytest.raises(ArtifactError, match="bytes"):
        UniDEC.load(stored, verify=False)
    (stored / file).unlink()
    with pytest.raises(ArtifactError, match="missing"):
        UniDEC.load(stored, verify=False)


@pytest.mark.parametrize(
    "values",
    [
        {"num_labels": NUM_LABELS + 1},
        {"num_labels": "many"},
        {"num_labels": -1},
        {"num_labels": 10**15},
        {"model__dim": 17},
        {"model__heads": "de"},
        {"model__clf_bias": False},
        {"model__unknown": 1},
        {"model__projection": False},
        {"encoder__kind": "bag"},
        {"encoder__residual": True},
        {"encoder__trainable_layers": 9},
        {"encoder": None},
        {"model": []},
        {"encoder_width": 8},
        {"num_tokens": 3},
        {"max_length": None},
    ],
    ids=str,
)
def test_another_configuration_is_refused(stored, values):
    change(stored, **values)
    with pytest.raises(ArtifactError, match="do not fit together"):
        UniDEC.load(stored)


@pytest.mark.parametrize(
    "key", ["encoder", "model", "num_labels", "max_length", "params", "encoder_width"]
)
def test_an_incomplete_configuration_is_refused(stored, key):
    config = json.loads((stored / "config.json").read_text())
    del config[key]
    write_config(stored, config)
    with pytest.raises(ArtifactError, match="do not fit together"):
        UniDEC.load(stored)


@pytest.mark.parametrize("content", ["[]", "7", "{", ""])
def test_a_configuration_that_is_no_object_is_refused(stored, content):
    (stored / "config.json").write_text(content)
    write_manifest(stored, KIND, VERSION, {})
    with pytest.raises(ArtifactError, match="do not fit together"):
        UniDEC.load(stored)


def test_weights_too_few_too_many_or_no_weights_are_refused(stored):
    weights = load_file(stored / "model.safetensors")
    fewer = {name: value for name, value in weights.items() if name != "table.weight"}
    for content in (fewer, weights | {"more": torch.zeros(1)}, None):
        if content is None:
            (stored / "model.safetensors").write_bytes(b"\xff" * 64)
        else:
            save_file(content, stored / "model.safetensors")
        write_manifest(stored, KIND, VERSION, {})
        with pytest.raises(ArtifactError, match="do not fit together"):
            UniDEC.load(stored)


def test_a_newer_format_is_refused_naming_it(stored):
    write_manifest(stored, KIND, VERSION + 1, {})
    with pytest.raises(ArtifactError, match=f"version {VERSION + 1} of model cannot be read"):
        UniDEC.load(stored)


def test_heads_are_in_float32_also_under_autocast(tiny_bert, tiny_params, rng, monkeypatch):
    model = make_model(tiny_bert, tiny_params()).eval()
    tokens = encode_texts(TEXTS, tiny_bert, 16)
    x_NW = rng.normal(size=(len(TEXTS), 32)).astype(np.float32)
    block = (slice(0, len(TEXTS)), torch.from_numpy(x_NW))
    monkeypatch.setattr(model, "_blocks", lambda *_, **options: iter([block]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = model.vectors("queries", tokens)
    assert same(model.vectors("queries", tokens), ours)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_transformer_kept_in_half_precision_is_trained_in_float32(
    tiny_bert, tiny_params, tmp_path, dtype
):
    load_transformer(tiny_bert).to(dtype).save_pretrained(tmp_path / "half")
    shutil.copyfile(tiny_bert / "tokenizer.json", tmp_path / "half" / "tokenizer.json")
    params = tiny_params(**{"encoder.kind": "transformer", "encoder.trainable_layers": -1})
    model = make_model(tmp_path / "half", params)
    loaded = UniDEC.load(save(model, tmp_path / "model"))
    dtypes = {p.dtype for m in (model, loaded) for p in m.parameters()}
    assert dtypes == {torch.float32}
    assert same(outputs(model), outputs(loaded))
