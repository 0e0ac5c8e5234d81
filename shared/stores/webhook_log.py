"""A bounded log of a prediction's webhook attempts, without bodies, secrets, or URLs.

Calls raise Unavailable if Redis does not respond.
"""

from __future__ import annotations

import contextlib

import msgspec

from shared.errors import Overloaded, Unavailable
from shared.stores.records_redis import RecordsRedis
from shared.stores.redis_client import load_script

MAX_KEPT = 100
KEPT_S = 2 * 24 * 3600
"""Longer than the period during which events are retried."""
REPLAY_EVERY_S = 5
MAX_REASON_CHARS = 200

_ADD = load_script("shared/stores/webhook_log_add.lua")


class WebhookLog:
    """All predictions' logs."""

    def __init__(self, redis: RecordsRedis) -> None:
        self._redis = redis
        self._commands = redis.small_commands

    async def add(self, record: str, attempt: WebhookAttempt) -> int | None:
        """Adds an attempt and returns its number, starting at 1.

        Never raises, because losing an entry is acceptable. A lost entry has no number.
        """
        log, attempts, _ = webhook_keys(self._redis.prefix, record)
        keys = (self._redis.record_key(record), log, attempts)
        if attempt.error is not None:
            attempt.error = attempt.error[:MAX_REASON_CHARS]
        entry = msgspec.json.encode(attempt)
        with contextlib.suppress(Unavailable):
            number = await self._commands.run_script(
                _ADD, keys, attempt.webhook_id, entry, MAX_KEPT, KEPT_S
            )
            return int(number) or None
        return None

    async def read(self, record: str) -> list[WebhookAttempt]:
        log, _, _ = webhook_keys(self._redis.prefix, record)
        entries = await self._commands.run("LRANGE", log, 0, -1)
        return [_attempt(entry) for entry in entries]

    async def keep_end(self, record: str, end: bytes) -> None:
        """Stores the data for a webhook not yet notified when its prediction is deleted."""
        await self._commands.run("SET", self._end_key(record), end, "EX", KEPT_S)

    async def end_of(self, record: str) -> bytes | None:
        """Returns the data that `keep_end` stored.

        None if there is no such data, or if the webhook was notified.
        """
        end: bytes | None = await self._commands.run("GET", self._end_key(record))
        return end

    async def drop_end(self, record: str) -> None:
        """Deletes the data stored by `keep_end`. Never raises, because it expires anyway."""
        with contextlib.suppress(Unavailable):
            await self._commands.run("DEL", self._end_key(record))

    def _end_key(self, record: str) -> str:
        return f"{self._redis.prefix}webhooks:{record}:end"

    async def start_replay(self, record: str) -> None:
        """Allows one replay every few seconds.

        Raises:
            Overloaded: the last replay was only a moment ago.
        """
        _, _, replayed = webhook_keys(self._redis.prefix, record)
        if not await self._commands.run("SET", replayed, 1, "NX", "EX", REPLAY_EVERY_S):
            reason = (
                f"a webhook can be replayed only once every {REPLAY_EVERY_S} s; try again later"
            )
            raise Overloaded(reason, retry_after_s=REPLAY_EVERY_S)


class WebhookAttempt(msgspec.Struct, kw_only=True):
    """One attempt to deliver an event."""

    webhook_id: str
    event: str
    at_s: float
    """Unix time when it started."""
    duration_s: float
    status: int | None = None
    """HTTP status of the response. None if there was no response."""
    error: str | None = None
    """The reason there was no response, or the problem with the response."""
    attempt: int = 1
    """The attempt number for this webhook-id."""


def webhook_keys(prefix: str, record: str) -> tuple[str, str, str]:
    """Returns a record's keys: the log, the attempt counts, and the last replay."""
    start = f"{prefix}webhooks:{record}"
    return f"{start}:log", f"{start}:attempts", f"{start}:replayed"


def _attempt(entry: bytes) -> WebhookAttempt:
    number, _, encoded = entry.partition(b" ")
    attempt = msgspec.json.decode(encoded, type=WebhookAttempt)
    attempt.attempt = int(number)
    return attempt
