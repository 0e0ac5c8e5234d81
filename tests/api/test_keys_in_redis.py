"""Keys in Redis: several processes share them, and a Redis outage neither lets a caller in nor
locks one out.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from api.http.auth import ApiKeys
from api.http.key_refresh import READ_LIMIT_S, REFRESH_S, STALE_LIMIT_S, LiveDirectory
from infra.local.redis_server import RedisServer
from shared.stores.key_stores import KeyCopy, KeyRedis
from shared.tenants.administration import Administration, IssuedKey, KeyRequest
from shared.tenants.directory import Document
from tests.api.api_process import api_process
from tests.api.harness import ApiUnderTest, running_api, settings_for
from tests.limits import WAIT_LIMIT_S

pytestmark = [pytest.mark.slow, pytest.mark.anyio]


@asynccontextmanager
async def administering(url: str) -> AsyncIterator[Administration]:
    async with KeyRedis(url, timeout_s=WAIT_LIMIT_S) as store:
        yield Administration(store, actor="user ann", address="desk")


async def first_key(url: str) -> IssuedKey:
    async with administering(url) as admin:
        await admin.start_directory(Document())
        return await admin.create_key(KeyRequest("acme", "ci"))


async def until_status(http: httpx.AsyncClient, url: str, key: str, status: int) -> None:
    async with asyncio.timeout(WAIT_LIMIT_S):
        while True:
            answer = await http.get(f"{url}/v1/models", headers={"x-api-key": key})
            if answer.status_code == status:
                return
            await asyncio.sleep(0.05)


def test_changes_are_read_within_five_seconds() -> None:
    assert REFRESH_S + READ_LIMIT_S < 5.0


async def test_revoked_key_is_refused_by_all_processes(
    tmp_path: Path, redis_url: str, pubsub_endpoint: str
) -> None:
    issued = await first_key(redis_url)
    key = issued.key.text
    async with (
        api_process(tmp_path, redis_url, pubsub_endpoint) as one,
        api_process(tmp_path, redis_url, pubsub_endpoint) as two,
        administering(redis_url) as admin,
        httpx.AsyncClient() as http,
    ):
        await asyncio.gather(*(until_status(http, api.url, key, 200) for api in (one, two)))
        second = await admin.rotate_key(issued.key.id, 0)
        await asyncio.gather(*(until_status(http, api.url, key, 401) for api in (one, two)))
        new = second.key.text
        await asyncio.gather(*(until_status(http, api.url, new, 200) for api in (one, two)))
        await admin.revoke_key(issued.key.id)
        await asyncio.gather(*(until_status(http, api.url, new, 401) for api in (one, two)))


async def test_key_works_in_the_next_line_of_a_script(tmp_path: Path, redis_url: str) -> None:
    """The key was created from the command line or on another instance, and works immediately."""
    await first_key(redis_url)
    async with (
        running_api(settings_for(tmp_path, keys_url=redis_url)) as api,
        administering(redis_url) as admin,
    ):
        issued = await admin.create_key(KeyRequest("acme", "ci"))
        headers = {"x-api-key": issued.key.text}
        assert (await api.http.get("/v1/models", headers=headers)).status_code == 200
        assert (await api.http.get("/v1/account", headers=headers)).status_code == 200


async def test_starts_before_there_are_keys_and_is_ready_with_them(
    tmp_path: Path, redis_url: str
) -> None:
    settings = settings_for(tmp_path, keys_url=redis_url)
    async with running_api(settings) as api:
        assert await keys_of(api) == (503, "Redis contains no API keys; run `penstock keys "
                                      "init` to create a key directory")  # fmt: skip
        issued = await first_key(redis_url)
        refused = await api.http.get("/v1/models", headers={"x-api-key": issued.key.text})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
        assert refused.headers["retry-after"]
        directory = live(api)
        await directory.refresh()
        accepted = await api.http.get("/v1/models", headers={"x-api-key": issued.key.text})
        assert accepted.status_code == 200


async def keys_of(api: ApiUnderTest) -> tuple[int, str]:
    answer = await api.http.get("/readyz")
    return answer.status_code, answer.json()["keys"]


def live(api: ApiUnderTest) -> LiveDirectory:
    access = api.dependencies.access
    assert isinstance(access, ApiKeys)
    return access.directory


async def test_keys_outlive_redis_and_a_redis_that_lost_its_data(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis", tmp_path) as server:
        issued = await first_key(server.url)
        headers = {"x-api-key": issued.key.text}
        async with running_api(settings_for(tmp_path, keys_url=server.url)) as api:
            assert (await api.http.get("/v1/models", headers=headers)).status_code == 200
            server.stop()
            await live(api).refresh()
            assert (await api.http.get("/v1/models", headers=headers)).status_code == 200
            server.start()
            async with KeyRedis(server.url, timeout_s=WAIT_LIMIT_S) as store:
                assert await store.wait_up(WAIT_LIMIT_S)
            await live(api).refresh()
            assert (await api.http.get("/v1/models", headers=headers)).status_code == 200
            assert (await keys_of(api))[1] == "ok"


async def test_instance_that_starts_while_keys_are_out_of_reach_has_its_neighbors(
    tmp_path: Path, redis_url: str
) -> None:
    """Simulates a region whose home region, where the Redis with the records runs, is down."""
    with RedisServer(tmp_path / "records", tmp_path) as records:
        issued = await first_key(records.url)
        settings = settings_for(tmp_path, keys_url=records.url, redis_url=redis_url)
        headers = {"x-api-key": issued.key.text}
        async with running_api(settings) as api:
            assert (await api.http.get("/v1/models", headers=headers)).status_code == 200
        records.stop()
        async with running_api(settings) as api:
            assert (await keys_of(api))[1] == "ok"
            assert (await api.http.get("/v1/models", headers=headers)).status_code == 200
            wrong = {"x-api-key": issued.key.text[:-4] + "0000"}
            assert (await api.http.get("/v1/models", headers=wrong)).status_code == 401


@pytest.mark.parametrize(("age_s", "is_used"), [(60, True), (STALE_LIMIT_S + 60, False)])
async def test_copy_of_keys_ends_with_the_day(redis_url: str, age_s: float, is_used: bool) -> None:
    await first_key(redis_url)
    async with KeyRedis(redis_url) as store, KeyCopy(redis_url) as copy:
        document = await store.read()
        assert document is not None
        await copy.keep(document, time.time() - age_s, STALE_LIMIT_S)
    elsewhere = KeyRedis("redis://127.0.0.1:1/0")
    directory = LiveDirectory(elsewhere, refresh_s=1e6, copy=KeyCopy(redis_url))
    async with ApiKeys(directory) as keys:
        assert (keys.keys_status() == "ok") == is_used


async def test_last_use_is_noted_once_a_minute(redis_url: str) -> None:
    issued = await first_key(redis_url)
    now_s = 1_000.0
    async with KeyRedis(redis_url) as store:
        directory = LiveDirectory(KeyRedis(redis_url), lambda: now_s, refresh_s=1e6)
        async with ApiKeys(directory, lambda: now_s) as keys:
            for _ in range(3):
                now_s += 1
                keys.caller_of([(b"x-api-key", issued.key.text.encode())])
            assert await store.uses() == {}
            await directory.note_uses()
            assert await store.uses() == {issued.key.id: 1_003}
            now_s += 1
            keys.caller_of([(b"x-api-key", issued.key.text.encode())])
        assert await store.uses() == {issued.key.id: 1_004}  # written when the API shuts down
