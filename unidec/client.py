"""A client of `unidec serve`: standard library only, so that this one file can be copied into any program.

    from unidec.client import Client

    with Client("http://127.0.0.1:8080") as client:
        for label in client.predict_one("red shoes", k=5).labels:
            print(label.title, label.score)

Connections are kept open and reused. A request is retried where the server is busy (503), restarts or drops the
connection, after the pause that the server asks for; every route here only reads, so a retry does no harm.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

__all__ = ["Answer", "Client", "Label", "ServerError", "Unavailable"]

_RETRIED = (429, 502, 503, 504)  # of a server, or a proxy before it, that is busy or away
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0  # seconds
_MAX_ANSWER = 256 << 20  # bytes


class ServerError(Exception):
    """A request that the server refused.

    Attributes:
        status: HTTP status. what, where, got, expected, fix: from the server's JSON; "" where it is empty.
    """

    def __init__(self, status: int, what: str, where: str = "", got: str = "", expected: str = "", fix: str = ""):
        self.status, self.what, self.where, self.got, self.expected, self.fix = status, what, where, got, expected, fix
        parts = {"where": where, "got": got, "expected": expected, "fix": fix}
        super().__init__(
            "\n".join([f"{status}: {what}", *(f"  {name}: {text}" for name, text in parts.items() if text)])
        )


class Unavailable(ServerError):
    """No answer after all attempts: the server is not there, stays busy or is too slow. `status` is 0 without one."""


@dataclass(frozen=True)
class Label:
    """One label of an answer: `score` is what it is ranked by; de, clf, knn are its parts before their weights, None
    where the model has no such part."""

    uid: str
    title: str
    score: float
    de: float | None = None
    clf: float | None = None
    knn: float | None = None


@dataclass(frozen=True)
class Answer:
    """The labels of one query, best first.

    Attributes:
        labels: at most k.
        unknown_tokens: pieces of the query that the vocabulary lacks.
        unknown_filters: uids in `allow` and `deny` that no label has.
        model: {"sha256", "version"} of the model that answered; the same for all queries of one call.
    """

    labels: list[Label]
    unknown_tokens: int
    unknown_filters: int
    model: Mapping[str, Any]


class Client:
    """A server's address and how requests are retried. May be shared by threads.

    Args:
        url: of the server; a path in it (of a proxy) comes before every route.
        api_key: for a server that requires one.
        timeout: seconds without a byte, for one attempt.
        retries: further attempts where the server is busy or away.
        deadline: seconds after which no further attempt begins; None: only `retries` counts.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8080",
        *,
        api_key: str | None = None,
        timeout: float = 10.0,
        retries: int = 4,
        deadline: float | None = 60.0,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"not an address of a server: {url!r}; expected http://host:port")
        self._url, self._host, self._port, self._base = url, parts.hostname, parts.port, parts.path.rstrip("/")
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._timeout, self._retries, self._deadline = timeout, retries, deadline
        self._headers = {"Accept": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        self._idle: dict[int, list[http.client.HTTPConnection]] = {}  # by process: a fork has its own

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections that are kept. A later call opens a new one."""
        idle = self._idle.get(os.getpid(), [])
        while idle:
            idle.pop().close()

    # -- routes -------------------------------------------------------------------------------------------------------

    def predict(
        self, texts: Sequence[str], k: int | None = None, *, allow: Sequence[str] | None = None,
        deny: Sequence[str] | None = None, min_score: float | None = None, head: str | None = None,
    ) -> list[Answer]:  # fmt: skip
        """The best labels of each text, in the texts' order; the server's defaults where an argument is None.

        Args:
            texts: queries; the server bounds their number and length.
            k: labels a query.
            allow: uids of the only labels to choose from. deny: uids of labels to leave out.
            min_score: labels that score less are left out.
            head: "both", "de" or "clf".

        Raises:
            ServerError: the request is wrong. Unavailable: no answer.
        """
        if any(isinstance(value, str) for value in (texts, allow, deny)):
            raise TypeError("texts, allow and deny take a list of strings; predict_one takes one text")
        wanted = {"queries": list(texts), "k": k, "allow": allow, "deny": deny, "min_score": min_score, "head": head}
        found = self._request("POST", "/predict", wanted)
        return [
            Answer(
                [Label(**{name: one.get(name) for name in Label.__dataclass_fields__}) for one in each["labels"]],
                each.get("unknown_tokens", 0), each.get("unknown_filters", 0), found["model"],
            )
            for each in found["predictions"]
        ]  # fmt: skip

    def predict_one(self, text: str, k: int | None = None, **filters: Any) -> Answer:
        """`predict` of one text."""
        return self.predict([text], k, **filters)[0]

    def explain(self, text: str, k: int | None = None, **filters: Any) -> dict[str, Any]:
        """Why a text gets its labels: {"labels", "weights", "nearest", "tokens", ...}, see docs/serving.md; arguments
        and errors as of `predict`."""
        return self._request("POST", "/explain", {"query": text, "k": k, **filters})

    def label(self, uid: str) -> dict[str, Any] | None:
        """{"uid", "title", ...} of a label; None where there is none."""
        try:
            return self._request("GET", f"/labels/{quote(uid, safe='')}")
        except ServerError as error:
            if error.status == 404:
                return None
            raise

    def labels(self, prefix: str = "", limit: int | None = None) -> list[dict[str, Any]]:
        """Labels whose uid or title begins so, or has a word that does."""
        query = {"prefix": prefix} | ({} if limit is None else {"limit": str(limit)})
        found: list[dict[str, Any]] = self._request("GET", f"/labels?{urlencode(query)}")["labels"]
        return found

    def version(self) -> dict[str, Any]:
        """What serves: the model's hash and version, the data's hash, the runtime."""
        return self._request("GET", "/version")

    def ready(self) -> bool:
        """Whether a model is loaded and answers; False also where the server is not there. One attempt."""
        try:
            return bool(self._request("GET", "/readyz", retries=0)["ready"])
        except ServerError:
            return False

    def wait_until_ready(self, seconds: float = 60.0) -> None:
        """Returns when a model answers.

        Raises:
            Unavailable: none does after `seconds`.
        """
        end = time.monotonic() + seconds
        while not self.ready():
            if time.monotonic() >= end:
                raise Unavailable(0, f"not ready after {seconds:g} s", where=self._url, fix="look at the server's log")
            time.sleep(0.1)

    # -- one request --------------------------------------------------------------------------------------------------

    def _request(self, method: str, path: str, body: Any = None, retries: int | None = None) -> dict[str, Any]:
        """The JSON of an answer; retried where that may help."""
        data, headers = None, self._headers
        if body is not None:
            given = {name: value for name, value in body.items() if value is not None}
            text = json.dumps(given, ensure_ascii=False, allow_nan=False)
            data = text.encode("utf-8", "surrogatepass")  # the server refuses lone surrogates
            headers = headers | {"Content-Type": "application/json"}
        end = math.inf if self._deadline is None else time.monotonic() + self._deadline
        left, pause = self._retries if retries is None else retries, _FIRST_PAUSE
        while True:
            wait = pause * (0.5 + random.random())  # clients that were refused together do not come back together
            try:
                status, answer, retry_after = self._attempt(method, self._base + path, data, headers)
                if status == 200:
                    return _json(answer)
                wait, error = max(wait, retry_after), _refusal(status, answer)
            except (OSError, http.client.HTTPException) as lost:
                error = Unavailable(
                    0, "the server does not answer", where=self._url, got=f"{type(lost).__name__}: {lost}",
                    fix="is it running, and is this its address?",
                )  # fmt: skip
            if not isinstance(error, Unavailable) or not left or time.monotonic() + wait > end:
                raise error
            time.sleep(wait)
            left, pause = left - 1, min(2 * pause, _LONGEST_PAUSE)

    def _attempt(
        self, method: str, path: str, data: bytes | None, headers: Mapping[str, str]
    ) -> tuple[int, bytes, float]:
        """Status, body, and the seconds of Retry-After; the connection is kept when the answer was read to its end."""
        idle = self._idle.setdefault(os.getpid(), [])
        while True:
            try:
                connection, was_idle = idle.pop(), True
            except IndexError:
                connection, was_idle = self._kind(self._host, self._port, timeout=self._timeout), False
            kept = False
            try:
                connection.request(method, path, body=data, headers=dict(headers))
                response = connection.getresponse()
                answer = response.read(_MAX_ANSWER + 1)
                if len(answer) > _MAX_ANSWER:
                    raise http.client.HTTPException(f"an answer of more than {_MAX_ANSWER} bytes")
                if kept := not response.will_close:
                    idle.append(connection)
                return response.status, answer, _seconds(response.getheader("Retry-After"))
            except (ConnectionError, http.client.BadStatusLine):
                if not was_idle:  # else the server had closed an idle connection: no failed attempt
                    raise
            finally:
                if not kept:
                    connection.close()


def _seconds(header: str | None) -> float:
    """Retry-After in seconds, bounded; a date or nonsense counts as 0."""
    return min(float(header), _LONGEST_PAUSE) if header and header.isdecimal() else 0.0


def _json(answer: bytes) -> dict[str, Any]:
    try:
        found = json.loads(answer)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ServerError(200, "not an answer of unidec serve", got=repr(answer[:200]), fix="is the address right?")
    return found


def _refusal(status: int, answer: bytes) -> ServerError:
    """The error that the server sent."""
    try:
        sent = json.loads(answer)["error"]
        parts = {name: str(sent.get(name) or "") for name in ("what", "where", "got", "expected", "fix")}
    except (ValueError, KeyError, TypeError, AttributeError):
        parts = {"what": http.client.responses.get(status, "an error"), "got": answer[:200].decode("utf-8", "replace")}
    return (Unavailable if status in _RETRIED else ServerError)(status, **parts)
