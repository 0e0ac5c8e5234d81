"""Streams a prediction's text as server-sent events while it is being generated.

https://html.spec.whatwg.org/multipage/server-sent-events.html

Events have IDs if the reader requests them. An ID contains the number of tokens that a reader has
received from each generation: `7` means seven tokens, `7f2` the second piece of a seven-token
generation's ending, `-` nothing at all, and generations are separated by periods. A suffix such as
`~80` is the number of printed characters, if the stream includes them. A reader that reconnects to
any instance with that ID therefore gets each token exactly once. The worker writes tokens to Redis,
and the final result is in the record. Text beyond the tokens that were read is sent at the end, so
if Redis is unreachable for a while, the text is late but complete.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, NamedTuple, Protocol, Self, TypeAlias, runtime_checkable

from api.errors import log_reason
from api.predictions.creation import POLL_S, PredictionSnapshot
from api.predictions.service import GRACE_S, Predictions
from api.predictions.stream_room import StreamRoom
from shared.errors import BadInput, DeadlineExceeded, PenstockError
from shared.messages import ItemOutcome
from shared.models.tasks.custom import CustomResult, PieceChunk
from shared.models.tasks.text import GenerationResult, TokenChunk, TokenLogprob
from shared.predictions import Prediction, read_ended_at_s, read_printed_logs
from shared.stores.stream_chunks import Chunk
from shared.stores.token_streams import READER_S, TokenReader, Tokens, TokenStreams

MAX_STREAMS = 2048
"""Maximum number of streams per instance.

A stream costs part of a round trip every READ_EVERY_S.
"""
MAX_S = 290.0
"""Maximum duration of a stream, less than the 300 s after which Cloud Run cuts off a response.

Readers resume with another request.
"""
HEARTBEAT_S, HEARTBEAT, HEARTBEAT_BESIDE_IDS = 10.0, b": keep-alive\n\n", b": keep-alive\n"
"""After a pause this long, a comment is sent to keep the connection open through proxies.

Readers that split a stream at empty lines skip the whole block that a comment is in, so an empty
line follows the comment. The empty line is omitted if events have IDs, because OpenAI's Python
client treats an empty line after an event with an ID as an event without data, and fails.
"""
CHECK_S = 2.0
"""Interval between checks that the reader is still allowed to read."""
FIRST_EVENT_S = 30.0
"""How long a new stream may wait before it sends a status, in seconds.

Proxies drop silent connections after a minute.
"""
CLOSE_LIMIT_S = 1.0
LEFT_S = 30.0
"""A generation whose reader disconnected but may return is canceled after LEFT_S seconds."""
_PART = re.compile(r"-|(\d{1,9})(?:f(\d{1,4}))?")
_LOGS = re.compile(r"~(\d{1,12})$")
LOGS_EVERY_S = 0.5
"""Interval between reads of the record for printed text."""

log = logging.getLogger(__name__)


Return: TypeAlias = Literal["never", "from_event", "from_request"]
"""Ways in which a new stream's reader may return: not at all, after an event it received, or by
sending the request again.

If the reader can't return, the generation is canceled as soon as the reader disconnects.
"""
StreamedResult: TypeAlias = GenerationResult | CustomResult
"""Results that can be streamed. For a custom class, a piece counts as a token."""


class PromptSize(NamedTuple):
    """Number of prompt tokens, including cached tokens.

    0 if there is no prompt or the number is unknown.
    """

    input_tokens: int = 0
    cached_tokens: int = 0


class AddedText(NamedTuple):
    """Text added to a generation since its last event."""

    generation: int
    """The generation's index in its stream."""
    before: str
    """The generation's earlier text."""
    text: str
    logprobs: Sequence[TokenLogprob]
    tokens: int
    """Number of tokens a reader has received after the event."""
    ended: int = 0
    """Number of final pieces a reader has received after the event."""

    @property
    def now(self) -> str:
        return self.before + self.text


