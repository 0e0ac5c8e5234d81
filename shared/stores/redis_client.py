"""A connection to Redis shared by many callers, with a hard time limit and a circuit breaker.

Each operation has a batcher. The batcher makes one round trip at a time, and calls made during a
round trip share the next one. So 128 callers use one connection and a few commands instead of 128.
The breaker opens after FAILURES consecutive round trips that failed or were too slow. Calls then
return immediately, and a background task retries until Redis responds in time.

Redis runs a Lua script atomically, so no other command comes between its reads and writes. A script
is one or more .lua files: functions first, then the code that calls them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from importlib import resources
from pathlib import PurePosixPath
from typing import Any, Generic, NamedTuple, Self, TypeAlias, TypeVar

import hiredis
import redis.asyncio
from prometheus_client import Counter, Gauge
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import InvalidResponse, NoScriptError, RedisError, ResponseError

from shared.errors import ConfigurationError, Unavailable
from shared.process.concurrency import backoff

NO_REDIS = "redis://127.0.0.1:1/0"
"""URL for tests without Redis.

Nothing listens there, so Penstock behaves as if Redis were unreachable.
"""
KEY_PREFIX = "penstock:"
"""Prefix of every key."""
COPIED_BYTES = 16 * 1024
"""Larger words are sent without copying them into a packed command."""
ROUND_TRIP_ENTRIES = 512
"""A round trip accepts waiting calls until it has this many entries."""
WAITING_ENTRIES = 16384
"""Maximum number of entries waiting for the next round trip. Beyond this, calls fail."""
WAITED_TRIPS = 3
"""How long a call may wait for its round trip to begin, in round trips of the longest duration: the
current one, and two for earlier calls.
"""

# uvloop raises RuntimeError when writing to a closed connection.
REDIS_FAILURES = (RedisError, OSError, EOFError, RuntimeError)

Sent = TypeVar("Sent")
Got = TypeVar("Got")

FAILURES = 3
"""Consecutive failed round trips before the breaker opens.

A single failure may just be a hiccup on this machine.
"""
CONNECT_LIMIT_S = 1.0
"""Time limit for the background retry, which may need name resolution and a TLS handshake."""
MAX_RETRY_S = 2.0
_INCOMPLETE = object()
"""hiredis's reply while the actual one is incomplete."""
LATE_ITERATIONS = 2
"""Event loop iterations in which replies may still be read after their time limit."""
EVICTS_ALL = "allkeys"
"""Prefix of eviction policies that also evict keys without a TTL."""
Argument: TypeAlias = str | bytes | float

log = logging.getLogger(__name__)


class Script(NamedTuple):
    """A script, and the digest by which Redis identifies it after it has run once (EVALSHA)."""

    text: str
    digest: str


def load_script(*files: str) -> Script:
    """Reads a script's files and joins them in the given order.

    Args:
        files: paths relative to the repository, for example `shared/stores/record_claim.lua`.
    """
    text = "\n".join(_read(PurePosixPath(file)) for file in files)
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


def _read(file: PurePosixPath) -> str:
    package = ".".join(file.parent.parts)
    return resources.files(package).joinpath(file.name).read_text(encoding="utf-8")


class _Waiting(NamedTuple, Generic[Sent, Got]):
    """A call, and when it was made, on the event loop's clock."""

    entries: Sequence[Sent]
    answers: asyncio.Future[list[Got] | None]
    since_s: float

    def answer(self, answers: list[Got] | None) -> None:
        if not self.answers.done():
            self.answers.set_result(answers)


