"""Push delivery: a few workers per subscription, each of which posts one message at a time.

A push worker is a consumer like a stream is, so leases, backoff, ordering and dead letters are the
subscription's own.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pubsub_emulator.calls.broker import Broker
from pubsub_emulator.push.connection import PushConnection, PushFailed
from pubsub_emulator.push.payload import push_payload
from pubsub_emulator.state.ack_calls import acknowledge, modify_ack_deadline
from pubsub_emulator.state.consumers import Consumer, Delivery
from pubsub_emulator.state.subscription import SubscriptionState

PUSH_WORKERS = 32
"""Messages of a subscription with its endpoint at a time. Most of the time they wait for others."""
# https://cloud.google.com/pubsub/docs/push#receive_push: these ack, anything else is a nack.
ACK_STATUSES = frozenset({102, 200, 201, 202, 204})
# The service's push backoff, used where the subscription has no retry policy of its own.
SHORTEST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 60.0

_log = logging.getLogger(__name__)


@asynccontextmanager
async def push_loops(broker: Broker) -> AsyncIterator[None]:
    """Push for every subscription with an endpoint until the block ends."""
    loops = _PushLoops(broker)
    broker.registry.on_push_config = loops.follow
    for subscription in broker.registry.subscriptions.values():
        loops.follow(subscription)
    try:
        yield
    finally:
        await loops.stop()


class _PushLoops:
    """The running loops by subscription, and their tasks."""

    def __init__(self, broker: Broker) -> None:
        self._subscriptions = broker.registry.subscriptions
        self._running: dict[str, tuple[bytes, asyncio.Task[None]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def follow(self, subscription: SubscriptionState) -> None:
        """Start or stop pushing. Only a different push configuration has an effect."""
        is_alive = self._subscriptions.get(subscription.path) is subscription
        is_pushed = (
            is_alive and subscription.settings.push_endpoint and not subscription.proto.detached
        )
        wanted = (
            subscription.proto.push_config.SerializeToString(deterministic=True)
            if is_pushed
            else b""
        )
        current, task = self._running.pop(subscription.path, (b"", None))
        if task is not None and current != wanted:
            task.cancel()
            task = None
        if wanted:
            self._running[subscription.path] = (wanted, task or self._start(subscription))

    async def stop(self) -> None:
        """Cancel every loop and wait until it is gone."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, subscription: SubscriptionState) -> asyncio.Task[None]:
        task = asyncio.create_task(_PushLoop(subscription).run())
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("push loop failed, this is a bug", exc_info=task.exception())


class _PushLoop:
    """The push workers of one subscription. They share the pause after a failure."""

    def __init__(self, subscription: SubscriptionState) -> None:
        self._subscription = subscription
        self._failures = 0

    async def run(self) -> None:
        async with asyncio.TaskGroup() as workers:
            for _ in range(PUSH_WORKERS):
                workers.create_task(self._post_one_by_one())

    async def _post_one_by_one(self) -> None:
        woken = asyncio.Event()
        consumer = Consumer(woken.set, self._subscription.settings.ack_deadline_s, max_messages=1)
        connection = PushConnection(self._subscription.settings.push_endpoint)
        try:
            while True:
                await asyncio.sleep(self._pause_s())
                woken.clear()
                if not await self._push_next(connection, consumer):
                    await woken.wait()
        finally:
            connection.close()
            self._subscription.leave(consumer)

    async def _push_next(self, connection: PushConnection, consumer: Consumer) -> bool:
        consumer.ack_deadline_s = self._subscription.settings.ack_deadline_s
        deliveries = self._subscription.backlog.take(consumer, 1)
        for delivery in deliveries:
            await self._push(connection, delivery, consumer.ack_deadline_s)
        return bool(deliveries)

    async def _push(self, connection: PushConnection, delivery: Delivery, timeout_s: float) -> None:
        ack_id = self._subscription.backlog.ack_ids.of(delivery)
        outcome: object = None
        try:
            async with asyncio.timeout(timeout_s):
                outcome = await connection.post(*push_payload(self._subscription, delivery))
        except (PushFailed, TimeoutError) as error:
            outcome = str(error) or f"no answer within {timeout_s} s"
        if outcome in ACK_STATUSES:
            self._failures = 0
            acknowledge(self._subscription.backlog, [ack_id])
            self._subscription.touch()
            return
        self._failures += 1
        _log.info(
            "push refused",
            extra={"subscription": self._subscription.path, "outcome": outcome, "ack_id": ack_id},
        )
        modify_ack_deadline(self._subscription.backlog, [ack_id], [0])

    def _pause_s(self) -> float:
        if self._failures == 0 or self._subscription.settings.maximum_backoff_s > 0:
            return 0.0
        return float(min(SHORTEST_PAUSE_S * 2.0 ** min(self._failures - 1, 30), LONGEST_PAUSE_S))
