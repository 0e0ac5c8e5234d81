"""A scenario's request streams, and the times at which requests arrive."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from penstock_load.trace import read_times
from penstock_planning.autoscaled import ARRIVED_S
from penstock_planning.entry import Entry

Seconds = Annotated[float, Field(ge=0)]

CHUNK_S = 10.0
"""How long, in seconds, a wave's rate is treated as constant. Steps and bursts are exact."""


class _Arrivals(Entry):
    """A stream of requests. A model's streams are added together."""

    spacing: Literal["poisson", "even"] = "poisson"
    from_s: Seconds = 0.0
    until_s: Seconds | None = None
    """None means until the end of the scenario."""


class Constant(_Arrivals):
    """Arrivals at a constant rate."""

    kind: Literal["constant"] = "constant"
    per_s: float = Field(ge=0)


class Wave(_Arrivals):
    """A sine wave between two rates, with the minimum at the start. A day has 86400 s."""

    kind: Literal["wave"]
    least_per_s: float = Field(ge=0)
    most_per_s: float = Field(gt=0)
    period_s: float = Field(86400.0, gt=0)


class StepArrivals(_Arrivals):
    """One rate until a given time, and a different rate after that."""

    kind: Literal["step"]
    before_per_s: float = Field(ge=0)
    after_per_s: float = Field(ge=0)
    at_s: Seconds


class Burst(_Arrivals):
    """One rate, and a higher one for a while."""

    kind: Literal["burst"]
    base_per_s: float = Field(0.0, ge=0)
    burst_per_s: float = Field(gt=0)
    at_s: Seconds
    for_s: float = Field(gt=0)


class Trace(_Arrivals):
    """Requests at recorded times, from a `penstock load` trace; only `at_s` is used."""

    kind: Literal["trace"]
    file: Path
    """Relative to the scenario file."""


Arrivals = Annotated[Constant | Wave | StepArrivals | Burst | Trace, Field(discriminator="kind")]


Times = NDArray[np.float64]


def arrival_times(
    stream: Arrivals, duration_s: float, generator: np.random.Generator
) -> Iterator[Times]:
    """Yields the times of a stream in order, in chunks.

    Raises:
        ConfigurationError: a trace can't be read.
    """
    until_s = duration_s if stream.until_s is None else min(duration_s, stream.until_s)
    if isinstance(stream, Trace):
        times = np.asarray(read_times(stream.file), dtype=np.float64) + stream.from_s
        yield times[(times >= stream.from_s) & (times < until_s)]
        return
    rate, edges_s = _rate_of(stream)
    integral = 0.0
    for start_s, end_s in _chunks(stream.from_s, until_s, edges_s):
        expected = rate((start_s + end_s) / 2) * (end_s - start_s)
        if stream.spacing == "poisson":
            count = generator.poisson(expected)
            yield np.sort(generator.uniform(start_s, end_s, count))
        elif expected > 0:
            # The k-th request arrives when the integral of the rate reaches k.
            first = math.floor(integral) + 1
            due = np.arange(first, math.floor(integral + expected) + 1, dtype=np.float64)
            yield start_s + (due - integral) / expected * (end_s - start_s)
            integral += expected


def _rate_of(
    stream: Constant | Wave | StepArrivals | Burst,
) -> tuple[Callable[[float], float], tuple[float, ...]]:
    """Returns the rate as a function of time, and the times at which it jumps."""
    if isinstance(stream, Constant):
        per_s = stream.per_s
        return lambda at_s: per_s, ()
    if isinstance(stream, StepArrivals):
        step = stream
        return lambda at_s: step.before_per_s if at_s < step.at_s else step.after_per_s, (
            step.at_s,
        )
    if isinstance(stream, Burst):
        burst, end_s = stream, stream.at_s + stream.for_s
        return lambda at_s: burst.burst_per_s if burst.at_s <= at_s < end_s else burst.base_per_s, (
            burst.at_s,
            end_s,
        )
    middle = (stream.most_per_s + stream.least_per_s) / 2
    swing, period_s = (stream.most_per_s - stream.least_per_s) / 2, stream.period_s
    return lambda at_s: middle - swing * math.cos(2 * math.pi * at_s / period_s), ()


def _chunks(
    from_s: float, until_s: float, edges_s: tuple[float, ...]
) -> Iterator[tuple[float, float]]:
    start_s = from_s
    while start_s < until_s:
        end_s = min(start_s + CHUNK_S, until_s)
        end_s = min([end_s, *(edge_s for edge_s in edges_s if edge_s > start_s)])
        yield start_s, end_s
        start_s = end_s


def peak_per_s(streams: Sequence[Arrivals], duration_s: float) -> float:
    """Returns the highest total rate of all streams, ignoring random variation.

    A trace has no rate, so its requests are counted over the same period that the autoscaler uses.

    Raises:
        ConfigurationError: a trace can't be read.
    """
    width_s = min(ARRIVED_S if _have_a_trace(streams) else CHUNK_S, duration_s)
    edges_s = np.linspace(0.0, duration_s, max(2, round(duration_s / width_s) + 1))
    middles_s = (edges_s[:-1] + edges_s[1:]) / 2
    total = np.zeros(len(middles_s))
    for stream in streams:
        until_s = duration_s if stream.until_s is None else min(duration_s, stream.until_s)
        if isinstance(stream, Trace):
            times_s = np.asarray(read_times(stream.file), dtype=np.float64) + stream.from_s
            counts, _ = np.histogram(times_s[times_s < until_s], edges_s)
            total += counts / np.diff(edges_s)
        else:
            rate, _ = _rate_of(stream)
            is_on = (middles_s >= stream.from_s) & (middles_s < until_s)
            total += is_on * np.array([rate(at_s) for at_s in middles_s.tolist()])
    return float(total.max())


def _have_a_trace(streams: Sequence[Arrivals]) -> bool:
    return any(isinstance(stream, Trace) for stream in streams)
