"""A real server process, with a data directory, that tests kill and restart."""

import subprocess
import sys
from pathlib import Path

from tests.limits import WAIT_LIMIT_S
from tests.process import free_port


class KeptServer:
    """A server process with a port and a directory. It may be killed and restarted repeatedly."""

    def __init__(self, data_dir: Path, *, has_rest: bool = False) -> None:
        self.port = free_port()
        self._rest_port = free_port() if has_rest else None
        self._data_dir = data_dir
        self._process: subprocess.Popen[str] | None = None

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def rest_endpoint(self) -> str:
        return f"http://127.0.0.1:{self._rest_port}"

    def start(self) -> int:
        """Returns the process id once the server is listening."""
        command = [
            sys.executable,
            "-m",
            "pubsub_emulator",
            f"--port={self.port}",
            f"--data-dir={self._data_dir}",
        ]
        endpoints = [self.endpoint]
        if self._rest_port is not None:
            command.append(f"--rest-port={self._rest_port}")
            endpoints.append(self.rest_endpoint)
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        for endpoint in endpoints:
            assert self._process.stdout.readline().strip().endswith(endpoint)
        return self._process.pid

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.communicate(timeout=WAIT_LIMIT_S)
