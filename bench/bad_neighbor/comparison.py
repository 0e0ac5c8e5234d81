"""The noisy tenant's effect on a quiet tenant on each surface, its limit, and a table of all.

With the noisy tenant active, the quiet tenant's p99 may be at most `RATIO * max(alone, same CPU) +
unit`:

- `alone` is the quiet tenant's p99 with no other load, and `same CPU` is its p99 alongside the same
CPU load without requests (cpu_load.py). With enough cores, these two are equal.
- `unit` is the part of the noisy tenant's work that can't be interrupted or that runs together with
the quiet tenant's work. A text, an image, a batch line, or a prediction waits for the batch that is
running and then runs in a batch that the noisy tenant fills. A generated text takes one step for
its prompt and one for each token, and each step also generates a token for every text from the
noisy tenant.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench.bad_neighbor.bad import BadReport
from bench.bad_neighbor.quiet import TOKENS, Noticed
from bench.report import Figure, Outcome, expect_none
from infra import text_table

RATIO = 2.0
WAITS_FOR_A_BATCH = frozenset({"texts", "images", "batches", "webhooks"})
WRITES_IN_STEPS = frozenset({"generations", "streams"})


@dataclass
class Beside:
    """One row of the table."""

    surface: str
    alone: Noticed = field(default_factory=Noticed)
    same_cpu: Noticed = field(default_factory=Noticed)
    """Latencies alongside the same CPU load without requests."""
    beside: Noticed = field(default_factory=Noticed)
    sent: int = 0
    """Number of requests sent by the noisy tenant."""
    refused: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    batch_ms: float = 0.0
    step_ms: float = 0.0
    cores: list[float] = field(default_factory=list)
    """Cores used by the noisy tenant in each round, including the work it caused in the stack."""
    burned_cores: list[float] = field(default_factory=list)
    """Cores used in each round by the same load without requests."""

    @property
    def ratio(self) -> float:
        """The p99 alongside the noisy tenant, divided by the p99 alone."""
        return percentile(self.beside, 99) / percentile(self.alone, 99)

    @property
    def unit_ms(self) -> float:
        """The noisy tenant's work that can't be interrupted or is computed together with ours.

        This is the batch that is running, plus the batch that contains the quiet tenant's item,
        which the noisy tenant fills.
        """
        if self.surface in WAITS_FOR_A_BATCH:
            return 2 * self.batch_ms
        return (1 + TOKENS) * self.step_ms if self.surface in WRITES_IN_STEPS else 0.0

    @property
    def limit_ms(self) -> float:
        """Maximum p99 alongside the noisy tenant."""
        return RATIO * _slower(self.alone, self.same_cpu) + self.unit_ms

    @property
    def verdict(self) -> str:
        """The p99 as a fraction of its limit."""
        beside_ms = percentile(self.beside, 99)
        if beside_ms <= RATIO * percentile(self.alone, 99):
            return f"{RATIO:g} x alone"
        if beside_ms <= RATIO * _slower(self.alone, self.same_cpu):
            return f"{RATIO:g} x same CPU"
        return "stated bound" if beside_ms <= self.limit_ms else "MISSED"

    @property
    def quiet_refused(self) -> int:
        """The quiet tenant's requests that did not get the expected response."""
        return sum(drive.refused.total() for drive in self._drives)

    @property
    def lost(self) -> int:
        """The quiet tenant's requests that have neither a response time nor a rejection."""
        return sum(
            drive.sent - len(drive.took_ms) - drive.refused.total() for drive in self._drives
        )

    @property
    def _drives(self) -> tuple[Noticed, Noticed, Noticed]:
        return self.alone, self.same_cpu, self.beside

    def add(self, report: BadReport) -> None:
        self.sent += report.sent
        self.refused += report.refused
        self.statuses += Counter(report.statuses)
        self.reasons += Counter(report.reasons)
        self.batch_ms = max(self.batch_ms, report.batch_ms)
        self.step_ms = max(self.step_ms, report.step_ms)


