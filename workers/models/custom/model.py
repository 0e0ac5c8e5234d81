"""A class of one's own in a model process: feeds its runner, and turns its answers into results."""

from __future__ import annotations

import logging
import os
import re
import select
import signal
import socket
import sys
import time
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shared.blob import Blob
from shared.catalog import Model
from shared.catalog_entry import MAX_STARTUP_S
from shared.concurrency import backoff
from shared.errors import BadInput, Canceled, ConfigurationError, ModelFailed, PenstockError
from shared.messages import PrintedLogs
from shared.model_interface import ModelInterface
from shared.settings import ClassSettings, Settings, read_settings
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
from workers.models.custom.environments import python_for
from workers.models.custom.process import (
    BoundedShow,
    RunnerProcess,
    end_of,
    pass_on,
)
from workers.models.custom.public_text import PathRemover, PublicLogs
from workers.models.custom.runner.confinement import SRC
from workers.models.custom.runner.frames import Frame
from workers.models.custom.services import service_ports
from workers.models.custom.sources import Sources, read_sources
from workers.models.custom.variables import EntryVariables, variables_of

STEP_S = 0.05
"""The longest wait for the runner in a step. Between two steps, items are canceled and admitted, so
a step ends at once if there are some."""
SETUP_LIMIT_S = MAX_STARTUP_S
"""For the first `setup` of a process. Whoever started the process usually has a shorter limit."""
FIRST_PAUSE_S, MAX_PAUSE_S = 2.0, 60.0
"""Between two starts of a class whose `setup` fails after it had been set up once."""
RUNNER_KILLED = 70
"""The exit status of a model process whose runner was killed from outside. So its item is tried
again as after any death of a model process (decision 25)."""
NO_ANSWER = "it sent something else than an answer"
USED_UP = "nobody is to fail for what earlier predictions left in memory or on disk"
MALFORMED = (ValueError, TypeError, AttributeError, LookupError, RecursionError)
"""What comes of reading an answer that is none: a class may write to its socket."""
_FIRST_WORD = re.compile(r"\w+")
_MEDIA_TYPE = re.compile(r"[\w.+-]{1,100}/[\w.+-]{1,100}")

log = logging.getLogger(__name__)


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
        self.is_suspect = False
        """Whether it was in a runner that ended with several. It runs alone from then on."""
        self.received = 0
        """Pieces from the current runner."""
        self.logs = PublicLogs(PathRemover(None, ()))
        """What it printed while it ran alone, and its traceback."""
        self._is_text = is_text
        self._ids = list(memoryview(item.written_ids).cast("I"))
        """Of all pieces, reported or not."""
        self._reported = len(self._ids)
        self._texts: list[str] = []
        """Of the pieces that were not reported."""
        self._differs = False
        self._filed = 0
        """Pieces whose files are in `files`."""
        self.files: list[tuple[FilePlace, Blob]] = []
        """Those of all pieces so far."""
        self._new_files: list[tuple[StreamedFile, bytes]] = []
        """Those of the pieces that were not reported and are too large for them."""

    def add_piece(self, frame: Frame) -> None:
        """Takes the next piece from the runner, with its files."""
        number, self.received = self.received, self.received + 1
        if number >= self._filed:
            self._filed = self.received
            for where, data in zip(frame.message["files"], frame.blobs, strict=True):
                _check_place(frame.message["piece"], where | {"at": where["at"][1:]})
                place = FilePlace([number, *where["at"][1:]], where["name"], file_digest(data))
                self.files.append((place, Blob(where["media_type"], data=data)))
        if self._differs or not self.item.is_streamed:
            return
        piece = frame.message["piece"]
        text, large = piece, list[tuple[StreamedFile, bytes]]()
        if not self._is_text:
            text, large = self._line(piece, number)
        identity = zlib.crc32(text.encode())
        if number < len(self._ids):
            self._differs = identity != self._ids[number]
            return
        self._ids.append(identity)
        self._texts.append(text)
        self._new_files += large

    def _line(self, piece: Any, number: int) -> tuple[str, list[tuple[StreamedFile, bytes]]]:
        """An element as a line, and its files that are too large for it."""
        files, large = [], []
        for at, (place, blob) in enumerate(self.files):
            if place.at[0] != number:
                continue
            file = streamed_file(place.at[1:], at, place.digest, blob)
            files.append(file)
            if not file.uri:
                large.append((file, blob.data or b""))
        return StreamedElement(piece, files).line, large

    def take_chunk(self) -> TokenChunk | None:
        """The pieces since the last call. None: there are none."""
        first, texts = self._reported, self._texts
        if not texts:
            return None
        self._reported, self._texts = len(self._ids), []
        ids, lengths = self._ids[first:], [len(text) for text in texts]
        return TokenChunk(first, ids, "".join(texts), lengths=lengths)

    def take_files(self) -> list[tuple[StreamedFile, bytes]]:
        """The large files of the pieces that were taken just now."""
        files, self._new_files = self._new_files, []
        return files


