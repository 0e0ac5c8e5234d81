"""A class's runner, as seen by its parent, which starts, feeds, cancels, and kills it."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shared.models.entry import ModelResources
from workers.models.custom.limits import (
    DiskUse,
    LimitWatch,
    ProcessFamily,
    resident_bytes_of,
    usual_memory_bytes,
)
from workers.models.custom.printed import HiddenValues, PrintedOutput
from workers.models.custom.runner.frames import (
    MAX_ANSWER_JSON_BYTES,
    Frame,
    FrameReader,
    encode_frame,
)
from workers.models.custom.scratch import Scratch

KILL_AFTER_S = 2.0
"""How long a canceled prediction has to stop on its own, and a process to exit once its socket is
closed.
"""
MAX_WAITING_BYTES = 512 * 1024 * 1024
"""Maximum amount of data waiting to be sent to a process that isn't reading."""
SAID = frozenset({"error", "failed", "log", "batch_error"})
"""Message fields that contain text from the class or from an exception it raised."""
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
    # Marks the local stack's processes so that leftovers can be found if the stack is killed.
    "STARTED_BY",
)
"""The only variables a runner gets from our environment. None of them contain our keys, addresses,
or tokens.
"""
_LOOKS = os.WEXITED | os.WNOHANG | os.WNOWAIT
_ROOT = Path(__file__).resolve().parents[3]
_PROGRAM = """
import sys
sys.path[:] = [one for one in sys.path if one]
sys.path.append({root!r})
from workers.models.custom.runner.main import main
sys.path.remove({root!r})
for name in [one for one in sys.modules if one.partition(".")[0] == "workers"]:
    if not name.startswith("workers.models.custom.runner."):
        del sys.modules[name]
main(
    {fd},
    {folder!r},
    {scratch!r},
    {denied_ports},
    {disk_bytes},
    inspects_only={inspects_only},
    is_aside={is_aside},
)
"""


def runner_environment(
    scratch: Path, python: str, threads: int, added: Mapping[str, str]
) -> dict[str, str]:
    """Returns a runner's environment.

    Args:
        scratch: the runner's folder for temporary files, which is also its home folder.
        python: the runner's interpreter. The interpreter's folder comes first in PATH, so `python`
            and the scripts of the class's packages are found by name.
        added: variables set by the operator, cog.yaml, and the entry.
    """
    passed_on = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    count = str(threads)
    return {
        **passed_on,
        "PATH": os.pathsep.join((str(Path(python).parent), os.environ.get("PATH", os.defpath))),
        "HOME": str(scratch),
        "TMPDIR": str(scratch),
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONIOENCODING": "utf-8:backslashreplace",
        **added,
    }


def _start_program(
    command: Sequence[str], environment: Mapping[str, str], theirs: socket.socket, folder: Path
) -> tuple[subprocess.Popen[bytes], int]:
    """Starts a program in a new session. Returns it and the pipe with its output."""
    output, their_output = os.pipe()
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=their_output,
            stderr=their_output,
            cwd=folder,
            start_new_session=True,
        )
    except BaseException:
        os.close(output)
        raise
    finally:
        os.close(their_output)
    return process, output


