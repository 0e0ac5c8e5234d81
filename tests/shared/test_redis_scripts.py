"""Scripts run by their digest, and keep working after Redis has restarted and forgotten them.

A canceled round trip leaves nothing behind, and neither does one that a closed link interrupts.
"""

import asyncio
import gc
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import redis
from hatchling.builders.wheel import WheelBuilder

from infra.local.redis_server import RedisServer
from shared.errors import Unavailable
from shared.stores.redis_client import RedisLink, within
from shared.stores.withdrawals import ERRORS, UP
from tests.gated_link import gated_redis
from tests.limits import REDIS_LIMIT_S
from tests.record_stores import RecordStores

ROOT = Path(__file__).resolve().parents[2]


def commands(server: RedisServer) -> dict[str, int]:
    """How many times the server ran EVAL and EVALSHA."""
    with redis.Redis.from_url(server.url) as client:
        stats: Any = client.info("commandstats")
    return {
        name: stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("eval", "evalsha")
    }


async def create(stores: RecordStores, name: str) -> bool:
    return bool(
        await stores.predictions.create(name, "acme", b"{}", deadline_s=time.time() + 60, keep_s=60)
    )


@pytest.mark.anyio
async def test_text_of_a_script_is_sent_once(own_redis: RedisServer) -> None:
    async with RecordStores(own_redis.url) as stores:
        for number in range(5):
            assert await create(stores, f"req_{number}")
            await stores.records.claim([f"req_{number}"])
    assert commands(own_redis) == {"eval": 2, "evalsha": 10}


@pytest.mark.anyio
async def test_restarted_redis_learns_the_scripts_again(own_redis: RedisServer) -> None:
    async with RecordStores(own_redis.url, retry_s=0.01) as stores:
        assert await create(stores, "before")
        assert (await stores.records.claim(["before"]))[0] is not None
        own_redis.kill()
        await stores.records.claim(["before"])
        own_redis.start()
        assert await stores.records.wait_up(8)
        names = [f"req_{number}" for number in range(20)]
        assert all(await asyncio.gather(*(create(stores, name) for name in names)))
        claims = await asyncio.gather(*(stores.records.claim([name]) for name in names))
        assert [claim.attempt for (claim,) in claims if claim is not None] == [1] * 20
        assert not any(await asyncio.gather(*(create(stores, name) for name in ["before", *names])))
        finish = await stores.records.finish("before", "succeeded", b"{}")
        assert finish is not None
        assert finish.is_ours


@pytest.mark.anyio
async def test_error_of_a_canceled_round_trip_is_not_reported_as_lost() -> None:
    """The store closes in the same event loop iteration in which Redis refuses a connection."""
    lost: list[object] = []
    loop = asyncio.get_running_loop()
    usual = loop.get_exception_handler()
    loop.set_exception_handler(lambda _, context: lost.append(context.get("exception")))
    refused = asyncio.Event()

    async def ping() -> None:
        await refused.wait()
        raise redis.ConnectionError("connection refused")

    try:
        asking = asyncio.ensure_future(within(60, ping()))
        await asyncio.sleep(0)  # `within` starts the round trip
        await asyncio.sleep(0)  # the round trip waits for `refused`
        refused.set()
        await asyncio.sleep(0)  # it has failed, but its caller doesn't know yet
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        del asking
        gc.collect()
        await asyncio.sleep(0)
    finally:
        loop.set_exception_handler(usual)
    assert lost == []


def test_wheel_carries_every_script(tmp_path: Path) -> None:
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    carried = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".lua")}
    packages = (path for path in ROOT.iterdir() if (path / "__init__.py").is_file())
    scripts = {
        str(path.relative_to(ROOT)) for package in packages for path in package.rglob("*.lua")
    }
    assert carried == scripts
    assert len(scripts) > 10


@pytest.mark.anyio
async def test_link_that_is_opened_again_does_not_mix_up_replies(redis_url: str) -> None:
    """The round trip that closing the link interrupts ends once the link is open again."""
    async with gated_redis(redis_url) as (gate, url):
        link = RedisLink("test", url, timeout_s=REDIS_LIMIT_S, up=UP, errors=ERRORS)
        commands = link.commands("the store")

        async def echo(word: str, iterations: int) -> Any:
            for _ in range(iterations):
                await asyncio.sleep(0)
            return await commands.run("ECHO", word)

        async with link:
            assert await echo("warm", 0) == b"warm"
            gate.close()
            lost = asyncio.create_task(echo("lost", 0))
            await gate.asked.wait()
        gate.open()
        async with link:
            others = [asyncio.create_task(echo(str(number), number)) for number in range(4)]
            assert await echo("first", 0) == b"first"
            assert await asyncio.gather(*others) == [b"0", b"1", b"2", b"3"]
        with pytest.raises(Unavailable):
            await lost
