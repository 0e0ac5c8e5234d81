"""A synthetic day: a wave with a noon rush and bursts, split among tenants and models.

Shares are exact to the request: counts are rounded by the largest remainder method, and only the
order is random. Within a time slot, requests arrive at random, like a Poisson process with a known
number of events.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock_load.trace import Arrival
from shared.errors import BadInput

DAY_S = 86_400.0
SLOT_S = 300.0
"""Number of seconds over which the rate is assumed to be constant."""
SLOTS = int(DAY_S / SLOT_S)
RUSH_FROM_S, RUSH_FOR_S = 43_200.0, 7_200.0
"""The rush in the simulator's `day` scenario."""
BURST_FOR_S = 120.0

Mix = Sequence[tuple[float, int, int]]
"""Shares of the requests, each with its minimum and maximum value."""
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NUMBERS = {
    "zipf": 10,
    "swing": 1,
    "rush_share": 1,
    "bursts": 10_000,
    "burst_share": 1,
    "repeat_share": 1,
    "cancel_share": 1,
    "cancel_within_s": 86_400,
    "batch_share": 1,
}
"""Upper bounds for the numbers that define a day. The lower bound is 0."""


@dataclass(frozen=True, kw_only=True)
class DayModel:
    """A model used in the day.

    Args:
        share: the model's share of the requests, relative to the other models' shares.
        items: number of items per request.
    """

    share: float
    sizes: Mix
    items: Mix = ((1.0, 1, 1),)


@dataclass(frozen=True, kw_only=True)
class Day:
    """The numbers that define a day.

    Args:
        requests: total requests in the day, 1.4 million in the `day` scenario of
            docs/explanation/simulation.md.
        tenants: number of tenants. The k-th tenant has a share of 1 / k ** zipf.
        seed: seed for all random numbers.
        zipf: how unequal the tenants are. 0 makes all tenants equal.
        swing: amplitude of the wave. 0.6 means 0.4 to 1.6 times the mean, lowest at midnight.
        rush_share: share of requests in the noon rush.
        bursts: number of bursts. Each one comes from one tenant.
        burst_share: share of requests in all bursts.
        repeat_share: share of requests that repeat an earlier one from the same tenant and model.
        cancel_share: share of requests whose caller disconnects.
        cancel_within_s: maximum time that these callers wait before disconnecting.
        batch_share: share of requests at `batch` priority.
    """

    requests: int
    tenants: Sequence[str]
    models: Mapping[str, DayModel]
    seed: int = 0
    zipf: float = 1.0
    swing: float = 0.6
    rush_share: float = 0.15
    bursts: int = 6
    burst_share: float = 0.03
    repeat_share: float = 0.4
    cancel_share: float = 0.005
    cancel_within_s: float = 0.5
    batch_share: float = 0.05

    def __post_init__(self) -> None:
        for name, maximum in NUMBERS.items():
            if not 0 <= getattr(self, name) <= maximum:
                value = getattr(self, name)
                raise BadInput(f"{name} must be from 0 to {maximum}, got {value}", field=name)
        if self.rush_share + self.burst_share > 1:
            raise BadInput(
                "burst_share must leave room for rush_share: their sum must be at most 1",
                field="burst_share",
            )
        if self.requests < 1 or not self.tenants or not self.models:
            raise BadInput(
                "requests: a simulated day must have requests, tenants and models", field="requests"
            )

    def slots(self) -> Ints:
        """The number of requests in each slot, excluding bursts."""
        edges_s = np.linspace(0.0, DAY_S, SLOTS + 1)
        turns = edges_s / DAY_S
        waved = turns - self.swing * np.sin(2 * math.pi * turns) / (2 * math.pi)
        rushed = np.clip((edges_s - RUSH_FROM_S) / RUSH_FOR_S, 0.0, 1.0)
        steady = self.requests - self.in_bursts
        rush = round(self.rush_share * self.requests)
        # Cumulative sums are rounded instead of individual slots, so no hour is off by more than
        # one.
        due = np.round((steady - rush) * waved + rush * rushed).astype(np.int64)
        return np.diff(due)

    @property
    def in_bursts(self) -> int:
        return round(self.burst_share * self.requests) if self.bursts else 0

    def tenant_shares(self) -> list[float]:
        """Returns each tenant's share, by index."""
        weights = [1 / place**self.zipf for place in range(1, len(self.tenants) + 1)]
        return [weight / sum(weights) for weight in weights]


