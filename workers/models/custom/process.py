"""The runner of a class, as the model process sees it: starts, feeds, cancels and kills it."""

from __future__ import annotations

import codecs
import contextlib
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shared.messages import PrintedLogs
from workers.models.custom.runner.frames import Frame, FrameReader, encode_frame

KILL_AFTER_S = 2.0
"""The time that a canceled prediction has to end by itself."""
MAX_LOG_CHARS = 32 * 1024
"""Of what a prediction printed, its end is kept."""
_PASSED_ON = (
    "PATH",
    "LANG",
    "LC_ALL",
    "TZ",
    "LD_LIBRARY_PATH",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_HOME",
    "NVIDIA_VISIBLE_DEVICES",
    "NVIDIA_DRIVER_CAPABILITIES",
    "OMP_WAIT_POLICY",
    "COG_WEIGHTS",
)
"""All that the runner gets of our environment. It has no key, address or token of ours."""
_LOOKS = os.WEXITED | os.WNOHANG | os.WNOWAIT
_ROOT = Path(__file__).resolve().parents[3]
_PROGRAM = """
import sys
sys.path.append({root!r})
from workers.models.custom.runner.main import main
sys.path.remove({root!r})
for name in [one for one in sys.modules if one.partition(".")[0] == "workers"]:
    if not name.startswith("workers.models.custom.runner."):
        del sys.modules[name]
main({fd}, {folder!r}, inspects_only={inspects_only})
"""


def runner_environment(scratch: Path, threads: int, added: Mapping[str, str]) -> dict[str, str]:
    """The environment of a runner.

    Args:
        scratch: its folder for temporary files, which is also its home.
        threads: for libraries that compute on a CPU.
        added: what cog.yaml sets.
    """
    passed_on = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    count = str(threads)
    return {
        **passed_on,
        "HOME": str(scratch),
        "TMPDIR": str(scratch),
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONIOENCODING": "utf-8:backslashreplace",
        **added,
    }


class PrintedOutput:
    """What a process prints. A thread reads it, so that the process never waits for a reader."""

    def __init__(self, fd: int, passes_on: bool) -> None:
        self._fd = fd
        self._passes_on = passes_on
        self._lock = threading.Lock()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._kept = ""
        self._left_out = 0
        os.set_blocking(fd, False)
        self._thread = threading.Thread(target=self._read_on, daemon=True, name="printed")
        self._thread.start()

    def _read_on(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._fd, selectors.EVENT_READ)
            while True:
                selector.select()
                if not self._drain():
                    return

    def _drain(self) -> bool:
        """Reads what is there. Returns whether more may come."""
        with self._lock:
            while True:
                try:
                    piece = os.read(self._fd, 1 << 16)
                except BlockingIOError:
                    return True
                except OSError:
                    return False
                if not piece:
                    return False
                if self._passes_on:
                    sys.stderr.buffer.write(piece)
                    sys.stderr.buffer.flush()
                self._kept += self._decoder.decode(piece)
                if (extra := len(self._kept) - MAX_LOG_CHARS) > 0:
                    self._left_out += extra
                    self._kept = self._kept[extra:]

    def look(self) -> PrintedLogs:
        """Returns what was printed since the last call of `take`."""
        self._drain()
        with self._lock:
            return PrintedLogs(self._kept, self._left_out)

    def take(self) -> PrintedLogs:
        """Returns what was printed since the last call."""
        self._drain()
        with self._lock:
            taken = PrintedLogs(self._kept, self._left_out)
            self._kept, self._left_out = "", 0
        return taken

    def close(self) -> None:
        """Closes the pipe, once the process has ended."""
        self._drain()
        self._thread.join(timeout=1.0)
        with contextlib.suppress(OSError):
            os.close(self._fd)


