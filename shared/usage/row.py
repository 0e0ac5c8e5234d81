"""The row written for each item to BigQuery's usage table."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Protocol, TypeVar

import msgspec

from shared.messages import Envelope, ItemOutcome
from shared.models.catalog import Model
from shared.money.charge import SHARED, ItemPrice, charge_of, price_of, work_unit_of

T = TypeVar("T")
Shown = Annotated[T, "tenants see it"]
"""Marks a column that tenants see."""


def _column_of(field: str) -> str:
    return field.removesuffix("_s") if field.endswith("_at_s") else field


class Row(msgspec.Struct, kw_only=True, omit_defaults=True, rename=_column_of):
    """One row of the usage table, one per item: the only declaration of its columns.

    BigQuery's schema and the tenants' view are generated from it (infra/bigquery/generate.py): a
    column's type follows from its field, and its description is the text below the field. `*_at_s`
    fields (Unix seconds) are the TIMESTAMP columns of the same name without `_s`. Tenants see the
    columns that are `Shown`. Such a column must not reveal workers or other requests in the batch.
    """

    row_id: Shown[str]
    """Identifies the row: <request_id>:<item>, or <request_id>:refused. The same item written twice
    has the same row_id."""
    request_id: Shown[str]
    """The request's ID, the same from HTTP to reply."""
    item: Shown[int]
    """The item's index in the request, from 0."""
    tenant: str | None = None
    """The tenant that sent the request."""
    model: Shown[str]
    """The model's name in the catalog; empty if a request was rejected before it named one."""
    revision: Shown[str | None] = None
    """The model's revision in the catalog."""
    task: str | None = None
    """The model's task: embedding, similarity, image, text, or custom."""
    region: str | None = None
    """The region in which the row was written."""
    api_instance: str | None = None
    """The API instance that received the request."""
    worker: str | None = None
    """The worker that finished the item; null if the API finished it without a worker."""
    received_at_s: Shown[float]
    """When the API received the request; the row's partition. Filter by it in each query."""
    published_at_s: float | None = None
    """When the job was published."""
    pulled_at_s: float | None = None
    """When a worker pulled the job."""
    started_at_s: float | None = None
    """When the item's batch started to run."""
    finished_at_s: float | None = None
    """When the item's batch finished."""
    replied_at_s: Shown[float | None] = None
    """When the reply was published or the response sent."""
    queue_ms: Shown[float | None] = None
    """Time from publishing to pulling."""
    batch_wait_ms: Shown[float | None] = None
    """Time from pulling to the start of the batch."""
    inference_ms: Shown[float | None] = None
    """How long the item's batch ran."""
    total_ms: Shown[float | None] = None
    """Time from receiving the request to replying."""
    batch_size: int | None = None
    """Items in the batch."""
    cache: Shown[str | None] = None
    """Origin of the result: miss, memory, redis, joined, or none."""
    tokens: Shown[int | None] = None
    """Tokens of a text, including special tokens; tokens times charged_share are charged."""
    pixel_steps: Shown[int | None] = None
    """Width x height x steps of an image; pixel_steps times charged_share are charged."""
    steps_saved: int | None = None
    """Steps that were not computed for an image that was canceled or late while being drawn."""
    device: str | None = None
    """The device that the batch ran on."""
    device_share: float | None = None
    """The worker's share of the device, or its number of devices if it has several."""
    status: Shown[str]
    """succeeded, failed, expired, or canceled; refused: the only row of a request that was rejected
    as a whole.
    """
    error_code: Shown[str | None] = None
    """Why the item has no result, or why the request was rejected."""
    attempt: int | None = None
    """The job's final delivery attempt, from 1."""
    cost_usd: Shown[float | None] = None
    """Charge for the item: its price times charged_share."""
    client_request_id: Shown[str | None] = None
    """The caller's x-request-id; sha256:<32 hex digits> if it is longer than 128 characters or
    contains characters other than letters, digits, dots, underscores, colons, and hyphens.
    """
    charged_share: Shown[float | None] = None
    """The share of the price that is charged: 1 if the item was computed and delivered, the
    catalog's price.cached_share if another item's result was delivered, 0 if nothing was delivered;
    times the share of the list price that the request pays.
    """
    key_id: Shown[str | None] = None
    """The public part of the request's API key; null if keys were not required."""
    plan: Shown[str | None] = None
    """The tenant's plan when the request arrived; null if there was none."""
    price_version: Shown[str | None] = None
    """The version of the price in the catalog, or a digest of its figures."""
    list_price_usd: Shown[float | None] = None
    """The price of the item's work before any share: cost_usd is this times charged_share."""
    input_tokens: Shown[int | None] = None
    """Tokens read; for an embedding, all tokens."""
    output_tokens: Shown[int | None] = None
    """Tokens generated; null for models that don't generate text."""
    cached_tokens: Shown[int | None] = None
    """The part of input_tokens that was not computed again because an earlier input had the same
    beginning; null for models without such a cache.
    """
    gpu_type: str | None = None
    """The GPU type of the worker's device, as named in infra/kubernetes/gpus.yaml; null for a CPU
    and other GPUs.
    """
    spot: bool | None = None
    """True if the worker's node is a spot node; null if unknown."""
    priority: Shown[str | None] = None
    """The item's priority: interactive or batch."""
    user_agent_family: Shown[str | None] = None
    """The kind of client, from a fixed set: openai-python, curl, browser, other, and so on; null if
    unknown.
    """
    batch_id: Shown[str | None] = None
    """The batch that contains the item; null for other items."""
    cold_start: bool | None = None
    """True if the model process that computed the item loaded the model after the item was
    published; null if no model ran for it.
    """
    batch_capacity: int | None = None
    """Maximum items per batch of the model; null if no model ran for the item."""
    padded_tokens: int | None = None
    """Tokens computed for the item, including its part of the padding; null for models without
    tokens, for joined items, and if no model ran.
    """
    work: Shown[int | None] = None
    """The item's work, as returned by a custom model's class; work times charged_share are charged;
    null for other models.
    """
    flow: Shown[str | None] = None
    """The flow that requested the item; null if a caller requested it."""
    step: Shown[str | None] = None
    """The ID of the flow's step; null if flow is null."""
    adapter: Shown[str | None] = None
    """The image's adapter (lora_weights); null without an adapter, and for items without a result.
    """
    work_unit: Shown[str | None] = None
    """The unit of work if the price depends on it: seconds, characters, or pages; null for other
    items, and in rows written by older releases.
    """


