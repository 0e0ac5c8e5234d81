"""Lists, changes, and deletes stored chats, and lists their messages, as in OpenAI's API."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any, Literal

import msgspec
from fastapi import Query
from starlette.responses import Response

from api.bodies import Body, Metadata
from api.chat_bodies import ChatBody
from api.errors import NotFound
from api.http.call import Call
from api.http.encode_json import encode_json
from api.http.recording import Recording
from api.http.router import Router
from api.openai.chat import CHAT, build_stored_chat
from api.openai.chat_replies import ChatReply
from api.openai.generation import CHAT_PREFIX
from api.openai.item_pages import (
    After,
    ItemsPage,
    Limit,
    first_page_of,
    no_such_item,
    page_of,
)
from api.openai.stored import find_stored, not_found
from api.predictions.creation import PredictionSnapshot
from api.predictions.service import PredictionNotOver, Predictions
from shared.errors import BadInput
from shared.models.catalog import Catalog

Order = Annotated[Literal["asc", "desc"], Query(description="By time: `asc` or `desc`.")]
OfModel = Annotated[str, Query(description="Only chats with this model.")]
OfMetadata = Annotated[
    str, Query(description="Only chats with this metadata, as `metadata[key]=value`.")
]
router = Router(scope="text")


class ChatChange(Body):
    """Changes to a stored chat."""

    metadata: Metadata | None


class ChatDeleted(msgspec.Struct):
    """A deleted chat."""

    id: str
    deleted: bool = True
    object: Literal["chat.completion.deleted"] = "chat.completion.deleted"


@router.get(CHAT.path, summary="List stored chats", reply=ItemsPage, errors=(400,))
async def list_chats(
    call: Call,
    catalog: Catalog,
    recording: Recording,
    predictions: Predictions,
    after: After = "",
    limit: Limit = 20,
    order: Order = "asc",
    model: OfModel = "",
    metadata: OfMetadata = "",
) -> Response:
    """Lists the chats created with `store: true` that the key may see."""
    if metadata:
        raise BadInput("metadata: must be sent as metadata[key]=value", field="metadata")
    wanted = {
        name[len("metadata[") : -1]: value
        for name, value in call.http.query_params.items()
        if name.startswith("metadata[") and name.endswith("]")
    }
    served = {
        candidate.name
        for candidate in call.visible_models(catalog)
        if model in ("", candidate.name)
    }
    # Reads no further than the first match beyond the page, no matter how many chats there are.
    chats: list[dict[str, Any]] = []
    every = _iterate_chats(call.tenant, after, predictions, is_ascending=order == "asc")
    async with aclosing(every) as snapshots:
        async for snapshot in snapshots:
            has_all = wanted.items() <= (snapshot.prediction.input.get("metadata") or {}).items()
            is_shown = snapshot.prediction.model in served and has_all and _is_stored(snapshot)
            if is_shown and recording.is_visible(call, snapshot):
                chats.append(msgspec.to_builtins(build_stored_chat(call, snapshot, catalog)))
            if len(chats) > limit:
                break
    return encode_json(first_page_of(chats, limit))


async def _iterate_chats(
    tenant: str, after: str, predictions: Predictions, *, is_ascending: bool
) -> AsyncGenerator[PredictionSnapshot]:
    """Yields the tenant's chats after the chat `after`.

    Raises:
        BadInput: the chat does not exist.
    """
    digits = after.removeprefix(CHAT_PREFIX)
    if after and digits == after:
        raise no_such_item()
    record = after and f"pred_{digits}"
    every = predictions.iterate_all(tenant, after=record, is_ascending=is_ascending)
    async with aclosing(every) as snapshots:
        try:
            async for snapshot in snapshots:
                yield snapshot
        except NotFound:
            raise no_such_item() from None


@router.post(
    CHAT.path + "/{completion_id}",
    summary="Change a stored chat",
    body=ChatChange,
    reply=ChatReply,
    errors=(409, 429),
)
async def change_chat(
    call: Call,
    catalog: Catalog,
    recording: Recording,
    predictions: Predictions,
    completion_id: str,
) -> Response:
    snapshot = await _find(call, completion_id, recording)
    body = await call.read_json(ChatChange)
    new_input = snapshot.prediction.input | {"metadata": body.metadata or {}}
    changed = await predictions.replace_input(snapshot, new_input)
    return encode_json(build_stored_chat(call, changed, catalog))


@router.delete(
    CHAT.path + "/{completion_id}",
    summary="Delete a stored chat",
    reply=ChatDeleted,
    errors=(409,),
)
async def delete_chat(
    call: Call, recording: Recording, predictions: Predictions, completion_id: str
) -> Response:
    snapshot = await find_stored(call, CHAT_PREFIX, CHAT.path, completion_id, recording)
    try:
        await predictions.delete(call.tenant, snapshot.prediction.id)
    except PredictionNotOver as error:
        raise PredictionNotOver("the chat completion has not finished") from error
    return encode_json(ChatDeleted(completion_id))


@router.get(
    CHAT.path + "/{completion_id}/messages",
    summary="List the messages of a stored chat",
    reply=ItemsPage,
    errors=(400,),
)
async def list_messages(
    call: Call,
    recording: Recording,
    completion_id: str,
    after: After = "",
    limit: Limit = 20,
    order: Order = "asc",
) -> Response:
    """Lists the messages the model received."""
    snapshot = await _find(call, completion_id, recording)
    body = ChatBody.model_validate(snapshot.prediction.input)
    messages = [
        message.model_dump(mode="json", exclude_unset=True)
        | {"id": f"{completion_id}-{number}", "content": message.text}
        for number, message in enumerate(body.messages)
    ]
    return encode_json(page_of(messages, limit, order, after))


async def _find(call: Call, completion_id: str, recording: Recording) -> PredictionSnapshot:
    snapshot = await find_stored(call, CHAT_PREFIX, CHAT.path, completion_id, recording)
    if not snapshot.prediction.input.get("store"):
        raise not_found(CHAT_PREFIX, completion_id)
    return snapshot


def _is_stored(snapshot: PredictionSnapshot) -> bool:
    prediction, record = snapshot
    is_chat = prediction.endpoint == CHAT.path and bool(prediction.input.get("store"))
    return is_chat and record.state == "succeeded"
