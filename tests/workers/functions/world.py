"""The functions' environment in a test: a model's topics, an inbox, records, rows."""

from __future__ import annotations

import asyncio
import base64
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any, Self

import httpx
from google.cloud import bigquery
from prometheus_client.parser import text_string_to_metric_families

from shared.broker.pubsub.admin import PubSubAdmin
from shared.broker.pubsub.client import PubSubTransport
from shared.broker.transport import (
    SubscriptionSettings,
    dead_letter_topic_id,
    jobs_topic_id,
    workers_subscription_id,
)
from shared.messages import Envelope, Item, Job, JobBody, Reply, decode_reply, encode_job
from shared.models.tasks.embedding import TextInput
from shared.predictions import Prediction, encode_document
from shared.stores.record_state import Record
from shared.webhooks.event import EventName, WebhookEvent, encode_webhook_event
from tests.limits import WAIT_LIMIT_S
from tests.record_stores import RecordStores

EVENTS = ("start", "output", "logs", "completed")


class World:
    """One test's model, with unique names, so that tests can share servers."""

    def __init__(
        self,
        admin: PubSubAdmin,
        broker: PubSubTransport,
        stores: RecordStores,
        table: bigquery.Client,
        functions_url: str,
        name: str,
    ) -> None:
        self.admin, self.broker, self.stores, self.table = admin, broker, stores, table
        self.functions_url = functions_url
        self.model = f"model-{name}"
        self.request_id = f"req_{name}"
        self.inbox = f"inbox.{name}"
        self.jobs, self.dead = jobs_topic_id(self.model), dead_letter_topic_id(self.model)
        self.workers = workers_subscription_id(self.model)
        self._events = f"webhooks.{name}"
        self._subscriptions: list[str] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """Starts topics, subscriptions, and a reader for the inbox."""
        await self._provision()
        async with self.broker.subscribe(self.inbox, max_messages=5) as self._replies:
            yield self
        for subscription_id in self._subscriptions:
            await self.admin.delete_subscription(subscription_id)

    async def _provision(self) -> None:
        for topic in (self.jobs, self.dead, self.inbox, "webhooks", self._events):
            await self.admin.ensure_topic(topic)
        push = {"retry_min_s": 0.1, "retry_max_s": 0.2, "ack_deadline_s": 60}
        await self._subscribe(
            self.workers,
            self.jobs,
            dead_letter_topic_id=self.dead,
            retry_min_s=0.1,
            retry_max_s=0.1,
        )
        dead_letter, webhook = f"{self.functions_url}/dead_letter", f"{self.functions_url}/webhook"
        await self._subscribe(f"{self.dead}.push", self.dead, push_endpoint=dead_letter, **push)
        await self._subscribe("webhooks.push", "webhooks", push_endpoint=webhook, **push)
        await self._subscribe(f"{self._events}.push", self._events, push_endpoint=webhook, **push)
        await self._subscribe(self.inbox, self.inbox)

    async def _subscribe(self, subscription_id: str, topic_id: str, **settings: Any) -> None:
        await self.admin.ensure_subscription(
            subscription_id, SubscriptionSettings(topic_id, **settings)
        )
        self._subscriptions.append(subscription_id)

    def job(self, texts: int = 2, **facts: Any) -> tuple[bytes, dict[str, str]]:
        now_s = time.time()
        given: dict[str, Any] = {
            "request_id": self.request_id,
            "part": 0,
            "model": self.model,
            "tenant": "t",
            "inbox": self.inbox,
            "slot": "1",
            "deadline_s": now_s + 60,
            "received_at_s": now_s,
            "published_at_s": now_s,
        }
        items = [Item(index, TextInput(f"text {index}")) for index in range(texts)]
        return encode_job(Job(Envelope(**(given | facts)), JobBody(items)))

    async def create(
        self, webhook: str = "", events: tuple[str, ...] = EVENTS, **facts: Any
    ) -> Prediction:
        """Creates a prediction as the API would."""
        now_s = time.time()
        prediction = Prediction(
            id=self.request_id,
            record=self.request_id,
            tenant="t",
            model=self.model,
            owner="penstock",
            version="1",
            input={"text": "a cat"},
            webhook=webhook,
            webhook_events=events,
            base_url="http://api.example",
            created_at_s=now_s,
            deadline_s=now_s + 60,
            **facts,
        )
        document = encode_document(prediction)
        await self.stores.predictions.create(
            self.request_id, "t", document, deadline_s=now_s + 60, keep_s=60
        )
        return prediction

    async def tell(self, event: EventName, sequence: int = 0) -> None:
        data, attributes = encode_webhook_event(WebhookEvent(self.request_id, event, sequence))
        await self.broker.publish(self._events, data, attributes)

    async def push_event(self, event: EventName, age_s: float) -> int:
        """Pushes an event directly, as if it had been published `age_s` seconds ago.

        Returns the response status.
        """
        data, attributes = encode_webhook_event(WebhookEvent(self.request_id, event))
        message = {
            "messageId": "1",
            "publishTime": datetime.fromtimestamp(time.time() - age_s, UTC).isoformat(),
            "data": base64.b64encode(data).decode(),
            "attributes": attributes,
        }
        async with httpx.AsyncClient(base_url=self.functions_url) as client:
            return (
                await client.post("/webhook", json={"message": message, "subscription": "s"})
            ).status_code

    async def reply(self) -> Reply:
        """Returns the next reply in the inbox."""
        async with asyncio.timeout(WAIT_LIMIT_S):
            message = await anext(aiter(self._replies))
        self._replies.ack(message)
        return decode_reply(message.data, message.attributes)

    async def record(self) -> Record:
        found = await self.stores.records.read(self.request_id)
        assert found is not None
        return found

    async def rows(self, count: int) -> list[dict[str, Any]]:
        """Returns this request's rows once there are `count` of them, or after WAIT_LIMIT_S."""
        until_s = time.monotonic() + WAIT_LIMIT_S
        while True:
            found = await asyncio.to_thread(self._rows)
            if len(found) >= count or time.monotonic() > until_s:
                return found

    async def deliveries(self, count: int) -> list[dict[str, Any]]:
        """The rows of this request's webhook deliveries, once there are at least `count` of them or
        WAIT_LIMIT_S has passed.
        """
        until_s = time.monotonic() + WAIT_LIMIT_S
        while True:
            found = await asyncio.to_thread(self._deliveries)
            if len(found) >= count or time.monotonic() > until_s:
                return found

    async def count(self, metric: str, label: str, at_least: float = 1) -> float:
        """One of the functions' counters, summed over the samples that have `label` as a value,
        once it is at least `at_least`.
        """
        until_s = time.monotonic() + WAIT_LIMIT_S
        while True:
            found = await asyncio.to_thread(self._count, metric, label)
            if found >= at_least:
                return found
            assert time.monotonic() < until_s, f"{metric} is {found}"

    def _count(self, metric: str, label: str) -> float:
        with urllib.request.urlopen(
            f"{self.functions_url}/metrics", timeout=WAIT_LIMIT_S
        ) as answer:
            families = text_string_to_metric_families(answer.read().decode())
            samples = [
                sample for family in families for sample in family.samples if sample.name == metric
            ]
        return sum(sample.value for sample in samples if label in sample.labels.values())

    def _rows(self) -> list[dict[str, Any]]:
        return self._of_request("rows_deduplicated", "received_at", "item")

    def _deliveries(self) -> list[dict[str, Any]]:
        return self._of_request("webhook_deliveries_deduplicated", "delivered_at", "delivered_at")

    def _of_request(self, view: str, partition: str, order: str) -> list[dict[str, Any]]:
        query = (
            f"SELECT * FROM penstock.{view} WHERE request_id = @id "
            f"AND {partition} > '2020-01-01' ORDER BY {order}"
        )
        wanted = bigquery.ScalarQueryParameter("id", "STRING", self.request_id)
        job = self.table.query(query, bigquery.QueryJobConfig(query_parameters=[wanted]))
        return [dict(row) for row in job.result()]