def outcome_of(
    frame: Frame,
    interface: ModelInterface,
    work: int,
    paths: PathRemover,
    streamed: Sequence[tuple[FilePlace, Blob]] = (),
) -> CustomResult | PenstockError:
    """What the last frame of a prediction says.

    `work`: what it weighs. `paths`: removes our paths from an error. `streamed`: the files of its
    pieces.
    """
    message = frame.message
    if "error" not in message:
        places, files = [place for place, _ in streamed], [file for _, file in streamed]
        for where, data in zip(message["files"], frame.blobs, strict=True):
            _check_place(message["output"], where)
            files.append(Blob(where["media_type"], data=data))
            places.append(FilePlace(where["at"], where["name"]))
        result = CustomResult(
            message["output"], files, places, interface.streams, message["metrics"], work
        )
        return result.packed()
    reason = paths.remove(str(message["error"]))
    if message["kind"] == "input":
        named = _FIRST_WORD.match(reason)
        is_known = named is not None and named[0] in interface.properties
        return BadInput(reason, field=named[0] if named and is_known else None)
    return Canceled() if message["kind"] == "canceled" else ModelFailed(reason)


def message_of(number: int, item: PreparedCustom) -> tuple[dict[str, Any], list[bytes]]:
    """The message that has the runner compute an item, and the bytes of its files."""
    files = [{"at": one.at, "name": one.name} for one in item.files]
    message = {"id": number, "input": item.values, "files": files, "context": item.context}
    return message, [one.data for one in item.files]


