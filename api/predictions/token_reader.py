"""Reads the tokens of all texts that clients of this instance read along, in one round trip.

A reader that is slow is not read for until it has taken what it has, so memory is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator

from shared.errors import Unavailable
from shared.stores.token_streams import READER_S, Tokens, TokenStreams

READ_EVERY_S = 0.05
"""Workers write as often."""
SURE_SHARE = 0.8
"""Of the time between tokens: before it has passed, nobody looks for the next ones."""
LONGEST_GAP_S = 0.5
"""A model that is slower than this is read as if it were not."""
MOST_IN_A_ROUND_TRIP = 128

log = logging.getLogger(__name__)


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
        """Whether it is time to look."""
        pause_s = SURE_SHARE * min(*self._gaps_s, LONGEST_GAP_S)
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
        """What was found since the last call."""
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
        """The task that reads, if there is one. Whoever closes the streams ends it."""
        return [] if self._reading is None or self._reading.done() else [self._reading]

    async def follow(
        self, record: str, items: int, limit_s: float
    ) -> AsyncGenerator[dict[int, Tokens]]:
        """Yields what items have, from their first tokens, until their record is over.

        Args:
            record: of the items.
            items: how many it has.
            limit_s: after so long without news, nothing is yielded, again and again. While Redis is
                away there are no news.
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
            for first in range(0, len(due), MOST_IN_A_ROUND_TRIP):
                await self._read(due[first : first + MOST_IN_A_ROUND_TRIP])
            await asyncio.sleep(max(0.0, began_s + READ_EVERY_S - time.monotonic()))

    async def _read(self, due: list[_Reader]) -> None:
        try:
            await self._mark({reader.record for reader in due})
            found = await self._streams.read([(one.record, one.item, one.end) for one in due])
        except Unavailable as error:
            log.debug("tokens could not be read", extra={"reason": error.message})
            return
        now_s = time.monotonic()
        for reader, tokens in zip(due, found, strict=True):
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
        if len(self._marked_s) > 2 * len(self._readers) + MOST_IN_A_ROUND_TRIP:
            current = {reader.record for reader in self._readers}
            self._marked_s = {one: at for one, at in self._marked_s.items() if one in current}
