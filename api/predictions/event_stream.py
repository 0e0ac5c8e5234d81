"""Streams a prediction as server-sent events, as expected by Replicate's clients.

https://html.spec.whatwg.org/multipage/server-sent-events.html

Events are `logs`, `output` (one per element), `error`, and `done`, in this order, as Replicate's
clients expect. Each `logs` event contains the text that a custom model printed since the last such
event. All events can be derived from the record, so a client that reconnects to any instance with
Last-Event-ID gets exactly the events it has not received.

If the output is generated text, it is streamed while it is being generated
(api/predictions/generation_stream.py). Each `output` event contains only the added text, so the
events concatenate to the full text.

For a flow, each step item gets an `output` event with its step and position, in step order, and the
last event contains the flow's output.

`preview` and `queue` are sent only on request, because Replicate's clients fail on unknown events.
Previews are in a Redis stream, and each event ID includes the reader's position in that stream.
`queue` contains the prediction's position in the queue. Because it describes a state, it is sent
again to a reader that reconnects.
"""

from __future__ import annotations

import base64
import re
import time
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import aclosing
from typing import NamedTuple

import msgspec

from api.predictions.creation import PredictionSnapshot
from api.predictions.generation_stream import (
    HEARTBEAT,
    HEARTBEAT_S,
    AddedText,
    StreamShape,
    follow_record,
)
from api.predictions.progress import PredictionProgress
from api.predictions.service import Predictions
from api.predictions.stream_room import StreamRoom
from shared.errors import Canceled, PenstockError
from shared.messages import ItemOutcome
from shared.models.flow_plan import MAX_STEP_ITEMS, MAX_STEPS
from shared.models.tasks.custom import CustomResult, StreamedFile, build_streamed_key, read_elements
from shared.predictions import (
    Prediction,
    error_of,
    logs_of,
    output_of,
    read_printed_logs,
    step_output_of,
)
from shared.stores.objects import UrlSigner
from shared.stores.previews import Preview

MAX_STREAMS = 256
"""Maximum number of streams per instance. Each stream reads its record twice a second."""
KINDS = ("logs", "output", "error", "done")
PREVIEW, QUEUE = "preview", "queue"
EXTRA_KINDS = (PREVIEW, QUEUE)
"""Event kinds sent only to readers who request them."""
OUTPUT_OF_FLOW = MAX_STEPS * MAX_STEP_ITEMS
"""Number of the event with a flow's output, which follows the events for step items."""
_LINE_END = re.compile("\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")
_ID = re.compile(r"(-1|\d{1,2})\.(-1|\d{1,12})(?:\.(\d{1,15}-\d{1,9}))?")
"""An event ID. Before the first event, both numbers are -1."""


class StreamEvent(NamedTuple):
    """One event: `kind` is an index of KINDS, and `number` counts within it.

    Later events compare as greater.
    """

    kind: int
    number: int
    data: str = ""

    def encode(self, position: EventPosition) -> bytes:
        """Returns the event in wire format."""
        return encode_event(KINDS[self.kind], self.data, position.to_id())


class EventPosition(NamedTuple):
    """A reader's position: the last event and the last preview."""

    kind: int = -1
    number: int = -1
    preview: str = ""

    @classmethod
    def from_id(cls, last_id: str) -> EventPosition:
        """Returns the position in an event ID, or the start if the ID is unknown."""
        match = _ID.fullmatch(last_id)
        return cls(int(match[1]), int(match[2]), match[3] or "") if match else cls()

    def to_id(self) -> str:
        """Returns the event ID for a reader at this position."""
        base = f"{self.kind}.{self.number}"
        return f"{base}.{self.preview}" if self.preview else base


class EventStreams:
    """This instance's streams."""

    def __init__(
        self, predictions: Predictions, progress: PredictionProgress, url_signer: UrlSigner
    ) -> None:
        self._predictions = predictions
        self._progress = progress
        self._url_signer = url_signer
        self.room = StreamRoom(MAX_STREAMS, "event streams", "poll the prediction")

    async def follow(
        self,
        snapshot: PredictionSnapshot,
        last_id: str,
        check: Callable[[], object],
        extra: Collection[str] = (),
    ) -> AsyncGenerator[bytes]:
        """Yields the events after `last_id`, for at most MAX_S.

        Args:
            last_id: ID of the last event the reader received. Empty if there is none.
            check: raises PenstockError once the reader may no longer continue because its key has
                been revoked. The error then becomes the last event.
            extra: the EXTRA_KINDS requested by the reader.
        """
        async with aclosing(self._events(snapshot, last_id, check, extra)) as events:
            try:
                async for event in events:
                    yield event
            except PenstockError as error:
                yield failure_event(error.public_message)

    async def _events(
        self,
        first: PredictionSnapshot,
        last_id: str,
        check: Callable[[], object],
        extra: Collection[str],
    ) -> AsyncGenerator[bytes]:
        position, sent, sent_s = EventPosition.from_id(last_id), None, time.monotonic()
        async for snapshot in follow_record(self._predictions, first, check):
            if QUEUE in extra:
                queued = await self._progress.position(snapshot)
                if queued is not None and queued != sent:
                    data = msgspec.json.encode(queued._asdict()).decode()
                    yield encode_event(QUEUE, data, position.to_id())
                    sent, sent_s = queued, time.monotonic()
            if PREVIEW in extra:
                for preview in await self._progress.previews(snapshot, position.preview):
                    position = position._replace(preview=preview.cursor)
                    yield encode_event(PREVIEW, _show_preview(preview), position.to_id())
                    sent_s = time.monotonic()
            for event in await self._list_events(snapshot, position):
                if event[:2] > position[:2]:
                    position = EventPosition(event.kind, event.number, position.preview)
                    yield event.encode(position)
                    sent_s = time.monotonic()
            if time.monotonic() - sent_s >= HEARTBEAT_S:
                yield HEARTBEAT
                sent_s = time.monotonic()

    async def _list_events(
        self, snapshot: PredictionSnapshot, seen: EventPosition
    ) -> list[StreamEvent]:
        """Returns a prediction's events so far, in order.

        For a flow, this includes its items' events.

        Item events that a reader at `seen` already has are omitted.
        """
        known = seen.number if seen.kind == 1 else -1 if seen.kind < 1 else OUTPUT_OF_FLOW
        steps = [
            StreamEvent(
                1, number, _text(step_output_of(snapshot.prediction, outcome, self._url_signer))
            )
            for number, outcome in await self._progress.step_outcomes(snapshot, known)
        ]
        others = events_of(snapshot, self._url_signer, seen)
        return sorted([*others, *steps], key=lambda event: event[:2]) if steps else others


