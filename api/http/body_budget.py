"""The memory and the connections that request bodies may hold, together and by tenant."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from api.fair_room import FairRoom
from api.shares import share_of


@dataclass(slots=True)
class BodyBudget:
    """The memory and the connections for request bodies.

    Memory is held until the request is answered, a connection until its body has arrived.
    """

    largest_bytes: int
    """The limit of one body."""
    together_bytes: int
    """The limit of all bodies together. Above it only small bodies are accepted."""
    arriving: FairRoom
    """The connections whose bodies are still arriving."""
    held_bytes: int = 0
    held_of: Counter[str] = field(default_factory=Counter)
    """The same by tenant."""

    def hold(self, tenant: str, size_bytes: int) -> None:
        """Counts a piece of a body. `size_bytes` is negative when the piece is released."""
        self.held_bytes += size_bytes
        self.held_of[tenant] += size_bytes
        if not self.held_of[tenant]:
            del self.held_of[tenant]

    def is_full(self, tenant: str) -> bool:
        """Whether this tenant may send no large body now."""
        return self.held_bytes > self.together_bytes or self.held_of[tenant] > share_of(
            self.together_bytes
        )
