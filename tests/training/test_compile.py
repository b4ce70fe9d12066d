"""`run.compile`: a compiled transformer trains and encodes as it does without, dropout included, in
a few graphs.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from unidec.data.storage import write_folder
from unidec.data.tokens import Tokens
from unidec.errors import ConfigError
from unidec.model.encoder import TextEncoder
from unidec.model.unidec import KIND, VERSION, UniDEC
from unidec.training import opening
from unidec.training import trainer as module

ALL = {"encoder.kind": "transformer", "encoder.trainable_layers": -1, "encoder.dropout": 0.1}
CASES = {
    "all layers": ALL,
    "one layer beside a bag, in chunks": {
        "encoder.kind": "both",
        "encoder.trainable_layers": 1,
        "encoder.bag_dropout": 0.3,
        "optim.encode_chunk": 9,
    },
    "recomputed, in half precision": ALL | {"run.recompute": True, "optim.precision": "bf16"},
}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    """Nothing compiled for one test serves another."""
    monkeypatch.setattr(module, "LOG_EVERY", 1)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def trained(trainer, epochs_until=1):
    """Losses of every step up to an epoch's end."""
    losses = []
    while trainer.at.epoch < epochs_until:
        trainer.mine()
        trainer.train_round(lambda _, figures: losses.append(figures["loss"]))
    return losses


def test_the_parameter_compiles_the_encoder(open_trainer, monkeypatch):
    compiled = []
    monkeypatch.setattr(
        TextEncoder, "compile_transformer", lambda encoder: compiled.append(encoder)
    )
    open_trainer("plain", **ALL)
    assert compiled == []
    trainer = open_trainer("compiled", **ALL, **{"run.compile": True})
    assert compiled == [trainer.model.encoder]


@pytest.mark.parametrize(
    ("chosen", "device", "epochs", "compiles"),
    [
        ("auto", "cuda", 100, True),
        ("auto", "cuda", 99, False),
        ("auto", "cpu", 100, False),
        (True, "cpu", 1, True),
        (False, "cuda", 1000, False),
    ],
)
def test_long_trainings_on_a_gpu_compile_by_themselves(
    tiny_params, monkeypatch, chosen, device, epochs, compiles
):
    settings = tiny_params(**{"run.compile": chosen, "optim.epochs": epochs}).training
    calls = []
    encoder = SimpleNamespace(compile_transformer=lambda: calls.append(1))
    model = SimpleNamespace(device=torch.device(device), encoder=encoder)
    with torch._dynamo.config.patch(suppress_errors=False):
        opening.compile_if_worthwhile(settings, model, opening.COMPILED_STEPS // 100)
        # with "auto", a compiler error falls back to eager execution
        assert torch._dynamo.config.suppress_errors == (compiles and chosen == "auto")
    assert bool(calls) == compiles


def test_where_nothing_can_be_compiled_the_fix_is_named(open_trainer, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("no working C++ compiler")

    monkeypatch.setattr(torch, "compile", refuse)
    with pytest.raises(
        ConfigError,
        match=r"(?s)run\.compile.*no working C\+\+ compiler.*g\+\+.*run\.compile: false",
    ):
        open_trainer(**ALL, **{"run.compile": True})
    open_trainer("bag", **{"encoder.kind": "bag", "run.compile": True})  # has nothing to compile


@pytest.mark.slow
def test_a_machine_without_a_compiler_is_refused(open_trainer):
    with (
        torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}),
        pytest.raises(ConfigError, match=r"g\+\+"),
    ):
        open_trainer(**ALL, **{"run.compile": True})


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES)
def test_a_compiled_run_is_the_plain_one(open_trainer, tiny_tokens, tmp_path, case):
    """Losses with dropout; vectors; names in checkpoints and models. Batches are random: equal
    scores of clusters and hard negatives may be cut elsewhere by rounding.
    """
    values = {
        "optim.epochs": 4,
        "pool.refresh": 2,
        "model.dropout": 0.1,
        "pool.batches": "random",
        "pool.eta": 0,
    }
    values |= CASES[case]
    # one after the other: they share torch's random numbers
    plain = open_trainer("run-False", **values)
    expected = trained(plain, 4)
    compiled = open_trainer("run-True", **values, **{"run.compile": True})
    found = trained(compiled, 4)
    half = values.get("optim.precision") == "bf16"
    np.testing.assert_allclose(found[:8], expected[:8], rtol=2e-2 if half else 1e-4)
    np.testing.assert_allclose(found, expected, rtol=5e-2 if half else 1e-2)
    assert list(compiled.model.state_dict()) == list(plain.model.state_dict())
    assert all(
        np.allclose(one, other, atol=0.1 if half else 5e-3)
        for one, other in zip(
            *(t.model.encode_queries(tiny_tokens["queries"]) for t in (plain, compiled)),
            strict=True,
        )
    )
    # a checkpoint of the one is read by the other, and its model by a server that does not compile
    resumed = open_trainer("run-True", **values)
    assert resumed.at.step == compiled.at.step
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            resumed.model.state_dict().values(), compiled.model.state_dict().values(), strict=True
        )
    )
    with write_folder(tmp_path / "model", KIND, VERSION) as out:
        compiled.model.save_into(out)
    loaded = UniDEC.load(tmp_path / "model")
    assert list(loaded.state_dict()) == list(plain.model.state_dict())


@pytest.mark.slow
def test_texts_of_any_length_and_number_share_a_few_graphs(open_trainer, rng):
    """In training, in gradient caching's first pass and in a refresh: a graph each, and one more
    for a single text.
    """
    trainer = open_trainer(**ALL)
    encoder = trainer.model.encoder
    most = 16
    offsets = np.concatenate([[0], np.cumsum(rng.integers(2, most + 1, 60))])
    texts = Tokens(rng.integers(5, 60, offsets[-1]).astype(np.uint16), offsets, 60, 0, most)
    counter = CompileCounterWithBackend("eager")
    encoder.compile_transformer(counter)
    before = counter.frame_count
    sizes = set()
    for count in (40, 7, 29, 3, 1, 17, 11, 1, 9, 40):
        batch = trainer.encoding.build(
            [("queries", texts, np.sort(rng.choice(60, count, replace=False)))]
        )
        sizes |= {tuple(texts.ids_BT.shape) for texts in batch.chunks}
        encoder.train()(batch).sum().backward()
        with torch.no_grad():
            encoder(batch)
            encoder.eval()(batch)
    assert len({length for _, length in sizes}) > 2
    assert len(sizes) > 6
    assert 3 <= counter.frame_count - before <= 6
