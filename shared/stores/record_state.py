"""The state of unfinished predictions: records, queue positions and image previews.

A record is a hash in Redis, read as `Record`.

Workers start a tenant's predictions by deadline, so its queue is in that order. A tenant must not
learn how many other tenants are waiting, but their load shows in the speed of this queue. That
is measured between reads, so it is known only while the queue is being read.

Previews of images being drawn are in one Redis stream per prediction. A reader of a prediction's
events regularly marks it as watched. Workers see the mark when they report progress, and skip
previews for predictions that nobody is watching. Streams are bounded and expire, so unlike records
they are not part of a budget.

Calls raise Unavailable if Redis does not answer.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec

from shared.errors import Unavailable
from shared.messages import ItemOutcome, ReplyBody, decode_reply_body, encode_reply_body
from shared.stores.redis_client import Commands, load_script

State = Literal["starting", "processing", "succeeded", "failed", "canceled"]


OVER: frozenset[State] = frozenset({"succeeded", "failed", "canceled"})
"""The final states."""

MIN_LEFT = 1.0
"""Minimum number of predictions that must have left the queue before a wait is estimated."""

_POSITION = load_script("shared/stores/record_position.lua")

WATCHED_S = 5
"""How long previews are drawn after a reader marked a prediction as watched."""
PREVIEWS_KEPT_S = 120
MAX_PREVIEWS = 16
"""Maximum number of previews per prediction. Each has a few kilobytes."""

_ADD_PREVIEW = load_script("shared/stores/preview_add.lua")


class Claim(NamedTuple):
    """The result of claiming a job.

    `state` is `processing` if the job still needs to be done. Otherwise it is over, and `reply` is
    the first reply, or None if it was canceled without one. `attempt` counts claims from 1.
    `unfinished` counts earlier claims that did not end since the job last continued. `alone` counts
    those whose workers were computing only this job when they died.
    """

    state: State
    attempt: int
    unfinished: int
    reply: bytes | None
    alone: int = 0


class ReleasedClaim(NamedTuple):
    """A released claim.

    `claims`: 1, or 0 if it was already released. `alone`: 1 if the job is recorded as the only one
    its worker is computing. `is_back`: whether the job returns to the broker.
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
        """True if a caller canceled first, so that nothing was stored. There is no reply yet."""
        return not self.is_ours and self.state == "canceled" and self.reply is None


class Record(msgspec.Struct, kw_only=True):
    """The current state of a record.

    Times are Unix seconds, 0 for events that have not happened.
    """

    state: State
    attempts: int = 0
    document: bytes = b""
    """The encoded request of a prediction. Empty for other jobs."""
    reply: ReplyBody | None = None
    closed: str = ""
    """Why a flow ends, as JSON of an ItemError, once its items no longer count."""
    published: bool = False
    """True if the broker is known to have the job."""
    step: int = 0
    steps: int = 0
    logs: str = ""
    """Text printed by the model so far.

    Only the end, if it is long. Set only while it is processed, or if its end came from elsewhere.
    """
    logs_left_out: int = 0
    """Number of omitted characters before it."""
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
    """Returns the receipts that a deleted prediction was charged by, without its results."""
    outcomes = [
        ItemOutcome(outcome.index, outcome.status, outcome.receipt) for outcome in reply.outcomes
    ]
    return encode_reply_body(ReplyBody(outcomes))


def record_from_fields(fields: Mapping[str, bytes]) -> Record:
    """Reads the fields of a record's hash.

    Raises:
        UndecodableMessage: its reply can't be decoded.
    """
    known = dict(fields)
    document, receipts = known.pop("document", b""), known.pop("receipts", None)
    reply = known.pop("reply", receipts)
    texts = {name: value.decode() for name, value in known.items()}
    record = msgspec.convert(texts, Record, strict=False)
    record.document = document
    record.reply = None if reply is None else decode_reply_body(reply)
    return record


class QueuePosition(NamedTuple):
    """Position in the queue: `position` counts from 1."""

    position: int
    estimated_s: float | None
    """Seconds until a worker takes it, based on the last half minute. None: not known."""


class WaitingLines:
    """The queues of all tenants."""

    def __init__(self, commands: Commands, prefix: str) -> None:
        self._commands = commands
        self._prefix = prefix

    def key_of(self, tenant: str, model: str) -> str:
        """Returns the key of this tenant's queue for this model."""
        return f"{self._prefix}waiting:{model}:{tenant}"

    def pace_key_of(self, tenant: str, model: str) -> str:
        """Returns the key with the speed of that queue."""
        return f"{self._prefix}waiting-pace:{model}:{tenant}"

    async def position(
        self, record: str, tenant: str, model: str, deadline_s: float
    ) -> QueuePosition | None:
        """Returns the position of the prediction with this record. None if it is not waiting."""
        keys = (
            f"{self._prefix}record:{record}",
            self.key_of(tenant, model),
            self.pace_key_of(tenant, model),
        )
        reply = await self._commands.run_script(_POSITION, keys, time.time(), deadline_s)
        if not reply:
            return None
        position, departures, seconds = int(reply[0]), float(reply[1]), float(reply[2])
        estimated_s = round(position * seconds / departures, 3) if departures >= MIN_LEFT else None
        return QueuePosition(position, estimated_s)


@dataclass(frozen=True, slots=True)
class Preview:
    """An image of an item between two steps.

    `cursor` is its ID in the stream. `image` is a WebP.
    """

    cursor: str
    index: int
    step: int
    steps: int
    image: bytes


class PreviewStore:
    """The previews of all predictions."""

    def __init__(self, commands: Commands, prefix: str) -> None:
        self._commands = commands
        self._prefix = prefix

    def keys_of(self, record: str) -> tuple[str, str]:
        """Returns the keys that belong to a record: its watch mark and its stream."""
        return f"{self._prefix}watched:{record}", f"{self._prefix}previews:{record}"

    async def watch(self, record: str) -> None:
        """Requests previews for the next few seconds."""
        watched, _ = self.keys_of(record)
        await self._commands.run("SET", watched, 1, "EX", WATCHED_S)

    async def after(self, record: str, cursor: str) -> list[Preview]:
        """Returns the previews after `cursor`, or all stored ones if it is empty."""
        _, stream = self.keys_of(record)
        entries = await self._commands.run("XRANGE", stream, f"({cursor}" if cursor else "-", "+")
        return [_preview(cursor.decode(), fields) for cursor, fields in entries]

    async def add(self, record: str, index: int, step: int, steps: int, image: bytes) -> None:
        """Adds a preview. Never raises: a preview may get lost."""
        _, stream = self.keys_of(record)
        keys = (f"{self._prefix}record:{record}", stream)
        with contextlib.suppress(Unavailable):
            await self._commands.run_script(
                _ADD_PREVIEW, keys, MAX_PREVIEWS, PREVIEWS_KEPT_S, index, step, steps, image
            )


def _preview(cursor: str, fields: dict[bytes, bytes]) -> Preview:
    index, step, steps = (int(fields[name]) for name in (b"index", b"step", b"steps"))
    return Preview(cursor, index, step, steps, fields[b"image"])
