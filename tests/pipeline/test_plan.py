"""`unidec plan` and the check before a training: on a working folder, and by hand for data that is not here."""

import json
import sys
from pathlib import Path

import pytest

from unidec import cli
from unidec.config import Params, with_settings
from unidec.errors import ArtifactError, ConfigError
from unidec.pipeline import data as data_stages
from unidec.pipeline import paths, step_timing
from unidec.pipeline.memory import empty_encoder, estimate
from unidec.pipeline.plan import REMEDIES, TRAINING, advise, check_fits, memory_figures, plan_memory, stored_sizes
from unidec.pipeline.step_sizes import Sizes

BY_HAND = ["--labels", "1300000", "--queries", "2248619", "--tokens", "32", "--no-measure"]
GIB = 1 << 30


@pytest.fixture
def ingested(in_work):
    if not paths.DATASET.is_dir():
        data_stages.ingest(in_work.params())
    if not paths.TOKENS.is_dir():
        data_stages.tokens(in_work.params())
    return in_work


@pytest.fixture
def run_cli(monkeypatch, capsys):
    """`run_cli("plan", ...)` -> (exit code, output, errors)."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["unidec", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err

    return run


def test_the_training_here_fits(ingested):
    params = ingested.params()
    planned = check_fits(params)
    assert planned is not None and not planned.short
    assert planned.estimate.device == "cpu"
    sizes = stored_sizes(params)
    assert (sizes.num_queries, sizes.num_train, sizes.num_labels) == (2500, 1900, 4497)


@pytest.mark.parametrize("place", ["host", "disk"])
def test_what_does_not_fit_is_refused_with_what_would(ingested, place):
    params = ingested.params(**{"pool.batch_size": 2048})
    plan = plan_memory(params).estimate
    needed = plan.peak(place, phases=TRAINING)[1]  # the index is made later, on another machine if need be
    enough = int(needed / 0.95) + (64 << 20)
    check_fits(params, {place: enough})
    with pytest.raises(ConfigError) as error:
        check_fits(params, {place: needed - 1})
    assert all(word in str(error.value) for word in ("does not fit", "got:", "expected:", "fix:", "unidec plan"))
    assert check_fits(with_settings(params, {"run.check_memory": False}), {"host": 1}) is None


def test_advice_of_the_error_makes_it_fit(ingested):
    """A GPU by its size alone: the error names a setting, and with it the check passes."""
    params = ingested.params(**{"pool.batch_size": 2048, "encoder.kind": "transformer", "encoder.trainable_layers": -1})
    needed = plan_memory(params, free={"device": 1}).estimate.peak("device")[1]
    with pytest.raises(ConfigError, match="recompute=true"):
        check_fits(params, {"device": needed})
    check_fits(with_settings(params, {"run.recompute": True}), {"device": needed})


def test_used_beside_planned(ingested):
    figures = memory_figures(ingested.params())
    assert set(figures) == {"host_planned_gib", "host_used_gib"}
    assert all(value > 0.01 for value in figures.values())


def test_a_small_training_is_one_line(ingested, run_cli):
    import yaml

    Path("small.yaml").write_text(yaml.safe_dump(ingested.params().model_dump(mode="json")))
    command = ["plan", "--params", "small.yaml", "--no-measure", "--host-memory", "64GiB", "--disk", "64GiB"]
    code, out, _ = run_cli(*command)
    (line,) = out.splitlines()
    assert code == 0 and line.startswith("fits: host memory ") and " of 64.00 GiB" in line and "--terms" in line
    code, whole, _ = run_cli(*command, "--terms")
    assert code == 0 and "classifier table" in whole and whole.rstrip().endswith("fits")
    code, out, _ = run_cli(*command, "--json")
    assert code == 0 and json.loads(out)["fits"] is True
    needed = json.loads(out)["peaks"]["host"]["needed_bytes"]
    code, tight, _ = run_cli(*command[:-4], "--host-memory", f"{int(1.5 * needed)}B", "--disk", "64GiB")
    assert code == 0 and "classifier table" in tight, "more than half of what is free: every amount"


def test_nothing_ingested(tmp_path, monkeypatch, in_work):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArtifactError):
        plan_memory(in_work.params(**{"encoder.name": str(in_work.folder / "bert")}))


def test_by_hand(run_cli, tmp_path, monkeypatch):
    """The papers' 1.3M setting needs no data and no encoder here; what is too large ends with exit code 1."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").write_text("recipe: unidec-gpu\nmodel: {dim: 256}\npool: {batch_size: 1098}\n")
    roomy = ["--host-memory", "256GiB", "--disk", "1TB"]
    code, out, _ = run_cli("plan", *BY_HAND, *roomy, "--device-memory", "44.7GiB")
    assert code == 0 and out.rstrip().endswith("fits")
    assert "classifier table" in out and "GPU memory: " in out
    code, out, _ = run_cli("plan", *BY_HAND, *roomy, "--device-memory", "16GiB")
    lines = out.splitlines()
    assert code == 1 and lines[-2].startswith("does not fit: GPU memory")
    assert lines[-1].startswith("would fit:  --set run.recompute=true")
    code, out, _ = run_cli("plan", *BY_HAND, *roomy, "--device-memory", "16GiB", "--json")
    result = json.loads(out)
    assert code == 1 and result["advice"] == {"settings": {"run.recompute": True}, "fits": True}
    assert 4 < result["state_bytes"] / GIB < 6 and result["facts"]["batch_queries"] == 1098
    assert {item["place"] for item in result["amounts"]} == {"device", "host", "disk"}


