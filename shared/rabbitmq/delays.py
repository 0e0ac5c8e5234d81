"""Queues in which messages wait before they are delivered again."""

from __future__ import annotations


def delays_between(first_s: float, longest_s: float) -> tuple[float, ...]:
    """The pauses before a message's second, third … delivery: doubling, at most `longest_s`."""
    delays = [first_s]
    while delays[-1] < longest_s:
        delays.append(min(longest_s, 2 * delays[-1]))
    return tuple(delays)


def delay_queue(queue: str, delay_s: float) -> str:
    """The queue whose messages return to `queue` after `delay_s` seconds."""
    return f"{queue}.delay.{round(delay_s * 1000)}ms"
