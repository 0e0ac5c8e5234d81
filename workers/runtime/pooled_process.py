"""A place in a worker's pool: the processes that take turns on one device.

A worker's models run in one model process plus a separate process for each custom class. To the
worker, they look like a single process that has loaded some of the models and runs one model's
batches at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import ChainMap
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from shared.errors import PenstockError
from workers.models.base import Prepared
from workers.models.client import (
    Launch,
    OnPreviews,
    OnProgress,
    OnStepMessage,
    ProcessClient,
    RunningBatch,
)
from workers.models.reports import BatchResult, ResidencyReport, StepsEnded
from workers.runtime.kept_process import KeptProcess

_NOTHING = ResidencyReport([])

log = logging.getLogger(__name__)


class _Host(NamedTuple):
    """A process and its models' numbers in the pool."""

    process: KeptProcess
    models: Sequence[int]

    def residency(self) -> ResidencyReport:
        """The models loaded in the process, as last reported, using the process's own numbers."""
        client = self.process.client
        return _NOTHING if client is None else client.residency


class PooledProcess:
    """Processes that take turns on one device.

    Args:
        launches: how to start the processes. Together, they run all models in the pool.
        memory_budget_bytes: total limit for all of the processes' models. 0 means no limit.
    """

    def __init__(self, launches: Sequence[Launch], memory_budget_bytes: int = 0) -> None:
        self._hosts = [
            _Host(
                KeptProcess(partial(launch.start, partial(self._evict_others, launch.models))),
                launch.models,
            )
            for launch in launches
        ]
        self._budget_bytes = memory_budget_bytes
        self._opened = asyncio.Event()
        """Set once each process has started or failed to start."""
        self._current: ProcessClient | None = None
        """The process that is running a batch."""
        self._early_drops: list[int] = []
        """Slots that were dropped from the batch that is about to run."""
        self._used_s: dict[int, float] = {}
        """When each model started its last batch, in monotonic seconds."""
        self._reports = [_NOTHING] * len(self._hosts)
        """Each process's last report whose loads and evictions have been collected."""
        self._changes: ResidencyReport | None = None
        """Loads and evictions since `residency` was last read. None if nothing has changed."""
        self._residency = _NOTHING

    async def ready(self) -> None:
        """Waits until each process can run a batch.

        Raises:
            PenstockError: a process could not be started or restarted.
        """
        await self._opened.wait()
        for host in self._hosts:
            await host.process.ready()

    async def keep_alive(self) -> None:
        """Starts the processes one after another, and restarts them when they die.

        Returns once no process can be started anymore.
        """
        async with asyncio.TaskGroup() as group:
            try:
                for host in self._hosts:
                    group.create_task(host.process.keep_alive())
                    with contextlib.suppress(PenstockError):  # `ready` re-raises it
                        await host.process.ready()
                        await self._evict_if_too_large(host)
            finally:
                self._opened.set()

    async def send(
        self,
        batch: Sequence[Prepared],
        *,
        timeout_s: float,
        model: int = 0,
        on_step: OnProgress | None = None,
        on_previews: OnPreviews | None = None,
    ) -> RunningBatch:
        """Sends a batch of items with the same key as soon as the process can accept it.

        Args:
            batch: at least one item.
            model: the model's number. It is loaded first if it is not resident.
            timeout_s: time limit, counted from when the batch is the oldest one in the process. The
                process is killed once it expires.
            on_step: called after steps, about ten times a second, if the model has steps.
            on_previews: called with the previews that `RunningBatch.watch` requests.

        Raises:
            ModelProcessDied: the process died before accepting the batch.
        """
        host, number = self._find(model)
        client = await self._begin(host, model)
        return await client.send(batch, timeout_s, on_step, number, on_previews)

    async def finish(self, done: BatchResult, model: int) -> None:
        """Makes room on the device if a finished batch for `model` ran out of memory."""
        host, number = self._find(model)
        client = host.process.client
        is_resident = client is None or number in client.residency.resident
        if done.out_of_memory or not is_resident:
            await self._evict_others(host.models)
        if done.switched is not None:
            done.switched = _renumber(done.switched, host.models)

    async def run(
        self,
        batch: Sequence[Prepared],
        *,
        timeout_s: float,
        model: int = 0,
        on_step: OnProgress | None = None,
        on_previews: OnPreviews | None = None,
    ) -> BatchResult:
        """Runs a batch to completion. Same arguments as `send`.

        Raises:
            ModelProcessDied: the process died, hung, or returned a wrong number of results.
        """
        running = await self.send(
            batch, timeout_s=timeout_s, model=model, on_step=on_step, on_previews=on_previews
        )
        done = await running.done
        await self.finish(done, model)
        return done

    def overlaps(self, model: int) -> bool:
        """Returns whether the process accepts a batch for `model` before the last one finishes."""
        host, number = self._find(model)
        client = host.process.client
        return client is not None and number in client.facts.overlapping

    async def run_steps(
        self,
        batch: Sequence[Prepared],
        *,
        timeout_s: float,
        on_message: OnStepMessage,
        model: int = 0,
    ) -> StepsEnded:
        """Runs items, on a model that computes in steps, until none are left.

        More items may be admitted.

        Args:
            batch: at least one item.
            timeout_s: maximum time without a sign of life. The process is killed when the time is
                up.
            on_message: called with each message except the last one.
            model: the model's number. It is loaded first if it is not resident.

        Raises:
            ModelProcessDied: the process died or hung.
        """
        host, number = self._find(model)
        client = await self._begin(host, model)
        ended = await client.run_steps(batch, timeout_s, on_message, number)
        if number not in client.residency.resident:
            await self._evict_others(host.models)
        if ended.switched is not None:
            ended.switched = _renumber(ended.switched, host.models)
        return ended

    def _find(self, model: int) -> tuple[_Host, int]:
        """Returns the process that runs a model, and the model's number in that process."""
        host = next(host for host in self._hosts if model in host.models)
        return host, host.models.index(model)

    async def _begin(self, host: _Host, model: int) -> ProcessClient:
        client = host.process.up()
        self._current, self._early_drops = None, []
        if len(self._hosts) > 1:
            await self._make_room(host, model)
        self._used_s[model] = time.monotonic()
        self._current = client
        if self._early_drops:
            # After the batch's first turn, which is when the process receives the batch.
            asyncio.get_running_loop().call_soon(client.drop, self._early_drops)
        return client

    async def _make_room(self, host: _Host, model: int) -> None:
        """Evicts models from other processes until a non-resident model fits within the budget."""
        if not self._budget_bytes or model in self.resident:
            return
        while (held := self._list_held_by_others(host.models)) and self._is_above_budget(model):
            await self._evict(min(held, key=lambda other: self._used_s.get(other, 0.0)))

    @property
    def resident(self) -> list[int]:
        """The loaded models, without marking their loads as reported, unlike `residency`."""
        return [host.models[number] for host in self._hosts for number in host.residency().resident]

    def _is_above_budget(self, model: int) -> bool:
        parts = [_renumber(host.residency(), host.models) for host in self._hosts]
        sizes = ChainMap(*(part.size_bytes for part in parts))
        return sum(sizes.get(number, 0) for number in {*self.resident, model}) > self._budget_bytes

    async def _evict_if_too_large(self, host: _Host) -> None:
        """Evicts the models of a newly started process if the last one doesn't fit."""
        last = host.models[-1]
        if (
            self._budget_bytes
            and self._list_held_by_others(host.models)
            and self._is_above_budget(last)
        ):
            for model in host.models:
                await self._evict(model)

    def _list_held_by_others(self, models: Sequence[int]) -> list[int]:
        return [number for number in self.resident if number not in models]

    async def _evict(self, model: int) -> None:
        host, number = self._find(model)
        if host.process.client is not None:
            await host.process.client.evict([number], self._collect_changes)

    async def _evict_others(self, models: Sequence[int]) -> bool:
        """Evicts all other models, because the device doesn't have enough memory for all of them.

        Returns whether there were any other models.
        """
        held = self._list_held_by_others(models)
        for model in held:
            log.warning("model evicted to make room for another", extra={"model": model})
            await self._evict(model)
        return bool(held)

    def admit(self, items: Sequence[Prepared]) -> int | None:
        """Adds items to the batch that runs in steps. See ProcessClient.admit."""
        return None if self._current is None else self._current.admit(items)

    def drop(self, slots: Sequence[int]) -> None:
        """Stops these items in the batch that runs in steps. They fail as canceled."""
        if self._current is not None:
            self._current.drop(slots)
        else:
            self._early_drops += slots

    def preempt(self, slots: Sequence[int]) -> None:
        """Interrupts these items in the batch that runs in steps. They come back as preempted."""
        if self._current is not None:
            self._current.preempt(slots)

    def watch(self, slots: Sequence[int]) -> None:
        """Briefly requests previews of these slots in the batch that runs in steps."""
        if self._current is not None:
            self._current.watch(slots)

    @property
    def pid(self) -> int | None:
        """The process ID of the first running process."""
        pids = (host.process.client.pid for host in self._hosts if host.process.client is not None)
        return next((pid for pid in pids if pid), None)

    @property
    def residency(self) -> ResidencyReport:
        """The models loaded in the processes, as last reported.

        Replaced with a new object after each change. Contains the loads and evictions since it was
        last read, so it has one reader, which counts them.
        """
        self._collect_changes()
        if self._changes is not None:
            parts = [_renumber(host.residency(), host.models) for host in self._hosts]
            self._residency, self._changes = (
                ResidencyReport(
                    [model for part in parts for model in part.resident],
                    {model: load_s for part in parts for model, load_s in part.load_s.items()},
                    {model: size for part in parts for model, size in part.size_bytes.items()},
                    self._changes.loads,
                    self._changes.evictions,
                    self._changes.switch_s,
                ),
                None,
            )
        return self._residency

    def _collect_changes(self) -> None:
        """Adds up the loads and evictions in reports that are new."""
        for index, host in enumerate(self._hosts):
            report = host.residency()
            if report is not self._reports[index]:
                self._reports[index] = report
                changes = self._changes or ResidencyReport([])
                changes.loads += report.loads
                changes.evictions += report.evictions
                changes.switch_s += report.switch_s
                self._changes = changes

    @property
    def device_name(self) -> str:
        client = self._hosts[0].process.client
        return "" if client is None else client.facts.device_name

    @property
    def warmup_s(self) -> float:
        """Seconds that the processes took to warm up, one after another."""
        clients = (host.process.client for host in self._hosts)
        return sum(client.facts.warmup_s for client in clients if client is not None)

    @property
    def memory_bytes(self) -> int:
        """Total resident memory of the processes, as last reported."""
        clients = (host.process.client for host in self._hosts)
        return sum(client.memory_bytes for client in clients if client is not None)


def _renumber(report: ResidencyReport, models: Sequence[int]) -> ResidencyReport:
    """Returns a process's report, using the models' numbers in the pool."""
    return ResidencyReport(
        [models[number] for number in report.resident],
        {models[number]: seconds for number, seconds in report.load_s.items()},
        {models[number]: size for number, size in report.size_bytes.items()},
        report.loads,
        report.evictions,
        report.switch_s,
    )
