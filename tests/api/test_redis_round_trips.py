"""How often a request waits for Redis: with Redis far away, each of these is a round trip more.

Redis is behind a proxy that passes nothing on until it is told to. What the API has asked by then
passes together, as one round trip.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from shared.stores.cache import ResultCache
from shared.tenants.plan import Plan
from tests.api.harness import TEXT_MODEL, ApiUnderTest, running_api, settings_for
from tests.api.test_limits import PRICED
from tests.keys import bearer, keys_url, stored
from tests.limits import WAIT_LIMIT_S

pytestmark = pytest.mark.anyio

REQUESTS = 8
"""Reports to other instances pass too now and then, so the fewest of these are counted."""


class GatedLink:
    """A TCP proxy. While `gate` is closed, requests wait in it, and answers pass."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._waiting: list[tuple[asyncio.StreamWriter, bytes]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.asked = asyncio.Event()
        self.is_open = True

    def pass_on(self) -> None:
        """Sends what waits."""
        for sink, data in self._waiting:
            sink.write(data)
        self._waiting.clear()
        self.asked.clear()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, onward = await asyncio.open_connection("127.0.0.1", self._target_port)
        answers = asyncio.create_task(self._answers(back, writer))
        self._tasks.add(answers)
        while data := await reader.read(65536):
            self._waiting.append((onward, data))
            self.asked.set()
            if self.is_open:
                self.pass_on()
        onward.close()
        writer.close()

    async def _answers(self, back: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await back.read(65536):
            writer.write(data)

    async def trips(self, answer: Awaitable[httpx.Response]) -> int:
        """The number of round trips until a request is answered with 200."""
        self.is_open, trips = False, 0
        answering = asyncio.ensure_future(answer)
        async with asyncio.timeout(WAIT_LIMIT_S):
            while not answering.done():
                asked = asyncio.create_task(self.asked.wait())
                await asyncio.wait((answering, asked), return_when=asyncio.FIRST_COMPLETED)
                asked.cancel()
                if not answering.done():
                    trips += 1
                    self.pass_on()
        self.is_open = True
        self.pass_on()
        response = await answering
        assert response.status_code == 200, response.text
        return trips


@asynccontextmanager
async def gated_api(
    tmp_path: Path, redis_url: str
) -> AsyncIterator[tuple[ApiUnderTest, GatedLink]]:
    """An API whose tenant has limits, with its Redis behind a gate."""
    plan = Plan(requests_per_min=1000, budget_usd_per_month=1000.0)
    url = keys_url(
        tmp_path, plans={"theirs": plan}, tenants={"acme": "theirs"}, keys=[stored("a", "acme")]
    )
    where = urlsplit(redis_url)
    link = GatedLink(where.port or 0)
    async with await asyncio.start_server(link.serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        far = redis_url.replace(f":{where.port}", f":{port}")
        settings = settings_for(tmp_path, redis_url=far, keys_url=url, memory_cache_bytes=0)
        async with (
            ResultCache(redis_url, 0) as cache,
            running_api(settings, catalog=PRICED, cache=cache) as api,
        ):
            yield api, link


async def fewest(api: ApiUnderTest, link: GatedLink, cache: str, *texts: str) -> int:
    """The fewest round trips of requests for these texts, one text each.

    `cache`: what the header of their answers says.
    """
    found = list[str]()

    async def embed(text: str) -> httpx.Response:
        body = {"model": TEXT_MODEL.name, "input": text}
        answer = await api.http.post("/v1/embeddings", json=body, headers=bearer("a"))
        found.append(answer.headers["x-penstock-cache"])
        return answer

    await embed(texts[0] if cache == "hit" else "the first takes limits ahead")
    trips = [await link.trips(embed(text)) for text in texts]
    assert set(found[1:]) == {cache}
    assert min(trips) >= 1
    return min(trips)


async def test_a_miss_waits_for_redis_twice_at_most(tmp_path: Path, redis_url: str) -> None:
    async with gated_api(tmp_path, redis_url) as (api, link):
        texts = [f"text {number}" for number in range(REQUESTS)]
        assert await fewest(api, link, "miss", *texts) <= 2


async def test_a_hit_waits_for_redis_once(tmp_path: Path, redis_url: str) -> None:
    async with gated_api(tmp_path, redis_url) as (api, link):
        assert await fewest(api, link, "hit", *["the same"] * REQUESTS) <= 1
