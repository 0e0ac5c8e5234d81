"""The runner of a class, as the model process sees it: starts, feeds, cancels and kills it."""

from __future__ import annotations

import codecs
import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shared.catalog_entry import ModelResources
from shared.messages import PrintedLogs
from workers.models.custom.limits import DiskUse, LimitWatch, ProcessFamily, usual_memory_bytes
from workers.models.custom.runner.frames import Frame, FrameReader, encode_frame
from workers.models.custom.scratch import Scratch

KILL_AFTER_S = 2.0
"""The time that a canceled prediction has to end by itself."""
MAX_LOG_CHARS = 32 * 1024
"""Of what a prediction printed, its end is kept."""
MAX_READ_BYTES = 1024 * 1024
"""Read of what a process prints without a pause, so that one that never pauses holds up nobody."""
MAX_WAITING_BYTES = 512 * 1024 * 1024
"""Of what is sent to a process that reads nothing."""
SAID = frozenset({"error", "failed", "log", "batch_error"})
"""The fields of messages that have words of the class, or of what it raised."""
MIN_HIDDEN_CHARS = 6
"""A shorter secret is not looked for in what a class prints: it may be part of other words."""
HIDDEN = "[secret]"
SHOWN_BYTES_PER_S, MAX_SHOWN_BYTES = 16 * 1024, 64 * 1024
"""Rate and burst of the output of `setup` that goes to the operator's log while it runs."""
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
    # A mark of the local stack, by which what is left is found if the stack was killed.
    "STARTED_BY",
)
"""All that the runner gets of our environment. It has no key, address or token of ours."""
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
    """The environment of a runner.

    Args:
        scratch: its folder for temporary files, which is also its home.
        python: its interpreter. The folder of that comes first in PATH, so `python` and the scripts
            of the class's packages are found by name.
        threads: for libraries that compute on a CPU.
        added: what the operator, cog.yaml and the entry set.
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


class HiddenValues:
    """Replaces the values of secrets in what a class prints and raises.

    Args:
        values: of the secrets.
    """

    def __init__(self, values: Sequence[str]) -> None:
        # The longest first: another may be a part of it.
        long = {one for one in values if len(one) >= MIN_HIDDEN_CHARS}
        self._values = sorted(long, key=len, reverse=True)

    def clear(self, text: str) -> str:
        """Returns a text without the values."""
        for value in self._values:
            text = text.replace(value, HIDDEN)
        return text

    def split(self, text: str) -> tuple[str, str]:
        """Splits off the end of a text that may be the beginning of a value."""
        most = max((_overlap(text, value) for value in self._values), default=0)
        at = len(text) - most
        return text[:at], text[at:]


def _overlap(text: str, value: str) -> int:
    """The length of the longest end of a text that begins a value."""
    at = text.find(value[0], max(0, len(text) - len(value) + 1))
    while at >= 0:
        if value.startswith(text[at:]):
            return len(text) - at
        at = text.find(value[0], at + 1)
    return 0


def show(text: str) -> None:
    """Writes text to stderr, which is the operator's log or a person's terminal."""
    sys.stderr.buffer.write(text.encode(errors="replace"))
    sys.stderr.buffer.flush()


class BoundedShow:
    """Writes text to stderr, up to MAX_SHOWN_BYTES at once and SHOWN_BYTES_PER_S on average.

    The rest is left out, and the number of its characters is shown instead.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._room = float(MAX_SHOWN_BYTES)
        self._looked_s = clock()
        self._left_out = 0

    def __call__(self, text: str) -> None:
        """Shows a text, or its beginning."""
        now_s = self._clock()
        gained = (now_s - self._looked_s) * SHOWN_BYTES_PER_S
        self._room, self._looked_s = min(MAX_SHOWN_BYTES, self._room + gained), now_s
        shown = text[: int(self._room)]
        self._room -= len(shown)
        if shown and self._left_out:
            show(f"\n[{self._left_out} characters left out]\n")
            self._left_out = 0
        self._left_out += len(text) - len(shown)
        if shown:
            show(shown)


