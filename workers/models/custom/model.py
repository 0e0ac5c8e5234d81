"""A class of one's own in a model process: feeds its runner, and turns its answers into results."""

from __future__ import annotations

import os
import sys
import zlib
from collections import OrderedDict
from pathlib import Path

from shared.blob import Blob
from shared.catalog import Model
from shared.errors import BadInput, Canceled, ConfigurationError, ModelFailed, PenstockError
from shared.messages import PrintedLogs
from shared.model_interface import ModelInterface
from shared.tasks.custom import (
    CustomResult,
    FilePlace,
    StreamedElement,
    StreamedFile,
    file_digest,
    interface_of,
    streamed_file,
)
from shared.tasks.text import TokenChunk
from workers.models.base import PreparedCustom, PreparedItem, StepEnd
from workers.models.custom.process import RunnerProcess, end_of
from workers.models.custom.runner.frames import Frame
from workers.models.custom.sources import Sources, read_sources

STEP_S = 0.05
"""The longest wait for the runner in a step. Between two steps, items are canceled and admitted."""
SETUP_LIMIT_S = 1800.0
RUNNER_KILLED = 70
"""The exit status of a model process whose runner was killed from outside. So its item is tried
again as after any death of a model process (decision 25)."""


class _Running:
    """An item that is in: its input, and its pieces that were not reported yet."""

    def __init__(self, slot: int, number: int, item: PreparedCustom) -> None:
        self.slot = slot
        self.number = number
        self.item = item
        self.is_sent = False
        self.reported = 0
        self.received = 0
        """Pieces from the current runner. One that starts over gives the first ones again."""
        self.pieces: list[StreamedElement] = []
        self.files: list[tuple[FilePlace, Blob]] = []
        """Those of all pieces so far."""
        self.unreported_files: list[tuple[StreamedFile, bytes]] = []

    def add_piece(self, frame: Frame) -> None:
        """Takes the next piece from the runner, unless an earlier runner gave it."""
        self.received += 1
        if self.received <= self.reported + len(self.pieces):
            return
        files = []
        for where, data in zip(frame.message["files"], frame.blobs, strict=True):
            digest, blob = file_digest(data), Blob(where["media_type"], data=data)
            file = streamed_file(where["at"][1:], len(self.files), digest, blob)
            files.append(file)
            self.files.append((FilePlace(where["at"], where["name"], digest), blob))
            if not file.uri:
                self.unreported_files.append((file, data))
        self.pieces.append(StreamedElement(frame.message["piece"], files))


