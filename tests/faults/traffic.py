"""Callers that need a response: each request is repeated under its Idempotency-Key until it gets
one, which is then checked.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self
from uuid import uuid4

import aiohttp
import numpy as np
from numpy.typing import NDArray

from api.dispatch.request import COST_HEADER
from tests.faults.world import MODEL, TENANTS
from tests.keys import bearer

ANSWER_LIMIT_S = 150.0
"""A request that has no response by then is considered lost."""
TRY_LIMIT_S = 45.0
DEADLINE_MS = "30000"
COSINE = 0.9999
TEXTS = 64
ALONE = 4
"""Number of requests sent at the end, one at a time.

A job that is stuck until the next message arrives shows up here, because no message follows.
"""
PREDICTION_SHARE, CANCEL_SHARE, REPEAT_SHARE, HANG_UP_SHARE = 0.1, 0.1, 0.02, 0.05
PATIENCE_S = 0.2
"""Maximum time that callers wait before they hang up."""
TRANSIENT = frozenset({409, 429, 500, 502, 503, 504})

Vector = NDArray[np.float32]


@dataclass
class Tally:
    """All requests' outcomes."""

    sent: int = 0
    answered: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    answered_twice: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    tries: Counter[str] = field(default_factory=Counter)
    """Failed attempts, keyed by the status or error that the caller got."""
    not_healed: list[str] = field(default_factory=list)
    """Requests after the last fault that had to wait until their deadline."""
    expected_rows: dict[str, str] = field(default_factory=dict)
    """The status each request's row must have, keyed by request id; `any` for canceled requests."""
    told_usd: dict[str, float] = field(default_factory=dict)
    """The cost in each response, keyed by request id. Replays and lost responses do not report a
    cost.
    """
    longest_s: float = 0.0

    @property
    def ended(self) -> int:
        """Number of requests that have a final response."""
        return self.answered.total()