class HostedClass:
    """A class in its runner.

    Args:
        entry: of the catalog, with its interface.
        folder: of the class.
        device: `cpu`, `cuda`, `cuda:N` or `auto`.
        threads: for libraries that compute on a CPU.
    """

    def __init__(self, entry: Model, folder: Path, device: str, threads: int) -> None:
        self._interface = interface_of(entry)
        self._resources = entry.resources
        self._variables = EntryVariables(entry.environment, entry.secrets)
        self._name = entry.name
        self._folder = folder
        self._threads = threads
        self.device_name = "cpu" if device in ("cpu", "auto") else device
        self._runner: RunnerProcess | None = None
        self._paths = PathRemover(None, ())
        self._shows_tracebacks = True
        self._is_ready = False
        self._restart_s = 0.0
        self._setup_limit_s = read_settings(ClassSettings).startup_s or entry.startup_s
        """For each later `setup`."""
        self._setup_by_s = 0.0
        self._pauses = backoff(FIRST_PAUSE_S, MAX_PAUSE_S)
        self._start_at_s = 0.0
        """No start before that: the last `setup` failed."""

    def setup(self) -> None:
        """Starts the runner and waits until the class is set up.

        Raises:
            ConfigurationError: the folder has no class that can be served, or it is not as the
                interface says. The message names the field.
            ModelFailed: its module or its `setup` failed. A later try may succeed.
        """
        runner = self._start()
        frames = runner.receive(SETUP_LIMIT_S)
        if not frames or "ready" not in frames[0].message:
            reason, printed = self._failed_start(frames, SETUP_LIMIT_S)
            whole = f"{self._folder}: {reason}" + (f"\n{printed}" if printed else "")
            if frames and frames[0].message.get("is_final"):
                raise ConfigurationError(whole, field="source")
            raise ModelFailed(whole)
        self._check(frames[0], read_sources(self._folder))
        self._on_ready(runner)
        for one in runner.unconfined or ():
            log.warning("a class is not confined", extra={"model": self._name, "reason": one})

    def warmup(self) -> None:
        """Nothing: `setup` of the class did what it wants."""

    def close(self) -> None:
        """Ends the runner."""
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.kill("the model is not needed any more")
            runner.close()

    def take_restart_s(self) -> float:
        """Returns the seconds that it took to set the class up again since the last call."""
        restart_s, self._restart_s = self._restart_s, 0.0
        return restart_s

    def _start(self) -> RunnerProcess:
        self._is_ready = False
        try:
            variables = variables_of(self._folder, self._variables)
        except PenstockError:
            self._on_failed_setup()
            raise
        sources = read_sources(self._folder)
        self._shows_tracebacks = sources.shows_tracebacks
        self._setup_by_s = time.monotonic() + self._setup_limit_s
        self._runner = RunnerProcess(
            self._folder,
            python=python_for(self._folder),
            threads=self._threads,
            environment=variables.environment,
            hidden=variables.hidden,
            resources=self._resources,
            denied_ports=service_ports(read_settings(Settings)),
            shows=BoundedShow(),
        )
        self._paths = paths_of(self._folder, sources, self._runner)
        return self._runner

    def _on_ready(self, runner: RunnerProcess) -> None:
        """Notes that the class is set up. What it printed until now has been shown."""
        self._is_ready = True
        runner.printed.end_showing()
        self._pauses, self._start_at_s = backoff(FIRST_PAUSE_S, MAX_PAUSE_S), 0.0

    def _on_failed_setup(self) -> None:
        """Lets the next start wait, longer after each failure."""
        self._start_at_s = time.monotonic() + next(self._pauses)

    def _restart(self) -> RunnerProcess:
        """Starts the runner again.

        Raises:
            ModelFailed: it can't be started. The operator's log has the reason.
        """
        try:
            return self._start()
        except (PenstockError, OSError) as error:
            facts = {"model": self._name, "reason": str(error)}
            log.exception("a class could not be started again", extra=facts)
            raise ModelFailed("the model could not be set up again") from error

    def _check(self, ready: Frame, sources: Sources) -> None:
        loaded = ModelInterface(**ready.message["ready"], sources_sha256=sources.sha256)
        if difference := self._interface.difference(loaded):
            raise ConfigurationError(
                f"{self._folder}: {difference}; if the code is right: "
                f"penstock models check {self._folder}",
                field="source",
            )

    def _failed_start(self, frames: list[Frame] | None, limit_s: float) -> tuple[str, str]:
        """Why the class was not set up in that time, and what it printed. Ends the runner."""
        reason = f"setup took longer than {limit_s:g} s"
        if frames:
            reason = str(frames[0].message.get("failed", "it did not begin"))
        runner, self._runner = self._runner, None
        assert runner is not None, "it was started just now; this is a bug"
        printed = runner.printed.take().after(0).strip()
        status = runner.close()
        if frames is None:
            how = f"was ended: {runner.killed_for};" if runner.killed_for else end_of(status)
            reason = f"its process {how} before it was set up"
        return reason, printed

    def _failed_restart(self, frames: list[Frame] | None) -> ModelFailed:
        """Why the class could not be set up again. The operator's log has the details."""
        reason, _ = self._failed_start(frames, self._setup_limit_s)
        facts = {"model": self._name, "reason": reason}
        log.error("a class could not be set up again", extra=facts)
        return ModelFailed(f"the model could not be set up again: {self._paths.remove(reason)}")

    def _add_traceback(self, logs: PrintedLogs, frame: Frame) -> PrintedLogs:
        """Returns logs with the traceback of an answer, unless the author keeps it from callers."""
        traceback = str(frame.message.get("log", ""))
        if not self._shows_tracebacks:
            pass_on(PrintedLogs(traceback))
            return logs
        return PrintedLogs(logs.text + self._paths.remove(traceback), logs.left_out)


