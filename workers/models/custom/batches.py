"""A batch for a class with `predict_batch`, sent to its runner and returned as a whole.

If a call raises, exits, or returns the wrong number of outputs, its batch fails and is then
computed in halves until the culprit is isolated. If the system killed the process, the batch is
retried, just as when a model process dies (decision 25).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from shared.errors import Canceled, ModelFailed, PenstockError
from shared.messages import PrintedLogs
from shared.models.interface import ModelInterface
from shared.models.tasks import Result
from shared.models.tasks.custom import CustomResult
from workers.models.base import Prepared, PreparedCustom
from workers.models.client import ModelProcessDied
from workers.models.custom.class_process import ClassProcess, Ended, NotSetUp
from workers.models.custom.predictions import (
    MALFORMED,
    NO_ANSWER,
    WrongAnswer,
    message_of,
    outcome_of,
)
from workers.models.custom.printed import pass_on
from workers.models.custom.process import end_of
from workers.models.custom.public_text import PublicLogs
from workers.models.custom.runner.frames import BATCH, Frame
from workers.models.reports import BatchResult, Call, Failure, check_result

log = logging.getLogger(__name__)


class ClassBatch:
    """One batch for a class."""

    def __init__(
        self, process: ClassProcess, interface: ModelInterface, batch: Sequence[Prepared]
    ) -> None:
        self._process = process
        self._interface = interface
        self._items = list(batch)
        self._changed = asyncio.Event()
        self._is_canceled = False
        self._numbers = range(0)
        """Numbers of the predictions that the process is currently running."""
        self._answers: dict[int, Frame] = {}
        self._error: Frame | None = None
        """Reports that the batch failed as a whole."""
        self._results: dict[int, Result | Failure] = {}
        self._logs: dict[int, PrintedLogs] = {}
        self._calls: dict[int, Call] = {}
        self._computed_s = 0.0
        self._called_work = 0
        self._has_failed = False

    async def run(self, timeout_s: float) -> BatchResult:
        """Computes the batch. `timeout_s` applies to each call to the class.

        Raises:
            ModelProcessDied: the process lost its GPU, or was killed by the system or because it
                took too long.
        """
        started_at_s = time.time()
        try:
            await self._compute(range(len(self._items)), timeout_s)
        except (Canceled, NotSetUp) as error:
            for slot in range(len(self._items)):
                self._results.setdefault(slot, Failure.from_error(error))
        return BatchResult(
            results=[result for _, result in sorted(self._results.items())],
            started_at_s=started_at_s,
            finished_at_s=time.time(),
            inference_ms=self._computed_s * 1000,
            real_work=sum(item.length for item in self._items),
            padded_work=self._called_work,
            memory_bytes=self._process.memory_bytes,
            loaded_at_s=self._process.set_up_at_s,
            logs=self._logs,
            calls=self._calls,
        )

    def cancel(self) -> None:
        """Stops the batch. Items without a result fail as canceled."""
        self._is_canceled = True
        self._changed.set()

    def notice(self) -> None:
        self._changed.set()

    def handle(self, frame: Frame) -> None:
        """Handles a response from the process.

        Raises:
            WrongAnswer: no prediction is waiting for the frame.
        """
        if "batch_error" in frame.message:
            self._error = frame
        else:
            number = frame.message.get("id", BATCH)
            if number not in self._numbers or number in self._answers:
                # Ensures that nothing the process sends later is mistaken for another batch's
                # response.
                raise WrongAnswer("it sent a response to a different request")
            self._answers[number] = frame
        self._changed.set()

    async def _compute(self, slots: Sequence[int], timeout_s: float) -> None:
        """Fills `results` for these slots.

        If several items fail together, they are retried in halves.
        """
        self._called_work += sum(self._items[slot].length for slot in slots)
        try:
            await self._wait_ready()
            began_s = time.perf_counter()
            try:
                outcomes = await self._predict(slots, timeout_s)
            finally:
                took_s = time.perf_counter() - began_s
                self._computed_s += took_s
        except (Canceled, ModelProcessDied, NotSetUp):
            raise
        except PenstockError as error:
            self._has_failed = True
            facts = {"items": len(slots), "reason": error.message}
            log.warning("custom class failed to process a batch", extra=facts)
            if len(slots) == 1:
                self._results[slots[0]] = Failure.from_error(error)
                return
            middle = len(slots) // 2
            await self._compute(slots[:middle], timeout_s)
            await self._compute(slots[middle:], timeout_s)
            return
        for slot, outcome in zip(slots, outcomes, strict=True):
            self._results[slot] = check_result(outcome)
        if self._has_failed:
            self._calls |= dict.fromkeys(slots, Call(took_s * 1000, len(slots)))

    async def _wait_ready(self) -> None:
        """Waits until the class is set up, or set up again if its process has exited.

        Raises:
            Canceled: no caller is waiting for the batch anymore.
            NotSetUp: the class could not be set up.
        """
        process = self._process
        while True:
            self._changed.clear()
            process.take_end()
            if self._is_canceled:
                raise Canceled
            if (failure := process.take_failure()) is not None:
                raise failure
            if process.is_ready:
                if not await process.renew_if_used_up():
                    return
            else:
                process.begin()
                await self._changed.wait()

    async def _predict(
        self, slots: Sequence[int], timeout_s: float
    ) -> Sequence[CustomResult | PenstockError]:
        """Returns one outcome per item, in order.

        Raises:
            Canceled: no caller is waiting for the batch anymore.
            ModelFailed: the class failed on all items.
        """
        process = self._process
        items = [self._items[slot] for slot in slots]
        if not all(isinstance(item, PreparedCustom) for item in items):
            raise ModelFailed("a custom class can't process these items")
        inputs = [item for item in items if isinstance(item, PreparedCustom)]
        pass_on(process.runner.printed.take())  # printed between two batches
        numbers = [process.next_number() for _ in inputs]
        self._numbers = range(numbers[0], numbers[-1] + 1)
        self._answers, self._error = {}, None
        messages = [message_of(number, item) for number, item in zip(numbers, inputs, strict=True)]
        process.send([({"batch": len(inputs)}, ()), *messages], [BATCH])
        try:
            async with asyncio.timeout(timeout_s):
                await self._wait_answers(slots)
        except TimeoutError as error:
            reason = f"the batch did not finish within {timeout_s:g} s"
            await process.end(reason)
            raise ModelProcessDied(reason) from error
        process.handle_ended(BATCH)
        if any(map(process.has_lost_gpu, [*self._answers.values(), *filter(None, [self._error])])):
            raise await process.give_up()
        if self._error is not None:
            raise self._fail_call(slots, self._error)
        self._note_logs(slots, process.runner.printed.take())
        try:
            return self._outcomes(slots, inputs)
        except MALFORMED as error:
            await process.end(NO_ANSWER)
            raise ModelFailed(f"the model process was killed: {NO_ANSWER}") from error

    def _outcomes(
        self, slots: Sequence[int], inputs: Sequence[PreparedCustom]
    ) -> list[CustomResult | PenstockError]:
        answers = [self._answers[number] for number in self._numbers]
        for slot, frame in zip(slots, answers, strict=True):
            self._note_traceback(slot, frame)
        return [
            outcome_of(frame, self._interface, item.length, self._process.paths)
            for frame, item in zip(answers, inputs, strict=True)
        ]

    async def _wait_answers(self, slots: Sequence[int]) -> None:
        process, is_stopping = self._process, False
        while True:
            self._changed.clear()
            if (ended := process.take_end()) is not None:
                raise Canceled if is_stopping else self._explain(slots, ended)
            if self._error is not None or len(self._answers) == len(slots):
                if is_stopping:
                    process.handle_ended(BATCH)
                    raise Canceled
                return
            if self._is_canceled and not is_stopping and process.is_ready:
                is_stopping = True
                process.cancel(BATCH)
            await self._changed.wait()

    def _note_logs(self, slots: Sequence[int], printed: PrintedLogs) -> None:
        """Keeps the output printed during a call with one item.

        With several items, there is no way to know which one printed it.
        """
        if len(slots) == 1:
            self._logs[slots[0]] = PublicLogs(self._process.paths).add(printed, is_all=True)
        else:
            pass_on(printed)

    def _note_traceback(self, slot: int, frame: Frame) -> None:
        """Keeps an item's traceback, if its response includes one."""
        if frame.message.get("log"):
            logs = self._logs.get(slot, PrintedLogs())
            self._logs[slot] = self._process.add_traceback(logs, frame)

    def _fail_call(self, slots: Sequence[int], frame: Frame) -> PenstockError:
        """Returns the error for a call that failed as a whole."""
        self._note_logs(slots, self._process.runner.printed.take())
        if len(slots) == 1:
            self._note_traceback(slots[0], frame)
        else:
            pass_on(PrintedLogs(str(frame.message.get("log", ""))))
        if frame.message["kind"] == "canceled":
            return ModelFailed("the model canceled the batch on its own")
        return ModelFailed(self._process.paths.remove(str(frame.message["batch_error"])))

    def _explain(self, slots: Sequence[int], ended: Ended) -> ModelFailed:
        """Returns the error for a process that exited in the middle of a call."""
        self._note_logs(slots, ended.printed.take())
        if ended.killed_for:
            return ModelFailed(f"the model process was killed: {ended.killed_for}")
        how = end_of(ended.status)
        if ended.status < 0:
            return ModelProcessDied(f"the class's process {how}")
        return ModelFailed(f"the model process {how} while processing this item")
