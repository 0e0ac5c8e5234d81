"""Runs a batch in a model process. Halves groups that fail, and stops when it is canceled."""

from __future__ import annotations

import logging
import select
import socket
import time
from collections.abc import Sequence
from typing import cast

from shared.errors import Canceled, ModelFailed, PenstockError
from shared.tasks import Result
from workers.models.base import InferenceModel, OutOfMemory, PreparedItem, Previewer
from workers.runtime.protocol import (
    BatchResult,
    Cancel,
    Failure,
    Previews,
    RunBatch,
    StepDone,
    Watch,
    encode_server_message,
    read_client_message,
)
from workers.runtime.resident_models import ResidentModels, resident_bytes

PROGRESS_EVERY_S = 0.1
PREVIEW_EVERY_S = 0.5
PREVIEW_SHARE = 0.04
"""The maximum share of the time of a batch, once it has its first preview."""
FIRST_PREVIEW_S = 0.25
"""A batch that ends sooner has none."""
WATCH_VALID_S = 2.0
"""The I/O process repeats a Watch every half second while somebody watches."""
MAX_PREVIEWED = 8
"""Places of a batch that are previewed at a time."""

log = logging.getLogger(__name__)


def run_batch(resident_models: ResidentModels, batch: RunBatch, steps: StepReporter) -> BatchResult:
    """Runs `batch`. A model that can't be loaded fails only the items of this batch."""
    try:
        model = cast(InferenceModel, resident_models.use(batch.model))
    except Exception as error:
        # The boundary to the model libraries, as below.
        log.warning("model could not be loaded", exc_info=True, extra={"model": batch.model})
        failures: list[Result | Failure] = [Failure.from_error(error)] * len(batch.items)
        return _result(resident_models, batch, time.time(), 0.0, failures)
    started_at_s, began_s, began_cpu_s = time.time(), time.perf_counter(), time.process_time()
    execution = BatchExecution(model, steps)
    execution.compute(batch.items)
    inference_ms, cpu_s = (time.perf_counter() - began_s) * 1000, time.process_time() - began_cpu_s
    if execution.out_of_memory:
        resident_models.evict_others(keep=batch.model)  # makes room for the next batch
    results = [result for _, result in sorted(execution.results.items())]
    done = _result(resident_models, batch, started_at_s, inference_ms, results)
    done.padded_work, done.out_of_memory = execution.padded_work, execution.out_of_memory
    done.steps_saved, done.cpu_s = steps.saved, cpu_s
    done.loaded_at_s = resident_models.loaded_at_s(batch.model)
    if execution.padded:
        padded = execution.padded
        done.computed_work = [
            padded.get(place, item.length) for place, item in enumerate(batch.items)
        ]
    return done


def _result(
    resident_models: ResidentModels,
    batch: RunBatch,
    started_at_s: float,
    inference_ms: float,
    results: list[Result | Failure],
) -> BatchResult:
    return BatchResult(
        number=batch.number,
        results=results,
        started_at_s=started_at_s,
        finished_at_s=time.time(),
        inference_ms=inference_ms,
        real_work=sum(item.length for item in batch.items),
        padded_work=0,
        memory_bytes=resident_bytes(),
        switched=resident_models.changes(),
    )


