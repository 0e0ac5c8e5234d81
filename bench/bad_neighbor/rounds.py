"""Each surface in rounds: the quiet tenant alone, then beside the bad one. At the end all at once.

What is in progress can't be interrupted, so beside a bad tenant a text or an image may wait for one
batch of it more than twice its time alone. That is the stated bound of the surfaces that compute in
batches. All surfaces at once have none: what they share is the CPU of one machine.
"""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from bench.bad_neighbor.bad import TIDY_LIMIT_S, BadOrder, BadReport
from bench.bad_neighbor.quiet import (
    LIMIT_S,
    SURFACES,
    Noticed,
    Quiet,
    Surface,
    notice,
    quiet_tenant,
)
from bench.bad_neighbor.world import await_idle, serving
from bench.report import Figure, Outcome
from infra import text_table
from infra.local.stack import Stack

SECONDS, ROUNDS = 20.0, 3
QUICK_SECONDS, QUICK_ROUNDS = 5.0, 2
LEAD_S = 3.0
"""The bad tenant begins so much earlier."""
RECEIVERS, QUICK_RECEIVERS = 200, 40
STREAMS = 100
WARM_UP_S = 4.0
RATIO = 2.0
WAITS_FOR_A_BATCH = frozenset({"texts", "images", "batches", "webhooks"})
"""Surfaces whose work is computed in batches that can't be interrupted."""
EVERYTHING = "all at once"


@dataclass
class Beside:
    """One line of the table."""

    surface: str
    is_of_all: bool = False
    """Whether both tenants were on all surfaces at once."""
    alone: Noticed = field(default_factory=Noticed)
    beside: Noticed = field(default_factory=Noticed)
    sent: int = 0
    """Requests of the bad tenant."""
    refused: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    batch_ms: float = 0.0

    @property
    def name(self) -> str:
        """How it is called in tables."""
        return f"{self.surface}, {EVERYTHING}" if self.is_of_all else self.surface

    @property
    def ratio(self) -> float:
        """The p99 beside over that alone."""
        return _percentile(self.beside, 99) / _percentile(self.alone, 99)

    @property
    def limit_ms(self) -> float:
        """The bound on the p99 beside."""
        waits_ms = self.batch_ms if self.surface in WAITS_FOR_A_BATCH else 0.0
        return RATIO * _percentile(self.alone, 99) + waits_ms

    def add(self, report: BadReport) -> None:
        """Adds what the bad tenant did in a round."""
        self.sent += report.sent
        self.refused += report.refused
        self.statuses += Counter(report.statuses)
        self.reasons += Counter(report.reasons)
        self.batch_ms = max(self.batch_ms, report.batch_ms)


def run(*, quick: bool = False) -> Outcome:
    """Measures all surfaces: for 20 minutes or so, or with `quick` for four."""
    seconds, rounds = (QUICK_SECONDS, QUICK_ROUNDS) if quick else (SECONDS, ROUNDS)
    receivers = QUICK_RECEIVERS if quick else RECEIVERS
    with serving() as stack:
        lines = asyncio.run(measure(stack, SURFACES, seconds, rounds, receivers=receivers))
    print(shown(lines), flush=True)
    outcome = outcome_of(lines)
    outcome.details |= {"seconds": seconds, "rounds": rounds, "receivers": receivers}
    return outcome


async def measure(
    stack: Stack,
    surfaces: Sequence[Surface],
    seconds: float,
    rounds: int,
    *,
    receivers: int = RECEIVERS,
    streams: int = STREAMS,
) -> list[Beside]:
    """Measures surfaces one after the other, and all of them at once if there are several.

    Args:
        stack: of `serving`.
        surfaces: which.
        seconds: how long the quiet tenant sends in each drive.
        rounds: drives alone and beside, in turn.
        receivers: of the bad tenant's webhooks.
        streams: of the bad tenant.
    """
    found: list[Beside] = []
    drives = [[one] for one in surfaces] + ([list(surfaces)] if len(surfaces) > 1 else [])
    async with quiet_tenant(stack.api_url) as quiet:
        await notice(quiet, surfaces, WARM_UP_S)
        for together in drives:
            names = [one.name for one in together]
            order = BadOrder(stack.api_url, names, seconds + LEAD_S, receivers, streams)
            lines = {name: Beside(name, len(names) > 1) for name in names}
            for _ in range(rounds):
                await _round(stack, quiet, together, order, lines)
            found += lines.values()
            for line in lines.values():
                print(f"  {' '.join(_cells(line))}", flush=True)
    return found


