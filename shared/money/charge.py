"""Item charges. Rows, response headers, and predictions all get their amounts from here.

Because rows and headers both call `charge_of` with the same `ItemPrice`, they can't differ. Both
get the price from `price_of` for the request's arrival time, which its job carries to the worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from shared.errors import BadInput, Canceled, SchemaNotMatched
from shared.messages import ItemOutcome, Receipt, failure
from shared.models.catalog import Model
from shared.models.entry import WORK_UNITS

SHARED = frozenset({"memory", "redis", "joined"})
"""Cache statuses (`Receipt.cache`) of results that were computed for another item."""
ENDED_BY_CALLER = frozenset({"canceled", "expired"})
"""Statuses of items that the caller canceled, or whose deadline was too short."""
BROKEN_BY_CALLER = frozenset({BadInput.code, SchemaNotMatched.code})
"""Error codes caused by the request's contents."""


class ItemPrice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The pricing terms for one of a model's items. Stored in a prediction's document."""

    per_million_tokens_usd: float = 0.0
    per_million_output_tokens_usd: float | None = None
    """The price of tokens that a text model generates. None means the same price as for the tokens
    it reads.
    """
    per_million_cached_tokens_usd: float | None = None
    """The price of prompt tokens that a worker had already processed.

    None means the same price as for other tokens.
    """
    per_million_pixel_steps_usd: float = 0.0
    per_item_usd: float = 0.0
    """The price of a result that was delivered, in full or in part, regardless of its size."""
    per_work_usd: float = 0.0
    """The price per unit of the weight returned by a custom class."""
    per_second_usd: float = 0.0
    """The price per second of compute time."""
    cached_share: float = 0.0
    """The fraction of the price to charge for a result that was computed for another item."""
    price_share: float = 1.0
    """The fraction of the list price charged for this request, for example in a batch."""
    device_share: float = 1.0
    """The number of devices allotted to each of the model's workers. Below 1 if they share one."""
    version: str = ""
    """Version of the terms in the catalog. Empty if stored by a release that had no versions."""


class Charge(NamedTuple):
    """The charge for one item: `cost_usd` is `list_price_usd` times `charged_share`."""

    list_price_usd: float
    charged_share: float

    @property
    def cost_usd(self) -> float:
        return self.charged_share * self.list_price_usd


def price_of(model: Model, at_s: float, price_share: float = 1.0) -> ItemPrice:
    """Returns the pricing terms for one of a model's items.

    Args:
        at_s: Unix time at which the request arrived.
        price_share: fraction of the list price charged for the request.
    """
    price = model.price if not model.price.changes else model.price.terms_at(at_s)
    return ItemPrice(
        per_million_tokens_usd=price.per_million_tokens_usd,
        per_million_output_tokens_usd=price.per_million_output_tokens_usd,
        per_million_cached_tokens_usd=price.per_million_cached_tokens_usd,
        per_million_pixel_steps_usd=price.per_million_pixel_steps_usd,
        per_item_usd=price.per_item_usd,
        per_work_usd=price.per_work_usd,
        per_second_usd=price.per_second_usd,
        cached_share=price.cached_share,
        price_share=price_share,
        device_share=device_share_of(model),
        version=price.name,
    )


def step_prices_of(model: Model, at_s: float, price_share: float = 1.0) -> tuple[ItemPrice, ...]:
    """Returns the pricing terms for the items in each of a flow's steps. Empty for a model.

    Args:
        at_s: see `price_of`.
        price_share: see `price_of`.
    """
    return tuple(price_of(step_model, at_s, price_share) for _, step_model in model.steps)


def device_share_of(model: Model) -> float:
    """Returns the number of devices allotted to each of the model's workers."""
    return model.gpu.count / model.gpu.share


def work_unit_of(model: Model, price: ItemPrice) -> str | None:
    """Returns the unit in which a model's work is charged, such as pages.

    None if its price does not depend on the work, or the class serves no endpoint that defines the
    unit.
    """
    return WORK_UNITS.get(model.api) if model.api and price.per_work_usd else None


def is_ended_by_caller(outcome: ItemOutcome) -> bool:
    """Returns whether the caller is the reason an item has no result.

    A schema can cause text to fail at its last token, after the rest has already been read.
    """
    is_broken = outcome.error is not None and outcome.error.code in BROKEN_BY_CALLER
    return is_broken or outcome.status in ENDED_BY_CALLER


def as_delivered(outcomes: Sequence[ItemOutcome], *, is_delivered: bool) -> list[ItemOutcome]:
    """Returns the outcomes as delivered to the caller.

    Charges in rows, headers, and budgets are based on these outcomes.

    A request is delivered as a whole or not at all. If the response is an error, or the caller has
    disconnected, items that have a result are marked as canceled, so they cost nothing. Failed
    items stay as they are.

    Args:
        outcomes: the items' outcomes.
        is_delivered: True if the caller received a response with the results.
    """
    if is_delivered:
        return list(outcomes)
    return [
        outcome if outcome.result is None else failure(outcome.index, Canceled(), outcome.receipt)
        for outcome in outcomes
    ]


