"""A process in the local stack, with its own process group, log file and stop timeout.

It is killed when the process that started it exits, for whatever reason (infra/local/reaper.py).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, Self

from infra.local.reaper import add_child, child_marks
from shared.errors import Unavailable

_CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""Escape sequences that programs send to a terminal to set colors or erase text."""
POLL_S = 0.02
KILL_LIMIT_S = 30.0
LAST_LINE_BYTES, LAST_LINE_CHARS = 4096, 160
"""Number of bytes read from the end of a log to find its last line, and how many of the line's
characters to show.
"""
LAST_LINES = 20
ANSWER_LIMIT_S = 5.0
FREE_PORTS = (15_000, 32_000)
PORT_TRIES = 1000
_random = random.SystemRandom()
_ANY_CERTIFICATE = ssl.create_default_context()
_ANY_CERTIFICATE.check_hostname = False
_ANY_CERTIFICATE.verify_mode = ssl.CERT_NONE


class Process:
    """A running program. Entering the context starts the program, and leaving it stops the program.

    Once the program has exited, it remains a zombie until it is stopped or started again, so that
    no other process gets its ID, which is also its group's ID (except on macOS before Python 3.13;
    see `exit_code`).

    Args:
        log_dir: folder for `<name>.log`, which contains both output streams and is overwritten at
            the first start. Later starts append to the file, so it still contains the reason for
            the last exit.
        environment: the process's complete environment. None means the current process's variables.
        stop_limit_s: seconds from SIGTERM until its whole group is killed.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log_dir: Path,
        *,
        environment: Mapping[str, str] | None = None,
        stop_limit_s: float = 10.0,
    ) -> None:
        self.name = name
        self.log_path = log_dir / f"{name}.log"
        self._command = list(command)
        self._environment = environment
        self.stop_limit_s = stop_limit_s
        self._popen: subprocess.Popen[bytes] | None = None
        self._log_mode: Literal["wb", "ab"] = "wb"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def is_running(self) -> bool:
        return self._popen is not None and self.exit_code is None

    @property
    def pid(self) -> int:
        if self._popen is None:
            raise Unavailable(f"{self.name} is not running")
        return self._popen.pid

    def start(self) -> None:
        """Starts the process and returns immediately.

        Raises:
            Unavailable: the program can't be executed.
        """
        if self._popen is not None and not self.is_running:
            self._popen.wait()
            self._popen = None
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        environment = os.environ if self._environment is None else self._environment
        with self.log_path.open(self._log_mode) as output:
            try:
                # It gets its own session, so Ctrl-C reaches only the stack, which stops its parts
                # in order.
                self._popen = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**environment, **child_marks()},
                    start_new_session=True,
                )
            except OSError as error:
                raise Unavailable(
                    f"{self.name}: {self._command[0]} can't run on this machine: {error.strerror}"
                ) from error
        add_child(self._popen.pid)
        self._log_mode = "ab"

    def wait_ready(self, is_ready: Callable[[], bool], limit_s: float) -> None:
        """Waits until `is_ready` returns true. Stops the process if the wait fails.

        Raises:
            Unavailable: the process exited first, or was not ready after `limit_s` seconds. The
                message contains the end of the process's log.
        """
        deadline_s = time.monotonic() + limit_s
        try:
            while not is_ready():
                if not self.is_running:
                    raise Unavailable(
                        f"{self.name} {self.ending} before it was ready{self.last_words()}"
                    )
                if time.monotonic() > deadline_s:
                    self.stop()  # done first, because output during shutdown may contain the reason
                    raise Unavailable(
                        f"{self.name} was not ready within {limit_s:g} s{self.last_words()}"
                    )
                time.sleep(POLL_S)
        except BaseException:
            self.stop()
            raise

    def wait_done(self, limit_s: float) -> None:
        """Waits until the process exits with code 0.

        Raises:
            Unavailable: it exited with a different code, or not within `limit_s` seconds. The
                message contains the end of its log.
        """
        deadline_s = time.monotonic() + limit_s
        while self.is_running:
            if time.monotonic() > deadline_s:
                raise Unavailable(
                    f"{self.name} did not exit within {limit_s:g} s{self.last_words()}"
                )
            time.sleep(POLL_S)
        if self.exit_code != 0:
            raise Unavailable(f"{self.name} {self.ending}{self.last_words()}")

    @property
    def ending(self) -> str:
        """Describes how the process exited, for messages."""
        code = self.exit_code
        if code is None:
            return "is running" if self._popen else "was not started"
        return (
            f"was killed by {signal.Signals(-code).name}"
            if code < 0
            else (f"exited with code {code}")
        )

    def ask_to_stop(self) -> None:
        """Sends SIGTERM and returns immediately, so that processes can stop concurrently."""
        if self.is_running:
            self.send_signal(signal.SIGTERM)
            # A paused process handles SIGTERM only after it is resumed.
            self.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Sends SIGTERM, then kills the process group.

        Does nothing if the process was not started.
        """
        self.ask_to_stop()
        try:
            self._ends_within(self.stop_limit_s)
        finally:
            popen, self._popen = self._popen, None
            if popen is not None:
                # Kills the process if it ignores SIGTERM, along with any processes left in its
                # group. This happens before the wait that frees its ID, which another group could
                # then get.
                _kill_group(popen.pid)
                popen.wait(KILL_LIMIT_S)

    def kill(self) -> None:
        """Kills the process with SIGKILL, simulating a crash. Its children are not killed.

        Raises:
            Unavailable: it is not running, or did not exit within KILL_LIMIT_S.
        """
        self.send_signal(signal.SIGKILL)
        if not self._ends_within(KILL_LIMIT_S):
            raise Unavailable(f"{self.name} did not exit within {KILL_LIMIT_S:g} s of SIGKILL")

    def pause(self) -> None:
        """Freezes the process like a hung machine: connections stay open, but nothing responds."""
        self.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.send_signal(signal.SIGCONT)

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal to the process.

        Raises:
            Unavailable: it is not running.
        """
        popen = self._popen
        if popen is None:
            raise Unavailable(f"{self.name} is not running")
        if self.exit_code is None:
            os.kill(popen.pid, number)

    @property
    def exit_code(self) -> int | None:
        """The exit code, negative for a signal.

        None if the process is running or was not started.
        """
        popen = self._popen
        if popen is None or popen.returncode is not None or not hasattr(os, "waitid"):
            return None if popen is None else popen.poll()
        try:
            ended = os.waitid(os.P_PID, popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return popen.poll()  # this process ignores SIGCHLD, so the system keeps no zombies
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def _ends_within(self, limit_s: float) -> bool:
        """Waits up to `limit_s` seconds for the process to exit. Returns whether it has exited."""
        deadline_s, pause_s = time.monotonic() + limit_s, POLL_S / 32
        while self.is_running:
            if time.monotonic() > deadline_s:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, POLL_S)
        return True

    @property
    def last_line(self) -> str:
        """The last line of the log, or its message if it is a JSON line. Empty if there is none.

        Truncated to the end, where progress bars show their progress.
        """
        with contextlib.suppress(OSError), self.log_path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - LAST_LINE_BYTES))
            # A carriage return also ends a line, because progress bars overwrite themselves.
            text = _CONTROLS.sub("", log.read().decode(errors="replace"))
            lines = [line.strip() for line in text.splitlines()]
            last = next((line for line in reversed(lines) if line), "")
            return "".join(filter(str.isprintable, _message_in(last)))[-LAST_LINE_CHARS:]
        return ""

    def last_words(self) -> str:
        """Returns the end of the log, to append to an error message."""
        log = self.log_path.read_text(errors="replace") if self.log_path.exists() else ""
        if lines := log.strip().splitlines()[-LAST_LINES:]:
            return "; " + "\n  ".join([f"the end of {self.log_path}:", *lines])
        return f"; its log is empty: {self.log_path}"


def _message_in(line: str) -> str:
    """Returns the message in a JSON line of a log, or the whole line if it isn't one."""
    try:
        entry = json.loads(line)
    except ValueError:
        return line
    return str(entry.get("message", line)) if isinstance(entry, dict) else line


