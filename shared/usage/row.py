"""The row that each item leaves in BigQuery's usage table."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from shared.catalog import Model
from shared.messages import Envelope, ItemOutcome
from shared.usage.charge import SHARED, charge_of, price_of


class Row(msgspec.Struct, omit_defaults=True):
    """One row of the usage table, one per item.

    infra/bigquery/rows.schema.json describes each field. `*_at_s` fields (unix seconds) are the
    TIMESTAMP columns of the same name without `_s`.
    """

    row_id: str
    request_id: str
    item: int
    model: str
    received_at_s: float
    status: str
    tenant: str | None = None
    revision: str | None = None
    task: str | None = None
    region: str | None = None
    api_instance: str | None = None
    worker: str | None = None
    published_at_s: float | None = None
    pulled_at_s: float | None = None
    started_at_s: float | None = None
    finished_at_s: float | None = None
    replied_at_s: float | None = None
    queue_ms: float | None = None
    batch_wait_ms: float | None = None
    inference_ms: float | None = None
    total_ms: float | None = None
    batch_size: int | None = None
    cache: str | None = None
    tokens: int | None = None
    pixel_steps: int | None = None
    steps_saved: int | None = None
    device: str | None = None
    device_share: float | None = None
    error_code: str | None = None
    attempt: int | None = None
    cost_usd: float | None = None
    client_request_id: str | None = None
    charged_share: float | None = None
    key_id: str | None = None
    plan: str | None = None
    price_version: str | None = None
    list_price_usd: float | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    gpu_type: str | None = None
    spot: bool | None = None
    priority: str | None = None
    user_agent_family: str | None = None
    batch_id: str | None = None
    cold_start: bool | None = None
    batch_capacity: int | None = None
    padded_tokens: int | None = None


class RowSink(Protocol):
    """Takes rows. Never blocks and never raises."""

    def write(self, row: Row, on_safe: Callable[[], None] | None = None) -> None:
        """Queues one row.

        `on_safe` is called once the death of this process can't lose it any more.
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
        outcome: how the item ended.
        model: the catalog's entry, or None if it is no longer there.
        replied_at_s: unix time of the response. Default: now.
        facts: further fields of the row (worker, region …).
    """
    now_s = replied_at_s or time.time()
    known = _work(envelope, outcome, model) | _times(envelope, outcome, now_s)
    return Row(
        row_id=f"{envelope.request_id}:{outcome.index}",
        request_id=envelope.request_id,
        item=outcome.index,
        model=model.public_name if model else envelope.model,
        status=outcome.status,
        tenant=envelope.tenant,
        api_instance=envelope.api_instance or None,
        error_code=outcome.error.code if outcome.error else None,
        attempt=envelope.attempt,
        client_request_id=envelope.client_request_id or None,
        key_id=envelope.key_id or None,
        plan=envelope.plan or None,
        priority=envelope.lane or "interactive",
        user_agent_family=envelope.user_agent_family or None,
        batch_id=envelope.batch_id or None,
        **known,
        **facts,
    )


def _work(envelope: Envelope, outcome: ItemOutcome, model: Model | None) -> dict[str, Any]:
    """Returns the work that was done for the item, and its cost."""
    receipt = outcome.receipt
    known = {name: getattr(receipt, name) for name in receipt.__struct_fields__}
    del known["is_delivered_in_part"]  # the charge says it
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


def _times(envelope: Envelope, outcome: ItemOutcome, now_s: float) -> dict[str, float | None]:
    """When the item came and went. What the receipt has of it is not in here."""
    published_at_s, queue_ms = envelope.published_at_s or None, None
    if published_at_s is not None:
        queue_ms = ((outcome.receipt.pulled_at_s or now_s) - published_at_s) * 1000
    return {
        "received_at_s": envelope.received_at_s,
        "published_at_s": published_at_s,
        "replied_at_s": now_s,
        "queue_ms": queue_ms,
        "total_ms": (now_s - envelope.received_at_s) * 1000,
    }