async def _round(
    stack: Stack,
    quiet: Quiet,
    surfaces: Sequence[Surface],
    order: BadOrder,
    lines: dict[str, Beside],
) -> None:
    await asyncio.to_thread(await_idle, stack)
    alone = await notice(quiet, surfaces, order.seconds - LEAD_S)
    async with _doing_its_worst(order) as reports:
        await asyncio.sleep(LEAD_S)
        beside = await notice(quiet, surfaces, order.seconds - LEAD_S)
    await quiet.tidy()
    for name, line in lines.items():
        line.alone.add(alone[name])
        line.beside.add(beside[name])
        line.add(reports[0])


@asynccontextmanager
async def _doing_its_worst(order: BadOrder) -> AsyncIterator[list[BadReport]]:
    """The bad tenant's process while the block runs. Afterwards the list has its report."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "bench.bad_neighbor.bad",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    reports: list[BadReport] = []
    talking = asyncio.create_task(process.communicate(msgspec.json.encode(order)))
    try:
        yield reports
        async with asyncio.timeout(order.seconds + TIDY_LIMIT_S + LIMIT_S):
            told, _ = await talking
        reports.append(msgspec.json.decode(told, type=BadReport))
    finally:
        talking.cancel()
        if process.returncode is None:
            process.kill()
            await process.wait()


def _percentile(noticed: Noticed, which: float) -> float:
    """In ms. NaN: nothing was answered."""
    return float(np.percentile(noticed.took_ms, which)) if noticed.took_ms else math.nan


HEADS = (
    "surface",
    "alone p50, ms",
    "p99",
    "beside p50, ms",
    "p99",
    "ratio",
    "at most, ms",
    "refused of quiet",
    "sent by bad",
    "refused of bad",
)


def shown(lines: Iterable[Beside]) -> str:
    """The table of what was measured."""
    return text_table.table(HEADS, [_cells(line) for line in lines])


def _cells(line: Beside) -> tuple[str, ...]:
    times = [_percentile(of, which) for of in (line.alone, line.beside) for which in (50, 99)]
    return (
        line.name,
        *(f"{one:,.0f}" for one in times),
        f"{line.ratio:.2f}",
        f"{line.limit_ms:,.0f}",
        str(_refused(line)),
        str(line.sent),
        str(line.refused),
    )


def _refused(line: Beside) -> int:
    return line.alone.refused.total() + line.beside.refused.total()


def outcome_of(lines: Sequence[Beside]) -> Outcome:
    """What is kept of the measurement. It fails if the quiet tenant was refused anywhere."""
    refused = sum(map(_refused, lines))
    failure = f"{refused} requests of the quiet tenant were refused" if refused else ""
    return Outcome(
        [figure for line in lines for figure in _figures(line)],
        {
            "lines": [_details(line) for line in lines],
            "load_after": round(os.getloadavg()[0], 2),
        },
        failure,
    )


def _figures(line: Beside) -> list[Figure]:
    alone, beside = _percentile(line.alone, 99), _percentile(line.beside, 99)
    # Eight surfaces at once on one machine share its cores: that is not the pipeline's to divide.
    bound = () if line.is_of_all else ("<=", line.limit_ms)
    return [
        Figure(f"{line.name}: quiet alone, p99", alone, "ms"),
        Figure(f"{line.name}: beside the bad one, p99", beside, "ms", *bound),
        Figure(f"{line.name}: the second over the first", line.ratio, "x"),
        Figure(f"{line.name}: refused of the quiet one", _refused(line), "", "<=", 0),
    ]


def _details(line: Beside) -> dict[str, Any]:
    return {
        "surface": line.name,
        "alone_ms": [round(one, 1) for one in line.alone.took_ms],
        "beside_ms": [round(one, 1) for one in line.beside.took_ms],
        "refused": {**line.alone.refused, **line.beside.refused},
        "bad": {str(status): count for status, count in sorted(line.statuses.items())},
        "refused_of_bad": dict(line.reasons),
        "batch_of_bad_ms": round(line.batch_ms, 1),
    }
