"""The broker's round trip: publish a job, pull it, publish the reply to an inbox, pull that.

The embedded Pub/Sub runs in a separate process, requester and responder in this one, as 2 cores
have it. Compared: direct replies with slots, memory with a data directory, and the embedded server
with Google's emulator (which knows no filters here, so direct replies) and with RabbitMQ, whose
quorum queue waits for the disk.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from uuid import uuid4

import numpy as np
import uvloop

from api.dispatch.reply_inbox import ReplyInbox
from bench.google_emulator import find_emulator, running_emulator
from bench.report import Figure, Outcome
from infra.local.process import Process, free_port, listens
from infra.local.stack_processes import RabbitServer, find_rabbitmq_server
from shared.brokers import admin_of, transport_of
from shared.catalog_entry import Replies
from shared.errors import ConfigurationError
from shared.messages import ItemOutcome, Receipt, Reply, ReplyBody, encode_reply
from shared.settings import ApiSettings
from shared.transport import SubscriptionSettings, Transport, jobs_topic_id, workers_subscription_id

SLOTS = 8
ROUND_TRIPS = {1: 1000, 8: 2000, 32: 4000, 128: 8000}
EMULATOR_SHARE = 10
"""The emulator gets a tenth of the round trips: it is slower by about that."""
ROUNDS = 3
LIMIT_S = 30.0
TEXT = (
    b'{"items": [{"index": 0, "input": {"type": "text", '
    b'"text": "a sentence of about twelve words"}}]}'
)

VARIANTS: dict[str, tuple[list[str], Replies, int]] = {
    "embedded, direct": ([], "direct", 1),
    f"embedded, {SLOTS} slots": ([], "slots", 1),
    "embedded in a directory, direct": (["--data-dir"], "direct", 1),
    "embedded in a directory with fsync, direct": (["--fsync", "--data-dir"], "direct", 4),
}
"""Brokers by name: server options (a directory follows), replies, divisor of the round trips.
"""

RABBITMQ = "rabbitmq, direct"

Measured = dict[str, float]


def run() -> Outcome:
    """Measures in rounds and keeps the best of each, because the machine is shared."""
    rounds: dict[str, list[Measured]] = {}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        endpoints = {
            name: stack.enter_context(_embedded(Path(folder) / str(number), options))
            for number, (name, (options, *_)) in enumerate(VARIANTS.items())
        }
        rabbitmq = _rabbitmq(stack, Path(folder))
        for _ in range(ROUNDS):
            for name, (_, replies, divisor) in VARIANTS.items():
                fewer = {in_flight: count // divisor for in_flight, count in ROUND_TRIPS.items()}
                _add(rounds, name, uvloop.run(_measure(endpoints[name], replies, fewer)))
            if rabbitmq is not None:
                measured = uvloop.run(_measure("", "direct", ROUND_TRIPS, broker=rabbitmq.url))
                _add(rounds, RABBITMQ, measured)
    emulator = find_emulator()
    if emulator is not None:
        with (
            tempfile.TemporaryDirectory() as folder,
            running_emulator(emulator, Path(folder)) as endpoint,
        ):
            fewer = {in_flight: count // EMULATOR_SHARE for in_flight, count in ROUND_TRIPS.items()}
            _add(rounds, "google emulator, direct", uvloop.run(_measure(endpoint, "direct", fewer)))
    figures = [figure for name, measured in rounds.items() for figure in _figures(name, measured)]
    return Outcome(figures, {"rounds": rounds, "load_after": os.getloadavg()[0]})


@contextmanager
def _embedded(folder: Path, options: list[str]) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "pubsub_emulator", "--port", str(port), *options]
    if options:
        command.append(str(folder / "data"))
    with Process("pubsub", command, folder) as process:
        process.wait_ready(lambda: listens(port), LIMIT_S)
        yield f"127.0.0.1:{port}"


def _rabbitmq(stack: ExitStack, folder: Path) -> RabbitServer | None:
    """A node of this machine's package. None if it is not installed."""
    try:
        find_rabbitmq_server()
    except ConfigurationError:
        return None
    return stack.enter_context(RabbitServer(folder / "rabbitmq", folder))


