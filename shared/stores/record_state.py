"""Records as read from Redis, and the results of updating them (shared/stores/records.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import msgspec

from shared.errors import MALFORMED, UndecodableMessage
from shared.messages import ItemOutcome, ReplyBody, decode_reply_body, encode_reply_body

State = Literal["starting", "processing", "succeeded", "failed", "canceled"]
OVER: frozenset[State] = frozenset({"succeeded", "failed", "canceled"})
"""The final states."""


class Claim(NamedTuple):
    """The result of claiming a job.

    `state` is `processing` if the job still needs to be run. Otherwise the record has ended, and
    `reply` is the first reply, or None if it was canceled without one. `attempt` counts claims,
    starting at 1. `unfinished` counts earlier claims that are still open and were made since the
    job last made progress. `alone` counts those whose workers were running only this job when they
    died.
    """

    state: State
    attempt: int
    unfinished: int
    reply: bytes | None
    alone: int = 0


class ReleasedClaim(NamedTuple):
    """A released claim.

    `claims`: 1, or 0 if it was already released. `alone`: 1 if the job is recorded as the only one
    its worker is running. `is_back`: whether the job goes back to the broker.
    """

    record: str
    claims: int = 1
    alone: int = 0
    is_back: bool = True


class Finish(NamedTuple):
    """The result of `finish`: whether this reply was stored, the state, and the stored reply."""

    is_ours: bool
    state: State
    reply: bytes | None

    @property
    def is_lost_to_cancel(self) -> bool:
        """True if a caller canceled first, so nothing was stored. There is no reply yet."""
        return not self.is_ours and self.state == "canceled" and self.reply is None


class Record(msgspec.Struct, kw_only=True):
    """The current state of a record.

    Times are in Unix seconds, with 0 for events that have not happened.
    """

    state: State
    attempts: int = 0
    document: bytes = b""
    """The encoded request of a prediction. Empty for other jobs."""
    reply: ReplyBody | None = None
    closed: str = ""
    """Why a flow is ending, as ItemError JSON, once its items no longer count."""
    published: bool = False
    """True if the broker is known to have the job."""
    step: int = 0
    steps: int = 0
    logs: str = ""
    """Text printed by the model so far.

    If it is long, only the end is kept. Set only during processing, or if the record was ended
    elsewhere.
    """
    logs_left_out: int = 0
    """Number of characters omitted before that text."""
    created_at_s: float = 0.0
    started_at_s: float = 0.0
    ended_at_s: float = 0.0
    canceled_at_s: float = 0.0

    @property
    def is_over(self) -> bool:
        return self.state in OVER

    @property
    def awaits_receipts(self) -> bool:
        """True if it was canceled and its cost is not recorded yet."""
        return self.state == "canceled" and self.reply is None


def receipts_of(reply: ReplyBody) -> bytes:
    """Returns the receipts that a deleted prediction was charged for, without its results."""
    outcomes = [
        ItemOutcome(outcome.index, outcome.status, outcome.receipt) for outcome in reply.outcomes
    ]
    return encode_reply_body(ReplyBody(outcomes))


def record_from_fields(fields: Mapping[str, bytes]) -> Record:
    """Reads the fields of a record hash.

    Raises:
        UndecodableMessage: its reply or another field can't be decoded.
    """
    known = dict(fields)
    document, receipts = known.pop("document", b""), known.pop("receipts", None)
    reply = known.pop("reply", receipts)
    try:
        texts = {name: value.decode() for name, value in known.items()}
        record = msgspec.convert(texts, Record, strict=False)
    except MALFORMED as error:
        raise UndecodableMessage(f"record: {error}", field="data") from error
    record.document = document
    record.reply = None if reply is None else decode_reply_body(reply)
    return record
