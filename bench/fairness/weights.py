"""Three tenants of weights 1, 2 and 4 that send more than one worker, or three, can compute.

Jobs are published directly, each with its tenant's weight, and each tenant keeps as many of them
unanswered. What counts is the work of the answers in the same time.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import AsyncExitStack, ExitStack

import uvloop

from bench.load.texts import Texts
from bench.pipeline import MODEL, Pipeline
from bench.report import Figure
from shared.message_encoding import decode_reply, encode_job
from shared.messages import Envelope, Item, Job, JobBody
from shared.pubsub.admin import PubSubAdmin
from shared.pubsub.client import PubSubTransport
from shared.pubsub.names import inbox_topic_id, jobs_topic_id, slot_subscription_id
from shared.pubsub.reply_inbox import make_inbox, remove_inbox
from shared.tasks.embedding import TextInput

WEIGHTS = {"one": 1.0, "two": 2.0, "four": 4.0}
UNANSWERED, ITEMS = 40, 16
"""Jobs of each tenant, and texts in a job: in all, less than the workers may hold."""
LEAD_S = 4.0
INBOX = "bench-weights"
WORKERS = (1, 3)
TOLERANCE_PERCENT = 5.0


def measure(pipeline: Pipeline, seconds: float) -> list[Figure]:
    """How far the tenants are from their shares, on one worker and on three."""
    figures = []
    for workers in WORKERS:
        with ExitStack() as stack:
            for _ in range(workers - 1):
                stack.enter_context(pipeline.another_worker(processes=1))
            work = uvloop.run(_drive(pipeline, seconds))
        figures += _figures(workers, work, seconds)
    return figures


def _figures(workers: int, work: Counter[str], seconds: float) -> list[Figure]:
    share = sum(work.values()) / sum(WEIGHTS.values())
    off = {name: 100 * (work[name] / (weight * share) - 1) for name, weight in WEIGHTS.items()}
    found = [Figure(f"{workers} workers: all tenants", sum(work.values()) / seconds, "tokens/s")]
    found += [
        Figure(f"{workers} workers: weight {WEIGHTS[name]:g}, off its share", off[name], "%")
        for name in WEIGHTS
    ]
    most = max(map(abs, off.values()))
    found.append(Figure(f"{workers} workers: most off", most, "%", "<=", TOLERANCE_PERCENT))
    return found


async def _drive(pipeline: Pipeline, seconds: float) -> Counter[str]:
    """The tokens of each tenant that were answered within `seconds`."""
    settings = pipeline.stack.settings
    async with AsyncExitStack() as stack:
        admin = await stack.enter_async_context(
            PubSubAdmin(settings.project, settings.pubsub_endpoint)
        )
        await make_inbox(admin, INBOX, 1)
        stack.push_async_callback(remove_inbox, admin, INBOX, 1)
        transport = await stack.enter_async_context(
            PubSubTransport(settings.project, settings.pubsub_endpoint)
        )
        return await _Senders(transport, pipeline.texts).run(seconds)


class _Senders:
    """All tenants: each publishes a job for each of its replies."""

    def __init__(self, transport: PubSubTransport, texts: Texts) -> None:
        self._transport = transport
        self._texts = texts.mixed(2000)
        self._sent = 0
        self._work: Counter[str] = Counter()

    async def run(self, seconds: float) -> Counter[str]:
        """The tokens answered within `seconds`, after the first LEAD_S."""
        inbox = self._transport.subscribe(slot_subscription_id(INBOX, 0), max_messages=1000)
        async with inbox as replies, asyncio.timeout(LEAD_S + seconds + 60):
            for tenant in WEIGHTS:
                for _ in range(UNANSWERED):
                    await self._send(tenant)
            began_s = time.monotonic()
            async for message in replies:
                replies.ack(message)
                at_s = time.monotonic() - began_s
                if at_s > LEAD_S + seconds:
                    break
                reply = decode_reply(message.data, message.attributes)
                tenant = reply.request_id.rpartition("-")[0]
                if at_s > LEAD_S:
                    self._work[tenant] += sum(
                        outcome.receipt.tokens or 0 for outcome in reply.body.outcomes
                    )
                await self._send(tenant)
        return self._work

    async def _send(self, tenant: str) -> None:
        self._sent += 1
        now_s = time.time()
        envelope = Envelope(
            request_id=f"{tenant}-{self._sent}", part=0, model=MODEL, tenant=tenant,
            weight=WEIGHTS[tenant], inbox=inbox_topic_id(INBOX), slot="0",
            deadline_s=now_s + 300, received_at_s=now_s, published_at_s=now_s,
        )  # fmt: skip
        first = self._sent * ITEMS % len(self._texts)
        items = [
            Item(index, TextInput(self._texts[(first + index) % len(self._texts)]))
            for index in range(ITEMS)
        ]
        body = JobBody(items, cache_read=False, cache_write=False)
        data, attributes = encode_job(Job(envelope, body))
        await self._transport.publish(jobs_topic_id(MODEL), data, attributes)