class StepReporter:
    """The callback of a model after each step.

    Reports progress, and ends batch `number` if it is canceled.

    It reads the socket between two steps. A thread for this would slow down every batch.
    """

    def __init__(self, connection: socket.socket, number: int) -> None:
        self._connection = connection
        self._number = number
        self._reported_s = time.monotonic()
        self._watched: list[int] = []
        self._watched_until_s = 0.0
        self._preview_from_s = self._reported_s + FIRST_PREVIEW_S
        self.previewer: Previewer | None = None
        """The model, if it draws previews."""
        self.places: Sequence[int] = ()
        """The places of the batch that the current call of the model computes."""
        self.saved: int | None = None
        """The steps that were left out, if the batch was canceled."""

    def __call__(self, step: int, steps: int) -> None:
        """Reports `step` of `steps`, and previews if somebody watches and enough time has passed.

        Raises:
            Canceled: the batch is canceled.
        """
        # Checked after the last step too: decoding and encoding take as long as several steps.
        if self._is_canceled():
            self.saved = steps - step
            raise Canceled
        if (now_s := time.monotonic()) - self._reported_s >= PROGRESS_EVERY_S:
            self._reported_s = now_s
            self._connection.sendall(encode_server_message(StepDone(self._number, step, steps)))
        # After the last step the picture itself comes.
        is_watched = bool(self._watched) and now_s < self._watched_until_s
        if is_watched and step < steps and now_s >= self._preview_from_s:
            self._preview(step, steps, now_s)

    def _is_canceled(self) -> bool:
        while select.select([self._connection], [], [], 0)[0]:
            message = read_client_message(self._connection)
            # While a batch runs, only its Watch and Cancel, late ones of another batch, or the end
            # can arrive.
            if isinstance(message, Watch):
                if message.number == self._number:
                    self._watched = message.places
                    self._watched_until_s = time.monotonic() + WATCH_VALID_S
            elif not isinstance(message, Cancel) or message.number == self._number:
                return True
        return False

    def _preview(self, step: int, steps: int, began_s: float) -> None:
        watched = set(self._watched)
        inside = [at for at, place in enumerate(self.places) if place in watched][:MAX_PREVIEWED]
        if self.previewer is None or not inside:
            return
        try:
            drawn = self.previewer.preview(inside)
        except Exception:
            # The boundary to the model libraries: a picture that nobody needs never fails a batch.
            log.warning("no preview could be drawn", exc_info=True)
            self._preview_from_s = float("inf")
            return
        pictures = {
            self.places[at]: picture
            for at, picture in zip(inside, drawn, strict=True)
            if picture is not None
        }
        if pictures:
            previews = Previews(self._number, step, steps, pictures)
            self._connection.sendall(encode_server_message(previews))
        took_s = time.monotonic() - began_s
        self._preview_from_s = began_s + max(PREVIEW_EVERY_S, took_s / PREVIEW_SHARE)


class BatchExecution:
    """Computes one batch group by group.

    A group that fails is halved until the bad item is alone.
    """

    def __init__(self, model: InferenceModel, steps: StepReporter) -> None:
        self._model = model
        self._steps = steps
        steps.previewer = model if isinstance(model, Previewer) else None
        self.results: dict[int, Result | Failure] = {}
        self.padded_work = 0
        self.padded: dict[int, int] = {}
        """Work of the items that were padded, padding included, by place."""
        self.out_of_memory = False

    def compute(self, items: Sequence[PreparedItem]) -> None:
        """Fills `results` for every place in `items`."""
        try:
            for places in self._model.groups(items):
                self._compute_group(items, places)
        except Canceled as error:
            for place in range(len(items)):
                self.results.setdefault(place, Failure.from_error(error))

    def _compute_group(self, items: Sequence[PreparedItem], places: Sequence[int]) -> None:
        group = [items[place] for place in places]
        lengths = [item.length for item in group]
        computed = self._model.computed_work(lengths)
        self.padded_work += computed
        if (real := sum(lengths)) < computed:
            # If each item costs as much as the longest, padding is not in proportion.
            each = [computed // len(group)] * len(group)
            if not self._model.pads:
                each = [length * computed // real for length in lengths]
            self.padded |= dict(zip(places, each, strict=True))
        self._steps.places = places
        try:
            results = self._model.predict(group, self._steps)
            if len(results) != len(group):
                counts = f"{len(results)} results for {len(group)} items"
                raise ModelFailed(f"the model gave {counts}; this is a bug")
        except Canceled:
            raise
        except Exception as error:
            # The boundary to the model libraries: their errors fail items, never the process.
            self.out_of_memory |= isinstance(error, OutOfMemory)
            log.warning("batch failed", exc_info=True, extra={"items": len(group)})
            if len(group) == 1:
                self.results[places[0]] = Failure.from_error(error)
                return
        else:
            for place, result in zip(places, results, strict=True):
                self.results[place] = (
                    Failure.from_error(result) if isinstance(result, PenstockError) else result
                )
            return
        middle = len(places) // 2
        self._compute_group(items, places[:middle])
        self._compute_group(items, places[middle:])
