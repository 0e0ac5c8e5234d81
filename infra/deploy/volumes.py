"""What a month of requests moves: messages, rows, objects, answers; sizes are those of messages as they are encoded."""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from infra import bigquery
from infra.deploy.rates import ModelRate
from shared.blob import INLINE_LIMIT_BYTES, Blob
from shared.catalog import Model
from shared.messages import (
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
)
from shared.tasks.embedding import EmbeddingResult, TextInput
from shared.tasks.image import ImageInput, ImageResult
from shared.usage.row import row_of

HOURS = 730.0
"""Of a month: 365 x 24 / 12, as Google's price lists have it."""
SECONDS = HOURS * 3600
DAYS = HOURS / 24
MESSAGE_BYTES = 20 + 16
"""Billed with every message besides body and attributes: timestamp and message id (cloud.google.com/pubsub/pricing)."""
LARGEST_JOB_ITEMS = 16
"""As in api/dispatch/job_sender.py, which a test holds against this."""
NOW_S = 1_790_000_000.25
"""Any moment: what counts is its length."""


@dataclass(frozen=True)
class Volume:
    """A month of one model, all regions together. None: not known, as the rates do not say how large an item is."""

    model: str
    requests: float
    items: float
    computed: float
    jobs: float
    job_bytes: int | None
    reply_bytes: int | None
    row_bytes: int
    inputs_bytes: float
    """Of inputs that are too large for a message."""
    results_bytes: float | None
    """Of results that are."""
    answered_bytes: float | None


def volume(model: Model, rate: ModelRate) -> Volume:
    """What the mean rate of a model adds up to in a month; each computed item is one of a job's, and leaves a row."""
    requests = rate.mean_per_s * SECONDS
    items = requests * rate.items_per_request
    computed = items * (1 - rate.hit_share)
    per_request = rate.items_per_request * (1 - rate.hit_share)
    largest = largest_job(model)
    jobs = requests * max(min(1.0, per_request), per_request / largest)
    in_job = max(1, round(computed / jobs)) if jobs else 1
    known = model.task == "embedding" or rate.output_bytes is not None
    return Volume(
        model=model.name,
        requests=requests,
        items=items,
        computed=computed,
        jobs=jobs,
        job_bytes=None if rate.input_bytes is None else job_bytes(model, rate.input_bytes, in_job),
        reply_bytes=reply_bytes(model, rate.output_bytes or 0, in_job) if known else None,
        row_bytes=row_bytes(model),
        inputs_bytes=computed * _apart(model, rate.input_bytes),
        results_bytes=computed * _apart(model, rate.output_bytes) if known else None,
        answered_bytes=None if rate.output_bytes is None else items * rate.output_bytes,
    )


def _apart(model: Model, size_bytes: int | None) -> int:
    """Bytes that lie in the object store instead of a message; texts and vectors never do."""
    return size_bytes if size_bytes and size_bytes > INLINE_LIMIT_BYTES and model.task == "image" else 0


def largest_job(model: Model) -> int:
    """Items of a job at most, as api/dispatch/job_sender.py splits: replies stay inline, an image is a job alone."""
    if model.task != "embedding" or not model.dimensions:
        return 1
    vector_bytes = math.ceil(model.dimensions * 4 / 3) * 4
    return max(1, min(LARGEST_JOB_ITEMS, INLINE_LIMIT_BYTES // vector_bytes))


def job_bytes(model: Model, input_bytes: int, items: int) -> int:
    """What a job is billed for: body, attributes, and what every message has."""
    image = None
    text = "x" * input_bytes
    if input_bytes > INLINE_LIMIT_BYTES:
        text, image = "", Blob("image/png", object_key="0" * 64)
    given = (
        TextInput(text, "none")
        if model.task == "embedding"
        else ImageInput(
            text,
            width=model.image.width,
            height=model.image.height,
            steps=model.image.steps,
            guidance_scale=model.image.guidance_scale,
            seed=2**31,
            scheduler=model.image.scheduler,
            image=image,
        )
    )
    job = Job(_envelope(model), JobBody([Item(index, given, cache_key="0" * 64) for index in range(items)]))
    return _billed(*encode_job(job))


def reply_bytes(model: Model, output_bytes: int, items: int) -> int:
    """What a reply is billed for each time that it is published or delivered."""
    receipt = Receipt("miss", NOW_S, NOW_S, NOW_S, 10.25, 100.25, 8, 100)
    if model.task == "embedding":
        result: EmbeddingResult | ImageResult = EmbeddingResult(bytes(4 * (model.dimensions or 0)), 100)
    else:
        inline = output_bytes <= INLINE_LIMIT_BYTES
        blob = Blob("image/png", bytes(output_bytes)) if inline else Blob("image/png", object_key="0" * 64)
        result = ImageResult(blob, model.image.width, model.image.height, 2**31, 10**6)
    outcomes = [ItemOutcome(index, "succeeded", receipt, result) for index in range(items)]
    body = ReplyBody(outcomes, worker="worker-" + "0" * 24, device="NVIDIA L4", replied_at_s=NOW_S)
    return _billed(*encode_reply(Reply("req_" + "0" * 32, 0, "79", body)))


def row_bytes(model: Model) -> int:
    """What a row is stored as: 8 bytes a number or time, 2 + its length a string (BigQuery's data size calculation)."""
    receipt = Receipt("miss", NOW_S, NOW_S, NOW_S, 10.25, 100.25, 8, 100)
    outcome = ItemOutcome(0, "succeeded", receipt)
    facts = {"worker": "worker-" + "0" * 24, "device": "NVIDIA L4", "region": "europe-west4", "device_share": 1.0}
    row = msgspec.structs.asdict(row_of(_envelope(model), outcome, model, replied_at_s=NOW_S, **facts))
    return sum(2 + len(value) if isinstance(value, str) else 8 for value in row.values() if value is not None)


def row_days() -> float:
    """Days after which a row is dropped: the partition's expiration."""
    return float(bigquery.table_options()["timePartitioning"]["expirationMs"]) / 86_400_000


def _envelope(model: Model) -> Envelope:
    return Envelope(
        request_id="req_" + "0" * 32,
        part=0,
        model=model.name,
        tenant="default",
        inbox="inbox.17",
        slot="79",
        deadline_s=NOW_S,
        received_at_s=NOW_S,
        published_at_s=NOW_S,
        api_instance="api-" + "0" * 24,
        traceparent="00-" + "0" * 32 + "-" + "0" * 16 + "-01",
        cache_key="0" * 64,
    )


def _billed(data: bytes, attributes: dict[str, str]) -> int:
    return len(data) + sum(len(name) + len(value) for name, value in attributes.items()) + MESSAGE_BYTES
