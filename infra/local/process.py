"""One process of the local stack, in its own group, with a log file and a time limit to stop.

It ends with the process that started it, however that one ends (infra/local/reaper.py).
"""

from __future__ import annotations

import contextlib
import http.client
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
"""What programs send to a terminal to color and to erase."""
POLL_S = 0.02
KILL_LIMIT_S = 30.0
LAST_LINE_BYTES, LAST_LINE_CHARS = 4096, 160
LAST_LINES = 20
ANSWER_LIMIT_S = 5.0
"""What is read of a log to find its last line, and what is shown of that."""
FREE_PORTS = (15_000, 32_000)
PORT_TRIES = 1000
_random = random.SystemRandom()
_ANY_CERTIFICATE = ssl.create_default_context()
_ANY_CERTIFICATE.check_hostname = False
_ANY_CERTIFICATE.verify_mode = ssl.CERT_NONE


class Process:
    """A program while it runs. Entering the context starts it, leaving it stops it.

    Once it ended it stays a zombie until it is stopped or started again: its id, which is that of
    its group too, then is no other process's (not on a macOS before Python 3.13, see `_code`).

    Args:
        name: for people, and for the log file.
        log_dir: gets `<name>.log`, both output streams, overwritten at the first start. Later
            starts append to it, so that it still says why the last one ended.
        environment: its whole environment. None: that of this process.
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
        """True if it was started and has not ended."""
        return self._popen is not None and self._code() is None

    @property
    def pid(self) -> int:
        """Its process id.

        Raises:
            Unavailable: it is not running.
        """
        if self._popen is None:
            raise Unavailable(f"{self.name} is not running")
        return self._popen.pid

    def start(self) -> None:
        """Starts it and returns at once.

        Raises:
            Unavailable: the program can't be run.
        """
        if self._popen is not None and not self.is_running:
            self._popen.wait()
            self._popen = None
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        environment = os.environ if self._environment is None else self._environment
        with self.log_path.open(self._log_mode) as output:
            try:
                # Its own session: Ctrl-C reaches the stack alone, which then stops its parts
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
                    f"{self.name}: {self._command[0]} does not run here: {error.strerror}"
                ) from error
        add_child(self._popen.pid)
        self._log_mode = "ab"

    def wait_ready(self, is_ready: Callable[[], bool], limit_s: float) -> None:
        """Returns once `is_ready` says so.

        Raises:
            Unavailable: it ended first, or `limit_s` seconds passed, after which it is stopped. The
                message has the end of its log.
        """
        deadline_s = time.monotonic() + limit_s
        while not is_ready():
            if not self.is_running:
                raise Unavailable(
                    f"{self.name} {self.ending} before it was ready{self.last_words()}"
                )
            if time.monotonic() > deadline_s:
                self.stop()  # first: what it prints when it is stopped may give the reason
                raise Unavailable(
                    f"{self.name} was not ready within {limit_s:g} s{self.last_words()}"
                )
            time.sleep(POLL_S)

    def wait_done(self, limit_s: float) -> None:
        """Returns once it ended by itself with code 0.

        Raises:
            Unavailable: it ended with another code or not within `limit_s` seconds. The message has
                the end of its log.
        """
        deadline_s = time.monotonic() + limit_s
        while self.is_running:
            if time.monotonic() > deadline_s:
                raise Unavailable(
                    f"{self.name} did not end within {limit_s:g} s{self.last_words()}"
                )
            time.sleep(POLL_S)
        if self._code() != 0:
            raise Unavailable(f"{self.name} {self.ending}{self.last_words()}")

    @property
    def exit_code(self) -> int | None:
        """Its exit code, negative for a signal. None: it runs, or was not started."""
        return self._code()

    @property
    def ending(self) -> str:
        """Returns how it ended, in words."""
        code = self._code()
        if code is None:
            return "is running" if self._popen else "was not started"
        return (
            f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        )

    def ask_to_stop(self) -> None:
        """Sends SIGTERM and returns at once, so that several processes can stop concurrently."""
        if self.is_running:
            self.send_signal(signal.SIGTERM)
            # A paused process handles SIGTERM only once it continues.
            self.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Sends SIGTERM, then kills its group. Does nothing if it was not started."""
        self.ask_to_stop()
        try:
            self._ends_within(self.stop_limit_s)
        finally:
            popen, self._popen = self._popen, None
            if popen is not None:
                # Ends it if it is deaf, and the processes that it left in its group. Before the
                # wait that frees its id, which another group may get.
                _kill_group(popen.pid)
                popen.wait(KILL_LIMIT_S)

    def kill(self) -> None:
        """Kills it with SIGKILL, like a crash. Its children are not killed.

        Raises:
            Unavailable: it is not running, or did not end within KILL_LIMIT_S.
        """
        self.send_signal(signal.SIGKILL)
        if not self._ends_within(KILL_LIMIT_S):
            raise Unavailable(f"{self.name} did not end within {KILL_LIMIT_S:g} s of SIGKILL")

    def pause(self) -> None:
        """Freezes it like a machine that hangs: connections stay open without answers."""
        self.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets a paused process go on."""
        self.send_signal(signal.SIGCONT)

    def send_signal(self, number: signal.Signals) -> None:
        """Sends it a signal.

        Raises:
            Unavailable: it is not running.
        """
        popen = self._popen
        if popen is None:
            raise Unavailable(f"{self.name} is not running")
        if self._code() is None:
            os.kill(popen.pid, number)

    def _code(self) -> int | None:
        """Returns its exit code, negative for a signal; None if it runs or was not started."""
        popen = self._popen
        if popen is None or popen.returncode is not None or not hasattr(os, "waitid"):
            return None if popen is None else popen.poll()
        try:
            ended = os.waitid(os.P_PID, popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return popen.poll()  # this process ignores SIGCHLD: the system keeps no zombies
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def _ends_within(self, limit_s: float) -> bool:
        """Returns once it has ended or `limit_s` seconds passed: whether it has ended."""
        deadline_s, pause_s = time.monotonic() + limit_s, POLL_S / 32
        while self.is_running:
            if time.monotonic() > deadline_s:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, POLL_S)
        return True

    @property
    def last_line(self) -> str:
        """The last line of its log, or its end. Empty if the log is."""
        with contextlib.suppress(OSError), self.log_path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - LAST_LINE_BYTES))
            # A carriage return alone ends a line too: progress bars are written over themselves.
            text = _CONTROLS.sub("", log.read().decode(errors="replace"))
            lines = [line.strip() for line in text.splitlines()]
            last = next((line for line in reversed(lines) if line), "")
            return "".join(filter(str.isprintable, last))[-LAST_LINE_CHARS:]
        return ""

    def last_words(self) -> str:
        """The end of its log, as the end of an error's message."""
        said = (
            self.log_path.read_text(errors="replace").strip().splitlines()[-LAST_LINES:]
            if self.log_path.exists()
            else []
        )
        return "; " + (
            "\n  ".join([f"the end of {self.log_path}:", *said])
            if said
            else f"its log is empty: {self.log_path}"
        )


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return  # macOS permits no signal to a group of zombies only


def listens(port: int, host: str = "127.0.0.1") -> bool:
    """Returns whether something accepts connections on `port` of `host`, on this machine."""
    try:
        with socket.create_connection((host, port), timeout=1.0):
            return True
    except OSError:
        return False


def answers(port: int, path: str, *, host: str = "127.0.0.1", tls: bool = False) -> bool:
    """Returns whether GET `path` on `port` of `host`, on this machine, is answered with 200.

    With `tls` any certificate is fine: it is for the name that others use.
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
    """Returns a free TCP port of 127.0.0.1, reserved while this process lives.

    Raises:
        Unavailable: none was found.
    """
    for _ in range(PORT_TRIES):
        # Below the kernel's own ephemeral ports, which another process might get before our caller.
        port = _random.randrange(*FREE_PORTS)
        # The UDP port of the same number, which is not used otherwise, is the reservation. The
        # kernel frees it when this process ends.
        claim = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            claim.bind(("127.0.0.1", port))
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            claim.close()
            continue
        claim.detach()  # keeps it open until this process ends
        return port
    raise Unavailable(
        f"no free port between {FREE_PORTS[0]} and {FREE_PORTS[1]} in {PORT_TRIES} tries"
    )
