"""Tokens of generations that are being written, in a Redis stream for each item of a prediction.

A worker appends what the model wrote. Any API instance reads it from any position on. If the worker
dies, the next one goes on from what is there. Three rules make each token appear once:

- Only the worker with the latest claim of a record may append, and only while the record is
  being processed.
- An entry follows the last one without a gap. Its id says how many tokens there are with it, so a
  repeated append changes nothing.
- A worker that could not reach Redis for a while appends what is missing later.

Streams expire, and a generation has a bounded number of tokens. The whole text is in the reply,
which does not need this stream.

`TokenReader` polls Redis once for all streams that an API instance serves. It reads no tokens for a
slow reader until that one has taken those it has, so memory is bounded.

Calls raise Unavailable if Redis does not answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from typing import NamedTuple

import msgspec

from shared.errors import Unavailable
from shared.stores.redis_client import Commands, load_script
from shared.stream_chunks import Chunk, decode_chunk
from shared.tasks.text import TokenChunk

KEPT_S = 600
"""After the last token. A reader that comes back later gets the text from the record."""

READER_S = 10
"""The time that a reader counts as present after it said that it reads along."""
MAX_ITEMS = 64
"""The maximum for a streamed prediction. The API refuses more (api/chat_bodies.py)."""

log = logging.getLogger(__name__)

_APPEND = load_script("shared/stores/token_append.lua")
_READ = load_script("shared/stores/token_read.lua")
_DELIVERED = load_script("shared/stores/token_delivered.lua")
_encoder = msgspec.msgpack.Encoder()

READ_EVERY_S = 0.05
"""Workers write as often."""
SURE_SHARE = 0.8
"""Share of the time between tokens that must pass before the next ones are polled."""
MAX_GAP_S = 0.5
"""Maximum pause between polls, however slow the model is."""
MAX_IN_A_ROUND_TRIP = 128


class Written(NamedTuple):
    """Tokens of one item: `attempt` is the claim of the worker that wrote them."""

    record: str
    item: int
    attempt: int
    chunk: Chunk


class Delivered(NamedTuple):
    """Tokens of one item that went out to readers, and those of its prompt."""

    input_tokens: int
    cached_tokens: int
    output_tokens: int


class Tokens(NamedTuple):
    """The tokens that a reader gets. `is_over`: the record is over or gone, so no more come."""

    chunks: list[Chunk]
    is_over: bool


class TokenStreams:
    """The streams of all predictions."""

    def __init__(self, commands: Commands, prefix: str) -> None:
        self._commands = commands
        self._prefix = prefix

    def keys_of(self, record: str) -> list[str]:
        """The keys that belong to a record."""
        return [self._reader_key(record), *(self._key(record, at) for at in range(MAX_ITEMS))]

    def _key(self, record: str, index: int) -> str:
        return f"{self._prefix}tokens:{record}:{index}"

    async def append(self, written: Sequence[Written]) -> list[int | None] | None:
        """Appends one chunk to each of several streams, which are different ones.

        Returns:
            For each chunk, how many tokens its stream has now. That is less than the end of the
            chunk if tokens before it are missing: append all from there. None: another worker
            has the item now, or the record is over. None for all: Redis did not answer.
        """
        keys = [
            key
            for one in written
            for key in (
                f"{self._prefix}record:{one.record}",
                self._key(one.record, one.item),
            )
        ]
        args: list[str | bytes | float] = [KEPT_S]
        for one in written:
            chunk = one.chunk
            prompt = "0 0"
            if isinstance(chunk, TokenChunk):
                prompt = f"{chunk.input_tokens} {chunk.cached_tokens}"
            args += [one.attempt, chunk.first, chunk.end, _encoder.encode(chunk), prompt]
        with contextlib.suppress(Unavailable):
            ends = await self._commands.run_script(_APPEND, keys, *args)
            return [None if end < 0 else end for end in ends]
        return None

    async def read(self, wanted: Sequence[tuple[str, int, int]]) -> list[Tokens]:
        """Returns the chunks of several items, each from the first that ends after a position.

        They count as delivered. If a record ended without a result, or is about to, only what
        was delivered before is returned.

        Args:
            wanted: of each item, its record, its index, and the tokens that the reader has.
        """
        keys = [
            key
            for record, index, _ in wanted
            for key in (f"{self._prefix}record:{record}", self._key(record, index))
        ]
        entries = await self._commands.run_script(_READ, keys, *(end for _, _, end in wanted))
        return [
            Tokens([decode_chunk(chunk) for chunk in chunks], bool(is_over))
            for is_over, *chunks in entries
        ]

    async def written(self, wanted: Sequence[tuple[str, int]]) -> list[list[Chunk]]:
        """Returns all chunks of several items, for the worker that goes on with them.

        Args:
            wanted: of each item, its record and its index.
        """
        delivered = await asyncio.gather(
            *(
                self._commands.run("XRANGE", self._key(record, index), "-", "+")
                for record, index in wanted
            )
        )
        return [[decode_chunk(entry[b"c"]) for _, entry in entries] for entries in delivered]

    async def end_delivery(self, record: str, items: Sequence[int]) -> list[Delivered | None]:
        """Returns what was delivered of items that end without a result, for their charge.

        From here on, readers get nothing that they could not have read before.
        """
        reply = await self._commands.run_script(
            _DELIVERED, [f"{self._prefix}record:{record}"], *items
        )
        return [_delivered(read, prompt) for read, prompt in reply]

    async def mark_read(self, record: str) -> None:
        """Marks a stream as read for READER_S."""
        await self._commands.run("SET", self._reader_key(record), 1, "EX", READER_S)

    async def is_read(self, record: str) -> bool:
        """Returns whether somebody has read along in the last READER_S."""
        return bool(await self._commands.run("EXISTS", self._reader_key(record)))

    def _reader_key(self, record: str) -> str:
        return f"{self._prefix}reader:{record}"


def _delivered(read: int, prompt: bytes) -> Delivered | None:
    """None: nothing was read. The pieces of a custom model follow no prompt."""
    if not read:
        return None
    input_tokens, cached_tokens = map(int, prompt.split()) if prompt else (0, 0)
    return Delivered(input_tokens, cached_tokens, read)


class ReadPace:
    """When to look for the next tokens of an item: shortly before they may be there.

    The shorter of the last two gaps counts, so a model that waited once is read as before.
    """

    def __init__(self) -> None:
        self._found_s: float | None = None
        self._gaps_s = (0.0, 0.0)

    def found(self, now_s: float) -> None:
        """Notes that there were tokens."""
        if self._found_s is not None:
            self._gaps_s = (self._gaps_s[1], now_s - self._found_s)
        self._found_s = now_s

    def is_due(self, now_s: float) -> bool:
        """Returns whether it is time to look."""
        pause_s = SURE_SHARE * min(*self._gaps_s, MAX_GAP_S)
        return self._found_s is None or now_s >= self._found_s + pause_s


class _Reader:
    """One item that is read along. `tokens` wait to be taken."""

    def __init__(self, record: str, item: int, has_news: asyncio.Event) -> None:
        self.record = record
        self.item = item
        self.has_news = has_news
        self.end = 0
        self.tokens: Tokens | None = None
        self.pace = ReadPace()

    def take(self) -> Tokens | None:
        """Returns the tokens found since the last call."""
        tokens, self.tokens = self.tokens, None
        if tokens is not None and tokens.chunks:
            self.end = tokens.chunks[-1].end
        return tokens


class TokenReader:
    """The readers of this instance. One task reads for all of them, while there are any."""

    def __init__(self, streams: TokenStreams) -> None:
        self._streams = streams
        self._readers: set[_Reader] = set()
        self._reading: asyncio.Task[None] | None = None
        self._marked_s: dict[str, float] = {}

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """Returns the task that reads, if it runs. The one that closes the streams ends it."""
        return [] if self._reading is None or self._reading.done() else [self._reading]

    async def follow(
        self, record: str, items: int, limit_s: float
    ) -> AsyncGenerator[dict[int, Tokens]]:
        """Yields the tokens of items, from the first ones, until their record has ended.

        Args:
            record: the record of the items.
            items: the number of items.
            limit_s: interval without new tokens after which an empty result is yielded, repeatedly.
              While Redis is unreachable no tokens are new.
        """
        has_news = asyncio.Event()
        mine = {_Reader(record, item, has_news) for item in range(items)}
        self._readers |= mine
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read_all())
        try:
            while mine & self._readers:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(limit_s):
                        await has_news.wait()
                has_news.clear()
                news = {reader: tokens for reader in mine if (tokens := reader.take()) is not None}
                self._readers -= {reader for reader, tokens in news.items() if tokens.is_over}
                yield {reader.item: tokens for reader, tokens in news.items()}
        finally:
            self._readers -= mine

    async def _read_all(self) -> None:
        while self._readers:
            began_s = time.monotonic()
            due = [one for one in self._readers if not one.tokens and one.pace.is_due(began_s)]
            for first in range(0, len(due), MAX_IN_A_ROUND_TRIP):
                await self._read(due[first : first + MAX_IN_A_ROUND_TRIP])
            await asyncio.sleep(max(0.0, began_s + READ_EVERY_S - time.monotonic()))

    async def _read(self, due: list[_Reader]) -> None:
        try:
            await self._mark({reader.record for reader in due})
            read = await self._streams.read([(one.record, one.item, one.end) for one in due])
        except Unavailable as error:
            log.debug("tokens could not be read", extra={"reason": error.message})
            return
        now_s = time.monotonic()
        for reader, tokens in zip(due, read, strict=True):
            if tokens.chunks or tokens.is_over:
                reader.pace.found(now_s)
                reader.tokens = tokens
                reader.has_news.set()

    async def _mark(self, records: set[str]) -> None:
        """Says now and then that these are read along."""
        now_s = time.monotonic()
        due = [one for one in records if now_s - self._marked_s.get(one, 0.0) > READER_S / 3]
        await asyncio.gather(*map(self._streams.mark_read, due))  # in one round trip
        self._marked_s |= dict.fromkeys(due, now_s)
        if len(self._marked_s) > 2 * len(self._readers) + MAX_IN_A_ROUND_TRIP:
            current = {reader.record for reader in self._readers}
            self._marked_s = {one: at for one, at in self._marked_s.items() if one in current}