def test_mistakes_by_hand(run_cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").write_text("recipe: unidec-gpu\n")
    code, _, errors = run_cli("plan", "--labels", "5")
    assert code == 2 and "--queries" in errors
    code, _, errors = run_cli("plan", *BY_HAND, "--device-memory", "much")
    assert code == 2 and "16GiB" in errors
    (tmp_path / "config.json").write_text("{}")
    code, _, errors = run_cli("plan", *BY_HAND, "--encoder-config", "config.json")
    assert code == 2 and "not a transformer" in errors


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"encoder.kind": "both"},
        {"encoder.kind": "transformer", "encoder.trainable_layers": 1, "model.heads": "de", "index.clf_weight": 1.0},
        {"pool.de_labels": "all", "pool.clf_labels": "pool", "optim.encode_chunk": 16, "model.clf_residual": True},
        {"encoder.frozen": True, "encoder.residual": False, "encoder.bag_dropout": 0.0, "pool.cluster_start": 4},
    ],
    ids=str,
)
def test_measured_times(in_work, overrides, monkeypatch):
    """Real steps on random ids, without data."""
    monkeypatch.setattr(step_timing, "SECONDS", 1e9)  # whole batches, however busy the machine is
    params = in_work.params(**overrides, **{"pool.batch_size": 32, "pool.size": 64})
    found = step_timing.measure(params, Sizes.given(500, 320, 6, vocab_size=400))
    assert found.how.startswith("measured") and found.step > 0
    assert found.epoch == pytest.approx(16 * found.step)  # clusters of 20
    assert found.total == pytest.approx(params.optim.epochs * found.epoch)
    assert [line.partition(":")[0] for line in found.lines()] == ["step", "epoch", "all epochs"]


