"""Items in flight of this instance, and the slots it holds for them. Plain data without I/O."""

from __future__ import annotations

from api.limits.counters import LEASE_S, Counter, part_of
from api.limits.store import SLOTS_S, Answer, Ask, Standing


class SlotCounter(Counter):
    """A limit of items in flight. Slots that no item needs are kept for LEASE_S."""

    kind = "slots"

    def __init__(self, key: str, limit: float, unit: str, subject: str) -> None:
        super().__init__(key, limit, unit, subject)
        self.in_use = 0.0
        self._held = 0.0
        self._held_until_s = 0.0
        self._spare_since_s = 0.0

    def take(self, need: float, now_s: float) -> float | None:
        """Takes slots that this instance holds."""
        if self.in_use + need > self._held or now_s >= self._held_until_s:
            return None
        self.in_use += need
        return 0.0

    def take_alone(self, need: float, now_s: float, standing: Standing) -> float | None:
        """At most this instance's part is in use."""
        if self.in_use + need > part_of(self.limit, standing):
            self._room_at_s = now_s
            return None
        self.in_use += need
        return 0.0

    def give_back(self, amount: float, period: float, now_s: float) -> None:
        """Frees slots."""
        self.in_use -= amount
        self._spare_since_s = self.touched_s = now_s

    def ask(self, need: float, now_s: float) -> Ask:
        """Asks for all that this instance is to hold. `need` counts as in use until it is refused.

        Asks are answered in order, so the last answer says what it holds.
        """
        self.in_use += need
        extra = max(1.0, self.in_use) if need else 0.0
        return Ask(self.key, self.kind, self.limit, self.in_use, extra)

    def accept(self, ask: Ask, answer: Answer, sent_s: float, *, need: float) -> None:
        """Notes how many slots it holds: fewer than asked for if the request was refused."""
        self._note(ask, answer, sent_s)
        self._held, self._held_until_s = answer.granted, sent_s + SLOTS_S * 0.9
        self._spare_since_s = sent_s
        if answer.granted < ask.need:
            self.in_use -= need

    def abandon(self, ask: Ask, need: float) -> None:
        """What was asked for may be held or not: the next ask says how many are needed."""
        self.in_use -= need

    def is_due(self, now_s: float) -> bool:
        """Whether slots are spare, or their lifetime must be renewed."""
        if self._held > self.in_use:
            return now_s >= self._spare_since_s + LEASE_S
        return self._held > 0 and now_s >= self._held_until_s - SLOTS_S / 2

    @property
    def is_idle(self) -> bool:
        """Whether no slot is held."""
        return not self.in_use and not self._held

    def is_blocked(self, need: float, now_s: float) -> bool:
        """Whether Redis has just refused as many."""
        return super().is_blocked(self.in_use + need, now_s)
