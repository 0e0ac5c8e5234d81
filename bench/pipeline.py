"""The measured pipeline: the `penstock up` stack and the costs of its processes."""

from __future__ import annotations

import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil
import yaml
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from bench.load.generator import LoadOrder, LoadReport, drive, embedding_bodies
from bench.load.texts import Texts
from infra.local.interfaces import refresh_interfaces
from infra.local.ports import Ports
from infra.local.process import Process, answers, free_port, listens
from infra.local.stack import Stack
from infra.local.up import build_stack
from shared.errors import ConfigurationError
from shared.models.catalog_file import read_catalog
from shared.settings import WorkerSettings, environment_with, read_settings
from shared.usage.bigquery import open_client
from workers.models.artifact import find_artifact, source_digest
from workers.models.backend import Backend
from workers.models.source import resolve

MODEL = "all-MiniLM-L6-v2"
MODELS_FILE = Path("models.yaml")
READY_LIMIT_S = 60.0
SCRAPE_LIMIT_S = 5.0
WARM_UP_TEXTS = 256
POLL_S = 0.25
T = TypeVar("T")


class Part:
    """One process in the pipeline, and the port on 127.0.0.1 that it listens on.

    An ordinary user can't find the process by its port, because most of the pipeline's processes
    deny inspection.
    """

    def __init__(self, process: Process, port: int) -> None:
        self.port = port
        self._process = psutil.Process(process.pid)

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
        processes, ports = stack.processes, stack.ports
        first_worker = next(iter(stack.workers.values()))
        self.api = Part(processes["api"], ports.api)
        self.worker = Part(processes[first_worker], ports.health[0])
        self._broker = Part(processes["pubsub"], ports.pubsub)
        self._redis = Part(processes["redis"], ports.redis)
        self._bigquery = Part(processes["bigquery"], ports.bigquery)

    def cpu_s(self) -> dict[str, float]:
        return {
            "API": self.api.cpu_s(),
            "broker": self._broker.cpu_s(),
            "worker, I/O": self.worker.cpu_s(),
            "worker, model": self.worker.children_cpu_s(),
            "Redis": self._redis.cpu_s(),
            "BigQuery": self._bigquery.cpu_s(),
        }

    def spend(self, work: Callable[[], T]) -> tuple[T, dict[str, float]]:
        """Returns what `work` returns, and the CPU seconds that each part uses while it runs."""
        before_s = self.cpu_s()
        result = work()
        return result, {name: now_s - before_s[name] for name, now_s in self.cpu_s().items()}


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
        client = open_client(settings.project, settings.bigquery_endpoint)
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
    with create_process(stack, name, module, variables) as process:
        process.wait_ready(partial(answers, port, "/readyz"), READY_LIMIT_S)
        yield Part(process, port)


def create_process(stack: Stack, name: str, module: str, variables: Mapping[str, str]) -> Process:
    """Returns one more process for `stack`, not yet started.

    `variables` overrides the stack's settings.
    """
    environment = environment_with({**stack.environment, **variables})
    return Process(name, [sys.executable, "-m", module], stack.log_dir, environment=environment)


@contextmanager
def running(
    changes: Mapping[str, object] | None = None,
    *,
    is_alone: bool = False,
    settings: Mapping[str, str] | None = None,
) -> Iterator[Pipeline]:
    """Yields a warm pipeline with the catalog entries of `read_shipped_models`."""
    with serving(read_shipped_models(changes or {}, is_alone=is_alone), settings) as stack:
        model = read_catalog(stack.settings.models_file).find(MODEL)
        model_folder = resolve(model.source, model.revision, stack.state_dir)
        pipeline = Pipeline(stack, Texts(model_folder, seed=1), model_folder)
        pipeline.ask(pipeline.texts.mixed(WARM_UP_TEXTS), 32)
        yield pipeline


@contextmanager
def serving(
    models: Sequence[Mapping[str, Any]], settings: Mapping[str, str] | None = None
) -> Iterator[Stack]:
    """Yields the running stack of `penstock up` with these models, in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        models_file = write_catalog(Path(folder), models)
        refresh_interfaces(models_file, say_nothing)
        variables = {"PENSTOCK_MODELS_FILE": str(models_file), **(settings or {})}
        with build_stack(Path(folder), Ports.free(), variables, say_nothing) as stack:
            yield stack


def read_shipped_models(
    changes: Mapping[str, object] | None = None, *, is_alone: bool = False
) -> list[dict[str, Any]]:
    """Returns the shipped catalog's entries, with `changes` to MODEL's.

    `is_alone` omits the other models.
    """
    models = yaml.safe_load(MODELS_FILE.read_text(encoding="utf-8"))["models"]
    return [
        entry | (changes or {}) if entry["name"] == MODEL else entry
        for entry in models
        if entry["name"] == MODEL or not is_alone
    ]


def write_catalog(folder: Path, models: Sequence[Mapping[str, Any]]) -> Path:
    path = folder / "models.yaml"
    path.write_text(yaml.safe_dump({"models": list(models)}), encoding="utf-8")
    return path


@contextmanager
def emulator(name: str, folder: Path, *options: str) -> Iterator[tuple[Process, int]]:
    """Yields an embedded server, `pubsub` or `bigquery`, and its port. Its log is in `folder`."""
    port = free_port()
    command = [sys.executable, "-m", f"{name}_emulator", "--port", str(port), *options]
    with Process(name, command, folder) as process:
        process.wait_ready(lambda: listens(port), READY_LIMIT_S)
        yield process, port


@contextmanager
def repeating(callers: int, act: Callable[[], T]) -> Iterator[list[T]]:
    """Calls `act` repeatedly on `callers` threads while the block runs. Yields the results."""
    stop, results = threading.Event(), list[T]()

    def repeat() -> None:
        while not stop.is_set():
            results.append(act())

    with ThreadPoolExecutor(callers) as threads:
        calls = [threads.submit(repeat) for _ in range(callers)]
        try:
            yield results
        finally:
            stop.set()
            for call in calls:
                call.result()


def say_nothing(line: str) -> None:
    """Prints nothing, because a benchmark prints only its results."""
