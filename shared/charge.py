"""The charge of an item. Rows, response headers and predictions get their figures from here.

So a row and a header can't differ: both call `charge_of` with one `ItemPrice`. Both get it from
`price_of` for the moment at which the request arrived, which its job carries to the worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from shared.catalog import Model
from shared.errors import BadInput, Canceled, SchemaNotMatched
from shared.messages import ItemOutcome, Receipt, failure

SHARED = frozenset({"memory", "redis", "joined"})
"""Ways of the cache (`Receipt.cache`) on which a result was delivered that another item had
computed.
"""
ENDED_BY_CALLER = frozenset({"canceled", "expired"})
"""Statuses of items that their caller canceled, or gave too little time."""
BROKEN_BY_CALLER = frozenset({BadInput.code, SchemaNotMatched.code})
"""Codes of errors that follow from what was asked for."""


class ItemPrice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The terms on which an item of one model is charged. The document of a prediction has them."""

    per_million_tokens_usd: float = 0.0
    per_million_output_tokens_usd: float | None = None
    """The price of tokens that a text model writes. None: as for those that it reads."""
    per_million_cached_tokens_usd: float | None = None
    """The price of prompt tokens that a worker had computed before. None: as for others."""
    per_million_pixel_steps_usd: float = 0.0
    per_item_usd: float = 0.0
    """The price of a result that was delivered, or a part of it, whatever its size."""
    per_work_usd: float = 0.0
    """The price of each unit of what a custom class says that it weighs."""
    per_second_usd: float = 0.0
    """The price of each second that it was computed."""
    cached_share: float = 0.0
    """The part of the price for a result that another item had computed."""
    price_share: float = 1.0
    """The part of the list price that this request pays, such as a line of a batch."""
    device_share: float = 1.0
    """The part of a device that a worker of the model has."""
    version: str = ""
    """Which terms of the catalog these are. Empty: kept by a release before there were versions."""


class Charge(NamedTuple):
    """The charge of one item: `cost_usd` is `list_price_usd` times `charged_share`."""

    list_price_usd: float
    charged_share: float

    @property
    def cost_usd(self) -> float:
        """In US dollars."""
        return self.charged_share * self.list_price_usd


def price_of(model: Model, at_s: float, price_share: float = 1.0) -> ItemPrice:
    """The terms on which an item of a model is charged.

    Args:
        model: its entry in the catalog.
        at_s: when the request arrived, Unix seconds.
        price_share: the part of the list price that the request pays.
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
    """The terms on which the items of each step of a flow are charged. None for a model.

    Args:
        model: the entry in the catalog.
        at_s: as of `price_of`.
        price_share: as of `price_of`.
    """
    return tuple(price_of(one, at_s, price_share) for one in model.step_models)


def device_share_of(model: Model) -> float:
    """The part of a device that a worker of the model has."""
    return 1 / model.gpu.share


def is_ended_by_caller(outcome: ItemOutcome) -> bool:
    """Returns whether an item has no result because of its caller.

    A schema may be such that a text fails with its last token, after all of it was read.
    """
    is_broken = outcome.error is not None and outcome.error.code in BROKEN_BY_CALLER
    return is_broken or outcome.status in ENDED_BY_CALLER


def as_delivered(outcomes: Sequence[ItemOutcome], *, is_delivered: bool) -> list[ItemOutcome]:
    """Returns the outcomes that the caller got. Row, header and budget are charged by them.

    A request is delivered as a whole. If its answer is an error, or if nobody is there to get it,
    the items with a result end as canceled. So they cost nothing, and what failed stays as it is.

    Args:
        outcomes: how the items ended.
        is_delivered: True if the caller got an answer with their results.
    """
    if is_delivered:
        return list(outcomes)
    return [
        one if one.result is None else failure(one.index, Canceled(), one.receipt)
        for one in outcomes
    ]


def charged_share(price: ItemPrice, outcome: ItemOutcome) -> float:
    """Returns the share of its price that an item is charged. Only this function decides it.

    An item that was not delivered costs nothing, whatever was computed for it. An item that was
    computed and delivered costs its price. A result from the cache, or from an identical item in
    flight, costs `cached_share` of it. A generation that was canceled, ran out of time or broke the
    caller's own schema after its reader got tokens costs its prompt and those tokens; a custom
    model's prediction that ends this way costs the price of its item. All of it is multiplied by
    the share that the request pays.
    """
    if not _is_delivered(outcome):
        return 0.0
    return _share_of_result(price, outcome) * price.price_share


def counted_work(price: ItemPrice, outcome: ItemOutcome) -> float:
    """Returns the work that an item counts toward limits. Only this function decides it.

    A delivered item counts what its price is computed from. An item without a result costs nothing
    and counts the work that was done for it, so that a tenant can't waste more than its limits
    would let it buy. The unit is tokens, pixel-steps, or the weight of a custom class's input.
    """
    receipt = outcome.receipt
    work = float((receipt.tokens or 0) + (receipt.pixel_steps or 0) + (receipt.work or 0))
    if outcome.status == "succeeded":
        return _share_of_result(price, outcome) * work
    if receipt.spent_work is not None:
        spent = float(receipt.spent_work)
    else:  # a result that came after its item had ended
        spent = 0.0 if receipt.inference_ms is None or receipt.cache in SHARED else work
    return max(spent, _share_of_result(price, outcome) * work if _is_delivered(outcome) else 0.0)


def _is_delivered(outcome: ItemOutcome) -> bool:
    """Returns whether the caller got what the receipt counts. Our failures are never charged."""
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
    """Returns the cost of an amount of work, by default of one item, before any share.

    `tokens` are all tokens. Those in `output_tokens` and `cached_tokens` may have other prices.
    `work` is what a custom class says that the items weigh.
    """
    usual_usd, micro_usd = price.per_million_tokens_usd, 0.0
    for count, special_usd in (
        (output_tokens or 0, price.per_million_output_tokens_usd),
        (cached_tokens or 0, price.per_million_cached_tokens_usd),
    ):
        if special_usd is not None:
            micro_usd += count * (special_usd - usual_usd)
    micro_usd += (tokens or 0) * usual_usd
    micro_usd += (pixel_steps or 0) * price.per_million_pixel_steps_usd
    item_usd = items * price.per_item_usd + (work or 0) * price.per_work_usd
    return micro_usd / 1e6 + item_usd + compute_s * price.per_second_usd


def charge_of(price: ItemPrice, outcome: ItemOutcome) -> Charge:
    """Returns what an item is charged, and from which list price."""
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
    return Charge(listed_usd, charged_share(price, outcome))


def cost_usd(price: ItemPrice, outcome: ItemOutcome) -> float:
    """Returns what an item is charged, in US dollars."""
    return charge_of(price, outcome).cost_usd


def compute_s(receipt: Receipt) -> float:
    """Returns the seconds that an item was computed. 0 if no model ran for it.

    A batch's time belongs to its items in equal parts, as in the `usage` report.
    """
    if receipt.inference_ms is None or not receipt.batch_size:
        return 0.0
    return receipt.inference_ms / 1000 / receipt.batch_size


def device_s(price: ItemPrice, receipt: Receipt) -> float:
    """Returns the seconds of a whole device that an item took. 0 if no model ran for it."""
    return compute_s(receipt) * price.device_share
