"""A class of one's own in a model process: feeds its runner, and turns its answers into results."""

from __future__ import annotations

import os
import sys
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

from shared.blob import Blob
from shared.catalog import Model
from shared.errors import BadInput, Canceled, ConfigurationError, ModelFailed, PenstockError
from shared.model_interface import ModelInterface
from shared.tasks.custom import CustomResult, FilePlace, interface_of, piece_text
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
    """An item that is in: its input, and its pieces that were not reported yet.

    A runner that starts over gives the first pieces again. They are compared by their ids, which
    are checksums. If one is another than before, no more pieces are reported: readers can't go on.
    """

    def __init__(self, slot: int, number: int, item: PreparedCustom, *, is_text: bool) -> None:
        self.slot = slot
        self.number = number
        self.item = item
        self.is_sent = False
        self.received = 0
        """Pieces from the current runner."""
        self._is_text = is_text
        self._ids = list(memoryview(item.written_ids).cast("I"))
        """Of all pieces, reported or not."""
        self._reported = len(self._ids)
        self._texts: list[str] = []
        """Of the pieces that were not reported."""
        self._differs = False

    def add_piece(self, piece: Any) -> None:
        """Takes the next piece from the runner."""
        if self._differs:
            return
        text = piece if self._is_text else piece_text(piece)
        number, self.received = self.received, self.received + 1
        identity = zlib.crc32(text.encode())
        if number < len(self._ids):
            self._differs = identity != self._ids[number]
            return
        self._ids.append(identity)
        self._texts.append(text)

    def take_chunk(self) -> TokenChunk | None:
        """The pieces since the last call. None: there are none."""
        first, texts = self._reported, self._texts
        if not texts:
            return None
        self._reported, self._texts = len(self._ids), []
        return TokenChunk(first, self._ids[first:], "".join(texts))


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
        self._is_ready = False
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
        printed = runner.printed.take().strip()
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
        is_text = self._interface.streams == "text"
        self._items[slot] = _Running(slot, self._numbers, item, is_text=is_text)

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
            if running is not None and running.item.is_streamed:
                running.add_piece(message["piece"])
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
            logs = self._runner.printed.take() if is_alone else ""
            self._end(running.slot, self._outcome(frame), end, logs)

    def _outcome(self, frame: Frame) -> CustomResult | PenstockError:
        message = frame.message
        if "error" not in message:
            files, places = [], []
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
        self, slot: int, outcome: CustomResult | PenstockError, end: StepEnd, logs: str = ""
    ) -> None:
        del self._items[slot]
        end.results[slot] = outcome
        if logs:
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
            self._end(running.slot, error, end, printed if len(failed) == 1 else "")

    def take_chunks(self) -> dict[int, TokenChunk]:
        """The pieces of each streamed item since the last call. A checksum stands for an id."""
        chunks = {}
        for slot, running in self._items.items():
            if running.item.is_streamed and (chunk := running.take_chunk()) is not None:
                chunks[slot] = chunk
        return chunks

    def drop(self, slot: int) -> None:
        """Removes an item, if it is still in. The runner is told to stop it."""
        running = self._items.pop(slot, None)
        if running is not None and running.is_sent and self._runner is not None:
            self._dropped[running.number] = slot
            self._runner.cancel(running.number)
