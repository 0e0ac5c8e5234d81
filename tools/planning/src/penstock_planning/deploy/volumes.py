"""Monthly volumes: messages, rows, objects, responses. Sizes are of encoded messages."""

from __future__ import annotations

import gzip
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

import msgspec

from infra import bigquery
from penstock_planning.deploy.rates import ModelRate
from penstock_planning.item_load import job_items
from penstock_planning.task_samples import SAMPLES
from shared.broker.transport import direct_id, inbox_topic_id
from shared.messages import (
    MAX_REPLY_BATCH_BYTES,
    Envelope,
    Item,
    ItemOutcome,
    Job,
    JobBody,
    Receipt,
    Reply,
    ReplyBody,
    encode_job,
    encode_reply,
    encode_reply_batch,
    encode_reply_body,
)
from shared.models.blob import INLINE_LIMIT_BYTES
from shared.models.catalog import Model
from shared.models.entry import Replies
from shared.usage.bigquery import LEVEL, Fields
from shared.usage.row import row_of
from shared.usage.writer import fields_of

HOURS = 730.0
"""Hours per month, 365 x 24 / 12, as in Google's price lists."""
SECONDS = HOURS * 3600
DAYS = HOURS / 24
MESSAGE_BYTES = 20 + 16
"""Overhead per message: the timestamp and message ID are billed (cloud.google.com/pubsub/pricing).
"""
KINDS: tuple[Replies, ...] = get_args(Replies)
SLOT: Mapping[Replies, str] = {"direct": "", "slots": "7"}
REQUEST_ID = "req_" + "0" * 32
NOW_S = 1_790_000_000.25
"""An arbitrary fixed time, because only the text's length matters."""

SAMPLE_ROWS = 50
"""Rows per object, used to calculate their compressed size.

Busy writers put more rows into an object.
"""


@dataclass(frozen=True)
class Volume:
    """One model's volumes for a month, across all regions.

    None means unknown because the rates don't specify an item's size.
    """

    model: str
    requests: float
    items: float
    computed: float
    jobs: float
    job_bytes: int | None
    replies: Replies
    """The inbox topic that receives the replies."""
    reply_bytes: Mapping[Replies, int | None]
    """Billed bytes of each publish or delivery of a reply, on either topic."""
    shared_replies: int
    """Maximum number of replies that share a message: a full batch for one instance."""
    shared_reply_bytes: int | None
    """Billed bytes of each publish or delivery of such a message."""
    row_bytes: int
    packed_row_bytes: int
    """Size of a row in objects for the row archive."""
    inputs_bytes: float
    """Size of inputs that are too large for a message."""
    results_bytes: float | None
    """Size of results that are too large for a message."""
    asked_bytes: float | None
    """Size of inputs as sent by callers."""
    answered_bytes: float | None


def volume(model: Model, rate: ModelRate) -> Volume:
    """Returns a model's monthly volumes, at its mean rate. Each item has a row."""
    requests = rate.mean_per_s * SECONDS
    items = requests * rate.items_per_request
    computed = items * (1 - rate.hit_share)
    per_request = rate.items_per_request * (1 - rate.hit_share)
    largest = job_items(model, rate)
    jobs = requests * max(min(1.0, per_request), per_request / largest)
    in_job = max(1, round(computed / jobs)) if jobs else 1
    replies = {kind: reply_bytes(model, rate.output_bytes, in_job, kind) for kind in KINDS}
    return Volume(
        model=model.name,
        requests=requests,
        items=items,
        computed=computed,
        jobs=jobs,
        job_bytes=None if rate.input_bytes is None else job_bytes(model, rate.input_bytes, in_job),
        replies=model.replies,
        reply_bytes=replies,
        shared_replies=count_shared_replies(model, replies[model.replies], in_job),
        shared_reply_bytes=estimate_shared_reply_bytes(model, rate.output_bytes, in_job),
        row_bytes=row_bytes(model),
        packed_row_bytes=measure_packed_row_bytes(model),
        inputs_bytes=computed * _apart(model, rate.input_bytes, INLINE_LIMIT_BYTES),
        results_bytes=None
        if replies[model.replies] is None
        else computed * _apart(model, rate.output_bytes, model.reply_limit_bytes),
        asked_bytes=None if rate.input_bytes is None else items * rate.input_bytes,
        answered_bytes=None if rate.output_bytes is None else items * rate.output_bytes,
    )


def _apart(model: Model, size_bytes: int | None, limit_bytes: int) -> int:
    """Returns how many bytes go to the object store instead of into a message.

    Texts and vectors never go there.
    """
    is_apart = size_bytes is not None and size_bytes > limit_bytes and model.definition.stores_blobs
    return size_bytes or 0 if is_apart else 0


def job_bytes(model: Model, input_bytes: int, items: int) -> int:
    """Returns a job's billed bytes: body, attributes, and overhead per message."""
    sample = SAMPLES[model.task].input(model, input_bytes)
    job = Job(
        _envelope(model),
        JobBody([Item(index, sample, cache_key="0" * 64) for index in range(items)]),
    )
    return _count_billed_bytes(*encode_job(job))


