"""The template for model processes: its client in the I/O process, and the process that forks.

A fork is ready in a fraction of the time it takes to import torch, and all forks share the memory
pages of libraries and weights. The first fork request starts the template. If the template dies,
the next request restarts it, and the processes it has forked keep running.

Between the I/O process and the template, one message is one packet. The I/O process sends a
ForkRequest with two descriptors: the model process's end of its socket, and its output pipe. The
template sends one TemplateReady, one ForkResult with a pidfd for each ForkRequest, and one
ProcessEnded for each process that has exited.

The template process loads libraries and weights, and forks model processes on request. It doesn't
run models, start threads, or initialize CUDA, because none of those would survive a fork. If a
library does so anyway, the forked process re-executes its program instead. This is as slow as
running without a template, and just as safe.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import importlib
import logging
import os
import select
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import msgspec

from shared.errors import MALFORMED, ModelFailed, PenstockError
from workers.runtime.child_process import ForkedProcess, spawn
from workers.runtime.output import ChildOutput

PACKET_MAX_BYTES = 4096

EXIT_LIMIT_S = 5.0

TEMPLATE_NAME = "penstock-forks"
MODEL_PROCESS_NAME = "penstock-model"
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_SIGKILL = 9

log = logging.getLogger(__name__)


class ForkRequest(msgspec.Struct, tag="fork"):
    """Fork a model process for `device`. `number` counts the forks made by this template."""

    number: int
    device: str


class TemplateReady(msgspec.Struct, tag="loaded"):
    """The libraries, and the weights of `models` models, are loaded.

    `other_threads` contains the name of each thread other than the main thread. Forking is safe if
    it is empty.
    """

    load_s: float
    models: int
    memory_bytes: int
    other_threads: list[str]


class ForkResult(msgspec.Struct, tag="forked"):
    """The process forked for ForkRequest `number` has process ID `pid`."""

    number: int
    pid: int


class ProcessEnded(msgspec.Struct, tag="ended"):
    """Process `pid` has exited. `status` has the same meaning as in subprocess."""

    pid: int
    status: int


TemplateMessage = TemplateReady | ForkResult | ProcessEnded

IMPORT_FIRST = "--import-first"

_encoder = msgspec.msgpack.Encoder()
_arguments_encoder = msgspec.json.Encoder()
_arguments_decoder = msgspec.json.Decoder(list[str])
_request_decoder = msgspec.msgpack.Decoder(ForkRequest)
_message_decoder: msgspec.msgpack.Decoder[TemplateMessage] = msgspec.msgpack.Decoder(
    TemplateMessage
)


def send(
    control: socket.socket,
    message: ForkRequest | TemplateMessage,
    descriptors: list[int] | None = None,
) -> None:
    socket.send_fds(control, [_encoder.encode(message)], descriptors or [])


def receive_request(control: socket.socket) -> tuple[ForkRequest | None, list[int]]:
    """Returns the next request and its descriptors, or None if the I/O process hung up or died."""
    body, descriptors, _, _ = socket.recv_fds(control, PACKET_MAX_BYTES, 2)
    return (_request_decoder.decode(body) if body else None), descriptors


def receive_message(control: socket.socket) -> tuple[TemplateMessage | None, list[int]]:
    """Returns the next message and its descriptor, or None if the template died.

    Raises:
        BlockingIOError: no message is available.
    """
    body, descriptors, _, _ = socket.recv_fds(control, PACKET_MAX_BYTES, 1)
    return (_message_decoder.decode(body) if body else None), descriptors


def can_fork() -> bool:
    """Returns whether this system supports a template, which requires Linux and pidfds."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