def arrivals_of(day: Day) -> list[Arrival]:
    """Returns a day's requests in order. The same day produces the same requests."""
    chance = np.random.default_rng(day.seed)
    tenants = _shuffle(chance, _apportion(day.requests, day.tenant_shares()))
    at_s = _times(day, chance)
    order = np.argsort(at_s, kind="stable")
    at_s, tenants = at_s[order], _bursting(day, chance, tenants)[order]
    models = _shuffle(
        chance, _apportion(day.requests, [model.share for model in day.models.values()])
    )
    sizes = _of_models(chance, models, [model.sizes for model in day.models.values()])
    items = _of_models(chance, models, [model.items for model in day.models.values()])
    cancels = _mark(chance, day.requests, day.cancel_share)
    priorities = _mark(chance, day.requests, day.batch_share)
    cancel_after_s = chance.uniform(0.0, day.cancel_within_s, day.requests).round(3)
    names, groups = list(day.models), _Groups(day)
    arrivals = []
    for number in range(day.requests):
        tenant, model = int(tenants[number]), int(models[number])
        shape = groups.of(number, (tenant, model), (int(sizes[number]), int(items[number])))
        group, (size, count) = shape
        arrivals.append(
            Arrival(
                at_s=round(float(at_s[number]), 6),
                tenant=day.tenants[tenant],
                model=names[model],
                size=size,
                group=group,
                items=count,
                cancel_after_s=float(cancel_after_s[number]) if cancels[number] else None,
                priority="batch" if priorities[number] else "",
            )
        )
    return arrivals


class _Groups:
    """Decides which requests repeat an earlier one from the same tenant and model."""

    def __init__(self, day: Day) -> None:
        self._random = random.Random(day.seed)
        self._left, self._to_come = round(day.repeat_share * day.requests), day.requests
        self._known: dict[tuple[int, int], list[tuple[str, tuple[int, int]]]] = {}

    def of(
        self, number: int, owner: tuple[int, int], shape: tuple[int, int]
    ) -> tuple[str, tuple[int, int]]:
        """Returns the next request's group, and the size and items of the group's first request."""
        known = self._known.setdefault(owner, [])
        # One-pass sampling (Knuth, volume 2, algorithm S). A request with nothing to repeat yet
        # leaves its turn to a later request.
        is_repeat = self._random.random() * self._to_come < self._left
        self._to_come -= 1
        if is_repeat and known:
            self._left -= 1
            # Older inputs are requested more often than newer ones.
            return known[int(len(known) * self._random.random() ** 2)]
        known.append((str(number), shape))
        return known[-1]


def _times(day: Day, chance: np.random.Generator) -> Floats:
    """Returns the times of all requests. Those in bursts come last, in the order of the bursts."""
    counts = day.slots()
    starts_s = np.repeat(np.arange(SLOTS) * SLOT_S, counts)
    steady_s = starts_s + chance.uniform(0.0, SLOT_S, len(starts_s))
    begin_s = np.sort(chance.uniform(0.0, DAY_S - BURST_FOR_S, max(day.bursts, 1)))
    of_burst = _apportion(day.in_bursts, [1.0] * len(begin_s))
    burst_s = begin_s[of_burst] + chance.uniform(0.0, BURST_FOR_S, day.in_bursts)
    return np.concatenate([steady_s, burst_s])


def _bursting(day: Day, chance: np.random.Generator, tenants: Ints) -> Ints:
    """Returns the tenants of all requests. Those in bursts come last and are adjacent.

    Each burst therefore comes mostly from one tenant, and no tenant exceeds its share.
    """
    by_tenant = np.argsort(tenants, kind="stable")
    start = int(chance.integers(0, len(tenants)))
    in_burst = np.roll(by_tenant, -start)[: day.in_bursts]
    return np.concatenate([np.delete(tenants, in_burst), tenants[in_burst]])


def _of_models(chance: np.random.Generator, models: Ints, mixes: Sequence[Mix]) -> Ints:
    """Returns a number for each request, drawn from its model's mix."""
    numbers = np.zeros(len(models), dtype=np.int64)
    for place, mix in enumerate(mixes):
        of_model = np.flatnonzero(models == place)
        numbers[of_model] = _draw(chance, len(of_model), mix)
    return numbers


def _draw(chance: np.random.Generator, count: int, mix: Mix) -> Ints:
    """Draws numbers between bounds. Each pair of bounds has a share."""
    kinds = _shuffle(chance, _apportion(count, [share for share, _, _ in mix]))
    low, high = (np.asarray([bounds[place] for bounds in mix]) for place in (1, 2))
    return chance.integers(low[kinds], high[kinds] + 1)


def _mark(chance: np.random.Generator, count: int, share: float) -> NDArray[np.bool_]:
    marks = np.zeros(count, dtype=np.bool_)
    marks[: round(share * count)] = True
    chance.shuffle(marks)
    return marks


def _shuffle(chance: np.random.Generator, values: Ints) -> Ints:
    chance.shuffle(values)
    return values


def _apportion(count: int, shares: Sequence[float]) -> Ints:
    """Returns `count` indexes from 0 to len(shares) - 1, each as often as its share requires.

    Rounds by the largest remainder method, so the counts add up and each is off by less than one.
    """
    exact = np.asarray(shares, dtype=np.float64) / sum(shares) * count
    counts = np.floor(exact).astype(np.int64)
    largest = np.argsort(-(exact - counts), kind="stable")
    counts[largest[: count - int(counts.sum())]] += 1
    return np.repeat(np.arange(len(counts)), counts)
