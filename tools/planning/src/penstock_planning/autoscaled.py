"""How many workers the autoscaler requests under a given load, for both plans and simulations.

Quotas and limits sized for the average load would hold back the autoscaler: it counts arrivals over
a short period, so its counts vary, and it requests even more workers while catching up after a load
step. tools/planning/tests/simulation/test_bounds.py compares the rule to simulations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from infra.kubernetes.autoscaling import ARRIVED, MAX_UTILIZATION, UTILIZATION

ARRIVED_S = float(ARRIVED.removesuffix("s"))
CHANCE = 4.0
"""How many standard deviations of arrivals within ARRIVED_S to allow for.

About one in 30,000 intervals exceeds this, or one every 31 days.
"""


def usual_workers(load: float) -> int:
    """Returns the number of workers for a constant load in Erlangs with no random variation."""
    # If a load exactly fills its workers, a rounding error must not add one more.
    return math.ceil(load / UTILIZATION * (1 - 1e-12))


def most_workers(load: float, requests_per_s: float) -> int:
    """Returns the maximum number of workers that the autoscaler requests under a constant load.

    The number n of Poisson arrivals within ARRIVED_S has a standard deviation of sqrt(n). While
    workers catch up, all of them are busy, and the trigger `work` requests busy workers /
    MAX_UTILIZATION.

    Args:
        load: offered load in Erlangs: items per second x worker seconds per item.
        requests_per_s: arrivals, each with any number of items.
    """
    if load <= 0:
        return 0
    peak_load = load * (1 + CHANCE / math.sqrt(requests_per_s * ARRIVED_S))
    return math.ceil(peak_load / UTILIZATION / MAX_UTILIZATION * (1 - 1e-12))


def gpu_nodes(workers: Iterable[int], buffer: int, share: int) -> int:
    """Returns the number of nodes for a class's workers, including warm places.

    `share` workers share a GPU.
    """
    return math.ceil((sum(workers) + buffer) / share)
