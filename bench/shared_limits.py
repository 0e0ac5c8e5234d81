"""Ten API processes share the limit of a tenant: how many requests they allow together.

Both phases are counted from what callers see: answers with status 200, by the moment at
which they arrive. In the second, Redis is killed and the limit is kept by each process alone.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import httpx

from bench.report import Figure, Outcome
from infra.local.ports import Ports
from infra.local.process import Process, answers, free_port
from infra.local.stack import API_LIMIT_S, Stack
from infra.local.stack_processes import API_STOP_LIMIT_S
from shared.settings import environment_with
from shared.tenants.plan import Plan
from tests.keys import bearer, keys_url

INSTANCES = 10
LIMIT_PER_MIN = 600
OFFERED_PER_S = 40
"""Four times what the limit lets through."""
WHOLE_S, AWAY_S = 150.0, 60.0
WINDOW_S = 60.0
MODEL = "all-MiniLM-L6-v2"
TEXT = "the river carries what the mountains lose"
"""Always the same, so that a cache answers: the model is not what is measured."""


def run() -> Outcome:
    """Asks ten processes in turn, first with Redis, then without."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        folder = Path(name)
        plans = {"small": Plan(requests_per_min=LIMIT_PER_MIN)}
        keys = keys_url(folder, plans=plans, tenants={"acme": "small"}, limited="acme")
        settings = {"PENSTOCK_KEYS_URL": keys}
        with Stack(folder, ports=Ports.free(), settings=settings) as stack, _others(stack) as urls:
            whole = asyncio.run(_let_through([stack.api_url, *urls], WHOLE_S))
            stack.processes["redis"].kill()
            away = asyncio.run(_let_through([stack.api_url, *urls], AWAY_S))
    most = _most_in_a_window(whole)
    return Outcome(
        [
            Figure(
                f"most of {INSTANCES} API processes in any minute, of the limit",
                100 * most / LIMIT_PER_MIN,
                "%",
                "<=",
                103,
            ),
            Figure(
                "after Redis was killed: let through in a minute, of the limit",
                100 * len(away) / LIMIT_PER_MIN,
                "%",
                "<=",
                100 + 100,
            ),
        ],
        {
            "answers_by_second": _by_second(whole),
            "answers_by_second_without_redis": _by_second(away),
        },
    )


@contextmanager
def _others(stack: Stack) -> Iterator[list[str]]:
    """The URLs of nine API processes more, while the block runs."""
    with ExitStack() as undo:
        started = []
        for number in range(1, INSTANCES):
            port = free_port()
            own = {"PENSTOCK_PORT": str(port), "PENSTOCK_METRICS_PORT": "0"}
            process = Process(
                f"api-{number}",
                [sys.executable, "-m", "api"],
                stack.log_dir,
                environment=environment_with(stack.environment | own),
                stop_limit_s=API_STOP_LIMIT_S,
            )
            undo.enter_context(process)
            started.append((process, port))
        for process, port in started:
            process.wait_ready(partial(answers, port, "/readyz"), API_LIMIT_S)
        yield [f"http://127.0.0.1:{port}" for _, port in started]


async def _let_through(urls: list[str], seconds: float) -> list[float]:
    """Arrival of each answer with status 200, in seconds. The processes are asked in turn."""
    came_s: list[float] = []
    async with httpx.AsyncClient(headers=bearer("limited"), timeout=30) as client:

        async def ask(url: str) -> None:
            answer = await client.post(f"{url}/v1/embeddings", json={"model": MODEL, "input": TEXT})
            if answer.status_code == 200:
                came_s.append(time.monotonic())
            elif answer.status_code != 429:
                raise RuntimeError(f"{answer.status_code}: {answer.text}")

        async with asyncio.TaskGroup() as asked:
            began_s = time.monotonic()
            for number in range(int(seconds * OFFERED_PER_S)):
                asked.create_task(ask(urls[number % len(urls)]))
                due_s = began_s + (number + 1) / OFFERED_PER_S
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
    return sorted(came_s)


def _most_in_a_window(came_s: list[float]) -> int:
    """The most answers that came within any WINDOW_S seconds."""
    return max(bisect_left(came_s, at_s + WINDOW_S) - n for n, at_s in enumerate(came_s))


def _by_second(came_s: list[float]) -> list[int]:
    """Number of answers in each second from the first on."""
    counts = Counter(int(at_s - came_s[0]) for at_s in came_s)
    return [counts[second] for second in range(max(counts) + 1)]