class Batcher(Generic[Sent, Got]):
    """Makes one operation's calls, one round trip at a time.

    Calls made during a round trip join the next one.

    Args:
        send: makes a round trip. Each exchange in it raises TimeoutError after `timeout_s`.
    """

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
        self._waiting: deque[_Waiting[Sent, Got]] = deque()
        self._waiting_entries = 0
        self._trips: asyncio.Task[None] | None = None
        """Task that makes round trips while calls are waiting."""

    async def call(self, entries: Sequence[Sent]) -> list[Got] | None:
        """Returns one reply per entry, or None after a failure or if the queue is full."""
        if self._waiting_entries + len(entries) > WAITING_ENTRIES:
            self._errors.labels(self._operation).inc()
            return None
        loop = asyncio.get_running_loop()
        answers: asyncio.Future[list[Got] | None] = loop.create_future()
        self._waiting.append(_Waiting(entries, answers, loop.time()))
        self._waiting_entries += len(entries)
        if self._trips is None:
            # It starts in the next event loop iteration, with all the calls from this one.
            self._trips = loop.create_task(self._make_trips())
        return await answers

    async def close(self) -> None:
        """Cancels the current round trip. Its calls, and waiting calls, get no reply."""
        if self._trips is not None:
            self._trips.cancel()
            await asyncio.gather(self._trips, return_exceptions=True)
        self._give_up()

    async def _make_trips(self) -> None:
        try:
            while self._waiting:
                await self._round_trip()
        finally:
            self._trips = None

    async def _round_trip(self) -> None:
        calls, entries = [], list[Sent]()
        since_s = asyncio.get_running_loop().time() - WAITED_TRIPS * self._timeout_s
        while self._waiting and len(entries) < ROUND_TRIP_ENTRIES:
            call = self._waiting.popleft()
            self._waiting_entries -= len(call.entries)
            if call.since_s < since_s:
                call.answer(None)
                continue
            calls.append(call)
            entries.extend(call.entries)
        try:
            answers = await self._ask(entries) if entries else None
        except BaseException:  # this was canceled, and nothing else would end the calls
            for call in calls:
                call.answer(None)
            raise
        start = 0
        for call in calls:
            end = start + len(call.entries)
            call.answer(None if answers is None else answers[start:end])
            start = end

    async def _ask(self, entries: list[Sent]) -> list[Got] | None:
        error: Exception | None = None
        answers: list[Got] | None = None
        try:
            answers = await self._send(entries)
        except REDIS_FAILURES as caught:
            error = caught
            self._errors.labels(self._operation).inc()
        except Exception:
            # For example, a word that can't be encoded. It must not end the task for later calls.
            log.exception("a round trip to Redis failed", extra={"operation": self._operation})
            return None
        if not self._judge(error):
            self._give_up()
        return answers

    def _give_up(self) -> None:
        """Returns None to all waiting calls."""
        while self._waiting:
            self._waiting.popleft().answer(None)
        self._waiting_entries = 0


async def within(limit_s: float, call: Coroutine[Any, Any, Got]) -> Got:
    """Returns the result of `call`, and cancels it after `limit_s`.

    Unlike asyncio.timeout, it returns a reply that arrives in the same event loop iteration as the
    timer, which happens if this process has stalled.

    Raises:
        TimeoutError: there was no result in time.
    """
    task = asyncio.ensure_future(call)
    # If we are canceled, the call's error is never retrieved, and the event loop would report it as
    # lost.
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    try:
        await asyncio.wait([task], timeout=limit_s)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=limit_s)
    if task.cancelled() or not task.done():
        raise TimeoutError(f"no response within {limit_s} s")
    return task.result()


def _pack(words: Sequence[Argument]) -> bytes:
    packed: bytes = hiredis.pack_command(tuple(words))  # type: ignore[arg-type]  # stub: one word
    return packed


class _PacksInC:
    """A connection that packs commands with hiredis, as synchronous redis-py does.

    redis-py's asyncio connections pack in Python, which took a sixth of the API's CPU time per
    prediction.
    """

    def pack_command(self, *words: Argument) -> list[bytes]:
        """Returns a command in wire format.

        Its first argument may contain several words, as in redis-py.
        """
        if isinstance(words[0], str) and " " in words[0]:
            words = (*words[0].split(), *words[1:])
        has_bytes = bytes in map(type, words)
        if not (
            has_bytes and any(type(word) is bytes and len(word) > COPIED_BYTES for word in words)
        ):
            return [_pack(words)]
        packed = [b"*%d\r\n" % len(words)]
        for word in words:
            if isinstance(word, bytes):
                packed += [b"$%d\r\n" % len(word), word, b"\r\n"]
            else:
                packed.append(_pack([word]).removeprefix(b"*1\r\n"))
        return packed

    def pack_commands(self, commands: Iterable[Sequence[Argument]]) -> list[bytes]:
        return [packed for words in commands for packed in self.pack_command(*words)]

    def hand_over(self, protocol: asyncio.Protocol) -> asyncio.WriteTransport:
        """Lets `protocol` receive everything from now on, in place of redis-py."""
        transport: asyncio.WriteTransport = self._writer.transport  # type: ignore[attr-defined]
        transport.set_protocol(protocol)
        return transport

    def parse_error(self, reply: str) -> Exception:
        error: Exception = self._parser.parse_error(reply)  # type: ignore[attr-defined]
        return error


