"""The state of a record, as Redis has it: a hash, read as `Record`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import msgspec

from shared.messages import ItemOutcome, ReplyBody, decode_reply_body, encode_reply_body

State = Literal["starting", "processing", "succeeded", "failed", "canceled"]


OVER: frozenset[State] = frozenset({"succeeded", "failed", "canceled"})
"""The states that no record leaves."""


class Claim(NamedTuple):
    """The result of claiming a job.

    `state` is `processing` if the job is to be done. Otherwise it is over, and `reply` is the first
    reply, or None if it was canceled without one. `attempt` counts claims from 1. `unfinished`
    counts earlier claims that did not end, since the job went on. `alone` are those of them whose
    workers computed nothing else when they died.
    """

    state: State
    attempt: int
    unfinished: int
    reply: bytes | None
    alone: int = 0


class ReleasedClaim(NamedTuple):
    """A claim that is released.

    `claims`: 1, or 0 if it was before. `alone`: 1 if the job is noted as the only one that its
    worker computes. `is_back`: whether the job goes back to the broker.
    """

    record: str
    claims: int = 1
    alone: int = 0
    is_back: bool = True


class Finish(NamedTuple):
    """The result of `finish`: whether our reply is kept, the state, the reply kept instead."""

    is_ours: bool
    state: State
    reply: bytes | None

    @property
    def is_lost_to_cancel(self) -> bool:
        """True if a caller canceled first, so that nothing was kept. No reply is there yet."""
        return not self.is_ours and self.state == "canceled" and self.reply is None


class Record(msgspec.Struct, kw_only=True):
    """A record as it is now. Times are unix seconds, 0 for events that have not happened."""

    state: State
    attempts: int = 0
    document: bytes = b""
    """The encoded request of a prediction. Empty for other jobs."""
    reply: ReplyBody | None = None
    closed: str = ""
    """Why a flow ends, as JSON of an ItemError, once no item of it counts any more."""
    published: bool = False
    """Whether the broker surely has the job."""
    step: int = 0
    steps: int = 0
    logs: str = ""
    """What the model has printed so far: its end, if it is long. Only while it is processed, or if
    its end came from elsewhere."""
    logs_left_out: int = 0
    """The characters before that."""
    created_at_s: float = 0.0
    started_at_s: float = 0.0
    ended_at_s: float = 0.0
    canceled_at_s: float = 0.0

    @property
    def is_over(self) -> bool:
        """True if the state is final."""
        return self.state in OVER


def receipts_of(reply: ReplyBody) -> bytes:
    """Returns the receipts that a deleted prediction was charged by, without its results."""
    left = [ItemOutcome(one.index, one.status, one.receipt) for one in reply.outcomes]
    return encode_reply_body(ReplyBody(left))


def record_from_fields(fields: Mapping[bytes, bytes]) -> Record:
    """Reads the fields of a record's hash.

    Raises:
        UndecodableMessage: its reply is not one.
    """
    known = {name.decode(): value for name, value in fields.items()}
    document, receipts = known.pop("document", b""), known.pop("receipts", None)
    reply = known.pop("reply", receipts)
    texts = {name: value.decode() for name, value in known.items()}
    record = msgspec.convert(texts, Record, strict=False)
    record.document = document
    record.reply = None if reply is None else decode_reply_body(reply)
    return record
