"""Runs two batches at once on a model whose device computes asynchronously.

Each batch has a thread. While the device computes one batch, the other batch's thread prepares it,
or reads and sends its results. The device computes one call at a time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NoReturn

from shared.errors import Canceled
from workers.models.base import GPU_LOST_STATUS, GpuLost, InferenceModel
from workers.models.reports import BatchResult
from workers.runtime.execution import BatchExecution, BatchSteps, report_batch
from workers.runtime.protocol import IN_FLIGHT, RunBatch
from workers.runtime.resident_models import ResidentModels

log = logging.getLogger(__name__)


class OverlappedBatches:
    """Computes batches of one resident model on threads.

    Args:
        send: sends a result to the I/O process. Never called on two threads at once.
    """

    def __init__(
        self, resident_models: ResidentModels, send: Callable[[BatchResult], None]
    ) -> None:
        self._resident_models = resident_models
        self._send = send
        self._threads = ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="batch")
        self._running: dict[int, tuple[Future[None], CancelCheck]] = {}
        self._ending = threading.Lock()
        self._ended_s = 0.0

    def start(self, batch: RunBatch, model: InferenceModel) -> None:
        """Starts a batch. Returns before it finishes."""
        self._running = {
            number: running for number, running in self._running.items() if not running[0].done()
        }
        check = CancelCheck()
        self._running[batch.number] = self._threads.submit(self._run, batch, model, check), check

    def cancel(self, number: int) -> None:
        """Stops a batch before its next call to the model, if it is still running."""
        if (running := self._running.get(number)) is not None:
            running[1].cancel()

    def finish(self) -> None:
        """Waits until every batch has finished and sent its result."""
        wait([future for future, _ in self._running.values()])

    def _run(self, batch: RunBatch, model: InferenceModel, check: CancelCheck) -> None:
        try:
            self._compute(batch, model, check)
        except GpuLost as error:
            leave_without_gpu(error)
        except BaseException:
            # This is not a model error, which would only fail items. The I/O process would wait
            # forever for a batch without a result.
            log.exception("batch ended without a result")
            os._exit(1)

    def _compute(self, batch: RunBatch, model: InferenceModel, check: CancelCheck) -> None:
        began_s = time.perf_counter()
        execution = BatchExecution(model, check)
        execution.compute(batch.items)
        with self._ending, contextlib.suppress(ConnectionError):  # the I/O process has hung up
            now_s = time.perf_counter()
            # Until that time, the device was computing the previous batch.
            inference_s = now_s - max(began_s, self._ended_s)
            self._ended_s = now_s
            self._send(report_batch(self._resident_models, batch, execution, inference_s))


class CancelCheck(BatchSteps):
    """Stops a canceled batch between calls to the model."""

    def __init__(self) -> None:
        super().__init__()
        self._is_canceled = False

    def cancel(self) -> None:
        self._is_canceled = True

    def begin(self, slots: Sequence[int]) -> None:
        super().begin(slots)
        self(0, 0)

    def __call__(self, step: int, steps: int) -> None:
        if self._is_canceled:
            self.saved = steps - step
            raise Canceled


def leave_without_gpu(error: GpuLost) -> NoReturn:
    """Exits this process after its GPU failed, so that its items are retried."""
    log.error("GPU lost", extra={"error": str(error)})
    logging.shutdown()
    # Skips the libraries' exit handlers, which may wait forever for the GPU.
    os._exit(GPU_LOST_STATUS)
