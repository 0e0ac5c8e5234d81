"""The row that each item leaves in BigQuery's usage table."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from shared.catalog import Model
from shared.charge import SHARED, charge_of, price_of
from shared.messages import Envelope, ItemOutcome


class Row(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One row of the usage table, one per item: the only declaration of its columns.

    BigQuery's schema and the view for tenants are made of it (infra/bigquery/generate.py): the type
    of a column follows from that of its field, and its description is the text below the field.
    `*_at_s` fields (unix seconds) are the TIMESTAMP columns of the same name without `_s`.
    """

    row_id: str
    """Identifies the row: <request_id>:<item>, or <request_id>:refused. The same item written twice
    has the same row_id."""
    request_id: str
    """One id from HTTP to reply."""
    item: int
    """The item's index in the request, from 0."""
    tenant: str | None = None
    """Who asked."""
    model: str
    """The model's name in the catalog; empty where a request was refused before it named one."""
    revision: str | None = None
    """The model's revision in the catalog."""
    task: str | None = None
    """The task of the model: embedding, similarity, image, text or custom."""
    region: str | None = None
    """Where the row was written."""
    api_instance: str | None = None
    """The API instance that took the request."""
    worker: str | None = None
    """The worker that ended the item; null for an item that the API answered itself."""
    received_at_s: float
    """When the API received the request; the partition of the row."""
    published_at_s: float | None = None
    """When the job was published."""
    pulled_at_s: float | None = None
    """When a worker pulled the job."""
    started_at_s: float | None = None
    """When the item's batch started to run."""
    finished_at_s: float | None = None
    """When the item's batch had run."""
    replied_at_s: float | None = None
    """When the reply was published, or the answer given."""
    queue_ms: float | None = None
    """From publishing to pulling, in milliseconds."""
    batch_wait_ms: float | None = None
    """From pulling to the start of the batch, in milliseconds."""
    inference_ms: float | None = None
    """How long the item's batch ran, in milliseconds."""
    total_ms: float | None = None
    """From receiving to replying, in milliseconds."""
    batch_size: int | None = None
    """Items in the batch."""
    cache: str | None = None
    """Where the result came from: miss, memory, redis, joined or none."""
    tokens: int | None = None
    """Tokens of a text, special tokens included, whoever pays; tokens times charged_share are
    charged."""
    pixel_steps: int | None = None
    """Width times height times steps of an image, whoever pays; pixel_steps times charged_share are
    charged."""
    steps_saved: int | None = None
    """Of an image that was canceled or late while it was drawn, the steps that were not computed.
    """
    device: str | None = None
    """What the batch ran on."""
    device_share: float | None = None
    """The part of the device that the worker has, from 0 to 1."""
    status: str
    """succeeded, failed, expired or canceled; refused: of a request that was not taken on, which
    has this one row."""
    error_code: str | None = None
    """Why the item has no result, or the request was refused."""
    attempt: int | None = None
    """The delivery of the job that ended the item, from 1."""
    cost_usd: float | None = None
    """What the item is charged, in US dollars: its price times charged_share."""
    client_request_id: str | None = None
    """The caller's x-request-id; sha256:<32 hex digits> of one that is longer than 128 characters
    or has others than letters, digits and ._:- in it."""
    charged_share: float | None = None
    """The part of the price that the item is charged: 1 where it was computed for this item and
    delivered, the catalog's price.cached_share where another's result was delivered, 0 where
    nothing was; times the part of the list price that the request pays."""
    key_id: str | None = None
    """The public part of the API key of the request; null where no key was required."""
    plan: str | None = None
    """The name of the tenant's plan when the request came; null where the tenant has none."""
    price_version: str | None = None
    """Which price of the catalog the item is charged by: its version, or a digest of its figures.
    """
    list_price_usd: float | None = None
    """What the item's work costs before any share, in US dollars: cost_usd is this times
    charged_share."""
    input_tokens: int | None = None
    """Tokens that were read; of an embedding, all of tokens."""
    output_tokens: int | None = None
    """Tokens that were written; null for models that write none."""
    cached_tokens: int | None = None
    """The part of input_tokens that was not computed again, as it was the start of an earlier
    input; null for models that keep none."""
    gpu_type: str | None = None
    """The GPU type of the worker's device, as infra/kubernetes/gpus.yaml names it; null for a CPU
    and other GPUs."""
    spot: bool | None = None
    """True if the worker's node is a spot node; null where that is not known."""
    priority: str | None = None
    """interactive or batch: the priority of the item."""
    user_agent_family: str | None = None
    """The kind of client, of a closed set: openai-python, curl, browser, other ...; null where the
    client did not say."""
    batch_id: str | None = None
    """The batch that the item is a line of; null for others."""
    cold_start: bool | None = None
    """True if the model process that computed the item loaded the model after the item was
    published; null where no model ran for it."""
    batch_capacity: int | None = None
    """The most items that a batch of the model may hold; null where no model ran for the item."""
    padded_tokens: int | None = None
    """Tokens that were computed for the item, with its part of the padding; null for models without
    tokens, for joined items, and where no model ran."""
    work: int | None = None
    """What the item weighs, as the class of a custom model says, whoever pays; work times
    charged_share are charged; null for other models."""
    flow: str | None = None
    """The flow that asked for the item; null for what a caller asked for itself."""
    step: str | None = None
    """The id of the flow's step; null as flow is."""
    adapter: str | None = None
    """The adapter (lora_weights) that an image was drawn with; null for one without, and for items
    without a result."""


