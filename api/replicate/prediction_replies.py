"""Predictions as shown to callers, with their complete output."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
from starlette.responses import Response

from api.http.encode_json import encode_json
from api.http.idempotency import REPLAYED
from api.http.injection import injectable
from api.predictions.creation import PredictionSnapshot
from shared.errors import BadInput
from shared.models.blob import Blob
from shared.models.tasks.custom import CustomResult
from shared.predictions import body_of, read_partial
from shared.stores.objects import ObjectStore, UrlSigner
from shared.stores.token_streams import TokenStreams
from shared.stores.waiting_lines import QueuePosition

MAX_OUTPUT_BYTES = 64 * 1024 * 1024
"""Maximum size, in bytes, of a class's output to read from the object store."""


@injectable
class PredictionReplies:
    """Shows predictions to callers."""

    def __init__(self, tokens: TokenStreams, objects: ObjectStore, url_signer: UrlSigner) -> None:
        self._tokens = tokens
        self._objects = objects
        self._url_signer = url_signer

    async def body(
        self, snapshot: PredictionSnapshot, queue: QueuePosition | None = None
    ) -> dict[str, Any]:
        """Returns the prediction as shown to callers, with all of its output so far."""
        partial = await read_partial(*snapshot, self._tokens, self._url_signer)
        snapshot = await _with_output(snapshot, self._objects)
        return body_of(*snapshot, self._url_signer, queue, partial=partial)

    async def answer_creation(self, snapshot: PredictionSnapshot, *, is_new: bool) -> Response:
        """Returns the response to a creation request.

        Replicate's clients would treat `processing` as a final state here, so it becomes
        `starting`.
        """
        body = await self.body(snapshot)
        if body["status"] == "processing":
            body["status"] = "starting"
        headers = {"location": body["urls"]["get"]}
        return (
            encode_json(body, 201, headers)
            if is_new
            else encode_json(body, 200, headers | {REPLAYED: "true"})
        )


async def _with_output(snapshot: PredictionSnapshot, objects: ObjectStore) -> PredictionSnapshot:
    """Returns a prediction with its output, even if that is large JSON in the object store.

    If the output has since been deleted, the link is kept.

    Raises:
        Unavailable: the object store is unreachable.
    """
    reply = snapshot.record.reply
    results = [outcome.result for outcome in reply.outcomes] if reply is not None else []
    if reply is None or not any(
        isinstance(result, CustomResult) and result.is_packed for result in results
    ):
        return snapshot
    whole = [
        await _load(result, objects)
        if isinstance(result, CustomResult) and result.is_packed
        else result
        for result in results
    ]
    outcomes = [
        msgspec.structs.replace(outcome, result=result)
        for outcome, result in zip(reply.outcomes, whole, strict=True)
    ]
    reply = msgspec.structs.replace(reply, outcomes=outcomes)
    return snapshot._replace(record=msgspec.structs.replace(snapshot.record, reply=reply))


async def _load(result: CustomResult, objects: ObjectStore) -> CustomResult:
    packed, *others = result.blobs
    if packed.object_key is None:
        return result
    with suppress(BadInput):
        data = await objects.get(packed.object_key, MAX_OUTPUT_BYTES)
        return result.with_blobs([Blob(packed.media_type, data=data), *others])
    return result
