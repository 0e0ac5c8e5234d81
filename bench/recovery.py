"""How long callers wait when a model process or a worker dies.

Callers do not retry. docs/measurements/recovery.md describes what other servers do when their model
process is killed.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.load.generator import LoadOrder, embedding_bodies, send
from bench.report import Figure, Outcome, expect_none
from penstock_load.exchange import Exchange
from tests.faults.world import MODEL, World

IN_FLIGHT = 16
CALM_S, AFTER_S = 2.0, 16.0
ROUNDS = 3
LIMIT_S = 60.0
MAX_REQUESTS = 20_000
TEXT = "The quick brown fox jumps over the lazy dog, number {0}, " * 4


def run() -> Outcome:
    """Kills each kind of component ROUNDS times, and measures how long callers had to wait."""
    figures, details = [], {}
    for name, backend, workers, processes, kill, limit_s in _CASES:
        waits_s, failed, starts_s = [], 0, []
        for _ in range(ROUNDS):
            with tempfile.TemporaryDirectory(prefix="penstock-recovery-") as folder:
                began_s = time.monotonic()
                with World(
                    Path(folder), workers=workers, processes=processes, backend=backend
                ) as world:
                    starts_s.append(time.monotonic() - began_s)
                    killed_s, calls = asyncio.run(_measure(world, kill))
            hit = [
                call
                for call in calls
                if call.ended_s - call.round_trip_ms / 1000 <= killed_s < call.ended_s
            ]
            waits_s.append(max(call.ended_s - killed_s for call in hit))
            failed += sum(call.status != 200 for call in calls)
        figures.append(
            Figure(f"{name}: longest wait", statistics.median(waits_s), "s", "<=", limit_s)
        )
        figures.append(expect_none(f"{name}: requests that failed", failed))
        details[name] = {"longest_wait_s": [round(wait_s, 2) for wait_s in waits_s]}
    return Outcome(figures, details)


async def _measure(world: World, kill: Callable[[World], Any]) -> tuple[float, list[Exchange]]:
    """Returns when the kill happened, in seconds since the load began, and all requests."""
    order = LoadOrder(
        world.port("api-0"),
        embedding_bodies(MODEL, [TEXT.format(number) for number in range(MAX_REQUESTS)]),
        IN_FLIGHT,
        send_s=CALM_S + AFTER_S,
        limit_s=LIMIT_S,
    )
    began_s, sending = time.perf_counter(), asyncio.create_task(send(order))
    await asyncio.sleep(CALM_S)
    killed_s = time.perf_counter() - began_s
    kill(world)
    return killed_s, (await sending).exchanges


def _kill_model_process(world: World) -> None:
    assert world.kill_model_process("worker-0"), "a worker has a model process; this is a bug"


def _kill_worker(world: World) -> None:
    world.processes["worker-0"].kill()


_CASES: tuple[tuple[str, str, int, int, Callable[[World], None], float], ...] = (
    ("model process killed, another up", "onnx", 1, 2, _kill_model_process, 1.0),
    ("model process killed, the only one", "onnx", 1, 1, _kill_model_process, 2.0),
    ("model process killed, the only one, torch", "torch", 1, 1, _kill_model_process, 2.0),
    ("worker killed, another up", "onnx", 2, 1, _kill_worker, 12.0),
)
