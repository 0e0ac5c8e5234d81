"""Pauses between attempts: exponential backoff with full jitter."""

from __future__ import annotations

import random
from collections.abc import Iterator


def backoff(first_s: float = 0.1, longest_s: float = 10.0) -> Iterator[float]:
    """Yields the pause before each further attempt, in seconds.

    Each pause is drawn at random between zero and a bound, so that clients that failed together
    do not come back together. After a success, start over with a new iterator.

    Args:
        first_s: the bound of the first pause. It doubles with each pause.
        longest_s: the bound never exceeds this.
    """
    bound_s = min(first_s, longest_s)
    while True:
        yield random.uniform(0.0, bound_s)
        bound_s = min(2 * bound_s, longest_s)


def jittered(period_s: float) -> float:
    """Returns `period_s`, up to a tenth shorter, so that timers started together drift apart."""
    return period_s * random.uniform(0.9, 1.0)