class CustomModel:
    """Computes items by a class, `interface.concurrency` at a time.

    Args:
        entry: of the catalog, with its interface.
        folder: of the class.
        device: `cpu`, `cuda`, `cuda:N` or `auto`.
        threads: for libraries that compute on a CPU.
    """

    def __init__(self, entry: Model, folder: Path, device: str, threads: int) -> None:
        self._interface = interface_of(entry)
        self._folder = folder
        self._threads = threads
        self.device_name = "cpu" if device in ("cpu", "auto") else device
        self._runner: RunnerProcess | None = None
        self._is_ready = False
        self._items: OrderedDict[int, _Running] = OrderedDict()
        self._dropped: dict[int, int] = {}
        """Numbers of predictions that were dropped and that the runner has not ended."""
        self._numbers = 0
        self._logs_seen = 0
        """What `look_at_logs` has given of the item that is alone."""

    def setup(self) -> None:
        """Starts the runner and waits until the class is set up.

        Raises:
            ConfigurationError: the class can't be loaded or set up, or is not as the interface
                says. The message names the field.
        """
        runner = self._start()
        frames = runner.receive(SETUP_LIMIT_S)
        if not frames or "ready" not in frames[0].message:
            raise ConfigurationError(self._failed_start(frames), field="source")
        self._check(frames[0], read_sources(self._folder))
        self._is_ready = True

    def warmup(self) -> None:
        """Nothing: `setup` of the class did what it wants."""

    def close(self) -> None:
        """Ends the runner."""
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.kill("the model is not needed any more")
            runner.close()

    def _start(self) -> RunnerProcess:
        sources = read_sources(self._folder)
        self._is_ready, self._logs_seen = False, 0
        self._runner = RunnerProcess(
            self._folder, threads=self._threads, environment=sources.environment
        )
        return self._runner

    def _check(self, ready: Frame, sources: Sources) -> None:
        loaded = ModelInterface(**ready.message["ready"], sources_sha256=sources.sha256)
        if difference := self._interface.difference(loaded):
            raise ConfigurationError(
                f"{self._folder}: {difference}; if the code is right: "
                f"penstock models check {self._folder}",
                field="source",
            )

    def _failed_start(self, frames: list[Frame] | None) -> str:
        """Why the class could not be set up. Ends the runner."""
        reason = f"{self._folder}: setup took longer than {SETUP_LIMIT_S:g} s"
        if frames:
            reason = f"{self._folder}: {frames[0].message.get('failed', 'it did not begin')}"
        runner, self._runner = self._runner, None
        assert runner is not None, "it was started just now; this is a bug"
        printed = runner.printed.take().after(0).strip()
        status = runner.close()
        if frames is None:
            reason = f"{self._folder}: its process {end_of(status)} before it was set up"
        return f"{reason}\n{printed}" if printed else reason

    def admit(self, slot: int, item: PreparedItem) -> None:
        """Takes an item in.

        Raises:
            ModelFailed: it is no item of this task.
        """
        if not isinstance(item, PreparedCustom):
            raise ModelFailed(f"a model of one's own can't compute {type(item).__name__}")
        self._numbers += 1
        self._items[slot] = _Running(slot, self._numbers, item)

    def step(self) -> StepEnd:
        """Waits for the runner for a moment. Starts it again if it has ended."""
        end = StepEnd()
        runner = self._runner or self._start()
        if self._is_ready:
            is_idle = not any(one.is_sent for one in self._items.values())
            if is_idle and runner.has_ended:
                self._on_end(end)
                return end
            self._send_items(runner)
        try:
            frames = runner.receive(STEP_S)
        except ValueError as error:
            runner.kill(f"it sent something else than an answer: {error}")
            frames = None
        if frames is None:
            self._on_end(end)
        for frame in frames or ():
            self._handle(frame, end)
        return end

    def _send_items(self, runner: RunnerProcess) -> None:
        # A prediction that was dropped may still run, and a class computes one at a time.
        inside = len(self._dropped) + sum(one.is_sent for one in self._items.values())
        for running in self._items.values():
            if inside >= self._interface.concurrency:
                return
            if not running.is_sent:
                inside += 1
                running.is_sent = True
                if inside == 1:
                    runner.printed.take()  # what was printed between two predictions is nobody's
                files = [{"at": one.at, "name": one.name} for one in running.item.files]
                message = {"id": running.number, "input": running.item.values, "files": files}
                runner.send(message, [one.data for one in running.item.files])

    def _handle(self, frame: Frame, end: StepEnd) -> None:
        message = frame.message
        if "ready" in message:
            self._is_ready = True
        elif "failed" in message:
            reason = self._failed_start([frame])
            for slot in list(self._items):
                self._end(slot, ModelFailed(f"the model could not be set up again: {reason}"), end)
        elif "piece" in message:
            running = self._found(message["id"])
            if running is not None:
                running.add_piece(frame)
        else:
            self._on_answer(frame, end)

    def _found(self, number: int) -> _Running | None:
        return next((one for one in self._items.values() if one.number == number), None)

    def _on_answer(self, frame: Frame, end: StepEnd) -> None:
        number = frame.message["id"]
        assert self._runner is not None, "it has answered; this is a bug"
        self._runner.ended(number)
        is_alone = len(self._items) + len(self._dropped) == 1
        self._dropped.pop(number, None)
        running = self._found(number)
        if running is not None:
            logs = self._runner.printed.take() if is_alone else PrintedLogs()
            self._end(running.slot, self._outcome(frame, running), end, logs)

    def _outcome(self, frame: Frame, running: _Running) -> CustomResult | PenstockError:
        message = frame.message
        if "error" not in message:
            places = [place for place, _ in running.files]
            files = [file for _, file in running.files]
            for where, data in zip(message["files"], frame.blobs, strict=True):
                files.append(Blob(where["media_type"], data=data))
                places.append(FilePlace(where["at"], where["name"]))
            streams, metrics = self._interface.streams, message["metrics"]
            return CustomResult(message["output"], files, places, streams, metrics)
        reason = str(message["error"])
        if message["kind"] == "input":
            named = (one for one in self._interface.properties if reason.startswith(f"{one}"))
            return BadInput(reason, field=next(named, "input"))
        return Canceled() if message["kind"] == "canceled" else ModelFailed(reason)

    def _end(
        self,
        slot: int,
        outcome: CustomResult | PenstockError,
        end: StepEnd,
        logs: PrintedLogs | None = None,
    ) -> None:
        del self._items[slot]
        self._logs_seen = 0
        end.results[slot] = outcome
        if logs is not None and logs.end:
            end.logs[slot] = logs

    def _on_end(self, end: StepEnd) -> None:
        """The runner has ended. What it computed fails, unless it was killed from outside."""
        runner, self._runner = self._runner, None
        assert runner is not None, "it has ended just now; this is a bug"
        was_ready, self._is_ready = self._is_ready, False
        self._dropped.clear()
        printed = runner.printed.take()
        status = runner.close()
        inside = [one for one in self._items.values() if one.is_sent]
        if runner.killed_for:  # a prediction that was dropped did not stop
            for running in inside:
                running.is_sent, running.received = False, 0
            return
        if status < 0 and inside:
            print(f"the process of the class {end_of(status)}", file=sys.stderr, flush=True)
            os._exit(RUNNER_KILLED)
        failed = inside if was_ready else list(self._items.values())
        for running in failed:
            doing = "it computed this" if was_ready else "it was set up again"
            error = ModelFailed(f"the process of the model {end_of(status)} while {doing}")
            self._end(running.slot, error, end, printed if len(failed) == 1 else None)

    def take_chunks(self) -> dict[int, TokenChunk]:
        """The pieces of each streamed item since the last call. A checksum stands for an id."""
        chunks = {}
        for slot, running in self._items.items():
            pieces, running.pieces = running.pieces, []
            if pieces and running.item.is_streamed and self._interface.streams:
                is_text = self._interface.streams == "text"
                texts = [one.value if is_text else one.line for one in pieces]
                ids = [zlib.crc32(one.encode()) for one in texts]
                chunks[slot] = TokenChunk(running.reported, ids, "".join(texts))
            running.reported += len(pieces)
        return chunks

    def take_files(self) -> dict[int, list[tuple[StreamedFile, bytes]]]:
        """The files of the pieces that were taken just now and are too large for them."""
        taken = {}
        for slot, running in self._items.items():
            files, running.unreported_files = running.unreported_files, []
            if files and running.item.is_streamed:
                taken[slot] = files
        return taken

    def look_at_logs(self) -> dict[int, PrintedLogs]:
        """What an item that is alone has printed so far, if there is more since the last call."""
        if len(self._items) != 1 or self._dropped or self._runner is None:
            return {}
        (running,) = self._items.values()
        logs = self._runner.printed.look() if running.is_sent else PrintedLogs()
        if logs.end <= self._logs_seen:
            return {}
        self._logs_seen = logs.end
        return {running.slot: logs}

    def drop(self, slot: int) -> None:
        """Removes an item, if it is still in. The runner is told to stop it."""
        running = self._items.pop(slot, None)
        if running is not None and running.is_sent and self._runner is not None:
            self._dropped[running.number] = slot
            self._runner.cancel(running.number)
