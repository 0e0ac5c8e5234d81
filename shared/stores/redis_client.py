"""A connection to Redis that many callers share: round trips under a hard limit of time, behind a breaker.

Each operation has a batcher. It sends one round trip at a time, and what is asked meanwhile goes with the next one. So
128 callers cost one connection and a few commands, not 128. After FAILURES round trips in a row that failed or ran out
of time the breaker opens: calls return at once, and one task retries in the background until Redis answers in time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Generic, NamedTuple, Self, TypeAlias, TypeVar

import redis.asyncio
from prometheus_client import Counter, Gauge
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError, ResponseError

from shared.backoff import backoff
from shared.errors import ConfigurationError, Unavailable
from shared.stores.redis_scripts import Script

FAILURES = 3
"""Round trips in a row that must fail before the breaker opens; one alone may be a hiccup of this machine."""
CONNECT_LIMIT_S = 1.0
"""Limit of the background retry, which may have to resolve a name and shake hands (TLS)."""
LONGEST_RETRY_S = 2.0
ROUND_TRIP_ENTRIES = 512
"""A round trip takes on waiting calls until it carries this many entries."""
WAITING_ENTRIES = 16384
"""Entries that may wait for the next round trip; above it a call fails."""

# uvloop says RuntimeError for a write to a connection that closed under it.
_FOREIGN_ERRORS = (RedisError, OSError, EOFError, RuntimeError)

Argument: TypeAlias = str | bytes | float
Sent = TypeVar("Sent")
Got = TypeVar("Got")
log = logging.getLogger(__name__)


class RedisLink:
    """One use of Redis by this process; opening it contacts nobody.

    Args:
        use: what for, in logs.
        url: `redis://`, `rediss://` or `unix://` URL.
        timeout_s: the longest that one round trip may take.
        retry_s: first pause before a Redis that failed is tried again, in the background.
        up: set to 1 while Redis is being asked, 0 while the breaker is open.
        errors: counts round trips that failed, by operation.
        field: the setting that has the URL, named where the URL is wrong.
    """

    def __init__(
        self,
        use: str,
        url: str,
        *,
        timeout_s: float,
        retry_s: float,
        up: Gauge,
        errors: Counter,
        field: str = "redis_url",
    ) -> None:
        self._use = use
        self._url = url
        self._timeout_s = timeout_s
        self._retry_s = retry_s
        self._gauge = up
        self._errors = errors
        self._field = field
        self._failures = 0
        self._up = asyncio.Event()
        self._tripped = asyncio.Event()
        self._batchers: list[Batcher[Any, Any]] = []
        self._tasks: list[asyncio.Task[None]] = []

    def batcher(
        self, operation: str, send: Callable[[list[Sent]], Coroutine[Any, Any, list[Got]]]
    ) -> Batcher[Sent, Got]:
        """Returns a batcher of this link. Ask before the link is opened. `send` does one round trip with `client`."""
        made = Batcher(operation, send, self._timeout_s, self._judge, self._errors)
        self._batchers.append(made)
        return made

    def commands(self, store: str) -> Commands:
        """Returns commands with a batcher of their own. Ask before the link is opened. `store` names it in errors."""
        return Commands(self, store)

    async def __aenter__(self) -> Self:
        # One for each batcher, one that listens, and one that retries.
        self.client = self._connect(len(self._batchers) + 2)
        self._up.set()
        self._gauge.set(1)
        self._tasks = [
            asyncio.create_task(run) for run in (*(batcher.run() for batcher in self._batchers), self._recover())
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._up.clear()
        await self.client.aclose()

    async def run_script(self, script: Script, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        """Runs a script in a round trip of its own; for the `send` of a batcher.

        Raises:
            RedisError: Redis did not answer, or refused.
        """
        try:
            return await self.client.evalsha(script.digest, len(keys), *keys, *args)
        except NoScriptError:  # a Redis that started since forgot it; EVAL has it learn the script again
            return await self.client.eval(script.text, len(keys), *keys, *args)

    def _connect(self, connections: int) -> redis.asyncio.Redis:
        try:
            # No retries by redis-py: they would double every limit here.
            return redis.asyncio.Redis.from_url(
                self._url,
                socket_timeout=CONNECT_LIMIT_S,
                socket_connect_timeout=CONNECT_LIMIT_S,
                retry=Retry(NoBackoff(), 0),
                max_connections=connections,
            )
        except ValueError as error:
            reason = f"PENSTOCK_{self._field.upper()}: {error}"
            raise ConfigurationError(reason, field=self._field) from error

    @property
    def is_up(self) -> bool:
        """Whether the breaker is closed."""
        return self._up.is_set()

    async def wait_up(self, limit_s: float) -> bool:
        """Waits until the breaker is closed, at most `limit_s`."""
        try:
            async with asyncio.timeout(limit_s):
                await self._up.wait()
        except TimeoutError:
            return False
        return True

    def _judge(self, error: Exception | None) -> bool:
        """Counts one round trip; says whether the breaker is (still) closed."""
        if error is None:
            self._failures = 0
        elif not isinstance(error, ResponseError):
            # A refusal (out of memory, read-only replica) is an answer in time: asking on costs nothing.
            self._failures += 1
            if self._failures >= FAILURES and self.is_up:
                log.warning("redis is out of reach", extra={"use": self._use, "reason": repr(error)})
                self._up.clear()
                self._tripped.set()
                self._gauge.set(0)
        return self.is_up

    async def _recover(self) -> None:
        """Waits for the breaker to open, then tries Redis until it answers within the limit of a round trip."""
        while True:
            await self._tripped.wait()
            for pause_s in backoff(self._retry_s, LONGEST_RETRY_S):
                if await self._answers_in_time():
                    break
                await asyncio.sleep(pause_s)
            log.info("redis answers again", extra={"use": self._use})
            self._failures = 0
            self._tripped.clear()
            self._up.set()
            self._gauge.set(1)

    async def _answers_in_time(self) -> bool:
        try:
            # The first may connect; only the second, on the open connection, tells how fast Redis is.
            await _within(CONNECT_LIMIT_S, self._ping())
            await _within(self._timeout_s, self._ping())
        except _FOREIGN_ERRORS:
            return False
        return True

    async def _ping(self) -> None:
        await self.client.ping()


class RedisStore:
    """A store in Redis: an async context manager that opens and closes its link."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link

    async def __aenter__(self) -> Self:
        await self._link.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._link.__aexit__(kind, error, trace)

    @property
    def is_up(self) -> bool:
        """Whether Redis is being asked. False between a failure and the retry that succeeds."""
        return self._link.is_up

    async def wait_up(self, limit_s: float) -> bool:
        """Waits until Redis is being asked, at most `limit_s`. Returns whether it is."""
        return await self._link.wait_up(limit_s)


