"""Stored predictions and conversations, within a byte budget (shared/stores/retention.py).

A stored prediction is a record with a document (shared/stores/records.py), which is created before
its job is published and kept for a set time after it ends.

Calls raise Unavailable if Redis does not respond, because the API must not promise anything that
has not been stored.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from prometheus_client import Counter

from shared.errors import Overloaded
from shared.stores.previews import preview_keys
from shared.stores.record_state import Record, receipts_of
from shared.stores.records import JOB_KEEP_S
from shared.stores.records_redis import RecordsRedis
from shared.stores.redis_client import load_script
from shared.stores.retention import BUDGET_BYTES
from shared.stores.token_streams import token_keys
from shared.stores.waiting_lines import line_keys
from shared.stores.webhook_log import webhook_keys

FULL_RETRY_S = 5.0
"""Retry-After if there is no room for a prediction."""
LISTED = 10_000
"""Maximum number of predictions listed per tenant."""
_HEAD_BYTES = 8192
"""The model is within this many bytes of a document's start: only IDs and the tenant precede it."""

DROPPED = Counter(
    "penstock_predictions_dropped_total", "Predictions dropped early for lack of room."
)

_BUDGET = ("shared/stores/retention.lua", "shared/stores/record_budget.lua")
_STATES = "shared/stores/record_states.lua"
CREATE = load_script(*_BUDGET, "shared/stores/record_create.lua")
KEEP = load_script(*_BUDGET, "shared/stores/record_keep.lua")
PUT_DOCUMENT = load_script(*_BUDGET, "shared/stores/document_put.lua")
DELETE = load_script(*_BUDGET, _STATES, "shared/stores/record_delete.lua")
SELECT = load_script(_STATES, "shared/stores/record_select.lua")


class ListedRecord(NamedTuple):
    """A prediction in its tenant's list: the record ID, and the creation time in Unix seconds."""

    record: str
    created_at_s: float


