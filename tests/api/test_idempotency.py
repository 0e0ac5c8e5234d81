"""Idempotency-Key with a real Redis, real uvicorns and OpenAI's own client, checked by counting
published jobs.
"""

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import redis

from api.app import create_app
from api.errors import KeyInUse
from api.http.idempotency import REPLAYED
from api.idempotency.service import IdempotencyService, IdempotentRequest, StoredResponse
from api.idempotency.store import IdempotencyStore, KeyClaim
from infra.local.redis_server import RedisServer
from shared.broker.in_memory import InMemoryBroker
from shared.errors import Unavailable
from shared.stores.objects import ObjectStore
from shared.usage.row_list import RowList
from tests.api.harness import (
    IMAGE_MODEL,
    TEXT_MODEL,
    ApiUnderTest,
    running_api,
    serving,
    settings_for,
)
from tests.keys import bearer, keys_url
from tests.limits import WAIT_LIMIT_S

pytestmark = pytest.mark.anyio
TEXTS = {"model": TEXT_MODEL.name, "input": "a cat", "encoding_format": "base64"}
IMAGE = {"model": IMAGE_MODEL.name, "prompt": "a cat", "n": 1}
UNCACHED = {"cache-control": "no-store"}
"""Ensures that only the key can save an inference."""


def keyed(key: str = "k1", **more: str) -> dict[str, str]:
    return {"Idempotency-Key": key, **UNCACHED, **more}


@pytest.fixture
async def api(tmp_path: Path, redis_url: str) -> AsyncIterator[ApiUnderTest]:
    async with running_api(settings_for(tmp_path, redis_url=redis_url)) as running:
        yield running
        await running.until_idle()


@asynccontextmanager
async def two_apis(
    tmp_path: Path, redis_url: str, *, way: str = "", **settings: object
) -> AsyncIterator[tuple[ApiUnderTest, str]]:
    """One API, a second API's URL, and a worker for both; the APIs share one Redis.

    `way` is the first API's link to Redis.
    """
    given = settings_for(tmp_path, redis_url=redis_url, **settings)
    async with running_api(given.model_copy(update={"redis_url": way or redis_url})) as first:
        broker = first.broker
        app = create_app(given, first.dependencies.catalog, _open(broker), _open(broker), RowList())
        async with serving(app, given) as url:
            yield first, url


@asynccontextmanager
async def _open(part: InMemoryBroker) -> AsyncIterator[InMemoryBroker]:
    yield part


