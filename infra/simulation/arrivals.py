"""When requests arrive: streams of times, a minute at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from infra.load.trace import read_times
from infra.simulation.streams import Arrivals, Burst, Constant, StepArrivals, Trace, Wave

CHUNK_S = 10.0
"""Within so long the rate of a wave counts as constant. Steps and bursts are cut exactly."""

Times = NDArray[np.float64]


def arrival_times(
    stream: Arrivals, duration_s: float, generator: np.random.Generator
) -> Iterator[Times]:
    """The times of a stream in order, in chunks.

    Args:
        stream: what arrives.
        duration_s: of the scenario.
        generator: the source of chance.

    Raises:
        ConfigurationError: a trace can't be read.
    """
    until_s = duration_s if stream.until_s is None else min(duration_s, stream.until_s)
    if isinstance(stream, Trace):
        times = np.asarray(read_times(stream.file), dtype=np.float64) + stream.from_s
        yield times[(times >= stream.from_s) & (times < until_s)]
        return
    rate, edges_s = _rate_of(stream)
    left = 0.0
    for start_s, end_s in _chunks(stream.from_s, until_s, edges_s):
        expected = rate((start_s + end_s) / 2) * (end_s - start_s)
        if stream.spacing == "poisson":
            count = generator.poisson(expected)
            yield np.sort(generator.uniform(start_s, end_s, count))
        elif expected > 0:
            # The k-th request comes when the sum of the rate passes k.
            first = math.floor(left) + 1
            due = np.arange(first, math.floor(left + expected) + 1, dtype=np.float64)
            yield start_s + (due - left) / expected * (end_s - start_s)
            left += expected


def _rate_of(
    stream: Constant | Wave | StepArrivals | Burst,
) -> tuple[Callable[[float], float], tuple[float, ...]]:
    """The rate at a time, and the times at which it jumps."""
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
