"""Streams images as they are drawn, as server-sent events in OpenAI's format.

https://platform.openai.com/docs/api-reference/images-streaming

The request is a prediction. All events are derived from its record and previews
(shared/stores/record_state.py), so a reader can reconnect to any instance with an event ID and get
the events it missed.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import NamedTuple, Self, TypeAlias, TypeVar

import msgspec

from api.errors import log_reason
from api.http.call import ModelCall
from api.http.request_options import wants_event_ids
from api.openai.chat import failure_event
from api.predictions.creation import PredictionSnapshot
from api.predictions.generation_stream import (
    HEARTBEAT,
    HEARTBEAT_BESIDE_IDS,
    HEARTBEAT_S,
    MAX_S,
    GenerationStreams,
    follow_record,
)
from api.predictions.progress import PredictionProgress
from api.predictions.service import Predictions
from api.tasks.image import images_of
from shared.errors import BadInput, DeadlineExceeded, PenstockError
from shared.models.catalog import Model
from shared.models.tasks.image import ImageResult
from shared.stores.previews import Preview

Drawn = TypeVar("Drawn")
Encode: TypeAlias = Callable[[Drawn], Awaitable[bytes]]

_EVENT_ID = re.compile(r"(|\d{1,15}-\d{1,9})~(\d{1,2})~(\d(?:\.\d){0,9})")

_TOO_LONG = (
    f"the images were not finished within {MAX_S:.0f} s, the maximum duration of a "
    "stream; request fewer images, or send an Idempotency-Key and resume"
)


class StreamedImage(msgspec.Struct):
    """A preview of an image (`partial_image_index`), or the image itself (`seed`).

    `index` distinguishes a request's images, and is omitted if there is only one.
    """

    type: str
    b64_json: bytes
    created_at: int
    size: str
    output_format: str
    quality: str = "auto"
    background: str = "opaque"
    partial_image_index: int | msgspec.UnsetType = msgspec.UNSET
    seed: int | msgspec.UnsetType = msgspec.UNSET
    index: int | msgspec.UnsetType = msgspec.UNSET

    def encode(self, event_id: str) -> bytes:
        """Returns the event in wire format, with its ID unless the ID is empty."""
        named = f"id: {event_id}\n" if event_id else ""
        data = msgspec.json.encode(self)
        return b"event: %b\n%bdata: %b\n\n" % (self.type.encode(), named.encode(), data)


class ImagePosition(NamedTuple):
    """A reader's position: last preview's `cursor`, images completed, and previews per image."""

    cursor: str
    completed: int
    previews: tuple[int, ...]

    @classmethod
    def from_id(cls, last_id: str, count: int) -> Self:
        """Returns the position after an event, or the start if the ID is empty.

        Raises:
            BadInput: the ID does not belong to this kind of stream.
        """
        if not last_id:
            return cls("", 0, (0,) * count)
        match = _EVENT_ID.fullmatch(last_id)
        preview_counts = tuple(int(part) for part in match[3].split(".")) if match else ()
        if match is None or len(preview_counts) != count:
            raise BadInput(
                f"Last-Event-ID: {last_id[:40]!r} is not an event ID of this stream",
                field="last-event-id",
            )
        return cls(match[1], int(match[2]), preview_counts)

    def to_id(self) -> str:
        """Returns the ID of an event that leaves a reader at this position."""
        return f"{self.cursor}~{self.completed}~{'.'.join(map(str, self.previews))}"

    def showing(self, preview: Preview) -> Self:
        """Returns the position after a preview has been shown."""
        preview_counts = [*self.previews]
        preview_counts[preview.index] += 1
        return self._replace(previews=tuple(preview_counts))


class ImageStream:
    """One image request's events.

    Args:
        kind: prefix of the event types.
        position: the position from which the reader continues.
        partial_images: number of previews per image the reader requested.
        encode: returns an image in the requested format.
        enlarge: returns a preview in the requested format and size.
    """

    def __init__(
        self,
        call: ModelCall,
        predictions: Predictions,
        progress: PredictionProgress,
        generation_streams: GenerationStreams,
        *,
        kind: str,
        position: ImagePosition,
        partial_images: int,
        encode: Encode[ImageResult],
        enlarge: Encode[Preview],
        output_format: str,
        size: tuple[int, int],
    ) -> None:
        self._call = call
        self._predictions = predictions
        self._progress = progress
        self._generation_streams = generation_streams
        self._kind = kind
        self._position = position
        self._partial_images = partial_images
        self._encode = encode
        self._enlarge = enlarge
        self._output_format = output_format
        self._size = f"{size[0]}x{size[1]}"
        self._has_ids = wants_event_ids(call.http.headers)
        self._is_over = False
        """True once the prediction has finished."""

    async def events(self, snapshot: PredictionSnapshot, model: Model) -> AsyncGenerator[bytes]:
        """Yields the events the reader has not received yet, for at most MAX_S.

        If the stream ends before the prediction does, and the reader can't resume, the prediction
        is canceled.

        Raises:
            PenstockError: the prediction failed before its first event. Later errors are events.
        """
        has_begun = False
        try:
            try:
                async for event in self._stream_images(snapshot, model):
                    yield event
                    has_begun = True
            except PenstockError as error:
                if not has_begun:
                    raise
                log_reason(error, snapshot.prediction.record)
                yield failure_event(error)
        finally:
            if not self._is_over and not self._has_ids:
                self._generation_streams.leave(snapshot.prediction, 0.0)

    async def _stream_images(
        self, first: PredictionSnapshot, model: Model
    ) -> AsyncGenerator[bytes]:
        heartbeat_s = time.monotonic()
        async for snapshot in follow_record(self._predictions, first, self._call.check_key):
            if snapshot.record.is_over:
                self._is_over = True
                break
            async for event in self._partials(snapshot):
                yield event
            now_s = time.monotonic()
            if now_s - heartbeat_s > HEARTBEAT_S:
                yield HEARTBEAT_BESIDE_IDS if self._has_ids else HEARTBEAT
                heartbeat_s = now_s
        if not self._is_over:
            if self._has_ids:
                return  # the reader may reconnect
            raise DeadlineExceeded(_TOO_LONG, public=_TOO_LONG)
        if snapshot.record.state != "succeeded" or snapshot.record.reply is None:
            raise snapshot.failure
        for index, result in enumerate(images_of(snapshot.record.reply.delivered, model)):
            if result is not None and index >= self._position.completed:
                yield await self._encode_completed(index, result)

    async def _partials(self, snapshot: PredictionSnapshot) -> AsyncGenerator[bytes]:
        """Yields new previews, up to the number the reader requested."""
        if not self._partial_images:
            return
        for preview in await self._progress.previews(snapshot, self._position.cursor):
            self._position = self._position._replace(cursor=preview.cursor)
            number = self._position.previews[preview.index]
            if number < self._partial_images and self._is_due(preview, number):
                enlarged = await self._enlarge(preview)
                self._position = self._position.showing(preview)
                event = self._event("partial_image", enlarged, preview.index)
                event.partial_image_index = number
                yield self._on_wire(event)

    def _is_due(self, preview: Preview, number: int) -> bool:
        """True if a preview is far enough along to be preview number `number`.

        Previews are evenly spaced.
        """
        return preview.step * (self._partial_images + 1) >= (number + 1) * preview.steps

    async def _encode_completed(self, index: int, result: ImageResult) -> bytes:
        data = await self._encode(result)
        self._position = self._position._replace(completed=index + 1)
        event = self._event("completed", data, index)
        event.seed = result.seed
        return self._on_wire(event)

    def _event(self, stage: str, data: bytes, index: int) -> StreamedImage:
        return StreamedImage(
            f"{self._kind}.{stage}",
            data,
            int(time.time()),
            self._size,
            self._output_format,
            index=index if len(self._position.previews) > 1 else msgspec.UNSET,
        )

    def _on_wire(self, event: StreamedImage) -> bytes:
        return event.encode(self._position.to_id() if self._has_ids else "")