class _Channel:
    """A connection for round trips, opened and closed by redis-py.

    In between, it bypasses redis-py's and asyncio's streams, which took twice as long as everything
    else in a round trip.
    """

    def __init__(self, connection: AbstractConnection) -> None:
        self._connection = connection
        self._replies: _Replies | None = None
        """Set while the connection is open."""

    async def exchange(self, commands: Sequence[Sequence[Argument]], timeout_s: float) -> list[Any]:
        """Sends commands together and returns their replies. Opens the connection if necessary.

        A rejected command's reply is a ResponseError.

        Raises:
            RedisError, OSError: there is no connection, it was lost, or it was too slow.
        """
        until_s = asyncio.get_running_loop().time() + timeout_s
        try:
            if self._replies is None or self._replies.is_closed:
                await self.close()
                await within(timeout_s, self._connection.connect())  # type: ignore[no-untyped-call]
                assert isinstance(self._connection, _PacksInC), "made by the pool; this is a bug"
                self._replies = _Replies(self._connection)
            packed = self._connection.pack_commands(commands)
            return await self._replies.follow(packed, len(commands), until_s)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        self._replies = None
        await self._connection.disconnect(nowait=True)


class _Replies(asyncio.Protocol):
    """An open connection's replies."""

    def __init__(self, connection: _PacksInC) -> None:
        self._reader = hiredis.Reader(
            protocolError=InvalidResponse,
            replyError=connection.parse_error,
            notEnoughData=_INCOMPLETE,
        )
        self._replies: list[Any] = []
        self._expected = 0
        self._arrived: asyncio.Future[list[Any]] | None = None
        """Set while replies are expected."""
        self._transport = connection.hand_over(self)

    @property
    def is_closed(self) -> bool:
        return self._transport.is_closing()

    async def follow(self, packed: Sequence[bytes], expected: int, until_s: float) -> list[Any]:
        """Sends commands, and returns their replies.

        Args:
            expected: how many replies to wait for.
            until_s: time limit, on the event loop's clock.
        """
        loop = asyncio.get_running_loop()
        self._replies, self._expected, self._arrived = [], expected, loop.create_future()
        self._transport.writelines(packed)
        timer = loop.call_at(until_s, self._expire, LATE_ITERATIONS)
        try:
            return await self._arrived
        finally:
            timer.cancel()
            self._arrived = None

    def data_received(self, data: bytes) -> None:
        """Collects replies. Redis may also push messages, which are ignored."""
        self._reader.feed(data)
        try:
            while (reply := self._reader.gets()) is not _INCOMPLETE:
                if not isinstance(reply, hiredis.PushNotification):
                    self._collect(reply)
        except RedisError as error:
            self._fail(error)

    def _collect(self, reply: Any) -> None:
        """Adds a reply.

        Raises:
            RedisError: the connection can't be used.
        """
        if self._arrived is None or len(self._replies) == self._expected:
            raise InvalidResponse("Redis sent a reply without a command")
        if isinstance(reply, redis.ConnectionError):  # for example, Redis is loading its data
            raise reply
        self._replies.append(reply)
        if len(self._replies) == self._expected and not self._arrived.done():
            self._arrived.set_result(self._replies)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called when the connection is closed, by either side."""
        self._fail(exc or ConnectionResetError("Redis closed the connection"))

    def _fail(self, error: Exception) -> None:
        self._transport.close()
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_exception(error)

    def _expire(self, iterations: int) -> None:
        """Fails a round trip that has taken too long, unless its replies have just arrived.

        If this process has stalled, the timer runs before the replies are read.
        """
        if self._arrived is None or self._arrived.done():
            return
        if iterations:
            asyncio.get_running_loop().call_soon(self._expire, iterations - 1)
        else:
            self._fail(TimeoutError("Redis did not respond in time"))


async def find_eviction_fault(client: redis.asyncio.Redis) -> str:
    """Returns the reason this Redis instance might drop keys without a TTL. Empty if it keeps them.

    Raises:
        RedisError, OSError: Redis did not respond.
    """
    try:
        memory = await client.info("memory")
    except ResponseError:  # these credentials are not allowed to query it
        return ""
    policy = str(memory.get("maxmemory_policy", ""))
    if not policy.startswith(EVICTS_ALL):
        return ""
    return (
        f"maxmemory-policy {policy} loses running predictions when Redis is full; "
        "set it to volatile-lru or noeviction"
    )


class RedisLink:
    """One use of Redis by this process. Opening it does not connect.

    Args:
        retry_s: upper bound on the first pause before a background retry.
        field: the setting that contains the URL, named in error messages.
        checks_policy: True to check, after a start or an outage, that Redis does not evict keys
            without a TTL. If the policy is wrong, an error is logged. Only one user of each Redis
            should check.
    """

    def __init__(
        self,
        use: str,
        url: str,
        *,
        timeout_s: float = 1.0,
        retry_s: float = 0.25,
        up: Gauge,
        errors: Counter,
        field: str = "redis_url",
        checks_policy: bool = False,
    ) -> None:
        self._use = use
        self._checks_policy = checks_policy
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
        self._idle: list[_Channel] = []
        """Connections for round trips: at most as many as have ever been used concurrently."""

    def batcher(
        self, operation: str, send: Callable[[list[Sent]], Coroutine[Any, Any, list[Got]]]
    ) -> Batcher[Sent, Got]:
        """Adds a batcher, which the link closes. `send` makes one round trip with `exchange`."""
        batcher = Batcher(operation, send, self._timeout_s, self._judge, self._errors)
        self._batchers.append(batcher)
        return batcher

    def commands(self, store: str) -> Commands:
        """Adds a batcher for commands. `store` is its name in error messages."""
        return Commands(self, store)

    async def __aenter__(self) -> Self:
        # One connection listens and one retries. Round trips use separate connections.
        self.client = self._connect(2)
        self._set_up(is_up=True)
        self._recovering = asyncio.create_task(self._recover())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._recovering.cancel()
        closing = (self._recovering, *(batcher.close() for batcher in self._batchers))
        await asyncio.gather(*closing, return_exceptions=True)
        self._up.clear()
        for channel in self._idle:
            await channel.close()
        self._idle.clear()
        await self.client.aclose()

    async def exchange(self, commands: Sequence[Sequence[Argument]]) -> list[Any]:
        """Sends commands together and returns their replies, for use in a batcher's `send`.

        A rejected command's reply is a ResponseError. This bypasses redis-py's pool, retries, and
        records, which take three times as long as everything else.

        Raises:
            RedisError, OSError: there is no connection, or it was lost.
        """
        pool = self.client.connection_pool
        channel = self._idle.pop() if self._idle else _Channel(pool.make_connection())  # type: ignore[no-untyped-call]
        try:
            answers = await channel.exchange(commands, self._timeout_s)
        finally:
            self._idle.append(channel)
        shapes = {
            name: self.client.response_callbacks.get(str(name))
            for name in {words[0] for words in commands}
        }
        return [
            answer
            if (shape := shapes[words[0]]) is None or isinstance(answer, ResponseError)
            else shape(answer)
            for answer, words in zip(answers, commands, strict=True)
        ]

    async def run_script(
        self, script: Script, keys: Sequence[str], args: Sequence[Argument]
    ) -> Any:
        """Runs a script in a separate round trip, for use in a batcher's `send`.

        Raises:
            RedisError: Redis did not respond, or rejected the call.
        """
        (answer,) = await self.exchange([("EVALSHA", script.digest, len(keys), *keys, *args)])
        if isinstance(answer, NoScriptError):  # Redis restarted and needs the script again
            (answer,) = await self.exchange([("EVAL", script.text, len(keys), *keys, *args)])
        if isinstance(answer, ResponseError):
            raise answer
        return answer

    def _connect(self, connections: int) -> redis.asyncio.Redis:
        try:
            # No redis-py retries, because they would double every limit here. No timeout either,
            # because it would need a timer per reply, and each round trip is limited as a whole.
            client = redis.asyncio.Redis.from_url(
                self._url,
                socket_timeout=None,
                socket_connect_timeout=CONNECT_LIMIT_S,
                retry=Retry(NoBackoff(), 0),
                max_connections=connections,
            )
        except ValueError as error:
            reason = f"PENSTOCK_{self._field.upper()}: {error}"
            raise ConfigurationError(reason, field=self._field) from error
        pool = client.connection_pool
        plain = pool.connection_class  # depends on the URL: TCP, TLS, or a local socket
        pool.connection_class = type(plain.__name__, (_PacksInC, plain), {})
        return client

    @property
    def is_up(self) -> bool:
        """True if the breaker is closed."""
        return self._up.is_set()

    async def wait_up(self, limit_s: float) -> bool:
        """Waits up to `limit_s` for the breaker to close."""
        try:
            async with asyncio.timeout(limit_s):
                await self._up.wait()
        except TimeoutError:
            return False
        return True

    def _judge(self, error: Exception | None) -> bool:
        """Counts one round trip. Returns whether the breaker is closed."""
        if error is None:
            self._failures = 0
        elif not isinstance(error, ResponseError):
            # A rejection (out of memory, read-only replica) is a timely reply, so it isn't a
            # failure.
            self._failures += 1
            if self._failures >= FAILURES and self.is_up:
                log.warning("redis is unreachable", extra={"use": self._use, "reason": repr(error)})
                self._set_up(is_up=False)
        return self.is_up

    def _set_up(self, *, is_up: bool) -> None:
        """Closes or opens the breaker."""
        self._failures = 0
        self._gauge.set(is_up)
        if is_up:
            self._tripped.clear()
            self._up.set()
        else:
            self._up.clear()
            self._tripped.set()

    async def _recover(self) -> None:
        """Runs until closed: checks the policy, waits until the breaker opens, and retries."""
        while True:
            if self._checks_policy:
                await self._check_policy()
            await self._tripped.wait()
            for pause_s in backoff(self._retry_s, MAX_RETRY_S):
                if await self._answers_in_time():
                    break
                await asyncio.sleep(pause_s)
            log.info("redis answers again", extra={"use": self._use})
            self._set_up(is_up=True)

    async def _check_policy(self) -> None:
        """Logs an error if the policy evicts keys that must be kept.

        Retries until Redis responds or the breaker opens. In the latter case, the policy is checked
        when Redis is back.
        """
        for pause_s in backoff(self._retry_s, MAX_RETRY_S):
            try:
                fault = await within(CONNECT_LIMIT_S, find_eviction_fault(self.client))
            except REDIS_FAILURES:
                # Unlike asyncio.wait_for, this is still canceled if the breaker opens meanwhile.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._tripped.wait()
                    return
                continue
            if fault:
                log.error("redis may lose data", extra={"use": self._use, "reason": fault})
            return

    async def _answers_in_time(self) -> bool:
        try:
            # The first ping may have to connect. Only the second one shows how fast Redis is.
            await within(CONNECT_LIMIT_S, self._ping())
            await within(self._timeout_s, self._ping())
        except REDIS_FAILURES:
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

    async def __aexit__(self, *exc: object) -> None:
        await self._link.__aexit__(*exc)

    @property
    def is_up(self) -> bool:
        """True if Redis is in use. False between a failure and the retry that succeeds."""
        return self._link.is_up

    async def wait_up(self, limit_s: float) -> bool:
        """Waits up to `limit_s` for Redis to become available. Returns whether it is."""
        return await self._link.wait_up(limit_s)


class _Call(NamedTuple):
    words: tuple[Argument, ...]
    script: Script | None = None


class Commands:
    """Runs scripts and single commands. Concurrent calls share a round trip."""

    def __init__(self, link: RedisLink, store: str) -> None:
        self._link = link
        self._store = store
        self._batcher = link.batcher("call", self._send)

    async def run(self, *words: Argument) -> Any:
        """Runs a command and returns its reply.

        Raises:
            Unavailable: Redis rejected the command or did not respond. The command may still have
                run.
        """
        return await self._run(_Call(words))

    async def run_script(self, script: Script, keys: Sequence[str], *args: Argument) -> Any:
        """Runs a script and returns its reply.

        Raises:
            Unavailable: Redis rejected the script or did not respond. The script may still have
                run.
        """
        return await self._run(_Call((len(keys), *keys, *args), script))

    async def _run(self, call: _Call) -> Any:
        answers = await self._batcher.call([call]) if self._link.is_up else None
        if answers is None or isinstance(answers[0], Exception):
            reason = "unreachable" if answers is None else f"refusing: {answers[0]}"
            raise Unavailable(
                f"{self._store} is {reason}; try again",
                public=f"{self._store} is unreachable; try again",
            )
        return answers[0]

    async def _send(self, calls: list[_Call]) -> list[Any]:
        answers = await self._link.exchange([_words(call, by_digest=True) for call in calls])
        unknown = [
            index for index, answer in enumerate(answers) if isinstance(answer, NoScriptError)
        ]
        if unknown:  # Redis restarted and needs the scripts again
            again = await self._link.exchange(
                [_words(calls[index], by_digest=False) for index in unknown]
            )
            for index, answer in zip(unknown, again, strict=True):
                answers[index] = answer
        return answers


def _words(call: _Call, *, by_digest: bool) -> tuple[Argument, ...]:
    if call.script is None:
        return call.words
    start = ("EVALSHA", call.script.digest) if by_digest else ("EVAL", call.script.text)
    return start + call.words
