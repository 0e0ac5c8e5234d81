"""The processes of the local stack: their commands, their settings and their limits to stop."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from infra.local.ports import Ports
from infra.local.process import Process
from infra.local.rabbitmq_server import RabbitServer
from infra.local.redis_server import RedisServer
from shared.catalog import Model
from shared.settings import environment_with

API_STOP_LIMIT_S = 12.0
WORKER_STOP_LIMIT_S = 30.0
LOG_FOLDER = "log"
FUNCTIONS_SOURCE = str(Path(__file__).parents[2] / "workers/functions/main.py")


class StackProcesses:
    """Makes the processes of a stack. None of them is started.

    Args:
        state_dir: gets the logs, the rows, the objects and the spool.
        ports: ports to listen on.
        given: `PENSTOCK_*` variables for every process, above the stack's own.
        keep_messages: true if Pub/Sub keeps its messages in the state's folder.
        has_rabbitmq: true if the stack starts a RabbitMQ as the broker.
    """

    def __init__(
        self,
        state_dir: Path,
        ports: Ports,
        given: Mapping[str, str],
        *,
        keep_messages: bool,
        has_rabbitmq: bool,
    ) -> None:
        self._state_dir = state_dir
        self._ports = ports
        self._given = dict(given)
        self._keep_messages = keep_messages
        self._has_rabbitmq = has_rabbitmq

    @property
    def environment(self) -> dict[str, str]:
        """The settings that every process has."""
        own = {
            "PENSTOCK_PROJECT": "penstock-local",
            "PENSTOCK_DATASET": "penstock",
            "PENSTOCK_REGION": "local",
            "PENSTOCK_MODELS_FILE": "models.yaml",
            "PENSTOCK_PUBSUB_ENDPOINT": f"127.0.0.1:{self._ports.pubsub}",
            "PENSTOCK_BIGQUERY_ENDPOINT": f"http://127.0.0.1:{self._ports.bigquery}",
            "PENSTOCK_REDIS_URL": f"redis://127.0.0.1:{self._ports.redis}/0",
            "PENSTOCK_OBJECTS_URL": f"file://{self._state_dir / 'objects'}",
            "PENSTOCK_SPOOL_DIR": str(self._state_dir / "spool"),
            "PENSTOCK_PORT": str(self._ports.api),
            "PENSTOCK_METRICS_PORT": str(self._ports.metrics),
        }
        if self._has_rabbitmq:
            own["PENSTOCK_BROKER"] = f"rabbitmq://guest:guest@127.0.0.1:{self._ports.rabbitmq}/"
        return own | self._given

    def server(self, name: str, socket_dir: Path) -> Process:
        """The server `redis`, `pubsub`, `rabbitmq` or `bigquery`.

        The first two have a socket too.
        """
        if name == "redis":
            return RedisServer(
                self._state_dir / "redis",
                self._state_dir / LOG_FOLDER,
                self._ports.redis,
                socket_path=socket_dir / "redis",
                persist=True,
            )
        if name == "rabbitmq":
            folder = self._state_dir
            return RabbitServer(folder / "rabbitmq", folder / LOG_FOLDER, self._ports.rabbitmq)
        if name == "bigquery":
            flags = ["--data-dir", str(self._state_dir / "bigquery")]
        else:
            flags = ["--socket", str(socket_dir / "pubsub")]
            flags += ["--data-dir", str(self._state_dir / "pubsub")] if self._keep_messages else []
        port = str(getattr(self._ports, name))
        return self.module(name, [f"{name}_emulator", "--port", port, *flags])

    def socket_urls(self, socket_dir: Path) -> dict[str, str]:
        """Sockets of the servers that listen on one, by their names."""
        return {
            "pubsub": f"unix://{socket_dir / 'pubsub'}",
            "redis": f"unix://{socket_dir / 'redis'}?db=0",
        }

    def api(self, settings: Mapping[str, str]) -> Process:
        """The API, with `settings` above those that every process has."""
        return self.module("api", ["api"], settings, stop_limit_s=API_STOP_LIMIT_S)

    def batches(self, settings: Mapping[str, str]) -> Process:
        """The runner of batches, with `settings` above those that every process has."""
        # Its metrics would take the port of the API's.
        return self.module(
            "batches", ["api.batch_runner"], {**settings, "PENSTOCK_METRICS_PORT": "0"}
        )

    def worker(self, model: Model, port: int, settings: Mapping[str, str]) -> Process:
        """A worker that may use all cores, like the others: the OS assigns them by load.

        Args:
            model: that it serves.
            port: port of its health checks.
            settings: above those that every process has.
        """
        own = {"PENSTOCK_MODEL": model.name, "PENSTOCK_HEALTH_PORT": str(port)}
        return self.module(
            f"worker-{model.name}",
            ["workers"],
            own | dict(settings),
            stop_limit_s=WORKER_STOP_LIMIT_S,
        )

    def functions(self, settings: Mapping[str, str]) -> Process:
        """All functions in one process.

        The framework's own server runs it. With RabbitMQ, which pushes nothing, it takes messages.
        """
        if "PENSTOCK_BROKER" in self.environment:
            own = {"PENSTOCK_HEALTH_PORT": str(self._ports.functions)}
            return self.module(
                "functions", ["workers.functions"], own | dict(settings), stop_limit_s=30.0
            )
        target = ["--target", "functions", "--source", FUNCTIONS_SOURCE]
        where = ["--host", "127.0.0.1", "--port", str(self._ports.functions)]
        return self.module("functions", ["functions_framework", *target, *where], settings)

    def row_archive(self) -> Process:
        """Takes rows from the object store."""
        own = {"PENSTOCK_HEALTH_PORT": str(self._ports.row_archive)}
        return self.module("row-archive", ["infra.row_archive"], own, stop_limit_s=30.0)

    def module(
        self,
        name: str,
        command: Sequence[str],
        settings: Mapping[str, str] | None = None,
        *,
        stop_limit_s: float = 10.0,
    ) -> Process:
        """A process that runs a Python module: its name and its arguments are the `command`."""
        return Process(
            name,
            [sys.executable, "-m", *command],
            self._state_dir / LOG_FOLDER,
            environment=environment_with(self.environment | dict(settings or {})),
            stop_limit_s=stop_limit_s,
        )
