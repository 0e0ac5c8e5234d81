"""The loads for every contender: requests in flight or rate, texts, seconds, and repetitions."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.load.texts import Texts

SEND_S = {1: 2.0, 8: 2.0, 32: 3.0, 128: 5.0, 512: 2.0}
"""How long to keep sending new requests, by requests in flight. After that, it waits for the open
requests.

All 512 requests are sent at once, and the slower peers take another 20 s to respond to them.
"""
OTHER_SEND_S = 3.0
ONCE = (8, 512)
"""Measured only in the first round, like the open loop, because these loads show a trend and take a
long time.
"""
REPEATS_AT = 32
OPEN_SEND_S = 4.0
OPEN_CONNECTIONS = 1024
MAX_PER_S = 1200
"""Number of texts generated per second of sending. No contender handles more than this."""
BLOCK = 20
"""Every sequence of this many texts has exactly bench.load.texts.MIX, so fast and slow contenders
get the same mix.
"""


@dataclass(frozen=True)
class Load:
    """One load. `repeats` is the fraction of requests whose texts have been sent before.

    The loop is open if `rate_per_s` is above 0.
    """

    in_flight: int
    repeats: float = 0.0
    rate_per_s: float = 0.0

    @property
    def name(self) -> str:
        if self.rate_per_s:
            return f"{self.rate_per_s:g}/s, open loop"
        repeats = f", {100 * self.repeats:.0f} % repeats" if self.repeats else ""
        return f"{self.in_flight} in flight{repeats}"

    @property
    def send_s(self) -> float:
        """How long to keep sending new requests, in seconds."""
        return OPEN_SEND_S if self.rate_per_s else SEND_S.get(self.in_flight, OTHER_SEND_S)

    def is_in(self, round_number: int) -> bool:
        """Returns whether the load is measured in this round (counted from 0)."""
        return round_number == 0 or not (self.rate_per_s or self.in_flight in ONCE)

    def texts(self, source: Texts, seed: int) -> list[str]:
        """Returns new texts on each call, enough for the fastest contender."""
        count = self.in_flight + int(self.send_s * (self.rate_per_s * 2 or MAX_PER_S))
        fresh = (text for _ in range(count) for text in source.mixed(BLOCK))
        return list(_with_repeats(fresh, count, self.repeats, random.Random(seed)))


def plan(in_flight: Sequence[int], repeats: Sequence[float], rate_per_s: float) -> list[Load]:
    """Returns the loads in order.

    Those with repeats have the number of requests in flight closest to 32.
    """
    loads = [Load(number) for number in in_flight if 0 in repeats]
    nearest = min(in_flight, key=lambda number: abs(number - REPEATS_AT))
    loads += [Load(nearest, share) for share in repeats if share]
    return loads + [Load(OPEN_CONNECTIONS, rate_per_s=rate_per_s)] * bool(rate_per_s)


def _with_repeats(
    fresh: Iterator[str], count: int, share: float, draw: random.Random
) -> Iterator[str]:
    """Returns `count` texts, a `share` of which repeat earlier ones, all with equal probability."""
    seen: list[str] = []
    for _ in range(count):
        if seen and draw.random() < share:
            yield draw.choice(seen)
        else:
            seen.append(next(fresh))
            yield seen[-1]
