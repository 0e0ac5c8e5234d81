"""Reads the request that creates a prediction into a NewPrediction.

It checks what the body names, stores the source image, and gives the prediction its id and digest.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import time
from collections.abc import Sequence
from typing import Any

from api.bodies import MAX_URL_CHARS
from api.dispatch.job_sender import OUTCOME_BYTES
from api.http.request import ApiRequest, while_connected
from api.inputs.source_pictures import PictureCaller
from api.predictions.creation import version_of
from api.predictions.sender import NewPrediction
from api.replicate.schemas import PredictionBody
from api.tasks import read_inputs
from api.tasks.base import Inputs
from shared.catalog import Model
from shared.errors import BadInput
from shared.messages import Item
from shared.predictions import Prediction, record_of
from shared.stores.cache import cache_key
from shared.tasks import Input
from shared.usage.charge import price_of
from shared.webhooks import WebhookUrlForbidden, parse_webhook_url


async def read_prediction(
    call: ApiRequest,
    body: PredictionBody,
    model: Model,
    *,
    owner: str,
    own_id: str = "",
    deployment: str = "",
) -> NewPrediction:
    """Creates the requested prediction, with the items to compute.

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
    done_by_s, keep_s = call.options.done_by_s(model.deadline), call.caller.plan.prediction_keep_s
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
    return new_prediction(
        call,
        model,
        read,
        own_id=own_id,
        digest=await _digest(body, model),
        owner=owner,
        webhook=webhook,
        webhook_events=events,
        deployment=deployment,
    )


def new_prediction(
    call: ApiRequest, model: Model, read: Inputs, *, own_id: str = "", digest: str, **shown: Any
) -> NewPrediction:
    """Creates a prediction from parsed inputs.

    Args:
        call: the authenticated request.
        model: the model that computes it.
        read: the parsed inputs.
        own_id: the id that the caller chose, if any.
        digest: the digest of the whole request.
        shown: further fields of its document.
    """
    options, key = call.options, call.options.idempotency_key
    prediction_id, record = _ids(call.tenant, own_id, key)
    is_kept = read.is_repeatable and options.cache_write
    inputs = read.inputs if read.is_repeatable else ()
    serving = call.dependencies.canaries.choose(model, call.tenant, inputs, record)
    prediction = Prediction(
        id=prediction_id,
        record=record,
        tenant=call.tenant,
        model=model.name,
        canary=serving.name if serving.is_canary else "",
        version=version_of(model),
        input=read.shown,
        is_list=read.is_list,
        output_format=read.output_format,
        base_url=call.base_url,
        created_at_s=call.context.received_at_s,
        deadline_s=options.done_by_s(model.deadline),
        digest=digest,
        client_request_id=call.context.client_request_id,
        key_id=call.caller.key_id,
        is_cached=is_kept,
        price=price_of(model, call.context.received_at_s),
        **shown,
    )
    return NewPrediction(
        prediction,
        _items(serving, read.inputs, call.tenant, is_kept=is_kept),
        options,
        weight=call.caller.plan.weight,
        plan=call.caller.plan_name,
        keep_s=call.caller.plan.prediction_keep_s,
        replies=model.replies,
        reply_bytes=len(read.inputs) * (model.definition.result_bytes(model) + OUTCOME_BYTES),
        is_keyed=bool(own_id or key),
        is_promised=options.is_promised(model.deadline),
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


def _ids(tenant: str, own_id: str, key: str) -> tuple[str, str]:
    """Returns prediction id and record id: from the caller, from an Idempotency-Key, or new."""
    if own_id:
        return own_id, record_of(tenant, own_id)
    if key:
        digest = hashlib.blake2b(f"{tenant}\n{key}".encode(), digest_size=12)
        return f"pred_{digest.hexdigest()}", f"pred_{digest.hexdigest()}"
    made = f"pred_{secrets.token_hex(12)}"
    return made, made


async def _digest(body: PredictionBody, model: Model) -> str:
    """Returns a digest of the body and the model. Equal requests have the same."""
    given = body.model_dump(exclude={"version"})
    image = given["input"].get("image")
    if isinstance(image, str) and len(image) > MAX_URL_CHARS:
        # Encoding 20 MB of image as JSON would block the event loop for 130 ms, so its digest
        # replaces it.
        given["input"]["image"] = await asyncio.to_thread(digest_of, image)
    return digest_of(json.dumps([model.name, given], sort_keys=True))


def digest_of(text: str) -> str:
    """Returns the digest of a request."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _items(model: Model, inputs: Sequence[Input], tenant: str, *, is_kept: bool) -> list[Item]:
    keeps = is_kept and model.cache.ttl_s > 0
    return [
        Item(index, given, cache_key(model, given, tenant) if keeps else None)
        for index, given in enumerate(inputs)
    ]
