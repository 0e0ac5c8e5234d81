"""How a job ends: from the outcomes of its items to the state of its record, and from the record to rows. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from shared.errors import Canceled, PenstockError, Unavailable, error_for_code
from shared.messages import Item, ItemError, ItemOutcome, ReplyBody, decode_reply_body, failure
from shared.stores.records import Finish
from workers.job import NOT_SENT, PulledJob


def state_of(body: ReplyBody) -> Literal["succeeded", "failed", "canceled"]:
    """The state in which an answer ends its record: it succeeded as a whole or not at all."""
    statuses = {outcome.status for outcome in body.outcomes}
    if statuses == {"succeeded"}:
        return "succeeded"
    return "canceled" if "canceled" in statuses else "failed"


def answered_by(ours: ReplyBody, finish: Finish | None) -> ReplyBody:
    """What became of the record: our answer, another attempt's, or a cancellation."""
    if finish is not None and not finish.is_ours and finish.reply is not None:
        return decode_reply_body(finish.reply)
    if finish is None or finish.state != "canceled":
        return ours
    outcomes = [failure(outcome.index, Canceled(), outcome.receipt) for outcome in ours.outcomes]
    return msgspec.structs.replace(ours, outcomes=outcomes)


def in_time(pulled: PulledJob, body: ReplyBody, now_s: float) -> ReplyBody:
    """The answer, if at `now_s` its deadline has not passed; else with nothing in it that would be charged."""
    if now_s < pulled.envelope.deadline_s or not any(outcome.result for outcome in body.outcomes):
        return body
    late = [
        outcome if outcome.result is None else pulled.expired(outcome.index, outcome.receipt, NOT_SENT)
        for outcome in body.outcomes
    ]
    return msgspec.structs.replace(body, outcomes=late)


def undelivered(body: ReplyBody) -> ReplyBody:
    """The answer that found nobody: the instance that asked is gone, and with it the connection of its caller."""
    gone = Unavailable("the API instance that asked is gone")
    outcomes = [one if one.result is None else failure(one.index, gone, one.receipt) for one in body.outcomes]
    return msgspec.structs.replace(body, outcomes=outcomes)


def one_for_each(items: Sequence[Item], answered: ReplyBody) -> list[ItemOutcome]:
    """The outcomes; where the job was ended as a whole, its error is that of every item."""
    if answered.outcomes:
        return answered.outcomes
    error = answered.error or ItemError(PenstockError.code, "it ended without a reason; this is a bug")
    return [failure(item.index, error_for_code(error.code, error.message, error.field)) for item in items]