class RowSink(Protocol):
    """Accepts rows. Never blocks and never raises."""

    def write(self, *rows: Row, on_safe: Callable[[], None] | None = None) -> None:
        """Queues rows.

        `on_safe` is called once the rows would survive a crash of this process.
        """


def row_of(
    envelope: Envelope,
    outcome: ItemOutcome,
    model: Model | None,
    *,
    replied_at_s: float | None = None,
    **facts: Any,
) -> Row:
    """Returns one item's row. See `rows_of`."""
    return rows_of(envelope, [outcome], model, replied_at_s=replied_at_s, **facts)[0]


def rows_of(
    envelope: Envelope,
    outcomes: Sequence[ItemOutcome],
    model: Model | None,
    *,
    replied_at_s: float | None = None,
    **facts: Any,
) -> list[Row]:
    """Returns the rows of a job's items: envelope, receipt, charge, and `facts` from the writer.

    Args:
        model: its catalog entry, or None if that no longer exists.
        replied_at_s: Unix time of the response. Default: now.
        facts: additional fields of the rows (worker, region …).
    """
    now_s = replied_at_s or time.time()
    price = price_of(model, envelope.received_at_s, envelope.price_share) if model else None
    same = {
        "model": envelope.model,
        "api_instance": envelope.api_instance or None,
        "attempt": envelope.attempt,
        "flow": envelope.flow or None,
        "step": envelope.step or None,
        "published_at_s": envelope.published_at_s or None,
        "replied_at_s": now_s,
        "total_ms": (now_s - envelope.received_at_s) * 1000,
        **envelope.row_columns(),
        **facts,
    }
    if model is not None and price is not None:
        same |= {"model": model.public_name, "task": model.task, "price_version": price.version}
        same["work_unit"] = work_unit_of(model, price)
    rows, alike = list[Row](), dict[tuple[object, ...], Row]()
    for outcome in outcomes:
        error_code = outcome.error.code if outcome.error else None
        # Many texts in a job have the same length, so their rows differ only in the item.
        kind = (outcome.status, error_code, *msgspec.structs.astuple(outcome.receipt))
        row_id = f"{envelope.request_id}:{outcome.index}"
        if kind in alike:
            row = msgspec.structs.replace(alike[kind], row_id=row_id, item=outcome.index)
        else:
            row = alike[kind] = Row(
                row_id=row_id,
                item=outcome.index,
                status=outcome.status,
                error_code=error_code,
                queue_ms=_queue_ms(envelope, outcome, now_s),
                **same,
                **_work(outcome, model, price),
            )
        rows.append(row)
    return rows


def _work(outcome: ItemOutcome, model: Model | None, price: ItemPrice | None) -> dict[str, Any]:
    """Returns the work done for the item, and its cost."""
    receipt = outcome.receipt
    known = msgspec.structs.asdict(receipt)
    del known["is_delivered_in_part"]  # already included in the charge
    del known["spent_work"]  # counts only toward limits
    # A repeated answer may come from another revision.
    known["revision"] = receipt.revision or (model.revision if model else None)
    if receipt.tokens is not None:
        known["input_tokens"] = receipt.tokens - (receipt.output_tokens or 0)
    if receipt.batch_size is None:  # no model ran for it
        known["cold_start"] = None
    elif receipt.padded_tokens is None and receipt.cache not in SHARED:
        known["padded_tokens"] = receipt.tokens
    if model is None or price is None:
        known["cost_usd"] = known["charged_share"] = 0.0
        return known
    charge = charge_of(price, outcome)
    known["cost_usd"] = charge.cost_usd
    known["list_price_usd"] = charge.list_price_usd
    known["charged_share"] = charge.charged_share
    known["batch_capacity"] = model.batch.max_items if receipt.batch_size is not None else None
    return known


def _queue_ms(envelope: Envelope, outcome: ItemOutcome, now_s: float) -> float | None:
    if not envelope.published_at_s:
        return None
    return ((outcome.receipt.pulled_at_s or now_s) - envelope.published_at_s) * 1000
