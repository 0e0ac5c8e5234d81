"""Texts that an engine generates concurrently: admits, reports, drops, and interrupts them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial

from shared.errors import Canceled, ModelFailed, PenstockError
from shared.models.tasks.text import TokenChunk
from workers.models.base import OutOfMemory, Prepared, PreparedPrompt
from workers.models.client import ModelProcessDied, OnStepMessage
from workers.models.engines.dialect import EngineDialect
from workers.models.engines.generation import EngineGeneration
from workers.models.engines.process import EngineProcess
from workers.models.engines.slots import AdapterPermits, EngineSlots, ReadingPermits
from workers.models.reports import Chunks, ItemEnded, Preempted, Spare, StepMessage
from workers.models.step_shares import StepRoom, StepShares

CHUNKS_EVERY_S = 0.05
"""Interval between chunks, so that a text's readers get at most 20 events per second."""
GATHER_S = 0.02
"""Maximum time to wait after a first token for the step's other texts, whose tokens go into the
same message.
"""
SPARE_EVERY_S = 0.5


class Engine:
    """A running engine, and the state of its slots.

    Args:
        slots: how many texts the engine generates at a time.
        part_tokens: number of prompt tokens that the engine reads at a time.
        shares_with_all: True if all owners share the results for identical prefixes.
    """

    def __init__(
        self,
        process: EngineProcess,
        dialect: EngineDialect,
        slots: int,
        part_tokens: int,
        *,
        shares_with_all: bool,
    ) -> None:
        self.process = process
        self.dialect = dialect
        self.part_tokens = part_tokens
        self.shares_with_all = shares_with_all
        self.slots = EngineSlots(slots)
        self.permits = ReadingPermits(part_tokens)
        self.adapter_permits = AdapterPermits()
        self.places = asyncio.Semaphore(slots)
        self.loaded_at_s = time.time()

    async def compute(self, generation: EngineGeneration, run: EngineSteps) -> None:
        """Reads the prompt of one text and generates the text, once a slot is free."""
        async with self.places:
            await generation.compute(
                self.dialect,
                self.process.post,
                self.slots,
                self.permits,
                self.adapter_permits,
                self.part_tokens,
                run.note_work,
            )


