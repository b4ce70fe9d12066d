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


class ServerError(Exception):
    """A request that the server refused.

    Attributes:
        status: HTTP status. what, where, got, expected, fix: from the server's JSON; "" where it is empty.
    """

    what = where = got = expected = fix = ""

    def __init__(self, status: int, **parts: str) -> None:
        self.status = status
        vars(self).update(parts)
        lines = (f"  {name}: {text}" for name, text in parts.items() if name != "what" and text)
        super().__init__("\n".join([f"{status}: {self.what}", *lines]))


class Unavailable(ServerError):
    """No answer after all attempts: the server is not there, stays busy or is too slow. `status` is 0 without one."""


@dataclass(frozen=True)
class Label:
    """`score` is what labels are ranked by; de, clf, knn are its parts before their weights, None where the model has
    no such part."""

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
        self._idle: list[http.client.HTTPConnection] = []
        self._process = os.getpid()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections that are kept. A later call opens a new one."""
        while self._idle:
            self._idle.pop().close()

    # -- routes -------------------------------------------------------------------------------------------------------

    def predict(
        self, texts: Sequence[str], k: int | None = None, *, allow: Sequence[str] | None = None,
        deny: Sequence[str] | None = None, min_score: float | None = None, head: str | None = None,
        tail: float | None = None,
    ) -> list[Answer]:  # fmt: skip
        """The best labels of each text, in the texts' order; the server's defaults where an argument is None.

        Args:
            texts: queries; the server bounds their number and length.
            k: labels a query.
            allow: uids of the only labels to choose from. deny: uids of labels to leave out.
            min_score: labels that score less are left out.
            head: "both", "de" or "clf".
            tail: above 0 rare labels rank higher, below 0 lower; for bundles with a learnt fusion.

        Raises:
            ServerError: the request is wrong. Unavailable: no answer.
        """
        if any(isinstance(value, str) for value in (texts, allow, deny)):
            raise TypeError("texts, allow and deny take a list of strings; predict_one takes one text")
        chosen = {"k": k, "allow": allow, "deny": deny, "min_score": min_score, "head": head, "tail": tail}
        found = self._request("POST", "/predict", {"queries": list(texts), **chosen})
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
        return list(self._request("GET", f"/labels?{urlencode(query)}")["labels"])

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
                what, fix = f"not ready after {seconds:g} s", "look at the server's log"
                raise Unavailable(0, what=what, where=self._url, fix=fix)
            time.sleep(0.1)

    # -- one request --------------------------------------------------------------------------------------------------

    def _request(self, method: str, path: str, body: Any = None, retries: int | None = None) -> dict[str, Any]:
        """The JSON of an answer; retried where that may help."""
        data, headers = None, dict(self._headers)
        if body is not None:
            given = {name: value for name, value in body.items() if value is not None}
            text = json.dumps(given, ensure_ascii=False, allow_nan=False)
            data = text.encode("utf-8", "surrogatepass")  # the server refuses lone surrogates
            headers["Content-Type"] = "application/json"
        end = math.inf if self._deadline is None else time.monotonic() + self._deadline
        left, pause = self._retries if retries is None else retries, _FIRST_PAUSE
        while True:
            wait = pause * (0.5 + random.random())  # clients that were refused together do not come back together
            try:
                status, answer, retry_after = self._attempt(method, self._base + path, data, headers)
                found = _json(answer)
                if status == 200 and found:
                    return found
                wait, error = max(wait, retry_after), _refusal(status, found.get("error"), answer)
            except (OSError, http.client.HTTPException) as lost:
                error = Unavailable(
                    0, what="the server does not answer", where=self._url, got=f"{type(lost).__name__}: {lost}",
                    fix="is it running, and is this its address?",
                )  # fmt: skip
            if not isinstance(error, Unavailable) or not left or time.monotonic() + wait > end:
                raise error
            time.sleep(wait)
            left, pause = left - 1, min(2 * pause, _LONGEST_PAUSE)

    def _attempt(self, method: str, path: str, data: bytes | None, headers: dict[str, str]) -> tuple[int, bytes, float]:
        """Status, body, and the seconds of Retry-After; the connection is kept when the answer was read to its end."""
        if self._process != os.getpid():  # a fork has connections of its own
            self._process, self._idle = os.getpid(), []
        while True:
            try:
                connection, was_idle = self._idle.pop(), True
            except IndexError:
                connection, was_idle = self._kind(self._host, self._port, timeout=self._timeout), False
            try:
                connection.request(method, path, body=data, headers=headers)
                response = connection.getresponse()
                answer, asked = response.read(), response.getheader("Retry-After") or ""
            except Exception as error:
                connection.close()
                # an idle connection that the server had closed is no failed attempt
                if not was_idle or not isinstance(error, (ConnectionError, http.client.BadStatusLine)):
                    raise
            else:
                self._idle.append(connection)  # opens again if the server closes it after this answer
                return response.status, answer, min(float(asked), _LONGEST_PAUSE) if asked.isdecimal() else 0.0


def _json(answer: bytes) -> dict[str, Any]:
    try:
        found = json.loads(answer)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _refusal(status: int, sent: Any, answer: bytes) -> ServerError:
    """The error that the server sent, as far as it is one."""
    if isinstance(sent, dict):
        parts = {name: str(sent.get(name) or "") for name in ("what", "where", "got", "expected", "fix")}
    else:
        what = "not an answer of unidec serve" if status == 200 else http.client.responses.get(status, "an error")
        parts = {"what": what, "got": answer[:200].decode("utf-8", "replace")}
    return (Unavailable if status in _RETRIED else ServerError)(status, **parts)
