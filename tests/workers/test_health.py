"""The health endpoint reports on the loop and the worker, from its own thread."""

from __future__ import annotations

import asyncio
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from tests.kept_spans import new_trace
from tests.limits import WAIT_LIMIT_S
from workers.health import health_server
from workers.metrics import INFERENCE_SECONDS


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def status(port: int, path: str) -> int:
    try:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{port}{path}", timeout=WAIT_LIMIT_S
        ) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def test_ready_follows_the_worker(loop: asyncio.AbstractEventLoop) -> None:
    ready = threading.Event()
    with health_server("127.0.0.1", 0, loop, ready.is_set) as port:
        assert status(port, "/readyz") == 503
        ready.set()
        assert status(port, "/readyz") == 200


def test_alive_while_the_loop_turns(loop: asyncio.AbstractEventLoop) -> None:
    with health_server("127.0.0.1", 0, loop, lambda: False) as port:
        assert [status(port, path) for path in ("/livez", "/healthz")] == [200, 200]
        assert status(port, "/elsewhere") == 404


def test_not_alive_when_the_loop_is_stuck(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.health.LOOP_LIMIT_S", 0.2)
    release = threading.Event()
    with health_server("127.0.0.1", 0, loop, lambda: True) as port:
        loop.call_soon_threadsafe(release.wait)
        try:
            assert status(port, "/livez") == 503
        finally:
            release.set()


def test_metrics_are_scraped(loop: asyncio.AbstractEventLoop) -> None:
    with (
        health_server("127.0.0.1", 0, loop, lambda: True) as port,
        urllib.request.urlopen(
            f"http://127.0.0.1:{port}/metrics", timeout=WAIT_LIMIT_S
        ) as response,
    ):
        assert b"python_info" in response.read()


def test_scraper_that_takes_open_metrics_gets_exemplars(loop: asyncio.AbstractEventLoop) -> None:
    trace = new_trace()
    INFERENCE_SECONDS.labels("a").observe(0.5, trace.exemplar)
    asked = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"}
    with health_server("127.0.0.1", 0, loop, lambda: True) as port:
        url = f"http://127.0.0.1:{port}/metrics"
        with urllib.request.urlopen(
            urllib.request.Request(url, headers=asked), timeout=WAIT_LIMIT_S
        ) as answer:
            assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
            assert trace.trace_id in answer.read().decode()
        with urllib.request.urlopen(url, timeout=WAIT_LIMIT_S) as answer:
            assert trace.trace_id not in answer.read().decode()
