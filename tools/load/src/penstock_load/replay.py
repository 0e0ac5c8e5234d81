"""Sends arrivals when they are due, whether or not earlier requests have received a response.

The ledger records each outcome.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from penstock_load.connection import encode_request
from penstock_load.exchange import CANCELED, UNANSWERED, Exchange
from penstock_load.inputs import RequestForm
from penstock_load.ledger import ENDINGS, Ending, LedgerLine, LedgerWriter
from penstock_load.pool import ConnectionPool
from penstock_load.tally import ReplayProgress, Tally
from penstock_load.target import Target
from penstock_load.trace import Arrival
from shared.errors import MALFORMED, ConfigurationError, Unavailable

ANSWER_LIMIT_S = 330.0
"""Time limit for responses after the last request is sent. It is longer than any model's longest
deadline.
"""
STOP_LIMIT_S = 10.0
LOOK_S = 1.0
POLL_S = 0.5
"""Pause before a prediction is polled again."""
SERVER_ERROR = 500
FAILED_RUN = 500
"""Status in the ledger for a prediction that was created but did not succeed."""
YIELD_EVERY = 32
"""If a replay is running late, it pauses to handle responses after this many requests."""


class Show(Protocol):
    """Shows the progress of a replay."""

    def __call__(self, look: ReplayProgress, tally: Tally) -> None:
        """Receives the events since the last call, and the totals so far."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The speed and limits of a replay.

    Args:
        speed: seconds of trace time per second.
        most_in_flight: at this limit, requests that become due are counted but not sent.
        duration_s: requests due after this time are not sent. 0 means no limit.
    """

    speed: float = 1.0
    most_in_flight: int = 1000
    duration_s: float = 0.0


class _Open(msgspec.Struct):
    """A request in the pool."""

    arrival: Arrival
    given_at_s: float
    due_s: float
    run_id: str = ""
    """ID of the prediction that the request created."""


class _Usage(msgspec.Struct):
    total_tokens: int | None = None
    prompt_tokens: int = 0


class _Error(msgspec.Struct):
    code: str | None = None


class _Answer(msgspec.Struct):
    """The relevant fields in a response body."""

    usage: _Usage | None = None
    error: _Error | None = None


class _StepOfRun(msgspec.Struct):
    id: str
    items: int
    failed: int


class _RunMetrics(msgspec.Struct):
    cost_usd: float | None = None
    steps: list[_StepOfRun] = []


class _Run(msgspec.Struct):
    """The relevant fields in a prediction."""

    id: str
    status: str
    metrics: _RunMetrics = msgspec.field(default_factory=_RunMetrics)

    @property
    def is_over(self) -> bool:
        return self.status in ("succeeded", "failed", "canceled")


class Replay:
    """A replay.

    Args:
        target: API and keys to use.
        run: prefix of all request ids.
        forms: request forms for the models of all arrivals, keyed by model.
        ledger: receives a line for each request.
        show: receives the progress every second.
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
        self._pool = ConnectionPool(target.server, pace.most_in_flight, self._handle_end)
        self._open: dict[int, _Open] = {}
        self._hang_ups: dict[int, asyncio.TimerHandle] = {}
        self._polls: dict[int, asyncio.TimerHandle] = {}
        """Predictions to poll after a pause."""
        self._is_abandoned = False
        self._decoder = msgspec.json.Decoder(_Answer)
        self._run_decoder = msgspec.json.Decoder(_Run)
        self._drained = asyncio.Event()
        self._stopped = asyncio.Event()
        self._trace_s = 0.0
        self.tally = Tally()
        self.took_s = 0.0
        self._failure: ConfigurationError | None = None

    @property
    def was_stopped(self) -> bool:
        """True if `stop` was called before the replay ended."""
        return self._stopped.is_set()

    def stop(self) -> None:
        """Stops sending. Open requests have STOP_LIMIT_S to finish."""
        self._stopped.set()
        asyncio.get_running_loop().call_later(STOP_LIMIT_S, self._abandon)

    async def run(self) -> None:
        """Sends everything, and returns once all requests have ended and are in the ledger.

        Raises:
            Unavailable: nothing is listening at the target; no request was sent.
            ConfigurationError: the ledger can no longer be written, so nothing more is sent.
        """
        try:
            await self._pool.open(1)
        except OSError as error:
            raise Unavailable(f"{self._target.url}: {error}") from error
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
            if len(self._open) >= self._pace.most_in_flight:
                self.tally.not_sent += 1
            else:
                self._send(number, arrival, due_s)

    async def _pause(self, wait_s: float) -> None:
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
        headers = self._headers(number, arrival)
        if form.is_run:
            headers["prefer"] = "wait"
        if arrival.deadline_s is not None:
            headers["x-penstock-deadline-ms"] = str(max(1, round(arrival.deadline_s * 1000)))
        if arrival.priority:
            headers["x-penstock-lane"] = arrival.priority
        path = self._target.path + form.path
        self._open[number] = _Open(arrival, time.time(), due_s)
        if arrival.cancel_after_s is not None:
            loop = asyncio.get_running_loop()
            self._hang_ups[number] = loop.call_later(arrival.cancel_after_s, self._hang_up, number)
        self._pool.send(
            number, encode_request(self._target.host_header, path, headers, content), due_s
        )

    def _headers(self, number: int, arrival: Arrival) -> dict[str, str]:
        return self._target.caller(arrival.tenant).headers | {"x-request-id": self._id_of(number)}

    def _hang_up(self, number: int) -> None:
        self._pool.cancel(number)
        self._end_poll(number, CANCELED)

    def _abandon(self) -> None:
        """Marks all open requests as unanswered."""
        self._is_abandoned = True
        self._pool.abandon()
        for number in list(self._polls):
            self._end_poll(number, UNANSWERED)

    def _end_poll(self, number: int, status: int) -> None:
        if (poll := self._polls.pop(number, None)) is not None:
            poll.cancel()
            waited_ms = (time.perf_counter() - self._open[number].due_s) * 1000
            self._close(Exchange(status, waited_ms, number=number), None, b"")

    def _poll_later(self, number: int) -> None:
        """Polls a prediction after a pause."""
        loop = asyncio.get_running_loop()
        self._polls[number] = loop.call_later(POLL_S, self._poll, number)

    def _poll(self, number: int) -> None:
        del self._polls[number]
        open_exchange = self._open[number]
        form = self._forms[open_exchange.arrival.model]
        path = f"{self._target.path}{form.path}/{open_exchange.run_id}"
        headers = self._headers(number, open_exchange.arrival)
        request = encode_request(self._target.host_header, path, headers, method="GET")
        self._pool.send(number, request, open_exchange.due_s)

    def _id_of(self, number: int) -> str:
        return f"{self._id}-{number:07}"

    def _handle_end(self, exchange: Exchange, body: list[bytes]) -> None:
        data, run, open_exchange = b"".join(body), None, self._open[exchange.number]
        if self._forms[open_exchange.arrival.model].is_run:
            run = self._read_run(exchange, data)
            if run is not None:
                open_exchange.run_id = run.id
            goes_on = exchange.status >= SERVER_ERROR if run is None else not run.is_over
            if open_exchange.run_id and goes_on and not self._is_abandoned:
                self._poll_later(exchange.number)
                return
        self._close(exchange, run, data)

    def _close(self, exchange: Exchange, run: _Run | None, body: bytes) -> None:
        number = exchange.number
        open_exchange = self._open.pop(number)
        if hang_up := self._hang_ups.pop(number, None):
            hang_up.cancel()
        line = self._line(exchange, open_exchange, body)
        if run is not None:
            line = _line_of_run(line, run)
        elif open_exchange.run_id and exchange.status > 0:  # it exists, but can't be read
            line = msgspec.structs.replace(line, ending="lost", status=0, code="")
        self.tally.add(line, exchange.round_trip_ms)
        try:
            self._ledger.write(line)
        except ConfigurationError as error:
            self._fail(error)
        if not self._open:
            self._drained.set()

    def _read_run(self, exchange: Exchange, body: bytes) -> _Run | None:
        """Returns the prediction in a response.

        None if it was rejected, or if the response is not Penstock's.
        """
        if not 200 <= exchange.status < 300 or exchange.request_id != self._id_of(exchange.number):
            return None
        try:
            return self._run_decoder.decode(body)
        except MALFORMED:
            return None

    def _line(self, exchange: Exchange, open_exchange: _Open, body: bytes) -> LedgerLine:
        arrival, now_s = open_exchange.arrival, time.time()
        is_answered = exchange.status > 0
        answer = self._read(body) if is_answered else _Answer()
        own_id = self._id_of(exchange.number)
        ending: Ending = "answered" if is_answered else ENDINGS[exchange.status]
        if is_answered and exchange.request_id != own_id:
            ending = "foreign"  # Penstock echoes the id
        caller = self._target.caller(arrival.tenant)
        return LedgerLine(
            id=own_id,
            tenant=caller.tenant,
            model=arrival.model,
            sent_at_s=open_exchange.given_at_s,
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
        """Returns the tokens of all items, each of which has a row."""
        if usage is None or usage.total_tokens is None:
            return None
        if self._forms[arrival.model].counts_input_once:
            return usage.total_tokens + (arrival.items - 1) * usage.prompt_tokens
        return usage.total_tokens

    def _read(self, body: bytes) -> _Answer:
        try:
            return self._decoder.decode(body)
        except MALFORMED:
            return _Answer()  # for example from a proxy

    async def _wait_for_answers(self) -> None:
        limit_s = STOP_LIMIT_S if self._stopped.is_set() else ANSWER_LIMIT_S
        giving_up = asyncio.get_running_loop().call_later(limit_s, self._abandon)
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
        self._show(self.tally.look(at_s, self._trace_s, len(self._open)), self.tally)


def _line_of_run(line: LedgerLine, run: _Run) -> LedgerLine:
    """Completes a line when its prediction ends.

    A line left open when the replay is stopped has no response.
    """
    if not run.is_over:
        return msgspec.structs.replace(line, ending="unanswered", status=0)
    steps = {step.id: (step.items, step.failed) for step in run.metrics.steps}
    return msgspec.structs.replace(
        line,
        status=200 if run.status == "succeeded" else FAILED_RUN,
        code="" if run.status == "succeeded" else run.status,
        items=sum(items for items, _ in steps.values()) or line.items,
        cost_usd=run.metrics.cost_usd,
        steps=steps,
    )
