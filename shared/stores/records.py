"""Records in Redis: the state of every job and prediction. A reply message only wakes its waiter.

`record_id(request_id, part)` is the ID of a job's record. A prediction is a job whose record is
created before its message is published, and kept for a set time after its end. The record of any
other job is created when a worker claims it, and expires soon after.

    starting → processing → succeeded | failed        canceled: from either, by a caller

The first `finish` ends a record. A later one gets the first reply. A claim that was neither
finished nor released was held by a worker that died or lost its lease.

A record is a hash. Its fields are `state`, `attempts` (claims so far), `open` (claims neither
finished nor released since the job last continued), `alone` (open claims whose worker computes only
this job), `reply` (the encoded ReplyBody), `step`, `steps`, and `*_at_s` (Unix seconds). A
prediction also has `document`, `keep_s` and `published`, and counts toward a budget of bytes
(shared/stores/retention.py). Only the scripts next to this file (record_*.lua) write records.
Claims and finishes come in large numbers, so their scripts take several records: one script for 100
records costs little more than one for a single record.

A prediction may have a hold: the parts of limits that it has reserved until it is settled. The hold
is created with the record, by the same script, and outlives the instance that created it. The
process that ends the record makes its hold due (record_budget.lua). Any instance takes due holds
and settles them based on the record. Settling removes the hold in the same script that counts
(api/limits/take.lua), so it happens once.

Calls raise Unavailable if Redis does not answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Literal, NamedTuple, cast

from prometheus_client import Counter, Gauge
from redis.exceptions import RedisError

from shared.errors import Overloaded, Unavailable, UndecodableMessage
from shared.messages import PrintedLogs
from shared.stores.fetched_urls import FetchedUrls
from shared.stores.flow_runs import FlowRuns
from shared.stores.record_state import (
    Claim,
    Finish,
    PreviewStore,
    Record,
    ReleasedClaim,
    State,
    WaitingLines,
    receipts_of,
    record_from_fields,
)
from shared.stores.redis_client import (
    CONNECT_LIMIT_S,
    KEY_PREFIX,
    Commands,
    RedisLink,
    RedisStore,
    load_script,
)
from shared.stores.retention import BUDGET_BYTES
from shared.stores.token_streams import TokenStreams
from shared.stores.webhook_log import WebhookLog

log = logging.getLogger(__name__)

EndState = Literal["succeeded", "failed", "canceled"]
"""The final states of a record."""

LOOK_AGAIN_S = 1.0
"""How long other instances leave a due hold to the one that took it."""
VOID_S = 600
"""How long an abandoned hold can't be created any more."""
_CREATED = load_script("shared/stores/hold_created.lua")
_DUE = load_script("shared/stores/holds_due.lua")

JOB_KEEP_S = 120
"""Seconds to keep the record of a job that is not a prediction after its last change, for late
attempts.
"""
LATE_LOOK_S = 0.5
"""Seconds after its deadline for which a waiter with an open connection still checks whether the
record ended.
"""
FULL_RETRY_S = 5.0
"""Retry-After for a prediction without room."""
LISTED = 1000
"""Maximum number of predictions listed per tenant."""
LISTEN_POLL_S = 1.0
LISTEN_PAUSE_S = 0.5

_CHANGING = (
    *("state", "attempts", "published", "step", "steps", "reply", "receipts"),
    *("logs", "logs_left_out", "closed"),
    *("created_at_s", "started_at_s", "ended_at_s", "canceled_at_s"),
)
"""Fields included in `Record`, without the document."""

ERRORS = Counter(
    "penstock_records_errors_total",
    "Failed round trips to Redis about records, by operation.",
    ["operation"],
)
DROPPED = Counter(
    "penstock_predictions_dropped_total", "Predictions dropped early for lack of room."
)
UP = Gauge(
    "penstock_records_redis_up",
    "1 while Redis is being asked about records, 0 while the breaker is open.",
)