def events_of(
    snapshot: PredictionSnapshot, url_signer: UrlSigner, seen: EventPosition
) -> list[StreamEvent]:
    """Returns all of a prediction's events so far, in order.

    Printed text is combined into one event, which contains the part that a reader at `seen` does
    not have yet.
    """
    prediction, record = snapshot
    events = []
    printed = read_printed_logs(record)
    if printed.end:
        known = max(0, seen.number) if seen.kind <= 0 else printed.end
        events.append(StreamEvent(0, printed.end, printed.after(known)))
    elif logs := logs_of(record):
        step = record.steps if record.state == "succeeded" else record.step
        events.append(StreamEvent(0, step, logs.rstrip("\n")))
    output = output_of(prediction, record, url_signer)
    if prediction.shows_steps:
        if record.state == "succeeded":
            events.append(StreamEvent(1, OUTPUT_OF_FLOW, _text({"output": output})))
    else:
        elements = output if prediction.is_list or output is None else [output]
        events += [
            StreamEvent(1, number, _text(element)) for number, element in enumerate(elements or [])
        ]
    if error := error_of(record):
        events.append(StreamEvent(2, 0, msgspec.json.encode({"detail": error}).decode()))
    if record.is_over:
        reason = {"failed": "error", "canceled": "canceled"}.get(record.state)
        events.append(
            StreamEvent(3, 0, msgspec.json.encode({"reason": reason} if reason else {}).decode())
        )
    return events


def _text(element: object) -> str:
    return element if isinstance(element, str) else msgspec.json.encode(element).decode()


def _show_preview(preview: Preview) -> str:
    image = base64.b64encode(preview.image).decode()
    fields = {
        "index": preview.index,
        "step": preview.step,
        "steps": preview.steps,
        "image": f"data:image/webp;base64,{image}",
    }
    return msgspec.json.encode(fields).decode()


def failure_event(message: str) -> bytes:
    """Returns the error event and the final event for a stream that stops early."""
    detail = msgspec.json.encode({"detail": message}).decode()
    return encode_event("error", detail) + encode_event("done", '{"reason":"error"}')


def encode_event(kind: str, data: str, event_id: str | None = None) -> bytes:
    """Returns an event in wire format, with its ID unless that is None.

    Each line of its data becomes a separate field. Lines are split at every line break that any
    reader recognizes, because at least one reader in use recognizes more of them than the standard
    does and would lose the data after them.
    """
    lines = "".join(f"data: {line}\n" for line in _LINE_END.split(data))
    named = "" if event_id is None else f"id: {event_id}\n"
    return f"event: {kind}\n{named}{lines}\n".encode()


class OutputEvents(StreamShape):
    """One generation's events. The stream adds their IDs."""

    def delta(self, added: AddedText) -> bytes | None:
        """Returns the event for new text."""
        return encode_event("output", added.text) if added.text else None

    def closing(self, outcomes: Sequence[ItemOutcome], ended_at_s: float) -> list[bytes]:
        return [encode_event("done", "{}")]

    def logs(self, text: str) -> bytes:
        """Returns the event for text printed since the last such event."""
        return encode_event("logs", text)

    def know(self, result: CustomResult) -> None:
        """Does nothing, because a text is complete on its own."""

    def failure(self, error: PenstockError) -> bytes:
        """Returns the event for the error that ended the text, and the final event.

        A cancellation is not an error.
        """
        if isinstance(error, Canceled):
            return encode_event("done", '{"reason":"canceled"}')
        return failure_event(error.public_message)


class ElementEvents(OutputEvents):
    """The events for a list generated element by element: one per element, as in a complete output.

    Args:
        url_signer: signs the URLs of files that are not inlined in the list.
    """

    def __init__(self, prediction: Prediction, url_signer: UrlSigner) -> None:
        self._prediction = prediction
        self._url_signer = url_signer
        self._result: CustomResult | None = None

    def know(self, result: CustomResult) -> None:
        """Records the complete result, because a cached result's files may be stored elsewhere."""
        self._result = result

    def _link(self, file: StreamedFile) -> str:
        key = build_streamed_key(self._prediction.record, 0, file)
        if self._result is not None:
            key = self._result.files[file.number].object_key or key
        return self._prediction.base_url + self._url_signer.path(key, file.media_type)

    def delta(self, added: AddedText) -> bytes | None:
        """Returns the events for elements, each a line of JSON.

        After an event without an ID, a reader resumes from the last event that had one.
        """
        elements = [element.to_json_value(self._link) for element in read_elements(added.text)]
        return b"".join(encode_event("output", _text(element)) for element in elements) or None
