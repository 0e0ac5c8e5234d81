"""Sends arrivals when they are due, whether or not earlier ones are answered.

The outcome of each goes into the ledger.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from infra.load.connection import encode_request
from infra.load.exchange import Exchange
from infra.load.inputs import RequestForm
from infra.load.ledger import ENDINGS, Ending, LedgerLine, LedgerWriter
from infra.load.pool import ConnectionPool
from infra.load.tally import ReplayProgress, Tally
from infra.load.target import Target
from infra.load.trace import Arrival
from shared.errors import ConfigurationError

ANSWER_LIMIT_S = 330.0
"""After the last request: more than the longest deadline of a model."""
STOP_LIMIT_S = 10.0
LOOK_S = 1.0
YIELD_EVERY = 32
"""A replay that is late handles answers after this number of requests."""


class Show(Protocol):
    """Shows how a replay goes."""

    def __call__(self, look: ReplayProgress, tally: Tally) -> None:
        """Gets what happened since the last call, and everything so far."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The speed and limits of a replay.

    Args:
        speed: seconds of the trace in a second.
        most_in_flight: requests that are due at this limit are not sent, but counted.
        duration_s: requests that are due later are not sent. 0: no such limit.
    """

    speed: float = 1.0
    most_in_flight: int = 1000
    duration_s: float = 0.0


class _Open(msgspec.Struct):
    """A request that was given to the pool."""

    arrival: Arrival
    given_at_s: float


class _Usage(msgspec.Struct):
    total_tokens: int | None = None
    prompt_tokens: int = 0


class _Error(msgspec.Struct):
    code: str | None = None


class _Answer(msgspec.Struct):
    """The relevant fields of a response body."""

    usage: _Usage | None = None
    error: _Error | None = None


class Replay:
    """One replay.

    Args:
        target: whom to ask, and with which keys.
        run: the start of the id of each request.
        arrivals: in order of time.
        forms: request forms by model, for all models of the arrivals.
        pace: speed and limits.
        seed: seed of generated inputs.
        ledger: gets a line for each request.
        show: gets the progress every second.
    """

    def __init__(
        self,
        target: Target,
        run: str,
        arrivals: Sequence[Arrival],
        forms: Mapping[str, RequestForm],
        pace: Pace,
        *,
        seed: int,
        ledger: LedgerWriter,
        show: Show,
    ) -> None:
        self._target, self._id, self._arrivals = target, run, arrivals
        self._forms, self._pace, self._seed = forms, pace, seed
        self._ledger, self._show = ledger, show
        self._pool = ConnectionPool(target.server, pace.most_in_flight, self._ended)
        self._open: dict[int, _Open] = {}
        self._hang_ups: dict[int, asyncio.TimerHandle] = {}
        self._decoder = msgspec.json.Decoder(_Answer)
        self._drained = asyncio.Event()
        self._stopped = asyncio.Event()
        self._trace_s = 0.0
        self.tally = Tally()
        self.took_s = 0.0
        self._failure: ConfigurationError | None = None

    def stop(self) -> None:
        """Sends nothing more. What is open gets STOP_LIMIT_S to end."""
        self._stopped.set()
        asyncio.get_running_loop().call_later(STOP_LIMIT_S, self._pool.abandon)

    async def run(self) -> None:
        """Sends everything, and returns when all of it has ended and is in the ledger.

        Raises:
            OSError: nothing listens at the target, before anything was sent.
            ConfigurationError: the ledger can't be written any more. Without it nothing is sent.
        """
        await self._pool.open(1)
        self._began_s, self._began_at_s = time.perf_counter(), time.time()
        looking = asyncio.create_task(self._look())
        try:
            await self._send_all()
            await self._wait_for_answers()
        finally:
            looking.cancel()
            await asyncio.wait([looking])
            self._pool.close()
        self.took_s = time.perf_counter() - self._began_s
        self._report()
        if self._failure is not None:
            raise self._failure

    def _fail(self, error: ConfigurationError) -> None:
        if self._failure is None:
            self._failure = error
            self.stop()

    async def _send_all(self) -> None:
        first_s = self._arrivals[0].at_s if self._arrivals else 0.0
        for number, arrival in enumerate(self._arrivals):
            due_s = self._began_s + (arrival.at_s - first_s) / self._pace.speed
            if self._pace.duration_s and due_s > self._began_s + self._pace.duration_s:
                return
            wait_s = due_s - time.perf_counter()
            if wait_s > 0 or number % YIELD_EVERY == 0:
                await self._pause(wait_s)
            if self._stopped.is_set():
                return
            self._trace_s = arrival.at_s
            self.tally.due += 1
            if self._pool.in_flight >= self._pace.most_in_flight:
                self.tally.not_sent += 1
            else:
                self._send(number, arrival, due_s)

    async def _pause(self, wait_s: float) -> None:
        """Waits this time, or until it is stopped."""
        if wait_s < LOOK_S:
            await asyncio.sleep(max(0.0, wait_s))
            return
        try:
            async with asyncio.timeout(wait_s):
                await self._stopped.wait()
        except TimeoutError:
            return

    def _send(self, number: int, arrival: Arrival, due_s: float) -> None:
        form = self._forms[arrival.model]
        group = f"{self._seed}x{arrival.group or f'own{number}'}"
        content = msgspec.json.encode(form.body(arrival, group))
        headers = self._target.caller(arrival.tenant).headers | {
            "x-request-id": self._id_of(number)
        }
        if arrival.deadline_s is not None:
            headers["x-penstock-deadline-ms"] = str(max(1, round(arrival.deadline_s * 1000)))
        if arrival.priority:
            headers["x-penstock-lane"] = arrival.priority
        path = self._target.path + form.path
        self._open[number] = _Open(arrival, time.time())
        if arrival.cancel_after_s is not None:
            loop = asyncio.get_running_loop()
            self._hang_ups[number] = loop.call_later(
                arrival.cancel_after_s, self._pool.cancel, number
            )
        self._pool.send(
            number, encode_request(self._target.host_header, path, headers, content), due_s
        )

    def _id_of(self, number: int) -> str:
        return f"{self._id}-{number:07}"

    def _ended(self, exchange: Exchange, body: list[bytes]) -> None:
        number = exchange.number
        opened = self._open.pop(number)
        if hang_up := self._hang_ups.pop(number, None):
            hang_up.cancel()
        line = self._line(exchange, opened, body)
        self.tally.add(line, exchange.round_trip_ms)
        try:
            self._ledger.write(line)
        except ConfigurationError as error:
            self._fail(error)
        if not self._open:
            self._drained.set()

    def _line(self, exchange: Exchange, opened: _Open, body: list[bytes]) -> LedgerLine:
        arrival, now_s = opened.arrival, time.time()
        is_answered = exchange.status > 0
        answer = self._read(b"".join(body)) if is_answered else _Answer()
        own_id = self._id_of(exchange.number)
        ending: Ending = "answered" if is_answered else ENDINGS[exchange.status]
        if is_answered and exchange.request_id != own_id:
            ending = "foreign"  # Penstock echoes the id
        caller = self._target.caller(arrival.tenant)
        return LedgerLine(
            id=own_id,
            tenant=caller.tenant,
            model=arrival.model,
            sent_at_s=opened.given_at_s,
            ended_at_s=now_s,
            items=arrival.items,
            ending=ending,
            status=exchange.status if is_answered else 0,
            code=(answer.error.code or "") if answer.error else "",
            cache=exchange.cache,
            tokens=self._tokens(arrival, answer.usage),
            cost_usd=exchange.cost_usd if is_answered else None,
            key_id=caller.key_id,
        )

    def _tokens(self, arrival: Arrival, usage: _Usage | None) -> int | None:
        """The tokens of all items, each of which has a row."""
        if usage is None or usage.total_tokens is None:
            return None
        if self._forms[arrival.model].counts_input_once:
            return usage.total_tokens + (arrival.items - 1) * usage.prompt_tokens
        return usage.total_tokens

    def _read(self, body: bytes) -> _Answer:
        try:
            return self._decoder.decode(body)
        except msgspec.DecodeError:
            return _Answer()  # of a proxy, say

    async def _wait_for_answers(self) -> None:
        limit_s = STOP_LIMIT_S if self._stopped.is_set() else ANSWER_LIMIT_S
        giving_up = asyncio.get_running_loop().call_later(limit_s, self._pool.abandon)
        while self._open:
            self._drained.clear()
            await self._drained.wait()
        giving_up.cancel()

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self._report()

    def _report(self) -> None:
        at_s = time.perf_counter() - self._began_s
        try:
            self._ledger.flush()
        except ConfigurationError as error:
            self._fail(error)
        self._show(self.tally.look(at_s, self._trace_s, self._pool.in_flight), self.tally)
