"""Room for one instance's streams, shared fairly among tenants."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from api.fair_room import FairRoom, OneItem
from shared.errors import Overloaded


class StreamRoom:
    """Room for a number of streams.

    Args:
        bound: maximum number of concurrent streams.
        noun: kind of stream, for error messages.
        advice: what a reader can do instead if there is no room.
    """

    def __init__(self, bound: int, noun: str, advice: str) -> None:
        self._room = FairRoom(bound)
        self._noun = noun
        self._advice = advice

    @contextmanager
    def reserve(self, tenant: str) -> Iterator[None]:
        """Reserves room for one of this tenant's streams.

        Raises:
            Overloaded: there is no room.
        """
        stream = OneItem(tenant)
        if self._room.turns_to_wait(stream):
            raise Overloaded(
                f"{self._room.count_held(tenant)} of your {self._noun} are open, and there is no "
                f"room for more; {self._advice}, or try again later"
            )
        self._room.take(stream)
        try:
            yield
        finally:
            self._room.release(stream)
