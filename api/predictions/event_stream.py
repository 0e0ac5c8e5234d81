"""A prediction as server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html), from its record.

Events are `logs`, `output` (one for each element), `error` and `done`, in this order, as Replicate's clients read them.
All of them follow from the record at any time, so a client that comes back with Last-Event-ID, to whichever instance,
gets exactly those that it has not seen.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator
from typing import NamedTuple

import msgspec

from api.predictions.service import POLL_S, Predictions, PredictionSnapshot
from api.shares import share_of
from shared.errors import Overloaded
from shared.predictions import error_of, logs_of, output_of
from shared.stores.signed_urls import UrlSigner

MOST_STREAMS = 256
"""Of one instance; each reads its record twice a second."""
LONGEST_S = 290.0
"""Below the 300 s after which Cloud Run cuts a response; clients come back by themselves."""
SILENCE_S = 10.0
"""After which a comment is sent, so that no proxy takes the stream for dead."""
KINDS = ("logs", "output", "error", "done")


class StreamEvent(NamedTuple):
    """One event: `kind` counts in KINDS, `number` within the kind; later events compare greater."""

    kind: int
    number: int
    data: str = ""

    def encoded(self) -> bytes:
        """The event on the wire; its data has one line."""
        return f"event: {KINDS[self.kind]}\nid: {self.kind}.{self.number}\ndata: {self.data}\n\n".encode()


class EventStreams:
    """The streams of this instance."""

    def __init__(self, predictions: Predictions, url_signer: UrlSigner) -> None:
        self._predictions = predictions
        self._url_signer = url_signer
        self._open: Counter[str] = Counter()

    def check(self, tenant: str) -> None:
        """Lets one more of this tenant begin.

        Raises:
            Overloaded: there are MOST_STREAMS, or the tenant has its share of them.
        """
        for is_open, most in ((self._open.total(), MOST_STREAMS), (self._open[tenant], share_of(MOST_STREAMS))):
            if is_open >= most:
                reason = f"{is_open} event streams are open, which is the limit"
                raise Overloaded(f"{reason}; poll the prediction, or try again later")

    async def follow(self, seen: PredictionSnapshot, last_id: str) -> AsyncGenerator[bytes]:
        """The events after `last_id` (empty: all), until the last one, or for LONGEST_S."""
        tenant = seen.prediction.tenant
        self._open[tenant] += 1
        try:
            after, until_s, spoke_s = _place(last_id), time.monotonic() + LONGEST_S, time.monotonic()
            while True:
                for event in events_of(seen, self._url_signer):
                    if event[:2] > after:
                        yield event.encoded()
                        after, spoke_s = event[:2], time.monotonic()
                if seen.record.is_over or time.monotonic() >= until_s:
                    return
                if time.monotonic() - spoke_s >= SILENCE_S:
                    yield b": still at it\n\n"
                    spoke_s = time.monotonic()
                await asyncio.sleep(POLL_S)
                seen = await self._predictions.look(seen)
        finally:
            self._open[tenant] -= 1
            if not self._open[tenant]:
                del self._open[tenant]


def events_of(seen: PredictionSnapshot, url_signer: UrlSigner) -> list[StreamEvent]:
    """What there is to tell of a prediction as it is now, in order."""
    prediction, record = seen
    events = []
    if logs := logs_of(record):
        step = record.steps if record.state == "succeeded" else record.step
        events.append(StreamEvent(0, step, logs.rstrip("\n")))
    output = output_of(prediction, record, url_signer)
    elements = output if prediction.is_list or output is None else [output]
    events += [StreamEvent(1, number, _text(element)) for number, element in enumerate(elements or [])]
    if error := error_of(record):
        events.append(StreamEvent(2, 0, msgspec.json.encode({"detail": error}).decode()))
    if record.is_over:
        reason = {"failed": "error", "canceled": "canceled"}.get(record.state)
        events.append(StreamEvent(3, 0, msgspec.json.encode({"reason": reason} if reason else {}).decode()))
    return events


def _text(element: object) -> str:
    return element if isinstance(element, str) else msgspec.json.encode(element).decode()


def _place(last_id: str) -> tuple[int, int]:
    """Where a client has got to; an id that is none of ours: nowhere."""
    kind, _, number = last_id.partition(".")
    is_ours = kind.isdecimal() and number.isdecimal() and len(last_id) < 20
    return (int(kind), int(number)) if is_ours else (-1, -1)
