"""Streams the text of a prediction while it is written, as server-sent events.

https://html.spec.whatwg.org/multipage/server-sent-events.html

An event has an id if its reader asks for ids. The id has the number of tokens of each generation
that a reader has with it: `7` is seven tokens, `7f2` the second piece of the end of a generation of
seven tokens, `-` nothing at all, and generations are separated by points. `~80` behind them are
the characters of what the model prints, if the stream has that. So a reader that
reconnects with that id, to any instance, gets each token once. The worker writes the tokens to
Redis, and the end is in the record. The part of the text beyond the tokens that were read comes
with the end: if Redis is unreachable for a while, the text is late, but complete.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, NamedTuple, Protocol, Self, TypeAlias, runtime_checkable

from api.errors import log_reason
from api.fair_room import FairRoom, OneItem
from api.predictions.creation import PredictionSnapshot
from api.predictions.service import GRACE_S, Predictions
from shared.errors import BadInput, DeadlineExceeded, Overloaded, PenstockError
from shared.messages import ItemOutcome
from shared.predictions import Prediction, ended_at_s, printed_of
from shared.stores.token_streams import READER_S, TokenReader, Tokens, TokenStreams
from shared.stream_chunks import Chunk
from shared.tasks.custom import CustomResult, PieceChunk
from shared.tasks.text import GenerationResult, TokenChunk, TokenLogprob

MAX_STREAMS = 2048
"""The room per instance. A stream costs a part of a round trip every READ_EVERY_S."""
MAX_S = 290.0
"""Below the 300 s after which Cloud Run ends a response. Readers resume with another request."""
HEARTBEAT_S, HEARTBEAT, HEARTBEAT_BESIDE_IDS = 10.0, b": keep-alive\n\n", b": keep-alive\n"
"""After this pause a comment is sent, so that proxies keep the connection open.

Readers that split a stream at empty lines skip the whole block of a comment, so an empty line
follows. Not if events have ids: OpenAI's client for Python takes an empty line behind an event with
an id for an event without data, and fails.
"""
CHECK_S = 2.0
"""Interval of the check that the reader may still read."""
FIRST_EVENT_S = 30.0
"""For as long a new stream has no status yet. Proxies give up silent connections after a minute."""
CLOSE_LIMIT_S = 1.0
LEFT_S = 30.0
"""A generation whose reader left, and can come back, is canceled after LEFT_S seconds."""
_PART = re.compile(r"-|(\d{1,9})(?:f(\d{1,4}))?")
_LOGS = re.compile(r"~(\d{1,12})$")
LOGS_EVERY_S = 0.5
"""Interval at which the record is read for what was printed."""

log = logging.getLogger(__name__)


Return: TypeAlias = Literal["never", "from_event", "from_request"]
"""How the reader of a new stream can come back: not at all, after an event that it was sent, or by
sending its request again. A generation whose reader can't is canceled as soon as it hangs up."""
StreamedResult: TypeAlias = GenerationResult | CustomResult
"""What can be streamed while it is written. Of a custom class, a token is a piece."""


class PromptSize(NamedTuple):
    """Tokens of a prompt, with those that were cached. 0 if it has none, or none is known yet."""

    input_tokens: int = 0
    cached_tokens: int = 0


class StreamShape(Protocol):
    """The form of the events. The ids of the parts of a generation count from 0.

    A form that derives from this one has no first and no last events unless it gives them.
    """

    def opening(self, index: int, prompt: PromptSize) -> bytes | None:
        """Returns the first event of a generation."""
        return None

    def delta(
        self,
        index: int,
        before: str,
        text: str,
        logprobs: Sequence[TokenLogprob],
        at: tuple[int, int],
    ) -> bytes | None:
        """Returns the addition to a generation since the last event. None if nothing is to be sent.

        `at`: the tokens, and the pieces of the end, that a reader of the event has.
        """

    def ending(self, index: int, result: Any) -> Sequence[bytes]:
        """Returns the last events of a generation."""
        return ()

    def closing(self, outcomes: Sequence[ItemOutcome], ended_at_s: float) -> Sequence[bytes]:
        """Returns the last events of all. The prediction ended at `ended_at_s` (unix time)."""

    def failure(self, error: PenstockError) -> bytes:
        """Returns the event of an error, after which nothing comes."""


