"""A training that starts from an earlier model: what it takes by which label, and that it is a run
like any other.
"""

from __future__ import annotations

import itertools
import json

import numpy as np
import pyarrow as pa
import pytest
import torch
from helpers.trainings import train_to_the_end, weights
from scipy.sparse import csr_matrix

from unidec.data.dataset import write_dataset
from unidec.data.json_file import read_json_lines
from unidec.data.raw import RawData
from unidec.data.storage import write_folder
from unidec.data.tensor_file import write_tensors
from unidec.data.tokens import TokenCache, build_token_cache
from unidec.errors import ArtifactError, ConfigError
from unidec.methods.assembly import additions, rows_of
from unidec.model.encoder import TextEncoder
from unidec.model.row_table import Placement
from unidec.model.unidec import KIND, VERSION, UniDEC
from unidec.pipeline.start import warm_params
from unidec.training import initial_weights as warm
from unidec.training.initial_weights import Start, take_rows
from unidec.training.trainer import Trainer, TrainingData

WIDTH = 6
DIM = 4
UIDS = [f"label-{row}" for row in range(9)]


# -- parameters
# --------------------------------------------------------------------------------------------------


def test_a_warm_start_has_its_own_schedule(tiny_params):
    params = tiny_params(**{"warm.epochs": 2, "warm.lr_scale": 0.25, "warm.warmup_epochs": 0.5})
    ours = warm_params(params)
    rates = [key for key in params.optim.model_dump() if key.startswith("lr_")]
    assert len(rates) == 4
    for key in rates:
        assert getattr(ours.optim, key) == 0.25 * getattr(params.optim, key)
    assert (ours.optim.epochs, ours.optim.warmup_epochs) == (2, 0.5)
    changed = {"epochs", "warmup_epochs", *rates}
    assert ours.optim.model_dump(exclude=changed) == params.optim.model_dump(exclude=changed)
    assert ours.model_dump(exclude={"optim", "warm"}) == params.model_dump(
        exclude={"optim", "warm"}
    )
    assert warm_params(ours) == ours


# -- rows, by the labels' uids
# ----------------------------------------------------------------------------------------


def new_model(tiny_params, num_labels, placement=None, **settings):
    params = tiny_params(
        **{"model.dim": DIM, **{f"model.{key}": value for key, value in settings.items()}}
    )
    encoder = TextEncoder(params.encoder, None, num_tokens=11, width=WIDTH)
    return UniDEC(
        params.encoder, params.model, num_labels, encoder, placement or Placement(), add=additions
    )


@pytest.fixture
def start_of(tmp_path):
    """`start_of(uids, rows, bias)`: a start whose classifier has these rows."""
    number = itertools.count()

    def start_of(uids, rows_KD, bias_K1=None):
        folder = tmp_path / f"start-{next(number)}"
        folder.mkdir()
        tensors = {"table.weight": rows_KD} | (
            {"bias.weight": bias_K1} if bias_K1 is not None else {}
        )
        write_tensors(folder / "model.safetensors", tensors)
        return Start(folder, pa.array(uids, pa.string()), "a" * 64)

    return start_of


def by_hand(model, uids, start_uids, rows_KD, bias_K1, x_LW, keep):
    """Whole rows and biases, label by label."""
    known = dict(zip(start_uids, range(len(start_uids)), strict=True))
    kept = [known[uid] for uid in uids if uid in known]
    length = (
        min(1.0, np.mean([np.linalg.norm(rows_KD[row].float()) for row in kept])) if kept else 1.0
    )
    mean = float(bias_K1[kept].float().mean()) if kept and bias_K1 is not None else 0.0
    rows = []
    biases = []
    for label, uid in enumerate(uids):
        text_D = torch.nn.functional.normalize(model.head_clf[0](x_LW[label]), dim=-1)
        share = keep if uid in known else 0.0
        row = known.get(uid, 0)
        rows.append(share * rows_KD[row].float() + (1 - share) * length * text_D)
        biases.append(
            share * (float(bias_K1[row, 0]) if bias_K1 is not None else 0.0) + (1 - share) * mean
        )
    return torch.stack(rows), torch.tensor(biases)


