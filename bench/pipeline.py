"""The pipeline under measurement: the stack of `penstock up`, and its processes' costs."""

from __future__ import annotations

import os
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
from infra.local.up import served_stack
from shared.errors import ConfigurationError
from shared.models.catalog_file import read_catalog
from shared.settings import WorkerSettings, environment_with, read_settings
from workers.models.artifact import find_artifact, source_digest
from workers.models.backend import Backend
from workers.models.source import resolve
from workers.runtime.template import MODEL_PROCESS_NAME

MODEL = "all-MiniLM-L6-v2"
MODELS_FILE = Path("models.yaml")
BROKER: Broker = "rabbitmq" if os.environ.get("BENCH_BROKER") == "rabbitmq" else "pubsub"
"""Broker of the measured stack. Default: the embedded Pub/Sub."""
READY_LIMIT_S = 60.0
SCRAPE_LIMIT_S = 5.0
WARM_UP_TEXTS = 256
POLL_S = 0.25


class Part:
    """One process of the pipeline, known by the port it listens on.

    Its model processes count as its own.

    Args:
        port: a port of 127.0.0.1 on which it listens.
        ready_s: seconds from its start to ready, if that was measured.
    """

    def __init__(self, port: int, ready_s: float = 0.0) -> None:
        self.port = port
        self.ready_s = ready_s
        listening = [
            one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN
        ]
        self.pid = next(
            one.pid for one in listening if one.pid and getattr(one.laddr, "port", 0) == port
        )
        self._process = psutil.Process(self.pid)

    def cpu_s(self) -> float:
        """CPU seconds of the process itself."""
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def children_cpu_s(self) -> float:
        """CPU seconds of its children that live."""
        times = [child.cpu_times() for child in self._process.children(recursive=True)]
        return float(sum(one.user + one.system for one in times))

    def rss_bytes(self) -> int:
        """Resident memory of the process itself."""
        return int(self._process.memory_info().rss)

    def children_rss_bytes(self) -> list[int]:
        """Resident memory of each model process.

        Memory shared with their template counts for each.
        """
        children = self._process.children(recursive=True)
        return [
            int(child.memory_info().rss) for child in children if child.name() == MODEL_PROCESS_NAME
        ]

    def image_rss_bytes(self) -> list[int]:
        """Resident memory of each of an API's image processes, which are its only children."""
        return [int(child.memory_info().rss) for child in self._process.children(recursive=True)]


@dataclass(frozen=True)
class Work:
    """Tokens that the worker computed since its start, without and with padding."""

    real: float
    padded: float


def samples_of(port: int) -> Iterator[Sample]:
    """Returns the metrics of a worker on `port`."""
    url = f"http://127.0.0.1:{port}/metrics"
    with urllib.request.urlopen(url, timeout=SCRAPE_LIMIT_S) as answer:
        for family in text_string_to_metric_families(answer.read().decode()):
            yield from family.samples


class Pipeline:
    """The running pipeline, its parts, and texts that it has not seen."""

    def __init__(self, stack: Stack, texts: Texts, model_folder: Path) -> None:
        self.stack = stack
        self.texts = texts
        self.model_folder = model_folder
        self.api = Part(stack.ports.api)
        self.worker = Part(stack.ports.health[0])
        is_rabbit = stack.broker == "rabbitmq"
        self._broker = Part(stack.ports.rabbitmq if is_rabbit else stack.ports.pubsub)
        self._redis = Part(stack.ports.redis)
        self._bigquery = Part(stack.ports.bigquery)

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far, by part."""
        return {
            "API": self.api.cpu_s(),
            "broker": self._broker.cpu_s(),
            "worker, I/O": self.worker.cpu_s(),
            "worker, model": self.worker.children_cpu_s(),
            "Redis": self._redis.cpu_s(),
            "BigQuery": self._bigquery.cpu_s(),
        }

    def ask(
        self, texts: list[str], in_flight: int, *, cache: str, port: int = 0, limit_s: float = 300.0
    ) -> LoadReport:
        """Sends a request per text to the API, or to that on `port`.

        Raises:
            RuntimeError: not every answer was a success with the word `cache`.
        """
        bodies = embedding_bodies(MODEL, texts)
        report = drive(LoadOrder(port or self.api.port, bodies, in_flight, limit_s=limit_s))
        if report.statuses() != {200: len(texts)} or report.hits() != {cache: len(texts)}:
            statuses = f"{report.statuses()} {report.hits()}"
            raise RuntimeError(f"{len(texts)} answers ({cache}) were expected, not {statuses}")
        return report

    def usage_rows(
        self, columns: Sequence[str], request_ids: set[str], limit_s: float, count: int = 0
    ) -> list[dict[str, Any]]:
        """The rows of the requests, once BigQuery has `count` (0: one each), or after `limit_s`."""
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
            if len(rows) >= (count or len(request_ids)) or time.monotonic() > end_s:
                return rows
            time.sleep(POLL_S)

    def work(self) -> Work:
        """Returns the computed items, by the worker's own metrics."""
        values = {sample.name: sample.value for sample in self._samples()}
        return Work(
            values["penstock_worker_real_work_total"], values["penstock_worker_padded_work_total"]
        )

    def backend(self) -> Backend:
        """The worker's backend, from its metrics.

        An ONNX graph is looked up where the worker found it.
        """
        labels = next(
            one.labels for one in self._samples() if one.name == "penstock_worker_backend_info"
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
                f"no artifact of {MODEL} in {settings.artifacts_dir}", field="artifacts_dir"
            )
        variant = next(
            one for one in artifact.manifest.variants if one.precision == named.precision
        )
        graph = str(artifact.graph(variant).resolve())
        return msgspec.structs.replace(named, variant=variant.name, graph=graph)

    def _samples(self) -> Iterator[Sample]:
        return samples_of(self.worker.port)

    @contextmanager
    def another_api(self, **settings: object) -> Iterator[Part]:
        """One more API on the same pipeline with other `settings` (fields of ApiSettings)."""
        port = free_port()
        # The port of the stack's own metrics is taken.
        variables = {"PENSTOCK_METRICS_PORT": "0", "PENSTOCK_PORT": str(port)}
        variables |= {f"PENSTOCK_{name.upper()}": str(value) for name, value in settings.items()}
        with another(self.stack, "another-api", "api", port, variables) as part:
            yield part


