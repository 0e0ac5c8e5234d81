"""A base for reply inbox tests: a broker, instances connected to it, and a worker's replies."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from prometheus_client import REGISTRY

from api.dispatch.reply_inbox import PendingReply, ReplyInbox
from shared.broker.in_memory import InMemoryBroker
from shared.broker.pubsub.admin import PubSubAdmin
from shared.broker.pubsub.client import PubSubTransport
from shared.broker.transport import Admin, Transport
from shared.errors import Unavailable
from shared.messages import ItemOutcome, Receipt, Reply, ReplyBody, encode_reply
from shared.models.entry import Replies
from shared.settings import ApiSettings
from tests.limits import WAIT_LIMIT_S


@dataclass
class Broker:
    """A broker, real or in memory."""

    transport: Transport
    admin: Admin

    def instance(self, name: str = "api-1", **given: Any) -> ReplyInbox:
        """The inbox for an instance that has not started yet."""
        return ReplyInbox(inbox_settings(**given), self.transport, self.admin, name)

    async def reply_to(
        self, waiter: PendingReply, request_id: str, part: int = 0, worker: str = "w"
    ) -> None:
        """Publishes a reply as a worker does."""
        body = ReplyBody([ItemOutcome(0, "succeeded", Receipt())], worker=worker)
        data, attributes = encode_reply(Reply(request_id, part, waiter.slot, body))
        await self.transport.publish(waiter.inbox, data, attributes)

    async def is_answered(self, inbox: ReplyInbox, request_id: str, replies: Replies) -> bool:
        """True if a request to this instance receives its own reply."""
        with inbox.waiter(request_id, 0, replies) as waiter:
            await self.reply_to(waiter, request_id, worker=request_id)
            return (await waiter.reply(WAIT_LIMIT_S)).body.worker == request_id


def in_memory() -> Broker:
    memory = InMemoryBroker()
    return Broker(memory, memory)


@asynccontextmanager
async def embedded(endpoint: str) -> AsyncIterator[Broker]:
    project = f"inbox-{uuid4().hex[:8]}"
    async with (
        PubSubTransport(project, endpoint) as transport,
        PubSubAdmin(project, endpoint) as admin,
    ):
        yield Broker(transport, admin)


def inbox_settings(**given: Any) -> ApiSettings:
    return ApiSettings(**{"reply_slots": 3, "inbox_pool": 0, **given})


async def next_inbox(inbox: ReplyInbox, replies: Replies = "slots") -> str:
    """The topic of this instance's inbox, once it has one."""
    async with asyncio.timeout(WAIT_LIMIT_S):
        while True:
            try:
                with inbox.waiter("next", 0, replies) as waiter:
                    return waiter.inbox
            except Unavailable:
                await asyncio.sleep(0.02)


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_LIMIT_S):
        while True:
            if is_so():
                return
            await asyncio.sleep(0.01)


def counted(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"penstock_inbox_{name}_total", labels) or 0.0
