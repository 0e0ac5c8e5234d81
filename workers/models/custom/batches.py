"""A class with `predict_batch` in a model process: a batch goes to its runner and comes back whole.

What raises, exits or returns the wrong number of outputs fails its batch, which is then computed in
halves until the cause is alone (workers/runtime/execution.py). A batch whose runner the system
killed takes the model process with it, as for any model (decision 25).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from shared.catalog import Model
from shared.errors import Canceled, ModelFailed, PenstockError
from shared.messages import PrintedLogs
from shared.tasks.custom import CustomResult
from workers.models.base import OnStep, PreparedCustom, PreparedItem
from workers.models.custom.model import (
    MALFORMED,
    NO_ANSWER,
    RUNNER_KILLED,
    STEP_S,
    USED_UP,
    HostedClass,
    message_of,
    outcome_of,
)
from workers.models.custom.process import RunnerProcess, end_of, pass_on
from workers.models.custom.public_text import PublicLogs
from workers.models.custom.runner.frames import BATCH, Frame


class CustomBatchModel(HostedClass):
    """Computes batches by a class with `predict_batch`."""

    pads = False

    def __init__(self, entry: Model, folder: Path, device: str, threads: int) -> None:
        super().__init__(entry, folder, device, threads)
        self._logs: dict[int, PrintedLogs] = {}
        self._numbers = 0
        self._batch_size = 0

    def groups(self, batch: Sequence[PreparedItem]) -> list[list[int]]:
        """One: the queue has put together only items that may share a batch."""
        return [list(range(len(batch)))]

    def computed_work(self, lengths: Sequence[int]) -> int:
        """The work of the items. Whether the class pads them is not known."""
        return sum(lengths)

    def predict(
        self, batch: Sequence[PreparedItem], on_step: OnStep
    ) -> list[CustomResult | PenstockError]:
        """One outcome per item, in order.

        Raises:
            Canceled: nobody waits for the batch any more.
            ModelFailed: the class failed on the whole batch.
        """
        self._logs, self._batch_size = {}, len(batch)
        runner = self._running(on_step)
        pass_on(runner.printed.take())  # printed between two batches
        numbers = range(self._numbers, self._numbers + len(batch))
        self._numbers = numbers.stop
        items = [
            message_of(number, cast(PreparedCustom, one))
            for number, one in zip(numbers, batch, strict=True)
        ]
        runner.send_all([({"batch": len(batch)}, ()), *items])
        answers = self._answers(runner, numbers, on_step)
        self._note_logs(runner.printed.take())
        for at, frame in enumerate(answers):
            self._note_traceback(at, frame)
        try:
            return [
                outcome_of(frame, self._interface, item.length, self._paths)
                for frame, item in zip(answers, batch, strict=True)
            ]
        except MALFORMED as error:
            runner.kill_at_fault(NO_ANSWER)
            raise self._ended(runner) from error

    def _answers(self, runner: RunnerProcess, numbers: range, on_step: OnStep) -> list[Frame]:
        """The answer to each prediction of a batch, in order. Raises as `predict` does."""
        answers: dict[int, Frame] = {}
        while len(answers) < len(numbers):
            for frame in self._received(runner, on_step):
                if "batch_error" in frame.message:
                    raise self._failed(frame, runner)
                number: int = frame.message.get("id", BATCH)
                if number not in numbers or number in answers:
                    # So what it sends later is never taken for the answer of another batch.
                    runner.kill("it sent an answer to something else")
                    raise self._ended(runner)
                answers[number] = frame
        return [answers[number] for number in numbers]

    def _note_logs(self, printed: PrintedLogs) -> None:
        """Keeps the output of a batch if it has one item; otherwise its owner is unknown."""
        if self._batch_size == 1:
            self._logs[0] = PublicLogs(self._paths).add(printed, is_all=True)
        else:
            pass_on(printed)

    def _note_traceback(self, at: int, frame: Frame) -> None:
        """Keeps the traceback of the item `at`, if its answer has one."""
        if frame.message.get("log"):
            self._logs[at] = self._add_traceback(self._logs.get(at, PrintedLogs()), frame)

    def take_logs(self) -> dict[int, PrintedLogs]:
        """Returns what the class printed in the last call, by item index, if the item is known.

        The items of a batch may belong to several tenants, so output of a batch of several goes to
        the operator's log only.
        """
        logs, self._logs = self._logs, {}
        return logs

    def _running(self, on_step: OnStep) -> RunnerProcess:
        """The runner, with the class set up. It is started again if it has ended."""
        began_s = time.monotonic()
        if self._runner is not None and self._runner.is_used_up:
            self._runner.kill(USED_UP)
        if self._runner is not None and self._runner.has_ended:
            self._runner.close()
            self._runner = None
        if self._runner is not None:
            return self._runner
        while (pause_s := self._start_at_s - time.monotonic()) > 0:
            time.sleep(min(STEP_S, pause_s))
            on_step(0, 0)
        runner = self._restart()
        frames = runner.receive(self._setup_limit_s)
        self._restart_s += time.monotonic() - began_s
        if not frames or "ready" not in frames[0].message:
            self._on_failed_setup()
            raise self._failed_restart(frames)
        self._on_ready(runner)
        on_step(0, 0)
        return runner

    def _received(self, runner: RunnerProcess, on_step: OnStep) -> list[Frame]:
        """Waits for frames, for a moment.

        Raises:
            Canceled: the batch is canceled.
            ModelFailed: the runner ended instead.
        """
        try:
            frames = runner.receive(STEP_S)
        except MALFORMED:
            runner.kill_at_fault(NO_ANSWER)
            frames = None
        if frames is None:
            raise self._ended(runner)
        if not frames:
            try:
                on_step(0, 0)
            except Canceled:
                self._stop(runner)
                raise
        return frames

    def _stop(self, runner: RunnerProcess) -> None:
        """Ends the batch that runs, and the runner if it does not end by itself."""
        runner.cancel(BATCH)
        while (frames := runner.receive(STEP_S)) is not None:
            if frames:
                runner.ended(BATCH)
                while runner.receive(STEP_S):  # the rest of its answers
                    pass
                return
        runner.close()
        self._runner = None

    def _failed(self, frame: Frame, runner: RunnerProcess) -> PenstockError:
        self._note_logs(runner.printed.take())
        if self._batch_size == 1:
            self._note_traceback(0, frame)
        else:
            pass_on(PrintedLogs(str(frame.message.get("log", ""))))
        if frame.message["kind"] == "canceled":
            return ModelFailed("the model canceled the batch by itself")
        return ModelFailed(self._paths.remove(str(frame.message["batch_error"])))

    def _ended(self, runner: RunnerProcess) -> ModelFailed:
        """Why the runner ended in the middle of a batch."""
        self._runner = None
        self._note_logs(runner.printed.take())
        status = runner.close()
        if runner.killed_for:
            return ModelFailed(f"the process of the model was killed: {runner.killed_for}")
        if status < 0:
            print(f"the process of the class {end_of(status)}", file=sys.stderr, flush=True)
            os._exit(RUNNER_KILLED)
        return ModelFailed(f"the process of the model {end_of(status)} while it computed this")