class StreamShape(Protocol):
    """The events' format. A generation's parts are numbered from 0.

    By default, a format has no opening or closing events.
    """

    def opening(self, index: int, prompt: PromptSize) -> bytes | None:
        """Returns the event that opens a generation."""
        return None

    def delta(self, added: AddedText) -> bytes | None:
        """Returns the event for added text, or None if there is nothing to send."""

    def ending(self, index: int, result: Any) -> Sequence[bytes]:
        """Returns the events that end a generation."""
        return ()

    def closing(self, outcomes: Sequence[ItemOutcome], ended_at_s: float) -> Sequence[bytes]:
        """Returns the stream's last events.

        The prediction finished at `ended_at_s` (Unix time).
        """

    def failure(self, error: PenstockError) -> bytes:
        """Returns an error event, which is always the last event."""


@runtime_checkable
class ClassShape(StreamShape, Protocol):
    """A format for the output of custom models."""

    def logs(self, text: str) -> bytes:
        """Returns the event for text printed since the last one."""

    def know(self, result: CustomResult) -> None:
        """Records the complete result, before the rest of its text is sent."""


class StreamTooLong(DeadlineExceeded):
    """A reader that can't resume did not receive everything within MAX_S."""

    def __init__(self) -> None:
        message = (
            f"the completion was not finished within {MAX_S:.0f} s, the maximum duration of "
            "a stream; request fewer tokens, or send an Idempotency-Key and resume with "
            "Last-Event-ID"
        )
        super().__init__(message, public=message)


class StreamLost(PenstockError):
    """The tokens after which a reader wants to resume are gone."""

    code = "stream_lost"
    public_by_default = None


class StreamPosition(NamedTuple):
    """A reader's position in a generation: its opening, tokens, and final pieces."""

    is_open: bool = False
    tokens: int = 0
    ended: int = 0


def find_return(idempotency_key: str, *, has_positions: bool) -> Return:
    """Returns how a new stream's reader can return.

    Args:
        idempotency_key: the key sent with the request. Empty if there is none.
        has_positions: True if events have IDs or numbers to resume after.
    """
    if idempotency_key:
        return "from_request"
    return "from_event" if has_positions else "never"


def parse_last_event_id(last_id: str, items: int) -> list[StreamPosition]:
    """Returns the position after the event with this ID, or the start if the ID is empty.

    Raises:
        BadInput: the ID does not belong to this kind of stream.
    """
    generations = _LOGS.sub("", last_id)
    if not last_id:
        return [StreamPosition()] * items
    matches = [_PART.fullmatch(part) for part in generations.split(".")]
    if not all(matches) or len(matches) != items:
        raise BadInput(
            f"Last-Event-ID: {last_id[:40]!r} is not an event ID of this stream",
            field="last-event-id",
        )
    return [
        StreamPosition(True, int(part[1]), int(part[2] or 0))
        if part is not None and part[1]
        else StreamPosition()
        for part in matches
    ]


def logs_seen_from_id(last_id: str) -> int:
    """Returns how many printed characters a reader has received after the event with this ID."""
    match = _LOGS.search(last_id)
    return int(match[1]) if match else 0


@dataclass(slots=True)
class _Generation:
    """One generation in a stream, as read so far."""

    seen: StreamPosition
    tokens: int = 0
    text: str = ""
    is_open: bool = False
    ended: int = 0

    @property
    def id(self) -> str:
        """The generation's part of an event ID."""
        if not self.is_open and not self.seen.is_open:
            return "-"
        tokens, ended = max(self.tokens, self.seen.tokens), max(self.ended, self.seen.ended)
        return f"{tokens}f{ended}" if ended else f"{tokens}"