@pytest.mark.parametrize("bias", [False, True])
def test_the_rows_of_a_bundle_are_in_its_arrays(start_of, tiny_params, tmp_path, bias):
    """The same start, as a model's file and as a bundle keeps it: whole rows and biases, bit for
    bit.
    """
    torch.manual_seed(4)
    rows_KD = torch.randn(len(UIDS), DIM)
    bias_K1 = torch.randn(len(UIDS), 1)
    of_model = start_of(UIDS, rows_KD, bias_K1 if bias else None)
    (tmp_path / "model").mkdir()
    (tmp_path / "vectors").mkdir()
    write_tensors(tmp_path / "model" / "model.safetensors", {"log_scale": torch.zeros(2)})
    np.save(tmp_path / "vectors" / "clf.npy", rows_KD.numpy())
    if bias:
        np.save(tmp_path / "vectors" / "bias.npy", bias_K1.numpy()[:, 0])
    of_bundle = Start(tmp_path / "model", of_model.uids, "b" * 64, tmp_path / "vectors")
    uids = [*UIDS[::-1], "new"]
    found = []
    for start in (of_model, of_bundle):
        torch.manual_seed(5)
        model = new_model(tiny_params, len(uids), clf_bias=True)
        take_rows(
            model, start, pa.array(uids), lambda rows: torch.ones(len(rows), WIDTH), keep=0.25
        )
        found.append((model.table.numpy().copy(), model.bias.numpy().copy()))
    assert all(np.array_equal(one, other) for one, other in zip(*found, strict=True))
    assert np.abs(found[0][0]).min() > 0


SETS = {
    "the same": (UIDS, UIDS),
    "another order": (UIDS, UIDS[::-1]),
    "some gone, some new": ([*UIDS[2:7], "new-0", "new-1"], UIDS),
    "between": (["new-0", *UIDS[3:5], "new-1", *UIDS[:2]], UIDS),
    "nothing in common": (["new-0", "new-1"], UIDS),
    "one": (UIDS[:1], UIDS[:1]),
    "one of many": (UIDS[4:5], UIDS),
    "many of one": (UIDS, UIDS[4:5]),
}
SETTINGS = {
    "plain": {},
    "short rows": {"clf_init": "normal"},  # drawn at random in a cold start
    "bias": {"clf_bias": True},
    "bf16": {"clf_dtype": "bf16", "clf_bias": True},
    "residual": {"clf_residual": True},
    "gates": {"clf_residual": True, "clf_gates": True},
}


@pytest.mark.parametrize("keep", [1.0, 0.25, 0.0])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=list(SETTINGS))
@pytest.mark.parametrize(("uids", "start_uids"), SETS.values(), ids=list(SETS))
@torch.no_grad()
def test_rows_go_to_the_labels_they_are_of(
    tiny_params, start_of, tmp_path, monkeypatch, uids, start_uids, settings, keep
):
    monkeypatch.setattr(warm, "START_BLOCK", 2)  # several blocks, the last one not full
    torch.manual_seed(1)
    scale = 0.1 if settings.get("clf_init") == "normal" else 3.0
    rows_KD = scale * torch.randn(len(start_uids), DIM)
    bias_K1 = torch.randn(len(start_uids), 1) - 5
    dtype = torch.bfloat16 if settings.get("clf_dtype") == "bf16" else torch.float32
    rows_KD = rows_KD.to(dtype)
    x_LW = torch.randn(len(uids), WIDTH)
    start = start_of(start_uids, rows_KD, bias_K1 if settings.get("clf_bias") else None)
    half = len(uids) // 2
    placements = [
        Placement(),
        Placement("host"),
        Placement("disk", tmp_path / "table"),
        Placement(first_row=0, num_rows=half),  # two ranks
        Placement(first_row=half, num_rows=len(uids) - half),
    ]
    for placement in placements:
        torch.manual_seed(2)
        model = new_model(tiny_params, len(uids), placement, **settings)
        model.train()
        rows = rows_of(model, None, None, lambda source, rows: x_LW[rows])
        of_labels = pa.chunked_array([uids[:1], uids[1:]], pa.string())
        take_rows(
            model, start, of_labels, lambda rows: x_LW[rows], keep=keep, holds_text=rows.holds_text
        )
        assert model.training
        ours, our_bias = model.classifier_table()
        if rows.holds_text:
            ours = rows.exported()[0]
        given = bias_K1 if settings.get("clf_bias") else None
        expected_LD, expected_L = by_hand(model, uids, start_uids, rows_KD, given, x_LW, keep)
        mine = slice(model.table.first_row, model.table.first_row + model.table.own_rows)
        kept = np.isin(uids, start_uids)[mine] & (keep == 1)
        tolerance = (
            {"rtol": 0.02, "atol": 0.02}
            if dtype == torch.bfloat16
            else {"rtol": 1e-5, "atol": 1e-5}
        )
        np.testing.assert_allclose(ours, expected_LD[mine].numpy(), **tolerance)
        if not settings.get("clf_residual"):  # bit for bit
            expected = expected_LD[mine].numpy()[kept]
            assert np.array_equal(ours[kept], expected)
        if settings.get("clf_bias"):
            np.testing.assert_allclose(our_bias, expected_L[mine].numpy(), rtol=1e-4)
            assert np.array_equal(our_bias[kept], expected_L[mine].numpy()[kept])


