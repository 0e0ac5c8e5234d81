"""How many workers the autoscaler asks for under a load: one rule for plans and simulations.

Quotas and bounds that are sized to the usual number cut the autoscaler off: it counts arrivals over
a short time, in which chance brings more, and asks for more still while it catches up after a step.
tools/planning/tests/simulation/test_bounds.py compares the rule with simulations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from infra.kubernetes.autoscaling import ARRIVED, MAX_UTILIZATION, UTILIZATION

ARRIVED_S = float(ARRIVED.removesuffix("s"))
CHANCE = 4.0
"""Standard deviations of what arrives in ARRIVED_S. One in 30,000 such times is beyond: 31 days."""


def usual_workers(load: float) -> int:
    """The workers at a constant load in Erlangs, without chance."""
    # A load that fills its workers exactly must not need one more because of the last bit.
    return math.ceil(load / UTILIZATION * (1 - 1e-12))


def most_workers(load: float, requests_per_s: float) -> int:
    """The most workers that the autoscaler asks for while a load lasts.

    Of Poisson arrivals, n in ARRIVED_S have a standard deviation of sqrt(n). While workers catch up
    all of them are busy, and the trigger `work` asks for busy workers / MAX_UTILIZATION.

    Args:
        load: offered load in Erlangs: items per second x seconds of one worker that each takes.
        requests_per_s: arrivals, of any number of items each.
    """
    if load <= 0:
        return 0
    counted = load * (1 + CHANCE / math.sqrt(requests_per_s * ARRIVED_S))
    return math.ceil(counted / UTILIZATION / MAX_UTILIZATION * (1 - 1e-12))


def gpu_nodes(workers: Iterable[int], buffer: int, share: int) -> int:
    """Nodes for the workers of a class, with the places kept warm, `share` to a GPU."""
    return math.ceil((sum(workers) + buffer) / share)