class PrintedOutput:
    """What a process prints. A thread reads it, so that the process never waits for a reader.

    Args:
        fd: the end of the pipe to read.
        shows: gets the text as it comes, until `end_showing`. None: nobody does.
        hidden: replaced in all of it.
    """

    def __init__(
        self,
        fd: int,
        shows: Callable[[str], None] | None = None,
        hidden: HiddenValues | None = None,
    ) -> None:
        self._fd = fd
        self._shows = shows
        self._hidden = hidden or HiddenValues([])
        self._held = ""
        """The end of what was read, which may be the beginning of a secret."""
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
            for _ in range(MAX_READ_BYTES >> 16):
                try:
                    piece = os.read(self._fd, 1 << 16)
                except BlockingIOError:
                    return True
                except OSError:
                    piece = b""
                if not piece:
                    self._keep(self._held)
                    self._held = ""
                    return False
                text = self._hidden.clear(self._held + self._decoder.decode(piece))
                text, self._held = self._hidden.split(text)
                self._keep(text)
        return True

    def _keep(self, text: str) -> None:
        if self._shows is not None:
            self._shows(text)
        self._kept += text
        if (extra := len(self._kept) - MAX_LOG_CHARS) > 0:
            self._left_out += extra
            self._kept = self._kept[extra:]

    def end_showing(self) -> None:
        """Shows the rest of what was printed so far, and forgets it: it belongs to no prediction.

        Later output is kept only. Without anyone who shows it, nothing changes.
        """
        if self._shows is not None:
            self.take()
            with self._lock:
                self._shows = None

    def look(self) -> PrintedLogs:
        """Returns what was printed since the last call of `take`."""
        self._drain()
        with self._lock:
            return PrintedLogs(self._kept, self._left_out)

    def take(self) -> PrintedLogs:
        """Returns what was printed since the last call."""
        self._drain()
        with self._lock:
            self._keep(self._held)  # it belongs to nobody else
            self._held = ""
            taken = PrintedLogs(self._kept, self._left_out)
            self._kept, self._left_out = "", 0
        return taken

    def close(self) -> None:
        """Closes the pipe, once the process has ended."""
        self._drain()
        self._thread.join(timeout=1.0)
        with contextlib.suppress(OSError):
            os.close(self._fd)


def _started(
    command: Sequence[str], environment: Mapping[str, str], theirs: socket.socket, folder: Path
) -> tuple[subprocess.Popen[bytes], int]:
    """Starts a program in a session of its own. Returns it, and the pipe of what it prints."""
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
    finally:
        os.close(their_output)
    return process, output


