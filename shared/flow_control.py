"""How many jobs a worker holds, so that its model never waits for the broker.

The rule alone, which workers run (workers/worker.py), and with them the simulation
and the deployment plan.

Two batches for each process, one that runs and one that waits, are enough for a broker that is
near. The permit of a job that ends is used again only after its reply and its ack have traveled to
the broker, and the next job from there. So a worker also holds what its model computes in that
time: its rate times the round trip, the bandwidth-delay product of a network path.

It is bounded: when a worker dies, what it held waits for its leases to end, and is computed again.
"""

from __future__ import annotations

import math

MAX_AHEAD_S = 1.0
"""At most the work of this time is held beyond two batches."""
MAX_AHEAD_MESSAGES = 8192
FADE_S = 60.0
"""Of what was held earlier, a third counts after this time, so that less is held only slowly."""
ACK_LINGER_S = 0.02
"""The time that acks of jobs wait to be sent together.

No caller waits for them, and a lone ack costs as much as a publish.
"""


def held_messages(max_items: int, processes: int, *, in_steps: bool) -> int:
    """Returns how many jobs a worker holds near its broker: for each process two batches.

    One runs, and one waits. At a distance it holds more (`HeldAhead`).

    A generation may run for minutes. So if a tenant has filled both, there is room for jobs of
    others, which then get slots (workers/scheduling/priority_queue.py).

    Args:
        max_items: of a batch.
        processes: of the worker.
        in_steps: whether the model batches continuously.
    """
    return processes * (2 * max_items + (-(-max_items // 2) if in_steps else 0))


def refill_s(round_trip_s: float) -> float:
    """Returns the time from the end of a job to the next one in its place.

    The reply is confirmed, then the ack travels, and then the next job.

    Args:
        round_trip_s: to the broker and back.
    """
    return 2 * round_trip_s + ACK_LINGER_S


def messages_ahead(jobs_per_s: float, gap_s: float, batch_s: float) -> int:
    """Returns the jobs that a worker holds beyond two batches.

    Half of the batch that waits covers half of its time.

    Args:
        jobs_per_s: that it computes while it has work.
        gap_s: from the end of a job to the next one in its place.
        batch_s: of a batch.
    """
    ahead_s = min(max(0.0, gap_s - batch_s / 2), MAX_AHEAD_S)
    return min(math.ceil(jobs_per_s * ahead_s), MAX_AHEAD_MESSAGES)


class HeldAhead:
    """What a worker holds of one subscription beyond two batches. Grows at once, shrinks slowly.

    Measured times go up and down, and each change of what is held ends streams or consumers.
    """

    def __init__(self) -> None:
        self._ahead = 0.0
        self._measured_at_s = 0.0

    def batch_ended(self, jobs_per_s: float, took_s: float, gap_s: float, now_s: float) -> int:
        """Takes a batch into account.

        Args:
            jobs_per_s: of the subscription, that all processes compute at the rate of this batch.
            took_s: how long the batch ran.
            gap_s: from the end of a job to the next one in its place.
            now_s: monotonic seconds.

        Returns:
            the number of jobs.
        """
        fade = math.exp((self._measured_at_s - now_s) / FADE_S)
        self._ahead = max(messages_ahead(jobs_per_s, gap_s, took_s), self._ahead * fade)
        self._measured_at_s = now_s
        return math.ceil(self._ahead)
