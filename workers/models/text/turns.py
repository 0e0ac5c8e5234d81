"""Whose prompt is read next, of the texts that are in."""

from __future__ import annotations

from collections.abc import Sequence


class Turns:
    """Owners take turns with parts of their prompts. An owner's own are read as they came.

    In order of arrival alone a short prompt would wait for all the long ones of another owner.
    """

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        """When each owner read last, counted in parts."""

    def order(self, owners: Sequence[str]) -> list[int]:
        """The places of texts in the order of their turns.

        Args:
            owners: those of the texts that are to be read, in order of arrival.
        """
        self._last = {owner: self._last.get(owner, 0) for owner in owners}
        read_before: dict[str, int] = {}
        keys = []
        for place, owner in enumerate(owners):
            rank = read_before[owner] = read_before.get(owner, -1) + 1
            keys.append((rank, self._last[owner], place))
        return [place for _, _, place in sorted(keys)]

    def took(self, owner: str) -> None:
        """Notes that a part of a prompt of this owner was read."""
        self._last[owner] = max(self._last.values(), default=0) + 1
