"""/v1/conversations as in OpenAI's API: items that responses continue and append to."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field
from starlette.responses import Response

from api.bodies import Body, Metadata
from api.errors import NotFound
from api.http.auth import check_model
from api.http.call import Call
from api.http.encode_json import encode_json
from api.http.injection import injectable
from api.http.openapi import any_object
from api.http.recording import Recording
from api.http.router import Router
from api.openai.item_pages import After, ItemsPage, Limit, Order, page_of
from api.openai.responses_schemas import InputItem, ItemReference
from api.openai.stored import format_items, read_referenced_items, state_of
from api.predictions.conversations import (
    Conversation,
    ConversationBusy,
    ConversationEntry,
    Conversations,
)
from api.predictions.creation import PredictionSnapshot
from api.predictions.service import Predictions
from shared.errors import InputTooLarge
from shared.models.catalog import Catalog

MAX_NEW_ITEMS = 20
"""OpenAI's limit."""
PATH = "/v1/conversations"
router = Router(scope="text")


@injectable
class CallerConversations:
    """A caller's conversations, including the output of all finished responses."""

    def __init__(
        self, call: Call, catalog: Catalog, predictions: Predictions, conversations: Conversations
    ) -> None:
        self._call = call
        self._catalog = catalog
        self._predictions = predictions
        self._conversations = conversations

    async def read(self, conversation_id: str) -> Conversation:
        """Returns a conversation, first saving any output that was missing from it.

        Output that does not fit is returned without being saved.

        Raises:
            NotFound: the tenant does not have a conversation with this ID, or it has expired.
            ModelForbidden: the conversation contains output from a model the key may not use.
            ConversationBusy: other requests keep changing the conversation.
        """
        conversation = await _find(self._call, conversation_id, self._conversations)
        outputs: dict[str, list[ConversationEntry]] = {}
        for prediction in conversation.pending:
            snapshot = await self._prediction(prediction)
            if snapshot is None:
                outputs[prediction] = []
            elif snapshot.record.is_over:
                reply = state_of(self._call, snapshot, self._catalog)
                output = msgspec.to_builtins(reply.output)
                outputs[prediction] = [ConversationEntry(item) for item in output]
        if not outputs:
            return conversation

        def change(conversation: Conversation) -> None:
            conversation.entries = [
                new_entry
                for entry in conversation.entries
                for new_entry in outputs.get(entry.prediction, [entry])
            ]

        try:
            return await self.change(conversation_id, change)
        except InputTooLarge:
            # Otherwise, a full conversation could no longer be read.
            change(conversation)
            return conversation

    async def change(
        self, conversation_id: str, change: Callable[[Conversation], None]
    ) -> Conversation:
        """Changes a conversation, and returns it.

        Raises:
            NotFound: the tenant does not have a conversation with this ID, or it has expired.
            InputTooLarge: the conversation would have too many items, or the items would be too
                large.
            ConversationBusy: other requests keep changing the conversation.
        """
        return await _change(self._call, conversation_id, change, self._conversations)

    async def read_complete(self, conversation_id: str) -> Conversation:
        """Returns a conversation, provided no response is still being generated in it.

        Raises:
            PenstockError: as raised by `read`. ConversationBusy: a response is still being
                generated.
        """
        conversation = await self.read(conversation_id)
        if conversation.pending:
            raise ConversationBusy(
                "conversation: one of its responses is still being generated; try again when it "
                "has finished",
                field="conversation",
            )
        return conversation

    async def _prediction(self, prediction_id: str) -> PredictionSnapshot | None:
        try:
            return await self._predictions.read(self._call.tenant, prediction_id)
        except NotFound:
            return None


class ConversationBody(Body):
    """A conversation to create."""

    items: Annotated[list[InputItem], Field(max_length=MAX_NEW_ITEMS)] | None = None
    metadata: Metadata | None = None


class ConversationChange(Body):
    """Changes to a conversation."""

    metadata: Metadata | None


class NewItems(Body):
    """Items to append."""

    items: list[InputItem] = Field(min_length=1, max_length=MAX_NEW_ITEMS)


class ConversationReply(msgspec.Struct):
    """A conversation, without its items."""

    id: str
    created_at: int
    metadata: dict[str, str]
    object: Literal["conversation"] = "conversation"


class ConversationDeleted(msgspec.Struct):
    """A deleted conversation."""

    id: str
    deleted: bool = True
    object: Literal["conversation.deleted"] = "conversation.deleted"


@router.post(
    PATH,
    summary="Create a conversation",
    body=ConversationBody,
    reply=ConversationReply,
    errors=(404, 429),
)
async def create_conversation(
    call: Call, catalog: Catalog, recording: Recording, conversations: Conversations
) -> Response:
    """Responses that specify this `conversation` continue it.

    Conversations are kept for as long as responses are.
    """
    body = await call.read_json(ConversationBody)
    items = await items_to_add(call, body.items or [], catalog, recording)
    keep_s = call.caller.plan.prediction_keep_s
    conversation = await conversations.create(call.tenant, body.metadata or {}, items, keep_s)
    return _reply(conversation)


@router.get(PATH + "/{conversation_id}", summary="Get a conversation", reply=ConversationReply)
async def read_conversation(
    call: Call, conversations: Conversations, conversation_id: str
) -> Response:
    """Returns a conversation without its items."""
    return _reply(await _find(call, conversation_id, conversations))