class RunnerProcess:
    """A process that runs the class of a folder.

    Args:
        folder: of the class.
        python: the interpreter that has its packages.
        threads: for libraries that compute on a CPU.
        environment: what cog.yaml sets.
        inspects_only: whether it ends when the class is inspected.
        passes_on: whether what it prints goes to our stderr, too.
    """

    def __init__(
        self,
        folder: Path,
        *,
        python: str = sys.executable,
        threads: int = 1,
        environment: Mapping[str, str] | None = None,
        inspects_only: bool = False,
        passes_on: bool = False,
    ) -> None:
        self._scratch = Path(tempfile.mkdtemp(prefix="penstock-class-"))
        self._socket, theirs = socket.socketpair()
        output, their_output = os.pipe()
        program = _PROGRAM.format(
            root=str(_ROOT), fd=theirs.fileno(), folder=str(folder), inspects_only=inspects_only
        )
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [python, "-P", "-c", program],
                    env=runner_environment(self._scratch, threads, environment or {}),
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=their_output,
                    stderr=their_output,
                    cwd=self._scratch,
                    start_new_session=True,
                )
            finally:
                os.close(their_output)
        self.printed = PrintedOutput(output, passes_on)
        self._reader = FrameReader()
        self._put_back: list[Frame] = []
        self._timers: dict[int, threading.Timer] = {}
        self.killed_for = ""
        """Why we killed it."""

    def receive(self, timeout_s: float) -> list[Frame] | None:
        """Waits for frames. Returns those that came in time. None: the process has ended.

        Raises:
            ValueError: what came is no frame.
        """
        until_s = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            while True:
                frames = self._take_frames()
                left_s = until_s - time.monotonic()
                if frames or left_s <= 0 or not selector.select(left_s):
                    return frames
                try:
                    piece = self._socket.recv(1 << 20)
                except ConnectionError:
                    piece = b""
                if not piece:
                    return self._take_frames() or None
                self._reader.feed(piece)

    def put_back(self, frames: Sequence[Frame]) -> None:
        """Leaves frames for the next call of `receive`."""
        self._put_back = [*frames, *self._put_back]

    def _take_frames(self) -> list[Frame]:
        frames, self._put_back = self._put_back, []
        while (frame := self._reader.next()) is not None:
            frames.append(frame)
        return frames

    def send(self, message: dict[str, Any], blobs: Sequence[bytes] = ()) -> None:
        """Sends a message. A process that has ended does not get it, which `receive` says."""
        with contextlib.suppress(ConnectionError):
            self._socket.sendall(encode_frame(message, blobs))

    def cancel(self, number: int) -> None:
        """Ends a prediction, and the process if the prediction is still there after a while."""
        timer = threading.Timer(KILL_AFTER_S, self.kill, ["it did not stop when it was canceled"])
        timer.daemon = True
        self._timers[number] = timer
        timer.start()
        self.send({"cancel": number})
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)

    def ended(self, number: int) -> None:
        """Notes that a prediction has ended."""
        if (timer := self._timers.pop(number, None)) is not None:
            timer.cancel()

    def kill(self, reason: str) -> None:
        """Kills the process, and all that it has started."""
        self.killed_for = self.killed_for or reason
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    @property
    def has_ended(self) -> bool:
        """True if the process is over. It is waited for by `close`."""
        return bool(os.waitid(os.P_PID, self._process.pid, _LOOKS))

    def close(self) -> int:
        """Ends the process and removes its files. Returns its exit status."""
        for number in list(self._timers):
            self.ended(number)
        self._socket.close()
        until_s = time.monotonic() + KILL_AFTER_S
        while not self.has_ended and time.monotonic() < until_s:
            time.sleep(0.005)
        # With what it has started. Its id is not reused before it is waited for.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        status = self._process.wait()
        self.printed.close()
        shutil.rmtree(self._scratch, ignore_errors=True)
        return status


def end_of(status: int) -> str:
    """How a process ended, in words."""
    if status < 0:
        return f"was killed by signal {-status} ({signal.Signals(-status).name})"
    return f"ended with exit status {status}"
