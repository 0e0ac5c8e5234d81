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
MOST_IN_A_ROUND_TRIP = 128

log = logging.getLogger(__name__)


class _Reader:
    """One item that is read along. `found` waits to be taken."""

    def __init__(self, record: str, item: int, has_news: asyncio.Event) -> None:
        self.record = record
        self.item = item
        self.has_news = has_news
        self.end = 0
        self.found: Tokens | None = None

    def take(self) -> Tokens | None:
        """What was found since the last call."""
        found, self.found = self.found, None
        if found is not None and found.chunks:
            self.end = found.chunks[-1].end
        return found


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
            due = [reader for reader in self._readers if reader.found is None]
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
        for reader, tokens in zip(due, found, strict=True):
            if tokens.chunks or tokens.is_over:
                reader.found = tokens
                reader.has_news.set()

    async def _mark(self, records: set[str]) -> None:
        """Says now and then that these are read along."""
        now_s = time.monotonic()
        due = [one for one in records if now_s - self._marked_s.get(one, 0.0) > READER_S / 3]
        for record in due:
            await self._streams.mark_read(record)
            self._marked_s[record] = now_s
        if len(self._marked_s) > 2 * len(self._readers) + MOST_IN_A_ROUND_TRIP:
            current = {reader.record for reader in self._readers}
            self._marked_s = {one: at for one, at in self._marked_s.items() if one in current}
