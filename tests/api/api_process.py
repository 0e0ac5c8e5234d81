"""The API as a real process whose keys are in Redis."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from infra.local.process import free_port
from tests.limits import START_LIMIT_S, WAIT_LIMIT_S

ROOT = Path(__file__).parents[2]


@dataclass
class ApiProcess:
    """A running process and all of its output."""

    url: str
    metrics_url: str
    log: Path
    spool: Path


@asynccontextmanager
async def api_process(
    tmp_path: Path, redis_url: str, pubsub: str, **settings: str
) -> AsyncIterator[ApiProcess]:
    """Runs the API. Yields once it responds."""
    port, metrics_port = free_port(), free_port()
    folder = tmp_path / f"api-{port}"
    folder.mkdir()
    given = {
        "PENSTOCK_KEYS_URL": redis_url,
        "PENSTOCK_REDIS_URL": redis_url,
        "PENSTOCK_PUBSUB_ENDPOINT": pubsub,
        "PENSTOCK_PROJECT": f"keys-{port}",
        "PENSTOCK_REPLY_SLOTS": "1",
        "PENSTOCK_OBJECTS_URL": f"file://{folder}/objects",
        "PENSTOCK_SPOOL_DIR": f"{folder}/spool",
        "PENSTOCK_BIGQUERY_ENDPOINT": "http://127.0.0.1:1",
        "PENSTOCK_PORT": str(port),
        "PENSTOCK_METRICS_PORT": str(metrics_port),
    } | settings
    made = ApiProcess(
        f"http://127.0.0.1:{port}",
        f"http://127.0.0.1:{metrics_port}/metrics",
        folder / "log",
        folder / "spool",
    )
    with made.log.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "api", cwd=ROOT, env=os.environ | given, stderr=log
        )
    try:
        async with httpx.AsyncClient() as http, asyncio.timeout(START_LIMIT_S):
            while not await _answers(http, made.url):
                assert process.returncode is None, made.log.read_text()
                await asyncio.sleep(0.05)
        yield made
    finally:
        process.terminate()
        await asyncio.wait_for(process.wait(), WAIT_LIMIT_S)


async def _answers(http: httpx.AsyncClient, url: str) -> bool:
    try:
        await http.get(f"{url}/livez")
    except httpx.TransportError:
        return False
    return True
