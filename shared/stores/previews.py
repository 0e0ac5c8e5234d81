"""Previews of images that are being drawn, in a Redis stream for each prediction.

A reader of a prediction's events says that it watches, again and again. Workers learn of it when
they report progress, and draw nothing for predictions that nobody watches. Streams are bounded and
expire, so unlike records they have no part in a budget.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from shared.errors import Unavailable
from shared.stores.redis_client import Commands, load_script

WATCHED_S = 5
"""The time after a reader said that it watches for which previews are drawn."""
KEPT_S = 120
MAX_KEPT = 16
"""Previews of one prediction. Each has some kilobytes."""

_ADD = load_script("shared/stores/preview_add.lua")


@dataclass(frozen=True, slots=True)
class Preview:
    """An image of an item between two steps.

    `cursor` is its id in the stream. `image` is a WebP.
    """

    cursor: str
    index: int
    step: int
    steps: int
    image: bytes


class PreviewStore:
    """The previews of all predictions.

    Args:
        commands: reach Redis.
        prefix: starts every key.
    """

    def __init__(self, commands: Commands, prefix: str) -> None:
        self._commands = commands
        self._prefix = prefix

    def keys_of(self, record: str) -> tuple[str, str]:
        """The keys that belong to a record: who watches it, and its stream."""
        return f"{self._prefix}watched:{record}", f"{self._prefix}previews:{record}"

    async def watch(self, record: str) -> None:
        """Has previews drawn for the next seconds.

        Raises:
            Unavailable: Redis did not answer.
        """
        watched, _ = self.keys_of(record)
        await self._commands.run("SET", watched, 1, "EX", WATCHED_S)

    async def after(self, record: str, cursor: str) -> list[Preview]:
        """The previews after `cursor`, or all that are kept if it is empty.

        Raises:
            Unavailable: Redis did not answer.
        """
        _, stream = self.keys_of(record)
        entries = await self._commands.run("XRANGE", stream, f"({cursor}" if cursor else "-", "+")
        return [_preview(cursor.decode(), fields) for cursor, fields in entries]

    async def add(self, record: str, index: int, step: int, steps: int, image: bytes) -> None:
        """Adds a preview. Never raises: a preview may get lost."""
        _, stream = self.keys_of(record)
        keys = (f"{self._prefix}record:{record}", stream)
        with contextlib.suppress(Unavailable):
            await self._commands.run_script(_ADD, keys, MAX_KEPT, KEPT_S, index, step, steps, image)


def _preview(cursor: str, fields: dict[bytes, bytes]) -> Preview:
    index, step, steps = (int(fields[name]) for name in (b"index", b"step", b"steps"))
    return Preview(cursor, index, step, steps, fields[b"image"])
