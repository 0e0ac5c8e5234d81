"""A server that runs in a separate process, with a log file."""

import ctypes
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

POLL_S = 0.02
STOP_LIMIT_S = 30.0
FREE_PORTS = (15_000, 32_000)
"""Below the kernel's ephemeral ports, which another process might grab before our caller does."""
PORT_TRIES = 1000
_PR_SET_PDEATHSIG = 1
_random = random.SystemRandom()


class Process:
    """A running program. Entering the context starts the server; leaving it stops the server.

    Args:
        name: name of its log file, without `.log`.
        log_dir: folder for the log file, which contains both output streams.
    """

    def __init__(self, name: str, command: Sequence[str], log_dir: Path) -> None:
        self.log_path = log_dir / f"{name}.log"
        self._name = name
        self._command = list(command)
        self._popen: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._running.terminate()
        try:
            self._running.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def start(self) -> None:
        """Starts the server and returns immediately.

        The first start overwrites the log; later starts append to it.
        """
        with self.log_path.open("ab" if self._popen else "wb") as output:
            self._popen = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )

    @property
    def is_running(self) -> bool:
        return self._running.poll() is None

    @property
    def pid(self) -> int:
        return self._running.pid

    def wait_ready(self, is_ready: Callable[[], bool], limit_s: float) -> None:
        """Waits until `is_ready` returns true.

        Raises:
            RuntimeError: the program exited before that, or `limit_s` seconds passed. The message
                contains the server's log.
        """
        deadline_s = time.monotonic() + limit_s
        while not is_ready():
            if not self.is_running or time.monotonic() > deadline_s:
                output = self.log_path.read_text(errors="replace")
                raise RuntimeError(f"{self._name} was not ready within {limit_s:g} s: {output}")
            time.sleep(POLL_S)

    def kill(self) -> None:
        """Kills the server with SIGKILL, as in a crash."""
        self._running.kill()
        self._running.wait(STOP_LIMIT_S)

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        assert self._popen is not None, f"{self._name} was not started"
        return self._popen


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def listens(port: int) -> bool:
    """True if something is accepting connections on a port of 127.0.0.1."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0):
            return True
    except OSError:
        return False


def free_port() -> int:
    """Returns a free TCP port on 127.0.0.1, which stays reserved while this process runs."""
    for _ in range(PORT_TRIES):
        port = _random.randrange(*FREE_PORTS)
        # Binding the UDP port with the same number serves as the reservation. The reservation lasts
        # until this process ends.
        claim = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            claim.bind(("127.0.0.1", port))
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            claim.close()
            continue
        claim.detach()
        return port
    raise RuntimeError(f"no free port in {PORT_TRIES} tries")
