"""A replay's results so far: counts, rates and percentiles."""

from __future__ import annotations

from array import array
from collections import Counter
from typing import Any, NamedTuple

import numpy as np

from penstock_load.ledger import LedgerLine


class ReplayProgress(NamedTuple):
    """A snapshot of the replay.

    Rates and percentiles cover the time since the previous snapshot.
    """

    at_s: float
    """Seconds since the start."""
    trace_s: float
    """Current time in the trace."""
    due: int
    in_flight: int
    rate: float
    """Completed requests per second."""
    p50_ms: float
    """Latency of requests with a 200 response, from when they were due. 0 if there are none."""
    p99_ms: float


class Tally:
    """Counts requests when they come due and when they end."""

    def __init__(self) -> None:
        self.due = 0
        self.not_sent = 0
        """Requests not sent because too many were in flight."""
        self.by_outcome: Counter[str] = Counter()
        """200, the status with the error code, or how the request ended without a response."""
        self.tokens = 0
        self.cost_usd = 0.0
        self._waits_ms = array("d")
        self._seen, self._ended, self._last_report_s = 0, 0, 0.0

    @property
    def ended(self) -> int:
        """Number of requests that have ended in any way."""
        return self.by_outcome.total()

    def add(self, line: LedgerLine, waited_ms: float) -> None:
        """Counts a request that has ended.

        Args:
            waited_ms: time from when the request was due until it ended.
        """
        self.by_outcome[outcome_of(line)] += 1
        self.tokens += line.tokens or 0
        self.cost_usd += line.cost_usd or 0.0
        if line.status == 200 and line.ending == "answered":
            self._waits_ms.append(waited_ms)

    def look(self, at_s: float, trace_s: float, in_flight: int) -> ReplayProgress:
        """Returns the progress and starts a new interval.

        Args:
            at_s: seconds since the start.
            trace_s: current time in the trace.
        """
        waits_ms = self._waits_ms[self._seen :]
        p50_ms, p99_ms = np.percentile(waits_ms, (50, 99)) if waits_ms else (0.0, 0.0)
        rate = (self.ended - self._ended) / max(at_s - self._last_report_s, 1e-9)
        self._seen, self._ended, self._last_report_s = len(self._waits_ms), self.ended, at_s
        return ReplayProgress(
            at_s, trace_s, self.due, in_flight, rate, float(p50_ms), float(p99_ms)
        )

    def summary(self, took_s: float) -> dict[str, Any]:
        """Returns all results in human- and machine-readable form.

        Args:
            took_s: time from the first request to the last response.
        """
        p50_ms, p95_ms, p99_ms = (
            np.percentile(self._waits_ms, (50, 95, 99)) if self._waits_ms else (0.0, 0.0, 0.0)
        )
        return {
            "due": self.due,
            "not_sent": self.not_sent,
            "ended": self.ended,
            "outcomes": dict(sorted(self.by_outcome.items())),
            "took_s": round(took_s, 1),
            "rate_per_s": round(self.ended / max(took_s, 1e-9), 1),
            "p50_ms": round(float(p50_ms), 2),
            "p95_ms": round(float(p95_ms), 2),
            "p99_ms": round(float(p99_ms), 2),
            "tokens": self.tokens,
            "cost_usd": self.cost_usd,
        }


def outcome_of(line: LedgerLine) -> str:
    """Describes how a request ended, in a word or two."""
    if line.ending == "foreign":
        return f"{line.status} from a proxy"
    if line.ending != "answered":
        return line.ending
    return f"{line.status} {line.code}".rstrip()
