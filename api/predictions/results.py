"""Fetches what a signed link points to: an object, or an image in a prediction's record."""

from __future__ import annotations

import re
from collections.abc import Sequence

from api.errors import NotFound
from api.inputs.image_codec import ImageCodec
from api.predictions.creation import PredictionSnapshot
from shared.errors import BadInput
from shared.flows.run import list_own_objects
from shared.messages import ReplyBody
from shared.models.tasks import Result
from shared.models.tasks.image import ImagesResult
from shared.predictions import MEDIA_TYPES, partial_objects_of
from shared.stores.flow_runs import FlowRuns
from shared.stores.objects import ObjectStore
from shared.stores.records import Records

OBJECT_LIMIT_BYTES = 64 * 1024 * 1024
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
"""The PNG file signature: https://www.w3.org/TR/png-3/#5PNG-file-signature."""
_INLINE = re.compile(r"predictions/([A-Za-z0-9_]{1,64})/(\d{1,3})\.png")
_FORMATS = {media_type: name for name, media_type in MEDIA_TYPES.items()}


class ResultFetcher:
    """Fetches results. Keeps no state between calls."""

    def __init__(
        self, objects: ObjectStore, records: Records, runs: FlowRuns, image_codec: ImageCodec
    ) -> None:
        self._objects = objects
        self._records = records
        self._runs = runs
        self._image_codec = image_codec

    async def delete(self, snapshot: PredictionSnapshot) -> None:
        """Deletes a prediction's objects, except objects that the cache may still return.

        Raises:
            Unavailable: the object store is unreachable.
        """
        reply = snapshot.record.reply
        if snapshot.prediction.steps:
            for key in await list_own_objects(self._runs, snapshot.prediction.record):
                await self._objects.delete(key)
            return
        if reply is None or snapshot.prediction.is_cached:
            return
        results = [outcome.result for outcome in reply.outcomes if outcome.result is not None]
        keys = [blob.object_key for result in results for blob in result.blobs if blob.object_key]
        for key in [*keys, *partial_objects_of(*snapshot)]:
            await self._objects.delete(key)

    async def fetch(self, key: str, media_type: str, deadline_s: float) -> bytes:
        """Returns the data for a link whose signature has already been verified.

        Args:
            key: the object's key in the store.
            media_type: the media type in the link.
            deadline_s: Unix time at which to stop encoding.

        Raises:
            NotFound: the result does not exist or has expired.
            Overloaded: too many images are waiting to be encoded.
            DeadlineExceeded: the image was not encoded in time.
            Unavailable: Redis or the object store is unreachable.
        """
        try:
            if inline := _INLINE.fullmatch(key):
                data = await self._inline_image(inline[1], int(inline[2]))
            else:
                data = await self._objects.get(key, OBJECT_LIMIT_BYTES)
        except BadInput as error:
            raise NotFound("the image no longer exists") from error
        # Workers return PNG. Other formats are encoded on each fetch, so they are not stored.
        if data.startswith(PNG_SIGNATURE) and media_type in _FORMATS:
            return await self._image_codec.encode(
                data, _FORMATS[media_type], None, deadline_s, is_new=True
            )
        return data

    async def _inline_image(self, record_id: str, index: int) -> bytes:
        """Returns an image contained in a record.

        Raises:
            NotFound: the record does not contain such an image.
        """
        record = await self._records.read(record_id)
        results = _results_of(record.reply) if record is not None and record.reply else []
        result = results[index] if index < len(results) else None
        blob = next(iter(result.blobs), None) if result is not None else None
        if blob is not None and blob.data is not None:
            return blob.data
        raise NotFound("the image no longer exists")


def _results_of(reply: ReplyBody) -> Sequence[Result | None]:
    if isinstance(reply.output, ImagesResult):
        return reply.output.images
    return [outcome.result for outcome in reply.outcomes]
