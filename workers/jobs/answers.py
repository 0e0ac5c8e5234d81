"""Computes a job's reply and its record's state from the outcomes of its items.

A generation that ends without a result is charged only for the tokens that its readers received.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from shared.errors import (
    Canceled,
    PenstockError,
    Unavailable,
    error_for_code,
)
from shared.messages import (
    Item,
    ItemError,
    ItemOutcome,
    ReplyBody,
    decode_reply_body,
    failure,
)
from shared.models.tasks.custom import CustomInput, PieceChunk
from shared.models.tasks.text import GenerationInput
from shared.money.charge import ENDED_BY_CALLER, is_ended_by_caller
from shared.stores.record_state import Finish
from shared.stores.stream_chunks import merge_chunks
from shared.stores.token_streams import Delivered, TokenStreams
from workers.scheduling.job import NOT_SENT, PulledJob


def is_streamed(item: Item) -> bool:
    """Returns whether an item's tokens go to a stream."""
    return isinstance(item.input, GenerationInput | CustomInput) and item.input.is_streamed


async def with_delivered(streams: TokenStreams, pulled: PulledJob, body: ReplyBody) -> ReplyBody:
    """Limits stopped generations to the tokens their callers have read.

    Receipts count those tokens.

    A custom class's item without a result keeps the pieces that it has yielded so far. If its
    caller stopped it, only the pieces that were read are kept; otherwise, all pieces are kept and
    none are charged.

    Raises:
        Unavailable: Redis did not respond.
    """
    streamed = {item.index: item for item in pulled.items if is_streamed(item)}
    ended = [
        outcome.index
        for outcome in body.outcomes
        if outcome.index in streamed and _is_charged_as_read(outcome, streamed[outcome.index])
    ]
    if not ended and not pulled.written:
        return body
    delivered = dict[int, Delivered | None]()
    if ended:
        delivered = dict(zip(ended, await streams.end_delivery(pulled.record, ended), strict=True))
    outcomes = [
        outcome
        if (read := delivered.get(outcome.index)) is None
        else _count_read(outcome, read, streamed)
        for outcome in body.outcomes
    ]
    return msgspec.structs.replace(
        body, outcomes=[_with_partial(outcome, pulled, delivered) for outcome in outcomes]
    )


def _with_partial(
    outcome: ItemOutcome, pulled: PulledJob, delivered: Mapping[int, Delivered | None]
) -> ItemOutcome:
    whole = merge_chunks(pulled.written.get(outcome.index, ()), 0)
    if outcome.result is not None or not isinstance(whole, PieceChunk):
        return outcome
    count = len(whole.lengths)
    if outcome.index in delivered:
        read = delivered[outcome.index]
        count = read.output_tokens if read is not None else 0
    return msgspec.structs.replace(outcome, partial=whole.until(count) if count else None)


def _is_charged_as_read(outcome: ItemOutcome, item: Item) -> bool:
    """Returns whether the tokens that were read are charged for.

    A class may reject an input at a late stage.
    """
    is_text = isinstance(item.input, GenerationInput)
    return outcome.status in ENDED_BY_CALLER or (is_text and is_ended_by_caller(outcome))


def _count_read(
    outcome: ItemOutcome, delivered: Delivered, streamed: Mapping[int, Item]
) -> ItemOutcome:
    receipt = msgspec.structs.replace(outcome.receipt, is_delivered_in_part=True)
    if isinstance(streamed[outcome.index].input, GenerationInput):  # other pieces are not tokens
        receipt.tokens = delivered.input_tokens + delivered.output_tokens
        receipt.output_tokens = delivered.output_tokens
        receipt.cached_tokens = delivered.cached_tokens
    return msgspec.structs.replace(outcome, receipt=receipt)


def state_of(body: ReplyBody) -> Literal["succeeded", "failed", "canceled"]:
    """Returns the record's final state, which is `succeeded` only if all items succeeded."""
    statuses = {outcome.status for outcome in body.outcomes}
    if statuses == {"succeeded"}:
        return "succeeded"
    return "canceled" if "canceled" in statuses else "failed"


def answer_of(ours: ReplyBody, finish: Finish | None) -> ReplyBody:
    """Returns the reply in the record: ours, another attempt's, or a cancellation."""
    if finish is not None and not finish.is_ours and finish.reply is not None:
        return decode_reply_body(finish.reply)
    if finish is None or finish.state != "canceled":
        return ours
    outcomes = [failure(outcome.index, Canceled(), outcome.receipt) for outcome in ours.outcomes]
    return msgspec.structs.replace(ours, outcomes=outcomes)


def answer_after_reply(ours: ReplyBody, finish: Finish | None, *, is_sent: bool) -> ReplyBody:
    """Returns the reply in the record, without results if its inbox is gone.

    The API writes separate rows for results that arrived too late. The broker's confirmation does
    not show whether a reply arrived in time.
    """
    answered = answer_of(ours, finish)
    if finish is None or finish.is_ours:  # otherwise the caller accepted a different reply
        return answered if is_sent else without_results(answered)
    return answered


def in_time(pulled: PulledJob, body: ReplyBody, now_s: float) -> ReplyBody:
    """Returns the reply if its deadline is after `now_s`.

    Otherwise, returns it without results, so that nothing is charged.
    """
    if now_s < pulled.envelope.deadline_s or not any(outcome.result for outcome in body.outcomes):
        return body
    late = [
        outcome
        if outcome.result is None
        else pulled.expired(outcome.index, outcome.receipt, NOT_SENT)
        for outcome in body.outcomes
    ]
    return msgspec.structs.replace(body, outcomes=late)


def without_results(body: ReplyBody) -> ReplyBody:
    """Removes the results, because the API instance and the caller's connection are gone."""
    error = Unavailable("the API instance that sent the request no longer exists")
    outcomes = [
        outcome if outcome.result is None else failure(outcome.index, error, outcome.receipt)
        for outcome in body.outcomes
    ]
    return msgspec.structs.replace(body, outcomes=outcomes)


def outcomes_by_item(items: Sequence[Item], answered: ReplyBody) -> list[ItemOutcome]:
    """Returns each item's outcome. If the job failed as a whole, each item gets the job's error."""
    if answered.outcomes:
        return answered.outcomes
    error = answered.error or ItemError(
        PenstockError.code, "failed without a reason; this is a bug"
    )
    return [
        failure(item.index, error_for_code(error.code, error.message, error.field))
        for item in items
    ]