def test_a_start_without_a_bias_or_a_classifier(tiny_params, start_of, tmp_path):
    start = start_of(UIDS, torch.ones(9, DIM))
    model = new_model(tiny_params, 9, clf_bias=True)
    take_rows(model, start, start.uids, lambda rows: torch.ones(len(rows), WIDTH))
    assert torch.equal(model.bias.weight, torch.zeros(9, 1))
    model = new_model(tiny_params, 9)
    (tmp_path / "de").mkdir()
    write_tensors(tmp_path / "de" / "model.safetensors", {"log_scale": torch.zeros(2)})
    take_rows(
        model,
        Start(tmp_path / "de", start.uids, ""),
        start.uids,
        lambda rows: torch.ones(len(rows), WIDTH),
    )
    np.testing.assert_allclose(model.table.weight.norm(dim=1), 1, rtol=1e-5)
    alone = new_model(tiny_params, 9, heads="de")
    take_rows(alone, start, start.uids, lambda rows: 1 / 0)


def test_rows_and_uids_that_differ_in_number_are_refused(tiny_params, start_of):
    start = Start(start_of(UIDS, torch.ones(9, DIM)).model, pa.array(UIDS[:8]), "")
    with pytest.raises(ArtifactError, match=r"9 rows(.|\n)*8 rows(.|\n)*retrain.start: cold"):
        take_rows(
            new_model(tiny_params, 9), start, start.uids, lambda rows: torch.ones(len(rows), WIDTH)
        )


def test_rows_are_found_by_uid(start_of):
    start = start_of(UIDS, torch.ones(9, DIM))
    for kind in (pa.string(), pa.large_string()):
        assert start.rows_of(pa.array(["label-8", "x", "label-0"], kind)).tolist() == [8, -1, 0]


# -- a training
# --------------------------------------------------------------------------------------------------


def changed(raw: RawData) -> RawData:
    """Labels in another order, the first three gone, two copies under new uids."""
    order = [*range(raw.num_labels - 1, 2, -1), 5, 6]
    uids = [f"label-{row}" for row in order[:-2]] + ["new-0", "new-1"]
    labels = raw.labels.take(order).set_column(
        0, "uid", pa.array(uids, raw.labels.schema.field("uid").type)
    )

    def cut(pairs):
        return {split: csr_matrix(matrix.tocsc()[:, order]) for split, matrix in pairs.items()}

    return RawData(raw.name, raw.queries, labels, cut(raw.relevance), cut(raw.filter_pairs))


@pytest.fixture(scope="module")
def new_data(tiny_raw, tiny_bert, tmp_path_factory):
    root = tmp_path_factory.mktemp("changed")
    dataset = write_dataset(root / "dataset", changed(tiny_raw), validation_share=0.1)
    sizes = {"queries": dataset.num_queries, "labels": dataset.num_labels}
    tokens = [
        TokenCache.open(
            build_token_cache(dataset.text_batches(name), tiny_bert, 16, root / name, size)
        )
        for name, size in sizes.items()
    ]
    return dataset, tokens