def paths_of(folder: Path, sources: Sources, runner: RunnerProcess) -> PathRemover:
    """Returns what removes the paths that the class of a folder sees in its runner."""
    named = sources.environment.get("COG_WEIGHTS") or os.environ.get("COG_WEIGHTS")
    weights = [Path(named)] if named and named.startswith("/") else []
    return PathRemover(runner.scratch_path, [folder, Path(SRC), *weights])


class CustomModel(HostedClass):
    """Computes items by a class, `interface.concurrency` at a time."""

    def __init__(self, entry: Model, folder: Path, device: str, threads: int) -> None:
        super().__init__(entry, folder, device, threads)
        self._items: OrderedDict[int, _Running] = OrderedDict()
        self._dropped: dict[int, int] = {}
        """Numbers of predictions that were dropped and that the runner has not ended."""
        self._failed: dict[int, _Running] = {}
        """Items that failed, until their last pieces are taken."""
        self._numbers = 0
        self._alone: _Running | None = None
        """The only prediction that can have printed anything since the last `printed.take()`."""
        self._logs_seen = 0
        """What `look_at_logs` has returned of its output."""
        self._wakes_on: socket.socket | None = None

    def wake_on(self, connection: socket.socket) -> None:
        """A step ends as soon as something can be read from this."""
        self._wakes_on = connection

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
        began_s, was_ready = time.monotonic(), self._is_ready
        end = self._step()
        if not was_ready:
            self._restart_s += time.monotonic() - began_s
        return end

    def _step(self) -> StepEnd:
        end = StepEnd()
        if self._runner is None and (pause_s := self._start_at_s - time.monotonic()) > 0:
            wakers = [self._wakes_on] if self._wakes_on is not None else []
            select.select(wakers, [], [], min(STEP_S, pause_s))
            return end
        runner = self._runner or self._restart()
        if not self._is_ready and time.monotonic() > self._setup_by_s:
            runner.kill_at_fault(f"setup took longer than {self._setup_limit_s:g} s")
        if self._is_ready:
            is_idle = not any(one.is_sent for one in self._items.values())
            if is_idle and not runner.has_ended and runner.is_used_up:
                runner.kill(USED_UP)
            if is_idle and runner.has_ended:
                self._on_end(end)
                return end
            self._send_items(runner)
        try:
            frames = runner.receive(STEP_S, wakes_on=self._wakes_on)
            for frame in frames or ():
                self._handle(frame, end)
        except MALFORMED as error:
            log.warning(NO_ANSWER, extra={"model": self._name, "reason": repr(error)[:200]})
            runner.kill_at_fault(NO_ANSWER)
            frames = None
        if frames is None:
            self._on_end(end)
        return end

    def _send_items(self, runner: RunnerProcess) -> None:
        # A prediction that was dropped may still run, and a class computes one at a time.
        inside = len(self._dropped) + sum(one.is_sent for one in self._items.values())
        is_alone = any(one.is_sent and one.is_suspect for one in self._items.values())
        for running in self._items.values():
            must_wait = is_alone or (running.is_suspect and inside)
            if inside >= self._interface.concurrency or must_wait:
                return
            if not running.is_sent:
                is_alone = running.is_suspect
                inside += 1
                running.is_sent = True
                self._attribute_output(runner, running, is_only=inside == 1)
                runner.send(*message_of(running.number, running.item))

    def _attribute_output(self, runner: RunnerProcess, joining: _Running, *, is_only: bool) -> None:
        """Takes the output so far, just before a prediction starts.

        The output of a process belongs to a prediction only while no other runs. From the moment
        that a second one joins until none is left, nobody knows which tenant's data a line has.
        """
        self._give_to_alone(runner.printed.take())
        joining.logs = PublicLogs(self._paths)
        self._alone = joining if is_only else None
        if is_only:
            self._logs_seen = 0

    def _give_to_alone(self, printed: PrintedLogs) -> None:
        """Takes output that ends now: the only prediction gets it, otherwise the operator."""
        alone, self._alone = self._alone, None
        if alone is not None:
            alone.logs.add(printed, is_all=True)
        else:
            pass_on(printed)

    def _handle(self, frame: Frame, end: StepEnd) -> None:
        message = frame.message
        if "ready" in message:
            assert self._runner is not None, "it has answered; this is a bug"
            self._on_ready(self._runner)
        elif "failed" in message:
            self._on_failed_setup()
            error = self._failed_restart([frame])
            for slot in list(self._items):
                self._end(slot, error, end)
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
        self._dropped.pop(number, None)
        running = self._found(number)
        if running is not None:
            if self._alone is running:
                self._give_to_alone(self._runner.printed.take())
            logs = self._add_traceback(running.logs.printed, frame)
            outcome = outcome_of(
                frame, self._interface, running.item.length, self._paths, running.files
            )
            self._end(running.slot, outcome, end, logs)

    def _end(
        self,
        slot: int,
        outcome: CustomResult | PenstockError,
        end: StepEnd,
        logs: PrintedLogs | None = None,
    ) -> None:
        running = self._items.pop(slot)
        if isinstance(outcome, PenstockError):
            self._failed[slot] = running
        end.results[slot] = outcome
        if logs is not None and logs.end:
            end.logs[slot] = logs

    def _on_end(self, end: StepEnd) -> None:
        """The runner has ended. What it computed fails, unless it was killed from outside."""
        runner, self._runner = self._runner, None
        assert runner is not None, "it has ended just now; this is a bug"
        was_ready, self._is_ready = self._is_ready, False
        if not was_ready:
            self._on_failed_setup()
        self._dropped.clear()
        self._give_to_alone(runner.printed.take())
        status = runner.close()
        inside = [one for one in self._items.values() if one.is_sent]
        for running in inside:
            running.is_sent, running.received = False, 0
        if runner.killed_for and not runner.is_at_fault:  # a prediction that was dropped
            return
        if status == -signal.SIGKILL and inside and not runner.killed_for:
            print(f"the process of the class {end_of(status)}", file=sys.stderr, flush=True)
            os._exit(RUNNER_KILLED)
        if was_ready and len(inside) > 1:  # one of them did it; the others go on
            for running in inside:
                running.is_suspect = True
            return
        doing = "it computed this" if was_ready else "it was set up again"
        how = f"{end_of(status)} while {doing}"
        if runner.killed_for:
            how = f"was ended while {doing}: {runner.killed_for}"
        failed = inside if was_ready else list(self._items.values())
        for running in failed:
            error = ModelFailed(f"the process of the model {how}")
            self._end(running.slot, error, end, running.logs.printed)

    def take_chunks(self) -> dict[int, TokenChunk]:
        """The pieces of each streamed item since the last call. A checksum stands for an id."""
        chunks = {}
        for slot, running in (self._failed | self._items).items():
            if running.item.is_streamed and (chunk := running.take_chunk()) is not None:
                chunks[slot] = chunk
        return chunks

    def take_files(self) -> dict[int, list[tuple[StreamedFile, bytes]]]:
        """The files of the pieces that were taken just now and are too large for them."""
        taken = {}
        for slot, running in (self._failed | self._items).items():
            if files := running.take_files():
                taken[slot] = files
        self._failed.clear()
        return taken

    def look_at_logs(self) -> dict[int, PrintedLogs]:
        """What an item that is alone has printed so far, if there is more since the last call."""
        running = self._alone
        if running is None or self._runner is None or running.slot not in self._items:
            return {}
        logs = running.logs.add(self._runner.printed.look())
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


def _check_place(output: Any, where: dict[str, Any]) -> None:
    """Raises an error if a file has no place in an output: a class may write to its socket."""
    if not _MEDIA_TYPE.fullmatch(where["media_type"]) or not isinstance(where["name"], str):
        raise ValueError("a file without a media type and a name")
    place = output
    for part in where["at"]:
        place = place[part]
    if place is not None:
        raise ValueError("a file in the place of something else")
