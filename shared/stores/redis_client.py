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
from functools import partial
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
OnEnd = Callable[[list[Any], Exception | None], None]
"""Called when a round trip is over, with its replies, or with the reason that there are none."""

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


class Call(NamedTuple):
    """A command, or a call of a script: its words without the script itself."""

    words: Sequence[Argument]
    script: Script | None = None

    def pack(self, *, by_digest: bool) -> Sequence[Argument]:
        """Returns all words, with the script's digest or with its text."""
        if self.script is None:
            return self.words
        if by_digest:
            return ("EVALSHA", self.script.digest, *self.words)
        return ("EVAL", self.script.text, *self.words)


class RoundTrip(NamedTuple, Generic[Got]):
    """The calls for several entries, and the function that reads their replies.

    `parse` returns one result per entry. A rejected call's reply is a ResponseError, which `parse`
    may raise.
    """

    calls: Sequence[Call]
    parse: Callable[[list[Any]], list[Got]]


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

    Calls made during a round trip join the next one. No task runs for a round trip, because that
    would cost more than the rest of it.

    Args:
        plan: returns the round trip for some entries.
    """

    def __init__(
        self,
        link: RedisLink,
        operation: str,
        plan: Callable[[list[Sent]], RoundTrip[Got]],
        errors: Counter,
    ) -> None:
        self._link = link
        self._operation = operation
        self._plan = plan
        self._errors = errors
        self._waiting: deque[_Waiting[Sent, Got]] = deque()
        self._waiting_entries = 0
        self._sent: list[_Waiting[Sent, Got]] = []
        """The calls in the current round trip."""
        self._is_busy = False
        """True while there are calls, until the last one's round trip is over."""
        self._times_closed = 0

    async def call(self, entries: Sequence[Sent]) -> list[Got] | None:
        """Returns one reply per entry, or None after a failure or if the queue is full."""
        if not entries:
            return []
        if self._waiting_entries + len(entries) > WAITING_ENTRIES:
            self._errors.labels(self._operation).inc()
            return None
        loop = asyncio.get_running_loop()
        answers: asyncio.Future[list[Got] | None] = loop.create_future()
        self._waiting.append(_Waiting(entries, answers, loop.time()))
        self._waiting_entries += len(entries)
        if not self._is_busy:
            # It starts in the next event loop iteration, with all the calls from this one.
            self._is_busy = True
            loop.call_soon(self._begin_trip, self._times_closed)
        return await answers

    def close(self) -> None:
        """Returns None to all calls. Their round trip may end after the link is open again."""
        self._times_closed += 1
        self._answer(None)
        self._give_up()
        self._is_busy = False

    def _begin_trip(self, times_closed: int) -> None:
        if times_closed != self._times_closed:
            return
        entries = self._take_waiting()
        if not entries:
            self._is_busy = False
            return
        try:
            calls, parse = self._plan(entries)
            self._link.exchange(calls, partial(self._end_trip, times_closed, parse))
        except Exception as error:
            loop = asyncio.get_running_loop()
            loop.call_soon(self._end_trip, times_closed, None, [], error)

    def _take_waiting(self) -> list[Sent]:
        """Returns the entries of the calls in the next round trip."""
        entries = list[Sent]()
        since_s = asyncio.get_running_loop().time() - WAITED_TRIPS * self._link.timeout_s
        while self._waiting and len(entries) < ROUND_TRIP_ENTRIES:
            call = self._waiting.popleft()
            self._waiting_entries -= len(call.entries)
            if call.since_s < since_s:
                call.answer(None)
                continue
            self._sent.append(call)
            entries.extend(call.entries)
        return entries

    def _end_trip(
        self,
        times_closed: int,
        parse: Callable[[list[Any]], list[Got]] | None,
        replies: list[Any],
        error: Exception | None,
    ) -> None:
        if times_closed != self._times_closed:
            return
        answers: list[Got] | None = None
        try:
            if error is not None:
                raise error
            assert parse is not None, "a round trip without a plan fails; this is a bug"
            answers = parse(replies)
        except REDIS_FAILURES as caught:
            error = caught
            self._errors.labels(self._operation).inc()
        except Exception:
            # For example, a word that can't be encoded. Redis is fine, and later calls are not
            # affected.
            log.exception("a round trip to Redis failed", extra={"operation": self._operation})
            self._answer(None)
            self._begin_trip(times_closed)
            return
        self._answer(answers)
        if not self._link.judge(error):
            self._give_up()
        self._begin_trip(times_closed)

    def _answer(self, answers: list[Got] | None) -> None:
        """Ends the calls in the current round trip."""
        start = 0
        for call in self._sent:
            end = start + len(call.entries)
            call.answer(None if answers is None else answers[start:end])
            start = end
        self._sent.clear()

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
        for word in words:
            if type(word) is bytes and len(word) > COPIED_BYTES:
                break
        else:
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
        self._opening: asyncio.Task[None] | None = None

    def send(self, commands: Sequence[Sequence[Argument]], timeout_s: float, on_end: OnEnd) -> None:
        """Sends commands together. Opens the connection if necessary.

        Args:
            on_end: called once, later, with the replies, or with a RedisError or OSError: there is
                no connection, it was lost, or it was too slow. A rejected command's reply is a
                ResponseError.
        """
        until_s = asyncio.get_running_loop().time() + timeout_s
        if self._replies is None or self._replies.is_closed:
            opening = self._open_and_send(commands, timeout_s, until_s, on_end)
            self._opening = asyncio.create_task(opening)
            return
        packed = self._pack_commands(commands)
        self._replies.follow(packed, len(commands), until_s, on_end)

    def _pack_commands(self, commands: Sequence[Sequence[Argument]]) -> list[bytes]:
        assert isinstance(self._connection, _PacksInC), "made by the pool; this is a bug"
        return self._connection.pack_commands(commands)

    async def _open_and_send(
        self,
        commands: Sequence[Sequence[Argument]],
        timeout_s: float,
        until_s: float,
        on_end: OnEnd,
    ) -> None:
        try:
            packed = self._pack_commands(commands)
            await self._disconnect()
            await within(timeout_s, self._connection.connect())  # type: ignore[no-untyped-call]
            assert isinstance(self._connection, _PacksInC), "made by the pool; this is a bug"
            self._replies = _Replies(self._connection)
            self._replies.follow(packed, len(commands), until_s, on_end)
        except Exception as error:
            await self._disconnect()
            on_end([], error)

    async def close(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        await self._disconnect()

    async def _disconnect(self) -> None:
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
        self._on_end: OnEnd | None = None
        """Set while replies are expected."""
        self._timer: asyncio.TimerHandle | None = None
        self._transport = connection.hand_over(self)

    @property
    def is_closed(self) -> bool:
        return self._transport.is_closing()

    def follow(self, packed: Sequence[bytes], expected: int, until_s: float, on_end: OnEnd) -> None:
        """Sends commands.

        Args:
            expected: how many replies to wait for.
            until_s: time limit, on the event loop's clock.
            on_end: called once, later, with the replies or an error.
        """
        self._transport.writelines(packed)
        self._replies, self._expected, self._on_end = [], expected, on_end
        self._timer = asyncio.get_running_loop().call_at(until_s, self._expire, LATE_ITERATIONS)

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
        if self._on_end is None:
            raise InvalidResponse("Redis sent a reply without a command")
        if isinstance(reply, redis.ConnectionError):  # for example, Redis is loading its data
            raise reply
        self._replies.append(reply)
        if len(self._replies) == self._expected:
            self._end(self._replies, None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called when the connection is closed, by either side."""
        self._fail(exc or ConnectionResetError("Redis closed the connection"))

    def _fail(self, error: Exception) -> None:
        self._transport.close()
        self._end([], error)

    def _end(self, replies: list[Any], error: Exception | None) -> None:
        on_end, self._on_end = self._on_end, None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if on_end is not None:
            on_end(replies, error)

    def _expire(self, iterations: int) -> None:
        """Fails a round trip that has taken too long, unless its replies have just arrived.

        If this process has stalled, the timer runs before the replies are read.
        """
        if iterations:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(0.0, self._expire, iterations - 1)
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
        self.timeout_s = timeout_s
        self._retry_s = retry_s
        self._gauge = up
        self._errors = errors
        self._field = field
        self._failures = 0
        self._is_closed = False
        self._up = asyncio.Event()
        self._tripped = asyncio.Event()
        self._batchers: list[Batcher[Any, Any]] = []
        self._channels: list[_Channel] = []
        """Connections for round trips: at most as many as have ever been used concurrently."""
        self._idle: list[_Channel] = []
        """The connections that are not in use."""

    def batcher(
        self, operation: str, plan: Callable[[list[Sent]], RoundTrip[Got]]
    ) -> Batcher[Sent, Got]:
        """Adds a batcher, which the link closes. `plan` returns the round trip for some entries."""
        batcher = Batcher(self, operation, plan, self._errors)
        self._batchers.append(batcher)
        return batcher

    def commands(self, store: str) -> Commands:
        """Adds a batcher for commands. `store` is its name in error messages."""
        return Commands(self, store)

    async def __aenter__(self) -> Self:
        # One connection listens and one retries. Round trips use separate connections.
        self.client = self._connect(2)
        self._is_closed = False
        self._set_up(is_up=True)
        self._recovering = asyncio.create_task(self._recover())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._recovering.cancel()
        await asyncio.gather(self._recovering, return_exceptions=True)
        self._is_closed = True
        self._up.clear()
        for batcher in self._batchers:
            batcher.close()
        for channel in self._channels:
            await channel.close()
        self._channels.clear()
        self._idle.clear()
        await self.client.aclose()

    def exchange(self, calls: Sequence[Call], on_end: OnEnd) -> None:
        """Makes one round trip. For batchers.

        This bypasses redis-py's pool, retries, and records, which take three times as long as
        everything else.

        Args:
            on_end: called once, later, with one reply per call, or with an error. A rejected call's
                reply is a ResponseError.
        """
        if self._idle:
            channel = self._idle.pop()
        else:
            pool = self.client.connection_pool
            channel = _Channel(pool.make_connection())  # type: ignore[no-untyped-call]
            self._channels.append(channel)
        self._send(channel, calls, partial(self._end, channel, calls, on_end))

    def _send(self, channel: _Channel, calls: Sequence[Call], on_end: OnEnd) -> None:
        commands = [call.pack(by_digest=True) for call in calls]
        try:
            channel.send(commands, self.timeout_s, on_end)
        except Exception as error:
            asyncio.get_running_loop().call_soon(on_end, [], error)

    def _end(
        self,
        channel: _Channel,
        calls: Sequence[Call],
        on_end: OnEnd,
        replies: list[Any],
        error: Exception | None,
    ) -> None:
        unknown = [at for at, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        if unknown:  # Redis restarted and needs the scripts again
            whole = [Call(calls[at].pack(by_digest=False)) for at in unknown]
            on_rest = partial(self._merge, channel, calls, on_end, replies, unknown)
            self._send(channel, whole, on_rest)
            return
        if channel in self._channels:  # otherwise, the link has been closed since
            self._idle.append(channel)
        shaped = list[Any]()
        if error is None:
            try:
                shaped = self._shape(replies, calls)
            except Exception as caught:
                error = caught
        on_end(shaped, error)

    def _merge(
        self,
        channel: _Channel,
        calls: Sequence[Call],
        on_end: OnEnd,
        replies: list[Any],
        unknown: Sequence[int],
        rest: list[Any],
        error: Exception | None,
    ) -> None:
        """Ends a round trip after the scripts that Redis did not know were sent again."""
        for at, reply in zip(unknown, rest, strict=False):
            replies[at] = reply
        self._end(channel, calls, on_end, [] if error is not None else replies, error)

    def _shape(self, replies: Sequence[Any], calls: Sequence[Call]) -> list[Any]:
        """Converts replies as redis-py does, for example a hash to a dict."""
        names = {call.words[0] for call in calls if call.script is None}
        shapes = {name: self.client.response_callbacks.get(str(name)) for name in names}
        return [
            reply
            if call.script is not None
            or (shape := shapes[call.words[0]]) is None
            or isinstance(reply, ResponseError)
            else shape(reply)
            for reply, call in zip(replies, calls, strict=True)
        ]

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

    def judge(self, error: Exception | None) -> bool:
        """Counts one round trip. Returns whether the breaker is closed."""
        if self._is_closed:
            return False
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
            await within(self.timeout_s, self._ping())
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


class Commands:
    """Runs scripts and single commands. Concurrent calls share a round trip."""

    def __init__(self, link: RedisLink, store: str) -> None:
        self._link = link
        self._store = store
        self._batcher = link.batcher("call", _plan_calls)

    async def run(self, *words: Argument) -> Any:
        """Runs a command and returns its reply.

        Raises:
            Unavailable: Redis rejected the command or did not respond. The command may still have
                run.
        """
        return await self._run(Call(words))

    async def run_script(self, script: Script, keys: Sequence[str], *args: Argument) -> Any:
        """Runs a script and returns its reply.

        Raises:
            Unavailable: Redis rejected the script or did not respond. The script may still have
                run.
        """
        return await self._run(script_call(script, keys, args))

    async def _run(self, call: Call) -> Any:
        answers = await self._batcher.call([call]) if self._link.is_up else None
        if answers is None or isinstance(answers[0], Exception):
            reason = "unreachable" if answers is None else f"refusing: {answers[0]}"
            raise Unavailable(
                f"{self._store} is {reason}; try again",
                public=f"{self._store} is unreachable; try again",
            )
        return answers[0]


def script_call(script: Script, keys: Sequence[str], args: Sequence[Argument]) -> Call:
    """Returns a call of a script."""
    return Call((len(keys), *keys, *args), script)


def unwrap(reply: Any) -> Any:
    """Returns a reply, or raises it if it is a rejection."""
    if isinstance(reply, ResponseError):
        raise reply
    return reply


def _plan_calls(calls: list[Call]) -> RoundTrip[Any]:
    return RoundTrip(calls, list)
