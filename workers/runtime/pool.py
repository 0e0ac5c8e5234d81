"""A worker's model processes, which are started together and restarted when they die."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, Self

import msgspec

from shared.errors import ConfigurationError
from shared.models.catalog import Model
from shared.models.entry import DEFAULT_STARTUP_S
from shared.process.cores import usable_cores
from workers.models.backend import Backend
from workers.models.client import Launch, MakeRoom, StartClient
from workers.models.gpus import count_gpus
from workers.runtime.child_process import child_environment, spawn
from workers.runtime.client import ModelClient, Start
from workers.runtime.pooled_process import PooledProcess
from workers.runtime.template import EarlyTemplate, Template, can_fork
from workers.tasks import WORKER_TASKS
from workers.tasks.base import Resources, WorkerTask

CPU_PROCESSES_MAX = 4
COMMAND = (sys.executable, "-m", "workers.runtime.server")


class HostedModel(NamedTuple):
    """One of a worker's models: its catalog entry, the folder with its files, and its backend.

    `backend` applies only to embeddings. None means torch in the entry's precision.
    """

    entry: Model
    folder: Path
    backend: Backend | None = None


class ProcessPool:
    """Model processes that start together.

    A context manager that enters its block once all processes are ready.

    Args:
        processes: at least one process.
        template: the template that the processes are forked from, if any. It is closed after the
            processes.
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
            ConfigurationError: the folder, the entry, or the device is invalid.
            ModelFailed: a process died or was not ready in time. The message ends with the
                process's last output.
        """
        self._tasks = [asyncio.create_task(process.keep_alive()) for process in self.processes]
        try:
            await asyncio.gather(*(process.ready() for process in self.processes))
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._close()

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.template is not None:
            await self.template.close()

    @property
    def device_name(self) -> str:
        """The GPU's name, or `cpu`."""
        return self.processes[0].device_name

    @property
    def warmup_s(self) -> float:
        """Seconds that the slowest place took to warm up."""
        return max(process.warmup_s for process in self.processes)

    @property
    def memory_bytes(self) -> int:
        """Total resident memory of all processes, as last reported."""
        return sum(process.memory_bytes for process in self.processes)


class ModelPool(ProcessPool):
    """The processes that run a worker's models.

    Each place in the pool runs all of the models. Our own models share one model process, while
    each custom class has a separate process.

    Args:
        models: at least one. A model's index here is the number that is passed to `run`.
        device: as in WorkerSettings.device. `auto` and `cuda` spread the places over all GPUs that
            CUDA shows to this process.
        processes: number of places. 0 means one per GPU (or per `gpu.count` GPUs) or, on a CPU, one
            per core (at most 4).
        threads: threads per process on a CPU.
        memory_fraction: the fraction of a GPU's memory that each process may use.
        memory_budget_bytes: total limit for all models in a place. 0 means no limit.
        start_timeout_s: time limit for a process to become ready.
        command: starts a model process, or the template that model processes are forked from.
        early: a template that was started with the same command and has imported libraries since.
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
        command: Sequence[str] = COMMAND,
        early: EarlyTemplate | None = None,
    ) -> None:
        gpus_each = models[0].entry.gpu.count
        targets = assign_devices(device, processes, threads, count_gpus(), gpus_each)
        numbers = range(len(models))
        foreign = [number for number in numbers if _has_own_process(models[number])]
        own = [number for number in numbers if number not in foreign]
        ours = None
        if own:
            options = [f"--threads={threads}", f"--memory-fraction={memory_fraction}"]
            options.append(f"--memory-budget-bytes={memory_budget_bytes}")
            options += ["--deny-inspection"] if foreign else []
            for number in own:
                options += _describe(models[number])
            ours = _ModelProcesses(
                (*command, *options), threads, start_timeout_s, targets[0], early
            )
        places = []
        for target in targets:
            launches = [] if ours is None else [Launch(ours.start_on(target), own)]
            resources = Resources(device=target, threads=threads, memory_fraction=memory_fraction)
            for number in foreign:
                task, (entry, folder, _) = _task_of(models[number]), models[number]
                start = task.start_own_process(entry, folder, resources, start_timeout_s)
                launches.append(Launch(start, [number]))
            places.append(PooledProcess(launches, memory_budget_bytes))
        super().__init__(places, None if ours is None else ours.template)


def _task_of(model: HostedModel) -> WorkerTask:
    return WORKER_TASKS[model.entry.task]


def _has_own_process(model: HostedModel) -> bool:
    return _task_of(model).has_own_process(model.entry)


def _describe(model: HostedModel) -> list[str]:
    """Returns a model process's command-line options for one model."""
    return [
        f"--model={model.entry.model_dump_json()}",
        f"--folder={model.folder.resolve()}",
        f"--backend={msgspec.json.encode(model.backend).decode()}",
    ]


def early_template(entries: Sequence[Model], threads: int) -> EarlyTemplate | None:
    """Returns a template for models whose files are not known yet, or None if it saves nothing.

    There is none if a model's backend is measured, because imports would disturb the measurement.
    """
    tasks = [WORKER_TASKS[entry.task] for entry in entries]
    modules = {
        task.slow_module: None
        for task, entry in zip(tasks, entries, strict=True)
        if task.slow_module and not task.has_own_process(entry)
    }
    is_measured = any(
        task.measures_backends(entry) for task, entry in zip(tasks, entries, strict=True)
    )
    if not modules or is_measured or not can_fork():
        return None
    return EarlyTemplate(COMMAND, list(modules), child_environment(threads))


class _ModelProcesses:
    """Starts model processes with one command.

    Args:
        threads: threads per process on a CPU.
        device: the device that the template preloads for.
    """

    def __init__(
        self,
        command: Sequence[str],
        threads: int,
        timeout_s: float,
        device: str,
        early: EarlyTemplate | None,
    ) -> None:
        self._command = command
        self._environment = child_environment(threads)
        self._timeout_s = timeout_s
        self.template: Template | None = None
        """The template that the processes are forked from. None if this system can't fork
        processes.
        """
        if can_fork():
            ahead = (*command, f"--device={device}")
            self.template = Template(ahead, self._environment, timeout_s, early)

    def start_on(self, device: str) -> StartClient:
        """Returns a function that starts a model process on a device."""
        start: Start = partial(spawn, (*self._command, f"--device={device}"), self._environment)
        if self.template is not None:
            start = partial(self.template.fork, device)

        async def start_client(make_room: MakeRoom) -> ModelClient:
            return await ModelClient.start(start, self._timeout_s)

        return start_client


def assign_devices(
    device: str, processes: int, threads: int, gpu_count: int, gpus_each: int = 1
) -> list[str]:
    """Returns each place's device, which is the first one if a place uses several GPUs.

    Args:
        processes: number of places; 0 means as many as fit.
        gpu_count: number of GPUs that this process can see.
        gpus_each: number of GPUs that each place uses.

    Raises:
        ConfigurationError: there are some GPUs, but not enough for one place.
    """
    gpus = [f"cuda:{first}" for first in range(0, gpu_count - gpus_each + 1, gpus_each)]
    if device in ("auto", "cuda") and gpu_count:
        if not gpus:
            raise ConfigurationError(
                f"gpu.count: {gpus_each} exceeds the number of GPUs that the worker can see "
                f"({gpu_count})",
                field="gpu.count",
            )
        count = processes or len(gpus)
        return [gpus[number % len(gpus)] for number in range(count)]
    if device in ("auto", "cpu"):
        return ["cpu"] * (processes or max(1, min(CPU_PROCESSES_MAX, usable_cores() // threads)))
    return [device] * (processes or 1)
