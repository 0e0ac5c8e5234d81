"""A text model with LoRA adapters behind the whole pipeline, while its workers are killed.

The reference is the model with the adapter merged into its weights.
"""

from __future__ import annotations

import asyncio
import importlib.util
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from google.auth.credentials import AnonymousCredentials
from google.cloud import bigquery

from tests.faults.generation_catalog import generation_catalog
from tests.faults.streams import StreamReaders, read_while_killing
from tests.faults.world import APIS, WORKERS, World
from tests.limits import WAIT_LIMIT_S
from tests.workers.models.generation import tiny
from tests.workers.models.generation.text_adapters import merge_greedily, write_adapter

pytestmark = [
    pytest.mark.slow(about_s=60),
    pytest.mark.skipif(
        importlib.util.find_spec("xllamacpp") is None, reason="the extra `text` is not installed"
    ),
    # PEFT reads an attribute that transformers has deprecated.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),
]

MODEL = "tiny-text"
NAMES = (MODEL, "tiny-law", "tiny-poems")
IDS = list(range(5, 45))
TOKENS = 24
TURNS = (f"engine of {WORKERS[0]}", WORKERS[1], WORKERS[0])
"""Both workers lose texts, which the other one continues."""


class Served:
    """A running pipeline, with the reference text for each name."""

    def __init__(self, folder: Path) -> None:
        from tests.workers.models.generation.gguf_file import write_gguf, write_gguf_adapter

        weights = folder / "model"
        weights.mkdir()
        tiny.write_folder(weights)
        write_gguf(weights)
        self.expected = {MODEL: tiny.text_of(weights, merge_greedily(weights, None, IDS, TOKENS))}
        adapters = {}
        for seed, name in enumerate(NAMES[1:]):
            adapter = write_adapter(weights, folder / name, seed)
            ids = merge_greedily(weights, adapter, IDS, TOKENS)
            self.expected[name] = tiny.text_of(weights, ids)
            file = write_gguf_adapter(weights, adapter, folder / f"{name}.gguf")
            adapters[name] = {"source": f"local:{file}"}
        generation = {"longest_tokens": 224, "adapters": adapters}
        self._catalog = generation_catalog(MODEL, weights, "llama.cpp", generation=generation)
        self.world = World(folder, served=(MODEL, self._catalog))

    async def complete(self, http: aiohttp.ClientSession, name: str) -> dict[str, Any]:
        body = {"model": name, "prompt": IDS, "max_tokens": TOKENS, "temperature": 0}
        headers = {"cache-control": "no-store"}
        url = f"{self.world.url(APIS[0])}/v1/completions"
        async with http.post(url, json=body, headers=headers) as answer:
            found: dict[str, Any] = await answer.json()
            assert answer.status == 200, found
            return found


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("adapters"))
    with served.world:
        yield served


@pytest.mark.anyio
async def test_names_in_use_at_the_same_time_write_their_own_texts(served: Served) -> None:
    assert len(set(served.expected.values())) == len(NAMES)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(WAIT_LIMIT_S)) as http:
        found = await asyncio.gather(*(served.complete(http, name) for name in NAMES * 4))
    for answer in found:
        name = answer["model"]
        assert answer["choices"][0]["text"] == served.expected[name]


def test_streams_of_an_adapter_are_whole_while_workers_die(served: Served) -> None:
    readers = StreamReaders(served.world, NAMES[1], tokens=160, in_flight=8)
    found = asyncio.run(
        read_while_killing(
            readers,
            served.world,
            streams=30,
            kills=len(TURNS),
            every_s=0.5,
            say=print,
            turns=TURNS,
        )
    )
    # After a takeover, an engine may round differently.
    assert [flaw for flaw in found.flaws() if flaw not in found.differing] == []
    assert len(found.differing) < len(found.streams) / 4
    assert len(found.kills) == len(TURNS)


def test_rows_name_the_adapter(served: Served) -> None:
    settings = served.world.settings
    client = bigquery.Client(
        project=settings.project,
        credentials=AnonymousCredentials(),
        client_options={"api_endpoint": settings.bigquery_endpoint},
    )
    table = f"`{settings.dataset}.rows_deduplicated`"
    sql = f"SELECT DISTINCT model FROM {table} WHERE received_at > TIMESTAMP '2020-01-01'"
    found, until_s = set[str](), time.monotonic() + WAIT_LIMIT_S
    while found < set(NAMES) and time.monotonic() < until_s:
        found = {row["model"] for row in client.query_and_wait(sql)}
    client.close()
    assert found == set(NAMES)
