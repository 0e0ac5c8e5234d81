"""A quiet tenant on each surface: alone, alongside a noisy tenant, and alongside the same CPU load.

That CPU load (cpu_load.py) doesn't come from requests, so it shows how much of the effect is caused
by sharing this machine's cores. The limit is in comparison.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from bench.bad_neighbor.bad import TIDY_LIMIT_S, BadOrder, BadReport, do_worst
from bench.bad_neighbor.comparison import Beside, cells, outcome_of, shown
from bench.bad_neighbor.cpu_load import (
    CpuDrive,
    Load,
    burning,
    cores_of,
    cpu_times,
    load_between,
)
from bench.bad_neighbor.quiet import (
    SURFACES,
    Noticed,
    Quiet,
    Surface,
    notice,
    quiet_tenant,
)
from bench.bad_neighbor.world import await_idle, serving
from bench.child_process import ChildProcess
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
    """Measures each surface. Takes about half an hour, or six minutes with `quick`."""
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
    burns: bool = True,
) -> list[Beside]:
    """Measures surfaces one after another.

    Args:
        seconds: how long the quiet tenant sends requests in each drive.
        burns: False to skip the drives with the same CPU load, which are needed only for the
            verdict.
    """
    lines: list[Beside] = []
    async with quiet_tenant(stack.api_url) as quiet:
        await asyncio.gather(*(notice(quiet, surface, WARM_UP_S) for surface in surfaces))
        for surface in surfaces:
            order = BadOrder(stack.api_url, surface.name, seconds + LEAD_S, receivers, STREAMS)
            line = Beside(surface.name)
            for _ in range(rounds):
                load = await _round(stack, quiet, surface, order, line)
                if burns:
                    await _same_cpu(stack, quiet, surface, order, line, load)
            lines.append(line)
            print(f"  {' '.join(cells(line))}", flush=True)
    return lines


async def _round(
    stack: Stack, quiet: Quiet, surface: Surface, order: BadOrder, line: Beside
) -> Load:
    """Measures the quiet tenant alone and alongside the noisy one.

    Returns the CPU load that the noisy tenant added.
    """
    seconds = order.seconds - LEAD_S
    leaders = {name: process.pid for name, process in stack.processes.items()}
    with ChildProcess(do_worst, order) as bad:
        leaders[CLIENT] = bad.pid
        await bad.receive(PROCESS_LIMIT_S)
        await asyncio.to_thread(await_idle, stack)
        alone, alone_drive = await notice_with_load(quiet, surface, seconds, leaders)
        bad.send()
        await asyncio.sleep(LEAD_S)
        beside, beside_drive = await notice_with_load(quiet, surface, seconds, leaders)
        limit_s = order.seconds + TIDY_LIMIT_S + PROCESS_LIMIT_S
        report: BadReport = await bad.receive(limit_s)
    await quiet.tidy()
    load = load_between(alone_drive, beside_drive)
    line.alone.add(alone)
    line.beside.add(beside)
    line.cores.append(cores_of(load))
    line.add(report)
    return load


async def _same_cpu(
    stack: Stack, quiet: Quiet, surface: Surface, order: BadOrder, line: Beside, load: Load
) -> None:
    await asyncio.to_thread(await_idle, stack)
    async with burning(load, order.seconds, [CLIENT]) as burned:
        await asyncio.sleep(LEAD_S)
        line.same_cpu.add(await notice(quiet, surface, order.seconds - LEAD_S))
    await quiet.tidy()
    line.burned_cores += burned


async def notice_with_load(
    quiet: Quiet, surface: Surface, seconds: float, leaders: dict[str, int]
) -> tuple[Noticed, CpuDrive]:
    began_s, before = time.monotonic(), cpu_times(leaders)
    noticed = await notice(quiet, surface, seconds)
    after = cpu_times(leaders)
    return noticed, CpuDrive(time.monotonic() - began_s, before, after)