class GenerationStreams:
    """This instance's generation streams. A context manager that owns the generations' tasks."""

    def __init__(self, predictions: Predictions, streams: TokenStreams) -> None:
        self._predictions = predictions
        self._streams = streams
        self._reader = TokenReader(streams)
        self.room = StreamRoom(MAX_STREAMS, "streams", "finish reading one")
        self._leave_tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Lets generations run to completion after their readers disconnect.

        Readers may now be on other instances.
        """
        ending = [*self._leave_tasks, *self._reader.tasks]
        for task in ending:
            task.cancel()
        if ending:
            await asyncio.wait(ending, timeout=CLOSE_LIMIT_S)

    def follow(
        self,
        snapshot: PredictionSnapshot,
        shape: StreamShape,
        seen: Sequence[StreamPosition],
        check: Callable[[], object],
        *,
        stays: bool,
        has_ids: bool,
        has_elements: bool = False,
        logs_seen: int | None = None,
    ) -> AsyncGenerator[bytes]:
        """Yields the events for a prediction's generations, for at most MAX_S.

        If the reader may no longer continue because its key has been revoked, the last event is the
        error. The generations then stop after the tokens already sent, as if the reader had
        disconnected.

        Args:
            seen: the reader's position in each generation.
            check: raises PenstockError once the reader may no longer continue.
            stays: True if the prediction continues without a reader.
            has_ids: True if each event has an ID after which the reader can resume.
            has_elements: True if each token is a list element, sent as a line of JSON in a separate
                event.
            logs_seen: number of printed characters the reader has received, if the stream includes
                printed text.
        """
        generations = [_Generation(position) for position in seen]
        stream = _Stream(
            shape,
            generations,
            has_ids=has_ids,
            is_new=False,
            has_elements=has_elements,
            logs_seen=logs_seen,
        )
        return self._follow(snapshot, stream, check, stays=stays)

    async def begin(
        self,
        snapshot: PredictionSnapshot,
        shape: StreamShape,
        seen: Sequence[StreamPosition],
        check: Callable[[], object],
        returns: Return,
        *,
        has_ids: bool,
        has_elements: bool = False,
    ) -> AsyncGenerator[bytes]:
        """Like `follow`, but waits for the first event: the request's response has not started.

        This way, errors that only a worker can detect cause the request to fail, just as they do
        without streaming. After FIRST_EVENT_S, the response starts without an event.

        Raises:
            PenstockError: the prediction failed before its first event.
        """
        generations = [_Generation(position) for position in seen]
        stream = _Stream(
            shape,
            generations,
            has_ids=has_ids,
            is_new=True,
            has_elements=has_elements,
            returns=returns,
        )
        events = self._follow(snapshot, stream, check, stays=False)
        until_s = time.monotonic() + FIRST_EVENT_S
        first = await anext(events)
        while first == stream.heartbeat and time.monotonic() < until_s:
            first = await anext(events)
        if stream.error is not None:
            await events.aclose()
            raise stream.error
        return behind(first, events)

    async def _follow(
        self,
        snapshot: PredictionSnapshot,
        stream: _Stream,
        check: Callable[[], object],
        *,
        stays: bool,
    ) -> AsyncGenerator[bytes]:
        watch, until_s = _Watch(check), time.monotonic() + MAX_S
        prediction, is_done = snapshot.prediction, False
        late_s = time.monotonic() + prediction.deadline_s + GRACE_S - time.time()
        every_s = watch.every_s if stream.logs_seen is None else LOGS_EVERY_S
        items, is_over = len(stream.generations), False
        try:
            try:
                # Not in a separate generator, because every event would pass through it.
                with self._reader.follow(prediction.record, items, every_s) as news:
                    while not is_over:
                        chunks = await news.take()
                        now_s = time.monotonic()
                        if stream.is_log_due(now_s):
                            snapshot = await self._predictions.refresh(snapshot)
                        for event in stream.take(snapshot, chunks):
                            stream.has_begun = True
                            yield event
                        if watch.is_heartbeat_due(now_s, is_silent=not chunks):
                            yield stream.heartbeat
                        is_over = now_s > late_s or now_s > until_s
                        for tokens in chunks.values():
                            is_over = is_over or tokens.is_over
                async for event in self._end(snapshot, stream, watch, until_s):
                    yield event
                # If its reader can reconnect, the stream may end before the generations do.
                if not stream.is_ended and not stays and not stream.has_ids:
                    raise StreamTooLong
                is_done = True
            except PenstockError as error:
                log_reason(error, prediction.record)
                is_done = not watch.has_refused and not isinstance(error, StreamTooLong)
                yield stream.fail(error)
        finally:
            if not is_done and not stays and not snapshot.record.is_over:
                # A reader whose key is no longer valid can't resume the stream.
                after_s = READER_S if watch.has_refused else stream.waits_for_reader_s
                self.leave(prediction, after_s)

    async def _end(
        self, snapshot: PredictionSnapshot, stream: _Stream, watch: _Watch, until_s: float
    ) -> AsyncGenerator[bytes]:
        """Yields the last events, once the record has ended. None if that takes too long."""
        while time.monotonic() <= until_s:
            # An older snapshot if Redis isn't responding.
            snapshot = await self._predictions.refresh(snapshot)
            if snapshot.record.is_over:
                for event in chain(stream.log(snapshot), stream.end(snapshot)):
                    stream.has_begun = True
                    yield event
                return
            if watch.is_heartbeat_due(time.monotonic(), is_silent=True):
                yield stream.heartbeat
            await asyncio.sleep(1.0)

    def leave(self, prediction: Prediction, after_s: float) -> None:
        """Cancels a prediction after a delay, unless someone is reading its tokens by then.

        If the delay is 0, cancels it immediately, even if others are reading its tokens.
        """
        leaving = asyncio.create_task(self._cancel_unread(prediction, after_s))
        self._leave_tasks.add(leaving)
        leaving.add_done_callback(self._leave_tasks.discard)

    async def _cancel_unread(self, prediction: Prediction, after_s: float) -> None:
        """Cancels a prediction if its reader does not reconnect to any instance."""
        await asyncio.sleep(after_s)
        with contextlib.suppress(PenstockError):
            if not after_s or not await self._streams.is_read(prediction.record):
                await self._predictions.cancel(prediction.tenant, prediction.id)


async def follow_record(
    predictions: Predictions, snapshot: PredictionSnapshot, check: Callable[[], object]
) -> AsyncGenerator[PredictionSnapshot]:
    """Yields a prediction now and every POLL_S until it has finished, for at most MAX_S.

    Args:
        check: raises PenstockError once the reader may no longer continue.
    """
    until_s = time.monotonic() + MAX_S
    yield snapshot
    while not snapshot.record.is_over and time.monotonic() < until_s:
        await asyncio.sleep(POLL_S)
        check()
        snapshot = await predictions.refresh(snapshot)
        yield snapshot


async def behind(first: bytes, events: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """Yields `first` and then `events`, which it closes."""
    async with contextlib.aclosing(events):
        yield first
        async for event in events:
            yield event


class _Watch:
    """Tracks when heartbeats and reader checks are due while following a stream."""

    def __init__(self, check: Callable[[], object]) -> None:
        self._check = check
        self._checked_s = self._sent_s = time.monotonic()
        self.every_s = min(CHECK_S, HEARTBEAT_S)
        self.has_refused = False
        """True if the reader may no longer continue."""

    def is_heartbeat_due(self, now_s: float, *, is_silent: bool) -> bool:
        """Returns whether to send a comment now, because nothing has been sent for a while.

        Called once per turn. `is_silent`: True if the turn has sent nothing.

        Raises:
            PenstockError: the reader may no longer continue, which is checked every CHECK_S.
        """
        if now_s - self._checked_s >= CHECK_S:
            self._checked_s = now_s
            self._check_reader()
        is_due = is_silent and now_s - self._sent_s >= HEARTBEAT_S
        if is_due or not is_silent:
            self._sent_s = now_s
        return is_due

    def _check_reader(self) -> None:
        try:
            self._check()
        except PenstockError:
            self.has_refused = True
            raise


class _Stream:
    """One stream's generations.

    A new stream opens generations only once they have tokens, because the prediction may still
    fail.
    """

    def __init__(
        self,
        shape: StreamShape,
        generations: list[_Generation],
        *,
        has_ids: bool,
        is_new: bool,
        has_elements: bool = False,
        returns: Return = "from_request",
        logs_seen: int | None = None,
    ) -> None:
        self._shape = shape
        self._has_elements = has_elements
        self._is_new = is_new
        self.has_ids = has_ids
        self.generations = generations
        self.error: PenstockError | None = None
        """The error that ended the stream early."""
        self.is_ended = False
        """True if the reader has all events."""
        self._returns = returns
        self.has_begun = False
        """True if the reader has received more than heartbeats."""
        self.logs_seen = logs_seen
        """Number of printed characters that the reader already has.

        None if they are not part of the stream.
        """
        self._last_read_s = 0.0

    @property
    def heartbeat(self) -> bytes:
        """The comment that keeps the connection open."""
        return HEARTBEAT_BESIDE_IDS if self.has_ids else HEARTBEAT

    @property
    def waits_for_reader_s(self) -> float:
        """How long the generation continues after its reader disconnects, in seconds."""
        if self._returns == "never" or (self._returns == "from_event" and not self.has_begun):
            return 0.0
        return LEFT_S

    def take(self, snapshot: PredictionSnapshot, news: Mapping[int, Tokens]) -> Iterator[bytes]:
        """Returns the events for printed text and for several generations' new tokens."""
        if self.logs_seen is not None:
            yield from self.log(snapshot)
        for index, tokens in news.items():
            yield from self.read(index, tokens.chunks)

    def is_log_due(self, now_s: float) -> bool:
        """Returns whether it is time to check for printed text."""
        if self.logs_seen is None or now_s - self._last_read_s < LOGS_EVERY_S:
            return False
        self._last_read_s = now_s
        return True

    def read(self, index: int, chunks: Sequence[Chunk]) -> Iterator[bytes]:
        """Returns the events for a generation's new tokens."""
        generation = self.generations[index]
        if not generation.is_open and (chunks or not self._is_new):
            yield from self._open(index, _prompt_before(chunks))
        parts = chain.from_iterable(map(self._parts, chunks)) if self._has_elements else chunks
        seen = generation.seen.tokens
        for chunk in parts:
            end = chunk.end
            if chunk.first < seen < end or chunk.first != generation.tokens:
                raise StreamLost(
                    "Last-Event-ID does not belong to this stream; fetch the full completion"
                )
            before, generation.tokens = generation.text, end
            generation.text += chunk.text
            if end > seen:
                logprobs = chunk.logprobs if isinstance(chunk, TokenChunk) else []
                added = AddedText(index, before, chunk.text, logprobs, end)
                if (event := self._shape.delta(added)) is not None:
                    yield self._with_id(event)

    def end(self, snapshot: PredictionSnapshot) -> Iterator[bytes]:
        """Returns the events for the remaining text of the generations and for their endings.

        Raises:
            PenstockError: there are no generations, because the prediction failed or was canceled.
        """
        reply = snapshot.record.reply
        outcomes = reply.outcomes if reply is not None else []
        if snapshot.record.state != "succeeded" or len(outcomes) < len(self.generations):
            raise snapshot.failure
        for index, outcome in enumerate(outcomes):
            result = outcome.result
            assert isinstance(result, StreamedResult), (
                "a text model did not return text; this is a bug"
            )
            yield from self._end_of(index, result)
        for event in self._shape.closing(outcomes, read_ended_at_s(snapshot.record)):
            yield self._with_id(event)
        self.is_ended = True

    def log(self, snapshot: PredictionSnapshot) -> Iterator[bytes]:
        """Returns the event for text printed since the previous one."""
        printed = read_printed_logs(snapshot.record)
        if self.logs_seen is None or printed.end <= self.logs_seen:
            return
        assert isinstance(self._shape, ClassShape), "its events do not have logs; this is a bug"
        event = self._shape.logs(printed.after(self.logs_seen))
        self.logs_seen = printed.end
        yield self._with_id(event)

    def fail(self, error: PenstockError) -> bytes:
        """Returns the event for an error."""
        self.error = error
        return self._with_id(self._shape.failure(error))

    def _end_of(self, index: int, result: StreamedResult) -> Iterator[bytes]:
        generation = self.generations[index]
        yield from self._open(index, _prompt_of(result))
        generation.ended = 1
        if isinstance(result, CustomResult) and isinstance(self._shape, ClassShape):
            self._shape.know(result)
        # The last tokens may arrive before the last of their text (shared/models/tasks/text.py), so
        # a reader that has all tokens may still lack the first of the final pieces.
        is_same = generation.tokens >= generation.seen.tokens and result.text.startswith(
            generation.text
        )
        if not is_same and not generation.seen.ended:
            raise StreamLost("the completion has changed since it was streamed; fetch it again")
        if self._has_elements or not generation.seen.ended:
            yield from self._rest_of(index, result)
        for event in self._shape.ending(index, result):
            generation.ended += 1
            if generation.ended > generation.seen.ended:
                yield self._with_id(event)

    def _rest_of(self, index: int, result: StreamedResult) -> Iterator[bytes]:
        """Yields the part of a generation in the record beyond the tokens that were read.

        For a list, skips elements that the reader may already have received from the record.
        """
        generation = self.generations[index]
        rest = TokenChunk(generation.tokens, [], result.text[len(generation.text) :])
        for part in self._parts(rest) if self._has_elements else (rest,):
            before = generation.text
            generation.tokens = part.end if self._has_elements else result.streamed_tokens
            generation.text += part.text
            if self._has_elements and generation.tokens <= generation.seen.tokens:
                continue
            logprobs = result.logprobs[rest.first :]
            at = (generation.tokens, generation.ended)
            added = AddedText(index, before, part.text, logprobs, *at)
            if (event := self._shape.delta(added)) is not None:
                yield self._with_id(event)

    def _parts(self, chunk: Chunk) -> Iterator[Chunk]:
        """Splits a chunk into elements, each sent as a separate event."""
        for number, line in enumerate(chunk.text.split("\n")[:-1], chunk.first):
            yield PieceChunk(number, f"{line}\n", [len(line) + 1])

    def _open(self, index: int, prompt: PromptSize) -> Iterator[bytes]:
        generation = self.generations[index]
        was_open, generation.is_open = generation.is_open or generation.seen.is_open, True
        if not was_open:
            event = self._shape.opening(index, prompt)
            if event is not None:
                yield self._with_id(event)

    def _with_id(self, event: bytes) -> bytes:
        if not self.has_ids:
            return event
        event_id = ".".join(generation.id for generation in self.generations)
        logs = f"~{self.logs_seen}" if self.logs_seen else ""
        return f"id: {event_id}{logs}\n".encode() + event


def _prompt_before(chunks: Sequence[Chunk]) -> PromptSize:
    """Returns the prompt size from a generation's first chunk.

    A class's pieces have no prompt.
    """
    if not chunks or not isinstance(chunks[0], TokenChunk):
        return PromptSize()
    return PromptSize(chunks[0].input_tokens, chunks[0].cached_tokens)


def _prompt_of(result: StreamedResult) -> PromptSize:
    if isinstance(result, CustomResult):
        return PromptSize()
    return PromptSize(result.input_tokens, result.cached_tokens)
