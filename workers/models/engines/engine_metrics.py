"""Engines' own metrics, among the worker's metrics.

`vllm:NAME` becomes `penstock_engine_NAME`, because prometheus_client writes colons only for some
scrapers. The labels are replaced by `model` and `device`, because vLLM's contain a folder.
"""

from __future__ import annotations

import http.client
import logging
import socket
import threading
from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client import REGISTRY, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

PATH = "/metrics"
READ_LIMIT_S = 2.0
NAMES = frozenset(
    {
        "vllm:kv_cache_usage_perc",
        "vllm:num_preemptions",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:prefix_cache_hits",
        "vllm:prefix_cache_queries",
    }
)
"""The metrics to pass on. Counters are listed without `_total`."""
CACHE_METRIC = "vllm:cache_config_info{"
ENGINE_PREFIX, PREFIX = "vllm:", "penstock_engine_"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MetricsEndpoint:
    """An engine's metrics endpoint: the Unix socket of its server, and the server's key."""

    socket_path: str
    key: str


class EngineMetrics(Collector):
    """Reads the running engines' metrics whenever the worker's metrics are read."""

    def __init__(self) -> None:
        self._labels: dict[MetricsEndpoint, dict[str, str]] = {}
        self._lock = threading.Lock()
        """The event loop adds and removes engines while other threads read."""

    def add(self, endpoint: MetricsEndpoint, model: str, device: str) -> None:
        with self._lock:
            self._labels[endpoint] = {"model": model, "device": device}

    def remove(self, endpoint: MetricsEndpoint) -> None:
        with self._lock:
            self._labels.pop(endpoint, None)

    def describe(self) -> Iterable[Metric]:
        """Returns nothing, so that registering does not read any engine."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Reads every engine. An engine that does not respond in time is left out."""
        with self._lock:
            engines = dict(self._labels)
        merged: dict[str, Metric] = {}
        for endpoint, labels in engines.items():
            try:
                families = list(text_string_to_metric_families(_read(endpoint)))
            except (OSError, http.client.HTTPException, ValueError) as error:
                log.warning("engine's metrics not read", extra={**labels, "reason": repr(error)})
                continue
            for family in families:
                if family.name in NAMES:
                    name = _rename(family.name)
                    passed_on = merged.setdefault(
                        name, Metric(name, family.documentation, family.type)
                    )
                    for sample in family.samples:
                        if not sample.name.endswith("_created"):
                            passed_on.add_sample(_rename(sample.name), labels, sample.value)
        return merged.values()


ENGINES = EngineMetrics()
REGISTRY.register(ENGINES)


def read_cache_tokens(text: str) -> int | None:
    """Returns how many tokens' keys and values fit in vLLM's cache. None if not in its metrics."""
    for line in text.splitlines():
        if line.startswith(CACHE_METRIC):
            (family,) = text_string_to_metric_families(line)
            # Unlike the number of blocks, it is also correct for hybrid models.
            tokens = family.samples[0].labels.get("kv_cache_size_tokens", "")
            return int(tokens) if tokens.isdigit() else None
    return None


def _rename(name: str) -> str:
    return PREFIX + name.removeprefix(ENGINE_PREFIX)


def _read(endpoint: MetricsEndpoint) -> str:
    """Returns an engine's metrics in Prometheus' text format.

    Raises:
        OSError: the engine does not respond in time.
        http.client.HTTPException, ValueError: the response is invalid.
    """
    connection = http.client.HTTPConnection("engine", timeout=READ_LIMIT_S)
    try:
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(READ_LIMIT_S)
        connection.sock.connect(endpoint.socket_path)
        connection.request("GET", PATH, headers={"Authorization": f"Bearer {endpoint.key}"})
        response = connection.getresponse()
        if response.status != 200:
            raise ValueError(f"status {response.status}")
        return response.read().decode()
    finally:
        connection.close()