class Line:
    """A link to a server; the link can be cut."""

    def __init__(self, url: str) -> None:
        self._port = int(url.rpartition(":")[2].partition("/")[0])
        self._open: set[asyncio.StreamWriter] = set()
        self._pipes: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "Line":
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.url = f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/0"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.cut()
        await asyncio.gather(*self._pipes)

    def cut(self) -> None:
        self._server.close()
        for end in self._open:
            end.close()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._open |= {writer, far_writer}
        for source, target in ((reader, far_writer), (far_reader, writer)):
            pipe = asyncio.create_task(self._pipe(source, target))
            self._pipes.add(pipe)

    async def _pipe(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                target.write(data)
        target.close()


async def test_repeat_is_answered_alike_and_costs_nothing(api: ApiUnderTest) -> None:
    first, second = [
        await api.http.post("/v1/embeddings", json=TEXTS, headers=keyed()) for _ in range(2)
    ]
    assert (first.status_code, second.status_code) == (200, 200)
    assert second.content == first.content
    assert (first.headers.get(REPLAYED), second.headers.get(REPLAYED)) == (None, "true")
    told = ("content-type", "x-penstock-cache", "x-penstock-inference-ms", "x-penstock-queue-ms")
    assert [second.headers.get_list(name) for name in told] == [
        first.headers.get_list(name) for name in told
    ]
    assert len(first.headers.get_list("x-penstock-cache")) == 1
    assert float(first.headers["x-penstock-cost-usd"]) > 0
    assert second.headers.get_list("x-penstock-cost-usd") == ["0"]
    assert first.headers["x-request-id"] != second.headers["x-request-id"]
    assert len(api.worker.jobs) == 1
    assert len(api.rows) == 0  # the worker writes rows; a repeat needs no work


async def test_other_keys_and_no_key_are_computed(api: ApiUnderTest) -> None:
    for headers in (keyed("a"), keyed("b"), UNCACHED, UNCACHED):
        assert (
            await api.http.post("/v1/embeddings", json=TEXTS, headers=headers)
        ).status_code == 200
    assert len(api.worker.jobs) == 4


async def test_key_of_another_tenant_is_another_key(tmp_path: Path, redis_url: str) -> None:
    settings = settings_for(
        tmp_path, redis_url=redis_url, keys_url=keys_url(tmp_path, one="alice", two="bob")
    )
    async with running_api(settings) as api:
        for key in ("one", "two", "one"):
            headers = keyed(**bearer(key))
            assert (
                await api.http.post("/v1/embeddings", json=TEXTS, headers=headers)
            ).status_code == 200
        assert (
            await api.http.post("/v1/embeddings", json=TEXTS, headers=keyed())
        ).status_code == 401
        assert len(api.worker.jobs) == 2


@pytest.mark.parametrize(
    ("path", "change"),
    [("/v1/embeddings", {"input": "a dog"}), ("/v1/images/generations", IMAGE)],
)
async def test_key_stands_for_one_request(
    api: ApiUnderTest, path: str, change: dict[str, Any]
) -> None:
    await api.http.post("/v1/embeddings", json=TEXTS, headers=keyed())
    other = IMAGE if path.endswith("generations") else TEXTS | change
    refused = await api.http.post(path, json=other, headers=keyed())
    assert refused.status_code == 422
    assert refused.json()["error"]["code"] == "idempotency_key_reused"
    assert refused.json()["error"]["param"] == "idempotency-key"
    assert len(api.worker.jobs) == 1


@pytest.mark.parametrize("key", [b"", b"a b", b"x" * 256, "ключ".encode()])
async def test_key_is_bounded(api: ApiUnderTest, key: bytes) -> None:
    refused = await api.http.post("/v1/embeddings", json=TEXTS, headers={b"Idempotency-Key": key})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "idempotency-key"
    assert "1 to 255" in refused.json()["error"]["message"]


async def test_what_the_body_decides_is_kept_and_the_moment_is_not(api: ApiUnderTest) -> None:
    wrong: dict[str, Any] = TEXTS | {"input": []}
    for expected in (None, "true"):
        refused = await api.http.post("/v1/embeddings", json=wrong, headers=keyed("wrong"))
        assert (refused.status_code, refused.headers.get(REPLAYED)) == (400, expected)
    unknown = await api.http.post(
        "/v1/embeddings", json=TEXTS | {"model": "none"}, headers=keyed("unknown")
    )
    broken = await api.http.post(
        "/v1/embeddings", json=TEXTS | {"input": "broken"}, headers=keyed("broken")
    )
    assert (unknown.status_code, broken.status_code) == (404, 500)
    api.worker.broken.clear()
    mended = await api.http.post(
        "/v1/embeddings", json=TEXTS | {"input": "broken"}, headers=keyed("broken")
    )
    assert (mended.status_code, mended.headers.get(REPLAYED)) == (200, None)


async def test_deadline_frees_the_key(api: ApiUnderTest) -> None:
    api.worker.go.clear()
    late = await api.http.post(
        "/v1/embeddings", json=TEXTS, headers=keyed() | {"x-penstock-deadline-ms": "50"}
    )
    assert late.status_code == 504
    api.worker.go.set()
    again = await api.http.post("/v1/embeddings", json=TEXTS, headers=keyed())
    assert (again.status_code, again.headers.get(REPLAYED)) == (200, None)


async def test_large_answer_lies_in_the_object_store(api: ApiUnderTest, redis_url: str) -> None:
    many = TEXTS | {"input": [f"text {number}" for number in range(64)]}
    first, second = [
        await api.http.post("/v1/embeddings", json=many, headers=keyed()) for _ in range(2)
    ]
    assert len(first.content) > 100_000
    assert second.content == first.content
    with redis.Redis.from_url(redis_url) as client:
        kept = [client.hget(key, "answer") for key in client.scan_iter("penstock:answers:of:*")]
    assert len(kept) == 1
    assert len(kept[0] or b"") < 2000


async def test_openai_client_that_gives_up_and_retries_costs_one_inference(
    api: ApiUnderTest,
) -> None:
    api.worker.go.clear()
    client = api.openai(max_retries=2, timeout=2.0)
    running = asyncio.create_task(
        client.embeddings.create(
            model=TEXT_MODEL.name,
            input="a cat",
            extra_headers={"Idempotency-Key": "again", **UNCACHED},
        )
    )
    await api.worker.until_taken(1)
    await _until_seen(api, 2)  # the client hung up and tries again
    api.worker.go.set()
    reply = await running
    assert len(reply.data) == 1
    assert len(api.worker.jobs) == 1


async def test_openai_client_that_lost_the_answer_gets_it_again(api: ApiUnderTest) -> None:
    for _ in range(3):  # like the client's retries: the same POST with the same key
        client = api.openai()
        images = await client.images.generate(
            model=IMAGE_MODEL.name,
            prompt="a cat",
            extra_headers={"Idempotency-Key": "cat", **UNCACHED},
        )
        assert images.data[0].b64_json
    assert len(api.worker.jobs) == 1


async def test_form_is_the_same_whatever_its_boundary(api: ApiUnderTest) -> None:
    source = (
        (await api.openai().images.generate(model=IMAGE_MODEL.name, prompt="a cat"))
        .data[0]
        .b64_json
    )
    image = base64.b64decode(source)
    drawn = [
        await api.openai().images.edit(
            model=IMAGE_MODEL.name,
            prompt="a dog",
            image=image,
            extra_headers={"Idempotency-Key": "edit", **UNCACHED},
        )
        for _ in range(2)
    ]
    assert drawn[0].data[0].b64_json == drawn[1].data[0].b64_json
    assert len(api.worker.jobs) == 2
    with pytest.raises(openai.UnprocessableEntityError):
        await api.openai().images.edit(
            model=IMAGE_MODEL.name,
            prompt="a cow",
            image=image,
            extra_headers={"Idempotency-Key": "edit"},
        )


async def test_a_crowd_with_one_key_costs_one_inference(tmp_path: Path, redis_url: str) -> None:
    async with (
        two_apis(tmp_path, redis_url) as (first, url),
        httpx.AsyncClient(base_url=url, timeout=WAIT_LIMIT_S) as other,
    ):
        first.worker.go.clear()
        asked = [
            asyncio.create_task(http.post("/v1/embeddings", json=TEXTS, headers=keyed()))
            for _ in range(8)
            for http in (first.http, other)
        ]
        await first.worker.until_taken(1)
        first.worker.go.set()
        answers = await asyncio.gather(*asked)
        assert {answer.status_code for answer in answers} == {200}
        assert len({answer.content for answer in answers}) == 1
        assert (
            sorted(answer.headers.get(REPLAYED, "") for answer in answers) == [""] + ["true"] * 15
        )
        assert len(first.worker.jobs) == 1


async def test_second_waits_no_longer_than_its_own_deadline(tmp_path: Path, redis_url: str) -> None:
    async with (
        two_apis(tmp_path, redis_url) as (first, url),
        httpx.AsyncClient(base_url=url, timeout=WAIT_LIMIT_S) as other,
    ):
        first.worker.go.clear()
        running = asyncio.create_task(
            first.http.post("/v1/embeddings", json=TEXTS, headers=keyed())
        )
        await first.worker.until_taken(1)
        for http in (first.http, other):
            busy = await http.post(
                "/v1/embeddings", json=TEXTS, headers=keyed() | {"x-penstock-deadline-ms": "500"}
            )
            assert busy.status_code == 409
            assert busy.json()["error"]["code"] == "idempotency_key_in_use"
            assert int(busy.headers["retry-after"]) >= 1
        first.worker.go.set()
        assert (await running).status_code == 200


async def test_key_of_an_instance_that_is_cut_off_is_taken_over(
    tmp_path: Path, redis_url: str
) -> None:
    path, line = "/v1/images/generations", Line(redis_url)
    async with (
        line,
        two_apis(tmp_path, redis_url, way=line.url, idempotency_lease_s=0.4) as (first, url),
    ):
        first.worker.go.clear()
        running = asyncio.create_task(first.http.post(path, json=IMAGE, headers=keyed()))
        await first.worker.until_taken(1)
        line.cut()
        async with httpx.AsyncClient(base_url=url, timeout=WAIT_LIMIT_S) as other:
            taken_over = asyncio.create_task(other.post(path, json=IMAGE, headers=keyed()))
            await first.worker.until_taken(2)
            first.worker.go.set()
            answers = [await running, await taken_over]
            drawn, again = [answer.json()["data"][0]["b64_json"] for answer in answers]
            assert drawn == again
            later = await other.post(path, json=IMAGE, headers=keyed())
            assert (later.content, len(first.worker.jobs)) == (answers[1].content, 2)


async def test_lease_outlives_a_long_computation(tmp_path: Path, redis_url: str) -> None:
    async with two_apis(tmp_path, redis_url, idempotency_lease_s=1.0) as (first, url):
        first.worker.go.clear()
        running = asyncio.create_task(
            first.http.post("/v1/embeddings", json=TEXTS, headers=keyed())
        )
        await first.worker.until_taken(1)
        async with httpx.AsyncClient(base_url=url, timeout=WAIT_LIMIT_S) as other:
            waits = {"x-penstock-deadline-ms": "2500"}
            busy = await other.post("/v1/embeddings", json=TEXTS, headers=keyed() | waits)
            first.worker.go.set()
            assert (busy.status_code, (await running).status_code) == (409, 200)
            assert len(first.worker.jobs) == 1


async def test_first_answer_stays(redis_url: str) -> None:
    async with AsyncExitStack() as opened:
        one, two = [
            await opened.enter_async_context(IdempotencyStore(redis_url, keep_s=60, lease_s=0.05))
            for _ in range(2)
        ]
        assert await one.claim("n", "f", "c1") == KeyClaim("acquired", b"")
        async with asyncio.timeout(WAIT_LIMIT_S):
            while (await two.claim("n", "f", "c2")).state != "acquired":  # noqa: ASYNC110 - Redis's clock decides
                await asyncio.sleep(0.01)
        await one.release("n", "c1")  # the key is no longer its to release
        assert await one.complete("n", "acme", "f", "c1", b"late, but first") == b"late, but first"
        assert await two.complete("n", "acme", "f", "c2", b"second") == b"late, but first"
        assert await one.claim("n", "f", "c3") == KeyClaim("completed", b"late, but first")
        assert (await one.claim("n", "g", "c3")).state == "mismatch"


async def test_answers_are_kept_for_a_time(redis_url: str) -> None:
    async with IdempotencyStore(redis_url, keep_s=0.05, lease_s=5) as store:
        await store.claim("old", "f", "c1")
        await store.complete("old", "acme", "f", "c1", b"answer")
        async with asyncio.timeout(WAIT_LIMIT_S):
            while (await store.claim("old", "g", "c2")).state != "acquired":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    with redis.Redis.from_url(redis_url) as client:
        assert client.zcard("penstock:answers:ends") == 1


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path / "data", tmp_path / "log")
    server.start()
    yield server
    server.stop()


