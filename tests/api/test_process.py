"""`penstock api` as a separate process with the embedded Pub/Sub and a worker at the other end."""

import asyncio
import os
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

import httpx
import numpy as np
import pytest

from infra.local.process import free_port
from shared.broker.pubsub.admin import PubSubAdmin
from shared.broker.pubsub.client import PubSubTransport
from shared.models.tasks.embedding import TextInput
from shared.stores.redis_client import NO_REDIS
from tests.api.fake_worker import FakeWorker, vector_of
from tests.api.harness import CATALOG, TEXT_MODEL
from tests.limits import START_LIMIT_S, WAIT_LIMIT_S

pytestmark = [pytest.mark.slow, pytest.mark.anyio]
BODY = {"model": TEXT_MODEL.name, "input": "a"}
ROOT = Path(__file__).parents[2]
MEMORY_LIMIT_KB = 250 * 1024


@dataclass
class RunningApi:
    process: Process
    worker: FakeWorker
    http: httpx.AsyncClient
    log: Path
    metrics_url: str


@asynccontextmanager
async def _api(pubsub_endpoint: str, folder: Path) -> AsyncIterator[RunningApi]:
    project, port, log = f"p-{uuid4().hex[:8]}", free_port(), folder / "api.log"
    metrics_port = free_port()
    environment = os.environ | {
        "PENSTOCK_PROJECT": project,
        "PENSTOCK_PUBSUB_ENDPOINT": pubsub_endpoint,
        "PENSTOCK_BIGQUERY_ENDPOINT": "http://127.0.0.1:1",
        "PENSTOCK_REDIS_URL": NO_REDIS,
        "PENSTOCK_OBJECTS_URL": f"file://{folder}/objects",
        "PENSTOCK_SPOOL_DIR": str(folder / "spool"),
        "PENSTOCK_PORT": str(port),
        "PENSTOCK_METRICS_PORT": str(metrics_port),
        "PENSTOCK_REPLY_SLOTS": "8",
    }
    async with AsyncExitStack() as opened:
        transport = await opened.enter_async_context(PubSubTransport(project, pubsub_endpoint))
        admin = await opened.enter_async_context(PubSubAdmin(project, pubsub_endpoint))
        worker = await opened.enter_async_context(
            FakeWorker(transport, CATALOG.models).running(admin)
        )
        http = await opened.enter_async_context(
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=WAIT_LIMIT_S)
        )
        with _opened(log) as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "infra.cli.main", "api"),
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=output,
            )
        try:
            await _until_ready(process, http, log)
            yield RunningApi(process, worker, http, log, f"http://127.0.0.1:{metrics_port}/metrics")
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


def _opened(log: Path) -> BinaryIO:
    return log.open("wb")


async def _until_ready(process: Process, http: httpx.AsyncClient, log: Path) -> None:
    async with asyncio.timeout(START_LIMIT_S):
        while True:
            assert process.returncode is None, _said(log)
            try:
                if (await http.get("/readyz")).status_code == 200:
                    return
            except httpx.TransportError:
                await asyncio.sleep(0.02)


def _said(log: Path) -> str:
    return log.read_text()


def _resident_kb(pid: int) -> int:
    return int(Path(f"/proc/{pid}/status").read_text().partition("VmRSS:")[2].split()[0])


async def test_serves_over_pubsub_in_little_memory_and_stops_cleanly(
    pubsub_endpoint: str, tmp_path: Path
) -> None:
    async with _api(pubsub_endpoint, tmp_path) as api:
        response = await api.http.post("/v1/embeddings", json=BODY)
        assert response.status_code == 200, _said(api.log)
        vector = np.float32(response.json()["data"][0]["embedding"])
        assert np.array_equal(vector, vector_of(TextInput("a")))
        assert "penstock_api_requests_total{" in (await api.http.get(api.metrics_url)).text
        if sys.platform == "linux":
            assert _resident_kb(api.process.pid) < MEMORY_LIMIT_KB
        api.process.terminate()
        assert await asyncio.wait_for(api.process.wait(), WAIT_LIMIT_S) == 0, _said(api.log)


async def test_finishes_what_is_in_hand_when_told_to_stop(
    pubsub_endpoint: str, tmp_path: Path
) -> None:
    async with _api(pubsub_endpoint, tmp_path) as api:
        api.worker.go.clear()
        request = asyncio.create_task(api.http.post("/v1/embeddings", json=BODY))
        await api.worker.until_taken(1)
        api.process.terminate()
        # From now on it accepts no new connections, but still waits for the reply.
        await _until_refused(api.http.base_url)
        api.worker.go.set()
        assert (await request).status_code == 200
        assert await asyncio.wait_for(api.process.wait(), WAIT_LIMIT_S) == 0, _said(api.log)


async def _until_refused(url: httpx.URL) -> None:
    async with asyncio.timeout(WAIT_LIMIT_S):
        while True:
            try:
                _, writer = await asyncio.open_connection(url.host, url.port)
            except OSError:
                return
            writer.close()
            await asyncio.sleep(0.01)


async def test_collector_that_never_answers_holds_nothing_up(
    pubsub_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = asyncio.Event()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        called.set()
        await reader.read()
        writer.close()

    collector = await asyncio.start_server(hang, "127.0.0.1", 0)
    port = collector.sockets[0].getsockname()[1]
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3600")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "1")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    async with collector, _api(pubsub_endpoint, tmp_path) as api:
        assert (await api.http.post("/v1/embeddings", json=BODY)).status_code == 200
        await asyncio.wait_for(called.wait(), WAIT_LIMIT_S)
        assert (await api.http.post("/v1/embeddings", json=BODY)).status_code == 200
        api.process.terminate()
        assert await asyncio.wait_for(api.process.wait(), WAIT_LIMIT_S) == 0, _said(api.log)


async def test_wrong_setting_is_told_in_one_line(tmp_path: Path) -> None:
    environment = os.environ | {
        "PENSTOCK_KEYS_URL": "nonsense",
        "PENSTOCK_OBJECTS_URL": f"file://{tmp_path}",
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "api", cwd=ROOT, env=environment, stderr=asyncio.subprocess.PIPE
    )
    _, errors = await asyncio.wait_for(process.communicate(), START_LIMIT_S)
    assert process.returncode == 1
    assert errors.decode() == (
        "penstock api: PENSTOCK_KEYS_URL: must be file:///PATH, redis://HOST or rediss://HOST\n"
    )


async def test_neither_model_library_nor_decoder_nor_http_client_is_imported() -> None:
    unwanted = {"torch", "transformers", "diffusers", "tokenizers", "sentence_transformers", "PIL"}
    assert not await _imported("import api.__main__") & (unwanted | {"aiohttp"})


@pytest.mark.parametrize(
    ("broker", "client", "other"),
    [("", "grpc", "aiormq"), ("rabbitmq://guest:guest@127.0.0.1", "aiormq", "grpc")],
)
async def test_only_the_client_of_its_own_broker_is_imported(
    broker: str, client: str, other: str
) -> None:
    code = f"""
from shared.brokers import admin_of, transport_of
from shared.settings import ApiSettings

settings = ApiSettings(broker={broker!r})
transport_of(settings), admin_of(settings)
"""
    loaded = await _imported(code)
    assert client in loaded
    assert other not in loaded


async def _imported(code: str) -> set[str]:
    """The packages loaded by a new process that runs `code`."""
    code += "\nimport sys; print(*{name.partition('.')[0] for name in sys.modules})"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await asyncio.wait_for(process.communicate(), START_LIMIT_S)
    assert process.returncode == 0
    return set(output.decode().split())
