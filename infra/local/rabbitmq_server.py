"""The local stack's RabbitMQ: a real server, from the machine's own packages."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

from infra.local.process import Process, free_port
from shared.errors import ConfigurationError

START_LIMIT_S = 120.0
STOP_LIMIT_S = 30.0
CONSUMER_TIMEOUT_S = 2 * 3600
"""Maximum time that a message may be held. It exceeds any deadline, so no job is taken away."""
_SERVER = "PENSTOCK_RABBITMQ_SERVER"
"""Names the script of another version than the machine's package has."""
_LIBRARY = Path("/usr/lib/rabbitmq/bin")
"""Debian's folder of the scripts. The one on PATH runs as root or rabbitmq only."""
_PROTOCOL_HEADER = b"AMQP\x00\x00\x09\x01"


def find_rabbitmq_server() -> Path:
    """The `rabbitmq-server` script to start: PENSTOCK_RABBITMQ_SERVER, else that of the package.

    Raises:
        ConfigurationError: none was found.
    """
    chosen = os.environ.get(_SERVER)
    if chosen and not os.access(chosen, os.X_OK):
        raise ConfigurationError(f"{_SERVER}: no program {chosen}", field="broker")
    found = chosen or shutil.which(
        "rabbitmq-server", path=f"{_LIBRARY}:{os.environ.get('PATH', '')}"
    )
    if found is None or shutil.which("epmd") is None:
        raise ConfigurationError(
            "no rabbitmq-server on this machine: install the rabbitmq-server package, or name a "
            "running one in PENSTOCK_BROKER",
            field="broker",
        )
    return Path(found)


class RabbitServer(Process):
    """A RabbitMQ node on 127.0.0.1. `start` returns once it answers. The ports survive restarts.

    Erlang's port mapper runs alongside, on its own port, so that several nodes of one machine
    know nothing of each other.

    Args:
        data_dir: folder of its files. Created if missing.
        log_dir: gets its log, and that of the port mapper.
        port: 0 picks a free one.
        name: for people, and for the log file.
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
        """The setting `broker` of who uses it."""
        return f"rabbitmq://guest:guest@127.0.0.1:{self.port}/"

    def start(self) -> None:
        """Starts it and waits until it answers.

        Raises:
            Unavailable: it ended or did not answer in time.
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
        try:
            self.wait_ready(lambda: answers_amqp(self.port), START_LIMIT_S)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stops the node, then the port mapper."""
        super().stop()
        self._mapper.stop()

    def _variables(self, mapper_port: str) -> dict[str, str]:
        """Its environment. See https://www.rabbitmq.com/docs/configure, Environment Variables."""
        folder = self._data_dir
        own = {
            # The script then replaces itself by the node, so that a signal reaches the node.
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
            # The port for other nodes of a cluster, which do not exist here.
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
        }
        return {**os.environ, **own}


def answers_amqp(port: int) -> bool:
    """Returns whether a broker on this machine greets a client on `port` within a second."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection:
            connection.sendall(_PROTOCOL_HEADER)
            return connection.recv(1) == b"\x01"
    except OSError:
        return False