_BUDGET = ("shared/stores/retention.lua", "shared/stores/record_budget.lua")
_STATES = "shared/stores/record_states.lua"
CREATE = load_script(*_BUDGET, "shared/stores/record_create.lua")
PUBLISHED = load_script("shared/stores/record_published.lua")
PUT_DOCUMENT = load_script(*_BUDGET, "shared/stores/document_put.lua")
KEEP = load_script(*_BUDGET, "shared/stores/record_keep.lua")
CLAIM = load_script(_STATES, "shared/stores/record_claim.lua")
PROGRESS = load_script("shared/stores/record_progress.lua")
LOGS = load_script("shared/stores/record_logs.lua")
HAND_OVER = load_script(_STATES, "shared/stores/record_hand_over.lua")
ALONE = load_script("shared/stores/record_alone.lua")
RELEASE = load_script(_STATES, "shared/stores/record_release.lua")
CANCEL = load_script(*_BUDGET, _STATES, "shared/stores/record_cancel.lua")
DELETE = load_script(*_BUDGET, _STATES, "shared/stores/record_delete.lua")
FINISH = load_script(*_BUDGET, _STATES, "shared/stores/record_finish.lua")


class DueHold(NamedTuple):
    """A hold to settle."""

    record_id: str
    data: bytes
    """The hold as created."""
    record: Record | None
    """Without its document. None: it is gone, or can't be read."""


def hold_keys(prefix: str) -> tuple[str, str]:
    """Returns the keys of all holds, and of the times at which they are due."""
    return f"{prefix}predictions:holds", f"{prefix}predictions:held"


class Holds:
    """All holds in one Redis."""

    def __init__(self, commands: Commands, prefix: str) -> None:
        self._commands = commands
        self._keys = hold_keys(prefix)
        self._record_prefix = f"{prefix}record:"
        self._void_prefix = f"{prefix}predictions:void:"

    async def due(self, most: int) -> list[DueHold]:
        """Takes holds whose records are over, or should be over by now.

        Other instances get them LOOK_AGAIN_S later if they still exist.
        """
        args = (time.time(), most, LOOK_AGAIN_S)
        due = await self._commands.run_script(_DUE, self._keys, *args)
        return [
            DueHold(key.decode().removeprefix(self._record_prefix), data, _record_of(fields))
            for key, data, fields in due
        ]

    async def are_held(self, record_ids: Sequence[str]) -> list[bool]:
        """Returns whether the records have unsettled holds."""
        names = [self._record_prefix + record_id for record_id in record_ids]
        scores = await self._commands.run("ZMSCORE", self._keys[1], *names)
        return [score is not None for score in scores]

    async def was_created(self, record_id: str, data: bytes) -> bool:
        """Returns whether a record was created with this hold, which may be settled by now.

        If it was not, it can no longer be created.
        """
        digest = hashlib.sha1(data, usedforsecurity=False).hexdigest()
        keys = (self._record_prefix + record_id, f"{self._void_prefix}{digest}")
        return bool(await self._commands.run_script(_CREATED, keys, digest, VOID_S))


def _record_of(fields: Sequence[bytes]) -> Record | None:
    known = {name.decode(): value for name, value in zip(fields[::2], fields[1::2], strict=True)}
    try:
        return record_from_fields(known) if known else None
    except UndecodableMessage:
        log.error("a reply can't be read, so its prediction counts as reserved")
        return None