class RunnerProcess:
    """A process that runs the class of a folder.

    Args:
        folder: of the class.
        python: the interpreter that has its packages.
        threads: for libraries that compute on a CPU.
        environment: what cog.yaml and the entry set.
        hidden: values of secrets, which are replaced in what it prints and raises.
        resources: that it may take, with all that it starts. None: as an entry that says nothing.
        denied_ports: TCP ports to which it may not connect.
        inspects_only: whether it ends when the class is inspected.
        is_aside: whether it calls `work` and `is_close` only, and does not set up the class.
        shows: gets what it prints as it comes, until `printed.end_showing`. None: nobody does.
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
        program = _PROGRAM.format(
            root=str(_ROOT),
            fd=theirs.fileno(),
            folder=str(folder),
            scratch=str(self._scratch.path),
            denied_ports=list(denied_ports),
            disk_bytes=disk.limit_bytes,
            inspects_only=inspects_only,
            is_aside=is_aside,
        )
        variables = runner_environment(self._scratch.path, python, threads, environment or {})
        with theirs:
            self._process, output = _started(
                [python, "-c", program], variables, theirs, self._scratch.path
            )
        self._hidden = HiddenValues(hidden)
        self.printed = PrintedOutput(output, shows, self._hidden)
        self._reader = FrameReader()
        self._put_back: list[Frame] = []
        self._outgoing = bytearray()
        self._timers: dict[int, threading.Timer] = {}
        self.killed_for = ""
        """Why we killed it."""
        self.is_at_fault = False
        """Whether we killed it for what the class did, so that it would do so again."""
        self.unconfined: list[str] | None = None
        """What this system has no means for, in words. None: the process has not begun."""
        self.view = ""
        """Where the class sees its folder. Empty: the process has not begun."""
        self._family = ProcessFamily(self._process.pid)
        self._limits = LimitWatch(
            self._process.pid,
            self._family,
            resources.memory_bytes or usual_memory_bytes(),
            disk,
            self.kill_at_fault,
        )

    def receive(
        self, timeout_s: float, *, wakes_on: socket.socket | None = None
    ) -> list[Frame] | None:
        """Waits for frames, and sends what waits. Returns the frames that came in time.

        None: the process has ended, or has closed its end.

        Args:
            timeout_s: the longest wait.
            wakes_on: the wait also ends when something can be read from this.

        Raises:
            ValueError: what came is no frame.
        """
        until_s = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, self._wanted_events)
            if wakes_on is not None:
                selector.register(wakes_on, selectors.EVENT_READ)
            while True:
                frames = self._take_frames()
                left_s = until_s - time.monotonic()
                if frames:
                    return frames
                if left_s <= 0 or not (ready := selector.select(left_s)):
                    return None if self.has_ended and not self._may_read() else frames
                events = sum(mask for key, mask in ready if key.fileobj is self._socket)
                if events & selectors.EVENT_WRITE:
                    self._flush()
                    selector.modify(self._socket, self._wanted_events)
                if events & selectors.EVENT_READ and not self._read():
                    return self._take_frames() or None
                if not events & selectors.EVENT_READ and len(ready) > bool(events):
                    return frames  # it was woken

    @property
    def _wanted_events(self) -> int:
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)

    def _read(self) -> bool:
        """Reads what is there. Returns whether more may come."""
        try:
            piece = self._socket.recv(1 << 20)
        except BlockingIOError:
            return True
        except ConnectionError:
            return False
        self._reader.feed(piece)
        return bool(piece)

    def _may_read(self) -> bool:
        """True if something is left to be read of a process that has ended."""
        with contextlib.suppress(OSError):
            return bool(self._socket.recv(1, socket.MSG_PEEK))
        return False

    def put_back(self, frames: Sequence[Frame]) -> None:
        """Leaves frames for the next call of `receive`."""
        self._put_back = [*frames, *self._put_back]

    def _take_frames(self) -> list[Frame]:
        frames, self._put_back = self._put_back, []
        while (frame := self._reader.next()) is not None:
            if self.unconfined is None:  # its first message, before it runs code of the class
                self.unconfined = list(frame.message.get("unconfined", ()))
                self.view = str(frame.message.get("view", ""))
                self._limits.disk.devices.add(frame.message.get("device", -1))
                self._family.note_namespace()
            else:
                for name in SAID & frame.message.keys():
                    frame.message[name] = self._hidden.clear(str(frame.message[name]))
                frames.append(frame)
        return frames

    def send(self, message: dict[str, Any], blobs: Sequence[bytes] = ()) -> None:
        """Sends a message, as far as the process reads. `receive` sends the rest.

        A process that has ended does not get it, which `receive` says.
        """
        self.send_all([(message, blobs)])

    def send_all(self, messages: Sequence[tuple[dict[str, Any], Sequence[bytes]]]) -> None:
        """Sends messages as one piece, as `send` does."""
        for message, blobs in messages:
            self._outgoing += encode_frame(message, blobs)
        self._flush()
        if len(self._outgoing) > MAX_WAITING_BYTES:
            self.kill_at_fault("it reads nothing")

    def _flush(self) -> None:
        try:
            while self._outgoing:
                with memoryview(self._outgoing) as whole, whole[: 1 << 20] as piece:
                    sent = self._socket.send(piece)
                del self._outgoing[:sent]
        except BlockingIOError:
            return
        except OSError:
            self._outgoing.clear()

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
        self._family.end()

    def kill_at_fault(self, reason: str) -> None:
        """Kills it for what the class did."""
        if not self.killed_for:
            self.is_at_fault = True
        self.kill(reason)

    def read_only_files(self) -> list[str]:
        """The files of its folder that it can't write, since it has only links to them."""
        return self._scratch.linked_files()

    @property
    def is_used_up(self) -> bool:
        """True if what was computed left too little memory or disk. Ask while it computes nothing.

        True is a reason to start it again.
        """
        return self._limits.is_above_memory() or self._limits.disk.is_half_full()

    @property
    def scratch_path(self) -> Path:
        """The folder below which it writes."""
        return self._scratch.path

    @property
    def has_ended(self) -> bool:
        """True if the process is over. It is waited for by `close`."""
        return bool(os.waitid(os.P_PID, self._process.pid, _LOOKS))

    def close(self) -> int:
        """Ends the process and removes its files. Returns its exit status."""
        for number in list(self._timers):
            self.ended(number)
        self._limits.close()
        self._socket.close()
        until_s = time.monotonic() + KILL_AFTER_S
        while not self.has_ended and time.monotonic() < until_s:
            time.sleep(0.005)
        # With what it has started. Its id is not reused before it is waited for.
        if not self.has_ended:
            self.kill_at_fault("it closed its connection to the worker")
        self._family.end()
        self._family.close()  # a timer may be about to kill it
        status = self._process.wait()
        self.printed.close()
        self._scratch.close()
        return status


def pass_on(printed: PrintedLogs) -> None:
    """Writes output that belongs to no single prediction to the operator's log, which is stderr."""
    if printed.end:
        print(printed.after(0), end="", file=sys.stderr, flush=True)


def end_of(status: int) -> str:
    """How a process ended, in words."""
    if status < 0:
        return f"was killed by signal {-status} ({signal.Signals(-status).name})"
    return f"ended with exit status {status}"
