"""Finds the number of tokens per batch for a model on this device, by timing larger batches.

On a GPU's host, a call takes the same time regardless of size, so small models need large batches.
On a CPU, a larger batch just takes longer (decision 145).
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from workers.models.base import OutOfMemory

MIN_GAIN = 1.07
"""Minimum speedup that justifies doubling the batch size. Less may be noise."""
DEADLINE_SHARE = 1 / 20
"""Maximum duration of a batch, as a share of the model's default deadline.

An item may have to wait for two other batches.
"""
MIN_TOKENS = 256
ROOM_WHEN_FULL = 4
"""Fraction of the tokens that did not fit into device memory that two batches may use.

Half of them might fit, and a GPU has two batches in flight.
"""


class BudgetTiming(msgspec.Struct, kw_only=True):
    """One timed batch."""

    tokens: int
    tokens_per_s: float = 0.0
    """Combined rate of all model processes, or 0 if the batch did not fit into device memory."""
    batch_s: float = 0.0


Measure = Callable[[int], BudgetTiming]
"""Times batches with a given number of tokens, measured until the device has finished.

Raises:
    OutOfMemory: the device has too little memory.
"""


def find_budget(
    measure: Measure, usual_tokens: int, max_tokens: int, deadline_s: float
) -> tuple[int, list[BudgetTiming]]:
    """Returns the number of tokens that a batch should have, and all timings in order.

    Doubles the usual number for as long as doing so pays off. If the usual number already takes too
    long, continues with the largest of a half, a quarter, or an eighth of it that should be fast
    enough, so that a slow device times few batches.

    Args:
        usual_tokens: tokens in the first batch.
        deadline_s: the model's default deadline.
    """
    timings: list[BudgetTiming] = []
    limit_s = deadline_s * DEADLINE_SHARE

    def time_batch(tokens: int) -> BudgetTiming:
        try:
            timing = measure(tokens)
        except OutOfMemory:
            timing = BudgetTiming(tokens=tokens)
        timings.append(timing)
        return timing

    def is_too_large(timing: BudgetTiming) -> bool:
        return not timing.tokens_per_s or timing.batch_s > limit_s

    best = time_batch(min(usual_tokens, max_tokens))
    if is_too_large(best):
        while is_too_large(best) and best.tokens > MIN_TOKENS:
            tokens = max(MIN_TOKENS, best.tokens // 2)
            while tokens > MIN_TOKENS and best.batch_s * tokens / best.tokens > limit_s:
                tokens = max(MIN_TOKENS, tokens // 2)
            best = time_batch(tokens)
        return best.tokens, timings
    while best.tokens < max_tokens:
        larger = time_batch(min(2 * best.tokens, max_tokens))
        if not larger.tokens_per_s:
            fitting = larger.tokens // ROOM_WHEN_FULL
            return max(MIN_TOKENS, min(best.tokens, fitting)), timings
        if is_too_large(larger) or larger.tokens_per_s < MIN_GAIN * best.tokens_per_s:
            break
        best = larger
    return best.tokens, timings