class PredictionStore:
    """The stored predictions of all tenants.

    Args:
        max_bytes: combined budget for all tenants, in bytes.
    """

    def __init__(self, redis: RecordsRedis, *, max_bytes: int = BUDGET_BYTES) -> None:
        self._redis = redis
        self._commands = redis.small_commands
        self._max_bytes = max_bytes

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
        created_at_s: float | None = None,
    ) -> int:
        """Creates a prediction's record in the `starting` state.

        Returns the number of the tenant's unfinished predictions, including this one, or 0 if the
        record already exists.

        If the budget is exhausted, the largest tenant's oldest finished predictions are dropped.

        Args:
            deadline_s: Unix time when work on the prediction stops.
            keep_s: how many seconds to keep the prediction after it ends, or after its deadline if
                it never ends.
            reply_bytes: maximum size of its reply.
            model: the model that will run the prediction, and whose queue it joins.
            hold: the limits that the prediction has reserved (shared/stores/holds.py). Empty if
                there are none.
            created_at_s: creation time in lists, as Unix time. None means now.

        Raises:
            Overloaded: unfinished predictions leave no room for it.
            Unavailable: Redis did not respond, but may have created the record.
        """
        keys = (
            *self._keys(record),
            self._tenant_key(tenant),
            *line_keys(self._redis.prefix, tenant, model),
        )
        now_s = time.time()
        about = (now_s, deadline_s, keep_s, tenant, record, document)
        limits = (LISTED, reply_bytes, self._max_bytes, hold)
        listed_s = now_s if created_at_s is None else created_at_s
        created, dropped, unfinished = await self._commands.run_script(
            CREATE, keys, *about, *limits, listed_s
        )
        DROPPED.inc(dropped)
        if created < 0:
            reason = "unfinished predictions take up all the storage for new ones. Try again later."
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
        """Stores a result, computed without a record, as a successful prediction.

        Returns False if the record already exists. Uses the same budget as `create`.

        Args:
            tenant: the tenant whose list includes the prediction.
            reply: its results, as an encoded ReplyBody.
            created_at_s: Unix time of the request.
            keep_s: how many seconds to keep it.

        Raises:
            Overloaded: unfinished predictions leave no room for it.
            Unavailable: Redis did not respond, but may have stored it.
        """
        keys = (*self._keys(record), self._tenant_key(tenant))
        about = (time.time(), created_at_s, keep_s, tenant, record, document, reply)
        outcome, dropped = await self._commands.run_script(
            KEEP, keys, *about, LISTED, self._max_bytes
        )
        DROPPED.inc(dropped)
        if outcome < 0:
            raise Overloaded(
                "unfinished predictions leave no room to store the response. Try again later."
            )
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
        """Stores a document that may change, within the prediction budget.

        Returns False if the current document differs from `replaces` or no longer exists.

        Args:
            keep_s: how many seconds from now to keep it. None keeps it for as long as before.
            replaces: the document to replace. Empty if it is new.

        Raises:
            Overloaded: unfinished predictions leave no room for it.
            Unavailable: Redis did not respond, but may have stored it.
        """
        known = hashlib.sha1(replaces, usedforsecurity=False).hexdigest() if replaces else ""
        args = (time.time(), "" if keep_s is None else keep_s, tenant, document, known)
        stored, dropped = await self._commands.run_script(
            PUT_DOCUMENT, self._keys(record), *args, self._max_bytes
        )
        DROPPED.inc(dropped)
        if stored < 0:
            raise Overloaded(
                "unfinished predictions leave no room to store this document. Try again later."
            )
        return bool(stored)

    async def delete(self, record: str, known: Record, deadline_s: float) -> bool | None:
        """Deletes a finished prediction and everything that belongs to it in Redis.

        Its cost is kept for the process that has yet to settle it.

        Args:
            known: the record as read by the caller. It must be over.
            deadline_s: latest Unix time at which the broker may deliver its job.

        Returns:
            True: deleted. False: it has changed since then, so read it again. None: it does not
                exist.
        """
        keys = (
            *self._keys(record),
            *preview_keys(self._redis.prefix, record),
            *token_keys(self._redis.prefix, record),
            *webhook_keys(self._redis.prefix, record),
        )
        kept_s = JOB_KEEP_S + max(0, int(deadline_s - time.time()))
        receipts = b"" if known.reply is None else receipts_of(known.reply)
        answer = await self._commands.run_script(DELETE, keys, kept_s, receipts, known.state)
        return {1: True, -1: False}.get(answer)

    async def latest(
        self,
        tenant: str,
        limit: int,
        *,
        before_s: float = math.inf,
        since_s: float = -math.inf,
        after: ListedRecord | None = None,
    ) -> list[ListedRecord]:
        """Returns a tenant's predictions, newest first.

        Predictions with the same creation time, such as a batch's runs, are ordered by ID.

        Args:
            before_s: only predictions created before this Unix time.
            since_s: only predictions created at or after this Unix time.
            after: only predictions listed after this one, which may no longer exist. None means
                all.
        """
        command, key = "ZREVRANGEBYSCORE", self._tenant_key(tenant)
        listed = list[ListedRecord]()
        if after is not None and after.created_at_s < since_s:
            return []
        if after is not None and after.created_at_s < before_s:
            before_s = after.created_at_s
            same_time = await self._commands.run(command, key, repr(before_s), repr(before_s))
            records = [record.decode() for record in same_time]
            listed = [ListedRecord(name, before_s) for name in records if name < after.record]
        if (missing := limit - len(listed)) > 0:
            words = (command, key, f"({before_s!r}", repr(since_s), "WITHSCORES")
            reply = await self._commands.run(*words, "LIMIT", 0, missing)
            listed += [ListedRecord(record.decode(), float(score)) for record, score in reply]
        return listed[:limit]

    async def select(self, records: Sequence[str], *, state: str, model: str) -> list[str]:
        """Returns the predictions that may have this state and model, in the same order.

        Unfinished predictions are included regardless of their state, because they may be late. An
        empty state or model matches everything.
        """
        if not records:
            return []
        text = b'"model":' + msgspec.json.encode(model) if model else b""
        keys = [self._redis.record_key(record) for record in records]
        positions = await self._commands.run_script(SELECT, keys, state, text, _HEAD_BYTES)
        return [records[position - 1] for position in positions]

    async def sizes(self, records: Sequence[str]) -> list[int]:
        """Returns predictions' sizes in bytes, as counted toward their budget (0 if deleted)."""
        keys = map(self._redis.record_key, records)
        counts = await self._commands.run("HMGET", f"{self._redis.predictions_key}:counted", *keys)
        return [0 if count is None else int(count.partition(b" ")[0]) for count in counts]

    def _keys(self, record: str) -> tuple[str, str]:
        return self._redis.record_key(record), self._redis.predictions_key

    def _tenant_key(self, tenant: str) -> str:
        return f"{self._redis.predictions_key}:of:{tenant}"
