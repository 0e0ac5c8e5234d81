"""Rows written as a worker would, at a fixed rate or one by one, and what they contained."""

from __future__ import annotations

import asyncio
import time

from shared.messages import Envelope, ItemOutcome, Receipt
from shared.models.catalog import Model
from shared.models.entry import Batch, Price
from shared.usage.row import Row, row_of
from shared.usage.writer import RowWriter

RATE_PER_S = 5000
BURST = 50
"""Number of rows written in one turn of the event loop."""
MODEL = Model(
    name="mini",
    task="embedding",
    source="local:x",
    dimensions=1,
    batch=Batch(max_tokens=64),
    price=Price(per_million_tokens_usd=0.01),
)


class RowTraffic:
    """Creates rows, each with a unique number at the end of its request."""

    def __init__(self) -> None:
        self.written = 0
        self.tokens = 0

    async def at_rate(self, writer: RowWriter, seconds: float) -> float:
        """Writes at RATE_PER_S.

        Returns:
            The fraction of the core it takes, excluding the creation of the rows.
        """
        lasts_s = seconds
        began_s, began_cpu_s, made_cpu_s = time.monotonic(), time.process_time(), 0.0
        while (elapsed_s := time.monotonic() - began_s) < seconds:
            due = int(elapsed_s * RATE_PER_S)
            written = 0
            while due > 0 and written < min(BURST, due):
                thread_s = time.thread_time()
                row = self.row()
                made_cpu_s += time.thread_time() - thread_s
                writer.write(row)
                written += 1
            began_s += written / RATE_PER_S
            seconds -= written / RATE_PER_S
            await asyncio.sleep(0 if due > BURST else 0.002)
        return (time.process_time() - began_cpu_s - made_cpu_s) / lasts_s

    def row(self) -> Row:
        number, now_s = self.written, time.time()
        self.written += 1
        tokens = 3 + number % 250
        self.tokens += tokens
        envelope = Envelope(
            request_id=f"req_{number * 2654435761 % 2**64:032x}{number:08x}",
            part=0,
            model=MODEL.name,
            tenant=f"tenant-{number % 20}",
            deadline_s=now_s + 30,
            received_at_s=now_s,
            published_at_s=now_s,
            api_instance="api-3f",
            key_id="4fJ0aQz81LmN",
            plan="team",
            user_agent_family="openai-python",
        )
        ms = number * 7919 % 100_003 / 1009
        receipt = Receipt("miss", now_s, now_s, now_s, ms, 2 * ms, 1 + number % 64, tokens)
        facts = {"worker": "worker-" + "0" * 24, "device": "NVIDIA L4", "region": "europe-west4"}
        outcome = ItemOutcome(0, "succeeded", receipt)
        return row_of(envelope, outcome, MODEL, replied_at_s=now_s, device_share=0.25, **facts)