@runtime_checkable
class ClassShape(StreamShape, Protocol):
    """A form for the outputs of custom models."""

    def logs(self, text: str) -> bytes:
        """Returns the event of what was printed since the last one."""

    def know(self, result: CustomResult) -> None:
        """Takes note of the whole result, before what is left of its text."""


class StreamTooLong(DeadlineExceeded):
    """A reader that can't resume has not got all after MAX_S."""

    def __init__(self) -> None:
        message = (
            f"the answer was not complete after {MAX_S:.0f} s, the longest that a stream may take; "
            "ask for fewer tokens, or send an Idempotency-Key and go on with Last-Event-ID"
        )
        super().__init__(message, public=message)


class StreamLost(PenstockError):
    """The tokens from which a reader resumes are not known any more."""

    code = "stream_lost"
    public_by_default = None


class StreamPosition(NamedTuple):
    """Position of a reader in a generation: its opening, its tokens, and pieces of its end."""

    is_open: bool = False
    tokens: int = 0
    ended: int = 0


def find_return(idempotency_key: str, *, has_positions: bool) -> Return:
    """Returns how the reader of a new stream can come back.

    Args:
        idempotency_key: sent with the request. Empty: none was.
        has_positions: True if events have ids or numbers to resume after.
    """
    if idempotency_key:
        return "from_request"
    return "from_event" if has_positions else "never"


def seen_from_id(last_id: str, items: int) -> list[StreamPosition]:
    """Returns the position of the reader of an event with this id. The start if it is empty.

    Raises:
        BadInput: the id is not one of such a stream.
    """
    generations = _LOGS.sub("", last_id)
    if not last_id:
        return [StreamPosition()] * items
    matches = [_PART.fullmatch(part) for part in generations.split(".")]
    if not all(matches) or len(matches) != items:
        raise BadInput(
            f"Last-Event-ID: {last_id[:40]!r} is not the id of an event of this stream",
            field="last-event-id",
        )
    return [
        StreamPosition(True, int(part[1]), int(part[2] or 0))
        if part is not None and part[1]
        else StreamPosition()
        for part in matches
    ]


def logs_seen_from_id(last_id: str) -> int:
    """Returns how many printed characters the reader of an event with this id has."""
    match = _LOGS.search(last_id)
    return int(match[1]) if match else 0


@dataclass(slots=True)
class _Generation:
    """One generation of a stream, as far as it was read."""

    seen: StreamPosition
    tokens: int = 0
    text: str = ""
    is_open: bool = False
    ended: int = 0

    @property
    def id(self) -> str:
        """Its part of an event id."""
        if not self.is_open and not self.seen.is_open:
            return "-"
        shown, ended = max(self.tokens, self.seen.tokens), max(self.ended, self.seen.ended)
        return f"{shown}f{ended}" if ended else f"{shown}"


