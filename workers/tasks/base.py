"""The worker's side of a task: how the task's items are prepared and computed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from shared.models.catalog import Model
from workers.models.backend import Backend
from workers.models.base import IsClose, LoadedModel, OpenGguf, Preparer
from workers.models.client import StartClient


@dataclass(frozen=True, kw_only=True)
class Resources:
    """The resources a model runs on.

    `device` is `cpu`, `cuda`, `cuda:N`, or `auto`. `threads` applies only on a CPU.
    `memory_fraction` is the fraction of a GPU's memory that the process may use. `backend` computes
    embeddings. None means torch in the entry's precision.
    """

    device: str
    backend: Backend | None = None
    threads: int = 1
    memory_fraction: float = 1.0


class WorkerTask(ABC):
    """The models for one task. No method except `model` imports torch."""

    optimizer: ClassVar[str]
    """The module in workers/optimize whose `make_variants` function creates the variants.
    """
    slow_module: ClassVar[str | None] = None
    """The module that `model` imports with all its libraries, which takes seconds.

    A worker imports it while it downloads weights. None means that it doesn't.
    """
    variants: ClassVar[tuple[str, ...]]
    """Names of the variants that `penstock optimize` can create, in the order it tries them."""
    variant_prefix: ClassVar[str]
    """The prefix of a variant's name in its manifest."""

    @abstractmethod
    def usual_variants(self, *, has_gpu: bool, cuts: bool) -> tuple[str, ...]:
        """Returns the variants to create if the command line specifies none.

        Args:
            has_gpu: True if this machine has a GPU.
            cuts: True if neurons or heads will be pruned.
        """

    def measures_backends(self, entry: Model) -> bool:
        """Returns whether a worker measures which backend is fastest (workers/autotune).

        By default: no.
        """
        return False

    def computes_steps(self, entry: Model, folder: Path) -> bool:
        """Returns whether this model batches continuously: items join and leave between steps.

        If so, its class is a SteppedModel. By default: no.
        """
        return False

    def has_own_process(self, entry: Model) -> bool:
        """Returns whether this model runs in an external process (`start_own_process`).

        By default: no.
        """
        return False

    def start_own_process(
        self, entry: Model, folder: Path, resources: Resources, timeout_s: float
    ) -> StartClient:
        """Returns a function that starts the model's process, if `has_own_process`.

        Args:
            resources: the resources the process runs on.
            timeout_s: time limit for the process to become ready for the first time.
        """
        raise NotImplementedError("models for this task run in a model process")

    def prepares_on_thread(self, entry: Model) -> bool:
        """Returns whether preparing an item takes milliseconds, which would block the event loop.

        By default: no.
        """
        return False

    def comparer(self, entry: Model, folder: Path) -> IsClose | None:
        """Returns a function that compares two results, if only the model has the code for that.

        None, the default, means that either the API compares them (api/dispatch/closeness.py) or
        nothing does.
        """
        return None

    def provide(self, entry: Model, folder: Path) -> None:  # noqa: B027
        """Creates everything a model needs on this machine in addition to its folder.

        This may take minutes.

        By default: nothing.

        Raises:
            ConfigurationError: something the model needs can't be created.
        """

    def more_weights(self, entry: Model) -> Sequence[Path]:
        """Returns local folders with weights that a model loads in addition to its own.

        By default: none.
        """
        return ()

    def open_gguf(self, entry: Model) -> OpenGguf | None:
        """Returns a function that creates a model folder from a GGUF file.

        None, the default, means a function for torch.
        """
        return None

    @abstractmethod
    def preparer(self, entry: Model, folder: Path) -> Preparer:
        """Returns the preparer for the inputs of a model whose files are in `folder`.

        Raises:
            ConfigurationError: the folder does not contain a model for this task.
        """

    @abstractmethod
    def model(self, entry: Model, folder: Path, resources: Resources) -> LoadedModel:
        """Returns the model, which is not loaded yet.

        Raises:
            ConfigurationError: the folder does not contain a model for this task, or the entry
                requires a backend that was not passed.
        """