@router.post(
    PATH + "/{conversation_id}",
    summary="Change a conversation",
    body=ConversationChange,
    reply=ConversationReply,
    errors=(429,),
)
async def change_conversation(
    call: Call, conversations: Conversations, conversation_id: str
) -> Response:
    """Replaces the conversation's metadata."""
    await _find(call, conversation_id, conversations)
    body = await call.read_json(ConversationChange)

    def change(conversation: Conversation) -> None:
        conversation.metadata = body.metadata or {}

    return _reply(await _change(call, conversation_id, change, conversations))


@router.delete(
    PATH + "/{conversation_id}",
    summary="Delete a conversation",
    reply=ConversationDeleted,
)
async def delete_conversation(
    call: Call, conversations: Conversations, conversation_id: str
) -> Response:
    """Deletes a conversation and its items. Its responses remain."""
    await _find(call, conversation_id, conversations)
    await conversations.delete(call.tenant, conversation_id)
    return encode_json(ConversationDeleted(conversation_id))


@router.get(
    PATH + "/{conversation_id}/items",
    summary="List the items of a conversation",
    reply=ItemsPage,
    errors=(400, 429),
)
async def list_items(
    conversations: CallerConversations,
    conversation_id: str,
    limit: Limit = 20,
    order: Order = "desc",
    after: After = "",
) -> Response:
    """Lists all items, including the output of finished responses."""
    conversation = await conversations.read(conversation_id)
    return encode_json(page_of(conversation.items, limit, order, after))


@router.post(
    PATH + "/{conversation_id}/items",
    summary="Add items to a conversation",
    body=NewItems,
    reply=ItemsPage,
    errors=(429,),
)
async def add_items(
    call: Call,
    catalog: Catalog,
    recording: Recording,
    conversations: Conversations,
    conversation_id: str,
) -> Response:
    await _find(call, conversation_id, conversations)
    body = await call.read_json(NewItems)
    items = await items_to_add(call, body.items, catalog, recording)
    await add_to(call, conversation_id, items, conversations)
    return encode_json(page_of(items, len(items), "asc", ""))


@router.get(
    PATH + "/{conversation_id}/items/{item_id}",
    summary="Get an item of a conversation",
    answers={200: any_object("The item.")},
    errors=(429,),
)
async def read_item(
    conversations: CallerConversations, conversation_id: str, item_id: str
) -> Response:
    conversation = await conversations.read(conversation_id)
    item = next((item for item in conversation.items if item["id"] == item_id), None)
    if item is None:
        raise _no_item(item_id)
    return encode_json(item)


@router.delete(
    PATH + "/{conversation_id}/items/{item_id}",
    summary="Delete an item of a conversation",
    reply=ConversationReply,
    errors=(400, 429),
)
async def delete_item(
    conversations: CallerConversations, conversation_id: str, item_id: str
) -> Response:
    """Removes an item. Returns the conversation."""
    await conversations.read(conversation_id)

    def change(conversation: Conversation) -> None:
        remaining = [entry for entry in conversation.entries if entry.item.get("id") != item_id]
        if len(remaining) == len(conversation.entries):
            raise _no_item(item_id)
        conversation.entries = remaining

    return _reply(await conversations.change(conversation_id, change))


async def add_to(
    call: Call,
    conversation_id: str,
    items: Sequence[dict[str, Any]],
    conversations: Conversations,
    *,
    model: str = "",
    prediction: str = "",
) -> None:
    """Appends items and, once a prediction has finished, its output.

    Does nothing if they are already in the conversation.

    `model`: the model that generated, or will generate, some of these items. Empty if there is
    none.
    """
    new = [ConversationEntry(item) for item in items] + [
        ConversationEntry(prediction=prediction)
    ] * bool(prediction)

    def change(conversation: Conversation) -> None:
        if prediction and conversation.has_response(prediction):
            return
        conversation.entries = [*conversation.entries, *new]
        if model and model not in conversation.models:
            conversation.models = [*conversation.models, model]

    await _change(call, conversation_id, change, conversations)


async def items_to_add(
    call: Call, items: Sequence[Any], catalog: Catalog, recording: Recording
) -> list[dict[str, Any]]:
    """Returns items in stored form, with IDs assigned and references resolved."""
    names = [item.id for item in items if isinstance(item, ItemReference)]
    known = await read_referenced_items(call, names, catalog, recording)
    dumped = [
        known[item.id]
        if isinstance(item, ItemReference)
        else item.model_dump(mode="json", exclude_unset=True)
        for item in items
    ]
    return as_stored(dumped)


def as_stored(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the items, each with an ID."""
    return format_items(items, secrets.token_hex(12))


async def _find(call: Call, conversation_id: str, conversations: Conversations) -> Conversation:
    """Returns one of the tenant's conversations, if the key may use all models in it."""
    conversation = await conversations.read(call.tenant, conversation_id)
    for model in conversation.models:
        check_model(call.caller, model)
    return conversation


async def _change(
    call: Call,
    conversation_id: str,
    change: Callable[[Conversation], None],
    conversations: Conversations,
) -> Conversation:
    keep_s = call.caller.plan.prediction_keep_s
    return await conversations.change(call.tenant, conversation_id, change, keep_s)


def _no_item(item_id: str) -> NotFound:
    return NotFound(f"Item with id '{item_id[:80]}' not found.")


def _reply(conversation: Conversation) -> Response:
    return encode_json(
        ConversationReply(conversation.id, int(conversation.created_at_s), conversation.metadata)
    )