class GenerationStreams:
    """The streams of generations of this instance. A context manager that owns their tasks."""

    def __init__(self, predictions: Predictions, streams: TokenStreams) -> None:
        self._predictions = predictions
        self._streams = streams
        self._reader = TokenReader(streams)
        self._room = FairRoom(MAX_STREAMS)
        self._leaving: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Texts whose readers have left run to their ends: other instances may have these now."""
        ending = [*self._leaving, *self._reader.tasks]
        for task in ending:
            task.cancel()
        if ending:
            await asyncio.wait(ending, timeout=CLOSE_LIMIT_S)

    @contextmanager
    def reserved(self, tenant: str) -> Iterator[None]:
        """Holds room for a stream of this tenant.

        Raises:
            Overloaded: no room is left.
        """
        stream = OneItem(tenant)
        if self._room.turns_to_wait(stream):
            held = self._room.held_by(tenant)
            raise Overloaded(
                f"{held} of your streams are open, and there is no room for more; read one to its "
                "end, or try again later"
            )
        self._room.take(stream)
        try:
            yield
        finally:
            self._room.release(stream)

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
        """Yields the events of a prediction's generations, for at most MAX_S.

        A reader that may not continue, since its key was revoked, gets the error as the last event.
        Then the generations end as if it had hung up, after the tokens that it was sent.

        Args:
            shape: the form of the events.
            seen: the position of the reader in each generation.
            check: raises PenstockError once the reader may not continue.
            stays: True if the prediction continues without a reader.
            has_ids: True if each event has an id, after which its reader can resume.
            has_elements: True if a token is an element of a list, a line of JSON, with an event of
              its own.
            logs_seen: how many printed characters the reader has, if the stream has what the model
              prints.
        """
        generations = [_Generation(one) for one in seen]
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
        """As `follow`, for a request whose answer has not begun: waits for the first event.

        So what only a worker can find wrong is an error of the request, as without a stream. After
        FIRST_EVENT_S the answer begins without an event.

        Raises:
            PenstockError: the prediction failed before its first event.
        """
        generations = [_Generation(one) for one in seen]
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
        watch = _Watch(check)
        prediction, is_done = snapshot.prediction, False
        try:
            try:
                async for event in self._events(snapshot, stream, watch):
                    stream.has_begun |= event != stream.heartbeat
                    yield event
                # It may end before the generations do, for readers who come back.
                if not stream.is_ended and not stays and not stream.has_ids:
                    raise StreamTooLong
                is_done = True
            except PenstockError as error:
                log_reason(error, prediction.record)
                is_done = not watch.has_refused and not isinstance(error, StreamTooLong)
                yield stream.fail(error)
        finally:
            if not is_done and not stays and not snapshot.record.is_over:
                # A key that is not valid any more cannot resume the stream.
                after_s = READER_S if watch.has_refused else stream.waits_for_reader_s
                self.leave(prediction, after_s)

    async def _events(
        self, snapshot: PredictionSnapshot, stream: _Stream, watch: _Watch
    ) -> AsyncGenerator[bytes]:
        prediction, until_s = snapshot.prediction, time.monotonic() + MAX_S
        every_s = watch.every_s if stream.logs_seen is None else LOGS_EVERY_S
        following = self._reader.follow(prediction.record, len(stream.generations), every_s)
        async with contextlib.aclosing(following) as news:
            async for chunks in news:
                if stream.is_log_due():
                    snapshot = await self._predictions.refresh(snapshot)
                for event in chain(stream.log(snapshot), stream.read_all(chunks)):
                    yield event
                if watch.is_heartbeat_due(is_silent=not chunks):
                    yield stream.heartbeat
                is_late = time.time() > prediction.deadline_s + GRACE_S
                if is_late or any(tokens.is_over for tokens in chunks.values()):
                    break
                if time.monotonic() > until_s:
                    return
        # An older snapshot if Redis does not answer now.
        while not (snapshot := await self._predictions.refresh(snapshot)).record.is_over:
            if time.monotonic() > until_s:
                return
            watch.is_heartbeat_due(is_silent=True)
            await asyncio.sleep(1.0)
        for event in chain(stream.log(snapshot), stream.end(snapshot)):
            yield event

    def leave(self, prediction: Prediction, after_s: float) -> None:
        """Cancels a prediction after a while, unless tokens of it are read then.

        With 0 at once, whoever reads along.
        """
        leaving = asyncio.create_task(self._cancel_unread(prediction, after_s))
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)

    async def _cancel_unread(self, prediction: Prediction, after_s: float) -> None:
        """Cancels a prediction if its reader does not come back, to whichever instance."""
        await asyncio.sleep(after_s)
        with contextlib.suppress(PenstockError):
            if not after_s or not await self._streams.is_read(prediction.record):
                await self._predictions.cancel(prediction.tenant, prediction.id)


async def behind(first: bytes, events: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """Yields `first`, and then `events`, which it closes."""
    async with contextlib.aclosing(events):
        yield first
        async for event in events:
            yield event


class _Watch:
    """Says what is due while a stream is followed: heartbeats, and checks of its reader."""

    def __init__(self, check: Callable[[], object]) -> None:
        self._check = check
        self._checked_s = self._sent_s = time.monotonic()
        self.every_s = min(CHECK_S, HEARTBEAT_S)
        self.has_refused = False
        """True if the reader may not continue."""

    def is_heartbeat_due(self, *, is_silent: bool) -> bool:
        """Returns whether a comment is due, since nothing was sent. Checks the reader too.

        Raises:
            PenstockError: the reader may not continue.
        """
        now_s = time.monotonic()
        if now_s - self._checked_s >= CHECK_S:
            self._checked_s = now_s
            try:
                self._check()
            except PenstockError:
                self.has_refused = True
                raise
        is_due = is_silent and now_s - self._sent_s >= HEARTBEAT_S
        if is_due or not is_silent:
            self._sent_s = now_s
        return is_due


class _Stream:
    """The generations of one stream. A new one opens none before it has tokens: it may fail."""

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
        """What ended the stream early."""
        self.is_ended = False
        """True if the reader has all events."""
        self._returns = returns
        self.has_begun = False
        """True if the reader was sent more than heartbeats."""
        self.logs_seen = logs_seen
        """How many printed characters the reader has. None: they are not in the stream."""
        self._looked_s = 0.0

    @property
    def heartbeat(self) -> bytes:
        """The comment that keeps the connection open."""
        return HEARTBEAT_BESIDE_IDS if self.has_ids else HEARTBEAT

    @property
    def waits_for_reader_s(self) -> float:
        """Seconds for which the generation continues after its reader left."""
        if self._returns == "never" or (self._returns == "from_event" and not self.has_begun):
            return 0.0
        return LEFT_S

    def read_all(self, news: Mapping[int, Tokens]) -> Iterator[bytes]:
        """Returns the events of the tokens written of several generations."""
        for index, tokens in news.items():
            yield from self.read(index, tokens.chunks)

    def is_log_due(self) -> bool:
        """Returns whether it is time to look for what was printed."""
        now_s = time.monotonic()
        if self.logs_seen is None or now_s - self._looked_s < LOGS_EVERY_S:
            return False
        self._looked_s = now_s
        return True

    def read(self, index: int, chunks: Sequence[Chunk]) -> Iterator[bytes]:
        """Returns the events of the tokens written of a generation."""
        generation = self.generations[index]
        if chunks or not self._is_new:
            yield from self._open(index, _prompt_before(chunks))
        for chunk in itertools.chain.from_iterable(map(self._parts, chunks)):
            if chunk.first < generation.seen.tokens < chunk.end or chunk.first != generation.tokens:
                raise StreamLost(
                    "Last-Event-ID does not belong to this stream; fetch the full completion"
                )
            before, generation.tokens = generation.text, chunk.end
            generation.text += chunk.text
            if generation.tokens > generation.seen.tokens:
                logprobs = chunk.logprobs if isinstance(chunk, TokenChunk) else []
                event = self._shape.delta(
                    index, before, chunk.text, logprobs, (generation.tokens, 0)
                )
                if event is not None:
                    yield self._with_id(event)

    def end(self, snapshot: PredictionSnapshot) -> Iterator[bytes]:
        """Returns the events of the rest of the generations, and of their ends.

        Raises:
            PenstockError: there are no generations, because the prediction failed or was canceled.
        """
        reply = snapshot.record.reply
        outcomes = reply.outcomes if reply is not None else []
        if snapshot.record.state != "succeeded" or len(outcomes) < len(self.generations):
            raise snapshot.failure
        for index, outcome in enumerate(outcomes):
            result = outcome.result
            assert isinstance(result, StreamedResult), "a text model gave no text; this is a bug"
            yield from self._end_of(index, result)
        for event in self._shape.closing(outcomes, ended_at_s(snapshot.record)):
            yield self._with_id(event)
        self.is_ended = True

    def log(self, snapshot: PredictionSnapshot) -> Iterator[bytes]:
        """Returns the event of what was printed since the last one."""
        printed = printed_of(snapshot.record)
        if self.logs_seen is None or printed.end <= self.logs_seen:
            return
        assert isinstance(self._shape, ClassShape), "its events have no logs; this is a bug"
        event = self._shape.logs(printed.after(self.logs_seen))
        self.logs_seen = printed.end
        yield self._with_id(event)

    def fail(self, error: PenstockError) -> bytes:
        """Returns the event of an error."""
        self.error = error
        return self._with_id(self._shape.failure(error))

    def _end_of(self, index: int, result: StreamedResult) -> Iterator[bytes]:
        generation = self.generations[index]
        yield from self._open(index, _prompt_of(result))
        generation.ended = 1
        if isinstance(result, CustomResult) and isinstance(self._shape, ClassShape):
            self._shape.know(result)
        # The last tokens may be there without the end of their text (shared/tasks/text.py),
        # so a reader that has all tokens may lack a piece. It is the first one of the end.
        is_same = generation.tokens >= generation.seen.tokens and result.text.startswith(
            generation.text
        )
        if not is_same and not generation.seen.ended:
            raise StreamLost("the completion changed since it was streamed; fetch it again")
        if self._has_elements or not generation.seen.ended:
            yield from self._rest_of(index, result)
        for event in self._shape.ending(index, result):
            generation.ended += 1
            if generation.ended > generation.seen.ended:
                yield self._with_id(event)

    def _rest_of(self, index: int, result: StreamedResult) -> Iterator[bytes]:
        """Yields what the record has of a generation beyond the tokens that were read.

        Of a list, only elements that the reader has not had: it may have had some from the record.
        """
        generation = self.generations[index]
        rest = TokenChunk(generation.tokens, [], result.text[len(generation.text) :])
        if self._has_elements:
            rest.ids = [0] * (result.streamed_tokens - generation.tokens)
        for part in self._parts(rest):
            before = generation.text
            generation.tokens = part.end if self._has_elements else result.streamed_tokens
            generation.text += part.text
            if self._has_elements and generation.tokens <= generation.seen.tokens:
                continue
            logprobs = result.logprobs[rest.first :]
            at = (generation.tokens, generation.ended)
            event = self._shape.delta(index, before, part.text, logprobs, at)
            if event is not None:
                yield self._with_id(event)

    def _parts(self, chunk: Chunk) -> Iterator[Chunk]:
        """Splits a chunk into what has an event of its own."""
        if not self._has_elements:
            yield chunk
            return
        lines = chunk.text.split("\n")[:-1]
        for number, (identity, line) in enumerate(zip(chunk.ids, lines, strict=True)):
            yield PieceChunk(chunk.first + number, [identity], f"{line}\n", [len(line) + 1])

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
    """The prompt of a generation, as its first chunk says. Pieces of a class follow no prompt."""
    if not chunks or not isinstance(chunks[0], TokenChunk):
        return PromptSize()
    return PromptSize(chunks[0].input_tokens, chunks[0].cached_tokens)


def _prompt_of(result: StreamedResult) -> PromptSize:
    if isinstance(result, CustomResult):
        return PromptSize()
    return PromptSize(result.input_tokens, result.cached_tokens)