class RunnerProcess:
    """A process that runs a folder's class.

    Args:
        environment: variables set by cog.yaml and the entry.
        hidden: values of secrets, which are replaced in the class's output and exceptions.
        resources: limits for the process and everything it starts. None is equivalent to an entry
            without limits.
        denied_ports: TCP ports to which it may not connect.
        inspects_only: True if it exits once the class has been inspected.
        is_aside: True if it calls only `work` and `is_close`, and doesn't set up the class.
        shows: receives the output as it arrives, until `printed.end_showing`. If None, the output
            isn't shown.
    """

    def __init__(
        self,
        folder: Path,
        *,
        python: str = sys.executable,
        threads: int = 1,
        environment: Mapping[str, str] | None = None,
        hidden: Sequence[str] = (),
        resources: ModelResources | None = None,
        denied_ports: Sequence[int] = (),
        inspects_only: bool = False,
        is_aside: bool = False,
        shows: Callable[[str], None] | None = None,
    ) -> None:
        resources = resources or ModelResources()
        self._scratch = Scratch(folder)
        disk = DiskUse(self._scratch.path, resources.disk_bytes)
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        options = {
            "folder": str(folder),
            "denied_ports": list(denied_ports),
            "disk_bytes": disk.limit_bytes,
            "inspects_only": inspects_only,
            "is_aside": is_aside,
        }
        variables = runner_environment(self._scratch.path, python, threads, environment or {})
        self._process, output = self._start(python, options, variables, theirs)
        self.pidfd = -1
        """Becomes readable once the process has exited. -1 if the system doesn't support it (Linux
        before 5.3).
        """
        with contextlib.suppress(OSError, AttributeError):
            self.pidfd = os.pidfd_open(self._process.pid)
        self._hidden = HiddenValues(hidden)
        self.printed = PrintedOutput(output, shows, self._hidden)
        self._reader = FrameReader(MAX_ANSWER_JSON_BYTES)
        self._outgoing = bytearray()
        self.killed_for = ""
        """The reason we killed the process."""
        self.is_at_fault = False
        """True if we killed the process because of the class's behavior, so a retry would have the
        same outcome.
        """
        self.unconfined: list[str] | None = None
        """Descriptions of the confinement features that this system doesn't support.

        None if the process has not started.
        """
        self.view = ""
        """The path where the class sees its folder. Empty if the process has not started."""
        self._family = ProcessFamily(self._process.pid)
        self._limits = LimitWatch(
            self._process.pid,
            self._family,
            resources.memory_bytes or usual_memory_bytes(),
            disk,
            self.kill_at_fault,
        )

    def _start(
        self,
        python: str,
        options: Mapping[str, Any],
        variables: Mapping[str, str],
        theirs: socket.socket,
    ) -> tuple[subprocess.Popen[bytes], int]:
        """Starts the process. Returns the process and the pipe that carries its output."""
        scratch = self._scratch.path
        program = _PROGRAM.format(
            root=str(_ROOT), fd=theirs.fileno(), scratch=str(scratch), **options
        )
        try:
            with theirs:
                return _start_program([python, "-c", program], variables, theirs, scratch)
        except BaseException:
            self._socket.close()
            self._scratch.close()
            raise

    def receive(self, timeout_s: float) -> list[Frame] | None:
        """Waits for frames while sending pending data. Returns the frames that arrived in time.

        Returns None if the process has exited or closed its end.

        Raises:
            ValueError: the received data is not a frame.
        """
        until_s = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, self._wanted_events)
            while True:
                frames = self.take_frames()
                left_s = until_s - time.monotonic()
                if frames:
                    return frames
                if left_s <= 0 or not (ready := selector.select(left_s)):
                    return None if self.has_ended and not self.may_read() else frames
                events = ready[0][1]
                if events & selectors.EVENT_WRITE:
                    self.flush()
                    selector.modify(self._socket, self._wanted_events)
                if events & selectors.EVENT_READ and not self.read():
                    return self.take_frames() or None

    @property
    def _wanted_events(self) -> int:
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)

    def fileno(self) -> int:
        """The socket's descriptor, for `read`, `take_frames` and `flush`."""
        return self._socket.fileno()

    def read(self) -> bool:
        """Reads some of the available data. Returns whether more may follow."""
        try:
            piece = self._socket.recv(1 << 20)
        except BlockingIOError:
            return True
        except ConnectionError:
            return False
        self._reader.feed(piece)
        return bool(piece)

    def may_read(self) -> bool:
        """True if data from an exited process remains to be read."""
        with contextlib.suppress(OSError):
            return bool(self._socket.recv(1, socket.MSG_PEEK))
        return False

    def take_frames(self) -> list[Frame]:
        """Returns the frames read so far.

        Raises:
            ValueError: the received data is not a frame.
        """
        frames: list[Frame] = []
        while (frame := self._reader.next()) is not None:
            if self.unconfined is None:  # its first message, before it runs any of the class's code
                self.unconfined = list(frame.message.get("unconfined", ()))
                self.view = str(frame.message.get("view", ""))
                self.printed.set_mark(bytes.fromhex(frame.message["mark"]))
                self._limits.disk.devices.add(frame.message.get("device", -1))
                self._family.note_namespace()
            else:
                for name in SAID & frame.message.keys():
                    frame.message[name] = self._hidden.clear(str(frame.message[name]))
                frames.append(frame)
        return frames

    def send(self, message: dict[str, Any], blobs: Sequence[bytes] = ()) -> None:
        """Sends a message, or as much of it as the process will read. `receive` sends the rest.

        A process that has exited doesn't receive the message; `receive` then reports the exit.
        """
        self.send_all([(message, blobs)])

    def send_all(self, messages: Sequence[tuple[dict[str, Any], Sequence[bytes]]]) -> None:
        for message, blobs in messages:
            self._outgoing += encode_frame(message, blobs)
        self.flush()
        if len(self._outgoing) > MAX_WAITING_BYTES and not self.killed_for:
            self.killed_for, self.is_at_fault = "it is not reading its input", True
            with contextlib.suppress(ProcessLookupError):
                os.kill(
                    self._process.pid, signal.SIGKILL
                )  # `close` kills the processes that it started

    def flush(self) -> bool:
        """Sends pending data, as much as the process will read. Returns whether some remains."""
        try:
            while self._outgoing:
                with memoryview(self._outgoing) as whole, whole[: 1 << 20] as piece:
                    sent = self._socket.send(piece)
                del self._outgoing[:sent]
        except BlockingIOError:
            return True
        except OSError:
            self._outgoing.clear()
        return False

    def cancel(self, number: int) -> None:
        self.send({"cancel": number})
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGUSR1)

    def kill(self, reason: str) -> None:
        """Kills the process and everything it has started."""
        self.killed_for = self.killed_for or reason
        self._family.end()

    def kill_at_fault(self, reason: str) -> None:
        """Kills the process because of the class's behavior."""
        if not self.killed_for:
            self.is_at_fault = True
        self.kill(reason)

    def read_only_files(self) -> list[str]:
        """Returns the files in its folder that it can't write to because they are only links."""
        return self._scratch.find_linked_files()

    @property
    def is_used_up(self) -> bool:
        """True if predictions left too little memory or disk.

        Call it only while nothing is running.

        If True, the process should be restarted.
        """
        return self._limits.is_above_memory() or self._limits.disk.is_half_full()

    @property
    def may_be_used_up(self) -> bool:
        """True if `is_used_up`, which may be slow, is worth calling."""
        return self._limits.is_above_memory() or self._limits.disk.may_be_half_full()

    @property
    def pid(self) -> int:
        return self._process.pid

    def look(self) -> None:
        """Measures the process's memory and disk use before it computes anything.

        This may be slow.
        """
        self._limits.look()
        self._limits.disk.is_half_full()

    @property
    def memory_bytes(self) -> int:
        """Memory of the whole process family, as measured at most two seconds ago."""
        return max(self._limits.taken_bytes, resident_bytes_of(self._process.pid))

    @property
    def scratch_path(self) -> Path:
        return self._scratch.path

    @property
    def has_ended(self) -> bool:
        """True if the process has exited. `close` waits for it."""
        return bool(os.waitid(os.P_PID, self._process.pid, _LOOKS))

    def close(self) -> int:
        """Waits up to KILL_AFTER_S for the process to exit, kills it, and removes its files.

        Returns its exit status.
        """
        self._limits.close()
        self._socket.close()
        until_s = time.monotonic() + KILL_AFTER_S
        while not self.has_ended and time.monotonic() < until_s:
            time.sleep(0.005)
        # Kills the process's child processes as well. The process ID isn't reused until the process
        # has been waited for.
        if not self.has_ended:
            self.kill_at_fault("it closed its connection to the worker")
        self._family.end()
        self._family.close()  # a timer may be about to kill it
        status = self._process.wait()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
        self.printed.close()
        self._scratch.close()
        return status


def end_of(status: int) -> str:
    """Describes how a process with this exit status ended."""
    if status < 0:
        name = ""
        with contextlib.suppress(ValueError):  # most real-time signals have no name
            name = f" ({signal.Signals(-status).name})"
        return f"was killed by signal {-status}{name}"
    return f"exited with status {status}"
