"""Images that are admitted between steps, compared with whole batches: the same arrivals, in turn.

Two stacks run, one with `image.join: auto` and one with `never`. First each is kept full, for its
images per second. Then both get the same Poisson arrivals at 70 % of what whole batches do: four
short images for each long one.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import httpx
import numpy as np

from bench.pipeline import image_stack
from bench.report import Figure, Outcome
from infra.local.stack import Stack

SHORT_STEPS, LONG_STEPS = (5, 8, 10), 50
LONG_SHARE = 0.2
LOAD = 0.7
FULL_S = 20.0
FULL_IN_FLIGHT = 16
ARRIVALS = 150
ROUNDS = 2
CALL_LIMIT_S = 120.0
VARIANTS = {"whole batches": "never", "joining": "auto"}

Timed = list[tuple[int, float]]
"""Steps and seconds of each image."""


def run() -> Outcome:
    """Measures both in turn, in rounds. The figures are over all rounds."""
    full: dict[str, list[float]] = {name: [] for name in VARIANTS}
    timed: dict[str, Timed] = {name: [] for name in VARIANTS}
    with ExitStack() as opened:
        stacks = {
            name: opened.enter_context(image_stack({"join": join}))
            for name, join in VARIANTS.items()
        }
        for number in range(ROUNDS):
            for name, stack in stacks.items():
                full[name].append(asyncio.run(_keep_full(stack, seed=number)))
        rate = LOAD * float(np.median(full["whole batches"]))
        for number in range(ROUNDS):
            for name, stack in stacks.items():
                timed[name] += asyncio.run(_arrive(stack, rate, seed=100 + number))
    rates = {name: float(np.median(runs)) for name, runs in full.items()}
    figures = [Figure(f"{name}: full, images", rate, "/s") for name, rate in rates.items()]
    ratio = rates["joining"] / rates["whole batches"]
    figures.append(Figure("joining over whole batches: full", ratio, "", ">=", 0.97))
    figures += [figure for name in VARIANTS for figure in _figures(name, timed[name])]
    p95_s = {name: _percentile(timed[name], SHORT_STEPS, 95) for name in VARIANTS}
    short = p95_s["joining"] / p95_s["whole batches"]
    figures.append(Figure("joining over whole batches: p95 of short", short, "", "<=", 0.5))
    return Outcome(figures, {"full": full, "arrivals_per_s": rate})


async def _keep_full(stack: Stack, seed: int) -> float:
    """Images per second of the same mix, with enough callers to fill a batch twice."""
    drawn = random.Random(seed)
    until_s, done = time.monotonic() + FULL_S, 0

    async def one_after_another(client: httpx.AsyncClient) -> None:
        nonlocal done
        while time.monotonic() < until_s:
            await _draw(client, _steps(drawn), drawn.getrandbits(40))
            done += 1

    began_s = time.monotonic()
    async with _client(stack) as client, asyncio.TaskGroup() as group:
        for _ in range(FULL_IN_FLIGHT):
            group.create_task(one_after_another(client))
    return done / (time.monotonic() - began_s)


async def _arrive(stack: Stack, rate_per_s: float, seed: int) -> Timed:
    """An open loop: an image that waits delays no arrival."""
    drawn = random.Random(seed)
    timed: Timed = []

    async def draw(client: httpx.AsyncClient, steps: int, number: int) -> None:
        began_s = time.perf_counter()
        await _draw(client, steps, number)
        timed.append((steps, time.perf_counter() - began_s))

    async with _client(stack) as client, asyncio.TaskGroup() as group:
        for _ in range(ARRIVALS):
            group.create_task(draw(client, _steps(drawn), drawn.getrandbits(40)))
            await asyncio.sleep(drawn.expovariate(rate_per_s))
    return timed


def _steps(drawn: random.Random) -> int:
    return LONG_STEPS if drawn.random() < LONG_SHARE else drawn.choice(SHORT_STEPS)


def _client(stack: Stack) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=ARRIVALS)
    return httpx.AsyncClient(base_url=stack.api_url, timeout=CALL_LIMIT_S, limits=limits)


async def _draw(client: httpx.AsyncClient, steps: int, seed: int) -> None:
    asked = {"prompt": "a green star", "num_inference_steps": steps, "seed": seed, "size": "64x64"}
    answer = await client.post(
        "/v1/images/generations",
        json=asked,
        headers={"x-penstock-deadline-ms": str(int(CALL_LIMIT_S * 1000))},
    )
    answer.raise_for_status()


def _figures(name: str, timed: Timed) -> Iterator[Figure]:
    for kind, steps in (("short", SHORT_STEPS), ("long", (LONG_STEPS,))):
        for percent in (50, 95):
            value_s = _percentile(timed, steps, percent)
            yield Figure(f"{name}: {kind}, p{percent}", value_s, "s")


def _percentile(timed: Timed, steps: Sequence[int], percent: float) -> float:
    return float(np.percentile([took_s for one, took_s in timed if one in steps], percent))