@pytest.fixture
def go_on(open_trainer, new_data, tiny_params, tmp_path):
    """`go_on("run", given, **overrides)`: a trainer of the changed data that starts from an
    exported model.
    """

    def started(name="start", **overrides):
        trainer = train_to_the_end(open_trainer(name, **overrides))
        if not (tmp_path / f"{name}-model").exists():
            with write_folder(tmp_path / f"{name}-model", KIND, VERSION) as out:
                trainer.export(out)
        return trainer, Start(
            tmp_path / f"{name}-model", trainer.dataset.labels["uid"].combine_chunks(), "5" * 64
        )

    def go_on(run, start, **overrides):
        dataset, tokens = new_data
        params = warm_params(
            tiny_params(**{"warm.epochs": 2, "warm.keep": 1.0, "pool.refresh": 1} | overrides)
        )
        return Trainer(
            params.training,
            TrainingData(dataset, *tokens),
            tmp_path / run,
            tmp_path / "cache",
            start=start,
        )

    go_on.started = started
    return go_on


def test_a_training_starts_where_the_other_ended(go_on):
    first, start = go_on.started(**{"model.learn_temperature": True})
    second = go_on("second", start, **{"model.learn_temperature": True})
    before = weights(first)
    for name, value in weights(second).items():
        if not name.startswith("table."):
            assert torch.equal(value, before[name]), name
    uids = first.dataset.label_uids()
    for row, uid in enumerate(second.dataset.label_uids()):
        ours = second.model.table.weight[row]
        assert uid.startswith("new") or torch.equal(ours, first.model.table.weight[uids.index(uid)])
    shrunk = go_on(
        "shrunk", start, **{"model.learn_temperature": True, "warm.keep": 0.25}
    ).model.table.weight
    for row, uid in enumerate(second.dataset.label_uids()):
        # a new label's text is encoded in another batch: on some processors its row rounds
        # differently
        same = torch.allclose(
            shrunk[row],
            second.model.table.weight[row],
            rtol=0,
            atol=1e-6,
        )
        assert same == uid.startswith("new"), uid
    begun = read_json_lines(first.run_dir / "history.jsonl")[0]["loss"]
    train_to_the_end(second)
    assert second.at.epoch == 2
    loss = read_json_lines(second.run_dir / "history.jsonl")[0]["loss"]
    assert loss < begun


def test_a_temperature_that_is_not_learnt_is_a_parameter(go_on):
    _, start = go_on.started(**{"model.temperature": 0.2})
    assert go_on("second", start).model.log_scale.tolist() == pytest.approx([-np.log(0.1)] * 2)


KINDS = {
    "bag": {},
    "frozen": {"encoder.frozen": True},
    "residual": {"model.clf_residual": True},
    "transformer": {"encoder.kind": "both", "encoder.trainable_layers": 1},
}


@pytest.mark.parametrize("overrides", KINDS.values(), ids=list(KINDS))
def test_a_cut_training_ends_as_an_uncut_one(go_on, overrides):
    parts = {
        key: value
        for key, value in overrides.items()
        if key.startswith("encoder") and "frozen" not in key
    }
    _, start = go_on.started(**parts)
    whole = weights(train_to_the_end(go_on("whole", start, **overrides)))
    cut = go_on("cut", start, **overrides)
    cut.mine()
    cut.train_round()
    again = go_on("cut", start, **overrides)
    assert again.at.step == cut.at.step > 0
    resumed = weights(train_to_the_end(again))
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())


def test_another_start_is_another_run(go_on):
    _, start = go_on.started()
    trainer = go_on("run", start)
    trainer.mine()
    trainer.train_round()
    assert trainer.identity["start"] == start.sha256
    with pytest.raises(ConfigError, match="start: 555555555555"):
        go_on("run", Start(start.model, start.uids, "6" * 64))
    with pytest.raises(ConfigError, match="nothing now"):
        go_on("run", None)


OTHER = {"another encoder": {"encoder.bag_words": 8}, "another width": {"model.dim": 8}}


@pytest.mark.parametrize("overrides", OTHER.values(), ids=list(OTHER))
def test_a_start_that_does_not_fit_is_refused(go_on, overrides):
    _, start = go_on.started()
    with pytest.raises(ConfigError, match=r"data/start.json(.|\n)*fix: retrain.start: cold"):
        go_on("second", start, **overrides)


def test_a_damaged_start_is_refused(go_on, tmp_path):
    _, start = go_on.started()
    config = json.loads((start.model / "config.json").read_text())
    (start.model / "config.json").write_text(json.dumps(config | {"num_labels": 1}))
    with pytest.raises(ArtifactError):
        go_on("second", start)
