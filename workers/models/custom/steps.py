"""Items for a class that runs predictions one at a time or several at once."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections import OrderedDict
from collections.abc import Sequence

from shared.errors import Canceled, ModelFailed, PenstockError
from shared.messages import PrintedLogs
from shared.models.interface import ModelInterface
from shared.models.tasks.custom import CustomResult
from workers.models.base import Prepared, PreparedCustom
from workers.models.client import ModelProcessDied, OnStepMessage
from workers.models.custom.class_process import ClassProcess, Ended
from workers.models.custom.predictions import Prediction, message_of, outcome_of
from workers.models.custom.printed import pass_on
from workers.models.custom.process import end_of
from workers.models.custom.public_text import PublicLogs
from workers.models.custom.runner.frames import Frame
from workers.models.reports import ItemEnded, ItemLogs, Pieces, Spare, StepMessage
from workers.models.step_shares import StepRoom, StepShares

CHUNKS_EVERY_S = 0.05
"""Interval between chunks, so that an item's readers get at most 20 events per second."""
LOGS_EVERY_S = 0.5
"""How often webhooks and prediction streams check progress. Spare seconds are sent along with
progress.
"""

log = logging.getLogger(__name__)


class ClassSteps:
    """One run of a class until no items are left. Computes up to `interface.concurrency` at a time.

    on_message: called with the items' results, but never during a call to one of this object's
    methods.
    """

    def __init__(
        self,
        process: ClassProcess,
        interface: ModelInterface,
        room: StepRoom,
        on_message: OnStepMessage,
    ) -> None:
        self._process = process
        self._interface = interface
        self._shares = StepShares(room)
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._has_lost_gpu = False
        self.fault: Exception | None = None
        """The exception raised by `on_message`. It ends the run."""
        self._items: OrderedDict[int, Prediction] = OrderedDict()
        self._slots = 0
        """Number of items admitted so far."""
        self._charged_s: float | None = None
        """Time up to which use of the process has been charged. None if the process is not ready.
        """
        self._reported_s = 0.0
        self._timers: dict[str, asyncio.TimerHandle] = {}

    async def run(self, batch: Sequence[Prepared]) -> None:
        """Computes items until none are left.

        Raises:
            ModelProcessDied: the process was killed from outside.
        """
        self.admit(batch)
        try:
            self._set_timer("state", LOGS_EVERY_S)
            while self._items:
                await self._advance()
                if not self._items:
                    await asyncio.sleep(
                        0
                    )  # the last messages are delivered and more items are admitted
        finally:
            for timer in self._timers.values():
                timer.cancel()
            if self._items:  # the run was canceled, or the process has died
                self._cancel_all()
            if self._process.is_ready:
                pass_on(self._process.runner.printed.take())

    def admit(self, items: Sequence[Prepared]) -> int:
        """Adds items. Returns the first item's slot."""
        first, self._slots = self._slots, self._slots + len(items)
        self._charge()
        for slot, item in enumerate(items, first):
            if not isinstance(item, PreparedCustom):
                error = ModelFailed(f"a custom class can't process {type(item).__name__}")
                self._report_end(slot, error)
                continue
            number, is_text = self._process.next_number(), self._interface.streams == "text"
            self._items[slot] = Prediction(slot, number, item, is_text=is_text)
            self._shares.add(slot, item.room or item.length)
        self._changed.set()
        return first

    def drop(self, slots: Sequence[int]) -> None:
        """Stops items that are still running. They fail as canceled."""
        self._charge()
        for slot in slots:
            prediction = self._items.pop(slot, None)
            if prediction is not None:
                self._stop(prediction)
                self._report_end(slot, Canceled())
        self._changed.set()

    def _cancel_all(self) -> None:
        """Stops everything the process is still running. No caller gets a result."""
        for prediction in self._items.values():
            self._stop(prediction)
        self._items.clear()

    def _stop(self, prediction: Prediction) -> None:
        """Stops a prediction if the process is running it. Its printed output is discarded."""
        if prediction.is_sent and self._process.is_ready:
            self._process.cancel(prediction.number)
            self._process.runner.printed.take_log(prediction.number)

    def notice(self) -> None:
        self._charge()
        self._changed.set()

    async def _advance(self) -> None:
        """Does as much as possible right now, then waits until something changes."""
        process = self._process
        self._changed.clear()
        if self.fault is not None:
            self._cancel_all()
            return
        if self._has_lost_gpu:
            raise await process.give_up()
        if (ended := process.take_end()) is not None:
            self._on_end(ended)
            return
        if (failure := process.take_failure()) is not None:
            for slot in list(self._items):
                self._end(slot, failure)
            return
        if process.is_ready:
            if not process.computing and await process.renew_if_used_up():
                return
            self._charge()
            if process.is_ready:
                self._send_items()
        else:
            process.begin()
        await self._changed.wait()

    def _send_items(self) -> None:
        # A dropped prediction may still be running, and a class may run only one at a time.
        inside = len(self._process.computing)
        is_alone = any(
            prediction.is_sent and prediction.is_suspect for prediction in self._items.values()
        )
        for prediction in self._items.values():
            must_wait = is_alone or (prediction.is_suspect and inside)
            if inside >= self._interface.concurrency or must_wait:
                return
            if not prediction.is_sent:
                is_alone = prediction.is_suspect
                inside += 1
                prediction.is_sent = True
                prediction.logs = PublicLogs(self._process.paths)
                self._process.runner.printed.open_log(prediction.number, is_alone=inside == 1)
                message = message_of(prediction.number, prediction.item)
                self._process.send([message], [prediction.number])

    def handle(self, frame: Frame) -> None:
        """Handles a response from the process.

        Raises:
            ValueError: the response is invalid; see predictions.MALFORMED for other errors.
        """
        number = frame.message["id"]
        prediction = next(
            (candidate for candidate in self._items.values() if candidate.number == number), None
        )
        if prediction is None or not prediction.is_sent:
            self._changed.set()  # a dropped prediction has just finished
        elif "piece" in frame.message:
            prediction.add_piece(frame)
            self._report_pieces()
        else:
            self._on_answer(prediction, frame)

    def _on_answer(self, prediction: Prediction, frame: Frame) -> None:
        if self._process.has_lost_gpu(frame):
            self._has_lost_gpu = True
            self._changed.set()
            return
        printed = self._process.runner.printed.take_log(prediction.number)
        logs = self._process.add_traceback(prediction.logs.add(printed, is_all=True), frame)
        work, paths = prediction.item.length, self._process.paths
        outcome = outcome_of(frame, self._interface, work, paths, prediction.files)
        self._charge()
        self._end(prediction.slot, outcome, logs)
        self._changed.set()

    def _on_end(self, ended: Ended) -> None:
        """Handles the process's exit. Its items fail, unless it was killed from outside."""
        pass_on(ended.printed.take())
        inside = [prediction for prediction in self._items.values() if prediction.is_sent]
        for prediction in inside:
            prediction.logs.add(ended.printed.take_log(prediction.number), is_all=True)
            prediction.start_over()
        if ended.killed_for and not ended.is_at_fault:  # because of a dropped prediction
            return
        if ended.status == -signal.SIGKILL and inside and not ended.killed_for:
            raise ModelProcessDied(f"the class's process {end_of(ended.status)}")
        if ended.computing > 1:  # one of them, or a dropped one, is the cause; the others continue
            for prediction in inside:
                prediction.is_suspect = True
            return
        how = f"{end_of(ended.status)} while processing this item"
        if ended.killed_for:
            how = f"was killed while processing this item: {ended.killed_for}"
        for prediction in inside:
            error = ModelFailed(f"the model process {how}")
            self._end(prediction.slot, error, prediction.logs.printed)

    def _charge(self) -> None:
        """Charges the time since the last call to the current items.

        Callers pay nothing while the class is being set up, or while an item waits for a dropped
        item to stop, because another caller's item may be the cause.
        """
        now_s = time.monotonic()
        if self._charged_s is not None:
            waiting = [slot for slot, prediction in self._items.items() if not prediction.is_sent]
            self._shares.charge(now_s - self._charged_s, waiting=waiting)
        self._charged_s = now_s if self._process.is_ready else None

    def _end(
        self, slot: int, outcome: CustomResult | PenstockError, logs: PrintedLogs | None = None
    ) -> None:
        if isinstance(outcome, PenstockError):
            self._report_chunks()  # a result includes all pieces, a failure includes none
        self._report_end(slot, outcome, logs)
        del self._items[slot]

    def _report_end(
        self, slot: int, outcome: CustomResult | PenstockError, logs: PrintedLogs | None = None
    ) -> None:
        self._report_spare()
        done = self._shares.end(
            slot,
            outcome,
            memory_bytes=self._process.memory_bytes,
            loaded_at_s=self._process.set_up_at_s,
            logs=logs,
        )
        self._report(ItemEnded(0, slot, done))

    def _report_spare(self) -> None:
        if spare_s := self._shares.take_spare_s():
            self._report(Spare(0, spare_s))

    def _report(self, message: StepMessage) -> None:
        # Not immediately, because `admit`'s caller learns its items' slots only when it returns.
        self._loop.call_soon(self._deliver, message)

    def _deliver(self, message: StepMessage) -> None:
        try:
            self._on_message(message)
        except Exception as error:
            # Any error ends the run, because nothing else would report it.
            self.fault = self.fault or error
            self._changed.set()

    def _report_pieces(self) -> None:
        """Reports pieces since the last report, immediately or once CHUNKS_EVERY_S have passed."""
        if "pieces" in self._timers:
            return
        wait_s = self._reported_s + CHUNKS_EVERY_S - time.monotonic()
        if wait_s > 0:
            self._set_timer("pieces", wait_s)
        else:
            self._report_chunks()

    def _report_chunks(self) -> None:
        self._reported_s = time.monotonic()
        chunks, files = {}, {}
        for slot, prediction in self._items.items():
            if (chunk := prediction.take_chunk()) is not None:
                chunks[slot], files[slot] = chunk, prediction.take_files()
        if chunks:
            self._report(Pieces(0, chunks, files))

    def _report_logs(self) -> None:
        """Reports what each prediction has printed so far, if there is anything new."""
        if not self._process.is_ready:
            return
        printed = self._process.runner.printed
        pass_on(printed.take_cleared())
        logs_by_number = printed.look()
        for prediction in self._items.values():
            if (look := logs_by_number.get(prediction.number)) is None:
                continue
            before = prediction.logs.printed.end
            if (logs := prediction.logs.add(look)).end > before:
                self._report(ItemLogs(0, prediction.slot, logs))

    def _set_timer(self, name: str, after_s: float) -> None:
        self._timers[name] = self._loop.call_later(after_s, self._on_timer, name)

    def _on_timer(self, name: str) -> None:
        del self._timers[name]
        if name == "pieces":
            self._report_pieces()
        else:
            self._set_timer("state", LOGS_EVERY_S)
            self._charge()
            self._report_spare()
            self._report_logs()
