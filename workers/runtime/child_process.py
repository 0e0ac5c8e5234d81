"""A model process as an OS process, either started as a program or forked from a template."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from shared.errors import ModelFailed

GOMP_SPINS = "10000"
"""How many times a torch thread polls for the other threads in its computation before going to
sleep, which takes 0.2 ms.

By default, it polls 300,000 times, which takes longer than the system lets it run. When two
computations had all their threads on a single core, a step took seconds (decision 24).
"""
_STATUS_LIMIT_S = 1.0
"""How long to wait for the template to report a process's exit status."""


class ChildProcess(Protocol):
    """The part of asyncio.subprocess.Process that is used here."""

    pid: int
    stdout: asyncio.StreamReader | None

    @property
    def returncode(self) -> int | None:
        """The exit status. None if the process is running or the status is unknown."""

    def kill(self) -> None:
        """Sends SIGKILL, which the process can't handle."""

    async def wait(self) -> int | None:
        """Waits for the process to exit, and returns its exit status."""


def child_environment(threads: int) -> dict[str, str]:
    """Returns a model process's environment: thread counts for torch, and our packages."""
    root = str(Path(__file__).resolve().parents[2])
    count = str(threads)
    waiting = {} if "OMP_WAIT_POLICY" in os.environ else {"GOMP_SPINCOUNT": GOMP_SPINS}
    return {
        **waiting,
        **os.environ,
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        # A process with threads can't be forked; see workers/runtime/template.py.
        "OPENBLAS_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # Makes torch count GPUs without initializing CUDA, which would not survive a fork.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        # Keeps glibc from returning each batch's memory to the kernel. Keeping it yields 3 to 5%
        # more tokens per second.
        "MALLOC_MMAP_THRESHOLD_": str(256 * 1024 * 1024),
        "MALLOC_TRIM_THRESHOLD_": str(512 * 1024 * 1024),
        # By default, oneDNN caches 1,024 compiled primitives. Texts vary in length, so memory use
        # would grow for minutes. With 256, memory use soon levels off, and few primitives are
        # recompiled (workers/models/embedding/encoder_torch.py).
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256",
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")])),
    }


async def spawn(
    command: Sequence[str],
    environment: Mapping[str, str],
    theirs: socket.socket,
    option: str = "--fd",
    stdin: int = asyncio.subprocess.DEVNULL,
) -> asyncio.subprocess.Process:
    """Starts a program with an output pipe, passing it the descriptor of `theirs` as `option`.

    Args:
        stdin: its input, as in asyncio.subprocess.

    Raises:
        ModelFailed: the program doesn't exist.
    """
    try:
        return await asyncio.create_subprocess_exec(
            *command,
            f"{option}={theirs.fileno()}",
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=stdin,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
    except OSError as error:
        raise ModelFailed(f"the model process could not be started: {error}") from error


class ForkedProcess:
    """A process forked by the template.

    Its pidfd identifies it, even if the process ID is reused.
    """

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self.stdout: asyncio.StreamReader | None = None
        self.returncode: int | None = None
        self._pidfd = pidfd
        self._has_ended = asyncio.Event()
        self._has_status = asyncio.Event()
        asyncio.get_running_loop().add_reader(pidfd, self._on_end)

    def set_status(self, status: int | None) -> None:
        """Sets the exit status reported by the template. None if the template died."""
        self.returncode = status if self.returncode is None else self.returncode
        self._has_status.set()

    def kill(self) -> None:
        if self._has_ended.is_set():
            raise ProcessLookupError(f"process {self.pid} has exited")
        signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def wait(self) -> int | None:
        await self._has_ended.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STATUS_LIMIT_S):
                await self._has_status.wait()
        return self.returncode

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        # If the template died and this is the container's first process, the template's child is
        # reaped here.
        with contextlib.suppress(ChildProcessError):
            status = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
            if status is not None:
                self.set_status(
                    status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
                )
        os.close(self._pidfd)
        self._has_ended.set()
