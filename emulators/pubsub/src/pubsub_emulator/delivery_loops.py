"""A delivery loop for each subscription that this server itself delivers: push and BigQuery."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pubsub_emulator.bigquery.loop import BigQueryLoop
from pubsub_emulator.calls.broker import Broker
from pubsub_emulator.push.loop import PushLoop
from pubsub_emulator.state.subscription import SubscriptionState

_log = logging.getLogger(__name__)


@asynccontextmanager
async def delivery_loops(broker: Broker) -> AsyncIterator[None]:
    """Deliver messages for all push and BigQuery subscriptions until the block ends."""
    loops = _DeliveryLoops(broker)
    broker.registry.on_delivery_config = loops.follow
    for subscription in broker.registry.subscriptions.values():
        loops.follow(subscription)
    try:
        yield
    finally:
        await loops.stop()


class _DeliveryLoops:
    """Running loops and their tasks, keyed by subscription."""

    def __init__(self, broker: Broker) -> None:
        self._subscriptions = broker.registry.subscriptions
        self._bigquery_endpoint = broker.bigquery_endpoint
        self._running: dict[str, tuple[bytes, asyncio.Task[None]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def follow(self, subscription: SubscriptionState) -> None:
        """Start, restart, or stop a subscription's loop if its destination has changed."""
        is_alive = self._subscriptions.get(subscription.path) is subscription
        wanted = self._destination(subscription) if is_alive else b""
        current, task = self._running.pop(subscription.path, (b"", None))
        if task is not None and current != wanted:
            task.cancel()
            task = None
        if wanted:
            self._running[subscription.path] = (wanted, task or self._start(subscription))

    async def stop(self) -> None:
        """Cancel all loops and wait for them to finish."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _destination(self, subscription: SubscriptionState) -> bytes:
        """Return the destination as bytes, for use in comparisons.

        Empty: this server does not deliver.
        """
        proto, kind = subscription.proto, subscription.settings.kind
        if proto.detached or kind == "PULL":
            return b""
        if kind == "PUSH":
            return bytes(proto.push_config.SerializeToString(deterministic=True))
        if not self._bigquery_endpoint:
            # The subscription was created by a server that had a BigQuery endpoint. Its messages
            # wait.
            return b""
        config = type(proto.bigquery_config)()
        config.CopyFrom(proto.bigquery_config)
        config.ClearField("state")
        return bytes(config.SerializeToString(deterministic=True))

    def _start(self, subscription: SubscriptionState) -> asyncio.Task[None]:
        loop = (
            PushLoop(subscription)
            if subscription.settings.kind == "PUSH"
            else BigQueryLoop(subscription, self._bigquery_endpoint)
        )
        task = asyncio.create_task(loop.run())
        self._tasks.add(task)
        task.add_done_callback(self._note_end)
        return task

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("delivery loop failed, this is a bug", exc_info=task.exception())