@contextmanager
def another(
    stack: Stack, name: str, module: str, port: int, variables: Mapping[str, str]
) -> Iterator[Part]:
    """One more process of `stack`, ready. `variables` overrides the stack's settings."""
    environment = environment_with({**stack.environment, **variables})
    process = Process(name, [sys.executable, "-m", module], stack.log_dir, environment=environment)
    began_s = time.monotonic()
    with process:
        process.wait_ready(partial(answers, port, "/readyz"), READY_LIMIT_S)
        yield Part(port, time.monotonic() - began_s)


@contextmanager
def running(
    changes: Mapping[str, object] | None = None, *, is_alone: bool = False, **settings: object
) -> Iterator[Pipeline]:
    """A warm pipeline in a temporary folder.

    Args:
        is_alone: True if MODEL is the only one that is served.
        changes: fields of the entry of MODEL in the catalog that differ from the shipped one.
        settings: fields of ApiSettings that differ from the defaults.

    Raises:
        PenstockError: as infra.local.stack.Stack.
    """
    with tempfile.TemporaryDirectory() as folder:
        state_dir = Path(folder)
        models_file = (
            only_model(state_dir, MODEL, changes or {})
            if is_alone
            else catalog_with(state_dir, changes or {})
        )
        variables = {f"PENSTOCK_{name.upper()}": str(value) for name, value in settings.items()}
        variables["PENSTOCK_MODELS_FILE"] = str(models_file)
        model = read_catalog(models_file).find(MODEL)
        model_folder = resolve(model.source, model.revision, state_dir)
        texts = Texts(model_folder, seed=1)
        with served_stack(state_dir, Ports.free(), variables, say_nothing, BROKER) as stack:
            pipeline = Pipeline(stack, texts, model_folder)
            pipeline.ask(texts.mixed(WARM_UP_TEXTS), 32, cache="miss")
            yield pipeline


def catalog_with(state_dir: Path, changes: Mapping[str, object]) -> Path:
    """The shipped catalog with the entry of MODEL changed. The other models are served too."""
    if not changes:
        return MODELS_FILE
    catalog = yaml.safe_load(MODELS_FILE.read_text(encoding="utf-8"))
    catalog["models"] = [
        entry | changes if entry["name"] == MODEL else entry for entry in catalog["models"]
    ]
    return _written(state_dir, catalog)


def only_model(state_dir: Path, name: str, changes: Mapping[str, object]) -> Path:
    """The shipped catalog without the other models."""
    catalog = yaml.safe_load(MODELS_FILE.read_text(encoding="utf-8"))
    catalog["models"] = [entry | changes for entry in catalog["models"] if entry["name"] == name]
    return _written(state_dir, catalog)


def _written(state_dir: Path, catalog: Mapping[str, object]) -> Path:
    path = state_dir / "models.yaml"
    path.write_text(yaml.safe_dump(catalog), encoding="utf-8")
    return path


def say_nothing(line: str) -> None:
    """The figures are what a benchmark prints."""
