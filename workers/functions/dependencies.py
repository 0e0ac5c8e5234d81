"""Dependencies shared by the functions in one process, opened when the first message arrives.

They can't be opened earlier: functions-framework loads a function in a parent process and calls it
in another, which runs the event loop. functions-framework doesn't notify a function when it exits,
but nothing is lost, because a push is acknowledged only after all of its work is done.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack

import msgspec

from shared.broker.transport import ReceivedMessage
from shared.brokers import transport_of
from shared.errors import Unavailable
from shared.models.catalog_file import read_catalog
from shared.stores.flow_runs import FlowRuns
from shared.stores.objects import UrlSigner
from shared.stores.records import Records
from shared.stores.records_redis import RecordsRedis
from shared.stores.token_streams import TokenStreams
from shared.stores.webhook_log import WebhookLog
from shared.usage.bigquery import Fields
from shared.usage.row import Row
from shared.usage.senders import TABLE, sender_of
from shared.usage.webhook_delivery import TABLE as WEBHOOK_DELIVERIES
from shared.usage.writer import fields_of
from workers.functions.dead_letter import DeadLetters
from workers.functions.deliveries import Deliveries, DeliveryState
from workers.functions.handler import Handler
from workers.functions.receiver_permits import ReceiverPermits
from workers.functions.settings import FunctionSettings
from workers.functions.webhook import ATTRIBUTES, EventWebhooks, Webhooks

log = logging.getLogger(__name__)


class FunctionDependencies:
    """Opens everything a function needs, but only once."""

    def __init__(self, settings: FunctionSettings) -> None:
        self._settings = settings
        self._stack = AsyncExitStack()
        self._open_lock = asyncio.Lock()
        self._redis: RecordsRedis | None = None
        self._handlers: dict[str, Handler] = {}

    async def dead_letter(self, message: ReceivedMessage) -> None:
        await (await self._handler("dead_letter"))(message)

    async def webhook(self, message: ReceivedMessage) -> None:
        await (await self._handler("webhook"))(message)

    async def close(self) -> None:
        """Closes everything that was opened, if the process is notified before it exits."""
        await self._stack.aclose()

    async def _handler(self, function: str) -> Handler:
        async with self._open_lock:
            if function not in self._handlers:
                openings = {"dead_letter": self._open_dead_letters, "webhook": self._open_webhooks}
                self._handlers[function] = await openings[function]()
        return self._handlers[function]

    async def _open_dead_letters(self) -> Handler:
        settings = self._settings
        catalog = read_catalog(settings.models_file)
        publisher = await self._stack.enter_async_context(transport_of(settings))
        redis, table = await self._open_redis(), RowTable(settings)
        return DeadLetters(
            Records(redis), FlowRuns(redis), publisher, table, catalog, settings.region
        ).answer

    async def _open_webhooks(self) -> Handler:
        settings = self._settings
        redis = await self._open_redis()
        delivery_state = await self._stack.enter_async_context(DeliveryState(settings.redis_url))
        url_signer = UrlSigner(settings.secret)
        turns = ReceiverPermits()
        deliveries = Deliveries(RowTable(settings, WEBHOOK_DELIVERIES), settings.region)
        webhooks = Webhooks(
            Records(redis),
            TokenStreams(redis),
            WebhookLog(redis),
            delivery_state,
            url_signer,
            settings.webhook_secrets,
            deliveries,
            turns,
            allow_private=settings.webhooks_private,
        )
        events = EventWebhooks(
            settings.webhook_secrets,
            deliveries,
            delivery_state,
            turns,
            allow_private=settings.webhooks_private,
        )

        async def deliver(message: ReceivedMessage) -> None:
            if ATTRIBUTES & message.attributes.keys():
                await events.deliver(message)
            else:
                await webhooks.deliver(message)

        return deliver

    async def _open_redis(self) -> RecordsRedis:
        if self._redis is None:
            self._redis = await self._stack.enter_async_context(
                RecordsRedis(self._settings.records_redis_url)
            )
        return self._redis


class _Group:
    """Rows that are sent together."""

    def __init__(self) -> None:
        self.rows: list[Fields] = []
        self.is_sent = False
        self.error: Unavailable | None = None


class RowTable:
    """A table of rows.

    Unlike RowWriter, this class waits until the rows are written, because a function has no disk.
    Rows that arrive while others are being sent go out together in the next call.
    """

    def __init__(self, settings: FunctionSettings, table: str = TABLE) -> None:
        self._sender = sender_of(settings, table)
        self._send_lock = asyncio.Lock()
        self._waiting = _Group()

    async def write(self, rows: list[Row]) -> None:
        """Same as `insert`, but for rows of items."""
        await self.insert([fields_of(row) for row in rows])

    async def insert(self, rows: list[Fields]) -> None:
        """Returns once `rows` are safely stored. Rows that are rejected permanently are logged.

        Raises:
            Unavailable: it is unknown whether the rows are safe.
        """
        group = self._waiting
        group.rows += rows
        async with self._send_lock:
            if not group.is_sent:
                self._waiting = _Group()
                await self._send(group)
        if group.error is not None:
            raise group.error

    async def _send(self, group: _Group) -> None:
        group.is_sent = True
        try:
            lines = [msgspec.json.encode(fields) for fields in group.rows]
            refused = await asyncio.to_thread(self._sender.send, lines)
        except Unavailable as error:
            group.error = error
            return
        except BaseException:
            # The task that sends on behalf of other tasks may be canceled, which leaves the result
            # unknown.
            group.error = Unavailable("BigQuery: the call was cut off")
            raise
        for line, reason in refused:
            log.error("row refused", extra={"row": msgspec.json.decode(line), "reason": reason})
