"""Joins the acks of a channel, because the broker forgets some of many that come one by one.

A channel passes 32 settlements at a time to the leader of a quorum queue. It keeps the others, and
drops them when it is closed, though it read them before: those messages come again. That is so in
RabbitMQ 3.10.8, 4.0.5 and 4.3.6. An ack of all messages up to a number is one settlement.
"""

from __future__ import annotations

from collections.abc import Iterable


class AckRuns:
    """What was settled on one channel, whose deliveries are numbered from 1 without a gap."""

    def __init__(self) -> None:
        self._all_up_to = 0
        self._apart: set[int] = set()
        """Settled ones above that."""

    def settle(self, tag: int) -> None:
        """Says that a delivery was settled. One that was not must come again, so it ends a run."""
        self._apart.add(tag)
        while self._all_up_to + 1 in self._apart:
            self._all_up_to += 1
            self._apart.discard(self._all_up_to)

    def join(self, tags: Iterable[int]) -> list[tuple[int, bool]]:
        """The acks to send for deliveries: each its tag, and whether it is for all before it too.

        No delivery is acked that was not settled.
        """
        given = sorted(tags)
        for tag in given:
            self.settle(tag)
        in_run = [tag for tag in given if tag <= self._all_up_to]
        joined = [(in_run[-1], len(in_run) > 1)] if in_run else []
        return joined + [(tag, False) for tag in given[len(in_run) :]]