class Records(RedisStore):
    """The records in one Redis: an async context manager that also opens without Redis.

    Args:
        prefix: prefix of every key, for several deployments on one Redis.
        retry_s: upper bound of the first pause before a background retry.
        predictions_max_bytes: budget of all predictions, enforced by `create`.
    """

    def __init__(
        self,
        redis_url: str,
        *,
        prefix: str = KEY_PREFIX,
        timeout_s: float = 1.0,
        retry_s: float = 0.25,
        predictions_max_bytes: int = BUDGET_BYTES,
    ) -> None:
        limits = {"timeout_s": timeout_s, "retry_s": retry_s}
        super().__init__(
            RedisLink(
                "records",
                redis_url,
                **limits,
                up=UP,
                errors=ERRORS,
                field="records_url",
                checks_policy=True,
            )
        )
        self._prefix = prefix
        self._store = f"{prefix}predictions"
        self._max_bytes = predictions_max_bytes
        self._channel = f"{prefix}canceled"
        self._claims = self._link.batcher("claim", self._send_claims)
        self._finishes = self._link.batcher("finish", self._send_finishes)
        self._commands = self._link.commands("the store of predictions")
        self.lines = WaitingLines(self._commands, prefix)
        self.holds = Holds(self._commands, prefix)
        self.webhook_log = WebhookLog(self._commands, prefix)
        # Separate round trips, because images are large and must not delay others.
        self.previews = PreviewStore(self._link.commands("the store of previews"), prefix)
        self.fetched_urls = FetchedUrls(self._link.commands("the store of fetched URLs"), prefix)
        self.tokens = TokenStreams(self._link.commands("the store of tokens"), prefix)
        self.flows = FlowRuns(self._commands, prefix, self._store, self._max_bytes)

    def _key(self, record: str) -> str:
        return f"{self._prefix}record:{record}"

    def _of_tenant(self, tenant: str) -> str:
        return f"{self._prefix}predictions:of:{tenant}"

    # For the API. It must not promise anything that is not stored, so these raise if Redis does not
    # answer.

    async def create(
        self,
        record: str,
        tenant: str,
        document: bytes,
        *,
        deadline_s: float,
        keep_s: int,
        reply_bytes: int = 0,
        model: str = "",
        hold: bytes = b"",
    ) -> int:
        """Creates the record of a prediction in state `starting`.

        Returns the number of the tenant's unfinished predictions, including this one. 0: the record
        already exists.

        If the budget is used up, the oldest finished predictions of the largest tenant are dropped.

        Args:
            deadline_s: Unix time.
            keep_s: seconds to keep it after its end, or after its deadline if it never ends.
            reply_bytes: maximum size of its reply.
            model: the model to compute it, in whose queue it is placed.
            hold: limits it has reserved (see above). Empty: nothing.

        Raises:
            Overloaded: there is no room for it because of unfinished predictions.
            Unavailable: Redis did not answer, but may have created the record.
        """
        now_s = time.time()
        keys = (
            *(self._key(record), self._store, self._of_tenant(tenant)),
            self.lines.key_of(tenant, model),
            self.lines.pace_key_of(tenant, model),
        )
        args = (
            now_s,
            deadline_s,
            keep_s,
            tenant,
            record,
            document,
            LISTED,
            reply_bytes,
            self._max_bytes,
            hold,
        )
        created, dropped, unfinished = await self._commands.run_script(CREATE, keys, *args)
        DROPPED.inc(dropped)
        if created < 0:
            reason = "unfinished predictions leave no room for another one. Try again later."
            raise Overloaded(reason, retry_after_s=FULL_RETRY_S)
        return int(unfinished)

    async def keep(
        self,
        record: str,
        tenant: str,
        document: bytes,
        reply: bytes,
        *,
        created_at_s: float,
        keep_s: int,
    ) -> bool:
        """Stores an answer that was computed without a record as a succeeded prediction.

        Returns False if the record already exists. Uses the same budget as `create`.

        Args:
            tenant: the owner in whose list it appears.
            reply: encoded ReplyBody.
            created_at_s: Unix time of the request.
            keep_s: seconds to keep it.

        Raises:
            Overloaded: there is no room for it because of unfinished predictions.
            Unavailable: Redis did not answer, but may have stored it.
        """
        keys = (self._key(record), self._store, self._of_tenant(tenant))
        about = (time.time(), created_at_s, keep_s, tenant, record, document, reply)
        outcome, dropped = await self._commands.run_script(
            KEEP, keys, *about, LISTED, self._max_bytes
        )
        DROPPED.inc(dropped)
        if outcome < 0:
            raise Overloaded("unfinished predictions leave no room to store the answer.")
        return bool(outcome)

    async def put_document(
        self,
        record: str,
        tenant: str,
        document: bytes,
        *,
        keep_s: int | None,
        replaces: bytes = b"",
    ) -> bool:
        """Stores a document that may change, within the budget of predictions.

        Returns False if the current document differs from `replaces`, or no longer exists.

        Args:
            keep_s: seconds to keep it from now. None: as long as before.
            replaces: document that it replaces. Empty: it is new.

        Raises:
            Overloaded: there is no room for it because of unfinished predictions.
            Unavailable: Redis did not answer, but may have stored it.
        """
        known = hashlib.sha1(replaces, usedforsecurity=False).hexdigest() if replaces else ""
        args = (time.time(), "" if keep_s is None else keep_s, tenant, document, known)
        keys = (self._key(record), self._store)
        stored, dropped = await self._commands.run_script(
            PUT_DOCUMENT, keys, *args, self._max_bytes
        )
        DROPPED.inc(dropped)
        if stored < 0:
            raise Overloaded(
                "unfinished predictions leave no room to store this document. Try again later."
            )
        return bool(stored)

    async def mark_published(self, record: str) -> None:
        """Records that the broker has the job of a prediction."""
        await self._commands.run_script(PUBLISHED, [self._key(record)])

    async def cancel(self, record: str, deadline_s: float = 0.0) -> State:
        """Ends a record as canceled unless it is over, notifies the workers, and returns its state.

        Args:
            deadline_s: Unix time until which the broker may deliver its job. The record is kept at
                least until then. Otherwise, a worker that receives the job later would compute it.
                Predictions are kept longer anyway.
        """
        now_s = time.time()
        keep_s = JOB_KEEP_S + max(0, math.ceil(deadline_s - now_s))
        args = (now_s, keep_s, self._channel, record)
        state = await self._commands.run_script(CANCEL, [self._key(record), self._store], *args)
        return cast(State, state.decode())

    async def delete(self, record: str, known: Record, deadline_s: float) -> bool | None:
        """Deletes a finished prediction and everything that belongs to it in Redis.

        Its cost remains for the process that has yet to settle it.

        Args:
            known: record as read by the caller. It must be over.
            deadline_s: Unix time until which the broker may deliver its job.

        Returns:
            True: deleted. False: it has changed since, so read it again. None: it does not exist.
        """
        keys = (
            *(self._key(record), self._store),
            *self.previews.keys_of(record),
            *self.tokens.keys_of(record),
            *self.webhook_log.keys_of(record),
        )
        kept_s = JOB_KEEP_S + max(0, int(deadline_s - time.time()))
        receipts = b"" if known.reply is None else receipts_of(known.reply)
        answer = await self._commands.run_script(DELETE, keys, kept_s, receipts, known.state)
        return {1: True, -1: False}.get(answer)

    async def read(self, record: str) -> Record | None:
        """Returns the record, or None if there is none."""
        fields = await self._commands.run("HGETALL", self._key(record))
        known = {name.decode(): value for name, value in fields.items()}
        return record_from_fields(known) if known else None

    async def read_again(self, record: str, document: bytes) -> Record | None:
        """Like `read`, for a caller that already has the document, which never changes.

        So following a prediction is cheap, no matter how large its request.

        Args:
            document: document as read or created.
        """
        values = await self._commands.run("HMGET", self._key(record), *_CHANGING, "keep_s")
        known = dict(zip(_CHANGING, values, strict=False))
        fields = {name: value for name, value in known.items() if value is not None}
        if not fields:
            return None
        held = record_from_fields(fields)
        if values[-1] is not None:  # the rest of a deleted record has no keep_s
            held.document = document
        return held

    async def latest(self, tenant: str, limit: int, before_s: float | None = None) -> list[str]:
        """Returns the IDs of a tenant's predictions, newest first.

        With `before_s` (Unix seconds), only older ones.
        """
        newest = "+inf" if before_s is None else f"({before_s!r}"
        words = ("ZREVRANGEBYSCORE", self._of_tenant(tenant), newest, "-inf", "LIMIT", 0, limit)
        reply = await self._commands.run(*words)
        return [record.decode() for record in reply]

    async def sizes(self, records: Sequence[str]) -> list[int]:
        """Returns the sizes of predictions in bytes, as counted by their budget. 0: deleted."""
        keys = map(self._key, records)
        counts = await self._commands.run("HMGET", f"{self._store}:counted", *keys)
        return [0 if count is None else int(count.partition(b" ")[0]) for count in counts]

    # For workers. Jobs are done with or without Redis, so these never raise, and return None if it
    # did not answer.

    async def claim(self, records: Sequence[str]) -> list[Claim | None]:
        """Claims jobs. Missing records are created."""
        answers = await self._claims.call(records) if self.is_up else None
        return [None] * len(records) if answers is None else list(answers)

    async def finish(self, record: str, state: EndState, reply: bytes) -> Finish | None:
        """Ends a record with the encoded ReplyBody `reply`, unless it has one.

        If a caller canceled it, only a reply with the `canceled` state is accepted.
        """
        return (await self.finish_all([(record, state, reply)]))[0]

    async def finish_all(self, ends: Sequence[tuple[str, EndState, bytes]]) -> list[Finish | None]:
        """Ends several records, each with its state and reply, as `finish` does."""
        answers = await self._finishes.call(ends) if self.is_up else None
        return [None] * len(ends) if answers is None else list(answers)

    async def release(self, released: Sequence[ReleasedClaim]) -> None:
        """Releases claims: if their worker dies now, the jobs are not the cause."""
        args = [
            part for claim in released for part in (claim.claims, claim.alone, int(claim.is_back))
        ]
        with contextlib.suppress(Unavailable):
            keys = [self._key(claim.record) for claim in released]
            await self._commands.run_script(RELEASE, keys, *args)

    async def note_alone(self, record: str, *, begins: bool) -> bool:
        """Records that a claimed job is the only one its worker is computing, or no longer is.

        Returns whether Redis recorded it.
        """
        with contextlib.suppress(Unavailable):
            change = 1 if begins else -1
            return bool(await self._commands.run_script(ALONE, [self._key(record)], change))
        return False

    async def hand_over(self, record: str) -> None:
        """Releases all claims, because another revision of the model will do the job."""
        with contextlib.suppress(Unavailable):
            await self._commands.run_script(HAND_OVER, [self._key(record)])

    async def progress(self, record: str, step: int, steps: int) -> bool:
        """Records the progress of the job, unless `steps` is 0.

        Returns whether previews are wanted.
        """
        watched, _ = self.previews.keys_of(record)
        with contextlib.suppress(Unavailable):
            keys = [self._key(record), watched]
            return bool(await self._commands.run_script(PROGRESS, keys, step, steps))
        return False

    async def put_logs(self, record: str, attempt: int, logs: PrintedLogs) -> None:
        """Stores text printed by a model so far, for the worker with the latest claim.

        Never raises, because missing text arrives with the reply.
        """
        with contextlib.suppress(Unavailable):
            await self._commands.run_script(
                LOGS, [self._key(record)], attempt, logs.left_out, logs.text
            )

    async def canceled(self) -> AsyncGenerator[str | None]:
        """Yields the IDs of records as they are canceled, and None after each (re)connection.

        After None, cancellations may have been missed. The iteration ends only when the caller
        leaves it.
        """
        while True:
            try:
                async with self._link.client.pubsub() as listening:
                    async with asyncio.timeout(CONNECT_LIMIT_S):
                        await listening.subscribe(self._channel)
                    while True:
                        message = await listening.get_message(timeout=LISTEN_POLL_S)
                        _check_canceled()
                        if message is None:
                            continue
                        # Also after redis-py has silently reconnected.
                        is_new = message["type"] == "subscribe"
                        yield None if is_new else message["data"].decode()
            except (RedisError, OSError, RuntimeError) as error:
                _check_canceled()
                log.debug("can't listen for cancellations", extra={"reason": repr(error)})
                await asyncio.sleep(LISTEN_PAUSE_S)

    async def _send_claims(self, records: list[str]) -> list[Claim]:
        keys = [self._key(record) for record in records]
        answers = await self._link.run_script(CLAIM, keys, (time.time(), JOB_KEEP_S))
        return [
            Claim(cast(State, state.decode()), attempts, unfinished, reply or None, alone)
            for state, attempts, unfinished, reply, alone in answers
        ]

    async def _send_finishes(self, ends: list[tuple[str, EndState, bytes]]) -> list[Finish]:
        keys = [self._store, *(self._key(record) for record, _, _ in ends)]
        args = [
            time.time(),
            JOB_KEEP_S,
            *(part for _, state, reply in ends for part in (state, reply)),
        ]
        answers = await self._link.run_script(FINISH, keys, args)
        return [
            Finish(bool(ours), cast(State, state.decode()), reply or None)
            for ours, state, reply in answers
        ]


def _check_canceled() -> None:
    """Cancels the task if redis-py swallowed its cancellation, as connects and reads do."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
