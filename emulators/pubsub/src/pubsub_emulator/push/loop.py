"""Push delivery: a few workers per subscription, each sending one message at a time.

A push worker is a consumer, just like a stream, so the subscription handles leases, backoff,
ordering and dead letters.
"""

import asyncio
import logging

from pubsub_emulator.http_connection import HttpConnection, HttpFailed
from pubsub_emulator.push.payload import push_payload
from pubsub_emulator.state.ack_calls import acknowledge, modify_ack_deadline
from pubsub_emulator.state.consumers import Consumer, Delivery
from pubsub_emulator.state.subscription import SubscriptionState

PUSH_WORKERS = 32
"""Maximum number of messages sent to a subscription's endpoint at once.

The workers spend most of their time waiting for the endpoint.
"""
# https://cloud.google.com/pubsub/docs/push#receive_push: these statuses ack the message; all others
# nack it.
ACK_STATUSES = frozenset({102, 200, 201, 202, 204})
# The service's push backoff, used if the subscription does not have a retry policy.
SHORTEST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 60.0

_log = logging.getLogger(__name__)


class PushLoop:
    """A subscription's push workers.

    After a failure, all of a subscription's workers pause together.
    """

    def __init__(self, subscription: SubscriptionState) -> None:
        self._subscription = subscription
        self._failures = 0

    async def run(self) -> None:
        """Push with all workers until the task is canceled."""
        async with asyncio.TaskGroup() as workers:
            for _ in range(PUSH_WORKERS):
                workers.create_task(self._post_one_by_one())

    async def _post_one_by_one(self) -> None:
        woken = asyncio.Event()
        consumer = Consumer(woken.set, self._subscription.settings.ack_deadline_s, max_messages=1)
        connection = HttpConnection(self._subscription.settings.push_endpoint)
        try:
            while True:
                await asyncio.sleep(self._pause_s())
                woken.clear()
                if not await self._push_next(connection, consumer):
                    await woken.wait()
        finally:
            connection.close()
            self._subscription.leave(consumer)

    async def _push_next(self, connection: HttpConnection, consumer: Consumer) -> bool:
        consumer.ack_deadline_s = self._subscription.settings.ack_deadline_s
        deliveries = self._subscription.backlog.take(consumer, 1)
        for delivery in deliveries:
            await self._push(connection, delivery, consumer.ack_deadline_s)
        return bool(deliveries)

    async def _push(self, connection: HttpConnection, delivery: Delivery, timeout_s: float) -> None:
        ack_id = self._subscription.backlog.ack_ids.of(delivery)
        outcome: object = None
        try:
            async with asyncio.timeout(timeout_s):
                answer = await connection.post(*push_payload(self._subscription, delivery))
                outcome = answer.status
        except (HttpFailed, TimeoutError) as error:
            outcome = str(error) or f"no response within {timeout_s} s"
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
