"""The measurement's control: the CPU load that a noisy tenant causes, but without its requests.

Both tenants share the cores with the entire stack. The pipeline can't divide up CPU time, but with
more cores a quiet tenant would not notice any of this. That is why the CPU time that each process
spends on the noisy tenant is measured. Then the same number of processes use the same CPU time, in
bursts of the same length, while the quiet tenant has the pipeline to itself.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil

from bench.child_process import ChildProcess

NICENESS = 10
MIN_CORES = 0.005
"""A process's CPU load is not reproduced if it is below this."""
MIN_BURST_S, MAX_BURST_S = 0.0001, 0.1
END_LIMIT_S = 30.0


def step_back() -> None:
    """Lowers the priority of this process and its session."""
    os.nice(NICENESS)
    # Linux divides a core among sessions first, regardless of nice values within them (sched(7)).
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(f"{NICENESS}\n", encoding="ascii")


class CpuTime(NamedTuple):
    """A process's totals so far: CPU seconds and voluntary context switches."""

    cpu_s: float
    waits: int


Parts = dict[str, dict[int, CpuTime]]
"""Each part's processes, keyed by ID. A part is an operating system session."""


def cpu_times(leaders: Mapping[str, int]) -> Parts:
    """Returns totals so far for the sessions led by `leaders`, by part and process."""
    return {name: _family(pid) for name, pid in leaders.items()}


def _family(pid: int) -> dict[int, CpuTime]:
    spent: dict[int, CpuTime] = {}
    with suppress(psutil.NoSuchProcess):
        leader = psutil.Process(pid)
        for process in [leader, *leader.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                waits = process.num_ctx_switches().voluntary
                spent[process.pid] = CpuTime(times.user + times.system, waits)
    return spent


class CpuBurst(msgspec.Struct):
    """One process's load: CPU seconds per second, in bursts of `burst_s` CPU seconds."""

    cores: float
    burst_s: float


Load = dict[str, list[CpuBurst]]
"""Loads by part."""


class CpuDrive(NamedTuple):
    """A time period, with the CPU times at both ends."""

    seconds: float
    before: Parts
    after: Parts

    def of(self, part: str, pid: int) -> CpuTime:
        zero = CpuTime(0.0, 0)
        before = self.before.get(part, {}).get(pid, zero)
        after = self.after.get(part, {}).get(pid, before)
        return CpuTime(after.cpu_s - before.cpu_s, after.waits - before.waits)


def load_between(alone: CpuDrive, beside: CpuDrive) -> Load:
    added: Load = {}
    for part, processes in beside.after.items():
        bursts = [
            burst for pid in processes if (burst := _added(alone, beside, part, pid)) is not None
        ]
        if bursts:
            added[part] = bursts
    return added


def _added(alone: CpuDrive, beside: CpuDrive, part: str, pid: int) -> CpuBurst | None:
    now, then = beside.of(part, pid), alone.of(part, pid)
    cores = now.cpu_s / beside.seconds - then.cpu_s / alone.seconds
    if cores < MIN_CORES:
        return None
    burst_s = now.cpu_s / max(1, now.waits)
    return CpuBurst(min(cores, 1.0), min(max(burst_s, MIN_BURST_S), MAX_BURST_S))


def cores_of(load: Load) -> float:
    """Returns the total CPU seconds per second of all parts."""
    return sum(burst.cores for bursts in load.values() for burst in bursts)


@asynccontextmanager
async def burning(
    load: Load, seconds: float, low_parts: Sequence[str]
) -> AsyncIterator[list[float]]:
    """Burns the load while the block runs, at a lower priority for `low_parts`.

    After the block, the list contains the number of cores it used.
    """
    cores_got: list[float] = []
    with ExitStack() as stack:
        burns = [
            stack.enter_context(ChildProcess(_burn_part, bursts, seconds, part in low_parts))
            for part, bursts in load.items()
        ]
        yield cores_got
        cores_got.append(sum([await burn.receive(seconds + END_LIMIT_S) for burn in burns]))


def _burn_part(
    bursts: Sequence[CpuBurst], seconds: float, steps_back: bool, pipe: Connection
) -> None:
    """Burns a part's load in processes of this session, and sends the number of cores used."""
    if steps_back:
        step_back()
    context = multiprocessing.get_context("fork")
    # A pipe for each, because a queue needs semaphores in /dev/shm, which a machine may lack.
    pipes = [context.Pipe(duplex=False) for _ in bursts]
    for burst, (_, sender) in zip(bursts, pipes, strict=True):
        context.Process(target=_burn_one, args=(burst, seconds, sender)).start()
    pipe.send(sum(receiver.recv() for receiver, _ in pipes) / seconds)


def burn(burst: CpuBurst, seconds: float) -> float:
    """Burns CPU time on this thread. Returns the CPU seconds used."""
    began_s, began_cpu_s = time.monotonic(), time.thread_time()
    due_s, period_s = began_s, burst.burst_s / burst.cores
    while (now_s := time.monotonic()) < began_s + seconds:
        if now_s < due_s:
            time.sleep(min(due_s, began_s + seconds) - now_s)
            continue
        until_cpu_s = time.thread_time() + burst.burst_s
        while time.thread_time() < until_cpu_s:
            pass
        # Late bursts are not made up for, just as requests in a closed loop aren't.
        due_s = max(due_s, now_s - period_s) + random.expovariate(1 / period_s)
    return time.thread_time() - began_cpu_s


def _burn_one(burst: CpuBurst, seconds: float, told: Connection[float, None]) -> None:
    told.send(burn(burst, seconds))
