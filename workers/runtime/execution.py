"""Runs batches in a model process, either as a whole or as one batch that items join between steps.

In a whole batch, groups that fail are halved, and the batch stops when it is canceled. If a model
computes asynchronously, its batches overlap (workers/runtime/overlap.py). For a SteppedModel, each
step measures its items' share of the process. Callers see their items' progress, and previews if
they are watching.
"""

from __future__ import annotations

import logging
import select
import socket
import time
from collections.abc import Callable, Sequence
from typing import cast

from shared.errors import Canceled, ModelFailed, PenstockError
from shared.models.tasks import Result
from workers.models.base import (
    CompiledModel,
    InferenceModel,
    OutOfMemory,
    PreparedItem,
    Previewer,
    ProgressReporter,
    Resumable,
    RgbImage,
    StepEnd,
    SteppedModel,
)
from workers.models.reports import (
    BatchResult,
    Call,
    Chunks,
    Failure,
    ItemEnded,
    ItemPreview,
    ItemsProgress,
    Preempted,
    Previews,
    Spare,
    StepDone,
    StepsEnded,
    check_result,
)
from workers.models.step_shares import StepRoom, StepShares
from workers.runtime.protocol import (
    Admit,
    Cancel,
    Drop,
    Evict,
    Preempt,
    RunBatch,
    ServerMessage,
    Watch,
    encode_server_message,
    read_client_message,
)
from workers.runtime.resident_models import ResidentModels, resident_bytes

PROGRESS_EVERY_S = 0.1
PREVIEW_EVERY_S = 0.5
PREVIEW_SHARE = 0.04
"""Maximum share of a batch's time to spend on previews after the first one."""
FIRST_PREVIEW_S = 0.25
"""A batch that finishes sooner doesn't get a preview."""
WATCH_VALID_S = 2.0
"""How long a Watch is valid. The I/O process repeats it every half second while a reader is
watching.
"""
MAX_PREVIEWED = 8
"""Maximum number of slots in a batch that are previewed at a time."""

CHUNKS_EVERY_S = 0.05
"""Interval between chunks, so that an item's readers get at most 20 events per second."""
SPARE_EVERY_S = 0.5
"""Interval between Spare messages. The autoscaler checks every ten seconds."""

log = logging.getLogger(__name__)


def run_batch(
    resident_models: ResidentModels, batch: RunBatch, connection: socket.socket
) -> BatchResult:
    """Runs `batch`. A model that can't be loaded fails only this batch's items."""
    try:
        model = cast(InferenceModel, resident_models.use(batch.model))
    except Exception as error:
        # The boundary with the model libraries, as below.
        log.warning("model could not be loaded", exc_info=True, extra={"model": batch.model})
        failures: list[Result | Failure] = [Failure.from_error(error)] * len(batch.items)
        return _result(resident_models, batch, time.time(), 0.0, failures)
    steps = StepReporter(connection, batch.number, model if isinstance(model, Previewer) else None)
    execution = BatchExecution(model, steps)
    began_s = time.perf_counter()
    execution.compute(batch.items)
    return report_batch(resident_models, batch, execution, time.perf_counter() - began_s)