class EngineSteps:
    """One run of an engine, until no texts remain.

    Args:
        room: room for the model in this process.
        memory_bytes: the engine's memory, reported with each item.
        on_message: called with the items' results, but never during a call to one of these methods.
    """

    def __init__(
        self, engine: Engine, room: StepRoom, memory_bytes: int, on_message: OnStepMessage
    ) -> None:
        self._engine = engine
        self._memory_bytes = memory_bytes
        self._on_message = on_message
        self._shares = StepShares(room)
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._items: dict[int, EngineGeneration] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._slots = 0
        """Number of items admitted so far."""
        self._step: dict[int, int] = {}
        """Tokens computed since the last charge, by slot."""
        self._steps = 1
        """Number of steps in `_step`: more than 1 if tokens from several steps arrived together."""
        self._step_began_s = self._alive_s = time.monotonic()
        self._reported_s = self._spare_reported_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._first_s = 0.0
        """When the first token since the last report was read."""
        self._is_gathering = False
        self._fault: Exception | None = None

    async def run(self, batch: Sequence[Prepared], timeout_s: float) -> None:
        """Runs items until none remain.

        Raises:
            ModelProcessDied: the engine has died, or did not respond for `timeout_s`.
        """
        self.admit(batch)
        try:
            await asyncio.sleep(0)  # items that can't be admitted are reported
            while self._items:
                self._changed.clear()
                if self._fault is not None:
                    raise self._fault
                await self._wait(timeout_s)
                if not self._items:
                    await asyncio.sleep(0)  # the last messages are delivered, and more admitted
            if self._fault is not None:
                raise self._fault
        finally:
            for task in self._tasks.values():
                task.cancel()
            if self._timer is not None:
                self._timer.cancel()
            self._report_chunks()
            self._items.clear()

    async def _wait(self, timeout_s: float) -> None:
        until_s = self._alive_s + timeout_s
        try:
            async with asyncio.timeout(max(0.0, until_s - time.monotonic())):
                await self._changed.wait()
        except TimeoutError as error:
            if self._alive_s + timeout_s <= time.monotonic():
                self._engine.process.kill()
                reason = f"the engine did not respond for {timeout_s:g} s"
                raise ModelProcessDied(reason) from error

    def admit(self, items: Sequence[Prepared]) -> int:
        """Adds items. Returns the first item's slot."""
        first, self._slots = self._slots, self._slots + len(items)
        if not self._items:
            self._step_began_s = self._alive_s = time.monotonic()
        for slot, item in enumerate(items, first):
            try:
                generation = self._open(slot, item)
            except PenstockError as error:
                self._report_end(slot, error)
                continue
            self._shares.add(slot, item.room or item.length)
            self._items[slot] = generation
            task = asyncio.create_task(self._engine.compute(generation, self))
            self._tasks[slot] = task
            task.add_done_callback(partial(self._on_done, slot))
        self._changed.set()
        return first

    def _open(self, slot: int, item: Prepared) -> EngineGeneration:
        if not isinstance(item, PreparedPrompt):
            raise ModelFailed(f"a text model can't process {type(item).__name__}")
        if self._engine.shares_with_all:
            item.owner = "*"
        dialect = self._engine.dialect
        if item.adapter and item.adapter not in dialect.adapters:
            raise ModelFailed(f"the engine has no adapter {item.adapter!r}; this is a bug")
        # A request's additional choices cost the same as if they shared the prompt's slot.
        is_read = any(
            running.item.cache_owner == item.cache_owner and running.item.ids == item.ids
            for running in self._items.values()
            if item.cache_owner
        )
        generation = EngineGeneration(slot, item, dialect.vocabulary)
        if is_read:
            generation.share_prompt()
        return generation

    def drop(self, slots: Sequence[int]) -> None:
        """Stops items that are still running. They fail as canceled."""
        for slot in slots:
            if self._remove(slot) is not None:
                self._report_end(slot, Canceled())

    def preempt(self, slots: Sequence[int]) -> None:
        """Interrupts items that are still running.

        They are returned with the tokens generated so far.
        """
        chunks: dict[int, TokenChunk] = {}
        removed = []
        for slot in slots:
            generation = self._remove(slot)
            if generation is None:
                continue
            removed.append(slot)
            if (chunk := generation.chunk()) is not None:
                chunks[slot] = chunk
            self._shares.remove(slot)
        self._report(Preempted(0, removed, chunks))

    def _remove(self, slot: int) -> EngineGeneration | None:
        """Removes an item, and stops its computation."""
        generation = self._items.pop(slot, None)
        if generation is not None:
            self._charge()
            if slot in self._tasks:  # otherwise the engine has just died
                self._tasks[slot].cancel()
            self._changed.set()
        return generation

    def fail(self, reason: str) -> None:
        self._fault = self._fault or ModelProcessDied(reason)
        self._changed.set()

    def note_work(self, slot: int, tokens: int, steps: int) -> None:
        """Records an item's tokens that the engine has read or generated in a number of steps.

        Each engine step computes every item once, so when an item comes up a second time, the
        previous step is over.
        """
        self._alive_s = time.monotonic()
        if slot in self._step:
            self._charge()
        self._step[slot] = tokens
        self._steps = max(self._steps, steps)
        if self._timer is None:
            self._first_s = self._alive_s
            due_s = self._reported_s + CHUNKS_EVERY_S - self._alive_s
            self._timer = self._loop.call_later(max(0.0, due_s), self._on_timer)
        elif self._is_gathering and self._is_step_whole():
            self._timer.cancel()
            self._is_gathering = False
            self._timer = self._loop.call_later(0.0, self._on_gathered)

    def _charge(self) -> None:
        now_s = time.monotonic()
        step_s, work = (now_s - self._step_began_s) / self._steps, sum(self._step.values())
        for _ in range(self._steps):
            self._shares.charge(step_s, work=-(-work // self._steps))
        self._step, self._steps, self._step_began_s = {}, 1, now_s

    def _on_timer(self) -> None:
        left_s = self._first_s + GATHER_S - time.monotonic()
        if left_s <= 0 or self._is_step_whole():
            self._on_gathered()
        else:
            self._is_gathering = True
            self._timer = self._loop.call_later(left_s, self._on_gathered)

    def _on_gathered(self) -> None:
        self._timer, self._is_gathering = None, False
        self._report_chunks()
        if self._reported_s - self._spare_reported_s >= SPARE_EVERY_S:
            self._report_spare()

    def _is_step_whole(self) -> bool:
        """Returns whether the step has computed every text in progress."""
        return all(
            slot in self._step or generation.is_waiting for slot, generation in self._items.items()
        )

    def _on_done(self, slot: int, task: asyncio.Task[None]) -> None:
        del self._tasks[slot]
        generation = self._items.get(slot)
        if task.cancelled() or generation is None:
            if not task.cancelled():
                task.exception()  # the item has since been dropped
            return
        error = task.exception()
        if isinstance(error, OSError):
            self.fail(f"the engine closed the connection: {type(error).__name__}")
            return
        if isinstance(error, OutOfMemory) and len(self._items) > 1:
            self.preempt([slot])
            return
        self._charge()
        if error is not None:
            self._report_chunks()  # a result includes the chunks, but a failure does not
            if not isinstance(error, Exception):
                raise error
        del self._items[slot]
        self._report_end(slot, error or generation)
        self._changed.set()

    def _report_end(self, slot: int, outcome: Exception | EngineGeneration) -> None:
        self._report_spare()
        done = self._shares.end(
            slot,
            outcome if isinstance(outcome, Exception) else outcome.result(),
            memory_bytes=self._memory_bytes,
            loaded_at_s=self._engine.loaded_at_s,
        )
        self._report(ItemEnded(0, slot, done))

    def _report_spare(self) -> None:
        self._spare_reported_s = time.monotonic()
        if spare_s := self._shares.take_spare_s():
            self._report(Spare(0, spare_s))

    def _report_chunks(self) -> None:
        self._reported_s = time.monotonic()
        chunks = {
            slot: chunk
            for slot, generation in self._items.items()
            if generation.item.is_streamed and (chunk := generation.chunk()) is not None
        }
        if chunks:
            self._report(Chunks(0, chunks))

    def _report(self, message: StepMessage) -> None:
        # Not immediately, because `admit`'s caller learns its items' slots only when it returns.
        self._loop.call_soon(self._deliver, message)

    def _deliver(self, message: StepMessage) -> None:
        try:
            self._on_message(message)
        except Exception as error:
            # Any error ends the run, because nothing else would report it.
            self._fault = self._fault or error
            self._changed.set()