def percentile(noticed: Noticed, which: float) -> float:
    """Returns the `which` percentile, in ms. NaN if there were no responses."""
    if not noticed.took_ms:
        return math.nan
    return float(np.percentile(noticed.took_ms, which, method="inverted_cdf"))


def _slower(one: Noticed, other: Noticed) -> float:
    """Returns the higher of two p99 values, in ms."""
    return float(np.fmax(percentile(one, 99), percentile(other, 99)))


HEADS = (
    "surface",
    "requests",
    "alone p50, ms",
    "p99",
    "same CPU p99",
    "beside p50",
    "p99",
    "ratio",
    "at most",
    "met by",
    "refused of quiet",
    "cores of bad",
    "sent by bad",
    "refused of bad",
)


def shown(lines: Iterable[Beside]) -> str:
    return text_table.table(HEADS, [cells(line) for line in lines])


def cells(line: Beside) -> tuple[str, ...]:
    times_ms = [
        percentile(line.alone, 50),
        percentile(line.alone, 99),
        percentile(line.same_cpu, 99),
        percentile(line.beside, 50),
        percentile(line.beside, 99),
    ]
    return (
        line.surface,
        str(line.beside.sent),
        *(f"{value_ms:,.0f}" for value_ms in times_ms),
        f"{line.ratio:.2f}",
        f"{line.limit_ms:,.0f}",
        line.verdict,
        str(line.quiet_refused),
        f"{np.mean(line.cores):.2f}" if line.cores else "",
        str(line.sent),
        str(line.refused),
    )


def outcome_of(lines: Sequence[Beside]) -> Outcome:
    """Returns the measurement's results for storage.

    The measurement fails if any of the quiet tenant's requests was rejected or not counted.
    """
    refused, lost = sum(line.quiet_refused for line in lines), sum(line.lost for line in lines)
    failure = ""
    if refused or lost:
        failure = f"{refused} requests of the quiet tenant were refused, {lost} were not counted"
    return Outcome(
        [figure for line in lines for figure in _figures(line)],
        {
            "lines": [_details(line) for line in lines],
            "load_after": round(os.getloadavg()[0], 2),
        },
        failure,
    )


def _figures(line: Beside) -> list[Figure]:
    label, drives = line.surface, (line.alone, line.same_cpu, line.beside)
    alone_ms, same_cpu_ms, beside_ms = (percentile(drive, 99) for drive in drives)
    return [
        Figure(f"{label}: quiet alone, p99", alone_ms, "ms"),
        Figure(f"{label}: beside the same CPU load, p99", same_cpu_ms, "ms"),
        Figure(f"{label}: beside the bad one, p99", beside_ms, "ms", "<=", line.limit_ms),
        Figure(f"{label}: the third over the first", line.ratio, "x"),
        expect_none(f"{label}: refused of the quiet one", line.quiet_refused),
    ]


def _details(line: Beside) -> dict[str, Any]:
    return {
        "surface": line.surface,
        "met_by": line.verdict,
        "alone_ms": [round(value_ms, 1) for value_ms in line.alone.took_ms],
        "same_cpu_ms": [round(value_ms, 1) for value_ms in line.same_cpu.took_ms],
        "beside_ms": [round(value_ms, 1) for value_ms in line.beside.took_ms],
        "refused": dict(line.alone.refused + line.same_cpu.refused + line.beside.refused),
        "bad": {str(status): count for status, count in sorted(line.statuses.items())},
        "refused_of_bad": dict(line.reasons),
        "batch_of_bad_ms": round(line.batch_ms, 1),
        "step_of_bad_ms": round(line.step_ms, 2),
        "cores_of_bad": [round(value, 2) for value in line.cores],
        "burned_cores": [round(value, 2) for value in line.burned_cores],
    }
