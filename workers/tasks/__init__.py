"""The tasks that a worker performs.

Each module is named after the corresponding task in shared.models.tasks.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from shared.models.catalog import Model
from shared.models.tasks import TASKS
from workers.models.backend import Backend
from workers.models.base import LoadedModel, Preparer
from workers.tasks.base import Resources, WorkerTask

WORKER_TASKS: dict[str, WorkerTask] = {
    name: import_module(f"{__name__}.{name}").TASK for name in TASKS
}


def preparer_for(entry: Model, folder: Path) -> Preparer:
    """Returns the preparer for the inputs of `entry`, whose files are in `folder`.

    Raises:
        ConfigurationError: the folder does not contain a model for this task.
    """
    return WORKER_TASKS[entry.task].preparer(entry, folder)


def model_for(
    entry: Model,
    folder: Path,
    device: str,
    *,
    backend: Backend | None = None,
    threads: int = 1,
    memory_fraction: float = 1.0,
) -> LoadedModel:
    """Returns the model for `entry`, which is not loaded yet.

    The other arguments are the same as in Resources.

    Raises:
        ConfigurationError: the folder does not contain a model for this task, or the entry requires
            a backend that was not passed.
    """
    resources = Resources(
        device=device, backend=backend, threads=threads, memory_fraction=memory_fraction
    )
    return WORKER_TASKS[entry.task].model(entry, folder, resources)
