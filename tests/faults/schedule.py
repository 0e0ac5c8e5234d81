"""Injects faults while traffic runs.

They are drawn from a seeded generator, and every kind occurs before any is repeated.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from tests.faults.world import APIS, ARCHIVE, INSTANCE_LINKS, SERVERS, WORKERS, World

MIN_S, MAX_S = 0.3, 3.0
"""How long a fault lasts before it is healed."""
CALM_S = 1.0
"""Minimum time between the end of one fault and the next."""


@dataclass(frozen=True)
class Fault:
    """A fault: `kind` on `target`, for `lasts_s` seconds."""

    kind: str
    target: str
    lasts_s: float


def kinds(*, has_archive: bool = False) -> list[tuple[str, str]]:
    """Every kind of fault, with every part it may affect."""
    archive = (ARCHIVE,) if has_archive else ()
    parts = (*APIS, *WORKERS, *SERVERS, *archive)
    links = [f"{one}.{server}" for one in (*APIS, *WORKERS) for server in INSTANCE_LINKS]
    return [
        *(("killed", part) for part in parts),
        *(("stopped", part) for part in parts),
        *(("restarted", part) for part in (*APIS, *WORKERS, *archive)),
        *(("model killed", worker) for worker in WORKERS),
        *(("cut off", link) for link in links),
        *(("frozen", link) for link in links),
        *(("answers lost", link) for link in links if link.endswith(".redis")),
    ]


def faults(seed: int, count: int, *, has_archive: bool = False) -> Iterator[Fault]:
    """Returns `count` faults; all kinds occur before any is repeated."""
    drawn = random.Random(seed)
    bag: list[tuple[str, str]] = []
    for _ in range(count):
        all_kinds = kinds(has_archive=has_archive)
        bag = bag or drawn.sample(all_kinds, len(all_kinds))
        kind, target = bag.pop()
        yield Fault(kind, target, drawn.uniform(MIN_S, MAX_S))


async def inject(world: World, plan: Iterator[Fault], say: Callable[[str], None]) -> Counter[str]:
    """Injects one fault after another and heals each. Returns the number of each kind."""
    done: Counter[str] = Counter()
    for fault in plan:
        began_s = time.monotonic()
        begin, heal = _ways(world, fault)
        begin()
        await asyncio.sleep(fault.lasts_s)
        await asyncio.get_running_loop().run_in_executor(world.healer, heal)
        done[fault.kind] += 1
        say(f"{fault.kind:12} {fault.target:16} {time.monotonic() - began_s:5.1f} s until healed")
        await asyncio.sleep(CALM_S)
    return done


def _ways(world: World, fault: Fault) -> tuple[Callable[[], object], Callable[[], object]]:
    """Returns how to start the fault and how to heal it.

    A fault is healed once the part is serving again.
    """
    target, links = fault.target, world.links
    if fault.kind == "cut off":
        return partial(links.cut, target), partial(links.heal, target)
    if fault.kind == "frozen":
        return partial(links.freeze, target), partial(links.heal, target)
    if fault.kind == "answers lost":
        return partial(links.lose_answers, target), partial(links.heal, target)
    if fault.kind == "model killed":
        return partial(world.kill_model_process, target), lambda: None
    process = world.processes[target]
    if fault.kind == "stopped":
        return process.pause, process.resume

    def serve_again() -> None:
        if fault.kind == "killed" and target in APIS:
            world.note_held()
        world.restart(target)
        world.wait_ready(target)

    return (process.kill if fault.kind == "killed" else process.ask_to_stop), serve_again
