"""Cog's worker process without Cog's server: the private protocol of coglet 0.23.1.

Frames have a 4-byte big-endian length and JSON. stdin and stdout are the control channel, and each
slot has a Unix socket. With a wrapper, a second socket carries pieces and files of the wrapper, and
a pipe what the class's subprocesses print.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import struct
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.class_runners.outcome import (
    Outcome,
    Request,
    container_environment,
    describe_file,
    put,
    with_described_files,
)

HEADER = struct.Struct(">I")
MAX_INLINE_BYTES = 6 * 1024 * 1024
START_LIMIT_S = 60.0
PREDICT_LIMIT_S = 30.0
DRAIN_S = 5.0
BARE = "import coglet; coglet.server._run_worker()"
WRAPPER = Path(__file__).with_name("cog_wrapper.py")


class _Slot:
    """One slot of the worker: its socket, and the prediction that runs in it."""

    def __init__(self) -> None:
        self.name = ""
        self.reader: asyncio.StreamReader | None = None
        self.writer: asyncio.StreamWriter | None = None
        self.number = 0
        self.began_s = 0.0
        self.pieces: list[Any] = []
        self.pieces_s: list[float] = []
        self.logs: list[str] = []
        self.metrics: dict[str, Any] = {}
        self.returned: dict[str, Any] | None = None
        """What the wrapper returned."""
        self.connected = asyncio.Event()
        self.has_more = asyncio.Event()
        self.is_idle = asyncio.Event()
        """Set when the worker takes the next prediction. It loses one that comes before."""

    def begin(self, number: int) -> None:
        """Forgets the previous prediction."""
        self.number, self.began_s = number, time.monotonic()
        self.pieces, self.pieces_s, self.logs, self.metrics = [], [], [], {}
        self.returned = None
        self.is_idle.clear()

    def add_piece(self, value: Any) -> None:
        """Takes the next piece of an output."""
        self.pieces.append(value)
        self.pieces_s.append(time.monotonic() - self.began_s)
        self.has_more.set()


class CogWorker:
    """A class in Cog's worker process.

    Args:
        folder: a copy of the class's folder, because the class may write into it.
        python: the interpreter that has cog and the class's packages.
        is_wrapped: True to put the wrapper between the worker and the class.
    """

    def __init__(
        self,
        folder: Path,
        reference: str,
        *,
        python: str,
        environment: Mapping[str, str],
        concurrency: int = 1,
        is_wrapped: bool = False,
    ) -> None:
        self._folder, self._reference = folder, reference
        self._python, self._environment = python, environment
        self._is_wrapped = is_wrapped
        self._private = Path(tempfile.mkdtemp(prefix="class-runner-"))
        self._slots = [_Slot() for _ in range(concurrency)]
        self._free: asyncio.Queue[_Slot] = asyncio.Queue()
        self._count = 0
        self._process: asyncio.subprocess.Process | None = None
        self._ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._setup_logs: list[str] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._wrapper: asyncio.StreamReader | None = None
        self._has_ended = asyncio.Event()
        self._pidfd = -1

    @property
    def pids(self) -> list[int]:
        """Process ID of the worker."""
        return [self._process.pid] if self._process else []

    async def start(self) -> str:
        """Starts the worker and waits until the class is set up."""
        servers = [
            await asyncio.start_unix_server(
                self._accept_into(slot), self._private / f"slot-{number}.sock"
            )
            for number, slot in enumerate(self._slots)
        ]
        reference, program, passed = self._reference, [self._python, "-c", BARE], list[int]()
        if self._is_wrapped:
            program, passed = await self._wrapped_program()
            reference = f"{WRAPPER}:Wrapper"
        self._process = await asyncio.create_subprocess_exec(
            *program,
            cwd=self._folder,
            env={**container_environment(self._python), **self._environment},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            pass_fds=passed,
            start_new_session=True,
        )
        for descriptor in passed:
            os.close(descriptor)
        self._pidfd = os.pidfd_open(self._process.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._note_end)
        named = {"dir": str(self._private), "num_slots": len(self._slots)}
        self._tell(
            {
                "type": "init",
                "predictor_ref": reference,
                "num_slots": len(self._slots),
                "transport_info": {"NamedSockets": named},
                "is_train": False,
                "is_async": len(self._slots) > 1,
            }
        )
        self._tasks.append(asyncio.create_task(self._read_control()))
        try:
            failure = await asyncio.wait_for(self._ready, START_LIMIT_S)
        except TimeoutError:
            failure = f"not ready in {START_LIMIT_S:g} s"
        for server in servers:
            server.close()
        if not failure:
            for slot in self._slots:
                await slot.connected.wait()
                self._free.put_nowait(slot)
        return failure

    def _note_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        self._has_ended.set()

    def _accept_into(self, slot: _Slot) -> Any:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            slot.reader, slot.writer = reader, writer
            slot.connected.set()

        return accept

    async def _wrapped_program(self) -> tuple[list[str], list[int]]:
        """Opens the wrapper's pipes. Returns the command, and descriptors for it."""
        pieces, their_pieces = os.pipe()
        printed, their_printed = os.pipe()
        loop = asyncio.get_running_loop()
        self._wrapper = asyncio.StreamReader(limit=1 << 24)
        for descriptor, reader in ((pieces, self._wrapper), (printed, asyncio.StreamReader())):
            file = os.fdopen(descriptor, "rb", 0)
            await loop.connect_read_pipe(
                lambda reader=reader: asyncio.StreamReaderProtocol(reader),  # type: ignore[misc]
                file,
            )
            if reader is not self._wrapper:
                self._tasks.append(asyncio.create_task(self._read_printed(reader)))
        self._tasks.append(asyncio.create_task(self._read_wrapper()))
        (self._private / "files").mkdir()
        words = [self._reference, str(their_pieces), str(their_printed)]
        program = [self._python, str(WRAPPER), *words, str(self._private / "files")]
        return program, [their_pieces, their_printed]

    def _tell(self, message: dict[str, Any]) -> None:
        assert self._process is not None, "it was started"
        assert self._process.stdin is not None, "it is a pipe"
        self._process.stdin.write(_encode(message))

    async def _read_control(self) -> None:
        assert self._process is not None, "it was started"
        assert self._process.stdout is not None, "it is a pipe"
        while (message := await _read(self._process.stdout)) is not None:
            kind = message["type"]
            if kind == "ready":
                for slot, name in zip(self._slots, message["slots"], strict=True):
                    slot.name = name
                _resolve(self._ready, "")
            elif kind in ("failed", "fatal"):
                _resolve(self._ready, message.get("error") or message.get("reason", ""))
            elif kind == "idle":
                for slot in self._slots:
                    if slot.name == message["slot"]:
                        slot.is_idle.set()
            elif kind == "log":
                self._add_printed(message["data"])
        _resolve(self._ready, "the process ended")

    def _add_printed(self, text: str) -> None:
        """Output of subprocesses. It belongs to a prediction if only one runs."""
        running = [slot for slot in self._slots if slot.number]
        if not running:
            self._setup_logs.append(text)
        elif len(running) == 1:
            running[0].logs.append(text)

    async def _read_printed(self, reader: asyncio.StreamReader) -> None:
        while piece := await reader.read(1 << 16):
            self._add_printed(piece.decode(errors="replace"))

    async def _read_wrapper(self) -> None:
        """Pieces of the wrapper: `{"id", "value", "files": [{"at", "name", "path"}]}`."""
        assert self._wrapper is not None, "it is opened"
        while (message := await _read(self._wrapper)) is not None:
            whole = {"value": message["value"]}
            for file in message["files"]:
                put(whole, ["value", *file["at"]], _take_file(file))
            for slot in self._slots:
                if slot.number == message["id"]:
                    slot.add_piece(whole["value"])

    async def predict(self, request: Request) -> Outcome:
        """Sends one prediction to a free slot, and waits for its end."""
        slot = await self._free.get()
        self._count += 1
        slot.begin(self._count)
        folder = Path(tempfile.mkdtemp(dir=self._private))
        await self._send(slot, request, folder)
        loop = asyncio.get_running_loop()
        canceling = None
        if request.cancel_after_s is not None:
            cancel = {"type": "cancel", "slot": slot.name}
            canceling = loop.call_later(request.cancel_after_s, self._tell, cancel)
        try:
            outcome = await asyncio.wait_for(self._read_or_die(slot), PREDICT_LIMIT_S)
        except TimeoutError:
            outcome = Outcome("too late")
        seconds = time.monotonic() - slot.began_s
        if canceling is not None:
            canceling.cancel()
        outcome = outcome._replace(
            pieces=slot.pieces,
            pieces_s=slot.pieces_s,
            logs="".join(slot.logs),
            metrics=slot.metrics,
            seconds=seconds,
        )
        slot.number = 0
        shutil.rmtree(folder, ignore_errors=True)
        if outcome.status not in ("died", "too late"):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(slot.is_idle.wait(), DRAIN_S)
        self._free.put_nowait(slot)
        return outcome

    async def _send(self, slot: _Slot, request: Request, folder: Path) -> None:
        values = json.loads(json.dumps(request.values))
        for number, file in enumerate(request.files):
            # The worker makes a Path of a URI only, and the wrapper of a path as well.
            value = file.data_uri
            if self._is_wrapped:
                path = folder / str(number) / Path(file.name).name
                path.parent.mkdir()
                path.write_bytes(file.data)
                value = str(path)
            put(values, file.at, value)
        message: dict[str, Any] = {
            "type": "predict",
            "id": str(slot.number),
            "input": values,
            "output_dir": str(folder),
            "context": dict(request.context),
        }
        if self._is_wrapped:
            message["context"] |= {"number": str(slot.number)}
        encoded = _encode(message)
        if len(encoded) > MAX_INLINE_BYTES:
            path = folder / "input.json"
            path.write_text(json.dumps(message.pop("input")))
            encoded = _encode(message | {"input_file": str(path)})
        assert slot.writer is not None, "it is connected"
        slot.writer.write(encoded)
        with contextlib.suppress(ConnectionError):
            await slot.writer.drain()

    async def _read_or_die(self, slot: _Slot) -> Outcome:
        """Waits for the end of a prediction or of the process. A child may keep the socket open."""
        reading = asyncio.create_task(self._read_outcome(slot))
        dying = asyncio.create_task(self._has_ended.wait())
        try:
            await asyncio.wait((reading, dying), return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                await asyncio.wait((reading,), timeout=DRAIN_S / 10)
            if reading.done():
                return reading.result()
            return Outcome("died", error="the process ended")
        finally:
            reading.cancel()
            dying.cancel()

    async def _read_outcome(self, slot: _Slot) -> Outcome:
        assert slot.reader is not None, "it is connected"
        while (message := await _read(slot.reader)) is not None:
            kind = message["type"]
            if kind == "log_line":
                slot.logs.append(message["data"])
            elif kind == "output_chunk" and self._is_wrapped:
                slot.returned = message["output"]
            elif kind == "output_chunk":
                slot.add_piece(with_described_files(message["output"]))
            elif kind == "file_output":
                slot.add_piece(_read_file(message))
            elif kind == "metric":
                _add_metric(slot.metrics, message)
            elif kind in ("done", "failed", "cancelled"):
                return await self._end(slot, message)
        return Outcome("died", error="the process closed its connection")

    async def _end(self, slot: _Slot, message: dict[str, Any]) -> Outcome:
        if self._is_wrapped:
            return await self._end_wrapped(slot, message)
        if message["type"] != "done":
            status = "canceled" if message["type"] == "cancelled" else "failed"
            return Outcome(status, error=str(message.get("error", "")))
        if message.get("is_stream"):
            return Outcome("succeeded", slot.pieces)
        output = slot.pieces[0] if slot.pieces else message.get("output")
        return Outcome("succeeded", with_described_files(output))

    async def _end_wrapped(self, slot: _Slot, message: dict[str, Any]) -> Outcome:
        """The wrapper returns how many pieces it sent, and whether they are a list."""
        if message["type"] != "done":
            words = str(message.get("error", ""))
            status = "canceled" if message["type"] == "cancelled" else "failed"
            return Outcome("refused" if "WrongInput: " in words else status, error=words)
        end = slot.returned or message["output"]
        async with asyncio.timeout(DRAIN_S):
            while len(slot.pieces) < end["pieces"]:
                slot.has_more.clear()
                await slot.has_more.wait()
        if end["streams"]:
            return Outcome("succeeded", slot.pieces)
        return Outcome("succeeded", slot.pieces[0] if slot.pieces else None)

    async def stop(self) -> None:
        """Kills the worker with all that it started."""
        for task in self._tasks:
            task.cancel()
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()
        for slot in self._slots:
            if slot.writer is not None:
                slot.writer.close()
        shutil.rmtree(self._private, ignore_errors=True)


def _encode(message: dict[str, Any]) -> bytes:
    encoded = json.dumps(message).encode()
    return HEADER.pack(len(encoded)) + encoded


async def _read(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """Reads one frame. None: the other end is closed."""
    try:
        (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
        message: dict[str, Any] = json.loads(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return message


def _take_file(file: dict[str, Any]) -> Any:
    path = Path(file["path"])
    described = describe_file(path.read_bytes(), file["name"])
    path.unlink()
    return described


def _read_file(message: dict[str, Any]) -> Any:
    path = Path(message["filename"])
    if message["kind"] == "oversized":
        return json.loads(path.read_bytes())
    try:
        return describe_file(path.read_bytes(), path.name)
    except OSError as error:
        return {"unreadable": str(error)}


def _add_metric(metrics: dict[str, Any], message: dict[str, Any]) -> None:
    *parents, name = message["name"].split(".")
    for parent in parents:
        metrics = metrics.setdefault(parent, {})
    if message["mode"] == "append":
        metrics.setdefault(name, []).append(message["value"])
    elif message["mode"] == "increment":
        metrics[name] = metrics.get(name, 0) + message["value"]
    elif message["value"] is None:
        metrics.pop(name, None)
    else:
        metrics[name] = message["value"]


def _resolve(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)
