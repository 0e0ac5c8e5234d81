"""An engine's process: its server, the folder for its socket, its key, and its HTTP client."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import msgspec

from shared.errors import ConfigurationError, ModelFailed
from shared.process.process_tree import list_tree
from workers.models.engines import program
from workers.models.engines.dialect import Launch, Post
from workers.models.engines.engine_http import EngineHttp
from workers.models.engines.engine_metrics import PATH as METRICS_PATH
from workers.models.engines.engine_metrics import MetricsEndpoint, read_cache_tokens

SOCKETS = "/tmp"
"""Parent folder of the sockets.

Custom classes see a private folder at that path instead (workers/models/custom/runner).
"""
SOCKET = "http.sock"
SPINS = "1000"
"""How many times a thread polls for the other threads in its step before it goes to sleep. By
default, it polls for as long as the system lets it run. While other programs were also using the
cores, polling made a token take 8 s instead of 0.04 s.
"""
END_LIMIT_S = 5.0
LAST_LINES_LIMIT_S = 1.0
"""How long to wait for the last lines of output. A process outside the group may keep the pipe
open.
"""
MAX_LINES = 40
MAX_LINE_CHARS = 600
_CACHES = ("HOME", "VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH", "CUDA_CACHE_MAXSIZE")
"""Folders for compiled kernels, so that a restarted engine finds them, and the size of one."""
_PASSED_ON = (
    *("PATH", "LANG", "TZ", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "STARTED_BY"),
    *_CACHES,
)
"""The only variables the process gets from our environment. None of them contain keys, addresses,
or tokens.
"""
_PAGE_BYTES = 4096

log = logging.getLogger(__name__)


class EngineProcess:
    """A server that is ready for requests.

    Args:
        key: the key that its HTTP server requires.
    """

    def __init__(
        self,
        launch: Launch,
        process: asyncio.subprocess.Process,
        output: _Output,
        folder: Path,
        key: str,
    ) -> None:
        self._launch = launch
        self._process = process
        self._output = output
        self._folder = folder
        self._key = key
        self._lines: deque[str] = deque(maxlen=MAX_LINES)
        self._causes: deque[str] = deque(maxlen=MAX_LINES)
        self._reading: asyncio.Task[None] | None = None
        self._http: EngineHttp | None = None

    @property
    def metrics_endpoint(self) -> MetricsEndpoint | None:
        """The server's metrics endpoint, or None if the server does not have metrics."""
        if not self._launch.has_metrics:
            return None
        return MetricsEndpoint(str(self._folder / SOCKET), self._key)

    @classmethod
    async def start(cls, launch: Launch, key: str, threads: int, timeout_s: float) -> Self:
        """Starts a server and waits until it is ready.

        Raises:
            ConfigurationError: the engine can't run this model, or is not installed.
            ModelFailed: the server was not ready in time.
        """
        folder = Path(tempfile.mkdtemp(prefix="penstock-engine-", dir=SOCKETS))
        socket = folder / SOCKET
        environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        waiting = {} if "OMP_WAIT_POLICY" in os.environ else {"GOMP_SPINCOUNT": SPINS}
        environment |= {"OMP_NUM_THREADS": str(threads), "TMPDIR": str(folder), **waiting}
        environment |= launch.environment
        output = _Output()
        try:
            await output.open()
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-B", program.__file__),
                env=environment,
                cwd=folder,
                stdin=asyncio.subprocess.PIPE,
                stdout=output.write_end,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        except BaseException as error:
            output.close()
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, OSError):
                raise ModelFailed(f"the engine could not be started: {error}") from error
            raise
        output.close_write_end()
        server = cls(launch, process, output, folder, key)
        try:
            await server._open({**launch.settings, "socket": str(socket), "key": key}, timeout_s)
        except BaseException:
            await server.end()
            raise
        return server

    async def _open(self, settings: Mapping[str, Any], timeout_s: float) -> None:
        stdin = self._process.stdin
        assert stdin is not None, "it is a pipe; this is a bug"
        stdin.write(msgspec.json.encode(settings) + b"\n")
        is_ready = False
        try:
            async with asyncio.timeout(timeout_s):
                while (line := await self._output.read_line()) is not None:
                    if line == program.READY:
                        is_ready = True
                        break
                    self._lines.append(line)
                    if self._launch.causes is not None and self._launch.causes.match(line):
                        self._causes.append(line)
        except TimeoutError as error:
            reason = f"the engine was not ready within {timeout_s:g} s{self.last_lines()}"
            raise ModelFailed(reason) from error
        if not is_ready:
            raise ConfigurationError(
                f"the engine can't run this model{self.last_lines()}", field="source"
            )
        self._lines.clear()
        self._causes.clear()
        self._reading = asyncio.create_task(self._read_lines())
        self._http = EngineHttp(settings["socket"], self._key)

    async def _read_lines(self) -> None:
        while (line := await self._output.read_line()) is not None:
            if self._launch.safe_lines.match(line):
                self._lines.append(line)
                log.warning("the engine printed", extra={"line": line})

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def memory_bytes(self) -> int:
        """Resident memory of the whole process tree."""
        return sum(_measure_memory(pid) for pid in list_tree(self.pid))

    def last_lines(self) -> str:
        """Returns the causes of a failed start or else the end of the output, for operators."""
        return "".join(f"\n{line}" for line in self._causes or self._lines)

    @property
    def post(self) -> Post:
        """Sends a request.

        Exiting the context before the response is complete stops the response's computation.
        """
        assert self._http is not None, "it is ready; this is a bug"
        return self._http.post

    async def context_tokens(self) -> int:
        """Returns the maximum tokens per text, including its prompt, as reported by the server.

        Raises:
            ModelFailed: the server does not report this maximum.
        """
        assert self._http is not None, "it is ready; this is a bug"
        try:
            part = msgspec.json.decode(await self._http.get(self._launch.context_path))
            for key in self._launch.context_keys:
                part = part[key]
            return int(part)
        except (OSError, msgspec.DecodeError, ValueError, LookupError, TypeError) as error:
            raise ModelFailed(f"the engine did not report its context size: {error!r}") from error

    async def cache_tokens(self) -> int | None:
        """Returns how many tokens' keys and values the server keeps, or None if not reported.

        Raises:
            ModelFailed: the server does not respond.
        """
        if not self._launch.has_metrics:
            return None
        assert self._http is not None, "it is ready; this is a bug"
        try:
            metrics = await self._http.get(METRICS_PATH)
        except OSError as error:
            raise ModelFailed(f"the engine did not report its cache size: {error!r}") from error
        return read_cache_tokens(metrics.decode(errors="replace"))

    async def wait(self) -> int:
        """Waits for the process to exit. Returns its exit status."""
        status = await self._process.wait()
        self.kill()
        if self._reading is not None:
            await asyncio.wait([self._reading], timeout=LAST_LINES_LIMIT_S)
        return status

    async def end(self) -> None:
        """Stops the process, and removes its folder.

        If this call is canceled, kills the process immediately.
        """
        try:
            if self._http is not None:
                self._http.close()
            if self._process.stdin is not None:
                self._process.stdin.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_LIMIT_S):
                    await self._process.wait()
        finally:
            self.kill()
            await self._process.wait()
            self._output.close()
            if self._reading is not None:
                await self._reading
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    def kill(self) -> None:
        """Kills the process and any processes it has started, which could otherwise outlive it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


class _Output:
    """A pipe for the output of a process and its children.

    The pipe that asyncio creates stays open as long as a child holds it open, and `wait` waits for
    that child.
    """

    def __init__(self) -> None:
        self._reader = asyncio.StreamReader()
        self._transport: asyncio.ReadTransport | None = None
        self.write_end = -1

    async def open(self) -> None:
        read_end, self.write_end = os.pipe()
        self._transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(self._reader), os.fdopen(read_end, "rb")
        )

    def close_write_end(self) -> None:
        """Leaves the pipe's write end to the processes that inherited it."""
        if self.write_end >= 0:
            os.close(self.write_end)
            self.write_end = -1

    def close(self) -> None:
        self.close_write_end()
        if self._transport is not None:
            self._transport.close()

    async def read_line(self) -> str | None:
        """Returns the next line, shortened, or None if there are no more."""
        while True:
            try:
                line = await self._reader.readline()
            except ValueError:  # the line is longer than the buffer, whose contents were dropped
                continue
            return line.decode(errors="replace").rstrip()[:MAX_LINE_CHARS] if line else None


def _measure_memory(pid: int) -> int:
    try:
        pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
    except (OSError, IndexError):
        return 0
    return int(pages) * _PAGE_BYTES