class _Call(NamedTuple):
    words: tuple[Argument, ...]
    script: Script | None = None


class Commands:
    """Runs scripts and single commands. Those that come together share a round trip."""

    def __init__(self, link: RedisLink, store: str) -> None:
        self._link = link
        self._store = store
        self._batcher = link.batcher("call", self._send)

    async def run(self, *words: Argument) -> Any:
        """Runs a command and returns its answer.

        Raises:
            Unavailable: Redis did not answer, and may have done it all the same. Or it refused.
        """
        return await self._run(_Call(words))

    async def run_script(self, script: Script, keys: Sequence[str], *args: Argument) -> Any:
        """Runs a script and returns its answer.

        Raises:
            Unavailable: Redis did not answer, and may have done it all the same. Or it refused.
        """
        return await self._run(_Call((len(keys), *keys, *args), script))

    async def _run(self, call: _Call) -> Any:
        answers = await self._batcher.call([call]) if self._link.is_up else None
        if answers is None or isinstance(answers[0], Exception):
            reason = "out of reach" if answers is None else f"refusing: {answers[0]}"
            raise Unavailable(f"{self._store} is {reason}; try again")
        return answers[0]

    async def _send(self, calls: list[_Call]) -> list[Any]:
        answers = await self._pipelined([_words(call, by_digest=True) for call in calls])
        unknown = [index for index, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
        if unknown:  # a Redis that started since forgot them; EVAL has it learn them again
            again = await self._pipelined([_words(calls[index], by_digest=False) for index in unknown])
            for index, answer in zip(unknown, again, strict=True):
                answers[index] = answer
        return answers

    async def _pipelined(self, commands: list[tuple[Argument, ...]]) -> list[Any]:
        pipeline = self._link.client.pipeline(transaction=False)
        for words in commands:
            pipeline.execute_command(*words)
        # A refusal, as when its memory is full, is the answer to that call alone.
        return list(await pipeline.execute(raise_on_error=False))


def _words(call: _Call, *, by_digest: bool) -> tuple[Argument, ...]:
    """The command as it goes over the wire."""
    if call.script is None:
        return call.words
    start = ("EVALSHA", call.script.digest) if by_digest else ("EVAL", call.script.text)
    return start + call.words


class Batcher(Generic[Sent, Got]):
    """Calls of one operation, one round trip at a time; a call that comes while one is under way joins the next."""

    def __init__(
        self,
        operation: str,
        send: Callable[[list[Sent]], Coroutine[Any, Any, list[Got]]],
        timeout_s: float,
        judge: Callable[[Exception | None], bool],
        errors: Counter,
    ) -> None:
        self._operation = operation
        self._send = send
        self._timeout_s = timeout_s
        self._judge = judge
        self._errors = errors
        self._waiting: deque[tuple[Sequence[Sent], asyncio.Future[list[Got] | None]]] = deque()
        self._waiting_entries = 0
        self._arrived = asyncio.Event()

    async def call(self, entries: Sequence[Sent]) -> list[Got] | None:
        """One answer per entry, or None where Redis failed, was too slow or has too much waiting already."""
        if self._waiting_entries + len(entries) > WAITING_ENTRIES:
            self._errors.labels(self._operation).inc()
            return None
        answers: asyncio.Future[list[Got] | None] = asyncio.get_running_loop().create_future()
        self._waiting.append((entries, answers))
        self._waiting_entries += len(entries)
        self._arrived.set()
        # The round trip under way, this one's own, and as many again for calls that stand before it.
        await asyncio.wait([answers], timeout=4 * self._timeout_s)
        return answers.result() if answers.done() else None

    async def run(self) -> None:
        """Does the round trips, until canceled; the link runs it."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._waiting:
                await self._round_trip()

    async def _round_trip(self) -> None:
        calls, entries = [], list[Sent]()
        while self._waiting and len(entries) < ROUND_TRIP_ENTRIES:
            calls.append(self._waiting.popleft())
            entries.extend(calls[-1][0])
        self._waiting_entries -= len(entries)
        answers = await self._ask(entries)
        start = 0
        for sent, future in calls:
            if not future.done():
                future.set_result(None if answers is None else answers[start : start + len(sent)])
            start += len(sent)

    async def _ask(self, entries: list[Sent]) -> list[Got] | None:
        error: Exception | None = None
        answers: list[Got] | None = None
        try:
            answers = await _within(self._timeout_s, self._send(entries))
        except _FOREIGN_ERRORS as caught:
            error = caught
            self._errors.labels(self._operation).inc()
        if not self._judge(error):
            self._give_up()
        return answers

    def _give_up(self) -> None:
        """The breaker opened: whoever waits in line goes on without Redis, now."""
        while self._waiting:
            _, future = self._waiting.popleft()
            if not future.done():
                future.set_result(None)
        self._waiting_entries = 0


async def _within(limit_s: float, call: Coroutine[Any, Any, Got]) -> Got:
    """What `call` returns within `limit_s`.

    Not asyncio.timeout: when this process itself was held up, the answer and the timer are due in the same turn of the
    loop, and there the timer would win; waiting on a task sees the answer.

    Raises:
        TimeoutError: it did not; it was canceled.
    """
    task = asyncio.ensure_future(call)
    try:
        await asyncio.wait([task], timeout=limit_s)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=limit_s)
    if task.cancelled() or not task.done():
        raise TimeoutError(f"no answer in {limit_s} s")
    return task.result()
