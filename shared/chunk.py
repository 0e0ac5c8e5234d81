"""A part of an output that is streamed: tokens of a text, or pieces of a custom class."""

from __future__ import annotations

import msgspec


class StreamChunk(msgspec.Struct, omit_defaults=True):
    """Units of an output that were written one after another: tokens or pieces.

    `first`: how many units of the item come before. `ids`: a number for each. Whoever computes an
    item again, or reads on, compares them with those before.
    """

    first: int
    ids: list[int]
    text: str = ""

    @property
    def end(self) -> int:
        """The number of units that the item has with these."""
        return self.first + len(self.ids)