async def test_without_redis_only_keys_are_refused(tmp_path: Path, own_redis: RedisServer) -> None:
    async with running_api(settings_for(tmp_path, redis_url=own_redis.url)) as api:
        api.worker.go.clear()
        running = asyncio.create_task(
            api.http.post("/v1/embeddings", json=TEXTS, headers=keyed("before"))
        )
        await api.worker.until_taken(1)
        own_redis.stop()
        refused = await api.http.post("/v1/embeddings", json=TEXTS, headers=keyed())
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        api.worker.go.set()
        assert (await running).status_code == 200  # computed, although it can't be stored
        assert (
            await api.http.post("/v1/embeddings", json=TEXTS, headers=UNCACHED)
        ).status_code == 200
        assert len(api.worker.jobs) == 2


class Crowd:
    """Requests from several tenants, each repeating one key.

    Their responses wait until `done` is set.
    """

    def __init__(self, idempotency: IdempotencyService) -> None:
        self.idempotency = idempotency
        self.done = asyncio.Event()

    def ask(self, tenant: str, times: int) -> list[asyncio.Task[tuple[StoredResponse, bool]]]:
        request = IdempotentRequest(f"of {tenant}", tenant, "f")
        running = [self.idempotency.run(request, self._compute, WAIT_LIMIT_S) for _ in range(times)]
        return [asyncio.create_task(one) for one in running]

    async def _compute(self) -> StoredResponse:
        await self.done.wait()
        return StoredResponse(200, {}, 2, b"ok")


