"""Engines' own metrics are among the worker's, in both text formats."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_strictly

from tests.workers.models.generation.fake_engine import Server
from workers.models.engines.engine_metrics import EngineMetrics, MetricsEndpoint

KEY = "the-key"
OF_VLLM = """\
# HELP python_info Python platform information
# TYPE python_info gauge
python_info{{implementation="CPython"}} 1.0
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0",model_name="/models/folder"}} {usage}
# HELP vllm:num_preemptions_total Cumulative number of preemption from the engine.
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{{engine="0",model_name="/models/folder"}} 3.0
# HELP vllm:num_preemptions_created Cumulative number of preemption from the engine.
# TYPE vllm:num_preemptions_created gauge
vllm:num_preemptions_created{{engine="0",model_name="/models/folder"}} 1.7e+09
# HELP vllm:time_to_first_token_seconds Histogram of time to first token in seconds.
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{{engine="0",le="+Inf",model_name="/models/folder"}} 0.0
"""
"""Shortened output of vLLM 0.32."""


@contextmanager
def serving(folder: Path, name: str, body: str) -> Iterator[MetricsEndpoint]:
    """An engine's server, which rejects other keys and paths."""

    class Engine(BaseHTTPRequestHandler):
        """One request."""

        def address_string(self) -> str:
            return ""

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            is_right = (self.path, self.headers["Authorization"]) == ("/metrics", f"Bearer {KEY}")
            self.send_response(200 if is_right else 401)
            self.end_headers()
            self.wfile.write(body.encode())

    path = str(folder / name)
    with Server(path, Engine) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield MetricsEndpoint(path, KEY)
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def folder() -> Iterator[Path]:
    """Paths of sockets must be short."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        yield Path(name)


def read_of(metrics: EngineMetrics) -> str:
    registry = CollectorRegistry()
    registry.register(metrics)
    strict = openmetrics.generate_latest(registry).decode()  # type: ignore[no-untyped-call]
    families = read_strictly(strict)  # type: ignore[no-untyped-call]
    assert {family.name for family in families} == {family.name for family in registry.collect()}
    return generate_latest(registry).decode()


def test_metrics_of_all_engines_have_the_labels_of_the_worker(folder: Path) -> None:
    metrics = EngineMetrics()
    with (
        serving(folder, "one", OF_VLLM.format(usage=0.25)) as first,
        serving(folder, "two", OF_VLLM.format(usage=0.5)) as second,
    ):
        metrics.add(first, "chat", "cuda:0")
        metrics.add(second, "chat", "cuda:1")
        lines = read_of(metrics).splitlines()
        assert [line for line in lines if not line.startswith("#")] == [
            'penstock_engine_kv_cache_usage_perc{device="cuda:0",model="chat"} 0.25',
            'penstock_engine_kv_cache_usage_perc{device="cuda:1",model="chat"} 0.5',
            'penstock_engine_num_preemptions_total{device="cuda:0",model="chat"} 3.0',
            'penstock_engine_num_preemptions_total{device="cuda:1",model="chat"} 3.0',
        ]
        metrics.remove(first)
        assert 'device="cuda:0"' not in read_of(metrics)


@pytest.mark.parametrize("body", ["{", "vllm:kv_cache_usage_perc{ 1"])
def test_an_engine_that_cannot_be_read_does_not_hide_the_others(folder: Path, body: str) -> None:
    metrics = EngineMetrics()
    metrics.add(MetricsEndpoint(str(folder / "nobody"), KEY), "gone", "cpu")
    with (
        serving(folder, "bad", body) as bad,
        serving(folder, "good", OF_VLLM.format(usage=1)) as good,
        serving(folder, "other", OF_VLLM.format(usage=1)) as other,
    ):
        metrics.add(bad, "bad", "cpu")
        metrics.add(MetricsEndpoint(other.socket_path, "another key"), "locked", "cpu")
        metrics.add(good, "good", "cpu")
        found = read_of(metrics)
    assert 'model="good"' in found
    assert 'model="bad"' not in found
    assert 'model="locked"' not in found
