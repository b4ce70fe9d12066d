"""What tests of the flows share: Prefect's server, stand-ins for flows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers import shared_prefect


@pytest.fixture(scope="package")
def prefect_server(prefect_api: str) -> Iterator[None]:
    """Flows called meanwhile in this process report to a real server."""
    with shared_prefect.connected(prefect_api):
        yield


@pytest.fixture(autouse=True)
def no_temporary_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs a flow's command line in this process starts no server."""
    from flows import server

    monkeypatch.setattr(server, "start", lambda: 0)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch):
    """`stand_in(module, name, answer)`: takes the flow's place on the command line; gives its
    calls.
    """

    def stand_in(module, name: str, answer: object) -> list[dict]:
        calls: list[dict] = []

        def called(**given):
            calls.append(given)
            if isinstance(answer, Exception):
                raise answer
            return answer

        called.parameters = getattr(module, name).parameters
        monkeypatch.setattr(module, name, called)
        return calls

    return stand_in
