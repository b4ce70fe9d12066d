"""The whole application over a real bundle: answers as `Bundle.predict` gives them, and as the
OpenAPI says.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from helpers import asgi
from helpers.tiny_bundle import write_tiny_bundle

import unidec
from unidec.config import Serve
from unidec.ranking.ranker import Calibration
from unidec.serving import schemas
from unidec.serving.engine import Engine, Service

PACKAGE = Path(unidec.__file__).parent
VERSION_KEYS = ["model", "previous", "unidec", "runtime", "index", "num_labels", "follow"]
CARD_KEYS = [
    "model",
    "runtime",
    "unidec",
    "index",
    "encoder",
    "recipe",
    "data",
    "num_labels",
    "num_neighbours",
    "text",
    "heads",
    "space",
    "weights",
    "fused",
    "metrics",
    "score_quantiles",
    "examples",
    "limits",
    "api_key",
    "feedback",
]


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    made = Engine.load(folder, Serve(runtime="torch", threads=1))
    made.warm(4)
    return made


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(main(), 60)

    asyncio.run(limited())


def test_answers_are_those_of_the_bundle(engine: Engine) -> None:
    texts = [engine.bundle.titles[row].as_py() for row in range(0, 40, 3)] + [
        "no such words",
        "größer 🚗 \x00",
    ]
    wanted = engine.bundle.predict(texts, k=7)

    async def main() -> None:
        async with asgi.running(engine, cache_queries=0) as server:
            together = (await server.predict(*texts, k=7)).json["predictions"]
            alone = [(await server.predict(text, k=7)).json["predictions"][0] for text in texts]
            for got, one, want in zip(together, alone, wanted, strict=True):
                for answer in (got, one):
                    assert [label["uid"] for label in answer["labels"]] == want.labels
                    assert [label["title"] for label in answer["labels"]] == want.titles
                    for name, values in (
                        ("score", want.scores),
                        ("de", want.de_scores),
                        ("clf", want.clf_scores),
                        ("knn", want.knn_scores),
                    ):
                        assert [label[name] for label in answer["labels"]] == pytest.approx(
                            values, abs=1e-5
                        )
            assert together[-2]["unknown_tokens"] == 3

    run(main)


@pytest.mark.usefixtures("stub_model")
def test_a_query_passes_few_files(tmp_path: Path, rng: np.random.Generator) -> None:
    """By votes, words, fusion and calibration: what one has to read to follow POST /predict to its
    answer.
    """
    calibration = Calibration(scores=[-5.0, 5.0], probabilities=[0.25, 0.75])
    options = {
        "votes": True,
        "by_words": True,
        "fused": True,
        "stacked": True,
        "calibration": calibration,
    }
    write_tiny_bundle(tmp_path / "bundle", rng, **options)
    engine = Engine.load(tmp_path / "bundle", Serve(runtime="torch"))
    passed = set()

    def note(frame: FrameType, event: str, _argument: object) -> None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(PACKAGE):
            passed.add(file)

    async def main() -> None:
        async with asgi.running(engine, cache_queries=0) as server:
            await server.predict("old house")  # what is made at the first query
            passed.clear()
            reply = await server.predict("red car")
            assert reply.json["predictions"][0]["labels"][0]["probability"] is not None

    # Before the server starts: a thread has the profile function that was set when it began.
    sys.setprofile(note)
    threading.setprofile(note)
    try:
        run(main)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    names = {file.name for file in passed}
    assert {"middleware.py", "routes.py", "answer.py", "ranker.py", "fusion.py"} <= names
    assert len(passed) <= 15, sorted(names)


def test_probabilities_are_null_where_the_bundle_does_not_know_them(folder: Path) -> None:
    engine = Engine.load(folder, Serve(runtime="torch", threads=1))
    text = engine.bundle.titles[0].as_py()
    calibration = Calibration(scores=[-1.0, 2.0], probabilities=[0.0, 1.0])

    async def main() -> None:
        async with asgi.running(engine, cache_queries=0) as server:

            async def answered(route: str = "/predict", **more: Any) -> Any:
                asked = {"query": text} if route == "/explain" else {"queries": [text]}
                reply = (await server.ask(route, asked | more)).json
                return (reply if route == "/explain" else reply["predictions"][0])["labels"]

            probabilities = [label["probability"] for label in await answered()]
            assert probabilities == [None] * 5
            engine.bundle.info = engine.bundle.info.model_copy(update={"calibration": calibration})
            for found in (await answered(), await answered("/explain")):
                expected = [(label["score"] + 1) / 3 for label in found]
                assert [label["probability"] for label in found] == pytest.approx(
                    expected, abs=1e-6
                )
            least = (await answered())[2]["score"]
            assert len(await answered(min_score=least)) == 3, "it is compared with scores"
            for more in ({"head": "de"}, {"tail": 1.0}):
                assert [label["probability"] for label in await answered(**more)] == [None] * 5

    run(main)


def test_every_answer_is_as_the_openapi_says(engine: Engine) -> None:
    text = engine.bundle.titles[0].as_py()

    async def main() -> None:
        async with asgi.running(engine, "key") as server:
            head = {"authorization": "Bearer key"}

            async def of(
                model: Any, path: str, status: int = 200, what: Any = None, **more: Any
            ) -> Any:
                reply = await server.ask(
                    path, what, headers=head | (asgi.JSON if what else {}), **more
                )
                assert reply.status == status, reply.body
                return model.model_validate_json(reply.body)

            found = await of(
                schemas.PredictAnswer, "/predict", what={"queries": [text], "deny": ["L0", "no"]}
            )
            assert found.predictions[0].unknown_filters == 1
            assert len(found.predictions[0].labels) == 5
            for one in ("de", "clf"):
                answer = await of(
                    schemas.PredictAnswer, "/predict", what={"queries": [text], "head": one}
                )
                scores = [label.score for label in answer.predictions[0].labels]
                expected = [getattr(label, one) for label in answer.predictions[0].labels]
                assert scores == pytest.approx(expected, abs=1e-5)
            why = (await server.ask("/explain", {"query": text, "k": 3}, headers=head)).json
            assert why["nearest"]
            pieces = [token["piece"] for token in why["tokens"]]
            assert pieces == text.split()
            for label in why["labels"]:
                parts = sum(weight * (label[name] or 0) for name, weight in why["weights"].items())
                assert label["score"] == pytest.approx(parts, abs=1e-5)
            assert (await server.ask("/labels/L3", headers=head)).json["row"] == 3
            assert (await server.ask("/labels", headers=head, query="prefix=l1&limit=4")).json[
                "more"
            ]
            await of(schemas.ErrorAnswer, "/labels/nope", 404)
            version = (await server.ask("/version", headers=head)).json
            assert version["model"]["sha256"] == engine.bundle.sha256
            assert list(version) == VERSION_KEYS
            assert list(version["model"]) == ["sha256", "name", "version", "alias", "data"]
            card = (await server.ask("/card", headers=head)).json
            assert card["api_key"]
            assert card["num_labels"] == 400
            assert len(card["examples"]) == 6
            assert list(card) == CARD_KEYS
            assert list(card["data"]) == ["name", "sha256", "rows"]
            assert (await server.ask("/readyz")).json == {
                "ready": True,
                "model": version["model"],
                "follow": None,
            }
            assert (await server.ask("/healthz")).json == {"status": "alive"}
            openapi = (await server.ask("/openapi.json", headers=head)).json
            security = openapi["paths"]["/predict"]["post"]["security"]
            assert security == [{"key": []}]
            assert "security" not in openapi["paths"]["/readyz"]["get"]
        async with asgi.running() as server:
            not_ready = (await server.ask("/readyz")).json
            assert list(not_ready) == ["error", "ready", "model", "follow"]
            assert not not_ready["ready"]
            assert "security" not in json.dumps((await server.ask("/openapi.json")).json)

    run(main)


def test_the_openapi_has_limits_and_examples_that_are_right() -> None:
    settings = Serve(max_queries=9, max_k=8, max_query_chars=77)
    app = asgi.AppClient(Service(settings), settings, None).app
    post = app.openapi()["paths"]["/predict"]["post"]
    body = post["requestBody"]["content"]["application/json"]
    assert body["schema"]["properties"]["queries"]["maxItems"] == 9
    assert body["schema"]["properties"]["k"]["maximum"] == 8
    assert body["schema"]["properties"]["queries"]["items"]["maxLength"] == 77
    models = schemas.request_models(settings)
    assert models.predict.model_validate(body["example"]).k == 5
    assert models.explain.model_validate(schemas.EXPLAIN_EXAMPLE).query
    assert {"400", "401", "408", "413", "415", "422", "503"} <= set(post["responses"])
