"""Two tenants share an engine, through the whole pipeline.

Neither learns anything about the other or delays it.

Work is measured in CPU seconds of the engine process, which other programs hardly affect.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Iterator
from typing import Any

import aiohttp
import psutil
import pytest

from tests.faults.generation_catalog import generation_catalog
from tests.faults.world import APIS, WORKERS, World, processes_below
from tests.keys import bearer
from tests.limits import WAIT_LIMIT_S
from tests.workers.models.generation import tiny
from workers.models.engines import program

pytestmark = [
    pytest.mark.slow(about_s=25),
    pytest.mark.anyio,
    pytest.mark.skipif(
        importlib.util.find_spec("xllamacpp") is None, reason="the extra `text` is not installed"
    ),
]

MODEL = "tiny-text"
CONTEXT, CHUNK, LONG = 2048, 64, 1500
"""Token counts. A long prompt has 24 parts."""
NOISY = 4
"""Number of one tenant's concurrent long prompts."""
BEGUN_S = 0.05
QUIET, LOUD = bearer("one"), bearer("other")
"""Two tenants."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("tenants")
    model = folder / "model"
    model.mkdir()
    config = tiny.tiny_config(400)
    config.update({"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 3})
    config.update({"head_dim": 64, "max_position_embeddings": CONTEXT})
    tiny.write_folder(model, config)
    from tests.workers.models.generation.gguf_file import write_gguf

    write_gguf(model)
    catalog = generation_catalog(
        MODEL,
        model,
        "llama.cpp",
        batch={"max_tokens": 6 * CONTEXT, "max_items": 6},
        generation={"context_tokens": CONTEXT, "chunk_tokens": CHUNK},
    )
    one_thread = {WORKERS[0]: {"PENSTOCK_THREADS": "1"}}
    served = (MODEL, catalog)
    with World(folder, workers=1, served=served, has_keys=True, environments=one_thread) as started:
        yield started


class Caller:
    """Sends requests to the pipeline and meanwhile measures the engine's work."""

    def __init__(self, world: World, http: aiohttp.ClientSession) -> None:
        self._url = f"{world.url(APIS[0])}/v1/completions"
        self._http = http
        pids = processes_below(world.processes[WORKERS[0]].pid, program.NAME)
        self._engine = psutil.Process(pids[0])

    @property
    def engine_s(self) -> float:
        """The engine's CPU seconds so far."""
        times = self._engine.cpu_times()
        return float(times.user + times.system)

    async def until_engine_works(self) -> None:
        """Waits until the engine has used BEGUN_S more CPU seconds."""
        began_s = self.engine_s
        async with asyncio.timeout(WAIT_LIMIT_S):
            while self.engine_s < began_s + BEGUN_S:  # noqa: ASYNC110 — CPU time has no event
                await asyncio.sleep(0.01)

    def post(self, key: dict[str, str], prompt: list[int], **fields: Any) -> Any:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0, **fields}
        return self._http.post(self._url, json=body, headers=key | {"cache-control": "no-store"})

    async def ask(self, key: dict[str, str], prompt: list[int]) -> tuple[float, int]:
        """Returns the engine's CPU seconds for a prompt, and how many of its tokens were cached."""
        began_s = self.engine_s
        async with self.post(key, prompt) as answer:
            assert answer.status == 200, await answer.text()
            usage = (await answer.json())["usage"]
        return self.engine_s - began_s, usage["prompt_tokens_details"]["cached_tokens"]


@pytest.fixture
async def http() -> Any:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(WAIT_LIMIT_S)) as session:
        yield session


async def test_a_prompt_of_another_tenant_takes_as_long_as_a_new_one(
    world: World, http: aiohttp.ClientSession
) -> None:
    caller = Caller(world, http)
    await caller.ask(QUIET, [9] * CHUNK)
    prompt = [7] * LONG
    new_s, _ = await caller.ask(QUIET, prompt)
    own_s, own_cached = await caller.ask(QUIET, prompt)
    others_s, others_cached = await caller.ask(LOUD, prompt)
    assert (own_cached, others_cached) == (LONG - 1, 0)
    assert own_s < new_s / 4
    assert others_s > new_s / 2


async def test_a_short_prompt_overtakes_the_long_ones_of_another_tenant(
    world: World, http: aiohttp.ClientSession
) -> None:
    """If served in order of arrival, the short prompt would come last."""
    caller = Caller(world, http)
    loud = [asyncio.create_task(caller.ask(LOUD, [20 + number] * LONG)) for number in range(NOISY)]
    await caller.until_engine_works()
    await caller.ask(QUIET, [11] * CHUNK)
    waiting = [task for task in loud if not task.done()]
    await asyncio.gather(*loud)
    assert len(waiting) == NOISY


async def test_a_caller_who_vanishes_costs_no_more_than_what_was_read(
    world: World, http: aiohttp.ClientSession
) -> None:
    caller = Caller(world, http)
    whole_s, _ = await caller.ask(LOUD, [30] * LONG)
    began_s = caller.engine_s
    # They take all slots, so the last request waits for a free one.
    gone = [asyncio.create_task(_leave(caller, [31 + number] * LONG)) for number in range(6)]
    await caller.until_engine_works()
    for task in gone:
        task.cancel()
    await asyncio.gather(*gone, return_exceptions=True)
    await caller.ask(QUIET, [12] * CHUNK)
    assert caller.engine_s - began_s < 3 * whole_s


async def _leave(caller: Caller, prompt: list[int]) -> None:
    async with caller.post(LOUD, prompt, stream=True) as answer:
        async for line in answer.content:
            assert not line.startswith(b"data: {"), json.loads(line.removeprefix(b"data: "))
