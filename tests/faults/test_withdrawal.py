"""A model is withdrawn under traffic, with the operator's command, and then served again.

Uses two API instances and two workers. Redis is killed while the model is withdrawn.
"""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from shared.settings import environment_with
from tests.faults.suite import read_rows
from tests.faults.world import APIS, MODEL, WORKERS, World
from tests.keys import bearer
from tests.limits import WAIT_LIMIT_S

pytestmark = pytest.mark.slow(about_s=40)

REVISION, CALLERS, QUEUED = "0.1.0", 8, 20
CODE, WORDS = "model_withdrawn", "was withdrawn by the operator of this API"
ENOUGH = 60
KEY = bearer("one")


def penstock(world: World, *words: str) -> str:
    """Runs one of the operator's commands."""
    settings = world.settings
    given = {
        "PENSTOCK_REDIS_URL": settings.redis_url,
        "PENSTOCK_MODELS_FILE": str(settings.models_file),
    }
    return subprocess.run(
        [sys.executable, "-m", "infra.cli.main", "models", *words],
        env=environment_with(given),
        stdout=subprocess.PIPE,
        text=True,
        timeout=WAIT_LIMIT_S,
        check=True,
    ).stdout


@dataclass
class Callers:
    """Callers that keep sending new texts, plus one fixed text, which is therefore cached."""

    world: World
    http: aiohttp.ClientSession
    answers: Counter[str] = field(default_factory=Counter)
    """Responses since the last check, by kind."""
    wrong: list[str] = field(default_factory=list)
    """Responses and errors that no caller should get while everything is running."""
    predictions: list[str] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    async def ask(self) -> None:
        while True:
            number = next(self._numbers)
            text = f"text {number}" if number % 4 else "the same each time"
            url = f"{self.world.url(APIS[number % 2])}/v1/embeddings"
            body = {"model": MODEL, "input": text}
            try:
                async with self.http.post(url, json=body, headers=KEY) as answer:
                    read = await answer.json()
            except aiohttp.ClientError as error:
                self.wrong.append(repr(error))
                await asyncio.sleep(0.05)
                continue
            if answer.status == 200:
                said = "hit" if answer.headers["x-penstock-cache"] == "hit" else "computed"
            elif answer.status == 503 and read["error"]["code"] == CODE:
                said = "withdrawn"
            else:
                said = f"{answer.status}"
                self.wrong.append(f"{answer.status} {read}")
            self.answers[said] += 1

    async def only(self, *said: str) -> None:
        """Waits until ENOUGH responses in a row were of these kinds, with at least one of each
        kind.
        """
        async with asyncio.timeout(WAIT_LIMIT_S):
            while not (self.answers.keys() == set(said) and self.answers.total() >= ENOUGH):
                if not self.answers.keys() <= set(said):
                    self.answers.clear()
                await asyncio.sleep(0.05)


async def predict(callers: Callers, count: int) -> list[str]:
    names = []
    for number in range(count):
        url = f"{callers.world.url(APIS[number % 2])}/v1/predictions"
        body = {"version": MODEL, "input": {"text": f"prediction {number}"}}
        async with callers.http.post(url, json=body, headers=KEY) as answer:
            assert answer.status == 201, await answer.text()
            names.append((await answer.json())["id"])
    return names


async def over(callers: Callers, name: str) -> dict[str, Any]:
    url = f"{callers.world.url(APIS[0])}/v1/predictions/{name}"
    async with asyncio.timeout(WAIT_LIMIT_S):
        while True:
            async with callers.http.get(url, headers=KEY) as answer:
                read: dict[str, Any] = await answer.json()
            if read["status"] not in ("starting", "processing"):
                return read
            await asyncio.sleep(0.1)


async def withdrawn_and_served_again(world: World) -> Callers:
    timeout = aiohttp.ClientTimeout(total=WAIT_LIMIT_S)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        callers = Callers(world, http)
        asking = [asyncio.create_task(callers.ask()) for _ in range(CALLERS)]
        await callers.only("hit", "computed")
        for name in WORKERS:
            world.processes[name].pause()
        waiting = await predict(callers, QUEUED)
        command = partial(penstock, world, "withdraw", MODEL, "--revision", REVISION)
        said = await asyncio.to_thread(command)
        assert "processes stop it within 3 s" in said
        began_s = time.monotonic()
        await callers.only("withdrawn")
        print(f"only refusals {time.monotonic() - began_s:.1f} s after the command")
        callers.predictions += waiting
        for name in WORKERS:
            world.processes[name].resume()
        ends = [await over(callers, name) for name in waiting]
        refused = [read for read in ends if read["status"] == "failed"]
        assert refused  # a worker has 3 s to find out, and may start other batches until then
        assert all(WORDS in read["error"] for read in refused), refused
        assert {read["status"] for read in ends} <= {"failed", "succeeded"}
        assert callers.wrong == []
        world.processes["redis"].kill()
        await asyncio.to_thread(_restarted, world, "redis", WORKERS[0], APIS[0])
        callers.answers.clear()
        await callers.only("withdrawn")
        callers.wrong.clear()  # an instance and Redis were down for a while
        await asyncio.to_thread(command, "--undo")
        await callers.only("hit", "computed")
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        return callers


def _restarted(world: World, *names: str) -> None:
    for name in names:
        world.restart(name)
        world.wait_ready(name)


def test_withdrawn_under_traffic_and_served_again(tmp_path: Path) -> None:
    with World(tmp_path, has_keys=True) as world:
        callers = asyncio.run(withdrawn_and_served_again(world))
        rows, _ = read_rows(world, callers.predictions)
    assert callers.wrong == []
    failed = [row for one in rows.values() for row in one if row["status"] == "failed"]
    assert failed
    assert sum(row["cost_usd"] or 0 for row in failed) == 0