def _kill_group(pid: int) -> None:
    # macOS does not permit sending signals to a group of zombies.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def listens(port: int, host: str = "127.0.0.1") -> bool:
    """Returns whether something on this machine accepts connections on `port` of `host`."""
    try:
        with socket.create_connection((host, port), timeout=1.0):
            return True
    except OSError:
        return False


def responds(port: int, request: bytes, response: bytes) -> bool:
    """Returns whether a server on this machine sends `response` within a second of `request`."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection:
            connection.sendall(request)
            return connection.recv(len(response)) == response
    except OSError:
        return False


def answers(port: int, path: str, *, host: str = "127.0.0.1", tls: bool = False) -> bool:
    """Returns whether GET `path` on `port` of `host`, on this machine, returns status 200.

    With `tls`, any certificate is accepted, because the certificate is for the name that other
    machines use.
    """
    connection = (
        http.client.HTTPSConnection(host, port, timeout=ANSWER_LIMIT_S, context=_ANY_CERTIFICATE)
        if tls
        else http.client.HTTPConnection(host, port, timeout=ANSWER_LIMIT_S)
    )
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def free_port() -> int:
    """Returns a free TCP port on 127.0.0.1, reserved while this process runs.

    Raises:
        Unavailable: no free port was found.
    """
    for _ in range(PORT_TRIES):
        # Below the kernel's ephemeral ports, which another process might grab before our caller
        # does.
        port = _random.randrange(*FREE_PORTS)
        # The UDP port with the same number is otherwise unused and serves as the reservation. The
        # kernel frees it when this process exits.
        claim = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            claim.bind(("127.0.0.1", port))
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            claim.close()
            continue
        claim.detach()  # keeps it open until this process exits
        return port
    raise Unavailable(
        f"found no free port between {FREE_PORTS[0]} and {FREE_PORTS[1]} in {PORT_TRIES} tries"
    )