@pytest.fixture
async def crowd(redis_url: str) -> AsyncIterator[Crowd]:
    store = IdempotencyStore(redis_url, keep_s=60, lease_s=5)
    async with store, IdempotencyService(store, ObjectStore("memory://")) as idempotency:
        yield Crowd(idempotency)


@pytest.fixture
def room(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("api.idempotency.service.MAX_WAITING", request.param)
    return int(request.param)


@pytest.mark.parametrize("room", [2], indirect=True)
async def test_crowd_of_waiters_is_bounded(room: int, crowd: Crowd) -> None:
    asked = crowd.ask("acme", 5)
    over, _ = await asyncio.wait(asked, return_when="FIRST_EXCEPTION")
    assert all(isinstance(task.exception(), KeyInUse) for task in over)
    crowd.done.set()
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert sum(isinstance(result, tuple) for result in results) == 1 + room


@pytest.mark.parametrize("room", [8], indirect=True)
async def test_the_crowd_of_one_tenant_leaves_room_for_others(room: int, crowd: Crowd) -> None:
    asked = crowd.ask("acme", 20)
    await asyncio.wait(asked, return_when="FIRST_EXCEPTION")
    quiet = crowd.ask("brick", 2)
    async with asyncio.timeout(WAIT_LIMIT_S):
        while crowd.idempotency.waiting <= room and not any(one.done() for one in quiet):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    crowd.done.set()
    assert sorted(is_replayed for _, is_replayed in await asyncio.gather(*quiet)) == [False, True]
    refused = await asyncio.gather(*asked, return_exceptions=True)
    assert sum(isinstance(one, KeyInUse) for one in refused) == 20 - 1 - room


async def test_closing_frees_what_is_under_way(redis_url: str) -> None:
    computing = asyncio.Event()

    async def compute() -> StoredResponse:
        computing.set()
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    async with IdempotencyStore(redis_url, keep_s=60, lease_s=5) as store:
        async with IdempotencyService(store, ObjectStore("memory://")) as idempotency:
            running = asyncio.create_task(
                idempotency.run(IdempotentRequest("n", "acme", "f"), compute, 5)
            )
            await computing.wait()
        with pytest.raises(Unavailable):
            await running
        assert (await store.claim("n", "f", "other")).state == "acquired"


async def _until_seen(api: ApiUnderTest, posts: int) -> None:
    """Waits until `count` requests have arrived."""
    async with asyncio.timeout(WAIT_LIMIT_S):
        while api.dependencies.idempotency.waiting < posts - 1:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
