"""The model processes of a worker: started together, and restarted when they die."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import msgspec

from shared.catalog import Model
from shared.catalog_entry import DEFAULT_STARTUP_S
from shared.concurrency import backoff
from shared.cores import usable_cores
from shared.errors import ConfigurationError, ModelFailed, PenstockError
from workers.models.backend import Backend
from workers.models.base import Prepared
from workers.runtime.child_process import child_environment, spawn
from workers.runtime.client import (
    Launch,
    ModelClient,
    ModelProcessDied,
    OnPreviews,
    OnProgress,
    OnStepMessage,
    Start,
)
from workers.runtime.protocol import BatchResult, ResidencyReport, StepsEnded
from workers.runtime.template import Template, can_fork

__all__ = ["HostedModel", "ModelPool", "ModelProcessDied", "PooledProcess", "ProcessPool"]

CPU_PROCESSES_MAX = 4
START_TRIES = 5
"""The number of starts that may fail in a row after a death before the process is given up."""
FIRST_PAUSE_S, MAX_PAUSE_S = 2.0, 16.0

log = logging.getLogger(__name__)


class HostedModel(NamedTuple):
    """A model of a worker: its catalog entry, the folder with its files, and its backend.

    `backend` is for embeddings only. None means torch in the precision of the entry.
    """

    entry: Model
    folder: Path
    backend: Backend | None = None


class ProcessPool:
    """Model processes that are started together. A context manager that opens when all are ready.

    Args:
        processes: at least one.
        template: what they are forked from, if anything. It is closed after them.
    """

    def __init__(
        self, processes: Sequence[PooledProcess], template: Template | None = None
    ) -> None:
        self.processes = list(processes)
        self.template = template
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        """Starts all processes and waits until each is ready.

        Raises:
            ConfigurationError: the folder, the entry or the device is invalid.
            ModelFailed: a process died or was not ready in time. The message ends with its last
                output.
        """
        self._tasks = [asyncio.create_task(process.keep_alive()) for process in self.processes]
        try:
            await asyncio.gather(*(process.ready() for process in self.processes))
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends all processes. Running batches fail."""
        await self._close()

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.template is not None:
            await self.template.close()

    @property
    def device_name(self) -> str:
        """The name of the GPU, or `cpu`."""
        return self.processes[0].device_name

    @property
    def memory_bytes(self) -> int:
        """Resident memory of all processes together, as last reported."""
        return sum(process.memory_bytes for process in self.processes)


class ModelPool(ProcessPool):
    """All model processes of a worker, each of which serves all models.

    Args:
        models: at least one. A model's position here is the number that `run` takes.
        device: as WorkerSettings.device. `auto` and `cuda` spread the processes over all GPUs.
        processes: how many. 0 means one per GPU, or one per core on a CPU (at most 4).
        threads: of each process on a CPU.
        memory_fraction: the part of a GPU's memory each process may take.
        memory_budget_bytes: for all models of a process together. 0 means no limit.
        start_timeout_s: time limit for a process to get ready.
        command: starts a model process, or the template that they are forked from.
    """

    def __init__(
        self,
        models: Sequence[HostedModel],
        *,
        device: str = "auto",
        processes: int = 0,
        threads: int = 1,
        memory_fraction: float = 1.0,
        memory_budget_bytes: int = 0,
        start_timeout_s: float = DEFAULT_STARTUP_S,
        command: Sequence[str] = (sys.executable, "-m", "workers.runtime.server"),
    ) -> None:
        environment = child_environment(threads)
        options = [f"--threads={threads}", f"--memory-fraction={memory_fraction}"]
        options.append(f"--memory-budget-bytes={memory_budget_bytes}")
        for entry, folder, backend in models:
            options += [f"--model={entry.model_dump_json()}", f"--folder={folder.resolve()}"]
            options.append(f"--backend={msgspec.json.encode(backend).decode()}")
        targets = _devices(device, processes, threads)
        ahead = (*command, *options, f"--device={targets[0]}")
        template = Template(ahead, environment, start_timeout_s) if can_fork() else None
        forked = []
        for target in targets:
            start: Start = partial(spawn, (*command, *options, f"--device={target}"), environment)
            if template is not None:
                start = partial(template.fork, target)
            forked.append(PooledProcess(Launch(start, start_timeout_s)))
        super().__init__(forked, template)


