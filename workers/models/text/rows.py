"""Which row of the cache has the keys and values of which tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

LEAST_SHARED_TOKENS = 8
"""Copying fewer tokens costs more than reading them."""


@dataclass(eq=False, slots=True)
class TokenRow:
    """A row, and the tokens whose keys and values it has. Those of a text that left stay."""

    number: int
    ids: list[int] = field(default_factory=list)
    owner: str = ""
    """Only texts of the same owner may use its tokens. Empty: none may."""
    is_taken: bool = False
    freed: int = 0
    """Grows with each row that becomes free."""


class TokenRows:
    """All rows of a cache."""

    def __init__(self, rows: int) -> None:
        self.all = [TokenRow(number) for number in range(rows)]
        self._clock = count(1)

    def find(self, ids: Sequence[int], owner: str) -> tuple[TokenRow, TokenRow | None, int]:
        """A free row for a text that begins with `ids`.

        Returns:
            The row, the row to copy its first tokens from (None: it has them), and how many these
            are.
        """
        free = [row for row in self.all if not row.is_taken]
        assert free, "no row is free; this is a bug"
        oldest = min(free, key=lambda row: (row.freed, row.number))
        mine = [row for row in self.all if row.owner and row.owner == owner]
        shared, best = max(
            ((_common(row.ids, ids), row) for row in mine),
            key=lambda pair: (pair[0], not pair[1].is_taken, -pair[1].number),
            default=(0, oldest),
        )
        if shared < LEAST_SHARED_TOKENS:
            return oldest, None, 0
        # A row that is much longer may serve others again, so it is copied.
        if not best.is_taken and (best is oldest or len(best.ids) <= 2 * shared):
            return best, None, shared
        target = oldest if oldest is not best else best
        return target, (None if target is best else best), shared

    def take(self, row: TokenRow, ids: list[int], owner: str) -> None:
        """Gives a free row to a text whose first tokens it has."""
        row.ids, row.owner, row.is_taken = list(ids), owner, True

    def free(self, row: TokenRow) -> None:
        """Takes a row back. It keeps its tokens until it is given away again."""
        row.is_taken = False
        row.freed = next(self._clock)

    def gather(self, rows: Sequence[TokenRow]) -> Iterator[tuple[int, int, int]]:
        """Makes `rows` the first ones. Yields exchanges of two rows: numbers, and tokens of them.

        Each exchange is to be done at once.
        """
        wanted = set(map(id, rows))
        places = [place for place in range(len(rows)) if id(self.all[place]) not in wanted]
        behind = [row for row in rows if row.number >= len(rows)]
        for place, row in zip(places, behind, strict=True):
            other, number = self.all[place], row.number
            yield place, number, max(len(other.ids), len(row.ids))
            self.all[place], self.all[number] = row, other
            row.number, other.number = place, number


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    low, high = 0, length
    while low < high:
        middle = (low + high + 1) // 2
        if one[:middle] == other[:middle]:
            low = middle
        else:
            high = middle - 1
    return low