def test_mistakes_in_sizes(run_cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").write_text("recipe: unidec-gpu\n")
    for text in ("GiB", "16XB", "16 gigs"):
        code, _, errors = run_cli("plan", *BY_HAND, "--device-memory", text)
        assert code == 2 and "not a size of memory" in errors


# -- advice ------------------------------------------------------------------------------------------------------------

PAPER = Sizes.given(1_300_000, 2_248_619, 32)


def paper_params(**overrides):
    """LF-AmazonTitles-1.3M as the papers train it."""
    values = {
        "encoder": {"name": "distilbert-base-uncased", "kind": "transformer", "trainable_layers": -1},
        "model": {"dim": 256},
        "pool": {"batch_size": 1098, "size": 3000},
    }
    for key, value in overrides.items():
        section, name = key.split(".")
        values.setdefault(section, {})[name] = value
    return Params.model_validate(values)


def plan_of(params, sizes=PAPER):
    encoder = empty_encoder("distilbert-base-uncased")
    return estimate(params, sizes, encoder, cuda=True, half=True, process=GIB // 2)


def roomy(device_gib):
    return {"device": int(device_gib * GIB), "host": 10_000 * GIB, "disk": 10_000 * GIB}


def test_the_papers_setting():
    """1,098 queries, 3,000 labels; the state is some 5 GiB, the step fits the 48 GB card of the papers."""
    plan = plan_of(paper_params())
    assert (plan.facts["batch_queries"], plan.facts["pool_labels"]) == (1098, 3000)
    assert 4 * GIB < plan.state_bytes < 6 * GIB
    assert not plan.shortages(roomy(44.7)) and plan.shortages(roomy(24))


@pytest.mark.parametrize("device", [0.1, 2, 4, 5, 8, 12, 16])
@pytest.mark.parametrize("sizes", [PAPER, Sizes.given(20_000_000, 100_000, 16)], ids=["1.3M", "20M"])
def test_taking_the_advice_makes_it_fit(device, sizes):
    """The mildest single setting that is enough, else several."""
    free, params = roomy(device), paper_params(**{"pool.eta": 0, "pool.batches": "random"})
    advised = advise(params, free, lambda other: plan_of(other, sizes), TRAINING)
    changed = plan_of(with_settings(params, advised.settings), sizes)
    assert changed == advised.estimate
    assert bool(changed.shortages(free, TRAINING)) != advised.fits
    assert advised.fits == (device >= 2)
    single = [remedy for remedy in REMEDIES if (other := with_settings(params, remedy))
              and not plan_of(other, sizes).shortages(free, TRAINING)]  # fmt: skip
    assert not single or advised.settings == single[0]
    if device == 12 and sizes is PAPER:
        assert str(advised) == "--set run.recompute=true"


def test_450_million_labels_on_one_card():
    sizes = Sizes.given(450_000_000, 1_000_000, 12)
    common = {"model.heads": "clf", "model.dim": 64, "pool.eta": 0, "pool.batches": "random", "index.space": "clf",
              "pool.batch_size": 2048, "model.clf_init": "normal"}  # fmt: skip
    card = {"device": int(141e9)}
    for state, gigabytes in (("adagrad", 59.4), ("sgd", 57.6)):
        plan = plan_of(paper_params(**common, **{"model.clf_dtype": "bf16", "optim.clf_state": state}), sizes)
        assert plan.named("classifier table", "classifier state") == pytest.approx(gigabytes * 1e9, rel=0.001)
        assert not plan.shortages(card)
    adam = paper_params(**common)
    assert plan_of(adam, sizes).shortages(card)
    advised = advise(adam, card, lambda params: plan_of(params, sizes), TRAINING)
    assert advised.fits and not plan_of(with_settings(adam, advised.settings), sizes).shortages(card)


def test_every_remedy_is_a_valid_setting_that_shrinks_something():
    params = paper_params(**{"pool.clf_labels": "all", "pool.de_labels": "all", "tokens.max_length": 128})
    sizes = Sizes.given(1_300_000, 2_248_619, 128)
    before = plan_of(params, sizes)
    for remedy in REMEDIES:
        changed = with_settings(params, remedy)
        if remedy.keys() == {"run.table_place"}:  # all labels train only in a table on the device
            assert changed is None
            continue
        assert changed is not None and changed != params, remedy
        after = plan_of(changed, sizes)
        assert (
            after.peak("device", ["step"]) < before.peak("device", ["step"]) or after.state_bytes < before.state_bytes
        )
    assert with_settings(params, {"pool.size": 3}) is None  # in conflict with the batch