def text_of(number: int) -> str:
    """One of TEXTS texts, all different."""
    words = ["river", "engine", "violin", "glacier", "market", "comet", "harbour", "orchard"]
    first, second = words[number % 8], words[number // 8 % 8]
    return f"The {first} of number {number} met a {second} on its way to town {number * 7 % 13}."


class Traffic:
    """Concurrent callers, spread over several API instances.

    Args:
        urls: one per API instance; a caller switches to the next one when one fails.
        seed: determines the requests and their order.
        pause_s: average seconds that each caller waits between two requests.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        in_flight: int,
        requests: int,
        seed: int,
        pause_s: float = 0.0,
    ) -> None:
        self._urls = urls
        self._in_flight = in_flight
        self._numbers = iter(range(requests))
        self._random = random.Random(seed)
        self._pause_s = pause_s
        self._next_url = itertools.count()
        self._vectors: list[Vector] = []
        self.tally = Tally()

    async def __aenter__(self) -> Self:
        """Requests every text once, before any fault."""
        timeout = aiohttp.ClientTimeout(total=TRY_LIMIT_S, sock_connect=5.0)
        connector = aiohttp.TCPConnector(limit=2 * self._in_flight)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=connector)
        self._vectors = [await self._reference(number) for number in range(TEXTS)]
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._session.close()

    async def run(self, goes_on: Callable[[], bool]) -> None:
        """Sends requests until all are sent and `goes_on` returns False.

        Waits for all requests still in flight.
        """
        async with asyncio.TaskGroup() as callers:
            for _ in range(self._in_flight):
                callers.create_task(self._call(goes_on))

    async def alone(self) -> None:
        """Sends requests one after another, with all faults healed; none of them may wait until its
        deadline.
        """
        for number in range(ALONE):
            late = self.tally.tries["504"]
            found = await self._insist(
                "POST",
                "/v1/embeddings",
                _body(number),
                None,
                {"Cache-Control": "no-store"} | _key_of(number),
            )
            if found is None or self.tally.tries["504"] > late:
                self.tally.not_healed.append(f"text {number}, alone")

    async def _reference(self, number: int) -> Vector:
        async with self._session.post(
            f"{self._urls[0]}/v1/embeddings", json=_body(number), headers=_key_of(number)
        ) as response:
            answer = await response.json()
            self.tally.told_usd[response.headers["x-request-id"]] = _cost_usd(response)
            self.tally.expected_rows[response.headers["x-request-id"]] = "succeeded"
            return np.asarray(answer["data"][0]["embedding"], np.float32)

    async def _call(self, goes_on: Callable[[], bool]) -> None:
        while next(self._numbers, None) is not None or goes_on():
            self.tally.sent += 1
            number, key, began_s = self._random.randrange(TEXTS), str(uuid4()), time.monotonic()
            drawn = self._random.random()
            if drawn < HANG_UP_SHARE:
                await self._hang_up(number)
            else:
                is_prediction = drawn < HANG_UP_SHARE + PREDICTION_SHARE
                await (self._predict if is_prediction else self._embed)(number, key)
            self.tally.longest_s = max(self.tally.longest_s, time.monotonic() - began_s)
            await asyncio.sleep(self._random.uniform(0.0, 2 * self._pause_s))

    async def _hang_up(self, number: int) -> None:
        """Sends one request and hangs up if no response arrives soon.

        Only the request's rows show its cost.
        """
        url, limit_s = self._urls[next(self._next_url) % len(self._urls)], PATIENCE_S
        timeout = aiohttp.ClientTimeout(total=self._random.uniform(0.0, limit_s))
        headers = {"Cache-Control": "no-store"} | _key_of(number)
        with suppress(aiohttp.ClientError, TimeoutError):
            async with self._session.post(
                f"{url}/v1/embeddings", json=_body(number), headers=headers, timeout=timeout
            ) as response:
                await response.read()
        self.tally.answered["hung up or not"] += 1

    async def _embed(self, number: int, key: str) -> None:
        # Most are computed each time; the others may be served from the cache or joined.
        headers = {} if self._random.random() < 0.2 else {"Cache-Control": "no-store"}
        headers |= _key_of(number)
        found = await self._insist("POST", "/v1/embeddings", _body(number), key, headers)
        if found is None:
            return
        answer, request_id, was_replayed = found
        self.tally.answered["embedding"] += 1
        if not was_replayed:
            self.tally.expected_rows[request_id] = "succeeded"
        self._check(number, answer["data"][0]["embedding"], request_id)
        if self._random.random() < REPEAT_SHARE:
            again = await self._insist("POST", "/v1/embeddings", _body(number), key, headers)
            if again is not None and again[0] != answer:
                self.tally.answered_twice.append(request_id)

    async def _predict(self, number: int, key: str) -> None:
        body = {"version": MODEL, "input": {"text": text_of(number)}}
        headers = _key_of(number)
        found = await self._insist("POST", "/v1/predictions", body, key, headers)
        if found is None:
            return
        prediction = found[0]["id"]
        is_canceled = self._random.random() < CANCEL_SHARE
        if is_canceled:
            path = f"/v1/predictions/{prediction}/cancel"
            await self._insist("POST", path, {}, str(uuid4()), headers)
        until_s, states = time.monotonic() + ANSWER_LIMIT_S, list[str]()
        while time.monotonic() < until_s:
            read = await self._insist("GET", f"/v1/predictions/{prediction}", None, None, headers)
            if read is None:
                return
            states.append(read[0]["status"])
            if states[-1] in ("succeeded", "failed", "canceled"):
                self._take_prediction(number, prediction, read[0], is_canceled=is_canceled)
                return
            await asyncio.sleep(0.1)
        self.tally.lost.append(f"prediction {prediction} is still {states[-1:]}")

    def _take_prediction(
        self, number: int, prediction: str, read: dict[str, Any], *, is_canceled: bool
    ) -> None:
        status = read["status"]
        self.tally.answered[f"prediction {status}"] += 1
        self.tally.expected_rows[prediction] = "any" if is_canceled else status
        metrics = read.get("metrics") or {}
        self.tally.told_usd[prediction] = float(metrics.get("cost_usd") or 0)
        if status == "succeeded":
            output = read["output"]
            self._check(number, output[0] if isinstance(output[0], list) else output, prediction)
        elif not (status == "canceled" and is_canceled):
            self.tally.wrong.append(f"prediction {prediction} {status}: {read.get('error')}")

    def _check(self, number: int, vector: Sequence[float], request_id: str) -> None:
        if float(np.dot(np.asarray(vector, np.float32), self._vectors[number])) < COSINE:
            self.tally.wrong.append(request_id)

    async def _insist(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        key: str | None,
        headers: dict[str, str],
    ) -> tuple[Any, str, bool] | None:
        """The response, its request id, and whether it was replayed.

        None if no response arrived in time; the request then counts as lost.

        A permanent rejection does not count as a response either, because these requests are valid.
        """
        until_s, pause_s, seen = time.monotonic() + ANSWER_LIMIT_S, 0.05, "nothing"
        given = (
            headers
            | {"X-Penstock-Deadline-Ms": DEADLINE_MS}
            | ({"Idempotency-Key": key} if key else {})
        )
        url = self._urls[next(self._next_url) % len(self._urls)]
        while time.monotonic() < until_s:
            try:
                async with self._session.request(
                    method, url + path, json=body, headers=given
                ) as response:
                    answer = await response.json(content_type=None)
                    if response.status < 300:
                        if (
                            path == "/v1/embeddings"
                            and "idempotent-replayed" not in response.headers
                        ):
                            told = self.tally.told_usd
                            told[response.headers["x-request-id"]] = _cost_usd(response)
                        return (
                            answer,
                            response.headers["x-request-id"],
                            "idempotent-replayed" in response.headers,
                        )
                    seen = f"{response.status}"
                    if response.status not in TRANSIENT:
                        self.tally.wrong.append(f"{method} {path}: {response.status} {answer}")
                        return None
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                seen = type(error).__name__
            self.tally.tries[seen] += 1
            url = self._urls[next(self._next_url) % len(self._urls)]
            await asyncio.sleep(pause_s * self._random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, 1.0)
        self.tally.lost.append(f"{method} {path}: {seen}")
        return None


def _body(number: int) -> dict[str, Any]:
    return {"model": MODEL, "input": text_of(number), "encoding_format": "float"}


def _key_of(number: int) -> dict[str, str]:
    """The header with the key under which this text is always requested."""
    names = list(TENANTS)
    return bearer(names[number % len(names)])


def _cost_usd(response: aiohttp.ClientResponse) -> float:
    return float(response.headers[COST_HEADER])