class PooledProcess:
    """One process of the pool, which is replaced when it dies."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._child: ModelClient | None = None
        self._settled = asyncio.Event()
        self._failure: PenstockError | None = None

    async def ready(self) -> None:
        """Waits until the process can run a batch.

        Raises:
            PenstockError: the process could not be started or restarted.
        """
        await self._settled.wait()
        if self._failure is not None:
            raise self._failure

    async def run(
        self,
        batch: Sequence[Prepared],
        *,
        timeout_s: float,
        model: int = 0,
        on_step: OnProgress | None = None,
        on_previews: OnPreviews | None = None,
    ) -> BatchResult:
        """Runs a batch of items with equal keys. Only one batch runs at a time.

        Args:
            batch: at least one item.
            model: the number of the model, which is loaded first if it is not resident.
            timeout_s: counts from when the process has the batch. After it the process is killed.
            on_step: called after steps, about ten times a second, if the model has steps.
            on_previews: called with what `watch` asked for.

        Raises:
            ModelProcessDied: the process died, hung, or returned a wrong number of results.
        """
        if self._child is None or not self._settled.is_set():
            raise ModelProcessDied("the model process is not up")
        return await self._child.run(batch, timeout_s, on_step, model, on_previews)

    async def run_steps(
        self,
        batch: Sequence[Prepared],
        *,
        timeout_s: float,
        on_message: OnStepMessage,
        model: int = 0,
    ) -> StepsEnded:
        """Runs items on a model that computes in steps, until none is left. More may be admitted.

        Args:
            batch: at least one item.
            timeout_s: the longest time without a message. After it the process is killed.
            on_message: called with each message but the last one.
            model: the number of the model, which is loaded first if it is not resident.

        Raises:
            ModelProcessDied: the process died or hung.
        """
        if self._child is None or not self._settled.is_set():
            raise ModelProcessDied("the model process is not up")
        return await self._child.run_steps(batch, timeout_s, on_message, model)

    def admit(self, items: Sequence[Prepared]) -> int | None:
        """Adds items to the batch that runs in steps, as ModelClient.admit."""
        return None if self._child is None else self._child.admit(items)

    def drop(self, slots: Sequence[int]) -> None:
        """Stops these items of the batch that runs in steps. They fail as canceled."""
        if self._child is not None:
            self._child.drop(slots)

    def preempt(self, slots: Sequence[int]) -> None:
        """Interrupts these items of the batch that runs in steps. They come back as preempted."""
        if self._child is not None:
            self._child.preempt(slots)

    def cancel(self) -> None:
        """Stops the running batch, if any, after its current step.

        Items without a result fail as Canceled.
        """
        if self._child is not None:
            self._child.cancel()

    def watch(self, slots: Sequence[int]) -> None:
        """Has previews of these slots of the running batch drawn, for a moment."""
        if self._child is not None:
            self._child.watch(slots)

    async def keep_alive(self) -> None:
        """Starts the process, and restarts it when it dies.

        Returns when it can't be started any more.
        """
        try:
            await self._keep_alive()
        finally:
            self._failure = self._failure or ModelFailed(
                "the model process is not kept alive any more"
            )
            self._settled.set()

    async def _keep_alive(self) -> None:
        failures, pauses = 0, backoff(FIRST_PAUSE_S, MAX_PAUSE_S)
        while True:
            try:
                self._child = await ModelClient.start(self._launch)
            except PenstockError as error:
                failures += 1
                if (
                    self._child is None
                    or isinstance(error, ConfigurationError)
                    or failures == START_TRIES
                ):
                    self._failure = error
                    return
                log.error(
                    "model process could not start",
                    extra={"reason": error.message, "try": failures},
                )
                await asyncio.sleep(next(pauses))
                continue
            failures, pauses = 0, backoff(FIRST_PAUSE_S, MAX_PAUSE_S)
            self._log_ready(self._child)
            self._settled.set()
            reason = await self._child.serve(on_end=self._settled.clear)
            log.error("model process ended", extra={"reason": reason})

    def _log_ready(self, child: ModelClient) -> None:
        facts = child.facts
        log.info(
            "model process ready",
            extra={
                "pid": child.pid,
                "device": facts.device_name,
                "load_s": round(facts.load_s, 3),
                "warmup_s": round(facts.warmup_s, 3),
                "memory_bytes": facts.memory_bytes,
                "resident": child.residency.resident,
                "size_bytes": child.residency.size_bytes,
            },
        )

    @property
    def pid(self) -> int | None:
        """The id of the current process."""
        return self._child.pid if self._child else None

    @property
    def residency(self) -> ResidencyReport:
        """The models it holds, as last reported."""
        return self._child.residency if self._child else ResidencyReport([])

    @property
    def device_name(self) -> str:
        """The device it runs on."""
        return self._child.facts.device_name if self._child else ""

    @property
    def memory_bytes(self) -> int:
        """Its resident memory, as last reported."""
        return self._child.memory_bytes if self._child else 0


def _devices(device: str, processes: int, threads: int) -> list[str]:
    """The device of each process. Does not use torch, which this process must not import."""
    gpus = [f"cuda:{number}" for number in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]
    if device in ("auto", "cuda") and gpus:
        count = processes or len(gpus)
        return [gpus[number % len(gpus)] for number in range(count)]
    if device in ("auto", "cpu"):
        return ["cpu"] * (processes or max(1, min(CPU_PROCESSES_MAX, usable_cores() // threads)))
    return [device] * (processes or 1)
