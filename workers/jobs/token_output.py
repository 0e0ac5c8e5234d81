"""Passes on the tokens of texts while they are written, so that callers can read along.

A worker that takes over from one that died goes on from the tokens in the stream.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import msgspec

from shared.errors import Unavailable
from shared.messages import Item
from shared.stores.records import Records
from shared.stores.token_streams import Written
from shared.tasks.text import TokenChunk
from workers.job import PulledJob, QueuedItem
from workers.jobs.completion import Completion, is_streamed
from workers.models.base import Prepared, PreparedPrompt

_Reader = tuple[PulledJob, int]
"""A job, and the index of its item."""


class TokenOutput:
    """The streams of one model's items. Each reader has a stream of its own."""

    def __init__(self, completion: Completion, records: Records) -> None:
        self._completion = completion
        self._streams = records.tokens
        self._open: dict[QueuedItem, dict[_Reader, int]] = {}
        """The number of tokens in each reader's stream, for each item that is being written."""
        self._is_sending = False
        self._has_more = False

    def pass_on(self, chunks: Sequence[tuple[QueuedItem, TokenChunk]]) -> None:
        """Appends what items have written to the streams of their readers."""
        for queued, chunk in chunks:
            queued.written.append(chunk)
            self._open.setdefault(queued, {})
        self._has_more = True
        if not self._is_sending:
            self._is_sending = True
            self._completion.registry.spawn(self._send_all())

    def ended(self, queued: QueuedItem) -> None:
        """Forgets an item. What its streams are missing is in the reply."""
        self._open.pop(queued, None)

    async def _send_all(self) -> None:
        """Sends until nothing new has come. One round trip carries all items."""
        try:
            while self._has_more:
                self._has_more = False
                # One that gave its place away may lose its readers while it waits.
                self._open = {one: sent for one, sent in self._open.items() if _readers(one)}
                await self._send()
        finally:
            self._is_sending = False

    async def _send(self) -> None:
        due = [
            (sent, reader, chunk)
            for queued, sent in self._open.items()
            for reader in _readers(queued)
            if (chunk := _merged(queued.written, sent.get(reader, 0))) is not None
        ]
        if not due:
            return
        written = [
            Written(pulled.record, index, pulled.envelope.attempt, chunk)
            for _, (pulled, index), chunk in due
        ]
        ends = await self._streams.append(written)
        if ends is None:  # no Redis: all of it is sent with the next tokens
            return
        for (sent, reader, chunk), end in zip(due, ends, strict=True):
            # A reader whose record another worker holds gets nothing more from here.
            sent[reader] = end if end is not None else _NEVER
            self._has_more |= end is not None and end < chunk.first

    async def resume(
        self, missing: Sequence[tuple[PulledJob, Item]], prepared: Sequence[object]
    ) -> list[list[TokenChunk]]:
        """Reads what earlier workers have written of items that are about to be queued.

        Waits only for those that may have been delivered before.
        """
        written: list[list[TokenChunk]] = [[] for _ in missing]
        wanted = [
            place
            for place, (pulled, item) in enumerate(missing)
            if pulled.envelope.attempt > 1
            and is_streamed(item)
            and isinstance(prepared[place], PreparedPrompt)
        ]
        if not wanted:
            return written
        places = [(missing[place][0].record, missing[place][1].index) for place in wanted]
        try:
            found = await self._streams.written(places)
        except Unavailable:  # the text is written again, and readers compare
            return written
        for place, chunks in zip(wanted, found, strict=True):
            written[place] = chunks
        return written


_NEVER = 1 << 62


def _readers(queued: QueuedItem) -> list[_Reader]:
    return [
        (pulled, item.index)
        for pulled, item in queued.open_waiters()
        if pulled.envelope.has_record and is_streamed(item)
    ]


def _merged(written: Sequence[TokenChunk], first: int) -> TokenChunk | None:
    """One chunk with all tokens from `first` on. None: there are none, or `first` is within one."""
    parts = written[bisect_left(written, first, key=lambda chunk: chunk.first) :]
    if not parts or parts[0].first != first:
        return None
    if len(parts) == 1:
        return parts[0]
    return TokenChunk(
        first,
        [token for part in parts for token in part.ids],
        "".join(part.text for part in parts),
        [one for part in parts for one in part.logprobs],
        parts[0].input_tokens,
        parts[0].cached_tokens,
    )


def to_compute(queued: QueuedItem) -> Prepared:
    """A prepared item as the model process gets it: whose it is, and what was written of it."""
    prepared = queued.prepared
    if not isinstance(prepared, PreparedPrompt):
        return prepared
    whole = _merged(queued.written, 0) or TokenChunk(0, [])
    return msgspec.structs.replace(
        prepared,
        owner=queued.tenant,
        written_ids=b"".join(token.to_bytes(4, "little") for token in whole.ids),
        written_text=whole.text,
        written_cached_tokens=whole.cached_tokens,
        written_logprobs=whole.logprobs,
    )