class EarlyTemplate:
    """A template process that imports libraries while the models' files are being downloaded.

    Then it reads the rest of its command line from its input. An async context manager, which ends
    the process unless a Template has taken it over.

    Args:
        program: the start of the command.
        modules: names of modules that take long to import.
    """

    def __init__(
        self, program: Sequence[str], modules: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self._program = program
        self._options = [f"{IMPORT_FIRST}={module}" for module in modules]
        self._environment = environment
        self._running: _TemplateProcess | None = None

    async def __aenter__(self) -> Self:
        command = (*self._program, *self._options)
        self._running = await _TemplateProcess.start(
            command, self._environment, asyncio.subprocess.PIPE
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._running is not None:
            await self._running.close(at_once=True)

    def take_over(self, command: Sequence[str]) -> _TemplateProcess | None:
        """Returns the process, which runs `command` from now on. None if it isn't running."""
        assert tuple(command[: len(self._program)]) == tuple(self._program), "this is a bug"
        running = self._running
        if running is None:
            return None
        if running.is_over.is_set():
            tail = running.output.tail()
            log.warning("the early template exited", extra={"pid": running.pid, "output": tail})
            return None
        self._running = None
        running.write_input(_arguments_encoder.encode(command[len(self._program) :]))
        return running


class Template:
    """Forks model processes from the program `command`, which is started on demand.

    Args:
        early: a process of the same program that has started already, if any.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        start_timeout_s: float,
        early: EarlyTemplate | None = None,
    ) -> None:
        self._early = early
        self._command = command
        self._environment = environment
        self._start_timeout_s = start_timeout_s
        self._starting = asyncio.Lock()
        self._running: _TemplateProcess | None = None
        self._watching: set[asyncio.Task[None]] = set()

    @property
    def pid(self) -> int | None:
        """The template's process ID while it is running."""
        return (
            None if self._running is None or self._running.is_over.is_set() else self._running.pid
        )

    @property
    def memory_bytes(self) -> int:
        """The template's resident memory, most of which is shared with the forked processes."""
        loaded = None if self._running is None else self._running.loaded.result()
        return 0 if loaded is None else loaded.memory_bytes

    async def fork(self, device: str, theirs: socket.socket) -> ForkedProcess:
        """Forks a model process for `device`, passing it `theirs` as its end of the socket.

        Raises:
            ModelFailed: the template can't be started, died, or does not respond.
        """
        running = await self._up()
        try:
            async with asyncio.timeout(self._start_timeout_s):
                return await running.fork(device, theirs)
        except TimeoutError as error:
            running.kill()
            raise ModelFailed(
                f"no model process could be forked within {self._start_timeout_s:g} s"
            ) from error

    async def _up(self) -> _TemplateProcess:
        async with self._starting:
            if self._running is None or self._running.is_over.is_set():
                self._running = await self._start()
                task = asyncio.create_task(self._watch(self._running))
                self._watching.add(task)
                task.add_done_callback(self._watching.discard)
            return self._running

    async def _start(self) -> _TemplateProcess:
        early, self._early = self._early, None
        running = None if early is None else early.take_over(self._command)
        if running is None:
            running = await _TemplateProcess.start(self._command, self._environment)
        try:
            async with asyncio.timeout(self._start_timeout_s):
                loaded = await running.loaded
        except BaseException as error:
            await running.close(at_once=True)
            if not isinstance(error, TimeoutError):
                raise
            tail = running.output.tail()
            reason = f"the model process was not ready within {self._start_timeout_s:g} s{tail}"
            raise ModelFailed(reason) from error
        if loaded is None:
            await running.close()
            reason = f"(status {running.status}){running.output.tail()}"
            raise ModelFailed(f"the model process exited before it was ready {reason}")
        facts = {
            "pid": running.pid,
            "load_s": round(loaded.load_s, 3),
            "memory_bytes": loaded.memory_bytes,
        }
        log.info("model process template is ready", extra=facts | {"models": loaded.models})
        if loaded.other_threads:
            log.warning(
                "the template has threads, so each model process has to start the program from "
                "scratch",
                extra={"pid": running.pid, "threads": loaded.other_threads},
            )
        return running

    async def _watch(self, running: _TemplateProcess) -> None:
        """Cleans up after a template that died. Starts a new one if the old one ever forked."""
        await running.is_over.wait()
        await running.close(at_once=True)
        log.error(
            "model process template exited",
            extra={"status": running.status, "pid": running.pid},
        )
        if running.forks:
            with contextlib.suppress(
                PenstockError
            ):  # the next request tries again and gets the error
                await self._up()

    async def close(self) -> None:
        """Shuts down the template. The forked processes exit when their sockets close."""
        for task in list(self._watching):
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        if self._running is not None:
            await self._running.close()


class _TemplateProcess:
    """One template process: its requests, and the processes it forked."""

    def __init__(self, control: socket.socket, process: asyncio.subprocess.Process) -> None:
        loop = asyncio.get_running_loop()
        self._control = control
        self._process = process
        self._forking: dict[int, asyncio.Future[ForkedProcess]] = {}
        self._children: dict[int, ForkedProcess] = {}
        self.output = ChildOutput(process)
        self.loaded: asyncio.Future[TemplateReady | None] = loop.create_future()
        self.is_over = asyncio.Event()
        self.forks = 0
        control.setblocking(False)
        loop.add_reader(control, self._on_readable)

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        environment: Mapping[str, str],
        stdin: int = asyncio.subprocess.DEVNULL,
    ) -> Self:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                process = await spawn(command, environment, theirs, "--template-fd", stdin)
            except BaseException:
                ours.close()
                raise
        return cls(ours, process)

    def write_input(self, data: bytes) -> None:
        """Writes the process's whole input. The process reads it once its imports are done."""
        assert self._process.stdin is not None, "the process has no input; this is a bug"
        self._process.stdin.write(data)
        self._process.stdin.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        return self._process.returncode

    async def fork(self, device: str, theirs: socket.socket) -> ForkedProcess:
        """See `Template.fork`."""
        output, their_output = os.pipe()
        try:
            pipe, protocol = await asyncio.get_running_loop().connect_read_pipe(
                _Output, os.fdopen(output, "rb", 0)
            )
            try:
                child = await self._request_fork(device, [theirs.fileno(), their_output])
            except BaseException:
                pipe.close()
                raise
        finally:
            os.close(their_output)
        child.stdout = protocol.reader
        return child

    async def _request_fork(self, device: str, descriptors: list[int]) -> ForkedProcess:
        """Asks the template for a process that inherits `descriptors`.

        Raises:
            ModelFailed: the template has exited, or doesn't read its requests.
        """
        self.forks += 1
        number = self.forks
        try:
            send(self._control, ForkRequest(number, device), descriptors)
        except BlockingIOError as error:
            raise ModelFailed("the model process template does not read its requests") from error
        except OSError as error:
            raise ModelFailed(f"the model process template has exited: {error}") from error
        future: asyncio.Future[ForkedProcess] = asyncio.get_running_loop().create_future()
        self._forking[number] = future
        return await future

    def _on_readable(self) -> None:
        try:
            answer, descriptors = receive_message(self._control)
        except BlockingIOError:
            return
        except (ConnectionError, *MALFORMED):
            answer, descriptors = None, []
        match answer:
            case TemplateReady():
                if not self.loaded.done():
                    self.loaded.set_result(answer)
            case ForkResult():
                self._on_fork(answer, descriptors[0])
            case ProcessEnded():
                self._on_process_ended(answer)
            case None:
                self._end()

    def _on_fork(self, forked: ForkResult, pidfd: int) -> None:
        future = self._forking.pop(forked.number, None)
        if (
            future is None or future.done()
        ):  # the caller is gone; the process exits because its socket is closed
            os.close(pidfd)
            return
        self._children[forked.pid] = ForkedProcess(forked.pid, pidfd)
        future.set_result(self._children[forked.pid])

    def _on_process_ended(self, ended: ProcessEnded) -> None:
        child = self._children.pop(ended.pid, None)
        if child is not None:
            child.set_status(ended.status)

    def _end(self) -> None:
        if self.is_over.is_set():
            return
        self.is_over.set()
        asyncio.get_running_loop().remove_reader(self._control)
        self._control.close()
        for child in self._children.values():
            child.set_status(None)
        for future in self._forking.values():
            if not future.done():
                future.set_exception(ModelFailed("the model process template exited"))
        if not self.loaded.done():
            self.loaded.set_result(None)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def close(self, *, at_once: bool = False) -> None:
        """Closes the socket, which makes the template exit.

        Kills the template if that takes too long.
        """
        self._end()
        if at_once:
            self.kill()
        try:
            async with asyncio.timeout(EXIT_LIMIT_S):
                await self._process.wait()
        except TimeoutError:
            self.kill()
            await self._process.wait()
        await self.output.finish()


class _Output(asyncio.StreamReaderProtocol):
    """A forked process's output."""

    def __init__(self) -> None:
        self.reader = asyncio.StreamReader()
        super().__init__(self.reader)


def import_first(argv: Sequence[str]) -> list[str]:
    """Returns a program's arguments, after the imports that an EarlyTemplate asks for.

    Raises:
        SystemExit: the template isn't needed.
    """
    option = f"{IMPORT_FIRST}="
    modules = [text.removeprefix(option) for text in argv if text.startswith(option)]
    if not modules:
        return list(argv)
    name_process(TEMPLATE_NAME)
    die_with_parent()
    for module in modules:
        importlib.import_module(module)
    with open(0, "rb", closefd=False) as stdin:
        rest = stdin.read()
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    if not rest:
        sys.exit(0)
    others = [text for text in argv if not text.startswith(option)]
    arguments = [*others, *_arguments_decoder.decode(rest)]
    # For start_anew.
    sys.orig_argv = [*sys.orig_argv[: len(sys.orig_argv) - len(argv)], *arguments]
    return arguments


class ForkedChild(NamedTuple):
    """A forked process's state: its socket, its device, and whether the fork is safe."""

    fd: int
    device: str
    is_sound: bool


class ForkServer:
    """Forks on request until `control` is closed."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._pids: dict[int, int] = {}  # by pidfd

    def run(self, loaded: TemplateReady) -> ForkedChild | None:
        """Reports what is loaded, then forks.

        Returns in each forked process; in the template, returns None.
        """
        gc.collect()
        gc.freeze()  # garbage collection would write to every object and thus copy the shared pages
        with contextlib.suppress(ConnectionError):
            send(self._control, loaded)
            return self._serve(is_alone=not loaded.other_threads)
        return None

    def _serve(self, *, is_alone: bool) -> ForkedChild | None:
        poller = select.poll()
        poller.register(self._control, select.POLLIN)
        while True:
            for fd, _ in poller.poll():
                if fd != self._control.fileno():
                    poller.unregister(fd)
                    self._reap(fd)
                    continue
                order, descriptors = receive_request(self._control)
                if order is None:
                    return None
                connection, output = descriptors
                pidfd = self._fork(order, connection, output)
                if pidfd is None:
                    return self._as_child(connection, output, order.device, is_alone)
                poller.register(pidfd, select.POLLIN)

    def _fork(self, order: ForkRequest, connection: int, output: int) -> int | None:
        """Forks. Returns the child's pidfd, or None in the child."""
        pid = os.fork()
        if pid == 0:
            return None
        os.close(connection)
        os.close(output)
        pidfd = os.pidfd_open(pid)
        self._pids[pidfd] = pid
        send(self._control, ForkResult(order.number, pid), [pidfd])
        return pidfd

    def _as_child(self, connection: int, output: int, device: str, is_alone: bool) -> ForkedChild:
        """Closes everything that belongs to the template in the forked process."""
        self._control.close()
        for pidfd in self._pids:
            os.close(pidfd)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        return ForkedChild(connection, device, is_alone and not _has_broken_cuda())

    def _reap(self, pidfd: int) -> None:
        pid = self._pids.pop(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        send(self._control, ProcessEnded(pid, os.waitstatus_to_exitcode(status)))


def _has_broken_cuda() -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda._is_in_bad_fork())


def start_anew(child: ForkedChild) -> None:
    """Re-executes the program with the same socket and device. Never returns."""
    os.set_inheritable(child.fd, True)
    os.execv(
        sys.executable,
        [sys.executable, *sys.orig_argv[1:], f"--fd={child.fd}", f"--device={child.device}"],
    )


def name_process(name: str) -> None:
    """Sets the name shown by `ps` and `top`, which is at most 15 characters long. Linux only."""
    _prctl(_PR_SET_NAME, ctypes.create_string_buffer(name.encode()))


def die_with_parent() -> None:
    """Makes the kernel kill this process when its parent dies.

    Forked processes don't inherit this setting. Linux only.
    """
    _prctl(_PR_SET_PDEATHSIG, _SIGKILL)


def _prctl(option: int, value: Any) -> None:
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