def report_batch(
    resident_models: ResidentModels, batch: RunBatch, execution: BatchExecution, inference_s: float
) -> BatchResult:
    """Returns the result of a batch that was just computed in `inference_s`.

    If the device was too small for the batch, evicts all other models first.
    """
    started_at_s = time.time() - inference_s
    if execution.out_of_memory:
        resident_models.evict_others(keep=batch.model)  # makes room for the next batch
    results = [result for _, result in sorted(execution.results.items())]
    done = _result(resident_models, batch, started_at_s, 1000 * inference_s, results)
    done.padded_work, done.out_of_memory = execution.padded_work, execution.out_of_memory
    done.steps_saved, done.calls = execution.steps.saved, execution.calls
    done.loaded_at_s = resident_models.loaded_at_s(batch.model)
    done.eager_calls = execution.take_eager_calls()
    if execution.padded:
        padded = execution.padded
        done.computed_work = [
            padded.get(slot, item.length) for slot, item in enumerate(batch.items)
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


class BatchSteps:
    """A model's callback, called after each step of a batch."""

    def __init__(self) -> None:
        self.slots: Sequence[int] = ()
        """The batch's slots that are being computed by the model's current call."""
        self.saved: int | None = None
        """Number of steps that were skipped, if the batch was canceled."""

    def begin(self, slots: Sequence[int]) -> None:
        """Called when the model starts a call that computes these slots in the batch.

        Raises:
            Canceled: the batch is canceled.
        """
        self.slots = slots

    def __call__(self, step: int, steps: int) -> None:
        """Called after step `step` of `steps`.

        Raises:
            Canceled: the batch is canceled.
        """


class StepReporter(BatchSteps):
    """Reports progress, and stops batch `number` if it is canceled.

    It reads the socket between steps, because using a thread for this would slow down every batch.

    Args:
        previewer: the model, or None if it can't draw previews.
    """

    def __init__(
        self, connection: socket.socket, number: int, previewer: Previewer | None = None
    ) -> None:
        super().__init__()
        self._connection = connection
        self._number = number
        self._previewer = previewer
        self._reported_s = time.monotonic()
        self._watched: list[int] = []
        self._watched_until_s = 0.0
        self._preview_from_s = self._reported_s + FIRST_PREVIEW_S

    def __call__(self, step: int, steps: int) -> None:
        """Reports `step` of `steps`, and previews if requested and enough time has passed."""
        # Checked after the last step as well, because decoding and encoding take as long as several
        # steps.
        if self._is_canceled():
            self.saved = steps - step
            raise Canceled
        if not steps:
            return
        if (now_s := time.monotonic()) - self._reported_s >= PROGRESS_EVERY_S:
            self._reported_s = now_s
            self._connection.sendall(encode_server_message(StepDone(self._number, step, steps)))
        # The image itself follows after the last step.
        is_watched = bool(self._watched) and now_s < self._watched_until_s
        if is_watched and step < steps and now_s >= self._preview_from_s:
            self._preview(step, steps, now_s)

    def _is_canceled(self) -> bool:
        while select.select([self._connection], [], [], 0)[0]:
            message = read_client_message(self._connection)
            # While a batch runs, the only possible messages are its own Watch and Cancel, late ones
            # for another batch, and the end of the connection.
            if isinstance(message, Watch):
                if message.number == self._number:
                    self._watched = message.slots
                    self._watched_until_s = time.monotonic() + WATCH_VALID_S
            elif not isinstance(message, Cancel) or message.number == self._number:
                return True
        return False

    def _preview(self, step: int, steps: int, began_s: float) -> None:
        watched = set(self._watched)
        inside = [at for at, slot in enumerate(self.slots) if slot in watched][:MAX_PREVIEWED]
        if self._previewer is None or not inside:
            return
        try:
            drawn = self._previewer.preview(inside)
        except Exception:
            # The boundary with the model libraries: an optional preview must never fail a batch.
            log.warning("could not generate a preview", exc_info=True)
            self._preview_from_s = float("inf")
            return
        images = {
            self.slots[at]: image
            for at, image in zip(inside, drawn, strict=True)
            if image is not None
        }
        if images:
            previews = Previews(self._number, step, steps, images)
            self._connection.sendall(encode_server_message(previews))
        took_s = time.monotonic() - began_s
        self._preview_from_s = began_s + max(PREVIEW_EVERY_S, took_s / PREVIEW_SHARE)


class BatchExecution:
    """Computes one batch, one group at a time.

    A group that fails is halved until the bad item is isolated.
    """

    def __init__(self, model: InferenceModel, steps: BatchSteps) -> None:
        self._model = model
        self.steps = steps
        self.results: dict[int, Result | Failure] = {}
        self.padded_work = 0
        self.padded: dict[int, int] = {}
        """Work of the padded items, including padding, keyed by slot."""
        self.calls: dict[int, Call] = {}
        """The calls that recomputed items after other items had failed, keyed by slot."""
        self._has_failed = False
        self.out_of_memory = False

    def compute(self, items: Sequence[PreparedItem]) -> None:
        """Fills `results` for every slot in `items`."""
        try:
            for slots in self._model.groups(items):
                self._compute_group(items, slots)
        except Canceled as error:
            for slot in range(len(items)):
                self.results.setdefault(slot, Failure.from_error(error))

    def take_eager_calls(self) -> int:
        """Returns how many calls of the model should have run compiled code but didn't."""
        return self._model.take_eager_calls() if isinstance(self._model, CompiledModel) else 0

    def _compute_group(self, items: Sequence[PreparedItem], slots: Sequence[int]) -> None:
        group = [items[slot] for slot in slots]
        self._count_padding([item.length for item in group], slots)
        self.steps.begin(slots)
        began_s = time.perf_counter()
        try:
            results = self._model.predict(group, self.steps)
            if len(results) != len(group):
                counts = f"{len(results)} results for {len(group)} items"
                raise ModelFailed(f"the model returned {counts}; this is a bug")
        except Canceled:
            raise
        except Exception as error:
            # The boundary with the model libraries, whose errors fail items but never the process.
            self._has_failed = True
            self.out_of_memory |= isinstance(error, OutOfMemory)
            log.warning("batch failed", exc_info=True, extra={"items": len(group)})
            if len(group) == 1:
                self.results[slots[0]] = Failure.from_error(error)
                return
        else:
            for slot, result in zip(slots, results, strict=True):
                self.results[slot] = check_result(result)
            if self._has_failed:
                took_s = time.perf_counter() - began_s
                self.calls |= dict.fromkeys(slots, Call(took_s * 1000, len(slots)))
            return
        middle = len(slots) // 2
        self._compute_group(items, slots[:middle])
        self._compute_group(items, slots[middle:])

    def _count_padding(self, lengths: Sequence[int], slots: Sequence[int]) -> None:
        computed = self._model.computed_work(lengths)
        self.padded_work += computed
        for slot in slots:  # already counted if a larger group failed
            self.padded.pop(slot, None)
        if sum(lengths) < computed:
            shares = _share_work(computed, lengths, is_even=self._model.pads)
            self.padded |= dict(zip(slots, shares, strict=True))


def _share_work(computed: int, lengths: Sequence[int], *, is_even: bool) -> list[int]:
    """Returns each item's share of a group's computed work.

    Args:
        is_even: True if each item costs as much as the longest one. Otherwise, an item's cost is
            proportional to its length.
    """
    if is_even:
        return [computed // len(lengths)] * len(lengths)
    return [length * computed // sum(lengths) for length in lengths]


class StepPreviews:
    """Reports the progress of the items in batch `number` to the I/O process between steps."""

    def __init__(
        self, model: ProgressReporter, number: int, send: Callable[[ServerMessage], None]
    ) -> None:
        self._model = model
        self._number = number
        self._send = send
        self._reported_s = time.monotonic()
        self._preview_from_s = self._reported_s + FIRST_PREVIEW_S
        self._watched: set[int] = set()
        self._watched_until_s = 0.0

    def watch(self, slots: Sequence[int]) -> None:
        """Briefly previews these slots, because a reader is watching them."""
        self._watched = set(slots)
        self._watched_until_s = time.monotonic() + WATCH_VALID_S

    def report(self) -> None:
        """Reports progress, and draws previews when they are due."""
        now_s = time.monotonic()
        if now_s - self._reported_s < PROGRESS_EVERY_S:
            return
        progress = self._model.progress()
        if progress:
            self._reported_s = now_s
            self._send(ItemsProgress(self._number, progress))
        if self._watched and self._preview_from_s <= now_s < self._watched_until_s:
            self._draw(progress, now_s)

    def _draw(self, progress: dict[int, tuple[int, int]], began_s: float) -> None:
        for slot in sorted(self._watched & progress.keys())[:MAX_PREVIEWED]:
            image = self._draw_preview(slot)
            if image is not None:
                self._send(ItemPreview(self._number, slot, *progress[slot], image))
        took_s = time.monotonic() - began_s
        self._preview_from_s = max(
            self._preview_from_s, began_s + max(PREVIEW_EVERY_S, took_s / PREVIEW_SHARE)
        )

    def _draw_preview(self, slot: int) -> RgbImage | None:
        try:
            return self._model.image(slot)
        except Exception:
            # The boundary with the model libraries: an optional preview must never fail an item.
            log.warning("could not generate a preview", exc_info=True)
            self._preview_from_s = float("inf")
            return None


class StepExecution:
    """One batch, which runs until the model has no items left.

    Args:
        room: the model's room in this process.
    """

    def __init__(
        self,
        connection: socket.socket,
        resident_models: ResidentModels,
        batch: RunBatch,
        room: StepRoom,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._connection = connection
        self._resident_models = resident_models
        self._batch = batch
        self._shares = StepShares(room, batch.number)
        self._reported_s = self._spare_reported_s = clock()
        self._previews: StepPreviews | None = None
        self._compiled: CompiledModel | None = None

    def run(self) -> None:
        """Runs the steps, and reports their results to the I/O process."""
        try:
            model = cast(SteppedModel, self._resident_models.use(self._batch.model))
        except Exception as error:
            # The boundary with the model libraries, as below. An error here fails only these items.
            log.warning("model not loaded", exc_info=True, extra={"model": self._batch.model})
            for slot in range(len(self._batch.items)):
                self._end(slot, error)
            self._send(StepsEnded(self._batch.number, None, self._resident_models.changes()))
            return
        self._run(model)

    def _run(self, model: SteppedModel) -> None:
        failure = None
        if isinstance(model, CompiledModel):
            self._compiled = model
        if isinstance(model, ProgressReporter):
            self._previews = StepPreviews(model, self._batch.number, self._send)
        try:
            self._admit(model, 0, self._batch.items)
            while self._obey(model):
                self._step(model)
        except ConnectionError:
            raise  # the I/O process has hung up
        except Exception as error:
            # The boundary with the model libraries, whose errors fail items but never the process.
            slots = self._shares.slots
            log.warning("step failed", exc_info=True, extra={"items": len(slots)})
            failure = Failure.from_error(error)
            for slot in slots:
                model.drop(slot)
        switched = self._resident_models.changes()
        self._send(StepsEnded(self._batch.number, failure, switched))

    def _obey(self, model: SteppedModel) -> bool:
        """Reads the socket between steps. Returns whether there is another step to run."""
        while select.select([self._connection], [], [], 0)[0]:
            message = read_client_message(self._connection)
            if message is None:
                return False
            if isinstance(message, Evict) or message.number != self._batch.number:
                continue  # meant for a batch that is over
            if isinstance(message, Admit):
                self._admit(model, message.first, message.items)
            elif isinstance(message, Drop):
                self._drop(model, message.slots)
            elif isinstance(message, Preempt):
                self._interrupt(model, message.slots)
            elif isinstance(message, Cancel):
                self._drop(model, self._shares.slots)
            elif isinstance(message, Watch) and self._previews is not None:
                self._previews.watch(message.slots)
        return bool(self._shares.slots)

    def _admit(self, model: SteppedModel, first: int, items: list[PreparedItem]) -> None:
        for slot, item in enumerate(items, first):
            try:
                model.admit(slot, item)
            except PenstockError as error:
                # Otherwise, an item that has the device to itself would wait for room forever.
                if isinstance(error, OutOfMemory) and self._shares.slots:
                    self._send(Preempted(self._batch.number, [slot]))
                else:
                    self._end(slot, error)
            else:
                self._shares.add(slot, item.room or item.length)

    def _drop(self, model: SteppedModel, slots: list[int]) -> None:
        progress = model.progress() if isinstance(model, ProgressReporter) else {}
        for slot in slots:
            if slot in self._shares:
                model.drop(slot)
                steps = progress.get(slot)
                self._end(slot, Canceled(), steps and steps[1] - steps[0])

    def _interrupt(self, model: SteppedModel, slots: list[int]) -> None:
        assert isinstance(model, Resumable), "others are not preempted; this is a bug"
        interrupted = [slot for slot in slots if slot in self._shares]
        written = {slot: model.interrupt(slot) for slot in interrupted}
        chunks = {slot: chunk for slot, chunk in written.items() if chunk is not None}
        self._send(Preempted(self._batch.number, interrupted, chunks))
        for slot in interrupted:
            self._shares.remove(slot)

    def _step(self, model: SteppedModel) -> None:
        began_s = self._clock()
        end = model.step()
        now_s = self._clock()
        self._shares.charge(max(0.0, now_s - began_s), end.work, end.waiting)
        if end.results or now_s - self._spare_reported_s >= SPARE_EVERY_S:
            self._report_spare(now_s)
        if any(isinstance(result, PenstockError) for result in end.results.values()):
            self._report_chunks(model, now_s)  # a result includes them, but a failure does not
        self._end_all(end)
        if self._previews is not None:
            self._previews.report()
        if now_s - self._reported_s >= CHUNKS_EVERY_S:
            self._report_chunks(model, now_s)

    def _report_chunks(self, model: SteppedModel, now_s: float) -> None:
        self._reported_s = now_s
        if chunks := model.take_chunks():
            self._send(Chunks(self._batch.number, chunks))

    def _end_all(self, end: StepEnd) -> None:
        """Reports the items that finished in a step or have to wait."""
        for slot, result in end.results.items():
            self._end(slot, result)
        if end.preempted:
            for slot in end.preempted:
                self._shares.remove(slot)
            self._send(Preempted(self._batch.number, end.preempted))

    def _report_spare(self, now_s: float) -> None:
        self._spare_reported_s = now_s
        if spare_s := self._shares.take_spare_s():
            self._send(Spare(self._batch.number, spare_s))

    def _end(self, slot: int, result: Result | Exception, steps_saved: int | None = None) -> None:
        done = self._shares.end(
            slot,
            result,
            memory_bytes=resident_bytes(),
            loaded_at_s=self._resident_models.loaded_at_s(self._batch.model),
            steps_saved=steps_saved,
        )
        if self._compiled is not None:
            done.eager_calls = self._compiled.take_eager_calls()
        self._send(ItemEnded(self._batch.number, slot, done))

    def _send(self, message: ServerMessage) -> None:
        self._connection.sendall(encode_server_message(message))
