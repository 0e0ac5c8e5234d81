"""From the outcomes of a job's items to the state of its record, and from the record to rows.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from shared.errors import Canceled, PenstockError, Unavailable, error_for_code
from shared.message_encoding import decode_reply_body
from shared.messages import Item, ItemError, ItemOutcome, ReplyBody, failure
from shared.stores.record_state import Finish
from workers.job import NOT_SENT, PulledJob


def state_of(body: ReplyBody) -> Literal["succeeded", "failed", "canceled"]:
    """The final state of the record. It succeeded only if all items did."""
    statuses = {outcome.status for outcome in body.outcomes}
    if statuses == {"succeeded"}:
        return "succeeded"
    return "canceled" if "canceled" in statuses else "failed"


def answered_by(ours: ReplyBody, finish: Finish | None) -> ReplyBody:
    """The answer in the record: ours, another attempt's, or a cancellation."""
    if finish is not None and not finish.is_ours and finish.reply is not None:
        return decode_reply_body(finish.reply)
    if finish is None or finish.state != "canceled":
        return ours
    outcomes = [failure(outcome.index, Canceled(), outcome.receipt) for outcome in ours.outcomes]
    return msgspec.structs.replace(ours, outcomes=outcomes)


def in_time(pulled: PulledJob, body: ReplyBody, now_s: float) -> ReplyBody:
    """The answer if its deadline is after `now_s`.

    Otherwise the same without results, so nothing is charged.
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


def undelivered(body: ReplyBody) -> ReplyBody:
    """The answer without results, because the API instance and the caller's connection are gone."""
    gone = Unavailable("the API instance that asked is gone")
    outcomes = [
        one if one.result is None else failure(one.index, gone, one.receipt)
        for one in body.outcomes
    ]
    return msgspec.structs.replace(body, outcomes=outcomes)


def one_for_each(items: Sequence[Item], answered: ReplyBody) -> list[ItemOutcome]:
    """The outcome of each item. If the job failed as a whole, each item has its error."""
    if answered.outcomes:
        return answered.outcomes
    error = answered.error or ItemError(
        PenstockError.code, "it ended without a reason; this is a bug"
    )
    return [
        failure(item.index, error_for_code(error.code, error.message, error.field))
        for item in items
    ]