class RowSink(Protocol):
    """Takes rows. Never blocks and never raises."""

    def write(self, *rows: Row, on_safe: Callable[[], None] | None = None) -> None:
        """Queues rows.

        `on_safe` is called once the death of this process can't lose any of them any more.
        """


def row_of(
    envelope: Envelope,
    outcome: ItemOutcome,
    model: Model | None,
    *,
    replied_at_s: float | None = None,
    **facts: Any,
) -> Row:
    """Returns the row of an item, from its envelope, receipt, charge, and `facts` of the writer.

    Args:
        envelope: of the item's job, or of the request.
        model: the catalog's entry, or None if it is no longer there.
        replied_at_s: unix time of the response. Default: now.
        facts: further fields of the row (worker, region …).
    """
    return Row(
        row_id=f"{envelope.request_id}:{outcome.index}",
        item=outcome.index,
        model=model.public_name if model else envelope.model,
        status=outcome.status,
        api_instance=envelope.api_instance or None,
        error_code=outcome.error.code if outcome.error else None,
        attempt=envelope.attempt,
        flow=envelope.flow or None,
        step=envelope.step or None,
        **envelope.row_columns(),
        **_work(envelope, outcome, model),
        **_times(envelope, outcome, replied_at_s or time.time()),
        **facts,
    )


def _work(envelope: Envelope, outcome: ItemOutcome, model: Model | None) -> dict[str, Any]:
    """Returns the work that was done for the item, and its cost."""
    receipt = outcome.receipt
    known = {name: getattr(receipt, name) for name in receipt.__struct_fields__}
    del known["is_delivered_in_part"]  # the charge says it
    del known["spent_work"]  # it counts toward limits only
    # A repeated answer may be another revision's.
    known["revision"] = receipt.revision or (model.revision if model else None)
    if receipt.tokens is not None:
        known["input_tokens"] = receipt.tokens - (receipt.output_tokens or 0)
    if receipt.batch_size is None:  # no model ran for it
        known["cold_start"] = None
    elif receipt.padded_tokens is None and receipt.cache not in SHARED:
        known["padded_tokens"] = receipt.tokens
    if model is None:
        return known | {"cost_usd": 0.0, "charged_share": 0.0}
    price = price_of(model, envelope.received_at_s, envelope.price_share)
    charge = charge_of(price, outcome)
    return known | {
        "task": model.task,
        "cost_usd": charge.cost_usd,
        "list_price_usd": charge.list_price_usd,
        "charged_share": charge.charged_share,
        "price_version": price.version,
        "batch_capacity": model.batch.max_items if receipt.batch_size is not None else None,
    }


def _times(envelope: Envelope, outcome: ItemOutcome, now_s: float) -> dict[str, Any]:
    """When the item came and went. What the receipt has of it is not in here."""
    published_at_s, queue_ms = envelope.published_at_s or None, None
    if published_at_s is not None:
        queue_ms = ((outcome.receipt.pulled_at_s or now_s) - published_at_s) * 1000
    return {
        "published_at_s": published_at_s,
        "replied_at_s": now_s,
        "queue_ms": queue_ms,
        "total_ms": (now_s - envelope.received_at_s) * 1000,
    }
