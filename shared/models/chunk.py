"""A part of a streamed output: tokens of a text, or pieces of a custom class."""

from __future__ import annotations

import msgspec


class StreamChunk(msgspec.Struct, omit_defaults=True):
    """Consecutive units of an output: tokens or pieces.

    `first`: number of units before it. `ids`: one number per unit. A process that
    computes an item again, or continues reading, compares them with earlier ones.
    """

    first: int
    ids: list[int]
    text: str = ""

    @property
    def end(self) -> int:
        """Number of units up to and including this chunk."""
        return self.first + len(self.ids)
