"""Previews of images being drawn, in one Redis stream per prediction.

A reader of a prediction's events regularly marks it as watched. Workers see the mark when they
report progress, and skip previews for predictions that no one is watching. Streams are bounded and
expire, so unlike records, they do not count toward a budget.

Calls raise Unavailable if Redis does not respond.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from shared.errors import Unavailable
from shared.stores.records_redis import RecordsRedis
from shared.stores.redis_client import load_script

WATCHED_S = 5
"""How long previews are drawn after a reader marks a prediction as watched."""
PREVIEWS_KEPT_S = 120
MAX_PREVIEWS = 16
"""Maximum number of previews per prediction. Each is a few kilobytes."""

_ADD_PREVIEW = load_script("shared/stores/preview_add.lua")


class PreviewStore:
    """All predictions' previews."""

    def __init__(self, redis: RecordsRedis) -> None:
        self._redis = redis
        # Uses separate round trips, because images are large and must not delay other calls.
        self._commands = redis.commands("the preview store")

    async def watch(self, record: str) -> None:
        """Requests previews for the next few seconds."""
        watched, _ = preview_keys(self._redis.prefix, record)
        await self._commands.run("SET", watched, 1, "EX", WATCHED_S)

    async def after(self, record: str, cursor: str) -> list[Preview]:
        """Returns the previews after `cursor`, or all stored previews if it is empty."""
        _, stream = preview_keys(self._redis.prefix, record)
        entries = await self._commands.run("XRANGE", stream, f"({cursor}" if cursor else "-", "+")
        return [_preview(cursor.decode(), fields) for cursor, fields in entries]

    async def add(self, record: str, index: int, step: int, steps: int, image: bytes) -> None:
        """Adds a preview. Never raises, because a preview may be lost."""
        _, stream = preview_keys(self._redis.prefix, record)
        keys = (self._redis.record_key(record), stream)
        with contextlib.suppress(Unavailable):
            await self._commands.run_script(
                _ADD_PREVIEW, keys, MAX_PREVIEWS, PREVIEWS_KEPT_S, index, step, steps, image
            )


@dataclass(frozen=True, slots=True)
class Preview:
    """An item's intermediate image, captured between two steps.

    `cursor` is its ID in the stream. `image` is a WebP.
    """

    cursor: str
    index: int
    step: int
    steps: int
    image: bytes


def preview_keys(prefix: str, record: str) -> tuple[str, str]:
    """Returns the keys that belong to a record: its watch mark and its stream."""
    return f"{prefix}watched:{record}", f"{prefix}previews:{record}"


def _preview(cursor: str, fields: dict[bytes, bytes]) -> Preview:
    index, step, steps = (int(fields[name]) for name in (b"index", b"step", b"steps"))
    return Preview(cursor, index, step, steps, fields[b"image"])
