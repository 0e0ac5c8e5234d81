"""The local stack's processes: commands, settings, and stop limits.

RabbitMQ is a real server, installed as a system package.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from infra.local.ports import Ports
from infra.local.process import Process, free_port, responds
from infra.local.redis_server import RedisServer
from shared.errors import ConfigurationError
from shared.models.catalog import WorkerGroup
from shared.settings import environment_with

START_LIMIT_S = 120.0
STOP_LIMIT_S = 30.0
CONSUMER_TIMEOUT_S = 2 * 3600
"""Maximum time, in seconds, that a message may be held. It exceeds any deadline, so a job is never
taken away from its holder.
"""
_SERVER = "PENSTOCK_RABBITMQ_SERVER"
"""Variable with the script's path, for using a version other than the installed package's."""
_LIBRARY = Path("/usr/lib/rabbitmq/bin")
"""Debian's folder for the scripts. The script on PATH can be run only by root or by the rabbitmq
user.
"""
_PROTOCOL_HEADER = b"AMQP\x00\x00\x09\x01"

API_STOP_LIMIT_S = 12.0
WORKER_STOP_LIMIT_S = 30.0
LOG_FOLDER = "log"
FUNCTIONS_SOURCE = str(Path(__file__).parents[2] / "workers/functions/main.py")


def find_rabbitmq_server() -> Path:
    """Returns the `rabbitmq-server` script to start: PENSTOCK_RABBITMQ_SERVER, or the package's.

    Raises:
        ConfigurationError: the script was not found.
    """
    chosen = os.environ.get(_SERVER)
    if chosen and not os.access(chosen, os.X_OK):
        raise ConfigurationError(f"{_SERVER}: program {chosen} not found", field="broker")
    executable = chosen or shutil.which(
        "rabbitmq-server", path=f"{_LIBRARY}:{os.environ.get('PATH', '')}"
    )
    if executable is None or shutil.which("epmd") is None:
        raise ConfigurationError(
            "rabbitmq-server is not installed: install the rabbitmq-server package, or set "
            "PENSTOCK_BROKER to the URL of a running broker",
            field="broker",
        )
    return Path(executable)


class RabbitServer(Process):
    """A RabbitMQ node on 127.0.0.1. `start` returns once it responds. The ports survive restarts.

    Erlang's port mapper runs alongside it on a separate port, so multiple nodes on one machine are
    unaware of each other.

    Args:
        port: 0 picks a free port.
    """

    def __init__(
        self, data_dir: Path, log_dir: Path, port: int = 0, *, name: str = "rabbitmq"
    ) -> None:
        self._data_dir = data_dir.resolve()
        self.port = port or free_port()
        server = find_rabbitmq_server()
        mapper_port = str(free_port())
        self._mapper = Process(
            "epmd", ["epmd", "-port", mapper_port, "-address", "127.0.0.1"], log_dir
        )
        super().__init__(
            name,
            [str(server)],
            log_dir,
            environment=self._variables(mapper_port),
            stop_limit_s=STOP_LIMIT_S,
        )

    @property
    def url(self) -> str:
        """The value of the clients' `broker` setting."""
        return f"rabbitmq://guest:guest@127.0.0.1:{self.port}/"

    def start(self) -> None:
        """Starts the node and waits until it responds.

        Raises:
            Unavailable: it exited or did not respond in time.
        """
        self._data_dir.mkdir(parents=True, exist_ok=True)
        (self._data_dir / "plugins").write_text("[].\n")
        (self._data_dir / "rabbitmq.conf").write_text(
            f"listeners.tcp.default = 127.0.0.1:{self.port}\n"
            f"consumer_timeout = {CONSUMER_TIMEOUT_S * 1000}\n"
        )
        if not self._mapper.is_running:
            self._mapper.start()
        super().start()
        self.wait_ready(lambda: responds(self.port, _PROTOCOL_HEADER, b"\x01"), START_LIMIT_S)

    def stop(self) -> None:
        """Stops the node, then the port mapper."""
        super().stop()
        self._mapper.stop()

    def _variables(self, mapper_port: str) -> dict[str, str]:
        """Returns the node's environment.

        See https://www.rabbitmq.com/docs/configure, Environment Variables.
        """
        folder = self._data_dir
        own = {
            # The script then replaces itself with the node, so that a signal reaches the node.
            "RUNNING_UNDER_SYSTEMD": "1",
            "HOME": str(folder),
            "RABBITMQ_NODENAME": "penstock@localhost",
            "RABBITMQ_MNESIA_BASE": str(folder / "nodes"),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
            "RABBITMQ_CONF_ENV_FILE": "/dev/null",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(free_port()),
            "ERL_EPMD_PORT": mapper_port,
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            # The port for other nodes in a cluster, though there are none here.
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
        }
        return {**os.environ, **own}


class StackProcesses:
    """Creates a stack's processes, without starting them.

    Args:
        variables: `PENSTOCK_*` variables for every process, which override the stack's own.
        keep_messages: true if Pub/Sub keeps its messages in the state folder.
        has_rabbitmq: true if the stack starts RabbitMQ as the broker.
    """

    def __init__(
        self,
        state_dir: Path,
        ports: Ports,
        variables: Mapping[str, str],
        *,
        keep_messages: bool,
        has_rabbitmq: bool,
    ) -> None:
        self._state_dir = state_dir
        self._ports = ports
        self._given_variables = dict(variables)
        self._keep_messages = keep_messages
        self._has_rabbitmq = has_rabbitmq

    @property
    def environment(self) -> dict[str, str]:
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
        return own | self._given_variables

    def server(self, name: str, socket_dir: Path) -> Process:
        """Returns the server `redis`, `pubsub`, `rabbitmq`, or `bigquery`.

        The first two also listen on a socket.
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
        """Returns the listening socket of each server that has one, keyed by server name."""
        return {
            "pubsub": f"unix://{socket_dir / 'pubsub'}",
            "redis": f"unix://{socket_dir / 'redis'}?db=0",
        }

    def api(self, settings: Mapping[str, str]) -> Process:
        return self.module("api", ["api"], settings, stop_limit_s=API_STOP_LIMIT_S)

    def batches(self, settings: Mapping[str, str]) -> Process:
        # Its metrics would use the same port as the API.
        return self.module(
            "batches", ["api.batch_runner"], {**settings, "PENSTOCK_METRICS_PORT": "0"}
        )

    def worker(self, group: WorkerGroup, port: int, settings: Mapping[str, str]) -> Process:
        """Returns a worker.

        All workers may use all cores, which the OS shares among them based on load.
        """
        names = ",".join(model.name for model in group.models)
        own = {"PENSTOCK_MODEL": names, "PENSTOCK_HEALTH_PORT": str(port)}
        return self.module(
            f"worker-{group.name}",
            ["workers"],
            own | dict(settings),
            stop_limit_s=WORKER_STOP_LIMIT_S,
        )

    def functions(self, settings: Mapping[str, str]) -> Process:
        """Returns a process that runs all functions.

        The framework's built-in server runs it. With RabbitMQ, which does not push, the process
        pulls messages.
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
        """Returns a process that runs a Python module. `command` is its name and arguments."""
        return Process(
            name,
            [sys.executable, "-m", *command],
            self._state_dir / LOG_FOLDER,
            environment=environment_with(self.environment | dict(settings or {})),
            stop_limit_s=stop_limit_s,
        )
