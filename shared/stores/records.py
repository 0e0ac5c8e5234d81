"""Records in Redis: every job's and prediction's state. A reply message only wakes its waiter.

`record_id(request_id, part)` is the ID of a job's record. A prediction is a job whose record is
created before its message is published and kept for a set time after it ends. Any other job's
record is created when a worker claims the job, and expires soon afterward.

    starting → processing → succeeded | failed        canceled: from either, by a caller

The first `finish` ends a record. Later calls get the first reply. A claim that is neither finished
nor released belonged to a worker that died or lost its lease.

A record is a hash. Its fields are `state`, `attempts` (claims so far), `open` (claims neither
finished nor released since the job last continued), `alone` (open claims whose worker is running
only this job), `reply` (the encoded ReplyBody), `step`, `steps`, and `*_at_s` (Unix seconds). A
prediction also has `document`, `keep_s`, and `published` (shared/stores/prediction_store.py). Only
the scripts next to this file (record_*.lua) write records. Claims and finishes arrive in bulk, so
their scripts take multiple records: a script for 100 records costs little more than a script for
one.

Calls raise Unavailable if Redis does not respond.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Literal, cast

from redis.exceptions import RedisError

from shared.errors import Unavailable
from shared.messages import PrintedLogs
from shared.stores.previews import preview_keys
from shared.stores.record_state import (
    Claim,
    Finish,
    Record,
    ReleasedClaim,
    State,
    record_from_fields,
)
from shared.stores.records_redis import RecordsRedis
from shared.stores.redis_client import CONNECT_LIMIT_S, RoundTrip, load_script, script_call, unwrap

EndState = Literal["succeeded", "failed", "canceled"]
"""The final states of a record."""

JOB_KEEP_S = 120
"""How many seconds to keep the record of a job that is not a prediction after its last change, to
handle late attempts.
"""
LATE_LOOK_S = 0.5
"""How many seconds past the deadline a waiter with an open connection keeps checking whether the
record has ended.
"""
LISTEN_POLL_S = 1.0
LISTEN_PAUSE_S = 0.5

_CHANGING = (
    *("state", "attempts", "published", "step", "steps", "reply", "receipts"),
    *("logs", "logs_left_out", "closed"),
    *("created_at_s", "started_at_s", "ended_at_s", "canceled_at_s"),
)
"""Fields included in `Record`, without the document."""

_BUDGET = ("shared/stores/retention.lua", "shared/stores/record_budget.lua")
_STATES = "shared/stores/record_states.lua"
PUBLISHED = load_script("shared/stores/record_published.lua")
CANCEL = load_script(*_BUDGET, _STATES, "shared/stores/record_cancel.lua")
CLAIM = load_script(_STATES, "shared/stores/record_claim.lua")
FINISH = load_script(*_BUDGET, _STATES, "shared/stores/record_finish.lua")
RELEASE = load_script(_STATES, "shared/stores/record_release.lua")
ALONE = load_script("shared/stores/record_alone.lua")
HAND_OVER = load_script(_STATES, "shared/stores/record_hand_over.lua")
PROGRESS = load_script("shared/stores/record_progress.lua")
LOGS = load_script("shared/stores/record_logs.lua")

log = logging.getLogger(__name__)


class Records:
    """The records in one Redis instance."""

    def __init__(self, redis: RecordsRedis) -> None:
        self._redis = redis
        self._commands = redis.small_commands
        self._claims = redis.batcher("claim", self._plan_claims)
        self._finishes = redis.batcher("finish", self._plan_finishes)

    # For the API. The API must not promise anything that is not stored, so these methods raise if
    # Redis does not respond.

    async def mark_published(self, record: str) -> None:
        """Records that the broker has a prediction's job."""
        await self._commands.run_script(PUBLISHED, [self._redis.record_key(record)])

    async def cancel(self, record: str, deadline_s: float = 0.0) -> State:
        """Ends a record as canceled unless it has ended, notifies workers, and returns its state.

        Args:
            deadline_s: latest Unix time at which the broker may deliver its job. The record is kept
                at least until then. Otherwise, a worker that receives the job later would run it.
                Predictions are kept longer anyway.
        """
        now_s = time.time()
        keep_s = JOB_KEEP_S + max(0, math.ceil(deadline_s - now_s))
        args = (now_s, keep_s, self._redis.canceled_channel, record)
        state = await self._commands.run_script(
            CANCEL, [self._redis.record_key(record), self._redis.predictions_key], *args
        )
        return cast(State, state.decode())

    async def read(self, record: str) -> Record | None:
        """Returns the record, or None if it does not exist."""
        fields = await self._commands.run("HGETALL", self._redis.record_key(record))
        known = {name.decode(): value for name, value in fields.items()}
        return record_from_fields(known) if known else None

    async def read_again(self, record: str, document: bytes) -> Record | None:
        """Like `read`, for a caller that already has the document, which never changes.

        This makes it cheap to follow a prediction, no matter how large its request is.

        Args:
            document: the document as read or created.
        """
        values = await self._commands.run(
            "HMGET", self._redis.record_key(record), *_CHANGING, "keep_s"
        )
        known = dict(zip(_CHANGING, values, strict=False))
        fields = {name: value for name, value in known.items() if value is not None}
        if not fields:
            return None
        held = record_from_fields(fields)
        if values[-1] is not None:  # the remains of a deleted record have no keep_s
            held.document = document
        return held

    # For workers. Jobs run with or without Redis, so these methods never raise, and return None if
    # Redis did not respond.

    async def wait_up(self, limit_s: float) -> bool:
        """Waits up to `limit_s` for Redis to become available. Returns whether it is."""
        return await self._redis.wait_up(limit_s)

    async def claim(self, records: Sequence[str]) -> list[Claim | None]:
        """Claims jobs. Missing records are created."""
        answers = await self._claims.call(records) if self._redis.is_up else None
        return [None] * len(records) if answers is None else list(answers)

    async def finish(self, record: str, state: EndState, reply: bytes) -> Finish | None:
        """Ends a record with the encoded ReplyBody `reply`, unless it already has one.

        If a caller canceled it, only a reply with the `canceled` state is accepted.
        """
        return (await self.finish_all([(record, state, reply)]))[0]

    async def finish_all(self, ends: Sequence[tuple[str, EndState, bytes]]) -> list[Finish | None]:
        """Ends several records, each with its state and reply, as `finish` does."""
        answers = await self._finishes.call(ends) if self._redis.is_up else None
        return [None] * len(ends) if answers is None else list(answers)

    async def release(self, released: Sequence[ReleasedClaim]) -> None:
        """Releases claims. If their worker dies after this, the jobs aren't blamed."""
        args = [
            part for claim in released for part in (claim.claims, claim.alone, int(claim.is_back))
        ]
        with contextlib.suppress(Unavailable):
            keys = [self._redis.record_key(claim.record) for claim in released]
            await self._commands.run_script(RELEASE, keys, *args)

    async def note_alone(self, record: str, *, begins: bool) -> bool:
        """Records whether a claimed job is the only one that its worker is running.

        Returns whether Redis recorded it.
        """
        with contextlib.suppress(Unavailable):
            change = 1 if begins else -1
            return bool(
                await self._commands.run_script(ALONE, [self._redis.record_key(record)], change)
            )
        return False

    async def hand_over(self, record: str) -> None:
        """Releases all claims because another revision of the model will run the job."""
        with contextlib.suppress(Unavailable):
            await self._commands.run_script(HAND_OVER, [self._redis.record_key(record)])

    async def progress(self, record: str, step: int, steps: int) -> bool:
        """Records the job's progress, unless `steps` is 0.

        Returns whether previews are wanted.
        """
        watched, _ = preview_keys(self._redis.prefix, record)
        with contextlib.suppress(Unavailable):
            keys = [self._redis.record_key(record), watched]
            return bool(await self._commands.run_script(PROGRESS, keys, step, steps))
        return False

    async def put_logs(self, record: str, attempt: int, logs: PrintedLogs) -> None:
        """Stores the text a model has printed so far, for the worker with the latest claim.

        Never raises, because any missing text arrives with the reply.
        """
        with contextlib.suppress(Unavailable):
            await self._commands.run_script(
                LOGS, [self._redis.record_key(record)], attempt, logs.left_out, logs.text
            )

    async def watch_cancellations(self) -> AsyncGenerator[str | None]:
        """Yields the IDs of records as they are canceled, and None after each (re)connection.

        After None, cancellations may have been missed. The iteration ends only when the caller
        stops iterating.
        """
        while True:
            try:
                async with self._redis.client.pubsub() as listening:
                    async with asyncio.timeout(CONNECT_LIMIT_S):
                        await listening.subscribe(self._redis.canceled_channel)
                    while True:
                        message = await listening.get_message(timeout=LISTEN_POLL_S)
                        _check_canceled()
                        if message is None:
                            continue
                        # Also yielded after redis-py has silently reconnected.
                        is_new = message["type"] == "subscribe"
                        yield None if is_new else message["data"].decode(errors="replace")
            except (RedisError, OSError, RuntimeError) as error:
                _check_canceled()
                log.debug("can't listen for cancellations", extra={"reason": repr(error)})
                await asyncio.sleep(LISTEN_PAUSE_S)

    def _plan_claims(self, records: list[str]) -> RoundTrip[Claim]:
        keys = [self._redis.record_key(record) for record in records]
        return RoundTrip([script_call(CLAIM, keys, (time.time(), JOB_KEEP_S))], _read_claims)

    def _plan_finishes(self, ends: list[tuple[str, EndState, bytes]]) -> RoundTrip[Finish]:
        keys = [
            self._redis.predictions_key,
            *(self._redis.record_key(record) for record, _, _ in ends),
        ]
        args = [
            time.time(),
            JOB_KEEP_S,
            *(part for _, state, reply in ends for part in (state, reply)),
        ]
        return RoundTrip([script_call(FINISH, keys, args)], _read_finishes)


def _read_claims(replies: list[Any]) -> list[Claim]:
    return [
        Claim(cast(State, state.decode()), attempts, unfinished, reply or None, is_alone)
        for state, attempts, unfinished, reply, is_alone in unwrap(replies[0])
    ]


def _read_finishes(replies: list[Any]) -> list[Finish]:
    return [
        Finish(bool(ours), cast(State, state.decode()), reply or None)
        for ours, state, reply in unwrap(replies[0])
    ]


def _check_canceled() -> None:
    """Cancels the task if redis-py swallowed its cancellation, as its connects and reads can do."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
