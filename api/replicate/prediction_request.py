"""Reads the body that creates a prediction: what it names, its source image, and its digest."""

from __future__ import annotations

import asyncio
import json
import time

from api.bodies import MAX_URL_CHARS
from api.dispatch.request import InferenceRequest
from api.http.request import ApiRequest, while_connected
from api.inputs.source_pictures import PictureCaller
from api.predictions.creation import digest_of
from api.replicate.schemas import PredictionBody
from api.tasks import read_inputs
from shared.catalog import Model
from shared.errors import BadInput
from shared.webhooks import WebhookUrlForbidden, parse_webhook_url


async def read_prediction(
    call: ApiRequest,
    body: PredictionBody,
    model: Model,
    *,
    owner: str,
    own_id: str = "",
    deployment: str = "",
) -> InferenceRequest:
    """Returns the request for the prediction that a body asks for.

    Args:
        call: the authenticated request.
        body: its body.
        model: the model that computes it.
        owner: the owner of the model, as the caller named it.
        own_id: the id that the caller chose, if any.
        deployment: `owner/name` of the deployment that the path names, if any.

    Raises:
        InvalidFields: the input does not fit the model.
        BadInput: the webhook's URL can never be delivered to.
        StorageFull: the tenant has no room for the source image.
        Overloaded: too many images wait to be decoded.
        DeadlineExceeded: the source image was not decoded in time.
        Unavailable: the object store is out of reach.
        ClientGone: the caller hung up.
    """
    done_by_s, keep_s = call.done_by_s(model), call.caller.plan.prediction_keep_s
    if keep_s is None:
        keep_s = call.dependencies.settings.prediction_keep_s
    caller = PictureCaller(
        call.tenant,
        call.storage_quota("image"),
        call.base_url,
        deadline_s=done_by_s,
        keep_s=keep_s + done_by_s - time.time(),
    )
    reading = read_inputs(body.input, model, caller, call.dependencies.source_pictures)
    read = await while_connected(call.http.receive, reading)
    webhook, events = _webhook_of(body, allow_private=call.dependencies.settings.webhooks_private)
    return call.recorded(
        model,
        read,
        digest=await _digest(body, model),
        own_id=own_id,
        owner=owner,
        webhook=webhook,
        webhook_events=events,
        deployment=deployment,
    )


def _webhook_of(body: PredictionBody, *, allow_private: bool) -> tuple[str, tuple[str, ...]]:
    """Returns the webhook URL and its events. Refuses URLs that could never be delivered to."""
    url, events = body.webhook_target
    if url:
        field = "webhook" if body.webhook else "webhook_completed"
        try:
            parse_webhook_url(url, allow_private=allow_private)
        except WebhookUrlForbidden as error:
            raise BadInput(f"{field}: {error.message}", field=field) from error
    return url, events


async def _digest(body: PredictionBody, model: Model) -> str:
    """Returns a digest of the body and the model. Equal requests have the same."""
    given = body.model_dump(exclude={"version"})
    image = given["input"].get("image")
    if isinstance(image, str) and len(image) > MAX_URL_CHARS:
        # Encoding 20 MB of image as JSON would block the event loop for 130 ms, so its digest
        # replaces it.
        given["input"]["image"] = await asyncio.to_thread(digest_of, image)
    return digest_of(json.dumps([model.name, given], sort_keys=True))