async def _measure(
    endpoint: str, replies: Replies, round_trips: dict[int, int], broker: str = ""
) -> dict[int, Measured]:
    project = f"bench-{uuid4().hex[:8]}"
    settings = ApiSettings(
        project=project,
        reply_slots=SLOTS,
        inbox_pool=0,
        broker=broker,
        pubsub_endpoint=endpoint,
    )
    async with (
        transport_of(settings) as requester,
        transport_of(settings) as responder,
        admin_of(settings) as admin,
    ):
        await admin.ensure_topic(jobs_topic_id("bench"))
        await admin.ensure_subscription(
            workers_subscription_id("bench"),
            SubscriptionSettings(jobs_topic_id("bench"), retry_min_s=0.1),
        )
        async with ReplyInbox(settings, requester, admin, "bench") as inbox:
            answering = asyncio.create_task(_answer(responder))
            try:
                await _drive(requester, inbox, replies, 1, 50)
                return {
                    in_flight: await _drive(requester, inbox, replies, in_flight, count)
                    for in_flight, count in round_trips.items()
                }
            finally:
                answering.cancel()
                await asyncio.gather(answering, return_exceptions=True)


async def _answer(transport: Transport) -> None:
    """A worker without a model: replies to each job at once, and acks after the reply was taken."""
    async with (
        transport.subscribe(workers_subscription_id("bench"), max_messages=256) as subscription,
        asyncio.TaskGroup() as group,
    ):
        body = ReplyBody([ItemOutcome(0, "succeeded", Receipt())], worker="bench")

        async def reply(message: object, attributes: dict[str, str]) -> None:
            data, reply_attributes = encode_reply(
                Reply(attributes["request_id"], 0, attributes.get("slot", ""), body)
            )
            await transport.publish(attributes["inbox"], data, reply_attributes)
            subscription.ack(message)  # type: ignore[arg-type]

        async for message in subscription:
            group.create_task(reply(message, dict(message.attributes)))


async def _drive(
    transport: Transport, inbox: ReplyInbox, replies: Replies, in_flight: int, count: int
) -> Measured:
    """`count` round trips, `in_flight` at a time: milliseconds, and round trips per second."""
    left, took_s = iter(range(count)), list[float]()

    async def one_after_another() -> None:
        for number in left:
            began_s = time.perf_counter()
            request_id = f"req_{in_flight}_{number}"
            with inbox.waiter(request_id, 0, replies) as waiter:
                attributes = {
                    "schema": "1",
                    "request_id": request_id,
                    "part": "0",
                    "inbox": waiter.inbox,
                    "slot": waiter.slot,
                }
                await transport.publish(jobs_topic_id("bench"), TEXT, attributes)
                await waiter.reply(LIMIT_S)
            took_s.append(time.perf_counter() - began_s)

    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    async with asyncio.TaskGroup() as group:
        for _ in range(in_flight):
            group.create_task(one_after_another())
    wall_s = time.perf_counter() - began_s
    p50, p95, p99 = (float(value) * 1000 for value in np.percentile(took_s, [50, 95, 99]))
    cpu_ms = (time.process_time() - began_cpu_s) * 1000 / count
    return {"p50": p50, "p95": p95, "p99": p99, "rate": count / wall_s, "client CPU": cpu_ms}


def _add(rounds: dict[str, list[Measured]], name: str, measured: dict[int, Measured]) -> None:
    for in_flight, one in measured.items():
        rounds.setdefault(f"{name}, {in_flight} in flight", []).append(one)


def _figures(name: str, rounds: list[Measured]) -> Iterator[Figure]:
    least = {"embedded, direct": 1000.0, RABBITMQ: 2000.0}.get(name.rpartition(", ")[0], 0.0)
    must_be_fast = least > 0
    for key in ("p50", "p95", "p99"):
        best = min(one[key] for one in rounds)
        if key == "p50" and must_be_fast and name.endswith(", 1 in flight"):
            yield Figure(f"{name}, {key}", best, "ms", "<=", 2.0)
        else:
            yield Figure(f"{name}, {key}", best, "ms")
    rate = max(one["rate"] for one in rounds)
    if must_be_fast and name.endswith(", 128 in flight"):
        yield Figure(f"{name}, round trips", rate, "/s", ">=", least)
    else:
        yield Figure(f"{name}, round trips", rate, "/s")
    yield Figure(f"{name}, client CPU", min(one["client CPU"] for one in rounds), "ms")
