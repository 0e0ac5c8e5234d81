"""A quiet tenant on each surface: alone, alongside a noisy tenant, and alongside the same CPU load.

That CPU load (cpu_load.py) doesn't come from requests, so it shows how much of the effect is caused
by sharing this machine's cores. The limit is in comparison.py. There is no limit for the
measurement of all surfaces at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from bench.bad_neighbor.bad import TIDY_LIMIT_S, BadOrder, BadReport
from bench.bad_neighbor.comparison import Beside, cells, outcome_of, shown
from bench.bad_neighbor.cpu_load import (
    CpuDrive,
    Load,
    burning,
    cores_of,
    cpu_times,
    load_between,
)
from bench.bad_neighbor.ordered import ordered
from bench.bad_neighbor.quiet import (
    SURFACES,
    Noticed,
    Quiet,
    Surface,
    notice,
    quiet_tenant,
)
from bench.bad_neighbor.world import await_idle, serving
from bench.report import Outcome
from infra.local.stack import Stack

SECONDS, ROUNDS = 20.0, 3
QUICK_SECONDS, QUICK_ROUNDS = 4.0, 2
LEAD_S = 1.5
"""How much earlier than the quiet tenant the noisy tenant or the same CPU load starts."""
RECEIVERS, QUICK_RECEIVERS = 200, 40
STREAMS = 100
WARM_UP_S = 4.0
PROCESS_LIMIT_S = 180.0
"""Time limit for the noisy tenant's process to start, and to report, on a busy machine."""
CLIENT = "client"
"""The part of the CPU load that comes from the noisy tenant's own process."""


def run(*, quick: bool = False) -> Outcome:
    """Measures each surface, then all of them at once. Takes about half an hour.

    With `quick`, it takes six minutes and skips the measurement of all surfaces at once.
    """
    seconds, rounds = (QUICK_SECONDS, QUICK_ROUNDS) if quick else (SECONDS, ROUNDS)
    receivers = QUICK_RECEIVERS if quick else RECEIVERS
    drives = [[surface] for surface in SURFACES] + ([] if quick else [list(SURFACES)])
    with serving() as stack:
        lines = asyncio.run(measure(stack, drives, seconds, rounds, receivers=receivers))
    print(shown(lines), flush=True)
    outcome = outcome_of(lines)
    outcome.details |= {"seconds": seconds, "rounds": rounds, "receivers": receivers}
    return outcome


async def measure(
    stack: Stack,
    drives: Sequence[Sequence[Surface]],
    seconds: float,
    rounds: int,
    *,
    receivers: int = RECEIVERS,
    streams: int = STREAMS,
    burns: bool = True,
) -> list[Beside]:
    """Measures surfaces one after another, or several at once.

    Args:
        drives: the surfaces to measure, where each entry contains the ones to measure together.
        seconds: how long the quiet tenant sends requests in each drive.
        burns: False to skip the drives with the same CPU load, which are needed only for the
            verdict.
    """
    results: list[Beside] = []
    async with quiet_tenant(stack.api_url) as quiet:
        await notice(
            quiet, list({surface for together in drives for surface in together}), WARM_UP_S
        )
        for together in drives:
            names = [surface.name for surface in together]
            order = BadOrder(stack.api_url, names, seconds + LEAD_S, receivers, streams)
            lines = {name: Beside(name, len(names) > 1) for name in names}
            for _ in range(rounds):
                load = await _round(stack, quiet, together, order, lines)
                if burns:
                    await _same_cpu(stack, quiet, together, order, lines, load)
            results += lines.values()
            for line in lines.values():
                print(f"  {' '.join(cells(line))}", flush=True)
    return results


async def _round(
    stack: Stack,
    quiet: Quiet,
    surfaces: Sequence[Surface],
    order: BadOrder,
    lines: dict[str, Beside],
) -> Load:
    """Measures the quiet tenant alone and alongside the noisy one.

    Returns the CPU load that the noisy tenant added.
    """
    seconds = order.seconds - LEAD_S
    leaders = {name: process.pid for name, process in stack.processes.items()}
    async with ordered(["bench.bad_neighbor.bad"], order, PROCESS_LIMIT_S) as bad:
        leaders[CLIENT] = bad.pid
        await asyncio.to_thread(await_idle, stack)
        alone, alone_drive = await noticed_with_load(quiet, surfaces, seconds, leaders)
        bad.begin()
        await asyncio.sleep(LEAD_S)
        beside, beside_drive = await noticed_with_load(quiet, surfaces, seconds, leaders)
        limit_s = order.seconds + TIDY_LIMIT_S + PROCESS_LIMIT_S
        report = await bad.report(BadReport, limit_s)
    await quiet.tidy()
    load = load_between(alone_drive, beside_drive)
    for name, line in lines.items():
        line.alone.add(alone[name])
        line.beside.add(beside[name])
        line.cores.append(cores_of(load))
        line.add(report)
    return load


async def _same_cpu(
    stack: Stack,
    quiet: Quiet,
    surfaces: Sequence[Surface],
    order: BadOrder,
    lines: dict[str, Beside],
    load: Load,
) -> None:
    await asyncio.to_thread(await_idle, stack)
    async with burning(load, order.seconds, [CLIENT]) as burned:
        await asyncio.sleep(LEAD_S)
        same_cpu = await notice(quiet, surfaces, order.seconds - LEAD_S)
    await quiet.tidy()
    for name, line in lines.items():
        line.same_cpu.add(same_cpu[name])
        line.burned_cores += burned


async def noticed_with_load(
    quiet: Quiet, surfaces: Sequence[Surface], seconds: float, leaders: dict[str, int]
) -> tuple[dict[str, Noticed], CpuDrive]:
    began_s, before = time.monotonic(), cpu_times(leaders)
    noticed = await notice(quiet, surfaces, seconds)
    after = cpu_times(leaders)
    return noticed, CpuDrive(time.monotonic() - began_s, before, after)