def reply_bytes(model: Model, output_bytes: int | None, items: int, replies: Replies) -> int | None:
    """Returns the billed bytes of each publish or delivery of a reply. None if unknown."""
    model = model.model_copy(update={"replies": replies})
    body = _reply_body(model, output_bytes, items)
    if body is None:
        return None
    return _count_billed_bytes(*encode_reply(Reply(REQUEST_ID, 0, SLOT[replies], body)))


def estimate_shared_reply_bytes(model: Model, output_bytes: int | None, items: int) -> int | None:
    """Returns the billed bytes of a message with `count_shared_replies`. None if unknown."""
    body = _reply_body(model, output_bytes, items)
    if body is None:
        return None
    count = count_shared_replies(
        model, reply_bytes(model, output_bytes, items, model.replies), items
    )
    replies = [(REQUEST_ID, 0, encode_reply_body(body))] * count
    return _count_billed_bytes(*encode_reply_batch(replies, SLOT[model.replies]))


def _reply_body(model: Model, output_bytes: int | None, items: int) -> ReplyBody | None:
    receipt = Receipt("miss", NOW_S, NOW_S, NOW_S, 10.25, 100.25, 8, 100)
    result = SAMPLES[model.task].result(model, output_bytes)
    if result is None:
        return None
    outcomes = [ItemOutcome(index, "succeeded", receipt, result) for index in range(items)]
    return ReplyBody(outcomes, worker="worker-" + "0" * 24, device="NVIDIA L4", replied_at_s=NOW_S)


def count_shared_replies(model: Model, size_bytes: int | None, items: int) -> int:
    """Returns the maximum number of replies that share a message.

    Replies that refer to an object don't share a message.

    Args:
        size_bytes: one reply's billed bytes, or None if unknown.
    """
    if model.definition.stores_blobs or not size_bytes:
        return 1
    return max(1, min(model.batch.max_items // items, MAX_REPLY_BATCH_BYTES // size_bytes))


def row_bytes(model: Model) -> int:
    """Returns a row's stored size: 8 bytes per number or time, 2 + length per string."""
    return sum(
        2 + len(value) if isinstance(value, str) else 8
        for value in sample_row(model, random.Random(0)).values()
        if value is not None
    )


def measure_packed_row_bytes(model: Model) -> int:
    """Returns the size of a row in the writers' objects, with varying IDs, times, and sizes.

    Rows are smaller in the archive's Parquet files.
    """
    chance = random.Random(0)
    rows = [sample_row(model, chance) for _ in range(SAMPLE_ROWS)]
    lines = b"\n".join(map(msgspec.json.encode, rows))
    return math.ceil(len(gzip.compress(lines, LEVEL)) / SAMPLE_ROWS)


def sample_row(model: Model, chance: random.Random) -> Fields:
    """Returns a sample row for an item, with random ids and times."""
    received_at_s = NOW_S + chance.random() * 10
    queued_ms, inference_ms = 100 * chance.random(), 100 * chance.random()
    replied_at_s = received_at_s + (queued_ms + inference_ms) / 1000
    receipt = Receipt(
        "miss", received_at_s, received_at_s, received_at_s, queued_ms, inference_ms, 8, 100
    )
    facts = {
        "worker": "worker-" + "0" * 24,
        "device": "NVIDIA L4",
        "region": "europe-west4",
        "device_share": 1.0,
        "gpu_type": "l4",
        "spot": True,
    }
    envelope = msgspec.structs.replace(
        _envelope(model),
        request_id=f"req_{chance.randbytes(16).hex()}",
        received_at_s=received_at_s,
        published_at_s=received_at_s,
    )
    outcome = ItemOutcome(0, "succeeded", receipt)
    return fields_of(row_of(envelope, outcome, model, replied_at_s=replied_at_s, **facts))


def row_days() -> float:
    """Returns the number of days after which a row is dropped: the partition's expiration."""
    return float(bigquery.table_options()["timePartitioning"]["expirationMs"]) / 86_400_000


def _envelope(model: Model) -> Envelope:
    return Envelope(
        request_id=REQUEST_ID,
        part=0,
        model=model.name,
        tenant="default",
        inbox=inbox_topic_id("17") if model.replies == "slots" else direct_id("17"),
        slot=SLOT[model.replies],
        deadline_s=NOW_S,
        received_at_s=NOW_S,
        published_at_s=NOW_S,
        api_instance="api-" + "0" * 24,
        traceparent="00-" + "0" * 32 + "-" + "0" * 16 + "-01",
        cache_key="0" * 64,
        key_id="0" * 12,
        plan="standard",
        user_agent_family="openai-python",
        replies="n",
    )


def _count_billed_bytes(data: bytes, attributes: dict[str, str]) -> int:
    return (
        len(data)
        + sum(len(name) + len(value) for name, value in attributes.items())
        + MESSAGE_BYTES
    )
