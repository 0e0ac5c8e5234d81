"""The measured pipeline: the `penstock up` stack and the costs of its processes."""

from __future__ import annotations

import os
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psutil
import yaml
from google.auth.credentials import AnonymousCredentials
from google.cloud import bigquery
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from bench.load.generator import LoadOrder, LoadReport, drive, embedding_bodies
from bench.load.texts import Texts
from infra.local.ports import Ports
from infra.local.process import Process, answers, free_port
from infra.local.stack import Broker, Stack
from infra.local.up import build_stack
from shared.errors import ConfigurationError
from shared.models.catalog_file import read_catalog
from shared.settings import WorkerSettings, environment_with, read_settings
from workers.models.artifact import find_artifact, source_digest
from workers.models.backend import Backend
from workers.models.source import resolve

MODEL = "all-MiniLM-L6-v2"
MODELS_FILE = Path("models.yaml")
BROKER: Broker = "rabbitmq" if os.environ.get("BENCH_BROKER") == "rabbitmq" else "pubsub"
"""The measured stack's broker. Uses the embedded Pub/Sub by default."""
READY_LIMIT_S = 60.0
SCRAPE_LIMIT_S = 5.0
WARM_UP_TEXTS = 256
POLL_S = 0.25


class Part:
    """One process in the pipeline, identified by the port on 127.0.0.1 that it listens on."""

    def __init__(self, port: int) -> None:
        self.port = port
        listening = [
            connection
            for connection in psutil.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        ]
        self.pid = next(
            connection.pid
            for connection in listening
            if connection.pid and getattr(connection.laddr, "port", 0) == port
        )
        self._process = psutil.Process(self.pid)

    def cpu_s(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def children_cpu_s(self) -> float:
        times = [child.cpu_times() for child in self._process.children(recursive=True)]
        return float(sum(child_times.user + child_times.system for child_times in times))

    def rss_bytes(self) -> int:
        return int(self._process.memory_info().rss)

    def image_rss_bytes(self) -> list[int]:
        """Returns the resident memory of each of an API's child processes (image processes)."""
        return [int(child.memory_info().rss) for child in self._process.children(recursive=True)]


def samples_of(port: int) -> Iterator[Sample]:
    url = f"http://127.0.0.1:{port}/metrics"
    with urllib.request.urlopen(url, timeout=SCRAPE_LIMIT_S) as answer:
        for family in text_string_to_metric_families(answer.read().decode()):
            yield from family.samples


class Parts:
    """A stack's processes."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.api = Part(stack.ports.api)
        self.worker = Part(stack.ports.health[0])
        is_rabbit = stack.broker == "rabbitmq"
        self._broker = Part(stack.ports.rabbitmq if is_rabbit else stack.ports.pubsub)
        self._redis = Part(stack.ports.redis)
        self._bigquery = Part(stack.ports.bigquery)

    def cpu_s(self) -> dict[str, float]:
        return {
            "API": self.api.cpu_s(),
            "broker": self._broker.cpu_s(),
            "worker, I/O": self.worker.cpu_s(),
            "worker, model": self.worker.children_cpu_s(),
            "Redis": self._redis.cpu_s(),
            "BigQuery": self._bigquery.cpu_s(),
        }


class Pipeline(Parts):
    """The running pipeline, its parts, and texts it has not seen."""

    def __init__(self, stack: Stack, texts: Texts, model_folder: Path) -> None:
        super().__init__(stack)
        self.texts = texts
        self.model_folder = model_folder

    def ask(self, texts: list[str], in_flight: int) -> LoadReport:
        """Sends one request per text to the API.

        Raises:
            RuntimeError: the model did not respond to every request.
        """
        report = drive(LoadOrder(self.api.port, embedding_bodies(MODEL, texts), in_flight))
        if report.statuses() != {200: len(texts)} or report.hits() != {"miss": len(texts)}:
            statuses = f"{report.statuses()} {report.hits()}"
            raise RuntimeError(f"expected {len(texts)} computed responses, got {statuses}")
        return report

    def usage_rows(
        self, columns: Sequence[str], request_ids: set[str], limit_s: float
    ) -> list[dict[str, Any]]:
        """Returns the requests' rows once BigQuery has one for each, or after `limit_s`."""
        settings = self.stack.settings
        client = bigquery.Client(
            project=settings.project,
            credentials=AnonymousCredentials(),
            client_options={"api_endpoint": settings.bigquery_endpoint},
        )
        query = (
            f"SELECT request_id, {', '.join(columns)} FROM `{settings.dataset}.rows` "
            "WHERE received_at >= TIMESTAMP_SUB(CURRENT_TIMESTAMP(), INTERVAL 1 DAY)"
        )
        end_s = time.monotonic() + limit_s
        while True:
            result = client.query(query).result(timeout=limit_s)
            rows = [dict(row) for row in result if row["request_id"] in request_ids]
            if len(rows) >= len(request_ids) or time.monotonic() > end_s:
                return rows
            time.sleep(POLL_S)

    def work(self) -> tuple[float, float]:
        """Returns the number of tokens that the worker has processed, without and with padding."""
        values = {sample.name: sample.value for sample in samples_of(self.worker.port)}
        real, padded = (f"penstock_worker_{kind}_work_total" for kind in ("real", "padded"))
        return values[real], values[padded]

    def backend(self) -> Backend:
        """Returns the worker's backend, from its metrics.

        An ONNX graph is looked up in the same place as in the worker.
        """
        samples = samples_of(self.worker.port)
        labels = next(
            sample.labels for sample in samples if sample.name == "penstock_worker_backend_info"
        )
        named = msgspec.convert({name: labels[name] for name in ("backend", "precision")}, Backend)
        if named.backend == "torch":
            return named
        settings = read_settings(WorkerSettings, model=MODEL)
        model = read_catalog(MODELS_FILE).find(MODEL)
        artifact = find_artifact(
            settings.artifacts_dir, MODEL, source_digest(self.model_folder, model.revision)
        )
        if artifact is None:
            raise ConfigurationError(
                f"no artifact for {MODEL} in {settings.artifacts_dir}", field="artifacts_dir"
            )
        variant = next(
            candidate
            for candidate in artifact.manifest.variants
            if candidate.precision == named.precision
        )
        graph = str(artifact.graph(variant).resolve())
        return msgspec.structs.replace(named, variant=variant.name, graph=graph)

    @contextmanager
    def another_api(self) -> Iterator[Part]:
        port = free_port()
        # The stack already uses its own metrics port.
        variables = {"PENSTOCK_METRICS_PORT": "0", "PENSTOCK_PORT": str(port)}
        with another(self.stack, "another-api", "api", port, variables) as part:
            yield part


@contextmanager
def another(
    stack: Stack, name: str, module: str, port: int, variables: Mapping[str, str]
) -> Iterator[Part]:
    """Yields one more process for `stack`, once it is ready.

    `variables` overrides the stack's settings.
    """
    environment = environment_with({**stack.environment, **variables})
    command = [sys.executable, "-m", module]
    with Process(name, command, stack.log_dir, environment=environment) as process:
        process.wait_ready(partial(answers, port, "/readyz"), READY_LIMIT_S)
        yield Part(port)


@contextmanager
def running(
    changes: Mapping[str, object] | None = None,
    *,
    is_alone: bool = False,
    settings: Mapping[str, str] | None = None,
) -> Iterator[Pipeline]:
    """Yields a warm pipeline in a temporary folder, with a catalog from `catalog_with`."""
    with tempfile.TemporaryDirectory() as folder:
        state_dir = Path(folder)
        models_file = catalog_with(state_dir, changes or {}, is_alone=is_alone)
        variables = {"PENSTOCK_MODELS_FILE": str(models_file), **(settings or {})}
        model = read_catalog(models_file).find(MODEL)
        model_folder = resolve(model.source, model.revision, state_dir)
        texts = Texts(model_folder, seed=1)
        with build_stack(state_dir, Ports.free(), variables, say_nothing, BROKER) as stack:
            pipeline = Pipeline(stack, texts, model_folder)
            pipeline.ask(texts.mixed(WARM_UP_TEXTS), 32)
            yield pipeline


def catalog_with(state_dir: Path, changes: Mapping[str, object], *, is_alone: bool = False) -> Path:
    """Writes the shipped catalog with MODEL's entry changed. `is_alone` omits the other models."""
    catalog = yaml.safe_load(MODELS_FILE.read_text(encoding="utf-8"))
    catalog["models"] = [
        entry | changes if entry["name"] == MODEL else entry
        for entry in catalog["models"]
        if entry["name"] == MODEL or not is_alone
    ]
    path = state_dir / "models.yaml"
    path.write_text(yaml.safe_dump(catalog), encoding="utf-8")
    return path


def say_nothing(line: str) -> None:
    """Prints nothing, because a benchmark prints only its results."""
