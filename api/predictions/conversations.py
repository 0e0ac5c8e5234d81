"""Conversations: lists of items that requests append to, stored within the prediction budget.

A conversation is one document in Redis. The document is replaced only if no other request has
changed it since this one read it. The output of a response that is still being generated is stored
as a reference to its prediction. The next reader replaces the reference with the items.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from api.errors import NotFound, NotNow
from api.predictions.service import DOCUMENT_MAX_BYTES
from shared.errors import InputTooLarge
from shared.stores.prediction_store import PredictionStore
from shared.stores.record_state import Record
from shared.stores.records import Records

ID = re.compile(r"conv_[0-9a-f]{24}")
MAX_ITEMS = 2048
"""Same as the limit on a response's input."""
MAX_PARTS = 8192
"""Maximum total number of parts in the items of one response or conversation.

Each part is a separate object: reading 100,000 empty parts, accumulated over many requests, took
250 ms each time.
"""
_ATTEMPTS = 10


class ConversationEntry(msgspec.Struct, omit_defaults=True):
    """An item, or a prediction whose output is still missing."""

    item: dict[str, Any] = {}
    prediction: str = ""


class Conversation(msgspec.Struct, kw_only=True):
    """A conversation's stored document."""

    id: str
    tenant: str
    created_at_s: float
    metadata: dict[str, str] = {}
    entries: list[ConversationEntry] = []
    models: list[str] = []
    """Models whose output the conversation contains or will contain."""

    @property
    def items(self) -> list[dict[str, Any]]:
        """The conversation's items, oldest first."""
        return [entry.item for entry in self.entries if entry.item]

    @property
    def room(self) -> int:
        """Number of items the conversation still has room for."""
        return max(0, MAX_ITEMS - len(self.entries))

    @property
    def pending(self) -> list[str]:
        """Predictions whose output is still missing."""
        return [entry.prediction for entry in self.entries if entry.prediction]

    def has_response(self, prediction: str) -> bool:
        """Returns whether a prediction was appended, even if its output is still missing.

        The IDs of its items contain its digits.
        """
        digits = prediction.rpartition("_")[2]
        return prediction in self.pending or any(digits in item["id"] for item in self.items)


def count_parts(items: Iterable[Mapping[str, Any]]) -> int:
    """Returns the number of parts in items: messages, function results, and reasoning."""
    return sum(len(value) for item in items for value in item.values() if isinstance(value, list))


_decoder = msgspec.json.Decoder(Conversation)


class ConversationBusy(NotNow):
    """Other requests are changing the conversation."""

    code = "conversation_locked"


class Conversations:
    """All tenants' conversations.

    Args:
        keep_s: how many seconds to keep a conversation after its last change, unless the plan
            specifies a different time.
    """

    def __init__(self, records: Records, store: PredictionStore, *, keep_s: int) -> None:
        self._records = records
        self._store = store
        self._keep_s = keep_s

    async def create(
        self,
        tenant: str,
        metadata: dict[str, str],
        items: list[dict[str, Any]],
        keep_s: int | None,
    ) -> Conversation:
        """Creates a conversation.

        Raises:
            InputTooLarge: there are too many items, or the items are too large.
        """
        conversation = Conversation(
            id=f"conv_{secrets.token_hex(12)}",
            tenant=tenant,
            created_at_s=time.time(),
            metadata=metadata,
            entries=[ConversationEntry(item) for item in items],
        )
        await self._store.put_document(
            conversation.id,
            tenant,
            _encode(conversation),
            keep_s=self._keep_s if keep_s is None else keep_s,
        )
        return conversation

    async def read(self, tenant: str, conversation_id: str) -> Conversation:
        """Returns one of the tenant's conversations.

        Raises:
            NotFound: the tenant has no conversation with this ID, or it has expired.
        """
        return (await self._read(tenant, conversation_id))[0]

    async def change(
        self,
        tenant: str,
        conversation_id: str,
        change: Callable[[Conversation], None],
        keep_s: int | None,
    ) -> Conversation:
        """Changes a conversation.

        `change` may be called several times, each time with a fresh copy.

        Raises:
            NotFound: the tenant has no conversation with this ID, or it has expired.
            InputTooLarge: the conversation would have too many items, or the items would be too
                large.
            ConversationBusy: other requests keep changing it.
        """
        keep_s = self._keep_s if keep_s is None else keep_s
        for _ in range(_ATTEMPTS):
            conversation, document = await self._read(tenant, conversation_id)
            change(conversation)
            if await self._store.put_document(
                conversation.id, tenant, _encode(conversation), keep_s=keep_s, replaces=document
            ):
                return conversation
        raise ConversationBusy(
            "conversation: is being modified by another request; try again", field="conversation"
        )

    async def delete(self, tenant: str, conversation_id: str) -> None:
        """Deletes a conversation, but not its responses.

        Raises:
            NotFound: the tenant has no conversation with this ID, or it has expired.
        """
        conversation = await self.read(tenant, conversation_id)
        await self._store.delete(conversation.id, Record(state="succeeded"), time.time())

    async def _read(self, tenant: str, conversation_id: str) -> tuple[Conversation, bytes]:
        record = None
        if ID.fullmatch(conversation_id):
            record = await self._records.read(conversation_id)
        if record is not None and record.document:
            conversation = _decoder.decode(record.document)
            if conversation.tenant == tenant:
                return conversation, record.document
        raise NotFound(f"Conversation with id '{conversation_id[:80]}' not found.")


def _encode(conversation: Conversation) -> bytes:
    if len(conversation.entries) > MAX_ITEMS:
        raise InputTooLarge(
            f"conversation: it would have {len(conversation.entries)} items, which exceeds "
            f"the maximum of {MAX_ITEMS}",
            field="conversation",
        )
    parts = count_parts(conversation.items)
    if parts > MAX_PARTS:
        raise InputTooLarge(
            f"conversation: its items would have {parts} parts in total, which exceeds the "
            f"maximum of {MAX_PARTS}; send longer texts in fewer parts",
            field="conversation",
        )
    document = msgspec.json.encode(conversation)
    if len(document) > DOCUMENT_MAX_BYTES:
        raise InputTooLarge(
            f"conversation: it would be {len(document)} bytes, which exceeds the maximum of "
            f"{DOCUMENT_MAX_BYTES}",
            field="conversation",
        )
    return document