def compute_charged_share(price: ItemPrice, outcome: ItemOutcome) -> float:
    """Returns the fraction of an item's price that is charged. Only this function decides that.

    An undelivered item costs nothing, no matter what was computed for it. An item that was computed
    and delivered is charged at its price. A result from the cache, or from an identical item in
    flight, costs `cached_share` of its price. If a generation was canceled, ran out of time, or
    violated the caller's own schema after its reader received tokens, the charge covers its prompt
    and those tokens. A custom model's prediction that ends this way costs the price of one item.
    All of this is multiplied by the fraction of the list price charged for the request.
    """
    if not _is_delivered(outcome):
        return 0.0
    return _share_of_result(price, outcome) * price.price_share


def count_work(price: ItemPrice, outcome: ItemOutcome) -> float:
    """Returns the amount of work counted toward limits for an item.

    Only this function makes that decision.

    For a delivered item, the amount counted is the work that its price is based on. An item without
    a result costs nothing, but the work done for it still counts, so that a tenant can't waste more
    work than its limits would let it buy. The unit is tokens, pixel-steps, or the weight of a
    custom class's input.
    """
    receipt = outcome.receipt
    work = float((receipt.tokens or 0) + (receipt.pixel_steps or 0) + (receipt.work or 0))
    if outcome.status == "succeeded":
        return _share_of_result(price, outcome) * work
    if receipt.spent_work is not None:
        spent = float(receipt.spent_work)
    else:  # a result that arrived after its item had ended
        spent = 0.0 if receipt.inference_ms is None or receipt.cache in SHARED else work
    return max(spent, _share_of_result(price, outcome) * work if _is_delivered(outcome) else 0.0)


def _is_delivered(outcome: ItemOutcome) -> bool:
    """Returns whether the caller received everything counted in the receipt.

    Our failures are never charged.
    """
    return outcome.status == "succeeded" or (
        outcome.receipt.is_delivered_in_part and is_ended_by_caller(outcome)
    )


def _share_of_result(price: ItemPrice, outcome: ItemOutcome) -> float:
    return price.cached_share if outcome.receipt.cache in SHARED else 1.0


def list_price_usd(
    price: ItemPrice,
    tokens: int | None = None,
    pixel_steps: int | None = None,
    *,
    items: int = 1,
    work: int | None = None,
    compute_s: float = 0.0,
    output_tokens: int | None = None,
    cached_tokens: int | None = None,
) -> float:
    """Returns the cost of some work (by default, one item's) before any fraction is applied.

    `tokens` is the total number of tokens. `output_tokens` and `cached_tokens` may be priced
    differently. `work` is the items' weight as returned by a custom class.
    """
    usual_usd, micro_usd = price.per_million_tokens_usd, 0.0
    if output_tokens and price.per_million_output_tokens_usd is not None:
        micro_usd += output_tokens * (price.per_million_output_tokens_usd - usual_usd)
    if cached_tokens and price.per_million_cached_tokens_usd is not None:
        micro_usd += cached_tokens * (price.per_million_cached_tokens_usd - usual_usd)
    micro_usd += (tokens or 0) * usual_usd
    micro_usd += (pixel_steps or 0) * price.per_million_pixel_steps_usd
    item_usd = items * price.per_item_usd + (work or 0) * price.per_work_usd
    return micro_usd / 1e6 + item_usd + compute_s * price.per_second_usd


def charge_of(price: ItemPrice, outcome: ItemOutcome) -> Charge:
    receipt, is_delivered = outcome.receipt, _is_delivered(outcome)
    listed_usd = list_price_usd(
        price,
        receipt.tokens,
        receipt.pixel_steps,
        items=int(is_delivered),
        work=receipt.work if is_delivered else None,
        compute_s=compute_s(receipt) if is_delivered else 0.0,
        output_tokens=receipt.output_tokens,
        cached_tokens=receipt.cached_tokens,
    )
    return Charge(listed_usd, compute_charged_share(price, outcome))


def cost_usd(price: ItemPrice, outcome: ItemOutcome) -> float:
    return charge_of(price, outcome).cost_usd


def compute_s(receipt: Receipt) -> float:
    """Returns the seconds spent computing an item's result, or 0 if no model ran for it.

    A batch's time is divided equally among its items, as in the `usage` report.
    """
    if receipt.inference_ms is None or not receipt.batch_size:
        return 0.0
    return receipt.inference_ms / 1000 / receipt.batch_size


def device_s(price: ItemPrice, receipt: Receipt) -> float:
    """Returns the whole-device seconds that an item used, or 0 if no model ran for it."""
    return compute_s(receipt) * price.device_share
